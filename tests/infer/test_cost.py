"""The cost table: what is kept of it, and what becomes of a damaged one."""

from __future__ import annotations

import json

import pytest

import infer.cost
from infer.cost import CostModel, cost_of, cost_path, measure_target
from infer.target import TargetModel

TABLE = CostModel(widths=(1, 2), milliseconds=(1.0, 1.5))


@pytest.fixture
def target(tiny_model, tmp_path, monkeypatch) -> TargetModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(infer.cost, "measure_target", lambda target: TABLE)
    monkeypatch.setattr(infer.cost, "load_average", lambda: 0.0)
    return TargetModel.wrap(tiny_model("llama"))


def test_a_table_is_measured_once(target, monkeypatch):
    assert cost_of(target) == TABLE
    monkeypatch.delattr(infer.cost, "measure_target")
    assert cost_of(target) == TABLE


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[1, 2]",
        "{}",
        '{"widths": 3, "milliseconds": 4}',
        '{"widths": [1, 2], "milliseconds": [1.0]}',
        '{"widths": [1, 2], "milliseconds": [0.0, 1.0]}',
        '{"widths": [1, 2], "milliseconds": [1.0, NaN]}',
        '{"widths": [1, 2], "milliseconds": ["1", "2"]}',
    ],
)
def test_a_damaged_table_is_measured_again(target, content):
    cost_of(target)
    cost_path(target).write_text(content)
    assert cost_of(target) == TABLE
    assert json.loads(cost_path(target).read_text())["milliseconds"] == [1.0, 1.5]


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cost_of(target) == TABLE


def test_a_table_measured_beside_other_work_is_not_kept(target, monkeypatch):
    """Once a table from a loaded machine was kept for good, and trees stayed too small."""
    monkeypatch.setattr(infer.cost, "load_average", lambda: 99.0)
    assert cost_of(target) == TABLE
    assert not cost_path(target).exists()


def test_a_short_target_is_measured_within_its_length(tiny_model):
    """Widths that its positions cannot hold are left out."""
    target = TargetModel.wrap(tiny_model("llama", max_position_embeddings=20))
    assert measure_target(target, repeats=1).widths == (1, 2, 4, 8, 16)
