"""Choosing how many threads decoding uses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from infer import threads
from infer.cli.common import thread_count
from infer.kernels.build import torch_openmp
from infer.target import TargetModel


@pytest.fixture(autouse=True)
def same_threads_after():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_candidates_are_powers_of_two_and_all_processors() -> None:
    counts = threads.candidate_threads()
    assert counts[0] == 1
    assert counts == sorted(set(counts))
    assert all(count & (count - 1) == 0 for count in counts[:-1])


def test_the_fewest_threads_that_are_as_fast_are_taken() -> None:
    """A hundredth of a millisecond is noise, and a thread left out is there for other work."""
    assert threads.best_of({1: 20.0, 2: 10.1, 4: 10.0, 8: 12.0}) == 2
    assert threads.best_of({1: 10.0, 2: 10.0}) == 1
    assert threads.best_of({1: 30.0, 2: 10.0}) == 2


def test_measuring_leaves_the_setting_and_choosing_changes_it(tiny_model, monkeypatch) -> None:
    target = TargetModel.wrap(tiny_model("llama"))
    torch.set_num_threads(1)
    times = threads.measure_threads(target, [1, 2], repeats=2)
    assert list(times) == [1, 2]
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(threads, "measure_threads", lambda target: {1: 9.0, 2: 3.0})
    assert threads.choose_threads(target) == {1: 9.0, 2: 3.0}
    assert torch.get_num_threads() == 2


def test_the_option() -> None:
    assert (thread_count("1"), thread_count("auto")) == (1, "auto")
    with pytest.raises(argparse.ArgumentTypeError, match="100000 threads were asked for, but this machine has"):
        thread_count("100000")
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number of threads: give 1 or more, or auto"):
            thread_count(text)


@pytest.mark.skipif(
    torch_openmp() is None or not Path("/proc/self/task").is_dir(), reason="needs GNU's OpenMP on Linux"
)
def test_workers_that_are_let_go_come_back() -> None:
    """The thread computes as before, in parallel; in between it has no workers."""
    torch.set_num_threads(2)
    rows = torch.randn(2048, 512)
    expected = (rows * 2).sum()
    busy = _num_threads()
    threads.release_workers()
    threads.release_workers()
    assert _num_threads() == busy - 1
    assert (rows * 2).sum() == expected
    assert _num_threads() == busy


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
