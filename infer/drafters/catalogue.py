"""Everything that can draft, in one list: where it comes from, what it needs, what it costs, and how it is written.

The families of trained heads are those of `heads.registry`, which also says their papers; the other kinds are those of
a HEAD (`infer.drafters.spec`). Both lists are held complete by a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heads.checkpoint import CARD_FILE, present_folder, read_card, read_json
from heads.registry import FAMILIES
from infer.drafters.growing import TreeGrower
from infer.drafters.ngram import NgramDrafter
from infer.drafters.spec import FOLDER, LOOKUP, NO_DRAFT
from infer.tree import Coupled, GreedySet, OneHot, Sampled
from infer.verify import KindType

TRAINED, UNTRAINED = "trained heads", "drafters without training"
VOCAB = "[,vocab=N]"
NOTHING = "nothing"

PROPOSALS: Mapping[KindType, str] = {
    OneHot: "one-hot",
    Coupled: "coupled",
    Sampled: "sampled",
    GreedySet: "greedy set",
}
"""The kinds of proposals by name (`infer.tree` says what they are)."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """name: the family of a trained head (`head.type` of a recipe), or the kind in a HEAD. written: how a HEAD has it.

    training, reads, needs: what must be trained, what it reads as it decodes, and what else it needs.
    parameters, steps: what it costs, in words. proposals: the kinds of nodes it makes. settings: what a recipe's `head`
    section may say of it.
    """

    name: str
    group: str
    title: str
    paper: str
    written: str
    training: str
    reads: str
    needs: str
    parameters: str
    steps: str
    proposals: tuple[str, ...]
    settings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Words:
    """What the registry does not say of a family."""

    reads: str
    parameters: str
    steps: str
    training: str = "on text that the target wrote"
    needs: str = NOTHING


_FAMILY_WORDS: Mapping[str, _Words] = {
    "eagle3": _Words(
        reads="the states of three of the target's layers",
        parameters="one decoder layer with an attention twice as wide as the target's, the fusion of the three states, "
        "and an LM head over the draft vocabulary",
        steps="one pass over the round's new text, then one a depth",
    ),
    "eagle1": _Words(
        reads="the target's states after its final norm",
        parameters="one decoder layer behind a matrix that joins state and embedding; the LM head is the target's",
        steps="one pass over the round's new text, then one a depth",
    ),
    "medusa": _Words(
        reads="the target's last state after its final norm",
        parameters="a residual block and an LM head a depth (or the target's LM head for all)",
        steps="one block and one LM head a depth, all of them independent of what was drafted",
    ),
    "hydra": _Words(
        reads="the target's last state after its final norm (or of a lower layer)",
        parameters="an MLP and an LM head a depth, wider with each depth; one decoder layer more with prefix_layer",
        steps="one MLP and one LM head a depth; with prefix_layer one pass over the round's new text before",
    ),
    "peagle": _Words(
        reads="the states of three of the target's layers",
        parameters="as eagle3's, with a mask state, further decoder layers by num_layers, and a correction of the "
        "draft by the token before it",
        steps="one pass over the round's new text and a place a depth, for all depths at once; then the correction",
    ),
    "dflash": _Words(
        reads="the states of three of the target's layers (or others), as keys and values of every layer",
        parameters="decoder layers by num_layers, the fusion of the states, and a correction of the draft by the token "
        "before it; embeddings and LM head are the target's",
        steps="one pass over the round's new text and a block of places that see each other, for all depths at once; "
        "then the correction",
    ),
    "early_exit": _Words(
        reads="the target's first layers and its cache, into which the draft writes",
        parameters="a gated MLP as wide as a state, and a norm; layers and LM head are the target's",
        steps="the target's first layers once a depth: the share that they are of it",
    ),
}
_GROWN = tuple(PROPOSALS[kind] for kind in TreeGrower.kinds)
_LOOKED_UP = tuple(PROPOSALS[kind] for kind in NgramDrafter.kinds)
_NO_TRAINING = "none"
_ROUNDED = {
    "group": UNTRAINED,
    "training": _NO_TRAINING,
    "reads": "the target's cache, into which the draft writes",
    "needs": "a CPU for which torch has the kernels; they are fast with AVX-512",
    "steps": "the rounded target once a depth, at the bandwidth of its fewer bytes; it gains nothing from width",
    "proposals": _GROWN,
}

_UNTRAINED: tuple[Entry, ...] = (
    Entry(
        name=LOOKUP,
        group=UNTRAINED,
        title="prompt lookup",
        paper="Saxena 2023, prompt lookup decoding",
        written=LOOKUP,
        training=_NO_TRAINING,
        reads="the request's text",
        needs=NOTHING,
        parameters="none",
        steps="no forward: a look at an index of the text, for all depths at once",
        proposals=_LOOKED_UP,
    ),
    Entry(
        name="suffix",
        group=UNTRAINED,
        title="suffix lookup",
        paper="Oliaro et al. 2024, arXiv 2411.04975; He et al. 2023, arXiv 2311.08252",
        written="suffix",
        training=_NO_TRAINING,
        reads="the request's text",
        needs=NOTHING,
        parameters="none",
        steps="no forward: a walk through an automaton of the text, for all depths at once",
        proposals=_LOOKED_UP,
    ),
    Entry(
        name="model",
        group=UNTRAINED,
        title="draft model",
        paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
        written=f"model:FOLDER{VOCAB}",
        training="none here: the model comes as it is",
        reads="the request's text",
        needs="a second, smaller model with the target's tokenizer, and a cache for it",
        parameters="those of the draft model",
        steps="the draft model over the prompt, then over each round's new text, then once a depth",
        proposals=_GROWN,
    ),
    Entry(
        name="layers",
        group=UNTRAINED,
        title="the target's first layers",
        paper="Zhang et al. 2023, arXiv 2309.08168; Elhoushi et al. 2024, arXiv 2404.16710",
        written=f"layers:N{VOCAB}",
        training="none; a target that was trained to be read early drafts better",
        reads="the target's first layers and its cache, into which the draft writes",
        needs=NOTHING,
        parameters="none of its own",
        steps="the target's first N layers and its LM head once a depth",
        proposals=_GROWN,
    ),
    Entry(
        name="int8",
        title="the target in 8 bits",
        paper="Georganas et al. 2025, arXiv 2503.13565; Tiwari et al. 2025, arXiv 2502.10424",
        written=f"int8{VOCAB}",
        parameters="a copy of the target's matrices at a byte a weight",
        **_ROUNDED,  # type: ignore[arg-type]
    ),
    Entry(
        name="int4",
        title="the target in 4 bits",
        paper="Georganas et al. 2025, arXiv 2503.13565; Tiwari et al. 2025, arXiv 2502.10424",
        written=f"int4{VOCAB}",
        parameters="a copy of the target's matrices at five bits a weight, scales included",
        **_ROUNDED,  # type: ignore[arg-type]
    ),
    Entry(
        name="hybrid",
        group=UNTRAINED,
        title="several at once",
        paper="headstart: one tree of all candidates, ranked by estimated value",
        written="SPEC+SPEC...",
        training="what its parts need",
        reads="what its parts read",
        needs="what its parts need; a trained head alone is joined by ngram",
        parameters="those of its parts",
        steps="those of its parts, one after the other",
        proposals=tuple(dict.fromkeys((*_GROWN, *_LOOKED_UP))),
    ),
    Entry(
        name=NO_DRAFT,
        group=UNTRAINED,
        title="plain decoding",
        paper="",
        written=NO_DRAFT,
        training=_NO_TRAINING,
        reads=NOTHING,
        needs=NOTHING,
        parameters="none",
        steps="none",
        proposals=(),
    ),
)


def catalogue() -> list[Entry]:
    """All families of trained heads, then all other kinds."""
    return [*_families(), *_UNTRAINED]


def _families() -> Iterator[Entry]:
    for name, family in FAMILIES.items():
        words = _FAMILY_WORDS[name]
        yield Entry(
            name=name,
            group=TRAINED,
            title=family.title,
            paper=family.paper,
            written=FOLDER.upper(),
            training=words.training,
            reads=words.reads,
            needs=words.needs,
            parameters=words.parameters,
            steps=words.steps,
            proposals=_GROWN,
            settings=tuple(sorted(family.settings)),
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the card of one trained head says of its size and its gain (None where it does not)."""

    head: str
    family: str
    target: str
    num_parameters: int | None
    draft_vocab_size: int | None
    accepted_length: float | None
    overlap: tuple[float, ...] | None
    speedup: float | None
    tree_accepted_length: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(folder: Path | str) -> Measured:
    """The figures on a head's card."""
    folder = present_folder(Path(folder))
    card = read_card(folder)
    head = read_json(folder / CARD_FILE)["head"]
    acceptance = card.acceptance
    speed = acceptance.get("speed") or {}
    overlap = acceptance.get("overlap")
    return Measured(
        head=str(folder),
        family=card.family,
        target=card.target.name,
        num_parameters=head.get("num_parameters"),
        draft_vocab_size=head.get("draft_vocab_size"),
        accepted_length=acceptance.get("accepted_length"),
        overlap=None if not overlap else tuple(overlap),
        speedup=speed.get("speedup"),
        tree_accepted_length=speed.get("tree_accepted_length"),
    )
