"""EAGLE-3 heads in the forms of other projects: read into our own form, and written from it.

All forms hold the same network, so a conversion keeps every weight and the draft logits. They differ in names, in how
they number the target's layers, and in where their configuration says what: `FORMATS` has an entry for each. In common
they have `fc`, `norm` and `lm_head` without biases, `d2t` as differences and `t2d` as marks, a draft LM head of its own
(never tied), Llama's unscaled rotary embeddings, the norm of the carried state taken for the logits alone, and the raw
state as the residual (or the normed one, `norm_before_residual`). Relatives that differ elsewhere are told by the flags
in `_ONE_VALUE`.

Reading is strict: every tensor is used or refused by name, and so is every configuration key that is not known to leave
the forward alone. What a file cannot show (a head trained for another target of equal sizes) no reader can find.

Knows nothing of models: a target comes as its `TargetReference` and its embedding [V, H].
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from heads.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    EMBEDDING_NAMES,
    WEIGHTS_FILE,
    TargetReference,
    load_head,
    load_tensors,
    portable_name,
    present_folder,
    read_json,
    read_tensors,
    staged_folder,
)
from heads.eagle3 import ARCHITECTURE, NUM_TAPS, Eagle3Config, Eagle3Head
from heads.vocab import DraftVocabulary, VocabularyProvenance

Config = Mapping[str, Any]
Tensors = Mapping[str, torch.Tensor]

PICKLED_WEIGHTS_FILE = "pytorch_model.bin"
EMBEDDING, BURIED_EMBEDDING = EMBEDDING_NAMES
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_VERSION = "0.3.0"
"""The version of the layout that is written. Readers do not act on it."""
SPECULATIVE_TOKENS = 5
"""What a speculators checkpoint proposes to its server. A server's own setting overrules it."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One project's form. `read` takes a configuration and the target's number of layers and refuses what it does not
    know; `write` is its inverse, and refuses what the form cannot say."""

    title: str
    conventions: str
    layer: str
    detect: Callable[[Config], bool]
    read: Callable[[Config, int], Eagle3Config]
    write: Callable[[Eagle3Config, TargetReference], dict[str, Any]]

    def spelling(self, name: str) -> str:
        """The form's name of one of our tensors."""
        return name.replace("midlayer.", f"{self.layer}.", 1) if name.startswith("midlayer.") else name


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """A head, the dtype of its file (float32 for a mixture), where it came from (for the card), and what a person
    should look at."""

    head: Eagle3Head
    dtype: torch.dtype
    origin: Mapping[str, Any]
    notes: Sequence[str]


def detect_format(config: Config, *, source: str) -> str:
    """The one form that a configuration has the marks of."""
    for name, form in FORMATS.items():
        if form.detect(config):
            return name
    raise ValueError(
        f"{source} is of no known form: architectures are {config.get('architectures')!r}, expected [{ARCHITECTURE!r}] "
        f"or a speculators_model_type. Known are {', '.join(FORMATS)}"
    )


def read_foreign_config(folder: Path | str, name: str | None = None) -> tuple[str, dict[str, Any]]:
    """A checkpoint's form (`name`, or else what its marks say) and configuration, before any tensor is read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give a local folder (download a Hub checkpoint first)")
    if (folder / CARD_FILE).is_file():
        raise ValueError(f"{folder} is an augmented model folder already (it holds {CARD_FILE}): use it as it is")
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG_FILE}: expected an EAGLE-3 checkpoint's folder")
    config = read_json(path)
    name = name or detect_format(config, source=str(path))
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown: expected {', '.join(FORMATS)}")
    return name, config


def read_foreign(
    folder: Path | str, name: str | None = None, *, target: TargetReference, embedding_weight: torch.Tensor
) -> Imported:
    """Read a checkpoint of another project as a head for `target`, ready to run."""
    folder = Path(folder)
    name, config = read_foreign_config(folder, name)
    form = FORMATS[name]
    try:
        head_config = form.read(config, target.num_layers)
        _check_target(head_config, target)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}, read as {name}: {error}") from error
    path = _weights_path(folder)
    tensors = _read_weights(path)
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None:
        _check_embedding(embedding, embedding_weight, source=f"{path}: {EMBEDDING}")
    head = Eagle3Head(head_config, _read_vocabulary(tensors, head_config, target, source=path))
    tensors = {"d2t": head.d2t, "t2d": head.t2d} | tensors  # both may be left out of a full vocabulary
    if BURIED_EMBEDDING in tensors:
        raise ValueError(f"{path} holds {BURIED_EMBEDDING}, expected an embedding under the name {EMBEDDING}")
    load_tensors(head, tensors, source=str(path), spelling=form.spelling)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    origin = {
        "imported_from": name,
        "source": portable_name(str(folder.resolve())),
        "weights_sha256": _sha256(path),
        "unused_settings": sorted(key for key in config if key in _NOT_OF_THE_FORWARD),
    }
    return Imported(
        head=head.bind(embedding_weight),
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        origin=origin,
        notes=_notes(name, config, head_config, target),
    )


def write_foreign(
    folder: Path | str, head_folder: Path | str, name: str, *, embedding_weight: torch.Tensor | None = None
) -> Path:
    """Write a saved head in another project's form, in one atomic step. The weights keep their bits.

    `embedding_weight`: the target's, to go with the head where the form's own library wants it (speculators).
    """
    folder, head_folder = new_folder(folder), present_folder(Path(head_folder))
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown: expected {', '.join(FORMATS)}")
    form = FORMATS[name]
    head, card = load_head(head_folder)
    config = form.write(head.config, card.target)
    assert form.read(config, card.target.num_layers) == head.config, f"{name} reads its own writing otherwise"
    saved = read_tensors(head_folder / WEIGHTS_FILE)
    tensors = {form.spelling(key): saved[key] for key in head.state_dict()}
    dtype = saved["fc.weight"].dtype
    if embedding_weight is not None:
        if name != "speculators":
            raise ValueError(f"{form.title} heads use the target's embedding: only speculators' may hold a copy")
        tensors[EMBEDDING] = embedding_weight.detach().to(device="cpu", dtype=dtype).contiguous()
    with staged_folder(folder) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
    return folder


def new_folder(folder: Path | str) -> Path:
    """A folder that a command may write: one that is not there yet, or empty. Nothing is ever replaced."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: name a new folder")
    return folder


# Configurations: which keys are read, which must have one value, and which leave the forward alone.

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
RESIDUAL_KEY = "norm_before_residual"
_RAW_RESIDUAL = {RESIDUAL_KEY: False}
_OPTIONAL_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "max_position_embeddings",
    "target_hidden_size",
)
_READ = (
    *_SIZES,
    *_OPTIONAL_SIZES,
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)
_ONE_VALUE: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    "input_norm": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
}
_NOT_OF_THE_FORWARD = frozenset(
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


def _check_keys(config: Config, *known: str, **one_value: Any) -> None:
    """Refuse every key that is neither read (`known`) nor known to leave the forward alone, and other values of
    those that may have only one. A key without a value says nothing."""
    problems = []
    for key, value in config.items():
        if value is None or key in known or key in _NOT_OF_THE_FORWARD:
            continue
        if key not in one_value:
            problems.append(f"{key} = {json.dumps(value):.80} is not known here and may change what the head computes")
        elif value != one_value[key]:
            problems.append(f"{key} = {json.dumps(value):.80}, only {json.dumps(one_value[key])} is supported")
    if problems:
        raise ValueError("; ".join(problems))


def _part(config: Config, key: str) -> Config:
    part = config.get(key)
    if not isinstance(part, Mapping):
        raise ValueError(f"{key} is {part!r:.80}, expected a mapping")
    return part


def _build(config: Config, taps: Sequence[int], num_layers: int) -> Eagle3Config:
    """A head's sizes from keys that all forms call alike."""
    for key in (*_SIZES, *_OPTIONAL_SIZES):
        value = config.get(key)
        if value is None and key in _OPTIONAL_SIZES:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r:.80}, expected a whole number from 1")
    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{key} is {value!r:.80}, expected a positive number")
    _check_rope(config)
    if max(taps) > num_layers:
        raise ValueError(f"taps are hidden_states {list(taps)}, but the target has {num_layers} layers")
    eos = config.get("eos_token_id")
    native = {key: config[key] for key in (*_READ, RESIDUAL_KEY) if key in config}
    native |= {"architectures": [ARCHITECTURE], TAPS_KEY: list(taps)}
    native["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return Eagle3Config.from_native(native)


def _check_rope(config: Config) -> None:
    """Unscaled rotary embeddings, whose base is said once. `from_native` refuses the scaled kinds."""
    bases = [config.get("rope_theta")]
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is None:
            continue
        part = _part(config, key)
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{key} is of type {kind!r}, only unscaled rotary embeddings are supported")
        _check_keys(part, "rope_type", "type", "rope_theta", partial_rotary_factor=1.0)
        bases.append(part.get("rope_theta"))
    said = sorted({float(base) for base in bases if base is not None})
    if len(said) > 1:
        raise ValueError(f"rope_theta is said to be {said[0]:g} and {said[1]:g}")


def _layer_ids(config: Config, key: str = TAPS_KEY) -> list[int] | None:
    ids = config.get(key)
    if ids is None:
        return None
    whole = isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    if not whole or len(ids) != NUM_TAPS:
        raise ValueError(f"{key} is {ids!r:.80}, expected {NUM_TAPS} whole numbers")
    return list(ids)


def reference_taps(num_layers: int) -> tuple[int, int, int]:
    """What is tapped where a form says nothing: the inputs of decoder layers 2, n//2 and n-3, as hidden_states."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"the checkpoint names no layers, and the target's {num_layers} are too few for the usual three: "
            f"2, n//2 and n-3 would be {list(taps)}, expected ascending numbers"
        )
    return taps


def _sizes(config: Eagle3Config) -> dict[str, Any]:
    """Keys of a llama-like configuration, which all forms call alike."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


# SafeAILab


def _is_eagle3(config: Config) -> bool:
    return ARCHITECTURE in (config.get("architectures") or [])


def _detect_safeailab(config: Config) -> bool:
    return _is_eagle3(config) and TAPS_KEY not in config and "eagle_config" not in config


def _read_safeailab(config: Config, num_layers: int) -> Eagle3Config:
    _check_keys(config, *_READ, **_ONE_VALUE, **_RAW_RESIDUAL, architectures=[ARCHITECTURE])
    return _build(config, reference_taps(num_layers), num_layers)


def _write_safeailab(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    usual = reference_taps(target.num_layers)
    if config.taps != usual:
        raise ValueError(
            f"SafeAILab's form names no layers and means hidden_states {list(usual)}; this head reads "
            f"{list(config.taps)}: export it as specforge, speculators or vllm"
        )
    return _plain(config)


def _plain(config: Eagle3Config) -> dict[str, Any]:
    if config.norm_before_residual:
        raise ValueError(
            f"this form has the raw state as the residual, and this head the normed one ({RESIDUAL_KEY}): "
            "export it as speculators or vllm"
        )
    return {
        "architectures": [ARCHITECTURE],
        **_sizes(config),
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
    }


# SpecForge


def _detect_specforge(config: Config) -> bool:
    return _is_eagle3(config) and TAPS_KEY not in config and "eagle_config" in config


def _read_specforge(config: Config, num_layers: int) -> Eagle3Config:
    _check_keys(config, *_READ, "eagle_config", **_ONE_VALUE, **_RAW_RESIDUAL, architectures=[ARCHITECTURE])
    return _build(config, _specforge_taps(config) or reference_taps(num_layers), num_layers)


def _specforge_taps(config: Config) -> list[int] | None:
    """Layers are counted from 0 there, and their outputs are meant: hidden_states index i + 1."""
    if config.get("eagle_config") is None:
        return None
    part = _part(config, "eagle_config")
    _check_keys(part, TAPS_KEY, use_aux_hidden_state=True)
    layers = _layer_ids(part)
    return None if layers is None else [layer + 1 for layer in layers]


def _write_specforge(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    layers = [tap - 1 for tap in config.taps]
    return {**_plain(config), "eagle_config": {TAPS_KEY: layers, "use_aux_hidden_state": True}}


# vLLM and SGLang: our own form


def _detect_vllm(config: Config) -> bool:
    return _is_eagle3(config) and TAPS_KEY in config


def _read_vllm(config: Config, num_layers: int) -> Eagle3Config:
    known = (*_READ, RESIDUAL_KEY, TAPS_KEY, "eagle_config")
    _check_keys(config, *known, **_ONE_VALUE, architectures=[ARCHITECTURE])
    indices, layers_plus_one = _layer_ids(config), _specforge_taps(config)
    if indices is not None and layers_plus_one is not None and indices != layers_plus_one:
        raise ValueError(
            f"taps are named twice and differently: {TAPS_KEY} {indices} are hidden_states indices, expected those of "
            f"eagle_config + 1, which are {layers_plus_one}"
        )
    return _build(config, indices or layers_plus_one or reference_taps(num_layers), num_layers)


def _write_vllm(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    return config.to_native()


# speculators

_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")


def _detect_speculators(config: Config) -> bool:
    return "speculators_model_type" in config


def _read_speculators(config: Config, num_layers: int) -> Eagle3Config:
    layer = _part(config, "transformer_layer_config")
    known = ("architectures", "speculators_config", "transformer_layer_config", "draft_vocab_size", TAPS_KEY)
    _check_keys(
        config,
        *known,
        "target_hidden_size",
        RESIDUAL_KEY,
        speculators_model_type="eagle3",
        norm_before_fc=False,
        fc_norm=False,
        input_norm=False,
        norm_output=False,
        embed_requires_grad=False,
        tie_word_embeddings=False,
        model_type="speculator_model",
    )
    if config.get(RESIDUAL_KEY) is None:
        raise ValueError(
            f"{RESIDUAL_KEY} is missing, and readers of speculators checkpoints disagree on what that means: "
            "expected true or false"
        )
    architectures = config.get("architectures") or []
    if not set(architectures) <= set(_SPECULATORS_ARCHITECTURES):
        raise ValueError(f"architectures are {architectures!r}, expected {' or '.join(_SPECULATORS_ARCHITECTURES)}")
    if config.get("speculators_config") is not None:
        proposals = ("proposal_methods", "default_proposal_method", "verifier")
        _check_keys(_part(config, "speculators_config"), *proposals, algorithm="eagle3")
    _check_keys(layer, *_READ, "architectures", **_ONE_VALUE)
    sizes = dict(layer)
    for key in ("draft_vocab_size", "target_hidden_size"):
        said = [part[key] for part in (config, layer) if part.get(key) is not None]
        if len({*map(str, said)}) > 1:
            raise ValueError(f"{key} is {said[0]!r}, but {said[1]!r} in transformer_layer_config")
        sizes[key] = said[0] if said else None
    sizes[RESIDUAL_KEY] = config[RESIDUAL_KEY]
    return _build(sizes, _layer_ids(config) or reference_taps(num_layers), num_layers)


def _write_speculators(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [_SPECULATORS_ARCHITECTURES[0]],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        RESIDUAL_KEY: config.norm_before_residual,
        "embed_requires_grad": False,
        TAPS_KEY: list(config.taps),
        "tie_word_embeddings": False,
        "transformer_layer_config": _sizes(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
    }


# Tensors


def _weights_path(folder: Path) -> Path:
    for file in (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE):
        if (folder / file).is_file():
            return folder / file
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} holds {found}; expected {WEIGHTS_FILE} or {PICKLED_WEIGHTS_FILE}, in one piece")


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(path) if path.name == WEIGHTS_FILE else _read_pickled(path)
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


def _read_vocabulary(
    tensors: Tensors, config: Eagle3Config, target: TargetReference, *, source: Path
) -> DraftVocabulary:
    provenance = VocabularyProvenance(target_fingerprint=target.fingerprint, tokenizer_hash=target.tokenizer_hash)
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    missing = [name for name in ("d2t", "t2d") if name not in tensors]
    if len(missing) == 2 and size == vocab_size:
        return DraftVocabulary(target_ids=torch.arange(size), vocab_size=vocab_size, provenance=provenance)
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}: {size} draft tokens of {vocab_size} need their map")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if list(d2t.shape) != [size]:
        raise ValueError(f"{source}: d2t has shape {list(d2t.shape)}, expected [{size}] by draft_vocab_size")
    try:
        return DraftVocabulary.from_maps(d2t, t2d, vocab_size=vocab_size, provenance=provenance)
    except ValueError as error:
        if _is_absolute(d2t, t2d, vocab_size):
            raise ValueError(
                f"{source}: d2t holds target ids, expected differences (target = draft + d2t[draft])"
            ) from error
        raise ValueError(f"{source}: {error}") from error


def _is_absolute(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int) -> bool:
    try:
        DraftVocabulary.from_maps(d2t, t2d, vocab_size=vocab_size, absolute=True)
    except ValueError:
        return False
    return True


def _check_target(config: Eagle3Config, target: TargetReference) -> None:
    sizes = (config.hidden_size, config.vocab_size)
    if sizes != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the head has hidden size {sizes[0]} and is for a vocabulary of {sizes[1]}; "
            f"{target.name} has {target.hidden_size} and {target.vocab_size}"
        )


def _check_embedding(given: torch.Tensor, own: torch.Tensor, *, source: str) -> None:
    """A head here borrows its target's embedding, so the file's must be a copy, in the dtype of either."""
    if given.shape != own.shape:
        raise ValueError(f"{source} has shape {list(given.shape)}, expected the target's {list(own.shape)}")
    own = own.detach().to(given.device)
    differing = ((given.to(own.dtype) != own), (own.to(given.dtype) != given))
    num_rows = min(int(entries.any(dim=1).sum()) for entries in differing)
    if num_rows == 0:
        return
    raise ValueError(
        f"{source} is not the target's ({num_rows} of {len(own)} rows differ), expected a copy: the head was made for "
        "another target, or trained an embedding of its own, which is not supported"
    )


def _notes(name: str, config: Config, head: Eagle3Config, target: TargetReference) -> list[str]:
    """What is no error, but is one often enough."""
    notes = []
    for shift, other in ((1, "hidden_states indices"), (-1, "layers counted from 0")):
        usual = (2, target.num_layers // 2, target.num_layers - 3)
        if head.taps == tuple(tap + shift for tap in usual):
            notes.append(
                f"taps are hidden_states {list(head.taps)}, each {'one above' if shift > 0 else 'one below'} the usual "
                f"{list(usual)}: if the file's ids are {other}, it is off by one and the head will accept little"
            )
    verifier = (config.get("speculators_config") or {}).get("verifier")
    if isinstance(verifier, Mapping) and verifier.get("name_or_path"):
        said = portable_name(str(verifier["name_or_path"]))
        if said.split("/")[-1].lower() != target.name.split("/")[-1].lower():
            notes.append(f"the checkpoint says that its target is {said}; it is imported for {target.name}")
    return notes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FORMATS: Mapping[str, Format] = {
    "safeailab": Format(
        title="SafeAILab EAGLE",
        conventions=(
            "midlayer.*; d2t differences; names no layers and taps the inputs of layers 2, n//2, n-3 (hidden_states of "
            "the same numbers); the residual is the raw state; the embedding is the target's"
        ),
        layer="midlayer",
        detect=_detect_safeailab,
        read=_read_safeailab,
        write=_write_safeailab,
    ),
    "specforge": Format(
        title="SpecForge",
        conventions=(
            "as SafeAILab's, but eagle_config names layers: outputs, counted from 0 (hidden_states index less one), "
            "by default 1, n//2-1, n-4; fc_norm, norm_output and a target_hidden_size of its own are refused"
        ),
        layer="midlayer",
        detect=_detect_specforge,
        read=_read_specforge,
        write=_write_specforge,
    ),
    "speculators": Format(
        title="speculators (vLLM)",
        conventions=(
            "layers.0.*; d2t differences; the layer's settings are nested; top-level layer ids are hidden_states "
            "indices, by default 2, n//2, n-3; norm_before_residual must be there; may hold a copy of the "
            "target's embedding; a full vocabulary has no maps"
        ),
        layer="layers.0",
        detect=_detect_speculators,
        read=_read_speculators,
        write=_write_speculators,
    ),
    "vllm": Format(
        title="vLLM and SGLang",
        conventions=(
            "headstart's own files without the card: midlayer.*; d2t differences; taps named as hidden_states indices "
            "(vLLM) and, one less, in eagle_config (SGLang), which must agree; norm_before_residual may be true, which "
            "SGLang does not know"
        ),
        layer="midlayer",
        detect=_detect_vllm,
        read=_read_vllm,
        write=_write_vllm,
    ),
}
