"""A server that answers as a script says: for tests of clients, also of how they take broken answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Part = bytes | float
"""Bytes to send, or seconds to wait."""


@dataclass(kw_only=True)
class MockServer:
    """`respond(path, body)` gives the parts of the whole HTTP answer; the connection is closed behind them."""

    url: str
    requests: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)  # path, body, head
    most_at_once: int = 0


def json_answer(value: Any, *, status: int = 200) -> list[Part]:
    body = json.dumps(value).encode()
    return [f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body]


def stream_answer(events: Sequence[dict[str, Any] | float], *, done: bool = True) -> list[Part]:
    """Server-sent events in chunked transfer; numbers are seconds of waiting."""
    parts: list[Part] = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"]
    for event in events:
        parts.append(event if isinstance(event, float) else _chunk(f"data: {json.dumps(event)}\n\n".encode()))
    return [*parts, _chunk(b": a comment\n\ndata: [DONE]\n\n"), b"0\r\n\r\n"] if done else parts


def text_events(blocks: Sequence[Sequence[str]], *, details: bool, wait: float = 0.0) -> list[dict[str, Any] | float]:
    """An answer in blocks of tokens, as this project's server streams it (`details`) or as any other does."""
    events: list[dict[str, Any] | float] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    number = 0
    for block in blocks:
        tokens = [{"id": number + i, "text": text, "drafted": i < len(block) - 1} for i, text in enumerate(block)]
        number += len(block)
        choice: dict[str, Any] = {"index": 0, "delta": {"content": "".join(block)}, "finish_reason": None}
        if details:
            choice["acceptance"] = {"tokens": tokens, "num_nodes": len(block), "depth": len(block)}
        events += [wait, {"choices": [choice]}] if wait else [{"choices": [choice]}]
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if details:
        last["acceptance"] = {
            "num_rounds": len(blocks) - 1,
            "num_drafts": sum(len(block) > 1 for block in blocks),
            "num_accepted_tokens": sum(len(block) - 1 for block in blocks),
        }
    return [*events, last, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": number}}]


@contextmanager
def mock_server(respond: Callable[[str, dict[str, Any]], Sequence[Part]]) -> Iterator[MockServer]:
    """Serve in a thread of its own until the block ends."""
    server = MockServer(url="")
    started = threading.Event()
    ends: list[Callable[[], None]] = []
    running = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((line for line in head.lower().split("\r\n") if line.startswith("content-length:")), ":0")
            body = await reader.readexactly(int(length.split(":")[1]))
            path = head.split(" ")[1]
            running += 1
            server.most_at_once = max(server.most_at_once, running)
            server.requests.append((path, json.loads(body or b"{}"), head))
            for part in respond(path, json.loads(body or b"{}")):
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            running -= 1
            writer.close()

    async def listen() -> None:
        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        ends.append(lambda: loop.call_soon_threadsafe(end.set))
        started.set()
        await end.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        ends[0]()
        thread.join()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
