"""`metrics.jsonl` is valid JSON whatever the run does, and nothing in it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.reports.metrics import METRICS_FILE, MetricsFile, every_record, finite, read_metrics


def strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_no_number_is_not_written(tmp_path: Path) -> None:
    """NaN and infinity made lines that strict readers refuse; the key goes, a place in a list becomes null."""
    values = {"step": 1, "loss": float("nan"), "deep": {"a": float("inf"), "b": 2.0}, "list": [1.0, float("-inf")]}
    MetricsFile(tmp_path).write("train", values)
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert strict(line) == {"event": "train", "step": 1, "deep": {"b": 2.0}, "list": [1.0, None]}
    assert finite((1, "text", None)) == [1, "text", None]


def test_resumed_points_replace_those_after_the_checkpoint(tmp_path: Path) -> None:
    """The file keeps every line, with a marker; readers see each step once."""
    metrics = MetricsFile(tmp_path)
    for step in (10, 20, 30, 40, 50):
        metrics.write("train", {"step": step, "loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a") as stream:
        stream.write('{"event": "tra')  # killed in the middle of a line
    metrics = MetricsFile(tmp_path)
    metrics.write("resume", {"step": 40})
    metrics.write("train", {"step": 50, "loss": 2.0})
    steps = [(record["step"], record["loss"]) for record in read_metrics(tmp_path) if record["event"] == "train"]
    assert steps == [(10, 1.0), (20, 1.0), (30, 1.0), (40, 1.0), (50, 2.0)]
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 8
    assert len(every_record(tmp_path)) == 7


def test_a_full_disk_is_said_once_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that found no room are written when there is room again, each once and in order."""
    notices: list[str] = []
    metrics = MetricsFile(tmp_path, notices.append)
    metrics.write("train", {"step": 1})
    real = Path.open

    def full(path: Path, mode: str = "r", **settings: Any) -> Any:
        if mode != "a":
            return real(path, mode, **settings)
        with real(path, "a") as stream:
            stream.write('{"event": "tr')  # part of a line still went out
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    for step in (2, 3):
        metrics.write("train", {"step": step})
    monkeypatch.undo()
    metrics.write("train", {"step": 4})
    assert [strict(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [1, 2, 3, 4]
    assert len(notices) == 1
    assert "No space left" in notices[0]
