"""Line charts as inline SVG. Colours come from the page's style sheet, so they follow light and dark mode."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 44
MOST_POINTS = 240
STYLES = 6  # line styles that the style sheet defines


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart. `stairs`: draw it as a step function, constant until the next point."""

    name: str
    points: tuple[tuple[float, float], ...]
    stairs: bool = False
    dots: bool = False


def thinned(count: int, most: int = MOST_POINTS) -> list[int]:
    """Return at most `most` of the numbers 0 … count-1, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def line_chart(
    series: Sequence[Series], *, title: str, x: str, y: str, limit: float | None = None, limit_name: str = ""
) -> Markup:
    """Return a line chart with its legend, as an HTML figure. `limit`: a level to draw as a limit, with its name."""
    points = [(a, b) for one in series for a, b in one.points if math.isfinite(a) and math.isfinite(b)]
    if not points:
        return Markup()
    levels = [b for _, b in points] + ([] if limit is None else [limit])
    low = min(0.0, *levels) if min(levels) < 0.5 * max(levels) else min(levels)
    x_ticks, y_ticks = ticks(min(a for a, _ in points), max(a for a, _ in points)), ticks(low, max(levels))
    left = max(LEFT, 12 + 9 * max(len(f"{t:.6g}") for t in y_ticks))  # space for the longest number
    across, up = _scale(x_ticks, left, WIDTH - RIGHT), _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<line class="rule" x1="{left}" x2="{WIDTH - RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>' for t in y_ticks
    ]
    parts += [f'<text x="{left - 8}" y="{up(t) + 4:.1f}" text-anchor="end">{t:.6g}</text>' for t in y_ticks]
    parts += [
        f'<text x="{across(t):.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{t:.6g}</text>' for t in x_ticks
    ]
    parts.append(f'<text x="{(left + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>')
    if limit is not None:
        parts.append(
            f'<line class="limit" x1="{left}" x2="{WIDTH - RIGHT}" y1="{up(limit):.1f}" y2="{up(limit):.1f}"/>'
        )
    for number, one in enumerate(series):
        kept = [(across(a), up(b)) for a, b in one.points if math.isfinite(a) and math.isfinite(b)]
        parts.append(f'<path class="line s{number % STYLES}" d="{_path(kept, stairs=one.stairs)}"/>')
        if one.dots or len(kept) == 1:
            parts += [f'<circle class="dot s{number % STYLES}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in kept]
    keys = [(f"line s{number % STYLES}", one.name) for number, one in enumerate(series)]
    keys += [] if limit is None else [("limit", limit_name)]
    legend = "".join(
        f'<li><svg viewBox="0 0 28 10" width="28" height="10" aria-hidden="true"><path class="{kind}" d="M1 5H27"/>'
        f"</svg> {escape(name)}</li>"
        for kind, name in keys
    )
    return Markup(  # all texts were escaped above
        f'<figure class="chart"><figcaption>{escape(title)}<br><span class="soft">{escape(y)}</span></figcaption>'
        f'<ul class="legend">{legend}</ul>'
        f'<svg class="plot" role="img" aria-label="{escape(_description(series, title, x, y))}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'
    )


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about `wanted` round numbers, from at or below `low` to at or above `high`."""
    if high <= low:  # a single level: from zero to it
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _scale(marks: list[float], start: float, end: float) -> Callable[[float], float]:
    """Return the map from values to picture coordinates; the first tick is at `start`, the last at `end`."""
    factor = (end - start) / (marks[-1] - marks[0])
    return lambda value: start + (value - marks[0]) * factor


def _path(points: Sequence[tuple[float, float]], *, stairs: bool) -> str:
    parts: list[str] = []
    for a, b in points:
        if not parts:
            parts.append(f"M{a:.1f} {b:.1f}")
        else:
            parts.append(f"H{a:.1f}V{b:.1f}" if stairs else f"L{a:.1f} {b:.1f}")
    return "".join(parts)


def _description(series: Sequence[Series], title: str, x: str, y: str) -> str:
    """Return a description of the chart for screen readers."""
    ends = [
        f"{one.name}: from {one.points[0][1]:.4g} at {one.points[0][0]:.4g} to {one.points[-1][1]:.4g} "
        f"at {one.points[-1][0]:.4g}"
        for one in series
        if one.points
    ]
    return f"{title}. Line chart of {y} against {x}. {'; '.join(ends)}."
