"""The processor stack, against transformers' own processors and by hand, and the draws made from it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer.noise import gumbel, noise_key, position_key
from infer.proof.statistics import chi_square_tail
from infer.sampling import (
    Processor,
    SamplingError,
    SamplingParams,
    pick,
    probs,
    top_p_filter,
)

EOS = 2


def random_logits(vocab_size: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def process(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int] = (1,),
    output_ids: Sequence[int] = (),
) -> Tensor:
    """The processed scores of a single row."""
    processor = Processor(params, prompt_ids=prompt_ids, eos_ids=[EOS], vocab_size=len(logits))
    return processor.scores(logits, output_ids)


def draw(scores: Tensor, key: int | None) -> int:
    """What a request draws: the token of the largest score, with the noise of `key` unless it is greedy."""
    return pick(scores if key is None else scores + gumbel(key, len(scores)))


def reference(logits: Tensor, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> Tensor:
    """The same request through transformers' processors."""
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        bias = [[[token], value] for token, value in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.min_tokens:
        ends = [EOS, *params.stop_token_ids]
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt_ids), params.min_tokens, ends))
    if not params.greedy:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0.0:
            processors.append(MinPLogitsWarper(params.min_p))
    context = torch.tensor([[*prompt_ids, *output_ids]])
    scores = logits.float()[None].clone()
    for processor in processors:
        scores = processor(context, scores)
    return scores[0]


CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.1, 0.7, 1.0, 1.6],
    "top_k": [0, 0, 1, 2, 5, 50, 10_000],
    "top_p": [1.0, 1.0, 0.01, 0.5, 0.9, 0.999],
    "min_p": [0.0, 0.0, 0.02, 0.3, 1.0],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "logit_bias": [None, {3: 4.0, 5: -100.0, 7: 0.5}],
    "bad_words": [(), ((4,), (1, 6), (3, 1, 8), (5, 5))],
    "no_repeat_ngram_size": [0, 1, 2, 3],
    "min_tokens": [0, 3, 12],
    "stop_token_ids": [(), (9, 11)],
}


@pytest.mark.parametrize("seed", range(150))
def test_random_combinations_equal_transformers(seed: int) -> None:
    """Bitwise equal to transformers' processors in their order, for random parameters and histories."""
    generator = random.Random(seed)
    params = SamplingParams(max_tokens=20, **{name: generator.choice(values) for name, values in CHOICES.items()})
    vocab_size = generator.choice([13, 40, 3000])
    prompt_ids = [generator.randrange(12) for _ in range(generator.randrange(1, 6))]
    output_ids = [generator.randrange(12) for _ in range(generator.randrange(8))]
    logits = random_logits(vocab_size, seed)
    processor = Processor(params, prompt_ids=prompt_ids, eos_ids=[EOS], vocab_size=vocab_size)
    scores = processor.scores(logits, output_ids)
    expected = reference(logits, params, prompt_ids, output_ids)
    if bool(torch.isinf(expected).all()):  # transformers' top-p keeps one token even of a row without any
        assert bool(torch.isinf(scores).all())
    else:
        assert torch.equal(scores, expected)


@pytest.mark.parametrize("name", list(CHOICES))
def test_each_parameter_has_its_effect(name: str) -> None:
    """No parameter is silently ignored: every one alone changes the scores and agrees with transformers."""
    value = CHOICES[name][-1] if name not in ("top_k", "min_tokens", "stop_token_ids") else None
    values = {"top_k": 4, "min_tokens": 12, "stop_token_ids": (9, 11)}
    changes: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 20,
        name: values[name] if value is None else value,
    }
    if name == "stop_token_ids":
        changes["min_tokens"] = 12
    params = SamplingParams(**changes)
    prompt_ids, output_ids = [1, 4, 3, 1], [5, 3, 1]
    logits = random_logits(40, 1)
    scores = process(logits, params, prompt_ids, output_ids)
    assert not torch.equal(scores, logits)
    assert torch.equal(scores, reference(logits, params, prompt_ids, output_ids))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 8.0])
def test_top_p_equals_transformers_on_a_real_vocabulary(scale: float, seed: int) -> None:
    """From flat rows (full sort) to peaked ones (largest 256), bfloat16 rows with many ties included."""
    row = random_logits(49152, seed, scale)
    for logits, top_p in itertools.product((row, row.bfloat16().float()), (0.1, 0.9, 0.95)):
        expected = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0]
        assert torch.equal(top_p_filter(logits, top_p), expected)


def test_top_p_ties_at_the_cut() -> None:
    """Equal scores at the cut go where transformers' sort puts them, although a cheaper path exists for most
    rows.
    """
    logits = torch.zeros(5000)
    logits[100:110] = 9.0
    for top_p in (0.05, 0.1, 0.35, 0.5):
        expected = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0]
        assert torch.equal(top_p_filter(logits, top_p), expected)


@pytest.mark.parametrize("seed", range(10))
def test_top_p_within_rounding_of_the_cut(seed: int) -> None:
    """Where the limit equals a partial sum of probabilities, sums in another order cut elsewhere."""
    logits = random_logits(5000, seed, 2.0)
    partial_sums = probs(logits).sort(descending=True).values.cumsum(-1)
    for rank, nudge in itertools.product((0, 1, 5, 20, 70), (-1e-7, 0.0, 1e-7)):
        top_p = float(partial_sums[rank]) + nudge
        expected = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0]
        assert torch.equal(top_p_filter(logits, top_p), expected)


def test_every_continuation_of_a_repeated_prefix_is_banned() -> None:
    """Overlapping occurrences included: in 5 5 5 6 ... 5 5 the pair 5 5 is followed by 5 and by 6."""
    params = SamplingParams(no_repeat_ngram_size=3)
    logits = random_logits(12, 0)
    prompt_ids, output_ids = [5, 5, 5, 6, 8], [5, 5]
    scores = process(logits, params, prompt_ids, output_ids)
    assert (scores == -math.inf).nonzero().flatten().tolist() == [5, 6]
    assert torch.equal(scores, reference(logits, params, prompt_ids, output_ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_edited(dtype: torch.dtype) -> None:
    logits = random_logits(40, 3).to(dtype)
    before = logits.clone()
    for seed in range(60):
        generator = random.Random(seed)
        changes = {name: generator.choice(values) for name, values in CHOICES.items()}
        output_ids = [3, 1, 5]
        processor = Processor(
            SamplingParams(max_tokens=20, **changes),
            prompt_ids=[1, 2],
            eos_ids=[EOS],
            vocab_size=40,
        )
        scores = processor.scores(logits, output_ids)
        assert scores.dtype == torch.float32
        assert torch.equal(logits, before)
        assert output_ids == [3, 1, 5]


def test_the_stack_has_no_memory() -> None:
    """Nodes may be processed in any order and repeatedly (past bug of others: one history per round or per
    slot).
    """
    params = SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        no_repeat_ngram_size=2,
        bad_words=((1, 6),),
        min_tokens=2,
    )
    processor = Processor(params, prompt_ids=[1, 2, 3], eos_ids=[EOS], vocab_size=40)
    logits = random_logits(40, 5)
    paths = [[], [1], [1, 6], [1, 7], [7, 1, 7, 7]]
    fresh = [process(logits, params, [1, 2, 3], path) for path in paths]
    for index in (4, 0, 2, 2, 1, 3, 4):
        assert torch.equal(processor.scores(logits, paths[index]), fresh[index])
    assert not torch.equal(fresh[2], fresh[3])


def test_presence_and_frequency_count_output_tokens_only() -> None:
    """frequency * count + presence * (count > 0), over the output and not the prompt (OpenAI's and vLLM's
    definition).
    """
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = process(torch.zeros(6), params, [0, 0, 1], [1, 3, 3, 3])
    assert scores.tolist() == [0.0, -0.75, 0.0, -1.25, 0.0, 0.0]


def test_penalties_come_before_the_bias() -> None:
    """Multiplicative penalties see the model's own logits, not the bias."""
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, logit_bias={0: 3.0})
    scores = process(torch.tensor([1.0, 0.0]), params, [0])
    assert scores.tolist() == [3.5, 0.0]


def test_an_end_token_among_the_bad_words_is_banned() -> None:
    """Transformers drops such an entry silently; here a ban is a ban."""
    params = SamplingParams(bad_words=((EOS,),))
    scores = process(torch.zeros(4), params, [0])
    assert scores.tolist() == [0.0, 0.0, -math.inf, 0.0]


def test_prompt_ids_beyond_the_head_are_tolerated() -> None:
    """Some prompts hold ids (images) that the LM head does not have; they cannot be drawn, so penalise
    nothing.
    """
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, no_repeat_ngram_size=1, frequency_penalty=1.0)
    logits = random_logits(8, 7)
    scores = process(logits, params, [100, 3])
    assert bool((scores == -math.inf).nonzero().flatten().eq(3).all())


def test_greedy_is_neither_scaled_nor_truncated() -> None:
    logits = random_logits(100, 8)
    params = SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.5)
    assert torch.equal(process(logits, params), logits)


def test_only_temperature_is_one_division() -> None:
    logits = random_logits(1000, 9)
    scores = process(logits, SamplingParams(temperature=0.7), [1], [2])
    assert torch.equal(scores, logits / 0.7)


def test_low_temperature_law() -> None:
    """Verification must see the request's temperature: the law at 0.1 is softmax(logits / 0.1)."""
    logits = random_logits(50, 10)
    scores = process(logits, SamplingParams(temperature=0.1))
    torch.testing.assert_close(probs(scores).double(), torch.softmax(logits.double() / 0.1, -1), rtol=1e-4, atol=1e-7)


def test_top_k_one_is_greedy() -> None:
    params = SamplingParams(temperature=1.0, top_k=1)
    for seed in range(50):
        logits = random_logits(200, seed)
        scores = process(logits, params)
        assert draw(scores, position_key(seed, 0, 0, 0)) == int(logits.argmax())


def test_draw_follows_the_processed_law() -> None:
    """20,000 positions with temperature and top-k: chi-square at 1e-6, the seed is fixed."""
    params = SamplingParams(temperature=0.8, top_k=6)
    scores = process(random_logits(30, 11, 1.0), params)
    count = 20_000
    drawn = torch.tensor([draw(scores, position_key(3, 0, 0, position)) for position in range(count)])
    counts = torch.bincount(drawn, minlength=30).double()
    expected = probs(scores).double() * count
    kept = expected > 0
    assert int(kept.sum()) == 6
    assert counts[~kept].sum().item() == 0
    assert chi_square_tail(((counts - expected)[kept] ** 2 / expected[kept]).sum().item(), 5) > 1e-6


def test_draw_is_a_function_of_the_key() -> None:
    scores = torch.zeros(1000)
    keys = [position_key(1, sample, 0, position) for sample in range(2) for position in range(50)]
    drawn = [draw(scores, key) for key in keys]
    assert drawn == [draw(scores, key) for key in keys]
    assert len(set(drawn)) > 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    for size, first in itertools.product((5, 100, 49152), (0, 3)):
        logits = torch.zeros(size, dtype=dtype)
        logits[first:] = 1.5
        assert pick(process(logits, SamplingParams())) == first


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_rows_are_reported(value: float, key: int | None) -> None:
    """A NaN or an overflow must not turn into token 0."""
    scores = random_logits(300, 12)
    scores[17] = value
    with pytest.raises(SamplingError, match="overflowed"):
        draw(scores, key)


@pytest.mark.parametrize("key", [None, 5])
def test_a_row_without_tokens_is_reported(key: int | None) -> None:
    with pytest.raises(SamplingError, match="filters leave no token"):
        draw(torch.full((300,), -math.inf), key)


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_nan_survives_the_filters(changes: dict[str, Any]) -> None:
    """A filter must not hide a NaN from the check in `pick`."""
    logits = random_logits(3000, 13)
    logits[5] = math.nan
    scores = process(logits, SamplingParams(temperature=1.0, **changes), [1], [2])
    with pytest.raises(SamplingError):
        draw(scores, 1)


def test_draw_adds_noise_to_scores_not_to_probabilities() -> None:
    """Scores whose probability underflows in float32 still compete by their logits."""
    scores = torch.tensor([-200.0, -200.0, -math.inf])
    drawn = {draw(scores - 0.0, noise_key(key)) for key in range(50)}
    assert drawn == {0, 1}
    assert draw(scores, 3) == int((scores + gumbel(3, 3)).argmax())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be in \\[0, inf\\), got -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": "1"}, "temperature must be a finite number"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"top_p": 0.0}, "top_p must be in \\(0, 1\\], got 0.0"),
        ({"top_p": 1.01}, "top_p must be in"),
        ({"min_p": -0.1}, "min_p must be in \\[0, 1\\]"),
        ({"top_k": -1}, "top_k must be an integer of at least 0 \\(0 turns it off\\), got -1"),
        ({"top_k": 2.0}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens \\(11\\) must not exceed max_tokens \\(10\\)"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in \\(0, inf\\)"),
        ({"temperature": 1e39}, "to count in float32"),
        ({"repetition_penalty": 1e-300}, "to count in float32"),
        ({"logit_bias": {7: 1e39}}, "numbers up to 1e\\+30"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in \\[-2, 2\\]"),
        ({"frequency_penalty": -3}, "frequency_penalty must be in \\[-2, 2\\]"),
        ({"stop": ("",)}, "stop must hold non-empty strings"),
        ({"stop": (3,)}, "stop must hold non-empty strings"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must hold token ids"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list, got 7"),
        ({"bad_words": ((),)}, "bad_words must hold non-empty sequences"),
        ({"bad_words": ("no",)}, "bad_words must be a list, got 'no'"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias must map token ids"),
        ({"logit_bias": {1: math.nan}}, "numbers up to 1e\\+30"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be an integer"),
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": 1.0}, "n must be an integer"),
        ({"logprobs": -1}, "logprobs must be None \\(off\\) or .* 0 to 20, got -1"),
        ({"logprobs": 21}, "logprobs must be None"),
        ({"logprobs": True}, "logprobs must be None"),
        ({"exactness": "exact"}, "exactness 'exact' is unknown: expected bitwise, seed, distribution, lossy"),
        ({"exactness": ""}, "exactness '' is unknown"),
        ({"rule": ""}, "rule must be the name of a verification rule or None, got ''"),
        ({"rule": 3}, "rule must be the name"),
        ({"json_schema": ""}, "json_schema must be a mapping or JSON, got ''"),
        ({"json_schema": "{"}, "json_schema must be a mapping or JSON, got '{': Expecting"),
        ({"json_schema": "[" * 100_000}, "json_schema must be a mapping or JSON, got .*recursion"),
        ({"json_schema": "3"}, "json_schema must be a JSON object, got 3"),
        ({"json_schema": True}, "json_schema must be a JSON object, got True"),
        ({"json_schema": {"a": math.nan}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema cannot be written as JSON: .* is not a JSON value"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": 3}, "regex must be a text"),
        ({"grammar": ""}, "grammar must be a text that is not empty"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar are both given: an answer takes at most one constraint"),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex are both given"),
        ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos exclude each other"),
        ({"json_schema": {}, "ignore_eos": True}, "json_schema and ignore_eos exclude each other"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


@pytest.mark.parametrize("changes", [{"stop_token_ids": (40,)}, {"logit_bias": {40: 1.0}}, {"bad_words": ((1, 40),)}])
def test_ids_outside_the_vocabulary_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} holds ids outside the vocabulary: \\[40\\]"):
        Processor(SamplingParams(**changes), prompt_ids=[], eos_ids=[], vocab_size=40)


def test_from_dict_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown sampling parameter 'temprature'; did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(ValueError, match="unknown sampling parameter 'zzz'; known: temperature, "):
        SamplingParams.from_dict({"zzz": 1.0})


def test_from_dict_takes_parsed_json() -> None:
    """Lists, a lone stop string and string keys are how JSON spells these values."""
    params = SamplingParams.from_dict(
        {
            "temperature": 1,
            "stop": "END",
            "bad_words": [[1, 2]],
            "stop_token_ids": [3],
            "logit_bias": {"42": -1},
        }
    )
    assert params == SamplingParams(
        temperature=1.0, stop=("END",), bad_words=((1, 2),), stop_token_ids=(3,), logit_bias={42: -1.0}
    )
    assert isinstance(params.temperature, float)
    assert hash(params) == hash(params)


def test_a_schema_is_one_text_however_it_is_given() -> None:
    """Mappings and JSON texts of one schema are equal parameters, hashable, with keys in the order given."""
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": MappingProxyType({"type": "integer"})}}
    text = '{"type":"object","properties":{"b":{"const":"é"},"a":{"type":"integer"}}}'
    spaced = '{"type": "object",\n "properties": {"b": {"const": "\\u00e9"}, "a": {"type": "integer"}}}'
    params = [SamplingParams(json_schema=given) for given in (schema, text, spaced)]
    params.append(SamplingParams.from_dict({"json_schema": schema}))
    assert {one.json_schema for one in params} == {text}
    assert len(set(params)) == 1
    assert params[0].constraint == ("json_schema", text)
    reordered = SamplingParams(json_schema={"properties": schema["properties"], "type": "object"})
    assert reordered != params[0]


def test_from_dict_takes_what_requests_may_ask_for() -> None:
    values = {"n": 2, "logprobs": 0, "exactness": "lossy", "rule": "typical", "regex": " "}
    params = SamplingParams.from_dict(values)
    assert {name: getattr(params, name) for name in values} == values
    assert params.constraint == ("regex", " ")
    assert SamplingParams().constraint is None
    assert SamplingParams(grammar='start: "a"').constraint == ("grammar", 'start: "a"')


def test_greedy_property() -> None:
    assert SamplingParams().greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
