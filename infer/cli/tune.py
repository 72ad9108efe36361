"""`headstart tune`: find the draft settings that pay on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import common
from infer.drafters.spec import FOLDER, NO_DRAFT, head_folder, load_drafter, parse_spec
from infer.machine import machine_facts
from infer.tune.settings import TUNING_FILE, TunedSettings, Workload, machine_key

if TYPE_CHECKING:
    from rich.table import Table

    from infer.drafters.base import Drafter
    from infer.target import TargetModel
    from infer.tune.tuner import TunedWorkload, Tuner

HELP = """\
Find the draft settings that make the most tokens a second here: nodes, depth, branching, adaptive or
fixed trees, a lookup beside the head or not, and whether to draft at all. What the target accepts is
recorded once, along its own text; what rounds cost is measured on this machine; every setting is then
replayed from the two. The outcome is written to tuning.json in HEAD's folder, and every command takes
its settings from there unless told otherwise. Answers do not change."""

EXAMPLE = """\
headstart tune runs/demo/best
headstart tune runs/demo/best --batch 1 4 --temperature 0 1 --verify --json tune.json --plot tune.png
headstart tune ngram --target models/smollm2-135m --dry-run"""

_MOST_ROWS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser)
    group = parser.add_argument_group("workloads (every combination is tuned for)")
    group.add_argument("--batch", type=int, nargs="+", default=[1], metavar="N", help="requests at once (default: 1)")
    group.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="0 is greedy (default: 0)"
    )
    group.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens before an answer, made up of other prompts' (default: the prompts as they are)",
    )
    group.add_argument(
        "--exactness",
        choices=("seed", "distribution"),
        default="seed",
        help="seed (default): tokens stay plain decoding's; distribution: rejection rules are tried too",
    )
    prompts = parser.add_argument_group("prompts (half of each domain is kept to verify on)")
    common.add_prompts_arguments(prompts, limit=4)
    prompts.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    prompts.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i is drawn with seed N + i")
    checks = parser.add_argument_group("measuring what was predicted")
    checks.add_argument(
        "--verify",
        action="store_true",
        help="measure the best predictions, their neighbours and plain decoding on the prompts kept; choose by that",
    )
    checks.add_argument("--exhaustive", action="store_true", help="measure every setting that was searched (hours)")
    checks.add_argument("--top", type=int, default=4, metavar="N", help="predictions that --verify takes (default: 4)")
    checks.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each prompt (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="report only, and write no tuning.json")
    parser.add_argument(
        "--out", type=common.output_file, metavar="FILE", help=f"write the settings here, not to HEAD's {TUNING_FILE}"
    )
    parser.add_argument("--plot", type=common.output_file, metavar="FILE", help="draw predicted speed-ups to an image")
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from infer.cost import cost_of
    from infer.evaluate import render_prompts
    from infer.tune.picture import plot
    from infer.tune.tuner import Prompts, Tuner

    out = _destination(args)
    workloads = _workloads(args)
    common.warn_if_busy()
    chats = common.read_chats(args)
    target = common.load_target(args)
    rendered = render_prompts(target.tokenizer, chats, raw=args.raw)
    prompts = Prompts.split([(each.domain, each.token_ids) for each in rendered])
    if (args.verify or args.exhaustive) and not prompts.held_out:
        raise ValueError("no prompt is left to verify on: give at least two prompts of a domain (--limit, --prompts)")
    with _Bar() as bar:
        tuner = Tuner(
            target=target,
            drafters=_drafters(args.head, target),
            prompts=prompts,
            table=cost_of(target),
            max_tokens=args.max_tokens,
            seed=args.seed,
            rules=("block", "traversal") if args.exactness == "distribution" else (),
            progress=bar,
        )
        tuned = _tuned(args, tuner, workloads)
    console = Console()
    for each in tuned:
        for table in tables(each):
            console.print(table, "")
        for line in summary(each):
            console.print(line, "", soft_wrap=True, highlight=False)
    common.write_json(args.json, _report(args, target, tuned))
    if args.plot is not None:
        plot(tuned, args.plot)
        common.note(f"wrote {args.plot}")
    if out is not None:
        settings = TunedSettings(
            machine=machine_key(target), target=target.fingerprint, settings=tuple(_written(tuned))
        )
        settings.save(out)
        common.note(f"wrote {out}")
    return 0


def _tuned(args: argparse.Namespace, tuner: Tuner, workloads: Sequence[Workload]) -> list[TunedWorkload]:
    tuned = tuner.run(workloads)
    if args.verify or args.exhaustive:
        tuned = [tuner.verify(each, top=args.top, repeats=args.repeats, everything=args.exhaustive) for each in tuned]
    return tuned


def _written(tuned: Sequence[TunedWorkload]) -> Iterator[Any]:
    """The choice for each workload; beside one that is not seed-exact, the best that is."""
    for each in tuned:
        setting = each.setting()
        yield setting
        if setting.rule != "match":
            yield each.seed_exact().setting()


def _destination(args: argparse.Namespace) -> Path | None:
    """Where the settings go; what is wrong with the arguments is told before the target loads."""
    specs = parse_spec(args.head)
    if specs[0].kind == NO_DRAFT:
        raise ValueError("'none' drafts nothing, so there is nothing to tune: give a head or another drafter")
    for name, least in (("top", 1), ("repeats", 1), ("max_tokens", 3)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.dry_run:
        return None
    if args.out is not None:
        return Path(args.out)
    folder = head_folder(args.head)
    if folder is None or len(specs) > 1:
        raise ValueError(f"{args.head!r} has no folder to keep its settings in: add --out FILE, or --dry-run")
    return folder / TUNING_FILE


def _workloads(args: argparse.Namespace) -> list[Workload]:
    if min(args.batch) < 1 or min(args.temperature) < 0 or min(args.context, default=1) < 1:
        raise ValueError(
            "a workload has at least 1 request, a temperature of at least 0 and a context of at least 1 token; got "
            f"--batch {args.batch}, --temperature {args.temperature}, --context {args.context}"
        )
    return [
        Workload(batch=batch, temperature=temperature, context=context)
        for context, temperature, batch in product(args.context or [None], args.temperature, args.batch)
    ]


def _drafters(head: str, target: TargetModel) -> Mapping[bool, Drafter]:
    """HEAD's drafter; of a lone trained head, without and with a lookup."""
    is_lone_head = [spec.kind for spec in parse_spec(head)] == [FOLDER]
    drafters = {
        hybrid: load_drafter(head, target, hybrid=hybrid) for hybrid in ((False, True) if is_lone_head else (False,))
    }
    return {hybrid: drafter for hybrid, drafter in drafters.items() if drafter is not None}


def tables(tuned: TunedWorkload) -> Iterator[Table]:
    """The best predictions beside plain decoding; then what was measured of them."""
    found = tuned.found
    title = f"{tuned.workload}: {len(found.predictions)} settings searched"
    table = common.plain_table(title, "predicted", ("tokens/s", "x plain", "accepted"))
    shown = [*found.predictions[:_MOST_ROWS], *([] if found.plain in found.predictions[:_MOST_ROWS] else [found.plain])]
    for each in shown:
        table.add_row(
            str(each.setting),
            f"{each.tokens_per_second:.1f}",
            f"{found.speedup(each):.2f}",
            f"{each.accepted_length:.2f}",
        )
    yield table
    if not tuned.verified:
        return
    table = common.plain_table("measured on the prompts kept", "", ("tokens/s", "x plain", "predicted", "off by"))
    best = sorted(tuned.verified, key=lambda each: -each.measured_speedup)
    for one in [*best[: 2 * _MOST_ROWS], *[each for each in best[2 * _MOST_ROWS :] if each.prediction == found.plain]]:
        table.add_row(
            str(one.prediction.setting),
            f"{one.measured.tokens_per_second:.1f}",
            f"{one.measured_speedup:.2f}",
            f"{one.predicted_speedup:.2f}",
            f"{one.error:+.0%}",
        )
    yield table


def summary(tuned: TunedWorkload) -> list[str]:
    choice = tuned.choice
    line = f"{tuned.workload}: {choice.setting}, {tuned.found.speedup(choice):.2f}x plain as predicted"
    own = next((each for each in tuned.verified if each.prediction == choice), None)
    if own is not None:
        line += f", {own.measured_speedup:.2f}x as measured"
    lines = [line + f". A round's cost is off by {tuned.cost.error:.0%} (median)."]
    if tuned.regret is not None:
        errors = sorted(abs(each.error) for each in tuned.verified)
        lines.append(
            f"Predicted speed-ups are off by {errors[len(errors) // 2]:.0%} (median); the predicted best is "
            f"{tuned.regret:.0%} slower than the best of the {len(errors)} that were measured."
        )
    return lines


def _report(args: argparse.Namespace, target: TargetModel, tuned: Sequence[TunedWorkload]) -> dict[str, Any]:
    return {
        "machine": machine_facts(),
        "target": target.name,
        "head": str(args.head),
        "settings": {
            name: getattr(args, name) for name in ("max_tokens", "seed", "limit", "raw", "exactness", "repeats")
        },
        "workloads": [each.to_dict() for each in tuned],
    }


class _Bar:
    """One bar for the stage at hand."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage != self._stage or self._bar is None:
            self.__exit__()
            self._bar = tqdm(total=total, desc=stage, disable=None, leave=False)
            self._stage = stage
        self._bar.total = max(total, done)
        self._bar.update(done - self._bar.n)
