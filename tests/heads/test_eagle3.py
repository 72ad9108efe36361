"""The EAGLE-3 network and its configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps, init_from_target, rotate
from heads.vocab import DraftVocabulary


@pytest.fixture
def config() -> Eagle3Config:
    return Eagle3Config(
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
        draft_vocab_size=40,
        taps=(1, 2, 3),
        eos_token_id=2,
    )


@pytest.fixture
def head(config: Eagle3Config) -> Eagle3Head:
    torch.manual_seed(0)
    vocabulary = DraftVocabulary.from_counts({5: 1}, size=40, vocab_size=128)
    return Eagle3Head(config, vocabulary).bind(torch.randn(128, 48))


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Plain causal attention over one sequence."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, is_causal=True
    ).transpose(0, 1)


def test_tensor_names_and_shapes_are_the_native_ones(head: Eagle3Head) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == {
        "midlayer.self_attn.q_proj.weight": [32, 96],
        "midlayer.self_attn.k_proj.weight": [16, 96],
        "midlayer.self_attn.v_proj.weight": [16, 96],
        "midlayer.self_attn.o_proj.weight": [48, 32],
        "midlayer.mlp.gate_proj.weight": [64, 48],
        "midlayer.mlp.up_proj.weight": [64, 48],
        "midlayer.mlp.down_proj.weight": [48, 64],
        "midlayer.hidden_norm.weight": [48],
        "midlayer.input_layernorm.weight": [48],
        "midlayer.post_attention_layernorm.weight": [48],
        "fc.weight": [48, 144],
        "norm.weight": [48],
        "lm_head.weight": [40, 48],
        "d2t": [40],
        "t2d": [128],
    }
    assert head.state_dict()["d2t"].dtype == torch.int64
    assert head.state_dict()["t2d"].dtype == torch.bool


@pytest.mark.parametrize("length", [1, 7, 500])
def test_shapes_at_every_hand_over(head: Eagle3Head, length: int) -> None:
    """The fused width is three times the hidden size; mixing the two up was once a crash on long prompts only."""
    fused = head.fuse(torch.randn(length, 3 * 48))
    assert fused.shape == (length, 48)
    states = head(torch.randint(0, 128, (length,)), fused, torch.arange(length), causal)
    assert states.shape == (length, 48)
    assert head.logits(states).shape == (length, 40)
    with pytest.raises(ValueError, match="3 tapped states of 48 = 144, got 48"):
        head.fuse(fused)


def test_equals_a_stock_llama_layer_on_the_state_half(config: Eagle3Config) -> None:
    """With the embedding half of q, k, v at zero the layer is Llama's own, so a copied layer computes what it did."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    llama = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(llama, layer_idx=0)
    head = Eagle3Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128)).bind(torch.randn(128, 48))
    lm_head = torch.randn(128, 48)
    final_norm = torch.nn.RMSNorm(48)
    filled = init_from_target(head, layer=layer, final_norm=final_norm, lm_head_weight=lm_head)
    assert "midlayer.self_attn.q_proj.weight" in filled
    assert "midlayer.input_layernorm.weight" not in filled
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.midlayer.self_attn, name).weight[:, :48] = 0
        states, positions = torch.randn(9, 48), torch.arange(9)
        rotary = LlamaRotaryEmbedding(llama)(states[None], positions[None])
        expected = layer(states[None], position_embeddings=rotary)
        expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(9, 48)
        result = head(torch.zeros(9, dtype=torch.int64), states, positions, causal)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.logits(result), final_norm(result) @ lm_head[head.target_ids].T)


def test_init_leaves_what_does_not_fit(config: Eagle3Config) -> None:
    """A target with another layer layout still gives its LM head; the rest stays random and is not reported."""
    head = Eagle3Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128))
    filled = init_from_target(
        head, layer=torch.nn.Linear(3, 3), final_norm=torch.nn.LayerNorm(48), lm_head_weight=torch.randn(128, 48)
    )
    assert set(filled) == {"norm.weight", "lm_head.weight"}


def test_rows_asked_for_equal_those_of_the_full_forward(head: Eagle3Head) -> None:
    """Rows that only give keys and values must not change the others."""
    tokens, states, positions = torch.randint(0, 128, (12,)), torch.randn(12, 48), torch.arange(12)
    rows = torch.tensor([2, 7, 11])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        padded = query.new_zeros(12, *query.shape[1:])
        padded[rows] = query
        return causal(padded, key, value)[rows]

    with torch.no_grad():
        full = head(tokens, states, positions, causal)
        some = head(tokens, states, positions, attend, rows=rows)
    torch.testing.assert_close(some, full[rows])


def test_only_differences_of_positions_matter(head: Eagle3Head) -> None:
    tokens, states = torch.randint(0, 128, (6,)), torch.randn(6, 48)
    with torch.no_grad():
        here = head(tokens, states, torch.arange(6), causal)
        there = head(tokens, states, torch.arange(6) + 1000, causal)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


def test_angles_survive_a_change_of_dtype(head: Eagle3Head) -> None:
    """A head served in bfloat16 turns by the angles it was trained with (its frequencies were once rounded with its
    weights, and angles at position 1,000 were off by more than a radian)."""
    positions = torch.tensor([1, 300, 1000])
    cos, sin = head._rotary(positions, torch.float32)
    narrow_cos, narrow_sin = head.to(torch.bfloat16)._rotary(positions, torch.float32)
    torch.testing.assert_close(narrow_cos, cos)
    torch.testing.assert_close(narrow_sin, sin)


def test_rotation_keeps_lengths() -> None:
    vectors = torch.randn(5, 3, 8)
    angles = torch.randn(5, 1, 4).repeat(1, 1, 2)
    torch.testing.assert_close(rotate(vectors, (angles.cos(), angles.sin())).norm(dim=-1), vectors.norm(dim=-1))


def test_head_without_embedding_says_so(head: Eagle3Head) -> None:
    fresh = Eagle3Head(head.config, head.vocabulary)
    with pytest.raises(RuntimeError, match="bind"):
        fresh(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 48), torch.zeros(1), causal)
    with pytest.raises(ValueError, match=r"shape \[128, 48\].*this target's are \[128, 32\]"):
        fresh.bind(torch.zeros(128, 32))


def test_config_survives_the_native_form(config: Eagle3Config) -> None:
    assert Eagle3Config.from_native(config.to_native()) == config


def test_taps_in_both_conventions_are_the_same_tensors(config: Eagle3Config) -> None:
    """hidden_states indices at the top level, outputs of 0-based layers inside eagle_config: off by one if mixed."""
    native = config.to_native()
    assert native["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert native["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    for dropped in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        assert Eagle3Config.from_native({k: v for k, v in native.items() if k != dropped}).taps == (1, 2, 3)
    with pytest.raises(ValueError, match="twice and differently"):
        Eagle3Config.from_native(native | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    bare = {k: v for k, v in native.items() if "eagle" not in k}
    assert Eagle3Config.from_native(bare, num_target_layers=30).taps == (2, 15, 27)
    with pytest.raises(ValueError, match="load it together with its target"):
        Eagle3Config.from_native(bare)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_before_residual", "yes"),
        ("fc_norm", True),
        ("norm_output", True),
        ("num_hidden_layers", 2),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("target_hidden_size", 64),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_variants_are_refused_by_name(config: Eagle3Config, key: str, value: object) -> None:
    """Ignoring such a flag computes something else: good training figures, poor acceptance when served."""
    with pytest.raises(ValueError, match=key):
        Eagle3Config.from_native(config.to_native() | {key: value})


def test_scaled_rotary_embeddings_are_refused(config: Eagle3Config) -> None:
    scaled = config.to_native() | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    with pytest.raises(ValueError, match="type 'llama3' are not supported"):
        Eagle3Config.from_native(scaled)


@pytest.mark.parametrize("taps", [(1, 2), (2, 1, 3), (0, 1, 2), (1, 1, 2), (1, 2, 3, 4)])
def test_wrong_taps_are_refused(config: Eagle3Config, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="reads 3 layer outputs in ascending order"):
        replace(config, taps=taps)


def test_default_taps_of_deep_and_shallow_targets() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (1, 2, 4)
    with pytest.raises(ValueError, match="only 2"):
        default_taps(2)
