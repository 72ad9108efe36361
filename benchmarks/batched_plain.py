"""Plain decoding, ours against transformers' `generate`, at several batch sizes: the fairness of the baseline.

    python benchmarks/batched_plain.py --target models/smollm2-135m --dtype bfloat16

Prompts of one length, so that neither side pads; greedy, no early end; interleaved, medians of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infer.engine import Engine
from infer.machine import load_average, machine_facts
from infer.sampling import SamplingParams
from infer.target import TargetModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="models/smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    target = TargetModel.load(args.target, dtype=args.dtype)
    facts = machine_facts()
    print(f"{target.name}, {args.dtype}, {facts['cpu']}, {facts['threads']} threads, load {load_average()}")
    print("batch   plain tokens/s   stock tokens/s   ratio   identical")
    for batch in args.batch:
        prompts = [[(37 * row + 11 * i) % 40000 + 10 for i in range(args.prompt_tokens)] for row in range(batch)]
        params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
        engine = Engine(target, max_requests=batch)
        plain_seconds, stock_seconds = [], []
        for _ in range(args.repeats + 1):  # the first round warms both up
            start = time.perf_counter()
            completions = engine.generate(prompts, params)
            plain_seconds.append(time.perf_counter() - start)
            with target.stock() as model, torch.inference_mode():
                start = time.perf_counter()
                output = model.generate(
                    torch.tensor(prompts),
                    attention_mask=torch.ones(batch, args.prompt_tokens, dtype=torch.long),
                    max_new_tokens=args.max_tokens,
                    min_new_tokens=args.max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                stock_seconds.append(time.perf_counter() - start)
        same = sum(
            list(completion.token_ids) == row[args.prompt_tokens :].tolist()
            for completion, row in zip(completions, output, strict=True)
        )
        num_tokens = batch * args.max_tokens
        plain = num_tokens / statistics.median(plain_seconds[1:])
        stock = num_tokens / statistics.median(stock_seconds[1:])
        print(f"{batch:5d} {plain:16.1f} {stock:16.1f} {plain / stock:7.2f}   {same} of {batch}")


if __name__ == "__main__":
    main()
