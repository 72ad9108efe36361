"""A small objective over a real head, for tests of what happens to its loss: no target, random features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from configs.schema import DataConfig, DeepSpeedConfig, OptimConfig, RunConfig, TrainSettings
from heads.base import DraftHead, TargetWeights
from heads.registry import FAMILIES
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from train.step import Objective as StepObjective
from train.unroll import Teacher, plan_rows
from train.updater import LocalUpdater, Updater, make_updater
from train.world import World

VOCABULARY, HIDDEN, NUM_STEPS = 40, 16, 3


class Objective(nn.Module):
    """The cross entropy of the true tokens, over an unrolled head."""

    def __init__(self, head: DraftHead, weights: TargetWeights) -> None:
        super().__init__()
        self.head = head.bind(weights)

    def forward(
        self, batch: Batch, plan: Sequence[torch.Tensor], step_weights: Sequence[float]
    ) -> tuple[torch.Tensor, list[Any]]:
        total = torch.zeros(())
        for step, (rows, answer) in enumerate(zip(plan, self.head.unroll(batch, plan), strict=True)):
            if len(rows):
                labels = batch.token_ids[rows + 2 + step]
                loss = nn.functional.cross_entropy(answer.logits().float(), labels, reduction="sum")
                total = total + step_weights[step] * loss
        return total, []


class TrainersObjective(nn.Module):
    """What the trainer itself optimises, called as `Objective` is."""

    def __init__(self, head: DraftHead, weights: TargetWeights, settings: TrainSettings) -> None:
        super().__init__()
        self.inner = StepObjective(head.bind(weights), Teacher(weight=weights.lm_head), settings)

    @property
    def head(self) -> DraftHead:
        return self.inner.head

    def forward(self, batch: Batch, plan: list[torch.Tensor], step_weights: Sequence[float]) -> Any:
        generators = [torch.Generator().manual_seed(len(batch))]
        return self.inner(batch=batch, plan=plan, generators=generators, step_weights=step_weights)


def make_objective(
    family: str = "eagle3", *, seed: int = 0, frozen: Sequence[str] = (), settings: TrainSettings | None = None
) -> Objective | TrainersObjective:
    """The trainer's own objective where `settings` are given.

    With an odd number of weights in most tensors, so that no number of processes divides them evenly.
    """
    from transformers import LlamaConfig

    target = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=23,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    chance = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = FAMILIES[family].config.for_target(target, draft_vocab_size=VOCABULARY, vocab_size=VOCABULARY)
        head = FAMILIES[family].head(config, DraftVocabulary.full(VOCABULARY))
        for parameter in head.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=chance) * 0.05)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name not in frozen)
    embedding, lm_head = (torch.randn(VOCABULARY, HIDDEN, generator=chance) for _ in range(2))
    weights = TargetWeights(embedding=embedding, lm_head=lm_head)
    return Objective(head.train(), weights) if settings is None else TrainersObjective(head.train(), weights, settings)


def make_batch(number: int, *, answer: int, num_taps: int = 3) -> Batch:
    """One conversation whose last `answer` tokens are the assistant's."""
    chance = torch.Generator().manual_seed(number)
    length = 5 + number % 3 + answer
    return Batch(
        token_ids=torch.randint(VOCABULARY, (length,), generator=chance),
        loss_mask=torch.arange(length) >= length - answer,
        lengths=(length,),
        taps=torch.randn(length, num_taps * HIDDEN, generator=chance),
        last=torch.randn(length, HIDDEN, generator=chance) * 0.5,
        log_normalizer=torch.full((length,), 6.0),
    )


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a few steps are trained; the same ones in any number of processes.

    answers: lengths of the assistant's answers, of the conversations of each step. A step of none has no pass.
    frozen: names of the head's parameters that are not trained. overflow_at: the step whose loss is infinite.
    settings: a file of DeepSpeed settings. is_trainers: through the trainer's own objective.
    """

    stage: int | None = None
    answers: tuple[tuple[int, ...], ...] = ((9, 7, 8, 6),) * 4
    family: str = "eagle3"
    clip: float | None = 0.5
    weight_decay: float = 0.1
    dtype: str = "float32"
    frozen: tuple[str, ...] = ()
    offload_optimizer: bool = False
    offload_parameters: bool = False
    settings: str | None = None
    overflow_at: int | None = None
    is_trainers: bool = False

    def recipe(self) -> RunConfig:
        return RunConfig(
            name="toy",
            data=DataConfig(),
            optim=OptimConfig(grad_clip=self.clip, weight_decay=self.weight_decay, batch_size=1, accumulation=4),
            deepspeed=DeepSpeedConfig(
                stage=self.stage,
                offload_optimizer=self.offload_optimizer,
                offload_parameters=self.offload_parameters,
                config=self.settings,
            ),
            train=TrainSettings(steps=4, dtype=self.dtype),  # type: ignore[arg-type]
        )


@dataclass(kw_only=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    backed_off: list[bool]
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    outside: dict[str, tuple[int, ...]]
    """Shapes that the head's tensors have between steps in this process."""
    num_moments: int = 0
    """Numbers that the optimiser of this process remembers."""


def train(course: Course, start: Outcome | None = None, first: int = 0, last: int | None = None) -> Outcome:
    """Steps `first` to `last` of a course, from the weights and state of `start` if it is given."""
    world = World.from_environment()
    settings = course.recipe().train if course.is_trainers else None
    objective = make_objective(course.family, frozen=course.frozen, settings=settings)
    if start is not None:
        objective.head.load_state_dict(start.weights)
    parameters = list(objective.parameters())
    groups = [parameters[:3], parameters[3:]]
    updater: Any = make_updater(course.recipe(), objective, groups, world, torch.device("cpu"))
    if start is not None:
        updater.load(start.state)
    outcome = Outcome(losses=[], norms=[], backed_off=[], weights={}, state={}, outside={})
    for number, answers in list(enumerate(course.answers))[first:last]:
        _step(course, updater, world, number, answers, outcome, num_taps=len(objective.head.config.taps))
    outcome.state = updater.state()
    outcome.outside = {name: tuple(parameter.shape) for name, parameter in objective.head.named_parameters()}
    optimizer = updater._optimizer if isinstance(updater, LocalUpdater) else updater._engine.basic_optimizer
    outcome.num_moments = sum(tensor.numel() for values in optimizer.state.values() for tensor in values.values())
    with updater.whole():
        outcome.weights = {name: tensor.detach().clone() for name, tensor in objective.head.state_dict().items()}
    return outcome


def _step(
    course: Course,
    updater: Updater,
    world: World,
    number: int,
    answers: Sequence[int],
    outcome: Outcome,
    *,
    num_taps: int,
) -> None:
    batches = [
        make_batch(100 * number + place, answer=answer, num_taps=num_taps) for place, answer in enumerate(answers)
    ]
    plans = [plan_rows(batch.loss_mask, batch.lengths, NUM_STEPS) for batch in batches]
    counts = [max(1, sum(len(plan[step]) for plan in plans)) for step in range(NUM_STEPS)]
    places = list(range(world.rank, len(batches), world.size))
    places += [-1] * (-(-len(batches) // world.size) - len(places))
    total = 0.0
    for index, place in enumerate(places):
        weight = 0.0 if place < 0 else float("inf") if number == course.overflow_at else 1.0
        weights = [weight * 0.8**step / count for step, count in enumerate(counts)]
        dtype = getattr(torch, course.dtype)
        with torch.autocast(
            "cpu", dtype=torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32
        ):
            loss, _ = updater.loss(batches[max(place, 0)], plans[max(place, 0)], step_weights=weights)
        updater.backward(loss, is_last=index == len(places) - 1)
        total += float(loss.detach())
    outcome.losses.append(world.sum([total])[0])
    outcome.norms.append(updater.update([1e-2 / (number + 1), 2e-2 / (number + 1)]))
    outcome.backed_off.append(updater.backed_off)
