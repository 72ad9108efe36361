"""What the commands that let a target write data share."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import common
from train.cli.progress import row_progress

if TYPE_CHECKING:
    from infer.target import TargetModel
    from train.corpus.conversations import Conversation
    from train.corpus.writing import Writer, WritingReport


def add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, file, and how answers are drawn."""
    parser.add_argument("--target", required=True, help="folder or name of the target model")
    parser.add_argument(
        "--out", required=True, type=common.output_file, help="JSON lines to write; continued if it exists"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument(
        "--max-answer-tokens", type=int, default=256, help="longest answer; longer ones are cut (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, help="conversations generated together")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="share of answers at temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="temperature of the other answers")
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="a LoRA adapter (peft's form) to merge into the target, which then writes"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--json", type=common.output_file, help="write the counts to this file")


def load_writing_target(args: argparse.Namespace) -> TargetModel:
    """The target, in the dtype that the file was begun in where none is asked for."""
    from infer.target import TargetModel
    from train.corpus.growing_file import begun_with

    if args.batch < 1:
        raise ValueError(f"--batch must be at least 1, given {args.batch}")
    dtype = begun_with(args.out).get("dtype", "auto") if args.dtype == "auto" else args.dtype
    common.quiet_loading()
    return TargetModel.load(args.target, dtype=dtype, device=args.device, adapter=args.adapter)


def read_requests(source: str | Path, *, raw: bool = False) -> list[Conversation]:
    """What is to be answered or gone on with; what was dropped is told."""
    from train.corpus.conversations import load_conversations

    requests, report = load_conversations(source, require_answer=False, raw=raw)
    print(report.summary())
    return requests


def write_rows(args: argparse.Namespace, writer: Writer[Any, Any], *, total: int, counts_attempts: bool = False) -> int:
    """Run the writer with a progress bar over the rows kept (or attempts made), and tell what came of it."""
    report = _run_with_progress(writer, total, "num_attempts" if counts_attempts else "num_kept")
    print(report.summary())
    common.write_json(args.json, asdict(report))
    if report.num_kept == 0:
        raise ValueError(f"no conversation passed the filters:\n{report.summary()}")
    return 0


def _run_with_progress(writer: Writer[Any, Any], total: int, counted: str) -> WritingReport:
    with row_progress("conversations", total=total, done=getattr(writer.report(), counted)) as bar:
        return writer.run(on_tokens=bar.add_tokens, on_chunk=lambda report: bar.set_rows(getattr(report, counted)))
