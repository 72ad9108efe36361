"""How the HEAD of a command becomes a drafter: `SPEC`, or several joined by `+`.

    FOLDER          a trained head (an augmented model's folder); alone, it is joined by the lookup
    ngram           lookup in the request's own text; suffix: the same by suffixes of any length
    model:FOLDER    a smaller model with the target's tokenizer
    layers:N        the target's own first N layers
    int8, int4      the target itself, its weights rounded
    none            no drafts: plain decoding

`model`, `layers`, `int8` and `int4` take `,vocab=N` behind: draft among N tokens only, which makes the LM head cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heads.base import DraftHead
from heads.checkpoint import CARD_FILE, HeadCard, load_head, present_folder, read_card, refuse_headless
from heads.early_exit import EarlyExitHead
from heads.registry import family_of_head
from infer.adapter import Adapter
from infer.calibration import Calibration
from infer.drafters.base import Drafter
from infer.drafters.growing import TreeGrower
from infer.drafters.head import HeadDrafter
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.model import ModelDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.target import TargetModel

LOOKUP, NO_DRAFT, FOLDER = "ngram", "none", "folder"
MODELS_FOLDER = Path("models")


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """One part of a HEAD: what `kind` of drafter, of what (`argument`), and how (`options`)."""

    text: str
    kind: str
    argument: str = ""
    options: Mapping[str, int] = field(default_factory=dict)


def parse_spec(text: str | Path) -> list[DrafterSpec]:
    """The parts of a HEAD; ValueError for what is none."""
    text = str(text)
    parts = [text] if present_folder(Path(text)).is_dir() else text.split("+")
    specs = [_parse_part(part) for part in parts]
    repeated = next((spec.text for i, spec in enumerate(specs) if spec in specs[:i]), None)
    if repeated is not None:
        raise ValueError(f"{text!r} names {repeated!r} twice")
    if len(specs) > 1 and any(spec.kind == NO_DRAFT for spec in specs):
        raise ValueError(f"{text!r} joins 'none' with a drafter: leave one of them out")
    return specs


def load_drafter(head: str | Path, target: TargetModel, *, hybrid: bool = True) -> Drafter | None:
    """The drafter that HEAD names. A trained head alone is joined by the lookup (`hybrid`)."""
    specs = parse_spec(head)
    if specs[0].kind == NO_DRAFT:
        return None
    drafters = [_make(spec, target, index) for index, spec in enumerate(specs)]
    if hybrid and [spec.kind for spec in specs] == [FOLDER]:
        drafters.append(NgramDrafter())
    return drafters[0] if len(drafters) == 1 else HybridDrafter(drafters)


def head_drafter(
    head: DraftHead, target: TargetModel, *, calibration: Calibration | None = None, name: str | None = None
) -> TreeGrower:
    """The drafter of a trained head, whatever its family. `name` tells heads of one hybrid apart."""
    if isinstance(head, EarlyExitHead):
        return ModelDrafter.early_exit(head, target, calibration=calibration, name=name or family_of_head(head))
    return HeadDrafter(head, calibration=calibration, name=name)


def head_folder(head: str | Path) -> Path | None:
    """The trained head's folder in a HEAD, if there is one; ValueError if there are several."""
    folders = [spec.argument for spec in parse_spec(head) if spec.kind == FOLDER]
    if len(folders) > 1:
        raise ValueError(f"{str(head)!r} names several trained heads; one was expected")
    return Path(folders[0]) if folders else None


def trained_head(head: str | Path, *, purpose: str) -> Path:
    """The folder where HEAD is one trained head and nothing else; ValueError where it is not."""
    specs = parse_spec(head)
    if len(specs) != 1 or specs[0].kind != FOLDER:
        raise ValueError(f"{str(head)!r} is not one trained head {purpose}: give an augmented model's folder")
    return Path(specs[0].argument)


def resolve_target(head: str | Path, target: str | Path | None) -> str | Path:
    """The target to load: the one given, else the one that the head's card names (under `models/`, or a Hub name)."""
    if target is not None:
        return target
    folders = [spec.argument for spec in parse_spec(head) if spec.kind == FOLDER]
    if not folders:
        named = "no target is named" if str(head) == NO_DRAFT else f"{str(head)!r} belongs to no target"
        raise ValueError(f"{named}: give one with --target (target= in Python), a folder or Hub name")
    name = read_card(folders[0]).target.name
    local = MODELS_FOLDER / name
    return local if local.is_dir() else name


def adapter_of(head: str | Path) -> Adapter | None:
    """The adapter to merge into the target: that of a head in HEAD which was trained along with it."""
    folders = [spec.argument for spec in parse_spec(head) if spec.kind == FOLDER]
    return next((adapter for adapter in map(Adapter.of_head, folders) if adapter is not None), None)


def head_cards(head: str | Path) -> list[HeadCard]:
    """The cards of the trained heads in HEAD."""
    return [read_card(spec.argument) for spec in parse_spec(head) if spec.kind == FOLDER]


def _parse_part(text: str) -> DrafterSpec:
    name, *rest = text.split(",")
    kind, colon, argument = name.partition(":")
    if kind not in _MAKERS or kind == FOLDER:
        _refuse_other_folders(text)
        return DrafterSpec(text=text, kind=FOLDER, argument=text)
    maker = _MAKERS[kind]
    if bool(argument) != maker.takes_argument or bool(colon) != maker.takes_argument:
        expected = f"{kind}:{maker.argument}" if maker.takes_argument else kind
        raise ValueError(f"{text!r} is not a drafter: expected {expected!r}")
    options = {}
    for option in rest:
        key, _, value = option.partition("=")
        if key not in maker.options or not value.isdecimal() or int(value) < 1:
            known = ", ".join(f"{one}=N" for one in maker.options) or "none"
            raise ValueError(f"{text!r} has the option {option!r}; {kind} takes: {known}")
        options[key] = int(value)
    return DrafterSpec(text=text, kind=kind, argument=argument, options=options)


def _refuse_other_folders(text: str) -> None:
    folder = present_folder(Path(text))
    if (folder / CARD_FILE).is_file():
        refuse_headless(folder)
        return
    best = folder / "best"
    hint = f"; did you mean {str(best)!r}?" if (best / CARD_FILE).is_file() else ""
    raise ValueError(
        f"{text!r} is not a head: give an augmented model's folder (it holds {CARD_FILE}), "
        f"{', '.join(repr(kind) for kind in _MAKERS if kind != FOLDER)}{hint}"
    )


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """make: the drafter of a spec for a target; its name must be unique in a HEAD (`index` is its place there)."""

    make: Callable[[DrafterSpec, TargetModel, int], Drafter | None]
    argument: str = ""
    options: Sequence[str] = ()

    @property
    def takes_argument(self) -> bool:
        return bool(self.argument)


def _make(spec: DrafterSpec, target: TargetModel, index: int) -> Drafter:
    drafter = _MAKERS[spec.kind].make(spec, target, index)
    assert drafter is not None
    return drafter


def _trained(spec: DrafterSpec, target: TargetModel, index: int) -> Drafter:
    head, card = load_head(spec.argument, target.weights, device=target.device, dtype=target.dtype)
    target.check_card(card)
    name = card.family if index == 0 else f"{card.family}-{index}"
    return head_drafter(head, target, calibration=Calibration.from_card(card.drafter), name=name)


def _model(spec: DrafterSpec, target: TargetModel, index: int) -> Drafter:
    return ModelDrafter.load(spec.argument, target, vocab=spec.options.get("vocab"), name=spec.text)


def _first_layers(spec: DrafterSpec, target: TargetModel, index: int) -> Drafter:
    if not spec.argument.isdecimal():
        raise ValueError(f"{spec.text!r} is not a drafter: expected a number of layers, as in 'layers:8'")
    return ModelDrafter.first_layers(int(spec.argument), target, vocab=spec.options.get("vocab"), name=spec.text)


def _rounded(spec: DrafterSpec, target: TargetModel, index: int) -> Drafter:
    num_bits = int(spec.kind.removeprefix("int"))
    return ModelDrafter.rounded(num_bits, target, vocab=spec.options.get("vocab"), name=spec.text)


_MAKERS: Mapping[str, _Maker] = {
    FOLDER: _Maker(make=_trained, argument="FOLDER"),
    LOOKUP: _Maker(make=lambda spec, target, index: NgramDrafter()),
    "suffix": _Maker(make=lambda spec, target, index: SuffixDrafter()),
    "model": _Maker(make=_model, argument="FOLDER", options=("vocab",)),
    "layers": _Maker(make=_first_layers, argument="N", options=("vocab",)),
    "int8": _Maker(make=_rounded, options=("vocab",)),
    "int4": _Maker(make=_rounded, options=("vocab",)),
    NO_DRAFT: _Maker(make=lambda spec, target, index: None),
}
