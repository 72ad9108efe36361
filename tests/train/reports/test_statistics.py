"""The bootstrap and Student's t against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest

from train.reports.statistics import is_credible, ratio_standard_error, student_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    # The tables of any textbook, to four digits.
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 4, 2.7764),
        (0.95, 5, 2.0150),
        (0.975, 10, 2.2281),
        (0.995, 30, 2.7500),
        (0.025, 4, -2.7764),
        (0.975, 1001, 1.9623),
    ],
)
def test_student_quantiles(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, rel=2e-4)


def test_what_is_no_quantile_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 degree"):
        student_quantile(0.9, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        student_quantile(1.0, 3)


def test_standard_error_of_a_mean() -> None:
    """With equal denominators the ratio is a mean: deviation over the root of the count, to the bootstrap's 2-3 %."""
    chance = np.random.default_rng(1)
    values = chance.normal(10, 2, size=50)
    expected = values.std() / 50**0.5
    assert ratio_standard_error(values.tolist(), [1.0] * 50) == pytest.approx(expected, rel=0.1)
    assert ratio_standard_error(values.tolist(), [1.0] * 50) == ratio_standard_error(values.tolist(), [1.0] * 50)


def test_one_answer_has_no_standard_error() -> None:
    assert ratio_standard_error([30.0], [10.0]) is None
    assert ratio_standard_error([], []) is None
    assert ratio_standard_error([20.0, 20.0], [10.0, 10.0]) == 0.0


def test_a_speed_up_beyond_the_accepted_length_is_noise() -> None:
    assert is_credible({"speedup": 1.4, "tree_accepted_length": 1.6})
    assert not is_credible({"speedup": 2.4, "tree_accepted_length": 1.0})
    assert is_credible({"speedup": 1.4})  # of an older run
    assert not is_credible({})
