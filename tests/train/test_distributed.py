"""Whole runs over two processes: the same steps as in one, whatever shares them out, and checkpoints that any can take.

Float32 on a CPU. Processes add up the same numbers in another order, so weights agree to rounding: 2e-5 of weights of
about 0.1 after a dozen Adam steps of 1e-3. (A row seen twice or not at all moves them by 1e-3 and more.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import DeepSpeedConfig, RunConfig
from infer.target import TargetModel
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from tests.train.two_processes import Processes
from train.reports.metrics import read_metrics
from train.trainer import train

STAGES = [None, 0, 1, 2, 3]
STEPS = 8
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def recipe(chats: Path, *, stage: int | None = None, **changes: Any) -> RunConfig:
    """With stage 3 every weight is shared out, however small."""
    settings = {
        "train__steps": STEPS,
        "optim__accumulation": 2,
        "train__ttt_keep": 0.6,
        "train__ttt_start": 0.3,
        **changes,
    }
    config = tiny_recipe(chats, **settings)
    if stage is None:
        return config
    settings = chats.with_name("deepspeed.json")
    settings.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    return replace(config, deepspeed=DeepSpeedConfig(stage=stage, config=str(settings) if stage == 3 else None))


def train_here(config: RunConfig, folder: str, resume: bool = False) -> dict[str, Any]:
    """What each process does; its summary."""
    torch.set_num_threads(1)
    notices: list[str] = []
    summary = train(config, runs_folder=folder, resume=resume, target=tiny_target(), notice=notices.append)
    return {"summary": summary, "notices": notices}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "tiny" / "last" / "model.safetensors")


def assert_alike(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def alone(chats: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(recipe(chats), runs_folder=folder, target=target, notice=lambda text: None)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_train_what_one_does(
    processes: Processes, chats: Path, alone: Path, tmp_path: Path, stage: int | None
) -> None:
    """The same losses, labels and weights at every stage; one process writes, prints and keeps the log."""
    first, second = processes.run(train_here, recipe(chats, stage=stage), str(tmp_path))
    assert_alike(alone, tmp_path)
    mine = [one for one in read_metrics(alone / "tiny") if one["event"] == "train"]
    theirs = [one for one in read_metrics(tmp_path / "tiny") if one["event"] == "train"]
    assert len(theirs) == len(mine) == STEPS
    for one, other in zip(mine, theirs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
        assert (other["tokens"], other["lr"]) == (one["tokens"], one["lr"])
    assert second["notices"] == []
    assert any("2 processes" in text for text in first["notices"])
    assert json.dumps(first["summary"]) == json.dumps(second["summary"])
    assert first["summary"]["status"] == "finished"
    assert (tmp_path / "tiny" / "best").is_dir()


@pytest.mark.parametrize(("family", "stage"), [("peagle", None), ("dflash", 3)])
def test_heads_that_draft_in_one_pass(
    processes: Processes, chats: Path, target: TargetModel, tmp_path: Path, family: str, stage: int | None
) -> None:
    """Places and random roots, too, are those of one process, however weights are shared out."""
    changes = {"head__type": family, "train__root_share": 0.5, "train__steps": 4}
    train(recipe(chats, **changes), runs_folder=tmp_path / "one", target=target, notice=lambda text: None)
    processes.run(train_here, recipe(chats, stage=stage, **changes), str(tmp_path / "two"))
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("stage", [None, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_a_run_goes_on_in_other_hands(
    processes: Processes, chats: Path, alone: Path, target: TargetModel, tmp_path: Path, stage: int | None
) -> None:
    """From one process to two and back, and to other batches of the same product: the steps stay the same."""
    stop_after(recipe(chats, train__save_every=3), 3, tmp_path, target)
    shared = recipe(chats, stage=stage, optim__batch_size=1, optim__accumulation=4, train__save_every=3)
    processes.run(train_here, shared, str(tmp_path), True)
    assert_alike(alone, tmp_path)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_process_goes_on_from_two(
    processes: Processes, chats: Path, alone: Path, target: TargetModel, tmp_path: Path, stage: int
) -> None:
    """A checkpoint of shared-out state is whole: without DeepSpeed it goes on too, with a last step of its own."""
    two = recipe(chats, stage=stage)
    processes.run(stop_in_process, two, 5, str(tmp_path))
    train(recipe(chats), runs_folder=tmp_path, resume=True, target=target, notice=lambda text: None)
    assert_alike(alone, tmp_path)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (None, 1))])
def test_the_same_processes_resume_bit_for_bit(
    processes: Processes, chats: Path, tmp_path: Path, stage: int | None
) -> None:
    config = recipe(chats, stage=stage)
    processes.run(train_here, config, str(tmp_path / "whole"))
    processes.run(stop_in_process, config, 3, str(tmp_path / "parts"))
    processes.run(train_here, config, str(tmp_path / "parts"), True)
    mine, theirs = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def stop_after(config: RunConfig, step: int, folder: Path | str, target: TargetModel) -> None:
    """Train as if someone pressed Ctrl-C in a step."""
    import train.trainer as trainer

    original = trainer.Trainer._log

    def log(self: Any, record: Any) -> None:
        original(self, record)
        is_asked = self.world.rank == self.world.size - 1  # not the main one, if there is another
        if self.state.progress.step == step and is_asked:
            self.stop_for_test.requested = True

    class Watched(trainer.StopRequest):
        def __enter__(self) -> Any:
            trainer.Trainer.stop_for_test = self  # type: ignore[attr-defined]
            return super().__enter__()

    patch = pytest.MonkeyPatch()
    patch.setattr(trainer.Trainer, "_log", log)
    patch.setattr(trainer, "StopRequest", Watched)
    try:
        summary = train(config, runs_folder=folder, target=target, notice=lambda text: None)
    finally:
        patch.undo()
    assert summary["status"] == "interrupted"
    assert summary["step"] == step


def stop_in_process(config: RunConfig, step: int, folder: str) -> None:
    torch.set_num_threads(1)
    stop_after(config, step, folder, tiny_target())


def test_too_many_processes_are_refused(processes: Processes, chats: Path, tmp_path: Path) -> None:
    config = recipe(chats, optim__batch_size=1, optim__accumulation=1)
    with pytest.raises(AssertionError, match=r"sees 1 conversations .* fewer than the 2 processes"):
        processes.run(train_here, config, str(tmp_path))
    assert not (tmp_path / "tiny").exists()


def test_nodes_with_other_data_are_refused(processes: Processes, chats: Path, tmp_path: Path) -> None:
    """Each node reads its own copy of the files."""
    with pytest.raises(AssertionError, match=r"process 1 has .*data_hash.* give all nodes the same data"):
        processes.run(train_on_own_file, recipe(chats), str(tmp_path))


def train_on_own_file(config: RunConfig, folder: str) -> None:
    from train.world import World

    world = World.from_environment()
    own = write_chats(Path(folder) / f"chats-{world.rank}.jsonl", seed=world.rank)
    train_here(replace(config, data=replace(config.data, train=(str(own),))), folder)
