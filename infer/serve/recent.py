"""What the server did of late, for `/status`: tokens a second, and how many tokens a round gave."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from infer.async_engine import Step
from infer.request import Request

SPEED_SECONDS = 10
ACCEPTANCE_SECONDS = 60


class Recent:
    """Counts by the second, of the last minute. A listener of the engine: written in its thread, read in another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, list[int]]] = deque()  # second, [tokens, drafts, accepted tokens]

    def stepped(self, step: Step) -> None:
        now = int(self._clock())
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != now:
                self._seconds.append((now, [0, 0, 0]))
            counts = self._seconds[-1][1]
            for one in step.rounds:
                counts[0] += one.num_tokens
                if one.num_nodes:
                    counts[1] += 1
                    counts[2] += one.num_accepted
            while self._seconds[0][0] < now - ACCEPTANCE_SECONDS:
                self._seconds.popleft()

    def finished(self, request: Request) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        """Over the last `SPEED_SECONDS`, or since the start if that was later."""
        now = self._clock()
        num_tokens = sum(counts[0] for counts in self._since(now - SPEED_SECONDS))
        return num_tokens / max(1.0, min(SPEED_SECONDS, now - self._began))

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted tokens / drafts over the last `ACCEPTANCE_SECONDS`; NaN without drafts."""
        counts = self._since(self._clock() - ACCEPTANCE_SECONDS)
        num_drafts = sum(each[1] for each in counts)
        return 1 + sum(each[2] for each in counts) / num_drafts if num_drafts else math.nan

    def _since(self, when: float) -> list[list[int]]:
        with self._lock:
            return [list(counts) for second, counts in self._seconds if second + 1 > when]
