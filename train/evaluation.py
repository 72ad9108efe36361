"""How good a head is on held-out text: acceptance by the real decode loop, by the training graph, and agreement.

The decode loop's accepted length chooses checkpoints (definitions: `infer.evaluate`), under the verification that the
recipe names (`eval.shape`, `eval.rule`): by default a plain chain under the match walk. Chains and trees have fixed
sizes, so that the figure depends on the head alone, not on the machine's speed.

    agreement   share of held-out labels at which the head's most likely token is the target's (both within the draft
                vocabulary), at each depth of the unrolling
    overlap     mean probability that a token sampled from the head is accepted, at each depth

`simulate` gets the rounds of such a chain from the training graph alone, over finished text. On text that the target
wrote greedily they are the decode loop's own; on other text they say how far a greedy chain would follow it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from configs.schema import EvalConfig
from heads.base import DraftHead
from heads.unroll import Batch
from infer.bench import benchmark
from infer.calibration import Observation, ProposalLog, Watched
from infer.cost import CostModel
from infer.drafters.base import TreeSettings
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.evaluate import EvalPrompt, Trace
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import Coupled
from train.unroll import Teacher, plan_rows, unrolled_loss

CHAIN_DEPTH = 5
TREE_NODES = 16
NUM_TIMED_PROMPTS = 5
_ROWS_PER_CHUNK = 256
"""Draft logits of more rows at once would take too much room."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A held-out prompt as the decode loop answered it; observations: what became of every draft that was verified
    (none where drafts were draws, whose shares are no guesses of the target's token)."""

    prompt: EvalPrompt
    temperature: float
    completion: Completion
    observations: tuple[Observation, ...]

    @property
    def trace(self) -> Trace:
        return Trace.of(self.completion, domain=self.prompt.domain, temperature=self.temperature)


def decoding_copy(head: DraftHead, target: TargetModel) -> DraftHead:
    """The head as it is served: in the target's dtype, on its device, apart from the one in training."""
    twin = copy.deepcopy(head).to(device=target.device, dtype=target.dtype)
    return twin.bind(target.weights).eval()


def drafted_shape(settings: EvalConfig) -> TreeSettings:
    if settings.shape == "chain":
        return TreeSettings.chain(CHAIN_DEPTH)
    return TreeSettings(max_nodes=TREE_NODES, adaptive=False)


def decode_answers(
    target: TargetModel, head: DraftHead, prompts: Sequence[EvalPrompt], settings: EvalConfig
) -> list[Answer]:
    """The first held-out prompts, answered at every temperature under the recipe's verification.

    Prompt i is drawn with seed `settings.seed + i`.
    """
    prompts = prompts[: settings.prompts]
    log = ProposalLog(head_drafter(decoding_copy(head, target), target))
    engine = Engine(
        target,
        log,
        max_requests=len(prompts),
        rule=settings.rule,
        tree=drafted_shape(settings),
        cost=CostModel.free(),
        observer=log.verified,
    )
    answers = []
    for temperature in settings.temperatures:
        log.watched = {}
        params = [
            SamplingParams(temperature=temperature, seed=settings.seed + index, max_tokens=settings.max_tokens)
            for index in range(len(prompts))
        ]
        completions = engine.generate([prompt.token_ids for prompt in prompts], params)
        guesses = params[0].greedy or Coupled in engine.rule.kinds
        answers += [
            Answer(
                prompt=prompt,
                temperature=temperature,
                completion=completion,
                observations=tuple(log.watched.get(completion.seed, Watched()).observations) if guesses else (),
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    return answers


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


@dataclass(frozen=True, kw_only=True)
class SimulatedAnswer:
    """An answer within sequence `sequence` of a batch: its tokens from `start` to before `stop`, and the rounds in
    which a greedy chain would have decoded them, the first token being the prefill's."""

    sequence: int
    start: int
    stop: int
    round_lengths: tuple[int, ...]
    observations: tuple[Observation, ...]


@torch.no_grad()
def simulate(head: DraftHead, batch: Batch, *, depth: int) -> list[SimulatedAnswer]:
    """Every answer of a batch as the training graph says that a greedy chain of `depth` drafts (or as many as the head
    can make) would decode it.

    In float32, on greedy text of the target, the rounds must equal the decode loop's exactly: a difference means that
    training and serving compute different things.
    """
    drafts = _greedy_drafts(head, batch, depth)
    answers = []
    first_row = 0
    for sequence, length in enumerate(batch.lengths):
        mask = batch.loss_mask[first_row : first_row + length].tolist()
        for start, stop in _runs(mask):
            lengths, observations = _walk(drafts, first_row + start, first_row + stop)
            answers.append(
                SimulatedAnswer(
                    sequence=sequence, start=start, stop=stop, round_lengths=lengths, observations=observations
                )
            )
        first_row += length
    return answers


Drafts = list[dict[int, tuple[bool, float]]]
"""By step, of each packed row that counts: whether its likeliest draft is the text's token, and its probability."""


def _greedy_drafts(head: DraftHead, batch: Batch, depth: int) -> Drafts:
    plan = plan_rows(batch.loss_mask, batch.lengths, min(depth, head.num_depths or depth))
    drafts: Drafts = []
    for step, (rows, answer) in enumerate(zip(plan, head.unroll(batch, plan), strict=True)):
        found: dict[int, tuple[bool, float]] = {}
        weight = answer.weight.to(answer.states.dtype)
        chunks = zip(rows.split(_ROWS_PER_CHUNK), answer.states.split(_ROWS_PER_CHUNK), strict=True)
        for part, states in chunks:
            probs, places = (states @ weight.T).float().softmax(-1).max(-1)
            hits = head.target_ids[places] == batch.token_ids[part + 2 + step]
            found.update(zip(part.tolist(), zip(hits.tolist(), probs.tolist(), strict=True), strict=True))
        drafts.append(found)
    return drafts


def _walk(drafts: Drafts, start: int, stop: int) -> tuple[tuple[int, ...], tuple[Observation, ...]]:
    """Rounds over the tokens of packed positions start..stop - 1, and what became of every draft that they reached."""
    lengths: list[int] = []
    observations: list[Observation] = []
    position = start  # of the token emitted last; the prefill emits the answer's first
    while position + 1 < stop:
        num_accepted = 0
        for depth, found in enumerate(drafts, start=1):
            if (draft := found.get(position - 1)) is None:
                break
            hit, share = draft
            observations.append(Observation(share, 0, depth, hit))
            if not hit:
                break
            num_accepted += 1
        emitted = min(num_accepted + 1, stop - 1 - position)
        lengths.append(emitted)
        position += emitted
    return tuple(lengths), tuple(observations)


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, stop) of every run of true values."""
    place = 0
    for value, run in itertools.groupby(mask):
        length = len(list(run))
        if value:
            yield place, place + length
        place += length
