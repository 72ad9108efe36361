"""What a draft is trained towards: losses of a row over the draft vocabulary, in float32, and their gradients.

The target's probabilities p are its full softmax seen at the draft vocabulary's tokens; they sum to less than one
where the draft vocabulary does not cover the target (`log_normalizer` None: renormalised to one instead). The draft's
probabilities q are a softmax over the draft vocabulary. Their overlap, alpha = sum of min(p, q), is the probability
that a sampled draft token is accepted.

    lk          -log alpha
    lk_hybrid   lambda kl + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) held constant
    tv          1 - alpha
    kl          sum of p log(p/q) - p + q: KL(p|q) where p sums to one, and never below zero
    ce          -sum p log q: the gradient of kl
    top10       -sum w p log q, with w = 1.1 for the ten likeliest tokens of p and 0.1 for the others (HASS: Zhang et
                al. 2024, arXiv 2408.15766)

Gradients with respect to the draft logits z (m = 1 where q < p, beta = sum of q m, P = sum of p):

    d alpha = q (m - beta)          d(-log alpha) = -q (m - beta) / alpha          d kl = P q - p

D-PACE (Wu et al. 2026, arXiv 2605.18810) weighs each row's loss at depth j by w_j = sum over k >= j of the product over
i <= k of (q_i + 1) / 2, held constant, where q_i is the draft's probability of the text's own token at depth i: what
that depth adds to a smoothed accepted length. A row that does not go on to a depth ends there.

`distillation_loss` is the reference, left to autograd; `row_gradient` is what the fused form (`train.losses`) takes of
the same formulas.

Shapes: R rows, Q rows of a depth, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.schema import LossName

HYBRID_RATE = 3.0
NUM_FAVOURED, OTHERS_SHARE = 10, 0.1
TINY = 1e-10
SMALLEST = 1e-38
"""About float32's smallest: what a probability that underflowed counts as in a logarithm."""


def distillation_loss(name: LossName, draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Loss of each row [R], differentiable in `draft_logits` [R, C]; `target_probs` [R, C]."""
    logits, target = draft_logits.float(), target_probs.float()
    draft, log_draft = logits.softmax(dim=-1), logits.log_softmax(dim=-1)
    overlap = torch.minimum(draft, target).sum(dim=-1)
    kl: torch.Tensor = (torch.special.xlogy(target, target) - target * log_draft - target + draft).sum(dim=-1)
    share = (-HYBRID_RATE * overlap.detach()).exp()
    match name:
        case "lk":
            return -overlap.clamp_min(TINY).log()
        case "lk_hybrid":
            return share * kl + (1 - share) * (1 - overlap)
        case "tv":
            return 1 - overlap
        case "kl":
            return kl
        case "ce":
            return -(target * log_draft).sum(dim=-1)
        case "top10":
            return -(favour_likeliest(target) * log_draft).sum(dim=-1)


def favour_likeliest(target_probs: torch.Tensor) -> torch.Tensor:
    """The target of `top10` [R, C]: its likeliest tokens count eleven times as much as the others."""
    likeliest, where = target_probs.topk(min(NUM_FAVOURED, target_probs.shape[-1]), dim=-1)
    return (OTHERS_SHARE * target_probs).scatter_add(-1, where, likeliest)


def target_probabilities(logits: torch.Tensor, log_normalizer: torch.Tensor | None) -> torch.Tensor:
    """float32 p [R, C] from the target's logits at the draft vocabulary and its log-sum-exp over all tokens [R]."""
    if log_normalizer is None:
        return logits.softmax(dim=-1, dtype=torch.float32)
    return (logits.float() - log_normalizer.float()[:, None]).exp_()


def row_gradient(
    name: LossName, draft_probs: torch.Tensor, target_probs: torch.Tensor, favoured: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [R], overlap [R], gradient of each row's loss in the draft logits [R, C]); overwrites its first two inputs.

    favoured: `favour_likeliest` of the target, for top10.
    """
    smaller = torch.minimum(draft_probs, target_probs)
    overlap = smaller.sum(dim=-1)
    match name:
        case "lk":
            safe = overlap.clamp_min(TINY)
            return -safe.log(), overlap, _ascent(draft_probs, target_probs).mul_(-1 / safe[:, None])
        case "tv":
            return 1 - overlap, overlap, _ascent(draft_probs, target_probs).neg_()
        case "lk_hybrid":
            share = (-HYBRID_RATE * overlap).exp()
            loss = share * _divergence(draft_probs, target_probs) + (1 - share) * (1 - overlap)
            descent = _descent(draft_probs, target_probs).mul_(share[:, None])
            return loss, overlap, descent.sub_(_ascent(draft_probs, target_probs).mul_(1 - share[:, None]))
        case "kl":
            return _divergence(draft_probs, target_probs), overlap, _descent(draft_probs, target_probs)
        case "ce" | "top10":
            wanted = target_probs if favoured is None else favoured
            loss = -(wanted * draft_probs.clamp_min(SMALLEST).log()).sum(dim=-1)
            return loss, overlap, _descent(draft_probs, wanted)


def _divergence(draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """[R]: the sum of p log(p/q) - p + q. Where q is near p, as p (d - log(1 + d)) with d = (q - p) / p: so no term is
    negative, and none is lost to rounding."""
    draft, present = draft_probs.clamp_min(SMALLEST), target_probs > SMALLEST
    target = torch.where(present, target_probs, draft)
    excess = (draft - target) / target
    near = target * (excess - torch.log1p(excess))
    far = target * (target / draft).log() + (draft - target)
    return torch.where(present, torch.where(excess.abs() < 0.25, near, far), draft_probs).sum(dim=-1)


def _ascent(draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """d alpha [R, C]. Overwrites the target's probabilities."""
    below = target_probs.gt_(draft_probs)  # 1.0 where q < p
    kept = below.mul_(draft_probs)
    return kept.addcmul_(draft_probs, kept.sum(dim=-1, keepdim=True), value=-1)


def _descent(draft_probs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """d kl [R, C]."""
    return draft_probs * wanted.sum(dim=-1, keepdim=True) - wanted


def pace_weights(label_probs: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """D-PACE: the weight of each row's loss, depth by depth [Q], from the draft's probabilities of the text's own
    tokens [Q] and the rows they belong to, ascending and part of those of the depth before."""
    smoothed = label_probs[0].new_zeros(len(rows[0]), len(rows))
    where = [torch.searchsorted(rows[0], one) for one in rows]
    for depth, (probs, index) in enumerate(zip(label_probs, where, strict=True)):
        smoothed[index, depth] = (probs + 1) / 2
    reached = smoothed.cumprod(dim=1)  # 0 from where a row ends
    added = reached.flip(1).cumsum(dim=1).flip(1)
    return [added[index, depth] for depth, index in enumerate(where)]
