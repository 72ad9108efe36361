"""What training computes is what decoding runs: the same acceptance, round by round, and the same logits."""

from __future__ import annotations

import random

import pytest
import torch

from configs.schema import EvalConfig
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.unroll import Batch
from heads.vocab import DraftVocabulary
from infer.cost import CostModel
from infer.drafters.base import TreeSettings
from infer.drafters.head import HeadDrafter
from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel
from tests.train.measuring import decode_acceptance, simulate_rounds
from train.evaluation import CHAIN_DEPTH, decoding_copy
from train.unroll import Teacher, plan_rows, unrolled_loss

TAPS = (1, 2, 4)
DEPTH = 4


@pytest.fixture(scope="module")
def answers(target: TargetModel) -> list[Completion]:
    chance = random.Random(0)
    prompts = [[chance.randrange(4, 260) for _ in range(chance.randint(3, 9))] for _ in range(12)]
    return Engine(target).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))


def batch_of(target: TargetModel, answers: list[Completion]) -> Batch:
    rows = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    masks = [
        [i >= len(answer.prompt_token_ids) for i in range(len(row))] for answer, row in zip(answers, rows, strict=True)
    ]
    features = target.features(rows, TAPS)
    last = torch.cat([one.last for one in features]).clone()
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row]),
        loss_mask=torch.tensor([mask for row in masks for mask in row]),
        lengths=tuple(len(row) for row in rows),
        taps=torch.cat([one.taps for one in features]).clone(),
        last=last,
        log_normalizer=(last @ target.lm_head_weight.T).logsumexp(-1),
    )


@pytest.fixture(scope="module")
def head(target: TargetModel, answers: list[Completion]) -> Eagle3Head:
    """Fitted to the target's own greedy answers for a moment, so that rounds of every length occur."""
    config = Eagle3Config.for_target(target.config, draft_vocab_size=264, vocab_size=264, taps=TAPS)
    torch.manual_seed(0)
    head = Eagle3Head(config, DraftVocabulary.full(264)).bind(target.weights)
    head.init_from_target(layer=target.layers[-1], final_norm=target.final_norm, lm_head_weight=target.lm_head_weight)
    batch = batch_of(target, answers)
    plan = plan_rows(batch.loss_mask, batch.lengths, DEPTH)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(60):
        loss, _ = unrolled_loss(
            head,
            batch,
            plan,
            Teacher(weight=target.lm_head_weight),
            loss="ce",
            step_weights=[1 / len(rows) for rows in plan],
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def engine(target: TargetModel, head: Eagle3Head) -> Engine:
    drafter = HeadDrafter(decoding_copy(head, target))
    return Engine(target, drafter, tree=TreeSettings.chain(DEPTH), cost=CostModel.free(), max_length=128)


def test_simulated_rounds_are_those_of_the_decode_loop(
    target: TargetModel, head: Eagle3Head, answers: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, so exactly: a head that looked good in training once served at a tenth of it, because one carried state
    was normalised in one place and not in the other.
    """
    monkeypatch.setattr("infer.drafters.growing.NEGLIGIBLE", 0.0)  # unlikely drafts are part of a chain all the same
    prompts = [answer.prompt_token_ids for answer in answers]
    decoded = engine(target, head).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    lengths = set()
    for plain, drafted in zip(answers, decoded, strict=True):
        assert drafted.token_ids == plain.token_ids
        rounds = simulate_rounds(head, batch_of(target, [plain]), depth=DEPTH)
        assert rounds == list(drafted.accepted_lengths[1:])
        lengths.update(rounds)
    assert lengths == set(range(1, DEPTH + 2)), "the case is too easy or too hard to tell anything"


def test_evaluation_leaves_the_head_in_training_alone(target: TargetModel, head: Eagle3Head) -> None:
    """It decodes with a copy in the target's dtype; gradients and weights of the original stay."""
    trained = Eagle3Head(head.config, head.vocabulary).bind(target.weights).train()
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    prompts = [EvalPrompt(domain="a", token_ids=(5, 6, 7)), EvalPrompt(domain="b", token_ids=(8, 9))]
    report = decode_acceptance(target, trained, prompts, EvalConfig(max_tokens=6, temperatures=(0.0, 1.0)))
    assert report.num_answers == 4
    assert set(report.by_temperature) == {0.0, 1.0}
    assert len(report.overall.by_position) <= CHAIN_DEPTH
    assert trained.training
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())
