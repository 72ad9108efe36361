"""What training hands a head, and what it gets back: packed text with the target's states, and a state a row and step.

The attention is that of decoding, taught: causal over the true prefix, plus a diagonal of the head's own steps. At step
0 every row gives a key and a value, computed from the target's features: the context. At step s a row attends to the
context up to its own position and to its own rows of steps 1..s (the diagonal), exactly what it would see when
decoding. Rows are packed: sequences lie one after another, without padding.

Shapes: R packed rows, Q query rows, G query heads a key-value head, Hkv key-value heads, D head dimension,
T context rows of one sequence, S diagonal steps so far, H hidden, C draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from heads.transfer import sent

QUERY_MULTIPLE, CONTEXT_MULTIPLE = 16, 32
"""What numbers of rows are rounded up to in the attention of one sequence."""
MOST_PADDING = 2
"""Products of padded sequences side by side may be so many times those of the sequences one by one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Packed sequences: token_ids [R], loss_mask [R] bool, taps [R, taps * H], last [R, H] and log_normalizer [R].

    `last` is the state that feeds the target's LM head (after its final norm), `log_normalizer` the log-sum-exp of
    the target's logits over its whole vocabulary; None where only a law over the draft vocabulary is asked for.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    lengths: tuple[int, ...]
    taps: torch.Tensor
    last: torch.Tensor
    log_normalizer: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.numel()

    def rounded_up(self, multiple: int) -> Batch:
        """The same with a further sequence, which counts nowhere, up to a number of rows that `multiple` divides."""
        missing = -len(self) % multiple
        if not missing:
            return self
        states = {name: functional.pad(getattr(self, name), (0, 0, 0, missing)) for name in ("taps", "last")}
        rows = {name: functional.pad(getattr(self, name), (0, missing)) for name in ("token_ids", "loss_mask")}
        normalizer = None if self.log_normalizer is None else functional.pad(self.log_normalizer, (0, missing))
        return Batch(lengths=(*self.lengths, missing), log_normalizer=normalizer, **states, **rows)

    @property
    def positions(self) -> torch.Tensor:
        """[R]: each row's place in its own sequence."""
        return sent(torch.cat([torch.arange(length) for length in self.lengths]), self.token_ids.device)

    @property
    def following(self) -> torch.Tensor:
        """[R]: each row's next token. Wrong in a sequence's last row, which never counts and which none attends to."""
        return self.token_ids.roll(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnrolledStep:
    """A head's answer at the planned rows of one step.

    states [Q, W]: what its LM head reads; weight [C, W]: that LM head. auxiliary [Q]: a further loss of each row.
    """

    states: torch.Tensor
    weight: torch.Tensor
    auxiliary: torch.Tensor | None = None

    def logits(self) -> torch.Tensor:
        """[Q, C]."""
        return self.states @ self.weight.to(self.states.dtype).T


class UnrolledAttention:
    """An `Attend` (`heads.layers`): the first call lays down the context, later ones add a diagonal step.

    Sequences are attended one by one on a CPU, whose time is that of the arithmetic, and side by side in one padded
    product on a GPU (`together`), whose time is that of the launches.
    """

    def __init__(
        self, lengths: Sequence[int], rows: torch.Tensor, host_rows: torch.Tensor, *, together: bool | None = None
    ) -> None:
        """`lengths` of the packed sequences; `rows` [Q] ascending indices of the context rows that are queries, and the
        same in CPU memory, by which the sequences are cut. `together`: None for what the device is good at."""
        self._starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self._rows = rows
        self._bounds = self._cut(host_rows)
        self._context: tuple[torch.Tensor, torch.Tensor] | None = None
        self._diagonal: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._together = rows.device.type != "cpu" if together is None else together

    def keep(self, kept: torch.Tensor, host_rows: torch.Tensor) -> None:
        """Go on with some of the query rows: `kept` indexes into the present ones, `host_rows` are they."""
        self._rows = self._rows[kept]
        self._bounds = self._cut(host_rows)
        self._diagonal = [(key[kept], value[kept]) for key, value in self._diagonal]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [Q, Hq, D]; key and value [R, Hkv, D] on the first call, [Q, Hkv, D] later -> [Q, Hq, D]."""
        if self._context is None:
            self._context = (key, value)
        else:
            self._diagonal.append((key, value))
        context_key, context_value = self._context
        if self._diagonal:
            diagonal_key = torch.stack([key for key, _ in self._diagonal], dim=1)  # [Q, S, Hkv, D]
            diagonal_value = torch.stack([value for _, value in self._diagonal], dim=1)
        else:
            diagonal_key = diagonal_value = query.new_zeros(query.shape[0], 0, *context_key.shape[1:])
        return attend_packed(
            query,
            context_key,
            context_value,
            diagonal_key,
            diagonal_value,
            self._rows,
            starts=self._starts,
            bounds=self._bounds,
            together=self._together,
        )

    def _cut(self, host_rows: torch.Tensor) -> list[int]:
        return query_bounds(self._starts, host_rows)


def query_bounds(starts: Sequence[int], host_rows: torch.Tensor) -> list[int]:
    """Where each sequence's queries begin, and the last one's end, of ascending rows [Q] of the context. `starts` of
    the sequences, and the last one's end."""
    bounds: list[int] = torch.searchsorted(host_rows, torch.tensor(starts)).tolist()
    return bounds


def attend_packed(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    rows: torch.Tensor,
    *,
    starts: Sequence[int],
    bounds: Sequence[int],
    together: bool,
    own_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [Q, Hq, D], context [R, Hkv, D] of packed sequences, own [Q, S, Hkv, D] of each query -> [Q, Hq, D].

    A query sees its sequence up to the context row `rows` [Q], ascending, and its own S rows, but for those that
    `own_hidden` [Q, S] says. starts, bounds: as in `query_bounds`. together: see `UnrolledAttention`.
    """
    if together and (padding := _Padding.of(starts, bounds)) is not None:
        return _attend_together(query, context_key, context_value, own_key, own_value, rows, padding, own_hidden)
    num_rows, outputs = len(context_key), []
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            continue
        asking = _window(first, last, QUERY_MULTIPLE, len(query))
        seen = _window(starts[index], starts[index + 1], CONTEXT_MULTIPLE, num_rows)
        attended = attend_sequence(
            query[asking],
            context_key[seen],
            context_value[seen],
            own_key[asking],
            own_value[asking],
            rows[asking] - seen.start,
            start=starts[index] - seen.start,
            own_hidden=None if own_hidden is None else own_hidden[asking],
        )
        outputs.append(attended[first - asking.start : last - asking.start])
    return torch.cat(outputs) if outputs else torch.zeros_like(query)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Padding:
    """Sequences side by side, N of those that have queries, in CPU memory: each query's row and each context row among
    all, the last ones again and again [N, Qmax] and [N, Tmax]; where the real queries then lie [Q]; and the context row
    at which each sequence starts [N]."""

    queries: torch.Tensor
    context: torch.Tensor
    back: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, starts: Sequence[int], bounds: Sequence[int]) -> _Padding | None:
        """None where padding would cost more arithmetic than it saves launches."""
        spans = [
            (first, last, starts[index], starts[index + 1])
            for index, (first, last) in enumerate(itertools.pairwise(bounds))
            if first < last
        ]
        if len(spans) < 2:
            return None
        first, last, begin, end = torch.tensor(spans).unbind(1)
        num_queries, num_rows = int((last - first).max()), int((end - begin).max())
        if len(spans) * num_queries * num_rows > MOST_PADDING * int(((last - first) * (end - begin)).sum()):
            return None
        places = torch.arange(num_queries)
        return cls(
            queries=torch.minimum(first[:, None] + places, last[:, None] - 1),
            context=torch.minimum(begin[:, None] + torch.arange(num_rows), end[:, None] - 1),
            back=(places < (last - first)[:, None]).flatten().nonzero().flatten(),
            starts=begin,
        )


def _attend_together(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    diagonal_key: torch.Tensor,
    diagonal_value: torch.Tensor,
    rows: torch.Tensor,
    padding: _Padding,
    own_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """All sequences as `attend_sequence` attends to one: query [Q, Hq, D], diagonal [Q, S, Hkv, D] and own_hidden
    [Q, S] of the queries, context [R, Hkv, D], rows [Q] of the context -> [Q, Hq, D]."""
    num_sequences, num_queries = padding.queries.shape
    length = padding.context.shape[1]
    (_, num_heads, head_dim), num_kv_heads = query.shape, context_key.shape[1]
    asked, seen, back, starts = (
        sent(one, query.device)
        for one in (padding.queries.flatten(), padding.context.flatten(), padding.back, padding.starts)
    )
    positions = rows[asked].view(num_sequences, num_queries) - starts[:, None]
    keys = context_key[seen].view(num_sequences, length, num_kv_heads, head_dim)
    values = context_value[seen].view(num_sequences, length, num_kv_heads, -1)
    own_keys, own_values = (
        one[asked].unflatten(0, (num_sequences, num_queries)) for one in (diagonal_key, diagonal_value)
    )  # [N, Q, S, Hkv, D]
    folded = query[asked].view(num_sequences, num_queries, num_kv_heads, -1, head_dim).transpose(1, 2)
    scaled = (folded * head_dim**-0.5).reshape(num_sequences, num_kv_heads, -1, head_dim)  # [N, Hkv, Q*G, D]
    grouped = scaled.view(num_sequences, num_kv_heads, num_queries, -1, head_dim)  # [N, Hkv, Q, G, D]
    scores = (scaled @ keys.permute(0, 2, 3, 1)).view(num_sequences, num_kv_heads, num_queries, -1, length)
    hidden = torch.arange(length, device=query.device) > positions[..., None]  # [N, Q, T]; padding lies behind all
    bias = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, torch.finfo(scores.dtype).min)
    scores = scores + bias[:, None, :, None, :]
    own = grouped @ own_keys.permute(0, 3, 1, 4, 2)  # [N, Hkv, Q, G, S]
    if own_hidden is not None:
        masked = own_hidden[asked].unflatten(0, (num_sequences, num_queries))
        own = own.masked_fill(masked[:, None, :, None, :], torch.finfo(own.dtype).min)
    weights = torch.cat([scores, own], dim=-1).softmax(dim=-1)
    attended = weights[..., :length].reshape(num_sequences, num_kv_heads, -1, length) @ values.transpose(1, 2)
    attended = attended.view_as(grouped) + weights[..., length:] @ own_values.permute(0, 3, 1, 2, 4)
    gathered: torch.Tensor = attended.transpose(1, 2).reshape(-1, num_heads, head_dim)[back]
    return gathered


def _window(first: int, last: int, multiple: int, size: int) -> slice:
    """Of `size` rows, those from `first` to before `last`, and more up to a number that `multiple` divides, if there
    are as many: a CPU's matrix products are compiled for each number anew."""
    length = min(size, -(-(last - first) // multiple) * multiple)
    start = min(first, size - length)
    return slice(start, start + length)


def attend_sequence(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    diagonal_key: torch.Tensor,
    diagonal_value: torch.Tensor,
    positions: torch.Tensor,
    *,
    start: int = 0,
    own_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: query [Q, Hq, D], context [T, Hkv, D], diagonal [Q, S, Hkv, D], positions [Q] -> [Q, Hq, D].

    own_hidden [Q, S]: what of the diagonal a query does not see.

    The sequence's first row is `start` in the context, which may have rows of others around it. So may the queries:
    what these get means nothing, but is finite.
    """
    num_queries, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = context_key.shape
    folded = query.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, Q, G, D]
    scaled = (folded * head_dim**-0.5).reshape(num_kv_heads, -1, head_dim)  # [Hkv, Q*G, D]
    scores = (scaled @ context_key.permute(1, 2, 0)).view(num_kv_heads, num_queries, -1, length)
    place = torch.arange(length, device=positions.device)
    hidden = (place > positions[:, None]) | (place < start)  # [Q, T]
    bias = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, torch.finfo(scores.dtype).min)
    scores = scores + bias[:, None, :]
    grouped = scaled.view(num_kv_heads, num_queries, -1, head_dim)  # [Hkv, Q, G, D]
    own = grouped @ diagonal_key.permute(2, 0, 3, 1)  # [Hkv, Q, G, S]
    if own_hidden is not None:
        own = own.masked_fill(own_hidden[:, None, :], torch.finfo(own.dtype).min)
    weights = torch.cat([scores, own], dim=-1).softmax(dim=-1)
    attended = weights[..., :length].reshape(num_kv_heads, -1, length) @ context_value.transpose(0, 1)
    attended = attended.view_as(grouped) + weights[..., length:] @ diagonal_value.permute(2, 0, 1, 3)
    return attended.transpose(0, 1).reshape(num_queries, num_heads, head_dim)
