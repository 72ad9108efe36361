"""How good a head is on held-out text: acceptance by the real decode loop, and teacher-forced agreement.

The decode loop's accepted length chooses checkpoints (definitions: `infer.evaluate`). It drafts a plain chain of fixed
depth, so that the figure depends on the head alone, not on the machine's speed or on how trees are grown.

    agreement   share of held-out labels at which the head's most likely token is the target's (both within the draft
                vocabulary), at each depth of the unrolling
    overlap     mean probability that a token sampled from the head is accepted, at each depth
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch

from configs.schema import EvalConfig
from heads.base import DraftHead
from heads.unroll import Batch
from infer.bench import benchmark
from infer.cost import CostModel
from infer.drafters.base import TreeSettings
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.evaluate import AcceptanceReport, EvalPrompt, evaluate
from infer.target import TargetModel
from train.unroll import Teacher, plan_rows, unrolled_loss

CHAIN_DEPTH = 5
NUM_TIMED_PROMPTS = 5


def decoding_copy(head: DraftHead, target: TargetModel) -> DraftHead:
    """The head as it is served: in the target's dtype, on its device, apart from the one in training."""
    twin = copy.deepcopy(head).to(device=target.device, dtype=target.dtype)
    return twin.bind(target.weights).eval()


def decode_acceptance(
    target: TargetModel, head: DraftHead, prompts: Sequence[EvalPrompt], settings: EvalConfig
) -> AcceptanceReport:
    """Acceptance of a chain of `CHAIN_DEPTH` drafts on the first held-out prompts."""
    prompts = prompts[: settings.prompts]
    engine = Engine(
        target,
        head_drafter(decoding_copy(head, target), target),
        max_requests=len(prompts),
        tree=TreeSettings.chain(CHAIN_DEPTH),
        cost=CostModel.free(),
    )
    return evaluate(
        engine,
        prompts,
        temperatures=settings.temperatures,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )


def decode_speed(
    target: TargetModel, head: DraftHead, prompts: Sequence[EvalPrompt], settings: EvalConfig
) -> dict[str, float]:
    """Tokens a second with the head as users get it (an adaptive tree, joined by the lookup) against plain decoding.

    The first few held-out prompts, at the first temperature, one after the other and interleaved with plain decoding:
    enough for a curve, not for a claim (`headstart bench` is for those).
    """
    engine = Engine(
        target, HybridDrafter([head_drafter(decoding_copy(head, target), target), NgramDrafter()]), max_requests=1
    )
    report = benchmark(
        engine,
        prompts[:NUM_TIMED_PROMPTS],
        head="",
        temperatures=settings.temperatures[:1],
        max_tokens=settings.max_tokens,
        methods=("plain", "headstart"),
        repeats=1,
        seed=settings.seed,
    )
    plain, drafted = (next(row for row in report.results if row.method == name) for name in ("plain", "headstart"))
    return {
        "speedup": drafted.ratio_to_plain,
        "tokens_per_second": drafted.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "tree_accepted_length": float(drafted.accepted_length or 0.0),
    }


@torch.no_grad()
def teacher_forced(
    head: DraftHead, batches: Sequence[Batch], teacher: Teacher, *, num_steps: int
) -> dict[str, list[float]]:
    """Agreement and overlap by depth over held-out rows."""
    agreeing, overlapping, counted = [0.0] * num_steps, [0.0] * num_steps, [0] * num_steps
    for batch in batches:
        plan = plan_rows(batch.loss_mask, batch.lengths, num_steps)
        _, figures = unrolled_loss(head, batch, plan, teacher, loss="lk", step_weights=[1.0] * num_steps, compare=True)
        for one in figures:
            agreeing[one.step] += float(one.figures.agrees.sum())
            overlapping[one.step] += float(one.figures.overlap.sum())
            counted[one.step] += len(one.rows)
    depths = list(itertools.takewhile(lambda depth: counted[depth], range(num_steps)))
    return {
        "agreement": [agreeing[depth] / counted[depth] for depth in depths],
        "overlap": [overlapping[depth] / counted[depth] for depth in depths],
    }


@torch.no_grad()
def simulate_rounds(head: DraftHead, batch: Batch, *, depth: int) -> list[int]:
    """Lengths of the rounds in which a greedy chain of `depth` drafts would have decoded one greedy answer.

    Computed from the training graph on the finished text (one sequence whose answer runs to its end). In float32 it
    must equal the decode loop's rounds exactly: a difference means that training and serving compute different things.
    """
    length = len(batch)
    start = int(batch.loss_mask.nonzero()[0])
    plan = plan_rows(batch.loss_mask, batch.lengths, depth)
    matched = []  # matched[step]: rows whose draft at this step is the text's own token
    for step, (rows, answer) in enumerate(zip(plan, head.unroll(batch, plan), strict=True)):
        drafted = head.target_ids[answer.logits().argmax(-1)]
        matched.append(set(rows[drafted == batch.token_ids[rows + 2 + step]].tolist()))
    rounds, position = [], start  # position of the last emitted token; prefill emits the answer's first
    while position + 1 < length:
        row = position - 1
        num_accepted = len(list(itertools.takewhile(bool, (row in rows for rows in matched))))
        emitted = min(num_accepted + 1, length - 1 - position)
        rounds.append(emitted)
        position += emitted
    return rounds
