"""The adapter against the stock forward: families, ragged rows, trees, taps, commits, refusals."""

from __future__ import annotations

import pytest
import torch
import transformers

from infer.rows import RowGroup, tree_group
from infer.target import TargetModel

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_packed_forward_equals_stock(dtype, smollm2_path):
    """The real target: a prefill in pieces beside a neighbour equals the stock forward (float32 to rounding; in bf16
    the stock forward itself moves by this much when its width changes)."""
    target = TargetModel.load(smollm2_path, dtype=dtype)
    tokens = target.tokenizer("The capital of France is Paris, and the capital of Italy is")["input_ids"]
    cache = target.new_cache(num_slots=2, num_columns=64)
    target.forward([RowGroup(slot=1, prefix=0, tokens=tokens[:5]), RowGroup(slot=0, prefix=0, tokens=tokens)], cache)
    logits = target.forward([RowGroup(slot=1, prefix=5, tokens=tokens[5:])], cache).logits
    tolerance = 1e-3 if dtype == "float32" else 0.7
    torch.testing.assert_close(logits, stock_logits(target, tokens)[5:], atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_loads_the_very_model_that_its_choice_names(dtype, tiny_model, tmp_path, monkeypatch):
    """It once cast the model that it had measured, which rounded weights and rotary frequencies to bfloat16."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0 if dtype == "bfloat16" else 3.0}
    monkeypatch.setattr("infer.target._forward_seconds", lambda model: seconds[model.dtype])
    auto, named = (TargetModel.load(tmp_path, dtype=each, tokenizer=object()).model for each in ("auto", dtype))
    assert auto.dtype == named.dtype == getattr(torch, dtype)
    tensors = dict(named.named_parameters()) | dict(named.named_buffers())
    for name, tensor in (*auto.named_parameters(), *auto.named_buffers()):
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        TargetModel.load(tmp_path, device="gpu")
