"""`headstart compare`: recipes on equal terms, every part finished once, and a failure that stays its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import headstart
from configs.loading import dump_config
from heads.base import final_tap
from heads.checkpoint import load_head
from infer.cost import CostModel
from infer.drafters import TreeSettings, load_drafter
from infer.engine import Engine
from infer.evaluate import evaluate, render_prompts
from infer.prompts import load_prompts
from infer.target import TargetModel
from tests.infer.helpers import Folders, write_folders
from tests.toy_tokenizer import toy_tokenizer
from tests.train.training_fixtures import Stopped, tiny_recipe, write_chats
from train import compare as compare_module
from train import measures as measures_module
from train.compare import Budget, read_recipes
from train.corpus.dataset import load_data
from train.features import CachedFeatures, OnlineFeatures, make_features

MEASURED = ["--temperatures", "0", "1", "--rules", "match", "block", "traversal", "--chain", "3", "--nodes", "6"]
PARTS = {"train": compare_module, "evaluate": measures_module, "benchmark": measures_module}
"""What a comparison is made of, and where it finds that."""
SHORT = ["--max-tokens", "10", "--name", "tiny"]


class Place:
    """A target, chats, recipes and prompts in one folder, and `headstart compare` run there."""

    def __init__(self, root: Path, folders: Folders) -> None:
        self.root, self.folders, self.runs = root, folders, root / "runs"
        self.chats = write_chats(root / "chats.jsonl")
        self.recipe("wide")
        self.recipe("small", head={"type": "medusa", "num_heads": 2, "taps": None})

    def recipe(self, name: str, **sections: dict[str, Any]) -> str:
        """Another recipe; `sections` replace settings."""
        config = dump_config(replace(tiny_recipe(self.chats, name=name), name=name))
        config["target"] = {"model": str(self.folders.target), "dtype": "float32"}
        config["head"]["taps"] = [1, 2, 3]
        for section, settings in sections.items():
            config[section] |= settings
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def run(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        path = self.root / "compare.json"
        common = ["--runs", str(self.runs), "--prompts", str(self.folders.prompts), "--json", str(path)]
        assert headstart.main(["compare", *arguments, *MEASURED, *SHORT, *common]) == status
        return json.loads(path.read_text()) if path.exists() else {}

    def measure(self, *drafters: str, status: int = 0) -> dict[str, Any]:
        """Without recipes, and without speed."""
        target = ["--target", str(self.folders.target), "--dtype", "float32"]
        return self.run("--drafters", *drafters, "--no-speed", *target, status=status)

    @property
    def folder(self) -> Path:
        return self.runs / "compare-tiny"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    texts = [("a", "red blue red blue red blue red"), ("b", "fish and bird and fish and bird"), ("a", "river")]
    return write_folders(tmp_path_factory.mktemp("folders"), texts)


@pytest.fixture
def place(tmp_path: Path, folders: Folders) -> Place:
    return Place(tmp_path, folders)


def recipes(place: Place, *names: str) -> list[str]:
    return [str(place.root / f"{name}.yaml") for name in names or ("wide", "small")]


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in result["entries"]}


def figures(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """What does not depend on the machine's speed."""
    return sorted(entry["cells"], key=lambda cell: (cell["shape"], cell["rule"], cell["temperature"]))


def test_a_comparison_from_end_to_end(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Two recipes, a head trained before, and the lookup: one line each in every table, complete figures in the file,
    ordinary runs in the folder, and a picture."""
    head, picture = str(place.folders.head), place.root / "compare.png"
    result = place.run(*recipes(place), "--steps", "6", "--drafters", head, "ngram", "--plot", str(picture))
    entries = by_name(result)
    assert list(entries) == ["wide", "small", head, "ngram"]
    assert [entry["kind"] for entry in entries.values()] == ["eagle3", "medusa", "eagle3", "ngram"]
    assert picture.stat().st_size > 10_000
    for name in ("wide", "small"):
        trained = entries[name]["training"]
        assert (trained["here"], trained["status"], trained["steps"]) == (True, "finished", 6)
        loaded, card = load_head(place.folder / name / "best")
        assert entries[name]["num_parameters"] == sum(one.numel() for one in loaded.parameters())
        assert entries[name]["draft_vocab_size"] == len(loaded.vocabulary)
        assert trained["best_step"] == card.training["step"]
        assert max(len(cell["by_position"]) for cell in entries[name]["cells"]) <= (3 if name == "wide" else 2)
    assert entries["wide"]["training"]["token_visits"] == entries["small"]["training"]["token_visits"]
    assert entries[head]["training"] is None  # its card tells of none
    assert entries["ngram"]["num_parameters"] is None
    sampled = {("chain", "match"), ("chain", "block"), ("tree", "match"), ("tree", "traversal")}
    every = {(*cell, 1.0) for cell in sampled} | {("chain", "any", 0.0), ("tree", "any", 0.0)}
    for name, entry in entries.items():
        cells = {(cell["shape"], cell["rule"], cell["temperature"]): cell for cell in entry["cells"]}
        assert set(cells) == (every if name != "ngram" else {one for one in every if one[1] in ("any", "match")})
        for (_, _, temperature), cell in cells.items():
            assert cell["accepted_length"] == pytest.approx(1 + sum(cell["by_position"]))
            has_bound = temperature > 0 and name != "ngram"
            assert (cell["bound"] is not None) == has_bound
            if has_bound:
                assert cell["bound_ratio"] == pytest.approx(cell["achieved"] / cell["bound"])
        assert [speed["temperature"] for speed in entry["speeds"]] == [0.0, 1.0]
        for speed in entry["speeds"]:
            assert speed["ratio_to_plain"] > 0
            assert 0 < speed["draft_share"] < 1
            assert speed["identical_to_plain"] == 1.0  # float32
    assert entries["ngram"]["skipped"] == ["block", "traversal"]
    shown = capsys.readouterr().out
    for title in ("what they are", "what they give", "chain of 3, temperature 0", "tree of 6, temperature 1"):
        assert title in shown
    assert "ngram has no figures under block, traversal" in shown
    assert {path.name for path in place.folder.iterdir()} >= {"wide", "small", ".features", "compare.json"}


def test_figures_are_those_of_the_measuring_code(place: Place) -> None:
    """The acceptance in the table is what `evaluate` says of the same head, prompts and seeds, by itself."""
    head = str(place.folders.head)
    entry = by_name(place.measure(head))[head]
    target = TargetModel.load(place.folders.target, dtype="float32")
    prompts = render_prompts(target.tokenizer, load_prompts(place.folders.prompts))
    trees = {"chain": TreeSettings.chain(3), "tree": TreeSettings(max_nodes=6, adaptive=False)}
    assert len(entry["cells"]) == 6
    for cell in entry["cells"]:
        rule = "match" if cell["rule"] == "any" else cell["rule"]
        drafter = load_drafter(head, target, hybrid=False)
        engine = Engine(target, drafter, rule=rule, tree=trees[cell["shape"]], cost=CostModel.free())
        report = evaluate(engine, prompts, temperatures=[cell["temperature"]], max_tokens=10, bound=True)
        assert cell["accepted_length"] == report.accepted_length
        assert cell["by_position"] == list(report.overall.by_position)
        if cell["temperature"]:
            assert report.bound is not None
            assert cell["bound_ratio"] == report.bound.overall.ratio
    assert entry["speeds"] == []


def test_what_is_finished_is_not_done_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again trains and measures nothing; a further recipe is all that is done; other rules or prompts
    take the figures anew, and train nothing."""
    first = place.run(*recipes(place), "--steps", "4")
    done: list[str] = []
    for name, module in PARTS.items():
        original = getattr(module, name)

        def spy(*args: Any, original: Callable[..., Any] = original, name: str = name, **named: Any) -> Any:
            done.append(name)
            return original(*args, **named)

        monkeypatch.setattr(module, name, spy)
    assert place.run(*recipes(place), "--steps", "4")["entries"] == first["entries"]
    assert done == []
    place.recipe("third", optim={"lr": 3e-3})
    third = place.run(*recipes(place, "wide", "third"), "--steps", "4")
    assert done == ["train", *["evaluate"] * 6, "benchmark"]
    assert list(by_name(third)) == ["wide", "third"]
    assert by_name(third)["wide"] == by_name(first)["wide"]
    done.clear()
    again = place.run(*recipes(place), "--steps", "4", "--limit", "1")
    assert "everything is measured anew" in capsys.readouterr().err
    assert set(done) == {"evaluate", "benchmark"}
    assert by_name(again)["wide"]["training"] == by_name(first)["wide"]["training"]
    assert by_name(again)["wide"]["cells"] != by_name(first)["wide"]["cells"]


def test_a_head_trained_further_is_measured_anew(place: Place) -> None:
    """Figures belong to weights, not to a folder's name."""
    head = str(place.folders.head)
    before = place.measure(head)
    weights = Path(head) / "model.safetensors"
    content = weights.read_bytes()
    try:
        tensors = load_file(weights)
        torch.manual_seed(0)
        save_file(
            {name: one + torch.randn_like(one) if one.is_floating_point() else one for name, one in tensors.items()},
            weights,
        )
        after = place.measure(head)
    finally:
        weights.write_bytes(content)
    assert figures(by_name(after)[head]) != figures(by_name(before)[head])
    assert figures(by_name(place.measure(head))[head]) == figures(by_name(before)[head])


def interrupting(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interrupts the comparison at one point after another."""
    for name, nth in (("train", 2), ("evaluate", 3), ("evaluate", 2), ("benchmark", 2)):
        original, calls = getattr(PARTS[name], name), []

        def stop(*args: Any, original: Any = original, calls: list[int] = calls, nth: int = nth, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == nth:
                raise Stopped
            return original(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(PARTS[name], name, stop)
            yield name


def test_an_interrupted_comparison_ends_as_one_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two trainings, twice between two figures, and before a benchmark: heads and acceptance are those
    of a comparison in one go (budget in steps, float32), and each stop leaves what was finished in the file."""
    whole = place.run(*recipes(place), "--steps", "4", "--drafters", "ngram")
    place.folder.rename(place.runs / "compare-whole")
    num_cells: list[int] = []
    for _ in interrupting(place, monkeypatch):
        with pytest.raises(Stopped):
            place.run(*recipes(place), "--steps", "4", "--drafters", "ngram")
        state = json.loads((place.folder / "compare.json").read_text())
        num_cells.append(sum(len(entry["cells"]) for entry in state["entries"]))
    assert num_cells == [0, 2, 3, 6 + 6]
    parts = place.run(*recipes(place), "--steps", "4", "--drafters", "ngram")
    for name, entry in by_name(whole).items():
        assert figures(entry) == figures(by_name(parts)[name])
    for name in ("wide", "small"):
        one, other = (
            load_file(folder / name / "best" / "model.safetensors")
            for folder in (place.runs / "compare-whole", place.folder)
        )
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_training_stopped_half_way_resumes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a training ends the command as it ends `headstart train`; the next one goes on from the checkpoint."""
    requested = []
    original = compare_module.train

    def press(config: Any, **named: Any) -> Any:
        def notice(text: str) -> None:
            if text.startswith("step 3") and not requested:
                requested.append(config.name)
                os.kill(os.getpid(), signal.SIGINT)

        return original(config, **{**named, "notice": notice})

    monkeypatch.setattr("train.trainer.NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(compare_module, "train", press)
    place.run(*recipes(place), "--steps", "6", "--no-speed", status=130)
    assert requested == ["wide"]
    state = by_name(json.loads((place.folder / "compare.json").read_text()))
    assert (state["wide"]["training"]["status"], state["small"]["training"]) == ("interrupted", None)
    result = by_name(place.run(*recipes(place), "--steps", "6", "--no-speed"))
    assert [result[name]["training"]["steps"] for name in ("wide", "small")] == [6, 6]
    events = [json.loads(line)["event"] for line in (place.folder / "wide" / "metrics.jsonl").read_text().splitlines()]
    assert events.count("resume") == 1
    assert events.count("train") == 6  # no step was taken twice


def test_no_run_pays_for_the_states_of_the_text(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are computed before the first run, once for the taps of every recipe: training then reads them."""
    place.recipe("other", head={"type": "early_exit", "taps": None, "exit_layer": 2})
    computed: list[tuple[str, tuple[int, ...], list[int]]] = []
    original, training = CachedFeatures._compute, []

    def compute(self: CachedFeatures, rows: Any) -> Any:
        when = "training" if training else "before"
        computed.extend((when, self.online.codec.taps, row.token_ids) for row in rows)
        return original(self, rows)

    def train(config: Any, **named: Any) -> Any:
        training.append(config.name)
        return run(config, **named)

    run = compare_module.train
    monkeypatch.setattr(CachedFeatures, "_compute", compute)
    monkeypatch.setattr(compare_module, "train", train)
    result = by_name(place.run(*recipes(place, "wide", "small", "other"), "--steps", "4", "--no-speed"))
    assert training == ["wide", "small", "other"]
    config = read_recipes(recipes(place, "wide"), [], Budget(steps=4))[0]
    rows = load_data(config.data, toy_tokenizer(), seed=0).rows
    assert computed == [("before", (1, 2, 3, final_tap(3)), row.token_ids) for row in rows]
    assert [one["training"]["recomputed_rows"] for one in result.values()] == [0, 0, 0]


def test_shared_states_are_those_that_a_run_computes(place: Place, tmp_path: Path) -> None:
    """Taken from the states of all recipes' taps or computed for one recipe alone: the same numbers, to the bit, and
    where a recipe reads the state after the final norm too."""
    (config,) = read_recipes(recipes(place, "wide"), [], Budget(steps=4))
    target = TargetModel.load(place.folders.target, dtype="float32")
    rows = load_data(config.data, target.tokenizer, seed=0).rows[:6]
    last = final_tap(target.num_layers)

    def source(taps: tuple[int, ...]) -> CachedFeatures:
        made = make_features(config, target, taps=taps, folder=tmp_path / "shared", notice=lambda text: None)
        assert isinstance(made, CachedFeatures)
        return made

    shared = source((1, 2, 3, last))
    shared.keep(rows)
    shared.flush()
    for taps in ((1, 2, 3), (last,), (2, last)):
        part, alone = source(taps), OnlineFeatures(target, taps)
        for row in rows:
            kept, expected = part.get(row), alone.get(row)
            for name in ("taps", "last", "log_normalizer"):
                one, other = getattr(kept, name), getattr(expected, name)
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert part.online.num_computed_tokens == 0


def test_a_recipe_that_fails_stands_in_the_table(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The others go on, the exit status says so, and once it is mended only what failed is done."""
    place.recipe("bad", optim={"lr": 1e30})
    result = by_name(place.run(*recipes(place, "bad", "wide"), "--steps", "6", "--no-speed", status=1))
    assert "lower optim.lr" in result["bad"]["error"]
    assert result["bad"]["cells"] == []
    assert len(result["wide"]["cells"]) == 6
    shown = capsys.readouterr()
    assert "bad FAILED: step" in shown.out
    assert "wide" in shown.out
    place.recipe("bad", optim={"lr": 1e-3})
    mended = by_name(place.run(*recipes(place, "bad", "wide"), "--steps", "6", "--no-speed"))
    assert mended["bad"]["error"] is None
    assert len(mended["bad"]["cells"]) == 6
    assert mended["wide"] == result["wide"]


def test_a_drafter_that_fails_later_stands_in_the_table(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours is told by its type; what was measured before it stays."""
    original, calls = measures_module.evaluate, []

    def fail(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return original(*args, **named)

    head = str(place.folders.head)
    with monkeypatch.context() as patch:
        patch.setattr(measures_module, "evaluate", fail)
        result = by_name(place.measure(head, "ngram", status=1))
    assert result[head]["error"] == "RuntimeError: out of memory"
    assert (len(result[head]["cells"]), len(result["ngram"]["cells"])) == (2, 4)
    mended = by_name(place.measure(head, "ngram"))
    assert mended[head]["error"] is None
    assert len(mended[head]["cells"]) == 6


BAD_INPUT = [
    (["RECIPE:wide", "RECIPE:small"], "give --minutes or --steps"),
    (["RECIPE:wide", "--minutes", "1", "--steps", "5"], "give --minutes or --steps"),
    (["RECIPE:wide", "--steps", "0"], "above 0"),
    (["RECIPE:wide", "--minutes", "nan"], "above 0"),
    ([], "nothing takes part"),
    (["--steps", "5", "--drafters", "HEAD"], "--steps without a recipe"),
    (["optim.lr=1", "--drafters", "HEAD"], "settings without a recipe"),
    (["RECIPE:wide", "--steps", "5", "--target", "models/x"], "give target.model=..."),
    (["--drafters", "ngram"], "says which target"),
    (["smollm2-135m-eagle4", "--steps", "5"], "no shipped recipe is called 'smollm2-135m-eagle4'"),
    (["missing.yaml", "--steps", "5"], "there is no recipe file missing.yaml"),
    (["RECIPE:wide", "RECIPE:wide", "--steps", "5"], "two recipes have the name 'wide'"),
    (["RECIPE:wide", "optim.lrr=1", "--steps", "5"], "did you mean optim.lr"),
    (["RECIPE:wide", "train.minutes=3", "--steps", "5"], "train.minutes is the comparison's to set"),
    (["RECIPE:wide", "name=mine", "--steps", "5"], "each recipe keeps its own"),
    (["RECIPE:wide", "RECIPE:elsewhere", "--steps", "5"], "not comparable: target.model is"),
    (["RECIPE:wide", "RECIPE:joint", "--steps", "5"], "joint trains its target too"),
    (["RECIPE:wide", "RECIPE:longer", "--steps", "5"], "data.max_length is 96 in one and 128 in the other"),
    (["RECIPE:wide", "RECIPE:huge", "--steps", "5"], "head.draft_vocab_size is 5000, more than the target's"),
    (["RECIPE:wide", "RECIPE:scarce", "--steps", "5"], "scarce: 260 tokens are always kept"),
    (["RECIPE:wide", "RECIPE:misfit", "--steps", "5"], "misfit: head.exit_layer is 2"),
    (["RECIPE:wide", "--steps", "5", "--drafters", "nowhere"], "'nowhere' is not a head"),
    (["RECIPE:wide", "--steps", "5", "--drafters", "none"], "leave it out"),
    (["RECIPE:wide", "--steps", "5", "--drafters", "ngram", "ngram"], "'ngram' takes part twice"),
    (["RECIPE:wide", "--steps", "5", "--drafters", "layers:9"], "9"),
    (["RECIPE:wide", "--steps", "5", "--temperatures", "0", "0"], "each only once"),
    (["RECIPE:wide", "--steps", "5", "--nodes", "0"], "num_nodes must be at least 1"),
    (["RECIPE:wide", "--steps", "5", "--max-tokens", "1"], "at least 2"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[message[:30] for _, message in BAD_INPUT])
def test_mistakes_are_told_before_anything_trains(
    arguments: list[str],
    message: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, the usual status, no training and no states computed."""
    place.recipe("elsewhere", target={"model": str(place.folders.other)})
    place.recipe("joint", head={"type": "medusa", "taps": None}, backbone={"lora_rank": 4})
    place.recipe("longer", data={"max_length": 96})
    place.recipe("huge", head={"draft_vocab_size": 5000})
    place.recipe("scarce", head={"draft_vocab_size": 20})
    place.recipe("misfit", head={"exit_layer": 2})

    def never(*args: Any, **named: Any) -> Any:
        raise AssertionError("this must not be reached")

    for name, module in {**PARTS, "make_features": compare_module}.items():
        monkeypatch.setattr(module, name, never)
    words = [
        str(place.root / f"{word.removeprefix('RECIPE:')}.yaml") if word.startswith("RECIPE:") else word
        for word in arguments
    ]
    words = [str(place.folders.head) if word == "HEAD" else word for word in words]
    monkeypatch.chdir(place.root)
    at_default = [word for word in MEASURED if not (word == "0" and "--temperatures" in words)]
    kept = [] if {"--temperatures", "--nodes"} & set(words) else at_default
    limits = [] if "--max-tokens" in words else SHORT[:2]
    assert headstart.main(["compare", *words, *kept, *limits, "--runs", str(place.runs)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("headstart: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--steps", "5"], "on other terms (steps 4; now steps 5)"),
        (["--steps", "4", "--seed", "1"], "on other terms (seed 0, data_hash"),
        (["--steps", "4", "optim.lr=0.5"], "holds a run with other settings (optim.lr)"),
    ],
)
def test_a_comparison_on_other_terms_is_refused(
    changes: list[str], message: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of different budgets or data must not end up in one table."""
    place.run(*recipes(place, "wide"), "--steps", "4", "--no-speed")
    capsys.readouterr()
    place.run(*recipes(place, "wide"), *changes, "--no-speed", status=2)
    assert message in capsys.readouterr().err


def test_recipes_are_put_on_equal_terms(place: Place) -> None:
    """Whatever their files say: one budget, one seed, the same evaluations, no early end."""
    place.recipe("odd", train={"epochs": 3.0, "patience": 1, "seed": 9, "num_evaluations": 5}, eval={"prompts": 1})
    one, odd = read_recipes(recipes(place, "wide", "odd"), ["optim.lr=2e-3"], Budget(minutes=1.5, seed=4))
    assert odd == replace(one, name="odd")
    assert (one.train.minutes, one.train.steps, one.train.epochs) == (1.5, None, None)
    assert (odd.train.seed, odd.train.patience, odd.train.num_evaluations, odd.optim.lr) == (4, None, 2, 2e-3)
