"""The head as a drafter: its cache always holds what a fresh prefill would, and its trees never change a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from heads.eagle3 import Eagle3Head
from infer.drafters import HeadDrafter, HybridDrafter, NgramDrafter, RecordingDrafter, TreeSettings
from infer.drafters.base import DraftLimit
from infer.drafters.growing import _DRAFT_DOMAIN
from infer.engine import Engine
from infer.noise import gumbel, noise_key
from infer.proof.statistics import chi_square_tail
from infer.request import Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled
from tests.infer.helpers import chance_of_answers, random_head, small_target

FALSE_ALARM = 1e-3
"""A right drafter fails one of these tests of chance in a thousand."""
PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(20, 60)), [4]]


@pytest.fixture(scope="module")
def target(tiny_model) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


def fresh_logits(head: Eagle3Head, target: TargetModel, tokens: list[int]) -> torch.Tensor:
    """Draft logits after `tokens`, from a causal pass of the head over the target's own states, written plainly."""
    (features,) = target.features([tokens[:-1]], head.config.taps)
    num_rows = len(tokens) - 1

    def attend(query, key, value):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(num_rows, num_rows).tril().bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    with torch.inference_mode():
        states = head(torch.tensor(tokens[1:]), head.fuse(features.taps), torch.arange(num_rows), attend)
        return head.logits(states)[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_cache_equals_a_fresh_prefill_after_every_round(target, temperature):
    """Accepted rows are recomputed from target features, rejected ones leave no trace (pitfall: acceptance 8-15 % lower
    because the draft cache kept its own approximations). The head's lm head is made to know the answer, so that rounds
    of all lengths occur."""
    head = random_head(target)
    # The target's own next-token map, made crude: drafts are right often enough.
    drafter = HeadDrafter(head)
    engine = Engine(target, drafter, tree=TreeSettings(max_nodes=24, max_depth=4, branch=16, beam=8, adaptive=False))
    requests = engine.submit(PROMPTS, SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True))
    lengths: set[int] = set()
    checked = 0
    while any(request.finish_reason is None for request in requests):
        engine.step()
        for request in requests:
            lengths.update(request.accepted_lengths)
            if request.finish_reason is not None:
                continue
            memory = drafter.stepper.memory(request)
            assert memory.num_rows + sum(len(states) for states in memory.pending) == request.num_cached
            if request is requests[checked % len(requests)]:
                tokens = [*request.prompt_ids, *request.output_ids]
                expected = fresh_logits(head, target, tokens)
                pending = list(memory.pending)
                rows = memory.num_rows
                torch.testing.assert_close(drafter.stepper.next_logits(request), expected, atol=1e-4, rtol=1e-4)
                memory.pending, memory.num_rows = (
                    pending,
                    rows,
                )  # reading is repeatable: the same rows are written again
            checked += 1
    assert max(lengths) >= 2


def test_tree_nodes_are_drafted_on_their_own_path(target):
    """Every node's children are ranked by the logits that a plain run of the head along the node's path gives."""
    head = random_head(target)
    drafter = HeadDrafter(head)
    tree = TreeSettings(max_nodes=32, max_depth=3, branch=3, beam=3, adaptive=False)
    engine = Engine(target, drafter, tree=tree)
    (request,) = engine.submit([PROMPTS[1]], SamplingParams(max_tokens=20, ignore_eos=True))
    engine._advance(engine._admit(), [DraftTree.empty()])
    tokens = [*request.prompt_ids, *request.output_ids]
    (drafted,) = drafter.propose([request], [engine._limit(request)])
    assert max(drafted.depths) == 3
    (features,) = target.features([tokens[:-1]], head.config.taps)

    def naive(path: tuple[int, ...]) -> list[int]:
        """Target ids ranked below `path`: the head run token by token, states fed back, no tree and no cache."""
        sequence = [*tokens[1:], *path]
        with torch.inference_mode():
            states = head.fuse(features.taps)
            for _ in range(len(path) + 1):
                num_rows = len(states)
                length = num_rows

                def attend(query, key, value, length=length):
                    groups = query.shape[1] // key.shape[1]
                    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
                    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
                    scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
                    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

                new = head(torch.tensor(sequence[:num_rows]), states, torch.arange(num_rows), attend)
                states = torch.cat([states, new[-1:]])
            return head.target_ids[head.logits(new)[-1].topk(3).indices].tolist()

    for node in [-1, *range(len(drafted))]:
        children = drafted.children(node)
        if children:
            path = tuple(drafted.tokens[index] for index in drafted.path(node))
            assert [drafted.tokens[child] for child in children] == naive(path)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_head_never_changes_a_token(target, temperature):
    """Chains and trees of 16 and 32, with and without the lookup, alone and batched: plain's token ids."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12 + 5 * seed, ignore_eos=True)
        for seed in range(4)
    ]
    expected = [Engine(target).generate([p], s)[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
    for seed in range(2):
        head = random_head(target, seed=seed)
        for tree in (TreeSettings.chain(4), TreeSettings(max_nodes=16, adaptive=False), TreeSettings(max_nodes=32)):
            for drafter in (HeadDrafter(head), HybridDrafter([HeadDrafter(head), NgramDrafter()])):
                for max_requests in (1, 4):
                    engine = Engine(target, drafter, tree=tree, max_requests=max_requests)
                    assert [c.token_ids for c in engine.generate(PROMPTS, params)] == expected


def test_proposal_kinds_and_limits(target):
    """Greedy drafts are one-hot, sampled temperatures coupled; a tree never exceeds what the request can still use."""
    head = random_head(target)
    drafter = HeadDrafter(head)
    engine = Engine(target, drafter, tree=TreeSettings(max_nodes=8, max_depth=6, adaptive=False))
    for temperature, kind in ((0.0, OneHot), (0.9, Coupled)):
        (request,) = engine.submit([PROMPTS[0]], SamplingParams(temperature=temperature, seed=1, max_tokens=4))
        trees = []
        original = engine.drafter.propose

        def spy(requests, limits, original=original, trees=trees):
            proposed = original(requests, limits)
            trees.extend(zip(proposed, limits, strict=True))
            return proposed

        drafter.propose = spy
        while request.finish_reason is None:
            engine.step()
        drafter.propose = original
        for tree, limit in trees:
            assert type(tree.kind) is kind or not len(tree)
            assert max(tree.depths, default=0) <= limit.max_depth <= 3


SMALL_TREE = TreeSettings(max_nodes=12, max_depth=3, branch=3, beam=2, adaptive=False)
RULE_TREES = [
    ("token", TreeSettings.chain(3), Sampled),
    ("block", SMALL_TREE, Sampled),
    ("recursive", SMALL_TREE, Sampled),
    ("traversal", SMALL_TREE, Sampled),
    ("greedy_set", SMALL_TREE, GreedySet),
]
Seen = list[tuple[Request, DraftTree, int]]


@contextmanager
def proposals(drafter: HeadDrafter | HybridDrafter) -> Iterator[Seen]:
    """Every tree that is proposed meanwhile, with its request and the round it is for."""
    seen: Seen = []
    original = drafter.propose

    def spy(requests: list[Request], limits: list[DraftLimit]) -> list[DraftTree]:
        trees = original(requests, limits)
        rounds = [len(request.accepted_lengths) for request in requests]
        seen.extend(zip(requests, trees, rounds, strict=True))
        return trees

    drafter.propose = spy
    yield seen
    drafter.propose = original


@pytest.mark.parametrize(("rule", "tree", "kind"), RULE_TREES)
def test_drawn_proposals_carry_what_they_were_drawn_from(target, rule, tree, kind):
    """q of every parent sums to one, gives its children positive mass, and the rule runs through the engine; at
    temperature 0 the same drafter is exact token for token. Rules for chains get chains, whatever the branching."""
    drafter = HeadDrafter(random_head(target))
    engine = Engine(target, drafter, rule=rule, tree=tree)
    with proposals(drafter) as seen:
        engine.generate(PROMPTS, SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True))
    drawn = [each for _, each, _ in seen if len(each)]
    assert drawn
    for each in drawn:
        assert type(each.kind) is kind
        assert len(each) <= tree.max_nodes
        assert each.is_chain or not engine.rule.needs_chain
        for node, probs in each.kind.draft_probs.items():
            assert probs.shape == (target.vocab_size,)
            assert abs(float(probs.sum()) - 1) < 1e-5
            children = each.children(node)
            assert children
            assert all(float(probs[each.tokens[child]]) > 0 for child in children)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [c.token_ids for c in Engine(target).generate(PROMPTS, greedy)]
    assert [c.token_ids for c in engine.generate(PROMPTS, greedy)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["recursive", "greedy_set"])
def test_children_are_drawn_from_the_very_q_that_is_handed_over(target, rule, dtype):
    """Redone from the handed tensor and the keys alone, every list of children comes out the same, in order. (Pitfalls:
    a draw in bfloat16 verified with float32 probabilities; q filtered otherwise than the draw.)"""
    head = random_head(target)
    head = head.to(dtype).bind(target.weights)
    drafter = HeadDrafter(head)
    engine = Engine(target, drafter, rule=rule, tree=SMALL_TREE)
    with proposals(drafter) as seen:
        engine.generate(PROMPTS, SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True))
    num_lists = 0
    for request, tree, round_index in seen:
        for node, probs in tree.kind.draft_probs.items() if len(tree) else ():
            inside = probs[head.target_ids]
            key = noise_key(_DRAFT_DOMAIN, *request.identity, round_index, node - ROOT)
            ranked = inside.log() + gumbel(key, len(inside))
            num_fixed = 2 if rule == "greedy_set" else 0
            fixed = inside.topk(num_fixed).indices
            ranked[fixed] = -torch.inf
            order = [*fixed.tolist(), *ranked.topk(3 - num_fixed).indices.tolist()]
            assert [tree.tokens[child] for child in tree.children(node)] == head.target_ids[order].tolist()
            num_lists += 1
    assert num_lists > 50


def transformed_draws(tree: DraftTree, chance: torch.Generator, *, sharpen: float = 1.0) -> list[float]:
    """The drawn children, node by node in the order drawn, each put through the distribution function of its draw.

    The results are independent and uniform in [0, 1) if and only if the draws follow the q handed over, each with noise
    of its own, so that nodes of different q can be pooled. Tokens stand by falling q in the distribution function, so
    that a q that is too sharp everywhere shows. `sharpen` tests against a q that the draws do not have.
    """
    numbers = []
    for node, probs in tree.kind.draft_probs.items():
        left, order = (probs.double() ** sharpen).sort(descending=True)
        places = [int((order == tree.tokens[child]).nonzero()) for child in tree.children(node)]
        if isinstance(tree.kind, GreedySet):
            left[places[:-1]] = 0
            places = places[-1:]
        for place in places:
            chosen = left[:place].sum() + torch.rand((), generator=chance) * left[place]
            numbers.append(min(float(chosen / left.sum()), 1 - 1e-12))
            left[place] = 0
    return numbers


def uniformity(seen: Seen, *, sharpen: float = 1.0) -> tuple[float, float]:
    """Chance of a chi-square as large as that of the transformed draws in 20 cells, and of pairs two apart (the same
    place in two nodes' lists, where a list has one or two) in 25."""
    chance = torch.Generator().manual_seed(0)
    trees = [tree for _, tree, _ in seen if len(tree)]
    numbers = torch.tensor([x for tree in trees for x in transformed_draws(tree, chance, sharpen=sharpen)])
    cells = (numbers[:-2] * 5).long() * 5 + (numbers[2:] * 5).long()
    counted = (numbers * 20).long().bincount(minlength=20).double(), cells.bincount(minlength=25).double()
    single, pairs = (float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) for counts in counted)
    return chi_square_tail(single, 19), chi_square_tail(pairs, 24)


@pytest.mark.parametrize("rule", ["token", "recursive", "greedy_set"])
def test_draws_follow_the_q_handed_over(tiny_model, monkeypatch, rule):
    """Chi-square, seeds fixed. The test sees its own planted faults: a q that is sharpened to the power 1.5,
    and noise that the nodes of a round share."""
    target = small_target(tiny_model)
    drafter = HeadDrafter(random_head(target, draft_vocab_size=4))
    tree = TreeSettings(max_nodes=9, max_depth=3, branch=2, beam=2, adaptive=False)
    engine = Engine(target, drafter, rule=rule, tree=tree, max_requests=100)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=6) for seed in range(200)]

    def collect() -> Seen:
        with proposals(drafter) as seen:
            engine.generate([[5, 3, 1]] * len(params), params)
        return seen

    seen = collect()
    single, pairs = uniformity(seen)
    assert single > FALSE_ALARM
    assert pairs > FALSE_ALARM
    assert uniformity(seen, sharpen=1.5)[0] < FALSE_ALARM

    def shared_noise(growth):
        noise = gumbel(noise_key(growth.request.seed, len(growth.request.accepted_lengths)), 4)
        return noise.expand(len(growth.frontier), 4)

    monkeypatch.setattr(drafter, "_fresh_noise", shared_noise)
    assert uniformity(collect())[1] < FALSE_ALARM


def test_draws_end_with_the_support_of_q(target):
    """At a temperature at which float32 leaves q a token or two, no child of probability 0 is proposed: a rejection
    rule can make nothing of it."""
    params = SamplingParams(temperature=0.01, seed=5, max_tokens=12, ignore_eos=True)
    for rule in ("recursive", "traversal", "greedy_set"):
        drafter = HeadDrafter(random_head(target))
        engine = Engine(target, drafter, rule=rule, tree=TreeSettings(max_nodes=32, adaptive=False))
        with proposals(drafter) as seen:
            engine.generate(PROMPTS, params)
        trees = [tree for _, tree, _ in seen if len(tree)]
        numbers = [
            (len(tree.children(u)), int((q > 0).sum())) for tree in trees for u, q in tree.kind.draft_probs.items()
        ]
        assert all(num_children == min(8, support) for num_children, support in numbers)
        assert any(num_children < 8 for num_children, _ in numbers)


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal", "greedy_set"])
def test_rejection_rules_follow_the_target_with_a_real_head(tiny_model, rule):
    """The joint of the two tokens after the prefill's equals the target's, through the whole engine. The head is random
    and knows half of the vocabulary, so it is often rejected."""
    target = small_target(tiny_model)
    drafter = HeadDrafter(random_head(target, draft_vocab_size=4))
    tree = TreeSettings(max_nodes=6, max_depth=2, branch=2, beam=2, adaptive=False)
    completions, chance = chance_of_answers(Engine(target, drafter, rule=rule, tree=tree, max_requests=250))
    assert chance > FALSE_ALARM
    lengths = {length for completion in completions for length in completion.accepted_lengths[1:]}
    assert lengths == {1, 2, 3}


def test_requests_of_different_rules_share_a_batch(target):
    """Each is proposed what its own rule takes, and answers as it does alone: its draws depend on no neighbour."""
    head = random_head(target)
    rules = {"match": Coupled, "token": Sampled, "traversal": Sampled, "greedy_set": GreedySet, "typical": Coupled}
    params = [SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True, rule=rule) for rule in rules] + [
        SamplingParams(max_tokens=16, ignore_eos=True, rule="recursive")
    ]
    for drafter in (HeadDrafter(head), HybridDrafter([HeadDrafter(head), NgramDrafter()])):
        engine = Engine(target, drafter, tree=SMALL_TREE)
        alone = [engine.generate([PROMPTS[1]], one)[0].token_ids for one in params]
        with proposals(drafter) as seen:
            together = engine.generate([PROMPTS[1]] * len(params), params)
        assert [completion.token_ids for completion in together] == alone
        for request, tree, _ in seen:
            kind = OneHot if request.params.greedy else rules[request.rule.name]
            assert not len(tree) or type(tree.kind) is kind
            assert not len(tree) or tree.is_chain or not request.rule.needs_chain or request.params.greedy
    plain = Engine(target).generate([PROMPTS[1]] * 2, [params[0], params[-1]])
    assert [one.token_ids for one in plain] == [alone[0], alone[-1]]


def test_a_hybrid_makes_what_its_parts_make(target):
    """The lookup has nothing to add to draws, so the head proposes alone; at temperature 0 both propose."""
    hybrid = HybridDrafter([HeadDrafter(random_head(target)), NgramDrafter()])
    assert hybrid.kinds == (OneHot, Coupled, Sampled, GreedySet)
    assert NgramDrafter().kinds == (OneHot,)
    with pytest.raises(ValueError, match="verifies Sampled proposals, but the drafter makes OneHot"):
        Engine(target, NgramDrafter(), rule="recursive")
    repeated = [5, 6, 7, 8, 9] * 4
    engine = Engine(target, hybrid, rule="recursive", tree=SMALL_TREE)
    asked: list[bool] = []
    lookup = hybrid.drafters[1]
    original = lookup.propose
    lookup.propose = lambda requests, limits: (
        asked.extend(r.params.greedy for r in requests) or original(requests, limits)
    )
    engine.generate(
        [repeated] * 2,
        [SamplingParams(temperature=t, seed=1, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)],
    )
    assert asked
    assert all(asked)


def test_records_of_coupled_trees(target):
    """The record says what the list proposed at a node was drawn from, before any pruning; without `records` there is
    none, and the trees are the same."""
    head = random_head(target)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
    trees = {}
    for records in (False, True):
        drafter = HeadDrafter(head)
        assert isinstance(drafter, RecordingDrafter)
        drafter.records = records
        with proposals(drafter) as seen:
            Engine(target, drafter, tree=SMALL_TREE).generate(PROMPTS, params)
        trees[records] = [(tree.tokens, tree.parents, tree.values) for _, tree, _ in seen]
        if not records:
            assert not any(tree.kind.draft_probs for _, tree, _ in seen if len(tree))
    assert trees[False] == trees[True]
    num_checked = 0
    for request, tree, round_index in seen:
        if not len(tree):
            continue
        start = len(request.prompt_ids) + sum(request.accepted_lengths[:round_index])
        request.noise.forget_before(10**6)
        for node, probs in tree.kind.draft_probs.items():
            assert abs(float(probs.sum()) - 1) < 1e-5
            depth = 0 if node == ROOT else tree.depths[node]
            inside = probs[head.target_ids]
            ranked = inside.log() + request.noise.at(start + depth)[head.target_ids]
            best = head.target_ids[ranked.topk(tree.kind.num_drawn).indices].tolist()
            assert [tree.tokens[child] for child in tree.children(node)] == best
            num_checked += 1
        assert set(tree.kind.draft_probs) == set(tree.parents)
    assert num_checked > 50
    hybrid = HybridDrafter([drafter, NgramDrafter()])
    assert isinstance(hybrid, RecordingDrafter)
    assert hybrid.records
    hybrid.records = False
    assert not drafter.records
    assert not isinstance(NgramDrafter(), RecordingDrafter)
