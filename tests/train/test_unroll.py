"""The unrolled head in training: who sees what, what it is compared with, and that it is what decoding computes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from heads.base import TargetWeights
from heads.eagle1 import Eagle1Config, Eagle1Head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from train.objectives import distillation_loss, target_probabilities
from train.unroll import Teacher, _draft_ids, plan_rows, unrolled_loss

HIDDEN, VOCABULARY = 32, 50


SIZES: dict[str, int] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY,
}


@pytest.fixture
def head() -> Eagle3Head:
    config = Eagle3Config(**SIZES, taps=(1, 2, 3))
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
    normalizer = (batch.last @ teacher.weight.T).logsumexp(-1) + 0.2
    batch = replace(batch, log_normalizer=normalizer)
    plan = plan_rows(batch.loss_mask, batch.lengths, 3)
    total, _ = unrolled_loss(head, batch, plan, teacher, loss="kl", step_weights=[1.0, 0.8, 0.64])
    gradients = torch.autograd.grad(total, list(head.parameters()))
    reference = torch.zeros(())
    for step, rows in enumerate(plan):
        for row in rows.tolist():
            logits = head.logits(naive_draft(head, batch, 0, row, step + 1))
            place = slice(row + 1 + step, row + 2 + step)
            target = target_probabilities(batch.last[place] @ teacher.weight.T, normalizer[place])
            reference = reference + 0.8**step * distillation_loss("kl", logits[None], target).sum()
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
        return plan_rows(mask, [200], 4, keep_share=0.5, generators=[torch.Generator().manual_seed(9)])

    plan = draw()
    assert len(plan[0]) == 198
    for wider, narrower in itertools.pairwise(plan):
        assert set(narrower.tolist()) < set(wider.tolist())
    assert all(torch.equal(a, b) for a, b in zip(plan, draw(), strict=True))


def test_a_part_of_the_roots_leaves_further_steps_nested() -> None:
    """Of the rows that could begin a draft about `root_share` do, and all of these go on unless `keep_share` says
    otherwise. 198 rows at 0.3: 59, give or take five standard deviations (33)."""
    mask = torch.ones(200, dtype=torch.bool)

    def draw(keep_share: float) -> list[torch.Tensor]:
        shares = {"root_share": 0.3, "keep_share": keep_share}
        return plan_rows(mask, [200], 4, generators=[torch.Generator().manual_seed(9)], **shares)

    plan = draw(1.0)
    assert abs(len(plan[0]) - 59) < 33
    for step, rows in enumerate(plan):
        assert torch.equal(rows, plan[0][plan[0] < 198 - step])
    thinned = draw(0.5)
    assert torch.equal(thinned[0], plan[0])
    for wider, narrower in itertools.pairwise(thinned):
        assert set(narrower.tolist()) < set(wider.tolist())


def test_what_is_random_in_a_sequence_does_not_depend_on_its_batch() -> None:
    """The rows that go on and the noise of a sequence are the same alone, and beside others in either order."""
    lengths = [40, 25]
    config = Eagle1Config(**SIZES, taps=(4,))
    noisy_head = Eagle1Head(config, DraftVocabulary.full(VOCABULARY))

    def draw(order: Sequence[int]) -> dict[int, tuple[list[list[int]], torch.Tensor]]:
        """By sequence: its own rows of each step, and its noise."""
        chosen = [lengths[index] for index in order]
        generators = [torch.Generator().manual_seed(index) for index in order]
        batch = replace(make_batch(chosen, [0] * len(chosen)), taps=torch.zeros(sum(chosen), HIDDEN))
        plan = plan_rows(batch.loss_mask, chosen, 4, keep_share=0.6, generators=generators)
        noise = noisy_head.training_taps(batch, generators).split(chosen)
        starts = [0, *itertools.accumulate(chosen)]
        return {
            index: ([[int(r) - start for r in rows if start <= r < stop] for rows in plan], noise[place])
            for place, (index, start, stop) in enumerate(zip(order, starts, starts[1:], strict=False))
        }

    together = draw([0, 1])
    for other in (draw([1, 0]), draw([0]), draw([1])):
        for index, (rows, noise) in other.items():
            assert rows == together[index][0]
            assert torch.equal(noise, together[index][1])
    assert len(together[0][0][3]) < 20
    assert float(together[0][1].std()) > 0.05


# The objective of a batch.


def teacher_of(seed: int = 5) -> Teacher:
    return Teacher(weight=torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed)))


def plain_objective(
    head: Eagle3Head,
    batch: Batch,
    plan: Sequence[torch.Tensor],
    teacher: Teacher,
    weights: Sequence[float],
    paced: bool,
) -> torch.Tensor:
    """Every row by itself, by the plain formulas: no rounding up, no chunks, no fused gradients."""
    logits = [answer.logits() for answer in head.unroll(batch, plan)]
    chances = {
        (int(row), step): float(one.softmax(-1)[head.vocabulary.draft_ids[batch.token_ids[row + 2 + step]]])
        for step, (rows, answers) in enumerate(zip(plan, logits, strict=True))
        for row, one in zip(rows, answers.detach(), strict=True)
    }
    total = torch.zeros(())
    for step, (rows, answers) in enumerate(zip(plan, logits, strict=True)):
        for row, one in zip(rows.tolist(), answers, strict=True):
            place = slice(row + 1 + step, row + 2 + step)
            assert batch.log_normalizer is not None
            target = target_probabilities(batch.last[place] @ teacher.weight.T, batch.log_normalizer[place])
            weight = weights[step]
            if paced:
                own = [(chances[row, one] + 1) / 2 for one in range(len(plan)) if (row, one) in chances]
                reached = list(itertools.accumulate(own, operator.mul))
                weight *= sum(reached[step:])
            total = total + weight * distillation_loss("lk", one[None], target).sum()
    return total


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize(("lengths", "prompts"), [([9], [3]), ([11, 17, 2, 8], [3, 5, 1, 0]), ([16, 32], [2, 30])])
def test_the_objective_is_the_plain_sum_over_rows(
    head: Eagle3Head, lengths: list[int], prompts: list[int], paced: bool
) -> None:
    """Value and gradients, with random parts of the rows and unequal weights: rows and sequences that are rounded up
    change nothing (1e-4 of the largest entry: the same float32 sums in another order)."""
    batch, teacher, weights = make_batch(lengths, prompts), teacher_of(), [0.5, 1.0, 0.25]
    batch = replace(batch, log_normalizer=(batch.last @ teacher.weight.T).logsumexp(-1) + 0.2)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(lengths))]
    plan = plan_rows(batch.loss_mask, batch.lengths, 3, keep_share=0.7, generators=generators)
    total, figures = unrolled_loss(
        head,
        batch,
        plan,
        teacher,
        loss="lk",
        step_weights=weights,
        weighting="dpace" if paced else "decay",
        generators=generators,
    )
    found = torch.autograd.grad(total, list(head.parameters()))
    reference = plain_objective(head, batch, plan, teacher, weights, paced)
    torch.testing.assert_close(total, reference, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found, torch.autograd.grad(reference, list(head.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
    assert [len(one.figures.loss) for one in figures] == [len(rows) for rows in plan if len(rows)]


def test_a_batch_without_labels_teaches_nothing(head: Eagle3Head) -> None:
    """The loss is zero, and so are all gradients: not NaN, and not an error either."""
    batch = make_batch([5, 3], [5, 3])
    plan = plan_rows(batch.loss_mask, batch.lengths, 2)
    total, figures = unrolled_loss(head, batch, plan, teacher_of(), loss="lk", step_weights=[1.0, 1.0])
    total.backward()
    assert float(total.detach()) == 0
    assert figures == []
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert not bool(parameter.grad.any())


def test_labels_outside_the_draft_vocabulary(head: Eagle3Head) -> None:
    """D-PACE counts the head's chance of a token that it cannot draft as zero, whatever its id."""
    ids = torch.tensor([3, 5, 8])
    assert _draft_ids(ids, torch.tensor([0, 3, 4, 5, 8, 9])).tolist() == [-1, 0, -1, 1, 2, -1]


def test_the_law_over_the_draft_vocabulary_needs_no_log_sum_exp(head: Eagle3Head) -> None:
    """A batch without it is taught the renormalised law, which is also had by asking; the law over all tokens is not
    quietly replaced by it."""
    batch, teacher = make_batch([12], [2]), teacher_of()
    plan = plan_rows(batch.loss_mask, batch.lengths, 2)
    bare = replace(batch, log_normalizer=None)

    def loss(batch: Batch, renormalize: bool | None) -> float:
        weights = [1.0, 1.0]
        total, _ = unrolled_loss(head, batch, plan, teacher, loss="ce", step_weights=weights, renormalize=renormalize)
        return float(total.detach())

    assert loss(bare, None) == loss(batch, True) == loss(bare, True)
    assert loss(batch, None) == loss(batch, False) != loss(batch, True)
    with pytest.raises(AssertionError, match="log-sum-exp"):
        loss(bare, False)


def test_a_row_is_the_same_in_any_batch(head: Eagle3Head) -> None:
    """Its loss alone, and between others whose lengths make other rounded numbers: float32, another order of sums."""
    lengths, prompts = [37, 20, 64], [4, 1, 30]
    batch, teacher = make_batch(lengths, prompts), teacher_of()
    together = losses_by_row(head, batch, teacher)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = Batch(
            token_ids=batch.token_ids[rows],
            loss_mask=batch.loss_mask[rows],
            lengths=(length,),
            taps=batch.taps[rows],
            last=batch.last[rows],
            log_normalizer=batch.log_normalizer[rows] if batch.log_normalizer is not None else None,
        )
        found = losses_by_row(head, alone, teacher)
        assert found
        for (row, step), loss in found.items():
            assert loss == pytest.approx(together[row + start, step], rel=1e-4, abs=1e-4)
        start += length


def losses_by_row(head: Eagle3Head, batch: Batch, teacher: Teacher) -> dict[tuple[int, int], float]:
    plan = plan_rows(batch.loss_mask, batch.lengths, 3)
    with torch.no_grad():
        _, figures = unrolled_loss(head, batch, plan, teacher, loss="lk", step_weights=[1.0] * 3)
    return {
        (int(row), one.step): float(loss)
        for one in figures
        for row, loss in zip(one.rows, one.figures.loss, strict=True)
    }
