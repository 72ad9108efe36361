"""Requests that nobody wrote: a fuzzer reads `/openapi.json` and sends what it says, and what it does not say.

Whatever comes, the server answers, never with a fault of its own, in a form that its description has, and it goes on
serving. Examples are drawn from a fixed seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.infer.serve.serving import Running, chat, served, toy_engine, toy_target

OPERATIONS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS: list[Any] = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A short context, so that requests that ask for all of it end soon."""
    with served(toy_engine(toy_target(max_length=64), max_requests=16), max_seconds=60.0) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def fuzz(api: Any, path: str, mode: GenerationMode, *, num_examples: int) -> int:
    """Send examples to an endpoint; returns how many it answered with 200."""
    num_accepted = 0

    @given(case=api[path]["POST"].as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        nonlocal num_accepted
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        num_accepted += response.status_code == 200

    send()
    return num_accepted


def check_all(server: Running, api: Any, *, num_examples: int) -> None:
    accepted = {path: [fuzz(api, path, mode, num_examples=num_examples) for mode in MODES] for path in OPERATIONS}
    assert all(right > wrong for right, wrong in accepted.values()), f"the description is not true: {accepted}"
    assert server.get("/health").json() == {"status": "ok"}
    assert server.post("/v1/chat/completions", chat()).status_code == 200


def test_the_description_is_complete(server: Running) -> None:
    described = server.get("/openapi.json").json()
    assert set(OPERATIONS) < set(described["paths"])
    request = described["components"]["schemas"]["ChatRequest"]
    assert {"messages", "temperature", "draft", "acceptance", "tree", "tag", *chat()} < set(request["properties"])
    assert request["additionalProperties"] is False


def test_some_requests_that_nobody_wrote(server: Running, api: Any) -> None:
    check_all(server, api, num_examples=40)


@pytest.mark.slow
def test_many_requests_that_nobody_wrote(server: Running, api: Any) -> None:
    check_all(server, api, num_examples=400)


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
