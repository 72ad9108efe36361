"""The static shapes of rounds. A round is captured once a shape, and serves whatever fits into it."""

from __future__ import annotations

from dataclasses import dataclass

from infer.drafters.base import TreeSettings

LEAST_CONTEXT = 1024
CONTEXT_GROWTH = 4
"""Contexts are rounded up to 1k, 4k, 16k, ...: what a program beyond a text's end costs is next to nothing."""


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """batch: requests. nodes: draft nodes of each (0: a plain step). depth: the deepest node. context: most committed
    tokens of a request. branch: candidates a node; beam: nodes expanded at a depth."""

    batch: int
    nodes: int
    depth: int
    context: int
    branch: int = 4
    beam: int = 4

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("nodes", 0), ("depth", 0), ("context", 1), ("branch", 1), ("beam", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} of a round must be a whole number of at least {least}, got {value!r}")
        if bool(self.nodes) != bool(self.depth):
            raise ValueError(f"a round has nodes and a depth, or neither: got {self.nodes} nodes, depth {self.depth}")
        if self.depth > self.nodes:
            raise ValueError(f"a tree of {self.nodes} nodes cannot be {self.depth} deep")

    @property
    def rows_per_request(self) -> int:
        """The root's row and the nodes'."""
        return 1 + self.nodes

    @property
    def num_rows(self) -> int:
        return self.batch * self.rows_per_request

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes that are expanded at each depth from 0 (the root alone) on, whose children are one deeper."""
        widths: list[int] = []
        for _ in range(self.depth):
            widths.append(min(self.beam, widths[-1] * self.branch) if widths else 1)
        return tuple(widths)

    @property
    def num_candidates(self) -> int:
        """Nodes that are looked at, of which `nodes` are kept."""
        return self.branch * sum(self.widths)


def shape_for(
    num_requests: int, longest: int, tree: TreeSettings, *, depth: int | None, most_requests: int, num_columns: int
) -> RoundShape:
    """The shape that serves `num_requests` whose longest has `longest` committed tokens.

    depth: of their trees (None: the settings'). most_requests, num_columns: bounds of the cache.
    """
    depth = tree.max_depth if depth is None else min(depth, tree.max_depth)
    return RoundShape(
        batch=min(_power_of_two(num_requests), most_requests),
        nodes=tree.max_nodes if depth else 0,
        depth=depth,
        context=min(context_for(longest), num_columns),
        branch=tree.branch,
        beam=tree.beam,
    )


def context_for(longest: int) -> int:
    """The bound of contexts that holds `longest` tokens."""
    context = LEAST_CONTEXT
    while context < longest:
        context *= CONTEXT_GROWTH
    return context


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
