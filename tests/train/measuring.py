"""A head's acceptance in one call, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import EvalConfig
from heads.base import DraftHead
from heads.unroll import Batch
from infer.evaluate import AcceptanceReport, EvalPrompt
from infer.target import TargetModel
from train.evaluation import decode_answers, simulate


def decode_acceptance(
    target: TargetModel, head: DraftHead, prompts: Sequence[EvalPrompt], settings: EvalConfig
) -> AcceptanceReport:
    """Acceptance of a chain of drafts on the first held-out prompts."""
    return AcceptanceReport.of([answer.trace for answer in decode_answers(target, head, prompts, settings)])


def simulate_rounds(head: DraftHead, batch: Batch, *, depth: int) -> list[int]:
    """Lengths of the rounds of a batch that holds one answer."""
    (answer,) = simulate(head, batch, depth=depth)
    return list(answer.round_lengths)
