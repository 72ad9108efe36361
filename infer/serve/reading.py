"""How a body becomes a request (`infer.serve.protocol`): strict JSON of bounded depth, mistakes in its own terms."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from infer.chat import is_unicode
from infer.serve.errors import ApiError
from infer.serve.settings import Limits

_MAX_KEYS = 10_000
_MAX_EXACT = 1 << 53

# What a field of several types takes: pydantic's own words would be one complaint for each of them.
_EXPECTED = {
    "stop": "a text or a list of texts",
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
    "draft": "true, false or {'max_nodes': N, 'max_depth': D}",
    "json": "a JSON schema, as an object or a text",
    "guided_json": "a JSON schema, as an object or a text",
}
ModelType = TypeVar("ModelType", bound=BaseModel)


def parse(model: type[ModelType], body: bytes, limits: Limits) -> ModelType:
    """The request that a body holds; ApiError says what is wrong with it."""
    value = read_json(body, max_depth=limits.depth)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_mistake(error, model) from None


def read_json(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """A body's JSON object. NaN and Infinity are no JSON, and of two equal keys it would be chance which one counts."""
    try:
        value = json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_number, object_pairs_hook=_unique
        )
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    _check_depth(value, max_depth)
    # Only escapes can spell half a surrogate pair, which no tokeniser, parser or log takes.
    if b"\\u" in body and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ApiError("the body holds half a surrogate pair, which is no character", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _number(text: str) -> float | int:
    """A number with a point or an exponent; 2.0 is the integer 2, as JSON schemas have it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is too large for a number")
    return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT else number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, more than {_MAX_KEYS}")
    value = dict(pairs)
    if len(value) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.80} stands twice in one object")
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    """Templates and schema compilers walk a value by recursion: its depth is bounded before they see it."""
    level = [value]
    for _ in range(max_depth):
        level = [child for one in level for child in _children(one)]
        if not level:
            return
    raise _too_deep(max_depth)


def _children(value: Any) -> Sequence[Any]:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


def _too_deep(max_depth: int) -> ApiError:
    return ApiError(f"the body is nested more than {max_depth} levels deep", code="invalid_json")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def _first_mistake(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first of pydantic's complaints, in the terms of the request."""
    mistakes = error.errors(include_url=False)
    field = mistakes[0]["loc"][:1]
    # Of the branches of a union, the one that fits best complains at the deepest place.
    mistake = max((one for one in mistakes if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    path, owner = _place(mistake["loc"], model)
    if mistake["type"] == "extra_forbidden":
        return _unknown(path, owner)
    name = path[-1] if path else ""
    param = ".".join(map(str, path)) or None
    if mistake["type"] == "missing":
        return ApiError(f"{param} is missing", param=param, code="missing_parameter")
    several = _last_name(path)
    given = _shown(mistake["input"])
    if several in _EXPECTED:
        while path[-1] != several:  # a place within: which branch it was meant for, nobody knows
            path.pop()
            given = "something else in it"
        param = ".".join(map(str, path))
        return ApiError(f"{param} must be {_EXPECTED[several]}, got {given}", param=param, code="invalid_value")
    if name == "type" and "content" in path:
        return ApiError(f"{param} is {given}: the model reads text parts only", param=param, code="invalid_value")
    told = re.sub("^[A-Z][a-z]+ should", "must", mistake["msg"])
    return ApiError(f"{param} {told}, got {given}", param=param, code="invalid_value")


def _place(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel] | None]:
    """The part of pydantic's place that stands in the request (it names branches of unions as well), and the model in
    which its last name lies."""
    path: list[int | str] = []
    owner: type[BaseModel] | None = model
    candidates: list[type[BaseModel]] = [model]
    for step in loc:
        if isinstance(step, int):
            path.append(step)
            continue
        found = next((one for one in candidates if step in _names(one)), None)
        if found is not None:
            owner, candidates = found, _models_in(_names(found)[step])
            path.append(step)
        elif candidates and step not in {one.__name__ for one in candidates} and not _is_branch(step):
            owner = candidates[0]
            path.append(step)
    return path, owner


def _names(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _is_branch(step: str) -> bool:
    return step in ("str", "bool", "int", "float", "[key]") or step.startswith(
        ("list[", "dict[", "constrained-", "literal[")
    )


def _last_name(path: Sequence[int | str]) -> str | None:
    return next((step for step in reversed(path) if isinstance(step, str)), None)


def _unknown(path: Sequence[int | str], owner: type[BaseModel] | None) -> ApiError:
    name = str(path[-1])
    known = [] if owner is None else list(_names(owner))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    place = f" in {'.'.join(map(str, path[:-1]))}" if len(path) > 1 else ""
    return ApiError(
        f"the parameter {name!r:.80}{place} is not supported{hint}",
        param=".".join(map(str, path))[:200],
        code="unsupported_parameter",
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list"
    return f"{value!r:.80}"
