"""What training reads of the target for a row, and how a row is known: by its content, whatever its number.

Shapes: T tokens of a row, H hidden, V rows of the LM head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from heads.transfer import sent
from infer.chat import Rendered

NORMALIZER_CHUNK = 256
"""Rows whose logits over the whole vocabulary are held at once on a CPU."""
GPU_NORMALIZER_LOGITS = 1 << 26
"""Logits that are held at once on a GPU, where small products leave most of it idle."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowFeatures:
    """taps [T, taps * H] and last [T, H] (after the target's final norm), which is what teaches the head.

    log_normalizer [T] float32: log-sum-exp of the target's logits at the positions before the tokens under the loss,
    NaN elsewhere; None where the run does not ask for it. is_finite []: whether `last` is, where nobody has looked yet;
    None of features that are known to be.
    """

    taps: torch.Tensor
    last: torch.Tensor
    log_normalizer: torch.Tensor | None
    is_finite: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one for one in (self.taps, self.last, self.log_normalizer, self.is_finite) if one is not None]


class FeatureSource(Protocol):
    """Features of any row. With a target that is shared out among processes, all of them ask together."""

    def get(self, row: Rendered) -> RowFeatures: ...

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        """Each row's, the same as `get` gives. All processes may ask at once, for different numbers of rows."""
        ...

    def flush(self) -> None:
        """Write what is still in memory. Call it with every checkpoint and at the end."""
        ...


def row_key(token_ids: Sequence[int]) -> str:
    """What a row is found by: a hash of its token ids."""
    return hashlib.sha256(torch.tensor(token_ids, dtype=torch.int64).numpy().tobytes()).hexdigest()[:32]


def log_normalizer(last: torch.Tensor, lm_head_weight: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [T] of the target's logits, in chunks: the logits of a long row would not fit."""
    size = normalizer_rows(len(lm_head_weight), on_gpu=last.device.type != "cpu")
    with torch.inference_mode():
        chunks = [(chunk @ lm_head_weight.T).float().logsumexp(-1) for chunk in last.split(size)]
    return torch.cat(chunks).clone()


def normalizer_rows(vocab_size: int, *, on_gpu: bool) -> int:
    """Rows whose logits over the whole vocabulary are held at once."""
    return max(NORMALIZER_CHUNK, GPU_NORMALIZER_LOGITS // vocab_size) if on_gpu else NORMALIZER_CHUNK


def normalizer_before_labels(last: torch.Tensor, loss_mask: torch.Tensor, lm_head_weight: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [T] at the positions before the tokens under the loss, where it is read; NaN elsewhere.

    `last` [T, H] as it is kept: the law that a head learns then sums to one, also where keeping it rounded it.
    """
    positions = loss_mask[1:].nonzero().flatten()  # of a mask in CPU memory, so the device need not be asked
    normalizer = torch.full((len(last),), float("nan"), device=lm_head_weight.device)
    if len(positions):
        # A copy: bits may depend on how rows lie in memory.
        states = last[sent(positions, last.device)].to(lm_head_weight)
        normalizer[sent(positions, normalizer.device)] = log_normalizer(states, lm_head_weight)
    return normalizer
