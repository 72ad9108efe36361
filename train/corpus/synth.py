"""Training conversations written by the target itself: it completes an empty user turn, then answers it. A base model,
which knows no turns, goes on writing texts instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.chat import encode_text, end_of_user_turn_id, render_prompt, user_turn_prefix
from infer.prompts import load_prompts, text_hash, user_texts
from infer.sampling import SamplingParams
from train.corpus.contamination import Contamination
from train.corpus.conversations import TEXT, Conversation
from train.corpus.filters import NearDuplicates, prompt_fault
from train.corpus.openings import LONG_DOMAINS, OPENINGS
from train.corpus.regenerate import requests_hash
from train.corpus.writing import (
    Attempt,
    AttemptT,
    CompletionEngine,
    OnTokens,
    Writer,
    WritingConfig,
    WritingReport,
    text_seed,
    uniforms,
    without_end,
)


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig(WritingConfig):
    """What decides the data: user turns are sampled, and a share of them begun for the target."""

    num_conversations: int
    max_prompt_tokens: int = 96
    prompt_temperature: float = 0.9
    prompt_top_p: float = 0.95
    prompt_top_k: int = 200  # cheap beside top-p alone, which must sort the whole vocabulary where the law is flat
    opening_share: float = 0.5
    second_turn_share: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_conversations", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, given {getattr(self, name)}")
        for name in ("opening_share", "second_turn_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, given {getattr(self, name)}")
        if self.prompt_temperature <= 0 or not 0 < self.prompt_top_p <= 1:
            raise ValueError(
                "user turns are sampled: prompt_temperature must be above 0 and prompt_top_p in (0, 1], "
                f"given {self.prompt_temperature} and {self.prompt_top_p}"
            )

    def max_sequence_length(self, prefix_tokens: int) -> int:
        """Longest sequence that synthesis can reach."""
        return prefix_tokens + 2 * (3 * self.max_prompt_tokens + self.max_answer_tokens) + 64


@dataclass(kw_only=True)
class _Chat(Attempt):
    num_turns: int
    opening: str = ""


class _FreeWriter(Writer[AttemptT, SynthesisConfig]):
    """Attempts until there are `config.num_conversations` rows; ValueError where hardly any attempt becomes one."""

    advice: str
    """What helps then."""

    def _next_numbers(self, report: WritingReport) -> range:
        """As many as are likely to be needed at the yield seen so far (a guess of 60 % before any)."""
        chance = max(0.1, report.num_kept / report.num_attempts) if report.num_attempts else 0.6
        needed = int((self.config.num_conversations - report.num_kept) / chance * 1.05) + 1
        start = self.file.next_attempt
        return range(start, start + min(self.rows_per_chunk, needed))

    def _is_enough(self, num_kept: int) -> bool:
        return num_kept >= self.config.num_conversations

    def _check_yield(self, report: WritingReport) -> None:
        if report.num_attempts > 256 + 20 * max(report.num_kept, self.rows_per_chunk):
            raise ValueError(
                f"only {report.num_kept} of {report.num_attempts} attempts passed the filters; {self.advice}:\n"
                f"{report.summary()}"
            )


class Synthesizer(_FreeWriter[_Chat]):
    """Writes `config.num_conversations` chats."""

    kind = "synth"
    advice = "the target does not write usable user turns from its template alone (use --requests)"

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: Any,
        config: SynthesisConfig,
        out: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`settings`: what else decides the rows; `options`: those of `Writer`."""
        super().__init__(engine, tokenizer, config, out, settings={"requests": "", **(settings or {})}, **options)
        evaluation = user_texts(load_prompts())
        self.evaluation_hashes = {text_hash(text) for text in evaluation}
        self.evaluation = NearDuplicates(evaluation)
        self.kept = NearDuplicates(_first_user_text(row["messages"]) for row in self.file.rows)

    def _begin(self, number: int) -> _Chat:
        config = self.config
        draw = uniforms(config.seed, number)
        attempt = _Chat(
            number=number,
            seed=text_seed(config.seed, number),
            temperature=self._temperature(next(draw)),
            num_turns=2 if next(draw) < config.second_turn_share else 1,
        )
        if next(draw) < config.opening_share:
            attempt.domain = _pick(list(OPENINGS), next(draw))
            attempt.opening = _pick(OPENINGS[attempt.domain], next(draw))
        return attempt

    def _write(self, attempts: list[_Chat], on_tokens: OnTokens) -> None:
        for turn in range(max(attempt.num_turns for attempt in attempts)):
            begun = [attempt for attempt in attempts if attempt.active and attempt.num_turns > turn]
            self._write_user_turns(begun, turn, on_tokens)
            begun = [attempt for attempt in begun if attempt.active]
            prompts = [render_prompt(self.tokenizer, attempt.messages) for attempt in begun]
            self._complete(begun, prompts, turn, on_tokens)

    def _write_user_turns(self, attempts: list[_Chat], turn: int, on_tokens: OnTokens) -> None:
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
                    seed=text_seed(attempt.seed, f"user {turn}"),
                )
            )
        for attempt, completion in zip(begun, self._generate(prompts, params, on_tokens), strict=True):
            token_ids = without_end(completion.token_ids, self.special)
            text = ((attempt.opening if turn == 0 else "") + self.tokenizer.decode(token_ids)).strip()
            fault = "prompt too long" if completion.finish_reason == "length" else self._prompt_fault(text, token_ids)
            if fault is not None:
                attempt.fail(fault)
            else:
                attempt.messages.append({"role": "user", "content": text})

    def _prompt_fault(self, text: str, token_ids: Sequence[int]) -> str | None:
        if self.special.intersection(token_ids):
            return "prompt holds special tokens"
        if text_hash(text) in self.evaluation_hashes or text in self.evaluation:
            return "evaluation prompt"
        return prompt_fault(text, token_ids)

    def _judge(self, attempt: _Chat) -> str | None:
        first = _first_user_text(attempt.messages)
        if first in self.kept:
            return "duplicate prompt"
        self.kept.add(first)
        return None


class TextWriter(_FreeWriter[Attempt]):
    """Writes `config.num_conversations` texts: those of `beginnings`, one after another and over again, gone on with;
    or new ones, from the beginning-of-sequence token alone."""

    kind = "text"
    advice = "give other beginnings (--prompts), or a higher temperature"

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: Any,
        config: SynthesisConfig,
        out: str | Path,
        *,
        beginnings: Sequence[Conversation] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`settings`: what else decides the rows; `options`: those of `Writer`."""
        everything = {"requests": requests_hash(beginnings), "raw": True, **(settings or {})}
        super().__init__(engine, tokenizer, config, out, settings=everything, **options)
        self.beginnings = beginnings
        self.contamination = Contamination.of()
        self.start = _start_of_text(tokenizer)
        self.kept = NearDuplicates((row["text"] for row in self.file.rows), threshold=0.8)

    def _begin(self, number: int) -> Attempt:
        draw = uniforms(self.config.seed, number)
        # Without a beginning, greedy texts would all be the same one.
        temperature = self._temperature(next(draw)) if self.beginnings else self.config.temperature
        attempt = Attempt(number=number, seed=text_seed(self.config.seed, number), temperature=temperature)
        if self.beginnings:
            given = self.beginnings[number % len(self.beginnings)]
            attempt.domain = given.domain
            attempt.messages = [{"role": TEXT, "content": self._beginning(given.messages[0]["content"])}]
            if self.contamination.reason(given) is not None:
                attempt.fail("evaluation prompt")
        return attempt

    def _write(self, attempts: list[Attempt], on_tokens: OnTokens) -> None:
        begun = [attempt for attempt in attempts if attempt.active]
        self._complete(begun, [self._prompt(attempt) for attempt in begun], 0, on_tokens)

    def _beginning(self, text: str) -> str:
        """The first `max_prompt_tokens` tokens of a text: what comes after them is the target's to write."""
        token_ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(token_ids) <= self.config.max_prompt_tokens:
            return text
        return str(self.tokenizer.decode(token_ids[: self.config.max_prompt_tokens])).rstrip("\ufffd")

    def _prompt(self, attempt: Attempt) -> list[int]:
        if not attempt.messages:
            return self.start
        token_ids = encode_text(self.tokenizer, attempt.messages[0]["content"])
        return without_end(token_ids, self.special) if len(token_ids) > 1 else token_ids

    def _decode(self, attempt: Attempt, token_ids: Sequence[int]) -> str:
        """What the tokens add to the text before them: decoded alone they may lose the blank they begin with."""
        before = [token_id for token_id in self._prompt(attempt) if token_id not in self.special]
        known, whole = self.tokenizer.decode(before), self.tokenizer.decode([*before, *token_ids])
        return str(whole[len(known) :] if before and whole.startswith(known) else self.tokenizer.decode(token_ids))

    def _judge(self, attempt: Attempt) -> str | None:
        text = _whole_text(attempt)
        if text in self.kept:
            return "duplicate text"
        self.kept.add(text)
        return None

    def _row(self, attempt: Attempt) -> dict[str, Any]:
        row = super()._row(attempt)
        del row["messages"]
        return {"text": _whole_text(attempt), **row}


def _start_of_text(tokenizer: Any) -> list[int]:
    """What a base model begins a text after: its beginning-of-sequence token, or the end of the text before."""
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if token_id is not None:
            return [int(token_id)]
    raise ValueError(
        "the tokenizer has neither a BOS nor an EOS token to begin a text with: give beginnings (--prompts)"
    )


def _whole_text(attempt: Attempt) -> str:
    return "".join(message["content"] for message in attempt.messages)


def _first_user_text(messages: Sequence[Mapping[str, str]]) -> str:
    return next((message["content"] for message in messages if message["role"] == "user"), "")


def _pick(choices: Sequence[str], uniform: float) -> str:
    return choices[int(uniform * len(choices))]
