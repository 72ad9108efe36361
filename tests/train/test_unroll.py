"""The unrolled head in training: who sees what, what it is compared with, and that it is what decoding computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from heads.base import TargetWeights
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from train.unroll import Teacher, plan_rows, unrolled_loss

HIDDEN, VOCABULARY = 32, 50


@pytest.fixture
def head() -> Eagle3Head:
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        taps=(1, 2, 3),
    )
    torch.manual_seed(0)
    made = Eagle3Head(config, DraftVocabulary.full(VOCABULARY))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.bind(TargetWeights(embedding=torch.randn(VOCABULARY, HIDDEN), lm_head=torch.randn(VOCABULARY, HIDDEN)))


def make_batch(lengths: Sequence[int], prompts: Sequence[int], seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    masks = [torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    return Batch(
        token_ids=torch.randint(0, VOCABULARY, (total,), generator=generator),
        loss_mask=torch.cat(masks),
        lengths=tuple(lengths),
        taps=torch.randn(total, 3 * HIDDEN, generator=generator),
        last=torch.randn(total, HIDDEN, generator=generator),
        log_normalizer=torch.full((total,), 6.0),
    )


def test_alignment_table() -> None:
    """Prompt a b, answer c d e f: one line a supervised label. (A mask that was not shifted with the labels once kept
    the second answer token from ever being learnt.)
    """
    tokens = "abcdef"
    mask = torch.tensor([False, False, True, True, True, True])
    table = [
        (step + 1, int(row), tokens[row + 1 + step], f"f{int(row)}" if step == 0 else "own", tokens[row + 2 + step])
        for step, rows in enumerate(plan_rows(mask, [6], 4))
        for row in rows
    ]
    assert table == [
        # depth, row, input token, state, label
        (1, 1, "c", "f1", "d"),
        (1, 2, "d", "f2", "e"),
        (1, 3, "e", "f3", "f"),
        (2, 1, "d", "own", "e"),
        (2, 2, "e", "own", "f"),
        (3, 1, "e", "own", "f"),
    ]


@pytest.mark.parametrize("answer_length", [1, 2, 5, 9])
def test_number_of_labels_is_answer_length_less_depth(answer_length: int) -> None:
    """For every answer of a conversation, whatever the prompt's length and the other turns."""
    turn = [False] * 4 + [True] * answer_length
    mask = torch.tensor(turn + turn + [False, False])
    plan = plan_rows(mask, [len(mask)], 6)
    assert [len(rows) for rows in plan] == [2 * max(0, answer_length - depth) for depth in range(1, 7)]


def test_sequences_do_not_leak_into_each_other() -> None:
    """A label is never taken from the next packed sequence, even if the mask is true up to the border."""
    mask = torch.ones(9, dtype=torch.bool)
    for step, rows in enumerate(plan_rows(mask, [4, 5], 3)):
        for row in rows.tolist():
            assert (row < 4) == (row + 2 + step < 4)


def test_unrolled_states_equal_a_naive_decode_loop(head: Eagle3Head) -> None:
    """Depths 1 to 5: the packed, pruned, diagonal form gives the states of a loop that drafts every position from a
    fresh cache, one token at a time (1e-5: the same float32 sums in another order).
    """
    batch = make_batch([11, 17, 2, 8], [3, 5, 1, 0])
    plan = plan_rows(batch.loss_mask, batch.lengths, 5)
    with torch.no_grad():
        states = [answer.states for answer in head.unroll(batch, plan)]
        start = 0
        for length in batch.lengths:
            for step, rows in enumerate(plan):
                for place, row in enumerate(rows.tolist()):
                    if start <= row < start + length:
                        expected = head.norm(naive_draft(head, batch, start, row - start, step + 1))
                        torch.testing.assert_close(states[step][place], expected, rtol=1e-5, atol=1e-5)
            start += length


def naive_draft(head: Eagle3Head, batch: Batch, start: int, row: int, depth: int) -> torch.Tensor:
    """Prefill rows 0..row with the target's features, then feed true tokens on the head's own states."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        groups = query.shape[1] // key.shape[1]
        all_keys = torch.cat(keys).repeat_interleave(groups, dim=1)
        all_values = torch.cat(values).repeat_interleave(groups, dim=1)
        weights = torch.einsum("qhd,khd->hqk", query, all_keys) / query.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", weights.softmax(-1), all_values)

    fused = head.fuse(batch.taps[start : start + row + 1])
    state = torch.empty(0)
    for position in range(row + 1):  # one row at a time, so that causality needs no mask
        token = batch.token_ids[start + position + 1][None]
        state = head(token, fused[position][None], torch.tensor([position]), attend)
    for step in range(1, depth):
        token = batch.token_ids[start + row + 1 + step][None]
        state = head(token, state, torch.tensor([row + step]), attend)
    return state[0]


def test_gradients_equal_those_of_the_naive_loop(head: Eagle3Head) -> None:
    """The whole objective, differentiated through all steps, against the loop; 1e-4 of the largest entry."""
    batch = make_batch([9], [3])
    teacher = Teacher(weight=torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5)))
    plan = plan_rows(batch.loss_mask, batch.lengths, 3)
    total, _ = unrolled_loss(head, batch, plan, teacher, loss="kl", step_weights=[1.0, 0.8, 0.64])
    gradients = torch.autograd.grad(total, list(head.parameters()))
    reference = torch.zeros(())
    for step, rows in enumerate(plan):
        for row in rows.tolist():
            logits = head.logits(naive_draft(head, batch, 0, row, step + 1))
            target = (teacher.weight @ batch.last[row + 1 + step] - batch.log_normalizer[row + 1 + step]).exp()
            log_probs = logits.log_softmax(-1)
            reference = reference + 0.8**step * (target * (target.log() - log_probs)).sum()
    torch.testing.assert_close(total, reference, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(reference, list(head.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_prompt_length_does_not_change_the_loss(head: Eagle3Head) -> None:
    """The mean is over labels, so an answer weighs the same beside 500 prompt tokens of another sequence."""
    teacher = Teacher(weight=torch.randn(VOCABULARY, HIDDEN))
    alone, long_prompt = make_batch([8], [3]), make_batch([8, 500], [3, 499])
    losses = []
    for batch in (alone, long_prompt):
        plan = plan_rows(batch.loss_mask, batch.lengths, 1)
        first = Batch(
            token_ids=torch.cat([alone.token_ids, batch.token_ids[8:]]),
            loss_mask=batch.loss_mask,
            lengths=batch.lengths,
            taps=torch.cat([alone.taps, batch.taps[8:]]),
            last=torch.cat([alone.last, batch.last[8:]]),
            log_normalizer=batch.log_normalizer,
        )
        total, _ = unrolled_loss(head, first, plan, teacher, loss="lk", step_weights=[1 / len(plan[0])])
        losses.append(total)
    torch.testing.assert_close(losses[0], losses[1])


def test_random_subset_is_nested_and_seeded() -> None:
    """Rows that go on are part of those before, the first step keeps all, and the draw follows its generator."""
    mask = torch.ones(200, dtype=torch.bool)

    def draw() -> list[torch.Tensor]:
        return plan_rows(mask, [200], 4, keep_share=0.5, generator=torch.Generator().manual_seed(9))

    plan = draw()
    assert len(plan[0]) == 198
    for wider, narrower in itertools.pairwise(plan):
        assert set(narrower.tolist()) < set(wider.tolist())
    assert all(torch.equal(a, b) for a, b in zip(plan, draw(), strict=True))
