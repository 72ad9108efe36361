"""What a forward costs on this machine at each width, beside what it could cost at least.

Two floors, both for width 1. The *bandwidth floor* is the bytes of weights over the speed at which one large
matrix-vector product streams weights from memory. The *matmul floor* is the target's own weight matrices
multiplied one after another with nothing in between: smaller matrices do not stream as fast as a large one,
so it lies higher and is the fairer mark for an eager forward.

Limits: times of a busy machine say little; the tables hold medians.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infer.bench import dtype_name
from infer.cost import CONTEXT, WIDTHS, CostModel, measure_target, median_milliseconds, save_cost
from infer.drafters.base import Drafter, TreeSettings
from infer.drafters.head import HeadDrafter
from infer.drafters.hybrid import HybridDrafter
from infer.machine import machine_facts
from infer.target import TargetModel

_MIN_STREAM_BYTES = 256 << 20
_MAX_STREAM_BYTES = 1 << 30
_STREAM_COLUMNS = 4096
_MEGABYTE, _GIGABYTE = 1e6, 1e9


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
    """What `profile` found. Floors are milliseconds of a forward at width 1."""

    machine: Mapping[str, Any]
    target: str
    dtype: str
    context: int
    widths: tuple[int, ...]
    milliseconds: tuple[float, ...]
    weight_megabytes: float
    bandwidth_gigabytes_per_second: float
    bandwidth_floor_milliseconds: float
    matmul_floor_milliseconds: float
    draft: DraftCost | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    target: TargetModel,
    drafter: Drafter | None = None,
    *,
    widths: Sequence[int] = WIDTHS,
    context: int = CONTEXT,
    repeats: int = 7,
    stream_bytes: int | None = None,
) -> ProfileReport:
    """Time the target's forward and its floors, and a draft step if `drafter` has a head.

    A table over the standard widths becomes this machine's cost table, from which engines take their tree
    budget.
    """
    machine = machine_facts()
    cost = measure_target(target, widths=widths, context=context, repeats=repeats)
    if tuple(widths) == WIDTHS and context == CONTEXT:
        save_cost(target, cost)
    bandwidth = measure_bandwidth(target.dtype, target.device, num_bytes=stream_bytes, repeats=repeats)
    return ProfileReport(
        machine=machine,
        target=target.name,
        dtype=dtype_name(target.dtype),
        context=context,
        widths=cost.widths,
        milliseconds=cost.milliseconds,
        weight_megabytes=target.num_weight_bytes / _MEGABYTE,
        bandwidth_gigabytes_per_second=bandwidth / _GIGABYTE,
        bandwidth_floor_milliseconds=1e3 * target.num_weight_bytes / bandwidth,
        matmul_floor_milliseconds=measure_matmuls(target, repeats=repeats),
        draft=_draft_cost(drafter, cost, bandwidth),
    )


@torch.inference_mode()
def measure_bandwidth(
    dtype: torch.dtype, device: torch.device, *, num_bytes: int | None = None, repeats: int = 7
) -> float:
    """Bytes a second at which a matrix-vector product reads a matrix that no cache holds.

    It is what reading weights can reach at best. A product in the model's dtype, rather than a memory copy,
    because it reads and does not write, as a forward does.
    """
    num_bytes = num_bytes or min(max(_MIN_STREAM_BYTES, 4 * last_level_cache_bytes()), _MAX_STREAM_BYTES)
    num_rows = max(1, num_bytes // (_STREAM_COLUMNS * dtype.itemsize))
    matrix = torch.ones((num_rows, _STREAM_COLUMNS), dtype=dtype, device=device)
    vector = torch.ones((1, _STREAM_COLUMNS), dtype=dtype, device=device)
    milliseconds = median_milliseconds(lambda: functional.linear(vector, matrix), repeats=repeats)
    return 1e3 * matrix.nbytes / milliseconds


@torch.inference_mode()
def measure_matmuls(target: TargetModel, *, repeats: int = 7) -> float:
    """Milliseconds to multiply each of the target's weight matrices once by one row, with nothing in
    between."""
    matrices = weight_matrices(target.model)
    inputs = {
        matrix.shape[1]: torch.ones((1, matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
        for matrix in matrices
    }

    def multiply_all() -> None:
        for matrix in matrices:
            functional.linear(inputs[matrix.shape[1]], matrix)

    return median_milliseconds(multiply_all, repeats=repeats)


def weight_matrices(model: nn.Module) -> list[torch.Tensor]:
    """Every matrix [out, in] that a forward multiplies by; fused projections, which are views of one
    tensor, as one."""
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        # GPT-2's Conv1D keeps its weight transposed.
        matrix = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
        by_storage[matrix.untyped_storage().data_ptr()].append(matrix)
    return [matrix for views in by_storage.values() for matrix in _joined(views)]


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first processor; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdecimal():
            sizes.append(int(digits) * unit)
    return max(sizes, default=32 << 20)


def plot(report: ProfileReport, path: Path) -> None:
    """Draw forward time against width, with both floors, to an image file. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'headstart[train]'") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(report.widths, report.milliseconds, marker="o", label="forward")
    axes.axhline(report.matmul_floor_milliseconds, linestyle="--", color="C1", label="matmul floor, width 1")
    axes.axhline(report.bandwidth_floor_milliseconds, linestyle=":", color="C2", label="bandwidth floor")
    axes.set(
        xlabel="width (rows)",
        ylabel="milliseconds",
        title=f"{report.target}, {report.dtype}, {report.machine['threads']} threads",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _joined(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views that lie end to end in one storage as the one matrix that they are parts of; otherwise as they
    are."""
    ordered = sorted(views, key=lambda view: view.storage_offset())
    ordered = [view for i, view in enumerate(ordered) if i == 0 or view.data_ptr() != ordered[i - 1].data_ptr()]
    first, num_columns = ordered[0], ordered[0].shape[1]
    offset = first.storage_offset()
    for view in ordered:
        if not view.is_contiguous() or view.shape[1] != num_columns or view.storage_offset() != offset:
            return ordered
        offset += view.numel()
    num_rows = sum(view.shape[0] for view in ordered)
    return [first.as_strided((num_rows, num_columns), (num_columns, 1), first.storage_offset())]


def _draft_cost(drafter: Drafter | None, cost: CostModel, bandwidth: float) -> DraftCost | None:
    head_drafter = _head_drafter(drafter)
    if head_drafter is None:
        return None
    head = head_drafter.head
    tree = TreeSettings(adaptive=False)
    head_drafter.open(num_slots=1, num_columns=192, tree=tree, cost=cost)
    # The fusion of the target's states runs once a round, and the embedding is looked up.
    num_bytes = sum(weight.nbytes for name, weight in head.named_parameters() if not name.startswith("fc."))
    return DraftCost(
        name=head_drafter.name,
        step_milliseconds=head_drafter.measure_step(),
        weight_megabytes=num_bytes / _MEGABYTE,
        floor_milliseconds=1e3 * num_bytes / bandwidth,
    )


def _head_drafter(drafter: Drafter | None) -> HeadDrafter | None:
    """The drafter with a head, if there is one: the drafter itself or a part of a hybrid."""
    parts = drafter.drafters if isinstance(drafter, HybridDrafter) else (drafter,)
    return next((part for part in parts if isinstance(part, HeadDrafter)), None)
