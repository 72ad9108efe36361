"""`headstart synth`: training conversations written by the target itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli.common import output_file

if TYPE_CHECKING:
    from train.corpus.conversations import Conversation
    from train.corpus.synth import SynthesisReport, Synthesizer

HELP = "let the target write its own training conversations (or answer the requests of a file anew)"
EXAMPLE = "headstart synth --target models/smollm2-135m --out data/smollm2.jsonl --num 1000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder or name of the target model")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines to write; continued if it exists")
    parser.add_argument("--num", type=int, default=None, help="conversations to keep (default 1000, or all requests)")
    parser.add_argument("--requests", help="take the user turns from this file or data set, and write only answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-prompt-tokens", type=int, default=96)
    parser.add_argument("--max-answer-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="conversations generated together")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="share of answers at temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="temperature of the other answers")
    parser.add_argument("--prompt-temperature", type=float, default=0.9, help="temperature of the user turns")
    parser.add_argument("--opening-share", type=float, default=0.5, help="share of user turns begun for the target")
    parser.add_argument("--second-turn-share", type=float, default=0.15, help="share of two-turn conversations")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--json", type=output_file, help="write the counts to this file")


def run(args: argparse.Namespace) -> int:
    from infer.chat import user_turn_prefix
    from infer.cli import common
    from infer.cli.common import write_json
    from infer.engine import Engine
    from infer.target import TargetModel
    from train.corpus.conversations import load_conversations
    from train.corpus.synth import SynthesisConfig, Synthesizer

    requests = None
    if args.requests:
        requests, load_report = load_conversations(args.requests, require_answer=False)
        print(load_report.summary())
    config = SynthesisConfig(
        num_conversations=_num_wanted(args.num, requests),
        seed=args.seed,
        max_prompt_tokens=args.max_prompt_tokens,
        max_answer_tokens=args.max_answer_tokens,
        prompt_temperature=args.prompt_temperature,
        greedy_share=args.greedy_share,
        temperature=args.temperature,
        opening_share=args.opening_share,
        second_turn_share=args.second_turn_share,
    )
    if args.batch < 1:
        raise ValueError(f"--batch must be at least 1, given {args.batch}")
    common.quiet_loading()
    target = TargetModel.load(args.target, dtype=args.dtype, device=args.device)
    max_length = config.max_sequence_length(len(user_turn_prefix(target.tokenizer)))
    if requests is not None:
        max_length = max(max_length, 2048)
    max_length = min(max_length, target.max_length)
    synthesizer = Synthesizer(
        Engine(target, max_requests=args.batch, max_length=max_length),
        target.tokenizer,
        config,
        args.out,
        requests=requests,
        target_fingerprint=target.fingerprint,
        rows_per_chunk=4 * args.batch,
        max_sequence_length=max_length,
    )
    report = _run_with_progress(synthesizer, config.num_conversations)
    print(report.summary())
    write_json(args.json, asdict(report))
    if report.num_kept == 0:
        raise ValueError(f"no conversation passed the filters:\n{report.summary()}")
    return 0


def _num_wanted(given: int | None, requests: Sequence[Conversation] | None) -> int:
    if given is not None:
        return given
    return 1000 if requests is None else len(requests)


def _run_with_progress(synthesizer: Synthesizer, total: int) -> SynthesisReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("conversations"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens_per_second]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    started, num_tokens = time.perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        task = progress.add_task("", total=total, completed=len(synthesizer.file.rows), tokens_per_second=0.0)

        def on_tokens(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count
            progress.update(task, tokens_per_second=num_tokens / (time.perf_counter() - started))

        return synthesizer.run(
            on_tokens=on_tokens, on_chunk=lambda report: progress.update(task, completed=report.num_kept)
        )
