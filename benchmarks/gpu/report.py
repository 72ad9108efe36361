"""How findings are told: a table, JSON, and the README's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.findings import Timing, Verdict
from benchmarks.gpu.session import Session
from benchmarks.gpu.verdicts import verdicts


def table(session: Session) -> str:
    """Targets, then checks, then times (rounds as grids), then what did not run."""
    lines = [f"{each.status:12}  {each.target}{f': {each.value}' if each.value else ''}" for each in verdicts(session)]
    width = max((len(each.name) for each in session.checks), default=0)
    lines += [
        "",
        *(f"{'pass' if each.passed else 'FAIL'}  {each.name:{width}}  {each.detail}" for each in session.checks),
    ]
    lines += ["", f"{'value':>9} {'unit':8} {'floor':>8} {'ratio':>6}  measured"]
    for timing in session.timings:
        if timing.figures.get("what") == "round":
            continue
        floor = "" if timing.floor is None else f"{timing.floor:.4g}"
        ratio = "" if not timing.floor else f"{timing.value / timing.floor:.3g}"
        detail = f"  ({timing.detail})" if timing.detail else ""
        lines.append(f"{timing.value:9.4g} {timing.unit:8} {floor:>8} {ratio:>6}  {timing.name}{detail}")
    for grid in _rounds(session.timings):
        lines += ["", grid.replace("\n\n", "\n")]
    if session.skipped:
        lines += ["", "not run", *(f"  {each.part}: {each.reason}" for each in session.skipped)]
    return "\n".join(lines)


def as_json(session: Session) -> dict[str, Any]:
    return {
        "machine": session.machine,
        "verdicts": [asdict(each) for each in verdicts(session)],
        "checks": [asdict(each) for each in session.checks],
        "timings": [asdict(each) for each in session.timings],
        "skipped": [asdict(each) for each in session.skipped],
    }


def markdown(session: Session) -> str:
    """What the README shows: targets, plain steps beside their floors, rounds beside plain steps, a trained head."""
    parts = [
        _machine_line(session.machine),
        _rows(("target", "status", "found"), [_verdict_row(each) for each in verdicts(session)]),
        _plain_steps(session.timings),
        *_rounds(session.timings),
        _decoding(session.timings),
        _not_run(session),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine_line(machine: Mapping[str, Any]) -> str:
    device = machine.get("gpu", machine["cpu"])
    bandwidth = machine.get("bandwidth_gb_s")
    measured = f", {bandwidth:,.0f} GB/s measured" if bandwidth else ""
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{device}{measured}; {versions}, bfloat16; medians of wall clocks, one process."


def _verdict_row(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.target, verdict.status, verdict.value


def _plain_steps(timings: Sequence[Timing]) -> str:
    rows = []
    for timing in _of(timings, "plain step"):
        floor = "" if timing.floor is None else f"{timing.floor:.2f}"
        share = "" if timing.floor is None else f"{timing.floor / timing.value:.0%}"
        rows.append((timing.name, f"{timing.value:.2f}", floor, share))
    return _rows(("plain step", "ms", "floor, ms", "of the floor"), rows)


def _rounds(timings: Sequence[Timing]) -> list[str]:
    """For each batch and context: nodes down, depth across, a round over its plain step."""
    grids: dict[tuple[str, int, int], dict[tuple[int, int], float]] = {}
    plain_ms: dict[tuple[str, int, int], float] = {}
    for timing in _of(timings, "round"):
        figures = timing.figures
        place = (str(figures["shape"]), int(figures["batch"]), int(figures["context"]))
        grids.setdefault(place, {})[int(figures["nodes"]), int(figures["depth"])] = float(figures["ratio"])
        plain_ms[place] = float(figures["plain_ms"])
    return [
        f"Rounds of the {place[0]} shape over a plain step of {plain_ms[place]:.2f} ms, batch {place[1]}, context "
        f"{place[2]}:\n\n{_grid(grids[place])}"
        for place in sorted(grids)
    ]


def _grid(ratios: Mapping[tuple[int, int], float]) -> str:
    depths = sorted({depth for _, depth in ratios})
    rows = []
    for nodes in sorted({nodes for nodes, _ in ratios}):
        cells = [f"{ratios[nodes, depth]:.2f}" if (nodes, depth) in ratios else "" for depth in depths]
        rows.append((str(nodes), *cells))
    return _rows(("nodes", *(f"depth {depth}" for depth in depths)), rows)


def _decoding(timings: Sequence[Timing]) -> str:
    plain = {_place(timing): timing.value for timing in _of(timings, "plain decoding")}
    rows = []
    for timing in _of(timings, "speculative decoding"):
        batch, temperature = _place(timing)
        figures = timing.figures
        rows.append(
            (
                f"{batch:.0f}",
                f"{temperature:g}",
                f"{figures['nodes']}",
                f"{plain[batch, temperature]:,.0f}",
                f"{timing.value:,.0f}",
                f"{float(figures['speedup']):.2f}",
                f"{float(figures['tokens_per_round']):.2f}",
            )
        )
    titles = ("batch", "T", "nodes", "plain, tokens/s", "speculative", "times", "tokens a round")
    return _rows(titles, rows)


def _place(timing: Timing) -> tuple[float, float]:
    return float(timing.figures["batch"]), float(timing.figures["temperature"])


def _not_run(session: Session) -> str:
    return "\n".join(f"- not run: {each.part}: {each.reason}" for each in session.skipped)


def _of(timings: Sequence[Timing], what: str) -> list[Timing]:
    return [timing for timing in timings if timing.figures.get("what") == what]


def _rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; empty where there are no rows."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [titles, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )
