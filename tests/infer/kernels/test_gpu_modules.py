"""Models and heads on the fused operations of decoder layers, in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from heads.base import PathHead, RecurrentHead
from heads.block import BlockHead
from infer.cache import SlotCache
from infer.drafters import TreeSettings, fused, reading
from infer.drafters.reading import decoding_view
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.graphs import rounds as graph_rounds
from infer.graphs import rows as graph_rows
from infer.graphs.capture import NoSync
from infer.graphs.drafting import StaticDraft
from infer.graphs.inputs import RoundInputs
from infer.graphs.rounds import StaticRound
from infer.graphs.rows import StaticRows, tree_rows
from infer.graphs.shapes import RoundShape
from infer.kernels.gpu import modules
from infer.kernels.gpu.elementwise import rms_norm_reference, rotate_and_store, silu_mul
from infer.kernels.gpu.match_walk import match_walk_reference
from infer.kernels.gpu.path_attention import path_attention_blocks
from infer.kernels.gpu.tree_attention import tree_attention_sdpa
from infer.rows import PACKED_ROWS, PackedRows, RowGroup, RowsAttend, tree_group
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head
from tests.infer.helpers import plain_ids, sampling
from tests.infer.kernels.gpu_scenes import random_tensor
from tests.infer.kernels.test_kernels import ALMOST_LLAMA

pytestmark = pytest.mark.usefixtures("interpreter", "nan_filled")

# What of each family is fused beside its siblings' products and norms. Gemma's MLP has another activation, Gemma-2
# squashes scores, its layers have more norms, and so on.
TAKEN = {
    "llama": {"Attention", "MLP", "DecoderLayer"},
    "qwen2": {"Attention", "MLP", "DecoderLayer"},
    "qwen3": {"Attention", "MLP", "DecoderLayer"},
    "gemma": {"Attention", "DecoderLayer"},
    "gemma2": set(),
    "gemma3": {"Attention"},
    "gpt_neox": set(),
    "gpt2": set(),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_fits_is_taken_and_nothing_else(kind: str, tiny_model: Callable[..., Any]) -> None:
    """A tree beside a text. In float32 the logits are the same to rounding; in bfloat16 roundings are torch's, so
    nearly all are the same to the bit."""
    groups = [tree_group(0, 0, [3, 4, 5], [6, 7, 8, 9], [-1, 0, 0, 1]), RowGroup(slot=1, prefix=0, tokens=[7, 8])]
    for dtype, most in ((torch.float32, 1.0), (torch.bfloat16, 0.02)):
        logits = []
        for way in ("eager", "triton"):
            target = TargetModel.wrap(of_two_layers(tiny_model, kind).to(dtype), forward=way)
            logits.append(target.forward(groups, target.new_cache(num_slots=2, num_columns=16)).logits)
        expected, found = logits
        error = 1e-5 if dtype is torch.float32 else 2**-6
        torch.testing.assert_close(found, expected, rtol=0, atol=error * float(expected.abs().max()))
        assert (found != expected).float().mean() <= most
        names = Counter(type(module).__name__ for module, _ in target.fused._forwards)
        taken = {name for name in names for part in ("Attention", "MLP", "DecoderLayer") if name.endswith(part)}
        assert len(taken) == len(TAKEN[kind])
        assert all(names[name] == 2 and any(name.endswith(part) for part in TAKEN[kind]) for name in taken)
    with torch.inference_mode(), target.stock() as stock:
        assert torch.equal(stock(input_ids=torch.tensor([[3, 4, 5]])).logits[0], logits_of_stock(kind, tiny_model))


def of_two_layers(tiny_model: Callable[..., Any], kind: str) -> Any:
    return tiny_model(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 2})


def logits_of_stock(kind: str, tiny_model: Callable[..., Any]) -> Tensor:
    model = of_two_layers(tiny_model, kind).to(torch.bfloat16)
    if kind == "gemma2":
        model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor([[3, 4, 5]])).logits[0]


@pytest.mark.parametrize("kind", ALMOST_LLAMA)
def test_what_looks_like_llama_is_computed_as_what_it_is(kind: str) -> None:
    """A text longer than the window, in float32, against the stock forward: a wrong module differs by far more."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 257, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, **ids, **ALMOST_LLAMA[kind])
    torch.manual_seed(0)
    target = TargetModel.wrap(transformers.AutoModelForCausalLM.from_config(config).eval().float(), forward="triton")
    tokens = [3 + 7 * i % 250 for i in range(18)]
    with torch.inference_mode(), target.stock() as stock:
        expected = stock(input_ids=torch.tensor([tokens])).logits[0]
    cache = target.new_cache(num_slots=1, num_columns=32)
    found = target.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def interleaved(*arguments: Tensor) -> Tensor:
    return rotate_and_store(*arguments).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


FAULTS = {
    "an activation without its gate's sign": ("silu_mul", lambda both: silu_mul(both.abs()), "MLP"),
    "a rotation by pairs": ("rotate_and_store", interleaved, "Attention"),
    "a norm without its epsilon": (
        "rms_norm_reference",
        lambda rows, weight, *, epsilon, form: rms_norm_reference(rows, weight, epsilon=0.0, form=form),
        "RMSNorm",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_computes_something_else_is_not_taken(
    fault: str, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried out at load catches a planted fault, and decoding goes on without the part."""
    name, faulty, part = FAULTS[fault]
    monkeypatch.setattr(modules, name, faulty)
    target = TargetModel.wrap(tiny_model("llama"), forward="triton")
    assert not [module for module, _ in target.fused._forwards if type(module).__name__.endswith(part)]


def test_a_next_norm_is_taken_for_the_same_tensor_only(tiny_model: Callable[..., Any]) -> None:
    """A layer norms what the next one reads. A hook that gives other states to the next layer is heard."""
    states = []
    for way in ("eager", "triton"):
        target = TargetModel.wrap(tiny_model("llama"), forward=way)
        handle = target.layers[0].register_forward_hook(lambda module, args, output: output + 1.0)
        group = [RowGroup(slot=0, prefix=0, tokens=[3, 4, 5])]
        states.append(target.forward(group, target.new_cache(num_slots=1, num_columns=8)).logits)
        handle.remove()
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


def test_gradients_flow_as_ever(tiny_model: Callable[..., Any]) -> None:
    target = TargetModel.wrap(tiny_model("llama"), forward="triton")
    embeddings = random_tensor(1, 3, 32, dtype=torch.float32).requires_grad_()
    group = PackedRows([RowGroup(slot=0, prefix=0, tokens=[3, 4, 5])], target.new_cache(num_slots=1, num_columns=8))
    states = target.layers[0](
        embeddings, position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)), **{PACKED_ROWS: group}
    )
    states.sum().backward()
    assert embeddings.grad is not None


def test_the_way_is_had_where_triton_is(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that interprets takes it when it is asked to, never by itself; others say what it needs."""
    assert TargetModel.wrap(tiny_model("llama")).forward_kind != "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"forward 'triton' cannot be had here, only '.*': .*one GPU"):
        TargetModel.wrap(tiny_model("llama"), forward="triton")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("row_width", [None, 16])
def test_static_rounds(
    kind: str, row_width: int | None, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, kept states and cache rows of a round of two trees, without a sync."""
    plain_attention(monkeypatch)
    results = []
    for way in ("eager", "triton"):
        target = TargetModel.wrap(of_two_layers(tiny_model, kind), forward=way)
        cache = target.new_cache(num_slots=3, num_columns=32)
        texts = {2: [5, 6, 7, 8, 9], 0: [3, 4]}
        target.forward([RowGroup(slot=slot, prefix=0, tokens=text[:-1]) for slot, text in texts.items()], cache)
        shape = RoundShape(batch=2, nodes=4, depth=2, context=16)
        kept = torch.zeros(3, 3, 2 * target.hidden_size)
        static = StaticRound(target, cache, shape, kept=kept, taps=(1, 2), row_width=row_width)
        for place, (slot, text) in enumerate(texts.items()):
            tree = ([1, 2, 3, 4], [-1, -1, 0, 1])
            static.inputs.place(place, slot=slot, num_cached=len(text) - 1, token=text[-1], tree=tree)
        static.inputs.upload()
        with NoSync():
            static.compute()
        results.append((torch.stack([static.logits(0), static.logits(1)]), cache.keys, cache.values, kept))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


class Launches(TorchDispatchMode):
    """Counts operations that a GPU starts something for."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(
            output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns
        )
        self.num += not is_view and "empty" not in func.name()
        return result


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Of what runs inside, fused operations included. Attention counts for none."""
    launches = Launches()

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            launches.num += 1
            with _disable_current_modes():
                return operation(*args, **kwargs)

        return once

    with pytest.MonkeyPatch.context() as patch, launches:
        for name in ("rms_norm", "add_rms_norm", "silu_mul", "rotate_and_store"):
            patch.setattr(modules, name, counted(getattr(modules, name)))
        for name in ("silu_mul", "rotary_tables"):
            patch.setattr(fused, name, counted(getattr(fused, name)))
        patch.setattr(graph_rows, "tree_attention", lambda query, *rest, **settings: query.transpose(0, 1))
        yield launches


def two_rows(cache: SlotCache) -> StaticRows:
    return tree_rows(
        cache,
        slots=torch.tensor([0]),
        prefixes=torch.tensor([0]),
        token_ids=torch.tensor([[5, 6]]),
        depths=torch.tensor([[0, 1]]),
        sees=torch.ones(1, 2, 2, dtype=torch.bool).tril(),
        max_prefix=4,
    )


def test_a_layer_takes_few_launches(tiny_model: Callable[..., Any]) -> None:
    """Four products, and beside attention four more: rotation with the cache, a norm, a gate, and a norm. What a layer
    takes is what a deeper model takes more."""
    num = {}
    for way in ("eager", "triton"):
        of_models = []
        for num_layers in (2, 3):
            target = TargetModel.wrap(tiny_model("llama", num_hidden_layers=num_layers), forward=way)
            rows = two_rows(target.new_cache(num_slots=1, num_columns=8))
            with counted_launches() as launches:
                target.forward_rows(rows)
            of_models.append(launches.num)
        num[way] = of_models[1] - of_models[0]
    assert num["triton"] == 4 + 4
    assert num["eager"] > 30


def test_a_draft_step_takes_few_launches(tiny_model: Callable[..., Any]) -> None:
    """An embedding, rotary tables, two norms side by side, four products with three operations between them, the sum
    with the next norm; and the LM head."""
    head = tiny_head("eagle3", TargetModel.wrap(tiny_model("llama"), forward="eager")).eval().requires_grad_(False)
    num = []
    for each in (head, decoding_view(head)):
        rows, states = two_rows(head_cache(head)), torch.ones(2, 32)
        with torch.inference_mode():
            each(rows.token_ids, states, rows.positions, RowsAttend(rows))  # joins weights
            with counted_launches() as launches:
                each.logits(each(rows.token_ids, states, rows.positions, RowsAttend(rows))[None], 1)
        num.append(launches.num)
    assert num[1] == 1 + 1 + 3 + 4 + 3 + 1 + 1
    assert num[0] > 40


def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and the walk are tested by themselves; in the interpreter they would take most of the time here."""
    monkeypatch.setattr(graph_rows, "tree_attention", tree_attention_sdpa)
    monkeypatch.setattr(graph_rows, "path_attention", path_attention_blocks)
    monkeypatch.setattr(graph_rounds, "match_walk", match_walk_reference)


def test_an_engine_emits_the_same_tokens(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, in static rounds whose trees a head grows."""
    plain_attention(monkeypatch)
    eager, target = (TargetModel.wrap(tiny_model("llama", vocab_size=48), forward=way) for way in ("eager", "triton"))
    prompts = [[5, 17, 3], [9, 9, 8, 7]]
    params = [replace(sampling(temperature), seed=1, max_tokens=5) for temperature in (0.0, 0.8)]
    expected = [plain_ids(eager, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    tree = TreeSettings(max_nodes=4, max_depth=2, branch=2, beam=2, adaptive=False)
    drafter = head_drafter(tiny_head("eagle3", target), target)
    completions = Engine(target, drafter, graphs=True, tree=tree).generate(prompts, params)
    assert [completion.token_ids for completion in completions] == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_grow_the_same_trees(
    variant: str, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's view on static shapes, through a text it has not read and a tree's own rows; without a sync."""
    plain_attention(monkeypatch)
    target = TargetModel.wrap(tiny_model("llama", vocab_size=48), forward="eager")
    head = tiny_head(variant, target).eval().requires_grad_(False)
    if not isinstance(head, RecurrentHead | PathHead | BlockHead):
        pytest.skip("it does not draft on static shapes")
    view = decoding_view(head)
    assert view is not head
    shape = RoundShape(batch=2, nodes=5, depth=3, context=16, branch=2, beam=2)
    taps = random_tensor(3, 2, len(head.config.taps) * target.hidden_size, dtype=torch.float32, seed=5)
    results = []
    for each in (head, view):
        inputs = RoundInputs(shape, max_pending=2, device=target.device)
        inputs.place(0, slot=2, num_cached=4, token=9, num_read=2, pending_tokens=[3, 9])
        inputs.place(1, slot=0, num_cached=1, token=7, num_read=0, pending_tokens=[7])
        inputs.upload()
        cache = head_cache(head)
        with torch.inference_mode(), NoSync() if each is view else nullcontext():  # a CPU's head looks up its rotations
            results.append(StaticDraft(each, cache=cache, pending=taps).grow(inputs.on_device(), shape))
        if cache is not None:
            results[-1] = (*results[-1], cache.keys, cache.values)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def head_cache(head: Any) -> SlotCache | None:
    """Of a head's own layer, if it has one. Columns that nobody wrote hold zeros."""
    if not getattr(head.config, "num_key_value_heads", 0):
        return None
    return reading.head_cache(head.config, num_slots=3, num_columns=32, dtype=head.dtype, device=torch.device("cpu"))


def draft_states(head: Any, seed: int = 0) -> Tensor:
    """The states of rows in an ordinary forward, below fused ones, and logits after them."""
    cache = head_cache(head)
    rows = PackedRows([tree_group(1, 0, [3, 4], [5, 6, 7], [-1, 0, 0])], cache)
    taps = random_tensor(5, len(head.config.taps) * head.config.hidden_size, dtype=head.dtype, seed=seed)
    with torch.inference_mode():
        states = head(rows.token_ids, head.fuse(taps), rows.positions, RowsAttend(rows))
        return torch.cat([states, head.logits(states, 0)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["eagle1", "eagle3", "eagle3 with every norm"])
def test_views_of_heads(variant: str, dtype: torch.dtype, tiny_model: Callable[..., Any]) -> None:
    """The same states in ordinary forwards; the head itself is left as it is; weights that change later are seen."""
    head = tiny_head(variant, TargetModel.wrap(tiny_model("llama").to(dtype), forward="eager"))
    head = head.eval().requires_grad_(False)
    before = {name: set(vars(module)) for name, module in head.named_modules()}
    view = decoding_view(head)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    for factor in (1.0, 1.5):
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(factor)
        expected, found = draft_states(head), draft_states(view)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    assert {name: set(vars(module)) for name, module in head.named_modules()} == before
