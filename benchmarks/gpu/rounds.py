"""Rounds of an 8B-shaped target with an EAGLE-3 head, against its plain step: what a round may cost to pay.

A round drafts to its depth, verifies its nodes and commits; a plain step is the same without a tree. Both are captured
and timed as serving has them (`benchmarks.gpu.static.round_ms`). Weights and cache are random, so drafts are hardly
ever accepted; that changes no time, for shapes are static.
"""

from __future__ import annotations

import gc
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.gpu.layers import shaped_target, step_floor, text_fits
from benchmarks.gpu.models import random_eagle3
from benchmarks.gpu.session import Session, requests_label
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.static import RandomText, round_ms
from heads.eagle3 import Eagle3Head
from infer.target import TargetModel


class Point(NamedTuple):
    batch: int
    context: int
    nodes: int
    depth: int

    def describe(self) -> str:
        where = f"{requests_label(self.batch)} at context {self.context}"
        return f"round of {self.nodes} nodes, depth {self.depth}, {where}"


def round_points(sizes: Sizes) -> list[Point]:
    """All combinations that make a tree, those first that differ least from the one the project's target is about.

    Points of one batch and context stand together within a distance, for they share a cache."""
    centre = Point(*sizes.round_centre)
    points = [
        Point(batch, context, nodes, depth)
        for batch, context, nodes, depth in product(
            sizes.round_batches, sizes.round_contexts, sizes.round_nodes, sizes.round_depths
        )
        if depth <= nodes  # a tree of fewer nodes is no deeper
    ]

    def distance(point: Point) -> tuple[int, int, int, int, int]:
        num_differing = sum(own != other for own, other in zip(point, centre, strict=True))
        return (
            num_differing,
            point.batch,
            point.context,
            abs(point.nodes - centre.nodes),
            abs(point.depth - centre.depth),
        )

    return sorted(points, key=distance)


class Shelf:
    """One text at a time, with the milliseconds of its plain step; those of others are remembered."""

    def __init__(self, session: Session, target: TargetModel, head: Eagle3Head) -> None:
        self._session, self._target, self._head = session, target, head
        self._text: RandomText | None = None
        self._plain_ms: dict[tuple[int, int], float] = {}
        self._refused: set[tuple[int, int]] = set()

    def text(self, point: Point) -> RandomText | None:
        """The text that a point needs; None where there is no memory for it."""
        place = (point.batch, point.context)
        if self._text is not None and (self._text.batch, self._text.context) == place:
            return self._text
        self._text = None
        gc.collect()  # captured rounds refer to themselves
        max_nodes = max(self._session.sizes.round_nodes)
        if place not in self._refused and not text_fits(self._target, *place, max_nodes=max_nodes):
            self._refused.add(place)
            self._session.skip("rounds", f"no memory for {requests_label(place[0])} at context {place[1]}")
        if place in self._refused:
            return None
        self._text = RandomText(
            self._target, batch=point.batch, context=point.context, max_nodes=max_nodes, head=self._head
        )
        return self._text

    def plain_ms(self, text: RandomText) -> float:
        place = (text.batch, text.context)
        if place not in self._plain_ms:
            static = text.round(nodes=0, depth=0)
            self._plain_ms[place] = round_ms(static, repeats=self._session.sizes.repeats)
        return self._plain_ms[place]


def measure_rounds(session: Session) -> None:
    shape = session.sizes.round_shape
    target = shaped_target(session, shape)
    head = random_eagle3(target, draft_vocab=session.sizes.draft_vocab, seed=0)
    shelf = Shelf(session, target, head)
    points = round_points(session.sizes)
    num_done = 0
    for point in points:
        if session.is_late("rounds"):
            break
        num_done += 1
        try:
            _measure_point(session, shelf, shape, point)
        except torch.OutOfMemoryError:
            session.skip("rounds", f"no memory for a {point.describe()}")
    if num_done < len(points):
        session.skip("rounds", f"out of time after {num_done} of {len(points)} combinations, nearest ones first")


def _measure_point(session: Session, shelf: Shelf, shape: str, point: Point) -> None:
    text = shelf.text(point)
    if text is None:
        return
    plain_ms = shelf.plain_ms(text)
    static = text.round(nodes=point.nodes, depth=point.depth)
    milliseconds = round_ms(static, repeats=session.sizes.round_repeats)
    ratio = milliseconds / plain_ms
    session.time(
        f"{shape} shape: {point.describe()}",
        milliseconds,
        "ms",
        floor=step_floor(session, static.target, point.batch, point.context),
        detail=f"{ratio:.3f} x the plain step's {plain_ms:.3f} ms",
        figures={"what": "round", "shape": shape, **point._asdict(), "plain_ms": plain_ms, "ratio": ratio},
    )
