"""Rounded weights: what they stand for, the kernels against it, and copies of targets that leave them as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infer import rounding
from infer.kernels import rounded
from infer.quantize import quantized_copy, unquantized_layers
from infer.rounding import RoundedLinear, RoundedProduct, TorchInt4, TorchInt8, dequantized
from infer.rows import RowGroup
from infer.target import TargetModel

needs_kernels = pytest.mark.skipif(not rounded.has_rounded_kernels(), reason="this machine cannot run the kernels")
KERNELS = [pytest.param(True, marks=needs_kernels, id="own kernels"), pytest.param(False, id="torch's kernels")]
KINDS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")
TOKENS = [5, 17, 3, 99, 42, 8, 77, 23, 61, 12, 4, 90, 31, 18, 55, 66, 7, 29]
HALF_STEP = 2**-8
"""bfloat16 keeps 8 bits: a value is off by at most this share of itself."""


@pytest.fixture
def on_kernels(request, monkeypatch):
    """Whether headstart's kernels run; else torch's."""
    if not request.param:
        monkeypatch.setattr(rounded, "has_rounded_kernels", lambda: False)
    return request.param


def random_linear(num_outputs: int, num_inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(num_inputs, num_outputs, bias=bias).requires_grad_(False)


def logits(target: TargetModel) -> torch.Tensor:
    cache = target.new_cache(num_slots=1, num_columns=32)
    return target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache).logits.clone()


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_errors_are_bounded(bits):
    """At most half a step of the grid, 1/254 of a group's largest weight or 1/30 of its span, and what bfloat16 scales
    and centres add: they are off by 2^-9 of themselves, over at most 127 steps or 8 and the centre."""
    weight = torch.randn((24, 96), generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 24)[:, None]
    error = (dequantized(weight, bits) - weight).abs()
    low, high = weight.unflatten(-1, (-1, 32)).aminmax(dim=-1)
    largest = torch.maximum(low.abs(), high.abs())
    if bits == 8:
        bound = largest / 254 + largest * HALF_STEP / 2
    else:
        bound = (high - low) / 30 + (high - low) * HALF_STEP + largest * HALF_STEP / 2
    bound = bound.repeat_interleave(32, dim=-1)
    assert bool((error <= bound * 1.001).all())
    assert float(error.max()) > 0


def test_weights_on_the_grid_stay_as_they_are():
    """A weight whose groups are 16 even steps apart, as dequantised models have, is not changed by rounding to 4 bits;
    a row of zeros is one of zeros in both forms."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 2, 32), generator=generator).float()
    codes[..., 0], codes[..., 1] = -8, 7
    weight = (codes * 2.0 ** torch.randint(-6, 3, (16, 2, 1), generator=generator)).flatten(1)
    assert torch.equal(dequantized(weight, 4), weight)
    for bits in (8, 4):
        assert not dequantized(torch.zeros(4, 64), bits).any()


@pytest.mark.parametrize("on_kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(1, 32, 16), (1, 64, 1), (3, 96, 17), (5, 32, 50), (2, 256, 80), (17, 64, 131), (0, 64, 20)],
)
def test_products_equal_the_reference(on_kernels, dtype, bits, num_rows, num_inputs, num_outputs):
    """Kernels against a product with the dequantised weight, odd sizes and no rows at all included, and the inputs at
    odd places of memory, which torch's int8 kernel cannot read (it would end the process). Own kernels: to the sums'
    rounding (2^-20 of their terms) and that of the result. torch's: each product is off by bfloat16's rounding of its
    input, of the weight and of the result."""
    linear = random_linear(num_outputs, num_inputs, bias=True).to(dtype)
    product = RoundedProduct([linear], bits)
    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(num_rows * num_inputs + 1, generator=generator).to(dtype)
    rows = padded[1:].view(num_rows, num_inputs)
    found = RoundedLinear(product, 0)(rows[None])
    assert found.dtype == dtype
    assert found.shape == (1, num_rows, num_outputs)
    weight = dequantized(linear.weight, bits, by_rows=bits == 8 and not on_kernels)
    read = rounded.rounded_inputs(rows) if on_kernels else rows.float()
    expected = F.linear(read, weight, linear.bias.float())
    scale = read.abs() @ weight.abs().T + linear.bias.float().abs()
    step = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: HALF_STEP}[dtype]
    bound = (step if on_kernels else 3 * HALF_STEP) * scale
    assert bool(((found[0].float() - expected).abs() <= bound).all())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_the_others(bits, dtype):
    """To the last bit: sums of small integers have no order, and groups are added up in theirs."""
    product = RoundedProduct([random_linear(70, 160)], bits)
    rows = torch.randn((41, 160), generator=torch.Generator().manual_seed(2)).to(dtype)
    together = product(rows)
    for width in (1, 2, 5, 6, 7, 12, 13, 24):
        assert torch.equal(torch.cat([product(part) for part in rows.split(width)]), together), width


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_stays_none(bits):
    """NaN or infinity among the inputs of a row must show in that row's results, and in no other's."""
    product = RoundedProduct([random_linear(40, 96)], bits)
    for bad in (float("nan"), float("inf"), -float("inf")):
        rows = torch.randn((3, 96), generator=torch.Generator().manual_seed(0))
        rows[1, 40] = bad
        found = product(rows)
        assert not bool(found[1].isfinite().any())
        assert bool(found[[0, 2]].isfinite().all())
    assert not product(torch.zeros(2, 96)).any()


def test_inputs_are_rounded_by_groups():
    """Off by half a step of 1/127 of a group's largest; what is on the grid stays, zeros too."""
    inputs = torch.randn((4, 96), generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3.0, 1.0)[:, None]
    top = inputs.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (rounded.rounded_inputs(inputs) - inputs).unflatten(-1, (-1, 32)).abs()
    assert bool((error <= top / 254 * 1.001).all())
    grid = torch.randint(-127, 128, (2, 64), generator=torch.Generator().manual_seed(0)).float()
    grid[:, ::32] = 127
    torch.testing.assert_close(rounded.rounded_inputs(grid), grid)
    assert not rounded.rounded_inputs(torch.zeros(1, 32)).any()


def test_torch_kernels_follow_the_codes_to_the_bit():
    """One input at a time, kernels give back the dequantised weight itself, but for bfloat16's last bit."""
    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(0))
    identity = torch.eye(64, dtype=torch.bfloat16)
    for bits, packed in ((8, TorchInt8(weight)), (4, TorchInt4(weight))):
        expected = dequantized(weight, bits, by_rows=bits == 8).to(torch.bfloat16)
        torch.testing.assert_close(packed(identity, None).T, expected, atol=0, rtol=HALF_STEP)


def test_siblings_share_one_product_and_mix_up_nothing():
    """In order over one input the product is computed once; out of order, or with another input in between, each layer
    still answers for its own input."""
    layers = [random_linear(size, 32, bias=True, seed=size) for size in (24, 8, 40)]
    product = RoundedProduct(layers, 8)
    shares = [RoundedLinear(product, index) for index in range(3)]
    alone = [RoundedLinear(RoundedProduct([layer], 8), 0) for layer in layers]
    inputs = [torch.randn((1, 4, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    calls: list[int] = []
    multiply = product.weight.forward
    product.weight.forward = lambda *given: (calls.append(1), multiply(*given))[1]
    for order in ([(0, 0), (1, 0), (2, 0)], [(0, 0), (2, 1), (1, 0)], [(2, 0), (1, 1), (0, 2), (1, 2), (2, 2)]):
        for layer, each in order:
            # To the last bit: rows of a product do not depend on how many others the weight has.
            torch.testing.assert_close(shares[layer](inputs[each]), alone[layer](inputs[each]), atol=0, rtol=0)
    assert len(calls) == 1 + 2 + 2  # the last order begins with a share that the one before left behind
    assert [share.out_features for share in shares] == [24, 8, 40]


def by_hand(model: nn.Module, bits: int) -> nn.Module:
    """A stock model with rounded weights, the LM head's in 8 bits, whose linear layers round their inputs."""
    output = model.get_output_embeddings()
    output.weight = nn.Parameter(dequantized(output.weight.data, 8))
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = dequantized(module.weight.data, bits)
        elif type(module).__name__ == "Conv1D":
            module.weight.data = dequantized(module.weight.data.T, bits).T.contiguous()
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            module.register_forward_pre_hook(lambda _, given: (rounded.rounded_inputs(given[0]),))
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_with_rounded_weights_and_shares_the_rest(tiny_model, kind, bits):
    """Every linear layer is rounded, and the copy's logits are those of a stock model that was given the rounded
    weights and rounds its inputs, by reference as by the kernels. A last bit may send an input to the next of its 255
    steps: few differ, and by no more than some steps in hundreds. Embeddings and norms are the target's own tensors.
    The target's weights and logits stay as they were, to the bit."""
    model = tiny_model(kind, **({"n_inner": 64} if kind == "gpt2" else {"intermediate_size": 64}))
    target = TargetModel.wrap(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    original = logits(target)
    exact, fast = quantized_copy(target, bits, kernels=False), quantized_copy(target, bits)
    assert not unquantized_layers(fast)
    assert fast.embedding_weight is target.embedding_weight
    assert fast.final_norm is target.final_norm
    assert fast.name == f"model in int{bits}"
    found = logits(exact)
    torch.testing.assert_close(logits(target), original, atol=0, rtol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert float((found - original).abs().max()) > 1e-3

    whole = by_hand(tiny_model(kind, **({"n_inner": 64} if kind == "gpt2" else {"intermediate_size": 64})), bits)
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    for computed in (found, logits(fast)):
        error = (computed - expected).abs() / expected.abs().max()
        assert float(error.max()) < 0.03
        assert float(error.mean()) < 0.003


def test_layers_that_do_not_fit_stay_as_they_are(tiny_model):
    """Of an MLP of 48, only the projection that reads it is not a multiple of 32; it stays the target's own module. A
    model with no layer that fits is refused."""
    target = TargetModel.wrap(tiny_model("llama", intermediate_size=48))
    copy = quantized_copy(target, 8)
    assert unquantized_layers(copy) == [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    assert copy.layers[0].mlp.down_proj is target.layers[0].mlp.down_proj
    assert float((logits(copy) - logits(target)).abs().max()) < 0.2 * float(logits(target).abs().max())
    small = TargetModel.wrap(
        tiny_model("llama", hidden_size=48, num_attention_heads=4, head_dim=12, intermediate_size=40)
    )
    with pytest.raises(ValueError, match="no linear layer whose input features are a multiple of 32"):
        quantized_copy(small, 8)


def test_a_copy_of_the_first_layers(tiny_model):
    """Rounding composes with truncation, either way round."""
    target = TargetModel.wrap(tiny_model("llama"))
    one = quantized_copy(target.truncated(2), 8)
    other = quantized_copy(target, 8).truncated(2)
    assert one.num_layers == other.num_layers == 2
    assert torch.equal(logits(one), logits(other))


def test_a_copy_is_a_target_of_its_own(tiny_model):
    """Fewer bytes, another fingerprint, rows of the LM head that can be read, and packed forwards that equal its own
    stock forward, as a target's must."""
    target = TargetModel.wrap(tiny_model("llama", intermediate_size=64))
    for bits in (8, 4):
        copy = quantized_copy(target, bits)
        assert copy.num_weight_bytes < target.num_weight_bytes / 3
        assert copy.fingerprint != target.fingerprint
        torch.testing.assert_close(copy.lm_head_weight, dequantized(target.lm_head_weight, 8), atol=0, rtol=HALF_STEP)
        with copy.stock() as model, torch.inference_mode():
            expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
        torch.testing.assert_close(logits(copy), expected, atol=0.02, rtol=0.02)


def test_what_cannot_multiply_is_refused(tiny_model, monkeypatch):
    """Other numbers of bits, devices without the kernels, builds of torch without them, and kernels that go wrong, each
    by name and with what to do instead."""
    target = TargetModel.wrap(tiny_model("llama"))
    with pytest.raises(ValueError, match="8 or 4 bits, 5 were asked for"):
        quantized_copy(target, 5)
    on_gpu = target.view(target.model)
    on_gpu.device = torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"int8 drafting multiplies on CPUs, and the target is on cuda:0: .*layers:N"):
        quantized_copy(on_gpu, 8)
    monkeypatch.setattr(rounded, "has_rounded_kernels", lambda: False)
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_weight_int4pack_mm_for_cpu")
        with pytest.raises(ValueError, match="has no _weight_int4pack_mm_for_cpu for int4 drafting"):
            quantized_copy(target, 4)
        quantized_copy(target, 8)  # does not need it
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_weight_int8pack_mm", lambda rows, codes, scales: rows @ codes.to(rows.dtype).T)
        with pytest.raises(ValueError, match="int8 products are off by a share of"):
            quantized_copy(target, 8)

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("illegal instruction")

    with monkeypatch.context() as patch:
        patch.setattr(rounding.TorchInt4, "forward", fails)
        with pytest.raises(ValueError, match=r"cannot multiply by int4 weights \(illegal instruction\)"):
            quantized_copy(target, 4)
