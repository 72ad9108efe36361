"""Tiny heads of every family that the registry knows, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from heads.base import DraftHead
from heads.registry import FAMILIES
from heads.vocab import DraftVocabulary
from infer.target import TargetModel

ONE_PASS = ("peagle", "dflash")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "medusa of two blocks": ("medusa", {"num_heads": 3, "num_layers": 2}),
    "hydra of two layers": ("hydra", {"num_heads": 3, "num_layers": 2}),
    "hydra with a prefix layer": ("hydra", {"prefix_layer": True}),
    "eagle3 with every norm": ("eagle3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "peagle of two layers": (
        "peagle",
        {"num_layers": 2, "num_depths": 5, "markov_table": True, "norm_before_residual": True, "fc_norm": True},
    ),
    "peagle by itself": ("peagle", {"num_depths": 3, "markov_rank": 0, "own_embedding": True}),
    "dflash of two layers": ("dflash", {"num_layers": 2, "markov_rank": 0}),
    "dspark": ("dflash", {"sample_from_anchor": True, "markov_table": True, "markov_gate": True, "taps": (1, 3)}),
}
"""Every family as it is by default, and the settings that give a head other parts or another way to draft."""


def marked(variants: Iterable[str]) -> list[ParameterSet]:
    """For tests that take long with a head each: of those that draft in one pass only a family's usual one is for every
    day, the others are slow."""
    return [
        pytest.param(name, marks=[] if name in FAMILIES or VARIANTS[name][0] not in ONE_PASS else [pytest.mark.slow])
        for name in variants
    ]


def tiny_head(variant: str, target: TargetModel, *, draft_vocab_size: int | None = None, seed: int = 0) -> DraftHead:
    """A head with random weights, bound to its target. A reduced vocabulary holds the lowest odd token ids.

    Every weight is off its start: zeros and ones would hide a part that is left out.
    """
    name, settings = VARIANTS[variant]
    family, vocab_size = FAMILIES[name], target.vocab_size
    odd = dict.fromkeys(range(1, vocab_size, 2), 1)
    vocabulary = (
        DraftVocabulary.full(vocab_size)
        if draft_vocab_size is None
        else DraftVocabulary.from_counts(odd, size=draft_vocab_size, vocab_size=vocab_size)
    )
    config = family.config.for_target(
        target.config, draft_vocab_size=len(vocabulary), vocab_size=vocab_size, **settings
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = family.head(config, vocabulary)
        with torch.no_grad():
            for parameter_name, parameter in head.named_parameters():
                if parameter.ndim > 1:  # a head that goes on from its own states must not let them grow
                    parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
                else:
                    centre = 1.0 if "norm" in parameter_name else 0.0
                    parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    return head.to(dtype=target.dtype).bind(target.weights)
