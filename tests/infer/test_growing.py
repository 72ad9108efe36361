"""Growing trees is apart from networks: steppers that are nothing like an EAGLE head go through the same engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infer.cost import CostModel
from infer.drafters import (
    Drafter,
    DraftLimit,
    HeadDrafter,
    HybridDrafter,
    NgramDrafter,
    Room,
    ScriptedDrafter,
    TreeGrower,
    TreeSettings,
)
from infer.drafters.stepper import Frontier, Stepper
from infer.engine import Engine
from infer.request import Request
from infer.rows import GrowingRows, RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, GreedySet, OneHot, Sampled
from tests.infer.helpers import chance_of_answers, plain_ids, random_head, sampling, small_target

FALSE_ALARM = 1e-3
"""A right grower fails one of the tests of chance in a thousand."""
PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(20, 60)), [4]]
SMALL_TREE = TreeSettings(max_nodes=12, max_depth=3, branch=3, beam=2, adaptive=False)
FULL_BINARY = TreeSettings(max_nodes=14, max_depth=3, branch=2, beam=4, adaptive=False)
COST = CostModel(widths=(1, 8, 32), milliseconds=(5.0, 6.0, 9.0))


class DepthsStepper:
    """Like Medusa: the logits [K, C] of all K depths are there when a round begins, the same for every node of a depth.
    Here they depend on the last token alone."""

    taps: tuple[int, ...] = ()
    step_milliseconds = 0.0

    def __init__(self, target_ids: torch.Tensor, *, vocab_size: int, num_depths: int, milliseconds: float) -> None:
        self.name = "depths"
        self.target_ids = target_ids
        self.vocab_size = vocab_size
        self.max_depth = num_depths
        self.begin_milliseconds = milliseconds
        generator = torch.Generator().manual_seed(0)
        self.table = 2 * torch.randn((vocab_size, num_depths, len(target_ids)), generator=generator)
        self.num_asked: list[int] = []

    def open(self, room: Room) -> None:
        pass

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        pass

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DepthsRound:
        self.num_asked.append(0)
        return DepthsRound(self, self.table[[request.tokens_from(0)[-1] for request in requests]])

    def close(self, request: Request) -> None:
        pass


class DepthsRound:
    def __init__(self, stepper: DepthsStepper, logits: torch.Tensor) -> None:
        self._stepper = stepper
        self._logits = logits  # [B, K, C]

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        self._stepper.num_asked[-1] += 1
        return self._logits[[frontier.index for frontier in frontiers for _ in frontier.nodes], depth]


class ModelStepper:
    """A separate draft model with a cache of its own, which holds the text and behind it the tree."""

    taps: tuple[int, ...] = ()
    max_depth = None
    begin_milliseconds = step_milliseconds = 1.0

    def __init__(self, model: TargetModel, *, name: str = "model") -> None:
        self.model = model
        self.name = name
        self.target_ids = torch.arange(model.vocab_size)
        self.vocab_size = model.vocab_size

    def open(self, room: Room) -> None:
        num_columns = room.num_columns + room.tree.max_depth * room.tree.beam
        self.cache = self.model.new_cache(num_slots=room.num_slots, num_columns=num_columns)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        pass

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> ModelRound:
        groups = []
        for request in requests:
            num_read = request.draft_state.get(self.name, 0)
            groups.append(RowGroup(slot=request.slot, prefix=num_read, tokens=request.tokens_from(num_read)))
            request.draft_state[self.name] = request.num_tokens
        last_rows = torch.tensor([len(group.tokens) for group in groups]).cumsum(0) - 1
        return ModelRound(self, self.model.forward(groups, self.cache, logit_rows=last_rows.tolist()).logits)

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)


class ModelRound:
    def __init__(self, stepper: ModelStepper, root_logits: torch.Tensor) -> None:
        self._stepper = stepper
        self._root_logits = root_logits  # [B, V]
        self._rows: dict[Request, GrowingRows] = {}

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        if depth == 0:
            return self._root_logits[[frontier.index for frontier in frontiers]]
        groups = []
        for each in frontiers:
            rows = GrowingRows(slot=each.request.slot, prefix=each.request.num_tokens)
            rows = self._rows.setdefault(each.request, rows)
            groups.append(rows.add(each.nodes, each.parents, each.tokens, depth))
        return self._stepper.model.forward(groups, self._stepper.cache).logits


@pytest.fixture(scope="module")
def target(tiny_model) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


def depths_stepper(target: TargetModel, *, milliseconds: float = 0.0) -> DepthsStepper:
    """Three depths, over some of the target's tokens (half, or 64) in no order."""
    num_ids = min(64, target.vocab_size // 2)
    some_ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(1))[:num_ids]
    return DepthsStepper(some_ids, vocab_size=target.vocab_size, num_depths=3, milliseconds=milliseconds)


def steppers(target: TargetModel, tiny_model) -> dict[str, Stepper]:
    """One with a vocabulary of its own in no order, and one that knows every token."""
    other = tiny_model("llama", seed=7, vocab_size=target.vocab_size)
    return {
        "depths": depths_stepper(target),
        "model": ModelStepper(TargetModel.wrap(other)),
    }


@pytest.mark.parametrize("name", ["depths", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_stepper_changes_a_token(target, tiny_model, name, temperature):
    """Chains and trees, fixed and adaptive, alone and batched, with the lookup and without: plain's token ids."""
    params = [sampling(temperature, seed=seed, max_tokens=10 + 5 * seed) for seed in range(len(PROMPTS))]
    expected = [plain_ids(target, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    grower = TreeGrower(steppers(target, tiny_model)[name])
    assert isinstance(grower, Drafter)
    assert isinstance(grower.stepper, Stepper)
    for drafter in (grower, HybridDrafter([grower, NgramDrafter()])):
        for tree in (TreeSettings.chain(4), SMALL_TREE, TreeSettings()):
            for max_requests in (1, 3):
                engine = Engine(target, drafter, tree=tree, max_requests=max_requests, cost=COST)
                assert tuple(one.token_ids for one in engine.generate(PROMPTS, params)) == tuple(expected)


@pytest.mark.parametrize("rule", ["recursive", "greedy_set"])
@pytest.mark.parametrize("name", ["depths", "model"])
def test_rejection_rules_follow_the_target_whatever_steps(tiny_model, name, rule):
    """The joint of the two tokens after the prefill's equals the target's; drafts are often rejected, often not."""
    target = small_target(tiny_model)
    drafter = TreeGrower(steppers(target, tiny_model)[name])
    tree = TreeSettings(max_nodes=6, max_depth=2, branch=2, beam=2, adaptive=False)
    completions, chance = chance_of_answers(Engine(target, drafter, rule=rule, tree=tree, max_requests=250))
    assert chance > FALSE_ALARM
    assert {length for one in completions for length in one.accepted_lengths[1:]} == {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [TreeSettings.chain(3), FULL_BINARY])
def test_the_target_as_its_own_draft_model_is_always_right(target, tree, temperature):
    """So the draft model's logits are those of each node's own path, in a cache in which earlier trees left no trace,
    and at temperature 0.8 its drafts see the target's noise. The tree keeps every node it grows."""
    params = sampling(temperature, max_tokens=30)
    completions = Engine(target, TreeGrower(ModelStepper(target)), tree=tree).generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == plain_ids(target, prompt, params)
        assert set(completion.accepted_lengths[1:-1]) == {4}


def propose_once(target: TargetModel, drafter: TreeGrower, tree: TreeSettings, params: SamplingParams) -> DraftTree:
    engine = Engine(target, drafter, tree=tree, cost=COST)
    (request,) = engine.submit([PROMPTS[0]], params)
    engine._advance(engine._admit(), [DraftTree.empty()])
    (proposed,) = drafter.propose([request], [engine._limit(request)])
    engine.abort()
    return proposed


def naive_tree(table: torch.Tensor, target_ids: Sequence[int], *, branch: int, beam: int) -> list[tuple[int, ...]]:
    """Paths of the one-hot tree that logits [K, C] by depth give: all children of the likeliest nodes of a depth."""
    probs = torch.softmax(table, dim=-1)
    paths, frontier = [], [((), 1.0)]
    for row in probs:
        ranked = row.topk(branch)
        children = [
            ((*path, target_ids[place]), value * share)
            for path, value in frontier
            for share, place in zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True)
        ]
        paths += [path for path, _ in children]
        best = sorted(children, key=lambda child: -child[1])[:beam]
        frontier = [child for child in children if child in best]
    return paths


def test_a_tree_is_what_the_logits_say(target):
    """Written a second time, without batches, rows or builders; and it ends where the stepper's depths do."""
    stepper = depths_stepper(target)
    tree = TreeSettings(max_nodes=40, max_depth=6, branch=4, beam=3, adaptive=False)
    proposed = propose_once(target, TreeGrower(stepper), tree, sampling())
    (last,) = plain_ids(target, PROMPTS[0], sampling(max_tokens=1))
    expected = naive_tree(stepper.table[last], stepper.target_ids.tolist(), branch=4, beam=3)
    found = [tuple(proposed.tokens[node] for node in proposed.path(each)) for each in range(len(proposed))]
    assert found == expected
    assert max(proposed.depths) == 3
    assert stepper.num_asked == [3]


def test_a_request_alone_and_in_a_batch_gets_the_same_tree(target):
    """Whatever its neighbours' rules are and however deep they may go. Rows by table, so to the bit."""
    stepper = depths_stepper(target)
    drafter = TreeGrower(stepper)
    rules = ["match", "match", "recursive", "greedy_set", "token", "traversal"]
    params = [
        SamplingParams(temperature=0.8 * (i > 0), seed=3, max_tokens=3 + i, rule=rule) for i, rule in enumerate(rules)
    ]
    engine = Engine(target, drafter, tree=SMALL_TREE)
    requests = engine.submit([PROMPTS[0]] * len(params), params)
    engine._advance(engine._admit(), [DraftTree.empty()] * len(requests))
    limits = [engine._limit(request) for request in requests]
    limits[1] = DraftLimit(max_nodes=0, max_depth=3)
    together = drafter.propose(requests, limits)
    alone = [drafter.propose([request], [limit])[0] for request, limit in zip(requests, limits, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert (one.tokens, one.parents, one.values) == (other.tokens, other.parents, other.values)
        if isinstance(one.kind, Sampled | GreedySet):
            for node, probs in one.kind.draft_probs.items():
                assert torch.equal(probs, other.kind.draft_probs[node])
    assert [len(tree) > 0 for tree in together] == [True, False, True, True, True, True]
    assert max(together[0].depths) == 1  # of three tokens the first is emitted, and the last needs no draft
    assert max(together[2].depths) == 3


class PathsRound(DepthsRound):
    """Carries each node's path along in two ways, by rows (as a head's states are) and by the tree's own numbers."""

    by_node: dict[tuple[Request, int], tuple[int, ...]]
    by_row: Sequence[tuple[int, ...]] = ()

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        asked = [(each, i) for each in frontiers for i in range(len(each.nodes))]
        if depth == 0:
            assert all(each.parent_rows == [each.index] and each.nodes == [ROOT] for each in frontiers)
            self.by_node = {(each.request, ROOT): (each.index,) for each in frontiers}
            self.by_row = [(each.index,) for each in frontiers]
        else:
            self.by_row = [(*self.by_row[each.parent_rows[i]], each.tokens[i]) for each, i in asked]
            for each, i in asked:
                path = (*self.by_node[each.request, each.parents[i]], each.tokens[i])
                self.by_node[each.request, each.nodes[i]] = path
        assert self.by_row == [self.by_node[each.request, each.nodes[i]] for each, i in asked]
        return super().logits(frontiers, depth)


def test_every_node_is_told_its_parent_and_its_parents_row(target):
    """By either a network carries what it needs from a depth to the next, while requests drop out of the batch."""
    stepper = depths_stepper(target)
    rounds: list[PathsRound] = []

    def begin(requests: Sequence[Request], depths: Sequence[int]) -> PathsRound:
        rounds.append(PathsRound(stepper, DepthsStepper.begin(stepper, requests, depths)._logits))
        return rounds[-1]

    stepper.begin = begin
    engine = Engine(target, TreeGrower(stepper), tree=SMALL_TREE)
    params = [sampling(0.8 * (i % 2), seed=i, max_tokens=5 + 3 * i) for i in range(len(PROMPTS))]
    engine.generate(PROMPTS, params)
    assert max(len(path) for each in rounds for path in each.by_row) == 3
    assert max(len({path[0] for path in each.by_row}) for each in rounds) == len(PROMPTS)


def test_drafters_say_what_they_spent(target, tiny_model):
    """One step a depth for a model or head, all depths at once for heads by depth, nothing for lookups, whose long
    chains nobody pays for; a hybrid's is the sum of those that proposed."""
    shallow = TreeSettings(max_nodes=16, max_depth=2, branch=2, beam=2, adaptive=False)
    assert NgramDrafter().spent_milliseconds == ScriptedDrafter(lambda *_: DraftTree.empty()).spent_milliseconds == 0
    model = TreeGrower(ModelStepper(target))
    propose_once(target, model, shallow, sampling())
    assert model.spent_milliseconds == 2.0
    depths = TreeGrower(depths_stepper(target, milliseconds=0.5))
    propose_once(target, depths, SMALL_TREE, sampling())
    assert depths.spent_milliseconds == 0.5
    propose_once(target, model, shallow, sampling(max_tokens=2))  # nothing to draft, but the text was read
    assert model.spent_milliseconds == 1.0
    hybrid = HybridDrafter([model, depths, NgramDrafter()])
    engine = Engine(target, hybrid, tree=SMALL_TREE, rule="recursive")
    for temperature, spent in ((0.0, 3.5), (0.8, 3.0)):  # where draws are asked for, the first alone proposes
        (request,) = engine.submit([PROMPTS[0]], sampling(temperature))
        engine._advance(engine._admit(), [DraftTree.empty()])
        hybrid.propose([request], [engine._limit(request)])
        assert hybrid.spent_milliseconds == spent
        engine.abort()


@pytest.mark.parametrize(("spent_milliseconds", "num_kept"), [(0.0, 0), (100.0, 4)])
def test_the_engine_fits_trees_to_what_was_spent(target, spent_milliseconds, num_kept):
    """Nodes too unlikely for a cheap round are worth their rows in one that has cost much already, however deep the
    tree is."""
    proposed = DraftTree(tokens=(1, 2, 3, 4), parents=(ROOT, 0, 1, 2), values=(0.02,) * 4, kind=OneHot())
    drafter = ScriptedDrafter(lambda request, limit: proposed)
    drafter.spent_milliseconds = spent_milliseconds
    engine = Engine(target, drafter, tree=TreeSettings(), cost=COST)
    engine.submit([PROMPTS[0]], sampling())
    engine.step()
    (kept,) = engine._draft(engine._running, None)
    assert len(kept) == num_kept


def test_a_step_must_pay_and_what_is_free_always_does(target):
    """Of two steppers with the same logits, the one whose steps cost more than a forward stops at depth 1."""
    adaptive = TreeSettings(max_nodes=16, max_depth=3, branch=2, beam=2)
    for step_milliseconds, depth in ((0.0, 3), (50.0, 1)):
        stepper = depths_stepper(target)
        stepper.table[:, :, 5] += 8  # sure enough of its guesses to go on
        stepper.step_milliseconds = step_milliseconds
        drafter = TreeGrower(stepper)
        assert max(propose_once(target, drafter, adaptive, sampling()).depths) == depth
        assert stepper.num_asked == [depth]


def test_two_heads_of_one_family_share_a_hybrid(target):
    """Each remembers a request under a name of its own; the same name twice is refused."""
    heads = [random_head(target, seed=seed) for seed in range(2)]
    with pytest.raises(ValueError, match="need different names"):
        HybridDrafter([HeadDrafter(head) for head in heads])
    hybrid = HybridDrafter([HeadDrafter(heads[0]), HeadDrafter(heads[1], name="eagle3 b"), NgramDrafter()])
    assert hybrid.name == "eagle3+eagle3 b+ngram"
    engine = Engine(target, hybrid, tree=SMALL_TREE)
    for temperature in (0.0, 0.8):
        params = sampling(temperature)
        expected = [plain_ids(target, prompt, params) for prompt in PROMPTS]
        assert [one.token_ids for one in engine.generate(PROMPTS, params)] == expected
    (request,) = engine.submit([PROMPTS[0]], sampling())
    engine.step()
    assert set(request.draft_state) == {"eagle3", "eagle3 b", "ngram"}


def test_growing_rows_are_those_of_the_finished_tree(target):
    """Logits of a tree's nodes, fed depth by depth, are those of all its paths run as plain texts. (A mask that
    forgets a grandparent, or shows a cousin, shows here.)"""
    prompt, tokens, parents, depths = PROMPTS[1], [3, 4, 5, 6, 7], [ROOT, ROOT, 0, 1, 3], [1, 1, 2, 2, 3]
    tree = DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot())
    cache = target.new_cache(num_slots=1, num_columns=64)
    target.forward([RowGroup(slot=0, prefix=0, tokens=prompt)], cache)
    rows = GrowingRows(slot=0, prefix=len(prompt))
    found: dict[int, torch.Tensor] = {}
    for depth in (1, 2, 3):
        nodes = [node for node in range(5) if depths[node] == depth]
        group = rows.add(nodes, [parents[node] for node in nodes], [tokens[node] for node in nodes], depth)
        found.update(zip(nodes, target.forward([group], cache).logits, strict=True))
    for node, logits in found.items():
        path = [tokens[each] for each in tree.path(node)]
        with target.stock() as model, torch.inference_mode():
            expected = model(input_ids=torch.tensor([[*prompt, *path]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
