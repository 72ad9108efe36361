"""`headstart regenerate`: the answers of given conversations, made anew by the target."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer.cli import common
from train.cli.writing import add_writing_arguments, load_writing_target, read_requests, write_rows

if TYPE_CHECKING:
    from train.corpus.conversations import Conversation

HELP = """\
Let the target answer the conversations of a file anew, turn by turn: heads learn best from their own target's words.
Messages of users, tools and the system stay; each of the target's answers is written with its own earlier ones before
it. A run that was stopped, even by kill -9, goes on where it was; rows do not depend on --batch."""
EXAMPLE = """\
headstart regenerate my-chats.jsonl --target models/smollm2-135m --out data/mine.jsonl
headstart regenerate my-chats.jsonl --target path/or/hub-name --out data/mine.jsonl --temperature 1 --greedy-share 0"""

ROW_WIDTH = 32
"""Rows of every forward where answers may not depend on what they are generated with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="conversations, or the users' turns alone; or a data set's name")
    add_writing_arguments(parser)
    parser.add_argument("--top-p", type=float, default=1.0, help="of the answers that are not greedy (default: off)")
    parser.add_argument("--top-k", type=int, default=0, help="of the answers that are not greedy (default: off)")
    parser.add_argument("--limit", type=int, help="answer the first so many conversations")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of the longest conversation")
    parser.add_argument(
        "--exactness",
        choices=("bitwise", "seed"),
        default="bitwise",
        help="bitwise (default): the same rows at any --batch, in any precision; seed: faster, but in bfloat16 near "
        "ties may fall either way",
    )
    parser.add_argument(
        "--decontaminate", nargs="*", default=[], metavar="FILE", help="also leave out conversations with these prompts"
    )


def run(args: argparse.Namespace) -> int:
    requests = read_requests(args.file)
    return answer_requests(args, requests if args.limit is None else requests[: args.limit])


def answer_requests(args: argparse.Namespace, requests: Sequence[Conversation]) -> int:
    """Also the way of `headstart synth --requests`."""
    from infer.engine import Engine
    from infer.machine import dtype_name
    from train.corpus.contamination import Contamination
    from train.corpus.regenerate import RegenerationConfig, Regenerator, longest_request

    config = RegenerationConfig(
        seed=args.seed,
        max_answer_tokens=args.max_answer_tokens,
        greedy_share=args.greedy_share,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    contamination = Contamination.of(args.decontaminate)
    if not requests:
        raise ValueError(f"--limit is {args.limit}: nothing is left to answer")
    target = load_writing_target(args)
    max_length = min(longest_request(requests, target.tokenizer, config), args.max_length, target.max_length)
    row_width = None if target.is_row_invariant or args.exactness != "bitwise" else ROW_WIDTH
    regenerator = Regenerator(
        Engine(
            target,
            max_requests=args.batch,
            max_length=max_length,
            exactness=args.exactness,
            row_width=row_width,
        ),
        target.tokenizer,
        config,
        args.out,
        requests=requests,
        contamination=contamination,
        settings={
            "max_length": max_length,
            "dtype": dtype_name(target.dtype),
            "exactness": args.exactness,
            "row_width": row_width,
        },
        target_fingerprint=target.fingerprint,
        rows_per_chunk=4 * args.batch,
        max_sequence_length=max_length,
    )
    common.note(f"answering {len(requests):,} conversations in {dtype_name(target.dtype)}")
    return write_rows(args, regenerator, total=len(requests), counts_attempts=True)
