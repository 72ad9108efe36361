"""The prediction's interval holds as often as it says, and nothing is predicted from too little."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from train.reports.metrics import MetricsFile
from train.reports.report import describe_runs
from train.reports.scaling import LogLinearFit, outlooks_across, outlooks_of_run
from train.reports.story import Story


def write_run(folder: Path, lengths: list[tuple[int, float]], *, labels: int = 10_000) -> Story:
    """A run with an evaluation at each number of token visits."""
    metrics = MetricsFile(folder)
    for step, (tokens, length) in enumerate(lengths, start=1):
        pool = {"num_rounds": 10, "num_tokens": 15, "accepted_length": length, "by_position": [length - 1]}
        metrics.write(
            "evaluation",
            {
                "step": step,
                "epoch": 2.0,
                "tokens": tokens,
                "train_seconds": 60.0 * step,
                "accepted_length": length,
                "acceptance": {"by_temperature": {"0.0": pool}},
                "agreement": [length / 4],
            },
        )
    summary = {"name": folder.name, "step": len(lengths), "status": "finished", "data": {"label_tokens": labels}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return Story.read(folder)


def test_a_line_is_found_exactly() -> None:
    amounts = [1000 * 2**k for k in range(5)]
    fit = LogLinearFit.of(amounts, [1.0 + 0.2 * k for k in range(5)])
    doubled = fit.predict(2 * amounts[-1])
    assert fit.slope == pytest.approx(0.2)
    assert doubled.value == pytest.approx(2.0)
    assert (doubled.low, doubled.high) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("num_points", [4, 6, 12])
def test_the_interval_covers_as_often_as_it_says(num_points: int) -> None:
    """95 % intervals of 3,000 synthetic curves: the share that covers varies by 0.4 %, four times that is allowed."""
    chance = np.random.default_rng(num_points)
    amounts = np.linspace(1, 6, num_points) * 1e5
    trials, covered = 3000, 0
    for _ in range(trials):
        values = 1.2 + 0.1 * np.log2(amounts / 1e5) + chance.normal(0, 0.03, size=num_points)
        new = 1.2 + 0.1 * np.log2(12) + chance.normal(0, 0.03)
        predicted = LogLinearFit.of(amounts.tolist(), values.tolist()).predict(12e5)
        covered += predicted.low <= new <= predicted.high
    assert 0.934 < covered / trials < 0.966


def test_too_few_points_or_one_size_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 points, there are 3"):
        LogLinearFit.of([1, 2, 4], [1, 2, 3])
    with pytest.raises(ValueError, match="same amount"):
        LogLinearFit.of([5, 5, 5, 5], [1, 2, 3, 4])


def test_within_a_run_it_says_that_visits_are_not_new_text(tmp_path: Path) -> None:
    story = write_run(tmp_path / "one", [(1000 * k, 1.0 + 0.1 * k) for k in range(1, 7)])
    length, agreement = outlooks_of_run(story)
    assert (length.figure, agreement.figure) == ("accepted length", "agreement at depth 1")
    assert "not what new text would give" in length.caveat
    assert "token visits" in length.unit
    assert length.doubled.low < length.doubled.value < length.doubled.high
    assert json.dumps(length.to_dict(), allow_nan=False)
    assert outlooks_of_run(write_run(tmp_path / "few", [(1000 * k, 1.5) for k in range(1, 4)])) == []


def test_between_runs_the_data_are_unique_labels(tmp_path: Path) -> None:
    """Best of each run against its size; fewer than four runs, or no spread, give a reason instead."""
    stories = [write_run(tmp_path / str(k), [(500, 1.1), (1000, 1.2 + 0.1 * k)], labels=1000 * 2**k) for k in range(5)]
    length, _ = outlooks_across(stories)
    assert length.unit == "unique label tokens"
    assert length.largest == 16_000
    assert length.doubled.value == pytest.approx(1.7)
    assert "twice the unique label tokens (32,000)" in describe_runs([story.folder for story in stories])
    assert "no prediction: a fit needs at least 4 points" in describe_runs([story.folder for story in stories[:3]])


def test_simulated_and_decoded_lengths_are_not_mixed(tmp_path: Path) -> None:
    """They are measured differently, so a line through both would say nothing."""
    folders = [tmp_path / str(k) for k in range(5)]
    stories = [write_run(folder, [(500, 1.1)], labels=1000 * 2**k) for k, folder in enumerate(folders)]
    assert outlooks_across(stories)
    record = json.loads((folders[2] / "metrics.jsonl").read_text()) | {"simulated": True}
    (folders[2] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    mixed = [Story.read(folder) for folder in folders]
    with pytest.raises(ValueError, match="no one curve"):
        outlooks_across(mixed)
    assert "(simulated, from the training graph)" in describe_runs(folders)
