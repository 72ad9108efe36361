"""Distillation losses over the draft vocabulary, taken in float32, and a fused form that never keeps the logits.

The target's probabilities p are its full softmax seen at the draft vocabulary's tokens; they sum to less than one
where the draft vocabulary does not cover the target (`target_log_normalizer` None: renormalised to one instead).
The draft's probabilities q are a softmax over the draft vocabulary. Their overlap, alpha = sum of min(p, q), is the
probability that a sampled draft token is accepted.

    lk          -log alpha
    lk_hybrid   lambda KL(p|q) + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) held constant
    tv          1 - alpha
    kl, ce      KL(p|q) and -sum p log q: the same gradient
    top10       -sum w p log q, with w = 1.1 for the ten likeliest tokens of p and 0.1 for the others (HASS: Zhang et
                al. 2024, arXiv 2408.15766)

Gradients with respect to the draft logits z (m = 1 where q < p, beta = sum of q m, P = sum of p):

    d alpha = q (m - beta)          d(-log alpha) = -q (m - beta) / alpha          d KL = P q - p

Shapes: R rows, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import LossName as LossName

HYBRID_RATE = 3.0
NUM_FAVOURED, OTHERS_SHARE = 10, 0.1
TINY = 1e-10


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """What each row showed, detached: its loss, its overlap alpha, and whether draft and target favour one token."""

    loss: torch.Tensor
    overlap: torch.Tensor
    agrees: torch.Tensor


def distillation_loss(name: LossName, draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """The reference: loss of each row [R], differentiable in `draft_logits` [R, C]; `target_probs` [R, C]."""
    log_probs = draft_logits.float().log_softmax(dim=-1)
    target = target_probs.float()
    overlap = torch.minimum(log_probs.exp(), target).sum(dim=-1)
    cross_entropy = -(target * log_probs).sum(dim=-1)
    divergence = cross_entropy + torch.special.xlogy(target, target).sum(dim=-1)
    share = (-HYBRID_RATE * overlap.detach()).exp()
    losses: dict[LossName, torch.Tensor] = {
        "lk": -overlap.clamp_min(TINY).log(),
        "lk_hybrid": share * divergence + (1 - share) * (1 - overlap),
        "tv": 1 - overlap,
        "kl": divergence,
        "ce": cross_entropy,
        "top10": -(favour_likeliest(target) * log_probs).sum(dim=-1),
    }
    return losses[name]


def favour_likeliest(target_probs: torch.Tensor) -> torch.Tensor:
    """The target of `top10` [R, C]: its likeliest tokens count eleven times as much as the others."""
    likeliest, where = target_probs.topk(min(NUM_FAVOURED, target_probs.shape[-1]), dim=-1)
    return (OTHERS_SHARE * target_probs).scatter_add(-1, where, likeliest)


def target_probabilities(logits: torch.Tensor, log_normalizer: torch.Tensor | None) -> torch.Tensor:
    """float32 p [R, C] from the target's logits at the draft vocabulary and its log-sum-exp over all tokens [R]."""
    logits = logits.float()
    if log_normalizer is None:
        return logits.softmax(dim=-1)
    return (logits - log_normalizer.float()[:, None]).exp_()


def _row_gradient(
    name: LossName, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [R], overlap [R], gradient of each row's loss in the draft logits [R, C]); may overwrite its inputs."""
    below = draft_probs < target_probs
    overlap = torch.minimum(draft_probs, target_probs).sum(dim=-1)
    if name in ("lk", "tv", "lk_hybrid"):
        kept = draft_probs * below
        ascent = kept.sub_(draft_probs * kept.sum(dim=-1, keepdim=True))  # d alpha
    if name == "lk":
        safe = overlap.clamp_min(TINY)
        return -safe.log(), overlap, ascent.mul_(-1 / safe[:, None])
    if name == "tv":
        return 1 - overlap, overlap, ascent.neg_()
    if name == "top10":
        target_probs = favour_likeliest(target_probs)
    cross_entropy = -(target_probs * draft_probs.clamp_min(1e-38).log()).sum(dim=-1)
    mass = target_probs.sum(dim=-1, keepdim=True)
    descent = draft_probs * mass - target_probs
    if name in ("ce", "top10"):
        return cross_entropy, overlap, descent
    divergence = cross_entropy + torch.special.xlogy(target_probs, target_probs).sum(dim=-1)
    if name == "kl":
        return divergence, overlap, descent
    share = (-HYBRID_RATE * overlap).exp()
    loss = share * divergence + (1 - share) * (1 - overlap)
    return loss, overlap, descent.mul_(share[:, None]).sub_(ascent.mul_(1 - share[:, None]))


class _FusedLoss(torch.autograd.Function):
    """Projection and loss together, chunk by chunk; the gradients are made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        target_states: torch.Tensor,
        target_weight: torch.Tensor,
        log_normalizer: torch.Tensor | None,
        name: LossName,
        rows_per_chunk: int,
        compare: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = states.shape[0]
        losses, overlaps, agrees = [], [], []
        state_gradient = torch.empty_like(states)
        trains_weight = ctx.needs_input_grad[1]  # not where the LM head is the target's
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        compute_weight = weight.to(states.dtype)
        for start in range(0, num_rows, rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            draft_logits = states[chunk] @ compute_weight.T
            target_logits = target_states[chunk] @ target_weight.T
            if compare:
                agrees.append(draft_logits.argmax(dim=-1) == target_logits.argmax(dim=-1))
            normalizer = None if log_normalizer is None else log_normalizer[chunk]
            loss, overlap, gradient = _row_gradient(
                name, draft_logits.float().softmax(dim=-1), target_probabilities(target_logits, normalizer)
            )
            gradient = gradient.to(states.dtype)
            state_gradient[chunk] = gradient @ compute_weight
            if weight_gradient is not None:
                weight_gradient += gradient.T @ states[chunk]
            losses.append(loss)
            overlaps.append(overlap)
        ctx.save_for_backward(state_gradient, weight_gradient)
        loss, overlap = torch.cat(losses), torch.cat(overlaps)
        figures = (loss, overlap, torch.cat(agrees) if compare else torch.empty(0, dtype=torch.bool))
        ctx.mark_non_differentiable(*figures)
        return (loss.sum(), *figures)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        state_gradient, weight_gradient = ctx.saved_tensors
        scale = gradients[0]
        weight_gradient = None if weight_gradient is None else weight_gradient * scale
        return state_gradient * scale.to(state_gradient.dtype), weight_gradient, *[None] * 6


def fused_distillation_loss(
    name: LossName,
    states: torch.Tensor,
    weight: torch.Tensor,
    target_states: torch.Tensor,
    target_weight: torch.Tensor,
    log_normalizer: torch.Tensor | None = None,
    *,
    logits_per_chunk: int = 1 << 20,
    compare: bool = False,
) -> tuple[torch.Tensor, RowFigures]:
    """Sum over rows of `distillation_loss(states @ weight.T, ...)`, and the figures of each row.

    states [R, H] (draft, after its norm), weight [C, H], target_states [R, H], target_weight [C, H] (the draft
    vocabulary's rows of the target's LM head), log_normalizer [R] or None. Memory grows with the chunk, not with R x C.
    """
    rows_per_chunk = max(1, logits_per_chunk // weight.shape[0])
    total, loss, overlap, agrees = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        states, weight, target_states, target_weight, log_normalizer, name, rows_per_chunk, compare
    )
    return total, RowFigures(loss=loss, overlap=overlap, agrees=agrees)
