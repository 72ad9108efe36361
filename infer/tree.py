"""The draft tree: the one thing that passes from a drafter to the engine.

A tree is small (tens of nodes), so its shape lives in plain Python tuples; only draft distributions are tensors.
Nothing here knows about models, caches or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

ROOT = -1
"""Node index of the root: the last token already emitted, whose next token the tree guesses."""


@dataclass(frozen=True, kw_only=True)
class OneHot:
    """Proposals fixed without any randomness (n-gram lookups, greedy or top-k drafts)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coupled:
    """Proposals that are functions of the position-keyed noise that the target's own draw will use.

    The list proposed at node `u`, before any pruning, was the `num_drawn` best tokens of log `draft_probs[u]` [V] plus
    noise, so `num_drawn` draws without replacement from it. Rules do not read these fields; they are filled (when
    `records` is set) to compare acceptance with its bound.
    """

    draft_probs: Mapping[int, torch.Tensor] = field(default_factory=dict)
    num_drawn: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Proposals drawn at random; `draft_probs[u]` [V] float is what the children of node `u` were drawn from.

    `replacement` says whether siblings are independent draws or drawn without replacement (in the order listed).
    """

    draft_probs: Mapping[int, torch.Tensor]
    replacement: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedySet:
    """All children of a node but the last are its top draft tokens; the last is drawn from the rest (Hu et al. 2025).

    `draft_probs[u]` [V] is the *unrestricted* draft distribution at node `u`.
    """

    draft_probs: Mapping[int, torch.Tensor]


ProposalKind = OneHot | Coupled | Sampled | GreedySet


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTree:
    """Candidate continuations of one request.

    Node `i` proposes `tokens[i]` after the path that ends in `parents[i]`; parents come before their children and
    `ROOT` (-1) is the last emitted token. Siblings stand in the order in which they were drawn.
    `values[i]` estimates the probability that node `i` is reached (for ranking and reports; 0 where unknown).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    kind: ProposalKind
    values: tuple[float, ...] = ()
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(
                f"a draft tree has one parent per token: {len(self.tokens)} tokens, {len(self.parents)} parents"
            )
        if self.values and len(self.values) != len(self.tokens):
            raise ValueError(
                f"a draft tree has one value per token: {len(self.tokens)} tokens, {len(self.values)} values"
            )
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(
                    f"node {node} names parent {parent}: parents must come before their children (root is {ROOT})"
                )
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        if isinstance(self.kind, Sampled | GreedySet):
            missing = sorted(set(self.parents) - set(self.kind.draft_probs))
            if missing:
                raise ValueError(
                    f"children of nodes {missing} are said to be sampled, but no draft distribution is given for them"
                )
        object.__setattr__(self, "depths", tuple(depths))

    @classmethod
    def empty(cls) -> DraftTree:
        return cls(tokens=(), parents=(), kind=OneHot())

    @classmethod
    def chain(cls, tokens: tuple[int, ...], kind: ProposalKind | None = None) -> DraftTree:
        """A tree with one node a depth."""
        return cls(tokens=tokens, parents=tuple(range(-1, len(tokens) - 1)), kind=kind or OneHot())

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """Indices of the children of `node` (or of `ROOT`), in the order drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the first draft token down to `node`; empty for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))
