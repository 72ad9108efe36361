"""One round on the device: draft, target forward, verification and commit, over static shapes and without the host.

    inputs -> (a head's trees | the host's) -> rows -> the stock model's forward -> match walk -> rows of the accepted
    path into place, states for the next draft -> outcome

The host fills `inputs`, replays, and reads the outcome: one sync a round. Verification is the match walk
(`infer.verify.match_walk`) with the noise of each token's position, so tokens are plain decoding's whatever was
drafted.

Shapes: B requests, N nodes, N1 = 1 + N rows of a request, D depth, R rows of the forward, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infer.cache import SlotCache
from infer.fixed import MAX_TREE_DEPTH
from infer.graphs.capture import Pool, captured
from infer.graphs.drafting import StaticDraft
from infer.graphs.inputs import DeviceInputs, RoundInputs
from infer.graphs.rows import StaticRows, path_rows, tree_rows
from infer.graphs.shapes import RoundShape
from infer.graphs.trees import DeviceTrees, trees_of
from infer.kernels.gpu.match_walk import Walk, match_walk
from infer.noise import position_keys
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, ProposalKind

assert ROOT == -1, "rows are nodes plus one"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a round made of one request.

    tree_tokens, tree_parents: its tree, as `infer.tree.DraftTree` has it. path: nodes that were accepted. token: the
    target's own after them. sound: False where a row on the way lets no token be drawn; `token` then means nothing, and
    the row's logits say why.
    """

    tree_tokens: tuple[int, ...]
    tree_parents: tuple[int, ...]
    path: tuple[int, ...]
    token: int
    sound: bool

    def tree(self, kind: ProposalKind) -> DraftTree:
        return DraftTree(tokens=self.tree_tokens, parents=self.tree_parents, kind=kind)


class StaticRound:
    """A round of one shape over the slots of `cache`.

    draft: grows the trees; without one they are given with the inputs (none, for a plain step). taps: states of
    `target` to keep of each request's accepted rows, in `kept` [slots, D + 1, taps * H], which is the draft's `pending`
    where there is a draft. row_width: rows of the target's forward where they are fixed, and attention is the same to
    the bit wherever a path lies (`infer.fixed`); by default as many as there are.
    """

    def __init__(
        self,
        target: TargetModel,
        cache: SlotCache,
        shape: RoundShape,
        *,
        draft: StaticDraft | None = None,
        kept: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        row_width: int | None = None,
    ) -> None:
        if row_width is not None and shape.num_rows > row_width:
            raise ValueError(f"{shape.num_rows} rows do not fit into a forward of {row_width}: raise row_width")
        if row_width is not None and shape.depth > MAX_TREE_DEPTH:
            raise ValueError(f"trees of forwards of fixed width are at most {MAX_TREE_DEPTH} deep, got {shape.depth}")
        if draft is not None and shape.nodes > shape.num_candidates:
            raise ValueError(
                f"a tree of depth {shape.depth}, beam {shape.beam} and branch {shape.branch} has "
                f"{shape.num_candidates} candidates, but {shape.nodes} nodes were asked for"
            )
        self.target, self.cache, self.shape = target, cache, shape
        self.draft = draft if shape.nodes else None
        self.taps = tuple(taps)
        self._kept = draft.pending if draft is not None else kept
        self._lay_rows = (
            partial(tree_rows, has_windows=target.has_windows)
            if row_width is None
            else partial(path_rows, row_width=row_width)
        )
        max_pending = 0 if self.draft is None else self.draft.max_pending
        self.inputs = RoundInputs(shape, max_pending=max_pending, device=target.device)
        self._outcome = torch.zeros(
            (shape.batch, 3 + shape.depth + 1 + 2 * shape.nodes), dtype=torch.int64, device=target.device
        )
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def compute(self) -> None:
        """The round, from the device's inputs to its outcome. To run it again on the same inputs changes nothing but
        the states kept for a draft."""
        inputs = self.inputs.on_device()
        trees = self._trees(inputs)
        logits, states = self._forward(inputs, trees)
        walk = self._walk(inputs, trees, logits)
        self._move(inputs, walk)
        self._keep(inputs, walk, states)
        self._tell(trees, walk)

    def capture(self, *, pool: Pool | None = None) -> Callable[[], None]:
        """The round to call again and again, once its inputs are uploaded: a CUDA graph's replay, on a CPU itself."""
        saved = None if self._kept is None else self._kept.clone()
        try:
            return captured(self.compute, self.target.device, pool=pool)
        finally:
            if self._kept is not None and saved is not None:
                self._kept.copy_(saved)

    def read(self, num_requests: int | None = None) -> list[Outcome]:
        """What the round made of its first requests (by default of all). Waits for the device."""
        rows = self._outcome[:num_requests].tolist()
        first, second = self.shape.depth + 1, self.shape.depth + 1 + self.shape.nodes
        outcomes = []
        for token, count, sound, *rest in rows:
            path, tokens, parents = rest[:first], rest[first:second], rest[second:]
            num_real = sum(parent >= 0 for parent in parents)  # places without a node come last
            outcomes.append(
                Outcome(
                    tree_tokens=tuple(tokens[:num_real]),
                    tree_parents=tuple(parent - 1 for parent in parents[:num_real]),
                    path=tuple(row - 1 for row in path[1 : 1 + count]),
                    token=token,
                    sound=bool(sound),
                )
            )
        return outcomes

    @property
    def tokens(self) -> torch.Tensor:
        """The token that the last round put after each request's path [B], on the device."""
        return self._outcome[:, 0]

    def logits(self, place: int) -> torch.Tensor:
        """Of a request's rows [N1, V], root first, as the last round left them."""
        num_rows = self.shape.rows_per_request
        return self._logits[place * num_rows : (place + 1) * num_rows]

    def _trees(self, inputs: DeviceInputs) -> DeviceTrees:
        tokens, parents = inputs.tree_tokens, inputs.tree_parents
        if self.draft is not None:
            tokens, parents = self.draft.grow(inputs, self.shape)
        return trees_of(inputs.tokens, tokens, parents, depth=self.shape.depth)

    def _forward(self, inputs: DeviceInputs, trees: DeviceTrees) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [B * N1, V], and tapped states [B * N1, taps * H]."""
        output = self.target.forward_rows(self._rows(inputs, trees), taps=self.taps)
        num_rows = self.shape.num_rows
        self._logits = output.logits[:num_rows]
        return self._logits, None if output.taps is None else output.taps[:num_rows]

    def _rows(self, inputs: DeviceInputs, trees: DeviceTrees) -> StaticRows:
        return self._lay_rows(
            self.cache,
            slots=inputs.slots,
            prefixes=inputs.num_cached,
            token_ids=trees.tokens,
            depths=trees.depths,
            sees=trees.sees,
            max_prefix=self.shape.context,
        )

    def _walk(self, inputs: DeviceInputs, trees: DeviceTrees, logits: torch.Tensor) -> Walk:
        positions = inputs.num_cached[:, None] + 1 + trees.depths  # of the token after each row
        streams = inputs.streams[:, None].expand_as(positions)
        return match_walk(
            logits,
            trees.tokens,
            trees.parents.to(torch.int32),
            position_keys(streams.flatten(), positions.flatten()),
            inputs.temperatures,
            depth=self.shape.depth,
        )

    def _move(self, inputs: DeviceInputs, walk: Walk) -> None:
        """The rows of the accepted paths to the columns after their roots'; other rows stay where they are."""
        steps = torch.arange(self.shape.depth + 1, device=walk.paths.device)
        rows = torch.where(steps <= walk.counts[:, None], walk.paths, steps)
        firsts = (inputs.slots * self.cache.num_columns + inputs.num_cached)[:, None]
        sources, places = (firsts + rows)[:, 1:].flatten(), (firsts + steps)[:, 1:].flatten()
        if self.shape.depth:
            for storage in (self.cache.keys, self.cache.values):
                storage.index_copy_(2, places, storage.index_select(2, sources))

    def _keep(self, inputs: DeviceInputs, walk: Walk, states: torch.Tensor | None) -> None:
        """The states of the root's row and the accepted path, for whoever drafts next."""
        if self._kept is None or states is None:
            return
        paths = walk.paths.to(torch.int64)
        by_request = states.view(len(paths), -1, states.shape[-1])
        path_states = by_request.gather(1, paths[..., None].expand(-1, -1, states.shape[-1]))
        self._kept[:, : path_states.shape[1]].index_copy_(0, inputs.slots, path_states.to(self._kept.dtype))

    def _tell(self, trees: DeviceTrees, walk: Walk) -> None:
        facts = [walk.tokens, walk.counts, walk.sound]
        columns = [*(fact.to(torch.int64)[:, None] for fact in facts), walk.paths.to(torch.int64)]
        self._outcome.copy_(torch.cat([*columns, trees.tokens[:, 1:], trees.parents[:, 1:]], dim=1))
