"""What tests of foreign forms share: a target and its states, folders to spoil, and the draft logits of our side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heads.base import RecurrentHead, TargetWeights
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, TargetReference, save_head
from heads.foreign import FORMATS, Imported, read_foreign, write_foreign
from heads.registry import family_of_head
from tests.conftest import make_tiny_model

LAYERS, VOCABULARY, HIDDEN = 8, 128, 32
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def forms_of(family: str) -> list[str]:
    return [name for name, form in FORMATS.items() if form.family == family]


@dataclass(frozen=True)
class World:
    """A target, and its states for a text [T, H]: by hooks `inputs[i]` and `outputs[i]` of decoder layer i, and `last`
    behind the final norm; and by `taps`, headstart's own numbering."""

    reference: TargetReference
    weights: TargetWeights
    token_ids: torch.Tensor
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    last: torch.Tensor
    taps: tuple[torch.Tensor, ...]


def make_world() -> World:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    handles = [model.model.norm.register_forward_hook(lambda module, args, out: last.append(out[0]))]
    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0])))
        handles.append(layer.register_forward_hook(lambda module, args, out: outputs.append(_first(out)[0])))
    token_ids = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result = model(token_ids[None], output_hidden_states=True)
    for handle in handles:
        handle.remove()
    hidden = [one[0] for one in result.hidden_states]  # the last one is behind the final norm there
    return World(
        reference=TargetReference(
            name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
        ),
        weights=TargetWeights(
            embedding=model.get_input_embeddings().weight.detach(),
            lm_head=model.get_output_embeddings().weight.detach(),
        ),
        token_ids=token_ids,
        inputs=inputs,
        outputs=outputs,
        last=last[0],
        taps=(*hidden[:-1], outputs[-1], hidden[-1]),
    )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def saved(folder: Path, world: World, head: RecurrentHead, dtype: torch.dtype | None = None) -> Path:
    return save_head(folder, head, HeadCard(target=world.reference, family=family_of_head(head)), dtype=dtype)


def exported(tmp_path: Path, world: World, name: str, head: RecurrentHead, **more: Any) -> Path:
    return write_foreign(tmp_path / name, saved(tmp_path / "head", world, head), name, **more)


def read(folder: Path, world: World, name: str | None = None) -> Imported:
    return read_foreign(folder, name, target=world.reference, weights=world.weights)


def read_config(folder: Path) -> Config:
    values: Config = json.loads((folder / CONFIG_FILE).read_text())
    return values


def edit_config(folder: Path, change: Callable[[Config], Any]) -> None:
    config = read_config(folder)
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    write_tensors(folder, tensors)


def write_tensors(folder: Path, tensors: Tensors) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)


def one_tensor_faults(whole: Tensors) -> list[tuple[str, Tensors, str]]:
    """Every tensor of a file left out, renamed, cut and turned to another shape, and one added: what was done, the
    tensors, and the name that a reader must give."""
    faults: list[tuple[str, Tensors, str]] = []
    for name, tensor in whole.items():
        others = {key: value for key, value in whole.items() if key != name}
        faults.append((f"{name} left out", others, name))
        faults.append((f"{name} renamed", {**others, f"{name}_": tensor}, name))
        faults.append((f"{name} cut", {**others, name: tensor[:-1]}, name))
        faults.append((f"{name} in one more dimension", {**others, name: tensor[None]}, name))
    faults.append(("one added", {**whole, "stranger.weight": torch.ones(2)}, "stranger.weight"))
    return faults


def own_logits(head: RecurrentHead, world: World, steps: int = 3) -> list[torch.Tensor]:
    """Our side: logits over target ids [V] (-inf where there is no draft token) of greedy steps after the text."""
    head.bind(world.weights)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        shared = query.shape[1] // key.shape[1]
        every_key, every_value = (torch.cat(one).repeat_interleave(shared, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, every_key) / math.sqrt(query.shape[-1])
        behind = len(every_key) - len(query)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(behind + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), every_value)

    taps = torch.cat([world.taps[tap] for tap in head.config.taps], dim=-1)
    tokens, states = world.token_ids[1:], head.fuse(taps[:-1])
    result: list[torch.Tensor] = []
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        for step in range(steps):
            states = head(tokens, states, positions, attend)
            everywhere = torch.full((VOCABULARY,), -math.inf)
            everywhere[head.target_ids] = head.logits(states[-1], step)
            result.append(everywhere)
            tokens, states = everywhere.argmax()[None], states[-1:]
            positions = torch.tensor([len(world.token_ids) - 1 + step])
    return result


def assert_same_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Logits up to 7 differ by 2e-6 between two orders of summation in float32, and by 0.1 and more where one side
    leaves a norm out, swaps two, turns by other angles or taps one layer off."""
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def assert_other_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor], least: float = 0.02) -> None:
    """At some step, by more than rounding could."""
    finite = [one.isfinite() & other.isfinite() for one, other in zip(ours, theirs, strict=True)]
    apart = max((one - other)[both].abs().max() for one, other, both in zip(ours, theirs, finite, strict=True))
    assert apart > least, f"logits differ by {apart} at most"
