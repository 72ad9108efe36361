"""Predicted speed-ups of a workload, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.tune.search import Found, Setting

if TYPE_CHECKING:
    from infer.tune.tuner import TunedWorkload

_MOST_PANELS = 6


def best_by_size(found: Found) -> dict[tuple[int, int], float]:
    """The best predicted speed-up at each (most nodes, depth), over all else that a setting says."""
    best: dict[tuple[int, int], float] = {}
    for each in found.predictions:
        if each.setting.tree is not None:
            key = (each.setting.tree.max_nodes, each.setting.tree.max_depth)
            best[key] = max(best.get(key, 0.0), found.speedup(each))
    return best


def plot(tuned: Sequence[TunedWorkload], path: Path) -> None:
    """A map of nodes by depth for each workload: the best predicted speed-up there, the choice marked."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'headstart[train]'") from error

    shown = [each for each in tuned[:_MOST_PANELS] if best_by_size(each.found)]
    figure = Figure(figsize=(1.0 + 5.2 * len(shown), 4.4), layout="constrained")
    for place, each in enumerate(shown):
        _panel(figure, figure.add_subplot(1, len(shown), place + 1), each)
    figure.savefig(path, dpi=150)


def _panel(figure: Any, axes: Any, tuned: TunedWorkload) -> None:
    import numpy as np

    best = best_by_size(tuned.found)
    nodes, depths = (sorted({key[i] for key in best}) for i in (0, 1))
    grid = np.full((len(depths), len(nodes)), np.nan)
    for (size, depth), speedup in best.items():
        grid[depths.index(depth), nodes.index(size)] = speedup
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="viridis")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(nodes)), nodes)
    axes.set_yticks(range(len(depths)), depths)
    axes.set_xlabel("most draft tokens of a round")
    axes.set_ylabel("longest path")
    axes.set_title(f"{tuned.workload}\npredicted speed-up; chosen: {_short(tuned.choice.setting)}", fontsize=9)
    _mark(axes, tuned.choice.setting, nodes, depths)
    figure.colorbar(image, ax=axes, shrink=0.8)


def _mark(axes: Any, setting: Setting, nodes: Sequence[int], depths: Sequence[int]) -> None:
    from matplotlib.patches import Rectangle

    if setting.tree is not None:
        corner = (nodes.index(setting.tree.max_nodes) - 0.5, depths.index(setting.tree.max_depth) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))


def _short(setting: Setting) -> str:
    return "plain decoding" if setting.tree is None else str(setting)
