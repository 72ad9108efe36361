"""The training benchmark, on a tiny target: its tables, and that its floors count what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.training import Bench, Line, describe, run
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from train.corpus.dataset import load_data


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[Line]]:
    folder: Path = tmp_path_factory.mktemp("benchmark")
    config = tiny_recipe(write_chats(folder / "chats.jsonl"), optim__batch_size=2)
    target = tiny_target()
    data = load_data(config.data, target.tokenizer, seed=0, max_prompt_tokens=200)
    return run(config, target, data, num_rows=4, repeats=1)


def test_there_is_a_line_for_every_kind_of_training(measured: tuple[Bench, list[Line]]) -> None:
    _, lines = measured
    assert [(line.name, line.num_steps) for line in lines] == [
        ("cached", 1),
        ("online", 1),
        ("cached", 2),
        ("online", 2),
    ]
    for line in lines:
        assert line.num_updates == 2
        assert line.share_of_floor > 0
        assert line.tokens_per_second > 0
        assert all(value >= 0 for value in line.seconds.values())
        assert line.peak_megabytes > 0 or not Path("/proc/self/clear_refs").exists()


def test_floors_are_those_of_the_sizes(measured: tuple[Bench, list[Line]]) -> None:
    """By hand: the loss has three products a row and one a place of the target; the layers' weights multiply each row
    once forward and twice backward (the first one's input gradient is not needed); online adds the target."""
    bench, lines = measured
    sizes = bench.head.config
    rows = sum(len(visit.plan[0]) for plan in bench.plans(1) for visit in plan.visits)
    product = 2 * sizes.draft_vocab_size * sizes.hidden_size
    assert lines[0].floors["loss"] * bench.rate == pytest.approx((3 * rows + rows) * product)
    weights = sum(one.numel() for name, one in bench.head.named_parameters() if one.ndim == 2 and "lm_head" not in name)
    num_tokens = sum(len(row.token_ids) for row in bench.rows)
    layers = lines[0].floors["layers"] * bench.rate
    assert 2 * rows * weights < layers <= 6 * num_tokens * weights
    assert "features" not in lines[0].floors
    model = 2 * num_tokens * sum(one.numel() for layer in bench.target.layers for one in layer.parameters())
    assert lines[1].floors["features"] * bench.target_rate > model
    assert lines[2].floors["loss"] > lines[0].floors["loss"]


def test_the_tables_name_what_was_measured(measured: tuple[Bench, list[Line]]) -> None:
    text = describe(*measured)
    assert "GFLOP/s" in text
    assert "optimiser" in text
    assert "lost in: cached, 1 steps:" in text
    assert torch.__version__ in text
