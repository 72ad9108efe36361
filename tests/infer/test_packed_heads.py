"""A head that decodes on packed weights: what it computes, what it leaves alone, and when it packs again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.base import RecurrentHead
from infer.cost import CostModel
from infer.drafters import TreeSettings
from infer.drafters.base import Room
from infer.drafters.head import HeadDrafter
from infer.drafters.packed import packed_view
from infer.packing import packable_dtypes
from infer.target import TargetModel
from tests.infer.helpers import random_head

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
"""Sums in another order: relative to the largest number, a few units of the dtype after a layer and an LM head."""


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of rows [R, heads, D] over the rows before them."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (rows.transpose(0, 1).float() for rows in (query, key, value))
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).matmul(value).transpose(0, 1)


@torch.inference_mode()
def answers(head: RecurrentHead, dtype: torch.dtype, *, num_rows: int = 5) -> torch.Tensor:
    """Logits of a step over fused states, and of the next over its own: all that drafting asks of a head."""
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(num_rows, 3 * head.config.hidden_size, generator=generator).to(dtype)
    tokens, positions = torch.arange(3, 3 + num_rows), torch.arange(7, 7 + num_rows)
    states = head(tokens, head.fuse(taps), positions, causal)
    return torch.cat([head.logits(states), head.logits(head(tokens, states, positions + 1, causal), 1)])


@pytest.fixture
def head(tiny_model: Callable[..., Any]) -> RecurrentHead:
    return random_head(TargetModel.wrap(tiny_model("llama"))).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_head_computes_the_same(head: RecurrentHead, dtype: torch.dtype) -> None:
    head = head.to(dtype)
    expected = answers(head, dtype)
    assert (packed_view(head) is head) == (dtype not in packable_dtypes())
    difference = (answers(packed_view(head), dtype) - expected).abs().max()
    assert difference <= TOLERANCE[dtype] * expected.abs().max()


def test_packing_leaves_the_head_as_it_is(head: RecurrentHead, tiny_model: Callable[..., Any]) -> None:
    """The head that a drafter was given can be saved, copied and trained: no module of it has been touched."""
    before = copy.deepcopy(head)
    drafter = HeadDrafter(head)
    tree = TreeSettings(max_nodes=4, max_depth=2, adaptive=False)
    drafter.open(Room(num_slots=1, num_columns=32, tree=tree, cost=CostModel.free()))
    assert drafter.head is head
    assert all(set(vars(one)) == set(vars(other)) for one, other in zip(head.modules(), before.modules(), strict=True))
    assert torch.equal(answers(copy.deepcopy(head), torch.float32), answers(before, torch.float32))


def test_weights_that_change_are_packed_again(head: RecurrentHead) -> None:
    """An answer of stale weights would differ in its first digit."""
    view = packed_view(head)
    answers(view, torch.float32)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(1.5)
    expected = answers(head, torch.float32)
    difference = (answers(view, torch.float32) - expected).abs().max()
    assert difference <= TOLERANCE[torch.float32] * expected.abs().max()
