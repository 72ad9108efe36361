"""`headstart train`: run a recipe, in one process or as one of several."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli.common import output_file

if TYPE_CHECKING:
    from train.world import World

HELP = (
    "train a draft head on a frozen target\n\n"
    "On several GPUs or machines a launcher starts one process for each, with its own options for hosts and ports:\n"
    "  torchrun --no-python --nproc-per-node 8 headstart train RECIPE optim.accumulation=8\n"
    "  deepspeed --no_python --num_gpus 8 headstart train RECIPE deepspeed.stage=2 optim.accumulation=8\n"
    "A step sees optim.batch_size x optim.accumulation conversations however many processes share it."
)
EXAMPLE = """\
headstart train smollm2-135m-eagle3-demo
headstart train smollm2-135m-eagle3-demo --resume
headstart train my-recipe.yaml target.model=path/or/hub-name data.train=my-chats.jsonl name=my-head"""


class _ShowSettings(argparse.Action):
    """Prints every setting of a recipe, and nothing else is done."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from configs.loading import describe_settings

        print(describe_settings())
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", action=_ShowSettings, nargs=0, help="list every setting of a recipe, its default and what it does"
    )
    parser.add_argument("recipe", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the run's last checkpoint: with the same settings, or RUN/config.yaml for a recipe",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds runs (default: runs)")
    parser.add_argument("--json", type=output_file, help="also write the summary to this file")


def run(args: argparse.Namespace) -> int:
    from configs.loading import load_config
    from infer.cli.common import quiet_loading, write_json
    from train.corpus.reading import check_sources
    from train.reports.report import describe_run
    from train.trainer import train
    from train.world import World

    config = load_config(args.recipe, args.overrides)
    check_sources(config.data)
    quiet_loading()
    world = World.from_environment()
    summary = train(
        config,
        runs_folder=args.runs,
        resume=args.resume,
        notice=lambda text: print(text, file=sys.stderr, flush=True),
        world=world,
    )
    folder = args.runs / config.name
    if world.is_main:
        print(describe_run(folder))
        if summary["best"] is not None:
            print(f"wrote {folder / 'best'}")
        write_json(args.json, summary)
    status = 130 if summary["status"] == "interrupted" else 0
    if status and world.is_main:
        runs = [] if args.runs == Path("runs") else ["--runs", str(args.runs)]
        again = shlex.join([str(folder / "config.yaml"), *runs, "--resume"])
        print(f"interrupted; go on with: headstart train {again}", file=sys.stderr)
    if world.size > 1:
        _leave(world, status)
    return status


def _leave(world: World, status: int) -> None:
    """All is saved; sharded weights have made interpreters abort on their way out."""
    world.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
