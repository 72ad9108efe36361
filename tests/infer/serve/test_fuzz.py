"""Requests that nobody wrote: a fuzzer reads `/openapi.json` and sends what it says, and what it does not say.

Whatever comes, the server answers, never with a fault of its own, in a form that its description has, and it goes on
serving. What the description allows is read; what it does not allow, nulls aside, is not served. Each of these is held
against every example and none against their number: how many of them a server accepts is chance, and which are drawn
depends on more than the seed (the library mixes in constants of whatever modules of this project are loaded by then).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from infer.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from infer.serve.reading import parse
from infer.serve.settings import Limits
from tests.infer.serve.serving import Running, chat, served, toy_engine, toy_target

MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SERVED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(max_tokens=4),
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [40, 41]},
}
"""A request to each endpoint that is surely answered."""
CHECKS: list[Any] = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
SECONDS = 600.0
"""Longest that a request may take, for the server and for who waits for it: far more than any does."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A short context, so that requests that ask for all of it end soon."""
    with served(toy_engine(toy_target(max_length=64), max_requests=16), max_seconds=SECONDS) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def tolerant_api(server: Running) -> Any:
    """The description with all that the server takes: null is like absent, under names that it does not know too."""
    told = server.get("/openapi.json").text
    more = told.replace('"additionalProperties":false', '"additionalProperties":{"type":"null"}')
    assert more != told
    api = schemathesis.openapi.from_dict(json.loads(more))
    api.config.update(base_url=server.url)
    return api


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def send(case: Any) -> Any:
    response = case.call(timeout=SECONDS)
    case.validate_response(response, checks=CHECKS)
    return response


def check_described(api: Any, path: str, *, num_examples: int) -> None:
    """What is described is read, as it is and (most of that contradicts itself) field by field in a request that is
    served."""
    names = sorted(MODELS[path].model_json_schema()["properties"])

    @given(case=api[path]["POST"].as_strategy(), chosen=st.sets(st.sampled_from(names), max_size=2))
    @examples(num_examples)
    def check(case: Any, chosen: set[str]) -> None:
        for body in (case.body, {**SERVED[path], **{name: case.body[name] for name in chosen & set(case.body)}}):
            case.body = body
            parse(MODELS[path], send(case).request.body, Limits())

    check()


def check_not_described(tolerant_api: Any, path: str, *, num_examples: int) -> None:
    """What is not described is not served."""

    @given(case=tolerant_api[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @examples(num_examples)
    def check(case: Any) -> None:
        assert send(case).status_code >= 400

    check()


def check_all(server: Running, api: Any, tolerant_api: Any, *, num_examples: int) -> None:
    for path, body in SERVED.items():
        check_described(api, path, num_examples=num_examples)
        check_not_described(tolerant_api, path, num_examples=num_examples)
        assert server.get("/health").json() == {"status": "ok"}
        assert server.post(path, body).status_code == 200


def test_the_description_is_complete(server: Running) -> None:
    described = server.get("/openapi.json").json()
    assert set(MODELS) < set(described["paths"])
    request = described["components"]["schemas"]["ChatRequest"]
    assert {"messages", "temperature", "draft", "acceptance", "tree", "tag", *chat()} < set(request["properties"])
    assert request["additionalProperties"] is False
    assert request["properties"]["logit_bias"]["anyOf"][0]["additionalProperties"] is False  # other keys are no tokens


def test_some_requests_that_nobody_wrote(server: Running, api: Any, tolerant_api: Any) -> None:
    check_all(server, api, tolerant_api, num_examples=25)


@pytest.mark.slow
def test_many_requests_that_nobody_wrote(server: Running, api: Any, tolerant_api: Any) -> None:
    check_all(server, api, tolerant_api, num_examples=400)


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 1 << 70, "", "x", "\x00", "\U0001f600" * 50, [], [[]], [None], {}, {"": {}},
    [1, "a"], {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"json": "{"},
    ["(", "["],
)  # fmt: skip


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_odd_values_in_every_field(server: Running, step: int) -> None:
    """Every field with every odd value (or two or three of them): an answer, or a refusal that says what it refuses."""
    fields = server.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    with server.client() as client:
        for place, name in enumerate(fields):
            for value in ODD[place % step :: step]:
                response = client.post("/v1/chat/completions", json={**chat(max_tokens=2), name: value})
                assert response.status_code < 500, (name, value, response.text)
                if response.status_code != 200 and response.headers["content-type"] == "application/json":
                    assert response.json()["error"]["message"]


def test_bytes_that_are_no_request(server: Running) -> None:
    """A body with bytes exchanged at random is refused or, by chance, served."""
    rng = random.Random(0)
    body = json.dumps(chat("Hello", max_tokens=2, stop=["a"], response_format={"type": "text"})).encode()
    with server.client() as client:
        for _ in range(60):
            odd = bytearray(body)
            for _ in range(rng.randint(1, 4)):
                odd[rng.randrange(len(odd))] = rng.choice(b'{}[]",:0e-\\u\xff\x00')
            response = client.post(
                "/v1/chat/completions", content=bytes(odd), headers={"content-type": "application/json"}
            )
            assert response.status_code < 500, (bytes(odd), response.text)
