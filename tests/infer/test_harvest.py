"""Recording served conversations: whole lines within a limit, nothing twice, and readable as training data."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import headstart
from infer.harvest import Harvest
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from train.corpus.conversations import load_conversations, tokenize_conversations

QUESTION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi \U0001f600\u2028there"}]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_what_is_recorded_is_read_back_as_training_data(tmp_path: Path) -> None:
    """Chats and raw texts; a cut answer is marked, and its half character goes."""
    harvest = Harvest(tmp_path / "new" / "harvest.jsonl")
    assert harvest.add(QUESTION, "Hello!", {"temperature": 0.8, "seed": 7})
    assert harvest.add(QUESTION[1:], "cut off \ufffd", truncated=True)
    (first, second), report = load_conversations(tmp_path / "new" / "harvest.jsonl")
    assert not report.fixed
    assert list(first.messages) == [*QUESTION, {"role": "assistant", "content": "Hello!"}]
    assert (first.truncated, second.truncated) == (False, True)
    assert second.messages[-1]["content"] == "cut off "
    assert len(tokenize_conversations([first, second], toy_tokenizer(), 200)) == 2
    assert rows_of(tmp_path / "new" / "harvest.jsonl")[0]["sampling"] == {"temperature": 0.8, "seed": 7}
    raw = Harvest(tmp_path / "raw.jsonl")
    assert raw.add([{"role": "user", "content": "Once"}], " upon a time", raw=True)
    (text,), _ = load_conversations(tmp_path / "raw.jsonl", raw=True)
    assert text.messages[0]["content"] == "Once upon a time"


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    Harvest(tmp_path / "h.jsonl").add(QUESTION, "Hello!")
    assert stat.S_IMODE((tmp_path / "h.jsonl").stat().st_mode) == 0o600


def test_nothing_twice_also_after_a_restart(tmp_path: Path) -> None:
    harvest = Harvest(tmp_path / "h.jsonl")
    assert harvest.add(QUESTION, "Hello!", {"seed": 1})
    assert not harvest.add(QUESTION, "Hello!", {"seed": 2})
    assert not harvest.add(QUESTION, "  ")
    again = Harvest(tmp_path / "h.jsonl")
    assert not again.add(QUESTION, "Hello!")
    assert again.add(QUESTION, "Hello?")
    assert (again.num_repeated, len(rows_of(tmp_path / "h.jsonl"))) == (1, 2)


def test_the_limit_is_kept_by_whole_lines(tmp_path: Path) -> None:
    harvest = Harvest(tmp_path / "h.jsonl", max_bytes=500)
    written = [harvest.add(QUESTION, f"answer {number}") for number in range(20)]
    assert (tmp_path / "h.jsonl").stat().st_size <= 500
    assert 0 < sum(written) < 20
    assert len(rows_of(tmp_path / "h.jsonl")) == sum(written)
    assert "left out beyond its limit of 500 bytes" in harvest.summary()
    with pytest.raises(ValueError, match="max_bytes must be at least 1"):
        Harvest(tmp_path / "h.jsonl", max_bytes=0)


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    """A writer killed in the middle of a line: the next line stands by itself."""
    path = tmp_path / "h.jsonl"
    Harvest(path).add(QUESTION, "one")
    with path.open("ab") as stream:
        stream.write('{"messages": [{"role": "us\u00e9'.encode()[:-1])
    Harvest(path).add(QUESTION, "two")
    conversations, report = load_conversations(path)
    assert [one.messages[-1]["content"] for one in conversations] == ["one", "two"]
    assert report.num_dropped == 1


def test_redaction_comes_before_anything_is_stored(tmp_path: Path) -> None:
    harvest = Harvest(tmp_path / "h.jsonl", redact=lambda text: text.replace("secret", "***"))
    harvest.add([{"role": "user", "content": "my secret"}], "your secret")
    assert "secret" not in (tmp_path / "h.jsonl").read_text()
    failing = Harvest(tmp_path / "f.jsonl", redact=lambda text: text[1_000_000])  # type: ignore[arg-type]
    assert not failing.add(QUESTION, "Hello!")
    assert "redaction failed (IndexError)" in failing.summary()
    assert not (tmp_path / "f.jsonl").exists()


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    """Eight threads, some saying the same, through two recorders, as two processes would have them."""
    recorders = [Harvest(tmp_path / "h.jsonl") for _ in range(2)]

    def serve(thread: int) -> None:
        for number in range(25):
            recorders[thread % 2].add(QUESTION, f"{number} of {thread // 2} " + "x" * 500)

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [row["messages"][-1]["content"] for row in rows_of(tmp_path / "h.jsonl")]
    assert len(set(answers)) == 100
    assert all(answer.endswith("x" * 500) for answer in answers)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of the line is taken back; the caller is told, not stopped."""
    harvest = Harvest(tmp_path / "h.jsonl")
    harvest.add(QUESTION, "one")
    write = os.write

    def fill(descriptor: int, content: bytes) -> int:
        write(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("infer.harvest.os.write", fill)
        assert not harvest.add(QUESTION, "two")
    assert not harvest.add(QUESTION, "three")
    assert len(rows_of(tmp_path / "h.jsonl")) == 1
    assert "No space left on device" in harvest.summary()


def test_generate_records_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    model = make_tiny_model("llama", vocab_size=264)
    model.save_pretrained(target)
    toy_tokenizer().save_pretrained(target)
    options = ["generate", "none", "--target", str(target), "--dtype", "float32", "--max-tokens", "6"]
    command = [*options, "--prompt", "abc", "--temperature", "1", "--seed", "3", "--n", "2"]
    assert headstart.main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    out = tmp_path / "h.jsonl"
    for _ in range(2):
        assert headstart.main([*command, "--harvest", str(out)]) == 0
    rows = rows_of(out)
    assert "2 it held already" in capsys.readouterr().err
    assert [row["messages"][0] for row in rows] == [{"role": "user", "content": "abc"}] * 2
    assert all(row["truncated"] for row in rows)
    assert [row["sampling"]["sample"] for row in rows] == [0, 1]
    assert rows[0]["sampling"]["temperature"] == 1.0
