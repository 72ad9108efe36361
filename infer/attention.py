"""The attention function that stock transformers models run under headstart.

It is registered with transformers' `AttentionInterface`, so no model file is copied: a model projects and rotates as
ever, then hands over queries, keys and values. This function stores keys and values in the slots cache and lets each
packed row see its request's committed prefix and its own ancestors, within the layer's sliding window if it has one.
No mask is passed to the model: a 4-D mask would silently replace a sliding-window layer's own.

Shapes: R packed rows, Hq query heads, K key/value heads, D head size; B, N, L as in `infer.rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

if TYPE_CHECKING:
    from infer.rows import PackedRows, Rows

ATTENTION_NAME = "headstart"

# Arguments that change the result and that this function does not implement: refused when not None.
_UNSUPPORTED = ("position_bias", "s_aux", "sinks", "head_mask", "alibi")


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, Hq, R, D] over the cache, after `key`, `value` [1, K, R, D] are stored in it.

    Returns ([1, R, Hq, Dv], None), as transformers expects. Query heads of a group are folded into rows, so that
    grouped-query attention is one batched product over key/value heads and nothing is repeated.
    """
    if packed_rows is None:
        raise ValueError(
            "no packed rows reached the attention function: either this model does not hand its keyword arguments on "
            "to its layers, which headstart needs, or it was not called through TargetModel.forward"
        )
    if attention_mask is not None:
        raise ValueError("this model makes an attention mask of its own, which packed rows cannot follow")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"this model's attention uses {name!r}, which headstart does not implement")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    here, home = query.device, packed_rows.columns.device  # layers of a device map may be elsewhere than the cache
    query, key, value = (states[0].to(home) for states in (query, key, value))
    output = packed_rows.store_and_attend(
        query, key, value, layer, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )
    return output[None].to(here), None


def attend(
    query: torch.Tensor,
    layer: int,
    rows: PackedRows,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of `query` [Hq, R, D] over the columns each row sees; returns [R, Hq, Dv]."""
    if query.device.type == "cuda" and softcap is None and rows.is_long_text(sliding_window):
        return attend_text(query, layer, rows, scaling=scaling)
    keys, values = rows.cache.read(layer, rows.first_slot, rows.last_slot, rows.length)  # [B, K, L, D]
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    num_groups = num_heads // num_kv_heads
    num_slots, rows_per_slot = rows.num_slots, rows.rows_per_slot
    folded = rows.pad(query).transpose(0, 1)  # [B, Hq, N, D]
    folded = folded.reshape(num_slots, num_kv_heads, num_groups * rows_per_slot, query.shape[-1])
    bias = rows.bias(sliding_window, query.dtype, num_groups)  # [B, 1, G*N, L]
    if softcap is None:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
    else:
        output = _softcapped(folded, keys, values, bias, scaling, softcap)
    output = output.reshape(num_slots, num_heads, rows_per_slot, output.shape[-1]).transpose(1, 2)  # [B, N, Hq, Dv]
    return rows.unpad(output)


def attend_text(query: torch.Tensor, layer: int, rows: PackedRows, *, scaling: float | None = None) -> torch.Tensor:
    """`attend` for rows of texts, without windows, a request at a time: what a row sees needs no mask then, whose size
    is that of the prompt squared. Rows come as [Hq, R, D], and go as [R, Hq, Dv]."""
    outputs = []
    for group, queries in zip(
        rows.groups, query.split([len(group.tokens) for group in rows.groups], dim=1), strict=True
    ):
        keys, values = rows.cache.read(layer, group.slot, group.slot, group.num_columns)  # [1, K, L, D]
        visible = causal_lower_right(len(group.tokens), group.num_columns)
        output = F.scaled_dot_product_attention(
            queries[None], keys, values, attn_mask=visible, scale=scaling, enable_gqa=len(query) > keys.shape[1]
        )
        outputs.append(output[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores are squashed to (-softcap, softcap), as in Gemma-2; [B, K, G*N, D]."""
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
