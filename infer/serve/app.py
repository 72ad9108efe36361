"""The HTTP application: parse -> prepare -> submit -> stream or collect.

    body -> protocol (a checked request) -> prepare (token ids and parameters, in a worker thread)
         -> calls (tickets of the engine) -> answers (a body, or chunks as rounds end)

A client that goes away cancels its call, streamed or not. Nothing of a prompt is logged.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from infer.async_engine import AsyncEngine
from infer.engine import Engine
from infer.machine import dtype_name, headstart_version
from infer.serve import errors, openapi
from infer.serve.acceptance import AcceptanceLog
from infer.serve.answers import Answer
from infer.serve.calls import RunningCall
from infer.serve.errors import ApiError, json_response
from infer.serve.gate import Gate, Record, owner_of
from infer.serve.metrics import Metrics
from infer.serve.page_files import PAGE_FILES, page_file
from infer.serve.prepare import Call, Preparer
from infer.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from infer.serve.reading import parse
from infer.serve.recent import Recent
from infer.serve.settings import ServeSettings
from infer.serve.spelling import Spelling
from infer.serve.transport import EventStream, read_body, while_connected

_SMALL_BODY = 1 << 16
"""Bodies up to so many bytes are parsed at once; larger ones in a worker thread."""

ModelType = TypeVar("ModelType", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
CallRequest = TypeVar("CallRequest", ChatRequest, CompletionRequest)


def create_app(
    engine: AsyncEngine,
    settings: ServeSettings,
    *,
    metrics: Metrics | None = None,
    acceptance: AcceptanceLog | None = None,
) -> FastAPI:
    """The application over an engine. `metrics` is shown at `/metrics` and told of responses, `acceptance` is shown at
    `/acceptance`; both listen to the engine from now on."""
    app = FastAPI(
        title="headstart",
        version=_version(),
        description="Lossless speculative decoding behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    service = Service(engine, settings, metrics, acceptance)
    errors.install(app)
    _add_routes(app, service)
    openapi.install(app)
    app.add_middleware(Gate, settings=settings, counter=metrics)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], **openapi.chat())
    app.add_api_route("/v1/completions", service.completion, methods=["POST"], **openapi.completion())
    app.add_api_route("/tokenize", service.tokenize, methods=["POST"], **openapi.tokenize())
    app.add_api_route("/detokenize", service.detokenize, methods=["POST"], **openapi.detokenize())
    app.add_api_route("/v1/models", service.models, methods=["GET"], **openapi.told("the models"))
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"], **openapi.told("one model"))
    app.add_api_route("/health", service.health, methods=["GET"], **openapi.told("whether requests are taken"))
    app.add_api_route("/version", service.version, methods=["GET"], **openapi.told("headstart's version"))
    app.add_api_route("/status", service.status, methods=["GET"], **openapi.told("the engine's state"))
    app.add_api_route("/metrics", service.metrics, methods=["GET"], **openapi.told("metrics", kind="text/plain"))
    app.add_api_route("/acceptance", service.acceptance, methods=["GET"], **openapi.told("curves of acceptance"))
    for path, name in PAGE_FILES.items():
        app.add_api_route(path, page_file(name), methods=["GET", "HEAD"], include_in_schema=False)


class Service:
    """The endpoints."""

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, metrics: Metrics | None, acceptance: AcceptanceLog | None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._acceptance = acceptance
        self._preparer = Preparer(engine.engine, settings)
        self._spelling = Spelling(engine.engine.target.tokenizer)
        self._recent = Recent() if metrics is None else metrics.recent
        self._created = int(time.time())
        self._began = time.monotonic()
        self._is_row_invariant = engine.engine.target.is_row_invariant  # found out before the engine's thread computes
        for listener in (metrics or self._recent, acceptance):
            if listener is not None:
                engine.add_listener(listener)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, self._preparer.chat)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, self._preparer.completion)

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        return json_response(await asyncio.to_thread(self._preparer.tokenize, asked))

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        self._preparer.check_model(asked.model)
        return json_response({"prompt": await asyncio.to_thread(self._preparer.detokenize, asked.tokens)})

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._settings.model_names]})

    async def model(self, name: str) -> Response:
        self._preparer.check_model(name)
        return json_response(self._model(name))

    async def health(self) -> Response:
        status = self._engine.status()
        state = "draining" if status.is_draining else "ok" if status.is_alive else "dead"
        return json_response({"status": state}, status=200 if state == "ok" else 503)

    async def version(self) -> Response:
        return json_response({"version": _version()})

    async def status(self) -> Response:
        engine, recent = self._engine.engine, self._recent
        mean = recent.mean_accepted_length
        told = {
            **asdict(self._engine.status()),
            "uptime_seconds": time.monotonic() - self._began,
            "tokens_per_second": recent.tokens_per_second,
            "mean_accepted_length": mean if math.isfinite(mean) else None,
            "plain_tokens_per_second": _plain_speed(engine),
            "model": self._settings.model_name,
            "drafter": _drafter_name(engine),
        }
        return json_response(told)

    async def metrics(self) -> Response:
        if self._metrics is None:
            raise ApiError("this server keeps no metrics", status=404)
        text = await asyncio.to_thread(self._metrics.render)
        return Response(text, headers={"content-type": self._metrics.content_type})

    async def acceptance(self) -> Response:
        if self._acceptance is None:
            raise ApiError("this server keeps no acceptance curves", status=404)
        return json_response(await asyncio.to_thread(self._acceptance.snapshot))

    async def _read(self, request: Request, model: type[ModelType]) -> ModelType:
        limits = self._settings.limits
        body = await read_body(request, limits)
        if len(body) <= _SMALL_BODY:
            return parse(model, body, limits)
        return await asyncio.to_thread(parse, model, body, limits)

    async def _answer(self, request: Request, model: type[CallRequest], prepare: Callable[..., Call]) -> Response:
        deadline = asyncio.get_running_loop().time() + self._settings.max_seconds
        asked = await self._read(request, model)
        try:
            async with asyncio.timeout_at(deadline):
                call = await asyncio.to_thread(prepare, asked, owner=owner_of(request.scope))
                running = await RunningCall.submit(self._engine, call)
        except TimeoutError:
            raise ApiError.timeout(self._settings.max_seconds) from None
        record: Record = request.state.record
        record.num_prompt_tokens = running.num_prompt_tokens
        answer = Answer(call, self._spelling, self._settings)
        if call.stream:
            return EventStream(running, answer, record, deadline=deadline, seconds=self._settings.max_seconds)
        return await self._collect(request, running, answer, record, deadline)

    async def _collect(
        self, request: Request, running: RunningCall, answer: Answer, record: Record, deadline: float
    ) -> Response:
        try:
            async with asyncio.timeout_at(deadline):
                completions = await while_connected(request.receive, running.completions())
        except TimeoutError:
            raise ApiError.timeout(self._settings.max_seconds) from None
        finally:
            running.cancel()
        if completions is None:
            return Response(status_code=499)  # nobody reads it, but the log tells it
        body = answer.body(completions)
        record.num_completion_tokens = answer.num_completion_tokens
        return json_response(body)

    def _model(self, name: str) -> dict[str, Any]:
        engine = self._engine.engine
        has_died = engine.drafter is not None and not self._engine.status().is_drafting
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "headstart",
            "root": self._settings.model_name,
            "parent": None,
            "max_model_len": self._preparer.max_length,
            "headstart": {
                "drafter": _drafter_name(engine),
                "exactness": engine.exactness,
                "max_nodes": engine.tree.max_nodes,
                "max_depth": engine.tree.max_depth,
                "dtype": dtype_name(engine.target.dtype),
                "lossless": engine.exactness != "lossy",
                "row_invariant": self._is_row_invariant,
                "dead": has_died,
            },
        }


def _version() -> str:
    return headstart_version() or "0+source"


def _drafter_name(engine: Engine) -> str:
    return "none" if engine.drafter is None else engine.drafter.name


def _plain_speed(engine: Engine) -> float | None:
    """Tokens a second that one request would have without drafts, by the cost table; None where none was measured (it
    is when slots are reserved for a drafter whose trees are fitted to it)."""
    if engine.drafter is None or not engine.tree.adaptive or engine.max_length is None:
        return None
    return 1000.0 / engine.cost.at(batch=1).target_milliseconds(1)
