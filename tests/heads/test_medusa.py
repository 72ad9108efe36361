"""The Medusa network and its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import TargetWeights
from heads.checkpoint import HeadCard, TargetReference, load_head, save_head
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocab import DraftVocabulary, VocabularyProvenance
from tests.conftest import make_tiny_model
from tests.heads.path_heads import assert_training_is_decoding, gradients, random_batch, random_weights, randomize

HIDDEN, VOCABULARY, DRAFTED, LAYERS = 24, 64, 20, 3
WEIGHTS = random_weights(VOCABULARY, HIDDEN)
CARD = HeadCard(
    target=TargetReference(
        name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    ),
    family="medusa",
)


def make_config(**changes: Any) -> MedusaConfig:
    config = MedusaConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFTED,
        taps=(LAYERS + 1,),
        num_heads=3,
        num_layers=2,
    )
    return replace(config, **changes)


def make_head(**changes: Any) -> MedusaHead:
    config = make_config(**changes)
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, VOCABULARY, 3), 1), size=config.draft_vocab_size, vocab_size=VOCABULARY
    )
    head = MedusaHead(config, vocabulary)
    randomize(head)
    return head.bind(WEIGHTS)


def test_tensor_names_and_shapes_are_those_of_vllm() -> None:
    shapes = {name: list(tensor.shape) for name, tensor in make_head(num_heads=2).state_dict().items()}
    assert shapes == {
        "token_map": [DRAFTED],
        "blocks.0.layers.0.weight": [HIDDEN, HIDDEN],
        "blocks.0.layers.0.bias": [HIDDEN],
        "blocks.0.layers.1.weight": [HIDDEN, HIDDEN],
        "blocks.0.layers.1.bias": [HIDDEN],
        "blocks.1.layers.0.weight": [HIDDEN, HIDDEN],
        "blocks.1.layers.0.bias": [HIDDEN],
        "blocks.1.layers.1.weight": [HIDDEN, HIDDEN],
        "blocks.1.layers.1.bias": [HIDDEN],
        "lm_heads.0.weight": [DRAFTED, HIDDEN],
        "lm_heads.1.weight": [DRAFTED, HIDDEN],
    }
    assert make_head().state_dict()["token_map"].dtype == torch.int64
    assert "token_map" not in make_head(draft_vocab_size=VOCABULARY).state_dict()
    assert not any("bias" in name for name in make_head(block_bias=False).state_dict())
    shared = make_head(original_lm_head=True).state_dict()
    assert [name for name in shared if name.startswith("lm_heads")] == ["lm_heads.0.weight"]


def test_vllm_reads_the_configuration_as_it_is_meant() -> None:
    """It takes every key with `num` and `heads` in it for the number of heads, and with `num` and `layers` for that of
    the layers, the last one winning: a `num_target_layers` beside ours would be taken for the number of blocks."""
    native = make_config(block_bias=True, original_lm_head=True).to_native()
    assert [key for key in native if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in native if "num" in key and "layers" in key] == ["num_hidden_layers"]
    assert native == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "vocab_size": VOCABULARY,
        "truncated_vocab_size": DRAFTED,
    }


@pytest.mark.parametrize("changes", [{}, {"block_bias": False, "original_lm_head": True, "draft_vocab_size": 64}])
def test_config_survives_the_native_form(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert MedusaConfig.from_native(config.to_native(), num_target_layers=LAYERS) == config
    with pytest.raises(ValueError, match="load it together with its target"):
        MedusaConfig.from_native(config.to_native())


def test_what_vllm_reads_without_being_told() -> None:
    """No biases, LM heads of their own and a full vocabulary, where keys are missing or null."""
    native = make_config().to_native() | {"truncated_vocab_size": None}
    for key in ("medusa_fc_bias", "original_lm_head"):
        del native[key]
    expected = make_config(block_bias=False, original_lm_head=False, draft_vocab_size=VOCABULARY)
    assert MedusaConfig.from_native(native, num_target_layers=LAYERS) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaForCausalLMEagle3"]),
        ("model_type", "llama"),
        ("logit_scale", 0.5),
        ("medusa_fc_bias", 1),
        ("original_lm_head", "no"),
        ("num_heads", None),
        ("hidden_size", None),
    ],
)
def test_variants_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        MedusaConfig.from_native(make_config().to_native() | {key: value}, num_target_layers=LAYERS)


@pytest.mark.parametrize("changes", [{"num_heads": 0}, {"num_layers": 0}, {"taps": (1, 4)}, {"draft_vocab_size": 65}])
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least one|reads one state|between 1 and the target's"):
        make_config(**changes)


def test_an_untrained_head_is_the_targets_own_lm_head() -> None:
    """Exactly, at every depth: the state that it taps is the one that the target's LM head reads, and its blocks change
    nothing yet."""
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    lm_head = model.get_output_embeddings().weight.detach()
    vocab_size = len(lm_head)
    config = MedusaConfig.for_target(
        model.config, draft_vocab_size=50, vocab_size=vocab_size, num_heads=2, num_layers=3
    )
    assert (config.num_heads, config.num_layers) == (2, 3)
    vocabulary = DraftVocabulary.from_counts({100: 1, 77: 1}, size=50, vocab_size=vocab_size)
    head = MedusaHead(config, vocabulary)
    filled = head.init_from_target(layer=model.model.layers[-1], final_norm=model.model.norm, lm_head_weight=lm_head)
    assert filled == ["lm_heads.0.weight", "lm_heads.1.weight"]
    tokens = torch.arange(5, 12)
    with torch.no_grad():
        result = model(tokens[None], output_hidden_states=True)
        assert config.taps == (LAYERS + 1,)
        assert len(result.hidden_states) == LAYERS + 1, "transformers gives the normed state for the last layer's"
        for depth in range(2):
            path = torch.zeros(len(tokens), depth + 1, dtype=torch.int64)
            logits = head.logits(head.draft(result.hidden_states[-1][0], path, depth), depth)
            torch.testing.assert_close(logits, result.logits[0][:, head.target_ids], rtol=0, atol=1e-5)


def test_other_taps_are_refused() -> None:
    """Neither file format has a place to say so."""
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS)
    sizes = {"draft_vocab_size": 128, "vocab_size": 128}
    assert MedusaConfig.for_target(model.config, taps=(LAYERS + 1,), **sizes).taps == (LAYERS + 1,)
    with pytest.raises(ValueError, match=r"taps \[4\]; got \[3\]: leave taps out"):
        MedusaConfig.for_target(model.config, taps=(LAYERS,), **sizes)


def test_every_block_is_one_of_its_own() -> None:
    """The public training code repeats one block object over the layers of a depth, and so trains one in all places."""
    weights = [parameter for name, parameter in make_head().named_parameters() if name.endswith("weight")]
    assert len({parameter.data_ptr() for parameter in weights}) == len(weights) == 3 * 2 + 3


@pytest.mark.parametrize("changes", [{}, {"original_lm_head": True}, {"block_bias": False}], ids=str)
def test_training_computes_what_decoding_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """At every depth, and again after a way to disk and back."""
    head, batch = make_head(**changes), random_batch(VOCABULARY, HIDDEN)
    logits = assert_training_is_decoding(head, batch, num_steps=3)
    again, card = load_head(save_head(tmp_path / "head", head, CARD), WEIGHTS)
    assert (card.family, again.config) == ("medusa", head.config)
    assert isinstance(again, MedusaHead)
    for before, after in zip(logits, assert_training_is_decoding(again, batch, num_steps=3), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("original_lm_head", [False, True])
def test_gradients_reach_every_parameter(original_lm_head: bool) -> None:
    """Of a new head, too, whose blocks are at zero; the target's LM head is no parameter."""
    for start in (randomize, lambda head: None):
        head = MedusaHead(make_config(original_lm_head=original_lm_head), make_head().vocabulary).bind(WEIGHTS)
        start(head)
        reached = gradients(head, random_batch(VOCABULARY, HIDDEN), num_steps=3)
        assert [name for name, gradient in reached.items() if gradient is None or not bool(gradient.any())] == []
        assert any(name.startswith("lm_heads") for name in reached) == (not original_lm_head)


def test_the_targets_lm_head_is_lent_and_saved(tmp_path: Path) -> None:
    """For vLLM, which wants it in the file. Before it is lent there is none, and nothing is saved."""
    head = MedusaHead(make_config(original_lm_head=True), make_head().vocabulary)
    with pytest.raises(ValueError, match=r"non-finite tensors: lm_heads\.0\.weight"):
        save_head(tmp_path / "early", head, CARD)
    head.bind(WEIGHTS)
    rows = WEIGHTS.lm_head[head.target_ids]
    states = torch.randn(2, HIDDEN)
    for depth in range(3):
        assert torch.equal(head.logits(states, depth), states @ rows.T)
    again, _ = load_head(save_head(tmp_path / "head", head, CARD))
    assert torch.equal(again.state_dict()["lm_heads.0.weight"], rows)
    other = TargetWeights(embedding=WEIGHTS.embedding, lm_head=2 * WEIGHTS.lm_head)
    assert torch.equal(again.bind(other).logits(states), 2 * head.logits(states))


def test_a_state_of_the_wrong_width_is_named() -> None:
    with pytest.raises(ValueError, match="one tapped state of 24, got 72"):
        make_head().draft(torch.zeros(1, 3 * HIDDEN), torch.zeros(1, 1, dtype=torch.int64), 0)


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        (None, "lack token_map: 20 draft tokens of 64 need their map"),
        (torch.arange(19), r"\[19\], expected \[20\]"),
        (torch.zeros(20, dtype=torch.int64), "twice"),
        (torch.arange(20).flip(0), "out of order"),
        (torch.arange(50, 70), r"target ids 50\.\.69"),
        (torch.arange(20.0), "int64"),
    ],
)
def test_faults_of_the_map_are_refused(token_map: torch.Tensor | None, message: str) -> None:
    tensors = {} if token_map is None else {"token_map": token_map}
    with pytest.raises(ValueError, match=message):
        MedusaHead.read_vocabulary(tensors, make_config(), VocabularyProvenance())


def test_the_map_survives() -> None:
    vocabulary = make_head().vocabulary
    buffers = MedusaHead.vocabulary_buffers(vocabulary)
    again = MedusaHead.read_vocabulary(buffers, make_config(), VocabularyProvenance())
    assert torch.equal(again.target_ids, vocabulary.target_ids)
    assert torch.equal(buffers["token_map"], vocabulary.target_ids), "vLLM's map holds target ids, not differences"
