"""A run as its folder tells it: finished, going on or killed, of this form or an older one.

Everything is read, nothing is needed but `metrics.jsonl`: what a run did not write is absent, not an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.checkpoint import CARD_FILE, recover_folder
from train.reports.metrics import METRICS_FILE, read_metrics

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Story:
    """summary, card, plan, about: empty where there is none. config: the text of the recipe. age_seconds: since the
    last line was written."""

    folder: Path
    records: Sequence[Record]
    summary: Record = field(default_factory=dict)
    card: Record = field(default_factory=dict)
    plan: Record = field(default_factory=dict)
    config: str = ""
    age_seconds: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> Story:
        path = folder / METRICS_FILE
        if not path.is_file():
            raise ValueError(f"{folder} holds no run: {path} does not exist")
        records = read_metrics(folder)
        if not records:
            raise ValueError(f"{folder} has nothing to report yet: {path} is empty")
        return cls(
            folder=folder,
            records=records,
            summary=_read_json(folder / SUMMARY_FILE),
            card=_read_json(recover_folder(folder / "best") / CARD_FILE),
            plan=_read_json(folder / PLAN_FILE),
            config=_read_text(folder / CONFIG_FILE),
            age_seconds=time.time() - path.stat().st_mtime,
        )

    # What was written

    @property
    def trainings(self) -> list[Record]:
        return self._of("train")

    @property
    def evaluations(self) -> list[Record]:
        return self._of("evaluation")

    @property
    def resumed_at(self) -> list[int]:
        return [int(record["step"]) for record in self._of("resume")]

    @property
    def about(self) -> Record:
        """What the run said of its data and head when it began."""
        return next(reversed(self._of("about")), {})

    @property
    def position(self) -> Record:
        """Of the newest figures; a finished run's last steps may be in its summary alone."""
        newest = next((record for record in reversed(self.records) if "train_seconds" in record), {"step": 0})
        return self.summary if int(self.summary.get("step", -1)) > int(newest["step"]) else newest

    # What it comes to

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.folder.resolve().name)

    @property
    def status(self) -> str:
        """finished, stopped early, interrupted or failed; of a run that does not say, how long it has been silent."""
        newest = self.records[-1]
        if newest["event"] == "end":
            return str(newest.get("status") or "finished")
        if self.summary and int(self.summary.get("step", 0)) >= int(self.position["step"]):
            return str(self.summary.get("status", "finished"))
        return f"going on, or killed (last line {_ago(self.age_seconds)} ago)"

    @property
    def best(self) -> Record | None:
        """The evaluation with the greatest accepted length, the first of equals (which is what best/ holds)."""
        return max(self.evaluations, key=lambda record: float(record["accepted_length"]), default=None)

    @property
    def last(self) -> Record | None:
        return next(reversed(self.evaluations), None)

    @property
    def data(self) -> Record:
        found = self.summary.get("data") or self.about.get("data") or {}
        return found if isinstance(found, Mapping) else {}

    @property
    def unique_label_tokens(self) -> float | None:
        """Labels that the run has seen at least once."""
        labels, epoch = self.data.get("label_tokens"), self.position.get("epoch")
        if not labels:
            return None
        return float(labels) * (1.0 if epoch is None else min(1.0, float(epoch)))

    @property
    def warnings(self) -> list[str]:
        found = list((self.last or {}).get("warnings", []))
        for record in self.records:
            if record["event"] == "end" and record.get("error"):
                found.append(f"ended by an error: {record['error']}")
        return found

    def fact(self, name: str) -> Any:
        """Something said in the summary, or when the run began; None where it was not."""
        return self.summary.get(name, self.about.get(name))

    def time_split(self) -> dict[str, float]:
        """Shares of the training time by part, over the whole run; empty where it was not measured."""
        totals: dict[str, float] = {}
        whole = previous = 0.0
        for record in self.trainings:
            seconds = max(0.0, float(record.get("train_seconds", 0.0)) - previous)
            previous = float(record.get("train_seconds", 0.0))
            shares = {name: value for name, value in record.items() if name.endswith("_share")}
            if not shares:
                continue
            whole += seconds
            for name, share in shares.items():
                totals[name.removesuffix("_share")] = totals.get(name.removesuffix("_share"), 0.0) + share * seconds
        split = {name: seconds / whole for name, seconds in totals.items()} if whole else {}
        return {**split, "other": max(0.0, 1 - sum(split.values()))} if split else {}

    def curve(self, name: str, records: Sequence[Record]) -> list[tuple[float, float]]:
        """(training minutes, value) of a figure wherever it was written."""
        return [
            (float(record["train_seconds"]) / 60, float(record[name]))
            for record in records
            if isinstance(record.get(name), int | float) and "train_seconds" in record
        ]

    def curves_by_depth(self, name: str, records: Sequence[Record]) -> list[list[tuple[float, float]]]:
        """The same of figures that have a value a depth."""
        deepest = max((len(record.get(name) or ()) for record in records), default=0)
        return [
            [
                (float(record["train_seconds"]) / 60, float(record[name][depth]))
                for record in records
                if depth < len(record.get(name) or ()) and record[name][depth] is not None
            ]
            for depth in range(deepest)
        ]

    def _of(self, event: str) -> list[Record]:
        return [record for record in self.records if record["event"] == event]


def _read_json(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
