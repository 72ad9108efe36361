"""The losses of `train.objectives` for all rows and depths of a text, fused with the LM head, whose logits are never
kept.

The text is gone through in chunks that hold all depths of their rows, and the gradients are made on the way forward.
The target's probabilities at a place in the text are computed once, for all depths that are compared with it. So a row
costs three products of its states' width with the draft vocabulary a depth (logits, and the gradients of states and LM
head) and one for the target; memory grows with the chunk.

Shapes: R rows, Q rows of a depth, N rows of a chunk (all depths of one LM head), P places in the text, H hidden, W what
a head's LM head reads, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from configs.schema import LossName as LossName
from configs.schema import StepWeighting
from heads.transfer import sent
from train.objectives import NO_LABEL as NO_LABEL
from train.objectives import (
    block_weights,
    favour_likeliest,
    length_weights,
    probs_of,
    row_gradient,
    target_probabilities,
)

ROW_MULTIPLE = 16
"""Numbers of rows are rounded up to multiples of this: a CPU's matrix products are compiled for each number anew."""
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS, CHUNK_LOGITS = 512, 1024, 1 << 22
GPU_CHUNK_LOGITS = 1 << 26
"""On a GPU every chunk costs some dozens of launches whatever its size, so it is as large as its memory's room."""
CACHED_LOGITS = 1 << 19
"""float32 logits that stay in a CPU's caches while a loss is taken of them."""


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """What each row showed, detached: its loss, its overlap alpha, and whether draft and target favour one token (all
    false unless asked for)."""

    loss: torch.Tensor
    overlap: torch.Tensor
    agrees: torch.Tensor

    def first(self, count: int) -> RowFigures:
        """Of the first rows alone."""
        return RowFigures(loss=self.loss[:count], overlap=self.overlap[:count], agrees=self.agrees[:count])


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherRows:
    """The target at P places of the text: the states that feed its LM head [P, H], that LM head at the draft
    vocabulary's tokens [C, H], and the log-sum-exp over all tokens [P] (None: over the draft vocabulary's)."""

    states: torch.Tensor
    weight: torch.Tensor
    log_normalizer: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafts:
    """A head's answers at one depth, at Q rows of the text in ascending order.

    states [Q, W] and the LM head that reads them [C, W]; rows [Q], part of those of the depth before; places [Q],
    ascending: the teacher's rows that the answers are compared with; weights [Q] float32: of each row's loss. labels
    [Q]: the draft ids of the text's own tokens (NO_LABEL where there is none), where `needs_labels`. Rows and places
    are best in CPU memory: the text is cut by them, and a device would be waited for.
    """

    states: torch.Tensor
    weight: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    labels: torch.Tensor | None = None


def fused_distillation_loss(
    name: LossName,
    states: torch.Tensor,
    weight: torch.Tensor,
    target_states: torch.Tensor,
    target_weight: torch.Tensor,
    log_normalizer: torch.Tensor | None = None,
    *,
    rows_per_chunk: int | None = None,
    compare: bool = False,
) -> tuple[torch.Tensor, RowFigures]:
    """Sum over rows of `distillation_loss(states @ weight.T, ...)`, and the figures of each row.

    states [R, H] (draft, after its norm), weight [C, H], target_states [R, H], target_weight [C, H] (the draft
    vocabulary's rows of the target's LM head), log_normalizer [R] or None.
    """
    places = torch.arange(len(states))
    weights = torch.ones(len(states), device=states.device)
    total, (figures,) = fused_unrolled_loss(
        name,
        [Drafts(states=states, weight=weight, rows=places, places=places, weights=weights)],
        TeacherRows(states=target_states, weight=target_weight, log_normalizer=log_normalizer),
        rows_per_chunk=rows_per_chunk,
        compare=compare,
    )
    return total, figures


def fused_unrolled_loss(
    name: LossName,
    depths: Sequence[Drafts],
    teacher: TeacherRows,
    *,
    weighting: StepWeighting = "decay",
    smoothing: float = 0.5,
    rows_per_chunk: int | None = None,
    compare: bool = False,
) -> tuple[torch.Tensor, list[RowFigures]]:
    """Sum over depths and rows of weight times loss, and the (unweighted) figures of each depth's rows.

    `weighting`, `smoothing`: what the weights are multiplied by (`train.objectives`; decay: nothing). `rows_per_chunk`:
    rows, counting each depth, whose logits are held at once (None: as many as are quick).
    """
    device = teacher.weight.device
    if rows_per_chunk is None:
        rows_per_chunk = chunk_rows(len(teacher.weight), on_gpu=device.type != "cpu")
    chunks = list(_chunks(depths, rows_per_chunk))
    depths = [replace(one, rows=sent(one.rows, device), places=sent(one.places, device)) for one in depths]
    lm_heads = list({id(depth.weight): depth.weight for depth in depths}.values())
    job = _Job(
        name=name,
        depths=depths,
        members=[[d for d, one in enumerate(depths) if one.weight is lm_head] for lm_head in lm_heads],
        teacher=teacher,
        chunks=chunks,
        weighting=weighting,
        smoothing=smoothing,
        compare=compare,
    )
    total, *figures = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        job, *(depth.states for depth in depths), *lm_heads
    )
    thirds = [figures[first : first + len(depths)] for first in range(0, len(figures), len(depths))]
    return total, [
        RowFigures(loss=loss, overlap=overlap, agrees=agrees) for loss, overlap, agrees in zip(*thirds, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Some rows with all their depths: each depth's part of its own rows, and the part of the teacher's for all."""

    parts: list[slice]
    places: slice


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """What is computed, beside the tensors that gradients are for. members: the depths that each LM head has."""

    name: LossName
    depths: Sequence[Drafts]
    members: list[list[int]]
    teacher: TeacherRows
    chunks: list[_Chunk]
    weighting: StepWeighting
    smoothing: float
    compare: bool

    @property
    def needs_labels(self) -> bool:
        return needs_labels(self.name, self.weighting)


def needs_labels(name: LossName, weighting: StepWeighting) -> bool:
    """Whether the objective asks for the text's own tokens, beside the target's law."""
    return name == "label" or weighting in ("dpace", "block")


def chunk_rows(vocab_size: int, *, on_gpu: bool = False) -> int:
    """Rows whose logits over a draft vocabulary of that size are held at once."""
    if on_gpu:
        return max(MIN_CHUNK_ROWS, GPU_CHUNK_LOGITS // vocab_size)
    return min(MAX_CHUNK_ROWS, max(MIN_CHUNK_ROWS, CHUNK_LOGITS // vocab_size))


def _chunks(depths: Sequence[Drafts], rows_per_chunk: int) -> Iterator[_Chunk]:
    rows, places = [one.rows.cpu() for one in depths], [one.places.cpu() for one in depths]
    firsts = rows[0][:: max(1, rows_per_chunk // len(depths))].contiguous()
    edges = [[*torch.searchsorted(one, firsts).tolist(), len(one)] for one in rows]
    for index in range(len(firsts)):
        parts = [slice(*one[index : index + 2]) for one in edges]
        held = [one[part] for one, part in zip(places, parts, strict=True) if part.start < part.stop]
        if held:
            first, last = min(int(one[0]) for one in held), max(int(one[-1]) for one in held)
            yield _Chunk(parts=parts, places=slice(first, last + 1))


class _FusedLoss(torch.autograd.Function):
    """The arithmetic: states of each depth and distinct LM heads -> total, then losses, overlaps and agreements."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states, lm_heads = tensors[: len(job.depths)], tensors[len(job.depths) :]
        trained = ctx.needs_input_grad[1 + len(states) :]
        lent = [lm_head.to(states[0].dtype) for lm_head in lm_heads]
        results = _Results(states, num_lm_heads=len(lm_heads))
        for chunk in job.chunks:
            target = _target(job, chunk)
            blocks = [
                _block(job, chunk, states, members, lm_head) for members, lm_head in zip(job.members, lent, strict=True)
            ]
            for block in blocks:
                _take_losses(job, block, target)
            for index, (block, weights) in enumerate(zip(blocks, _row_weights(job, chunk, blocks), strict=True)):
                results.keep(block, weights)
                results.differentiate(block, weights, lent[index], index if trained[index] else None)
        ctx.gradients = (*results.state_gradients, *results.lm_head_gradients)
        ctx.dtypes = [one.dtype for one in tensors]
        figures = (*results.losses, *results.overlaps, *results.agrees)
        ctx.mark_non_differentiable(*figures)
        return (results.total, *figures)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # handed on rather than copied: some are as large as the LM head
        assert gradients is not None, "the loss was differentiated twice"
        scale = upstream[0]
        if scale.device.type != "cpu" or float(scale) != 1:  # a device is not asked whether it is 1
            for one in gradients:
                if one is not None:
                    one.mul_(scale)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, *(one if one is None else one.to(dtype) for one, dtype in pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Target:
    """The target at a chunk's places: its probabilities [P, C], and what the loss and the figures ask for besides."""

    probs: torch.Tensor
    favoured: torch.Tensor | None
    favourites: torch.Tensor | None


def _target(job: _Job, chunk: _Chunk) -> _Target:
    teacher, places = job.teacher, chunk.places
    logits = (_rounded_up(teacher.states[places]) @ teacher.weight.T)[: places.stop - places.start]
    normalizer = None if teacher.log_normalizer is None else teacher.log_normalizer[places]
    parts = list(_cached(logits))
    if len(parts) == 1:  # it needs no place to be put into
        probs = target_probabilities(logits, normalizer)
    else:
        probs = torch.empty_like(logits, dtype=torch.float32)
        for rows in parts:
            probs[rows] = target_probabilities(logits[rows], None if normalizer is None else normalizer[rows])
    return _Target(
        probs=probs,
        favoured=favour_likeliest(probs) if job.name == "top10" else None,
        favourites=logits.argmax(dim=-1) if job.compare else None,
    )


@dataclass(kw_only=True, eq=False)
class _Block:
    """A chunk's N rows of the depths that share an LM head, one depth after the other.

    spans: depth and part of its rows. states and logits have some rows more, to make a rounder number. The logits turn
    into the gradients of the rows' losses, and the figures follow.
    """

    spans: list[tuple[int, slice]]
    places: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor
    loss: torch.Tensor
    overlap: torch.Tensor
    label_probs: torch.Tensor
    label_target_probs: torch.Tensor
    agrees: torch.Tensor

    def by_depth(self, values: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
        sizes = [part.stop - part.start for _, part in self.spans]
        for (depth, part), piece in zip(self.spans, values.split(sizes), strict=True):
            yield depth, part, piece


def _block(
    job: _Job, chunk: _Chunk, states: Sequence[torch.Tensor], members: Sequence[int], lm_head: torch.Tensor
) -> _Block:
    spans = [(depth, chunk.parts[depth]) for depth in members]
    places = torch.cat([job.depths[depth].places[part] for depth, part in spans]) - chunk.places.start
    stacked = _rounded_up(torch.cat([states[depth][part] for depth, part in spans]))
    blank = stacked.new_empty(len(places), dtype=torch.float32)
    return _Block(
        spans=spans,
        places=places,
        states=stacked,
        logits=stacked @ lm_head.T,
        loss=blank,
        overlap=torch.empty_like(blank),
        label_probs=torch.empty_like(blank),
        label_target_probs=torch.empty_like(blank),
        agrees=torch.zeros_like(blank, dtype=torch.bool),
    )


def _take_losses(job: _Job, block: _Block, target: _Target) -> None:
    """A few rows at a time, so that what is between logits and gradients stays in a CPU's caches."""
    num_rows = len(block.places)
    if target.favourites is not None:
        block.agrees = block.logits[:num_rows].argmax(dim=-1) == target.favourites[block.places]
    labels = None
    if job.needs_labels:
        labels = torch.cat([_labels(job.depths[depth])[part] for depth, part in block.spans])
    gradients = block.logits
    if gradients.dtype is torch.float16:  # most of a row's gradients would be too small for it
        gradients = torch.empty_like(block.logits, dtype=torch.bfloat16)
    gradients[num_rows:] = 0
    for rows in _cached(block.logits[:num_rows]):
        draft_probs = block.logits[rows].softmax(dim=-1, dtype=torch.float32)
        places = block.places[rows]
        target_probs = target.probs[places]
        own = None if labels is None else labels[rows]
        if own is not None:
            block.label_probs[rows] = probs_of(draft_probs, own)
            block.label_target_probs[rows] = probs_of(target_probs, own)
        favoured = None if target.favoured is None else target.favoured[places]
        block.loss[rows], block.overlap[rows], gradient = row_gradient(
            job.name, draft_probs, target_probs, favoured, labels=own
        )
        gradients[rows] = gradient
    block.logits = gradients


def _cached(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of `logits` [N, C] that a CPU's caches hold at once, again and again; all of them on other devices."""
    num_rows, vocab_size = logits.shape
    size = max(1, CACHED_LOGITS // vocab_size) if logits.device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _labels(drafts: Drafts) -> torch.Tensor:
    assert drafts.labels is not None, "the objective needs the text's own tokens"
    return drafts.labels


def _row_weights(job: _Job, chunk: _Chunk, blocks: Sequence[_Block]) -> list[torch.Tensor]:
    """Of the rows of each block [N]."""
    weights = [one.weights[part] for one, part in zip(job.depths, chunk.parts, strict=True)]
    if job.weighting != "decay":
        by_row = _weights_by_row(job, chunk, blocks)
        weights = [weight * own for weight, own in zip(weights, by_row, strict=True)]
    return [torch.cat([weights[depth] for depth, _ in block.spans]) for block in blocks]


def _weights_by_row(job: _Job, chunk: _Chunk, blocks: Sequence[_Block]) -> list[torch.Tensor]:
    """Of the rows of each depth [Q], by what they showed."""
    rows = [one.rows[part] for one, part in zip(job.depths, chunk.parts, strict=True)]

    def shown(name: str) -> list[torch.Tensor]:
        found = {depth: piece for block in blocks for depth, _, piece in block.by_depth(getattr(block, name))}
        return [found[depth] for depth in range(len(job.depths))]

    match job.weighting:
        case "dpace":
            return length_weights(shown("label_probs"), rows, smoothing=job.smoothing)
        case "length":
            return length_weights(shown("overlap"), rows, smoothing=job.smoothing)
        case "block":
            return block_weights(shown("label_probs"), shown("label_target_probs"), rows)
        case "decay":
            raise AssertionError("decay is the same for all rows of a depth")


class _Results:
    """What a forward pass leaves. Not a number at first: a row that is in no chunk shows."""

    def __init__(self, states: Sequence[torch.Tensor], *, num_lm_heads: int) -> None:
        self.total = states[0].new_zeros((), dtype=torch.float32)
        self.losses = [one.new_full((len(one),), torch.nan, dtype=torch.float32) for one in states]
        self.overlaps = [torch.full_like(one, torch.nan) for one in self.losses]
        self.agrees = [torch.zeros_like(one, dtype=torch.bool) for one in self.losses]
        self.state_gradients = [torch.full_like(one, torch.nan, dtype=torch.float32) for one in states]
        self.lm_head_gradients: list[torch.Tensor | None] = [None] * num_lm_heads

    def keep(self, block: _Block, weights: torch.Tensor) -> None:
        self.total += (weights * block.loss).sum()
        for kept, values in ((self.losses, block.loss), (self.overlaps, block.overlap), (self.agrees, block.agrees)):
            for depth, part, piece in block.by_depth(values):
                kept[depth][part] = piece

    def differentiate(self, block: _Block, weights: torch.Tensor, lm_head: torch.Tensor, trained: int | None) -> None:
        """The weights scale rows of states rather than of logits, which are far longer. `trained`: number of the LM
        head, if it has a gradient."""
        gradients = block.logits
        weights = functional.pad(weights, (0, len(gradients) - len(weights)))[:, None]
        backward = (gradients @ lm_head.to(gradients.dtype)) * weights
        for depth, part, piece in block.by_depth(backward[: len(block.places)]):
            self.state_gradients[depth][part] = piece
        if trained is None:
            return
        product = gradients.T @ (block.states * weights).to(gradients.dtype)
        so_far = self.lm_head_gradients[trained]
        self.lm_head_gradients[trained] = product.float() if so_far is None else so_far.add_(product)


def _rounded_up(rows: torch.Tensor) -> torch.Tensor:
    """[N, ...] with zeros up to the next multiple of ROW_MULTIPLE."""
    missing = -len(rows) % ROW_MULTIPLE
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
