"""What a run is made of: the target, a new or given head with its draft vocabulary, and the dtype to compute in."""

from __future__ import annotations

from dataclasses import replace

import torch

from configs.schema import HeadSettings, RunConfig
from heads.checkpoint import load_head
from heads.eagle3 import Eagle3Config, Eagle3Head, init_from_target
from heads.vocab import DraftVocabulary, VocabularyProvenance, always_kept_ids
from infer.chat import tokenizer_hash
from infer.target import DTYPES, TargetModel
from train.dataset import TrainingData
from train.features import rows_hash


def load_target(config: RunConfig, *, dtype: str | None = None) -> TargetModel:
    """The frozen target. A resumed run passes the dtype that `auto` chose at first."""
    return TargetModel.load(config.target.model, dtype=dtype or config.target.dtype, device=config.target.device)


def compute_dtype(config: RunConfig, target: TargetModel) -> torch.dtype:
    """`auto` follows the target, whose dtype was chosen by what this machine computes quickly."""
    return target.dtype if config.train.dtype == "auto" else DTYPES[config.train.dtype]


def make_head(config: RunConfig, target: TargetModel, data: TrainingData) -> Eagle3Head:
    """A head that was never trained, or the one that `head.init_from` names."""
    if config.head.init_from is not None:
        return _warm_start(config.head, target, config.head.init_from)
    vocabulary = make_vocabulary(config.head.draft_vocab_size, target, data)
    head_config = Eagle3Config.for_target(
        target.config,
        draft_vocab_size=len(vocabulary),
        vocab_size=target.vocab_size,
        taps=config.head.taps,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        head = Eagle3Head(head_config, vocabulary)
    if config.head.init == "target":
        init_from_target(
            head,
            layer=target.layers[-1],
            final_norm=target.final_norm,
            lm_head_weight=target.lm_head_weight,
        )
    return head


def make_vocabulary(size: int | None, target: TargetModel, data: TrainingData) -> DraftVocabulary:
    """The most frequent label tokens, and all that must be kept; None for no reduction."""
    provenance = VocabularyProvenance(
        target_fingerprint=target.fingerprint,
        tokenizer_hash=tokenizer_hash(target.tokenizer),
        data_hash=rows_hash(data.rows),
    )
    if size is None or size >= target.vocab_size:
        return replace(DraftVocabulary.full(target.vocab_size), provenance=provenance)
    return DraftVocabulary.from_counts(
        data.label_counts,
        size=size,
        vocab_size=target.vocab_size,
        keep_ids=always_kept_ids(target.tokenizer, target.eos_ids),
        provenance=provenance,
    )


def label_coverage(data: TrainingData, vocabulary: DraftVocabulary) -> float:
    """Share of training labels inside the draft vocabulary: what no head can exceed at depth 1."""
    counts = data.label_counts
    inside = set(vocabulary.target_ids.tolist())
    return sum(count for token, count in counts.items() if token in inside) / max(1, counts.total())


def _warm_start(settings: HeadSettings, target: TargetModel, folder: str) -> Eagle3Head:
    head, card = load_head(folder)
    target.check_card(card)
    if settings.taps is not None and tuple(settings.taps) != head.config.taps:
        raise ValueError(f"head.taps is {list(settings.taps)}, but the head in {folder} reads {list(head.config.taps)}")
    return head
