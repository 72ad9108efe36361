"""Settings, and what each is predicted to make: recorded acceptance through fitted costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from infer.drafters.base import Drafter, TreeSettings
from infer.tune.cost import RoundCost
from infer.tune.record import Parts, Shape
from infer.tune.replay import Replay, Round

SHAPES = (
    Shape(branch=1, beam=1),
    Shape(branch=2, beam=1),
    Shape(branch=2, beam=2),
    Shape(branch=4, beam=2),
    Shape(branch=4, beam=4),
    Shape(branch=8, beam=6),
)
DEPTHS = (1, 2, 3, 4, 5, 6, 8)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
ADAPTIVE_DEPTHS = (3, 6, 8)
ADAPTIVE_NODES = (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to draft, or not to (`tree` None). hybrid: with a lookup beside the head."""

    tree: TreeSettings | None
    hybrid: bool = False
    rule: str = "match"

    def __str__(self) -> str:
        if self.tree is None:
            return "plain"
        tree = self.tree
        if tree.branch == 1 and not tree.adaptive:
            name = f"chain {tree.max_depth}"
        else:
            name = f"{tree.max_nodes} nodes, depth {tree.max_depth}, branch {tree.branch}, beam {tree.beam}"
        parts = [name, *(["adaptive"] if tree.adaptive else []), *(["lookup"] if self.hybrid else [])]
        return ", ".join([*parts, *([self.rule] if self.rule != "match" else [])])

    @property
    def shape(self) -> Shape:
        assert self.tree is not None
        return Shape.of(self.tree)


PLAIN = Setting(tree=None)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What rounds make, prefills and the rounds that come with them left out. accepted_length: tokens a request's
    round, milliseconds: of all rounds."""

    setting: Setting
    num_tokens: int
    num_rounds: int
    milliseconds: float
    accepted_length: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.num_tokens / self.milliseconds if self.milliseconds else 0.0

    @classmethod
    def of(cls, setting: Setting, rounds: Iterable[Round], cost: RoundCost) -> Prediction:
        kept = [each for each in rounds if not each.is_first]
        num_tokens = sum(each.num_tokens for each in kept)
        served = sum(each.num_requests for each in kept)
        return cls(
            setting=setting,
            num_tokens=num_tokens,
            num_rounds=len(kept),
            milliseconds=sum(map(cost.milliseconds, kept)),
            accepted_length=num_tokens / served if served else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """All predictions for a workload, the best first, and what plain decoding makes."""

    predictions: tuple[Prediction, ...]
    plain: Prediction

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    @property
    def best_draft(self) -> Prediction | None:
        return next((each for each in self.predictions if each.setting.tree is not None), None)

    def speedup(self, prediction: Prediction) -> float:
        return prediction.tokens_per_second / self.plain.tokens_per_second

    def of(self, setting: Setting) -> Prediction | None:
        return next((each for each in self.predictions if each.setting == setting), None)


class Search:
    """Predicts settings for one workload. drafters: by whether a lookup is beside the head."""

    def __init__(self, replay: Replay, cost: RoundCost, drafters: Mapping[bool, Drafter], *, batch: int) -> None:
        self.replay = replay
        self.cost = cost
        self.batch = batch
        self._parts = {hybrid: Parts.of(drafter) for hybrid, drafter in drafters.items()}

    def predict(self, setting: Setting) -> Prediction:
        if setting.tree is None:
            groups = self.replay.plain_rounds(batch=self.batch)
        else:
            groups = self.replay.rounds(self._parts[setting.hybrid], setting.tree, batch=self.batch)
        return Prediction.of(setting, (each for group in groups for each in group), self.cost)


def ranked(predictions: Sequence[Prediction]) -> Found:
    """`predictions` (plain among them), the fastest first; of equally fast ones the simpler first."""
    plain = next(each for each in predictions if each.setting == PLAIN)

    def order(one: Prediction) -> tuple[float, int]:
        return (-one.tokens_per_second, 0 if one.setting.tree is None else one.setting.tree.max_nodes)

    return Found(predictions=tuple(sorted(predictions, key=order)), plain=plain)


def grid(hybrids: Sequence[bool], *, max_depth: int | None = None, shapes: Sequence[Shape] = SHAPES) -> list[Setting]:
    """All settings that are searched; `max_depth` is the deepest that the drafter can draft."""
    trees = [tree for tree in _trees(shapes) if max_depth is None or tree.max_depth <= max_depth]
    return [PLAIN, *(Setting(tree=tree, hybrid=hybrid) for hybrid in hybrids for tree in trees)]


def _trees(shapes: Sequence[Shape]) -> Iterator[TreeSettings]:
    for shape in shapes:
        tree = TreeSettings(branch=shape.branch, beam=shape.beam, adaptive=False)
        for depth in DEPTHS:
            if shape.branch == 1:
                yield TreeSettings.chain(depth)
                continue
            largest = shape.branch * (1 + min(shape.beam, shape.branch) * (depth - 1))
            sizes = [nodes for nodes in NODES if depth < nodes <= largest]
            yield from (replace(tree, max_nodes=nodes, max_depth=depth) for nodes in sizes)
        for depth in ADAPTIVE_DEPTHS:
            most = (depth,) if shape.branch == 1 else ADAPTIVE_NODES
            yield from (replace(tree, max_nodes=nodes, max_depth=depth, adaptive=True) for nodes in most)


def neighbours(setting: Setting, settings: Sequence[Setting]) -> list[Setting]:
    """Those of `settings` that differ from `setting` in one thing only."""
    if setting.tree is None:
        return []
    own = setting.tree
    found = []
    for other in settings:
        if other.tree is None or other == setting or other.rule != setting.rule:
            continue
        differs = [
            other.hybrid != setting.hybrid,
            other.tree.adaptive != own.adaptive,
            Shape.of(other.tree) != Shape.of(own),
            other.tree.max_depth != own.max_depth,
            other.tree.max_nodes != own.max_nodes,
        ]
        if sum(differs) == 1:
            found.append(other)
    return found
