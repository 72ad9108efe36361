"""Training on the real model as people start it: by the installed command, alone and under a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.training_fixtures import write_chats
from tests.train.two_processes import free_port
from train.reports.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS = 6
ALONE = "alone"
WAYS = {
    "two processes": [],
    "ZeRO-1": ["deepspeed.stage=1"],
    "ZeRO-2": ["deepspeed.stage=2", "deepspeed.offload_optimizer=true"],
    "ZeRO-3": ["deepspeed.stage=3"],
    "ZeRO-3, sharded target": ["deepspeed.stage=3", "target.sharded=true"],
}


def command(name: str, data: Path, model: Path, runs: Path) -> list[str]:
    return [
        "headstart",
        "train",
        "smollm2-135m-eagle3",
        f"name={name}",
        f"data.train={data}",
        f"target.model={model}",
        "target.dtype=float32",
        "data.max_length=128",
        "data.max_repeat_fraction=1.0",
        "train.minutes=null",
        f"train.steps={STEPS}",
        "train.ttt_start=0.4",
        "train.ttt_steps=3",
        "train.log_every=1",
        "train.num_evaluations=1",
        "eval.prompts=2",
        "eval.max_tokens=8",
        "eval.temperatures=0.0",
        "optim.accumulation=2",
        "tracking.wandb=disabled",
        "--runs",
        str(runs),
    ]


def start(prefix: list[str], arguments: list[str], folder: Path) -> str:
    """Run in a folder that has a `train.py` of the user's own, which nothing may import."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("raise SystemExit('the wrong train')\n")
    programs = folder / "bin"  # the installed command, wherever this test runs from
    programs.mkdir(exist_ok=True)
    script = programs / "headstart"
    repository = Path(__file__).resolve().parent.parent.parent
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:] = [{str(repository)!r}, *sys.path[1:]]\n"
        "from headstart import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run([*prefix, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def started(workplace: Path, smollm2_path: Path) -> dict[str, Any]:
    data = write_chats(workplace / "chats.jsonl", count=24)
    arguments = command(ALONE, data, smollm2_path.resolve(), workplace / "runs")
    start([], arguments, workplace / "here")
    return {"data": data, "model": smollm2_path.resolve(), "runs": workplace / "runs", "here": workplace / "here"}


@pytest.mark.parametrize("way", WAYS)
def test_launched_runs_match_one_process(started: dict[str, Any], way: str) -> None:
    """In float32 the losses agree to 1e-4 and the weights to 1e-4 after six steps of 1e-3 (Adam divides by tiny
    second moments at first, so rounding shows there); a row too much or too few shows as 1e-2 in the loss.
    """
    name = way.lower().replace(" ", "-").replace(",", "")
    arguments = command(name, started["data"], started["model"], started["runs"]) + WAYS[way]
    launcher = ["torchrun", "--no-python", "--nproc-per-node", "2", "--master-port", str(free_port())]
    printed = start(launcher, arguments, started["here"])
    assert printed.count(f"{name}: finished after {STEPS} steps") == 1
    assert_match(started["runs"], name)


def test_the_deepspeed_launcher(started: dict[str, Any]) -> None:
    name = "launcher"
    arguments = command(name, started["data"], started["model"], started["runs"])
    launcher = ["deepspeed", "--no_python", "--num_gpus", "2", "--master_port", str(free_port())]
    start(launcher, [*arguments, "deepspeed.stage=2"], started["here"])
    assert_match(started["runs"], name)


def assert_match(runs: Path, name: str) -> None:
    mine, theirs = ([one for one in read_metrics(runs / run) if one["event"] == "train"] for run in (ALONE, name))
    assert len(mine) == len(theirs) == STEPS
    for one, other in zip(mine, theirs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    weights, others = (load_file(runs / run / "last" / "model.safetensors") for run in (ALONE, name))
    for tensor_name, tensor in weights.items():
        torch.testing.assert_close(others[tensor_name], tensor, rtol=0, atol=1e-4)
    lengths = [json.loads((runs / run / "summary.json").read_text())["accepted_length"] for run in (ALONE, name)]
    assert lengths[0] == lengths[1]
