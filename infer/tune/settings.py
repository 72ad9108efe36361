"""Tuned settings: `tuning.json` in an augmented model's folder, and which of them serves a workload.

They are good for the machine, precision and target that they were found on; anywhere else they are left alone, with a
line that says so. What a user says, says more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heads.checkpoint import present_folder, staged_file
from infer.drafters.base import TreeSettings
from infer.machine import cpu_name, dtype_name
from infer.verify import RULES

if TYPE_CHECKING:
    from infer.target import TargetModel

TUNING_FILE = "tuning.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What settings are for: requests at once, their temperature, and tokens before a round (None: any)."""

    batch: int = 1
    temperature: float = 0.0
    context: int | None = None

    def __str__(self) -> str:
        context = "" if self.context is None else f", context {self.context}"
        return f"batch {self.batch}, temperature {self.temperature:g}{context}"


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """The best settings for a workload. tree: of drafts, also where `speculate` says that none pay. hybrid: whether a
    lookup proposes beside a head. predicted, measured: figures of them, for people."""

    workload: Workload
    tree: TreeSettings
    rule: str
    hybrid: bool
    speculate: bool
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """In a few words."""
        if not self.speculate:
            return "no drafts, plain decoding is fastest"
        kind = "adaptive, at most " if self.tree.adaptive else ""
        lookup = ", with a lookup" if self.hybrid else ""
        return f"{kind}{self.tree.max_nodes} nodes, depth {self.tree.max_depth}{lookup}"

    @property
    def engine_rule(self) -> str | None:
        """The rule that an engine is told; None for the match walk, which it takes by itself where exactness allows."""
        return None if self.rule == "match" else self.rule

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("workload"), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TunedSetting:
        """Raises KeyError, TypeError or ValueError where `values` are not what `to_dict` gave."""
        if values["rule"] not in RULES:
            raise ValueError(f"rule {values['rule']!r} is unknown")
        if int(values["batch"]) < 1 or not float(values["temperature"]) >= 0 or int(values["context"] or 0) < 0:
            raise ValueError(
                f"no workload has batch {values['batch']}, temperature {values['temperature']} and context "
                f"{values['context']}"
            )
        return cls(
            workload=Workload(
                batch=int(values["batch"]),
                temperature=float(values["temperature"]),
                context=None if values["context"] is None else int(values["context"]),
            ),
            tree=TreeSettings(**values["tree"]),
            rule=values["rule"],
            hybrid=bool(values["hybrid"]),
            speculate=bool(values["speculate"]),
            predicted={name: float(value) for name, value in dict(values.get("predicted", {})).items()},
            measured={name: float(value) for name, value in dict(values.get("measured", {})).items()},
        )


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """What one tuning found. machine, target: where it holds (`machine_key`, the target's fingerprint)."""

    machine: Mapping[str, Any]
    target: str
    settings: tuple[TunedSetting, ...]

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError("tuned settings name at least one workload")

    def choose(
        self,
        *,
        batch: int = 1,
        temperature: float = 0.0,
        context: int | None = None,
        exactness: str | None = None,
    ) -> TunedSetting | None:
        """The setting of the nearest workload: greedy or sampled first, then batch, temperature and context.

        Settings of a rule that promises less than seed-exact answers serve only who asks for no more (`exactness`).
        """

        def distance(each: TunedSetting) -> tuple[float, ...]:
            one = each.workload
            return (
                float((one.temperature > 0) != (temperature > 0)),
                abs(math.log(one.batch / max(1, batch))),
                abs(one.temperature - temperature),
                0.0 if context is None or one.context is None else abs(math.log((1 + one.context) / (1 + context))),
                -each.predicted.get("tokens_per_second", 0.0),
            )

        serving = [each for each in self.settings if _serves(each.rule, exactness)]
        return min(serving, key=distance, default=None)

    def problem(self, target: TargetModel) -> str | None:
        """Why these do not hold for a target on this machine; None where they do."""
        if self.target != target.fingerprint:
            return "for another target"
        here = machine_key(target)
        name = next((name for name in here if self.machine.get(name) != here[name]), None)
        return None if name is None else f"where {name} was {self.machine.get(name)!r}, and here it is {here[name]!r}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "machine": dict(self.machine),
            "target": self.target,
            "settings": [each.to_dict() for each in self.settings],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TunedSettings:
        if values.get("version") != VERSION:
            raise ValueError(f"its version is {values.get('version')!r}, and this headstart reads {VERSION}")
        return cls(
            machine=dict(values["machine"]),
            target=str(values["target"]),
            settings=tuple(TunedSetting.from_dict(each) for each in values["settings"]),
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staging:
            staging.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> TunedSettings:
        """ValueError for a file that is not one of these."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no tuned settings ({error}): run headstart tune again, or remove the file"
            ) from error


def machine_key(target: TargetModel) -> dict[str, Any]:
    """What a speed depends on, beside the target."""
    on_gpu = target.device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(target.device) if on_gpu else None,
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(target.dtype),
        "quantization": target.quantization,
        "forward": target.forward_kind,
        "torch": torch.__version__,
    }


def tuning_path(head: str | Path) -> Path | None:
    """Where the settings of a HEAD are kept: in its folder, if it has one and nothing is joined to it."""
    folder = present_folder(Path(head))
    return folder / TUNING_FILE if folder.is_dir() else None


def tuned_for(
    head: str | Path, target: TargetModel, workload: Workload, *, exactness: str | None = None
) -> tuple[TunedSetting | None, str]:
    """The tuned setting that serves a workload of `head` here, and a line to be said: which it is, or why there is
    none though there is a file."""
    path = tuning_path(head)
    if path is None or not path.is_file() or exactness == "bitwise":  # whose forwards cost something else
        return None, ""
    tuned = TunedSettings.load(path)
    problem = tuned.problem(target)
    if problem is not None:
        return None, f"the settings in {path} were tuned {problem}: they are not used (headstart tune makes new ones)"
    chosen = tuned.choose(
        batch=workload.batch, temperature=workload.temperature, context=workload.context, exactness=exactness
    )
    return chosen, "" if chosen is None else f"settings tuned for {chosen.workload}: {chosen.words}"


def _serves(rule: str, exactness: str | None) -> bool:
    promised = RULES[rule].exactness
    return promised == "seed" or promised == exactness
