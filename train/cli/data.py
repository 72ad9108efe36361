"""`headstart data`: what data files become before they are trained on, and what a draft vocabulary would cost."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import common

if TYPE_CHECKING:
    from infer.chat import Rendered
    from train.corpus.conversations import Conversation
    from train.corpus.vocabulary import VocabularyReport

HELP = """\
Look at data files.
  inspect   rows kept and dropped, and which tokens are trained on
  vocab     draft vocabularies of several sizes: how many labels each holds, how much of the target's probability it
            leaves out (acceptance that no head with this vocabulary can reach), and what it costs. Runs the target"""
EXAMPLE = """\
headstart data inspect data/smollm2.jsonl --target models/smollm2-135m
headstart data inspect books.jsonl --target path/or/hub-name --raw
headstart data vocab data/smollm2.jsonl --target models/smollm2-135m --sizes 1024,4096,16384 --json vocab.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("inspect", "vocab"))
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON or JSON lines files, or names of data sets")
    parser.add_argument("--target", required=True, help="folder or name of the target model")
    parser.add_argument("--limit", type=int, help="read at most this many conversations of each file")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens after which a row is cut")
    parser.add_argument("--raw", action="store_true", help="no chat template: texts as they are (base models)")
    parser.add_argument("--json", type=common.output_file, help="write the figures to this file")
    group = parser.add_argument_group("inspect")
    group.add_argument("--rows", type=int, default=3, help="conversations to show")
    group.add_argument(
        "--decontaminate", nargs="*", metavar="FILE", help="count rows with evaluation prompts, and with those of FILE"
    )
    group = parser.add_argument_group("vocab")
    group.add_argument(
        "--sizes", default="1024,2048,4096,8192,16384", help="draft vocabulary sizes (default: %(default)s)"
    )
    group.add_argument("--head", help="a trained head whose costs are counted (default: an EAGLE-3 head's)")
    group.add_argument("--positions", type=int, default=300, help="held-out labels measured in a domain (default: 300)")
    group.add_argument("--image", type=common.output_file, help="PNG to draw (default: beside the --json file)")
    group.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    return _inspect(args) if args.action == "inspect" else _vocab(args)


def _inspect(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from infer.chat import template_hash, tokenizer_hash
    from infer.target import refuse_missing
    from train.corpus.contamination import decontaminate
    from train.corpus.conversations import LoadReport, TrainingRow, check_mask, tokenize_conversations

    refuse_missing(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    conversations, reports = _read(args)
    if args.decontaminate is not None:
        found = LoadReport(rows_in=len(conversations), kept=len(conversations))
        conversations = decontaminate(conversations, found, files=args.decontaminate)
        reports["evaluation prompts"] = found
    rendering = LoadReport()
    rows = tokenize_conversations(conversations, tokenizer, args.max_length, raw=args.raw, report=rendering)
    for row in rows:
        assert isinstance(row, TrainingRow)
        check_mask(tokenizer, row, row.conversation.messages, raw=args.raw)
    figures = _figures(rows, conversations) | {
        "template_hash": "raw text, no chat template" if args.raw else template_hash(tokenizer),
        "tokenizer_hash": tokenizer_hash(tokenizer),
    }
    _show(tokenizer, rows[: args.rows])
    for name, report in reports.items():
        print(f"Reading{'' if len(reports) == 1 else f' {name}'}: {report.summary()}")
    print("Rendering: " + rendering.summary())
    for key, value in figures.items():
        print(f"{key.replace('_', ' '):24s} {value}")
    reading = {name: report.as_dict() for name, report in reports.items()}
    first = next(iter(reading.values()))
    common.write_json(
        args.json,
        figures | {"reading": first if len(reading) == 1 else reading, "rendering": rendering.as_dict()},
    )
    return 0


def _read(args: argparse.Namespace) -> tuple[list[Conversation], dict[str, Any]]:
    from train.corpus.conversations import load_conversations

    conversations: list[Conversation] = []
    reports: dict[str, Any] = {}
    for file in args.files:
        found, reports[file] = load_conversations(file, limit=args.limit, raw=args.raw)
        conversations += found
    return conversations, reports


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


def _vocab(args: argparse.Namespace) -> int:
    from heads.checkpoint import load_head
    from infer.target import TargetModel
    from train.corpus.vocabulary import measure_vocabularies

    sizes = _sizes(args.sizes)
    head = load_head(args.head)[0] if args.head else None
    conversations, _ = _read(args)
    common.quiet_loading()
    target = TargetModel.load(args.target, dtype=args.dtype, device=args.device)
    report = measure_vocabularies(
        target,
        conversations,
        sizes,
        max_length=min(args.max_length, target.max_length),
        positions_per_domain=args.positions,
        raw=args.raw,
        head=head,
        notice=common.note,
    )
    _print_vocabularies(report)
    image = args.image or (args.json.with_suffix(".png") if args.json else None)
    common.write_json(args.json, report.to_dict())
    _draw(report, image)
    return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise ValueError(f"--sizes is {text!r}; give whole numbers with commas, such as 1024,4096") from error
    if not sizes:
        raise ValueError("--sizes is empty; give whole numbers with commas, such as 1024,4096")
    return sizes


def _print_vocabularies(report: VocabularyReport) -> None:
    from rich.console import Console

    table = common.plain_table(
        "Draft vocabularies (held-out labels)",
        "size",
        ("coverage", "lost acceptance", "greedy", "LM head: bytes", "FLOPs"),
    )
    for entry in report.entries:
        table.add_row(
            f"{entry.size:,}",
            f"{entry.coverage:.2%}",
            f"{entry.lost_acceptance:.2%}",
            f"{entry.lost_greedy:.2%}",
            f"{entry.bytes_share:.1%}",
            f"{entry.flops_share:.1%}",
        )
    console = Console(highlight=False)
    console.print(table)
    for title, name, counts in (
        ("Coverage by domain", "coverage", report.num_labels),
        ("Lost acceptance by domain", "lost_acceptance", report.num_positions),
    ):
        domains = common.plain_table(title, "domain", ("labels", *(f"{entry.size:,}" for entry in report.entries)))
        for domain, num_labels in counts.items():
            shares = (f"{getattr(entry.by_domain[domain], name):.2%}" for entry in report.entries)
            domains.add_row(domain, f"{num_labels:,}", *shares)
        console.print(domains)
    print(report.explanation())


def _draw(report: VocabularyReport, image: Path | None) -> None:
    if image is None:
        return
    from train.corpus.vocabulary import plot_vocabularies

    written = plot_vocabularies(report, image)
    common.note(f"wrote {image}" if written else "no picture: matplotlib is not installed")
