"""Sampling parameters and the one processor stack that turns the target's logits into the law of its next
token.

Everything that draws from the target, plain decoding and verification of draft trees alike, goes through
`Processor.scores` with the node's own path, so that penalties and bans see the tokens before the node and
nothing else. Order: repetition penalty, frequency and presence penalties, logit bias, bans (bad words,
repeated n-grams, end tokens before `min_tokens`, what a constraint does not allow), temperature, top-k,
top-p, min-p. Transformers' processors give the same scores in this order.

Knows nothing about models, trees or text; stopping lives in `infer/stopping.py`.

Shapes: V vocabulary (rows of the LM head), K candidates.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infer.exactness import find_exactness

if TYPE_CHECKING:
    from infer.grammar import Constraint

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding (the convention of vLLM): dividing by them would overflow."""

CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Parameters that say which texts an answer may be; a request has at most one."""

MAX_LOGPROBS = 20

_HEAD_SIZES = (256, 2048)
_ROUNDING = 1e-5
_NUM_SEEDS = 1 << 63
_LARGEST = 1e30
"""Numbers beyond it overflow float32 once they are multiplied by a score."""


class SamplingError(ValueError):
    """A row of scores from which nothing can be drawn: it should fail its own request and no other."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens and when it ends; checked when built.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None means a random one,
    reported with the result. `stop` ends at a text, `stop_token_ids` at a token; both, and the end tokens of
    the model, are ignored for the first `min_tokens` tokens. `presence_penalty` and `frequency_penalty` count
    output tokens only; `repetition_penalty` and `no_repeat_ngram_size` see the prompt as well. `bad_words`
    are token sequences.

    `n` answers are drawn for the prompt, each with noise of its own. `logprobs` None is off; k gives the
    log-probability of each token, and of the k likeliest in its place. `exactness` and `rule` None take the
    engine's. `json_schema` (a mapping, or JSON), `regex` or `grammar` (Lark, as llguidance reads it) says which
    texts the answer may be: it ends where the text is complete, or is cut at `max_tokens`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    n: int = 1
    logprobs: int | None = None
    exactness: str | None = None
    rule: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_sequences()
        self._check_exactness()
        self._check_constraint()
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as parsed JSON; a name that is not a field is refused, never dropped."""
        names = [item.name for item in fields(cls)]
        for name in values:
            if name not in names:
                nearest = difflib.get_close_matches(str(name), names, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(names)}"
                raise ValueError(f"unknown sampling parameter {name!r}{hint}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Which of `CONSTRAINTS` is set, and its text."""
        for name in CONSTRAINTS:
            text = getattr(self, name)
            if text is not None:
                return name, text
        return None

    def _check_numbers(self) -> None:
        self._number("temperature", minimum=0.0)
        self._number("top_p", minimum=0.0, maximum=1.0, open_minimum=True)
        self._number("min_p", minimum=0.0, maximum=1.0)
        self._number("repetition_penalty", minimum=0.0, open_minimum=True)
        self._number("presence_penalty", minimum=-2.0, maximum=2.0)
        self._number("frequency_penalty", minimum=-2.0, maximum=2.0)
        self._count("top_k", minimum=0, note=" (0 turns it off)")
        self._count("max_tokens", minimum=1)
        self._count("min_tokens", minimum=0)
        self._count("no_repeat_ngram_size", minimum=0, note=" (0 turns it off)")
        self._count("n", minimum=1)
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise ValueError(
                f"logprobs must be None (off) or the number of alternatives to show, 0 to {MAX_LOGPROBS}, "
                f"got {self.logprobs!r}"
            )
        if self.seed is not None and not (_is_int(self.seed) and -_NUM_SEEDS <= self.seed < _NUM_SEEDS):
            raise ValueError(f"seed must be an integer of at most 64 bits (signed) or None, got {self.seed!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")

    def _number(self, name: str, *, minimum: float, maximum: float = math.inf, open_minimum: bool = False) -> None:
        value = getattr(self, name)
        interval = f"{'(' if open_minimum else '['}{minimum:g}, {maximum:g}{')' if maximum == math.inf else ']'}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number in {interval}, got {value!r}")
        if not minimum <= value <= maximum or (open_minimum and value == minimum):
            raise ValueError(f"{name} must be in {interval}, got {value!r}")
        if value > _LARGEST or (open_minimum and value < 1 / _LARGEST):
            raise ValueError(f"{name} must be from {1 / _LARGEST:g} to {_LARGEST:g} to count in float32, got {value!r}")
        object.__setattr__(self, name, float(value))

    def _count(self, name: str, *, minimum: int, note: str = "") -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}{note}, got {value!r}")

    def _check_sequences(self) -> None:
        stop = _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        bad_words = tuple(_token_ids("bad_words", word) for word in _as_tuple("bad_words", self.bad_words))
        if () in bad_words:
            raise ValueError("bad_words must hold non-empty sequences of token ids, got an empty one")
        object.__setattr__(self, "bad_words", bad_words)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def _check_exactness(self) -> None:
        if self.exactness is not None:
            find_exactness(self.exactness)
        if self.rule is not None and (not isinstance(self.rule, str) or not self.rule):
            raise ValueError(f"rule must be the name of a verification rule or None, got {self.rule!r}")

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: an answer takes at most one constraint")
        for name in given:
            text = getattr(self, name)
            if name == "json_schema":
                text = _schema_text(text)
                object.__setattr__(self, name, text)
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} must be a text that is not empty (None turns it off), got {text!r}")
            if self.ignore_eos:
                raise ValueError(
                    f"{name} and ignore_eos exclude each other: once the text is complete, only an end token may follow"
                )


class Processor:
    """The processor stack of one request: what its parameters make of a row of logits, given the tokens
    before it.

    Holds only what is fixed for the request, so one instance serves all nodes of a tree, in any order.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        constraint: Constraint | None = None,
    ) -> None:
        _check_ids_in_vocabulary(params, vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.constraint = constraint
        self._prompt_ids = list(prompt_ids)
        self._prompt_set = frozenset(self._prompt_ids)
        self._end_ids = sorted({*eos_ids, *params.stop_token_ids})
        self._needs_history = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or bool(params.bad_words)
            or params.no_repeat_ngram_size > 0
        )
        self._bias = self._bias_tensors(params.logit_bias)

    def scores(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Processed logits [V] float32, divided by the temperature, with -inf for tokens that must not be
        drawn.

        `logits` [V] is never written to, but the result may share its memory: treat both as read-only.
        `output_ids` are the request's tokens so far followed by the path to the node that `logits` belongs
        to. Greedy decoding is penalised and banned but neither scaled nor truncated (that would not move the
        argmax).
        """
        assert logits.shape == (self.vocab_size,), f"logits {tuple(logits.shape)}, vocabulary {self.vocab_size}"
        row = logits.to(torch.float32)
        if self._writes(len(output_ids)):
            row = row.clone() if row is logits else row
            self._edit(row, output_ids)
        if self.params.greedy:
            return row
        if self.params.temperature != 1.0:
            row = row / _divisor(self.params.temperature, row.device)
        return self._truncate(row)

    @property
    def only_scales(self) -> bool:
        """Whether scores are the logits over the temperature (greedy: the logits) whatever tokens came before."""
        params = self.params
        truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        edits = self._needs_history or self._bias is not None or self.constraint is not None or params.min_tokens > 0
        return not (edits or truncates)

    def _writes(self, num_output_ids: int) -> bool:
        return (
            self._needs_history
            or self._bias is not None
            or self.constraint is not None
            or num_output_ids < self.params.min_tokens
        )

    def _edit(self, row: Tensor, output_ids: Sequence[int]) -> None:
        """Apply penalties, bias and bans to `row` [V] in place."""
        if self._needs_history:
            self._penalise(row, output_ids)
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        banned = self._banned(output_ids)
        if banned:
            row[torch.tensor(sorted(banned), device=row.device)] = -math.inf
        if self.constraint is not None:
            row.masked_fill_(~self.constraint.allowed(output_ids, row.device), -math.inf)
            if bool(torch.isneginf(row).all()):
                raise SamplingError(
                    f"no token is left after {len(output_ids)}: the {self.constraint.name} allows none but those that "
                    "min_tokens, bad_words, logit_bias or no_repeat_ngram_size take away"
                )

    def _penalise(self, row: Tensor, output_ids: Sequence[int]) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            seen = self._known(self._prompt_set.union(output_ids))
            ids = torch.tensor(seen, dtype=torch.int64, device=row.device)
            values = row[ids]
            penalty = params.repetition_penalty
            row[ids] = torch.where(values < 0, values * penalty, values / penalty)
        if output_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            counts = Counter(output_ids)
            seen = self._known(counts)
            ids = torch.tensor(seen, dtype=torch.int64, device=row.device)
            num_uses = torch.tensor([counts[token] for token in seen], dtype=torch.float32, device=row.device)
            row[ids] -= params.frequency_penalty * num_uses
            row[ids] -= params.presence_penalty

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        """The ids that the LM head has; prompts of some models hold others, which cannot be drawn anyway."""
        return [token for token in token_ids if token < self.vocab_size]

    def _banned(self, output_ids: Sequence[int]) -> set[int]:
        params = self.params
        banned: set[int] = set()
        if params.bad_words or params.no_repeat_ngram_size:
            context = [*self._prompt_ids, *output_ids]
            banned.update(_bad_word_ends(context, params.bad_words))
            banned.update(_ngram_ends(context, params.no_repeat_ngram_size))
        if len(output_ids) < params.min_tokens:
            banned.update(self._end_ids)
        return {token for token in banned if token < self.vocab_size}

    def _truncate(self, row: Tensor) -> Tensor:
        params = self.params
        if params.top_k and params.top_k < self.vocab_size:
            row = row.masked_fill(row < torch.topk(row, params.top_k).values[-1], -math.inf)
        if params.top_p < 1.0:
            row = top_p_filter(row, params.top_p)
        if params.min_p > 0.0:
            token_probs = probs(row)
            row = row.masked_fill(token_probs < params.min_p * token_probs.amax(), -math.inf)
        return row

    def _bias_tensors(self, logit_bias: Mapping[int, float] | None) -> tuple[Tensor, Tensor] | None:
        if not logit_bias:
            return None
        ids = torch.tensor(list(logit_bias), dtype=torch.int64, device=self.device)
        return ids, torch.tensor(list(logit_bias.values()), dtype=torch.float32, device=self.device)


@lru_cache(maxsize=64)
def _divisor(temperature: float, device: torch.device) -> Tensor:
    """As a tensor: by a number CUDA would multiply with its reciprocal, which rounds otherwise than a division."""
    return torch.tensor(temperature, dtype=torch.float32, device=device)


def probs(scores: Tensor) -> Tensor:
    """The distribution [.., V] float32 that the argmax of `scores` and Gumbel noise follows (temperature > 0)."""
    return torch.softmax(scores, dim=-1, dtype=torch.float32)


def pick(total: Tensor) -> int:
    """The token of the largest of `total` [V], the lowest on ties; SamplingError where none can be drawn."""
    # argmax returns the first maximum and prefers NaN, so one look at the winner vouches for the whole row. numpy's
    # does the same, in a tenth of the time of torch's on a CPU.
    token = int(total.numpy().argmax() if total.device.type == "cpu" else total.argmax())
    value = float(total[token])
    if not math.isfinite(value):
        raise SamplingError(
            f"cannot draw a token: the largest of {total.shape[-1]} processed scores is {value} "
            "(NaN or inf: the model overflowed; -inf: the request's filters leave no token)"
        )
    return token


def top_p_filter(row: Tensor, top_p: float) -> Tensor:
    """Set all of `row` [V] to -inf but the smallest set of top tokens whose mass reaches `top_p`.

    The cut lies where transformers puts it, ties and rounding included: the largest scores decide only where
    that is beyond doubt, and the sort of the whole vocabulary (which transformers does) decides the rest.
    """
    for head_size in _HEAD_SIZES:
        lowest = _top_p_from_head(row, top_p, head_size) if head_size < row.shape[-1] else None
        if lowest is not None:
            return row.masked_fill(row < lowest, -math.inf)
    ascending, order = torch.sort(row, descending=False)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    removed[-1] = False
    return row.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), -math.inf)


def _top_p_from_head(row: Tensor, top_p: float, head_size: int) -> float | None:
    """The lowest score kept, or None if the largest `head_size` scores do not settle it."""
    values, ids = torch.topk(row, head_size)
    mass = probs(row)[ids].cumsum(dim=-1, dtype=torch.float64)
    # Sums in another order differ by rounding: a cut this close to the limit is left to the full sort.
    if bool(((mass - top_p).abs() < _ROUNDING).any()) or not float(mass[-1]) > top_p:
        return None
    num_kept = int((mass < top_p).sum()) + 1
    if num_kept == head_size or bool(values[num_kept] == values[num_kept - 1]):
        return None
    return float(values[num_kept - 1])


def _bad_word_ends(context: list[int], bad_words: Iterable[tuple[int, ...]]) -> set[int]:
    """Tokens that would complete a bad word after `context`."""
    return {word[-1] for word in bad_words if len(word) == 1 or tuple(context[-(len(word) - 1) :]) == word[:-1]}


def _ngram_ends(context: list[int], size: int) -> set[int]:
    """Tokens that would repeat an n-gram of `context`."""
    if size == 0 or len(context) < size:
        return set()
    if size == 1:
        return set(context)
    prefix = context[-(size - 1) :]
    ends: set[int] = set()
    last = len(context) - 1
    start = size - 2
    while True:
        try:
            # `list.index` runs at C speed, which matters in contexts of thousands of tokens.
            start = context.index(prefix[-1], start, last)
        except ValueError:
            return ends
        if context[start - size + 2 : start + 1] == prefix:
            ends.add(context[start + 1])
        start += 1


def _check_ids_in_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    named_ids = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias or ()),
        "bad_words": tuple(token for word in params.bad_words for token in word),
    }
    for name, token_ids in named_ids.items():
        outside = [token for token in token_ids if token >= vocab_size]
        if outside:
            raise ValueError(f"{name} holds ids outside the vocabulary: {outside[:5]}, expected 0..{vocab_size - 1}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    token_ids = _as_tuple(name, value)
    for token in token_ids:
        if not _is_int(token) or token < 0:
            raise ValueError(f"{name} must hold token ids (integers of at least 0), got {token!r}")
    return token_ids


def _schema_text(schema: object) -> str:
    """A JSON schema as compact JSON. The order of its keys stays: it is the order in which an answer lists them."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema must be a mapping or JSON, got {schema!r:.80}: {error}") from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema must be a JSON object, got {schema!r:.80}")
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain_mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema cannot be written as JSON: {error}") from None


def _plain_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is not a JSON value")


def _checked_bias(logit_bias: object) -> dict[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {logit_bias!r}")
    checked: dict[int, float] = {}
    for token, value in logit_bias.items():
        # JSON has only string keys, so "42" is how clients spell the id 42.
        token_id = int(token) if isinstance(token, str) and token.isdecimal() else token
        if not _is_int(token_id) or token_id < 0:
            raise ValueError(f"logit_bias must map token ids (integers of at least 0) to numbers, got key {token!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= _LARGEST:
            raise ValueError(
                f"logit_bias must map token ids to numbers up to {_LARGEST:g}, got {value!r} for {token!r}"
            )
        checked[token_id] = float(value)
    return checked
