"""Sequences attended side by side, as on a GPU, against one by one: the same answers and gradients."""

from __future__ import annotations

import pytest
import torch

from heads.unroll import UnrolledAttention, _Padding

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_STEPS = 6, 2, 5, 3


def plan_for(lengths: list[int], *, seed: int, share: float) -> list[torch.Tensor]:
    """Ascending rows, each step's part of those before it; of a sequence perhaps none."""
    generator = torch.Generator().manual_seed(seed)
    alive = torch.rand(sum(lengths), generator=generator) < share
    plan = []
    for _ in range(NUM_STEPS):
        plan.append(alive.nonzero().flatten())
        alive = alive & (torch.rand(sum(lengths), generator=generator) < 0.8)
    return plan


def attended(
    lengths: list[int], plan: list[torch.Tensor], *, together: bool, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Answers of every step, and the gradients of all that went in."""
    generator = torch.Generator().manual_seed(seed)
    attention = UnrolledAttention(lengths, plan[0], plan[0], together=together)
    inputs, outputs = [], []
    for step, rows in enumerate(plan):
        num_rows = sum(lengths) if step == 0 else len(rows)
        sizes = ((len(rows), NUM_HEADS), (num_rows, NUM_KV_HEADS), (num_rows, NUM_KV_HEADS))
        made = [
            torch.randn(*size, HEAD_DIM, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes
        ]
        if step:
            attention.keep(torch.searchsorted(plan[step - 1], rows), rows)
        inputs += made
        outputs.append(attention(*made))
    weights = [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in outputs]
    sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
    return outputs, [one.grad for one in inputs if one.grad is not None]


@pytest.mark.parametrize("lengths", [[7, 5], [9, 1, 6, 8, 3], [4, 4, 4], [13, 12, 11, 2]])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.15])
def test_side_by_side_is_one_by_one(lengths: list[int], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, to its rounding; however much is padding."""
    monkeypatch.setattr("heads.unroll.MOST_PADDING", 1000)
    plan = plan_for(lengths, seed=sum(lengths), share=share)
    one_by_one, together = (attended(lengths, plan, together=flag, seed=1) for flag in (False, True))
    for expected, found in zip(one_by_one, together, strict=True):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_row_too_many_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where queries saw their sequence's next row, as they would with starts one too low."""
    lengths = [7, 5, 6]
    plan = plan_for(lengths, seed=0, share=1.0)
    (expected, *_), _ = attended(lengths, plan, together=False, seed=1)
    of = _Padding.of

    def shifted(starts: list[int], bounds: list[int]) -> _Padding | None:
        padding = of(starts, bounds)
        assert padding is not None
        return _Padding(queries=padding.queries, context=padding.context, back=padding.back, starts=padding.starts - 1)

    monkeypatch.setattr(_Padding, "of", shifted)
    (found, *_), _ = attended(lengths, plan, together=True, seed=1)
    assert not torch.allclose(expected, found)


def test_few_long_sequences_among_many_short_ones_are_not_padded() -> None:
    starts = [0, 1000, *range(1010, 1110, 10)]
    assert _Padding.of(starts, starts) is None
    assert _Padding.of([0, 10, 20, 29], [0, 10, 20, 29]) is not None
    assert _Padding.of([0, 10, 20], [0, 10, 10]) is None  # a single one with queries
