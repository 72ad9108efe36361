"""`headstart eval`: measure acceptance on held-out prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from infer.bound_meter import Attainment, BoundReport
from infer.cli import common
from infer.evaluate import Acceptance, AcceptanceReport, evaluate, render_prompts
from infer.machine import dtype_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infer.engine import Engine

HELP = """\
Decode prompts with a head and report how many draft tokens the target accepts: by position in the
draft, by domain, by temperature and by context length, with and without answers that loop; and how
close that comes to the best acceptance that any lossless rule could reach. Trees do not adapt to this
machine (unless --adaptive is given), so the figures are the head's own."""

EXAMPLE = """\
headstart eval runs/demo/best
headstart eval runs/demo/best --prompts prompts.jsonl --temperature 0 0.7 1 --json acceptance.json"""

_MAX_POSITIONS = 6  # as many as fit 80 columns; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser)
    common.add_measurement_arguments(parser, limit=None)
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts decoded at once (default: 8)")
    parser.add_argument(
        "--bound",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare each step's acceptance with its bound, where the drafter has a head (default)",
    )
    common.add_tree_arguments(parser)
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from tqdm import tqdm

    chats = common.read_chats(args)
    target = common.load_target(args)
    prompts = render_prompts(target.tokenizer, chats, raw=args.raw)
    engine = common.build_engine(args, target, max_requests=args.batch, adaptive=False, drafts=True)
    with tqdm(unit=" tokens", disable=None) as bar:
        report = evaluate(
            engine,
            prompts,
            temperatures=args.temperature,
            max_tokens=args.max_tokens,
            seed=args.seed,
            bound=args.bound,
            progress=bar.update,
        )
    console = Console()
    console.print(common.exactness_line(engine.exactness, engine.rule.name), highlight=False)
    _print(console, report)
    common.write_json(args.json, {**_settings(args, engine), **report.to_dict()})
    return 0


def _print(console: Console, report: AcceptanceReport) -> None:
    for table in tables(report):
        console.print(table, "")
    console.print(
        f"{report.num_answers} answers, {report.num_looping} of them looping, "
        f"{report.num_completion_tokens} tokens. Definition: {report.definition}.",
        soft_wrap=True,
    )
    if report.bound is not None:
        console.print("", bound_table(report.bound), "")
        console.print(_bound_note(report.bound), soft_wrap=True)


def _settings(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """What a reader of the --json file needs to know to compare its figures with others."""
    return {
        "target": engine.target.name,
        "head": str(args.head),
        "dtype": dtype_name(engine.target.dtype),
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "batch": args.batch,
        "raw": args.raw,
        "exactness": engine.exactness,
        "rule": engine.rule.name,
        "lossless": engine.rule.lossless,
        "tree": asdict(engine.tree),
    }


def tables(report: AcceptanceReport) -> list[Table]:
    """Overall figures, then the breakdowns that have more than one entry."""
    depth = min(_MAX_POSITIONS, len(report.overall.by_position))
    overall = {"all answers": report.overall}
    if report.num_looping:
        overall["without looping answers"] = report.without_loops
    result = [_table("accepted length, and share of rounds accepted at each draft position", overall, depth)]
    breakdowns: Sequence[tuple[str, Mapping[Any, Acceptance]]] = (
        ("domain", report.by_domain),
        ("temperature", report.by_temperature),
        ("context length", report.by_context),
    )
    return result + [_table(f"by {title}", pools, depth) for title, pools in breakdowns if len(pools) > 1]


def _table(title: str, pools: Mapping[Any, Acceptance], depth: int) -> Table:
    """One row a pool: accepted length, then the share of rounds that reached each draft position."""
    positions = range(1, depth + 1)
    table = common.plain_table(title, "", ("rounds", "tokens", "length", *(f"at {d}" for d in positions)))
    for name, pool in pools.items():
        shares = [f"{pool.at_position(position):.2f}" for position in positions]
        label = f"{name:g}" if isinstance(name, float) else str(name)
        table.add_row(label, str(pool.num_rounds), str(pool.num_tokens), f"{pool.accepted_length:.2f}", *shares)
    return table


def bound_table(report: BoundReport) -> Table:
    """One row a pool of nodes: acceptance of a step, the best that any lossless rule could reach, and their ratio."""
    title = "acceptance of a step, and the best there could be"
    table = common.plain_table(title, "", ("nodes", "accepted", "bound", "ratio", "+-"))
    pools: list[tuple[str, Attainment]] = [("all nodes", report.overall)]
    pools += [(f"at {position}", pool) for position, pool in report.by_position.items()]
    for name, breakdown in (("temperature ", report.by_temperature), ("", report.by_domain)):
        if len(breakdown) > 1:
            pools += [(f"{name}{key}", pool) for key, pool in breakdown.items()]
    for label, pool in pools:
        figures = (f"{figure:.3f}" for figure in (pool.achieved, pool.bound, pool.ratio, pool.standard_error))
        table.add_row(label, str(pool.num_nodes), *figures)
    return table


def _bound_note(report: BoundReport) -> str:
    text = (
        f"{report.overall.num_nodes} of {report.num_visited} visited nodes; +- is one standard error of the ratio. "
        "What the tree's budget cuts counts as lost."
    )
    if report.num_without_record:
        share = report.num_without_record / (report.num_visited + report.num_without_record)
        text += f" {share:.0%} of the nodes have a lookup's candidates beside the head's, and are left out."
    return text
