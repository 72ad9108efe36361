"""`headstart serve --learn` as a user has it: its options, its metrics, and the folder that it leaves."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import headstart
from heads.checkpoint import HeadCard, read_card, save_head
from infer.learning import LearningStatus
from infer.serve.metrics import Metrics
from infer.target import TargetModel
from tests.head_families import tiny_head
from tests.infer.helpers import write_folders
from tests.infer.serve.serving import chat, wait_until
from tests.infer.serve.test_server_process import READY, Process


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    target_folder = write_folders(folder, [("chat", "Hello")]).target
    target = TargetModel.load(target_folder, dtype="float32", device="cpu")
    card = HeadCard(target=target.reference, family="eagle3")
    head = save_head(folder / "early", tiny_head("eagle3", target), card)
    return SimpleNamespace(target=target_folder, head=head)


def test_a_server_learns_and_leaves_its_head(repository: Path, folders: Any, tmp_path: Path) -> None:
    """One question again and again: a better head takes over, the metrics say so, answers stay the same, and when the
    server stops the head is in a folder of its own."""
    out = tmp_path / "learned"
    words = [str(folders.head), "--target", str(folders.target), "--dtype", "float32", "--chain", "3", "--no-adaptive"]
    learning = ["--learn", "--learn-rate", "3e-3", "--learn-tokens", "8192", "--learn-out", str(out)]
    process = Process(repository, *words, *learning, "--port", "0")
    try:
        url = process.wait_for(READY).group(1)
        body = {**chat(max_tokens=40, temperature=0), "model": None}

        def ask() -> str:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120.0).json()
            return str(answer["choices"][0]["message"])

        def swaps() -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("headstart:learning_swaps_total "))

        first = ask()

        def has_learned() -> bool:
            assert ask() == first
            return swaps() > 0

        wait_until(has_learned)
        assert ask() == first
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.end()
    assert any("the head learns from what is served" in line for line in process.lines)
    assert any("the head changes" in line for line in process.lines)
    assert any(f"the learned head is in {out}" in line for line in process.lines)
    assert read_card(out).training["learned_while_serving"]["from"] == "early"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learn-share", "3"], "--learn-share: of no use without --learn"),
        (["--learn", "--learn-out", "."], "is there already"),
        (["--learn", "--learn-share", "80"], "share of 0 to 0.5"),
        (["--learn", "--engine", "vllm"], "leave out --engine vllm"),
        (["--learn", "--drafter", "ngram"], "ngram is none"),
    ],
)
def test_mistakes_are_told(folders: Any, capsys: Any, words: list[str], message: str) -> None:
    head = [] if "--drafter" in words else [str(folders.head)]
    arguments = ["serve", *head, "--target", str(folders.target), "--dtype", "float32", "--port", "0", *words]
    assert headstart.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_metrics() -> None:
    """Nothing is said of learning where nothing learns."""
    status = LearningStatus(num_steps=7, num_swaps=2, length_served=1.5, length_learned=1.75, busy_seconds=3.0)
    shown = Metrics(learning=lambda: status).render().decode()
    assert "headstart:learning_steps_total 7.0" in shown
    assert "headstart:learning_swaps_total 2.0" in shown
    assert 'headstart:learning_seconds_total{when="busy"} 3.0' in shown
    assert 'headstart:learning_held_out_length{head="learned"} 1.75' in shown
    assert "headstart:learning 1.0" in shown
    assert "learning" not in Metrics().render().decode()
