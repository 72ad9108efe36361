"""`headstart chat`: with questions piped in, at a terminal, with an engine of its own and with servers."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.cli import chat
from infer.cli.chat import Span, Style
from infer.target import TargetModel
from tests.infer.helpers import Folders, write_folders
from tests.infer.serve.mock_server import Part, json_answer, mock_server, stream_answer, text_events
from tests.infer.serve.serving import served, toy_engine

BLOCKS = [["The"], [" sky", " is"], [" blue"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("chat"), [("a", "abc")])


def talk(monkeypatch: pytest.MonkeyPatch, lines: Sequence[str], *arguments: str) -> int:
    """The command with `lines` piped in."""
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return chat.run(parser.parse_args(arguments))


def local(folders: Folders, *arguments: str) -> list[str]:
    base = [str(folders.head), "--target", str(folders.target), "--dtype", "float32", "--no-adaptive"]
    return [*base, "--max-tokens", "12", "--seed", "3", *arguments]


def test_answers_are_those_of_plain_decoding_and_of_no_other_seed(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question a line, one answer each on stdout; what is said about them goes to stderr."""
    questions = ["first question", "second question"]
    assert talk(monkeypatch, questions, *local(folders)) == 0
    drafted = capsys.readouterr()
    assert talk(monkeypatch, questions, *local(folders, "--no-draft")) == 0
    plain = capsys.readouterr()
    assert drafted.out == plain.out != ""
    assert drafted.err.count(" tokens/s") == plain.err.count(" tokens/s") == 2
    assert "\x1b" not in drafted.out + drafted.err, "colours are for terminals"
    talk(monkeypatch, questions, *local(folders, "--seed", "4"))
    assert capsys.readouterr().out != plain.out


def test_commands_are_obeyed_and_mistakes_told_in_a_line_each(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "/rest", "/draft maybe", "/temperature warm", "/temperature -1", "/max-tokens 0", "/save", "/save /no/such/f",
        "/system Be brief.", "/temperature 0", "/max-tokens 5", "/draft off", "hello", "", "/help", f"/save {saved}",
        "/reset", " /etc is a folder?", "/quit", "never read",
    ]  # fmt: skip
    assert talk(monkeypatch, lines, *local(folders)) == 0
    error = capsys.readouterr().err
    for expected in (
        "there is no command /rest: did you mean /reset?",
        "/draft maybe: expected on or off",
        "'warm' is no number",
        "temperature must be in [0, inf), got -1.0",
        "max_tokens must be an integer of at least 1, got 0",
        "/save needs the name of a file",
        "No such file or directory",
        "[drafting is off]",
        "[max tokens is 5]",
        "/quit           leave",
    ):
        assert expected in error
    assert error.count("[5 tokens") == 2, "'hello' and the line that begins with a blank were answered"
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be brief."


def test_a_conversation_stays_within_the_context(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old turns are forgotten, with a word on it; a question that cannot fit is refused; and it goes on."""
    long = "too long " * 40
    lines = [*[f"question {number}" for number in range(6)], long, "the last"]
    assert talk(monkeypatch, lines, *local(folders, "--context", "128")) == 0
    error = capsys.readouterr().err
    assert "[the context of 128 tokens is full: the oldest 1 questions are forgotten]" in error
    assert "the question takes " in error
    assert "but at most 127 fit: shorten it" in error
    assert error.count(" tokens/s") == 7


def test_without_a_drafter_draft_on_says_why_it_does_nothing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["/draft on", "/draft"], "--target", str(folders.target))
    error = capsys.readouterr().err
    assert "nothing drafts here: give a HEAD" in error
    assert "[drafting is off]" in error


class Server:
    """A server that has one model and counts in words."""

    def __init__(self, *, ours: bool, limit: int = 1000) -> None:
        self.model: dict[str, Any] = {"id": "m", "max_model_len": limit}
        if ours:
            self.model["headstart"] = {"drafter": "eagle3"}
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[Sequence[Part]] = []
        self._details = ours

    def __call__(self, path: str, body: dict[str, Any]) -> Sequence[Part]:
        if path == "/v1/models":
            return json_answer({"data": [self.model]})
        if path == "/tokenize":
            return json_answer({"count": sum(len(each["content"].split()) for each in body["messages"])})
        self.bodies.append(body)
        return self.answers.pop(0) if self.answers else stream_answer(text_events(BLOCKS, details=self._details))


@pytest.mark.parametrize("ours", [True, False])
def test_a_server_is_asked_only_what_it_knows(
    ours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(ours=ours)
    with mock_server(server) as running:
        assert talk(monkeypatch, ["why?", "/draft off", "and?"], "--url", running.url, "--seed", "5") == 0
    printed = capsys.readouterr()
    assert printed.out == "The sky is blue\nThe sky is blue\n"
    assert "[4 tokens" in printed.err
    first, second = server.bodies
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "The sky is blue"
    assert (first["seed"], second["seed"]) == (5, 6)
    if ours:
        assert (first["draft"], second["draft"], first["acceptance"]) == (True, False, True)
    else:
        assert not {"draft", "acceptance"} & first.keys()


def test_a_real_server_says_what_an_engine_in_this_process_says(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same target, same seeds: the same answers over HTTP, also where a character is broken off at the end. Bytes of a
    random model make odd characters."""
    questions = [f"question {number}" for number in range(4)]
    options = ["--max-tokens", "24", "--seed", "3", "--temperature", "1"]
    talk(monkeypatch, questions, *local(folders, *options))
    here = capsys.readouterr()
    with served(toy_engine(TargetModel.load(folders.target, dtype="float32"), max_length=256)) as running:
        talk(monkeypatch, [*questions, "/draft on"], "--url", running.url, *options)
    there = capsys.readouterr()
    assert there.out == here.out != ""
    assert there.err.count("[24 tokens") == here.err.count("[24 tokens") > 0
    assert "[drafting is on]" in there.err


def test_a_server_that_fails_or_goes_away_costs_one_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal, a stream that breaks off (its text is kept), and no server at all."""
    server = Server(ours=True)
    server.answers = [
        json_answer({"error": {"message": "the queue is full"}}, status=429),
        stream_answer(text_events(BLOCKS, details=True)[:3], done=False),
    ]
    with mock_server(server) as running:
        talk(monkeypatch, ["one", "two", "three"], "--url", running.url)
    printed = capsys.readouterr()
    assert printed.out == "The sky is\nThe sky is blue\n"
    assert "the server says: the queue is full" in printed.err
    assert "the server closed the connection in the middle of its answer" in printed.err
    contents = [message["content"] for message in server.bodies[-1]["messages"]]
    assert contents == ["two", "The sky is", "three"], "the refused question is forgotten"
    with pytest.raises(ValueError, match=r"there is no server at http://127\.0\.0\.1"):
        talk(monkeypatch, ["one"], "--url", running.url)


def test_a_servers_context_is_kept_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(ours=True, limit=12)
    with mock_server(server) as running:
        talk(monkeypatch, ["a b c d", "e f g h", "word " * 12], "--url", running.url)
    assert "the oldest 1 questions are forgotten" in capsys.readouterr().err
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]
    assert [body["max_tokens"] for body in server.bodies] == [8, 8]


def test_wrong_models_keys_and_addresses_are_told_before_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock_server(Server(ours=True)) as running:
        with pytest.raises(ValueError, match="has no model 'other': it has m"):
            talk(monkeypatch, [], "--url", running.url, "--model", "other")
        with pytest.raises(ValueError, match="leave out ngram"):
            talk(monkeypatch, [], "ngram", "--url", running.url)
        monkeypatch.setenv("HEADSTART_API_KEY", "secret")
        talk(monkeypatch, [], "--url", running.url)
    assert "Bearer secret" in running.requests[-1][2]


def test_accepted_tokens_are_coloured_and_controls_are_not_obeyed() -> None:
    style = Style(drafted="<", reset=">", controls=chat._CONTROLS)
    assert style.text(Span("a\x1b[2Jb\n", True)) == "<a\ufffd[2Jb\n>"
    assert style.text(Span("own", False)) == "own"
    assert style.text(Span("", True)) == ""


def test_at_a_terminal_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    """A real terminal: the first answer never ends; after Ctrl-C the second is whole, accepted tokens in green."""
    server = Server(ours=True)
    events = text_events(BLOCKS, details=True)
    server.answers = [stream_answer([*events[:3], 60.0])]
    with mock_server(server) as running:
        terminal = Terminal(["--url", running.url])
        try:
            terminal.read_until("> ")
            terminal.write("why?\n")
            terminal.read_until(" is")
            terminal.write("\x03")
            terminal.read_until("[stopped]")
            terminal.read_until("> ")
            terminal.write("again\n")
            text = terminal.read_until("tokens/s")
            assert "\x1b[32m sky\x1b[0m is" in text
            terminal.read_until("> ")  # before it, Ctrl-D would be the terminal's to read, not the line editor's
            terminal.write("\x04")
            assert terminal.wait() == 0
        finally:
            terminal.close()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["why?", "The sky is", "again"]


class Terminal:
    """The command in a process of its own, at a pseudo-terminal."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._master, slave = pty.openpty()
        code = (
            "import sys, argparse; from infer.cli import chat; parser = argparse.ArgumentParser(); "
            "chat.add_arguments(parser); sys.exit(chat.run(parser.parse_args(sys.argv[1:])))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(slave),
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "PYTHONPATH": "."},
        )
        os.close(slave)
        self._unread = ""

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: str, *, seconds: float = 60.0) -> str:
        """All up to `text`."""
        end = time.monotonic() + seconds
        while text not in self._unread:
            assert time.monotonic() < end, f"waited for {text!r}, saw {self._unread!r}"
            if select.select([self._master], [], [], 0.5)[0]:
                self._unread += os.read(self._master, 4096).decode(errors="replace")
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def wait(self) -> int:
        status = self._process.wait(30)
        os.close(self._master)
        return status

    def close(self) -> None:
        """End it, whatever became of the test."""
        self._process.kill()
        self._process.wait()


def _take_terminal(slave: int) -> None:
    """Make it the process's own, so that Ctrl-C there is a signal to it."""
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
