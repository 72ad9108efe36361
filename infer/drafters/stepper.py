"""What stands between a growing tree and a network: how draft logits for its nodes are asked for.

`infer.drafters.growing` grows trees from draft logits and knows nothing of where they come from. A `Stepper` is that
where: it reads a request's text, and hands out logits for the tokens after its last one and after nodes of its tree,
depth by depth. Each round it is asked to `begin`, and the `DraftRound` that it returns is asked once a depth. What is
remembered between depths (states, logits, masks) lives in the `DraftRound` and goes with it; what is remembered of a
request between rounds lives in `request.draft_state[name]`.

Four shapes of network that fit:

    a head on its own states    `begin` reads the target's newest states; a depth is one forward over the frontier's
    (EAGLE, Hydra)              tokens, each beside the state that its parent's row left (`Frontier.parent_rows`)
    one head a depth (Medusa)   `begin` computes the logits of all depths from the root's state; a depth is a look-up
                                by `Frontier.index`, so `step_milliseconds` is 0 and `max_depth` the number of heads
    all depths in one pass      `begin` runs the head over the new text and the places behind it, for the depths that it
    (P-EAGLE, DFlash)           is told of; a depth is a look-up, corrected by the frontier's tokens
    a causal model              `begin` runs the model over tokens that its cache does not hold yet; a depth is one
                                forward over the frontier's tokens (`infer.rows.GrowingRows` makes its rows)

Shapes: F frontier nodes of all requests, C draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from infer.drafters.base import Room
from infer.request import Request


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Nodes of one request's tree whose children come next, in ascending order and all at one depth.

    index: the request's place among those that the round began with. nodes: their numbers in the tree, alone `ROOT` at
    depth 0. tokens, parents: of each node, its token and its parent's number (at depth 0 there are none).
    parent_rows: the row that the node's parent had among the logits of the depth before (at depth 0, where none came
    before: `index`).
    """

    request: Request
    index: int
    nodes: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    parent_rows: Sequence[int]


class DraftRound(Protocol):
    """One round of drafting, from the roots down."""

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        """Draft logits [F, C] for the token after each frontier node, request by request; `depth` is the nodes' own.

        Asked for once a depth, from 0 (the roots) on. Some of the requests may be missing from the first, and more
        from each depth to the next; a node's parent was always in the frontier before.
        """
        ...


@runtime_checkable
class Stepper(Protocol):
    """A network as the grower sees it.

    name: unique among the drafters of an engine; the key of `request.draft_state`. taps: as in `Drafter`.
    target_ids: the target's id of each draft token [C], on the device on which logits come. vocab_size: V, the
    target's. max_depth: deepest node that it can propose (None: no bound). begin_milliseconds, step_milliseconds: what
    the logits of depth 0 (`begin` included) and those of each further depth cost on this machine, candidates included;
    0 until `open` has measured them, which it must only where the tree is adaptive.
    """

    @property
    def name(self) -> str: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def target_ids(self) -> torch.Tensor: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_depth(self) -> int | None: ...

    @property
    def begin_milliseconds(self) -> float: ...

    @property
    def step_milliseconds(self) -> float: ...

    def open(self, room: Room) -> None:
        """Make room, as `Drafter.open` says. At most `max_depth - 1` depths of `beam` rows are stepped in a
        round, behind the rows of a request's text."""

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        """As `Drafter.observe`."""

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DraftRound:
        """Catch up with the text of `requests`, each of which has new rows since it was last here.

        depths: of each, the deepest node that may be asked for: at most `logits` of the depths below it.
        """
        ...

    def close(self, request: Request) -> None:
        """The request has left."""


@runtime_checkable
class PrefixStepper(Stepper, Protocol):
    """A stepper that can go on from another request's text (`infer.drafters.base.PrefixDrafter`)."""

    def num_kept(self, request: Request) -> int: ...

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None: ...
