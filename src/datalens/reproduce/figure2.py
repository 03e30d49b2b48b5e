"""Figure 2: ε against the number of queries, by the data-independent and the data-dependent bound, up to ε = 1.

The votes are those of a real training run, noise and ledger included. `privacy/bounds.py` looks at each sum of votes
before the noise and hands out the analysis alone; the run neither knows nor changes. What comes out depends on the
data: it is for the owner, and every output says so.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions, options_as_dict
from datalens.privacy import bounds
from datalens.privacy.curves import exact_epsilon, rdp_epsilon
from datalens.progress import say
from datalens.run.folder import write_atomically

if TYPE_CHECKING:
    from datalens.bounded.contributions import BoundedSum, Contributions, Gradients
    from datalens.run.remote_teachers import Crowd, Fakes

    Compress = Callable[[Gradients], Contributions]

TITLE = "Figure 2: data-independent and data-dependent ε"
EPSILON, DELTA = 1.0, 1e-5
COST = f"δ = {DELTA:g}, add-remove"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of the figure: how its votes come about, and how that differs from the paper."""

    name: str
    data: str
    options: dict[str, Any]
    how: str


# The paper's noise, which Theorem 5 is about. Ours is rounded to whole votes: the threshold is off by half a vote.
_PRINTED = {"method": "datalens-paper", "epsilon": EPSILON, "delta": DELTA, "noise": "gaussian"}
# On two cores: the paper's N, k, σ and β, but teachers over all 784 cosines, not convolutional ones, and few steps.
_QUICK_MNIST = {"sigma": 5000.0, "beta": 0.7, "network": "spectral", "basis": "dct", "basis_size": 784, "k": 200}
# Of the faces not even the number of teachers is affordable; β stays, so the threshold falls with N.
_QUICK_FACES = {"sigma": 9000.0, "beta": 0.9, "teachers": 10}


def panels(full: bool) -> list[Panel]:
    if full:
        how = "preset `paper` of `datalens-paper`, all steps that ε = 1 allows"
        return [
            Panel(name="MNIST", data="mnist", options=dict(_PRINTED), how=how),
            Panel(name="Fashion-MNIST", data="fashion-mnist", options=dict(_PRINTED), how=how),  # the paper has none
            Panel(name="CelebA-Hair", data="celeba-hair", options=dict(_PRINTED), how=f"{how}, compact teachers"),
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


# The paper says that these behave as the two it plots. What no votes could change needs no votes to be known.
ALIKE = {"Fashion-MNIST": "fashion-mnist", "CelebA-Gender": "celeba-gender"}


def reproduce(*, full: bool, out: Path, device: str, stored: Path | None = None) -> dict[str, Any]:
    """Run what is missing, then write the figure. Returns where everything is. `stored`: run nothing, see `harness`."""
    from datalens.data.named import sources

    folder = out / f"figure2-{'full' if full else 'quick'}"
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    shown, left_out = [], []
    for panel in panels(full):
        path = (folder / "cells" if stored is None else stored / "figure2") / f"{panel.data}.json"
        if not _finished(path, panel):
            if stored is not None:
                left_out.append(f"{panel.name}: not run")
                continue
            if not sources.downloadable(panel.data) and not sources.cached(panel.data):
                left_out.append(
                    f"{panel.name}: left out, its data is not on this machine (docs/data.md says where to put it)"
                )
                say(left_out[-1])
                continue
            say(f"{panel.name}: the votes of a run of its own")
            write_atomically(path, json.dumps(_measure(panel, folder, device), indent=1).encode())
        shown.append(json.loads(path.read_text(encoding="utf-8")))
    others = [other for other in alike() if other["name"] not in {panel["name"] for panel in shown}]
    from datalens.reproduce.figure2_output import write

    return write(shown, left_out, others, folder, full=full)


def _finished(path: Path, panel: Panel) -> bool:
    """A panel is kept as long as it was asked for in the same way."""
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("options") == panel.options


# --- the votes of a run ---------------------------------------------------------------------------------------------


class Watched:
    """A crowd whose sums of votes are looked at on their way to the gate. The run sees no difference."""

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
    """One panel: train, look, and keep the analysis. The run itself is thrown away: it is nobody's release."""
    seen: list[bounds.Analysis] = []

    def look_with(settings: TopAggSettings) -> "Callable[[BoundedSum], None]":
        at = {"k": settings.k, "threshold": settings.beta * settings.teachers, "sigma": settings.sigma}
        return lambda votes: seen.append(bounds.analyse(votes, **at))  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as place:
        options = TrainOptions(out=Path(place) / "run", data=panel.data, device=device, **panel.options)  # type: ignore[arg-type]
        settings = watched_run(options, look_with)
    return {
        "name": panel.name,
        "options": panel.options,
        "how": panel.how,
        "date": datetime.now(UTC).date().isoformat(),
        "warning": bounds.WARNING,
        **summary(seen, settings),
    }


def watched_run(
    options: TrainOptions,
    look_with: "Callable[[TopAggSettings], Callable[[BoundedSum], None]]",
    compress_with: "Callable[[Compress], Compress] | None" = None,
) -> TopAggSettings:
    """What `datalens train` does, up to the release, with someone who looks at the votes.

    `compress_with`: may look at the gradients that go into them, too; any votes will do then.
    """
    from datalens.data import formats
    from datalens.methods import topagg
    from datalens.plans.base import Place
    from datalens.plans.registry import make_plan
    from datalens.privacy.mechanisms import make_mechanism
    from datalens.privacy.noise import open_noise
    from datalens.private.partition import check_enough
    from datalens.run.folder import Run
    from datalens.run.ranks import World
    from datalens.run.remote_teachers import Crowd

    assert options.data is not None
    records = formats.open_records(options.data, nominal_size=options.nominal_size, folder=options.data_folder)
    budget, settings = make_plan(options, records.schema)
    assert isinstance(settings, topagg.TopAggSettings)
    if compress_with is None and (settings.decode != "threshold" or settings.compress == "topk"):
        raise ValueError("Theorem 5 is about votes that are thresholded: nothing else has a likely outcome")
    with World.start(options.device) as world:
        shares = topagg.gather(records, settings, Place(device=world.device, folder=options.out, world=world))
        check_enough(shares.count, settings.teachers)
        run = Run.create(
            options.out,
            options=options_as_dict(options),
            settings=settings,
            budget=budget,
            schema=records.schema,
            data_sha256=f"{shares.fingerprint % 2**256:064x}",
        )
        try:
            compress = topagg.make_compress(settings)
            crowd = Crowd(
                topagg.make_teachers(shares, settings, records.schema, chunk=options.chunk),
                compress if compress_with is None else compress_with(compress),
                world=world,
                count=settings.teachers,
                shape=(settings.batch, *records.schema.shape),
                folder=options.out / "checkpoints",
            )
            watched = cast("Crowd", Watched(crowd, look_with(settings)))
            draws = settings.steps * settings.batch * settings.basis_size
            with open_noise(settings.noise, settings.sigma, draws=draws) as noise:
                mechanism = make_mechanism(settings.sigma, noise)
                topagg.learn(run, watched, settings, mechanism=mechanism, device=world.device)
        finally:
            run.close()
    return settings


def summary(seen: list[bounds.Analysis], settings: TopAggSettings) -> dict[str, Any]:
    """The figures of a panel, in plain numbers; None (JSON: null) is inapplicable."""
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
    """What follows from the settings alone: how likely the likeliest outcome can be at most, and would have to be."""
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
    """The sets that are not plotted, by the settings that the paper prints for them."""
    from datalens.data.named import sources
    from datalens.plans.registry import make_plan

    found = []
    for name, data in ALIKE.items():
        options = TrainOptions(out=Path(), data=data, **_PRINTED)  # type: ignore[arg-type]
        _, settings = make_plan(options, sources.schema(data))
        assert isinstance(settings, TopAggSettings)
        found.append({"name": name, **whatever_the_votes(settings)})
    return found


_CURVES: dict[str, Callable[[float, float], float]] = {"rdp": rdp_epsilon, "exact": exact_epsilon}


def epsilon_by(accountant: str, mu_squared: float) -> float:
    return _CURVES[accountant](mu_squared, DELTA)


def _most_queries(accountant: str, mu_squared: float) -> int:
    """As many as fit into ε, each of them mu²-GDP."""
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon_by(accountant, middle * mu_squared) <= EPSILON else (low, middle)
    return low
