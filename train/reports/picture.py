"""`acceptance.png`: a run's curves, from its `metrics.jsonl` alone.

matplotlib is imported where it is used; without it a run still trains and only the picture is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.checkpoint import staged_file
from train.reports.evaluation import verification_in
from train.reports.metrics import METRICS_FILE
from train.reports.story import Record, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_FILE = "acceptance.png"


def plot_run(folder: Path) -> Path | None:
    """Draw the run's curves; None where there is nothing to draw or nothing to draw with."""
    if not (folder / METRICS_FILE).is_file():
        return None
    story = Story.read(folder)
    if story.best is None:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    (length, speed, overlap), (position, domain, context) = figure.subplots(2, 3)
    acceptance = story.best["acceptance"]
    _draw_acceptance(length, story)
    _draw_speed(speed, story.evaluations)
    _draw_overlap(overlap, story)
    _draw_positions(position, acceptance)
    _draw_parts(domain, acceptance.get("by_domain", {}), "domain")
    _draw_parts(context, acceptance.get("by_context", {}), "tokens before the round")
    how = "simulated" if story.best.get("simulated") else verification_in(story.best)
    figure.suptitle(story.name + (f" ({how})" if how else ""))
    path = folder / PICTURE_FILE
    with staged_file(path) as new:
        figure.savefig(new, dpi=120, format="png")
    return path


def _draw_acceptance(axes: Axes, story: Story) -> None:
    evaluations = story.evaluations
    minutes = [record["train_seconds"] / 60 for record in evaluations]
    lengths = [record["accepted_length"] for record in evaluations]
    errors = [record.get("standard_error") or 0.0 for record in evaluations]
    axes.errorbar(minutes, lengths, yerr=errors, marker="o", color="black", capsize=3)
    axes.set(xlabel="training minutes", ylabel="tokens a round", title="accepted length (black), agreement (dashed)")
    shares = axes.twinx()
    for depth, points in enumerate(story.curves_by_depth("agreement", evaluations)[:4], start=1):
        shares.plot(*_columns(points), linestyle="--", label=f"depth {depth}")
    shares.set(ylim=(0, 1))
    if shares.get_lines():
        shares.legend(loc="upper left", fontsize="small", ncols=2)


def _draw_speed(axes: Axes, evaluations: Sequence[Record]) -> None:
    """Tokens a second of a few held-out prompts, with the head and plain, measured beside each other."""
    timed = [record for record in evaluations if record.get("speed")]
    minutes = [record["train_seconds"] / 60 for record in timed]
    for name, label in (("tokens_per_second", "with the head"), ("plain_tokens_per_second", "plain")):
        axes.plot(minutes, [record["speed"][name] for record in timed], marker="o", label=label)
    axes.set(xlabel="training minutes", ylabel="tokens a second", title="speed", ylim=(0, None))
    if timed:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="grey")


def _draw_overlap(axes: Axes, story: Story) -> None:
    """Overlap of head and target on training batches, pale as logged and averaged over neighbours."""
    curves = story.curves_by_depth("overlap_by_depth", story.trainings)
    for depth, points in enumerate(curves):
        minutes, values = _columns(points)
        axes.plot(minutes, values, linewidth=0.5, alpha=0.3, color=f"C{depth}")
        axes.plot(minutes, smoothed(values), label=f"depth {depth + 1}", color=f"C{depth}")
    axes.set(xlabel="training minutes", ylim=(0, 1), title="overlap with the target, training batches")
    if curves:
        axes.legend()


def _draw_positions(axes: Axes, acceptance: Mapping[str, Any]) -> None:
    for temperature, measured in acceptance["by_temperature"].items():
        shares = measured["by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=f"T = {float(temperature):g}")
    axes.set(xlabel="draft position", ylim=(0, 1), title="best head: share of rounds accepted")
    axes.legend()


def _draw_parts(axes: Axes, parts: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Accepted length of the best head by domain or context, with the number of rounds it rests on."""
    labels = [f"{part}\n({measured['num_rounds']} rounds)" for part, measured in parts.items()]
    lengths = [measured["accepted_length"] - 1 for measured in parts.values()]
    bars = axes.barh(range(len(parts)), lengths, left=1.0, color="tab:blue")
    axes.bar_label(bars, [f"{length + 1:.2f}" for length in lengths], padding=3, fontsize="small")
    axes.set_yticks(range(len(parts)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="tokens a round (chain)", ylabel=name, title="best head: accepted length")


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value averaged with those before it, over a fortieth of the curve."""
    span = max(1, len(values) // 40)
    windows = [values[max(0, i - span) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
