"""The match walk and its noise, as kernels in Triton's interpreter and as fallbacks, against the engine's own rule."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from infer import verify
from infer.graphs.capture import NoSync
from infer.kernels.gpu.match_walk import Walk, match_walk, match_walk_reference
from infer.noise import gumbel, gumbel_rows, position_key, position_keys, position_stream
from infer.sampling import Processor, SamplingError, SamplingParams, pick
from infer.tree import DraftTree, OneHot
from tests.infer.kernels.gpu_scenes import nan_memory, with_fault

DEPTH = 5
TEMPERATURES = [0.0, 1.0, 0.7, 2.5, 1e-6]


@dataclass(frozen=True)
class Round:
    """What a walk is given, and the position of each request's root."""

    logits: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    keys: torch.Tensor
    temperatures: torch.Tensor
    first: list[int]

    def walk(self, function=match_walk) -> Walk:
        with nan_memory():
            return function(self.logits, self.tokens, self.parents, self.keys, self.temperatures, depth=DEPTH)

    def scores(self, request: int, row: int, depth: int) -> torch.Tensor:
        """What the engine picks from after a row: the request's processors, and the noise of the position."""
        num_rows, vocab_size = self.tokens.shape[1], self.logits.shape[1]
        params = SamplingParams(temperature=TEMPERATURES[request], seed=request)
        processor = Processor(params, prompt_ids=(), eos_ids=(), vocab_size=vocab_size)
        scores = processor.scores(self.logits[request * num_rows + row], ())
        if params.greedy:
            return scores
        return scores + gumbel(position_key(request, 0, 0, self.first[request] + depth), vocab_size)


def some_round(vocab_size: int, *, num_rows: int = 9, dtype: torch.dtype = torch.float32, seed: int = 0) -> Round:
    """A request a temperature, each with a tree about half of whose nodes are what the target says."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_requests = len(TEMPERATURES)
    parents = [[-1, *(rng.randrange(row) for row in range(1, num_rows))] for _ in range(num_requests)]
    depths = [[0] * num_rows for _ in range(num_requests)]
    for request, rows in enumerate(parents):
        for row, parent in enumerate(rows[1:], start=1):
            depths[request][row] = depths[request][parent] + 1
    first = [rng.randrange(1000) for _ in range(num_requests)]
    streams = torch.tensor([[position_stream(request, 0, 0)] for request in range(num_requests)])
    positions = torch.tensor(first)[:, None] + torch.tensor(depths)
    logits = (3 * torch.randn((num_requests * num_rows, vocab_size), generator=generator)).to(dtype)
    tokens = torch.randint(0, vocab_size, (num_requests, num_rows), generator=generator)
    case = Round(
        logits=logits,
        tokens=tokens,
        parents=torch.tensor(parents, dtype=torch.int32),
        keys=position_keys(streams, positions).flatten(),
        temperatures=torch.tensor(TEMPERATURES),
        first=first,
    )
    for request, rows in enumerate(parents):
        for row, parent in enumerate(rows[1:], start=1):
            if rng.random() < 0.5:
                tokens[request, row] = pick(case.scores(request, parent, depths[request][parent]))
    return case


class EngineLaw:
    """`infer.verify.NodeLaw` from the engine's own parts."""

    def __init__(self, case: Round, request: int, tree: DraftTree) -> None:
        self._case, self._request, self._tree = case, request, tree

    def draw(self, node: int) -> int:
        depth = 0 if node < 0 else self._tree.depths[node]
        return pick(self._case.scores(self._request, node + 1, depth))

    def probs(self, node: int) -> torch.Tensor:
        raise AssertionError("the match walk asks for draws alone")


def check_against_the_engine(case: Round, found: Walk) -> int:
    """The engine's rule on the same trees; returns how many nodes were accepted."""
    for request in range(len(TEMPERATURES)):
        tree = DraftTree(
            tokens=tuple(case.tokens[request, 1:].tolist()),
            parents=tuple((case.parents[request, 1:] - 1).tolist()),
            kind=OneHot(),
        )
        if max(tree.depths, default=0) > DEPTH:
            continue
        verdict = verify.match_walk(tree, EngineLaw(case, request, tree))
        path = [0, *(node + 1 for node in verdict.path)]
        assert int(found.counts[request]) == len(verdict.path)
        assert found.paths[request].tolist() == path + [path[-1]] * (DEPTH + 1 - len(path))
        assert int(found.tokens[request]) == verdict.token
        assert bool(found.sound[request])
    return int(found.counts.sum())


def same(found: Walk, expected: Walk) -> None:
    for name in ("paths", "counts", "sound"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert torch.equal(found.tokens[expected.sound], expected.tokens[expected.sound])


@pytest.mark.parametrize("vocab_size", [2, 49, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fallback_is_the_engines_rule(vocab_size, dtype) -> None:
    """Token for token at every temperature, greedy and too low to divide by included."""
    accepted = 0
    for seed in range(4):
        case = some_round(vocab_size, dtype=dtype, seed=seed)
        accepted += check_against_the_engine(case, case.walk(match_walk_reference))
    assert accepted >= 5, "walks that go nowhere test nothing"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("vocab_size", [1, 1024, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_engines_rule(vocab_size, dtype) -> None:
    """Splits and tiles that are full, and that are not."""
    case = some_round(vocab_size, dtype=dtype, seed=vocab_size)
    found = case.walk()
    check_against_the_engine(case, found)
    same(found, case.walk(match_walk_reference))


@pytest.mark.usefixtures("interpreter")
def test_a_walk_ends_at_its_depth() -> None:
    case = chain_round(9)
    found = case.walk()
    same(found, case.walk(match_walk_reference))
    assert found.paths.tolist() == [list(range(DEPTH + 1))]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_any_number_of_rows(num_rows) -> None:
    """And logits whose rows do not lie side by side."""
    case = some_round(61, num_rows=num_rows, seed=num_rows)
    wide = torch.full((case.logits.shape[0], 80), math.inf)
    wide[:, :61] = case.logits
    apart = Round(wide[:, :61], case.tokens, case.parents.long(), case.keys, case.temperatures, case.first)
    same(apart.walk(), case.walk(match_walk_reference))


def tied_round(split: int, tile: int) -> Round:
    """Greedy ties within a tile, between tiles and between splits; siblings that propose the same token."""
    vocab_size = 2 * split + tile
    logits = torch.zeros(5 * 3, vocab_size)
    ties = [(5, 5 + tile), (tile - 1, tile), (split - 1, split), (0, vocab_size - 1), (2 * split, 2 * split + 1)]
    for row, best in enumerate(ties * 3):
        logits[row, list(best)] = 1.0
    tokens = torch.full((5, 3), 7)
    tokens[:, 1:] = torch.tensor([logits[3 * request].argmax() for request in range(5)])[:, None]
    return greedy_round(logits, tokens, torch.tensor([[-1, 0, 0]] * 5, dtype=torch.int32))


def chain_round(num_rows: int) -> Round:
    """A chain that the target follows to its end, deeper than a walk may go."""
    logits = torch.eye(50)[torch.arange(num_rows) % 50]
    parents = torch.arange(-1, num_rows - 1, dtype=torch.int32)[None]
    return greedy_round(logits, (torch.arange(num_rows)[None] - 1) % 50, parents)


def greedy_round(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> Round:
    keys, temperatures = torch.zeros(tokens.numel(), dtype=torch.int64), torch.zeros(len(tokens))
    return Round(logits, tokens, parents, keys, temperatures, [0] * len(tokens))


@pytest.mark.usefixtures("interpreter")
def test_ties_go_to_the_lowest_token_and_the_first_sibling() -> None:
    case = tied_round(4096, 1024)
    found = case.walk()
    same(found, case.walk(match_walk_reference))
    assert found.paths[:, 1].tolist() == [1] * 5
    assert found.tokens.tolist() == [pick(case.logits[3 * request + 1]) for request in range(5)]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["at the root", "on the path", "off the path"])
def test_rows_without_a_token_are_reported(value, where) -> None:
    """If the walk visits them: then it ends there. One NaN is enough, wherever it stands."""
    case = some_round(4100, seed=1)
    reference = case.walk(match_walk_reference)
    request = int(reference.counts.argmax())
    assert reference.counts[request] >= 1
    visited = reference.paths[request].tolist()
    off = next(row for row in range(9) if row not in visited)
    row = {"at the root": 0, "on the path": visited[1], "off the path": off}[where]
    bad = case.logits.clone()
    bad[request * 9 + row, :] = value if value == -math.inf else bad[request * 9 + row]
    bad[request * 9 + row, 4099] = value
    case = Round(bad, case.tokens, case.parents, case.keys, case.temperatures, case.first)
    found = case.walk()
    same(found, case.walk(match_walk_reference))
    assert bool(found.sound[request]) == (where == "off the path")
    assert 0 <= int(found.tokens[request]) < 4100
    assert found.sound.sum() >= 4
    if where != "off the path":
        with pytest.raises(SamplingError):
            pick(case.scores(request, row, 0 if where == "at the root" else 1))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("num_ids", [1, 1023, 3000])
def test_noise_of_the_kernel(num_ids) -> None:
    """The values of `gumbel` to the bit, save where the last bit of a float64 logarithm decides (about once in 1e8)."""
    from infer.kernels.gpu.match_walk_triton import gumbel_rows_triton

    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345])
    ids = torch.randperm(200_000, generator=torch.Generator().manual_seed(0))[:num_ids]
    with nan_memory():
        found = gumbel_rows_triton(keys, ids)
    assert torch.equal(found, gumbel_rows(keys, ids))


def test_nothing_asks_the_device() -> None:
    """A CUDA graph can hold the fallback, and the noise."""
    case = some_round(61)
    with NoSync():
        position_keys(case.keys, torch.arange(len(case.keys)))
        gumbel_rows(case.keys, torch.arange(10))
        case.walk(match_walk_reference)


DRAWN = "_gumbel(key, ids.to(tl.int64))"
FAULTS = {
    "any row's child": ("(row_parents == row)", "(row_parents >= 0)"),
    "the last sibling": ("token), rows, _NONE), axis=0)", "token), rows, _NONE) * -1, axis=0) * -1"),
    "the highest token on ties": ("is_better = score > best", "is_better = score >= best"),
    "the highest split on ties": ("tl.min(tl.where(score == top, ids, _NONE)", "tl.max(tl.where(score == top, ids, 0)"),
    "noise of another key": ("key = tl.load(keys + row)", "key = tl.load(keys + row) + 1"),
    "noise of the place in a split": (DRAWN, DRAWN.replace("ids", "(ids % 64)")),
    "temperature left out": ("tl.div_rn(score, temperature)", "score"),
    "temperature on the noise too": (
        f"tl.div_rn(score, temperature) + {DRAWN}",
        f"tl.div_rn(score + {DRAWN}, temperature)",
    ),
    "shifts that spread the sign": (
        "(hashes >> _SHIFT_3)",
        "(hashes.to(tl.int64, bitcast=True) >> _SHIFT_3).to(tl.uint64, bitcast=True)",
    ),
    "temperatures of a neighbour": ("row // rows_per_request", "row // (2 * rows_per_request)"),
    "NaN loses": ('score = tl.where(score == score, score, float("inf"))', "pass"),
    "a path one too long": ("(step < DEPTH)", "(step <= DEPTH)"),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, tmp_path: Path) -> None:
    """Each shows in one of the cases above, made small."""
    module = with_fault("match_walk_triton", *FAULTS[fault], tmp_path)
    module._SPLIT, module._TILE = 64, 32
    bad = some_round(30, num_rows=3, seed=1)
    bad.logits[::3, 3] = torch.nan
    small = [some_round(70, num_rows=5, seed=2), some_round(3, num_rows=9, seed=5)]

    def compare() -> None:
        for case in (*small, tied_round(64, 32), chain_round(9), bad):
            same(case.walk(module.match_walk_triton), case.walk(match_walk_reference))

    with pytest.raises(AssertionError):
        compare()
