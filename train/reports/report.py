"""`acceptance.png` and the text summary of a run, from its `metrics.jsonl` alone.

matplotlib is imported where it is used; without it a run still trains and only the picture is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.reports.tracking import METRICS_FILE, read_metrics

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
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    (length, speed, overlap), (position, domain, context) = figure.subplots(2, 3)
    best = _best(evaluations)
    _draw_acceptance(length, evaluations)
    _draw_speed(speed, evaluations)
    _draw_overlap(overlap, steps)
    _draw_positions(position, best)
    _draw_parts(domain, best["acceptance"]["by_domain"], "domain")
    _draw_parts(context, best["acceptance"]["by_context"], "tokens before the round")
    figure.suptitle(folder.name)
    path = folder / PICTURE_FILE
    figure.savefig(path, dpi=120)
    return path


def _best(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(evaluations, key=lambda record: float(record["accepted_length"]))


def _draw_positions(axes: Axes, best: Mapping[str, Any]) -> None:
    for temperature, measured in best["acceptance"]["by_temperature"].items():
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


def _draw_acceptance(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    minutes = [record["train_seconds"] / 60 for record in evaluations]
    axes.plot(minutes, [record["accepted_length"] for record in evaluations], marker="o", color="black")
    axes.set(xlabel="training minutes", ylabel="tokens a round", title="accepted length (black), agreement (dashed)")
    shares = axes.twinx()
    for depth in range(min(4, min(len(record["agreement"]) for record in evaluations))):
        values = [record["agreement"][depth] for record in evaluations]
        shares.plot(minutes, values, linestyle="--", label=f"depth {depth + 1}")
    shares.set(ylim=(0, 1))
    shares.legend(loc="upper left", fontsize="small", ncols=2)


def _draw_speed(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second of a few held-out prompts, with the head and plain, measured beside each other."""
    timed = [record for record in evaluations if record.get("speed")]
    minutes = [record["train_seconds"] / 60 for record in timed]
    for name, label in (("tokens_per_second", "with the head"), ("plain_tokens_per_second", "plain")):
        axes.plot(minutes, [record["speed"][name] for record in timed], marker="o", label=label)
    axes.set(xlabel="training minutes", ylabel="tokens a second", title="speed", ylim=(0, None))
    if timed:
        axes.legend()


def _draw_overlap(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Overlap of head and target on training batches, pale as logged and averaged over neighbours."""
    depths = max((len(record["overlap_by_depth"]) for record in steps), default=0)
    for depth in range(depths):
        points = [
            (record["train_seconds"] / 60, record["overlap_by_depth"][depth])
            for record in steps
            if depth < len(record["overlap_by_depth"])
        ]
        minutes, values = zip(*points, strict=True)
        span = max(1, len(values) // 40)
        smooth = [
            sum(values[max(0, i - span) : i + 1]) / len(values[max(0, i - span) : i + 1]) for i in range(len(values))
        ]
        axes.plot(minutes, values, linewidth=0.5, alpha=0.3, color=f"C{depth}")
        axes.plot(minutes, smooth, label=f"depth {depth + 1}", color=f"C{depth}")
    axes.set(xlabel="training minutes", ylim=(0, 1), title="overlap with the target, training batches")
    if depths:
        axes.legend()


def describe_run(folder: Path) -> str:
    """The run in a few lines, each figure with its definition."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        if (folder / METRICS_FILE).is_file():
            raise ValueError(
                f"{folder} was stopped before it wrote {SUMMARY_FILE}: go on with `headstart train ... --resume`, "
                f"or see {folder / METRICS_FILE}"
            )
        raise ValueError(f"{folder} holds no run: {path} does not exist")
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
