"""`owner.html`: a page about a run for the owner of the data only. None of it is covered by ε."""

import base64
import datetime
import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data import formats
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.pages import charts, render, said
from datalens.plans.registry import read_settings
from datalens.privacy.events import Event, GaussianEvent
from datalens.privacy.ledger import read_ledger
from datalens.progress import bar
from datalens.released import report
from datalens.released.synthetic import grid
from datalens.run.folder import read_config
from datalens.run.reservation import standing

EVALUATION, AUDIT = "evaluation.json", "audit.json"
# Titles of the metrics that methods log. Other names are shown unchanged.
METRICS = {
    "agreement": "Agreement of teachers: 1 if all send the same vote, above 1 only by noise; below the other line, "
    "votes that have nothing in common and noise explain it",
    "between_classes": "Distance between class means of synthetic images, per pixel; if it is far below the other "
    "line, the student ignores its labels",
    "real": "Agreement of teachers: fraction of them that take a synthetic image for real, with noise",
    "answered": "Agreement of teachers: fraction of the queries on which enough of them seemed to agree",
    "teacher_loss": "Loss of the teachers",
    "critic_loss": "Loss of the critic",
    "accuracy": "Accuracy on real test records",
}
MEASURES = {
    "utility": "Utility",
    "inception_score": "Inception Score",
    "fid": "FID",
    "faithfulness": "Faithfulness",
}
# These have no chart of their own: σ belongs to releases of different kinds, of which there is a table;
# `agreement_noise`, without the votes' own chance, was logged up to version 0.1.
UNSHOWN = ("step", "time", "epsilon_spent", "agreement_by_chance", "agreement_noise", "within_classes", "sigma")
PUBLIC = ("between_classes",)  # follow from the release too
# Metric → a second line on its chart: metric and title.
BESIDE = {
    "agreement": ("agreement_by_chance", "by chance"),
    "between_classes": ("within_classes", "within a class"),
}
MOST_ROWS = 60
# Measure, title, its key, and the key of the same measure on real data.
HEADLINES = (
    ("utility", "Accuracy of a classifier that saw synthetic images only", "accuracy", "accuracy_real"),
    ("inception_score", "Inception Score", "score", "score_real"),
    ("fid", "FID", "fid", "fid_real"),
    ("faithfulness", "Precision", "precision", "overlap_real"),
    ("faithfulness", "Recall", "recall", "overlap_real"),
)


def page(run: Path) -> bytes:
    """Return the page: metrics, measures and audits in the run folder."""
    config = read_config(run)
    budget, events = read_ledger(run / "ledger.jsonl")
    spent = budget.pricing().epsilon(events, budget.delta)
    lines = read_metrics(run)
    evaluation, audit = read_facts(run, EVALUATION), read_facts(run, AUDIT)
    settings, schema = config["settings"], config["schema"]
    stamp = " NOT PRIVATE." if math.isinf(budget.epsilon) or settings.get("noise_seeded") else ""
    return render(
        "owner.html",
        title=f"{settings['method']} on {schema['name']}, for its owner",
        eyebrow="datalens · owner's page",
        contents=(
            ("summary", "The run"),
            ("images", "Images"),
            ("training", "Training"),
            ("measures", "Measures"),
            ("audit", "Audit"),
        ),
        facts=[
            ("Budget", budget.describe(budget.epsilon) + stamp),
            ("Spent", f"{budget.describe(spent)}, in {len(events)} charges{stamp}"),
            *standing(config),
            ("Data", config["options"]["data"]),
            ("Preset", settings["preset"]),
            ("Steps logged", len(lines)),
            ("Time between the first and the last", _duration(lines)),
        ],
        pictures=pictures(run, config),
        shares_head=("release", "times", "of the budget", "sensitivity", "noise σ"),
        shares=parts_of_budget(events, config),
        charts=[chart for name in _names(lines) if (chart := _chart(lines, name))],
        headline=headline(evaluation),
        by_class=by_class(as_dict(evaluation.get("utility")), schema["classes"]),
        measures=[
            (MEASURES.get(name, name), blocks(value, classes=schema["classes"]))
            for name, value in evaluation.items()
            if isinstance(value, dict)
        ],
        audits=[(name, value.get("lines", []), blocks(_without(value, "lines"))) for name, value in audit.items()],
        run=run.name,
    )


def parts_of_budget(events: Sequence[Event], config: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a line for each kind of release: name, times, share of the budget's Σ mu², sensitivity and σ.

    Shares are left out where charges are not all Gaussian: then no such share is defined.
    """
    settings = read_settings(config["settings"])
    lines = report.grouped(events, settings)[: report.MOST_LINES]
    gaussian = all(isinstance(event, GaussianEvent) and math.isfinite(event.mu) for event in events)
    whole = sum(event.mu**2 for event in events if isinstance(event, GaussianEvent)) if gaussian else 0.0
    found = []
    for name, times, moved, sigma, *_ in lines:
        share = times * (moved / sigma) ** 2 / whole if whole and moved and sigma else None
        found.append((name, times, None if share is None else f"{100 * share:.1f} %", moved, sigma))
    return found


MOST_LOOKED_AT, ACROSS = 20_000, 10  # training records to look at for pictures; images of each class


def pictures(run: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return training images, if available, and synthetic ones, a row for each class; nothing for a classifier."""
    release = run / "release"
    if not (release / "samples.png").is_file():
        return []
    shown = report.shown_classes(release)
    synthetic = report.picture_of(release, shown, str(config["schema"]["name"]))
    try:
        real = _training_images(config, shown)
    except (DatalensError, OSError):
        return [synthetic]
    return [real, {**synthetic, "caption": "Synthetic images, a row a class"}]


def _training_images(config: dict[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    """Return the first training images of each class as a picture. Private."""
    options, schema = config["options"], Schema.from_dict(config["schema"])
    records = formats.training_records(options)
    found: dict[str, list[np.ndarray]] = {name: [] for name in shown}
    count = 0
    with bar("looking for images of each class", min(schema.nominal_size, MOST_LOOKED_AT), private=True) as (p, task):
        for block in records.blocks(lambda index, keys: np.zeros(sum(1 for _ in keys), dtype=np.int64)):
            for image, label in zip(block.images, block.labels, strict=True):
                row = found.get(schema.classes[label])
                if row is not None and len(row) < ACROSS:
                    row.append(image)
            p.advance(task, len(block.index))
            count += len(block.index)
            if count >= MOST_LOOKED_AT or all(len(row) == ACROSS for row in found.values()):
                break
    images = [image for row in found.values() for image in row]
    if not images:
        raise DatalensError("there are no images of the classes that are shown")
    labels = np.array([number for number, row in enumerate(found.values()) for _ in row])
    file = BytesIO()
    grid(np.array(images), labels, per_class=ACROSS).save(file, format="png")
    sheet = file.getvalue()
    return {
        "base64": base64.b64encode(sheet).decode(),
        "classes": tuple(shown),
        **report.size_shown(sheet, len(shown)),
        "caption": "Training images, real: for your eyes only",
        "alt": f"Grid of real training images; the rows are the classes {', '.join(shown)}",
    }


def read_facts(run: Path, name: str) -> dict[str, Any]:
    """Read the results that another command wrote to a run folder; empty if there are none.

    Raises:
        DatalensError: the file is damaged.
    """
    path = run / name
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise DatalensError(f"{path} is damaged ({error}): delete it, and measure again") from error
    return facts


def keep(run: Path, name: str, facts: dict[str, Any]) -> None:
    """Add results to a file of a run folder, readable by the owner only."""
    content = json.dumps({**read_facts(run, name), **facts}, indent=1, default=str).encode()
    write_atomically(run / name, content, private=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, one line per step. If an interruption made a run repeat steps, the last line counts."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            by_step[int(line["step"])] = line
        except (ValueError, KeyError, TypeError):  # a torn line, of a run that was killed
            continue
    return [by_step[step] for step in sorted(by_step)]


def headline(evaluation: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the main figures: title, value, and a note with the value on real data, features and classifier."""
    figures = []
    for measure, name, key, real in HEADLINES:
        fields = as_dict(evaluation.get(measure))
        if (value := number(fields, key)) is not None:
            ceiling = number(fields, real) or number(as_dict(fields.get(real)), key)
            beside = [] if ceiling is None else [f"real images: {said(ceiling)}"]
            if (guessing := number(fields, "accuracy_majority")) is not None:
                beside = [str(fields.get("verdict")), f"guessing the largest class: {said(guessing)}", *beside]
            beside += [str(fields["features"])] if "features" in fields else []
            if by := measured_by(fields):
                beside.append(by)
            figures.append((name, with_spread(value, number(fields, f"{key}_std")), "; ".join(beside)))
    nearness = as_dict(as_dict(evaluation.get("faithfulness")).get("nearness"))
    if "leak" in nearness:
        leak = "FOUND" if nearness["leak"] else "not found"
        figures.append(("Images closer to training records than to others", leak, ""))
    return figures


def by_class(utility: dict[str, Any], classes: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return a line for each class: its accuracy, and that of the same classifier trained on real images, if known."""
    columns = [utility.get("accuracy_per_class"), utility.get("accuracy_real_per_class")]
    usable = [c if isinstance(c, list) and len(c) == len(classes) else [None] * len(classes) for c in columns]
    if not any(value is not None for value in usable[0]):
        return []
    return [(name, *values) for name, *values in zip(classes, *usable, strict=True)]


def measured_by(utility: dict[str, Any]) -> str:
    """Return the classifier of an accuracy, with images and epochs of its training: only equal ones are comparable."""
    if not isinstance(utility.get("classifier"), str):
        return ""
    name = utility["classifier"].split(":")[0]
    return f"{name}, {said(utility.get('synthetic'))} images, {said(utility.get('epochs'))} epochs"


def number(fields: dict[str, Any], name: str) -> float | None:
    """Return a field as a float if it is a finite number, else None."""
    value = fields.get(name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable and value is not None else None


def blocks(value: dict[str, Any], title: str = "", classes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return JSON of any shape as tables: numbers and texts first, then nested values, each under its name.

    A square matrix with as many rows as there are `classes` is shown as a confusion matrix.
    """
    plain = [(_name(key), item) for key, item in value.items() if not isinstance(item, dict) and not _rows(item)]
    tables: list[dict[str, Any]] = [{"kind": "plain", "title": title, "rows": plain}] if plain else []
    for key, item in value.items():
        under = f"{title} · {_name(key)}" if title else _name(key)
        if isinstance(item, dict):
            tables += blocks(item, under, classes)
        elif _matrix(item):
            of_classes = all(len(row) == len(item) == len(classes) for row in item)
            caption = f"{under}: how often a record of a class (row) was classified as each class (column)"
            names = list(classes) if of_classes else [str(i) for i in range(max(map(len, item)))]
            shown = {"title": caption if of_classes else under, "names": names, "rows": item[:MOST_ROWS]}
            shown["shades"] = [shades(row) for row in item[:MOST_ROWS]]
            tables.append({"kind": "matrix", **shown})
        elif _rows(item):
            tables.append(_listed(item, under))
    return tables


def shades(row: Sequence[Any]) -> list[int]:
    """Return for each cell how darkly it is shaded, 0 to 4, by its part of the row: an empty cell is not shaded."""
    cells = [float(cell) if isinstance(cell, int | float) and cell > 0 else 0.0 for cell in row]
    whole = sum(cells)
    return [math.ceil(4 * cell / whole) if whole else 0 for cell in cells]


def _listed(items: list[dict[str, Any]], title: str) -> dict[str, Any]:
    """Return a list of objects as one table. Nested objects are written out as text, lists are left out."""
    head = list(dict.fromkeys(name for item in items for name, value in item.items() if not isinstance(value, list)))
    rows = [[_flat(item.get(name)) for name in head] for item in items[:MOST_ROWS]]
    return {"kind": "table", "title": title, "head": [_name(name) for name in head], "rows": rows}


def _flat(value: Any) -> Any:
    return ", ".join(f"{_name(k)} {said(_flat(v))}" for k, v in value.items()) if isinstance(value, dict) else value


def _rows(value: Any) -> bool:
    objects = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    return objects or _matrix(value)


def _matrix(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) for row in value)


def _name(key: str) -> str:
    return str(key).replace("_", " ")


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _without(value: Any, name: str) -> dict[str, Any]:
    return {key: item for key, item in as_dict(value).items() if key != name}


def with_spread(value: float, spread: float | None) -> str:
    return said(value) + (f" ± {spread:.2g}" if spread else "")  # a single seed has none


def _names(lines: list[dict[str, Any]]) -> list[str]:
    """Return the names of logged metrics, in the order of METRICS."""
    logged = dict.fromkeys(name for line in lines for name in line if name not in UNSHOWN)
    return sorted(logged, key=lambda name: list(METRICS).index(name) if name in METRICS else len(METRICS))


def _chart(lines: list[dict[str, Any]], name: str) -> str:
    series = [_series(lines, name, _name(name)), *(_series(lines, *other) for other in (BESIDE.get(name),) if other)]
    return charts.line_chart(
        series,
        title=METRICS.get(name, _name(name)),
        x="step",
        y="public: in the release too" if name in PUBLIC else "private: not covered by ε",
    )


def _series(lines: list[dict[str, Any]], name: str, shown: str) -> charts.Series:
    points = [(float(line["step"]), value) for line in lines if (value := number(line, name)) is not None]
    kept = tuple(points[i] for i in charts.thinned(len(points)))
    return charts.Series(name=shown, points=kept, dots=len(kept) < 12)


def _duration(lines: list[dict[str, Any]]) -> str:
    times = [value for line in lines if (value := number(line, "time")) is not None]
    return str(datetime.timedelta(seconds=round(max(times) - min(times)))) if len(times) > 1 else "—"
