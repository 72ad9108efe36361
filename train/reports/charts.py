"""Charts as inline SVG: lines with error bars, bars, and a bar of shares. Colours come from the page (`page.STYLE`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
NUM_COLOURS = 6
_LONGEST_CURVE = 400
"""Of a longer one every so-manyth point is drawn."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve. errors: half-widths of its error bars. colour: a place in the palette. style: line, dashed, pale (behind
    its own average) or dots."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = "line"
    errors: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to pixels of one axis."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def line_chart(
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    y_range: tuple[float, float] | None = None,
    x_range: tuple[float, float] | None = None,
    diagonal: bool = False,
    log_x: bool = False,
) -> str:
    """Curves over one axis, with a legend below. diagonal: a faint line where both axes agree. log_x: the x values are
    log2 of amounts, and marked as amounts."""
    series = [one for one in series if one.points]
    if not series:
        return '<p class="none">nothing was measured</p>'
    x_scale, y_scale = _scales(series, x_range, y_range)
    parts = [_grid(x_scale, y_scale, log_x=log_x), _names(x_name, y_name)]
    if diagonal:
        ends = (max(x_scale.low, y_scale.low), min(x_scale.high, y_scale.high))
        path = " ".join(f"{x_scale(end):.1f},{y_scale(end):.1f}" for end in ends)
        parts.append(f'<polyline class="diagonal" points="{path}"/>')
    parts += [piece for one in series for piece in _curve(one, x_scale, y_scale)]
    return _svg(parts, HEIGHT) + _legend(series)


def bar_chart(bars: Sequence[tuple[str, float, str]], *, baseline: float = 0.0, unit: str = "") -> str:
    """Horizontal bars of (label, value, note) that begin at `baseline`."""
    if not bars:
        return '<p class="none">nothing was measured</p>'
    row, left = 30, 150
    top = max(max(value for _, value, _ in bars), baseline + 1e-9)
    scale = Scale(low=baseline, high=baseline + (top - baseline) * 1.02, start=left, stop=WIDTH - 60)
    parts = []
    for place, (label, value, note) in enumerate(bars):
        y = place * row + 4
        width = max(0.0, scale(value) - left)
        parts.append(
            f'<text class="label" x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>'
            f'<text class="note" x="{left - 8}" y="{y + 23}" text-anchor="end">{escape(note)}</text>'
            f'<rect class="fill c0" x="{left}" y="{y}" width="{width:.1f}" height="{row - 8}" rx="3"/>'
            f'<text class="label" x="{left + width + 6:.1f}" y="{y + 15}">{value:.2f}{escape(unit)}</text>'
        )
    return _svg(parts, len(bars) * row + 8)


def column_chart(columns: Sequence[tuple[str, float]], *, x_name: str, y_name: str) -> str:
    """Vertical bars of (label, count)."""
    if not columns:
        return '<p class="none">nothing was measured</p>'
    total = sum(count for _, count in columns) or 1.0
    y_scale = Scale(low=0.0, high=max(count for _, count in columns) * 1.12, start=HEIGHT - BOTTOM, stop=TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(columns)
    parts = [_names(x_name, y_name), *_horizontal_lines(y_scale)]
    for place, (label, count) in enumerate(columns):
        x, y, foot = LEFT + (place + 0.18) * slot, y_scale(count), HEIGHT - BOTTOM + 15
        middle = LEFT + (place + 0.5) * slot
        parts.append(
            f'<rect class="fill c0" x="{x:.1f}" y="{y:.1f}" width="{slot * 0.64:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}" rx="3"><title>{count:,.0f} of {total:,.0f}</title></rect>'
            f'<text class="tick" x="{middle:.1f}" y="{y - 4:.1f}" text-anchor="middle">{count / total:.0%}</text>'
            f'<text class="tick" x="{middle:.1f}" y="{foot}" text-anchor="middle">{escape(label)}</text>'
        )
    return _svg(parts, HEIGHT)


def share_bar(parts: Sequence[tuple[str, float]]) -> str:
    """One bar cut into shares that add up to one, with a legend."""
    x, drawn, names = 0.0, [], []
    for place, (name, share) in enumerate(parts):
        width = share * WIDTH
        drawn.append(
            f'<rect class="fill c{place % NUM_COLOURS}" x="{x:.1f}" y="0" width="{width:.1f}" height="26">'
            f"<title>{escape(name)}: {share:.1%}</title></rect>"
        )
        names.append(_swatch(f"{name} {share:.0%}", place))
        x += width
    return _svg(drawn, 26) + f'<p class="legend">{"".join(names)}</p>'


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def amount(value: float) -> str:
    """A number in few characters: 1.5k, 2M, 0.25, 1e-4."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.3g}{letter}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.2g}" if abs(value) < 1e-4 else f"{value * 1e4:.3g}e-4"
    return f"{value:.4g}"


def _scales(
    series: Sequence[Series], x_range: tuple[float, float] | None, y_range: tuple[float, float] | None
) -> tuple[Scale, Scale]:
    xs = [x for one in series for x, _ in one.points] if x_range is None else list(x_range)
    lows, highs = [], []
    for one in series:
        errors = [*one.errors, *[0.0] * (len(one.points) - len(one.errors))]
        lows += [y - error for (_, y), error in zip(one.points, errors, strict=True)]
        highs += [y + error for (_, y), error in zip(one.points, errors, strict=True)]
    low, high = y_range or _padded(min(lows), max(highs))
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    margin = 0.02 * (x_high - x_low)
    return (
        Scale(low=x_low - margin, high=x_high + margin, start=LEFT, stop=WIDTH - RIGHT),
        Scale(low=low, high=high, start=HEIGHT - BOTTOM, stop=TOP),
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < margin * 4 else low - margin), high + margin


def _grid(x_scale: Scale, y_scale: Scale, *, log_x: bool) -> str:
    parts = list(_horizontal_lines(y_scale))
    for value in ticks(x_scale.low, x_scale.high):
        label = amount(2**value) if log_x else amount(value)
        x = x_scale(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _horizontal_lines(y_scale: Scale) -> Iterator[str]:
    for value in ticks(y_scale.low, y_scale.high):
        y = y_scale(value)
        yield (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{amount(value)}</text>'
        )


def _names(x_name: str, y_name: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}'
        f'</text><text class="axis" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>"
    )


def _curve(one: Series, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    stride = max(1, len(one.points) // _LONGEST_CURVE)
    places = [(x_scale(x), y_scale(y)) for x, y in one.points[::stride]]
    colour = f"c{one.colour % NUM_COLOURS}"
    for (x, y), error in zip(one.points, one.errors, strict=False):
        bottom, top = y_scale(y - error), y_scale(y + error)
        yield f'<path class="error {colour}" d="M{x_scale(x):.1f} {bottom:.1f}V{top:.1f}"/>'
    if one.style != "dots":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="{one.style} {colour}" points="{path}"/>'
    if one.style != "pale" and len(places) <= 40:
        for (x, y), (value, height) in zip(places, one.points[::stride], strict=True):
            title = f"{escape(one.name)}: {height:.4g} at {value:.4g}"
            yield f'<circle class="fill {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"><title>{title}</title></circle>'


def _legend(series: Sequence[Series]) -> str:
    named = [one for one in series if one.name and one.style != "pale"]
    if len(named) < 2:
        return ""
    return f'<p class="legend">{"".join(_swatch(one.name, one.colour, one.style) for one in named)}</p>'


def _swatch(name: str, colour: int, style: str = "line") -> str:
    return f'<span><i class="swatch {style} c{colour % NUM_COLOURS}"></i>{escape(name)}</span>'


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
