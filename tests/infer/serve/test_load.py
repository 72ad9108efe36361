"""The load generator: what it sends and when, what it makes of whole, slow and broken answers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from infer.serve.client import Client, ServerError
from infer.serve.load import Job, LoadResult, TimedAnswer, arrivals, chat_job, run_load
from tests.infer.serve.mock_server import Part, json_answer, mock_server, stream_answer, text_events

BLOCKS = [["The"], [" sky", " is"], [" blue", " to", " day"]]


def jobs(count: int, **fields: Any) -> list[Job]:
    return [chat_job(i, [{"role": "user", "content": f"question {i}"}], **fields) for i in range(count)]


def load(url: str, work: Sequence[Job], **options: Any) -> LoadResult:
    return asyncio.run(run_load(Client(url), work, **options))


def test_an_answer_is_measured_token_by_token() -> None:
    """Tokens, ids and rounds as the server tells them; a block of k tokens counts as k gaps that sum to its own."""
    with mock_server(lambda path, body: stream_answer(text_events(BLOCKS, details=True, wait=0.02))) as server:
        (answer,) = load(server.url, jobs(1, temperature=0.0), concurrency=1).answers
    assert answer.error is None
    assert (answer.text, answer.num_tokens, answer.num_prompt_tokens) == ("The sky is blue to day", 6, 5)
    assert answer.token_ids == (0, 1, 2, 3, 4, 5)
    assert answer.finish_reason == "stop"
    assert answer.acceptance is not None
    assert answer.acceptance["num_rounds"] == 2
    assert [count for _, count in answer.gaps] == [2, 3]
    assert len(answer.token_gaps) == 5
    assert answer.first_token_seconds is not None
    assert answer.first_token_seconds + sum(answer.token_gaps) <= answer.seconds
    assert sum(answer.token_gaps) == pytest.approx(sum(gap for gap, _ in answer.gaps))
    path, body, _ = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "messages": [{"role": "user", "content": "question 0"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


def test_a_server_that_tells_no_tokens_is_measured_by_its_usage() -> None:
    """Then a chunk counts as the request's mean, and ids are unknown."""
    with mock_server(lambda path, body: stream_answer(text_events(BLOCKS, details=False))) as server:
        (answer,) = load(server.url + "/v1", jobs(1), concurrency=1).answers
    assert (answer.num_tokens, answer.token_ids, answer.acceptance) == (6, None, None)
    assert [count for _, count in answer.gaps] == [None, None]
    assert sum(answer.token_gaps) == pytest.approx(sum(gap for gap, _ in answer.gaps), rel=0.5)


def test_gaps_of_unknown_blocks_are_spread_over_the_mean_number_of_tokens() -> None:
    answer = TimedAnswer(job=0, started=0, seconds=1, num_tokens=7, gaps=((0.3, None), (0.6, None)))
    assert answer.token_gaps == pytest.approx([0.1] * 3 + [0.2] * 3)
    known = TimedAnswer(job=0, started=0, seconds=1, num_tokens=4, gaps=((0.3, 1), (0.6, 2)))
    assert known.token_gaps == pytest.approx([0.3, 0.3, 0.3])


def test_a_closed_loop_keeps_so_many_under_way_and_no_more() -> None:
    with mock_server(lambda path, body: stream_answer(text_events(BLOCKS, details=True, wait=0.01))) as server:
        result = load(server.url, jobs(12), concurrency=4)
    assert sorted(answer.job for answer in result.answers) == list(range(12))
    assert server.most_at_once == 4
    assert not result.interrupted
    assert 0 < result.client_share < 1.5


def test_arrivals_at_a_rate_are_a_function_of_the_seed() -> None:
    """10,000 exponential gaps of mean 1/50 s: their mean lies within 5 % of it (5 standard errors)."""
    times = arrivals(10_000, 50.0, seed=3)
    assert times[0] == 0
    assert times == arrivals(10_000, 50.0, seed=3) != arrivals(10_000, 50.0, seed=4)
    assert times[-1] / 9_999 == pytest.approx(1 / 50, rel=0.05)


def test_at_a_rate_requests_do_not_wait_for_answers() -> None:
    with mock_server(lambda path, body: [0.5, *stream_answer(text_events(BLOCKS, details=True))]) as server:
        result = load(server.url, jobs(6), rate=1000.0)
    assert len(result.answers) == 6
    assert server.most_at_once == 6


def broken(path: str, body: dict[str, Any]) -> Sequence[Part]:
    """One way of failing a prompt."""
    number = int(body["messages"][0]["content"].split()[1])
    events = text_events(BLOCKS, details=True)
    return [
        json_answer({"error": {"message": "the queue\nis full"}}, status=429),
        stream_answer(events[:3], done=False),
        stream_answer([events[0], events[1], {"error": {"message": "out of memory", "code": 500}}]),
        [b"220 mail.example.org ESMTP\r\n\r\n"],
        [],
        stream_answer([events[1], 30.0, *events]),
        [b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\ndata: {"],
        [b"HTTP/1.1 200 OK\r\n\r\ndata: no json\n\n"],
        stream_answer(events),
    ][number]


def test_failures_are_counted_by_kind_and_hurt_no_other_request() -> None:
    with mock_server(broken) as server:
        result = load(server.url, jobs(9), concurrency=3, timeout=2.0)
    answers = {answer.job: answer for answer in result.answers}
    kinds = [answers[number].error for number in range(9)]
    assert kinds == ["http 429", "stream", "stream", "stream", "stream", "timeout", "stream", "stream", None]
    assert answers[0].message == "the queue is full"
    assert answers[2].message == "out of memory"
    assert "no HTTP server" in answers[3].message
    assert answers[1].text == "The sky is", "what came before a failure is kept"


def test_a_server_that_is_not_there_is_an_error_of_the_connection() -> None:
    with mock_server(lambda path, body: []) as server:
        pass
    (answer,) = load(server.url, jobs(1), concurrency=1).answers
    assert answer.error == "connection"


def test_ctrl_c_gives_what_was_measured() -> None:
    """The first answers are kept; those under way are dropped."""
    reached = threading.Event()

    def respond(path: str, body: dict[str, Any]) -> Sequence[Part]:
        if body["messages"][0]["content"] == "question 2":
            reached.set()
            return [30.0]
        return stream_answer(text_events(BLOCKS, details=True))

    def interrupt() -> None:
        reached.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    with mock_server(respond) as server:
        thread = threading.Thread(target=interrupt)
        thread.start()
        result = load(server.url, jobs(5), concurrency=1)
        thread.join()
    assert result.interrupted
    assert [answer.job for answer in result.answers] == [0, 1]


def test_keys_and_addresses() -> None:
    with mock_server(lambda path, body: json_answer({"data": []})) as server:
        assert asyncio.run(Client(server.url, api_key="secret").get("/v1/models")) == {"data": []}
    assert "Authorization: Bearer secret\r\n" in server.requests[0][2]
    with pytest.raises(ValueError, match="'ftp://x' is no server's address: expected one such as http"):
        Client("ftp://x")
    with pytest.raises(ValueError, match="no server's address"):
        Client("http://host:99999")
    assert Client("localhost:8000/v1/").url == "http://localhost:8000"


def test_a_refusal_of_a_lookup_is_raised_with_the_servers_words() -> None:
    refusal = json_answer({"error": {"message": "no key"}}, status=401)
    with mock_server(lambda path, body: refusal) as server, pytest.raises(ServerError, match="no key") as raised:
        asyncio.run(Client(server.url).get("/v1/models"))
    assert raised.value.status == 401
