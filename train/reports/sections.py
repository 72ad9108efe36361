"""The sections of `report.html` that show what was measured: each is a `Story` seen from one side, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.reports.charts import Series, bar_chart, column_chart, line_chart, share_bar
from train.reports.page import Heat, card, facts, grid, section, table
from train.reports.picture import smoothed
from train.reports.report import compare_best_and_last
from train.reports.samples import SAMPLE_LEGEND, Sample
from train.reports.story import Record, Story
from train.reports.table import AcceptanceTable, Cell

MINUTES = "training minutes"
BEST = "of the best head"


def progress(story: Story) -> str:
    evaluations, trainings = story.evaluations, story.trainings
    lengths = Series(
        name="accepted length",
        points=story.curve("accepted_length", evaluations),
        errors=[record.get("standard_error") or 0.0 for record in evaluations],
    )
    comparison = compare_best_and_last(story) or "nothing was evaluated yet"
    return section(
        "How it went",
        grid(
            card(
                "Accepted length on held-out text",
                line_chart([lengths], x_name=MINUTES, y_name="tokens a round"),
                f"{comparison}. Bars: one standard error over prompts." if any(lengths.errors) else f"{comparison}.",
            ),
            card(
                "Agreement with the target's most likely token, held-out text",
                line_chart(
                    _by_depth(story.curves_by_depth("agreement", evaluations)),
                    x_name=MINUTES,
                    y_name="share",
                    y_range=(0, 1),
                ),
            ),
            card(
                "Overlap with the target, training batches",
                line_chart(
                    list(_averaged(story.curves_by_depth("overlap_by_depth", trainings))),
                    x_name=MINUTES,
                    y_name="probability of acceptance",
                    y_range=(0, 1),
                ),
            ),
            card(
                "Loss by depth, training batches",
                line_chart(
                    list(_averaged(story.curves_by_depth("loss_by_depth", trainings))), x_name=MINUTES, y_name="loss"
                ),
            ),
            card("Learning rate", _single(story, "lr", trainings, "learning rate")),
            card("Gradient norm", _single(story, "gradient_norm", trainings, "norm", average=True)),
        ),
    )


def acceptance(story: Story) -> str:
    best = story.best
    if best is None:
        return ""
    acceptance = best["acceptance"]
    series = [
        Series(
            name=f"temperature {float(temperature):g}",
            points=list(enumerate(measured["by_position"], start=1)),
            colour=place,
        )
        for place, (temperature, measured) in enumerate(acceptance["by_temperature"].items())
    ]
    positions = (1.0, float(max(5, *(len(one.points) for one in series))))
    histogram = acceptance.get("overall", {}).get("histogram", {})
    cells = AcceptanceTable.from_list(best["acceptance_table"]) if best.get("acceptance_table") else None
    return section(
        f"Acceptance {BEST}",
        grid(
            card(
                "Share of rounds accepted",
                line_chart(series, x_name="draft position", y_name="share", x_range=positions, y_range=(0, 1)),
            ),
            card(
                "Tokens that a round emitted",
                column_chart(
                    [(str(length), float(count)) for length, count in histogram.items()],
                    x_name="tokens",
                    y_name="rounds",
                ),
                acceptance.get("definition", ""),
            ),
            card("Accepted length by domain", bar_chart(_bars(acceptance.get("by_domain", {})), baseline=1.0)),
            card(
                "Accepted length by context (tokens before the round)",
                bar_chart(_bars(acceptance.get("by_context", {})), baseline=1.0),
            ),
        ),
        "" if cells is None else _cross_tables(cells),
    )


def _cross_tables(cells: AcceptanceTable) -> str:
    """Each pair of columns is small enough to read; the whole table is below, folded."""
    pairs = ("domain", "temperature"), ("context", "temperature")
    return "".join(
        card(
            f"{key.capitalize()} and temperature, by draft position", _heat_table(cells.pooled(key, other), key, other)
        )
        for key, other in pairs
    ) + (
        "<details><summary>Every domain, temperature and context</summary>"
        f"{card('', _heat_table(cells.cells, 'domain', 'context', 'temperature'))}</details>"
    )


def _heat_table(cells: Sequence[Cell], *keys: str) -> str:
    deepest = max((len(cell.accepted) for cell in cells), default=0)
    rows = [
        (
            *(str(getattr(cell, key)) if key != "temperature" else f"{cell.temperature:g}" for key in keys),
            f"{cell.num_rounds:,}",
            f"{cell.accepted_length:.2f}",
            *(Heat(share) for share in (*cell.shares, *[0.0] * (deepest - len(cell.shares)))),
        )
        for cell in cells
    ]
    header = (*keys, "rounds", "length", *(f"position {d}" for d in range(1, deepest + 1)))
    return table(header, rows, num_texts=len(keys))


def honesty(story: Story) -> str:
    """Calibration, and whether training and serving agree."""
    best = story.best or {}
    curves = best.get("calibration") or {}
    series = [
        Series(
            name=f"temperature {float(temperature):g} (mean gap {curve['calibration_error']:.3f})",
            points=[(one["predicted"], one["observed"]) for one in curve["bins"]],
            colour=place,
        )
        for place, (temperature, curve) in enumerate(curves.items())
    ]
    calibration = card(
        "Drafts that came true, by their probability",
        line_chart(
            series,
            x_name="draft probability",
            y_name="share accepted",
            x_range=(0, 1),
            y_range=(0, 1),
            diagonal=True,
        ),
        "On the dotted line drafts hold what they promise; below it the head is too sure of itself.",
    )
    parities = [
        (record["train_seconds"] / 60, record["parity"]) for record in story.evaluations if record.get("parity")
    ]
    lines = [
        Series(name=name, points=[(minutes, parity[key]) for minutes, parity in parities], colour=place, style=style)
        for place, (name, key, style) in enumerate(
            (("decode loop", "decoded_length", "line"), ("training graph", "simulated_length", "dashed"))
        )
    ]
    parity = card(
        "The same greedy answers, decoded and simulated",
        line_chart(lines, x_name=MINUTES, y_name="tokens a round"),
        "Both curves are one where training and serving compute the same function.",
    )
    return section("Can it be believed", grid(calibration if series else "", parity if parities else ""))


def samples(story: Story) -> str:
    samples = [Sample.from_dict(values) for values in (story.best or {}).get("samples", [])]
    if not samples:
        return ""
    legend = f'<p class="quiet">{SAMPLE_LEGEND}</p>'
    return section(f"Answers {BEST}", card("", "".join(sample.to_html() for sample in samples) + legend))


def machine(story: Story) -> str:
    split = story.time_split()
    memory = {
        name: Series(name=name, points=story.curve(key, story.trainings), colour=place)
        for place, (name, key) in enumerate((("main memory", "peak_rss_gb"), ("GPU", "peak_gpu_gb")))
    }
    measured = [one for one in memory.values() if one.points]
    timed = [record for record in story.evaluations if record.get("speed")]
    speeds = [
        Series(
            name=label,
            points=[(record["train_seconds"] / 60, record["speed"][name]) for record in timed],
            colour=place,
        )
        for place, (name, label) in enumerate(
            (("tokens_per_second", "with the head"), ("plain_tokens_per_second", "plain"))
        )
    ]
    return section(
        "Time and memory",
        grid(
            card(
                "Training throughput",
                _single(story, "tokens_per_second", story.trainings, "tokens a second", average=True),
            ),
            card("Decoding speed", line_chart(speeds, x_name=MINUTES, y_name="tokens a second")) if timed else "",
            card("Where training time went", share_bar(list(split.items()))) if split else "",
            card("Peak memory", line_chart(measured, x_name=MINUTES, y_name="GB")) if measured else "",
            card("Time of evaluations", _evaluation_times(story)),
        ),
    )


def _evaluation_times(story: Story) -> str:
    spent: dict[str, float] = {}
    for record in story.evaluations:
        parts = record.get("seconds_by_part") or {"all parts": record.get("seconds", 0.0)}
        for name, seconds in parts.items():
            spent[name] = spent.get(name, 0.0) + float(seconds)
    total, training = sum(spent.values()), float(story.position.get("train_seconds", 0.0))
    if not total:
        return ""
    values = {name: f"{seconds:.1f} s" for name, seconds in spent.items()}
    return facts({**values, "all": f"{total:.1f} s, {total / (total + training):.0%} of the run"})


def data_and_plan(story: Story) -> str:
    account = {name.replace("_", " "): _counted(value) for name, value in story.data.items() if _is_plain(value)}
    for name, label in (("label_coverage", "labels in the draft vocabulary"), ("draft_vocab_size", "draft vocabulary")):
        value = story.fact(name)
        if value is not None:
            account[label] = f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
    return section(
        "Data, plan and outcome",
        grid(card("What became of the data", facts(account)), card("Planned and used", _plan_table(story))),
    )


def _plan_table(story: Story) -> str:
    position, settings = story.position, _settings(story)
    budget = {"steps": settings.get("steps"), "epochs": settings.get("epochs"), "minutes": settings.get("minutes")}
    used = {
        "steps": position["step"],
        "epochs": position.get("epoch"),
        "minutes": float(position.get("train_seconds", 0.0)) / 60,
    }
    rows = [(name, _number(budget[name]), _number(used[name])) for name in budget]
    planned = _planned(story)
    rows.append(("token visits", _number(planned.get("tokens")), _number(position.get("tokens"))))
    speeds = [value for _, value in story.curve("tokens_per_second", story.trainings)]
    average = sum(speeds) / len(speeds) if speeds else None
    rows.append(("tokens a second", _number(planned.get("tokens_per_second")), _number(average)))
    peaks = [value for _, value in story.curve("peak_rss_gb", story.trainings)]
    rows.append(("peak memory, GB", _number(planned.get("memory_gb")), _number(max(peaks, default=None))))
    kept = [row for row in rows if row[1:] != ("-", "-")]
    return table(("", "planned", "used"), kept)


def _planned(story: Story) -> dict[str, float]:
    """What `headstart plan --keep` foretold of what the run knows of itself."""
    budget, times = story.plan.get("budget") or {}, story.plan.get("times") or {}
    found = {"tokens": budget.get("tokens"), "memory_gb": story.plan.get("host_bytes", 0) / 1e9 or None}
    seconds = float(times.get("features", 0.0)) + float(times.get("training", 0.0))
    if found["tokens"] and seconds:
        found["tokens_per_second"] = found["tokens"] / seconds
    return {name: float(value) for name, value in found.items() if value}


def _by_depth(curves: Sequence[Sequence[tuple[float, float]]]) -> list[Series]:
    return [
        Series(name=f"depth {depth}", points=curve, colour=depth - 1) for depth, curve in enumerate(curves, start=1)
    ]


def _averaged(curves: Sequence[Sequence[tuple[float, float]]]) -> Iterator[Series]:
    """Each curve pale as logged, and averaged over neighbours."""
    for depth, curve in enumerate(curves, start=1):
        values = smoothed([value for _, value in curve])
        points = [(minutes, value) for (minutes, _), value in zip(curve, values, strict=True)]
        yield Series(name="", points=curve, colour=depth - 1, style="pale")
        yield Series(name=f"depth {depth}", points=points, colour=depth - 1)


def _single(story: Story, name: str, records: Sequence[Record], y_name: str, *, average: bool = False) -> str:
    curve = story.curve(name, records)
    series = list(_averaged([curve])) if average else [Series(name=y_name, points=curve)]
    return line_chart(series, x_name=MINUTES, y_name=y_name)


def _bars(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, str]]:
    return [
        (name, measured["accepted_length"], f"{measured['num_rounds']:,} rounds") for name, measured in parts.items()
    ]


def _settings(story: Story) -> Mapping[str, Any]:
    """The `train` section of the recipe; empty where it cannot be read."""
    import yaml

    try:
        whole = yaml.safe_load(story.config) or {}
    except yaml.YAMLError:
        return {}
    found = whole.get("train") if isinstance(whole, dict) else None
    return found if isinstance(found, dict) else {}


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, Mapping) and all(map(_is_plain, value.values())))


def _counted(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_counted(each)}" for name, each in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
