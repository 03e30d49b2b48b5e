"""The power of the mechanism audit: the same audit and its controls, many times, at ε = 1, 2 and 4.

    python -m benchmarks.audit --repeats 100        # writes docs/audit/power.json and docs/audit/mechanism.png

The noise is Gaussian, which is fast; `datalens audit mechanism` audits the discrete Gaussian too.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from datalens.evaluate.audits.mechanism import make_mechanism
from datalens.privacy import audit
from datalens.progress import bar

EPSILONS = (1.0, 2.0, 4.0)
DELTA = 1e-5
HONEST = "as it is"


def measure(repeats: int, trials: int) -> list[dict[str, Any]]:
    """Return a row for each ε and subject."""
    make = functools.partial(make_mechanism, "gaussian")
    rows = []
    with bar("audits", repeats * len(EPSILONS) * 4) as (progress, task):
        for epsilon in EPSILONS:
            plan = audit.Plan(epsilon=epsilon, delta=DELTA, trials=trials)
            for subject in (audit.honest(plan, make), *audit.controls(plan, make)):
                findings = []
                for _ in range(repeats):
                    findings.append(audit.audit(subject, plan))
                    progress.advance(task)
                bounds = np.array([one.lower_bound for one in findings])
                rows.append(
                    {
                        "subject": subject.name,
                        "claimed": epsilon,
                        "delta": DELTA,
                        "trials": trials,
                        "repeats": repeats,
                        "bound_median": float(np.median(bounds)),
                        "bound_5": float(np.quantile(bounds, 0.05)),
                        "bound_95": float(np.quantile(bounds, 0.95)),
                        "verdict_median": float(np.median([one.verdict_bound for one in findings])),
                        "called_broken": float(np.mean([one.broken for one in findings])),
                        "reached_half": float(np.mean(bounds >= epsilon / 2)),
                    }
                )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["subject"] for row in rows))
    styles = dict(zip(names, (("#1b6ca8", "o"), ("#c0392b", "s"), ("#d68910", "^"), ("#7d3c98", "D")), strict=True))
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    top = 1.06 * max(row["bound_95"] for row in rows)
    axes.fill_between([0, top], [0, top], top, color="#c0392b", alpha=0.07, lw=0)
    axes.plot([0, 5], [0, 5], color="black", lw=1.2, label="the claim")
    axes.plot([0, 5], [0, 2.5], color="black", lw=1, ls=":", label="half of it")
    for place, name in enumerate(names):
        mine = [row for row in rows if row["subject"] == name]
        middle = np.array([row["bound_median"] for row in mine])
        spread = [middle - [row["bound_5"] for row in mine], [row["bound_95"] for row in mine] - middle]
        at = np.array([row["claimed"] for row in mine]) + (0 if name == HONEST else 0.06 * (place - 2))
        colour, marker = styles[name]
        label = "our mechanism" if name == HONEST else f"control: {name}"
        axes.errorbar(at, middle, yerr=spread, color=colour, marker=marker, ls="none", ms=6, capsize=3, label=label)
    axes.text(0.12, 0.93 * top, "more leaks than is claimed", color="#c0392b", fontsize=9)
    axes.set(xlim=(0, 4.6), ylim=(0, top), xticks=[0, *EPSILONS])
    trials, repeats = rows[0]["trials"], rows[0]["repeats"]
    axes.set_xlabel(f"claimed ε (δ = {DELTA:g}, add-remove, exact accountant)")
    axes.set_ylabel(f"lower bound on ε at δ = {DELTA:g}, 95 % confidence")
    axes.set_title(f"Mechanism audit: {trials} releases a world, median and 5-95 % of {repeats} audits", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(0.0, 0.62), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="number of audits for each ε and subject")
    parser.add_argument("--trials", type=int, default=10_000, help="number of releases in each of the two worlds")
    parser.add_argument("--out", type=Path, default=Path("docs/audit"), help="folder for results and plot")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = measure(options.repeats, options.trials)
    (options.out / "power.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    plot(rows, options.out / "mechanism.png")
    for row in rows:
        print(
            f"claimed ε = {row['claimed']:g} (δ = {row['delta']:g}, add-remove, exact accountant), {row['subject']}: "
            f"bound {row['bound_median']:.2f} [{row['bound_5']:.2f}, {row['bound_95']:.2f}], "
            f"called broken {row['called_broken']:.0%}, reached half {row['reached_half']:.0%}"
        )


if __name__ == "__main__":
    main()
