"""`headstart features`: fills what training reads, goes on where it was interrupted, and is enough to train on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import headstart
from configs.loading import dump_config, load_config
from infer.target import TargetModel
from tests.infer.helpers import Folders, write_folders
from tests.train.training_fixtures import tiny_recipe, write_chats
from train.features import CachedFeatures, StoredFeatures, StoredTarget
from train.features.store import folder_bytes
from train.trainer import train


class Place:
    """A target, chats and a recipe, and `headstart features` run there."""

    def __init__(self, root: Path, folders: Folders) -> None:
        self.root, self.folders, self.out = root, folders, root / "kept"
        config = dump_config(replace(tiny_recipe(write_chats(root / "chats.jsonl")), name="tiny"))
        config["target"] |= {"model": str(folders.target), "dtype": "float32"}
        config["head"]["taps"] = [1, 2, 3]
        self.recipe = root / "tiny.yaml"
        self.recipe.write_text(yaml.safe_dump(config))

    def features(self, *words: str, status: int = 0) -> dict[str, Any]:
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        arguments = ["features", str(self.recipe), *words, "--runs", str(self.root / "runs"), "--json", str(report)]
        assert headstart.main(arguments) == status
        values: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        return values

    def train(self, *overrides: str) -> dict[str, Any]:
        config = load_config(str(self.recipe), overrides)
        return train(config, runs_folder=self.root / "runs", notice=lambda text: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("models"), [("code", "red fish")])


@pytest.fixture
def place(tmp_path: Path, folders: Folders) -> Place:
    return Place(tmp_path, folders)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each row whose states are computed because they are not kept."""
    lengths: list[int] = []
    original: Callable[..., Any] = CachedFeatures._compute

    def compute(self: CachedFeatures, rows: Any) -> Any:
        lengths.extend(len(row.token_ids) for row in rows)
        return original(self, rows)

    monkeypatch.setattr(CachedFeatures, "_compute", compute)
    return lengths


def test_what_it_keeps_training_reads(place: Place, computed: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the runs, and in a folder of its own: no row is computed a second time, and every row is accounted for."""
    report = place.features()
    rows, held_out = report["rows"], report["held_out"]
    assert rows["given"]["rows"] + held_out["given"]["rows"] == 40
    for one in (rows, held_out):
        for unit in ("rows", "tokens"):
            parts = sum(one[name][unit] for name in ("present", "stored", "repeated", "beyond"))
            assert one["given"][unit] == parts
    assert report["errors"] is None
    assert report["kept_rows"] == rows["stored"]["rows"] + held_out["stored"]["rows"]
    assert sum(computed) == rows["stored"]["tokens"] + held_out["stored"]["tokens"]
    shown = capsys.readouterr().out
    assert f"training rows: {rows['given']['rows']} rows" in shown
    assert "kept exactly" in shown
    computed.clear()
    again = place.features()
    assert again["rows"]["present"]["rows"] + again["rows"]["repeated"]["rows"] == rows["given"]["rows"]
    place.train("train.steps=4", "train.teacher=full")
    assert computed == []


def test_training_without_the_target_is_training_on_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very same head, with the target's folder gone."""
    place.features("--out", str(place.out))
    with_target = place.train("name=online", "train.steps=4")
    hidden = place.folders.target.rename(place.folders.target.with_name("hidden"))
    try:
        monkeypatch.setattr(TargetModel, "load", None)
        without = place.train("name=offline", "train.steps=4", f"target.features={place.out}")
    finally:
        hidden.rename(place.folders.target)
    runs = place.root / "runs"
    assert (with_target["step"], without["step"]) == (4, 4)
    weights = [(runs / name / "last" / "model.safetensors").read_bytes() for name in ("online", "offline")]
    assert weights[0] == weights[1]
    cards = [json.loads((runs / name / "last" / "headstart.json").read_text()) for name in ("online", "offline")]
    assert cards[0]["target"] == cards[1]["target"]


def test_a_lossy_form_is_measured(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    report = place.features("--out", str(place.out), "train.feature_dtype=int8")
    errors = report["errors"]
    assert report["stored_dtype"] == errors["stored_dtype"] == "int8"
    assert set(errors["relative_error"]) == {"tap 1", "tap 2", "tap 3", "last"}
    assert all(0 < error < 0.02 for error in errors["relative_error"].values())
    assert 0 <= errors["kl"] <= errors["max_kl"] < 0.01
    assert errors["text"] in capsys.readouterr().out
    kept = json.loads((place.out / "report.json").read_text())
    assert kept["errors"] == errors
    assert kept["data_hash"] == report["data_hash"]
    for path in place.out.rglob("*"):
        if path.is_file():
            assert str(place.root).encode() not in path.read_bytes(), path


def test_an_interrupted_fill_goes_on(place: Place, computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two rows keeps all that were finished."""
    original = CachedFeatures.keep

    def press(self: CachedFeatures, rows: Any) -> None:
        original(self, rows)
        if len(computed) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CachedFeatures, "keep", press)
    assert place.features("--out", str(place.out), status=130) == {}
    monkeypatch.setattr(CachedFeatures, "keep", original)
    report = place.features("--out", str(place.out))
    rows, held_out = report["rows"], report["held_out"]
    assert rows["present"]["rows"] + held_out["present"]["rows"] == 7
    assert sum(computed) == sum(one[part]["tokens"] for one in (rows, held_out) for part in ("present", "stored"))
    stored = StoredTarget.load(place.out)
    assert len(StoredFeatures(stored, (1, 2, 3)).get_many(stored.held_out.rows)) == held_out["given"]["rows"]
    assert len(stored.held_out.domains) == len(stored.held_out.rows)
    assert stored.held_out.prompts


def test_a_budget_that_is_too_small_is_told(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    report = place.features("--out", str(place.out), "--budget-gb", "0.0006")
    assert folder_bytes(place.out) <= 600_000
    assert report["rows"]["beyond"]["rows"] > 0
    assert "would refuse the folder; raise --budget-gb" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"lacks \d+ of 40 rows"):
        place.train("train.steps=4", f"target.features={place.out}")
    assert place.features("--out", str(place.out))["rows"]["beyond"]["rows"] == 0


def test_other_data_settings_compute_what_they_change(place: Place, computed: list[int]) -> None:
    """A cache whose key lacked such a setting served an older run's rows. Rows are known by their tokens: those that
    became others are computed, the rest is read, and another template is another store."""
    whole = place.features()
    assert place.features("data.max_conversations=20")["rows"]["stored"]["rows"] == 0
    computed.clear()
    shorter = place.features("data.max_length=64")
    cut = shorter["rows"]["stored"]["rows"] + shorter["held_out"]["stored"]["rows"]
    assert computed == [64] * cut
    assert 0 < cut < 40
    with (place.root / "chats.jsonl").open("a") as stream:
        stream.write(
            '{"messages": [{"role": "user", "content": "new"}, {"role": "assistant", "content": "red fish"}]}\n'
        )
    computed.clear()
    assert place.features()["rows"]["given"]["rows"] + place.features()["held_out"]["given"]["rows"] == 41
    assert len(computed) == 1
    assert len(list((place.root / "runs" / ".features").iterdir())) == 1
    model = place.root / "retemplated"
    shutil.copytree(place.folders.target, model)
    template = model / "chat_template.jinja"
    template.write_text("{# another #}" + template.read_text())
    anew = place.features(f"target.model={model}")
    assert anew["rows"]["present"]["rows"] == 0
    assert whole["rows"]["stored"]["rows"] > 0
    assert len(list((place.root / "runs" / ".features").iterdir())) == 2


def test_a_stream_is_kept_as_far_as_the_run_goes(place: Place) -> None:
    """Its visits, each row once; a stream without an end is refused."""
    streaming = ("data.streaming=true", "data.scan_rows=30", "data.shuffle_block=8")
    place.features(*streaming, "train.steps=null", "train.minutes=1", status=2)
    report = place.features(*streaming, "train.steps=30", "optim.batch_size=2")
    assert report["rows"]["given"]["rows"] == 60
    assert report["rows"]["repeated"]["rows"] >= 20
    assert report["rows"]["stored"]["rows"] <= 40


def test_mistakes_are_told(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line, before anything is computed or overwritten."""

    def refused(message: str, *words: str) -> None:
        place.features(*words, status=2)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("headstart: error: ")
        assert message in error

    refused("give --budget-gb above 0", "--budget-gb", "0")
    refused("target.features names features that are made already", f"target.features={tmp_path}")
    refused("holds something else than features", "--out", str(tmp_path))
    place.features("--out", str(place.out))
    before = {path: path.read_bytes() for path in place.out.rglob("*") if path.is_file()}
    refused("fingerprint", "--out", str(place.out), f"target.model={place.folders.other}")
    refused(
        "are of taps [1, 2, 3], and the head reads [4]",
        "--out",
        str(place.out),
        "head.taps=null",
        "head.type=medusa",
    )
    refused("stored_dtype float32", "--out", str(place.out), "train.feature_dtype=int8")
    model = tmp_path / "retemplated"
    shutil.copytree(place.folders.target, model)
    template = model / "chat_template.jinja"
    template.write_text("{# another #}" + template.read_text())
    refused("template_hash", "--out", str(place.out), f"target.model={model}")
    assert {path: path.read_bytes() for path in place.out.rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match=r"template_hash .* target.model .*retemplated"):
        place.train("train.steps=4", f"target.features={place.out}", f"target.model={model}")
    with pytest.raises(ValueError, match=r"target.dtype is bfloat16, and the features .* float32"):
        place.train("train.steps=4", f"target.features={place.out}", "target.dtype=bfloat16")
