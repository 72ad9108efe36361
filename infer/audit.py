"""The audit of a head: every promise of lossless decoding, tested on the model and machine at hand.

Two checks need no model: the exact laws of the installed rules, by enumeration, and faults planted in the very
functions that the engine calls, each of which must show. Four run the head on its target, loaded in float32 and then
in bfloat16:

    float32 equality                speculative token ids are plain decoding's, over temperatures, seeds, trees, batches
    probability integral transform  what is emitted has the probabilities that transformers' own model gives it
    bfloat16 divergence             rounding may make answers differ from plain decoding's, but only at near ties
    bitwise mode                    in forwards of one shape answers do not differ even there

What an audit cannot show: that a fault which needs longer texts, other prompts or other settings than were tried is
absent. The certificate says how much was tried.
"""

from __future__ import annotations

import gc
import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from heads.checkpoint import WEIGHTS_FILE, present_folder
from infer.cost import CostModel
from infer.divergence import tie_below
from infer.drafters import NO_DRAFT, Drafter, adapter_of, head_folder, load_drafter
from infer.drafters.base import TreeSettings
from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.machine import headstart_version, machine_facts
from infer.proof.certificate import Certificate, Check
from infer.proof.equality import DEEP, TREE16, TREE32, TREES, Evidence, Tally, gather, interleave
from infer.proof.faults import FAULTS
from infer.proof.law import NUM_TESTS, LawSample, draw_answers, judge
from infer.proof.scenarios import DRAFTERS_OF_RULE, EXACT, all_scenarios
from infer.target import TargetModel

ENUMERATION = "enumeration"
FAULTS_CAUGHT = "planted faults"
EQUALITY = "float32 equality"
TRANSFORM = "probability integral transform"
DIVERGENCE = "bfloat16 divergence"
BITWISE = "bitwise mode"
CHECKS = (ENUMERATION, FAULTS_CAUGHT, EQUALITY, TRANSFORM, DIVERGENCE, BITWISE)

LAW_TEMPERATURES = (0.7, 1.0)
FALSE_ALARM = 1e-3
"""How often a faultless head would fail the probability integral transform, all of its tests together."""

_SHOWN = 3
"""Differences described in a check's detail; the figures hold all."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How much is tried.

    Tokens are those that speculative decoding emits. Of the float32 check's, `min_accepted` must have been drafted and
    accepted, and `min_deep` of these at depth 3 or below.
    """

    num_tokens: int = 10_000
    min_accepted: int = 3_000
    min_deep: int = 200
    num_bfloat16_tokens: int = 2_000
    num_bitwise_tokens: int = 3_000
    num_law_tokens: int = 1_500
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in ("min_accepted", "min_deep", "seed") else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{item.name} must be a whole number of at least {least}, got {value!r}")

    @classmethod
    def scaled(cls, num_tokens: int, *, seed: int = 0) -> AuditSettings:
        """The default audit with its sizes in proportion to `num_tokens`."""
        whole = cls()

        def part(size: int, *, least: int = 1) -> int:
            return max(least, size * num_tokens // whole.num_tokens)

        return cls(
            num_tokens=num_tokens,
            min_accepted=part(whole.min_accepted),
            min_deep=part(whole.min_deep),
            num_bfloat16_tokens=part(whole.num_bfloat16_tokens, least=300),
            num_bitwise_tokens=part(whole.num_bitwise_tokens, least=300),
            num_law_tokens=part(whole.num_law_tokens, least=400),
            seed=seed,
        )

    def needs(self, num_tokens: int) -> Tally:
        """Evidence asked of a comparison over `num_tokens` tokens."""
        whole = Tally(emitted=self.num_tokens, accepted=self.min_accepted, deep=self.min_deep)
        if num_tokens == self.num_tokens:
            return whole
        # Half the rate suffices where fewer tokens are tried: the float32 check has shown the draft at work.
        return Tally(emitted=num_tokens, accepted=self.min_accepted * num_tokens // self.num_tokens // 2)


QUICK_TOKENS = 1_500

Loader = Callable[[str], TargetModel]
"""Loads the target in the dtype of that name."""
Prompts = Callable[[TargetModel], Sequence[EvalPrompt]]
"""Renders the prompts for a loaded target."""


class DrafterMaker(Protocol):
    """Makes the draft under audit for a loaded target: joined by the lookup, or (for chains) without it."""

    def __call__(self, target: TargetModel, *, hybrid: bool) -> Drafter: ...


class Progress(Protocol):
    """Called when a check starts (with its amount of work), advances and ends."""

    def start(self, check: str, total: int, unit: str) -> None: ...
    def advance(self, amount: int) -> None: ...
    def done(self, check: Check) -> None: ...


class Silent:
    """Progress that is shown to nobody."""

    def start(self, check: str, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def done(self, check: Check) -> None:
        pass


def audit(
    target: str | Path,
    head: str | Path,
    *,
    prompts: Prompts,
    settings: AuditSettings | None = None,
    device: str = "cpu",
    loading: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Test `head` (a folder, or `ngram`) on `target` (a folder or a Hub name). `loading`: how `TargetModel.load` is to
    load it, besides.

    Raises ValueError before any check if the head was trained for another target.
    """
    refuse_no_draft(head)
    how = {"adapter": adapter_of(head), **(loading or {})}

    def load(dtype: str) -> TargetModel:
        return TargetModel.load(target, dtype=dtype, device=device, **how)

    def make_drafter(target: TargetModel, *, hybrid: bool) -> Drafter:
        drafter = load_drafter(head, target, hybrid=hybrid)
        assert drafter is not None
        return drafter

    facts = _head_facts(head)  # now: another process may write a better head to the folder meanwhile
    certificate = run_checks(load, make_drafter, prompts=prompts, settings=settings, progress=progress)
    return replace(certificate, facts={**facts, **certificate.facts})


def refuse_no_draft(head: str | Path) -> None:
    """Plain decoding is what an audit compares with."""
    if str(head) == NO_DRAFT:
        raise ValueError("'none' drafts nothing, so there is nothing to audit: give a head's folder or 'ngram'")


def run_checks(
    load: Loader,
    make_drafter: DrafterMaker,
    *,
    prompts: Prompts,
    settings: AuditSettings | None = None,
    progress: Progress | None = None,
    checks: Sequence[str] = CHECKS,
) -> Certificate:
    """The certificate of any target and draft; `checks` leaves some out."""
    start = time.perf_counter()
    settings, progress = settings or AuditSettings(), progress or Silent()
    subject = partial(Subject.load, load, make_drafter, prompts=prompts, settings=settings, advance=progress.advance)
    made: list[Check] = []

    def test(name: str, amount: int, unit: str, check: Callable[[], Check]) -> None:
        if name in checks:
            progress.start(name, amount, unit)
            made.append(_guarded(name, check))
            progress.done(made[-1])

    one = subject("float32")
    facts = _facts(one)
    num_law_tokens = settings.num_law_tokens * len(LAW_TEMPERATURES) * len(one.law_promises())
    test(ENUMERATION, sum(1 for _ in all_scenarios()), "laws", lambda: enumeration(progress.advance))
    test(FAULTS_CAUGHT, len(FAULTS), "faults", lambda: faults_caught(progress.advance))
    test(EQUALITY, settings.num_tokens, "tokens", partial(float32_equality, one))
    test(TRANSFORM, num_law_tokens, "tokens", partial(integral_transform, one))
    if {DIVERGENCE, BITWISE} & set(checks):
        del one
        gc.collect()  # a fused model refers to itself: only so are its weights gone before the other copy comes
        two = subject("bfloat16")
        test(DIVERGENCE, settings.num_bfloat16_tokens, "tokens", partial(bfloat16_divergence, two))
        test(BITWISE, settings.num_bitwise_tokens, "tokens", partial(bitwise_mode, two))
    return Certificate(checks=tuple(made), facts={**facts, "seconds": round(time.perf_counter() - start, 1)})


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run a check. One that stops by an error has failed, and the others go on: the certificate should show all that
    is wrong."""
    try:
        return check()
    except Exception as error:
        text = " ".join(str(error).split())
        figures = {"traceback": traceback.format_exc()}
        return Check(name=name, passed=False, detail=f"stopped by {type(error).__name__}: {text}", figures=figures)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited: a target in one dtype, its draft (for trees, and for chains), and the prompts to try it on.

    Engines share the drafters, so one at a time may decode.
    """

    target: TargetModel
    tree_drafter: Drafter
    chain_drafter: Drafter
    prompts: Sequence[EvalPrompt]
    settings: AuditSettings
    advance: Callable[[int], None]

    @classmethod
    def load(
        cls,
        load: Loader,
        make_drafter: DrafterMaker,
        dtype: str,
        *,
        prompts: Prompts,
        settings: AuditSettings,
        advance: Callable[[int], None],
    ) -> Subject:
        """Refuses a head of another target, and prompts none of which fits; those that do not fit are left out."""
        target = load(dtype)
        longest = target.max_length - settings.max_tokens
        fitting = [prompt for prompt in interleave(prompts(target)) if len(prompt.token_ids) <= longest]
        if not fitting:
            raise ValueError(
                f"an audit needs at least one prompt of at most {longest} tokens ({target.name} takes "
                f"{target.max_length}, of which {settings.max_tokens} are for the answer)"
            )
        return cls(
            target=target,
            tree_drafter=make_drafter(target, hybrid=True),
            chain_drafter=make_drafter(target, hybrid=False),
            prompts=fitting,
            settings=settings,
            advance=advance,
        )

    def engine(self, tree: TreeSettings, batch: int, *, exactness: str | None = None) -> Engine:
        """An engine with the draft, whose trees do not depend on the machine."""
        drafter = self.chain_drafter if tree.branch == 1 else self.tree_drafter
        return Engine(self.target, drafter, exactness=exactness, tree=tree, max_requests=batch, cost=CostModel.free())

    def law_promises(self) -> tuple[str, ...]:
        """What decoding can promise of the law with this draft: a rejection rule needs one that can be sampled."""
        sampled = self.engine(TREES[TREE16], 1, exactness="distribution").rule.name != "match"
        return ("seed", "distribution") if sampled else ("seed",)

    def compare(self, trees: Sequence[str], num_tokens: int, *, exactness: str | None = None) -> Evidence:
        """Hold speculative answers against plain ones under the same promise."""
        return gather(
            self.prompts,
            lambda batch: Engine(self.target, exactness=exactness, max_requests=batch, cost=CostModel.free()),
            partial(self.engine, exactness=exactness),
            trees=trees,
            needs=self.settings.needs(num_tokens),
            rounding=None if exactness == "bitwise" else self.target.tie_dtype,
            max_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            progress=self.advance,
        )

    def token(self, token: int | None) -> str:
        """A token as a report shows it."""
        if token is None:
            return "missing"
        tokenizer = self.target.tokenizer
        return f"{token}" if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"


# The checks that need no model.


def enumeration(advance: Callable[[int], None]) -> Check:
    """Compute the exact law of every scenario under the rules as they are registered."""
    worst, where, num_laws = 0.0, "", 0
    for name, scenario in all_scenarios():
        deviation = scenario.total_variation()
        num_laws += 1
        if not deviation <= worst:
            worst, where = deviation, name
        advance(1)
    passed = worst < EXACT
    place = f"below {EXACT:g}" if passed else f"NOT below {EXACT:g} (worst: {where})"
    return Check(
        name=ENUMERATION,
        passed=passed,
        detail=(
            f"in {num_laws} exact laws of {len(DRAFTERS_OF_RULE)} rules the emitted tokens deviate from plain "
            f"sampling by at most {worst:.1e}, {place}"
        ),
        figures={"laws": num_laws, "rules": ", ".join(DRAFTERS_OF_RULE), "worst_deviation": worst, "worst": where},
    )


def faults_caught(advance: Callable[[int], None]) -> Check:
    """Plant each fault, one at a time, in the code that runs here, and see whether it shows."""
    findings = []
    for fault in FAULTS:
        findings.append(fault.measure())
        advance(1)
    missed = [finding.name for finding in findings if not finding.caught]
    least = min(findings, key=lambda finding: finding.total_variation)
    detail = (
        f"{len(findings) - len(missed)} of {len(findings)} planted faults show as a deviation from plain sampling "
        f"(the faintest by {least.total_variation:.1e}: {least.name})"
    )
    return Check(
        name=FAULTS_CAUGHT,
        passed=not missed,
        detail=detail + (f"; NOT caught: {', '.join(missed)}" if missed else ""),
        figures={"faults": [finding._asdict() for finding in findings]},
    )


# Tokens equal to plain decoding's.


def float32_equality(subject: Subject) -> Check:
    """In float32 the tokens are those of plain decoding with the same seed."""
    evidence = subject.compare(tuple(TREES), subject.settings.num_tokens)
    return _judged(EQUALITY, subject, evidence, subject.settings.num_tokens, "all tokens are plain decoding's")


def bfloat16_divergence(subject: Subject) -> Check:
    """In low precision answers may differ from plain decoding's at near ties, and nowhere else."""
    num_tokens = subject.settings.num_bfloat16_tokens
    evidence = subject.compare((TREE16,), num_tokens)
    total = evidence.total
    summary = (
        f"{total.identical} of {total.answers} answers ({total.identical / total.answers:.0%}) are plain decoding's"
    )
    if evidence.ties:
        margins = sorted(each.margin or 0.0 for each in evidence.ties)
        summary += (
            f", and the others first differ at near ties: margins of {margins[len(margins) // 2]:.2g} (median) to "
            f"{margins[-1]:.2g}, where less than {tie_below(torch.bfloat16, 0.0):g} (more at logits above 32) is "
            "rounding"
        )
    return _judged(DIVERGENCE, subject, evidence, num_tokens, summary)


def bitwise_mode(subject: Subject) -> Check:
    """In forwards of one shape answers are plain decoding's in any precision."""
    num_tokens = subject.settings.num_bitwise_tokens
    evidence = subject.compare((TREE16, TREE32), num_tokens, exactness="bitwise")
    return _judged(BITWISE, subject, evidence, num_tokens, "no token in bfloat16 differs from plain decoding's")


def _judged(name: str, subject: Subject, evidence: Evidence, num_tokens: int, success: str) -> Check:
    """The check that the evidence makes: tokens differ, or too little was drafted to judge, or `success`."""
    total, needs = evidence.total, subject.settings.needs(num_tokens)
    tried = (
        f"{total.emitted:,} tokens in {total.answers} answers, {total.accepted:,} of them drafted and accepted, "
        f"{total.deep:,} at depth {DEEP} or below"
    )
    passed = False
    if evidence.faults:
        first = f"{len(evidence.faults)} of {total.answers} answers differ from plain decoding's"
        first += "" if evidence.rounding is None else " by more than rounding"
    elif total.emitted < needs.emitted or total.accepted < needs.accepted or total.deep < needs.deep:
        asked = f"{needs.emitted:,} tokens, {needs.accepted:,} accepted and {needs.deep:,} at that depth"
        first = f"not enough evidence, though no fault was seen: {tried}; this check asks for {asked}"
    else:
        passed, first = True, f"{success}: {tried}"
    lines = [each.describe(subject.token) for each in evidence.faults[:_SHOWN]]
    lines += [f"near tie: {each.describe(subject.token)}" for each in evidence.ties[:_SHOWN]]
    hidden = len(evidence.differences) - len(lines)
    lines += [f"and {hidden} more"] if hidden else []
    return Check(name=name, passed=passed, detail="\n".join([first, *lines]), figures=evidence.figures())


# The law of what is emitted.


def integral_transform(subject: Subject) -> Check:
    """Hold emitted tokens against the stock model's probabilities, under every rule family that the draft allows."""
    samples: list[LawSample] = []
    for promise in subject.law_promises():
        for temperature in LAW_TEMPERATURES:
            samples.append(_law_sample(subject, promise, temperature, number=len(samples)))
    level = FALSE_ALARM / (NUM_TESTS * len(samples))
    records = [record for sample in samples for record in _law_records(sample, level)]
    failed = [record for record in records if record["p"] < level]
    num_tokens = sum(sample.num_tokens for sample in samples)
    num_accepted = sum(sample.num_accepted for sample in samples)
    rules = " and ".join(dict.fromkeys(sample.rule for sample in samples))
    detail = (
        f"{num_tokens:,} tokens ({num_accepted:,} drafted and accepted; rules {rules}) "
        f"{'do NOT follow' if failed else 'follow'} the stock model's probabilities: {len(records)} tests, smallest p "
        f"{min(record['p'] for record in records):.2g}, together a false alarm once in {1 / FALSE_ALARM:,.0f} audits"
    )
    if len(subject.law_promises()) == 1:
        detail += "; no rejection rule was tried, for this draft cannot be sampled"
    lines = [
        f"rule {record['rule']} at temperature {record['temperature']:g}: {record['test']} fails, statistic "
        f"{record['statistic']:.3g}, p {record['p']:.2g} below {level:.2g}"
        for record in failed
    ]
    figures = {"tokens": num_tokens, "accepted": num_accepted, "false_alarm": FALSE_ALARM, "tests": records}
    return Check(name=TRANSFORM, passed=not failed, detail="\n".join([detail, *lines]), figures=figures)


def _law_sample(subject: Subject, promise: str, temperature: float, *, number: int) -> LawSample:
    settings = subject.settings
    engine = subject.engine(TREES[TREE16], 8, exactness=promise)
    completions = draw_answers(
        engine,
        subject.prompts,
        temperature=temperature,
        num_tokens=settings.num_law_tokens,
        max_tokens=settings.max_tokens,
        seed=settings.seed + (number + 1) * 1_000_000,  # no seed twice in one audit
        progress=subject.advance,
    )
    return judge(subject.target, completions, rule=engine.rule.name, temperature=temperature, seed=settings.seed)


def _law_records(sample: LawSample, level: float) -> list[dict[str, Any]]:
    return [
        {
            "rule": sample.rule,
            "temperature": sample.temperature,
            "tokens": sample.num_tokens,
            "accepted": sample.num_accepted,
            "test": test,
            "statistic": statistic,
            "p": p,
            "fails_below": level,
        }
        for test, (statistic, p) in sample.results().items()
    ]


# What the certificate is of.


def _facts(subject: Subject) -> dict[str, Any]:
    return {
        "target": subject.target.name,
        "target_fingerprint": subject.target.fingerprint,
        "dtype": "float32 and bfloat16",
        "device": str(subject.target.device),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "headstart": headstart_version(),
        "machine": machine_facts(),
        "settings": {**asdict(subject.settings), "num_prompts": len(subject.prompts)},
    }


def _head_facts(head: str | Path) -> dict[str, Any]:
    """The head's name (the last part only of a path that begins at this machine's root), and the hash of its weights
    (None for drafters that were not trained)."""
    name = Path(head).name if Path(head).is_absolute() else str(head)
    folder = head_folder(head)
    if folder is None:
        return {"head": name, "head_sha256": None}
    weights = present_folder(folder) / WEIGHTS_FILE
    return {"head": name, "head_sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
