"""`headstart drafters`: one catalogue of everything that can draft, complete and true to what the commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headstart
from heads.checkpoint import update_card
from heads.registry import FAMILIES
from infer.drafters import HeadDrafter, HybridDrafter, NgramDrafter
from infer.drafters.catalogue import PROPOSALS, TRAINED, Entry, catalogue, measured
from infer.drafters.spec import _MAKERS, FOLDER
from infer.verify import RULES, Rule
from tests.infer.helpers import Folders, write_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("drafters"), [("a", "abc")])


def named(name: str) -> Entry:
    return next(entry for entry in catalogue() if entry.name == name)


def test_every_family_and_every_kind_of_head_is_listed_once() -> None:
    """A family that is registered, or a kind that HEAD takes, without a word here is not finished."""
    names = [entry.name for entry in catalogue()]
    assert len(names) == len(set(names))
    assert {entry.name for entry in catalogue() if entry.group == TRAINED} == set(FAMILIES)
    others = {entry.name for entry in catalogue() if entry.group != TRAINED}
    assert others - {"hybrid"} == set(_MAKERS) - {FOLDER}


@pytest.mark.parametrize("kind", sorted(set(_MAKERS) - {FOLDER}))
def test_a_kind_is_written_as_the_commands_take_it(kind: str) -> None:
    """The grammar of the list is that of `parse_spec`: argument and options included."""
    maker, written = _MAKERS[kind], named(kind).written
    expected = f"{kind}:{maker.argument}" if maker.takes_argument else kind
    assert written == expected + "".join(f"[,{option}=N]" for option in maker.options)


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
def test_an_entry_leaves_nothing_out(entry: Entry) -> None:
    """Each says where it comes from and what it takes; only plain decoding has no paper and proposes nothing."""
    texts = (entry.title, entry.written, entry.training, entry.reads, entry.needs, entry.parameters, entry.steps)
    assert all(texts)
    assert bool(entry.paper) == bool(entry.proposals) == (entry.name != "none")


def test_families_are_described_by_the_registry() -> None:
    """Papers and settings stand in one place."""
    for name, family in FAMILIES.items():
        entry = named(name)
        assert (entry.title, entry.paper, set(entry.settings)) == (family.title, family.paper, set(family.settings))


def test_proposals_are_those_that_the_drafters_say() -> None:
    """The kinds come from the classes, and every rule finds all of its own among their names."""
    assert named("ngram").proposals == tuple(PROPOSALS[kind] for kind in NgramDrafter.kinds)
    assert named("eagle3").proposals == tuple(PROPOSALS[kind] for kind in HeadDrafter.kinds)
    assert set(named("hybrid").proposals) == {*named("ngram").proposals, *named("eagle3").proposals}
    rules: dict[str, Rule] = dict(RULES)
    assert {kind for rule in rules.values() for kind in rule.kinds} <= set(PROPOSALS)
    assert HybridDrafter([NgramDrafter()]).kinds == NgramDrafter.kinds


def test_the_command_lists_all_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "drafters.json"
    assert headstart.main(["drafters", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    values = json.loads(path.read_text())
    assert [entry["name"] for entry in values["drafters"]] == [entry.name for entry in catalogue()]
    assert values["heads"] == []
    words = " ".join(shown.split())
    for entry in catalogue():
        assert entry.title in words
        assert (entry.name if entry.group == TRAINED else entry.written) in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_figures_on_the_cards_of_named_heads_are_shown(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A card without figures leaves its cells empty; with them they are shown and written."""
    path = tmp_path / "drafters.json"
    empty = measured(folders.head)
    assert (empty.family, empty.target, empty.draft_vocab_size) == ("eagle3", "target", 64)
    assert (empty.overlap, empty.speedup) == (None, None)
    assert headstart.main(["drafters", str(folders.head)]) == 0
    capsys.readouterr()

    acceptance = {"accepted_length": 2.346, "overlap": [0.51, 0.42], "speed": {"speedup": 1.23}}
    update_card(folders.head, acceptance=acceptance)
    assert headstart.main(["drafters", str(folders.head), "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    (head,) = json.loads(path.read_text())["heads"]
    assert (head["accepted_length"], head["overlap"], head["speedup"]) == (2.346, [0.51, 0.42], 1.23)
    assert all(figure in shown for figure in ("2.35", "0.51", "1.23x"))


def test_what_has_no_card_is_a_mistake_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert headstart.main(["drafters", "ngram"]) == 2
    assert "is not one trained head with a card to read" in capsys.readouterr().err
