"""`--plot`: forwards against width for every context, and the parts of a round, both beside their floors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infer.profile.report import ProfileReport
from infer.profile.rounds import RoundProfile
from infer.profile.watch import TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TARGET_COLOUR, _DRAFT_COLOUR, _OTHER_COLOUR = "#4a86c5", "#e08a3c", "#9aa4af"
_CONTEXT_COLOURS = ("#7fb3dc", "#2f74b5", "#0b3c74", "#54278f", "#7a0177")


def plot(report: ProfileReport, path: Path) -> None:
    """Draw the report to an image file: a row a batch. Needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'headstart[train]'") from error
    rounds = {each.batch: each for each in report.rounds}
    num_columns = 2 if rounds else 1
    figure = Figure(figsize=(6.6 * num_columns, 0.4 + 4.4 * len(report.batches)), layout="constrained")
    FigureCanvasAgg(figure)
    for panels, batch in zip(
        figure.subplots(len(report.batches), num_columns, squeeze=False), report.batches, strict=True
    ):
        _draw_forwards(panels[0], report, batch)
        if batch in rounds:
            _draw_round(panels[1], rounds[batch])
        elif rounds:
            panels[1].set_visible(False)
    figure.suptitle(f"{report.target}, {report.dtype}, {report.forward_kind} forward, {report.device}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_forwards(axes: Axes, report: ProfileReport, batch: int) -> None:
    contexts = report.forwards_of(batch)
    colours = _CONTEXT_COLOURS if len(contexts) > 1 else (_TARGET_COLOUR,)
    for number, (context, costs) in enumerate(contexts.items()):
        colour = colours[number % len(colours)]
        widths = [each.width for each in costs]
        axes.plot(widths, [each.milliseconds for each in costs], "o-", ms=4, color=colour, label=f"context {context}")
        axes.plot(widths, [each.floor.milliseconds for each in costs], "--", lw=1.2, color=colour)
    if batch == 1:
        matmuls = report.matmul_floor_milliseconds
        axes.plot([1], [matmuls], "x", color="black", label="its matrices one by one, width 1")
    axes.plot([], [], "--", lw=1.2, color="grey", label="floor")
    ticks = sorted({each.width for each in report.forwards if each.batch == batch})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize="small", rotation=45)
    axes.minorticks_off()
    axes.set(
        xlabel="width (rows of all requests)",
        ylabel="milliseconds",
        title=f"target forward, {_requests(batch)}",
        ylim=(0, None),
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="upper left")


def _draw_round(axes: Axes, profile: RoundProfile) -> None:
    """A bar a part, in the round's order, and within it the part's floor; the parts worth a look are set in bold."""
    floors = [part.floor.milliseconds for part in profile.parts if part.floor is not None]
    longest = max(*(part.milliseconds for part in profile.parts), *floors)
    for place, part in enumerate(profile.parts):
        axes.barh(place, part.milliseconds, color=_colour(part.name), height=0.72)
        label, end = f"{part.milliseconds:.2f} ms, {100 * part.share:.1f} %", part.milliseconds
        if part.floor is not None:
            axes.barh(place, part.floor.milliseconds, color="black", height=0.16)
            label += f", {part.milliseconds / part.floor.milliseconds:.1f} x floor"
            end = max(end, part.floor.milliseconds)
        weight = "bold" if part in profile.notable else "normal"
        axes.text(end + 0.015 * longest, place, label, va="center", fontsize="small", weight=weight)
    axes.barh([0], [0], color="black", height=0.16, label="floor")
    axes.set_yticks(range(len(profile.parts)), [part.name for part in profile.parts])
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 1.6 * longest),
        xlabel="milliseconds",
        title=f"a round, {_requests(profile.batch)}: {profile.milliseconds:.1f} ms",
    )
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.legend(
        fontsize="small",
        loc="lower right",
        title_fontsize="small",
        title=f"{profile.width:.0f} rows, context {profile.context:.0f}, T = {profile.temperature:g}\n"
        f"{profile.num_steps:.1f} draft steps, {profile.tokens:.2f} tokens a request",
    )


def _colour(name: str) -> str:
    return _TARGET_COLOUR if name == TARGET else _DRAFT_COLOUR if name.startswith("draft") else _OTHER_COLOUR


def _requests(batch: int) -> str:
    return "1 request" if batch == 1 else f"{batch} requests"
