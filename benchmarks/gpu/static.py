"""Static rounds over caches of random content: no text, no prefill.

Shapes: B requests, N nodes, P rows that a head has not read yet, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.machine import median_ms
from heads.eagle3 import Eagle3Head
from infer.cache import SlotCache
from infer.drafters.reading import decoding_view, head_cache
from infer.graphs.drafting import StaticDraft
from infer.graphs.rounds import StaticRound
from infer.graphs.shapes import RoundShape
from infer.noise import position_stream
from infer.target import TargetModel

GRAIN = 64
"""Slots hold a multiple of so many columns, as the engine's do."""
DEEPEST = 8
PENDING = 3
"""Rows that came since the head's last draft: a round that kept two drafts."""


def round_shape(*, batch: int, nodes: int, depth: int, context: int) -> RoundShape:
    """A shape whose trees look at least at as many candidates as they keep."""
    branch = 4
    while True:
        shape = RoundShape(batch=batch, nodes=nodes, depth=depth, context=context, branch=branch, beam=4)
        if shape.num_candidates >= nodes:
            return shape
        branch += 1


class RandomText:
    """Slots of `batch` requests with `context` committed tokens each, of which only states are known, and random ones.

    head: reads them too. max_nodes: of the trees that there is room for.
    """

    def __init__(
        self, target: TargetModel, *, batch: int, context: int, max_nodes: int, head: Eagle3Head | None = None
    ) -> None:
        self.target, self.batch, self.context = target, batch, context
        self.head = None if head is None else decoding_view(head)
        self.num_columns = columns_for(context, max_nodes)
        self.generator = torch.Generator(device=target.device).manual_seed(0)
        self.cache = target.new_cache(num_slots=batch, num_columns=self.num_columns)
        self._fill(self.cache)
        self._head_cache: SlotCache | None = None
        self._pending = torch.empty(0)
        if head is not None:
            self._head_cache = self._cache_of(head)
            self._pending = self._random((batch, 1 + DEEPEST, len(head.config.taps) * target.hidden_size))

    def round(
        self,
        *,
        nodes: int,
        depth: int,
        row_width: int | None = None,
        seed: int = 0,
        trees: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> StaticRound:
        """A round of these requests with its inputs on the device; `trees`: the same for each, where no head drafts."""
        draft = None
        if nodes and self.head is not None:
            draft = StaticDraft(self.head, cache=self._head_cache, pending=self._pending)
        static = StaticRound(
            self.target,
            self.cache,
            round_shape(batch=self.batch, nodes=nodes, depth=depth, context=self.context),
            draft=draft,
            taps=() if draft is None else draft.head.config.taps,
            row_width=row_width,
        )
        self.place(static, seed=seed, trees=trees)
        return static

    def place(
        self,
        static: StaticRound,
        *,
        seed: int,
        temperature: float = 0.0,
        trees: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        """Give a round its inputs, which follow `seed`."""
        has_draft = static.draft is not None
        static.inputs.clear()
        for slot in range(self.batch):
            # Not among rare ones, which may be alike.
            token = (12347 * seed + 611 * slot + 101) % self.target.vocab_size
            static.inputs.place(
                slot,
                slot=slot,
                num_cached=self.context,
                token=token,
                stream=position_stream(seed, slot, 0),
                temperature=temperature,
                num_read=self.context - PENDING if has_draft else 0,
                pending_tokens=[2, 1, token] if has_draft else (),
                tree=trees,
            )
        static.inputs.upload()

    def _cache_of(self, head: Eagle3Head) -> SlotCache:
        num_columns = self.num_columns + GRAIN
        cache = head_cache(
            head.config, num_slots=self.batch, num_columns=num_columns, dtype=head.dtype, device=head.device
        )
        self._fill(cache)
        return cache

    def _fill(self, cache: SlotCache) -> None:
        for storage in (cache.keys, cache.values):
            storage.normal_(generator=self.generator)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        states = torch.empty(shape, dtype=self.target.dtype, device=self.target.device)
        return states.normal_(generator=self.generator)


def columns_for(context: int, max_nodes: int) -> int:
    """Columns of a slot that holds `context` tokens, the root's row and a tree."""
    return -(-(context + 1 + max_nodes) // GRAIN) * GRAIN


def round_ms(static: StaticRound, *, repeats: int) -> float:
    """Median milliseconds of a round as serving has it: inputs to the device, the graph's replay, and the one sync."""
    replay = static.capture()
    return median_ms(lambda: turn(static, replay), static.target.device, repeats=repeats)


def turn(static: StaticRound, replay: Callable[[], None]) -> None:
    static.inputs.upload()
    replay()
    static.read()
