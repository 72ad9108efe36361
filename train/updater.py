"""What happens to a step's loss: gradients, summed over all processes, and one update of the optimiser.

A step's passes hand their losses to `backward`; `update` then clips the sum of all processes' gradients by its norm and
makes the update, or none if the norm is not finite. `LocalUpdater` does that with torch alone, `train.zero` through
DeepSpeed. All of them keep their state in one form, so that a run goes on with another of them, or with another number
of processes, from any checkpoint.

What is trained in a step is a group of parameters: one without any gradient in any process rests, and in all others a
parameter without a gradient has a zero one. So what a step does to a weight does not depend on which process saw it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from configs.schema import OptimConfig, RunConfig
from train.unroll import StepFigures
from train.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"
"""Of the state: what `LossScale` remembers. The rest is `torch.optim.AdamW.state_dict()`."""

_BUCKET_ELEMENTS = 1 << 23
"""Gradients that processes exchange at once."""


class Updater(Protocol):
    """See the module. Every method is called by all processes, equally often and in the same order."""

    @property
    def backed_off(self) -> bool:
        """Whether the last update was left out because float16 overflowed: the loss scale is lower now, go on."""

    def loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[StepFigures]]:
        """The objective of a pass, called with these arguments, under the caller's autocast."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the step's gradients those of what `loss` gave. `is_last`: the step's last pass, of all processes."""

    def update(self, rates: Sequence[float]) -> float:
        """Make the step with a learning rate for each group; -> the gradients' norm over all processes, before it was
        clipped. If it is not finite the weights stay as they are. A step without a pass changes nothing."""

    def whole(self) -> AbstractContextManager[Any]:
        """Inside, every process has the head's whole weights, to read; between steps only."""

    def state(self) -> dict[str, Any]:
        """The optimiser's state, in the form of `torch.optim.AdamW.state_dict()`, whole and in CPU memory, for the main
        process; others take part and get nothing."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, in whichever updater and number of processes. The weights are the module's."""


def make_updater(
    config: RunConfig,
    objective: nn.Module,
    groups: list[list[nn.Parameter]],
    world: World,
    device: torch.device | str,
) -> Updater:
    """`objective`: gives (loss, figures); `groups`: what is trained in it, by learning rate, frozen parameters aside.
    Its weights are on `device`, and in the main process at least they are those to go on from."""
    groups = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
    assert all(groups), "a group of no parameters"
    if config.deepspeed.stage is None:
        return LocalUpdater(objective, groups, config.optim, world, scaled=needs_loss_scale(config))
    from train.zero import DeepSpeedUpdater

    return DeepSpeedUpdater(config, objective, groups, world, torch.device(device))


def needs_loss_scale(config: RunConfig) -> bool:
    return config.train.dtype == "float16"


class LocalUpdater:
    """Whole weights, gradients and optimiser in every process; gradients are summed after a step's last pass."""

    def __init__(
        self,
        objective: nn.Module,
        groups: list[list[nn.Parameter]],
        optim: OptimConfig,
        world: World,
        *,
        scaled: bool = False,
    ) -> None:
        self._objective = objective
        self._groups = groups
        self._world = world
        self._clip = optim.grad_clip
        self._optimizer = make_adamw(groups, optim)
        self._scale = LossScale() if scaled else None
        self._share_weights()

    @property
    def backed_off(self) -> bool:
        return self._scale is not None and self._scale.backed_off

    def loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[StepFigures]]:
        result: tuple[torch.Tensor, list[StepFigures]] = self._objective(*args, **kwargs)
        return result

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if loss.requires_grad:
            (loss if self._scale is None else loss * self._scale.value).backward()

    def update(self, rates: Sequence[float]) -> float:
        parameters = self._summed()
        norm = unscale_and_clip(parameters, self._scale, self._clip)
        set_rates(self._optimizer, rates)
        if parameters and math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if parameters and self._scale is not None:
            self._scale.update(norm)
        return norm

    def whole(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return whole_state(self._optimizer, self._scale) if self._world.is_main else {}

    def load(self, state: Mapping[str, Any]) -> None:
        load_state(self._optimizer, self._scale, state)

    def _share_weights(self) -> None:
        """Start every process from the main one's weights."""
        if self._world.size > 1:
            trained = [parameter for group in self._groups for parameter in group]
            for parameter in dict.fromkeys([*self._objective.parameters(), *trained]):
                torch.distributed.broadcast(parameter.data, src=0)

    @torch.no_grad()
    def _summed(self) -> list[nn.Parameter]:
        """The parameters that this step trains, with their gradients summed over all processes."""
        has_gradient = [any(parameter.grad is not None for parameter in group) for group in self._groups]
        trained = self._world.max([float(has) for has in has_gradient])
        parameters = [
            one for group, is_trained in zip(self._groups, trained, strict=True) if is_trained for one in group
        ]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._world.size > 1:
            for bucket in _buckets([gradient_of(parameter) for parameter in parameters]):
                self._sum(bucket)
        return parameters

    def _sum(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._world.sum_tensors([flat])
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class LossScale:
    """What losses are multiplied by, so that float16 holds their gradients: halved when they overflow, doubled after a
    long time without."""

    FIRST, LEAST, STEPS_TO_DOUBLE = 2.0**16, 1.0, 2000

    def __init__(self) -> None:
        self.value = self.FIRST
        self.backed_off = False
        self._steps = 0

    def update(self, norm: float) -> None:
        """After a step with gradients of this norm. Below `LEAST` it is not the scale that makes them overflow."""
        finite = math.isfinite(norm)
        self.backed_off = not finite and self.value > self.LEAST
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, self.LEAST)
        elif self._steps == self.STEPS_TO_DOUBLE:
            self.value, self._steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "steps": self._steps}

    def load(self, state: Mapping[str, float]) -> None:
        self.value, self._steps = float(state["value"]), int(state["steps"])


def make_adamw(groups: Sequence[Sequence[nn.Parameter]], optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": list(group)} for group in groups],
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def unscale_and_clip(parameters: Sequence[nn.Parameter], scale: LossScale | None, clip: float | None) -> float:
    """-> the norm of the gradients before they were clipped."""
    if not parameters:
        return 0.0
    if scale is not None:
        for parameter in parameters:
            gradient_of(parameter).mul_(1 / scale.value)
    total = torch.nn.utils.get_total_norm([gradient_of(parameter) for parameter in parameters])
    norm = float(total)  # the device is waited for here, once
    if clip is not None and norm > clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, total)
    return norm


def whole_state(optimizer: torch.optim.AdamW, scale: LossScale | None) -> dict[str, Any]:
    """A copy of the optimiser's state in CPU memory."""
    state = optimizer.state_dict()
    tensors = {
        number: {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return make_state(tensors, state["param_groups"], scale)


def make_state(
    tensors: Mapping[int, Mapping[str, torch.Tensor]], param_groups: list[dict[str, Any]], scale: LossScale | None
) -> dict[str, Any]:
    extra = {} if scale is None else {LOSS_SCALE: scale.state()}
    return {"state": dict(tensors), "param_groups": param_groups, **extra}


def load_state(optimizer: torch.optim.AdamW, scale: LossScale | None, state: Mapping[str, Any]) -> None:
    """Copies of the tensors; settings such as betas stay the optimiser's own, but for the learning rates."""
    if not state:
        return
    check_state(state, [group["params"] for group in optimizer.param_groups])
    tensors = {
        number: {name: value.clone() for name, value in values.items()} for number, values in state["state"].items()
    }
    optimizer.load_state_dict({"state": tensors, "param_groups": optimizer.state_dict()["param_groups"]})
    load_rest(optimizer, scale, state)


def load_rest(optimizer: torch.optim.Optimizer, scale: LossScale | None, state: Mapping[str, Any]) -> None:
    """What a state holds besides tensors."""
    set_rates(optimizer, [group["lr"] for group in state["param_groups"]])
    if scale is not None and LOSS_SCALE in state:
        scale.load(state[LOSS_SCALE])


def check_state(state: Mapping[str, Any], groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuse the state of other parameters. `groups`: tensors with the shapes of what is trained."""
    then = [len(group["params"]) for group in state["param_groups"]]
    if then != [len(group) for group in groups]:
        raise ValueError(
            f"the optimiser's state is for groups of {then} parameters, this run trains {[len(g) for g in groups]}: "
            "it belongs to another head, start a new run with head.init_from instead"
        )
    shapes = [shape_of(parameter) for group in groups for parameter in group]
    for number, values in state["state"].items():
        for name in MOMENTS:
            if tuple(values[name].shape) != shapes[number]:
                raise ValueError(
                    f"the optimiser's {name} of parameter {number} has shape {tuple(values[name].shape)}, the "
                    f"parameter {shapes[number]}: it belongs to another head, start a new run with head.init_from"
                )


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """A parameter's whole shape, also where its process holds a part of it (ZeRO-3)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of gradients of about as many elements as are exchanged at once, in an order that is the same everywhere."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        if bucket and sum(one.numel() for one in bucket) + gradient.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
