"""`headstart synth`: training data written by the target itself."""

from __future__ import annotations

import argparse

from train.cli.writing import add_writing_arguments, load_writing_target, read_requests, write_rows

HELP = """\
Let the target write its own training conversations, questions and answers. A base model, which has no chat template,
writes plain texts instead (--raw): it goes on with those of --prompts, or begins with nothing.
(Conversations of your own are answered anew by `headstart regenerate`.)"""
EXAMPLE = """\
headstart synth --target models/smollm2-135m --out data/smollm2.jsonl --num 1000
headstart synth --raw --target path/or/base-model --out data/texts.jsonl --prompts beginnings.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_writing_arguments(parser)
    parser.add_argument("--num", type=int, default=None, help="rows to keep (default 1000, or all requests)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--requests", metavar="FILE", help="the same as headstart regenerate FILE")
    source.add_argument("--prompts", metavar="FILE", help='--raw: beginnings of texts, as JSON lines {"text": ...}')
    parser.add_argument("--raw", action="store_true", help="plain texts, for a base model: train with data.raw")
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=96, help="tokens of a user turn, or of a text that is gone on with"
    )
    parser.add_argument("--prompt-temperature", type=float, default=0.9, help="temperature of the user turns")
    parser.add_argument("--opening-share", type=float, default=0.5, help="share of user turns begun for the target")
    parser.add_argument("--second-turn-share", type=float, default=0.15, help="share of two-turn conversations")
    # What `regenerate` would ask, for --requests.
    parser.set_defaults(top_p=1.0, top_k=0, max_length=2048, exactness="bitwise", decontaminate=[], limit=None)


def run(args: argparse.Namespace) -> int:
    if args.prompts and not args.raw:
        raise ValueError("--prompts gives beginnings of texts: add --raw (or answer chats: headstart regenerate FILE)")
    if args.requests and args.raw:
        raise ValueError("--requests are chats to answer, and --raw is for plain texts: give --prompts instead")
    if args.requests:
        return _answer(args)
    return _write(args)


def _answer(args: argparse.Namespace) -> int:
    from train.cli.regenerate import answer_requests

    args.limit = args.num
    requests = read_requests(args.requests)
    return answer_requests(args, requests if args.num is None else requests[: args.num])


def _write(args: argparse.Namespace) -> int:
    from infer.chat import user_turn_prefix
    from infer.engine import Engine
    from infer.machine import dtype_name
    from train.corpus.synth import SynthesisConfig, Synthesizer, TextWriter

    config = SynthesisConfig(
        num_conversations=1000 if args.num is None else args.num,
        seed=args.seed,
        max_prompt_tokens=args.max_prompt_tokens,
        max_answer_tokens=args.max_answer_tokens,
        prompt_temperature=args.prompt_temperature,
        greedy_share=args.greedy_share,
        temperature=args.temperature,
        opening_share=args.opening_share,
        second_turn_share=args.second_turn_share,
    )
    beginnings = read_requests(args.prompts, raw=True) if args.prompts else None
    target = load_writing_target(args)
    prefix = [] if args.raw else user_turn_prefix(target.tokenizer)
    max_length = min(config.max_sequence_length(len(prefix)), target.max_length)
    options = {
        "target_fingerprint": target.fingerprint,
        "rows_per_chunk": 4 * args.batch,
        "max_sequence_length": max_length,
    }
    engine = Engine(target, max_requests=args.batch, max_length=max_length)
    dtype = {"dtype": dtype_name(target.dtype)}
    writer = (
        TextWriter(engine, target.tokenizer, config, args.out, beginnings=beginnings, settings=dtype, **options)
        if args.raw
        else Synthesizer(engine, target.tokenizer, config, args.out, settings=dtype, **options)
    )
    return write_rows(args, writer, total=config.num_conversations)
