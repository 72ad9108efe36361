"""One optimiser step, shared out among the processes of a run.

A step sees the same conversations, the same rows of them under the loss and the same random choices however many
processes there are and however they batch them: visits are dealt out by number, and whatever is drawn is drawn from
(seed, visit). What differs is the order in which numbers are added up. The step's loss is the sum of what all processes
and passes give: each label weighs as much as any other of its depth.

All processes make equally many passes, since sharded weights are gathered for each by all of them. One that has no row
left runs a labelled row of another's at weight zero.

Shapes: R packed rows of a pass, Q rows that count at a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from configs.schema import OptimConfig, TrainSettings
from heads.base import DraftHead
from heads.unroll import Batch
from infer.chat import Rendered
from train.corpus.order import derived_seed
from train.unroll import StepFigures, Teacher, plan_rows, unrolled_loss
from train.world import World

Plan = list[torch.Tensor]
"""Row numbers that count at each unrolled step."""


class Objective(nn.Module):
    """The head and what it is trained for, in one call: what a gradient engine wraps."""

    def __init__(self, head: DraftHead, teacher: Teacher, settings: TrainSettings) -> None:
        super().__init__()
        self.head = head
        self.teacher = teacher
        self.settings = settings

    def forward(
        self, batch: Batch, plan: Plan, generators: Sequence[torch.Generator], step_weights: Sequence[float]
    ) -> tuple[torch.Tensor, list[StepFigures]]:
        """The weighted loss [] summed over the pass's rows, and the figures of each unrolled step."""
        return unrolled_loss(
            self.head,
            batch,
            plan,
            self.teacher,
            loss=self.settings.loss,
            step_weights=step_weights,
            weighting=self.settings.step_weighting,
            smoothing=self.settings.step_smoothing,
            renormalize=self.settings.teacher == "draft",
            generators=generators,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Visit:
    """A conversation that a step visits: its plan, in its own row numbers, and the generator of its random choices."""

    number: int
    row: Rendered
    plan: Plan
    generator: torch.Generator

    @property
    def has_labels(self) -> bool:
        return len(self.plan[0]) > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """Visits that go through the head together. weight: 0 where they only keep others company."""

    visits: list[Visit]
    weight: float = 1.0

    @property
    def rows(self) -> list[Rendered]:
        return [visit.row for visit in self.visits]

    @property
    def generators(self) -> list[torch.Generator]:
        return [visit.generator for visit in self.visits]

    @property
    def plan(self) -> Plan:
        """In packed row numbers, in CPU memory."""
        starts = [0]
        for visit in self.visits:
            starts.append(starts[-1] + len(visit.row.token_ids))
        num_steps = len(self.visits[0].plan)
        return [
            torch.cat([visit.plan[step] + start for visit, start in zip(self.visits, starts, strict=False)])
            for step in range(num_steps)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """All visits of a step, the same in every process."""

    visits: list[Visit]
    num_steps: int

    @property
    def num_labels(self) -> list[int]:
        """Of each unrolled step, over all processes."""
        return [sum(len(visit.plan[step]) for visit in self.visits) for step in range(self.num_steps)]

    def label_weights(self, settings: TrainSettings) -> list[float]:
        """What a label's loss weighs at each unrolled step, so that the step's labels together weigh the step's share:
        the recipe's own, or a decaying one, or (other weightings than decay weigh each row by itself) the same for
        all."""
        decay = settings.step_decay if settings.step_weighting == "decay" else 1.0
        shares = settings.step_weights or [decay**step for step in range(self.num_steps)]
        return [share / max(1, count) for share, count in zip(shares, self.num_labels, strict=False)]

    def passes(self, world: World, batch_size: int) -> list[Pass]:
        """This process's. Visits without a label teach nothing and are left out."""
        labelled = [visit for visit in self.visits if visit.has_labels]
        if not labelled:
            return []
        own = labelled[world.rank :: world.size]
        passes = [Pass(visits=own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
        most = -(-len(labelled) // world.size)  # of any process
        company = Pass(visits=labelled[:1], weight=0.0)
        return passes + [company] * (-(-most // batch_size) - len(passes))


def plan_step(rows: Sequence[tuple[int, Rendered]], *, num_steps: int, settings: TrainSettings) -> StepPlan:
    """`rows`: visit numbers, each with its conversation."""
    visits = []
    for number, row in rows:
        generator = visit_generator(settings.seed, number)
        plan = plan_rows(
            torch.tensor(row.loss_mask),
            [len(row.token_ids)],
            num_steps,
            root_share=settings.root_share,
            keep_share=settings.ttt_keep,
            generators=[generator],
        )
        visits.append(Visit(number=number, row=row, plan=plan, generator=generator))
    return StepPlan(visits=visits, num_steps=num_steps)


def check_step_weights(settings: TrainSettings, num_depths: int | None) -> None:
    """There is one for every step that the head will be unrolled. `num_depths`: of the head, where it has a bound."""
    most, given = num_depths or settings.ttt_steps, settings.step_weights
    if given is not None and len(given) != most:
        what = "the head drafts" if num_depths else "train.ttt_steps unrolls"
        raise ValueError(f"train.step_weights has {len(given)} entries, but {what} {most} steps: give one for each")


def visit_generator(seed: int, visit: int) -> torch.Generator:
    """Where a visit's random choices come from, in any process and at any batch size."""
    return torch.Generator().manual_seed(derived_seed(f"visit {seed} {visit}"))


def check_shares(optim: OptimConfig, *, processes: int) -> None:
    """Every process needs something to do in every step."""
    if optim.conversations_per_step < processes:
        raise ValueError(
            f"a step sees {optim.conversations_per_step} conversations (optim.batch_size x optim.accumulation), fewer "
            f"than the {processes} processes that share it: raise optim.accumulation to "
            f"{-(-processes // optim.batch_size)} or more"
        )


@dataclass(kw_only=True)
class StepTotals:
    """Sums over rows, by unrolled step, to be added up over passes and processes. What a pass showed stays on its
    device until `read`, which waits for it once for all of them."""

    loss: float = 0.0
    tokens: float = 0.0
    backbone_loss: float = 0.0
    by_step: list[list[float]]
    """Loss, overlap and number of rows."""
    waiting: list[PassFigures] = field(default_factory=list)

    @classmethod
    def empty(cls, num_steps: int) -> StepTotals:
        return cls(by_step=[[0.0, 0.0, 0.0] for _ in range(num_steps)])

    def add(self, loss: torch.Tensor, tokens: int, figures: Sequence[StepFigures]) -> None:
        """What a pass showed; `loss` []."""
        sums = [total for one in figures for total in (one.figures.loss.sum(), one.figures.overlap.sum())]
        numbers = torch.stack([total.detach().float() for total in (loss, *sums)])
        rows = [(one.step, len(one.rows)) for one in figures]
        self.waiting.append(PassFigures(numbers=numbers, num_tokens=tokens, rows=rows))

    def read(self) -> StepTotals:
        """Itself, with all that waited counted in, in the order in which it was added."""
        waiting, self.waiting = self.waiting, []
        values = iter(torch.cat([one.numbers for one in waiting]).tolist() if waiting else [])
        for one in waiting:
            self.loss += next(values)
            self.tokens += one.num_tokens
            for step, num_rows in one.rows:
                total = self.by_step[step]
                total[0] += next(values)
                total[1] += next(values)
                total[2] += num_rows
        return self

    def over(self, world: World) -> StepTotals:
        """Of all processes together."""
        self.read()
        single = [self.loss, self.tokens, self.backbone_loss]
        flat = world.sum([*single, *(value for total in self.by_step for value in total)])
        return StepTotals(
            loss=flat[0],
            tokens=flat[1],
            backbone_loss=flat[2],
            by_step=[flat[start : start + 3] for start in range(3, len(flat), 3)],
        )

    @property
    def loss_by_depth(self) -> tuple[float, ...]:
        """Mean of the rows of each unrolled step that has some."""
        return self._means(0)

    @property
    def overlap_by_depth(self) -> tuple[float, ...]:
        return self._means(1)

    def _means(self, place: int) -> tuple[float, ...]:
        return tuple(total[place] / total[2] for total in self.by_step if total[2])


@dataclass(frozen=True, kw_only=True, eq=False)
class PassFigures:
    """A pass's loss, then loss and overlap summed over the rows of each unrolled step, in one tensor; step and number
    of rows of these."""

    numbers: torch.Tensor
    num_tokens: int
    rows: list[tuple[int, int]]


def as_arguments(part: Pass, batch: Batch, step_weights: Sequence[float]) -> dict[str, Any]:
    """What `Objective` takes, of one pass."""
    return {
        "batch": batch,
        "plan": part.plan,
        "generators": part.generators,
        "step_weights": [weight * part.weight for weight in step_weights],
    }
