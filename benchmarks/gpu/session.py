"""What the parts share: where they run, how much they do, until when, and what they found."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from benchmarks.gpu.findings import Check, Skipped, Timing
from benchmarks.gpu.models import random_llama
from benchmarks.gpu.sizes import Sizes
from infer.target import DTYPES, TargetModel

PARTS = {
    "bandwidth": 0.02,
    "kernels": 0.12,
    "attention": 0.14,
    "graphs": 0.27,
    "float32": 0.32,
    "bfloat16": 0.37,
    "bitwise": 0.40,
    "placement": 0.41,
    "speed": 0.45,
    "layers": 0.54,
    "rounds": 0.67,
    "training": 1.0,
}
"""The parts in the order in which they run, and the share of the minutes by which each stops.

Estimates for 7.5 minutes of an H200-class card, none of them measured: kernels 45 s, most of it Triton's compilation of
odd shapes; graphs 60 s, about a second for an engine's captures; tokens 45 s; layers 40 s, of which 10 s make 90 GB of
weights; rounds 60 s, about half a second a combination, so that a hundred of some 300 are measured. What a part leaves
is training's, which comes last: about two minutes, and 25 s to decode."""

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One, two, three, four, five, six, seven, eight, nine, ten. One, two, three, four,",
    "Write a short letter to a friend who has moved to another city.\n\nDear",
    '{"name": "apple", "price": 1.20}\n{"name": "pear", "price": 1.50}\n{"name": "plum",',
    "Water boils at 100 degrees Celsius because",
    "Q: A train travels 60 km in 40 minutes. What is its speed?\nA:",
    "She opened the door, and she opened the window, and she opened",
)


class CannotRun(Exception):
    """A part's prerequisites are missing here; the message says which."""


class Case(Protocol):
    def describe(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(kw_only=True)
class Session:
    """See the module. equality: tokens of invariant mode that were plain decoding's, and all that were compared."""

    device: torch.device
    sizes: Sizes
    target_path: Path
    random_target: bool
    started: float
    seconds: float
    machine: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    equality: tuple[int, int] = (0, 0)
    _targets: dict[str, TargetModel] = field(default_factory=dict)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name=name, passed=passed, detail=detail))
        print(f"  {'pass' if passed else 'FAIL'}  {name}: {detail}", file=sys.stderr, flush=True)

    def check_errors(self, name: str, errors: Mapping[AnyCase, float], tolerance: float) -> None:
        """A check of cases by their relative errors, of which NaN is the largest; none where there are no cases."""
        if not errors:
            return
        worst = max(errors, key=lambda case: math.inf if math.isnan(errors[case]) else errors[case])
        passed = all(error <= tolerance for error in errors.values())
        detail = f"{len(errors)} ragged cases, largest relative error {errors[worst]:.1e} (tolerance {tolerance:.0e})"
        self.check(name, passed, detail if passed else f"{detail}; worst: {worst.describe()}")

    def time(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        floor: float | None = None,
        detail: str = "",
        figures: Mapping[str, float | str] | None = None,
    ) -> None:
        timing = Timing(name=name, value=value, unit=unit, floor=floor, detail=detail, figures=figures or {})
        self.timings.append(timing)
        print(f"  {value:10.3f} {unit}  {name}  {detail}", file=sys.stderr, flush=True)

    def skip(self, part: str, reason: str) -> None:
        self.skipped.append(Skipped(part=part, reason=reason))
        print(f"  skipped  {part}: {reason}", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)

    def is_late(self, part: str) -> bool:
        return self.seconds_left(part) < 0

    def seconds_left(self, part: str) -> float:
        """Until `part` stops; below zero once it should have."""
        return self.started + PARTS[part] * self.seconds - time.perf_counter()

    def floor_ms(self, num_bytes: int) -> float | None:
        """Milliseconds to read `num_bytes` at the bandwidth measured here."""
        bandwidth = self.machine.get("bandwidth_gb_s")
        return None if not bandwidth else num_bytes / bandwidth / 1e6

    def target(self, dtype: str) -> TargetModel:
        if dtype not in self._targets:
            self.drop_targets()
            if self.random_target:
                model = random_llama(self.sizes.target, dtype=DTYPES[dtype], device=self.device, scale=1.5)
                self._targets[dtype] = TargetModel.wrap(model, name="random Llama")
            else:
                self._targets[dtype] = TargetModel.load(self.target_path, dtype=dtype, device=str(self.device))
            self.machine["target"] = self._targets[dtype].name
        return self._targets[dtype]

    def drop_targets(self) -> None:
        self._targets.clear()
        gc.collect()  # a fused model refers to itself, so only the collector frees its memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # whoever asks what is free counts what torch keeps as taken

    def prompts(self, target: TargetModel) -> list[list[int]]:
        if target.tokenizer is not None:
            return [target.tokenizer(text)["input_ids"] for text in PROMPTS[: self.sizes.num_prompts]]
        generator = np.random.default_rng(0)
        prompts = []
        for index in range(self.sizes.num_prompts):
            phrase = generator.integers(3, target.vocab_size, size=5 + 3 * index).tolist()
            prompts.append([*phrase, *phrase[: 3 + index]])  # the lookup finds its own end again
        return prompts


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def requests_label(number: int) -> str:
    return f"{number} request{'s' if number > 1 else ''}"
