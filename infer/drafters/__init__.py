"""Drafters, and how the HEAD of a command becomes one: an augmented model's folder, `ngram` or `none`."""

from __future__ import annotations

from pathlib import Path

from heads.checkpoint import CARD_FILE, load_head, present_folder, read_card
from infer.calibration import Calibration
from infer.drafters.base import Drafter, DraftLimit, RecordingDrafter, TreeSettings
from infer.drafters.growing import TreeGrower
from infer.drafters.head import HeadDrafter
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import ScriptedDrafter
from infer.drafters.stepper import DraftRound, Frontier, Stepper
from infer.target import TargetModel

__all__ = [
    "DraftLimit",
    "DraftRound",
    "Drafter",
    "Frontier",
    "HeadDrafter",
    "HybridDrafter",
    "NgramDrafter",
    "RecordingDrafter",
    "ScriptedDrafter",
    "Stepper",
    "TreeGrower",
    "TreeSettings",
    "load_drafter",
    "resolve_target",
]

LOOKUP, NO_DRAFT = "ngram", "none"
MODELS_FOLDER = Path("models")


def load_drafter(head: str | Path, target: TargetModel, *, hybrid: bool = True) -> Drafter | None:
    """The drafter that HEAD names. A head is joined by the lookup (`hybrid`)."""
    if str(head) == NO_DRAFT:
        return None
    if str(head) == LOOKUP:
        return NgramDrafter()
    network, card = load_head(head, target.embedding_weight, device=target.device, dtype=target.dtype)
    target.check_card(card)
    drafter = HeadDrafter(network, calibration=Calibration.from_card(card.drafter))
    return HybridDrafter([drafter, NgramDrafter()]) if hybrid else drafter


def resolve_target(head: str | Path, target: str | Path | None) -> str | Path:
    """The target to load: the one given, else the one that the head's card names (under `models/`, or a Hub name)."""
    if target is not None:
        return target
    if str(head) in (LOOKUP, NO_DRAFT):
        raise ValueError(
            f"{str(head)!r} belongs to no target: give one with --target or target= (a folder or Hub name)"
        )
    folder = present_folder(Path(head))
    if not (folder / CARD_FILE).is_file():
        best = folder / "best"
        hint = f"; did you mean {str(best)!r}?" if (best / CARD_FILE).is_file() else ""
        raise ValueError(
            f"{str(head)!r} is not a head: give an augmented model's folder (it holds {CARD_FILE}), 'ngram' or "
            f"'none'{hint}"
        )
    name = read_card(folder).target.name
    local = MODELS_FOLDER / name
    return local if local.is_dir() else name
