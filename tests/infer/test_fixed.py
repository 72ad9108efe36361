"""Forwards of fixed shape: right to rounding, and equal to the bit wherever a row stands.

Bit equality is a property of the machine's kernels at these shapes, so these tests hold it on the machine at hand, in
bfloat16, where any other order of a sum would show; `headstart audit` does the same on a user's model.
"""

from __future__ import annotations

import random

import pytest
import torch

from infer.cache import SlotCache
from infer.cost import CostModel
from infer.drafters.base import TreeSettings
from infer.drafters.scripted import ScriptedDrafter
from infer.engine import Engine
from infer.fixed import CHUNK, MAX_TREE_DEPTH, forwards, split
from infer.rows import RowGroup, tree_group
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.infer.helpers import random_tree

WIDTH = 16
KINDS = ("llama", "qwen3", "gemma2", "gemma3", "gpt2")


def bfloat16_target(tiny_model, kind: str = "llama", **changes) -> TargetModel:
    """Head sizes that fill a cache line, as those of real models do."""
    return TargetModel.wrap(tiny_model(kind, max_position_embeddings=1024, **changes).to(torch.bfloat16))


def random_branches(rng: random.Random, num_nodes: int, *, depth: int) -> tuple[list[int], list[int]]:
    parents: list[int] = []
    depths: list[int] = []
    while len(parents) < num_nodes:
        parent = rng.randrange(-1, len(parents))
        if (1 if parent < 0 else depths[parent] + 1) <= depth:
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
    return parents, depths


def new_cache(target: TargetModel, num_slots: int) -> SlotCache:
    return target.new_cache(num_slots=num_slots, num_columns=3 * CHUNK)


def prefill(target: TargetModel, cache: SlotCache, slot: int, tokens: list[int], width: int) -> None:
    group = RowGroup(slot=slot, prefix=0, tokens=tokens)
    target.forward([group], cache, logit_rows=[len(tokens) - 1], row_width=width)


@pytest.mark.parametrize("position", [*range(0, 200), 10_000])
def test_the_tail_reaches_above_the_deepest_path(position):
    """A node at depth d stands at t = root + d, and all below split(t) must lie in place: at or above the root."""
    assert 0 <= split(position) <= max(0, position + 1 - MAX_TREE_DEPTH)
    assert position + 1 - split(position) <= 3 * MAX_TREE_DEPTH  # and it has a fixed size


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_forwards_compute_what_ordinary_ones_do(kind, tiny_model):
    """In float32 the two differ by rounding alone: chains, trees, windows, soft caps, many slots, many chunks."""
    target = TargetModel.wrap(tiny_model(kind, **({} if kind == "gpt2" else {"max_position_embeddings": 1024})))
    rng = random.Random(0)
    longest = 200 if kind == "gpt2" else 600
    lengths = [3, 40, longest]
    texts = [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]
    ordinary, fixed = new_cache(target, 3), new_cache(target, 3)
    for slot, text in enumerate(texts):
        expected = target.forward([RowGroup(slot=slot, prefix=0, tokens=text)], ordinary).logits
        found = target.forward([RowGroup(slot=slot, prefix=0, tokens=text)], fixed, row_width=WIDTH).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    groups = []
    for slot, length in enumerate(lengths):
        parents, _ = random_branches(rng, 12, depth=6)
        tokens = [rng.randrange(3, 128) for _ in parents]
        groups.append(tree_group(slot, length, [5], tokens, parents))
    taps = (0, 2, 3)
    expected_output = target.forward(groups, ordinary, taps=taps)
    found_output = target.forward(groups, fixed, taps=taps, row_width=WIDTH)
    torch.testing.assert_close(found_output.logits, expected_output.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found_output.taps, expected_output.taps, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row_width", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_equals_plain_decoding_to_the_bit(kind, row_width, tiny_model):
    """A node of a random tree, among other requests' rows, against its own path decoded token by token elsewhere."""
    target = bfloat16_target(tiny_model, kind) if kind != "gpt2" else TargetModel.wrap(tiny_model(kind).bfloat16())
    for seed, length in enumerate((5, 47, 130) if kind == "gpt2" else (5, 47, 300, 600)):
        rng = random.Random(seed)
        text = [rng.randrange(3, 128) for _ in range(length)]
        cache = new_cache(target, 3)
        prefill(target, cache, 1, text, row_width)
        prefill(target, cache, 2, text[: length // 2 + 1], row_width)
        parents, _ = random_branches(rng, 20, depth=8)
        tokens = [rng.randrange(3, 128) for _ in parents]
        neighbour = RowGroup(slot=2, prefix=length // 2 + 1, tokens=[9, 8, 7])
        groups = [neighbour, tree_group(1, length, [5], tokens, parents)]
        logits = target.forward(groups, cache, row_width=row_width).logits[3:]
        alone = new_cache(target, 1)
        prefill(target, alone, 0, text, row_width)
        for node in [-1, *rng.sample(range(20), 6)]:
            path = [node] if node >= 0 else []
            while path and parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            for place, token in enumerate([5, *(tokens[each] for each in path)]):
                group = RowGroup(slot=0, prefix=length + place, tokens=[token])
                row = target.forward([group], alone, row_width=row_width).logits[0]
            assert torch.equal(row, logits[node + 1]), f"node {node} of the tree over {length} tokens"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_requests", [1, 4])
def test_bitwise_engines_never_change_a_token(temperature, max_requests, tiny_model):
    """Random trees, prompts around the borders of tails and chunks, alone and batched, and preempted half-way: the
    token ids and every log-probability equal plain decoding's, in bfloat16."""
    target = bfloat16_target(tiny_model)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 128) for _ in range(length)] for length in (1, 30, 250, 500)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True, logprobs=2) for i in range(4)
    ]
    plain = Engine(target, exactness="bitwise", max_requests=4).generate(prompts, params)
    answers = {each.prompt_token_ids: each.token_ids for each in plain}

    def script(request, limit):
        right = answers[request.prompt_ids][len(request.output_ids) :]
        return random_tree(rng, 128, limit, right)

    engine = Engine(
        target,
        ScriptedDrafter(script),
        exactness="bitwise",
        max_requests=max_requests,
        tree=TreeSettings(max_nodes=20, adaptive=False),
    )
    requests = engine.submit(prompts, params)
    num_steps = 0
    while any(request.finish_reason is None for request in requests):
        engine.step()
        num_steps += 1
        if num_steps == 3:
            engine.preempt()
    for request, expected in zip(requests, plain, strict=True):
        completion = request.completion()
        assert completion.exactness == "bitwise"
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == expected.logprobs


def test_width_steps_in_the_cost_table():
    """A forward of fixed width costs the same, filled or not, so trees are grown to fill it."""
    table = CostModel(widths=(1, 16), milliseconds=(10.0, 25.0)).in_steps_of(16)
    assert [table.target_milliseconds(width) for width in (1, 16, 17, 33)] == [25.0, 25.0, 50.0, 75.0]


def test_rows_are_cut_into_forwards_in_order(tiny_model):
    target = TargetModel.wrap(tiny_model("llama"))
    cache = new_cache(target, 2)
    groups = [RowGroup(slot=1, prefix=0, tokens=list(range(3, 23))), RowGroup(slot=0, prefix=0, tokens=[4, 5])]
    parts = list(forwards(groups, cache, WIDTH))
    assert [part.num_real for part in parts] == [16, 6]
    assert [token for part in parts for token in part.token_ids.tolist()[: part.num_real]] == [*range(3, 23), 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exactness": "bitwise", "tree": TreeSettings(max_depth=17)}, "at most 16 deep"),
        ({"exactness": "bitwise", "row_width": 12}, "multiple of 8"),
        ({"exactness": "bitwise", "row_width": "16"}, "multiple of 8"),
        ({"row_width": 16}, "only exactness 'bitwise'"),
        ({"exactness": "bitwise", "rule": "token"}, "less than the 'bitwise' asked for"),
        ({"exactness": "exact"}, "unknown"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(changes, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        Engine(TargetModel.wrap(tiny_model("llama")), **changes)


def test_a_request_cannot_ask_an_ordinary_engine_for_bitwise(tiny_model):
    engine = Engine(TargetModel.wrap(tiny_model("llama")))
    with pytest.raises(ValueError, match="build the engine with exactness='bitwise'"):
        engine.submit([[3, 4]], SamplingParams(exactness="bitwise"))
