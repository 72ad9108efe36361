"""Acceptance curves in Weights & Biases, beside whatever else keeps them.

wandb is imported in the thread that writes records: starting it may take seconds, and neither the server nor the engine
waits. It asks for nothing: without a key or without a network it records offline (`wandb sync` uploads later); where it
is missing or broken that is said once, and all else goes on. One run a process. Records have an axis of their own
(`window`), so wandb's own step never rejects one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from infer.wandb_service import has_key, is_reachable, quiet_settings, service_url

AXIS = "window"
FINISH_SECONDS = 45
"""A service that was lost on the way must not keep a server from ending; `wandb sync` uploads what is left."""
TABLE_WINDOWS = 10
"""Tables and plots are drawn once in so many windows, and at the end."""
_KEYS = ("by_tag", "by_temperature", "by_context")


class WandbLog:
    """A sink (`infer.serve.sinks.Sink`)."""

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        self._project, self._name, self._config = project, name, dict(config)
        self._notice = notice
        self._run: Any = None
        self._last: Mapping[str, Any] | None = None
        self._num_windows = 0

    def __str__(self) -> str:
        return "wandb"

    def open(self) -> None:
        mode = choose_mode(self._notice)
        try:
            self._run = self._start(mode)
        except ImportError:
            raise
        except Exception as error:  # wandb raises its own, urllib's, and plain ones
            if mode != "online":
                raise
            self._notice(f"wandb did not start online ({error}): it records offline (upload later with `wandb sync`)")
            self._run = self._start("offline")
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def write(self, record: Mapping[str, Any]) -> None:
        run = self._run
        if record["event"] == "drift":
            run.log({AXIS: self._num_windows, "acceptance/drift": int(record["drifting"])})
            if record["drifting"]:
                run.alert(title="acceptance has fallen", text=record["message"])
            return
        self._num_windows += 1
        self._last = record
        run.log({AXIS: record["window"], **curves_of(record)})
        if self._num_windows % TABLE_WINDOWS == 1:
            run.log({AXIS: record["window"], **pictures_of(record)})

    def close(self) -> None:
        try:
            if self._last is not None:
                self._run.log({AXIS: self._last["window"], **pictures_of(self._last)})
                self._run.summary.update(
                    {f"acceptance/{name}": value for name, value in scalars_of(self._last["since_start"]).items()}
                )
        finally:
            self._run.finish()

    def _start(self, mode: str) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")  # before it is imported
        import wandb

        return wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=self._project,
            name=self._name,
            job_type="serve",
            config=self._config,
            settings=quiet_settings(wandb, finish_timeout=FINISH_SECONDS),
        )


def curves_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Points of one window: overall by depth, and the accepted length of each group."""
    points = {f"acceptance/{name}": value for name, value in scalars_of(record["overall"]).items()}
    for key in _KEYS:
        for name, counts in record[key].items():
            if counts["mean_accepted_length"] is not None:
                points[f"acceptance_{key}/{name}"] = counts["mean_accepted_length"]
    for one in record["drift"] or ():
        if one["ratio_to_card"] is not None:
            points[f"acceptance/ratio_to_card_at_{one['temperature']:g}"] = one["ratio_to_card"]
    points["acceptance/drift"] = float(any(one["drifting"] for one in record["drift"] or ()))
    points["seconds"] = record["end_seconds"]
    return points


def scalars_of(counts: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of one pool, and its shares by position."""
    plain = ("num_rounds", "num_drafts", "drafted_share", "mean_accepted_length")
    points = {name: counts[name] for name in plain if counts[name] is not None}
    for place, share in enumerate(counts["by_position"], start=1):
        points[f"by_position/{place}"] = share
    for place, share in enumerate(counts["given_drafted"], start=1):
        if share is not None:
            points[f"given_drafted/{place}"] = share
    return points


def pictures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A table of all groups, and a plot of shares by depth for each way of grouping, over the fading totals."""
    import wandb

    fading = record["fading"]
    rows: list[list[Any]] = [_row("all", "all", fading["overall"])]
    pictures: dict[str, Any] = {"acceptance/by_position": _plot({"all": fading["overall"]}, "of late")}
    for key in _KEYS:
        rows += [_row(key.removeprefix("by_"), name, counts) for name, counts in fading[key].items()]
        pictures[f"acceptance/positions_{key}"] = _plot(fading[key], key.replace("_", " "))
    columns: list[str | int] = ["key", "name", "drafts", "mean accepted length", "drafted share", "depth 1", "depth 2"]
    pictures["acceptance/table"] = wandb.Table(columns=columns, data=rows)
    return pictures


def _row(key: str, name: str, counts: Mapping[str, Any]) -> list[Any]:
    first, second = [*counts["by_position"], None, None][:2]
    return [key, name, counts["num_drafts"], counts["mean_accepted_length"], counts["drafted_share"], first, second]


def _plot(groups: Mapping[str, Mapping[str, Any]], what: str) -> Any:
    import wandb

    curves = {f"{name} ({counts['num_drafts']:.0f} drafts)": counts["by_position"] for name, counts in groups.items()}
    curves = {name: curve for name, curve in curves.items() if curve}
    return wandb.plot.line_series(
        xs=[list(range(1, len(curve) + 1)) for curve in curves.values()],
        ys=[list(curve) for curve in curves.values()],
        keys=list(curves),
        title=f"share of drafts accepted, {what}",
        xname="draft position",
    )


def choose_mode(notice: Callable[[str], None]) -> str:
    """online, offline or disabled: never one that would ask for a key, or wait for a service out of reach."""
    asked = os.environ.get("WANDB_MODE", "")
    if asked in ("offline", "disabled"):
        return asked
    if not has_key():
        notice("wandb has no key: it records offline (upload later with `wandb sync`)")
        return "offline"
    if not is_reachable(service_url()):
        notice(f"{service_url()} cannot be reached: wandb records offline (upload later with `wandb sync`)")
        return "offline"
    return "online"
