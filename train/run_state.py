"""What a checkpoint holds besides the head, and when a run may go on from it.

The file is `trainer.pt`, written in the same atomic step as the head beside it (`train.checkpoints` says where). It has
one form for any number of processes and any way to share out the optimiser's state. The best value so far is not in it:
it is read from `best/` itself, so that no restart can forget it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.loading import dump_config, parse_config
from configs.schema import RunConfig
from heads.checkpoint import read_card, recover_folder
from train.schedule import Progress

STATE_FILE = "trainer.pt"
STATE_VERSION = 2

# Settings that may differ when a run is resumed: budgets, bookkeeping, where things are on this machine, and how the
# work is shared out.
_FREE_ON_RESUME: Mapping[str, tuple[str, ...]] = {
    "train": (
        "minutes",
        "steps",
        "epochs",
        "overlap",
        "feature_cache",
        "feature_cache_gb",
        "log_every",
        "num_evaluations",
        "eval_every",
        "patience",
        "save_every",
        "save_minutes",
        "keep_checkpoints",
    ),
    "optim": ("batch_size", "accumulation"),  # their product may not
    "deepspeed": ("stage", "offload_optimizer", "offload_parameters", "config"),
    "head": ("init_from",),
    "tracking": ("wandb", "project", "entity", "group", "tags", "artifact"),
    "target": ("model", "device", "dtype", "adapter", "device_map", "sharded", "features"),
    "data": ("train", "eval", "decontaminate"),
    "eval": ("samples",),
}


@dataclass(kw_only=True)
class RunState:
    """`identity` is what must be the same for the steps to be: hashes of data and target, and the target's dtype.

    key: tells this run's checkpoints from others'. stale_evaluations: evaluations since the best one. run_id: the
    tracker's, kept across restarts. visits: what the data need to go on (`train.corpus.dataset`).
    """

    config: RunConfig
    identity: dict[str, str]
    key: str
    progress: Progress = field(default_factory=Progress)
    stale_evaluations: int = 0
    run_id: str | None = None
    visits: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        values = {
            "version": STATE_VERSION,
            "config": dump_config(self.config),
            "identity": self.identity,
            "key": self.key,
            "progress": asdict(self.progress),
            "stale_evaluations": self.stale_evaluations,
            "run_id": self.run_id,
            "visits": self.visits,
            "optimizer": self.optimizer,
        }
        torch.save(values, folder / STATE_FILE)

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """The state in a checkpoint's folder; ValueError if there is none, or not one that this version can use."""
        path = folder / STATE_FILE
        if not path.is_file():
            raise ValueError(f"there is nothing to resume in {folder}: {path} does not exist")
        try:
            values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not isinstance(values, dict) or values.get("version") != STATE_VERSION:
            version = values.get("version") if isinstance(values, dict) else None
            raise ValueError(
                f"{path} has version {version!r}, this headstart resumes version {STATE_VERSION}: start a new run from "
                f"its head (head.init_from={folder})"
            )
        try:
            return cls(
                config=parse_config(values["config"]),
                identity=values["identity"],
                key=values["key"],
                progress=Progress(**values["progress"]),
                stale_evaluations=values["stale_evaluations"],
                run_id=values["run_id"],
                visits=values["visits"],
                optimizer=values["optimizer"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the state of a run: {error!r}") from error

    def check_config(self, config: RunConfig) -> None:
        """A resumed run must mean the same training."""
        then, now = asdict(self.config), asdict(config)
        changed = [
            f"{section}.{key}"
            for section, settings in now.items()
            if isinstance(settings, dict)
            for key, value in settings.items()
            if key not in _FREE_ON_RESUME.get(section, ()) and value != then[section][key]
        ]
        before, after = self.config.optim.conversations_per_step, config.optim.conversations_per_step
        if after != before:
            changed.append(f"optim.batch_size x optim.accumulation = {after} instead of {before}")
        if changed:
            raise ValueError(
                f"cannot resume {config.name} with other settings ({', '.join(changed)}): give the old ones, "
                "or start a new run with another name and head.init_from"
            )

    def check_identity(self, identity: Mapping[str, str], run_folder: Path) -> None:
        for name, value in identity.items():
            if self.identity.get(name) != value:
                raise ValueError(
                    f"cannot resume {run_folder}: its {name.replace('_', ' ')} was {self.identity.get(name)}, "
                    f"now it is {value}. Start a new run from its head instead: head.init_from={run_folder / 'last'}"
                )


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best head so far, as its own folder tells."""

    accepted_length: float
    step: int

    @classmethod
    def read(cls, run_folder: Path) -> Best | None:
        """None where there is none yet. ValueError where there is one that does not say how good it is."""
        folder = recover_folder(run_folder / "best")
        if not folder.exists():
            return None
        try:
            card = read_card(folder)
            return cls(accepted_length=float(card.acceptance["accepted_length"]), step=int(card.training["step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder} does not say how good its head is ({error!r}): move it away, and the run goes on with none"
            ) from error

    def beaten_by(self, accepted_length: float, step: int) -> bool:
        """An evaluation repeated after a restart is the best if it was the best before."""
        return accepted_length > self.accepted_length or step == self.step
