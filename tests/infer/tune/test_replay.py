"""A replay takes the rounds that the real engine takes, one by one, whatever the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer.cost import CostModel
from infer.drafters import HeadDrafter, HybridDrafter, NgramDrafter, TreeGrower, TreeSettings
from infer.drafters.model import ModelDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot
from infer.tune.record import Parts, Shape, record
from infer.tune.replay import Replay, num_accepted
from infer.tune.rounds import timed_rounds
from tests.infer.helpers import random_head

PROMPTS = [[5, 17, 3, 9, 5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(20, 50)), [4, 8, 4, 8]]
SHAPES = [Shape(branch=1, beam=1), Shape(branch=2, beam=3), Shape(branch=8, beam=2), Shape(branch=6, beam=4)]
COST = CostModel(widths=(1, 4, 16, 64), milliseconds=(10.0, 11.0, 14.0, 30.0))
DEPTH = 5


def settings(shape: Shape, *, depth: int, nodes: int, adaptive: bool) -> TreeSettings:
    return TreeSettings(max_nodes=nodes, max_depth=depth, branch=shape.branch, beam=shape.beam, adaptive=adaptive)


TREES = [
    settings(SHAPES[0], depth=4, nodes=4, adaptive=False),
    settings(SHAPES[2], depth=5, nodes=12, adaptive=False),
    settings(SHAPES[3], depth=1, nodes=3, adaptive=False),
    settings(SHAPES[3], depth=4, nodes=40, adaptive=False),
    settings(SHAPES[1], depth=5, nodes=5, adaptive=True),
    settings(SHAPES[3], depth=5, nodes=20, adaptive=True),
]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


@pytest.fixture(scope="module")
def networks(target: TargetModel) -> dict[str, TreeGrower]:
    """The target's first two layers, which are right now and then, and a random head, which is when drafts are coupled.
    Their steps are said to cost a fixed time."""
    layers, head = ModelDrafter.first_layers(2, target), HeadDrafter(random_head(target, draft_vocab_size=64))
    layers.stepper.begin_milliseconds = layers.stepper.step_milliseconds = 0.4
    head.stepper.step_milliseconds = 0.4
    return {"layers": layers, "head": head}


def params(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=16, ignore_eos=True) for i in range(4)]


@pytest.mark.parametrize(
    ("network", "lookup", "temperature"),
    [
        ("layers", None, 0.0),
        ("head", None, 1.0),
        ("layers", NgramDrafter, 1.0),
        ("layers", SuffixDrafter, 0.0),
    ],
)
def test_a_replay_takes_the_engines_rounds(target, networks, network, lookup, temperature):
    """In float32 the recorded states are those of the engine's forwards but for rounding, far below the gaps between
    these candidates: rows verified, tokens emitted, draft steps and their rows are equal round by round, in batches of
    one and of three (the last of which is not full), fixed and adaptive, a lookup behind the network or before it."""
    parts = [networks[network], *([] if lookup is None else [lookup()])]
    drafter = parts[0] if lookup is None else HybridDrafter(parts if lookup is NgramDrafter else parts[::-1])
    texts = record(target, Parts.of(networks[network]), PROMPTS, params(temperature), shapes=SHAPES, max_depth=DEPTH)
    replay = Replay(target, texts, cost=COST)
    lengths: set[int] = set()
    for tree in TREES:
        for batch in (1, 3):
            engine = Engine(target, drafter, max_requests=batch, tree=tree, cost=COST)
            found = []
            for start in range(0, len(PROMPTS), batch):
                group = slice(start, start + batch)
                timed = timed_rounds(engine, PROMPTS[group], params(temperature)[group])
                found.append([each.round for each in timed])
            assert replay.rounds(Parts.of(drafter), tree, batch=batch) == found, (tree, batch)
            lengths.update(length for group in found for each in group for length in each.lengths)
    assert {1, 2, 3} <= lengths, "hardly anything was accepted, so that little was compared"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_plain_decodings(target, networks, temperature):
    """And plain rounds are those of an engine without a drafter."""
    texts = record(target, Parts.of(networks["head"]), PROMPTS, params(temperature), shapes=SHAPES, max_depth=2)
    engine = Engine(target, max_requests=3)
    answers = engine.generate(PROMPTS, params(temperature))
    assert [text.output_ids for text in texts] == [answer.token_ids for answer in answers]
    rounds = Replay(target, texts, cost=COST).plain_rounds(batch=3)
    assert [[each.round for each in timed_rounds(engine, PROMPTS[:3], params(temperature)[:3])]] == rounds[:1]


def test_accepted_tokens_are_those_on_a_path():
    tree = DraftTree(tokens=(4, 5, 6, 5), parents=(-1, -1, 1, 0), kind=OneHot())
    assert num_accepted(tree, [5, 6, 6]) == 2
    assert num_accepted(tree, [4, 6]) == 1
    assert num_accepted(tree, [6]) == 0
    assert num_accepted(DraftTree.empty(), [4]) == 0
