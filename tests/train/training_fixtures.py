"""A tiny target, a toy chat data set and small recipes, shared by the training tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from configs.schema import (
    DataConfig,
    EvalConfig,
    HeadSettings,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TrackingConfig,
    TrainSettings,
)
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from train.trainer import train

WORDS = ("red", "blue", "green", "fish", "bird", "tree", "stone", "river")
NUM_LAYERS = 4


class Stopped(BaseException):
    """Stands for a kill: nothing in the trainer may catch it."""


def tiny_target(*, forward: str = "auto", **overrides: Any) -> TargetModel:
    tokenizer = toy_tokenizer()
    model = make_tiny_model("llama", vocab_size=264, num_hidden_layers=NUM_LAYERS, **overrides)
    model.generation_config.eos_token_id = 3
    return TargetModel.wrap(model, tokenizer, name="tiny", forward=forward)


def write_chats(path: Path, *, count: int = 40, seed: int = 0) -> Path:
    chance = random.Random(seed)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question = f"question {number}: " + " ".join(chance.sample(WORDS, 2))
            answer = " ".join(chance.choices(WORDS, k=chance.randint(3, 6)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def tiny_recipe(data: Path, *, name: str = "tiny", **changes: Any) -> RunConfig:
    """`changes` are `section__key=value`."""
    sections: dict[str, dict[str, Any]] = {
        "target": {"model": "tiny"},
        "data": {"train": (str(data),), "holdout_fraction": 0.2, "max_length": 128, "max_repeat_fraction": 1.0},
        "head": {"draft_vocab_size": None, "taps": (1, 2, 4)},
        "optim": {"warmup_steps": 2},
        "train": {"steps": 12, "ttt_steps": 2, "log_every": 1, "num_evaluations": 2, "save_minutes": None},
        "eval": {"prompts": 3, "max_tokens": 8},
        "tracking": {"wandb": "disabled"},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        sections[section][field] = value
    return RunConfig(
        name=name,
        target=TargetConfig(**sections["target"]),
        data=DataConfig(**sections["data"]),
        head=HeadSettings(**sections["head"]),
        optim=OptimConfig(**sections["optim"]),
        train=TrainSettings(**sections["train"]),
        eval=EvalConfig(**sections["eval"]),
        tracking=TrackingConfig(**sections["tracking"]),
    )


def run(
    config: RunConfig,
    folder: Path,
    target: TargetModel,
    *,
    stop_at: int | None = None,
    notices: list[str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train, killed at the progress line of step `stop_at`; `notices` gets the lines."""

    def notice(text: str) -> None:
        if notices is not None:
            notices.append(text)
        if stop_at is not None and text.startswith(f"step {stop_at} "):
            raise Stopped

    return train(config, runs_folder=folder, target=target, notice=notice, **settings)
