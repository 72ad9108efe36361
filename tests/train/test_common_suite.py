"""What holds for the training of a head of any family: the real loop teaches it, stopping it changes nothing, and it
decodes as it was trained. The slow tests show on a real model that it learns.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import (
    DataConfig,
    EvalConfig,
    HeadSettings,
    LossName,
    OptimConfig,
    RunConfig,
    TrackingConfig,
    TrainSettings,
)
from heads.base import DraftHead
from heads.checkpoint import HeadCard, load_head, save_head
from heads.registry import FAMILIES
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from infer.cost import CostModel
from infer.drafters.base import TreeSettings
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.head_families import VARIANTS, marked
from tests.train.measuring import decode_acceptance, simulate_rounds
from tests.train.training_fixtures import Stopped, run, tiny_recipe
from train.batch import pack_batch
from train.corpus.dataset import TrainingData, load_data
from train.evaluation import decoding_copy, teacher_forced
from train.features import OnlineFeatures
from train.reports.metrics import read_metrics
from train.setup import make_head
from train.unroll import Teacher, plan_rows, unrolled_loss

pytestmark = pytest.mark.usefixtures("every_notice")

DEPTH = 4

every_family = pytest.mark.parametrize("family", FAMILIES)

every_variant = pytest.mark.parametrize("variant", marked(VARIANTS))
every_recipe = pytest.mark.parametrize(
    "variant",
    marked(name for name, (family, given) in VARIANTS.items() if given.keys() <= FAMILIES[family].settings | {"taps"}),
)
"""Of heads that a recipe can make; others come from elsewhere."""


def recipe(chats: Path, variant: str, **changes: Any) -> RunConfig:
    """A small run of a variant's head, with the family's own taps unless it says others. The tiny target's end of text,
    the usual mask, has an embedding of zeros, from which DFlash's queries would learn nothing."""
    family, settings = VARIANTS[variant]
    mask = {"head__mask_token_id": 5} if "mask_token_id" in FAMILIES[family].settings else {}
    head = {"head__taps": None, **mask, **{f"head__{name}": value for name, value in settings.items()}}
    return tiny_recipe(chats, head__type=family, **head, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def target_hash(target: TargetModel) -> str:
    digest = hashlib.sha256()
    for tensor in target.model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@every_recipe
def test_the_loop_teaches(target: TargetModel, chats: Path, tmp_path: Path, variant: str) -> None:
    """From random weights: the loss falls, and on held-out text more of what is drafted would be accepted."""
    config = recipe(
        chats,
        variant,
        head__init="random",
        train__steps=80,
        train__num_evaluations=8,
        train__ttt_start=0.0,
        optim__lr=3e-3,
    )
    run(config, tmp_path, target)
    records = read_metrics(tmp_path / "tiny")
    losses = [record["loss"] for record in records if record["event"] == "train"]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    overlap = [record["overlap"][0] for record in records if record["event"] == "evaluation"]
    assert overlap[-1] > overlap[0] + 0.03


@pytest.mark.parametrize("stop", [1, 8])
@every_recipe
def test_resumed_run_equals_an_uninterrupted_one(
    target: TargetModel, chats: Path, tmp_path: Path, variant: str, stop: int
) -> None:
    """Weights, the optimiser's state and every loss, bit for bit; what is random in training included."""
    config = recipe(chats, variant, train__save_every=1, train__ttt_keep=0.5, optim__accumulation=2)
    run(config, tmp_path / "whole", target)
    with pytest.raises(Stopped):
        run(config, tmp_path / "parts", target, stop_at=stop + 1)
    run(config, tmp_path / "parts", target, resume=True)
    whole, parts = tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny"
    assert_same_weights(whole / "last", parts / "last")
    assert_same_weights(whole / "best", parts / "best")
    states = [torch.load(folder / "last" / "trainer.pt", weights_only=True)["optimizer"] for folder in (whole, parts)]
    for one, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    curves = [
        [(r["step"], r["lr"], r["loss"]) for r in read_metrics(folder) if r["event"] == "train"]
        for folder in (whole, parts)
    ]
    assert curves[0] == curves[1]


@every_recipe
def test_a_run_starts_from_a_saved_head(target: TargetModel, chats: Path, tmp_path: Path, variant: str) -> None:
    """`head.init_from` goes on with the very weights of the file, and with its vocabulary."""
    run(recipe(chats, variant, train__steps=3, head__draft_vocab_size=262), tmp_path, target)
    start = tmp_path / "tiny" / "last"
    config = recipe(chats, variant, name="second", head__init_from=str(start), train__steps=1, optim__lr=1e-12)
    run(config, tmp_path, target)
    first, second = load_head(start)[0], load_head(tmp_path / "second" / "last")[0]
    assert second.config == first.config
    assert second.vocabulary.target_ids.tolist() == first.vocabulary.target_ids.tolist()
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


@every_recipe
def test_a_saved_head_may_be_given_another_vocabulary(
    target: TargetModel, chats: Path, tmp_path: Path, variant: str
) -> None:
    """`head.init_vocab=data`: tokens that it had keep their rows, and what has no rows of tokens its weights."""
    run(recipe(chats, variant, train__steps=3, head__draft_vocab_size=262), tmp_path, target)
    start = tmp_path / "tiny" / "last"
    changes = {"head__init_from": str(start), "head__init_vocab": "data", "head__draft_vocab_size": 263}
    run(recipe(chats, variant, name="second", train__steps=1, optim__lr=1e-12, **changes), tmp_path, target)
    first, second = load_head(start)[0], load_head(tmp_path / "second" / "last")[0]
    assert len(second.vocabulary) == second.config.draft_vocab_size == 263
    had, has = (head.vocabulary.target_ids.tolist() for head in (first, second))
    rows = [(has.index(token), had.index(token)) for token in had if token in has]
    assert len(rows) > 200
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        if second.has_draft_rows(name):
            new, old = (torch.tensor(side) for side in zip(*rows, strict=True))
            one, other = one[old], other[new]
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


@every_recipe
def test_the_target_stays_what_and_where_it_is(target: TargetModel, chats: Path, tmp_path: Path, variant: str) -> None:
    """Bit for bit, without gradients, and in none of the files: all that is saved of a head is its own."""
    before = target_hash(target)
    run(recipe(chats, variant), tmp_path, target)
    assert target_hash(target) == before
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.model.parameters())
    folder = tmp_path / "tiny"
    head, _ = load_head(folder / "last")
    own = {name for name, _ in head.named_parameters()}
    theirs = [tensor for tensor in target.model.state_dict().values() if tensor.numel() > 1]
    theirs += [rows[head.target_ids] for rows in (target.embedding_weight, target.lm_head_weight)]
    for name, tensor in weights(folder / "last").items():
        assert name in own or not tensor.is_floating_point()
        assert not any(tensor.shape == one.shape and torch.equal(tensor, one) for one in theirs), name
    state = torch.load(folder / "last" / "trainer.pt", weights_only=True)["optimizer"]
    moments = [one for each in state["state"].values() for one in each.values() if one.ndim]
    assert sum(one.numel() for one in moments) == 2 * sum(one.numel() for one in head.parameters())


# Train/decode parity


@pytest.fixture(scope="module")
def answers(target: TargetModel) -> list[Completion]:
    chance = random.Random(0)
    prompts = [[chance.randrange(4, 260) for _ in range(chance.randint(3, 9))] for _ in range(12)]
    return Engine(target).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))


def batch_of(target: TargetModel, answers: list[Completion], taps: tuple[int, ...]) -> Batch:
    rows = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    masks = [
        [i >= len(answer.prompt_token_ids) for i in range(len(row))] for answer, row in zip(answers, rows, strict=True)
    ]
    features = target.features(rows, taps)
    last = torch.cat([one.last for one in features]).clone()
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row]),
        loss_mask=torch.tensor([mask for row in masks for mask in row]),
        lengths=tuple(len(row) for row in rows),
        taps=torch.cat([one.taps for one in features]).clone(),
        last=last,
        log_normalizer=(last @ target.lm_head_weight.T).logsumexp(-1),
    )


def fitted_head(target: TargetModel, answers: list[Completion], variant: str) -> DraftHead:
    """Fitted to the target's own greedy answers for a moment, so that rounds of every length occur."""
    name, settings = VARIANTS[variant]
    if name == "eagle1":  # the regression on features would keep it from learning random text by heart
        settings = {**settings, "feature_loss": 0.0}
    family, vocab_size = FAMILIES[name], target.vocab_size
    config = family.config.for_target(target.config, draft_vocab_size=vocab_size, vocab_size=vocab_size, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = family.head(config, DraftVocabulary.full(vocab_size)).bind(target.weights)
    batch = batch_of(target, answers, config.taps)
    plan = plan_rows(batch.loss_mask, batch.lengths, min(head.num_depths or DEPTH, DEPTH))
    teacher = Teacher(weight=target.lm_head_weight)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(80):
        weights = [1 / len(rows) for rows in plan]
        loss, _ = unrolled_loss(head, batch, plan, teacher, loss="ce", step_weights=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


@every_variant
def test_simulated_rounds_are_those_of_the_decode_loop(
    target: TargetModel, answers: list[Completion], variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, so exactly, and after the head went through a file: the rounds in which a greedy chain would decode the
    text, from the training graph on the finished text, are those of the decode loop. A public head looked good in
    training and served at a tenth of it, because one carried state was normalised in one place and not in the other.
    """
    monkeypatch.setattr("infer.drafters.growing.NEGLIGIBLE", 0.0)  # unlikely drafts are part of a chain all the same
    head = fitted_head(target, answers, variant)
    name, _ = VARIANTS[variant]
    save_head(tmp_path / "head", head, HeadCard(target=target.reference, family=name))
    loaded, _ = load_head(tmp_path / "head", target.weights)
    depth = min(head.num_depths or DEPTH, DEPTH)
    prompts = [answer.prompt_token_ids for answer in answers]
    engine = Engine(
        target,
        head_drafter(decoding_copy(loaded, target), target),
        tree=TreeSettings.chain(depth),
        cost=CostModel.free(),
        max_length=128,
    )
    decoded = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    lengths = set()
    for plain, drafted in zip(answers, decoded, strict=True):
        assert drafted.token_ids == plain.token_ids
        with torch.no_grad():
            rounds = simulate_rounds(head, batch_of(target, [plain], head.config.taps), depth=depth)
        assert rounds == list(drafted.accepted_lengths[1:])
        lengths.update(rounds)
    assert lengths == set(range(1, depth + 2)), "the case is too easy or too hard to tell anything"


# On a real model

TOPICS = (
    "the moon",
    "bread",
    "bicycles",
    "volcanoes",
    "chess",
    "the ocean",
    "honey bees",
    "paper",
    "the violin",
    "winter",
    "coffee",
    "maps",
    "glass",
    "owls",
    "rivers",
    "clocks",
)
QUESTIONS = (
    "What should a child know about {}?",
    "Write four sentences about {}.",
    "Why do people care about {}?",
    "Give me three facts about {}.",
    "Tell a very short story about {}.",
    "How would you explain {} to a friend?",
    "What is the history of {}?",
    "Name some words that go with {}.",
)
NUM_OVERFITTED = 32
LEARNED, HELD_OUT = slice(0, 96), slice(96, None)


@pytest.fixture(scope="module")
def real_target(smollm2_path: Path) -> TargetModel:
    return TargetModel.load(smollm2_path)


@pytest.fixture(scope="module")
def real_chats(real_target: TargetModel) -> list[str]:
    """Conversations in JSON, written by the target itself: half of the answers greedy, half at temperature 0.8. Each
    topic comes in all questions, and the last topics are held out."""
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    params = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=96) for number in range(len(prompts))
    ]
    answers = Engine(real_target, max_requests=64).generate(prompts, params)
    return [
        json.dumps({"messages": [*prompt, {"role": "assistant", "content": answer.text}], "truncated": True})
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """How a family learns 32 conversations by heart: passes over them, loss and learning rate."""

    epochs: float
    loss: LossName = "ce"
    lr: float = 1e-3


LESSONS = {
    "eagle3": Lesson(epochs=45.0, loss="lk"),
    "eagle1": Lesson(epochs=45.0),
    "medusa": Lesson(epochs=40.0, lr=3e-3),
    "hydra": Lesson(epochs=40.0),
    "early_exit": Lesson(epochs=60.0, lr=3e-3),
    "peagle": Lesson(epochs=45.0),
    "dflash": Lesson(epochs=60.0, lr=2e-3),
}
"""With -log(acceptance) Medusa, Hydra and the early exit stop at 0.65 to 0.75: where the target is unsure it leaves the
likeliest token open."""
DECODING = EvalConfig(prompts=12, max_tokens=48)


def real_recipe(
    family: str, folder: Path, lines: Sequence[str], held_out: Sequence[str], lesson: Lesson, *, epochs: float
) -> RunConfig:
    """Nothing is dropped, and a head with a bound has two depths."""
    train_file, eval_file = folder / "train.jsonl", folder / "eval.jsonl"
    train_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    eval_file.write_text("\n".join(held_out) + "\n", encoding="utf-8")
    depths = {name: 2 for name in ("num_heads", "num_depths") if name in FAMILIES[family].settings}
    return RunConfig(
        name=family,
        data=DataConfig(train=(str(train_file),), eval=(str(eval_file),), max_length=256, max_repeat_fraction=1.0),
        head=HeadSettings(type=family, draft_vocab_size=2048, **depths),  # type: ignore[arg-type]
        optim=OptimConfig(batch_size=2, lr=lesson.lr, warmup_steps=10),
        train=TrainSettings(
            epochs=epochs, loss=lesson.loss, ttt_steps=1, num_evaluations=1, save_minutes=None, feature_cache_gb=2.0
        ),
        eval=EvalConfig(prompts=2, max_tokens=8),
        tracking=TrackingConfig(wandb="disabled"),
    )


def agreement(target: TargetModel, head: DraftHead, config: RunConfig, data: TrainingData, *, held_out: bool) -> float:
    """Share of labels at which the head's likeliest token is the target's, at depth 1 (within the draft vocabulary)."""
    rows = data.held_out if held_out else data.rows
    source = OnlineFeatures(target, head.config.taps)
    batches = [pack_batch([row], [source.get(row)], device="cpu", dtype=target.dtype) for row in rows]
    twin = decoding_copy(head, target)
    teacher = Teacher(weight=target.lm_head_weight[twin.target_ids])
    return teacher_forced(twin, batches, teacher, num_steps=1)["agreement"][0]


def real_data(target: TargetModel, config: RunConfig) -> TrainingData:
    return load_data(config.data, target.tokenizer, seed=0)


@pytest.mark.slow
@every_family
def test_every_family_overfits(real_target: TargetModel, real_chats: list[str], tmp_path: Path, family: str) -> None:
    """The real loop drives a real target's head to 90 % agreement on 32 conversations that it sees again and again:
    inputs, labels, mask and gradients belong together, and nothing stands in the way."""
    lesson, lines = LESSONS[family], real_chats[LEARNED][: 3 * NUM_OVERFITTED : 3]
    config = real_recipe(family, tmp_path, lines, real_chats[HELD_OUT], lesson, epochs=lesson.epochs)
    run(config, tmp_path, real_target)
    head, _ = load_head(tmp_path / family / "last")
    data = real_data(real_target, config)
    assert len(data.rows) == NUM_OVERFITTED
    reached = agreement(real_target, head, config, data, held_out=False)
    print(f"{family}: agreement {reached:.3f} after {lesson.epochs:g} passes")
    assert reached >= 0.9


@pytest.mark.slow
@every_family
def test_a_briefly_trained_head_beats_a_random_one(
    real_target: TargetModel, real_chats: list[str], tmp_path: Path, family: str
) -> None:
    """On topics that it was not trained on, threefold: in agreement at depth 1, and in draft tokens accepted by the
    decode loop. The random head is the same network, and never saw a step."""
    config = real_recipe(family, tmp_path, real_chats[LEARNED], real_chats[HELD_OUT], LESSONS[family], epochs=4.0)
    run(config, tmp_path, real_target)
    head, _ = load_head(tmp_path / family / "last")
    data = real_data(real_target, config)
    random_head = make_head(replace(config, head=replace(config.head, init="random")), real_target, data)
    figures = {}
    for name, one in (("random", random_head.bind(real_target.weights)), ("trained", head)):
        report = decode_acceptance(real_target, one, data.prompts, DECODING)
        shares = agreement(real_target, one, config, data, held_out=True)
        figures[name] = (shares, report.accepted_length - 1)
    print(f"{family}, (agreement, accepted drafts a round): {figures}")
    for before, after in zip(figures["random"], figures["trained"], strict=True):
        assert after > 3 * before
        assert after > 0.1
