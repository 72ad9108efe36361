"""A head trained on the spot: the target writes its own text in big batches, and an EAGLE-3 head learns from it.

Text first, for a share of the time; then steps of many conversations over it, as often as the time allows. The target's
states of a conversation are computed when it is first visited, many conversations in a forward (their last bits depend
on which, unlike those of `headstart train`), and stay on the device while there is room. Steps are those of
`headstart train`: `plan_step`, `Objective`, `LocalUpdater`.

Needs nothing but torch, transformers, safetensors and numpy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.own_text import OwnText, Written
from configs.schema import OptimConfig, TrainSettings
from heads.checkpoint import HeadCard, save_head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.vocab import DraftVocabulary, always_kept_ids
from infer.chat import Rendered
from infer.drafters.head import HeadDrafter
from infer.target import TargetModel
from train.batch import computing_in, pack_batch
from train.features.rows import RowFeatures, normalizer_before_labels
from train.schedule import Progress, learning_rate
from train.step import Objective, StepTotals, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World

NUM_CURVE_POINTS = 40
Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingSizes:
    """batch: texts written at once; step_tokens: of the conversations in a step; write_share: of the seconds, or of the
    tokens that are trained on; held_out: texts kept for measuring; cache_share: of the free device memory that states
    may take."""

    batch: int = 512
    max_length: int = 384
    draft_vocab_size: int = 8192
    step_tokens: int = 16384
    write_share: float = 0.3
    held_out: int = 64
    cache_share: float = 0.5
    ttt_steps: int = 4
    ttt_start: float = 0.3
    lr: float = 2e-3
    warmup_steps: int = 50

    @classmethod
    def reduced(cls) -> TrainingSizes:
        """For a plumbing test on one slow core."""
        return cls(
            batch=4, max_length=144, draft_vocab_size=200, step_tokens=256, held_out=2, ttt_steps=2, warmup_steps=2
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedHead:
    """drafter: in the target's dtype, ready to decode. prompts: beginnings of held-out texts, up to their answers.
    figures: plain numbers for a report (`train_head`). curve: tokens seen, and the first depth's loss and overlap
    alpha around there."""

    head: Eagle3Head
    drafter: HeadDrafter
    prompts: list[list[int]]
    figures: dict[str, float]
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def save(self, folder: Path, target: TargetModel) -> Path:
        """As a folder that `headstart` commands take."""
        return save_head(folder, self.head, HeadCard(target=target.reference, training=self.figures))


def train_head(
    target: TargetModel,
    *,
    device: torch.device | None = None,
    seconds: float | None = None,
    tokens: int | None = None,
    sizes: TrainingSizes | None = None,
    seed: int = 0,
    notice: Notice = lambda line: None,
) -> TrainedHead:
    """Write text and train a head on it for so many seconds in all, or until it has seen so many tokens, whichever is
    first.

    `device`: where; the target's own, which it must be. Figures: written_tokens, written_rows, writing_seconds,
    writing_tokens_per_second (drawn ones), writing_captured (1 where a graph wrote); tokens (seen in training, each
    visit counted), unique_tokens, label_coverage, steps, training_seconds, training_tokens_per_second,
    features_seconds, loss_first and loss_last (of the first depth); held_out_overlap_1, _2, ... by depth, of text never
    trained on.
    """
    if seconds is None and tokens is None:
        raise ValueError("train_head was given no budget: give seconds, tokens or both")
    if device is not None and torch.device(device).type != target.device.type:
        raise ValueError(f"the target is on {target.device}, and the head was asked for on {device}: load it there")
    sizes = TrainingSizes() if sizes is None else sizes
    start = time.perf_counter()
    written = _write(target, sizes, seconds=seconds, tokens=tokens, seed=seed, notice=notice)
    rows, held_out = _parted(written.rows, sizes.held_out)
    trainer = HeadTrainer(target, rows, sizes, seed=seed)
    left = None if seconds is None else max(0.0, seconds - (time.perf_counter() - start))
    figures = trainer.train(seconds=left, tokens=tokens, notice=notice)
    overlaps = trainer.overlap_by_depth(held_out)
    figures |= {f"held_out_overlap_{depth}": overlap for depth, overlap in enumerate(overlaps, start=1)}
    figures |= {
        "written_tokens": written.num_tokens,
        "written_rows": len(written.rows),
        "writing_seconds": written.seconds,
        "writing_tokens_per_second": written.num_drawn / written.seconds,
        "writing_captured": float(written.is_captured),
    }
    head = trainer.head.eval()
    decoding = head.twin().to(device=target.device, dtype=target.dtype).bind(target.weights)
    return TrainedHead(
        head=head,
        drafter=HeadDrafter(decoding),
        prompts=[row.token_ids[: row.loss_mask.index(True)] for row in held_out],
        figures=figures,
        curve=trainer.curve,
    )


def _write(
    target: TargetModel,
    sizes: TrainingSizes,
    *,
    seconds: float | None,
    tokens: int | None,
    seed: int,
    notice: Notice,
) -> Written:
    max_length = min(sizes.max_length, target.max_length - 64)
    writer = OwnText(target, batch=sizes.batch, max_length=max_length, seed=seed, notice=notice)
    written = writer.write(
        seconds=None if seconds is None else seconds * sizes.write_share,
        tokens=None if tokens is None else max(1, round(tokens * sizes.write_share)),
    )
    notice(
        f"written: {len(written.rows):,} texts, {written.num_tokens:,} tokens, {written.num_left_out:,} left out, "
        f"{written.num_drawn / written.seconds:,.0f} tokens/s"
    )
    return written


def _parted(rows: Sequence[Rendered], held_out: int) -> tuple[list[Rendered], list[Rendered]]:
    """(to train on, held out): evenly spread ones are held out, a quarter at most, at least one of each."""
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} text was written, too few to train on: give more seconds or tokens")
    count = max(1, min(held_out, len(rows) // 4))
    chosen = set(range(0, len(rows), len(rows) // count)[:count])
    parts: tuple[list[Rendered], list[Rendered]] = ([], [])
    for index, row in enumerate(rows):
        parts[index in chosen].append(row)
    return parts


class HeadTrainer:
    """An EAGLE-3 head, what it is trained on, and the steps."""

    def __init__(self, target: TargetModel, rows: Sequence[Rendered], sizes: TrainingSizes, *, seed: int) -> None:
        self._target, self._rows, self._sizes = target, list(rows), sizes
        self._settings = TrainSettings(
            steps=1, seed=seed, ttt_steps=sizes.ttt_steps, ttt_start=sizes.ttt_start, loss="lk"
        )
        self._optim = OptimConfig(lr=sizes.lr, warmup_steps=sizes.warmup_steps)
        vocabulary, self.label_coverage = _vocabulary(target, rows, sizes.draft_vocab_size)
        self.head = _first_head(target, vocabulary, seed=seed)
        teacher_rows = target.lm_head_weight.index_select(0, self.head.target_ids)
        self._objective = Objective(self.head, Teacher(weight=teacher_rows.to(target.dtype)), self._settings)
        self._updater = LocalUpdater(self._objective, [list(self.head.parameters())], self._optim, World())
        self._states = StateCache(target, self.head.config.taps, share=sizes.cache_share)
        self._random = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self.curve: list[tuple[int, float, float]] = []

    def train(self, *, seconds: float | None, tokens: int | None, notice: Notice) -> dict[str, float]:
        """Until one of both is used up; at least two steps."""
        start = time.perf_counter()
        seen = 0
        progress = Progress()
        totals: list[StepTotals] = []
        while True:
            fraction = max(
                (time.perf_counter() - start) / max(seconds, 1e-9) if seconds is not None else 0.0,
                seen / tokens if tokens is not None else 0.0,
            )
            if fraction >= 1 and progress.step >= 2:
                break
            fraction = min(1.0, fraction)
            chosen = self._next()
            totals.append(self._step(chosen, progress, fraction))
            num_tokens = sum(len(self._rows[index].token_ids) for index in chosen)
            seen += num_tokens
            progress = progress.advanced(visits=len(chosen), tokens=num_tokens, seconds=0.0)
            if int(fraction * NUM_CURVE_POINTS) > len(self.curve) or not self.curve:
                self._note(seen, totals, notice)
                totals = []
        if totals:
            self._note(seen, totals, notice)
        spent = time.perf_counter() - start
        return {
            "tokens": seen,
            "unique_tokens": sum(len(row.token_ids) for row in self._rows),
            "label_coverage": self.label_coverage,
            "steps": progress.step,
            "training_seconds": spent,
            "training_tokens_per_second": seen / spent,
            "features_seconds": self._states.seconds,
            "loss_first": self.curve[0][1],
            "loss_last": self.curve[-1][1],
        }

    @torch.no_grad()
    def overlap_by_depth(self, rows: Sequence[Rendered]) -> list[float]:
        """Mean overlap alpha of the head with the target on `rows`, at each depth that was trained."""
        numbered = list(enumerate(rows))
        plan = plan_step(numbered, num_steps=self._sizes.ttt_steps, settings=self._settings)
        totals = StepTotals.empty(plan.num_steps)
        for part in plan.passes(World(), max(1, self._sizes.step_tokens // self._sizes.max_length)):
            batch = pack_batch(
                part.rows, self._states.compute(part.rows), device=self._target.device, dtype=self._target.dtype
            )
            with computing_in(self._target.dtype, self._target.device):
                loss, figures = self._objective(**as_arguments(part, batch, [1.0] * plan.num_steps))
            totals.add(loss, len(batch), figures)
        return list(totals.read().overlap_by_depth)

    def _step(self, chosen: Sequence[int], progress: Progress, fraction: float) -> StepTotals:
        settings, device, dtype = self._settings, self._target.device, self._target.dtype
        num_steps = 1 if fraction < settings.ttt_start else settings.ttt_steps
        visits = [(progress.visits + place, self._rows[index]) for place, index in enumerate(chosen)]
        plan = plan_step(visits, num_steps=num_steps, settings=settings)
        (part,) = plan.passes(World(), len(chosen))
        features = self._states.of([(index, self._rows[index]) for index in chosen])
        batch = pack_batch(part.rows, features, device=device, dtype=dtype)
        with computing_in(dtype, device):
            loss, figures = self._updater.loss(**as_arguments(part, batch, plan.label_weights(settings)))
        self._updater.backward(loss, is_last=True)
        self._updater.update([learning_rate(progress, self._optim, fraction)])
        totals = StepTotals.empty(plan.num_steps)
        totals.add(loss, len(batch), figures)
        return totals

    def _next(self) -> list[int]:
        """Rows of the next step: all in a random order, then all in another."""
        chosen: list[int] = []
        num_tokens = 0
        while num_tokens < self._sizes.step_tokens and len(chosen) < len(self._rows):
            if not self._order:
                self._order = torch.randperm(len(self._rows), generator=self._random).tolist()
            index = self._order.pop()
            chosen.append(index)
            num_tokens += len(self._rows[index].token_ids)
        return chosen

    def _note(self, seen: int, totals: Sequence[StepTotals], notice: Notice) -> None:
        for each in totals:
            each.read()
        loss = sum(each.loss_by_depth[0] for each in totals) / len(totals)
        overlap = sum(each.overlap_by_depth[0] for each in totals) / len(totals)
        self.curve.append((seen, loss, overlap))
        notice(f"{seen:,} tokens: loss {loss:.3f}, overlap {overlap:.3f}")


class StateCache:
    """The target's states of rows, computed many rows in a forward; those of numbered rows stay on the device while
    they fit into `share` of the memory that was free at first. seconds: that computing took, on the host's clock."""

    def __init__(self, target: TargetModel, taps: Sequence[int], *, share: float) -> None:
        self._target, self._taps = target, tuple(taps)
        self._room = share * _free_bytes(target.device)
        self._kept: dict[int, RowFeatures] = {}
        self.seconds = 0.0

    def of(self, rows: Sequence[tuple[int, Rendered]]) -> list[RowFeatures]:
        """Of rows with their numbers."""
        missing = [(number, row) for number, row in rows if number not in self._kept]
        computed = dict(zip((number for number, _ in missing), self.compute([row for _, row in missing]), strict=True))
        num_bytes = sum(_num_bytes(one) for one in computed.values())
        if num_bytes <= self._room:
            self._room -= num_bytes
            self._kept |= computed
        return [computed[number] if number in computed else self._kept[number] for number, _ in rows]

    @torch.inference_mode()
    def compute(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        if not rows:
            return []
        start = time.perf_counter()
        found = self._target.features([row.token_ids for row in rows], self._taps, max_rows_per_forward=1 << 14)
        lengths = [len(row.token_ids) for row in rows]
        last = torch.cat([one.last for one in found])
        mask = torch.tensor([mask for row in rows for mask in row.loss_mask])  # no row's first token is a label
        normalizers = normalizer_before_labels(last, mask, self._target.lm_head_weight).split(lengths)
        self.seconds += time.perf_counter() - start
        return [
            RowFeatures(taps=one.taps, last=one.last, log_normalizer=normalizer)
            for one, normalizer in zip(found, normalizers, strict=True)
        ]


def _vocabulary(target: TargetModel, rows: Sequence[Rendered], size: int) -> tuple[DraftVocabulary, float]:
    """The most frequent label tokens and those always kept, and the share of labels among them."""
    counts = Counter(token for row in rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)
    if size >= target.vocab_size:
        return DraftVocabulary.full(target.vocab_size), 1.0
    keep = set(target.eos_ids)
    if target.tokenizer is not None:
        keep = always_kept_ids(target.tokenizer, target.eos_ids, used_ids=counts)
    size = max(size, len(keep))
    vocabulary = DraftVocabulary.from_counts(counts, size=size, vocab_size=target.vocab_size, keep_ids=keep)
    inside = set(vocabulary.target_ids.tolist())
    return vocabulary, sum(count for token, count in counts.items() if token in inside) / counts.total()


def _first_head(target: TargetModel, vocabulary: DraftVocabulary, *, seed: int) -> Eagle3Head:
    config = Eagle3Config.for_target(
        target.config, draft_vocab_size=len(vocabulary), vocab_size=target.vocab_size, taps=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, vocabulary)
    head.init_from_target(layer=target.layers[-1], final_norm=target.final_norm, lm_head_weight=target.lm_head_weight)
    return head.to(target.device).bind(target.weights).train()


def _num_bytes(one: RowFeatures) -> int:
    normalizer = 0 if one.log_normalizer is None else one.log_normalizer.nbytes
    return one.taps.nbytes + one.last.nbytes + normalizer


def _free_bytes(device: torch.device) -> int:
    """Of a GPU's memory; on a CPU a little, so that both ways are walked."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 28
