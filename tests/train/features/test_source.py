"""Features of training rows: the target's own numbers, the same however and whenever they are asked for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import FeatureDType
from heads.base import final_tap
from infer.chat import Rendered
from infer.target import Features, TargetModel
from tests.train.features.feature_rows import TAPS, assert_equal, cached, random_rows
from tests.train.training_fixtures import NUM_LAYERS, tiny_recipe, tiny_target
from train.features import CachedFeatures, OnlineFeatures, make_features
from train.features.manifest import FORMAT_VERSION
from train.features.store import folder_bytes
from train.sharded import ShardedTarget
from train.world import World


@pytest.fixture
def rows() -> list[Rendered]:
    return random_rows(5, 12, 7, 30, 9, 21, 4, 16)


def test_features_are_the_targets_own(target: TargetModel, rows: list[Rendered]) -> None:
    """Logits rebuilt from the final state equal the model's own, so the final norm is applied once (a missing one cost
    a third of the acceptance); taps are hidden_states by their Hugging Face numbers; the log normalizer is there before
    tokens under the loss, and nowhere else.
    """
    features = OnlineFeatures(target, TAPS).get(rows[1])
    with target.stock() as model, torch.no_grad():
        output = model(torch.tensor([rows[1].token_ids]), output_hidden_states=True)
    logits = features.last @ target.lm_head_weight.T
    torch.testing.assert_close(logits, output.logits[0], rtol=1e-4, atol=1e-4)
    assert features.log_normalizer is not None
    read = torch.tensor([*rows[1].loss_mask[1:], False])
    expected = output.logits[0].logsumexp(-1)
    torch.testing.assert_close(features.log_normalizer[read], expected[read], rtol=1e-4, atol=1e-4)
    assert bool(features.log_normalizer[~read].isnan().all())
    first, second, _ = features.taps.split(target.hidden_size, dim=-1)
    torch.testing.assert_close(first, output.hidden_states[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, output.hidden_states[2][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [TAPS, (1, final_tap(NUM_LAYERS)), (final_tap(NUM_LAYERS),)])
@pytest.mark.parametrize("feature_dtype", ["target", "bfloat16", "int8"])
def test_any_order_batch_and_time_give_the_same_bits(
    target: TargetModel,
    rows: list[Rendered],
    tmp_path: Path,
    taps: tuple[int, ...],
    feature_dtype: FeatureDType,
) -> None:
    """Rows alone, several at once, shuffled, twice, from a store that was opened anew: an extractor that took rows by
    their place once gave the states of other tokens. A lossy form rounds rows that are kept nowhere too."""
    online = OnlineFeatures(target, taps, feature_dtype=feature_dtype)
    expected = [online.get(row) for row in rows]
    chance = random.Random(0)
    for size in (1, 3, 8):
        store = cached(target, tmp_path / f"{size}", taps=taps, feature_dtype=feature_dtype, shard_bytes=2000)
        for _ in range(2):
            order = chance.sample(range(len(rows)), len(rows))
            for start in range(0, len(rows), size):
                picked = order[start : start + size]
                found = store.get_many([rows[index] for index in picked])
                for index, one in zip(picked, found, strict=True):
                    assert_equal(one, expected[index])
        assert store.online.num_computed_tokens == sum(len(row.token_ids) for row in rows)
        store.flush()
        again = cached(target, tmp_path / f"{size}", taps=taps, feature_dtype=feature_dtype)
        for row, one in zip(rows, expected, strict=True):
            assert_equal(again.get(row), one)
        assert again.online.num_computed_tokens == 0


@pytest.mark.parametrize("feature_dtype", ["target", "bfloat16", "int8"])
def test_the_law_that_teaches_sums_to_one(
    target: TargetModel, rows: list[Rendered], feature_dtype: FeatureDType
) -> None:
    """exp(logit - log normalizer) over the whole vocabulary, from the state as it is kept. The normalizer of the exact
    state would be off by the rounding (1e-3 here); what is left is float32's (1e-5)."""
    for row in rows:
        features = OnlineFeatures(target, TAPS, feature_dtype=feature_dtype).get(row)
        assert features.log_normalizer is not None
        logits = features.last.to(target.lm_head_weight) @ target.lm_head_weight.T
        sums = (logits - features.log_normalizer[:, None]).exp().sum(-1)
        read = torch.tensor([*row.loss_mask[1:], False])
        torch.testing.assert_close(sums[read], torch.ones(int(read.sum())), rtol=1e-5, atol=1e-5)


def test_what_no_loss_reads_is_not_computed(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """A teacher over the draft vocabulary needs no log normalizer, which is a product with the whole LM head. Rows kept
    without it, or with that of another mask, still serve one that does, with the same bits."""
    draft = cached(target, tmp_path, with_normalizer=False)
    assert draft.get(rows[0]).log_normalizer is None
    full = cached(target, tmp_path)
    online = OnlineFeatures(target, TAPS)
    assert_equal(full.get(rows[0]), online.get(rows[0]))
    full.get(rows[1])
    other = Rendered(token_ids=rows[1].token_ids, loss_mask=[place > 6 for place in range(12)])
    assert_equal(full.get(other), online.get(other))
    assert full.online.num_computed_tokens == len(rows[1].token_ids)


def test_states_that_are_not_finite_are_refused(rows: list[Rendered]) -> None:
    """float16 overflows in some targets; training on that would only show much later."""
    target = tiny_target(seed=3)
    target.final_norm.weight.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"not finite.*target.dtype=bfloat16"):
        OnlineFeatures(target, TAPS).get(rows[0])


def test_a_target_shared_out_among_processes_is_run_by_all_of_them(rows: list[Rendered], tmp_path: Path) -> None:
    """One process may have all its rows in the cache while another computes: it must take part in those forwards."""
    calls: list[int] = []

    class Counting(ShardedTarget):
        def features(self, token_ids: Any, taps: Any, **named: Any) -> list[Features]:
            calls.append(len(token_ids[0]))
            return super().features(token_ids, taps, **named)

    class Two(World):
        """The other process misses three rows."""

        def max(self, values: Any) -> list[float]:
            return [max(3.0, value) for value in values]

    source = cached(Counting.of(tiny_target(), []), tmp_path, world=Two(rank=0, size=2))
    for found, forwards in ((rows[:1], [5, 1, 1]), (rows[:1], [1, 1, 1]), ([], [1, 1, 1]), (rows[:2], [12, 1, 1])):
        calls.clear()
        assert len(source.get_many(found)) == len(found)
        assert calls == forwards


# From a recipe


def recipe(tmp_path: Path, **changes: Any) -> Any:
    return tiny_recipe(tmp_path / "none.jsonl", **changes)


def test_a_run_and_the_next_one_share_a_store(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """Other data, another head with some of the taps: what is there is read. Another target, dtype of states, or more
    taps: a store of its own."""
    told: list[str] = []

    def source(given: TargetModel = target, taps: tuple[int, ...] = TAPS, **changes: Any) -> CachedFeatures:
        made = make_features(recipe(tmp_path, **changes), given, taps=taps, folder=tmp_path, notice=told.append)
        assert isinstance(made, CachedFeatures)
        return made

    first = source()
    for row in rows:
        first.get(row)
    first.flush()
    online = OnlineFeatures(target, (2,))
    second = source(taps=(2,))
    for row in (*rows[::-1], *random_rows(6, seed=1)):
        assert_equal(second.get(row), online.get(row))
    second.flush()
    assert second.online.num_computed_tokens == 6
    third = source()
    assert third.store.num_rows == len(rows) + 1
    others = [source(taps=(1, 2, 3)), source(given=tiny_target(seed=1)), source(train__feature_dtype="int8")]
    assert len({one.store.folder for one in (third, *others)}) == 4
    assert any("8 rows" in text and str(first.store.folder) in text for text in told)


def test_without_a_budget_rows_are_computed(target: TargetModel, tmp_path: Path) -> None:
    for changes in ({"train__feature_cache": False}, {"train__feature_cache_gb": 0.0}):
        config = recipe(tmp_path, **changes)
        assert isinstance(make_features(config, target, taps=TAPS, folder=tmp_path), OnlineFeatures)
    assert not (tmp_path / ".features").exists()


def test_folders_of_another_format_are_told_and_left(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """An old cache is never trusted, nor does it vanish: it is told how much it takes."""
    old = tmp_path / ".features" / "0123"
    old.mkdir(parents=True)
    (old / "states.bin").write_bytes(b"x" * 20_000_000)
    newer = tmp_path / ".features" / "4567"
    newer.mkdir()
    (newer / "manifest.json").write_text(f'{{"format_version": {FORMAT_VERSION + 1}}}')
    told: list[str] = []
    source = make_features(recipe(tmp_path), target, taps=TAPS, folder=tmp_path, notice=told.append)
    assert_equal(source.get(rows[0]), OnlineFeatures(target, TAPS).get(rows[0]))
    assert "2 of the folders" in told[0]
    assert "(0.02 GB)" in told[0]
    assert folder_bytes(old) == 20_000_000


def test_a_full_disk_is_noticed_before_anything_runs(
    target: TargetModel, rows: list[Rendered], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows are known; only what the budget lets them take counts."""
    monkeypatch.setattr("train.features.store.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"lower train.feature_cache_gb, or set train.feature_cache=false"):
        make_features(recipe(tmp_path), target, taps=TAPS, folder=tmp_path, rows=rows, notice=lambda text: None)
    told: list[str] = []
    source = make_features(recipe(tmp_path), target, taps=TAPS, folder=tmp_path, notice=told.append)
    assert_equal(source.get(rows[0]), OnlineFeatures(target, TAPS).get(rows[0]))
    assert any("almost full" in text for text in told)
