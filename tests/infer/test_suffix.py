"""Lookup by suffixes: the automaton and the corpus count what is there, trees are what a plain search of the text would
make, tokens never change, and no request sees another's text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infer.cost import CostModel
from infer.drafters import DraftLimit, Room, TreeSettings, load_drafter
from infer.drafters import suffix as module
from infer.drafters.suffix import Corpus, SuffixAutomaton, SuffixDrafter
from infer.engine import Engine
from infer.request import Request
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from tests.infer.helpers import plain_ids, sampling

TREE = TreeSettings(max_nodes=20, max_depth=5, branch=3, beam=4, adaptive=False)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
LOOPS = st.builds(
    lambda unit, times: unit * times, st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(2, 9)
)


@dataclass
class Text:
    """What the drafter reads of a request."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    draft_state: dict[str, Any] = field(default_factory=dict)

    def tokens_from(self, position: int) -> list[int]:
        return [*self.prompt_ids, *self.output_ids][position:]


def drafter_of(tree: TreeSettings = TREE, *, corpus: Sequence[Sequence[int]] = ()) -> SuffixDrafter:
    drafter = SuffixDrafter(corpus=corpus)
    drafter.open(Room(num_slots=1, num_columns=4096, tree=tree, cost=CostModel.free()))
    return drafter


def propose(drafter: SuffixDrafter, text: Text, limit: DraftLimit | None = None) -> DraftTree:
    limit = limit or DraftLimit(max_nodes=TREE.max_nodes, max_depth=TREE.max_depth)
    request = cast(Request, text)
    drafter.observe(request, None)
    (tree,) = drafter.propose([request], [limit])
    return tree


def followers(texts: Sequence[Sequence[int]], string: Sequence[int]) -> Counter[int]:
    """The tokens that stand behind each occurrence of `string`, by looking at every place."""
    size = len(string)
    return Counter(
        text[start + size]
        for text in texts
        for start in range(len(text) - size)
        if list(text[start : start + size]) == list(string)
    )


class Reference:
    """The drafter's estimates, from nothing but `followers`."""

    def __init__(self, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.corpus = corpus
        self.right: Counter[tuple[Any, ...]] = Counter()
        self.wrong: Counter[tuple[Any, ...]] = Counter()

    def ends(self, text: list[int], path: list[int]) -> Iterator[tuple[int, bool, Counter[int]]]:
        """(length, whether in the text itself, followers) of ends of text and path, longest first.

        Only the corpus's longest end at the text's own end is asked, and then only as long as the path stays on it.
        """
        whole = text + path
        found = [(size, True, followers([text], whole[-size:])) for size in range(len(whole), 0, -1)]
        sizes = range(min(module._CORPUS_MATCH, len(text)), 0, -1)
        longest = next((size for size in sizes if self._in_corpus(text[-size:])), None)
        if longest is not None and self._in_corpus([*text[-longest:], *path]):
            size = longest + len(path)
            found.append((size, False, followers(self.corpus, whole[-size:])))
        yield from sorted(found, key=lambda end: (-end[0], not end[1]))

    def _in_corpus(self, string: list[int]) -> bool:
        places = (sequence[start : start + len(string)] for sequence in self.corpus for start in range(len(sequence)))
        return any(list(place) == string for place in places)

    def orders(self, text: list[int], path: list[int]) -> list[tuple[tuple[Any, ...], dict[int, float]]]:
        found: list[tuple[tuple[Any, ...], dict[int, float]]] = []
        seen: set[int] = set()
        for size, is_own, counts in self.ends(text, path):
            new = {token: count for token, count in counts.items() if token not in seen}
            if new and len(found) < module.MAX_ORDERS:
                total = sum(new.values())
                kind = (not found, module._class_of(size), total == 1, is_own)
                found.append((kind, {token: count / total for token, count in new.items()}))
                seen |= set(new)
        return found

    def learn(self, text: list[int], token: int) -> None:
        for kind, shares in self.orders(text, []):
            if token in shares:
                self.right[kind] += 1
                return
            self.wrong[kind] += 1

    def probabilities(self, text: list[int], path: list[int]) -> dict[int, float]:
        remaining, result = 1.0, {}
        for kind, shares in self.orders(text, path):
            right, wrong, weight = self.right[kind], self.wrong[kind], module._PRIOR_WEIGHT
            confidence = (weight * module._Kind(*kind).prior + right) / (weight + right + wrong)
            result.update({token: remaining * confidence * share for token, share in shares.items()})
            remaining *= 1 - confidence
        return result


def check_tree(tree: DraftTree, reference: Reference, text: list[int], bounds: TreeSettings) -> None:
    """Every node has the reference's probability, and no candidate that is likelier than a node was left out.

    Values are products and sums of the same numbers in another order, which differ by some 1e-16 a level.
    """
    is_full = len(tree) == bounds.max_nodes
    least = min(tree.values) if is_full else module.NEGLIGIBLE
    for node in (ROOT, *range(len(tree))):
        depth, value = (0, 1.0) if node == ROOT else (tree.depths[node], tree.values[node])
        children = {tree.tokens[child]: tree.values[child] for child in tree.children(node)}
        assert len(children) == len(tree.children(node)) <= bounds.branch
        if depth == bounds.max_depth:
            assert not children
            continue
        path = [] if node == ROOT else [tree.tokens[each] for each in tree.path(node)]
        expected = {token: value * share for token, share in reference.probabilities(text, path).items()}
        for token, child in children.items():
            assert child == pytest.approx(expected.pop(token), abs=1e-12)
        left = max(expected.values(), default=0.0)
        bound = min(children.values()) if len(children) == bounds.branch else least
        assert left <= bound + 1e-12, (node, left, bound)


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(TEXTS, LOOPS))
@example(text=[0, 1, 0, 0, 1])
def test_the_automaton_counts_every_substring(text: list[int]) -> None:
    """After every token: each end of the text has the followers and counts that a search finds; linear in size."""
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, start=1):
        automaton.append(token)
        seen = text[:size]
        lengths = [length for _, length in automaton.contexts(automaton.last, size)]
        assert lengths == sorted(lengths, reverse=True)
        for state, length in automaton.contexts(automaton.last, size):
            assert automaton.continuations(state) == followers([seen], seen[-length:])
        longest = next((length for length in range(size, 0, -1) if followers([seen], seen[-length:])), 0)
        assert max(lengths, default=0) == longest
    assert len(automaton.lengths) <= 2 * len(text)
    assert sum(map(len, automaton.transitions)) <= 3 * len(text)


@settings(max_examples=100, deadline=None)
@given(corpus=st.lists(TEXTS, min_size=1, max_size=5), text=TEXTS)
@example(corpus=[[*range(40)]], text=[*range(40)])
def test_the_corpus_finds_the_longest_end(corpus: list[list[int]], text: list[int]) -> None:
    """The longest end of a text that stands in a sequence, its followers, and those of the strings that it makes."""
    index = Corpus(corpus)
    rows = index.find(text)
    longest = min(module._CORPUS_MATCH, len(text))
    known = [length for length in range(longest, 0, -1) if Reference(corpus)._in_corpus(text[-length:])]
    assert (rows.length if rows is not None else 0) == max(known, default=0)
    if rows is None:
        return
    string = text[-rows.length :]
    assert index.continuations(rows) == followers(corpus, string)
    for token in range(4):
        longer = index.narrow(rows, token)
        assert (longer is not None) == Reference(corpus)._in_corpus([*string, token])
        if longer is not None:
            assert index.continuations(longer) == followers(corpus, [*string, token])


@settings(max_examples=80, deadline=None)
@given(
    text=st.one_of(TEXTS, LOOPS),
    prompt=st.integers(1, 40),
    corpus=st.lists(TEXTS, max_size=3),
    tree=st.builds(
        TreeSettings,
        max_nodes=st.integers(1, 20),
        max_depth=st.integers(1, 5),
        branch=st.integers(1, 4),
        beam=st.just(20),
    ),
)
def test_trees_are_those_of_a_plain_search(
    text: list[int], prompt: int, corpus: list[list[int]], tree: TreeSettings
) -> None:
    """At every length of a text, the tree's nodes are the likeliest by the reference, with its probabilities."""
    drafter, reference = drafter_of(tree, corpus=corpus), Reference(corpus)
    request = Text(prompt_ids=tuple(text[:prompt]))
    for end in range(len(request.prompt_ids), len(text) + 1):
        request.output_ids = text[len(request.prompt_ids) : end]
        if request.output_ids:
            reference.learn(text[: end - 1], text[end - 1])
        proposed = propose(drafter, request)
        assert len(proposed) <= tree.max_nodes
        assert max(proposed.depths, default=0) <= tree.max_depth
        check_tree(proposed, reference, text[:end], tree)


def test_a_beam_bounds_the_nodes_that_have_children() -> None:
    for beam in (1, 2, 3):
        tree = TreeSettings(max_nodes=30, max_depth=5, branch=3, beam=beam)
        proposed = propose(
            drafter_of(tree), Text(prompt_ids=(0, 1, 0, 0, 1, 1, 0, 2, 1, 0)), DraftLimit(max_nodes=30, max_depth=5)
        )
        counts = Counter(proposed.depths[node] for node in set(proposed.parents) - {ROOT})
        assert max(counts.values()) == beam


def test_the_tree_stays_within_what_a_request_can_use() -> None:
    text = Text(prompt_ids=tuple([1, 2, 3] * 5))
    for max_nodes, max_depth in ((0, 5), (3, 0), (2, 5), (20, 1)):
        tree = propose(drafter_of(), text, DraftLimit(max_nodes=max_nodes, max_depth=max_depth))
        assert len(tree) <= max_nodes
        assert max(tree.depths, default=0) <= max_depth
        text.draft_state.clear()


def test_a_draft_goes_on_past_the_place_it_was_copied_from() -> None:
    """One repeated token, or a loop shorter than the tree, is drafted to full depth, though the longest match ends with
    the text."""
    for unit in ([7], [7, 8]):
        tree = propose(drafter_of(), Text(prompt_ids=tuple(unit * 8)))
        deepest = tree.path(max(range(len(tree)), key=lambda node: tree.depths[node]))
        assert [tree.tokens[node] for node in deepest] == (unit * 5)[:5]


def test_confidence_follows_the_answer() -> None:
    """A match that came true makes the next of its kind worth more, one that did not, less; a prompt's repeats say
    nothing."""

    def value(output: list[int]) -> float:
        """Of the token that once followed 8, where it now stands again."""
        tree = propose(drafter_of(), Text(prompt_ids=(8, 9, 3, 4, 5, 6), output_ids=[*output, 8]))
        return next(tree.values[node] for node in tree.children(ROOT) if tree.tokens[node] == 9)

    neither = value([20, 21])
    assert value([3, 4]) > neither > value([3, 20])
    repeating = Text(prompt_ids=(3, 4, 5, 3, 4, 5, 8, 9, 8))
    tree = propose(drafter_of(), repeating)
    assert tree.values[tree.children(ROOT)[0]] == pytest.approx(neither)


def test_no_request_sees_another(tiny_model) -> None:
    """A text of tokens that stand in one prompt only never appears in another request's tree, and a request's trees are
    the same alone and beside others; a corpus is seen by all and changed by none."""
    secret, others = [91, 92, 93, 94, 91, 92, 93], [[1, 2, 3, 1, 2, 3, 1], [91, 5, 91, 6, 91]]
    corpus = [[40, 41, 42, 43]]
    drafter = drafter_of(corpus=corpus)
    before = drafter._corpus._tokens.tobytes() + drafter._corpus._order.tobytes()
    texts = [Text(prompt_ids=tuple(prompt)) for prompt in (secret, *others)]
    requests = [cast(Request, text) for text in texts]
    for request in requests:
        drafter.observe(request, None)
    limits = [DraftLimit(max_nodes=20, max_depth=5)] * len(texts)
    trees = drafter.propose(requests, limits)
    assert 92 in trees[0].tokens
    for text, tree in zip(texts[1:], trees[1:], strict=True):
        assert not {92, 93, 94} & set(tree.tokens)
        alone = propose(drafter_of(corpus=corpus), Text(prompt_ids=text.prompt_ids))
        assert (alone.tokens, alone.parents, alone.values) == (tree.tokens, tree.parents, tree.values)
    assert drafter._corpus._tokens.tobytes() + drafter._corpus._order.tobytes() == before
    drafter.close(requests[0])
    assert not texts[0].draft_state


def test_a_corpus_is_drafted_from() -> None:
    """What followed in the corpus is proposed where the request's own text says nothing."""
    text = Text(prompt_ids=(50, 40, 41))
    assert not len(propose(drafter_of(), text))
    text.draft_state.clear()
    tree = propose(drafter_of(corpus=[[39, 40, 41, 42, 43], [40, 41, 44]]), text)
    assert {42, 44} == {tree.tokens[node] for node in tree.children(ROOT)}
    assert 43 in tree.tokens


@pytest.mark.parametrize("corpus", [[[1, -1]], [[[1, 2], [3, 4]]]])
def test_a_bad_corpus_is_refused(corpus: Any) -> None:
    with pytest.raises(ValueError, match="list of lists of token ids"):
        SuffixDrafter(corpus=corpus)


def test_memory_is_linear() -> None:
    """Bytes a token of a text of 8,000 are within a third of those of one of 2,000 (lists grow in steps), random or
    looping; the states and transitions behind them are bounded exactly in the test of the automaton."""

    def bytes_a_token(text: Sequence[int]) -> float:
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        parts = [automaton.lengths, automaton.links, automaton.counts, automaton.transitions, *automaton.transitions]
        return sum(map(sys.getsizeof, parts)) / len(text)

    for text in ([(each * each * 7919) % 1009 % 50 for each in range(8000)], [1, 2, 3] * 2667):
        small, large = bytes_a_token(text[:2000]), bytes_a_token(text[:8000])
        assert large < 1.34 * small


def test_a_preempted_request_finds_its_trees_again() -> None:
    """Reading the text anew gives the history that reading it token by token gave."""
    text = Text(prompt_ids=(1, 2, 3, 1, 2, 5))
    drafter = drafter_of()
    for token in (1, 2, 3, 1, 2, 5, 1):
        text.output_ids.append(token)
        tree = propose(drafter, text)
    text.draft_state.clear()
    again = propose(drafter, text)
    assert (tree.tokens, tree.parents, tree.values) == (again.tokens, again.parents, again.values)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_are_plain_decodings(kind: str, temperature: float, tiny_model) -> None:
    """The same seeds give the same tokens, alone and batched, with and without a corpus; and drafts are accepted, here
    because the answers of a model of 16 tokens repeat themselves."""
    none = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    target = TargetModel.wrap(tiny_model(kind, vocab_size=16, **none))
    prompts = [[5, 7, 3], [9, 9, 8, 7, 9, 9, 8], [*range(16)] * 2, [4]]
    params = [sampling(temperature, seed=seed, max_tokens=30) for seed in range(len(prompts))]
    expected = [plain_ids(target, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for corpus in ([], [list(expected[0])]):
        for max_requests in (1, 3):
            engine = Engine(target, SuffixDrafter(corpus=corpus), tree=TREE, max_requests=max_requests)
            completions = engine.generate(prompts, params)
            assert [completion.token_ids for completion in completions] == expected
            assert max(length for completion in completions for length in completion.accepted_lengths) > 2


def test_the_head_of_a_command(tiny_model) -> None:
    target = TargetModel.wrap(tiny_model("llama"))
    drafter = load_drafter("suffix", target)
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.kinds == (OneHot,)
