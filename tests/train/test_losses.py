"""Distillation losses: right values, right gradients, in float32, without the logits of all rows."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import pytest
import torch

from configs.schema import StepWeighting
from infer.proof.enumeration import RandomModel, Scenario, Tokens, levels, sampled
from train import objectives
from train.losses import (
    GPU_CHUNK_LOGITS,
    NO_LABEL,
    Drafts,
    LossName,
    TeacherRows,
    chunk_rows,
    fused_distillation_loss,
    fused_unrolled_loss,
)
from train.objectives import (
    block_weights,
    distillation_loss,
    length_weights,
    row_gradient,
    target_probabilities,
)

NAMES: tuple[LossName, ...] = get_args(LossName)
OF_LAWS = tuple(name for name in NAMES if name != "label")
"""Those that compare two laws, and need no text."""
NUM_ROWS, WIDTH, NUM_DRAFT, NUM_TOKENS = 13, 8, 37, 90
NUM_PLACES = NUM_ROWS + 5


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def teacher() -> TeacherRows:
    """A target whose draft vocabulary is a part of its own."""
    weight, states = normal(NUM_TOKENS, WIDTH, seed=0), normal(NUM_PLACES, WIDTH, seed=1)
    normalizer = (states @ weight.T).logsumexp(-1)
    return TeacherRows(states=states, weight=weight[:NUM_DRAFT], log_normalizer=normalizer)


@pytest.fixture(params=["one LM head", "one a depth"])
def depths(request: pytest.FixtureRequest) -> list[Drafts]:
    """Four depths: the rows of each are part of those before, at odd numbers, and the last one has none in places."""
    rows = [torch.arange(NUM_ROWS), torch.tensor([0, 1, 3, 4, 7, 8, 9, 12]), torch.tensor([1, 3, 9]), torch.tensor([9])]
    shared = normal(NUM_DRAFT, WIDTH, seed=9)
    made = []
    for depth, kept in enumerate(rows):
        labels = torch.randint(0, NUM_DRAFT, (len(kept),), generator=torch.Generator().manual_seed(depth))
        labels[0] = NO_LABEL
        made.append(
            Drafts(
                states=normal(len(kept), WIDTH, seed=10 + depth),
                weight=shared if request.param == "one LM head" else normal(NUM_DRAFT, WIDTH, seed=30 + depth),
                rows=kept,
                places=kept + 1 + depth,
                weights=normal(len(kept), seed=20 + depth).abs(),
                labels=labels,
            )
        )
    return made


def reference(
    name: LossName, depths: Sequence[Drafts], teacher: TeacherRows, *, weighting: StepWeighting
) -> torch.Tensor:
    """The whole objective by the plain formulas, every logit kept, left to autograd."""
    target = target_probabilities(teacher.states @ teacher.weight.T, teacher.log_normalizer)
    logits = [depth.states @ depth.weight.T for depth in depths]
    weights = [depth.weights for depth in depths]
    if weighting != "decay":
        shown = [
            shown_by(one.detach().softmax(-1), target[depth.places], depth)
            for one, depth in zip(logits, depths, strict=True)
        ]
        weights = [
            weight * torch.tensor([weight_of(weighting, shown, row, depth) for row in drafts.rows.tolist()])
            for depth, (weight, drafts) in enumerate(zip(weights, depths, strict=True))
        ]
    return sum(
        (
            (weight * distillation_loss(name, one, target[depth.places], depth.labels)).sum()
            for weight, one, depth in zip(weights, logits, depths, strict=True)
        ),
        torch.zeros(()),
    )


@dataclass(frozen=True)
class Shown:
    """Of a row at a depth: the draft's and the target's probability of the text's token, and the overlap."""

    draft: float
    target: float
    overlap: float


def shown_by(draft_probs: torch.Tensor, target_probs: torch.Tensor, drafts: Drafts) -> dict[int, Shown]:
    assert drafts.labels is not None
    overlaps = torch.minimum(draft_probs, target_probs).sum(-1).tolist()
    return {
        row: Shown(
            draft=float(draft_probs[place, label]) if label != NO_LABEL else 0.0,
            target=float(target_probs[place, label]) if label != NO_LABEL else 0.0,
            overlap=overlaps[place],
        )
        for place, (row, label) in enumerate(zip(drafts.rows.tolist(), drafts.labels.tolist(), strict=True))
    }


def weight_of(weighting: StepWeighting, shown: Sequence[dict[int, Shown]], row: int, depth: int) -> float:
    """As the module writes them, by loops."""
    own = [one[row] for one in shown if row in one]
    if weighting != "block":
        chances = [((one.draft if weighting == "dpace" else one.overlap) + 1) / 2 for one in own]
        reached = [math.prod(chances[: k + 1]) for k in range(len(own))]
        return sum(reached[depth:])
    total, product, smallest, where = 0.0, 1.0, 1.0, -1
    for k, one in enumerate(own):
        product = product * one.draft / one.target if one.draft else 0.0
        if product < smallest:
            smallest, where = product, k
        if where >= depth and k >= depth:
            total += smallest
    return total


def with_gradients(depths: Sequence[Drafts]) -> list[Drafts]:
    """Copies whose tensors are leaves; an LM head that is shared stays shared."""
    heads: dict[int, torch.Tensor] = {}
    for depth in depths:
        heads.setdefault(id(depth.weight), depth.weight.clone().requires_grad_())
    return [
        Drafts(
            states=depth.states.clone().requires_grad_(),
            weight=heads[id(depth.weight)],
            rows=depth.rows,
            places=depth.places,
            weights=depth.weights,
            labels=depth.labels,
        )
        for depth in depths
    ]


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 20, None])
@pytest.mark.parametrize("weighting", get_args(StepWeighting))
@pytest.mark.parametrize("name", NAMES)
def test_fused_loss_equals_the_reference(
    name: LossName, weighting: StepWeighting, rows_per_chunk: int | None, depths: list[Drafts], teacher: TeacherRows
) -> None:
    """Value and all gradients agree with autograd on the plain formulas, over several depths of odd sizes, in chunks
    that do not divide the rows, with one LM head for all depths and with one for each, and under every weighting."""
    results = []
    for fused in (False, True):
        leaves = with_gradients(depths)
        if fused:
            total, figures = fused_unrolled_loss(
                name, leaves, teacher, weighting=weighting, rows_per_chunk=rows_per_chunk
            )
            assert all(bool(torch.isfinite(one.loss).all() & torch.isfinite(one.overlap).all()) for one in figures)
        else:
            total = reference(name, leaves, teacher, weighting=weighting)
        (3 * total).backward()
        results.append([total.detach(), *(tensor.grad for one in leaves for tensor in (one.states, one.weight))])
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_law_over_the_draft_vocabulary(name: LossName, depths: list[Drafts], teacher: TeacherRows) -> None:
    """Without the log-sum-exp the target's law is renormalised: the fused loss equals the reference on a softmax."""
    drafted = TeacherRows(states=teacher.states, weight=teacher.weight)
    total, _ = fused_unrolled_loss(name, depths, drafted, rows_per_chunk=7)
    torch.testing.assert_close(total, reference(name, depths, drafted, weighting="decay"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OF_LAWS)
def test_the_loss_of_one_depth_by_itself(name: LossName, teacher: TeacherRows) -> None:
    states, weight = normal(NUM_PLACES, WIDTH, seed=2).requires_grad_(), normal(NUM_DRAFT, WIDTH, seed=3)
    total, figures = fused_distillation_loss(
        name, states, weight, teacher.states, teacher.weight, teacher.log_normalizer, rows_per_chunk=5, compare=True
    )
    target = target_probabilities(teacher.states @ teacher.weight.T, teacher.log_normalizer)
    rows = distillation_loss(name, states @ weight.T, target)
    torch.testing.assert_close(figures.loss, rows.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, rows.sum(), rtol=1e-5, atol=1e-5)
    assert torch.equal(figures.agrees, (states @ weight.T).argmax(-1) == target.argmax(-1))


def test_chunks_fit_their_device(teacher: TeacherRows, depths: list[Drafts], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a chunk is as large as its bound of logits, since each costs the same launches; no loss depends on it,
    nor on how many of a chunk's rows are gone through at once (on a GPU all)."""
    assert [chunk_rows(size) for size in (1000, 8192, 128256)] == [1024, 512, 512]
    for size in (1000, 8192, 32000, 128256):
        rows = chunk_rows(size, on_gpu=True)
        assert rows * size <= GPU_CHUNK_LOGITS < (rows + 1) * size
        assert rows == GPU_CHUNK_LOGITS // size
    results = []
    for logits in (3 * NUM_DRAFT, 1 << 30):
        monkeypatch.setattr("train.losses.CACHED_LOGITS", logits)
        leaves = with_gradients(depths)
        total, _ = fused_unrolled_loss("lk_hybrid", leaves, teacher, weighting="dpace", rows_per_chunk=20)
        total.backward()
        results.append([total.detach(), *(one.states.grad for one in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_what_is_not_written_shows(teacher: TeacherRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is full of NaN where the loss takes it fresh: nothing of it reaches a result at odd sizes."""
    fresh = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return fresh(self, *size, dtype=dtype).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, dtype=None: torch.full_like(tensor, torch.nan, dtype=dtype))
    states, weight = normal(NUM_ROWS, WIDTH, seed=2).requires_grad_(), normal(NUM_DRAFT, WIDTH, seed=3).requires_grad_()
    total, figures = fused_distillation_loss(
        "lk", states, weight, teacher.states[:NUM_ROWS], teacher.weight, rows_per_chunk=4
    )
    total.backward()
    for result in (total, figures.loss, figures.overlap, states.grad, weight.grad):
        assert result is not None
        assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("name", OF_LAWS)
def test_further_rows_at_weight_zero_change_nothing(name: LossName, teacher: TeacherRows) -> None:
    """Rows that only make a rounder number have no loss and no gradient, of their states or of the LM head."""
    results = []
    for further in (0, 3):
        rows = torch.cat([torch.arange(NUM_ROWS), torch.full((further,), NUM_ROWS - 1)])
        states = torch.cat([normal(NUM_ROWS, WIDTH, seed=2), normal(further, WIDTH, seed=4)]).requires_grad_()
        weight = normal(NUM_DRAFT, WIDTH, seed=3).requires_grad_()
        weights = (torch.arange(len(rows)) < NUM_ROWS).float()
        drafts = Drafts(states=states, weight=weight, rows=rows, places=rows, weights=weights)
        total, _ = fused_unrolled_loss(name, [drafts], teacher, rows_per_chunk=6)
        total.backward()
        assert states.grad is not None
        assert not bool(states.grad[NUM_ROWS:].any())
        results.append((total.detach(), states.grad[:NUM_ROWS], weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_an_lm_head_that_is_lent_gets_no_gradient(teacher: TeacherRows) -> None:
    states = normal(NUM_ROWS, WIDTH, seed=2).requires_grad_()
    weight = normal(NUM_DRAFT, WIDTH, seed=3)
    total, _ = fused_distillation_loss("lk", states, weight, teacher.states[:NUM_ROWS], teacher.weight)
    total.backward()
    assert weight.grad is None
    assert states.grad is not None


def test_overlap_is_the_acceptance_probability(teacher: TeacherRows) -> None:
    """A sampled draft token x is kept with probability min(1, p/q): on average sum(q min(1, p/q)) over *all* tokens."""
    states, weight = normal(NUM_PLACES, WIDTH, seed=2), normal(NUM_DRAFT, WIDTH, seed=3)
    _, figures = fused_distillation_loss("lk", states, weight, teacher.states, teacher.weight, teacher.log_normalizer)
    draft = (states @ weight.T).softmax(-1)
    assert teacher.log_normalizer is not None
    target = (teacher.states @ teacher.weight.T - teacher.log_normalizer[:, None]).exp()
    expected = (draft * (target / draft).clamp_max(1)).sum(-1)
    torch.testing.assert_close(figures.overlap, expected)
    assert bool((target.sum(-1) < 0.999).all()), "the draft vocabulary should not cover the target here"


# D-PACE.


def test_pace_weights_by_hand() -> None:
    """Two rows; the second ends after one depth. With q = 1/2 a depth is reached 3/4 of the times of the one before."""
    probs = [torch.tensor([0.5, 1.0]), torch.tensor([0.5]), torch.tensor([0.0])]
    rows = [torch.tensor([4, 7]), torch.tensor([4]), torch.tensor([4])]
    first, second, third = length_weights(probs, rows, smoothing=0.5)
    reached = [3 / 4, 9 / 16, 9 / 32]
    assert first.tolist() == pytest.approx([sum(reached), 1.0])
    assert second.tolist() == pytest.approx([sum(reached[1:])])
    assert third.tolist() == pytest.approx([reached[2]])


def test_pace_weights_are_the_gradient_of_the_smoothed_length() -> None:
    """w_j is what the smoothed accepted length gains from log((q_j + 1) / 2): its derivative, by autograd."""
    chances = torch.rand(6, 4, generator=torch.Generator().manual_seed(3))
    logs = ((chances + 1) / 2).log().requires_grad_()
    logs.exp().cumprod(dim=1).sum().backward()
    rows = torch.arange(6)
    weights = length_weights(list(chances.unbind(1)), [rows] * 4, smoothing=0.5)
    assert logs.grad is not None
    torch.testing.assert_close(torch.stack(weights, dim=1), logs.grad)


def test_pace_weights_shift_from_early_to_late_depths() -> None:
    """While all drafts are bad the first depth has most of the weight; once they are good, all have nearly the same."""
    rows = [torch.arange(1)] * 4
    bad, good = (
        [float(one) for one in length_weights([torch.tensor([chance])] * 4, rows, smoothing=0.5)]
        for chance in (0.05, 0.99)
    )
    assert bad[0] > 6 * bad[3]
    assert good[0] < 4.2 * good[3]


# The accepted length.

CHAIN, TOKENS = 3, 3


def chain_length(overlaps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over k of the product over i <= k, as it is written; [R] from depths of [R]."""
    total, reached = torch.zeros_like(overlaps[0]), torch.ones_like(overlaps[0])
    for overlap in overlaps:
        reached = reached * overlap
        total = total + reached
    return total


def block_length(ratios: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over k of min(1, min over j <= k of the product over i <= j); [R] from depths of [R]."""
    product, smallest, total = (make(ratios[0]) for make in (torch.ones_like, torch.ones_like, torch.zeros_like))
    for ratio in ratios:
        product = product * ratio
        smallest = torch.minimum(smallest, product)
        total = total + smallest
    return total


@pytest.mark.parametrize("covers", [True, False], ids=["whole law", "reduced law"])
@pytest.mark.parametrize(("name", "weighting"), [("lk", "length"), ("label", "block")])
def test_the_gradient_is_that_of_the_accepted_length(name: LossName, weighting: StepWeighting, covers: bool) -> None:
    """Of each row, by autograd on the plain definition in float64 (1e-5: the fused form is in float32). Rows end at
    every depth, some tokens of the text are not in the draft vocabulary, and the target's law need not sum to one
    there."""
    rows = [torch.arange(40), torch.arange(0, 40, 2), torch.arange(0, 40, 4), torch.arange(0, 40, 8)]
    teacher = TeacherRows(
        states=2 * normal(44, NUM_DRAFT, seed=1),
        weight=torch.eye(NUM_DRAFT),
        log_normalizer=None if covers else torch.full((44,), 6.0),
    )
    target = target_probabilities(teacher.states.double(), None if covers else torch.full((44,), 6.0))
    chance = torch.Generator().manual_seed(7)
    depths, logits, terms = [], [], []
    for depth, own in enumerate(rows):
        labels = torch.multinomial(target[own + depth].double(), 1, generator=chance).flatten()
        labels[torch.rand(len(own), generator=chance) < 0.15] = NO_LABEL
        states = (teacher.states[own + depth] + 1.5 * normal(len(own), NUM_DRAFT, seed=10 + depth)).requires_grad_()
        drafts = Drafts(
            states=states,
            weight=teacher.weight,
            rows=own,
            places=own + depth,
            weights=torch.ones(len(own)),
            labels=labels,
        )
        depths.append(drafts)
        logits.append(states.detach().double().requires_grad_())
        probs, law = logits[-1].softmax(-1), target[own + depth].double()
        if weighting == "length":
            found = torch.minimum(probs, law).sum(-1)
        else:
            found = objectives.probs_of(probs, labels) / objectives.probs_of(law, labels).clamp_min(1e-38)
        terms.append(torch.zeros(40, dtype=torch.float64).index_put((own,), found))  # a row that ended accepts nothing
    total, _ = fused_unrolled_loss(name, depths, teacher, weighting=weighting, smoothing=0.0, rows_per_chunk=30)
    total.backward()
    length = chain_length(terms) if weighting == "length" else block_length(terms)
    (-length.sum()).backward()
    for drafts, exact in zip(depths, logits, strict=True):
        assert drafts.states.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(drafts.states.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)
        assert bool(exact.grad.any())


@dataclass(frozen=True)
class Softmax:
    """A toy draft model whose logits are leaves: [contexts, V], contexts by what `context` makes of a history."""

    logits: dict[Tokens, torch.Tensor]
    size: int = TOKENS

    def probs(self, context: Tokens) -> torch.Tensor:
        return self.logits[context].softmax(-1).detach()


def draft_model(seed: int) -> Softmax:
    chance = torch.Generator().manual_seed(seed)
    histories = [one for length in range(CHAIN) for one in itertools.product(range(TOKENS), repeat=length)]
    logits = {one: 1.5 * torch.randn(TOKENS, generator=chance, dtype=torch.float64) for one in histories}
    return Softmax({one: leaf.requires_grad_() for one, leaf in logits.items()})


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_block_weights_climb_what_block_verification_accepts(seed: int, zeros: bool) -> None:
    """On tiny laws, by enumeration of every draft and every random number of the rule itself: text drawn from the
    target has the rule's accepted length in its ratios, and weights times log q of the text has its gradient, to
    float64's rounding."""
    target, draft = RandomModel(TOKENS, seed, zeros=zeros), draft_model(seed)
    accepted = Scenario(rule="block", target=target, draft=sampled(draft, levels(*[1] * CHAIN))).expected_accepted()

    texts = list(itertools.product(range(TOKENS), repeat=CHAIN))
    target_probs = torch.tensor([[float(target.probs(x[:i])[x[i]]) for i in range(CHAIN)] for x in texts]).double()
    possible = target_probs.prod(1) > 0
    texts, target_probs = [x for x, kept in zip(texts, possible, strict=True) if kept], target_probs[possible]
    chances = target_probs.prod(1)
    log_draft = torch.stack(
        [torch.stack([draft.logits[x[:i]].log_softmax(-1)[x[i]] for i in range(CHAIN)]) for x in texts]
    )
    draft_probs = log_draft.detach().exp()
    lengths = block_length(list((draft_probs / target_probs).unbind(1)))
    assert float((chances * lengths).sum()) == pytest.approx(accepted, abs=1e-6)

    rows = [torch.arange(len(texts))] * CHAIN
    weights = torch.stack(block_weights(list(draft_probs.unbind(1)), list(target_probs.unbind(1)), rows), dim=1)
    leaves = list(draft.logits.values())
    found = torch.autograd.grad((chances[:, None] * weights * log_draft).sum(), leaves, allow_unused=True)
    exact = torch.autograd.grad(kept_by_block(target, draft), leaves, allow_unused=True)
    for ours, theirs in zip(found, exact, strict=True):
        none = torch.zeros(TOKENS, dtype=torch.float64)
        torch.testing.assert_close(none if ours is None else ours, none if theirs is None else theirs)


def kept_by_block(target: RandomModel, draft: Softmax) -> torch.Tensor:
    """The rule's expected accepted length [], over drafts drawn from `draft`: the sum of the reaches of all prefixes
    (`infer.verify.block_verification`), each as likely as it is drafted."""
    total = torch.zeros((), dtype=torch.float64)
    for length in range(1, CHAIN + 1):
        for text in itertools.product(range(TOKENS), repeat=length):
            reach = drafted = torch.ones((), dtype=torch.float64)
            for place, token in enumerate(text):
                if reach == 0:
                    break  # nothing of the target's below a token that it cannot say
                draft_prob = draft.logits[text[:place]].softmax(-1)[token]
                reach = (reach * target.probs(text[:place])[token] / draft_prob).clamp_max(1)
                drafted = drafted * draft_prob
            total = total + drafted * reach
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_length_of_overlaps_is_what_token_rejection_accepts(seed: int) -> None:
    """By enumeration, where laws depend on the depth alone: then every text has the same overlaps."""
    target, draft = ByDepth(RandomModel(TOKENS, seed)), ByDepth(RandomModel(TOKENS, seed + 50))
    accepted = Scenario(rule="token", target=target, draft=sampled(draft, levels(*[1] * CHAIN))).expected_accepted()
    depths = [(0,) * depth for depth in range(CHAIN)]
    overlaps = [torch.minimum(target.probs(one), draft.probs(one)).sum()[None] for one in depths]
    assert float(chain_length(overlaps)) == pytest.approx(accepted, abs=1e-9)


@dataclass(frozen=True)
class ByDepth:
    """A model that heeds how much was said, and nothing of what."""

    model: RandomModel

    @property
    def size(self) -> int:
        return self.model.size

    def probs(self, context: Tokens) -> torch.Tensor:
        return self.model.probs((0,) * len(context))


def test_weights_by_hand() -> None:
    """Two rows; the second ends after one depth. Block: the third ratio makes up for nothing, since the smallest so far
    counts; where all ratios are above one, nothing is left to gain."""
    rows = [torch.tensor([4, 7]), torch.tensor([4]), torch.tensor([4])]
    first, second, third = length_weights([torch.tensor([0.5, 0.8]), torch.tensor([0.5]), torch.tensor([0.2])], rows)
    reached = [1 / 2, 1 / 4, 1 / 20]
    assert first.tolist() == pytest.approx([sum(reached), 0.8])
    assert second.tolist() == pytest.approx([sum(reached[1:])])
    assert third.tolist() == pytest.approx([reached[2]])
    draft, target = [torch.tensor([0.4, 0.9]), torch.tensor([0.1]), torch.tensor([0.8])], [0.2, 0.4, 0.2]
    targets = [torch.full((len(one),), probability) for one, probability in zip(draft, target, strict=True)]
    first, second, third = block_weights(draft, targets, rows)  # ratios 2, 1/4 and 4: products 2, 1/2 and 2
    assert first.tolist() == pytest.approx([1.0, 0.0])
    assert second.tolist() == pytest.approx([1.0])
    assert third.tolist() == [0.0]


def test_behind_a_token_that_cannot_be_drafted_nothing_is_gained() -> None:
    """Its probability is 0 (so it is where the draft vocabulary lacks it): block weights vanish from there on, and
    stay finite also where the target's probability underflowed."""
    rows = [torch.arange(2)] * 3
    draft = [torch.tensor([0.1, 0.0]), torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5])]
    target = [torch.tensor([0.2, 0.0]), torch.tensor([0.3, 0.5]), torch.tensor([0.0, 0.5])]
    weights = torch.stack(block_weights(draft, target, rows), dim=1)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]))


# Precision.


@pytest.mark.parametrize("name", OF_LAWS)
def test_gradient_of_nearly_equal_bf16_logits(name: LossName) -> None:
    """Within 0.5 % of float64 at V = 32k, for every loss, where a softmax in bfloat16 was seen to lose a fifth of the
    gradient. (A loss whose gradient does not vanish there is right to 1e-5 in any case.)"""
    logits = 3 * normal(4, 32_000, seed=1)
    draft = (logits + 0.01 * normal(4, 32_000, seed=2)).bfloat16()
    target_logits = logits.bfloat16()
    exact = draft.double().requires_grad_()
    reference_loss(name, exact, target_logits.double().softmax(-1)).sum().backward()
    target = target_probabilities(target_logits, None)
    favoured = objectives.favour_likeliest(target) if name == "top10" else None
    _, _, gradient = row_gradient(name, draft.softmax(-1, dtype=torch.float32), target.clone(), favoured)
    assert exact.grad is not None
    assert float((gradient - exact.grad).norm() / exact.grad.norm()) < 5e-3
    leaf = draft.clone().requires_grad_()
    distillation_loss(name, leaf, target).sum().backward()
    assert leaf.grad is not None
    assert float((leaf.grad - exact.grad).norm() / exact.grad.norm()) < 5e-3


def reference_loss(name: LossName, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The formulas again, in the logits' own dtype."""
    log_probs = logits.log_softmax(-1)
    overlap = torch.minimum(log_probs.exp(), target).sum(-1)
    kl = (target * (target.log() - log_probs)).sum(-1)
    share = (-3 * overlap.detach()).exp()
    favoured = objectives.favour_likeliest(target)
    return {
        "lk": -overlap.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - overlap),
        "tv": 1 - overlap,
        "kl": kl,
        "ce": -(target * log_probs).sum(-1),
        "top10": -(favoured * log_probs).sum(-1),
    }[name]


def test_the_gradient_through_bf16_products_is_as_good_as_its_logits() -> None:
    """States, LM heads and gradients in bfloat16, as trained: the fused gradient of the LM head is within 1 % of that
    in float64 from the same bfloat16 numbers (each product rounds once, by up to 0.4 %)."""
    states, weight = normal(200, 64, seed=1).bfloat16(), (0.3 * normal(500, 64, seed=2)).bfloat16()
    teacher = TeacherRows(states=normal(200, 64, seed=3).bfloat16(), weight=(0.3 * normal(500, 64, seed=4)).bfloat16())
    trained = weight.float().requires_grad_()
    rows = torch.arange(200)
    drafts = Drafts(states=states, weight=trained, rows=rows, places=rows, weights=torch.full((200,), 1 / 200))
    total, _ = fused_unrolled_loss("lk", [drafts], teacher, rows_per_chunk=64)
    total.backward()
    exact = weight.double().requires_grad_()
    logits = (states @ weight.T).double() + (states.double() @ (exact - exact.detach()).T)
    target = (teacher.states @ teacher.weight.T).double().softmax(-1)
    reference_loss("lk", logits, target).mean().backward()
    assert trained.grad is not None
    assert exact.grad is not None
    assert trained.grad.dtype is torch.float32
    assert float((trained.grad - exact.grad).norm() / exact.grad.norm()) < 1e-2


def test_float16_keeps_small_gradients() -> None:
    """A row's gradients are spread over the vocabulary and mostly below what float16 can hold: they are not lost. The
    states' own gradient, scaled as a GradScaler does, agrees with float32 to float16's and bfloat16's precision."""
    results = []
    for dtype in (torch.float32, torch.float16):
        states = (0.01 * normal(32, 16, seed=1)).half().to(dtype).requires_grad_()
        weight = (0.01 * normal(20_000, 16, seed=2)).half().to(dtype)
        teacher = TeacherRows(
            states=(0.01 * normal(32, 16, seed=3)).half().to(dtype),
            weight=(normal(20_000, 16, seed=4)).half().to(dtype),
        )
        rows = torch.arange(32)
        drafts = Drafts(states=states, weight=weight, rows=rows, places=rows, weights=torch.full((32,), 1e-3))
        total, _ = fused_unrolled_loss("kl", [drafts], teacher)
        (total * 2**16).backward()
        assert states.grad is not None
        results.append(states.grad.float())
    assert float((results[1] - results[0]).norm() / results[0].norm()) < 2e-2


def test_divergences_are_not_negative() -> None:
    """kl is never below zero, and zero where the two laws are the same: also for nearly equal logits in bfloat16, where
    sums of p log(p/q) came out negative; and with a law that does not sum to one."""
    logits = 3 * normal(64, 2_000, seed=2)
    for noise, mass in itertools.product((0.0, 1e-6, 1e-4, 1e-2, 1.0), (1.0, 0.7)):
        draft = (logits + noise * normal(64, 2_000, seed=3)).bfloat16()
        target = mass * target_probabilities(logits.bfloat16(), None)
        loss, overlap, _ = row_gradient("kl", draft.softmax(-1, dtype=torch.float32), target.clone())
        assert float(loss.min()) >= 0
        if torch.equal(draft, logits.bfloat16()) and mass == 1:
            assert float(loss.max()) == 0
            assert float((1 - overlap).abs().max()) < 1e-5
        assert float(distillation_loss("kl", draft, target).min()) > -1e-6
    for name in ("lk", "lk_hybrid", "tv", "kl"):
        assert distillation_loss(name, -logits, logits.softmax(-1)).min() > 0.1


def test_disjoint_distributions_give_a_finite_loss() -> None:
    """-log of an overlap that underflows must not become infinite, nor any gradient NaN; likewise log of a probability
    that underflows."""
    apart, target, labels = torch.tensor([[200.0, -200.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    for name in NAMES:
        draft = apart.clone().requires_grad_()
        loss = distillation_loss(name, draft, target, labels)
        loss.sum().backward()
        assert draft.grad is not None
        assert bool(torch.isfinite(loss).all() & torch.isfinite(draft.grad).all())
        favoured = objectives.favour_likeliest(target)
        for one in row_gradient(name, apart.softmax(-1), target.clone(), favoured, labels=labels):
            assert bool(torch.isfinite(one).all())


# Memory.


def test_chunks_bound_the_memory() -> None:
    """No tensor of rows x vocabulary is made: the largest allocation stays at the chunk's size."""
    rows, vocabulary, chunk = 512, 4096, 16
    states, weight = normal(rows, 16, seed=1).requires_grad_(), normal(vocabulary, 16, seed=2).requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        total, _ = fused_distillation_loss("lk", states, weight, states.detach(), weight.detach(), rows_per_chunk=chunk)
        total.backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 4 * 4 * max(chunk * vocabulary, weight.numel())
    assert largest < 4 * rows * vocabulary


PEAK_SCRIPT = """
import sys, torch
from pathlib import Path
from train.losses import Drafts, TeacherRows, fused_unrolled_loss
torch.set_num_threads(1)
rows_per_chunk, num_rows = int(sys.argv[1]), int(sys.argv[2])
vocabulary, width, depths = 49152, 32, 3
head = (torch.randn(vocabulary, width) * 0.1).bfloat16().requires_grad_()
rows = torch.arange(num_rows)
teacher = TeacherRows(states=torch.randn(num_rows + depths, width).bfloat16(), weight=head.detach().clone())
drafts = [
    Drafts(states=torch.randn(num_rows, width).bfloat16().requires_grad_(), weight=head, rows=rows, places=rows + d,
           weights=torch.ones(num_rows))
    for d in range(depths)
]
torch.mm(teacher.states[:16], head.detach().T)
def megabytes(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
before = megabytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
fused_unrolled_loss("lk", drafts, teacher, rows_per_chunk=rows_per_chunk)[0].backward()
print(megabytes("VmHWM") - before)
"""


def peak_megabytes(rows_per_chunk: int, num_rows: int) -> float:
    command = [sys.executable, "-c", PEAK_SCRIPT, str(rows_per_chunk), str(num_rows)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's peak from /proc")
def test_peak_memory_grows_with_the_chunk() -> None:
    """V = 49,152, S = 2,048, three depths: the logits would be 1.2 GB a copy in float32. The process's own peak is that
    of a chunk: an eighth of the chunk takes less than a third of the memory, an eighth of the text nearly as much (up
    to what an allocator keeps or not, a third here; it would be eight times as much if memory grew with the text)."""
    small, large = peak_megabytes(96, 2048), peak_megabytes(768, 2048)
    assert large < 600
    assert small < large / 3
    assert small < 1.6 * peak_megabytes(96, 256)
