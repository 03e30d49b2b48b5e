"""`datalens reproduce theory`: Theorem 6 on problems that satisfy it, τ_k of real teachers, and what both say about k.

τ_k is measured on teachers' gradients in a real run, before they are bounded: for the owner, and every output says so.
"""

import csv
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datalens.errors import DatalensError
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.progress import bar, say
from datalens.public import theorem6 as theorem
from datalens.public import theorem6_choose
from datalens.public import theorem6_tau as leftovers
from datalens.reproduce import simulate
from datalens.reproduce.compared import FEW_TEACHERS
from datalens.run.folder import write_atomically

if TYPE_CHECKING:
    from datalens.bounded.contributions import Contributions, Gradients

TITLE = "Theorem 6: the bound on simulated teachers, τ_k of real ones, and the choice of k"
WARNING = "τ_k is measured on teachers' gradients without noise: for the owner, not covered by ε."
ROWS = 2000  # gradients looked at in a step, at most


# --- simulated teachers ---------------------------------------------------------------------------------------------


def sizes(full: bool) -> dict[str, Any]:
    return {"repeats": 200, "ends": (20, 400)} if full else {"repeats": 24, "ends": (20, 100)}


def problems() -> dict[str, simulate.Teachers]:
    """Teachers that disagree, and one of them alone; gradients that fall off, and flat ones."""
    make = simulate.Teachers.make
    return {
        "8 teachers that disagree": make(
            dimensions=24, teachers=8, spread=0.3, decay=0.7, width=1.0, start=2.0, seed=1
        ),
        "4 teachers that agree": make(dimensions=24, teachers=4, spread=0.0, decay=0.7, width=1.0, start=2.0, seed=2),
        "1 teacher, flat": make(dimensions=40, teachers=1, spread=0.0, decay=0.0, width=1.0, start=1.0, seed=3),
    }


def choices(dimensions: int) -> list[theorem.Choice]:
    """Many of Equation 2: k, c, γ, noise, rounded or not, and how the noise is drawn."""
    found = []
    for k, clip, rate, noise in itertools.product(
        (1, dimensions // 3, dimensions), (0.02, 0.3, 1.0), (0.02, 0.3, 1.8), (0.0, 1e-3)
    ):
        for quantised, drawn in ((True, "per teacher"), (False, "once")):
            found.append(
                theorem.Choice(
                    k=k, clip=clip, rate=rate, steps=1, noise=noise, tau=0.0, quantised=quantised,
                    drawn=drawn,  # type: ignore[arg-type]
                )
            )  # fmt: skip
    return found


def grid(full: bool) -> list[dict[str, Any]]:
    """The left side of the theorem beside its right one, in every version."""
    how, lines = sizes(full), []
    wanted = [(name, made, choice) for name, made in problems().items() for choice in choices(len(made.weights))]
    with bar("simulated teachers", len(wanted)) as (progress, task):
        for number, (name, made, choice) in enumerate(wanted):
            problem = made.problem()
            for found in simulate.measure(made, choice, seed=number, **how):
                at = replace(choice, steps=found.steps, tau=found.tau)
                line = {"problem": name, **asdict(at), "left": found.left, "error": found.error}
                line["left_printed"] = found.left_printed
                for version in theorem.VERSIONS:
                    terms = theorem.bound(problem, at, version)
                    left = found.left_printed if version in ("printed", "sketch") else found.left
                    line[version] = terms.gradient
                    line[f"{version}_used"] = left / terms.gradient
                lines.append(line)
            progress.advance(task)
    return lines


def twins() -> dict[str, dict[str, float]]:
    """Where a bound without the factor d must fail, and the right one must not."""
    flat = simulate.Teachers(weights=np.full(100, 10.0), centres=np.zeros((1, 100)), width=10.0, start=0.0)
    choice = theorem.Choice(k=100, clip=1.0, rate=0.01, steps=1500, noise=0.2, tau=0.0, quantised=False, drawn="once")
    rise, error, printed, corrected = simulate.one_step(flat, choice, repeats=4000, seed=0)
    [found] = simulate.measure(flat, choice, ends=(choice.steps,), repeats=8, seed=0)
    problem = flat.problem()
    right = theorem.bound(problem, choice, "sharp")
    broken = replace(right, noise=right.noise / problem.dimensions)
    return {
        "one step from x*": {"left": rise, "error": error, "without d": printed, "with d": corrected},
        "the sharp bound": {
            "left": found.left, "error": found.error, "without d": broken.gradient, "with d": right.gradient,
        },
    }  # fmt: skip


# --- real teachers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Teachers whose gradients are looked at."""

    name: str
    options: dict[str, Any]
    how: str


def crews(full: bool, data: str = "mnist") -> list[Crew]:
    paper: dict[str, Any] = {"method": "datalens-paper", "data": data, "epsilon": 1.0, "delta": 1e-5}
    ours: dict[str, Any] = paper | {"method": "datalens", "warm_start": "off"}
    if full:
        return [
            Crew(name=f"{data}, pixels", options=paper, how="preset `paper`, all its steps"),
            Crew(name=f"{data}, 64 cosines", options=ours, how="`datalens --warm-start off`, all its steps"),
        ]
    few = FEW_TEACHERS | {"steps": 4}
    return [
        Crew(
            name=f"{data}, pixels", options=paper | few, how=f"**quick: {few['teachers']} compact teachers, 4 steps**"
        ),
        Crew(
            name=f"{data}, 64 cosines",
            options=ours | {"teachers": 400, "steps": 6},
            how="**quick: 400 teachers, 6 steps**",
        ),
    ]


def measure_crew(crew: Crew, folder: Path, device: str) -> dict[str, Any]:
    """τ_k over the gradients of a run, which is thrown away: it is nobody's release."""
    say(f"{crew.name}: the gradients of a run of its own")
    seen: list[NDArray[np.float64]] = []

    def looking(compress: "Callable[[Gradients], Contributions]") -> "Callable[[Gradients], Contributions]":
        def look(gradients: "Gradients") -> "Contributions":
            rows = gradients.values.detach().flatten(0, 1)
            some = np.random.default_rng(len(seen)).permutation(len(rows))[:ROWS]  # of all teachers and images
            seen.append(leftovers.tau(rows[some].cpu().numpy()))
            return compress(gradients)

        return look

    from datalens.reproduce.figure2 import watched_run

    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as place:
        options = TrainOptions(out=Path(place) / "run", device=device, **crew.options)  # type: ignore[arg-type]
        settings = watched_run(options, lambda _: lambda votes: None, looking)
    return summary(crew, np.concatenate(seen), settings)


def summary(crew: Crew, curves: NDArray[np.float64], s: TopAggSettings) -> dict[str, Any]:
    mean = curves.mean(axis=0)
    fitted = leftovers.fit(mean)
    facts: dict[str, Any] = {
        "dimensions": s.basis_size,
        "teachers": s.teachers,
        "sigma": s.sigma,
        "k": s.k,
        "steps": s.steps,
    }
    best = theorem6_choose.suggest_k(**facts, shape=fitted.weibull_shape)
    return {
        "name": crew.name,
        "options": crew.options,
        "how": crew.how,
        "warning": WARNING,
        "date": datetime.now(UTC).date().isoformat(),
        "gradients": len(curves),
        **facts,
        "fit": asdict(fitted),
        "tau_at_k": float(mean[s.k]),
        "tau_at_k_most": float(curves[:, s.k].max()),
        "tau_at_k_worst": leftovers.worst(s.k, s.basis_size),
        "suggested": best.as_dict(),
        "suggested_by_default": theorem6_choose.suggest_k(**facts).as_dict(),
        "mean": [round(float(value), 6) for value in mean],
        "most": [round(float(value), 6) for value in curves.max(axis=0)],
    }


# --- the output -----------------------------------------------------------------------------------------------------


def reproduce(*, full: bool, out: Path, device: str, stored: Path | None = None) -> dict[str, Any]:
    """Run what is missing, then write it all. Returns where everything is. `stored`: run nothing, see `harness`."""
    folder = out / f"theory-{'full' if full else 'quick'}"
    cells = folder / "cells" if stored is None else stored / "theory"
    (folder if stored is not None else cells).mkdir(parents=True, exist_ok=True)

    def kept(name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured as it is asked for, or is now."""
        path = cells / f"{name}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if all(found.get(key) == value for key, value in json.loads(json.dumps(asked)).items()):
            return dict(found)
        if stored is not None:
            raise DatalensError(f"{path} is not there, or not of this: leave --from out, and it is measured")
        write_atomically(path, json.dumps(measure(), indent=1).encode())
        return dict(json.loads(path.read_text(encoding="utf-8")))

    shown = []
    for crew in crews(full):
        name = crew.name.replace(", ", "-").replace(" ", "-")
        shown.append(kept(name, {"options": crew.options}, partial(measure_crew, crew, folder, device)))
    how = sizes(full)
    simulated = kept("simulation", how, lambda: {**how, "twins": twins(), "grid": grid(full)})
    lines, broken = simulated["grid"], simulated["twins"]
    base = folder / "theory"
    content = {"full": full, "warning": WARNING, "twins": broken, "teachers": shown, "grid": lines}
    write_atomically(base.with_suffix(".json"), json.dumps(content, indent=1).encode())
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    write_atomically(base.with_suffix(".md"), markdown(lines, broken, shown, full=full).encode())
    from datalens.reproduce.theory_plot import plot

    plot(lines, shown, base.with_suffix(".png"))
    names = {"markdown": "md", "csv": "csv", "plot": "png"}
    rows = [{k: v for k, v in one.items() if k not in ("mean", "most")} for one in shown]
    return {"table": "theory", "full": full, **{k: f"{base}.{v}" for k, v in names.items()}, "rows": rows}


def markdown(
    lines: list[dict[str, Any]], broken: dict[str, dict[str, float]], shown: list[dict[str, Any]], *, full: bool
) -> str:
    mode, repeats = ("full", "quick")[not full], sizes(full)["repeats"]
    text = [
        f"# {TITLE} ({mode})",
        "",
        f"## The bound, on {len(lines)} simulated cases, {repeats} repetitions each",
        "",
        "How much of what each version allows was used, at most; below 1 in every case: the bound held.",
        "",
        "| version | at most | cases above 1 |",
        "|---|---|---|",
    ]
    for version in theorem.VERSIONS:
        used = [line[f"{version}_used"] for line in lines]
        text.append(f"| {version} | {max(used):.3g} | {sum(value > 1 for value in used)} of {len(used)} |")
    text += [
        "",
        "Without the factor d in the noise term, which must not hold, and with it:",
        "",
        "| case | measured | without d | with d |",
        "|---|---|---|---|",
    ]
    for name, twin in broken.items():
        measured = f"{twin['left']:.3g} ± {twin['error']:.1g}"
        text.append(f"| {name} | {measured} | {_verdict(twin, 'without d')} | {_verdict(twin, 'with d')} |")
    text += ["", "## τ_k of real teachers", "", f"**{WARNING}**", ""]
    text += [
        "| teachers | gradients | k of d | τ_k mean, most, worst possible | printed model ρ₁, ρ₂ (error) | "
        "Weibull shape (error) | k suggested by it | by default |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in shown:
        fit = r["fit"]
        text.append(
            f"| {r['name']}: {r['how']} | {r['gradients']} | {r['k']} of {r['dimensions']} | {r['tau_at_k']:.3f}, "
            f"{r['tau_at_k_most']:.3f}, {r['tau_at_k_worst']:.3f} | {fit['scale']:.3g}, {fit['shape']:.3g} "
            f"({fit['error']:.3f}) | {fit['weibull_shape']:.3g} ({fit['weibull_error']:.3f}) | {r['suggested']['k']} | "
            f"{r['suggested_by_default']['k']} |"
        )
    return "\n".join(text) + "\n"


def _verdict(row: dict[str, float], name: str) -> str:
    broken = row["left"] - 3 * row["error"] > row[name]
    return f"{row[name]:.3g}: {'violated' if broken else 'holds'}"
