"""`headstart tune`, on a tiny model: what it writes, says and refuses."""

from __future__ import annotations

import json

import pytest

import headstart
from infer.drafters import TreeSettings
from infer.engine import load_engine
from infer.target import TargetModel
from infer.tune.search import PLAIN, grid
from infer.tune.settings import TUNING_FILE, TunedSettings
from infer.tune.tuner import Prompts, timed_settings
from tests.infer.helpers import Folders, write_folders

TEXTS = [("a", "one two one two"), ("a", "three"), ("b", "two three two three"), ("b", "four")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("tune"), TEXTS)


def tune(folders: Folders, *more: str) -> int:
    common = ["--target", str(folders.target), "--prompts", str(folders.prompts), "--dtype", "float32", "--raw"]
    return headstart.main(["tune", *more, *common, "--max-tokens", "8"])


def test_it_writes_settings_that_commands_take(folders, tmp_path, capsys):
    """Two workloads, measured on the prompts kept; the file is for this machine and names a tree for each."""
    report, picture = tmp_path / "tune.json", tmp_path / "tune.png"
    head = str(folders.head)
    assert tune(folders, head, "--temperature", "0", "1", "--verify", "--top", "2", "--json", str(report),
                "--plot", str(picture)) == 0  # fmt: skip
    output = capsys.readouterr().out
    assert "settings searched" in output
    assert "measured on the prompts kept" in output
    assert picture.stat().st_size > 0
    tuned = TunedSettings.load(folders.head / TUNING_FILE)
    assert [each.workload.temperature for each in tuned.settings] == [0.0, 1.0]
    assert {each.rule for each in tuned.settings} == {"match"}
    values = json.loads(report.read_text())
    for workload in values["workloads"]:
        assert workload["num_searched"] == len(workload["searched"]) >= 60
        speeds = [each["tokens_per_second"] for each in workload["searched"]]
        assert speeds == sorted(speeds, reverse=True)
        assert {"plain"} <= {each["setting"] for each in workload["verified"]}
        assert 0 <= workload["regret"] < 1
    target = TargetModel.load(folders.target, dtype="float32")
    engine = load_engine(folders.head, target)
    (best, _) = tuned.settings
    assert engine.tree == (best.tree if best.speculate else TreeSettings()) or engine.drafter is None
    assert (engine.drafter is not None) == best.speculate


def test_a_drafter_without_a_folder(folders, tmp_path, capsys):
    """It needs a file to write to; at batch 2 and a longer context, rejection rules asked for but not to be had."""
    assert tune(folders, "ngram") == 2
    assert "has no folder to keep its settings in: add --out FILE, or --dry-run" in capsys.readouterr().err
    out = tmp_path / "ngram.json"
    assert tune(folders, "ngram", "--batch", "2", "--context", "40", "--out", str(out)) == 0
    (only,) = TunedSettings.load(out).settings
    assert (only.workload.batch, only.workload.context) == (2, 40)


def test_what_it_refuses(folders, capsys):
    for arguments, complaint in (
        (("none",), "there is nothing to tune"),
        ((str(folders.head), "--batch", "0"), "at least 1 request"),
        ((str(folders.head), "--max-tokens", "2"), "--max-tokens must be at least 3"),
        ((str(folders.head), "--top", "0"), "--top must be at least 1"),
    ):
        assert headstart.main(["tune", *arguments, "--target", str(folders.target)]) == 2
        assert complaint in capsys.readouterr().err


def test_half_of_each_domain_is_kept():
    prompts = Prompts.split([("a", [1]), ("b", [2]), ("a", [3]), ("a", [4]), ("b", [5])])
    assert prompts.tuning == ((1,), (2,), (4,))
    assert prompts.held_out == ((3,), (5,))
    longer = prompts.at(4)
    assert all(len(each) == 4 for each in (*longer.tuning, *longer.held_out))
    assert longer.tuning[0][-1:] == (1,)
    assert prompts.at(None) == prompts
    assert prompts.at(1) == prompts


def test_the_timed_settings_differ_in_what_costs():
    settings = timed_settings(grid((False, True)))
    assert settings[0] == PLAIN
    assert len(settings) == len(set(settings)) <= 12
    trees = [each.tree for each in settings if each.tree is not None]
    assert min(tree.max_nodes for tree in trees) == 1
    assert max(tree.max_nodes for tree in trees) == 32
    assert {tree.adaptive for tree in trees} == {True, False}
    assert {each.hybrid for each in settings if each.tree is not None} == {True, False}
