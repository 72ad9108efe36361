"""The order of visits: every row of a source once an epoch, and each source its share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from infer.chat import Rendered
from train.corpus.order import MAX_PERIOD, MixedVisits, RowVisits, Shares, VisitOrder, derived_seed


def row(number: int) -> Rendered:
    return Rendered(token_ids=[number], loss_mask=[True])


def number_of(visited: Rendered) -> int:
    return visited.token_ids[0]


@pytest.mark.parametrize("seed", [0, 4, 2**63 - 1])
def test_every_row_once_an_epoch_in_another_order(seed: int) -> None:
    """For every seed a recipe may hold: the greatest one once overflowed the generator's."""
    order = VisitOrder(50, seed=seed)
    epochs = [[order[visit] for visit in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1, 1], [1, 1]),
        ([0.7, 0.3], [7, 3]),
        ([3, 1, 1], [3, 1, 1]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),  # 0.1 + 0.2 is not 0.3 in binary
        ([1], [1]),
        ([0.3333, 0.6667], [3333, 6667]),
        ([2e-4, 0.9998], [1, 4999]),
    ],
)
def test_shares_are_exact_over_a_period(weights: list[float], counts: list[int]) -> None:
    """As the decimals of the recipe say, from any period's beginning on."""
    shares = Shares(weights)
    assert shares.counts == counts
    for start in (0, 3 * shares.period):
        found = Counter(shares[visit][0] for visit in range(start, start + shares.period))
        assert [found[source] for source in range(len(weights))] == counts


def test_odd_weights_are_rounded_to_the_period() -> None:
    shares = Shares([1 / 3, 0.123456789, 1.0])
    assert shares.period == MAX_PERIOD
    total = 1 / 3 + 0.123456789 + 1
    for share, weight in zip(shares.fractions, [1 / 3, 0.123456789, 1.0], strict=True):
        assert abs(share - weight / total) < 1 / MAX_PERIOD


def test_a_share_that_would_never_be_visited_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give source 2 less than one visit in 10,000"):
        Shares([1.0, 1e-7])


def test_sources_are_spread_evenly() -> None:
    """No stretch of visits is further from the shares than two visits of each source."""
    shares = Shares([0.55, 0.3, 0.15])
    for start in range(shares.period):
        for length in (5, 20, 60):
            found = Counter(shares[visit][0] for visit in range(start, start + length))
            for source, share in enumerate(shares.fractions):
                assert abs(found[source] - share * length) <= 2


def test_a_source_counts_its_own_visits() -> None:
    """The number beside a source goes up by one at each of its visits, across periods."""
    shares = Shares([5, 2, 1])
    seen: Counter[int] = Counter()
    for visit in range(100):
        assert [shares.before(visit, source) for source in range(3)] == [seen[source] for source in range(3)]
        source, place = shares[visit]
        assert place == seen[source]
        seen[source] += 1


def test_each_source_of_a_mixture_goes_through_its_own_epochs() -> None:
    """A small source is repeated in whole epochs, each in another order, while the large one is still in its first."""
    small, large = [row(i) for i in range(6)], [row(100 + i) for i in range(50)]
    visits = MixedVisits([RowVisits(small, seed=1), RowVisits(large, seed=2)], Shares([1, 3]))
    seen = [number_of(visits.at(visit)) for visit in range(4 * 18)]
    of_small, of_large = [n for n in seen if n < 100], [n for n in seen if n >= 100]
    epochs = [of_small[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(of_large[:50]) == [100 + i for i in range(50)]
    assert sorted(of_large[50:]) != of_large[50:]


def test_a_mixture_is_a_function_of_seed_and_visit() -> None:
    """Asked for from the middle on, or again, it gives the same rows; rows in memory leave nothing to remember."""

    def mixture() -> MixedVisits:
        parts = [RowVisits([row(100 * s + i) for i in range(9)], seed=derived_seed(7, s)) for s in range(2)]
        return MixedVisits(parts, Shares([0.6, 0.4]))

    whole = mixture()
    expected = [number_of(whole.at(visit)) for visit in range(60)]
    resumed = mixture()
    state = whole.state(31)
    assert state == {}
    resumed.seek(31, state)
    assert [number_of(resumed.at(visit)) for visit in range(31, 60)] == expected[31:]
    assert [number_of(whole.at(visit)) for visit in range(60)] == expected


def test_sources_with_equal_rows_are_not_in_step() -> None:
    """Each has a seed of its own, so two equally long files are not walked in the same permutation."""
    assert derived_seed(7, 0) != derived_seed(7, 1) != derived_seed(71, 0)
    first, second = (VisitOrder(40, seed=derived_seed(7, source)) for source in range(2))
    assert [first[i] for i in range(40)] != [second[i] for i in range(40)]


def test_a_checkpoint_of_other_sources_is_refused() -> None:
    visits = MixedVisits([RowVisits([row(1)], seed=0)] * 2, Shares([1, 1]))
    with pytest.raises(ValueError, match="tells of 3 data sources, this run has 2"):
        visits.seek(5, {"sources": [{"visit": 1}] * 3})
