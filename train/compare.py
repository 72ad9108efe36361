"""Several ways to draft for one target, on equal terms: trained under one budget on the same text, measured alike.

    RUNS/compare-NAME/RECIPE/        an ordinary run, which resumes
                      compare.json   what is finished: a comparison that was interrupted goes on from it
                      .features/     the target's states for the text, shared by all runs

What is equal. *Training*: the budget (minutes or optimiser steps), the seed, the rows and their order, and when and on
what the best checkpoint is chosen. The target's states are computed before the first run starts, once for the taps of
all of them, so that no run pays for what another one reuses: minutes count training steps, the reading of kept states
included, and neither their computation nor evaluations. *Measuring*: prompts, seeds and lengths; fixed trees for
acceptance, which then says nothing of this machine; one interleaved benchmark each, of the drafter alone with a tree
that adapts, for speed.

Whatever needs no training, or had it before, takes part as a drafter's HEAD (`infer.drafters.spec`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.loading import dump_config, load_config
from configs.schema import RunConfig, TeacherLaw
from heads.checkpoint import WEIGHTS_FILE, present_folder, read_card, recover_folder, staged_file
from infer.drafters import NO_DRAFT, load_drafter, parse_spec
from infer.drafters.spec import FOLDER
from infer.engine import Engine
from infer.evaluate import DEFINITION, EvalPrompt
from infer.machine import dtype_name, machine_facts
from infer.target import TargetModel
from train.corpus.dataset import TrainingData, load_data
from train.features import CachedFeatures, make_features
from train.features.filling import fill
from train.measures import (
    ANY_RULE,
    Cell,
    Measures,
    Shape,
    Speed,
    acceptance,
    can_verify,
    measuring_engine,
    sizes_of,
    speeds,
)
from train.setup import make_head
from train.trainer import train

STATE_FILE = "compare.json"
STATE_VERSION = 1
COUNTED = (
    "training minutes count optimiser steps alone: the target's states for the text were computed before, for all runs "
    "at once, and evaluations are not counted"
)

Notice = Callable[[str], None]

_SET_HERE = {
    "name": "each recipe keeps its own",
    "train.minutes": "--minutes",
    "train.steps": "--steps",
    "train.epochs": "--minutes or --steps",
    "train.patience": "every recipe uses the whole budget",
    "train.seed": "--seed",
}
# Settings that say where things are and what is kept, not what is trained.
_FREE = {"target", "tracking", "deepspeed", "data.train", "data.eval", "data.decontaminate", "eval.samples"} | {
    f"train.{key}"
    for key in ("feature_cache", "feature_cache_gb", "keep_checkpoints", "log_every", "save_every", "save_minutes")
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What each recipe may use, and the seed of all of them."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("the recipes need one budget: give --minutes or --steps")
        used = self.minutes if self.minutes is not None else self.steps
        if used is not None and not 0 < used < float("inf"):
            raise ValueError(f"the budget is {used:g}; it must be above 0")

    @property
    def name(self) -> str:
        return f"{self.minutes:g}min" if self.minutes is not None else f"{self.steps}steps"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of the comparison. head: the HEAD to measure (a recipe's is its run's best). config: what to train."""

    name: str
    head: str
    config: RunConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a head's training took. here: whether it was trained for this comparison. recomputed_rows: those whose
    states did not fit the cache, and were computed within the minutes at every visit."""

    here: bool
    status: str
    minutes: float
    steps: int
    token_visits: int
    epochs: float
    best_step: int | None = None
    recomputed_rows: int = 0


@dataclass(kw_only=True)
class Entry:
    """Everything known of a contender. skipped: rules that cannot verify its proposals. error: why it stopped short.
    fingerprint: of the head's weights when it was measured."""

    name: str
    head: str
    kind: str
    num_parameters: int | None = None
    draft_vocab_size: int | None = None
    training: Training | None = None
    cells: list[Cell] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: str | None = None
    fingerprint: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Entry:
        training = values["training"]
        return cls(
            **{
                **values,
                "training": None if training is None else Training(**training),
                "cells": [Cell(**{**one, "by_position": tuple(one["by_position"])}) for one in values["cells"]],
                "speeds": [Speed(**one) for one in values["speeds"]],
            }
        )

    @property
    def is_trained(self) -> bool:
        """Whether its training, if it needs one, has come to its end."""
        return self.training is not None and self.training.status != "interrupted"

    def cell(self, shape: Shape, rule: str, temperature: float) -> Cell | None:
        wanted = (shape, ANY_RULE if temperature == 0 else rule, temperature)
        return next((cell for cell in self.cells if (cell.shape, cell.rule, cell.temperature) == wanted), None)

    def speed(self, temperature: float) -> Speed | None:
        return next((speed for speed in self.speeds if speed.temperature == temperature), None)

    def forget_measures(self) -> None:
        self.cells, self.speeds, self.skipped, self.fingerprint = [], [], [], None


@dataclass(kw_only=True)
class Comparison:
    """The state of a comparison, kept in `folder`. identity: what all its trainings share. measured: what all its
    figures share, which may change: the figures are then taken anew."""

    folder: Path
    identity: Mapping[str, Any]
    measured: Mapping[str, Any]
    machine: Mapping[str, Any] = field(default_factory=dict)
    feature_seconds: float = 0.0
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], measured: Mapping[str, Any], notice: Notice) -> Comparison:
        """The one that `folder` holds, or a new one; ValueError if that was begun on other terms."""
        stored = read_state(folder)
        if stored is None:
            return cls(folder=folder, identity=identity, measured=measured)
        changed = [name for name, value in identity.items() if stored["identity"].get(name, value) != value]
        if changed:
            then = ", ".join(f"{name} {stored['identity'][name]}" for name in changed)
            now = ", ".join(f"{name} {identity[name]}" for name in changed)
            raise ValueError(
                f"{folder} holds a comparison on other terms ({then}; now {now}): choose another --name, or move it "
                "away"
            )
        comparison = cls(
            folder=folder,
            identity={**stored["identity"], **identity},
            measured=measured,
            feature_seconds=stored["feature_seconds"],
            entries={one["name"]: Entry.from_dict(one) for one in stored["entries"]},
        )
        if stored["measured"] != measured:
            notice("other prompts, rules or lengths than before: everything is measured anew (nothing is trained anew)")
            for entry in comparison.entries.values():
                entry.forget_measures()
        return comparison

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "identity": dict(self.identity),
            "measured": dict(self.measured),
            "machine": dict(self.machine),
            "definition": DEFINITION,
            "counted": COUNTED,
            "feature_seconds": self.feature_seconds,
            "entries": [asdict(entry) for entry in self.entries.values()],
        }

    def save(self) -> None:
        with staged_file(self.folder / STATE_FILE) as new:
            new.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any] | None:
    """What `folder` holds of an earlier comparison; None if nothing."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no comparison ({error}): move it away") from error
    if version != STATE_VERSION:
        raise ValueError(f"{path} has version {version!r}, this headstart reads version {STATE_VERSION}: move it away")
    assert isinstance(values, dict)
    return values


# Who takes part


def read_recipes(recipes: Sequence[str], overrides: Sequence[str], budget: Budget) -> list[RunConfig]:
    """The recipes, put on equal terms; ValueError where they cannot be."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _SET_HERE:
            raise ValueError(f"{override!r}: {key} is the comparison's to set ({_SET_HERE[key]})")
    configs: list[RunConfig] = []
    for recipe in recipes:
        config = load_config(recipe, [*overrides, *_budget_overrides(budget)])
        if any(config.name == other.name for other in configs):
            raise ValueError(f"two recipes have the name {config.name!r}: give each a name of its own in its file")
        if config.backbone.lora_rank is not None:
            raise ValueError(
                f"{config.name} trains its target too (backbone.lora_rank), so its head drafts for another target than "
                "the others: not comparable. Measure it by itself, or give backbone.lora_rank=null"
            )
        configs.append(config)
    first = configs[0]
    for config in configs[1:]:
        for section in ("target", "data"):
            different = _differences(getattr(config, section), getattr(first, section), section)
            if different:
                key, value, other = different[0]
                raise ValueError(
                    f"{config.name} and {first.name} are not comparable: {key} is {_plain(value)} in one and "
                    f"{_plain(other)} in the other; give {key}=... to all"
                )
    return [_on_equal_terms(config, first) for config in configs]


def _budget_overrides(budget: Budget) -> list[str]:
    minutes = "null" if budget.minutes is None else repr(budget.minutes)
    steps = "null" if budget.steps is None else str(budget.steps)
    return [
        f"train.minutes={minutes}",
        f"train.steps={steps}",
        "train.epochs=null",
        "train.patience=null",
        f"train.seed={budget.seed}",
    ]


def _on_equal_terms(config: RunConfig, first: RunConfig) -> RunConfig:
    """Evaluated when and on what the first recipe is, and its states kept within the same space."""
    settings = replace(
        config.train,
        num_evaluations=first.train.num_evaluations,
        eval_every=first.train.eval_every,
        feature_cache=first.train.feature_cache,
        feature_cache_gb=first.train.feature_cache_gb,
        feature_dtype=first.train.feature_dtype,
    )
    return replace(config, train=settings, eval=first.eval)


def _differences(one: Any, other: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    """Settings of a section that differ: (key, value, other value)."""
    mine, theirs = asdict(one), asdict(other)
    return [(f"{prefix}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def contenders_of(configs: Sequence[RunConfig], drafters: Sequence[str], folder: Path) -> list[Contender]:
    """Recipes first, then drafters; ValueError for a HEAD that is none, or named twice."""
    contenders = [
        Contender(name=config.name, head=str(folder / config.name / "best"), config=config) for config in configs
    ]
    for head in drafters:
        specs = parse_spec(head)
        if any(spec.kind == NO_DRAFT for spec in specs):
            raise ValueError("'none' is what every drafter is compared with anyway: leave it out")
        contenders.append(Contender(name=head, head=head))
    names = [contender.name for contender in contenders]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} takes part twice")
    return contenders


# The comparison


def compare(
    contenders: Sequence[Contender],
    *,
    target: TargetModel,
    folder: Path,
    budget: Budget | None,
    measures: Measures,
    prompts: Sequence[EvalPrompt],
    notice: Notice = print,
) -> Comparison:
    """Train what is to be trained, measure everything, and return it all; `folder` keeps each part as it is finished.

    ValueError before any training if a recipe or a HEAD cannot work. What fails later is noted in its entry, and the
    others go on. KeyboardInterrupt when a training was asked to stop.
    """
    trained = [contender.config for contender in contenders if contender.config is not None]
    data = _load_data(trained[0], target) if trained else None
    identity = _identity(target, budget, data)
    comparison = Comparison.open(folder, identity, measures.described(prompts), notice)
    comparison.machine = machine_facts()
    for contender in contenders:
        entry = comparison.entries.setdefault(
            contender.name, Entry(name=contender.name, head=contender.head, kind=_kind_of(contender))
        )
        entry.error = None
        _forget_if_changed(entry, contender)
    pending = [one for one in contenders if one.config is not None and not comparison.entries[one.name].is_trained]
    taps = _check(contenders, comparison, target, data)
    comparison.save()
    if pending and data is not None:
        recomputed = _warm(pending, taps, comparison, target, data, notice)
        for contender in pending:
            with _noted(comparison, contender, notice):
                notice(f"== training {contender.name}")
                _train(contender, comparison, target, recomputed, notice)
    for contender in contenders:
        if comparison.entries[contender.name].error is None:
            with _noted(comparison, contender, notice):
                _measure(contender, comparison, target, measures, prompts, notice)
    comparison.entries = {one.name: comparison.entries[one.name] for one in contenders}
    return comparison


def _load_data(config: RunConfig, target: TargetModel) -> TrainingData:
    """The text of every run, as each run will read it."""
    room = target.max_length - config.eval.max_tokens
    return load_data(config.data, target.tokenizer, seed=config.train.seed, max_prompt_tokens=room)


def _identity(target: TargetModel, budget: Budget | None, data: TrainingData | None) -> dict[str, Any]:
    identity: dict[str, Any] = {"target": target.fingerprint, "target_dtype": dtype_name(target.dtype)}
    if budget is not None and data is not None:
        identity |= {**asdict(budget), "data_hash": data.data_hash}
    return identity


def _kind_of(contender: Contender) -> str:
    if contender.config is not None:
        return contender.config.head.type
    specs = parse_spec(contender.head)
    return "+".join(read_card(spec.argument).family if spec.kind == FOLDER else spec.kind for spec in specs)


def _forget_if_changed(entry: Entry, contender: Contender) -> None:
    """A head that is gone is trained again; one trained further since it was measured is measured anew."""
    if contender.config is not None and not present_folder(Path(entry.head)).is_dir():
        entry.training = None
        entry.forget_measures()
    elif entry.fingerprint is not None and entry.fingerprint != _fingerprint(entry.head):
        entry.forget_measures()


def _fingerprint(head: str) -> str:
    """Of the weights in the folders that a HEAD names."""
    digest = hashlib.sha256(head.encode())
    for spec in parse_spec(head):
        if spec.kind == FOLDER:
            digest.update((present_folder(Path(spec.argument)) / WEIGHTS_FILE).read_bytes())
    return digest.hexdigest()[:16]


def _check(
    contenders: Sequence[Contender], comparison: Comparison, target: TargetModel, data: TrainingData | None
) -> dict[str, tuple[int, ...]]:
    """Build every network once, so that what cannot work is told before anything trains; the taps of each recipe."""
    taps: dict[str, tuple[int, ...]] = {}
    for contender in contenders:
        config, entry = contender.config, comparison.entries[contender.name]
        if config is None:
            load_drafter(contender.head, target, hybrid=False)
            continue
        assert data is not None
        _check_run(comparison.folder / config.name, config)
        if entry.is_trained:
            continue
        size = config.head.draft_vocab_size
        if size is not None and size > target.vocab_size:
            raise ValueError(
                f"{config.name}: head.draft_vocab_size is {size}, more than the target's {target.vocab_size} tokens; "
                "null drafts among all of them"
            )
        try:
            taps[config.name] = make_head(config, target, data).config.taps
        except ValueError as error:
            raise ValueError(f"{config.name}: {error}") from error
    return taps


def _check_run(folder: Path, config: RunConfig) -> None:
    """Refuse to go on from a checkpoint of other settings: its head would not be what the recipe says."""
    path = folder / "config.yaml"
    if not path.exists() or not recover_folder(folder / "last").exists():
        return
    then, now = dump_config(load_config(path)), dump_config(config)
    changed = [
        f"{section}.{key}"
        for section, settings in now.items()
        if isinstance(settings, dict) and section not in _FREE
        for key, value in settings.items()
        if f"{section}.{key}" not in _FREE and then[section][key] != value
    ]
    if changed:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(changed)}): choose another --name, or move it away"
        )


@contextmanager
def _noted(comparison: Comparison, contender: Contender, notice: Notice) -> Iterator[None]:
    """Whatever goes wrong within the block is noted in the contender's entry, and goes no further."""
    entry = comparison.entries[contender.name]
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())
        entry.error = told if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {told}"
        notice(f"{contender.name} failed: {entry.error}")
    comparison.save()


def _train(
    contender: Contender, comparison: Comparison, target: TargetModel, recomputed_rows: int, notice: Notice
) -> None:
    config = contender.config
    assert config is not None
    folder = comparison.folder / config.name
    resume = recover_folder(folder / "last").exists()
    if not resume:
        _clear_unfinished(folder)
    summary = train(config, runs_folder=comparison.folder, resume=resume, target=target, notice=notice)
    best = summary["best"]
    entry = comparison.entries[contender.name]
    entry.training = Training(
        here=True,
        status=summary["status"],
        minutes=summary["minutes"],
        steps=summary["step"],
        token_visits=summary["tokens"],
        epochs=summary["epoch"],
        best_step=best["step"] if best else None,
        recomputed_rows=recomputed_rows,
    )
    if summary["status"] == "interrupted":
        comparison.save()
        raise KeyboardInterrupt
    entry.forget_measures()


def _clear_unfinished(folder: Path) -> None:
    """A run that was killed in its first evaluation left a best head and nothing to go on from."""
    best = recover_folder(folder / "best")
    if best.exists():
        best.rename(best.with_name(f".best.unfinished-{time.time_ns()}"))


# The states of the text


def _warm(
    pending: Sequence[Contender],
    taps: Mapping[str, tuple[int, ...]],
    comparison: Comparison,
    target: TargetModel,
    data: TrainingData,
    notice: Notice,
) -> int:
    """Compute and keep the states that the runs will read, of the taps of all; returns the rows that did not fit, and
    that each run computes itself at every visit."""
    configs = [contender.config for contender in pending if contender.config is not None]
    settings = configs[0].train
    if not settings.feature_cache or not settings.feature_cache_gb:
        return len(data.rows)
    all_taps = sorted({tap for config in configs for tap in taps[config.name]})
    wanted = replace(configs[0], train=replace(settings, teacher=_common_teacher(configs)))
    source = make_features(wanted, target, taps=all_taps, folder=comparison.folder, rows=data.rows, notice=notice)
    assert isinstance(source, CachedFeatures)
    start = time.perf_counter()
    notice(f"== computing the target's states for {len(data.rows)} rows, of taps {all_taps}")
    account = fill(source, data.rows)
    comparison.feature_seconds += time.perf_counter() - start
    return account.beyond.rows


def _common_teacher(configs: Sequence[RunConfig]) -> TeacherLaw:
    """That whose features serve all recipes."""
    return "full" if any(config.train.teacher == "full" for config in configs) else "draft"


# Measuring


def _measure(
    contender: Contender,
    comparison: Comparison,
    target: TargetModel,
    measures: Measures,
    prompts: Sequence[EvalPrompt],
    notice: Notice,
) -> None:
    """Take the figures that are still missing, and keep each as it comes."""
    entry = comparison.entries[contender.name]
    missing = [part for part in measures.plan() if entry.cell(*part) is None and part[1] not in entry.skipped]
    untimed = measures.bench and len(entry.speeds) < len(measures.speed_temperatures)
    if not missing and not untimed:
        return
    notice(f"== measuring {contender.name}")
    drafter = load_drafter(contender.head, target, hybrid=False)
    assert drafter is not None
    entry.fingerprint = _fingerprint(contender.head)
    entry.num_parameters, entry.draft_vocab_size = sizes_of(drafter)
    if entry.training is None:
        entry.training = _earlier_training(contender.head)
    engines: dict[tuple[Shape, str], Engine] = {}
    for shape, rule, temperature in missing:
        if rule in entry.skipped:
            continue
        if not can_verify(rule, drafter):
            entry.skipped.append(rule)
            continue
        if (shape, rule) not in engines:
            engines = {
                (shape, rule): measuring_engine(target, drafter, measures, shape, rule)
            }  # the last one's cache goes
        entry.cells.append(acceptance(engines[shape, rule], prompts, measures, shape, rule, temperature))
        comparison.save()
    if untimed:
        entry.speeds = speeds(target, drafter, prompts, measures)


def _earlier_training(head: str) -> Training | None:
    """What the card of a head tells of its training; None for drafters without one."""
    folders = [spec.argument for spec in parse_spec(head) if spec.kind == FOLDER]
    told = read_card(folders[0]).training if len(folders) == 1 else {}
    if "train_seconds" not in told:
        return None
    return Training(
        here=False,
        status="earlier",
        minutes=told["train_seconds"] / 60,
        steps=told["step"],
        token_visits=told["tokens"],
        epochs=told["epoch"],
        best_step=told["step"],
    )
