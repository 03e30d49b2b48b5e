"""`datalens reproduce theory`: Theorem 6 on simulated problems, τ_k of real teachers, and the k that both suggest.

τ_k is measured on teachers' gradients in a real run, before they are bounded: it is for the owner, and every output
says so.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datalens.errors import DatalensError
from datalens.methods.topagg import TOPAGG, TopAggSettings
from datalens.options import TrainOptions
from datalens.progress import bar, say
from datalens.public import theorem6 as theorem
from datalens.reproduce import figure2
from datalens.reproduce.compared import FEW_TEACHERS
from datalens.reproduce.kept import keep_cell, kept, kept_in, made_in
from datalens.reproduce.output import write

if TYPE_CHECKING:
    from datalens.bounded.contributions import Contributions, Gradients

TITLE = "Theorem 6: the bound on simulated teachers, τ_k of real ones, and the choice of k"
WARNING = "τ_k is measured on teachers' gradients without noise: for the owner, not covered by ε."
ROWS = 2000  # limit of gradients that are measured in a step


Array = NDArray[np.float64]

# --- simulated teachers ---------------------------------------------------------------------------------------------
# F_n(x) = Σ_i w_i·s·log cosh((x_i − b_ni)/s). Its gradients, w_i·tanh((x_i − b_ni)/s), are bounded, and L = max w / s.


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """Simulated teachers: weights w [d], centres b [N, d], width s. x₀ is `start` in every coordinate."""

    weights: Array
    centres: Array
    width: float
    start: float

    @classmethod
    def make(
        cls, *, dimensions: int, teachers: int, spread: float, decay: float, width: float, start: float, seed: int
    ) -> "Teachers":
        """Return teachers with weights i^−decay, and with normal centres of standard deviation `spread`."""
        rng = np.random.default_rng(seed)
        return cls(
            weights=np.arange(1, dimensions + 1, dtype=np.float64) ** -decay,
            centres=spread * rng.standard_normal((teachers, dimensions)),
            width=width,
            start=start,
        )

    def gradients(self, x: Array) -> Array:
        """Return the gradients of all teachers [r, N, d] at r points."""
        return self.weights * np.tanh((x[:, None, :] - self.centres) / self.width)

    def value(self, x: Array) -> Array:
        """Return f [r] at r points."""
        distance = np.abs(x[:, None, :] - self.centres) / self.width
        log_cosh = distance + np.log1p(np.exp(-2 * distance)) - math.log(2)
        return (self.weights * self.width * log_cosh).sum(axis=2).mean(axis=1)

    def best(self) -> Array:
        """Return x*, coordinate by coordinate, by bisection: the derivative is increasing."""
        low, high = self.centres.min(axis=0), self.centres.max(axis=0)
        for _ in range(80):
            middle = (low + high) / 2
            up = self.gradients(middle[None])[0].mean(axis=0) > 0
            low, high = np.where(up, low, middle), np.where(up, middle, high)
        return (low + high) / 2

    def problem(self) -> theorem.Problem:
        """Return the constants of the theorem's assumptions.

        tanh is 1-Lipschitz, so the deviation of gradients is at most w/s times that of the centres.
        """
        w, d = self.weights, len(self.weights)
        deviations = np.minimum(w / self.width * self.centres.std(axis=0), w)
        ends = np.stack([np.full(d, self.start), self.best()])
        first, least = self.value(ends)
        return theorem.Problem(
            dimensions=d,
            teachers=len(self.centres),
            smoothness=float(w.max() / self.width),
            gradient=float(np.sqrt((w**2).sum())),
            deviation=float(np.sqrt((deviations**2).sum())),
            deviation_l1=float(deviations.sum()),
            gap=float(first - least),
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The left side of the theorem after T steps, without its factor, estimated from many repetitions."""

    steps: int
    left: float  # mean over t of E min{‖∇f‖², ‖∇f‖₁}, which the proof bounds
    error: float  # its standard error
    left_printed: float  # mean over t of min{E‖∇f‖², E‖∇f‖₁}, the printed one, which is never smaller
    tau: float  # the largest τ_k of a teacher's gradient in these steps


def simulate(
    teachers: Teachers, choice: theorem.Choice, *, ends: tuple[int, ...], repeats: int, seed: int
) -> Iterator[Measured]:
    """Simulate Equation 2, and yield the left side of the theorem after each of the `ends`."""
    theorem.check(teachers.problem(), choice)
    rng = np.random.default_rng(seed)
    x = np.full((repeats, len(teachers.weights)), teachers.start)
    smaller, squares, sums, most = np.zeros(repeats), [], [], 0.0
    for step in range(1, max(ends) + 1):
        gradients = teachers.gradients(x)
        slope = gradients.mean(axis=1)
        square, total = (slope**2).sum(axis=1), np.abs(slope).sum(axis=1)
        smaller += np.minimum(square, total)
        squares.append(square.mean())
        sums.append(total.mean())
        rows = gradients.reshape(-1, gradients.shape[2])
        most = max(most, float(theorem.tau(rows)[:, choice.k].max(initial=0.0)))
        x = x - choice.rate * (_compressed(gradients, choice, rng).mean(axis=1) + _noise(x, len(rows), choice, rng))
        if step in ends:
            left = smaller / step
            yield Measured(
                steps=step,
                left=float(left.mean()),
                error=float(left.std(ddof=1) / math.sqrt(repeats)),
                left_printed=float(np.mean(np.minimum(squares, sums))),
                tau=most,
            )


def _compressed(gradients: Array, choice: theorem.Choice, rng: np.random.Generator) -> Array:
    """Return Q(clip(top-k(g), c)) of every teacher."""
    size = np.abs(gradients)
    least = -np.partition(-size, choice.k - 1, axis=2)[..., choice.k - 1 : choice.k]
    kept = np.clip(np.where(size >= least, gradients, 0.0), -choice.clip, choice.clip)
    if not choice.quantised:
        return kept
    return np.sign(kept) * (rng.random(kept.shape) < np.abs(kept))


def _noise(x: Array, rows: int, choice: theorem.Choice, rng: np.random.Generator) -> Array:
    """Return the noise of the mean over teachers."""
    teachers = rows // len(x)
    spread = math.sqrt(choice.noise * choice.k / (teachers if choice.drawn == "per teacher" else teachers**2))
    return spread * rng.standard_normal(x.shape)


def one_step(
    teachers: Teachers, choice: theorem.Choice, *, repeats: int, seed: int
) -> tuple[float, float, float, float]:
    """Take one step from x*, where all teachers agree.

    Every teacher's gradient is 0 there, so only noise moves x. The proof's second inequality bounds the rise of f by
    Lγ²·Ak as printed, and by d times that as corrected.

    Returns:
        E f(x₁) − f(x*), its standard error, the printed bound, and the corrected bound.
    """
    x = np.repeat(teachers.best()[None], repeats, axis=0)
    problem = teachers.problem()
    rng = np.random.default_rng(seed)
    moved = x - choice.rate * _noise(x, repeats * problem.teachers, choice, rng)
    rise = teachers.value(moved) - teachers.value(x[:1])
    printed = problem.smoothness * choice.rate**2 * choice.noise * choice.k
    return (
        float(rise.mean()),
        float(rise.std(ddof=1) / math.sqrt(repeats)),
        printed,
        problem.dimensions * printed,
    )


def sizes(full: bool) -> dict[str, Any]:
    return {"repeats": 200, "ends": (20, 400)} if full else {"repeats": 24, "ends": (20, 100)}


def problems() -> dict[str, Teachers]:
    """Return problems with teachers that disagree or agree, and a single one; with decaying and with flat gradients."""
    make = Teachers.make
    return {
        "8 teachers that disagree": make(
            dimensions=24, teachers=8, spread=0.3, decay=0.7, width=1.0, start=2.0, seed=1
        ),
        "4 teachers that agree": make(dimensions=24, teachers=4, spread=0.0, decay=0.7, width=1.0, start=2.0, seed=2),
        "1 teacher, flat": make(dimensions=40, teachers=1, spread=0.0, decay=0.0, width=1.0, start=1.0, seed=3),
    }


def choices(dimensions: int) -> list[theorem.Choice]:
    """Return many parameters of Equation 2: k, c, γ, noise, quantised or not, and how the noise is drawn."""
    listed = []
    for k, clip, rate, noise in itertools.product(
        (1, dimensions // 3, dimensions), (0.02, 0.3, 1.0), (0.02, 0.3, 1.8), (0.0, 1e-3)
    ):
        for quantised, drawn in ((True, "per teacher"), (False, "once")):
            listed.append(
                theorem.Choice(
                    k=k, clip=clip, rate=rate, steps=1, noise=noise, tau=0.0, quantised=quantised,
                    drawn=drawn,  # type: ignore[arg-type]
                )
            )  # fmt: skip
    return listed


def grid(full: bool) -> list[dict[str, Any]]:
    """Return the left side of the theorem and its right side, in every version, for all problems and parameters."""
    how, lines = sizes(full), []
    wanted = [(name, made, choice) for name, made in problems().items() for choice in choices(len(made.weights))]
    with bar("simulated teachers", len(wanted)) as (progress, task):
        for number, (name, made, choice) in enumerate(wanted):
            problem = made.problem()
            for measured in simulate(made, choice, seed=number, **how):
                at = replace(choice, steps=measured.steps, tau=measured.tau)
                line = {"problem": name, **asdict(at), "left": measured.left, "error": measured.error}
                line["left_printed"] = measured.left_printed
                for version in theorem.VERSIONS:
                    terms = theorem.bound(problem, at, version)
                    left = measured.left_printed if version in ("printed", "sketch") else measured.left
                    line[version] = terms.gradient
                    line[f"{version}_used"] = left / terms.gradient
                lines.append(line)
            progress.advance(task)
    return lines


def twins() -> dict[str, dict[str, float]]:
    """Return cases in which a bound without the factor d must fail, and the correct one must hold."""
    flat = Teachers(weights=np.full(100, 10.0), centres=np.zeros((1, 100)), width=10.0, start=0.0)
    choice = theorem.Choice(k=100, clip=1.0, rate=0.01, steps=1500, noise=0.2, tau=0.0, quantised=False, drawn="once")
    rise, error, printed, corrected = one_step(flat, choice, repeats=4000, seed=0)
    [measured] = simulate(flat, choice, ends=(choice.steps,), repeats=8, seed=0)
    problem = flat.problem()
    right = theorem.bound(problem, choice, "sharp")
    broken = replace(right, noise=right.noise / problem.dimensions)
    return {
        "one step from x*": {"left": rise, "error": error, "without d": printed, "with d": corrected},
        "the sharp bound": {
            "left": measured.left, "error": measured.error, "without d": broken.gradient, "with d": right.gradient,
        },
    }  # fmt: skip


# --- real teachers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Crew:
    """A run of teachers whose gradients are measured."""

    name: str
    options: dict[str, Any]
    how: str


def crews(full: bool, data: str = "mnist") -> list[Crew]:
    paper: dict[str, Any] = {"method": "datalens-paper", "data": data, "epsilon": 1.0, "delta": 1e-5}
    ours: dict[str, Any] = paper | {"method": "datalens", "warm_start": "off"}
    if full:
        return [
            Crew(
                name=f"{data}, pixels",
                options=paper | {"network": "printed"},
                how="preset `paper` with the printed discriminator, all its steps",
            ),
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
    """Measure τ_k over the gradients of a run, which is deleted."""
    say(f"{crew.name}: running a training to measure its gradients")
    curves: list[Array] = []

    def looking(compress: "Callable[[Gradients], Contributions]") -> "Callable[[Gradients], Contributions]":
        def look(gradients: "Gradients") -> "Contributions":
            rows = gradients.values.detach().flatten(0, 1)
            some = np.random.default_rng(len(curves)).permutation(len(rows))[:ROWS]  # of all teachers and images
            curves.append(theorem.tau(rows[some].cpu().numpy()))
            return compress(gradients)

        return look

    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as place:
        options = TrainOptions(out=Path(place) / "run", device=device, **crew.options)
        settings = figure2.watched_run(options, lambda _: lambda votes: None, looking)
    return summary(crew, np.concatenate(curves), settings)


def summary(crew: Crew, curves: Array, s: TopAggSettings) -> dict[str, Any]:
    mean = curves.mean(axis=0)
    fitted = theorem.fit(mean)
    facts: dict[str, Any] = {
        "dimensions": s.basis_size,
        "teachers": s.teachers,
        "sigma": s.sigma,
        "k": s.k,
        "steps": s.steps,
    }
    best = theorem.suggest_k(**facts, shape=fitted.weibull_shape)
    return {
        "name": crew.name,
        "options": crew.options,
        "method_version": TOPAGG.version,
        "how": crew.how,
        "warning": WARNING,
        "date": datetime.now(UTC).date().isoformat(),
        "gradients": len(curves),
        **facts,
        "fit": asdict(fitted),
        "tau_at_k": float(mean[s.k]),
        "tau_at_k_most": float(curves[:, s.k].max()),
        "tau_at_k_worst": theorem.worst(s.k, s.basis_size),
        "suggested": best.as_dict(),
        "suggested_by_default": theorem.suggest_k(**facts).as_dict(),
        "mean": [round(float(value), 6) for value in mean],
        "most": [round(float(value), 6) for value in curves.max(axis=0)],
    }


# --- the output -----------------------------------------------------------------------------------------------------


def reproduce(*, full: bool, out: Path, device: str, stored: Path | None = None, again: bool = False) -> dict[str, Any]:
    """Measure what is missing, then write the results. Return their paths. For the arguments, see `harness`."""
    place = kept_in("theory", full=full, out=out, stored=stored)
    folder = made_in("theory", full=full, out=out)
    folder.mkdir(parents=True, exist_ok=True)

    def measured(name: str, asked: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a kept result with these options, or else measure and keep it."""
        result = kept(place, name, asked)
        if result is not None and again and "gradients" in result and figure2.is_old(result):
            result = None
        if result is None and stored is not None:
            raise DatalensError(f"{place} has no {name} with these options: leave --from out to measure it")
        return result or keep_cell(place, name, make())

    shown = []
    for crew in crews(full):
        name = crew.name.replace(", ", "-").replace(" ", "-")
        shown.append(measured(name, {"options": crew.options}, partial(measure_crew, crew, folder, device)))
    how = sizes(full)
    simulated = measured("simulation", how, lambda: {**how, "twins": twins(), "grid": grid(full)})
    lines, broken = simulated["grid"], simulated["twins"]
    return write(
        "theory", TITLE, folder, full=full, lines=lines, text=markdown(lines, broken, shown, full=full),
        content={"warning": WARNING, "twins": broken, "teachers": shown, "grid": lines},
        rows=[{k: v for k, v in one.items() if k not in ("mean", "most")} for one in shown],
        draw=partial(plot, lines, shown),
    )  # fmt: skip


def markdown(
    lines: list[dict[str, Any]], broken: dict[str, dict[str, float]], shown: list[dict[str, Any]], *, full: bool
) -> str:
    text = [
        f"## The bound, on {len(lines)} simulated cases, {sizes(full)['repeats']} repetitions each",
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
            f"| {r['name']}: {r['how']}{' (stale)' if figure2.is_old(r) else ''} | {r['gradients']} |"
            f" {r['k']} of {r['dimensions']} | {r['tau_at_k']:.3f}, "
            f"{r['tau_at_k_most']:.3f}, {r['tau_at_k_worst']:.3f} | {fit['scale']:.3g}, {fit['shape']:.3g} "
            f"({fit['error']:.3f}) | {fit['weibull_shape']:.3g} ({fit['weibull_error']:.3f}) | {r['suggested']['k']} | "
            f"{r['suggested_by_default']['k']} |"
        )
    return "\n".join(text) + "\n"


def _verdict(row: dict[str, float], name: str) -> str:
    broken = row["left"] - 3 * row["error"] > row[name]
    return f"{row[name]:.3g}: {'violated' if broken else 'holds'}"


def plot(lines: list[dict[str, Any]], shown: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured against the allowed values and, for each crew, τ_k with its models, and bias and noise by k."""
    from matplotlib.figure import Figure

    places: Any = [["bounds", "bounds"], *([f"tau {i}", f"trade-off {i}"] for i in range(len(shown)))]
    figure = Figure(figsize=(10, 4.2 * len(places)), layout="constrained")
    axes = figure.subplot_mosaic(places)
    _bounds(axes["bounds"], lines)
    for number, one in enumerate(shown):
        _tau(axes[f"tau {number}"], one)
        _trade_off(axes[f"trade-off {number}"], one)
    figure.suptitle(shown[0]["warning"], fontsize=8)
    figure.savefig(path, dpi=100)


def _bounds(axes: Any, lines: list[dict[str, Any]]) -> None:
    for version, mark in (("printed", "x"), ("corrected", "."), ("sharp", "+")):
        axes.plot([r["left"] for r in lines], [r[version] for r in lines], mark, ms=4, label=version)
    ends = [min(r["left"] for r in lines), max(r["left"] for r in lines)]
    axes.plot(ends, ends, "k-", lw=0.8, label="below this line a bound would be wrong")
    axes.set(
        xscale="log", yscale="log", xlabel="mean of min{‖∇f‖², ‖∇f‖₁}, measured", ylabel="allowed by Theorem 6",
        title="simulated teachers",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8)


def _tau(axes: Any, one: dict[str, Any]) -> None:
    d, fit = one["dimensions"], one["fit"]
    ks = np.arange(d + 1)
    axes.plot(ks, one["mean"], label="measured, mean")
    axes.plot(ks, one["most"], ":", label="measured, most")
    axes.plot(ks, theorem.printed(ks / d, fit["scale"], fit["shape"]), "--", label="as printed, fitted")
    axes.plot(ks, theorem.weibull(ks / d, fit["weibull_shape"]), "--", label="Weibull sizes, fitted")
    axes.plot(ks, np.sqrt(1 - ks / d), color="#9aa5b1", label="worst of all")
    axes.set(xlabel="k", ylabel="τ_k", title=f"{one['name']}: what top-k leaves out")
    axes.legend(frameon=False, fontsize=8)


def _trade_off(axes: Any, one: dict[str, Any]) -> None:
    facts = {name: one[name] for name in ("dimensions", "teachers", "sigma", "k", "steps")}
    bias, noise = theorem.trade_off(**facts, shape=one["fit"]["weibull_shape"])
    ks = np.arange(1, one["dimensions"] + 1)
    axes.plot(ks, bias, label="bias of top-k")
    axes.plot(ks, noise, label="noise, at the best rate")
    axes.plot(ks, bias + noise, "k-", label="both")
    axes.axvline(one["suggested"]["k"], color="k", ls=":", label=f"smallest at k = {one['suggested']['k']}")
    axes.axvline(one["k"], color="#9aa5b1", ls=":", label=f"used: k = {one['k']}")
    axes.set(xlabel="k", ylabel="in units of M²", title=f"{one['name']}: the trade-off", xscale="log")
    axes.legend(frameon=False, fontsize=8)
