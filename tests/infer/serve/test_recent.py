"""Figures of the last seconds, by a clock that the test sets."""

from __future__ import annotations

import math

from infer.serve.recent import Recent
from tests.infer.serve.listening import Clock, MadeRequest, made_round, step_of


def test_what_is_old_is_forgotten() -> None:
    """Tokens count for 10 s, drafts for 60 s; rounds without a draft say nothing of acceptance."""
    clock, request = Clock(100.0), MadeRequest()
    recent = Recent(clock)
    assert recent.tokens_per_second == 0
    assert math.isnan(recent.mean_accepted_length)
    clock.now = 104.0
    recent.stepped(step_of(made_round(request, 3, nodes=4, accepted=2), made_round(request, 1)))
    recent.stepped(step_of(made_round(request, 1, nodes=4)))
    assert recent.tokens_per_second == 5 / 4  # it has run for 4 s
    assert recent.mean_accepted_length == 1 + 2 / 2
    clock.now = 120.0
    assert recent.tokens_per_second == 0
    assert recent.mean_accepted_length == 2
    clock.now = 200.0
    recent.stepped(step_of(made_round(request, 1)))
    assert math.isnan(recent.mean_accepted_length)
