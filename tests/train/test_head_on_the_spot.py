"""The GPU check's training, in its reduced form: a target's own text, and a head that learns from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.own_text import LEAST_ANSWER, NUM_STEPS, TEMPERATURES, Frame, OwnText, Text
from benchmarks.gpu.training import StateCache, TrainedHead, TrainingSizes, train_head
from heads.checkpoint import load_head
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.conftest import REPOSITORY, make_tiny_model
from tests.train.training_fixtures import NUM_LAYERS, tiny_target
from train.features import OnlineFeatures

SIZES = TrainingSizes.reduced()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def trained(target: TargetModel) -> TrainedHead:
    return train_head(target, device=target.device, tokens=6000, sizes=SIZES)


def test_text_is_the_targets_own(target: TargetModel) -> None:
    """Greedy answers are those of plain decoding of the same prompts, token for token, up to where they were cut; and
    the frame around them is the chat template's."""
    frame = Frame.of(target)
    assert frame.end_of_question is not None
    written = OwnText(target, batch=3, max_length=144).write(tokens=600)
    assert written.rows
    assert written.num_tokens >= 600
    checked = 0
    for row in written.rows:
        start = row.loss_mask.index(True)
        assert row.loss_mask == [place >= start for place in range(len(row.token_ids))]
        assert tuple(row.token_ids[: len(frame.before)]) == frame.before
        assert tuple(row.token_ids[start - len(frame.between) : start]) == frame.between
        assert row.token_ids[start - len(frame.between) - 1] == frame.end_of_question
        answer = row.token_ids[start:]
        assert len(answer) >= LEAST_ANSWER
        assert len(row.token_ids) <= 144
        assert not set(answer[:-1]) & target.eos_ids
        params = SamplingParams(temperature=0.0, max_tokens=len(answer))
        (completion,) = Engine(target).generate([row.token_ids[:start]], params)
        checked += list(completion.token_ids) == answer
    assert 4 * checked >= len(written.rows)  # a third is written at temperature 0; of the others hardly any is the same


def test_sampled_text_follows_seed_and_number(target: TargetModel) -> None:
    """Not which others it was written beside: the same texts in batches of two and of five."""
    texts = [OwnText(target, batch=batch, max_length=144, seed=7).write(tokens=500).rows for batch in (2, 5)]
    some, more = ({tuple(row.token_ids) for row in rows} for rows in texts)
    assert len(some & more) >= 3
    other = OwnText(target, batch=2, max_length=144, seed=8).write(tokens=500).rows
    assert not some & {tuple(row.token_ids) for row in other}


def test_known_tokens_are_forced() -> None:
    text = Text(number=0, answer_temperature=0.0, tokens=[5, 6, 7, 8], num_cached=1, question_start=2)
    assert text.forced(4) == [7, 8, -1, -1]
    assert text.forced(1) == [7]


def test_texts_go_on_without_a_tokenizer() -> None:
    """A random model that stands in for the real one: texts without questions, as long as they may be."""
    model = make_tiny_model("llama", vocab_size=300, num_hidden_layers=NUM_LAYERS)
    stand_in = TargetModel.wrap(model, name="random")
    written = OwnText(stand_in, batch=4, max_length=40 + NUM_STEPS).write(tokens=200)
    assert all(row.loss_mask.index(True) == 4 for row in written.rows)
    found = train_head(stand_in, tokens=900, sizes=SIZES)
    assert found.figures["steps"] >= 2
    assert 0 < found.figures["label_coverage"] <= 1
    assert len(found.head.vocabulary) == SIZES.draft_vocab_size


def test_a_head_is_trained_and_measured(target: TargetModel, trained: TrainedHead) -> None:
    figures = trained.figures
    assert figures["tokens"] >= 6000
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["tokens"] > figures["unique_tokens"]
    assert {f"held_out_overlap_{depth}" for depth in range(1, SIZES.ttt_steps + 1)} <= set(figures)
    assert all(torch.isfinite(torch.tensor(value)) for value in figures.values())
    assert [tokens for tokens, _, _ in trained.curve] == sorted(tokens for tokens, _, _ in trained.curve)
    assert trained.prompts
    assert trained.drafter.head.dtype is target.dtype


def test_the_head_drafts_for_its_target(target: TargetModel, trained: TrainedHead, tmp_path: Path) -> None:
    """Tokens are plain decoding's, more than one comes in a round, and the saved folder holds the same head."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = Engine(target).generate(trained.prompts[:1], params)[0]
    drafted = Engine(target, trained.drafter).generate(trained.prompts[:1], params)[0]
    assert drafted.token_ids == plain.token_ids
    head, card = load_head(trained.save(tmp_path / "head", target))
    target.check_card(card)
    assert all(torch.equal(one, trained.head.state_dict()[name]) for name, one in head.state_dict().items())


def test_states_are_those_of_training(target: TargetModel) -> None:
    """Many rows a forward: to rounding, the features that `headstart train` computes row by row; kept ones to the bit
    while there is room, and computed anew beyond it."""
    rows = OwnText(target, batch=3, max_length=144).write(tokens=500).rows
    taps = (1, 2, 4)
    cache = StateCache(target, taps, share=0.5)
    source = OnlineFeatures(target, taps)
    found = cache.of(list(enumerate(rows)))
    for row, one in zip(rows, found, strict=True):
        expected = source.get(row)
        torch.testing.assert_close(one.taps, expected.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.last, expected.last, rtol=1e-4, atol=1e-4)
        assert expected.log_normalizer is not None
        torch.testing.assert_close(one.log_normalizer, expected.log_normalizer, rtol=1e-4, atol=1e-4, equal_nan=True)
    again = cache.of(list(enumerate(rows)))
    assert all(one is other for one, other in zip(found, again, strict=True))
    none = StateCache(target, taps, share=0.0)
    assert none.of([(0, rows[0])])[0] is not none.of([(0, rows[0])])[0]


def test_budgets_and_places_are_checked(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="no budget"):
        train_head(target)
    with pytest.raises(ValueError, match="the target is on cpu"):
        train_head(target, device=torch.device("cuda"), seconds=1.0)
    with pytest.raises(ValueError, match="a text's frame alone takes"):
        OwnText(target, batch=1, max_length=16)


def test_temperatures_all_occur(target: TargetModel) -> None:
    """Questions are always sampled, or all texts of one opening would be the same at temperature 0."""
    writer = OwnText(target, batch=1, max_length=144)
    num_openings = len(Frame.of(target).openings)
    begun = [writer._begin() for _ in range(3 * num_openings)]
    assert {text.answer_temperature for text in begun} == set(TEMPERATURES)
    assert all(text.temperature > 0 for text in begun)


def test_it_needs_only_what_a_bare_image_has() -> None:
    """The module and all that it imports, without the extras of an installation."""
    blocked = ["datasets", "wandb", "deepspeed", "gguf", "fastapi", "peft", "uvicorn", "matplotlib", "llguidance"]
    code = (
        "import sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        "import benchmarks.gpu.training, infer.graphs.rounds\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
