"""Rows of files, folders and data sets: one after another, from the beginning or from a place that was noted before.

JSON is parsed row by row with plain `json`, never through a columnar schema, so columns of mixed types cannot break a
file. What a row must hold is not known here: it is handed on as it is, or as the `RowFault` of a line that is no JSON.

A place is JSON-able and says where the next row begins: a byte offset of a file of lines, a file of a folder and a
place in it, or a data set's own state. Every place also holds the number of rows before it (`row`), so that they can be
skipped where nothing better is exact.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from configs.schema import DataConfig

Place = dict[str, Any]

TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt")
TABLE_SUFFIXES = (".parquet", ".arrow", ".csv")

_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""How the files of a folder name the split they belong to."""

_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files in which `datasets` describes a folder, beside its rows."""


class RowFault(ValueError):
    """Why one row is dropped."""


class Reader(Protocol):
    """Reads a source once, from a place to its end."""

    def read(self) -> tuple[int, Any] | None:
        """(row or line number from 1, row or RowFault); None at the end."""

    def place(self) -> Place:
        """Where the next row begins."""

    def pause(self) -> None:
        """Let go of what is open; the next `read` goes on."""


class Source(Protocol):
    """Where rows come from. `identity` (JSON-able) changes with the content as far as that is known without reading."""

    @property
    def identity(self) -> Any: ...

    def open(self, place: Mapping[str, Any] | None = None, *, by_count: bool = False) -> Reader:
        """From `place` on, or from the beginning. `by_count`: skip rows instead of trusting a data set's state."""


def open_source(source: str | Path) -> Source:
    """A JSON, parquet, arrow or CSV file, a folder of such (optionally `folder:split`), or a `datasets` name
    (optionally `name:split`).
    """
    check_source(source)
    path = Path(source)
    if path.is_file():
        return _file_source(path)
    name, _, split = str(source).partition(":")
    if Path(name).is_dir() and (files := data_files(Path(name), split or "train")):
        return FolderSource(Path(name), files)
    return _named_source(name, split or "train")


def read_rows(source: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, row or RowFault) of a file, (row number, row) of anything else."""
    reader = open_source(source).open()
    try:
        while (numbered := reader.read()) is not None:
            yield numbered
    finally:
        reader.pause()


def check_source(source: str | Path) -> None:
    """Refuse a path to nothing, before anything is loaded. Other names may be data sets of the Hub."""
    path = Path(source)
    folder = Path(str(source).partition(":")[0])
    if path.is_file() or folder.is_dir():
        return
    if path.suffix in (*TEXT_SUFFIXES, *TABLE_SUFFIXES) or path.is_absolute():
        raise FileNotFoundError(f"no conversations file at {path}")


def check_sources(settings: DataConfig) -> None:
    """The same for all that a recipe names."""
    for source in (*settings.train, *settings.eval, *settings.decontaminate):
        check_source(source)


def data_files(folder: Path, split: str = "train") -> list[Path]:
    """Files of rows in a folder and below, sorted by name. Where names tell splits (`train-0.jsonl`, `test/a.csv`),
    those of `split`; where none does, all of them are `train`.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
        and path.is_file()
        and path.name not in _NOT_ROWS
        and not path.name.endswith(".state.json")  # written beside synthesised conversations
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    )
    if not files:
        return []
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    if not any(splits.values()):
        splits = dict.fromkeys(files, "train")
    wanted = next((name for name, words in _SPLIT_WORDS.items() if split in words), split)
    chosen = [path for path in files if splits[path] == wanted]
    if not chosen:
        raise ValueError(
            f"{folder} holds no file of split {split!r}; its files are of "
            f"{', '.join(sorted({name or 'no named split' for name in splits.values()}))}: use {folder}:SPLIT"
        )
    return chosen


def fingerprint(row: Any) -> str:
    """Content hash of a row, to know it again."""
    text = f"fault: {row}" if isinstance(row, RowFault) else json.dumps(row, sort_keys=True, default=_kind_of)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


class LinesSource:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def identity(self) -> Any:
        return self.path.stat().st_size

    def open(self, place: Mapping[str, Any] | None = None, *, by_count: bool = False) -> Reader:
        return _LinesReader(self.path, **({} if place is None else {"offset": place["offset"], "number": place["row"]}))


class _LinesReader:
    """`number`: lines before `offset`, blank ones too."""

    def __init__(self, path: Path, *, offset: int = 0, number: int = 0) -> None:
        self._path, self._offset, self._number = path, offset, number
        self._stream: IO[bytes] | None = None

    def read(self) -> tuple[int, Any] | None:
        if self._stream is None:
            self._stream = self._path.open("rb")  # bytes: only \n ends a line, whatever the text holds
            self._stream.seek(self._offset)
        while line := self._stream.readline():
            self._offset += len(line)
            self._number += 1
            if line.strip():
                return self._number, _parsed(line, is_first=self._number == 1)
        self.pause()
        return None

    def place(self) -> Place:
        return {"offset": self._offset, "row": self._number}

    def pause(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class ArraySource:
    """A file that is one JSON array, which is parsed as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def identity(self) -> Any:
        return self.path.stat().st_size

    def open(self, place: Mapping[str, Any] | None = None, *, by_count: bool = False) -> Reader:
        return _ArrayReader(self.path, 0 if place is None else place["row"])


class _ArrayReader:
    """`num_read`: rows before the next one."""

    def __init__(self, path: Path, num_read: int) -> None:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is one JSON array that is not UTF-8: {error}") from error
        self._rows, self._num_read = islice(_array_rows(text), num_read, None), num_read

    def read(self) -> tuple[int, Any] | None:
        numbered = next(self._rows, None)
        self._num_read += numbered is not None
        return numbered

    def place(self) -> Place:
        return {"row": self._num_read}

    def pause(self) -> None:
        """Nothing is open."""


class FolderSource:
    """The files of a folder, one after the other."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.names = [str(path.relative_to(folder)) for path in files]
        self.sources = [_file_source(path) for path in files]

    @property
    def identity(self) -> Any:
        return [[name, source.identity] for name, source in zip(self.names, self.sources, strict=True)]

    def open(self, place: Mapping[str, Any] | None = None, *, by_count: bool = False) -> Reader:
        return _FolderReader(self.sources, place or {"file": 0, "row": 0, "place": None}, by_count=by_count)


class _FolderReader:
    def __init__(self, sources: Sequence[Source], place: Mapping[str, Any], *, by_count: bool) -> None:
        self._sources, self._file, self._row = sources, place["file"], place["row"]
        if self._file >= len(sources):
            raise ValueError(f"place {dict(place)} is in file {self._file} of a folder that now has {len(sources)}")
        self._reader = sources[self._file].open(place["place"], by_count=by_count)

    def read(self) -> tuple[int, Any] | None:
        while (numbered := self._reader.read()) is None:
            if self._file + 1 == len(self._sources):
                return None
            self._file += 1
            self._reader = self._sources[self._file].open()
        self._row += 1
        return self._row, numbered[1]

    def place(self) -> Place:
        return {"file": self._file, "row": self._row, "place": self._reader.place()}

    def pause(self) -> None:
        self._reader.pause()


class IteratedSource:
    """Whatever `make` makes that can be iterated, such as a `datasets.IterableDataset`.

    A data set that tells its state is asked for it at each place, and continued from it; the others are read from the
    beginning, and rows before the place are skipped.
    """

    def __init__(self, make: Callable[[], Any], identity: Any) -> None:
        self._make, self._identity = make, identity

    @property
    def identity(self) -> Any:
        return self._identity

    def open(self, place: Mapping[str, Any] | None = None, *, by_count: bool = False) -> Reader:
        return _IteratedReader(self._make(), place or {"row": 0}, by_count=by_count)


class _IteratedReader:
    def __init__(self, rows: Any, place: Mapping[str, Any], *, by_count: bool) -> None:
        self._rows, self._number = rows, place["row"]
        state = None if by_count else place.get("state")
        if state is not None and hasattr(rows, "load_state_dict"):
            rows.load_state_dict(state)
            self._iterator = iter(rows)
        else:
            self._iterator = islice(iter(rows), self._number, None)

    def read(self) -> tuple[int, Any] | None:
        try:
            row = next(self._iterator)
        except StopIteration:
            return None
        self._number += 1
        return self._number, row

    def place(self) -> Place:
        place: Place = {"row": self._number}
        if self._number and hasattr(self._rows, "state_dict"):
            state = self._rows.state_dict()
            if _is_plain(state):
                place["state"] = state
        return place

    def pause(self) -> None:
        """Reopening a data set is dear: it stays open."""


def _file_source(path: Path) -> Source:
    if path.suffix in TABLE_SUFFIXES:
        return IteratedSource(lambda: _load_dataset(path.suffix[1:], data_files=str(path)), path.stat().st_size)
    if _is_array(path):
        return ArraySource(path)
    return LinesSource(path)


def _named_source(name: str, split: str) -> Source:
    return IteratedSource(lambda: _load_dataset(name, split=split), f"{name}:{split}")


def _load_dataset(name: str, *, split: str = "train", data_files: str | None = None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{data_files or name!r} is not a JSON file, and the `datasets` package is not installed; "
            "install it or give a .jsonl file"
        ) from error
    try:
        return datasets.load_dataset(name, split=split, data_files=data_files, streaming=True)
    except Exception as error:  # of many kinds, and none names what was asked for
        what = f"the file {data_files}" if data_files else f"{name!r}, which is no file or folder here,"
        raise ValueError(f"{what} could not be read as a data set (split {split!r}): {error}") from error


def _is_array(path: Path) -> bool:
    with path.open("rb") as stream:
        first = stream.readline().removeprefix(b"\xef\xbb\xbf").strip()
        rest_is_blank = not stream.read(4096).strip()
    return first.startswith(b"[") and (rest_is_blank or isinstance(_parsed(first), RowFault))


def _parsed(line: bytes, *, is_first: bool = False) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if is_first else "utf-8"))
    except UnicodeDecodeError:
        return RowFault("not UTF-8")
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return RowFault("not JSON")


def _array_rows(text: str) -> Iterator[tuple[int, Any]]:
    """Elements of one JSON array, with the lines they begin on; a file cut short loses its last element."""
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        line, counted = line + text.count("\n", counted, position), position
        if position >= len(text) or text[position] == "]":
            return
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield line, RowFault("not JSON (the array ends here)")
            return
        yield line, row


def _split_of(path: Path) -> str | None:
    """The split that a file's path names, if it does."""
    words = re.split(r"[^a-z]+", str(path.with_suffix("")).lower())
    return next((split for split, names in _SPLIT_WORDS.items() if any(word in names for word in words)), None)


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _kind_of(value: Any) -> str:
    """What stands in a fingerprint for values without a JSON form: pictures and the like, which no text row needs."""
    return type(value).__name__
