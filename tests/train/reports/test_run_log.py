"""One log, two places: what a tracker is given is what the file holds, whatever becomes of the run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from heads.checkpoint import read_card
from infer.target import TargetModel
from tests.train.training_fixtures import Stopped, tiny_recipe
from train.reports.evaluation import Evaluation
from train.reports.metrics import every_record, read_metrics
from train.reports.run_log import RunLog, flat, open_log
from train.reports.tracking import STEP_NAME, NoTracker
from train.trainer import train
from train.world import World

POSITION = {"step": 3, "epoch": None, "tokens": 30, "train_seconds": 1.5}
VALUES = {"loss": 2.0, "lr": 1e-3, "overlap_by_depth": (0.5, 0.25), "gradient_norm": float("inf")}


class Recorder(NoTracker):
    """A tracker that remembers, and that refuses what a real one would lose."""

    run_id: str | None = "recorded"

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.shown: list[int] = []
        self.heads: list[str] = []
        self.ends: list[tuple[dict[str, Any], bool]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.ends, "logged after the end"
        assert all(isinstance(value, float) and math.isfinite(value) for value in values.values())
        self.points.append((step, dict(values)))

    def show(self, step: int, evaluation: Evaluation) -> None:
        self.shown.append(step)

    def keep_head(self, name: str, folder: Path) -> None:
        assert read_card(folder).acceptance
        self.heads.append(name)

    def finish(self, summary: Mapping[str, Any], image: Path | None = None, *, failed: bool = False) -> None:
        self.ends.append((dict(summary), failed))


@pytest.fixture
def recipe(chats: Path) -> RunConfig:
    return tiny_recipe(chats)


def run(config: RunConfig, folder: Path, target: TargetModel, *, stop_at: int | None = None, **settings: Any) -> Any:
    def notice(text: str) -> None:
        if stop_at is not None and text.startswith(f"step {stop_at}"):
            raise Stopped

    return train(config, runs_folder=folder, target=target, notice=notice, **settings)


def points_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Every point that the file has, attempts that were superseded included."""
    return [(record["step"], record["curves"]) for record in every_record(folder) if "curves" in record]


def test_names_are_flat_and_values_finite() -> None:
    assert flat({**VALUES, "name": "x", "on": True, "none": None}) == {
        "loss": 2.0,
        "lr": 1e-3,
        "overlap_1": 0.5,
        "overlap_2": 0.25,
    }


def test_file_and_tracker_get_the_same_points(tmp_path: Path, recipe: RunConfig, target: TargetModel) -> None:
    """Name by name and point by point, over a whole run with training, evaluations and saves, in one order."""
    tracker = Recorder()
    run(recipe, tmp_path, target, tracker=tracker)
    folder = tmp_path / "tiny"
    assert tracker.points == points_of(folder)
    assert tracker.shown == [6, 12]
    assert tracker.heads == ["tiny"]
    ((summary, failed),) = tracker.ends
    assert summary["status"] == "finished"
    assert not failed
    assert {path.name for path in folder.iterdir()} >= {"summary.json", "acceptance.png", "report.html"}
    names = {name for _, curves in tracker.points for name in curves}
    assert {"train/loss", "train/overlap_1", "train/features_share", "train/peak_rss_gb", "train/tokens"} <= names
    assert {"eval/accepted_length", "eval/accepted_length_error", "eval/simulated_length", "eval/speedup"} <= names


def test_the_last_records_are_not_dropped(tmp_path: Path, target: TargetModel, chats: Path) -> None:
    """12 steps logged every 5: the last two steps are in the log as well."""
    run(tiny_recipe(chats, train__log_every=5), tmp_path, target)
    steps = [record["step"] for record in read_metrics(tmp_path / "tiny") if record["event"] == "train"]
    assert steps[-1] == 12


def test_a_resumed_run_loses_no_point(tmp_path: Path, target: TargetModel, chats: Path) -> None:
    """Killed at step 9, resumed from 6: file and tracker hold both attempts, and readers each step once."""
    config = tiny_recipe(chats, train__eval_every=3)
    first, second = Recorder(), Recorder()
    with pytest.raises(Stopped):
        run(config, tmp_path, target, tracker=first, stop_at=9)
    assert not first.ends, "what is killed ends nothing"
    run(config, tmp_path, target, tracker=second, resume=True)
    folder = tmp_path / "tiny"
    assert first.points + second.points == points_of(folder)
    steps = Counter(record["step"] for record in read_metrics(folder) if record["event"] == "train")
    assert steps == Counter(range(1, 13))
    assert read_metrics(folder)[-1] == {"event": "end", "status": "finished", "step": 12}


def test_an_error_ends_the_tracking_as_failed(tmp_path: Path, target: TargetModel, recipe: RunConfig) -> None:
    """The tracker is closed and says so; the file keeps the reason; the error goes on its way."""
    tracker = Recorder()

    def broken(*_: Any) -> Any:
        raise RuntimeError("the decode loop broke")

    with pytest.raises(RuntimeError, match="broke"):
        run(recipe, tmp_path, target, tracker=tracker, evaluate=broken)
    assert tracker.ends == [({"status": "failed"}, True)]
    end = every_record(tmp_path / "tiny")[-1]
    assert end["status"] == "failed"
    assert "the decode loop broke" in end["error"]


def test_only_the_main_process_writes(tmp_path: Path, recipe: RunConfig) -> None:
    """Of two processes one has a file and a tracker; the other's log takes everything and does nothing."""
    tracker = Recorder()
    with open_log(recipe, tmp_path / "other", World(rank=1, size=2), run_id=None, notice=print, tracker=tracker) as log:
        log.training(POSITION, VALUES)
        log.resume(POSITION)
        assert log.finish({"status": "finished"}) == {"status": "finished"}
        assert log.run_id is None
    assert not (tmp_path / "other").exists()
    assert not tracker.points
    assert not tracker.ends
    with open_log(recipe, tmp_path / "main", World(rank=0, size=2), run_id=None, notice=print, tracker=tracker) as log:
        log.training(POSITION, VALUES)
    assert len(points_of(tmp_path / "main")) == 1


def test_a_silent_log_takes_everything() -> None:
    log = RunLog.silent()
    log.about({"rows": 1})
    log.training(POSITION, VALUES)
    log.abandon(ValueError("x"))


def test_the_summary_compares_best_and_last(tmp_path: Path, target: TargetModel, chats: Path) -> None:
    """A loss may fall while the accepted length does: the summary has both heads, and says which is served."""
    from tests.train.test_trainer import scripted
    from train.reports.report import describe_run

    summary = run(tiny_recipe(chats, train__eval_every=4), tmp_path, target, evaluate=scripted([3, 4, 2]))
    assert (summary["best"]["step"], summary["best"]["accepted_length"]) == (8, 4)
    assert (summary["last"]["step"], summary["last"]["accepted_length"]) == (12, 2)
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["last"] == summary["last"]
    assert "last head: step 12, accepted length 2.000, -50.0% against the best" in describe_run(tmp_path / "tiny")


def test_a_picture_that_fails_costs_nothing_else(
    tmp_path: Path, target: TargetModel, recipe: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a drawing library does, the run has its summary and its tracking is closed."""

    def broken(folder: Path) -> Any:
        raise RuntimeError("no font")

    monkeypatch.setattr("train.reports.run_log.plot_run", broken)
    monkeypatch.setattr("train.reports.run_log.write_report", broken)
    tracker = Recorder()
    assert run(recipe, tmp_path, target, tracker=tracker)["status"] == "finished"
    assert not tracker.ends[0][1]
    assert (tmp_path / "tiny" / "summary.json").is_file()


def test_a_fork_is_a_run_of_its_own(tmp_path: Path, target: TargetModel, chats: Path) -> None:
    """A resumed run keeps its tracker's id; one that starts from another's head under a new name gets a new one."""
    asked: list[str | None] = []

    def opened(*_: Any, run_id: str | None, **__: Any) -> Recorder:
        asked.append(run_id)
        return Recorder()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.reports.run_log.open_tracker", opened)
        run(tiny_recipe(chats), tmp_path, target)
        run(tiny_recipe(chats, train__steps=14), tmp_path, target, resume=True)
        head = str(tmp_path / "tiny" / "best")
        run(tiny_recipe(chats, name="fork", head__init_from=head, head__taps=None), tmp_path, target)
    assert asked == [None, "recorded", None]


# The real thing


def wandb_records(folder: Path, home: Path) -> list[dict[str, Any]]:
    """All records of a run's offline files, in the order of time, by wandb's own reader."""
    records = []
    for log in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        environment = {**os.environ, "HOME": str(home), "WANDB_ERROR_REPORTING": "false"}
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        records += [json.loads(line) for line in found.stdout.splitlines()]
    return records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb.*", "ignore::DeprecationWarning:google.*")
def test_an_offline_record_holds_every_curve(
    tmp_path: Path, target: TargetModel, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back by wandb's own reader: every curve of `metrics.jsonl` with its points, equal to the last bit, the run
    interrupted and resumed on the way; tables, plots, marked text and the best head with its card besides."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    changes: dict[str, Any] = {"tracking__wandb": "offline", "train__eval_every": 2, "eval__temperatures": (0.0, 1.0)}
    run(tiny_recipe(chats, train__steps=14, **changes), tmp_path, target)
    run(tiny_recipe(chats, train__steps=24, **changes), tmp_path, target, resume=True)
    folder = tmp_path / "tiny"
    records = wandb_records(folder, home)
    history = [one["history"]["item"] for one in records if one["type"] == "history"]
    assert len({one["run"]["run_id"] for one in records if one["type"] == "run"}) == 1, "one run, continued"

    expected = points_of(folder)
    kept = [
        (int(row[STEP_NAME]), {name: row[name] for name in row if name.startswith(("train/", "eval/"))})
        for row in history
    ]
    curves = [(step, row) for step, row in kept if "train/loss" in row or "eval/accepted_length" in row]
    assert curves == expected
    counts = Counter(name for _, row in expected for name in row)
    long = {name for name, count in counts.items() if count >= 10}
    assert {"train/loss", "train/lr", "eval/accepted_length", "eval/agreement_1", "eval/acceptance_t1_1"} <= long
    for name in long:
        assert [(step, row[name]) for step, row in curves if name in row] == [
            (step, row[name]) for step, row in expected if name in row
        ]

    shown = {name for row in history for name in row}
    assert "eval/acceptance_table._type" in shown
    for name in ("eval/calibration", "eval/samples", "eval/accepted_length_histogram", "eval/acceptance_by_domain"):
        assert any(each.startswith(name) for each in shown), name
    assert any(each.startswith("acceptance.") for each in shown), "the picture"
    models = [one["artifact"] for one in records if one["type"] == "artifact" and one["artifact"]["type"] == "model"]
    assert models[-1]["name"] == "tiny-head"
    card = json.loads(models[-1]["metadata"])
    assert card["target"]["fingerprint"] == target.fingerprint
    assert card["acceptance"]["accepted_length"] == read_card(folder / "best").acceptance["accepted_length"]
    assert [one["exit"].get("exit_code", 0) for one in records if one["type"] == "exit"] == [0, 0]
