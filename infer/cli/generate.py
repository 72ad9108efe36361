"""`headstart generate`: complete prompts with a target and a head."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.chat import render_prompt
from infer.cli import common
from infer.harvest import Harvest
from infer.prompts import load_prompts
from infer.request import Completion, TokenLogprobs
from infer.sampling import SamplingParams
from infer.stopping import TextStream

if TYPE_CHECKING:
    from infer.engine import Engine

HELP = """\
Answer one prompt or a file of prompts. A single answer is printed as it is written. With the default
rule the tokens are those of plain decoding with the same seed, at any temperature: `--no-draft` shows
it (token for token with `--dtype float32`; bfloat16 rounds near ties one way or the other, unless
`--exactness bitwise` keeps it from that)."""

EXAMPLE = """\
headstart generate runs/demo/best --prompt "Why is the sky blue?"
headstart generate runs/demo/best --prompt "Write a haiku." --temperature 0.8 --seed 7 --show-accepted
headstart generate ngram --target models/smollm2-135m --prompts prompts.jsonl --json answers.json
headstart generate runs/demo/best --prompt "Describe a city." --json-schema city.json --temperature 1 --n 3"""

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    token_ids: list[int]
    domain: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser)
    source = parser.add_argument_group("prompt").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the user's message")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text file that holds the user's message")
    source.add_argument("--prompts", type=Path, metavar="FILE", help='many prompts, as JSON lines {"messages": [...]}')
    parser.add_argument("--raw", action="store_true", help="encode the text without the chat template")
    parser.add_argument("--no-draft", action="store_true", help="decode plainly, for comparison")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts decoded at once (default: 1)")
    parser.add_argument(
        "--harvest",
        type=common.output_file,
        metavar="FILE",
        help="record prompts and answers in FILE to train on later: their texts are STORED there as they are (off "
        "unless given)",
    )
    parser.add_argument(
        "--show-accepted",
        action="store_true",
        help="colour the tokens that were drafted and accepted green; the target's own stay plain",
    )
    common.add_sampling_arguments(parser)
    common.add_tree_arguments(parser)
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.logprobs is not None and args.json is None:
        raise ValueError("--logprobs writes to the --json file: give one")
    chats = _read_chats(args)
    params = [common.sampling_params(args, index=index) for index in range(len(chats))]
    target = common.load_target(args)
    if args.bad_word:
        params = [replace(one, bad_words=common.bad_words(args, target.tokenizer)) for one in params]
    prompts = [
        _Prompt(token_ids=render_prompt(target.tokenizer, messages, raw=args.raw), domain=domain)
        for domain, messages in chats
    ]
    num_requests = min(args.batch, len(prompts)) * args.n
    engine = common.build_engine(args, target, head="none" if args.no_draft else None, max_requests=num_requests)
    if engine.drafter is not None and engine.tree.adaptive:
        _ = engine.cost  # measured once a machine: not to be counted as this answer's time
    start = time.perf_counter()
    if len(prompts) == args.n == 1:
        completions = [_stream(engine, prompts[0].token_ids, params[0], show_accepted=args.show_accepted)]
    else:
        completions = engine.generate([prompt.token_ids for prompt in prompts], params)
        _print_all(engine, _titles(prompts, args.n), completions, show_accepted=args.show_accepted)
    common.note(summary(completions, params[0], seconds=time.perf_counter() - start))
    entries = [
        to_dict(answer, params[index // args.n], domain=prompts[index // args.n].domain, tokenizer=target.tokenizer)
        for index, answer in enumerate(completions)
    ]
    common.write_json(args.json, entries)
    if args.harvest is not None:
        _record(args, [messages for _, messages in chats], completions, params)
    return _report_errors(_titles(prompts, args.n), completions)


def _record(
    args: argparse.Namespace,
    chats: Sequence[Sequence[Mapping[str, str]]],
    completions: Sequence[Completion],
    params: Sequence[SamplingParams],
) -> None:
    """Keep the target's own answers to train on; those of a lossy rule, or that failed, are not."""
    harvest = Harvest(args.harvest)
    for index, completion in enumerate(completions):
        if completion.error is not None or not completion.lossless:
            continue
        harvest.add(
            chats[index // args.n],
            completion.text,
            sampling_record(completion, params[index // args.n]),
            # Only at the target's own end token has it said that its answer ends.
            truncated=completion.finish_reason != "stop" or completion.stop_reason is not None,
            raw=args.raw,
        )
    common.note(harvest.summary())


def sampling_record(completion: Completion, params: SamplingParams) -> dict[str, Any]:
    """How a recorded answer was drawn: what differs from the defaults, and the seed it had."""
    plain = {item.name: item.default for item in fields(SamplingParams)}
    given = {name: getattr(params, name) for name in plain if getattr(params, name) != plain[name]}
    kept = {name: value for name, value in given.items() if name not in ("n", "logprobs", "seed")}
    return {"temperature": params.temperature, **kept, "seed": completion.seed, "sample": completion.sample}


def to_dict(
    completion: Completion, params: SamplingParams, *, domain: str | None = None, tokenizer: Any = None
) -> dict[str, Any]:
    """One entry of the --json list; `tokenizer` spells the tokens of log-probabilities."""
    values: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "num_rounds": completion.num_rounds,
        "accepted_lengths": list(completion.accepted_lengths),
        "tokens_per_second": completion.tokens_per_second,
        "seed": completion.seed,
        "seed_used": not params.greedy,
        "sample": completion.sample,
        "exactness": completion.exactness,
        "lossless": completion.lossless,
    }
    if completion.logprobs is not None:
        values["logprobs"] = [_logprob_entry(entry, tokenizer) for entry in completion.logprobs]
    return values if domain is None else {**values, "domain": domain}


def _logprob_entry(entry: TokenLogprobs, tokenizer: Any) -> dict[str, Any]:
    def spelled(token: int, logprob: float) -> dict[str, Any]:
        text = {} if tokenizer is None else {"token": tokenizer.decode([token])}
        return {"token_id": token, **text, "logprob": logprob}

    return {**spelled(entry.token_id, entry.logprob), "top": [spelled(*each) for each in entry.top]}


def summary(completions: Sequence[Completion], params: SamplingParams, *, seconds: float) -> str:
    """The line after the answers: how many tokens, how fast, in rounds of what length, from which seed."""
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    rounds = [length for completion in completions for length in completion.accepted_lengths[1:]]
    parts = [f"{num_tokens} tokens", f"{num_tokens / seconds:.1f} tokens/s"]
    if rounds:
        parts.append(f"accepted length {sum(rounds) / len(rounds):.2f}")
    seeds = list(dict.fromkeys(completion.seed for completion in completions))
    if params.greedy:
        parts.append("greedy (no randomness: the seed is unused)")
    elif len(seeds) == 1:
        parts.append(f"seed {seeds[0]}")
    else:
        parts.append("random seeds (see --json)" if params.seed is None else f"seeds {seeds[0]} to {seeds[-1]}")
    if not all(completion.lossless for completion in completions):
        parts.append("NOT lossless: this rule changes what the target would say")
    return "[" + ", ".join(parts) + "]"


class AcceptedText:
    """Text with the tokens that were drafted and accepted in green: all of a round's tokens but the last,
    which is the target's own. A character spread over tokens has its last token's colour."""

    def __init__(self, tokenizer: Any) -> None:
        self._stream = TextStream(tokenizer)

    def push_round(self, token_ids: Sequence[int]) -> str:
        *drafted, own = token_ids
        text = self._stream.push(drafted)
        return (f"{_GREEN}{text}{_RESET}" if text else "") + self._stream.push([own])

    def flush(self) -> str:
        return self._stream.flush()


def accepted_text(tokenizer: Any, completion: Completion) -> str:
    """All tokens of an answer, coloured."""
    coloured = AcceptedText(tokenizer)
    ends = list(accumulate(completion.accepted_lengths))
    rounds = [completion.token_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return "".join([*map(coloured.push_round, rounds), coloured.flush()])


def _read_chats(args: argparse.Namespace) -> list[tuple[str | None, list[dict[str, str]]]]:
    """(domain, messages) of every prompt."""
    if args.prompts is not None:
        return [(prompt.domain, list(prompt.messages)) for prompt in load_prompts(args.prompts)]
    text = args.prompt if args.prompt is not None else args.prompt_file.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("the prompt is empty: give some text")
    return [(None, [{"role": "user", "content": text}])]


def _stream(engine: Engine, prompt: list[int], params: SamplingParams, *, show_accepted: bool) -> Completion:
    """Answer one prompt, printing as it goes."""
    (request,) = engine.submit([prompt], params)
    coloured = AcceptedText(engine.target.tokenizer)
    num_rounds = num_seen = 0
    try:
        while request.finish_reason is None:
            engine.step()
            if not show_accepted:
                print(request.stopper.take_delta(), end="", flush=True)
                continue
            for length in request.accepted_lengths[num_rounds:]:
                round_ids = request.output_ids[num_seen : num_seen + length]
                print(coloured.push_round(round_ids), end="", flush=True)
                num_rounds, num_seen = num_rounds + 1, num_seen + length
    finally:
        if request.finish_reason is None:
            engine.abort()
        print(coloured.flush(), flush=True)
    return request.completion()


def _titles(prompts: Sequence[_Prompt], num_samples: int) -> list[str]:
    """A name for each answer: its prompt's number and domain, and which of several samples it is."""
    return [
        str(number)
        + (f" ({prompt.domain})" if prompt.domain else "")
        + (f", sample {sample + 1}" if num_samples > 1 else "")
        for number, prompt in enumerate(prompts, start=1)
        for sample in range(num_samples)
    ]


def _print_all(
    engine: Engine, titles: Sequence[str], completions: Sequence[Completion], *, show_accepted: bool
) -> None:
    for title, completion in zip(titles, completions, strict=True):
        text = accepted_text(engine.target.tokenizer, completion) if show_accepted else completion.text
        sys.stdout.write(f"--- {title}\n{text}\n")


def _report_errors(titles: Sequence[str], completions: Sequence[Completion]) -> int:
    """A line on stderr for each answer that failed, and the command's status: 1 if any did."""
    failed = [(title, completion) for title, completion in zip(titles, completions, strict=True) if completion.error]
    for title, completion in failed:
        common.note(f"headstart: answer {title} ended early: {completion.error}")
    return 1 if failed else 0
