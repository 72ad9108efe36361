"""From a prompt to requests: encoded, checked against what the target can take, and given the rule that keeps what was
asked for.

Reads what an engine is made of and nothing that runs, so requests can be prepared in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from infer.chat import Message, encode_text, render_prompt, token_id_list
from infer.drafters.base import TreeSettings
from infer.exactness import choose_rule
from infer.noise import random_seed
from infer.request import DraftBounds, Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.verify import KindType, Rule

Prompt = str | Sequence[Message] | Sequence[int]


class Intake:
    """kinds: of proposals that the engine's drafter makes. tree: bounds of its trees. exactness, rule: what the engine
    promises to requests that ask for nothing else."""

    def __init__(
        self,
        target: TargetModel,
        *,
        kinds: Sequence[KindType],
        tree: TreeSettings,
        max_length: int | None,
        exactness: str | None,
        rule: str | None,
    ) -> None:
        self._target = target
        self._kinds = tuple(kinds)
        self._tree = tree
        self._longest = min(max_length or target.max_length, target.max_length)
        self._is_bitwise = exactness == "bitwise"
        self.rule = self._choose_rule(exactness, rule)

    @property
    def exactness(self) -> str:
        return self._exactness_of(self.rule)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: DraftBounds | None,
        owner: str,
        tag: str,
        index: int,
    ) -> list[Request]:
        """The `n` requests of a prompt: one seed, told apart by their sample. `index` is the prompt's, for errors."""
        token_ids = self._encode(index, prompt)
        self._check(index, token_ids, params)
        self._check_bounds(draft)
        rule = self._rule_for(index, params)
        seed = random_seed() if params.seed is None else params.seed
        return [
            Request.create(
                token_ids,
                params,
                seed=seed,
                sample=sample,
                rule=rule,
                exactness=self._exactness_of(rule),
                target=self._target,
                draft=draft,
                owner=owner,
                tag=tag,
            )
            for sample in range(params.n)
        ]

    def _choose_rule(self, exactness: str | None, rule: str | None) -> Rule:
        """The rule that keeps `exactness` with what this engine's drafter proposes."""
        return choose_rule(exactness, rule, kinds=self._kinds, chain=self._tree.branch == 1)

    def _exactness_of(self, rule: Rule) -> str:
        return "bitwise" if self._is_bitwise and rule.exactness == "seed" else rule.exactness

    def _rule_for(self, index: int, params: SamplingParams) -> Rule:
        """The rule that a request asks for; the engine's if it asks for none."""
        if params.exactness == "bitwise" and not self._is_bitwise:
            raise ValueError(
                f"prompt {index} asks for exactness 'bitwise', which every forward of an engine must keep: "
                "build the engine with exactness='bitwise'"
            )
        if params.rule is None and params.exactness in (None, self.exactness, self.rule.exactness):
            return self.rule
        return self._choose_rule(params.exactness, params.rule)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if (is_chat or isinstance(prompt, str)) and self._target.tokenizer is None:
            raise ValueError(f"prompt {index} is text, and this target was given no tokenizer: give token ids")
        if isinstance(prompt, str):
            return encode_text(self._target.tokenizer, prompt)
        if is_chat:
            return render_prompt(self._target.tokenizer, cast(Sequence[Message], prompt))
        try:
            return token_id_list(prompt)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"prompt {index} is {prompt!r:.80}: expected a text, a list of chat messages, or token ids"
            ) from error

    def _check_bounds(self, draft: DraftBounds | None) -> None:
        for name in ("max_nodes", "max_depth") if draft is not None else ():
            asked, most = getattr(draft, name), getattr(self._tree, name)
            if asked is not None and asked > most:
                raise ValueError(f"draft.{name} is {asked}, but this engine drafts at most {most}: ask for no more")

    def _check(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: give at least one token")
        bad = next((token for token in prompt if not 0 <= token < self._target.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"prompt {index} has token id {bad}: this target has ids 0 to {self._target.vocab_size - 1}"
            )
        if len(prompt) + params.max_tokens > self._longest:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and asks for {params.max_tokens} more, "
                f"but at most {self._longest} fit: shorten it or lower max_tokens"
            )
