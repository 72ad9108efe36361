"""The half of `vllm_acceptance.py` that runs in vLLM's own environment: answer prompts, and say what was accepted.

    ENVIRONMENT/bin/python benchmarks/vllm_runner.py job.json result.json

Knows nothing of headstart and imports nothing of it: whatever it needs stands in the job, prompts as token ids.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

COUNTERS = {
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
"""Our names of vLLM's counters. `accepted[i]` counts the drafts of which more than i tokens were accepted."""


def main(job_path: Path, result_path: Path) -> None:
    job = json.loads(job_path.read_text(encoding="utf-8"))
    result_path.write_text(json.dumps(run(job)) + "\n", encoding="utf-8")


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,  # ids go in and ids come out
        dtype="float32",
        max_model_len=job["max_length"],
        max_num_seqs=job["batch"],
        enable_prefix_caching=False,
        async_scheduling=False,  # it may start a round that the text no longer needs, and would count it
        enforce_eager=not job["compiled"],
        disable_log_stats=False,
        speculative_config={
            "method": job["method"],
            "model": job["head"],
            "num_speculative_tokens": job["depth"],
        },
    )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        ignore_eos=True,  # the end tokens of the job are the only ones
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {
        **read_counters(llm.get_metrics()),
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "versions": {name: version(name) for name in (job["package"], "torch", "transformers")},
    }


def read_counters(metrics: list[Any]) -> dict[str, Any]:
    """A vLLM that has renamed a counter must not look like one that accepts nothing."""
    found = {metric.name: metric for metric in metrics}
    missing = [name for name in COUNTERS.values() if name not in found]
    if missing:
        raise ValueError(f"this vLLM has no counters {missing}; expected {sorted(COUNTERS.values())}")
    accepted = found[COUNTERS["accepted"]].values
    return {
        "num_drafts": int(found[COUNTERS["num_drafts"]].value),
        "num_draft_tokens": int(found[COUNTERS["num_draft_tokens"]].value),
        "accepted": [int(count) for count in accepted],
    }


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]))
