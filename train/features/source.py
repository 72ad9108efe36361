"""Where a row's features come from: computed at each visit, kept after the first, or made elsewhere.

A row's features are computed alone, so they are the same to the bit whenever, in whatever order and beside whatever
other rows they are asked for, and a resumed run sees the very numbers an uninterrupted one does. (Several rows in one
forward would round otherwise, and are no faster: 4 % at a few hundred tokens each.) What a row's features are does not
depend on what is kept of it either: rows that are not kept go through the same codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from configs.schema import FeatureDType, RunConfig
from infer.chat import Rendered
from infer.target import TargetModel
from train.features.codec import Codec, Kept
from train.features.manifest import MANIFEST_FILE, Manifest
from train.features.rows import FeatureSource, RowFeatures, normalizer_before_labels, row_key
from train.features.store import FREE_DISK_SHARE, SHARDS_FOLDER, FeatureStore, folder_bytes
from train.features.stored_target import StoredTarget, TrainingTarget
from train.sharded import in_lockstep
from train.world import World

CACHE_FOLDER = ".features"
GB = 1e9
_ID_AND_MASK_BYTES, _NORMALIZER_BYTES = 4 + 1, 4

Notice = Callable[[str], None]


class OnlineFeatures:
    """Computes features at every visit.

    feature_dtype: what they would be kept in, and are rounded to. world: the processes among which the target may be
    shared out; all of them then ask together (`get_many`). looks: whether states that are not finite are refused at
    once, for which the device is waited for; else features say themselves whether they are (`refuse_infinite`).
    """

    def __init__(
        self,
        target: TargetModel,
        taps: Sequence[int],
        *,
        feature_dtype: FeatureDType = "target",
        with_normalizer: bool = True,
        world: World | None = None,
        looks: bool = True,
    ) -> None:
        self.codec = Codec.of(target, taps, feature_dtype)
        self._looks = looks
        self.num_computed_tokens = 0
        self._target, self._with_normalizer, self._world = target, with_normalizer, world or World()

    @property
    def lm_head_weight(self) -> torch.Tensor | None:
        """Of which log normalizers are made, where they are wanted."""
        return self._target.lm_head_weight if self._with_normalizer else None

    @property
    def bytes_per_token(self) -> int:
        """What a token takes where it is kept."""
        return kept_bytes_per_token(self.codec, with_normalizer=self._with_normalizer)

    def get(self, row: Rendered) -> RowFeatures:
        return self.get_many([row])[0]

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        computed = [self._compute(row) for row in in_lockstep(self._target, self._world, rows)]
        features = [
            replace(
                decoded(row, kept, self.codec, self.codec.taps, self.lm_head_weight),
                is_finite=None if self._looks else is_finite,
            )
            for row, (kept, is_finite) in zip(rows, computed, strict=True)
        ]
        if self._looks:
            refuse_infinite((row, is_finite) for row, (_, is_finite) in zip(rows, computed, strict=True))
        return features

    def flush(self) -> None:
        """Nothing is kept."""

    def compute(self, rows: Sequence[Rendered]) -> list[Kept]:
        """Each row as it would be kept."""
        computed = [self._compute(row) for row in in_lockstep(self._target, self._world, rows)]
        refuse_infinite((row, is_finite) for row, (_, is_finite) in zip(rows, computed, strict=True))
        return [kept for kept, _ in computed]

    def _compute(self, row: Rendered) -> tuple[Kept, torch.Tensor]:
        """(the row as it would be kept, whether its states are finite [])"""
        (states,) = self._target.features([row.token_ids], self.codec.taps)
        self.num_computed_tokens += len(row.token_ids)
        assert len(states.last) == len(row.token_ids), f"{len(states.last)} states of {len(row.token_ids)} tokens"
        kept = self.codec.encode(states.taps, states.last)
        kept["token_ids"] = torch.tensor(row.token_ids, dtype=torch.int32)
        kept["loss_mask"] = torch.tensor(row.loss_mask, dtype=torch.bool)
        if self.lm_head_weight is not None:
            _, last = self.codec.decode(kept, ())
            kept["log_normalizer"] = normalizer_before_labels(last, kept["loss_mask"], self.lm_head_weight)
        return kept, torch.isfinite(states.last).all()


class CachedFeatures:
    """Wraps `OnlineFeatures` with a store: rows are kept at their first visit, as far as its budget goes."""

    def __init__(self, online: OnlineFeatures, store: FeatureStore, *, taps: Sequence[int] | None = None) -> None:
        """`online` computes what the store keeps; `taps`: which of it are wanted (None: all)."""
        assert online.codec == store.manifest.codec, "what is computed must be what is kept"
        self.store, self.online = store, online
        self._taps = online.codec.taps if taps is None else tuple(taps)

    def get(self, row: Rendered) -> RowFeatures:
        return self.get_many([row])[0]

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        kept = [self.store.get(row.token_ids) for row in rows]
        computed = iter(self._compute([row for row, one in zip(rows, kept, strict=True) if one is None]))
        whole = [next(computed) if one is None else one for one in kept]
        codec, weight = self.online.codec, self.online.lm_head_weight
        return [decoded(row, one, codec, self._taps, weight) for row, one in zip(rows, whole, strict=True)]

    def keep(self, rows: Sequence[Rendered]) -> None:
        """Compute and keep those rows that are not there and that there is room for."""
        self._compute([row for row in rows if self.has_room(row) and self.store.get(row.token_ids) is None])

    def has_room(self, row: Rendered) -> bool:
        return self.store.has_room(len(row.token_ids) * self.online.bytes_per_token)

    def flush(self) -> None:
        self.store.flush()

    def _compute(self, rows: Sequence[Rendered]) -> list[Kept]:
        computed = self.online.compute(rows)
        for row, kept in zip(rows, computed, strict=True):
            if self.has_room(row):
                self.store.put(row.token_ids, kept)
        return computed


class StoredFeatures:
    """Features made elsewhere, of a target that is not here."""

    def __init__(self, target: StoredTarget, taps: Sequence[int], *, with_normalizer: bool = True) -> None:
        self._target, self._taps, self._with_normalizer = target, tuple(taps), with_normalizer

    def get(self, row: Rendered) -> RowFeatures:
        kept = self._target.store.get(row.token_ids)
        if kept is None:
            self.check([row])
        assert kept is not None
        weight = self._target.lm_head_weight if self._with_normalizer else None
        return decoded(row, kept, self._target.store.manifest.codec, self._taps, weight)

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        return [self.get(row) for row in rows]

    def flush(self) -> None:
        """Nothing is added."""

    def check(self, rows: Sequence[Rendered]) -> None:
        """ValueError with the counts unless all rows are there."""
        missing = [row for row in rows if row_key(row.token_ids) not in self._target.store]
        if missing:
            num_tokens, num_missing = (sum(len(row.token_ids) for row in some) for some in (rows, missing))
            raise ValueError(
                f"{self._target.store.folder} lacks {len(missing):,} of {len(rows):,} rows ({num_missing:,} of "
                f"{num_tokens:,} tokens), and the target that would compute them is not loaded: they were made of "
                "other data or settings (data.*), or of a part; run `headstart features` on this recipe, or load the "
                "target (target.features=null)"
            )


def refuse_infinite(rows: Iterable[tuple[Rendered, torch.Tensor]]) -> None:
    """ValueError if the target's states of one of `rows` are not finite; each comes with whether they are []."""
    rows = list(rows)
    if not rows:
        return
    for (row, _), is_finite in zip(rows, torch.stack([flag for _, flag in rows]).tolist(), strict=True):
        if not is_finite:
            raise ValueError(
                f"the target's states of a row of {len(row.token_ids)} tokens are not finite, so nothing can be learnt "
                "from them: load the target in another dtype (target.dtype=bfloat16 or float32)"
            )


def kept_bytes_per_token(codec: Codec, *, with_normalizer: bool) -> int:
    """States, token id and mask, and the log normalizer where it is wanted."""
    return codec.bytes_per_token + _ID_AND_MASK_BYTES + (_NORMALIZER_BYTES if with_normalizer else 0)


def decoded(
    row: Rendered, kept: Kept, codec: Codec, taps: Sequence[int], lm_head_weight: torch.Tensor | None
) -> RowFeatures:
    """A row's features of what is kept of it. `lm_head_weight`: where its log normalizer is wanted; one that was not
    kept (for another teacher, or another mask) is computed of the kept states."""
    states, last = codec.decode(kept, taps)
    if lm_head_weight is None:
        return RowFeatures(taps=states, last=last, log_normalizer=None)
    mask = torch.tensor(row.loss_mask, dtype=torch.bool)
    if "log_normalizer" in kept and torch.equal(kept["loss_mask"], mask):
        return RowFeatures(taps=states, last=last, log_normalizer=kept["log_normalizer"])
    return RowFeatures(taps=states, last=last, log_normalizer=normalizer_before_labels(last, mask, lm_head_weight))


def make_features(
    config: RunConfig,
    target: TrainingTarget,
    *,
    taps: Sequence[int],
    folder: Path,
    world: World | None = None,
    rows: Sequence[Rendered] | None = None,
    looks: bool = True,
    notice: Notice = print,
) -> FeatureSource:
    """Where the recipe's run finds the states of its training rows. `folder`: of the runs, beside which they are kept.

    `rows`: all of them, where they are known; they are then checked against what is there, and the disk against them.
    `looks`: see `OnlineFeatures`; what is kept is looked at in any case.
    """
    settings = config.train
    with_normalizer = settings.teacher == "full"
    if isinstance(target, StoredTarget):
        target.check_states(taps, settings.feature_dtype)
        stored = StoredFeatures(target, taps, with_normalizer=with_normalizer)
        stored.check(rows or [])
        notice(f"features: {target.store.describe()}, made elsewhere")
        return stored
    assert isinstance(target, TargetModel), f"nothing is known of the features of a {type(target).__name__}"
    manifest = Manifest.of(target, Codec.of(target, taps, settings.feature_dtype))
    store = None
    if settings.feature_cache and settings.feature_cache_gb:
        max_bytes = int(settings.feature_cache_gb * GB)
        store = open_cache(folder / CACHE_FOLDER, manifest, max_bytes=max_bytes, notice=notice)
    online = OnlineFeatures(
        target,
        taps if store is None else store.manifest.taps,
        feature_dtype=settings.feature_dtype,
        with_normalizer=with_normalizer,
        world=world,
        looks=looks or store is not None,
    )
    if store is None:
        return online
    cached = CachedFeatures(online, store, taps=taps)
    if rows is not None:
        check_disk(cached, rows)
    budget = f"at most {settings.feature_cache_gb:g} GB"
    notice(f"features: {online.bytes_per_token} bytes a token; {store.describe()}, {budget}")
    return cached


def check_disk(cached: CachedFeatures, rows: Sequence[Rendered]) -> None:
    """ValueError if the disk has no room for what the budget lets the rows take of it."""
    store = cached.store
    new = {row_key(row.token_ids): len(row.token_ids) for row in rows}
    wanted = sum(length * cached.online.bytes_per_token for key, length in new.items() if key not in store)
    needed, free = min(wanted, store.budget_left), store.disk_free
    if needed > free * FREE_DISK_SHARE:
        raise ValueError(
            f"the feature cache needs {needed / GB:.1f} GB in {store.folder}, where {free / GB:.1f} GB are free: lower "
            "train.feature_cache_gb, or set train.feature_cache=false to compute features at every visit"
        )


def open_export(folder: Path, manifest: Manifest, *, max_bytes: int, notice: Notice = print) -> FeatureStore:
    """The store in `folder` itself, begun or gone on with. ValueError if it is of something else."""
    if (folder / MANIFEST_FILE).exists():
        found = Manifest.read(folder)
        found.check(manifest, folder)
        manifest = found
    elif folder.exists() and any(path.name[0] != "." and path.name != SHARDS_FOLDER for path in folder.iterdir()):
        raise ValueError(f"{folder} holds something else than features: name a new folder, or move it away")
    return FeatureStore(folder, manifest, max_bytes=max_bytes, notice=notice)


def open_cache(folder: Path, manifest: Manifest, *, max_bytes: int, notice: Notice = print) -> FeatureStore:
    """The store for `manifest` among those in `folder`: its own, or one that keeps further taps; else a new one."""
    useless, others, serving = [], [], []
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        try:
            found = Manifest.read(path)
        except (ValueError, OSError):
            if path.name != manifest.key:  # its own may just be begun by another process
                useless.append(path)
            continue
        if found.serves(manifest):
            serving.append((len(found.taps), path, found))
        else:
            others.append(path)
    if useless:
        size = sum(map(folder_bytes, useless)) / GB
        notice(
            f"features: {len(useless)} of the folders in {folder} ({size:.2f} GB) are not of this headstart's format "
            "and are not used: they can be removed"
        )
    if others:
        size = sum(map(folder_bytes, others)) / GB
        notice(f"features: {folder} also holds {size:.2f} GB of {len(others)} other targets, taps or forms")
    if serving:
        _, path, manifest = min(serving, key=lambda one: one[0])
        return FeatureStore(path, manifest, max_bytes=max_bytes, notice=notice)
    return FeatureStore(folder / manifest.key, manifest, max_bytes=max_bytes, notice=notice)
