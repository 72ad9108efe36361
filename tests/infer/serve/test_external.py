"""`headstart serve --engine`: which command it becomes, what it exports, and what it refuses. (That a real vLLM takes
the command was tried by hand: it has an environment of its own.)"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, read_card, read_json, save_head, update_card
from heads.foreign import FORMATS
from heads.registry import FAMILIES
from infer.cli import serve as serve_command
from infer.serve import external
from infer.serve.external import ENGINES, Command, Draft, Place, build_command, chain_length, serve, served_by
from infer.target import TargetModel
from tests.head_families import tiny_head
from tests.infer.helpers import Folders, write_folders

ACCEPTANCE = {
    "standard_error": 0.1,
    "acceptance": {
        "by_temperature": {
            "0.0": {"num_rounds": 300, "accepted_length": 1.9, "by_position": [0.45, 0.25, 0.13, 0.08, 0.03]}
        }
    },
}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return write_folders(tmp_path, [("chat", "hello")])


def parsed(*words: str) -> argparse.Namespace:
    """The arguments of `headstart serve`."""
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(list(words))


def place(**changes: Any) -> Place:
    return Place(**{"host": "127.0.0.1", "port": 8000, **changes})


class Became(Exception):
    """What `os.execve` would have become."""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """The python of another environment, which has packages by the engines' names."""
    site = tmp_path / "engine" / "site"
    for package in ("vllm", "sglang"):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text("")
    python = tmp_path / "engine" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def become(monkeypatch: pytest.MonkeyPatch, args: argparse.Namespace, where: Place) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that this process would have gone on with."""

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        assert path == words[0]
        raise Became(words, environment)

    monkeypatch.setattr(external.os, "execve", execve)
    with pytest.raises(Became) as caught:
        serve(args, where)
    words, environment = caught.value.args
    return words, environment


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


# The command.


def test_vllm(
    folders: Folders,
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM's server with the exported head, by absolute paths; the key in its environment and nowhere else; the user's
    own options last, where they win. What the command is, and that seeds are not headstart's, is said."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    words = ["--target", str(folders.target), "--engine", "vllm", "--engine-python", str(stand_in)]
    words += ["--dtype", "bfloat16", "--threads", "1", "--export-folder", str(tmp_path / "out")]
    words += ["--engine-args", "--enforce-eager --max-num-seqs 4", "--engine-args=--seed 3"]
    where = place(port=1234, api_keys=["secret"], model_names=["a", "b"], max_length=512)
    command, environment = become(monkeypatch, parsed(str(folders.head), *words), where)
    assert command[:3] == [str(stand_in), "-m", "vllm.entrypoints.openai.api_server"]
    assert option(command, "--model") == str(folders.target)
    assert (option(command, "--host"), option(command, "--port")) == ("127.0.0.1", "1234")
    assert (option(command, "--dtype"), option(command, "--max-model-len")) == ("bfloat16", "512")
    assert command[command.index("--served-model-name") + 1 :][:2] == ["a", "b"]
    assert command[-5:] == ["--enforce-eager", "--max-num-seqs", "4", "--seed", "3"]
    config = json.loads(option(command, "--speculative-config"))
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", external.USUAL_CHAIN)
    exported = Path(config["model"])
    assert exported.is_absolute()
    assert exported.parent == tmp_path / "out"
    assert FORMATS["vllm"].detect(read_json(exported / CONFIG_FILE))
    assert environment["VLLM_API_KEY"] == "secret"
    assert "PYTHONPATH" not in environment
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    assert "secret" not in " ".join(command)
    error = capsys.readouterr().err
    assert "secret" not in error
    assert "VLLM_API_KEY=***" in error
    assert "not headstart's for the same seed" in error


def test_sglang(folders: Folders, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's server: a chain is top-k 1 with one token more to verify. Its key is in a file that only its owner may
    read, also where an older file could be read by all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    old = tmp_path / "cache" / "headstart" / "sglang-key.yaml"
    old.parent.mkdir(parents=True)
    old.write_text("api-key: old\n")
    words = ["--target", str(folders.target), "--engine", "sglang", "--engine-python", str(stand_in), "--chain", "4"]
    where = place(api_keys=['se"cret'], model_names=["a"], max_length=512)
    command, _ = become(monkeypatch, parsed(str(folders.head), *words), where)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert option(command, "--model-path") == str(folders.target)
    assert option(command, "--speculative-algorithm") == "EAGLE3"
    assert (option(command, "--speculative-num-steps"), option(command, "--speculative-eagle-topk")) == ("4", "1")
    assert option(command, "--speculative-num-draft-tokens") == "5"
    assert option(command, "--context-length") == "512"
    assert "cret" not in " ".join(command)
    path = Path(option(command, "--config"))
    assert path.read_text() == 'api-key: "se\\"cret"\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_export_is_made_once(
    folders: Folders, stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the cache folder, by what the head holds: the second start finds it, and a head that has changed is exported
    anew."""
    args = parsed(
        str(folders.head), "--target", str(folders.target), "--engine", "vllm", "--engine-python", str(stand_in)
    )
    exports = []
    for changed in (False, False, True):
        if changed:
            update_card(folders.head, acceptance=ACCEPTANCE)
        command, _ = become(monkeypatch, args, place())
        exports.append(json.loads(option(command, "--speculative-config"))["model"])
    assert exports[0] == exports[1] != exports[2]
    assert capsys.readouterr().err.count("exporting ") == 2
    assert Path(exports[0]).is_relative_to(Path(os.environ["XDG_CACHE_HOME"]) / "headstart" / "exports")


def test_dry_run(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints a line that a shell takes apart into the same words, without the key's value, and writes nothing; the
    engine need not be there."""
    args = parsed(
        str(folders.head), "--target", str(folders.target), "--engine", "vllm", "--dry-run",
        "--export-folder", str(tmp_path / "with space"),
    )  # fmt: skip
    assert serve(args, place(api_keys=["secret"])) == 0
    out = capsys.readouterr().out
    variable, *words = shlex.split(out)
    assert variable == "VLLM_API_KEY=***"
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert json.loads(option(words, "--speculative-config"))["model"].startswith(str(tmp_path / "with space"))
    assert not (tmp_path / "with space").exists()


def test_no_drafts(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """HEAD 'none' serves the target alone there."""
    args = parsed("none", "--target", str(folders.target), "--engine", "vllm", "--dry-run")
    assert serve(args, place()) == 0
    assert "--speculative-config" not in capsys.readouterr().out


def test_a_gpu_is_chosen_by_the_environment(folders: Folders) -> None:
    args = parsed(str(folders.head), "--engine", "vllm", "--device", "cuda:1")
    command = build_command(args, ENGINES["vllm"], place(), python="python", target="org/model", draft=None)
    assert command.variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert option(list(command.words), "--model") == "org/model", "a Hub name is no path"


def test_the_environment_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are added to this process's own, and those that are None taken out."""
    monkeypatch.setenv("PYTHONPATH", "here")
    command = Command(words=["x"], variables={"PYTHONPATH": None, "A_API_KEY": "k", "B": "two words"})
    environment = command.environment()
    assert "PYTHONPATH" not in environment
    assert environment["A_API_KEY"] == "k"
    assert command.line() == "A_API_KEY=*** B='two words' x"


# How many tokens are drafted.


@pytest.mark.parametrize(
    ("words", "card", "config", "expected"),
    [
        ([], {}, {}, 3),
        ([], {"acceptance": ACCEPTANCE}, {}, 3),
        ([], {"drafter": {"max_depth": 2}}, {}, 2),
        ([], {"drafter": {"max_depth": 7}}, {}, 7),
        ([], {"drafter": {"max_depth": 7}, "acceptance": ACCEPTANCE}, {}, 3),
        ([], {"drafter": {"max_depth": 70}}, {}, external.LONGEST_CHAIN),
        ([], {}, {"num_heads": 2}, 2),
        (["--chain", "6"], {"acceptance": ACCEPTANCE}, {}, 6),
        (["--depth", "4"], {"acceptance": ACCEPTANCE}, {}, 4),
    ],
)
def test_chain_length(
    words: list[str], card: dict[str, Any], config: dict[str, Any], expected: int, folders: Folders
) -> None:
    """What the user says; else the head's own depth, less positions that its card says are accepted in fewer than a
    tenth of rounds."""
    update_card(folders.head, **card)
    if config:
        path = folders.head / CONFIG_FILE
        path.write_text(json.dumps({**read_json(path), **config}))
    assert chain_length(parsed(str(folders.head), *words), folders.head, read_card(folders.head)) == expected


# What cannot be.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--device-map", "auto"],
            r"--device-map has no equal in vLLM: more GPUs are --engine-args '--tensor-parallel",
        ),
        (["--quantization", "int8"], "--quantization has no equal"),
        (["--adapter", "somewhere"], "--adapter has no equal in vLLM: merge it first"),
        (["--exactness", "bitwise"], "--exactness has no equal in vLLM: the engine promises the target's law"),
        (["--rule", "typical"], "--rule has no equal"),
        (["--nodes", "8"], "--nodes has no equal in vLLM: the engine drafts chains: give --chain K"),
        (["--no-adaptive"], "--adaptive has no equal"),
        (["--forward", "eager"], "--forward has no equal"),
        (["--wandb"], "--wandb has no equal in vLLM: see the engine's own /metrics"),
        (["--acceptance-log", "x.jsonl"], "--acceptance-log has no equal"),
        (["--chain", "0"], "--chain must be at least 1"),
    ],
)
def test_options_that_it_has_not(words: list[str], message: str, folders: Folders) -> None:
    """Refused by name before anything is written, never dropped."""
    args = parsed(str(folders.head), "--target", str(folders.target), "--engine", "vllm", "--dry-run", *words)
    with pytest.raises(ValueError, match=message):
        serve(args, place())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("{head}+ngram", "joins 2 drafters, and vLLM drafts with one: give the trained head alone"),
        ("ngram", "'ngram' is not a trained head"),
        ("nowhere", "nowhere"),
    ],
)
def test_heads_that_it_has_not(head: str, message: str, folders: Folders) -> None:
    args = parsed(head.format(head=folders.head), "--target", str(folders.target), "--engine", "vllm", "--dry-run")
    with pytest.raises(ValueError, match=message):
        serve(args, place())


DFLASH = {"draft_vocab_size": 40, "vocab_size": 40}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_families_without_an_export(engine: str, family: str, folders: Folders) -> None:
    """Every family either has a form that the engine's entry names, of its own family, or is refused by its title."""
    kind, card = ENGINES[engine], HeadCard(target=read_card(folders.head).target, family=family)
    if family in kind.heads:
        assert FORMATS[served_by(kind, card, DFLASH).form].family == family
    else:
        with pytest.raises(ValueError, match=f"{kind.name} reads no {FAMILIES[family].title} heads"):
            served_by(kind, card, DFLASH)


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({}, "dflash", "dflash"),
        ({"draft_vocab_size": 20}, "speculators-dflash", None),
        ({"markov_rank": 4}, "speculators-dspark", None),
        ({"markov_rank": 4, "draft_vocab_size": 20}, "speculators-dspark", None),
        ({"markov_rank": 4, "markov_gate": True}, None, None),
        ({"sample_from_anchor": True}, None, None),
    ],
)
def test_dflash_heads_that_engines_tell_apart(
    changes: dict[str, Any], vllm: str | None, sglang: str | None, folders: Folders
) -> None:
    """By the correction, by the vocabulary and by where a block begins to guess."""
    card = HeadCard(target=read_card(folders.head).target, family="dflash")
    for engine, form in (("vllm", vllm), ("sglang", sglang)):
        if form is not None:
            assert served_by(ENGINES[engine], card, {**DFLASH, **changes}).form == form
        else:
            with pytest.raises(ValueError, match=r"reads no (DSpark|DFlash).* heads: it reads"):
                served_by(ENGINES[engine], card, {**DFLASH, **changes})


def test_heads_that_draft_in_one_pass(folders: Folders) -> None:
    """vLLM is told of P-EAGLE's places beside EAGLE-3's name; SGLang's blocks have no steps."""
    args = parsed(str(folders.head))

    def words(engine: str, head: str) -> list[str]:
        draft = Draft(folder=Path("out"), served=ENGINES[engine].heads[head], num_tokens=4)
        return list(build_command(args, ENGINES[engine], place(), python="p", target="org/model", draft=draft).words)

    config = json.loads(option(words("vllm", "peagle"), "--speculative-config"))
    assert (config["method"], config["parallel_drafting"], config["num_speculative_tokens"]) == ("eagle3", True, 4)
    assert "parallel_drafting" not in option(words("vllm", external.DSPARK), "--speculative-config")
    block = words("sglang", "dflash")
    assert (option(block, "--speculative-algorithm"), option(block, "--speculative-num-draft-tokens")) == (
        "DFLASH",
        "5",
    )
    assert "--speculative-num-steps" not in block


def test_a_form_with_copies_of_the_target(
    folders: Folders, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSpark's: the target is loaded for its export, and the block is drafted whole."""
    target = TargetModel.load(folders.target, dtype="float32")
    head = tiny_head("dflash", target, draft_vocab_size=20)
    folder = save_head(tmp_path / "dspark", head, HeadCard(target=target.reference, family="dflash"))
    words = ["--target", str(folders.target), "--engine", "vllm", "--engine-python", str(stand_in)]
    command, _ = become(monkeypatch, parsed(str(folder), *words, "--export-folder", str(tmp_path / "out")), place())
    config = json.loads(option(command, "--speculative-config"))
    assert (config["method"], config["num_speculative_tokens"]) == ("dspark", head.config.num_depths)
    exported = load_file(Path(config["model"]) / WEIGHTS_FILE)
    assert exported["lm_head.weight"].shape == (20, target.hidden_size)


@pytest.mark.parametrize(("family", "expected"), [("dflash", 9), ("peagle", 3)])
def test_the_length_of_a_block(family: str, expected: int, folders: Folders) -> None:
    """A DFlash block is drafted whole, whatever of it is accepted; a P-EAGLE draft ends where the head has no more."""
    path = folders.head / CONFIG_FILE
    path.write_text(json.dumps({**read_json(path), "num_depths": 9}))
    card = replace(read_card(folders.head), family=family, acceptance=ACCEPTANCE)
    assert chain_length(parsed(str(folders.head)), folders.head, card) == expected
    with pytest.raises(ValueError, match="a chain of 12 was asked for, but the head has"):
        chain_length(parsed(str(folders.head), "--chain", "12"), folders.head, card)


def test_an_engine_that_is_not_there(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is looked for where it would run: a folder of its name is none, and the remedy is said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    args = parsed(str(folders.head), "--target", str(folders.target), "--engine", "sglang")
    with pytest.raises(ValueError, match=r"has no sglang: pip install sglang there, or name the python"):
        serve(args, place())
    args.engine_python = str(tmp_path / "none" / "python")
    with pytest.raises(ValueError, match=r"is no file: give the python of SGLang's environment"):
        serve(args, place())


def test_several_keys_or_names(folders: Folders) -> None:
    args = parsed(str(folders.head), "--target", str(folders.target), "--engine", "vllm", "--dry-run")
    with pytest.raises(ValueError, match="2 API keys were given"):
        serve(args, place(api_keys=["a", "b"]))
    args.engine = "sglang"
    with pytest.raises(ValueError, match="2 names of the model"):
        serve(args, place(model_names=["a", "b"]))


def test_options_without_an_engine(folders: Folders) -> None:
    """--dry-run without --engine would start headstart's own server, which nobody who writes it wants."""
    external.check_own(parsed(str(folders.head)))
    with pytest.raises(ValueError, match=r"--dry-run: for another engine alone, so give --engine vllm or sglang too"):
        external.check_own(parsed(str(folders.head), "--dry-run"))


def test_the_process_is_replaced(folders: Folders, stand_in: Path, repository: Path, tmp_path: Path) -> None:
    """For real, with a stand-in: the same process id goes on as the engine, with its environment and exit status."""
    module = stand_in.parent / "site" / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    for folder in (module, module.parent):
        (folder / "__init__.py").write_text("")
    told = "import json, os, sys; print(json.dumps([os.getpid(), os.environ['VLLM_API_KEY']])); sys.exit(7)"
    (module / "api_server.py").write_text(told)
    code = (
        "import os, sys; from infer.serve.external import serve; "
        "from tests.infer.serve.test_external import parsed, place; "
        "print(os.getpid(), flush=True); serve(parsed(*sys.argv[1:]), place(api_keys=['k']))"
    )
    words = [str(folders.head), "--target", str(folders.target), "--engine", "vllm", "--engine-python", str(stand_in)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--export-folder", str(tmp_path / "out")],
        cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    before, after = done.stdout.splitlines()
    assert json.loads(after) == [int(before), "k"]


def test_the_namespace_is_that_of_the_command() -> None:
    """Every option that is looked at exists: a renamed one would no longer be refused."""
    args = vars(parsed("none"))
    for name, default, _ in external._UNKNOWN_THERE:
        assert args[name] == default
    assert SimpleNamespace(**args).engine == external.OWN
