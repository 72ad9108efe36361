"""An evaluation as tables, plots, histograms and marked text, and a head as an artifact, in wandb's own objects.

Nothing here is needed to train: it is imported with the trackers and touches wandb only when called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heads.checkpoint import CARD_FILE
from train.reports.evaluation import Evaluation
from train.reports.metrics import finite
from train.reports.samples import samples_page
from train.reports.table import COLUMNS, KEYS, Cell


def figures_of(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """By the name that wandb shows it under."""
    import wandb

    figures: dict[str, Any] = {}
    table = evaluation.table
    if table is not None and table.cells:
        figures["eval/acceptance_table"] = wandb.Table(
            columns=["global_step", *COLUMNS], data=[[step, *row] for row in table.rows()]
        )
        for key in KEYS:
            figures[f"eval/acceptance_by_{key}"] = _position_plot(table.pooled(key), key)
    if evaluation.calibration:
        rows = [
            [step, temperature, one.predicted, one.observed, one.num_observations]
            for temperature, curve in evaluation.calibration.items()
            for one in curve.bins
            if one.num_observations
        ]
        columns: list[str | int] = ["global_step", "temperature", "predicted", "observed", "drafts"]
        figures["eval/calibration_table"] = wandb.Table(columns=columns, data=rows)
        figures["eval/calibration"] = _calibration_plot(evaluation)
    counts = evaluation.report.overall.histogram
    if counts:
        lengths = np.arange(1, max(counts) + 1)
        edges = np.append(lengths, len(lengths) + 1)
        heights = np.array([counts.get(int(length), 0) for length in lengths])
        figures["eval/accepted_length_histogram"] = wandb.Histogram(np_histogram=(heights, edges))
    if evaluation.samples:
        figures["eval/samples"] = wandb.Html(samples_page(evaluation.samples), inject=False)
    return figures


def head_artifact(name: str, folder: Path) -> Any:
    """The augmented model folder, its card as metadata."""
    import wandb

    card = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    artifact = wandb.Artifact(f"{name}-head", type="model", metadata=finite(card))
    artifact.add_dir(str(folder))
    return artifact


def _position_plot(cells: Sequence[Cell], key: str) -> Any:
    """Share of rounds accepted by draft position, a line each temperature, domain or context."""
    import wandb

    return wandb.plot.line_series(
        xs=[list(range(1, len(cell.accepted) + 1)) for cell in cells],
        ys=[list(cell.shares) for cell in cells],
        keys=[f"{getattr(cell, key)} ({cell.num_rounds} rounds)" for cell in cells],
        title=f"share of rounds accepted, by {key}",
        xname="draft position",
    )


def _calibration_plot(evaluation: Evaluation) -> Any:
    import wandb

    lines = list(_calibration_lines(evaluation))
    return wandb.plot.line_series(
        xs=[xs for _, xs, _ in lines],
        ys=[ys for _, _, ys in lines],
        keys=[name for name, _, _ in lines],
        title="drafts that came true, by their probability",
        xname="draft probability",
    )


def _calibration_lines(evaluation: Evaluation) -> Iterator[tuple[str, list[float], list[float]]]:
    yield "as promised", [0.0, 1.0], [0.0, 1.0]
    for temperature, curve in evaluation.calibration.items():
        bins = [one for one in curve.bins if one.num_observations]
        yield f"temperature {temperature:g}", [one.predicted for one in bins], [one.observed for one in bins]
