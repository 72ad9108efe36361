"""The plan of a run: sizes, memory, disk, tokens and time, and what cannot be.

Nothing of the run is made or kept. Without calibration nothing but configurations and text is read either, so the
target may be larger than this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from configs.schema import RunConfig
from heads.vocab import always_kept_ids
from infer.machine import dtype_name, machine_facts
from infer.target import DTYPES, TargetModel
from train.corpus.dataset import TrainingData
from train.features.store import FREE_DISK_SHARE
from train.plan.calibration import Rates, calibrate
from train.plan.needs import (
    DEVICE,
    HOST,
    DiskNeeds,
    Item,
    Precision,
    disk_needs,
    memory_items,
    peak_bytes,
)
from train.plan.resources import GB, Resources
from train.plan.sizes import HeadSize, TargetSize, target_config
from train.plan.timing import Budget, Times, budget_of, times_of
from train.plan.workload import Workload, estimated_workload, load_tokenizer, read_data, workload_of
from train.setup import family_settings, length_problems, load_target
from train.step import check_shares
from train.world import World

SPARE_SHARE = 0.95
"""Of what is free, this much may be planned for."""
MOST_CONVERSATIONS, MOST_PROCESSES = 1024, 64
"""Until which room is looked for."""

Notice = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(kw_only=True)
class Plan:
    """What is known of a run; parts that could not be found out are None. problems: why it cannot be run, one line
    each; notes: what should be known of it."""

    name: str
    resources: Resources
    processes: int
    on_gpu: bool
    target: TargetSize | None = None
    target_dtype: str | None = None
    largest_batch: int | None = None
    """On a GPU: the largest optim.batch_size for which there is room, 0 if there is none for one conversation."""
    head: HeadSize | None = None
    work: Workload | None = None
    memory: list[Item] = field(default_factory=list)
    disk: DiskNeeds | None = None
    rates: Rates | None = None
    budget: Budget | None = None
    times: Times | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def device_bytes(self) -> int:
        """At the peak of one process, where target and head are."""
        return peak_bytes(self.memory, DEVICE) + (0 if self.on_gpu else peak_bytes(self.memory, HOST))

    @property
    def host_bytes(self) -> int:
        """At the peak of all processes of this machine, in CPU memory."""
        own = peak_bytes(self.memory, HOST) + (0 if self.on_gpu else peak_bytes(self.memory, DEVICE))
        return own * self.processes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["memory"] = [asdict(item) for item in self.memory]
        if self.memory:
            values |= {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}
        if self.disk is not None:
            values["disk"]["total"] = self.disk.total
        if self.times is not None:
            values["times"]["total"] = self.times.total
        return values


def make_plan(
    config: RunConfig,
    *,
    processes: int = 1,
    calibrated: bool = True,
    runs_folder: Path | str = "runs",
    resources: Resources | None = None,
    target: TargetModel | None = None,
    notice: Notice = lambda line: None,
) -> Plan:
    """`target` stands in for the recipe's, and `resources` for what is free here. Whatever speaks against the run is
    found at once, as far as one thing does not hide another."""
    resources = resources or Resources.here(Path(runs_folder))
    on_gpu = config.target.device.startswith("cuda") or (config.target.device == "auto" and bool(resources.gpus))
    plan = Plan(name=config.name, resources=resources, processes=processes, on_gpu=on_gpu)
    _check_processes(plan, config)
    model_config = _attempt(plan, lambda: target.config if target is not None else target_config(config))
    if model_config is None:
        return plan
    plan.target = _attempt(plan, lambda: TargetSize.of(model_config))
    if plan.target is None:
        return plan
    size = plan.target
    plan.head = _attempt(
        plan,
        lambda: HeadSize.of(config.head, model_config, size.vocab_size, family_settings(config.head)),
    )
    plan.problems += length_problems(config, "the target", size.max_length)
    tokenizer = target.tokenizer if target is not None else _attempt(plan, lambda: load_tokenizer(config))
    data = _read(plan, config, tokenizer)
    precision = _precision(config, target, on_gpu=on_gpu)
    _fill(plan, config, precision)
    _check_vocabulary(plan, config, tokenizer)
    if calibrated and not plan.problems and data is not None:
        _calibrate(plan, config, data, target, notice)
    _finish(plan, config, data)
    return plan


def _attempt(plan: Plan, action: Callable[[], Found]) -> Found | None:
    """What `action` finds; what it refuses is one of the plan's problems."""
    try:
        return action()
    except (ValueError, OSError) as error:
        plan.problems.append(" ".join(str(error).split()))
        return None


def _read(plan: Plan, config: RunConfig, tokenizer: Any | None) -> TrainingData | None:
    assert plan.target is not None
    if tokenizer is None:
        if not plan.problems:
            plan.notes.append("the target's folder has no tokenizer: tokens are estimated by letters")
        plan.work = _attempt(plan, lambda: estimated_workload(config))
        return None
    max_length = plan.target.max_length
    data = _attempt(plan, lambda: read_data(config, tokenizer, max_length=max_length))
    if data is not None:
        plan.work = workload_of(data, visits=None)
    return data


def _precision(config: RunConfig, target: TargetModel | None, *, on_gpu: bool) -> Precision:
    """`auto` on a CPU is a measurement; before it, what the processor is made for."""
    if target is not None:
        dtype = target.dtype
    elif config.target.dtype != "auto":
        dtype = DTYPES[config.target.dtype]
    else:
        facts = machine_facts()
        fast = on_gpu or bool(facts["avx512_bf16"]) or bool(facts["amx_bf16"])
        dtype = torch.bfloat16 if fast else torch.float32
    return Precision(target=dtype, compute=dtype if config.train.dtype == "auto" else DTYPES[config.train.dtype])


def _fill(plan: Plan, config: RunConfig, precision: Precision) -> None:
    """Memory and disk, and whether there is so much."""
    plan.target_dtype = dtype_name(precision.target)
    if plan.target is None or plan.head is None or plan.work is None:
        return
    plan.memory = memory_items(
        config, plan.target, plan.head, plan.work, precision, processes=plan.processes, on_gpu=plan.on_gpu
    )
    plan.disk = disk_needs(config, plan.target, plan.head, plan.work, precision.target)
    _find_largest_batch(plan, config, precision)
    _check_memory(plan, config, precision)


def _find_largest_batch(plan: Plan, config: RunConfig, precision: Precision) -> None:
    free = _free_on_gpu(plan, config)
    if free is None:
        return

    def fits(size: int) -> bool:
        return _device_bytes(plan, replace(config, optim=replace(config.optim, batch_size=size)), precision) <= free

    low, high = 0, 1
    while high <= MOST_CONVERSATIONS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    plan.largest_batch = low


def _device_bytes(plan: Plan, config: RunConfig, precision: Precision, *, processes: int | None = None) -> int:
    """What another recipe would take of the GPU of one process."""
    assert plan.target is not None
    assert plan.head is not None
    assert plan.work is not None
    processes = plan.processes if processes is None else processes
    items = memory_items(config, plan.target, plan.head, plan.work, precision, processes=processes, on_gpu=True)
    return peak_bytes(items, DEVICE)


def _free_on_gpu(plan: Plan, config: RunConfig) -> int | None:
    """What may be planned for where the target is; None without a GPU."""
    resources = plan.resources
    if not plan.on_gpu or not resources.gpus:
        return None
    free = sum(gpu.free for gpu in resources.gpus) if config.target.device_map else resources.gpus[0].free
    if config.target.device_map and resources.memory is not None:
        free += resources.memory
    return round(free * SPARE_SHARE)


def _calibrate(plan: Plan, config: RunConfig, data: TrainingData, target: TargetModel | None, notice: Notice) -> None:
    if config.target.features is not None or config.target.sharded:
        plan.notes.append("no time is estimated: calibration takes a whole target in one process")
        return
    if target is None:
        notice("calibrating: loading the target, then some seconds of features and training")
        found = _attempt(plan, lambda: load_target(config, World()))
        if not isinstance(found, TargetModel):
            return
        target = found
    loaded = target
    if dtype_name(loaded.dtype) != plan.target_dtype:
        _fill(plan, config, _precision(config, loaded, on_gpu=plan.on_gpu))
    plan.rates = _attempt(plan, lambda: calibrate(config, loaded, data))


def _finish(plan: Plan, config: RunConfig, data: TrainingData | None) -> None:
    """Budget and time; of a stream, tokens and disk follow from the visits."""
    if plan.work is None or plan.disk is None or plan.target is None or plan.head is None:
        return
    speedup = float(plan.processes) if plan.on_gpu else 1.0
    plan.budget = budget_of(config, plan.work, plan.rates, plan.disk, speedup=speedup)
    if plan.budget.visits is not None:
        if data is not None and data.num_rows is None:
            plan.work = workload_of(data, visits=plan.budget.visits)
        seen_share = 1.0 if plan.budget.epochs is None else min(1.0, plan.budget.epochs)
        assert plan.target_dtype is not None
        dtype: torch.dtype = getattr(torch, plan.target_dtype)
        plan.disk = disk_needs(config, plan.target, plan.head, plan.work, dtype, seen_share=seen_share)
    _check_disk(plan, config)
    if plan.rates is not None and plan.budget.visits is not None:
        plan.times = times_of(config, plan.work, plan.budget, plan.rates, plan.disk, speedup=speedup)
    if plan.processes > 1 and not plan.on_gpu:
        plan.notes.append("the processes share this machine's cores: no time is gained by them")


# What cannot be


def _check_processes(plan: Plan, config: RunConfig) -> None:
    _attempt(plan, lambda: check_shares(config.optim, processes=plan.processes))
    if config.target.sharded and plan.processes == 1:
        plan.problems.append(
            "target.sharded shares the target out among processes, and there is one: start several (--processes here), "
            "or leave it out"
        )
    if config.target.device.startswith("cuda") and not plan.resources.gpus:
        plan.problems.append(
            f"target.device is {config.target.device}, but there is no GPU here: set it to auto or cpu"
        )


def _check_vocabulary(plan: Plan, config: RunConfig, tokenizer: Any | None) -> None:
    size = config.head.draft_vocab_size
    if tokenizer is None or plan.target is None or size is None or config.head.init_from is not None:
        return
    kept = len(always_kept_ids(tokenizer))
    if size < min(kept, plan.target.vocab_size):
        plan.problems.append(
            f"head.draft_vocab_size is {size}, but {kept} special, chat and byte tokens are always kept: raise it"
        )


def _check_memory(plan: Plan, config: RunConfig, precision: Precision) -> None:
    resources, free = plan.resources, _free_on_gpu(plan, config)
    if free is not None:
        before = len(plan.problems)
        place = f"a GPU ({resources.gpus[0].name})"
        _check_place(plan, config, place, plan.device_bytes, round(free / SPARE_SHARE))
        if len(plan.problems) > before:
            plan.problems[-1] += _what_would_fit(plan, config, precision)
    if resources.memory is not None:
        of = f" of {plan.processes} processes" if plan.processes > 1 else ""
        _check_place(plan, config, f"memory{of}", plan.host_bytes, resources.memory)


def _what_would_fit(plan: Plan, config: RunConfig, precision: Precision) -> str:
    """A smaller batch; where there is no room for one conversation, fewer bits, CPU memory and more processes."""
    if plan.largest_batch:
        return f". There would be room with optim.batch_size={plan.largest_batch}"
    ways: list[str] = []
    target = config.target
    if target.features is None and target.quantization is None and target.device_map is None and not target.sharded:
        ways += _attempts(plan, replace(config, target=replace(target, quantization="int4")), precision, "int4")
        ways += _attempts(
            plan, replace(config, target=replace(target, device="auto", device_map="auto")), precision, "device_map"
        )
    if target.features is None and target.quantization is None and target.device_map is None:
        shared = replace(config, target=replace(target, sharded=True))
        for processes in range(max(2, plan.processes), MOST_PROCESSES + 1):
            if found := _attempts(plan, shared, precision, "sharded", processes=processes):
                ways += found
                break
    return f". There would be room with {' or '.join(ways)}" if ways else ""


def _attempts(
    plan: Plan, config: RunConfig, precision: Precision, way: str, *, processes: int | None = None
) -> list[str]:
    """`way` in words, if there is room on the GPU for `config`, or at least for one conversation at a time; else
    nothing."""
    words = {
        "int4": "target.quantization=int4",
        "device_map": "target.device_map=auto (what the GPUs do not hold waits in CPU memory, which is slow)",
        "sharded": f"target.sharded=true on {processes} such GPUs, a process on each (ZeRO-3)",
    }
    free = _free_on_gpu(plan, config)
    assert free is not None
    alone = replace(config, optim=replace(config.optim, batch_size=1))
    if _device_bytes(plan, config, precision, processes=processes) <= free:
        return [words[way]]
    if _device_bytes(plan, alone, precision, processes=processes) <= free:
        return [f"optim.batch_size=1 and {words[way]}"]
    return []


def _check_place(plan: Plan, config: RunConfig, place: str, needed: int, free: int) -> None:
    if needed <= free * SPARE_SHARE:
        return
    large = sorted((item for item in plan.memory if item.settings), key=lambda item: -item.num_bytes)
    parts = []
    for item in large[:2]:
        settings = _that_help(item.settings, plan, config)
        if item.num_bytes > needed / 20 and settings:
            parts.append(f"{item.name} takes {_gigabytes(item.num_bytes)} ({' or '.join(settings)})")
    plan.problems.append(
        f"{place}: {_gigabytes(needed)} are needed and {_gigabytes(free)} are free"
        + (f"; {'; '.join(parts)}" if parts else "")
    )


def _that_help(settings: Sequence[str], plan: Plan, config: RunConfig) -> list[str]:
    """Of the settings that make an item smaller, those that can here, and what to set them to."""
    advice = {
        "target.quantization": "target.quantization=int4",
        "target.device_map": "target.device_map=auto" if plan.on_gpu else None,
        "target.sharded": "target.sharded=true" if plan.processes > 1 and config.deepspeed.stage is not None else None,
        "train.overlap": "train.overlap=false",
        "target.features": "target.features, made where the target fits (headstart features)",
        "target.dtype": "target.dtype=bfloat16" if _may_be_float32(plan, config) else None,
        "deepspeed.stage": "deepspeed.stage=3" if config.deepspeed.stage != 3 else None,
        "deepspeed.offload_optimizer": "deepspeed.offload_optimizer" if plan.on_gpu else None,
        "optim.batch_size": "a smaller optim.batch_size" if config.optim.batch_size > 1 else None,
        "optim.accumulation": "a smaller optim.accumulation" if config.optim.accumulation > 1 else None,
        "data.streaming": "data.streaming" if not config.data.streaming else None,
    }
    return [line for line in (advice.get(name, f"a smaller {name}") for name in settings) if line is not None]


def _may_be_float32(plan: Plan, config: RunConfig) -> bool:
    """The target, now or while `auto` tries it."""
    return plan.target_dtype == "float32" or (config.target.dtype == "auto" and not plan.on_gpu)


def _check_disk(plan: Plan, config: RunConfig) -> None:
    assert plan.disk is not None
    disk, free = plan.disk, plan.resources.disk
    if disk.total > free * FREE_DISK_SHARE:
        ways = []
        if disk.features:
            room = max(0.0, free * FREE_DISK_SHARE - (disk.total - disk.features))
            ways.append(f"train.feature_cache_gb={room / GB:.1f}")
            if config.train.feature_dtype != "int8":
                ways.append("train.feature_dtype=int8")
        if config.train.keep_checkpoints:
            ways.append("train.keep_checkpoints=0")
        ways.append("a smaller head.draft_vocab_size")
        plan.problems.append(
            f"disk: {_gigabytes(disk.total)} are needed ({_gigabytes(disk.features)} for features, "
            f"{_gigabytes(disk.checkpoints + disk.saving)} for checkpoints) and {_gigabytes(free)} are free: set "
            + " or ".join(ways)
        )
    if config.train.feature_cache and config.target.features is None and 0 < disk.features_share < 1:
        whole = disk.features / disk.features_share
        plan.notes.append(
            f"the feature cache holds {disk.features_share:.0%} of the rows visited, the others are computed at every "
            f"visit: all take train.feature_cache_gb={whole / GB:.1f}"
        )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
