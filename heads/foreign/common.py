"""What the forms of other projects have in common: the table's entry (`Format`), and strict reading.

Every tensor is used or refused by name, and so is every configuration key that is not known to leave the forward
alone. What a file cannot show (a head trained for another target of equal sizes) no reader can find.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from heads.base import DraftHead, HeadConfig, TargetSizes, TargetWeights
from heads.checkpoint import EMBEDDING_NAMES, WEIGHTS_FILE, TargetReference, portable_name, read_tensors
from heads.vocab import DraftVocabulary, VocabularyProvenance

Config = Mapping[str, Any]
Tensors = Mapping[str, torch.Tensor]
HeadConfigT = TypeVar("HeadConfigT", bound=HeadConfig)

PICKLED_WEIGHTS_FILE = "pytorch_model.bin"
SPECULATORS_VERSION = "0.3.0"
"""The version of speculators' layout that is written. Readers do not act on it."""
EMBEDDING, BURIED_EMBEDDING = EMBEDDING_NAMES
LM_HEAD = "lm_head.weight"
DRAFT_LM_HEAD = "draft lm_head"
"""The rows of the target's LM head that belong to the draft vocabulary."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOT_OF_THE_FORWARD = frozenset(
    {
        "_name_or_path",
        "add_cross_attention",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "dtype",
        "finetuning_task",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_sequence_length",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "sep_token_id",
        "speculators_version",
        "task_specific_params",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Configuration keys that change nothing of what a head computes."""


def _as_they_are(tensors: dict[str, torch.Tensor], *_: object) -> dict[str, torch.Tensor]:
    return tensors


@dataclass(frozen=True, kw_only=True)
class Format(Generic[HeadConfigT]):
    """One project's form of one family's heads.

    Reading goes: `read` turns the configuration into the family's own and refuses what it does not know, and `settle`
    completes it by what only the tensors say; `vocabulary` reads the map; copies of the target's tensors (`copies`) are
    checked and dropped; `to_ours` brings about what names alone do not; then each of the head's tensors is taken
    from the name that `spelling` gives, and nothing may be left over or missing. Writing is the way back: `restate`,
    `write`, `spelling`, `from_ours`.
    """

    title: str
    family: str
    """The name in `heads.registry.FAMILIES`."""
    conventions: str
    detect: Callable[[Config], bool]
    """Has a configuration the marks of this form? Of no configuration may two forms say so."""
    looks_alike: Callable[[Tensors], bool]
    """Have a file's tensors the marks of this form? Forms of one family may share them. For messages alone."""
    read: Callable[[Config, TargetReference], HeadConfigT]
    write: Callable[[HeadConfigT, TargetReference], dict[str, Any]]
    """The inverse of `read`; refuses what the form cannot say."""
    settle: Callable[[HeadConfigT, Tensors, TargetSizes | None], HeadConfigT] = lambda config, *_: config
    """What only the file's tensors or the target's own sizes (None: not at hand) say of the configuration."""
    vocabulary: Callable[[Tensors, HeadConfigT, TargetReference], DraftVocabulary]
    """From the file's tensors; ValueError for a map that is missing or none."""
    spelling: Callable[[str], str] = str
    """The form's name of one of our tensors."""
    to_ours: Callable[[dict[str, torch.Tensor], DraftHead, TargetWeights], dict[str, torch.Tensor]] = _as_they_are
    """From the file's tensors to the (still empty) head's, under the form's names."""
    from_ours: Callable[[dict[str, torch.Tensor], DraftHead], dict[str, torch.Tensor]] = _as_they_are
    """From the head's saved tensors, under the form's names, to the file's."""
    weights_files: tuple[str, ...] = (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE)
    """Where weights may be, in order of preference. The first is the one that is written (safetensors)."""
    copies: Mapping[str, str] = field(default_factory=lambda: {EMBEDDING: "embedding"})
    """Tensors that the file may hold beside the head's, and which of `TargetWeights` each must be a copy of (or
    `DRAFT_LM_HEAD`)."""
    own_or_copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a head may have of its own, and which of `TargetWeights` they are where it has not: then they are
    dropped."""
    unread: tuple[str, ...] = ()
    """How the names of tensors begin that the file may hold and no draft depends on."""
    refused_files: tuple[str, ...] = ()
    """Files beside the weights that would change what the head computes."""
    may_carry_embedding: bool = False
    """Written with a copy of the target's embedding on demand."""
    written_copies: Mapping[str, str] = field(default_factory=dict)
    """As `copies`: what the file is always written with. The target must be at hand then."""
    restate: Callable[
        [DraftHead, dict[str, torch.Tensor], TargetWeights | None], tuple[HeadConfig, dict[str, torch.Tensor]]
    ] = lambda head, tensors, _: (head.config, tensors)
    """Before a head is written: the same head, said as the form can say it."""
    notes: Callable[[Config, HeadConfigT, TargetReference], list[str]] = lambda *_: []
    """What is no error, but is one often enough."""


# Configurations: which keys are read, which must have one value, and which leave the forward alone.


def check_keys(config: Config, *known: str, **one_value: Any) -> None:
    """Refuse every key that is neither read (`known`) nor known to leave the forward alone, and other values of
    those that may have only one. A key without a value says nothing."""
    problems = []
    for key, value in config.items():
        if value is None or key in known or key in NOT_OF_THE_FORWARD:
            continue
        if key not in one_value:
            problems.append(f"{key} = {json.dumps(value):.80} is not known here and may change what the head computes")
        elif value != one_value[key]:
            problems.append(f"{key} = {json.dumps(value):.80}, only {json.dumps(one_value[key])} is supported")
    if problems:
        raise ValueError("; ".join(problems))


def part_of(config: Config, key: str) -> Config:
    part = config.get(key)
    if not isinstance(part, Mapping):
        raise ValueError(f"{key} is {part!r:.80}, expected a mapping")
    return part


def check_whole_numbers(config: Config, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    for key in (*required, *optional):
        value = config.get(key)
        if value is None and key in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r:.80}, expected a whole number from 1")


def check_positive(config: Config, *keys: str) -> None:
    for key in keys:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{key} is {value!r:.80}, expected a positive number")


def check_token_id(config: Config, *keys: str) -> None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{key} is {value!r:.80}, expected a token id")


def check_full_attention(config: Config) -> None:
    """Of heads with several layers: each may look at the whole text."""
    types, count = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and types != ["full_attention"] * int(count or 0):
        raise ValueError(
            f"layer_types are {json.dumps(types):.120}, only full_attention in all {count} layers is supported: a "
            "sliding window is not computed here"
        )


def check_architectures(config: Config, *known: str) -> None:
    given = config.get("architectures") or []
    if not set(given) <= set(known):
        raise ValueError(f"architectures are {given!r}, expected {' or '.join(known)}")


# speculators


def speculators_layer(config: Config, algorithm: str) -> dict[str, Any]:
    """The nested settings of a speculators checkpoint's layers, with the sizes that may stand there or beside them."""
    layer = part_of(config, "transformer_layer_config")
    if config.get("speculators_config") is not None:
        proposals = ("proposal_methods", "default_proposal_method", "verifier")
        check_keys(part_of(config, "speculators_config"), *proposals, algorithm=algorithm)
    sizes = dict(layer)
    for key in ("draft_vocab_size", "target_hidden_size"):
        said = [part[key] for part in (config, layer) if part.get(key) is not None]
        if len({*map(str, said)}) > 1:
            raise ValueError(f"{key} is {said[0]!r}, but {said[1]!r} in transformer_layer_config")
        sizes[key] = said[0] if said else None
    return sizes


def speculators_algorithm(algorithm: str, num_tokens: int, target: TargetReference) -> dict[str, Any]:
    """What a speculators checkpoint says of itself beside its layers."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
    }


def verifier_note(config: Config, target: TargetReference) -> list[str]:
    """A speculators checkpoint names its target; another name is worth a look."""
    verifier = (config.get("speculators_config") or {}).get("verifier")
    if isinstance(verifier, Mapping) and verifier.get("name_or_path"):
        said = portable_name(str(verifier["name_or_path"]))
        if said.split("/")[-1].lower() != target.name.split("/")[-1].lower():
            return [f"the checkpoint says that its target is {said}; it is imported for {target.name}"]
    return []


# Tensors


def weights_path(folder: Path, files: Sequence[str]) -> Path:
    for file in files:
        if (folder / file).is_file():
            return folder / file
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} holds {found}; expected {' or '.join(files)}, in one piece")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(path) if path.suffix == ".safetensors" else _read_pickled(path)
    odd = [f"{name} {tensor.dtype}" for name, tensor in tensors.items() if tensor.is_complex()]
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            odd.append(f"{name} {tensor.dtype}")
    if odd:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{path} holds {'; '.join(odd)}; expected weights in {known}")
    return tensors


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """As `torch.save` wrote it; nothing in it is executed."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, truncated, or holds more than tensors: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected a mapping of names to tensors")
    strange = [str(name) for name, value in values.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ValueError(f"{path}: {', '.join(strange)} are no tensors, expected a mapping of names to tensors")
    return values


def lent(name: str, weights: TargetWeights, vocabulary: DraftVocabulary) -> torch.Tensor:
    """What `Format.copies` calls a tensor of the target's."""
    if name == DRAFT_LM_HEAD:
        return weights.lm_head[vocabulary.target_ids.to(weights.lm_head.device)]
    tensor: torch.Tensor = getattr(weights, name)
    return tensor


def without_copies(tensors: Tensors, copies: Mapping[str, str], weights: TargetWeights) -> dict[str, torch.Tensor]:
    """A file's tensors, less those that the head may have of its own and has not."""
    kept = dict(tensors)
    for name in tensors.keys() & copies.keys():
        with suppress(ValueError):
            check_copy(tensors[name], getattr(weights, copies[name]), source=name)
            del kept[name]
    return kept


def check_copy(given: torch.Tensor, own: torch.Tensor, *, source: str) -> None:
    """A head here borrows from its target, so what the file holds must be a copy, in the dtype of either."""
    if given.shape != own.shape:
        raise ValueError(f"{source} has shape {list(given.shape)}, expected the target's {list(own.shape)}")
    own = own.detach().to(given.device)
    differing = ((given.to(own.dtype) != own), (own.to(given.dtype) != given))
    num_rows = min(int(entries.any(dim=1).sum()) for entries in differing)
    if num_rows == 0:
        return
    raise ValueError(
        f"{source} is not the target's ({num_rows} of {len(own)} rows differ), expected a copy: the head was made for "
        "another target, or trained one of its own, which is not supported"
    )


# Vocabularies


def provenance_of(target: TargetReference) -> VocabularyProvenance:
    return VocabularyProvenance(target_fingerprint=target.fingerprint, tokenizer_hash=target.tokenizer_hash)


def full_vocabulary(target: TargetReference) -> DraftVocabulary:
    return replace(DraftVocabulary.full(target.vocab_size), provenance=provenance_of(target))


def vocabulary_from_maps(
    tensors: Tensors, *, size: int, target: TargetReference, marks: bool = True
) -> DraftVocabulary:
    """From `d2t` (differences) and, where the form has them (`marks`), `t2d`, as in EAGLE-3. A full vocabulary needs
    neither.

    Target ids instead of differences are taken for what they are where `t2d` proves it.
    """
    missing = [name for name in ("d2t", *(("t2d",) if marks else ())) if name not in tensors]
    if "d2t" not in tensors and "t2d" not in tensors and size == target.vocab_size:
        return full_vocabulary(target)
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}: {size} draft tokens of {target.vocab_size} need their map")
    d2t, t2d = tensors["d2t"], tensors.get("t2d")
    if list(d2t.shape) != [size]:
        raise ValueError(f"d2t has shape {list(d2t.shape)}, expected [{size}] by draft_vocab_size")
    provenance = provenance_of(target)
    try:
        return DraftVocabulary.from_maps(d2t, t2d, vocab_size=target.vocab_size, provenance=provenance)
    except ValueError:
        if t2d is None:
            raise
        with suppress(ValueError):
            return DraftVocabulary.from_maps(
                d2t, t2d, vocab_size=target.vocab_size, absolute=True, provenance=provenance
            )
        raise
