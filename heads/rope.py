"""Rotary embeddings of a draft layer: unscaled, or scaled as those of long-context targets are.

A head's angles are its own affair: they need not be its target's. But a server computes the head by the configuration
that comes with it, so what that says is computed or refused, never ignored. The scaled kinds are transformers' own
(`ROPE_INIT_FUNCTIONS`), with which vLLM's agree. Kinds whose angles depend on the length of the text are refused.

Shapes: ... any leading dimensions, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.layers import Rotary, RotaryTable

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a kind of scaling must say, and what it may."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


KINDS: Mapping[str, _Kind] = {
    "linear": _Kind(required=("factor",)),
    "llama3": _Kind(
        required=("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "yarn": _Kind(
        required=("factor", "original_max_position_embeddings"),
        optional=("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""The kinds of scaling that a head can have, by their `rope_type`."""


def read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling (None: unscaled) of a `config.json` or a transformers configuration as a mapping.

    They stand in `rope_theta` and `rope_scaling`, or together in `rope_parameters`; a base that is said twice must be
    the same.
    """
    bases = [config.get("rope_theta")]
    scaling: dict[str, Any] | None = None
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key)
        if said is None:
            continue
        if not isinstance(said, Mapping):
            raise ValueError(f"{key} is {said!r:.80}, expected a mapping")
        bases.append(said.get("rope_theta"))
        found = _read_scaling(key, said)
        if found is not None and scaling is not None and found != scaling:
            raise ValueError(f"rope_scaling is {scaling!r}, but rope_parameters say {found!r}")
        scaling = scaling or found
    for base in bases:
        if base is not None and (isinstance(base, bool) or not isinstance(base, int | float) or base <= 0):
            raise ValueError(f"rope_theta is {base!r:.80}, expected a positive number")
    different = sorted({float(base) for base in bases if base is not None})
    if len(different) > 1:
        raise ValueError(f"rope_theta is said to be {different[0]:g} and {different[1]:g}")
    return (different[0] if different else DEFAULT_THETA), scaling


def target_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The rotary embeddings of a new head for a target: the target's, or unscaled ones where it has a kind that heads
    cannot have (or one for each sort of layer)."""
    try:
        return read_rope(config)
    except ValueError:
        said = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = said.get("rope_theta", config.get("rope_theta"))
        return (float(theta) if isinstance(theta, int | float) else DEFAULT_THETA), None


def _read_scaling(key: str, said: Mapping[str, Any]) -> dict[str, Any] | None:
    name = said.get("rope_type", said.get("type", "default"))
    given = {one: value for one, value in said.items() if value is not None}
    for ignored in ("rope_type", "type", "rope_theta"):
        given.pop(ignored, None)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{key} turns a part of each head only (partial_rotary_factor), which is not supported")
    if name == "default":
        kind = _Kind(required=())
    elif name in KINDS:
        kind = KINDS[name]
    else:
        raise ValueError(f"{key} is of type {name!r}; draft heads have default, {', '.join(KINDS)}")
    missing = [one for one in kind.required if one not in given]
    unknown = [one for one in given if one not in (*kind.required, *kind.optional)]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has {', '.join(unknown)}, which is not known here"] if unknown else []
        raise ValueError(f"{key} of type {name!r} {' and '.join(problems)}")
    numbers = {one: _number(f"{key}.{one}", value) for one, value in given.items()}
    return None if name == "default" else {"rope_type": name, **numbers}


def _number(key: str, value: Any) -> float | int | bool:
    if key.endswith(".truncate"):
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r:.80}, expected true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{key} is {value!r:.80}, expected a positive number")
    return value if key.endswith("_embeddings") else float(value)  # vLLM takes a whole factor for a list of factors


class _ScaledRotaryTable(RotaryTable):
    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, Any]) -> None:
        super().__init__(head_dim, theta)
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            rope_parameters={**scaling, "rope_theta": theta},
        )
        self._inverse_frequencies, self.amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)

    def compute(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        cos, sin = super().compute(positions, torch.float32)
        return (cos * self.amplitude).to(dtype), (sin * self.amplitude).to(dtype)


def rotary_table(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> RotaryTable:
    """Cosines and sines of positions, for the base and the scaling that `read_rope` gives."""
    return RotaryTable(head_dim, theta) if scaling is None else _ScaledRotaryTable(head_dim, theta, scaling)
