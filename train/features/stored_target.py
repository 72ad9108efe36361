"""A target that was left behind: its kept features, and the few parts of it that a trainer and a new head read.

    FOLDER/manifest.json shards/    the features (`store.py`)
           target/                  config.json, the tokenizer's files, and target.json: what else it was
                  parts.safetensors embedding, LM head, final norm and last layer
           held_out.json            rows that are not trained on, with prompts and domains

Nothing in the folder says where it was made. The last layer is there for `head.init: target`; without numbers of its
own (quantized weights) it is left out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from configs.schema import FeatureDType
from heads.base import TargetWeights
from heads.checkpoint import HeadCard, TargetReference, check_target, read_json, read_tensors, staged_folder
from infer.chat import Rendered, template_hash, tokenizer_hash
from infer.evaluate import EvalPrompt
from infer.placement import named_weights
from infer.target import TargetModel, resolve_device
from train.features.codec import Codec
from train.features.manifest import Manifest
from train.features.store import FeatureStore, Notice

TARGET_FOLDER, HELD_OUT_FILE = "target", "held_out.json"
_PARTS_FILE, _FACTS_FILE = "parts.safetensors", "target.json"
_EMBEDDING, _LM_HEAD, _NORM, _LAYER = "embedding", "lm_head", "final_norm.", "last_layer."


class TrainingTarget(Protocol):
    """What training reads of a target, whether its layers are here or not."""

    tokenizer: Any
    name: str
    config: Any
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_length: int
    eos_ids: frozenset[int]

    @property
    def layers(self) -> Sequence[nn.Module]: ...
    @property
    def final_norm(self) -> nn.Module: ...
    @property
    def embedding_weight(self) -> torch.Tensor: ...
    @property
    def lm_head_weight(self) -> torch.Tensor: ...
    @property
    def weights(self) -> TargetWeights: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def reference(self) -> TargetReference: ...
    def check_card(self, card: HeadCard) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Text that is not trained on: rows with features in the store, the domain of each, and prompts."""

    rows: list[Rendered]
    domains: list[str]
    prompts: list[EvalPrompt]


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What `target.json` says: beside the manifest, and where in the model the kept modules stand."""

    reference: dict[str, Any]
    max_length: int
    eos_ids: list[int]
    final_norm: str
    last_layer: str


class StoredTarget:
    """Reads as a `TargetModel` does in training, and computes nothing."""

    def __init__(
        self, store: FeatureStore, *, tokenizer: Any, config: Any, facts: _Facts, parts: Mapping[str, torch.Tensor]
    ) -> None:
        manifest = store.manifest
        self.store, self.tokenizer, self.config = store, tokenizer, config
        self.name = manifest.target
        self.num_layers, self.hidden_size = manifest.num_layers, manifest.hidden_size
        self.vocab_size = manifest.vocab_size
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.max_length, self.eos_ids = facts.max_length, frozenset(facts.eos_ids)
        self.embedding_weight = parts[_EMBEDDING]
        self.lm_head_weight = parts.get(_LM_HEAD, self.embedding_weight)
        self.device: torch.device = self.embedding_weight.device
        self._facts, self._parts = facts, parts

    @classmethod
    def load(
        cls, folder: Path | str, *, model: str | Path | None = None, device: str = "cpu", notice: Notice = print
    ) -> StoredTarget:
        """Open what `headstart features --out` wrote.

        model: the target that a recipe names; where it is at hand, its tokenizer is held against the folder's.
        ValueError for another target's, and for a folder that is not whole.
        """
        from transformers import AutoConfig, AutoTokenizer

        folder = Path(folder)
        manifest = Manifest.read(folder)
        home = folder / TARGET_FOLDER
        if not (home / _FACTS_FILE).is_file():
            raise ValueError(
                f"{folder} holds features, but not what training reads of their target ({TARGET_FOLDER}/ is missing): "
                "write it with `headstart features RECIPE --out FOLDER`"
            )
        tokenizer = AutoTokenizer.from_pretrained(home)
        _check_tokenizer(tokenizer, manifest, f"{home} now has", folder)
        if model is not None and Path(model).is_dir():
            _check_tokenizer(AutoTokenizer.from_pretrained(model), manifest, f"target.model {model} has", folder)
        tensors = read_tensors(home / _PARTS_FILE)
        expected = (manifest.vocab_size, manifest.hidden_size)
        if _EMBEDDING not in tensors or tensors[_EMBEDDING].shape != expected:
            raise ValueError(f"{home / _PARTS_FILE} has no embedding of shape {list(expected)}: write the folder again")
        where = resolve_device(device)
        return cls(
            FeatureStore(folder, manifest, notice=notice),
            tokenizer=tokenizer,
            config=AutoConfig.from_pretrained(home),
            facts=_read_facts(home / _FACTS_FILE),
            parts={name: tensor.to(where) for name, tensor in tensors.items()},
        )

    @property
    def layers(self) -> list[nn.Module]:
        """The last one alone."""
        if not any(name.startswith(_LAYER) for name in self._parts):
            raise ValueError(
                f"the last layer of {self.name} was not kept with its features (its weights are quantized): "
                "set head.init=random"
            )
        return [self._module(self._facts.last_layer, _LAYER)]

    @property
    def final_norm(self) -> nn.Module:
        return self._module(self._facts.final_norm, _NORM)

    @property
    def weights(self) -> TargetWeights:
        return TargetWeights(embedding=self.embedding_weight, lm_head=self.lm_head_weight)

    @property
    def fingerprint(self) -> str:
        return self.store.manifest.fingerprint

    @property
    def reference(self) -> TargetReference:
        return TargetReference(**self._facts.reference)

    @property
    def held_out(self) -> HeldOut:
        """What was held out when the features were made."""
        return read_held_out(self.store.folder)

    def check_card(self, card: HeadCard) -> None:
        """Raise ValueError unless the head that `card` describes was made for this target."""
        check_target(
            card,
            fingerprint=self.fingerprint,
            name=self.name,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
        )

    def check_states(self, taps: Sequence[int], feature_dtype: FeatureDType) -> None:
        """ValueError unless the folder keeps these taps, in the form the recipe asks for (`target` takes any)."""
        manifest = self.store.manifest
        asked = manifest.stored_dtype
        if feature_dtype != "target":
            asked = Codec.of(self, taps, feature_dtype).stored_dtype
        manifest.check(replace(manifest, taps=tuple(taps), stored_dtype=asked), self.store.folder)

    def _module(self, name: str, prefix: str) -> nn.Module:
        """A module of the model as its class makes it, with the weights that were kept."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module: nn.Module = AutoModelForCausalLM.from_config(self.config).get_submodule(name)
        tensors = {key.removeprefix(prefix): part for key, part in self._parts.items() if key.startswith(prefix)}
        module.load_state_dict(tensors, strict=False, assign=True)
        empty = [key for key, parameter in module.named_parameters() if parameter.is_meta]
        if empty:
            raise ValueError(f"{', '.join(empty)} of {name} of {self.name} were not kept: write the folder again")
        return module.eval().requires_grad_(False)


def write_target(folder: Path, target: TargetModel) -> None:
    """Put into `folder` what training reads of the target beside its features."""
    model = target.model
    names = {id(module): name for name, module in model.named_modules()}
    layer, norm = target.layers[-1], target.final_norm
    facts = _Facts(
        reference=asdict(target.reference),
        max_length=target.max_length,
        eos_ids=sorted(target.eos_ids),
        final_norm=names[id(norm)],
        last_layer=names[id(layer)],
    )
    tensors = {_EMBEDDING: target.embedding_weight}
    if not torch.equal(target.embedding_weight, target.lm_head_weight):
        tensors[_LM_HEAD] = target.lm_head_weight
    tensors |= {_NORM + name: tensor for name, tensor in named_weights(norm)}
    last_layer = dict(named_weights(layer))
    if all(tensor.is_floating_point() for tensor in last_layer.values()):
        tensors |= {_LAYER + name: tensor for name, tensor in last_layer.items()}
    config = copy.deepcopy(target.config)
    if hasattr(config, "quantization_config"):  # of the weights that are left behind
        del config.quantization_config
    with staged_folder(folder / TARGET_FOLDER) as home:
        target.tokenizer.save_pretrained(home)
        config.save_pretrained(home)
        (home / _FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, home / _PARTS_FILE)


def _read_facts(path: Path) -> _Facts:
    try:
        return _Facts(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is not of this headstart ({error}): write the folder again") from error


def write_held_out(store: FeatureStore, held_out: HeldOut) -> None:
    rows = zip(held_out.rows, held_out.domains, strict=True)
    values = {
        "rows": [
            {"domain": domain, "token_ids": row.token_ids, "loss_mask": [int(mask) for mask in row.loss_mask]}
            for row, domain in rows
        ],
        "prompts": [{"domain": one.domain, "token_ids": list(one.token_ids)} for one in held_out.prompts],
    }
    store.write_file(HELD_OUT_FILE, values)


def read_held_out(folder: Path) -> HeldOut:
    """ValueError if `folder` has no held-out text."""
    path = folder / HELD_OUT_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no held-out text ({HELD_OUT_FILE}): write it with `headstart features --out`")
    values = read_json(path)
    try:
        return HeldOut(
            rows=[
                Rendered(token_ids=row["token_ids"], loss_mask=[bool(mask) for mask in row["loss_mask"]])
                for row in values["rows"]
            ],
            domains=[row["domain"] for row in values["rows"]],
            prompts=[EvalPrompt(domain=one["domain"], token_ids=tuple(one["token_ids"])) for one in values["prompts"]],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): write it again with `headstart features --out`") from error


def _check_tokenizer(tokenizer: Any, manifest: Manifest, whose: str, folder: Path) -> None:
    """Another template or vocabulary makes other rows, or the same ids of other text."""
    for name, found in (("template_hash", template_hash(tokenizer)), ("tokenizer_hash", tokenizer_hash(tokenizer))):
        kept = getattr(manifest, name)
        if found != kept:
            raise ValueError(
                f"the features in {folder} were made with {name} {kept}, and {whose} {found}: use the tokenizer and "
                "template they were made with, or make them again"
            )
