"""The cost table: how it is read between what was measured, what is kept of it, and what becomes of a damaged one."""

from __future__ import annotations

import json
from typing import Any

import pytest

import infer.cost
from infer.cost import (
    CONTEXT,
    CostModel,
    CostSlice,
    CostTable,
    cost_of,
    cost_path,
    measure_table,
    measure_target,
    medians_milliseconds,
    rising,
)
from infer.engine import Engine
from infer.target import TargetModel
from tests.infer.helpers import plain_ids, random_head, sampling

TABLE = CostTable(
    widths=(1, 8, 64),
    milliseconds=(10.0, 12.0, 40.0),
    slices=(
        CostSlice(batch=1, context=1024, widths=(1, 64), milliseconds=(11.0, 48.0)),
        CostSlice(batch=1, context=32, widths=(1, 64), milliseconds=(9.5, 39.0)),
        CostSlice(batch=8, context=256, widths=(8, 64), milliseconds=(14.0, 43.0)),
    ),
)


@pytest.fixture
def target(tiny_model, tmp_path, monkeypatch) -> TargetModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(infer.cost, "measure_table", lambda target: TABLE)
    monkeypatch.setattr(infer.cost, "load_average", lambda: 0.0)
    return TargetModel.wrap(tiny_model("llama"))


def test_a_table_is_measured_once(target, monkeypatch):
    assert cost_of(target) == TABLE
    monkeypatch.delattr(infer.cost, "measure_table")
    assert cost_of(target) == TABLE


_SLICE = {"widths": [1], "milliseconds": [1.0], "batch": 1, "context": 32}


def _stored(**changes: Any) -> str:
    return json.dumps({"widths": [1, 2], "milliseconds": [1.0, 1.5], "context": 256, "slices": [_SLICE], **changes})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[1, 2]",
        "{}",
        "[" * 100_000,
        '{"widths": [1, 2], "milliseconds": [1.0, 1.5]}',
        _stored(widths=3, milliseconds=4),
        _stored(widths=[1, 2, 3]),
        _stored(widths=[0, 2]),
        _stored(widths=[1, 2.5]),
        _stored(milliseconds=[0.0, 1.0]),
        _stored(milliseconds=[1.0, float("nan")]),
        _stored(milliseconds=["1", "2"]),
        _stored(milliseconds=[1.0, 10**400]),
        _stored(context="256"),
        _stored(context=-1),
        _stored(slices=None),
        _stored(slices={"a": 1}),
        _stored(slices=[3]),
        _stored(slices=[{**_SLICE, "batch": 0}]),
        _stored(slices=[{**_SLICE, "milliseconds": [1.0, 2.0]}]),
    ],
)
def test_a_damaged_table_is_measured_again(target, content):
    cost_of(target)
    cost_path(target).write_text(content)
    assert cost_of(target) == TABLE
    assert json.loads(cost_path(target).read_text())["milliseconds"] == [10.0, 12.0, 40.0]


def test_bytes_that_are_no_text_are_measured_again(target):
    cost_of(target)
    cost_path(target).write_bytes(b"\xff\xfe\x00")
    assert cost_of(target) == TABLE


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cost_of(target) == TABLE


def test_a_table_measured_beside_other_work_is_not_kept(target, monkeypatch):
    """Once a table from a loaded machine was kept for good, and trees stayed too small."""
    monkeypatch.setattr(infer.cost, "load_average", lambda: 99.0)
    assert cost_of(target) == TABLE
    assert not cost_path(target).exists()


def test_a_table_belongs_to_its_version_and_to_the_way_of_computing(target, monkeypatch):
    """A compiled forward costs something else, and a table of an older form is not even looked at."""
    paths = {cost_path(target)}
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward_kind", "something else")
        paths.add(cost_path(target))
    monkeypatch.setattr(infer.cost, "TABLE_VERSION", infer.cost.TABLE_VERSION + 1)
    paths.add(cost_path(target))
    assert len(paths) == 3


def test_a_short_target_is_measured_within_its_length(tiny_model):
    """Widths that its positions cannot hold are left out, as are contexts."""
    target = TargetModel.wrap(tiny_model("llama", max_position_embeddings=20))
    assert measure_target(target, repeats=1).widths == (1, 2, 4, 6, 8, 12, 16)
    table = measure_table(target, seconds=0.0)
    assert table.widths == (1, 2, 4, 6, 8, 12, 16)
    assert table.context == 4
    assert table.slices == ()
    with pytest.raises(ValueError, match="at least 1 request"):
        table.at(batch=0)


def test_widths_are_the_rows_of_all_requests(tiny_model):
    """Each of a batch has at least one row; beyond that, rows are shared out as evenly as they go."""
    target = TargetModel.wrap(tiny_model("llama"))
    seen = []
    forward = target.forward
    target.forward = lambda groups, cache: seen.append([len(g.tokens) for g in groups]) or forward(groups, cache)  # type: ignore[method-assign, func-returns-value]
    assert measure_target(target, widths=(1, 3, 5), context=8, batch=3, repeats=1).widths == (3, 5)
    assert seen[:2] == [[1, 1, 1], [2, 2, 1]]


def test_a_whole_table_of_a_small_target(tiny_model):
    """Places that its 300 positions hold are all measured, and the table survives being kept."""
    target = TargetModel.wrap(tiny_model("llama", max_position_embeddings=300))
    table = measure_table(target, seconds=0.0)
    assert table.context == 300 - 128
    assert [(each.batch, each.context) for each in table.slices] == [(1, 32), (8, 256), (8, 32), (32, 256), (32, 32)]
    assert CostTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_a_slow_target_is_measured_for_one_request_only(tiny_model, monkeypatch):
    """The first use of a large model on a slow machine must not wait for every context and batch."""
    monkeypatch.setattr(infer.cost, "median_milliseconds", lambda action, *, repeats: 1e4)
    table = measure_table(TargetModel.wrap(tiny_model("llama", max_position_embeddings=300)), seconds=0.0)
    assert table.slices == ()
    assert table.at(context=32, batch=1).milliseconds == table.milliseconds


def test_a_table_is_a_cost_model_of_one_request():
    """Whoever takes a CostModel is given the table itself: it then speaks of one request at CONTEXT tokens."""
    assert TABLE.target_milliseconds(8) == 12.0
    assert TABLE.at().target_milliseconds(8) == 12.0
    assert TABLE.at(context=CONTEXT, batch=1).milliseconds == TABLE.milliseconds


@pytest.mark.parametrize("each", TABLE.slices)
def test_measured_places_keep_their_times(each):
    """At a slice's batch and context the table gives what was measured there (to rounding of one addition)."""
    there = TABLE.at(context=each.context, batch=each.batch)
    assert [there.target_milliseconds(width) for width in each.widths] == pytest.approx(each.milliseconds, abs=1e-12)


def test_between_and_beyond_measured_places():
    """By hand, from TABLE: extra milliseconds lie on lines between widths, contexts and batches."""
    halfway = TABLE.at(context=640)  # halfway from 256 (extra 0) to 1024 (extra 1 at width 1, 8 at 64)
    assert halfway.target_milliseconds(1) == pytest.approx(10.5)
    assert halfway.target_milliseconds(64) == pytest.approx(44.0)
    assert TABLE.at(context=1792).target_milliseconds(64) == pytest.approx(56.0)  # as far again
    # Batch 8 was measured at one context: 2 more at width 8, 3 more at width 64; batch 15 is as far again.
    assert TABLE.at(batch=15).target_milliseconds(64) == pytest.approx(46.0)
    # Between the batches of 1 and 8, at a context of which only the first has a measurement: both count by half.
    assert TABLE.at(context=1024, batch=4).target_milliseconds(64) == pytest.approx(40 + 8 * 4 / 7 + 3 * 3 / 7)
    assert TABLE.at(batch=8).widths == (8, 64)


def test_contexts_are_taken_in_steps():
    """Rounds of growing texts share a table, or each would make one of its own."""
    assert TABLE.at(context=1030) is TABLE.at(context=1024)
    assert TABLE.at(context=1100) is not TABLE.at(context=1024)


def test_noise_makes_no_table_fall():
    """A slice that came out faster than it could be still gives times above 0 that never fall with width."""
    table = CostTable(
        widths=(1, 2, 4),
        milliseconds=(10.0, 11.0, 12.0),
        slices=(CostSlice(batch=1, context=1024, widths=(1, 4), milliseconds=(15.0, 1.0)),),
    )
    for context in (0, 256, 600, 1024, 4096):
        times = table.at(context=context).milliseconds
        assert times == tuple(sorted(times))
        assert min(times) > 0


def test_a_model_without_places_is_the_same_everywhere():
    model = CostModel(widths=(1, 2), milliseconds=(1.0, 1.5))
    assert model.at(context=4096, batch=16) is model


def test_fixed_widths_have_places_too():
    """Four forwards of 16 rows, each at what 16 rows cost at that context."""
    fixed = TABLE.in_steps_of(16)
    assert fixed.target_milliseconds(50) == 4 * TABLE.target_milliseconds(16)
    longer = fixed.at(context=1024)
    assert longer.target_milliseconds(50) == 4 * TABLE.at(context=1024).target_milliseconds(16)


def test_rising_times_are_the_closest_that_never_fall():
    """Worked by hand: a dip and the peak before it share their mean, as often as it takes."""
    assert rising([1.0, 3.0, 2.0, 5.0]) == (1.0, 2.5, 2.5, 5.0)
    assert rising([6.0, 5.0, 1.0]) == (4.0, 4.0, 4.0)
    assert rising([1.0, 2.0, 2.0]) == (1.0, 2.0, 2.0)
    assert rising([]) == ()


def test_actions_take_turns():
    """What disturbs the machine disturbs all alike; a spent time limit ends all but the first round."""
    calls: list[str] = []
    actions = [lambda: calls.append("a"), lambda: calls.append("b")]
    assert len(medians_milliseconds(actions, repeats=2)) == 2
    assert calls == ["a", "b"] * 3
    calls.clear()
    medians_milliseconds(actions, repeats=5, seconds=0.0)
    assert calls == ["a", "b"] * 2


def test_an_engine_takes_a_table(tiny_model):
    """Trees fitted to a CostTable change no token."""
    from infer.drafters import HeadDrafter

    target = TargetModel.wrap(tiny_model("llama"))
    engine = Engine(target, HeadDrafter(random_head(target)), cost=TABLE)
    (answer,) = engine.generate([[5, 3, 1]], sampling())
    assert answer.token_ids == plain_ids(target, [5, 3, 1], sampling())
