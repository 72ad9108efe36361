"""The early-exit adapter: it starts as the bare first layers, trains on what decoding reads, survives its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.checkpoint import HeadCard, TargetReference, load_head, read_tensors, save_head
from heads.early_exit import EarlyExitConfig, EarlyExitHead
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from infer.drafters.model import ModelDrafter
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.heads.path_heads import random_batch, random_weights, randomize

HIDDEN, VOCABULARY, DRAFTED, LAYERS = 24, 64, 20, 3
KINDS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")
WEIGHTS = random_weights(VOCABULARY, HIDDEN)
TEXT = [5, 17, 3, 99, 42, 8, 77, 23, 61, 12, 4, 90]
TOLERANCE = 1e-4
"""Float32 sums in another order: observed up to 1e-5 on logits of size 10. A wrong row or norm differs by 0.1."""


def make_config(**changes: Any) -> EarlyExitConfig:
    config = EarlyExitConfig(
        hidden_size=HIDDEN,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFTED,
        taps=(2,),
    )
    return replace(config, **changes)


def odd_tokens(size: int, vocab_size: int) -> DraftVocabulary:
    return DraftVocabulary.from_counts(dict.fromkeys(range(1, vocab_size, 2), 1), size=size, vocab_size=vocab_size)


def make_head(**changes: Any) -> EarlyExitHead:
    config = make_config(**changes)
    head = EarlyExitHead(config, odd_tokens(config.draft_vocab_size, VOCABULARY))
    randomize(head)
    return head.bind(WEIGHTS)


def untrained_head(target: TargetModel, exit_layer: int, *, draft_vocab_size: int = 40) -> EarlyExitHead:
    config = EarlyExitConfig.for_target(
        target.config, draft_vocab_size=draft_vocab_size, vocab_size=target.vocab_size, exit_layer=exit_layer
    )
    head = EarlyExitHead(config, odd_tokens(draft_vocab_size, target.vocab_size))
    head.init_from_target(layer=target.layers[-1], final_norm=target.final_norm, lm_head_weight=target.lm_head_weight)
    return head.bind(target.weights)


@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_head_is_the_bare_first_layers(kind: str, exit_layer: int) -> None:
    """The layer's state through the target's final norm, whatever kind that is, and its LM head: to rounding."""
    target = TargetModel.wrap(make_tiny_model(kind))
    if kind in ("gpt2", "gpt_neox"):  # an untrained norm has no bias to get wrong
        with torch.no_grad():
            target.final_norm.bias.normal_(generator=torch.Generator().manual_seed(0))
    head = untrained_head(target, exit_layer)
    with target.stock() as model, torch.inference_mode():
        states = model(input_ids=torch.tensor([TEXT]), output_hidden_states=True, use_cache=False).hidden_states
        state = states[exit_layer][0]
        expected = target.final_norm(state) @ target.lm_head_weight[head.target_ids].T
        found = head.logits(state)
    assert found.shape == (len(TEXT), 40)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_what_is_filled_from_the_target_is_named() -> None:
    """The norm where it is of the same kind; another kind of norm, or another size, is left as it was."""
    for kind, filled in (("llama", {"norm.weight"}), ("gpt_neox", {"norm.weight", "norm.bias"})):
        target = TargetModel.wrap(make_tiny_model(kind))
        config = EarlyExitConfig.for_target(target.config, draft_vocab_size=40, vocab_size=target.vocab_size)
        head = EarlyExitHead(config, odd_tokens(40, target.vocab_size))
        lent: dict[str, Any] = {"layer": target.layers[-1], "lm_head_weight": target.lm_head_weight}
        assert set(head.init_from_target(final_norm=target.final_norm, **lent)) == filled
        assert head.init_from_target(final_norm=torch.nn.Identity(), **lent) == []
    head = make_head()
    before = head.norm.weight.clone()
    assert head.init_from_target(final_norm=torch.nn.LayerNorm(HIDDEN), **lent) == []
    assert head.init_from_target(final_norm=torch.nn.RMSNorm(HIDDEN + 1), **lent) == []
    assert torch.equal(head.norm.weight, before)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_training_reads_the_state_of_the_token_before_the_label(norm: str) -> None:
    """At step s, row t's logits are those of the state of position t + 1 + s alone: the same at every depth, for rows
    that are fewer from step to step, in sequences that stand side by side."""
    head = make_head(norm=norm)
    batch = random_batch(VOCABULARY, HIDDEN)
    left = torch.cat([torch.arange(length).flip(0) for length in batch.lengths])
    plan = [(left >= step + 2).nonzero().flatten() for step in range(3)]
    plan[2] = plan[2][::2]
    with torch.no_grad():
        steps = list(head.unroll(batch, plan))
        assert len(steps) == 3
        for number, (step, rows) in enumerate(zip(steps, plan, strict=True)):
            assert step.auxiliary is None
            logits = step.logits()
            assert logits.std() > 0.3
            for row, found in zip(rows.tolist(), logits, strict=True):
                expected = head.logits(batch.taps[row + 1 + number], depth=2 - number)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_every_weight_learns() -> None:
    """And of an untrained head the last projection and the norm do, from which the rest follows: it starts as the
    identity, not as a dead end. The lent LM head is not trained."""

    def learning(head: EarlyExitHead) -> set[str]:
        batch = random_batch(VOCABULARY, HIDDEN)
        (step,) = head.unroll(batch, [torch.arange(5)])
        step.logits().log_softmax(-1)[:, 0].sum().backward()
        gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
        return {name for name, gradient in gradients.items() if gradient is not None and bool(gradient.any())}

    trained = make_head()
    assert learning(trained) == {name for name, _ in trained.named_parameters()}
    untrained = EarlyExitHead(make_config(), odd_tokens(DRAFTED, VOCABULARY)).bind(WEIGHTS)
    assert learning(untrained) == {"adapter.down_proj.weight", "norm.weight"}
    assert not any("lm_head" in name for name in untrained.state_dict())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_decoding_sees_what_training_saw(kind: str, tmp_path: Path) -> None:
    """After save and load, the logits with which a round of decoding begins are those that the unrolled head has for
    the row, from the target's features; on the target's own cache, after rounds that wrote drafts into it."""
    target = TargetModel.wrap(make_tiny_model(kind))
    trained = untrained_head(target, 2)
    randomize(trained.adapter)
    save_head(tmp_path / "head", trained, HeadCard(target=target.reference, family="early_exit"))
    loaded, card = load_head(tmp_path / "head", target.weights)
    assert isinstance(loaded, EarlyExitHead)
    target.check_card(card)
    drafter = ModelDrafter.early_exit(loaded, target)
    engine = Engine(target, drafter)
    (request,) = engine.submit([TEXT], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
        text = request.tokens_from(0)
        found = drafter.stepper.next_logits(request)
        (features,) = target.features([text], trained.config.taps)
        batch = Batch(
            token_ids=torch.tensor(text),
            loss_mask=torch.ones(len(text), dtype=torch.bool),
            lengths=(len(text),),
            taps=features.taps,
            last=features.last,
            log_normalizer=torch.zeros(len(text)),
        )
        with torch.no_grad():
            for step_number in range(2):  # the same label from a draft that began a token earlier
                plan = [torch.tensor([len(text) - 2 - step]) for step in range(step_number + 1)]
                *_, step = trained.unroll(batch, plan)
                torch.testing.assert_close(found, step.logits()[0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "norm_eps": 1e-3, "draft_vocab_size": VOCABULARY}])
def test_a_folder_holds_the_head_and_nothing_of_the_target(changes: dict[str, Any], tmp_path: Path) -> None:
    """Equal logits after save and load, in the same and in a lower precision; no LM head and no embedding on disk."""
    reference = TargetReference(
        name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    card = HeadCard(target=reference, family="early_exit")
    head = make_head(**changes)
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in ((None, 0.0), (torch.bfloat16, 0.1)):
        save_head(tmp_path / "head", head, card, dtype=dtype)
        loaded, _ = load_head(tmp_path / "head", WEIGHTS, dtype=torch.float32)
        assert loaded.config == head.config
        assert torch.equal(loaded.target_ids, head.target_ids)
        with torch.no_grad():
            # bfloat16 rounds a weight by 2^-9 of itself at most; logits are sums of some tens of products.
            expected = head.logits(states)
            torch.testing.assert_close(
                loaded.logits(states), expected, atol=tolerance * float(expected.abs().max()), rtol=0
            )
    names = set(read_tensors(tmp_path / "head" / "model.safetensors"))
    assert names == {name for name, _ in head.named_parameters()} | {"d2t", "t2d"}
    with pytest.raises(RuntimeError, match="call bind"):
        load_head(tmp_path / "head")[0].logits(states)


def test_native_form_is_complete_and_our_own() -> None:
    config = make_config(taps=(7,), norm="layer", norm_eps=1e-3)
    native = config.to_native()
    assert native["architectures"] == ["HeadstartEarlyExit"]
    assert native["exit_layer"] == config.exit_layer == 7
    assert EarlyExitConfig.from_native(native, num_target_layers=8) == config
    assert EarlyExitConfig.from_native(native) == config
    for key in native:
        if key not in ("architectures", "model_type", "hidden_act"):
            with pytest.raises(ValueError, match=key):
                EarlyExitConfig.from_native({**native, key: None})
    for key, value in (
        ("architectures", ["MedusaModel"]),
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("norm", "batch"),
    ):
        with pytest.raises(ValueError, match=key):
            EarlyExitConfig.from_native({**native, key: value})
    with pytest.raises(ValueError, match="exit_layer = 7, but its target has 7 layers"):
        EarlyExitConfig.from_native(native, num_target_layers=7)


def test_where_a_head_exits_by_default_and_may() -> None:
    """After a third of the layers, or where the recipe says by either of its names, but not after the last."""
    target_config = SimpleNamespace(num_hidden_layers=10, hidden_size=HIDDEN, rms_norm_eps=1e-5)
    sizes = {"draft_vocab_size": DRAFTED, "vocab_size": VOCABULARY}
    config = EarlyExitConfig.for_target(target_config, **sizes)
    assert (config.taps, config.norm, config.norm_eps) == ((4,), "rms", 1e-5)
    assert EarlyExitConfig.for_target(target_config, exit_layer=9, **sizes).taps == (9,)
    assert EarlyExitConfig.for_target(target_config, taps=(3,), **sizes).exit_layer == 3
    with pytest.raises(ValueError, match=r"the layer that it exits from, 4; got taps \[2, 3\]"):
        EarlyExitConfig.for_target(target_config, exit_layer=4, taps=(2, 3), **sizes)
    with pytest.raises(ValueError, match=r"taps \[2, 3\]"):
        EarlyExitConfig.for_target(target_config, taps=(2, 3), **sizes)
    for exit_layer in (0, 10):
        with pytest.raises(ValueError, match=f"exit_layer is {exit_layer}: the target has 10 layers"):
            EarlyExitConfig.for_target(target_config, exit_layer=exit_layer, **sizes)
    for changes in ({"taps": (1, 2)}, {"taps": (0,)}, {"intermediate_size": 0}, {"draft_vocab_size": 65}):
        with pytest.raises(ValueError, match=r"one layer, counted from 1|at least 1|between 1 and the target's"):
            make_config(**changes)


def test_states_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=f"one tapped state of {HIDDEN}, got {2 * HIDDEN}"):
        make_head().logits(torch.zeros(2, 2 * HIDDEN))
