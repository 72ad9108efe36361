"""Training conversations written by the target itself: it completes an empty user turn, then answers it.

Every attempt has its own seed, derived from (seed, attempt number), and is judged only against rows kept
before it, so the data do not depend on batch size or on interruptions. The file grows by whole lines; a
restart continues after the last one. With a file of requests, the user turns come from there and only the
answers are written anew.

Knows nothing about training, and about the engine only that it completes token ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infer.chat import end_of_user_turn_id, render_prompt, special_ids, tokenizer_hash, user_turn_prefix
from infer.prompts import load_prompts, text_hash, user_texts
from infer.sampling import SamplingParams
from train.corpus.conversations import Conversation
from train.corpus.filters import NearDuplicates, first_repetition, prompt_fault, repeated_share

OPENINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that",
        "Write a Python program to",
        "Write a JavaScript function",
        "Write an SQL query",
        "How do I",
        "Explain what this code does:",
        "Fix the bug in this Python code:",
        "What is the difference between a list and",
    ),
    "mathematics": (
        "What is the sum of",
        "Solve for x:",
        "Solve the equation",
        "Calculate the",
        "Find the area of",
        "A train",
        "A store sells",
        "If a",
        "What is the probability",
        "Tom has",
    ),
    "question answering": (
        "What is the",
        "What are the",
        "Who was",
        "Who wrote",
        "Why do",
        "Why is",
        "How does",
        "When did",
        "Where is",
        "What causes",
        "Explain",
    ),
    "translation": (
        "Translate the following sentence into French:",
        "Translate the following sentence into Spanish:",
        "Translate this sentence to German:",
        "Translate to English:",
        'How do you say "',
    ),
    "summarising": (
        "Summarize the following text:",
        "Summarize this paragraph in one sentence:",
        "Write a short summary of the following article:",
        "Give me the key points of this passage:",
        "Rewrite the following paragraph in simpler words:",
    ),
    "retrieval": (
        "Read the passage and answer the question.\n\nPassage:",
        "Based on the following text, answer the question.\n\nText:",
        "According to the passage below,",
        "Extract all the names from the following text:",
    ),
    "chat": (
        "Write a short story about",
        "Write a poem about",
        "Write an email to",
        "Give me three tips",
        "I feel",
        "Suggest",
        "Plan a",
        "What should I",
        "Imagine you are",
        "List five",
    ),
}
"""First words put into the target's mouth for a share of the user turns, so that all domains occur."""

LONG_DOMAINS = ("summarising", "retrieval")
"""Domains whose user turn carries a passage and may be three times as long."""


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """What decides the data. Two runs with equal settings and target write the same rows.

    An answer with more than `max_repeated_share` of its tokens in repeated 8-grams is cut where it first
    repeats itself and marked truncated, or dropped if fewer than `min_tokens_before_loop` tokens come before.
    """

    num_conversations: int
    seed: int = 0
    max_prompt_tokens: int = 96
    max_answer_tokens: int = 256
    prompt_temperature: float = 0.9
    prompt_top_p: float = 0.95
    prompt_top_k: int = 200  # cheap beside top-p alone, which must sort the whole vocabulary where the law is flat
    greedy_share: float = 0.5
    temperature: float = 0.8
    opening_share: float = 0.5
    second_turn_share: float = 0.15
    max_repeated_share: float = 0.3
    min_tokens_before_loop: int = 32

    def __post_init__(self) -> None:
        for name in ("num_conversations", "max_prompt_tokens", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, given {getattr(self, name)}")
        for name in ("greedy_share", "opening_share", "second_turn_share", "max_repeated_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, given {getattr(self, name)}")
        if self.prompt_temperature <= 0 or not 0 < self.prompt_top_p <= 1:
            raise ValueError(
                "user turns are sampled: prompt_temperature must be above 0 and prompt_top_p in (0, 1], "
                f"given {self.prompt_temperature} and {self.prompt_top_p}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, given {self.temperature}")

    def max_sequence_length(self, prefix_tokens: int) -> int:
        """Longest sequence that synthesis without a file of requests can reach."""
        return prefix_tokens + 2 * (3 * self.max_prompt_tokens + self.max_answer_tokens) + 64


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
class SynthesisReport:
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
class _Attempt:
    """One conversation in the making."""

    number: int
    seed: int
    temperature: float
    num_turns: int
    domain: str | None = None
    opening: str = ""
    given: Conversation | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answer_tokens: int = 0
    truncated: bool = False
    fault: str | None = None

    @property
    def active(self) -> bool:
        return self.fault is None and not self.truncated

    def fail(self, reason: str) -> None:
        """Drop the unfinished turn; only a conversation without a finished one is lost."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()
        if self.given is not None or not self.messages:
            self.fault = reason
        else:
            self.num_turns = 0

    def row(self, config: SynthesisConfig) -> dict[str, Any]:
        row: dict[str, Any] = {
            "messages": self.messages,
            "id": f"synth-{config.seed}-{self.number}",
            "seed": self.seed,
            "temperature": self.temperature,
            "truncated": self.truncated,
            "num_answer_tokens": self.num_answer_tokens,
        }
        return row | ({"domain": self.domain} if self.domain else {})


class Synthesizer:
    """Writes `config.num_conversations` rows to `out` with an engine that completes token ids."""

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: Any,
        config: SynthesisConfig,
        out: str | Path,
        *,
        requests: Sequence[Conversation] | None = None,
        target_fingerprint: str = "",
        rows_per_chunk: int = 128,
        max_sequence_length: int | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.requests = requests
        self.rows_per_chunk = rows_per_chunk
        self.max_sequence_length = max_sequence_length
        self.special = special_ids(tokenizer)
        self.file = _DataFile(
            Path(out),
            {
                **asdict(config),
                "target": target_fingerprint,
                "tokenizer": tokenizer_hash(tokenizer),
                "requests": _requests_hash(requests),
            },
        )
        evaluation = user_texts(load_prompts())
        self.evaluation_hashes = {text_hash(text) for text in evaluation}
        self.evaluation = NearDuplicates(evaluation)
        self.kept = NearDuplicates(_first_user_text(row["messages"]) for row in self.file.rows)

    def run(
        self,
        *,
        on_tokens: Callable[[int], None] | None = None,
        on_chunk: Callable[[SynthesisReport], None] | None = None,
    ) -> SynthesisReport:
        """Generate until enough rows are kept (or the requests are used up); `on_chunk` sees counts as they
        grow.
        """
        report = self.file.report()
        while report.num_kept < self.config.num_conversations and (numbers := self._next_attempts(report)):
            attempts = [self._begin(number) for number in numbers]
            self._write_conversations(attempts, on_tokens)
            self._commit(attempts, report.num_kept)
            report = self.file.report()
            if on_chunk is not None:
                on_chunk(report)
            self._check_yield(report)
        return report

    def _next_attempts(self, report: SynthesisReport) -> range:
        start = self.file.next_attempt
        # As many as are likely to be needed at the yield seen so far (a guess of 60 % before any).
        chance = max(0.1, report.num_kept / report.num_attempts) if report.num_attempts else 0.6
        needed = int((self.config.num_conversations - report.num_kept) / chance * 1.05) + 1
        stop = start + min(self.rows_per_chunk, needed)
        return range(start, stop if self.requests is None else min(stop, len(self.requests)))

    def _begin(self, number: int) -> _Attempt:
        config = self.config
        draw = _uniforms(config.seed, number)
        attempt = _Attempt(
            number=number,
            seed=_derived_seed(config.seed, number),
            temperature=0.0 if next(draw) < config.greedy_share else config.temperature,
            num_turns=2 if next(draw) < config.second_turn_share else 1,
        )
        if self.requests is not None:
            attempt.given = self.requests[number]
            attempt.domain = attempt.given.domain
            attempt.num_turns = sum(message["role"] == "user" for message in attempt.given.messages)
            attempt.messages = [dict(m) for m in attempt.given.messages if m["role"] == "system"]
        elif next(draw) < config.opening_share:
            attempt.domain = _pick(list(OPENINGS), next(draw))
            attempt.opening = _pick(OPENINGS[attempt.domain], next(draw))
        return attempt

    def _write_conversations(self, attempts: list[_Attempt], on_tokens: Callable[[int], None] | None) -> None:
        for turn in range(max(attempt.num_turns for attempt in attempts)):
            active = [attempt for attempt in attempts if attempt.active and attempt.num_turns > turn]
            if self.requests is None:
                self._write_user_turns(active, turn, on_tokens)
            else:
                self._copy_user_turns(active, turn)
            active = [attempt for attempt in active if attempt.active and attempt.num_turns > turn]
            self._write_answers(active, turn, on_tokens)

    def _write_user_turns(self, attempts: list[_Attempt], turn: int, on_tokens: Callable[[int], None] | None) -> None:
        stop_id = end_of_user_turn_id(self.tokenizer)
        prompts, params, begun = [], [], []
        for attempt in attempts:
            opening = attempt.opening if turn == 0 else ""
            opening_ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
            prompt = user_turn_prefix(self.tokenizer, attempt.messages) + list(opening_ids)
            longer = 3 if turn == 0 and attempt.domain in LONG_DOMAINS else 1
            max_tokens = longer * self.config.max_prompt_tokens
            if not self._fits(prompt, max_tokens):
                attempt.fail("conversation too long")
                continue
            begun.append(attempt)
            prompts.append(prompt)
            params.append(
                SamplingParams(
                    temperature=self.config.prompt_temperature,
                    top_p=self.config.prompt_top_p,
                    top_k=self.config.prompt_top_k,
                    max_tokens=max_tokens,
                    stop_token_ids=(stop_id,),
                    seed=_derived_seed(attempt.seed, f"user {turn}"),
                )
            )
        for attempt, completion in zip(begun, self._generate(prompts, params, on_tokens), strict=True):
            token_ids = _without_end(completion.token_ids, self.special)
            text = ((attempt.opening if turn == 0 else "") + self.tokenizer.decode(token_ids)).strip()
            fault = "prompt too long" if completion.finish_reason == "length" else self._prompt_fault(text, token_ids)
            if fault is not None:
                attempt.fail(fault)
            else:
                attempt.messages.append({"role": "user", "content": text})

    def _copy_user_turns(self, attempts: list[_Attempt], turn: int) -> None:
        for attempt in attempts:
            assert attempt.given is not None
            users = [message["content"] for message in attempt.given.messages if message["role"] == "user"]
            if text_hash(users[turn]) in self.evaluation_hashes:
                attempt.fail("evaluation prompt")
            else:
                attempt.messages.append({"role": "user", "content": users[turn]})

    def _prompt_fault(self, text: str, token_ids: Sequence[int]) -> str | None:
        if self.special.intersection(token_ids):
            return "prompt holds special tokens"
        if text_hash(text) in self.evaluation_hashes or text in self.evaluation:
            return "evaluation prompt"
        return prompt_fault(text, token_ids)

    def _write_answers(self, attempts: list[_Attempt], turn: int, on_tokens: Callable[[int], None] | None) -> None:
        prompts, params, answered = [], [], []
        for attempt in attempts:
            prompt = render_prompt(self.tokenizer, attempt.messages)
            if not self._fits(prompt, self.config.max_answer_tokens):
                attempt.fail("prompt too long")
                continue
            answered.append(attempt)
            prompts.append(prompt)
            params.append(
                SamplingParams(
                    temperature=attempt.temperature,
                    max_tokens=self.config.max_answer_tokens,
                    seed=_derived_seed(attempt.seed, f"answer {turn}"),
                )
            )
        for attempt, completion in zip(answered, self._generate(prompts, params, on_tokens), strict=True):
            self._take_answer(attempt, completion)

    def _fits(self, prompt: Sequence[int], max_tokens: int) -> bool:
        return self.max_sequence_length is None or len(prompt) + max_tokens <= self.max_sequence_length

    def _take_answer(self, attempt: _Attempt, completion: Completed) -> None:
        token_ids = _without_end(completion.token_ids, self.special)
        truncated = completion.finish_reason == "length"
        if repeated_share(token_ids) > self.config.max_repeated_share:
            # Greedy text of small models often ends in a loop; what comes before is still the target's own.
            token_ids, truncated = token_ids[: first_repetition(token_ids)], True
            if len(token_ids) < self.config.min_tokens_before_loop:
                attempt.fail("answer loops")
                return
        text = self.tokenizer.decode(token_ids)
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

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        on_tokens: Callable[[int], None] | None,
    ) -> Sequence[Completed]:
        if not prompts:
            return []
        return self.engine.generate(prompts, params, progress=on_tokens)

    def _commit(self, attempts: list[_Attempt], num_kept: int) -> None:
        """Judge duplicates in attempt order and write; attempts after the last wanted row are left for
        another run.
        """
        rows: list[dict[str, Any]] = []
        dropped = Counter[str]()
        next_attempt = attempts[0].number
        for attempt in attempts:
            if num_kept + len(rows) >= self.config.num_conversations:
                break
            next_attempt = attempt.number + 1
            first = _first_user_text(attempt.messages)
            if attempt.fault is None and self.requests is None and first in self.kept:
                attempt.fault = "duplicate prompt"
            if attempt.fault is not None:
                dropped[attempt.fault] += 1
                continue
            self.kept.add(first)
            rows.append(attempt.row(self.config))
        self.file.append(rows, dropped, next_attempt)

    def _check_yield(self, report: SynthesisReport) -> None:
        if report.num_attempts > 256 + 20 * max(report.num_kept, self.rows_per_chunk) and self.requests is None:
            raise ValueError(
                f"only {report.num_kept} of {report.num_attempts} attempts passed the filters; the target "
                "does not write usable user turns from its template alone (use "
                f"--requests):\n{report.summary()}"
            )


class _DataFile:
    """The JSON lines so far and, beside them, `<name>.state.json` with settings and counts.

    The state is there before the first line; after that lines are written and synced before the state, so a
    crash can only leave the state behind the lines: attempts in between are read off the last line's id.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.state_path = path.with_name(path.name + ".state.json")
        self.rows = self._read_rows()
        state = self._read_state()
        self.dropped = Counter[str](state.get("dropped", {}))
        last = int(self.rows[-1]["id"].rsplit("-", 1)[1]) + 1 if self.rows else 0
        self.next_attempt = max(last, state.get("next_attempt", 0)) if self.rows else 0
        if not self.rows:
            self.dropped.clear()

    def append(self, rows: Sequence[dict[str, Any]], dropped: Counter[str], next_attempt: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.rows:  # lines without settings beside them could not be continued
            self._write_state()
        with self.path.open("ab") as stream:
            for row in rows:
                stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += rows
        self.dropped += dropped
        self.next_attempt = next_attempt
        self._write_state()

    def _write_state(self) -> None:
        state = {"settings": self.settings, "next_attempt": self.next_attempt, "dropped": dict(self.dropped)}
        partial = self.state_path.with_name(self.state_path.name + ".partial")
        partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.state_path)

    def report(self) -> SynthesisReport:
        return SynthesisReport(
            num_kept=len(self.rows),
            num_attempts=self.next_attempt,
            num_tokens=sum(row["num_answer_tokens"] for row in self.rows),
            dropped=dict(self.dropped),
        )

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        rows = []
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                row["messages"][0]["content"], int(row["id"].rsplit("-", 1)[1]), row["num_answer_tokens"]
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self.path}, line {number} is not a row written by synthesis; move the file away or "
                    "name another --out"
                ) from error
            rows.append(row)
        if len(whole) < len(content):  # a line torn by an interruption: its attempt is made again
            with self.path.open("r+b") as stream:
                stream.truncate(len(whole))
        return rows

    def _read_state(self) -> dict[str, Any]:
        if not self.rows:
            return {}
        if not self.state_path.exists():
            raise ValueError(
                f"{self.path} exists without {self.state_path.name}, which records its settings; move it "
                "away or name another --out"
            )
        state: dict[str, Any] = json.loads(self.state_path.read_text(encoding="utf-8"))
        before, now = dict(state["settings"]), dict(self.settings)
        # A longer run of the same settings has the same beginning.
        for settings in (before, now):
            settings.pop("num_conversations", None)
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed:
            details = ", ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
            raise ValueError(f"{self.path} was begun with other settings ({details}); name another --out")
        return state


def _first_user_text(messages: Sequence[Mapping[str, str]]) -> str:
    return next((message["content"] for message in messages if message["role"] == "user"), "")


def _without_end(token_ids: Sequence[int], special: frozenset[int]) -> list[int]:
    """Token ids without the end token that stopped the generation, where the engine reports it."""
    token_ids = list(token_ids)
    return token_ids[:-1] if token_ids and token_ids[-1] in special else token_ids


def _derived_seed(seed: int, name: int | str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1


def _uniforms(seed: int, number: int) -> Iterator[float]:
    for count in range(64):
        digest = hashlib.sha256(f"{seed}/{number}/uniform/{count}".encode()).digest()
        yield int.from_bytes(digest[:6]) / 2**48


def _pick(choices: Sequence[str], uniform: float) -> str:
    return choices[int(uniform * len(choices))]


def _requests_hash(requests: Sequence[Conversation] | None) -> str:
    if requests is None:
        return ""
    content = json.dumps([conversation.messages for conversation in requests], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
