"""Weights & Biases beside the run's own `metrics.jsonl`, where it is installed and wanted.

Tracking never stops a run, asks for nothing and takes at most a few seconds to start: without a key or without a
network it works offline (`wandb sync` later), without the package or with a broken one it says so once and the local
file is all there is. Only `tracking.wandb: required` insists, and `online` refuses to start without a key. Steps are
logged as a value of their own (`global_step`), so a resumed run may log steps its predecessor already had: nothing is
rejected or lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from configs.schema import TrackingConfig
from infer.wandb_service import has_key, is_reachable, quiet_settings, service_url
from train.reports.evaluation import Evaluation
from train.reports.metrics import METRICS_FILE, finite
from train.reports.wandb_figures import figures_of, head_artifact

STEP_NAME = "global_step"
FINISH_TIMEOUT_SECONDS = 300
"""A service that was lost on the way must not keep a finished run from ending; `wandb sync` uploads what is left."""

Notice = Callable[[str], None]


class Tracker(Protocol):
    """Somewhere figures go. `run_id` identifies the remote run across restarts (None where there is none)."""

    run_id: str | None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Points of curves."""

    def show(self, step: int, evaluation: Evaluation) -> None:
        """Tables and plots of one evaluation."""

    def keep_head(self, name: str, folder: Path) -> None:
        """The best head, with its card."""

    def finish(self, summary: Mapping[str, Any], image: Path | None = None, *, failed: bool = False) -> None: ...


class NoTracker:
    """Local files only."""

    run_id: str | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def show(self, step: int, evaluation: Evaluation) -> None:
        pass

    def keep_head(self, name: str, folder: Path) -> None:
        pass

    def finish(self, summary: Mapping[str, Any], image: Path | None = None, *, failed: bool = False) -> None:
        pass


class WandbTracker:
    """A Weights & Biases run; any failure after the start is reported once and then ignored.

    Curves that fail end the tracking; a table, plot or artifact that fails only goes without.
    """

    def __init__(self, run: Any, notice: Notice) -> None:
        self._run = run
        self._notice = notice
        self._failed = False
        self._shows = True
        self.run_id: str | None = str(run.id)
        run.define_metric(STEP_NAME)
        run.define_metric("*", step_metric=STEP_NAME)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._run.log({STEP_NAME: step, **finite(values)}))

    def show(self, step: int, evaluation: Evaluation) -> None:
        self._try_to_show(lambda: self._run.log({STEP_NAME: step, **figures_of(step, evaluation)}))

    def keep_head(self, name: str, folder: Path) -> None:
        self._try_to_show(lambda: self._run.log_artifact(head_artifact(name, folder), aliases=["best", "latest"]))

    def finish(self, summary: Mapping[str, Any], image: Path | None = None, *, failed: bool = False) -> None:
        def show_picture() -> None:
            import wandb

            self._run.log({"acceptance": wandb.Image(str(image))})

        if image is not None and image.is_file():
            self._try_to_show(show_picture)
        self._try(lambda: self._run.summary.update(finite(summary)))
        self._try(lambda: self._run.finish(exit_code=1 if failed else 0), always=True)

    def _try(self, action: Callable[[], object], *, always: bool = False) -> None:
        if self._failed and not always:
            return
        try:
            action()
        except Exception as error:  # a third party's fault must never end a run
            if not self._failed:
                self._notice(f"wandb stopped working ({error}); metrics go on in {METRICS_FILE}")
            self._failed = True

    def _try_to_show(self, action: Callable[[], object]) -> None:
        if self._failed or not self._shows:
            return
        try:
            action()
        except Exception as error:
            self._shows = False
            self._notice(f"wandb takes no tables, plots or artifacts ({error}); curves go on")


def open_tracker(
    settings: TrackingConfig,
    *,
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    run_id: str | None,
    notice: Notice,
) -> Tracker:
    """The tracker that `settings` and this machine allow. `run_id` continues an earlier run."""
    if settings.wandb == "disabled":
        return NoTracker()
    mode = _mode(settings, notice)
    if mode == "disabled":
        if settings.wandb == "required":
            raise ValueError("tracking.wandb is 'required', but the environment says WANDB_MODE=disabled: unset one")
        return NoTracker()
    for attempt in dict.fromkeys((mode, "offline") if settings.wandb != "required" else (mode,)):
        try:
            return WandbTracker(
                _start(settings, mode=attempt, folder=folder, name=name, config=config, run_id=run_id), notice
            )
        except ImportError as error:
            problem = f"wandb cannot be imported ({error})"
            break
        except Exception as error:  # wandb raises its own, urllib's, and plain ones
            problem = f"wandb did not start {attempt} ({error})"
    if settings.wandb == "required":
        raise ValueError(f"{problem}, and tracking.wandb is 'required'")
    notice(f"{problem}; metrics are in {METRICS_FILE} only")
    return NoTracker()


def _start(
    settings: TrackingConfig, *, mode: str, folder: Path, name: str, config: Mapping[str, Any], run_id: str | None
) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")  # before it is imported
    import wandb

    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        dir=str(folder),
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=list(settings.tags),
        name=name,
        id=run_id,
        resume="allow" if run_id else None,
        config=dict(config),
        reinit="finish_previous",
        settings=quiet_settings(wandb, finish_timeout=FINISH_TIMEOUT_SECONDS, finish_timeout_raises=True),
    )


def _mode(settings: TrackingConfig, notice: Notice) -> str:
    """online, offline or disabled. Never a mode that would ask for a key, or wait for a service out of reach."""
    asked = os.environ.get("WANDB_MODE", "")
    wanted = "online"
    if settings.wandb in ("online", "offline"):
        wanted = str(settings.wandb)
    elif asked in ("online", "offline", "disabled"):
        wanted = asked
    if wanted != "online":
        return wanted
    if not has_key():
        if settings.wandb in ("online", "required"):
            raise ValueError(
                f"tracking.wandb is {settings.wandb!r} but no key is set: export WANDB_API_KEY, or run `wandb login` "
                "once"
            )
        return "offline"
    if settings.wandb != "required" and not is_reachable(service_url()):
        notice(f"{service_url()} cannot be reached: wandb records offline (upload later with `wandb sync`)")
        return "offline"
    return "online"
