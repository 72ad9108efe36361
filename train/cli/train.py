"""`headstart train`: run a recipe."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from infer.cli.common import output_file

HELP = "train a draft head on a frozen target"
EXAMPLE = "headstart train smollm2-135m-eagle3-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds runs (default: runs)")
    parser.add_argument("--json", type=output_file, help="also write the summary to this file")


def run(args: argparse.Namespace) -> int:
    from configs.loading import load_config
    from infer.cli.common import quiet_loading, write_json
    from train.corpus.conversations import check_source
    from train.reports.report import describe_run
    from train.trainer import train

    config = load_config(args.recipe, args.overrides)
    for source in (*config.data.train, *config.data.eval):
        check_source(source)
    quiet_loading()
    summary = train(
        config,
        runs_folder=args.runs,
        resume=args.resume,
        notice=lambda text: print(text, file=sys.stderr, flush=True),
    )
    folder = args.runs / config.name
    print(describe_run(folder))
    if summary["best"] is not None:
        print(f"wrote {folder / 'best'}")
    write_json(args.json, summary)
    if summary["status"] == "interrupted":
        runs = [] if args.runs == Path("runs") else ["--runs", str(args.runs)]
        again = shlex.join([args.recipe, *args.overrides, *runs, "--resume"])
        print(f"interrupted; go on with: headstart train {again}", file=sys.stderr)
        return 130
    return 0
