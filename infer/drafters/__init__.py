"""Drafters: whatever proposes a `DraftTree`; `spec` says how the HEAD of a command becomes one."""

from __future__ import annotations

from infer.drafters.base import Drafter, DraftLimit, RecordingDrafter, Room, TreeSettings
from infer.drafters.growing import TreeGrower
from infer.drafters.head import HeadDrafter
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import ScriptedDrafter
from infer.drafters.spec import (
    LOOKUP,
    NO_DRAFT,
    adapter_of,
    head_cards,
    head_drafter,
    head_folder,
    load_drafter,
    parse_spec,
    resolve_target,
    trained_head,
)
from infer.drafters.stepper import DraftRound, Frontier, Stepper

__all__ = [
    "LOOKUP",
    "NO_DRAFT",
    "DraftLimit",
    "DraftRound",
    "Drafter",
    "Frontier",
    "HeadDrafter",
    "HybridDrafter",
    "NgramDrafter",
    "RecordingDrafter",
    "Room",
    "ScriptedDrafter",
    "Stepper",
    "TreeGrower",
    "TreeSettings",
    "adapter_of",
    "head_cards",
    "head_drafter",
    "head_folder",
    "load_drafter",
    "parse_spec",
    "resolve_target",
    "trained_head",
]
