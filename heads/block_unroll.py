"""Places behind many roots of packed text, in one pass: where their rows lie in it, and who sees whom.

The rows of a pass are the text's, R of them, and behind those the places, block by block in the order of their roots.
A text row sees its sequence up to itself. A place sees it up to its root, and of the places only those of its own
block: all of them, or those up to itself.

Shapes: R rows of text, B blocks, M places of all blocks, N = R + M, Q rows that ask, S places that a place may see,
Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from heads.transfer import sent
from heads.unroll import attend_packed, query_bounds

Asking = Literal["all", "places", "wanted"]
"""Which rows of a pass ask in a layer: all N, its places, or those whose states are wanted."""

ROW_MULTIPLE = 16
"""What numbers of rows are rounded up to: a CPU's matrix products are compiled for each number anew."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLayout:
    """The rows of a pass, in CPU memory.

    roots [B]: text rows, ascending. blocks [M], steps [M]: each place's block, and its distance from the root. own
    [M, S], hidden [M, S]: places that a place may see, and which of them are none. wanted [Q]: rows whose states are
    asked for, ascending; previous [Q]: the packed rows of the tokens drafted before what they guess. answers: for each
    step of the plan the indices of its rows' states in `wanted`.

    Places from `num_meant` on belong to no block, and what they see means nothing: they make a rounder number.
    """

    num_rows: int
    num_meant: int
    roots: torch.Tensor
    blocks: torch.Tensor
    steps: torch.Tensor
    own: torch.Tensor
    hidden: torch.Tensor
    wanted: torch.Tensor
    previous: torch.Tensor
    answers: list[torch.Tensor]

    @classmethod
    def of(
        cls, plan: Sequence[torch.Tensor], *, num_rows: int, num_places: int, first_place: int, sees_ahead: bool
    ) -> BlockLayout:
        """`plan`: text rows that count at each depth, each list part of the one before; a row may come twice. The other
        sizes are the head's (`heads.block.BlockHead`)."""
        plan = [rows.cpu() for rows in plan]
        roots = plan[0].unique()
        found = [torch.searchsorted(roots, rows) for rows in plan]
        sizes = torch.full_like(roots, num_places if sees_ahead else 0)  # of each block
        if not sees_ahead:
            for depth, blocks in enumerate(found):
                sizes[blocks] = first_place + depth
        firsts = sizes.cumsum(0) - sizes
        asked = [num_rows + firsts[blocks] + first_place + depth - 1 for depth, blocks in enumerate(found)]
        if first_place == 0:
            asked[0] = plan[0]
        wanted, answers = torch.cat(asked).unique(return_inverse=True)
        previous = torch.empty_like(wanted)
        previous[answers] = torch.cat([rows + 1 + depth for depth, rows in enumerate(plan)])
        blocks, steps, own, hidden = _places(sizes, firsts, sees_ahead=sees_ahead)
        return cls(
            num_rows=num_rows,
            num_meant=int(sizes.sum()),
            roots=roots,
            blocks=blocks,
            steps=steps,
            own=own,
            hidden=hidden,
            wanted=_rounded_up(wanted),
            previous=_rounded_up(previous),
            answers=list(answers.split([len(rows) for rows in plan])),
        )

    @property
    def places(self) -> torch.Tensor:
        """[M]: their rows in the pass."""
        return torch.arange(self.num_rows, self.num_rows + len(self.blocks))


def _places(
    sizes: torch.Tensor, firsts: torch.Tensor, *, sees_ahead: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`blocks`, `steps`, `own` and `hidden` of a `BlockLayout` for blocks of `sizes` [B], which begin at the places
    `firsts` [B]."""
    blocks = torch.arange(len(sizes)).repeat_interleave(sizes)
    steps = torch.arange(len(blocks)) - firsts[blocks] + 1
    offsets = torch.arange(int(sizes.max()) if len(blocks) else 0)
    own = firsts[blocks, None] + torch.minimum(offsets, sizes[blocks, None] - 1)
    hidden = offsets >= (sizes[blocks] if sees_ahead else steps)[:, None]
    further = torch.arange(len(blocks), len(blocks) + -len(blocks) % ROW_MULTIPLE)[:, None].expand(-1, len(offsets))
    return (
        _rounded_up(blocks),
        torch.cat([steps, torch.ones_like(further[:, 0])]) if len(further) else steps,
        torch.cat([own, further]),
        torch.cat([hidden, torch.zeros_like(further, dtype=torch.bool)]),
    )


def _rounded_up(rows: torch.Tensor) -> torch.Tensor:
    """[Q] -> a number of rows that ROW_MULTIPLE divides: the last one again and again."""
    return torch.cat([rows, rows[-1:].expand(-len(rows) % ROW_MULTIPLE)])


class BlockAttention:
    """A `LayerAttend` (`heads.block`) over a `BlockLayout`, in any number of layers."""

    def __init__(
        self,
        layout: BlockLayout,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        together: bool | None = None,
    ) -> None:
        """`lengths` of the packed sequences. `together`: as `heads.unroll.UnrolledAttention` has it."""
        self._layout = layout
        self._device = torch.device(device)
        self._starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self._together = self._device.type != "cpu" if together is None else together
        self._groups: dict[Asking, list[_Group]] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: Asking
    ) -> torch.Tensor:
        if asking not in self._groups:
            self._groups[asking] = self._asking(asking)
        groups, num_rows = self._groups[asking], self._layout.num_rows
        outputs = []
        for group, queries in zip(groups, query.split([len(group.rows) for group in groups]), strict=True):
            outputs.append(
                attend_packed(
                    queries,
                    key[:num_rows],
                    value[:num_rows],
                    key[num_rows:][group.own],
                    value[num_rows:][group.own],
                    group.rows,
                    starts=self._starts,
                    bounds=group.bounds,
                    together=self._together,
                    own_hidden=group.hidden,
                )
            )
        return torch.cat(outputs)

    def _asking(self, asking: Asking) -> list[_Group]:
        """Text rows, which have no places of their own to see, and places."""
        layout = self._layout
        if asking == "places":
            return [self._of_places(torch.arange(len(layout.blocks)))]
        rows = layout.wanted if asking == "wanted" else torch.arange(layout.num_rows + len(layout.blocks))
        text, places = rows[rows < layout.num_rows], rows[rows >= layout.num_rows] - layout.num_rows
        none = torch.zeros(len(text), 0, dtype=torch.int64)
        return [self._group(text, none, none.bool()), self._of_places(places)]

    def _of_places(self, places: torch.Tensor) -> _Group:
        layout = self._layout
        return self._group(layout.roots[layout.blocks[places]], layout.own[places], layout.hidden[places])

    def _group(self, rows: torch.Tensor, own: torch.Tensor, hidden: torch.Tensor) -> _Group:
        return _Group(
            rows=sent(rows, self._device),
            bounds=query_bounds(self._starts, rows),
            own=sent(own, self._device),
            hidden=sent(hidden, self._device) if hidden.any() else None,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """Rows that ask: the text row up to which each sees [Q], where each sequence's begin, and the places that each may
    see [Q, S] but for the `hidden` ones [Q, S]."""

    rows: torch.Tensor
    bounds: list[int]
    own: torch.Tensor
    hidden: torch.Tensor | None
