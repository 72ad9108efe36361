"""How large a target and a head are, by their configurations alone: their modules are made without memory (on torch's
meta device) and counted, so a target that no disk here could hold is measured as exactly as a small one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.schema import HeadSettings, Quantization, RunConfig
from heads.base import DraftHead, HeadConfig, TargetSizes
from heads.block import BlockHead
from heads.checkpoint import CONFIG_FILE, present_folder, read_card, read_json
from heads.lora import adaptable_layers
from heads.registry import FAMILIES, family_of_config
from heads.vocab import DraftVocabulary
from infer.target import refuse_missing
from train.features.stored_target import TARGET_FOLDER

FLOAT_BYTES = 4
"""Heads are trained in float32, with two moments of the optimiser's beside each weight."""
NUM_MOMENTS = 2
_QUANTIZED_BYTES: dict[Quantization, float] = {"int8": 1.0, "int4": 0.5 + 4 / 64}
"""A weight of a quantised layer; int4 has a float32 scale for every 64 of them."""


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """Parameters of a causal language model, and the sizes that its states and caches follow.

    linear_parameters: those of the layers' linear maps, which is what quantisation is done to. largest_layer: what must
    be whole at once where the model is shared out.
    """

    parameters: int
    embedding_parameters: int
    lm_head_parameters: int
    is_tied: bool
    layer_parameters: int
    linear_parameters: int
    largest_layer: int
    last_layer: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    key_value_width: int
    vocab_size: int
    max_length: int

    @classmethod
    def of(cls, config: Any) -> TargetSize:
        """From a transformers configuration."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        sizes = TargetSizes.of(config)
        layers = _layers(model, sizes.num_layers)
        layer_sizes = [_num_parameters(layer) for layer in layers]
        linear = [one.weight.numel() for layer in layers for one in layer.modules() if isinstance(one, nn.Linear)]
        return cls(
            parameters=_num_parameters(model),
            embedding_parameters=embedding.numel(),
            lm_head_parameters=lm_head.numel(),
            is_tied=embedding is lm_head,
            layer_parameters=sum(layer_sizes),
            linear_parameters=sum(linear),
            largest_layer=max(layer_sizes),
            last_layer=layer_sizes[-1],
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_attention_heads=sizes.num_attention_heads,
            key_value_width=2 * sizes.num_key_value_heads * sizes.head_dim,
            vocab_size=int(lm_head.shape[0]),
            max_length=sizes.max_position_embeddings,
        )

    @property
    def outer_parameters(self) -> int:
        """What is no layer's: embeddings, LM head, final norm."""
        return self.parameters - self.layer_parameters

    def weight_bytes(self, itemsize: int, quantization: Quantization | None = None) -> int:
        if quantization is None:
            return self.parameters * itemsize
        rest = self.parameters - self.linear_parameters
        return round(self.linear_parameters * _QUANTIZED_BYTES[quantization] + rest * itemsize)

    def stored_bytes(self, itemsize: int) -> int:
        """What is loaded of a target whose features were made elsewhere."""
        lm_head = 0 if self.is_tied else self.lm_head_parameters
        return (self.embedding_parameters + lm_head + self.last_layer + self.hidden_size) * itemsize

    def cache_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return self.num_layers * self.key_value_width * itemsize


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """trained: parameters under the optimiser. stored_bytes: tensors of its checkpoint, the vocabulary's maps included.

    width_per_token: numbers that one unrolled step keeps of a row for the backward pass, context aside.
    attention_heads: query heads of all layers. num_places: rows behind a root of a head that drafts in one
    pass; all_places: whether they are computed even where no label is left. num_copies: whole sets of weights that
    training holds.
    """

    family: str
    parameters: int
    trained: int
    lm_head_parameters: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    num_depths: int | None
    stored_bytes: int
    width_per_token: int
    attention_heads: int
    num_places: int = 0
    all_places: bool = False
    num_copies: int = 1

    @classmethod
    def of(
        cls, settings: HeadSettings, target_config: Any, vocab_size: int, family_settings: dict[str, Any]
    ) -> HeadSize:
        """The head that the recipe makes, or goes on from. `family_settings`: those of its own family."""
        if settings.init_from is not None:
            config, family = _config_of(settings.init_from)
        else:
            family = settings.type
            size = min(settings.draft_vocab_size or vocab_size, vocab_size)
            config = FAMILIES[family].config.for_target(
                target_config, draft_vocab_size=size, vocab_size=vocab_size, taps=settings.taps, **family_settings
            )
        head = _made_without_memory(family, config)
        parameters = _num_parameters(head)
        trained, num_copies = parameters, 1
        if settings.lora_rank is not None:
            layers = [layer.weight.shape for _, layer in adaptable_layers(head)]
            trained = sum(settings.lora_rank * (outputs + inputs) for outputs, inputs in layers)
            num_copies = 2  # the merged head is kept beside the one that is trained
        return cls(
            family=family,
            parameters=parameters,
            trained=trained,
            lm_head_parameters=_lm_head_parameters(head, config),
            draft_vocab_size=config.draft_vocab_size,
            taps=tuple(config.taps),
            num_depths=head.num_depths,
            stored_bytes=sum(tensor.numel() * tensor.element_size() for tensor in head.state_dict().values()),
            width_per_token=_saved_width(head, config),
            attention_heads=_num_query_heads(head),
            num_places=head.num_places if isinstance(head, BlockHead) else 0,
            all_places=isinstance(head, BlockHead) and head.sees_ahead,
            num_copies=num_copies,
        )

    @property
    def weight_bytes(self) -> int:
        return self.parameters * FLOAT_BYTES

    @property
    def optimizer_bytes(self) -> int:
        return self.trained * FLOAT_BYTES * NUM_MOMENTS

    def further_rows(self, num_steps: int, *, root_share: float, keep_share: float) -> float:
        """Rows that a pass has beside those of the text, for each of these, at most."""
        if not self.num_places:
            return (num_steps - 1) * keep_share
        if self.all_places:
            return root_share * self.num_places
        return root_share * sum(keep_share**place for place in range(1, self.num_places + 1))


def target_config(config: RunConfig) -> Any:
    """The target's configuration, from its folder or name alone; of stored features, from beside them."""
    from transformers import AutoConfig

    if config.target.features is not None:
        folder = Path(config.target.features) / TARGET_FOLDER
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(
                f"target.features is {config.target.features}, where no target's {CONFIG_FILE} lies: give a folder "
                "written by headstart features"
            )
        return AutoConfig.from_pretrained(folder)
    refuse_missing(config.target.model)
    return AutoConfig.from_pretrained(config.target.model)


def _config_of(folder: str) -> tuple[HeadConfig, str]:
    """Of a trained head."""
    place = present_folder(Path(folder))
    native = read_json(place / CONFIG_FILE)
    family = family_of_config(native)
    return FAMILIES[family].config.from_native(native, num_target_layers=read_card(place).target.num_layers), family


def _made_without_memory(family: str, config: HeadConfig) -> DraftHead:
    vocabulary = DraftVocabulary(target_ids=torch.arange(config.draft_vocab_size), vocab_size=config.vocab_size)
    with torch.device("meta"), _unfilled():
        return FAMILIES[family].head(config, vocabulary)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Random first values are of no use to what has no values, and would move the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        yield


def _saved_width(head: DraftHead, config: HeadConfig) -> int:
    """Inputs and outputs of every linear map but the LM heads, and about as many numbers again of norms and products
    between them."""
    linear = [
        one for one in head.modules() if isinstance(one, nn.Linear) and one.out_features != config.draft_vocab_size
    ]
    per_depth = 1 if isinstance(head, BlockHead) else head.num_depths or 1
    return 2 * sum(one.in_features + one.out_features for one in linear) // per_depth + 2 * config.hidden_size


def _lm_head_parameters(head: DraftHead, config: HeadConfig) -> int:
    """Of the matrices that the loss has gradients of: a correction by the token before makes one with the LM head, also
    with the target's own."""
    if isinstance(head, BlockHead) and head.config.markov_rank:
        return config.draft_vocab_size * (config.hidden_size + head.config.markov_rank)
    return sum(one.numel() for one in head.parameters() if one.ndim == 2 and one.shape[0] == config.draft_vocab_size)


def _num_query_heads(head: DraftHead) -> int:
    """Of all layers."""
    num_layers = head.config.num_layers if isinstance(head, BlockHead) else 1
    return num_layers * int(getattr(head.config, "num_attention_heads", 0))


def _layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {num_layers} decoder layers")


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
