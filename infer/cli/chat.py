"""`headstart chat`: talk to a target, or to a server, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.async_engine import AsyncEngine
from infer.chat import is_unicode
from infer.cli import common
from infer.drafters.spec import NO_DRAFT
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.serve.chat_source import LocalSource, Reply, ServerSource, Settings, Source, Span, Trouble, connect
from infer.serve.settings import KEY_VARIABLE

HELP = """\
Chat in the terminal, with a target and a head in this process or with a server (`--url`). Tokens that
were drafted and accepted are green (underlined where NO_COLOR is set). Ctrl-C stops an answer, Ctrl-D
leaves; /help lists the commands. With questions piped in, one a line, answers go to stdout."""

EXAMPLE = """\
headstart chat runs/demo/best
headstart chat runs/demo/best --temperature 0 --system "Answer in one sentence."
headstart chat --url http://127.0.0.1:8000 --api-key SECRET
echo "Why is the sky blue?" | headstart chat ngram --target models/smollm2-135m"""

COMMANDS = {
    "/system TEXT": "set the system message (none without TEXT) and begin anew",
    "/reset": "forget the conversation",
    "/draft on|off": "draft, or decode plainly",
    "/temperature T": "0 is greedy",
    "/max-tokens N": "longest answer",
    "/save FILE": "write the conversation as one line of JSON",
    "/help": "this list",
    "/quit": "leave (as does Ctrl-D)",
}

_GREEN, _UNDERLINED, _DIM, _RESET = "\x1b[32m", "\x1b[4m", "\x1b[2m", "\x1b[0m"
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that a terminal would obey; an answer has no business with them."""
_USUAL_CONTEXT = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser, head_required=False)
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="chat with this OpenAI-compatible server instead of loading a target")
    server.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key (default: the environment's {KEY_VARIABLE})"
    )
    server.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first)")
    group = parser.add_argument_group("chat")
    group.add_argument("--system", default="", metavar="TEXT", help="the system message")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    group.add_argument("--seed", type=int, metavar="N", help="question i is answered with seed N + i (default: random)")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of a conversation that are kept (default: the model's, at most {_USUAL_CONTEXT})",
    )
    group.add_argument("--no-draft", action="store_true", help="decode plainly at first")
    group.add_argument("--plain-text", action="store_true", help="no colours")
    common.add_tree_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = Settings(
        params=SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens),
        seed=args.seed,
        draft=not args.no_draft,
    )
    if args.url is not None and args.head != NO_DRAFT:
        raise ValueError(f"--url is for a server, which has its own target: leave out {args.head}")
    with asyncio.Runner() as runner:
        source: Source = runner.run(_connect(args)) if args.url is not None else _load(args)
        try:
            Chat(source, settings, system=args.system, style=Style.of_terminal(plain=args.plain_text)).talk(runner)
        finally:
            runner.run(source.close())
    return 0


@dataclass(frozen=True, kw_only=True)
class Style:
    """How text is set off; empty where nothing is."""

    drafted: str = ""
    dim: str = ""
    reset: str = ""
    controls: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of_terminal(cls, *, plain: bool) -> Style:
        if not sys.stdout.isatty():
            return cls()
        if plain or os.environ.get("TERM") == "dumb":
            return cls(controls=_CONTROLS)
        drafted = _UNDERLINED if os.environ.get("NO_COLOR") else _GREEN
        return cls(drafted=drafted, dim=_DIM, reset=_RESET, controls=_CONTROLS)

    def text(self, span: Span) -> str:
        text = span.text.translate(self.controls)
        return f"{self.drafted}{text}{self.reset}" if span.drafted and self.drafted and text else text

    def line(self, text: str) -> str:
        return f"{self.dim}{text}{self.reset}"


class Chat:
    """A conversation: reads lines, does what they say, keeps what was said."""

    def __init__(self, source: Source, settings: Settings, *, system: str = "", style: Style | None = None) -> None:
        self._source = source
        self._settings = settings
        self._style = style or Style()
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._num_questions = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/draft": self._set_draft,
            "/temperature": lambda text: self._set_number("temperature", text, float),
            "/max-tokens": lambda text: self._set_number("max_tokens", text, int),
            "/save": self._save,
            "/help": self._help,
        }

    def talk(self, runner: asyncio.Runner) -> None:
        """Until the input ends, or /quit."""
        for line in _lines(self._say):
            if line.strip() in ("/quit", "/exit"):
                return
            if not line.strip():
                continue
            if not is_unicode(line):
                self._say("the line holds bytes that are no text: not sent")
            elif line.startswith("/"):
                self._obey(line)
            else:
                self._ask(line.strip(), runner)

    @property
    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def _ask(self, question: str, runner: asyncio.Runner) -> None:
        """One question. What was said until a Ctrl-C is kept; a question that brought nothing is forgotten."""
        self._turns.append({"role": "user", "content": question})
        answer = Reply()
        try:
            runner.run(self._answer(answer))
            self._say(answer.summary())
        except KeyboardInterrupt:
            print(flush=True)
            self._say("[stopped]")
        except Trouble as trouble:
            if answer.text:
                print(flush=True)
            self._say(" ".join(str(trouble).split()))
        self._num_questions += 1
        if answer.text:
            self._turns.append({"role": "assistant", "content": answer.text})
        else:
            del self._turns[-1:]

    async def _answer(self, answer: Reply) -> None:
        settings = await self._fitted()
        start = time.perf_counter()
        try:
            async with aclosing(self._source.spans(self._messages, settings, answer)) as blocks:
                async for spans in blocks:
                    print("".join(map(self._style.text, spans)), end="", flush=True)
        finally:
            answer.seconds = time.perf_counter() - start
        print(flush=True)

    async def _fitted(self) -> Settings:
        """The settings of the next answer; the oldest turns go if there is no room for it otherwise."""
        seed = self._settings.seed
        settings = replace(self._settings, seed=None if seed is None else seed + self._num_questions)
        context, num_tokens = self._source.context, await self._source.num_tokens(self._messages)
        if context is None or num_tokens is None:
            return settings
        wanted, num_dropped = min(settings.params.max_tokens, context // 4), 0
        while context - num_tokens < wanted and len(self._turns) > 1:
            del self._turns[:2]
            num_dropped += 1
            num_tokens = await self._source.num_tokens(self._messages) or 0
        if num_dropped:
            self._say(f"[the context of {context} tokens is full: the oldest {num_dropped} questions are forgotten]")
        if num_tokens >= context:
            raise Trouble(f"the question takes {num_tokens} tokens, but at most {context - 1} fit: shorten it")
        limit = min(settings.params.max_tokens, context - num_tokens)
        return replace(settings, params=replace(settings.params, max_tokens=limit))

    def _obey(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            close = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {close[0]}?" if close else "/help lists them"
            self._say(f"there is no command {name}: {hint} (begin the line with a blank to send it as text)")
            return
        try:
            command(rest.strip())
        except (ValueError, OSError) as error:
            self._say(" ".join(str(error).split()))

    def _set_system(self, text: str) -> None:
        self._system = text
        self._turns.clear()
        self._say("[system message set; the conversation begins anew]" if text else "[no system message]")

    def _reset(self, _: str) -> None:
        self._turns.clear()
        self._say("[the conversation begins anew]")

    def _set_draft(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise ValueError(f"/draft {text}: expected on or off")
        if text == "on" and self._source.cannot_draft:
            raise ValueError(self._source.cannot_draft)
        if text:
            self._settings = replace(self._settings, draft=text == "on")
        draft = self._settings.draft and not self._source.cannot_draft
        self._say(f"[drafting is {'on' if draft else 'off'}]")

    def _set_number(self, name: str, text: str, kind: Callable[[str], float]) -> None:
        if text:
            try:
                value = kind(text)
            except ValueError:
                raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None
            changed: dict[str, Any] = {name: value}
            self._settings = replace(self._settings, params=replace(self._settings.params, **changed))
        self._say(f"[{name.replace('_', ' ')} is {getattr(self._settings.params, name):g}]")

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save needs the name of a file")
        path = Path(text).expanduser()
        path.write_text(json.dumps({"messages": self._messages}, ensure_ascii=False) + "\n", encoding="utf-8")
        self._say(f"[wrote {len(self._messages)} messages to {path}]")

    def _help(self, _: str) -> None:
        for name, meaning in COMMANDS.items():
            self._say(f"{name:<16}{meaning}")

    def _say(self, line: str) -> None:
        common.note(self._style.line(line))


def _lines(say: Callable[[str], None]) -> Iterator[str]:
    """Lines of stdin, with a prompt and history where a person types them."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history)
    say("[/help lists the commands; Ctrl-D leaves]")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("[Ctrl-D leaves]")


async def _connect(args: argparse.Namespace) -> ServerSource:
    source = await connect(args.url, api_key=args.api_key or os.environ.get(KEY_VARIABLE), model=args.model)
    common.note(f"{source.name} at {source.url}")
    return source


def _load(args: argparse.Namespace) -> LocalSource:
    target = common.load_target(args)
    if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
        raise ValueError("the target's tokenizer has no chat template, so it cannot chat: take a chat model")
    context = min(args.context or _USUAL_CONTEXT, target.max_length)
    engine = common.build_engine(args, target, max_requests=1, max_length=context)
    cannot_draft = "" if engine.drafter is not None else "nothing drafts here: give a HEAD (see `headstart drafters`)"
    engine.share(Sharing(reuse_prefixes=True, isolate_faults=True))  # a turn begins with all that was said before it
    served = AsyncEngine(engine)
    served.start()
    return LocalSource(served, context=context, cannot_draft=cannot_draft)
