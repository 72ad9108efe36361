"""What a run finds: checks, times, what did not run, and whether targets were reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A measured time or rate. floor: what memory bandwidth alone would allow, in the same unit. figures: what it was
    measured on, and what else came out, for whoever reads the JSON."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    detail: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Skipped:
    part: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target of the project. status: reached, missed or not measured; value: what was found, in words."""

    target: str
    status: str
    value: str
