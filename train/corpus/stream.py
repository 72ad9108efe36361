"""Rows of a source that is never held as a whole: read in order, shuffled in blocks, continued exactly.

Usable rows are taken in the order of the source and cut into blocks; each block is permuted by a draw from (seed,
epoch, block). So which row comes at visit n follows from the source alone, and all that must be remembered of a block
is where it begins. An epoch ends with the source: its last block is shorter, and the next epoch cuts the same blocks
and draws other permutations.

That a source still is what it was is checked where it is continued: the block's first row must be the one that was
noted. A data set whose own state leads elsewhere is read again from its beginning.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infer.chat import Rendered
from train.corpus.order import derived_seed, permutation
from train.corpus.reading import Place, Reader, RowFault, Source, fingerprint

MAX_BARREN_ROWS = 10_000
"""Unusable rows in a row after which the source is given up."""
KEPT_VISITS = 4096
"""Earlier visits that can be asked for again."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a row of the source gives to train on; `dropped`: why parts of it are left out."""

    rows: Sequence[Rendered] = ()
    dropped: Sequence[str] = ()


UseRow = Callable[[Any, str], Used]
"""(row, where it stands); raises `RowFault` for a row that is not used at all."""


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """Where a block begins: its first visit, its number in its epoch, its place and its first row's fingerprint; and
    what had become of the rows before it.
    """

    visit: int
    epoch: int
    block: int
    place: Place
    first: str
    counts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Block:
    begin: _Beginning
    rows: list[Rendered]
    """In the order of their visits."""


class StreamVisits:
    """`Visits` of one source. `name` is where messages say that a row came from.

    counts: what became of the rows read so far, in the source's first epoch (the later ones are the same); the
    dictionary itself grows, so it can stand in an account.
    """

    def __init__(self, source: Source, use: UseRow, *, name: str, block_size: int, seed: int) -> None:
        self.name = name
        self.counts: dict[str, Any] = _no_counts()
        self._source, self._use, self._block_size, self._seed = source, use, block_size, seed
        self._blocks: deque[_Block] = deque()
        self._begin: _Beginning | None = None
        self._reader: Reader | None = None
        self._ahead: tuple[int, Any] | None = None
        """The row that was read last and begins the next block."""

    def at(self, visit: int) -> Rendered:
        while visit >= self._next_begin().visit:
            self._load()
        for block in reversed(self._blocks):
            if block.begin.visit <= visit:
                return block.rows[visit - block.begin.visit]
        raise AssertionError(f"{self.name}: visit {visit} lies before all that is kept")

    def state(self, visit: int) -> dict[str, Any]:
        """Where the block of `visit` begins."""
        while visit > self._next_begin().visit:
            self._load()
        begins = [*(block.begin for block in self._blocks), self._next_begin()]
        return asdict(next(begin for begin in reversed(begins) if begin.visit <= visit))

    def seek(self, visit: int, state: Mapping[str, Any]) -> None:
        self._blocks.clear()
        self._reader = self._ahead = self._begin = None
        self.counts.update(_no_counts())
        if not state:
            return
        begin = _Beginning(**state)
        if begin.visit > visit:
            raise ValueError(f"{self.name}: the state of visit {begin.visit} does not lead back to visit {visit}")
        self._reopen(begin)
        self.counts.update(copy.deepcopy(begin.counts))
        self._begin = begin

    def _reopen(self, begin: _Beginning) -> None:
        for by_count in (False, True):
            try:
                self._reader = self._source.open(begin.place, by_count=by_count)
                self._ahead = self._reader.read()
            except (LookupError, TypeError, ValueError, AttributeError):  # a state that the data set does not know
                if by_count:
                    raise
                continue
            self._reader.pause()
            if self._ahead is not None and fingerprint(self._ahead[1]) == begin.first:
                return
        raise ValueError(
            f"{self.name}: row {begin.place['row'] + 1} is not what stood there when the checkpoint was written; give "
            "the data back as they were, or start a new run from this one's head (head.init_from)"
        )

    def _next_begin(self) -> _Beginning:
        """Of the block that is read next."""
        if self._begin is None:
            self._begin = self._look_ahead(visit=0, epoch=-1, block=0)
        return self._begin

    def _look_ahead(self, *, visit: int, epoch: int, block: int) -> _Beginning:
        """The next block begins here, or with the next epoch where the source is at its end."""
        place: Place = {}
        if self._reader is not None:
            place, self._ahead = self._reader.place(), self._reader.read()
        if self._reader is None or self._ahead is None:
            epoch, block = epoch + 1, 0
            self._reader = self._source.open()
            place, self._ahead = self._reader.place(), self._reader.read()
        self._reader.pause()
        if self._ahead is None:
            raise ValueError(f"{self.name} is empty: there is nothing to train on")
        return _Beginning(
            visit=visit,
            epoch=epoch,
            block=block,
            place=place,
            first=fingerprint(self._ahead[1]),
            counts=copy.deepcopy(self.counts),
        )

    def _load(self) -> None:
        begin = self._next_begin()
        assert self._reader is not None
        try:
            rows = self._read_block(self._reader, counted=begin.epoch == 0)
        finally:
            self._reader.pause()
        if rows:
            order = permutation(len(rows), derived_seed(self._seed, begin.epoch, begin.block))
            self._blocks.append(_Block(begin=begin, rows=[rows[place] for place in order]))
        elif begin.block == 0:
            raise ValueError(f"{self.name} holds no row to train on: {self._described()}")
        self._begin = self._look_ahead(visit=begin.visit + len(rows), epoch=begin.epoch, block=begin.block + 1)
        while len(self._blocks) > 1 and self._blocks[1].begin.visit <= begin.visit - KEPT_VISITS:
            self._blocks.popleft()

    def _read_block(self, reader: Reader, *, counted: bool) -> list[Rendered]:
        """Rows for one block: no conversation is parted, so the last one may bring some too many."""
        rows: list[Rendered] = []
        numbered, num_barren = self._ahead, 0
        while numbered is not None:
            used = self._used(numbered, counted=counted)
            rows.extend(used)
            num_barren = 0 if used else num_barren + 1
            if num_barren > MAX_BARREN_ROWS:
                raise ValueError(
                    f"{self.name}: none of {num_barren:,} rows on end can be trained on ({self._described()})"
                )
            if len(rows) >= self._block_size:
                return rows
            numbered = reader.read()
        return rows

    def _used(self, numbered: tuple[int, Any], *, counted: bool) -> Sequence[Rendered]:
        number, row = numbered
        try:
            if isinstance(row, RowFault):
                raise row
            used = self._use(row, f"{self.name}:{number}")
        except RowFault as fault:
            used = Used(dropped=[str(fault)])
        if counted:
            self.counts["rows_in"] += 1
            self.counts["rows"] += len(used.rows)
            for reason in used.dropped:
                self.counts["dropped"][reason] = self.counts["dropped"].get(reason, 0) + 1
        return used.rows

    def _described(self) -> str:
        dropped = sorted(self.counts["dropped"].items(), key=lambda item: -item[1])
        return "; ".join(
            [
                f"{self.counts['rows_in']:,} rows read, {self.counts['rows']:,} usable",
                *(f"{count:,} dropped: {reason}" for reason, count in dropped),
            ]
        )


def _no_counts() -> dict[str, Any]:
    return {"rows_in": 0, "rows": 0, "dropped": {}}
