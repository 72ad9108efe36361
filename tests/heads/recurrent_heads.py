"""What training computes of a head that goes on from its own states, and what decoding does, for tests that hold both
against each other."""

from __future__ import annotations

import math

import torch

from heads.base import RecurrentHead, TargetWeights
from heads.unroll import Batch

HIDDEN, VOCABULARY = 48, 128


def random_weights() -> TargetWeights:
    return TargetWeights(embedding=torch.randn(VOCABULARY, HIDDEN), lm_head=torch.randn(VOCABULARY, HIDDEN))


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Plain causal attention over one sequence."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, is_causal=True
    ).transpose(0, 1)


class GrowingAttention:
    """Decoding's: every new row sees all rows before it and those of its own call up to itself."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.values.append(value)
        shared = query.shape[1] // key.shape[1]
        keys, values = (torch.cat(one).repeat_interleave(shared, dim=1) for one in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(len(keys) - len(query) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), values)


def random_batch(num_taps: int, lengths: tuple[int, ...] = (13, 9), *, seed: int = 0) -> Batch:
    """Two sequences of random tokens and target states; all rows may count."""
    chance = torch.Generator().manual_seed(seed)
    num_rows = sum(lengths)
    return Batch(
        token_ids=torch.randint(VOCABULARY, (num_rows,), generator=chance),
        loss_mask=torch.ones(num_rows, dtype=torch.bool),
        lengths=lengths,
        taps=torch.randn(num_rows, num_taps * HIDDEN, generator=chance),
        last=torch.randn(num_rows, HIDDEN, generator=chance),
        log_normalizer=torch.zeros(num_rows),
    )


def rows_of_steps(lengths: tuple[int, ...], num_steps: int) -> list[torch.Tensor]:
    """Every row of every sequence that has a label at each step."""
    plan = []
    for step in range(num_steps):
        rows, start = [], 0
        for length in lengths:
            rows.extend(range(start, start + max(0, length - step - 2)))
            start += length
        plan.append(torch.tensor(rows))
    return plan


def stepped_logits(head: RecurrentHead, batch: Batch, row: int, depth: int) -> torch.Tensor:
    """[C] as decoding has them: the text up to `row` read with the target's states, then `depth - 1` steps on the true
    tokens beside the head's own states, one row a step."""
    start = 0
    while row - start >= batch.lengths[0 if start == 0 else 1]:
        start += batch.lengths[0]
    attention = GrowingAttention()
    states = head.fuse(batch.taps[start : row + 1])
    states = head(batch.token_ids[start + 1 : row + 2], states, torch.arange(row + 1 - start), attention)[-1:]
    for step in range(1, depth):
        token, position = batch.token_ids[row + 1 + step][None], torch.tensor([row - start + step])
        states = head(token, states, position, attention)
    return head.logits(states, depth - 1)[0]


def assert_training_is_decoding(head: RecurrentHead, num_taps: int, num_depths: int = 5) -> None:
    """Teacher-forced logits of the unrolled head equal those of stepping it, at every row and depth.

    float32: logits of order 1 differ by 2e-6 between the two orders of summation, and by 0.05 and more where one side
    carries another state, turns by another position or sees a row too many.
    """
    batch = random_batch(num_taps)
    plan = rows_of_steps(batch.lengths, num_depths)
    with torch.no_grad():
        for step, (rows, answer) in enumerate(zip(plan, head.unroll(batch, plan), strict=True)):
            assert len(rows) > 0
            stepped = torch.stack([stepped_logits(head, batch, int(row), step + 1) for row in rows])
            torch.testing.assert_close(answer.logits(), stepped, rtol=1e-4, atol=2e-5)
