"""The rounds that any settings would take over recorded texts, without a network.

Trees come from the record (`infer.tune.record`), lookups are asked anew, and all that decides about a round is the
engine's own: `infer.adaptation` cuts and learns, lookups see what was emitted when. So a replay takes the engine's
rounds, one by one, and says what each was made of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from infer.adaptation import Adaptation
from infer.cost import CostModel
from infer.drafters.base import Drafter, DraftLimit, Room, TreeSettings, at_depth
from infer.drafters.growing import NEGLIGIBLE, TreeGrower
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.stepper import Stepper
from infer.growth import keep_best, next_depth_pays
from infer.request import Request
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.tune.record import Parts, RecordedText, Shape, next_beam
from infer.verify import RULES, KindType


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one step of an engine was made of.

    num_requests: that ran; num_asked: that were drafted for; num_rows: of the verification's forward; context: mean
    tokens before it. num_steps: draft steps after the first logits; num_step_rows: their rows; num_nodes: verified;
    lengths: tokens that each request got. is_first: whether it came with the prefill.
    """

    num_requests: int
    num_asked: int
    num_rows: int
    context: int
    num_steps: int
    num_step_rows: int
    lengths: tuple[int, ...]
    is_first: bool

    @property
    def num_nodes(self) -> int:
        return self.num_rows - self.num_requests

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass
class Meter:
    """Counts the draft steps of a round, over all of its networks."""

    num_steps: int = 0
    num_rows: int = 0

    def take(self) -> tuple[int, int]:
        counts = (self.num_steps, self.num_rows)
        self.num_steps = self.num_rows = 0
        return counts


@dataclass(eq=False)
class _ShapeTree:
    """The part of a recorded tree that one shape would have grown. beams[d]: nodes at depth d that it would expand."""

    tree: DraftTree
    beams: list[list[int]]
    _kept: dict[tuple[int, int], DraftTree] = field(default_factory=dict)

    @classmethod
    def of(cls, recorded: DraftTree, shape: Shape, least: float) -> _ShapeTree:
        """`least`: nodes of no more value were never added."""
        children: dict[int, list[int]] = {}
        for node, (parent, value) in enumerate(zip(recorded.parents, recorded.values, strict=True)):
            if value > least:
                children.setdefault(parent, []).append(node)
        beams, kept = [[ROOT]], []
        while beams[-1]:
            kept += [child for node in beams[-1] for child in children.get(node, ())[: shape.branch]]
            beams.append(next_beam(shape, beams[-1], children, recorded.values))
        places = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
        tree = DraftTree(
            tokens=tuple(recorded.tokens[node] for node in kept),
            parents=tuple(places[recorded.parents[node]] for node in kept),
            values=tuple(recorded.values[node] for node in kept),
            kind=OneHot(),
        )
        return cls(tree=tree, beams=[[places[node] for node in beam] for beam in beams])

    def to_depth(self, depth: int, max_nodes: int) -> DraftTree:
        """The `max_nodes` best nodes of those down to a depth."""
        key = (depth, max_nodes)
        if key not in self._kept:
            tree = self.tree
            num_nodes = sum(each <= depth for each in tree.depths)  # depths ascend
            self._kept[key] = keep_best(
                DraftTree(
                    tokens=tree.tokens[:num_nodes],
                    parents=tree.parents[:num_nodes],
                    values=tree.values[:num_nodes],
                    kind=tree.kind,
                ),
                max_nodes,
            )
        return self._kept[key]


@dataclass(eq=False)
class _Growth:
    """A request's tree on its way, as `infer.drafters.growing` has it."""

    shape_tree: _ShapeTree
    limit: DraftLimit
    max_depth: int
    depth: int = 0

    @property
    def frontier(self) -> list[int]:
        return self.shape_tree.beams[self.depth] if self.depth < self.max_depth else []

    def build(self, *, adaptive: bool) -> DraftTree:
        """The tree so far, cut to what may be verified already where values will not be corrected any more."""
        tree = self.shape_tree
        return tree.to_depth(self.depth, len(tree.tree) if adaptive else max(1, self.limit.max_nodes))

    def worths(self) -> Iterator[tuple[float, int]]:
        """(value, depth) of the nodes so far, with what values have been worth in the request."""
        tree, trust = self.shape_tree.tree, self.limit.trust
        for value, depth in zip(tree.values, tree.depths, strict=True):
            if depth <= self.depth:
                yield value * at_depth(trust, depth), depth


class RecordedGrower:
    """The grower of a network's trees, from the record. `texts` names the text of each request."""

    kinds: tuple[KindType, ...] = (OneHot,)
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        stepper: Stepper,
        *,
        place: int,
        texts: Mapping[Request, RecordedText],
        cache: dict[tuple[int, int, int, Shape, bool], _ShapeTree],
        meter: Meter,
    ) -> None:
        self.name = stepper.name
        self.spent_milliseconds = 0.0
        self._stepper, self._place, self._texts, self._cache, self._meter = stepper, place, texts, cache, meter
        self._tree = TreeSettings()
        self._cost = CostModel.free()

    def open(self, room: Room) -> None:
        self._tree, self._cost = room.tree, room.cost

    def observe(self, request: Request, states: object) -> None:
        pass

    def close(self, request: Request) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        """As `TreeGrower.propose`."""
        self.spent_milliseconds = self._stepper.begin_milliseconds
        growths = [self._start(request, limit) for request, limit in zip(requests, limits, strict=True)]
        growing = [growth for growth in growths if growth.max_depth > 0 and growth.limit.max_nodes > 0]
        depth = 0
        while growing:
            if depth:
                self.spent_milliseconds += self._stepper.step_milliseconds
                self._meter.num_steps += 1
                self._meter.num_rows += sum(len(growth.frontier) for growth in growing)
            depth += 1
            for growth in growing:
                growth.depth = depth
            growing = [growth for growth in growing if growth.frontier]
            if growing and self._tree.adaptive and not self._pays(growths, depth):
                break
        return [growth.build(adaptive=self._tree.adaptive) for growth in growths]

    def _start(self, request: Request, limit: DraftLimit) -> _Growth:
        text = self._texts[request]
        key = (id(text), self._place, len(request.output_ids), Shape.of(self._tree), self._tree.adaptive)
        if key not in self._cache:
            recorded = text.trees[len(request.output_ids)][self._place]
            self._cache[key] = _ShapeTree.of(recorded, key[3], NEGLIGIBLE if self._tree.adaptive else 0.0)
        bounds = (limit.max_depth, self._tree.max_depth, self._stepper.max_depth)
        max_depth = min(bound for bound in bounds if bound is not None)
        return _Growth(shape_tree=self._cache[key], limit=limit, max_depth=max_depth)

    def _pays(self, growths: Sequence[_Growth], depth: int) -> bool:
        """As `TreeGrower._pays`."""
        return next_depth_pays(
            (node for growth in growths for node in growth.worths()),
            self._cost,
            depth=depth,
            num_requests=len(growths),
            max_nodes=sum(growth.limit.max_nodes for growth in growths),
            spent_milliseconds=self.spent_milliseconds,
            step_milliseconds=self._stepper.step_milliseconds,
        )


class Replay:
    """Rounds over recorded texts. `cost`: the table that adaptive trees are fitted to, as the engine's."""

    def __init__(self, target: TargetModel, texts: Sequence[RecordedText], *, cost: CostModel) -> None:
        self.target = target
        self.texts = list(texts)
        self.cost = cost
        self._cache: dict[tuple[int, int, int, Shape, bool], _ShapeTree] = {}

    def rounds(self, parts: Parts, tree: TreeSettings, *, batch: int = 1) -> list[list[Round]]:
        """The rounds of an engine that answers the texts' prompts `batch` at a time, in order: a list for each such
        group. Evidence of the groups before is kept, as an engine keeps it."""
        adaptation = Adaptation()
        groups = [self.texts[start : start + batch] for start in range(0, len(self.texts), batch)]
        return [list(self._answer(group, parts, tree, adaptation)) for group in groups]

    def plain_rounds(self, *, batch: int = 1) -> list[list[Round]]:
        """The rounds of plain decoding, which need no replay."""
        groups = [self.texts[start : start + batch] for start in range(0, len(self.texts), batch)]
        return [list(_plain(group)) for group in groups]

    def _answer(
        self, group: Sequence[RecordedText], parts: Parts, tree: TreeSettings, adaptation: Adaptation
    ) -> Iterator[Round]:
        meter = Meter()
        texts = {self._request(text): text for text in group}
        cost = self.cost if tree.adaptive else CostModel.free()
        drafter = self._drafter(parts, texts, meter)
        num_columns = max(len(text.prompt_ids) + text.params.max_tokens for text in group)
        drafter.open(Room(num_slots=len(group), num_columns=num_columns, tree=tree, cost=cost))
        running = list(texts)
        for request in running:
            _emit(request, texts[request], 1)
        running = _observed(running, drafter, adaptation)
        is_first = True
        while running:
            context = sum(request.num_cached for request in running) // len(running)
            limits = [_limit(request, tree) for request in running]
            trees = adaptation.draft(
                drafter, running, limits, cost.at(context=context, batch=len(running)), adaptive=tree.adaptive
            )
            num_steps, num_step_rows = meter.take()
            for request, each in zip(running, trees, strict=True):
                start = len(request.output_ids)
                _emit(request, texts[request], 1 + num_accepted(each, texts[request].output_ids[start:]))
            yield Round(
                num_requests=len(running),
                num_asked=adaptation.num_drafted,
                num_rows=len(running) + sum(map(len, trees)),
                context=context,
                num_steps=num_steps,
                num_step_rows=num_step_rows,
                lengths=tuple(request.accepted_lengths[-1] for request in running),
                is_first=is_first,
            )
            left = _observed(running, drafter, adaptation)
            if tree.adaptive:
                adaptation.learn(running, trees)
            running, is_first = left, False

    def _drafter(self, parts: Parts, texts: Mapping[Request, RecordedText], meter: Meter) -> Drafter:
        drafters: list[Drafter] = []
        for part in parts.drafters:
            if isinstance(part, TreeGrower):
                place = parts.networks.index(part)
                part = RecordedGrower(part.stepper, place=place, texts=texts, cache=self._cache, meter=meter)
            else:
                part = copy.copy(part)  # it is told of other settings than the engine's
            drafters.append(part)
        return drafters[0] if len(drafters) == 1 else HybridDrafter(drafters)

    def _request(self, text: RecordedText) -> Request:
        assert text.params.seed is not None
        return Request.create(
            text.prompt_ids,
            text.params,
            seed=text.params.seed,
            sample=0,
            rule=RULES["match"],
            exactness="seed",
            target=self.target,
        )


def _plain(group: Sequence[RecordedText]) -> Iterator[Round]:
    """One token a round, from the second on."""
    for place in range(1, max(len(text.output_ids) for text in group)):
        running = [text for text in group if len(text.output_ids) > place]
        yield Round(
            num_requests=len(running),
            num_asked=0,
            num_rows=len(running),
            context=sum(len(text.prompt_ids) + place - 1 for text in running) // len(running),
            num_steps=0,
            num_step_rows=0,
            lengths=(1,) * len(running),
            is_first=place == 1,
        )


def num_accepted(tree: DraftTree, tokens: Iterable[int]) -> int:
    """How many of the tokens that come a tree holds as a path from its root."""
    places = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, count = ROOT, 0
    for token in tokens:
        child = places.get((node, token))
        if child is None:
            break
        node, count = child, count + 1
    return count


def _limit(request: Request, tree: TreeSettings) -> DraftLimit:
    """As the engine's, which has columns for all that its trees may need."""
    return DraftLimit(max_nodes=tree.max_nodes, max_depth=max(0, min(tree.max_depth, request.num_tokens_left - 1)))


def _emit(request: Request, text: RecordedText, num_tokens: int) -> None:
    start = len(request.output_ids)
    tokens = text.output_ids[start : start + num_tokens]
    request.output_ids.extend(tokens)
    request.accepted_lengths.append(len(tokens))
    if len(request.output_ids) == len(text.output_ids):
        request.finish_reason = "length"


def _observed(running: Sequence[Request], drafter: Drafter, adaptation: Adaptation) -> list[Request]:
    """Let the drafter see what came, and the requests go that have ended; returns the others."""
    left = []
    for request in running:
        if request.finish_reason is not None:
            adaptation.forget(request)
            drafter.close(request)
            continue
        request.num_cached = request.num_tokens - 1
        drafter.observe(request, None)
        left.append(request)
    return left
