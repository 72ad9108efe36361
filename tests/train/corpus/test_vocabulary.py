"""The draft-vocabulary report: coverage, lost acceptance and costs against plain counting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headstart
from heads.vocab import DraftVocabulary, always_kept_ids
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from train.corpus.conversations import Conversation, split_holdout, tokenize_conversations
from train.corpus.vocabulary import DRAFTED, HOLDOUT, VocabularyReport, measure_vocabularies

MERGES = ("r e", "re d", "b l", "bl u", "blu e", "g r", "gr e", "gre e", "gree n", "f i", "s h", "fi sh")
WORDS = {"colours": ("red", "blue", "green"), "animals": ("fish", "bird", "shark")}
NUM_KEPT = 260


@pytest.fixture(scope="module")
def target() -> TargetModel:
    tokenizer = toy_tokenizer(merges=MERGES)
    model = make_tiny_model("llama", vocab_size=272)
    return TargetModel.wrap(model, tokenizer, name="tiny")


def conversations() -> list[Conversation]:
    found = []
    for number in range(60):
        domain = ("colours", "animals", None)[number % 3]
        words = WORDS[domain] if domain else ("word",)
        answer = " ".join(words[(number + place) % len(words)] for place in range(1 + number % 4))
        messages = ({"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": answer})
        found.append(Conversation(messages=messages, source=f"x:{number}", domain=domain))
    return found


@pytest.fixture(scope="module")
def report(target: TargetModel) -> VocabularyReport:
    return measure_vocabularies(
        target, conversations(), [NUM_KEPT, 266, 272, 9999], max_length=100, positions_per_domain=40
    )


def test_sizes_are_ascending_and_end_with_the_targets_own(report: VocabularyReport) -> None:
    assert [entry.size for entry in report.entries] == [260, 266, 272]
    last = report.entries[-1]
    assert (last.coverage, last.lost_acceptance, last.lost_greedy) == (1.0, 0.0, 0.0)
    assert set(report.num_positions) == {"animals", "colours", "other"}
    assert report.num_kept == NUM_KEPT


def test_figures_equal_plain_counting(target: TargetModel, report: VocabularyReport) -> None:
    """Every held-out label, one at a time, with the stock model's own probabilities (1e-5: another sum)."""
    train, held_out = split_holdout(conversations(), HOLDOUT)
    counts: dict[int, int] = {}
    for row in tokenize_conversations(train, target.tokenizer, 100):
        for token, mask in zip(row.token_ids, row.loss_mask, strict=True):
            counts[token] = counts.get(token, 0) + mask
    kept = always_kept_ids(target.tokenizer, target.eos_ids)
    inside = DraftVocabulary.from_counts(counts, size=266, vocab_size=272, keep_ids=kept).t2d
    held: dict[str, list[tuple[bool, float, bool]]] = {}
    with target.stock() as model, torch.inference_mode():
        for row in tokenize_conversations(held_out, target.tokenizer, 100):
            probs = model(input_ids=torch.tensor([row.token_ids])).logits[0].float().softmax(-1)
            for place, mask in enumerate(row.loss_mask):
                if mask:
                    law = probs[place - 1]
                    token = row.token_ids[place]
                    domain = row.conversation.domain or "other"  # type: ignore[attr-defined]
                    values = (bool(inside[token]), float(law[~inside].sum()), not bool(inside[law.argmax()]))
                    held.setdefault(domain, []).append(values)
    entry = report.entries[1]
    for domain, values in held.items():
        assert report.num_labels[domain] == len(values)
        reach = entry.by_domain[domain]
        assert reach.coverage == pytest.approx(sum(one[0] for one in values) / len(values))
        if report.num_positions[domain] == len(values):  # all of them were measured
            assert reach.lost_acceptance == pytest.approx(sum(one[1] for one in values) / len(values), abs=1e-5)
            assert reach.lost_greedy == pytest.approx(sum(one[2] for one in values) / len(values), abs=1e-6)
    everything = [one for values in held.values() for one in values]
    assert entry.coverage == pytest.approx(sum(one[0] for one in everything) / len(everything))
    assert entry.lost_acceptance == pytest.approx(
        sum(reach.lost_acceptance for reach in entry.by_domain.values()) / len(entry.by_domain)
    )


def test_larger_vocabularies_lose_less_and_cost_more(report: VocabularyReport) -> None:
    for small, large in zip(report.entries, report.entries[1:], strict=False):
        assert small.coverage <= large.coverage
        assert small.lost_acceptance >= large.lost_acceptance
        assert small.bytes_share < large.bytes_share < 1
        assert small.flops_share < large.flops_share < 1
        assert small.draft_step_share < large.draft_step_share


def test_costs_are_those_of_a_round(target: TargetModel, report: VocabularyReport) -> None:
    """By hand: H = 32, and an EAGLE-3 layer of the target's own sizes."""
    hidden, size = 32, 266
    lm_head = hidden * size
    attention = 2 * hidden * (4 * 8 + 2 * 2 * 8) + 4 * 8 * hidden
    rest = attention + 3 * hidden * 48 + 3 * hidden * hidden + 4 * hidden
    step = rest + lm_head
    entry = report.entries[1]
    read = target.num_weight_bytes + DRAFTED * step * 4
    assert entry.bytes_share == pytest.approx(DRAFTED * lm_head * 4 / read)
    assert entry.draft_step_share == pytest.approx(step * 4 / target.num_weight_bytes)
    work = target.num_weight_bytes / 4 * (DRAFTED + 1) + DRAFTED * step
    assert entry.flops_share == pytest.approx(DRAFTED * lm_head / work)


def test_sizes_below_what_is_always_kept_are_left_out(target: TargetModel) -> None:
    notices: list[str] = []
    report = measure_vocabularies(
        target, conversations(), [100, 270], max_length=100, positions_per_domain=5, notice=notices.append
    )
    assert [entry.size for entry in report.entries] == [270]
    assert notices == ["size 100 is left out: 260 special, chat and byte tokens are always kept"]
    with pytest.raises(ValueError, match="no size is left: 260 special, chat and byte tokens"):
        measure_vocabularies(target, conversations(), [100], max_length=100)
    assert all(5 <= count <= 8 for count in report.num_positions.values())


def test_the_command_prints_a_table_and_draws(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with target.stock() as model:
        model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"messages": one.messages, "domain": one.domain}) + "\n" for one in conversations())
    )
    out = tmp_path / "vocab.json"
    command = ["data", "vocab", str(data), "--target", str(tmp_path / "target"), "--dtype", "float32"]
    assert headstart.main([*command, "--sizes", "264,270", "--positions", "10", "--json", str(out)]) == 0
    values = json.loads(out.read_text())
    assert [entry["size"] for entry in values["entries"]] == [264, 270]
    assert set(values["entries"][0]["by_domain"]) == {"animals", "colours", "other"}
    printed = capsys.readouterr().out
    assert "Lost acceptance by domain" in printed
    assert "Coverage by domain" in printed
    if pytest.importorskip("matplotlib"):
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert headstart.main([*command, "--sizes", "many"]) == 2
    assert headstart.main([*command, "--sizes", "10"]) == 2
