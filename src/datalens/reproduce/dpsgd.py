"""Tables 8-11 and Figure 3 (Appendix A): DP-SGD with TopAgg compared with plain DP-SGD, on MNIST and CIFAR-10.

All of them share the same trainings (`dpsgd_runs`), so a training that one has run is not run again by the others.
"""

import fnmatch
import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import AccountantName
from datalens.progress import say
from datalens.reproduce import output
from datalens.reproduce.dpsgd_runs import DELTA, INF, SIZES, Lab, Setting, load, version
from datalens.reproduce.kept import kept_in, made_in

Line = output.Row

# --- the paper's printed values; accuracies in percent --------------------------------------------------------------

GM_DP = 1.0  # k of plain DP-SGD
TITLES = {
    "table8": "Table 8: DP-SGD with norm-based TopAgg (Appendix A)",
    "table9": "Table 9: DP-SGD with norm- and dimension-based TopAgg (Appendix A)",
    "table10": "Table 10: compression and noise, one without the other (Appendix A)",
    "table11": "Table 11: the paper's best settings of DP-SGD, and what they reach (Appendix A)",
    "figure3": "Figure 3: accuracy of DP-SGD against epsilon (Appendix A)",
}

# (data set, ε) → k (1: GM-DP) → (mean, spread), in percent.
KS = (0.6, 0.7, 0.8, GM_DP)


def _row(*values: float) -> dict[float, tuple[float, float]]:
    return {k: (values[2 * i], values[2 * i + 1]) for i, k in enumerate(KS)}


TABLE8: dict[tuple[str, float], dict[float, tuple[float, float]]] = {
    ("mnist", 0.05): _row(73.87, 4.77, 75.81, 3.59, 77.15, 2.89, 78.40, 4.00),
    ("mnist", 0.1): _row(85.67, 1.48, 86.12, 1.39, 85.88, 1.97, 84.55, 0.98),
    ("mnist", 0.2): _row(89.84, 0.64, 90.25, 0.40, 90.80, 1.04, 91.17, 0.37),
    ("mnist", 0.3): _row(91.21, 0.53, 91.85, 0.21, 92.35, 0.53, 93.31, 0.42),
    ("mnist", 0.5): _row(92.83, 0.52, 93.50, 0.75, 93.82, 0.46, 94.38, 0.24),
    ("mnist", 0.7): _row(94.41, 0.19, 94.61, 0.24, 94.65, 0.27, 95.08, 0.10),
    ("mnist", 1.0): _row(95.13, 0.33, 95.22, 0.20, 95.42, 0.20, 95.41, 0.26),
    ("mnist", INF): _row(97.94, 0.19, 98.58, 0.11, 98.79, 0.09, 99.08, 0.04),
    ("cifar10", 0.025): _row(42.18, 0.89, 44.32, 0.59, 45.87, 0.97, 41.58, 2.01),
    ("cifar10", 0.05): _row(65.10, 0.48, 71.47, 0.32, 72.03, 0.25, 71.29, 0.27),
    ("cifar10", 0.075): _row(74.70, 0.26, 75.22, 0.21, 75.62, 0.15, 75.13, 0.19),
    ("cifar10", 0.1): _row(75.56, 0.18, 76.91, 0.17, 77.65, 0.20, 77.05, 0.09),
    ("cifar10", 0.2): _row(79.44, 0.07, 80.23, 0.12, 80.76, 0.08, 80.37, 0.13),
    ("cifar10", 0.3): _row(80.19, 0.17, 81.70, 0.08, 82.15, 0.15, 82.19, 0.10),
    ("cifar10", 0.4): _row(81.91, 0.10, 82.86, 0.05, 82.82, 0.13, 82.80, 0.09),
    ("cifar10", 0.6): _row(82.56, 0.36, 82.91, 0.20, 83.44, 0.15, 83.46, 0.04),
    ("cifar10", 0.8): _row(83.40, 0.06, 83.67, 0.22, 84.10, 0.07, 84.44, 0.07),
    ("cifar10", 2.0): _row(84.34, 0.08, 84.80, 0.18, 85.18, 0.08, 85.97, 0.04),
    ("cifar10", 4.0): _row(84.82, 0.04, 85.11, 0.08, 85.40, 0.08, 86.63, 0.05),
    ("cifar10", 8.0): _row(85.13, 0.05, 85.37, 0.04, 85.62, 0.04, 87.05, 0.03),
    ("cifar10", INF): _row(85.19, 0.3, 85.42, 0.02, 85.80, 0.03, 87.85, 0.02),
}
# ε → k of the coordinates → (mean, spread).
TABLE9_DIM: dict[float, dict[float, tuple[float, float]]] = {
    0.05: {0.2: (74.25, 3.25), 0.4: (78.45, 2.89), 0.6: (73.55, 1.97)},
    0.1: {0.2: (83.65, 0.73), 0.4: (85.59, 1.39), 0.6: (86.41, 0.70)},
    0.2: {0.2: (89.10, 1.22), 0.4: (90.48, 0.73), 0.6: (89.30, 0.74)},
}
# (compression, noise) → ε → mean, spread; cells that our copy of the paper lacks are missing.
TABLE10: dict[tuple[str, str], dict[float, tuple[float, float]]] = {
    ("NormTopK", "σ²C²"): {0.1: (83.86, 1.49), 1.0: (94.95, 0.25)},
    ("NormTopK", "kσ²C²"): {0.1: (85.88, 1.97), 1.0: (95.42, 0.20)},
    ("NormTopK", "none"): {0.1: (91.96, 0.61), 1.0: (98.03, 0.09)},
    ("none", "σ²C²"): {0.1: (85.05, 1.85)},
    ("none", "none"): {0.1: (94.26, 0.43)},
}
# (data set, ε) → k → clip, σ, batch size, learning rate.
TABLE11: dict[tuple[str, float], dict[float, tuple[float, float, int, float]]] = {
    ("mnist", 0.05): {
        0.6: (10, 5.8, 128, 0.01), 0.7: (5, 6.6, 128, 0.01), 0.8: (5, 7.4, 128, 0.01), GM_DP: (3, 8.2, 128, 0.01),
    },
    ("mnist", 0.2): {
        0.6: (12, 3.6, 512, 0.1), 0.7: (10, 3.6, 512, 0.1), 0.8: (10, 3.6, 512, 0.1), GM_DP: (10, 3.4, 512, 0.08),
    },
    ("mnist", 1.0): {
        0.6: (16, 1.6, 512, 0.08), 0.7: (12, 1.6, 512, 0.1), 0.8: (10, 1.6, 512, 0.1), GM_DP: (14, 1.8, 512, 0.04),
    },
    ("cifar10", 0.025): {
        0.6: (1, 6, 24, 8e-4), 0.7: (1.5, 7, 32, 1e-3), 0.8: (0.8, 6, 24, 1e-3), GM_DP: (0.3, 7, 32, 2e-3),
    },
    ("cifar10", 0.4): {
        0.6: (1, 2.5, 96, 5e-3), 0.7: (1, 2.5, 96, 5e-3), 0.8: (1, 2.5, 96, 5e-3), GM_DP: (1.5, 3, 96, 5e-3),
    },
    ("cifar10", 8.0): {
        0.6: (0.5, 2.5, 2048, 0.2), 0.7: (0.5, 2.5, 2048, 0.2), 0.8: (0.5, 3, 2048, 0.2), GM_DP: (2.5, 2.5, 2048, 0.04),
    },
}  # fmt: skip

MOST_STEPS = 10_000  # candidates with more steps are skipped, unless there is no other

# --- settings -------------------------------------------------------------------------------------------------------

_SEARCH_SEEDS = (1000, 1001)  # seeds of the search on held-out records; the figures use others


def printed(data: str, epsilon: float, k: float, selector: str) -> list[Setting]:
    """Return the paper's setting for this ε from Table 11, or those of the nearest ε that it has.

    For the selector `dim`, which it does not have, they are the settings of plain DP-SGD.
    """
    table = {e: settings[k if selector == "norm" else GM_DP] for (name, e), settings in TABLE11.items() if name == data}
    if epsilon in table:
        nearest = [table[epsilon]]
    elif math.isinf(epsilon):
        nearest = [table[max(table)]]
    else:
        below, above = [e for e in table if e < epsilon], [e for e in table if e > epsilon]
        nearest = [table[e] for e in (*below[-1:], *above[:1])]
    return [
        Setting(**_kind(data, epsilon, k, selector), clip=c, batch=b, rate=r, **_length(data, epsilon, b, sigma))
        for c, sigma, b, r in nearest
    ]


def _kind(data: str, epsilon: float, k: float, selector: str) -> dict[str, Any]:
    return {"data": data, "epsilon": epsilon, "k": k, "selector": "none" if k == GM_DP else selector}


def _length(data: str, epsilon: float, batch: int, sigma: float) -> dict[str, Any]:
    """Return σ, which decides the number of steps; without noise, the steps of fifteen epochs."""
    if math.isinf(epsilon):
        return {"steps": round(15 * SIZES[data] / batch)}
    return {"sigma": sigma}


# Our own grid, besides the paper's settings: clip, batch, learning rates, and steps at ε = 1. On MNIST all gradients
# exceed one of the clipping norms, and few exceed the other, which needs large batches.
_OWN: dict[str, tuple[tuple[float, int, tuple[float, ...], int], ...]] = {
    "mnist": ((0.3, 2048, (6.0, 12.0), 900), (8.0, 4096, (0.6,), 600)),
    "cifar10": ((1.0, 1024, (0.05, 0.2, 0.8), 1500),),
}
# Of the grid, with --rule: clip, batch and rate. MNIST: those of `datalens sgd` unless they are chosen.
RULE = {"mnist": (0.3, 2048, 12.0), "cifar10": (1.0, 1024, 0.2)}


def _own_steps(data: str, epsilon: float, at_one: int) -> int:
    """Return the number of steps: about proportional to ε, as noise limits how far all steps together can go."""
    if data == "mnist":
        return round(at_one * min(1.0, max(0.05, epsilon)))
    return next(steps for most, steps in ((0.1, at_one // 5), (0.4, at_one * 2 // 5), (INF, at_one)) if epsilon <= most)


def candidates(data: str, epsilon: float, k: float, selector: str, mode: "Mode") -> list[Setting]:
    """Return the settings among which the best is searched: a small grid of our own, and the paper's."""
    kind = _kind(data, epsilon, k, selector)
    if mode.steps is not None:
        return [Setting(**kind, **mode.fixed[data], steps=mode.steps, records=mode.records[data])]
    ours = [
        Setting(**kind, clip=c, batch=b, rate=r, steps=_own_steps(data, epsilon, steps), falls=data == "mnist")
        for c, b, rates, steps in _OWN[data]
        for r in rates
    ]
    if mode.rule:
        return [next(s for s in ours if (s.clip, s.batch, s.rate) == RULE[data])]
    return ours + printed(data, epsilon, k, selector)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The extent of the runs: everything in full mode; in quick mode few steps with fixed settings, for two cores."""

    full: bool
    seeds: tuple[int, ...]
    ks: tuple[float, ...]
    mnist: tuple[float, ...]
    cifar: tuple[float, ...]
    steps: int | None
    fixed: dict[str, dict[str, Any]]
    records: dict[str, int | None]
    only: str = "*"  # pattern of the names of cells to train; of the others, kept trainings are shown
    rule: bool = False  # one setting for a data set (`RULE`), without a search

    @classmethod
    def of(cls, full: bool) -> "Mode":
        every = [tuple(e for name, e in TABLE8 if name == data) for data in ("mnist", "cifar10")]
        if full:
            return cls(
                full=True, seeds=tuple(range(10)), ks=KS, mnist=every[0], cifar=every[1], steps=None, fixed={},
                records={"mnist": None, "cifar10": None},
            )  # fmt: skip
        fixed = {
            "mnist": {"clip": 0.3, "batch": 512, "rate": 12.0, "falls": True},
            "cifar10": {"clip": 1.0, "batch": 128, "rate": 0.5},
        }
        return cls(
            full=False, seeds=(0,), ks=(0.8, GM_DP), mnist=(0.2, 1.0), cifar=(1.0, 8.0), steps=100, fixed=fixed,
            records={"mnist": None, "cifar10": 2000},
        )  # fmt: skip

    def epsilons(self, data: str) -> tuple[float, ...]:
        return self.mnist if data == "mnist" else self.cifar


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The figure of a cell: mean and spread over seeds in percent, with averaged weights, and its setting and runs."""

    setting: Setting
    mean: float
    spread: float
    runs: tuple[dict[str, Any], ...]


Cell = tuple[str, float, float, str, AccountantName]  # data, ε, k, selector, accountant


def name_of(cell: Cell) -> str:
    """Return the name by which `--cells` chooses a cell, such as mnist-eps0.3-norm0.6."""
    data, epsilon, k, selector, accountant = cell
    method = "gm-dp" if k == GM_DP else f"{selector}{k:g}"
    return f"{data}-eps{epsilon:g}-{method}" + ("" if accountant == "prv" else f"-{accountant}")


def figures(lab: Lab, mode: Mode, cells: Iterable[Cell], choose: Any = candidates) -> dict[Cell, Figure | None]:
    """Return the figure of each cell, with the best of its candidate settings.

    It is None where no noise reaches the cell's ε, or where nothing is kept and nothing is run.
    """
    cells = list(dict.fromkeys(cells))
    if lab.trains and mode.only != "*":
        chosen = [cell for cell in cells if fnmatch.fnmatch(name_of(cell), mode.only)]
        made = figures(lab.of_kept(), mode, [cell for cell in cells if cell not in chosen], choose)
        return made | figures(lab, replace(mode, only="*"), chosen, choose)
    choices = {cell: _possible(lab, mode, cell, choose) for cell in cells}
    tried = lab.all(
        (replace(s, held_out=True), seed)
        for settings in choices.values()
        if len(settings) > 1
        for s in settings
        for seed in _SEARCH_SEEDS
    )
    kept = {}
    if not lab.trains:
        kept = lab.all((s, seed) for settings in choices.values() for s in settings for seed in mode.seeds)

    def score(s: Setting) -> tuple[bool, bool, int, float]:
        """Return the rank of a setting: its accuracy on records held out of training, not on the test set.

        Among kept trainings, the setting of ours with most seeds comes first, and stale trainings come last.
        """
        held_out = replace(s, held_out=True)
        accuracies = [tried[held_out, seed]["averaged"] for seed in _SEARCH_SEEDS if (held_out, seed) in tried]
        mine = [run for (other, _), run in kept.items() if other == s]
        current = sum(run.get("method_version") == version() for run in mine)
        ours = s not in printed(s.data, s.epsilon, s.k, "dim" if s.selector == "dim" else "norm")
        seeds = (current or len(mine)) * ours
        return bool(mine), current > 0, seeds, statistics.mean(accuracies) if accuracies else 0.0

    best = {cell: max(settings, key=score) for cell, settings in choices.items() if settings}
    done = kept or lab.all((s, seed) for s in best.values() for seed in mode.seeds)
    return {cell: _figure(best[cell], mode, done) if cell in best else None for cell in cells}


def _possible(lab: Lab, mode: Mode, cell: Cell, choose: Any) -> list[Setting]:
    """Return the settings of a cell for which some noise is enough, and which do not take too many steps."""
    possible: list[Setting] = []
    if not lab.trains and choose is candidates:
        kind = _kind(*cell[:4]) | {"accountant": cell[4], "noise": "bound", "held_out": False}
        theirs = printed(*cell[:4])
        mine = [s for s in lab.kept() if all(getattr(s, name) == value for name, value in kind.items())]
        return sorted(mine, key=theirs.__contains__)  # the paper's last: they have a column of their own
    for candidate in choose(*cell[:4], mode):
        setting = replace(candidate, accountant=cell[4])
        try:
            steps = setting.solved().steps if lab.trains else 0
        except BudgetExceeded as error:
            say(f"{cell[0]}, epsilon {cell[1]:g}, {cell[4]}: {error}")
            continue
        if choose is not candidates or not possible or (steps or 0) <= MOST_STEPS:
            possible.append(setting)
    return possible


def as_printed(lab: Lab, mode: Mode, cells: Iterable[Cell]) -> dict[Cell, Figure | None]:
    """Return the figures at the paper's settings, for cells whose settings it prints; in full mode only."""
    known = [cell for cell in cells if mode.full and cell[:2] in TABLE11 and cell[3] == "norm"]
    return figures(lab, mode, known, lambda data, epsilon, k, selector, _: printed(data, epsilon, k, selector))


def _figure(setting: Setting, mode: Mode, done: dict[tuple[Setting, int], dict[str, Any]]) -> Figure | None:
    every = tuple(done[setting, seed] for seed in mode.seeds if (setting, seed) in done)
    if not every:
        return None
    runs = tuple(run for run in every if run.get("method_version") == version()) or every  # stale ones alone, or none
    values = [100 * r["averaged"] for r in runs]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return Figure(setting=setting, mean=statistics.mean(values), spread=spread, runs=runs)


# --- the tables -----------------------------------------------------------------------------------------------------


def _line(
    row: str,
    column: str,
    paper: tuple[float, float] | None,
    figure: Figure | None,
    at_printed: Figure | None = None,
) -> Line:
    last = figure.runs[0] if figure else {}
    s = figure.setting if figure else None
    return {
        "row": row,
        "column": column,
        "paper": paper[0] if paper else None,
        "paper_spread": paper[1] if paper else None,
        "ours": round(figure.mean, 2) if figure else None,
        "spread": round(figure.spread, 2) if figure else None,
        "difference": round(figure.mean - paper[0], 2) if figure and paper else None,
        "last": round(100 * statistics.mean(r["accuracy"] for r in figure.runs), 2) if figure else None,
        "at_printed": round(at_printed.mean, 2) if at_printed else None,  # ours, at the settings of Table 11
        "at_printed_spread": round(at_printed.spread, 2) if at_printed else None,
        "seeds": len(figure.runs) if figure else 0,
        "marks": ["stale"] if figure and any(run.get("method_version") != version() for run in figure.runs) else [],
        "epsilon_spent": last.get("epsilon_spent"),
        "delta": DELTA,
        "relation": "add-remove",
        "accountant": last.get("accountant"),
        "private": last.get("private"),
        "clip": s.clip if s else None,
        "sigma": last.get("sigma"),
        "batch": s.batch if s else None,
        "rate": s.rate if s else None,
        "steps": last.get("steps"),
        "epochs": round(last["steps"] * s.batch / s.nominal, 2) if s else None,
        "extractor": last.get("extractor"),
        "dates": _each(figure, "date"),
        "certificates": _each(figure, "certificate_sha256"),
        "seconds": round(statistics.mean(r["seconds"] for r in figure.runs), 1) if figure else None,
    }


def _each(figure: Figure | None, key: str) -> list[str]:
    """Return the values of a key, seed by seed; empty texts for the oldest trainings, which lack some keys."""
    return [run.get(key, "") for run in figure.runs] if figure else []


def _title(data: str, epsilon: float) -> str:
    return f"{'MNIST' if data == 'mnist' else 'CIFAR-10'} ε={'∞' if math.isinf(epsilon) else f'{epsilon:g}'}"


def _method(k: float, selector: str = "norm") -> str:
    return "GM-DP" if k == GM_DP else f"TopAgg {selector} k={k:g}"


def cells_of(mode: Mode) -> list[Cell]:
    """Return the cells of all tables."""
    both = [(data, e) for data in ("mnist", "cifar10") for e in mode.epsilons(data)]
    found: list[Cell] = [(data, e, k, "norm", "prv") for data, e in both for k in mode.ks]
    return found + [("mnist", e, k, "dim", "prv") for e in TABLE9_DIM for k in TABLE9_DIM[e]]


def table8(lab: Lab, mode: Mode) -> list[Line]:
    cells: list[Cell] = [
        (data, e, k, "norm", "prv") for data in ("mnist", "cifar10") for e in mode.epsilons(data) for k in mode.ks
    ]
    ours, theirs = figures(lab, mode, cells), as_printed(lab, mode, cells)
    return [
        _line(_title(c[0], c[1]), _method(c[2]), TABLE8.get(c[:2], {}).get(c[2]), ours[c], theirs.get(c)) for c in cells
    ]


def table9(lab: Lab, mode: Mode) -> list[Line]:
    epsilons = tuple(TABLE9_DIM) if mode.full else (0.2,)
    cells: list[Cell] = [("mnist", e, k, "norm", "prv") for e in epsilons for k in mode.ks]
    cells += [("mnist", e, k, "dim", "prv") for e in epsilons for k in ((0.2, 0.4, 0.6) if mode.full else (0.4,))]
    ours = figures(lab, mode, cells)
    lines = []
    for cell in sorted(cells, key=lambda c: c[1]):
        _, e, k, selector, _ = cell
        paper = TABLE8["mnist", e].get(k) if selector == "norm" else TABLE9_DIM[e][k]
        lines.append(_line(_title("mnist", e), _method(k, selector), paper, ours[cell]))
    return lines


def table10(lab: Lab, mode: Mode) -> list[Line]:
    """Return the lines of Table 10. All cells of an ε have the C, σ and steps of TopAgg at this ε."""
    lines, k = [], 0.8
    for epsilon in (0.1, 1.0) if mode.full else (1.0,):
        cell: Cell = ("mnist", epsilon, k, "norm", "prv")
        base = figures(lab, mode, [cell])[cell]
        if base is None:
            continue
        trains = lab if fnmatch.fnmatch(name_of(cell), mode.only) else lab.of_kept()
        shown: dict[tuple[str, str], Setting] = {}
        for compression in ("NormTopK", "none"):
            for noise, law in (("σ²C²", "clip"), ("kσ²C²", "bound"), ("none", "none")):
                if (compression, noise) in TABLE10:
                    selector = "norm" if compression == "NormTopK" else "none"
                    shown[compression, noise] = replace(base.setting, selector=selector, noise=law)  # type: ignore[arg-type]
        done = trains.all([(s, seed) for s in shown.values() for seed in mode.seeds])
        for (compression, noise), s in shown.items():
            row = f"{_title('mnist', epsilon)}, {'NormTopK k=0.8' if compression == 'NormTopK' else 'no compression'}"
            column = "no noise" if noise == "none" else f"noise of variance {noise}"
            lines.append(_line(row, column, TABLE10[compression, noise].get(epsilon), _figure(s, mode, done)))
    return lines


def table11(lab: Lab, mode: Mode) -> list[Line]:
    """Return the lines of Table 11, the printed settings. Quick mode trains nothing and only computes their steps."""
    keys = [key for key in TABLE11 if mode.full or key[0] == "mnist"]
    cells: list[Cell] = [(data, e, k, "norm", "prv") for data, e in keys for k in mode.ks]
    ours = as_printed(lab, mode, cells)
    lines = []
    for cell in cells:
        data, e, k, *_ = cell
        line = _line(_title(data, e), _method(k), TABLE8[data, e][k], ours.get(cell))
        if line["ours"] is None:
            [s] = printed(data, e, k, "norm")
            line |= {"clip": s.clip, "sigma": s.sigma, "batch": s.batch, "rate": s.rate, "accountant": "prv"}
            if not mode.full:
                s = s.solved()
                assert s.steps is not None
                line |= {"steps": s.steps, "epochs": round(s.steps * s.batch / s.nominal, 2)}
        lines.append(line)
    return lines


def figure3(lab: Lab, mode: Mode) -> list[Line]:
    """Return the lines of Table 8, and of DPDL: trainings of GM-DP at the price of the moments accountant of 2016."""
    cells: list[Cell] = [(data, e, GM_DP, "norm", "prv") for data in ("mnist", "cifar10") for e in mode.epsilons(data)]
    return table8(lab, mode) + [
        _at_moments(cell[0], figure) for cell, figure in figures(lab, mode, cells).items() if figure and cell[1] < INF
    ]


def _at_moments(data: str, figure: Figure) -> Line:
    """Return the line of a private training at another price: DPDL trains as GM-DP does."""
    from datalens.bounded.norm_topk import ROUNDING
    from datalens.privacy.accountant import Accountant
    from datalens.privacy.dpsgd import Schedule
    from datalens.privacy.ledger import upwards

    s, run = figure.setting, figure.runs[0]
    sigma, rate, steps = run["sigma"], s.batch / s.nominal, run["steps"]
    schedule = Schedule(sigma=sigma, rate=rate, steps=steps, unit=1.0, l2_bound=1 + ROUNDING)
    spent = schedule.price(Accountant(name="moments"), DELTA)
    line = _line(_title(data, float(upwards(spent, 3))), "DPDL (GM-DP at the moments price)", None, figure)
    return line | {"epsilon_spent": str(spent), "accountant": "moments"}


TABLES: dict[str, Callable[[Lab, Mode], list[Line]]] = {
    "table8": table8, "table9": table9, "table10": table10, "table11": table11, "figure3": figure3,
}  # fmt: skip


def reproduce(
    name: str,
    *,
    full: bool,
    out: Path,
    device: str,
    stored: Path | None = None,
    only: str | None = None,
    again: bool = False,
    seeds: int | None = None,
    rule: bool = False,
) -> dict[str, Any]:
    """Run missing trainings, then write the table. Return its paths. For the arguments, see `harness.reproduce`."""
    from datalens.driver import choose_device

    place, mode = kept_in("dpsgd", full=full, out=out, stored=stored), Mode.of(full)
    mode = replace(mode, only=only or "*", seeds=mode.seeds[:seeds], rule=rule)
    if only is not None:
        every = [name_of(cell) for cell in cells_of(mode)]
        if not fnmatch.filter(every, only):
            raise DatalensError(f"--cells {only} fits no cell of {name}, such as {every[0]}")
    folder = out if stored is not None else made_in("dpsgd", full=full, out=out)
    if stored is not None:
        lines = TABLES[name](Lab(place, "cpu", workers=1, trains=False), mode)
        if all(line["ours"] is None for line in lines) and not place.exists():
            raise DatalensError(f"{place} has no trainings of {name}: name another folder, or leave --from out")
    else:
        where = str(choose_device(device))
        cores = _cores()
        workers = max(1, min(8, cores // 2)) if where.startswith("cuda") else min(2, cores)
        if name != "table11" or full:
            wanted = {cell[0] for cell in cells_of(mode) if fnmatch.fnmatch(name_of(cell), mode.only)}
            for data in sorted(wanted & ({"mnist"} if name in ("table9", "table10") else {"mnist", "cifar10"})):
                load(data, mode.records[data], where)  # fetch the data and cache its features once, for all workers
        lines = TABLES[name](Lab(place, where, workers=workers, again=again), mode)
    return output.write(
        name, TITLES[name], folder, full=full, rows=lines, text=f"{note(full)}\n\n{_markdown(lines)}",
        content={"note": note(full), "rows": lines},
        draw=partial(_plot, name, lines) if any(line["ours"] is not None for line in lines) else None,
    )  # fmt: skip


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- the output -----------------------------------------------------------------------------------------------------


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
        "each training's begins. `stale`: not shown to be what today's code gives. Accuracy on real test records is "
        "for the owner: it is not covered by ε either."
    )


def _markdown(lines: list[Line]) -> str:
    rows = [
        "| row | method | paper | ours | difference | last | at printed | ε spent, δ, relation, accountant | C | "
        "σ | batch | rate | steps | epochs | extractor | certificates |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in lines:
        paper = "—" if r["paper"] is None else f"{r['paper']:.2f} ± {r['paper_spread']:.2f}"
        spread = f"± {r['spread']:.2f} ({r['seeds']})" if r["seeds"] > 1 else "(1)"
        ours = "—" if r["ours"] is None else f"{r['ours']:.2f} {spread}{output.show_marks(r)}"
        difference = "—" if r["difference"] is None else f"{r['difference']:+.2f}"
        mean = "—" if r["last"] is None else f"{r['last']:.2f}"
        varied = f" ± {r['at_printed_spread']:.2f}" if r["at_printed_spread"] else ""
        same = "—" if r["at_printed"] is None else f"{r['at_printed']:.2f}{varied}"
        cost = "—"
        if r["epsilon_spent"] is not None:
            cost = output.show_cost(r)
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
    """Draw Figure 3's panels: accuracy against ε, ours as lines, the paper's as crosses."""
    from matplotlib.figure import Figure

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
    figure = Figure(figsize=(max(7.0, 5.2 * len(panels)), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    columns = list(dict.fromkeys(r["column"] for _, rows in panels for r in rows))
    for place, (title, rows) in zip(axes[0], panels, strict=True):
        for column in dict.fromkeys(r["column"] for r in rows):
            line = sorted((r for r in rows if r["column"] == column), key=epsilon)
            at = [epsilon(r) for r in line]
            colour = f"C{columns.index(column)}"  # the same in every panel
            place.errorbar(
                at, [r["ours"] for r in line], [r["spread"] for r in line], fmt="o-", ms=3, color=colour, label=column
            )
            printed = [(e, r["paper"]) for e, r in zip(at, line, strict=True) if r["paper"] is not None]
            if printed:
                place.plot(*zip(*printed, strict=True), "x", color=colour)
        place.set(
            title=title, xlabel="ε (δ = 1e-05, add-remove; prv, DPDL: moments)", ylabel="accuracy, %", xscale="log"
        )
        shown = sorted({epsilon(r) for r in rows if r["paper"] is not None})
        place.set_xticks(shown, [f"{e:g}" for e in shown], fontsize=8)
        place.minorticks_off()
        place.legend(frameon=False, fontsize=7, loc="lower right")
    figure.suptitle(f"{TITLES[name]}: ours (lines), the paper's (crosses)", fontsize=9)
    figure.savefig(path, dpi=130)
