"""Static rounds in an engine: which requests can go through them, on which shape, and what becomes of their states.

Shapes: B requests, N nodes, D depth, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from infer.cache import SlotCache
from infer.drafters.base import Drafter, TreeSettings
from infer.drafters.head import HeadDrafter
from infer.drafters.reading import HeadStepper
from infer.graphs.drafting import StaticDraft
from infer.graphs.rounds import Outcome, StaticRound
from infer.graphs.shapes import RoundShape, shape_for
from infer.noise import position_stream
from infer.request import DraftBounds, Request
from infer.target import TargetModel
from infer.tree import Coupled, DraftTree, OneHot
from infer.verify import RULES


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What a round did for a request.

    tree: what was verified. path, tokens: its accepted nodes, and what to emit. states [1 + len(path), taps * H]: of
    the root's row and the path, if the drafter wants any. logits [1 + N, V]: of all its rows, where a token could not
    be drawn; `path` then ends there, and the last token means nothing.
    """

    tree: DraftTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    states: torch.Tensor | None
    logits: torch.Tensor | None


def static_rounds(
    target: TargetModel,
    drafter: Drafter | None,
    cache: SlotCache,
    tree: TreeSettings,
    *,
    exactness: str,
    row_width: int | None,
    graphs: bool | None,
) -> StaticRounds | None:
    """Rounds over the slots of a new cache, None where there are to be none. `graphs`: as in `infer.engine.Engine`.

    Raises ValueError where they were asked for and cannot be.
    """
    wanted = target.device.type == "cuda" if graphs is None else graphs
    why_not = _why_not(target, drafter, tree, exactness=exactness, row_width=row_width)
    if graphs and why_not:
        raise ValueError(why_not)
    return StaticRounds(target, drafter, cache, tree, row_width=row_width) if wanted and not why_not else None


def _why_not(
    target: TargetModel, drafter: Drafter | None, tree: TreeSettings, *, exactness: str, row_width: int | None
) -> str:
    """Why there can be no static rounds at all; empty if there can."""
    if target.is_spread:
        return (
            f"{target.name} is spread over devices by a device_map, and graphs need a model on one: load it on one "
            "device, or leave graphs out"
        )
    if exactness == "bitwise" and row_width is None:
        return (
            "this target keeps its bits on headstart's CPU kernels, which no graph holds: leave graphs out, or give "
            "row_width to have forwards of that many rows"
        )
    comes_from_host = drafter is not None and _head_stepper(drafter) is None  # what grows on the device is made to fit
    if comes_from_host and row_width is not None and tree.max_nodes >= row_width:
        return (
            f"a tree of {tree.max_nodes} nodes and its root do not fit into forwards of {row_width} rows, as graphs "
            f"need it: raise row_width to at least {1 + tree.max_nodes}, or lower the nodes"
        )
    return ""


class StaticRounds:
    """Rounds over the slots of one cache, captured as they are needed.

    row_width: as in `StaticRound`. Opened anew with each cache, after the drafter.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: SlotCache,
        tree: TreeSettings,
        *,
        row_width: int | None = None,
    ) -> None:
        self._target, self._drafter, self._cache = target, drafter, cache
        self._stepper = _head_stepper(drafter)
        self._tree = _that_fits(tree, row_width, self._stepper)
        self._row_width = row_width
        taps = () if drafter is None else drafter.taps
        self._taps = tuple(taps)
        self._kept = torch.zeros(
            (cache.num_slots, 1 + self._tree.max_depth, len(taps) * target.hidden_size),
            dtype=target.dtype,
            device=target.device,
        )
        self._draft = None
        if self._stepper is not None:
            self._draft = StaticDraft(self._stepper.network, cache=self._stepper.cache, pending=self._kept)
        self._rounds: dict[RoundShape, tuple[StaticRound, Callable[[], None]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None

    @property
    def grows_trees(self) -> bool:
        """Whether rounds draft by themselves; else the drafter is asked as ever, and its trees are verified here."""
        return self._draft is not None

    @property
    def num_captured(self) -> int:
        return len(self._rounds)

    def prepare(self) -> None:
        """Capture the rounds that come first in a server's life, for batches of 1, 2, 4, ... requests. Nothing may run
        yet: slot 0 is written to."""
        batch = 1
        while batch < 2 * min(self._cache.num_slots, self._most_requests(None)):
            static = self._new_round(self._shape(batch, 1, None))
            static.inputs.place(0, slot=0, num_cached=0, token=0, pending_tokens=[0] if static.draft else [])
            static.inputs.upload()
            self._capture(static)
            batch *= 2

    def can_serve(self, requests: Sequence[Request], *, drafts: bool) -> bool:
        return not any(self.refusal(request, drafts=drafts) for request in requests)

    def refusal(self, request: Request, *, drafts: bool) -> str:
        """Why a request cannot go through a static round just now; empty if it can. drafts: whether the round does."""
        if request.rule is not RULES["match"]:
            return f"rule {request.rule.name}"
        if request.params.logprobs is not None:
            return "log-probabilities"
        if not request.processor.only_scales:
            return "filters or penalties"
        if request.draft != DraftBounds():
            return "bounds of its own"
        if request.num_cached + 1 + (self._tree.max_nodes if drafts else 0) > self._cache.num_columns:
            return "no columns left for a tree"
        if len(request.uncached) != 1:
            return "text that is not in the cache"
        if self._stepper is not None and drafts:
            num_pending = self._stepper.memory(request).num_pending
            if not 0 < num_pending <= 1 + self._tree.max_depth:
                return "text that the head has not read"
        return ""

    def run(
        self, requests: Sequence[Request], trees: Sequence[DraftTree] | None = None, *, depth: int | None = None
    ) -> list[Served]:
        """A round for `requests`, none of which is refused.

        trees: of the host, where rounds do not draft. depth: of the trees (None: the settings'; 0: no drafts).
        """
        found: list[Served] = []
        most = self._most_requests(depth)
        for start in range(0, len(requests), most):
            share = slice(start, start + most)
            found += self._run(requests[share], None if trees is None else trees[share], depth)
        return found

    def _run(self, requests: Sequence[Request], trees: Sequence[DraftTree] | None, depth: int | None) -> list[Served]:
        shape = self._shape(len(requests), max(request.num_cached for request in requests), depth)
        if shape not in self._rounds:
            static = self._new_round(shape)
            self._fill(static, requests, trees)
            self._capture(static)
        static, replay = self._rounds[shape]
        self._fill(static, requests, trees)
        replay()
        outcomes = static.read(len(requests))
        if static.draft is not None and self._stepper is not None:
            for request in requests:
                self._stepper.memory(request).mark_read()
        return [
            self._served(static, place, request, outcome, None if trees is None else trees[place])
            for place, (request, outcome) in enumerate(zip(requests, outcomes, strict=True))
        ]

    def _served(
        self, static: StaticRound, place: int, request: Request, outcome: Outcome, tree: DraftTree | None
    ) -> Served:
        """`tree`: the host's, if it gave one."""
        if tree is None:
            tree = outcome.tree(OneHot() if request.params.greedy else Coupled())
        return Served(
            tree=tree,
            path=outcome.path,
            tokens=(*(outcome.tree_tokens[node] for node in outcome.path), outcome.token),
            states=self._states(static, request, outcome),
            logits=None if outcome.sound else static.logits(place).clone(),
        )

    def _capture(self, static: StaticRound) -> None:
        self._rounds[static.shape] = static, static.capture(pool=self._pool)

    def _most_requests(self, depth: int | None) -> int:
        if self._row_width is None:
            return self._cache.num_slots
        return max(1, self._row_width // (1 if depth == 0 else 1 + self._tree.max_nodes))

    def _shape(self, num_requests: int, longest: int, depth: int | None) -> RoundShape:
        shape = shape_for(
            num_requests,
            longest,
            self._tree,
            depth=0 if self._drafter is None else depth,
            most_requests=min(self._cache.num_slots, self._most_requests(depth)),
            num_columns=self._cache.num_columns,
        )
        return replace(shape, nodes=min(shape.nodes, shape.num_candidates)) if self.grows_trees else shape

    def _new_round(self, shape: RoundShape) -> StaticRound:
        return StaticRound(
            self._target,
            self._cache,
            shape,
            draft=self._draft,
            kept=self._kept,
            taps=self._taps,
            row_width=self._row_width,
        )

    def _fill(self, static: StaticRound, requests: Sequence[Request], trees: Sequence[DraftTree] | None) -> None:
        static.inputs.clear()
        for place, request in enumerate(requests):
            tree = DraftTree.empty() if trees is None else trees[place]
            num_read, pending = self._prepare_states(request, will_read=static.draft is not None)
            static.inputs.place(
                place,
                slot=request.slot,
                num_cached=request.num_cached,
                token=request.output_ids[-1],
                stream=position_stream(*request.identity),
                temperature=0.0 if request.params.greedy else request.params.temperature,
                num_read=num_read,
                pending_tokens=pending,
                tree=(tree.tokens, tree.parents),
            )
        static.inputs.upload()

    def _prepare_states(self, request: Request, *, will_read: bool) -> tuple[int, list[int]]:
        """How many rows the head has read, and the tokens of those that wait, whose states are brought to the slot's
        place. A round that will not read them overwrites the place, so what waits there moves out."""
        if self._stepper is None:
            return 0, []
        memory, place = self._stepper.memory(request), self._kept[request.slot]
        is_there = [each.data_ptr() == place.data_ptr() for each in memory.pending]
        if not will_read:
            memory.pending[:] = [
                each.clone() if there else each for each, there in zip(memory.pending, is_there, strict=True)
            ]
            return 0, []
        if is_there != [True]:
            place[: memory.num_pending] = torch.cat(memory.pending).to(place.dtype)
        return memory.num_rows, request.tokens_from(memory.num_rows + 1)[: memory.num_pending]

    def _states(self, static: StaticRound, request: Request, outcome: Outcome) -> torch.Tensor | None:
        """The states of the root's row and the path. Where the next round will read them they stay in their place."""
        if not self._taps:
            return None
        states = self._kept[request.slot, : 1 + len(outcome.path)]
        return states if static.draft is not None else states.clone()


def _head_stepper(drafter: Drafter | None) -> HeadStepper | None:
    """Of a drafter whose trees grow on the device; None for those that are asked on the host."""
    stepper = drafter.stepper if isinstance(drafter, HeadDrafter) else None
    return stepper if isinstance(stepper, HeadStepper) else None


def _that_fits(tree: TreeSettings, row_width: int | None, stepper: HeadStepper | None) -> TreeSettings:
    """The settings, with as many nodes as a forward has rows for, and depths and candidates as a head has them."""
    nodes = tree.max_nodes if row_width is None else min(tree.max_nodes, row_width - 1)
    depth = min(tree.max_depth, nodes)
    if stepper is not None:
        depth = min(depth, stepper.max_depth or depth)
        tree = replace(tree, branch=min(tree.branch, len(stepper.target_ids)))
    return replace(tree, max_nodes=nodes, max_depth=depth)
