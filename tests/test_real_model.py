"""The promise on the real target: token ids equal plain decoding's, and plain greedy ids equal transformers'.

In float32 a difference is a fault unless the two tokens lie within 1e-4 of each other (`infer.divergence`; about 0.02
such near ties are expected in 10,000 tokens).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.chat import render_prompt
from infer.cost import CostModel
from infer.divergence import FirstDifference
from infer.drafters import Drafter, HeadDrafter, HybridDrafter, NgramDrafter, TreeSettings, load_drafter
from infer.engine import Engine
from infer.prompts import load_prompts
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.infer.helpers import random_head

REPOSITORY = Path(__file__).resolve().parent.parent
TREES = {
    "chain": TreeSettings.chain(4),
    "tree16": TreeSettings(max_nodes=16, max_depth=5, adaptive=False),
    "tree32": TreeSettings(max_nodes=32, max_depth=6, adaptive=False),
}


@pytest.fixture(scope="module")
def target(smollm2_path) -> TargetModel:
    return TargetModel.load(smollm2_path, dtype="float32")


def untrained_drafter(target: TargetModel) -> HeadDrafter:
    return HeadDrafter(random_head(target, draft_vocab_size=4096))


def trained_drafters(target: TargetModel) -> list[Drafter]:
    """Those of the runs at hand: `make demo` leaves one."""
    folders = [REPOSITORY / "runs" / name / "best" for name in ("demo", "best")]
    loaded = [load_drafter(folder, target) for folder in folders if folder.is_dir()]
    return [drafter for drafter in loaded if drafter is not None]


def prompts(target: TargetModel, number: int) -> list[list[int]]:
    """Short and long prompts of different domains, as the chat template renders them."""
    chats = load_prompts(None)
    step = max(1, len(chats) // number)
    return [render_prompt(target.tokenizer, list(chat.messages)) for chat in chats[::step]][:number]


def check_equal(target, drafter: Drafter, texts, params, expected, tree: TreeSettings, *, batch: int) -> None:
    engine = Engine(target, drafter, tree=tree, cost=CostModel.free(), max_requests=batch)
    for prompt, one, plain, completion in zip(texts, params, expected, engine.generate(texts, params), strict=True):
        if completion.token_ids != plain.token_ids:
            first = FirstDifference.find(target, prompt, one, expected=plain.token_ids, got=completion.token_ids)
            assert first.is_tie(torch.float32), first


def seeded(temperature: float, number: int, *, max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=10 + i, max_tokens=max_tokens) for i in range(number)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_cut_of_the_promise(target, temperature):
    """4 prompts: a head (trained, where a run is at hand, else random) as a tree of 16 joined by the lookup, batched
    with unlike neighbours and alone."""
    texts = prompts(target, 4)
    params = seeded(temperature, 4, max_tokens=20)
    expected = Engine(target).generate(texts, params)
    trained = trained_drafters(target)
    drafter = trained[0] if trained else HybridDrafter([untrained_drafter(target), NgramDrafter()])
    check_equal(target, drafter, texts, params, expected, TREES["tree16"], batch=4)
    check_equal(target, drafter, texts[:2], params[:2], expected[:2], TREES["tree32"], batch=1)


def test_plain_greedy_equals_stock_generate(target):
    """Our plain decoding is transformers' own, id for id."""
    for prompt in prompts(target, 3):
        (completion,) = Engine(target).generate([prompt], SamplingParams(max_tokens=24))
        with target.stock() as model:
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=target.tokenizer.pad_token_id,
            )
        assert list(completion.token_ids) == output[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_the_promise(target, temperature, tree):
    """20 prompts x 64 tokens: lookup, random head and (where a run is at hand) the trained head, alone and batched."""
    texts = prompts(target, 20)
    params = seeded(temperature, 20, max_tokens=64)
    expected = Engine(target).generate(texts, params)
    drafters: list[Drafter] = [NgramDrafter(), untrained_drafter(target), *trained_drafters(target)]
    for drafter in drafters:
        check_equal(target, drafter, texts, params, expected, TREES[tree], batch=7)
    check_equal(target, drafters[-1], texts[:3], params[:3], expected[:3], TREES[tree], batch=1)


@pytest.mark.slow
def test_a_perfect_draft_is_accepted_whole(target):
    """The target drafting for itself: every draft token is accepted in float32 (a self-check of the whole round)."""
    from infer.drafters import ScriptedDrafter
    from infer.drafters.scripted import replay

    for index, prompt in enumerate(prompts(target, 5)):
        params = SamplingParams(temperature=0.8, seed=index, max_tokens=40, ignore_eos=True)
        (plain,) = Engine(target).generate([prompt], params)
        engine = Engine(target, ScriptedDrafter(replay(plain.token_ids, depth=5)), tree=TREES["tree16"])
        (completion,) = engine.generate([prompt], params)
        assert completion.token_ids == plain.token_ids
        assert set(completion.accepted_lengths[1:-1]) == {6}
