"""An engine with static rounds emits plain decoding's tokens, whatever drafts, and keeps what ordinary rounds keep.

All rounds here are replayed from a tape (`tests.infer.graphs.tape`), as a CUDA graph would replay them.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from infer.cost import CostModel
from infer.drafters import (
    Drafter,
    DraftLimit,
    HybridDrafter,
    NgramDrafter,
    ScriptedDrafter,
    TreeGrower,
    TreeSettings,
    reading,
)
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.graphs import rounds as graph_rounds
from infer.graphs.capture import NoSync, SyncError, captured
from infer.graphs.rounds import StaticRound
from infer.request import Completion, DraftBounds, Request
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot
from tests.head_families import VARIANTS, tiny_head
from tests.infer.graphs.tape import taped
from tests.infer.helpers import plain_ids, random_tree, sampling

PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(4, 40)), [4]]
TREE = TreeSettings(max_nodes=12, max_depth=4, branch=4, beam=4, adaptive=False)


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads as they are, too: what runs on CPU kernels is not seen by a tape."""
    monkeypatch.setattr(graph_rounds, "captured", taped)
    monkeypatch.setattr(reading, "decoding_view", lambda head: head)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama", vocab_size=48), forward="eager")


def static_engine(target: TargetModel, drafter: Drafter | None = None, **settings: Any) -> Engine:
    return Engine(target, drafter, graphs=True, **{"tree": TREE, **settings})


def count_static(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each static round from now on."""
    rounds: list[int] = []
    read = StaticRound.read

    def counted(self: StaticRound, num_requests: int | None = None) -> Any:
        rounds.append(num_requests or self.shape.batch)
        return read(self, num_requests)

    monkeypatch.setattr(StaticRound, "read", counted)
    return rounds


def mixed(temperatures: Sequence[float], **changes: Any) -> list[SamplingParams]:
    return [
        replace(sampling(temperatures[i % len(temperatures)], **changes), seed=i, max_tokens=18 + 3 * i)
        for i in range(len(PROMPTS))
    ]


def expected_tokens(target: TargetModel, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    return [plain_ids(target, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "gpt_neox", "gpt2"])
def test_static_rounds_of_every_kind_of_target(
    kind: str, tiny_model: Callable[..., Any], tiny_kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sliding windows, squashed scores and absolute positions among them; trees that hold the right continuation now
    and then."""
    if kind not in tiny_kinds:
        pytest.skip(f"no tiny {kind}")
    target = TargetModel.wrap(tiny_model(kind), forward="eager")
    rounds = count_static(monkeypatch)
    params = mixed([0.0, 0.8])
    expected = expected_tokens(target, params)
    rights = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    rng = random.Random(7)

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        right = rights[request.prompt_ids][len(request.output_ids) :]
        return random_tree(rng, target.vocab_size, limit, right)

    assert tokens_of(static_engine(target).generate(PROMPTS, params)) == expected
    assert tokens_of(static_engine(target, ScriptedDrafter(script)).generate(PROMPTS, params)) == expected
    assert max(rounds) > 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [None, 24], ids=["full", "reduced"])
def test_heads_draft_on_the_device(
    variant: str, size: int | None, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of any family: the same tokens, in a batch whose requests end one after another."""
    head = tiny_head(variant, target, draft_vocab_size=size)
    drafter = head_drafter(head, target)
    params = mixed([0.0, 0.8])
    rounds = count_static(monkeypatch)
    engine = static_engine(target, drafter)
    completions = engine.generate(PROMPTS, params)
    assert tokens_of(completions) == expected_tokens(target, params)
    assert len(rounds) >= 4
    if isinstance(drafter, TreeGrower) and size is None:
        ordinary = Engine(target, head_drafter(head, target), tree=TREE).generate(PROMPTS, params)
        accepted = [completion.speculation.num_accepted_tokens for completion in completions]
        assert sum(accepted) == pytest.approx(
            sum(each.speculation.num_accepted_tokens for each in ordinary), rel=0.35, abs=6
        )


def test_a_head_drafts_what_it_drafts_in_ordinary_rounds(target: TargetModel) -> None:
    """The trees of a chain of one candidate are the same nodes, round for round: states, caches and noise agree."""
    chain = TreeSettings.chain(4)
    for variant in ("eagle3", "eagle1", "hydra with a prefix layer", "medusa"):
        head = tiny_head(variant, target)
        found: list[list[tuple[int, ...]]] = []
        for graphs in (False, True):
            engine = Engine(target, head_drafter(head, target), tree=chain, graphs=graphs)
            requests = engine.submit(PROMPTS, mixed([0.0, 0.8]))
            trees: list[tuple[int, ...]] = []
            while any(request.finish_reason is None for request in requests):
                engine.step()
                # Where a request has few tokens left, ordinary rounds cut the chain short.
                trees += [
                    (requests.index(each.request), *each.tree.tokens) for each in engine.rounds if each.depth == 4
                ]
            found.append(sorted(trees))
        assert set(found[0]) <= set(found[1]), variant
        assert found[0]


def test_lookups_and_hybrids_draft_on_the_host(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = count_static(monkeypatch)
    params = mixed([0.0, 0.8])
    expected = expected_tokens(target, params)
    assert tokens_of(static_engine(target, NgramDrafter()).generate(PROMPTS, params)) == expected
    head = head_drafter(tiny_head("eagle3", target), target)
    hybrid = HybridDrafter([head, NgramDrafter()])
    assert tokens_of(static_engine(target, hybrid).generate(PROMPTS, params)) == expected
    assert len(rounds) > 8


def test_a_poor_draft_of_the_host_rests_and_tries_again(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What static rounds show of the host's drafts counts as what ordinary rounds do: drafts are asked for in the very
    same rounds."""
    cost = CostModel(widths=(1, 64), milliseconds=(10.0, 73.0))
    tree = replace(TREE, adaptive=True)
    rounds = count_static(monkeypatch)
    asked_at: list[list[int]] = []
    for graphs in (False, True):
        asked: list[int] = []

        def wrong(request: Request, limit: DraftLimit, asked: list[int] = asked) -> DraftTree:
            asked.append(len(request.output_ids))
            return DraftTree(tokens=(47, 46), parents=(-1, 0), values=(0.5, 0.4), kind=OneHot())

        drafter = ScriptedDrafter(wrong)
        drafter.spent_milliseconds = 30.0
        engine = Engine(target, drafter, tree=tree, cost=cost, graphs=graphs)
        engine.generate(PROMPTS[:1], sampling(0.0, max_tokens=90))
        asked_at.append(asked)
    assert asked_at[0] == asked_at[1]
    assert 3 <= len(asked_at[0]) < 45
    assert len(rounds) > 60


def test_requests_that_need_the_host_go_their_ordinary_way(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters, penalties, log-probabilities, bounds of their own: ordinary rounds, and static ones when they have
    gone. States that a head has not read move between the two."""
    first, second, third, fourth = mixed([0.0, 0.8])
    params = [
        replace(first, max_tokens=40),
        replace(second, top_k=12, top_p=0.9, max_tokens=6),
        replace(third, max_tokens=40),
        replace(fourth, repetition_penalty=1.3, logprobs=2, max_tokens=9),
    ]
    rounds = count_static(monkeypatch)
    for variant in ("eagle3", "medusa"):
        rounds.clear()
        engine = static_engine(target, head_drafter(tiny_head(variant, target), target))
        assert tokens_of(engine.generate(PROMPTS, params)) == expected_tokens(target, params)
        assert rounds
        assert max(rounds) == 2


def test_drafting_that_stops_and_starts(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The governor's depth changes from round to round, 0 among them: states wait, in the slot's place or out of it."""
    params = mixed([0.0, 0.8])
    expected = expected_tokens(target, params)
    depths = [4, 0, 2, 0, 0, None, 1, 0, 4, 4, 0, 3]

    class Fickle:
        def __init__(self) -> None:
            self.num_rounds = 0

        def depth(self, num_requests: int) -> int | None:
            self.num_rounds += 1
            return depths[self.num_rounds % len(depths)]

        def see(self, *args: Any, **kwargs: Any) -> None:
            pass

    for variant in ("eagle3", "hydra with a prefix layer", "medusa"):
        engine = static_engine(target, head_drafter(tiny_head(variant, target), target))
        engine.governor = Fickle()  # type: ignore[assignment]
        assert tokens_of(engine.generate(PROMPTS, params)) == expected, variant


def test_slots_are_taken_over_and_prefixes_shared(target: TargetModel) -> None:
    """More requests than slots, prompts that begin alike, a request that is pre-empted: as in ordinary rounds."""
    shared = list(range(3, 43))
    prompts = [[*shared, i] for i in range(5)]
    params = [replace(sampling(0.7 * (i % 2)), seed=i, max_tokens=10 + i) for i in range(5)]
    expected = [plain_ids(target, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    head = tiny_head("eagle3", target)
    engine = static_engine(
        target,
        head_drafter(head, target),
        max_requests=2,
        max_length=64,
        sharing=Sharing(reuse_prefixes=True, prefill_chunk=16),
    )
    requests = engine.submit(prompts, params)
    for number in range(200):
        engine.step()
        if number == 6:
            engine.preempt()
        if all(request.finish_reason for request in requests):
            break
    assert [tuple(request.output_ids) for request in requests] == expected
    assert any(request.num_reused for request in requests)


def test_ends_within_an_accepted_block(target: TargetModel) -> None:
    """A perfect draft of four tokens: stop tokens and caps at every place of a block."""
    params = sampling(0.0, max_tokens=20)
    (prompt, *_) = PROMPTS
    right = plain_ids(target, prompt, params)

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        return DraftTree.chain(right[len(request.output_ids) :][: limit.max_depth])

    for cut in range(1, 12):
        engine = static_engine(target, ScriptedDrafter(script))
        (capped,) = engine.generate([prompt], replace(params, max_tokens=cut))
        assert (capped.token_ids, capped.finish_reason) == (right[:cut], "length")
        stop = right[cut]
        first = right.index(stop)
        (stopped,) = engine.generate([prompt], replace(params, stop_token_ids=(stop,), ignore_eos=False))
        assert len(stopped.token_ids) in (first, first + 1)
        assert stopped.finish_reason == "stop"


def test_a_row_that_lets_no_token_be_drawn_ends_its_request_alone(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one request's logits: what came before it stays, the error says why, and the other answer is whole."""
    params = mixed([0.0])[:2]
    expected = expected_tokens(target, mixed([0.0]))[:2]
    forward = TargetModel.forward_rows

    def broken(self: TargetModel, rows: Any, **settings: Any) -> Any:
        output = forward(self, rows, **settings)
        first = rows.positions == len(PROMPTS[0]) + 6  # only the first request, the shorter one, gets there alone
        is_first_slot = rows.columns < rows.cache.num_columns
        return replace(output, logits=torch.where((first & is_first_slot)[:, None], torch.nan, output.logits))

    monkeypatch.setattr(TargetModel, "forward_rows", broken)
    completions = static_engine(target, head_drafter(tiny_head("eagle3", target), target)).generate(PROMPTS[:2], params)
    assert completions[0].finish_reason == "error"
    assert "nan" in str(completions[0].error)
    assert completions[0].token_ids == expected[0][: len(completions[0].token_ids)]
    assert len(completions[0].token_ids) == 7
    assert completions[1].token_ids == expected[1]


def test_a_request_with_bounds_of_its_own(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = count_static(monkeypatch)
    engine = static_engine(target, head_drafter(tiny_head("eagle3", target), target))
    (request,) = engine.prepare(PROMPTS[0], sampling(), draft=DraftBounds(max_nodes=2))
    engine.enqueue([request])
    while request.finish_reason is None:
        engine.step()
    assert tuple(request.output_ids) == plain_ids(target, PROMPTS[0], sampling())
    assert not rounds


def test_a_model_that_syncs_is_refused(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for static rounds it says why not; by default the engine goes on in ordinary rounds."""

    class Nosy(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.inner(states) * (1.0 if states.abs().max().item() >= 0 else 0.0)

    monkeypatch.setattr(graph_rounds, "captured", captured)
    model = tiny_model("llama", vocab_size=48)
    model.model.layers[1].mlp = Nosy(model.model.layers[1].mlp)
    target = TargetModel.wrap(model, forward="eager")
    with pytest.raises(SyncError, match=r"Nosy reads a number in the middle of a forward"):
        static_engine(target).generate(PROMPTS[:1], sampling())
    engine = static_engine(target)
    (request,) = engine.submit(PROMPTS[:1], sampling())
    engine._graphs = None  # as on a GPU, where nobody asked for graphs
    while request.finish_reason is None:
        engine.step()
    assert tuple(request.output_ids) == plain_ids(target, PROMPTS[0], sampling())


def test_a_round_has_one_sync(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the inputs' upload and the outcome's reading nothing looks at a value, in every round."""
    compute = StaticRound.compute
    num_rounds = 0

    def watched(self: StaticRound) -> None:
        nonlocal num_rounds
        num_rounds += 1
        with NoSync():
            compute(self)

    monkeypatch.setattr(StaticRound, "compute", watched)
    monkeypatch.setattr(graph_rounds, "captured", captured)
    engine = static_engine(target, head_drafter(tiny_head("eagle3", target), target))
    engine.generate(PROMPTS, mixed([0.0, 0.8]))
    assert num_rounds > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_rounds_keep_every_bit(dtype: torch.dtype, tiny_model: Callable[..., Any]) -> None:
    """With a draft and without one, alone and side by side, in bfloat16 too."""
    model = tiny_model("llama", vocab_size=48, max_position_embeddings=1024).to(dtype)
    target = TargetModel.wrap(model, forward="eager")
    tree = replace(TREE, max_nodes=7)
    params = [replace(one, max_tokens=36) for one in mixed([0.0, 0.8])]
    settings: dict[str, Any] = {"exactness": "bitwise", "row_width": 16, "tree": tree, "max_length": 128}
    expected = tokens_of(static_engine(target, **settings).generate(PROMPTS, params))
    head = head_drafter(tiny_head("eagle3", target), target)
    assert tokens_of(static_engine(target, head, **settings).generate(PROMPTS, params)) == expected
    rights = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    rng = random.Random(3)

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        return random_tree(rng, 48, replace(limit, max_nodes=7), rights[request.prompt_ids][len(request.output_ids) :])

    scripted = static_engine(target, ScriptedDrafter(script), **settings)
    assert tokens_of(scripted.generate(PROMPTS, params)) == expected
    for prompt, one, tokens in zip(PROMPTS, params, expected, strict=True):
        (alone,) = static_engine(target, head, **settings).generate([prompt], one)
        assert alone.token_ids == tokens


def test_rounds_can_be_captured_ahead(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server captures its shapes before the first request; decoding then captures no more, and its tokens are the
    same."""
    for drafter in (None, head_drafter(tiny_head("eagle3", target), target)):
        engine = static_engine(target, drafter, max_requests=4, max_length=128)
        engine.reserve()
        assert engine._static is not None
        engine._static.prepare()
        num_captured = engine.num_captured
        assert num_captured == 3
        params = mixed([0.0, 0.8])
        assert tokens_of(engine.generate(PROMPTS, params)) == expected_tokens(target, params)
        assert engine.num_captured == num_captured


def test_a_round_that_fails_is_followed_by_ordinary_ones(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where faults are isolated, as in a server: the device runs out of memory in the fourth round, and all answers are
    whole. Elsewhere the error is told."""
    read = StaticRound.read
    rounds: list[int] = []

    def failing(self: StaticRound, num_requests: int | None = None) -> Any:
        rounds.append(1)
        if len(rounds) == 4:
            raise RuntimeError("CUDA out of memory")
        return read(self, num_requests)

    monkeypatch.setattr(StaticRound, "read", failing)
    params = mixed([0.0, 0.8])
    expected = expected_tokens(target, params)
    for variant in ("eagle3", "medusa"):
        rounds.clear()
        drafter = head_drafter(tiny_head(variant, target), target)
        engine = static_engine(target, drafter, sharing=Sharing(isolate_faults=True))
        assert tokens_of(engine.generate(PROMPTS, params)) == expected
        assert len(rounds) == 4
    rounds.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        static_engine(target).generate(PROMPTS, params)


def test_a_capture_that_fails_leaves_the_states_that_wait(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory at the second shape, when states lie where rounds write: drafts go on from those states."""
    fails: list[bool] = []

    def failing(compute: Callable[[], None], device: torch.device, *, pool: Any = None) -> Callable[[], None]:
        compute()
        if fails:
            raise RuntimeError("CUDA out of memory")
        return compute

    monkeypatch.setattr(graph_rounds, "captured", failing)
    drafter = head_drafter(tiny_head("eagle3", target), target)
    engine = static_engine(target, drafter, max_requests=2, max_length=64, sharing=Sharing(isolate_faults=True))
    (request,) = engine.submit([PROMPTS[0]], sampling())
    for _ in range(3):
        engine.step()
    (waiting,) = drafter.stepper.memory(request).pending  # type: ignore[attr-defined]
    expected = waiting.clone()
    fails.append(True)
    requests = engine.submit([PROMPTS[0]], sampling())
    assert engine._static is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        engine._static.run([request], depth=2)  # another shape
    assert torch.equal(waiting, expected)
    while request.finish_reason is None or requests[0].finish_reason is None:
        engine.step()
    assert tuple(request.output_ids) == tuple(requests[0].output_ids) == plain_ids(target, PROMPTS[0], sampling())


def test_plain_rounds_go_on_to_the_last_column(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is drafted no room for a tree is needed: all rounds but the prompt's are static."""
    rounds = count_static(monkeypatch)
    engine = static_engine(target, max_requests=1, max_length=64, tree=replace(TREE, max_nodes=60))
    engine.generate([PROMPTS[0]], sampling(max_tokens=61))
    assert len(rounds) == 60


def test_trees_of_the_host_are_told_as_they_are(target: TargetModel) -> None:
    """With their kind and values: what was looked up is not coupled to any noise, whatever the temperature."""
    given = DraftTree(tokens=(7, 9), parents=(-1, 0), kind=OneHot(), values=(0.5, 0.25))
    engine = static_engine(target, ScriptedDrafter(lambda request, limit: given))
    engine.submit([PROMPTS[0]], sampling(0.8))
    trees = []
    while engine.num_running or engine.num_waiting:
        engine.step()
        trees += [each.tree for each in engine.rounds if not each.is_first]
    assert len(trees) > 8
    assert all(tree == given for tree in trees)


def test_what_is_captured_ahead_leaves_kept_texts_alone(target: TargetModel) -> None:
    """A prompt that was answered before the server reserves its slots is answered alike afterwards."""
    prompt = list(range(3, 43))
    expected = plain_ids(target, prompt, sampling())
    engine = static_engine(target, max_requests=2, max_length=128, sharing=Sharing(reuse_prefixes=True))
    for _ in range(2):
        (completion,) = engine.generate([prompt], sampling())
        assert completion.token_ids == expected
        engine._capture_ahead()


def test_a_model_that_cannot_be_captured_ahead(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where static rounds were asked for; where they were not, a server starts without them."""

    def refusing(*args: Any, **settings: Any) -> Any:
        raise SyncError("Router reads a number")

    monkeypatch.setattr(graph_rounds, "captured", refusing)
    engine = static_engine(target, max_requests=2, max_length=64)
    engine.reserve()
    with pytest.raises(SyncError, match="Router reads"):
        engine._capture_ahead()
    engine._graphs = None
    engine._capture_ahead()
    assert engine._static is None
    assert engine.generate([PROMPTS[0]], sampling())[0].token_ids == plain_ids(target, PROMPTS[0], sampling())


def test_the_old_cache_goes_before_the_new_one_comes(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may take most of a device: captured rounds must not hold it while a longer one is made."""
    engine = static_engine(target, head_drafter(tiny_head("eagle3", target), target))
    engine.generate(PROMPTS[:2], sampling())
    assert engine.num_captured
    old = weakref.ref(engine._cache)  # type: ignore[arg-type]
    was_gone: list[bool] = []
    new_cache = target.new_cache

    def watched(**sizes: int) -> Any:
        was_gone.append(old() is None)
        return new_cache(**sizes)

    monkeypatch.setattr(target, "new_cache", watched)
    (completion,) = engine.generate([PROMPTS[0]], sampling(max_tokens=200))
    assert was_gone[0]
    assert completion.token_ids == plain_ids(target, PROMPTS[0], sampling(max_tokens=200))


def test_graphs_that_cannot_be_are_refused(target: TargetModel) -> None:
    """Asked for, they are not left out in silence: the host's trees do not fit into a forward of fixed width."""
    engine = static_engine(target, NgramDrafter(), exactness="bitwise", row_width=8)
    with pytest.raises(ValueError, match="a tree of 12 nodes and its root do not fit into forwards of 8 rows"):
        engine.generate(PROMPTS[:1], sampling())
