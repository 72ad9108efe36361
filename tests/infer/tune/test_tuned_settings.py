"""Tuned settings: where they are kept, whom they serve, and what goes before them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from infer.cli import common
from infer.drafters import HybridDrafter, TreeSettings
from infer.engine import Engine, load_engine
from infer.target import TargetModel
from infer.tune.settings import (
    TUNING_FILE,
    TunedSetting,
    TunedSettings,
    Workload,
    machine_key,
    tuned_for,
    tuning_path,
)
from tests.infer.helpers import Folders, write_folders

TUNED = TreeSettings(max_nodes=5, max_depth=3, branch=2, beam=2, adaptive=False)
OWN_LINE = "settings tuned for batch 1, temperature 0"


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return write_folders(tmp_path, [("a", "one two"), ("b", "three")], drafter={"max_nodes": 9, "max_depth": 4})


@pytest.fixture
def target(folders: Folders) -> TargetModel:
    return TargetModel.load(folders.target, dtype="float32")


def setting(
    batch: int = 1, temperature: float = 0.0, context: int | None = None, *, rule: str = "match", speed: float = 1.0
) -> TunedSetting:
    return TunedSetting(
        workload=Workload(batch=batch, temperature=temperature, context=context),
        tree=TUNED,
        rule=rule,
        hybrid=False,
        speculate=True,
        predicted={"tokens_per_second": speed},
    )


def keep(folders: Folders, target: TargetModel, *settings: TunedSetting, **machine: object) -> Path:
    tuned = TunedSettings(
        machine={**machine_key(target), **machine}, target=target.fingerprint, settings=settings or (setting(),)
    )
    path = folders.head / TUNING_FILE
    tuned.save(path)
    return path


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    common.add_tree_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args(given)


def built(folders: Folders, target: TargetModel, *given: str, **more: object) -> Engine:
    return common.build_engine(arguments(*given), target, head=str(folders.head), max_requests=1, **more)  # type: ignore[arg-type]


def test_they_survive_their_file(folders, target):
    path = keep(folders, target, setting(), setting(4, 1.0, 256), replace(setting(8), speculate=False))
    tuned = TunedSettings.load(path)
    assert tuned.settings[1] == setting(4, 1.0, 256)
    assert not tuned.settings[2].speculate
    assert tuned.problem(target) is None
    values = json.loads(path.read_text())
    assert values["version"] == 1
    assert values["settings"][1]["tree"]["max_nodes"] == 5
    assert {"batch", "temperature", "context", "rule", "hybrid", "speculate"} <= values["settings"][1].keys()


@pytest.mark.parametrize(
    "broken", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "machine": {}, "target": "x", "settings": []}']
)
def test_a_broken_file_is_an_error_that_says_what_to_do(folders, target, broken):
    path = keep(folders, target)
    path.write_text(broken)
    with pytest.raises(ValueError, match=r"holds no tuned settings .*: run headstart tune again, or remove the file"):
        load_engine(folders.head, target)


@pytest.mark.parametrize(
    "broken",
    [
        {"batch": 0},
        {"batch": -1},
        {"temperature": "nan"},
        {"context": -5},
        {"predicted": {"tokens_per_second": "fast"}},
        {"tree": {"max_nodes": 0}},
        {"rule": ["match"]},
    ],
)
def test_a_setting_that_no_tuning_writes_is_such_an_error_too(folders, target, broken):
    path = keep(folders, target)
    values = json.loads(path.read_text())
    values["settings"][0].update(broken)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="holds no tuned settings"):
        load_engine(folders.head, target)


def test_the_nearest_workload_serves():
    """Greedy or sampled goes first, then the batch by its ratio, then temperature, then context by its ratio."""
    tuned = TunedSettings(
        machine={},
        target="",
        settings=(setting(1), setting(8), setting(1, 0.7), setting(1, 1.0), setting(8, 1.0), setting(1, 0.0, 2048)),
    )

    def chosen(**workload: object) -> tuple[object, ...]:
        found = tuned.choose(**workload)  # type: ignore[arg-type]
        assert found is not None
        return (found.workload.batch, found.workload.temperature, found.workload.context)

    assert chosen() == (1, 0.0, None)
    assert chosen(batch=3) == (8, 0.0, None)
    assert chosen(batch=2) == (1, 0.0, None)
    assert chosen(temperature=0.1) == (1, 0.7, None)
    assert chosen(batch=32, temperature=0.7) == (8, 1.0, None)
    assert TunedSettings(machine={}, target="", settings=(setting(1, 0.0, 64), setting(1, 0.0, 2048))).choose(
        context=1000
    ) == setting(1, 0.0, 2048)


def test_a_rule_that_promises_less_serves_only_who_asks():
    """The default promise is kept whatever was tuned; who asks for the distribution gets the faster of both."""
    exact, drawn = setting(temperature=1.0, speed=10.0), setting(temperature=1.0, rule="traversal", speed=12.0)
    tuned = TunedSettings(machine={}, target="", settings=(drawn, exact))
    assert tuned.choose(temperature=1.0) == exact
    assert tuned.choose(temperature=1.0, exactness="seed") == exact
    assert tuned.choose(temperature=1.0, exactness="distribution") == drawn
    assert TunedSettings(machine={}, target="", settings=(drawn,)).choose(temperature=1.0) is None


def test_commands_and_programs_take_them(folders, target, capsys):
    """Arguments go before tuning, tuning before the card; a lookup is there only if tuning says so."""
    assert built(folders, target).tree.max_nodes == 9  # the card's
    assert capsys.readouterr().err == ""
    keep(folders, target)
    engine = built(folders, target)
    assert engine.tree == TUNED
    assert not isinstance(engine.drafter, HybridDrafter)
    assert OWN_LINE in capsys.readouterr().err
    assert built(folders, target, "--nodes", "7").tree == replace(TUNED, max_nodes=7)
    assert built(folders, target, "--adaptive").tree == replace(TUNED, adaptive=True)
    assert built(folders, target, "--chain", "2").tree == TreeSettings.chain(2)
    assert built(folders, target, adaptive=True).tree == replace(TUNED, adaptive=True)
    assert built(folders, target, "--rule", "match").tree.max_nodes == 9  # a rule of one's own may not suit them
    engine = load_engine(folders.head, target)
    assert engine.tree == TUNED
    assert engine.rule.name == "match"
    assert load_engine(folders.head, target, tree=TreeSettings()).tree == TreeSettings()
    assert isinstance(load_engine(folders.head, target, hybrid=True).drafter, HybridDrafter)


def test_plain_decoding_where_it_was_chosen(folders, target):
    """Unless drafts are what the user or the command wants: then with the best draft's tree."""
    keep(folders, target, replace(setting(), speculate=False))
    assert built(folders, target).drafter is None
    assert load_engine(folders.head, target).drafter is None
    for engine in (built(folders, target, drafts=True), built(folders, target, "--depth", "2")):
        assert engine.drafter is not None
        assert engine.tree.max_nodes == 5


@pytest.mark.parametrize("name", ["cpu", "threads", "dtype", "torch"])
def test_another_machines_are_left_alone(folders, target, capsys, name):
    """With one line that says so, from commands and programs alike."""
    path = keep(folders, target, **{name: "another"})
    assert built(folders, target).tree.max_nodes == 9
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"the settings in {path} were tuned where {name} was 'another'" in line
    with pytest.warns(UserWarning, match="they are not used"):
        assert load_engine(folders.head, target).tree == TreeSettings()


def test_another_targets_are_left_alone(folders, target):
    keep(folders, target)
    other = TargetModel.load(folders.other, dtype="float32")
    found, line = tuned_for(folders.head, other, Workload())
    assert found is None
    assert "for another target" in line


def test_bitwise_engines_do_without(folders, target):
    """Their forwards cost something else."""
    keep(folders, target)
    assert tuned_for(folders.head, target, Workload(), exactness="bitwise") == (None, "")


def test_drafters_without_a_folder_have_none(folders, target):
    assert tuning_path("ngram") is None
    assert tuned_for("ngram", target, Workload()) == (None, "")
