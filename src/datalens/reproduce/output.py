"""Write tables and figures of `datalens reproduce` as Markdown, CSV, JSON and plots."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datalens.files import write_atomically
from datalens.privacy.ledger import upwards

Row = dict[str, Any]


def write(
    name: str,
    title: str,
    folder: Path,
    *,
    full: bool,
    rows: list[Row],
    text: str,
    draw: Callable[[Path], None] | None = None,
    lines: list[Row] | None = None,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a table as Markdown, CSV, JSON and, if `draw` is given, as a plot. Return the paths and the rows.

    Args:
        name: the name of the files.
        title: the heading.
        folder: where to write.
        full: whether the results are of full mode.
        rows: the lines of the table.
        text: the Markdown below the heading.
        draw: draws the plot to the path that it is given.
        lines: the lines of the CSV, if they are not the rows.
        content: the content of the JSON, if it is not the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / name
    facts = {"table": name, "full": full}
    write_atomically(base.with_suffix(".json"), json.dumps(facts | (content or {"rows": rows}), indent=1).encode())
    lines = rows if lines is None else lines
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for line in lines for key in line)))
        writer.writeheader()
        for line in lines:
            writer.writerow({k: " ".join(v) if isinstance(v, list) else v for k, v in line.items()})
    heading = f"# {title} ({'full' if full else 'quick'})\n\n"
    write_atomically(base.with_suffix(".md"), (heading + text).encode())
    if draw is not None:
        draw(base.with_suffix(".png"))
    kinds = {"markdown": "md", "csv": "csv"} | ({} if draw is None else {"plot": "png"})
    return facts | {kind: f"{base}.{suffix}" for kind, suffix in kinds.items()} | {"rows": rows}


def show(value: float | None, digits: int = 4) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def show_ours(row: dict[str, Any]) -> str:
    return show(row["ours"]) + (f" ± {row['std']:.4f}" if row["std"] else "") + show_marks(row)


def show_marks(row: dict[str, Any]) -> str:
    """Return what stands in brackets after a figure (see `cells.marks`)."""
    return f" ({'; '.join(row['marks'])})" if row.get("marks") else ""


def show_cost(row: dict[str, Any]) -> str:
    """Return the privacy cost of a row: ε with its δ, relation and accountant."""
    spent = upwards(float(row["epsilon_spent"]), 4)
    cost = f"{spent}, {row['delta']:g}, {row['relation']}, {row['accountant']}"
    return cost + ("" if row["private"] else " NOT PRIVATE")


def plot_bars(
    rows: list[dict[str, Any]],
    title: str,
    path: Path,
    *,
    label: str = "accuracy on real test images",
    high: float | None = 1.15,
) -> None:
    """Draw the paper's value and ours side by side for the cells that were run, and the best published if known.

    There is a panel for each row of the paper's table, with its methods below each other.
    """
    from matplotlib.figure import Figure

    shown = [r for r in rows if r["ours"] is not None]
    panels = {row: [r for r in shown if r["row"] == row] for row in dict.fromkeys(r["row"] for r in shown)}
    most = high or 1.15 * max([1.0, *(r["ours"] for r in shown), *(r["paper"] or 0 for r in shown)])
    across = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    lengths = [len(panel) for panel in panels.values()] or [1]
    tallest = [
        max(lengths[start : start + across]) for start in range(0, len(lengths), across)
    ]  # in each line of panels
    heights = [0.8 + 0.42 * length for length in tallest]
    figure = Figure(figsize=(5.2 * across, sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, height_ratios=heights)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, (row, panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        axis.set_axis_on()
        _bars(axis, panel, most)
        axis.set(xlim=(0, most), ylim=(tallest[number // across] - 0.5, -0.5), title=row)
    for axis in axes[-1]:
        axis.set_xlabel(label)
    if panels:
        entries = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat]
        named = {name: handle for pairs in entries for handle, name in pairs}
        figure.legend(named.values(), named.keys(), loc="outside upper right", frameon=False, ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def _bars(axes: Any, panel: list[dict[str, Any]], most: float) -> None:
    """Draw horizontal bars, so that the names of methods can be read."""
    places = range(len(panel))
    beside = any(r["paper"] is not None for r in panel)
    off, width = (0.2, 0.38) if beside else (0.0, 0.7)
    digits = 3 if most < 2 else 2
    if beside:
        axes.barh([p - off for p in places], [r["paper"] or 0 for r in panel], width, label="paper", color="#9aa5b1")
    ours, spread = [r["ours"] for r in panel], [r["std"] or 0 for r in panel]
    axes.barh([p + off for p in places], ours, width, xerr=spread, label="ours", color="#2463b4")
    for p, r in zip(places, panel, strict=True):
        end = r["ours"] + (r["std"] or 0) + 0.01 * most
        axes.text(end, p + off, f"{r['ours']:.{digits}f}", va="center", fontsize=8)
        if r["paper"] is not None:
            axes.text(r["paper"] + 0.01 * most, p - off, f"{r['paper']:.{digits}f}", va="center", fontsize=8)
    if best := {p + off: r["best"] for p, r in zip(places, panel, strict=True) if r.get("best")}:
        axes.plot(list(best.values()), list(best), "k|", markersize=14, label="best published")
    axes.set_yticks(list(places), [r["column"] for r in panel], fontsize=8)
