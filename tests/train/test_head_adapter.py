"""A LoRA adapter on a head: in every family, beside the head's own weights; saved, shipped and gone on with."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart
from configs.schema import HeadSettings, RunConfig
from heads.base import DraftHead, TargetWeights
from heads.checkpoint import HeadCard, TargetReference, check_relative, load_head, read_card, save_head, update_card
from heads.lora import (
    HEAD_ADAPTER_FOLDER,
    LORA,
    HeadBase,
    adaptable_layers,
    apply_head_adapter,
    head_fingerprint,
    import_head_adapter,
    linear_layer,
    read_head_adapter,
)
from heads.medusa import MedusaConfig, MedusaHead
from heads.registry import family_of_head
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head
from tests.train.toy_objective import Course, make_batch, make_objective
from tests.train.training_fixtures import Stopped, tiny_recipe, tiny_target, write_chats
from tests.train.two_processes import Processes
from train import trainer
from train.head_adapter import HeadAdapter, LowRankUpdate, adapt_head
from train.unroll import Teacher, plan_rows, unrolled_loss
from train.updater import make_updater
from train.world import World

RANK, DRAFT_VOCABULARY = 4, 64


@pytest.fixture(scope="module")
def base_target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """The base target after a fine-tuning: every weight moved a little."""
    tuned = tiny_target()
    with torch.no_grad():
        for number, parameter in enumerate(tuned.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.1 * parameter.std() * noise)
    return tuned


def trained_head(folder: Path, variant: str, base_target: TargetModel) -> Path:
    """As if a run had trained it for the base target."""
    head = tiny_head(variant, base_target, draft_vocab_size=DRAFT_VOCABULARY)
    card = HeadCard(target=base_target.reference, family=family_of_head(head), training={"run": "first"})
    return save_head(folder / "base", head, card)


def recipe(folder: Path, base: Path, **changes: Any) -> RunConfig:
    config = tiny_recipe(folder / "none.jsonl")
    settings = HeadSettings(init_from=str(base), lora_rank=RANK, **changes)
    return replace(config, head=settings)


def start(config: RunConfig, target: TargetModel, *, resumed: Path | None = None) -> HeadAdapter:
    """What the trainer does."""
    assert config.head.init_from is not None
    head, card = load_head(config.head.init_from)
    check_relative(card, target.reference)
    adapter = adapt_head(config, head.bind(target.weights).train(), resumed=resumed)
    assert adapter is not None
    return adapter


def batch_of(target: TargetModel, head: DraftHead, *, seed: int = 0) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, target.vocab_size, (length,), generator=chance).tolist() for length in (14, 9)]
    features = target.features(rows, head.config.taps)
    last = torch.cat([one.last for one in features]).clone()
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row]),
        loss_mask=torch.tensor([place >= 3 for row in rows for place in range(len(row))]),
        lengths=tuple(len(row) for row in rows),
        taps=torch.cat([one.taps for one in features]).clone(),
        last=last,
        log_normalizer=(last @ target.lm_head_weight.T).logsumexp(-1),
    )


def loss_of(head: DraftHead, batch: Batch, target: TargetModel) -> torch.Tensor:
    teacher = Teacher(weight=target.lm_head_weight.index_select(0, head.target_ids))
    plan = plan_rows(batch.loss_mask, batch.lengths, head.num_depths or 2)
    return unrolled_loss(head, batch, plan, teacher, loss="ce", step_weights=[0.05] * len(plan))[0]


def train(
    adapter: HeadAdapter, target: TargetModel, *, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(adapter.parameters, lr=0.02)
    batch = batch_of(target, adapter.head)
    for _ in range(steps):
        loss_of(adapter.head, batch, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save(adapter: HeadAdapter, folder: Path, target: TargetModel) -> Path:
    """What the trainer does."""
    head = adapter.merged()
    card = HeadCard(
        target=target.reference,
        family=family_of_head(head),
        training={"run": "second", LORA: adapter.facts()},
        acceptance={"accepted_length": 1.5},
    )
    return save_head(folder, head, card, add_files=adapter.write)


def answers(head: DraftHead, batch: Batch) -> list[torch.Tensor]:
    """Draft logits at every row and depth."""
    plan = plan_rows(batch.loss_mask, batch.lengths, head.num_depths or 2)
    with torch.no_grad():
        return [one.logits() for one in head.unroll(batch, plan)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_from_training_to_the_merged_head(
    variant: str, base_target: TargetModel, target: TargetModel, tmp_path: Path
) -> None:
    """The adapter begins as the base, learns in all its parts, and changes no weight but its own; the merged head is
    the one in training (to float32 rounding), and is read back bit for bit, from its own folder as well as from the
    base and the adapter alone. (Adapters of others' making once reached the layers, but not those whose weight is
    read directly, as a loss reads an LM head's.)"""
    base_folder = trained_head(tmp_path, variant, base_target)
    config = recipe(tmp_path, base_folder, type=VARIANTS[variant][0])
    adapter = start(config, target)
    batch = batch_of(target, adapter.head)
    base = load_head(base_folder, target.weights)[0]
    for one, other in zip(answers(adapter.head, batch), answers(base, batch), strict=True):
        assert torch.equal(one, other)
    first = loss_of(adapter.head, batch, target).item()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    train(adapter, target, steps=12)
    assert loss_of(adapter.head, batch, target).item() < first
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    for name, module in adapter.head.named_modules():
        if isinstance(module, LowRankUpdate):
            assert module.lora_B.any(), name
    merged = adapter.merged()
    assert type(merged) is type(base)
    assert merged.state_dict().keys() == base.state_dict().keys()
    for one, other in zip(answers(adapter.head, batch), answers(merged, batch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    folder = save(adapter, tmp_path / "best", target)
    loaded, card = load_head(folder, target.weights)
    shipped = tmp_path / "shipped"
    shutil.copytree(folder / HEAD_ADAPTER_FOLDER, shipped)
    rebuilt = apply_head_adapter(shipped, base_folder, target.weights)
    for name, tensor in merged.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert torch.equal(rebuilt.state_dict()[name], tensor)
    for one, two, three in zip(*(answers(head, batch) for head in (merged, loaded, rebuilt)), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    target.check_card(card)
    files = sum(path.stat().st_size for path in shipped.iterdir())
    assert files < 4 * sum(parameter.numel() for parameter in adapter.parameters) + 30_000


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_matrix_of_a_head_is_adapted(variant: str, base_target: TargetModel) -> None:
    """A family with a weight that is no linear layer's would train without it, unnoticed. Tables, of which a token
    reads one row, stay what they are, and so does P-EAGLE's one learned state."""
    head = tiny_head(variant, base_target, draft_vocab_size=DRAFT_VOCABULARY)
    tables = {id(module.weight) for module in head.modules() if isinstance(module, torch.nn.Embedding)}
    vectors = {id(parameter) for parameter in head.parameters() if parameter.numel() == parameter.shape[-1]}
    matrices = {id(parameter) for parameter in head.parameters()} - tables - vectors
    assert matrices == {id(layer.weight) for _, layer in adaptable_layers(head)}


@pytest.mark.parametrize("variant", ["eagle3", "medusa", "hydra"])
def test_peft_reads_the_adapter(variant: str, base_target: TargetModel, target: TargetModel, tmp_path: Path) -> None:
    """What a user of peft makes of the base and the adapter: the same weights, to float32 rounding."""
    peft = pytest.importorskip("peft")
    base_folder = trained_head(tmp_path, variant, base_target)
    adapter = start(recipe(tmp_path, base_folder, type=variant, lora_alpha=6), target)
    train(adapter, target, steps=3)
    folder = save(adapter, tmp_path / "best", target)
    base = load_head(base_folder, target.weights)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)  # peft wonders about a model without a config
        merged = peft.PeftModel.from_pretrained(base, folder / HEAD_ADAPTER_FOLDER).merge_and_unload()
    expected = adapter.merged().state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_run_that_goes_on_is_one_that_was_never_stopped(
    base_target: TargetModel, target: TargetModel, tmp_path: Path
) -> None:
    """The same names, counts and optimiser state, bit for bit the same weights after further steps. (Reloaded adapters
    once came back frozen, or without what was trained.)"""
    config = recipe(tmp_path, trained_head(tmp_path, "eagle3", base_target))
    whole = start(config, target)
    train(whole, target, steps=6)
    first = start(config, target)
    optimizer = train(first, target, steps=3)
    last = save(first, tmp_path / "last", target)
    second = start(config, target, resumed=last)
    assert [p.shape for p in second.parameters] == [p.shape for p in first.parameters]
    assert all(parameter.requires_grad for parameter in second.parameters)
    trainable = [[n for n, p in one.head.named_parameters() if p.requires_grad] for one in (first, second)]
    assert trainable[0] == trainable[1]
    assert len(trainable[1]) == len(second.parameters) == 2 * len(list(adaptable_layers(second.merged())))
    again = torch.optim.AdamW(second.parameters, lr=0.02)
    again.load_state_dict(optimizer.state_dict())
    train(second, target, steps=3, optimizer=again)
    for one, other in zip(whole.parameters, second.parameters, strict=True):
        assert torch.equal(one, other)
    assert second.facts() == first.facts()


def test_another_shape_or_base_does_not_go_on(base_target: TargetModel, target: TargetModel, tmp_path: Path) -> None:
    base = trained_head(tmp_path, "eagle3", base_target)
    last = save(start(recipe(tmp_path, base), target), tmp_path / "last", target)
    other_rank = replace(recipe(tmp_path, base), head=HeadSettings(init_from=str(base), lora_rank=RANK + 1))
    with pytest.raises(ValueError, match=r"not the one that head.lora_rank=5 describes: they differ at 9 of 9 layers"):
        start(other_rank, target, resumed=last)
    head, card = load_head(base)
    with torch.no_grad():
        head.norm.weight[0] += 1e-4  # type: ignore[union-attr,operator,index]
    save_head(tmp_path / "base", head, card)
    with pytest.raises(ValueError, match=r"trained on the head first of tiny \(\w+\), but .*base has other weights"):
        start(recipe(tmp_path, base), target, resumed=last)
    with pytest.raises(ValueError, match="has other weights or another draft vocabulary"):
        import_head_adapter(last / HEAD_ADAPTER_FOLDER, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_vocabulary_map_is_another_base(base_target: TargetModel, target: TargetModel, tmp_path: Path) -> None:
    """The same weights over other tokens (pitfall: a draft adapter trained against another token map)."""
    base = trained_head(tmp_path, "eagle3", base_target)
    last = save(start(recipe(tmp_path, base), target), tmp_path / "last", target)
    head, card = load_head(base)
    ids = head.vocabulary.target_ids.clone()
    ids[-1] += 1
    moved = DraftVocabulary(target_ids=ids, vocab_size=target.vocab_size, provenance=head.vocabulary.provenance)
    twin = type(head)(head.config, moved)
    twin.load_state_dict({**head.state_dict(), **twin.vocabulary_buffers(moved)})
    assert head_fingerprint(twin) != head_fingerprint(head)
    save_head(tmp_path / "moved", twin, card)
    with pytest.raises(ValueError, match="another draft vocabulary"):
        import_head_adapter(last, tmp_path / "moved", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "with hidden size 48, .* has 32"),
        ({"vocab_size": 300}, "with vocabulary 300"),
        ({"num_layers": 5}, "with number of layers 5"),
        ({"vocabulary_hash": "x"}, "has other tokens or other ids"),
        ({"vocabulary_hash": "", "tokenizer_hash": "x"}, "has other tokens or other ids"),
        ({"tokenizer_hash": "another template"}, None),
    ],
)
def test_the_target_may_be_a_fine_tuned_one_and_no_other(
    target: TargetModel, base_target: TargetModel, change: dict[str, Any], message: str | None
) -> None:
    """The same sizes, and the same tokens; a chat template may differ, as fine-tuning changes it."""
    card = HeadCard(target=replace(base_target.reference, **change))
    if message is None:
        check_relative(card, target.reference)
        return
    with pytest.raises(ValueError, match=message):
        check_relative(card, target.reference)


def test_under_autocast_small_updates_are_not_lost(base_target: TargetModel) -> None:
    """The sum of weight and update is made in float32: one rounding to bfloat16, as the merged weight has."""
    head = tiny_head("eagle3", base_target)
    adapter = HeadAdapter(head, HeadBase(name="b", fingerprint="f", target="t", target_fingerprint="u"), rank=2)
    layer = linear_layer(head, "midlayer.mlp.up_proj")
    with torch.no_grad():
        for update in head.modules():
            if isinstance(update, LowRankUpdate):
                update.lora_B.normal_(std=1e-4)
        merged = linear_layer(adapter.merged(), "midlayer.mlp.up_proj").weight
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = layer.weight
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, merged, rtol=0, atol=1e-6)


def test_what_a_gradient_engine_does_to_the_network_is_not_merged(base_target: TargetModel) -> None:
    """One that rounds the network's weights to bfloat16 leaves the base that is merged into as it was."""
    head = tiny_head("eagle3", base_target)
    before = copy.deepcopy(head.state_dict())
    adapter = HeadAdapter(head, HeadBase(name="b", fingerprint="f", target="t", target_fingerprint="u"), rank=2)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16()
    for name, tensor in adapter.merged().state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.fixture
def run(base_target: TargetModel, target: TargetModel, tmp_path: Path) -> Path:
    """A finished run: tmp_path/base and tmp_path/best."""
    adapter = start(recipe(tmp_path, trained_head(tmp_path, "medusa", base_target), type="medusa"), target)
    train(adapter, target, steps=2)
    return save(adapter, tmp_path / "best", target)


def test_import_makes_the_head_again(
    run: Path, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headstart import ADAPTER --base HEAD`: bit for bit, with card and adapter; nothing else is taken for one."""
    shipped, base, out = run / HEAD_ADAPTER_FOLDER, tmp_path / "base", tmp_path / "out"
    assert headstart.main(["import", str(shipped), "--base", str(base), "--out", str(out)]) == 0
    assert "with the adapter merged in, for tiny" in capsys.readouterr().err
    one, two = load_head(run)[0].state_dict(), load_head(out)[0].state_dict()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert read_card(out) == read_card(run)
    assert read_head_adapter(out)[2] == read_head_adapter(run)[2]
    for command, message in (
        (["import", str(shipped), "--base", str(base), "--out", str(out)], "exists"),
        (["import", str(shipped), "--out", str(tmp_path / "x")], "give the head that it was trained on (--base)"),
        (["import", str(shipped), "--target", "t", "--out", str(tmp_path / "x")], "(--base)"),
        (["import", str(base), "--out", str(tmp_path / "x")], "give it with --target"),
        (["import", str(base), "--base", str(base), "--out", str(tmp_path / "x")], "does not say which head"),
        (["eval", str(shipped)], "headstart import"),
    ):
        assert headstart.main(command) != 0
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def break_card(folder: Path) -> None:
    card = read_card(folder)
    update_card(folder, training={key: value for key, value in card.training.items() if key != LORA})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_card, "does not say which head its adapter is for"),
        (lambda folder: (folder / "headstart.json").unlink(), "is not the adapter of a head"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 9), "damaged or truncated"),
    ],
)
def test_a_damaged_adapter_is_refused(run: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(run / HEAD_ADAPTER_FOLDER, shipped)
    damage(shipped)
    with pytest.raises(ValueError, match=message):
        import_head_adapter(shipped, tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_keeps_its_targets_lm_head_is_given_the_new_one(tmp_path: Path) -> None:
    """Medusa heads of the layout without LM heads save the target's rows: those of the fine-tuned target's."""
    lent = [TargetWeights(embedding=torch.randn(32, 8), lm_head=torch.randn(32, 8)) for _ in range(2)]
    config = MedusaConfig(hidden_size=8, vocab_size=32, draft_vocab_size=32, taps=(3,), original_lm_head=True)
    head = MedusaHead(config, DraftVocabulary.full(32)).bind(lent[0])
    reference = TargetReference(name="t", fingerprint="f", num_layers=2, hidden_size=8, vocab_size=32)
    card = HeadCard(target=reference, family="medusa")
    save_head(tmp_path / "base", head, card)
    base = HeadBase.of(tmp_path / "base", head, card)
    adapter = HeadAdapter(load_head(tmp_path / "base")[0].bind(lent[1]), base, rank=2)
    merged = replace(card, training={LORA: adapter.facts()})
    best = save_head(tmp_path / "best", adapter.merged(), merged, add_files=adapter.write)
    with pytest.raises(ValueError, match=r"keeps a copy of its target's lm_heads\.0\.weight: give the target"):
        apply_head_adapter(best, tmp_path / "base", None)
    rebuilt = apply_head_adapter(best, tmp_path / "base", lent[1])
    assert torch.equal(rebuilt.state_dict()["lm_heads.0.weight"], lent[1].lm_head)
    assert torch.equal(load_head(best)[0].state_dict()["lm_heads.0.weight"], lent[1].lm_head)


def test_the_plan_says_what_is_trained(base_target: TargetModel) -> None:
    head = tiny_head("eagle3", base_target)
    own = sum(parameter.numel() for parameter in head.parameters())
    base = HeadBase(name="first", fingerprint="f", target="tiny", target_fingerprint="u")
    adapter = HeadAdapter(head, base, rank=2)
    assert f"the head's own {own / 1e6:.1f}M stay" in adapter.describe()
    assert "rank 2 on 9 layers of the head first of tiny" in adapter.describe()
    assert adapter.facts()["base"]["fingerprint"] == "f"
    assert adapter.facts()["num_parameters"] == sum(parameter.numel() for parameter in adapter.parameters)


def test_without_a_rank_there_is_no_adapter(base_target: TargetModel, tmp_path: Path) -> None:
    head = tiny_head("eagle3", base_target)
    assert adapt_head(tiny_recipe(tmp_path / "none.jsonl"), head) is None
    assert all(parameter.requires_grad for parameter in head.parameters())


# Shared out among processes, and in the trainer's hands


def course(stage: int | None) -> dict[str, torch.Tensor]:
    """Four steps with an adapter in this process's share of a world; the merged weights."""
    world = World.from_environment()
    objective = make_objective()
    base = HeadBase(name="b", fingerprint="f", target="t", target_fingerprint="u")
    adapter = HeadAdapter(objective.head, base, rank=2, seed=world.rank)  # the main process's start is everyone's
    updater = make_updater(Course(stage=stage).recipe(), objective, [adapter.parameters], world, torch.device("cpu"))
    for number in range(4):
        batches = [make_batch(10 * number + place, answer=7) for place in range(4)]
        own = batches[world.rank :: world.size]
        for place, batch in enumerate(own, start=1):
            plan = plan_rows(batch.loss_mask, batch.lengths, 2)
            loss, _ = updater.loss(batch, plan, [0.05, 0.05])
            updater.backward(loss, is_last=place == len(own))
        updater.update([1e-3])
    with updater.whole():
        merged = adapter.merged().state_dict()
        return {name: tensor.clone() for name, tensor in merged.items()}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_processes_and_every_stage_train_the_same_adapter() -> None:
    """To float32 rounding, which AdamW's first steps magnify where a gradient is near zero; and it learns."""
    expected, before = course(None), make_objective().head.state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in expected.items())
    with Processes(2) as two:
        for stage in (None, 0, 1, 2, 3):
            for found in two.run(course, stage)[:1]:
                for name, tensor in found.items():
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-5)


@pytest.fixture
def files(base_target: TargetModel, tmp_path: Path) -> tuple[Path, Path]:
    """Conversations, and a head of the base target."""
    return write_chats(tmp_path / "chats.jsonl"), trained_head(tmp_path, "eagle3", base_target)


def trainer_recipe(files: tuple[Path, Path], **changes: Any) -> RunConfig:
    head = {"head__init_from": str(files[1]), "head__lora_rank": RANK, "head__taps": None}
    return tiny_recipe(files[0], **{**head, **changes})


@pytest.mark.usefixtures("every_notice")
def test_a_run_adapts_a_head_and_resumes_bit_for_bit(
    files: tuple[Path, Path], target: TargetModel, tmp_path: Path
) -> None:
    """From the recipe to a head that decodes: the target is untouched, best/ is an ordinary head of the new target, the
    few MB beside it make it again, and a run stopped half-way ends with the same bits."""
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    config, said = trainer_recipe(files, train__save_every=1), list[str]()

    def stopping(text: str) -> None:
        if text.startswith("step 6 "):
            raise Stopped

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = trainer.train(config, runs_folder=whole, target=target, notice=said.append)
    assert summary["status"] == "finished"
    assert any("a LoRA adapter of rank 4 on 9 layers of the head first of tiny" in line for line in said)
    with pytest.raises(Stopped):
        trainer.train(config, runs_folder=parts, target=target, notice=stopping)
    trainer.train(config, runs_folder=parts, target=target, resume=True, notice=said.append)
    assert any(line.startswith("resumed at step") for line in said)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    places = [folder / config.name / "last" for folder in (whole, parts)]
    one, other = (load_head(place)[0].state_dict() for place in places)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    states = [torch.load(place / "trainer.pt", weights_only=True)["optimizer"]["state"] for place in places]
    assert len(states[0]) == 2 * 9
    for key, moments in states[0].items():
        assert all(torch.equal(tensor, states[1][key][name]) for name, tensor in moments.items())
    best = whole / config.name / "best"
    head, card = load_head(best, target.weights)
    target.check_card(card)
    assert card.training[LORA]["base"]["name"] == "first"
    rebuilt = apply_head_adapter(best / HEAD_ADAPTER_FOLDER, files[1], target.weights).state_dict()
    assert all(torch.equal(tensor, rebuilt[name]) for name, tensor in head.state_dict().items())


@pytest.mark.usefixtures("every_notice")
def test_a_recipe_adapts_heads_of_the_same_model_alone(
    files: tuple[Path, Path], target: TargetModel, tmp_path: Path
) -> None:
    """Without a rank the target must be the head's own; with one, another version of it, with the same tokens."""
    with pytest.raises(ValueError, match="has other weights or another tokenizer"):
        trainer.train(trainer_recipe(files, head__lora_rank=None), runs_folder=tmp_path / "a", target=target)
    card = json.loads((files[1] / "headstart.json").read_text())
    card["target"]["vocabulary_hash"] = "another"
    (files[1] / "headstart.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match="has other tokens or other ids"):
        trainer.train(trainer_recipe(files), runs_folder=tmp_path / "b", target=target)
    assert not (tmp_path / "b" / "tiny" / "last").exists()
