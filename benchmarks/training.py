"""Training speed and memory beside their floors: tokens a second of cached and online training, and what is lost where.

    python benchmarks/training.py smollm2-135m-eagle3-demo
    python benchmarks/training.py smollm2-135m-eagle3 optim.batch_size=4 --steps 1 4 --rows 48

The floor of a step is the arithmetic that no implementation can leave out, at the rate at which this machine multiplies
matrices of the recipe's own sizes in its own dtype: forward and backward of the head, its LM head (logits and two
gradients), the target's logits over the draft vocabulary once for each place in the text; online, the target's forward
and, where its law over the whole vocabulary is taught, its whole LM head at the places before labels. Attention counts
every query with the whole of its sequence. The optimiser, norms, softmaxes and copies count nothing: they are what is
lost. Attention and loss are timed by themselves, on the very tensors of a step; `layers` is what remains of head and
objective: the layers' products, and with them norms, casts, embeddings and the bookkeeping of gradients.

Rows are visited one after another and each only once a pass, as in training: what the first visit of a length costs is
in. Times are medians of whole passes over the rows; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))

import heads.unroll
import train.unroll
from configs.loading import load_config
from configs.schema import RunConfig
from heads.transfer import sent
from heads.unroll import Batch
from infer.chat import Rendered
from infer.machine import dtype_name, machine_facts
from infer.target import TargetModel
from train.batch import pack_batch
from train.corpus.dataset import TrainingData, load_data
from train.features import CachedFeatures, FeatureSource, OnlineFeatures, RowFeatures, make_features
from train.losses import fused_unrolled_loss
from train.memory import keep_freed_memory
from train.setup import compute_dtype, load_model, make_head
from train.step import Objective, StepPlan, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World

MEGABYTE = 1e6
PARTS = ("features", "packing", "layers", "attention", "loss", "optimiser")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """What a pass over the rows cannot do without, by part."""

    target: float
    normalizer: float
    layers: float
    attention: float
    teacher: float
    loss: float

    @property
    def cached(self) -> float:
        return self.layers + self.attention + self.teacher + self.loss

    @property
    def online(self) -> float:
        return self.cached + self.target + self.normalizer


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table: one pass over the rows. seconds: by part; floors: the least of each, where there is one."""

    name: str
    num_steps: int
    num_tokens: int
    num_updates: int
    seconds: dict[str, float]
    floors: dict[str, float]
    peak_megabytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total

    @property
    def share_of_floor(self) -> float:
        return sum(self.floors.values()) / self.total


class Bench:
    """A recipe's parts, and the rows that are trained on."""

    def __init__(self, config: RunConfig, target: TargetModel, data: TrainingData, *, num_rows: int) -> None:
        self.config, self.target = config, target
        size = config.optim.batch_size * config.optim.accumulation
        self.rows = data.rows[: max(size, num_rows // size * size)]
        self.dtype = compute_dtype(config, target)
        self.head = make_head(config, target, data).to(target.device).bind(target.weights).train()
        lm_head = target.lm_head_weight.index_select(0, self.head.target_ids)
        self.teacher = Teacher(weight=lm_head.to(self.dtype))
        self.objective = Objective(self.head, self.teacher, config.train)
        self.updater = LocalUpdater(self.objective, [list(self.head.parameters())], config.optim, World())
        self.rate = self.target_rate = 0.0
        self.measure_rates()

    def measure_rates(self) -> None:
        """FLOP a second of products of the head's and of the target's sizes: the best seen so far, since others may
        be at work."""
        hidden, wide = self.head.config.hidden_size, len(self.teacher.weight)
        self.rate = max(self.rate, matmul_rate(self.dtype, self.target.device, inner=hidden, wide=wide))
        hidden = self.target.hidden_size
        found = matmul_rate(self.target.dtype, self.target.device, inner=hidden, wide=2 * hidden)
        self.target_rate = max(self.target_rate, found)

    def plans(self, num_steps: int) -> Iterator[StepPlan]:
        size = self.config.optim.batch_size * self.config.optim.accumulation
        for first in range(0, len(self.rows), size):
            visits = list(enumerate(self.rows[first : first + size], start=first))
            yield plan_step(visits, num_steps=num_steps, settings=self.config.train)

    def batches(
        self, num_steps: int, get: Callable[[Sequence[Rendered]], Sequence[RowFeatures]]
    ) -> list[dict[str, Any]]:
        """The arguments of each pass of the objective."""
        made = []
        for plan in self.plans(num_steps):
            weights = plan.label_weights(self.config.train)
            for part in plan.passes(World(), self.config.optim.batch_size):
                batch = pack_batch(part.rows, get(part.rows), device=self.target.device, dtype=self.dtype)
                made.append(as_arguments(part, batch, weights))
        return made

    # Time

    def train(self, source: FeatureSource, num_steps: int) -> dict[str, float]:
        """One pass over the rows, as the trainer makes it; seconds by part."""
        seconds = {"features": 0.0, "packing": 0.0, "head": 0.0, "optimiser": 0.0}
        watch = Watch(seconds, self.target.device)
        for plan in self.plans(num_steps):
            weights = plan.label_weights(self.config.train)
            for part in plan.passes(World(), self.config.optim.batch_size):
                with watch("features"):
                    features = source.get_many(part.rows)
                with watch("packing"):
                    batch = pack_batch(part.rows, features, device=self.target.device, dtype=self.dtype)
                    arguments = as_arguments(part, batch, weights)
                with watch("head"):
                    with self.autocast():
                        loss, _ = self.updater.loss(**arguments)
                    self.updater.backward(loss, is_last=True)
            with watch("optimiser"):
                self.updater.update([self.config.optim.lr * 1e-3])
        return seconds

    def parts_of_head(self, num_steps: int, cached: FeatureSource) -> dict[str, float]:
        """Attention and loss by themselves, on the tensors of each pass."""
        seconds = {"attention": 0.0, "loss": 0.0}
        watch = Watch(seconds, self.target.device)
        for arguments in self.batches(num_steps, cached.get_many):
            asked, losses = self._calls(arguments)
            for inputs, options in asked:
                leaves = [leaf(one) for one in inputs]
                with watch("attention"), self.autocast():
                    attended = heads.unroll.attend_sequence(*leaves, **options)
                    attended.backward(torch.ones_like(attended))
            for inputs, options in losses:
                name, depths, teacher = inputs
                states = [replace(one, states=leaf(one.states)) for one in depths]
                with watch("loss"), self.autocast():
                    fused_unrolled_loss(name, states, teacher, **options)[0].backward()
            self.objective.zero_grad(set_to_none=True)
        return seconds

    def _calls(self, arguments: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """What attention and loss are called with in a forward pass."""
        with (
            Recording(heads.unroll, "attend_sequence") as asked,
            Recording(train.unroll, "fused_unrolled_loss") as losses,
            self.autocast(),
        ):
            self.objective(**arguments)
        return asked.calls, losses.calls

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    # Arithmetic

    def flops(self, num_steps: int, features: FeatureSource) -> Flops:
        """Counted where they are done, or by formula: the products of the loss, without rounded-up rows."""
        layers = attention = teacher = loss = normalizer = 0.0
        with mock.patch.multiple(heads.unroll, QUERY_MULTIPLE=1, CONTEXT_MULTIPLE=1):
            for arguments in self.batches(num_steps, features.get_many):
                batch, plan = arguments["batch"], [rows for rows in arguments["plan"] if len(rows)]
                both, own = self._head_flops(batch, plan)
                attention += own
                layers += both - own
                places = len(torch.cat([rows + 1 + step for step, rows in enumerate(plan)]).unique())
                size = 2 * len(self.teacher.weight) * self.target.hidden_size
                teacher += size * places
                loss += sum(self._loss_flops(step, rows) for step, rows in enumerate(plan))
                if self.config.train.teacher == "full":
                    normalizer += 2 * self.target.lm_head_weight.numel() * int(batch.loss_mask[1:].sum())
        with self.target.stock() as model, torch.no_grad(), FlopCounterMode(display=False) as counter:
            for row in self.rows:  # by torch's own operations, which are the ones that can be counted
                model.base_model(torch.tensor([row.token_ids], device=self.target.device), use_cache=False)
        return Flops(
            target=counter.get_total_flops(),
            normalizer=normalizer,
            layers=layers,
            attention=attention,
            teacher=teacher,
            loss=loss,
        )

    def _head_flops(self, batch: Batch, plan: Sequence[torch.Tensor]) -> tuple[float, float]:
        """(all of the layers forward and backward, attention alone)"""
        plan = [sent(rows, self.target.device) for rows in plan]
        with Recording(heads.unroll, "attend_sequence") as asked, FlopCounterMode(display=False) as counter:
            with self.autocast():
                states = [step.states for step in self.head.unroll(batch, plan)]
            torch.cat([one.flatten() for one in states]).sum().backward()
        self.head.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False) as own:
            for inputs, options in asked.calls:
                with self.autocast():
                    heads.unroll.attend_sequence(*(leaf(one) for one in inputs), **options).sum().backward()
        return counter.get_total_flops(), own.get_total_flops()

    def _loss_flops(self, step: int, rows: torch.Tensor) -> float:
        width = self.teacher.weight.new_zeros(1, self.head.config.hidden_size)
        with torch.no_grad():
            weight = self.head.outputs(width.float(), step)[1]
        products = 3 if weight.requires_grad or isinstance(weight, torch.nn.Parameter) else 2
        return products * 2.0 * len(rows) * weight.numel()


class Watch:
    """Adds up seconds by part. A GPU is waited for at both ends."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self._seconds, self._device = seconds, device

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        wait_for(self._device)
        start = time.perf_counter()
        yield
        wait_for(self._device)
        self._seconds[part] += time.perf_counter() - start


class Recording:
    """Within, calls of a module's function are kept: their arguments, and that they were made."""

    def __init__(self, module: Any, name: str) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        function = getattr(module, name)

        def recorded(*inputs: Any, **options: Any) -> Any:
            self.calls.append((inputs, options))
            return function(*inputs, **options)

        self._patch = mock.patch.object(module, name, recorded)

    def __enter__(self) -> Recording:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def leaf(value: Any) -> Any:
    """A tensor apart from the graph it was made in, with a gradient of its own if it can have one."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(dtype: torch.dtype, device: torch.device, *, inner: int, wide: int, rows: int = 512) -> float:
    """FLOP a second of the product of `rows` states with an LM head: the best of many."""
    states = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(wide, inner, device=device).to(dtype)
    best = float("inf")
    for _ in range(30):
        wait_for(device)
        start = time.perf_counter()
        states @ weight.T
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * rows * inner * wide / best


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], float]]:
    """Within, memory's peak counts from anew; -> a function that says it in MB: of the GPU, or of this process."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) / MEGABYTE
    elif reset.exists():
        reset.write_text("5")
        yield lambda: next(
            int(line.split()[1]) * 1024 / MEGABYTE
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    else:
        yield lambda: float("nan")


def measure(
    bench: Bench, num_steps: int, sources: dict[str, FeatureSource], *, repeats: int
) -> list[Callable[[], Line]]:
    """What makes a line for each source of features, by the best rates seen when it is called; the passes of all are
    interleaved, after one that is not counted."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    peaks = dict.fromkeys(sources, 0.0)
    for repeat in range(repeats + 1):
        bench.measure_rates()
        for name, source in sources.items():
            with peak_memory(bench.target.device) as peak:
                seconds = bench.train(source, num_steps)
                peaks[name] = max(peaks[name], peak())
            if repeat:
                times[name].append(seconds)
    inside = [bench.parts_of_head(num_steps, sources["cached"]) for _ in range(repeats + 1)][1:]
    flops = bench.flops(num_steps, sources["cached"])
    return [partial(_line, bench, name, num_steps, times[name], inside, flops, peaks[name]) for name in sources]


def _line(
    bench: Bench,
    name: str,
    num_steps: int,
    times: Sequence[dict[str, float]],
    inside: Sequence[dict[str, float]],
    flops: Flops,
    peak: float,
) -> Line:
    middle = sorted(times, key=lambda one: sum(one.values()))[(len(times) - 1) // 2]
    own = {part: statistics.median(one[part] for one in inside) for part in ("attention", "loss")}
    rate = bench.rate
    floors = {
        "attention": flops.attention / rate,
        "loss": (flops.teacher + flops.loss) / rate,
        "layers": flops.layers / rate,
    }
    if name == "online":
        floors["features"] = (flops.target + flops.normalizer) / bench.target_rate
    layers = max(0.0, middle["head"] - own["attention"] - own["loss"])
    seconds = {
        "features": middle["features"],
        "packing": middle["packing"],
        **own,
        "layers": layers,
        "optimiser": middle["optimiser"],
    }
    return Line(
        name=name,
        num_steps=num_steps,
        num_tokens=sum(len(row.token_ids) for row in bench.rows),
        num_updates=sum(1 for _ in bench.plans(1)),
        seconds=seconds,
        floors=floors,
        peak_megabytes=peak,
    )


def describe(bench: Bench, lines: Sequence[Line]) -> str:
    """The tables: one line a measurement, then milliseconds a step by part, each with its floor."""
    facts, device = machine_facts(), bench.target.device
    place = (
        facts["gpu"]
        if device.type == "cuda"
        else f"{facts['cpu']}, {facts['threads']} threads, load {facts['load']:.1f}"
    )
    num_tokens = sum(len(row.token_ids) for row in bench.rows)
    text = [
        f"{bench.config.name} on {bench.target.name}: {len(bench.rows)} conversations, {num_tokens:,} tokens, "
        f"{bench.config.optim.batch_size} x {bench.config.optim.accumulation} a step, draft vocabulary "
        f"{len(bench.teacher.weight):,}, teacher {bench.config.train.teacher}",
        f"{place}, torch {facts['torch']}; products of the head's sizes at {bench.rate / 1e9:,.0f} GFLOP/s in "
        f"{dtype_name(bench.dtype)}, of the target's at {bench.target_rate / 1e9:,.0f} in "
        f"{dtype_name(bench.target.dtype)}",
        "",
        f"{'features':<9} {'steps':>5} {'tokens/s':>9} {'at floor':>9} {'% of it':>8} {'ms/step':>8} {'peak MB':>8}",
    ]
    for line in lines:
        at_floor, milliseconds = line.num_tokens / sum(line.floors.values()), 1e3 * line.total / line.num_updates
        text.append(
            f"{line.name:<9} {line.num_steps:>5} {line.tokens_per_second:>9,.0f} {at_floor:>9,.0f} "
            f"{100 * line.share_of_floor:>8.0f} {milliseconds:>8.1f} {line.peak_megabytes:>8,.0f}"
        )
    text += ["", "ms a step (floor)    " + "".join(f"{part:>18}" for part in PARTS)]
    for line in lines:
        cells = []
        for part in PARTS:
            each = 1e3 / line.num_updates
            floor_text = f" ({line.floors[part] * each:.1f})" if part in line.floors else ""
            cells.append(f"{f'{line.seconds[part] * each:.1f}{floor_text}':>18}")
        text.append(f"{line.name:<9} {line.num_steps:>5}      " + "".join(cells))
    text += ["", "lost in: " + "; ".join(_losses(line) for line in lines)]
    return "\n".join(text)


def _losses(line: Line) -> str:
    """Where the time beyond the floor goes, the largest part first."""
    lost = {part: line.seconds[part] - line.floors.get(part, 0.0) for part in PARTS}
    parts = [
        f"{part} {100 * value / line.total:.0f} %" for part, value in sorted(lost.items(), key=lambda one: -one[1])
    ]
    return f"{line.name}, {line.num_steps} steps: {', '.join(parts[:4])}"


def run(
    config: RunConfig,
    target: TargetModel,
    data: TrainingData,
    *,
    num_rows: int,
    steps: Sequence[int] | None = None,
    repeats: int = 3,
) -> tuple[Bench, list[Line]]:
    """Measure; `steps`: the numbers of unrolled steps (None: one, and the recipe's)."""
    bench = Bench(config, target, data, num_rows=num_rows)
    bound = bench.head.num_depths
    counts = [bound] if bound else sorted(set(steps or (1, config.train.ttt_steps)))
    taps, settings = bench.head.config.taps, config.train
    online = OnlineFeatures(
        target, taps, feature_dtype=settings.feature_dtype, with_normalizer=settings.teacher == "full"
    )
    lines: list[Callable[[], Line]] = []
    with tempfile.TemporaryDirectory() as folder:
        cached = make_features(
            config, target, taps=taps, folder=Path(folder), rows=bench.rows, notice=lambda message: None
        )
        assert isinstance(cached, CachedFeatures), "train.feature_cache must be on to time it"
        cached.get_many(bench.rows)
        cached.flush()
        for num_steps in counts:
            lines += measure(bench, num_steps, {"cached": cached, "online": online}, repeats=repeats)
    return bench, [line() for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a recipe's name or file")
    parser.add_argument("settings", nargs="*", help="changes, such as optim.batch_size=4")
    parser.add_argument("--rows", type=int, default=48, help="conversations (default: %(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", help="numbers of unrolled steps (default: 1 and the recipe's)")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the rows (default: %(default)s)")
    options = parser.parse_args()
    keep_freed_memory()
    config = load_config(options.config, options.settings)
    target = load_model(config, World())
    data = load_data(
        config.data,
        target.tokenizer,
        seed=config.train.seed,
        max_prompt_tokens=target.max_length - config.eval.max_tokens,
    )
    bench, lines = run(config, target, data, num_rows=options.rows, steps=options.steps, repeats=options.repeats)
    print(describe(bench, lines))


if __name__ == "__main__":
    main()
