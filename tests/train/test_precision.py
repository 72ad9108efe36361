"""What is held in which precision while a head trains in bfloat16, on a GPU as on a CPU: only products are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from tests.train.training_fixtures import NUM_LAYERS, tiny_recipe, write_chats
from train.batch import computing_in, pack_batch
from train.corpus.dataset import load_data
from train.features import OnlineFeatures
from train.losses import Drafts
from train.setup import compute_dtype, make_head
from train.step import Objective, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World


def half_target(dtype: torch.dtype) -> TargetModel:
    model: torch.nn.Module = make_tiny_model("llama", vocab_size=264, num_hidden_layers=NUM_LAYERS)
    return TargetModel.wrap(model.to(dtype), toy_tokenizer(), name="tiny")


class Trained:
    """Some steps of a tiny head, and what was in them."""

    def __init__(self, data: Path, dtype: torch.dtype, *, num_updates: int, patch: pytest.MonkeyPatch) -> None:
        target = half_target(dtype)
        config = tiny_recipe(data, train__loss="kl", optim__lr=3e-3)
        self.compute = compute_dtype(config, target)
        rows = load_data(config.data, target.tokenizer, seed=0, max_prompt_tokens=100)
        head = make_head(config, target, rows).bind(target.weights).train()
        teacher = Teacher(weight=target.lm_head_weight.index_select(0, head.target_ids).to(self.compute))
        self.parameters = list(head.parameters())
        updater = LocalUpdater(Objective(head, teacher, config.train), [self.parameters], config.optim, World())
        source = OnlineFeatures(target, head.config.taps)
        self.drafts: list[Drafts] = []
        self.losses: list[float] = []
        self.gradients: list[torch.dtype] = []
        self._watch(patch)
        for _ in range(num_updates):
            plan = plan_step(list(enumerate(rows.rows[:4])), num_steps=2, settings=config.train)
            (part,) = plan.passes(World(), 4)
            self.batch = pack_batch(part.rows, source.get_many(part.rows), device="cpu", dtype=self.compute)
            with computing_in(self.compute, torch.device("cpu")):
                loss, self.figures = updater.loss(**as_arguments(part, self.batch, plan.label_weights(config.train)))
            self.loss_dtype = loss.dtype
            updater.backward(loss, is_last=True)
            self.gradients += [one.grad.dtype for one in self.parameters if one.grad is not None]
            updater.update([config.optim.lr])
            self.losses.append(float(loss.detach()))
        self.state = updater.state()["state"]

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        def made(**fields: Any) -> Drafts:
            self.drafts.append(Drafts(**fields))
            return self.drafts[-1]

        patch.setattr("train.unroll.Drafts", made)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl")


def test_weights_and_states_are_float32_and_products_are_not(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master weights, gradients, moments and losses in float32; the target's states, what the head makes of them and
    its logits' inputs in bfloat16. A bfloat16 weight would not move by a step of 1e-3 of itself."""
    found = Trained(data, torch.bfloat16, num_updates=2, patch=monkeypatch)
    assert found.compute is torch.bfloat16
    assert found.batch.taps.dtype is found.batch.last.dtype is torch.bfloat16
    assert found.batch.log_normalizer is not None
    assert found.batch.log_normalizer.dtype is torch.float32
    assert {one.dtype for one in found.parameters} == {torch.float32}
    assert set(found.gradients) == {torch.float32}
    moments = {value.dtype for values in found.state.values() for value in values.values()}
    assert moments == {torch.float32}
    assert found.loss_dtype is torch.float32
    assert {one.states.dtype for one in found.drafts} == {torch.bfloat16}
    assert {one.figures.loss.dtype for one in found.figures} == {torch.float32}
    assert {one.figures.overlap.dtype for one in found.figures} == {torch.float32}


def test_bfloat16_learns_as_float32_does(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of 12 steps within 4 %: what a product of bfloat16 numbers (3 significant digits) leaves of a loss that is
    a sum of a hundred rows; and both fall by a fifth at least."""
    exact, rounded = (
        Trained(data, dtype, num_updates=12, patch=monkeypatch).losses for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded == pytest.approx(exact, rel=0.04)
    assert exact[-1] < 0.8 * exact[0]
    assert rounded[-1] < 0.8 * rounded[0]
