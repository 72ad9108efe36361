"""Slots and the line before them: who is next, where it goes, and whose rows it takes over."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from infer.scheduling import SlotTable, WaitingLine, share_rows


def request(tokens: list[int] | None = None, *, owner: str = "", num_cached: int | None = None) -> Any:
    tokens = tokens or [1]
    cached = len(tokens) - 1 if num_cached is None else num_cached
    return SimpleNamespace(
        tokens_from=lambda position: tokens[position:], owner=owner, num_cached=cached, slot=-1, __hash__=None
    )


def usable(_: Any, num_shared: int) -> int:
    return num_shared


def test_the_line_is_first_come_first_served_without_owners():
    line = WaitingLine()
    waiting = [request() for _ in range(4)]
    line.extend(waiting)
    assert [_leave(line, []) for _ in range(4)] == waiting


def test_an_owner_with_many_requests_does_not_keep_others_waiting():
    line = WaitingLine()
    flood = [request(owner="flood") for _ in range(10)]
    one = request(owner="one")
    line.extend([*flood, one])
    running = [_leave(line, [])]
    assert running == flood[:1]
    assert _leave(line, running) is one
    assert _leave(line, [*running, one]) is flood[1]


def test_who_was_put_first_is_next_among_equals():
    line = WaitingLine()
    line.extend([request()])
    again = request()
    line.put_first(again)
    assert line.next([]) is again
    assert line.next([], is_held=lambda request: request is again) is not again
    assert line.next([], is_held=lambda request: True) is None
    assert WaitingLine().next([]) is None


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_fair_and_use_the_budget(seed):
    rng = random.Random(seed)
    wanted = [rng.randint(1, 300) for _ in range(rng.randint(1, 9))]
    budget = rng.randint(1, 600)
    shares = share_rows(wanted, budget)
    assert sum(shares) == min(budget, sum(wanted))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    unmet = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert max(unmet, default=0) - min(unmet, default=0) <= 1  # who wants more gets as much as the others who do
    assert all(share + 1 >= max(unmet, default=0) or share == want for share, want in zip(shares, wanted, strict=True))


def test_the_lowest_free_slot_is_taken_while_nothing_is_kept():
    slots = SlotTable(3)
    first, second, third = (request() for _ in range(3))
    for each in (first, second, third):
        assert slots.take(each) is None
    assert [each.slot for each in (first, second, third)] == [0, 1, 2]
    assert slots.num_free == 0
    slots.release(second, keep=False)
    slots.release(first, keep=False)
    again = request()
    slots.take(again)
    assert again.slot == 0


def test_a_slot_cannot_be_released_twice():
    slots = SlotTable(1)
    one = request()
    slots.take(one)
    slots.release(one, keep=False)
    with pytest.raises(AssertionError):
        slots.release(one, keep=False)


def test_the_text_left_longest_ago_goes_first():
    slots = SlotTable(2)
    old, new = request([1, 2, 3]), request([4, 5, 6])
    slots.take(old)
    slots.take(new)
    slots.release(old, keep=True)
    slots.release(new, keep=True)
    assert slots.take(request()) is old
    assert slots.take(request()) is new


def test_the_longest_prefix_is_found_running_or_gone():
    slots = SlotTable(3)
    short, long = request([1, 2, 3, 9, 9, 9]), request([1, 2, 3, 4, 5, 9])
    slots.take(short)
    slots.take(long)
    found = slots.longest_prefix([1, 2, 3, 4, 5, 6], usable, least=1)
    assert found is not None
    assert (found.source, found.num_tokens) == (long, 5)
    slots.release(long, keep=True)
    found = slots.longest_prefix([1, 2, 3, 4, 5, 6], usable, least=1)
    assert found is not None
    assert found.source is long
    assert slots.longest_prefix([7, 2, 3], usable, least=1) is None


def test_only_rows_that_are_there_count():
    slots = SlotTable(1)
    slots.take(request([1, 2, 3, 4, 5], num_cached=2))
    found = slots.longest_prefix([1, 2, 3, 4, 5], usable, least=1)
    assert found is not None
    assert found.num_tokens == 2


def test_a_text_that_goes_on_takes_the_slot_and_a_short_beginning_is_copied():
    slots = SlotTable(2)
    chat = request(list(range(10)))
    slots.take(chat)
    slots.release(chat, keep=True)
    longer = request(list(range(12)))
    prefix = slots.longest_prefix(longer.tokens_from(0), usable, least=1)
    assert slots.take(longer, prefix) is chat
    assert longer.slot == chat.slot
    slots.release(longer, keep=True)

    other = request([0, 1, 99])
    prefix = slots.longest_prefix(other.tokens_from(0), usable, least=1)
    assert slots.take(other, prefix) is None
    assert other.slot != longer.slot
    assert slots.num_kept_tokens == longer.num_cached


def _leave(line: WaitingLine, running: list[Any]) -> Any:
    following = line.next(running)
    line.remove(following)
    return following
