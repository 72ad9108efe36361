"""The Hydra network, with and without its prefix layer, and its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import TargetWeights
from heads.checkpoint import HeadCard, TargetReference, load_head, save_head
from heads.hydra import HydraConfig, HydraHead, offset_of_tap, tap_of_offset
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model
from tests.heads.path_heads import (
    assert_training_is_decoding,
    causal,
    gradients,
    plan_of,
    random_batch,
    random_weights,
    randomize,
    unrolled_logits,
)

HIDDEN, VOCABULARY, DRAFTED, LAYERS = 24, 64, 20, 3
WEIGHTS = random_weights(VOCABULARY, HIDDEN)
CARD = HeadCard(
    target=TargetReference(
        name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    ),
    family="hydra",
)
PREFIX_SIZES = {
    "prefix_layer": True,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 3e-5,
}
KINDS = pytest.mark.parametrize("changes", [{}, PREFIX_SIZES], ids=["plain", "prefix"])


def make_config(**changes: Any) -> HydraConfig:
    config = HydraConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFTED,
        taps=(LAYERS + 1,),
        num_heads=3,
        num_layers=2,
    )
    return replace(config, **changes)


def make_head(**changes: Any) -> HydraHead:
    config = make_config(**changes)
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, VOCABULARY, 3), 1), size=config.draft_vocab_size, vocab_size=VOCABULARY
    )
    head = HydraHead(config, vocabulary)
    randomize(head)
    return head.bind(WEIGHTS)


def test_tensor_names_and_shapes_are_those_of_hydra() -> None:
    """Spelled as there: `prefix_embeding_layer`."""
    shapes = {name: list(tensor.shape) for name, tensor in make_head(num_heads=2, **PREFIX_SIZES).state_dict().items()}
    layer = "prefix_embeding_layer.layers.0"
    assert shapes == {
        "d2t": [DRAFTED],
        "t2d": [VOCABULARY],
        f"{layer}.self_attn.q_proj.weight": [24, HIDDEN],
        f"{layer}.self_attn.k_proj.weight": [12, HIDDEN],
        f"{layer}.self_attn.v_proj.weight": [12, HIDDEN],
        f"{layer}.self_attn.o_proj.weight": [HIDDEN, 24],
        f"{layer}.mlp.gate_proj.weight": [40, HIDDEN],
        f"{layer}.mlp.up_proj.weight": [40, HIDDEN],
        f"{layer}.mlp.down_proj.weight": [HIDDEN, 40],
        f"{layer}.input_layernorm.weight": [HIDDEN],
        f"{layer}.post_attention_layernorm.weight": [HIDDEN],
        "prefix_embeding_layer.norm.weight": [HIDDEN],
        "hydra_mlp.0.0.linear.weight": [HIDDEN, 2 * HIDDEN],
        "hydra_mlp.0.0.linear.bias": [HIDDEN],
        "hydra_mlp.0.0.res_connection.weight": [HIDDEN, 2 * HIDDEN],
        "hydra_mlp.0.0.res_connection.bias": [HIDDEN],
        "hydra_mlp.0.1.linear.weight": [HIDDEN, HIDDEN],
        "hydra_mlp.0.1.linear.bias": [HIDDEN],
        "hydra_mlp.1.0.linear.weight": [HIDDEN, 3 * HIDDEN],
        "hydra_mlp.1.0.linear.bias": [HIDDEN],
        "hydra_mlp.1.0.res_connection.weight": [HIDDEN, 3 * HIDDEN],
        "hydra_mlp.1.0.res_connection.bias": [HIDDEN],
        "hydra_mlp.1.1.linear.weight": [HIDDEN, HIDDEN],
        "hydra_mlp.1.1.linear.bias": [HIDDEN],
        "hydra_lm_head.0.weight": [DRAFTED, HIDDEN],
        "hydra_lm_head.0.bias": [DRAFTED],
        "hydra_lm_head.1.weight": [DRAFTED, HIDDEN],
        "hydra_lm_head.1.bias": [DRAFTED],
    }
    assert not any(name.startswith("prefix") for name in make_head().state_dict())
    assert (make_head().has_prefix_layer, make_head(**PREFIX_SIZES).has_prefix_layer) == (False, True)


@KINDS
def test_config_survives_the_native_form(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert HydraConfig.from_native(config.to_native(), num_target_layers=LAYERS) == config
    with pytest.raises(ValueError, match="load it together with its target"):
        HydraConfig.from_native(config.to_native())


def test_offsets_count_back_from_the_last_layer() -> None:
    """0 is the state after the final norm, which transformers puts in the last layer's place among `hidden_states`: the
    output of the last layer before that norm has no offset."""
    assert [tap_of_offset(offset, 30) for offset in (0, 1, 2, 29)] == [31, 29, 28, 1]
    assert [offset_of_tap(tap, 30) for tap in (31, 29, 28, 1)] == [0, 1, 2, 29]
    for offset in (-1, 30):
        with pytest.raises(ValueError, match=rf"hidden_state_offset is {offset}, expected 0 to 29"):
            tap_of_offset(offset, 30)
    for tap in (0, 30, 32):
        with pytest.raises(ValueError, match=rf"1 to 29\), got tap {tap}"):
            offset_of_tap(tap, 30)
    native = make_config(hidden_state_offset=2, taps=(1,)).to_native()
    assert HydraConfig.from_native(native, num_target_layers=LAYERS).taps == (1,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["MedusaModel"]),
        ("hydra_head_arch", "cross-attn"),
        ("hydra_head_arch", "eagle-attn"),
        ("grounded_heads", False),
        ("grounded_heads", None),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("hydra_num_heads", None),
        ("num_attention_heads", None),
        ("rms_norm_eps", None),
    ],
)
def test_variants_are_refused_by_name(key: str, value: object) -> None:
    native = make_config(**PREFIX_SIZES).to_native() | {key: value}
    with pytest.raises(ValueError, match=key):
        HydraConfig.from_native(native, num_target_layers=LAYERS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "at least one depth"),
        ({"num_layers": 0}, "at least one layer"),
        ({"taps": (1, 4)}, "reads one state"),
        (PREFIX_SIZES | {"num_key_value_heads": 3}, "share 3 key-value heads evenly"),
        (PREFIX_SIZES | {"head_dim": 5}, "even head dimension"),
        (PREFIX_SIZES | {"rms_norm_eps": 0.0, "intermediate_size": 0}, "needs its intermediate_size, rms_norm_eps"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**changes)


@pytest.mark.parametrize("original", ["res_connection", "identity"])
def test_a_block_is_what_the_paper_says(original: str) -> None:
    """Against the formula written out: Rx + b_R + SiLU(Wx + b) for the first, x + SiLU(Wx + b) for further ones."""
    head = make_head()
    depth, layer = (1, 0) if original == "res_connection" else (1, 1)
    tensors = {key.removeprefix(f"hydra_mlp.{depth}.{layer}."): value for key, value in head.state_dict().items()}
    inputs = torch.randn(5, HIDDEN * (3 if layer == 0 else 1))
    wide = inputs @ tensors["linear.weight"].T + tensors["linear.bias"]
    residual = inputs
    if original == "res_connection":
        residual = inputs @ tensors["res_connection.weight"].T + tensors["res_connection.bias"]
    with torch.no_grad():
        torch.testing.assert_close(head.hydra_mlp[depth][layer](inputs), residual + wide / (1 + (-wide).exp()))


def test_a_depth_reads_the_root_and_the_path_in_order() -> None:
    """[state; embedding of the root's token; embeddings of the drafted ones]: swapped tokens give other logits."""
    head = make_head(num_layers=1)
    root, path = torch.randn(1, HIDDEN), torch.tensor([[7, 3, 50]])
    inputs = torch.cat([root[0], *(WEIGHTS.embedding[token] for token in path[0].tolist())])
    with torch.no_grad():
        torch.testing.assert_close(head.draft(root, path, 2)[0], head.hydra_mlp[2](inputs))
        assert not torch.allclose(head.draft(root, path, 2), head.draft(root, path.flip(1), 2))


def test_the_lm_heads_bias_reaches_training_and_decoding() -> None:
    """Training takes it as columns beside the weights, decoding adds it."""
    head, states = make_head(), torch.randn(5, HIDDEN)
    with torch.no_grad():
        for depth in range(3):
            expected = states @ head.hydra_lm_head[depth].weight.T + head.hydra_lm_head[depth].bias
            inputs, weight = head.outputs(states, depth)
            torch.testing.assert_close(head.logits(states, depth), expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(inputs @ weight.T, expected, rtol=0, atol=1e-5)
            assert weight.shape[1] % 8 == 0


def test_the_prefix_layer_is_a_llama_of_one_layer() -> None:
    """Which is how the public code makes it, fed with the target's states in the place of embeddings."""
    from transformers import LlamaConfig, LlamaModel

    llama = LlamaModel(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            num_hidden_layers=1,
            rms_norm_eps=3e-5,
            vocab_size=VOCABULARY,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            attn_implementation="eager",
        )
    ).eval()
    head = make_head(**PREFIX_SIZES)
    prefix = "prefix_embeding_layer."
    own = {name.removeprefix(prefix): value for name, value in head.state_dict().items() if name.startswith(prefix)}
    missing, unexpected = llama.load_state_dict(own, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    states, tokens = torch.randn(15, HIDDEN), torch.zeros(15, dtype=torch.int64)
    with torch.no_grad():
        roots = head.roots(states, tokens, torch.arange(15), causal)
        torch.testing.assert_close(roots, llama(inputs_embeds=states[None]).last_hidden_state[0], rtol=1e-4, atol=1e-5)
        rows = torch.tensor([3, 14])

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            padded = torch.zeros(15, *query.shape[1:])
            padded[rows] = query
            return causal(padded, key, value)[rows]

        some = head.roots(states, tokens, torch.arange(15), attend, rows=rows)
        torch.testing.assert_close(some, roots[rows], rtol=1e-4, atol=1e-5)


@KINDS
def test_training_computes_what_decoding_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """At every depth, and again after a way to disk and back."""
    head, batch = make_head(**changes), random_batch(VOCABULARY, HIDDEN)
    logits = assert_training_is_decoding(head, batch, num_steps=3)
    again, card = load_head(save_head(tmp_path / "head", head, CARD), WEIGHTS)
    assert (card.family, again.config) == ("hydra", head.config)
    assert isinstance(again, HydraHead)
    for before, after in zip(logits, assert_training_is_decoding(again, batch, num_steps=3), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(("changes", "reach"), [({}, 0), (PREFIX_SIZES, 8)], ids=["plain", "prefix"])
def test_how_far_back_a_draft_sees(changes: dict[str, Any], reach: int) -> None:
    """A root's draft depends on no state behind it; on those before it in its own text with the prefix layer alone."""
    head, batch = make_head(**changes), random_batch(VOCABULARY, HIDDEN, lengths=(5, 14))
    plan = plan_of(batch, 1)
    before = unrolled_logits(head, batch, plan)[0]
    row = 5 + 3
    moved = replace(batch, taps=batch.taps + torch.nn.functional.one_hot(torch.tensor(row), 19)[:, None])
    changed = (unrolled_logits(head, moved, plan)[0] - before).abs().amax(-1) > 1e-4
    assert plan[0][changed].tolist() == [row, *(other for other in plan[0].tolist() if row < other <= row + reach)]


@KINDS
def test_gradients_reach_every_parameter(changes: dict[str, Any]) -> None:
    reached = gradients(make_head(**changes), random_batch(VOCABULARY, HIDDEN), num_steps=3)
    assert [name for name, gradient in reached.items() if gradient is None or not bool(gradient.any())] == []


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_an_untrained_head_is_the_targets_own_lm_head(kind: str) -> None:
    """Exactly, at every depth. (Gemma keeps its norms' weights less one, which must not matter.)"""
    _, head, states, logits = untrained(kind, num_layers=2)
    assert head.config.taps == (LAYERS + 1,)
    with torch.no_grad():
        for depth in range(3):
            path = torch.full((len(states), depth + 1), 9)
            own = head.logits(head.draft(states, path, depth), depth)
            torch.testing.assert_close(own, logits[:, head.target_ids], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_new_prefix_layer_is_nearly_not_there(kind: str) -> None:
    """It hands states on but for one factor a row, so the target's favourite stays the favourite. Where it reads the
    output of a layer, its norm is the target's final one, exactly."""
    _, head, states, logits = untrained(kind, prefix_layer=True)
    positions, tokens = torch.arange(len(states)), torch.zeros(len(states), dtype=torch.int64)
    with torch.no_grad():
        roots = head.roots(states, tokens, positions, causal)
        factor = roots / states
        torch.testing.assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-3, atol=1e-3)
        assert 0.5 < float(factor.min()) <= float(factor.max()) < 2
        own = head.logits(head.draft(roots, tokens[:, None], 0), 0)
    assert torch.equal(own.argmax(-1), logits[:, head.target_ids].argmax(-1))
    model, head, raw, _ = untrained(kind, prefix_layer=True, taps=(LAYERS - 1,))
    with torch.no_grad():
        torch.testing.assert_close(head.roots(raw, tokens, positions, causal), model.model.norm(raw))


def untrained(kind: str, **settings: Any) -> tuple[Any, HydraHead, torch.Tensor, torch.Tensor]:
    """A target, a new head for it, the states [T, H] that the head taps, and the target's logits [T, V]."""
    model: Any = make_tiny_model(kind, num_hidden_layers=LAYERS)
    lm_head = model.get_output_embeddings().weight.detach()
    config = HydraConfig.for_target(model.config, draft_vocab_size=50, vocab_size=len(lm_head), num_heads=3, **settings)
    vocabulary = DraftVocabulary.from_counts({100: 1, 77: 1}, size=50, vocab_size=len(lm_head))
    head = HydraHead(config, vocabulary)
    filled = head.init_from_target(layer=model.model.layers[-1], final_norm=model.model.norm, lm_head_weight=lm_head)
    assert {name for name in head.state_dict() if name.startswith(("hydra_lm_head", "prefix"))} <= set(filled)
    embedding = model.get_input_embeddings().weight.detach()
    head.bind(TargetWeights(embedding=embedding, lm_head=lm_head))
    with torch.no_grad():
        result = model(torch.arange(5, 17)[None], output_hidden_states=True)
    states = result.hidden_states[min(config.taps[0], LAYERS)][0]
    return model, head, states, result.logits[0]


def test_every_block_is_one_of_its_own() -> None:
    """The public code repeats one block object over the later layers of a depth, and so trains one in all places."""
    weights = [parameter for name, parameter in make_head(num_layers=4).named_parameters() if "linear.weight" in name]
    assert len({parameter.data_ptr() for parameter in weights}) == len(weights) == 3 * 4


def test_a_state_of_the_wrong_width_is_named() -> None:
    tokens = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="one tapped state of 24, got 72"):
        make_head().roots(torch.zeros(1, 3 * HIDDEN), tokens, tokens, causal)
