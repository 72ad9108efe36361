"""One static round against the same round done in the ordinary way: outcome, cache rows and kept states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer.fixed import split
from infer.graphs.rounds import StaticRound
from infer.graphs.shapes import RoundShape
from infer.noise import gumbel, position_key, position_stream
from infer.rows import RowGroup, tree_group
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot
from infer.verify import match_walk
from tests.infer.graphs.tape import taped
from tests.infer.graphs.test_trees import random_parents

TEXTS = [[3, 9, 15, 5, 5], [11, 2], [i % 16 for i in range(1, 34)]]
SLOTS = [2, 0, 3]


@pytest.fixture(params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest, tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model(request.param, vocab_size=16), forward="eager")


def some_trees(rng: random.Random) -> list[DraftTree]:
    """Of few tokens, so that many nodes are what the target would say."""
    trees = []
    for size in (9, 4, 0):
        parents = random_parents(rng, size, depth=3)
        taken: dict[int, set[int]] = {}
        tokens = []
        for parent in parents:
            token = rng.choice([t for t in range(16) if t not in taken.setdefault(parent, set())])
            taken[parent].add(token)
            tokens.append(token)
        trees.append(DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot()))
    return trees


class Law:
    """The draws of the ordinary walk, from logits of the same tree."""

    def __init__(self, tree: DraftTree, logits: torch.Tensor, num_cached: int, temperature: float, seed: int) -> None:
        self.tree, self.logits = tree, logits
        self.num_cached, self.temperature, self.seed = num_cached, temperature, seed

    def draw(self, node: int) -> int:
        depth = 0 if node == -1 else self.tree.depths[node]
        scores = self.logits[node + 1].float()
        if self.temperature:
            noise = gumbel(position_key(self.seed, 0, 0, self.num_cached + 1 + depth), len(scores))
            scores = scores / self.temperature + noise
        return int(scores.argmax())

    def probs(self, node: int) -> torch.Tensor:
        raise AssertionError("the match walk draws")


@pytest.mark.parametrize("row_width", [None, 48], ids=["as many rows", "fixed width"])
def test_a_round_is_the_ordinary_one(target: TargetModel, row_width: int | None) -> None:
    """Replayed from a tape that was recorded with other inputs: the walk, the moved rows and the kept states are those
    of a packed forward and `match_walk`, and nothing is written to another request's columns."""
    rng = random.Random(5)
    taps = (1, target.num_layers)
    shape = RoundShape(batch=4, nodes=9, depth=3, context=64)
    caches = [target.new_cache(num_slots=4, num_columns=64) for _ in range(2)]
    for cache in caches:
        groups = [RowGroup(slot=slot, prefix=0, tokens=text[:-1]) for slot, text in zip(SLOTS, TEXTS, strict=True)]
        target.forward(sorted(groups, key=lambda group: group.slot), cache)
    kept = torch.full((4, 4, 2 * target.hidden_size), torch.nan)
    static = StaticRound(target, caches[0], shape, kept=kept, taps=taps, row_width=row_width)
    num_accepted = 0
    replay = None
    for attempt in range(21):
        trees = some_trees(rng)
        temperature = [0.0, 0.9, 1.0][attempt % 3]
        static.inputs.clear()
        for place, (slot, text, tree) in enumerate(zip(SLOTS, TEXTS, trees, strict=True)):
            static.inputs.place(
                place,
                slot=slot,
                num_cached=len(text) - 1,
                token=text[-1],
                stream=position_stream(attempt, 0, 0),
                temperature=temperature,
                tree=(tree.tokens, tree.parents),
            )
        static.inputs.upload()
        replay = replay or taped(static.compute, target.device)
        replay()
        for place, (slot, text, tree, outcome) in enumerate(zip(SLOTS, TEXTS, trees, static.read(3), strict=True)):
            group = tree_group(slot, len(text) - 1, text[-1:], tree.tokens, tree.parents)
            expected = target.forward([group], caches[1], taps=taps)
            assert expected.taps is not None
            torch.testing.assert_close(static.logits(place)[: 1 + len(tree)], expected.logits, atol=1e-4, rtol=1e-4)
            law = Law(tree, static.logits(place), len(text) - 1, temperature, attempt)
            verdict = match_walk(tree, law)
            assert (outcome.tree_tokens, outcome.tree_parents) == (tree.tokens, tree.parents)
            assert (outcome.path, outcome.token, outcome.sound) == (verdict.path, verdict.token, True)
            num_accepted += len(outcome.path)
            rows = [0, *(1 + node for node in outcome.path)]
            torch.testing.assert_close(kept[slot, : len(rows)], expected.taps[rows], atol=1e-4, rtol=1e-4)
            first = len(text)
            caches[1].commit(slot, first, [first + node for node in outcome.path])
            columns = slice(slot * 64, slot * 64 + first + len(outcome.path))
            for mine, theirs in zip(_storages(caches[0]), _storages(caches[1]), strict=True):
                torch.testing.assert_close(mine[:, :, columns], theirs[:, :, columns], atol=1e-4, rtol=1e-4)
        assert not caches[0].keys[:, :, 64:128].any(), "slot 1 is nobody's"
    assert num_accepted > 3


def test_rows_of_fixed_width_do_not_depend_on_their_company(target: TargetModel) -> None:
    """In bfloat16, to the last bit: the same text in a tree of others, in a chain, alone, in another slot."""
    model = target.model.to(torch.bfloat16)
    target = TargetModel.wrap(model, forward="eager")
    text = [(7 * i + 3) % 16 for i in range(61)]
    path = [1, 2, 3]
    trees = [
        DraftTree.chain((1, 2, 3)),
        DraftTree(tokens=(5, 1, 6, 2, 7, 3), parents=(-1, -1, 0, 1, 1, 3), kind=OneHot()),
        DraftTree(tokens=(1, 9, 2, 8, 3, 4), parents=(-1, 0, 0, 1, 2, 4), kind=OneHot()),
    ]
    nodes = [[0, 1, 2], [1, 3, 5], [0, 2, 4]]
    found = []
    for tree, on_path, slot, others in zip(trees, nodes, (0, 3, 1), ([], [2], [0, 2]), strict=True):
        cache = target.new_cache(num_slots=4, num_columns=256)
        shape = RoundShape(batch=4 if others else 1, nodes=6, depth=4, context=256)
        static = StaticRound(target, cache, shape, row_width=32)
        for each in sorted([slot, *others]):  # prompts in forwards of the same width, each alone
            cut = 60 if each == slot else 41
            target.forward([RowGroup(slot=each, prefix=0, tokens=text[:cut])], cache, row_width=32)
        for place, each in enumerate([*others, slot]):
            is_it = each == slot
            static.inputs.place(
                place,
                slot=each,
                num_cached=60 if is_it else 41,
                token=text[60] if is_it else 4,
                tree=(tree.tokens, tree.parents) if is_it else ((), ()),
            )
        static.inputs.upload()
        static.compute()
        logits = static.logits(len(others))
        found.append(torch.stack([logits[0], *(logits[1 + node] for node in on_path)]))
    assert split(60) == 32 < 60 - 16 + 1
    assert len(path) == 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def _storages(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys, cache.values
