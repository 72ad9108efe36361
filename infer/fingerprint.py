"""Which target this is: a short hash that goes on the card of every head made for it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from infer.placement import named_weights, quantization_of

_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_SAMPLES = 512
"""Numbers that are read of each parameter."""


def fingerprint_of(model: Any, tokenizer: Any | None) -> str:
    """A hash of configuration, a sample of every parameter and the vocabulary: equal for equal models in one dtype or
    another (the sample is rounded to bfloat16), in memory or offloaded. A quantised model is another one."""
    digest = hashlib.sha256()
    digest.update(json.dumps({key: getattr(model.config, key, None) for key in _CONFIG_KEYS}).encode())
    digest.update(quantization_of(model).encode())
    for name, parameter in named_weights(model):
        stride = max(1, parameter.numel() // _SAMPLES)
        sample = parameter.detach().flatten()[::stride].to(torch.bfloat16).cpu().view(torch.int16)
        digest.update(name.encode() + sample.numpy().tobytes())
    if tokenizer is not None:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:32]


def vocabulary_hash(tokenizer: Any) -> str:
    """A hash of which token has which id: equal for tokenizers that differ in chat template or defaults alone."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
