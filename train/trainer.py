"""Training a draft head on its target: the loop, its checkpoints, and what a run leaves behind.

    runs/NAME/config.yaml       the whole configuration
             last/ best/        augmented model folders; last/trainer.pt holds the state that a resumed run needs
             checkpoints/       earlier states, in case the last is damaged
             metrics.jsonl      every figure, with markers where a run was resumed
             summary.json acceptance.png report.html wandb/

A step is: fetch the rows' features, unroll the head over them, sum gradients, update. The target stays as it is, unless
the recipe trains an adapter for it (`train.backbone`), which then goes where the head goes. All that decides a step
follows from the configuration, the weights, the optimiser's state and `Progress`; random choices are drawn from (seed,
visit). So a run resumed from any checkpoint takes the same steps as one that was never stopped: bit for bit on a CPU
with a budget in steps or epochs and as many processes, and over the same rows with another number of them or other
batches. (A budget in minutes goes on from the minutes used; its schedule follows the clock.)

Of several processes the main one writes, prints and decodes; the others wait where it does.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.loading import write_config
from configs.schema import RunConfig
from heads.base import DraftHead
from heads.checkpoint import CARD_FILE, HeadCard, load_head, read_card, recover_folder, save_head
from heads.lora import LORA
from heads.unroll import Batch
from infer.adapter import BACKBONE
from infer.chat import Rendered
from infer.evaluate import AcceptanceReport
from infer.machine import dtype_name
from infer.target import TargetModel
from train.batch import computing_in, pack_batch
from train.checkpoints import Checkpoints, write_checksums
from train.corpus.dataset import TrainingData, load_data, source_of
from train.evaluator import Evaluator
from train.features import TrainingTarget, make_features
from train.features.ahead import FeaturesAhead, NoStreams, overlaps, streams_for
from train.features.source import refuse_infinite
from train.head_adapter import adapt_head
from train.memory import keep_freed_memory
from train.reports.evaluation import Evaluation
from train.reports.machine_use import Laps, clock_for
from train.reports.metrics import read_metrics
from train.reports.run_log import RunLog, open_log
from train.reports.tracking import Tracker
from train.run_state import Best, RunState
from train.schedule import fraction_done, is_due, learning_rate, num_unrolled
from train.setup import check_lengths, compute_dtype, label_coverage, load_target, make_backbone, make_head
from train.step import Objective, StepPlan, StepTotals, as_arguments, check_shares, check_step_weights, plan_step
from train.stop import StopRequest
from train.unroll import Teacher
from train.updater import make_updater
from train.world import World

NOTICE_SECONDS = 10.0
"""Least time between two progress lines; `metrics.jsonl` has every `train.log_every` steps."""
Decode = Callable[[TargetModel, DraftHead], AcceptanceReport]
Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Figures of one optimiser step over all processes, for the log. times: seconds by part, of this process."""

    loss: float
    gradient_norm: float
    lr: float
    num_steps: int
    loss_by_depth: tuple[float, ...]
    overlap_by_depth: tuple[float, ...]
    num_tokens: int
    seconds: float
    times: Mapping[str, float]
    backbone: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint to go on from, read from `place`."""

    place: Path
    state: RunState
    head: DraftHead


def train(
    config: RunConfig,
    *,
    runs_folder: Path | str = "runs",
    resume: bool = False,
    target: TrainingTarget | None = None,
    evaluate: Decode | None = None,
    tracker: Tracker | None = None,
    notice: Notice = print,
    world: World | None = None,
) -> dict[str, Any]:
    """Run the recipe and return its summary. `target`, `evaluate` (decoding) and `tracker` stand in for the real ones.

    Started by `torchrun` or `deepspeed` this is one of several processes (`world`); all return the same summary.
    """
    world = World.from_environment() if world is None else world
    check_shares(config.optim, processes=world.size)
    notice = world.voice(notice)
    world.start()
    folder = Path(runs_folder) / config.name
    checkpoints = Checkpoints(folder, keep=config.train.keep_checkpoints)
    with checkpoints.claimed() if world.is_main else nullcontext():
        if world.is_main and not resume:
            _refuse_existing(checkpoints)
        resumed = world.broadcast(_read_checkpoint(checkpoints, config, notice) if resume and world.is_main else None)
        if target is None:
            dtype = None if resumed is None else resumed.state.identity["target_dtype"]
            target = load_target(config, world, dtype=dtype)
        else:
            check_lengths(config, target)
        data = load_data(
            config.data,
            target.tokenizer,
            seed=config.train.seed,
            max_prompt_tokens=target.max_length - config.eval.max_tokens,
        )
        if torch.device(target.device).type == "cpu":
            keep_freed_memory()
        trainer = Trainer(config, target, data, checkpoints, world, resumed=resumed, decode=evaluate, notice=notice)
        with open_log(config, folder, world, run_id=trainer.state.run_id, tracker=tracker, notice=notice) as log:
            return trainer.run(log)


class Trainer:
    """Holds the parts of one run; `run` is the loop."""

    def __init__(
        self,
        config: RunConfig,
        target: TrainingTarget,
        data: TrainingData,
        checkpoints: Checkpoints,
        world: World,
        *,
        resumed: Resumed | None,
        decode: Decode | None,
        notice: Notice,
    ) -> None:
        self.config, self.target, self.data, self.world, self.notice = config, target, data, world, notice
        self.checkpoints, self.folder = checkpoints, checkpoints.folder
        self.dtype = compute_dtype(config, target)
        identity = self._identity()
        if resumed is None:
            self.state = RunState(config=config, identity=identity, key=world.broadcast(uuid.uuid4().hex))
        else:
            self.state = resumed.state
            self.state.check_identity(identity, self.folder)
            self.state.config = config
        checkpoints.key = self.state.key
        self.head = self._first_head() if resumed is None or config.head.lora_rank is not None else resumed.head
        self.head.to(target.device).bind(target.weights).train()
        check_step_weights(config.train, self.head.num_depths)
        place = None if resumed is None else resumed.place
        self.coverage = label_coverage(data, self.head.vocabulary)
        self.adapter = adapt_head(config, self.head, world, resumed=place)
        self.backbone = make_backbone(config, target, self.head, resumed=place)
        lm_head_rows = target.lm_head_weight.index_select(0, self.head.target_ids)
        self.teacher = Teacher(weight=lm_head_rows.to(self.dtype))
        self.objective = Objective(self.head, self.teacher, config.train)
        own = list(self.head.parameters()) if self.adapter is None else self.adapter.parameters
        groups = [own] + ([] if self.backbone is None else [self.backbone.parameters])
        self.updater = make_updater(config, self.objective, groups, world, target.device)
        if resumed is not None:
            self.updater.load(self.state.optimizer)
            data.visits.seek(self.state.progress.visits, self.state.visits)
        self._overlaps = overlaps(config.train.overlap, target)
        self.features = make_features(
            config,
            target,
            taps=self.head.config.taps,
            folder=self.folder.parent,
            world=world,
            rows=None if data.num_rows is None else [*data.rows, *data.held_out],
            looks=not self._overlaps,
            notice=notice,
        )
        self.ahead = FeaturesAhead(self.features, streams_for(target.device) if self._overlaps else NoStreams())
        self._unseen: list[tuple[Rendered, torch.Tensor]] = []
        self._clock = clock_for(target.device)
        self.evaluator = Evaluator(config, target, data, self.teacher, dtype=self.dtype, decode=decode)
        self.log = RunLog.silent()
        self._records: list[StepRecord] = []
        self._evaluated_step = self._saved_step = -1
        self._noticed = -NOTICE_SECONDS

    # The loop

    def run(self, log: RunLog) -> dict[str, Any]:
        self.log = log
        self._announce()
        with StopRequest() as stop:
            status = self._loop(stop)
            if status != "interrupted" and self._evaluated_step != self.state.progress.step:
                self._evaluate()
            if self._saved_step != self.state.progress.step:
                self._save_last(is_final=True)
        return self.world.broadcast(self._finish(status) if self.world.is_main else {})

    def _loop(self, stop: StopRequest) -> str:
        """Steps until the budget is used, patience is at its end, or someone asks to stop; says which."""
        while (before := self._fraction()) < 1:
            record = self._step(before)
            self._log(record)
            if self._evaluation_due(before):
                self._evaluate()
                self._save_last()
                if self._out_of_patience():
                    return "stopped early"
            elif self._save_due(record):
                self._save_last()
            if any(self.world.max([float(stop.requested)])):  # of any process
                return "interrupted"
        return "finished"

    def _step(self, fraction: float) -> StepRecord:
        start = time.perf_counter()
        config, progress = self.config, self.state.progress
        num_steps = self.head.num_depths or num_unrolled(config.train, fraction)
        plan = plan_step(self._visits_from(progress.visits), num_steps=num_steps, settings=config.train)
        rates = [lr := learning_rate(progress, config.optim, fraction)]
        rates += [] if self.backbone is None else [self.backbone.learning_rate(lr, fraction)]
        is_joint = self.backbone is not None and self.backbone.trains(fraction)
        laps = Laps(self._clock)
        own = self._gradients(plan, laps, is_joint=is_joint)
        gradient_norm = self.updater.update(rates) if plan.num_labels[0] else 0.0
        laps.lap("update")
        totals = own.over(self.world)  # read when all is done, so that nothing waits for a number in between
        self._check_finite(totals.loss, gradient_norm, plan)
        (seconds,) = self.world.max([time.perf_counter() - start])
        self.state.progress = progress.advanced(visits=len(plan.visits), tokens=int(totals.tokens), seconds=seconds)
        return StepRecord(
            loss=totals.loss,
            gradient_norm=gradient_norm,
            lr=lr,
            num_steps=num_steps,
            loss_by_depth=totals.loss_by_depth,
            overlap_by_depth=totals.overlap_by_depth,
            num_tokens=int(totals.tokens),
            seconds=seconds,
            times={"features": 0.0, "head": 0.0, **laps.seconds()},
            backbone={"backbone_loss": totals.backbone_loss, "backbone_lr": rates[1]} if is_joint else {},
        )

    def _gradients(self, plan: StepPlan, laps: Laps, *, is_joint: bool) -> StepTotals:
        """Add up this process's part of the step's gradients; what its rows showed. `laps`: of features and head."""
        weights = plan.label_weights(self.config.train)
        totals = StepTotals.empty(plan.num_steps)
        passes = plan.passes(self.world, self.config.optim.batch_size)
        self._unseen = []
        joint = None
        if self.backbone is not None and is_joint:
            joint = self.backbone.begin([visit.row for visit in plan.visits if visit.has_labels])
        for number, part in enumerate(passes, start=1):
            batch = self._pack(part.rows)
            laps.lap("features")
            with computing_in(self.dtype, self.target.device):
                adapted, kept = (batch, None) if joint is None else joint.forward(batch, weight=part.weight)
                loss, figures = self.updater.loss(**as_arguments(part, adapted, weights))
            loss = loss if kept is None else loss + kept
            self.updater.backward(loss, is_last=number == len(passes))
            if part.weight:
                totals.add(loss, len(batch), figures)
            laps.lap("head")
            if self._overlaps:
                self.ahead.begin(passes[number].rows if number < len(passes) else self._rows_of_next_step())
                laps.lap("features")
        totals.backbone_loss = 0.0 if joint is None else joint.loss
        return totals

    def _check_finite(self, loss: float, gradient_norm: float, plan: StepPlan) -> None:
        step = self.state.progress.step
        if math.isfinite(loss) and (math.isfinite(gradient_norm) or self.updater.backed_off):
            return
        refuse_infinite(self._unseen)
        sources = ", ".join(source_of(visit.row) for visit in plan.visits)
        raise ValueError(
            f"step {step} has loss {loss} and gradient norm {gradient_norm}, on rows {sources}; "
            "lower optim.lr or look at these rows. The last checkpoint is untouched: --resume goes on from it"
        )

    # Data

    def _visits_from(self, first: int) -> list[tuple[int, Rendered]]:
        """Of a step, with their numbers."""
        count = self.config.optim.conversations_per_step
        return [(visit, self.data.visits.at(visit)) for visit in range(first, first + count)]

    def _pack(self, rows: Sequence[Rendered]) -> Batch:
        features = self.ahead.get_many(rows)
        self._unseen += [
            (row, one.is_finite) for row, one in zip(rows, features, strict=True) if one.is_finite is not None
        ]
        return pack_batch(rows, features, device=self.target.device, dtype=self.dtype)

    def _rows_of_next_step(self) -> list[Rendered]:
        """Of this process's first pass in it, as far as there is a next step and one can know."""
        settings, progress = self.config.train, self.state.progress
        if settings.steps is not None and progress.step + 1 >= settings.steps:
            return []
        following = self._visits_from(progress.visits + self.config.optim.conversations_per_step)
        passes = plan_step(following, num_steps=1, settings=settings).passes(self.world, self.config.optim.batch_size)
        return passes[0].rows if passes else []

    # Evaluation

    def _evaluate(self) -> None:
        """Held-out acceptance; the head is saved to best/ if it is the best so far."""
        self.ahead.settle()
        step = self.state.progress.step
        self._evaluated_step, self._saved_step = step, -1  # whether it was the best belongs to the state
        with self.updater.whole():
            if self.world.is_main or self.config.target.sharded:
                head = self._standalone_head()
                target = self.target if self.backbone is None else self.backbone.served(step)
                evaluation = self.evaluator.evaluate(head, target, step, backbone=self.backbone)
                if self.world.is_main:
                    self._keep_if_best(head, evaluation)
        self.state.stale_evaluations = self.world.broadcast(self.state.stale_evaluations)

    def _keep_if_best(self, head: DraftHead, evaluation: Evaluation) -> None:
        step = self.state.progress.step
        self.log.evaluation(self._position(), evaluation)
        best = Best.read(self.folder)
        is_best = best is None or best.beaten_by(evaluation.accepted_length, step)
        self.state.stale_evaluations = 0 if is_best else self.state.stale_evaluations + 1
        self.notice(f"step {step}: {evaluation.describe()}{' (best)' if is_best else ''}")
        if is_best:
            self._save(lambda: self._write_best(head, evaluation), "the best head", is_final=False)

    def _write_best(self, head: DraftHead, evaluation: Evaluation) -> None:
        card = self._card(evaluation.for_card())
        save_head(self.checkpoints.best, head, card, add_files=self._write_adapters)

    def _standalone_head(self) -> DraftHead:
        """The head apart from whatever trains it; within `updater.whole()`."""
        if self.adapter is not None:
            return self.adapter.merged()
        return self.head if self.config.deepspeed.stage is None else self.head.twin()

    def _out_of_patience(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.state.stale_evaluations >= patience

    # What is due

    def _fraction(self) -> float:
        return fraction_done(self.state.progress, self.config.train, self.data.num_rows)

    def _evaluation_due(self, before: float) -> bool:
        settings, step = self.config.train, self.state.progress.step
        if settings.eval_every is not None:
            return is_due(settings.eval_every, step - 1, step)
        return is_due(1 / settings.num_evaluations, before, self._fraction())

    def _save_due(self, record: StepRecord) -> bool:
        settings, progress = self.config.train, self.state.progress
        minutes = progress.seconds / 60
        return is_due(settings.save_every, progress.step - 1, progress.step) or is_due(
            settings.save_minutes, minutes - record.seconds / 60, minutes
        )

    # What is written

    def _log(self, record: StepRecord) -> None:
        self._records.append(record)
        if len(self._records) >= self.config.train.log_every:
            self._flush_records()

    def _flush_records(self) -> None:
        records, self._records = self._records, []
        if not records:
            return
        record, seconds = records[-1], sum(one.seconds for one in records)
        values: dict[str, Any] = {
            "loss": sum(one.loss for one in records) / len(records),
            "gradient_norm": record.gradient_norm,
            "lr": record.lr,
            "unrolled_steps": record.num_steps,
            "tokens_per_second": sum(one.num_tokens for one in records) / seconds,
            **{f"{part}_share": sum(one.times[part] for one in records) / seconds for part in record.times},
            **record.backbone,
            "loss_by_depth": record.loss_by_depth,
            "overlap_by_depth": record.overlap_by_depth,
        }
        self.log.training(self._position(), values)
        now = time.perf_counter()
        if now - self._noticed < NOTICE_SECONDS:
            return
        self._noticed = now
        overlap = " ".join(f"{value:.3f}" for value in record.overlap_by_depth)
        self.notice(
            f"step {self.state.progress.step}  {self._fraction():4.0%}  loss {values['loss']:.3f}  "
            f"overlap {overlap}  {values['tokens_per_second']:,.0f} tokens/s  {self._remaining()}"
        )

    def _remaining(self) -> str:
        fraction, seconds = self._fraction(), self.state.progress.seconds
        minutes = seconds * (1 - fraction) / max(fraction, 1e-9) / 60
        return f"{minutes:.1f} min left"

    def _position(self) -> dict[str, Any]:
        progress, num_rows = self.state.progress, self.data.num_rows
        return {
            "step": progress.step,
            "epoch": None if num_rows is None else progress.visits / num_rows,
            "tokens": progress.tokens,
            "train_seconds": progress.seconds,
        }

    def _announce(self) -> None:
        account, progress, world = self.data.account, self.state.progress, self.world
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_config(self.config, self.folder / "config.yaml")
        if progress.step:
            self.log.resume(self._position())
            self.notice(f"resumed at step {progress.step} ({self._fraction():.0%} of the budget used)")
        self.state.run_id = self.log.run_id or self.state.run_id
        size = sum(parameter.numel() for parameter in self.head.parameters())
        self.notice(
            f"{len(self.data.rows)} rows, {self.data.num_tokens:,} tokens ({account.get('label_tokens', 0):,} labels); "
            f"{len(self.data.prompts)} held-out prompts; head of {size / 1e6:.1f}M parameters, "
            f"draft vocabulary {len(self.head.vocabulary):,}, taps {list(self.head.config.taps)}, "
            f"{self.target.device} {dtype_name(self.dtype)}" + (f", {world.size} processes" if world.size > 1 else "")
        )
        for adapter in (self.backbone, self.adapter):
            if adapter is not None:
                self.notice(adapter.describe())
        steps, warm_up = self.config.train.steps, self.config.optim.warmup_steps
        if steps is not None and 2 * warm_up > steps:
            self.notice(
                f"warning: the learning rate rises for {warm_up} of {steps} steps and hardly gets to optim.lr: "
                f"set optim.warmup_steps={steps // 10}"
            )
        self.log.about(
            {
                "name": self.config.name,
                "data": account,
                "draft_vocab_size": len(self.head.vocabulary),
                "label_coverage": self.coverage,
                "parameters": size,
            }
        )

    def _card(self, acceptance: Mapping[str, Any]) -> HeadCard:
        config, backbone = self.config, self.backbone
        return HeadCard(
            target=self.target.reference if backbone is None else backbone.reference(self.state.progress.step),
            family=config.head.type,
            acceptance=acceptance,
            training={
                "run": config.name,
                **self._position(),
                "conversations": len(self.data.rows),
                "data_hash": self.state.identity["data_hash"],
                "loss": config.train.loss,
                "target_dtype": self.state.identity["target_dtype"],
                **({} if backbone is None else {BACKBONE: backbone.facts()}),
                **({} if self.adapter is None else {LORA: self.adapter.facts()}),
            },
            vocabulary={"label_coverage": self.coverage},
        )

    def _save_last(self, *, is_final: bool = False) -> None:
        self.features.flush()
        self._flush_records()  # or a killed run's log would lack what came before its checkpoint
        optimizer = self.updater.state()
        is_saved = True
        with self.updater.whole():
            if self.world.is_main:
                self.state.optimizer = optimizer
                self.state.visits = self.data.visits.state(self.state.progress.visits)
                is_saved = self._save(self._write_last, "a checkpoint", is_final=is_final)
        if self.world.broadcast(is_saved):
            self._saved_step = self.state.progress.step

    def _write_last(self) -> None:
        self.checkpoints.check_room()
        save_head(
            self.checkpoints.last,
            self._standalone_head(),
            self._card({}),
            add_files=self._write_state,
            former=self.checkpoints.place_for_former(),
        )
        self.checkpoints.rotate()

    def _save(self, write: Callable[[], object], what: str, *, is_final: bool) -> bool:
        """Whether it held. A full disk does not end a run that may yet find room; only at its end is it an error."""
        try:
            write()
        except OSError as error:
            if is_final:
                raise
            self.notice(f"step {self.state.progress.step}: {what} could not be saved ({error}); going on")
            return False
        return True

    def _write_state(self, folder: Path) -> None:
        self.state.write(folder)
        self._write_adapters(folder)
        write_checksums(folder, key=self.state.key, step=self.state.progress.step, but=(CARD_FILE,))

    def _write_adapters(self, folder: Path) -> None:
        for adapter in (self.backbone, self.adapter):
            if adapter is not None:
                adapter.write(folder)

    def _finish(self, status: str) -> dict[str, Any]:
        folder = self.checkpoints.best
        best = {**read_card(folder).training, **read_card(folder).acceptance} if folder.exists() else None
        summary = {
            "name": self.config.name,
            "status": status,
            **self._position(),
            "minutes": self.state.progress.seconds / 60,
            "accepted_length": best["accepted_length"] if best else None,
            "speedup": best.get("speed", {}).get("speedup") if best else None,
            "best": best,
            "data": self.data.account,
            "draft_vocab_size": len(self.head.vocabulary),
            "label_coverage": self.coverage,
        }
        return self.log.finish(summary)

    # Who this is

    def _identity(self) -> dict[str, str]:
        """The same in all processes, or one of them trains on something else."""
        identity = {
            "data_hash": self.data.data_hash,
            "target_fingerprint": self.target.fingerprint,
            "target_dtype": dtype_name(self.target.dtype),
        }
        for rank, other in enumerate(self.world.gather(identity)):
            if other != identity:
                raise ValueError(
                    f"process {rank} has {other}, process {self.world.rank} {identity}: give all nodes the same data "
                    "files and target"
                )
        return identity

    def _first_head(self) -> DraftHead:
        """The main process's, in every process."""
        return self.world.broadcast(make_head(self.config, self.target, self.data))


def _read_checkpoint(checkpoints: Checkpoints, config: RunConfig, notice: Notice) -> Resumed:
    place = checkpoints.newest(notice)
    if place is None:
        has_best = recover_folder(checkpoints.best).exists()
        remedy = (
            f"start a new run from its best head (another name, head.init_from={checkpoints.best})"
            if has_best
            else "leave out --resume to start a run there"
        )
        raise ValueError(f"there is nothing to resume in {checkpoints.folder}: {remedy}")
    state = RunState.read(place)
    state.check_config(config)
    if state.config.name != config.name:  # a copied folder is a run of its own
        state.run_id = None
    if not recover_folder(checkpoints.best).exists() and any(
        record["event"] == "evaluation" for record in read_metrics(checkpoints.folder)
    ):
        notice(f"{checkpoints.best} does not exist: the next evaluation is taken as the best so far")
    _check_best(checkpoints)
    return Resumed(place=place, state=state, head=load_head(place)[0])


def _check_best(checkpoints: Checkpoints) -> None:
    """Now, and not at the first evaluation, whose steps would be lost."""
    if Best.read(checkpoints.folder) is None:
        return
    try:
        load_head(checkpoints.best)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}. Move {checkpoints.best} away, and the run goes on without a best head") from error


def _refuse_existing(checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder
    if recover_folder(checkpoints.last).exists() or checkpoints.former():
        raise ValueError(
            f"{folder} already holds a run: resume it (--resume), choose another name (name=...), or move it away"
        )
    if recover_folder(checkpoints.best).exists():  # killed in its first evaluation, before the first checkpoint
        raise ValueError(
            f"{folder} already holds a run that died before its first checkpoint: choose another name (name=...), "
            f"start from its head (head.init_from={checkpoints.best}), or move it away"
        )
