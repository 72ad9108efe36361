"""What `headstart generate` takes: sampling parameters, several answers, constraints; and how it tells of errors."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headstart
from infer.cli import common, generate
from infer.sampling import SamplingParams
from tests.toy_tokenizer import toy_tokenizer

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a byte tokenizer."""
    path = tmp_path_factory.mktemp("options") / "target"
    tokenizer = toy_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(folder: Path, *arguments: str, status: int = 0) -> None:
    base = ["generate", "ngram", "--target", str(folder), "--dtype", "float32", "--no-adaptive", "--prompt", "abc abc"]
    assert headstart.main([*base, *arguments]) == status


def answers(folder: Path, tmp_path: Path, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    path = tmp_path / "answers.json"
    run(folder, *arguments, "--json", str(path), status=status)
    values = json.loads(path.read_text())
    assert isinstance(values, list)
    return values


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(["ngram", "--prompt", "x", *arguments])


def test_every_parameter_can_be_given() -> None:
    """All fields of `SamplingParams` have an option, but for exactness and rule, which the engine is built with."""
    options = shlex.split("""
        --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 5 --n 2 --logprobs 4 --max-tokens 9 --min-tokens 2
        --stop END --stop-token-id 7 --repetition-penalty 1.1 --presence-penalty -0.5 --frequency-penalty 0.5
        --logit-bias 3=1.5 --logit-bias 4=-inf --no-repeat-ngram-size 3 --regex a+
    """)
    params = common.sampling_params(parsed(*options), index=1)
    default = SamplingParams()
    unset = {item.name for item in fields(SamplingParams) if getattr(params, item.name) == getattr(default, item.name)}
    assert unset == {"ignore_eos", "bad_words", "exactness", "rule", "json_schema", "grammar"}
    assert params.seed == 6
    assert params.logit_bias == {3: 1.5, 4: -float("inf")}
    assert common.sampling_params(parsed("--ignore-eos")).ignore_eos
    assert common.sampling_params(parsed("--json-schema", SCHEMA)).json_schema == json.dumps(
        json.loads(SCHEMA), separators=(",", ":")
    )
    assert common.sampling_params(parsed("--grammar", 'start: "a"')).grammar == 'start: "a"'
    assert common.sampling_params(parsed()) == default


def test_bad_words_are_banned_as_they_stand_in_a_text() -> None:
    tokenizer = toy_tokenizer(merges=("a b",))
    merged = tokenizer.convert_tokens_to_ids("ab")
    space = tokenizer.encode(" ")
    assert common.bad_words(parsed("--bad-word", "ab"), tokenizer) == ((merged,), (*space, merged))
    assert common.bad_words(parsed("--bad-word", "ab", "--bad-word", "ab"), tokenizer) == ((merged,), (*space, merged))
    assert common.bad_words(parsed(), tokenizer) == ()
    with pytest.raises(ValueError, match="--bad-word ' ' is empty"):
        common.bad_words(parsed("--bad-word", " "), tokenizer)


def test_a_bad_word_does_not_come(folder: Path, tmp_path: Path) -> None:
    regex = ["--regex", "[ab]{8}", "--temperature", "1", "--seed", "1"]
    (free,) = answers(folder, tmp_path, *regex)
    assert set(free["text"]) == {"a", "b"}
    (banned,) = answers(folder, tmp_path, *regex, "--bad-word", "b")
    assert banned["text"] == "a" * 8


def test_several_answers_to_a_prompt(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stand side by side, named, under one seed; the first is the one that comes alone."""
    sampled = ["--temperature", "1", "--seed", "3", "--max-tokens", "12", "--regex", "[a-z]{6}"]
    three = answers(folder, tmp_path, *sampled, "--n", "3")
    shown = capsys.readouterr()
    assert [answer["sample"] for answer in three] == [0, 1, 2]
    assert {answer["seed"] for answer in three} == {3}
    assert len({answer["text"] for answer in three}) == 3
    assert "".join(f"--- 1, sample {n}\n{answer['text']}\n" for n, answer in enumerate(three, start=1)) == shown.out
    assert "seed 3]" in shown.err
    (alone,) = answers(folder, tmp_path, *sampled)
    assert alone["token_ids"] == three[0]["token_ids"]


def test_log_probabilities_are_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = answers(folder, tmp_path, "--regex", "[a-z]{4}", "--logprobs", "2")
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert "".join(entry["token"] for entry in answer["logprobs"][:4]) == answer["text"]
    for entry in answer["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["logprob"] <= entry["top"][0]["logprob"] < 0
    (without,) = answers(folder, tmp_path, "--regex", "[a-z]{4}")
    assert "logprobs" not in without
    assert without["token_ids"] == answer["token_ids"]
    run(folder, "--logprobs", "2", status=2)
    assert "--logprobs writes to the --json file" in capsys.readouterr().err


def test_constraints_from_files_and_texts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "grammar.lark").write_text('start: "<" /[a-z]{2}/ ">"\n')
    for given in (SCHEMA, str(tmp_path / "schema.json")):
        (answer,) = answers(folder, tmp_path, "--json-schema", given)
        assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["text"])["a"], bool)
        assert answer["text"].startswith("{")
    for given in ('start: "<" /[a-z]{2}/ ">"', str(tmp_path / "grammar.lark")):
        (answer,) = answers(folder, tmp_path, "--grammar", given)
        assert re.fullmatch("<[a-z]{2}>", answer["text"])
        assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json-schema", "missing.json"], "--json-schema 'missing.json' is neither a file nor a text"),
        (["--json-schema", "{"], "json_schema must be a mapping or JSON"),
        (["--json-schema", "{" + "x" * 5000], "json_schema must be a mapping or JSON"),
        (["--json-schema", ""], "--json-schema '' is neither"),
        (["--grammar", "missing.lark"], "--grammar 'missing.lark' is neither a file nor a text"),
        (["--grammar", "start: foo"], 'unknown name: "foo"'),
        (["--regex", "("], "regex '(' cannot be kept: unclosed group"),
        (["--regex", "a", "--ignore-eos"], "regex and ignore_eos exclude each other"),
        (["--n", "0"], "n must be an integer of at least 1"),
        (["--logit-bias", "999=1"], "logit_bias holds ids outside the vocabulary: [999]"),
        (["--logit-bias", "3=inf"], "numbers up to 1e+30"),
        (["--row-width", "16"], "row_width"),
        (["--exactness", "seed", "--rule", "typical"], "rule 'typical' gives exactness 'lossy'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, *arguments, status=2)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["--logit-bias", "3"], ["--logit-bias", "x=1"], ["--regex", "a", "--grammar", "b:"]]
)
def test_arguments_that_do_not_parse(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(folder, *arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "is not ID=VALUE, such as 42=-1.5" in error or "not allowed with argument" in error


def test_a_failed_answer_is_told_and_the_status_is_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that is complete before --min-tokens cannot go on: one line says so, streamed or among others."""
    failing = ["--regex", "[a-z]{3}", "--min-tokens", "9"]
    (streamed,) = answers(folder, tmp_path, *failing, status=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("headstart: answer 1 ended early: no token is left after 3")]
    both = answers(folder, tmp_path, *failing, "--n", "2", "--temperature", "1", status=1)
    err = capsys.readouterr().err
    assert "answer 1, sample 1 ended early" in err
    assert "answer 1, sample 2 ended early" in err
    for answer in (streamed, *both):
        assert answer["finish_reason"] == "error"
        assert "min_tokens" in answer["error"]
        assert re.fullmatch("[a-z]{0,3}", answer["text"])
    (fine,) = answers(folder, tmp_path, "--regex", "[a-z]{3}")
    assert (fine["error"], fine["finish_reason"]) == (None, "stop")


@pytest.mark.parametrize(
    ("arguments", "exactness", "lossless"),
    [
        ([], "seed", True),
        (["--exactness", "bitwise", "--row-width", "8"], "bitwise", True),
        (["--exactness", "lossy"], "lossy", False),
        (["--rule", "typical"], "lossy", False),
        (["--exactness", "distribution"], None, True),
    ],
)
def test_the_exactness_asked_for_is_reported(
    arguments: list[str], exactness: str | None, lossless: bool, folder: Path, tmp_path: Path
) -> None:
    (answer,) = answers(folder, tmp_path, "--temperature", "1", "--seed", "2", "--max-tokens", "8", *arguments)
    assert answer["lossless"] == lossless
    assert exactness is None or answer["exactness"] == exactness
