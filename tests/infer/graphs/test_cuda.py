"""What only a GPU can show: real graphs, compiled kernels, and the bits of a real device. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from infer.drafters import NgramDrafter, TreeSettings
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.graphs.capture import SyncError, captured
from infer.graphs.rounds import StaticRound
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head
from tests.infer.helpers import sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(4, 40)), [4]]
TREE = TreeSettings(max_nodes=12, max_depth=4, branch=4, beam=4, adaptive=False)
PARAMS = [replace(sampling(0.8 * (i % 2)), seed=i, max_tokens=18 + 3 * i) for i in range(len(PROMPTS))]


def cuda_target(tiny_model: Callable[..., Any], dtype: torch.dtype) -> TargetModel:
    model = tiny_model("llama", vocab_size=48, max_position_embeddings=1024)
    return TargetModel.wrap(model.to("cuda", dtype))


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_emit_plain_tokens(variant: str, tiny_model: Callable[..., Any]) -> None:
    target = cuda_target(tiny_model, torch.float32)
    expected = answers(Engine(target, graphs=False))
    assert answers(Engine(target)) == expected
    assert answers(Engine(target, NgramDrafter(), tree=TREE)) == expected
    engine = Engine(target, head_drafter(tiny_head(variant, target), target), tree=TREE)
    assert answers(engine) == expected
    assert engine.num_captured


def test_bitwise_graphs_keep_every_bit(tiny_model: Callable[..., Any]) -> None:
    target = cuda_target(tiny_model, torch.bfloat16)
    settings: dict[str, Any] = {"exactness": "bitwise", "tree": TREE, "max_length": 128}
    expected = answers(Engine(target, **settings))
    drafter = head_drafter(tiny_head("eagle3", target), target)
    assert answers(Engine(target, drafter, **settings)) == expected
    assert answers(Engine(target, drafter, graphs=False, **settings)) == expected


def test_a_replay_computes_what_the_round_does(tiny_model: Callable[..., Any]) -> None:
    """To the bit, twice over: the same kernels on the same numbers."""
    target = cuda_target(tiny_model, torch.bfloat16)
    engine = Engine(target, tree=TREE)
    engine.generate(PROMPTS[:1], PARAMS[:1])
    assert engine._static is not None
    ((static, replay),) = engine._static._rounds.values()
    assert isinstance(static, StaticRound)
    found = []
    for compute in (static.compute, replay, replay):
        compute()
        found.append((static.read(), static.logits(0).clone()))
    assert found[0][0] == found[1][0] == found[2][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[1][1], found[2][1])


def test_a_server_captures_ahead(tiny_model: Callable[..., Any]) -> None:
    """With a head that has never run, whose tables are still on the host."""
    target = cuda_target(tiny_model, torch.float32)
    expected = answers(Engine(target, graphs=False))
    drafter = head_drafter(tiny_head("eagle3", target), target)
    engine = Engine(target, drafter, tree=TREE, max_requests=4, max_length=128)
    engine.reserve()
    assert engine.num_captured == 3
    assert answers(engine) == expected


def test_a_library_that_waits_is_refused() -> None:
    """Where no check saw it coming: the stream is as it was, and the next capture succeeds."""
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.zeros(1, device=device)
    before = torch.cuda.current_stream(device)

    def waiting() -> None:
        total.add_(1)
        torch.cuda.current_stream(device).synchronize()

    with pytest.raises(SyncError, match="no CUDA graph can hold"):
        captured(waiting, device)
    assert torch.cuda.current_stream(device) == before
    replay = captured(lambda: total.add_(1), device)
    count = float(total)
    replay()
    assert float(total) == count + 1
