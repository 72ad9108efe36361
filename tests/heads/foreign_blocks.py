"""Heads that draft in one pass, in other projects' forms: what tests of them share. Such heads, what they draft here,
and what their files mean by the public definitions (`foreign_reference`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.block import BlockHead
from heads.checkpoint import WEIGHTS_FILE
from heads.dflash import DFlashConfig, DFlashHead
from heads.peagle import PEagleConfig, PEagleHead
from heads.vocab import DraftVocabulary
from tests.heads.foreign_helpers import HIDDEN, VOCABULARY, Config, Tensors, World, read_config
from tests.heads.foreign_reference import block_layer, decoder_layer, norm

MASK = 127
DEPTHS = 3


def make_head(family: str, **changes: Any) -> BlockHead:
    """Random, norms included (weights of one would hide a swap), with every optional setting off its default."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "taps": (2, 4, 5) if family == "peagle" else (1, 4),
        "rms_norm_eps": 3e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_layers": 2,
        "num_depths": DEPTHS,
        "mask_token_id": MASK,
        **changes,
    }
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, VOCABULARY, 3), 1), size=settings["draft_vocab_size"], vocab_size=VOCABULARY
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head: BlockHead
        if family == "peagle":
            head = PEagleHead(PEagleConfig(**settings), vocabulary)
        else:
            head = DFlashHead(DFlashConfig(**settings), vocabulary)
        for name, parameter in head.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return head


# Our side.


def own_logits(head: BlockHead, world: World) -> list[torch.Tensor]:
    """Logits over target ids [V] (-inf where there is no draft token) of a greedy draft behind the text, depth by
    depth."""
    head.bind(world.weights)
    taps = torch.cat([world.taps[tap] for tap in head.config.taps], dim=-1)[:-1]
    text = head.text_inputs(taps, world.token_ids[1:])
    inputs = torch.cat([text, head.place_inputs(world.token_ids[-1:], text.dtype)[0]])
    places = torch.arange(len(text), len(inputs))
    wanted = len(text) - 1 + head.first_place + torch.arange(head.config.num_depths)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: str) -> torch.Tensor:
        rows = {"all": torch.arange(len(inputs)), "places": places, "wanted": wanted}[asking]
        shared = query.shape[1] // key.shape[1]
        every_key, every_value = (one.repeat_interleave(shared, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, every_key) / math.sqrt(query.shape[-1])
        hidden = torch.arange(len(inputs)) > rows[:, None]
        if head.sees_ahead:
            hidden &= rows[:, None] < len(text)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), every_value)

    with torch.no_grad():
        states = head(inputs, torch.arange(len(inputs)), attend, places=places, wanted=wanted)
        result, previous = [], world.token_ids[-1]
        for depth in range(head.config.num_depths):
            logits = head.base_logits(states[depth])
            if head.config.markov_rank:
                logits = logits + head.correction(states[depth], previous)
            everywhere = torch.full((VOCABULARY,), -math.inf)
            everywhere[head.target_ids] = logits
            result.append(everywhere)
            previous = everywhere.argmax()
    return result


# The other side: what each project means by its files.


def reference_logits(folder: Path, world: World, name: str) -> list[torch.Tensor]:
    config, tensors = read_config(folder), load_file(folder / WEIGHTS_FILE)
    if "peagle" in name:
        return peagle_logits(config, tensors, world, name)
    return dflash_logits(config, tensors, world, name)


def peagle_logits(config: Config, tensors: Tensors, world: World, name: str) -> list[torch.Tensor]:
    """One causal pass: a row of text reads the embedding of the next token beside its fused state, a place that of the
    mask token beside `mask_hidden`, fused alike. What vLLM collects before layer i runs is tapped."""
    layer = config.get("transformer_layer_config", config)
    if name == "speculators-peagle":
        mask, places = (
            config["mask_token_id"],
            config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
        )
    else:
        mask, places = config["ptd_token_id"], config["num_depths"]
    eps = layer["rms_norm_eps"]
    taps = [world.inputs[index] for index in config["eagle_aux_hidden_state_layer_ids"]]
    rows = torch.cat(taps, dim=-1)[:-1]
    rows = torch.cat([rows, tensors["mask_hidden"].view(1, -1).repeat(places - 1, 1)])
    if config.get("norm_before_fc"):
        rows = norm(rows, tensors["input_norm.weight"], eps)
    if config.get("fc_norm"):
        parts = rows.chunk(3, dim=-1)
        rows = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], dim=-1)
    states = rows @ tensors["fc.weight"].T
    embedding = tensors.get("embed_tokens.weight", world.weights.embedding)
    embedded = embedding[torch.cat([world.token_ids[1:], torch.full((places - 1,), mask)])]
    both = [
        norm(embedded, tensors["layers.0.input_layernorm.weight"], eps),
        norm(states, tensors["layers.0.hidden_norm.weight"], eps),
    ]
    residual = both[1] if config["norm_before_residual"] else states
    states = decoder_layer(torch.cat(both, dim=-1), residual, tensors, "layers.0", layer)
    for number in range(1, layer["num_hidden_layers"]):
        normed = norm(states, tensors[f"layers.{number}.input_layernorm.weight"], eps)
        states = decoder_layer(normed, states, tensors, f"layers.{number}", layer)
    logits = norm(states[-places:], tensors["norm.weight"], eps) @ tensors["lm_head.weight"].T
    return [everywhere(one, tensors) for one in logits]


def dflash_logits(config: Config, tensors: Tensors, world: World, name: str) -> list[torch.Tensor]:
    """The fused states of the text behind `hidden_norm` are the context of a block: the anchor (the last token), then
    mask tokens. Each place's logits, and what DSpark adds to them for the token before."""
    nested, layer = config.get("dflash_config", {}), config.get("transformer_layer_config", config)
    eps, size = layer["rms_norm_eps"], config.get("block_size") or nested["block_size"]
    if name.startswith("speculators"):
        taps = [world.outputs[index - 1] for index in config["aux_hidden_state_layer_ids"]]
    else:
        layers = nested.get("target_layer_ids") or config["target_layer_ids"]
        taps = [world.outputs[index] for index in layers]
    context = norm(torch.cat(taps, dim=-1)[:-1] @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    mask = nested.get("mask_token_id") or config["mask_token_id"]
    block = world.weights.embedding[torch.tensor([int(world.token_ids[-1])] + [mask] * (size - 1))]
    for number in range(layer["num_hidden_layers"]):
        block = block_layer(block, context, tensors, f"layers.{number}", layer)
    block = norm(block, tensors["norm.weight"], eps)
    first_guesses = name == "deepspec" or config.get("sample_from_anchor", False)
    lm_head = tensors.get("lm_head.weight", world.weights.lm_head)
    result, previous = [], int(world.token_ids[-1])
    for state in block if first_guesses else block[1:]:
        logits = state @ lm_head.T
        if config.get("markov_rank"):
            row = tensors["markov_head.markov_w1.weight"][previous]
            if config["markov_head_type"] == "gated":
                weight, bias = (tensors[f"markov_head.gate_proj.{one}"] for one in ("weight", "bias"))
                row = torch.sigmoid(torch.cat([state, row]) @ weight.T + bias) * row
            logits = logits + row @ tensors["markov_head.markov_w2.weight"].T
        result.append(everywhere(logits, tensors))
        previous = int(result[-1].argmax())
    return result


def everywhere(logits: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Over the target's vocabulary."""
    result = torch.full((VOCABULARY,), -math.inf)
    for draft, logit in enumerate(logits):
        result[draft + int(tensors["d2t"][draft]) if "d2t" in tensors else draft] = logit
    assert "t2d" not in tensors or torch.equal(result > -math.inf, tensors["t2d"])
    return result
