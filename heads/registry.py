"""The head families that headstart knows. Adding one is one line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads import eagle3


@dataclass(frozen=True, kw_only=True)
class Family:
    """A network and its config, and the `architectures` entry by which its checkpoints are recognised."""

    config: type[eagle3.Eagle3Config]
    head: type[eagle3.Eagle3Head]
    architecture: str


FAMILIES: Mapping[str, Family] = {
    "eagle3": Family(config=eagle3.Eagle3Config, head=eagle3.Eagle3Head, architecture=eagle3.ARCHITECTURE),
}


def family_of_config(native: Mapping[str, Any]) -> str:
    """The family whose architecture a checkpoint's `config.json` names."""
    architectures = native.get("architectures") or []
    for name, family in FAMILIES.items():
        if family.architecture in architectures:
            return name
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ValueError(f"config.json names architectures {architectures}; this version loads {known}")
