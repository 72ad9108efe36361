"""Constraints: which tokens may follow, so that the answer ends up as a text of a JSON schema, a regex or a grammar.

The parser is llguidance's. What is made of it here is a pure function of the tokens before: a tree's nodes are visited
in any order, and none leaves a trace in the next.

Shapes: V rows of the LM head.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infer.sampling import SamplingError, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED = 64
_MAX_STATES = 16
_MAX_REASON = 300

# Any token that keeps to the text may be drawn. llguidance would allow a single one wherever the text is forced (its
# own tokenization of it), which is another law than the target's on the texts that may be.
_ANY_TOKENIZATION = '\n%llguidance {"no_forcing": true}'
# JSON allows any amount of white space, and small models may then write nothing else. A schema may have its own bounds.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class Constraint:
    """What one request may write: `allowed` says which tokens can follow `output_ids`, and depends on nothing else."""

    def __init__(self, start: LLMatcher, *, name: str, eos_ids: Collection[int], vocab_size: int) -> None:
        self.name = name
        self._start = start
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        # Parser states along the path visited last, by number of tokens; none is ever advanced. Going back means to
        # copy an earlier one: llguidance's own rollback may leave the mask of the text that was taken back.
        self._path: list[int] = []
        self._states: list[tuple[int, LLMatcher]] = []

    def allowed(self, output_ids: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Tokens [V] bool that may follow `output_ids`; end tokens are among them where the text may be complete.

        After an end token only end tokens follow. Raises SamplingError where no token can follow, or the parser gives
        up.
        """
        path = list(output_ids)
        if not self._eos_ids.isdisjoint(path):
            row = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
            row[sorted(self._eos_ids)] = True
            return row
        matcher = self._state(path)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise SamplingError(f"no token can follow in this {self.name}: {_reason(matcher.get_error())}")
        # Rows beyond the parser's bits are padded with zeros.
        row = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
        return row.to(device).bool()

    def _state(self, path: list[int]) -> LLMatcher:
        """The parser after `path`."""
        num_common = _num_common(self._path, path)
        while self._states and self._states[-1][0] > num_common:
            self._states.pop()
        num_read, matcher = self._states[-1] if self._states else (0, self._start)
        self._path = path
        if num_read < len(path):
            matcher = self._advanced(matcher, path[num_read:])
            self._states.append((len(path), matcher))
            del self._states[:-_MAX_STATES]
        return matcher

    def _advanced(self, matcher: LLMatcher, tokens: list[int]) -> LLMatcher:
        matcher = matcher.deep_copy()
        num_read = matcher.try_consume_tokens(tokens)
        if matcher.is_error():
            raise SamplingError(f"the parser of this {self.name} gave up: {_reason(matcher.get_error())}")
        assert num_read == len(tokens), (
            f"token {tokens[num_read]} cannot follow in this {self.name}, so its probability was 0: "
            "the node should not have been visited"
        )
        return matcher


class Grammars:
    """Makes the constraints of requests to one target, whose LM head has `vocab_size` rows."""

    def __init__(self, tokenizer: Any, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._parser_tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, str, frozenset[int]], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # requests are prepared in several threads; two may compile the same text

    def constraint(self, params: SamplingParams, *, eos_ids: Collection[int]) -> Constraint | None:
        """The constraint that `params` ask for, None if none; `eos_ids` end the answer.

        Raises ValueError if it cannot be kept: a text that is no schema, regex or grammar, a part of one that is not
        supported, no end token or tokenizer, or no llguidance installed.
        """
        if params.constraint is None:
            return None
        name, text = params.constraint
        shared = self._start(name, text, frozenset(eos_ids))
        with self._lock:  # a parser may be read by one thread at a time
            start = shared.deep_copy()
        return Constraint(start, name=name, eos_ids=eos_ids, vocab_size=self._vocab_size)

    def _start(self, name: str, text: str, eos_ids: frozenset[int]) -> LLMatcher:
        """The parser before the first token; shared, so only to be copied."""
        key = (name, text, eos_ids)
        start = self._compiled.get(key)
        if start is None:
            start = _compile(name, text, self._parser_tokenizer(name, eos_ids))
        with self._lock:
            self._compiled[key] = start
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return start

    def _parser_tokenizer(self, name: str, eos_ids: frozenset[int]) -> LLTokenizer:
        if eos_ids not in self._parser_tokenizers:
            self._parser_tokenizers[eos_ids] = _read_tokenizer(name, self._tokenizer, eos_ids)
        return self._parser_tokenizers[eos_ids]


def _read_tokenizer(name: str, tokenizer: Any, eos_ids: frozenset[int]) -> LLTokenizer:
    """The vocabulary as llguidance reads it; takes a quarter of a second or more."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise ValueError(f"{name} needs the package llguidance: pip install 'headstart[grammar]'") from error
    if tokenizer is None:
        raise ValueError(f"{name} needs the target's tokenizer, and this target was given none")
    if not eos_ids:
        raise ValueError(f"{name} needs an end token for the text that is complete, and this target has none")
    try:
        return from_tokenizer(tokenizer, eos_token=sorted(eos_ids))
    except ValueError as error:
        raise ValueError(f"{name} cannot be kept with this target's tokenizer: {_reason(str(error))}") from error


def _compile(name: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, _to_llguidance(name, text), log_level=0)
    except ValueError as error:
        raise ValueError(f"{name} {text!r:.80} cannot be kept: {_reason(str(error))}") from None
    if matcher.is_error():
        raise ValueError(f"{name} {text!r:.80} cannot be kept: {_reason(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"{name} {text!r:.80} cannot be kept: no text fits it, or it is too complex")
    return matcher


def _to_llguidance(name: str, text: str) -> str:
    """The constraint in llguidance's own form, in which its parts keep to one set of options."""
    from llguidance import LLMatcher

    if name == "grammar":
        return LLMatcher.grammar_from_lark(text + _ANY_TOKENIZATION)
    if name == "regex":
        if (len(text) - len(text.rstrip("\\"))) % 2:
            raise ValueError("it ends within an escape: write two backslashes for one")
        return LLMatcher.grammar_from_lark(_lark_of(LLMatcher.grammar_from_regex(text)) + _ANY_TOKENIZATION)
    compiled = LLMatcher.grammar_from_json_schema(
        text, defaults={} if "x-guidance" in json.loads(text) else {"whitespace_pattern": _WHITESPACE}
    )
    (schema,) = json.loads(compiled)["grammars"]
    start = {"lark_grammar": "start: @schema" + _ANY_TOKENIZATION}
    return json.dumps({"grammars": [start, {**schema, "name": "schema"}]})


def _lark_of(grammar: str) -> str:
    (only,) = json.loads(grammar)["grammars"]
    return str(only["lark_grammar"])


def _reason(message: str) -> str:
    """llguidance's message in one line: without the state of its parser, and the drawing of where in the text."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    told = [line for line in lines if line.strip("^ ") and not line.partition("|")[0].strip().isdigit()]
    cause = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
    return (" ".join(cause or told) or "llguidance does not say why")[:_MAX_REASON]


def _num_common(first: list[int], second: list[int]) -> int:
    """How many tokens two paths begin with alike."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
