"""Plain steps of layers in the shape of large models, beside the time to read weights, keys and values once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu.machine import busy_ms, median_ms
from benchmarks.gpu.models import random_llama
from benchmarks.gpu.session import CannotRun, Session, requests_label
from benchmarks.gpu.speed import forward_step
from benchmarks.gpu.static import RandomText, columns_for, round_ms
from infer.target import TargetModel


def measure_layers(session: Session) -> None:
    """Of each shape: captured plain steps by batch and context, one in invariant mode, and the bare eager forward."""
    for shape in session.sizes.shapes:
        if session.is_late("layers"):
            session.skip("layers", f"out of time before {shape} shapes")
            continue
        target = shaped_target(session, shape)
        num_layers = f"{shape} shape, {target.num_layers} layers"
        session.machine[f"{shape}_weight_gb"] = round(target.num_weight_bytes / 1e9, 2)
        for batch, context in _batches_and_contexts(session):
            name = f"{num_layers}: plain step, {requests_label(batch)} at context {context}"
            if session.is_late("layers"):
                session.skip("layers", f"out of time before {name}")
            elif not text_fits(target, batch, context):
                session.skip("layers", f"no memory for {name}")
            else:
                _measure_step(session, target, shape, name, batch, context)
        _measure_modes(session, target, shape, num_layers)


def shaped_target(session: Session, shape: str) -> TargetModel:
    """Random layers in one of the shapes, as many as fit; other targets go before it comes."""
    sizes = dict(session.sizes.shapes[shape])
    session.drop_targets()
    sizes["num_hidden_layers"] = layers_that_fit(sizes, max(session.sizes.layer_contexts), session.device)
    model = random_llama(sizes, dtype=torch.bfloat16, device=session.device, scale=0.5)
    return TargetModel.wrap(model, name=f"random layers in {shape} shape")


def text_fits(target: TargetModel, batch: int, context: int, *, max_nodes: int = 0) -> bool:
    """Whether keys and values of so many requests fit into 85 % of the free memory (what they leave is for logits)."""
    if target.device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    bytes_per_token = target.new_cache(num_slots=1, num_columns=1).num_bytes
    needed = batch * columns_for(context, max_nodes) * bytes_per_token
    return needed < 0.85 * torch.cuda.mem_get_info(target.device)[0]


def step_floor(session: Session, target: TargetModel, batch: int, context: int) -> float | None:
    """Milliseconds to read the weights, and the keys and values of every request."""
    bytes_per_token = target.new_cache(num_slots=1, num_columns=1).num_bytes
    return session.floor_ms(target.num_weight_bytes + batch * context * bytes_per_token)


def _batches_and_contexts(session: Session) -> list[tuple[int, int]]:
    """One request at every context, then more at the shortest."""
    contexts, batches = session.sizes.layer_contexts, session.sizes.round_batches
    return [(1, context) for context in contexts] + [(batch, contexts[0]) for batch in batches if batch > 1]


def _measure_step(session: Session, target: TargetModel, shape: str, name: str, batch: int, context: int) -> None:
    static = RandomText(target, batch=batch, context=context, max_nodes=0).round(nodes=0, depth=0)
    milliseconds = round_ms(static, repeats=session.sizes.repeats)
    busy = busy_ms(static.compute, session.device)
    session.time(
        name,
        milliseconds,
        "ms",
        floor=step_floor(session, target, batch, context),
        detail="" if busy is None else f"kernels alone {busy:.2f} ms",
        figures={"what": "plain step", "shape": shape, "batch": batch, "context": context},
    )


def _measure_modes(session: Session, target: TargetModel, shape: str, num_layers: str) -> None:
    """At the shortest context: a step in invariant mode, which computes as many rows as a tree would, and the forward
    as Python starts its kernels, one by one."""
    context = session.sizes.layer_contexts[0]
    floor = step_floor(session, target, 1, context)
    for width in session.sizes.invariant_widths:
        name = f"{num_layers}: plain step in invariant mode, forwards of {width} rows, context {context}"
        if session.is_late("layers"):
            session.skip("layers", f"out of time before {name}")
            continue
        static = RandomText(target, batch=1, context=context, max_nodes=width).round(nodes=0, depth=0, row_width=width)
        figures: dict[str, float | str] = {"what": "invariant step", "shape": shape, "width": width}
        figures |= {"batch": 1, "context": context}
        session.time(name, round_ms(static, repeats=session.sizes.repeats), "ms", floor=floor, figures=figures)
    for width in session.sizes.layer_widths:
        name = f"{num_layers}: eager forward, {width} rows at context {context}"
        if session.is_late("layers"):
            session.skip("layers", f"out of time before {name}")
            continue
        step = forward_step(target, num_requests=1, width=width, context=context)
        milliseconds = median_ms(step, session.device, repeats=session.sizes.repeats)
        session.time(name, milliseconds, "ms", floor=floor)


def layers_that_fit(sizes: Mapping[str, int], num_columns: int, device: torch.device) -> int:
    """As many of the layers asked for as 60 % of the free memory holds, in bfloat16, keys and values included."""
    if device.type != "cuda":
        if sizes["num_hidden_layers"] * sizes["hidden_size"] > 1024:
            raise CannotRun("layers of this size need a CUDA device (or --reduced)")
        return sizes["num_hidden_layers"]
    hidden, size = sizes["hidden_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * size, sizes["num_key_value_heads"] * size
    weights = hidden * (2 * query + 2 * key + 3 * sizes["intermediate_size"])
    torch.cuda.empty_cache()
    available = 0.6 * torch.cuda.mem_get_info(device)[0] - 2 * 2 * hidden * sizes["vocab_size"]
    num_layers = min(sizes["num_hidden_layers"], int(available / 2 / (weights + 2 * key * num_columns)))
    if num_layers < 1:
        raise CannotRun(f"not one layer fits: {torch.cuda.mem_get_info(device)[0] / 1e9:.1f} GB are free")
    return num_layers
