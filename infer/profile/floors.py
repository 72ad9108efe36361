"""The least that a part of a round could take: its bytes over the machine's bandwidth, or its multiplications over the
rate at which the machine multiplies, whichever is longer.

Bytes are weights and the key/value rows that attention reads; activations are left out, and so is all that is not a
matrix product. So a floor is a bound, never an estimate. It takes weights to come from memory: what fits into the
processor's caches, such as a small head between two steps, may be read faster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from infer.cost import median_milliseconds
from infer.packing import PackedWeight, is_packable
from infer.rows import RowGroup
from infer.target import TargetModel

_MIN_STREAM_BYTES = 256 << 20
_MAX_STREAM_BYTES = 1 << 30
_STREAM_COLUMNS = 4096
_PRODUCT_SIZE, _LARGE_PRODUCT_SIZE = 1536, 8192
_PRODUCTS = ("mm", "linear", "matmul", "gemm", "gemv", "attention")
"""What an operator that reads weights or a cache is called."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What this machine reaches at best: reading, and multiplying and adding (two operations)."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Milliseconds that reading and multiplying take at least."""

    reading_milliseconds: float
    multiplying_milliseconds: float

    @property
    def milliseconds(self) -> float:
        return max(self.reading_milliseconds, self.multiplying_milliseconds)

    @property
    def bound(self) -> str:
        """Which of the two is longer."""
        return "bandwidth" if self.reading_milliseconds >= self.multiplying_milliseconds else "arithmetic"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "milliseconds": self.milliseconds, "bound": self.bound}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes to be read, and operations (two for a multiplication and its addition)."""

    num_bytes: float = 0.0
    num_operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            num_bytes=self.num_bytes + other.num_bytes, num_operations=self.num_operations + other.num_operations
        )

    def times(self, count: float) -> Work:
        return Work(num_bytes=self.num_bytes * count, num_operations=self.num_operations * count)

    def over(self, count: float) -> Work:
        return self.times(1 / count)

    def floor(self, speeds: Speeds) -> Floor:
        return Floor(
            reading_milliseconds=1e3 * self.num_bytes / speeds.bytes_per_second,
            multiplying_milliseconds=1e3 * self.num_operations / speeds.operations_per_second,
        )


class ForwardWork:
    """What a forward of the target has to read and multiply, by its sizes: however it is computed."""

    def __init__(self, target: TargetModel) -> None:
        self._weight_bytes = target.num_weight_bytes
        self._operations_per_row = 2 * sum(matrix.numel() for matrix in weight_matrices(target.model))
        cache = target.new_cache(num_slots=1, num_columns=1)
        self._layer_column_bytes = cache.num_bytes // target.num_layers
        head_sizes = cache.keys.shape[-1] + cache.values.shape[-1]
        self._operations_per_pair = 2 * int(target.config.num_attention_heads) * head_sizes
        self._windows = Counter(layer_windows(target))

    def of(self, groups: Sequence[RowGroup]) -> Work:
        """The work of one forward over `groups`, with logits of all rows."""
        num_rows = sum(len(group.tokens) for group in groups)
        num_bytes = self._weight_bytes
        num_operations = self._operations_per_row * num_rows
        for group in groups:
            num_tree_pairs = _num_tree_pairs(group)
            for window, num_layers in self._windows.items():
                seen = group.prefix if window is None else min(group.prefix, window)
                pairs = len(group.tokens) * seen + num_tree_pairs
                num_bytes += num_layers * self._layer_column_bytes * (seen + len(group.tokens))
                num_operations += num_layers * self._operations_per_pair * pairs
        return Work(num_bytes=num_bytes, num_operations=num_operations)


def _num_tree_pairs(group: RowGroup) -> int:
    """Pairs of a row and one of the group's own that it sees."""
    num_rows = len(group.tokens)
    return num_rows * (num_rows + 1) // 2 if group.ancestors is None else int(group.ancestors.sum())


def layer_windows(target: TargetModel) -> list[int | None]:
    """The sliding window of each of the target's layers; None where a layer sees everything."""
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.num_layers
    window = getattr(target.config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds[: target.num_layers]]


class WorkCounter(TorchDispatchMode):
    """Adds up the work of the matrix products within its block, as they are called: for networks of any form.

    The second factor of a product is what has to be read, the first an activation just made; what several products
    read is counted once. A product that is computed some other way is not seen, so that the floor lies too low, never
    too high.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read: dict[tuple[int, int], int] = {}
        self._num_operations = 0

    @property
    def work(self) -> Work:
        return Work(num_bytes=sum(self._read.values()), num_operations=self._num_operations)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1]
        operands = [each for each in args if isinstance(each, torch.Tensor) and each.ndim >= 2]
        if "attention" in name:
            query, *read = operands[:3]
            self._count(read, 2 * query.shape[-2] * sum(each.numel() for each in read))
        elif any(product in name for product in _PRODUCTS):
            # A 2-D first argument of addmm or baddbmm is what is added.
            first, second = operands[-2:] if name.startswith(("addmm", "baddbmm")) else operands[:2]
            self._count([second], 2 * result.numel() * first.shape[-1])
        return result

    def _count(self, read: Sequence[torch.Tensor], num_operations: int) -> None:
        self._read.update({(_place(each), each.numel()): each.numel() * each.element_size() for each in read})
        self._num_operations += num_operations


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor lies. Packed layouts of some backends do not say, and are told apart as objects."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


@torch.inference_mode()
def measure_bandwidth(
    dtype: torch.dtype, device: torch.device, *, num_bytes: int | None = None, repeats: int = 7
) -> float:
    """Bytes a second at which a matrix-vector product reads a matrix of `num_bytes` (default: one that no cache
    holds), by the fastest way that this machine has.

    It is what reading weights can reach at best. A product in the model's dtype, rather than a memory copy,
    because it reads and does not write, as a forward does.
    """
    num_bytes = num_bytes or min(max(_MIN_STREAM_BYTES, 4 * last_level_cache_bytes()), _MAX_STREAM_BYTES)
    num_rows = max(1, num_bytes // (_STREAM_COLUMNS * dtype.itemsize))
    matrix = torch.ones((num_rows, _STREAM_COLUMNS), dtype=dtype, device=device)
    vector = torch.ones((1, _STREAM_COLUMNS), dtype=dtype, device=device)
    return matrix.nbytes / min(_product_seconds(matrix, vector, repeats=repeats))


@torch.inference_mode()
def measure_multiplication(
    dtype: torch.dtype, device: torch.device, *, size: int | None = None, repeats: int = 7
) -> float:
    """Operations a second (two for a multiplication and its addition) of one large product of square matrices, by the
    fastest way that this machine has."""
    size = size or (_PRODUCT_SIZE if device.type == "cpu" else _LARGE_PRODUCT_SIZE)
    matrix = torch.ones((size, size), dtype=dtype, device=device)
    return 2 * size**3 / min(_product_seconds(matrix, matrix, repeats=repeats))


def _product_seconds(matrix: torch.Tensor, inputs: torch.Tensor, *, repeats: int) -> Iterator[float]:
    """Of `inputs` with `matrix`: as torch multiplies, and with it laid out in the ways that `infer.packing` has."""
    yield _best_seconds(lambda: functional.linear(inputs, matrix), repeats=repeats)
    for kernels in (False, True) if is_packable(matrix) else ():
        yield _best_seconds(partial(PackedWeight([matrix], kernels=kernels), inputs), repeats=repeats)


@torch.inference_mode()
def measure_matmuls(target: TargetModel, *, repeats: int = 7) -> float:
    """Milliseconds to multiply each of the target's weight matrices once by one row, as it does itself, with nothing
    in between."""
    projections = _projections(target.model)
    sizes = [int(getattr(module, "in_features", module.weight.shape[0])) for module in projections]
    # Siblings that share a product share it if they are given the same tensor.
    inputs = {size: torch.ones((1, size), dtype=target.dtype, device=target.device) for size in sizes}

    def multiply_all() -> None:
        for module, size in zip(projections, sizes, strict=True):
            module(inputs[size])

    return 1e3 * _best_seconds(multiply_all, repeats=repeats)


def _projections(model: nn.Module) -> list[Any]:
    """The modules that multiply by a matrix, in the order of a forward."""
    weights = ((module, getattr(module, "weight", None)) for module in model.modules())
    return [
        module
        for module, weight in weights
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)
    ]


def _best_seconds(action: Callable[[], object], *, repeats: int) -> float:
    """The least of several times: of a floor, whatever made the others longer is no part."""
    return min(median_milliseconds(action, repeats=1) for _ in range(repeats)) / 1e3


def weight_matrices(model: nn.Module) -> list[torch.Tensor]:
    """Every matrix [out, in] that a forward multiplies by; fused projections, which are views of one
    tensor, as one."""
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for module in _projections(model):
        # GPT-2's Conv1D keeps its weight transposed.
        matrix = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
        by_storage[matrix.untyped_storage().data_ptr()].append(matrix)
    return [matrix for views in by_storage.values() for matrix in _joined(views)]


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
