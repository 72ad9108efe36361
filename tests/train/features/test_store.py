"""A folder of kept rows: nothing half-written is trusted, nothing finished is lost, and the budget holds."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from infer.chat import Rendered
from infer.target import TargetModel
from tests.train.features.feature_rows import TAPS, assert_equal, cached, in_child, random_rows
from train.features import CachedFeatures, OnlineFeatures
from train.features.filling import Count, fill
from train.features.manifest import MANIFEST_FILE, Manifest
from train.features.rows import row_key
from train.features.store import SHARDS_FOLDER, FeatureStore, folder_bytes


@pytest.fixture(scope="module")
def rows() -> list[Rendered]:
    return random_rows(*(5 + 3 * number % 20 for number in range(14)))


def assert_right(source: CachedFeatures, target: TargetModel, rows: list[Rendered]) -> None:
    """Every row is what the target gives."""
    online = OnlineFeatures(target, TAPS)
    for row in rows:
        assert_equal(source.get(row), online.get(row))


def content(folder: Path) -> dict[str, list[bytes]]:
    """The bytes of each row, by its key, whatever the shards they lie in."""
    found: dict[str, list[bytes]] = {}
    for mark in sorted((folder / SHARDS_FOLDER).glob("*.json")):
        with safe_open(mark.with_suffix(".safetensors"), "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        for row in json.loads(mark.read_text())["rows"]:
            stop = row["start"] + row["length"]
            parts = [tensors[name][row["start"] : stop].clone().view(torch.uint8).numpy() for name in sorted(tensors)]
            found.setdefault(row["key"], []).append(b"".join(part.tobytes() for part in parts))
    return found


def test_shards_are_ordinary_safetensors_and_say_what_they_hold(
    target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """Any reader finds token ids beside the states of as many tokens; the manifest says what they are, in no path."""
    source = cached(target, tmp_path, shard_bytes=10_000)
    fill(source, rows)
    names = {path.suffix for path in (tmp_path / SHARDS_FOLDER).iterdir()}
    assert names == {".safetensors", ".json"}
    total = 0
    for path in (tmp_path / SHARDS_FOLDER).glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert set(tensors) == {"states", "token_ids", "loss_mask", "log_normalizer"}
        assert len({len(tensor) for tensor in tensors.values()}) == 1
        for row in json.loads(path.with_suffix(".json").read_text())["rows"]:
            ids = tensors["token_ids"][row["start"] : row["start"] + row["length"]].tolist()
            assert row["key"] == row_key(ids)
            total += len(ids)
    assert total == sum(len(row.token_ids) for row in rows)
    manifest = json.loads((tmp_path / MANIFEST_FILE).read_text())
    assert manifest["post_norm"] is True
    assert "hidden_states" in manifest["conventions"]["taps"]
    for name in ("fingerprint", "tokenizer_hash", "template_hash", "dtype", "taps", "stored_dtype", "format_version"):
        assert manifest[name]
    assert "/" not in json.dumps({name: value for name, value in manifest.items() if name != "conventions"})
    assert Manifest.read(tmp_path) == source.store.manifest


def test_rows_survive_a_restart(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """Shards of a run that was killed are read; only what had not filled one is computed again."""
    first = cached(target, tmp_path)
    first.get(rows[1])
    waiting = cached(target, tmp_path, shard_bytes=1 << 30)
    waiting.get(rows[0])
    del first, waiting
    second = cached(target, tmp_path)
    assert_right(second, target, rows[:2])
    assert second.online.num_computed_tokens == len(rows[0].token_ids)


# Killed


STEPS = ("open", "fsync", "replace", "write")


def killed_at(step: str, number: int) -> None:
    """From now on, the process dies at the `number`-th time that files are opened for writing, synced or renamed."""
    left = number

    def die_at_last() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    if step == "fsync":
        fsync = os.fsync
        os.fsync = lambda descriptor: (die_at_last(), fsync(descriptor))[1]  # type: ignore[assignment]
    elif step == "replace":
        replace_path = Path.replace
        Path.replace = lambda self, other: (die_at_last(), replace_path(self, other))[1]  # type: ignore
    elif step == "open":
        open_path = Path.open
        Path.open = lambda self, *a, **k: (die_at_last(), open_path(self, *a, **k))[1]  # type: ignore
    else:
        threading.Thread(target=lambda: (time.sleep(number / 1000), os.kill(os.getpid(), signal.SIGKILL))).start()


@pytest.mark.parametrize("step", STEPS)
def test_a_fill_that_is_killed_anywhere_goes_on(
    step: str, target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """kill -9 at every kind of step of writing, again and again, and then to the end: the very bytes of a fill that
    was never interrupted, each row once, nothing half-written left, and never more than the budget."""
    whole = tmp_path / "whole"
    budget = 200_000
    fill(cached(target, whole, shard_bytes=3000), rows)
    folder, killed = tmp_path / "killed", 0
    for number in (1, 2, 3, 5, 9, 15, 30) if step != "write" else (1, 5, 10, 20, 40, 80):

        def fill_until_killed(number: int = number) -> None:
            killed_at(step, number)
            fill(cached(target, folder, shard_bytes=3000, max_bytes=budget), rows)

        _, status = os.waitpid(in_child(fill_until_killed), 0)
        killed += os.WIFSIGNALED(status)
        assert folder_bytes(folder) <= budget
    assert killed
    told: list[str] = []
    account = fill(cached(target, folder, shard_bytes=3000, max_bytes=budget, told=told), rows)
    assert account.given == Count.of(rows)
    assert account.present + account.stored == account.given
    assert content(folder) == content(whole)
    assert all(len(copies) == 1 for copies in content(folder).values())
    assert not told
    assert not list(folder.rglob("*.partial"))
    assert_right(cached(target, folder), target, rows)


# Damaged


def damage(path: Path, *, keep: int | None = None, flip: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    if flip is not None:
        raw[flip] ^= 0xFF
    path.write_bytes(bytes(raw if keep is None else raw[:keep]))


DAMAGES = {
    "tensors cut": (".safetensors", {"keep": 1000}),
    "tensors empty": (".safetensors", {"keep": 0}),
    "header": (".safetensors", {"flip": 12}),
    "json cut": (".json", {"keep": 30}),
    "json empty": (".json", {"keep": 0}),
    "a bit": (".safetensors", {"flip": -3}),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_shards_are_computed_again(
    what: str, target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """One notice, the right numbers, and a store that is whole again afterwards."""
    rows = rows[:6]
    fill(cached(target, tmp_path, shard_bytes=3000), rows)
    suffix, how = DAMAGES[what]
    path = sorted((tmp_path / SHARDS_FOLDER).glob(f"*{suffix}"))[0]
    lost = json.loads(path.with_suffix(".json").read_text())["rows"]
    damage(path, **how)
    told: list[str] = []
    source = cached(target, tmp_path, told=told)
    for _ in range(2):
        assert_right(source, target, rows)
    source.flush()
    computed = source.online.num_computed_tokens
    assert 0 < computed <= sum(row["length"] for row in lost)
    assert len(told) == 1
    assert "computed again" in told[0]
    again = cached(target, tmp_path)
    assert_right(again, target, rows)
    assert again.online.num_computed_tokens == 0


def test_states_of_other_tokens_are_not_served(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """Token ids lie beside the states and are compared at reading: a list of rows that was mixed up shows."""
    fill(cached(target, tmp_path), rows[:2])
    marks = sorted((tmp_path / SHARDS_FOLDER).glob("*.json"))
    one, other = (json.loads(mark.read_text()) for mark in marks)
    one["rows"][0]["key"], other["rows"][0]["key"] = other["rows"][0]["key"], one["rows"][0]["key"]
    for mark, values in zip(marks, (one, other), strict=True):
        mark.write_text(json.dumps(values))
    source = cached(target, tmp_path)
    assert_right(source, target, rows[:2])
    assert source.online.num_computed_tokens == sum(len(row.token_ids) for row in rows[:2])


# Budget and disk


@pytest.mark.parametrize("shard_bytes", [1, 4000, 1 << 30])
def test_the_budget_is_never_exceeded(
    shard_bytes: int, target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """Of all files together, at whatever budget, over several openings and with rows that are there already; it is
    used to within a row and what a shard's lists take. Rows without room are computed at every visit, and right."""
    longest = max(len(row.token_ids) for row in rows)
    whole = cached(target, tmp_path / "whole", shard_bytes=shard_bytes)
    fill(whole, rows)
    needed = whole.store.num_bytes
    folder = tmp_path / "budget"
    for budget in (0, 500, 2000, 5000, needed // 3, needed // 3, needed - 1, needed + 2048):
        source = cached(target, folder, shard_bytes=shard_bytes, max_bytes=budget)
        before = folder_bytes(folder)
        account = fill(source, rows)
        assert folder_bytes(folder) <= max(budget, before)
        parts = (account.present, account.stored, account.repeated, account.beyond)
        assert sum(part.rows for part in parts) == len(rows)
        assert sum(part.tokens for part in parts) == account.given.tokens
        if account.beyond.rows and budget > 2000:
            assert folder_bytes(folder) > budget - longest * source.online.bytes_per_token - 2048
        assert_right(source, target, rows)
    assert account.beyond.rows == 0


def test_two_writers_keep_the_budget_and_each_row_once(
    target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """Two processes fill one folder at once with overlapping rows; each sees what the other wrote."""
    whole = tmp_path / "whole"
    fill(cached(target, whole, shard_bytes=2000), rows)
    for place, budget in enumerate((1 << 30, 30_000)):
        folder = tmp_path / f"{place}"

        def fill_part(part: list[Rendered], folder: Path = folder, budget: int = budget) -> None:
            fill(cached(target, folder, shard_bytes=2000, max_bytes=budget), part)

        children = [in_child(lambda part=part: fill_part(part)) for part in (rows[:10], rows[4:])]  # type: ignore[misc]
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        assert folder_bytes(folder) <= budget
        found, expected = content(folder), content(whole)
        assert all(expected[key] == copies for key, copies in found.items())
        assert (found == expected) == (budget == 1 << 30)
        assert_right(cached(target, folder), target, rows)


def test_rows_of_another_process_are_read_as_they_come(
    target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """In a run of several processes a row is computed by the first that visits it, in any epoch."""
    first, second = cached(target, tmp_path), cached(target, tmp_path)
    first.get(rows[0])
    assert_right(second, target, rows[:1])
    assert second.online.num_computed_tokens == 0


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses writes beyond it, in the middle of a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_ends_the_keeping_and_not_the_run(
    target: TargetModel, rows: list[Rendered], tmp_path: Path
) -> None:
    """A write that fails half way leaves nothing; one notice; every row goes on to be right. With room again, the next
    run goes on from what is there."""
    told: list[str] = []
    source = cached(target, tmp_path, shard_bytes=4000, told=told)
    source.get_many(rows[:6])
    source.flush()
    before = content(tmp_path)
    with files_no_longer_than(3000):
        for _ in range(2):
            assert_right(source, target, rows)
        source.flush()
    assert source.store.failure is not None
    assert source.store.failure.errno == errno.EFBIG
    assert [text for text in told if "takes no more" in text] == told[:1]
    assert len(told) == 1
    assert content(tmp_path) == before
    assert not list(tmp_path.rglob("*.partial"))
    again = cached(target, tmp_path, shard_bytes=4000)
    fill(again, rows)
    assert again.online.num_computed_tokens == sum(len(row.token_ids) for row in rows[6:])


def test_a_disk_without_any_room_at_all(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """The manifest itself does not fit: the run goes on, and nothing is left of it."""
    told: list[str] = []
    with files_no_longer_than(10):
        source = cached(target, tmp_path / "none", told=told)
        assert_right(source, target, rows[:3])
    assert len(told) == 1
    assert "takes no more" in told[0]
    assert folder_bytes(tmp_path) == 0


def test_a_folder_that_cannot_be_written_is_read(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """Features on a read-only disk serve; nothing is written where there is no budget."""
    fill(cached(target, tmp_path / "kept"), rows[:3])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")}
    reader = cached(target, tmp_path / "kept", max_bytes=0)
    assert_right(reader, target, rows)
    reader.flush()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")} == before
    nowhere = cached(target, tmp_path / "nowhere", max_bytes=0)
    assert_right(nowhere, target, rows[:1])
    assert not (tmp_path / "nowhere").exists()


# What a store is of


def test_nothing_is_reused_for_another_target_or_tokenizer(target: TargetModel) -> None:
    """A cache under a fixed name once served another data set's states; one without the tokenizer in its key, an older
    tokenizer's."""
    manifest = Manifest.of(target, OnlineFeatures(target, TAPS).codec)
    changes = {
        "fingerprint": "0",
        "dtype": "bfloat16",
        "tokenizer_hash": "0",
        "template_hash": "0",
        "stored_dtype": "int8",
    }
    others = [replace(manifest, **{name: value}) for name, value in changes.items()]
    others.append(replace(manifest, taps=(1, 2, 3)))
    assert len({one.key for one in (manifest, *others)}) == 7
    assert replace(manifest, target="renamed").key == manifest.key
    for other in others:
        assert not manifest.serves(other)
        with pytest.raises(ValueError, match="features in here") as refusal:
            manifest.check(other, Path("here"))
        for name in changes:
            if getattr(other, name) != getattr(manifest, name):
                assert getattr(other, name) in str(refusal.value)
                assert getattr(manifest, name) in str(refusal.value)
    assert manifest.serves(replace(manifest, taps=(2, 4)))
    assert str(list(TAPS)) in str(refusal.value)


def test_reading_maps_the_file_and_copies_nothing(target: TargetModel, rows: list[Rendered], tmp_path: Path) -> None:
    """A row is a slice of its shard's memory map, whatever the shard's size."""
    fill(cached(target, tmp_path, shard_bytes=1 << 30), rows)
    source = cached(target, tmp_path)
    one, other = (source.get(row) for row in rows[:2])
    assert one.taps.untyped_storage().data_ptr() == other.last.untyped_storage().data_ptr()
    assert isinstance(source.store, FeatureStore)
    assert source.store.num_rows == len(rows)
