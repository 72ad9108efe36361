"""What one evaluation of a head found (`train.evaluator` finds it), and the forms in which it is told.

Definitions are those of `infer.evaluate` and `train.evaluation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import DraftShape, RuleName
from infer.calibration import Reliability
from infer.evaluate import Acceptance, AcceptanceReport
from train.reports.samples import Sample
from train.reports.statistics import is_credible
from train.reports.table import AcceptanceTable

FEW_PROMPTS = 4
"""With fewer, the accepted length says more about the prompts than about the head."""
PARITY_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The accepted length of the same greedy answers, by the decode loop and by the training graph.

    first_depth: the first draft position at which the shares of rounds accepted differ by more than the tolerance.
    """

    decoded_length: float
    simulated_length: float
    num_rounds: int
    first_depth: int | None

    @classmethod
    def of(cls, decoded: Acceptance, simulated: Acceptance) -> Parity:
        deepest = max(len(decoded.by_position), len(simulated.by_position))
        apart = (
            depth
            for depth in range(1, deepest + 1)
            if abs(decoded.at_position(depth) - simulated.at_position(depth)) > PARITY_TOLERANCE
        )
        return cls(
            decoded_length=decoded.accepted_length,
            simulated_length=simulated.accepted_length,
            num_rounds=decoded.num_rounds,
            first_depth=next(apart, None),
        )

    @property
    def holds(self) -> bool:
        return abs(self.simulated_length - self.decoded_length) <= PARITY_TOLERANCE * self.decoded_length

    def warning(self) -> str:
        where = "" if self.first_depth is None else f"; they part at draft position {self.first_depth}"
        return (
            f"the training graph says an accepted length of {self.simulated_length:.3f} where the decode loop has "
            f"{self.decoded_length:.3f} on the same greedy answers{where}: training and serving compute different "
            "things (`headstart doctor` looks for what)"
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out figures of one head (definitions: `infer.evaluate`, `train.evaluation`).

    accepted_length: at the first temperature; what chooses the best head. shape, rule: what was drafted at every step,
    and how it was verified. simulated: from the training graph, no text was decoded. standard_errors: of the accepted
    length by temperature, over prompts. seconds: by part.
    """

    accepted_length: float
    report: AcceptanceReport
    agreement: tuple[float, ...]
    overlap: tuple[float, ...]
    num_prompts: int
    shape: DraftShape = "chain"
    rule: RuleName = "match"
    simulated: bool = False
    table: AcceptanceTable | None = None
    standard_errors: Mapping[float, float] = field(default_factory=dict)
    calibration: Mapping[float, Reliability] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    parity: Parity | None = None
    speed: Mapping[str, float] = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)
    decode_tokens_per_second: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def standard_error(self) -> float | None:
        """Of `accepted_length`."""
        return next(iter(self.standard_errors.values()), None)

    @property
    def warnings(self) -> list[str]:
        found = []
        if self.num_prompts < FEW_PROMPTS:
            found.append(
                f"measured on {_counted(self.num_prompts, 'held-out prompt')}: the accepted length is mostly noise, "
                "and so is the choice of the best head (more conversations, data.holdout_fraction, data.eval)"
            )
        if self.parity is not None and not self.parity.holds:
            found.append(self.parity.warning())
        return found

    def describe(self) -> str:
        """One line for the terminal."""
        depths = " ".join(f"{share:.3f}" for share in self.agreement)
        error = "" if self.standard_error is None else f" (± {self.standard_error:.2f})"
        how = verification_of(self.shape, self.rule)
        return (
            f"accepted length {self.accepted_length:.3f}{f' ({how})' if how else ''} on held-out "
            f"{'text, simulated' if self.simulated else 'prompts'}{error}, agreement by depth {depths}"
            + (f", {self.speed['speedup']:.2f}x plain" if is_credible(self.speed) else "")
            + (f", target {self.drift['kl']:.4f} nats from the original" if "kl" in self.drift else "")
        )

    def for_card(self) -> dict[str, Any]:
        """What a head's card keeps."""
        whole = self.to_dict()
        names = (
            "accepted_length",
            "standard_error",
            "shape",
            "rule",
            "simulated",
            "acceptance",
            "agreement",
            "overlap",
            "speed",
            "drift",
        )
        return {name: whole[name] for name in names if name in whole}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; parts that were not measured are left out."""
        values: dict[str, Any] = {
            "accepted_length": self.accepted_length,
            "standard_error": self.standard_error,
            "shape": self.shape,
            "rule": self.rule,
            "simulated": self.simulated or None,
            "num_prompts": self.num_prompts,
            "acceptance": self.report.to_dict(),
            "agreement": list(self.agreement),
            "overlap": list(self.overlap),
            "speed": dict(self.speed),
            "drift": dict(self.drift),
            "standard_errors": {f"{t:g}": value for t, value in self.standard_errors.items()},
            "acceptance_table": None if self.table is None else self.table.to_list(),
            "calibration": {f"{t:g}": _plain(one) for t, one in self.calibration.items()},
            "samples": [sample.to_dict() for sample in self.samples],
            "parity": None if self.parity is None else asdict(self.parity),
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "memory": dict(self.memory),
            "seconds": sum(self.seconds.values()),
            "seconds_by_part": dict(self.seconds),
            "warnings": self.warnings,
        }
        kept = ("accepted_length", "agreement", "overlap", "speed")
        return {name: value for name, value in values.items() if name in kept or value not in (None, {}, [])}

    def curves(self) -> dict[str, float]:
        """Every figure that makes a curve, by a name of its own."""
        report = self.report
        values: dict[str, float | None] = {
            "accepted_length": self.accepted_length,
            "accepted_length_error": self.standard_error,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "seconds": sum(self.seconds.values()),
            **self.speed,
            **self.drift,
            **self.memory,
        }
        for temperature, one in report.by_temperature.items():
            values[f"accepted_length_t{temperature:g}"] = one.accepted_length
            values |= {f"acceptance_t{temperature:g}_{d}": share for d, share in enumerate(one.by_position, start=1)}
        for temperature, calibration in self.calibration.items():
            values[f"calibration_error_t{temperature:g}"] = calibration.calibration_error
        for domain, one in report.by_domain.items():
            values[f"accepted_length_{domain.replace(' ', '_')}"] = one.accepted_length
        for context, one in report.by_context.items():
            values[f"accepted_length_context_{context}"] = one.accepted_length
        for name, shares in (("agreement", self.agreement), ("overlap", self.overlap)):
            values |= {f"{name}_{depth}": share for depth, share in enumerate(shares, start=1)}
        if self.parity is not None:
            values["simulated_length"] = self.parity.simulated_length
            values["decoded_length"] = self.parity.decoded_length
        return {f"eval/{name}": float(value) for name, value in values.items() if value is not None}


def verification_of(shape: str, rule: str) -> str:
    """In words, for a line; none for the default, a chain under the match walk."""
    return "" if (shape, rule) == ("chain", "match") else f"{shape}, {rule} rule"


def verification_in(record: Mapping[str, Any]) -> str:
    """The same of a record of an evaluation (older ones do not say, and are of the default)."""
    return verification_of(record.get("shape", "chain"), record.get("rule", "match"))


def _plain(reliability: Reliability) -> dict[str, Any]:
    """Bins without observations are left out."""
    values = asdict(reliability)
    return {**values, "bins": [one for one in values["bins"] if one["num_observations"]]}


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
