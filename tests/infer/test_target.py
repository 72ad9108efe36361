"""The adapter against the stock forward: families, ragged rows, trees, taps, commits, refusals."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers

from heads.checkpoint import HeadCard
from infer.drafters import HeadDrafter, TreeSettings
from infer.engine import Engine
from infer.quantize import quantized_copy
from infer.rows import RowGroup, tree_group
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.infer.helpers import random_head, sampling
from tests.toy_tokenizer import toy_tokenizer

KINDS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")
# Float32 sums in another order: observed 1e-6..1e-5 on logits of size 1..10.
TOLERANCE = 1e-4

TOKENS = [5, 17, 3, 99, 42, 8, 77, 23, 61, 12, 4, 90, 31, 18, 55, 66, 7, 29]


def stock_logits(target: TargetModel, tokens: list[int]) -> torch.Tensor:
    with target.stock() as model, torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_ragged_rows_equal_the_stock_forward(kind, tiny_model):
    """Requests of unlike lengths in unlike slots, in one forward, then one more token each, past sliding windows."""
    target = TargetModel.wrap(tiny_model(kind))
    cache = target.new_cache(num_slots=4, num_columns=32)
    texts = {3: TOKENS, 0: TOKENS[4:9], 1: TOKENS[::-1][:13]}
    groups = [RowGroup(slot=slot, prefix=0, tokens=text[:-1]) for slot, text in texts.items()]
    logits = target.forward(groups, cache).logits
    last = target.forward(
        [RowGroup(slot=slot, prefix=len(text) - 1, tokens=text[-1:]) for slot, text in texts.items()], cache
    ).logits
    rows = logits.split([len(text) - 1 for text in texts.values()])
    for text, first, final in zip(texts.values(), rows, last, strict=True):
        torch.testing.assert_close(
            torch.cat([first, final[None]]), stock_logits(target, text), atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_tree_node_sees_its_own_path_only(kind, tiny_model):
    """Logits of each node in one forward equal those of its root-to-node path run alone (pitfall: siblings that see
    each other), also when the tree crosses a sliding window."""
    target = TargetModel.wrap(tiny_model(kind))
    cache = target.new_cache(num_slots=2, num_columns=40)
    prefix, root = TOKENS[:9], TOKENS[9]
    target.forward([RowGroup(slot=1, prefix=0, tokens=prefix)], cache)
    tokens, parents = [11, 12, 13, 14, 15, 16, 17], [-1, -1, 0, 0, 1, 3, 5]
    logits = target.forward([tree_group(1, len(prefix), [root], tokens, parents)], cache).logits
    for node in range(-1, len(tokens)):
        path, at = [], node
        while at != -1:
            path.insert(0, tokens[at])
            at = parents[at]
        expected = stock_logits(target, [*prefix, root, *path])[-1]
        torch.testing.assert_close(logits[node + 1], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_committed_branch_equals_a_sequential_run(kind, tiny_model):
    """After an accepted path through later siblings is moved down, keys and values equal those of a plain run
    (pitfall: a tree rolled back by one number)."""
    target = TargetModel.wrap(tiny_model(kind))
    prefix, root = TOKENS[:6], TOKENS[6]
    tokens, parents = [11, 12, 13, 14, 15, 16], [-1, -1, 1, 1, 3, 3]
    cache = target.new_cache(num_slots=2, num_columns=32)
    target.forward([RowGroup(slot=1, prefix=0, tokens=prefix)], cache)
    target.forward([tree_group(1, len(prefix), [root], tokens, parents)], cache)
    path = [1, 3, 5]
    cache.commit(1, len(prefix) + 1, [len(prefix) + 1 + node for node in path])
    text = [*prefix, root, *(tokens[node] for node in path)]
    expected = target.new_cache(num_slots=2, num_columns=32)
    target.forward([RowGroup(slot=1, prefix=0, tokens=text)], expected)
    for layer in range(target.num_layers):
        for got, want in zip(cache.read(layer, 1, 1, len(text)), expected.read(layer, 1, 1, len(text)), strict=True):
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox"])
def test_taps_are_hidden_states_indices(kind, tiny_model):
    """0 is the embeddings, i the output of layer i, and one beyond the last layer the state after the final norm. The
    library's own list is the reference: its last entry is that normed state, and the last layer's own output is held
    against a hook."""
    target = TargetModel.wrap(tiny_model(kind))
    captured = []
    handle = target.layers[-1].register_forward_hook(lambda module, args, output: captured.append(output))
    with target.stock() as model, torch.inference_mode():
        states = model(input_ids=torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    last = captured[-1][0] if isinstance(captured[-1], tuple) else captured[-1]
    expected = torch.cat([*(s[0] for s in states[:-1]), last.reshape(len(TOKENS), -1), states[-1][0]], dim=-1)
    cache = target.new_cache(num_slots=1, num_columns=32)
    taps = range(target.num_layers + 2)
    output = target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache, taps=taps, logit_rows=[3])
    torch.testing.assert_close(output.taps, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert output.logits.shape == (1, target.vocab_size)
    with pytest.raises(ValueError, match="tap 5 is out of range"):
        target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache, taps=[5])


def test_features_do_not_depend_on_the_batch(tiny_model):
    """Rows == tokens, whatever the batch size or order, and last states rebuild the model's own logits (pitfall: states
    stored for the wrong tokens; the final norm missing)."""
    target = TargetModel.wrap(tiny_model("llama"))
    texts = [TOKENS[:n] for n in (3, 18, 7, 1, 12)]
    small = target.features(texts, [1, 3], max_rows_per_forward=1)
    large = target.features(texts[::-1], [1, 3], max_rows_per_forward=4096)[::-1]
    for text, one, other in zip(texts, small, large, strict=True):
        assert one.taps.shape == (len(text), 2 * target.hidden_size)
        torch.testing.assert_close(one.taps, other.taps, atol=TOLERANCE, rtol=TOLERANCE)
        logits = one.last @ target.lm_head_weight.T
        torch.testing.assert_close(logits, stock_logits(target, text), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"vocab_size": 131},
    ],
)
def test_llama_variants(overrides, tiny_model):
    """Multi-head, one key/value head, biases, tied embeddings, odd vocabularies; the weights stay the model's own."""
    model = tiny_model("llama", **overrides)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = TargetModel.wrap(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    cache = target.new_cache(num_slots=1, num_columns=32)
    logits = target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache).logits
    torch.testing.assert_close(logits, stock_logits(target, TOKENS), atol=TOLERANCE, rtol=TOLERANCE)


def test_use_cache_false_in_a_config_is_no_obstacle(tiny_model):
    """A fine-tune saved with `use_cache: false` decodes like any other."""
    model = tiny_model("llama")
    model.config.use_cache = False
    TargetModel.wrap(model)


def test_unsupported_targets_are_refused_with_the_reason(tiny_model):
    """At load, not at token 17."""
    dynamic = tiny_model("llama")
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="dynamic RoPE"):
        TargetModel.wrap(dynamic)
    recurrent = tiny_model("llama")
    recurrent.config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="cannot be rolled back"):
        TargetModel.wrap(recurrent)
    with pytest.raises(ValueError, match="no target folder"):
        TargetModel.load("./does/not/exist")
    with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
        TargetModel.load("anything", dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cpu"):
            TargetModel.load("anything", device="cuda")


def mixture(**settings):
    """A tiny mixture whose sliding layers leave their window to the attention mask."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        **settings,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def test_a_window_that_only_the_mask_knows_is_refused(tiny_model):
    """Packed rows take no mask from the model: past such a window its tokens were silently not the stock model's."""
    with pytest.raises(ValueError, match=r"sliding window of 12 of its layers \[0\]"):
        TargetModel.wrap(mixture(use_sliding_window=True, sliding_window=12, max_window_layers=1))
    TargetModel.wrap(mixture(use_sliding_window=True, sliding_window=256, max_window_layers=1))  # never reached
    TargetModel.wrap(mixture(use_sliding_window=False, sliding_window=12))
    leftover = tiny_model("llama")
    leftover.config.sliding_window = 12  # another family's setting, which this one does not read
    TargetModel.wrap(leftover)


def test_a_model_that_drops_keyword_arguments_is_refused():
    """It was an assertion of ours, as if the caller had made the mistake."""
    config = transformers.StableLmConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with pytest.raises(ValueError, match="does not hand its keyword arguments on"):
        TargetModel.wrap(transformers.StableLmForCausalLM(config))


def test_a_model_that_makes_its_own_mask_is_refused():
    """A mask that depends on keys would be ignored, which the short text of the proof does not show."""
    config = transformers.DogeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="makes an attention mask of its own"):
        TargetModel.wrap(transformers.DogeForCausalLM(config))


def test_attention_that_differs_is_refused(tiny_model, monkeypatch):
    """The proof at load notices a model whose attention does something of its own."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0  # the stock forward below is given another scale than the packed one

    from infer import attention

    packed = attention.packed_attention
    monkeypatch.setattr(
        attention, "packed_attention", lambda *args, scaling=None, **kwargs: packed(*args, scaling=0.1, **kwargs)
    )
    with pytest.raises(ValueError, match="cannot be decoded exactly"):
        TargetModel.wrap(model)


def test_a_slot_too_short_is_a_clear_error(tiny_model):
    target = TargetModel.wrap(tiny_model("llama"))
    cache = target.new_cache(num_slots=1, num_columns=8)
    with pytest.raises(ValueError, match="needs 18 columns of the cache, but a slot has 8"):
        target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache)


def test_fingerprint_ignores_dtype_and_sees_weights(tiny_model):
    one = TargetModel.wrap(tiny_model("llama"))
    same = TargetModel.wrap(tiny_model("llama").to(torch.bfloat16))
    other = TargetModel.wrap(tiny_model("llama", seed=1))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_smollm2_packed_forward_equals_stock(smollm2_path):
    """The real target: a prefill in pieces beside a neighbour equals the stock forward. In float32 to rounding; in
    bfloat16 neither is right, so both are held against float32: ours may be off by as much as the stock one, give or
    take a half. A text of several kinds, for of a single sentence either may be off by half as much again as the other,
    on one processor and not on the next."""
    text = (
        "The capital of France is Paris, and the capital of Italy is Rome. The sea was calm that morning. Once upon a "
        "time a fox lived beside a river. Every evening it walked to the water and listened to the frogs, who told "
        "each other what they had seen during the day. def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n "
        "Photosynthesis is the process by which plants turn light, water and carbon dioxide into sugar and oxygen. In "
        "1969 two men walked on the Moon while a third stayed in orbit. They brought back 21.5 kilograms of rock and "
        "dust."
    )
    errors = {}
    for dtype in ("float32", "bfloat16"):
        target = TargetModel.load(smollm2_path, dtype=dtype)
        tokens = target.tokenizer(text)["input_ids"]
        cache = target.new_cache(num_slots=2, num_columns=192)
        groups = [RowGroup(slot=1, prefix=0, tokens=tokens[:5]), RowGroup(slot=0, prefix=0, tokens=tokens)]
        target.forward(groups, cache)
        logits = target.forward([RowGroup(slot=1, prefix=5, tokens=tokens[5:])], cache).logits
        stock = stock_logits(target, tokens)[5:]
        if dtype == "float32":
            torch.testing.assert_close(logits, stock, atol=1e-3, rtol=0)
            right = stock
        else:
            errors = {"ours": (logits - right).square().mean(), "stock": (stock - right).square().mean()}
    assert errors["ours"].sqrt() < 1.5 * errors["stock"].sqrt()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_loads_the_very_model_that_its_choice_names(dtype, tiny_model, tmp_path, monkeypatch):
    """It once cast the model that it had measured, which rounded weights and rotary frequencies to bfloat16."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0 if dtype == "bfloat16" else 3.0}
    monkeypatch.setattr("infer.target._forward_seconds", lambda model: seconds[model.dtype])
    monkeypatch.setattr("infer.target.has_kernels", lambda dtype: False)
    auto, named = (TargetModel.load(tmp_path, dtype=each, tokenizer=object()).model for each in ("auto", dtype))
    assert auto.dtype == named.dtype == getattr(torch, dtype)
    tensors = dict(named.named_parameters()) | dict(named.named_buffers())
    for name, tensor in (*auto.named_parameters(), *auto.named_buffers()):
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name


def test_auto_is_one_dtype_where_kernels_run(tiny_model, tmp_path, monkeypatch):
    """Measured beside other work it was now this, now that, and a server's answers changed with a restart."""
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("infer.target._forward_seconds", lambda model: pytest.fail("nothing is to be measured"))
    monkeypatch.setattr("infer.target.has_kernels", lambda dtype: dtype == torch.bfloat16)
    assert TargetModel.load(tmp_path, tokenizer=object()).dtype == torch.bfloat16


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        TargetModel.load(tmp_path, device="gpu")


# Targets that do not fit into one device's memory


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders of tiny models on disk, with tied and with separate LM heads."""
    root = tmp_path_factory.mktemp("stored")
    for name, tied in (("separate", False), ("tied", True)):
        model = make_tiny_model("llama", vocab_size=len(toy_tokenizer()), tie_word_embeddings=tied)
        model.save_pretrained(root / name)
        toy_tokenizer().save_pretrained(root / name)
    return root


APART = "head on disk, embedding in memory"


def maps(num_layers: int = 3) -> dict[str, dict[str, str] | str]:
    """Device maps that this machine can hold; `disk` is read again whenever a layer runs."""
    whole = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{layer}": "cpu" for layer in range(num_layers)}
    return {
        "auto": "auto",
        "sequential": "sequential",
        "memory": {**whole, **layers},
        "last layers on disk": {**whole, **layers, "model.layers.1": "disk", "model.layers.2": "disk"},
        "norm on disk": {**whole, **layers, "model.layers.2": "disk", "model.norm": "disk"},
        APART: {**whole, **layers, "lm_head": "disk"},
        "both ends on disk": {**whole, **layers, "model.embed_tokens": "disk", "lm_head": "disk"},
    }


@pytest.mark.parametrize("folder", ["separate", "tied"])
@pytest.mark.parametrize("name", [name for name in maps() if name != APART])
def test_a_device_map_changes_nothing_but_the_place(stored, tmp_path, folder, name):
    """Features, logits, what heads read, and the fingerprint are those of the target in memory; decoding with a draft
    runs. (A layer whose weights are not in memory must not be fused with its siblings.)"""
    expected = TargetModel.load(stored / folder, dtype="float32")
    target = TargetModel.load(stored / folder, dtype="float32", device_map=maps()[name], offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in target.model.parameters()) == ("disk" in name)
    assert target.device.type == "cpu"
    assert target.fingerprint == expected.fingerprint
    texts, taps = [TOKENS, TOKENS[:7]], (0, 2, 4)
    for one, other in zip(target.features(texts, taps), expected.features(texts, taps), strict=True):
        torch.testing.assert_close(one.taps, other.taps, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(one.last, other.last, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(target.lm_head_weight, expected.lm_head_weight)
    assert torch.equal(target.embedding_weight, expected.embedding_weight)
    assert target.num_weight_bytes == expected.num_weight_bytes
    head = random_head(target)
    engines = [
        Engine(one, HeadDrafter(head.bind(one.weights)), tree=TreeSettings(max_nodes=8, adaptive=False))
        for one in (target, expected)
    ]
    answers = [[one.token_ids for one in engine.generate([TOKENS[:5]], sampling())] for engine in engines]
    assert answers[0] == answers[1]
    if "disk" in name:
        with pytest.raises(ValueError, match="spread by a device map or quantised cannot run in parts"):
            target.truncated(2)
    with target.stock() as model, torch.inference_mode():
        again = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(again, stock_logits(expected, TOKENS), atol=TOLERANCE, rtol=TOLERANCE)


def test_tied_weights_are_placed_together(stored, tmp_path):
    """accelerate loses one that it is told to place apart from the other; its own maps never do."""
    TargetModel.load(stored / "separate", dtype="float32", device_map=maps()[APART], offload_folder=tmp_path)
    with pytest.raises(ValueError, match=r"places model\.embed_tokens and lm_head apart, .*tied"):
        TargetModel.load(stored / "tied", dtype="float32", device_map=maps()[APART], offload_folder=tmp_path)


def test_auto_precision_of_a_mapped_target_is_not_measured(stored):
    """Two copies of what does not fit once would be loaded for that."""
    assert TargetModel.load(stored / "tied", device_map="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int3"}, "quantization 'int3' is unknown: expected int8 or int4"),
        ({"device_map": "spread"}, "device_map 'spread' is unknown: expected auto, balanced"),
        ({"device_map": "auto", "device": "cuda:1"}, "a map places the model, leave the device out"),
        ({"device_map": "auto", "adapter": "x"}, "merge it into the model's folder first"),
    ],
)
def test_placements_that_cannot_be_are_refused(stored, settings, message):
    with pytest.raises(ValueError, match=message):
        TargetModel.load(stored / "tied", dtype="float32", **settings)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("build", [None, "12.8"])
def test_quantization_on_a_gpu_that_is_not_there_is_one_clear_line(stored, monkeypatch, quantization, build):
    """What, why and what to do, before anything is read (pitfall: a cryptic error of a CPU build much later)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    why = "a CPU build of torch is installed" if build is None else "no GPU is visible"
    expected = rf"an {quantization} target on a GPU goes through bitsandbytes.*{why}.*device 'cpu'"
    with pytest.raises(ValueError, match=expected):
        TargetModel.load(stored / "tied", quantization=quantization, device="cuda")


def test_quantization_says_what_is_missing_on_a_machine_with_a_gpu(stored, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        TargetModel.load(stored / "tied", quantization="int8", device="cuda")
    with pytest.raises(ValueError, match="pip install accelerate"):
        TargetModel.load(stored / "tied", device_map="auto")


class FakeQuantised(torch.nn.Linear):
    """As a quantising library's layer: a kind of linear layer whose weight cannot be multiplied as it is."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.scale = layer.weight.detach().abs().amax() / 127
        codes = (layer.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight.float() * self.scale)


def quantised(model):
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, FakeQuantised(child))
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return model


def test_a_quantised_target_decodes_and_is_nobody_else(tiny_model):
    """Its layers keep their own products and weights, its states are the stock forward's, its fingerprint is its own,
    and it is neither rounded again nor adapted nor trained."""
    target = TargetModel.wrap(quantised(tiny_model("llama")))
    whole = TargetModel.wrap(tiny_model("llama"))
    assert target.quantization == target.reference.quantization == "int8"
    assert target.fingerprint != whole.fingerprint
    assert all(layer.self_attn.q_proj.weight.dtype == torch.int8 for layer in target.layers)
    assert "forward" not in vars(target.layers[0].self_attn.q_proj)
    (features,) = target.features([TOKENS], [3])
    cache = target.new_cache(num_slots=1, num_columns=32)
    logits = target.forward([RowGroup(slot=0, prefix=0, tokens=TOKENS)], cache).logits
    torch.testing.assert_close(logits, stock_logits(target, TOKENS), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(features.last @ target.lm_head_weight.T, logits, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="weights are in int8 already"):
        quantized_copy(target, 8)
    head = HeadCard(target=target.reference)
    with pytest.raises(ValueError, match=r"trained on model in int8 .*load the target in int8 too \(--quantization"):
        whole.check_card(head)
    target.check_card(head)


def test_what_is_fetched_from_disk_is_not_rounded_again(stored, tmp_path):
    """A copy needs the weights themselves."""
    name = "last layers on disk"
    target = TargetModel.load(stored / "tied", dtype="float32", device_map=maps()[name], offload_folder=tmp_path)
    with pytest.raises(ValueError, match="not in memory"):
        quantized_copy(target, 8)
