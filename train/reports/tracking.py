"""Metrics: always the run's own `metrics.jsonl`, and Weights & Biases where it is installed.

Tracking never stops a run: without a key it works offline, without the package or with a broken one it says so once
and the local file is all there is. Only `tracking.wandb: required` insists, and `online` refuses to start without a
key (it never asks for one). Steps are logged as a value of their own
(`global_step`), so a resumed run may log steps its predecessor already had: nothing is rejected or lost.
"""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from configs.schema import TrackingConfig

METRICS_FILE = "metrics.jsonl"
STEP_NAME = "global_step"
INIT_TIMEOUT_SECONDS = 15
WANDB_HOST = "api.wandb.ai"


class Tracker(Protocol):
    """Somewhere metrics go. `run_id` identifies the remote run across restarts (None where there is none)."""

    run_id: str | None

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, summary: Mapping[str, Any], image: Path | None = None) -> None: ...


class NoTracker:
    """Local files only."""

    run_id: str | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def finish(self, summary: Mapping[str, Any], image: Path | None = None) -> None:
        pass


class WandbTracker:
    """A Weights & Biases run; any failure after the start is reported once and then ignored."""

    def __init__(self, run: Any, notice: Callable[[str], None]) -> None:
        self._run = run
        self._notice = notice
        self._failed = False
        self.run_id: str | None = str(run.id)
        run.define_metric(STEP_NAME)
        run.define_metric("*", step_metric=STEP_NAME)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._run.log({STEP_NAME: step, **values}))

    def finish(self, summary: Mapping[str, Any], image: Path | None = None) -> None:
        def close() -> None:
            self._run.summary.update(dict(summary))
            if image is not None and image.is_file():
                import wandb

                self._run.log({"acceptance": wandb.Image(str(image))})
            self._run.finish()

        self._try(close)

    def _try(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # a third party's fault must never end a run
            self._failed = True
            self._notice(f"wandb stopped working ({error}); metrics go on in {METRICS_FILE}")


def open_tracker(
    settings: TrackingConfig,
    *,
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    run_id: str | None,
    notice: Callable[[str], None],
) -> Tracker:
    """The tracker that `settings` and this machine allow. `run_id` continues an earlier run."""
    if settings.wandb == "disabled":
        return NoTracker()
    mode = _mode(settings)
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
    os.environ.setdefault("WANDB_SILENT", "true")
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
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_SECONDS, console="off", silent=True),
    )


def _mode(settings: TrackingConfig) -> str:
    """online, offline or disabled. Never a mode that would ask for a key."""
    asked = os.environ.get("WANDB_MODE", "")
    wanted = "online"
    if settings.wandb in ("online", "offline"):
        wanted = str(settings.wandb)
    elif asked in ("online", "offline", "disabled"):
        wanted = asked
    if wanted != "online":
        return wanted
    if has_key():
        return "online"
    if settings.wandb in ("online", "required"):
        raise ValueError(
            f"tracking.wandb is {settings.wandb!r} but no key is set: export WANDB_API_KEY, or run `wandb login` once"
        )
    return "offline"


def has_key() -> bool:
    """Whether wandb could go online without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MetricsFile:
    """`metrics.jsonl`: one object a line, appended and flushed; a resumed run marks where it took over."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        self._repair()

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"event": event, **values}) + "\n")

    def _repair(self) -> None:
        """End a line that a killed run left half written."""
        if self._path.exists() and (content := self._path.read_bytes()) and not content.endswith(b"\n"):
            with self._path.open("ab") as stream:
                stream.write(b"\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All records; where a resumed run repeats steps, those of the earlier attempt are left out."""
    path = folder / METRICS_FILE
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # half a line of a killed run
        if record["event"] == "resume":
            records = [one for one in records if one.get("step", 0) <= record["step"]]
        records.append(record)
    return records
