"""The page of `headstart serve`, driven in a headless Chromium against a scripted server that speaks its wire, and
against the real one.

Needs Playwright's Python package and a Chromium, and skips where one is missing; HEADSTART_CHROMIUM names a browser.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser: install playwright")
fastapi = pytest.importorskip("fastapi", reason="the page's tests serve it: install headstart[serve]")
uvicorn = pytest.importorskip("uvicorn", reason="the page's tests serve it: install headstart[serve]")

PAGE = Path(__file__).resolve().parents[3] / "infer" / "serve" / "page"
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Stricter than needed: scripts and styles in attributes, other hosts, and text parsed as HTML are all refused."""
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PLANETS = """The| planets| of| the| solar| system| are|:|\n\n|1|.| Mercury|,| the| smallest|,| closest| to| the| Sun|.|
2|.| Venus|,| the| hottest|.|\n|3|.| Earth|,| our| home|.|\n|4|.| Mars|,| the| red| planet|."""
PLANETS = _PLANETS.split("|")


CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    const text = walk.currentNode.textContent.trim();
    const isShown = text && one.checkVisibility({ visibilityProperty: true });
    if (!isShown || one.closest('svg, .hidden, .skip, dialog, [disabled]')) continue;
    const pair = [luminance(rgba(getComputedStyle(one).color)), luminance(ground(one))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) poor.push([one.className || one.id || one.tagName, text.slice(0, 30), ratio.toFixed(2)]);
  }
  return poor;
})()
"""
"""Texts whose contrast with the nearest ground behind them is under 4.5 to 1: where, what, how much."""


def rounds_of(texts: list[str], *, seed: int = 0, max_nodes: int = 12, max_depth: int = 5) -> list[dict[str, Any]]:
    """Rounds that write `texts`: the first without a draft, then trees with a random part of what follows accepted."""
    rng = random.Random(seed)
    rounds = [{"tokens": [token(texts, 0, drafted=False)], "num_nodes": 0, "depth": 0, "tree": tree_of([], [], [])}]
    at = 1
    while at < len(texts):
        left = len(texts) - at
        hits = min(rng.choice((0, 1, 2, 3, max_depth)), max(0, left - 1), max_nodes)
        path = texts[at : at + hits]
        tree = random_tree(rng, path, max_nodes=max_nodes, max_depth=max(max_depth, hits))
        tokens = [token(texts, at + i, drafted=i < hits) for i in range(hits + 1)]
        rounds.append({"tokens": tokens, "num_nodes": len(tree["tokens"]), "depth": max_depth, "tree": tree})
        at += hits + 1
    return rounds


def token(texts: list[str], place: int, *, drafted: bool) -> dict[str, Any]:
    return {"id": 100 + place, "text": texts[place], "drafted": drafted}


def tree_of(tokens: list[str], parents: list[int], path: list[int]) -> dict[str, Any]:
    values: list[float] = []
    for node, parent in enumerate(parents):
        values.append(round((values[parent] if parent >= 0 else 0.9) * (0.9 if node in path else 0.3), 3))
    ids = [500 + node for node in range(len(tokens))]
    return {"tokens": tokens, "token_ids": ids, "parents": parents, "values": values, "path": path}


def random_tree(rng: random.Random, path: list[str], *, max_nodes: int, max_depth: int) -> dict[str, Any]:
    tokens, parents, depths = list(path), list(range(-1, len(path) - 1)), list(range(1, len(path) + 1))
    while len(tokens) < max_nodes:
        parent = rng.randrange(-1, len(tokens))
        depth = 1 if parent < 0 else depths[parent] + 1
        if depth > max_depth:
            continue
        tokens.append(rng.choice((" the", " a", " and", " largest", ".", ",", "\n", " of", " in", " first", " world")))
        parents.append(parent)
        depths.append(depth)
    return tree_of(tokens, parents, list(range(len(path))))


@dataclass
class ScriptedServer:
    """Answers every chat with `rounds`, one token a chunk where drafts are off. Tests set what else should happen."""

    rounds: list[dict[str, Any]] = field(default_factory=lambda: rounds_of(PLANETS))
    pace_seconds: float = 0.002
    hold_after: int | None = None
    """Rounds after which a stream waits for `release`."""
    break_after: int | None = None
    """Rounds after which the connection is cut."""
    refusal: tuple[int, str, dict[str, str]] | None = None
    key: str = ""
    finish_reason: str = "stop"
    plain_ends: list[str] | None = None
    """Last tokens of plain decoding's answer, where it shall differ."""
    exactness: str = "seed"
    dtype: str = "float32"
    drafter: str = "eagle3 (9.8M)"
    model: str = "toy"
    max_nodes: int = 16
    max_depth: int = 6
    num_running: int = 0
    num_waiting: int = 0
    is_draining: bool = False
    plain_tokens_per_second: float | None = 40.0
    release: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_cancelled: int = 0

    def app(self) -> Any:
        app = fastapi.FastAPI()

        @app.middleware("http")
        async def guard(request: fastapi.Request, call_next: Any) -> Any:
            if self.key and request.url.path.startswith(("/v1", "/status")):
                given = request.headers.get("authorization", "")
                if given != f"Bearer {self.key}":
                    return refused(401, "this server asks for an API key")
            response = await call_next(request)
            response.headers["Content-Security-Policy"] = POLICY
            return response

        @app.get("/v1/models")
        async def models() -> Any:
            served = {"exactness": self.exactness, "dtype": self.dtype, "drafter": self.drafter, "dead": False}
            limits = {"max_nodes": self.max_nodes, "max_depth": self.max_depth, "lossless": self.exactness != "lossy"}
            return {"object": "list", "data": [{"id": self.model, "object": "model", "headstart": served | limits}]}

        @app.get("/status")
        async def status() -> Any:
            counts = {"num_running": self.num_running, "num_waiting": self.num_waiting, "num_slots": 8}
            flags = {"is_draining": self.is_draining, "is_alive": True, "is_drafting": True, "model": self.model}
            return counts | flags | {"plain_tokens_per_second": self.plain_tokens_per_second}

        @app.post("/v1/chat/completions")
        async def chat(request: fastapi.Request) -> Any:
            if self.refusal:
                return refused(*self.refusal)
            body = await request.json()
            self.requests.append(body)
            return fastapi.responses.StreamingResponse(self.stream(body), media_type="text/event-stream")

        @app.get("/{name:path}")
        async def page(name: str) -> Any:
            path = PAGE / (name or "index.html")
            return fastapi.responses.FileResponse(path) if path.is_file() else fastapi.Response(status_code=404)

        return app

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body.get("draft") is not False:
            return self.rounds
        tokens = [dict(one, drafted=False) for each in self.rounds for one in each["tokens"]]
        if self.plain_ends:
            ends = [{"id": 900 + place, "text": text, "drafted": False} for place, text in enumerate(self.plain_ends)]
            tokens[-len(ends) :] = ends
        tokens = tokens[: body["max_tokens"]]
        return [{"tokens": [one], "num_nodes": 0, "depth": 0} for one in tokens]

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            yield event({"role": "assistant", "content": ""})
            for number, one in enumerate(self.answer(body)):
                if number == self.hold_after:
                    while not self.release.is_set():
                        await asyncio.sleep(0.01)
                if number == self.break_after:
                    raise ConnectionResetError("cut by the test")
                await asyncio.sleep(self.pace_seconds)
                text = "".join(each["text"] for each in one["tokens"])
                acceptance = {name: one[name] for name in ("tokens", "num_nodes", "depth")}
                more = {"tree": one["tree"]} if body.get("tree") and "tree" in one else {}
                yield event({"content": text}, acceptance=acceptance, **more)
            yield event({}, finish_reason=self.finish_reason)
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def event(delta: dict[str, Any], *, finish_reason: str | None = None, **details: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **details}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> Any:
    body = {"error": {"message": message, "type": "error", "param": None, "code": status}}
    return fastapi.responses.JSONResponse(body, status_code=status, headers=headers)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The app's address, while it runs in a thread of its own."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the scripted server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    named = os.environ.get("HEADSTART_CHROMIUM")
    path = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no Chromium on the path ({', '.join(BROWSERS)}); HEADSTART_CHROMIUM can name one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.release.set()


@pytest.fixture
def address(server: ScriptedServer) -> Iterator[str]:
    with served(server.app()) as address:
        yield address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, freshly opened, on a wide screen. A test fails where the browser reported an error or a refusal."""
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    page = context.new_page()
    page.set_default_timeout(30_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("#model:text-is('toy')")
    yield page
    context.close()
    unexpected = [error for error in errors if "Failed to load resource" not in error]
    assert not unexpected, unexpected


def ask(page: Any, text: str = "Name the planets.") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for(page: Any, phase: str, number: int = 0) -> Any:
    """The turn, once it is `done`, `stopped`, `failed` or `streaming`."""
    page.wait_for_selector(f".turn:nth-of-type({number + 1})[data-phase='{phase}']")
    return page.locator(".turn").nth(number)


def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("what was waited for did not happen within ten seconds")


def drafted_ids(server: ScriptedServer) -> list[bool]:
    return [token["drafted"] for one in server.rounds for token in one["tokens"]]


def test_an_answer_shows_each_token_and_who_wrote_it(page, server):
    """Tokens in order as spans, marked where drafted; nothing is lost of the text, whitespace included."""
    ask(page)
    turn = wait_for(page, "done")
    tokens = turn.locator(".answer-text .token").evaluate_all(
        "all => all.map(one => [one.textContent, one.classList.contains('drafted')])"
    )
    assert [text for text, _ in tokens] == PLANETS
    assert [drafted for _, drafted in tokens] == drafted_ids(server)
    assert turn.locator(".question-text").inner_text() == "Name the planets."


def test_what_is_sent_asks_for_acceptance_trees_and_a_seed(page, server):
    """A seed is always sent, so that a race can ask for the same draw; turns before go along."""
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.8")
    page.fill("#top-p", "0.9")
    page.fill("#max-tokens", "64")
    page.fill("#max-nodes", "8")
    page.fill("#max-depth", "3")
    page.click("#settings >> text=Done")
    ask(page)
    wait_for(page, "done")
    ask(page, "And the moons?")
    wait_for(page, "done", 1)
    first, second = server.requests
    assert first["stream"] is first["acceptance"] is first["tree"] is True
    expected = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 64, "draft": {"max_nodes": 8, "max_depth": 3}}
    assert {name: first[name] for name in expected} == expected
    assert isinstance(first["seed"], int)
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "".join(PLANETS)


def test_drafts_can_be_switched_off(page, server):
    """The switch sends `draft: false` and asks for no tree; the answer says that it is plain decoding's."""
    page.uncheck("#draft", force=True)
    ask(page)
    turn = wait_for(page, "done")
    assert server.requests[0]["draft"] is False
    assert "tree" not in server.requests[0]
    assert "plain decoding" in turn.locator(".facts").inner_text()
    assert turn.locator(".token.drafted").count() == 0


def test_figures_follow_the_definitions(page, server):
    """Accepted length is 1 + accepted / rounds with drafts; shares by position are of those rounds."""
    ask(page)
    wait_for(page, "done")
    drafts = [one for one in server.rounds if one["num_nodes"]]
    hits = [sum(token["drafted"] for token in one["tokens"]) for one in drafts]
    assert page.inner_text("#figure-length") == f"{1 + sum(hits) / len(drafts):.2f}"
    assert page.inner_text("#figure-written") == f"{len(PLANETS)} in {len(server.rounds)} rounds"
    assert page.inner_text("#figure-drafts") == f"{len(drafts)} of them with a draft"
    shares = [int(text.rstrip("%")) for text in page.locator("#positions .share").all_inner_texts()]
    expected = [100 * sum(hit > place for hit in hits) / len(drafts) for place in range(server.max_depth)]
    assert len(shares) == server.max_depth
    assert all(abs(share - one) <= 0.51 for share, one in zip(shares, expected, strict=True))


def test_a_token_leads_to_the_tree_that_wrote_it(page, server):
    """A click shows that round's tree: all its nodes, the accepted ones and the model's own marked."""
    ask(page)
    turn = wait_for(page, "done")
    number = max(range(len(server.rounds)), key=lambda place: len(server.rounds[place]["tokens"]))
    turn.locator(f".round[data-round='{number}'] .token").first.click()
    one = server.rounds[number]
    assert page.inner_text("#tree-round") == f"round {number + 1} of {len(server.rounds)}"
    assert page.locator("#tree .node.hit").count() == len(one["tree"]["path"])
    assert page.locator("#tree .node.miss").count() == one["num_nodes"] - len(one["tree"]["path"])
    assert page.locator("#tree .node.own").count() == 1
    assert turn.locator(".round.picked").get_attribute("data-round") == str(number)
    page.focus("#scrub")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tree-round") == f"round {number} of {len(server.rounds)}"


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(1, 1), (8, 8), (32, 1), (32, 8)])
def test_trees_of_all_sizes_are_laid_out_without_overlap(page, server, max_nodes, max_depth):
    """No two nodes overlap, edges go from left to right, and text is never smaller than 9 pixels."""
    server.rounds = rounds_of(PLANETS, seed=max_nodes, max_nodes=max_nodes, max_depth=max_depth)
    server.max_nodes, server.max_depth = max_nodes, max_depth
    ask(page)
    wait_for(page, "done")
    for number in range(1, len(server.rounds), 4):
        page.evaluate("number => pick(state.turns[0], number)", number)
        boxes = page.locator("#tree .node > rect:not(.value)").evaluate_all(
            "all => all.map(one => ['x', 'y', 'width', 'height'].map(name => one[name].baseVal.value))"
        )
        assert len(boxes) == server.rounds[number]["num_nodes"] + 2
        for place, (x, y, width, height) in enumerate(boxes):
            for left, top, other_width, other_height in boxes[:place]:
                apart = x >= left + other_width or left >= x + width or y >= top + other_height or top >= y + height
                assert apart, (number, place)
        scale = page.locator("#tree svg").evaluate("tree => tree.clientWidth / tree.viewBox.baseVal.width")
        assert 12.5 * scale >= 9


def test_a_race_shows_that_tokens_are_identical(page, server):
    """The same request goes out again with drafts off and the same seed; ids are compared and speeds shown."""
    server.pace_seconds = 0.004
    ask(page)
    turn = wait_for(page, "done")
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same='true']")
    first, second = server.requests
    assert second["draft"] is False
    assert {**second, "draft": None, "tree": None} == {**first, "draft": None, "tree": None}
    verdict = turn.locator(".verdict").inner_text()
    assert f"Identical: all {len(PLANETS)} tokens are the same." in verdict
    assert "the speed of plain decoding" in verdict
    for lane in range(2):
        assert turn.locator(".lane-text").nth(lane).text_content() == "".join(PLANETS)
        assert float(turn.locator(".lane-rate b").nth(lane).inner_text()) > 0
    assert "raced" in page.inner_text("#figure-ratio")


@pytest.mark.parametrize(
    ("exactness", "dtype", "why"),
    [
        ("seed", "float32", "should not happen"),
        ("seed", "bfloat16", "near ties"),
        ("distribution", "float32", "keeps the model\u2019s distribution"),
    ],
)
def test_a_race_says_where_tokens_differ(page, server, address, exactness, dtype, why):
    """The first different token is named, and whether what the server promises allows it."""
    server.exactness, server.dtype = exactness, dtype
    page.goto(address)
    page.wait_for_selector("#model:text-is('toy')")
    server.plain_ends = [" blue", " moon", "."]
    ask(page)
    turn = wait_for(page, "done")
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same='false']")
    verdict = turn.locator(".verdict").inner_text()
    assert f'Different from token {len(PLANETS) - 2} on: " red" and " blue"' in verdict
    assert why in verdict


def test_escape_stops_an_answer_and_its_text_stays(page, server):
    """The server sees the request go; what came is kept, can be copied, raced over its length, and is history."""
    server.hold_after = 6
    ask(page)
    page.wait_for_selector(".round[data-round='5']")
    assert page.is_visible("#stop")
    page.keyboard.press("Escape")
    turn = wait_for(page, "stopped")
    until(lambda: server.num_cancelled == 1)
    kept = turn.locator(".answer-text").text_content()
    assert kept
    assert "".join(PLANETS).startswith(kept)
    assert page.is_visible("#send")
    server.hold_after = None
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same='true']")
    num_kept = sum(len(one["tokens"]) for one in server.rounds[:6])
    assert server.requests[1]["max_tokens"] == num_kept
    ask(page, "Go on.")
    wait_for(page, "done", 1)
    assert server.requests[2]["messages"][1]["content"] == kept


def test_a_lost_connection_keeps_the_text(page, server):
    """What came stays in sight, the loss is said in words, and asking again does not tell the model the torn answer."""
    server.break_after = 5
    ask(page)
    turn = wait_for(page, "failed")
    assert "connection to the server was lost" in turn.locator(".notice").inner_text()
    assert "kept" in turn.locator(".notice").inner_text()
    assert turn.locator(".round").count() == 5
    server.break_after = None
    turn.locator("text=Ask again").click()
    wait_for(page, "done", 1)
    assert [message["role"] for message in server.requests[-1]["messages"]] == ["user"]


def test_a_full_queue_says_how_long_to_wait(page, server):
    """429 with Retry-After: the button counts down, then asks again in the same place."""
    server.refusal = (429, "the queue is full", {"Retry-After": "2"})
    ask(page)
    turn = wait_for(page, "failed")
    assert "waiting line is full. It asks to wait 2 seconds." in turn.locator(".notice").inner_text()
    button = turn.locator(".notice button")
    assert re.fullmatch(r"Ask again in [12] s", button.inner_text())
    assert button.is_disabled()
    server.refusal = None
    page.wait_for_selector(".notice button:enabled")
    button.click()
    wait_for(page, "done")
    assert page.locator(".turn").count() == 1


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (503, "draining", "shutting down"),
        (400, "max_tokens 9 is too many", "max_tokens 9 is too many"),
        (500, "the engine failed", "the engine failed"),
    ],
)
def test_refusals_are_shown_in_words(page, server, status, message, said):
    server.refusal = (status, message, {})
    ask(page)
    assert said in wait_for(page, "failed").locator(".notice").inner_text()


def test_a_key_is_asked_for_kept_for_the_tab_and_sent(page, server, address):
    """A 401 opens the field; the question that met it is asked with the key, which is in sessionStorage alone."""
    server.key = "sesame"
    ask(page)
    wait_for(page, "failed")
    page.fill("#key", "sesame")
    page.click("text=Use key")
    wait_for(page, "done")
    assert page.is_hidden("#key-form")
    page.goto(address)
    ask(page)
    wait_for(page, "done")
    assert page.evaluate("JSON.stringify(localStorage)").find("sesame") < 0


def test_text_of_the_model_is_never_html(page, server):
    """Markup in tokens, in a tree, or in the name of the model stays text."""
    nasty = ["<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "&amp;", "<b>", "bold", "</b>"]
    server.rounds = rounds_of(nasty, seed=3)
    ask(page, "<i>question</i>")
    turn = wait_for(page, "done")
    assert turn.locator(".answer-text").text_content() == "".join(nasty)
    assert turn.locator(".question-text").text_content() == "<i>question</i>"
    assert page.locator("main img, main script, main b:not(.example b, .lane b), .question-text i").count() == 0


def test_the_keyboard_is_enough(page, server):
    """Shift+Enter makes a line, Enter sends, an empty message does not; nothing is sent while an answer comes."""
    page.press("#prompt", "Enter")
    assert page.locator(".turn").count() == 0
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("two")
    server.hold_after = 3
    page.press("#prompt", "Enter")
    wait_for(page, "streaming")
    assert server.requests[0]["messages"][0]["content"] == "one\ntwo"
    ask(page, "too early")
    assert page.input_value("#prompt") == "too early"
    server.release.set()
    wait_for(page, "done")
    assert len(server.requests) == 1


def test_a_new_chat_is_empty_even_while_an_answer_comes(page, server):
    server.hold_after = 3
    ask(page)
    wait_for(page, "streaming")
    page.click("#new-chat")
    assert page.is_visible("#empty")
    until(lambda: server.num_cancelled == 1)
    server.hold_after = None
    page.locator(".example").first.click()
    wait_for(page, "done")
    assert len(server.requests[1]["messages"]) == 1
    assert page.locator(".turn").count() == 1


def test_the_theme_is_remembered(page, address):
    page.emulate_media(color_scheme="light")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.goto(address)
    assert page.get_attribute("html", "data-theme") == "dark"
    assert page.get_attribute("#theme", "aria-label") == "Use light colours"


def test_plain_text_hides_who_wrote_what(page):
    ask(page)
    turn = wait_for(page, "done")
    marked = turn.locator(".drafted .mark").first
    style = "one => getComputedStyle(one).boxShadow + getComputedStyle(one).backgroundColor"
    assert "none" not in marked.evaluate(style)
    page.check("#plain-text")
    assert marked.evaluate(style) == "nonergba(0, 0, 0, 0)"


@pytest.mark.parametrize(
    ("exactness", "dtype", "said"),
    [
        ("seed", "float32", "Seed-exact, float32"),
        ("seed", "bfloat16", "up to ties"),
        ("bitwise", "bfloat16", "Bitwise"),
        ("distribution", "float32", "Same distribution"),
        ("lossy", "float32", "Lossy"),
    ],
)
def test_the_promise_is_stated_by_exactness_and_precision(page, server, address, exactness, dtype, said):
    """Seed-exactness is promised outright in float32 alone."""
    server.exactness, server.dtype = exactness, dtype
    page.goto(address)
    page.wait_for_selector("#exactness:visible")
    assert said in page.inner_text("#exactness")
    page.click("#exactness")
    assert page.is_visible("#exactness-note")


def test_the_state_of_the_server_is_shown(page, server, address):
    """How many run and wait; draining; and an unreachable server, by words as well as by colour."""
    assert page.inner_text("#connection") == "Ready"
    server.num_running, server.num_waiting = 3, 2
    page.evaluate("checkStatus()")  # a look of the page's own, begun before, may still bring the old state
    page.wait_for_function("byId('connection').innerText === '3 running, 2 waiting'")
    server.is_draining = True
    page.evaluate("checkStatus()")
    page.wait_for_function("byId('connection').innerText.startsWith('Draining')")
    page.route("**/status", lambda route: route.abort())
    page.evaluate("checkStatus()")
    page.wait_for_function("byId('connection').innerText === 'Not reachable'")


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1600])
def test_nothing_is_wider_than_the_screen(page, server, width):
    """With long words in question and answer, a race and the figures open, the page has no sideways scroll."""
    server.rounds = rounds_of([*PLANETS, " " + "x" * 300, " end"], max_nodes=24, max_depth=8)
    page.set_viewport_size({"width": width, "height": 760})
    ask(page, "y" * 300)
    turn = wait_for(page, "done")
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same='true']")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("byId('scroll').scrollWidth <= byId('scroll').clientWidth")
    if width < 1024:
        page.click("#open-panel")
        assert page.is_visible("#tree")
    assert page.evaluate("byId('panel').scrollWidth <= byId('panel').clientWidth")


def test_every_control_has_a_name(page, server):
    """Buttons and fields carry a text, a label or aria-label; ids are unique and references resolve."""
    ask(page)
    wait_for(page, "done")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea')].filter(one =>
        !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).map(one => one.outerHTML)"""
    )
    assert nameless == []
    broken = page.evaluate(
        """[...document.querySelectorAll('[aria-describedby], [aria-labelledby], [aria-controls]')].flatMap(one =>
        ['aria-describedby', 'aria-labelledby', 'aria-controls'].map(name => one.getAttribute(name)).filter(Boolean))
        .filter(id => !document.getElementById(id))"""
    )
    assert broken == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(page, server, theme):
    """WCAG AA: 4.5 to 1 for every text that is shown, against the nearest ground behind it."""
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    ask(page)
    turn = wait_for(page, "done")
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same='true']")
    server.break_after = 2
    ask(page)
    wait_for(page, "failed", 1)
    poor = page.evaluate(CONTRAST)
    assert poor == []


def check_on(browser: Any, url: str, text: str) -> None:
    """An answer on a real server: tokens, figures and a tree are there, and a race finds the same tokens."""
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#exactness:visible")
    page.click("#open-settings")
    page.fill("#max-tokens", "48")
    page.click("#settings >> text=Done")
    ask(page, text)
    turn = wait_for(page, "done")
    assert turn.locator(".token").count() > 0
    assert re.fullmatch(r"\d+ in \d+ rounds?", page.inner_text("#figure-written"))
    turn.locator("text=Race plain decoding").click()
    page.wait_for_selector(".verdict[data-same]", timeout=60_000)
    assert "Identical" in turn.locator(".verdict").inner_text()
    assert errors == []
    context.close()


def test_on_the_real_server(browser):
    """What the scripted server speaks is what the real one speaks: a tiny model, drafted by a lookup."""
    from tests.infer.serve.serving import served as really_served
    from tests.infer.serve.serving import toy_engine

    with really_served(toy_engine()) as running:
        check_on(browser, running.url, "aaaa aaaa aaaa")


@pytest.mark.slow
def test_on_the_real_model(browser, smollm2_path):
    from infer.cost import CostModel
    from infer.drafters import NgramDrafter
    from infer.engine import Engine
    from infer.target import TargetModel
    from tests.infer.serve.serving import served as really_served

    engine = Engine(TargetModel.load(smollm2_path, dtype="float32"), NgramDrafter(), cost=CostModel.free())
    with really_served(engine) as running:
        check_on(browser, running.url, "Count from 1 to 30, separated by commas.")


def test_less_motion_when_asked(browser, address, server):
    """With prefers-reduced-motion nothing animates, and the tree is drawn once the answer is there."""
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    server.hold_after = 8
    ask(page)
    page.wait_for_selector(".round[data-round='7']")
    caret = "getComputedStyle(document.querySelector('.answer-text'), '::after').animationName"
    assert page.evaluate(caret) == "none"
    assert page.locator("#tree svg").count() == 0
    server.release.set()
    wait_for(page, "done")
    assert page.locator("#tree svg").count() == 1
    context.close()
