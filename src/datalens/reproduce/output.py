"""What a table of `datalens reproduce` is written as: Markdown, CSV, JSON and a plot."""

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.privacy.ledger import upwards
from datalens.run.folder import write_atomically

if TYPE_CHECKING:
    from datalens.reproduce.harness import Cell, Table


def write(
    name: str, table: "Table", cells: "list[Cell]", results: dict[str, dict[str, Any]], folder: Path, *, full: bool
) -> dict[str, Any]:
    rows = table.rows(cells, results) if table.rows else [row_of(cell, results.get(cell.name)) for cell in cells]
    base = folder / name
    write_atomically(
        base.with_suffix(".json"), json.dumps({"table": name, "full": full, "rows": rows}, indent=1).encode()
    )
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    heading = f"# {table.title} ({'full' if full else 'quick'})\n\n{table.note(full)}\n\n"
    write_atomically(base.with_suffix(".md"), (heading + (table.markdown or markdown)(rows)).encode())
    (table.plot or plot_bars)(rows, table.title, base.with_suffix(".png"))
    return {
        "table": name,
        "full": full,
        "markdown": str(base.with_suffix(".md")),
        "csv": str(base.with_suffix(".csv")),
        "plot": str(base.with_suffix(".png")),
        "rows": rows,
    }


def row_of(cell: "Cell", result: dict[str, Any] | None) -> dict[str, Any]:
    """One flat line per cell; empty where the cell was not run or the paper has no figure."""
    score, trained = (result["utility"], result["train"]) if result else ({}, {})
    ours = score.get("accuracy")
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "ours": ours,
        "difference": round(ours - cell.paper, 4) if ours is not None and cell.paper is not None else None,
        "std": score.get("accuracy_std"),
        "best_epoch": score.get("accuracy_best_epoch"),
        "real": score.get("accuracy_real"),
        "epsilon": trained.get("epsilon"),
        "epsilon_spent": trained.get("epsilon_spent"),
        "delta": trained.get("delta"),
        "relation": trained.get("relation"),
        "accountant": trained.get("accountant"),
        "private": trained.get("private"),
        "steps": trained.get("steps"),
        "teachers": result["settings"].get("teachers") if result else None,
        "train_seconds": trained.get("seconds"),
        "certificate": result.get("certificate_sha256") if result else None,
    }


def show(value: float | None, digits: int = 4) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def show_ours(row: dict[str, Any]) -> str:
    return show(row["ours"]) + (f" ± {row['std']:.4f}" if row["std"] else "")


def show_cost(row: dict[str, Any]) -> str:
    """What a figure of ours cost: never ε without the rest."""
    spent = upwards(float(row["epsilon_spent"]), 4)
    cost = f"{spent}, {row['delta']:g}, {row['relation']}, {row['accountant']}"
    return cost + ("" if row["private"] else " NOT PRIVATE")


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | method | paper | ours | difference | best epoch¹ | real data² | ε spent, δ, relation, accountant | "
        "teachers | steps | seconds | certificate³ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cost = "not run" if r["ours"] is None else show_cost(r)
        difference = "—" if r["difference"] is None else f"{r['difference']:+.4f}"
        lines.append(
            f"| {r['row']} | {r['column']} | {show(r['paper'])} | {show_ours(r)} | {difference} | "
            f"{show(r['best_epoch'])} | {show(r['real'])} | {cost} | {r['teachers'] or '—'} | {r['steps'] or '—'} | "
            f"{show(r['train_seconds'], 1)} | {(r['certificate'] or '—')[:8]} |"
        )
    notes = (
        "\n±: the spread over classifiers, each trained on images of the same run; runs would differ by more.\n"
        "¹ The best epoch is chosen on the test set, as the paper's code does: only for comparison.\n"
        "² The same classifier trained on as many real images: the ceiling.\n"
        "³ How the SHA-256 of its certificate begins; the whole of it is in the cell's file.\n"
    )
    return "\n".join(lines) + "\n" + notes


def plot_bars(
    rows: list[dict[str, Any]],
    title: str,
    path: Path,
    *,
    label: str = "accuracy on real test images",
    high: float | None = 1.15,
) -> None:
    """Paper and ours side by side, for the cells we ran; and the best that others print, where a table has it.

    A panel for each line of the paper's table, its methods one below the other.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
    figure, axes = plt.subplots(
        down, across, figsize=(5.2 * across, sum(heights) + 0.8), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, (row, panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        axis.set_axis_on()
        _bars(axis, panel, most)
        axis.set(xlim=(0, most), ylim=(tallest[number // across] - 0.5, -0.5), title=row)
    for axis in axes[-1]:
        axis.set_xlabel(label)
    if panels:
        found = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat]
        named = {name: handle for pairs in found for handle, name in pairs}
        figure.legend(named.values(), named.keys(), loc="outside upper right", frameon=False, ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bars(axes: Any, panel: list[dict[str, Any]], most: float) -> None:
    """Lying, so that the names of methods can be read."""
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
