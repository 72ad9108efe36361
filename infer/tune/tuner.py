"""From a drafter and prompts to the settings that pay, workload by workload.

For each context and temperature texts are recorded once; for each batch among them a few settings are timed, costs are
fitted to their rounds, and every setting of the grid is replayed through them. Half of the prompts, of every domain,
are kept to verify on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer.cost import CostModel
from infer.drafters.base import Drafter, Room, TreeSettings
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import Sampled
from infer.tune.cost import RoundCost
from infer.tune.measure import Bench, Measured, cloned, groups_of, measure
from infer.tune.record import Parts, RecordedText, Shape, record
from infer.tune.replay import Replay
from infer.tune.rounds import TimedRound
from infer.tune.search import PLAIN, SHAPES, Found, Prediction, Search, Setting, grid, neighbours, ranked
from infer.tune.settings import TunedSetting, Workload

Progress = Callable[[str, int, int], None]
"""Told the stage, and how many of how many parts of it are done."""

_NUM_TIMED_GROUPS = 4
"""Groups of prompts that costs are fitted to."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Token ids of the prompts to tune on, and of those kept to verify on."""

    tuning: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    @classmethod
    def split(cls, prompts: Sequence[tuple[str, Sequence[int]]]) -> Prompts:
        """Every other prompt of each domain is held out."""
        seen: dict[str, int] = {}
        halves: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        for domain, ids in prompts:
            halves[seen.setdefault(domain, 0) % 2].append(tuple(ids))
            seen[domain] += 1
        if not halves[0]:
            raise ValueError("tuning needs at least one prompt")
        return cls(tuning=tuple(halves[0]), held_out=tuple(halves[1]))

    def at(self, context: int | None) -> Prompts:
        """The same behind other prompts' texts, so that each has at least `context` tokens (None: as they are)."""
        if context is None:
            return self
        everything = [token for prompt in (*self.tuning, *self.held_out) for token in prompt]

        def lengthened(prompts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
            return tuple((*_filler(everything, place, context - len(one)), *one) for place, one in enumerate(prompts))

        return Prompts(tuning=lengthened(self.tuning), held_out=lengthened(self.held_out))


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A prediction beside its measurement on the held-out prompts; speed-ups are over plain decoding there."""

    prediction: Prediction
    measured: Measured
    predicted_speedup: float
    measured_speedup: float

    @property
    def error(self) -> float:
        """Of the predicted speed-up, as a share of the measured."""
        return self.predicted_speedup / self.measured_speedup - 1


@dataclass(frozen=True, kw_only=True)
class TunedWorkload:
    """What was found for one workload. context: mean tokens before the recorded rounds."""

    workload: Workload
    context: int
    found: Found
    cost: RoundCost
    verified: tuple[Verified, ...] = ()

    @property
    def choice(self) -> Prediction:
        """The best by measurement where settings were measured, else by prediction."""
        if not self.verified:
            return self.found.best
        return max(self.verified, key=lambda each: each.measured_speedup).prediction

    @property
    def regret(self) -> float | None:
        """How much slower the predicted best was than the best that was measured, as a share; None if not measured."""
        if not self.verified:
            return None
        best = max(each.measured_speedup for each in self.verified)
        own = next(each.measured_speedup for each in self.verified if each.prediction == self.found.best)
        return 1 - own / best

    def seed_exact(self) -> TunedWorkload:
        """The same without the rules whose tokens are others than plain decoding's."""
        kept = [each for each in self.found.predictions if each.setting.rule == "match"]
        verified = tuple(each for each in self.verified if each.prediction.setting.rule == "match")
        return replace(self, found=ranked(kept), verified=verified)

    def setting(self) -> TunedSetting:
        """As it is written down. Where nothing pays, the tree is that of the best draft there is."""
        chosen = self.choice
        draft = chosen if chosen.setting.tree is not None else self.found.best_draft
        tree = TreeSettings() if draft is None or draft.setting.tree is None else draft.setting.tree
        measured = next((each for each in self.verified if each.prediction == chosen), None)
        return TunedSetting(
            workload=self.workload,
            tree=tree,
            rule="match" if draft is None else draft.setting.rule,
            hybrid=draft is not None and draft.setting.hybrid,
            speculate=chosen.setting.tree is not None,
            predicted={
                "tokens_per_second": chosen.tokens_per_second,
                "speedup": self.found.speedup(chosen),
                "accepted_length": chosen.accepted_length,
                "plain_tokens_per_second": self.found.plain.tokens_per_second,
            },
            measured={}
            if measured is None
            else {
                "tokens_per_second": measured.measured.tokens_per_second,
                "speedup": measured.measured_speedup,
                "accepted_length": measured.measured.accepted_length,
            },
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.setting().to_dict(),
            "mean_context": self.context,
            "num_searched": len(self.found.predictions),
            "regret": self.regret,
            "cost": self.cost.to_dict(),
            "searched": [
                {
                    "setting": str(each.setting),
                    "tokens_per_second": each.tokens_per_second,
                    "speedup": self.found.speedup(each),
                    "accepted_length": each.accepted_length,
                }
                for each in self.found.predictions
            ],
            "verified": [
                {
                    "setting": str(each.prediction.setting),
                    "predicted_speedup": each.predicted_speedup,
                    "measured_speedup": each.measured_speedup,
                    "predicted_tokens_per_second": each.prediction.tokens_per_second,
                    "measured_tokens_per_second": each.measured.tokens_per_second,
                    "error": each.error,
                }
                for each in self.verified
            ],
        }


@dataclass(kw_only=True)
class Tuner:
    """Finds settings for a target and its drafters (by whether a lookup is beside the head).

    max_tokens: of an answer; prompt i is answered with seed `seed + i`. rules: rejection rules to try beside the match
    walk. table: the machine's costs.
    """

    target: TargetModel
    drafters: Mapping[bool, Drafter]
    prompts: Prompts
    table: CostModel
    max_tokens: int = 64
    seed: int = 0
    rules: Sequence[str] = ()
    shapes: Sequence[Shape] = SHAPES
    progress: Progress = field(default=lambda stage, done, total: None)

    def __post_init__(self) -> None:
        parts = Parts.of(self._widest)
        bounds = [one.stepper.max_depth for one in parts.networks if one.stepper.max_depth is not None]
        # Lookups have no bound of their own, so only a lone network's is one of the trees.
        self._max_depth = max(bounds) if bounds and len(bounds) == len(parts.drafters) else None
        self.settings = grid(sorted(self.drafters), max_depth=self._max_depth, shapes=self.shapes)
        tree = TreeSettings(max_depth=8, beam=4, max_nodes=32)
        room = Room(
            num_slots=1,
            num_columns=256,
            tree=tree,
            cost=self.table,
            cache=self.target.new_cache(num_slots=1, num_columns=256),
        )
        for drafter in self.drafters.values():
            drafter.open(room)  # measures what its steps cost, which all of its clones then know

    @property
    def _widest(self) -> Drafter:
        return self.drafters[max(self.drafters)]

    def run(self, workloads: Sequence[Workload]) -> list[TunedWorkload]:
        """In the order given; workloads of one temperature and context share their texts."""
        texts: dict[tuple[float, int | None], list[RecordedText]] = {}
        found = []
        for workload in workloads:
            key = (workload.temperature, workload.context)
            if key not in texts:
                texts[key] = self._record(workload)
            found.append(self._tune(workload, texts[key]))
        return found

    def verify(
        self, tuned: TunedWorkload, *, top: int = 6, repeats: int = 1, everything: bool = False
    ) -> TunedWorkload:
        """Measure plain decoding, the best predictions and the best's neighbours on the held-out prompts."""
        prompts = self.prompts.at(tuned.workload.context).held_out
        if not prompts:
            raise ValueError("there are no held-out prompts to verify on: give at least two prompts of a domain")
        params = self._params(len(prompts), tuned.workload.temperature, first=len(self.prompts.tuning))
        predictions = list(tuned.found.predictions) if everything else _worth_measuring(tuned.found, top)
        bench = self._bench(tuned.workload, prompts)
        total = len(predictions) * len(groups_of(bench.batch, len(prompts))) * repeats
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(f"measuring {len(predictions)} settings, {tuned.workload}", done, total)

        settings = [each.setting for each in predictions]
        measured = measure(bench, settings, prompts, params, repeats=repeats, progress=advance)
        plain = next(each for each in measured if each.setting == PLAIN)
        verified = [
            Verified(
                prediction=prediction,
                measured=each,
                predicted_speedup=tuned.found.speedup(prediction),
                measured_speedup=each.tokens_per_second / plain.tokens_per_second,
            )
            for prediction, each in zip(predictions, measured, strict=True)
        ]
        return replace(tuned, verified=tuple(verified))

    def _record(self, workload: Workload) -> list[RecordedText]:
        prompts = self.prompts.at(workload.context).tuning
        params = self._params(len(prompts), workload.temperature)
        total, done = len(prompts) * self.max_tokens, 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self.progress(f"recording drafts, temperature {workload.temperature:g}", done, total)

        return record(
            self.target,
            Parts.of(cloned(self._widest)),
            prompts,
            params,
            shapes=self.shapes,
            max_depth=max(each.tree.max_depth for each in self.settings if each.tree is not None),
            progress=advance,
        )

    def _tune(self, workload: Workload, texts: Sequence[RecordedText]) -> TunedWorkload:
        timed = self._time(workload)
        cost = RoundCost.fit(timed, self.table)
        replay = Replay(self.target, texts, cost=self.table)
        search = Search(replay, cost, self.drafters, batch=workload.batch)
        predictions = []
        for place, setting in enumerate(self.settings):
            predictions.append(search.predict(setting))
            self.progress(f"searching, {workload}", place + 1, len(self.settings))
        predictions += [self._decoded(workload, setting) for setting in self._rejecting(workload)]
        rounds = [each for group in replay.plain_rounds() for each in group]
        context = sum(each.context for each in rounds) // max(1, len(rounds))
        return TunedWorkload(workload=workload, context=context, found=ranked(predictions), cost=cost)

    def _time(self, workload: Workload) -> list[TimedRound]:
        """Rounds of a few settings that differ in every cost, timed in turns on the tuning prompts."""
        prompts = self.prompts.at(workload.context).tuning
        params = self._params(len(prompts), workload.temperature)
        bench = self._bench(workload, prompts)
        groups = groups_of(workload.batch, len(prompts))[:_NUM_TIMED_GROUPS]
        settings = timed_settings(self.settings)
        timed: list[TimedRound] = []
        for place, group in enumerate(groups):
            for number, setting in enumerate((*settings[place:], *settings[:place])):
                timed += bench.rounds(setting, [prompts[i] for i in group], [params[i] for i in group])
                done = place * len(settings) + number + 1
                self.progress(f"timing rounds, {workload}", done, len(groups) * len(settings))
        return timed

    def _rejecting(self, workload: Workload) -> list[Setting]:
        """Settings of the rejection rules. Greedy requests are verified by the match walk whatever the rule."""
        drafter = self.drafters[min(self.drafters)]
        if workload.temperature == 0 or Sampled not in drafter.kinds:
            return []
        trees = {
            "block": [TreeSettings.chain(depth) for depth in (2, 4)],
            "traversal": [
                TreeSettings(max_nodes=nodes, max_depth=3, branch=branch, beam=branch, adaptive=False)
                for nodes, branch in ((6, 2), (12, 3))
            ],
        }
        return [
            Setting(tree=tree, rule=rule, hybrid=min(self.drafters))
            for rule in self.rules
            for tree in trees.get(rule, [])
        ]

    def _decoded(self, workload: Workload, setting: Setting) -> Prediction:
        """A prediction by decoding itself: what a rejection rule emits depends on what was drawn, so nothing recorded
        can stand for it."""
        prompts = self.prompts.at(workload.context).tuning
        params = self._params(len(prompts), workload.temperature)
        bench = self._bench(workload, prompts)
        timed = []
        groups = groups_of(workload.batch, len(prompts))
        for place, group in enumerate(groups):
            timed += bench.rounds(setting, [prompts[i] for i in group], [params[i] for i in group])
            self.progress(f"decoding with rule {setting.rule}", place + 1, len(groups))
        return Prediction.of(setting, [each.round for each in timed], RoundCost.fit(timed, self.table))

    def _bench(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Bench:
        longest = max(map(len, prompts)) + self.max_tokens
        return Bench(self.target, self.drafters, batch=workload.batch, max_length=longest, cost=self.table)

    def _params(self, count: int, temperature: float, *, first: int = 0) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=temperature, seed=self.seed + first + i, max_tokens=self.max_tokens)
            for i in range(count)
        ]


def timed_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Plain decoding, and drafts from small to large over all shapes, with and without a lookup, fixed and adaptive."""
    drafting = [each for each in settings if each.tree is not None]
    wanted: list[Setting] = [PLAIN]
    for hybrid in sorted({each.hybrid for each in drafting}):
        own = [each for each in drafting if each.hybrid == hybrid]
        fixed = sorted(
            (each for each in own if each.tree is not None and not each.tree.adaptive),
            key=lambda each: (each.tree.max_nodes, each.tree.max_depth) if each.tree is not None else (0, 0),
        )
        count = 5 if not hybrid else 3
        wanted += [fixed[round(place * (len(fixed) - 1) / (count - 1))] for place in range(count)]
        wanted += [each for each in own if each.tree is not None and each.tree.adaptive][-1:]
    return list(dict.fromkeys(wanted))


def _worth_measuring(found: Found, top: int) -> list[Prediction]:
    """Plain decoding, the best predictions, the best draft, and its neighbours by what they are predicted to make."""
    drafting = [each for each in found.predictions if each.setting.tree is not None]
    chosen = [found.plain, *drafting[:top]]
    if drafting:
        near = set(neighbours(drafting[0].setting, [each.setting for each in drafting]))
        chosen += [each for each in drafting if each.setting in near and each not in chosen][:top]
    return chosen


def _filler(tokens: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens of `tokens`, which go round, from a place of its own."""
    start = 37 * place
    return tuple(tokens[(start + i) % len(tokens)] for i in range(max(0, count)))
