"""Training through DeepSpeed: optimiser state, gradients and weights of the head shared out among the processes.

Weights and their masters are float32, and what the head computes in is the caller's autocast, as without DeepSpeed; so
the stages differ in who holds what and in the order of sums, and in nothing else.

DeepSpeed exchanges gradients in the order in which they arrive, and takes it to be the same in every process. It is
not: a pass without rows at some depth has another graph. So a pass computes its gradients inside the forward, and hands
all of them over at once, in the parameters' own order, with zeros for those it did not reach. And since heads read each
other's weights freely, DeepSpeed is shown one module that owns every weight of the objective: ZeRO-3 gathers them
together for a pass, and hooks nothing of the head itself.

DeepSpeed averages over processes, this project sums: losses are multiplied by the number of processes.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.schema import RunConfig
from train.unroll import StepFigures
from train.updater import (
    MOMENTS,
    LossScale,
    check_state,
    load_rest,
    load_state,
    make_adamw,
    make_state,
    needs_loss_scale,
    set_rates,
    unscale_and_clip,
    whole_state,
)
from train.world import World, backend_for

_LARGEST_BUCKET = 500_000_000

ALL_OF_TORCH = {"memory_efficient_linear": False}
"""Else ZeRO-3 replaces torch's `linear` for the rest of the process, by one that rounds half precision otherwise."""

_DECIDED = {
    "train_batch_size": "optim.batch_size and optim.accumulation",
    "train_micro_batch_size_per_gpu": "optim.batch_size",
    "gradient_accumulation_steps": "optim.accumulation",
    "managed_gradient_accumulation": "optim.accumulation",
    "gradient_clipping": "optim.grad_clip",
    "gradient_allreduce_op": "the trainer",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "fp16": "train.dtype",
    "bf16": "train.dtype",
    "bfloat16": "train.dtype",
    "amp": "train.dtype",
    "torch_autocast": "train.dtype",
    "data_types": "train.dtype",
    "zero_allow_untested_optimizer": "the trainer",
    "zero_force_ds_cpu_optimizer": "the trainer",
    "zero_optimization.stage": "deepspeed.stage",
    "zero_optimization.offload_optimizer.device": "deepspeed.offload_optimizer",
    "zero_optimization.offload_param.device": "deepspeed.offload_parameters",
    "zero_optimization.cpu_offload": "deepspeed.offload_optimizer",
    "zero_optimization.memory_efficient_linear": "the trainer",
    "zero_optimization.leaf_module": "the trainer",
    "zero_optimization.stage3_module_granularity_threshold": "the trainer",
    "zero_optimization.zenflow": "the trainer",
    "elasticity": "the number of processes",
    "data_efficiency": "data",
    "curriculum_learning": "data",
    "tensor_parallel": "the trainer",
    "sequence_parallel_size": "the trainer",
    "hybrid_engine": "the trainer",
    "compile": "the trainer",
}
"""Settings of DeepSpeed that a user's file may not hold, and what decides them."""


class DeepSpeedUpdater:
    """An `Updater` around a DeepSpeed engine."""

    def __init__(
        self,
        config: RunConfig,
        objective: nn.Module,
        groups: list[list[nn.Parameter]],
        world: World,
        device: torch.device,
    ) -> None:
        assert config.deepspeed.stage is not None
        self._stage = config.deepspeed.stage
        self._world, self._device = world, device
        self._objective = objective
        self._parameters = [parameter for group in groups for parameter in group]
        self._group_sizes = [len(group) for group in groups]
        self._clip = config.optim.grad_clip
        self._scale = LossScale() if needs_loss_scale(config) else None
        self._has_passes = False
        settings = deepspeed_settings(config, device, num_elements=sum(p.numel() for p in objective.parameters()))
        self._deepspeed = start_deepspeed(world, device)
        with _silent(), _one_line(config.deepspeed.config):
            self._engine: Any = self._deepspeed.initialize(
                model=_Whole(objective, self._parameters),
                optimizer=make_adamw(groups, config.optim),
                config=settings,
                dist_init_required=False,
            )[0]
        self._tell_scale()

    @property
    def backed_off(self) -> bool:
        return self._scale is not None and self._scale.backed_off

    def loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[StepFigures]]:
        kind = self._device.type
        precision = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        figures: list[StepFigures] = []

        def compute() -> torch.Tensor:
            with precision:  # the engine switches the caller's off
                loss, of_steps = self._objective(*args, **kwargs)
            figures.extend(of_steps)
            result: torch.Tensor = loss
            return result

        factor = (1.0 if self._scale is None else self._scale.value) * self._world.size
        with _quiet():
            return self._engine(compute=compute, factor=factor, delivered_at=self._engine_scale), figures

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        with _quiet():
            self._engine.backward(loss, scale_wrt_gas=False)
        self._has_passes = True

    def update(self, rates: Sequence[float]) -> float:
        if not self._has_passes:
            return 0.0
        self._has_passes = False
        set_rates(self._engine.optimizer, rates)
        with _quiet():
            norm = self._step_whole() if self._stage == 0 else self._step_shared()
        if self._scale is not None:
            self._scale.update(norm)
            self._tell_scale()
        return norm

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        gathered = self._deepspeed.zero.GatheredParameters(list(self._objective.parameters()))
        with _quiet():
            gathered.__enter__()
        try:
            yield
        finally:
            with _quiet():
                gathered.__exit__(None, None, None)

    def state(self) -> dict[str, Any]:
        inner = self._engine.basic_optimizer
        if self._stage == 0:
            return whole_state(inner, self._scale) if self._world.is_main else {}
        self._link_moments()
        steps = [[inner.state[flat]["step"] for flat in flats if flat in inner.state] for flats in self._flat_groups()]
        with _quiet():
            tensors = dict(enumerate(self._whole_tensors(steps))) if any(steps) else {}
        return make_state(tensors, self._numbered_groups(), self._scale) if self._world.is_main else {}

    def load(self, state: Mapping[str, Any]) -> None:
        inner = self._engine.basic_optimizer
        if self._stage == 0:
            load_state(inner, self._scale, state)
            return
        if not state:
            return
        check_state(state, self._in_groups(self._parameters))
        load_rest(inner, self._scale, state)
        self._tell_scale()
        if state["state"]:
            self._load_tensors(state["state"])

    # The step

    @property
    def _engine_scale(self) -> float:
        """What the engine multiplies a loss by."""
        return 1.0 if self._stage == 0 else float(self._engine.optimizer.loss_scale)

    def _tell_scale(self) -> None:
        if self._scale is not None and self._stage:
            self._engine.optimizer.loss_scale = self._scale.value

    def _step_whole(self) -> float:
        norm = unscale_and_clip(self._parameters, self._scale, self._clip)
        if math.isfinite(norm):
            self._engine.step()
        self._engine.zero_grad()
        return norm

    def _step_shared(self) -> float:
        """The engine clips, and leaves a step out whose norm is not finite."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    # The state

    def _in_groups(self, values: Sequence[Any]) -> list[list[Any]]:
        """One value for each parameter, by group."""
        given = iter(values)
        return [[next(given) for _ in range(size)] for size in self._group_sizes]

    def _flat_groups(self) -> list[list[torch.Tensor]]:
        """By group, the tensors that the inner optimiser updates: this process's part of all of its parameters."""
        optimizer = self._engine.optimizer
        if self._stage < 3:
            return [[flat] for flat in optimizer.single_partition_of_fp32_groups]
        groups: list[list[torch.Tensor]] = [[] for _ in self._group_sizes]
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            groups[optimizer.sub_group_to_group_id[number]].append(flat)
        return groups

    def _whole_tensors(self, steps: Sequence[Sequence[torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        for parameters, of_group in zip(self._in_groups(self._parameters), steps, strict=True):
            for parameter in parameters:
                whole = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
                if self._world.is_main:
                    yield {"step": of_group[0].detach().to("cpu", copy=True)} | {
                        name: tensor.detach().to("cpu", copy=True) for name, tensor in whole.items()
                    }

    def _link_moments(self) -> None:
        """DeepSpeed links parameters to their moments once, at the first update of the first group: too early for the
        other groups, and for what is loaded."""
        optimizer = self._engine.optimizer
        if self._stage < 3 and optimizer.optimizer.state:
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def _numbered_groups(self) -> list[dict[str, Any]]:
        numbers = self._in_groups(range(len(self._parameters)))
        return [
            {**{name: value for name, value in group.items() if name != "params"}, "params": own}
            for group, own in zip(self._engine.basic_optimizer.param_groups, numbers, strict=True)
        ]

    def _load_tensors(self, tensors: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        of_parameters = self._in_groups([tensors.get(number) for number in range(len(self._parameters))])
        for flats, values in zip(self._flat_groups(), of_parameters, strict=True):
            self._make_tensors(flats, _common_step(values))
        self._link_moments()
        for parameter, values in zip(self._parameters, (one for group in of_parameters for one in group), strict=True):
            for name in MOMENTS:
                self._set_moment(parameter, name, values[name])

    def _make_tensors(self, flats: Sequence[torch.Tensor], step: float) -> None:
        """As the inner optimiser would make them at its first step."""
        for flat in flats:
            values = self._engine.basic_optimizer.state[flat]
            values["step"] = torch.tensor(step, dtype=torch.float32, device=flat.device)
            for name in MOMENTS:
                values.setdefault(name, torch.zeros_like(flat))

    def _set_moment(self, parameter: nn.Parameter, name: str, whole: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        whole = whole.to(self._device)
        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole, name)
            return
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        padded = nn.functional.pad(whole.flatten(), (0, size * self._world.size - whole.numel()))
        safe_set_local_optimizer_state(parameter, padded[size * self._world.rank :][:size], name)


class _Whole(nn.Module):
    """Owns all weights of an objective directly; what computes with them is hidden from DeepSpeed."""

    def __init__(self, objective: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._trained = tuple(trained)
        for name, parameter in objective.named_parameters():
            self.register_parameter(name.replace(".", "/"), parameter)

    def forward(self, *, compute: Callable[[], torch.Tensor], factor: float, delivered_at: float) -> torch.Tensor:
        """The loss that `compute` gives, with the gradients of `factor` times it already made: a backward from
        `delivered_at` times the result hands them out."""
        loss = compute()
        gradients: Sequence[torch.Tensor]
        if loss.requires_grad:
            with torch.autocast(loss.device.type, enabled=False):  # which is for forwards
                gradients = torch.autograd.grad(loss * factor, self._trained, allow_unused=True, materialize_grads=True)
        else:
            gradients = [torch.zeros_like(parameter) for parameter in self._trained]
        handed: torch.Tensor = _Delivery.apply(loss.detach(), gradients, delivered_at, *self._trained)  # type: ignore[no-untyped-call]
        return handed


class _Delivery(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: Sequence[torch.Tensor], delivered_at: float, *trained: nn.Parameter
    ) -> torch.Tensor:
        ctx.gradients, ctx.delivered_at = list(gradients), delivered_at
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        torch._foreach_mul_(gradients, scales[0] / ctx.delivered_at)
        return None, None, None, *gradients


def _common_step(values: Sequence[Mapping[str, torch.Tensor] | None]) -> float:
    """DeepSpeed counts the steps of a group, not of a parameter."""
    steps = {None if one is None else float(one["step"]) for one in values}
    step = steps.pop()
    if steps or step is None:
        raise ValueError(
            "the checkpoint's parameters were not all updated equally often, which DeepSpeed cannot go on from: "
            "resume without it (deepspeed.stage=null)"
        )
    return step


# Settings


def deepspeed_settings(config: RunConfig, device: torch.device, *, num_elements: int) -> dict[str, Any]:
    """What DeepSpeed is told: defaults, the user's file over them, and over both what the recipe decides."""
    decided = config.deepspeed
    assert decided.stage is not None
    pinned = device.type == "cuda"
    zero: dict[str, Any] = {"stage": decided.stage, **ALL_OF_TORCH}
    defaults: dict[str, Any] = {"reduce_bucket_size": max(1, min(_LARGEST_BUCKET, num_elements))}
    for name, is_given in (
        ("offload_optimizer", decided.offload_optimizer),
        ("offload_param", decided.offload_parameters),
    ):
        if is_given:
            zero[name] = {"device": "cpu"}
            defaults[name] = {"pin_memory": pinned}
    settings = {
        "train_micro_batch_size_per_gpu": config.optim.batch_size,
        "gradient_accumulation_steps": 1,  # the trainer says which pass is the last
        "gradient_clipping": (config.optim.grad_clip or 0.0) if decided.stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    further = {} if decided.config is None else read_settings(decided.config)
    _refuse_offload_of_nothing(further, zero, decided.config)
    return _merged(_merged({"zero_optimization": defaults}, further), settings)


def read_settings(path: str | Path) -> dict[str, Any]:
    """A user's file of DeepSpeed settings. `auto`, which other trainers fill in, is left out."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"deepspeed.config: {path} cannot be read ({error.strerror}); give a JSON file") from error
    except ValueError as error:
        raise ValueError(f"deepspeed.config: {path} is not JSON ({error}); give a JSON file") from error
    if not isinstance(settings, dict):
        raise ValueError(f"deepspeed.config: {path} holds a {type(settings).__name__}; expected a JSON object")
    settings = _without_auto(settings)
    for name in _names(settings):
        owner = next((key for key in _DECIDED if name == key or name.startswith(f"{key}.")), None)
        if owner is not None:
            raise ValueError(
                f"deepspeed.config: {path} sets {name}, which {_DECIDED[owner]} decides: take it out of the file"
            )
    return settings


def _refuse_offload_of_nothing(further: Mapping[str, Any], zero: Mapping[str, Any], path: str | None) -> None:
    for name, setting in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        if name in further.get("zero_optimization", {}) and name not in zero:
            raise ValueError(
                f"deepspeed.config: {path} sets zero_optimization.{name}, but nothing is offloaded: "
                f"set deepspeed.{setting}=true, or take it out of the file"
            )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(copy.deepcopy(below))
    for name, value in above.items():
        under = result.get(name)
        result[name] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {name: _without_auto(value) if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in cleaned.items() if value != "auto" and (value != {} or settings[name] == {})}


def _names(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, sections first."""
    for name, value in settings.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


# DeepSpeed itself


def start_deepspeed(world: World, device: torch.device) -> Any:
    """The package, ready for the processes of `world` on `device`."""
    os.environ.setdefault(
        "DS_ACCELERATOR", device.type
    )  # else it takes any GPU it finds, and warns where there is none
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0 if world.size == 1 else world.local_rank))
    with _silent():
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError(
                f"deepspeed.stage is given, but DeepSpeed cannot be imported ({error}): "
                "pip install 'headstart[deepspeed]', or set deepspeed.stage=null"
            ) from error
        deepspeed.utils.logger.setLevel(logging.ERROR)
        accelerator = deepspeed.accelerator.get_accelerator().device_name()
        if accelerator != device.type:
            raise ValueError(
                f"DeepSpeed works on {accelerator} here, the head is on {device}: set DS_ACCELERATOR={device.type}"
            )
        if not torch.distributed.is_initialized():
            assert world.size == 1, "World.start comes first"
            alone = torch.distributed.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs; no port, no file
            torch.distributed.init_process_group(backend_for(device.type), store=alone, rank=0, world_size=1)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # C++ that would be compiled now, for CPUs alone
        if not deepspeed.comm.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that DeepSpeed gives rise to by what it calls of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Without any warning: of modules that are imported and made, which users can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _one_line(path: str | None) -> Iterator[None]:
    """DeepSpeed's refusal of a user's settings, as an error of this project."""
    try:
        yield
    except Exception as error:
        if path is None or type(error) is ValueError:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"deepspeed.config: DeepSpeed does not take {path}: {reason}") from error
