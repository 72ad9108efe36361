"""`headstart profile`: measure what forwards and whole rounds cost, beside what they could cost at least."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from infer.cli import common

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from infer.profile import Floor, ProfileReport, RoundProfile

HELP = """\
Time the target's forward by width, context and batch, and rounds of a real engine on real prompts part
by part, each beside its floor: its bytes over this machine's bandwidth or its multiplications over the
rate at which it multiplies, whichever is longer. This machine's cost table is measured anew along with
it, and kept unless the machine is busy: it decides how wide draft trees are, never which tokens come
out. Also: what verification costs by sampling parameters, and what a forward of fixed shape costs
(--exactness bitwise)."""

EXAMPLE = """\
headstart profile --target models/smollm2-135m --dtype bfloat16
headstart profile runs/demo/best --batch 1 8 --context 256 1024 --json profile.json --plot profile.png
headstart profile runs/demo/best --temperature 0.8 --rounds 100"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser, head_required=False)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="N", help="one or more numbers of requests (default: 1)"
    )
    group.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[32, 256, 1024],
        metavar="N",
        help="tokens before a forward, one or more (default: 32 256 1024)",
    )
    group.add_argument("--repeats", type=int, default=7, metavar="N", help="runs of each forward (default: 7)")
    group.add_argument(
        "--rounds", type=int, default=48, metavar="N", help="rounds of each batch, 0 for none (default: 48)"
    )
    rounds = parser.add_argument_group("the rounds")
    common.add_prompts_arguments(rounds, limit=1)
    rounds.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    rounds.add_argument("--max-tokens", type=int, default=64, metavar="N", help="length of an answer (default: 64)")
    common.add_tree_arguments(parser)
    parser.add_argument("--plot", type=common.output_file, metavar="FILE", help="draw times and floors to an image")
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from infer.evaluate import render_prompts
    from infer.profile import plot, profile

    _check(args)
    args.graphs = False  # a graph cannot be taken apart, so rounds are those of the host
    common.warn_if_busy()
    chats = common.read_chats(args) if args.rounds else []
    target = common.load_target(args)
    prompts = [prompt.token_ids for prompt in render_prompts(target.tokenizer, chats, raw=args.raw)]
    report = profile(
        target,
        contexts=args.context,
        batches=args.batch,
        repeats=args.repeats,
        engine=common.build_engine(args, target, max_requests=max(args.batch)),
        prompts=prompts,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        num_rounds=args.rounds,
    )
    console = Console()
    for table in tables(report):
        console.print(table, "")
    if not report.is_kept:
        common.note("the cost table, from which trees take their size, was not kept: the machine is too busy for that")
    for line in summary(report):
        console.print(line, soft_wrap=True, highlight=False)
    common.write_json(args.json, report.to_dict())
    if args.plot is not None:
        plot(report, args.plot)
        common.note(f"wrote {args.plot}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """What is wrong with the arguments is told before the target loads."""
    for name, least in (("repeats", 1), ("rounds", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if min(args.batch) < 1:
        raise ValueError(f"--batch must be at least 1, got {min(args.batch)}")
    if min(args.context) < 0:
        raise ValueError(f"--context must be at least 0, got {min(args.context)}")


def tables(report: ProfileReport) -> Iterator[Table]:
    for batch in report.batches:
        yield forward_table(report, batch)
    for each in report.rounds:
        yield round_table(each)
    yield verification_table(report)


def forward_table(report: ProfileReport, batch: int) -> Table:
    """Forward times by width, for every context: milliseconds, and how often the floor goes into them."""
    contexts = report.forwards_of(batch)
    title = f"{report.target}, {report.dtype}, {report.device}\n{report.forward_kind} forward, batch {batch}"
    columns = [name for context in contexts for name in (f"ms at {context}", "x floor")]
    result = common.plain_table(title, "width", columns)
    for row in zip(*contexts.values(), strict=True):
        cells = [cell for each in row for cell in (f"{each.milliseconds:.1f}", f"{each.times_floor:.2f}")]
        result.add_row(str(row[0].width), *cells)
    return result


def round_table(profile: RoundProfile) -> Table:
    """The parts of a round, in its order, and their sum."""
    title = (
        f"a round, batch {profile.batch}, T = {profile.temperature:g}\n{profile.width:.0f} rows, "
        f"context {profile.context:.0f}, {profile.num_steps:.1f} draft steps, {profile.tokens:.2f} tokens a request"
    )
    result = common.plain_table(title, "part", ("ms", "% of round", "floor ms", "x floor", "bound by"))
    for part in profile.parts:
        result.add_row(
            part.name,
            f"{part.milliseconds:.2f}",
            f"{100 * part.share:.1f}",
            *_floor_cells(part.milliseconds, part.floor),
        )
    total = sum(part.milliseconds for part in profile.parts)
    result.add_row("sum", f"{total:.2f}", f"{100 * total / profile.milliseconds:.1f}", "", "", "", style="bold")
    return result


def _floor_cells(milliseconds: float, floor: Floor | None) -> tuple[str, str, str]:
    if floor is None or not floor.milliseconds:
        return "", "", ""
    return f"{floor.milliseconds:.2f}", f"{milliseconds / floor.milliseconds:.1f}", floor.bound


def verification_table(report: ProfileReport) -> Table:
    """What a walk costs by sampling parameters, against the forward that it follows."""
    from infer.profile import VERIFIED_NODES, VERIFIED_PATH

    title = f"verification, {VERIFIED_NODES} nodes, {VERIFIED_PATH} kept"
    result = common.plain_table(title, "parameters", ("ms", "% of the forward"))
    for name, milliseconds in report.verification_milliseconds.items():
        share = 100 * milliseconds / report.verified_forward_milliseconds
        result.add_row(name, f"{milliseconds:.2f}", f"{share:.1f}")
    return result


def summary(report: ProfileReport) -> list[str]:
    lines = [
        f"weights {report.weight_megabytes:.0f} MB; one large matrix-vector product reads "
        f"{report.bandwidth_gigabytes_per_second:.1f} GB/s here, one large matrix product makes "
        f"{report.teraoperations_per_second:.3g} T operations/s",
        f"bandwidth floor {report.bandwidth_floor_milliseconds:.1f} ms: weight bytes over that speed",
        f"matmul floor {report.matmul_floor_milliseconds:.1f} ms: the target's own matrices, each multiplied once "
        "as its forward does",
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
    return lines + [_notable_line(each) for each in report.rounds]


def _notable_line(profile: RoundProfile) -> str:
    """Which parts are worth a look."""
    from infer.profile import PARTS
    from infer.profile.rounds import NOTABLE_SHARE

    where = f"batch {profile.batch}"
    if profile.num_resting:
        where += f" ({profile.num_resting} rounds without a draft left out)"
    if not profile.notable:
        return f"{where}: beside the target's forward no part takes more than {100 * NOTABLE_SHARE:.0f} % of a round"
    named = (f"{part.name} {100 * part.share:.0f} % ({PARTS[part.name]})" for part in profile.notable)
    return f"{where}: beside the target's forward, over {100 * NOTABLE_SHARE:.0f} % of a round: {'; '.join(named)}"
