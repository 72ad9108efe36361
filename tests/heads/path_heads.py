"""What tests of path heads share: text with random target states, and drafting as the decoder does it, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heads.base import PathHead, TargetWeights
from heads.unroll import Batch

Plan = Sequence[torch.Tensor]


def random_weights(vocab_size: int, hidden_size: int) -> TargetWeights:
    chance = torch.Generator().manual_seed(11)
    embedding, lm_head = (torch.randn(vocab_size, hidden_size, generator=chance) for _ in range(2))
    return TargetWeights(embedding=embedding, lm_head=lm_head)


def randomize(head: torch.nn.Module) -> None:
    """Every weight off its start: zeros and ones would hide a missing or swapped one."""
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=chance)
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.3 * noise)


def random_batch(vocab_size: int, hidden_size: int, lengths: tuple[int, ...] = (9, 1, 12)) -> Batch:
    chance = torch.Generator().manual_seed(3)
    num_rows = sum(lengths)
    return Batch(
        token_ids=torch.randint(vocab_size, (num_rows,), generator=chance),
        loss_mask=torch.ones(num_rows, dtype=torch.bool),
        lengths=lengths,
        taps=torch.randn(num_rows, hidden_size, generator=chance),
        last=torch.randn(num_rows, hidden_size, generator=chance),
        log_normalizer=torch.zeros(num_rows),
    )


def plan_of(batch: Batch, num_steps: int) -> list[torch.Tensor]:
    """Rows with a label at each step; from the second step on, a part of those before it."""
    left = torch.cat([torch.arange(length).flip(0) for length in batch.lengths])  # rows to the end of the sequence
    plan = [(left >= step + 2).nonzero().flatten() for step in range(num_steps)]
    return [rows if step == 0 else rows[rows % 4 != 1] for step, rows in enumerate(plan)]


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of the last rows of one sequence: query [Q, Hq, D], key and value [T, Hkv, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(len(key) - len(query) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


def unrolled_logits(head: PathHead, batch: Batch, plan: Plan) -> list[torch.Tensor]:
    """[Q, C] of each step, as training has them."""
    with torch.no_grad():
        return [step.logits() for step in head.unroll(batch, plan)]


def decoded_logits(head: PathHead, batch: Batch, plan: Plan) -> list[torch.Tensor]:
    """The same, as decoding has them: each row as the root of a draft of its own, with nothing behind it in sight."""
    start_of = torch.repeat_interleave(torch.tensor([0, *batch.lengths]).cumsum(0)[:-1], torch.tensor(batch.lengths))
    results = []
    with torch.no_grad():
        for step, rows in enumerate(plan):
            logits = []
            for row in rows.tolist():
                text = slice(int(start_of[row]), row + 1)
                after = slice(text.start + 1, row + 2)
                positions = torch.arange(row + 1 - text.start)
                last = torch.tensor([len(positions) - 1])
                root = head.roots(batch.taps[text], batch.token_ids[after], positions, causal, rows=last)
                path = batch.token_ids[row + 1 : row + 2 + step]
                logits.append(head.logits(head.draft(root, path[None], step), step)[0])
            results.append(torch.stack(logits))
    return results


def assert_training_is_decoding(head: PathHead, batch: Batch, num_steps: int) -> list[torch.Tensor]:
    """Sums of up to a hundred products of order one in float32 differ by 1e-5 between orders of summation; a row, a
    token or a depth taken from the wrong place differs by 0.1 and more. Returns the logits."""
    plan = plan_of(batch, num_steps)
    trained, decoded = unrolled_logits(head, batch, plan), decoded_logits(head, batch, plan)
    assert len(trained) == num_steps
    for here, there in zip(trained, decoded, strict=True):
        assert here.std() > 0.3
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    return trained


def gradients(head: PathHead, batch: Batch, num_steps: int) -> dict[str, torch.Tensor | None]:
    """Of a loss that every logit enters, for every parameter by name."""
    total = torch.zeros(())
    for step in head.unroll(batch, plan_of(batch, num_steps)):
        total = total + step.logits().log_softmax(-1)[:, 0].sum()
    total.backward()
    return {name: parameter.grad for name, parameter in head.named_parameters()}
