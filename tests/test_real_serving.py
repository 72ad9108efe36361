"""The promise behind a server, on a real model: whatever else is being answered, a request's tokens are those it has
alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from infer.async_engine import AsyncEngine
from infer.chat import render_prompt
from infer.divergence import FirstDifference
from infer.drafters import HybridDrafter, NgramDrafter, TreeSettings
from infer.drafters.head import HeadDrafter
from infer.engine import Engine
from infer.prompts import load_prompts
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.target import TargetModel
from tests.infer.helpers import random_head

MAX_LENGTH = 320


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest, smollm2_path: Path) -> TargetModel:
    target = TargetModel.load(smollm2_path, dtype=request.param)
    if target.dtype == torch.bfloat16 and not target.is_row_invariant:
        pytest.skip("here rows of bfloat16 depend on what they share a forward with")
    return target


def test_answers_beside_others_are_those_alone(target: TargetModel) -> None:
    """Ten requests over four slots: chats that begin alike, prompts prefilled in chunks of 24 rows, samples, greedy and
    drawn, drafted and plain, and every third caller goes away. Those who stay get plain decoding's tokens."""
    rng = random.Random(0)
    prompts = [render_prompt(target.tokenizer, prompt.messages) for prompt in load_prompts(None)[:10]]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[index % 3],
            seed=index,
            max_tokens=24,
            n=2 if index == 4 else 1,
            repetition_penalty=1.2 if index == 5 else 1.0,
            top_p=0.9 if index == 7 else 1.0,
        )
        for index in range(len(prompts))
    ]
    drafter = HybridDrafter([HeadDrafter(random_head(target, draft_vocab_size=512)), NgramDrafter()])
    inner = Engine(
        target,
        drafter,
        max_requests=4,
        max_length=MAX_LENGTH,
        tree=TreeSettings(max_nodes=12, max_depth=3, branch=3, beam=2, adaptive=False),
        sharing=Sharing(prefill_chunk=24, reuse_prefixes=True, follow_clock=True),
    )

    async def caller(engine: AsyncEngine, index: int) -> list[Completion]:
        await asyncio.sleep(rng.random())
        ticket = await engine.submit(prompts[index], params[index])
        if index % 3 == 2:
            await anext(ticket)
            ticket.cancel()
        return await ticket.completions()

    async def everyone() -> list[list[Completion]]:
        async with AsyncEngine(inner) as engine:
            return await asyncio.gather(*(caller(engine, index) for index in range(len(prompts))))

    answers = asyncio.run(asyncio.wait_for(everyone(), 300))
    assert inner.num_free_slots == 4
    assert sum(done.num_reused_tokens for each in answers for done in each) > 100
    for prompt, one, each in zip(prompts, params, answers, strict=True):
        for done, expected in zip(each, Engine(target).generate([prompt], one), strict=True):
            known = expected.token_ids
            if done.finish_reason == "abort":
                known = known[: len(done.token_ids)]
            if done.token_ids != known:  # where rows depend on each other, float32 sums decide near ties
                assert not target.is_row_invariant
                first = FirstDifference.find(target, prompt, one, expected=known, got=done.token_ids)
                assert first.is_tie(torch.float32), first
            elif done.finish_reason != "abort":
                assert done.text == expected.text
