"""The demo decides by what a run's folder holds: start, go on, or leave alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import headstart
from train.cli import demo
from train.cli import train as train_command


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo, "_command", lambda *arguments: given.append(arguments))
    return given


def run_demo(folder: Path, *more: str) -> None:
    for name in ("best/model.safetensors", "bench.json"):  # what the later steps look at
        path = folder / "runs" / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    arguments = ["demo", "--runs", str(folder / "runs"), "--data", str(folder / "data"), *more]
    assert headstart.main(arguments) == 0


def test_the_first_run_resumes_nothing(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    """`--resume` without a checkpoint is an error."""
    run_demo(tmp_path)
    (train,) = [arguments for arguments in commands if arguments[0] == "train"]
    assert "--resume" not in train


@pytest.mark.parametrize(("status", "goes_on"), [("interrupted", True), ("finished", False), ("stopped early", False)])
def test_only_an_interrupted_run_goes_on(
    commands: list[tuple[str, ...]], tmp_path: Path, status: str, goes_on: bool
) -> None:
    """An interrupted run leaves a summary too."""
    (tmp_path / "runs" / "demo" / "last").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "summary.json").write_text(json.dumps({"status": status}))
    run_demo(tmp_path)
    trains = [arguments for arguments in commands if arguments[0] == "train"]
    assert [arguments[-1] for arguments in trains] == ["--resume"] * goes_on


def test_the_commands_of_the_demo_parse(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    """`--minutes` once put a setting behind the options, where `headstart train` does not read it."""
    run_demo(tmp_path, "--minutes", "0.5")
    (train,) = [list(arguments) for arguments in commands if arguments[0] == "train"]
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    parsed = parser.parse_args(train[1:])
    assert "train.minutes=0.5" in parsed.overrides
