"""What a run measures of its head, again and again, on text that it does not train on.

An evaluation decodes held-out prompts with the head (or, of a target that cannot decode, simulates that from the
training graph: `simulated`), compares head and target on held-out text, and times both. What comes of it is one
`Evaluation`: the figures for `metrics.jsonl`, the curves of them, and what a head's card keeps.

Where the decode loop ran greedily, the training graph is asked how long the rounds of those very answers should have
been, drafting a chain. Training and serving compute the same function only if both lengths agree (`Parity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from configs.schema import RunConfig
from heads.base import DraftHead
from heads.unroll import Batch
from infer.calibration import Observation, Reliability
from infer.chat import Rendered
from infer.evaluate import Acceptance, AcceptanceReport, Trace
from infer.repetition import is_looping
from infer.target import TargetModel
from train.backbone import AdaptedBackbone
from train.batch import computing_in, pack_batch
from train.corpus.dataset import TrainingData, domain_of
from train.evaluation import (
    CHAIN_DEPTH,
    Answer,
    SimulatedAnswer,
    decode_answers,
    decode_speed,
    simulate,
    teacher_forced,
)
from train.features import FeatureSource, OnlineFeatures, StoredFeatures, StoredTarget, TrainingTarget
from train.reports.evaluation import Evaluation, Parity
from train.reports.machine_use import Stopwatch, memory_peaks
from train.reports.samples import Sample
from train.reports.statistics import ratio_standard_error
from train.reports.table import AcceptanceTable
from train.unroll import Teacher

EVALUATED_DEPTHS = 5
HELD_OUT_BATCH = 4
NUM_CHECKED = 8
"""Greedy answers whose rounds are simulated too."""

Decode = Callable[[TargetModel, DraftHead], AcceptanceReport]


class Evaluator:
    """Measures heads on the held-out part of `data`.

    decode: stands in for the decode loop; then nothing is timed, and there is nothing to show but its report.
    """

    def __init__(
        self,
        config: RunConfig,
        target: TrainingTarget,
        data: TrainingData,
        teacher: Teacher,
        *,
        dtype: torch.dtype,
        decode: Decode | None = None,
    ) -> None:
        self.config, self.target, self.data, self.teacher, self.dtype = config, target, data, teacher, dtype
        self._decode = decode
        self._rows = data.held_out[: config.eval.prompts]
        self._own_batches: list[Batch] = []

    def evaluate(
        self, head: DraftHead, target: TrainingTarget, step: int, *, backbone: AdaptedBackbone | None = None
    ) -> Evaluation:
        """`target` verifies the head's drafts; it is not the run's own where `backbone` trains an adapter for that."""
        watch = Stopwatch()
        with _evaluating(head):
            with watch("agreement"):
                batches = self._batches(head, target)
                num_steps = min(head.num_depths or EVALUATED_DEPTHS, EVALUATED_DEPTHS)
                with computing_in(self.dtype, target.device):
                    shares = teacher_forced(head, batches, self.teacher, num_steps=num_steps)
            evaluation = self._acceptance(head, target, batches, watch)
            if self._is_timed(evaluation):
                assert isinstance(target, TargetModel)
                with watch("speed"):
                    speed = decode_speed(target, head, self.data.prompts, self.config.eval)
                evaluation = replace(evaluation, speed=speed)
            drift = {} if backbone is None else backbone.drift(self._batches(head, self.target), batches)
        return replace(
            evaluation,
            agreement=tuple(shares["agreement"]),
            overlap=tuple(shares["overlap"]),
            drift=drift,
            memory=memory_peaks(target.device),
            seconds=watch.seconds,
        )

    def _is_timed(self, evaluation: Evaluation) -> bool:
        """Processes that share a target go in lockstep, which no clock may disturb."""
        return self._decode is None and not evaluation.simulated and not self.config.target.sharded

    # Acceptance

    def _acceptance(
        self, head: DraftHead, target: TrainingTarget, batches: Sequence[Batch], watch: Stopwatch
    ) -> Evaluation:
        if not isinstance(target, TargetModel):
            with watch("simulation"), computing_in(self.dtype, target.device):
                return self._simulated(head, batches)
        if self._decode is not None:
            with watch("decoding"):
                report = self._decode(target, head)
            return self._bare(report, num_prompts=min(len(self.data.prompts), self.config.eval.prompts))
        with watch("decoding"):
            answers = decode_answers(target, head, self.data.prompts, self.config.eval)
        num_tokens = sum(len(answer.completion.token_ids) for answer in answers)
        evaluation = self._decoded(answers)
        with watch("simulation"):
            parity = self._parity(head, target, self._greedy_chains(head, target, answers))
        return replace(
            evaluation, parity=parity, decode_tokens_per_second=num_tokens / max(1e-9, watch.seconds["decoding"])
        )

    def _greedy_chains(self, head: DraftHead, target: TargetModel, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Some greedy answers by chains, which is what the training graph knows: decoded anew where trees were
        drafted."""
        settings = self.config.eval
        if settings.shape == "tree" and 0 in settings.temperatures:
            plain = replace(
                settings, prompts=min(settings.prompts, NUM_CHECKED), temperatures=(0.0,), shape="chain", rule="match"
            )
            answers = decode_answers(target, head, self.data.prompts, plain)
        return [one for one in answers if one.temperature == 0][:NUM_CHECKED]

    def _bare(self, report: AcceptanceReport, *, num_prompts: int) -> Evaluation:
        pool = report.by_temperature.get(self.config.eval.temperatures[0], report.overall)
        return Evaluation(
            accepted_length=pool.accepted_length,
            report=report,
            agreement=(),
            overlap=(),
            num_prompts=num_prompts,
            shape=self.config.eval.shape,
            rule=self.config.eval.rule,
        )

    def _decoded(self, answers: Sequence[Answer]) -> Evaluation:
        traces = [answer.trace for answer in answers]
        temperatures = self.config.eval.temperatures
        samples = [
            Sample.of(
                self.target.tokenizer,
                prompt_ids=answer.prompt.token_ids,
                token_ids=answer.completion.token_ids,
                round_lengths=answer.completion.accepted_lengths[1:],
                domain=answer.prompt.domain,
                temperature=answer.temperature,
            )
            for answer in answers
            if answer.temperature == temperatures[0]
        ]
        return replace(
            self._bare(AcceptanceReport.of(traces), num_prompts=len(answers) // len(temperatures)),
            table=AcceptanceTable.of(traces),
            standard_errors=_standard_errors(traces),
            calibration=_calibration([(answer.temperature, answer.observations) for answer in answers]),
            samples=tuple(samples[: self.config.eval.samples]),
        )

    def _simulated(self, head: DraftHead, batches: Sequence[Batch]) -> Evaluation:
        """Every answer of the held-out rows, as a greedy chain would follow it."""
        found: list[tuple[Rendered, SimulatedAnswer]] = []
        rows = iter(self._rows)
        for batch in batches:
            own = [next(rows) for _ in batch.lengths]
            found += [(own[answer.sequence], answer) for answer in simulate(head, batch, depth=CHAIN_DEPTH)]
        traces = [_simulated_trace(row, answer) for row, answer in found]
        last = {id(row): (row, answer) for row, answer in found}  # of several answers of a row the last
        samples = [self._simulated_sample(row, answer) for row, answer in last.values()]
        return replace(
            self._bare(AcceptanceReport.of(traces), num_prompts=len(last)),
            simulated=True,
            table=AcceptanceTable.of(traces),
            standard_errors=_standard_errors(traces),
            calibration=_calibration([(0.0, answer.observations) for _, answer in found]),
            samples=tuple(samples[: self.config.eval.samples]),
        )

    def _simulated_sample(self, row: Rendered, answer: SimulatedAnswer) -> Sample:
        return Sample.of(
            self.target.tokenizer,
            prompt_ids=row.token_ids[: answer.start],
            token_ids=row.token_ids[answer.start : answer.stop],
            round_lengths=answer.round_lengths,
            domain=domain_of(row),
            temperature=0.0,
            simulated=True,
        )

    def _parity(self, head: DraftHead, target: TargetModel, answers: Sequence[Answer]) -> Parity | None:
        """The same answers by the training graph; None where none was greedy or none had a round."""
        answers = [answer for answer in answers if answer.trace.round_lengths]
        if not answers:
            return None
        lengths: list[int] = []
        for answer in answers:
            prompt, text = answer.prompt.token_ids, answer.completion.token_ids
            row = Rendered(token_ids=[*prompt, *text], loss_mask=[False] * len(prompt) + [True] * len(text))
            batch = self._pack(head, target, [row], with_normalizer=False)
            with computing_in(self.dtype, target.device):
                simulated = list(simulate(head, batch, depth=CHAIN_DEPTH))
            lengths += [length for one in simulated for length in one.round_lengths]
        decoded = Acceptance.of(length for answer in answers for length in answer.trace.round_lengths)
        return Parity.of(decoded, Acceptance.of(lengths))

    # Held-out text with the target's states

    def _batches(self, head: DraftHead, target: TrainingTarget) -> list[Batch]:
        """Kept for the run's own target; another one changes from one evaluation to the next."""
        if target is not self.target:
            return list(self._packed(head, target))
        self._own_batches = self._own_batches or list(self._packed(head, target))
        return self._own_batches

    def _packed(self, head: DraftHead, target: TrainingTarget) -> Iterator[Batch]:
        for first in range(0, len(self._rows), HELD_OUT_BATCH):
            yield self._pack(head, target, self._rows[first : first + HELD_OUT_BATCH])

    def _pack(
        self, head: DraftHead, target: TrainingTarget, rows: Sequence[Rendered], *, with_normalizer: bool = True
    ) -> Batch:
        """Outside of any autocast: it is the head that computes in the run's dtype, never the target."""
        features = states_of(target, head.config.taps, with_normalizer=with_normalizer).get_many(rows)
        return pack_batch(rows, features, device=target.device, dtype=self.dtype)


@contextmanager
def _evaluating(head: DraftHead) -> Iterator[None]:
    was_training = head.training
    head.eval()
    try:
        yield
    finally:
        head.train(was_training)


def states_of(target: TrainingTarget, taps: Sequence[int], *, with_normalizer: bool = True) -> FeatureSource:
    """The target's states for held-out text, unrounded where they are computed."""
    if isinstance(target, StoredTarget):
        return StoredFeatures(target, taps, with_normalizer=with_normalizer)
    assert isinstance(target, TargetModel)
    return OnlineFeatures(target, taps, with_normalizer=with_normalizer)


def _simulated_trace(row: Rendered, answer: SimulatedAnswer) -> Trace:
    token_ids = row.token_ids[answer.start : answer.stop]
    return Trace(
        domain=domain_of(row),
        temperature=0.0,
        num_prompt_tokens=answer.start,
        num_tokens=len(token_ids),
        round_lengths=answer.round_lengths,
        looping=is_looping(token_ids),
    )


def _standard_errors(traces: Sequence[Trace]) -> dict[float, float]:
    errors = {}
    for temperature in dict.fromkeys(trace.temperature for trace in traces):
        own = [trace for trace in traces if trace.temperature == temperature and trace.round_lengths]
        error = ratio_standard_error(
            [sum(trace.round_lengths) for trace in own], [len(trace.round_lengths) for trace in own]
        )
        if error is not None:
            errors[temperature] = error
    return errors


def _calibration(parts: Sequence[tuple[float, Sequence[Observation]]]) -> dict[float, Reliability]:
    """By temperature; draft probabilities at a temperature above 0 are those given the noise of the position."""
    pools: dict[float, list[Observation]] = {}
    for temperature, observations in parts:
        pools.setdefault(temperature, []).extend(observations)
    return {temperature: Reliability.of(pool) for temperature, pool in pools.items() if pool}
