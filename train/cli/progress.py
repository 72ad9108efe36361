"""A bar over rows, with tokens a second, for commands that go through many of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RowProgress:
    """Told what is done; made by `row_progress`."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._started, self._num_tokens = time.perf_counter(), 0

    def add_tokens(self, count: int) -> None:
        self._num_tokens += count
        seconds = time.perf_counter() - self._started
        self._progress.update(self._task, tokens_per_second=self._num_tokens / seconds)

    def add_row(self) -> None:
        self._progress.advance(self._task)

    def set_rows(self, count: int) -> None:
        """Rows done so far, those of earlier runs included."""
        self._progress.update(self._task, completed=count)


@contextmanager
def row_progress(what: str, *, total: int, done: int = 0, is_shown: bool = True) -> Iterator[RowProgress]:
    """`what`: the rows' name; `done`: those there already."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens_per_second]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not is_shown, speed_estimate_period=600) as progress:
        yield RowProgress(progress, progress.add_task("", total=total, completed=done, tokens_per_second=0.0))
