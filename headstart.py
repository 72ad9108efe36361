"""The public face of headstart: the names a program imports, and the `headstart` command.

Importing this module imports nothing heavy: the names resolve on first use, and only the invoked command's
module is loaded.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from heads.checkpoint import load_head
    from infer.async_engine import AsyncEngine, Draining, QueueFull
    from infer.drafters.base import TreeSettings
    from infer.engine import Engine, load_engine
    from infer.request import Completion, DraftBounds
    from infer.sampling import SamplingParams
    from infer.scheduling import Sharing
    from infer.target import TargetModel
    from train.online import OnlineLearner, OnlineSettings

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Completion",
    "DraftBounds",
    "Draining",
    "Engine",
    "OnlineLearner",
    "OnlineSettings",
    "QueueFull",
    "SamplingParams",
    "Sharing",
    "TargetModel",
    "TreeSettings",
    "__version__",
    "load_engine",
    "load_head",
    "main",
]

_EXPORTS = {
    "AsyncEngine": "infer.async_engine",
    "Draining": "infer.async_engine",
    "QueueFull": "infer.async_engine",
    "Sharing": "infer.scheduling",
    "Completion": "infer.request",
    "DraftBounds": "infer.request",
    "Engine": "infer.engine",
    "SamplingParams": "infer.sampling",
    "TargetModel": "infer.target",
    "TreeSettings": "infer.drafters.base",
    "load_engine": "infer.engine",
    "load_head": "heads.checkpoint",
    "OnlineLearner": "train.online",
    "OnlineSettings": "train.online",
}


class _Command(NamedTuple):
    module: str
    summary: str


# The summaries stand here so that `headstart --help` imports no command.
_COMMANDS = {
    "fetch": _Command("infer.cli.fetch", "obtain a small real target model"),
    "synth": _Command("train.cli.synth", "let the target write conversations to train on"),
    "regenerate": _Command("train.cli.regenerate", "let the target answer your conversations anew"),
    "data": _Command("train.cli.data", "inspect and check training data"),
    "features": _Command("train.cli.features", "compute and keep the target's states for a recipe's text"),
    "plan": _Command("train.cli.plan", "what a training run will take, before it is started"),
    "train": _Command("train.cli.train", "train a draft head for a target"),
    "eval": _Command("infer.cli.eval", "measure acceptance on held-out prompts"),
    "generate": _Command("infer.cli.generate", "complete prompts with a target and a head"),
    "serve": _Command("train.cli.serve", "serve a target and a head to clients of OpenAI's API"),
    "chat": _Command("infer.cli.chat", "talk with a target in the terminal"),
    "bench": _Command("infer.cli.bench", "compare speed and answers with plain decoding"),
    "bench serve": _Command("infer.cli.bench_serve", "the same for a server, at several loads"),
    "audit": _Command("infer.cli.audit", "prove on your own model that answers are the target's"),
    "doctor": _Command("infer.cli.doctor", "look a trained head over against its target"),
    "calibrate": _Command("infer.cli.calibrate", "fit a head's draft probabilities to how often they come true"),
    "tune": _Command("infer.cli.tune", "find the draft settings that pay on this machine"),
    "import": _Command("infer.cli.import_head", "read a head of another project"),
    "export": _Command("infer.cli.export_head", "write a head in another project's form"),
    "drafters": _Command("infer.cli.drafters", "list everything that can draft, and what it needs"),
    "profile": _Command("infer.cli.profile", "measure what forwards and rounds cost, beside the least they could"),
    "report": _Command("train.cli.report", "summarise a training run"),
    "compare": _Command("train.cli.compare", "train several recipes on equal terms and compare their heads"),
    "demo": _Command("train.cli.demo", "fetch, synthesise, train, measure and sample in one go"),
}

_PACKAGES = ("configs", "heads", "infer", "train")


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a mistake of the user's, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away (`headstart ... | head`); let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"headstart: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("headstart: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0].startswith(
        "--local_rank="
    ):  # some launchers put it first; the environment says it too
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"headstart {__version__}")
        return 0
    name, *rest = arguments
    if " ".join(arguments[:2]) in _COMMANDS:
        name, rest = " ".join(arguments[:2]), arguments[2:]
    if name not in _COMMANDS:
        raise ValueError(_unknown_command(name))
    _check_packages()
    module = importlib.import_module(_COMMANDS[name].module)
    status = module.run(_command_parser(name, module).parse_intermixed_args(rest))
    assert isinstance(status, int), f"{_COMMANDS[name].module}.run returned {status!r}, not an exit status"
    return status


def _command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"headstart {name}",
        description=module.HELP,
        epilog=f"example:\n{_indent(module.EXAMPLE)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: headstart COMMAND ...",
            "",
            "Lossless speculative decoding: the same tokens, sooner.",
            "",
            "commands:",
            *rows,
            "",
            "`headstart COMMAND --help` describes a command; `headstart --version` prints the version.",
        ]
    )


def _unknown_command(name: str) -> str:
    close = difflib.get_close_matches(name, _COMMANDS, n=1)
    if name.startswith("-"):
        return f"unknown option {name}; the command comes first, as in headstart train --help"
    if close:
        return f"there is no command {name!r}; did you mean {close[0]!r}?"
    return f"there is no command {name!r}; the commands are {', '.join(_COMMANDS)}"


def _check_packages() -> None:
    """Refuse to run with somebody else's `train` or `configs`.

    The names are common, and `python -m` looks in the working folder first. A package is ours if it stands
    beside this file.
    """
    home = Path(__file__).resolve().parent
    for name in _PACKAGES:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None or Path(origin).resolve().parent.parent != home:
            raise ValueError(
                f"the package {name!r} of headstart is {_shadow(name, origin)}; expected it in {home}. "
                "Rename what takes its place, run from another folder, or reinstall headstart"
            )


def _shadow(name: str, origin: str | None) -> str:
    if origin is not None:
        return f"hidden by {origin}"
    return f"not a regular package here (a folder called {name!r} takes its place, or it is not installed)"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
