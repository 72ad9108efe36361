"""Answers made anew: turn by turn, whatever the batch and wherever it was stopped; texts that a base model writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import headstart
from infer.prompts import load_prompts
from tests.conftest import REPOSITORY, make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from tests.train.corpus.fake_engine import FakeEngine, rows_of
from train.corpus.contamination import Contamination
from train.corpus.conversations import Conversation, load_conversations, tokenize_conversations
from train.corpus.regenerate import RegenerationConfig, Regenerator, turns_before_answers
from train.corpus.synth import SynthesisConfig, TextWriter

CONFIG = RegenerationConfig(seed=3, max_answer_tokens=100)
TEXTS = SynthesisConfig(num_conversations=6, seed=1, max_prompt_tokens=12, max_answer_tokens=80)


def said(*messages: str) -> Conversation:
    """Messages like "user: Hi"."""
    parts = (message.split(": ", 1) for message in messages)
    return Conversation(messages=tuple({"role": role, "content": text} for role, text in parts), source="here:1")


TWO_TURNS = [
    said("system: Be brief.", f"user: Question {number}", "assistant: an old answer", "user: And then?")
    for number in range(20)
]


def regenerate(
    out: Path,
    requests: Sequence[Conversation],
    *,
    config: RegenerationConfig = CONFIG,
    engine: FakeEngine | None = None,
    **options: Any,
) -> Any:
    engine = engine or FakeEngine(toy_tokenizer())
    return Regenerator(engine, engine.tokenizer, config, out, requests=requests, **options).run()


def roles(row: dict[str, Any]) -> list[str]:
    return [message["role"] for message in row["messages"]]


def test_requests_of_a_file_are_answered_anew(tmp_path: Path) -> None:
    """Interrupted at 7 of 20 and restarted: 20 rows, none twice, several turns answered turn by turn."""
    out = tmp_path / "data.jsonl"
    engine = FakeEngine(toy_tokenizer())
    engine.calls_left = 14  # two calls a row
    with pytest.raises(KeyboardInterrupt):
        regenerate(out, TWO_TURNS, engine=engine, rows_per_chunk=1)
    assert len(rows_of(out)) == 7
    regenerate(out, TWO_TURNS)
    rows = rows_of(out)
    assert [row["messages"][1]["content"] for row in rows] == [f"Question {number}" for number in range(20)]
    assert all(roles(row) == ["system", *["user", "assistant"] * 2] for row in rows)
    assert "an old answer" not in out.read_text()
    with pytest.raises(ValueError, match="requests was"):
        regenerate(out, TWO_TURNS[:5])


def test_each_answer_is_written_with_the_targets_own_before_it(tmp_path: Path) -> None:
    engine = FakeEngine(toy_tokenizer())
    regenerate(tmp_path / "data.jsonl", TWO_TURNS[:3], engine=engine)
    rows = rows_of(tmp_path / "data.jsonl")
    seconds = [prompt for prompt, _ in engine.seen if "And then?" in prompt]
    assert len(seconds) == 3
    for prompt, row in zip(seconds, rows, strict=True):
        assert row["messages"][2]["content"] in prompt
        assert "an old answer" not in prompt


def test_rows_depend_on_no_batch_and_record_how_they_were_drawn(tmp_path: Path) -> None:
    config = replace(CONFIG, top_p=0.9, top_k=40)
    for chunk in (1, 7, 64):
        regenerate(tmp_path / f"{chunk}.jsonl", TWO_TURNS, config=config, rows_per_chunk=chunk)
    files = {(tmp_path / f"{chunk}.jsonl").read_bytes() for chunk in (1, 7, 64)}
    assert len(files) == 1
    rows = rows_of(tmp_path / "7.jsonl")
    assert {(row["top_p"], row["top_k"], row["max_answer_tokens"]) for row in rows} == {(0.9, 40, 100)}
    assert {row["temperature"] for row in rows} == {0.0, 0.8}
    assert len({row["seed"] for row in rows}) == len({row["id"] for row in rows}) == 20
    settings = json.loads((tmp_path / "7.jsonl.state.json").read_text())["settings"]
    assert (settings["top_p"], settings["top_k"], settings["temperature"], settings["seed"]) == (0.9, 40, 0.8, 3)


def test_tool_and_system_messages_stay_in_their_places(tmp_path: Path) -> None:
    request = said(
        "system: Be brief.",
        "user: Weather?",
        "assistant: calling the tool",
        "tool: 21 degrees",
        "tool: sunny",
        "assistant: It is warm.",
        "user: Thanks",
    )
    assert [len(turn) for turn in turns_before_answers(request)] == [2, 2, 1]
    regenerate(tmp_path / "data.jsonl", [request])
    (row,) = rows_of(tmp_path / "data.jsonl")
    assert roles(row) == ["system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert [message["content"] for message in row["messages"] if message["role"] == "tool"] == ["21 degrees", "sunny"]
    (loaded,), report = load_conversations(tmp_path / "data.jsonl")
    assert not report.fixed
    assert len(loaded.messages) == 8


def test_a_cut_answer_is_marked_and_ends_the_conversation(tmp_path: Path) -> None:
    """Its end must not be taught, and nothing can sensibly follow it; finished turns before an unusable one stay."""

    def write(prompt: str, random: Random) -> str:
        if "And then?" in prompt:
            return "" if "Question 1" in prompt else "nothing that would fit the limit"
        return "a long answer that does not end here" if "Question 0" in prompt else "short"

    config = replace(CONFIG, max_answer_tokens=25)
    engine = FakeEngine(toy_tokenizer(), write)
    report = regenerate(tmp_path / "data.jsonl", TWO_TURNS[:3], engine=engine, config=config)
    cut, shortened, last_cut = rows_of(tmp_path / "data.jsonl")
    assert (cut["truncated"], roles(cut), cut["num_turns_left_out"]) == (True, ["system", "user", "assistant"], 1)
    assert (shortened["truncated"], roles(shortened)) == (False, ["system", "user", "assistant"])
    assert (last_cut["truncated"], last_cut["num_turns_left_out"]) == (True, 0)
    assert report.num_kept == 3
    conversations, _ = load_conversations(tmp_path / "data.jsonl")
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    taught = [row.token_ids[-1] for row in tokenize_conversations(conversations, engine.tokenizer, 1000)]
    assert [token == end for token in taught] == [False, False, False]  # the second ends in a newline after its end
    assert [one.truncated for one in conversations] == [True, False, True]


def test_what_cannot_be_answered_is_dropped_and_counted(tmp_path: Path) -> None:
    leaked = load_prompts()[0].messages[0]["content"]
    template = (
        "{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    requests = [
        said("user: fine"),
        said(f"user: {leaked}"),
        said("user: forbidden"),
        said("user: " + "long " * 200),
        said("user: my own held-out prompt"),
        said("user: also fine", "assistant: x", "user: forbidden"),
    ]
    tokenizer = toy_tokenizer(template=template)
    contamination = Contamination(["My own held-out prompt!", leaked])
    report = regenerate(
        tmp_path / "data.jsonl",
        requests,
        engine=FakeEngine(tokenizer),
        contamination=contamination,
        max_sequence_length=300,
    )
    assert report.dropped == {"evaluation prompt": 2, "refused by the chat template": 1, "prompt too long": 1}
    assert [row["id"] for row in rows_of(tmp_path / "data.jsonl")] == ["regenerated-3-0", "regenerated-3-5"]


# The command, with a tiny target


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that (among its likeliest tokens) writes nothing but printable ASCII."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    tokenizer = toy_tokenizer()
    model = make_tiny_model("llama", vocab_size=264, max_position_embeddings=512)
    model.generation_config.eos_token_id = 3
    model.config.eos_token_id = 3
    model.config.bos_token_id = model.generation_config.bos_token_id = 0
    written = [token for token in range(4, 260) if tokenizer.decode([token]).strip().isalnum()]
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        unwritten = [token for token in range(264) if token not in {*written, 3}]
        weight[unwritten] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_requests(path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"Say number {number}"}]}
        if number % 4
        else {"messages": list(TWO_TURNS[number].messages)}
        for number in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command(requests: Path, folder: Path, out: Path, batch: int) -> list[str]:
    return [
        *("regenerate", str(requests), "--target", str(folder), "--out", str(out), "--batch", str(batch)),
        *("--max-answer-tokens", "12", "--top-k", "5", "--greedy-share", "0", "--temperature", "1"),
        *("--dtype", "bfloat16"),
    ]


_DIE_AT_SEVEN = """
import json, os, signal, sys
from train.corpus.growing_file import GrowingFile

append = GrowingFile.append

def append_and_die(self, rows, dropped, next_attempt):
    room = 7 - len(self.rows)
    if len(rows) <= room:
        return append(self, rows, dropped, next_attempt)
    if not self.rows:
        self._write_state()
    lines = "".join(json.dumps(row) + "\\n" for row in rows[: room + 1])
    with self.path.open("a") as stream:
        stream.write(lines[:-9])
    os.kill(os.getpid(), signal.SIGKILL)

GrowingFile.append = append_and_die
import headstart
sys.exit(headstart.main(sys.argv[1:]))
"""


def test_killed_at_seven_of_twenty_and_restarted(tiny_folder: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of writing the eighth row; another batch size goes on, and the file equals an undisturbed
    one byte for byte, in bfloat16, where logits depend on what else is in a forward unless its shape is fixed."""
    requests = write_requests(tmp_path / "requests.jsonl")
    out, whole = tmp_path / "out" / "data.jsonl", tmp_path / "whole.jsonl"
    killed = subprocess.run(
        [sys.executable, "-c", _DIE_AT_SEVEN, *command(requests, tiny_folder, out, 1)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert out.read_bytes().count(b"\n") == 7
    assert headstart.main(command(requests, tiny_folder, out, 3)) == 0
    assert headstart.main(command(requests, tiny_folder, whole, 20)) == 0
    assert out.read_bytes() == whole.read_bytes()
    rows = rows_of(out)
    assert len(rows) == len({row["id"] for row in rows}) == 20
    settings = json.loads(out.with_name("data.jsonl.state.json").read_text())["settings"]
    assert (settings["exactness"], settings["dtype"], settings["top_k"]) == ("bitwise", "bfloat16", 5)
    assert sum(len(row["messages"]) == 5 or row["truncated"] for row in rows) >= 5
    conversations, report = load_conversations(out)
    assert (len(conversations), report.num_dropped) == (20, 0)


def test_synth_requests_is_the_same_command(tiny_folder: Path, tmp_path: Path) -> None:
    requests = write_requests(tmp_path / "requests.jsonl")
    options = ("--target", str(tiny_folder), "--num", "4", "--max-answer-tokens", "12", "--dtype", "float32")
    assert headstart.main(["synth", "--requests", str(requests), "--out", str(tmp_path / "a.jsonl"), *options]) == 0
    same = [option if option != "--num" else "--limit" for option in options]
    assert headstart.main(["regenerate", str(requests), "--out", str(tmp_path / "b.jsonl"), *same]) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_options_that_do_not_go_together_are_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--target", str(tiny_folder), "--out", str(tmp_path / "a.jsonl"))
    assert headstart.main(["synth", *out, "--prompts", "x.jsonl"]) == 2
    assert headstart.main(["synth", *out, "--raw", "--requests", "x.jsonl"]) == 2
    assert headstart.main(["regenerate", str(tmp_path / "none.jsonl"), *out]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "add --raw" in errors[0]
    assert "give --prompts instead" in errors[1]
    assert "no conversations file at" in errors[2]
    assert not (tmp_path / "a.jsonl").exists()


# Texts for base models


def text_engine(*, adds_bos: bool = False) -> FakeEngine:
    def write(prompt: str, random: Random) -> str:
        return " " + " ".join(f"w{random.randrange(10_000)}" for _ in range(8))

    return FakeEngine(toy_tokenizer(adds_bos=adds_bos), write)


def texts(names: Sequence[str]) -> list[Conversation]:
    return [Conversation(messages=({"role": "text", "content": name},), source="here:1") for name in names]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_base_model_goes_on_with_texts(tmp_path: Path, adds_bos: bool) -> None:
    """Beginnings are cut to their first tokens, gone on with over and over, and stand in the row with what follows."""
    engine = text_engine(adds_bos=adds_bos)
    begun = texts(["Once upon a time there was", "The sea"])
    TextWriter(engine, engine.tokenizer, TEXTS, tmp_path / "a.jsonl", beginnings=begun, rows_per_chunk=2).run()
    rows = rows_of(tmp_path / "a.jsonl")
    assert len(rows) == len({row["id"] for row in rows}) == 6
    assert {row["text"].split(" w")[0] for row in rows} == {"Once upon a ", "The sea"} or all(
        row["text"].startswith(("Once upon a ", "The sea")) for row in rows
    )
    prompts = {prompt for prompt, _ in engine.seen}
    assert prompts == ({"<s>Once upon a ", "<s>The sea"} if adds_bos else {"Once upon a ", "The sea"})
    assert all(params.stop_token_ids == () for _, params in engine.seen)
    loaded, report = load_conversations(tmp_path / "a.jsonl", raw=True)
    assert (len(loaded), report.num_dropped) == (6, 0)


def test_a_base_model_begins_with_nothing(tmp_path: Path) -> None:
    """From the beginning-of-sequence token alone, always sampled: greedy texts would all be one. And restartable."""
    engine = text_engine()
    TextWriter(engine, engine.tokenizer, TEXTS, tmp_path / "whole.jsonl", rows_per_chunk=2).run()
    assert {prompt for prompt, _ in engine.seen} == {"<s>"}
    assert {params.temperature for _, params in engine.seen} == {0.8}
    stopped = text_engine()
    stopped.calls_left = 2
    with pytest.raises(KeyboardInterrupt):
        TextWriter(stopped, stopped.tokenizer, TEXTS, tmp_path / "a.jsonl", rows_per_chunk=2).run()
    again = text_engine()
    TextWriter(again, again.tokenizer, TEXTS, tmp_path / "a.jsonl", rows_per_chunk=3).run()
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_raw_synthesis_trains_as_written(tiny_folder: Path, tmp_path: Path) -> None:
    """The command, its file read back as raw rows: only the first token of each is not trained on."""
    begun = tmp_path / "begun.jsonl"
    begun.write_text('{"text": "abc"}\n{"text": "The sea"}\n')
    out = tmp_path / "texts.jsonl"
    options = ("--max-answer-tokens", "12", "--greedy-share", "0", "--temperature", "0.5", "--batch", "4")
    arguments = ["synth", "--raw", "--target", str(tiny_folder), "--out", str(out), "--num", "4", *options]
    assert headstart.main([*arguments, "--dtype", "float32", "--prompts", str(begun)]) == 0
    conversations, _ = load_conversations(out, raw=True)
    for row in tokenize_conversations(conversations, toy_tokenizer(), 100, raw=True):
        assert row.loss_mask == [False] + [True] * (len(row.token_ids) - 1)
