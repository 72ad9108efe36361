"""Which states a run keeps, and which one it goes on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from heads.checkpoint import staged_folder
from train.checkpoints import CHECKSUM_FILE, Checkpoints, fault_of, step_of, write_checksums

KEY = "this run"


def save(checkpoints: Checkpoints, step: int, *, key: str = KEY, fail: bool = False) -> None:
    """What the trainer does, with a file of bytes for a head."""
    with staged_folder(checkpoints.last, former=checkpoints.place_for_former()) as staging:
        (staging / "weights").write_bytes(f"weights of step {step}".encode() * 100)
        (staging / "headstart.json").write_text("{}")
        if fail:
            raise OSError("no space left on device")
        write_checksums(staging, key=key, step=step, but=("headstart.json",))
    checkpoints.rotate()


def made(folder: Path, steps: list[int], *, keep: int = 1) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=keep, key=KEY)
    for step in steps:
        save(checkpoints, step)
    return checkpoints


def foreign(folder: Path, step: int) -> Path:
    """A state that another run left in this one's folder."""
    other = Checkpoints(folder / "elsewhere", key="another run")
    save(other, step, key="another run")
    place = folder / "checkpoints" / f"step-{step:06d}"
    place.parent.mkdir(parents=True, exist_ok=True)
    other.last.rename(place)
    shutil.rmtree(folder / "elsewhere")
    return place


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_newest_states_stay_whatever_their_names(tmp_path: Path, keep: int) -> None:
    """Steps of different lengths sort as numbers, last/ and best/ are never touched, nor is another run's state."""
    stale = foreign(tmp_path, 5000)
    best = tmp_path / "best"
    best.mkdir()
    (best / "weights").write_bytes(b"the oldest is the best")
    checkpoints = made(tmp_path, [900, 1000, 10000], keep=keep)
    assert step_of(checkpoints.last) == 10000
    assert [step for step, _ in checkpoints.former()] == [1000, 900][:keep]
    assert stale.is_dir()
    assert fault_of(stale) is None
    assert (best / "weights").read_bytes() == b"the oldest is the best"
    assert not list(tmp_path.glob(".*"))


def test_lowering_the_limit_removes_the_oldest(tmp_path: Path) -> None:
    made(tmp_path, [1, 2, 3, 4], keep=3)
    fewer = Checkpoints(tmp_path, keep=1, key=KEY)
    save(fewer, 5)
    assert [step for step, _ in fewer.former()] == [4]


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, [1, 2], keep=1)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 3, fail=True)
    assert step_of(checkpoints.last) == 2
    assert [step for step, _ in checkpoints.former()] == [1]
    assert fault_of(checkpoints.last) is None
    assert not list(tmp_path.glob(".*"))


def test_a_foreign_state_of_the_same_step_is_not_overwritten(tmp_path: Path) -> None:
    place = foreign(tmp_path, 1)
    before = (place / "weights").read_bytes()
    checkpoints = made(tmp_path, [1, 2], keep=2)
    assert (place / "weights").read_bytes() == before
    assert step_of(checkpoints.last) == 2


class Damage(NamedTuple):
    name: str
    content: bytes | None
    says: str


DAMAGES = [
    Damage("weights", b"weights of", "truncated or damaged"),
    Damage("weights", b"", "truncated or damaged"),
    Damage("weights", None, "weights is missing"),
    Damage(CHECKSUM_FILE, None, f"no {CHECKSUM_FILE}"),
    Damage(CHECKSUM_FILE, b"", "damaged"),
    Damage(CHECKSUM_FILE, b'{"run": "this run", "st', "damaged"),
    Damage(CHECKSUM_FILE, b"[]", "damaged"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.name}-{damage.content!r:.12}")
def test_a_damaged_state_is_passed_over_by_name(tmp_path: Path, damage: Damage) -> None:
    """Resume takes the newest whole state, and says which it did not take and why."""
    checkpoints = made(tmp_path, [1, 2, 3], keep=2)
    victim = checkpoints.last / damage.name
    victim.unlink() if damage.content is None else victim.write_bytes(damage.content)
    said: list[str] = []
    newest = Checkpoints(tmp_path).newest(said.append)
    assert newest is not None
    assert step_of(newest) == 2
    assert len(said) == 1
    assert "last" in said[0]
    assert damage.says in said[0]


def test_two_damaged_states(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, [1, 2, 3], keep=2)
    for place in (checkpoints.last, checkpoints.former()[0][1]):
        (place / "weights").write_bytes(b"")
    said: list[str] = []
    newest = checkpoints.newest(said.append)
    assert newest is not None
    assert step_of(newest) == 1
    assert len(said) == 2


def test_no_whole_state_is_an_error_that_names_them_all(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, [1, 2], keep=1)
    for place in (checkpoints.last, checkpoints.former()[0][1]):
        (place / "weights").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no state in .* is whole: .*last.*step-000001.*head\.init_from"):
        checkpoints.newest()


def test_an_empty_run_has_no_state(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).newest() is None
    (tmp_path / "checkpoints" / "step-x").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert Checkpoints(tmp_path).newest() is None


def test_the_card_may_change_later(tmp_path: Path) -> None:
    """Calibrating or measuring a checkpoint's head writes to its card, and it can be resumed from all the same."""
    checkpoints = made(tmp_path, [1])
    (checkpoints.last / "headstart.json").write_text(json.dumps({"acceptance": 2}))
    (checkpoints.last / "more").write_text("added")
    assert fault_of(checkpoints.last) is None


def test_a_save_that_died_between_its_renames_is_undone(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, [1, 2], keep=0)
    checkpoints.last.rename(tmp_path / ".last.previous")
    newest = checkpoints.newest()
    assert newest is not None
    assert step_of(newest) == 2


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = made(tmp_path, [1])
    checkpoints.check_room()
    monkeypatch.setattr("train.checkpoints.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="MB are needed"):
        checkpoints.check_room()


def test_a_damaged_state_is_not_replaced_by_another_runs(tmp_path: Path) -> None:
    """Going on from a later state that another run left in the folder would continue that one under this one's name."""
    checkpoints = made(tmp_path, [1, 2])
    foreign(tmp_path, 5000)
    (checkpoints.last / "weights").write_bytes(b"")
    assert Checkpoints(tmp_path).newest() == tmp_path / "checkpoints" / "step-000001"
    shutil.rmtree(tmp_path / "checkpoints" / "step-000001")
    with pytest.raises(ValueError, match=r"no state .* is whole"):
        Checkpoints(tmp_path).newest()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """The second one is told, changes nothing, and may come once the first is done or dead."""
    folder = tmp_path / "run"
    with Checkpoints(folder).claimed():
        with pytest.raises(ValueError, match="another process is training in"), Checkpoints(folder).claimed():
            pass
        assert folder.is_dir(), "not the second one's to remove"
        save(Checkpoints(folder), 1)
    with pytest.raises(RuntimeError), Checkpoints(folder).claimed():
        raise RuntimeError("killed")
    with Checkpoints(folder).claimed():
        assert step_of(folder / "last") == 1


def test_a_folder_that_nothing_was_written_to_goes_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong setting"), Checkpoints(tmp_path / "run").claimed():
        raise ValueError("wrong setting")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ValueError, match=r"cannot be written to .*--runs"),
        Checkpoints(tmp_path / "file/run").claimed(),
    ):
        pass
