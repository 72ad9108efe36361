"""Training a draft head on its target: the loop, its checkpoints, and what a run leaves behind.

    runs/NAME/config.yaml       the whole configuration
             last/ best/        augmented model folders; last/trainer.pt holds the state that a resumed run needs
             metrics.jsonl      every figure, with markers where a run was resumed
             summary.json acceptance.png wandb/

A step is: fetch the rows' features, unroll the head over them, sum gradients, update. The target stays as it is, unless
the recipe trains an adapter for it (`train.backbone`), which then goes where the head goes. All that decides a step
follows from the configuration, the weights, the optimiser's state and `Progress`; random choices are drawn from (seed,
step). So a run resumed from any checkpoint takes the same steps as one that was never stopped: bit for bit on a CPU
with a budget in steps or epochs. (A budget in minutes goes on from the minutes used; its schedule follows the clock.)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.loading import write_config
from configs.schema import RunConfig
from heads.base import DraftHead
from heads.checkpoint import HeadCard, load_head, read_card, recover_folder, save_head
from heads.unroll import Batch
from infer.adapter import BACKBONE
from infer.chat import Rendered
from infer.evaluate import AcceptanceReport
from infer.machine import dtype_name
from infer.target import TargetModel
from train.corpus.dataset import TrainingData, VisitOrder, load_data, source_of
from train.evaluation import decode_acceptance, decode_speed, teacher_forced
from train.features import CachedFeatures, FeatureSource, OnlineFeatures, rows_hash
from train.reports.report import plot_run
from train.reports.tracking import MetricsFile, NoTracker, Tracker, open_tracker
from train.run_state import Best, RunState
from train.schedule import Progress, fraction_done, is_due, learning_rate, num_unrolled
from train.setup import compute_dtype, label_coverage, load_target, make_backbone, make_head
from train.stop import StopRequest
from train.unroll import StepFigures, Teacher, plan_rows, unrolled_loss

EVALUATED_DEPTHS = 5
HELD_OUT_BATCH = 4
NOTICE_SECONDS = 10.0
"""Least time between two progress lines; `metrics.jsonl` has every `train.log_every` steps."""

_ACCEPTANCE_KEYS = ("accepted_length", "acceptance", "agreement", "overlap", "speed", "drift")

Evaluate = Callable[[TargetModel, DraftHead], AcceptanceReport]
Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Figures of one optimiser step, for the log."""

    loss: float
    gradient_norm: float
    lr: float
    num_steps: int
    loss_by_depth: tuple[float, ...]
    overlap_by_depth: tuple[float, ...]
    num_tokens: int
    seconds: float
    backbone: Mapping[str, float] = field(default_factory=dict)


def train(
    config: RunConfig,
    *,
    runs_folder: Path | str = "runs",
    resume: bool = False,
    target: TargetModel | None = None,
    evaluate: Evaluate | None = None,
    tracker: Tracker | None = None,
    notice: Notice = print,
) -> dict[str, Any]:
    """Run the recipe and return its summary. `target`, `evaluate` and `tracker` stand in for the real ones."""
    folder = Path(runs_folder) / config.name
    state = RunState.read(folder) if resume else None
    if state is not None:
        state.check_config(config)
    else:
        _refuse_existing(folder)
    if target is None:
        chosen = state.identity["target_dtype"] if state is not None and config.target.dtype == "auto" else None
        target = load_target(config, dtype=chosen)
    data = load_data(
        config.data,
        target.tokenizer,
        seed=config.train.seed,
        max_prompt_tokens=target.max_length - config.eval.max_tokens,
    )
    trainer = Trainer(config, target, data, folder=folder, state=state, evaluate=evaluate, notice=notice)
    trainer.tracker = tracker or open_tracker(
        config.tracking,
        folder=folder,
        name=config.name,
        config=asdict(config),
        run_id=trainer.state.run_id,
        notice=notice,
    )
    return trainer.run()


class Trainer:
    """Holds the parts of one run; `run` is the loop."""

    def __init__(
        self,
        config: RunConfig,
        target: TargetModel,
        data: TrainingData,
        *,
        folder: Path,
        state: RunState | None,
        evaluate: Evaluate | None,
        notice: Notice,
    ) -> None:
        """`state` is that of the checkpoint to go on from; its head is read from beside it."""
        self.config, self.target, self.data, self.folder, self.notice = config, target, data, folder, notice
        self.evaluate = evaluate or self._decode
        self.measure_speed = self._time_decoding if evaluate is None else lambda target, head: {}
        self.dtype = compute_dtype(config, target)
        identity = {
            "data_hash": rows_hash(data.rows),
            "target_fingerprint": target.fingerprint,
            "target_dtype": dtype_name(target.dtype),
        }
        if state is not None:
            state.check_identity(identity, folder)
        head = make_head(config, target, data) if state is None else load_head(folder / "last")[0]
        self.head = head.to(target.device).bind(target.weights).train()
        self.backbone = make_backbone(
            config, target, self.head, resumed=None if state is None else recover_folder(folder / "last")
        )
        groups = [list(self.head.parameters())] + ([] if self.backbone is None else [self.backbone.parameters])
        self.parameters = [parameter for group in groups for parameter in group]
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups],
            lr=config.optim.lr,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        if state is not None:
            self.optimizer.load_state_dict(state.optimizer)
        self.state = state or RunState(config=config, identity=identity)
        self.state.config = config
        lm_head_rows = target.lm_head_weight.index_select(0, self.head.target_ids)
        self.teacher = Teacher(weight=lm_head_rows.to(self.dtype))
        self.features = self._make_features()
        self.order = VisitOrder(len(data.rows), seed=config.train.seed)
        self.tracker: Tracker = NoTracker()
        self.metrics = MetricsFile(folder)
        self._held_out: list[Batch] = []
        self._records: list[StepRecord] = []
        self._evaluated_step = -1
        self._noticed = -NOTICE_SECONDS

    # The loop

    def run(self) -> dict[str, Any]:
        self._announce()
        with StopRequest() as stop:
            status = self._loop(stop)
            if status != "interrupted" and self._evaluated_step != self.state.progress.step:
                self._evaluate()
            self._save_last()
        return self._finish(status)

    def _loop(self, stop: StopRequest) -> str:
        """Steps until the budget is used, patience is at its end, or someone asks to stop; says which."""
        while (before := self._fraction()) < 1:
            record = self._step(before)
            self._log(record)
            if self._evaluation_due(before):
                self._evaluate()
                self._save_last()
                if self._should_stop():
                    return "stopped early"
            elif self._save_due(record):
                self._save_last()
            if stop.requested:
                return "interrupted"
        return "finished"

    def _step(self, fraction: float) -> StepRecord:
        start = time.perf_counter()
        config, progress = self.config, self.state.progress
        num_steps = self.head.num_depths or num_unrolled(config.train, fraction)
        batches = self._next_batches(progress)
        generator = torch.Generator().manual_seed(config.train.seed * 1_000_003 + progress.step)
        plans = [
            plan_rows(batch.loss_mask, batch.lengths, num_steps, keep_share=config.train.ttt_keep, generator=generator)
            for batch in batches
        ]
        num_labels = [sum(len(plan[step]) for plan in plans) for step in range(num_steps)]
        weights = [config.train.step_decay**step / max(1, count) for step, count in enumerate(num_labels)]
        if not num_labels[0]:
            self.notice(f"step {progress.step}: no label in any of its rows, nothing is learnt")
        joint = self.backbone.begin(batches) if self.backbone is not None and self.backbone.trains(fraction) else None
        figures: list[StepFigures] = []
        loss = 0.0
        for batch, plan in zip(batches, plans, strict=True):
            if not len(plan[0]):
                continue
            with self._autocast():
                batch, kept = (batch, 0.0) if joint is None else joint.forward(batch)
                part, part_figures = unrolled_loss(
                    self.head,
                    batch,
                    plan,
                    self.teacher,
                    loss=config.train.loss,
                    step_weights=weights,
                    generator=generator,
                )
            part = part + kept
            part.backward()
            loss += float(part.detach())
            figures.extend(part_figures)
        lr = learning_rate(progress, config.optim, fraction)
        rates = [lr] + ([] if self.backbone is None else [self.backbone.learning_rate(lr, fraction)])
        gradient_norm = self._update(rates)
        self._check_finite(loss, gradient_norm, progress)
        num_tokens = sum(len(batch) for batch in batches)
        seconds = time.perf_counter() - start
        visits = sum(len(batch.lengths) for batch in batches)
        self.state.progress = progress.advanced(visits=visits, tokens=num_tokens, seconds=seconds)
        return StepRecord(
            loss=loss,
            gradient_norm=gradient_norm,
            lr=lr,
            num_steps=num_steps,
            loss_by_depth=_mean_by_depth(figures, num_steps, "loss"),
            overlap_by_depth=_mean_by_depth(figures, num_steps, "overlap"),
            num_tokens=num_tokens,
            seconds=seconds,
            backbone={} if joint is None else {"backbone_loss": joint.loss, "backbone_lr": rates[1]},
        )

    def _update(self, rates: Sequence[float]) -> float:
        """`rates`: of the head's parameters, and of the adapter's if there is one."""
        clip = self.config.optim.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if clip is None else clip)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _check_finite(self, loss: float, gradient_norm: float, progress: Progress) -> None:
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            return
        sources = ", ".join(source_of(self.data.rows[index]) for index in self._visited(progress))
        raise ValueError(
            f"step {progress.step} has loss {loss} and gradient norm {gradient_norm}, on rows {sources}; "
            "lower optim.lr or look at these rows. The last checkpoint is untouched: --resume goes on from it"
        )

    # Data

    def _visited(self, progress: Progress) -> list[int]:
        optim = self.config.optim
        count = optim.batch_size * optim.accumulation
        return [self.order[visit] for visit in range(progress.visits, progress.visits + count)]

    def _next_batches(self, progress: Progress) -> list[Batch]:
        indices, size = self._visited(progress), self.config.optim.batch_size
        return [
            self._pack([self.data.rows[i] for i in group], self.features, group)
            for group in (indices[start : start + size] for start in range(0, len(indices), size))
        ]

    def _pack(self, rows: Sequence[Rendered], source: FeatureSource, indices: Sequence[int]) -> Batch:
        features = [source.get(index) for index in indices]
        device = self.target.device
        return Batch(
            token_ids=torch.tensor([token for row in rows for token in row.token_ids], device=device),
            loss_mask=torch.tensor([mask for row in rows for mask in row.loss_mask], device=device),
            lengths=tuple(len(row.token_ids) for row in rows),
            taps=torch.cat([one.taps for one in features]).to(device, self.dtype),
            last=torch.cat([one.last for one in features]).to(device, self.dtype),
            log_normalizer=torch.cat([one.log_normalizer for one in features]).to(device),
        )

    def _make_features(self) -> FeatureSource:
        settings, taps = self.config.train, self.head.config.taps
        online = OnlineFeatures(self.target, self.data.rows, taps)
        if not settings.feature_cache or not settings.feature_cache_gb:
            return online
        cached = CachedFeatures(
            online,
            self.target,
            self.data.rows,
            taps,
            folder=self.folder.parent / ".features",
            max_bytes=int(settings.feature_cache_gb * 1e9),
        )
        self.notice(cached.describe())
        return cached

    # Evaluation

    def _decode(self, target: TargetModel, head: DraftHead) -> AcceptanceReport:
        return decode_acceptance(target, head, self.data.prompts, self.config.eval)

    def _time_decoding(self, target: TargetModel, head: DraftHead) -> dict[str, float]:
        return decode_speed(target, head, self.data.prompts, self.config.eval)

    def _evaluate(self) -> None:
        """Held-out acceptance; the head is saved to best/ if it is the best so far."""
        start = time.perf_counter()
        self.head.eval()
        num_steps = min(self.head.num_depths or EVALUATED_DEPTHS, EVALUATED_DEPTHS)
        target = self._served()
        batches = self._held_out_batches(target)
        with self._autocast():
            agreement = teacher_forced(self.head, batches, self.teacher, num_steps=num_steps)
        report = self.evaluate(target, self.head)
        speed = self.measure_speed(target, self.head)
        drift = {} if self.backbone is None else self.backbone.drift(self._held_out_batches(self.target), batches)
        self.head.train()
        step = self.state.progress.step
        self._evaluated_step = step
        accepted_length = report.by_temperature[self.config.eval.temperatures[0]].accepted_length
        record = {
            **self._position(),
            "accepted_length": accepted_length,
            "acceptance": report.to_dict(),
            **agreement,
            "speed": speed,
            **({"drift": drift} if drift else {}),
            "seconds": time.perf_counter() - start,
        }
        self.metrics.write("evaluation", record)
        self.tracker.log(step, _flat_evaluation(report, agreement, speed) | {f"eval/{k}": v for k, v in drift.items()})
        best = Best.read(self.folder)
        is_best = best is None or best.beaten_by(accepted_length, step)
        self.state.stale_evaluations = 0 if is_best else self.state.stale_evaluations + 1
        depths = " ".join(f"{share:.3f}" for share in agreement["agreement"])
        self.notice(
            f"step {step}: accepted length {accepted_length:.3f} on held-out prompts"
            f"{' (best)' if is_best else ''}, agreement by depth {depths}"
            + (f", {speed['speedup']:.2f}x plain" if speed else "")
            + (f", target {drift['kl']:.4f} nats from the original" if drift else "")
        )
        if is_best:
            save_head(self.folder / "best", self.head, self._card(record), add_files=self._write_backbone)

    def _served(self) -> TargetModel:
        """The target that verifies the head's drafts."""
        return self.target if self.backbone is None else self.backbone.served(self.state.progress.step)

    def _held_out_batches(self, target: TargetModel) -> list[Batch]:
        if target is not self.target:  # it changes from one evaluation to the next
            return list(self._pack_held_out(target))
        self._held_out = self._held_out or list(self._pack_held_out(target))
        return self._held_out

    def _pack_held_out(self, target: TargetModel) -> Iterator[Batch]:
        rows = self.data.held_out[: self.config.eval.prompts]
        source = OnlineFeatures(target, rows, self.head.config.taps)
        for first in range(0, len(rows), HELD_OUT_BATCH):
            indices = range(first, min(first + HELD_OUT_BATCH, len(rows)))
            yield self._pack([rows[i] for i in indices], source, indices)

    def _should_stop(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.state.stale_evaluations >= patience

    # What is due

    def _fraction(self) -> float:
        return fraction_done(self.state.progress, self.config.train, len(self.data.rows))

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
        if len(self._records) < self.config.train.log_every:
            return
        records, self._records = self._records, []
        tokens_per_second = sum(one.num_tokens for one in records) / sum(one.seconds for one in records)
        values = {
            "loss": sum(one.loss for one in records) / len(records),
            "gradient_norm": record.gradient_norm,
            "lr": record.lr,
            "unrolled_steps": record.num_steps,
            "tokens_per_second": tokens_per_second,
            **record.backbone,
        }
        by_depth = {"loss_by_depth": record.loss_by_depth, "overlap_by_depth": record.overlap_by_depth}
        self.metrics.write("train", {**self._position(), **values, **by_depth})
        self.tracker.log(
            self.state.progress.step,
            {f"train/{name}": float(value) for name, value in values.items()}
            | {f"train/overlap_{i + 1}": value for i, value in enumerate(record.overlap_by_depth)},
        )
        now = time.perf_counter()
        if now - self._noticed < NOTICE_SECONDS:
            return
        self._noticed = now
        overlap = " ".join(f"{value:.3f}" for value in record.overlap_by_depth)
        self.notice(
            f"step {self.state.progress.step}  {self._fraction():4.0%}  loss {values['loss']:.3f}  "
            f"overlap {overlap}  {tokens_per_second:,.0f} tokens/s  {self._remaining()}"
        )

    def _remaining(self) -> str:
        fraction, seconds = self._fraction(), self.state.progress.seconds
        minutes = seconds * (1 - fraction) / max(fraction, 1e-9) / 60
        return f"{minutes:.1f} min left"

    def _position(self) -> dict[str, Any]:
        progress = self.state.progress
        return {
            "step": progress.step,
            "epoch": progress.visits / len(self.data.rows),
            "tokens": progress.tokens,
            "train_seconds": progress.seconds,
        }

    def _announce(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_config(self.config, self.folder / "config.yaml")
        account, progress = self.data.account, self.state.progress
        if progress.step:
            self.metrics.write("resume", self._position())
            self.notice(f"resumed at step {progress.step} ({self._fraction():.0%} of the budget used)")
        self.state.run_id = self.tracker.run_id or self.state.run_id
        size = sum(parameter.numel() for parameter in self.head.parameters())
        self.notice(
            f"{len(self.data.rows)} rows, {self.data.num_tokens:,} tokens ({account.get('label_tokens', 0):,} labels); "
            f"{len(self.data.prompts)} held-out prompts; head of {size / 1e6:.1f}M parameters, "
            f"draft vocabulary {len(self.head.vocabulary):,}, taps {list(self.head.config.taps)}, "
            f"{self.target.device} {dtype_name(self.dtype)}"
        )
        if self.backbone is not None:
            self.notice(self.backbone.describe())

    def _card(self, evaluation: Mapping[str, Any]) -> HeadCard:
        config, backbone = self.config, self.backbone
        return HeadCard(
            target=self.target.reference if backbone is None else backbone.reference(self.state.progress.step),
            family=config.head.type,
            acceptance={key: evaluation[key] for key in _ACCEPTANCE_KEYS if key in evaluation},
            training={
                "run": config.name,
                **self._position(),
                "conversations": len(self.data.rows),
                "data_hash": self.state.identity["data_hash"],
                "loss": config.train.loss,
                "target_dtype": self.state.identity["target_dtype"],
                **({} if backbone is None else {BACKBONE: backbone.facts()}),
            },
            vocabulary={"label_coverage": label_coverage(self.data, self.head.vocabulary)},
        )

    def _save_last(self) -> None:
        self.state.optimizer = self.optimizer.state_dict()
        save_head(self.folder / "last", self.head, self._card({}), add_files=self._write_state)

    def _write_state(self, folder: Path) -> None:
        self.state.write(folder)
        self._write_backbone(folder)

    def _write_backbone(self, folder: Path) -> None:
        if self.backbone is not None:
            self.backbone.write(folder)

    def _finish(self, status: str) -> dict[str, Any]:
        folder = self.folder / "best"
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
            "label_coverage": label_coverage(self.data, self.head.vocabulary),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        image = plot_run(self.folder)
        self.tracker.finish({key: value for key, value in summary.items() if not isinstance(value, dict)}, image)
        return summary

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


def _refuse_existing(folder: Path) -> None:
    if recover_folder(folder / "last").exists():
        raise ValueError(
            f"{folder} already holds a run: resume it (--resume), choose another name (name=...), or move it away"
        )
    if recover_folder(folder / "best").exists():  # killed in its first evaluation, before the first checkpoint
        raise ValueError(
            f"{folder} already holds a run that died before its first checkpoint: choose another name (name=...), "
            f"start from its head (head.init_from={folder / 'best'}), or move it away"
        )


def _mean_by_depth(figures: Sequence[StepFigures], num_steps: int, name: str) -> tuple[float, ...]:
    """Mean over all rows of a depth; `figures` come batch by batch, each in order of depth."""
    totals, counts = [0.0] * num_steps, [0] * num_steps
    for one in figures:
        totals[one.step] += float(getattr(one.figures, name).sum())
        counts[one.step] += len(one.rows)
    return tuple(total / count for total, count in zip(totals, counts, strict=True) if count)


def _flat_evaluation(
    report: AcceptanceReport, agreement: Mapping[str, Sequence[float]], speed: Mapping[str, float]
) -> dict[str, float]:
    """Every curve by a name of its own: accepted length by temperature, domain and context, acceptance by position."""
    values = {f"eval/{name}": value for name, value in speed.items()}
    for temperature, one in report.by_temperature.items():
        values[f"eval/accepted_length_t{temperature:g}"] = one.accepted_length
        values |= {f"eval/acceptance_t{temperature:g}_{d}": share for d, share in enumerate(one.by_position, start=1)}
    for domain, one in report.by_domain.items():
        values[f"eval/accepted_length_{domain.replace(' ', '_')}"] = one.accepted_length
    for context, one in report.by_context.items():
        values[f"eval/accepted_length_context_{context}"] = one.accepted_length
    for name, shares in agreement.items():
        values |= {f"eval/{name}_{depth}": share for depth, share in enumerate(shares, start=1)}
    return values
