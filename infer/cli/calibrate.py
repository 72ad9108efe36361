"""`headstart calibrate`: make probabilities of a head's guesses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

from heads.checkpoint import load_head, update_card
from infer.calibration import BIN_EDGES, KEY, CalibrationReport, Reliability, calibrate
from infer.cli import common
from infer.evaluate import render_prompts

if TYPE_CHECKING:
    from rich.table import Table

HELP = """\
Decode prompts with a head and compare how sure it was of each candidate with how often it was right;
fit a map from the one to the other on half of the prompts, judge it on the other half, and keep it on
the head's card, from which every command reads it. Draft trees are then grown and cut by probabilities.
Answers cannot change."""

EXAMPLE = """\
headstart calibrate runs/demo/best
headstart calibrate runs/demo/best --temperature 0 0.8 --limit 8 --dry-run --json calibration.json"""

_NUM_NODES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser)
    common.add_measurement_arguments(parser, limit=4, temperatures=(0.0, 0.7, 1.0))
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts decoded at once (default: 8)")
    parser.add_argument(
        "--nodes", type=int, default=_NUM_NODES, metavar="N", help=f"draft tokens of a tree (default: {_NUM_NODES})"
    )
    parser.add_argument("--dry-run", action="store_true", help="report only, and leave the head's card as it is")
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from tqdm import tqdm

    from infer.drafters import TreeSettings, head_drafter, trained_head
    from infer.engine import Engine

    folder = trained_head(args.head, purpose="to calibrate")
    chats = sorted(common.read_chats(args), key=lambda chat: chat.domain)
    target = common.load_target(args)
    # Not by load_drafter, which refuses a card whose calibration is broken: this command replaces it.
    network, card = load_head(folder, target.weights, device=target.device, dtype=target.dtype)
    target.check_card(card)
    drafter = head_drafter(network, target)
    tree = TreeSettings(max_nodes=args.nodes, adaptive=False)
    engine = Engine(target, drafter, max_requests=args.batch, tree=tree)
    prompts = render_prompts(target.tokenizer, chats, raw=args.raw)
    with tqdm(unit=" tokens", disable=None) as bar:
        calibration, report = calibrate(
            engine,
            drafter,
            [prompt.token_ids for prompt in prompts],
            temperatures=args.temperature,
            max_tokens=args.max_tokens,
            seed=args.seed,
            progress=bar.update,
        )
    console = Console()
    for table in tables(report):
        console.print(table, "")
    if args.dry_run:
        common.note("dry run: the head's card is left as it is")
    elif report.improves:
        update_card(folder, drafter={**card.drafter, KEY: calibration.to_dict()})
        common.note(f"wrote the calibration to the card of {args.head}")
    else:
        common.note("calibrated shares tell no more of held-out prompts than raw ones: the card is left as it is")
    settings = {"target": target.name, "head": str(args.head), "max_tokens": args.max_tokens, "tree": asdict(tree)}
    common.write_json(args.json, {**settings, **calibration.to_dict(), **report.to_dict()})
    return 0


def tables(report: CalibrationReport) -> list[Table]:
    """Figures by temperature, before and after; then how often candidates of each share were right."""
    columns = ("seen", "error", "after", "Brier", "after", "length", "after", "promised", "after")
    title = f"{report.num_held_out} held-out prompts: shares, and tokens a round, before and after"
    summary = common.plain_table(title, "", columns)
    for one in report.comparisons:
        before, after = one.before, one.after
        shares = (before.calibration_error, after.calibration_error, before.brier, after.brier)
        lengths = (one.lengths_before.accepted, one.lengths_after.accepted)
        promises = (one.lengths_before.predicted, one.lengths_after.predicted)
        figures = [*(f"{each:.3f}" for each in shares), *(f"{each:.2f}" for each in (*lengths, *promises))]
        summary.add_row(f"temperature {one.temperature:g}", str(before.num_observations), *figures)
    temperatures = [one.temperature for one in report.comparisons]
    return [
        summary,
        _bin_table("before: share said, and share right", temperatures, [one.before for one in report.comparisons]),
        _bin_table("after: share said, and share right", temperatures, [one.after for one in report.comparisons]),
    ]


def _bin_table(title: str, temperatures: Sequence[float], reliabilities: Sequence[Reliability]) -> Table:
    """One row a bin of shares, with a group of columns for each temperature."""
    columns = [name for temperature in temperatures for name in (f"T={temperature:g}", "said", "right")]
    table = common.plain_table(title, "share", columns)
    edges = (0.0, *BIN_EDGES, 1.0)
    for place, (low, high) in enumerate(pairwise(edges)):
        cells: list[str] = []
        for one in (reliability.bins[place] for reliability in reliabilities):
            figures = (f"{one.predicted:.3f}", f"{one.observed:.3f}") if one.num_observations else ("", "")
            cells += [str(one.num_observations), *figures]
        table.add_row(f"{low:g}-{high:g}", *cells)
    return table
