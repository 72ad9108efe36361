"""What all ways to let a target write training data have in common: attempts in a fixed order, answers taken or refused
by stated rules, and a file that grows by whole lines.

Every attempt has its own seed, derived from (seed, attempt number), and is judged only against rows kept before it, so
the data depend neither on batch size nor on interruptions. A restart continues after the last whole line.

Knows nothing about training, and about the engine only that it completes token ids.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from infer.chat import special_ids, tokenizer_hash
from infer.repetition import repeated_share
from infer.sampling import SamplingParams
from train.corpus.filters import first_repetition
from train.corpus.growing_file import GrowingFile

OnTokens = Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class WritingConfig:
    """What decides the answers. Two runs with equal settings and target write the same rows.

    An answer with more than `max_repeated_share` of its tokens in repeated 8-grams is cut where it first
    repeats itself and marked truncated, or dropped if fewer than `min_tokens_before_loop` tokens come before.
    """

    seed: int = 0
    max_answer_tokens: int = 256
    greedy_share: float = 0.5
    temperature: float = 0.8
    max_repeated_share: float = 0.3
    min_tokens_before_loop: int = 32

    def __post_init__(self) -> None:
        if self.max_answer_tokens < 1:
            raise ValueError(f"max_answer_tokens must be at least 1, given {self.max_answer_tokens}")
        for name in ("greedy_share", "max_repeated_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, given {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, given {self.temperature}")


class Completed(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...


class CompletionEngine(Protocol):
    """The part of the engine used here."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Sequence[Completed]: ...


@dataclass(frozen=True, kw_only=True)
class WritingReport:
    """Counts over the whole file, earlier runs included."""

    num_kept: int
    num_attempts: int
    num_tokens: int
    dropped: dict[str, int]

    def summary(self) -> str:
        lines = [f"{self.num_kept} conversations kept of {self.num_attempts} attempts"]
        lines += [f"  {count:6d} dropped: {reason}" for reason, count in sorted(self.dropped.items(), key=_by_count)]
        return "\n".join(lines)


@dataclass(kw_only=True)
class Attempt:
    """One row in the making; a subclass says what it is made of."""

    number: int
    seed: int
    temperature: float
    domain: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answer_tokens: int = 0
    truncated: bool = False
    is_over: bool = False
    """Nothing more is to be written: it is complete, or ended early."""
    fault: str | None = None

    @property
    def active(self) -> bool:
        return self.fault is None and not self.truncated and not self.is_over

    @property
    def has_answer(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)

    def fail(self, reason: str) -> None:
        """Drop the unfinished turn; only a conversation without a finished one is lost."""
        if not self.has_answer:
            self.fault = reason
            return
        while self.messages[-1]["role"] != "assistant":
            self.messages.pop()
        self.is_over = True

    def row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "messages": self.messages,
            "id": f"{name}-{self.number}",
            "seed": self.seed,
            "temperature": self.temperature,
            "truncated": self.truncated,
            "num_answer_tokens": self.num_answer_tokens,
        }
        return row | ({"domain": self.domain} if self.domain else {})


AttemptT = TypeVar("AttemptT", bound=Attempt)
ConfigT = TypeVar("ConfigT", bound=WritingConfig)


class Writer(ABC, Generic[AttemptT, ConfigT]):
    """Writes rows to `out` with an engine that completes token ids; `run` is the loop."""

    kind: str
    """First part of a row's id."""

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: Any,
        config: ConfigT,
        out: str | Path,
        *,
        settings: dict[str, Any],
        target_fingerprint: str = "",
        rows_per_chunk: int = 128,
        max_sequence_length: int | None = None,
    ) -> None:
        """`settings`: what decides the rows besides `config`, the target and the tokenizer."""
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.rows_per_chunk = rows_per_chunk
        self.max_sequence_length = max_sequence_length
        self.special = special_ids(tokenizer)
        self.file = GrowingFile(
            Path(out),
            {
                **asdict(config),
                "target": target_fingerprint,
                "tokenizer": tokenizer_hash(tokenizer),
                **settings,
            },
        )

    def run(
        self,
        *,
        on_tokens: OnTokens = None,
        on_chunk: Callable[[WritingReport], None] | None = None,
    ) -> WritingReport:
        """Write until nothing is left to do; `on_chunk` sees counts as they grow."""
        report = self.report()
        while not self._is_enough(report.num_kept) and (numbers := self._next_numbers(report)):
            attempts = [self._begin(number) for number in numbers]
            self._write(attempts, on_tokens)
            self._commit(attempts, report.num_kept)
            report = self.report()
            if on_chunk is not None:
                on_chunk(report)
            self._check_yield(report)
        return report

    def report(self) -> WritingReport:
        return WritingReport(
            num_kept=len(self.file.rows),
            num_attempts=self.file.next_attempt,
            num_tokens=sum(row["num_answer_tokens"] for row in self.file.rows),
            dropped=dict(self.file.dropped),
        )

    @abstractmethod
    def _next_numbers(self, report: WritingReport) -> range:
        """The attempts to make together next; none when there are no more."""

    @abstractmethod
    def _begin(self, number: int) -> AttemptT: ...

    @abstractmethod
    def _write(self, attempts: list[AttemptT], on_tokens: OnTokens) -> None:
        """Fill the attempts' messages, or let them fail."""

    def _is_enough(self, num_kept: int) -> bool:
        return False

    def _judge(self, attempt: AttemptT) -> str | None:
        """A last reason to drop a finished attempt, in the order of attempts."""
        return None

    def _check_yield(self, report: WritingReport) -> None:
        """Raise ValueError if going on is pointless."""

    # For subclasses

    def _temperature(self, uniform: float) -> float:
        """A share of the answers is greedy."""
        return 0.0 if uniform < self.config.greedy_share else self.config.temperature

    def _complete(
        self, attempts: Sequence[AttemptT], prompts: Sequence[Sequence[int]], turn: int, on_tokens: OnTokens
    ) -> None:
        """Let the target answer, and take its answers where they are usable."""
        answered, fitting, params = [], [], []
        for attempt, prompt in zip(attempts, prompts, strict=True):
            if not self._fits(prompt, self.config.max_answer_tokens):
                attempt.fail("prompt too long")
                continue
            answered.append(attempt)
            fitting.append(prompt)
            params.append(self._answer_params(attempt, turn))
        for attempt, completion in zip(answered, self._generate(fitting, params, on_tokens), strict=True):
            self._take_answer(attempt, completion)

    def _answer_params(self, attempt: AttemptT, turn: int) -> SamplingParams:
        return SamplingParams(
            temperature=attempt.temperature,
            max_tokens=self.config.max_answer_tokens,
            seed=text_seed(attempt.seed, f"answer {turn}"),
        )

    def _fits(self, prompt: Sequence[int], max_tokens: int) -> bool:
        return self.max_sequence_length is None or len(prompt) + max_tokens <= self.max_sequence_length

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_tokens: OnTokens
    ) -> Sequence[Completed]:
        if not prompts:
            return []
        return self.engine.generate(prompts, params, progress=on_tokens)

    def _take_answer(self, attempt: AttemptT, completion: Completed) -> None:
        token_ids = without_end(completion.token_ids, self.special)
        truncated = completion.finish_reason == "length"
        if completion.finish_reason == "error":
            attempt.fail("answer failed")
            return
        if repeated_share(token_ids) > self.config.max_repeated_share:
            # Greedy text of small models often ends in a loop; what comes before is still the target's own.
            token_ids, truncated = token_ids[: first_repetition(token_ids)], True
            if len(token_ids) < self.config.min_tokens_before_loop:
                attempt.fail("answer loops")
                return
        text = self._decode(attempt, token_ids)
        if truncated:
            text = text.rstrip("\ufffd")  # a cut may fall between a character's bytes
        if not text.strip():
            attempt.fail("answer empty")
        elif self.special.intersection(token_ids) or "\ufffd" in text:
            attempt.fail("answer holds special tokens or broken characters")
        else:
            attempt.messages.append({"role": "assistant", "content": text})
            attempt.num_answer_tokens += len(token_ids)
            attempt.truncated = truncated

    def _decode(self, attempt: AttemptT, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def _row(self, attempt: AttemptT) -> dict[str, Any]:
        return attempt.row(f"{self.kind}-{self.config.seed}")

    def _commit(self, attempts: list[AttemptT], num_kept: int) -> None:
        """Judge in attempt order and write; attempts after the last wanted row are left for another run."""
        rows: list[dict[str, Any]] = []
        dropped = Counter[str]()
        next_attempt = attempts[0].number
        for attempt in attempts:
            if self._is_enough(num_kept + len(rows)):
                break
            next_attempt = attempt.number + 1
            fault = attempt.fault or self._judge(attempt)
            if fault is not None:
                dropped[fault] += 1
                continue
            rows.append(self._row(attempt))
        self.file.append(rows, dropped, next_attempt)


def without_end(token_ids: Sequence[int], special: frozenset[int]) -> list[int]:
    """Token ids without the end token that stopped the generation, where the engine reports it."""
    token_ids = list(token_ids)
    return token_ids[:-1] if token_ids and token_ids[-1] in special else token_ids


def text_seed(seed: int, name: int | str) -> int:
    """That of an attempt, or of a part of it. (Files that were begun go on with it: its values may not change.)"""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1


def uniforms(seed: int, number: int) -> Iterator[float]:
    for count in range(64):
        digest = hashlib.sha256(f"{seed}/{number}/uniform/{count}".encode()).digest()
        yield int.from_bytes(digest[:6]) / 2**48


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
