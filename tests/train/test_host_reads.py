"""How often a training step waits for its device: a number a step, whatever it does in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import TargetWeights
from infer.target import TargetModel
from tests.train.on_device import OnDevice, Reads, move_to_device, on_device, reads_written_down
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from train.batch import computing_in, pack_batch
from train.corpus.dataset import load_data
from train.features import OnlineFeatures
from train.features.ahead import FeaturesAhead, NoStreams
from train.setup import make_head
from train.step import Objective, StepTotals, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def reads_of_a_step(
    tmp_path: Path,
    target: TargetModel,
    patch: pytest.MonkeyPatch,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Reads:
    """Of one step as the trainer takes it, with features begun early: its parts, without what is decoded or written."""
    config = tiny_recipe(write_chats(tmp_path / "chats.jsonl"), **changes)
    data = load_data(config.data, target.tokenizer, seed=0, max_prompt_tokens=100)
    head = make_head(config, target, data).train()
    weights = target.weights
    head.bind(TargetWeights(embedding=on_device(weights.embedding), lm_head=on_device(weights.lm_head)))
    move_to_device(head)
    teacher = Teacher(weight=on_device(target.lm_head_weight.index_select(0, head.target_ids), dtype=dtype))
    objective = Objective(head, teacher, config.train)
    with reads_written_down(patch) as reads:
        updater = LocalUpdater(objective, [list(head.parameters())], config.optim, World())
        ahead = FeaturesAhead(OnlineFeatures(target, head.config.taps, looks=False), NoStreams())
        features_of = target.features

        def features(rows: Any, taps: Any) -> Any:
            (found,) = features_of(rows, taps)
            return [type(found)(taps=on_device(found.taps), last=on_device(found.last))]

        patch.setattr(target, "features", features)
        visits = list(enumerate(data.rows[: config.optim.conversations_per_step]))
        plan = plan_step(visits, num_steps=config.train.ttt_steps, settings=config.train)
        totals = StepTotals.empty(plan.num_steps)
        passes = plan.passes(World(), config.optim.batch_size)
        reads.places.clear()
        for number, part in enumerate(passes, start=1):
            batch = pack_batch(part.rows, ahead.get_many(part.rows), device="cpu", dtype=dtype)
            with computing_in(dtype, torch.device("cpu")):
                loss, figures = updater.loss(**as_arguments(part, batch, plan.label_weights(config.train)))
            assert isinstance(loss, OnDevice)
            updater.backward(loss, is_last=number == len(passes))
            totals.add(loss, len(batch), figures)
            if number < len(passes):
                ahead.begin(passes[number].rows)
        assert updater.update([1e-3]) > 0
        assert totals.read().loss > 0
    return reads


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head__type": "medusa", "head__taps": None},
        {"train__step_weighting": "dpace"},
        {"train__step_weighting": "length"},
        {"train__step_weighting": "block", "train__loss": "label"},
        {"train__loss": "top10"},
    ],
    ids=["eagle3", "medusa", "dpace", "length", "block", "top10"],
)
def test_a_step_asks_for_its_norm_and_its_figures(
    tmp_path: Path,
    target: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
    num_passes: int,
    num_steps: int,
    changes: dict[str, Any],
) -> None:
    """Once each: whether to update depends on the norm, and the figures of all passes come together."""
    settings = {"optim__accumulation": num_passes, "train__ttt_steps": num_steps, "train__ttt_keep": 0.7, **changes}
    reads = reads_of_a_step(tmp_path, target, monkeypatch, **settings)
    assert reads.of("train") == ["train/updater.py:unscale_and_clip __float__", "train/step.py:read tolist"]
    rotary = "heads/layers.py:__call__"  # looks its angles up on a CPU alone
    assert [place for place in reads.of("infer") + reads.of("heads") if not place.startswith(rotary)] == []


def test_a_read_in_a_pass_would_show(tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where totals look at each pass at once, as they might, all looks are counted."""
    add = StepTotals.add

    def hasty(self: StepTotals, loss: torch.Tensor, tokens: int, figures: Any) -> None:
        add(self, loss, tokens, figures)
        self.read()

    with monkeypatch.context() as patch:
        patch.setattr(StepTotals, "add", hasty)
        reads = reads_of_a_step(tmp_path, target, patch, optim__accumulation=3)
    assert len(reads.of("train")) == 3 + 1


def test_what_counts_as_a_read() -> None:
    """Every way in which values get to the host, and none of those in which they stay."""
    tensor = torch.tensor([1.0, 2.0]).as_subclass(OnDevice)
    looks: list[Any] = [
        lambda: float(tensor[0]),
        lambda: int(tensor[0]),
        lambda: bool(tensor[0] > 0),
        lambda: tensor[0].item(),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: tensor[tensor > 1],
        lambda: tensor.nonzero(),
        lambda: torch.equal(tensor, tensor),
        lambda: torch.unique(tensor),
    ]
    for look in looks:
        with pytest.MonkeyPatch.context() as patch, reads_written_down(patch) as reads:
            look()
        assert len(reads.places) == 1, reads.places
    with pytest.MonkeyPatch.context() as patch, reads_written_down(patch) as reads:
        made = torch.cat([tensor, tensor[:1]]).softmax(0)[torch.tensor([0, 1])]
        assert isinstance(made, OnDevice)
        assert len(made) == 2
    assert reads.places == []
