"""Heads in the forms of other projects: read into our own form, and written from it.

`FORMATS` has an entry for each form; the modules of this package hold one family's forms each. A conversion keeps every
weight and the draft logits. Reading is strict (see `heads.foreign.common`).

Knows nothing of models: a target comes as its `TargetReference` and its `TargetWeights`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from heads.base import DraftHead, HeadConfig, TargetSizes, TargetWeights
from heads.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
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
from heads.foreign.common import (
    BURIED_EMBEDDING,
    EMBEDDING,
    LM_HEAD,
    NOT_OF_THE_FORWARD,
    Config,
    Format,
    Tensors,
    check_copy,
    lent,
    read_weights,
    weights_path,
    without_copies,
)
from heads.foreign.dflash import DFLASH_FORMATS
from heads.foreign.eagle1 import EAGLE1_FORMATS
from heads.foreign.eagle3 import EAGLE3_FORMATS
from heads.foreign.hydra import HYDRA_FORMATS
from heads.foreign.medusa import MEDUSA_FORMATS
from heads.foreign.peagle import PEAGLE_FORMATS
from heads.registry import FAMILIES, family_of_head

__all__ = [
    "FORMATS",
    "Format",
    "Imported",
    "detect_format",
    "list_of_forms",
    "new_folder",
    "read_foreign",
    "read_foreign_config",
    "write_foreign",
]

FORMATS: Mapping[str, Format[Any]] = {
    **EAGLE3_FORMATS,
    **PEAGLE_FORMATS,
    **DFLASH_FORMATS,
    **EAGLE1_FORMATS,
    **MEDUSA_FORMATS,
    **HYDRA_FORMATS,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """A head, the dtype of its file (float32 for a mixture), where it came from (for the card), and what a person
    should look at."""

    head: DraftHead
    dtype: torch.dtype
    origin: Mapping[str, Any]
    notes: Sequence[str]


def list_of_forms() -> str:
    """A table of all forms for people, by families."""
    width = max(map(len, FORMATS))
    lines = []
    for family in dict.fromkeys(form.family for form in FORMATS.values()):
        lines.append(f"  {FAMILIES[family].title}")
        lines += [f"    {name:<{width}}  {form.title}" for name, form in FORMATS.items() if form.family == family]
    return "\n".join(lines)


def detect_format(config: Config, *, source: str) -> str:
    """The one form that a configuration has the marks of."""
    for name, form in FORMATS.items():
        if form.detect(config):
            return name
    raise ValueError(
        f"{source} is of no known form: architectures are {config.get('architectures')!r}, num_hidden_layers is "
        f"{config.get('num_hidden_layers')!r}. Known are {', '.join(FORMATS)}"
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
        raise ValueError(f"{folder} holds no {CONFIG_FILE}: expected the folder of a draft head's checkpoint")
    config = read_json(path)
    if name is None:
        try:
            name = detect_format(config, source=str(path))
        except ValueError as error:
            raise ValueError(f"{error}{_forms_of_weights(folder)}") from error
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown: expected {', '.join(FORMATS)}")
    return name, config


def read_foreign(
    folder: Path | str,
    name: str | None = None,
    *,
    target: TargetReference,
    weights: TargetWeights,
    sizes: TargetSizes | None = None,
) -> Imported:
    """Read a checkpoint of another project as a head for `target`, ready to run.

    `sizes`: the target's, for forms whose files leave sizes to it.
    """
    folder = Path(folder)
    name, config = read_foreign_config(folder, name)
    form = FORMATS[name]
    try:
        head_config = form.read(config, target)
        _check_target(head_config, target)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}, read as {name}: {error}") from error
    strange = [file for file in form.refused_files if (folder / file).exists()]
    if strange:
        raise ValueError(f"{folder} holds {', '.join(strange)}, which changes what the head computes: not supported")
    path = weights_path(folder, form.weights_files)
    tensors = without_copies(read_weights(path), form.own_or_copies, weights)
    unread = sorted(key for key in tensors if key.startswith(form.unread))
    tensors = {key: tensor for key, tensor in tensors.items() if key not in unread}
    try:
        head_config = form.settle(head_config, tensors, sizes)
        head, own = _empty_head(form, tensors, head_config, target, weights)
        # A file may lack what follows from the rest: maps of a full vocabulary, and what the target lends.
        known = {form.spelling(key): buffer for key, buffer in head.named_buffers()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}{_other_forms(name, tensors)}") from error
    try:
        load_tensors(head, known | own, source=str(path), spelling=form.spelling)
    except ValueError as error:
        raise ValueError(f"{error}{_other_forms(name, tensors)}") from error
    dtypes = {tensors[key].dtype for key in tensors.keys() - form.copies.keys() if tensors[key].is_floating_point()}
    origin = {
        "imported_from": name,
        "source": portable_name(str(folder.resolve())),
        "weights_sha256": _sha256(path),
        "unused_settings": sorted(key for key in config if key in NOT_OF_THE_FORWARD),
    }
    return Imported(
        head=head,
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        origin=origin,
        notes=[*_borrowed(own, tensors), *_left_out(unread), *form.notes(config, head.config, target)],
    )


def _empty_head(
    form: Format[Any], tensors: Tensors, config: HeadConfig, target: TargetReference, weights: TargetWeights
) -> tuple[DraftHead, dict[str, torch.Tensor]]:
    """A head, and every tensor of the file that is not a copy of the target's, for `load_tensors`."""
    own = {name: tensor for name, tensor in tensors.items() if name not in form.copies}
    if BURIED_EMBEDDING in own:
        raise ValueError(f"it holds {BURIED_EMBEDDING}, expected an embedding under the name {EMBEDDING}")
    vocabulary = form.vocabulary(own, config, target)
    for name in tensors.keys() & form.copies.keys():
        check_copy(tensors[name], lent(form.copies[name], weights, vocabulary), source=name)
    head = FAMILIES[form.family].head(config, vocabulary).bind(weights)
    return head, form.to_ours(own, head, weights)


def _borrowed(own: Tensors, tensors: Tensors) -> list[str]:
    """What `to_ours` took from the target, for want of it in the file."""
    return [f"{LM_HEAD} is not in the file: the target's was taken"] if LM_HEAD in own.keys() - tensors.keys() else []


def _left_out(unread: Sequence[str]) -> list[str]:
    return [f"{', '.join(unread)}: left out, for no draft depends on it"] if unread else []


def _forms_of_weights(folder: Path) -> str:
    """A hint for a folder whose configuration says nothing."""
    files = dict.fromkeys(file for form in FORMATS.values() for file in form.weights_files)
    with suppress(ValueError):
        return _look_like(read_weights(weights_path(folder, list(files))))
    return ""


def _other_forms(name: str, tensors: Tensors) -> str:
    """A hint where the tensors are those of other forms than the one they were read as."""
    if FORMATS[name].looks_alike(tensors):
        return ""
    hint = _look_like(tensors)
    return f"{hint}, not like {FORMATS[name].title}'s" if hint else ""


def _look_like(tensors: Tensors) -> str:
    alike = {name: form for name, form in FORMATS.items() if form.looks_alike(tensors)}
    if not alike:
        return ""
    families = " or ".join(dict.fromkeys(FAMILIES[form.family].title for form in alike.values()))
    return (
        f". The tensors look like those of {families} (--from {' or '.join(alike)}, "
        f"with the {CONFIG_FILE} that belongs to them)"
    )


def write_foreign(
    folder: Path | str, head_folder: Path | str, name: str, *, weights: TargetWeights | None = None
) -> Path:
    """Write a saved head in another project's form, in one atomic step. The weights keep their bits.

    `weights`: the target's, for forms that hold copies of them, or may: then they go with the head.
    """
    folder, head_folder = new_folder(folder), present_folder(Path(head_folder))
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown: expected {', '.join(FORMATS)}")
    form = FORMATS[name]
    head, card = load_head(head_folder)
    family = family_of_head(head)
    if form.family != family:
        fitting = [other for other, one in FORMATS.items() if one.family == family]
        raise ValueError(
            f"{name} is a form of {FAMILIES[form.family].title} heads, and {head_folder} holds "
            f"{FAMILIES[family].title}: "
            + (f"expected {' or '.join(fitting)}" if fitting else "no other project has a form for such heads")
        )
    if form.written_copies and weights is None:
        raise ValueError(f"{form.title}'s form holds copies of the target's weights: the target is needed too")
    saved = read_tensors(head_folder / WEIGHTS_FILE)  # `head` has them in float32
    dtype = next(saved[name].dtype for name, _ in head.named_parameters())
    head_config, ours = form.restate(head, {key: saved[key] for key in head.state_dict()}, weights)
    config = form.write(head_config, card.target)
    tensors = form.from_ours({form.spelling(key): tensor for key, tensor in ours.items()}, head)
    again = form.settle(form.read(config, card.target), tensors, None)
    assert again == head_config, f"{name} reads its own writing otherwise: {again}, not {head_config}"
    if weights is not None:
        tensors |= {
            key: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            for key, tensor in _copies(form, weights, head, tensors).items()
        }
    with staged_folder(folder) as staging:
        save_file(tensors, staging / form.weights_files[0], metadata={"format": "pt"})
        text = json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
    return folder


def _copies(form: Format[Any], weights: TargetWeights, head: DraftHead, tensors: Tensors) -> dict[str, torch.Tensor]:
    """What goes with a head of its target's."""
    if form.written_copies:
        return {name: lent(which, weights, head.vocabulary) for name, which in form.written_copies.items()}
    if not form.may_carry_embedding:
        family = [(name, one) for name, one in FORMATS.items() if one.family == form.family]
        carriers = [name for name, one in family if one.may_carry_embedding or one.written_copies]
        raise ValueError(
            f"{form.title} heads use the target's embedding: "
            f"only {' or '.join(carriers) or 'those of other families'} may hold a copy"
        )
    return {} if EMBEDDING in tensors else {EMBEDDING: weights.embedding}  # an embedding of its own stays


def new_folder(folder: Path | str) -> Path:
    """A folder that a command may write: one that is not there yet, or empty. Nothing is ever replaced."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: name a new folder")
    return folder


def _check_target(config: HeadConfig, target: TargetReference) -> None:
    sizes = (config.hidden_size, config.vocab_size)
    if sizes != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the head has hidden size {sizes[0]} and is for a vocabulary of {sizes[1]}; "
            f"{target.name} has {target.hidden_size} and {target.vocab_size}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
