"""What the numbers in a feature store depend on, written once in its `manifest.json`.

Rows are found by their content, so a store is good for any data. It is not good for another target, another dtype,
other taps or another tokenizer: each of these is a store of its own. A store with more taps than a head reads will do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.base import final_tap
from heads.checkpoint import portable_name, read_json
from infer.chat import template_hash, tokenizer_hash
from infer.machine import dtype_name
from train.features.codec import Codec

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
_CONVENTIONS = {
    "taps": "hidden_states indices: 0 the embeddings, i the output of layer i, one more than there are layers the "
    "state after the final norm, which stands in last alone",
    "last": "post_norm: after the final norm, what feeds the LM head",
    "log_normalizer": "log-sum-exp of the target's logits of last as kept, at positions before tokens under the loss "
    "(else NaN)",
    "states": "the taps side by side in this order, then last",
    "codes": "as states without last; times its group's scale (groups of equal size, in order)",
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Which states of which target, in what form. target: its name, for people."""

    target: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    tokenizer_hash: str
    template_hash: str
    taps: tuple[int, ...]
    stored_dtype: str

    @classmethod
    def of(cls, target: Any, codec: Codec) -> Manifest:
        tokenizer = target.tokenizer
        return cls(
            target=portable_name(target.name),
            fingerprint=target.fingerprint,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=dtype_name(target.dtype),
            tokenizer_hash="none" if tokenizer is None else tokenizer_hash(tokenizer),
            template_hash="none" if tokenizer is None else template_hash(tokenizer),
            taps=codec.taps,
            stored_dtype=codec.stored_dtype,
        )

    @property
    def codec(self) -> Codec:
        return Codec(
            dtype=getattr(torch, self.dtype),
            stored_dtype=self.stored_dtype,
            hidden_size=self.hidden_size,
            taps=self.taps,
            final=final_tap(self.num_layers),
        )

    @property
    def key(self) -> str:
        """Names a store's folder: equal for stores that can be one."""
        identity = {name: value for name, value in asdict(self).items() if name != "target"}
        return hashlib.sha256(json.dumps([FORMAT_VERSION, identity], sort_keys=True).encode()).hexdigest()[:24]

    def serves(self, wanted: Manifest) -> bool:
        """Whether rows of this store are those of `wanted`, perhaps with further taps."""
        same = replace(wanted, taps=self.taps, target=self.target) == self
        return same and set(wanted.taps) <= set(self.taps)

    def check(self, wanted: Manifest, where: Path) -> None:
        """ValueError that names both values of the first thing in which the store is another than `wanted`."""
        for name in _ADVICE:
            here, asked = getattr(self, name), getattr(wanted, name)
            if here != asked:
                raise ValueError(
                    f"the features in {where} were made with {name} {here} ({self.target}), and {asked} is asked for "
                    f"({wanted.target}): {_ADVICE[name]}"
                )
        missing = sorted(set(wanted.taps) - set(self.taps))
        if missing:
            raise ValueError(
                f"the features in {where} are of taps {list(self.taps)}, and the head reads {list(wanted.taps)}: "
                "give head.taps among those, or make features for this head"
            )

    def to_dict(self) -> dict[str, Any]:
        layout = {name: [dtype_name(dtype), width] for name, (dtype, width) in self.codec.layout.items()}
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "tensors": layout,
            "bytes_per_token": self.codec.bytes_per_token,
            "post_norm": True,
            "conventions": {name: _CONVENTIONS[name] for name in ("taps", "last", "log_normalizer")}
            | {name: _CONVENTIONS[name] for name in layout if name in _CONVENTIONS},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path) -> Manifest:
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{where} holds features in format version {version!r}, this headstart reads {FORMAT_VERSION}: "
                "make them again in another folder"
            )
        names = cls.__dataclass_fields__
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"{where / MANIFEST_FILE} lacks {', '.join(missing)}: make the features again")
        return cls(**{name: values[name] for name in names} | {"taps": tuple(values["taps"])})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """That of a store; ValueError if there is none, or one that this headstart does not know."""
        if not (folder / MANIFEST_FILE).is_file():
            raise ValueError(
                f"{folder} holds no features ({MANIFEST_FILE} is missing): write some with `headstart features`"
            )
        return cls.from_dict(read_json(folder / MANIFEST_FILE), folder)


_ADVICE = {
    "template_hash": "the chat template is another, so texts are rendered otherwise; make them again",
    "tokenizer_hash": "the tokenizer is another, so token ids may mean something else; make them again",
    "fingerprint": "they belong to another target, or to other weights of it",
    "dtype": "set target.dtype to theirs, or make them again",
    "stored_dtype": "set train.feature_dtype to what is kept (for features made elsewhere, target takes that)",
}
