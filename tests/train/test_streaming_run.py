"""Whole runs on streams and mixtures: interrupted and resumed, they end as if they had never been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import RunConfig
from infer.target import TargetModel
from tests.train.training_fixtures import Stopped, run, tiny_recipe, write_chats

pytestmark = pytest.mark.usefixtures("every_notice")

STEPS = 24


def recipe(folder: Path, **changes: Any) -> RunConfig:
    """24 steps of 2 visits: more than an epoch of either file."""
    files = tuple(str(write_chats(folder / f"{n}.jsonl", count=20 + n, seed=n)) for n in (1, 2))
    common = {"train__steps": STEPS, "train__save_every": 1, "train__num_evaluations": 1, "optim__batch_size": 2}
    return tiny_recipe(Path(files[0]), **{"data__train": files, "data__weights": (2, 1), **common, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "tiny" / "last" / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {"data__streaming": True, "data__shuffle_block": 7, "data__scan_rows": 12},
        {"data__streaming": True, "data__shuffle_block": 1000},
        {},
    ],
    ids=["small blocks", "one block", "in memory"],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    changes: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    """Bit for bit, three interruptions in a row, within blocks and at their borders, in a second epoch too."""
    config = recipe(tmp_path, **changes)
    run(config, tmp_path / "whole", target)
    resume = False
    for stop in (5, 6, 17):
        with pytest.raises(Stopped):
            run(config, tmp_path / "parts", target, stop_at=stop, resume=resume)
        resume = True
    summary = run(config, tmp_path / "parts", target, resume=True)
    assert summary["step"] == STEPS
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_the_summary_accounts_for_what_was_read(target: TargetModel, tmp_path: Path) -> None:
    """Of a stream, all that training read, and not the scan alone."""
    config = recipe(tmp_path, data__streaming=True, data__scan_rows=8, data__shuffle_block=7)
    summary = run(config, tmp_path, target)
    first, second = summary["data"]["sources"]
    assert summary["data"]["conversations_read"] == 8
    assert [first["read"]["rows_in"], second["read"]["rows_in"]] == [21, 22]
    assert (first["share"], second["share"]) == pytest.approx((2 / 3, 1 / 3))


def test_a_stream_that_has_changed_is_not_resumed(target: TargetModel, tmp_path: Path) -> None:
    config = recipe(tmp_path, data__streaming=True, data__scan_rows=8)
    with pytest.raises(Stopped):
        run(config, tmp_path, target, stop_at=5)
    with Path(config.data.train[1]).open("a", encoding="utf-8") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match="its data hash was"):
        run(config, tmp_path, target, resume=True)
