"""The one form of every error: `{"error": {"message", "type", "param", "code"}}`, as OpenAI's API has it.

- 400 the request cannot be served as it is (`param` names the part); 401 no or a wrong key; 404 no such model or path
- 405, 408, 413, 415 what HTTP says
- 429 the waiting line is full, 503 the server is draining or has too many connections: with Retry-After
- 500 our fault; 504 the request took longer than the server allows
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

LOGGER = logging.getLogger("headstart.serve")

INTERNAL = "the server failed to answer this request; its log says why"
_MAX_MESSAGE = 1000

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: ValueError, names: Mapping[str, str]) -> ApiError:
        """A mistake of the request's, as the engine words it. Its messages begin with the parameter's name: `names` has
        the engine's name of each, and what the client calls it."""
        message = " ".join(str(error).split())
        first = re.match(r"\w+", message)
        return cls(message, param=names.get(first.group()) if first else None)

    @classmethod
    def busy(cls, retry_after: int) -> ApiError:
        headers = {"retry-after": str(retry_after)}
        return cls(
            f"too many requests are waiting: try again in {retry_after} s",
            status=429,
            code="queue_full",
            headers=headers,
        )

    @classmethod
    def draining(cls) -> ApiError:
        return cls._closing("the server is shutting down and takes no new requests")

    @classmethod
    def cut_off(cls) -> ApiError:
        return cls._closing(
            "the answer was cut off: the server is shutting down, and the time for what was under way is over"
        )

    @classmethod
    def _closing(cls, message: str) -> ApiError:
        return cls(message, status=503, code="draining", headers={"retry-after": "5"})

    @classmethod
    def timeout(cls, seconds: float) -> ApiError:
        """Clients that repeat what failed would only wait as long again: they are told not to."""
        return cls(
            f"the answer was not complete after {seconds:g} s, waiting included, the longest that this server gives a "
            "request: ask for fewer tokens, or when it is less busy",
            status=504,
            code="timeout",
            headers={"x-should-retry": "false"},
        )

    @classmethod
    def internal(cls) -> ApiError:
        return cls(INTERNAL, status=500, code="internal_error")

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body, status=self.status, headers=self.headers)


def to_json(value: Any) -> str:
    """Compact JSON in ASCII: so no line separator of any client's reader stands in a text, and half a surrogate pair
    out of a request can be told back."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    """Give every error of the app the one form."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path}: see /openapi.json for what there is",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    return ApiError(message, status=error.status_code, headers=error.headers).response()


def _type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error")
