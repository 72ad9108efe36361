"""DFlash's own: where its blocks begin, what a target gives it, and its settings. The forward itself stands against a
plain reference in `test_foreign_blocks.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.dflash import DFlashConfig, DFlashHead
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model
from tests.heads.block_heads import HIDDEN, WEIGHTS, make_head

LAYERS = 4


@pytest.mark.parametrize(("sample_from_anchor", "num_places", "first_place"), [(False, 5, 2), (True, 4, 1)])
def test_a_block_begins_with_the_anchor(sample_from_anchor: bool, num_places: int, first_place: int) -> None:
    """Four depths are five places, of which the anchor's guesses nothing, or four, of which it guesses the first. The
    anchor reads the token emitted last, and all others the mask token."""
    head = make_head("dflash", sample_from_anchor=sample_from_anchor)
    assert (head.num_places, head.first_place) == (num_places, first_place)
    assert first_place + head.num_depths - 1 == num_places
    inputs = head.place_inputs(torch.tensor([11, 3]), torch.float64)
    assert inputs.shape == (2, num_places, HIDDEN)
    assert torch.equal(inputs[:, 0], WEIGHTS.embedding[[11, 3]])
    assert torch.equal(inputs[:, 1:], WEIGHTS.embedding[7].expand(2, num_places - 1, -1))


def test_text_rows_ask_nothing() -> None:
    """Text alone gives keys and values in every layer, and no state."""
    head = make_head("dflash of two layers")
    seen = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: str) -> torch.Tensor:
        seen.append((layer, len(query), len(key), len(value), asking))
        return query

    text = head.text_inputs(torch.randn(6, 3 * HIDDEN, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))
    none = torch.zeros(0, dtype=torch.int64)
    assert head(text, torch.arange(6), attend, places=none, wanted=none).shape == (0, HIDDEN)
    assert seen == [(0, 0, 6, 6, "places"), (1, 0, 6, 6, "places")]


def test_a_target_gives_its_last_layer() -> None:
    """What the layers read of the text at first is what the target's last layer reads of it: where the fusion lets the
    highest tap through alone, its values (keys are normed besides)."""
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    lm_head = model.get_output_embeddings().weight.detach()
    config = DFlashConfig.for_target(
        model.config, draft_vocab_size=len(lm_head), vocab_size=len(lm_head), taps=(1, LAYERS - 1), num_layers=2
    )
    head = DFlashHead(config, DraftVocabulary.full(len(lm_head)))
    last = model.model.layers[-1]
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.copy_(torch.rand_like(parameter))
        filled = head.init_from_target(layer=last, final_norm=model.model.norm, lm_head_weight=lm_head)
        size = config.hidden_size
        head.fc.weight[:, :-size] = 0
        head.fc.weight[:, -size:] = torch.eye(size)
        states = torch.randn(3, size)
        text = head.text_inputs(torch.cat([torch.randn(3, size), states], dim=-1), torch.zeros(3, dtype=torch.int64))
        expected = last.self_attn.v_proj(last.input_layernorm(states))
        for layer in head.layers:
            torch.testing.assert_close(layer.self_attn.v_proj(text), expected, rtol=1e-4, atol=1e-4)  # type: ignore[operator, union-attr]
    left = {name for name, _ in head.named_parameters()} - set(filled)
    assert {name.split(".", 2)[-1] for name in left if name.startswith("layers")} == {
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    assert {"hidden_norm.weight", "norm.weight"} <= set(filled)


def test_the_usual_head_of_a_target() -> None:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    sizes = {"draft_vocab_size": 50, "vocab_size": 128}
    config = DFlashConfig.for_target(model.config, **sizes)
    assert (config.num_layers, config.num_depths, config.markov_rank, config.block_size) == (1, 4, 64, 5)
    assert DFlashConfig.for_target(model.config, **sizes, taps=(2,), sample_from_anchor=True).block_size == 4
    with pytest.raises(ValueError, match="tap 5 does not exist: the target has 4 layers"):
        DFlashConfig.for_target(model.config, **sizes, taps=(1, 5))


@pytest.mark.parametrize("taps", [(), (0, 2), (3, 2), (2, 2)])
def test_other_taps_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer outputs in ascending order .* got taps \["):
        make_head("dflash", taps=taps)


def test_variants_are_refused_by_name() -> None:
    native = make_head("dflash").config.to_native()
    for key, value in (("architectures", ["Qwen3ForCausalLM"]), ("attention_bias", True), ("hidden_act", "relu")):
        with pytest.raises(ValueError, match=key):
            DFlashConfig.from_native({**native, key: value})
    with pytest.raises(ValueError, match="sample_from_anchor = 'yes'; expected true or false"):
        DFlashConfig.from_native({**native, "sample_from_anchor": "yes"})
