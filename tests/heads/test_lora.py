"""LoRA adapters in peft's form: scales, names, and what a head's fingerprint sees (merging and use: test_adapter.py in
tests/infer for targets, test_head_adapter.py in tests/train for heads)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import TargetWeights
from heads.checkpoint import HeadCard, TargetReference, load_head, save_head
from heads.lora import (
    HeadBase,
    head_fingerprint,
    layer_of,
    merge_head,
    merged_weight,
    read_adapter,
    tensor_name,
    write_adapter,
)
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocab import DraftVocabulary

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")


def write(folder: Path, ranks: dict[str, int], **changes: Any) -> Path:
    tensors = {}
    for layer, rank in ranks.items():
        tensors[tensor_name(layer, "lora_A")] = torch.ones(rank, 4)
        tensors[tensor_name(layer, "lora_B")] = torch.ones(3, rank)
    write_adapter(folder, CONFIG | changes, tensors)
    return folder


@pytest.mark.parametrize(
    ("changes", "ranks", "scales"),
    [
        ({}, (2, 2, 2), (3, 3, 3)),
        ({"use_rslora": True, "r": 4}, (4, 4, 4), (3, 3, 3)),
        ({"alpha_pattern": {"q_proj": 8}}, (2, 2, 2), (4, 4, 3)),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 3}}, (2, 3, 2), (3, 2, 3)),
        ({"rank_pattern": {r".*\.mlp\..*": 6}, "alpha_pattern": {"up_proj": 3}}, (2, 2, 6), (3, 3, 0.5)),
        ({"alpha_pattern": {"proj": 8}}, (2, 2, 2), (3, 3, 3)),
    ],
)
def test_each_layer_has_its_own_scale(
    tmp_path: Path, changes: dict[str, Any], ranks: tuple[int, ...], scales: tuple[float, ...]
) -> None:
    """alpha / rank, or alpha / sqrt(rank); patterns hold for whole names from their end, as in peft."""
    folder = write(tmp_path / "lora", dict(zip(LAYERS, ranks, strict=True)), **changes)
    factors, found = read_adapter(folder)
    assert found == pytest.approx(dict(zip(LAYERS, scales, strict=True)))
    assert {layer: len(down) for layer, (down, _) in factors.items()} == dict(zip(LAYERS, ranks, strict=True))


def test_names_go_both_ways() -> None:
    assert layer_of(tensor_name("a.b", "lora_A")) == "a.b"
    with pytest.raises(ValueError, match="which is no factor of a LoRA adapter"):
        layer_of("base_model.model.lm_head.weight")


def medusa(lm_head: torch.Tensor | None = None) -> MedusaHead:
    config = MedusaConfig(
        hidden_size=8, vocab_size=32, draft_vocab_size=32, taps=(3,), original_lm_head=lm_head is not None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = MedusaHead(config, DraftVocabulary.full(32))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
    return head if lm_head is None else head.bind(TargetWeights(embedding=torch.zeros(32, 8), lm_head=lm_head))


def test_a_heads_fingerprint_is_that_of_its_own_weights(tmp_path: Path) -> None:
    """Equal after saving and loading, and whatever the target lends; another in any weight, or in lower precision."""
    head = medusa()
    found = head_fingerprint(head)
    reference = TargetReference(name="t", fingerprint="f", num_layers=2, hidden_size=8, vocab_size=32)
    card = HeadCard(target=reference, family="medusa")
    save_head(tmp_path / "head", head, card)
    assert head_fingerprint(load_head(tmp_path / "head")[0]) == found
    save_head(tmp_path / "rounded", head, card, dtype=torch.bfloat16)
    assert head_fingerprint(load_head(tmp_path / "rounded")[0]) != found
    assert head_fingerprint(medusa(torch.ones(32, 8))) == head_fingerprint(medusa(torch.zeros(32, 8))) != found
    with torch.no_grad():
        next(head.parameters())[0, 0] += 1e-3
    assert head_fingerprint(head) != found
    base = HeadBase.of(tmp_path / "head", head, replace(card, training={"run": "first"}))
    assert (base.name, base.target, HeadBase.of(tmp_path / "head", head, card).name) == ("first", "t", "head")
    with pytest.raises(ValueError, match="give that head as it was"):
        base.check(tmp_path / "head", load_head(tmp_path / "head")[0])


def test_merging_leaves_the_base_alone() -> None:
    head, name = medusa(), "blocks.1.layers.0"
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    down, up = torch.randn(2, 8), torch.randn(8, 2)
    merged = merge_head(head, {name: (down, up)}, {name: 0.5})
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())
    changed = [key for key, tensor in merged.state_dict().items() if not torch.equal(tensor, before[key])]
    assert changed == [f"{name}.weight"]
    expected = merged_weight(before[f"{name}.weight"], down, up, 0.5)
    assert torch.equal(merged.state_dict()[f"{name}.weight"], expected)
    with pytest.raises(ValueError, match=r"for a weight of shape \[8, 3\], not \[8, 8\]"):
        merge_head(head, {name: (torch.randn(2, 3), up)}, {name: 0.5})
    with pytest.raises(ValueError, match="has no layer fc"):
        merge_head(head, {"fc": (down, up)}, {"fc": 0.5})
