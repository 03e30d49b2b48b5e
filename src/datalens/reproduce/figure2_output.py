"""What Figure 2 is written as: Markdown, CSV, JSON and a plot. Every one of them says that it is for the owner."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from datalens.privacy import bounds
from datalens.privacy.ledger import upwards
from datalens.reproduce.figure2 import COST, DELTA, EPSILON, TITLE, epsilon_by
from datalens.run.folder import write_atomically

COLUMNS = (
    *("panel", "queries", "rdp", "exact", "data_dependent", "smaller_of_both"),
    *("smaller_is_data_dependent", "smaller_is_data_independent", "inapplicable", "delta", "relation", "warning"),
)


def write(
    shown: list[dict[str, Any]], left_out: list[str], others: list[dict[str, Any]], folder: Path, *, full: bool
) -> dict[str, Any]:
    """Markdown, CSV, JSON and a plot. Returns where they are."""
    base = folder / "figure2"
    content = {"full": full, "warning": bounds.WARNING, "delta": DELTA, "relation": "add-remove", "left_out": left_out}
    content["whatever_the_votes"] = others
    write_atomically(base.with_suffix(".json"), json.dumps(content | {"panels": shown}, indent=1).encode())
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        for panel in shown:
            for point in panel["curve"]:
                value = "inapplicable" if point["data_dependent"] is None else point["data_dependent"]
                facts = {"delta": DELTA, "relation": "add-remove", "warning": bounds.WARNING}
                writer.writerow({"panel": panel["name"], **point, "data_dependent": value, **facts})
    write_atomically(base.with_suffix(".md"), _markdown(shown, left_out, others, full=full).encode())
    if shown:
        _plot(shown, base.with_suffix(".png"))
    rows = [{key: value for key, value in p.items() if key not in ("curve", "log10_agreement")} for p in shown]
    ends = [{"panel": p["name"], **p["curve"][-1]} for p in shown]
    names = {"markdown": "md", "csv": "csv"} | ({"plot": "png"} if shown else {})
    return {"table": "figure2", **content, **{k: f"{base}.{v}" for k, v in names.items()}, "rows": rows, "ends": ends}


def _markdown(shown: list[dict[str, Any]], left_out: list[str], others: list[dict[str, Any]], *, full: bool) -> str:
    lines = [
        f"# {TITLE} ({'full' if full else 'quick'})",
        "",
        f"**{bounds.WARNING}**",
        "",
        "The paper plots both curves, for MNIST and CelebA-Hair, up to ε = 1 by the data-independent one, prints no "
        "numbers, and says that the "
        f"data-independent bound is always the tighter one. Here every ε is at {COST}.",
    ]
    for panel in shown:
        lines += ["", *_panel_lines(panel)]
    if left_out:
        lines += ["", *left_out]
    lines += ["", "## Sets that the paper does not plot, and says are alike", ""]
    lines += [f"- {_title(other)}. {_ceiling(other)}" for other in others]
    return "\n".join(lines) + "\n"


def _panel_lines(panel: dict[str, Any]) -> list[str]:
    end, at = panel["curve"][-1], panel["queries_at_epsilon"]
    agreement = panel["log10_agreement"]
    dependent = end["data_dependent"]
    by_theorem4 = "inapplicable" if dependent is None else upwards(dependent, 4)
    return [
        f"## {_title(panel)}",
        "",
        f"Votes: {panel['how']}. {panel['queries']} queries were looked at, {panel['date']}.",
        "",
        f"| bound | ε after {end['queries']} queries ({COST}) | queries until ε = {EPSILON:g} |",
        "|---|---|---|",
        f"| data-independent, the paper's rdp accountant | {upwards(end['rdp'], 4)} | {at['rdp']} |",
        f"| data-independent, exact accountant | {upwards(end['exact'], 4)} | {at['exact']} |",
        f"| data-dependent (Theorem 4), rdp conversion | {by_theorem4} | — |",
        f"| per query the smaller of both, rdp conversion: data-dependent for {end['smaller_is_data_dependent']}, "
        f"data-independent for {end['smaller_is_data_independent']} (inapplicable for {end['inapplicable']}) | "
        f"{upwards(end['smaller_of_both'], 4)} | — |",
        "",
        f"- Theorem 4 applies to {panel['applicable']} of {panel['queries']} queries.",
        f"- Pr[M = ḡ*] = 1 − q of the likeliest outcome: from 10^{min(agreement):.1f} to 10^{max(agreement):.1f}.",
        f"- {_ceiling(panel)}",
    ]


def _title(panel: dict[str, Any]) -> str:
    s = panel["settings"]
    return f"{panel['name']}: σ = {s['sigma']:g}, k = {s['k']} of {s['d']}, N = {s['teachers']}, β = {s['beta']:g}"


def _ceiling(panel: dict[str, Any]) -> str:
    return (
        f"No votes whatever could bring Pr[M = ḡ*] above 10^{panel['log10_most_agreement']:.1f} at these N, k, β, σ "
        f"and d. To apply, Theorem 4 needs {_percent(panel['log10_agreement_to_apply'])}; to be below Theorem 3 at any "
        f"order, {_percent(panel['log10_agreement_to_pay'])}."
    )


def _percent(log10: float) -> str:
    return f"{100 * 10**log10:.2g} %"


def _plot(shown: list[dict[str, Any]], path: Path) -> None:
    """Above: ε. Below: how likely the likeliest outcome is, and how likely it would have to be."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6.4 * len(shown), 7.4)
    figure, axes = plt.subplots(2, len(shown), figsize=size, layout="constrained", squeeze=False)
    for column, panel in enumerate(shown):
        _plot_epsilon(axes[0][column], panel)
        _plot_agreement(axes[1][column], panel)
    figure.suptitle(f"ε at {COST}. {bounds.WARNING}", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_epsilon(axes: Any, panel: dict[str, Any]) -> None:
    s, at = panel["settings"], panel["queries_at_epsilon"]
    mu_squared = 4 * s["k"] / s["sigma"] ** 2
    for accountant, colour, label in (
        ("rdp", "#9aa5b1", "data-independent, the paper's rdp accountant"),
        ("exact", "#2463b4", "data-independent, exact accountant"),
    ):
        queries = np.unique(np.linspace(1, at[accountant], 120).astype(int))
        axes.plot(queries, [epsilon_by(accountant, n * mu_squared) for n in queries], color=colour, label=label)
        axes.plot([at[accountant]], [epsilon_by(accountant, at[accountant] * mu_squared)], "o", color=colour)
        axes.annotate(str(at[accountant]), (at[accountant], EPSILON), (0, -14), textcoords="offset points", ha="center")
    found = [(p["queries"], p["data_dependent"]) for p in panel["curve"] if p["data_dependent"] is not None]
    if found:
        axes.plot(*zip(*found, strict=True), color="#c2410c", label="data-dependent (Theorem 4), rdp conversion")
    note = f"data-dependent (Theorem 4): inapplicable at {panel['queries'] - panel['applicable']} of the"
    axes.text(
        0.98,
        0.04,
        f"{note}\n{panel['queries']} queries looked at",
        transform=axes.transAxes,
        ha="right",
        color="#c2410c",
    )
    axes.axhline(EPSILON, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlabel="queries (synthetic images)", ylabel="ε", ylim=(0, 1.15 * EPSILON))
    axes.set_title(f"{panel['name']}, σ = {s['sigma']:g}, k = {s['k']} of {s['d']}, N = {s['teachers']}")
    axes.legend(frameon=False, loc="upper left", fontsize=8)


def _plot_agreement(axes: Any, panel: dict[str, Any]) -> None:
    values = panel["log10_agreement"]
    axes.plot(range(1, len(values) + 1), values, ".", color="#c2410c", markersize=3, label="measured, each query")
    for name, style, label in (
        ("log10_most_agreement", "--", "the most that any votes could give"),
        ("log10_agreement_to_apply", "-", "what Theorem 4 needs to apply"),
    ):
        axes.axhline(panel[name], color="black", linewidth=0.9, linestyle=style, label=label)
    lowest = min(-3.0, *values)
    axes.set(xlabel="query", ylabel="log10 Pr[M = ḡ*]", ylim=(1.1 * lowest, -0.08 * lowest))
    axes.legend(frameon=False, loc="center", fontsize=8)
