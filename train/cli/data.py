"""`headstart data inspect`: what a data file becomes before it is trained on."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infer.cli.common import output_file

if TYPE_CHECKING:
    from infer.chat import Rendered
    from train.corpus.conversations import Conversation

HELP = "look at a data file: rows kept and dropped, and which tokens are trained on"
EXAMPLE = "headstart data inspect data/smollm2.jsonl --target models/smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("inspect",))
    parser.add_argument("file", help="JSON or JSON lines file, or the name of a data set")
    parser.add_argument("--target", required=True, help="folder or name of the target model (its tokenizer is loaded)")
    parser.add_argument("--rows", type=int, default=3, help="conversations to show")
    parser.add_argument("--limit", type=int, help="read at most this many conversations")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens after which a row is cut")
    parser.add_argument("--raw", action="store_true", help="no chat template: contents as plain text (base models)")
    parser.add_argument("--json", type=output_file, help="write the figures to this file")


def run(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from infer.chat import template_hash, tokenizer_hash
    from infer.cli.common import write_json
    from infer.target import refuse_missing
    from train.corpus.conversations import (
        LoadReport,
        TrainingRow,
        check_mask,
        load_conversations,
        tokenize_conversations,
    )

    refuse_missing(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    conversations, report = load_conversations(args.file, limit=args.limit)
    rendering = LoadReport()
    rows = tokenize_conversations(conversations, tokenizer, args.max_length, raw=args.raw, report=rendering)
    for row in rows:
        assert isinstance(row, TrainingRow)
        check_mask(tokenizer, row, row.conversation.messages)
    figures = _figures(rows, conversations) | {
        "template_hash": template_hash(tokenizer),
        "tokenizer_hash": tokenizer_hash(tokenizer),
    }
    _show(tokenizer, rows[: args.rows])
    print("Reading: " + report.summary())
    print("Rendering: " + rendering.summary())
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):24s} {value}")
    write_json(args.json, figures | {"reading": report.as_dict(), "rendering": rendering.as_dict()})
    return 0


def _figures(rows: Sequence[Rendered], conversations: Sequence[Conversation]) -> dict[str, Any]:
    lengths = [len(row.token_ids) for row in rows]
    shares = [row.num_supervised / len(row.token_ids) for row in rows]
    return {
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": sum(row.num_supervised for row in rows),
        "supervised_share": round(sum(row.num_supervised for row in rows) / sum(lengths), 4),
        "least_share_in_a_row": round(min(shares), 4),
        "greatest_share_in_a_row": round(max(shares), 4),
        "median_length": statistics.median(lengths),
        "longest": max(lengths),
        "multi_turn_rows": sum(
            sum(message["role"] == "user" for message in conversation.messages) > 1 for conversation in conversations
        ),
        "truncated_rows": sum(conversation.truncated for conversation in conversations),
    }


def _show(tokenizer: Any, rows: Sequence[Rendered]) -> None:
    """Print rows with supervised tokens in green and the others dimmed (plain where colours are off)."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for row in rows:
        text = Text()
        for run, supervised in _runs(row):
            text.append(tokenizer.decode(run), style="green" if supervised else "dim")
        console.print(text)
        console.rule(f"{row.num_supervised} of {len(row.token_ids)} tokens supervised")


def _runs(row: Rendered) -> list[tuple[list[int], bool]]:
    """Neighbouring tokens of equal mask together, so that characters of several tokens decode whole."""
    runs: list[tuple[list[int], bool]] = []
    for token_id, supervised in zip(row.token_ids, row.loss_mask, strict=True):
        if not runs or runs[-1][1] != supervised:
            runs.append(([], supervised))
        runs[-1][0].append(token_id)
    return runs
