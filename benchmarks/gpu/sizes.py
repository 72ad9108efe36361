"""How much work each part does: in full, and reduced to a plumbing test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def llama_sizes(
    vocab: int, hidden: int, intermediate: int, num_layers: int, heads: tuple[int, int, int]
) -> dict[str, int]:
    """The part of a Llama's config that its speed depends on; `heads`: query heads, key/value heads, head size."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work each part does; `reduced` is for a plumbing test on one slow core."""

    copy_bytes: int = 2 << 30
    kernel_cases: int = 60
    kernel_layouts: tuple[tuple[int, int, int, int], ...] = (
        (32, 8, 128, 128),
        (9, 3, 64, 64),
        (4, 4, 80, 80),
        (8, 1, 96, 40),
        (6, 2, 17, 17),
    )
    """Query heads, key/value heads, sizes of keys and of values."""
    noise_values: int = 1 << 20
    elementwise_widths: tuple[int, ...] = (100, 576, 4096)
    attention_cases: int = 60
    head_shapes: tuple[tuple[int, int], ...] = ((9, 3), (4, 4), (8, 1), (32, 8))
    prefixes: tuple[int, ...] = (0, 1, 5, 63, 64, 127, 200, 513)
    num_prompts: int = 8
    num_single_prompts: int = 3
    num_bitwise_prompts: int = 4
    max_tokens: int = 32
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    graph_batches: tuple[int, ...] = (1, 3)
    num_graph_prompts: int = 4
    graph_tokens: int = 32
    graph_context: int = 200
    speed_tokens: int = 96
    context: int = 256
    repeats: int = 15
    target: Mapping[str, int] = field(default_factory=lambda: llama_sizes(49152, 576, 1536, 30, (9, 3, 64)))
    shapes: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: {
            "8B": llama_sizes(128256, 4096, 14336, 32, (32, 8, 128)),
            "70B": llama_sizes(128256, 8192, 28672, 80, (64, 8, 128)),
        }
    )
    layer_widths: tuple[int, ...] = (1, 32)
    layer_contexts: tuple[int, ...] = (1024, 8192, 32768)
    invariant_widths: tuple[int, ...] = (16, 40)
    round_shape: str = "8B"
    draft_vocab: int = 32000
    round_batches: tuple[int, ...] = (1, 8, 32)
    round_contexts: tuple[int, ...] = (1024, 8192, 32768)
    round_nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    round_depths: tuple[int, ...] = tuple(range(1, 9))
    round_centre: tuple[int, int, int, int] = (1, 1024, 32, 6)
    """Batch, context, nodes and depth of the round that the project's target is about."""
    round_repeats: int = 9
    train_tokens: int | None = None
    """None: as many as the minutes allow."""
    num_trained_prompts: int = 4
    trained_batches: Mapping[int, int] = field(default_factory=lambda: {1: 32, 8: 16, 32: 8})
    """Requests at once, and nodes of their trees."""
    trained_temperatures: tuple[float, ...] = (0.0, 1.0)

    @classmethod
    def reduced(cls) -> Sizes:
        tiny = llama_sizes(256, 48, 64, 3, (6, 2, 8))  # an EAGLE-3 head reads three layers
        return cls(
            copy_bytes=8 << 20,
            kernel_cases=15,
            kernel_layouts=((4, 2, 16, 16), (9, 3, 8, 8), (4, 4, 5, 5), (4, 1, 24, 10), (2, 2, 17, 17)),
            noise_values=1 << 12,
            elementwise_widths=(36, 100),
            attention_cases=14,
            head_shapes=((9, 3), (4, 4), (4, 1), (8, 2)),
            prefixes=(0, 1, 5, 17, 140),
            num_prompts=3,
            num_single_prompts=2,
            num_bitwise_prompts=3,
            max_tokens=10,
            temperatures=(0.0, 0.7),
            num_graph_prompts=2,
            graph_tokens=12,
            graph_context=37,
            speed_tokens=30,
            context=32,
            repeats=3,
            target=tiny,
            shapes={"tiny": tiny},
            layer_widths=(8,),
            layer_contexts=(16, 64),
            invariant_widths=(16,),
            round_shape="tiny",
            draft_vocab=100,
            round_batches=(1, 2),
            round_contexts=(32,),
            round_nodes=(1, 8),
            round_depths=(1, 3),
            round_centre=(1, 32, 8, 3),
            round_repeats=2,
            train_tokens=600,
            num_trained_prompts=2,
            trained_batches={1: 8, 2: 4},
            trained_temperatures=(0.0, 1.0),
        )
