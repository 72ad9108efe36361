"""The acceptance test: OpenAI's own client against the running server, on the demonstration target.

With drafts and without them the tokens are equal (float32, greedy and seeded). A different token would be a fault here:
near ties of the prompts used are decided the same way, since drafted and plain rounds run in the same process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from infer.cost import CostModel
from infer.drafters import NgramDrafter, TreeSettings
from infer.engine import Engine
from infer.scheduling import Sharing
from infer.target import TargetModel
from tests.infer.serve.serving import Running, served, wait_until

MODEL = "smollm2"
TURNS: list[Any] = [{"role": "user", "content": "Write a story about a cat that sat on a mat."}]

REPEAT: list[Any] = [{"role": "user", "content": "Write ten times, in a list: The cat sat on the mat."}]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Running]:
    target = TargetModel.load(smollm2_path, dtype="float32")
    tree = TreeSettings(max_nodes=8, max_depth=5, adaptive=False)
    engine = Engine(
        target,
        NgramDrafter(),
        max_requests=4,
        max_length=512,
        tree=tree,
        cost=CostModel.free(),
        sharing=Sharing.among_callers(follow_clock=False),
    )
    with served(engine, model_names=(MODEL,), api_keys=("secret",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=120.0) as one:
        yield one


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    defaults = {"model": MODEL, "messages": TURNS, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **fields})


def joined(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_a_chat_is_the_same_streamed_whole_drafted_and_plain(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    fields = {**fields, "messages": REPEAT, "max_tokens": 40}
    answer = ask(client, **fields, extra_body={"acceptance": True})
    text = answer.choices[0].message.content
    assert text
    assert joined(ask(client, **fields, stream=True)) == text
    plain = ask(client, **fields, extra_body={"draft": False, "acceptance": True})
    assert plain.choices[0].message.content == text
    assert plain.acceptance["num_drafts"] == 0
    assert answer.acceptance["num_accepted_tokens"] > 0 or fields["temperature"] > 0
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == answer.acceptance["num_accepted_tokens"]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_usage_comes_last_in_a_stream(client: openai.OpenAI) -> None:
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_completion_goes_on_with_its_prompt(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(**fields)
    assert "Paris" in answer.choices[0].text
    streamed = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    echoed = client.completions.create(**fields, echo=True)
    assert echoed.choices[0].text == fields["prompt"] + answer.choices[0].text


def test_logprobs_in_both_forms(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token and entry.logprob <= 0 for entry in content)
    completion = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, temperature=0, logprobs=2)
    told = completion.choices[0].logprobs
    assert "".join(told.tokens) == completion.choices[0].text
    assert told.text_offset[1] == len(told.tokens[0])
    # The prompt is decoded alike in both: the same model gives the same numbers.
    again = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, temperature=0, logprobs=2)
    assert again.choices[0].logprobs == told


def test_stops_seeds_and_samples(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    stop = text.split()[2]
    stopped = ask(client, stop=[stop]).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.message.content == text[: text.index(stop)]
    several = ask(client, n=3, temperature=1, seed=3, max_tokens=10)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    assert [
        choice.message.content for choice in ask(client, n=3, temperature=1, seed=3, max_tokens=10).choices
    ] == texts
    other = ask(client, n=3, temperature=1, seed=4, max_tokens=10)
    assert [choice.message.content for choice in other.choices] != texts


def test_penalties_and_biases_count(client: openai.OpenAI, server: Running) -> None:
    text = ask(client).choices[0].message.content
    assert ask(client, frequency_penalty=2, presence_penalty=2).choices[0].message.content != text
    assert ask(client, extra_body={"repetition_penalty": 1.5}).choices[0].message.content != text
    tokens = server.post("/tokenize", {"prompt": text}, headers={"authorization": "Bearer secret"}).json()["tokens"]
    banned = ask(client, logit_bias={str(tokens[0]): -100}).choices[0].message.content
    assert banned != text


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    turns = [{"role": "user", "content": "Describe a pet and count its legs, as JSON in one line."}]
    answer = ask(client, messages=turns, response_format=wanted, max_tokens=100)
    value = json.loads(answer.choices[0].message.content)
    assert value["animal"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 9
    plain = ask(client, messages=turns, response_format=wanted, max_tokens=100, extra_body={"draft": False})
    assert plain.choices[0].message.content == answer.choices[0].message.content


def test_the_client_knows_every_error(client: openai.OpenAI, server: Running) -> None:
    """The client's own classes of errors, with the parameter and the code where there is one."""
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(client, extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)
    with pytest.raises(openai.BadRequestError) as untaught:  # SmolLM2's template lists no tools
        ask(client, tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    assert untaught.value.param == "tools"


def test_an_error_in_a_stream_is_raised(client: openai.OpenAI, server: Running) -> None:
    headers = {"authorization": "Bearer secret"}
    tokens = server.post("/tokenize", {"prompt": "a"}, headers=headers).json()["tokens"]
    body = {"regex": "a", "bad_words": ["a"]}
    with pytest.raises(openai.APIError, match="no token is left"):
        list(ask(client, stream=True, logit_bias={str(tokens[0]): -1e9}, extra_body=body))


def test_a_stream_that_is_closed_frees_its_slot(client: openai.OpenAI, server: Running) -> None:
    stream = ask(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until(lambda: not server.engine.status().num_running)


def test_several_turns_reuse_nothing_wrong(client: openai.OpenAI) -> None:
    """A chat that goes on with its own answer says what a new server says to the same messages."""
    first = ask(client).choices[0].message
    turns = [*TURNS, first.model_dump(exclude_none=True), {"role": "user", "content": "Once more."}]
    warm = ask(client, messages=turns).choices[0].message.content
    assert warm == ask(client, messages=turns, extra_body={"draft": False}).choices[0].message.content
