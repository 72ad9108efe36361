"""What keeping features in a lossy form costs: how far states, and the law that the head learns, are from exact ones.

    relative_error   of the states of a tap (and of `last`): root of the summed squared error over that of the states
    kl, max_kl       divergence of the target's next-token law by the kept state from the exact one, in nats: mean and
                     largest over positions before tokens under the loss
    argmax_changed   share of these positions at which another token has become the likeliest

Shapes: Q positions, H hidden, V rows of the LM head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.chat import Rendered
from infer.target import TargetModel
from train.features.codec import Codec
from train.features.rows import NORMALIZER_CHUNK

NUM_SAMPLES = 8
_LAST = "last"


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """See the module. Of `rows` sample rows."""

    stored_dtype: str
    rows: int
    positions: int
    relative_error: dict[str, float]
    kl: float
    max_kl: float
    argmax_changed: float

    def describe(self) -> str:
        errors = ", ".join(f"{name} {value:.2%}" for name, value in self.relative_error.items())
        return (
            f"kept in {self.stored_dtype}: states are off by {errors}; the target's law by {self.kl:.2g} nats on "
            f"average (at most {self.max_kl:.2g}), with another likeliest token at {self.argmax_changed:.2%} of "
            f"{self.positions:,} positions of {self.rows} rows"
        )


def spread(rows: Sequence[Rendered], count: int = NUM_SAMPLES) -> list[Rendered]:
    """A few rows, evenly spread."""
    return [rows[place * len(rows) // count] for place in range(count)] if len(rows) > count else list(rows)


@torch.inference_mode()
def measure_errors(target: TargetModel, codec: Codec, rows: Sequence[Rendered]) -> ErrorReport:
    """Compare what `codec` gives back of these rows' states with the states."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    divergences, num_changed = [], 0
    for row in rows:
        (exact,) = target.features([row.token_ids], codec.taps)
        taps, last = codec.decode(codec.encode(exact.taps, exact.last), codec.taps)
        size = codec.hidden_size
        pairs = zip(exact.taps.split(size, dim=-1), taps.split(size, dim=-1), strict=True)
        named = [(f"tap {tap}", *pair) for tap, pair in zip(codec.taps, pairs, strict=False)]
        for name, states, kept in [*named, (_LAST, exact.last, last)]:
            squares[name][0] += float((kept.float() - states.float()).square().sum())
            squares[name][1] += float(states.float().square().sum())
        positions = torch.tensor(row.loss_mask[1:]).nonzero().flatten().to(last.device)
        for chunk in positions.split(NORMALIZER_CHUNK):
            kl, changed = _law_error(exact.last[chunk], last[chunk], target.lm_head_weight)
            divergences.append(kl.cpu())
            num_changed += int(changed.sum())
    kl = torch.cat(divergences) if divergences else torch.zeros(1)
    return ErrorReport(
        stored_dtype=codec.stored_dtype,
        rows=len(rows),
        positions=len(kl),
        relative_error={name: (error / max(total, 1e-30)) ** 0.5 for name, (error, total) in squares.items()},
        kl=float(kl.mean()),
        max_kl=float(kl.max()),
        argmax_changed=num_changed / len(kl),
    )


def _law_error(exact: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence [Q], and whether the likeliest token changed [Q]; states [Q, H], weight [V, H]."""
    logits, kept_logits = ((states.to(weight) @ weight.T).float() for states in (exact, kept))
    target_log_probs, kept_log_probs = logits.log_softmax(-1), kept_logits.log_softmax(-1)
    kl = (target_log_probs.exp() * (target_log_probs - kept_log_probs)).sum(-1)
    return kl.clamp_min(0), logits.argmax(-1) != kept_logits.argmax(-1)
