"""The target's states for training rows: computed when first needed, kept in a checked file within a budget.

A row's features are computed alone, so they are the same whenever and beside whatever other rows they are computed,
and a resumed run sees the very numbers an uninterrupted one does. The cache is one memory-mapped file of a token's
tapped states and its final-normed one (stored once if a head taps that) in the target's dtype, filled row by row; a
journal beside it lists the rows that are complete, each with a checksum. Its folder is named by a hash of everything
the numbers depend on.

Rows beyond the budget are computed again at every visit: no budget, no cache.

Shapes: T tokens of a row, H hidden.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from heads.base import final_tap
from infer.chat import Rendered
from infer.target import TargetModel

FORMAT_VERSION = 1
STATES_FILE, JOURNAL_FILE = "states.bin", "complete.jsonl"
FREE_DISK_SHARE = 0.9
"""A cache may take at most this share of the free disk."""
NORMALIZER_CHUNK = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class RowFeatures:
    """taps [T, taps * H] and last [T, H] (after the target's final norm) in the target's dtype; log_normalizer [T]
    float32."""

    taps: torch.Tensor
    last: torch.Tensor
    log_normalizer: torch.Tensor


class FeatureSource(Protocol):
    """Features of training rows by number."""

    def get(self, index: int) -> RowFeatures: ...


class OnlineFeatures:
    """Computes features at every visit."""

    def __init__(self, target: TargetModel, rows: Sequence[Rendered], taps: Sequence[int]) -> None:
        self._target, self._rows, self._taps = target, rows, tuple(taps)
        self.num_computed_tokens = 0

    def get(self, index: int) -> RowFeatures:
        token_ids = self._rows[index].token_ids
        (features,) = self._target.features([token_ids], self._taps)
        self.num_computed_tokens += len(token_ids)
        return RowFeatures(
            taps=features.taps.clone(),
            last=features.last.clone(),
            log_normalizer=log_normalizer(features.last, self._target.lm_head_weight),
        )


def log_normalizer(last: torch.Tensor, lm_head_weight: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [T] of the target's logits, in chunks: the logits of a long row would not fit."""
    with torch.inference_mode():
        chunks = [(chunk @ lm_head_weight.T).float().logsumexp(-1) for chunk in last.split(NORMALIZER_CHUNK)]
    return torch.cat(chunks).clone()


class CachedFeatures:
    """Wraps `OnlineFeatures` with a file; rows are stored at their first visit, as far as the budget goes."""

    def __init__(
        self,
        online: OnlineFeatures,
        target: TargetModel,
        rows: Sequence[Rendered],
        taps: Sequence[int],
        *,
        folder: Path,
        max_bytes: int,
    ) -> None:
        self._online = online
        self._reads_last = final_tap(target.num_layers) in taps
        self._taps_width = (len(taps) - self._reads_last) * target.hidden_size
        self._width = self._taps_width + target.hidden_size
        self._dtype = target.dtype
        lengths = [len(row.token_ids) for row in rows]
        self._starts = [0]
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._lengths = lengths
        self.bytes_per_token = self._width * target.dtype.itemsize + 4
        self.num_cached_rows = sum(start * self.bytes_per_token <= max_bytes for start in self._starts[1:])
        self.num_bytes = self._starts[self.num_cached_rows] * self.bytes_per_token
        # The budget decides how the file is laid out, so runs with different budgets must not share one.
        part = "" if self.num_cached_rows == len(rows) else f"-{self.num_cached_rows}"
        self.folder = folder / (cache_key(target, rows, taps) + part)
        self._open()

    def get(self, index: int) -> RowFeatures:
        if index >= self.num_cached_rows:
            return self._online.get(index)
        if index not in self._complete:
            features = self._online.get(index)
            self._store(index, features)
            return features
        states, normalizer = self._slices(index)
        taps, last = states[:, : self._taps_width], states[:, self._taps_width :]
        taps = states if self._reads_last else taps  # that tap is the highest, and `last` follows the others
        return RowFeatures(taps=taps, last=last, log_normalizer=normalizer)

    def describe(self) -> str:
        """The plan in words: what is kept, where, and what is there already."""
        return (
            f"features: {self.bytes_per_token} bytes a token, {self.num_cached_rows} of {len(self._lengths)} rows "
            f"({self.num_bytes / 1e9:.2f} GB) kept in {self.folder}, {len(self._complete)} already there"
        )

    def _slices(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = self._starts[index], self._starts[index + 1]
        return self._states[start:stop], self._normalizers[start:stop]

    def _store(self, index: int, features: RowFeatures) -> None:
        states, normalizer = self._slices(index)
        states.copy_(torch.cat([features.taps[:, : self._taps_width], features.last], dim=-1))
        normalizer.copy_(features.log_normalizer)
        entry = {"row": index, "crc": _checksum(states, normalizer)}
        with (self.folder / JOURNAL_FILE).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(entry) + "\n")
        self._complete.add(index)

    def _open(self) -> None:
        """Map the file, making it if needed, and trust only rows whose checksum holds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATES_FILE
        present = path.stat().st_size if path.exists() else 0
        taken = path.stat().st_blocks * 512 if present else 0  # the file is sparse: not all of it is on the disk yet
        free = shutil.disk_usage(self.folder).free
        if self.num_bytes - taken > free * FREE_DISK_SHARE:
            raise ValueError(
                f"the feature cache needs {self.num_bytes / 1e9:.1f} GB in {self.folder}, where {free / 1e9:.1f} GB "
                "are free: lower train.feature_cache_gb, or set train.feature_cache=false to compute features at "
                "every visit"
            )
        num_tokens = self._starts[self.num_cached_rows]
        size = num_tokens * self.bytes_per_token
        if present < size:
            with path.open("ab") as stream:
                stream.truncate(size)  # sparse: the disk is only taken as rows come
        if not size:
            self._complete: set[int] = set()
            self._states = torch.empty(0, self._width, dtype=self._dtype)
            self._normalizers = torch.empty(0)
        else:
            mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            split = num_tokens * 4
            self._normalizers = mapped[:split].view(torch.float32)
            self._states = mapped[split:].view(self._dtype).view(num_tokens, self._width)
            self._complete = self._read_journal()

    def _read_journal(self) -> set[int]:
        """Rows that are whole. A line that a killed run left half written joins the next one and both are lost: those
        rows are simply computed again.
        """
        path = self.folder / JOURNAL_FILE
        complete = set()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["row"] < self.num_cached_rows and _checksum(*self._slices(entry["row"])) == entry["crc"]:
                complete.add(entry["row"])
        return complete


def _checksum(states: torch.Tensor, normalizer: torch.Tensor) -> int:
    crc = 0
    for tensor in (states, normalizer):
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def cache_key(target: TargetModel, rows: Sequence[Rendered], taps: Sequence[int]) -> str:
    """Everything the stored numbers depend on: the target and its dtype, the taps, and every token id."""
    digest = hashlib.sha256()
    digest.update(json.dumps([FORMAT_VERSION, target.fingerprint, str(target.dtype), list(taps)]).encode())
    digest.update(rows_hash(rows).encode())
    return digest.hexdigest()[:24]


def rows_hash(rows: Sequence[Rendered]) -> str:
    """Content hash of token ids and masks, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(torch.tensor(row.token_ids, dtype=torch.int64).numpy().tobytes())
        digest.update(bytes(row.loss_mask) + b"|")
    return digest.hexdigest()[:32]
