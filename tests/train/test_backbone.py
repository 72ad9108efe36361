"""Training a target along with its head: what is trained, what stays as it is, and that the rest is told the truth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from configs.loading import dump_config, parse_config
from configs.schema import BackboneConfig, RunConfig
from heads.checkpoint import load_head, read_card
from heads.unroll import Batch
from infer.adapter import ADAPTER_FOLDER, Adapter
from infer.target import TargetModel
from tests.toy_tokenizer import toy_tokenizer
from tests.train.measuring import decode_acceptance
from tests.train.training_fixtures import NUM_LAYERS, Stopped, run, tiny_recipe, tiny_target
from train.backbone import AdaptedBackbone
from train.batch import pack_batch
from train.checkpoints import Checkpoints
from train.corpus.dataset import load_data
from train.features import OnlineFeatures
from train.reports.metrics import read_metrics
from train.trainer import Trainer
from train.world import World

pytestmark = pytest.mark.usefixtures("every_notice")

pytest.importorskip("peft")

STEPS = 12
JOINT = BackboneConfig(lora_rank=4, warmup=0.5, lr_factor=1.0)


def recipe(chats: Path, backbone: BackboneConfig = JOINT, *, kind: str = "medusa", **changes: Any) -> RunConfig:
    config = tiny_recipe(chats, head__type=kind, head__num_heads=3, head__taps=None, **changes)
    return replace(config, backbone=backbone)


def trainer_of(config: RunConfig, target: TargetModel, folder: Path) -> Trainer:
    data = load_data(config.data, target.tokenizer, seed=config.train.seed)
    checkpoints = Checkpoints(folder)
    return Trainer(config, target, data, checkpoints, World(), resumed=None, decode=None, notice=lambda text: None)


def weights_hash(target: TargetModel) -> str:
    digest = hashlib.sha256()
    for tensor in target.model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def assert_same_files(one: Path, other: Path, *names: str) -> None:
    for name in names:
        mine, theirs = load_file(one / name), load_file(other / name)
        assert mine.keys() == theirs.keys()
        assert not [key for key in mine if not torch.equal(mine[key], theirs[key])]


def batches_of(target: TargetModel, taps: Sequence[int], rows: Sequence[Any]) -> list[Batch]:
    """Batches of two rows, with the target's states."""
    source = OnlineFeatures(target, taps)
    batches = []
    for first in range(0, len(rows) - 1, 2):
        pair = rows[first : first + 2]
        batches.append(pack_batch(pair, source.get_many(pair), device="cpu", dtype=target.dtype))
    return batches


@pytest.fixture(scope="module")
def batch(target: TargetModel, chats: Path) -> Batch:
    rows = load_data(recipe(chats).data, target.tokenizer, seed=0).rows
    return batches_of(target, (2, NUM_LAYERS + 1), rows[:2])[0]


def make_backbone(target: TargetModel, settings: BackboneConfig = JOINT, *, shake: float = 0.0) -> AdaptedBackbone:
    """`shake`: how far the adapter is from its start, where it changes nothing."""
    backbone = AdaptedBackbone(target, settings, (2, NUM_LAYERS + 1), dtype=torch.float32, seed=0)
    chance = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in backbone.parameters:
            parameter.add_(shake * torch.randn(parameter.shape, generator=chance))
    return backbone


# The parts


def test_a_new_adapter_changes_nothing(target: TargetModel, batch: Batch) -> None:
    """Its states are the target's (two attention kernels in float32: rounding), and the served weights are its bits."""
    backbone = make_backbone(target)
    adapted, last = backbone.states(batch)
    torch.testing.assert_close(adapted.taps, batch.taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, batch.last, rtol=1e-4, atol=1e-4)
    assert adapted.log_normalizer is not None
    assert batch.log_normalizer is not None
    needed = ~batch.log_normalizer.isnan()  # before answers' tokens
    torch.testing.assert_close(adapted.log_normalizer[needed], batch.log_normalizer[needed], rtol=1e-4, atol=1e-4)
    assert adapted.taps.requires_grad
    assert last.requires_grad
    assert not adapted.last.requires_grad  # the head's teacher
    assert not adapted.log_normalizer.requires_grad
    served = backbone.served(0)
    assert served.fingerprint == target.fingerprint
    assert weights_hash(served) == weights_hash(target)


def test_rows_of_a_batch_do_not_see_each_other(target: TargetModel, batch: Batch) -> None:
    """The states of a row are those that it has alone."""
    backbone = make_backbone(target, shake=0.1)
    together = backbone.states(batch)[0].taps.split(list(batch.lengths))[1]
    start, stop = batch.lengths[0], sum(batch.lengths)
    alone = replace(
        batch,
        lengths=batch.lengths[1:],
        **{name: getattr(batch, name)[start:stop] for name in ("token_ids", "loss_mask", "taps", "last")},
    )
    assert torch.equal(backbone.states(alone)[0].taps, together)


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_language_loss_and_its_gradient(target: TargetModel, batch: Batch, objective: Any) -> None:
    """Against the loss written out over whole logits, with autograd (float32 sums in another order). The sequences are
    answers from their first token on, and the end of the one before it in the batch is no part of it."""
    backbone = make_backbone(target, replace(JOINT, objective=objective), shake=0.1)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, backbone.parameters))

    loss = backbone.language_loss(batch, backbone.states(batch)[1])
    rows = [
        start + place
        for start, length in ((0, batch.lengths[0]), (batch.lengths[0], batch.lengths[1]))
        for place in range(length - 1)
    ]
    logits = backbone.states(batch)[1][rows] @ target.lm_head_weight.T
    if objective == "kl":
        original = (batch.last[rows] @ target.lm_head_weight.T).log_softmax(-1)
        expected = functional.kl_div(logits.log_softmax(-1), original, log_target=True, reduction="sum")
        assert float(expected.detach()) > 0.1  # the adapter is far from its start, or this would compare zeros
    else:
        expected = functional.cross_entropy(logits, batch.token_ids[[row + 1 for row in rows]], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for mine, reference in zip(gradients(loss), gradients(expected), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)


def test_drift_is_what_it_says(target: TargetModel, chats: Path) -> None:
    """Nothing between a target and itself; else the figures, written out over whole logits, of the merged target."""
    rows = load_data(recipe(chats).data, target.tokenizer, seed=0).rows[:4]
    backbone = make_backbone(target, shake=0.1)
    taps = (2, NUM_LAYERS + 1)
    before, after = batches_of(target, taps, rows), batches_of(backbone.served(1), taps, rows)
    same = backbone.drift(before, before)
    assert (same["kl"], same["argmax_changed"]) == (pytest.approx(0.0, abs=1e-6), 0.0)
    assert same["perplexity"] == same["original_perplexity"]
    drift = backbone.drift(before, after)
    divergence, changed, surprise, count = 0.0, 0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row.token_ids])
        with torch.no_grad(), target.stock() as original, backbone.served(1).stock() as adapted:
            old, new = (model(input_ids=ids).logits[0].log_softmax(-1) for model in (original, adapted))
        for place in range(len(row.token_ids) - 1):
            if row.loss_mask[place + 1]:
                divergence += float((old[place].exp() * (old[place] - new[place])).sum())
                changed += int(old[place].argmax() != new[place].argmax())
                surprise -= float(new[place, row.token_ids[place + 1]])
                count += 1
    assert drift["positions"] == count
    assert drift["kl"] == pytest.approx(divergence / count, rel=1e-3)
    assert drift["argmax_changed"] == pytest.approx(changed / count)
    assert 0 < drift["argmax_changed"] < 1
    assert drift["perplexity"] == pytest.approx(float(torch.tensor(surprise / count).exp()), rel=1e-3)
    assert drift["original_perplexity"] == same["perplexity"]


def test_served_weights_follow_the_adapter(target: TargetModel) -> None:
    """One served target, renewed after each step, whose packed forward is that of the target with its adapter."""
    backbone = make_backbone(target)
    first = backbone.served(0).fingerprint
    with torch.no_grad():
        for parameter in backbone.parameters:
            parameter.add_(0.05)
    assert backbone.served(0).fingerprint == first
    served = backbone.served(1)
    assert served.fingerprint != first
    tokens = torch.tensor([5, 9, 3, 77, 30])
    one = Batch(
        token_ids=tokens,
        loss_mask=torch.ones(5, dtype=torch.bool),
        lengths=(5,),
        taps=torch.zeros(5, 1),
        last=torch.zeros(5, 1),
        log_normalizer=torch.zeros(5),
    )
    (features,) = served.features([tokens.tolist()], ())
    torch.testing.assert_close(backbone.states(one)[1], features.last, rtol=1e-4, atol=1e-4)


# Whole runs


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_joint_run_trains_head_and_adapter_and_nothing_else(
    target: TargetModel, chats: Path, tmp_path: Path, kind: str
) -> None:
    """Both change; the base model's weights are bit for bit what they were, and in none of the files."""
    config = recipe(chats, kind=kind)
    trainer = trainer_of(config, target, tmp_path / "fresh")
    assert trainer.backbone is not None
    start = [parameter.detach().clone() for parameter in (*trainer.head.parameters(), *trainer.backbone.parameters)]
    before = weights_hash(target)
    run(config, tmp_path, target)
    assert weights_hash(target) == before
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.model.model.layers[0].self_attn.q_proj.__class__ is torch.nn.Linear
    folder = tmp_path / "tiny" / "last"
    adapter = Adapter.of_head(folder)
    assert adapter is not None
    assert len(adapter.factors) == 7 * NUM_LAYERS  # all linear layers
    trained = [*load_head(folder)[0].parameters(), *(one for pair in adapter.factors.values() for one in pair)]
    assert len(trained) == len(start)
    assert not [old.shape for old, new in zip(start, trained, strict=True) if torch.equal(old, new)]
    state = torch.load(folder / "trainer.pt", weights_only=True)["optimizer"]
    assert len(state["state"]) == len(trained)
    files = sum(path.stat().st_size for path in (folder / ADAPTER_FOLDER).iterdir())
    assert files < sum(up.nbytes + down.nbytes for down, up in adapter.factors.values()) + 20_000


def test_the_warm_up_is_a_frozen_run(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Until the joint stage begins the head takes the very steps that it takes without an adapter, and the served
    target is the base model: bit for bit."""
    run(recipe(chats, BackboneConfig(), name="frozen"), tmp_path, target)
    run(recipe(chats, replace(JOINT, warmup=0.95), name="warm"), tmp_path, target)
    frozen, warm = tmp_path / "frozen" / "last", tmp_path / "warm" / "last"
    assert_same_files(frozen, warm, "model.safetensors")
    assert not (frozen / ADAPTER_FOLDER).exists()
    assert read_card(warm).target == read_card(frozen).target
    cards = [read_card(tmp_path / name / "best").acceptance for name in ("frozen", "warm")]
    assert cards[0]["acceptance"] == cards[1]["acceptance"]
    assert "drift" not in cards[0]
    assert cards[1]["drift"]["argmax_changed"] == 0
    losses = [[r["loss"] for r in read_metrics(tmp_path / n) if r["event"] == "train"] for n in ("frozen", "warm")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stop", [2, 6, 9])  # in the warm-up, at its end, after it
def test_resumed_joint_run_equals_an_uninterrupted_one(
    target: TargetModel, chats: Path, tmp_path: Path, stop: int
) -> None:
    """Head, adapter, optimiser state of both, curves and cards, bit for bit."""
    config = recipe(chats, train__save_every=1)
    run(config, tmp_path / "whole", target)
    with pytest.raises(Stopped):
        run(config, tmp_path / "parts", target, stop_at=stop + 1)
    notices: list[str] = []
    run(config, tmp_path / "parts", target, resume=True, notices=notices)
    assert any(notice.startswith(f"resumed at step {stop}") for notice in notices)
    whole, parts = tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny"
    for name in ("last", "best"):
        assert_same_files(
            whole / name, parts / name, "model.safetensors", f"{ADAPTER_FOLDER}/adapter_model.safetensors"
        )
        assert read_card(whole / name).target == read_card(parts / name).target
    states = [torch.load(folder / "last" / "trainer.pt", weights_only=True)["optimizer"] for folder in (whole, parts)]
    assert [group["lr"] for group in states[0]["param_groups"]] == [group["lr"] for group in states[1]["param_groups"]]
    for one, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    names = ("step", "lr", "loss", "backbone_loss", "backbone_lr")
    curves = [
        [[r.get(name) for name in names] for r in read_metrics(folder) if r["event"] == "train"]
        for folder in (whole, parts)
    ]
    assert curves[0] == curves[1]
    assert [values[3] is not None for values in curves[0]] == [step >= STEPS // 2 for step in range(STEPS)]


def test_a_larger_budget_does_not_bring_the_warm_up_back(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Half-way through 4 steps the adapter begins; at 4 of 40 the warm-up would not be over by the budget alone, and
    the head would be taught by a target that no longer serves it.
    """
    run(recipe(chats, train__steps=4, optim__lr=1e-2), tmp_path, target)
    run(recipe(chats, train__steps=40, train__eval_every=40, optim__lr=1e-2), tmp_path, target, resume=True)
    steps = [one for one in read_metrics(tmp_path / "tiny") if one["event"] == "train"]
    assert [one["step"] for one in steps if "backbone_loss" not in one] == [1, 2]


def test_the_card_tells_of_the_target_that_is_served(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Base model and adapter, loaded from disk, are the target that the run evaluated: same fingerprint, and the same
    acceptance of the same head. The card says what was done, and how far the target went."""
    base = tmp_path / "models" / "tiny"
    target.twin(own_layers=True).save_pretrained(base)
    toy_tokenizer().save_pretrained(base)
    target = TargetModel.load(base, dtype="float32")
    config = recipe(chats, replace(JOINT, warmup=0.0))
    run(config, tmp_path, target)
    folder = tmp_path / "tiny" / "best"
    card = read_card(folder)
    assert card.target.name == "tiny"
    assert card.target.fingerprint != target.fingerprint
    facts = card.training["backbone"]
    assert facts["base_fingerprint"] == target.fingerprint
    assert "lossless with respect to the adapted target" in facts["promise"]
    drift = card.acceptance["drift"]
    assert drift["kl"] > 0
    assert {"argmax_changed", "perplexity", "original_perplexity", "positions"} < drift.keys()
    served = TargetModel.load(base, dtype="float32", adapter=Adapter.of_head(folder))
    assert served.fingerprint == card.target.fingerprint
    head, _ = load_head(folder, served.weights)
    data = load_data(config.data, target.tokenizer, seed=config.train.seed)
    again = decode_acceptance(served, head, data.prompts, config.eval)
    assert json.loads(json.dumps(again.to_dict())) == card.acceptance["acceptance"]
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["best"]["drift"] == drift
    assert str(tmp_path) not in (folder / ADAPTER_FOLDER / "adapter_config.json").read_text()


def test_the_language_loss_holds_the_target(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """With more weight on it the target goes less far; without any it goes where the head wants it."""
    reached = []
    for name, weight in (("free", 0.0), ("held", 1000.0)):
        settings = replace(JOINT, warmup=0.0, loss_weight=weight)
        config = recipe(chats, settings, name=name, train__steps=30, optim__lr=3e-3)
        run(config, tmp_path, target)
        *_, last = (r for r in read_metrics(tmp_path / name) if r["event"] == "evaluation")
        reached.append(last["drift"]["kl"])
    assert reached[1] < reached[0] / 2


def test_a_joint_run_can_go_on_from_a_head(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """From one of a frozen target, and from one with an adapter, which comes along; what would not fit is refused."""
    run(recipe(chats, BackboneConfig(), name="first"), tmp_path, target)
    start = {"head__init_from": str(tmp_path / "first" / "last"), "train__steps": 1, "optim__lr": 1e-12}
    joint = replace(JOINT, warmup=0.0)
    run(recipe(chats, joint, name="second", **start), tmp_path, target)
    assert read_card(tmp_path / "second" / "last").training["backbone"]["base_fingerprint"] == target.fingerprint
    run(recipe(chats, joint, name="third", optim__lr=1e-2), tmp_path, target)
    third = tmp_path / "third" / "last"
    start["head__init_from"] = str(third)
    run(recipe(chats, joint, name="fourth", **start), tmp_path, target)
    adapters = [Adapter.of_head(folder) for folder in (third, tmp_path / "fourth" / "last")]
    assert adapters[0] is not None
    assert adapters[1] is not None
    for layer, pair in adapters[0].factors.items():
        for old, new in zip(pair, adapters[1].factors[layer], strict=True):
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match="trained along with its target: go on so"):
        run(recipe(chats, BackboneConfig(), name="x", **start), tmp_path, target)
    with pytest.raises(ValueError, match=r"set backbone\.warmup=0"):
        run(recipe(chats, JOINT, name="x", **start), tmp_path, target)
    with pytest.raises(ValueError, match="the saved adapter is not the one"):
        run(recipe(chats, replace(joint, lora_modules=("q_proj",)), name="x", **start), tmp_path, target)
    with pytest.raises(ValueError, match="other weights"):
        run(recipe(chats, joint, name="x", **start), tmp_path, tiny_target(seed=1))


def test_what_cannot_be_trained_jointly_is_refused(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    plain = dump_config(recipe(chats, BackboneConfig()))
    for overrides, message in (
        (["head.type=eagle3", "head.num_heads=null", "backbone.lora_rank=4"], "eagle3 is trained on a frozen target"),
        (["backbone.lora_rank=0"], "at least 1"),
        (["backbone.lora_rank=4", "backbone.warmup=1"], "between 0.0 and 0.95"),
        (["backbone.lora_alpha=4"], "lora_rank is null"),
        (["backbone.lora_rank=4", "backbone.lora_modules=[]"], "lora_modules is empty"),
        (["backbone.lora_rank=4", "backbone.objective=mse"], "one of kl, ce"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_config(plain, overrides)
    with pytest.raises(ValueError, match=r"names \['lm_head'\]; the layers of tiny have \['down_proj'"):
        run(recipe(chats, replace(JOINT, lora_modules=("q_proj", "lm_head"))), tmp_path, target)
    run(recipe(chats), tmp_path, target)
    with pytest.raises(ValueError, match=r"other settings \(backbone.lora_rank\)"):
        run(recipe(chats, replace(JOINT, lora_rank=2)), tmp_path, target, resume=True)
    for state in (tmp_path / "tiny").glob("**/trainer.pt"):
        (state.parent / ADAPTER_FOLDER / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no state in .* is whole: .*adapter_model\.safetensors is missing"):
        run(recipe(chats), tmp_path, target, resume=True)
