"""The server over HTTP, on a random model that writes bytes: streams, errors, keys, limits, cancellations, faults."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from infer.drafters.scripted import ScriptedDrafter, replay
from infer.sampling import SamplingParams
from infer.serve.page_files import PAGE_FILES, PAGE_FOLDER
from infer.serve.settings import Limits
from tests.infer.serve.serving import Running, chat, served, toy_engine, toy_target, wait_until
from tests.toy_tokenizer import SPECIALS

DONE = "[DONE]"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served(toy_engine()) as running:
        yield running


def events(running: Running, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """A stream's events; the last is `DONE` or an error."""
    with running.client(**options) as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = "".join(response.iter_text()).split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == DONE else json.loads(one) for one in data]


def streamed(running: Running, body: dict[str, Any]) -> dict[int, str]:
    """Each choice's joined deltas."""
    texts: dict[int, str] = {}
    *chunks, last = events(running, "/v1/chat/completions", body)
    assert last == DONE
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts


def whole(running: Running, body: dict[str, Any]) -> dict[int, str]:
    answer = ok(running.post("/v1/chat/completions", body))
    return {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, in the one form."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error


def raw_chat(body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire, for clients that do not behave."""
    content = json.dumps(body).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(content)}", "", ""]).encode() + content


def all_free(running: Running) -> bool:
    status = running.engine.status()
    return (status.num_running, status.num_waiting, status.num_free_slots) == (0, 0, status.num_slots)


BODIES = {
    "greedy": chat(),
    "sampled": chat(temperature=0.9, seed=7),
    "three samples": chat(temperature=1.0, seed=7, n=3),
    "stopped": chat(stop=["X", "\n"], temperature=1.0, seed=2, max_tokens=60),
    "long": chat("ab" * 20, max_tokens=80),
    "logprobs": chat(logprobs=True, top_logprobs=2),
    "acceptance": chat("ab" * 20, max_tokens=40, acceptance=True),
}


@pytest.mark.parametrize("name", BODIES)
def test_streamed_text_is_the_whole_answers(server: Running, name: str) -> None:
    assert streamed(server, BODIES[name]) == whole(server, BODIES[name])


@pytest.mark.parametrize("name", BODIES)
def test_drafts_do_not_change_an_answer(server: Running, name: str) -> None:
    assert whole(server, BODIES[name]) == whole(server, {**BODIES[name], "draft": False})


def test_the_answer_is_the_engines(server: Running) -> None:
    """What goes over the wire is what the engine says to the same prompt in the same process."""
    body = chat(temperature=0.8, seed=11, max_tokens=40)
    target = toy_target()
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)
    (completion,) = toy_engine(target).generate([body["messages"]], params)
    assert whole(server, body) == {0: completion.text}


def test_chunks_have_their_order(server: Running) -> None:
    """A role first, then texts that are not empty, then the reason of the end, then the usage."""
    body = chat(stream_options={"include_usage": True})
    *chunks, last = events(server, "/v1/chat/completions", body)
    assert last == DONE
    first, *middle, final, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert [chunk["choices"][0]["finish_reason"] for chunk in (*middle, final)] == [None] * len(middle) + ["length"]
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    counts = usage["usage"]
    assert counts["prompt_tokens"] + counts["completion_tokens"] == counts["total_tokens"] == 24 + 12
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stop", [None, (30, 33)])
def test_acceptance_tells_every_token(server: Running, stop: tuple[int, int] | None) -> None:
    """Texts of the tokens join to the answer (and the stop that was cut off it), counts add up to the usage, trees hold
    the path that was accepted. The drafter knows the answer, so that most tokens are drafted."""
    body = chat("ab" * 20, max_tokens=60, acceptance=True, tree=True, stream_options={"include_usage": True})
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (plain,) = toy_engine(toy_target()).generate([body["messages"]], params)
    if stop is not None:
        body["stop"] = plain.text[slice(*stop)]
    with served(toy_engine(drafter=ScriptedDrafter(replay(plain.token_ids, depth=4)))) as knowing:
        *chunks, usage, _ = events(knowing, "/v1/chat/completions", body)
    told = [choice for chunk in chunks for choice in chunk["choices"] if "acceptance" in choice]
    tokens = [token for choice in told for token in choice["acceptance"]["tokens"]]
    text = "".join(token["text"] for token in tokens)
    stops = {"stop": body["stop"]} if stop is not None else {}
    assert text.startswith(whole(server, chat("ab" * 20, max_tokens=60, **stops))[0] + body.get("stop", ""))
    assert (text == plain.text) == (stop is None)
    assert len(tokens) == usage["usage"]["completion_tokens"]
    summary = chunks[-1]["acceptance"]
    num_drafted = sum(token["drafted"] for token in tokens)
    assert num_drafted == summary["num_accepted_tokens"] == sum(summary["accepted_per_position"]) > 0
    details = usage["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == num_drafted
    assert details["rejected_prediction_tokens"] == summary["num_draft_tokens"] - num_drafted
    assert summary["mean_accepted_length"] == 1 + num_drafted / summary["num_drafts"]
    for choice in told:
        tree, drafted = choice["tree"], [one["id"] for one in choice["acceptance"]["tokens"] if one["drafted"]]
        assert choice["acceptance"]["num_nodes"] == len(tree["tokens"]) == len(tree["parents"]) == len(tree["values"])
        assert [tree["token_ids"][node] for node in tree["path"]][: len(drafted)] == drafted


def test_acceptance_of_a_whole_answer(server: Running) -> None:
    one = ok(server.post("/v1/chat/completions", chat(acceptance=True)))
    assert one["acceptance"]["lossless"] is True
    assert "acceptance" not in one["choices"][0]
    several = ok(server.post("/v1/chat/completions", chat(acceptance=True, n=2)))
    assert "acceptance" not in several
    assert all(choice["acceptance"]["exactness"] == "seed" for choice in several["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: Running, stream: bool) -> None:
    body = chat(logprobs=True, top_logprobs=3)
    if stream:
        chunks = events(server, "/v1/chat/completions", body)[:-1]
        entries = [
            entry
            for chunk in chunks
            if chunk["choices"][0]["logprobs"] is not None
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
    else:
        entries = ok(server.post("/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    text = whole(server, body)[0]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace") == text
    for entry in entries:
        best = entry["top_logprobs"]
        assert len(best) == 3
        assert best[0]["token"] == entry["token"]  # greedy
        assert [each["logprob"] for each in best] == sorted((each["logprob"] for each in best), reverse=True)


def test_completion_logprobs_and_echo(server: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    (choice,) = ok(server.post("/v1/completions", body))["choices"]
    told = choice["logprobs"]
    assert {len(told[name]) for name in told} == {8}
    assert told["text_offset"] == sorted(told["text_offset"])
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        is_shown = not token.startswith("bytes:") and token not in SPECIALS
        assert not is_shown or choice["text"][offset : offset + len(token)] == token
    plain = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    (echoed,) = ok(server.post("/v1/completions", {**plain, "echo": True}))["choices"]
    assert echoed["text"] == "abc" + choice["text"]
    chunks = events(server, "/v1/completions", {**plain, "echo": True})[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["text"]


def test_several_prompts_of_a_completion(server: Running) -> None:
    """Choice p * n + i is sample i of prompt p, streamed or not; each equals the prompt's own answer."""
    body = {"prompt": ["abab", "cdcd", "xyz"], "n": 2, "max_tokens": 9, "seed": 4, "ignore_eos": True}
    answer = ok(server.post("/v1/completions", body))
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert sorted(texts) == list(range(6))
    joined: dict[int, str] = {}
    for chunk in events(server, "/v1/completions", body)[:-1]:
        for choice in chunk["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    assert joined == texts
    for place, prompt in enumerate(body["prompt"]):
        alone = ok(server.post("/v1/completions", {**body, "prompt": prompt}))
        assert [choice["text"] for choice in alone["choices"]] == [texts[2 * place], texts[2 * place + 1]]
    assert answer["usage"]["prompt_tokens"] == 4 + 4 + 3
    assert answer["usage"]["completion_tokens"] == 6 * 9


def test_stop_is_told_and_cut_off(server: Running) -> None:
    text = whole(server, chat(max_tokens=40))[0]
    stop = text[20]
    answer = ok(server.post("/v1/chat/completions", chat(max_tokens=40, stop=stop)))["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    assert answer["message"]["content"] == text[: text.index(stop)]
    final = events(server, "/v1/chat/completions", chat(max_tokens=40, stop=stop))[-2]["choices"][0]
    assert (final["finish_reason"], final["stop_reason"]) == ("stop", stop)


def test_a_schema_is_kept(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = chat(
        ignore_eos=False,
        temperature=1,
        seed=1,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(whole(server, body)[0])["a"] in (1, 2)
    assert streamed(server, body) == whole(server, body)


def test_tool_calls_are_told_apart() -> None:
    """A call in the answer becomes `tool_calls`, streamed or not, and the reason of the end says so."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = 'Well <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    body = chat(ignore_eos=False, max_tokens=100, tools=[tool], guided_choice=[said])
    with served(toy_engine(), tools="hermes") as server:
        (choice,) = ok(server.post("/v1/chat/completions", body))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Well"
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        chunks = [chunk["choices"][0] for chunk in events(server, "/v1/chat/completions", body)[:-1]]
        deltas = [one for chunk in chunks for one in chunk["delta"].get("tool_calls", [])]
        assert [(one["index"], one["function"]["name"]) for one in deltas] == [(0, "add")]
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Well"
        assert chunks[-1]["finish_reason"] == "tool_calls"
        plain = chat(ignore_eos=False, max_tokens=100, guided_choice=[said])
        assert whole(server, plain) == {0: said}  # without tools a text is a text


def test_reasoning_is_told_apart() -> None:
    body = chat(ignore_eos=False, max_tokens=100, guided_choice=["<think>hm, so</think>yes"])
    with served(toy_engine(), reasoning="think") as server:
        (choice,) = ok(server.post("/v1/chat/completions", body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm, so"}
        deltas = [chunk["choices"][0]["delta"] for chunk in events(server, "/v1/chat/completions", body)[:-1]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, so"
        assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


def test_models_and_versions(server: Running) -> None:
    (model,) = ok(server.get("/v1/models"))["data"]
    assert model == ok(server.get("/v1/models/toy"))
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 512)
    assert model["headstart"]["drafter"] == "ngram"
    assert (model["headstart"]["lossless"], model["headstart"]["dead"]) == (True, False)
    assert error_of(server.get("/v1/models/other"))["code"] == "model_not_found"
    assert ok(server.get("/health")) == {"status": "ok"}
    assert ok(server.get("/version"))["version"]


def test_status_and_metrics_know_of_requests(server: Running) -> None:
    ok(server.post("/v1/chat/completions", chat("ab" * 20, max_tokens=40)))
    status = ok(server.get("/status"))
    assert status["num_running"] == status["num_waiting"] == 0
    assert status["tokens_per_second"] > 0
    assert status["mean_accepted_length"] > 1
    assert (status["model"], status["drafter"], status["is_draining"]) == ("toy", "ngram", False)
    text = server.get("/metrics").text
    assert "spec_decode_num_accepted_tokens_total" in text
    assert 'route="/v1/chat/completions",status="200"' in text


def test_tokens_and_texts(server: Running) -> None:
    answer = ok(server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}))
    assert (answer["count"], answer["max_model_len"]) == (3, 512)
    assert len(answer["token_strs"]) == 3
    assert ok(server.post("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": "aé"}
    rendered = ok(server.post("/tokenize", {"messages": chat()["messages"]}))
    assert rendered["count"] == ok(server.post("/v1/chat/completions", chat()))["usage"]["prompt_tokens"]
    assert error_of(server.post("/tokenize", {}))["param"] == "prompt"
    assert error_of(server.post("/detokenize", {"tokens": [10_000]}))["param"] == "tokens"


def test_the_page_is_there(server: Running) -> None:
    """All files of its folder, and none that it does not ask for."""
    assert set(PAGE_FILES.values()) == {path.name for path in PAGE_FOLDER.iterdir()}
    html = server.get("/").text
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path, name in PAGE_FILES.items():
        response = server.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kinds[name[name.index(".") :]])
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert path == "/" or f'"{name}"' in html


def test_every_error_has_the_one_form(server: Running) -> None:
    with server.client() as client:
        json_type = {"content-type": "application/json"}
        found = {
            404: client.get("/nothing"),
            405: client.get("/v1/completions"),
            415: client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}),
            400: client.post("/v1/completions", content=b"{", headers=json_type),
            413: client.post("/v1/completions", content=b" " * (9 << 20), headers=json_type),
        }
        for status, response in found.items():
            assert response.status_code == status
            error_of(response)
        parts = (b" " * (1 << 20) for _ in range(9))  # a length that is not told beforehand
        assert client.post("/v1/completions", content=parts, headers=json_type).status_code == 413


def test_a_key_guards_everything_but_health() -> None:
    """Wrong and missing keys are refused on every endpoint; the files of the page hold nothing to guard."""
    paths = ["/v1/models", "/v1/models/toy", "/version", "/status", "/metrics", "/openapi.json", "/acceptance", "/x"]
    posts = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
    with served(toy_engine(), api_keys=("first", "sécond")) as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic first"},
            {"x-api-key": "first"},
        ):
            responses = [server.get(path, headers=headers) for path in paths]
            responses += [server.post(path, chat(), headers=headers) for path in posts]
            assert {response.status_code for response in responses} == {401}
            assert {error_of(response)["code"] for response in responses} == {"invalid_api_key"}
        for path in ("/health", *PAGE_FILES):
            assert server.get(path).status_code == 200
        for key in (b"first", "sécond".encode()):
            ok(server.post("/v1/chat/completions", chat(), headers={b"authorization": b"Bearer " + key}))


def test_ids_of_requests_come_back(server: Running) -> None:
    assert server.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 200):
        assert len(server.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_a_full_line_says_when_to_come_back() -> None:
    """Beyond the slots and the line: 429 with Retry-After. More answers than can ever be held: 400."""
    with served(toy_engine(max_requests=1), max_waiting=1) as server, ThreadPoolExecutor(8) as pool:
        body = chat(max_tokens=400)
        responses = list(pool.map(lambda _: server.post("/v1/chat/completions", body), range(8)))
        assert {response.status_code for response in responses} == {200, 429}
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert error_of(response)["code"] == "queue_full"
        assert error_of(server.post("/v1/chat/completions", chat(n=3)))["param"] == "n"
        wait_until(lambda: all_free(server))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(server: Running, stream: bool) -> None:
    """With four slots taken by clients that left, a fifth request would wait for all of them."""
    with socket.create_connection(server.address) as client:
        client.sendall(raw_chat(chat(max_tokens=480, n=4, stream=stream)))
        wait_until(lambda: server.engine.status().num_running == 4)
    wait_until(lambda: all_free(server))
    ok(server.post("/v1/chat/completions", chat()))


def test_a_client_that_sent_two_requests_and_goes_away_frees_the_slots_of_the_first(server: Running) -> None:
    """The second waits behind the first, which is the one that must learn of it."""
    ends: list[Any] = []
    with socket.create_connection(server.address) as client:
        first, second = (raw_chat(chat(content, max_tokens=480, n=4, stream=True)) for content in ("one", "two"))
        client.sendall(first + second)
        wait_until(lambda: server.engine.status().num_running == 4)
        server.engine.add_listener(SimpleNamespace(stepped=lambda _: None, finished=ends.append))
    wait_until(lambda: all_free(server))
    assert [request.finish_reason for request in ends] == ["abort"] * 4


def test_a_client_that_goes_away_within_its_body_is_no_fault(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    before = server.get("/metrics").text.count('status="500"')
    with socket.create_connection(server.address) as client:
        client.sendall(raw_chat(chat())[:-10])
        time.sleep(0.1)
    time.sleep(0.1)
    assert not caplog.records
    assert server.get("/metrics").text.count('status="500"') == before


def test_a_head_without_end_is_not_read_on(server: Running) -> None:
    with socket.create_connection(server.address) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(64):
            client.sendall(b"a" * (1 << 20))
        pytest.fail("64 MiB of a header were taken")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_time(stream: bool) -> None:
    """When it is over the client is told, not to try again, and the slots are free."""
    with served(toy_engine(max_requests=8), max_seconds=0.15) as server:
        body = chat(max_tokens=480, n=8)
        if stream:
            last = events(server, "/v1/chat/completions", body)[-1]
            assert last["error"]["code"] == "timeout"
        else:
            response = server.post("/v1/chat/completions", body)
            assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
            assert error_of(response)["code"] == "timeout"
        wait_until(lambda: all_free(server))


def test_a_reader_that_stops_reading_holds_up_nobody(server: Running) -> None:
    """Its answer waits for it, of bounded size; others go on."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(server.address)
        client.sendall(raw_chat(chat(max_tokens=480, stream=True, acceptance=True, tree=True)))
        for _ in range(3):
            ok(server.post("/v1/chat/completions", chat()))
        wait_until(lambda: all_free(server))  # decoded to its end, though nobody has read it


def test_a_reader_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time its request ends, though its connection is open."""
    monkeypatch.setattr("infer.serve.transport._SEND_SECONDS", 0.2)
    with served(toy_engine(), send_buffer=4096) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(server.address)
        client.sendall(raw_chat(chat(max_tokens=480, n=4, stream=True, acceptance=True, tree=True)))
        wait_until(lambda: server.engine.status().num_running == 4)
        wait_until(lambda: all_free(server) and not server.server.server_state.tasks)


def test_a_slow_body_is_not_waited_for() -> None:
    limits = Limits(body_seconds=0.2)
    with served(toy_engine(), limits=limits) as server, socket.create_connection(server.address) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: 100\r\n\r\n{")
        client.settimeout(20)
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_too_many_requests_at_once_are_turned_away() -> None:
    with served(toy_engine(), max_connections=1) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.post, "/v1/chat/completions", chat(max_tokens=480, n=8))
        wait_until(lambda: server.engine.status().num_running)
        refused = server.get("/version")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert error_of(refused)["code"] == "too_many_connections"
        assert server.get("/health").status_code == 200
        ok(running.result())


def test_faults_of_ours_are_500_and_quote_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A forward that raises ends its own request with a neutral message; the log has no prompt; the next is served."""
    engine = toy_engine()
    forward = engine.target.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("SECRET of the engine")

    with served(engine) as server, caplog.at_level(logging.ERROR):
        engine.target.forward = failing  # type: ignore[method-assign]
        body = chat("MARKED-PROMPT")
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 500
        assert error_of(response)["type"] == "internal_error"
        last = events(server, "/v1/chat/completions", body)[-1]
        assert last["error"]["type"] == "internal_error"
        assert "SECRET" not in response.text + json.dumps(last)
        engine.target.forward = forward  # type: ignore[method-assign]
        ok(server.post("/v1/chat/completions", body))
    assert "MARKED-PROMPT" not in caplog.text


def test_drafters_that_fail_are_done_without() -> None:
    """The answer is the same, and the model's entry says that the drafter is dead."""

    def script(request: Any, limit: Any) -> Any:
        raise RuntimeError("a fault of a drafter's")

    engine = toy_engine(drafter=ScriptedDrafter(script))
    with served(toy_engine()) as sound, served(engine) as server:
        for _ in range(3):
            assert whole(server, chat()) == whole(sound, chat())
        wait_until(lambda: not server.engine.status().is_drafting)
        assert ok(server.get("/v1/models/toy"))["headstart"]["dead"] is True
        assert ok(server.get("/health")) == {"status": "ok"}


def test_an_answer_that_cannot_go_on_is_the_requests_mistake(server: Running) -> None:
    """All tokens are banned that the grammar allows."""
    tokens = ok(server.post("/tokenize", {"prompt": "a"}))["tokens"]
    body = chat(ignore_eos=False, regex="a", logit_bias={str(tokens[0]): -1e30}, bad_words=["a"])
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "no token is left" in error_of(response)["message"]
    assert "no token is left" in events(server, "/v1/chat/completions", body)[-1]["error"]["message"]


@pytest.mark.parametrize("name", ["regex", "guided_regex", "structured_outputs.regex"])
def test_a_constraint_that_is_none_is_named_as_it_was_given(server: Running, name: str) -> None:
    outer, _, inner = name.partition(".")
    response = server.post("/v1/chat/completions", chat(ignore_eos=False, **{outer: {inner: "("} if inner else "("}))
    assert response.status_code == 400
    assert error_of(response)["param"] == name


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    import asyncio

    with served(toy_engine()) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.post, "/v1/chat/completions", chat(max_tokens=480))
        wait_until(lambda: server.engine.status().num_running == 1)
        closing = asyncio.run_coroutine_threadsafe(server.engine.close(drain_seconds=60), server.loop)
        wait_until(lambda: server.engine.status().is_draining)
        health, refused = server.get("/health"), server.post("/v1/chat/completions", chat())
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert ok(running.result())["usage"]["completion_tokens"] == 480
        closing.result(60)


def test_many_clients_at_once_get_what_each_gets_alone(server: Running) -> None:
    """Streamed and whole, drafted and plain, with and without seeds of their own: answers do not mix."""
    bodies = [
        chat(f"prompt {place} " * (1 + place % 3), temperature=place % 2, seed=place, max_tokens=10 + place)
        for place in range(12)
    ]
    alone = [whole(server, body) for body in bodies]

    def ask(place: int) -> dict[int, str]:
        body = {**bodies[place % 12], "draft": place % 3 != 0, "user": f"user {place % 4}"}
        return streamed(server, body) if place % 2 else whole(server, body)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(36)))
    assert answers == alone * 3
    assert threading.active_count() < 64


def test_request_lines_hold_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    with served(toy_engine(), log_requests=True) as server:
        ok(server.post("/v1/chat/completions", chat("MARKED-PROMPT"), headers={"x-request-id": "id-7"}))
    logged = capfd.readouterr().err
    assert "id-7 /v1/chat/completions 200 32+12 tokens" in logged
    assert "MARKED" not in logged


def test_pages_of_other_origins_are_let_in_by_name() -> None:
    origin = {"origin": "https://example.org"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with served(toy_engine(), api_keys=("key",), allowed_origins=("https://example.org",)) as server:
        with server.client() as client:
            response = client.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://example.org"
    with served(toy_engine()) as server:
        assert "access-control-allow-origin" not in server.get("/health", headers=origin).headers
