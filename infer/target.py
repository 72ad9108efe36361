"""The target: a stock Hugging Face causal language model, adapted to packed rows, trees and a slots cache.

No model file is copied. The model runs with headstart's attention function, which finds its metadata among the
forward's keyword arguments; hidden states are tapped by hooks at decoder layers. What cannot work is refused at load,
and what is accepted has proved itself there: its packed logits equal the stock model's on a short text.

Shapes: R packed rows, H hidden, V rows of the LM head, T tokens of a sequence.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from heads.base import TargetWeights, final_tap
from heads.checkpoint import HeadCard, TargetReference, check_relative, check_target, described
from infer import attention, views
from infer.adapter import ADAPTED, BACKBONE, BASE_FINGERPRINT, Adapter
from infer.cache import SlotCache
from infer.chat import tokenizer_hash
from infer.fingerprint import fingerprint_of, vocabulary_hash
from infer.fixed import FixedRows, forwards
from infer.fuse import COPYING_WAYS, WAYS, FusedModules, possible_ways
from infer.grammar import Grammars
from infer.kernels.build import has_kernels
from infer.kernels.paths import has_kernel
from infer.machine import available_bytes
from infer.placement import (
    DeviceMap,
    check_placement,
    check_tied,
    is_rounded_here,
    loading_arguments,
    main_device,
    quantization_of,
    whole_weight,
)
from infer.quantize import round_in_place
from infer.rows import PACKED_ROWS, AttentionSettings, PackedRows, RowGroup, Rows, check_room, tree_group

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_STATEFUL_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "chunked_attention")
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Largest difference from the stock forward that is still rounding, as a share of the largest logit.
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


_ONE_FORWARD = threading.RLock()
"""Taps are hooks on modules, which targets, drafters and engines of other threads may share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetOutput:
    """Logits [K, V] of the rows asked for, and tapped states [R, taps * H] of all rows (None without taps)."""

    logits: torch.Tensor
    taps: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The states of one sequence: tapped [T, taps * H], and final-normed [T, H], which feed the LM head."""

    taps: torch.Tensor
    last: torch.Tensor


class RelativeTarget(UserWarning):
    """A head drafts for a target that is not its own but a relative: nothing is lost but drafts."""


class TargetModel:
    """A stock causal LM whose forward takes packed rows; made by `load` (a folder or name) or `wrap` (a model)."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str, forward: str = "auto") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.adapter_name = ""
        self.takes_relatives = False
        self.config = model.config
        self.decoder: nn.Module = model.base_model
        self.layers = _decoder_layers(model, int(self.config.num_hidden_layers))
        self.num_layers = len(self.layers)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(model.get_output_embeddings().out_features)
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device = main_device(model)
        self.quantization = quantization_of(model)
        self._is_placed = bool(getattr(model, "hf_device_map", None))
        self.max_length = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.grammars = Grammars(tokenizer, vocab_size=self.vocab_size)
        self._keep_argument = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.forward_kind = _chosen_way(model, forward)
        self.fused = FusedModules(model, self.forward_kind)
        self._attends_by_kernel = False
        self._fingerprint: str | None = None
        self._base_name = name
        self._base_fingerprint = ""
        self._fetched: dict[int, torch.Tensor] = {}
        self._key_value_shape = (0, 0, 0)
        self._windows: Mapping[int, int | None] = {}

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        tokenizer: Any | None = None,
        revision: str | None = None,
        adapter: Adapter | str | Path | None = None,
        quantization: str | None = None,
        device_map: DeviceMap | None = None,
        offload_folder: str | Path | None = None,
        takes_relatives: bool = False,
        forward: str = "auto",
    ) -> TargetModel:
        """Load a target from a local folder or a Hub name.

        `dtype`: float32, bfloat16, float16, or auto, which is bfloat16, but for CPUs without kernels for it: there the
        faster of bfloat16 and float32 is measured. `device`: a torch device, or auto for a GPU if there is one.
        `adapter`: a LoRA adapter's folder, or that of a head which was trained along with its target
        (`Adapter.of_head`); it is merged in. `quantization`, `device_map`, `offload_folder`: for what does not fit
        (`infer.placement`).
        `takes_relatives`: heads of another version of this target (with its sizes and tokens) may draft for it.
        `forward`: how modules are computed (`infer.fuse`), or auto for the fastest way that this machine has. Raises
        ValueError with the reason if the model cannot be decoded exactly.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if dtype != "auto" and dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown: expected auto, {', '.join(DTYPES)}")
        if forward not in ("auto", *WAYS):
            raise ValueError(f"forward {forward!r} is unknown: expected auto, {', '.join(WAYS)}")
        check_placement(quantization, device_map, device)
        is_rounded = is_rounded_here(quantization, device)
        if is_rounded and dtype == "float16":
            raise ValueError("rounded weights multiply bfloat16 or float32 on a CPU, not float16: use dtype 'auto'")
        is_placed = (quantization is not None and not is_rounded) or device_map is not None
        if is_placed and adapter is not None:
            raise ValueError(
                "an adapter cannot be merged into a target with quantization or a device_map: merge it into the "
                "model's folder first (peft: merge_and_unload, save_pretrained) and give that"
            )
        device = resolve_device("auto" if is_placed and device == "cpu" else device)
        path = Path(source)
        refuse_missing(source)
        if isinstance(adapter, str | Path):
            adapter = Adapter.of_folder(adapter)
        config = AutoConfig.from_pretrained(source, revision=revision)
        _refuse_unsupported(config)
        check_tied(device_map, config)
        config.use_cache = True  # a fine-tune may have saved false; headstart keeps its own cache either way
        stored = getattr(config, "dtype", None)

        def read(as_dtype: torch.dtype) -> Any:
            arguments = loading_arguments(None if is_rounded else quantization, device_map, device, as_dtype)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=as_dtype,
                attn_implementation="sdpa",
                revision=revision,
                **({} if offload_folder is None else {"offload_folder": str(offload_folder)}),
                **arguments,
            )
            return model if arguments else model.to(device)

        is_settled = is_placed or is_rounded or torch.device(device).type != "cpu"
        if dtype == "auto" and not is_settled and (forward == "eager" or not has_kernels(torch.bfloat16)):
            # Each is read anew: casting a loaded model would round its weights and its rotary frequencies, and it
            # would no longer be the target that its dtype's name stands for.
            model = min(map(read, (torch.float32, torch.bfloat16)), key=_forward_seconds)
        else:
            model = read(torch.bfloat16 if dtype == "auto" else DTYPES[dtype])
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        name = path.name if path.is_dir() else str(source)
        base_fingerprint = ""
        if adapter is not None:
            base_fingerprint = adapter.base_fingerprint or fingerprint_of(model, tokenizer)
            adapter.apply(model, tokenizer, name=name, read=read, stored=stored)
        name_now = name if adapter is None else _adapted_name(name, adapter)
        if is_rounded:
            whole_fingerprint = fingerprint_of(model, tokenizer)
            round_in_place(model, int(str(quantization).removeprefix("int")), name=name_now)
        target = cls.wrap(model, tokenizer, name=name_now, forward=forward)
        target.takes_relatives = takes_relatives
        if adapter is not None:
            target._set_base(name, base_fingerprint, adapter)
        if is_rounded and not target._base_fingerprint:
            target._base_name, target._base_fingerprint = name_now, whole_fingerprint
        return target

    def _set_base(self, name: str, fingerprint: str, adapter: Adapter) -> None:
        self.adapter_name = adapter.name
        if adapter.name:  # a head's own adapter is found by its head, under the name of both
            self._base_name, self._base_fingerprint = name, fingerprint

    def with_adapter(self, adapter: Adapter | str | Path) -> TargetModel:
        """This target with a live adapter: a view that shares all of its weights and adds the adapter's few.

        Any number of them live beside their base and each other. A head of the base may draft for all of them.
        """
        if isinstance(adapter, str | Path):
            adapter = Adapter.of_folder(adapter)
        if self.adapter_name:
            raise ValueError(f"{self.name} has an adapter already: add others to the target without one")
        if adapter.base_fingerprint not in ("", self.fingerprint):
            raise ValueError(
                f"the adapter was trained with {adapter.base_name} ({adapter.base_fingerprint}), but {self.name} has "
                f"other weights or another tokenizer ({self.fingerprint})"
            )
        with torch.inference_mode(mode=False):
            new = adapter.live(self.model)
        view = self.view(views.exchanged(self.model, new), num_layers=self.num_layers)
        view.name = _adapted_name(self.name, adapter)
        view.adapter_name = adapter.name or ADAPTED
        view._base_name, view._base_fingerprint = self._base_name, self.fingerprint
        return view

    @classmethod
    def wrap(
        cls, model: Any, tokenizer: Any | None = None, *, name: str = "model", forward: str = "auto"
    ) -> TargetModel:
        """Adapt a stock model that is already in memory (its attention implementation is replaced).

        Change its weights later in place and under `torch.no_grad`: what is written through `.data`, or exchanged for
        another parameter, is not seen by weights that were packed already.
        """
        _refuse_unsupported(model.config)
        model.eval().requires_grad_(False)
        target = cls(model, tokenizer, name=name, forward=forward)
        target._enter()
        target._prove()
        return target

    def truncated(self, num_layers: int) -> TargetModel:
        """This target's first layers, its final norm and LM head behind them: a view that shares all weights.

        It also runs on the target's own cache, whose rows mean the same to both.
        """
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"{self.name} has layers 1 to {self.num_layers}; its first {num_layers} were asked for")
        return self.view(views.with_first_layers(self.model, self.layers, num_layers), num_layers=num_layers)

    def view(self, model: Any, *, num_layers: int | None = None) -> TargetModel:
        """This target with another look at its modules (`infer.views`)."""
        view = copy.copy(self)
        view.model, view.decoder = model, model.base_model
        view.layers = _decoder_layers(model, self.num_layers if num_layers is None else num_layers)
        view.num_layers = len(view.layers)
        view.vocab_size = int(model.get_output_embeddings().out_features)
        view._fingerprint = None
        view._fetched = {}
        view.__dict__.pop("is_row_invariant", None)
        return view

    def compute_own_modules(self) -> None:
        """Compute the modules that this view does not share in the target's way too."""
        self.fused = FusedModules(self.model, self.forward_kind)
        self.fused.enable()
        if self._fuses_layers:
            self.fused.add_layers(self.layers, self._windows)

    def twin(self, *, own_layers: bool) -> Any:
        """The stock model anew, with modules of its own, over this target's weights: none is copied, or (`own_layers`)
        only those of the decoder's layers. What is done to it leaves this target as it is."""
        with self.stock() as model:
            shared = [*model.parameters(), *model.buffers()]
            if own_layers:
                owned = {id(tensor) for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())}
                shared = [tensor for tensor in shared if id(tensor) not in owned]
            return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})

    def compute_by(self, fused: FusedModules) -> None:
        """Exchange how the modules are computed; the present way is disabled already, the new one not yet enabled."""
        self.fused, self.forward_kind = fused, fused.way
        self._attends_by_kernel = self._attends_by_kernel and fused.way == "kernels"
        self.__dict__.pop("is_row_invariant", None)

    def _enter(self) -> None:
        attention.register()
        self.model.set_attn_implementation(attention.ATTENTION_NAME)
        self.fused.enable()

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The same weights as the stock transformers model, for baselines; packed forwards must wait until it ends."""
        self.fused.disable()
        self.model.set_attn_implementation("eager" if self._uses_softcap() else "sdpa")
        try:
            yield self.model
        finally:
            self._enter()

    def _uses_softcap(self) -> bool:
        return getattr(self.config, "attn_logit_softcapping", None) is not None

    @property
    def _fuses_layers(self) -> bool:
        """Whether attention modules and whole layers have faster forwards too."""
        return self._attends_by_kernel or self.forward_kind == "triton"

    @property
    def pads_rows(self) -> bool:
        """Whether a forward computes every slot between the first and the last of its groups, each as many rows as the
        longest has. On kernels each row's attention is computed by itself."""
        return not self._attends_by_kernel

    @cached_property
    def is_row_invariant(self) -> bool:
        """Whether a row's logits are the same, to the last bit, whatever else is in its forward: then plain decoding
        and the verification of any tree agree in every dtype. It holds for models whose every operation runs on
        headstart's kernels or treats elements one by one, and is tried out rather than trusted."""
        return self._attends_by_kernel and not self._uses_softcap() and self._keeps_bits()

    @torch.inference_mode()
    def _keeps_bits(self) -> bool:
        """Rows of a text alone, of a tree's branches and beside another request's, against the text in one forward."""
        length = min(self.max_length, 96)
        if length < 16:
            return False
        tokens = [(11 * i + 5) % min(self.vocab_size, 1000) for i in range(length)]
        cache = self.new_cache(num_slots=2, num_columns=length)
        expected = self.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache).logits
        start = length - 6
        alone = [
            self.forward([RowGroup(slot=0, prefix=start + i, tokens=[tokens[start + i]])], cache) for i in range(3)
        ]
        found = [output.logits[0] for output in alone]
        # A branch of the text's own tokens, between others: nodes 1, 3 and 5 go on from the root.
        branch = tree_group(
            0, start, [tokens[start]], [1, tokens[start + 1], 2, tokens[start + 2], 3], [-1, -1, 0, 1, 2]
        )
        other = RowGroup(slot=1, prefix=0, tokens=tokens[: length // 2 + 1])
        logits = self.forward([branch, other], cache).logits
        found += [logits[0], logits[2], logits[4], *logits[6:]]
        places = [start, start + 1, start + 2, start, start + 1, start + 2, *range(length // 2 + 1)]
        return torch.equal(torch.stack(found), expected[places])

    @property
    def embedding_weight(self) -> torch.Tensor:
        """Input embeddings [V, H]."""
        return self._whole_weight(self.model.get_input_embeddings())

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """Output projection [V, H]."""
        return self._whole_weight(self.model.get_output_embeddings())

    def _whole_weight(self, module: nn.Module) -> torch.Tensor:
        """What heads read of the target is held on its device, also where the target's own is offloaded."""
        weight = module._parameters.get("weight")
        if weight is not None and not weight.is_meta and weight.device == self.device:
            return weight
        if id(module) not in self._fetched:
            self._fetched[id(module)] = whole_weight(module).to(self.device)
        return self._fetched[id(module)]

    @property
    def weights(self) -> TargetWeights:
        """What heads read of this target."""
        return TargetWeights(embedding=self.embedding_weight, lm_head=self.lm_head_weight)

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the LM head."""
        for name in ("norm", "final_layer_norm", "ln_f", "final_layernorm"):
            module = getattr(self.decoder, name, None)
            if isinstance(module, nn.Module):
                return module
        raise ValueError(f"no final norm found in {type(self.decoder).__name__}")

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights that a one-token forward reads: all but input embeddings, which are looked up."""
        looked_up = self.model.get_input_embeddings().weight
        multiplied = self.model.get_output_embeddings()._parameters.get("weight")
        skip = set() if looked_up is multiplied else {id(looked_up)}
        return sum(p.nbytes for p in self.model.parameters() if id(p) not in skip)

    @property
    def tie_dtype(self) -> torch.dtype:
        """The dtype whose rounding explains where forwards of different widths differ: its own, but for rounded
        weights, whose inputs go to one side or the other by the last bit. (On kernels throughout nothing differs.)"""
        return torch.bfloat16 if self.quantization and self.dtype == torch.float32 else self.dtype

    @property
    def fingerprint(self) -> str:
        """A hash of configuration, a sample of every parameter and the vocabulary: equal for equal targets in one dtype
        or another (the sample is rounded to bfloat16)."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.model, self.tokenizer)
        return self._fingerprint

    @property
    def reference(self) -> TargetReference:
        """What the card of a head for this target says of it."""
        return TargetReference(
            name=self._base_name if self._base_fingerprint else self.name,
            fingerprint=self.fingerprint,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            tokenizer_hash="" if self.tokenizer is None else tokenizer_hash(self.tokenizer),
            vocabulary_hash="" if self.tokenizer is None else vocabulary_hash(self.tokenizer),
            adapter=self.adapter_name if self._base_fingerprint else "",
            base_fingerprint=self._base_fingerprint,
            quantization=self.quantization,
        )

    def check_card(self, card: HeadCard) -> None:
        """Raise ValueError unless the head that `card` describes was made for this target, or for a relative that it
        takes: then there is a warning (`RelativeTarget`)."""
        notice = self.relation(card)
        if notice:
            warnings.warn(notice, RelativeTarget, stacklevel=3)

    def relation(self, card: HeadCard) -> str:
        """Empty for the head's own target, a notice for a relative; ValueError for any other.

        The base of a target with an adapter is a relative, and so are its other adapters: drafts are worse, but tokens
        are the target's whatever is drafted. With `takes_relatives` it is any version with the same sizes and tokens.
        """
        if card.training.get(BACKBONE, {}).get(BASE_FINGERPRINT) == self.fingerprint != card.target.fingerprint:
            raise ValueError(
                f"the head was trained along with {card.target.name}, and belongs to it with the head's adapter merged "
                "in: load the target with TargetModel.load(..., adapter=Adapter.of_head(folder))"
            )
        bases = {card.target.fingerprint, card.target.base_fingerprint}
        is_relative = bool(self._base_fingerprint) and self._base_fingerprint in bases
        if card.target.fingerprint != self.fingerprint and (is_relative or self.takes_relatives):
            check_relative(card, self.reference)
            own = described(self.reference)
            return (
                f"the head was trained on {described(card.target)}, not on {own}: answers are {own}'s, but "
                "fewer drafts may be accepted (a LoRA adapter on the head, head.lora_rank, would bring them back)"
            )
        check_target(
            card,
            fingerprint=self.fingerprint,
            name=self.name,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
        )
        return ""

    def new_cache(self, *, num_slots: int, num_columns: int) -> SlotCache:
        num_heads, key_size, value_size = self._key_value_shape
        return SlotCache(
            num_layers=self.num_layers,
            num_heads=num_heads,
            key_size=key_size,
            value_size=value_size,
            num_slots=num_slots,
            num_columns=num_columns,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        groups: Sequence[RowGroup],
        cache: SlotCache,
        *,
        logit_rows: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        row_width: int | None = None,
    ) -> TargetOutput:
        """One forward over the rows of `groups`, whose keys and values are written to `cache`.

        `logit_rows`: packed row numbers whose logits are wanted, ascending (all if None). `taps`: Hugging Face
        `hidden_states` indices (0 = embeddings, i = output of layer i before any final norm, and one more than there
        are layers: after the final norm). `row_width`: as many
        forwards of exactly that many rows as it takes (`infer.fixed`), with logits that do not depend on what the rows
        share them with.
        """
        if row_width is None:
            return self._forward_rows(self._packed(groups, cache), logit_rows, taps)
        check_room(groups, cache)
        outputs = []
        first_row = 0
        for rows in forwards(groups, cache, row_width):
            end_row = first_row + rows.num_real
            wanted = range(first_row, end_row) if logit_rows is None else logit_rows
            outputs.append(self._forward_fixed(rows, [r - first_row for r in wanted if first_row <= r < end_row], taps))
            first_row = end_row
        if len(outputs) == 1:
            return outputs[0]
        return TargetOutput(
            logits=torch.cat([output.logits for output in outputs]),
            taps=torch.cat([output.taps for output in outputs if output.taps is not None]) if taps else None,
        )

    @torch.inference_mode()
    def forward_rows(self, rows: Rows, *, taps: Sequence[int] = ()) -> TargetOutput:
        """One forward over rows that were laid out already, of all of which logits are wanted; nothing waits for the
        device."""
        return self._forward_rows(rows, None, taps)

    @property
    def is_spread(self) -> bool:
        """Whether a device map has put its layers on several devices, or some of them away."""
        return self._is_placed

    @property
    def has_windows(self) -> bool:
        """Whether a layer sees only the last tokens."""
        return any(window is not None for window in self._windows.values())

    def _packed(self, groups: Sequence[RowGroup], cache: SlotCache) -> PackedRows:
        return PackedRows(groups, cache, use_kernel=self._attends_by_kernel)

    def _forward_fixed(self, rows: FixedRows, logit_rows: Sequence[int], taps: Sequence[int]) -> TargetOutput:
        """One forward of fixed shape, LM head included, where any of its logits are wanted."""
        output = self._forward_rows(rows, None if logit_rows else [0], taps)
        states = None if output.taps is None else output.taps[: rows.num_real]
        first = logit_rows[0] if logit_rows else 0  # the rows wanted are the last ones of a request, or all
        if list(logit_rows) == list(range(first, first + len(logit_rows))):
            return TargetOutput(logits=output.logits[first : first + len(logit_rows)], taps=states)
        return TargetOutput(logits=output.logits[list(logit_rows)], taps=states)

    def _forward_rows(self, rows: Rows, logit_rows: Sequence[int] | None, taps: Sequence[int]) -> TargetOutput:
        keep = None if logit_rows is None else torch.tensor(list(logit_rows), device=self.device)
        with _ONE_FORWARD, self.tapped(taps) as states:
            arguments: dict[str, Any] = {PACKED_ROWS: rows}
            if self._keep_argument and keep is not None:
                # The last states of a spread model may be elsewhere; a list need not be where they are.
                arguments["logits_to_keep"] = list(logit_rows or []) if self._is_placed else keep
            output = self.model(
                input_ids=rows.token_ids[None],
                position_ids=rows.positions[None],
                use_cache=False,
                **arguments,
            )
        logits = output.logits[0]
        if keep is not None and not self._keep_argument:
            logits = logits.index_select(0, keep.to(logits.device))
        return TargetOutput(logits=logits.to(self.device), taps=self._side_by_side(states) if states else None)

    def _side_by_side(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tapped states of layers that may be on several devices."""
        return torch.cat([state.to(self.device) for state in states], dim=-1)

    @torch.inference_mode()
    def features(
        self, rows: Sequence[Sequence[int]], taps: Sequence[int], *, max_rows_per_forward: int = 4096
    ) -> list[Features]:
        """Tapped and final states of independent sequences; the result does not depend on how they are batched
        (beyond rounding)."""
        results: list[Features | None] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        while order:
            batch = [order.pop()]
            longest = len(rows[batch[0]])
            while order and (len(batch) + 1) * longest <= max_rows_per_forward:
                batch.append(order.pop())
            for index, features in zip(batch, self._features([rows[i] for i in batch], taps), strict=True):
                results[index] = features
        return [features for features in results if features is not None]

    def _features(self, rows: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Features]:
        cache = self.new_cache(num_slots=len(rows), num_columns=max(len(row) for row in rows))
        groups = [RowGroup(slot=slot, prefix=0, tokens=row) for slot, row in enumerate(rows)]
        packed = self._packed(groups, cache)
        with self.tapped(taps) as states:
            output = self.decoder(
                input_ids=packed.token_ids[None],
                position_ids=packed.positions[None],
                use_cache=False,
                **{PACKED_ROWS: packed},
            )
        lengths = [len(row) for row in rows]
        last = output.last_hidden_state[0].to(self.device).split(lengths)
        tapped = self._side_by_side(states).split(lengths) if states else [part[:, :0] for part in last]
        return [Features(taps=t, last=s) for t, s in zip(tapped, last, strict=True)]

    @contextmanager
    def tapped(self, taps: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Collects the states [R, H] at `taps`, in the order given, during one forward."""
        for tap in taps:
            if not 0 <= tap <= final_tap(self.num_layers):
                raise ValueError(
                    f"tap {tap} is out of range: this target has hidden_states 0 (embeddings) to {self.num_layers}, "
                    f"and {final_tap(self.num_layers)} stands for the state after its final norm"
                )
        states: list[torch.Tensor] = [torch.empty(0)] * len(taps)
        handles = []

        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                states[index] = hidden[0]

            return hook

        def after(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                states[index] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        for index, tap in enumerate(taps):
            if tap < self.num_layers:
                handles.append(self.layers[tap].register_forward_pre_hook(before(index), with_kwargs=True))
            elif tap == final_tap(self.num_layers):
                handles.append(self.final_norm.register_forward_hook(after(index)))
            else:
                handles.append(self.layers[tap - 1].register_forward_hook(after(index)))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _prove(self) -> None:
        """Learn the key/value shape, and hold packed logits of a short text against the stock forward's."""
        limit = min(self.vocab_size, 1000)
        tokens = [7 * i % limit for i in range(1, 9)]
        with torch.inference_mode():
            with self.stock() as model:
                expected = model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0]
            probe = _ShapeProbe(self.num_layers, self.device)
            self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.arange(len(tokens), device=self.device)[None],
                use_cache=False,
                **{PACKED_ROWS: probe},
            )
            self._key_value_shape = probe.shape()
            self._windows = probe.windows
            self._check_windows(self._windows)
            cache = self.new_cache(num_slots=2, num_columns=len(tokens))
            self._attends_by_kernel = self.forward_kind == "kernels" and has_kernel(cache, probe.num_query_heads)
            if self._fuses_layers:
                self.fused.add_layers(self.layers, self._windows)
            first = RowGroup(slot=1, prefix=0, tokens=tokens[:5])
            rest = RowGroup(slot=1, prefix=5, tokens=tokens[5:])
            logits = torch.cat([self.forward([first], cache).logits, self.forward([rest], cache).logits])
        error = (logits.float() - expected.float()).abs().max().item()
        scale = max(1.0, expected.float().abs().max().item())
        tolerance = _SELF_CHECK_TOLERANCE[self.tie_dtype]
        if not error <= tolerance * scale:
            raise ValueError(
                f"{self.name} cannot be decoded exactly: its packed forward differs from the stock one by {error:.2g} "
                f"(largest logit {scale:.2g}). Its attention does something that headstart does not implement."
            )

    def _check_windows(self, given: Mapping[int, int | None]) -> None:
        """Refuse windows that a model keeps to its mask: packed rows take none, and would see beyond them.

        The short text of the proof ends before such a window does.
        """
        window, layers = _sliding_layers(self.config, self.num_layers)
        silent = [layer for layer in layers if given.get(layer) is None]
        if silent and window < self.max_length:
            raise ValueError(
                f"{self.name} keeps the sliding window of {window} of its layers {silent} to its attention mask, where "
                "headstart cannot see it, so texts longer than that would be decoded wrongly. It is not supported"
            )


class _ShapeProbe(Rows):
    """Stands in for a forward's rows once, to learn which layers attend, their windows, and the shape of keys and
    values."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.num_layers = num_layers
        self.num_query_heads = 0
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.columns = torch.empty(0, device=device)

    def store_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        **settings: Unpack[AttentionSettings],
    ) -> torch.Tensor:
        self.shapes[layer] = (key.shape[0], key.shape[-1], value.shape[-1])
        return self.attend(query, layer, **settings)

    def attend(self, query: torch.Tensor, layer: int, **settings: Unpack[AttentionSettings]) -> torch.Tensor:
        self.windows[layer] = settings.get("sliding_window")
        self.num_query_heads = len(query)
        return query.new_zeros((query.shape[1], len(query), self.shapes[layer][2]))

    def shape(self) -> tuple[int, int, int]:
        if sorted(self.shapes) != list(range(self.num_layers)):
            raise ValueError(
                f"only layers {sorted(self.shapes)} of {self.num_layers} attend through the attention interface: "
                "layers that keep state of another kind, or share another layer's keys, are not supported"
            )
        kinds = set(self.shapes.values())
        if len(kinds) > 1:
            raise ValueError(f"layers with different key/value shapes are not supported: found {sorted(kinds)}")
        return kinds.pop()


def _chosen_way(model: nn.Module, asked: str) -> str:
    """How the model's modules are computed: as asked, if that can be, or the fastest way for which there is memory."""
    if asked == "eager":  # which needs no kernels, so none are looked for
        return asked
    possible = possible_ways(model)
    available = possible[-1]
    if asked != "auto":
        if asked not in possible:
            raise ValueError(
                f"forward {asked!r} cannot be had here, only {available!r}: kernels need a CPU with AVX512-BF16, a C++ "
                "compiler and float32 or bfloat16 weights; packed needs oneDNN and such weights on a CPU; triton needs "
                "Triton and all weights on one GPU"
            )
        return asked
    room = available_bytes() if available in COPYING_WAYS else None
    needed = sum(module.weight.nbytes for module in model.modules() if type(module) is nn.Linear)
    return "eager" if room is not None and 2 * needed > room else available


def _adapted_name(name: str, adapter: Adapter) -> str:
    return f"{name} with adapter {adapter.name}" if adapter.name else f"{name} {ADAPTED}"


def refuse_missing(source: str | Path) -> None:
    """Refuse a path to no folder, before the Hub is asked for a name that it cannot hold."""
    path = Path(source)
    is_hub_name = not path.is_absolute() and not str(source).startswith((".", "models/")) and len(path.parts) <= 2
    if not path.is_dir() and not is_hub_name:
        raise ValueError(
            f"there is no target folder {str(source)!r}: give a local folder or a Hub name, "
            "or run `headstart fetch smollm2-135m` for the demo target"
        )


def _decoder_layers(model: Any, num_layers: int) -> list[nn.Module]:
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ValueError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers at its top level: it cannot be tapped"
    )


def _sliding_layers(config: Any, num_layers: int) -> tuple[int, list[int]]:
    """The sliding window that a config puts in force, and at which layers (at none if there is no window)."""
    # A setting that the family's own config does not have is left over from another family, and means nothing.
    window = getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return 0, []
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return int(window), [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


def _eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """End-of-text ids: the generation config's, else the model config's, else the tokenizer's; possibly none."""
    generation = getattr(model, "generation_config", None)
    for holder in (generation, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is None:
            continue
        if isinstance(ids, torch.Tensor):
            ids = ids.flatten().tolist()
        return frozenset(int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]))
    return frozenset()


def _refuse_unsupported(config: Any) -> None:
    """Raise ValueError, with the reason, for models whose state cannot be rolled back or rotated row by row."""
    kind = getattr(config, "model_type", "this model")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder: headstart decodes causal language models")
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(f"{kind} has no num_hidden_layers in its config: give a text-only causal language model")
    for layer_type in sorted(set(getattr(config, "layer_types", None) or ())):
        if any(name in layer_type for name in _STATEFUL_LAYERS):
            raise ValueError(
                f"{kind} has {layer_type} layers: their state cannot be rolled back to an accepted path, "
                "so speculation on it is not supported"
            )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{kind} shares keys between layers, which the slots cache does not support")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [rope, *[table for table in rope.values() if isinstance(table, dict)]]
    for table in tables:
        rope_type = table.get("rope_type", table.get("type"))
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise ValueError(
                f"{kind} uses {rope_type} RoPE, whose angles depend on the longest position in the batch: "
                "verification would change tokens, so it is not supported"
            )


def resolve_device(device: str) -> str:
    """`device`, with auto replaced by what this machine has; ValueError where it does not have it."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:N") from error
    if asked.type == "cuda" and not torch.cuda.is_available():
        build = "a CPU build of torch is installed" if torch.version.cuda is None else "no GPU is visible"
        raise ValueError(
            f"device {device!r} was asked for, but {build} (torch {torch.__version__}): "
            "use --device cpu, or install the CUDA build of torch"
        )
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} was asked for, but this machine has {torch.cuda.device_count()} GPU(s)")
    return device


@torch.inference_mode()
def _forward_seconds(model: Any, *, width: int = 8, repeats: int = 3) -> float:
    """The least time of a narrow forward, after one that is not counted."""
    tokens = torch.arange(width)[None]
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        model(input_ids=tokens, use_cache=False)
        times.append(time.perf_counter() - start)
    return min(times[1:])
