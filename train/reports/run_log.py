"""The one place that a run's figures go through: the same names and values to `metrics.jsonl` and to the tracker.

Every record of the file has its `curves`, flat names with finite numbers, which are the very points that the tracker
is given, in the same order. Of several processes only the main one has a log that does anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from heads.checkpoint import recover_folder, staged_file
from train.reports.evaluation import Evaluation
from train.reports.html import write_report
from train.reports.machine_use import memory_peaks
from train.reports.metrics import MetricsFile, finite, read_metrics
from train.reports.picture import plot_run
from train.reports.story import SUMMARY_FILE
from train.reports.tracking import NoTracker, Tracker, open_tracker
from train.world import World

Notice = Callable[[str], None]


class RunLog:
    """Figures of one run. `metrics` None: nothing is written (`silent`).

    Positions are {"step", "epoch", "tokens", "train_seconds"}.
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        tracker: Tracker,
        *,
        folder: Path,
        artifact: str | None = None,
        notice: Notice = lambda text: None,
    ) -> None:
        """`artifact`: the name under which the best head goes to the tracker; None to keep it here."""
        self._metrics, self.tracker, self._folder = metrics, tracker, folder
        self._artifact, self._notice = artifact, notice
        self._finished = False

    @classmethod
    def silent(cls) -> RunLog:
        """For processes that have nothing to say."""
        return cls(None, NoTracker(), folder=Path())

    @property
    def run_id(self) -> str | None:
        """The tracker's name for this run, to be kept for its continuation."""
        return self.tracker.run_id

    def about(self, facts: Mapping[str, Any]) -> None:
        """What is known of the run before its first step, so that a report need not wait for its end."""
        if self._metrics is not None:
            self._metrics.write("about", facts)

    def training(self, position: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Figures since the last call. Tuples hold a value a depth: `overlap_by_depth` makes overlap_1, overlap_2."""
        if self._metrics is None:
            return
        values = {**values, **memory_peaks(_device())}
        curves = _prefixed("train", {**_axes(position), **flat(values)})
        self._metrics.write("train", {**position, **values, "curves": curves})
        self.tracker.log(position["step"], curves)

    def evaluation(self, position: Mapping[str, Any], evaluation: Evaluation) -> None:
        if self._metrics is None:
            return
        curves = _prefixed("eval", _axes(position)) | finite(evaluation.curves())
        self._metrics.write("evaluation", {**position, **evaluation.to_dict(), "curves": curves})
        self.tracker.log(position["step"], curves)
        self.tracker.show(position["step"], evaluation)
        for warning in evaluation.warnings:
            self._notice(f"warning: {warning}")

    def resume(self, position: Mapping[str, Any]) -> None:
        """Marks where this process took over from an earlier one: what that one wrote beyond is superseded."""
        if self._metrics is not None:
            self._metrics.write("resume", position)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write the summary, with the last evaluation beside the best one, picture and page; end the tracking."""
        if self._metrics is None:
            return dict(summary)
        whole = {**summary, **last_evaluation(self._folder)}
        write_summary(self._folder, whole)
        self._metrics.write("end", {"status": summary.get("status"), "step": summary.get("step")})
        image = self._try_to_draw(plot_run)
        self._try_to_draw(write_report)
        best = recover_folder(self._folder / "best")
        if self._artifact is not None and best.exists():
            self.tracker.keep_head(self._artifact, best)
        scalars = {key: value for key, value in whole.items() if not isinstance(value, Mapping | list)}
        self.tracker.finish(scalars, image=image)
        self._finished = True
        return whole

    def abandon(self, error: BaseException) -> None:
        """The run ends by an error: what there is stays, and the tracker says that it failed."""
        if self._finished:
            return
        self._finished = True
        if self._metrics is not None:
            text = f"{type(error).__name__}: {error}"[:500]
            self._metrics.write("end", {"status": "failed", "error": text})
        self.tracker.finish({"status": "failed"}, failed=True)

    def _try_to_draw(self, draw: Callable[[Path], Path | None]) -> Path | None:
        try:
            return draw(self._folder)
        except Exception as error:  # a picture must not cost the run its end
            self._notice(f"no picture or page was drawn ({type(error).__name__}: {error})")
            return None


@contextmanager
def open_log(
    config: RunConfig,
    folder: Path,
    world: World,
    *,
    run_id: str | None,
    notice: Notice,
    tracker: Tracker | None = None,
) -> Iterator[RunLog]:
    """The run's log; silent but on the main process. `run_id` continues an earlier tracker's run.

    An error within the block ends the tracking as failed. (What is killed outright ends nothing.)
    """
    if not world.is_main:
        yield RunLog.silent()
        return
    metrics = MetricsFile(folder, notice)
    if tracker is None:
        tracker = open_tracker(
            config.tracking, folder=folder, name=config.name, config=asdict(config), run_id=run_id, notice=notice
        )
    artifact = config.name if config.tracking.artifact else None
    log = RunLog(metrics, tracker, folder=folder, artifact=artifact, notice=notice)
    try:
        yield log
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        log.abandon(error)
        raise


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers by name; those of a sequence `x_by_depth` are x_1, x_2, ..."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            stem = name.removesuffix("_by_depth")
            found |= flat({f"{stem}_{place}": each for place, each in enumerate(value, start=1)})
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = float(value)
    return found


def last_evaluation(folder: Path) -> dict[str, Any]:
    """What the summary says of the newest head, which need not be the best one."""
    found = [record for record in read_metrics(folder) if record["event"] == "evaluation"]
    if not found:
        return {}
    names = ("step", "accepted_length", "standard_error", "agreement", "overlap", "shape", "rule", "simulated")
    return {
        "last": {name: found[-1][name] for name in names if name in found[-1]},
        "warnings": found[-1].get("warnings", []),
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """In one step: there is never half a summary."""
    with staged_file(folder / SUMMARY_FILE) as new:
        new.write_text(json.dumps(finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _axes(position: Mapping[str, Any]) -> dict[str, float]:
    return flat({name: value for name, value in position.items() if name != "step"})


def _prefixed(section: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{section}/{name}": value for name, value in values.items()}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
