"""`headstart plan`: what a training run will take, before it is started."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from infer.cli import common

HELP = """\
Say what a training run will take before anything runs: parameters, memory, disk, tokens, and (after a calibration of
some seconds on this machine) time. A run that cannot fit is refused with the settings to change, and exit status 2.
With --no-calibrate only configurations and text are read: the target may be larger than this machine."""
EXAMPLE = """\
headstart plan smollm2-135m-eagle3 train.minutes=60
headstart plan my-recipe.yaml target.model=path/or/hub-name --no-calibrate --processes 8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    parser.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure features and training steps on a few rows",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="processes that share the run on this machine (default: as the launcher says, or 1)",
    )
    parser.add_argument("--runs", default="runs", help="folder the run would be written to (default: %(default)s)")
    parser.add_argument(
        "--keep", action="store_true", help="leave the plan in the run's folder, for its report to set beside what came"
    )
    parser.add_argument("--json", type=common.output_file, help="write the plan to this file")


def run(args: argparse.Namespace) -> int:
    from configs.loading import load_config
    from train.plan import make_plan
    from train.plan.describe import describe
    from train.reports.story import PLAN_FILE

    config = load_config(args.recipe, args.overrides)
    processes = args.processes if args.processes is not None else int(os.environ.get("WORLD_SIZE") or 1)
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, given {processes}")
    common.quiet_loading()
    plan = make_plan(
        config,
        processes=processes,
        calibrated=args.calibrate,
        runs_folder=Path(args.runs),
        notice=common.note,
    )
    print(describe(plan))
    common.write_json(args.json, plan.to_dict())
    if args.keep and not plan.problems:
        folder = Path(args.runs) / config.name
        folder.mkdir(parents=True, exist_ok=True)
        common.write_json(folder / PLAN_FILE, plan.to_dict())
    for problem in plan.problems:
        print(f"headstart: error: {problem}", file=sys.stderr)
    return 2 if plan.problems else 0
