"""Rows of files, folders and data sets: which files are read, and from which place on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.corpus.reading import RowFault, check_source, data_files, fingerprint, open_source, read_rows


def write(path: Path, *ids: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": number}) + "\n" for number in ids))
    return path


def ids(source: str | Path) -> list[int]:
    return [row["id"] for _, row in read_rows(source)]


def test_every_place_leads_on(tmp_path: Path) -> None:
    """From the place noted before each row, blank and broken lines included, the same numbered rows follow."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n\n{"id": \n\xff\n  \n{"id": "caf\xc3\xa9\xe2\x80\xa8"}\r\n{"id": 6}')
    reader, places, rows = open_source(path).open(), [], []
    while True:
        places.append(json.loads(json.dumps(reader.place())))
        if (numbered := reader.read()) is None:
            break
        rows.append(numbered)
    assert [number for number, _ in rows] == [1, 3, 4, 6, 7]
    for start, place in enumerate(places):
        again, found = open_source(path).open(place), []
        while (numbered := again.read()) is not None:
            found.append(numbered)
        assert [(n, fingerprint(row)) for n, row in found] == [(n, fingerprint(row)) for n, row in rows[start:]]


def test_a_paused_reader_goes_on(tmp_path: Path) -> None:
    reader = open_source(write(tmp_path / "rows.jsonl", 1, 2, 3)).open()
    found = []
    while (numbered := reader.read()) is not None:
        found.append(numbered[1]["id"])
        reader.pause()
    assert found == [1, 2, 3]


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    """In the order of names; hidden files and what describes the data are none of them; an empty file ends nothing."""
    write(tmp_path / "b.jsonl", 3)
    write(tmp_path / "a" / "x.jsonl", 1, 2)
    write(tmp_path / "a" / "y.jsonl")
    write(tmp_path / ".cache" / "z.jsonl", 9)
    write(tmp_path / "b.jsonl.state.json", 9)
    write(tmp_path / "dataset_info.json", 9)
    (tmp_path / "README.md").write_text("no rows")
    assert ids(tmp_path) == [1, 2, 3]
    assert [number for number, _ in read_rows(tmp_path)] == [1, 2, 3]


def test_names_tell_splits(tmp_path: Path) -> None:
    """Text of the test split is not trained on because it lies beside the training split."""
    write(tmp_path / "train-0.jsonl", 1)
    write(tmp_path / "train-1.jsonl", 2)
    write(tmp_path / "test" / "a.jsonl", 3)
    write(tmp_path / "dev.jsonl", 4)
    assert ids(tmp_path) == [1, 2]
    assert ids(f"{tmp_path}:test") == [3]
    assert ids(f"{tmp_path}:validation") == [4]
    (tmp_path / "test" / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds no file of split 'test'; its files are of train, validation: use"):
        ids(f"{tmp_path}:test")


def test_words_inside_names_are_no_splits(tmp_path: Path) -> None:
    """`contest` is not a test split, `developers` no development split."""
    files = [write(tmp_path / name, 1) for name in ("contest.jsonl", "developers.jsonl", "latest.jsonl")]
    assert data_files(tmp_path) == files


def test_files_of_several_kinds_in_one_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "a.jsonl", 1, 2)
    (tmp_path / "b.json").write_text('[{"id": 3}, {"id": 4}]')
    datasets.Dataset.from_dict({"id": [5, 6]}).to_parquet(tmp_path / "c.parquet")
    assert ids(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_named_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(name: str, **settings: Any) -> Any:
        asked.append((name, settings))
        return datasets.Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert ids("someone/chats:test") == [1, 2]
    assert ids("someone/chats") == [1, 2]
    assert [(name, settings["split"], settings["streaming"]) for name, settings in asked] == [
        ("someone/chats", "test", True),
        ("someone/chats", "train", True),
    ]


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "missing.csv", "/nowhere/at/all"])
def test_a_path_to_nothing_is_refused(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no conversations file at"):
        check_source(name)


def test_the_identity_changes_with_the_files(tmp_path: Path) -> None:
    """As far as sizes and names tell; where the folder lies does not matter."""
    write(tmp_path / "one" / "a.jsonl", 1, 2)
    write(tmp_path / "two" / "a.jsonl", 1, 2)
    before = open_source(tmp_path / "one").identity
    assert before == open_source(tmp_path / "two").identity
    write(tmp_path / "one" / "b.jsonl", 3)
    assert open_source(tmp_path / "one").identity != before
    write(tmp_path / "two" / "a.jsonl", 1, 2, 3)
    assert open_source(tmp_path / "two").identity != before
    json.dumps(before)


def test_a_folder_that_lost_files_is_no_place_to_go_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", 1)
    reader = open_source(tmp_path).open()
    reader.read(), reader.read()
    place = reader.place()
    reader.pause()
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match="in file 1 of a folder that now has 1"):
        open_source(tmp_path).open(place)


def test_fingerprints_tell_rows_apart() -> None:
    """Rows of faults too; values without a JSON form, as of pictures, do not change from one process to the next."""
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
    assert fingerprint(RowFault("not JSON")) != fingerprint(RowFault("not UTF-8"))
    assert fingerprint({"picture": object()}) == fingerprint({"picture": object()})
    assert fingerprint({"text": "\ud800"}) != fingerprint({"text": "\ud801"})
