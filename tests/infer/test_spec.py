"""HEAD arguments: what they name, and what is refused with a word on what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.drafters import (
    HeadDrafter,
    HybridDrafter,
    NgramDrafter,
    head_folder,
    load_drafter,
    parse_spec,
    resolve_target,
    trained_head,
)
from infer.target import TargetModel
from tests.infer.helpers import Folders, write_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("spec"), [("chat", "hello")])


@pytest.fixture(scope="module")
def target(folders: Folders) -> TargetModel:
    return TargetModel.load(folders.target, dtype="float32")


def test_a_head_alone_is_joined_by_the_lookup(folders: Folders, target: TargetModel) -> None:
    hybrid = load_drafter(folders.head, target)
    assert isinstance(hybrid, HybridDrafter)
    assert [type(part) for part in hybrid.drafters] == [HeadDrafter, NgramDrafter]
    assert isinstance(load_drafter(folders.head, target, hybrid=False), HeadDrafter)


def test_joined_parts_come_in_their_order_and_nothing_is_added(folders: Folders, target: TargetModel) -> None:
    hybrid = load_drafter(f"ngram+{folders.head}", target)
    assert isinstance(hybrid, HybridDrafter)
    assert [type(part) for part in hybrid.drafters] == [NgramDrafter, HeadDrafter]
    assert load_drafter("none", target) is None


def test_two_heads_of_one_family_have_different_names(folders: Folders, target: TargetModel) -> None:
    """Their memory of a request is kept by name."""
    hybrid = load_drafter(f"{folders.head}+{folders.head}/", target)
    assert isinstance(hybrid, HybridDrafter)
    assert len({part.name for part in hybrid.drafters}) == 2


def test_a_folder_whose_name_holds_a_plus_is_a_folder(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.symlink_to(folders.head)
    assert [spec.argument for spec in parse_spec(folder)] == [str(folder)]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("ngrams", "'ngrams' is not a head"),
        ("ngram:3", "'ngram:3' is not a drafter: expected 'ngram'"),
        ("ngram,vocab=9", r"has the option 'vocab=9'; ngram takes: none"),
        ("ngram+ngram", "names 'ngram' twice"),
        ("ngram+none", "joins 'none' with a drafter"),
        ("", "'' is not a head"),
        ("ngram+", "'' is not a head"),
    ],
)
def test_what_is_no_head_is_refused(head: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spec(head)


def test_a_run_folder_is_asked_back(folders: Folders, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "best").symlink_to(folders.head)
    with pytest.raises(ValueError, match="did you mean"):
        parse_spec(run)


def test_which_target_and_which_folder(folders: Folders) -> None:
    assert resolve_target(f"ngram+{folders.head}", None) == "target"
    assert resolve_target("ngram", "somewhere") == "somewhere"
    with pytest.raises(ValueError, match="'ngram' belongs to no target"):
        resolve_target("ngram", None)
    assert head_folder(f"ngram+{folders.head}") == folders.head
    assert head_folder("ngram") is None
    assert trained_head(folders.head, purpose="to test") == folders.head
    with pytest.raises(ValueError, match="is not one trained head to test"):
        trained_head(f"ngram+{folders.head}", purpose="to test")
