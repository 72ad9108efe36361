"""A step shared out among processes: the same conversations, labels, choices and gradients, however it is dealt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimConfig, TrainSettings
from heads.base import TargetWeights
from heads.eagle1 import Eagle1Config, Eagle1Head
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from infer.chat import Rendered
from train.step import Objective, StepTotals, as_arguments, check_shares, plan_step
from train.unroll import Teacher
from train.world import World

HIDDEN, VOCABULARY, NUM_STEPS = 16, 30, 3
SPLITS = [(1, 1), (1, 3), (1, 8), (2, 1), (2, 4), (3, 1), (3, 2), (7, 2)]


def conversation(number: int, *, length: int = 9, prompt: int = 3) -> Rendered:
    generator = torch.Generator().manual_seed(number)
    return Rendered(
        token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(),
        loss_mask=[place >= prompt for place in range(length)],
    )


@pytest.fixture
def rows() -> list[tuple[int, Rendered]]:
    """Eight visits of different lengths; one of them has a single answer token, and so no label."""
    made = [conversation(number, length=6 + number) for number in range(8)]
    made[5] = conversation(5, length=6, prompt=5)
    return [(100 + place, row) for place, row in enumerate(made)]


@pytest.fixture
def settings() -> TrainSettings:
    return TrainSettings(steps=10, ttt_steps=NUM_STEPS, ttt_keep=0.6, seed=3)


@pytest.fixture
def objective(settings: TrainSettings) -> Objective:
    """A head with noise in its training, so that every kind of random choice is there."""
    config = Eagle1Config(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        taps=(3,),
        feature_noise=0.5,
    )
    torch.manual_seed(0)
    head = Eagle1Head(config, DraftVocabulary.full(VOCABULARY))
    lent = TargetWeights(embedding=torch.randn(VOCABULARY, HIDDEN), lm_head=torch.randn(VOCABULARY, HIDDEN))
    return Objective(head.bind(lent).train(), Teacher(weight=lent.lm_head), settings)


def pack(rows: list[Rendered]) -> Batch:
    states = []
    for row in rows:
        generator = torch.Generator().manual_seed(sum(row.token_ids))
        states.append(torch.randn(len(row.token_ids), HIDDEN, generator=generator))
    token_ids = torch.tensor([token for row in rows for token in row.token_ids])
    return Batch(
        token_ids=token_ids,
        loss_mask=torch.tensor([mask for row in rows for mask in row.loss_mask]),
        lengths=tuple(len(row.token_ids) for row in rows),
        taps=torch.cat(states),
        last=torch.cat(states).flip(-1),
        log_normalizer=torch.full((len(token_ids),), 6.0),
    )


def shared_step(
    objective: Objective, rows: list[tuple[int, Rendered]], num_processes: int, batch_size: int
) -> tuple[dict[str, torch.Tensor], StepTotals]:
    """Gradients and totals of all processes, one after the other."""
    totals = StepTotals.empty(NUM_STEPS)
    objective.zero_grad()
    for rank in range(num_processes):
        plan = plan_step(rows, num_steps=NUM_STEPS, settings=objective.settings)
        weights = [0.8**step / count for step, count in enumerate(plan.num_labels)]
        for part in plan.passes(World(rank=rank, size=num_processes), batch_size):
            batch = pack(part.rows)
            loss, figures = objective(**as_arguments(part, batch, weights))
            loss.backward()
            if part.weight:
                totals.add(loss, len(batch), figures)
    return {name: parameter.grad.clone() for name, parameter in objective.named_parameters()}, totals.read()


@pytest.mark.parametrize(("num_processes", "batch_size"), SPLITS)
def test_all_see_every_labelled_visit_once(
    rows: list[tuple[int, Rendered]], settings: TrainSettings, num_processes: int, batch_size: int
) -> None:
    """And all make equally many passes, or one would wait for the others forever."""
    seen, counts = [], set()
    for rank in range(num_processes):
        plan = plan_step(rows, num_steps=NUM_STEPS, settings=settings)
        passes = plan.passes(World(rank=rank, size=num_processes), batch_size)
        counts.add(len(passes))
        assert all(len(part.visits) <= batch_size for part in passes)
        assert all(part.visits[0].has_labels for part in passes)
        seen += [visit.number for part in passes if part.weight for visit in part.visits]
    assert sorted(seen) == [number for number, _ in rows if number != 105]
    assert len(counts) == 1


@pytest.mark.parametrize(("num_processes", "batch_size"), SPLITS)
def test_gradients_do_not_depend_on_the_split(
    objective: Objective, rows: list[tuple[int, Rendered]], num_processes: int, batch_size: int
) -> None:
    """Equal to the order of additions in float32: 1e-5 of the largest gradient. (Noise or dropped rows drawn batch by
    batch are far outside: another seed changes gradients by half.)
    """
    wanted, wanted_totals = shared_step(objective, rows, 1, len(rows))
    found, totals = shared_step(objective, rows, num_processes, batch_size)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    assert totals.loss == pytest.approx(wanted_totals.loss, rel=1e-5)
    assert [total[2] for total in totals.by_step] == [total[2] for total in wanted_totals.by_step]
    assert totals.overlap_by_depth == pytest.approx(wanted_totals.overlap_by_depth, rel=1e-5)


def test_random_choices_belong_to_the_visit(
    objective: Objective, rows: list[tuple[int, Rendered]], settings: TrainSettings
) -> None:
    """Another visit of the same conversation draws anew; the same visit draws alike."""
    again = [(number + 1000, row) for number, row in rows]
    first, _ = shared_step(objective, rows, 1, 8)
    same, _ = shared_step(objective, rows, 1, 8)
    other, _ = shared_step(objective, again, 1, 8)
    name = max(first, key=lambda one: float(first[one].abs().max()))
    assert torch.equal(first[name], same[name])
    assert not torch.allclose(first[name], other[name], rtol=0.1)


def test_a_step_without_labels_has_no_passes(settings: TrainSettings) -> None:
    plan = plan_step([(0, conversation(0, length=6, prompt=5))], num_steps=NUM_STEPS, settings=settings)
    assert plan.num_labels == [0, 0, 0]
    assert plan.passes(World(), 2) == []


def test_more_processes_than_conversations_are_refused() -> None:
    check_shares(OptimConfig(batch_size=2, accumulation=2), processes=4)
    with pytest.raises(ValueError, match=r"sees 3 conversations .* raise optim\.accumulation to 4 or more"):
        check_shares(OptimConfig(batch_size=1, accumulation=3), processes=4)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "expected whole numbers"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "must be below the size"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "must be below the size"),
    ],
)
def test_odd_environments_are_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, str], says: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        World.from_environment()


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = World.from_environment()
    assert world == World()
    assert world.is_main
    assert world.sum([1.5, 2]) == [1.5, 2.0]
    assert world.broadcast({"a": 1}) == {"a": 1}


def test_roots_belong_to_the_visit(rows: list[tuple[int, Rendered]], settings: TrainSettings) -> None:
    """`train.root_share`: every process draws the same roots for a visit, fewer than all, and others next time."""
    share = replace(settings, root_share=0.5)
    one, other = (plan_step(rows, num_steps=NUM_STEPS, settings=share) for _ in range(2))
    every = plan_step(rows, num_steps=NUM_STEPS, settings=settings)
    later = plan_step([(number + 1000, row) for number, row in rows], num_steps=NUM_STEPS, settings=share)
    roots = [[visit.plan[0].tolist() for visit in plan.visits] for plan in (one, other, later, every)]
    assert roots[0] == roots[1] != roots[2]
    assert all(set(some) <= set(all_of_them) for some, all_of_them in zip(roots[0], roots[3], strict=True))
    assert 0 < one.num_labels[0] < every.num_labels[0]
