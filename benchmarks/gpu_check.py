"""Does decoding keep its promise on this machine's accelerator, and how far from the memory floor is it?

    python benchmarks/gpu_check.py [--target models/smollm2-135m] [--device cuda] [--json report.json]

One script for a machine with nothing but torch, transformers, safetensors and numpy; run it from the source tree,
no installation needed. In turn: attention against a float64 reference, token equality of every kind of draft in
float32 and bfloat16, targets spread over device, memory and disk (with accelerate) or quantised (with bitsandbytes),
decoding speed, and step times of random layers in the shape of an 8B model. One table at the end; exit status 1 if a
check failed. A part that cannot run says why, and the rest goes on. `--minutes` bounds the
whole; what is left undone is listed.

Limits: times are medians of synchronised wall clocks of this eager engine, in one process. Where the folder of
`--target` is missing, a random model of the same shape stands in: its times and its equality count, the acceptance of
drafts on its text means nothing.

Shapes: R packed rows, Hq query heads, K key/value heads, D head size, S cache columns.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.vocab import DraftVocabulary
from infer import attention
from infer.cache import SlotCache
from infer.cost import CostModel
from infer.divergence import FirstDifference
from infer.drafters.base import Drafter, DraftLimit, TreeSettings
from infer.drafters.head import HeadDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import Script, ScriptedDrafter
from infer.engine import Engine
from infer.machine import dtype_name
from infer.request import Request
from infer.rows import PackedRows, RowGroup, tree_group
from infer.sampling import SamplingParams
from infer.target import DTYPES, TargetModel
from infer.tree import ROOT, DraftTree, OneHot

PARTS = {
    "bandwidth": 0.05,
    "attention": 0.2,
    "float32": 0.45,
    "bfloat16": 0.6,
    "bitwise": 0.7,
    "placement": 0.78,
    "speed": 0.9,
    "layers": 1.0,
}
"""The parts in the order in which they run, and the share of the minutes by which each stops."""

# Attention is compared by relative error, norm over norm. In float32 only the order of sums differs from the reference,
# and any leaked column is far above it. In bfloat16 a kernel rounds weights and outputs (2**-9 each); softcapped scores
# of up to 20 are themselves rounded, as in the stock forward, so their weights are off by a few per cent.
ATTENTION_TOLERANCE = {
    (torch.float32, False): 2e-5,
    (torch.float32, True): 2e-5,
    (torch.bfloat16, False): 1e-2,
    (torch.bfloat16, True): 3e-2,
}
PLACED_TOLERANCE = {"spread by a map": 1e-4, "int8": 0.15, "int4": 0.4}
"""Relative error of a target's last states against the whole one's: rounding of sums, or of weights."""
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One, two, three, four, five, six, seven, eight, nine, ten. One, two, three, four,",
    "Write a short letter to a friend who has moved to another city.\n\nDear",
    '{"name": "apple", "price": 1.20}\n{"name": "pear", "price": 1.50}\n{"name": "plum",',
    "Water boils at 100 degrees Celsius because",
    "Q: A train travels 60 km in 40 minutes. What is its speed?\nA:",
    "She opened the door, and she opened the window, and she opened",
)


class CannotRun(Exception):
    """A part's prerequisites are missing here; the message says which."""


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
    attention_cases: int = 120
    head_shapes: tuple[tuple[int, int], ...] = ((9, 3), (4, 4), (8, 1), (32, 8))
    prefixes: tuple[int, ...] = (0, 1, 5, 63, 64, 127, 200, 513)
    num_prompts: int = 8
    num_single_prompts: int = 3
    max_tokens: int = 32
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    speed_tokens: int = 96
    context: int = 256
    repeats: int = 15
    target: Mapping[str, int] = field(default_factory=lambda: llama_sizes(49152, 576, 1536, 30, (9, 3, 64)))
    layers: Mapping[str, int] = field(default_factory=lambda: llama_sizes(128256, 4096, 14336, 32, (32, 8, 128)))
    layer_widths: tuple[int, ...] = (1, 8, 16, 32, 64)
    layer_contexts: tuple[int, ...] = (1024, 8192)

    @classmethod
    def reduced(cls) -> Sizes:
        tiny = llama_sizes(256, 48, 64, 3, (6, 2, 8))  # an EAGLE-3 head reads three layers
        return cls(
            copy_bytes=8 << 20,
            attention_cases=14,
            head_shapes=((9, 3), (4, 4), (4, 1), (8, 2)),
            prefixes=(0, 1, 5, 17, 140),
            num_prompts=3,
            num_single_prompts=2,
            max_tokens=10,
            temperatures=(0.0, 0.7),
            speed_tokens=30,
            context=32,
            repeats=3,
            target=tiny,
            layers=tiny,
            layer_widths=(1, 8),
            layer_contexts=(16, 64),
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A measured time or rate; `floor` is what memory bandwidth alone would allow, in the same unit."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    part: str
    reason: str


@dataclass(kw_only=True)
class Session:
    """What the parts share: where they run, how much they do, until when, and what they found."""

    device: torch.device
    sizes: Sizes
    target_path: Path
    random_target: bool
    started: float
    seconds: float
    machine: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _targets: dict[str, TargetModel] = field(default_factory=dict)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name=name, passed=passed, detail=detail))
        print(f"  {'pass' if passed else 'FAIL'}  {name}: {detail}", file=sys.stderr, flush=True)

    def time(self, name: str, value: float, unit: str, *, floor: float | None = None, detail: str = "") -> None:
        self.timings.append(Timing(name=name, value=value, unit=unit, floor=floor, detail=detail))
        print(f"  {value:10.3f} {unit}  {name}  {detail}", file=sys.stderr, flush=True)

    def skip(self, part: str, reason: str) -> None:
        self.skipped.append(Skipped(part=part, reason=reason))
        print(f"  skipped  {part}: {reason}", file=sys.stderr, flush=True)

    def is_late(self, part: str) -> bool:
        return time.perf_counter() - self.started > PARTS[part] * self.seconds

    def floor_ms(self, num_bytes: int) -> float | None:
        """Milliseconds to read `num_bytes` at the bandwidth measured here."""
        bandwidth = self.machine.get("bandwidth_gb_s")
        return None if not bandwidth else num_bytes / bandwidth / 1e6

    def target(self, dtype: str) -> TargetModel:
        if dtype not in self._targets:
            self.drop_targets()
            if self.random_target:
                model = random_llama(self.sizes.target, dtype=DTYPES[dtype], device=self.device, scale=1.5)
                self._targets[dtype] = TargetModel.wrap(model, name="random Llama")
            else:
                self._targets[dtype] = TargetModel.load(self.target_path, dtype=dtype, device=str(self.device))
            self.machine["target"] = self._targets[dtype].name
        return self._targets[dtype]

    def drop_targets(self) -> None:
        self._targets.clear()
        gc.collect()  # a fused model refers to itself, so only the collector frees its memory

    def prompts(self, target: TargetModel) -> list[list[int]]:
        if target.tokenizer is not None:
            return [target.tokenizer(text)["input_ids"] for text in PROMPTS[: self.sizes.num_prompts]]
        generator = np.random.default_rng(0)
        prompts = []
        for index in range(self.sizes.num_prompts):
            phrase = generator.integers(3, target.vocab_size, size=5 + 3 * index).tolist()
            prompts.append([*phrase, *phrase[: 3 + index]])  # the lookup finds its own end again
        return prompts


def random_llama(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device, scale: float, seed: int = 0
) -> Any:
    """A stock Llama with random weights, made where it will run.

    `scale`: standard deviation of what a projection makes of a normed state. At 1.5 the logits are far from uniform,
    so that near ties are as rare as in a trained model.
    """
    settings: dict[str, Any] = {**sizes, "max_position_embeddings": 16384, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**settings)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, scale / math.sqrt(parameter.shape[-1]), generator=generator)
    return model


# Machine.


def describe_machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(total_bytes / 1e9, 1),
            "free_gb": round(free_bytes / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return facts


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(action: Callable[[], object], device: torch.device, *, repeats: int, calls: int = 1) -> float:
    """Median milliseconds of a call, after three untimed ones; `calls` in a row hide the cost of starting them."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            action()
        synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def busy_ms(action: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds of a call during which the device's kernels run; the rest of its time the device waits for Python.
    None where no profiler answers."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            action()
            synchronize(device)
        on_device = [
            event for event in profile.events() or () if event.device_type != torch._C._autograd.DeviceType.CPU
        ]
        return sum(float(event.time_range.elapsed_us()) for event in on_device) / 1e3 or None
    except (RuntimeError, AssertionError, AttributeError) as error:  # what it says depends on the build
        print(f"  no profiler: {error}", file=sys.stderr)
        return None


def measure_bandwidth(session: Session) -> None:
    """Bytes moved a second by a large copy (read and written) and by a large matrix-vector product (read)."""
    device, num_bytes = session.device, session.sizes.copy_bytes
    source = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    destination = torch.empty_like(source)
    copy_ms = median_ms(lambda: destination.copy_(source), device, repeats=session.sizes.repeats, calls=5)
    num_columns = 4096
    matrix = source[: source.numel() // num_columns * num_columns].view(-1, num_columns)
    vector = torch.ones(1, num_columns, dtype=torch.bfloat16, device=device)
    product_ms = median_ms(
        lambda: torch.nn.functional.linear(vector, matrix), device, repeats=session.sizes.repeats, calls=5
    )
    copied, read = 2 * num_bytes / copy_ms / 1e6, num_bytes / product_ms / 1e6
    session.machine["bandwidth_gb_s"] = round(max(copied, read), 1)
    session.time("memory bandwidth, copy", copied, "GB/s", detail=f"{num_bytes / 1e9:.2f} GB, read and written")
    session.time("memory bandwidth, matrix-vector product", read, "GB/s", detail=f"bfloat16, {num_bytes / 1e9:.2f} GB")


# Attention.


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCase:
    groups: tuple[RowGroup, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    softcap: float | None

    def describe(self) -> str:
        return (
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}, "
            f"window {self.window}, softcap {self.softcap}, rows {[len(group.tokens) for group in self.groups]}, "
            f"prefixes {[group.prefix for group in self.groups]}"
        )


def attention_cases(sizes: Sizes, seed: int = 0) -> Iterator[AttentionCase]:
    """Ragged groups in a random subset of slots. Cycles of coprime length pair every head shape, size and window."""
    generator = np.random.default_rng(seed)
    head_sizes, windows = (64, 128, 16, 80, 17), (None, 4, 64)
    for index in range(sizes.attention_cases):
        num_heads, num_kv_heads = sizes.head_shapes[index % len(sizes.head_shapes)]
        window = windows[index % len(windows)]
        slots = generator.permutation(6)[: generator.integers(1, 5)].tolist()
        yield AttentionCase(
            groups=tuple(random_group(generator, slot, sizes.prefixes) for slot in slots),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_sizes[index % len(head_sizes)],
            window=window,
            softcap=20.0 if index % 7 == 6 else None,
        )


def random_group(generator: np.random.Generator, slot: int, prefixes: Sequence[int]) -> RowGroup:
    """A chain, a tree behind a chain, or the second level of a tree whose first is in the cache already."""
    prefix = int(generator.choice(prefixes))
    kind = generator.integers(0, 4)
    if kind == 0:
        return RowGroup(slot=slot, prefix=prefix, tokens=[7] * int(generator.choice((1, 2, 7, 33))))
    num_nodes = int(generator.choice((1, 5, 16, 31)))
    if kind == 3:
        offset = int(generator.integers(1, 9))
        ancestors = np.zeros((num_nodes, offset + num_nodes), dtype=bool)
        ancestors[np.arange(num_nodes), generator.integers(0, offset, num_nodes)] = True
        ancestors[np.arange(num_nodes), offset + np.arange(num_nodes)] = True
        return RowGroup(
            slot=slot,
            prefix=prefix,
            offset=offset,
            offset_depths=[0] * offset,
            tokens=[7] * num_nodes,
            depths=[1] * num_nodes,
            ancestors=ancestors,
        )
    parents = [int(generator.integers(ROOT, node)) for node in range(num_nodes)]
    return tree_group(slot, prefix, [7] * int(generator.integers(1, 4)), [7] * num_nodes, parents)


def visible_columns(group: RowGroup, row: int, window: int | None) -> list[int]:
    """Columns of its slot that a row sees, from the definition of a group alone."""
    tail = range(row + 1) if group.ancestors is None else np.flatnonzero(group.ancestors[row]).tolist()
    columns = [*range(group.prefix), *(group.prefix + column for column in tail)]
    if window is None:
        return columns

    own_depths = range(len(group.tokens)) if group.depths is None else group.depths
    positions = [*range(group.prefix), *(group.prefix + depth for depth in (*group.offset_depths, *own_depths))]
    own = positions[group.prefix + group.offset + row]
    return [column for column in columns if positions[column] > own - window]


def fill_cache(cache: SlotCache, rows: PackedRows, generator: torch.Generator) -> None:
    """Random values where rows look; large but finite ones in columns that a kernel reads and no row of the slot sees;
    NaN in everything that must never be read."""
    for storage in (cache.keys, cache.values):
        by_slot = storage.view(storage.shape[0], storage.shape[1], cache.num_slots, cache.num_columns, -1)
        by_slot.fill_(math.nan)
        inside = by_slot[:, :, rows.first_slot : rows.last_slot + 1, : rows.length]
        inside.fill_(1e3)
        for group in rows.groups:
            used = by_slot[:, :, group.slot, : group.num_columns]
            used.copy_(torch.randn(used.shape, generator=generator))


def reference_attention(query: torch.Tensor, cache: SlotCache, case: AttentionCase) -> torch.Tensor:
    """One row at a time in float64 on the CPU, over the gathered visible columns: [R, Hq, D]."""
    keys, values = (
        storage[0].view(case.num_kv_heads, cache.num_slots, cache.num_columns, -1).cpu().double()
        for storage in (cache.keys, cache.values)
    )
    by_head = query.cpu().double().unflatten(0, (case.num_kv_heads, -1))  # [K, Hq/K, R, D]
    outputs: list[torch.Tensor] = []
    for group in case.groups:
        for row in range(len(group.tokens)):
            columns = visible_columns(group, row, case.window)
            scores = torch.einsum("kgd,ksd->kgs", by_head[:, :, len(outputs)], keys[:, group.slot, columns])
            scores = scores / math.sqrt(case.head_size)
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            outputs.append(torch.softmax(scores, dim=-1) @ values[:, group.slot, columns])
    return torch.stack(outputs).flatten(1, 2)


def attention_error(case: AttentionCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> float:
    """Norm of attend's difference from the reference, over the reference's norm; NaN if anything unseen leaked in."""
    cache = SlotCache(
        num_layers=1,
        num_heads=case.num_kv_heads,
        key_size=case.head_size,
        value_size=case.head_size,
        num_slots=6,
        num_columns=640,
        dtype=dtype,
        device=device,
    )
    rows = PackedRows(case.groups, cache)
    fill_cache(cache, rows, generator)
    query = 2 * torch.randn(case.num_heads, rows.num_rows, case.head_size, generator=generator)
    query = query.to(device, dtype)
    expected = reference_attention(query, cache, case)
    # An allocator hands freed memory out again, so an output that is not written everywhere shows as NaN.
    poison = [torch.full_like(query, math.nan) for _ in range(4)]
    del poison
    output = attention.attend(query, 0, rows, sliding_window=case.window, softcap=case.softcap)
    error = torch.linalg.vector_norm(output.cpu().double() - expected) / torch.linalg.vector_norm(expected)
    return float(error)


def check_attention(session: Session) -> None:
    for (dtype, softcapped), tolerance in ATTENTION_TOLERANCE.items():
        generator = torch.Generator().manual_seed(0)
        errors: dict[AttentionCase, float] = {}
        for case in attention_cases(session.sizes):
            if (case.softcap is not None) != softcapped:
                continue
            if session.is_late("attention"):
                session.skip("attention", f"out of time after {len(errors)} cases in {dtype_name(dtype)}")
                break
            errors[case] = attention_error(case, dtype, session.device, generator)
        worst = max(errors, key=lambda case: math.inf if math.isnan(errors[case]) else errors[case], default=None)
        if worst is None:
            continue
        passed = all(error <= tolerance for error in errors.values())
        detail = f"{len(errors)} ragged cases, largest relative error {errors[worst]:.1e} (tolerance {tolerance:.0e})"
        name = f"attention, {dtype_name(dtype)}{', softcapped' if softcapped else ''}"
        session.check(name, passed, detail if passed else f"{detail}; worst: {worst.describe()}")


# Tokens.


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of drafting; `make` takes the plain answers, which only scripts look at."""

    name: str
    make: Callable[[Mapping[tuple[int, ...], tuple[int, ...]]], Drafter | None]
    tree: TreeSettings = field(default_factory=lambda: TreeSettings(max_nodes=16, max_depth=8, adaptive=False))
    must_accept: bool = False


def token_methods(target: TargetModel) -> list[Method]:
    return [
        Method(name="plain", make=lambda answers: None),
        Method(name="n-gram", make=lambda answers: NgramDrafter()),
        Method(
            name="random head, chain of 4", make=lambda answers: random_head(target, seed=1), tree=TreeSettings.chain(4)
        ),
        Method(
            name="random head, tree of 16",
            make=lambda answers: random_head(target, seed=2),
            tree=TreeSettings(max_nodes=16, max_depth=4, branch=4, beam=4, adaptive=False),
        ),
        Method(
            name="random head, tree of 32",
            make=lambda answers: random_head(target, seed=3),
            tree=TreeSettings(max_nodes=32, max_depth=5, branch=6, beam=6, adaptive=False),
        ),
        Method(
            name="scripted tree, half right",
            make=lambda answers: ScriptedDrafter(half_right(answers, target.vocab_size)),
            must_accept=True,
        ),
    ]


def random_head(target: TargetModel, *, seed: int) -> HeadDrafter:
    """An EAGLE-3 head with random weights: its trees are real, what they propose is not."""
    draft_size = min(8192, target.vocab_size)
    config = Eagle3Config.for_target(target.config, draft_vocab_size=draft_size, vocab_size=target.vocab_size)
    vocabulary = DraftVocabulary(target_ids=torch.arange(draft_size), vocab_size=target.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, vocabulary)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]), generator=generator)
    head = head.to(device=target.device, dtype=target.dtype)
    return HeadDrafter(head.bind(target.weights))


def half_right(answers: Mapping[tuple[int, ...], tuple[int, ...]], vocab_size: int) -> Script:
    """Trees that hold the right continuation down to a random depth, among wrong siblings that have children too."""
    generator = np.random.default_rng(0)

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        right = answers[request.prompt_ids][len(request.output_ids) :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in right[: min(int(generator.integers(0, 5)), limit.max_depth, limit.max_nodes // 4)]:
            level = [(token + shift) % vocab_size for shift in generator.permutation(3).tolist()]
            first = len(tokens)
            tokens += [*level, token]
            parents += [*[parent] * 3, first + (level.index(token) + 1) % 3]  # the last is below a wrong sibling
            parent = first + level.index(token)
        return DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot())

    return script


def check_tokens(session: Session, dtype: str) -> None:
    """Every method at every temperature, alone and together, against one-token decoding of the same requests."""
    target = session.target(dtype)
    prompts = session.prompts(target)
    plain: dict[float, list[tuple[int, ...]]] = {}
    for temperature in session.sizes.temperatures:
        plain[temperature] = _token_ids(
            Engine(target, max_requests=1), prompts, _params(prompts, temperature, session.sizes.max_tokens)
        )
    for method in token_methods(target):
        if session.is_late(dtype):
            session.skip(f"tokens, {dtype}", f"out of time before {method.name}")
            continue
        _check_method(session, target, method, prompts, plain)


def _check_method(
    session: Session,
    target: TargetModel,
    method: Method,
    prompts: Sequence[list[int]],
    plain: Mapping[float, Sequence[tuple[int, ...]]],
) -> None:
    num_identical = num_answers = 0
    differences: list[FirstDifference] = []
    lengths: list[int] = []
    for temperature, answers in plain.items():
        params = _params(prompts, temperature, session.sizes.max_tokens)
        by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        for num_requests, num_prompts in ((1, session.sizes.num_single_prompts), (8, len(prompts))):
            engine = Engine(target, method.make(by_prompt), max_requests=num_requests, tree=method.tree)
            completions = engine.generate(prompts[:num_prompts], params[:num_prompts])
            for completion, answer, one in zip(completions, answers, params, strict=False):
                num_answers += 1
                num_identical += completion.token_ids == answer
                lengths.extend(completion.accepted_lengths[1:])
                if completion.token_ids != answer:
                    differences.append(
                        FirstDifference.find(
                            target, completion.prompt_token_ids, one, expected=answer, got=completion.token_ids
                        )
                    )
    passed = all(difference.is_tie(target.dtype) for difference in differences)
    detail = f"{num_identical}/{num_answers} answers identical, {statistics.fmean(lengths):.2f} tokens a round"
    if differences:
        margins = sorted(math.inf if each.margin is None else each.margin for each in differences)
        detail += f"; largest margins at first differences {', '.join(f'{margin:.1e}' for margin in margins[-5:])}"
    # Only in float32: the script follows plain decoding's answer, which other roundings may leave early.
    if method.must_accept and target.dtype == torch.float32 and statistics.fmean(lengths) < 1.5:
        passed, detail = False, f"{detail}; too few tokens were accepted for this to prove anything"
    session.check(f"tokens, {dtype_name(target.dtype)}, {method.name}", passed, detail)


def check_bitwise(session: Session) -> None:
    """In forwards of one shape bfloat16 tokens are plain decoding's to the bit, alone and together."""
    target = session.target("bfloat16")
    prompts = session.prompts(target)
    num_identical = num_answers = 0
    for temperature in session.sizes.temperatures:
        params = _params(prompts, temperature, session.sizes.max_tokens)
        answers = _token_ids(Engine(target, exactness="bitwise", max_requests=8), prompts, params)
        by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        for num_requests, num_prompts in ((1, session.sizes.num_single_prompts), (8, len(prompts))):
            drafter = ScriptedDrafter(half_right(by_prompt, target.vocab_size))
            engine = Engine(target, drafter, exactness="bitwise", max_requests=num_requests)
            found = _token_ids(engine, prompts[:num_prompts], params[:num_prompts])
            num_answers += num_prompts
            num_identical += sum(one == other for one, other in zip(found, answers, strict=False))
    session.check(
        "tokens, bfloat16, bitwise mode",
        num_identical == num_answers,
        f"{num_identical}/{num_answers} answers identical to the bit",
    )


def check_placement(session: Session) -> None:
    """A target spread over device, CPU memory and disk is the whole one; quantised ones decode exactly what they say
    themselves, and their states are near the whole one's."""
    if session.random_target:
        raise CannotRun("needs a target on disk, not a random one")
    whole = session.target("float32")
    prompts = session.prompts(whole)[: session.sizes.num_single_prompts]
    expected = torch.cat([one.last for one in whole.features(prompts, [])])
    texts = _token_ids(Engine(whole), prompts, _params(prompts, 0.0, session.sizes.max_tokens))
    fingerprint, places = whole.fingerprint, spread_map(whole, session.device)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, dict[str, Any]] = {
            "spread by a map": {"device_map": places, "offload_folder": folder},
            "int8": {"quantization": "int8", "device": str(session.device)},
            "int4": {"quantization": "int4", "device": str(session.device)},
        }
        for name, how in settings.items():
            try:
                target = TargetModel.load(session.target_path, dtype="float32", **how)
            except ValueError as error:
                session.skip(f"placement, {name}", _first_line(error))
                continue
            _check_placed(session, target, name, prompts, expected)
            if "device_map" in how:
                found = _token_ids(Engine(target), prompts, _params(prompts, 0.0, session.sizes.max_tokens))
                same = sum(one == other for one, other in zip(found, texts, strict=True))
                session.check(f"{name}: the whole target's tokens", same == len(texts), f"{same}/{len(texts)} answers")
                session.check(f"{name}: its fingerprint", target.fingerprint == fingerprint, target.fingerprint)


def _check_placed(
    session: Session, target: TargetModel, name: str, prompts: Sequence[Sequence[int]], expected: torch.Tensor
) -> None:
    states = torch.cat([one.last for one in target.features(prompts, [])]).to(expected.device)
    error = float((states - expected).norm() / expected.norm())
    session.check(f"{name}: states", error < PLACED_TOLERANCE[name], f"relative error {error:.2g}")
    params = _params(prompts, 0.0, session.sizes.max_tokens)
    plain = _token_ids(Engine(target), prompts, params)
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    drafted = _token_ids(Engine(target, ScriptedDrafter(half_right(by_prompt, target.vocab_size))), prompts, params)
    same = sum(one == other for one, other in zip(drafted, plain, strict=True))
    # Products of quantised weights are rounded as those of half precision are, so near ties may fall otherwise.
    least = len(plain) if name not in ("int8", "int4") else 1
    session.check(f"{name}: drafted as plain", same >= least, f"{same}/{len(plain)} answers identical")


def spread_map(target: TargetModel, device: torch.device) -> dict[str, str]:
    """A third of the layers on `device`, with all that is not a layer; a third in CPU memory; the rest on disk."""
    prefix = target.model.base_model_prefix
    stack = next(name for name, child in target.decoder.named_children() if isinstance(child, torch.nn.ModuleList))
    others = [f"{prefix}.{name}" for name, _ in target.decoder.named_children() if name != stack]
    ends = [name for name, _ in target.model.named_children() if name != prefix]
    thirds = [(str(device), "cpu", "disk")[3 * index // target.num_layers] for index in range(target.num_layers)]
    layers = {f"{prefix}.{stack}.{index}": place for index, place in enumerate(thirds)}
    return {**dict.fromkeys([*others, *ends], str(device)), **layers}


def _params(prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=100 + index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(len(prompts))
    ]


def _token_ids(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


# Speed.


def measure_speed(session: Session) -> None:
    target = session.target("bfloat16")
    floor = session.floor_ms(target.num_weight_bytes)
    session.machine["target_weight_mb"] = round(target.num_weight_bytes / 1e6, 1)
    cost = measure_forwards(session, target, floor)
    measure_rounds(session, target, floor)
    measure_decoding(session, target, floor, cost)


def measure_forwards(session: Session, target: TargetModel, floor: float | None) -> CostModel:
    """The bare forward of one request, by width."""
    widths = (1, 8, 16, 32)
    times = []
    for width in widths:
        step = forward_step(target, num_requests=1, width=width, context=session.sizes.context)
        times.append(median_ms(step, session.device, repeats=session.sizes.repeats))
        busy = busy_ms(step, session.device)
        detail = "" if busy is None else f"device busy for {busy:.2f} ms"
        session.time(f"target forward, {width} rows", times[-1], "ms", floor=floor, detail=detail)
    rising = [max(times[: index + 1]) for index in range(len(times))]  # a dip is noise
    return CostModel(widths=widths, milliseconds=tuple(rising))


def forward_step(target: TargetModel, *, num_requests: int, width: int, context: int) -> Callable[[], object]:
    """A forward of `width` new rows of each of some requests behind `context` tokens, over a random cache."""
    cache = target.new_cache(num_slots=num_requests, num_columns=context + width)
    generator = torch.Generator(device=target.device).manual_seed(0)
    for storage in (cache.keys, cache.values):
        storage.normal_(generator=generator)
    groups = [RowGroup(slot=slot, prefix=context, tokens=[7] * width) for slot in range(num_requests)]
    return lambda: target.forward(groups, cache)


def measure_rounds(session: Session, target: TargetModel, floor: float | None) -> None:
    """Whole rounds of the engine: forward, verification and commit, with drafts that are always wrong."""
    drafts: dict[str, tuple[Drafter | None, TreeSettings]] = {"plain step": (None, TreeSettings(adaptive=False))}
    for num_nodes in (16, 32):
        tree = TreeSettings(max_nodes=num_nodes, max_depth=4, branch=4, beam=num_nodes // 4, adaptive=False)
        drafts[f"round, {num_nodes} nodes"] = (ScriptedDrafter(wrong_tree(num_nodes)), tree)
        drafts[f"round, {num_nodes} nodes, with a draft head"] = (random_head(target, seed=num_nodes), tree)
    prompts = session.prompts(target)
    prompts = (prompts * 8)[:8]
    for num_requests in (1, 8):
        params = _params(prompts[:num_requests], 0.0, session.sizes.speed_tokens // 3)
        for name, (drafter, tree) in drafts.items():
            if session.is_late("speed"):
                session.skip("speed", f"out of time before {name}")
                continue
            engine = Engine(target, drafter, max_requests=num_requests, tree=tree)
            milliseconds = round_ms(engine, prompts[:num_requests], params, session.device)
            session.time(f"{name}, {_requests(num_requests)}", milliseconds, "ms", floor=floor)


def wrong_tree(num_nodes: int) -> Script:
    """Chains of four below the root. Token 0 is what no answer here consists of; if it were, rounds would be fewer."""
    parents = tuple(ROOT if node % 4 == 0 else node - 1 for node in range(num_nodes))

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        if limit.max_depth < 4:
            return DraftTree.empty()
        return DraftTree(tokens=(0,) * num_nodes, parents=parents, kind=OneHot())

    return script


def round_ms(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], device: torch.device
) -> float:
    """Median milliseconds of a round, over the rounds in which every request still runs; prefill not counted."""
    engine.generate(prompts, params)  # room is made and kernels are loaded
    requests = engine.submit(prompts, params)
    engine.step()
    times = []
    while all(request.finish_reason is None for request in requests):
        synchronize(device)
        start = time.perf_counter()
        engine.step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    engine.abort()
    return 1e3 * statistics.median(times[:-4] or times)  # the last rounds have no room for a whole tree


def measure_decoding(session: Session, target: TargetModel, floor: float | None, cost: CostModel) -> None:
    """Tokens a second over whole answers, prefill included."""
    prompts = (session.prompts(target) * 8)[:8]
    params = _params(prompts, 0.0, session.sizes.speed_tokens)
    answers = dict(zip(map(tuple, prompts), _token_ids(Engine(target, max_requests=1), prompts, params), strict=True))

    def perfect(request: Request, limit: DraftLimit) -> DraftTree:
        start = len(request.output_ids)
        return DraftTree.chain(answers[request.prompt_ids][start : start + min(4, limit.max_depth)])

    methods: dict[str, tuple[Drafter | None, TreeSettings]] = {
        "plain decoding": (None, TreeSettings(adaptive=False)),
        "n-gram drafts": (NgramDrafter(), TreeSettings(max_nodes=16)),
        "UPPER BOUND: perfect drafts of depth 4": (ScriptedDrafter(perfect), TreeSettings.chain(4)),
    }
    for num_requests in (1, 8):
        limit = None if floor is None else 1e3 * num_requests / floor
        for name, (drafter, tree) in methods.items():
            if session.is_late("speed"):
                session.skip("speed", f"out of time before {name}")
                continue
            engine = Engine(target, drafter, max_requests=num_requests, tree=tree, cost=cost)
            rate, accepted = decoding_rate(engine, prompts[:num_requests], params[:num_requests], session.device)
            detail = f"{accepted:.2f} tokens a round; the floor takes one"
            session.time(f"{name}, {_requests(num_requests)}", rate, "tokens/s", floor=limit, detail=detail)


def decoding_rate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], device: torch.device
) -> tuple[float, float]:
    """(median tokens a second of three runs after one untimed, tokens a round)."""
    engine.generate(prompts, params)
    rates = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        completions = engine.generate(prompts, params)
        synchronize(device)
        rates.append(sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - start))
    lengths = [length for completion in completions for length in completion.accepted_lengths[1:]]
    return statistics.median(rates), statistics.fmean(lengths)


# Layers of an 8B model.


def measure_layers(session: Session) -> None:
    """Step times of random layers by width and context, beside the time to read weights, keys and values once."""
    sizes = dict(session.sizes.layers)
    longest = max(session.sizes.layer_contexts) + max(session.sizes.layer_widths)
    session.drop_targets()
    sizes["num_hidden_layers"] = _layers_that_fit(sizes, longest, session.device)
    model = random_llama(sizes, dtype=torch.bfloat16, device=session.device, scale=0.5)
    target = TargetModel.wrap(model, name="random 8B-shaped layers")
    label = f"{sizes['num_hidden_layers']} layers of hidden {sizes['hidden_size']}"
    session.machine["layers_weight_gb"] = round(target.num_weight_bytes / 1e9, 2)
    for context in session.sizes.layer_contexts:
        kv_bytes = target.new_cache(num_slots=1, num_columns=context).num_bytes
        floor = session.floor_ms(target.num_weight_bytes + kv_bytes)
        for width in session.sizes.layer_widths:
            name = f"{label}, {width} rows at context {context}"
            if session.is_late("layers"):
                session.skip("layers", f"out of time before {name}")
                continue
            step = forward_step(target, num_requests=1, width=width, context=context)
            milliseconds = median_ms(step, session.device, repeats=session.sizes.repeats)
            busy = busy_ms(step, session.device)
            detail = "" if busy is None else f"device busy for {busy:.2f} ms"
            session.time(name, milliseconds, "ms", floor=floor, detail=detail)


def _layers_that_fit(sizes: Mapping[str, int], num_columns: int, device: torch.device) -> int:
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


# The whole.


def run_parts(session: Session, parts: Sequence[str]) -> None:
    actions: dict[str, Callable[[Session], None]] = {
        "bandwidth": measure_bandwidth,
        "attention": check_attention,
        "float32": lambda session: check_tokens(session, "float32"),
        "bfloat16": lambda session: check_tokens(session, "bfloat16"),
        "bitwise": check_bitwise,
        "placement": check_placement,
        "speed": measure_speed,
        "layers": measure_layers,
    }
    for part in PARTS:
        if part not in parts:
            continue
        print(f"{part} ({time.perf_counter() - session.started:.0f} s)", file=sys.stderr, flush=True)
        if session.is_late(part):
            session.skip(part, "out of time")
            continue
        try:
            actions[part](session)
        except (CannotRun, torch.OutOfMemoryError) as error:
            session.skip(part, _first_line(error))
        except Exception as error:  # whatever broke one part, the others are worth their minutes
            traceback.print_exc()
            session.check(f"{part} runs", False, f"{type(error).__name__}: {_first_line(error)}")


def table(session: Session) -> str:
    """Checks, then times, then what did not run."""
    width = max((len(each.name) for each in session.checks), default=0)
    lines = [f"{'pass' if each.passed else 'FAIL'}  {each.name:{width}}  {each.detail}" for each in session.checks]
    lines += ["", f"{'value':>9} {'unit':8} {'floor':>8} {'ratio':>6}  measured"]
    for timing in session.timings:
        floor = "" if timing.floor is None else f"{timing.floor:.4g}"
        ratio = "" if not timing.floor else f"{timing.value / timing.floor:.3g}"
        detail = f"  ({timing.detail})" if timing.detail else ""
        lines.append(f"{timing.value:9.4g} {timing.unit:8} {floor:>8} {ratio:>6}  {timing.name}{detail}")
    if session.skipped:
        lines += ["", "not run", *(f"  {each.part}: {each.reason}" for each in session.skipped)]
    return "\n".join(lines)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _requests(number: int) -> str:
    return f"{number} request{'s' if number > 1 else ''}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--target", type=Path, default=Path("models/smollm2-135m"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1 or cpu")
    parser.add_argument("--reduced", action="store_true", help="tiny sizes and a random target: tests this script")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="start nothing new after this (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the report here too")
    parsed = parser.parse_args(arguments)
    if torch.device(parsed.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {parsed.device}: torch {torch.__version__} sees no GPU; use --device cpu")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: its checks are about exactness
    has_target = (options.target / "config.json").is_file()
    session = Session(
        device=device,
        sizes=Sizes.reduced() if options.reduced else Sizes(),
        target_path=options.target,
        random_target=options.reduced or not has_target,
        started=time.perf_counter(),
        seconds=60 * options.minutes,
        machine=describe_machine(device),
    )
    if not has_target and not options.reduced:
        session.skip("real target", f"no model in {options.target}: a random Llama of its shape stands in")
    run_parts(session, options.only)
    session.machine["seconds"] = round(time.perf_counter() - session.started, 1)
    print("\n".join(f"{name}: {value}" for name, value in session.machine.items()))
    print()
    print(table(session))
    if options.json is not None:
        report = {
            "machine": session.machine,
            "checks": [asdict(each) for each in session.checks],
            "timings": [asdict(each) for each in session.timings],
            "skipped": [asdict(each) for each in session.skipped],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.passed for each in session.checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
