"""`acceptance.png` and the text summary of a run, from its `metrics.jsonl` alone.

matplotlib is imported where it is used; without it a run still trains and only the picture is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.tracking import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_FILE = "acceptance.png"
SUMMARY_FILE = "summary.json"


def plot_run(folder: Path) -> Path | None:
    """Draw the run's curves; None where there is nothing to draw or nothing to draw with."""
    records = read_metrics(folder)
    evaluations = [record for record in records if record["event"] == "evaluation"]
    steps = [record for record in records if record["event"] == "train"]
    if not evaluations:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _draw_positions(left, _best(evaluations), evaluations[-1])
    _draw_acceptance(middle, evaluations)
    _draw_loss(right, steps)
    figure.suptitle(folder.name)
    path = folder / PICTURE_FILE
    figure.savefig(path, dpi=120)
    return path


def _best(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(evaluations, key=lambda record: float(record["accepted_length"]))


def _draw_positions(axes: Axes, best: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    for name, record in (("best", best), ("last", last)):
        for temperature, measured in record["acceptance"]["by_temperature"].items():
            shares = measured["by_position"]
            label = f"{name}, T={float(temperature):g}"
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set(xlabel="draft position", ylabel="share of rounds accepted", ylim=(0, 1), title="acceptance by position")
    axes.legend()


def _draw_acceptance(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    minutes = [record["train_seconds"] / 60 for record in evaluations]
    axes.plot(minutes, [record["accepted_length"] for record in evaluations], marker="o", color="black")
    axes.set(xlabel="training minutes", ylabel="tokens a round", title="accepted length (chain), agreement")
    shares = axes.twinx()
    for depth in range(min(4, min(len(record["agreement"]) for record in evaluations))):
        values = [record["agreement"][depth] for record in evaluations]
        shares.plot(minutes, values, linestyle="--", label=f"agreement, depth {depth + 1}")
    shares.set(ylim=(0, 1))
    shares.legend(loc="lower right", fontsize="small")


def _draw_loss(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    depths = max((len(record["overlap_by_depth"]) for record in steps), default=0)
    for depth in range(depths):
        points = [
            (record["train_seconds"] / 60, record["overlap_by_depth"][depth])
            for record in steps
            if depth < len(record["overlap_by_depth"])
        ]
        axes.plot(*zip(*points, strict=True), linewidth=0.8, label=f"depth {depth + 1}")
    axes.set(xlabel="training minutes", ylabel="overlap with the target", ylim=(0, 1), title="training batches")
    if depths:
        axes.legend()


def describe_run(folder: Path) -> str:
    """The run in a few lines, each figure with its definition."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no finished run: {path} does not exist")
    summary = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        f"{summary['name']}: {summary['status']} after {summary['step']} steps, "
        f"{summary['train_seconds'] / 60:.1f} min, {summary['tokens']:,} token visits ({summary['epoch']:.1f} epochs)",
        f"data: {summary['data']['rows']} rows, {summary['data']['label_tokens']:,} labels, "
        f"{summary['label_coverage']:.1%} of them in the draft vocabulary of {summary['draft_vocab_size']:,}",
    ]
    best = summary["best"]
    if best:
        lines.append(f"best head: step {best['step']}, on held-out prompts, by the decode loop drafting a chain")
        lines.append(f"  {best['acceptance']['definition']}")
        for temperature, measured in best["acceptance"]["by_temperature"].items():
            shares = " ".join(f"{share:.2f}" for share in measured["by_position"])
            lines.append(
                f"  temperature {float(temperature):g}: {measured['accepted_length']:.2f} over "
                f"{measured['num_rounds']} rounds; share of rounds accepted by draft position {shares}"
            )
        agreement = " ".join(f"{share:.3f}" for share in best["agreement"])
        lines.append(f"  agreement with the target's most likely token on held-out text, by depth: {agreement}")
    return "\n".join(lines)
