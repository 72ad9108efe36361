"""Tracking never stops, delays or loses anything, and a run keeps its identity."""

from __future__ import annotations

import builtins
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.schema import TrackingConfig
from train.reports.tracking import NoTracker, WandbTracker, open_tracker


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)


def start(folder: Path, mode: Any = "auto", run_id: str | None = None) -> tuple[Any, list[str]]:
    notices: list[str] = []
    tracker = open_tracker(
        TrackingConfig(wandb=mode), folder=folder, name="run", config={}, run_id=run_id, notice=notices.append
    )
    return tracker, notices


def test_disabled_needs_nothing(tmp_path: Path) -> None:
    tracker, notices = start(tmp_path, "disabled")
    assert isinstance(tracker, NoTracker)
    assert not notices


@pytest.mark.parametrize("fault", [ImportError("no wandb"), None])
def test_missing_package_is_one_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Not installed, or broken on import: training goes on at once with the local file."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise fault or RuntimeError("half an installation")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    begun = time.monotonic()
    tracker, notices = start(tmp_path)
    assert isinstance(tracker, NoTracker)
    assert len(notices) == 1
    assert "metrics.jsonl" in notices[0]
    assert time.monotonic() - begun < 5
    with pytest.raises(ValueError, match="required"):
        start(tmp_path, "required")


def test_online_without_a_key_is_refused_not_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key is set"):
        start(tmp_path, "online")


class FakeRun:
    """A remote run that, like the real one, takes no step smaller than the last."""

    id = "abc"

    def __init__(self, *, broken: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.defined: list[tuple[str, dict[str, Any]]] = []
        self.broken = broken
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, **settings: Any) -> None:
        self.defined.append((name, settings))

    def log(self, values: dict[str, Any], **settings: Any) -> None:
        assert not settings, "an explicit step makes earlier ones vanish"
        if self.broken:
            raise OSError("connection lost")
        self.rows.append(values)

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


def test_steps_are_values_with_an_axis_of_their_own() -> None:
    """Values logged at a step already passed were once dropped with a warning."""
    run = FakeRun()
    tracker = WandbTracker(run, print)
    for step in (40, 50, 41, 42):
        tracker.log(step, {"loss": 1.0})
    assert [row["global_step"] for row in run.rows] == [40, 50, 41, 42]
    assert ("*", {"step_metric": "global_step"}) in run.defined
    assert tracker.run_id == "abc"


def test_a_lost_connection_is_said_once() -> None:
    notices: list[str] = []
    tracker = WandbTracker(FakeRun(broken=True), notices.append)
    for step in range(3):
        tracker.log(step, {})
    tracker.finish({})
    assert len(notices) == 1


def test_a_table_that_fails_leaves_the_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, plots and artifacts go without, said once; the run is closed all the same."""

    def broken(*_: Any) -> Any:
        raise OSError("no room for a table")

    monkeypatch.setattr("train.reports.tracking.figures_of", broken)
    notices: list[str] = []
    run = FakeRun()
    tracker = WandbTracker(run, notices.append)
    evaluation: Any = None
    for step in range(3):
        tracker.show(step, evaluation)
        tracker.log(step, {"loss": 1.0})
    tracker.finish({"status": "failed"}, failed=True)
    assert len(run.rows) == 3
    assert len(notices) == 1
    assert run.exit_code == 1


def test_a_run_whose_connection_is_lost_is_still_closed() -> None:
    run = FakeRun(broken=True)
    tracker = WandbTracker(run, lambda text: None)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert run.exit_code == 0


@pytest.mark.parametrize("listens", [True, False])
def test_a_service_out_of_reach_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """With a key but no network wandb tries for a minute; a probe says so at once, and it records offline."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    if listens:
        server.listen()
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    modes: list[str] = []

    def begun(settings: Any, *, mode: str, **_: Any) -> FakeRun:
        modes.append(mode)
        return FakeRun()

    monkeypatch.setattr("train.reports.tracking._start", begun)
    tracker, notices = start(tmp_path)
    server.close()
    assert isinstance(tracker, WandbTracker)
    assert modes == ["online" if listens else "offline"]
    assert bool(notices) != listens


@pytest.mark.slow
def test_real_wandb_runs_offline_and_keeps_its_id(tmp_path: Path) -> None:
    """No key, no terminal, no network: a folder inside the run's, and the same id after a restart."""
    pytest.importorskip("wandb")
    tracker, notices = start(tmp_path)
    assert isinstance(tracker, WandbTracker), notices
    tracker.log(1, {"loss": 1.0})
    tracker.finish({"status": "finished"})
    again, _ = start(tmp_path, run_id=tracker.run_id)
    assert again.run_id == tracker.run_id
    again.finish({})
    assert (tmp_path / "wandb").is_dir()


def test_required_is_not_met_by_a_switch_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert isinstance(start(tmp_path)[0], NoTracker)
    with pytest.raises(ValueError, match="WANDB_MODE=disabled"):
        start(tmp_path, "required")
