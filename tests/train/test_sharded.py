"""A target shared out among two processes, against the same target whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import DeepSpeedConfig
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from tests.train.two_processes import Processes
from train.sharded import ShardedTarget, in_lockstep, shard_target
from train.trainer import train
from train.world import World

ROWS = ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19])
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_neox", "gpt2")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


def target_of(family: str) -> TargetModel:
    if family == "llama":
        return tiny_target(hidden_size=48, forward="eager")
    # The eager way, which a shared-out target goes too, so that bits can be compared.
    return TargetModel.wrap(make_tiny_model(family), None, name=family, forward="eager")


def states_of(target: TargetModel, rows: Any = ROWS) -> list[torch.Tensor]:
    found = target.features(rows, taps=(0, 1, 3))
    return [tensor.clone() for one in found for tensor in (one.taps, one.last)]


def run_sharded(family: str) -> dict[str, Any]:
    world = World.from_environment()
    target = target_of(family)
    whole = sum(weight.nbytes for weight in target.model.parameters())
    before_bytes = target.num_weight_bytes
    before = states_of(target)
    sharded = shard_target(target, world, keep_below=0)
    assert isinstance(sharded, ShardedTarget)
    states = states_of(sharded)
    own_rows = states_of(sharded, ROWS[world.rank : world.rank + 1])
    with sharded.stock() as model:
        logits = model(torch.tensor([ROWS[0]]), use_cache=False).logits
    return {
        "before": before,
        "states": states,
        "own": own_rows,
        "logits": logits,
        "whole": whole,
        "held": sharded.num_held_bytes,
        "outside": [weight.numel() for weight in sharded.layers[0].parameters()],
        "read": (before_bytes, sharded.num_weight_bytes),
        "layers": sum(shard.num_whole_bytes for shard in sharded.shards),
        "trained": [name for name, weight in sharded.model.named_parameters() if weight.requires_grad],
        "fingerprint": (sharded.fingerprint, target_of(family).fingerprint),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_whole_target(two: Processes, family: str) -> None:
    """Bit for bit, in both processes, for the same rows and for rows of their own, packed and stock: what is gathered
    is what was shared out. No weight has a gradient, and it is the same target by name."""
    results = two.run(run_sharded, family)
    whole = target_of(family)
    expected = states_of(whole)
    with whole.stock() as model, torch.no_grad():
        logits = model(torch.tensor([ROWS[0]]), use_cache=False).logits
    for rank, result in enumerate(results):
        assert all(map(torch.equal, result["before"], expected))
        assert all(map(torch.equal, result["states"], expected))
        assert all(map(torch.equal, result["own"], states_of(whole, ROWS[rank : rank + 1])))
        assert torch.equal(result["logits"], logits)
        assert result["trained"] == []
        assert result["fingerprint"][0] == result["fingerprint"][1] == whole.fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_each_process_holds_half_of_the_layers(two: Processes, family: str) -> None:
    """Between forwards a process has half of the layers' bytes (and a byte of padding here and there), besides what
    stays whole. Whoever reads a weight then finds it empty, and not the memory of something else."""
    for result in two.run(run_sharded, family):
        saved = result["layers"] / 2
        assert result["held"] == pytest.approx(result["whole"] - saved, abs=400)
        assert saved > 0.25 * result["whole"]
        assert set(result["outside"]) == {0}
        assert result["read"][0] == result["read"][1]


def run_whole(family: str) -> list[bool]:
    target = target_of(family)
    expected = [weight.clone() for weight in target.model.parameters()]
    sharded = shard_target(target, World.from_environment(), keep_below=0)
    assert isinstance(sharded, ShardedTarget)
    with sharded.whole():
        first = [torch.equal(weight, old) for weight, old in zip(sharded.model.parameters(), expected, strict=True)]
        states_of(sharded)
        second = [torch.equal(weight, old) for weight, old in zip(sharded.model.parameters(), expected, strict=True)]
    held = sharded.num_held_bytes
    states_of(sharded)
    return [*first, *second, held == sharded.num_held_bytes < sum(weight.nbytes for weight in expected)]


def test_weights_can_be_read(two: Processes) -> None:
    """Inside `whole` all weights are there, and stay there through a forward; after it they are shared out again."""
    for result in two.run(run_whole, "llama"):
        assert all(result)


def run_uneven(num_rows: tuple[int, int]) -> list[torch.Tensor]:
    world = World.from_environment()
    target = shard_target(target_of("llama"), world, keep_below=0)
    rows = ROWS[: num_rows[world.rank]]
    found = [states_of(target, [row])[-1] for row in in_lockstep(target, world, rows)]
    assert world.sum([1.0]) == [2.0]
    return found


@pytest.mark.parametrize("num_rows", [(3, 1), (0, 2), (2, 2)])
def test_uneven_work_in_lockstep(two: Processes, num_rows: tuple[int, int]) -> None:
    """A process with fewer rows, or none, takes part in the other's forwards, and both go on together."""
    whole = target_of("llama")
    for found, count in zip(two.run(run_uneven, num_rows), num_rows, strict=True):
        expected = [states_of(whole, [row])[-1] for row in ROWS[:count]]
        assert len(found) == count
        assert all(map(torch.equal, found, expected))


def run_failing() -> list[bool]:
    target = shard_target(target_of("llama"), World.from_environment(), keep_below=0)
    assert isinstance(target, ShardedTarget)
    before = states_of(target)
    handle = target.layers[1].register_forward_hook(_fail)
    with pytest.raises(ValueError, match="no such thing"):
        states_of(target)
    handle.remove()
    held = target.num_held_bytes
    return [all(map(torch.equal, states_of(target), before)), target.num_held_bytes <= held]


def _fail(*_: Any) -> None:
    raise ValueError("no such thing")


def test_a_forward_that_fails_in_all_processes(two: Processes) -> None:
    """The next one finds weights as before."""
    for result in two.run(run_failing):
        assert all(result)


def run_different() -> None:
    world = World.from_environment()
    shard_target(TargetModel.wrap(make_tiny_model("llama", seed=world.rank), None, name="tiny"), world)


def test_different_targets_are_refused(two: Processes) -> None:
    """By all processes at once: none is left waiting."""
    with pytest.raises(AssertionError) as caught:
        two.run(run_different)
    assert str(caught.value).count("ValueError: the processes loaded different targets") == 2


def run_twin() -> None:
    shard_target(target_of("llama"), World.from_environment(), keep_below=0).twin(own_layers=True)


def test_a_copy_of_a_part_is_refused(two: Processes) -> None:
    with pytest.raises(AssertionError, match="ValueError: tiny is shared out among processes"):
        two.run(run_twin)


def test_one_process_keeps_the_target_whole() -> None:
    target = target_of("llama")
    assert shard_target(target, World()) is target
    assert list(in_lockstep(target, World(), ROWS)) == list(ROWS)


def run_training(data: Path, folder: Path, is_sharded: bool) -> str:
    torch.set_num_threads(1)
    world = World.from_environment()
    config = tiny_recipe(data, train__steps=6, optim__accumulation=2)
    sharded = replace(config.target, sharded=is_sharded)
    config = replace(config, target=sharded, deepspeed=DeepSpeedConfig(stage=1))
    target = tiny_target(forward="eager")
    if is_sharded:
        target = shard_target(target, world, keep_below=0)
    summary = train(config, runs_folder=folder, target=target, notice=lambda text: None)
    return str(summary["status"])


def test_a_run_on_a_sharded_target(two: Processes, tmp_path: Path) -> None:
    """Features, a new head's first weights, decoding and the best head are those of the run on whole targets, bit for
    bit; neither process is left waiting; no file holds a weight of the target."""
    data = write_chats(tmp_path / "chats.jsonl")
    for name, is_sharded in (("whole", False), ("sharded", True)):
        assert two.run(run_training, data, tmp_path / name, is_sharded) == ["finished"] * 2
    for place in ("last", "best"):
        mine = load_file(tmp_path / "sharded" / "tiny" / place / "model.safetensors")
        theirs = load_file(tmp_path / "whole" / "tiny" / place / "model.safetensors")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        assert not any(name.startswith("model.layers") for name in mine)
