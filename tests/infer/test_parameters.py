"""Every sampling parameter does what it says, with drafts as without, alone and beside unlike neighbours.

One table has a case for each field of `SamplingParams`; a field without a case fails. Each case runs in plain decoding,
with chains and with trees that are mostly right, so that parameters which look at the text are at work inside accepted
blocks.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from infer.drafters import ScriptedDrafter, TreeSettings
from infer.engine import Engine
from infer.request import Completion, Request
from infer.sampling import Processor, SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from tests.infer import helpers
from tests.infer.helpers import plain, plain_ids, random_tree
from tests.toy_tokenizer import toy_tokenizer

EOS = 1
PROMPT = [40, 52, 38, 52]
NEIGHBOURS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([9, 9, 8, 7, 9, 9, 8], {"temperature": 0.0, "repetition_penalty": 1.4, "max_tokens": 17}),
    (list(range(20, 60)), {"temperature": 0.7, "top_k": 9, "logit_bias": {77: 3.0, EOS: -50.0}, "min_tokens": 20}),
    ([44], {"temperature": 1.3, "regex": "[a-f]{9}(,[a-f]{2})*", "frequency_penalty": 0.4}),
)
TREE = TreeSettings(max_nodes=24, max_depth=6, adaptive=False)

# Few tokens are likely, so that penalties and n-grams find something to object to.
REPEATING = {"logit_bias": {token: 7.0 for token in range(70, 90)}}
ENDING = {"logit_bias": {EOS: 7.0}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}


@dataclass(frozen=True)
class Case:
    """`changes` (or what makes them of the answer without) on top of `context`; `check` looks at the answers."""

    changes: dict[str, Any] | Callable[[Completion], dict[str, Any]]
    context: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Sequence[Completion]], bool] = lambda answers: True
    engine: dict[str, Any] = field(default_factory=dict)


def in_two_words(base: Completion) -> dict[str, Any]:
    """A token of the answer, and two that stand side by side further back."""
    return {"bad_words": ((base.token_ids[3],), base.token_ids[9:11])}


def letter_of(base: Completion) -> str:
    """An ASCII character well inside the answer, and not before."""
    return next(
        letter for at, letter in enumerate(base.text) if at > 5 and letter.isascii() and base.text.find(letter) == at
    )


def tokens_of(answers: Sequence[Completion]) -> tuple[int, ...]:
    return answers[0].token_ids


CASES: dict[str, Case] = {
    "temperature": Case({"temperature": 0.4}),
    "top_k": Case({"top_k": 2}),
    "top_p": Case({"top_p": 0.3}),
    "min_p": Case({"min_p": 0.5}),
    "seed": Case({"seed": 4}),
    "max_tokens": Case({"max_tokens": 7}, check=lambda answers: len(tokens_of(answers)) == 7),
    "stop": Case(
        lambda base: {"stop": (letter_of(base),)},
        check=lambda answers: answers[0].finish_reason == "stop" and answers[0].stop_reason not in answers[0].text,
    ),
    "stop_token_ids": Case(
        lambda base: {"stop_token_ids": (base.token_ids[10],)},
        check=lambda answers: answers[0].finish_reason == "stop" and tokens_of(answers)[-1] == answers[0].stop_reason,
    ),
    "ignore_eos": Case({"ignore_eos": True}, ENDING, lambda answers: len(tokens_of(answers)) == 24),
    "min_tokens": Case({"min_tokens": 15}, ENDING, lambda answers: tokens_of(answers).index(EOS) >= 14),
    "repetition_penalty": Case({"repetition_penalty": 1.6}, REPEATING),
    "presence_penalty": Case({"presence_penalty": 2.0}, REPEATING),
    "frequency_penalty": Case({"frequency_penalty": 1.5}, REPEATING),
    "logit_bias": Case({"logit_bias": {99: 6.0}}, check=lambda answers: 99 in tokens_of(answers)),
    "bad_words": Case(in_two_words),
    "no_repeat_ngram_size": Case(
        {"no_repeat_ngram_size": 2},
        REPEATING,
        lambda answers: max(Counter(pairwise(tokens_of(answers))).values()) == 1,
    ),
    "n": Case(
        {"n": 3},
        check=lambda answers: (
            [answer.sample for answer in answers] == [0, 1, 2] and len({answer.token_ids for answer in answers}) == 3
        ),
    ),
    "logprobs": Case({"logprobs": 3}, check=lambda answers: all(len(entry.top) == 3 for entry in answers[0].logprobs)),
    "exactness": Case(
        {"exactness": "seed"}, check=lambda answers: answers[0].lossless, engine={"exactness": "distribution"}
    ),
    "rule": Case({"rule": "match"}, check=lambda answers: answers[0].lossless, engine={"exactness": "lossy"}),
    "json_schema": Case(
        {"json_schema": SCHEMA, "max_tokens": 80},
        # White space before the number may take all tokens there are.
        check=lambda answers: answers[0].finish_reason == "length" or json.loads(answers[0].text)["a"] <= 99,
    ),
    "regex": Case(
        {"regex": "(ab|é){4}x"}, check=lambda answers: re.fullmatch("(ab|é){4}x", answers[0].text) is not None
    ),
    "grammar": Case(
        {"grammar": 'start: "<" /[a-z]{3,}/ ">"'},
        check=lambda answers: re.fullmatch("<[a-z]{3,}(>|$)", answers[0].text) is not None,
    ),
}


RANDOM_ONLY = ("temperature", "top_k", "top_p", "min_p", "seed", "n", "exactness", "rule")
"""Cases whose parameters do nothing to a greedy request, or are about the law of random ones."""


@pytest.fixture(scope="module")
def target(tiny_model) -> TargetModel:
    tokenizer = toy_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=EOS, pad_token_id=EOS)
    return TargetModel.wrap(model, tokenizer)


def sampling(**changes: Any) -> SamplingParams:
    return helpers.sampling(**{"temperature": 1.0, "ignore_eos": False, **changes})


def drafter(target: TargetModel, how: str, answers: Sequence[Completion]) -> ScriptedDrafter | None:
    """Drafts that know the `answers`: chains whose last token is wrong, or random trees mostly along them."""
    known = {(answer.prompt_token_ids, answer.sample): answer.token_ids for answer in answers}
    rng = random.Random(0)

    def chain(request: Request, limit: Any) -> DraftTree:
        right = known[request.prompt_ids, request.sample][len(request.output_ids) :][:5]
        return DraftTree.chain((*right, 7)[: limit.max_depth])

    def tree(request: Request, limit: Any) -> DraftTree:
        right = known[request.prompt_ids, request.sample][len(request.output_ids) :]
        return max((random_tree(rng, target.vocab_size, limit, right) for _ in range(3)), key=len)

    return {"plain": None, "chain": ScriptedDrafter(chain), "tree": ScriptedDrafter(tree)}[how]


def told(answers: Sequence[Completion]) -> list[tuple[Any, ...]]:
    """All that a parameter can change of an answer, but for the numbers in its log-probabilities."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.sample, answer.error)
        for answer in answers
    ]


def assert_same_logprobs(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """In float32 forwards of other widths differ in the last digits only; 1e-4 is far above that."""
    for answer, wanted in zip(answers, expected, strict=True):
        assert (answer.logprobs is None) == (wanted.logprobs is None)
        if answer.logprobs is None:
            continue
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
        for mine, theirs in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            torch.testing.assert_close(
                torch.tensor([mine.logprob, *(value for _, value in mine.top)]),
                torch.tensor([theirs.logprob, *(value for _, value in theirs.top)]),
                atol=1e-4,
                rtol=0,
            )


def test_every_parameter_has_a_case() -> None:
    assert set(CASES) == {item.name for item in fields(SamplingParams)}


@pytest.mark.parametrize("batch", ["alone", "mixed"])
@pytest.mark.parametrize("how", ["plain", "chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_has_its_effect_and_no_other(name: str, how: str, batch: str, target: TargetModel) -> None:
    """The answer differs from the default's, passes the case's own check, and is that of plain decoding alone; the
    neighbours' answers are those that they get alone."""
    check_case(target, CASES[name], how, NEIGHBOURS if batch == "mixed" else ())


@pytest.mark.parametrize("how", ["chain", "tree"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in RANDOM_ONLY])
def test_a_parameter_has_its_effect_on_greedy_requests(name: str, how: str, target: TargetModel) -> None:
    """The same at temperature 0, where a step's argmax sees every token of the block before it."""
    case = CASES[name]
    check_case(target, replace(case, context={**case.context, "temperature": 0.0}), how, NEIGHBOURS)


def check_case(
    target: TargetModel, case: Case, how: str, neighbours: Sequence[tuple[list[int], dict[str, Any]]]
) -> None:
    (base,) = Engine(target, **case.engine).generate([PROMPT], sampling(**case.context))
    changes = case.changes(base) if callable(case.changes) else case.changes
    params = sampling(**{**case.context, **changes})
    expected = Engine(target).generate([PROMPT], params)

    exactness = {"exactness": "seed"} if case.engine else {}
    prompts = [PROMPT, *(prompt for prompt, _ in neighbours)]
    each = [params, *(sampling(**other, **exactness) for _, other in neighbours)]
    others = [plain(target, prompt, one) for prompt, one in zip(prompts[1:], each[1:], strict=True)]

    engine = Engine(target, drafter(target, how, [*expected, *others]), tree=TREE, max_requests=8, **case.engine)
    completions = engine.generate(prompts, each)
    answers = completions[: params.n]
    assert told(answers) == told(expected)
    assert told(completions[params.n :]) == told(others)
    assert_same_logprobs(answers, expected)
    assert case.check(answers), told(answers)
    unlike = [*told([base]), base.exactness, base.logprobs is None]
    assert [*told(answers), answers[0].exactness, answers[0].logprobs is None] != unlike
    for completion in completions:
        assert sum(completion.accepted_lengths) == len(completion.token_ids)
    if how != "plain":  # blocks of which the middle counts too
        assert all(max(answer.accepted_lengths) > 2 for answer in answers if len(answer.token_ids) > 8)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("how", ["plain", "chain", "tree"])
def test_log_probabilities_are_the_targets_own(how: str, num_top: int, target: TargetModel) -> None:
    """Those of the stock model's logits, whatever the request makes of them, one entry a token, also where the answer
    ends inside a block; 1e-4 is far above the rounding of float32."""
    filters = {"temperature": 0.5, "top_k": 30, "repetition_penalty": 1.3, "logit_bias": {99: 5.0}}
    known = plain(target, PROMPT, sampling(**filters))  # the drafts, which go on beyond the end
    params = sampling(**filters, logprobs=num_top, stop_token_ids=(known.token_ids[16],))
    expected = plain(target, PROMPT, params)
    (answer,) = Engine(target, drafter(target, how, [known]), tree=TREE).generate([PROMPT], params)
    assert told([answer]) == told([expected])
    assert answer.finish_reason == "stop"
    with target.stock() as model, torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *answer.token_ids]]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits.float(), dim=-1)[len(PROMPT) - 1 : -1]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == len(rows)
    for entry, token, row in zip(answer.logprobs, answer.token_ids, rows, strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - float(row[token])) < 1e-4
        assert len(entry.top) == num_top
        values = [value for _, value in entry.top]
        torch.testing.assert_close(torch.tensor(values), row.topk(num_top).values, atol=1e-4, rtol=0)
        assert values == sorted(values, reverse=True)
        assert all(abs(value - float(row[other])) < 1e-4 for other, value in entry.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_follow_each_branch_of_a_tree(temperature: float, target: TargetModel) -> None:
    """A tree of three children with three each: at every node the law is that of the node's own path. A bad word of two
    tokens is banned below its first token and below no sibling, and the same holds for n-grams that would repeat."""
    first, second = 80, 90
    params = sampling(
        temperature=temperature, bad_words=((first, second),), no_repeat_ngram_size=2, max_tokens=16, ignore_eos=True
    )
    answer = plain_ids(target, PROMPT, params)
    banned: Counter[bool] = Counter()
    alone = Processor(params, prompt_ids=PROMPT, eos_ids=target.eos_ids, vocab_size=target.vocab_size)

    def script(request: Request, limit: Any) -> DraftTree:
        right = answer[len(request.output_ids) :]
        if limit.max_depth < 2 or len(right) < 2:
            return DraftTree.empty()
        wrong = [token for token in (first, PROMPT[1], 81, 82) if token not in right[:2]]
        tokens = (wrong[0], right[0], wrong[1])
        below = [child for parent in tokens for child in (second, right[1] if parent == right[0] else 83, PROMPT[0])]
        parents = (ROOT, ROOT, ROOT, 0, 0, 0, 1, 1, 1, 2, 2, 2)
        return DraftTree(tokens=(*tokens, *below), parents=parents, kind=OneHot())

    def observe(request: Request, tree: DraftTree, law: Any, verdict: Any) -> None:
        for node in range(ROOT, len(tree)):
            path = [*request.output_ids, *(tree.tokens[step] for step in tree.path(node))]
            scores = law.scores(node)
            assert torch.equal(scores, alone.scores(law.logits[node + 1], path))
            context = [*PROMPT, *path]
            assert bool(torch.isneginf(scores[second])) >= (context[-1] == first)
            pairs = list(pairwise(context))
            for token in (second, PROMPT[0], PROMPT[2], 83):
                is_bad = (context[-1], token) in pairs or (context[-1], token) == (first, second)
                assert bool(torch.isneginf(scores[token])) == is_bad
                banned[is_bad] += 1

    engine = Engine(target, ScriptedDrafter(script), tree=TREE, observer=observe)
    (completion,) = engine.generate([PROMPT], params)
    assert completion.token_ids == answer
    assert banned[True] > 10
    assert banned[False] > 10
    assert max(completion.accepted_lengths) == 3


@pytest.mark.parametrize("seed", range(4))
def test_a_bias_stays_with_its_request(seed: int, target: TargetModel) -> None:
    """Requests join, leave, are aborted and are preempted at random, in 3 slots. Each forbids a token that its answer
    would hold without; none emits its own, and all answers are what they are alone."""
    rng = random.Random(seed)
    requests: list[Request] = []
    jobs: list[tuple[list[int], SamplingParams, Completion]] = []
    for number in range(12):
        prompt = [rng.randrange(4, 200) for _ in range(rng.randint(1, 9))]
        free = sampling(temperature=rng.choice([0.0, 0.8, 1.0]), seed=number, max_tokens=rng.randint(4, 24))
        token = rng.choice(plain_ids(target, prompt, free))
        params = sampling(
            temperature=free.temperature, seed=number, max_tokens=free.max_tokens, logit_bias={token: -1e9}
        )
        jobs.append((prompt, params, plain(target, prompt, params)))

    engine = Engine(
        target,
        drafter(target, "tree", [answer for _, _, answer in jobs]),
        tree=TREE,
        max_requests=3,
        max_length=64,
    )
    waiting, aborted = list(jobs), set()
    while waiting or any(request.finish_reason is None for request in requests):
        for _ in range(rng.randint(0, 2)):
            if waiting:
                prompt, params, _ = waiting.pop(0)
                requests.extend(engine.submit([prompt], params))
        running = [index for index, request in enumerate(requests) if request.finish_reason is None]
        if running and rng.random() < 0.15:
            aborted.add(rng.choice(running))
            engine.abort([requests[max(aborted & set(running))]])
        if running and rng.random() < 0.2:
            engine.preempt([requests[rng.choice(running)]])
        engine.step()
    for index, (request, (_, params, expected)) in enumerate(zip(requests, jobs, strict=True)):
        (forbidden,) = params.logit_bias or {}
        assert forbidden not in request.output_ids
        if index in aborted:
            assert expected.token_ids[: len(request.output_ids)] == tuple(request.output_ids)
        else:
            assert tuple(request.output_ids) == expected.token_ids
    assert len(aborted) < len(jobs) - 3
