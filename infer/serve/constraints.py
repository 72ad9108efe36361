"""The many ways in which clients say what an answer must be: OpenAI's response_format, vLLM's of every age."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.serve.errors import ApiError
from infer.serve.protocol import SamplingFields


def constraints_of(request: SamplingFields) -> dict[str, tuple[str, str]]:
    """Every constraint that a request gives, which may be one: the engine's name of its kind and its text, by the
    client's name of it."""
    given: dict[str, tuple[str, str] | None] = {
        "response_format": _response_format(request),
        "regex": _text("regex", request.regex),
        "grammar": _text("grammar", request.grammar),
        "guided_json": _schema(request.guided_json),
        "guided_regex": _text("regex", request.guided_regex),
        "guided_choice": _choice("guided_choice", request.guided_choice),
        "guided_grammar": _text("grammar", request.guided_grammar),
    }
    structured = request.structured_outputs
    if structured is not None:
        given["structured_outputs.json"] = _schema(structured.json_)
        given["structured_outputs.regex"] = _text("regex", structured.regex)
        given["structured_outputs.choice"] = _choice("structured_outputs.choice", structured.choice)
        given["structured_outputs.grammar"] = _text("grammar", structured.grammar)
        given["structured_outputs.json_object"] = _schema({"type": "object"} if structured.json_object else None)
        if structured.json_object is None and not any(given[name] for name in given if "." in name):
            raise ApiError("structured_outputs is empty: give one constraint", param="structured_outputs")
    return {name: one for name, one in given.items() if one is not None}


def _response_format(request: SamplingFields) -> tuple[str, str] | None:
    wanted = request.response_format
    if wanted is None:
        return None
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise ApiError(
            "response_format has a json_schema if its type is 'json_schema', and only then",
            param="response_format.json_schema",
        )
    if wanted.json_schema is not None:
        return _schema(wanted.json_schema.schema_)
    return _schema({"type": "object"}) if wanted.type == "json_object" else None


def _schema(schema: Mapping[str, Any] | str | None) -> tuple[str, str] | None:
    if schema is None or isinstance(schema, str):
        return _text("json_schema", schema)
    return "json_schema", json.dumps(schema, separators=(",", ":"))


def _text(kind: str, text: str | None) -> tuple[str, str] | None:
    return None if text is None else (kind, text)


def _choice(name: str, choices: Sequence[str] | None) -> tuple[str, str] | None:
    if choices is None:
        return None
    if not choices or not all(choices):
        raise ApiError(f"{name} must hold texts that are not empty", param=name)
    return "grammar", "start: " + " | ".join(map(json.dumps, dict.fromkeys(choices)))
