"""What a forward costs on this machine at each width, beside what it could cost at least.

Two floors, both for width 1. The *bandwidth floor* is the bytes of weights over the speed at which one large
matrix-vector product streams weights from memory. The *matmul floor* is the target's own weight matrices
multiplied one after another with nothing in between: smaller matrices do not stream as fast as a large one,
so it lies higher and is the fairer mark for an eager forward.

Beside them: what a forward of fixed shape costs (`infer.fixed`) against an ordinary one of as many rows, and what
verification costs by sampling parameters, against the forward that it follows.

Limits: times of a busy machine say little; the tables hold medians.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infer.chat import token_id_list
from infer.cost import CONTEXT, WIDTHS, CostModel, measure_target, median_milliseconds, save_cost
from infer.drafters.base import Drafter, Room, TreeSettings
from infer.drafters.head import HeadDrafter, RecurrentStepper
from infer.fixed import CHUNK
from infer.machine import dtype_name, machine_facts
from infer.request import Request, RequestLaw
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import RULES, KeyedChance, verify

_MIN_STREAM_BYTES = 256 << 20
_MAX_STREAM_BYTES = 1 << 30
_STREAM_COLUMNS = 4096
_MEGABYTE, _GIGABYTE = 1e6, 1e9
_TEXT = """The tide had gone out further than anyone remembered, and the boats lay on their sides in the mud. Old men
came down to look at it, said little, and went home again. By noon the first children had walked out to the island,
carrying their shoes, and found that the lighthouse door was open and the lamp inside still warm."""
_FIXED_WIDTHS = (16, 32)
VERIFIED_NODES, VERIFIED_PATH = 32, 2
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3}
VERIFIED_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, flat": {"temperature": 8.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, **_PENALTIES},
    "no repeated 3-gram": {"temperature": 0.8, "no_repeat_ngram_size": 3},
    "all of these": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, **_PENALTIES},
}


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """One step of a head, from states to candidates. `floor_milliseconds`: bytes of its weights over the
    bandwidth."""

    name: str
    step_milliseconds: float
    weight_megabytes: float
    floor_milliseconds: float


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """A forward over a tree of `row_width` rows: ordinary, and of fixed shape."""

    row_width: int
    ordinary_milliseconds: float
    fixed_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.fixed_milliseconds / self.ordinary_milliseconds


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
    fixed: tuple[FixedCost, ...]
    verification_milliseconds: Mapping[str, float]
    verified_forward_milliseconds: float
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
    """Time the target's forward and its floors, and a draft step if `drafter` is a head.

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
        fixed=measure_fixed(target, context=context, repeats=repeats),
        verification_milliseconds=measure_verification(target, repeats=repeats),
        verified_forward_milliseconds=cost.target_milliseconds(1 + VERIFIED_NODES),
        draft=_draft_cost(drafter, cost, bandwidth),
    )


def measure_fixed(target: TargetModel, *, context: int = CONTEXT, repeats: int = 7) -> tuple[FixedCost, ...]:
    """Ordinary forwards and forwards of fixed shape over the same rows, in turn."""
    context = max(0, min(context, target.max_length - max(_FIXED_WIDTHS)))
    num_columns = -(-(context + max(_FIXED_WIDTHS)) // CHUNK) * CHUNK
    cache = target.new_cache(num_slots=1, num_columns=num_columns)
    costs = []
    for width in _FIXED_WIDTHS:
        group = RowGroup(slot=0, prefix=context, tokens=[min(7, target.vocab_size - 1)] * width)
        times: dict[int | None, list[float]] = {None: [], width: []}
        for _ in range(repeats):
            for row_width, each in times.items():
                action = partial(target.forward, [group], cache, row_width=row_width)
                each.append(median_milliseconds(action, repeats=1))
        ordinary, fixed = (statistics.median(each) for each in times.values())
        costs.append(FixedCost(row_width=width, ordinary_milliseconds=ordinary, fixed_milliseconds=fixed))
    return tuple(costs)


@torch.inference_mode()
def measure_verification(target: TargetModel, *, repeats: int = 7) -> dict[str, float]:
    """Milliseconds to verify a tree of `VERIFIED_NODES` nodes of which the walk accepts `VERIFIED_PATH`, by sampling
    parameters: processing, noise (which a drafter may have made already) and draws at every node visited."""
    prompt = _some_text(target)
    cache = target.new_cache(num_slots=1, num_columns=len(prompt))
    logits = target.forward([RowGroup(slot=0, prefix=0, tokens=prompt)], cache).logits[-1 - VERIFIED_NODES :]
    times = {}
    for name, values in VERIFIED_PARAMS.items():
        params = SamplingParams(seed=0, ignore_eos=True, **values)
        request = Request.create(prompt, params, seed=0, sample=0, rule=RULES["match"], exactness="seed", target=target)
        request.output_ids.extend(prompt)
        tree = _tree_with_accepted_path(request, logits)
        law = RequestLaw(request, tree, logits)
        times[name] = median_milliseconds(partial(_verify_afresh, request, tree, law), repeats=repeats)
    return times


def _some_text(target: TargetModel) -> list[int]:
    """64 tokens: of English where there is a tokenizer, so that the target's rows are as flat as those of real text."""
    tokens = [] if target.tokenizer is None else token_id_list(target.tokenizer(_TEXT))
    tokens = [token for token in tokens if token < target.vocab_size]
    return (tokens + list(range(min(64, target.vocab_size))))[:64]


def _verify_afresh(request: Request, tree: DraftTree, law: RequestLaw) -> None:
    request.noise.forget_before(request.num_tokens + VERIFIED_NODES)
    verdict = verify(request.rule, tree, law, KeyedChance(0, 0, 0, 0))
    assert len(verdict.path) == VERIFIED_PATH


def _tree_with_accepted_path(request: Request, logits: torch.Tensor) -> DraftTree:
    """The tokens that the target would draw, for `VERIFIED_PATH` nodes, and wrong ones below the last of them."""
    tokens: list[int] = []
    for _ in range(VERIFIED_PATH):
        tree = DraftTree.chain(tuple(tokens))
        tokens.append(RequestLaw(request, tree, logits).draw(len(tokens) - 1))
    chain = DraftTree.chain(tuple(tokens))
    drawn = RequestLaw(request, chain, logits).draw(VERIFIED_PATH - 1)
    wrong = [token for token in range(VERIFIED_NODES + 1) if token != drawn][: VERIFIED_NODES - VERIFIED_PATH]
    parents = (ROOT, *range(VERIFIED_PATH - 1), *[VERIFIED_PATH - 1] * len(wrong))
    return DraftTree(tokens=(*tokens, *wrong), parents=parents, kind=OneHot())


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
    if not isinstance(drafter, HeadDrafter) or not isinstance(drafter.stepper, RecurrentStepper):
        return None
    drafter.open(Room(num_slots=1, num_columns=192, tree=TreeSettings(), cost=cost))
    num_bytes = drafter.stepper.num_step_bytes
    return DraftCost(
        name=drafter.name,
        step_milliseconds=drafter.stepper.step_milliseconds,
        weight_megabytes=num_bytes / _MEGABYTE,
        floor_milliseconds=1e3 * num_bytes / bandwidth,
    )
