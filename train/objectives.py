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
    label       -log q(x) of the text's own token x; nothing where the draft vocabulary lacks it

Gradients with respect to the draft logits z (m = 1 where q < p, beta = sum of q m, P = sum of p):

    d alpha = q (m - beta)          d(-log alpha) = -q (m - beta) / alpha          d kl = P q - p
    d label = q - 1 at x

Weights of each row's loss by depth (`train.step_weighting`), held constant. A row that does not go on to a depth ends
there: nothing is accepted behind it.

dpace   (D-PACE: Wu et al. 2026, arXiv 2605.18810) w_j = sum over k >= j of the product over i <= k of c_i, where c_i =
        s + (1 - s) q_i with s = 1/2 (`train.step_smoothing`), and q_i is the draft's probability of the text's own
        token at depth i: what that depth adds to a smoothed accepted length.
length  the same with the overlap alpha_i in the place of q_i. A chain under token-wise verification accepts

            E = sum over k of the product over i <= k of alpha_i

        drafts if its depths accept along the text, as they do where overlaps hang on no token in between. d E = sum of
        w_j d log(alpha_j) with the w_j of s = 0: so with s = 0 and loss lk the gradient is exactly that of -E. It is
        also small wherever an overlap is (at one depth it is that of tv), which starves rows and depths that are still
        poor; hence the smoothing.
block   with loss label, exactly the gradient of -E for E the expected accepted length under block verification (Sun et
        al. 2024, arXiv 2403.10444), on text drawn from the target at temperature 1. With drafts x ~ q the rule keeps at
        least k with probability P_k = min(1, P_(k-1) p(x_k)/q(x_k)), P_0 = 1. Put r_k for the product over i <= k of
        q(x_i)/p(x_i) and m_k = P_k r_k: the mean over x ~ q of P_k is that over x ~ p of m_k, and m_k = min(r_k,
        m_(k-1)). So

            E = mean over text x ~ p of the sum over k of m_k,        m_k = min(1, r_1, ..., r_k)

        m_k is the probability that k drafts are kept, given that the tokens emitted are x_1 ... x_k. Where it is below
        1 it is r_j for the j <= k at which r is smallest, and d m_k = m_k times the sum over l <= j of d log q(x_l):

            w_l = sum over k with m_k < 1 and l <= j(k) of m_k

        A token that the draft vocabulary lacks has q = 0, and all m from there on are 0. With the law renormalised over
        the draft vocabulary (`train.teacher: draft`) p is that law. On greedy text E is the mean over that text alone:
        how much is kept at temperature 1 of answers that happen to be the greedy ones.

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
NO_LABEL = -1
"""The draft id of a token of the text that the draft vocabulary lacks."""


def distillation_loss(
    name: LossName, draft_logits: torch.Tensor, target_probs: torch.Tensor, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """Loss of each row [R], differentiable in `draft_logits` [R, C]; `target_probs` [R, C]; `labels` [R]: draft ids of
    the text's own tokens (for the loss of that name)."""
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
        case "label":
            assert labels is not None, "this loss needs the text's own tokens"
            return -log_draft.gather(-1, labels.clamp_min(0)[:, None])[:, 0] * (labels != NO_LABEL)


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
    name: LossName,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    favoured: torch.Tensor | None = None,
    *,
    labels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [R], overlap [R], gradient of each row's loss in the draft logits [R, C]); overwrites its first two inputs.

    favoured: `favour_likeliest` of the target, for top10. labels [R]: draft ids of the text's own tokens, for label.
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
        case "label":
            assert labels is not None, "this loss needs the text's own tokens"
            present = labels != NO_LABEL
            loss = -probs_of(draft_probs, labels).clamp_min(SMALLEST).log() * present
            draft_probs.scatter_add_(1, labels.clamp_min(0)[:, None], -torch.ones_like(draft_probs[:, :1]))
            return loss, overlap, draft_probs.mul_(present[:, None])


def probs_of(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[R]: of each row's label, 0 where there is none; `probs` [R, C]."""
    return probs.gather(1, labels.clamp_min(0)[:, None])[:, 0] * (labels != NO_LABEL)


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


# Weights of rows by depth. Each takes what the depths' rows showed, depth by depth [Q], and the rows they belong to,
# ascending and part of those of the depth before.


def length_weights(
    chances: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], *, smoothing: float = 0.0
) -> list[torch.Tensor]:
    """length, from the overlaps; dpace, from the draft's probabilities of the text's own tokens."""
    smoothed = [smoothing + (1 - smoothing) * one for one in chances]
    reached = _by_row(smoothed, rows).cumprod(dim=1)  # 0 from where a row ends
    return _by_depth(_from_here_on(reached), rows)


def block_weights(
    draft_probs: Sequence[torch.Tensor], target_probs: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """block, from the probabilities that draft and target give the text's own tokens."""
    draft, target = _by_row(draft_probs, rows), _by_row(target_probs, rows)
    # Where a row has ended, or the draft cannot say the token, the ratio is 0, and so is all behind it.
    log_ratios = draft.log() - target.clamp_min(SMALLEST).log()
    lowest, where = log_ratios.cumsum(dim=1).cummin(dim=1)
    kept = lowest.exp() * (lowest < 0)
    return _by_depth(_from_here_on(torch.zeros_like(kept).scatter_add(1, where, kept)), rows)


def _by_row(values: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[R, depths] of all rows of the first depth, 0 where a row does not go on to a depth."""
    table = values[0].new_zeros(len(rows[0]), len(rows))
    for depth, (own, index) in enumerate(zip(values, _places(rows), strict=True)):
        table[index, depth] = own
    return table


def _by_depth(table: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`_by_row` undone."""
    return [table[index, depth] for depth, index in enumerate(_places(rows))]


def _places(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.searchsorted(rows[0], one) for one in rows]


def _from_here_on(table: torch.Tensor) -> torch.Tensor:
    """[R, depths] -> at each depth the sum of it and all further ones."""
    return table.flip(1).cumsum(dim=1).flip(1)
