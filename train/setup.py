"""What a run is made of: the target, a new or given head with its draft vocabulary, and the dtype to compute in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.schema import FAMILY_SETTINGS, TRAINING_SETTINGS, HeadSettings, RunConfig, TargetConfig
from heads.base import DraftHead
from heads.checkpoint import check_relative, load_head
from heads.registry import FAMILIES
from heads.vocab import DraftVocabulary, VocabularyProvenance, always_kept_ids
from infer.adapter import Adapter
from infer.chat import tokenizer_hash
from infer.machine import dtype_name
from infer.target import DTYPES, TargetModel, resolve_device
from train.backbone import AdaptedBackbone
from train.corpus.dataset import TrainingData
from train.features import StoredTarget, TrainingTarget
from train.sharded import readable, shard_target
from train.world import World


def load_target(config: RunConfig, world: World, *, dtype: str | None = None) -> TrainingTarget:
    """What is trained for: the frozen target, or what `target.features` holds of it."""
    if config.target.features is None:
        return load_model(config, world, dtype=dtype)
    target = _load_stored(config.target, world)
    check_lengths(config, target)
    return target


def load_model(config: RunConfig, world: World, *, dtype: str | None = None) -> TargetModel:
    """The frozen target, in every process. A resumed run passes the dtype that `auto` chose at first; of several
    processes the main one chooses, since the choice rests on timing.
    """
    chosen = dtype if dtype is not None and config.target.dtype == "auto" else config.target.dtype
    if world.is_main or chosen != "auto":
        target = _load(config.target, world, chosen)
    if chosen == "auto":
        chosen = world.broadcast(dtype_name(target.dtype) if world.is_main else "")
        target = target if world.is_main else _load(config.target, world, chosen)
    check_lengths(config, target)
    return _shared_out(config.target, world, target)


def check_lengths(config: RunConfig, target: TrainingTarget) -> None:
    """Rows beyond the target's last position would be read wrongly, or not at all."""
    for problem in length_problems(config, target.name, target.max_length):
        raise ValueError(problem)


def length_problems(config: RunConfig, name: str, max_length: int) -> Iterator[str]:
    """What of a recipe goes beyond the last position of the target called `name`, each in words."""
    if config.data.max_length > max_length:
        yield (
            f"data.max_length is {config.data.max_length}, but {name} has positions for {max_length} tokens: "
            f"set data.max_length={max_length} or less"
        )
    if config.eval.max_tokens >= max_length:
        yield (
            f"eval.max_tokens is {config.eval.max_tokens}, but {name} has positions for {max_length} tokens, "
            "its prompt included: lower it"
        )


def _load(settings: TargetConfig, world: World, dtype: str) -> TargetModel:
    device = "auto" if settings.device_map else world.device(settings.device)
    if settings.device_map and world.size > 1:
        raise ValueError(
            f"target.device_map spreads one target over this machine's devices, and each of {world.size} processes "
            "would do so: use target.sharded, or one process"
        )
    if settings.sharded and world.size > 1:  # loaded in CPU memory; its layers go to a GPU in parts, one by one
        dtype = "bfloat16" if dtype == "auto" and resolve_device(device) != "cpu" else dtype
        device = "cpu"
    return TargetModel.load(
        settings.model,
        dtype=dtype,
        device=device,
        adapter=settings.adapter,
        quantization=settings.quantization,
        device_map=settings.device_map,
    )


def _shared_out(settings: TargetConfig, world: World, target: TargetModel) -> TargetModel:
    if not settings.sharded:
        return target
    return shard_target(target, world, device=resolve_device(world.device(settings.device)))


def _load_stored(settings: TargetConfig, world: World) -> StoredTarget:
    assert settings.features is not None
    target = StoredTarget.load(settings.features, model=settings.model, device=world.device(settings.device))
    kept = dtype_name(target.dtype)
    if settings.dtype not in ("auto", kept):
        raise ValueError(
            f"target.dtype is {settings.dtype}, and the features in {settings.features} are of the target in {kept}: "
            "leave it at auto"
        )
    return target


def compute_dtype(config: RunConfig, target: TrainingTarget) -> torch.dtype:
    """`auto` follows the target, whose dtype was chosen by what this machine computes quickly."""
    return target.dtype if config.train.dtype == "auto" else DTYPES[config.train.dtype]


def make_head(config: RunConfig, target: TrainingTarget, data: TrainingData) -> DraftHead:
    """A head that was never trained, or the one that `head.init_from` names."""
    if config.head.init_from is not None:
        head = _warm_start(config, target, config.head.init_from)
        if config.head.init_vocab == "kept":
            return head
        vocabulary = make_vocabulary(config.head.draft_vocab_size, target, data)
        return with_vocabulary(head, vocabulary, target.lm_head_weight)
    vocabulary = make_vocabulary(config.head.draft_vocab_size, target, data)
    family = FAMILIES[config.head.type]
    head_config = family.config.for_target(
        target.config,
        draft_vocab_size=len(vocabulary),
        vocab_size=target.vocab_size,
        taps=config.head.taps,
        **family_settings(config.head),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        head = family.head(head_config, vocabulary)
    if config.head.init == "target":
        with readable(target):
            head.init_from_target(
                layer=target.layers[-1],
                final_norm=target.final_norm,
                lm_head_weight=target.lm_head_weight,
            )
    return head


def with_vocabulary(head: DraftHead, vocabulary: DraftVocabulary, target_rows: torch.Tensor) -> DraftHead:
    """The same head with another draft vocabulary: its rows of tokens that it had, and for others those of the target's
    LM head `target_rows` [V, H], in LM heads of that width, or the rows of an untrained head."""
    new = type(head)(replace(head.config, draft_vocab_size=len(vocabulary)), vocabulary)
    places = {token: place for place, token in enumerate(head.vocabulary.target_ids.tolist())}
    had = [(row, places[token]) for row, token in enumerate(vocabulary.target_ids.tolist()) if token in places]
    rows, old_rows = (torch.tensor(side) for side in zip(*had, strict=True))
    weights = dict(head.named_parameters())
    with torch.no_grad():
        for name, weight in new.named_parameters():
            if not new.has_draft_rows(name):
                weight.copy_(weights[name])
                continue
            if "lm_head" in name and weight.shape[1:] == target_rows.shape[1:]:  # a correction may be as wide
                weight.copy_(target_rows[vocabulary.target_ids.to(target_rows.device)])
            weight[rows] = weights[name][old_rows].to(weight.dtype)
    return new


def family_settings(settings: HeadSettings) -> dict[str, Any]:
    """The settings of the head's own family that were given; one of another family's is refused."""
    given = {name: getattr(settings, name) for name in FAMILY_SETTINGS if getattr(settings, name) is not None}
    for name in given:
        if name not in FAMILIES[settings.type].settings:
            owners = [owner for owner, family in FAMILIES.items() if name in family.settings]
            raise ValueError(
                f"head.{name} is {given[name]!r}, but a head of type {settings.type} has no such setting "
                f"({', '.join(owners)} {'has' if len(owners) == 1 else 'have'}): leave it out"
            )
    return given


def make_backbone(
    config: RunConfig, target: TrainingTarget, head: DraftHead, *, resumed: Path | None = None
) -> AdaptedBackbone | None:
    """The target's adapter, where the recipe trains one: new, or that of the head in `resumed` or `head.init_from`."""
    if config.backbone.lora_rank is None:
        return None
    if not isinstance(target, TargetModel):
        raise ValueError(
            "backbone.lora_rank trains the target too, and target.features leaves its layers out: set "
            "target.features=null, or backbone.lora_rank=null"
        )
    source = resumed or config.head.init_from
    adapter = None if source is None else Adapter.of_head(source)
    goes_on = adapter is not None and adapter.base_fingerprint == target.fingerprint
    return AdaptedBackbone(
        target,
        config.backbone,
        head.config.taps,
        dtype=compute_dtype(config, target),
        seed=config.train.seed,
        factors=adapter.factors if adapter is not None and goes_on else None,
    )


def make_vocabulary(size: int | None, target: TrainingTarget, data: TrainingData) -> DraftVocabulary:
    """The most frequent label tokens, and all that must be kept; None for no reduction."""
    provenance = VocabularyProvenance(
        target_fingerprint=target.fingerprint,
        tokenizer_hash=tokenizer_hash(target.tokenizer),
        data_hash=data.data_hash,
    )
    if size is None or size >= target.vocab_size:
        return replace(DraftVocabulary.full(target.vocab_size), provenance=provenance)
    return DraftVocabulary.from_counts(
        data.label_counts,
        size=size,
        vocab_size=target.vocab_size,
        keep_ids=always_kept_ids(target.tokenizer, target.eos_ids, used_ids=data.label_counts),
        provenance=provenance,
    )


def label_coverage(data: TrainingData, vocabulary: DraftVocabulary) -> float:
    """Share of training labels inside the draft vocabulary: what no head can exceed at depth 1."""
    counts = data.label_counts
    inside = set(vocabulary.target_ids.tolist())
    return sum(count for token, count in counts.items() if token in inside) / max(1, counts.total())


def _warm_start(config: RunConfig, target: TrainingTarget, folder: str) -> DraftHead:
    settings = config.head
    head, card = load_head(folder)
    adapter = Adapter.of_head(folder)
    if settings.lora_rank is not None:
        check_relative(card, target.reference)
    elif adapter is not None and target.fingerprint == adapter.base_fingerprint:
        _check_goes_on(config, folder)
    else:
        target.check_card(card)
    if card.family != settings.type:
        raise ValueError(f"head.type is {settings.type}, but the head in {folder} is of type {card.family}")
    for name, given in family_settings(settings).items():
        if name in TRAINING_SETTINGS:
            head.config = replace(head.config, **{name: given})
        elif getattr(head.config, name, given) != given:
            raise ValueError(f"head.{name} is {given!r}, but the head in {folder} has {getattr(head.config, name)!r}")
    if settings.taps is not None and tuple(settings.taps) != head.config.taps:
        raise ValueError(f"head.taps is {list(settings.taps)}, but the head in {folder} reads {list(head.config.taps)}")
    return head


def _check_goes_on(config: RunConfig, folder: str) -> None:
    """A head that was trained along with its target belongs to the adapted one, also while its training goes on."""
    if config.backbone.lora_rank is None:
        raise ValueError(
            f"the head in {folder} was trained along with its target: go on so (backbone.lora_rank), "
            "or take the merged target as target.model"
        )
    if config.backbone.warmup:
        raise ValueError(
            f"the head in {folder} was trained along with its target, and knows no other: set backbone.warmup=0"
        )
