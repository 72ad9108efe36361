"""What a draft network has to read and multiply, by the network's own products: however a round computes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from heads.base import PathHead, RecurrentHead
from heads.block import BlockHead
from heads.block_unroll import Asking
from infer.cost import spread_rows
from infer.drafters.block import BlockStepper
from infer.drafters.head import PathStepper, RecurrentStepper
from infer.drafters.model import ModelStepper
from infer.drafters.stepper import Stepper
from infer.profile.floors import ForwardWork, Work, WorkCounter


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows that a draft network runs over: those that a round begins with, one step's, and the requests' number
    and tokens."""

    begin: int
    step: int
    batch: int
    context: int


@dataclass(frozen=True, kw_only=True)
class DraftWork:
    """What beginning a round takes, the roots' logits included, and what one step does."""

    begin: Work
    step: Work


def draft_work(stepper: Stepper, rows: DraftRows) -> DraftWork | None:
    """None for networks that nothing is known of. Of depths that have networks of their own, the last one's counts."""
    if isinstance(stepper, RecurrentStepper):
        return _recurrent_work(stepper.head, rows)
    if isinstance(stepper, PathStepper):
        return _path_work(stepper.head, rows)
    if isinstance(stepper, BlockStepper):
        return _block_work(stepper.head, rows)
    if isinstance(stepper, ModelStepper):
        return _model_work(stepper, rows)
    return None


@dataclass
class _Attention:
    """Stands in for attention over a head's cache, and adds up what that would take."""

    rows: DraftRows
    work: Work = field(default_factory=Work)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, size = query.shape
        row_bytes = key[0].nbytes + value[0].nbytes
        self.work += Work(
            num_bytes=self.rows.batch * self.rows.context * row_bytes,
            num_operations=2 * num_rows * self.rows.context * num_heads * (size + value.shape[-1]),
        )
        return query.new_zeros((num_rows, num_heads, value.shape[-1]))


@torch.inference_mode()
def _recurrent_work(head: RecurrentHead, rows: DraftRows) -> DraftWork:
    attention = _Attention(rows)
    with WorkCounter() as counter:
        states = head(_zeros(head, rows.begin), head.fuse(_taps(head, rows.begin)), _zeros(head, rows.begin), attention)
        head.logits(states[: rows.batch], 0)
    begin = counter.work + attention.work
    attention = _Attention(rows)
    with WorkCounter() as counter:
        states = head(_zeros(head, rows.step), _states(head, rows.step), _zeros(head, rows.step), attention)
        head.logits(states, 1)
    return DraftWork(begin=begin, step=counter.work + attention.work)


@torch.inference_mode()
def _path_work(head: PathHead, rows: DraftRows) -> DraftWork:
    attention = _Attention(rows)
    num_read = rows.begin if head.has_prefix_layer else rows.batch
    with WorkCounter() as counter:
        roots = head.roots(_taps(head, num_read), _zeros(head, num_read), _zeros(head, num_read), attention)
        roots = roots[: rows.batch]
        head.logits(head.draft(roots, _zeros(head, rows.batch, 1), 0), 0)
    begin = counter.work + attention.work
    depth = (head.num_depths or 1) - 1
    roots = roots[:1].expand(rows.step, -1)
    with WorkCounter() as counter:
        head.logits(head.draft(roots, _zeros(head, rows.step, depth + 1), depth), depth)
    return DraftWork(begin=begin, step=counter.work)


@torch.inference_mode()
def _block_work(head: BlockHead, rows: DraftRows) -> DraftWork:
    """A step is the correction by the token before, where there is one."""
    attention = _Attention(rows)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: Asking) -> torch.Tensor:
        return attention(query, key, value)

    num_rows = rows.begin + rows.batch * head.num_places
    places = torch.arange(rows.begin, num_rows, device=head.device)
    with WorkCounter() as counter:
        text = head.text_inputs(_taps(head, rows.begin), _zeros(head, rows.begin))
        behind = head.place_inputs(_zeros(head, rows.batch), text.dtype).flatten(0, 1)
        states = head(torch.cat([text, behind]), _zeros(head, num_rows), attend, places=places, wanted=None)
        head.base_logits(states[: rows.batch * head.num_depths])
    begin = counter.work + attention.work
    with WorkCounter() as counter:
        if head.config.markov_rank:
            head.correction(_states(head, rows.step), _zeros(head, rows.step))
    return DraftWork(begin=begin, step=counter.work)


@torch.inference_mode()
def _model_work(stepper: ModelStepper, rows: DraftRows) -> DraftWork:
    forward = ForwardWork(stepper.model)
    works = [
        forward.of(spread_rows(max(count, rows.batch), batch=rows.batch, context=rows.context))
        for count in (rows.begin, rows.step)
    ]
    if stepper.head is not None:
        states = _taps(stepper.head, rows.batch)
        with WorkCounter() as counter:
            stepper.head.logits(states)
        works = [work + counter.work for work in works]
    begin, step = works
    return DraftWork(begin=begin, step=step)


def _zeros(head: Any, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device=head.device)


def _states(head: Any, num_rows: int) -> torch.Tensor:
    return torch.zeros((num_rows, head.config.hidden_size), dtype=head.dtype, device=head.device)


def _taps(head: Any, num_rows: int) -> torch.Tensor:
    size = len(head.config.taps) * head.config.hidden_size
    return torch.zeros((num_rows, size), dtype=head.dtype, device=head.device)
