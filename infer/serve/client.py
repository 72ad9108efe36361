"""A client of OpenAI-compatible servers.

It may share a small machine with the server that it measures, so it is one thread over plain sockets: a connection a
request, HTTP/1.1 as far as such servers speak it, and no work on an answer beyond its JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_LARGEST_LINE = 1 << 22
_LOOKUP_SECONDS = 30.0


class ServerError(Exception):
    """What a server answered instead of what was asked for; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StreamError(Exception):
    """A stream that broke off, or ended in an error."""


class Client:
    """Talks to one server. `url` is its root, with or without `/v1`."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no server's address: expected one such as http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is no server's address: {error}") from error
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"Host: {host}:{self._port}\r\nConnection: close\r\n{key}"
        self.url = f"{parts.scheme}://{host}:{self._port}{self._root}"

    async def get(self, path: str) -> Any:
        """The JSON (or text) at `path`. Raises OSError, ServerError or StreamError."""
        return await self._ask("GET", path)

    async def post(self, path: str, value: Any) -> Any:
        """What the server answers to the JSON of `value`; raises as `get`."""
        return await self._ask("POST", path, json.dumps(value).encode())

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Any:
        async with asyncio.timeout(_LOOKUP_SECONDS), self.connect() as connection:
            await connection.send(method, path, body)
            answer = await connection.read_all()
        try:
            return json.loads(answer)
        except ValueError:
            return answer.decode(errors="replace")

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer, up to `[DONE]`. Raises OSError, ServerError or StreamError."""
        async with self.connect() as connection:
            await connection.send("POST", path, body)
            async for event in connection.events():
                yield event

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """A connection for one request."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_LARGEST_LINE)
        try:
            yield Connection(reader, writer, self._root, self._head)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Connection:
    """One request and its answer. A connection that breaks off raises StreamError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, root: str, head: str) -> None:
        self._reader = reader
        self._writer = writer
        self._root = root
        self._head = head
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the body still to come; None: until the connection ends

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send the request and read the answer's head. Raises ServerError unless it is 200."""
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        self._writer.write(f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body)
        await self._writer.drain()
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise StreamError("the server closed the connection without an answer") from error
        status, headers = _parse_head(head)
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._num_left = int(headers["content-length"]) if "content-length" in headers else None
        if status != 200:
            raise ServerError(status, _error_message(await self.read_all()))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        rest = b""
        while part := await self._read_part():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _parse_event(data)
        raise StreamError("the stream ended before its [DONE]")

    async def read_all(self) -> bytes:
        parts = []
        while part := await self._read_part():
            parts.append(part)
        return b"".join(parts)

    async def _read_part(self) -> bytes:
        """The next bytes of the body; none at its end."""
        try:
            if self._is_chunked:
                size = int((await self._reader.readline()).split(b";", 1)[0], 16)
                return (await self._reader.readexactly(size + 2))[:size]
            part = await self._reader.read(1 << 16 if self._num_left is None else min(self._num_left, 1 << 16))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise StreamError("the server closed the connection in the middle of its answer") from error
        if self._num_left is not None:
            if self._num_left and not part:
                raise StreamError("the server closed the connection in the middle of its answer")
            self._num_left -= len(part)
        return part


async def find_model(client: Client, name: str | None = None) -> dict[str, Any]:
    """The entry of a server's model (its first unless named). ValueError where there is none."""
    try:
        listed = await client.get("/v1/models")
    except (ServerError, StreamError) as error:
        raise ValueError(f"{client.url} lists no models: {error}") from error
    except OSError as error:
        raise ValueError(f"there is no server at {client.url}: {error or type(error).__name__}") from error
    try:
        models = {model["id"]: model for model in listed["data"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{client.url} is no OpenAI-compatible server: its /v1/models lists none") from error
    chosen = name or next(iter(models), "")
    if chosen not in models:
        raise ValueError(f"{client.url} has no model {chosen!r}: it has {', '.join(models) or 'none'}")
    return dict(models[chosen])


def chunk_text(choice: Mapping[str, Any]) -> str:
    """The text that a chunk's choice adds, of whatever kind: content, reasoning, or a tool call's arguments."""
    delta = choice.get("delta") or {}
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts = [
        delta.get("reasoning_content") or delta.get("reasoning"),
        delta.get("content"),
        *(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls),
    ]
    return "".join(part for part in parts if part)


def chunk_tokens(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tokens of a chunk's choice, where the server was asked for acceptance details and knows them."""
    tokens = (choice.get("acceptance") or {}).get("tokens")
    return tokens if isinstance(tokens, list) else None


def _parse_event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StreamError(f"an event is no JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise StreamError(f"an event is no JSON object: {data[:80]!r}")
    if event.get("error"):
        raise StreamError(_error_message(data))
    return event


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(first.split(" ", 2)[1])
    except (IndexError, ValueError) as error:
        raise StreamError(f"this is no HTTP server: it answers {first[:80]!r}") from error
    fields = [line.split(":", 1) for line in lines if ":" in line]
    return status, {name.strip().lower(): value.strip() for name, value in fields}


def _error_message(body: bytes) -> str:
    """The message of an error's body, in one line."""
    try:
        error = json.loads(body)
        error = error.get("error", error) if isinstance(error, dict) else error
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:500] or "no message"
