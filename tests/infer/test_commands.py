"""The commands generate, eval, bench and profile, through `headstart.main`, on a tiny target with a random
head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from infer.cli import common
from infer.cli.generate import accepted_text
from infer.drafters.base import TreeSettings
from infer.request import Completion
from tests.infer.helpers import Folders, write_folders
from tests.toy_tokenizer import toy_tokenizer

SEEDED = ["--temperature", "0.9", "--seed", "5"]
FIXED = ["--dtype", "float32", "--no-adaptive"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The head's card asks for small trees."""
    texts = [("a", "abc abc abc"), ("b", "one two three four"), ("a", "x")]
    drafter = {"max_nodes": 7, "max_depth": 3, "note": "not a tree setting"}
    return write_folders(tmp_path_factory.mktemp("commands"), texts, drafter=drafter)


def generate(folders: Folders, tmp_path: Path, *arguments: str, head: str | None = None) -> list[dict[str, Any]]:
    """Answers of `headstart generate` as read from its --json file."""
    path = tmp_path / "answers.json"
    base = ["generate", head or str(folders.head), "--target", str(folders.target), "--max-tokens", "24", *FIXED]
    assert headstart.main([*base, *arguments, "--json", str(path)]) == 0
    answers = json.loads(path.read_text())
    assert isinstance(answers, list)
    return answers


@pytest.mark.parametrize("sampling", [[], SEEDED, [*SEEDED, "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"]])
@pytest.mark.parametrize("tree", [[], ["--chain", "4"], ["--nodes", "12", "--depth", "2"]])
def test_drafted_answers_equal_plain_ones(
    folders: Folders, tmp_path: Path, sampling: list[str], tree: list[str]
) -> None:
    """The same tokens with a head, with the lookup and without a draft, in batches of any size."""
    prompts = ["--prompts", str(folders.prompts), *sampling]
    plain = generate(folders, tmp_path, *prompts, "--no-draft")
    drafted = generate(folders, tmp_path, *prompts, *tree, "--batch", "2")
    lookup = generate(folders, tmp_path, *prompts, *tree, head="ngram")
    expected = [answer["token_ids"] for answer in plain]
    assert [answer["token_ids"] for answer in drafted] == expected
    assert [answer["token_ids"] for answer in lookup] == expected
    assert [answer["domain"] for answer in plain] == ["a", "b", "a"]
    if sampling:
        assert [answer["seed"] for answer in drafted] == [5, 6, 7]


def test_answers_in_json_are_complete_and_add_up(folders: Folders, tmp_path: Path) -> None:
    """One entry a prompt, in order, whose rounds sum to its tokens."""
    (answer,) = generate(folders, tmp_path, "--prompt", "hello", *SEEDED)
    assert set(answer) == {
        "token_ids",
        "text",
        "finish_reason",
        "stop_reason",
        "num_rounds",
        "accepted_lengths",
        "tokens_per_second",
        "seed",
        "seed_used",
        "lossless",
        "exactness",
        "sample",
        "error",
    }
    assert sum(answer["accepted_lengths"]) == len(answer["token_ids"])
    assert len(answer["accepted_lengths"]) == answer["num_rounds"]
    assert (answer["seed"], answer["seed_used"], answer["lossless"]) == (5, True, True)


def test_greedy_answers_say_that_the_seed_is_unused(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users once took equal answers under different seeds for a bug."""
    answers = [generate(folders, tmp_path, "--prompt", "hello", "--seed", seed)[0] for seed in ("1", "2")]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert not answers[0]["seed_used"]
    assert "the seed is unused" in capsys.readouterr().err
    generate(folders, tmp_path, "--prompt", "hello", "--temperature", "1")
    assert "seed " in capsys.readouterr().err  # a random one, reported


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_what_is_streamed_is_the_answer(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    """The pieces printed join to the text; with a stop string, nothing of it is shown."""
    sampling = ["--temperature", temperature, "--seed", "5"]
    (whole,) = generate(folders, tmp_path, "--prompt", "hello", *sampling)
    assert capsys.readouterr().out == whole["text"] + "\n"
    stop = whole["text"][6:8]
    (cut,) = generate(folders, tmp_path, "--prompt", "hello", *sampling, "--stop", stop)
    assert capsys.readouterr().out == cut["text"] + "\n"
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_prompt_from_a_file_equals_prompt_on_the_command_line(folders: Folders, tmp_path: Path) -> None:
    """Raw text leaves out the chat template, which changes the answer."""
    (tmp_path / "prompt.txt").write_text("hello there")
    (inline,) = generate(folders, tmp_path, "--prompt", "hello there")
    (from_file,) = generate(folders, tmp_path, "--prompt-file", str(tmp_path / "prompt.txt"))
    (raw,) = generate(folders, tmp_path, "--prompt", "hello there", "--raw")
    assert from_file["token_ids"] == inline["token_ids"]
    assert raw["token_ids"] != inline["token_ids"]


def test_accepted_tokens_are_coloured() -> None:
    """Green is a token that was drafted and accepted; the last token of each round is the target's own."""
    tokenizer = toy_tokenizer()
    token_ids = tuple(tokenizer("abcdef", add_special_tokens=False)["input_ids"])
    completion = Completion(
        prompt_token_ids=(5,),
        token_ids=token_ids,
        text="abcdef",
        finish_reason="length",
        stop_reason=None,
        num_rounds=3,
        accepted_lengths=(1, 3, 2),
        seed=0,
        seconds=1.0,
        tokens_per_second=6.0,
    )
    green, reset = "\x1b[32m", "\x1b[0m"
    assert accepted_text(tokenizer, completion) == f"a{green}bc{reset}d{green}e{reset}f"


def test_show_accepted_prints_the_same_text(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colours come and go, the text stays, streamed or not."""
    for prompts in (["--prompt", "abc abc abc"], ["--prompts", str(folders.prompts)]):
        answers = generate(folders, tmp_path, *prompts, "--show-accepted", "--temperature", "1", "--seed", "0")
        shown = capsys.readouterr().out.replace("\x1b[32m", "").replace("\x1b[0m", "")
        assert all(answer["text"] in shown for answer in answers)


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal", "typical"])
def test_other_rules_run_and_are_labelled(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    """Chain rules draft a chain without being told to; a lossy rule says so in the file and on the
    terminal."""
    (answer,) = generate(folders, tmp_path, "--prompt", "hello", "--rule", rule, *SEEDED)
    assert answer["lossless"] == (rule != "typical")
    assert ("NOT lossless" in capsys.readouterr().err) == (rule == "typical")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "x", "--chain", "3", "--nodes", "4"], "leave out --nodes"),
        (["--prompt", "x", "--nodes", "0"], "max_nodes must be a whole number"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be in"),
        (["--prompt", "x", "--batch", "0"], "--batch must be at least 1"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    folders: Folders, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A mistake on the command line is named, without a traceback."""
    base = ["generate", str(folders.head), "--target", str(folders.target), *FIXED]
    assert headstart.main([*base, *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_lookup_needs_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    """`ngram` belongs to no target, and says which option is missing."""
    assert headstart.main(["generate", "ngram", "--prompt", "x"]) == 2
    assert "--target" in capsys.readouterr().err


def test_tree_settings_come_from_arguments_then_card_then_defaults() -> None:
    """Everything has one order of precedence; entries of the card that are not about trees are left alone."""

    def settings(*arguments: str, adaptive: bool | None = None) -> TreeSettings:
        import argparse

        parser = argparse.ArgumentParser()
        common.add_tree_arguments(parser)
        card = {"max_nodes": 9, "max_depth": 4, "adaptive": False, "hybrid": True}
        return common.tree_settings(parser.parse_args(arguments), card, adaptive=adaptive)

    assert settings() == TreeSettings(max_nodes=9, max_depth=4, adaptive=False)
    assert settings("--nodes", "20") == TreeSettings(max_nodes=20, max_depth=4, adaptive=False)
    assert settings("--adaptive", "--depth", "2") == TreeSettings(max_nodes=9, max_depth=2)
    assert settings(adaptive=True).adaptive
    assert not settings("--no-adaptive", adaptive=True).adaptive
    assert settings("--chain", "5") == TreeSettings.chain(5)
    assert settings("--rule", "block") == TreeSettings.chain(4)


def test_eval_prints_and_writes_the_same_figures(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures by domain and temperature, with the definition and everything needed to repeat them."""
    path = tmp_path / "acceptance.json"
    arguments = ["--prompts", str(folders.prompts), "--temperature", "0", "0.8", "--max-tokens", "12"]
    command = ["eval", str(folders.head), "--target", str(folders.target), "--dtype", "float32", *arguments]
    assert headstart.main([*command, "--json", str(path)]) == 0
    values = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert "Definition: accepted length" in out
    assert f"{values['overall']['accepted_length']:.2f}" in out
    assert set(values["by_domain"]) == {"a", "b"}
    assert set(values["by_temperature"]) == {"0.0", "0.8"}
    assert values["tree"] == {"max_nodes": 7, "max_depth": 3, "branch": 8, "beam": 6, "adaptive": False}
    assert values["overall"]["num_tokens"] == values["num_completion_tokens"] - values["num_prefill_tokens"]
    assert (values["target"], values["dtype"], values["lossless"]) == ("target", "float32", True)

    assert headstart.main([*command, "--batch", "1", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["overall"] == values["overall"]


def test_bench_prints_what_it_asked_and_writes_its_schema(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rendered prompt is shown with its ids' hash, so that a wrong template is seen."""
    path = tmp_path / "bench.json"
    arguments = ["--prompts", str(folders.prompts), "--limit", "1", "--max-tokens", "6", *FIXED]
    command = ["bench", str(folders.head), "--target", str(folders.target), *arguments]
    assert headstart.main([*command, "--json", str(path)]) == 0
    shown = capsys.readouterr()
    values = json.loads(path.read_text())
    assert "<|im_start|>user\nabc abc abc<|im_end|>" in shown.err
    assert values["settings"]["first_prompt_hash"] in shown.err
    assert values["settings"]["num_prompts"] == 2
    assert {row["method"] for row in values["results"]} == {"plain", "stock", "prompt_lookup", "headstart"}
    assert all(row["identical_to_plain"] == 1.0 for row in values["results"])
    assert max(map(len, shown.out.splitlines()[:8])) <= 80
    assert headstart.main([*command, "--raw", "--methods", "plain"]) == 0
    assert "raw text, no chat template" in capsys.readouterr().err


def test_profile_reports_target_and_head(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Floors, the draft step and the parts of rounds on the prompts given are printed; the measured table is kept in
    the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("infer.profile.floors._MIN_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("infer.profile.floors._MAX_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("infer.profile.floors._PRODUCT_SIZE", 64)
    monkeypatch.setattr("infer.cost.load_average", lambda: 0.0)
    path = tmp_path / "profile.json"
    command = ["profile", str(folders.head), "--target", str(folders.target), "--dtype", "float32", "--repeats", "1"]
    sizes = ["--prompts", str(folders.prompts), "--batch", "1", "2", "--context", "16", "--rounds", "3"]
    assert headstart.main([*command, *sizes, "--no-adaptive", "--json", str(path)]) == 0
    values = json.loads(path.read_text())
    assert values["draft"]["step_milliseconds"] > 0
    assert values["draft"]["floor_milliseconds"] > 0
    assert [each["batch"] for each in values["rounds"]] == [1, 2]
    assert {each["width"] for each in values["rounds"]} <= {1 + 7, 2 * (1 + 7)}  # the trees that the card asks for
    assert list((tmp_path / "cache").rglob("*.json"))
    out = capsys.readouterr().out
    for words in ("bandwidth floor", "matmul floor", "draft: tree building", "target forward", "verification"):
        assert words in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--rounds", "-1"], "--rounds must be at least 0, got -1"),
        (["--batch", "4", "0"], "--batch must be at least 1, got 0"),
        (["--context", "-5"], "--context must be at least 0, got -5"),
    ],
)
def test_a_profile_of_nothing_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the target, which does not exist, is looked for."""
    assert headstart.main(["profile", "none", "--target", "no-such-target", *options]) == 2
    assert words in capsys.readouterr().err


def test_generate_with_the_real_target(smollm2_path: Path, tmp_path: Path) -> None:
    """Lookup drafting on the demonstration model in float32 changes no token, greedy or sampled."""
    path = tmp_path / "answers.json"
    text = "Repeat after me: the cat sat on the mat. the cat sat on the mat."
    base = ["generate", "ngram", "--target", str(smollm2_path), "--prompt", text, "--max-tokens", "16", *FIXED]
    for sampling in ([], SEEDED):
        answers = []
        for draft in ([], ["--no-draft"]):
            assert headstart.main([*base, *sampling, *draft, "--json", str(path)]) == 0
            answers.extend(json.loads(path.read_text()))
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert answers[0]["text"] == answers[1]["text"]
        assert answers[1]["accepted_lengths"] == [1] * 16 or answers[1]["finish_reason"] == "stop"


@pytest.mark.parametrize("command", ["generate", "eval", "bench", "audit", "calibrate", "profile"])
@pytest.mark.parametrize("where", ["a folder", "below a file"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    command: str, where: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of measuring must not end in a result that has nowhere to go."""
    (tmp_path / "file").write_text("")
    path = tmp_path if where == "a folder" else tmp_path / "file" / "out.json"
    with pytest.raises(SystemExit) as stopped:
        headstart.main([command, str(folders.head), "--target", "no-such-target", "--json", str(path)])
    assert stopped.value.code == 2
    assert "--json" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("rule", ["typical", "recursive", "match"])
def test_measurements_say_what_their_answers_promise(
    rule: str, folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    """Differences of a rule that keeps no seed are not put down to rounding, and a lossy one is called that."""
    common = [str(folders.head), "--target", str(folders.target), "--rule", rule, "--temperature", "1"]
    sizes = ["--prompts", str(folders.prompts), "--max-tokens", "8", "--dtype", "bfloat16"]
    for command in ("eval", ["bench", "--methods", "plain", "headstart"]):
        name, *options = [command] if isinstance(command, str) else command
        assert headstart.main([name, *common, *sizes, "--no-adaptive", *options]) == 0
        output = capsys.readouterr().out
        assert ("NOT lossless" in output) == (rule == "typical")
        assert ("literal equality" in output) <= (rule == "match")
