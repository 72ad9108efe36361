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

from configs.schema import StepWeighting
from heads.base import DraftHead
from heads.transfer import sent
from heads.unroll import Batch, UnrolledStep
from train.losses import (
    NO_LABEL,
    ROW_MULTIPLE,
    Drafts,
    LossName,
    RowFigures,
    TeacherRows,
    fused_unrolled_loss,
    needs_labels,
)


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
    root_share: float = 1.0,
    keep_share: float = 1.0,
    generators: Sequence[torch.Generator] | None = None,
) -> list[torch.Tensor]:
    """The packed rows that count at each step. Each list is part of the one before it.

    With `root_share` below 1 the first step takes a random part of the rows, and with `keep_share` below 1 every
    further one goes on with a random part of those before: the mean loss of a step stays what it was on average, and
    costs less. Each sequence's part is drawn from its own one of `generators`, so that it does not depend on what else
    is in the batch.
    """
    assert root_share == keep_share == 1 or generators is not None, "a random part of the rows needs generators"
    device, mask = loss_mask.device, loss_mask.cpu()
    alive = _written(mask, lengths, 1)
    plan = []
    for step in range(num_steps):
        alive = alive & _written(mask, lengths, step + 2)
        share = keep_share if step else root_share
        if share < 1 and generators is not None:
            chances = zip(lengths, generators, strict=True)
            drawn = torch.cat([torch.rand(length, generator=generator) for length, generator in chances])
            alive = alive & (drawn < share)
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
    weighting: StepWeighting = "decay",
    smoothing: float = 0.5,
    renormalize: bool | None = None,
    compare: bool = False,
    generators: Sequence[torch.Generator] | None = None,
) -> tuple[torch.Tensor, list[StepFigures]]:
    """Sum over steps of `step_weights[s]` times the *summed* loss of the step's rows, and the figures of each step.

    The caller puts the division by the number of labels into `step_weights`, so that gradients accumulated over
    several batches weigh every label alike. `weighting`, `smoothing`: weights of each row by itself besides
    (`train.objectives`; decay: none). `renormalize`: the teacher's law is that over the draft vocabulary; None: if the
    batch has no log_normalizer for that over all tokens.
    `generators`: one for each sequence of the batch, for what is random in the head's training.

    Rows and sequences are rounded up to few different numbers (`ROW_MULTIPLE`): the further rows repeat the last one,
    at weight 0. A plan in CPU memory is best: what follows from it is then known without waiting for a device.
    """
    counts = [len(rows) for rows in plan if len(rows)]
    if not counts:
        return _nothing(head), []
    device = batch.token_ids.device
    host_plan = [_rounded_up(rows.cpu()) for rows in plan[: len(counts)]]
    rounded = [sent(rows, device) for rows in host_plan]
    batch = batch.rounded_up(ROW_MULTIPLE)
    if generators is not None:
        generators = [*generators, torch.Generator()][: len(batch.lengths)]
    steps = list(head.unroll(batch, host_plan, generators))
    weights = [_row_weights(*one) for one in zip(step_weights, counts, rounded, strict=False)]
    with_labels = needs_labels(loss, weighting)
    total, figures = fused_unrolled_loss(
        loss,
        *_compared(
            head, batch, host_plan, rounded, steps, weights, teacher, renormalize=renormalize, with_labels=with_labels
        ),
        weighting=weighting,
        smoothing=smoothing,
        compare=compare,
    )
    for answer, weight in zip(steps, weights, strict=True):
        if answer.auxiliary is not None:
            total = total + (weight * answer.auxiliary).sum()
    return total, [
        StepFigures(step=step, rows=plan[step], figures=one.first(count))
        for step, (one, count) in enumerate(zip(figures, counts, strict=True))
    ]


def _compared(
    head: DraftHead,
    batch: Batch,
    host_plan: Sequence[torch.Tensor],
    plan: Sequence[torch.Tensor],
    steps: Sequence[UnrolledStep],
    weights: Sequence[torch.Tensor],
    teacher: Teacher,
    *,
    renormalize: bool | None,
    with_labels: bool,
) -> tuple[list[Drafts], TeacherRows]:
    """What the head answers, and the target's states at all places where it is asked. `host_plan`: `plan` in CPU
    memory."""
    everywhere = torch.cat([rows + 1 + step for step, rows in enumerate(host_plan)])
    host_places, indices = everywhere.unique(return_inverse=True)
    places = sent(host_places, batch.token_ids.device)
    drafts = [
        Drafts(
            states=answer.states.to(teacher.weight.dtype),
            weight=answer.weight,
            rows=host_rows,
            places=index,
            weights=weight,
            labels=_draft_ids(head.target_ids, batch.token_ids[rows + 2 + step]) if with_labels else None,
        )
        for step, (host_rows, rows, answer, weight, index) in enumerate(
            zip(host_plan, plan, steps, weights, indices.split([len(rows) for rows in plan]), strict=True)
        )
    ]
    normalizer = None if renormalize or batch.log_normalizer is None else batch.log_normalizer[places]
    assert renormalize is not False or normalizer is not None, "the law over all tokens needs their log-sum-exp"
    return drafts, TeacherRows(states=batch.last[places], weight=teacher.weight, log_normalizer=normalizer)


def _draft_ids(target_ids: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[Q]: the draft tokens of `token_ids` [Q], NO_LABEL where there is none. `target_ids` [C] ascend."""
    found = torch.searchsorted(target_ids, token_ids).clamp_max(len(target_ids) - 1)
    return torch.where(target_ids[found] == token_ids, found, NO_LABEL)


def _nothing(head: DraftHead) -> torch.Tensor:
    """The loss of no rows: zero, with zero gradients."""
    return sum((0 * one.sum(dtype=torch.float32) for one in head.parameters()), torch.zeros((), device=head.device))


def _rounded_up(rows: torch.Tensor) -> torch.Tensor:
    """[Q] -> a number of rows that ROW_MULTIPLE divides: the last one again and again."""
    return torch.cat([rows, rows[-1:].expand(-len(rows) % ROW_MULTIPLE)])


def _row_weights(weight: float, count: int, rows: torch.Tensor) -> torch.Tensor:
    """[Q]: `weight` for the first `count` rows, 0 for those that only make a rounder number."""
    weights = torch.zeros(len(rows), device=rows.device)
    weights[:count] = weight
    return weights
