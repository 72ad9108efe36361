"""`headstart drafters`: everything that can draft, and what it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import common

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infer.drafters.catalogue import Entry, Measured

HELP = """\
List everything that can draft: how a HEAD has it, its paper, what it needs (training, states of the
target, a second model, hardware), what a round of it costs, and which kinds of proposals it makes.
Heads that you name are listed with the figures on their cards."""

EXAMPLE = """\
headstart drafters
headstart drafters runs/demo/best --json drafters.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "heads", metavar="HEAD", nargs="*", help="augmented models' folders, to show their cards' figures"
    )
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from infer.drafters import trained_head
    from infer.drafters.catalogue import catalogue, measured

    heads = [measured(trained_head(head, purpose="with a card to read")) for head in args.heads]
    entries = catalogue()
    console = Console()
    for group in dict.fromkeys(entry.group for entry in entries):
        _print_group(console, group, [entry for entry in entries if entry.group == group])
    if heads:
        console.print(table(heads), "")
    console.print("A HEAD joins drafters by +. See headstart generate --help for where one goes.", soft_wrap=True)
    common.write_json(
        args.json,
        {"drafters": [entry.to_dict() for entry in entries], "heads": [head.to_dict() for head in heads]},
    )
    return 0


def _print_group(console: Console, group: str, entries: Sequence[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from infer.drafters.catalogue import TRAINED

    how = "head.type of a recipe; HEAD is the trained head's FOLDER" if group == TRAINED else "as HEAD has them"
    title = f"{group} ({how})"
    result = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), show_header=False)
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for entry in entries:
        name = entry.name if entry.group == TRAINED else entry.written
        result.add_row(Text(name, style="bold"), Text(entry.title, style="bold"))
        for label, value in _lines(entry):
            result.add_row("", Text(f"{label}: {value}"))
    console.print(result, "")


def _lines(entry: Entry) -> list[tuple[str, str]]:
    """What is said of a drafter, without what it has nothing of."""
    lines = [
        ("paper", entry.paper),
        ("training", entry.training),
        ("reads", entry.reads),
        ("needs", entry.needs),
        ("parameters", entry.parameters),
        ("a round", entry.steps),
        ("proposals", ", ".join(entry.proposals)),
        ("recipe settings", ", ".join(entry.settings)),
    ]
    return [(label, value) for label, value in lines if value and value not in ("none", "nothing")]


def table(heads: Sequence[Measured]) -> Table:
    """What the cards of trained heads say."""
    result = common.plain_table(
        "on the cards of your heads", "head", ("family", "M parameters", "tokens", "length", "overlap", "speed")
    )
    for head in heads:
        result.add_row(
            "/".join(Path(head.head).parts[-3:]),
            head.family,
            "" if head.num_parameters is None else f"{head.num_parameters / 1e6:.1f}",
            "" if head.draft_vocab_size is None else str(head.draft_vocab_size),
            "" if head.accepted_length is None else f"{head.accepted_length:.2f}",
            "" if not head.overlap else f"{head.overlap[0]:.2f}",
            "" if head.speedup is None else f"{head.speedup:.2f}x",
        )
    return result
