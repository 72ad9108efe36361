"""Conversations packed side by side: none sees another, in any family of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch

from configs.schema import StepWeighting
from heads.base import DraftHead
from heads.unroll import Batch
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head
from tests.train.training_fixtures import tiny_target
from train.unroll import Teacher, plan_rows, unrolled_loss

LENGTHS, PROMPTS = (13, 2, 37, 8, 21), (5, 1, 20, 0, 3)
"""Odd ones: one without a label, one without a prompt, one that is longer than the others together."""
STEPS = 3

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def target() -> TargetModel:
    return tiny_target()


@cache
def trained(variant: str) -> DraftHead:
    return tiny_head(variant, target(), draft_vocab_size=100).train()


def conversation(number: int, *, variant: str, seed: int = 0) -> Batch:
    """One of the conversations with random features, whose values do not depend on the others."""
    generator = torch.Generator().manual_seed(100 * seed + number)
    length, hidden = LENGTHS[number], target().hidden_size
    num_taps = len(trained(variant).config.taps)
    return Batch(
        token_ids=torch.randint(0, target().vocab_size, (length,), generator=generator),
        loss_mask=torch.arange(length) >= PROMPTS[number],
        lengths=(length,),
        taps=torch.randn(length, num_taps * hidden, generator=generator),
        last=torch.randn(length, hidden, generator=generator),
        log_normalizer=6 + torch.rand(length, generator=generator),
    )


def packed(parts: Sequence[Batch]) -> Batch:
    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Batch(
        token_ids=joined("token_ids"),
        loss_mask=joined("loss_mask"),
        lengths=tuple(length for part in parts for length in part.lengths),
        taps=joined("taps"),
        last=joined("last"),
        log_normalizer=joined("log_normalizer"),
    )


def generators(numbers: Sequence[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in numbers]


def loss_and_gradients(
    variant: str,
    batch: Batch,
    numbers: Sequence[int],
    plan: Sequence[torch.Tensor] | None = None,
    *,
    weighting: StepWeighting = "decay",
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The weighted loss, and its gradients by the head's weights, the taps and the last states."""
    head = trained(variant)
    batch = replace(batch, taps=batch.taps.requires_grad_(), last=batch.last.requires_grad_())
    drawn = generators(numbers)
    if plan is None:
        plan = plan_rows(batch.loss_mask, batch.lengths, STEPS, keep_share=0.7, generators=drawn)
    weight = target().lm_head_weight.index_select(0, head.target_ids)
    loss, _ = unrolled_loss(
        head,
        batch,
        plan,
        Teacher(weight=weight),
        loss="lk",
        step_weights=[1.0, 0.8, 0.64],
        weighting=weighting,
        generators=drawn,
    )
    wanted = [*head.parameters(), batch.taps, batch.last]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    zeros = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]
    return loss.detach(), zeros[:-2], zeros[-2], zeros[-1]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same float32 sums in another order: 1e-4 of the largest entry."""
    scale = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)


@every_variant
@pytest.mark.parametrize("weighting", get_args(StepWeighting))
def test_a_pack_is_the_sum_of_its_conversations(variant: str, weighting: StepWeighting) -> None:
    """Loss and gradients of a pack are those of its conversations alone, added up: rows that go on, noise and each
    row's weights included, which are drawn and computed for each conversation by itself.
    """
    numbers = [0, 1, 2, 3, 4]
    parts = [conversation(number, variant=variant) for number in numbers]
    loss, gradients, taps, _ = loss_and_gradients(variant, packed(parts), numbers, weighting=weighting)
    alone = [
        loss_and_gradients(variant, part, [number], weighting=weighting)
        for number, part in zip(numbers, parts, strict=True)
        if number != 1  # which has no label
    ]
    assert_close(loss, torch.stack([one[0] for one in alone]).sum())
    for place, gradient in enumerate(gradients):
        assert_close(gradient, torch.stack([one[1][place] for one in alone]).sum(0))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    for number, one in zip([0, 2, 3, 4], alone, strict=True):
        assert_close(taps[bounds[number] : bounds[number + 1]], one[2])


@every_variant
@pytest.mark.parametrize("place", [0, 2, 4], ids=["first", "in the middle", "last"])
def test_a_conversation_does_not_see_its_neighbours(variant: str, place: int) -> None:
    """With one conversation under the loss, wherever it lies in the pack: nothing of the others has a gradient, and
    others in their place change neither the loss nor the gradients, however loud they are.
    """
    own = conversation(0, variant=variant)
    order = [1, 2, 3, 4]
    order.insert(place, 0)
    before = sum(LENGTHS[number] for number in order[:place])
    plan = [rows + before for rows in plan_rows(own.loss_mask, own.lengths, STEPS)]
    alone = loss_and_gradients(variant, own, [0], [rows - before for rows in plan])
    for seed, loudness in ((0, 1.0), (1, 1.0), (2, 1e3)):
        parts = [own if number == 0 else conversation(number, variant=variant, seed=seed) for number in order]
        parts = [
            part if part is own else replace(part, taps=loudness * part.taps, last=loudness * part.last)
            for part in parts
        ]
        loss, gradients, taps, last = loss_and_gradients(variant, packed(parts), order, plan)
        assert_close(loss, alone[0])
        for gradient, expected in zip(gradients, alone[1], strict=True):
            assert_close(gradient, expected)
        inside = slice(before, before + LENGTHS[0])
        assert_close(taps[inside], alone[2])
        for states in (taps, last):
            outside = states.clone()
            outside[inside] = 0
            assert not outside.any()
