"""`headstart bench serve`: what it sends, how it compares, and that its figures are those of the answers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.cli import bench_serve, serve
from infer.drafters import HeadDrafter
from infer.prompts import load_prompts
from infer.serve.load import LoadResult, TimedAnswer
from infer.serve.load_report import DRAFTED, PLAIN, Figures, Level, Percentiles, identical_share, rows_of
from tests.infer.helpers import Folders, random_head, write_folders
from tests.infer.serve.mock_server import Part, json_answer, mock_server, stream_answer, text_events
from tests.infer.serve.serving import served, toy_engine, toy_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("bench"), [("a", "abc"), ("b", "one two three")])


BLOCKS = [["a"], ["b", "c", "d"], ["e"]]
ALONE = [["a"], ["b"], ["c"], ["d"], ["e"]]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_intermixed_args(arguments)


class Server:
    """Has a drafter that makes it faster; asked at high seeds, it answers differently with it."""

    def __init__(self, *, drafter: str | None = "eagle3", differs_from: int = 1 << 62) -> None:
        self.drafter = drafter
        self.differs_from = differs_from
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Sequence[Part]:
        if path == "/v1/models":
            ours = {} if self.drafter is None else {"headstart": {"drafter": self.drafter}}
            return json_answer({"data": [{"id": "m", **ours}]})
        self.bodies.append(body)
        if self.drafter is None:
            return stream_answer(text_events(BLOCKS, details=False))
        if not body["draft"]:
            return stream_answer(text_events(ALONE, details=True, wait=0.01))
        blocks = BLOCKS if body["seed"] < self.differs_from else [*BLOCKS, ["other"]]
        return stream_answer(text_events(blocks, details=True, wait=0.01))


def bench(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Status, JSON and table of the command against a server."""
    path = tmp_path / "serve.json"
    with mock_server(server) as running:
        args = parsed("--url", running.url, "--limit", "1", "--json", str(path), *arguments)
        status = bench_serve.run(args)
    return status, json.loads(path.read_text()), capsys.readouterr().out


def test_plain_and_drafted_take_turns_on_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same prompts, seeds and numbers both ways; every second round begins with the other; figures add up."""
    server = Server()
    status, report, printed = bench(
        server, tmp_path, capsys, "--concurrency", "1", "4", "--requests", "6", "--rounds", "2", "--temperature", "1"
    )
    assert status == 0
    counted = [body for body in server.bodies if body["max_tokens"] == 64]
    ways = [body["draft"] for body in counted]
    assert ways == [way for _ in range(2) for way in (False, True, True, False) for _ in range(6)]
    keys = ("messages", "seed", "temperature", "max_tokens")
    asked = [[{key: body[key] for key in keys} for body in counted[at : at + 6]] for at in range(0, len(counted), 6)]
    assert all(sorted(load, key=lambda one: one["seed"]) == asked[0] for load in asked)
    assert [one["seed"] for one in asked[0]] == [0, 1, 2, 3, 4, 5]
    rows = {(row["level"]["concurrency"], row["way"]): row for row in report["rows"]}
    assert set(rows) == {(1, "plain"), (1, "drafted"), (4, "plain"), (4, "drafted")}
    drafted = rows[1, "drafted"]
    assert drafted["figures"]["num_tokens"] == 2 * 6 * 5
    assert drafted["figures"]["drafted_share"] == 0.5
    assert drafted["figures"]["accepted_length"] == 3.0
    assert drafted["identical"] == 1.0
    assert rows[1, "plain"]["scaling"] == 1.0
    assert rows[1, "plain"]["figures"]["drafted_share"] == 0.0
    assert rows[1, "plain"]["figures"]["accepted_length"] is None
    assert "4 at once, drafted" in printed
    assert "100 %" in printed


def test_answers_that_differ_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report, _ = bench(
        Server(differs_from=6), tmp_path, capsys, "--concurrency", "2", "--requests", "8", "--rounds", "1"
    )
    assert status == 0
    assert report["rows"][1]["identical"] == 0.75


def test_a_server_of_another_kind_is_measured_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(drafter=None)
    picture = tmp_path / "serve.png"
    arguments = ["--rate", "200", "--requests", "5", "--rounds", "1", "--picture", str(picture)]
    status, report, printed = bench(server, tmp_path, capsys, *arguments)
    assert status == 0
    assert [row["way"] for row in report["rows"]] == ["as served"]
    assert report["rows"][0]["level"] == {"concurrency": None, "rate": 200.0}
    assert not {"draft", "acceptance"} & server.bodies[0].keys()
    assert "takes no word on drafts" in printed
    assert picture.stat().st_size > 1000


def test_a_server_without_a_drafter_is_measured_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--concurrency", "1", "--requests", "2", "--rounds", "1"]
    _, report, printed = bench(Server(drafter="none"), tmp_path, capsys, *arguments)
    assert [row["way"] for row in report["rows"]] == ["plain"]
    assert "the server has no drafter" in printed


def test_failures_are_told_and_give_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Server):
        def __call__(self, path: str, body: dict[str, Any]) -> Sequence[Part]:
            if body.get("seed") == 2:
                return json_answer({"error": {"message": "full"}}, status=429)
            return super().__call__(path, body)

    arguments = ["--concurrency", "1", "--requests", "4", "--rounds", "1"]
    status, report, printed = bench(Failing(), tmp_path, capsys, *arguments)
    assert status == 1
    assert report["rows"][0]["figures"]["errors"] == {"http 429": 1}
    assert "Failed requests, left out of all figures: 2 x http 429." in printed


def test_a_server_that_answers_nothing_is_an_error_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def respond(path: str, body: dict[str, Any]) -> Sequence[Part]:
        if path == "/v1/models":
            return json_answer({"data": [{"id": "m"}]})
        return json_answer({"error": {"message": "the key is wrong"}}, status=401)

    with mock_server(respond) as running, pytest.raises(ValueError, match="answers no request: http 401, the key"):
        bench_serve.run(parsed("--url", running.url))
    with pytest.raises(ValueError, match="there is no server at"):
        bench_serve.run(parsed("--url", running.url))


def test_ctrl_c_prints_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reached = threading.Event()

    class Slow(Server):
        def __call__(self, path: str, body: dict[str, Any]) -> Sequence[Part]:
            if body.get("draft") and body["max_tokens"] == 64:
                reached.set()
                return [60.0]
            return super().__call__(path, body)

    def interrupt() -> None:
        reached.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    arguments = ["--concurrency", "1", "--requests", "2", "--rounds", "3"]
    status, report, printed = bench(Slow(), tmp_path, capsys, *arguments)
    thread.join()
    assert status == 130
    assert report["interrupted"]
    assert [row["way"] for row in report["rows"]] == ["plain"]
    assert "Interrupted" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "--concurrency must be above 0, got 0"),
        (["--rate", "-1"], "--rate must be above 0"),
        (["--rounds", "0"], "--rounds must be above 0, got 0"),
        (["--raw"], "rendered by the server"),
        (["ngram", "--url", "http://x"], "leave out ngram"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_serve.run(parsed(*arguments))


def test_the_engines_options_reach_the_server_unchanged() -> None:
    """What `headstart serve` reads from the options is what was given here."""
    given = ["runs/x", "--dtype", "float32", "--chain", "3", "--no-adaptive", "--relative", "--exactness", "bitwise"]
    options = bench_serve.engine_options(parsed(*given))
    assert options[0] == "runs/x"
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    read = parser.parse_intermixed_args(options)
    assert (read.head, read.dtype, read.chain, read.adaptive) == ("runs/x", "float32", 3, False)
    assert (read.relative, read.exactness, read.nodes) == (True, "bitwise", None)
    assert bench_serve.engine_options(parsed()) == ["none"]


def test_prompts_are_mixed_over_domains() -> None:
    """The first seven of the shipped prompts are of seven domains; none is lost."""
    prompts = load_prompts()
    order = bench_serve.mixed(prompts)
    assert len({prompt.domain for prompt in order[:7]}) == 7
    assert sorted(map(str, order)) == sorted(map(str, prompts))


def answer(
    job: int, *, gaps: Sequence[tuple[float, int]] = (), token_ids: Sequence[int] = (), **more: Any
) -> TimedAnswer:
    values = {"started": 0.0, "seconds": 1.0, "first_token_seconds": 0.1, "num_tokens": len(token_ids)}
    return TimedAnswer(job=job, gaps=tuple(gaps), token_ids=tuple(token_ids), **{**values, **more})


def test_figures_by_hand() -> None:
    """Failed answers count as errors only; a block of 3 after 0.3 s is three gaps of 0.1 s."""
    counts = {"num_rounds": 2, "num_drafts": 1, "num_accepted_tokens": 2}
    load = LoadResult(
        answers=(
            answer(0, gaps=[(0.3, 3), (0.2, 1)], token_ids=[1, 2, 3, 4, 5], acceptance=counts),
            answer(1, gaps=[], token_ids=[1], num_prompt_tokens=10, num_reused_tokens=5),
            answer(2, token_ids=[1] * 50, error="timeout"),
        ),
        seconds=2.0,
        client_share=0.01,
    )
    figures = Figures.of(load)
    assert (figures.num_requests, figures.num_tokens, figures.tokens_per_second) == (2, 6, 3.0)
    assert figures.ttft_ms == pytest.approx(Percentiles(100, 100, 100))
    assert figures.itl_ms.p50 == pytest.approx(100)
    assert figures.gaps_ms.p50 == pytest.approx(250)
    assert (figures.drafted_share, figures.accepted_length, figures.reused_share) == (0.5, 3.0, 0.5)
    assert figures.errors == {"timeout": 1}


def load_of(seconds: float, *texts: Sequence[int]) -> LoadResult:
    answers = tuple(answer(job, token_ids=ids) for job, ids in enumerate(texts))
    return LoadResult(answers=answers, seconds=seconds, client_share=0.0)


def test_ratios_are_of_one_round_and_medians_over_rounds() -> None:
    """Rounds of 1, 2 and 4 seconds plainly, and of half, a third and a tenth of that with drafts: the median ratio is
    3, whatever the rounds themselves took."""
    plain = [load_of(seconds, [1, 2], [3, 4]) for seconds in (1.0, 2.0, 4.0)]
    drafted = [load_of(seconds, [1, 2], [3, 5]) for seconds in (1 / 2, 2 / 3, 4 / 10)]
    one = Level(concurrency=1)
    rows = rows_of({one: {PLAIN: plain, DRAFTED: drafted}, Level(concurrency=4): {PLAIN: plain[:1], DRAFTED: []}})
    assert [row.way for row in rows] == [PLAIN, DRAFTED, PLAIN]
    assert rows[1].ratio == pytest.approx(3.0)
    assert rows[1].identical == 0.5
    assert (rows[0].scaling, rows[2].scaling) == (1.0, pytest.approx(2.0))
    assert rows[0].ratio is None
    assert identical_share([], []) is None


@pytest.mark.slow
def test_on_a_server_of_its_own_answers_are_identical(tmp_path: Path, folders: Folders) -> None:
    """A tiny target and a random head: served in another process, loaded at two levels, every answer the same with
    drafts as without, greedy and drawn."""
    base = [str(folders.head), "--target", str(folders.target), "--dtype", "float32", "--no-adaptive"]
    load = ["--prompts", str(folders.prompts), "--max-tokens", "12", "--max-length", "128", "--rounds", "1"]
    for temperature in ("0", "1"):
        path = tmp_path / "serve.json"
        arguments = [*base, *load, "--concurrency", "1", "3", "--temperature", temperature, "--json", str(path)]
        assert bench_serve.run(parsed(*arguments)) == 0
        rows = json.loads(path.read_text())["rows"]
        assert [row["identical"] for row in rows] == [None, 1.0, None, 1.0]
        assert rows[1]["figures"]["drafted_share"] > 0
        assert rows[0]["figures"]["drafted_share"] == 0
        assert not rows[1]["figures"]["errors"]


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told_in_its_own_words(folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"the server did not start: .*none"):
        bench_serve.run(parsed("none"))


def test_on_a_real_server_drafts_change_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folders: Folders
) -> None:
    """In float32, greedy and drawn, alone and at once with others: every answer is plain decoding's, which drafts
    nothing. (A random head's drafts are soon let rest: the first load drafts, later ones need not.)"""
    target = toy_target()
    path, shares = tmp_path / "serve.json", []
    with served(toy_engine(target, HeadDrafter(random_head(target)))) as running:
        for temperature in ("0", "1"):
            arguments = ["--url", running.url, "--prompts", str(folders.prompts), "--max-tokens", "16", "--rounds", "1"]
            load = ["--concurrency", "1", "3", "--requests", "6", "--temperature", temperature, "--json", str(path)]
            assert bench_serve.run(parsed(*arguments, *load)) == 0
            rows = json.loads(path.read_text())["rows"]
            assert [row["identical"] for row in rows] == [None, 1.0, None, 1.0]
            assert rows[0]["figures"]["drafted_share"] == rows[2]["figures"]["drafted_share"] == 0
            assert len({row["figures"]["num_tokens"] for row in rows}) == 1
            shares.append(rows[1]["figures"]["drafted_share"])
    assert shares[0] > 0
    assert "3 at once, drafted" in capsys.readouterr().out
