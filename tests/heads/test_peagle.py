"""P-EAGLE's own: its first depth is EAGLE-3's, its further layers begin as nothing, and its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.peagle import PEagleConfig, PEagleHead
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model
from tests.heads.block_heads import SIZES, WEIGHTS, make_batch, make_head
from train.unroll import plan_rows

LAYERS = 4


@pytest.mark.parametrize("settings", [{}, {"norm_before_residual": True}, {"fc_norm": True}], ids=str)
def test_the_first_depth_is_that_of_eagle3(settings: dict[str, Any]) -> None:
    """A head of one layer with EAGLE-3's weights answers as it does at depth 1 (float64 but for norms)."""
    head = make_head("peagle", markov_rank=0, **settings)
    sizes = {name: value for name, value in SIZES.items() if name != "mask_token_id"}
    other = Eagle3Head(Eagle3Config(**sizes, **settings), head.vocabulary).double().bind(WEIGHTS)
    state = {name.replace("layers.0.", "midlayer."): one for name, one in head.state_dict().items()}
    other.load_state_dict({name: one for name, one in state.items() if name != "mask_hidden"})
    batch = make_batch(head)
    plan = plan_rows(batch.loss_mask, batch.lengths, 4)
    with torch.no_grad():
        ours, theirs = (next(iter(one.unroll(batch, plan))).logits() for one in (head, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_further_layers_begin_as_nothing() -> None:
    """From its target's weights a head of three layers drafts as one of a single layer."""
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    lm_head = model.get_output_embeddings().weight.detach()
    sizes = {"draft_vocab_size": len(lm_head), "vocab_size": len(lm_head)}
    heads = []
    for num_layers in (1, 3):
        config = PEagleConfig.for_target(model.config, num_layers=num_layers, num_depths=3, **sizes)
        head = PEagleHead(config, DraftVocabulary.full(len(lm_head)))
        assert isinstance(head, PEagleHead)
        filled = head.init_from_target(
            layer=model.model.layers[-1], final_norm=model.model.norm, lm_head_weight=lm_head
        )
        assert {"lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(filled)
        heads.append(head)
    one, three = heads
    three.load_state_dict({**three.state_dict(), **one.state_dict()})
    assert three.config.num_layers == 3
    states = torch.randn(5, 2 * one.config.hidden_size)
    rows, none = torch.arange(5), torch.zeros(0, dtype=torch.int64)

    def own_value(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: str) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    with torch.no_grad():
        alone, stacked = (head(states, rows, own_value, places=none, wanted=rows) for head in heads)
    assert torch.equal(alone, stacked)


def test_the_usual_head_of_a_target() -> None:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    sizes = {"draft_vocab_size": 50, "vocab_size": 128}
    config = PEagleConfig.for_target(model.config, **sizes)
    assert (config.num_layers, config.num_depths, config.markov_rank) == (1, 4, 64)
    assert config.mask_token_id == (model.config.eos_token_id or 0)
    assert PEagleConfig.for_target(model.config, **sizes, markov_rank=0, mask_token_id=9).mask_token_id == 9
    with pytest.raises(ValueError, match="tap 5 does not exist: the target has 4 layers"):
        PEagleConfig.for_target(model.config, **sizes, taps=(1, 2, 5))


def test_what_would_feed_back_is_refused() -> None:
    """Nothing is fed back to a head that drafts in one pass; a file that says so is another's."""
    with pytest.raises(ValueError, match="norm_output"):
        make_head("peagle", norm_output=True)
    native = make_head("peagle").config.to_native()
    with pytest.raises(ValueError, match="norm_output"):
        PEagleConfig.from_native({**native, "norm_output": True})
    with pytest.raises(ValueError, match="architectures"):
        PEagleConfig.from_native({**native, "architectures": ["LlamaForCausalLMEagle3"]})
