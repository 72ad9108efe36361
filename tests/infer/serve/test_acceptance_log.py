"""Acceptance curves of served traffic, their sinks, and the alarm on acceptance below the head's card."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from heads.checkpoint import update_card
from infer.async_engine import AsyncEngine
from infer.drafters import TreeSettings
from infer.engine import load_engine
from infer.request import DraftBounds
from infer.sampling import SamplingParams
from infer.serve import acceptance, drift, sinks, wandb_log
from infer.serve.acceptance import AcceptanceLog
from infer.serve.drift import CardFigure, DriftWatch, Evidence, SequentialTest, figures_of, principal
from infer.serve.metrics import MAX_TAGS
from infer.serve.sinks import JsonLines
from infer.tree import DraftTree, OneHot
from infer.verify import RULES
from tests.infer.helpers import Folders, write_folders
from tests.infer.serve.listening import Clock, MadeRequest, made_round, step_of

GREEDY = CardFigure(temperature=0.0, by_position=(0.45, 0.25, 0.13, 0.08, 0.03), relative_error=0.14)
CARD = {
    "accepted_length": 1.94,
    "standard_error": 0.13,
    "acceptance": {
        "by_temperature": {
            "0.0": {"num_rounds": 337, "accepted_length": 1.94, "by_position": [0.45, 0.25, 0.13, 0.08, 0.03]},
            "0.7": {"num_rounds": 376, "accepted_length": 1.69, "by_position": [0.38, 0.18, 0.06, 0.04, 0.02]},
        }
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("models"), [("chat", "hello")])


# Curves.


def test_shares_by_hand() -> None:
    """Of three drafts with trees of depth 3, 3 and 1, the first accepted 2 tokens, the second none, the third 1; a
    round had no draft. By position: 2/3, 1/3, 0/3; of those drafted to that depth: 2/3, 1/2, 0/2."""
    log = AcceptanceLog(clock=Clock())
    request = MadeRequest(tag="code")
    log.stepped(step_of(made_round(request, 1, first=True)))
    for tokens, nodes, accepted in ((3, 3, 2), (1, 3, 0), (2, 1, 1), (1, 0, 0)):
        log.stepped(step_of(made_round(request, tokens, nodes=nodes, accepted=accepted)))
    snapshot = log.snapshot()
    total = snapshot["since_start"]
    assert (total["num_rounds"], total["num_drafts"], total["num_draft_tokens"]) == (4, 3, 7)
    assert (total["num_accepted_tokens"], total["num_tokens"]) == (3, 7)
    assert total["mean_accepted_length"] == 1 + 3 / 3
    assert total["drafted_share"] == 0.75
    assert total["by_position"] == [0.6667, 0.3333, 0.0]
    assert total["given_drafted"] == [0.6667, 0.5, 0.0]
    assert snapshot["fading"]["by_tag"] == {"code": total}


def test_a_round_is_counted_once_in_each_grouping() -> None:
    """By tag, temperature and context, the groups' counts add up to those of all rounds, and land where they belong."""
    log = AcceptanceLog(clock=Clock())
    cases = [
        ("", 0.0, 10, "none", "greedy", "0-127"),
        ("a", 0.5, 128 + 2, "a", "(0, 0.5]", "128-255"),
        ("b", 0.51, 5000, "b", "(0.5, 1]", "2048+"),
        ("b", 1.0, 127 + 2, "b", "(0.5, 1]", "0-127"),
        ("b", 1.2, 2047 + 2, "b", ">1", "1024-2047"),
    ]
    for tag, temperature, num_tokens, *_ in cases:
        params = SamplingParams(temperature=temperature)
        request = MadeRequest(tag=tag, params=params, num_tokens=num_tokens)
        log.stepped(step_of(made_round(request, 2, nodes=4, accepted=1)))
    fading = log.snapshot()["fading"]
    for place, key in ((3, "by_tag"), (4, "by_temperature"), (5, "by_context")):
        names = [case[place] for case in cases]
        assert {name: counts["num_drafts"] for name, counts in fading[key].items()} == {
            name: names.count(name) for name in names
        }
    assert list(fading["by_context"]) == ["0-127", "128-255", "1024-2047", "2048+"], "ranges stand in their order"


def test_windows_close_by_the_clock_and_the_total_fades() -> None:
    """A window without rounds leaves no trace; after one half-life of silence half of a count is left, and what was
    counted since the start stays whole."""
    clock = Clock()
    log = AcceptanceLog(clock=clock)
    request = MadeRequest()
    log.stepped(step_of(*[made_round(request, 2, nodes=2, accepted=1)] * 10))
    clock.now += 61
    log.stepped(step_of(made_round(request, 1, nodes=2)))
    (window,) = log.snapshot()["windows"]
    assert (window["window"], window["num_drafts"], window["end_seconds"]) == (0, 10, 60)
    clock.now += acceptance.HALF_LIFE_SECONDS
    snapshot = log.snapshot()
    assert [window["window"] for window in snapshot["windows"]] == [0, 1]
    share = 0.5 ** (60 / acceptance.HALF_LIFE_SECONDS)
    assert snapshot["fading"]["overall"]["num_drafts"] == pytest.approx(0.5 * (10 * share + 1), abs=0.05)
    assert snapshot["since_start"]["num_drafts"] == 11


def test_what_is_kept_is_bounded() -> None:
    """A thousand tags over a thousand windows: the snapshot stays small, and is JSON."""
    clock = Clock()
    log = AcceptanceLog(clock=clock)
    for number in range(1000):
        clock.now += 60
        request = MadeRequest(tag=f"tag {number}")
        log.stepped(step_of(made_round(request, 50, nodes=60, accepted=49)))
    snapshot = log.snapshot()
    assert len(snapshot["windows"]) == acceptance.NUM_WINDOWS
    assert len(snapshot["fading"]["by_tag"]) == MAX_TAGS + 1
    assert len(snapshot["since_start"]["by_position"]) == acceptance.MAX_DEPTH
    assert len(json.dumps(snapshot)) < 200_000


def test_counts_of_an_engine(folders: Folders) -> None:
    """Through a real engine, the sums equal what the requests counted."""
    engine = load_engine(folders.head, folders.target, dtype="float32", max_requests=4, max_length=128)
    log = AcceptanceLog()

    async def run() -> list[Any]:
        async with AsyncEngine(engine) as serving:
            serving.add_listener(log)
            params = [SamplingParams(temperature=0.5 * n, max_tokens=20, n=2, seed=n) for n in range(4)]
            each = [serving.generate("hello there", one, tag=f"t{one.seed}") for one in params]
            return [answer for answers in await asyncio.gather(*each) for answer in answers]

    counts = [answer.speculation for answer in asyncio.run(run())]
    total = log.snapshot()["since_start"]
    for name in ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert total[name] == sum(getattr(one, name) for one in counts)
    assert total["num_drafts"] > 0


# Where windows go.


def test_file_of_json_lines(tmp_path: Path) -> None:
    """A line a window, appended to what an earlier server wrote; the first of each start says what the figures mean.
    The open window is written at the end."""
    path = tmp_path / "new" / "log.jsonl"
    for _ in range(2):
        clock = Clock()
        log = AcceptanceLog(sinks=[JsonLines(path, {"definition": acceptance.DEFINITION})], clock=clock)
        for _ in range(2):
            log.stepped(step_of(made_round(MadeRequest(), 2, nodes=2, accepted=1)))
            clock.now += 61
        log.stepped(step_of(made_round(MadeRequest(), 1, nodes=2)))
        log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "window", "window", "window"] * 2
    assert lines[0]["definition"] == acceptance.DEFINITION
    assert [line["since_start"]["num_drafts"] for line in lines[1:4]] == [1, 2, 3]
    assert all("time" in line for line in lines)


class Slow:
    """A sink that takes as long as it is told."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.records: list[Mapping[str, Any]] = []

    def open(self) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        self.go.wait(60)
        self.records.append(record)

    def close(self) -> None:
        pass


def test_a_slow_sink_does_not_hold_up_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """With a sink that hangs, steps go on; what has no room is dropped, and said at the end. No thread is left."""
    clock, sink = Clock(), Slow()
    log = AcceptanceLog(sinks=[sink], clock=clock)
    num_windows = sinks._QUEUE_SIZE + 50
    for _ in range(num_windows):
        clock.now += 60
        log.stepped(step_of(made_round(MadeRequest(), 1, nodes=1)))
    sink.go.set()
    log.close()
    assert sinks._QUEUE_SIZE <= len(sink.records) < num_windows
    assert "records of acceptance were dropped" in caplog.text
    assert not any(thread.name == "headstart-acceptance" for thread in threading.enumerate())


def test_a_broken_sink_is_left_out(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """One warning, and the other sink has everything."""

    class Broken(Slow):
        def write(self, record: Mapping[str, Any]) -> None:
            raise OSError("no space left")

        def __str__(self) -> str:
            return "the broken one"

    clock, good = Clock(), Slow()
    good.go.set()
    log = AcceptanceLog(sinks=[Broken(), good], clock=clock)
    for _ in range(4):
        clock.now += 60
        log.stepped(step_of(made_round(MadeRequest(), 1, nodes=1)))
    log.close()
    assert len(good.records) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write to the broken one (no space left): acceptance is not kept there"
    ]


# W&B.


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither key nor settings of the user's, and a folder for what is recorded."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


class FakeRun:
    """A run that takes what is logged, and raises where a step goes back."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.alerts: list[str] = []
        self.axes: dict[str, Any] = {}
        self.num_finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        assert wandb_log.AXIS in values, "every point has the log's own axis"
        self.points.append(values)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(text)

    def finish(self) -> None:
        self.num_finished += 1


class FakeWandb(ModuleType):
    """wandb, as far as it is used. `inits` has the arguments of every `init`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = FakeRun()
        self.inits: list[dict[str, Any]] = []
        self.plot = SimpleNamespace(line_series=lambda **arguments: ("plot", arguments))
        self.fails_online = False

    def init(self, **arguments: Any) -> FakeRun:
        self.inits.append(arguments)
        if self.fails_online and arguments["mode"] == "online":
            raise RuntimeError("the service says no")
        return self.run

    class Settings:
        model_fields: Mapping[str, Any] = {}

        def __init__(self, **settings: Any) -> None:
            pass

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return ("table", columns, data)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def logged(notices: list[str], *, num_windows: int = 3) -> None:
    """Three windows of a log with W&B."""
    clock = Clock()
    sink = wandb_log.WandbLog(project="p", name="n", config={}, notice=notices.append)
    log = AcceptanceLog(sinks=[sink], clock=clock, drift=DriftWatch(figures=[GREEDY]))
    request = MadeRequest(tag="code")
    for _ in range(num_windows):
        log.stepped(step_of(made_round(request, 2, nodes=3, accepted=1)))
        clock.now += 61
    log.close()


def test_curves_in_wandb(fake_wandb: FakeWandb, no_service: Path) -> None:
    """One run, begun once and finished once; a point a window on an axis of its own that only grows; curves by position
    and group; a table at the end. Without a key it is offline, said once."""
    notices: list[str] = []
    logged(notices, num_windows=12)
    run = fake_wandb.run
    assert [one["mode"] for one in fake_wandb.inits] == ["offline"]
    assert run.num_finished == 1
    assert run.axes == {wandb_log.AXIS: None, "*": wandb_log.AXIS}
    steps = [point[wandb_log.AXIS] for point in run.points]
    assert steps == sorted(steps)
    curves = [point for point in run.points if "acceptance/by_position/1" in point]
    assert [point[wandb_log.AXIS] for point in curves] == [n * 61 // 60 for n in range(12)]
    assert curves[0]["acceptance/by_position/1"] == 1.0
    assert curves[0]["acceptance/by_position/2"] == 0.0
    assert curves[0]["acceptance_by_tag/code"] == 2.0
    assert curves[0]["acceptance_by_temperature/greedy"] == 2.0
    pictures = [point for point in run.points if "acceptance/table" in point]
    assert len(pictures) == 3, "with the first window, the eleventh, and at the end"
    _, _, rows = pictures[-1]["acceptance/table"]
    assert ["tag", "code"] in [row[:2] for row in rows]
    assert run.summary["acceptance/num_drafts"] == 12
    assert notices == ["wandb has no key: it records offline (upload later with `wandb sync`)"]


def test_an_alarm_in_wandb(fake_wandb: FakeWandb, no_service: Path) -> None:
    sink = wandb_log.WandbLog(project="p", name="n", config={}, notice=lambda line: None)
    sink.open()
    for drifting in (True, False):
        sink.write({"event": "drift", "drifting": drifting, "message": "it has fallen"})
    sink.close()
    assert fake_wandb.run.alerts == ["it has fallen"]
    assert [point["acceptance/drift"] for point in fake_wandb.run.points] == [1, 0]


def test_online_that_fails_goes_on_offline(
    fake_wandb: FakeWandb, no_service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_log, "is_reachable", lambda url: True)
    fake_wandb.fails_online = True
    notices: list[str] = []
    logged(notices)
    assert [one["mode"] for one in fake_wandb.inits] == ["online", "offline"]
    assert len(notices) == 1
    assert "it records offline" in notices[0]
    assert fake_wandb.run.num_finished == 1


def test_a_key_without_a_network(no_service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that cannot be reached is not waited for."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    notices: list[str] = []
    assert wandb_log.choose_mode(notices.append) == "offline"
    assert "http://127.0.0.1:9 cannot be reached" in notices[0]


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_wandb_missing_or_broken(
    fault: str, no_service: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the engine's thread has not noticed."""
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        broken = FakeWandb()
        broken.run.log = lambda values: 1 / 0  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "wandb", broken)
    logged([])
    assert len(caplog.records) == 1
    assert ("cannot open wandb" if fault == "missing" else "cannot write to wandb") in caplog.text


@pytest.mark.slow
def test_real_wandb_offline(no_service: Path, repository: Path) -> None:
    """The real package takes all of it offline, in a process without a terminal, and leaves one run."""
    pytest.importorskip("wandb")
    code = "from tests.infer.serve.test_acceptance_log import logged; logged([], num_windows=11)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cannot write" not in done.stderr
    assert len(list((no_service / "wandb").glob("offline-run-*"))) == 1


# The alarm.


def answers(
    figure: CardFigure, count: int, *, seed: int, depth: int, scale: float = 1.0, differ: float = 0.25
) -> Iterator[Evidence]:
    """Answers of some 40 rounds of chains whose tokens are accepted as `figure` says, times `scale`. Answers differ
    among each other: `differ` is the standard deviation of their own factor on it (of the domains on the card of a
    head trained here it is 0.2)."""
    rng = np.random.default_rng(seed)
    shares = np.array(figure.by_position)
    conditional = scale * shares / np.concatenate([[1.0], shares[:-1]])
    num_rounds = np.minimum(rng.geometric(1 / 40, count), drift.MAX_ROUNDS)
    factors = np.clip(rng.normal(1, differ, count), 0.05, None)
    for rounds, factor in zip(num_rounds, factors, strict=True):
        chances = np.minimum(conditional * factor, 1)[:depth]
        accepted = np.cumprod(rng.random((rounds, depth)) < chances, axis=1).sum()
        yield Evidence(
            promised=rounds * figure.promised(depth),
            variance=rounds * figure.variance(depth),
            accepted=float(accepted),
            num_rounds=int(rounds),
        )


def scale_of(figure: CardFigure, drop: float) -> float:
    """The factor on every acceptance that makes the accepted length fall by `drop`."""
    return figure.share_after(drop, depth=1)


@pytest.mark.parametrize("sound", [True, False])
def test_false_alarms_are_rare(sound: bool) -> None:
    """In 40,000 answers, at the card's figure and at the lowest that still counts as well (`SequentialTest.sound`): at
    least `PATIENCE` answers to a false alarm are promised, so at most 4 are expected in the second case; more than 10
    has a chance below 0.003 (Poisson). The seeds are fixed, and none was found."""
    alarms = 0
    for seed in range(2):
        test = SequentialTest(GREEDY, depth=1)
        scale = 1.0 if sound else test.sound
        for answer in answers(GREEDY, 20_000, seed=seed, depth=1, scale=scale):
            alarms += test.add(answer) and test.is_drifting
    assert alarms <= (0 if sound else 10)


@pytest.mark.parametrize("depth", [1, 5])
def test_a_fall_of_15_percent_is_noticed(depth: int) -> None:
    """Half of the time within 6,000 rounds, with answers that differ as real ones do; with answers that differ less,
    within 5,000. After 100 good answers, on a card whose own error is 14 %. (Seeds are fixed.)"""
    scale = scale_of(GREEDY, 0.15)
    medians = {}
    for differ in (0.15, 0.25):
        delays = []
        for seed in range(21):
            test = SequentialTest(GREEDY, depth=depth)
            assert not any(test.add(one) for one in answers(GREEDY, 100, seed=seed, depth=depth, differ=differ))
            rounds = 0
            for answer in answers(GREEDY, 3000, seed=1000 + seed, depth=depth, scale=scale, differ=differ):
                rounds += answer.num_rounds
                if test.add(answer):
                    break
            assert test.is_drifting
            delays.append(rounds)
        medians[differ] = sorted(delays)[10]
    assert medians[0.15] < 5_000
    assert medians[0.25] < (6_000 if depth == 1 else 9_000)


def test_the_alarm_ends() -> None:
    """Once acceptance is back the alarm ends, and comes again with the next fall: each change is told once."""
    test = SequentialTest(GREEDY, depth=1)
    changes = []
    for seed, scale in enumerate((1.0, 0.6, 1.0, 0.6)):
        for answer in answers(GREEDY, 400, seed=seed, depth=1, scale=scale):
            if test.add(answer):
                changes.append((scale, test.is_drifting))
    assert changes == [(0.6, True), (1.0, False), (0.6, True)]


def test_one_endless_answer_raises_no_alarm() -> None:
    """Of a text that is accepted nowhere, however long it is, one answer is seen."""
    watch = DriftWatch(figures=[GREEDY])
    request = MadeRequest()
    for _ in range(20_000):
        watch.see([made_round(request, 1, nodes=3)])
    assert watch.finish(request) is None  # type: ignore[arg-type]
    assert not watch.is_drifting
    assert watch.tests[0].num_answers == 1


def test_trees_and_load_do_not_matter() -> None:
    """The same text through wide trees, narrow trees and a single node gives the same trials: only what the head would
    have drafted as a chain counts. A tree whose second child was right is a miss."""
    wide = DraftTree(tokens=(1, 2, 3, 4, 5), parents=(-1, -1, 0, 1, 2), kind=OneHot(), values=(0.5, 0.3, 0.2, 0.1, 0.1))
    assert principal(wide, ()) == (3, 0)
    assert principal(wide, (0, 2)) == (3, 2)
    assert principal(wide, (1, 3)) == (3, 0)
    assert principal(DraftTree.chain((1,)), (0,)) == (1, 1)
    assert principal(DraftTree.empty(), ()) == (0, 0)
    seen = []
    for tree in (wide, DraftTree.chain((1, 3)), DraftTree.chain((1,))):
        watch = DriftWatch(figures=[GREEDY])
        request = MadeRequest()
        for accepted in (1, 0, 1):
            watch.see([made_round(request, 1 + accepted, tree=tree, accepted=accepted)])
        entry = watch._open[request]  # type: ignore[index]
        assert entry is not None
        seen.append(entry[1])
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0].accepted, seen[0].promised) == (2, pytest.approx(3 * 0.45))


@pytest.mark.parametrize(
    ("num_requests", "nodes", "num_undrafted", "adaptive", "counts"),
    [
        (4, 1, 0, True, True),
        (4, 1, 3, True, True),
        (5, 1, 0, True, False),
        (5, 4, 0, True, True),
        (5, 4, 1, True, False),
        (20, 4, 2, True, True),
        (20, 4, 3, True, False),
        (20, 1, 15, False, True),
    ],
)
def test_a_load_at_which_few_draft_has_no_say(
    num_requests: int, nodes: int, num_undrafted: int, adaptive: bool, counts: bool
) -> None:
    """Under load drafts may pay for the surest requests alone: such a step is a choice of easy text, unless next to all
    have whole trees, or nothing is chosen. Prefills, and requests that want no drafts, are no part of it."""
    off = MadeRequest(draft=DraftBounds(enabled=False))
    watch = DriftWatch(figures=[GREEDY], adaptive=adaptive)
    rounds = [made_round(MadeRequest(), 2, nodes=nodes, accepted=1) for _ in range(num_requests - num_undrafted)]
    rounds += [made_round(MadeRequest(), 1) for _ in range(num_undrafted)]
    watch.see(rounds + [made_round(off, 1)] * 9 + [made_round(MadeRequest(), 1, first=True)] * 9)
    assert len(watch._open) == (num_requests if counts else 0)


def test_a_rest_is_stood_for() -> None:
    """A request that rests for bad drafts must not be known by its good rounds alone: the round after a rest of five
    counts six times. The prefill, and rounds at the very end, count for nothing."""
    watch = DriftWatch(figures=[GREEDY])
    request = MadeRequest()
    watch.see([made_round(request, 2, nodes=1, accepted=1)])
    for _ in range(5):
        watch.see([made_round(request, 1)])
    watch.see([made_round(request, 1, nodes=1)])
    watch.see([made_round(request, 1)])
    entry = watch._open[request]  # type: ignore[index]
    assert entry is not None
    assert (entry[1].accepted, entry[1].promised) == (1, pytest.approx(7 * 0.45))


@pytest.mark.parametrize(
    ("params", "rule", "temperature"),
    [
        (SamplingParams(), "match", 0.0),
        (SamplingParams(top_p=0.5), "match", 0.0),
        (SamplingParams(temperature=0.7), "match", 0.7),
        (SamplingParams(temperature=0.75), "match", 0.7),
        (SamplingParams(temperature=1.0), "match", None),
        (SamplingParams(temperature=0.3), "match", None),
        (SamplingParams(temperature=0.7, top_p=0.9), "match", None),
        (SamplingParams(repetition_penalty=1.1), "match", None),
        (SamplingParams(regex="a+"), "match", None),
        (SamplingParams(), "typical", None),
    ],
)
def test_like_is_compared_with_like(params: SamplingParams, rule: str, temperature: float | None) -> None:
    """A request is held against the figure of its own temperature, if its law is the card's; else it is left alone."""
    watch = DriftWatch(figures=figures_of(CARD))
    request = MadeRequest(params=params, rule=RULES[rule])
    watch.see([made_round(request, 2, nodes=1, accepted=1)])
    entry = watch._open[request]  # type: ignore[index]
    assert (None if entry is None else entry[0].figure.temperature) == temperature


def test_the_card_is_read() -> None:
    """By temperature; the standard error of the accepted length, which is of 1 + the sum, becomes that of the sum."""
    greedy, warm = figures_of(CARD)
    assert (greedy.temperature, greedy.by_position, greedy.accepted_length) == (0.0, GREEDY.by_position, 1.94)
    assert greedy.relative_error == pytest.approx(0.13 / 0.94)
    assert warm.relative_error == pytest.approx(0.13 / 0.94 * (337 / 376) ** 0.5)
    for broken in ({}, {"acceptance": {}}, {"acceptance": {"by_temperature": {}}}, {"acceptance": None}):
        assert figures_of(broken) == []


def test_an_alarm_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning with both figures and what to do; the state is there to be scraped; what follows is quiet."""
    log = AcceptanceLog(drift=DriftWatch(figures=[GREEDY]), clock=Clock())
    for _ in range(300):
        request = MadeRequest()
        for _ in range(20):
            log.stepped(step_of(made_round(request, 1, nodes=2)))
        log.finished(request)  # type: ignore[arg-type]
    assert log.is_drifting
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "has fallen below the head's card" in caplog.text
    assert "the card says 1.94" in caplog.text
    (told,) = log.snapshot()["drift"]
    assert told["drifting"]
    assert told["ratio_to_card"] == 0
    assert (told["temperature"], told["positions"]) == (0.0, 1)


def test_a_card_without_figures(folders: Folders, tmp_path: Path) -> None:
    """No alarm, said once; curves are kept all the same. With figures there is one, silently."""
    notices: list[str] = []
    tree = TreeSettings.chain(3)
    engine = load_engine(folders.head, folders.target, dtype="float32", max_requests=1, tree=tree)
    log = acceptance.open_log(engine, str(folders.head), file=tmp_path / "log.jsonl", notice=notices.append)
    log.close()
    assert log.snapshot()["drift"] is None
    (notice,) = notices
    assert "no alarm if acceptance falls: the head's card has no figures" in notice
    update_card(folders.head, acceptance=CARD)
    try:
        log = acceptance.open_log(engine, str(folders.head), notice=notices.append)
        assert notices == [notice]
        assert [entry["positions"] for entry in log.snapshot()["drift"]] == [5, 5], "a fixed chain is compared whole"
    finally:
        update_card(folders.head, acceptance={})


@pytest.mark.parametrize(("head", "reason"), [("ngram", "it needs a trained head"), ("none", None)])
def test_heads_without_a_card(head: str, reason: str | None, folders: Folders) -> None:
    """A lookup has no card; plain decoding has nothing to fall."""
    notices: list[str] = []
    engine = load_engine(head, folders.target, dtype="float32", max_requests=1)
    log = acceptance.open_log(engine, head, notice=notices.append)
    assert log.snapshot()["drift"] is None
    assert len(notices) == (reason is not None)
    assert (reason or "") in "".join(notices)
