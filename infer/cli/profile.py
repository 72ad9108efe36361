"""`headstart profile`: measure what forwards cost at each width."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from infer.cli import common
from infer.profile import VERIFIED_NODES, VERIFIED_PATH

if TYPE_CHECKING:
    from rich.table import Table

    from infer.profile import ProfileReport

HELP = """\
Time the target's forward over 1 to 64 rows, beside the least it could take: its weights over this
machine's memory bandwidth, and its matrices multiplied with nothing in between. The table is kept and
decides how wide draft trees are here; it never changes which tokens come out. Also: what verification
costs by sampling parameters, and what a forward of fixed shape costs (--exactness bitwise)."""

EXAMPLE = """\
headstart profile --target models/smollm2-135m --dtype bfloat16
headstart profile runs/demo/best --json profile.json --plot profile.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser, head_required=False)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="runs of each width (default: 7)")
    parser.add_argument("--plot", type=common.output_file, metavar="FILE", help="draw times and floors to an image")
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from infer.drafters import load_drafter
    from infer.profile import plot, profile

    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    common.warn_if_busy()
    target = common.load_target(args)
    report = profile(target, load_drafter(args.head, target, hybrid=False), repeats=args.repeats)
    console = Console()
    console.print(table(report), "")
    console.print(verification_table(report), "")
    for line in summary(report):
        console.print(line, soft_wrap=True, highlight=False)
    common.write_json(args.json, report.to_dict())
    if args.plot is not None:
        plot(report, args.plot)
        common.note(f"wrote {args.plot}")
    return 0


def table(report: ProfileReport) -> Table:
    """Forward time by width, against one row's time and against the floor."""
    title = f"{report.target}, {report.dtype}, {report.machine['threads']} threads, context {report.context}"
    result = common.plain_table(title, "width", ("ms", "x width 1", "ms a row", "x matmul floor"))
    for width, milliseconds in zip(report.widths, report.milliseconds, strict=True):
        result.add_row(
            str(width),
            f"{milliseconds:.1f}",
            f"{milliseconds / report.milliseconds[0]:.2f}",
            f"{milliseconds / width:.2f}",
            f"{milliseconds / report.matmul_floor_milliseconds:.2f}",
        )
    return result


def verification_table(report: ProfileReport) -> Table:
    """What a walk costs by sampling parameters, against the forward that it follows."""
    title = f"verification, {VERIFIED_NODES} nodes, {VERIFIED_PATH} kept"
    result = common.plain_table(title, "parameters", ("ms", "% of the forward"))
    for name, milliseconds in report.verification_milliseconds.items():
        share = 100 * milliseconds / report.verified_forward_milliseconds
        result.add_row(name, f"{milliseconds:.2f}", f"{share:.1f}")
    return result


def summary(report: ProfileReport) -> list[str]:
    lines = [
        f"weights {report.weight_megabytes:.0f} MB; one large matrix-vector product reads "
        f"{report.bandwidth_gigabytes_per_second:.1f} GB/s here",
        f"bandwidth floor {report.bandwidth_floor_milliseconds:.1f} ms: weight bytes over that speed",
        f"matmul floor {report.matmul_floor_milliseconds:.1f} ms: the target's own matrices, each multiplied once",
    ]
    lines += [
        f"a forward of fixed shape ({cost.row_width} rows, exactness bitwise) {cost.fixed_milliseconds:.1f} ms: "
        f"{cost.ratio:.2f}x an ordinary one"
        for cost in report.fixed
    ]
    if report.draft is not None:
        draft = report.draft
        lines.append(
            f"a draft step of {draft.name} {draft.step_milliseconds:.2f} ms: {draft.weight_megabytes:.1f} MB, "
            f"bandwidth floor {draft.floor_milliseconds:.2f} ms"
        )
    return lines
