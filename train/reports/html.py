"""`report.html`: a run's story on one page, from its folder alone.

What a run did not measure (an older one, one that is still going or was killed) is missing from its page, and the rest
is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from heads.checkpoint import staged_file
from train.reports.charts import Series, amount, line_chart
from train.reports.evaluation import verification_in
from train.reports.page import card, folded, grid, page, section, table, tiles
from train.reports.scaling import CONFIDENCE, Outlook, outlooks_across, outlooks_of_run
from train.reports.sections import acceptance, data_and_plan, honesty, machine, progress, samples
from train.reports.statistics import is_credible
from train.reports.story import Record, Story

REPORT_FILE = "report.html"


def write_report(folder: Path, path: Path | None = None) -> Path:
    """The page of one run; beside it unless `path` names a file."""
    return _write(path or folder / REPORT_FILE, run_page(Story.read(folder)))


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """The page of several runs: what more data would give."""
    return _write(path, comparison_page([Story.read(folder) for folder in folders]))


def run_page(story: Story) -> str:
    return page(
        f"{story.name} - headstart",
        [
            _head(story),
            progress(story),
            acceptance(story),
            honesty(story),
            samples(story),
            _outlook(outlooks_of_run(story)),
            machine(story),
            data_and_plan(story),
            _again(story),
        ],
    )


def comparison_page(stories: Sequence[Story]) -> str:
    rows = []
    for story in stories:
        best, labels = story.best, story.unique_label_tokens
        rows.append(
            (
                story.name,
                story.status,
                "?" if labels is None else f"{labels:,.0f}",
                "-" if best is None else _measured(best) + _how(best),
                "-" if best is None or not best.get("agreement") else f"{best['agreement'][0]:.3f}",
            )
        )
    header = ("run", "status", "unique label tokens", "accepted length", "agreement at depth 1")
    try:
        outlook = _outlook(outlooks_across(stories))
    except ValueError as error:
        outlook = section("What twice the data would give", f'<p class="quiet">{escape(str(error))}</p>')
    return page(
        "runs - headstart",
        ["<h1>Runs beside each other</h1>", card("", table(header, rows, num_texts=2)), outlook],
    )


def _write(path: Path, text: str) -> Path:
    with staged_file(path) as new:
        new.write_text(text, encoding="utf-8")
    return path


# Sections


def _head(story: Story) -> str:
    best, position = story.best, story.position
    values = []
    if best is not None:
        name = f"accepted length{_how(best) or ', tokens a round'}"
        values.append((_measured(best, digits=2), f"{name}, step {best['step']}"))
        speed = best.get("speed") or {}
        if is_credible(speed):
            values.append((f"{speed['speedup']:.2f}x", "plain decoding's speed"))
        if best.get("agreement"):
            values.append((f"{best['agreement'][0]:.1%}", "agreement with the target at depth 1"))
    values.append((f"{position.get('train_seconds', 0.0) / 60:.1f} min", f"of training, {position['step']:,} steps"))
    epochs = "" if position.get("epoch") is None else f" ({position['epoch']:.1f} epochs)"
    values.append((amount(float(position.get("tokens", 0))), f"token visits{epochs}"))
    resumed = f", resumed at step {', '.join(map(str, story.resumed_at))}" if story.resumed_at else ""
    warnings = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in story.warnings)
    return (
        f'<h1>{escape(story.name)}</h1><p class="status">{escape(story.status)}{resumed}</p>{warnings}{tiles(values)}'
    )


def _outlook(outlooks: Sequence[Outlook]) -> str:
    if not outlooks:
        return ""
    return section("What twice the data would give", grid(*(_outlook_card(one) for one in outlooks)))


def _outlook_card(outlook: Outlook) -> str:
    doubled, far = outlook.doubled, math.log2(2 * outlook.largest)
    first = math.log2(min(x for x, _ in outlook.points))
    series = [
        Series(
            name="fit",
            points=[(first, outlook.fit.at(2**first)), (far, doubled.value)],
            colour=1,
            style="dashed",
        ),
        Series(name="measured", points=[(math.log2(x), y) for x, y in outlook.points], style="dots"),
        Series(
            name=f"twice the data, {CONFIDENCE:.0%} interval",
            points=[(far, doubled.value)],
            errors=[doubled.high - doubled.value],
            colour=2,
            style="dots",
        ),
    ]
    chart = line_chart(series, x_name=outlook.unit, y_name=outlook.figure, log_x=True)
    return card(outlook.figure.capitalize(), chart, f"{outlook.describe()}. Limits: {outlook.caveat}.")


def _again(story: Story) -> str:
    """The card, the recipe, and the commands that make and measure the head again."""
    folder = story.folder
    commands = [
        f"headstart train {folder / 'config.yaml'}          # the same run, under another name: add name=OTHER",
        f"headstart train {folder / 'config.yaml'} --resume # go on from its last checkpoint",
        f"headstart report {folder}",
    ]
    if story.best is not None:
        commands += [f"headstart eval {folder / 'best'}", f"headstart bench {folder / 'best'}"]
    return section(
        "Again",
        card(
            "",
            f"<pre>{escape(chr(10).join(commands))}</pre>"
            + folded("Recipe (config.yaml)", story.config)
            + folded("The best head's card (headstart.json)", json.dumps(story.card, indent=2) if story.card else ""),
        ),
    )


def _how(record: Record) -> str:
    """Where it was not measured as usual."""
    how = "simulated" if record.get("simulated") else verification_in(record)
    return f" ({how})" if how else ""


def _measured(record: Record, *, digits: int = 3) -> str:
    error = record.get("standard_error")
    return f"{record['accepted_length']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
