"""Answers as clients read them: the body of a whole answer, and the chunks of one that is streamed.

Both are made of plain dictionaries: at thousands of chunks a second, models that check what goes out cost more than
the decoding of it.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.async_engine import Update
from infer.request import Completion, TokenLogprobs
from infer.serve.calls import News, check
from infer.serve.errors import to_json
from infer.serve.parsing import OutputParser, ParsedAnswer, Piece
from infer.serve.prepare import Call
from infer.serve.settings import ServeSettings
from infer.serve.spelling import Offsets, Spelling
from infer.tree import DraftTree

DONE = b"data: [DONE]\n\n"

_LOWEST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say (vLLM's convention)."""


class Answer:
    """How the answers to one call are written: its id, its time, and the state of each choice."""

    def __init__(self, call: Call, spelling: Spelling, settings: ServeSettings) -> None:
        kind = "chatcmpl" if call.is_chat else "cmpl"
        object_name = "chat.completion" if call.is_chat else "text_completion"
        self.call = call
        self.spelling = spelling
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": object_name,
            "created": int(time.time()),
            "model": settings.model_name,
        }
        self._reasoning = settings.reasoning if call.is_chat else None
        self._tools = settings.tools if call.takes_tools else None
        self._choices = [
            _Choice(index, self, echo=prompt.text)
            for index, prompt in enumerate(prompt for prompt in call.prompts for _ in range(prompt.params.n))
        ]
        self._completions: dict[int, Completion] = {}
        self.num_completion_tokens = 0

    def parser(self) -> OutputParser | None:
        """What splits one answer's text; None where nothing is to be told apart."""
        if self._reasoning is None and self._tools is None:
            return None
        return OutputParser(self._reasoning, self._tools, opened=self.call.opened)

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""
        self._completions = dict(enumerate(completions))
        self.num_completion_tokens = sum(len(completion.token_ids) for completion in completions)
        choices = [choice.whole(completion) for choice, completion in zip(self._choices, completions, strict=True)]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        if self.call.acceptance:
            told = [acceptance(completion) for completion in completions]
            if len(told) == 1:
                body["acceptance"] = told[0]
            else:
                for choice, one in zip(choices, told, strict=True):
                    choice["acceptance"] = one
        return body

    def events(self, news: News) -> bytes:
        """The chunks of what has come; none for text that cannot be shown yet. ApiError where an answer failed."""
        return b"".join(event(chunk) for index, update in news for chunk in self._chunks(index, update))

    def end(self) -> bytes:
        """What follows the last chunk."""
        if not self.call.include_usage:
            return DONE
        return event({**self._chunk_head, "choices": [], "usage": self._usage()}) + DONE

    def _chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        choice = self._choices[index]
        self.num_completion_tokens += len(update.token_ids)
        if update.completion is not None:
            check(update.completion)
            self._completions[index] = update.completion
        opening = choice.opening()
        if opening is not None:
            yield self._chunk(opening)
        grown = choice.grow(update)
        if grown is not None:
            chunk = self._chunk(grown)
            if self.call.acceptance and update.completion is not None:
                chunk["acceptance"] = acceptance(update.completion)
            yield chunk

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self.call.is_chat else self._head

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self.call.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        """Counts of the whole call; a prompt counts once, however many samples it has."""
        first = 0
        num_prompt = num_cached = 0
        for prompt in self.call.prompts:
            num_prompt += len(prompt.token_ids)
            num_cached += self._completions[first].num_reused_tokens
            first += prompt.params.n
        counts = [completion.speculation for completion in self._completions.values()]
        num_drafted = sum(one.num_draft_tokens for one in counts)
        num_accepted = sum(one.num_accepted_tokens for one in counts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_drafted - num_accepted,
            },
        }


class _Choice:
    """One choice of an answer, as it grows."""

    def __init__(self, index: int, answer: Answer, *, echo: str) -> None:
        self._index = index
        self._call = answer.call
        self._spelling = answer.spelling
        self._new_parser = answer.parser
        self._parser = answer.parser()
        self._echo = echo
        self._is_open = False
        self._num_calls = 0
        self._offsets = Offsets(answer.spelling, start=len(echo))
        self._shown = answer.spelling.stream() if answer.call.acceptance else None

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.logprobs)
        if not self._call.is_chat:
            text = self._echo + completion.text
            return self._choice({"text": text}, logprobs, completion)
        parser = self._new_parser()
        parsed = ParsedAnswer(content=completion.text)
        if parser is not None:
            parsed = ParsedAnswer.join([*parser.push(completion.text), *parser.close()])
        self._num_calls = len(parsed.calls)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [_tool_call(piece) for piece in parsed.calls]
        return self._choice({"message": message}, logprobs, completion)

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first: the role, or the echoed prompt."""
        if self._is_open:
            return None
        self._is_open = True
        if self._call.is_chat:
            return self._choice({"delta": {"role": "assistant", "content": ""}}, None, None)
        return self._choice({"text": self._echo}, None, None) if self._echo else None

    def grow(self, update: Update) -> dict[str, Any] | None:
        """What an update adds, as a chunk tells it; None where that cannot be shown yet."""
        logprobs = self._logprobs(update.logprobs)
        delta = self._delta(update)
        tells = update.token_ids and (logprobs is not None or self._call.acceptance)
        if not (delta or tells or update.completion is not None):
            return None
        body = {"delta": delta} if self._call.is_chat else {"text": delta.get("content", "")}
        choice = self._choice(body, logprobs, update.completion)
        if self._call.acceptance and update.token_ids:
            choice["acceptance"] = {
                "tokens": self._tokens(update),
                "num_nodes": update.num_nodes,
                "depth": update.depth,
            }
        if update.tree is not None:
            choice["tree"] = tree_body(update.tree, update.path, self._spelling)
        return choice

    def _choice(
        self, body: Mapping[str, Any], logprobs: dict[str, Any] | None, completion: Completion | None
    ) -> dict[str, Any]:
        choice = {"index": self._index, **body, "logprobs": logprobs, "finish_reason": None}
        if completion is not None:
            is_call = self._num_calls and completion.finish_reason == "stop"
            choice["finish_reason"] = "tool_calls" if is_call else completion.finish_reason
            choice["stop_reason"] = completion.stop_reason
        return choice

    def _delta(self, update: Update) -> dict[str, Any]:
        if self._parser is None:
            return {"content": update.text} if update.text else {}
        pieces = self._parser.push(update.text)
        if update.completion is not None:
            pieces += self._parser.close()
        delta: dict[str, Any] = {}
        for piece in pieces:
            if piece.kind == "tool":
                self._num_calls = max(self._num_calls, piece.index + 1)
                delta.setdefault("tool_calls", []).append({"index": piece.index, **_tool_call(piece)})
            elif piece.text:
                name = "content" if piece.kind == "content" else "reasoning_content"
                delta[name] = delta.get(name, "") + piece.text
        return delta

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        if self._call.is_chat:
            return {"content": [chat_logprob(entry, self._spelling) for entry in entries]}
        return {
            "text_offset": [self._offsets.push(entry.token_id) for entry in entries],
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "tokens": [self._spelling.key(entry.token_id) for entry in entries],
            "top_logprobs": [_top_logprobs(entry, self._spelling) for entry in entries],
        }

    def _tokens(self, update: Update) -> list[dict[str, Any]]:
        """A round's tokens with their texts; a character spread over tokens is shown with its last."""
        assert self._shown is not None
        tokens: list[dict[str, Any]] = [
            {"id": token, "text": self._shown.push([token]), "drafted": place < update.num_accepted}
            for place, token in enumerate(update.token_ids)
        ]
        if update.completion is not None:
            tokens[-1]["text"] += self._shown.flush()
        return tokens


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {to_json(value)}\n\n".encode()


def acceptance(completion: Completion) -> dict[str, Any]:
    """What drafts have done for an answer."""
    counts = completion.speculation
    mean = counts.mean_accepted_length
    return {
        "num_rounds": counts.num_rounds,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "accepted_per_position": list(counts.accepted_per_position),
        "mean_accepted_length": mean if math.isfinite(mean) else None,
        "exactness": completion.exactness,
        "lossless": completion.lossless,
        "seed": completion.seed,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
    }


def tree_body(tree: DraftTree, path: Sequence[int], spelling: Spelling) -> dict[str, Any]:
    return {
        "tokens": [spelling.text(token) for token in tree.tokens],
        "token_ids": list(tree.tokens),
        "parents": list(tree.parents),
        "values": [value if math.isfinite(value) else 0.0 for value in tree.values] or [0.0] * len(tree),
        "path": list(path),
    }


def chat_logprob(entry: TokenLogprobs, spelling: Spelling) -> dict[str, Any]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text(token), "logprob": _number(logprob), "bytes": list(spelling.bytes(token))}

    return {**told(entry.token_id, entry.logprob), "top_logprobs": [told(*each) for each in entry.top]}


def _top_logprobs(entry: TokenLogprobs, spelling: Spelling) -> dict[str, float]:
    """The likeliest tokens, and the one that was drawn."""
    each = [*entry.top, (entry.token_id, entry.logprob)]
    return {spelling.key(token): _number(logprob) for token, logprob in each}


def _tool_call(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}


def _number(logprob: float) -> float:
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB
