"""What holds for a head of any family: it never changes a token, and what it drafts depends on the text alone.

The heads are random, and the target has 48 tokens, so that some of what they draft is accepted and much is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import HeadCard, load_head, save_head
from heads.registry import FAMILIES, family_of_head
from infer.cost import CostModel
from infer.divergence import FirstDifference
from infer.drafters import (
    HybridDrafter,
    NgramDrafter,
    RecordingDrafter,
    TreeGrower,
    TreeSettings,
    load_drafter,
    reading,
)
from infer.drafters.spec import head_drafter
from infer.drafters.stepper import Frontier
from infer.engine import Engine
from infer.request import Completion, Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.verify import RULES
from tests.head_families import VARIANTS, marked, tiny_head

VOCAB_SIZE = 48
PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(4, 40)), [4]]
CHAIN = TreeSettings.chain(4)
TREE = TreeSettings(max_nodes=24, max_depth=4, branch=12, beam=4, adaptive=False)
SIZES = [None, 24]
"""Draft vocabularies: full, and half of it."""

every_head = pytest.mark.parametrize("variant", marked(VARIANTS))
every_size = pytest.mark.parametrize("size", SIZES, ids=["full", "reduced"])


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama", vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def bfloat16_target(tiny_model: Callable[..., Any]) -> TargetModel:
    """With heads that fill a cache line, as those of real models do."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    return TargetModel.wrap(model.to(torch.bfloat16))


def params_of(*temperatures: float, max_tokens: int = 30, **changes: Any) -> list[SamplingParams]:
    """One for each prompt, in turn, with seeds of their own."""
    return [
        SamplingParams(
            temperature=temperatures[index % len(temperatures)],
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
            **changes,
        )
        for index in range(len(PROMPTS))
    ]


def mixed_params() -> list[SamplingParams]:
    """Greedy, sampled, filtered and penalised requests of different lengths, side by side."""
    first, second, third, fourth = params_of(0.0, 0.8, 0.8, 0.0)
    return [
        replace(first, max_tokens=21),
        second,
        replace(third, top_k=12, top_p=0.9),
        replace(fourth, repetition_penalty=1.3, max_tokens=26),
    ]


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def lengths_of(completions: Sequence[Completion]) -> set[int]:
    return {length for completion in completions for length in completion.accepted_lengths[1:]}


def plain(target: TargetModel, params: Sequence[SamplingParams], **settings: Any) -> list[Completion]:
    """Each prompt's answer, decoded alone and without drafts."""
    engines = [Engine(target, max_requests=1, **settings) for _ in PROMPTS]
    return [engine.generate([prompt], one)[0] for engine, prompt, one in zip(engines, PROMPTS, params, strict=True)]


@every_size
@every_head
def test_tokens_are_plain_decodings(target: TargetModel, variant: str, size: int | None) -> None:
    """float32, so token for token: greedy and sampled, on chains and trees, alone and in a batch of mixed requests."""
    expected = {temperature: plain(target, params_of(temperature)) for temperature in (0.0, 0.8)}
    mixed = plain(target, mixed_params())
    head = tiny_head(variant, target, draft_vocab_size=size)
    lengths: set[int] = set()
    for tree in (CHAIN, TREE):
        for max_requests in (1, 4):
            engine = Engine(target, head_drafter(head, target), tree=tree, max_requests=max_requests)
            for temperature, answers in expected.items():
                drafted = engine.generate(PROMPTS, params_of(temperature))
                assert tokens_of(drafted) == tokens_of(answers)
                lengths |= lengths_of(drafted)
            assert tokens_of(engine.generate(PROMPTS, mixed_params())) == tokens_of(mixed)
    assert max(lengths) >= 2, "nothing was accepted, so nothing was shown"


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
@every_head
def test_every_rule_keeps_greedy_answers(target: TargetModel, variant: str, rule: str) -> None:
    """At temperature 0 nothing is left to chance, whatever a rule does above it; and above it the rule takes what the
    head proposes, beside a greedy neighbour."""
    greedy = params_of(0.0)
    tree = CHAIN if RULES[rule].needs_chain else TREE
    engine = Engine(target, head_drafter(tiny_head(variant, target), target), rule=rule, tree=tree)
    params = [greedy[0], replace(greedy[1], temperature=0.9), greedy[2], replace(greedy[3], temperature=0.7)]
    answers = tokens_of(engine.generate(PROMPTS, params))
    expected = tokens_of(plain(target, greedy))
    assert (answers[0], answers[2]) == (expected[0], expected[2])
    assert all(len(answer) == 30 for answer in answers)
    assert tokens_of(engine.generate(PROMPTS, params)) == answers  # its draws depend on seeds alone


@every_size
@every_head
def test_a_loaded_head_drafts_as_the_saved_one(
    target: TargetModel, variant: str, size: int | None, tmp_path: Path
) -> None:
    """The same tokens in rounds of the same lengths, and the same config; a family is told from the files alone."""
    head = tiny_head(variant, target, draft_vocab_size=size)
    name, _ = VARIANTS[variant]
    save_head(tmp_path / "head", head, HeadCard(target=target.reference, family=name))
    loaded, card = load_head(tmp_path / "head", target.weights)
    assert (family_of_head(loaded), card.family) == (name, name)
    assert loaded.config == head.config
    assert loaded.vocabulary.target_ids.tolist() == head.vocabulary.target_ids.tolist()
    drafter = load_drafter(tmp_path / "head", target, hybrid=False)
    for tree in (CHAIN, TREE):
        before = Engine(target, head_drafter(head, target), tree=tree).generate(PROMPTS, mixed_params())
        after = Engine(target, drafter, tree=tree).generate(PROMPTS, mixed_params())
        assert [(one.token_ids, one.accepted_lengths) for one in after] == [
            (one.token_ids, one.accepted_lengths) for one in before
        ]


@dataclass
class Drafted:
    """What a head said in one round of one request: its frontier's tokens and logits, depth by depth."""

    request: Request
    text: list[int]
    num_tokens_left: int
    tokens: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def recorded(drafter: TreeGrower, monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Fills up with what the drafter's stepper says in the decode loop."""
    seen: list[Drafted] = []
    begin = drafter.stepper.begin

    def record(requests: Sequence[Request], depths: Sequence[int]) -> Any:
        draft_round = begin(requests, depths)
        logits = draft_round.logits
        rounds = [
            Drafted(
                request=request,
                text=[*request.prompt_ids, *request.output_ids],
                num_tokens_left=request.num_tokens_left,
            )
            for request in requests
        ]
        seen.extend(rounds)

        def spy(frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
            rows = logits(frontiers, depth)
            parts = rows.split([len(frontier.nodes) for frontier in frontiers])
            for frontier, part in zip(frontiers, parts, strict=True):
                rounds[frontier.index].tokens.append(list(frontier.tokens))
                rounds[frontier.index].logits.append(part.clone())
            return rows

        monkeypatch.setattr(draft_round, "logits", spy)
        return draft_round

    monkeypatch.setattr(drafter.stepper, "begin", record)
    return seen


def assert_fresh_drafts_agree(
    target: TargetModel, drafted: Drafted, drafter: TreeGrower, tree: TreeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that never saw this request says the same after a prefill of the text, at every node it is asked."""
    params = replace(drafted.request.params, max_tokens=drafted.num_tokens_left + 1)
    with monkeypatch.context() as patch:
        seen = recorded(drafter, patch)
        engine = Engine(target, drafter, tree=tree, cost=CostModel.free())
        (request,) = engine.submit([drafted.text[:-1]], params)
        while not seen and request.finish_reason is None:
            engine.step()
        engine.abort()
    (fresh,) = seen
    assert fresh.text == drafted.text, "the prefill emits the token that the other text ends with"
    assert fresh.tokens == drafted.tokens
    for one, other in zip(drafted.logits, fresh.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preempted", [False, True], ids=["", "preempted"])
@every_head
def test_what_is_drafted_depends_on_the_text_alone(
    target: TargetModel, variant: str, preempted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of rounds, in a batch, the draft logits at every depth equal those of a fresh drafter after a
    prefill of the same text (to float32 rounding): nothing of rejected drafts, of the head's own approximations, of
    neighbours or of a lost slot is left. A public engine lost 8 to 15 % of its acceptance that way."""
    head = tiny_head(variant, target, draft_vocab_size=24)
    drafter = head_drafter(head, target)
    params = params_of(0.0, 0.8)
    with monkeypatch.context() as patch:
        seen = recorded(drafter, patch)
        engine = Engine(target, drafter, tree=TREE, cost=CostModel.free())
        requests = engine.submit(PROMPTS, params)
        num_steps = 0
        while any(request.finish_reason is None for request in requests):
            engine.step()
            num_steps += 1
            if preempted and num_steps in (4, 9):
                engine.preempt(requests[:3])
    completions = [request.completion() for request in requests]
    assert tokens_of(completions) == tokens_of(plain(target, params))
    assert lengths_of(completions) >= {1, 2}
    fresh_drafter = head_drafter(head, target)
    checked = [drafted for drafted in seen if drafted.logits][::5]
    assert len(checked) >= 12
    assert {drafted.request for drafted in checked} == set(requests)
    for drafted in checked:
        assert_fresh_drafts_agree(target, drafted, fresh_drafter, TREE, monkeypatch)


@every_head
def test_drafts_are_as_deep_as_asked_and_as_the_head_can(target: TargetModel, variant: str) -> None:
    """A chain longer than the head has depths ends there; a shorter one, or one that the answer's end cuts, earlier."""
    head = tiny_head(variant, target)
    bound = head.num_depths
    for depth in (1, 2, 7):
        drafter = head_drafter(head, target)
        depths: list[int] = []
        propose = drafter.propose

        def spy(requests: Any, limits: Any, propose: Any = propose, depths: list[int] = depths) -> Any:
            trees = propose(requests, limits)
            for tree, limit in zip(trees, limits, strict=True):
                deepest = max(tree.depths, default=0)
                assert deepest <= limit.max_depth
                depths.append(deepest)
            return trees

        drafter.propose = spy  # type: ignore[method-assign]
        engine = Engine(target, drafter, tree=TreeSettings.chain(depth))
        engine.generate(PROMPTS, params_of(0.0, 0.8))
        assert max(depths) == min(depth, bound or depth)


@every_head
def test_a_long_prompt_at_once(target: TargetModel, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More states than may wait come with one forward: all but the last are read, behind which the draft begins.
    (Once all were, and the first draft after such a prompt failed.)"""
    params = params_of(0.0)
    results = []
    for most_pending in (512, 4):
        monkeypatch.setattr(reading, "_MOST_PENDING", most_pending)
        answers = Engine(target, head_drafter(tiny_head(variant, target), target), tree=TREE).generate(PROMPTS, params)
        results.append([(answer.token_ids, answer.accepted_lengths) for answer in answers])
    assert results[0] == results[1]


@every_size
@every_head
def test_only_the_draft_vocabulary_is_drafted(target: TargetModel, variant: str, size: int | None) -> None:
    """Proposed ids are the target's, from among those that the head has, and the whole of them in time."""
    head = tiny_head(variant, target, draft_vocab_size=size)
    drafter = head_drafter(head, target)
    proposed: set[int] = set()
    propose = drafter.propose

    def spy(requests: Any, limits: Any) -> Any:
        trees = propose(requests, limits)
        proposed.update(token for tree in trees for token in tree.tokens)
        return trees

    drafter.propose = spy  # type: ignore[method-assign]
    Engine(target, drafter, tree=TREE).generate(PROMPTS, params_of(0.0, 1.0))
    assert proposed <= set(head.target_ids.tolist())
    assert len(proposed) > 0.8 * len(head.vocabulary)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@every_head
def test_bitwise_answers_in_bfloat16(bfloat16_target: TargetModel, variant: str, temperature: float) -> None:
    """A bfloat16 head on a bfloat16 target, in forwards of fixed shape: plain decoding's tokens to the last, where any
    trace of a draft in the target's cache would show."""
    target, params = bfloat16_target, params_of(temperature)
    expected = tokens_of(plain(target, params, exactness="bitwise"))
    head = tiny_head(variant, target)
    assert head.dtype == torch.bfloat16
    lengths: set[int] = set()
    for max_requests in (1, 4):
        engine = Engine(target, head_drafter(head, target), exactness="bitwise", tree=TREE, max_requests=max_requests)
        drafted = engine.generate(PROMPTS, params)
        assert tokens_of(drafted) == expected
        lengths |= lengths_of(drafted)
    assert max(lengths) >= 2


@every_head
def test_bfloat16_answers_differ_at_near_ties_alone(bfloat16_target: TargetModel, variant: str, tmp_path: Path) -> None:
    """Through a file, in ordinary forwards: an answer leaves plain decoding's only where rounding decides."""
    target, params = bfloat16_target, params_of(0.0, 0.8)
    head = tiny_head(variant, target, draft_vocab_size=24)
    name, _ = VARIANTS[variant]
    save_head(tmp_path / "head", head, HeadCard(target=target.reference, family=name), dtype=torch.bfloat16)
    drafter = load_drafter(tmp_path / "head", target, hybrid=False)
    drafted = Engine(target, drafter, tree=TREE).generate(PROMPTS, params)
    for prompt, one, got, expected in zip(PROMPTS, params, drafted, plain(target, params), strict=True):
        if got.token_ids != expected.token_ids:
            first = FirstDifference.find(target, prompt, one, expected=expected.token_ids, got=got.token_ids)
            assert first.is_tie(target.dtype)


@every_head
def test_beside_the_lookup_and_another_head(target: TargetModel, variant: str) -> None:
    """Candidates of several drafters in one tree, one of them a head of another family that reads other states: plain
    decoding's tokens, and each drafter's own taps."""
    expected = tokens_of(plain(target, mixed_params()))
    name, _ = VARIANTS[variant]
    other = next(family for family in FAMILIES if family != name)
    head = tiny_head(variant, target)
    neighbour = head_drafter(tiny_head(other, target, seed=1, draft_vocab_size=24), target, name="neighbour")
    for drafters in ([NgramDrafter()], [neighbour, NgramDrafter()]):
        hybrid = HybridDrafter([head_drafter(head, target), *drafters])
        for max_requests in (1, 4):
            engine = Engine(target, hybrid, tree=TREE, max_requests=max_requests)
            assert tokens_of(engine.generate(PROMPTS, mixed_params())) == expected


@every_head
def test_a_head_says_what_it_drew_from(target: TargetModel, variant: str) -> None:
    """So that its acceptance can be held against the bound."""
    assert isinstance(head_drafter(tiny_head(variant, target), target), RecordingDrafter)
