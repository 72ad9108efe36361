"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.target import TargetModel
from tests.train.training_fixtures import tiny_target, write_chats


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def every_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that follow or stop a run by its progress lines need them all."""
    monkeypatch.setattr("train.trainer.NOTICE_SECONDS", 0.0)
