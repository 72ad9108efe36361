"""Features of training rows: the target's own numbers, the same whenever they are computed, and safe on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.chat import Rendered
from infer.target import TargetModel
from tests.train.training_fixtures import tiny_target
from train.features import JOURNAL_FILE, STATES_FILE, CachedFeatures, OnlineFeatures, RowFeatures, cache_key

TAPS = (1, 2, 4)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture
def rows() -> list[Rendered]:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 12, 7)
    return [
        Rendered(
            token_ids=torch.randint(4, 260, (length,), generator=generator).tolist(),
            loss_mask=[i > 2 for i in range(length)],
        )
        for length in lengths
    ]


def cached(target: TargetModel, rows: list[Rendered], folder: Path, max_bytes: int = 1 << 30) -> CachedFeatures:
    return CachedFeatures(OnlineFeatures(target, rows, TAPS), target, rows, TAPS, folder=folder, max_bytes=max_bytes)


def equal(one: RowFeatures, other: RowFeatures) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("taps", "last", "log_normalizer"))


def test_features_are_the_targets_own(target: TargetModel, rows: list[Rendered]) -> None:
    """Logits rebuilt from the final state equal the model's own, so the final norm is applied once (a missing one cost
    a third of the acceptance); taps are hidden_states by their Hugging Face numbers.
    """
    features = OnlineFeatures(target, rows, TAPS).get(1)
    with target.stock() as model, torch.no_grad():
        output = model(torch.tensor([rows[1].token_ids]), output_hidden_states=True)
    logits = features.last @ target.lm_head_weight.T
    torch.testing.assert_close(logits, output.logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.log_normalizer, output.logits[0].logsumexp(-1), rtol=1e-4, atol=1e-4)
    first, second, _ = features.taps.split(target.hidden_size, dim=-1)
    torch.testing.assert_close(first, output.hidden_states[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, output.hidden_states[2][0], rtol=1e-4, atol=1e-4)


def test_cache_returns_the_same_bits(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    online = OnlineFeatures(target, rows, TAPS)
    store = cached(target, rows, tmp_path)
    for index in (2, 0, 1, 0, 2):
        assert equal(store.get(index), online.get(index))
    assert store._online.num_computed_tokens == 24


def test_rows_survive_a_restart(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """Rows stored by a run that was killed (no close) are not computed again; the half-written line is ignored."""
    first = cached(target, rows, tmp_path)
    kept = first.get(1)
    with (first.folder / JOURNAL_FILE).open("a") as stream:
        stream.write('{"row": 0, "cr')
    second = cached(target, rows, tmp_path)
    assert equal(second.get(1), kept)
    assert second._online.num_computed_tokens == 0
    second.get(0)
    assert second._online.num_computed_tokens == 5


def test_damaged_rows_are_computed_again(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    store = cached(target, rows, tmp_path)
    kept = [store.get(index) for index in range(3)]
    kept = [RowFeatures(taps=k.taps.clone(), last=k.last.clone(), log_normalizer=k.log_normalizer) for k in kept]
    path = store.folder / STATES_FILE
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(bytes(content))
    again = cached(target, rows, tmp_path)
    assert all(equal(again.get(index), kept[index]) for index in range(3))
    assert again._online.num_computed_tokens == 7


def test_rows_beyond_the_budget_are_computed_at_every_visit(
    target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    width = 4 * target.hidden_size * 4 + 4
    store = cached(target, rows, tmp_path, max_bytes=17 * width)
    assert (store.num_cached_rows, store.num_bytes) == (2, 17 * width)
    for _ in range(2):
        for index in range(3):
            store.get(index)
    assert store._online.num_computed_tokens == 5 + 12 + 7 + 7
    assert (store.folder / STATES_FILE).stat().st_size == store.num_bytes
    assert "2 of 3 rows" in store.describe()


def test_nothing_is_reused_for_other_data_or_taps(target: TargetModel, rows: list[Rendered]) -> None:
    """A cache under a fixed name once served another data set's states."""
    other = [Rendered(token_ids=[*row.token_ids[:-1], 9], loss_mask=row.loss_mask) for row in rows]
    keys = {
        cache_key(target, rows, TAPS),
        cache_key(target, other, TAPS),
        cache_key(target, rows, (1, 2, 3)),
        cache_key(tiny_target(seed=1), rows, TAPS),
    }
    assert len(keys) == 4


def test_a_full_disk_is_noticed_before_anything_runs(
    target: TargetModel, rows: list[Rendered], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"lower train.feature_cache_gb, or set train.feature_cache=false"):
        cached(target, rows, tmp_path)
