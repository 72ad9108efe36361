"""Synthesis: independence of batch size and interruption, filters, and what a restart accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infer.chat import user_turn_prefix
from infer.prompts import load_prompts
from tests.toy_tokenizer import toy_tokenizer
from tests.train.corpus.fake_engine import FakeEngine, rows_of
from train.corpus.conversations import load_conversations, tokenize_conversations
from train.corpus.filters import NearDuplicates, first_repetition, prompt_fault, repeated_share
from train.corpus.synth import SynthesisConfig, Synthesizer

CONFIG = SynthesisConfig(num_conversations=12, seed=3, max_prompt_tokens=80, max_answer_tokens=60)


def synthesize(out: Path, *, config: SynthesisConfig = CONFIG, engine: FakeEngine | None = None, **options: Any) -> Any:
    tokenizer = engine.tokenizer if engine else toy_tokenizer()
    synthesizer = Synthesizer(engine or FakeEngine(tokenizer), tokenizer, config, out, **options)
    return synthesizer.run()


def test_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    for chunk in (1, 5, 64):
        synthesize(tmp_path / f"{chunk}.jsonl", rows_per_chunk=chunk)
    files = [(tmp_path / f"{chunk}.jsonl").read_bytes() for chunk in (1, 5, 64)]
    assert files[0] == files[1] == files[2]
    rows = rows_of(tmp_path / "5.jsonl")
    assert len(rows) == len({row["id"] for row in rows}) == 12


@pytest.mark.parametrize("calls", [1, 2, 4, 7])
@pytest.mark.parametrize("torn", [b"", b'{"messages": [{"role": "us', '{"a": "é'.encode()[:-1]])
def test_an_interrupted_file_is_continued(tmp_path: Path, calls: int, torn: bytes) -> None:
    """Stopped at any call, the last line possibly torn: the finished file equals the uninterrupted one."""
    synthesize(tmp_path / "whole.jsonl", rows_per_chunk=3)
    out = tmp_path / "data.jsonl"
    engine = FakeEngine(toy_tokenizer())
    engine.calls_left = calls
    with pytest.raises(KeyboardInterrupt):
        synthesize(out, engine=engine, rows_per_chunk=3)
    with out.open("ab") as stream:
        stream.write(torn)
    synthesize(out, rows_per_chunk=4)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_lines_ahead_of_the_state_are_kept(tmp_path: Path) -> None:
    """Killed between writing lines and state: attempts go on after the last line."""
    out = tmp_path / "data.jsonl"
    synthesize(out, config=replace(CONFIG, num_conversations=4))
    state = out.with_name("data.jsonl.state.json")
    early = state.read_text()
    synthesize(out, config=replace(CONFIG, num_conversations=8))
    state.write_text(early)
    synthesize(out)
    synthesize(tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_settings_are_there_before_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right after the first lines: the file can be continued, which lines without settings could not."""
    out = tmp_path / "data.jsonl"
    replaced = []

    def die_at_the_second(source: Path, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(Path(source).rename(target))

    with monkeypatch.context() as patch:
        patch.setattr("train.corpus.growing_file.os.replace", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            synthesize(out)
    assert out.stat().st_size
    synthesize(out)
    synthesize(tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_other_settings_do_not_continue_a_file(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    synthesize(out)
    with pytest.raises(ValueError, match=r"begun with other settings \(temperature was 0\.8, now 0\.5\)"):
        synthesize(out, config=replace(CONFIG, temperature=0.5))
    out.with_name("data.jsonl.state.json").unlink()
    with pytest.raises(ValueError, match=r"without data\.jsonl\.state\.json"):
        synthesize(out)
    other = tmp_path / "other.jsonl"
    other.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="line 1 was not written by this command"):
        synthesize(other)


def test_user_turns_continue_the_template_and_stop_at_its_end(tmp_path: Path) -> None:
    engine = FakeEngine(toy_tokenizer())
    synthesize(tmp_path / "data.jsonl", engine=engine, config=replace(CONFIG, second_turn_share=1.0))
    prefix = engine.tokenizer.decode(user_turn_prefix(engine.tokenizer))
    users = [(prompt, params) for prompt, params in engine.seen if "assistant\n" not in prompt]
    answers = [(prompt, params) for prompt, params in engine.seen if prompt.endswith("assistant\n")]
    seconds = [prompt for prompt, _ in engine.seen if "assistant\n" in prompt and prompt.endswith("user\n")]
    assert all(prompt.startswith(prefix) for prompt, _ in users)
    assert all(params.temperature == 0.9 and params.stop_token_ids == (engine.end,) for _, params in users)
    assert {params.temperature for _, params in answers} == {0.0, 0.8}
    assert len({params.seed for _, params in engine.seen}) == len(engine.seen)
    assert seconds
    rows = rows_of(tmp_path / "data.jsonl")
    assert any([m["role"] for m in row["messages"]] == ["user", "assistant"] * 2 for row in rows)


def test_rows_train_as_written(tmp_path: Path) -> None:
    """The file loads with nothing fixed or dropped; a cut answer is marked and teaches no end."""
    out = tmp_path / "data.jsonl"
    engine = FakeEngine(toy_tokenizer())
    synthesize(out, engine=engine, config=replace(CONFIG, max_answer_tokens=35))
    conversations, report = load_conversations(out)
    assert not report.fixed
    assert not report.dropped
    truncated = [one.truncated for one in conversations]
    assert set(truncated) == {True, False}
    rendered = tokenize_conversations(conversations, engine.tokenizer, 1000)
    assert [row.token_ids[-1] != engine.tokenizer("\n")["input_ids"][0] for row in rendered] == truncated


ALPHABET = " ".join(f"word{number}" for number in range(9))


@pytest.mark.parametrize(
    ("user", "answer", "reason"),
    [
        (" ok", "fine", "prompt too short"),
        (" the sun went down over the quiet hills", "fine", "prompt asks nothing"),
        (" please say word0 word0 word0 word0 word0", "fine", "prompt loops"),
        (f" please say {ALPHABET} " * 3, "fine", "prompt too long"),
        (" please help with <|im_start|> today?", "fine", "prompt holds special tokens"),
        (" please help with pneumonoultramicroscopicsilicovolcanoconiosis?", "fine", "prompt garbled"),
        (" " + load_prompts()[0].messages[0]["content"][:70] + "?", "fine", None),
        (" please help me with word1 today?", "", "answer empty"),
        (
            " please help me with word1 today?",
            "<|im_start|>x",
            "answer holds special tokens or broken characters",
        ),
        (" please help me with word1 today?", "again and again and again and again", "answer loops"),
    ],
)
def test_filters(tmp_path: Path, user: str, answer: str, reason: str | None) -> None:
    def write(prompt: str, random: Random) -> str:
        return user if prompt.rsplit("<|im_start|>", 1)[1].startswith("user") else answer

    config = replace(CONFIG, num_conversations=1, opening_share=0.0, second_turn_share=0.0)
    engine = FakeEngine(toy_tokenizer(), write)
    synthesizer = Synthesizer(engine, engine.tokenizer, config, tmp_path / "data.jsonl", rows_per_chunk=8)
    if reason is None:
        assert synthesizer.run().num_kept == 1
        return
    with pytest.raises(ValueError, match=r"of 4\d\d attempts passed the filters"):
        synthesizer.run()
    assert list(synthesizer.report().dropped) == [reason]


def test_evaluation_prompts_and_duplicates_are_not_kept(tmp_path: Path) -> None:
    leaked = load_prompts()[0].messages[0]["content"]
    texts = [" Please help with the old bridge?", " please help with the OLD bridge", " " + leaked.upper()]

    def write(prompt: str, random: Random) -> str:
        return random.choice(texts) if prompt.endswith("user\n") else "fine"

    config = replace(
        CONFIG,
        num_conversations=2,
        opening_share=0.0,
        second_turn_share=0.0,
        max_prompt_tokens=len(leaked) + 2,
    )
    engine = FakeEngine(toy_tokenizer(), write)
    synthesizer = Synthesizer(engine, engine.tokenizer, config, tmp_path / "data.jsonl", rows_per_chunk=8)
    with pytest.raises(ValueError, match="only 1 of"):
        synthesizer.run()
    assert set(synthesizer.report().dropped) == {"duplicate prompt", "evaluation prompt"}


def test_a_looping_answer_is_cut_before_the_loop(tmp_path: Path) -> None:
    start = "a plain beginning of more than thirty tokens, then "

    def write(prompt: str, random: Random) -> str:
        if prompt.endswith("assistant\n"):
            return start + "the same words " * 12
        return FakeEngine.words(prompt, random)

    config = replace(CONFIG, num_conversations=3, max_answer_tokens=400, second_turn_share=0.0)
    synthesize(tmp_path / "data.jsonl", engine=FakeEngine(toy_tokenizer(), write), config=config)
    for row in rows_of(tmp_path / "data.jsonl"):
        assert row["messages"][1]["content"] == start + "the same words"
        assert row["truncated"]
        assert row["num_answer_tokens"] == len(start) + 14


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_conversations", 0), ("greedy_share", 1.5), ("prompt_temperature", 0.0), ("temperature", -1.0)],
)
def test_bad_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: value})


def test_repeated_share_and_first_repetition() -> None:
    assert repeated_share(range(20)) == 0.0
    assert repeated_share([]) == 0.0
    assert repeated_share([*range(10), *range(10)]) == 1.0
    assert repeated_share([*range(8), 99, *range(8), *range(100, 103)]) == 16 / 20
    assert first_repetition([*range(8), 99, *range(8)]) == 9
    assert first_repetition(range(20)) == 20
    assert first_repetition([5] * 9) == 1


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "Write a poem about the sea.",
        "I'm looking for advice on a career change.",
        "Fix this:\n```python\nprint(superlongidentifierwithoutanyspaces)\n```",
    ],
)
def test_usual_requests_pass(text: str) -> None:
    assert prompt_fault(text, list(range(len(text.split())))) is None


def test_near_duplicates() -> None:
    seen = NearDuplicates(["Write a short story about a brave little mouse in a castle."])
    assert "write a short story about a brave little mouse in a castle" in seen
    assert "Please write a short story about a brave little mouse in a castle" in seen
    assert "Write a short story about a lazy cat on a farm." not in seen
    assert "mouse" not in seen
