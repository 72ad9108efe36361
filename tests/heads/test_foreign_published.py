"""Checkpoints as their projects publish them, made small: configurations key by key as on the Hub or in the project's
own repository (sizes apart), tensors by the names that their code gives.

None of it is written by headstart: these are the folders that an import meets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heads.foreign import detect_format
from tests.heads import test_foreign, test_foreign_eagle1
from tests.heads.foreign_helpers import HIDDEN, VOCABULARY, World, assert_same_logits, make_world, own_logits, read

HEADS, GROUPS, SIZE, WIDE, DRAFT = 4, 2, 8, 48, 40
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_SMALL = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
}
_OLD = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}
_SPECULATORS = {
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": DRAFT,
    "has_no_defaults_at_init": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/Tiny"},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Published:
    """What the folder says and holds, the form it is of, and what of its configuration is more than names."""

    form: str
    config: dict[str, Any]
    layer: str = "midlayer"
    reduced: bool = True
    marks: bool = True
    norms: tuple[str, ...] = ()
    fc_bias: bool = False
    pickled: bool = False
    expected: tuple[tuple[str, Any], ...] = ()


PUBLISHED: dict[str, Published] = {
    "SafeAILab EAGLE-3 for Llama 3.1": Published(
        form="safeailab",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-05,
            "draft_vocab_size": DRAFT,
        },
        pickled=True,
        expected=(("taps", (2, 4, 5)), ("rope_theta", 10000.0)),
    ),
    "SafeAILab EAGLE-3 for Vicuna, of 40 layers by its own account": Published(
        form="safeailab",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 40,
            "rms_norm_eps": 1e-06,
            "draft_vocab_size": DRAFT,
        },
        pickled=True,
    ),
    "SpecForge's EAGLE-3 for Llama 3": Published(
        form="safeailab",  # it names no layers: the two forms mean the same
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-05,
            "draft_vocab_size": DRAFT,
        },
    ),
    "SpecForge's EAGLE-3.1 for Qwen3": Published(
        form="specforge",
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            **_OLD,
            **_SMALL,
            "fc_norm": True,
            "head_dim": SIZE,
            "max_position_embeddings": 2048,
            "max_window_layers": 48,
            "norm_output": True,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "draft_vocab_size": DRAFT,
        },
        norms=("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
        expected=(("fc_norm", True), ("norm_output", True), ("norm_before_residual", False)),
    ),
    "AngelSlim's EAGLE-3 for Qwen3": Published(
        form="safeailab",
        config={
            "architectures": ["Eagle3LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "head_dim": SIZE,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "draft_vocab_size": DRAFT,
        },
    ),
    "Nebius's EAGLE-3 for gpt-oss": Published(
        form="safeailab",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "head_dim": SIZE,
            "truncated_vocab_size": DRAFT,
            "draft_vocab_size": DRAFT,
            "rms_norm_eps": 1e-05,
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
    ),
    "speculators' EAGLE-3 for Llama 3.1": Published(
        form="speculators",
        config={
            "architectures": ["Eagle3Speculator"],
            **_SPECULATORS,
            "norm_before_residual": False,
            "speculators_version": "0.1.0.dev21",
            "transformer_layer_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "head_dim": SIZE,
                "hidden_act": "silu",
                **_SMALL,
                "initializer_range": 0.02,
                "max_position_embeddings": 131072,
                "mlp_bias": False,
                "model_type": "llama",
                "num_hidden_layers": 1,
                "pretraining_tp": 1,
                "rms_norm_eps": 1e-05,
                "rope_scaling": LLAMA3,
                "rope_theta": 500000.0,
                "use_cache": True,
            },
            "transformers_version": "4.53.1",
        },
        layer="layers.0",
        expected=(("rope_scaling", LLAMA3), ("norm_before_residual", False)),
    ),
    "speculators' EAGLE-3 for gpt-oss": Published(
        form="speculators",
        config={
            "architectures": ["Eagle3DraftModel"],
            **_SPECULATORS,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "speculators_version": "0.4.0.1",
            "transformer_layer_config": {
                "model_type": "llama",
                **_SMALL,
                "head_dim": SIZE,
                "num_hidden_layers": 1,
                "rms_norm_eps": 1e-05,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        layer="layers.0",
        norms=("input_norm.weight",),
        expected=(("norm_before_fc", True), ("norm_before_residual", True)),
    ),
    "Model-Optimizer's EAGLE-3 export": Published(
        form="modelopt",
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            **_SMALL,
            "initializer_range": 0.01,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_hidden_layers": 1,
            "pad_token_id": None,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "5.1.0",
            "use_cache": True,
            "draft_vocab_size": DRAFT,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": SIZE,
            "mlp_bias": False,
            "pretraining_tp": None,
            "rope_theta": 10000,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": 1,
            },
        },
        layer="layers.0",
        marks=False,
        expected=(("taps", (2, 4, 5)),),
    ),
    "Model-Optimizer's, of a full vocabulary": Published(
        form="modelopt",
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_act": "silu",
            **_SMALL,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-05,
            "draft_vocab_size": VOCABULARY,
            "rope_scaling": {"rope_type": "default", "rope_theta": 10000},
            "head_dim": SIZE,
            "rope_theta": 10000,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": None,
                "parallel_draft_heads_num_layers": None,
            },
        },
        layer="layers.0",
        reduced=False,
        marks=False,
        expected=(("taps", (2, 4, 5)), ("rope_scaling", None)),
    ),
    "SafeAILab EAGLE for Vicuna": Published(
        form="safeailab-eagle1",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **{key: value for key, value in _SMALL.items() if key != "num_key_value_heads"},
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-06,
        },
        fc_bias=True,
        pickled=True,
        expected=(("bias", True), ("num_key_value_heads", HEADS)),
    ),
    "SafeAILab EAGLE for Llama 3": Published(
        form="safeailab-eagle1",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "bias": False,
        },
        pickled=True,
        expected=(("bias", False), ("rope_theta", 500000.0)),
    ),
    "SafeAILab EAGLE for Mixtral": Published(
        form="safeailab-eagle1",
        config={
            "architectures": ["LlamaForCausalLM"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 4096,
            "model_type": "mixtral",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
        },
        fc_bias=True,
    ),
    "SGLang's copy of it for Llama 2": Published(
        form="sglang-eagle1",
        config={
            "architectures": ["LlamaForCausalLMEagle"],
            **_OLD,
            **_SMALL,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
        },
        fc_bias=True,
        expected=(("bias", True),),
    ),
}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def tensors_of(case: Published) -> dict[str, torch.Tensor]:
    """Random, by the names and shapes of the project's code."""
    is_eagle3 = "eagle1" not in case.form
    groups = case.config.get("num_key_value_heads", GROUPS if is_eagle3 else HEADS)
    prefix, width = (case.layer, 2 * HIDDEN) if is_eagle3 else ("layers.0", HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, (3 if is_eagle3 else 2) * HIDDEN),
        f"{prefix}.self_attn.q_proj.weight": (HEADS * SIZE, width),
        f"{prefix}.self_attn.k_proj.weight": (groups * SIZE, width),
        f"{prefix}.self_attn.v_proj.weight": (groups * SIZE, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{prefix}.mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, WIDE),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if is_eagle3:
        shapes |= {f"{prefix}.{norm}.weight": (HIDDEN,) for norm in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT if case.reduced else VOCABULARY, HIDDEN)}
        shapes |= {name: (3 * HIDDEN if name == "input_norm.weight" else HIDDEN,) for name in case.norms}
    if case.fc_bias:
        shapes["fc.bias"] = (HIDDEN,)
    chance = torch.Generator().manual_seed(7)
    spread = 0.3 if is_eagle3 else 0.15
    tensors = {
        name: float("norm" in name) + spread * torch.randn(shape, generator=chance) for name, shape in shapes.items()
    }
    if is_eagle3 and case.reduced:
        ids = torch.arange(1, VOCABULARY, 3)[:DRAFT]
        tensors["d2t"] = ids - torch.arange(DRAFT)
        if case.marks:
            tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_are_read_as_they_are_meant(name: str, world: World, tmp_path: Path) -> None:
    """The form is found, and drafts are what the project's own reading of the same folder drafts."""
    case = PUBLISHED[name]
    tensors = tensors_of(case)
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert detect_format(case.config, source="") == case.form
    layer = case.config.get("transformer_layer_config", case.config)
    for key, value in {"head_dim": SIZE, "num_key_value_heads": HEADS, "rope_theta": 10000.0}.items():
        if key != "rope_theta" or "rope_parameters" not in layer:
            layer.setdefault(key, value)  # the defaults of the projects' own configuration class, for the reference
    if "eagle1" in case.form:
        expected = _eagle1_reference(tmp_path, case, world)
    else:
        expected = _eagle3_reference(tmp_path, case, world)
    if case.pickled:
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    head = read(tmp_path, world).head
    assert_same_logits(own_logits(head, world), expected)
    for key, value in case.expected:
        assert getattr(head.config, key) == value


def _eagle3_reference(folder: Path, case: Published, world: World) -> list[torch.Tensor]:
    """Layers that are not named are the usual ones: inputs of 2, n//2, n-3, which are outputs of 1, n//2-1, n-4."""
    original = (folder / "config.json").read_text()
    config = json.loads(json.dumps(case.config))
    config.setdefault("eagle_config", {})
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    if case.form == "speculators":
        config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (folder / "config.json").write_text(json.dumps(config))
    expected = test_foreign.reference_logits(folder, world, case.form)
    (folder / "config.json").write_text(original)
    return expected


def _eagle1_reference(folder: Path, case: Published, world: World) -> list[torch.Tensor]:
    original = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(case.config))
    expected = test_foreign_eagle1.reference_logits(folder, world, case.form)
    (folder / "config.json").write_text(original)
    return expected
