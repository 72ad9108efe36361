"""The schema of a training recipe: frozen dataclasses that check themselves before anything loads.

A recipe is data about a run and nothing else: no torch, no file access, no defaults taken from the machine.
`configs.loading` turns YAML and `section.key=value` overrides into these classes, field by field, and refuses
keys that are not here. Every field is a plain scalar, a tuple of scalars or another section, so that a
configuration can be written back as YAML and loaded to an equal object.

To add a setting: add the field with a default, check its range in `__post_init__`, document it in one line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "BackboneConfig",
    "DataConfig",
    "DeepSpeedConfig",
    "EvalConfig",
    "HeadSettings",
    "OptimConfig",
    "RunConfig",
    "TargetConfig",
    "TrackingConfig",
    "TrainSettings",
]

DTypeName = Literal["auto", "bfloat16", "float32"]
ComputeDType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["int8", "int4"]
FeatureDType = Literal["target", "bfloat16", "int8"]
TeacherLaw = Literal["full", "draft"]
StepWeighting = Literal["decay", "dpace", "length", "block"]
HeadType = Literal["eagle3", "eagle1", "medusa", "hydra", "peagle", "dflash", "early_exit"]
HeadInit = Literal["target", "random"]
InitVocab = Literal["kept", "data"]
BackboneObjective = Literal["kl", "ce"]
LossName = Literal["lk", "lk_hybrid", "ce", "kl", "tv", "top10", "label"]
DraftShape = Literal["chain", "tree"]
RuleName = Literal["match", "token", "block", "recursive", "traversal", "greedy_set"]
OptimizerName = Literal["adamw"]
ScheduleName = Literal["linear", "cosine", "constant"]
TrackingMode = Literal["auto", "online", "offline", "disabled", "required"]

FAMILY_SETTINGS = (
    "num_heads",
    "num_layers",
    "prefix_layer",
    "norm_before_residual",
    "fc_norm",
    "norm_output",
    "feature_loss",
    "feature_noise",
    "num_depths",
    "mask_token_id",
    "markov_rank",
    "markov_table",
    "markov_gate",
    "sample_from_anchor",
    "exit_layer",
)
"""Fields of `HeadSettings` that hold for some head types alone; the registry says for which."""

CHAIN_RULES = ("token", "block")
"""Verification rules that take one draft token a depth."""

JOINT_TYPES = ("medusa", "hydra")
"""Head types that can be trained together with their target (section `backbone`)."""

TRAINING_SETTINGS = ("feature_loss", "feature_noise")
"""Those of them that say how a head is trained and not what it computes: a warm start may change them."""

# A run's name becomes a folder under `runs/`, so it may not climb out of it or hide.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model that the head is trained for."""

    model: str = "models/smollm2-135m"
    """Folder of a Hugging Face causal language model, or its name on the hub."""
    dtype: DTypeName = "auto"
    """Precision of the target; `auto` is bfloat16 where the device computes it quickly, else float32."""
    device: str = "auto"
    """`auto` (a GPU if there is one, else the CPU), `cpu`, `mps`, `cuda` or `cuda:N`."""
    adapter: str | None = None
    """Folder of a LoRA adapter (peft's form) that is merged into the model when it is loaded; null for none."""
    quantization: Quantization | None = None
    """Load the weights in int8 or int4 (on a GPU through bitsandbytes); null for none."""
    device_map: str | None = None
    """How a model too large for one device is spread by accelerate: `auto`, `balanced` or `sequential`; null for one
    device."""
    sharded: bool = False
    """Several processes: each keeps a part of the target; its layers are gathered when they run (one: whole)."""
    features: str | None = None
    """Folder written by `headstart features`, to train on without loading the target at all; null to load it."""

    def __post_init__(self) -> None:
        _require_text("target.model", self.model, "a model folder or a model name")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ValueError(f"target.device is {self.device!r}; use auto, cpu, mps, cuda or cuda:N")
        for name in ("adapter", "features", "device_map"):
            value = getattr(self, name)
            if value is not None:
                _require_text(f"target.{name}", value, "a value, or null")
        if self.device_map is not None and self.device != "auto":
            raise ValueError(
                f"target.device is {self.device!r} and target.device_map {self.device_map!r}; a map places the model "
                "itself, so leave target.device at auto"
            )
        ways = [name for name in ("quantization", "device_map", "features") if getattr(self, name) is not None] + (
            ["sharded"] if self.sharded else []
        )
        if ("features" in ways and len(ways) > 1) or ("sharded" in ways and len(ways) > 1):
            raise ValueError(
                f"target.{' and target.'.join(ways)} are different ways to do without room for the whole target: "
                "keep one of them"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Conversations to train on, and which of them are held out."""

    train: tuple[str, ...] = ("data/smollm2-135m.jsonl",)
    """JSONL files of conversations, relative to the working folder. One name may stand without a list."""
    eval: tuple[str, ...] = ()
    """Held-out conversations; when empty, `holdout_fraction` of the training conversations is held out."""
    holdout_fraction: float = 0.05
    """Share of conversations (never parts of one) kept out of training when `eval` is empty."""
    max_holdout: int = 200
    """Upper bound on the number of held-out conversations."""
    max_length: int = 1024
    """Longest row in tokens; longer conversations are cut, and the cut is reported."""
    max_conversations: int | None = None
    """Use only the first so many conversations (after shuffling by the seed); null for all."""
    min_label_tokens: int = 4
    """Rows with fewer tokens under the loss are dropped, and counted."""
    max_repeat_fraction: float = 0.3
    """Rows with a larger share of positions in a repeated 8-gram are dropped: loops teach looping."""
    weights: tuple[float, ...] | None = None
    """Shares of the visits that each file of `train` gets, in their order; null to visit all rows alike."""
    raw: bool = False
    """No chat template: contents are plain text, all of it trained on (base models)."""
    decontaminate: tuple[str, ...] = ()
    """Files of prompts that must not be trained on, besides the shipped evaluation prompts."""
    streaming: bool = False
    """Read the data as they come instead of holding them all; needs a budget in steps or minutes."""
    shuffle_block: int = 1000
    """Streaming: rows that are shuffled among each other."""
    scan_rows: int = 2000
    """Streaming: rows read first, for the draft vocabulary and the held-out prompts."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train is empty; name at least one file of conversations")
        for path in (*self.train, *self.eval):
            _require_text("data.train / data.eval", path, "a path")
        overlap = sorted(set(self.train) & set(self.eval))
        if overlap:
            raise ValueError(f"data.eval holds training files: {', '.join(overlap)}; evaluate on text not trained on")
        _require_between("data.holdout_fraction", self.holdout_fraction, 0.0, 0.5)
        if not self.eval and self.holdout_fraction == 0.0:
            raise ValueError(
                "data.holdout_fraction is 0 and data.eval is empty, so no text is left to choose the best "
                "checkpoint by; set one of them"
            )
        _require_at_least("data.max_holdout", self.max_holdout, 1)
        _require_at_least("data.max_length", self.max_length, 8)
        _require_at_least("data.max_conversations", self.max_conversations, 2)
        _require_at_least("data.min_label_tokens", self.min_label_tokens, 1)
        _require_between("data.max_repeat_fraction", self.max_repeat_fraction, 0.0, 1.0)
        if self.weights is not None:
            if len(self.weights) != len(self.train):
                raise ValueError(
                    f"data.weights has {len(self.weights)} entries for {len(self.train)} files of data.train; "
                    "give one for each"
                )
            for weight in self.weights:
                _require_positive("data.weights", weight)
        _require_at_least("data.shuffle_block", self.shuffle_block, 1)
        _require_at_least("data.scan_rows", self.scan_rows, 1)
        if self.streaming and self.max_conversations is not None:
            raise ValueError("data.max_conversations does not go with data.streaming; bound the run by train.steps")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The draft head: its shape and where its first weights come from."""

    type: HeadType = "eagle3"
    """eagle3, eagle1, medusa, hydra, peagle, dflash or early_exit."""
    draft_vocab_size: int | None = 4096
    """Tokens the head can propose, by frequency (end, chat and byte tokens always kept); null for all."""
    taps: tuple[int, ...] | None = None
    """Hidden states fed to the head, as Hugging Face indices (0 is the embeddings, i the output of layer i
    counted from 1); null for a low, a middle and a high layer."""
    init: HeadInit = "target"
    """`target` copies attention and MLP of the target's last layer where shapes allow; `random` does not."""
    init_from: str | None = None
    """Folder of a trained head to start from (its target must be the same, its vocabulary and taps are taken over)."""
    init_vocab: InitVocab = "kept"
    """Of a head in `init_from`: `kept` keeps its draft vocabulary, `data` chooses `draft_vocab_size` tokens anew.
    Tokens that it had keep their rows of the LM head, new ones start from the target's."""
    lora_rank: int | None = None
    """Train a LoRA adapter of this rank on the head in `init_from`, whose own weights stay; null to train the head.
    The target may then be a fine-tuned relative of the head's own."""
    lora_alpha: int | None = None
    """Scale of that adapter, which is alpha / rank; null for alpha = rank."""

    # Settings of some types alone; null is the type's own default.
    num_heads: int | None = None
    """medusa, hydra: depths drafted, each by a network of its own (4)."""
    num_layers: int | None = None
    """medusa: residual blocks a depth; hydra: layers of each depth's MLP; peagle, dflash: decoder layers (1)."""
    prefix_layer: bool | None = None
    """hydra: a decoder layer over the text before the heads, as in Hydra++ (false)."""
    norm_before_residual: bool | None = None
    """eagle3, peagle: the residual is the normed state, as in most speculators heads (false)."""
    fc_norm: bool | None = None
    """eagle3, peagle: a norm for each tapped state before they are fused (false)."""
    norm_output: bool | None = None
    """eagle3: the state fed back is the normed one (false)."""
    feature_loss: float | None = None
    """eagle1: weight of the feature regression against the distillation loss (10)."""
    feature_noise: float | None = None
    """eagle1: half-width of the uniform noise added to the target's states in training (0.1)."""
    num_depths: int | None = None
    """peagle, dflash: tokens drafted in one pass (4)."""
    mask_token_id: int | None = None
    """peagle, dflash: the token whose embedding stands where none is known yet (the target's end of text)."""
    markov_rank: int | None = None
    """peagle, dflash: rank of the correction of the draft by the token before it (64); 0 for none."""
    markov_table: bool | None = None
    """peagle, dflash: that correction reads a table of its own, as DSpark's, not the target's embeddings (false)."""
    markov_gate: bool | None = None
    """peagle, dflash: that correction is gated by the head's state (false)."""
    sample_from_anchor: bool | None = None
    """dflash: each place guesses the next token instead of its own, as in DSpark (false)."""
    exit_layer: int | None = None
    """early_exit: the target's layer after which drafts are made (a third of its layers)."""

    def __post_init__(self) -> None:
        _require_at_least("head.draft_vocab_size", self.draft_vocab_size, 16)
        _require_at_least("head.lora_rank", self.lora_rank, 1)
        _require_at_least("head.lora_alpha", self.lora_alpha, 1)
        if self.lora_rank is not None and self.init_from is None:
            raise ValueError("head.lora_rank is given without head.init_from: name the trained head to adapt")
        if self.init_vocab == "data" and (self.init_from is None or self.lora_rank is not None):
            raise ValueError(
                "head.init_vocab is 'data', which changes the vocabulary of a head that is trained on as a whole: name "
                "it in head.init_from, and leave head.lora_rank null"
            )
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError("head.lora_alpha is given, but head.lora_rank is null, so there is no adapter")
        _require_at_least("head.num_heads", self.num_heads, 1)
        _require_at_least("head.num_layers", self.num_layers, 1)
        _require_at_least("head.feature_loss", self.feature_loss, 0.0)
        _require_at_least("head.feature_noise", self.feature_noise, 0.0)
        _require_at_least("head.exit_layer", self.exit_layer, 1)
        _require_at_least("head.num_depths", self.num_depths, 1)
        _require_at_least("head.mask_token_id", self.mask_token_id, 0)
        _require_at_least("head.markov_rank", self.markov_rank, 0)
        if self.taps is not None:
            if not self.taps:
                raise ValueError("head.taps is empty; name at least one layer, or null for the default three")
            if any(tap < 0 for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
                raise ValueError(f"head.taps is {list(self.taps)}; give indices from 0 up, ascending, without repeats")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Training the target along with its head, as in Medusa-2: a LoRA adapter on its layers, through peft.

    Without `lora_rank` the target stays as it is. With it the target *changes*: the adapter is saved beside the head
    and merged into the target wherever the head is used, and lossless then means with respect to the adapted target.
    """

    lora_rank: int | None = None
    """Rank of the adapter; null for a frozen target."""
    lora_alpha: int | None = None
    """Scale of the adapter, which is alpha / rank; null for alpha = rank."""
    lora_modules: tuple[str, ...] | None = None
    """Names of the linear layers that are adapted, such as [q_proj, v_proj]; null for all in the decoder's layers."""
    lr_factor: float = 0.25
    """The adapter's learning rate as a share of the head's."""
    objective: BackboneObjective = "kl"
    """What keeps the target a language model: kl, the divergence from the unadapted target (self-distillation); ce,
    the cross entropy of the text."""
    loss_weight: float = 5.0
    """Weight of that loss against the head's (5 is the paper's 1 : 0.2)."""
    warmup: float = 0.4
    """Share of the budget in which the head alone is trained, on the target as it is."""

    def __post_init__(self) -> None:
        _require_at_least("backbone.lora_rank", self.lora_rank, 1)
        _require_at_least("backbone.lora_alpha", self.lora_alpha, 1)
        if self.lora_modules is not None and not self.lora_modules:
            raise ValueError("backbone.lora_modules is empty; name at least one layer, or null for all")
        _require_positive("backbone.lr_factor", self.lr_factor)
        _require_at_least("backbone.loss_weight", self.loss_weight, 0.0)
        _require_between("backbone.warmup", self.warmup, 0.0, 0.95)
        for name in ("lora_alpha", "lora_modules"):
            if self.lora_rank is None and getattr(self, name) is not None:
                raise ValueError(f"backbone.{name} is given, but backbone.lora_rank is null, so there is no adapter")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser, learning-rate schedule and batch."""

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 20
    schedule: ScheduleName = "linear"
    """Decay after the warm-up, over the run's budget (steps, epochs or minutes)."""
    min_lr_fraction: float = 0.05
    """The learning rate at the end of the schedule, as a share of `lr`."""
    grad_clip: float | None = 1.0
    """Largest gradient norm; null for no clipping."""
    batch_size: int = 2
    """Conversations in one forward and backward pass of a process."""
    accumulation: int = 1
    """Passes summed into one step, weighted by their valid labels. A step sees batch_size x accumulation conversations
    however many processes share them."""

    def __post_init__(self) -> None:
        _require_positive("optim.lr", self.lr)
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"optim.betas is {list(self.betas)}; both must be at least 0 and below 1")
        _require_at_least("optim.weight_decay", self.weight_decay, 0.0)
        _require_at_least("optim.warmup_steps", self.warmup_steps, 0)
        _require_between("optim.min_lr_fraction", self.min_lr_fraction, 0.0, 1.0)
        if self.grad_clip is not None:
            _require_positive("optim.grad_clip", self.grad_clip)
        _require_at_least("optim.batch_size", self.batch_size, 1)
        _require_at_least("optim.accumulation", self.accumulation, 1)

    @property
    def conversations_per_step(self) -> int:
        """Whatever the number of processes."""
        return self.batch_size * self.accumulation


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Training through DeepSpeed, on one process or many. Without it several processes train data-parallel too.

    A run can be resumed with another of these settings, or without: checkpoints hold the whole state in one form.
    """

    stage: int | None = None
    """ZeRO stage, 0 to 3: what is shared out among the processes (1: optimiser state, 2: gradients too, 3: weights
    too); null for no DeepSpeed."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in CPU memory."""
    offload_parameters: bool = False
    """Keep the head's weights in CPU memory between uses (stage 3)."""
    config: str | None = None
    """JSON file with further DeepSpeed settings; one that the recipe decides is refused."""

    def __post_init__(self) -> None:
        if self.stage is not None:
            _require_between("deepspeed.stage", self.stage, 0, 3)
        given = [name for name in ("offload_optimizer", "offload_parameters", "config") if getattr(self, name)]
        if given and self.stage is None:
            raise ValueError(f"deepspeed.{given[0]} is given, but deepspeed.stage is null, so DeepSpeed is not used")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"deepspeed.offload_parameters needs stage 3, deepspeed.stage is {self.stage}")
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("deepspeed.offload_optimizer needs stage 1, 2 or 3, deepspeed.stage is 0")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Budget, objective and bookkeeping of a run.

    The first budget reached among minutes, steps and epochs ends it.
    """

    minutes: float | None = None
    """Wall-clock budget for training steps, evaluation excluded; null for none."""
    steps: int | None = None
    """Optimiser steps; null for none."""
    epochs: float | None = None
    """Passes over the training rows; null for none."""
    seed: int = 0
    loss: LossName = "lk"
    """lk: -log(acceptance); lk_hybrid: KL fading into tv; tv: 1 - acceptance; ce, kl: distillation; top10: ce in which
    the target's ten likeliest tokens count eleven times (HASS); label: cross entropy of the text's own tokens."""
    ttt_steps: int = 3
    """Steps the head is unrolled on its own states (training-time test)."""
    ttt_start: float = 0.4
    """Share of the budget trained with a single step before the unrolling begins (0: unroll at once)."""
    step_decay: float = 0.8
    """Weight of each further unrolled step against the one before it."""
    step_weights: tuple[float, ...] | None = None
    """Weight of each unrolled step, instead of `step_decay`; one for each of them."""
    step_weighting: StepWeighting = "decay"
    """decay: fixed weights. Each row's by what its depths add to an accepted length: dpace, of drafts that are the
    text's own tokens (D-PACE); length, of token-wise verification, from overlaps; block, of block verification, with
    loss label alone, on text drawn at temperature 1, for a head that was trained otherwise first."""
    step_smoothing: float = 0.5
    """dpace, length: every chance x of a depth counts as s + (1 - s) x, so that deep depths are learnt while early ones
    are poor; at 0 loss lk with length climbs the expected accepted length itself."""
    teacher: TeacherLaw = "full"
    """The law that the head learns: the target's over its whole vocabulary, seen at the draft vocabulary's tokens, or
    (draft) renormalised over these, which needs no product with the whole LM head."""
    ttt_keep: float = 1.0
    """Share of the rows that go on from one unrolled step to the next, drawn at random; below 1 steps cost less."""
    root_share: float = 1.0
    """Share of the rows that a draft begins at in training, drawn at random."""
    dtype: ComputeDType = "auto"
    """Precision of the head's matmuls under autocast; its weights and the loss stay in float32."""
    overlap: bool | None = None
    """Compute the target's features of the next pass while the head trains on this one, on a GPU on a stream of its
    own; null for where that saves time (a GPU that holds the whole target). Not a number changes."""
    feature_cache: bool = True
    """Keep the target's features in a folder beside the runs after their first use, within `feature_cache_gb`."""
    feature_cache_gb: float = 8.0
    """Budget of the feature cache in GB (1e9 bytes); rows beyond it are computed again at every visit."""
    feature_dtype: FeatureDType = "target"
    """What features are kept in: the target's own dtype, bfloat16, or int8 with a scale for every 64 numbers (and what
    teaches the head in bfloat16)."""
    log_every: int = 10
    num_evaluations: int = 6
    """Evaluations of held-out acceptance, spread evenly over the budget; the last one is at its end."""
    eval_every: int | None = None
    """Steps between evaluations of held-out acceptance, instead of `num_evaluations`."""
    patience: int | None = None
    """Stop after so many evaluations without a better one; null to use the whole budget."""
    save_every: int | None = None
    """Steps between checkpoints of the whole trainer state (also written after each evaluation); null for none."""
    save_minutes: float | None = 5.0
    """Minutes of training between checkpoints; null for none."""
    keep_checkpoints: int = 1
    """Earlier checkpoints kept besides the last and the best one, to go on from if the last should be damaged."""

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None and self.epochs is None:
            raise ValueError("the run has no budget; set train.minutes, train.steps or train.epochs")
        for name in ("minutes", "epochs"):
            value = getattr(self, name)
            if value is not None:
                _require_positive(f"train.{name}", value)
        _require_at_least("train.steps", self.steps, 1)
        _require_between("train.seed", self.seed, 0, 2**63 - 1)
        _require_between("train.ttt_steps", self.ttt_steps, 1, 16)
        _require_between("train.ttt_start", self.ttt_start, 0.0, 1.0)
        _require_between("train.ttt_keep", self.ttt_keep, 0.05, 1.0)
        _require_between("train.root_share", self.root_share, 0.01, 1.0)
        _require_between("train.step_smoothing", self.step_smoothing, 0.0, 1.0)
        if self.step_weighting == "block" and self.loss != "label":
            raise ValueError(
                f"train.step_weighting is 'block', whose weights belong to train.loss=label, and train.loss is "
                f"{self.loss!r}: take loss label, or weighting length"
            )
        _require_positive("train.step_decay", self.step_decay)
        _require_between("train.step_decay", self.step_decay, 0.0, 1.0)
        _require_at_least("train.feature_cache_gb", self.feature_cache_gb, 0.0)
        _require_at_least("train.log_every", self.log_every, 1)
        _require_at_least("train.eval_every", self.eval_every, 1)
        _require_at_least("train.save_every", self.save_every, 1)
        _require_at_least("train.patience", self.patience, 1)
        _require_at_least("train.keep_checkpoints", self.keep_checkpoints, 0)
        for weight in self.step_weights or ():
            _require_at_least("train.step_weights", weight, 0.0)
        if self.step_weights is not None and not any(self.step_weights):
            raise ValueError(f"train.step_weights is {list(self.step_weights)}; at least one must be above 0")
        _require_at_least("train.num_evaluations", self.num_evaluations, 1)
        if self.save_minutes is not None:
            _require_positive("train.save_minutes", self.save_minutes)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Acceptance on held-out prompts, measured by the real decode loop."""

    prompts: int = 16
    """Held-out prompts decoded at each evaluation."""
    max_tokens: int = 64
    """Tokens generated for each of them."""
    samples: int = 3
    """Of these answers, how many are kept with the accepted tokens marked."""
    temperatures: tuple[float, ...] = (0.0,)
    """Every temperature is measured; the first one chooses the best checkpoint."""
    shape: DraftShape = "chain"
    """What is drafted at every step: chain, five tokens one after the other; tree, sixteen nodes. Neither depends on
    the machine."""
    rule: RuleName = "match"
    """How drafts are verified at temperatures above 0 (at 0 all rules keep the same): match, as by default when
    serving; block (chain) or traversal (tree), as where exactness `distribution` is asked for; token, recursive or
    greedy_set."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require_at_least("eval.prompts", self.prompts, 1)
        _require_at_least("eval.max_tokens", self.max_tokens, 2)
        _require_at_least("eval.samples", self.samples, 0)
        if not self.temperatures:
            raise ValueError("eval.temperatures is empty; give at least one, such as 0.0")
        for temperature in self.temperatures:
            _require_between("eval.temperatures", temperature, 0.0, 10.0)
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"eval.temperatures is {list(self.temperatures)}; name each only once")
        _require_between("eval.seed", self.seed, 0, 2**63 - 1)
        if self.shape == "tree" and self.rule in CHAIN_RULES:
            raise ValueError(
                f"eval.rule is {self.rule!r}, which verifies chains, but eval.shape is 'tree': use shape chain, or "
                "rule match, recursive, traversal or greedy_set"
            )
        if self.rule != "match" and not any(self.temperatures):
            raise ValueError(
                f"eval.rule is {self.rule!r}, but all of eval.temperatures are 0, where every rule keeps the same: "
                "name one above 0 (the first one chooses the best checkpoint), or leave the rule out"
            )

    @property
    def is_plain(self) -> bool:
        """Whether what is measured is a chain under the match walk: what the training graph can simulate, too."""
        return self.shape == "chain" and self.rule == "match"


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where the curves go besides the run's own `metrics.jsonl`."""

    wandb: TrackingMode = "auto"
    """auto: online if logged in, else offline if installed, else nothing; online: refused without a key, offline if
    the service cannot be reached; required: fail unless it works."""
    project: str = "headstart"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    artifact: bool = True
    """Log the best head with its card as an artifact when the run ends (online and offline)."""

    def __post_init__(self) -> None:
        _require_text("tracking.project", self.project, "a project name")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: everything that decides its outcome."""

    name: str
    """Names the run and its folder `runs/NAME`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadSettings = field(default_factory=HeadSettings)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    train: TrainSettings
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if not _NAME_PATTERN.fullmatch(self.name):
            raise ValueError(
                f"name is {self.name!r}; it names a folder, so use letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit"
            )
        if self.data.streaming and self.train.epochs is not None and self.train.steps is None:
            raise ValueError(
                "train.epochs is unknown for streamed data (data.streaming): set train.steps or train.minutes"
            )
        if self.target.features is not None and not self.eval.is_plain:
            raise ValueError(
                f"eval.shape is {self.eval.shape!r} and eval.rule {self.eval.rule!r}, but with target.features there "
                "is no target to decode with: acceptance is simulated, for a greedy chain, so leave them out"
            )
        if self.backbone.lora_rank is not None and self.deepspeed.stage is not None:
            raise ValueError(
                "backbone.lora_rank and deepspeed.stage are both given: training the target too goes without DeepSpeed"
            )
        if self.backbone.lora_rank is not None and self.head.lora_rank is not None:
            raise ValueError(
                "head.lora_rank and backbone.lora_rank are both given: adapt the head to a target as it is, or train "
                "the target along with a whole head"
            )
        if self.backbone.lora_rank is not None and self.head.type not in JOINT_TYPES:
            raise ValueError(
                f"backbone.lora_rank is {self.backbone.lora_rank}, but a head of type {self.head.type} is trained on a "
                f"frozen target: leave it out, or use head.type {' or '.join(JOINT_TYPES)}"
            )


def _require_text(name: str, value: str, what: str) -> None:
    if not value.strip():
        raise ValueError(f"{name} is empty; give {what}")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be above 0")


def _require_at_least(name: str, value: float | None, low: float) -> None:
    """Check a lower bound; None (a setting that is off) passes."""
    if value is not None and not (math.isfinite(value) and value >= low):
        raise ValueError(f"{name} is {value}; it must be at least {low}")


def _require_between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
