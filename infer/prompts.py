"""Evaluation prompts: the default set shipped with the package, a user's own file, and what keeps them out of
training.

A prompts file is JSON lines, `{"messages": [{"role", "content"}, ...]}`, each ending in a user turn. A `"domain"`
beside the messages names the group that figures are given for.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

NO_DOMAIN = "other"
"""The domain of a prompt that names none."""

DOMAINS = (
    "chat",
    "code",
    "mathematics",
    "question answering",
    "translation",
    "summarising",
    "retrieval",
)
"""Domains of the default set; a file of one's own may name others."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class EvaluationPrompt:
    """One chat to be answered by the model; the last message is the user's."""

    domain: str
    messages: tuple[dict[str, str], ...]


def load_prompts(path: str | Path | None = None) -> list[EvaluationPrompt]:
    """Prompts of `path` (default: the shipped set); a bad line is an error that names its number."""
    path = Path(path) if path is not None else DEFAULT_PROMPTS
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse_prompt(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(
                f'{path}, line {number}: not JSON ({error}); expected {{"messages": [{{"role", "content"}}, ...]}}'
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f'{path} holds no prompts; write one JSON object {{"messages": [...]}} a line')
    return prompts


def normalise_text(text: str) -> str:
    """Letters and digits of `text` in lower case, single spaced: equal for texts that differ in form only."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def text_hash(text: str) -> str:
    return hashlib.sha256(normalise_text(text).encode()).hexdigest()[:16]


def prompt_hashes(prompts: Iterable[EvaluationPrompt] | None = None) -> frozenset[str]:
    """Hashes of every user text of the evaluation prompts (default set), to be kept out of training data."""
    prompts = load_prompts() if prompts is None else prompts
    return frozenset(text_hash(text) for text in user_texts(prompts))


def user_texts(prompts: Iterable[EvaluationPrompt]) -> list[str]:
    return [message["content"] for prompt in prompts for message in prompt.messages if message["role"] == "user"]


def _parse_prompt(row: Any) -> EvaluationPrompt:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with messages, given {type(row).__name__}")
    domain, messages = row.get("domain", NO_DOMAIN), row.get("messages")
    if not isinstance(domain, str) or not domain.strip():
        raise ValueError(f"expected a domain name in 'domain', given {domain!r}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected a list of messages in 'messages', given {messages!r:.80}")
    return EvaluationPrompt(domain=domain, messages=tuple(_parse_messages(messages)))


def _parse_messages(messages: list[Any]) -> Iterable[dict[str, str]]:
    expected: tuple[str, ...] = ("user", "system")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str) or not content.strip():
            raise ValueError(f"message {index} needs a role of {_ROLES} and a text content, given {message!r}")
        if role not in expected:
            raise ValueError(f"message {index} has role {role!r} where one of {expected} belongs")
        expected = ("assistant",) if role == "user" else ("user",)
        yield {"role": role, "content": content}
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message must be the user's, given role {messages[-1]['role']!r}")
