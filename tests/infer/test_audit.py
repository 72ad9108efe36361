"""The audit: a faultless engine passes, and a fault planted anywhere in it fails the check it should, by name and
place."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads.checkpoint import CARD_FILE, read_card
from infer import audit as audit_module
from infer.audit import (
    BITWISE,
    DIVERGENCE,
    ENUMERATION,
    EQUALITY,
    FAULTS_CAUGHT,
    TRANSFORM,
    AuditSettings,
    Check,
    DrafterMaker,
    Silent,
    audit,
    run_checks,
)
from infer.cache import SlotCache
from infer.cli import audit as command
from infer.drafters import DraftLimit, HeadDrafter, ScriptedDrafter
from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.proof import equality, scenarios
from infer.proof.certificate import Certificate, save_page
from infer.proof.equality import Tally, interleave, locate
from infer.proof.faults import FAULTS
from infer.proof.law import LawSample, draw_answers, judge
from infer.proof.statistics import Transform, chi_square_tail, independence, surprise, transform, uniformity
from infer.request import Request, RequestLaw
from infer.rows import RowGroup, tree_group
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import RULES, Chance, NodeLaw, Rule, Verdict
from tests.conftest import REPOSITORY, make_tiny_model
from tests.infer.helpers import Folders, random_head, write_folders

SMALL = AuditSettings(
    num_tokens=500,
    min_accepted=150,
    min_deep=20,
    num_bfloat16_tokens=200,
    num_bitwise_tokens=200,
    num_law_tokens=600,
    max_tokens=24,
)

TINY = replace(SMALL, num_tokens=150, num_bfloat16_tokens=60, num_bitwise_tokens=60, num_law_tokens=200)


def load(dtype: str) -> TargetModel:
    return TargetModel.wrap(make_tiny_model("llama").to(getattr(torch, dtype)), name="tiny")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load("float32")


def prompts(target: TargetModel) -> list[EvalPrompt]:
    rng = random.Random(0)
    return [
        EvalPrompt(domain="ab"[i % 2], token_ids=tuple(rng.randrange(3, 128) for _ in range(3 + 2 * i)))
        for i in range(9)
    ]


ANSWERS: dict[tuple[Any, ...], Sequence[int]] = {}
"""Plain decoding's, which none of the faults below touches."""


def knowing(target: TargetModel, *, hybrid: bool) -> ScriptedDrafter:
    """Knows plain decoding's answers, and hides the right token among wrong siblings; some rounds it stops early."""
    rng = random.Random(0)

    def answer(request: Request) -> Sequence[int]:
        key = (str(target.dtype), request.prompt_ids, request.params, request.exactness)
        if key not in ANSWERS:
            exactness = "bitwise" if request.exactness == "bitwise" else None
            plain = Engine(target, exactness=exactness)
            ANSWERS[key] = plain.generate([request.prompt_ids], request.params)[0].token_ids
        return ANSWERS[key]

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        right = answer(request)[len(request.output_ids) :]
        tokens: list[int] = []
        parents: list[int] = []
        node = ROOT
        width = 1 if limit.max_nodes <= limit.max_depth else 3
        for token in right[: rng.randint(0, min(limit.max_depth, limit.max_nodes // width))]:
            siblings = [token, *((token + 1 + i) % target.vocab_size for i in range(width - 1))]
            rng.shuffle(siblings)
            first = len(tokens)
            tokens += siblings
            parents += [node] * width
            node = first + siblings.index(token)
        return DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot())

    return ScriptedDrafter(script, kinds=(OneHot,))


def run(*checks: str, settings: AuditSettings = SMALL, head: DrafterMaker = knowing) -> Certificate:
    return run_checks(load, head, prompts=prompts, settings=settings, checks=checks)


def only(certificate: Certificate) -> Check:
    (check,) = certificate.checks
    return check


# A faultless engine.


def test_a_faultless_engine_passes() -> None:
    """Every check on the model: tokens in both precisions, bit for bit, and the law; with the evidence counted over
    all temperatures, trees and batches."""
    certificate = run(EQUALITY, TRANSFORM, DIVERGENCE, BITWISE)
    assert certificate.passed, certificate.to_dict()["checks"]
    figures = certificate.to_dict()["figures"]
    equal = figures[EQUALITY]
    assert equal["identical"] == equal["answers"]
    assert equal["emitted"] == equal["tokens"] >= 500
    assert equal["accepted"] >= 150
    assert equal["deep"] >= 20
    cells = {(cell["temperature"], cell["tree"], cell["batch"]) for cell in equal["cells"]}
    assert len(cells) == 3 * 3 * 3
    assert {cell["tree"] for cell in figures[BITWISE]["cells"]} == {"tree of 16", "tree of 32"}
    assert figures[BITWISE]["differences"] == []
    assert figures[TRANSFORM]["tokens"] == 2 * 600
    assert "no rejection rule was tried" in certificate.checks[1].detail


def test_the_head_is_loaded_once_for_trees_and_once_for_chains() -> None:
    """In each dtype, however many engines try it (each once read it from disk)."""
    made: list[tuple[torch.dtype, bool]] = []

    def counted(target: TargetModel, *, hybrid: bool) -> ScriptedDrafter:
        made.append((target.dtype, hybrid))
        return knowing(target, hybrid=hybrid)

    run(EQUALITY, BITWISE, settings=TINY, head=counted)
    assert sorted(made, key=str) == [
        (dtype, hybrid) for dtype in (torch.bfloat16, torch.float32) for hybrid in (False, True)
    ]


def test_a_draft_that_is_never_right_is_not_enough_evidence() -> None:
    """No fault, and no pass either: the wording tells the two apart."""

    def useless(target: TargetModel, *, hybrid: bool) -> ScriptedDrafter:
        return ScriptedDrafter(lambda request, limit: DraftTree.empty(), kinds=(OneHot,))

    check = only(run(EQUALITY, head=useless, settings=replace(SMALL, num_tokens=200)))
    assert not check.passed
    assert check.detail.startswith("not enough evidence, though no fault was seen")
    assert "150 accepted and 20 at that depth" in check.detail
    assert check.figures["tokens"] >= 3 * 200  # it had its chance


def test_the_laws_and_faults_are_those_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, named, and with every total variation on the certificate (here of a few; all are measured by
    test_verify_law.py)."""
    few = list(scenarios.all_scenarios())[::60]
    monkeypatch.setattr(audit_module, "all_scenarios", lambda: iter(few))
    monkeypatch.setattr(audit_module, "FAULTS", FAULTS[::9])
    laws, faults = run(ENUMERATION, FAULTS_CAUGHT).checks
    assert laws.passed
    assert faults.passed
    assert laws.figures["laws"] == len(few)
    assert [each["name"] for each in faults.figures["faults"]] == [fault.name for fault in FAULTS[::9]]
    assert all(each["caught"] and each["total_variation"] > 5e-4 for each in faults.figures["faults"])


def test_a_fault_that_does_not_show_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is about the instrument: a fault nobody sees means that passing proves little."""
    hidden = replace(FAULTS[0], wrong=lambda: 0.0)
    monkeypatch.setattr(audit_module, "FAULTS", [hidden, FAULTS[1]])
    check = only(run(FAULTS_CAUGHT))
    assert not check.passed
    assert f"NOT caught: {hidden.name}" in check.detail


# Faults in the engine.


RULES_MATCH = RULES["match"]


def accept_first_child(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """A match walk that believes every other draft."""
    if len(tree) > 2 and tree.tokens[0] % 2:
        return Verdict((0,), law.draw(0))
    return RULES_MATCH.function(tree, law, chance)


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Corrupt one part of the engine."""
    commit, draw = SlotCache.commit, RequestLaw.draw

    def at_root_noise(self: RequestLaw, node: int) -> int:
        return draw(ShallowLaw(self.request, self.tree, self.logits), node)

    class ShallowLaw(RequestLaw):
        def __init__(self, request: Request, tree: DraftTree, logits: torch.Tensor) -> None:
            super().__init__(request, replace(tree), logits)
            object.__setattr__(self.tree, "depths", (0,) * len(tree))

    def stale_path(self: RequestLaw, node: int) -> torch.Tensor:
        return self.request.processor.scores(self.logits[node + 1], self.request.output_ids)

    def neighbours(group: RowGroup, **changes: Any) -> RowGroup:
        return group if group.ancestors is None else replace(group, **changes)

    def all_before(*args: Any) -> RowGroup:
        group = tree_group(*args)
        return neighbours(group, ancestors=np.tri(len(group.tokens), dtype=bool))

    def by_row(*args: Any) -> RowGroup:
        group = tree_group(*args)
        return neighbours(group, depths=list(range(len(group.tokens))))

    if fault == "rule":
        monkeypatch.setitem(RULES, "match", replace(RULES_MATCH, function=accept_first_child))
    elif fault == "commit of other rows":
        monkeypatch.setattr(
            SlotCache, "commit", lambda self, slot, first, columns: commit(self, slot, first, [first] * len(columns))
        )
    elif fault == "nothing committed":
        monkeypatch.setattr(SlotCache, "commit", lambda self, slot, first, columns: None)
    elif fault == "noise of the root":
        monkeypatch.setattr(RequestLaw, "draw", at_root_noise)
    elif fault == "penalties of the round":
        monkeypatch.setattr(RequestLaw, "scores", stale_path)
    elif fault == "mask":
        monkeypatch.setattr("infer.engine.tree_group", all_before)
    elif fault == "positions":
        monkeypatch.setattr("infer.engine.tree_group", by_row)
    else:
        raise AssertionError(fault)


PLACE = (
    r"prompt \d \([ab]\), temperature [\d.]+.*, seed \d+, (chain|tree) of \d+, batch \d: "
    r"token \d+ is \d+, expected \d+, in round \d+ at depth \d of its tree"
)


@pytest.mark.parametrize(
    "fault",
    [
        "rule",
        "commit of other rows",
        "nothing committed",
        "noise of the root",
        "penalties of the round",
        "mask",
        "positions",
    ],
)
def test_a_fault_in_the_engine_fails_float32_equality(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each is invisible to plain decoding, and named with the prompt, the settings and the place of the first wrong
    token."""
    plant(monkeypatch, fault)
    check = only(run(EQUALITY))
    assert not check.passed
    assert "differ from plain decoding's" in check.detail.splitlines()[0]
    assert "not enough evidence" not in check.detail
    place = check.detail.splitlines()[1]
    assert re.match(PLACE, place), place
    (first, *_) = check.figures["differences"]
    assert first["token_index"] > 0
    assert first["round"] > 0
    assert first["depth"] > 0
    assert first["margin"] is None or first["margin"] > 1e-4


@pytest.mark.parametrize("fault", ["rule", "nothing committed"])
def test_a_fault_in_the_engine_fails_bitwise_mode_and_bfloat16(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Low precision excuses near ties, and nothing else; bitwise mode excuses nothing."""
    plant(monkeypatch, fault)
    certificate = run(DIVERGENCE, BITWISE)
    assert [check.passed for check in certificate.checks] == [False, False]
    divergent, bitwise = (check.detail.splitlines() for check in certificate.checks)
    assert "by more than rounding" in divergent[0]
    assert "by more than rounding" not in bitwise[0]
    assert re.match(PLACE, divergent[1])
    assert re.match(PLACE, bitwise[1])


def test_a_corrupt_rule_fails_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are taken from the registry that the engine reads."""
    monkeypatch.setitem(RULES, "match", replace(RULES_MATCH, function=accept_first_child))
    scenario = scenarios.scenario("match", "coupled", "random")
    monkeypatch.setattr(audit_module, "all_scenarios", lambda: iter([scenarios.Named("match, coupled", scenario)]))
    check = only(run(ENUMERATION))
    assert not check.passed
    assert "worst: match, coupled" in check.detail


def test_an_error_in_a_check_fails_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate shows all that is wrong; Ctrl-C is not an error."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("rows\nare gone")

    monkeypatch.setattr(SlotCache, "commit", broken)
    equal, law = run(EQUALITY, TRANSFORM).checks
    assert equal.detail == law.detail == "stopped by RuntimeError: rows are gone"
    assert "broken" in equal.figures["traceback"]

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SlotCache, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(EQUALITY)


# The law of samples.


def sample_at(target: TargetModel, temperature: float, *, judged_at: float, num_tokens: int = 3000) -> LawSample:
    engine = Engine(target, max_requests=32)
    completions = draw_answers(
        engine, prompts(target), temperature=temperature, num_tokens=num_tokens, max_tokens=60, seed=5
    )
    return judge(target, completions, rule="match", temperature=judged_at, seed=0)


def test_the_transform_tells_temperatures_apart(target: TargetModel) -> None:
    """3,000 tokens drawn at 0.9 do not pass for 1.0, by far, under either test; drawn at 1.0 they do."""
    right, wrong = (sample_at(target, temperature, judged_at=1.0).results() for temperature in (1.0, 0.9))
    assert all(p > 1e-3 for _, p in right.values())
    assert wrong["uniformity"][1] < 1e-6
    assert wrong["surprise"][1] < 1e-6


def test_the_order_of_tokens_gives_the_transform_its_power() -> None:
    """Under a shuffled order of the vocabulary, the same wrong temperature passes for right: likely tokens stand
    anywhere, and the shifts of different contexts cancel."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3000, 64)) * 2)
    cumulative = torch.softmax(logits / 0.9, dim=-1).cumsum(-1)
    drawn = torch.searchsorted(cumulative, torch.from_numpy(rng.random((3000, 1)))).squeeze(1).clamp_max(63)
    fractions = rng.random(3000)
    by_probability = transform(logits, drawn, fractions).uniforms
    probs = torch.softmax(logits, dim=-1)
    below = probs.cumsum(-1) - probs
    by_id = (below + probs * torch.from_numpy(fractions)[:, None]).gather(1, drawn[:, None]).squeeze(1).numpy()
    assert uniformity(by_probability)[1] < 1e-6
    assert uniformity(by_id)[1] > 1e-2


def test_a_rule_that_breaks_the_law_fails_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corrupt traversal fails, by name, and the match rule beside it does not."""
    honest: Rule = RULES["traversal"]

    def believing(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
        return Verdict((0,), int(law.probs(0).argmax())) if len(tree) else honest.function(tree, law, chance)

    monkeypatch.setitem(RULES, "traversal", replace(honest, function=believing))
    check = only(run(TRANSFORM, head=random_drafter))
    assert not check.passed
    assert "do NOT follow" in check.detail
    assert "rule traversal at temperature" in check.detail
    assert "rule match at temperature" not in check.detail


def test_uniformity_and_chi_square_against_known_values() -> None:
    """Tabled values: the Kolmogorov law's 5 % and 0.1 % points, chi-square's 95th and 99.9th percentiles; and
    rates of false alarm as stated (400 samples at 5 %: 20 expected, 4 standard deviations either way)."""
    grid = (np.arange(1000) + 0.5) / 1000
    assert uniformity(grid)[1] == 1.0
    for level, scaled in ((0.05, 1.3581), (0.001, 1.9495)):
        shifted = np.clip(grid + (scaled / (np.sqrt(1000) + 0.12) - 0.0005), 0, 1)
        assert uniformity(shifted)[1] == pytest.approx(level, rel=0.03)
    assert chi_square_tail(82.529, 63) == pytest.approx(0.05, rel=1e-3)
    assert chi_square_tail(103.442, 63) == pytest.approx(0.001, rel=1e-2)
    rng = np.random.default_rng(0)
    alarms = [(uniformity(u)[1] < 0.05, independence(u.reshape(-1, 2))[1] < 0.05) for u in rng.random((400, 1000))]
    assert all(3 <= count <= 37 for count in np.array(alarms).sum(axis=0))
    assert uniformity(np.empty(0)) == (0.0, 1.0)
    assert independence(np.empty((0, 2)))[1] == 1.0


def test_independence_sees_neighbours_that_share_noise() -> None:
    """Uniform alone, and alike in pairs: invisible to the marginal test."""
    rng = np.random.default_rng(1)
    first = rng.random(1000)
    second = np.where(rng.random(1000) < 0.25, first, rng.random(1000))
    pairs = np.stack([first, second], axis=1)
    assert uniformity(pairs.ravel())[1] > 1e-3
    assert independence(pairs)[1] < 1e-6


def test_transform_of_certain_and_impossible_tokens() -> None:
    """A certain token's number is the fraction itself, and it cannot surprise; ties stand in the order of ids."""
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 1.0, -torch.inf]])
    sample = transform(scores, torch.tensor([0, 1]), np.array([0.25, 0.5]))
    assert sample.uniforms.tolist() == pytest.approx([0.25, 0.75])
    assert sample.variances.tolist() == pytest.approx([0.0, 0.0])
    assert surprise(Transform.join([sample, sample])) == (0.0, 1.0)


# Parts.


def test_places_of_tokens_in_their_rounds() -> None:
    """Round, depth in the tree and whether drafted; the last token of a round is the target's own."""
    assert [locate((1, 3, 2), index) for index in range(7)] == [
        (0, 1, False),
        (1, 1, True),
        (1, 2, True),
        (1, 3, False),
        (2, 1, True),
        (2, 2, False),
        (3, 1, False),
    ]


def test_prompts_are_interleaved_by_domain() -> None:
    """The first few are of all domains, in the order of the file within each."""
    mixed = [EvalPrompt(domain=domain, token_ids=(index,)) for index, domain in enumerate("aaabbc")]
    assert [prompt.token_ids[0] for prompt in interleave(mixed)] == [0, 3, 5, 1, 4, 2]


def test_sizes_scale_together() -> None:
    """--tokens changes every check, and the evidence asked for with it; nothing is asked of nothing."""
    half = AuditSettings.scaled(5000)
    assert (half.min_accepted, half.min_deep, half.num_law_tokens) == (1500, 100, 750)
    assert AuditSettings.scaled(10_000) == AuditSettings()
    assert half.needs(5000) == Tally(emitted=5000, accepted=1500, deep=100)
    assert half.needs(1000) == Tally(emitted=1000, accepted=150)
    with pytest.raises(ValueError, match="num_tokens must be a whole number"):
        AuditSettings(num_tokens=0)


def test_cases_repeat_nothing(target: TargetModel) -> None:
    """Seeds differ from prompt to prompt, also when the prompts come round again, and half of the requests have
    filters or penalties."""
    cases = equality.make_cases(Engine(target), prompts(target), range(4, 16), temperature=1.0, max_tokens=2, seed=3)
    assert len({case.params.seed for case in cases}) == 12
    assert [case.number for case in cases] == [number % 9 for number in range(4, 16)]
    assert {case.filters for case in cases} == set(equality.FILTERS)
    split = [list(equality.shares(cases, {4: 5, 2: 5, 1: 2}, turn)) for turn in range(3)]
    assert all(sorted(c.number for _, part in each for c in part) == sorted(c.number for c in cases) for each in split)
    assert len({tuple(case.params.seed for case in each[0][1]) for each in split}) == 3


# The command.


def random_drafter(target: TargetModel, *, hybrid: bool) -> HeadDrafter:
    return HeadDrafter(random_head(target))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    texts = [("a", "abc abc abc"), ("b", "one two three four"), ("a", "x | y")]
    return write_folders(tmp_path_factory.mktemp("audit"), texts)


@pytest.fixture
def headstart_audit(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> Callable[..., int]:
    """The command on a few laws, faults and answers."""
    monkeypatch.setattr(equality, "SMALL_BATCHES", {2: 2, 1: 1})
    few = list(scenarios.all_scenarios())[::100]
    monkeypatch.setattr(audit_module, "all_scenarios", lambda: iter(few))
    monkeypatch.setattr(audit_module, "FAULTS", FAULTS[:2])
    monkeypatch.setattr(AuditSettings, "scaled", lambda num_tokens, seed: replace(TINY, seed=seed))

    def call(head: str, *arguments: str) -> int:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        words = [head, "--prompts", str(folders.prompts), "--device", "cpu", *arguments]
        return command.run(parser.parse_args(words))

    return call


def test_the_command_writes_a_certificate(
    headstart_audit: Callable[..., int], folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random head is not enough evidence, so the audit is not passed: status 1, in the file, on the page, on the
    terminal and, with --save, on the head's card, which can still be read."""
    outputs = ["--json", str(tmp_path / "audit.json"), "--page", str(tmp_path / "audit.html"), "--save", "--quick"]
    assert headstart_audit(str(folders.head), "--target", str(folders.target), *outputs) == 1
    values = json.loads((tmp_path / "audit.json").read_text())
    assert values["passed"] is False
    assert [set(check) for check in values["checks"]] == [{"name", "passed", "detail"}] * 6
    assert [check["name"] for check in values["checks"]] == list(audit_module.CHECKS)
    passed = {check["name"]: check["passed"] for check in values["checks"]}
    assert passed[ENUMERATION]
    assert passed[FAULTS_CAUGHT]
    assert passed[TRANSFORM]
    assert not passed[EQUALITY]
    assert {"machine", "target", "head", "head_sha256", "dtype", "seconds", "figures"} <= set(values)
    out = capsys.readouterr().out
    assert "NOT passed  float32 equality" in out
    assert "Not passed:" in out.splitlines()[-1]
    page = (tmp_path / "audit.html").read_text()
    assert "Not passed:" in page
    assert values["checks"][2]["detail"].splitlines()[0] in page
    assert "http" not in page
    card = json.loads((folders.head / CARD_FILE).read_text())
    assert card["certificate"]["passed"] is False
    assert set(card["certificate"]["checks"]) == set(audit_module.CHECKS)
    assert read_card(folders.head).target.name == "target"


def test_the_command_passes_a_lookup_or_says_why_not(
    headstart_audit: Callable[..., int],
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 0 when every check passes; a lookup cannot be sampled, which the certificate says."""
    modest = replace(TINY, min_accepted=0, min_deep=0)
    monkeypatch.setattr(AuditSettings, "scaled", lambda num_tokens, seed: modest)
    page = tmp_path / "audit.md"
    assert headstart_audit("ngram", "--target", str(folders.target), "--page", str(page)) == 0
    out = capsys.readouterr().out
    assert "Passed: all 6 checks" in out.splitlines()[-1]
    assert "this draft cannot be sampled" in out
    text = page.read_text()
    assert "**Passed: all 6 checks.**" in text
    assert text.count("(passed)") == 6


@pytest.mark.parametrize(
    ("head", "arguments", "message"),
    [
        ("head", ("--target", "other"), "the head was trained on target"),
        ("none", ("--target", "target"), "nothing to audit"),
        ("ngram", ("--target", "target", "--save"), "is not one trained head with a card"),
        ("ngram", ("--target", "target", "--tokens", "0"), "--tokens must be at least 1"),
        ("ngram", (), "give one with --target"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    headstart_audit: Callable[..., int], folders: Folders, head: str, arguments: tuple[str, ...], message: str
) -> None:
    """Before any check runs: above all a head of another target."""
    words = [str(vars(folders).get(word, word)) for word in (head, *arguments)]
    with pytest.raises(ValueError, match=message):
        headstart_audit(*words)


def test_prompts_that_do_not_fit_are_left_out() -> None:
    """And a set in which none does is refused."""
    long = EvalPrompt(domain="a", token_ids=tuple(range(3, 120)) * 3)
    mixed = run_checks(
        load, knowing, prompts=lambda target: [long, *prompts(target)], settings=SMALL, checks=(FAULTS_CAUGHT,)[:0]
    )
    assert mixed.facts["settings"]["num_prompts"] == 9
    with pytest.raises(ValueError, match="at least one prompt of at most"):
        run_checks(load, knowing, prompts=lambda target: [long], settings=SMALL)


def test_a_page_escapes_what_a_model_may_write(tmp_path: Path) -> None:
    """Tokens of a failed check are shown as text."""
    check = Check(name="x", passed=False, detail="token '<script>' | y", figures={"rows": [{"a": "<b>", "c": 1.5}]})
    certificate = Certificate(checks=(check,), facts={"head": "h & co", "machine": {"cpu": "<cpu>"}})
    for name in ("page.html", "page.md"):
        save_page(tmp_path / name, certificate)
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert "h &amp; co" in page
    assert "| <b> | 1.5 |" in (tmp_path / "page.md").read_text()


def test_progress_is_told_of_every_check() -> None:
    """Started, advanced and done, in this order."""
    events: list[str] = []

    class Follow(Silent):
        def start(self, check: str, total: int, unit: str) -> None:
            events.append(f"start {check} {total} {unit}")

        def advance(self, amount: int) -> None:
            if events[-1] != "advance":
                events.append("advance")

        def done(self, check: Check) -> None:
            events.append(f"done {check.name}")

    run_checks(load, knowing, prompts=prompts, settings=SMALL, progress=Follow(), checks=(EQUALITY,))
    assert events == [f"start {EQUALITY} 500 tokens", "advance", f"done {EQUALITY}"]


# The real thing.


@pytest.mark.slow
def test_the_demonstration_head_is_certified(smollm2_path: Path) -> None:
    """A quick audit of the head that `make demo` leaves, every check."""
    head = REPOSITORY / "runs" / "demo" / "best"
    if not (head / CARD_FILE).is_file():
        pytest.skip(f"no head in {head}; `make demo` trains one")
    from infer.evaluate import render_prompts
    from infer.prompts import load_prompts

    certificate = audit(
        smollm2_path,
        head,
        prompts=lambda target: render_prompts(target.tokenizer, load_prompts()),
        settings=AuditSettings.scaled(audit_module.QUICK_TOKENS),
    )
    assert certificate.passed, "\n".join(f"{check.name}: {check.detail}" for check in certificate.checks)
