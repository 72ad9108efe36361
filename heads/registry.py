"""The head families that headstart knows. Adding one is one entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads import dflash, eagle1, eagle3, early_exit, hydra, medusa, peagle
from heads.base import DraftHead, HeadConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """A network and its config, the `architectures` entry by which its checkpoints are recognised, and where it comes
    from. settings: what a recipe's `head` section may say of it, beside what holds for all."""

    config: type[HeadConfig]
    head: type[DraftHead]
    architecture: str
    title: str
    paper: str
    settings: frozenset[str] = frozenset()


BLOCK_SETTINGS = frozenset({"num_layers", "num_depths", "mask_token_id", "markov_rank", "markov_table", "markov_gate"})
"""Those of all heads that draft in one pass."""

FAMILIES: Mapping[str, Family] = {
    "eagle3": Family(
        config=eagle3.Eagle3Config,
        head=eagle3.Eagle3Head,
        architecture=eagle3.ARCHITECTURE,
        title="EAGLE-3",
        paper="Li et al. 2025, arXiv 2503.01840",
        settings=frozenset({"norm_before_residual", "fc_norm", "norm_output"}),
    ),
    "eagle1": Family(
        config=eagle1.Eagle1Config,
        head=eagle1.Eagle1Head,
        architecture=eagle1.ARCHITECTURE,
        title="EAGLE and EAGLE-2",
        paper="Li et al. 2024, arXiv 2401.15077 and 2406.16858",
        settings=frozenset({"feature_loss", "feature_noise"}),
    ),
    "medusa": Family(
        config=medusa.MedusaConfig,
        head=medusa.MedusaHead,
        architecture=medusa.ARCHITECTURE,
        title="Medusa",
        paper="Cai et al. 2024, arXiv 2401.10774",
        settings=frozenset({"num_heads", "num_layers"}),
    ),
    "hydra": Family(
        config=hydra.HydraConfig,
        head=hydra.HydraHead,
        architecture=hydra.ARCHITECTURE,
        title="Hydra",
        paper="Ankner et al. 2024, arXiv 2402.05109",
        settings=frozenset({"num_heads", "num_layers", "prefix_layer"}),
    ),
    "peagle": Family(
        config=peagle.PEagleConfig,
        head=peagle.PEagleHead,
        architecture=peagle.ARCHITECTURE,
        title="P-EAGLE",
        paper="Hui et al. 2026, arXiv 2602.01469",
        settings=BLOCK_SETTINGS | {"norm_before_residual", "fc_norm"},
    ),
    "dflash": Family(
        config=dflash.DFlashConfig,
        head=dflash.DFlashHead,
        architecture=dflash.ARCHITECTURE,
        title="DFlash and DSpark",
        paper="Chen et al. 2026, arXiv 2602.06036; Cheng et al. 2026, arXiv 2607.05147",
        settings=BLOCK_SETTINGS | {"sample_from_anchor"},
    ),
    "early_exit": Family(
        config=early_exit.EarlyExitConfig,
        head=early_exit.EarlyExitHead,
        architecture=early_exit.ARCHITECTURE,
        title="early exit",
        paper="Elhoushi et al. 2024, arXiv 2404.16710; Liu et al. 2024, arXiv 2404.18911",
        settings=frozenset({"exit_layer"}),
    ),
}


def family_of_config(native: Mapping[str, Any]) -> str:
    """The family whose architecture a checkpoint's `config.json` names."""
    architectures = native.get("architectures") or []
    for name, family in FAMILIES.items():
        if family.architecture in architectures:
            return name
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ValueError(f"config.json names architectures {architectures}; this version loads {known}")


def family_of_head(head: DraftHead) -> str:
    """The name of a network's family."""
    return next(name for name, family in FAMILIES.items() if type(head) is family.head)
