"""A folder of kept rows: its manifest, and shards that are only ever added.

    FOLDER/manifest.json       what the numbers depend on (`manifest.py`)
           shards/NAME.*       rows, some 64 MB a shard (`shards.py`)

Rows wait in memory until they fill a shard; a run that is killed loses these and nothing else. Several processes may
fill one folder: who writes holds a lock, and looks first at what the others have written and at what is left of the
budget, so that the folder never takes more than that. Leftovers of writes that were killed go at the same occasion.
What cannot be read is told once, and computed again.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads.checkpoint import lock_file
from train.features.codec import Kept
from train.features.manifest import MANIFEST_FILE, Manifest
from train.features.rows import row_key
from train.features.shards import MARK, PARTIAL, TENSORS, NewRow, NewShard, Shard, ShardRow, is_whole, write_whole

SHARDS_FOLDER, LOCK_FILE = "shards", ".lock"
SHARD_BYTES = 64_000_000
FREE_DISK_SHARE = 0.9
"""A store may take at most this share of the free disk."""
ROW_OVERHEAD, SHARD_OVERHEAD = 128, 1024
"""Most bytes that a shard's two files take beside the tensors: for each row, and otherwise."""

Notice = Callable[[str], None]


class FeatureStore:
    """Rows by their tokens. max_bytes: what the folder may hold in all; 0 to read alone."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        max_bytes: int = 0,
        shard_bytes: int = SHARD_BYTES,
        notice: Notice = print,
    ) -> None:
        """Opens a folder whose manifest is `manifest`, or begins it."""
        self.folder, self.manifest = folder, manifest
        self._max_bytes, self._shard_bytes, self._notice = max_bytes, shard_bytes, notice
        self._shards_folder = folder / SHARDS_FOLDER
        self._shards: dict[str, Shard | None] = {}  # by name; None for one that is damaged
        self._places: dict[str, list[tuple[Shard, ShardRow]]] = {}
        self._checked: set[tuple[int, int]] = set()  # rows, by shard and start, whose checksum held
        self._pending: dict[str, NewRow] = {}
        self._num_pending_bytes = 0
        self._listed = -1
        self._told: set[str] = set()
        self.failure: OSError | None = None
        """Why no more rows are taken."""
        if max_bytes:
            self._begin()
        self.refresh()
        self._room = self._room_left()

    # Reading

    def __contains__(self, key: str) -> bool:
        return key in self._pending or bool(self._places.get(key))

    def get(self, token_ids: list[int]) -> Kept | None:
        """The row with these tokens as it is kept, mapped into memory; None if it is not here, or not whole."""
        key = row_key(token_ids)
        if key in self._pending:
            return self._pending[key].kept
        if not self._places.get(key):
            self.refresh()
        places = self._places.get(key, [])
        while places:
            kept = self._read(*places[-1], token_ids)
            if kept is not None:
                return kept
            places.pop()
        return None

    def _read(self, shard: Shard, row: ShardRow, token_ids: list[int]) -> Kept | None:
        try:
            kept = shard.read(row)
        except (ValueError, OSError) as error:
            self._tell(f"{error}: its rows are computed again")
            return None
        place = (id(shard), row.start)
        if place not in self._checked:
            # As many states as tokens, and of the very text that is asked for.
            if kept["token_ids"].tolist() != token_ids or not is_whole(row, kept):
                self._tell(f"{self._shards_folder} holds damaged rows, which are computed again")
                return None
            self._checked.add(place)
        return kept

    def refresh(self, *, anew: bool = False) -> None:
        """Take in the shards that came since, of other processes too."""
        changed = self._shards_folder.stat().st_mtime_ns if self._shards_folder.is_dir() else -1
        if changed == self._listed and not anew:
            return
        self._listed = changed
        for mark in sorted(self._shards_folder.glob(f"*{MARK}")):
            if mark.name not in self._shards:
                self._take_in(mark)

    def _take_in(self, mark: Path) -> None:
        try:
            shard = Shard(mark)
        except ValueError as error:
            self._shards[mark.name] = None
            self._tell(f"{error}: the rows of this shard are computed again")
            return
        self._shards[mark.name] = shard
        for row in shard.rows:
            self._places.setdefault(row.key, []).append((shard, row))

    @property
    def num_rows(self) -> int:
        """Different rows on the disk."""
        return sum(bool(places) for places in self._places.values())

    @property
    def num_bytes(self) -> int:
        """What the folder holds on the disk."""
        return folder_bytes(self.folder)

    def describe(self) -> str:
        """What is there, in words."""
        return f"{self.num_rows:,} rows ({self.num_bytes / 1e9:.2f} GB) kept in {self.folder}"

    # Writing

    @property
    def budget_left(self) -> int:
        """Bytes that the folder may still take by its budget."""
        return max(0, self._max_bytes - self.num_bytes)

    @property
    def disk_free(self) -> int:
        """Bytes free on the disk of the folder."""
        present = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shutil.disk_usage(present).free

    def has_room(self, num_bytes: int) -> bool:
        """Whether a row with so many bytes of tensors would be kept."""
        return num_bytes + ROW_OVERHEAD + (0 if self._pending else SHARD_OVERHEAD) <= self._room

    def put(self, token_ids: list[int], kept: Kept) -> None:
        """Keep a row: in memory, until there are enough for a shard."""
        assert len(kept["token_ids"]) == len(token_ids), "a row must have as many states as tokens"
        key = row_key(token_ids)
        if key in self:
            return
        row = NewRow.of(key, kept)
        self._room -= row.num_bytes + ROW_OVERHEAD + (0 if self._pending else SHARD_OVERHEAD)
        self._pending[key] = row
        self._num_pending_bytes += row.num_bytes
        if self._num_pending_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows as a shard, as far as the budget and the disk go. A disk that takes no more ends the
        keeping, not the run: it is told, and the rows are forgotten."""
        if not self._pending:
            return
        try:
            with self._locked():
                self.refresh(anew=True)
                self._sweep()
                shard = self._shard_that_fits()
                if shard is not None:
                    shard.write(self._shards_folder)
        except OSError as error:
            self._give_up(error)
        self._pending, self._num_pending_bytes = {}, 0
        self.refresh(anew=True)
        self._room = self._room_left()

    def write_file(self, name: str, values: Mapping[str, Any]) -> None:
        """A JSON file beside the manifest, whole or not at all."""
        with self._locked():
            write_whole(self.folder / name, [_json_bytes(values)])

    def _begin(self) -> None:
        manifest = _json_bytes(self.manifest.to_dict())
        if len(manifest) > self._max_bytes:
            self._max_bytes = 0
            return
        try:
            self._shards_folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if not (self.folder / MANIFEST_FILE).exists():
                    write_whole(self.folder / MANIFEST_FILE, [manifest])
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failure, self._max_bytes, self._room = error, 0, 0
        self._tell(f"{self.folder} takes no more ({error}): rows that are not there are computed at every visit")

    def _shard_that_fits(self) -> NewShard | None:
        rows = [row for key, row in self._pending.items() if not self._places.get(key)]
        room = self._room_left()
        while rows:
            shard = NewShard(uuid.uuid4().hex[:16], rows)
            if shard.num_bytes <= room:
                return shard
            rows.pop()
        return None

    def _room_left(self) -> int:
        if not self._max_bytes:
            return 0
        left, disk = self.budget_left, int(self.disk_free * FREE_DISK_SHARE)
        if disk < min(left, self._shard_bytes):
            self._tell(f"the disk of {self.folder} is almost full: rows that are not there are computed at every visit")
        return min(left, disk)

    def _sweep(self) -> None:
        """Remove what killed writers left, and shards that nobody can read. For the holder of the lock."""
        for path in [*self.folder.glob(f".*{PARTIAL}"), *self._shards_folder.glob(f".*{PARTIAL}")]:
            path.unlink()
        for path in self._shards_folder.iterdir():
            mark = path.with_suffix(MARK)
            is_damaged = mark.name in self._shards and self._shards[mark.name] is None
            if is_damaged or (path.suffix == TENSORS and not mark.exists()):
                path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _tell(self, text: str) -> None:
        """Each thing once."""
        if text not in self._told:
            self._told.add(text)
            self._notice(f"features: {text}")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; files that go meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
