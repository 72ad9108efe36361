"""Streams: shuffled in blocks, and continued exactly wherever they were interrupted."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.chat import Rendered
from train.corpus.reading import IteratedSource, RowFault, Source, open_source
from train.corpus.stream import StreamVisits, Used

BLOCK = 20
NUM_ROWS = 200


def use(row: Any, where: str) -> Used:
    return Used(rows=[Rendered(token_ids=[int(row["id"])], loss_mask=[True])])


def stream(source: Source, *, block_size: int = BLOCK, seed: int = 5, rule: Any = use) -> StreamVisits:
    return StreamVisits(source, rule, name="rows", block_size=block_size, seed=seed)


def ids(visits: StreamVisits, start: int, stop: int) -> list[int]:
    return [visits.at(visit).token_ids[0] for visit in range(start, stop)]


def resumed(visits: StreamVisits, visit: int, source: Source, **settings: Any) -> StreamVisits:
    """A stream of another process, which knows nothing but what a checkpoint holds."""
    state = json.loads(json.dumps(visits.state(visit)))
    fresh = stream(source, **settings)
    fresh.seek(visit, state)
    return fresh


def write_lines(path: Path, numbers: Sequence[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": number, "text": "x" * (number % 7)}) + "\n" for number in numbers))
    return path


def lines_file(folder: Path) -> Callable[[], Source]:
    path = write_lines(folder / "rows.jsonl", range(NUM_ROWS))
    return lambda: open_source(path)


def array_file(folder: Path) -> Callable[[], Source]:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"id": number} for number in range(NUM_ROWS)], indent=1))
    return lambda: open_source(path)


def folder_of_lines(folder: Path) -> Callable[[], Source]:
    for part in range(5):
        write_lines(folder / "parts" / f"part-{part}.jsonl", range(40 * part, 40 * part + 40))
    return lambda: open_source(folder / "parts")


def csv_file(folder: Path) -> Callable[[], Source]:
    path = folder / "rows.csv"
    path.write_text("id\n" + "".join(f"{number}\n" for number in range(NUM_ROWS)))
    return lambda: open_source(path)


def parquet_folder(folder: Path) -> Callable[[], Source]:
    datasets = pytest.importorskip("datasets")
    (folder / "parts").mkdir()
    for part in range(4):
        rows = datasets.Dataset.from_dict({"id": list(range(50 * part, 50 * part + 50))})
        rows.to_parquet(folder / "parts" / f"train-{part}.parquet", batch_size=15)  # row groups that end inside blocks
    return lambda: open_source(folder / "parts")


def parquet_shards(folder: Path) -> Callable[[], Source]:
    """The same files as one data set of four shards."""
    datasets = pytest.importorskip("datasets")
    parquet_folder(folder)
    files = [str(folder / "parts" / f"train-{part}.parquet") for part in range(4)]
    return lambda: IteratedSource(
        lambda: datasets.load_dataset("parquet", data_files=files, split="train", streaming=True), "parquet"
    )


def iterable_dataset(folder: Path) -> Callable[[], Source]:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": list(range(NUM_ROWS))})
    return lambda: IteratedSource(lambda: rows.to_iterable_dataset(num_shards=4), "iterable")


def mapped_dataset(folder: Path) -> Callable[[], Source]:
    """Batched maps and filters have states of their own."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": list(range(2 * NUM_ROWS))})

    def make() -> Any:
        made = rows.to_iterable_dataset(num_shards=4).filter(lambda row: row["id"] % 2 == 0)
        return made.map(lambda batch: {"id": [number // 2 for number in batch["id"]]}, batched=True, batch_size=16)

    return lambda: IteratedSource(make, "mapped")


def buffered_dataset(folder: Path) -> Callable[[], Source]:
    """With a shuffle buffer of its own, which its state does not hold: only counting is exact."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": list(range(NUM_ROWS))})
    return lambda: IteratedSource(
        lambda: rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=20), "buffered"
    )


every_source = pytest.mark.parametrize(
    "make",
    [
        lines_file,
        array_file,
        folder_of_lines,
        csv_file,
        parquet_folder,
        parquet_shards,
        iterable_dataset,
        mapped_dataset,
        buffered_dataset,
    ],
)


@every_source
@pytest.mark.filterwarnings("ignore:unclosed file.*rows.csv:ResourceWarning")  # `datasets` leaves CSV files open
def test_interruptions_lose_and_repeat_nothing(make: Callable[[Path], Callable[[], Source]], tmp_path: Path) -> None:
    """200 rows, blocks of 20, interrupted at 37, 90 and 91 one after the other, and beyond the epoch's end: the order
    is that of a stream never interrupted, and each epoch holds each row once. (A data set's own state once froze
    after the first resume, and a shuffle buffer lost its rows.)
    """
    source = make(tmp_path)
    whole = ids(stream(source()), 0, 2 * NUM_ROWS + 50)
    assert sorted(whole[:NUM_ROWS]) == sorted(whole[NUM_ROWS : 2 * NUM_ROWS]) == list(range(NUM_ROWS))
    assert whole[:NUM_ROWS] != whole[NUM_ROWS : 2 * NUM_ROWS]

    seen: list[int] = []
    visits = stream(source())
    for stop in (37, 90, 91, 199, 200, 233, 401, len(whole)):
        seen += ids(visits, len(seen), stop)
        visits = resumed(visits, stop, source())
    assert seen == whole
    del visits, source
    gc.collect()  # while the filter of this test holds


@pytest.mark.parametrize("interrupted", [37, 90, 91])
@pytest.mark.parametrize("make", [lines_file, iterable_dataset, parquet_shards])
def test_one_interruption(make: Callable[[Path], Callable[[], Source]], interrupted: int, tmp_path: Path) -> None:
    """At each place alone, and the checkpoint may be older than the last visit that was made."""
    source = make(tmp_path)
    whole = ids(stream(source()), 0, NUM_ROWS)
    visits = stream(source())
    assert ids(visits, 0, interrupted + 30) == whole[: interrupted + 30]
    again = resumed(visits, interrupted, source())
    assert ids(again, interrupted, NUM_ROWS) == whole[interrupted:]


def test_any_chain_of_interruptions(tmp_path: Path) -> None:
    """Random places, blocks that do not divide the epoch, a file with rows of no use."""
    path = write_lines(tmp_path / "rows.jsonl", range(53))
    chance = random.Random(0)

    def rule(row: Any, where: str) -> Used:
        if row["id"] % 5 == 2:
            raise RowFault("of no use")
        return use(row, where)

    for block_size in (1, 7, 41, 42, 43, 1000):
        whole = ids(stream(open_source(path), block_size=block_size, rule=rule), 0, 150)
        visits, seen = stream(open_source(path), block_size=block_size, rule=rule), list[int]()
        while len(seen) < 150:
            seen += ids(visits, len(seen), min(150, len(seen) + chance.randint(0, 40)))
            visits = resumed(visits, len(seen), open_source(path), block_size=block_size, rule=rule)
        assert seen == whole
        assert sorted(whole[:42]) == sorted(whole[42:84]) == [i for i in range(53) if i % 5 != 2]


def test_rows_are_shuffled_within_blocks(tmp_path: Path) -> None:
    """A block holds the next rows of the source, in an order of its own; another seed draws another."""
    source = lines_file(tmp_path)
    visited = ids(stream(source()), 0, NUM_ROWS)
    blocks = [visited[start : start + BLOCK] for start in range(0, NUM_ROWS, BLOCK)]
    for number, block in enumerate(blocks):
        assert sorted(block) == list(range(number * BLOCK, number * BLOCK + BLOCK)) != block
    assert len({tuple(one % BLOCK for one in block) for block in blocks}) == len(blocks)
    assert ids(stream(source(), seed=6), 0, NUM_ROWS) != visited


def test_the_last_visits_can_be_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far back as is kept, and no further is held in memory."""
    monkeypatch.setattr("train.corpus.stream.KEPT_VISITS", 50)
    visits = stream(lines_file(tmp_path)())
    seen = ids(visits, 0, 500)
    assert ids(visits, 430, 500) == seen[430:]
    held = sum(len(block.rows) for block in visits._blocks)
    assert 50 < held <= 50 + 2 * BLOCK


def test_a_checkpoint_reads_nothing_ahead(tmp_path: Path) -> None:
    """At a block's end, the state tells where the next one begins; its rows are used when they are visited."""
    used = []

    def rule(row: Any, where: str) -> Used:
        used.append(row["id"])
        return use(row, where)

    visits = stream(lines_file(tmp_path)(), rule=rule)
    ids(visits, 0, BLOCK)
    assert visits.state(BLOCK)["visit"] == BLOCK
    assert visits.state(BLOCK - 1)["visit"] == 0
    assert len(used) == BLOCK


def test_state_of_the_start_and_no_state_at_all(tmp_path: Path) -> None:
    """A run stopped before its first step goes on from the start; without a state, all up to the visit is reread."""
    source = lines_file(tmp_path)
    whole = ids(stream(source()), 0, 250)
    assert ids(resumed(stream(source()), 0, source()), 0, 250) == whole
    blank = stream(source())
    blank.seek(230, {})
    assert ids(blank, 230, 250) == whole[230:]


def test_a_stream_can_be_sought_again_and_again(tmp_path: Path) -> None:
    """Nothing of what was read before a seek is left."""
    source = lines_file(tmp_path)
    visits = stream(source())
    whole = ids(visits, 0, 100)
    states = {visit: visits.state(visit) for visit in (0, 50, 77)}
    for visit, state in reversed(states.items()):
        visits.seek(visit, state)
        assert ids(visits, visit, 100) == whole[visit:]


class Forgetful:
    """A data set whose state leads back to the beginning after it was loaded once: the fault that users reported."""

    def __init__(self) -> None:
        self._start = 0
        self.loaded = False

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"id": number} for number in range(NUM_ROWS))

    def state_dict(self) -> dict[str, int]:
        return {"place": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = True


class Unplain(Forgetful):
    def state_dict(self) -> dict[Any, Any]:
        return {("not", "JSON"): object()}


class Broken(Forgetful):
    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("shard_idx")  # a state written by another version of the library


@pytest.mark.parametrize("kind", [Forgetful, Unplain, Broken])
def test_a_state_that_leads_elsewhere_is_not_trusted(kind: type[Forgetful]) -> None:
    """The first row tells; the source is then read from its beginning and the rows before the place are skipped."""

    def source() -> Source:
        return IteratedSource(kind, "forgetful")

    whole = ids(stream(source()), 0, 300)
    visits = stream(source())
    seen: list[int] = []
    for stop in (37, 90, 91, 300):
        seen += ids(visits, len(seen), stop)
        visits = resumed(visits, stop, source())
    assert seen == whole


@pytest.mark.parametrize("change", ["a row less", "other rows", "shorter"])
def test_changed_data_are_refused(change: str, tmp_path: Path) -> None:
    """Going on in a file that has changed would lose and repeat rows without a word."""
    path = write_lines(tmp_path / "rows.jsonl", range(NUM_ROWS))
    visits = stream(open_source(path))
    ids(visits, 0, 75)
    numbers = {"a row less": range(1, NUM_ROWS), "other rows": range(1000, 1200), "shorter": range(10)}[change]
    write_lines(path, numbers)
    with pytest.raises(ValueError, match=r"rows: row 61 is not what stood there .*head\.init_from"):
        resumed(visits, 75, open_source(path))


def test_bad_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    """By reason, once for each row of the source however often it is gone through, and across resumes."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": number}) for number in range(30)]
    lines[3], lines[11], lines[12] = '{"id": ', "[1, 2", "\xff"
    path.write_bytes("\n".join(lines).encode("latin-1"))

    def rule(row: Any, where: str) -> Used:
        if row["id"] == 20:
            raise RowFault(f"a fault of its own, {where}")
        return Used(rows=use(row, where).rows, dropped=["a part"] if row["id"] == 21 else [])

    visits = stream(open_source(path), block_size=8, rule=rule)
    ids(visits, 0, 10)
    visits = resumed(visits, 10, open_source(path), block_size=8, rule=rule)
    assert sorted(ids(visits, 10, 26) + ids(stream(open_source(path), block_size=8, rule=rule), 0, 10)) == [
        number for number in range(30) if number not in (3, 11, 12, 20)
    ]
    ids(visits, 26, 100)
    assert visits.counts == {
        "rows_in": 30,
        "rows": 26,
        "dropped": {"not JSON": 2, "not UTF-8": 1, "a fault of its own, rows:21": 1, "a part": 1},
    }


def test_a_text_of_several_rows_is_not_parted(tmp_path: Path) -> None:
    """A block ends with the source row that fills it, so that every place begins a row of the source."""
    path = write_lines(tmp_path / "rows.jsonl", range(40))

    def rule(row: Any, where: str) -> Used:
        return Used(rows=[Rendered(token_ids=[10 * row["id"] + i], loss_mask=[True]) for i in range(3)])

    whole = ids(stream(open_source(path), rule=rule), 0, 240)
    assert sorted(whole[:120]) == sorted(10 * number + i for number in range(40) for i in range(3))
    visits = stream(open_source(path), rule=rule)
    ids(visits, 0, 59)
    assert ids(resumed(visits, 59, open_source(path), rule=rule), 59, 240) == whole[59:]


def test_an_empty_stream_is_an_error(tmp_path: Path) -> None:
    """And not a loop that waits for a row for ever."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="rows is empty: there is nothing to train on"):
        stream(open_source(path)).at(0)


def test_a_stream_without_a_usable_row_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", range(50))

    def rule(row: Any, where: str) -> Used:
        raise RowFault("no messages")

    with pytest.raises(ValueError, match=r"holds no row to train on: 50 rows read, 0 usable; 50 dropped: no messages"):
        stream(open_source(path), rule=rule).at(0)


def test_a_long_stretch_without_a_usable_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a stream that has no end."""
    monkeypatch.setattr("train.corpus.stream.MAX_BARREN_ROWS", 30)

    class Endless:
        def __iter__(self) -> Iterator[dict[str, int]]:
            number = 0
            while True:
                yield {"id": number}
                number += 1

    def rule(row: Any, where: str) -> Used:
        if row["id"] > 15:
            raise RowFault("no messages")
        return use(row, where)

    visits = stream(IteratedSource(Endless, "endless"), block_size=4, rule=rule)
    assert sorted(ids(visits, 0, 16)) == list(range(16))
    with pytest.raises(ValueError, match=r"none of 31 rows on end can be trained on .*31 dropped: no messages"):
        visits.at(16)


def test_rows_at_the_end_of_no_use_end_the_epoch(tmp_path: Path) -> None:
    """A last block without a usable row is no block, and no error."""
    path = write_lines(tmp_path / "rows.jsonl", range(25))

    def rule(row: Any, where: str) -> Used:
        return use(row, where) if row["id"] < 20 else Used(dropped=["at the end"])

    visited = ids(stream(open_source(path), block_size=10, rule=rule), 0, 40)
    assert sorted(visited[:20]) == sorted(visited[20:]) == list(range(20))
