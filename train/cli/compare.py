"""`headstart compare`: several recipes and drafters on equal terms, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import common
from infer.verify import RULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from configs.schema import RunConfig
    from infer.target import TargetModel
    from train.compare import Budget, Comparison, Entry
    from train.measures import Cell, Measures, Shape

HELP = """\
Train several recipes under one budget on the same text, measure their heads (and any drafters that need
no training) alike, and print one comparison: size, training cost, accepted length by draft position at
each temperature under each verification rule, distance to the best acceptance there could be, speed and
the share of time that goes into drafting. Run again, it goes on where it stopped; with more recipes or
drafters it adds them. Runs stay in RUNS/compare-NAME/RECIPE."""

EXAMPLE = """\
headstart compare smollm2-135m-eagle3-demo my-medusa.yaml data.max_length=768 --minutes 4 --drafters ngram
headstart compare smollm2-135m-eagle3-demo --steps 50 --rules match block --temperatures 0 1 --limit 1
headstart compare --drafters runs/demo/best runs/demo/best+ngram ngram --plot compare.png"""

_LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
_MAX_POSITIONS = 6  # as many as fit 80 columns; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE|section.key=value",
        help="recipe files or names of shipped recipes, and settings that replace those of all recipes",
    )
    group = parser.add_argument_group("budget of each recipe (one of these)")
    group.add_argument("--minutes", type=float, metavar="M", help="minutes of training steps")
    group.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    group = parser.add_argument_group("what takes part, and where it is kept")
    group.add_argument(
        "--drafters", nargs="+", default=[], metavar="HEAD", help=f"measured without training: {common.HEAD_HELP}"
    )
    group.add_argument(
        "--target", metavar="MODEL", help="without recipes: a local folder or a Hub name (default: what heads name)"
    )
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="without recipes: the target's precision (auto)"
    )
    group.add_argument("--device", help="without recipes: where it runs (auto)")
    group.add_argument("--name", help="names the folder RUNS/compare-NAME (default: target and budget)")
    group.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds runs (default: runs)")
    group = parser.add_argument_group("what is measured")
    common.add_prompts_arguments(group, limit=2)
    group.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.7, 1.0],
        metavar="T",
        help="acceptance at each, speed at the lowest and the highest (default: 0 0.7 1)",
    )
    group.add_argument(
        "--rules", nargs="+", default=_LOSSLESS, choices=_LOSSLESS, metavar="RULE", help=" ".join(_LOSSLESS)
    )
    group.add_argument("--chain", type=int, default=5, metavar="K", help="length of the drafted chain (default: 5)")
    group.add_argument("--nodes", type=int, default=16, metavar="N", help="draft tokens of the tree (default: 16)")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    group.add_argument("--batch", type=int, default=8, metavar="N", help="prompts decoded at once (default: 8)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the trainings; prompt i has N + i")
    group.add_argument(
        "--speed", action=argparse.BooleanOptionalAction, default=True, help="measure speed too (default)"
    )
    common.add_json_argument(parser)
    parser.add_argument("--plot", type=common.output_file, metavar="FILE", help="draw acceptance and speed into FILE")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from infer.evaluate import render_prompts
    from train.compare import compare, contenders_of, read_recipes
    from train.corpus.reading import check_sources
    from train.measures import Measures

    if args.plot is not None:
        _require_matplotlib()
    recipes, overrides = _split_words(args.words)
    budget = _budget(args, recipes)
    measures = Measures(
        rules=tuple(args.rules),
        temperatures=tuple(args.temperatures),
        chain_depth=args.chain,
        num_nodes=args.nodes,
        max_tokens=args.max_tokens,
        seed=args.seed,
        batch=args.batch,
        bench=args.speed,
    )
    configs = read_recipes(recipes, overrides, budget) if budget is not None else []
    if configs:
        check_sources(configs[0].data)
    folder = args.runs / f"compare-{args.name or _default_name(args, configs, budget)}"
    contenders = contenders_of(configs, args.drafters, folder)
    chats = common.read_chats(args)
    target = _load_target(args, configs, folder)
    common.warn_if_busy()
    try:
        comparison = compare(
            contenders,
            target=target,
            folder=folder,
            budget=budget,
            measures=measures,
            prompts=render_prompts(target.tokenizer, chats, raw=args.raw),
            notice=common.note,
        )
    except KeyboardInterrupt:
        common.note(f"stopped; what is finished stays in {folder}. Go on with the same command")
        raise
    console = Console()
    for table in tables(comparison, measures):
        console.print(table, "")
    for line in notes(comparison, measures):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if args.plot is not None:
        plot(comparison, measures, args.plot)
        common.note(f"wrote {args.plot}")
    common.write_json(args.json, comparison.to_dict())
    return 1 if any(entry.error is not None for entry in comparison.entries.values()) else 0


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes, and settings for all of them."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def _budget(args: argparse.Namespace, recipes: Sequence[str]) -> Budget | None:
    """Of the recipes, if there are any; refuses what only makes sense with or without them."""
    from train.compare import Budget

    if recipes:
        for name in ("target", "dtype", "device"):
            if getattr(args, name) is not None:
                setting = "target.model" if name == "target" else f"target.{name}"
                raise ValueError(f"--{name}: the recipes say that; to change it for all of them, give {setting}=...")
        return Budget(minutes=args.minutes, steps=args.steps, seed=args.seed)
    if not args.drafters:
        raise ValueError("nothing takes part: name recipes to train, or --drafters to measure")
    for given, what in ((args.minutes, "--minutes"), (args.steps, "--steps"), (args.words or None, "settings")):
        if given is not None:
            raise ValueError(f"{what} without a recipe: there is nothing to train")
    return None


def _default_name(args: argparse.Namespace, configs: Sequence[RunConfig], budget: Budget | None) -> str:
    if budget is None:
        return f"{Path(_target_of(args)).name}-drafters"
    return f"{Path(configs[0].target.model).name}-{budget.name}"


def _target_of(args: argparse.Namespace) -> str:
    """The target where no recipe names it: the one given, else that of the trained heads."""
    from infer.drafters import head_folder, resolve_target

    if args.target is not None:
        return str(args.target)
    folders = [folder for folder in map(head_folder, args.drafters) if folder is not None]
    if not folders:
        raise ValueError("neither a recipe nor a trained head says which target this is about: give --target")
    return str(resolve_target(folders[0], None))


def _load_target(args: argparse.Namespace, configs: Sequence[RunConfig], folder: Path) -> TargetModel:
    """The target of the recipes or heads, in the dtype that the comparison began with."""
    from infer.machine import dtype_name
    from infer.target import TargetModel
    from train.compare import read_state
    from train.setup import load_model
    from train.world import World

    common.quiet_loading()
    stored = read_state(folder)
    begun_with = None if stored is None else stored["identity"]["target_dtype"]
    if configs:
        target = load_model(configs[0], World(), dtype=begun_with)
    else:
        dtype = args.dtype or begun_with or "auto"
        target = TargetModel.load(_target_of(args), dtype=dtype, device=args.device or "auto")
    common.note(f"target {target.name}, {dtype_name(target.dtype)} on {target.device}; {folder}")
    return target


# Tables


def tables(comparison: Comparison, measures: Measures) -> list[Table]:
    """What each contender is and cost, what it gives, and its acceptance by position, a table for each shape and
    temperature."""
    entries = list(comparison.entries.values())
    result = [_cost_table(entries), _gain_table(entries, measures)]
    for shape, rules in _rules_by_shape(measures).items():
        for temperature in measures.temperatures:
            result.append(_position_table(entries, measures, shape, rules, temperature))
    return result


def _labels(entries: Sequence[Entry]) -> list[str]:
    """Names short enough for a table: the first table and the picture's foot say in full which is which."""
    return [f"{number} {entry.kind}" for number, entry in enumerate(entries, start=1)]


def _rules_by_shape(measures: Measures) -> dict[Shape, list[str]]:
    from train.measures import ANY_RULE

    rules: dict[Shape, list[str]] = {"chain": [], "tree": []}
    for shape, rule, _ in measures.plan():
        if rule != ANY_RULE and rule not in rules[shape]:
            rules[shape].append(rule)
    return rules


def _cost_table(entries: Sequence[Entry]) -> Table:
    columns = ("parameters", "draft tokens", "minutes", "steps", "visits")
    table = common.plain_table("what they are, and what their training took", "", columns)
    table.add_column("recipe or HEAD", overflow="fold")
    for label, entry in zip(_labels(entries), entries, strict=True):
        training = entry.training
        row = ["", "", ""]
        if training is not None:
            mark = "" if training.here else "*"
            row = [f"{training.minutes:.1f}{mark}", str(training.steps), _short(training.token_visits)]
        table.add_row(label, _short(entry.num_parameters), _short(entry.draft_vocab_size), *row, entry.name)
    return table


def _gain_table(entries: Sequence[Entry], measures: Measures) -> Table:
    """One line a contender and temperature: accepted length on a chain and on a tree, speed and draft share."""
    columns = ("T", "chain", "tree", "of bound", "tokens/s", "x plain", "drafting")
    table = common.plain_table("what they give", "", columns)
    for label, entry in zip(_labels(entries), entries, strict=True):
        for temperature in measures.speed_temperatures:
            cells = [entry.cell(shape, _first_rule(measures, shape), temperature) for shape in _SHAPES]
            lengths = ["" if cell is None else f"{cell.accepted_length:.2f}" for cell in cells]
            speeds = ["", "", ""]
            if (speed := entry.speed(temperature)) is not None:
                speeds = [f"{speed.tokens_per_second:.1f}", f"{speed.ratio_to_plain:.2f}", _share(speed.draft_share)]
            table.add_row(label, f"{temperature:g}", *lengths, _attained(cells[1]), *speeds)
    return table


_SHAPES: tuple[Shape, ...] = ("chain", "tree")


def _first_rule(measures: Measures, shape: Shape) -> str:
    """The rule that stands for a shape where one figure must do: match if it is measured."""
    return next(iter(_rules_by_shape(measures)[shape]), "")


def _position_table(
    entries: Sequence[Entry], measures: Measures, shape: Shape, rules: Sequence[str], temperature: float
) -> Table:
    """Rule by rule, so that contenders stand below each other."""
    from train.measures import ANY_RULE

    wanted = [ANY_RULE] if temperature == 0 else list(rules)
    rows = [
        (label, rule, cell)
        for rule in wanted
        for label, entry in zip(_labels(entries), entries, strict=True)
        if (cell := entry.cell(shape, rule, temperature)) is not None
    ]
    deepest = max((len(cell.by_position) for _, _, cell in rows), default=0)
    positions = range(1, min(_MAX_POSITIONS, deepest) + 1)
    size = f"chain of {measures.chain_depth}" if shape == "chain" else f"tree of {measures.num_nodes}"
    title = f"{size}, temperature {temperature:g}: share of rounds accepted"
    table = common.plain_table(title, "", ("rule", "length", *(f"at {d}" for d in positions), "of bound"))
    for label, rule, cell in rows:
        shares = [f"{cell.at_position(position):.2f}" for position in positions]
        table.add_row(label, rule, f"{cell.accepted_length:.2f}", *shares, _attained(cell))
    return table


def notes(comparison: Comparison, measures: Measures) -> list[str]:
    """What the tables mean, and what went wrong."""
    from infer.evaluate import DEFINITION
    from train.compare import COUNTED

    entries = list(comparison.entries.values())
    lines = [f"{entry.name} FAILED: {entry.error}" for entry in entries if entry.error is not None]
    lines += [
        f"{entry.name} has no figures under {', '.join(entry.skipped)}: it draws nothing that these could verify."
        for entry in entries
        if entry.skipped
    ]
    trained = [entry for entry in entries if entry.training is not None and entry.training.here]
    if trained:
        lines.append(f"{COUNTED[0].upper()}{COUNTED[1:]} ({comparison.feature_seconds / 60:.1f} minutes).")
    lines += [
        f"{entry.name} computed the states of {entry.training.recomputed_rows} rows at every visit, within its "
        "minutes: they do not fit train.feature_cache_gb."
        for entry in trained
        if entry.training is not None and entry.training.recomputed_rows
    ]
    if any(entry.training is not None and not entry.training.here for entry in entries):
        lines.append("* trained before, with a budget of its own.")
    lines += [
        f"Definition: {DEFINITION}.",
        "Of bound: acceptance of a step against the best that any lossless rule could reach of the same candidates, "
        "with one standard error.",
        "Speed: batch 1, the tree adapted to this machine, beside plain decoding; drafting: its share of the time.",
    ]
    return lines


def _short(value: int | None) -> str:
    if value is None:
        return ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _attained(cell: Cell | None) -> str:
    """Acceptance against its bound, and the standard error."""
    if cell is None or cell.bound_ratio is None or cell.bound_error is None:
        return ""
    return f"{100 * cell.bound_ratio:.0f}+-{100 * cell.bound_error:.0f} %"


# The picture


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'headstart[train]', or leave it out") from None


def plot(comparison: Comparison, measures: Measures, path: Path) -> None:
    """Acceptance by position on the chain, a panel for each temperature, and speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = list(comparison.entries.values())
    num_panels = len(measures.temperatures) + 1
    figure = Figure(figsize=(4.5 * num_panels, 4.5 + 0.25 * len(entries)), layout="constrained")
    FigureCanvasAgg(figure)
    *acceptance, speed = figure.subplots(1, num_panels)
    for axes, temperature in zip(acceptance, measures.temperatures, strict=True):
        _draw_positions(axes, entries, measures, temperature)
    _draw_speed(speed, entries, measures)
    figure.suptitle(comparison.folder.name)
    names = [f"{number}: {entry.name}" for number, entry in enumerate(entries, start=1)]
    figure.supxlabel("\n".join(names), fontsize="small", ha="left", x=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_positions(axes: Axes, entries: Sequence[Entry], measures: Measures, temperature: float) -> None:
    rule = _first_rule(measures, "chain")
    for number, (label, entry) in enumerate(zip(_labels(entries), entries, strict=True)):
        cell = entry.cell("chain", rule, temperature)
        if cell is not None:
            shares = [cell.at_position(position) for position in range(1, measures.chain_depth + 1)]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                marker="o",
                color=f"C{number % 10}",
                linestyle="-" if number < 10 else "--",
                label=f"{label} ({cell.accepted_length:.2f})",
            )
    title = f"chain, T = {temperature:g}" + ("" if temperature == 0 else f", rule {rule}")
    axes.set(xlabel="draft position", ylabel="share of rounds accepted", ylim=(0, 1), title=title)
    if axes.lines:
        axes.legend(fontsize="small", title="accepted length", title_fontsize="small")


def _draw_speed(axes: Axes, entries: Sequence[Entry], measures: Measures) -> None:
    """A group of bars for each contender, one bar a temperature."""
    temperatures = measures.speed_temperatures
    height = 0.8 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        speeds = [(place, speed) for place, entry in enumerate(entries) if (speed := entry.speed(temperature))]
        ratios = [speed.ratio_to_plain for _, speed in speeds]
        heights = [place + number * height for place, _ in speeds]
        bars = axes.barh(heights, ratios, height=height, label=f"T = {temperature:g}")
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize="small")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(entries))], _labels(entries), fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="times plain decoding", title="speed")
    axes.legend(fontsize="small")
