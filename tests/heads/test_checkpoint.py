"""Heads on disk: nothing random, nothing missing, nothing half written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.base import TargetWeights
from heads.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    HeadCard,
    TargetReference,
    check_target,
    load_head,
    portable_name,
    read_card,
    save_head,
    update_card,
)
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.registry import FAMILIES, family_of_config
from heads.vocab import DraftVocabulary, VocabularyProvenance

VOCABULARY, HIDDEN = 64, 16
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def head() -> Eagle3Head:
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        draft_vocab_size=20,
        taps=(1, 2, 3),
    )
    torch.manual_seed(0)
    provenance = VocabularyProvenance(target_fingerprint="f", tokenizer_hash="t", data_hash="d")
    vocabulary = DraftVocabulary.from_counts({60: 3, 33: 1}, size=20, vocab_size=VOCABULARY, provenance=provenance)
    return Eagle3Head(config, vocabulary)


@pytest.fixture
def card() -> HeadCard:
    target = TargetReference(
        name="/home/me/models/tiny", fingerprint="f00d", num_layers=4, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    return HeadCard(target=target, acceptance={"accepted_length": 2.0}, training={"step": 3})


def test_a_saved_head_comes_back_bit_for_bit(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    weights = TargetWeights(embedding=torch.randn(VOCABULARY, HIDDEN), lm_head=torch.randn(VOCABULARY, HIDDEN))
    folder = save_head(tmp_path / "best", head, card)
    again, read = load_head(folder, weights)
    assert read.target == card.target
    assert read.acceptance == {"accepted_length": 2.0}
    assert again.config == head.config
    assert again.vocabulary.provenance == head.vocabulary.provenance
    assert list(again.state_dict()) == list(head.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True))

    def itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.repeat_interleave(2, dim=1)

    inputs = (torch.tensor([5]), torch.randn(1, HIDDEN), torch.tensor([0]), itself)
    assert torch.equal(
        again.logits(again(*inputs)),
        head.bind(weights).logits(head(*inputs)),
    )


def test_folder_holds_no_target_tensor_and_no_path(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    """A public config once carried a private absolute path, and a "head" the whole embedding matrix."""
    head.bind(TargetWeights(embedding=torch.randn(VOCABULARY, HIDDEN), lm_head=torch.randn(VOCABULARY, HIDDEN)))
    folder = save_head(tmp_path / "best", head, card)
    tensors = load_file(folder / WEIGHTS_FILE)
    assert not any("embed" in name for name in tensors)
    expected = sum(tensor.nbytes for tensor in head.state_dict().values())
    assert (folder / WEIGHTS_FILE).stat().st_size < 1.05 * expected + 4096
    for file in (CARD_FILE, CONFIG_FILE):
        assert "/home" not in (folder / file).read_text()
    assert json.loads((folder / CARD_FILE).read_text())["target"]["name"] == "tiny"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/data/models/smollm2-135m", "smollm2-135m"),
        ("./smollm2-135m", "smollm2-135m"),
        ("../x/smollm2-135m", "smollm2-135m"),
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_names_mean_the_same_elsewhere(given: str, kept: str) -> None:
    assert portable_name(given) == kept


def edit(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing fc.weight \[16, 48\]"),
        (lambda t: t.update({"fc.bias": torch.zeros(16)}), r"unknown fc.bias \[16\]"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(16)}), r"unknown fc_norm.0.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(8)}), r"norm.weight has shape \[8\], expected \[16\]"),
        (lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int32)}), r"dtype torch.int32, expected torch"),
        (lambda t: t.update({"norm.weight": torch.full((16,), float("nan"))}), r"norm.weight holds non-finite"),
        (lambda t: t.update({"lm.weight": t.pop("lm_head.weight")}), r"missing lm_head.*; unknown lm.weight"),
        (lambda t: t.update({"d2t": torch.zeros(20, dtype=torch.int64)}), "never filled in"),
        (lambda t: t.update({"d2t": t["d2t"].flip(0).contiguous()}), "strictly ascending"),
        (lambda t: t.update({"t2d": torch.ones(VOCABULARY, dtype=torch.bool)}), "disagree on 44 target tokens"),
        (lambda t: t.pop("t2d"), "lack t2d"),
    ],
)
def test_what_does_not_fit_is_named(
    head: Eagle3Head, card: HeadCard, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    """A converter that only warned kept random weights, found months later as zero acceptance."""
    folder = save_head(tmp_path / "best", head, card)
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load_head(folder)


def test_an_embedding_in_the_file_is_left_aside(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    """Other tools store a copy of the target's embedding; the target's own is used."""
    folder = save_head(tmp_path / "best", head, card)
    edit(folder, lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN)}))
    load_head(folder)


def test_truncated_weights_are_named(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "best", head, card)
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_head(folder)


def test_broken_weights_are_not_saved(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    """The last good checkpoint survives a diverged run."""
    folder = save_head(tmp_path / "best", head, card)
    with torch.no_grad():
        head.norm.weight[0] = float("inf")
    with pytest.raises(ValueError, match=r"non-finite tensors: norm.weight"):
        save_head(folder, head, card)
    load_head(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("moment", ["writing", "between the renames"])
def test_a_save_that_dies_leaves_the_previous_one(
    head: Eagle3Head, card: HeadCard, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever instant the process dies, loading finds one complete folder."""
    folder = save_head(tmp_path / "last", head, card)
    before = load_file(folder / WEIGHTS_FILE)
    with torch.no_grad():
        head.norm.weight.add_(1)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    if moment == "writing":
        with pytest.raises(Killed):
            save_head(folder, head, card, add_files=die)
    else:
        rename = Path.rename

        def rename_once(path: Path, target: Path) -> Path:
            if path.name.startswith(".last.new"):
                raise Killed
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename_once)
            with pytest.raises(Killed):
                save_head(folder, head, card)
        assert not folder.exists()
    again, _ = load_head(folder)
    assert torch.equal(again.norm.weight, before["norm.weight"])


def test_card_can_be_updated_alone(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "best", head, card)
    update_card(folder, drafter={"max_depth": 5})
    update_card(folder, certificate={"passed": True})
    assert read_card(folder).drafter == {"max_depth": 5}
    assert read_card(folder).certificate == {"passed": True}
    assert read_card(folder).acceptance == {"accepted_length": 2.0}


def test_wrong_target_is_refused(card: HeadCard) -> None:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    check_target(card, fingerprint="f00d", name="tiny", **sizes)
    with pytest.raises(ValueError, match="other weights or another tokenizer"):
        check_target(card, fingerprint="beef", name="tiny", **sizes)
    with pytest.raises(ValueError, match="hidden size 16 and vocabulary 64; other has 32 and 64"):
        check_target(card, fingerprint="f00d", name="other", hidden_size=32, vocab_size=VOCABULARY)


def test_what_is_no_head_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an augmented model folder"):
        load_head(tmp_path)
    (tmp_path / CARD_FILE).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_head(tmp_path)


def test_families_are_found_by_architecture(head: Eagle3Head) -> None:
    assert family_of_config(head.config.to_native()) == "eagle3"
    assert FAMILIES["eagle3"].head is Eagle3Head
    with pytest.raises(ValueError, match="this version loads LlamaForCausalLMEagle3"):
        family_of_config({"architectures": ["EAGLEModel"]})


def test_a_reader_leaves_a_save_between_its_renames_alone(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    """A reader that renamed the previous folder back would make the save that is still alive fail."""
    folder = save_head(tmp_path / "best", head, card)
    folder.rename(tmp_path / ".best.previous")
    load_head(folder)
    assert read_card(folder).target == card.target
    assert [path.name for path in tmp_path.iterdir()] == [".best.previous"]


def test_what_killed_saves_left_is_removed(head: Eagle3Head, card: HeadCard, tmp_path: Path) -> None:
    (tmp_path / ".best.new-1").mkdir()
    save_head(tmp_path / "best", head, card)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
