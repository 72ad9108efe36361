"""Rows of random tokens, stores in a folder, and what must be equal between two ways to a row's features."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.schema import FeatureDType
from infer.chat import Rendered
from infer.target import TargetModel
from tests.train.training_fixtures import tiny_target
from train.features import CachedFeatures, OnlineFeatures, RowFeatures
from train.features.filling import Account, fill
from train.features.manifest import Manifest
from train.features.store import FeatureStore
from train.world import World

TAPS = (1, 2, 4)
SHARED_LENGTHS = (5, 12, 7, 30, 9, 5, 21)


def random_rows(*lengths: int, seed: int = 0) -> list[Rendered]:
    """The answer begins at the fourth token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Rendered(
            token_ids=torch.randint(4, 260, (length,), generator=generator).tolist(),
            loss_mask=[place > 2 for place in range(length)],
        )
        for length in lengths
    ]


def cached(
    target: TargetModel,
    folder: Path,
    *,
    taps: Sequence[int] = TAPS,
    max_bytes: int = 1 << 30,
    shard_bytes: int = 1,
    feature_dtype: FeatureDType = "target",
    told: list[str] | None = None,
    **settings: Any,
) -> CachedFeatures:
    """A store in `folder` itself; with `shard_bytes` 1 every row is a shard of its own."""
    online = OnlineFeatures(target, taps, feature_dtype=feature_dtype, **settings)
    notice = [].append if told is None else told.append
    manifest = Manifest.of(target, online.codec)
    store = FeatureStore(folder, manifest, max_bytes=max_bytes, shard_bytes=shard_bytes, notice=notice)
    return CachedFeatures(online, store)


def assert_equal(one: RowFeatures, other: RowFeatures) -> None:
    """To the bit; numbers that are none (where a log normalizer is not read) are equal too."""
    for name in ("taps", "last", "log_normalizer"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine.nan_to_num(nan=-1e9), theirs.nan_to_num(nan=-1e9)), name


def in_child(work: Callable[[], object]) -> int:
    """Do it in a process of its own, which does not come back from it; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads that torch has started
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


def fill_as_one_of_several(folder: str) -> Account:
    """In a process that a launcher started: keep rows of `SHARED_LENGTHS`."""
    world = World.from_environment()
    world.start()
    return fill(cached(tiny_target(), Path(folder), shard_bytes=2000), random_rows(*SHARED_LENGTHS), world=world)
