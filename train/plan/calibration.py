"""How fast this machine is at a recipe: a few rows through the target, and a few steps of training on them, in seconds.

The steps are those of a run, but their head is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from heads.base import DraftHead
from infer.chat import Rendered
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from train.batch import computing_in, pack_batch
from train.corpus.dataset import TrainingData
from train.features import OnlineFeatures, RowFeatures
from train.reports.machine_use import GIGABYTE, memory_peaks
from train.setup import compute_dtype, make_head
from train.step import Objective, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World

SECONDS = 4.0
"""Of each measurement, about; one step or row is always made."""
MOST_ROWS = 32
DECODED_PROMPTS, DECODED_TOKENS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens a second, over all tokens of conversations (decoding: those written).

    first_steps: training with a single unrolled step; all_steps: with all of them. decoding: of a few prompts together;
    decoding_alone: of one.
    """

    features: float
    first_steps: float
    all_steps: float
    decoding: float
    decoding_alone: float
    peak_memory_bytes: int


def calibrate(config: RunConfig, target: TargetModel, data: TrainingData) -> Rates:
    """Measure. Takes some seconds; a slow machine some more, since nothing is measured by less than one row or step."""
    rows = _spread(data.rows, max(MOST_ROWS, config.optim.conversations_per_step))
    head = make_head(config, target, data).to(target.device).bind(target.weights).train()
    online = OnlineFeatures(
        target,
        head.config.taps,
        feature_dtype=config.train.feature_dtype,
        with_normalizer=config.train.teacher == "full",
    )
    features, features_rate = _measure_features(online, rows)
    trainer = _Trainer(config, target, head, rows[: len(features)], features)
    last = head.num_depths or config.train.ttt_steps
    all_steps = trainer.measure(last)
    first_steps = all_steps if head.num_depths or last == 1 else trainer.measure(1)
    return Rates(
        features=features_rate,
        first_steps=first_steps,
        all_steps=all_steps,
        decoding=_measure_decoding(target, data, DECODED_PROMPTS),
        decoding_alone=_measure_decoding(target, data, 1),
        peak_memory_bytes=_peak_memory(target),
    )


def _measure_features(online: OnlineFeatures, rows: Sequence[Rendered]) -> tuple[list[RowFeatures], float]:
    """Features of as many rows as the time allows (at least one), and tokens a second beyond the first row."""
    features = [online.get(rows[0])]
    num_tokens, start = 0, time.perf_counter()
    for row in rows[1:]:
        features.append(online.get(row))
        num_tokens += len(row.token_ids)
        if time.perf_counter() - start > SECONDS:
            break
    if not num_tokens:  # a single row: once more, without what the first call of a shape costs
        online.get(rows[0])
        num_tokens = len(rows[0].token_ids)
    return features, num_tokens / (time.perf_counter() - start)


class _Trainer:
    """Training steps on rows whose features are there."""

    def __init__(
        self,
        config: RunConfig,
        target: TargetModel,
        head: DraftHead,
        rows: Sequence[Rendered],
        features: Sequence[RowFeatures],
    ) -> None:
        self.config, self.target = config, target
        self.rows = list(rows)
        self.features = {id(row): one for row, one in zip(rows, features, strict=True)}
        self.dtype = compute_dtype(config, target)
        teacher = Teacher(weight=target.lm_head_weight.index_select(0, head.target_ids).to(self.dtype))
        self.objective = Objective(head, teacher, config.train)
        self.updater = LocalUpdater(self.objective, [list(head.parameters())], config.optim, World())
        self.visit = 0

    def measure(self, num_steps: int) -> float:
        """Tokens a second with so many unrolled steps, beyond a first step."""
        self._step(num_steps)
        num_tokens, start = 0, time.perf_counter()
        while not num_tokens or (time.perf_counter() - start < SECONDS and self.visit < 200):
            num_tokens += self._step(num_steps)
        return num_tokens / (time.perf_counter() - start)

    def _step(self, num_steps: int) -> int:
        optim = self.config.optim
        visits = range(self.visit, self.visit + optim.conversations_per_step)
        self.visit = visits.stop
        chosen = [(visit, self.rows[visit % len(self.rows)]) for visit in visits]
        plan = plan_step(chosen, num_steps=num_steps, settings=self.config.train)
        passes = plan.passes(World(), optim.batch_size)
        weights = [1.0 / max(1, count) for count in plan.num_labels]
        for number, part in enumerate(passes, start=1):
            features = [self.features[id(row)] for row in part.rows]
            batch = pack_batch(part.rows, features, device=self.target.device, dtype=self.dtype)
            with computing_in(self.dtype, self.target.device):
                loss, _ = self.updater.loss(**as_arguments(part, batch, weights))
            self.updater.backward(loss, is_last=number == len(passes))
        self.updater.update([0.0])
        return sum(len(row.token_ids) for _, row in chosen)


def _measure_decoding(target: TargetModel, data: TrainingData, num_prompts: int) -> float:
    """Of the plain target: a head's drafts and their verification come to about the same at first."""
    shortest = sorted(data.prompts, key=lambda prompt: len(prompt.token_ids))
    prompts = [list(prompt.token_ids) for prompt in shortest[:num_prompts]]
    engine = Engine(target, max_requests=len(prompts))
    requests = engine.submit(prompts, SamplingParams(max_tokens=DECODED_TOKENS, ignore_eos=True))
    engine.step()  # the prompts
    before = sum(len(request.output_ids) for request in requests)
    start = time.perf_counter()
    while any(request.finish_reason is None for request in requests):
        engine.step()
    num_tokens = sum(len(request.output_ids) for request in requests) - before
    return num_tokens / (time.perf_counter() - start)


def _peak_memory(target: TargetModel) -> int:
    peaks = memory_peaks(target.device)
    return round(GIGABYTE * peaks.get("peak_gpu_gb", peaks.get("peak_rss_gb", 0.0)))


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Evenly over all lengths, in a mixed order."""
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    count = min(count, len(by_length))
    chosen = [by_length[(2 * index + 1) * len(by_length) // (2 * count)] for index in range(count)]
    stride = next(step for step in (7, 11, 13, 1) if count % step or step == 1)
    return [chosen[index * stride % count] for index in range(count)]
