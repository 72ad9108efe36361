"""Filling a store ahead of training: every row is accounted for, and what a lossy form costs is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.chat import Rendered
from infer.target import TargetModel
from tests.train.features.feature_rows import (
    SHARED_LENGTHS,
    TAPS,
    assert_equal,
    cached,
    fill_as_one_of_several,
    random_rows,
)
from tests.train.two_processes import Processes
from train.features import OnlineFeatures
from train.features.codec import Codec
from train.features.errors import measure_errors, spread
from train.features.filling import Count, fill


@pytest.fixture
def rows() -> list[Rendered]:
    return random_rows(5, 12, 7, 30, 9)


def test_every_row_is_accounted_for(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """New, already there, repeated and without room add up to what was given, in rows and in tokens."""
    fill(cached(target, tmp_path), rows[:2])
    done: list[int] = []
    room = cached(target, tmp_path).store.num_bytes + 4000
    source = cached(target, tmp_path, max_bytes=room)
    account = fill(source, [*rows, rows[0], rows[3]], on_row=done.append)
    assert account.given == Count(rows=7, tokens=5 + 12 + 7 + 30 + 9 + 5 + 30)
    assert account.present == Count(rows=2, tokens=17)
    assert account.repeated == Count(rows=2, tokens=35)
    assert account.stored.rows + account.beyond.rows == 3
    assert account.stored.tokens + account.beyond.tokens == 46
    assert account.beyond.rows
    assert sorted(done) == [5, 7, 9, 12, 30]
    assert source.online.num_computed_tokens == account.stored.tokens  # what has no room is not computed
    assert "already there" in account.describe()
    more = fill(cached(target, tmp_path), rows)
    both = account + more
    assert both.given == Count(rows=12, tokens=98 + 63)
    assert more.present.rows + more.stored.rows == 5


def test_processes_share_the_rows_out(target: TargetModel, tmp_path: Path) -> None:
    """Two of a run fill one folder: each computes its part, and both get the account of all."""
    with Processes(2) as processes:
        accounts = processes.run(fill_as_one_of_several, str(tmp_path))
        again = processes.run(fill_as_one_of_several, str(tmp_path))
    rows = random_rows(*SHARED_LENGTHS)
    everything = Count.of(rows)
    assert [account.given for account in accounts] == [account.stored for account in accounts] == [everything] * 2
    assert [account.present for account in again] == [everything] * 2
    last = cached(target, tmp_path)
    assert last.store.num_rows == len(rows)
    for row in rows:
        assert_equal(last.get(row), OnlineFeatures(target, TAPS).get(row))
    assert last.online.num_computed_tokens == 0


def test_the_error_report_is_that_of_what_is_read_back(target: TargetModel, rows: list[Rendered]) -> None:
    """Against plain sums over whole logits; exact forms have no error."""
    exact = measure_errors(target, Codec.of(target, TAPS), rows)
    assert (exact.kl, exact.max_kl, exact.argmax_changed) == (0.0, 0.0, 0.0)
    assert set(exact.relative_error.values()) == {0.0}
    report = measure_errors(target, Codec.of(target, TAPS, "int8"), rows)
    online, kept = OnlineFeatures(target, TAPS), OnlineFeatures(target, TAPS, feature_dtype="int8")
    states, read = (torch.cat([source.get(row).taps for row in rows]).float() for source in (online, kept))
    size = target.hidden_size
    for place, tap in enumerate(TAPS):
        columns = slice(place * size, (place + 1) * size)
        error = (states[:, columns] - read[:, columns]).norm() / states[:, columns].norm()
        assert report.relative_error[f"tap {tap}"] == pytest.approx(float(error), rel=1e-4)
        assert 0 < float(error) < 0.01
    labels = torch.cat([torch.tensor([*row.loss_mask[1:], False]) for row in rows])
    laws = [
        (torch.cat([source.get(row).last for row in rows]).float() @ target.lm_head_weight.T)[labels].log_softmax(-1)
        for source in (online, kept)
    ]
    kl = (laws[0].exp() * (laws[0] - laws[1])).sum(-1)
    assert report.positions == int(labels.sum())
    assert report.kl == pytest.approx(float(kl.mean()), rel=1e-2, abs=1e-8)
    changed = int((laws[0].argmax(-1) != laws[1].argmax(-1)).sum())
    assert report.argmax_changed == changed / report.positions
    assert "kept in int8" in report.describe()
    assert [len(row.token_ids) for row in spread(rows, 2)] == [5, 7]
    assert spread(rows) == rows
