"""What a comparison measures of every drafter, and the figures that come of it.

Cell    acceptance in one shape (a chain, or a tree of fixed size), under one rule, at one temperature, and how near
        that comes to the best that there could be: nothing of it depends on the machine
Speed   drafted against plain decoding at one temperature, interleaved, with a tree that adapts to the machine
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from infer.bench import BenchReport, benchmark, ids_hash
from infer.cost import CostModel
from infer.drafters import Drafter, HeadDrafter, HybridDrafter, TreeGrower, TreeSettings
from infer.drafters.model import ModelDrafter
from infer.engine import Engine
from infer.evaluate import EvalPrompt, evaluate
from infer.target import TargetModel
from infer.verify import RULES

ANY_RULE = "any"
"""The rule of a greedy cell: at temperature 0 every rule keeps what the match walk keeps."""

Shape = Literal["chain", "tree"]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is measured of every drafter.

    Acceptance on a chain of `chain_depth` drafts and on trees of `num_nodes`, under each rule that verifies such a
    shape, at each temperature. Speed at the lowest and the highest temperature. Prompt i is drawn with seed + i.
    """

    rules: tuple[str, ...] = tuple(name for name, rule in RULES.items() if rule.lossless)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    chain_depth: int = 5
    num_nodes: int = 16
    max_tokens: int = 64
    seed: int = 0
    batch: int = 8
    bench: bool = True

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES or not RULES[rule].lossless:
                known = ", ".join(name for name, one in RULES.items() if one.lossless)
                raise ValueError(f"{rule!r} is no lossless rule: choose among {known}")
        for name, values in (("rules", self.rules), ("temperatures", self.temperatures)):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} are {list(values)}: name at least one, each only once")
        for name in ("chain_depth", "num_nodes", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, for one draft round, got {self.max_tokens}")

    @property
    def speed_temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys((min(self.temperatures), max(self.temperatures))))

    def described(self, prompts: Sequence[EvalPrompt]) -> dict[str, Any]:
        """All that the figures depend on beside drafter and target, in plain values."""
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(ids_hash(prompt.token_ids).encode())
        values = {**asdict(self), "num_prompts": len(prompts), "prompts_hash": digest.hexdigest()[:12]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def tree(self, shape: Shape) -> TreeSettings:
        if shape == "chain":
            return TreeSettings.chain(self.chain_depth)
        return TreeSettings(max_nodes=self.num_nodes, adaptive=False)

    def plan(self) -> Iterator[tuple[Shape, str, float]]:
        """Shape, rule and temperature of every cell."""
        greedy = [temperature for temperature in self.temperatures if temperature == 0]
        sampled = [temperature for temperature in self.temperatures if temperature > 0]
        for shape in ("chain", "tree"):
            yield from ((shape, ANY_RULE, temperature) for temperature in greedy)
            for rule in self.rules:
                if rule == "match" or RULES[rule].needs_chain == (shape == "chain"):
                    yield from ((shape, rule, temperature) for temperature in sampled)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Acceptance of one drafter in one shape, under one rule, at one temperature (`infer.evaluate.Acceptance`).

    achieved, bound: acceptance of a step and the best that any lossless rule could reach of the same candidates
    (`infer.bound_meter`); None where the drafter does not say what it drew from.
    """

    shape: Shape
    rule: str
    temperature: float
    num_rounds: int
    num_tokens: int
    accepted_length: float
    by_position: tuple[float, ...]
    achieved: float | None = None
    bound: float | None = None
    bound_ratio: float | None = None
    bound_error: float | None = None

    def at_position(self, position: int) -> float:
        return self.by_position[position - 1] if position <= len(self.by_position) else 0.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Drafted against plain decoding at one temperature, interleaved (`infer.bench.Row`)."""

    temperature: float
    ratio_to_plain: float
    tokens_per_second: float
    plain_tokens_per_second: float
    accepted_length: float
    draft_share: float
    verify_share: float
    forward_share: float
    identical_to_plain: float | None

    @classmethod
    def of(cls, report: BenchReport) -> list[Speed]:
        rows = {(row.method, row.temperature): row for row in report.results}
        speeds = []
        for (method, temperature), row in rows.items():
            if method == "headstart":
                plain = rows["plain", temperature].tokens_per_second
                values = {name: getattr(row, name) for name in cls.__dataclass_fields__ if hasattr(row, name)}
                speeds.append(cls(**values, plain_tokens_per_second=plain))
        return speeds


def can_verify(rule: str, drafter: Drafter) -> bool:
    """Whether the drafter makes proposals that the rule takes."""
    return rule == ANY_RULE or bool(set(drafter.kinds) & set(RULES[rule].kinds))


def measuring_engine(target: TargetModel, drafter: Drafter, measures: Measures, shape: Shape, rule: str) -> Engine:
    """For the cells of one shape and rule."""
    return Engine(
        target,
        drafter,
        max_requests=measures.batch,
        rule="match" if rule == ANY_RULE else rule,
        tree=measures.tree(shape),
        cost=CostModel.free(),
    )


def acceptance(
    engine: Engine, prompts: Sequence[EvalPrompt], measures: Measures, shape: Shape, rule: str, temperature: float
) -> Cell:
    """One cell, with the `measuring_engine` of its shape and rule."""
    report = evaluate(
        engine,
        prompts,
        temperatures=(temperature,),
        max_tokens=measures.max_tokens,
        seed=measures.seed,
        bound=temperature > 0,
    )
    attained = {}
    if report.bound is not None:
        step = report.bound.overall
        attained = {
            "achieved": step.achieved,
            "bound": step.bound,
            "bound_ratio": step.ratio,
            "bound_error": step.standard_error,
        }
    return Cell(
        shape=shape,
        rule=rule,
        temperature=temperature,
        num_rounds=report.overall.num_rounds,
        num_tokens=report.overall.num_tokens,
        accepted_length=report.accepted_length,
        by_position=report.overall.by_position,
        **attained,
    )


def speeds(target: TargetModel, drafter: Drafter, prompts: Sequence[EvalPrompt], measures: Measures) -> list[Speed]:
    """Of the drafter alone, at each of the `speed_temperatures`."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    report = benchmark(
        Engine(target, drafter, max_requests=1, max_length=longest + measures.max_tokens),
        prompts,
        head=drafter.name,
        temperatures=measures.speed_temperatures,
        max_tokens=measures.max_tokens,
        methods=("plain", "headstart"),
        seed=measures.seed,
    )
    return Speed.of(report)


def sizes_of(drafter: Drafter) -> tuple[int | None, int | None]:
    """Parameters of the networks that draft, without those that are the target's, and the size of their vocabulary."""
    if isinstance(drafter, HybridDrafter):
        sizes = [sizes_of(part) for part in drafter.drafters]
        counts = [count for count, _ in sizes if count is not None]
        return (sum(counts) if counts else None), next((size for _, size in sizes if size is not None), None)
    if not isinstance(drafter, TreeGrower):
        return None, None
    network: nn.Module | None = drafter.head if isinstance(drafter, HeadDrafter) else None
    if isinstance(drafter, ModelDrafter):
        stepper = drafter.stepper
        network = stepper.head if stepper.shares_cache else stepper.model.model
    count = None if network is None else sum(parameter.numel() for parameter in network.parameters())
    return count, len(drafter.stepper.target_ids)
