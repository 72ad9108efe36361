"""The processes that share a run: started by `torchrun` or `deepspeed`, known by what these set in the environment.

One process is the world of one, in which nothing is initialised and every exchange is its own answer. Exchanges go
through CPU memory and gloo, also beside nccl: they are a few numbers a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

Value = TypeVar("Value")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: one of them decodes held-out prompts while the rest wait."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run; `rank` 0 is the main one, which writes, prints and evaluates."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """As the launcher says; the world of one without a launcher."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = [name for name in names if os.environ.get(name)]
        if "WORLD_SIZE" not in given:
            return cls()
        try:
            values = {name: int(os.environ.get(name) or "0") for name in names}
        except ValueError as error:
            raise ValueError(
                f"{', '.join(f'{name}={os.environ.get(name)!r}' for name in names)} in the environment: expected whole "
                "numbers, as torchrun or deepspeed set them; unset them to run alone"
            ) from error
        rank, size = values["RANK"], values["WORLD_SIZE"]
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={size} in the environment: the rank must be below the size")
        return cls(rank=rank, size=size, local_rank=values["LOCAL_RANK"])

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def voice(self, notice: Callable[[str], None]) -> Callable[[str], None]:
        """`notice` for the main process; the others say nothing."""
        return notice if self.is_main else lambda text: None

    def device(self, device: str) -> str:
        """`auto` and `cuda` become this process's own GPU, where there are some."""
        if self.size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return device

    def start(self) -> None:
        """Meet the other processes. Called once, before the first exchange."""
        if self.size == 1 or torch.distributed.is_initialized():
            return
        backend = backend_for("cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=PATIENCE)

    def stop(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all processes."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The greatest of each value in any process."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX)

    def broadcast(self, value: Value) -> Value:
        """The main process's value, in every process."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """Every process's value, by rank, in every process."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(box, value)
        return box

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def barrier(self) -> None:
        if self.size > 1:
            self._reduced([0.0], torch.distributed.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], how: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, op=how)
        return [float(value) for value in tensor.tolist()]


def backend_for(device_type: str) -> str:
    """torch's backends for a process that computes there: gloo for CPU memory always, nccl besides on GPUs."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
