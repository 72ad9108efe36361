"""Drafting with heads that draft all depths in one pass: what a round leaves behind, and what its rows see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from heads.block import BlockHead
from infer.cost import CostModel
from infer.drafters import TreeSettings, reading
from infer.drafters.base import Room
from infer.drafters.block import BlockRound, BlockStepper
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head

TREE = TreeSettings(max_nodes=24, max_depth=6, branch=4, beam=3, adaptive=False)
BLOCKS = ["peagle", "peagle of two layers", "peagle by itself", "dflash", "dflash of two layers", "dspark"]
every_block = pytest.mark.parametrize("variant", BLOCKS)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama", vocab_size=48))


def opened(variant: str, target: TargetModel, *, kernel: bool = True) -> BlockStepper:
    head = tiny_head(variant, target)
    assert isinstance(head, BlockHead)
    stepper = BlockStepper(head, name=variant)
    stepper.open(Room(num_slots=4, num_columns=96, tree=TREE, cost=CostModel.free()))
    stepper._attends_by_kernel &= kernel
    return stepper


def taps_of(stepper: BlockStepper, num_rows: int, seed: int = 0) -> torch.Tensor:
    size = len(stepper.taps) * stepper.head.config.hidden_size
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def drafted(
    stepper: BlockStepper, texts: Sequence[RowGroup], taps: torch.Tensor, depths: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The logits [depths, C] of each request, along one and the same path."""
    depths = [stepper.head.num_depths] * len(texts) if depths is None else depths
    found: BlockRound = stepper.draft(texts, taps, depths)
    rows = [list(range(found._starts[i], found._starts[i] + depth)) for i, depth in enumerate(depths)]
    none = torch.zeros(0, len(stepper.target_ids))
    return [found.at(each, [7] * len(each)) if each else none for each in rows]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_every_variant_is_tried() -> None:
    assert set(BLOCKS) >= {name for name, (family, _) in VARIANTS.items() if family in ("peagle", "dflash")}


@pytest.mark.parametrize("kernel", [True, False])
@every_block
def test_requests_of_a_round_do_not_see_each_other(variant: str, kernel: bool, target: TargetModel) -> None:
    """Four of different lengths and depths (one drafts nothing), in slots that do not lie in order: each has the logits
    that it has alone. Whatever their neighbours' places hold would otherwise be in them."""
    stepper = opened(variant, target, kernel=kernel)
    depth = stepper.head.num_depths
    texts = [
        RowGroup(slot=slot, prefix=0, tokens=list(range(5, 5 + num_rows)))
        for slot, num_rows in ((2, 3), (0, 7), (3, 1), (1, 2))
    ]
    depths = [depth, 0, 1, depth - 1]
    taps = taps_of(stepper, 13).split([3, 7, 1, 2])
    together = drafted(stepper, texts, torch.cat(taps), depths)
    alone = [
        drafted(opened(variant, target, kernel=kernel), [text], own, [one])[0]
        for text, own, one in zip(texts, taps, depths, strict=True)
    ]
    same(together, alone)
    assert [len(each) for each in together] == depths


@every_block
def test_places_are_overwritten_and_the_text_stays(variant: str, target: TargetModel) -> None:
    """Round after round of one to four rows: logits are those of one pass over the whole text, and the cache holds what
    that leaves in the text's columns."""
    stepper, whole = opened(variant, target), opened(variant, target)
    tokens, taps, first = list(range(4, 18)), taps_of(stepper, 14), 0
    for count in (3, 1, 4, 2, 4):
        text = RowGroup(slot=1, prefix=first, tokens=tokens[first : first + count])
        found = drafted(stepper, [text], taps[first : first + count])
        first += count
        same(found, drafted(whole, [RowGroup(slot=1, prefix=0, tokens=tokens[:first])], taps[:first]))
    assert stepper.cache is not None
    assert whole.cache is not None
    columns = slice(stepper.cache.num_columns, stepper.cache.num_columns + first)
    torch.testing.assert_close(stepper.cache.keys[:, :, columns], whole.cache.keys[:, :, columns])
    torch.testing.assert_close(stepper.cache.values[:, :, columns], whole.cache.values[:, :, columns])


@every_block
def test_fewer_depths_are_the_same_depths(variant: str, target: TargetModel) -> None:
    """What is drafted does not depend on how deep it may go, though fewer rows are computed where they can be."""
    text = RowGroup(slot=0, prefix=0, tokens=[5, 9, 3])
    (whole,) = drafted(opened(variant, target), [text], taps_of(opened(variant, target), 3))
    for depth in range(1, len(whole)):
        stepper = opened(variant, target)
        (found,) = drafted(stepper, [text], taps_of(stepper, 3), [depth])
        same([found], [whole[:depth]])


@every_block
def test_long_prompts_are_read_before_the_places(
    variant: str, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces as they come, or at the first draft: tokens and accepted lengths are the same."""
    prompts = [list(range(4, 44)) * 2, [9, 9, 8, 7]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    results = []
    for most_pending, long_text in ((512, 1000), (512, 32), (8, 32), (8, 2)):
        monkeypatch.setattr(reading, "_MOST_PENDING", most_pending)
        monkeypatch.setattr("infer.drafters.block._LONG_TEXT", long_text)
        engine = Engine(target, head_drafter(tiny_head(variant, target), target), tree=TREE)
        answers = engine.generate(prompts, params)
        results.append([(answer.token_ids, answer.accepted_lengths) for answer in answers])
    assert results[1:] == results[:1] * 3


@every_block
def test_the_mask_token_may_stand_in_a_text(variant: str, target: TargetModel) -> None:
    """It marks no place: where rows are places is told by where they are."""
    head = tiny_head(variant, target)
    mask = head.config.mask_token_id
    prompts = [[mask], [5, mask, 6, mask, mask], [mask] * 9]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.8, 0.8)]
    expected = [Engine(target).generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    found = Engine(target, head_drafter(head, target), tree=TREE).generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


@every_block
def test_an_adaptive_tree_knows_what_the_pass_costs(variant: str, target: TargetModel) -> None:
    """The pass is the beginning's; a further depth is a look-up. What was measured leaves nothing in the cache."""
    stepper = BlockStepper(tiny_head(variant, target), name=variant)  # type: ignore[arg-type]
    tree = TreeSettings(max_nodes=12, max_depth=3)
    stepper.open(Room(num_slots=2, num_columns=64, tree=tree, cost=CostModel.free()))
    assert stepper.begin_milliseconds > 0
    assert stepper.step_milliseconds > 0
    assert stepper.cache is not None
    assert stepper.cache.keys.shape[0] == stepper.head.config.num_layers
    assert not stepper.cache.keys.any()
    assert not stepper.cache.values.any()
