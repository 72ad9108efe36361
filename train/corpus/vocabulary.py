"""Which draft vocabulary to take: what each size covers, what it can never reach, and what it costs.

A draft vocabulary is made from the label counts of the training side, as a run makes it, and judged on held-out text:

    coverage         share of the labels that the vocabulary holds
    lost acceptance  share of the target's own probability at these labels that lies outside: at temperature 1 a head
                     with this vocabulary is accepted at most 1 - lost acceptance of the time, however well trained
    lost greedy      share of the labels' places where the target's likeliest token lies outside: at temperature 0

and beside them the part of a round's weight traffic and arithmetic that the draft LM head makes up. Larger
vocabularies lose less and draft more slowly.

Shapes: P positions, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHead
from heads.checkpoint import staged_file
from heads.registry import FAMILIES
from heads.vocab import DraftVocabulary, always_kept_ids
from infer.target import TargetModel
from train.corpus.conversations import Conversation, TrainingRow, label_counts, split_holdout, tokenize_conversations
from train.corpus.dataset import domain_of

HOLDOUT = 0.1
DRAFTED = 5
"""Tokens drafted in the round whose costs are counted."""
POSITIONS_AT_ONCE = 128
LEAST_A_ROW = 8
"""Labels measured in a row, where it has as many."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How much of some text a vocabulary reaches."""

    coverage: float
    lost_acceptance: float
    lost_greedy: float


@dataclass(frozen=True, kw_only=True)
class VocabularyEntry(Reach):
    """One size: over all domains alike, by domain, and the draft LM head's share of a round."""

    size: int
    by_domain: Mapping[str, Reach]
    bytes_share: float
    flops_share: float
    draft_step_share: float
    """Weights that a draft step reads, against a target forward's."""


@dataclass(frozen=True, kw_only=True)
class VocabularyReport:
    """`num_labels`: held-out labels by domain, all of which count for coverage; `num_positions`: those at which the
    target was asked for its distribution."""

    entries: tuple[VocabularyEntry, ...]
    num_labels: Mapping[str, int]
    num_positions: Mapping[str, int]
    num_training_labels: int
    num_kept: int
    vocab_size: int
    head: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def explanation(self) -> str:
        return (
            f"From {self.num_training_labels:,} training labels; coverage over {sum(self.num_labels.values()):,} "
            f"held-out labels, losses at {sum(self.num_positions.values()):,} of them, domains weighing alike. "
            f"{self.num_kept:,} special, chat and byte tokens are always kept. Lost acceptance: the target's "
            "probability outside the vocabulary, which no head can reach (temperature 1; greedy: its likeliest token "
            f"outside). LM head: its share of a round of {DRAFTED} drafts with {self.head} and one forward of the "
            f"target, whose vocabulary has {self.vocab_size:,} tokens."
        )


def measure_vocabularies(
    target: TargetModel,
    conversations: Sequence[Conversation],
    sizes: Sequence[int],
    *,
    max_length: int,
    positions_per_domain: int = 300,
    raw: bool = False,
    head: DraftHead | None = None,
    notice: Callable[[str], None] = lambda line: None,
) -> VocabularyReport:
    """Judge draft vocabularies of `sizes` (beyond the target's own: all of it) on a held-out part of the text."""
    if positions_per_domain < 1:
        raise ValueError(f"at least 1 position is measured in each domain, given {positions_per_domain}")
    train, held_out = split_holdout(conversations, HOLDOUT)
    counts = label_counts(tokenize_conversations(train, target.tokenizer, max_length, raw=raw))
    rows = _by_domain(tokenize_conversations(held_out, target.tokenizer, max_length, raw=raw))
    labels = {domain: label_counts(its_rows) for domain, its_rows in rows.items()}
    vocabularies = _vocabularies(target, counts, sizes, notice)
    measured = {
        domain: _losses(target, its_rows, vocabularies, positions_per_domain) for domain, its_rows in rows.items()
    }
    costs = _costs(target, head)
    entries = []
    for index, vocabulary in enumerate(vocabularies):
        by_domain = {
            domain: Reach(
                coverage=_coverage(labels[domain], vocabulary),
                lost_acceptance=float(losses.probability[:, index].mean()),
                lost_greedy=float(losses.greedy[:, index].mean()),
            )
            for domain, losses in measured.items()
        }
        entries.append(
            VocabularyEntry(
                size=len(vocabulary),
                coverage=_coverage(sum(labels.values(), Counter[int]()), vocabulary),
                lost_acceptance=_mean([reach.lost_acceptance for reach in by_domain.values()]),
                lost_greedy=_mean([reach.lost_greedy for reach in by_domain.values()]),
                by_domain=by_domain,
                **costs.shares(len(vocabulary)),
            )
        )
    return VocabularyReport(
        entries=tuple(entries),
        num_labels={domain: count.total() for domain, count in labels.items()},
        num_positions={domain: len(losses.greedy) for domain, losses in measured.items()},
        num_training_labels=counts.total(),
        num_kept=len(always_kept_ids(target.tokenizer, target.eos_ids)),
        vocab_size=target.vocab_size,
        head=costs.name,
    )


def plot_vocabularies(report: VocabularyReport, path: Path) -> bool:
    """Draw lost acceptance by domain and costs against size; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, costs = figure.subplots(1, 2)
    sizes = [entry.size for entry in report.entries]
    for domain in report.num_positions:
        values = [entry.by_domain[domain].lost_acceptance for entry in report.entries]
        losses.plot(sizes, values, marker=".", linewidth=1, label=domain)
    overall = [entry.lost_acceptance for entry in report.entries]
    losses.plot(sizes, overall, marker="o", color="black", label="all domains")
    losses.set(title="acceptance that no head can reach (temperature 1)", xlabel="draft vocabulary")
    losses.set_ylim(bottom=0)
    for name, label in (("bytes_share", "of a round's bytes"), ("flops_share", "of its arithmetic")):
        costs.plot(sizes, [getattr(entry, name) for entry in report.entries], marker="o", label=label)
    costs.set(title="the draft LM head's share", xlabel="draft vocabulary")
    costs.set_ylim(bottom=0)
    for axes in (losses, costs):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axes.legend(fontsize="small")
    with staged_file(path) as new:
        figure.savefig(new, dpi=120, format="png")
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class _Losses:
    """[P, sizes]: the target's probability outside each vocabulary, and whether its likeliest token is."""

    probability: torch.Tensor
    greedy: torch.Tensor


def _losses(
    target: TargetModel, rows: Sequence[TrainingRow], vocabularies: Sequence[DraftVocabulary], limit: int
) -> _Losses:
    probability, greedy = [], []
    for row, places in _spread(rows, limit):
        (features,) = target.features([row.token_ids], ())
        for states in features.last[places].split(POSITIONS_AT_ONCE):
            logits = (states @ target.lm_head_weight.T).float()
            probs, likeliest = logits.softmax(dim=-1), logits.argmax(dim=-1)
            probability.append(torch.stack([_outside(probs, one) for one in vocabularies], dim=-1))
            marks = torch.stack([one.t2d for one in vocabularies]).to(likeliest.device)  # [sizes, V]
            greedy.append((~marks[:, likeliest]).T)
    return _Losses(probability=torch.cat(probability).cpu(), greedy=torch.cat(greedy).float().cpu())


def _spread(rows: Sequence[TrainingRow], limit: int) -> list[tuple[TrainingRow, list[int]]]:
    """About `limit` places whose laws are those of labels, evenly from many rows: neighbours in a text are alike."""
    chosen = []
    rows = rows[: max(1, limit // LEAST_A_ROW)]
    left = limit
    for number, row in enumerate(rows):
        # Logits at t - 1 are the law of label t.
        places = [place - 1 for place, labelled in enumerate(row.loss_mask) if labelled and place]
        share = min(len(places), -(-left // (len(rows) - number)))
        if share > 0:
            chosen.append((row, [places[index * len(places) // share] for index in range(share)]))
            left -= share
    return chosen


def _outside(probs: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
    """[P]: summed over the tokens outside, of which there may be none: 1 - the inside would round to less than 0."""
    outside = (~vocabulary.t2d).nonzero().flatten().to(probs.device)
    return probs.index_select(-1, outside).sum(dim=-1)


def _vocabularies(
    target: TargetModel, counts: Mapping[int, int], sizes: Sequence[int], notice: Callable[[str], None]
) -> list[DraftVocabulary]:
    kept = always_kept_ids(target.tokenizer, target.eos_ids)
    vocabularies = []
    for size in sorted({min(size, target.vocab_size) for size in sizes}):
        if size == target.vocab_size:
            vocabularies.append(DraftVocabulary.full(size))
        elif size < len(kept):
            notice(f"size {size:,} is left out: {len(kept):,} special, chat and byte tokens are always kept")
        else:
            vocabularies.append(
                DraftVocabulary.from_counts(counts, size=size, vocab_size=target.vocab_size, keep_ids=kept)
            )
    if not vocabularies:
        raise ValueError(
            f"no size is left: {len(kept):,} special, chat and byte tokens are always kept, so --sizes needs at least "
            "one larger than that"
        )
    return vocabularies


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Weights read: by a forward of the target, by a draft step besides its LM head, and for each draft token there."""

    name: str
    target_bytes: int
    target_parameters: int
    step_parameters: float
    width: float
    itemsize: int

    def shares(self, size: int) -> dict[str, float]:
        lm_head = self.width * size
        step = self.step_parameters + lm_head
        read = self.target_bytes + DRAFTED * step * self.itemsize
        done = self.target_parameters * (DRAFTED + 1) + DRAFTED * step
        return {
            "bytes_share": DRAFTED * lm_head * self.itemsize / read,
            "flops_share": DRAFTED * lm_head / done,
            "draft_step_share": step * self.itemsize / self.target_bytes,
        }


def _costs(target: TargetModel, head: DraftHead | None) -> _Costs:
    name = "the head given"
    if head is None:
        name = "a head of the usual EAGLE-3 sizes"
        family = FAMILIES["eagle3"]
        size = min(4096, target.vocab_size)
        config = family.config.for_target(target.config, draft_vocab_size=size, vocab_size=target.vocab_size)
        vocabulary = DraftVocabulary(target_ids=torch.arange(size), vocab_size=target.vocab_size)
        with torch.device("meta"):
            head = family.head(config, vocabulary)
    size = head.config.draft_vocab_size
    parameters = list(head.parameters())
    # A head that drafts with its target's LM head has no matrix of its own.
    matrices = [one for one in parameters if one.ndim == 2 and one.shape[0] == size and one.shape[0] != one.shape[1]]
    rest = sum(one.numel() for one in parameters) - sum(one.numel() for one in matrices)
    depths = head.num_depths or 1
    return _Costs(
        name=name,
        target_bytes=target.num_weight_bytes,
        target_parameters=target.num_weight_bytes // target.dtype.itemsize,
        step_parameters=rest / depths,
        width=sum(one.shape[1] for one in matrices) / depths if matrices else target.hidden_size,
        itemsize=target.dtype.itemsize,
    )


def _by_domain(rows: Sequence[Any]) -> dict[str, list[TrainingRow]]:
    grouped: dict[str, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        assert isinstance(row, TrainingRow)
        grouped[domain_of(row)].append(row)
    return dict(sorted(grouped.items()))


def _coverage(labels: Counter[int], vocabulary: DraftVocabulary) -> float:
    marks = vocabulary.t2d.tolist()
    return sum(count for token, count in labels.items() if marks[token]) / max(1, labels.total())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
