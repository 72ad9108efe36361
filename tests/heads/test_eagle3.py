"""The EAGLE-3 network and its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heads.base import DraftHead, TargetWeights
from heads.checkpoint import HeadCard, TargetReference, load_head, save_head
from heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from heads.layers import rotate
from heads.vocab import DraftVocabulary
from tests.heads.recurrent_heads import (
    HIDDEN,
    VOCABULARY,
    assert_training_is_decoding,
    causal,
    random_batch,
    random_weights,
    stepped_logits,
)


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
    return Eagle3Head(config, vocabulary).bind(random_weights())


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
    head = Eagle3Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128)).bind(random_weights())
    lm_head = torch.randn(128, 48)
    final_norm = torch.nn.RMSNorm(48)
    filled = head.init_from_target(layer=layer, final_norm=final_norm, lm_head_weight=lm_head)
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
    """A target with another layer layout and another kind of norm still gives its LM head; the rest is not reported."""
    head = Eagle3Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128))
    filled = head.init_from_target(
        layer=torch.nn.Linear(3, 3), final_norm=torch.nn.LayerNorm(48), lm_head_weight=torch.randn(128, 48)
    )
    assert set(filled) == {"lm_head.weight"}


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
        fresh.bind(TargetWeights(embedding=torch.zeros(128, 32), lm_head=torch.zeros(128, 48)))


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
        ("fc_norm", 1),
        ("norm_output", "true"),
        ("norm_before_fc", [True]),
        ("input_norm", True),
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


VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "all": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


def random_head(config: Eagle3Config) -> Eagle3Head:
    """Every weight off its start: norms of ones would hide one that is left out."""
    torch.manual_seed(3)
    head = Eagle3Head(config, DraftVocabulary.from_counts({5: 1}, size=40, vocab_size=128)).bind(random_weights())
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(float("norm" in name) + torch.randn_like(parameter) * 0.15)
    return head


def saved_and_loaded(head: DraftHead, folder: Path, *, family: str, num_layers: int = 8) -> DraftHead:
    target = TargetReference(
        name="tiny", fingerprint="f00d", num_layers=num_layers, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    save_head(folder, head, HeadCard(target=target, family=family))
    return load_head(folder, head.lent)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_decoding_after_save_and_load(variant: str, config: Eagle3Config, tmp_path: Path) -> None:
    """Of every variant, at depths 1 to 5: a head that looked good in training once served at a tenth of it, because one
    carried state was normalised in one place and not in the other."""
    head = random_head(replace(config, **VARIANTS[variant]))
    again = saved_and_loaded(head, tmp_path / "head", family="eagle3")
    assert again.config == head.config
    assert isinstance(again, Eagle3Head)
    assert_training_is_decoding(again, num_taps=3)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_each_variant_is_another_function(variant: str, config: Eagle3Config) -> None:
    """With the same weights where the plain head has them. norm_output shows from the second step on."""
    settings = VARIANTS[variant]
    head, plain = random_head(replace(config, **settings)), random_head(config)
    plain.load_state_dict({name: head.state_dict()[name] for name in plain.state_dict()})
    plain.bind(head.lent)
    batch = random_batch(3)
    with torch.no_grad():
        first = (stepped_logits(head, batch, 4, 1) - stepped_logits(plain, batch, 4, 1)).abs().max()
        third = (stepped_logits(head, batch, 4, 3) - stepped_logits(plain, batch, 4, 3)).abs().max()
    assert third > 0.05
    assert (first == 0) == (settings == {"norm_output": True})


def test_one_norm_or_the_other(config: Eagle3Config) -> None:
    """Public configurations forbid both; one after the other would norm twice."""
    with pytest.raises(ValueError, match="fc_norm and norm_before_fc are both true"):
        replace(config, fc_norm=True, norm_before_fc=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_survive_the_native_form(variant: str, config: Eagle3Config) -> None:
    """And a flag is written only where it is true: of files without flags nobody can think otherwise."""
    settings = VARIANTS[variant]
    native = replace(config, **settings).to_native()
    assert Eagle3Config.from_native(native) == replace(config, **settings)
    flags = native.keys() & {"fc_norm", "norm_before_fc", "norm_output"}
    assert flags == settings.keys() - {"norm_before_residual"}


# Rotary embeddings.

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_angles_are_those_of_the_target(kind: str) -> None:
    """A head made for a target with scaled rotary embeddings turns as the target's own layers do, amplitude included,
    and keeps that through `config.json`. Equal to float32 rounding of angles up to 500 radians."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {**SCALED[kind], "rope_theta": 500.0}
    llama = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=6, head_dim=8, num_hidden_layers=8, vocab_size=128, rope_parameters=rope
    )
    config = Eagle3Config.for_target(llama, draft_vocab_size=40, vocab_size=128)
    assert (config.rope_theta, config.rope_scaling) == (500.0, SCALED[kind])
    assert Eagle3Config.from_native(config.to_native()) == config
    head = Eagle3Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128))
    positions = torch.tensor([0, 1, 7, 500])
    cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1, 4, 48), positions[None])
    own_cos, own_sin = head._rotary(positions, torch.float32)
    torch.testing.assert_close(own_cos[:, 0], cos[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(own_sin[:, 0], sin[0], rtol=0, atol=1e-4)
    plain = Eagle3Head(replace(config, rope_scaling=None), head.vocabulary)._rotary(positions, torch.float32)
    assert (plain[1] - own_sin).abs().max() > 0.1


def test_scaled_angles_survive_a_change_of_dtype(config: Eagle3Config) -> None:
    head = Eagle3Head(
        replace(config, rope_scaling=SCALED["yarn"]), DraftVocabulary.from_counts({}, size=40, vocab_size=128)
    )
    before = head._rotary(torch.tensor([1, 300, 1000]), torch.float32)
    after = head.to(torch.bfloat16)._rotary(torch.tensor([1, 300, 1000]), torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 700.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 700.0},
    ],
)
def test_a_head_for_a_target_of_other_angles_has_plain_ones(rope: dict[str, Any]) -> None:
    """A head's angles are its own affair: what cannot be computed alike must not keep the target from having one."""
    llama = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=6, head_dim=8, num_hidden_layers=8, vocab_size=128, rope_parameters=rope
    )
    config = Eagle3Config.for_target(llama, draft_vocab_size=40, vocab_size=128)
    assert (config.rope_theta, config.rope_scaling) == (700.0, None)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks low_freq_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope'; draft heads have"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta is said to be 7 and 10000"),
        (
            {"rope_scaling": SCALED["yarn"], "rope_parameters": SCALED["linear"]},
            "rope_scaling is .*yarn.*, but rope_parameters say .*linear",
        ),
        ({"rope_scaling": {**SCALED["yarn"], "truncate": 1}}, "truncate is 1, expected true or false"),
    ],
)
def test_other_angles_are_refused(config: Eagle3Config, rope: dict[str, Any], message: str) -> None:
    """Servers would turn by what `config.json` says, so ignoring it computes something else."""
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_native(config.to_native() | rope)


@pytest.mark.parametrize("taps", [(1, 2), (2, 1, 3), (0, 1, 2), (1, 1, 2), (1, 2, 3, 4)])
def test_wrong_taps_are_refused(config: Eagle3Config, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="reads 3 layer outputs in ascending order"):
        replace(config, taps=taps)


def test_default_taps_of_deep_and_shallow_targets() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (1, 2, 4)
    with pytest.raises(ValueError, match="only 2"):
        default_taps(2)
