"""The README's examples of serving: every block between the two marks is run, or is a failure."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.cli import bench_serve, chat, serve
from tests.infer.helpers import Folders, write_folders
from tests.infer.serve.serving import Running, served, toy_engine, toy_target

BEGIN, END = "<!-- serving examples", "<!-- end of serving examples -->"
HEAD, ADDRESS, MODEL = "runs/demo/best", "http://127.0.0.1:8000", "smollm2-135m"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = {"serve": serve, "chat": chat, "bench serve": bench_serve}


def section(repository: Path) -> str:
    text = (repository / "README.md").read_text(encoding="utf-8")
    if BEGIN not in text and "headstart serve" not in text:
        pytest.skip("the README says nothing of serving")
    assert text.count(BEGIN) == text.count(END) == 1, f"the README's examples of serving need {BEGIN} and {END}"
    return text.split(BEGIN)[1].split(END)[0]


def blocks(repository: Path, language: str) -> list[str]:
    return [text for name, text in _BLOCK.findall(section(repository)) if name == language]


def commands(repository: Path) -> list[str]:
    """The commands of all console blocks; a quoted text may go over several lines."""
    found = []
    for block in blocks(repository, "console"):
        command = ""
        for line in block.splitlines():
            command += line + "\n"
            try:
                shlex.split(command, comments=True)
            except ValueError:  # a quotation is still open
                continue
            found.append(command.strip())
            command = ""
        assert not command, f"a quotation is never closed in {block!r}"
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served(toy_engine(toy_target()), model_names=(MODEL,)) as running:
        yield running


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("readme"), [("a", "abc")])


def test_there_are_examples_of_every_kind_and_no_others(repository: Path) -> None:
    """Blocks are Python or commands, commands are headstart's or curl: what is something else would run nowhere."""
    languages = [name for name, _ in _BLOCK.findall(section(repository))]
    assert set(languages) == {"python", "console"}
    assert section(repository).count("```") == 2 * len(languages)
    kinds = [shlex.split(command)[0] for command in commands(repository)]
    assert set(kinds) == {"headstart", "curl"}


def test_python_blocks_run(repository: Path, server: Running, folders: Folders) -> None:
    """Each as a program of its own, with the address and the head of this test; warnings are errors of its own only."""
    programs = blocks(repository, "python")
    assert any("OpenAI(" in program for program in programs)
    assert any("AsyncEngine(" in program for program in programs)
    for program in programs:
        assert ADDRESS in program or f'"{HEAD}"' in program, "a block that uses neither server nor head"
        program = program.replace(ADDRESS, server.url).replace(f'"{HEAD}"', f'"{folders.head}", "{folders.target}"')
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_curl_commands_are_answered(repository: Path, server: Running) -> None:
    lines = [command for command in commands(repository) if command.startswith("curl")]
    assert len(lines) >= 2
    for command in lines:
        assert ADDRESS in command
        arguments = shlex.split(command.replace(ADDRESS, server.url))
        done = subprocess.run([*arguments, "--silent", "--fail-with-body"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
        if '"stream": true' in command:
            events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["usage"]["completion_tokens"] > 0
        else:
            assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_headstarts_own_commands_are_understood(repository: Path) -> None:
    """Their options exist and parse; that the commands work, other tests say."""
    lines = [command for command in commands(repository) if command.startswith("headstart")]
    seen = set()
    for command in lines:
        words = shlex.split(command, comments=True)[1:]
        name = "bench serve" if words[:2] == ["bench", "serve"] else words[0]
        assert name in _COMMANDS, f"no test of this kind of command: {command}"
        parser = argparse.ArgumentParser()
        _COMMANDS[name].add_arguments(parser)
        parser.parse_intermixed_args(words[len(name.split()) :])
        seen.add(name)
    assert seen == set(_COMMANDS)
