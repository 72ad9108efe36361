"""The one place that turns chat messages into token ids, for serving, benchmarking, synthesis and training.

A chat is rendered to text by the tokenizer's own template and then encoded without further special tokens, so
a beginning-of-sequence token printed by the template is never doubled. The training mask is found from prefix
differences of that text and token offsets, so no `{% generation %}` tags are needed in the template.

Limits: message contents are plain strings (no images), training renders no tool schemas, and masks need a fast
tokenizer (offsets).
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`."""

_SENTINEL = "headstart-sentinel-8f1d"
_RAW_GAP = "\n\n"
_PROBES = (
    "The quick brown fox  jumps over 12345 lazy dogs.\n\n\tdef f(x):\n        return x**2  # caf\u00e9",
    " \u4f60\u597d\u4e16\u754c \U0001f600\U0001f680 3.14159 don't WON'T \u00fcber na\u00efve "
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439",
)
"""Strings whose ids enter the tokenizer hash: they differ when merges or pre-tokenisation do."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as token ids, with `loss_mask[t]` true where token `t` was written by the assistant."""

    token_ids: list[int]
    loss_mask: list[bool]

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The chat as text. `raw` joins the contents without a template (for base models), on explicit request only; a
    lone text stays as it is. `tools` are schemas of functions for the template to list, `options` what else it, or
    `apply_chat_template`, is to be told.
    """
    _check_messages(messages)
    if raw:
        return _raw_text(tokenizer, messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer of {tokenizer_name(tokenizer)} has no chat template; give it one, "
            "or ask for raw text explicitly (raw mode encodes the message contents as they are)"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            **{**(options or {}), **({"tools": [dict(tool) for tool in tools]} if tools else {})},
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # templates raise whatever they like: jinja errors, TypeError on odd contents
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"the chat template of {tokenizer_name(tokenizer)} refused messages with roles {roles}: {error}"
        ) from error
    assert isinstance(text, str)
    return _checked_text(text)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text with the tokenizer's own special tokens, where a leading BOS in `text` is not
    doubled.
    """
    token_ids = token_id_list(tokenizer(_checked_text(text), verbose=False))  # lengths are checked elsewhere
    bos_token, bos = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if bos_token and text.startswith(bos_token) and token_ids[:2] == [bos, bos]:
        adds_bos = token_id_list(tokenizer(""))[:1] == [bos]
        return token_ids[1:] if adds_bos else token_ids
    return token_ids


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True, raw: bool = False
) -> list[int]:
    """Token ids of a chat, ending where the assistant begins to write."""
    if not messages:
        raise ValueError("cannot render an empty list of messages; give at least one user message")
    text = render_text(tokenizer, messages, add_generation_prompt=add_generation_prompt, raw=raw)
    if raw:
        return encode_text(tokenizer, text)
    return token_id_list(tokenizer(text, add_special_tokens=False, verbose=False))


def render_training(
    tokenizer: Any, messages: Sequence[Message], *, end_of_last: bool = True, raw: bool = False
) -> Rendered:
    """A finished chat with the mask over every assistant text plus its end token.

    `end_of_last=False` stops right after the last assistant text: for answers that were cut by a length
    limit, whose end must not be taught.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"a training conversation needs an assistant message; roles: {[message['role'] for message in messages]}"
        )
    text = render_text(tokenizer, messages, add_generation_prompt=False, raw=raw)
    token_ids, offsets = _encode_with_offsets(tokenizer, text, add_special_tokens=raw)
    special = special_ids(tokenizer)
    loss_mask = [False] * len(token_ids)
    stop = len(token_ids)
    for span in _assistant_spans(tokenizer, messages, text, raw=raw):
        first, stop = _token_range(offsets, span)
        end = _end_token_index(token_ids, offsets, stop, span.end, special)
        supervised_end = stop if end is None else end + 1
        loss_mask[first:supervised_end] = [True] * (supervised_end - first)
    if not end_of_last:
        token_ids, loss_mask = token_ids[:stop], loss_mask[:stop]

    num_supervised = sum(loss_mask)
    if num_supervised in (0, len(loss_mask)):
        raise ValueError(
            f"the chat template of {tokenizer_name(tokenizer)} gives a loss mask over {num_supervised} of "
            f"{len(loss_mask)} tokens; a chat needs some and not all tokens supervised"
        )
    return Rendered(token_ids=token_ids, loss_mask=loss_mask)


def user_turn_prefix(tokenizer: Any, history: Sequence[Message] = ()) -> list[int]:
    """Ids up to and including the user header: what a model continues when it is to write the user's turn
    itself.
    """
    before, _ = _split_user_turn(tokenizer, history)
    return token_id_list(tokenizer(before, add_special_tokens=False))


def end_of_user_turn_id(tokenizer: Any) -> int:
    """The special token with which the chat template closes a user turn."""
    _, after = _split_user_turn(tokenizer, ())
    special = special_ids(tokenizer)
    for token_id in token_id_list(tokenizer(after, add_special_tokens=False)):
        if token_id in special:
            return token_id
    raise ValueError(
        f"the chat template of {tokenizer_name(tokenizer)} closes a user turn with {after!r}, which holds "
        "no special token; a model cannot be told to stop there"
    )


def template_hash(tokenizer: Any) -> str:
    """Content hash of the chat template ("none" when there is no template)."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """Content hash of vocabulary, special tokens, chat template and the ids of a few probe strings."""
    content = {
        "vocabulary": sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items()),
        "special_tokens": sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
        "special_ids": sorted(special_ids(tokenizer)),
        "template": template_hash(tokenizer),
        "probes": [token_id_list(tokenizer(text)) for text in _PROBES],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that plain text should not contain: named specials and added ones marked special."""
    ids = set(tokenizer.all_special_ids)
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            ids.add(token_id)
    return frozenset(ids)


def tokenizer_name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def token_id_list(value: Any) -> list[int]:
    """Plain ids of one text from whatever a tokenizer returns: a list, a tensor, a mapping, one row of any of
    them.
    """
    if isinstance(value, Mapping) or hasattr(value, "input_ids"):
        value = value["input_ids"] if isinstance(value, Mapping) else value.input_ids
    elif hasattr(value, "ids"):  # tokenizers.Encoding
        value = value.ids
    if hasattr(value, "tolist"):
        value = value.tolist()
    value = list(value)
    if value and (isinstance(value[0], list | tuple) or hasattr(value[0], "ids") or hasattr(value[0], "tolist")):
        if len(value) != 1:
            raise ValueError(f"expected the token ids of one text, given {len(value)} rows; encode texts one at a time")
        return token_id_list(value[0])
    return [operator.index(token_id) for token_id in value]


def is_unicode(text: str) -> bool:
    """Whether tokenizers take `text`: not if it holds half a surrogate pair, as cut JSON escapes and odd bytes on a
    command line leave.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 40) : error.start + 40]
        raise ValueError(f"the text holds half a surrogate pair, which is no character: {place!r}") from error
    return text


def _check_messages(messages: Sequence[Message]) -> None:
    """Templates print whatever a message holds: a None, a list of parts or nothing at all, without a word."""
    for index, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                given = f"has {name} {message[name]!r:.80}" if name in message else f"has no {name}"
                raise ValueError(f"message {index} {given}: expected a text")


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Where one assistant message lies in the rendered text: [start, content_end) is its text, `end` bounds
    its tail.
    """

    start: int
    content_end: int
    end: int


def _assistant_spans(tokenizer: Any, messages: Sequence[Message], text: str, *, raw: bool) -> list[_Span]:
    spans = []
    cursor = 0  # everything before it belongs to earlier messages
    for index, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] != "assistant":
            found = text.find(content, cursor)
            cursor = found + len(content) if found >= 0 else cursor
            continue
        if not content:
            raise ValueError(f"message {index} is an empty assistant message; drop it before training")
        prefix = render_text(tokenizer, messages[:index], add_generation_prompt=True, raw=raw) if index else ""
        if raw and index and messages[index - 1]["role"] != "assistant":
            prefix += _RAW_GAP
        through = render_text(tokenizer, messages[: index + 1], add_generation_prompt=False, raw=raw)
        if text.startswith(prefix) and text.startswith(through) and len(through) > len(prefix):
            span = _span_in(text, content, start=len(prefix), end=len(through))
        else:
            span = _located_span(tokenizer, messages, index, text, cursor, raw=raw)
        if span is None:
            raise ValueError(
                f"cannot find assistant message {index} in what the chat template of "
                f"{tokenizer_name(tokenizer)} renders: the template rewrites earlier turns or changes the "
                "message's text (a stripped think block does that); clean these messages to what the "
                "template prints, or give another template"
            )
        spans.append(span)
        cursor = span.content_end
    return spans


def _span_in(text: str, content: str, *, start: int, end: int) -> _Span | None:
    found = text.find(content, start, end)
    if found < 0:
        return None
    # What the template prints between header and text is the model's to write only if it is blank.
    begin = start if not text[start:found].strip() else found
    return _Span(start=begin, content_end=found + len(content), end=end)


def _located_span(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, cursor: int, *, raw: bool
) -> _Span | None:
    """The fall-back for templates that render earlier turns differently: find the header, then the text after
    it.
    """
    before = messages[:index]
    if not before:
        return None
    with_header = render_text(tokenizer, before, add_generation_prompt=True, raw=raw)
    without_header = render_text(tokenizer, before, add_generation_prompt=False, raw=raw)
    header = with_header[len(without_header) :] if with_header.startswith(without_header) else ""
    found = text.find(header, cursor) if header else -1
    if found < 0:
        return None
    start = found + len(header)
    following = text.find(header, start)
    return _span_in(
        text, messages[index]["content"].strip(), start=start, end=following if following >= 0 else len(text)
    )


def _token_range(offsets: Sequence[tuple[int, int]], span: _Span) -> tuple[int, int]:
    """Indices [first, stop) of the tokens that begin inside the span's text.

    Zero-width tokens are the tokenizer's own additions. A token that straddles the start belongs to the
    header.
    """
    inside = [
        index for index, (start, end) in enumerate(offsets) if end > start and span.start <= start < span.content_end
    ]
    if not inside:
        after = next((index for index, (start, _) in enumerate(offsets) if start >= span.content_end), len(offsets))
        return after, after
    return inside[0], inside[-1] + 1


def _end_token_index(
    token_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    first: int,
    end: int,
    special: frozenset[int],
) -> int | None:
    """The special token that ends the assistant's turn, unless other text comes first."""
    for index in range(first, len(token_ids)):
        if offsets[index][0] >= end and offsets[index][1] > offsets[index][0]:
            return None
        if token_ids[index] in special:
            return index
    return None


def _encode_with_offsets(
    tokenizer: Any, text: str, *, add_special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer of {tokenizer_name(tokenizer)} reports no offsets ({type(tokenizer).__name__}); "
            "training masks need a fast tokenizer (one with a tokenizer.json)"
        )
    encoding = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    offsets = [(int(start), int(end)) for start, end in encoding["offset_mapping"]]
    return token_id_list(encoding), offsets


def _split_user_turn(tokenizer: Any, history: Sequence[Message]) -> tuple[str, str]:
    messages = [*history, {"role": "user", "content": _SENTINEL}]
    before, found, after = render_text(tokenizer, messages, add_generation_prompt=False).partition(_SENTINEL)
    if not found or not before or _SENTINEL in after:
        raise ValueError(
            f"the chat template of {tokenizer_name(tokenizer)} does not print a user message once and "
            "unchanged, so the text before a user's turn cannot be derived from it"
        )
    return before, after


def _raw_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Contents one after another: an answer ends with the end token, other text is set off from what follows it."""
    end = getattr(tokenizer, "eos_token", None) or ""
    last = len(messages) - 1
    gaps = [end if one["role"] == "assistant" else _RAW_GAP * (index < last) for index, one in enumerate(messages)]
    return "".join(message["content"] + gap for message, gap in zip(messages, gaps, strict=True))
