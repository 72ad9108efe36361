"""`headstart features`: the target's states for a recipe's rows, computed once."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli.common import output_file
from train.cli.progress import row_progress

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from infer.chat import Rendered
    from infer.target import TargetModel
    from train.corpus.dataset import TrainingData
    from train.features.filling import Account
    from train.features.source import CachedFeatures
    from train.features.store import FeatureStore
    from train.world import World

HELP = """\
Compute the target's states for the rows of a recipe, and keep them: training then reads them.
Without --out they are kept beside the runs, where `headstart train` looks for them. With --out the folder also gets
what training reads of the target itself, and held-out text: set target.features=FOLDER to train without the target.
What is there already is not computed again, so the command may be interrupted and given again."""
EXAMPLE = """\
headstart features smollm2-135m-eagle3
headstart features smollm2-135m-eagle3 train.feature_dtype=int8 --out smollm2-features --budget-gb 20"""

REPORT_FILE = "report.json"
ROWS_PER_PART = 10_000
"""Rows of a stream that are held in memory at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a folder to train on without the target")
    parser.add_argument(
        "--budget-gb", type=float, metavar="GB", help="most that the folder may take (default: train.feature_cache_gb)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds runs (default: runs)")
    parser.add_argument("--json", type=output_file, help="also write the account to this file")


def run(args: argparse.Namespace) -> int:
    from configs.loading import load_config
    from infer.cli.common import quiet_loading, write_json
    from train.corpus.reading import check_sources
    from train.world import World

    config = load_config(args.recipe, args.overrides)
    budget = config.train.feature_cache_gb if args.budget_gb is None else args.budget_gb
    if not 0 < budget < float("inf"):
        raise ValueError(f"the budget is {budget:g} GB: give --budget-gb above 0")
    if config.target.features is not None:
        raise ValueError("target.features names features that are made already: set target.features=null to make some")
    check_sources(config.data)
    quiet_loading()
    world = World.from_environment()
    world.start()
    try:
        report = _make(config, args.out, args.runs, budget_gb=budget, world=world)
    except KeyboardInterrupt:
        again = shlex.join(sys.argv[1:])
        print(f"interrupted; what is finished is kept, go on with: headstart {again}", file=sys.stderr)
        return 130
    finally:
        world.stop()
    if world.is_main:
        write_json(args.json, report)
    return 0


def _make(config: RunConfig, out: Path | None, runs: Path, *, budget_gb: float, world: World) -> dict[str, Any]:
    """Fill the store and say what became of every row."""
    from train.corpus.dataset import load_data
    from train.features.filling import fill
    from train.features.source import GB, check_disk
    from train.setup import load_model, make_head

    say = world.voice(_print)
    target = load_model(config, world)
    data = load_data(
        config.data,
        target.tokenizer,
        seed=config.train.seed,
        max_prompt_tokens=target.max_length - config.eval.max_tokens,
    )
    taps = make_head(config, target, data).config.taps
    source = _open(config, target, taps, out or runs, is_export=out is not None, max_bytes=int(budget_gb * GB), say=say)
    store = source.store
    say(f"{source.online.bytes_per_token} bytes a token; {store.describe()}, at most {budget_gb:g} GB")
    check_disk(source, [*data.held_out, *data.rows])
    if out is not None:
        _write_target(store, target, data, world)
    total = _num_rows(config, data)
    with _progress([len(data.held_out), total], world) as on_row:
        held_out = fill(source, data.held_out, world=world, on_row=on_row)
        accounts = [fill(source, part, world=world, on_row=on_row) for part in _parts(data, total)]
    training = sum(accounts[1:], start=accounts[0])
    report = _report(config, target, data, source, held_out=held_out, training=training)
    if world.is_main:
        store.write_file(REPORT_FILE, report)
    _tell(report, source, held_out, training, say, is_export=out is not None)
    if store.failure is not None:
        raise ValueError(
            f"{store.folder} takes no more ({store.failure}), and {training.beyond + held_out.beyond} are missing: "
            "make room, and give the command again"
        )
    return report


def _open(
    config: RunConfig,
    target: TargetModel,
    taps: Sequence[int],
    folder: Path,
    *,
    is_export: bool,
    max_bytes: int,
    say: Callable[[str], None],
) -> CachedFeatures:
    """The store to fill: `folder` itself, or the recipe's among those beside the runs in `folder`."""
    from train.features.codec import Codec
    from train.features.manifest import Manifest
    from train.features.source import CACHE_FOLDER, CachedFeatures, OnlineFeatures, open_cache, open_export

    manifest = Manifest.of(target, Codec.of(target, taps, config.train.feature_dtype))
    if is_export:
        store = open_export(folder, manifest, max_bytes=max_bytes, notice=say)
    else:
        store = open_cache(folder / CACHE_FOLDER, manifest, max_bytes=max_bytes, notice=say)
    online = OnlineFeatures(
        target,
        store.manifest.taps,
        feature_dtype=config.train.feature_dtype,
        with_normalizer=config.train.teacher == "full",
    )
    return CachedFeatures(online, store, taps=taps)


def _write_target(store: FeatureStore, target: TargetModel, data: TrainingData, world: World) -> None:
    """By the main process; all of them together, since one that shares its target out must gather the layers."""
    from train.corpus.dataset import domain_of
    from train.features.stored_target import HeldOut, write_held_out, write_target
    from train.sharded import ShardedTarget

    with target.whole() if isinstance(target, ShardedTarget) else nullcontext():
        if world.is_main:
            write_target(store.folder, target)
    held_out = HeldOut(rows=data.held_out, domains=[domain_of(row) for row in data.held_out], prompts=data.prompts)
    if world.is_main:
        write_held_out(store, held_out)
    world.barrier()


def _num_rows(config: RunConfig, data: TrainingData) -> int:
    """Rows of the data; of a stream, visits of the run."""
    if data.num_rows is not None or not config.data.streaming:
        return len(data.rows)
    if config.train.steps is None:
        raise ValueError("streamed data (data.streaming) have no end: set train.steps, for the rows of so many steps")
    return config.train.steps * config.optim.conversations_per_step


def _parts(data: TrainingData, total: int) -> Iterator[Sequence[Rendered]]:
    if total == len(data.rows):
        yield data.rows
        return
    for start in range(0, total, ROWS_PER_PART):
        yield [data.visits.at(visit) for visit in range(start, min(start + ROWS_PER_PART, total))]


def _report(
    config: RunConfig,
    target: TargetModel,
    data: TrainingData,
    source: CachedFeatures,
    *,
    held_out: Account,
    training: Account,
) -> dict[str, Any]:
    """What the folder holds. It names the data by hash, never by path."""
    from dataclasses import asdict

    from train.features.errors import measure_errors, spread

    codec = source.online.codec
    errors = measure_errors(target, codec, spread(data.rows)) if codec.is_lossy else None
    return {
        "recipe": config.name,
        "data_hash": data.data_hash,
        "rows": training.to_dict(),
        "held_out": held_out.to_dict(),
        "kept_rows": source.store.num_rows,
        "bytes": source.store.num_bytes,
        "bytes_per_token": source.online.bytes_per_token,
        "stored_dtype": codec.stored_dtype,
        "errors": None if errors is None else {**asdict(errors), "text": errors.describe()},
    }


def _tell(
    report: dict[str, Any],
    source: CachedFeatures,
    held_out: Account,
    training: Account,
    say: Callable[[str], None],
    *,
    is_export: bool,
) -> None:
    store = source.store
    say(f"training rows: {training.describe()}")
    say(f"held-out rows: {held_out.describe()}")
    errors = report["errors"]
    say("kept exactly as the target gives them" if errors is None else errors["text"])
    say(f"{store.folder}: {store.num_rows:,} rows, {report['bytes'] / 1e9:.3f} GB")
    missing = training.beyond + held_out.beyond
    if missing.rows and store.failure is None:
        what = (
            "training without the target would refuse the folder" if is_export else "they are computed at every visit"
        )
        say(f"the budget has no room for {missing}: {what}; raise --budget-gb")


@contextmanager
def _progress(parts: Sequence[int], world: World) -> Iterator[Callable[[int], None]]:
    """A bar over this process's rows; Ctrl-C takes effect between two of them."""
    from train.stop import StopRequest

    total = sum(-(-part // world.size) for part in parts)
    with StopRequest() as stop, row_progress("rows", total=total, is_shown=world.is_main) as bar:

        def on_row(tokens: int) -> None:
            bar.add_tokens(tokens)
            bar.add_row()
            if stop.requested:
                raise KeyboardInterrupt

        yield on_row


def _print(text: str) -> None:
    print(text, flush=True)
