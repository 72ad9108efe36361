"""The EAGLE network: what it computes, how it is trained, and what of it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads.checkpoint import WEIGHTS_FILE, HeadCard, TargetReference, load_head, save_head
from heads.eagle1 import Eagle1Config, Eagle1Head
from heads.vocab import DraftVocabulary
from tests.heads.recurrent_heads import (
    HIDDEN,
    VOCABULARY,
    assert_training_is_decoding,
    causal,
    random_batch,
    random_weights,
    rows_of_steps,
)

LAYERS = 8
REFERENCE = TargetReference(
    name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
)
NAMES = {
    "layers.0.self_attn.q_proj.weight": [32, 48],
    "layers.0.self_attn.k_proj.weight": [16, 48],
    "layers.0.self_attn.v_proj.weight": [16, 48],
    "layers.0.self_attn.o_proj.weight": [48, 32],
    "layers.0.mlp.gate_proj.weight": [64, 48],
    "layers.0.mlp.up_proj.weight": [64, 48],
    "layers.0.mlp.down_proj.weight": [48, 64],
    "layers.0.post_attention_layernorm.weight": [48],
    "fc.weight": [48, 96],
}


@pytest.fixture
def config() -> Eagle1Config:
    return Eagle1Config(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        draft_vocab_size=40,
        taps=(LAYERS + 1,),
        eos_token_id=2,
    )


def random_head(config: Eagle1Config) -> Eagle1Head:
    """Every weight off its start, and small: no norm holds the states down."""
    torch.manual_seed(3)
    counts = dict.fromkeys(range(1, VOCABULARY, 3), 1)
    vocabulary = DraftVocabulary.from_counts(counts, size=config.draft_vocab_size, vocab_size=VOCABULARY)
    head = Eagle1Head(config, vocabulary).bind(random_weights())
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(float("norm" in name) + torch.randn_like(parameter) * 0.1)
    return head


def saved(head: Eagle1Head, folder: Path) -> Path:
    return save_head(folder, head, HeadCard(target=REFERENCE, family="eagle1"))


def test_tensors_are_those_of_the_public_code(config: Eagle1Config, tmp_path: Path) -> None:
    """With the full vocabulary nothing else is saved: no LM head, no norm, no embedding, no map."""
    full = replace(config, draft_vocab_size=VOCABULARY)
    tensors = load_file(saved(random_head(full), tmp_path / "full") / WEIGHTS_FILE)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == NAMES
    tensors = load_file(saved(random_head(replace(full, bias=True)), tmp_path / "bias") / WEIGHTS_FILE)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {**NAMES, "fc.bias": [48]}
    tensors = load_file(saved(random_head(config), tmp_path / "reduced") / WEIGHTS_FILE)
    assert tensors.keys() == NAMES.keys() | {"d2t", "t2d"}


def test_a_reduced_vocabulary_is_rows_of_the_target_s_lm_head(config: Eagle1Config) -> None:
    """Logits are the target's LM head at the draft tokens, exactly; nothing is copied of a full one."""
    head = random_head(config)
    states = torch.randn(5, HIDDEN)
    torch.testing.assert_close(head.logits(states), (states @ head.lent.lm_head.T)[:, head.target_ids])
    full = random_head(replace(config, draft_vocab_size=VOCABULARY))
    assert full.outputs(states, 0)[1].data_ptr() == full.lent.lm_head.data_ptr()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [40, VOCABULARY])
def test_training_is_decoding_after_save_and_load(
    bias: bool, draft_vocab_size: int, config: Eagle1Config, tmp_path: Path
) -> None:
    """At depths 1 to 5, with and without a map and a bias."""
    head = random_head(replace(config, bias=bias, draft_vocab_size=draft_vocab_size))
    again, _ = load_head(saved(head, tmp_path / "head"), head.lent)
    assert isinstance(again, Eagle1Head)
    assert again.config == head.config
    assert torch.equal(again.target_ids, head.target_ids)
    assert_training_is_decoding(again, num_taps=1)


def test_equals_a_stock_llama_layer_without_its_input_norm(config: Eagle1Config) -> None:
    """With `fc` passing the state on, the layer is Llama's whose first norm is left out, as the public code has it."""
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
    torch.nn.init.normal_(layer.post_attention_layernorm.weight, mean=1.0, std=0.3)
    head = random_head(config)
    own = head.layers[0]
    own.load_state_dict({name: layer.state_dict()[name] for name in own.state_dict()})
    layer.input_layernorm = torch.nn.Identity()
    with torch.no_grad():
        head.fc.weight.copy_(torch.cat([torch.zeros(48, 48), torch.eye(48)], dim=1))
        states, positions = torch.randn(9, 48), torch.arange(9)
        expected = layer(states[None], position_embeddings=LlamaRotaryEmbedding(llama)(states[None], positions[None]))
        expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(9, 48)
        result = head(torch.zeros(9, dtype=torch.int64), states, positions, causal)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_token_enters_beside_the_state(config: Eagle1Config) -> None:
    """[embedding; state] in this order, which the public code has (the other way round it runs as well, and drafts
    nothing)."""
    head = random_head(config)
    tokens, states = torch.randint(0, VOCABULARY, (6,)), torch.randn(6, HIDDEN)
    seen: list[torch.Tensor] = []
    head.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        head(tokens, states, torch.arange(6), causal)
        both = torch.cat([head.lent.embedding[tokens], states], dim=-1)
        torch.testing.assert_close(seen[0], both @ head.fc.weight.T)


def test_rows_asked_for_equal_those_of_the_full_forward(config: Eagle1Config) -> None:
    head = random_head(config)
    tokens, states, positions = torch.randint(0, 128, (12,)), torch.randn(12, HIDDEN), torch.arange(12)
    rows = torch.tensor([2, 7, 11])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        padded = query.new_zeros(12, *query.shape[1:])
        padded[rows] = query
        return causal(padded, key, value)[rows]

    with torch.no_grad():
        full = head(tokens, states, positions, causal)
        some = head(tokens, states, positions, attend, rows=rows)
    torch.testing.assert_close(some, full[rows])


# The objective.


def test_the_feature_loss_is_the_distance_to_the_state_that_predicts_the_same_token(config: Eagle1Config) -> None:
    """At step s row t predicts x[t+2+s], which the target does from its state at t+1+s. Written out by the paper's
    formula: Smooth L1 with its bend at 1, the mean over features, times the weight, for each row."""
    head = random_head(replace(config, feature_loss=3.0))
    batch = random_batch(1)
    plan = rows_of_steps(batch.lengths, 3)
    with torch.no_grad():
        for step, answer in enumerate(head.unroll(batch, plan)):
            expected = []
            for state, row in zip(answer.states, plan[step].tolist(), strict=True):
                distances = [
                    abs(one - other)
                    for one, other in zip(state.tolist(), batch.last[row + 1 + step].tolist(), strict=True)
                ]
                expected.append(3.0 * sum(d**2 / 2 if d < 1 else d - 0.5 for d in distances) / HIDDEN)
            assert answer.auxiliary is not None
            assert answer.auxiliary.tolist() == pytest.approx(expected, rel=1e-4)


def test_the_feature_loss_trains_the_head_to_give_the_target_s_next_state(config: Eagle1Config) -> None:
    """Alone, without the LM head: its gradient reaches every parameter, and descending it brings the states nearer."""
    head = random_head(config)
    batch, steps = random_batch(1), []
    plan = rows_of_steps(batch.lengths, 2)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(60):
        loss = sum(answer.auxiliary.sum() for answer in head.unroll(batch, plan) if answer.auxiliary is not None)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in head.parameters())
        optimizer.step()
        optimizer.zero_grad()
        steps.append(float(loss.detach()))
    assert steps[-1] < 0.5 * steps[0]


def test_no_feature_loss_is_none(config: Eagle1Config) -> None:
    head = random_head(replace(config, feature_loss=0.0))
    batch = random_batch(1)
    assert [answer.auxiliary for answer in head.unroll(batch, rows_of_steps(batch.lengths, 2))] == [None, None]


def test_noise_is_uniform_and_the_generator_s(config: Eagle1Config) -> None:
    """On the target's states and nothing else; the same from the same generators, none without one (evaluation), none
    where its width is 0. Of 48,000 draws from [-0.1, 0.1] the mean is off by 0.0003 (one sigma), and the outermost
    lie within 0.1 % of the bounds."""
    head = random_head(config)
    batch = random_batch(1, (600, 400))
    taps = batch.taps

    def noise_of(*seeds: int) -> torch.Tensor:
        return head.training_taps(batch, [torch.Generator().manual_seed(seed) for seed in seeds]) - taps

    noise, again, other = noise_of(1, 3), noise_of(1, 3), noise_of(2, 4)
    assert torch.equal(noise, again)
    assert not torch.equal(noise, other)
    assert 0.0998 < noise.abs().max() < 0.1001
    assert noise.mean().abs() < 0.0015
    assert noise.std() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert head.training_taps(batch, None) is taps
    assert random_head(replace(config, feature_noise=0.0)).training_taps(batch, [torch.Generator()] * 2) is taps


# The configuration.


def test_config_survives_the_native_form(config: Eagle1Config) -> None:
    for one in (config, replace(config, bias=True, feature_loss=1.5, feature_noise=0.2)):
        again = Eagle1Config.from_native(one.to_native(), num_target_layers=LAYERS)
        assert again == one
        assert (again.feature_loss, again.feature_noise) == (one.feature_loss, one.feature_noise)


def test_how_it_is_trained_is_no_part_of_what_it_is(config: Eagle1Config) -> None:
    assert replace(config, feature_loss=1.0, feature_noise=0.0) == config
    assert replace(config, bias=True) != config


def test_a_missing_bias_key_means_that_there_is_one(config: Eagle1Config) -> None:
    """As the public code has it."""
    native = config.to_native()
    del native["bias"]
    assert Eagle1Config.from_native(native, num_target_layers=LAYERS).bias


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("bias", "yes"),
        ("architectures", ["LlamaForCausalLM"]),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_what_would_change_the_forward_is_refused_by_name(config: Eagle1Config, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        Eagle1Config.from_native(config.to_native() | {key: value}, num_target_layers=LAYERS)


def test_it_reads_the_state_after_the_final_norm_and_no_other(config: Eagle1Config) -> None:
    llama = transformers.LlamaConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=8, vocab_size=128)
    made = Eagle1Config.for_target(llama, draft_vocab_size=40, vocab_size=128, feature_loss=1.0)
    assert (made.taps, made.feature_loss, made.bias) == ((9,), 1.0, False)
    assert Eagle1Config.for_target(llama, draft_vocab_size=40, vocab_size=128, taps=(9,)).taps == (9,)
    with pytest.raises(ValueError, match=r"after its final norm \(tap 9\), got taps \[8\]"):
        Eagle1Config.for_target(llama, draft_vocab_size=40, vocab_size=128, taps=(8,))
    with pytest.raises(ValueError, match="reads one state"):
        replace(config, taps=(2, 4, 5))
    with pytest.raises(ValueError, match="load it together with its target"):
        Eagle1Config.from_native(config.to_native())
    with pytest.raises(ValueError, match="expected one tapped state of 48, got 96"):
        random_head(config).fuse(torch.randn(3, 96))


def test_an_unbound_head_says_so(config: Eagle1Config) -> None:
    head = Eagle1Head(config, DraftVocabulary.from_counts({}, size=40, vocab_size=128))
    with pytest.raises(RuntimeError, match="bind"):
        head.logits(torch.zeros(1, HIDDEN))
    with pytest.raises(RuntimeError, match="bind"):
        head(torch.zeros(1, dtype=torch.int64), torch.zeros(1, HIDDEN), torch.zeros(1), causal)


def test_it_takes_nothing_over_from_the_target(config: Eagle1Config) -> None:
    """A start from the target's last layer was worse than a random one (its states are of another scale there)."""
    head = random_head(config)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    layer = LlamaDecoderLayer(transformers.LlamaConfig(hidden_size=48, num_attention_heads=4), layer_idx=0)
    filled = head.init_from_target(layer=layer, final_norm=torch.nn.RMSNorm(48), lm_head_weight=torch.randn(128, 48))
    assert filled == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
