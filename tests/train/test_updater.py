"""Gradients and optimiser state over one process or two, with DeepSpeed and without: all of them train alike.

Every course is run through a real head and its unrolled loss. What may differ between ways of sharing the work out is
the order in which float32 numbers are added up, so figures and weights must agree to a few units of float32 rounding;
AdamW's first steps magnify it where a gradient is near zero, which `WEIGHTS` allows for at the rates used here.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import DeepSpeedConfig, OptimConfig
from heads.registry import FAMILIES
from tests.train.toy_objective import Course, Objective, Outcome, make_batch, make_objective, train
from tests.train.two_processes import Processes
from train.unroll import plan_rows
from train.updater import LossScale, Updater, make_updater
from train.world import World
from train.zero import deepspeed_settings, read_settings

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
WAYS = [None, *(pytest.param(stage, marks=needs_deepspeed) for stage in range(4))]
STAGES = [pytest.param(stage, marks=needs_deepspeed) for stage in range(4)]
FIGURES, WEIGHTS = 2e-6, 1e-5
HALF_FIGURES, HALF_WEIGHTS = 1e-3, 2e-3
"""A weight whose float32 value lies at the edge between two halves is rounded up in one run and down in the other."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def one() -> Iterator[Processes]:
    """A process of its own, for what would leave traces in this one."""
    with Processes(1) as processes:
        yield processes


@pytest.fixture(scope="module")
def sharing_all(tmp_path_factory: pytest.TempPathFactory) -> str:
    """DeepSpeed keeps small weights whole unless it is told not to, and these are all small."""
    path = tmp_path_factory.mktemp("settings") / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    return str(path)


def through(stage: int | None, settings: str, **changes: Any) -> Course:
    return Course(stage=stage, settings=settings if stage == 3 else None, **changes)


def assert_alike(outcome: Outcome, expected: Outcome, *, figures: float = FIGURES, weights: float = WEIGHTS) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=figures, nan_ok=True)
    assert outcome.norms == pytest.approx(expected.norms, rel=figures, nan_ok=True)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, tensor in outcome.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], atol=weights, rtol=0, msg=name)


def without_figures(outcome: Outcome) -> Outcome:
    return replace(outcome, losses=[], norms=[])


def assert_same(state: Any, expected: Any) -> None:
    """Equal throughout, tensors bit for bit."""
    assert type(state) is type(expected)
    if isinstance(state, torch.Tensor):
        assert torch.equal(state, expected)
    elif isinstance(state, dict):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert_same(value, expected[name])
    elif isinstance(state, list | tuple):
        assert len(state) == len(expected)
        for value, other in zip(state, expected, strict=True):
            assert_same(value, other)
    else:
        assert state == expected


# Sharing out


@pytest.mark.parametrize("stage", WAYS)
def test_two_processes_train_as_one(two: Processes, sharing_all: str, stage: int | None) -> None:
    """Losses, gradient norms and weights of several clipped steps of several passes are those of one process, and the
    same in both processes, bit for bit."""
    first, second = two.run(train, through(stage, sharing_all))
    assert_alike(first, train(Course()))
    assert_same(second.weights, first.weights)
    assert second.norms == first.norms


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_through_deepspeed(one: Processes, sharing_all: str, stage: int) -> None:
    """Without a launcher too: a world of one needs no other process to be met."""
    (outcome,) = one.run(train, through(stage, sharing_all))
    assert_alike(outcome, train(Course()))


@needs_deepspeed
def test_what_the_stages_share_out(two: Processes, sharing_all: str) -> None:
    """From stage 1 on a process remembers half of the moments, but for padding and the counts of steps."""
    whole = train(Course()).num_moments
    for stage in (None, 0, 1, 2, 3):
        for outcome in two.run(train, through(stage, sharing_all)):
            expected = whole / 2 if stage else whole
            assert outcome.num_moments == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("stage", WAYS)
def test_no_clipping(two: Processes, sharing_all: str, stage: int | None) -> None:
    """No limit and a limit out of reach leave gradients as they are, in every way of sharing."""
    first, _ = two.run(train, through(stage, sharing_all, clip=None))
    assert_alike(first, train(Course(clip=100.0)))


@pytest.mark.parametrize("stage", WAYS)
@pytest.mark.parametrize("answers", [(9, 7, 8), (9,)])
def test_passes_that_only_keep_company(
    two: Processes, sharing_all: str, stage: int | None, answers: tuple[int, ...]
) -> None:
    """A process without a conversation of its own runs another's at weight zero, which changes nothing."""
    course = through(stage, sharing_all, answers=(answers,) * 3)
    first, _ = two.run(train, course)
    assert_alike(first, train(replace(course, stage=None, settings=None)))


@pytest.mark.parametrize("stage", WAYS)
def test_processes_that_reach_different_weights(two: Processes, sharing_all: str, stage: int | None) -> None:
    """One process's answers end before the later depths of a head with a network a depth, the other's do not.

    DeepSpeed pairs up the gradients of processes in the order in which they arrive, so without care those of different
    weights would be added to each other."""
    course = through(stage, sharing_all, family="medusa", answers=((9, 2, 8, 3), (2, 9, 3, 8), (2, 2, 9, 9)))
    first, second = two.run(train, course)
    assert_alike(first, train(replace(course, stage=None, settings=None)))
    assert_same(second.weights, first.weights)


@pytest.mark.parametrize("stage", [None, *(pytest.param(stage, marks=needs_deepspeed) for stage in (2, 3))])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_head_and_its_own_loss(two: Processes, sharing_all: str, stage: int | None, family: str) -> None:
    """Heads hand their LM head's weight to the loss, which makes its gradient on the way forward; with every weight
    shared out that is what it is in one process, of all families, depths that some rows do not reach included."""
    course = through(stage, sharing_all, family=family, answers=((9, 2, 8, 6),) * 3, is_trainers=True)
    first, _ = two.run(train, course)
    assert_alike(first, train(replace(course, stage=None, settings=None)))


@pytest.mark.parametrize("stage", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(two: Processes, sharing_all: str, stage: int | None, dtype: str) -> None:
    """The head computes in the caller's autocast, also inside DeepSpeed, which would switch it off: the first step of
    one process in that precision is met to float32's rounding, and that in float32 missed by far."""
    first, _ = two.run(train, through(stage, sharing_all, dtype=dtype))
    expected = train(Course(dtype=dtype))
    assert_alike(first, expected, figures=HALF_FIGURES, weights=HALF_WEIGHTS)
    assert first.losses[0] == pytest.approx(expected.losses[0], rel=FIGURES)
    assert first.norms[0] == pytest.approx(expected.norms[0], rel=FIGURES)
    assert first.norms[0] != pytest.approx(train(Course()).norms[0], rel=10 * FIGURES)


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_optimiser(two: Processes, sharing_all: str, stage: int) -> None:
    first, _ = two.run(train, through(stage, sharing_all, offload_optimizer=True))
    assert_alike(first, train(Course()))


@needs_deepspeed
def test_offloaded_weights(two: Processes, sharing_all: str) -> None:
    first, _ = two.run(train, through(3, sharing_all, offload_parameters=True, offload_optimizer=True))
    assert_alike(first, train(Course()))


@pytest.mark.parametrize("stage", WAYS)
def test_frozen_weights_stay(two: Processes, sharing_all: str, stage: int | None) -> None:
    """What is not trained keeps its bits through every stage, is whole in what is saved, and no optimiser knows it
    (pitfall: frozen weights in optimisers and checkpoints)."""
    frozen = ("fc.weight", "midlayer.mlp.up_proj.weight")
    first, second = two.run(train, through(stage, sharing_all, frozen=frozen))
    before = make_objective().head.state_dict()
    for outcome in (first, second):
        for name in frozen:
            assert torch.equal(outcome.weights[name], before[name])
    trained = [name for name, _ in make_objective().head.named_parameters() if name not in frozen]
    assert len(first.state["state"]) == len(trained)
    assert not any(torch.equal(first.weights[name], before[name]) for name in trained)


@needs_deepspeed
def test_no_empty_tensor_is_read(two: Processes, sharing_all: str) -> None:
    """Between steps a process of stage 3 holds nothing of the head's shape; inside `whole` it has all of it
    (pitfall: heads saved with tensors of size zero)."""
    first, second = two.run(train, through(3, sharing_all))
    for outcome in (first, second):
        assert all(shape == (0,) for shape in outcome.outside.values())
        assert all(tensor.numel() for tensor in outcome.weights.values())


@pytest.mark.parametrize("stage", WAYS)
def test_a_step_of_no_pass_changes_nothing(two: Processes, sharing_all: str, stage: int | None) -> None:
    course = through(stage, sharing_all, answers=((9, 7), (), (8, 6)))
    first, _ = two.run(train, course)
    assert first.norms[1] == 0.0
    assert_alike(first, train(replace(course, stage=None, settings=None)))


# Gradients that are not finite


@pytest.mark.parametrize("stage", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_overflow_makes_no_step(two: Processes, sharing_all: str, stage: int | None, dtype: str) -> None:
    """Weights and moments stay as they are in all processes; float16 goes on with a lower loss scale and says so."""
    course = through(stage, sharing_all, dtype=dtype, overflow_at=1)
    first, second = two.run(train, course)
    assert not math.isfinite(first.norms[1])
    assert [math.isfinite(norm) for norm in second.norms] == [True, False, True, True]
    assert first.backed_off == [False, dtype == "float16", False, False]
    alone = replace(course, stage=None, settings=None)
    assert_alike(without_figures(first), without_figures(train(alone)), weights=HALF_WEIGHTS)
    (before, _), (after, _) = two.run(train, course, None, 0, 1), two.run(train, course, None, 0, 2)
    assert_same(after.weights, before.weights)
    assert_same(after.state["state"], before.state["state"])
    if dtype == "float16":
        assert after.state["loss_scale"]["value"] == before.state["loss_scale"]["value"] / 2


def test_the_loss_scale_follows_overflows() -> None:
    """Halved at each overflow, doubled after a long time without, and at its least it takes no blame."""
    scale = LossScale()
    scale.update(math.inf)
    assert (scale.value, scale.backed_off) == (LossScale.FIRST / 2, True)
    for _ in range(LossScale.STEPS_TO_DOUBLE):
        scale.update(1.0)
    assert (scale.value, scale.backed_off) == (LossScale.FIRST, False)
    overflows = [scale.update(math.nan) or scale.backed_off for _ in range(20)]
    assert overflows.count(True) == 16
    assert not overflows[-1]
    assert scale.value == LossScale.LEAST


# The state


EVERY_WAY = ("alone", None, 0, 1, 2, 3)
QUICK = {(1, 3), (3, 2), *itertools.product(["alone"], EVERY_WAY), *itertools.product(EVERY_WAY, ["alone"])}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(EVERY_WAY, repeat=2)
    ],
)
def test_any_way_goes_on_from_any_other(two: Processes, sharing_all: str, then: Any, now: Any) -> None:
    """Two steps one way and two another, from the state and weights of the first, are four steps without a break."""
    if importlib.util.find_spec("deepspeed") is None and (then in range(4) or now in range(4)):
        pytest.skip("DeepSpeed is not installed")

    def run(way: Any, *arguments: Any) -> Outcome:
        if way == "alone":
            return train(Course(), *arguments)
        outcome: Outcome = two.run(train, through(way, sharing_all), *arguments)[0]
        return outcome

    broken_off = run(then, None, 0, 2)
    rest = run(now, broken_off, 2, 4)
    assert_alike(
        replace(rest, losses=broken_off.losses + rest.losses, norms=broken_off.norms + rest.norms), train(Course())
    )


@pytest.mark.parametrize("stage", WAYS)
def test_what_was_loaded_is_saved_again(two: Processes, sharing_all: str, stage: int | None) -> None:
    """Loading and saving at once gives the same tensors bit for bit, in the form of torch's own optimiser."""
    start = train(Course(), None, 0, 2)
    first, second = two.run(train, through(stage, sharing_all), start, 2, 2)
    assert_same(first.state, start.state)
    assert_same(first.weights, start.weights)
    assert second.state == {}
    parameters = [torch.nn.Parameter(torch.zeros_like(values["exp_avg"])) for values in start.state["state"].values()]
    torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}]).load_state_dict(first.state)
    assert all(tensor.device == CPU for values in first.state["state"].values() for tensor in values.values())


@pytest.mark.parametrize("stage", WAYS)
def test_a_state_before_the_first_step(two: Processes, sharing_all: str, stage: int | None) -> None:
    """There is nothing to go on from, and going on from it is a beginning."""
    start, _ = two.run(train, through(stage, sharing_all), None, 0, 0)
    assert start.state["state"] == {}
    first, _ = two.run(train, through(stage, sharing_all), start, 0, 4)
    assert_alike(first, train(Course()))


def alone(objective: Objective, course: Course | None = None) -> Updater:
    parameters = list(objective.parameters())
    return make_updater((course or Course()).recipe(), objective, [parameters[:3], parameters[3:]], World(), CPU)


def pass_of(updater: Updater, number: int) -> torch.Tensor:
    batch = make_batch(number, answer=8)
    loss, _ = updater.loss(batch, plan_rows(batch.loss_mask, batch.lengths, 3), step_weights=[0.1] * 3)
    return loss


def test_without_processes_it_is_plain_torch() -> None:
    """One process's step is, bit for bit, `backward`, `clip_grad_norm_` and `AdamW.step`."""
    objective, plain = make_objective(), make_objective()
    updater = alone(objective)
    parameters = list(plain.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=OptimConfig().betas, weight_decay=0.1, fused=True)
    for number in range(3):
        updater.backward(pass_of(updater, number), is_last=True)
        batch = make_batch(number, answer=8)
        loss, _ = plain(batch, plan_rows(batch.loss_mask, batch.lengths, 3), step_weights=[0.1] * 3)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        for group, rate in zip(adamw.param_groups, (1e-2, 2e-2), strict=True):
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        assert updater.update([1e-2, 2e-2]) == float(norm)
    assert_same(objective.head.state_dict(), plain.head.state_dict())
    assert_same(updater.state()["state"], adamw.state_dict()["state"])


def test_a_state_is_a_copy() -> None:
    """Neither does a state change while training goes on, nor is training changed by what is done to a state."""
    updater = alone(make_objective())
    updater.backward(pass_of(updater, 0), is_last=True)
    updater.update([1e-2, 1e-2])
    state = updater.state()
    kept = copy.deepcopy(state)
    updater.load(state)
    updater.backward(pass_of(updater, 1), is_last=True)
    updater.update([1e-2, 1e-2])
    assert_same(state, kept)


def test_a_group_that_nothing_reaches_rests() -> None:
    """Its weights do not decay and its steps are not counted, so that it begins afresh when it is trained; but a
    parameter without a gradient in a group that is trained counts as one of gradient zero."""
    objective = make_objective("medusa")
    networks = [list(network.parameters()) for network in objective.head.children() if list(network.parameters())]
    assert len(networks) > 1
    first, *others = [parameter for network in networks for parameter in network]
    updater = make_updater(Course().recipe(), objective, [[first], others], World(), CPU)
    before = [parameter.detach().clone() for parameter in others]
    updater.backward(first.square().sum(), is_last=True)
    updater.update([1e-2, 1e-2])
    assert set(updater.state()["state"]) == {0}
    assert all(torch.equal(parameter, old) for parameter, old in zip(others, before, strict=True))
    updater.backward(others[0].square().sum(), is_last=True)
    updater.update([1e-2, 1e-2])
    assert set(updater.state()["state"]) == set(range(1 + len(others)))
    assert {float(values["step"]) for values in updater.state()["state"].values()} == {1.0}


@pytest.mark.parametrize("stage", WAYS)
def test_the_state_of_another_head_is_refused(one: Processes, sharing_all: str, stage: int | None) -> None:
    other = train(Course(family="medusa"), None, 0, 1)
    with pytest.raises(AssertionError, match=r"ValueError: the optimiser's state is for groups .* another head"):
        one.run(train, through(stage, sharing_all), replace(train(Course()), state=other.state))
    start = train(Course(), None, 0, 1)
    start.state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(AssertionError, match=r"ValueError: the optimiser's exp_avg of parameter 0 has shape \(3, 3\)"):
        one.run(train, through(stage, sharing_all), start)


@needs_deepspeed
def test_uneven_steps_are_refused_by_deepspeed(one: Processes) -> None:
    """It counts steps by group; a state that counts them by parameter cannot be kept."""
    start = train(Course(), None, 0, 1)
    start.state["state"][0]["step"] += 1
    with pytest.raises(AssertionError, match="ValueError: the checkpoint's parameters were not all updated equally"):
        one.run(train, Course(stage=1), start)


# Settings


def settings_of(**changes: Any) -> dict[str, Any]:
    recipe = replace(Course().recipe(), deepspeed=DeepSpeedConfig(**changes))
    return deepspeed_settings(recipe, CPU, num_elements=100)


def test_a_users_settings_lie_under_the_recipe(tmp_path: Path) -> None:
    """A file adds settings and replaces defaults; `auto` is left to the recipe, as files for other trainers have it."""
    path = tmp_path / "deepspeed.json"
    further = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 7, "offload_optimizer": {"pin_memory": True}},
    }
    path.write_text(json.dumps(further))
    merged = settings_of(stage=2, offload_optimizer=True, config=str(path))
    assert merged["wall_clock_breakdown"] is False
    assert merged["zero_optimization"] == {
        "stage": 2,
        "memory_efficient_linear": False,
        "reduce_bucket_size": 7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert "train_batch_size" not in merged
    assert "bf16" not in merged
    assert settings_of(stage=2)["zero_optimization"]["reduce_bucket_size"] == 100


@pytest.mark.parametrize(
    ("further", "name", "owner"),
    [
        ({"train_batch_size": 8}, "train_batch_size", "optim.batch_size"),
        ({"optimizer": {"type": "Adam"}}, "optimizer", "optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "optim.schedule"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "optim.grad_clip"),
        ({"bf16": {"enabled": True}}, "bf16", "train.dtype"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "deepspeed.stage"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "deepspeed.offload_parameters",
        ),
    ],
)
def test_what_the_recipe_decides_is_refused(tmp_path: Path, further: dict[str, Any], name: str, owner: str) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(further))
    with pytest.raises(ValueError, match=f"{path} sets {name}, which {owner}.* decides: take it out"):
        read_settings(path)


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        read_settings(path)
    path.write_text("{stage: 1}")
    with pytest.raises(ValueError, match="is not JSON"):
        read_settings(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="holds a list; expected a JSON object"):
        read_settings(path)
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}))
    with pytest.raises(ValueError, match=r"nothing is offloaded: set deepspeed.offload_optimizer=true"):
        settings_of(stage=2, config=str(path))


@needs_deepspeed
def test_settings_that_deepspeed_refuses(one: Processes, tmp_path: Path) -> None:
    """Its own message, in one line that names the file."""
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": "many"}}))
    with pytest.raises(AssertionError) as caught:
        one.run(train, Course(stage=1, settings=str(path)))
    last = str(caught.value).strip().splitlines()[-1]
    assert last.startswith(f"ValueError: deepspeed.config: DeepSpeed does not take {path}: ")
    assert "reduce_bucket_size" in last


def test_without_deepspeed_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"pip install 'headstart\[deepspeed\]'"):
        alone(make_objective(), Course(stage=1))


def linear() -> str:
    return torch.nn.functional.linear.__module__


@needs_deepspeed
def test_torch_stays_as_it_was(two: Processes) -> None:
    """ZeRO-3 has a `linear` of its own, with other rounding, which it would leave in torch for everything after it."""
    assert two.run(linear) == [linear()] * 2


@needs_deepspeed
def test_deepspeed_is_silent(two: Processes, one: Processes) -> None:
    """After all of the above, no process printed anything (this test is the module's last)."""
    assert two.output() == ""
    assert one.output() == ""
