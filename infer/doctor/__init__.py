"""The doctor: a trained head is looked over against its target, before anyone spends a day on it.

    files, card, tensors        the folder is whole, its files agree, and no tensor is empty, absurd or not finite
    target, lent weights        it is this target's, and what it holds of the target is the target's
    rotary embeddings           they are the target's, or meant to be others
    vocabulary, LM head         the map fits the target's own text, and the rows of the LM head fit the map
    agreement, distributions    on text of the target's own, the head knows more than which token is frequent
    other readings              it is best as it is configured: not in another numbering of layers, with another norm,
                                map or angle, or with one tensor exchanged, turned or left out
    parity, rounds              the decode loop computes what training computed, tensor by tensor and depth by depth

A finding names the thing that is wrong. What the doctor cannot see: damage that costs next to nothing on the texts that
it tried (`--prompts` gives it others). What a draft costs is `headstart profile`'s business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from heads.base import DraftHead, TargetSizes
from infer.doctor.behaviour import AGREEMENT, DISTRIBUTIONS, Examiner, Subject, check_agreement, check_distributions
from infer.doctor.files import (
    CARD,
    LENT,
    LM_HEAD,
    ROPE,
    TENSORS,
    VOCABULARY,
    HeadFiles,
    bind,
    check_card,
    check_lm_head,
    check_rope,
    check_target,
    check_tensors,
    check_vocabulary,
    read_files,
    spelled,
)
from infer.doctor.findings import Finding, Report, Verdict, untested
from infer.doctor.parity import PARITY, ROUNDS, check_parity, check_rounds, compare, compare_rounds
from infer.doctor.readings import READINGS, check_readings, readings_of, taps_to_try, tensor_readings, try_readings
from infer.doctor.texts import Evidence, gather_evidence, write_texts
from infer.machine import dtype_name
from infer.target import TargetModel

__all__ = ["CHECKS", "Finding", "Report", "Verdict", "examine"]

CHECKS = (
    "files",
    "target",
    LENT,
    CARD,
    TENSORS,
    ROPE,
    LM_HEAD,
    VOCABULARY,
    AGREEMENT,
    DISTRIBUTIONS,
    READINGS,
    PARITY,
    ROUNDS,
)
"""In the order in which they are made."""

NUM_DEPTHS = 5
NUM_PARITY_TEXTS = 4
NUM_ROUND_TEXTS = 8


def examine(
    folder: Path,
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    quick: bool = False,
    progress: Callable[[Finding], None] | None = None,
) -> Report:
    """All checks of the head in `folder` against `target`, on the target's answers to `prompts` (token ids).

    quick: leave out the readings of single tensors. progress: called with each finding as it is made.
    """
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if progress is not None:
            progress(finding)

    files, finding = read_files(folder)
    add(finding)
    add(check_target(files, target))
    head, finding = bind(files, target)
    add(finding)
    if files.head is None:
        _skip(add, (CARD, TENSORS, ROPE, LM_HEAD, VOCABULARY), "the files do not make a head")
    else:
        add(check_card(files))
        add(check_tensors(files))
        add(check_rope(files.head, target))
    evidence: Evidence | None = None
    if head is None:
        if files.head is not None:
            _skip(add, (LM_HEAD, VOCABULARY), "the head does not fit the target")
    else:
        add(check_lm_head(head, target))
        taps = [*head.config.taps, *itertools.chain(*taps_to_try(head.config, target.num_layers))]
        evidence = gather_evidence(target, write_texts(target, prompts), taps)
        add(check_vocabulary(head, target, evidence))
    if head is None or evidence is None or not evidence.has(head.config.taps):
        _skip(add, (AGREEMENT, DISTRIBUTIONS, READINGS, PARITY, ROUNDS), "there is no head to run on this target")
    else:
        _run(add, files, head, target, evidence, quick=quick)
    return Report(findings=tuple(findings), facts=_facts(files, target, evidence))


def _run(
    add: Callable[[Finding], None],
    files: HeadFiles,
    head: DraftHead,
    target: TargetModel,
    evidence: Evidence,
    *,
    quick: bool,
) -> None:
    """The checks that run the head."""
    num_depths = min(NUM_DEPTHS, head.num_depths or NUM_DEPTHS)
    examiner = Examiner(evidence, num_depths)
    subject = Subject(head=head, batch=evidence.batch(head.config.taps), target_ids=head.target_ids)
    logits = examiner.logits(subject)
    guesses = examiner.judge(logits, subject.target_ids)
    finding, is_telling = check_agreement(
        examiner, guesses, files.card.acceptance, lambda token: spelled(target, token)
    )
    add(finding)
    add(check_distributions(examiner, guesses, head.config.draft_vocab_size))
    if not all(bool(torch.isfinite(each).all()) for each in logits):
        _skip(add, (READINGS, PARITY, ROUNDS), "the head's logits are not finite")
        return
    sizes = TargetSizes.of(target.config)
    readings = readings_of(subject, evidence, target_rope=(sizes.rope_theta, sizes.rope_scaling))
    if not quick:
        readings = itertools.chain(readings, tensor_readings(head))
    outcomes = try_readings(examiner, subject, logits, readings)
    add(check_readings(examiner, guesses, outcomes, is_telling=is_telling))
    greedy = [number for number, text in enumerate(evidence.texts) if text.params.greedy]
    sampled = [number for number in range(len(evidence.texts)) if number not in greedy]
    numbers = [*_spread(greedy, NUM_PARITY_TEXTS // 2), *_spread(sampled, NUM_PARITY_TEXTS // 2)]
    add(check_parity(compare(target, head, evidence, numbers, num_depths=examiner.num_depths)))
    if target.dtype != torch.float32:
        _skip(
            add, (ROUNDS,), f"{dtype_name(target.dtype)} answers may leave the texts at near ties: give --dtype float32"
        )
        return
    add(check_rounds(compare_rounds(target, head, evidence, logits, _spread(greedy, NUM_ROUND_TEXTS))))


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """Up to `count` of the `numbers`, evenly spread."""
    return list(numbers) if len(numbers) <= count else [numbers[i * len(numbers) // count] for i in range(count)]


def _skip(add: Callable[[Finding], None], checks: Sequence[str], reason: str) -> None:
    for check in checks:
        add(untested(check, reason))


def _facts(files: HeadFiles, target: TargetModel, evidence: Evidence | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "head": files.folder.name,
        "family": files.card.family,
        "target": target.name,
        "dtype": dtype_name(target.dtype),
        "device": str(target.device),
    }
    if evidence is not None:
        facts["num_texts"] = len(evidence.texts)
        facts["num_answer_tokens"] = sum(len(text.answer) for text in evidence.texts)
        facts["temperatures"] = sorted({text.params.temperature for text in evidence.texts})
    return facts
