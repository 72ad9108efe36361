"""A plan in words and tables, for the terminal."""

from __future__ import annotations

from train.plan.needs import DEVICE, HOST, Item
from train.plan.plan import Plan


def describe(plan: Plan) -> str:
    """Everything that is known, one aspect after another."""
    sections = [f"Plan of {plan.name}", f"this machine: {plan.resources.describe()}"]
    sections += [_models(plan), _data(plan), _memory(plan), _disk(plan), _time(plan)]
    sections += [f"note: {note}" for note in plan.notes]
    return "\n".join(section for section in sections if section)


def _models(plan: Plan) -> str:
    lines = []
    if (target := plan.target) is not None:
        tied = " (LM head tied)" if target.is_tied else ""
        lines.append(
            f"target: {_count(target.parameters)} parameters, of them {_count(target.embedding_parameters)} embeddings"
            f"{tied}; {target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size:,}, "
            f"{plan.target_dtype or 'dtype unknown'}"
        )
    if (head := plan.head) is not None:
        trained = "" if head.trained == head.parameters else f", {_count(head.trained)} of them trained"
        lines.append(
            f"head:   {head.family}, {_count(head.parameters)} parameters{trained}; draft vocabulary "
            f"{head.draft_vocab_size:,}, taps {list(head.taps)}"
        )
    return "\n".join(lines)


def _data(plan: Plan) -> str:
    work, budget = plan.work, plan.budget
    if work is None:
        return ""
    about = "" if work.is_counted else "about "
    rows = "a stream" if work.num_rows is None else f"{work.num_rows:,} rows"
    labels = "" if work.num_labels is None else f" ({work.num_labels:,} labels)"
    lines = [
        f"data:   {rows}, {about}{work.num_tokens:,} tokens{labels}; rows of {work.mean_length:.0f} tokens on average, "
        f"{work.longest:,} at most; {work.held_out_tokens:,} tokens held out"
    ]
    if budget is not None and budget.visits is not None and budget.steps is not None:
        epochs = "" if budget.epochs is None else f" = {budget.epochs:.2f} epochs"
        lines.append(
            f"budget: {budget.steps:,} steps of the optimiser, {budget.visits:,} visits{epochs}, "
            f"{budget.tokens:,} tokens ({budget.by})"
        )
    elif budget is not None:
        lines.append(f"budget: {budget.by}, whose steps only a calibration tells")
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    if not plan.memory:
        return ""
    each = " of each process" if plan.processes > 1 else ""
    lines = []
    if plan.on_gpu:
        lines += [f"GPU memory{each}: {_size(plan.device_bytes)}", *_items(plan, DEVICE)]
        lines += [f"CPU memory: {_size(plan.host_bytes)}", *_items(plan, HOST)]
    else:
        together = f", {_size(plan.host_bytes)} together" if plan.processes > 1 else ""
        lines += [f"memory{each}: {_size(plan.device_bytes)} at its peak{together}", *_items(plan, DEVICE, HOST)]
    if plan.largest_batch is not None:
        most = f"up to optim.batch_size={plan.largest_batch}" if plan.largest_batch else "for not even one conversation"
        lines.append(f"  (there is room {most}, with rows of up to {plan.work.longest if plan.work else 0:,} tokens)")
    if plan.rates is not None and plan.rates.peak_memory_bytes:
        lines.append(f"  (the calibration reached {_size(plan.rates.peak_memory_bytes)})")
    return "\n".join(lines)


def _items(plan: Plan, *places: str) -> list[str]:
    """What stays, then the largest of what passes; the others in brackets."""
    here = [item for item in plan.memory if item.where in places]
    largest = {place: max((i.num_bytes for i in here if i.passing and i.where == place), default=0) for place in places}

    def line(item: Item) -> str:
        counts = not item.passing or item.num_bytes == largest[item.where]
        size = _size(item.num_bytes) if counts else f"({_size(item.num_bytes)})"
        return f"  {size:>12}  {item.name}"

    return [line(item) for item in sorted(here, key=lambda item: (item.passing, -item.num_bytes))]


def _disk(plan: Plan) -> str:
    disk = plan.disk
    if disk is None:
        return ""
    return "\n".join(
        [
            f"disk: {_size(disk.total)} at its peak",
            f"  {_size(disk.features):>12}  features, {disk.feature_bytes_per_token:,} bytes a token",
            f"  {_size(disk.checkpoints):>12}  checkpoints: last, best and earlier ones (a whole one "
            f"{_size(disk.checkpoint)}, the best head {_size(disk.best)})",
            f"  {_size(disk.saving):>12}  one more while it is written",
        ]
    )


def _time(plan: Plan) -> str:
    rates, times = plan.rates, plan.times
    if rates is None:
        return "time: not estimated (no calibration)"
    lines = []
    if times is not None:
        lines = [
            f"time: {_duration(times.total)}",
            f"  {_duration(times.features):>12}  features, {rates.features:,.0f} tokens/s",
            f"  {_duration(times.training):>12}  training, {rates.first_steps:,.0f} tokens/s with one unrolled step, "
            f"{rates.all_steps:,.0f} with all",
            f"  {_duration(times.evaluations):>12}  {times.num_evaluations} evaluations",
        ]
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
