"""Where an answer leaves plain decoding's, and whether rounding explains it.

What counts is the gap between the token that was expected and the one that came, in plain decoding's own scores as
logits, with the noise of the position. The gap between the two best would excuse too much: at a position that happens
to be close, a wrong third token is no near tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.noise import gumbel, position_key
from infer.rows import RowGroup
from infer.sampling import Processor, SamplingParams
from infer.target import TargetModel

FLOAT32_TIE = 1e-4
"""Largest gap between two float32 logits that another order of summation closes."""
_NUM_STEPS = 4
"""Largest gap that rounding closes in half precision, in steps between neighbouring numbers: one or two for each of the
two logits. Measured in bfloat16 on a model of 135M parameters: at most two steps."""
_LEAST_EXPONENT = 5
"""The steps are those of the best logit, but at least those of 16 to 32, where it usually lies: the terms that add up
to a small logit are no smaller than those of a large one."""


def tie_below(dtype: torch.dtype, best_score: float) -> float:
    """The margin below which rounding explains a difference, where the best logit is `best_score`: 1e-4 in float32,
    0.5 in bfloat16 and 0.0625 in float16, more in these two for logits from 32 on."""
    if dtype == torch.float32:
        return FLOAT32_TIE
    exponent = math.frexp(best_score)[1] if math.isfinite(best_score) else 0
    step = torch.finfo(dtype).eps * 2.0 ** (max(exponent, _LEAST_EXPONENT) - 1)
    return _NUM_STEPS * step


def is_tie(dtype: torch.dtype, margin: float | None, best_score: float) -> bool:
    """Whether rounding explains a difference with that margin, which is None where no gap parts the two tokens."""
    return margin is not None and margin < tie_below(dtype, best_score)


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first token at which an answer leaves plain decoding's.

    position: its index in the answer.
    expected: plain decoding's token, None if its answer has ended.
    got: the answer's token, None if the answer has ended.
    margin: the gap between the two as logits, None where one of them is missing or ruled out.
    best_score: the largest logit there.
    """

    position: int
    expected: int | None
    got: int | None
    margin: float | None
    best_score: float

    @classmethod
    def find(
        cls,
        target: TargetModel,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        expected: Sequence[int],
        got: Sequence[int],
    ) -> FirstDifference:
        """Compare an answer, `got`, with plain decoding's, `expected`, from which it differs."""
        position = first_difference(expected, got)
        scores = plain_scores(target, prompt_ids, expected[:position], params)
        logits = scores if params.greedy else scores * params.temperature
        tokens = [ids[position] if position < len(ids) else None for ids in (expected, got)]
        return cls(
            position=position,
            expected=tokens[0],
            got=tokens[1],
            margin=_gap(logits, *tokens),
            best_score=float(logits.max()),
        )

    def is_tie(self, dtype: torch.dtype) -> bool:
        """Whether rounding in `dtype` explains it."""
        return is_tie(dtype, self.margin, self.best_score)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """The first index at which two sequences differ (the shorter one's length if it begins the other)."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def plain_scores(
    target: TargetModel, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    """What plain decoding takes the argmax of after `output_ids` [V]: processed scores (logits over the temperature)
    with the position's noise.

    Recomputed in one forward over the whole text, so equal to the engine's own up to rounding.
    """
    text = [*prompt_ids, *output_ids]
    cache = target.new_cache(num_slots=1, num_columns=len(text))
    group = RowGroup(slot=0, prefix=0, tokens=text)
    logits = target.forward([group], cache, logit_rows=[len(text) - 1]).logits[0]
    processor = Processor(
        params,
        prompt_ids=prompt_ids,
        eos_ids=target.eos_ids,
        vocab_size=target.vocab_size,
        device=target.device,
    )
    scores = processor.scores(logits, output_ids)
    if params.greedy:
        return scores
    assert params.seed is not None, "a sampled answer is recomputed from its seed"
    return scores + gumbel(position_key(params.seed, 0, 0, len(text)), target.vocab_size, target.device)


def _gap(logits: torch.Tensor, expected: int | None, got: int | None) -> float | None:
    if expected is None or got is None:
        return None
    gap = abs(float(logits[expected]) - float(logits[got]))
    return gap if math.isfinite(gap) else None
