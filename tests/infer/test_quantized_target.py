"""Targets whose weights are rounded on a CPU: what is promised of a target holds of them, and they are nobody else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from heads.checkpoint import HeadCard
from infer.cost import CostModel, cost_path
from infer.drafters.base import TreeSettings
from infer.drafters.model import ModelDrafter
from infer.drafters.ngram import NgramDrafter
from infer.engine import Engine
from infer.kernels import rounded
from infer.quantize import quantized_copy, round_in_place, unquantized_layers
from infer.rounding import TiledCodes
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import RelativeTarget, TargetModel
from tests.toy_tokenizer import toy_tokenizer

TOKENS = [5, 17, 3, 99, 42, 8, 77, 23, 61, 12, 4, 90, 31, 18, 55, 66, 7, 29]
# A head size that headstart's attention kernel takes, and a text that repeats itself for the lookup.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
needs_kernels = pytest.mark.skipif(not rounded.has_rounded_kernels(), reason="this machine cannot run the kernels")

WAYS = [
    pytest.param("int8", "auto", None, marks=needs_kernels),
    pytest.param("int4", "auto", None, marks=needs_kernels),
    ("int4", "auto", "bitwise"),
    ("int8", "eager", "bitwise"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    path = tmp_path_factory.mktemp("whole")
    model = tiny_model("llama", vocab_size=len(toy_tokenizer()), tie_word_embeddings=True, **SIZES)
    model.to(torch.bfloat16).save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    return path


def load(folder, quantization: str | None = "int8", **how: Any) -> TargetModel:
    return TargetModel.load(folder, quantization=quantization, **{"dtype": "bfloat16", **how})


def logits(target: TargetModel, *widths: int) -> torch.Tensor:
    """Logits of TOKENS, read in forwards of these widths (all in one if none is given)."""
    cache = target.new_cache(num_slots=1, num_columns=64)
    parts, place = [], 0
    for width in widths or (len(TOKENS),):
        group = RowGroup(slot=0, prefix=place, tokens=TOKENS[place : place + width])
        parts.append(target.forward([group], cache).logits.float().clone())
        place += width
    return torch.cat(parts)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_the_rounded_copy_of_the_whole_target(folder, quantization):
    """The same layers as a draft that is rounded from the whole one, so the same logits: to the bit, since they are
    the same modules on the same kernels."""
    whole, target = load(folder, None), load(folder, quantization)
    copy = quantized_copy(whole, int(quantization[-1]))
    assert torch.equal(logits(target), logits(copy))
    assert not unquantized_layers(target)
    assert target.quantization == target.reference.quantization == quantization
    assert (target.vocab_size, target.dtype, target.hidden_size) == (whole.vocab_size, whole.dtype, whole.hidden_size)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_whole_weights_are_freed(tiny_model, quantization):
    """No linear layer's parameter outlives the rounding but the embedding's, which is looked up; what is left takes
    fewer bytes (8 bits and a bfloat16 scale for 32; 4 bits, a scale and a centre)."""
    model = tiny_model("llama", tie_word_embeddings=True, **SIZES).to(torch.bfloat16)
    num_bytes = sum(module.weight.nbytes for module in model.base_model.modules() if isinstance(module, nn.Linear))
    weights = [weakref.ref(each.weight) for each in model.base_model.modules() if isinstance(each, nn.Linear)]
    embedding = model.get_input_embeddings().weight
    bits = int(quantization[-1])
    round_in_place(model, bits)
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert model.get_input_embeddings().weight is embedding
    kept = sum(each.tiles.nbytes for each in model.base_model.modules() if isinstance(each, TiledCodes))
    if rounded.has_rounded_kernels():
        assert kept == num_bytes / 16 * (bits + (16 if bits == 8 else 32) / 32)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_do_not_depend_on_the_width(folder, quantization, dtype):
    """On headstart's kernels plain decoding and verification compute the same bits, in either dtype."""
    target = load(folder, quantization, dtype=dtype)
    assert target.forward_kind == "kernels"
    wide = logits(target)
    assert torch.equal(logits(target, *[1] * len(TOKENS)), wide)
    assert torch.equal(logits(target, 2, 7, 9), wide)


@pytest.mark.parametrize(("quantization", "forward", "exactness"), WAYS)
def test_answers_are_its_own_plain_decodings(folder, quantization, forward, exactness):
    """Greedy and sampled, with trees from the lookup and from its own first layers. In eager forwards widths may round
    differently, so only bitwise mode promises it there."""
    target = load(folder, quantization, forward=forward)
    prompts = [TOKENS[:7] * 3, TOKENS]
    tree = TreeSettings(max_nodes=12, max_depth=4)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 1.0)]
    plain = Engine(target, exactness=exactness, cost=CostModel.free())
    expected = [[answer.token_ids for answer in plain.generate(prompts, one)] for one in params]
    for drafter in (NgramDrafter(), ModelDrafter.first_layers(1, target)):
        engine = Engine(target, drafter, exactness=exactness, tree=tree, cost=CostModel.free())
        assert [[answer.token_ids for answer in engine.generate(prompts, one)] for one in params] == expected


def test_heads_of_the_whole_target_and_of_other_roundings_draft_as_relatives(folder):
    """With one line said, by the base that they share. A head of the rounded target is not the whole one's."""
    whole, eight, four = load(folder, None), load(folder, "int8"), load(folder, "int4")
    assert eight.reference.base_fingerprint == four.reference.base_fingerprint == whole.fingerprint
    assert len({whole.fingerprint, eight.fingerprint, four.fingerprint}) == 3
    for own in (whole, four):
        with pytest.warns(RelativeTarget, match=rf"not on {whole.name} in int8: answers are {whole.name} in int8's"):
            eight.check_card(HeadCard(target=own.reference))
    eight.check_card(HeadCard(target=eight.reference))
    with pytest.raises(ValueError, match=r"in int8 .*load the target in int8 too \(--quantization"):
        whole.check_card(HeadCard(target=eight.reference))


def test_it_is_one_target_in_every_dtype_with_cost_tables_of_their_own(folder):
    """Weights are rounded from bfloat16, whatever they are read in."""
    assert load(folder, dtype="float32").fingerprint == load(folder).fingerprint
    targets = [load(folder, None), load(folder, "int8"), load(folder, "int4"), load(folder, "int4", dtype="float32")]
    assert len({cost_path(target) for target in targets}) == 4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_stock_model_runs_the_same_layers(folder, quantization):
    """Baselines are of the same target: transformers' own forward over the rounded layers gives its logits, to
    bfloat16's rounding of attention and what that makes of rounded inputs. A twin shares its weights, and so do its
    first layers."""
    target = load(folder, quantization)
    expected = logits(target)
    with target.stock() as model, torch.inference_mode():
        found = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    assert float((found - expected).abs().mean()) < 0.01 * float(expected.abs().max())
    twin = target.twin(own_layers=False)
    assert {id(each) for each in twin.parameters()} == {id(each) for each in target.model.parameters()}
    assert target.truncated(2).layers[0] is target.layers[0]
    torch.testing.assert_close(target.lm_head_weight, load(folder, None).lm_head_weight, atol=0.01, rtol=0.02)


def test_what_it_cannot_be_is_refused(folder):
    target = load(folder, "int8")
    with pytest.raises(ValueError, match="weights are in int8 already"):
        quantized_copy(target, 4)
    with pytest.raises(ValueError, match="multiply bfloat16 or float32 on a CPU, not float16"):
        load(folder, "int8", dtype="float16")
    with pytest.raises(ValueError, match="leave the map out"):
        load(folder, "int8", device_map="auto")


def test_without_own_kernels_torchs_are_used(folder, monkeypatch):
    """Slower and with other roundings, so another target by its fingerprint."""
    own = load(folder, "int8")
    monkeypatch.setattr(rounded, "has_rounded_kernels", lambda: False)
    target = load(folder, "int8")
    assert target.forward_kind == "eager"
    assert not any(isinstance(module, TiledCodes) for module in target.model.modules())
    error = (logits(target) - logits(own)).abs() / logits(own).abs().max()
    assert float(error.mean()) < 0.02
    if any(isinstance(module, TiledCodes) for module in own.model.modules()):
        assert target.fingerprint != own.fingerprint
