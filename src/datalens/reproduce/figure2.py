"""Figure 2: ε against the number of queries, by the data-independent and the data-dependent bound, up to ε = 1.

The votes are those of a real training run, with noise and ledger. `privacy/bounds.py` reads each sum of votes before
noise is added and returns the analysis alone; the run is not changed by it. The results depend on the data, so they are
for the owner, and every output says so.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from datalens.methods.topagg import TOPAGG, TopAggSettings
from datalens.options import TrainOptions
from datalens.privacy import bounds
from datalens.privacy.curves import exact_epsilon, rdp_epsilon
from datalens.privacy.ledger import upwards
from datalens.progress import say
from datalens.reproduce.kept import keep_cell, kept, kept_in, made_in
from datalens.reproduce.output import write

if TYPE_CHECKING:
    from datalens.bounded.contributions import BoundedSum, Contributions, Gradients
    from datalens.data.records import Records
    from datalens.plans.base import Place
    from datalens.private.shares import Shares
    from datalens.released.generator import Generator
    from datalens.run.folder import Run
    from datalens.run.remote_teachers import Crowd, Fakes

    Compress = Callable[[Gradients], Contributions]

TITLE = "Figure 2: data-independent and data-dependent ε"
EPSILON, DELTA = 1.0, 1e-5
COST = f"δ = {DELTA:g}, add-remove"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of the figure: the run that its votes come from, and how that differs from the paper."""

    name: str
    data: str
    options: dict[str, Any]
    how: str


# The paper's continuous noise, for which Theorem 5 holds. Ours is rounded to integers: the threshold is off by half.
_PRINTED: dict[str, Any] = {"method": "datalens-paper", "epsilon": EPSILON, "delta": DELTA, "noise": "gaussian"}
# The votes are those of the printed discriminator, without the linear part that our teachers have.
_GREY, _FACES = {"network": "printed"}, {"network": "compact", "linear": 0.0}
# On two cores: the paper's N, k, σ and β, but spectral teachers over all 784 cosines instead of convolutional ones, and
# few steps.
_QUICK_MNIST = {"sigma": 5000.0, "beta": 0.7, "network": "spectral", "basis": "dct", "basis_size": 784, "k": 200}
# For faces, even the number of teachers is reduced; β stays, so the threshold falls with N.
_QUICK_FACES = {"sigma": 9000.0, "beta": 0.9, "teachers": 10}


def panels(full: bool) -> list[Panel]:
    if full:
        how = "preset `paper` of `datalens-paper`, all steps that ε = 1 allows"
        grey, faces = f"{how}, the printed discriminator", f"{how}, compact teachers without a linear part"
        return [
            Panel(name="MNIST", data="mnist", options=_PRINTED | _GREY, how=grey),
            Panel(name="Fashion-MNIST", data="fashion-mnist", options=_PRINTED | _GREY, how=grey),  # the paper has none
            Panel(name="CelebA-Hair", data="celeba-hair", options=_PRINTED | _FACES, how=faces),
        ]
    return [
        Panel(
            name="MNIST",
            data="mnist",
            options=_PRINTED | _QUICK_MNIST | {"steps": 4},
            how="**quick: spectral teachers voting on all 784 cosines instead of pixels, the first 4 steps of 86**",
        ),
        Panel(
            name="CelebA-Hair",
            data="celeba-hair",
            options=_PRINTED | _QUICK_FACES | {"steps": 2},
            how="**quick: 10 teachers instead of 8000, the first 2 steps**",
        ),
    ]


# The paper says that these data sets behave like the two that it plots. For them we compute what holds for any votes.
ALIKE = {"Fashion-MNIST": "fashion-mnist", "CelebA-Gender": "celeba-gender"}


def reproduce(*, full: bool, out: Path, device: str, stored: Path | None = None, again: bool = False) -> dict[str, Any]:
    """Run missing panels, then write the figure. Return its paths. For the arguments, see `harness`."""
    from datalens.data.named import sources

    place = kept_in("figure2", full=full, out=out, stored=stored)
    folder = made_in("figure2", full=full, out=out)
    folder.mkdir(parents=True, exist_ok=True)
    shown, left_out = [], []
    for panel in panels(full):
        measured = kept(place, panel.data, {"options": panel.options})
        if measured is not None and again and is_old(measured):
            measured = None
        if measured is None and stored is not None:
            left_out.append(f"{panel.name}: not run")
        elif measured is None and not sources.downloadable(panel.data) and not sources.cached(panel.data):
            left_out.append(
                f"{panel.name}: left out, its data is not on this machine (docs/data.md says where to put it)"
            )
            say(left_out[-1])
        else:
            if measured is None:
                say(f"{panel.name}: running a training to measure its votes")
                measured = keep_cell(place, panel.data, _measure(panel, folder, device))
            shown.append(measured)
    others = [other for other in alike() if other["name"] not in {panel["name"] for panel in shown}]
    facts = {"delta": DELTA, "relation": "add-remove", "warning": bounds.WARNING}
    content = facts | {"left_out": left_out, "whatever_the_votes": others}
    lines = [
        {"panel": panel["name"], **{key: "inapplicable" if v is None else v for key, v in point.items()}, **facts}
        for panel in shown
        for point in panel["curve"]
    ]
    made = write(
        "figure2", TITLE, folder, full=full, lines=lines, content=content | {"panels": shown},
        rows=[{key: value for key, value in p.items() if key not in ("curve", "log10_agreement")} for p in shown],
        text=_markdown(shown, left_out, others), draw=partial(_plot, shown) if shown else None,
    )  # fmt: skip
    return made | content | {"ends": [{"panel": p["name"], **p["curve"][-1]} for p in shown]}


# --- the votes of a run ---------------------------------------------------------------------------------------------


class Watched:
    """A crowd that passes each sum of votes to `look` before the gate gets it. The run is not changed by it."""

    def __init__(self, crowd: "Crowd", look: "Callable[[BoundedSum], None]") -> None:
        self._crowd = crowd
        self._look = look

    def votes(self, fakes: "Fakes") -> "BoundedSum":
        votes = self._crowd.votes(fakes)
        self._look(votes)
        return votes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._crowd, name)


def _measure(panel: Panel, folder: Path, device: str) -> dict[str, Any]:
    """Train, and analyse the votes of each step. The run itself is deleted."""
    analyses: list[bounds.Analysis] = []

    def look_with(settings: TopAggSettings) -> "Callable[[BoundedSum], None]":
        at = {"k": settings.k, "threshold": settings.beta * settings.teachers, "sigma": settings.sigma}
        return lambda votes: analyses.append(bounds.analyse(votes, **at))  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as place:
        options = TrainOptions(out=Path(place) / "run", data=panel.data, device=device, **panel.options)
        settings = watched_run(options, look_with)
    return {
        "name": panel.name,
        "options": panel.options,
        "method_version": TOPAGG.version,
        "how": panel.how,
        "date": datetime.now(UTC).date().isoformat(),
        "warning": bounds.WARNING,
        **summary(analyses, settings),
    }


def is_old(measured: dict[str, Any]) -> bool:
    """Return whether the teachers that were measured are of an earlier version of TopAgg."""
    return measured.get("method_version") != TOPAGG.version


def watched_run(
    options: TrainOptions,
    look_with: "Callable[[TopAggSettings], Callable[[BoundedSum], None]]",
    compress_with: "Callable[[Compress], Compress] | None" = None,
) -> TopAggSettings:
    """Do what `datalens train` does, and pass each sum of votes to a function.

    Args:
        options: the options of the run.
        look_with: returns the function that gets each sum of votes, given the settings.
        compress_with: wraps the compressor, to read gradients too. With it, votes of any kind are accepted.

    Returns:
        The settings of the run.
    """
    from datalens.driver import train
    from datalens.methods import topagg

    planned: list[TopAggSettings] = []

    def gather(records: "Records", settings: TopAggSettings, place: "Place") -> "Shares":
        if compress_with is None and (settings.decode != "threshold" or settings.compress == "topk"):
            raise ValueError("Theorem 5 holds for thresholded votes only: use decode 'threshold' and signed votes")
        planned.append(settings)
        return topagg.gather(records, settings, place)

    def learn(run: "Run", shares: "Shares", settings: TopAggSettings, place: "Place") -> "Generator":
        crowd = topagg.make_crowd(shares, settings, run.schema, place, compress_with)
        return topagg.train_student(run, cast("Crowd", Watched(crowd, look_with(settings))), settings, place)

    train(options, method=dataclasses.replace(topagg.TOPAGG, gather=gather, train=learn, follow=None))
    return planned[0]


def summary(seen: list[bounds.Analysis], settings: TopAggSettings) -> dict[str, Any]:
    """Return the figures of a panel as JSON; None means inapplicable."""
    s = settings
    log_agree = np.concatenate([analysis.log_agree for analysis in seen])
    dependent = np.concatenate([analysis.dependent for analysis in seen])
    independent = seen[0].independent
    mu_squared = 4 * s.k / s.sigma**2
    queries, curve = 0, []
    for analysis in seen:
        queries += len(analysis.log_agree)
        both = bounds.combined_epsilon(dependent[:queries], independent, delta=DELTA)
        curve.append(
            {
                "queries": queries,
                "rdp": epsilon_by("rdp", queries * mu_squared),
                "exact": epsilon_by("exact", queries * mu_squared),
                "data_dependent": bounds.dependent_epsilon(dependent[:queries], delta=DELTA),
                "smaller_of_both": both.epsilon,
                "smaller_is_data_dependent": both.used_dependent,
                "smaller_is_data_independent": both.used_independent,
                "inapplicable": both.inapplicable,
            }
        )
    return {
        **whatever_the_votes(s),
        "queries": queries,
        "applicable": int((~np.isnan(dependent)).any(axis=1).sum()),
        "log10_agreement": [round(float(value) / math.log(10), 4) for value in log_agree],
        "curve": curve,
    }


def whatever_the_votes(settings: TopAggSettings) -> dict[str, Any]:
    """Return what follows from the settings alone, for any votes.

    These are the largest possible probability of the likeliest outcome, and the probability that Theorem 4 needs.
    """
    s, d = settings, settings.basis_size
    applies, pays = bounds.needed_agreement(k=s.k, sigma=s.sigma)
    ceiling = bounds.most_agreement(d, k=s.k, teachers=s.teachers, threshold=s.beta * s.teachers, sigma=s.sigma)
    return {
        "settings": {name: getattr(s, name) for name in ("teachers", "k", "sigma", "beta", "network", "steps", "batch")}
        | {"d": d},
        "log10_most_agreement": ceiling / math.log(10),
        "log10_agreement_to_apply": applies / math.log(10),
        "log10_agreement_to_pay": pays / math.log(10),
        "queries_at_epsilon": {name: _most_queries(name, 4 * s.k / s.sigma**2) for name in _CURVES},
    }


def alike() -> list[dict[str, Any]]:
    """Return the same for data sets that the paper does not plot, with the settings that it prints for them."""
    from datalens.data.named import sources
    from datalens.plans.registry import make_plan

    facts = []
    for name, data in ALIKE.items():
        options = TrainOptions(out=Path(), data=data, **_PRINTED)
        settings = cast(TopAggSettings, make_plan(options, sources.schema(data))[1])
        facts.append({"name": name, **whatever_the_votes(settings)})
    return facts


_CURVES: dict[str, Callable[[float, float], float]] = {"rdp": rdp_epsilon, "exact": exact_epsilon}


def epsilon_by(accountant: str, mu_squared: float) -> float:
    return _CURVES[accountant](mu_squared, DELTA)


def _most_queries(accountant: str, mu_squared: float) -> int:
    """Return the largest number of queries within ε, if each of them costs mu² (Gaussian DP)."""
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon_by(accountant, middle * mu_squared) <= EPSILON else (low, middle)
    return low


# --- the output -----------------------------------------------------------------------------------------------------


def _markdown(shown: list[dict[str, Any]], left_out: list[str], others: list[dict[str, Any]]) -> str:
    lines = [
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
        f"Votes: {panel['how']}. {panel['queries']} queries were looked at, {panel['date']}"
        f"{' (stale: by an earlier version of the teachers)' if is_old(panel) else ''}.",
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
    """Draw ε above, and below the probability of the likeliest outcome with the one that Theorem 4 needs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(shown), 7.4), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False)
    for column, panel in enumerate(shown):
        _plot_epsilon(axes[0][column], panel)
        _plot_agreement(axes[1][column], panel)
    figure.suptitle(f"ε at {COST}. {bounds.WARNING}", fontsize=8)
    figure.savefig(path, dpi=130)


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
    dependent = [(p["queries"], p["data_dependent"]) for p in panel["curve"] if p["data_dependent"] is not None]
    if dependent:
        axes.plot(*zip(*dependent, strict=True), color="#c2410c", label="data-dependent (Theorem 4), rdp conversion")
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
