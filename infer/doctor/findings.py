"""What the doctor found: one finding a check, and all of them as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from infer.json_values import for_json


class Verdict(StrEnum):
    """ok: as it should be. warning: works, but is unusual or could not be told. fail: the head should not be used as it
    is. untested: what it needs is missing or broken."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "FAIL"
    UNTESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check: what was found, in a line or two, what to do about it, and the same in numbers."""

    check: str
    verdict: Verdict
    finding: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "verdict": str(self.verdict),
            "finding": self.finding,
            "advice": self.advice,
            "figures": for_json(self.figures),
        }


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong (or odd) within a check."""

    verdict: Verdict
    finding: str
    advice: str = ""


def judged(check: str, fine: str, problems: Sequence[Problem], figures: Mapping[str, Any] | None = None) -> Finding:
    """The finding of a check that looked for several things: `fine` if none was found, else the problems, worst
    first."""
    figures = figures or {}
    if not problems:
        return Finding(check=check, verdict=Verdict.OK, finding=fine, figures=figures)
    order = [Verdict.FAIL, Verdict.WARNING, Verdict.UNTESTED, Verdict.OK]
    ranked = sorted(problems, key=lambda problem: order.index(problem.verdict))
    return Finding(
        check=check,
        verdict=ranked[0].verdict,
        finding="; ".join(problem.finding for problem in ranked),
        advice="; ".join(dict.fromkeys(problem.advice for problem in ranked if problem.advice)),
        figures=figures,
    )


def untested(check: str, reason: str) -> Finding:
    return Finding(check=check, verdict=Verdict.UNTESTED, finding=reason)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings about one head, and `facts` that tell which head, target and texts those were."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.FAIL)

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **self.facts, "findings": [finding.to_dict() for finding in self.findings]}
