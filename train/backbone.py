"""Training the target along with its head: Medusa-2 with a LoRA adapter on the target's layers.

Cai et al. 2024, "Medusa: Simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774),
sections 2.2 and 2.3. The head learns alone at first, on the target as it is. Then its loss also reaches the adapter,
through the states that it reads, while a second loss keeps the adapted target the language model that it was: the
divergence from the target without adapter (the paper's self-distillation), or the cross entropy of the text. The head
is taught by the adapted target, since that is what will verify its drafts.

**This changes the target.** The adapter is saved beside the head and merged into the target's weights to serve; what is
evaluated here is the merged target, and how far it went from the original is measured and kept on the card (`drift`):

    kl                   mean divergence of the adapted target's next-token law from the original's, on held-out answers
    argmax_changed       share of their positions at which another token has become the most likely
    perplexity           of the adapted target on them; original_perplexity: of the original

Shapes: R packed rows, Q rows before an answer's token, H hidden, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from configs.schema import BackboneConfig
from heads.checkpoint import TargetReference
from heads.lora import Factors, copy_factors, merged_weight, tensor_name, write_adapter
from heads.unroll import Batch
from infer.adapter import ADAPTED, ADAPTER_FOLDER, BASE_FINGERPRINT, DTYPE, adapted_layer
from infer.chat import Rendered
from infer.machine import dtype_name
from infer.target import TargetModel
from train.features import log_normalizer
from train.losses import fused_distillation_loss

RAMP = 0.05
"""Share of the budget over which the adapter's learning rate rises, once the warm-up is over."""
ROWS_PER_CHUNK = 128
"""Rows whose logits over the whole vocabulary are held at once."""
_PEFT_NAME = "default"


class AdaptedBackbone:
    """A target under training: the stock model over the target's own weights, which stay as they are, with an adapter.

    dtype: what the loss computes in, as the trainer's. factors: an adapter to go on with.
    """

    def __init__(
        self,
        target: TargetModel,
        settings: BackboneConfig,
        taps: Sequence[int],
        *,
        dtype: torch.dtype,
        seed: int,
        factors: Factors | None = None,
    ) -> None:
        self.settings = settings
        self._target = target
        self._taps = tuple(taps)
        self._modules = _modules_to_adapt(target, settings.lora_modules)
        model, self._peft_config = _with_adapter(target, settings, self._modules, seed=seed)
        self._view = target.view(model)
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._check_layers()
        if factors is not None:
            copy_factors(self._factors(), factors, wanted="the recipe's backbone section describes")
        self._has_begun = any(bool(up.any()) for _, up in (factors or {}).values())
        self._lm_head = target.lm_head_weight.to(dtype)
        self._served: TargetModel | None = None
        self._served_step = -1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the adapter's factors, in float32."""
        return list(self._named.values())

    # Training

    def trains(self, fraction: float) -> bool:
        """Whether the warm-up, in which the head learns alone, is over. It stays over where a resumed run gets a larger
        budget: what serves the head is the adapted target by then, and the original would teach it something else."""
        return self._has_begun or fraction >= self.settings.warmup

    def learning_rate(self, head_rate: float, fraction: float) -> float:
        return head_rate * self.settings.lr_factor * min(1.0, max(0.0, fraction - self.settings.warmup) / RAMP)

    def begin(self, rows: Sequence[Rendered]) -> JointStep:
        """One optimiser step over the conversations `rows`, of all processes."""
        return JointStep(self, num_labels=sum(sum(row.loss_mask[1:]) for row in rows))

    def states(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """The batch with the adapted target's states in the place of the original's, and its `last` [R, H] apart.

        Gradients go through the taps and through the latter; what teaches the head holds none.
        """
        taps, last = [], []
        for token_ids in batch.token_ids.split(list(batch.lengths)):
            with self._view.tapped(self._taps) as states:
                output = self._view.decoder(input_ids=token_ids[None], use_cache=False)
            taps.append(torch.cat(states, dim=-1).to(batch.taps.dtype))
            last.append(output.last_hidden_state[0].to(batch.last.dtype))
        final = torch.cat(last)
        fixed = final.detach()
        normalizer = log_normalizer(fixed, self._lm_head)
        return replace(batch, taps=torch.cat(taps), last=fixed, log_normalizer=normalizer), final

    def language_loss(self, batch: Batch, last: torch.Tensor) -> torch.Tensor:
        """What keeps the target a language model, summed over the rows before answers' tokens.

        `batch` holds the original's states, `last` [R, H] are the adapted ones.
        """
        rows = _rows_before_answers(batch)
        if self.settings.objective == "kl":
            loss, _ = fused_distillation_loss("kl", last[rows], self._lm_head, batch.last[rows], self._lm_head)
            return loss
        parts = zip(last[rows].split(ROWS_PER_CHUNK), batch.token_ids[rows + 1].split(ROWS_PER_CHUNK), strict=True)
        total = last.new_zeros((), dtype=torch.float32)
        for states, token_ids in parts:
            total = total + checkpoint(self._cross_entropy, states, token_ids, use_reentrant=False)
        return total

    def _cross_entropy(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(states, self._lm_head).float()
        return functional.cross_entropy(logits, token_ids, reduction="sum")

    # Serving

    def served(self, step: int) -> TargetModel:
        """The target as it is served after `step`: the adapter merged into weights of its own. One object, renewed."""
        if self._served is None:
            target = self._target
            self._served = TargetModel.wrap(
                target.twin(own_layers=True), target.tokenizer, name=f"{target.name} {ADAPTED}"
            )
        if step != self._served_step:
            with torch.no_grad():  # not through .data, which hides the change from weights that were packed
                for layer, (down, up) in self._factors().items():
                    base = adapted_layer(self._target.model, layer).weight
                    adapted_layer(self._served.model, layer).weight.copy_(merged_weight(base, down, up, self._scale))
            self._served = self._served.view(self._served.model)  # the same, but for what it remembered of its weights
            self._served_step = step
        return self._served

    def reference(self, step: int) -> TargetReference:
        """The adapted target on the head's card, by the name of the model that must be loaded for it."""
        return replace(self.served(step).reference, name=self._target.name)

    def facts(self) -> dict[str, Any]:
        """What the card says of it."""
        return {
            BASE_FINGERPRINT: self._target.fingerprint,
            DTYPE: dtype_name(self._target.dtype),
            "promise": "lossless with respect to the adapted target: the base model with adapter/ merged in",
            "method": f"LoRA of rank {self.settings.lora_rank}",
            "modules": list(self._modules),
            "num_parameters": sum(parameter.numel() for parameter in self.parameters),
            "objective": self.settings.objective,
        }

    def describe(self) -> str:
        """The plan in words."""
        size, settings = sum(parameter.numel() for parameter in self.parameters), self.settings
        return (
            f"after {settings.warmup:.0%} of the budget {self._target.name} is trained too, by an adapter of "
            f"{size / 1e6:.1f}M parameters (rank {settings.lora_rank} on {', '.join(self._modules)}): what is served, "
            "and what lossless refers to, is then the adapted target"
        )

    def write(self, folder: Path) -> None:
        """Add the adapter to a head's folder, in peft's own form."""
        tensors = {tensor_name(*_split(name)): parameter for name, parameter in self._named.items()}
        write_adapter(folder / ADAPTER_FOLDER, self._config(), tensors)

    def drift(self, original: Sequence[Batch], adapted: Sequence[Batch]) -> dict[str, float]:
        """How far the adapted target went from the original, by the states of both on the same rows."""
        divergence, num_changed, count = 0.0, 0, 0
        surprise = [0.0, 0.0]
        for before, after in zip(original, adapted, strict=True):
            rows = _rows_before_answers(before)
            with torch.no_grad():
                summed, figures = fused_distillation_loss(
                    "kl", after.last[rows], self._lm_head, before.last[rows], self._lm_head, compare=True
                )
            divergence += float(summed)
            num_changed += int((~figures.agrees).sum())
            count += len(rows)
            for place, batch in enumerate((before, after)):
                surprise[place] += float(self._surprise(batch, rows))
        perplexities = [math.exp(total / max(1, count)) for total in surprise]
        return {
            "kl": divergence / max(1, count),
            "argmax_changed": num_changed / max(1, count),
            "perplexity": perplexities[1],
            "original_perplexity": perplexities[0],
            "positions": count,
        }

    def _surprise(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Summed -log p of the text's own tokens after `rows`."""
        logits = (batch.last[rows].float() * self._lm_head[batch.token_ids[rows + 1]].float()).sum(-1)
        normalizer = batch.log_normalizer  # none where the head's own law does not need it (train.teacher)
        known = log_normalizer(batch.last[rows], self._lm_head) if normalizer is None else normalizer[rows]
        return (known - logits).sum()

    # The adapter

    @property
    def _scale(self) -> float:
        return float(self._peft_config.lora_alpha) / int(self._peft_config.r)

    def _factors(self) -> Factors:
        """(A, B) by layer."""
        factors: dict[str, list[torch.Tensor]] = {}
        for name, parameter in self._named.items():  # a layer's A comes before its B
            factors.setdefault(_split(name)[0], []).append(parameter.detach())
        return {layer: (down, up) for layer, (down, up) in factors.items()}

    def _check_layers(self) -> None:
        """peft adapts by name, and names may recur outside of the decoder's layers, where the LM head is."""
        inside = {id(module) for layer in self._target.layers for module in layer.modules()}
        odd = [name for name in self._factors() if id(adapted_layer(self._target.model, name)) not in inside]
        if odd:
            raise ValueError(
                f"peft would adapt {odd[0]} too, which is in none of {self._target.name}'s decoder layers: "
                "name others in backbone.lora_modules"
            )

    def _config(self) -> dict[str, Any]:
        """peft's own config, without what depends on this machine or on the order of a set."""
        values = self._peft_config.to_dict()
        return {
            **{key: sorted(value) if isinstance(value, set) else value for key, value in values.items()},
            "inference_mode": True,
            "base_model_name_or_path": self._target.reference.name,
        }


class JointStep:
    """One optimiser step of head and adapter, batch by batch. num_labels: of the language loss, in the whole step."""

    def __init__(self, backbone: AdaptedBackbone, *, num_labels: int) -> None:
        self._backbone, self._num_labels, self._total = backbone, max(1, num_labels), 0.0

    def forward(self, batch: Batch, *, weight: float = 1.0) -> tuple[Batch, torch.Tensor]:
        """A batch of the unadapted target's states with the adapted one's, and the weighted loss that goes with it.

        weight: 0 where the batch does not count.
        """
        adapted, last = self._backbone.states(batch)
        loss = self._backbone.language_loss(batch, last)
        self._total += weight * float(loss.detach())
        return adapted, loss * (weight * self._backbone.settings.loss_weight / self._num_labels)

    @property
    def loss(self) -> float:
        """This process's part of the language loss of a label, on average."""
        return self._total / self._num_labels


def _rows_before_answers(batch: Batch) -> torch.Tensor:
    """[Q]: rows whose next token the assistant wrote."""
    before = batch.loss_mask.roll(-1)
    ends = torch.tensor(batch.lengths, device=before.device).cumsum(0) - 1
    before[ends] = False
    return before.nonzero().flatten()


def _modules_to_adapt(target: TargetModel, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The last names of the linear layers to adapt, all of them in the decoder's layers."""
    if target.quantization or target.adapter_name or getattr(target.model, "hf_device_map", None):
        raise ValueError(
            f"backbone.lora_rank trains {target.name} along with its head, which takes its whole weights on one "
            "device: leave out target.quantization and target.device_map, and merge target.adapter into its folder"
        )
    present = {
        name.rpartition(".")[-1]
        for layer in target.layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    if not present:
        raise ValueError(f"{target.name} has no linear layers of torch's own kind, so it cannot be adapted")
    unknown = sorted(set(asked or ()) - present)
    if unknown:
        raise ValueError(f"backbone.lora_modules names {unknown}; the layers of {target.name} have {sorted(present)}")
    return tuple(sorted(asked or present))


def _with_adapter(
    target: TargetModel, settings: BackboneConfig, modules: Sequence[str], *, seed: int
) -> tuple[Any, Any]:
    """A twin of the target with peft's layers in it, and peft's config."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("backbone.lora_rank needs peft: pip install 'headstart[train]'") from error
    rank, alpha = settings.lora_rank, settings.lora_alpha
    assert rank is not None
    config = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        target_modules=list(modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = inject_adapter_in_model(config, target.twin(own_layers=False), adapter_name=_PEFT_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft follows the layer's dtype
    return model, config


def _split(name: str) -> tuple[str, str]:
    """The layer and the factor that one of peft's parameters belongs to."""
    layer, _, factor = name.removesuffix(f".{_PEFT_NAME}.weight").rpartition(".")
    return layer, factor
