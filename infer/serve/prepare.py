"""What a request means to the engine: token ids, sampling parameters, bounds of drafting.

All of it is work on a processor (templates, tokenisers), so the app runs it in worker threads.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.chat import encode_text, render_text, token_id_list, tokenizer_name
from infer.engine import Engine
from infer.request import DraftBounds
from infer.sampling import SamplingParams
from infer.serve.constraints import constraints_of
from infer.serve.errors import ApiError
from infer.serve.parsing import opens_reasoning
from infer.serve.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DraftOptions,
    SamplingFields,
    TokenizeRequest,
    Tool,
)
from infer.serve.settings import ServeSettings

COMPLETION_TOKENS = 16
"""Longest completion where the request does not say: OpenAI's and vLLM's default."""

_PLAIN_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "no_repeat_ngram_size", "min_tokens", "ignore_eos",
)  # fmt: skip

_MARGIN = 4
"""Normalisers of tokenizers may shorten a text, hardly to a quarter."""

# What clients call the engine's parameters, where its complaints name them.
_CLIENT_NAMES = {
    **{
        name: name
        for name in (*_PLAIN_FIELDS, "max_tokens", "stop", "stop_token_ids", "logit_bias", "bad_words", "draft")
    },
    "json_schema": "response_format",
    "regex": "regex",
    "grammar": "grammar",
    "prompt": "prompt",
    "max_nodes": "draft",
    "max_depth": "draft",
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready to be submitted. text: shown in front of the answer, where `echo` asks for it."""

    token_ids: list[int]
    params: SamplingParams
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one HTTP request asks of the engine.

    opened: the prompt ends within reasoning, with which the answer goes on. takes_tools: tool calls are to be told
    apart from the text. Answer `i` of prompt `p` is choice `p * n + i`.
    """

    prompts: tuple[Prompt, ...]
    draft: DraftBounds | None
    owner: str
    tag: str
    is_chat: bool
    stream: bool
    include_usage: bool
    acceptance: bool
    trees: bool
    names: Mapping[str, str]
    opened: bool = False
    takes_tools: bool = False

    @property
    def num_choices(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)


class Preparer:
    """Makes calls of requests to one engine."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.settings = settings
        self.tokenizer = engine.target.tokenizer
        self.max_length = min(engine.max_length or engine.target.max_length, engine.target.max_length)
        self.vocab_size = engine.target.vocab_size
        self._reserved = _reserved_names(self.tokenizer)
        self._most_characters = _MARGIN * self.max_length * _longest_token(self.tokenizer)

    def chat(self, request: ChatRequest, *, owner: str) -> Call:
        self.check_model(request.model)
        self._check(request)
        takes_tools = bool(request.tools) and request.tool_choice != "none"
        text = self._render(request, request.tools if takes_tools else None)
        token_ids = self._encode(text, add_special_tokens=False, name="messages")
        names = {**_names(request), "prompt": "messages", "logprobs": "top_logprobs"}
        max_tokens = self._max_tokens(_chat_max_tokens(request), len(token_ids), name="messages")
        params = self._params(request, max_tokens=max_tokens, logprobs=_chat_logprobs(request), names=names)
        prompt = Prompt(token_ids=token_ids, params=params)
        opened = opens_reasoning(text)
        return _call(request, [prompt], owner=owner, names=names, opened=opened, takes_tools=takes_tools, is_chat=True)

    def completion(self, request: CompletionRequest, *, owner: str) -> Call:
        self.check_model(request.model)
        self._check(request)
        names = {**_names(request), "logprobs": "logprobs"}
        if request.echo and request.logprobs is not None:
            raise ApiError("echo does not tell the prompt's logprobs: give one of the two", param="echo")
        prompts = []
        for one in _prompt_list(request.prompt, self.settings.limits.prompts):
            token_ids = self._encode(one, add_special_tokens=request.add_special_tokens is not False)
            asked = request.max_tokens or self.settings.default_max_tokens or COMPLETION_TOKENS
            if request.max_tokens is None:  # a default gives way to the context
                asked = max(1, min(asked, self.max_length - len(token_ids)))
            max_tokens = self._max_tokens(asked, len(token_ids), name="prompt")
            params = self._params(request, max_tokens=max_tokens, logprobs=request.logprobs, names=names)
            prompts.append(Prompt(token_ids=token_ids, params=params, text=self._echo(request, one)))
        return _call(request, prompts, owner=owner, names=names)

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("give a prompt or messages, one of the two", param="prompt")
        if request.prompt is not None:
            token_ids = self._encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        else:
            text = self._render(request, request.tools)
            token_ids = self._encode(text, add_special_tokens=request.add_special_tokens is True)
        answer = {"count": len(token_ids), "max_model_len": self.max_length, "tokens": token_ids}
        if request.return_token_strs:
            answer["token_strs"] = self.tokenizer.convert_ids_to_tokens(token_ids)
        return answer

    def detokenize(self, tokens: Sequence[int]) -> str:
        outside = next((token for token in tokens if token >= self.vocab_size), None)
        if outside is not None:
            raise ApiError(f"tokens holds {outside}: this model has ids 0 to {self.vocab_size - 1}", param="tokens")
        text = self._tokenizer().decode(list(tokens), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.model_names:
            known = ", ".join(self.settings.model_names)
            raise ApiError(
                f"the model {name!r:.200} does not exist: this server has {known}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ApiError("this model was given no tokenizer: give token ids to /v1/completions", param="prompt")
        return self.tokenizer

    def _encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool, name: str = "prompt") -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._tokenizer()
        if len(prompt) > self._most_characters:  # it need not be encoded to know that it is too long
            raise ApiError(
                f"the prompt has {len(prompt)} characters, far more than the {self.max_length} tokens that fit: "
                "shorten it",
                code="context_length_exceeded",
                param=name,
            )
        if add_special_tokens:
            return encode_text(tokenizer, prompt)
        return token_id_list(tokenizer(prompt, add_special_tokens=False, verbose=False))

    def _echo(self, request: CompletionRequest, prompt: str | Sequence[int]) -> str:
        if not request.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.detokenize(prompt)

    def _render(self, request: ChatRequest | TokenizeRequest, tools: Sequence[Tool] | None) -> str:
        """The chat as text. What the template does not print would be lost without a word: that is refused."""
        messages, limits = request.messages or [], self.settings.limits
        _check_number("messages", len(messages), limits.messages)
        _check_number("tools", len(tools or ()), limits.tools)
        if not messages:
            raise ApiError("messages is empty: give at least one message", param="messages")
        options = self._template_options(request)
        plain = [_for_template(index, message) for index, message in enumerate(messages)]
        schemas = [tool.model_dump(exclude_none=True) for tool in tools or ()]

        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
            try:
                return render_text(
                    self._tokenizer(),
                    messages,
                    add_generation_prompt=_adds_generation_prompt(request),
                    tools=tools,
                    options=options,
                )
            except ValueError as error:
                raise ApiError(" ".join(str(error).split()), param="messages") from None

        text = render(plain, schemas)
        if schemas and render(plain, ()) == text:
            raise ApiError(
                f"the chat template of {tokenizer_name(self.tokenizer)} ignores tools: this model was not made to call "
                "any",
                param="tools",
                code="unsupported_parameter",
            )
        called = [message for message in plain if "tool_calls" in message]
        without = [{name: one for name, one in message.items() if name != "tool_calls"} for message in plain]
        if called and render(without, schemas) == text:
            raise ApiError(
                f"the chat template of {tokenizer_name(self.tokenizer)} ignores the tool_calls of messages",
                param="messages",
                code="unsupported_parameter",
            )
        return text

    def _template_options(self, request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        taken = sorted(self._reserved.intersection(options))
        if taken:
            raise ApiError(f"chat_template_kwargs cannot set {taken[0]!r}", param="chat_template_kwargs")
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise ApiError(
                    "continue_final_message goes on with the last message, and add_generation_prompt begins a new one: "
                    "give one of the two",
                    param="continue_final_message",
                )
            if not request.messages or request.messages[-1].role != "assistant":
                raise ApiError(
                    "continue_final_message needs a last message of the assistant's", param="continue_final_message"
                )
            options["continue_final_message"] = True
        return options

    def _max_tokens(self, asked: int | None, num_prompt: int, *, name: str) -> int:
        """How many tokens an answer may have: what was asked for, else what is left."""
        left = self.max_length - num_prompt
        if asked is None:
            asked = min(left, self.settings.default_max_tokens or left)
        if asked <= left and left > 0:
            return asked
        wanted = f"and asks for {asked} more" if asked > 0 else "and leaves no room for an answer"
        raise ApiError(
            f"the prompt has {num_prompt} tokens {wanted}, but at most {self.max_length} fit, prompt and answer "
            "together: shorten it or lower max_tokens",
            param=name,
            code="context_length_exceeded",
        )

    def _params(
        self, request: SamplingFields, *, max_tokens: int, logprobs: int | None, names: Mapping[str, str]
    ) -> SamplingParams:
        values: dict[str, Any] = {"temperature": 1.0, **self.settings.sampling_defaults}
        given = {name: getattr(request, name) for name in _PLAIN_FIELDS}
        values.update({name: value for name, value in given.items() if value is not None})
        values["top_k"] = max(0, values.get("top_k", 0))
        values.update({kind: text for kind, text in constraints_of(request).values()})
        try:
            return SamplingParams(
                **values,
                max_tokens=max_tokens,
                stop=tuple([request.stop] if isinstance(request.stop, str) else request.stop or ()),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()} or None,
                bad_words=self._bad_words(request.bad_words or ()),
                logprobs=logprobs,
            )
        except ValueError as error:
            raise ApiError.of(error, names) from None

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of the words, as they stand at the beginning of a text and within one."""
        if not all(word.strip() for word in words):
            raise ApiError("bad_words holds a text that is empty or blank", param="bad_words")
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(self._encode(one, add_special_tokens=False)) for one in spellings))

    def _check(self, request: SamplingFields) -> None:
        """Limits, and fields that say nothing together."""
        limits = self.settings.limits
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        _check_number("n", request.n or 1, limits.samples)
        _check_number("stop", len(stops), limits.stops)
        if any(len(stop) > limits.stop_characters for stop in stops):
            raise ApiError(f"a stop text has more than {limits.stop_characters} characters", param="stop")
        _check_number("stop_token_ids", len(request.stop_token_ids or ()), limits.stop_token_ids)
        _check_number("logit_bias", len(request.logit_bias or ()), limits.logit_bias)
        _check_number("bad_words", len(request.bad_words or ()), limits.bad_words)
        self._check_constraint(constraints_of(request))
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options needs stream: true", param="stream_options")
        if request.tree and not (request.stream and request.acceptance):
            raise ApiError("tree needs stream: true and acceptance: true", param="tree")

    def _check_constraint(self, given: Mapping[str, tuple[str, str]]) -> None:
        if len(given) > 1:
            first, second = list(given)[:2]
            raise ApiError(f"{first} and {second} are both given: an answer takes at most one constraint", param=second)
        limit = self.settings.limits.constraint_bytes
        for name, (_, text) in given.items():
            if len(text.encode()) > limit:
                raise ApiError(f"{name} has more than {limit} bytes", param=name)


def _call(
    request: SamplingFields,
    prompts: Sequence[Prompt],
    *,
    owner: str,
    names: Mapping[str, str],
    opened: bool = False,
    takes_tools: bool = False,
    is_chat: bool = False,
) -> Call:
    return Call(
        prompts=tuple(prompts),
        draft=_draft_bounds(request.draft),
        owner=request.user or owner,
        tag=request.tag or "",
        is_chat=is_chat,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        acceptance=bool(request.acceptance),
        trees=bool(request.tree),
        names=names,
        opened=opened,
        takes_tools=takes_tools,
    )


def _draft_bounds(draft: bool | DraftOptions | None) -> DraftBounds | None:
    if draft is None or isinstance(draft, bool):
        return DraftBounds(enabled=False) if draft is False else None
    return DraftBounds(max_nodes=draft.max_nodes, max_depth=draft.max_depth)


def _prompt_list(prompt: Any, limit: int) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError("prompt is empty: give a text or token ids", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    _check_number("prompt", len(prompt), limit)
    assert isinstance(prompt, list)
    return prompt


def _chat_max_tokens(request: ChatRequest) -> int | None:
    first, second = request.max_tokens, request.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise ApiError(
            f"max_tokens is {first} and max_completion_tokens {second}: they are two names of one number, give one",
            param="max_completion_tokens",
        )
    return first if first is not None else second


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _adds_generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    return request.add_generation_prompt is not False and not request.continue_final_message


def _for_template(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: one text, and arguments of calls as objects."""
    if message.content is None and not message.tool_calls:
        raise ApiError(f"messages.{index}.content is missing", param=f"messages.{index}.content")
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    values = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    values["content"] = content
    if message.tool_calls:
        values["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in values["tool_calls"]:
            call["function"]["arguments"] = _arguments(index, call["function"]["arguments"])
    return values


def _arguments(index: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(
            f"messages.{index}.tool_calls has arguments {text!r:.80}: expected the JSON of an object",
            param=f"messages.{index}.tool_calls",
        )
    return value


def _names(request: SamplingFields) -> dict[str, str]:
    """What the client calls the engine's parameters."""
    return {**_CLIENT_NAMES, **{kind: name for name, (kind, _) in constraints_of(request).items()}}


def _check_number(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise ApiError(f"{name} is {number}, but this server takes at most {limit}", param=name, code="invalid_value")


def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1


def _reserved_names(tokenizer: Any) -> frozenset[str]:
    """What a request must not tell a template: what the server tells it, and what would replace the template."""
    if tokenizer is None:
        return frozenset()
    signature = inspect.signature(tokenizer.apply_chat_template)
    return frozenset({"messages", *signature.parameters, *tokenizer.special_tokens_map})
