"""What bodies become: every field reaches the engine, and whatever cannot be served is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from infer.serve.answers import event
from infer.serve.errors import ApiError
from infer.serve.prepare import Call, Preparer
from infer.serve.protocol import ChatRequest, CompletionRequest
from infer.serve.reading import parse, read_json
from infer.serve.settings import Limits, ServeSettings
from infer.serve.spelling import Spelling
from tests.infer.serve.serving import toy_engine, toy_target
from tests.toy_tokenizer import CHATML, toy_tokenizer

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    return Preparer(toy_engine(), ServeSettings(model_names=("toy", "alias")))


def chat_call(preparer: Preparer, **fields: Any) -> Call:
    body = json.dumps({"messages": USER, **fields}).encode()
    return preparer.chat(parse(ChatRequest, body, preparer.settings.limits), owner="somebody")


def completion_call(preparer: Preparer, **fields: Any) -> Call:
    body = json.dumps({"prompt": "ab", **fields}).encode()
    return preparer.completion(parse(CompletionRequest, body, preparer.settings.limits), owner="somebody")


def refused(preparer: Preparer, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat_call(preparer, **fields)
    return caught.value


ACCEPTED = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.9, "top_p", 0.9),
    "top_k": (-1, "top_k", 0),
    "min_p": (0.1, "min_p", 0.1),
    "seed": (-5, "seed", -5),
    "n": (3, "n", 3),
    "presence_penalty": (1, "presence_penalty", 1.0),
    "frequency_penalty": (-0.5, "frequency_penalty", -0.5),
    "repetition_penalty": (1.2, "repetition_penalty", 1.2),
    "no_repeat_ngram_size": (3, "no_repeat_ngram_size", 3),
    "logit_bias": ({"12": -100}, "logit_bias", {12: -100.0}),
    "max_tokens": (7, "max_tokens", 7),
    "max_completion_tokens": (7, "max_tokens", 7),
    "min_tokens": (2, "min_tokens", 2),
    "stop": ("x", "stop", ("x",)),
    "stop_token_ids": ([5, 6], "stop_token_ids", (5, 6)),
    "ignore_eos": (True, "ignore_eos", True),
    "logprobs": (True, "logprobs", 0),
    "regex": ("[0-9]+", "regex", "[0-9]+"),
    "guided_regex": ("[0-9]+", "regex", "[0-9]+"),
    "guided_choice": (["a", 'b"'], "grammar", r'start: "a" | "b\""'),
    "guided_grammar": ("start: /a/", "grammar", "start: /a/"),
    "guided_json": ({"type": "null"}, "json_schema", '{"type":"null"}'),
    "response_format": ({"type": "json_object"}, "json_schema", '{"type":"object"}'),
    "structured_outputs": ({"json": '{"type": "null"}'}, "json_schema", '{"type":"null"}'),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_field_reaches_the_engine(preparer: Preparer, name: str) -> None:
    """A field that is taken changes the parameters: none is dropped."""
    given, parameter, expected = ACCEPTED[name]
    (prompt,) = chat_call(preparer, **{name: given}).prompts
    (plain,) = chat_call(preparer).prompts
    assert getattr(prompt.params, parameter) == expected
    assert getattr(plain.params, parameter) != expected or name == "top_k"


def test_bad_words_are_banned_with_and_without_a_space(preparer: Preparer) -> None:
    (prompt,) = chat_call(preparer, bad_words=["ab"]).prompts
    letters = toy_tokenizer()
    assert prompt.params.bad_words == tuple(
        tuple(letters(text, add_special_tokens=False)["input_ids"]) for text in ("ab", " ab")
    )


NO_EFFECT = {
    "store": False,
    "service_tier": "auto",
    "best_of": 1,
    "use_beam_search": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "parallel_tool_calls": True,
    "metadata": {"a": "b"},
}


def test_fields_without_effect_are_taken_with_their_one_value(preparer: Preparer) -> None:
    assert chat_call(preparer, **NO_EFFECT).prompts == chat_call(preparer).prompts


@pytest.mark.parametrize(("field", "value"), [("store", "0"), ("skip_special_tokens", "1.0"), ("best_of", "true")])
def test_numbers_are_no_truth_values(field: str, value: str) -> None:
    """Though to Python the one equals the other."""
    with pytest.raises(ApiError, match=rf"{field} must be") as refused:
        parse(CompletionRequest, f'{{"prompt": "a", "{field}": {value}}}'.encode(), Limits())
    assert refused.value.param == field


def test_null_is_like_absent(preparer: Preparer) -> None:
    """Clients send null for what was not set, also for fields that this server does not know."""
    names = {*ChatRequest.model_fields, "nobody_knows_this"} - {"messages"}
    assert chat_call(preparer, **dict.fromkeys(names)) == chat_call(preparer)


REFUSED = {
    "temprature": (1, "temprature", "did you mean 'temperature'"),
    "functions": ([], "functions", "not supported"),
    "store": (True, "store", "must be False"),
    "tool_choice": ("required", "tool_choice", "'none' or 'auto'"),
    "temperature": (-1, "temperature", "greater than or equal to 0"),
    "top_p": (0, "top_p", "greater than 0"),
    "top_k": (1.5, "top_k", "integer"),
    "seed": (1 << 63, "seed", "less than"),
    "n": (65, "n", "at most 64"),
    "stop": ([""], "stop", "non-empty"),
    "max_tokens": (0, "max_tokens", "greater than or equal to 1"),
    "logit_bias": ({"a": 1}, "logit_bias", "pattern"),
    "min_tokens": (600, "min_tokens", "max_tokens"),
    "top_logprobs": (3, "top_logprobs", "logprobs: true"),
    "stream_options": ({"include_usage": True}, "stream_options", "stream: true"),
    "tree": (True, "tree", "acceptance: true"),
    "draft": ({"max_nodes": 0}, "draft.max_nodes", "greater than or equal to 1"),
    "response_format": ({"type": "json_schema"}, "response_format.json_schema", "json_schema"),
    "chat_template_kwargs": ({"tools": "x"}, "chat_template_kwargs", "cannot set 'tools'"),
    "structured_outputs": ({}, "structured_outputs", "is empty"),
    "bad_words": ([" "], "bad_words", "blank"),
    "guided_choice": ([], "guided_choice", "not empty"),
    "model": ("gpt-4", "model", "toy, alias"),
    "user": ("x" * 300, "user", "256"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(preparer: Preparer, name: str) -> None:
    given, param, words = REFUSED[name]
    error = refused(preparer, **{name: given})
    assert (error.status, error.param) == (404 if name == "model" else 400, param)
    assert words in error.message


CONTRADICTIONS = [
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"regex": "a", "grammar": "start: /a/"}, "grammar"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), CONTRADICTIONS)
def test_contradictions_name_a_parameter(preparer: Preparer, fields: dict[str, Any], param: str) -> None:
    assert refused(preparer, **fields).param == param


def test_a_prompt_that_is_too_long_is_told_both_lengths(preparer: Preparer) -> None:
    """The prompt's, what is asked for and the limit; with nothing asked for, an answer takes what is left."""
    error = refused(preparer, messages=[{"role": "user", "content": "x" * 600}], max_tokens=5)
    assert error.code == "context_length_exceeded"
    assert all(number in error.message for number in ("619", "5 more", "512"))
    (prompt,) = chat_call(preparer).prompts
    assert len(prompt.token_ids) + prompt.params.max_tokens == 512
    assert completion_call(preparer).prompts[0].params.max_tokens == 16


def test_a_prompt_beyond_all_bounds_is_not_encoded(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer, "tokenizer", None)
    monkeypatch.setattr(preparer, "_tokenizer", lambda: None)  # would fail if it were asked
    with pytest.raises(ApiError, match="1000000 characters, far more than the 512 tokens") as caught:
        completion_call(preparer, prompt="x" * 1_000_000)
    assert caught.value.code == "context_length_exceeded"


BODIES = {
    "NaN": b'{"messages": [], "temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "a number beyond floats": b'{"temperature": 1e999}',
    "an integer beyond all bounds": b'{"seed": ' + b"9" * 5000 + b"}",
    "a list, deep": b"[" * 100_000,
    "an object, deep": b'{"a":' * 100 + b"1" + b"}" * 100,
    "a key twice": b'{"model": "a", "model": "b"}',
    "no UTF-8": b"\xff\xfe",
    "no JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "two bodies": b"{}{}",
    "too many keys": json.dumps({str(key): 1 for key in range(10_001)}).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_odd_bodies_are_refused_whole(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, BODIES[name], Limits())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_depth_is_bounded_where_it_says(preparer: Preparer) -> None:
    assert read_json(b'{"a":' * 3 + b"1" + b"}" * 3, max_depth=3)
    with pytest.raises(ApiError, match="more than 2 levels"):
        read_json(b'{"a":' * 3 + b"1" + b"}" * 3, max_depth=2)


@pytest.mark.parametrize("field", ["stop", "regex", "bad_words", "model", "guided_json", "user", "metadata", "\ud800"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(field: str) -> None:
    """No field may bring it to a tokeniser, a parser or a log; a whole pair is a character."""
    body = {"messages": [{"role": "user", "content": "Hello"}], field: {"bad_words": ["\ud800"]}.get(field, "\ud800")}
    with pytest.raises(ApiError, match="half a surrogate pair") as caught:
        read_json(json.dumps(body).encode(), max_depth=9)
    assert caught.value.status == 400
    assert read_json(b'{"a": "\\ud83c\\udf89"}', max_depth=9) == {"a": "\U0001f389"}


def test_half_a_surrogate_pair_is_no_text(preparer: Preparer) -> None:
    error = refused(preparer, messages=[{"role": "user", "content": "\ud800"}])
    assert error.status == 400
    assert json.loads(error.response().body) == error.body


@pytest.mark.parametrize("content", ["a\x00b", "\u2028", "\U0001f389"])
def test_odd_characters_are_served(preparer: Preparer, content: str) -> None:
    (prompt,) = chat_call(preparer, messages=[{"role": "user", "content": content}]).prompts
    assert content in preparer.detokenize(prompt.token_ids)


def test_parts_are_joined_and_other_kinds_refused(preparer: Preparer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    in_parts = chat_call(preparer, messages=[{"role": "user", "content": parts}])
    assert in_parts == chat_call(preparer, messages=[{"role": "user", "content": "a\nb"}])
    error = refused(
        preparer, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    )
    assert error.param == "messages.0.content.0.type"


def test_tools_go_to_templates_that_list_them(preparer: Preparer) -> None:
    """Tools that a template would not print are refused, since the model would never know of them."""
    call = chat_call(preparer, tools=[TOOL])
    assert "add" in preparer.detokenize(call.prompts[0].token_ids)
    assert call.takes_tools
    assert chat_call(preparer, tools=[TOOL], tool_choice="none") == chat_call(preparer)
    deaf = Preparer(toy_engine(toy_target(template=CHATML)), preparer.settings)
    assert refused(deaf, tools=[TOOL]).param == "tools"
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
    said = [*USER, called, {"role": "tool", "content": "2", "tool_call_id": "1"}]
    assert '"a": 1' in preparer.detokenize(chat_call(preparer, messages=said).prompts[0].token_ids)
    assert refused(deaf, messages=said).param == "messages"


def test_a_last_message_of_the_assistants_can_be_continued(preparer: Preparer) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    (prompt,) = chat_call(preparer, messages=messages, continue_final_message=True).prompts
    assert preparer.detokenize(prompt.token_ids).endswith("assistant\nIt is")


def test_no_chat_template_is_told() -> None:
    preparer = Preparer(toy_engine(toy_target(template=None)), ServeSettings())
    error = refused(preparer)
    assert "has no chat template" in error.message
    assert error.param == "messages"


@pytest.mark.parametrize(("prompt", "number"), [("ab", 1), (["ab", "c"], 2), ([5, 6], 1), ([[5], [6, 7]], 2)])
def test_prompts_of_completions_have_four_forms(preparer: Preparer, prompt: Any, number: int) -> None:
    call = completion_call(preparer, prompt=prompt, n=2)
    assert len(call.prompts) == number
    assert call.num_choices == 2 * number


def test_recommended_sampling_gives_way_to_the_request() -> None:
    preparer = Preparer(toy_engine(), ServeSettings(sampling_defaults={"temperature": 0.6, "top_p": 0.9}))
    (prompt,) = chat_call(preparer, top_p=0.5).prompts
    assert (prompt.params.temperature, prompt.params.top_p) == (0.6, 0.5)
    (plain,) = chat_call(Preparer(toy_engine(), ServeSettings())).prompts
    assert (plain.params.temperature, plain.params.top_p) == (1.0, 1.0)


def test_whose_a_request_is(preparer: Preparer) -> None:
    assert chat_call(preparer).owner == "somebody"
    assert chat_call(preparer, user="me").owner == "me"


def test_limits_hold(preparer: Preparer) -> None:
    small = Limits(messages=1, stops=1, logit_bias=1, tools=1, constraint_bytes=10, prompts=1, bad_words=1)
    bounded = Preparer(toy_engine(), ServeSettings(limits=small))
    too_much = {
        "messages": USER * 2,
        "stop": ["a", "b"],
        "logit_bias": {"1": 1, "2": 1},
        "tools": [TOOL, TOOL],
        "bad_words": ["a", "b"],
        "regex": "a" * 11,
    }
    for name, value in too_much.items():
        assert refused(bounded, **{name: value}).param == name
    with pytest.raises(ApiError, match="prompt"):
        completion_call(bounded, prompt=["a", "b"])


def test_a_grammar_of_choices_is_one_of_them(preparer: Preparer) -> None:
    """Letters that mean something to grammars and JSON stand for themselves."""
    choices = ['a"b', "c\\d", "/e/", "f | g", "h\ni"]
    (prompt,) = chat_call(preparer, guided_choice=choices).prompts
    target: Any = toy_target()
    constraint = target.grammars.constraint(prompt.params, eos_ids=target.eos_ids)
    for choice in choices:
        path: list[int] = []
        for token in target.tokenizer(choice, add_special_tokens=False)["input_ids"]:
            assert constraint.allowed(path)[token]
            path.append(token)
        assert constraint.allowed(path)[1]


def test_bytes_of_tokens_join_to_the_text() -> None:
    """A token that is part of a character has its own bytes, though its text is a replacement sign."""
    tokenizer = toy_tokenizer()
    spelling = Spelling(tokenizer)
    text = "é🎉 漢\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bytes(byte for token in ids for byte in spelling.bytes(token)).decode() == text
    assert spelling.text(ids[0]) == "\ufffd"
    assert spelling.key(ids[0]) == r"bytes:\xc3"


def test_events_are_one_ascii_line() -> None:
    """Whatever separates lines for some reader does not stand in an event."""
    data = event({"text": "a\nb\r\u2028\x85\x0b\x1c"})
    assert data.isascii()
    assert data.endswith(b"\n\n")
    assert len(data.decode().splitlines()) == 2
    with pytest.raises(ValueError, match="not JSON compliant"):
        event({"value": math.nan})
