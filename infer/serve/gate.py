"""What every request passes on its way in and out: its id, the key, the number of requests at once, faults, counts.

It is plain ASGI: nothing is buffered, and a client's going away reaches the endpoint as it comes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.serve.errors import LOGGER, ApiError
from infer.serve.page_files import PAGE_FILES
from infer.serve.settings import ServeSettings

OPEN_PATHS = frozenset({"/health", *PAGE_FILES})
"""Answered without a key: the page asks for it."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ResponseCounter(Protocol):
    def observe_response(self, route: str, status: int) -> None: ...


@dataclass(kw_only=True)
class Record:
    """One HTTP request, as the log tells it; endpoints fill in the tokens."""

    request_id: str
    route: str = "unknown"
    status: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def line(self) -> str:
        seconds = time.perf_counter() - self.began
        tokens = f"{self.num_prompt_tokens}+{self.num_completion_tokens} tokens"
        return f"{self.request_id} {self.route} {self.status or 499} {tokens} {seconds:.3f} s"


class Gate:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, counter: ResponseCounter | None) -> None:
        self._app = app
        self._settings = settings
        self._counter = counter
        self._keys = [key.encode() for key in settings.api_keys]
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(request_id=_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record
        sender = _Sender(send, record)
        self._num_open += 1
        try:
            await self._answer(scope, receive, sender)
        finally:
            self._num_open -= 1
            self._tell(scope, record)

    async def _answer(self, scope: Scope, receive: Receive, send: _Sender) -> None:
        try:
            error = self._refusal(scope)
            if error is None:
                await self._app(scope, receive, send)
                return
        except (ConnectionError, ClientDisconnect):
            return  # the client is gone
        except Exception as fault:
            _log_fault(send.record, fault)
            error = ApiError.internal()
            if send.has_begun:
                return  # unfinished: the server closes the connection, so that nobody takes this for the end
        await error.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if self._keys and path not in OPEN_PATHS and not self._has_key(Headers(scope=scope)):
            return ApiError(
                "no valid API key: give one as the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self._num_open > self._settings.max_connections and path != "/health":
            return ApiError(
                f"{self._settings.max_connections} requests are under way, as many as this server takes at once",
                status=503,
                code="too_many_connections",
                headers={"retry-after": "1"},
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        given = bearer_key(headers)
        # Every key is compared, whichever fits: the time tells nothing.
        return any([hmac.compare_digest(given, key) for key in self._keys])

    def _tell(self, scope: Scope, record: Record) -> None:
        record.route = getattr(scope.get("route"), "path", "unknown")
        if self._counter is not None:
            self._counter.observe_response(record.route, record.status or 499)
        if self._settings.log_requests:
            print(record.line(), file=sys.stderr, flush=True)


class _Sender:
    """Sends on, with the request's id among the headers."""

    def __init__(self, send: Send, record: Record) -> None:
        self._send = send
        self.record = record
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.record.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.record.request_id
            headers.setdefault("cache-control", "no-store")
            headers["x-content-type-options"] = "nosniff"
        await self._send(message)


def bearer_key(headers: Headers) -> bytes:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""


def owner_of(scope: Scope) -> str:
    """Whose a request is if it does not say: its key's (by a hash, which may be shown), else its address's."""
    key = bearer_key(Headers(scope=scope))
    if key:
        return f"key {hashlib.sha256(key).hexdigest()[:12]}"
    client = scope.get("client")
    return client[0] if client else ""


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _log_fault(record: Record, fault: Exception) -> None:
    """Where it happened, and not what was said: messages may quote a prompt."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(fault.__traceback__)]
    LOGGER.error("request %s failed: %s at %s", record.request_id, type(fault).__name__, " < ".join(places[::-1]))
