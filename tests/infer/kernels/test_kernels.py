"""The CPU kernels against torch's operations, and the property that they exist for: a row's bits depend on nothing but
the row."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from infer.attention import attend
from infer.cache import SlotCache
from infer.fuse import FusedModules
from infer.kernels import build
from infer.kernels.build import OFF, library
from infer.kernels.layers import norm_forward
from infer.kernels.paths import attend_paths, has_kernel
from infer.kernels.products import TiledWeight, is_tileable
from infer.rows import PackedRows, RowGroup, tree_group
from infer.target import TargetModel

needs_kernels = pytest.mark.skipif(library() is None, reason="this machine cannot run headstart's kernels")
DTYPES = [torch.float32, torch.bfloat16]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """To a rounding of the result: sums are taken in float32, in another order."""
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * max(scale, 1.0))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (31, 6), (32, 64), (33, 578), (100, 130)])
@pytest.mark.parametrize("num_rows", [1, 2, 13, 14, 15, 28, 29, 61])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_linear(dtype, num_outputs, num_inputs, num_rows, with_bias) -> None:
    """At sizes around those of tiles and passes; and nothing is written beyond the result."""
    torch.manual_seed(num_outputs + num_rows)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if with_bias else None
    rows = torch.randn(num_rows, num_inputs).to(dtype)
    expected = functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    close(TiledWeight(weight, bias)(rows), expected, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_products_row_has_the_same_bits_among_any_others(dtype) -> None:
    torch.manual_seed(0)
    product = TiledWeight(torch.randn(70, 96).to(dtype))
    rows = torch.randn(61, 96).to(dtype)
    whole = product(rows)
    for num_rows in range(1, 30):
        for first in (0, 7, 31):
            assert torch.equal(product(rows[first : first + num_rows]), whole[first : first + num_rows])


@needs_kernels
def test_products_take_rows_that_lie_apart() -> None:
    """Slices, transposed rows and leading dimensions."""
    torch.manual_seed(0)
    weight = torch.randn(40, 16)
    product = TiledWeight(weight)
    wide = torch.randn(5, 3, 48)
    for rows in (wide[..., 16:32], wide[:, 1, ::3], torch.randn(16, 7).T, wide[:0, 0, :16]):
        torch.testing.assert_close(product(rows), functional.linear(rows, weight))


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 4, dtype=torch.float16), torch.zeros(4, 4).double()],
)
def test_odd_pairs_and_other_dtypes_have_no_kernel(weight) -> None:
    assert not is_tileable(weight)


def filled_cache(dtype: torch.dtype, *, num_heads: int, head_size: int, num_columns: int = 64) -> SlotCache:
    """Three slots of numbers; the kernel must never use what a row does not see."""
    cache = SlotCache(
        num_layers=2,
        num_heads=num_heads,
        key_size=head_size,
        value_size=head_size,
        num_slots=3,
        num_columns=num_columns,
        dtype=dtype,
        device="cpu",
    )
    torch.manual_seed(1)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    return cache


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    return [rng.randrange(-1, node) for node in range(num_nodes)]


def some_groups(seed: int) -> list[RowGroup]:
    """A chain, a tree and a growing tree's rows, each in a slot."""
    rng = random.Random(seed)
    parents = random_parents(rng, 9)
    offset_mask = np.array([[True, False, True, False], [False, True, False, True]])
    return [
        RowGroup(slot=0, prefix=rng.randrange(0, 20), tokens=[1] * rng.randrange(1, 9)),
        tree_group(1, 19, [5, 6], [7] * 9, parents),
        RowGroup(
            slot=2, prefix=11, offset=2, offset_depths=(0, 0), tokens=[3, 4], depths=[1, 1], ancestors=offset_mask
        ),
    ]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (2, 2, 32), (10, 2, 96), (8, 1, 128)])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_equals_the_reference(dtype, num_heads, num_kv_heads, head_size, window) -> None:
    """For all kinds of row groups side by side, within windows or without."""
    cache = filled_cache(dtype, num_heads=num_kv_heads, head_size=head_size)
    assert has_kernel(cache, num_heads)
    groups = some_groups(0)
    num_rows = sum(len(group.tokens) for group in groups)
    torch.manual_seed(2)
    query, key, value = (torch.randn(n, num_rows, head_size).to(dtype) for n in (num_heads, num_kv_heads, num_kv_heads))
    rows = PackedRows(groups, cache, use_kernel=True)
    found = attend_paths(query, key, value, 1, rows, sliding_window=window, scaling=0.2)
    stored = cache.keys.clone()
    cache.write(1, rows.columns, key, value)
    assert torch.equal(cache.keys, stored), "keys lie where the reference puts them"
    wide = filled_cache(torch.float32, num_heads=num_kv_heads, head_size=head_size)
    wide.keys.copy_(cache.keys)
    wide.values.copy_(cache.values)
    expected = attend(query.float(), 1, PackedRows(groups, wide), sliding_window=window, scaling=0.2)
    close(found, expected, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
def test_a_node_gets_the_bits_of_the_same_text_in_place(dtype, window) -> None:
    """A path of a tree, its keys scattered among those of other branches, against the same rows as a chain."""
    num_heads, num_kv_heads, head_size, prefix = 6, 2, 32, 37
    parents = random_parents(random.Random(5), 14)
    group = tree_group(1, prefix, [5], [7] * 14, parents)
    num_rows = len(group.tokens)
    torch.manual_seed(3)
    rows = [torch.randn(n, num_rows, head_size).to(dtype) for n in (num_heads, num_kv_heads, num_kv_heads)]

    def attended(group: RowGroup, places: list[int]) -> torch.Tensor:
        cache = filled_cache(dtype, num_heads=num_kv_heads, head_size=head_size)
        parts = [part[:, places] for part in rows]
        packed = PackedRows([group], cache, use_kernel=True)
        return attend_paths(*parts, 0, packed, sliding_window=window)

    whole = attended(group, list(range(num_rows)))
    for node in range(14):
        path, up = [], node
        while up >= 0:
            path.append(1 + up)
            up = parents[up]
        places = [0, *reversed(path)]
        chain = RowGroup(slot=1, prefix=prefix, tokens=[1] * len(places))
        assert torch.equal(attended(chain, places)[-1], whole[1 + node])


@needs_kernels
def test_attention_uses_nothing_beyond_its_path() -> None:
    """NaN in every column that no row sees."""
    cache = filled_cache(torch.float32, num_heads=1, head_size=32)
    group = tree_group(1, 10, [5], [6, 7, 8], [-1, -1, 0])
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    for storage in (cache.keys, cache.values):
        storage.view(2, 1, 3, 64, 32)[:, :, 1, :10] = 0.5
    query, key, value = torch.randn(3, 4, 32).split(1)
    found = attend_paths(query, key, value, 0, PackedRows([group], cache, use_kernel=True))
    assert found.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_attention_of_extreme_scores(scale) -> None:
    """Scores far apart leave one weight, equal ones the mean; nothing overflows."""
    cache = filled_cache(torch.float32, num_heads=1, head_size=32)
    group = RowGroup(slot=0, prefix=40, tokens=[1])
    query, key, value = (scale * torch.randn(1, 1, 32), torch.randn(1, 1, 32), torch.randn(1, 1, 32))
    rows = PackedRows([group], cache, use_kernel=True)
    found = attend_paths(query, key, value, 0, rows)
    close(found, attend(query, 0, PackedRows([group], cache)), torch.float32)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 40, 576])
def test_norms_equal_their_modules(dtype, size) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    norm = LlamaRMSNorm(size).to(dtype)
    norm.weight.data += 0.3 * torch.randn(size).to(dtype)
    forward = norm_forward(norm)
    assert forward is not None
    rows = 3 * torch.randn(2, 5, size).to(dtype)
    with torch.inference_mode():
        close(forward(rows), norm(rows), dtype)


@needs_kernels
@pytest.mark.parametrize("weight", [-0.5, 50.0, 300.0])
def test_a_norm_that_adds_one_to_its_weight_is_told_apart(weight) -> None:
    """Gemma's: for large weights the two differ by less than bfloat16 shows."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    norm = Gemma3RMSNorm(64)
    norm.weight.data.fill_(weight)
    assert norm_forward(norm.to(torch.bfloat16)) is None
    assert norm_forward(nn.LayerNorm(64)) is None


def wide_target(tiny_model, kind: str, dtype: torch.dtype, forward: str = "auto") -> TargetModel:
    """A tiny model whose heads have a size that the attention kernel takes."""
    sizes = {"head_dim": 32} if kind not in ("qwen2", "gpt2", "gpt_neox") else {}
    if kind in ("qwen2", "gpt_neox"):
        sizes = {"hidden_size": 128}
    if kind == "gpt2":
        sizes = {"n_embd": 128}
    torch.manual_seed(0)
    return TargetModel.wrap(tiny_model(kind, **sizes).to(dtype), forward=forward)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma3"])
def test_targets_keep_their_bits_whatever_is_beside_them(tiny_model, kind, dtype) -> None:
    """The whole model: trees and neighbours against the same text read at once (`TargetModel.is_row_invariant`)."""
    assert wide_target(tiny_model, kind, dtype).is_row_invariant
    assert not wide_target(tiny_model, kind, dtype, forward="eager").is_row_invariant


@needs_kernels
def test_what_does_not_run_on_kernels_promises_nothing(tiny_model) -> None:
    """Squashed scores (Gemma-2) and small heads run on torch's attention."""
    assert not wide_target(tiny_model, "gemma2", torch.float32).is_row_invariant
    assert not TargetModel.wrap(tiny_model("llama")).is_row_invariant


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("forward", ["packed", "kernels"])
def test_every_way_equals_the_eager_forward(tiny_model, kind, forward) -> None:
    """And the stock model that is lent out for baselines is untouched by any of them."""
    if kind == "gpt2":
        pytest.skip("GPT-2 keeps its weights in layers of another kind")
    eager, other = (wide_target(tiny_model, kind, torch.float32, way) for way in ("eager", forward))
    group = tree_group(0, 0, [3, 4, 5], [6, 7, 8, 9], [-1, 0, 0, 1])
    logits = [each.forward([group], each.new_cache(num_slots=1, num_columns=16)).logits for each in (eager, other)]
    close(logits[1], logits[0], torch.float32)
    with torch.inference_mode(), eager.stock() as one, other.stock() as two:
        tokens = torch.tensor([[3, 4, 5]])
        torch.testing.assert_close(one(input_ids=tokens).logits, two(input_ids=tokens).logits, rtol=0, atol=1e-6)


# Families whose modules look like Llama's and are not: windows that the module does not name, factors on residuals, a
# clip, partial or interleaved rotation, rotation in float32, layers without any.
ALMOST_LLAMA = {
    "mistral": {"sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
    "granite": {"residual_multiplier": 0.22, "attention_multiplier": 0.05},
    "olmo": {"clip_qkv": 0.2},
    "ernie4_5": {},
    "helium": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ministral3": {},
}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ALMOST_LLAMA)
def test_what_looks_like_llama_is_decoded_as_what_it_is(kind, dtype) -> None:
    """A text longer than the window, and a tree at its end, against the stock forward. At the scale of random initial
    weights a wrong module differs by less than a coarse check at load sees; bfloat16 differs by roundings."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 257, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, **ids, **ALMOST_LLAMA[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    target = TargetModel.wrap(model.to(dtype))
    assert target.forward_kind == "kernels"
    tokens = [3 + 7 * i % 250 for i in range(40)]
    with torch.inference_mode(), target.stock() as stock:
        expected = stock(input_ids=torch.tensor([tokens])).logits[0].float()
    cache = target.new_cache(num_slots=1, num_columns=64)
    found = target.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache).logits.float()
    tree = tree_group(0, 36, [tokens[36]], [9, tokens[37], 8, tokens[38]], [-1, -1, 0, 1])
    branch = target.forward([tree], cache).logits.float()[[0, 2, 4]]
    error = max(float((found - expected).abs().max()), float((branch - expected[36:39]).abs().max()))
    assert error <= (1e-5 if dtype is torch.float32 else 0.03) * float(expected.abs().max())


@needs_kernels
def test_llama_runs_whole_modules_on_kernels(tiny_model) -> None:
    """Else nothing above would have tested them: attention, MLP and norms of each layer, and the final norm."""
    target = wide_target(tiny_model, "llama", torch.bfloat16)
    replaced = [type(module).__name__ for module, _ in target.fused._forwards]
    assert replaced.count("LlamaAttention") == replaced.count("LlamaMLP") == 3
    assert replaced.count("LlamaRMSNorm") == 7


def test_a_way_that_cannot_be_had_is_refused(tiny_model) -> None:
    with pytest.raises(ValueError, match="forward 'kernels' cannot be had here, only 'eager'"):
        TargetModel.wrap(tiny_model("llama").to(torch.float16), forward="kernels")
    with pytest.raises(ValueError, match="forward 'fast' is unknown: expected auto, eager, packed, kernels"):
        TargetModel.load("models/none", forward="fast")


def test_the_kernels_can_be_switched_off(monkeypatch) -> None:
    monkeypatch.setenv(OFF, "0")
    assert library.__wrapped__() is None


@needs_kernels
def test_a_broken_file_in_the_cache_is_made_anew(monkeypatch, tmp_path) -> None:
    """With a small source, for the kernels' own take long."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int seven() { return 7; }')
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    compiler, openmp = build._compiler(), build.torch_openmp()
    path = build._compiled(source, compiler, openmp)
    path.write_bytes(b"no library")
    assert build._loaded(source, compiler, openmp).seven() == 7


def test_weights_that_change_are_packed_anew(tiny_model) -> None:
    """A target whose weights are written to after it was loaded computes with the new ones."""
    model = tiny_model("llama")
    target = TargetModel.wrap(model)
    group = [RowGroup(slot=0, prefix=0, tokens=[3, 4, 5])]
    before = target.forward(group, target.new_cache(num_slots=1, num_columns=8)).logits
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
    after = target.forward(group, target.new_cache(num_slots=1, num_columns=8)).logits
    fresh = TargetModel.wrap(model).forward(group, target.new_cache(num_slots=1, num_columns=8)).logits
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, fresh)


def test_eager_siblings_share_one_weight(tiny_model) -> None:
    """The eager way keeps no second copy: the projections' weights are views of the fused one."""
    model = tiny_model("llama")
    FusedModules(model, "eager")
    attention = model.model.layers[0].self_attn
    storages = {
        attention.q_proj.weight.untyped_storage().data_ptr(),
        attention.k_proj.weight.untyped_storage().data_ptr(),
    }
    assert len(storages) == 1
