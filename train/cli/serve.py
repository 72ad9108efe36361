"""`headstart serve`, with a head that may go on learning: the server is `infer.cli.serve`'s, the learning ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import common, serve

if TYPE_CHECKING:
    from infer.engine import Engine
    from train.online import OnlineLearner

HELP = serve.HELP
EXAMPLE = serve.EXAMPLE.replace(
    "\n\ncurl", "\nheadstart serve runs/demo/best --learn --learn-out runs/learned\n\ncurl", 1
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group(
        "learning",
        "With --learn what people ask and are answered trains the head: while nothing is served, and within a "
        "share of the time otherwise. Texts and states are held in memory alone. Answers cannot change, only their "
        "speed; a head that does worse on later answers is taken back.",
    )
    group.add_argument("--learn", action="store_true", help="go on training the head on what is served (default: off)")
    group.add_argument(
        "--learn-out",
        type=Path,
        metavar="FOLDER",
        help="write the learned head to this new folder when the server stops; nothing of the texts is in it",
    )
    group.add_argument(
        "--learn-share",
        type=float,
        metavar="PERCENT",
        help="of the time while requests run, at most (default: 5; 0: only while none do)",
    )
    group.add_argument(
        "--learn-tokens", type=int, metavar="N", help="newest tokens held with their states (default: 32768)"
    )
    group.add_argument("--learn-rate", type=float, metavar="LR", help="learning rate (default: 2e-4)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if not args.learn:
        return serve.run(args)
    learners: list[OnlineLearner] = []

    def make_learner(engine: Engine) -> OnlineLearner:
        learners.append(_learner(args, engine))
        return learners[0]

    status = serve.run(args, make_learner=make_learner)
    if args.learn_out is not None and learners:
        _save(learners[0], args.learn_out)
    return status


def _check(args: argparse.Namespace) -> None:
    from infer.serve.external import OWN
    from train.online import check_out

    given = {
        "--learn-out": args.learn_out,
        "--learn-share": args.learn_share,
        "--learn-tokens": args.learn_tokens,
        "--learn-rate": args.learn_rate,
    }
    names = [name for name, value in given.items() if value is not None]
    if names and not args.learn:
        raise ValueError(
            f"{' and '.join(names)}: of no use without --learn, which lets the head learn from what is served"
        )
    if args.learn and args.engine != OWN:
        raise ValueError(f"--learn trains the head of headstart's own engine: leave out --engine {args.engine}")
    if args.learn_out is not None:
        check_out(args.learn_out)


def _learner(args: argparse.Namespace, engine: Engine) -> OnlineLearner:
    from infer.drafters import head_folder
    from train.online import OnlineLearner, OnlineSettings

    folder = head_folder(args.head)
    if folder is None:
        raise ValueError(f"--learn goes on training a head, and {args.head} is none: give an augmented model's folder")
    given = {
        "share": None if args.learn_share is None else args.learn_share / 100,
        "num_tokens": args.learn_tokens,
        "lr": args.learn_rate,
    }
    settings = OnlineSettings(**{name: value for name, value in given.items() if value is not None})
    learner = OnlineLearner(engine, folder, settings, notice=common.note)
    weights, states = learner.num_bytes
    common.note(
        f"the head learns from what is served, while nothing runs and for {settings.share:.0%} of the time otherwise; "
        f"that takes {weights / 1e6:.0f} MB for weights and up to {states / 1e6:.0f} MB for states, nothing on disk"
    )
    return learner


def _save(learner: OnlineLearner, folder: Path) -> None:
    if not learner.has_learned:
        common.note(f"no better head was learned: {folder} is not written")
        return
    learner.save(folder)
    common.note(f"the learned head is in {folder}")
