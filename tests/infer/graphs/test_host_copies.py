"""Nothing of a round's numbers comes from the host, on a device that is not the host: PyTorch's "meta", which computes
shapes alone, stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.base import DraftHead, PathHead, TargetWeights
from infer.drafters.fused import fused_view
from infer.drafters.reading import head_cache
from infer.graphs.capture import SyncError
from infer.graphs.drafting import StaticDraft
from infer.graphs.rounds import StaticRound
from infer.graphs.shapes import RoundShape
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head

META = torch.device("meta")
SHAPE = RoundShape(batch=2, nodes=5, depth=3, context=64)


def target_elsewhere(model: Any) -> TargetModel:
    target = TargetModel.wrap(model, forward="eager")
    target.model.to(META)
    target.device = META
    return target


def head_elsewhere(variant: str, target: TargetModel) -> DraftHead:
    head, weights = tiny_head(variant, target), target.weights
    return head.to(META).bind(TargetWeights(embedding=weights.embedding.to(META), lm_head=weights.lm_head.to(META)))


def drafting_round(target: TargetModel, head: DraftHead) -> StaticRound:
    sizes: Any = head.config
    cache = None
    if not isinstance(head, PathHead) or head.has_prefix_layer:
        cache = head_cache(sizes, num_slots=2, num_columns=96, dtype=head.dtype, device=META)
    taps = head.config.taps
    pending = torch.zeros((2, 4, len(taps) * target.hidden_size), device=META)
    draft = StaticDraft(head, cache=cache, pending=pending)
    return StaticRound(target, target.new_cache(num_slots=2, num_columns=64), SHAPE, draft=draft, taps=taps)


@pytest.mark.parametrize("row_width", [None, 16], ids=["free", "fixed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_target_alone(kind: str, row_width: int | None, tiny_model: Callable[..., Any]) -> None:
    target = target_elsewhere(tiny_model(kind))
    StaticRound(target, target.new_cache(num_slots=2, num_columns=64), SHAPE, row_width=row_width).capture()


@pytest.mark.parametrize("view", [lambda head: head, fused_view], ids=["as it is", "fused"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("early_exit")])
def test_every_head(variant: str, view: Callable[[DraftHead], DraftHead], tiny_model: Callable[..., Any]) -> None:
    """From its very first forward on."""
    head = head_elsewhere(variant, TargetModel.wrap(tiny_model("llama"), forward="eager"))
    drafting_round(target_elsewhere(tiny_model("llama")), view(head)).capture()


def test_a_copy_in_every_round_is_seen(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(self: StaticDraft) -> torch.Tensor:
        return self.head.vocabulary.target_ids.to(META)

    monkeypatch.setattr(StaticDraft, "target_ids", property(copied, lambda self, given: None), raising=False)
    head = head_elsewhere("medusa", TargetModel.wrap(tiny_model("llama"), forward="eager"))
    with pytest.raises(SyncError, match="copies a tensor between host and device"):
        drafting_round(target_elsewhere(tiny_model("llama")), head).capture()
