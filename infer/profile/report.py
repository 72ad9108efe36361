"""All that `headstart profile` measures of a target and of a drafter for it, in one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from infer.cost import CONTEXT, WIDTHS, CostModel, measure_table, save_cost
from infer.drafters.base import Drafter, Room, TreeSettings
from infer.drafters.head import HeadDrafter, RecurrentStepper
from infer.drafters.hybrid import parts_of
from infer.engine import Engine
from infer.intake import Prompt
from infer.machine import dtype_name, machine_facts
from infer.profile.floors import Speeds, measure_bandwidth, measure_matmuls, measure_multiplication
from infer.profile.forwards import FixedCost, ForwardCost, measure_fixed, measure_forwards
from infer.profile.rounds import RoundProfile, measure_rounds
from infer.profile.verification import VERIFIED_NODES, measure_verification
from infer.target import TargetModel

_MEGABYTE, _GIGABYTE, _TERA = 1e6, 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """One step of a head, from states to candidates. `floor_milliseconds`: bytes of its weights over the
    bandwidth."""

    name: str
    step_milliseconds: float
    weight_megabytes: float
    floor_milliseconds: float


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """What `profile` found. forwards: by batch, context and width. rounds: one a batch. is_kept: whether this machine's
    cost table was measured along with it, and kept.

    The two floors of the whole report are milliseconds of a forward at width 1 without context; those beside forwards
    and parts of rounds are their own.
    """

    machine: Mapping[str, Any]
    target: str
    dtype: str
    device: str
    forward_kind: str
    weight_megabytes: float
    bandwidth_gigabytes_per_second: float
    teraoperations_per_second: float
    bandwidth_floor_milliseconds: float
    matmul_floor_milliseconds: float
    forwards: tuple[ForwardCost, ...]
    fixed: tuple[FixedCost, ...]
    verification_milliseconds: Mapping[str, float]
    verified_forward_milliseconds: float
    draft: DraftCost | None = None
    rounds: tuple[RoundProfile, ...] = ()
    is_kept: bool = False

    def forwards_of(self, batch: int) -> dict[int, list[ForwardCost]]:
        """The forwards of a batch by context, each by width."""
        contexts = sorted({each.context for each in self.forwards if each.batch == batch})
        return {
            context: [each for each in self.forwards if (each.batch, each.context) == (batch, context)]
            for context in contexts
        }

    @property
    def batches(self) -> list[int]:
        return sorted({each.batch for each in self.forwards})

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "forwards": [{**asdict(each), "floor": each.floor.to_dict()} for each in self.forwards],
            "rounds": [_round_dict(each) for each in self.rounds],
        }


def _round_dict(profile: RoundProfile) -> dict[str, Any]:
    parts = [{**asdict(part), "floor": None if part.floor is None else part.floor.to_dict()} for part in profile.parts]
    return {**asdict(profile), "parts": parts, "notable": [part.name for part in profile.notable]}


def profile(
    target: TargetModel,
    drafter: Drafter | None = None,
    *,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = (CONTEXT,),
    batches: Sequence[int] = (1,),
    repeats: int = 7,
    stream_bytes: int | None = None,
    engine: Engine | None = None,
    prompts: Sequence[Prompt] = (),
    temperature: float = 0.0,
    max_tokens: int = 64,
    num_rounds: int = 48,
) -> ProfileReport:
    """Time the target's forward, its floors, and the rounds of `engine` on `prompts`.

    `drafter`: a draft step is timed if it is a head (default: the engine's). Without an engine and prompts no rounds
    are measured. A profile over the standard widths also measures this machine's cost table anew (`infer.cost`), from
    which engines take their tree budget.
    """
    machine = machine_facts()
    drafter = engine.drafter if drafter is None and engine is not None else drafter
    is_kept = tuple(widths) == WIDTHS and save_cost(target, measure_table(target))
    speeds = Speeds(
        bytes_per_second=measure_bandwidth(target.dtype, target.device, num_bytes=stream_bytes, repeats=repeats),
        operations_per_second=measure_multiplication(target.dtype, target.device, repeats=repeats),
    )
    forwards = measure_forwards(target, speeds, widths=widths, contexts=contexts, batches=batches, repeats=repeats)
    rounds: tuple[RoundProfile, ...] = ()
    if engine is not None and prompts and num_rounds:
        rounds = tuple(
            measure_rounds(
                engine,
                prompts,
                speeds,
                batch=batch,
                temperature=temperature,
                max_tokens=max_tokens,
                num_rounds=num_rounds,
            )
            for batch in batches
        )
    verified = measure_forwards(target, speeds, widths=(1 + VERIFIED_NODES,), repeats=repeats)
    return ProfileReport(
        machine=machine,
        target=target.name,
        dtype=dtype_name(target.dtype),
        device=_device_name(target),
        forward_kind=target.forward_kind,
        weight_megabytes=target.num_weight_bytes / _MEGABYTE,
        bandwidth_gigabytes_per_second=speeds.bytes_per_second / _GIGABYTE,
        teraoperations_per_second=speeds.operations_per_second / _TERA,
        bandwidth_floor_milliseconds=1e3 * target.num_weight_bytes / speeds.bytes_per_second,
        matmul_floor_milliseconds=measure_matmuls(target, repeats=repeats),
        forwards=forwards,
        fixed=measure_fixed(target, repeats=repeats),
        verification_milliseconds=measure_verification(target, repeats=repeats),
        verified_forward_milliseconds=verified[-1].milliseconds,
        draft=_draft_cost(drafter, speeds),
        rounds=rounds,
        is_kept=is_kept,
    )


def _device_name(target: TargetModel) -> str:
    """What the forwards ran on, as titles say it."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"{torch.get_num_threads()} CPU thread{'s' if torch.get_num_threads() > 1 else ''}"


def _draft_cost(drafter: Drafter | None, speeds: Speeds) -> DraftCost | None:
    """Of a head that goes on from its own states, alone or with others."""
    head = next((part for part in parts_of(drafter) if isinstance(part, HeadDrafter)), None)
    if head is None or not isinstance(head.stepper, RecurrentStepper):
        return None
    if not head.stepper.step_milliseconds:
        head.open(Room(num_slots=1, num_columns=192, tree=TreeSettings(), cost=CostModel.free()))
    num_bytes = head.stepper.num_step_bytes
    return DraftCost(
        name=head.name,
        step_milliseconds=head.stepper.step_milliseconds,
        weight_megabytes=num_bytes / _MEGABYTE,
        floor_milliseconds=1e3 * num_bytes / speeds.bytes_per_second,
    )
