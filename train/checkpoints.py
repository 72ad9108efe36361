"""Where a run's states lie, which of them to go on from, and which may go.

    last/                   the newest state: an augmented model folder with trainer.pt
    best/                   the best head, without trainer state
    checkpoints/step-N/     what last/ was before, the newest `train.keep_checkpoints` of them

A save writes beside last/, moves the old last/ to checkpoints/ and takes its place, by renames: at any moment a whole
state is on the disk. `checksums.json` lies in each and is written last; a state whose files do not match it is passed
over. Only after a save are older states removed: those of this run, told by its key, never last/ or best/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heads.checkpoint import lock_file, read_json, recover_folder

CHECKSUM_FILE = "checksums.json"
CHECKPOINTS_FOLDER = "checkpoints"
FREE_SPACE_FACTOR = 1.1
"""A save needs room for as much as the one before took, and a little."""

_NAME = re.compile(r"step-(\d+)")
_CHUNK = 1 << 24


class Checkpoints:
    """The states of one run. key: tells the run from others whose states may lie in the same folder."""

    def __init__(self, folder: Path, *, keep: int = 1, key: str | None = None) -> None:
        self.folder, self.keep, self.key = folder, keep, key

    @property
    def last(self) -> Path:
        return self.folder / "last"

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, this process is the one that writes here: two would take each other's states for their own.

        ValueError where another one does, or where nothing can be written. A folder that stays empty goes again.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ValueError(
                f"the run cannot be written to {self.folder} ({error.strerror}): give another folder for runs (--runs)"
            ) from error
        try:
            if not lock_file(descriptor, wait=False):
                raise ValueError(
                    f"another process is training in {self.folder}: stop it or wait for its end, or choose another "
                    "name (name=...)"
                )
            try:
                yield
            finally:
                with suppress(OSError):
                    self.folder.rmdir()  # where it is empty
        finally:
            os.close(descriptor)

    def newest(self, notice: Callable[[str], None] = lambda text: None) -> Path | None:
        """The newest whole state; those passed over are named to `notice`. None where there is none at all.

        ValueError where there are states and none is whole.
        """
        faults: list[str] = []
        candidates = list(self._candidates())
        for place in candidates:
            fault = fault_of(place)
            if fault is None:
                for text in faults:
                    notice(text)
                return place
            faults.append(f"{place} cannot be resumed from ({fault}), it is passed over")
        if not candidates:
            return None
        raise ValueError(
            f"no state in {self.folder} is whole: {'; '.join(faults)}. Start a new run with another name, "
            f"from the best head if there is one (head.init_from={self.best})"
        )

    def former(self) -> list[tuple[int, Path]]:
        """(step, folder) of this run's earlier states, newest first."""
        found = []
        for place in (self.folder / CHECKPOINTS_FOLDER).glob("step-*"):
            match = _NAME.fullmatch(place.name)
            if match and place.is_dir() and (self.key is None or key_of(place) == self.key):
                found.append((int(match[1]), place))
        return sorted(found, reverse=True)

    def place_for_former(self) -> Path | None:
        """Where last/ goes when it is replaced; None where it is not kept, or its place is another run's."""
        step = step_of(recover_folder(self.last))
        if step is None or not self.keep:
            return None
        place = self.folder / CHECKPOINTS_FOLDER / f"step-{step:06d}"
        return place if not place.exists() or key_of(place) == self.key else None

    def rotate(self) -> None:
        """Remove what is beyond `keep`. Called after a save that held."""
        for _, place in self.former()[self.keep :]:
            shutil.rmtree(place, ignore_errors=True)

    def check_room(self) -> None:
        """OSError where the disk is too full for another state like the last one."""
        last = recover_folder(self.last)
        if not last.exists():
            return
        needed = FREE_SPACE_FACTOR * sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")

    def _candidates(self) -> Iterator[Path]:
        last = recover_folder(self.last)
        if last.exists():
            yield last
        own = self.key or key_of(last)
        yield from (place for _, place in self.former() if own is None or key_of(place) == own)


def write_checksums(folder: Path, *, key: str, step: int, but: tuple[str, ...] = ()) -> None:
    """The mark of a whole state, written when all else is. but: files that may change later, such as the card."""
    files = {
        str(path.relative_to(folder)): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }
    (folder / CHECKSUM_FILE).write_text(json.dumps({"run": key, "step": step, "files": files}, indent=1) + "\n")


def fault_of(folder: Path) -> str | None:
    """What is wrong with a state; None where it is whole."""
    try:
        facts = read_json(folder / CHECKSUM_FILE)
        files = facts["files"]
    except FileNotFoundError:
        return f"it has no {CHECKSUM_FILE}"
    except (ValueError, KeyError, OSError) as error:
        return f"{CHECKSUM_FILE} is damaged: {error}"
    for name, checksum in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _checksum(folder / name) != checksum:
            return f"{name} is truncated or damaged"
    return None


def key_of(folder: Path) -> str | None:
    """The run that a state belongs to; None where it does not say."""
    value = _fact(folder, "run")
    return value if isinstance(value, str) else None


def step_of(folder: Path) -> int | None:
    value = _fact(folder, "step")
    return value if isinstance(value, int) else None


def _fact(folder: Path, name: str) -> object:
    try:
        return read_json(folder / CHECKSUM_FILE).get(name)
    except (ValueError, OSError):
        return None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
