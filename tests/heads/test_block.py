"""Heads that draft in one pass: what training computes over packed text is what each root's own pass would give."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.block import Markov
from heads.block_unroll import ROW_MULTIPLE, Asking, BlockAttention, BlockLayout
from heads.checkpoint import HeadCard, TargetReference, load_head, save_head
from heads.registry import FAMILIES, family_of_head
from tests.heads.block_heads import (
    HIDDEN,
    LENGTHS,
    SHAPES,
    VOCABULARY,
    WEIGHTS,
    DenseAttention,
    drafted_logits,
    make_batch,
    make_head,
)
from train.unroll import plan_rows

ROUNDING: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}
"""Of numbers of order one in float64, but for norms, which take float32; a row too many or a wrong position shows as
1e-2 and more."""
EXACT: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}
"""Where there is no norm."""

every_shape = pytest.mark.parametrize("shape", SHAPES)


def sampled_plan(num_depths: int, *, keep_share: float = 0.6, root_share: float = 0.7) -> list[torch.Tensor]:
    """Rows of every sequence, fewer with each depth; the deepest may have none. The last of each comes more than once,
    as in training, which rounds their number up."""
    mask = make_batch(make_head("peagle")).loss_mask
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(LENGTHS))]
    shares: dict[str, Any] = {"keep_share": keep_share, "root_share": root_share, "generators": generators}
    plan = plan_rows(mask, LENGTHS, num_depths, **shares)
    return [torch.cat([rows, rows[-1:].expand(2)]) for rows in plan]


# The pass over packed text


@every_shape
@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.6, 0.7)])
def test_training_computes_what_decoding_does(shape: str, shares: tuple[float, float]) -> None:
    """At every planned row and depth: the logits of a pass over that row's text and its places alone."""
    head = make_head(shape)
    batch, plan = make_batch(head), sampled_plan(head.num_depths, keep_share=shares[0], root_share=shares[1])
    with torch.no_grad():
        answers = list(head.unroll(batch, plan))
        assert [len(one.states) for one in answers] == [len(rows) for rows in plan]
        assert len(plan[0]) > 10
        for depth, (rows, answer) in enumerate(zip(plan, answers, strict=True)):
            for row, logits in zip(rows.tolist(), answer.logits(), strict=True):
                torch.testing.assert_close(logits, drafted_logits(head, batch, row, depth), **ROUNDING)


@every_shape
def test_gradients_are_those_of_the_passes_one_by_one(shape: str) -> None:
    """Of a loss that every logit enters, for every parameter; none is left without. (The norms' float32 adds up over
    rows: 1e-5 of gradients of order 10.)"""
    head = make_head(shape)
    batch, plan = make_batch(head), sampled_plan(head.num_depths)
    count, width = sum(len(rows) for rows in plan), head.config.draft_vocab_size
    directions = torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    trained = torch.cat([answer.logits() for answer in head.unroll(batch, plan)])
    alone = [drafted_logits(head, batch, row, depth) for depth, rows in enumerate(plan) for row in rows.tolist()]
    parameters = dict(head.named_parameters())
    found, expected = (
        torch.autograd.grad((logits * directions).sum(), list(parameters.values()), allow_unused=True)
        for logits in (trained, torch.stack(alone))
    )
    for name, ours, theirs in zip(parameters, found, expected, strict=True):
        if head.num_places == 0 and name == "mask_hidden":  # a draft of one token has no place
            continue
        assert ours is not None, name
        assert bool(ours.any()), name
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@every_shape
def test_a_plan_may_end_early(shape: str) -> None:
    """Fewer depths than the head has, and depths at which no row is left: the rows that are there answer the same."""
    head = make_head(shape)
    batch, plan = make_batch(head), sampled_plan(head.num_depths)
    with torch.no_grad():
        whole = [answer.logits() for answer in head.unroll(batch, plan)]
        first = [answer.logits() for answer in head.unroll(batch, plan[:1])]
        emptied = [rows if depth == 0 else rows[:0] for depth, rows in enumerate(plan)]
        cut = [answer.logits() for answer in head.unroll(batch, emptied)]
    torch.testing.assert_close(first[0], whole[0], **ROUNDING)
    torch.testing.assert_close(cut[0], whole[0], **ROUNDING)
    assert [len(logits) for logits in cut[1:]] == [0] * (head.num_depths - 1)


@every_shape
def test_a_sequence_is_the_same_in_any_batch(shape: str) -> None:
    head = make_head(shape)
    batch, plan = make_batch(head), sampled_plan(head.num_depths)
    start = LENGTHS[0] + LENGTHS[1]
    alone = replace(
        batch,
        lengths=LENGTHS[2:],
        **{name: getattr(batch, name)[start:] for name in ("token_ids", "loss_mask", "taps", "last")},
    )
    own = [rows[rows >= start] - start for rows in plan]
    with torch.no_grad():
        together, by_itself = list(head.unroll(batch, plan)), list(head.unroll(alone, own))
    for rows, one, other in zip(plan, together, by_itself, strict=True):
        torch.testing.assert_close(one.logits()[rows >= start], other.logits(), **ROUNDING)


# Attention


def dense_sees(layout: BlockLayout, *, sees_ahead: bool) -> torch.Tensor:
    """[N, N] by the rule in words, of rows that have a meaning."""
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    num_rows, total = layout.num_rows, layout.num_rows + len(layout.blocks)
    sees = torch.zeros(total, total, dtype=torch.bool)
    for asking, seen in itertools.product(range(total), range(total)):
        root = asking if asking < num_rows else int(layout.roots[layout.blocks[asking - num_rows]])
        if seen < num_rows:
            sees[asking, seen] = seen <= root and sequences[seen] == sequences[root]
        elif asking >= num_rows:
            same = layout.blocks[asking - num_rows] == layout.blocks[seen - num_rows]
            sees[asking, seen] = same and (sees_ahead or seen <= asking)
    return sees


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("sees_ahead", [False, True])
@pytest.mark.parametrize("asking", ["all", "places", "wanted"])
def test_attention_is_that_of_a_dense_mask(
    sees_ahead: bool, asking: Asking, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and gradients, of whoever asks, one sequence after another and side by side."""
    monkeypatch.setattr("heads.unroll.MOST_PADDING", 1000)
    num_rows, first_place = sum(LENGTHS), 1
    layout = BlockLayout.of(
        sampled_plan(4), num_rows=num_rows, num_places=4, first_place=first_place, sees_ahead=sees_ahead
    )
    assert len(layout.blocks) % ROW_MULTIPLE == len(layout.wanted) % ROW_MULTIPLE == 0
    meant = torch.arange(num_rows + len(layout.blocks)) < num_rows + layout.num_meant
    assert not bool(meant.all())
    asked: dict[Asking, torch.Tensor] = {
        "all": torch.arange(len(meant)),
        "places": layout.places,
        "wanted": layout.wanted,
    }
    chance = torch.Generator().manual_seed(1)

    def random(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, 6, generator=chance, dtype=torch.float64).requires_grad_()

    inputs = [random(len(asked[asking]), 4), random(len(meant), 2), random(len(meant), 2)]
    sees = dense_sees(layout, sees_ahead=sees_ahead) & (meant | ~meant[:, None])  # nobody sees what means nothing
    ours = BlockAttention(layout, LENGTHS, together=together)(0, *inputs, asking)
    theirs = DenseAttention(sees, asked)(0, *inputs, asking)
    counted = meant[asked[asking]]
    torch.testing.assert_close(ours[counted], theirs[counted], **EXACT)
    assert bool(ours.isfinite().all())
    direction = torch.randn(ours.shape, generator=chance, dtype=torch.float64)
    gradients = [torch.autograd.grad((one * direction)[counted].sum(), inputs) for one in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


# The correction by the token before


@pytest.mark.parametrize("settings", [{}, {"markov_table": True}, {"markov_gate": True}], ids=str)
@pytest.mark.parametrize("family", ["peagle", "dflash"])
def test_the_correction_is_nothing_at_first(family: str, settings: dict[str, Any]) -> None:
    """A new head drafts as it would without, and its matrix has gradients at once."""
    head = make_head(family, markov_rank=4, **settings)
    head.markov = Markov(head.config).double()
    batch, plan = make_batch(head), sampled_plan(head.num_depths)
    bare = make_head(family, markov_rank=0)
    bare.load_state_dict({name: one for name, one in head.state_dict().items() if not name.startswith("markov")})
    answers = list(head.unroll(batch, plan))
    for one, other in zip(answers, bare.unroll(batch, plan), strict=True):
        torch.testing.assert_close(one.logits(), other.logits(), **ROUNDING)
    sum(answer.logits().square().sum() for answer in answers).backward()  # type: ignore[union-attr]
    assert head.markov.output.weight.grad is not None
    assert bool(head.markov.output.weight.grad.any())


@every_shape
def test_a_correction_is_a_function_of_the_token_before(shape: str) -> None:
    """`joined` and `outputs` together are the base and the correction, for any leading dimensions."""
    head = make_head(shape)
    states, previous = torch.randn(2, 3, HIDDEN, dtype=torch.float64), torch.randint(VOCABULARY, (2, 3))
    with torch.no_grad():
        logits, expected = head.logits(head.joined(states, previous), 0), head.base_logits(states)
        if head.config.markov_rank:
            expected = expected + head.correction(states, previous)
            other = head.logits(head.joined(states, (previous + 1) % VOCABULARY), 0)
            assert bool((logits != other).all())
    torch.testing.assert_close(logits, expected, **ROUNDING)


def test_the_scale_of_the_targets_embeddings_does_not_matter() -> None:
    """Targets embed a token as numbers of 0.02 or of 50: the correction reads them alike (to the norm's epsilon)."""
    head = make_head("dflash")
    states, previous = torch.randn(5, HIDDEN, dtype=torch.float64), torch.arange(5)
    before = head.correction(states, previous)
    head.bind(replace(WEIGHTS, embedding=100 * WEIGHTS.embedding))
    torch.testing.assert_close(head.correction(states, previous), before, rtol=1e-4, atol=1e-4)


# Settings and files


@every_shape
def test_a_head_goes_through_its_folder(shape: str, tmp_path: Path) -> None:
    """Its config says all of it, and so do its weights: the same logits to the bit."""
    head = make_head(shape)
    reference = TargetReference(
        name="toy", fingerprint="f", num_layers=6, hidden_size=HIDDEN, vocab_size=VOCABULARY, tokenizer_hash="t"
    )
    save_head(tmp_path / "head", head, HeadCard(target=reference, family=family_of_head(head)))
    again, _ = load_head(tmp_path / "head", WEIGHTS, dtype=torch.float64)
    assert again.config == head.config
    assert type(again) is type(head)
    batch, plan = make_batch(head), sampled_plan(head.num_depths)
    for one, other in zip(head.unroll(batch, plan), again.unroll(batch, plan), strict=True):
        assert torch.equal(one.logits(), other.logits())
    native = json.loads((tmp_path / "head" / "config.json").read_text())
    for key in ("num_depths", "mask_token_id", "num_hidden_layers"):
        with pytest.raises(ValueError, match=f"no '{key}'"):
            type(head.config).from_native({**native, key: None})
    with pytest.raises(ValueError, match="hidden_act"):
        type(head.config).from_native({**native, "hidden_act": "gelu"})


@pytest.mark.parametrize("family", ["peagle", "dflash"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "at least one layer and one depth, got num_layers 0"),
        ({"num_depths": 0}, "got num_layers 1 and num_depths 0"),
        ({"mask_token_id": VOCABULARY}, f"mask_token_id {VOCABULARY} is none of the target's {VOCABULARY} tokens"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 0, "markov_table": True}, "give markov_rank"),
        ({"markov_rank": 0, "markov_gate": True}, "give markov_rank"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_settings_that_cannot_be_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(family, **changes)


@pytest.mark.parametrize("family", ["peagle", "dflash"])
def test_taps_of_the_wrong_width_are_named(family: str) -> None:
    head = make_head(family)
    with pytest.raises(ValueError, match=rf"{3 * HIDDEN}, got {HIDDEN}"):
        head.text_inputs(torch.zeros(2, HIDDEN, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))


def test_only_a_bound_head_can_draft() -> None:
    for family in ("peagle", "dflash"):
        bound = make_head(family)
        free = FAMILIES[family].head(bound.config, bound.vocabulary).double()
        with pytest.raises(RuntimeError, match="call bind"):
            list(free.unroll(make_batch(bound), sampled_plan(4)))
