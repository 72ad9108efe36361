"""Bodies on their way in, of bounded size and time, and streams on their way out, to clients that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.serve.answers import Answer, event
from infer.serve.calls import RunningCall
from infer.serve.errors import ApiError
from infer.serve.gate import Record
from infer.serve.settings import Limits

_SEND_SECONDS = 60.0
"""A reader that takes nothing for so long is taken to be gone."""
Result = TypeVar("Result")


class EventStream(Response):
    """A call's answer as server-sent events. Its slots are free as soon as the client, or the time for it, is gone."""

    media_type = "text/event-stream"

    def __init__(
        self, running: RunningCall, answer: Answer, record: Record, *, deadline: float, seconds: float
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._running = running
        self._answer = answer
        self._record = record
        self._deadline = deadline
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        finally:
            self._running.cancel()
            self._record.num_completion_tokens = self._answer.num_completion_tokens

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self._deadline):
                async for news in self._running.news():
                    data = self._answer.events(news)
                    if data:
                        await _send_part(send, data)
            data = self._answer.end()
        except TimeoutError:
            data = _failed(ApiError.timeout(self._seconds))
        except ApiError as error:
            data = _failed(error)
        await _send_part(send, data, more=False)


def _failed(error: ApiError) -> bytes:
    """The last event of a stream that went wrong. No [DONE] follows: the answer is not complete."""
    return event(error.body)


async def _send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(_SEND_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        raise ConnectionAbortedError("the client takes nothing") from None


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The result of `work`, or None if the client went away before; then it is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limits: Limits) -> bytes:
    """A JSON body of bounded size, which must come in bounded time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            f"the content type is {kind or 'not given'}: expected application/json",
            status=415,
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        raise ApiError(f"the body was not complete after {limits.body_seconds:g} s", status=408) from None
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        f"the body has more than {limits.body_bytes} bytes, the most that this server takes",
        status=413,
        code="body_too_large",
    )
