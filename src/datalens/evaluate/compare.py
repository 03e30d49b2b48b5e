"""`datalens compare`: several runs side by side. For the owner only, if one of them was measured on real data."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.evaluate.owner_report import (
    EVALUATION,
    HEADLINES,
    as_dict,
    measured_by,
    number,
    read_facts,
    read_metrics,
    with_spread,
)
from datalens.evaluate.published import of as published_points
from datalens.pages import charts, render, said
from datalens.privacy.ledger import json_number, upwards
from datalens.progress import LONG, counted, duration, say
from datalens.released import certificate as certificates
from datalens.released import report
from datalens.released.publication import FIELD
from datalens.released.verification import check_release

MOST_PICTURES, MOST_BYTES = 12, 250_000  # number of pictures, and size of each
PUBLISHED = "published accuracy, covered"
COLUMNS = (
    *("run", "ε", "accuracy", "ceiling", PUBLISHED, "ε spent"),
    *("δ, relation, accountant", "method", "data", "measured by"),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run: its certificate, and the owner's measurements."""

    name: str
    release: Path
    certificate: dict[str, Any]
    accuracy: float | None
    spread: float | None
    ceiling: float | None  # accuracy of the same classifier trained on real records
    by: str  # the classifier and how it was trained
    others: dict[str, float]  # other measures on real data

    @property
    def epsilon(self) -> float:
        return float(self.certificate["budget"]["epsilon"])

    @property
    def published(self) -> dict[str, Any] | None:
        """The figures of the published accuracy, if there is one."""
        return self.certificate[FIELD]["figures"] if FIELD in self.certificate else None

    @property
    def method(self) -> str:
        settings = self.certificate["settings"]
        variant = ""
        if settings["method"] == "datalens":  # releases votes of teachers, or moments, perhaps with a second stage
            variant = ", teachers" if "teachers" in settings else ", moments"
            variant += ", then diffusion" if "refine" in settings else ""
        return f"{settings['method']} [{settings['preset']}]{variant}"

    def row(self) -> dict[str, Any]:
        c = self.certificate
        return {
            "run": self.name,
            "method": self.method,
            "data": c["public"]["name"],
            "private": c["private"],
            "epsilon": json_number(self.epsilon),
            "delta": c["budget"]["delta"],
            "relation": c["relation"],
            "accountant": c["accountant"],
            "epsilon_spent": c["epsilon_spent"],
            "accuracy": self.accuracy,
            "accuracy_std": self.spread,
            "accuracy_real": self.ceiling,
            "accuracy_by": self.by or None,
            "published_accuracy": self.published and self.published["accuracy"],
            **self.others,
        }


def read(run: Path, release: Path, name: str) -> Entry:
    """Read a run, or a release by itself.

    Raises:
        DatalensError: its certificate does not stand.
    """
    problems = check_release(release).problems
    if problems:
        raise DatalensError(f"the certificate of {run} does not stand: see `datalens verify {run}`")
    evaluation = read_facts(run, EVALUATION)
    utility = as_dict(evaluation.get("utility"))
    accuracy = number(utility, "accuracy")
    if accuracy is None:  # `datalens sgd` tests its model itself
        logged = [value for line in read_metrics(run) if (value := number(line, "accuracy")) is not None]
        accuracy = logged[-1] if logged else None
    others = {}
    for measure, title, key, _ in HEADLINES[1:]:
        fields = as_dict(evaluation.get(measure))
        if (value := number(fields, key)) is not None:
            others[f"{title}, {fields['features']}" if "features" in fields else title] = value
    return Entry(
        name=name,
        release=release,
        certificate=certificates.read_certificate(release),
        accuracy=accuracy,
        spread=number(utility, "accuracy_std"),
        ceiling=number(utility, "accuracy_real"),
        by=measured_by(utility),
        others=others,
    )


def read_all(runs: Sequence[tuple[Path, Path, str]]) -> list[Entry]:
    """Read runs, each as (run, release, name), and say about how long that takes if it is long."""
    entries, began = [], time.monotonic()
    for run, release, name in runs:
        entries.append(read(run, release, name))
        seconds = (time.monotonic() - began) * len(runs)
        if len(entries) == 1 and seconds > LONG:
            say(f"verifying {counted(len(runs), 'run')} takes about {duration(seconds)}, by the first")
    return entries


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: the shortest ends of the paths that are all different."""
    parts = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run) for run in runs]


def lines(entries: Sequence[Entry]) -> list[str]:
    """Return the table for a terminal."""
    table = [COLUMNS, *(_cells(entry) for entry in entries)]
    widths = [max(len(said(row[i])) for row in table) for i in range(len(COLUMNS))]
    formatted = [
        "  ".join(said(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    if measured(entries):
        formatted.append("measured on real data: for the owner, not covered by ε")
    return formatted


def _cells(entry: Entry) -> tuple[Any, ...]:
    row = entry.row()
    name = row["run"] if row["private"] else f"{row['run']} (NOT PRIVATE)"
    terms = f"{upwards(row['delta'])}, {row['relation']}, {row['accountant']}"
    accuracy = None if entry.accuracy is None else with_spread(entry.accuracy, entry.spread)
    p = entry.published
    covered = p and f"{report.percent(p['accuracy'])} ({report.percent(p['low'])} to {report.percent(p['high'])})"
    figures = (upwards(entry.epsilon), accuracy, row["accuracy_real"], covered)
    spent = upwards(float(row["epsilon_spent"]), 4)
    return (name, *figures, spent, terms, row["method"], row["data"], row["accuracy_by"])


def measured(entries: Sequence[Entry]) -> bool:
    """Return whether a run was measured on real data."""
    return any(entry.accuracy is not None or entry.others for entry in entries)


def page(entries: Sequence[Entry], *, published: bool = False) -> bytes:
    """Return the HTML page: the table, the curves (with published points if asked), pictures, settings that differ."""
    extra = list(dict.fromkeys(name for entry in entries for name in entry.others))
    return render(
        "compare.html",
        title=f"{counted(len(entries), 'run')} side by side",
        eyebrow="datalens · comparison",
        wide=True,
        contents=(
            ("table", "Side by side"),
            ("curves", "Accuracy and ε"),
            ("pictures", "Pictures"),
            ("settings", "Settings"),
        ),
        private=measured(entries),
        unsafe=[entry.name for entry in entries if not entry.certificate["private"]],
        head=(*COLUMNS, *extra),
        rows=[(*_cells(entry), *(entry.others.get(name) for name in extra)) for entry in entries],
        charts=[chart for data in _data_sets(entries) if (chart := _curves(entries, data, published=published))],
        pictures=[(entry.name, _picture(entry)) for entry in entries[:MOST_PICTURES]],
        more_pictures=max(0, len(entries) - MOST_PICTURES),
        differences=differences(entries),
        names=[entry.name for entry in entries],
    )


def _data_sets(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.certificate["public"]["name"] for entry in entries))


def _curves(entries: Sequence[Entry], data: str, *, published: bool = False) -> str:
    """Return a chart of accuracy against ε, with one line for each method, δ, relation, accountant and classifier.

    `published`: with what others print for this data set, by other classifiers.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        c = entry.certificate
        if c["public"]["name"] == data and entry.accuracy is not None and math.isfinite(entry.epsilon):
            terms = f"{entry.method}, δ = {upwards(c['budget']['delta'])}, {c['relation']}, {c['accountant']}"
            terms += ("" if c["private"] else ", NOT PRIVATE") + (f"; by {entry.by}" if entry.by else "")
            points.setdefault(terms, []).append((entry.epsilon, entry.accuracy))
    if published and points:
        points |= published_points(data)
    series = [charts.Series(name=name, points=tuple(sorted(some)), dots=True) for name, some in points.items()]
    same = [entry.ceiling for entry in entries if entry.certificate["public"]["name"] == data and entry.ceiling]
    return charts.line_chart(
        series,
        title=f"Accuracy against ε: {data}",
        x="ε (budget)",
        y="accuracy on real test records, private",
        limit=max(same, default=None),
        limit_name="ceiling: the same classifier, trained on real images",
    )


def _picture(entry: Entry) -> dict[str, Any] | None:
    if certificates.weights_of(entry.certificate) == certificates.MODEL:
        return None
    schema = Schema.from_dict(entry.certificate["public"])
    picture = report.picture_of(entry.release, report.shown_classes(entry.release), schema.name, most=MOST_BYTES)
    return {**picture, "caption": entry.name}


def differences(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """Return the settings that are not the same in all runs: each name with its values."""
    every = [entry.certificate["settings"] for entry in entries]
    names = dict.fromkeys(name for settings in every for name in settings)
    rows = [(name, [settings.get(name) for settings in every]) for name in names]
    return [(name.replace("_", " "), *values) for name, values in rows if any(value != values[0] for value in values)]
