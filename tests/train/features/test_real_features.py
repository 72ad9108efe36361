"""The demonstration target's features: its own logits, whatever else is asked for beside them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from infer.chat import render_training
from infer.target import TargetModel
from tests.train.features.feature_rows import assert_equal, cached
from train.features import OnlineFeatures, StoredFeatures, StoredTarget
from train.features.errors import measure_errors
from train.features.filling import fill
from train.features.stored_target import write_target

TAPS = (2, 15, 29)


@pytest.mark.slow
def test_features_of_a_real_target(smollm2_path: Path, tmp_path: Path) -> None:
    """Eight chats, one, three and eight at a time, shuffled, twice: the same bits. Logits rebuilt from what is kept and
    read back without the target are the stock model's: to 1e-3 of logits up to 30 (both sum in float32, in other
    orders). int8 moves the law by less than 1e-3 nats."""
    target = TargetModel.load(smollm2_path, dtype="float32")
    answers = ("Blue.", "The sea is deep and salty.", "def add(a, b):\n    return a + b", "2 + 2 = 4")
    rows = [
        render_training(
            target.tokenizer,
            [
                {"role": "user", "content": f"Question {number}: what is it?"},
                {"role": "assistant", "content": answers[number % 4]},
            ],
        )
        for number in range(8)
    ]
    online = OnlineFeatures(target, TAPS)
    expected = [online.get(row) for row in rows]
    chance = random.Random(0)
    for size in (1, 3, 8):
        source = cached(target, tmp_path / f"{size}", taps=TAPS, shard_bytes=1_000_000)
        for _ in range(2):
            order = chance.sample(range(8), 8)
            for start in range(0, 8, size):
                part = order[start : start + size]
                for place, found in zip(part, source.get_many([rows[i] for i in part]), strict=True):
                    assert_equal(found, expected[place])
    folder = tmp_path / "export"
    fill(cached(target, folder, taps=TAPS), rows)
    write_target(folder, target)
    stored = StoredTarget.load(folder, model=smollm2_path)
    for row, features in zip(rows[:2], StoredFeatures(stored, TAPS).get_many(rows[:2]), strict=True):
        with target.stock() as model, torch.no_grad():
            logits = model(torch.tensor([row.token_ids])).logits[0]
        rebuilt = features.last @ stored.lm_head_weight.T
        torch.testing.assert_close(rebuilt, logits, rtol=0, atol=1e-3)
        read = torch.tensor([*row.loss_mask[1:], False])
        assert features.log_normalizer is not None
        torch.testing.assert_close(features.log_normalizer[read], logits.logsumexp(-1)[read], rtol=0, atol=1e-3)
    report = measure_errors(
        target, cached(target, tmp_path / "int8", taps=TAPS, feature_dtype="int8").online.codec, rows
    )
    assert report.kl < 1e-3
    assert max(report.relative_error.values()) < 0.03
