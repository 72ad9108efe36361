"""A real server on a port of its own, in a thread of this process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from infer.async_engine import AsyncEngine
from infer.cost import CostModel
from infer.drafters import Drafter, NgramDrafter, TreeSettings
from infer.engine import Engine
from infer.scheduling import Sharing
from infer.serve.app import create_app
from infer.serve.metrics import Metrics
from infer.serve.run import bounded
from infer.serve.settings import ServeSettings
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}, called in <tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that lists tools and prints calls."""


def toy_target(*, template: str | None = TOOL_TEMPLATE, max_length: int = 512, **tokenizer: Any) -> TargetModel:
    """A random model that writes bytes."""
    tokens = toy_tokenizer(**({} if template is None else {"template": template}), **tokenizer)
    if template is None:
        tokens.chat_template = None
    model = make_tiny_model(
        "llama",
        vocab_size=len(tokens),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        max_position_embeddings=max_length,
    )
    return TargetModel.wrap(model, tokens)


def toy_engine(target: TargetModel | None = None, drafter: Drafter | None = None, **options: Any) -> Engine:
    """Four requests at once, drafted by a lookup unless told otherwise, whatever the clock says of drafts."""
    target = target or toy_target()
    tree = TreeSettings(max_nodes=8, max_depth=4, adaptive=False)
    sharing = Sharing.among_callers(follow_clock=False)
    defaults = {"max_requests": 4, "max_length": target.max_length, "tree": tree, "cost": CostModel.free()}
    return Engine(target, drafter or NgramDrafter(), **{**defaults, "sharing": sharing, **options})


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that runs, and what is in it."""

    url: str
    engine: AsyncEngine
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)


@contextlib.contextmanager
def served(
    engine: Engine, *, max_waiting: int = 64, send_buffer: int | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve an engine until the block is left; nothing may be left open by then. send_buffer: bytes that the system
    keeps for a client which does not read."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    ready: list[Running] = []
    is_up = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(engine, listener, max_waiting, settings, ready, is_up)), daemon=True
    )
    thread.start()
    is_up.wait(60)
    assert ready, "the server did not come up"
    try:
        yield ready[0]
    finally:
        ready[0].loop.call_soon_threadsafe(setattr, ready[0].server, "should_exit", True)
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


async def _serve(
    engine: Engine,
    listener: socket.socket,
    max_waiting: int,
    settings: dict[str, Any],
    ready: list[Running],
    is_up: threading.Event,
) -> None:
    try:
        async with AsyncEngine(engine, max_waiting=max_waiting) as serving:
            app = create_app(
                serving, ServeSettings(**{"model_names": ("toy",), **settings}), metrics=Metrics(status=serving.status)
            )
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=600)
            )
            server.config.load()
            server.config.http_protocol_class = bounded(server.config.http_protocol_class, 1000)
            server.lifespan = server.config.lifespan_class(server.config)
            with socket_closing(listener):
                await server.startup([listener])
                port = listener.getsockname()[1]
                ready.append(
                    Running(
                        url=f"http://127.0.0.1:{port}", engine=serving, server=server, loop=asyncio.get_running_loop()
                    )
                )
                is_up.set()
                await server.main_loop()
                await server.shutdown([listener])
    finally:
        is_up.set()


@contextlib.contextmanager
def socket_closing(listener: socket.socket) -> Iterator[None]:
    try:
        yield
    finally:
        listener.close()


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A short greedy chat that runs to its limit."""
    defaults = {"model": "toy", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **defaults, **fields}


def wait_until(condition: Callable[[], Any], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
