"""What a drafter would propose after every token of some texts, recorded once and generously.

Under the match walk, and for greedy requests under every rule, the tokens emitted do not depend on the trees. So plain
decoding shows the states that a drafter is given, and a network's logits after a path depend on the text and that path
alone: asked after *every* token of a text, along every path that any of the settings would take, it need not be asked
again. One pass of plain decoding, many texts side by side, then replaces a decoding run for each setting
(`infer.tune.replay`). Exact but for rounding, as forwards of other widths round differently.

One tree that is merely generous would not do: which nodes a narrow beam expands need not be among those that a wide one
does. So several trees grow at once, one for each `Shape`, in one draft step a depth over the union of their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from infer.drafters.base import Drafter, DraftLimit, Room, TreeSettings
from infer.drafters.growing import Growth, TreeGrower
from infer.drafters.hybrid import HybridDrafter, parts_of
from infer.engine import Engine
from infer.request import Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import KindType


@dataclass(frozen=True, kw_only=True, order=True)
class Shape:
    """How wide a tree grows: candidates a node, and nodes expanded at a depth."""

    branch: int
    beam: int

    @classmethod
    def of(cls, tree: TreeSettings) -> Shape:
        return cls(branch=tree.branch, beam=tree.beam)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedText:
    """A prompt, its answer, and the trees of each of the drafter's networks after each number of emitted tokens."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams
    trees: Mapping[int, tuple[DraftTree, ...]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A drafter taken apart, in its order: networks, which are recorded, and lookups, cheap enough to be asked anew."""

    drafters: tuple[Drafter, ...]

    @classmethod
    def of(cls, drafter: Drafter) -> Parts:
        parts = cls(drafters=parts_of(drafter))
        foreign = next((one for one in parts.drafters if one.taps and one not in parts.networks), None)
        if foreign is not None:
            raise ValueError(
                f"the drafter {foreign.name!r} reads the target's states but grows no trees of its own logits: its "
                "settings cannot be searched"
            )
        return parts

    @property
    def networks(self) -> tuple[TreeGrower, ...]:
        return tuple(one for one in self.drafters if isinstance(one, TreeGrower))


class SharedGrower(TreeGrower):
    """Grows the trees of several shapes in one: a node is expanded if it is in the beam of any of them."""

    def __init__(self, grower: TreeGrower, shapes: Sequence[Shape]) -> None:
        super().__init__(grower.stepper, calibration=grower.calibration)
        self.shapes = tuple(shapes)
        self._beams: dict[Request, list[list[int]]] = {}

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        self._beams = {request: [[ROOT] for _ in self.shapes] for request in requests}
        return super().propose(requests, limits)

    def _choose_frontiers(self, growing: Sequence[Growth], depth: int) -> list[Growth]:
        for growth in growing:
            builder = growth.builder
            children: dict[int, list[int]] = {}
            for node in range(growth.num_seen, len(builder)):
                children.setdefault(builder.parents[node], []).append(node)
            beams = [
                next_beam(shape, beam, children, builder.values)
                for shape, beam in zip(self.shapes, self._beams[growth.request], strict=True)
            ]
            self._beams[growth.request] = beams
            growth.frontier = sorted(set().union(*beams)) if depth < growth.limit.max_depth else []
            growth.num_seen = len(builder)
        return [growth for growth in growing if growth.frontier]


def next_beam(
    shape: Shape, beam: Sequence[int], children: Mapping[int, Sequence[int]], values: Sequence[float]
) -> list[int]:
    """Which of the children of `beam`, each node's first in the order drawn, a tree of this shape expands next."""
    newest = [child for node in beam for child in children.get(node, ())[: shape.branch]]
    return sorted(sorted(newest, key=lambda node: (-values[node], node))[: shape.beam])


class TreeRecorder:
    """Stands in the drafter's place in plain decoding: keeps what its networks propose, and proposes nothing."""

    spent_milliseconds = 0.0

    def __init__(self, parts: Parts, shapes: Sequence[Shape]) -> None:
        self._growers = [SharedGrower(network, shapes) for network in parts.networks]
        self._joined = HybridDrafter(self._growers)
        self.name = "recorder"
        self.kinds: tuple[KindType, ...] = TreeGrower.kinds
        self.taps = self._joined.taps
        self.trees: dict[Request, dict[int, tuple[DraftTree, ...]]] = {}

    def open(self, room: Room) -> None:
        self._joined.open(room)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        self._joined.observe(request, states)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        proposed = [grower.propose(requests, limits) for grower in self._growers]
        for place, request in enumerate(requests):
            kept = self.trees.setdefault(request, {})
            kept[len(request.output_ids)] = tuple(_bare(trees[place]) for trees in proposed)
        return [DraftTree.empty()] * len(requests)

    def close(self, request: Request) -> None:
        self._joined.close(request)


def record(
    target: TargetModel,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    shapes: Sequence[Shape],
    max_depth: int,
    max_requests: int = 16,
    progress: Callable[[int], None] | None = None,
) -> list[RecordedText]:
    """Answer the prompts plainly, and keep what the networks would draft after each token, `max_depth` deep."""
    recorder = TreeRecorder(parts, shapes)
    beam = sum(shape.beam for shape in shapes)
    tree = TreeSettings(
        max_nodes=max_depth * beam,
        max_depth=max_depth,
        branch=max(shape.branch for shape in shapes),
        beam=beam,
        adaptive=False,
    )
    engine = Engine(target, recorder if parts.networks else None, max_requests=max_requests, tree=tree)
    requests = engine.submit(prompts, params)
    while any(request.finish_reason is None for request in requests):
        num_tokens = engine.step()
        if progress is not None:
            progress(num_tokens)
    return [
        RecordedText(
            prompt_ids=request.prompt_ids,
            output_ids=tuple(request.output_ids),
            params=one,
            trees=recorder.trees.get(request, {}),
        )
        for request, one in zip(requests, params, strict=True)
    ]


def _bare(tree: DraftTree) -> DraftTree:
    """The tree without what its proposals were drawn from."""
    return DraftTree(tokens=tree.tokens, parents=tree.parents, values=tree.values, kind=OneHot())
