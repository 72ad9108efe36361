"""Memory and disk that a run takes, item by item, from sizes alone.

What is there all the time is summed; of what comes and goes (loading, computing features, a pass, an evaluation) the
largest counts. Activations are estimates, everything else is exact up to what libraries round to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.schema import RunConfig
from train.features.codec import Codec
from train.features.rows import normalizer_rows
from train.features.source import kept_bytes_per_token
from train.features.store import SHARD_BYTES
from train.losses import chunk_rows
from train.plan.sizes import FLOAT_BYTES, HeadSize, TargetSize
from train.plan.workload import Workload

RUNTIME_BYTES = 600_000_000
"""Python with torch, transformers and what they bring along."""
KERNEL_CACHE_BYTES = 500_000_000
"""oneDNN's, as seen to fill up in bfloat16 (its capacity is a number of kernels)."""
GPU_RUNTIME_BYTES = 800_000_000
"""A CUDA context and the workspaces of its libraries, about."""
_FORMS_OF_LOGITS, _GPU_FORMS_OF_LOGITS = 3, 5
"""In which the loss holds a chunk's logits at once: the target's probabilities, the draft's logits, and in between. On
a GPU a chunk is not gone through piece by piece."""
BYTES_PER_DATA_TOKEN = 48
"""A token's id and mask in Python's own lists."""
SMALL_FILES = 5_000_000
"""Figures, pictures, configuration and card."""
LOAD_BOTH = 6
"""Bytes a parameter while `target.dtype: auto` tries float32 and bfloat16 on a CPU."""

DEVICE, HOST = "device", "host"
"""Where something lies: with the target and head, or in CPU memory beside a GPU."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes of one process. passing: there only while one phase lasts, of which the largest counts."""

    name: str
    num_bytes: int
    where: str = DEVICE
    passing: bool = False
    settings: tuple[str, ...] = ()
    """What to turn to make it smaller."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of a number of the target's and of what the head computes with; `target` names the target's dtype."""

    target: torch.dtype
    compute: torch.dtype

    @property
    def target_bytes(self) -> int:
        return self.target.itemsize

    @property
    def compute_bytes(self) -> int:
        return self.compute.itemsize


def memory_items(
    config: RunConfig,
    target: TargetSize,
    head: HeadSize,
    work: Workload,
    precision: Precision,
    *,
    processes: int,
    on_gpu: bool,
) -> list[Item]:
    """Of one process."""
    passing = _passing_items(config, target, head, work, precision, on_gpu=on_gpu)
    runtime = Item(name="CUDA and its libraries", num_bytes=GPU_RUNTIME_BYTES)
    return [
        *_target_items(config, target, precision, processes=processes, on_gpu=on_gpu),
        *_head_items(config, head, processes=processes),
        *_batch_items(config, target, head, work, precision, processes=processes, on_gpu=on_gpu),
        *passing,
        *([runtime] if on_gpu else _held_back(passing, precision)),
    ]


def overlaps(config: RunConfig, *, on_gpu: bool) -> bool:
    """Whether the run computes the next pass's features while the head trains on this one."""
    if config.train.overlap is not None:
        return config.train.overlap
    target = config.target
    return on_gpu and target.features is None and target.device_map is None and not target.sharded


def _held_back(passing: Sequence[Item], precision: Precision) -> list[Item]:
    """What a CPU process does not give back. Rows have many lengths: what is freed of one leaves holes that others do
    not fill, and kernels of half precision are kept for each shape. Both grow over the first hundreds of steps."""
    items = [Item(name="freed memory that the allocator keeps", num_bytes=sum(item.num_bytes for item in passing))]
    if precision.target_bytes == 2 or precision.compute_bytes == 2:
        items.append(Item(name="kernels kept for each length of rows", num_bytes=KERNEL_CACHE_BYTES))
    return items


def _target_items(
    config: RunConfig, target: TargetSize, precision: Precision, *, processes: int, on_gpu: bool
) -> list[Item]:
    settings, size = config.target, precision.target_bytes
    smaller = ("target.quantization", "target.device_map", "target.sharded", "target.features", "target.dtype")
    if settings.features is not None:
        return [Item(name="target: embeddings, LM head, last layer", num_bytes=target.stored_bytes(size))]
    if settings.sharded:
        outer = target.outer_parameters * size
        share = -(-target.layer_parameters * size // processes)
        return [
            Item(name="target: this process's part", num_bytes=outer + share, settings=("target.features",)),
            Item(name="target: layers gathered as they run", num_bytes=2 * target.largest_layer * size),
        ]
    items = [
        Item(
            name=f"target: {settings.quantization or 'all'} weights",
            num_bytes=target.weight_bytes(size, settings.quantization),
            settings=smaller,
        )
    ]
    if settings.dtype == "auto" and not on_gpu:
        both = target.parameters * LOAD_BOTH - items[0].num_bytes
        items.append(
            Item(
                name="loading in two dtypes, to see which is faster",
                num_bytes=max(0, both),
                passing=True,
                settings=("target.dtype",),
            )
        )
    return items


def _head_items(config: RunConfig, head: HeadSize, *, processes: int) -> list[Item]:
    stage, deepspeed = config.deepspeed.stage, config.deepspeed
    weights, gradients, moments = head.weight_bytes, head.trained * FLOAT_BYTES, head.optimizer_bytes
    copies = (head.num_copies - 1) * weights
    masters = 0
    if stage is not None and stage >= 1:
        moments //= processes
        masters = head.trained * FLOAT_BYTES // processes
    if stage is not None and stage >= 2:
        gradients //= processes
    gathered = 0
    if stage == 3:
        gathered, weights = weights, weights // processes
    smaller = ("head.draft_vocab_size", *(("deepspeed.stage",) if processes > 1 else ()))
    state_place = HOST if deepspeed.offload_optimizer else DEVICE
    items = [
        Item(
            name="head: weights",
            num_bytes=weights + copies,
            where=HOST if deepspeed.offload_parameters else DEVICE,
            settings=smaller,
        ),
        Item(name="head: gradients", num_bytes=gradients, settings=smaller),
        Item(
            name="head: optimiser state",
            num_bytes=moments + masters,
            where=state_place,
            settings=(*smaller, "deepspeed.offload_optimizer"),
        ),
    ]
    if gathered:
        items.append(Item(name="head: whole weights during a pass", num_bytes=gathered, passing=True))
    return [item for item in items if item.num_bytes]


def _batch_items(
    config: RunConfig,
    target: TargetSize,
    head: HeadSize,
    work: Workload,
    precision: Precision,
    *,
    processes: int,
    on_gpu: bool,
) -> list[Item]:
    own = min(config.optim.batch_size, -(-config.optim.conversations_per_step // processes))
    state_bytes = (len(head.taps) + 1) * target.hidden_size * precision.compute_bytes
    batch_tokens = min(own * work.mean_length * 1.5, own * work.longest)
    num_passes = 2 if overlaps(config, on_gpu=on_gpu) else 1
    lm_head_rows = head.draft_vocab_size * target.hidden_size * precision.compute_bytes
    return [
        Item(
            name="teacher: LM head rows of the draft vocabulary",
            num_bytes=lm_head_rows,
            settings=("head.draft_vocab_size",),
        ),
        Item(
            name="features of a pass's conversations" + (", and of the next one's" if num_passes > 1 else ""),
            num_bytes=round(num_passes * batch_tokens * state_bytes),
            settings=("optim.batch_size", "data.max_length", *(["train.overlap"] if num_passes > 1 else [])),
        ),
        Item(
            name="features of held-out text",
            num_bytes=work.held_out_tokens * state_bytes,
            settings=("data.max_holdout",),
        ),
        Item(
            name="conversations",
            num_bytes=work.tokens_in_memory * BYTES_PER_DATA_TOKEN,
            where=HOST,
            settings=("data.streaming",),
        ),
        Item(name="runtime", num_bytes=RUNTIME_BYTES, where=HOST),
    ] + (
        [Item(name="features waiting to be written", num_bytes=SHARD_BYTES, where=HOST)]
        if config.train.feature_cache and config.target.features is None
        else []
    )


def _passing_items(
    config: RunConfig, target: TargetSize, head: HeadSize, work: Workload, precision: Precision, *, on_gpu: bool
) -> list[Item]:
    """What passes, but for the target's forward where it goes on beside the head's pass."""
    is_beside = overlaps(config, on_gpu=on_gpu)
    items = [
        Item(
            name="a pass of the head",
            num_bytes=pass_bytes(config, target, head, work, precision, on_gpu=on_gpu),
            passing=True,
            settings=(
                "optim.batch_size",
                "data.max_length",
                "train.root_share" if head.num_places else "train.ttt_steps",
                "head.draft_vocab_size",
            ),
        ),
        Item(
            name="an evaluation: caches of the prompts decoded",
            num_bytes=_evaluation_bytes(config, target, precision, work),
            passing=True,
            settings=("eval.prompts", "eval.max_tokens", "data.max_length"),
        ),
    ]
    if config.target.features is None:
        items.append(
            Item(
                name="the target's forward over a conversation" + (", beside the head's pass" if is_beside else ""),
                num_bytes=forward_bytes(target, precision, work.longest, on_gpu=on_gpu),
                passing=not is_beside,
                settings=("data.max_length", *(["train.overlap"] if is_beside else [])),
            )
        )
    return items


def pass_bytes(
    config: RunConfig, target: TargetSize, head: HeadSize, work: Workload, precision: Precision, *, on_gpu: bool = False
) -> int:
    """Saved for the backward pass by all unrolled steps of a pass, and the chunk of logits that the loss works on.

    Attention is plain matrix products: each row keeps its weights over all the text before it.
    """
    num_steps = head.num_depths or config.train.ttt_steps
    rows = config.optim.batch_size * work.longest
    context = head.attention_heads * work.longest * (2 * precision.compute_bytes + FLOAT_BYTES)
    per_row = head.width_per_token * precision.compute_bytes + context
    further = head.further_rows(num_steps, root_share=config.train.root_share, keep_share=config.train.ttt_keep)
    steps = rows * per_row * (1 + further)
    lm_head_gradients = head.lm_head_parameters * FLOAT_BYTES
    chunk = min(rows * num_steps, chunk_rows(head.draft_vocab_size, on_gpu=on_gpu))
    logits = chunk * head.draft_vocab_size * (_GPU_FORMS_OF_LOGITS if on_gpu else _FORMS_OF_LOGITS) * FLOAT_BYTES
    return round(steps + lm_head_gradients + logits)


def forward_bytes(target: TargetSize, precision: Precision, rows: int, *, on_gpu: bool = False) -> int:
    """Keys and values of the rows, a layer's activations, and the logits that normalisers are made of."""
    layer = rows * (2 * target.intermediate_size + 6 * target.hidden_size) * precision.target_bytes
    attention = rows * rows * target.num_attention_heads * (precision.target_bytes + FLOAT_BYTES)
    chunk = min(rows, normalizer_rows(target.vocab_size, on_gpu=on_gpu))
    logits = chunk * target.vocab_size * (precision.target_bytes + 2 * FLOAT_BYTES)
    return rows * target.cache_bytes(precision.target_bytes) + layer + attention + logits


def _evaluation_bytes(config: RunConfig, target: TargetSize, precision: Precision, work: Workload) -> int:
    if config.target.features is not None:
        return 0
    length = work.max_prompt + config.eval.max_tokens
    return config.eval.prompts * length * target.cache_bytes(precision.target_bytes)


# Disk


def feature_bytes_per_token(config: RunConfig, target: TargetSize, head: HeadSize, dtype: torch.dtype) -> int:
    """What a token takes in the feature store."""
    codec = Codec.of(_AsTarget(target, dtype), head.taps, config.train.feature_dtype)
    return kept_bytes_per_token(codec, with_normalizer=config.train.teacher == "full")


class _AsTarget:
    """As much of a target as decides what its features take."""

    def __init__(self, size: TargetSize, dtype: torch.dtype) -> None:
        self.dtype, self.hidden_size, self.num_layers = dtype, size.hidden_size, size.num_layers


@dataclass(frozen=True, kw_only=True)
class DiskNeeds:
    """Bytes. features: of the rows that the budget has room for, `feature_rows_share` of all.

    checkpoints: last, best and those kept; saving: what is there twice while one is written.
    """

    feature_bytes_per_token: int
    features: int
    features_share: float
    checkpoint: int
    best: int
    checkpoints: int
    saving: int

    @property
    def total(self) -> int:
        return self.features + self.checkpoints + self.saving + SMALL_FILES


def disk_needs(
    config: RunConfig,
    target: TargetSize,
    head: HeadSize,
    work: Workload,
    dtype: torch.dtype,
    *,
    seen_share: float = 1.0,
) -> DiskNeeds:
    """seen_share: of the rows, those that the budget gets to visit at all."""
    settings = config.train
    per_token = feature_bytes_per_token(config, target, head, dtype)
    wanted = round(work.num_tokens * per_token * seen_share)
    keeps = settings.feature_cache and config.target.features is None
    budget = int(settings.feature_cache_gb * 1e9) if keeps else 0
    checkpoint = head.stored_bytes + head.optimizer_bytes
    former = min(settings.keep_checkpoints, _num_saves(config))
    return DiskNeeds(
        feature_bytes_per_token=per_token,
        features=min(wanted, budget),
        features_share=min(1.0, budget / wanted) if wanted else 0.0,
        checkpoint=checkpoint,
        best=head.stored_bytes,
        checkpoints=checkpoint * (1 + former) + head.stored_bytes,
        saving=checkpoint,
    )


def _num_saves(config: RunConfig) -> int:
    """At least so many earlier states come to be: one for each evaluation but the last."""
    return max(1, config.train.num_evaluations - 1)


def peak_bytes(items: Sequence[Item], where: str) -> int:
    """All that stays, and the largest of what passes."""
    here = [item for item in items if item.where == where]
    passing = [item.num_bytes for item in here if item.passing]
    return sum(item.num_bytes for item in here if not item.passing) + max(passing, default=0)
