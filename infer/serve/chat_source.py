"""Whatever answers in a chat: an engine in this process, or a server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from infer.async_engine import AsyncEngine
from infer.chat import render_prompt
from infer.drafters.spec import NO_DRAFT
from infer.request import Completion, DraftBounds
from infer.sampling import SamplingParams
from infer.serve.client import Client, ServerError, StreamError, chunk_text, chunk_tokens, find_model
from infer.stopping import TextStream


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the next answer is drawn."""

    params: SamplingParams
    seed: int | None = None
    draft: bool = True


class Span(NamedTuple):
    """Text to be shown. drafted: its tokens were drafted and accepted."""

    text: str
    drafted: bool


@dataclass(kw_only=True)
class Reply:
    """An answer as it grows. `text` is what the conversation keeps of it. accepted_length: mean tokens of rounds that
    drafted, the target's own included; None where nothing drafted, or nobody says."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    accepted_length: float | None = None
    seconds: float = 0.0

    def summary(self) -> str:
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        parts = [f"{self.num_tokens} tokens", f"{rate:.1f} tokens/s"]
        if self.accepted_length is not None:
            parts.append(f"accepted length {self.accepted_length:.2f}")
        if self.finish_reason == "length":
            parts.append("cut at the limit of tokens")
        return f"[{', '.join(parts)}]"


class Trouble(Exception):
    """What keeps one question from being answered, in one line."""


class Source(Protocol):
    """Whatever answers."""

    context: int | None
    """Most tokens of a conversation, its next answer included; None if unknown."""
    cannot_draft: str
    """Why /draft on would do nothing; empty if it would."""

    async def num_tokens(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """Tokens of a conversation as it is sent; None if unknown."""

    def spans(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, answer: Reply
    ) -> AsyncGenerator[list[Span], None]:
        """The answer's text as it comes; what is known of it is written to `answer`. Raises Trouble."""

    async def close(self) -> None: ...


class LocalSource:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine, *, context: int, cannot_draft: str = "") -> None:
        self.context: int | None = context
        self.cannot_draft = cannot_draft
        self._engine = engine
        self._tokenizer = engine.engine.target.tokenizer

    async def num_tokens(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        try:
            return len(render_prompt(self._tokenizer, messages))
        except ValueError as error:
            raise Trouble(str(error)) from error

    async def spans(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, answer: Reply
    ) -> AsyncGenerator[list[Span], None]:
        params = replace(settings.params, seed=settings.seed)
        bounds = DraftBounds(enabled=settings.draft)
        text = TextStream(self._tokenizer)
        try:
            ticket = await self._engine.submit(messages, params, draft=bounds)
        except ValueError as error:
            raise Trouble(str(error)) from error
        try:
            async for update in ticket:
                drafted, own = update.token_ids[: update.num_accepted], update.token_ids[update.num_accepted :]
                spans = [Span(text.push(drafted), True), Span(text.push(own), False)]
                if update.completion is not None:
                    spans.append(Span(text.flush(), False))
                    _note_end(update.completion, answer)
                answer.num_tokens += len(update.token_ids)
                answer.text += "".join(span.text for span in spans)
                yield spans
                if update.completion is not None and update.completion.error is not None:
                    raise Trouble(update.completion.error)
        finally:
            ticket.cancel()

    async def close(self) -> None:
        await self._engine.close()


class ServerSource:
    """An OpenAI-compatible server. What only headstart's own can do is asked of no other."""

    def __init__(self, client: Client, model: Mapping[str, Any]) -> None:
        self._client = client
        self.name = str(model["id"])
        self._is_ours = "headstart" in model
        self.context: int | None = model.get("max_model_len")
        self.cannot_draft = ""
        if not self._is_ours:
            self.cannot_draft = "this server takes no word on drafting from its clients"
        elif model["headstart"].get("drafter") in (None, NO_DRAFT):
            self.cannot_draft = "this server has no drafter"

    async def num_tokens(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        try:
            body = await self._client.post("/tokenize", {"model": self.name, "messages": list(messages)})
            return int(body["count"])
        except (ServerError, StreamError, OSError, KeyError, TypeError, ValueError):
            return None  # it need not know this; what is wrong with it shows when it is asked to answer

    async def spans(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, answer: Reply
    ) -> AsyncGenerator[list[Span], None]:
        try:
            stream = self._client.stream("/v1/chat/completions", self._body(messages, settings))
            async with aclosing(stream) as events:
                async for event in events:
                    yield self._take(event, answer)
        except (ServerError, StreamError) as error:
            raise Trouble(f"the server says: {error}" if isinstance(error, ServerError) else str(error)) from error
        except OSError as error:
            raise Trouble(f"no answer from {self._client.url}: {error or type(error).__name__}") from error

    @property
    def url(self) -> str:
        return self._client.url

    async def close(self) -> None:
        """Every request had a connection of its own."""

    def _body(self, messages: Sequence[Mapping[str, str]], settings: Settings) -> bytes:
        params = settings.params
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.seed is not None:
            body["seed"] = settings.seed
        if self._is_ours:
            body |= {"draft": settings.draft, "acceptance": True}
        return json.dumps(body).encode()

    @staticmethod
    def _take(event: Mapping[str, Any], answer: Reply) -> list[Span]:
        acceptance = event.get("acceptance") or {}
        if acceptance.get("num_drafts"):
            answer.accepted_length = acceptance.get("mean_accepted_length")
        if event.get("usage"):
            answer.num_tokens = event["usage"].get("completion_tokens", answer.num_tokens)
        spans = []
        for choice in event.get("choices") or ():
            text, tokens = chunk_text(choice), chunk_tokens(choice)
            answer.text += (choice.get("delta") or {}).get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.num_tokens += bool(text) if tokens is None else len(tokens)
            spans += _coloured(text, tokens or [])
        return spans


def _coloured(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The text of a chunk by its tokens. Where a server holds text back (part of a character, of a tag), tokens do not
    spell the chunk, and it is shown in one colour: that of its last token."""
    spans = [Span(token["text"], bool(token["drafted"])) for token in tokens]
    if "".join(span.text for span in spans) == text:
        return spans
    return [Span(text, bool(spans) and spans[-1].drafted)]


def _note_end(completion: Completion, answer: Reply) -> None:
    answer.finish_reason = completion.finish_reason
    speculation = completion.speculation
    if speculation.num_drafts:
        answer.accepted_length = speculation.mean_accepted_length


async def connect(url: str, *, api_key: str | None = None, model: str | None = None) -> ServerSource:
    """A server's model (its first unless named). Raises ValueError where there is none."""
    client = Client(url, api_key=api_key)
    return ServerSource(client, await find_model(client, model))
