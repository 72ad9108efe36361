"""A head that goes on learning from what is served: what an engine asks of whoever trains it, and what shows of it.

Tokens cannot change: verification keeps the target's, whatever a head drafts. What learns lives above this package
(`train.online`); it gets the text and the states from `infer.drafters.recording` and its time from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class LearningStatus:
    """is_on: false once a fault has ended it. num_answers, num_held_out: finished answers taken, and those of them that
    are never trained on. num_tokens: tokens with states that are held now. num_steps: of the optimiser. num_swaps,
    num_rollbacks: changes of the head that drafts. length_served, length_learned: accepted lengths on held-out answers
    when the head in training was last compared with the one that drafts (NaN: not yet). busy_seconds, idle_seconds:
    spent while requests ran, and while none did."""

    is_on: bool = True
    num_answers: int = 0
    num_held_out: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_swaps: int = 0
    num_rollbacks: int = 0
    length_served: float = float("nan")
    length_learned: float = float("nan")
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0


class Learner(Protocol):
    """Called by the engine's thread alone, between two steps. Never raises: a fault of its own ends the learning."""

    def after_step(self, seconds: float) -> None:
        """A step took so long, and more is to be done: a piece of work, if the share of time allows one."""

    def when_idle(self) -> bool:
        """A piece of work while nobody waits; False if there is none until more has been served."""
        ...

    def status(self) -> LearningStatus:
        """May be asked by any thread."""
        ...
