"""The promise on a second real target, Gemma-3-270M: a base model with sliding-window layers and a large vocabulary.

Prompts reach well beyond the window of 512 tokens, so that what a layer may no longer see lies behind the prompt, the
answer and the nodes of a tree. In float32 a difference is a fault unless the two tokens lie within 1e-4 of each other
(`infer.divergence`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import headstart
from infer.chat import special_ids
from infer.cost import CostModel
from infer.divergence import FirstDifference
from infer.drafters import Drafter, HeadDrafter, HybridDrafter, NgramDrafter, ScriptedDrafter, TreeSettings
from infer.engine import Engine
from infer.fetch import KNOWN_MODELS, is_fetched
from infer.gguf_convert import verify_loads
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.infer.helpers import random_head, random_tree

REPOSITORY = Path(__file__).resolve().parent.parent
WINDOW = 512
TREE = TreeSettings(max_nodes=12, max_depth=5, adaptive=False)
LENGTHS = (WINDOW - 4, 6, WINDOW + 120, 900)
"""Tokens of the prompts; the answer to the first crosses the window's end. Quick tests take the first three."""
NUM_TOKENS = 10
SLOW_CASES = [pytest.param(4, temperature, marks=pytest.mark.slow) for temperature in (0.0, 0.7)]


@pytest.fixture(scope="module")
def gemma3_path() -> Path:
    """The converted Gemma-3-270M folder."""
    folder = Path(os.environ.get("HEADSTART_GEMMA3", REPOSITORY / "models" / "gemma3-270m"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model in {folder}; run `headstart fetch gemma3-270m` or set HEADSTART_GEMMA3")
    return folder


@pytest.fixture(scope="module")
def target(gemma3_path) -> TargetModel:
    """Loading it passes the self check of `TargetModel`."""
    return TargetModel.load(gemma3_path, dtype="float32")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    """Stretches of a text in English, each marked as a beginning."""
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    bos, *ids = target.tokenizer(text).input_ids
    assert bos == target.tokenizer.bos_token_id
    return [[bos, *ids[100 * place : 100 * place + length - 1]] for place, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def answers(target, prompts) -> Callable[[int, float], list[Completion]]:
    """`answers(number, temperature)`: plain decoding's to the first prompts."""

    @cache
    def answered(number: int, temperature: float) -> list[Completion]:
        return Engine(target).generate(prompts[:number], sampled(number, temperature))

    return answered


def sampled(number: int, temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=20 + index, max_tokens=NUM_TOKENS, ignore_eos=True)
        for index in range(number)
    ]


def check_equal(target: TargetModel, drafter: Drafter, expected: list[Completion], temperature: float) -> None:
    """Batched with unlike neighbours, two at a time so that one waits for another's slot."""
    engine = Engine(target, drafter, tree=TREE, cost=CostModel.free(), max_requests=2)
    params = sampled(len(expected), temperature)
    prompts = [answer.prompt_token_ids for answer in expected]
    for one, plain, got in zip(params, expected, engine.generate(prompts, params), strict=True):
        if got.token_ids != plain.token_ids:
            first = FirstDifference.find(
                target, plain.prompt_token_ids, one, expected=plain.token_ids, got=got.token_ids
            )
            assert first.is_tie(target.dtype), first


def random_trees(target: TargetModel, answers: list[Completion]) -> ScriptedDrafter:
    """Trees of any shape that hold the right continuation now and then."""
    rng = random.Random(0)
    known = {answer.prompt_token_ids: answer.token_ids for answer in answers}

    def script(request, limit):
        right = known[request.prompt_ids][len(request.output_ids) :]
        return random_tree(rng, target.vocab_size, limit, right)

    return ScriptedDrafter(script)


def test_the_target_has_what_the_tests_are_about(target):
    """Sliding layers of 512 tokens beside full ones, tied embeddings, one end token, a marked beginning; and only the
    markers are special, not the 6,242 reserved tokens that the GGUF calls so too."""
    assert target.config.sliding_window == WINDOW
    assert set(target.config.layer_types) == {"sliding_attention", "full_attention"}
    assert target.embedding_weight is target.lm_head_weight
    assert target.eos_ids == {1}
    assert target.tokenizer("a").input_ids[0] == 2
    assert special_ids(target.tokenizer) == {0, 1, 2, 3, 4, 105, 106}


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_plain_greedy_equals_stock_generate_beyond_the_window(target, answers, number):
    """Our plain decoding is transformers' own, id for id, whether or not the window has moved past the prompt."""
    for answer in answers(number, 0.0):
        prompt = answer.prompt_token_ids
        with target.stock() as model:
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                eos_token_id=[],
                do_sample=False,
                pad_token_id=target.tokenizer.pad_token_id,
            )
        assert list(answer.token_ids) == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("number", "temperature"), [(3, 0.7), *SLOW_CASES])
def test_random_trees_never_change_a_token(target, answers, number, temperature):
    expected = answers(number, temperature)
    check_equal(target, random_trees(target, expected), expected, temperature)


@pytest.mark.parametrize(("number", "temperature"), SLOW_CASES)
def test_drafters_never_change_a_token(target, answers, number, temperature):
    """The lookup, and an EAGLE-3 head with random weights that drafts 2,048 of the 262,144 tokens."""
    head = HeadDrafter(random_head(target, draft_vocab_size=2048))
    drafters: list[Drafter] = [NgramDrafter(), HybridDrafter([head, NgramDrafter()])]
    for drafter in drafters:
        check_equal(target, drafter, answers(number, temperature), temperature)


@pytest.mark.slow
def test_the_model_is_whole(gemma3_path):
    """Unaltered since it was fetched; it speaks, and its tokenizer and configuration are the model's own."""
    model = KNOWN_MODELS["gemma3-270m"]
    assert is_fetched(gemma3_path, model)
    assert verify_loads(gemma3_path, facts=model.facts) < 5.0


@pytest.mark.slow
def test_an_answer_in_bfloat16_differs_at_near_ties_only(gemma3_path, prompts):
    """What `auto` takes on most machines: every first difference from plain decoding in bfloat16 is rounding's."""
    target = TargetModel.load(gemma3_path, dtype="bfloat16")
    expected = Engine(target).generate(prompts, sampled(len(prompts), 0.0))
    check_equal(target, random_trees(target, expected), expected, 0.0)


@pytest.mark.slow
def test_raw_prompts_and_no_chats(gemma3_path, capsys):
    """A base model without a chat template completes raw text; a chat is refused with the way out."""
    command = ["generate", "ngram", "--target", str(gemma3_path), "--dtype", "float32", "--no-adaptive"]
    command += ["--prompt", "The capital of France is", "--max-tokens", "5"]
    assert headstart.main([*command, "--raw"]) == 0
    assert capsys.readouterr().out.strip()
    assert headstart.main(command) == 2
    assert "no chat template" in capsys.readouterr().err
