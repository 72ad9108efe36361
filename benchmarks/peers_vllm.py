"""The half of `peers.py` that runs in vLLM's own environment: load once, then answer prompts as they are asked.

    ENVIRONMENT/bin/python benchmarks/peers_vllm.py

Speaks JSON, one object a line. The first line in is the job; what comes back is `{"ready": {versions}}`. Each later
line is a request, `{"prompt": ids, "temperature": t, "max_tokens": n, "seed": s}`, answered by `{"token_ids": ids,
"seconds": s, "num_rounds": n}`; rounds are the engine's steps after the prefill. The end of the input ends the process.

Knows nothing of headstart and imports nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, TextIO

STEPS = "vllm:iteration_tokens_total"
"""The histogram that counts the engine's steps."""


def serve(lines: Iterable[str], replies: TextIO, load: Callable[[dict[str, Any]], Any]) -> None:
    """Read the job, say that it is loaded, and answer every request. `load` makes what has `versions` and `answer`."""
    requests = iter(lines)
    engine = load(json.loads(next(requests)))
    _reply(replies, {"ready": engine.versions})
    for line in requests:
        _reply(replies, engine.answer(json.loads(line)))


def _reply(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


class VllmEngine:
    """vLLM as its `LLM` class has it, one request at a time."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling_params = SamplingParams
        self._stop_token_ids = job["stop_token_ids"]
        self.versions = {name: version(name) for name in (job["package"], "torch", "transformers")}
        self.llm = LLM(
            model=job["target"],
            skip_tokenizer_init=True,  # ids go in and ids come out
            dtype=job["dtype"],
            max_model_len=job["max_length"],
            max_num_seqs=1,
            enable_prefix_caching=False,  # a prompt that was seen before is to cost what it did then
            enforce_eager=job["eager"],
            disable_log_stats=False,
            speculative_config=job["speculative"],
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        greedy = request["temperature"] == 0
        params = self._sampling_params(
            temperature=request["temperature"],
            seed=None if greedy else request["seed"],
            max_tokens=request["max_tokens"],
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,  # the end tokens of the job are the only ones
            detokenize=False,
        )
        steps_before = self._num_steps()
        start = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": request["prompt"]}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "seconds": seconds,
            "num_rounds": self._num_steps() - steps_before - 1,
        }

    def _num_steps(self) -> int:
        """A vLLM that has renamed its counter must not look like one that takes no steps."""
        for metric in self.llm.get_metrics():
            if metric.name == STEPS:
                return int(metric.count)
        raise ValueError(f"this vLLM has no counter {STEPS}")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed, by vLLM's processes too, goes to the log
    serve(sys.stdin, replies, VllmEngine)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
