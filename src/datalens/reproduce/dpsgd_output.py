"""How Tables 8-11 and Figure 3 are shown: Markdown, CSV, JSON, and a plot in the form of Figure 3."""

import csv
import json
from pathlib import Path
from typing import Any

from datalens.reproduce.appendix_a import INF, TITLES
from datalens.reproduce.output import show_cost
from datalens.run.folder import write_atomically

DELTA = 1e-5
Line = dict[str, Any]


def note(full: bool) -> str:
    how = (
        "Ours: a mean of the weights in which late ones weigh most, which costs no privacy and is what `datalens sgd` "
        "releases; last: the last weights of the same runs, as in the paper. The settings are the best of those "
        "Table 11 prints (of the nearest ε) and a small grid of our own, chosen with seeds of their own by accuracy on "
        "a sixth of the training records, held out; at printed: ours, at the settings of Table 11 for this very cell. "
        "**That choice is not covered by ε**. Steps are what ε buys by the PRV accountant."
        if full
        else "**quick: 100 steps of fixed settings, one seed, and of CIFAR-10 2000 training and 1000 test records at "
        "112 pixels; noise is what ε then needs. Not comparable with the paper's figures.**"
    )
    return (
        f"{how} CIFAR-10: a linear head on frozen features (see the column extractor; the paper's are ResNet-18's). "
        "± is the standard deviation over seeds. ε is for add-remove, at δ = 1e-05. Certificates: how the SHA-256 of "
        "each training's begins. Accuracy on real test records is for the owner: it is not covered by ε either."
    )


def write(name: str, lines: list[Line], folder: Path, *, full: bool) -> dict[str, Any]:
    base = folder / name
    content = {"table": name, "full": full, "note": note(full), "rows": lines}
    write_atomically(base.with_suffix(".json"), json.dumps(content, indent=1).encode())
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(
            {key: " ".join(value) if isinstance(value, list) else value for key, value in line.items()}
            for line in lines
        )
    heading = f"# {TITLES[name]} ({'full' if full else 'quick'})\n\n{note(full)}\n\n"
    write_atomically(base.with_suffix(".md"), (heading + _markdown(lines)).encode())
    shown = {"table": name, "full": full, "markdown": f"{base}.md", "csv": f"{base}.csv", "rows": lines}
    if any(line["ours"] is not None for line in lines):
        _plot(name, lines, base.with_suffix(".png"))
        shown["plot"] = f"{base}.png"
    return shown


def _markdown(lines: list[Line]) -> str:
    rows = [
        "| row | method | paper | ours | difference | last | at printed | ε spent, δ, relation, accountant | C | "
        "σ | batch | rate | steps | epochs | extractor | certificates |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in lines:
        paper = "—" if r["paper"] is None else f"{r['paper']:.2f} ± {r['paper_spread']:.2f}"
        spread = f"± {r['spread']:.2f} ({r['seeds']})" if r["seeds"] > 1 else "(1)"
        ours = "—" if r["ours"] is None else f"{r['ours']:.2f} {spread}"
        difference = "—" if r["difference"] is None else f"{r['difference']:+.2f}"
        mean = "—" if r["last"] is None else f"{r['last']:.2f}"
        varied = f" ± {r['at_printed_spread']:.2f}" if r["at_printed_spread"] else ""
        same = "—" if r["at_printed"] is None else f"{r['at_printed']:.2f}{varied}"
        cost = "—"
        if r["epsilon_spent"] is not None:
            cost = show_cost(r)
        elif r["steps"] is None:
            cost = "not run, or no noise reaches this ε"
        sigma = "—" if r["sigma"] is None else f"{r['sigma']:.3g}"
        others = " | ".join("—" if r[key] is None else f"{r[key]}" for key in ("batch", "rate", "steps", "epochs"))
        rows.append(
            f"| {r['row']} | {r['column']} | {paper} | {ours} | {difference} | {mean} | {same} | {cost} | "
            f"{r['clip'] or '—'} | {sigma} | {others} | {r['extractor'] or '—'} | "
            f"{', '.join(sha256[:8] or '—' for sha256 in r['certificates']) or '—'} |"
        )
    return "\n".join(rows) + "\n"


def _plot(name: str, lines: list[Line], path: Path) -> None:
    """Figure 3's panels: accuracy against ε, ours as lines, the paper's as crosses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def epsilon(line: Line) -> float:
        text = line["row"].split("ε=")[1].split(",")[0]
        return INF if text == "∞" else float(text)

    panels = [
        ("(a) MNIST", [r for r in lines if r["row"].startswith("MNIST")]),
        ("(b) CIFAR-10, small ε", [r for r in lines if r["row"].startswith("CIFAR") and epsilon(r) <= 0.4]),
        ("(c) CIFAR-10, large ε", [r for r in lines if r["row"].startswith("CIFAR") and epsilon(r) >= 0.4]),
    ]
    panels = [(title, [r for r in rows if epsilon(r) < INF and r["ours"] is not None]) for title, rows in panels]
    panels = [(title, rows) for title, rows in panels if rows]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(max(7.0, 5.2 * len(panels)), 4.2), layout="constrained", squeeze=False
    )
    columns = list(dict.fromkeys(r["column"] for _, rows in panels for r in rows))
    for place, (title, rows) in zip(axes[0], panels, strict=True):
        for column in dict.fromkeys(r["column"] for r in rows):
            own = sorted((r for r in rows if r["column"] == column), key=epsilon)
            at = [epsilon(r) for r in own]
            colour = f"C{columns.index(column)}"  # the same in every panel
            place.errorbar(
                at, [r["ours"] for r in own], [r["spread"] for r in own], fmt="o-", ms=3, color=colour, label=column
            )
            printed = [(e, r["paper"]) for e, r in zip(at, own, strict=True) if r["paper"] is not None]
            if printed:
                place.plot(*zip(*printed, strict=True), "x", color=colour)
        place.set(
            title=title, xlabel="ε (δ = 1e-05, add-remove; prv, DPDL: moments)", ylabel="accuracy, %", xscale="log"
        )
        shown = sorted({epsilon(r) for r in rows})
        place.set_xticks(shown, [f"{e:g}" for e in shown], fontsize=8)
        place.minorticks_off()
        place.legend(frameon=False, fontsize=7, loc="lower right")
    figure.suptitle(f"{TITLES[name]}: ours (lines), the paper's (crosses)", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
