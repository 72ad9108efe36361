"""Training-time test: a head unrolled over the true tokens, and what it is compared with.

Row t of a sequence, at step s (depth d = s + 1), stands for a draft that began after token t + 1 was emitted:

    input token   x[t + 1 + s]         the true one, never the head's guess
    state         f[t] at step 0, then (of heads that draft on their own states) the head's own previous state of row t
    label         x[t + 2 + s]
    teacher       the target's distribution at position t + 1 + s

A row counts at a step if every token from the input at step 0 through the label was written by the assistant, as in
decoding, where the target itself emits an answer's first token. So an answer of L tokens has L - d labels at depth d.
All other rows give their keys and values and nothing else.

What a head computes at a row and step is its own business (`DraftHead.unroll`).

Shapes: R packed rows (all tokens of the batch's sequences), Q rows that count, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heads.base import DraftHead
from heads.unroll import Batch
from train.losses import LossName, RowFigures, fused_distillation_loss


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """The target's LM head at the draft vocabulary's tokens [C, H]."""

    weight: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFigures:
    """What a step of the unrolling showed, row by row; `rows` [Q] are packed row numbers."""

    step: int
    rows: torch.Tensor
    figures: RowFigures


def plan_rows(
    loss_mask: torch.Tensor,
    lengths: Sequence[int],
    num_steps: int,
    *,
    keep_share: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """The packed rows that count at each step. Each list is part of the one before it.

    With `keep_share` below 1 every step beyond the first goes on with a random part of the rows, which leaves the
    mean loss of the step unchanged on average and its cost lower.
    """
    device, mask = loss_mask.device, loss_mask.cpu()
    alive = _written(mask, lengths, 1)
    plan = []
    for step in range(num_steps):
        alive = alive & _written(mask, lengths, step + 2)
        if step and keep_share < 1:
            alive = alive & (torch.rand(len(alive), generator=generator) < keep_share)
        plan.append(alive.nonzero().flatten().to(device))
    return plan


def _written(loss_mask: torch.Tensor, lengths: Sequence[int], offset: int) -> torch.Tensor:
    """[R]: does the token `offset` further on in the same sequence exist, and did the assistant write it?"""
    parts = []
    for part in loss_mask.split(list(lengths)):
        shifted = torch.zeros_like(part)
        shifted[: max(0, len(part) - offset)] = part[offset:]
        parts.append(shifted)
    return torch.cat(parts)


def unrolled_loss(
    head: DraftHead,
    batch: Batch,
    plan: Sequence[torch.Tensor],
    teacher: Teacher,
    *,
    loss: LossName,
    step_weights: Sequence[float],
    renormalize: bool = False,
    compare: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, list[StepFigures]]:
    """Sum over steps of `step_weights[s]` times the *summed* loss of the step's rows, and the figures of each step.

    The caller puts the division by the number of labels into `step_weights`, so that gradients accumulated over
    several batches weigh every label alike. `generator`: for what is random in the head's training.
    """
    total = batch.taps.new_zeros((), dtype=torch.float32)
    figures = []
    for step, (rows, answer) in enumerate(zip(plan, head.unroll(batch, plan, generator), strict=True)):
        if not len(rows):
            continue
        summed, row_figures = fused_distillation_loss(
            loss,
            answer.states.to(teacher.weight.dtype),
            answer.weight,
            batch.last[rows + 1 + step],
            teacher.weight,
            None if renormalize else batch.log_normalizer[rows + 1 + step],
            compare=compare,
        )
        if answer.auxiliary is not None:
            summed = summed + answer.auxiliary
        total = total + step_weights[step] * summed
        figures.append(StepFigures(step=step, rows=rows, figures=row_figures))
    return total, figures
