"""Settings measured in turns on the real engine: whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from infer.cost import CostModel
from infer.drafters.base import Drafter, TreeSettings
from infer.drafters.growing import TreeGrower
from infer.drafters.hybrid import HybridDrafter
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tune.rounds import TimedRound, timed_rounds
from infer.tune.search import Setting


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a setting made, prefills and the rounds that come with them left out, as predictions do."""

    setting: Setting
    num_tokens: int
    milliseconds: float
    accepted_length: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.num_tokens / self.milliseconds if self.milliseconds else 0.0


class Bench:
    """An engine for each setting, over one set of weights. drafters: by whether a lookup is beside the head."""

    def __init__(
        self,
        target: TargetModel,
        drafters: Mapping[bool, Drafter],
        *,
        batch: int,
        max_length: int,
        cost: CostModel,
    ) -> None:
        self.target, self.drafters = target, drafters
        self.batch, self.max_length, self.cost = batch, max_length, cost
        self._engines: dict[Setting, Engine] = {}

    def rounds(
        self, setting: Setting, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[TimedRound]:
        """The rounds of one group of prompts, answered side by side."""
        if setting not in self._engines:
            self._engines[setting] = self._engine(setting)
            # Once untimed: room is made, and what is slow at first is done.
            short = [SamplingParams(temperature=each.temperature, seed=each.seed, max_tokens=4) for each in params]
            self._engines[setting].generate(prompts, short)
        return timed_rounds(self._engines[setting], prompts, params)

    def _engine(self, setting: Setting) -> Engine:
        fixed = TreeSettings(adaptive=False)
        return Engine(
            self.target,
            None if setting.tree is None else cloned(self.drafters[setting.hybrid]),
            max_requests=self.batch,
            max_length=self.max_length,
            rule=setting.rule,
            tree=setting.tree or fixed,
            cost=self.cost,
        )


def groups_of(batch: int, num_prompts: int) -> list[range]:
    """The prompts of each group that is answered side by side."""
    return [range(start, min(start + batch, num_prompts)) for start in range(0, num_prompts, batch)]


def measure(
    bench: Bench,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    repeats: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Every setting on every prompt, in an order that rotates. Of `repeats` runs of a group the median one counts."""
    groups = groups_of(bench.batch, len(prompts))
    runs: dict[tuple[Setting, int], list[list[TimedRound]]] = {}
    for repeat in range(repeats):
        for place, group in enumerate(groups):
            start = (place + repeat) % len(settings)
            for setting in (*settings[start:], *settings[:start]):
                rounds = bench.rounds(setting, [prompts[i] for i in group], [params[i] for i in group])
                runs.setdefault((setting, place), []).append([each for each in rounds if not each.round.is_first])
                if progress is not None:
                    progress(1)
    return [_pooled(setting, [runs[setting, place] for place in range(len(groups))]) for setting in settings]


def _pooled(setting: Setting, groups: Sequence[Sequence[Sequence[TimedRound]]]) -> Measured:
    kept = [each for runs in groups for each in runs[0]]  # every run of a group has the same rounds, but for near ties
    num_tokens = sum(each.round.num_tokens for each in kept)
    served = sum(each.round.num_requests for each in kept)
    milliseconds = [statistics.median(sum(each.milliseconds for each in run) for run in runs) for runs in groups]
    return Measured(
        setting=setting,
        num_tokens=num_tokens,
        milliseconds=sum(milliseconds),
        accepted_length=num_tokens / served if served else 0.0,
    )


def cloned(drafter: Drafter) -> Drafter:
    """Another drafter over the same network, with room of its own."""
    if isinstance(drafter, HybridDrafter):
        return HybridDrafter([cloned(part) for part in drafter.drafters])
    twin = copy.copy(drafter)
    if isinstance(twin, TreeGrower):
        twin.stepper = copy.copy(twin.stepper)
    return twin
