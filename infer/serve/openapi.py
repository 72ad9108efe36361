"""What `/openapi.json` says: the bodies that endpoints take, as their models check them, and the form of errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from infer.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
        "acceptance": {"type": "object"},
    },
}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_ANSWERS = {"application/json": _ANSWER, "text/event-stream": _EVENT}
_TOKENS = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}},
}
_TEXT = {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}


def chat() -> dict[str, Any]:
    return _endpoint("answer a chat", ChatRequest, _ANSWERS)


def completion() -> dict[str, Any]:
    return _endpoint("continue a text", CompletionRequest, _ANSWERS)


def tokenize() -> dict[str, Any]:
    return _endpoint("the tokens of a text or a chat", TokenizeRequest, {"application/json": _TOKENS})


def detokenize() -> dict[str, Any]:
    return _endpoint("the text of tokens", DetokenizeRequest, {"application/json": _TEXT})


def told(summary: str, *, kind: str = "application/json") -> dict[str, Any]:
    """An endpoint without a body."""
    schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
    return {"summary": summary, "response_model": None, "responses": _responses({kind: schema})}


def install(app: FastAPI) -> None:
    """Let the app's description hold the models of bodies, which FastAPI does not see."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
                schemas.update(_schemas(model))
            schemas["Error"] = _ERROR
            description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            description["security"] = [{"key": []}, {}]
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _endpoint(summary: str, model: type[BaseModel], answers: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    return {
        "summary": summary,
        "response_model": None,
        "responses": _responses(answers),
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def _responses(answers: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {
        200: {"description": "the answer", "content": {kind: {"schema": schema} for kind, schema in answers.items()}},
        "default": {"description": "what is wrong", "content": error},
    }


def _schemas(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template=_REFERENCE)
    return {**schema.pop("$defs", {}), model.__name__: schema}
