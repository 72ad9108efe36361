"""What tests of listeners share: requests, rounds and steps made by hand, and a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

from infer.async_engine import Step
from infer.request import DraftBounds, RequestRound
from infer.sampling import SamplingParams
from infer.tree import DraftTree
from infer.verify import RULES


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class MadeRequest:
    """As much of a request as a listener reads."""

    def __init__(self, **fields: Any) -> None:
        times = {"submitted": 990.0, "started": 995.0, "first_token_at": None, "finished_at": None}
        counts = {"num_reused": 0, "num_tokens": 100, "output_ids": [], "finish_reason": None, "tag": ""}
        rule = {"rule": RULES["match"], "params": SamplingParams(), "draft": DraftBounds()}
        self.__dict__.update({**times, **counts, **rule, **fields})


def made_round(
    request: Any, num_tokens: int, *, nodes: int = 0, accepted: int = 0, first: bool = False, tree: Any = None
) -> RequestRound:
    """A chain of `nodes`, unless a `tree` is given, of which the first `accepted` nodes were accepted."""
    return RequestRound(
        request=request,
        is_first=first,
        tree=tree or DraftTree.chain(tuple(range(nodes))),
        path=tuple(range(accepted)),
        token_ids=(7,) * num_tokens,
    )


def step_of(*rounds: RequestRound, seconds: float = 0.1, num_prompt_tokens: int = 0) -> Step:
    return Step(
        seconds=seconds,
        num_running=len(rounds),
        num_waiting=0,
        num_prompt_tokens=num_prompt_tokens,
        rounds=tuple(rounds),
    )
