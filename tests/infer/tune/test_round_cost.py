"""Costs fitted to rounds: what was planted is found again, disturbed rounds do not matter, predictions add up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from infer.cost import CostModel
from infer.drafters import TreeSettings
from infer.tune.cost import Linear, RoundCost, draft_features, non_negative_least_squares, rest_features
from infer.tune.replay import Round
from infer.tune.rounds import TimedRound
from infer.tune.search import PLAIN, Prediction, Setting, grid, neighbours, ranked

TABLE = CostModel(widths=(1, 64), milliseconds=(10.0, 25.0))
DRAFTING, REST = (0.5, 0.2, 1.0, 0.05, 0.01), (0.3, 0.1, 0.02, 0.05)


def made(rng: random.Random, *, is_first: bool = False) -> Round:
    drafted = rng.random() < 0.8
    num_steps = rng.randint(0, 6) * drafted
    num_nodes = rng.randint(1, 32) * drafted
    return Round(
        num_requests=1,
        num_asked=int(drafted),
        num_rows=1 + num_nodes,
        context=rng.randint(40, 300),
        num_steps=num_steps,
        num_step_rows=num_steps * rng.randint(1, 6),
        lengths=(rng.randint(1, 1 + num_steps),),
        is_first=is_first,
    )


def timed(one: Round, rng: random.Random, noise: float) -> TimedRound:
    """A round as a machine whose forwards take a fifth and a millisecond more than the table's would take it."""
    draft = Linear(coefficients=DRAFTING)(draft_features(one)) if one.num_asked else 0.0
    forward = 1.2 * TABLE.target_milliseconds(one.num_rows) + 1.0
    rest = Linear(coefficients=REST)(rest_features(one))
    draft, forward, rest = (each * rng.gauss(1, noise) for each in (draft, forward, rest))
    return TimedRound(round=one, milliseconds=draft + forward + rest, draft=draft, forward=forward)


def planted(count: int, *, noise: float) -> list[TimedRound]:
    rng = random.Random(0)
    return [timed(made(rng), rng, noise) for _ in range(count)]


def test_planted_costs_are_found():
    """Without noise to a thousandth (corrections by width are shrunk to none), with 5 % of it rounds to 2 %: what the
    fit leaves is their mean, whose error over 600 rounds is far below."""
    quiet, noisy = planted(300, noise=0.0), planted(600, noise=0.05)
    exact, found = RoundCost.fit(quiet, TABLE), RoundCost.fit(noisy, TABLE)
    for each in quiet[:50]:
        assert exact.milliseconds(each.round) == pytest.approx(each.milliseconds, rel=1e-3)
        assert found.milliseconds(each.round) == pytest.approx(each.milliseconds, rel=0.02)
    assert exact.error < 1e-3
    assert found.error < 0.06


def test_disturbed_rounds_do_not_matter():
    """One round in ten takes five times as long; the fit is of the others."""
    rounds = planted(400, noise=0.02)
    for place in range(0, len(rounds), 10):
        one = rounds[place]
        rounds[place] = TimedRound(
            round=one.round, milliseconds=5 * one.milliseconds, draft=5 * one.draft, forward=5 * one.forward
        )
    found = RoundCost.fit(rounds, TABLE)
    errors = [found.milliseconds(each.round) / each.milliseconds - 1 for each in planted(100, noise=0.0)]
    assert max(map(abs, errors)) < 0.04


def test_rounds_with_a_prefill_are_not_fitted():
    rng = random.Random(1)
    slow = [
        TimedRound(round=made(rng, is_first=True), milliseconds=500.0, draft=100.0, forward=300.0) for _ in range(50)
    ]
    rounds = planted(200, noise=0.0)
    assert RoundCost.fit([*slow, *rounds], TABLE) == RoundCost.fit(rounds, TABLE)
    with pytest.raises(ValueError, match="no rounds to fit costs to"):
        RoundCost.fit(slow, TABLE)


def test_least_squares_stay_above_zero():
    """Unconstrained answers that are positive are met; where one would be negative it is 0, and no small step from the
    answer does better (the conditions of an optimum)."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        matrix, truth = rng.random((40, 5)), np.maximum(0, rng.normal(size=5))
        np.testing.assert_allclose(non_negative_least_squares(matrix, matrix @ truth), truth, atol=1e-8)
        wanted = rng.normal(size=40)
        found = non_negative_least_squares(matrix, wanted)
        slope = matrix.T @ (wanted - matrix @ found)
        assert (found >= 0).all()
        assert (slope <= 1e-8).all()
        np.testing.assert_allclose(slope[found > 0], 0, atol=1e-8)


def prediction(setting: Setting, num_tokens: int, milliseconds: float) -> Prediction:
    return Prediction(
        setting=setting, num_tokens=num_tokens, num_rounds=1, milliseconds=milliseconds, accepted_length=1.0
    )


def test_plain_decoding_is_chosen_where_it_wins():
    drafts = [Setting(tree=TreeSettings.chain(depth)) for depth in (1, 2)]
    slow = [prediction(PLAIN, 10, 100.0), *(prediction(each, 10, 120.0) for each in drafts)]
    assert ranked(slow).best.setting == PLAIN
    assert ranked(slow).best_draft.setting in drafts
    fast = [*slow, prediction(Setting(tree=TreeSettings.chain(3)), 10, 50.0)]
    assert ranked(fast).speedup(ranked(fast).best) == pytest.approx(2.0)


def test_the_grid_is_large_and_has_no_setting_twice():
    for hybrids in ((False,), (False, True)):
        settings = grid(hybrids)
        assert len(settings) == len(set(settings)) >= 60 * len(hybrids)
        assert settings.count(PLAIN) == 1
    assert all(each.tree is None or each.tree.max_depth <= 2 for each in grid((False,), max_depth=2))


def test_neighbours_differ_in_one_thing():
    settings = grid((False, True))
    one = next(each for each in settings if each.tree is not None and each.tree.max_nodes == 8)
    near = neighbours(one, settings)
    assert near
    assert one not in near
    assert PLAIN not in near
    assert neighbours(PLAIN, settings) == []


def test_a_prediction_adds_up():
    """Rounds with the prefill count for nothing; tokens over the sum of costs is the speed."""
    rng = random.Random(2)
    rounds = [made(rng, is_first=True), made(rng), made(rng)]
    cost = RoundCost.fit(planted(100, noise=0.0), TABLE)
    found = Prediction.of(PLAIN, rounds, cost)
    assert found.num_tokens == sum(each.num_tokens for each in rounds[1:])
    assert found.milliseconds == pytest.approx(sum(map(cost.milliseconds, rounds[1:])))
    assert found.tokens_per_second == pytest.approx(1e3 * found.num_tokens / found.milliseconds)
