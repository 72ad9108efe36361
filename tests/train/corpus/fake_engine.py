"""An engine for tests of written data, which need no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from infer.chat import end_of_user_turn_id
from infer.sampling import SamplingParams

NOUNS = (
    "river",
    "castle",
    "engine",
    "garden",
    "poem",
    "teacher",
    "island",
    "recipe",
    "planet",
    "market",
    "winter",
)


@dataclass(frozen=True)
class Reply:
    token_ids: tuple[int, ...]
    finish_reason: str


class FakeEngine:
    """Writes words drawn from the prompt and the seed alone, like an engine whose tokens do not depend on the
    batch.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str, Random], str] | None = None) -> None:
        self.tokenizer, self.write = tokenizer, write or self.words
        self.end = end_of_user_turn_id(tokenizer)
        self.seen: list[tuple[str, SamplingParams]] = []
        self.calls_left = 10**9

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Reply]:
        assert isinstance(params, Sequence)
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KeyboardInterrupt
        replies = [self.reply(self.tokenizer.decode(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        if progress is not None:
            progress(sum(len(reply.token_ids) for reply in replies))
        return replies

    def reply(self, prompt: str, params: SamplingParams) -> Reply:
        self.seen.append((prompt, params))
        text = self.write(prompt, Random(f"{prompt}/{params.seed if params.temperature else 0}"))
        token_ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
        if len(token_ids) > params.max_tokens:
            return Reply(tuple(token_ids[: params.max_tokens]), "length")
        return Reply(tuple(token_ids), "stop")

    @staticmethod
    def words(prompt: str, random: Random) -> str:
        chosen = " ".join(random.sample(NOUNS, 5))
        return f" please help with {chosen}?" if prompt.rsplit("<|im_start|>", 1)[1].startswith("user") else chosen


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
