"""A trained head on disk: `model.safetensors` and `config.json` in its family's public form, and the card
`headstart.json`.

The card says which target the head belongs to (a name and a fingerprint, never a path of this machine), how it was
made and how well it does. Loading is strict: any missing, extra or misshapen tensor is named and refused.
Saving is atomic: a folder is either the old one or the new one, whenever the process dies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heads.base import DraftHead, TargetWeights
from heads.registry import FAMILIES, family_of_config
from heads.vocab import provenance_from_dict

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CARD_FILE = "headstart.json"
CARD_VERSION = 1
EMBEDDING_NAMES = ("embed_tokens.weight", "midlayer.embed_tokens.weight")


@dataclass(frozen=True, kw_only=True)
class TargetReference:
    """Which target a head belongs to. The fingerprint is what is checked; the names are for people.

    tokenizer_hash: of its tokenizer, vocabulary_hash: of the tokens and their ids alone. adapter: the LoRA adapter that
    is merged into the target; base_fingerprint: of the target without it. quantization: of its weights.
    """

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str = ""
    vocabulary_hash: str = ""
    adapter: str = ""
    base_fingerprint: str = ""
    quantization: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", portable_name(self.name))


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """What `headstart.json` holds. The free-form parts are settings and figures, documented where they are written."""

    target: TargetReference
    family: str = "eagle3"
    drafter: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self, head: DraftHead) -> dict[str, Any]:
        return {
            "headstart_version": CARD_VERSION,
            "target": asdict(self.target),
            "head": {
                "family": self.family,
                "taps": list(head.config.taps),
                "draft_vocab_size": head.config.draft_vocab_size,
                "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
                "vocabulary": {**asdict(head.vocabulary.provenance), **self.vocabulary},
            },
            "drafter": dict(self.drafter),
            "acceptance": dict(self.acceptance),
            "training": dict(self.training),
            **({"certificate": dict(self.certificate)} if self.certificate else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadCard:
        version = values.get("headstart_version")
        if version != CARD_VERSION:
            raise ValueError(f"{CARD_FILE} has version {version!r}, this headstart reads version {CARD_VERSION}")
        for part in ("drafter", "acceptance", "training", "certificate"):
            if not isinstance(values.get(part, {}), Mapping):
                raise ValueError(f"{CARD_FILE}: {part!r} holds {values[part]!r:.60}; expected a mapping, or nothing")
        try:
            target = TargetReference(**values["target"])
            head = values["head"]
            return cls(
                target=target,
                family=head["family"],
                drafter=values.get("drafter", {}),
                acceptance=values.get("acceptance", {}),
                training=values.get("training", {}),
                vocabulary=head.get("vocabulary", {}),
                certificate=values.get("certificate", {}),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{CARD_FILE} is incomplete or has unknown fields: {error}") from error


def portable_name(name: str) -> str:
    """A name that means the same on another machine: hub names and bare names stay, paths keep their last part."""
    path = PurePath(name)
    is_hub_name = len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", "..", "~")
    return name if is_hub_name and "\\" not in name else path.name


def save_head(
    folder: Path | str,
    head: DraftHead,
    card: HeadCard,
    *,
    dtype: torch.dtype | None = None,
    add_files: Callable[[Path], None] | None = None,
    former: Path | None = None,
) -> Path:
    """Write an augmented model folder in one atomic step; `add_files` may write more into it before it appears.

    former: where a folder that it replaces goes, instead of being removed.
    """
    folder = Path(folder)
    tensors = {name: _for_disk(tensor, dtype) for name, tensor in head.state_dict().items()}
    broken = [name for name, tensor in tensors.items() if tensor.numel() == 0 or not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ValueError(f"refusing to save empty or non-finite tensors: {', '.join(broken)}")
    native = head.config.to_native() | {"torch_dtype": str(dtype or head.dtype).removeprefix("torch.")}
    with staged_folder(folder, former=former) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(native, indent=2) + "\n")
        (staging / CARD_FILE).write_text(json.dumps(card.to_dict(head), indent=2) + "\n")
        if add_files is not None:
            add_files(staging)
    return folder


@contextmanager
def staged_folder(folder: Path, *, former: Path | None = None) -> Iterator[Path]:
    """A new folder to write into. It takes the place of `folder` in one atomic step, or goes if the block fails.

    former: where the folder that it replaces goes, instead of being removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{folder.name}.new-*"):  # of saves that were killed: a folder has one writer
        shutil.rmtree(stale, ignore_errors=True)
    staging = folder.parent / f".{folder.name}.new-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        _sync_files(staging)
        _replace_folder(staging, folder, former)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """The same for a file: a name to write it under first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.new")
    try:
        yield staging
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def load_head(
    folder: Path | str,
    weights: TargetWeights | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[DraftHead, HeadCard]:
    """Read a folder written by `save_head`; with the target's `weights` the head is ready to run."""
    folder = present_folder(Path(folder))
    card = read_card(folder)
    refuse_headless(folder)
    native = read_json(folder / CONFIG_FILE)
    family = FAMILIES[family_of_config(native)]
    config = family.config.from_native(native, num_target_layers=card.target.num_layers)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    try:
        vocabulary = family.head.read_vocabulary(tensors, config, provenance_from_dict(card.vocabulary))
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error
    head = family.head(config, vocabulary)
    load_tensors(head, tensors, source=str(folder / WEIGHTS_FILE))
    head.to(device=device, dtype=dtype)
    return head if weights is None else head.bind(weights), card


def refuse_headless(folder: Path) -> None:
    """Refuse a folder with a card but without a head, such as a head's LoRA adapter."""
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} holds no head of its own (it has no {CONFIG_FILE}). If it is a head's LoRA adapter, make the "
            f"head of it: headstart import {folder} --base BASE --out HEAD"
        )


def read_card(folder: Path | str) -> HeadCard:
    """The card alone: enough to find and check the target before any tensor is read."""
    folder = present_folder(Path(folder))
    if not (folder / CARD_FILE).is_file():
        raise ValueError(f"{folder} is not an augmented model folder: it has no {CARD_FILE}")
    return HeadCard.from_dict(read_json(folder / CARD_FILE))


def update_card(folder: Path | str, **changes: Mapping[str, Any]) -> HeadCard:
    """Replace parts of a saved head's card (`drafter`, `acceptance`, `training`, `certificate`), in one atomic step."""
    assert changes.keys() <= {"drafter", "acceptance", "training", "certificate"}, f"no free parts: {sorted(changes)}"
    folder = recover_folder(Path(folder))
    card = replace(read_card(folder), **changes)  # type: ignore[arg-type]
    values = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    with staged_file(folder / CARD_FILE) as staging:
        staging.write_text(json.dumps({**values, **changes}, indent=2) + "\n", encoding="utf-8")
    return card


def check_target(card: HeadCard, *, fingerprint: str, name: str, hidden_size: int, vocab_size: int) -> None:
    """A head is only good for the target it was trained on: other sizes cannot run, other weights accept little."""
    sizes = (card.target.hidden_size, card.target.vocab_size)
    if sizes != (hidden_size, vocab_size):
        raise ValueError(
            f"the head belongs to {card.target.name} with hidden size {sizes[0]} and vocabulary {sizes[1]}; "
            f"{name} has {hidden_size} and {vocab_size}"
        )
    if card.target.fingerprint != fingerprint:
        raise ValueError(
            f"the head was trained on {described(card.target)} ({card.target.fingerprint}), "
            f"but {name} has other weights or another tokenizer ({fingerprint}){_remedy(card.target)}"
        )


def check_relative(card: HeadCard, target: TargetReference) -> None:
    """Whether a head can draft for `target`, another version of the one that it was trained on: the same sizes, and the
    same tokens under the same ids. A fingerprint tells both: versions of one base need no further proof."""
    own = card.target
    if {own.fingerprint, own.base_fingerprint} & {target.fingerprint, target.base_fingerprint} - {""}:
        return
    sizes = {
        "hidden size": (own.hidden_size, target.hidden_size),
        "vocabulary": (own.vocab_size, target.vocab_size),
        "number of layers": (own.num_layers, target.num_layers),
    }
    for what, (wanted, found) in sizes.items():
        if wanted != found:
            raise ValueError(
                f"the head belongs to {described(own)} with {what} {wanted}, {target.name} has {found}: it is no other "
                "version of the same model"
            )
    if own.vocabulary_hash and target.vocabulary_hash:
        same = own.vocabulary_hash == target.vocabulary_hash
    else:
        same = own.tokenizer_hash == target.tokenizer_hash
    if not same:
        raise ValueError(
            f"the head was trained with the tokenizer of {described(own)}, and that of {target.name} has other tokens "
            "or other ids: its draft vocabulary would mean other words"
        )


def described(target: TargetReference) -> str:
    """A target in words."""
    name = f"{target.name} in {target.quantization}" if target.quantization else target.name
    return f"{name} with adapter {target.adapter}" if target.adapter else name


def _remedy(own: TargetReference) -> str:
    if own.adapter:
        return f": give its adapter {own.adapter} too (--adapter, target.adapter)"
    if own.quantization:
        return f": load the target in {own.quantization} too (--quantization, target.quantization)"
    return ""


def load_tensors(
    head: DraftHead, tensors: Mapping[str, torch.Tensor], *, source: str, spelling: Callable[[str], str] = str
) -> None:
    """Fill every parameter and buffer of `head`; anything that does not fit exactly is named and refused.

    `spelling` gives the name under which `tensors` holds one of the head's.
    """
    names = {name: spelling(name) for name in head.state_dict()}
    expected = {names[name]: tensor for name, tensor in head.state_dict().items()}
    given = {name: tensor for name, tensor in tensors.items() if name in expected or name not in EMBEDDING_NAMES}
    problems = [f"missing {name} {list(expected[name].shape)}" for name in sorted(expected.keys() - given.keys())]
    problems += [f"unknown {name} {list(given[name].shape)}" for name in sorted(given.keys() - expected.keys())]
    for name in sorted(expected.keys() & given.keys()):
        want, have = expected[name], given[name]
        if want.shape != have.shape:
            problems.append(f"{name} has shape {list(have.shape)}, expected {list(want.shape)}")
        elif want.is_floating_point() != have.is_floating_point():
            problems.append(f"{name} has dtype {have.dtype}, expected {want.dtype}")
        elif have.is_floating_point() and not bool(torch.isfinite(have).all()):
            problems.append(f"{name} holds non-finite values")
    if problems:
        raise ValueError(f"{source} is not this head: {'; '.join(problems)}")
    head.load_state_dict({name: given[spelled] for name, spelled in names.items()})


def present_folder(folder: Path) -> Path:
    """Where the content of `folder` is: in it, or under the name that it has between a save's two renames.

    For readers. They must not rename: a save that is still alive would find its place taken.
    """
    previous = _previous(folder)
    return previous if not folder.exists() and previous.exists() else folder


def recover_folder(folder: Path) -> Path:
    """Undo a save that died between its two renames. For the folder's one writer; readers use `present_folder`."""
    previous = _previous(folder)
    if not folder.exists() and previous.exists():
        previous.rename(folder)
    return folder


def _previous(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"


def _replace_folder(staging: Path, folder: Path, former: Path | None) -> None:
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    staging.rename(folder)
    _sync(folder.parent)
    if former is not None and previous.exists():
        former.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(former, ignore_errors=True)
        previous.rename(former)
    shutil.rmtree(previous, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Data must reach the disk before the rename does, or a power cut leaves a complete name on empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _for_disk(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach().to("cpu")
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def lock_file(descriptor: int, *, wait: bool = True) -> bool:
    """Keep other processes from a file or folder until its descriptor is closed; False where one has it and `wait` is
    off. Systems and file systems without such locks do without.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error
