"""`headstart report`: what a training run did, again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infer.cli.common import output_file

HELP = "summarise a training run and redraw its curves"
EXAMPLE = "headstart report runs/smollm2-135m-eagle3-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--json", type=output_file, help="write the summary to this file")


def run(args: argparse.Namespace) -> int:
    from infer.cli.common import write_json
    from train.reports.report import SUMMARY_FILE, describe_run, plot_run

    print(describe_run(args.run))
    picture = plot_run(args.run)
    print(f"curves: {picture}" if picture else "no curves: nothing was evaluated, or matplotlib is not installed")
    write_json(args.json, json.loads((args.run / SUMMARY_FILE).read_text(encoding="utf-8")))
    return 0
