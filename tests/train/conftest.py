"""Fixtures of the training tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def every_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that follow or stop a run by its progress lines need them all."""
    monkeypatch.setattr("train.trainer.NOTICE_SECONDS", 0.0)
