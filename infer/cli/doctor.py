"""`headstart doctor`: look a trained head over before it is trusted."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infer.cli import common

if TYPE_CHECKING:
    from rich.table import Table

    from infer.doctor import Report
    from infer.prompts import EvaluationPrompt

HELP = """\
Look a trained head over against its target: files and tensors, target and tokenizer, vocabulary map,
rotary embeddings; how well it guesses text of the target's own, and whether it would do better in
another reading of its files (layers counted otherwise, a norm elsewhere, a map in another form, a
tensor turned or exchanged); and whether decoding computes what training computed, depth by depth.
Findings name what is wrong and what to do. The exit status is 0 unless a check fails."""

EXAMPLE = """\
headstart doctor runs/demo/best
headstart doctor heads/imported --target models/smollm2-135m --json doctor.json"""

_COLOURS = {"ok": "green", "warning": "yellow", "FAIL": "bold red", "not tested": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", help="an augmented model's folder")
    group = common.add_target_arguments(parser)
    group.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the target; the head runs in float32 (default: float32, in which the last check is possible)",
    )
    group = parser.add_argument_group("prompts (the target's answers to the first of each domain are the texts)")
    common.add_prompts_arguments(group, limit=None)
    parser.add_argument(
        "--quick", action="store_true", help="leave out the readings in which single tensors are exchanged"
    )
    common.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from tqdm import tqdm

    from infer.doctor import CHECKS, Finding, examine
    from infer.drafters import trained_head
    from infer.evaluate import render_prompts

    start = time.perf_counter()
    folder = trained_head(args.head, purpose="to look over")
    chats = _by_turns(common.read_chats(args))
    target = common.load_target(args)
    raw = args.raw or not getattr(target.tokenizer, "chat_template", None)
    prompts = [prompt.token_ids for prompt in render_prompts(target.tokenizer, chats, raw=raw)]
    with tqdm(total=len(CHECKS), unit=" checks", disable=None, leave=False) as bar:

        def advance(finding: Finding) -> None:
            bar.set_description(finding.check)
            bar.update()

        report = examine(folder, target, prompts, quick=args.quick, progress=advance)
    console = Console()
    console.print(table(report))
    _print_verdict(console, report, time.perf_counter() - start)
    common.write_json(args.json, report.to_dict())
    return 0 if report.passed else 1


def _by_turns(chats: Sequence[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """The first of each domain, then the second of each, and so on: only the first few are answered."""
    seen: Counter[str] = Counter()
    places = []
    for index, chat in enumerate(chats):
        places.append((seen[chat.domain], index))
        seen[chat.domain] += 1
    return [chats[index] for _, index in sorted(places)]


def table(report: Report) -> Table:
    """One row a check."""
    from rich.table import Table

    result = Table(box=None, padding=(0, 1), collapse_padding=True, show_header=False)
    result.add_column(no_wrap=True)
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    for finding in report.findings:
        colour = _COLOURS[str(finding.verdict)]
        result.add_row(f"[{colour}]{finding.verdict}[/{colour}]", finding.check, _plain(finding.finding))
        if finding.advice:
            result.add_row("", "", _plain(f"-> {finding.advice}"))
    return result


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _print_verdict(console: Any, report: Report, seconds: float) -> None:
    warnings = sum(str(finding.verdict) == "warning" for finding in report.findings)
    also = f", {warnings} warning{'' if warnings == 1 else 's'}" if warnings else ""
    if report.passed:
        console.print(f"\n[green]Sound[/green]: no check fails{also} ({seconds:.0f} s).", highlight=False)
    else:
        names = ", ".join(finding.check for finding in report.failed)
        console.print(f"\n[red]Not sound[/red]: {names}{also} ({seconds:.0f} s).", highlight=False, soft_wrap=True)
