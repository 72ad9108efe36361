"""Random models and heads in the shapes of real ones, made where they will run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.vocab import DraftVocabulary
from infer.drafters.head import HeadDrafter
from infer.target import TargetModel

MAX_POSITIONS = 65536


def random_llama(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device, scale: float, seed: int = 0
) -> Any:
    """A stock Llama with random weights, made where it will run.

    `scale`: standard deviation of what a projection makes of a normed state. At 1.5 the logits are far from uniform,
    so that near ties are as rare as in a trained model.
    """
    settings: dict[str, Any] = {**sizes, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**settings)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    _randomise(model, scale, seed)
    return model


def random_eagle3(target: TargetModel, *, draft_vocab: int, seed: int) -> Eagle3Head:
    """An EAGLE-3 head with random weights, bound to its target: its trees are real, what they propose is not."""
    draft_vocab = min(draft_vocab, target.vocab_size)
    config = Eagle3Config.for_target(target.config, draft_vocab_size=draft_vocab, vocab_size=target.vocab_size)
    vocabulary = DraftVocabulary(target_ids=torch.arange(draft_vocab), vocab_size=target.vocab_size)
    head = Eagle3Head(config, vocabulary).to(device=target.device, dtype=target.dtype)
    _randomise(head, 1.0, seed)
    head.eval().requires_grad_(False)
    return head.bind(target.weights)


def random_head(target: TargetModel, *, seed: int) -> HeadDrafter:
    return HeadDrafter(random_eagle3(target, draft_vocab=8192, seed=seed))


def _randomise(module: torch.nn.Module, scale: float, seed: int) -> None:
    """Normal weights, of `scale` over the root of a product's width."""
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, scale / math.sqrt(parameter.shape[-1]), generator=generator)
