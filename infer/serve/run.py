"""The process around the application: its socket, its signals, its end.

The first SIGTERM or SIGINT drains: requests at hand go on, new ones are refused (503, and so says `/health`), and when
all are answered, or the time for it is over, the server stops and the status is 0. A second one ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from infer.async_engine import AsyncEngine
from infer.engine import Engine
from infer.serve.app import create_app
from infer.serve.metrics import Metrics
from infer.serve.settings import ServeSettings

if TYPE_CHECKING:
    from infer.learning import Learner
    from infer.serve.acceptance import AcceptanceLog

Notice = Callable[[str], None]

_BACKLOG = 1024
_DEAD_CLIENT_MILLISECONDS = 60_000
"""What a client's machine does not acknowledge for so long closes the connection, and frees what it held."""
_SILENT_SECONDS = 30.0
_MOST_HEAD_BYTES = 1 << 20
"""More than that of a request's head is not read on."""
_SPARE_CONNECTIONS = 256
"""Connections that may be open beside those of requests under way: they are kept for the next request."""
_CLOSING_SECONDS = 5
_KEEP_ALIVE_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Process:
    """How the server's process behaves. drain_seconds: longest that requests at hand go on once it is to stop."""

    drain_seconds: float = 30.0
    max_waiting: int = 256
    certificate: Path | None = None
    certificate_key: Path | None = None

    def __post_init__(self) -> None:
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds must be at least 0, got {self.drain_seconds}")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together: give both")
        for path in (self.certificate, self.certificate_key):
            if path is not None and not path.is_file():
                raise ValueError(f"there is no file {path}")


def bind(host: str, port: int) -> socket.socket:
    """The server's socket, taken before anything is loaded: a port in use is told at once. It listens when the server
    is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit both
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_CLIENT_MILLISECONDS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port {port} on {host} cannot be taken ({(error.strerror or str(error)).lower()}): choose another with "
            "--port, or 0 for any free one"
        ) from None
    return listener


def serve(
    engine: Engine,
    settings: ServeSettings,
    process: Process,
    listener: socket.socket,
    *,
    notice: Notice,
    acceptance: AcceptanceLog | None = None,
    learner: Learner | None = None,
) -> int:
    """Serve until a signal says to stop; returns the exit status. learner: trains the head meanwhile."""
    with contextlib.closing(listener):
        try:
            config = _config(process)
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(_serve(config, engine, settings, process, listener, notice, acceptance, learner))
        finally:
            if acceptance is not None:
                acceptance.close()
    notice("stopped")
    return 0


def _config(process: Process) -> uvicorn.Config:
    return uvicorn.Config(
        "unset",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        ssl_certfile=process.certificate,
        ssl_keyfile=process.certificate_key,
    )


async def _serve(
    config: uvicorn.Config,
    engine: Engine,
    settings: ServeSettings,
    process: Process,
    listener: socket.socket,
    notice: Notice,
    acceptance: AcceptanceLog | None,
    learner: Learner | None,
) -> None:
    serving = AsyncEngine(engine, max_waiting=process.max_waiting, learner=learner)
    learning = None if learner is None else learner.status
    metrics = Metrics(status=serving.status, drift=acceptance, learning=learning)
    config.app = create_app(serving, settings, metrics=metrics, acceptance=acceptance)
    config.load()
    config.http_protocol_class = bounded(config.http_protocol_class, settings.max_connections + _SPARE_CONNECTIONS)
    server = _Server(config, on_start=lambda: _say_ready(settings, process, listener, notice))
    stopping = _Stopping(serving, server, process.drain_seconds, notice)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.on_signal, number)
    async with serving:
        await server.serve(sockets=[listener])


def bounded(protocol: Any, most: int) -> Any:
    """Uvicorn's `protocol` for at most so many connections at once, each of which sends the head of a request within a
    time and a size, and all of whose requests learn of its end."""

    class Bounded(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._num_heads = 0
            self._head_bytes: int | None = None  # of the head that is being read
            self._behind: list[Any] = []  # requests at hand, behind which the client has sent others already
            if len(self.connections) > most:
                transport.close()
            else:
                self.loop.call_later(_SILENT_SECONDS, self._close_if_silent, transport)

        def data_received(self, data: bytes) -> None:
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > _MOST_HEAD_BYTES:
                    self.transport.close()
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            self.loop.call_later(_SILENT_SECONDS, self._close_if_slow, self.transport, self._num_heads)

        def on_headers_complete(self) -> None:
            before = self.cycle
            super().on_headers_complete()
            self._num_heads += 1
            self._head_bytes = None
            self._behind = [cycle for cycle in (*self._behind, before) if cycle and not cycle.response_complete]

        def connection_lost(self, error: Exception | None) -> None:
            for cycle in self._behind:  # uvicorn itself tells the newest alone
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(error)

        def _close_if_silent(self, transport: Any) -> None:
            if self.cycle is None:  # no head of a request has been read
                transport.close()

        def _close_if_slow(self, transport: Any, num_heads: int) -> None:
            if self._num_heads == num_heads:
                transport.close()

    return Bounded


class _Server(uvicorn.Server):
    """Uvicorn's server without its handling of signals, which would close connections before they are answered."""

    def __init__(self, config: uvicorn.Config, *, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()


class _Stopping:
    """What signals do."""

    def __init__(self, engine: AsyncEngine, server: uvicorn.Server, drain_seconds: float, notice: Notice) -> None:
        self._engine = engine
        self._server = server
        self._drain_seconds = drain_seconds
        self._notice = notice
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        if self._draining is not None:
            self._notice("stopped at once")
            os._exit(128 + number)
        status = self._engine.status()
        self._notice(
            f"stopping: {status.num_running + status.num_waiting} requests are under way and have "
            f"{self._drain_seconds:g} s (once more to stop at once)"
        )
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._engine.close(drain_seconds=self._drain_seconds)
        self._server.should_exit = True


def _say_ready(settings: ServeSettings, process: Process, listener: socket.socket, notice: Notice) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if process.certificate is not None else "http"
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    if not settings.api_keys and not _is_loopback(host):
        notice(
            f"warning: {shown} can be reached from other machines, and no --api-key is set: anyone who can reach it "
            "can use it"
        )
    url = f"{scheme}://{shown}:{port}"
    notice(f"ready: {url}/v1 serves {settings.model_name}; the page is at {url}/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
