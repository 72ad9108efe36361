"""One shard on disk: NAME.safetensors with the rows' tensors end to end, and NAME.json that says which rows they are.

The JSON is written last and vouches for the other: without it there is no shard. Every row has a checksum over all of
its tensors, which is looked at when the row is first read in a process, so opening a folder costs the same whatever it
holds. Reading maps the file into memory and slices it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import read_tensors
from train.features.codec import Kept

TENSORS, MARK, PARTIAL = ".safetensors", ".json", ".partial"
_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class ShardRow:
    """Where a row lies in its shard, in tokens, and the checksum of its tensors."""

    key: str
    start: int
    length: int
    crc: int


@dataclass(frozen=True, kw_only=True, eq=False)
class NewRow:
    """A row that is to be written."""

    key: str
    kept: Kept
    crc: int

    @classmethod
    def of(cls, key: str, kept: Kept) -> NewRow:
        kept = {name: tensor.detach().to("cpu").contiguous() for name, tensor in kept.items()}
        lengths = {len(tensor) for tensor in kept.values()}
        assert len(lengths) == 1, f"tensors of one row have {sorted(lengths)} tokens"
        return cls(key=key, kept=kept, crc=checksum(kept))

    @property
    def length(self) -> int:
        return len(self.kept["token_ids"])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept.values())


class NewShard:
    """Rows on their way to the disk; `num_bytes` of both files is known before anything is written."""

    def __init__(self, name: str, rows: Sequence[NewRow]) -> None:
        self.name, self._rows = name, rows
        # Widest first, so that every tensor begins where its numbers can be read in place.
        self._names = sorted(rows[0].kept, key=lambda name: (-rows[0].kept[name].itemsize, name))
        self._header = self._make_header()
        self._num_tensor_bytes = len(self._header) + sum(row.num_bytes for row in rows)
        self._mark = self._make_mark()

    @property
    def num_bytes(self) -> int:
        return self._num_tensor_bytes + len(self._mark)

    def write(self, folder: Path) -> None:
        """OSError leaves nothing behind."""
        tensors, mark = folder / f"{self.name}{TENSORS}", folder / f"{self.name}{MARK}"
        try:
            write_whole(tensors, self._chunks())
            write_whole(mark, [self._mark])
        except OSError:
            tensors.unlink(missing_ok=True)
            raise

    def _make_header(self) -> bytes:
        num_tokens = sum(row.length for row in self._rows)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in self._names:
            example = self._rows[0].kept[name]
            size = sum(row.kept[name].nbytes for row in self._rows)
            header[name] = {
                "dtype": _SAFETENSORS_NAMES[example.dtype],
                "shape": [num_tokens, *example.shape[1:]],
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _make_mark(self) -> bytes:
        start, rows = 0, []
        for row in self._rows:
            rows.append(asdict(ShardRow(key=row.key, start=start, length=row.length, crc=row.crc)))
            start += row.length
        mark = {"bytes": self._num_tensor_bytes, "tokens": start, "rows": rows}
        return json.dumps(mark, separators=(",", ":")).encode()

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for name in self._names:
            for row in self._rows:
                yield _bytes_of(row.kept[name])


class Shard:
    """A finished shard. ValueError if it is damaged, when it is opened or when its first row is read."""

    def __init__(self, mark: Path) -> None:
        self._path = mark.with_suffix(TENSORS)
        try:
            values = json.loads(mark.read_bytes())
            self.rows = [ShardRow(**row) for row in values["rows"]]
            size = int(values["bytes"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{mark.name} is damaged ({type(error).__name__})") from error
        self._num_tokens = sum(row.length for row in self.rows)
        found = self._path.stat().st_size if self._path.exists() else 0
        if found != size:
            raise ValueError(f"{self._path.name} has {found} bytes, {mark.name} says {size}")

    def read(self, row: ShardRow) -> dict[str, torch.Tensor]:
        """The row's tensors, mapped from the file. Whether they are whole is for `is_whole` to say."""
        return {name: tensor[row.start : row.start + row.length] for name, tensor in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = read_tensors(self._path)
        if any(len(tensor) != self._num_tokens for tensor in tensors.values()):
            raise ValueError(f"{self._path.name} does not hold the {self._num_tokens} tokens that its rows have")
        return tensors


def is_whole(row: ShardRow, kept: Kept) -> bool:
    return checksum(kept) == row.crc


def checksum(kept: Kept) -> int:
    crc = 0
    for name in sorted(kept):
        crc = zlib.crc32(_bytes_of(kept[name]), crc)
    return crc


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def write_whole(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """All or nothing, also if the power fails: the name appears when the content is on the disk."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with partial.open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
