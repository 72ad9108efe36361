"""The frame of `report.html`: one file, no scripts, nothing fetched, readable by day and by night and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from train.reports.samples import SAMPLE_STYLE

STYLE = (
    """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1c2330; --quiet: #667085; --line: #e1e5eb;
  --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #dc2626; --c4: #7c3aed; --c5: #0891b2; --heat: 37, 99, 235;
  --warn: #fff4e0; --warn-line: #e8a33d; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161d; --card: #1a2029; --ink: #e4e8ef; --quiet: #94a0b3;
  --line: #2c3542; --c0: #6ea3ff; --c1: #f3b04f; --c2: #4fce9c; --c3: #ff8080; --c4: #b794f6; --c5: #54c7dc;
  --heat: 110, 163, 255; --warn: #33270f; --warn-line: #b98324; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.12rem; margin: 34px 0 10px; }
h3 { font-size: .92rem; margin: 0 0 8px; font-weight: 600; }
.status { color: var(--quiet); margin: 4px 0 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 1.5rem; font-weight: 650; letter-spacing: -.02em; }
.tile span { color: var(--quiet); font-size: .84rem; }
.card + .card, .grid2 + .card, details > .card { margin-top: 14px; } .grid2 > .card { margin-top: 0; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.warning { background: var(--warn); border-left: 4px solid var(--warn-line); border-radius: 6px; padding: 9px 13px;
  margin: 10px 0; }
.quiet, .none { color: var(--quiet); font-size: .87rem; margin: 6px 0 0; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 12px; } svg .tick, svg .note, svg .axis { fill: var(--quiet); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .diagonal { stroke: var(--quiet); stroke-dasharray: 3 4; fill: none; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .dashed { stroke-dasharray: 6 4; }
svg polyline.pale { stroke-width: 1; opacity: .28; } svg .error { stroke-width: 1.4; opacity: .65; }
"""
    + "".join(
        f"svg polyline.c{n}, svg .error.c{n} {{ stroke: var(--c{n}); }} svg .fill.c{n} {{ fill: var(--c{n}); }} "
        f".swatch.c{n} {{ border-color: var(--c{n}); }}\n"
        for n in range(6)
    )
    + """
.legend { margin: 8px 0 0; font-size: .84rem; display: flex; flex-wrap: wrap; gap: 4px 16px; }
.swatch { display: inline-block; width: 16px; border-top: 3px solid; margin: 0 6px 4px 0; vertical-align: middle; }
.swatch.dashed { border-top-style: dashed; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); }
th, td { padding: 5px 9px; border-top: 1px solid var(--line); }
tr:first-child th { border-top: 0; } td.number, th.number { text-align: right; }
.scroll { overflow-x: auto; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto;
  font-size: .82rem; margin: 8px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; } details { margin-top: 10px; }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""
    + SAMPLE_STYLE
)


def page(title: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Nothing where there is no part."""
    kept = [part for part in parts if part]
    return f"<section><h2>{escape(title)}</h2>{''.join(kept)}</section>" if kept else ""


def card(title: str, body: str, note: str = "") -> str:
    below = f'<p class="quiet">{escape(note)}</p>' if note else ""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="card">{heading}{body}{below}</div>' if body else ""


def grid(*cards: str) -> str:
    kept = [one for one in cards if one]
    return f'<div class="grid2">{"".join(kept)}</div>' if kept else ""


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Large figures, each with what it is."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in values
    )
    return f'<div class="tiles">{inner}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, num_texts: int = 1) -> str:
    """The first `num_texts` columns are text, the others numbers. `Heat` cells are shaded."""
    if not rows:
        return ""
    sides = ["" if place < num_texts else ' class="number"' for place in range(len(header))]
    head = "".join(f"<th{side}>{escape(name)}</th>" for name, side in zip(header, sides, strict=True))
    lines = "".join(
        f"<tr>{''.join(_cell(value, side) for value, side in zip(row, sides, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


class Heat(float):
    """A share, shown in per cent on a ground as dark as it is large."""


def facts(values: Mapping[str, Any]) -> str:
    """Names and values; nothing where there are none."""
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="number">{escape(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""


def _cell(value: Any, side: str) -> str:
    if isinstance(value, Heat):
        return f'<td{side} style="background: rgba(var(--heat), {0.75 * value:.2f})">{value:.1%}</td>'
    return f"<td{side}>{escape(str(value))}</td>"
