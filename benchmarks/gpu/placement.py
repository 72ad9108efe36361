"""Targets spread over device, memory and disk, or quantised."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from benchmarks.gpu.session import CannotRun, Session, first_line
from benchmarks.gpu.tokens import Asked, half_right
from infer.drafters.scripted import ScriptedDrafter
from infer.engine import Engine
from infer.target import TargetModel

PLACED_TOLERANCE = {"spread by a map": 1e-4, "int8": 0.15, "int4": 0.4}
"""Relative error of a target's last states against the whole one's: rounding of sums, or of weights."""


def check_placement(session: Session) -> None:
    """A target spread over device, CPU memory and disk is the whole one; quantised ones decode exactly what they say
    themselves, and their states are near the whole one's."""
    if session.random_target:
        raise CannotRun("needs a target on disk, not a random one")
    whole = session.target("float32")
    prompts = session.prompts(whole)[: session.sizes.num_single_prompts]
    expected = torch.cat([one.last for one in whole.features(prompts, [])])
    asked = Asked.of(prompts, [0.0], max_tokens=session.sizes.max_tokens)
    texts = asked.answers(Engine(whole))
    fingerprint, places = whole.fingerprint, spread_map(whole, session.device)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, dict[str, Any]] = {
            "spread by a map": {"device_map": places, "offload_folder": folder},
            "int8": {"quantization": "int8", "device": str(session.device)},
            "int4": {"quantization": "int4", "device": str(session.device)},
        }
        for name, how in settings.items():
            try:
                target = TargetModel.load(session.target_path, dtype="float32", **how)
            except ValueError as error:
                session.skip(f"placement, {name}", first_line(error))
                continue
            _check_placed(session, target, name, asked, expected)
            if "device_map" in how:
                found = asked.answers(Engine(target))
                same = sum(found[question] == text for question, text in texts.items())
                session.check(f"{name}: the whole target's tokens", same == len(texts), f"{same}/{len(texts)} answers")
                session.check(f"{name}: its fingerprint", target.fingerprint == fingerprint, target.fingerprint)


def _check_placed(session: Session, target: TargetModel, name: str, asked: Asked, expected: torch.Tensor) -> None:
    states = torch.cat([one.last for one in target.features(asked.prompts, [])]).to(expected.device)
    error = float((states - expected).norm() / expected.norm())
    session.check(f"{name}: states", error < PLACED_TOLERANCE[name], f"relative error {error:.2g}")
    plain = asked.answers(Engine(target))
    drafted = asked.answers(Engine(target, ScriptedDrafter(half_right(plain, target.vocab_size))))
    same = sum(drafted[question] == answer for question, answer in plain.items())
    # Products of quantised weights are rounded as those of half precision are, so near ties may fall otherwise.
    least = len(plain) if name not in ("int8", "int4") else 1
    session.check(f"{name}: drafted as plain", same >= least, f"{same}/{len(plain)} answers identical")


def spread_map(target: TargetModel, device: torch.device) -> dict[str, str]:
    """A third of the layers on `device`, with all that is not a layer; a third in CPU memory; the rest on disk."""
    prefix = target.model.base_model_prefix
    stack = next(name for name, child in target.decoder.named_children() if isinstance(child, torch.nn.ModuleList))
    others = [f"{prefix}.{name}" for name, _ in target.decoder.named_children() if name != stack]
    ends = [name for name, _ in target.model.named_children() if name != prefix]
    thirds = [(str(device), "cpu", "disk")[3 * index // target.num_layers] for index in range(target.num_layers)]
    layers = {f"{prefix}.{stack}.{index}": place for index, place in enumerate(thirds)}
    return {**dict.fromkeys([*others, *ends], str(device)), **layers}
