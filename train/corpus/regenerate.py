"""Answers made anew by the target, turn by turn: a head learns best from what its own target would say.

Every message but the assistant's is kept. Where the assistant spoke the target does, with its own earlier answers
before it; a conversation that ends with somebody else gets one answer more. An answer that is cut (at its length
limit, or before it loops) is marked and ends its conversation there, since nothing sensible can follow. So does an
answer that cannot be used; the finished turns before it are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.chat import render_prompt
from infer.sampling import SamplingParams
from train.corpus.contamination import Contamination
from train.corpus.conversations import Conversation
from train.corpus.writing import (
    Attempt,
    CompletionEngine,
    OnTokens,
    Writer,
    WritingConfig,
    WritingReport,
    text_seed,
    uniforms,
)

_ANSWER_FRAME = 16
"""Tokens that a template puts around an answer, at most."""


@dataclass(frozen=True, kw_only=True)
class RegenerationConfig(WritingConfig):
    """How answers are drawn: `greedy_share` of the conversations at temperature 0, the others with these settings."""

    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(kw_only=True)
class _Chat(Attempt):
    turns: list[list[dict[str, str]]] = field(default_factory=list)
    """What others say before each of the assistant's turns."""


class Regenerator(Writer[_Chat, RegenerationConfig]):
    """Writes a row for each of `requests`, in their order."""

    kind = "regenerated"

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: Any,
        config: RegenerationConfig,
        out: str | Path,
        *,
        requests: Sequence[Conversation],
        contamination: Contamination | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`settings`: what else decides the rows; `options`: those of `Writer`."""
        self.contamination = contamination or Contamination.of()
        everything = {
            **(settings or {}),
            "requests": requests_hash(requests),
            "evaluation_prompts": self.contamination.identity,
        }
        super().__init__(engine, tokenizer, config, out, settings=everything, **options)
        self.requests = requests

    def _next_numbers(self, report: WritingReport) -> range:
        start = self.file.next_attempt
        return range(start, min(start + self.rows_per_chunk, len(self.requests)))

    def _begin(self, number: int) -> _Chat:
        given = self.requests[number]
        attempt = _Chat(
            number=number,
            seed=text_seed(self.config.seed, number),
            temperature=self._temperature(next(uniforms(self.config.seed, number))),
            domain=given.domain,
            turns=turns_before_answers(given),
        )
        if self.contamination.reason(_without_answers(given)) is not None:
            attempt.fail("evaluation prompt")
        return attempt

    def _write(self, attempts: list[_Chat], on_tokens: OnTokens) -> None:
        for turn in range(max(len(attempt.turns) for attempt in attempts)):
            active = [attempt for attempt in attempts if attempt.active and len(attempt.turns) > turn]
            asked, prompts = [], []
            for attempt in active:
                attempt.messages += map(dict, attempt.turns[turn])
                try:
                    prompts.append(render_prompt(self.tokenizer, attempt.messages))
                except ValueError:
                    attempt.fail("refused by the chat template")
                else:
                    asked.append(attempt)
            self._complete(asked, prompts, turn, on_tokens)

    def _answer_params(self, attempt: _Chat, turn: int) -> SamplingParams:
        return SamplingParams(
            temperature=attempt.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            max_tokens=self.config.max_answer_tokens,
            seed=text_seed(attempt.seed, f"answer {turn}"),
        )

    def _row(self, attempt: _Chat) -> dict[str, Any]:
        answered = sum(message["role"] == "assistant" for message in attempt.messages)
        return {
            **super()._row(attempt),
            "top_p": self.config.top_p,
            "top_k": self.config.top_k,
            "max_answer_tokens": self.config.max_answer_tokens,
            "num_turns_left_out": len(attempt.turns) - answered,
        }


def turns_before_answers(conversation: Conversation) -> list[list[dict[str, str]]]:
    """The messages of others, grouped by the assistant's turn that they come before."""
    turns: list[list[dict[str, str]]] = [[]]
    for message in conversation.messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    return [turn for turn in turns if turn]


def longest_request(requests: Sequence[Conversation], tokenizer: Any, config: RegenerationConfig) -> int:
    """Tokens of the longest conversation that these requests can become."""
    longest = 0
    for request in requests:
        turns = turns_before_answers(request)
        try:
            others = render_prompt(tokenizer, [message for turn in turns for message in turn])
        except ValueError:  # a template that wants an answer between two turns
            others = tokenizer("\n".join(message["content"] for turn in turns for message in turn))["input_ids"]
        longest = max(longest, len(others) + len(turns) * (config.max_answer_tokens + _ANSWER_FRAME))
    return longest


def requests_hash(requests: Sequence[Conversation] | None) -> str:
    """Content hash of what is to be answered; "" for nothing."""
    if requests is None:
        return ""
    content = json.dumps([conversation.messages for conversation in requests], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _without_answers(conversation: Conversation) -> Conversation:
    others = tuple(message for message in conversation.messages if message["role"] != "assistant")
    return Conversation(messages=others, source=conversation.source, domain=conversation.domain)
