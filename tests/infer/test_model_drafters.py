"""Causal models as drafters: another model, the target's first layers, the target with rounded weights, an adapter.

None may change a token; what each has read is always what a fresh prefill reads; and those that run on the target's own
cache leave it as they found it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.early_exit import EarlyExitConfig, EarlyExitHead
from heads.vocab import DraftVocabulary, always_kept_ids
from infer.cost import CostModel
from infer.drafters import Drafter, HybridDrafter, NgramDrafter, Room, Stepper, TreeSettings
from infer.drafters.model import ModelDrafter, check_tokenizers, draft_vocabulary
from infer.engine import Engine
from infer.request import Request
from infer.rows import RowGroup
from infer.target import TargetModel
from infer.tree import DraftTree
from tests.infer.helpers import chance_of_answers, plain_ids, sampling, small_target, write_folders
from tests.toy_tokenizer import toy_tokenizer

PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(20, 60)), [4]]
SMALL_TREE = TreeSettings(max_nodes=12, max_depth=3, branch=3, beam=2, adaptive=False)
FULL_BINARY = TreeSettings(max_nodes=14, max_depth=3, branch=2, beam=4, adaptive=False)
COST = CostModel(widths=(1, 8, 32), milliseconds=(5.0, 6.0, 9.0))
FALSE_ALARM = 1e-3
TOLERANCE = 1e-4
"""Float32 sums in another order: observed 1e-6 to 1e-5 on logits of size 1 to 10."""

Make = Callable[[TargetModel, TargetModel], ModelDrafter]


def random_exit_head(target: TargetModel, *, draft_vocab_size: int = 40, exit_layer: int = 2) -> EarlyExitHead:
    """A head whose adapter does something."""
    size = target.vocab_size
    config = EarlyExitConfig.for_target(
        target.config, draft_vocab_size=draft_vocab_size, vocab_size=size, exit_layer=exit_layer
    )
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, size, 2), 1), size=draft_vocab_size, vocab_size=size
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EarlyExitHead(config, vocabulary)
        torch.nn.init.normal_(head.adapter.down_proj.weight, std=0.3)
    return head.to(target.dtype).bind(target.weights)


MAKERS: dict[str, Make] = {
    "another model": lambda target, other: ModelDrafter.of_model(other, target),
    "another model, few tokens": lambda target, other: ModelDrafter.of_model(other, target, vocab=40),
    "itself": lambda target, other: ModelDrafter.of_model(target, target),
    "one layer": lambda target, other: ModelDrafter.first_layers(1, target),
    "two layers, few tokens": lambda target, other: ModelDrafter.first_layers(2, target, vocab=40),
    "int8": lambda target, other: ModelDrafter.rounded(8, target),
    "int4, few tokens": lambda target, other: ModelDrafter.rounded(4, target, vocab=40),
    "early exit": lambda target, other: ModelDrafter.early_exit(random_exit_head(target), target),
}
SHARING = [name for name in MAKERS if "model" not in name and name != "itself"]


@pytest.fixture(scope="module")
def pairs(tiny_model) -> Callable[[str], tuple[TargetModel, TargetModel]]:
    """A target of a family, and another model of it."""
    made: dict[str, tuple[TargetModel, TargetModel]] = {}

    def pair(kind: str) -> tuple[TargetModel, TargetModel]:
        if kind not in made:
            made[kind] = TargetModel.wrap(tiny_model(kind)), TargetModel.wrap(tiny_model(kind, seed=7))
        return made[kind]

    return pair


@pytest.fixture(scope="module")
def target(pairs) -> TargetModel:
    return pairs("llama")[0]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


# The tokens are plain decoding's


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_model_changes_a_token(pairs, name, temperature):
    """Chains and trees, fixed and adaptive, alone and batched, with the lookup and without, and requests that are
    preempted and resume: plain's token ids."""
    target, other = pairs("llama")
    drafter = MAKERS[name](target, other)
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter.stepper, Stepper)
    params = [sampling(temperature, seed=seed, max_tokens=10 + 4 * seed) for seed in range(len(PROMPTS))]
    expected = [plain_ids(target, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    for each in (drafter, HybridDrafter([drafter, NgramDrafter()])):
        for tree, max_requests in ((TreeSettings.chain(4), 1), (SMALL_TREE, 3), (TreeSettings(), 4)):
            engine = Engine(target, each, tree=tree, max_requests=max_requests, cost=COST)
            assert answers(engine, PROMPTS, params) == expected
    engine = Engine(target, drafter, tree=SMALL_TREE, max_requests=3)
    requests = engine.submit(PROMPTS, params)
    for step in range(100):
        if step in (1, 3):
            engine.preempt(None if step == 1 else [requests[2]])
        engine.step()
    assert [tuple(request.output_ids) for request in requests] == expected


@pytest.mark.parametrize("kind", ["gemma3", "gemma2", "gpt2", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("name", ["another model", "one layer", "two layers, few tokens", "int8", "early exit"])
def test_no_model_changes_a_token_in_other_families(pairs, kind, name):
    """Sliding windows shorter than the text and the tree's depth, learned positions, capped logits, layer norms."""
    target, other = pairs(kind)
    drafter = MAKERS[name](target, other)
    deep = TreeSettings(max_nodes=24, max_depth=9, branch=2, beam=2, adaptive=False)
    for temperature in (0.0, 0.8):
        params = sampling(temperature)
        expected = [plain_ids(target, prompt, params) for prompt in PROMPTS]
        for tree in (deep, SMALL_TREE):
            assert answers(Engine(target, drafter, tree=tree), PROMPTS, params) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_slots_that_are_full_to_the_last_column(pairs, name):
    """A request whose text and tree fill its slot exactly: no draft row lies beyond it. At the last token nothing is
    left to draft."""
    target, other = pairs("llama")
    room = max(FULL_BINARY.max_nodes, FULL_BINARY.max_depth * FULL_BINARY.beam + 1)
    params = sampling(max_tokens=24)
    prompt = list(range(3, 3 + 64 - room - params.max_tokens))
    engine = Engine(target, MAKERS[name](target, other), tree=FULL_BINARY, max_length=len(prompt) + params.max_tokens)
    assert answers(engine, [prompt, prompt[::2]], params) == [
        plain_ids(target, prompt, params),
        plain_ids(target, prompt[::2], params),
    ]
    assert engine._cache.num_columns == 64


@pytest.mark.parametrize("name", ["itself", "one layer", "int8"])
def test_no_position_beyond_the_last_learned_one(tiny_model, name):
    """A prompt and its answer that take all of a model's learned positions: drafts stay within them."""
    target = TargetModel.wrap(tiny_model("gpt2", n_positions=48))
    prompt, params = PROMPTS[2][:30], sampling(max_tokens=18)
    engine = Engine(target, MAKERS[name](target, target), tree=FULL_BINARY)
    assert answers(engine, [prompt], params) == [plain_ids(target, prompt, params)]


@pytest.mark.parametrize("name", ["another model", "two layers, few tokens", "int8", "early exit"])
def test_bitwise_mode_stays_bitwise(tiny_model, name):
    """In bfloat16 with forwards of fixed shape: the rows that a draft leaves in the target's cache are written anew or
    never seen, so tokens equal those of plain decoding in the same mode."""
    target, other = (TargetModel.wrap(tiny_model("llama", seed=seed).to(torch.bfloat16)) for seed in (0, 7))
    drafter = MAKERS[name](target, other)
    for temperature in (0.0, 0.8):
        params = [sampling(temperature, seed=seed) for seed in range(len(PROMPTS))]
        expected = answers(Engine(target, exactness="bitwise"), PROMPTS, params)
        engine = Engine(target, drafter, exactness="bitwise", tree=SMALL_TREE)
        assert answers(engine, PROMPTS, params) == expected


@pytest.mark.parametrize("name", ["two layers, few tokens", "early exit", "another model, few tokens"])
def test_rejection_rules_follow_the_target(tiny_model, name):
    """The joint of the two tokens after the prefill's equals the target's; half of the tokens cannot be drafted."""
    target = small_target(tiny_model)
    other = small_target(tiny_model, seed=7)
    drafter = {
        "two layers, few tokens": lambda: ModelDrafter.first_layers(2, target, vocab=4),
        "early exit": lambda: ModelDrafter.early_exit(random_exit_head(target, draft_vocab_size=4), target),
        "another model, few tokens": lambda: ModelDrafter.of_model(other, target, vocab=4),
    }[name]()
    tree = TreeSettings(max_nodes=6, max_depth=2, branch=2, beam=2, adaptive=False)
    completions, chance = chance_of_answers(Engine(target, drafter, rule="recursive", tree=tree, max_requests=250))
    assert chance > FALSE_ALARM
    assert {length for one in completions for length in one.accepted_lengths[1:]} == {1, 2, 3}


# What is always right, and what is read


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("tree", [TreeSettings.chain(3), FULL_BINARY])
@pytest.mark.parametrize("make", ["model", "layers"])
def test_the_target_as_its_own_draft_is_always_right(pairs, kind, tree, make):
    """With a cache of its own and on the target's: every round but the last takes all that the tree's depth allows, in
    both ways of choosing tokens, since drafts see the target's noise. In float32, where neither rounds differently."""
    target, _ = pairs(kind)
    if make == "model":
        drafter = ModelDrafter.of_model(target, target)
    else:
        drafter = ModelDrafter.first_layers(target.num_layers, target)
    for temperature in (0.0, 0.8):
        params = sampling(temperature, max_tokens=30)
        completions = Engine(target, drafter, tree=tree).generate(PROMPTS, params)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert completion.token_ids == plain_ids(target, prompt, params)
            assert set(completion.accepted_lengths[1:-1]) == {4}


def fresh_logits(drafter: ModelDrafter, target: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Draft logits after `text`, of which nothing is cached: read by the draft model itself or, where it shares the
    target's cache, by the target up to the last token."""
    stepper = drafter.stepper
    if not stepper.shares_cache:
        cache = stepper.model.new_cache(num_slots=1, num_columns=len(text))
        return stepper._logits([RowGroup(slot=0, prefix=0, tokens=text)], cache)[-1]
    cache = target.new_cache(num_slots=1, num_columns=len(text))
    target.forward([RowGroup(slot=0, prefix=0, tokens=text[:-1])], cache)
    return stepper._logits([RowGroup(slot=0, prefix=len(text) - 1, tokens=text[-1:])], cache)[0]


def assert_cache_is_fresh(engine: Engine, request: Request) -> None:
    """The target's rows of a request's committed text are those of a prefill of it."""
    target, length = engine.target, request.num_cached
    fresh = target.new_cache(num_slots=1, num_columns=length)
    target.forward([RowGroup(slot=0, prefix=0, tokens=request.tokens_from(0)[:length])], fresh)
    for layer in range(target.num_layers):
        found = engine._cache.read(layer, request.slot, request.slot, length)
        for rows, expected in zip(found, fresh.read(layer, 0, 0, length), strict=True):
            torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", [*MAKERS, "int8 by reference"])
def test_what_was_read_equals_a_fresh_prefill_after_every_round(pairs, kind, name):
    """The draft's next logits, and the target's own cached rows where a draft wrote between them (pitfall: acceptance
    fell by a tenth because the draft's cache kept its own approximations). With a preemption in the middle. The kernels
    of rounded weights read bfloat16, whose rounding turns differences of 1e-7 into 1e-2: their logits are compared by
    the reference alone."""
    target, other = pairs(kind)
    by_kernel = name.startswith("int") and name != "int8 by reference"
    make = MAKERS.get(name, lambda target, other: ModelDrafter.rounded(8, target, kernels=False))
    drafter = make(target, other)
    engine = Engine(target, drafter, tree=FULL_BINARY)
    requests = engine.submit(PROMPTS, [sampling(0.8 * (seed % 2), seed=seed) for seed in range(len(PROMPTS))])
    for step in range(50):
        if step == 3:
            engine.preempt([requests[1]])
        engine.step()
        for request in requests:
            if request.finish_reason is not None:
                continue
            assert_cache_is_fresh(engine, request)
            if step % len(requests) == requests.index(request) and not by_kernel:
                memory = dict(vars(drafter.stepper.memory(request)))
                found = drafter.stepper.next_logits(request)
                vars(drafter.stepper.memory(request)).update(memory)  # reading is repeatable
                expected = fresh_logits(drafter, target, request.tokens_from(0))
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", ["another model, few tokens", "one layer", "early exit", "two layers, few tokens"])
def test_nodes_are_drafted_on_their_own_path(pairs, kind, name):
    """A node's children are the likeliest tokens after the path to it, read anew as a text of its own. Where the cache
    is the target's, the path's rows are the draft's, so the text before the tree is read by the target's layers and the
    path by the draft, one token at a time. The tree is deeper than Gemma's window."""
    target, other = pairs(kind)
    drafter = MAKERS[name](target, other)
    tree = TreeSettings(max_nodes=60, max_depth=10, branch=3, beam=2, adaptive=False)
    engine = Engine(target, drafter, tree=tree)
    (request,) = engine.submit([PROMPTS[1]], sampling(max_tokens=20))
    engine._advance(engine._admit(), [DraftTree.empty()])
    (drafted,) = drafter.propose([request], [engine._limit(request)])
    assert max(drafted.depths) == 10
    text = request.tokens_from(0)
    stepper = drafter.stepper

    def children(path: Sequence[int]) -> list[int]:
        if not stepper.shares_cache:
            logits = fresh_logits(drafter, target, [*text, *path])
        else:
            cache = target.new_cache(num_slots=1, num_columns=64)
            target.forward([RowGroup(slot=0, prefix=0, tokens=text[:-1])], cache)
            for column, token in enumerate([text[-1], *path], start=len(text) - 1):
                logits = stepper._logits([RowGroup(slot=0, prefix=column, tokens=[token])], cache)[0]
        return stepper.target_ids[logits.topk(3).indices].tolist()

    expanded = [node for node in range(-1, len(drafted)) if drafted.children(node)]
    assert len(expanded) == 1 + 9 * 2
    for node in expanded:
        path = [drafted.tokens[each] for each in drafted.path(node)]
        assert [drafted.tokens[child] for child in drafted.children(node)] == children(path)


def test_long_and_short_texts_are_read_apart_and_answered_in_order(pairs):
    """A prompt of more than 64 tokens among short ones is read in a forward of its own; each request gets the logits of
    its own text, and a batch of one kind alone is no special case."""
    target, other = pairs("llama")
    drafter = ModelDrafter.of_model(other, target)
    long, longer = [3 * i % 128 for i in range(70)], [5 * i % 128 for i in range(150)]
    forwards: list[int] = []
    original = drafter.stepper.forward
    drafter.stepper.forward = lambda groups, rows=None: forwards.append(len(groups)) or original(groups, rows)
    for prompts, expected in (([long, [5], longer, [7, 8]], [1, 1, 2]), ([longer, long], [1, 1]), ([[5], [6]], [2])):
        engine = Engine(target, drafter, tree=SMALL_TREE)
        requests = engine.submit(prompts, sampling())
        engine._advance(engine._admit(), [DraftTree.empty()] * len(prompts))
        forwards.clear()
        logits = drafter.stepper.read(requests)
        assert forwards == expected
        for row, request in zip(logits, requests, strict=True):
            torch.testing.assert_close(
                row, fresh_logits(drafter, target, request.tokens_from(0)), atol=TOLERANCE, rtol=TOLERANCE
            )


def test_a_draft_model_of_shorter_context_reads_the_texts_end(tiny_model, target):
    """When the text outgrows it, it reads the later half again as a text of its own; tokens stay plain's, and drafts
    stay within its positions (which are learned: one beyond them raises). A context too short to draft in is
    refused."""
    short = TargetModel.wrap(tiny_model("gpt2", seed=7, n_positions=24))
    drafter = ModelDrafter.of_model(short, target)
    for temperature in (0.0, 0.8):
        params = sampling(temperature, max_tokens=40)
        expected = [plain_ids(target, prompt, params) for prompt in PROMPTS]
        assert answers(Engine(target, drafter, tree=FULL_BINARY), PROMPTS, params) == expected
    engine = Engine(target, drafter, tree=FULL_BINARY)
    (request,) = engine.submit([PROMPTS[1]], sampling(max_tokens=40))
    starts = set()
    while request.finish_reason is None:
        engine.step()
        if request.finish_reason is None:
            memory = drafter.stepper.memory(request)
            num_unread = request.num_tokens - memory.start - memory.num_rows
            if num_unread and request.num_tokens - memory.start <= 21:
                kept = dict(vars(memory))
                found = drafter.stepper.next_logits(request)
                vars(memory).update(kept)
                text = request.tokens_from(memory.start)
                torch.testing.assert_close(found, fresh_logits(drafter, target, text), atol=TOLERANCE, rtol=TOLERANCE)
            starts.add(memory.start)
    assert len(starts) > 2
    with pytest.raises(ValueError, match="reads at most 24 tokens, which is too few to draft 13 deep"):
        Engine(target, drafter, tree=TreeSettings.chain(13)).generate([PROMPTS[0]], sampling())


# The draft vocabulary and the tokenizer


def with_tokenizer(tiny_model: Callable[..., Any], tokenizer: Any, *, padding: int = 0, seed: int = 0) -> TargetModel:
    """A model for a toy tokenizer, with `padding` rows of its LM head and embeddings that stand for no token."""
    model = tiny_model("llama", seed=seed, vocab_size=len(tokenizer) + padding)
    return TargetModel.wrap(model, tokenizer, name=f"model {seed}")


@pytest.mark.parametrize(("target_padding", "draft_padding"), [(0, 0), (0, 12), (12, 0), (12, 4), (3, 40)])
def test_rows_that_pad_an_lm_head_are_no_tokens(tiny_model, target_padding, draft_padding):
    """The same tokenizer under LM heads of unlike sizes: only ids of both are drafted, and the target's own padding
    ids, which a random target does emit, are read as some other token by a draft model that has no embedding for them.
    """
    tokenizer = toy_tokenizer()
    target = with_tokenizer(tiny_model, tokenizer, padding=target_padding)
    other = with_tokenizer(tiny_model, toy_tokenizer(), padding=draft_padding, seed=7)
    drafter = ModelDrafter.of_model(other, target)
    limit = target.vocab_size if target_padding == draft_padding else len(tokenizer)
    assert drafter.stepper.target_ids.tolist() == list(range(limit))
    params = sampling(1.0, max_tokens=60)
    prompts = [*PROMPTS, [5, target.vocab_size - 1, 6]]
    expected = [plain_ids(target, prompt, params) for prompt in prompts]
    assert answers(Engine(target, drafter, tree=SMALL_TREE), prompts, params) == expected
    if target_padding == 12:
        assert any(token >= len(tokenizer) for ids in expected for token in ids)


def test_tokenizers_that_differ_are_refused_by_their_first_difference(tiny_model):
    """Another token at an id, a token too few or too many, other special tokens; and without a tokenizer, sizes."""
    target = with_tokenizer(tiny_model, toy_tokenizer(merges=("a b", "c d")))

    def refusal(tokenizer: Any, **changes: Any) -> str:
        with pytest.raises(ValueError, match="cannot draft for model 0, whose tokenizer is another") as caught:
            ModelDrafter.of_model(with_tokenizer(tiny_model, tokenizer, seed=1, **changes), target)
        return str(caught.value)

    assert "token 260 is 'cd' to the draft model and 'ab' to the target" in refusal(
        toy_tokenizer(merges=("c d", "a b"))
    )
    assert "token 261 is nothing to the draft model and 'cd' to the target" in refusal(toy_tokenizer(merges=("a b",)))
    longer = toy_tokenizer(merges=("a b", "c d", "e f"))
    assert "token 262 is 'ef' to the draft model and nothing to the target" in refusal(longer)
    other_end = toy_tokenizer(merges=("a b", "c d"))
    other_end.eos_token = "<|im_end|>"
    assert "eos_token_id is 3 to the draft model and 1 to the target" in refusal(other_end)
    same = with_tokenizer(tiny_model, toy_tokenizer(merges=("a b", "c d")), padding=30)
    check_tokenizers(same, target)
    bare = TargetModel.wrap(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"128 tokens and the target 262 \(one has no tokenizer to compare\)"):
        ModelDrafter.of_model(bare, target)


def test_which_tokens_are_drafted(tiny_model, tmp_path: Path):
    """Special and byte tokens always, then the most frequent of a text, then the lowest ids; without a tokenizer, the
    end of text and the lowest ids. The drafter proposes these and no others."""
    tokenizer = toy_tokenizer(merges=("a b", "c d", "e f", "g h", "i j"))
    target = with_tokenizer(tiny_model, tokenizer)
    kept = always_kept_ids(tokenizer, target.eos_ids)
    assert len(kept) == 260
    lowest = draft_vocabulary(target, 262).target_ids.tolist()
    assert lowest == [*range(260), 260, 261]
    text = tmp_path / "text.txt"
    text.write_text("ghgh ij ghij ef")
    assert draft_vocabulary(target, 262, text=text).target_ids.tolist() == [*range(260), 263, 264]
    assert draft_vocabulary(target, None).target_ids.tolist() == list(range(265))
    assert len(draft_vocabulary(target, 265)) == 265
    bare = TargetModel.wrap(tiny_model("llama", eos_token_id=99))
    assert draft_vocabulary(bare, 5).target_ids.tolist() == [0, 1, 2, 3, 99]
    for drafter in (ModelDrafter.first_layers(1, bare, vocab=5), ModelDrafter.of_model(bare, bare, vocab=5)):
        assert drafter.stepper.target_ids.tolist() == [0, 1, 2, 3, 99]
        drafted: set[int] = set()

        def watch(request: Request, tree: DraftTree, *_: object, drafted: set[int] = drafted) -> None:
            drafted.update(tree.tokens)

        Engine(bare, drafter, tree=SMALL_TREE, observer=watch).generate(PROMPTS, sampling(max_tokens=8))
        assert drafted == {0, 1, 2, 3, 99}
    for size in (0, 266):
        with pytest.raises(ValueError, match=f"vocab={size}: give a number of draft tokens from 1 to 265"):
            draft_vocabulary(target, size)
    with pytest.raises(ValueError, match="260 tokens are always kept"):
        draft_vocabulary(target, 100)
    with pytest.raises(ValueError, match="only together with a vocabulary size"):
        draft_vocabulary(target, None, text=text)
    with pytest.raises(ValueError, match="only together with a tokenizer"):
        draft_vocabulary(bare, 5, text=text)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox"])
def test_few_tokens_have_the_logits_they_have_among_all(pairs, kind):
    """A reduced LM head gives the same numbers, whatever the model does with them afterwards (Gemma-2 caps them)."""
    target, other = pairs(kind)
    text = PROMPTS[1]
    for whole, reduced in (
        (ModelDrafter.of_model(other, target), ModelDrafter.of_model(other, target, vocab=40)),
        (ModelDrafter.first_layers(2, target), ModelDrafter.first_layers(2, target, vocab=40)),
        (ModelDrafter.rounded(8, target, kernels=False), ModelDrafter.rounded(8, target, vocab=40, kernels=False)),
    ):
        some, every = fresh_logits(reduced, target, text), fresh_logits(whole, target, text)
        assert len(some) == 40
        torch.testing.assert_close(some, every[reduced.stepper.target_ids], atol=1e-5, rtol=1e-5)
    assert target.vocab_size == len(target.lm_head_weight) == 128


# Views


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2"])
def test_first_layers_are_the_stock_models(pairs, kind):
    """Layer n's hidden state through the final norm and LM head, for every n; the target itself keeps all its layers,
    its weights and its logits, while the view runs as a stock model too."""
    target, _ = pairs(kind)
    cap = getattr(target.config, "final_logit_softcapping", None)
    tokens = PROMPTS[1]
    with target.stock() as model, torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    for num_layers in range(1, target.num_layers + 1):
        view = target.truncated(num_layers)
        assert (view.num_layers, target.num_layers) == (num_layers, 3)
        assert all(one is other for one, other in zip(view.layers, target.layers, strict=False))
        with torch.inference_mode():
            state = output.hidden_states[num_layers][0]
            normed = state if num_layers == target.num_layers else target.final_norm(state)
            expected = normed @ target.lm_head_weight.T
            expected = expected if cap is None else torch.tanh(expected / cap) * cap
        cache = view.new_cache(num_slots=1, num_columns=16)
        assert len(cache.keys) == num_layers
        logits = view.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache).logits
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
        with view.stock() as model, torch.inference_mode():
            stock = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(stock, expected, atol=TOLERANCE, rtol=TOLERANCE)
    cache = target.new_cache(num_slots=1, num_columns=16)
    logits = target.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache).logits
    torch.testing.assert_close(logits, output.logits[0], atol=TOLERANCE, rtol=TOLERANCE)
    assert len({target.truncated(n).fingerprint for n in (1, 2)} | {target.fingerprint}) == 3
    for num_layers in (0, 4):
        with pytest.raises(ValueError, match=f"has layers 1 to 3; its first {num_layers} were asked for"):
            target.truncated(num_layers)


# Beside others


def test_all_of_them_share_a_hybrid(pairs):
    """Each remembers a request under a name of its own, and those that share the target's cache write over each other's
    rows without harm."""
    target, other = pairs("llama")
    drafters = [make(target, other) for make in MAKERS.values()]
    names = [drafter.name for drafter in drafters]
    assert names == ["model:model", "model:model", "model:model", "layers:1", "layers:2", "int8", "int4", "early_exit"]
    hybrid = HybridDrafter([*drafters[2:], NgramDrafter()])
    for temperature in (0.0, 0.8):
        params = sampling(temperature)
        expected = [plain_ids(target, prompt, params) for prompt in PROMPTS]
        assert answers(Engine(target, hybrid, tree=SMALL_TREE), PROMPTS, params) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_costs_are_measured_only_where_trees_adapt(pairs, name):
    """And measuring leaves the target's cache alone."""
    target, other = pairs("llama")
    drafter = MAKERS[name](target, other)
    cache = target.new_cache(num_slots=1, num_columns=128)
    for adaptive in (False, True):
        tree = TreeSettings(adaptive=adaptive)
        drafter.open(Room(num_slots=1, num_columns=128, tree=tree, cost=COST, cache=cache))
        assert (drafter.stepper.step_milliseconds > 0) == (drafter.stepper.begin_milliseconds > 0) == adaptive
    assert not cache.keys.any()
    assert (drafter.stepper._cache is cache) == (name in SHARING)


def test_a_draft_model_from_a_folder(tmp_path: Path):
    """In the target's precision; a folder that is not there is refused as a target's is."""
    folders = write_folders(tmp_path, [("chat", "hello")])
    for dtype in ("float32", "bfloat16"):
        target = TargetModel.load(folders.target, dtype=dtype)
        drafter = ModelDrafter.load(folders.other, target)
        assert drafter.stepper.model.dtype == target.dtype
        assert drafter.name == "model:other"
    target = TargetModel.load(folders.target, dtype="float32")
    drafter = ModelDrafter.load(folders.other, target, vocab=260, name="draft")
    assert (drafter.name, len(drafter.stepper.target_ids)) == ("draft", 260)
    with pytest.raises(ValueError, match="vocab=270: give a number of draft tokens from 1 to 260"):
        ModelDrafter.load(folders.other, target, vocab=270)
    with pytest.raises(ValueError, match="there is no target folder"):
        ModelDrafter.load(tmp_path / "nothing", target)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_on_a_real_model(smollm2_path: Path, temperature):
    """SmolLM2 in float32, drafting for itself in every way: plain's tokens; the model itself as a draft is always
    right, and rounded to 8 bits nearly always."""
    target = TargetModel.load(smollm2_path, dtype="float32")
    texts = ["Name three colours of the rainbow.", "What is the capital of France?", "Write a line about the sea."]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    params = sampling(temperature, max_tokens=24)
    expected = answers(Engine(target), prompts, params)
    lengths: dict[str, float] = {}
    for name, drafter in {
        "itself": ModelDrafter.of_model(target, target),
        "int8": ModelDrafter.rounded(8, target, vocab=8192),
        "int4": ModelDrafter.rounded(4, target),
        "layers": ModelDrafter.first_layers(10, target, vocab=8192),
    }.items():
        for tree in (TreeSettings.chain(3), SMALL_TREE):
            completions = Engine(target, drafter, tree=tree).generate(prompts, params)
            assert [completion.token_ids for completion in completions] == expected
            rounds = [length for completion in completions for length in completion.accepted_lengths[1:-1]]
            lengths[name] = sum(rounds) / len(rounds)
    assert lengths["itself"] == 4
    assert lengths["int8"] > 3
    assert lengths["int4"] > 2
