"""`headstart bench`: compare speed and answers with plain decoding and with transformers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer.bench import METHODS, BenchReport, Row, benchmark, ids_hash
from infer.cli import common
from infer.evaluate import DEFINITION, EvalPrompt, render_prompts

if TYPE_CHECKING:
    from rich.table import Table

    from infer.target import TargetModel

HELP = """\
Answer prompts with and without the draft, and with transformers' own generate, one after the other in
one process, and compare tokens a second. Beside each speed stand the accepted length, the length at
which the draft breaks even, and the share of answers equal to plain decoding's."""

EXAMPLE = """\
headstart bench runs/demo/best
headstart bench runs/demo/best --temperature 0 0.8 --limit 2 --dtype bfloat16 --json bench.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser)
    common.add_measurement_arguments(parser, limit=2)
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="M", help=" ".join(METHODS)
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of each answer; the median counts (default: 1)"
    )
    common.add_tree_arguments(parser)
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from tqdm import tqdm

    common.warn_if_busy()
    chats = common.read_chats(args)
    target = common.load_target(args)
    prompts = render_prompts(target.tokenizer, chats, raw=args.raw)
    for line in first_prompt(target, prompts, raw=args.raw):
        common.note(line)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = common.build_engine(args, target, max_requests=1, max_length=longest + args.max_tokens, drafts=True)
    num_runs = len(prompts) * len(args.temperature) * len(args.methods) * args.repeats
    with tqdm(total=num_runs, unit=" runs", disable=None) as bar:
        report = benchmark(
            engine,
            prompts,
            head=str(args.head),
            temperatures=args.temperature,
            max_tokens=args.max_tokens,
            methods=args.methods,
            repeats=args.repeats,
            seed=args.seed,
            progress=lambda: bar.update(1),
        )
    console = Console()
    for table in tables(report):
        console.print(table, "")
    promise = common.exactness_line(report.settings["exactness"], report.settings["rule"])
    lines = (
        promise,
        *divergence_lines(report),
        *rounding_lines(report),
        *report.advice(),
        f"Definition: {DEFINITION}.",
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    common.write_json(args.json, report.to_dict())
    return 0


def first_prompt(target: TargetModel, prompts: Sequence[EvalPrompt], *, raw: bool) -> list[str]:
    """The first prompt as the model gets it, so that a wrong template is seen."""
    token_ids = list(prompts[0].token_ids)
    text = target.tokenizer.decode(token_ids, skip_special_tokens=False)
    how = "raw text, no chat template" if raw else "chat template"
    return [f"first prompt ({how}, {len(token_ids)} tokens, ids {ids_hash(token_ids)}):", text, ""]


def tables(report: BenchReport) -> list[Table]:
    """All prompts, the time split, then without looping answers, then by domain (drafted decoding only)."""
    first = report.results[0]
    title = f"{report.target}, {report.head}, {first.dtype}, batch 1, {first.num_prompts} prompts"
    result = [_speeds(title, report.results), _time_split(report.results)]
    unlooped = [row.num_prompts for row in report.without_loops]
    if unlooped and min(unlooped) < first.num_prompts:
        counts = ", ".join(map(str, dict.fromkeys(unlooped)))
        result.append(_speeds(f"without looping answers ({counts} prompts)", report.without_loops))
    drafted = [row for row in report.by_domain if row.method == "headstart"]
    if len({row.domain for row in drafted}) > 1:
        result.append(_speeds("headstart by domain", drafted))
    return result


def rounding_lines(report: BenchReport) -> list[str]:
    """What a share of identical answers below 100 % means where arithmetic is not float32."""
    promised = report.settings["exactness"]
    drafted = [
        row
        for row in report.results
        if row.method == "headstart" and promised != "lossy" and (row.temperature == 0 or promised != "distribution")
    ]
    if not drafted or drafted[0].dtype == "float32" or all(row.identical_to_plain == 1 for row in drafted):
        return []
    stock = next((row.identical_to_plain for row in report.results if row.method == "stock"), None)
    beside = "" if stock is None else f" (transformers' own generate agrees with plain decoding on {stock:.0%})"
    return [
        f"In {drafted[0].dtype} forwards of different widths round differently, so near ties go either way{beside}; "
        "--dtype float32 shows literal equality."
    ]


def divergence_lines(report: BenchReport) -> list[str]:
    lines = []
    for each in report.first_divergences:
        margin = "one of the tokens ruled out or missing" if each.margin is None else f"margin {each.margin:.2g}"
        lines.append(
            f"prompt {each.prompt} at temperature {each.temperature:g}: differs from plain decoding at token "
            f"{each.position}, {margin} ({'near tie' if each.near_tie else 'NOT a near tie'})"
        )
    return lines


def _speeds(title: str, rows: Sequence[Row]) -> Table:
    columns = ("T", "tokens/s", "x plain", "x stock", "accepted", "expected x", "identical")
    table = common.plain_table(title, "", columns)
    for row in rows:
        table.add_row(
            row.domain or row.method,
            f"{row.temperature:g}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio_to_plain:.2f}",
            _number(row.ratio_to_stock),
            _number(row.accepted_length),
            _number(row.expected_speedup),
            _share(row.identical_to_plain),
        )
    return table


def _time_split(rows: Sequence[Row]) -> Table:
    """Where the engine's time goes, and what a round costs in plain steps."""
    table = common.plain_table("time split", "", ("T", "draft", "verify", "forward", "other", "break-even"))
    for row in rows:
        if row.draft_share is None or row.verify_share is None or row.forward_share is None:
            continue
        other = 1 - row.draft_share - row.verify_share - row.forward_share
        shares = (row.draft_share, row.verify_share, row.forward_share, other)
        table.add_row(
            row.method,
            f"{row.temperature:g}",
            *map(_share, shares),
            _number(row.break_even_accepted_length),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
