"""Static rounds on the real target: the tokens of ordinary rounds, and about as many drafts accepted.

In float32 a difference is a fault unless the two tokens lie within 1e-4 of each other (`infer.divergence`).
"""

from __future__ import annotations

import pytest
import torch

from infer.cost import CostModel
from infer.divergence import FirstDifference
from infer.drafters import NgramDrafter, TreeSettings
from infer.engine import Engine
from infer.target import TargetModel
from tests.test_real_model import prompts, seeded, trained_drafters, untrained_drafter

TREE = TreeSettings(max_nodes=12, max_depth=4, branch=4, beam=4, adaptive=False)


@pytest.fixture(scope="module")
def target(smollm2_path) -> TargetModel:
    return TargetModel.load(smollm2_path, dtype="float32", forward="eager")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_static_rounds_of_the_real_target(target, temperature):
    """Three prompts side by side, drafted on the device by a head and on the host by a lookup."""
    texts = prompts(target, 3)
    params = seeded(temperature, 3, max_tokens=16)
    expected = Engine(target).generate(texts, params)
    for drafter in (untrained_drafter(target), NgramDrafter()):
        engine = Engine(target, drafter, tree=TREE, cost=CostModel.free(), graphs=True)
        for text, one, plain, found in zip(texts, params, expected, engine.generate(texts, params), strict=True):
            if found.token_ids != plain.token_ids:
                first = FirstDifference.find(target, text, one, expected=plain.token_ids, got=found.token_ids)
                assert first.is_tie(torch.float32), first


def test_a_trained_head_is_as_good_on_the_device(target):
    """The share of drafts accepted is that of ordinary rounds, where a trained head is at hand."""
    trained = trained_drafters(target)
    if not trained:
        pytest.skip("no trained head: `make demo` leaves one")
    texts = prompts(target, 3)
    params = seeded(0.0, 3, max_tokens=32)
    accepted = []
    for graphs in (False, True):
        engine = Engine(target, trained[0], tree=TREE, cost=CostModel.free(), graphs=graphs)
        completions = engine.generate(texts, params)
        accepted.append(sum(each.speculation.num_accepted_tokens for each in completions))
    assert accepted[1] == pytest.approx(accepted[0], rel=0.25)
