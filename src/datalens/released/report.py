"""`release/report.html`: a page that describes the release and may be published with it.

It is computed from the release folder alone. `verify` computes it again and compares, so its texts are data.
"""

import base64
import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.pages import FORMAT, charts, render, sealed
from datalens.plans.base import Settings
from datalens.plans.guidance import belief, grade
from datalens.plans.registry import read_settings
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.events import Event, GaussianEvent, LaplaceEvent, OneOfManyEvent, SubsampledGaussianEvent
from datalens.privacy.ledger import Budget, read_ledger, upwards
from datalens.released import certificate as certificates
from datalens.released.drawing import known_classes
from datalens.released.generator import Generator
from datalens.released.publication import FIELD, figures_of, number_of
from datalens.released.weights import load_generator

CONTENTS = (
    ("guarantee", "The guarantee"),
    ("data", "What is in it"),
    ("accuracy", "How good it is"),
    ("budget", "The budget"),
    ("use", "Use it"),
    ("check", "Check it"),
    ("settings", "Settings"),
)
MOST_STOPS, SLOW_STOPS = 40, 7  # points of a curve; fewer for accountants that are slow
SLOW: tuple[AccountantName, ...] = ("prv", "pld")
SAYS_LITTLE = 7.0  # from this ε on, a guess may become a certainty, to within a thousandth
MOST_PICTURE = 3_000_000  # bytes; base64 on the page adds a third
LEAST_SHOWN = 56  # pixels of the screen for an image: smaller ones are enlarged, by a whole factor
MOST_LINES = 20  # lines of the table of releases
CHARGED = "releases charged"
_COLUMNS = ("release", "times", "sensitivity", "noise σ", "part sampled")
_KINDS = {
    "gaussian": "a sum, with Gaussian noise",
    "discrete-gaussian": "a sum, with discrete Gaussian noise",
    "subsampled-gaussian": "a sum over a random sample, with Gaussian noise",
    "one-of-many-gaussian": "one teacher's answer, with Gaussian noise",
    "discrete-laplace": "counts of votes, with discrete Laplace noise",
}
_SAMPLE = """from pathlib import Path
from datalens import sample
synthetic = sample(Path("release"), count=10_000, seed=0)  # .images, .labels, .classes"""
_MODEL = """from pathlib import Path
from datalens.released.release import load_classifier
model, classes = load_classifier(Path("release"))  # a torch module"""


def page(release: Path, *, like: bytes = b"") -> bytes:
    """Return the sealed HTML page of a release for a data steward, from released values only.

    Args:
        release: the release folder.
        like: an existing page to compare with. Its prices are copied where they agree with those computed here up to
            the accountant's error, which two versions of the libraries may differ by. Everything else is computed
            from the release, so a correct page equals the result byte for byte.

    Raises:
        DatalensError: a file of the release holds something that cannot be shown.
    """
    try:
        return sealed(_page(release, like))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # anybody may have edited it
        raise DatalensError(
            f"{release} holds something that cannot be shown ({type(error).__name__}): fetch the release again"
        ) from error


def _page(release: Path, like: bytes) -> bytes:
    c = certificates.read_certificate(release)
    budget, events = read_ledger(release / certificates.LEDGER)
    settings, schema = read_settings(c["settings"]), Schema.from_dict(c["public"])
    classifier = settings.makes == "classifier"
    classes = [] if classifier else usable_classes(release, settings, schema, budget)
    shown = () if classifier else shown_classes(release)
    curves = [] if not events or math.isinf(float(c["epsilon_spent"])) else budget_curves(budget, events, like=like)
    releases = grouped(events, settings)
    return render(
        "release.html",
        **_guarantee(c, budget),
        certificate_hash=c["sha256"]["certificate"],
        page_format=FORMAT,
        title=f"{'A classifier trained on' if classifier else 'Synthetic data made from'} {schema.name}",
        eyebrow="datalens · privacy report",
        contents=[entry for entry in CONTENTS if entry[0] != "accuracy" or FIELD in c],
        accuracy=published_accuracy(c),
        public=c["public"],
        size=f"{schema.height} × {schema.width}" + (f" × {schema.channels}" if schema.channels > 1 else ""),
        seen=f"features of {c['settings']['extractor']}" if getattr(settings, "features", 0) else "pixels",
        picture=None if classifier else picture_of(release, shown, schema.name),
        left_out=[] if classifier else _left_out(shown, schema),
        classes=[row[:3] for row in classes],
        units="persons" if schema.by_person else "records",
        help=[(name, remedy) for name, _, _, remedy in classes if remedy],
        chart=budget_chart(curves, budget, stamp="" if c["private"] else certificates.NOT_PRIVATE),
        curve=_table(curves),
        releases_head=_COLUMNS[: len(releases[0])] if releases else _COLUMNS,
        releases=[_rounded(line) for line in releases[:MOST_LINES]],
        more_releases=max(0, len(releases) - MOST_LINES),
        code=_MODEL if classifier else _SAMPLE,
        hashes=sorted((name, value) for name, value in c["sha256"].items() if name != "certificate"),
        settings=[(name.replace("_", " "), value) for name, value in c["settings"].items()],
        versions=list(c["versions"].items()),
    )


def _guarantee(c: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Return the texts and numbers of the guarantee, from the certificate."""
    added = budget.relation == "add-remove"
    sure = 1 / (1 + math.exp(-min(budget.epsilon, 700.0)))
    given = Schema.from_dict(c["public"]).given
    mechanism, stamp = c["mechanism"], "" if c["private"] else f"; {certificates.NOT_PRIVATE}"
    return {
        "private": c["private"],
        "statement": c["statement"],
        "epsilon": upwards(budget.epsilon),
        "delta": upwards(budget.delta),
        "relation": budget.relation,
        "accountant": budget.accountant,
        "terms": f"δ = {upwards(budget.delta)}, {budget.relation}, {budget.accountant} accountant{stamp}",
        "spent": upwards(float(c["epsilon_spent"]), 4),
        "charges": mechanism["events"],
        "unit": c["privacy_unit"],
        "neighbours": "present or absent" if added else "replaced by another",
        "happens": "was in the data or not" if added else "was this one or any other",
        "told": certificates.how_well_told(budget.epsilon),
        "grade": grade(budget.epsilon),
        "suspicions": suspicions(budget.epsilon),
        "condition": f" This holds given that what was read off the data is public: {given}." if given else "",
        "factor": certificates.odds_factor(budget.epsilon),
        "surest": f"{upwards(100 * sure, 4)} %" if budget.epsilon <= SAYS_LITTLE else "",
        "mechanism": mechanism["name"][:1].upper() + mechanism["name"][1:],
        "sensitivity": mechanism["sensitivity"],
        "price": mechanism.get("price", "as Gaussian noise of variance sigma²"),
        "noise": mechanism["noise"],
        "noise_origin": _origin(c),
        "declared_public": c.get("declared_public", certificates.DECLARED_PUBLIC),
        "not_covered": c["not_covered"],
        "chain": c.get("chain", certificates.CHAIN),
    }


def _origin(c: dict[str, Any]) -> str:
    if math.isinf(float(c["epsilon_spent"])):
        return "none"
    return "secret, from the operating system" if c["noise"]["secure"] else "from a known seed"


SUSPECTED = (0.01, 0.1, 0.5)  # as on docs/steward.md
COMPARED = (1.0, 3.0, 10.0)


def suspicions(epsilon: float) -> dict[str, Any]:
    """Return the table of what a suspicion can become: at this ε, and for comparison at 1, 3 and 10."""
    others = [other for other in COMPARED if other != epsilon]
    columns = [epsilon, *others]
    head = ["suspected before", "with this release", *(f"if ε were {other:g}" for other in others)]
    return {
        "head": head,
        "rows": [
            (f"{100 * before:g} %", *(percent_up(belief(before, one)) for one in columns)) for before in SUSPECTED
        ],
        "tenth": percent_up(belief(0.1, epsilon)),
        "half": percent_up(belief(0.5, epsilon)),
    }


def percent_up(part: float) -> str:
    """Return a percentage with one digit, rounded up: never smaller than what is guaranteed."""
    return f"{min(100.0, math.ceil(round(1000 * part, 6)) / 10):.1f} %"


def usable_classes(
    release: Path, settings: Settings, schema: Schema, budget: Budget
) -> list[tuple[str, str, str, str]]:
    """Return (class, released number of records, how usable its images are, what helps) of each; [] if not known.

    All of it follows from released counts, which are in the generator.
    """
    generator, names = load_generator(release)
    if isinstance(generator, Generator):
        return []
    counts = dict(zip(generator.present.tolist(), generator.sizes.tolist(), strict=True))
    outlooks = settings.outlook(schema, budget, [counts.get(number, 0.0) for number in range(len(names))])
    return [
        (name, "—" if number not in counts else f"about {float(f'{counts[number]:.2g}'):.0f}", one.words, one.remedy)
        for number, (name, one) in enumerate(zip(names, outlooks, strict=bool(outlooks)))
    ]


def published_accuracy(c: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the page says of the published accuracy, from the certificate; None if nothing was published."""
    if FIELD not in c:
        return None
    fields = c[FIELD]
    found = fields["figures"]
    unit = "persons" if fields["privacy_unit"] == f"one {PERSON}" else "records"
    by_class = [
        (name, None, "too few records to tell")
        if one is None
        else (name, percent(one[0]), f"{percent(one[1])} to {percent(one[2])}")
        for name, one in zip(c["public"]["classes"], found["classes"], strict=True)
    ]
    return {
        "accuracy": percent(found["accuracy"]),
        "interval": f"{percent(found['low'])} to {percent(found['high'])}",
        "parts": None
        if "sample" not in found
        else f"noise alone: ± {100 * found['noise']:.1f} points; sample alone: ± {100 * found['sample']:.1f}",
        "majority": percent(found["majority"]),
        "verdict": figures_of(fields).verdict,
        "by": fields["answered_by"],
        "held_out": f"{number_of(fields)} held-out {unit}",
        "classes": by_class,
    }


def percent(share: float) -> str:
    """Return a share as a percentage with one digit."""
    return f"{100 * share:.1f} %"


# --- the picture ----------------------------------------------------------------------------------


def shown_classes(release: Path) -> tuple[str, ...]:
    """Return the classes in `samples.png`, one for each row (see `drawing.draw_picture`)."""
    generator, names = load_generator(release)
    return tuple(names[label] for label in sorted(known_classes(generator, min(10, len(names))).tolist()))


def _left_out(shown: Sequence[str], schema: Schema) -> list[str]:
    return [name for name in schema.classes[:10] if name not in shown]


def picture_of(release: Path, shown: Sequence[str], name: str, *, most: int = MOST_PICTURE) -> dict[str, Any]:
    """Return the certified picture for the page, scaled down until it has at most `most` bytes."""
    content = (release / certificates.PICTURE).read_bytes()
    try:
        with Image.open(BytesIO(content)) as image:
            image.load()
            while len(content) > most:
                image.thumbnail((image.width * 3 // 4, image.height * 3 // 4))
                content = _png(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise DatalensError(f"{release / certificates.PICTURE} is not a picture: fetch the release again") from error
    return {
        "base64": base64.b64encode(content).decode(),
        "classes": shown,
        **size_shown(content, len(shown)),
        "caption": "Drawn from the generator with seed 0, a row a class",
        "alt": f"Grid of synthetic images like those of {name}; the rows are the classes {', '.join(shown)}",
    }


def size_shown(png: bytes, rows: int) -> dict[str, int]:
    """Return width and height of a grid of images, and the width at which the page shows it."""
    with Image.open(BytesIO(png)) as image:
        width, height = image.size
    return {"width": width, "height": height, "shown": width * max(1, round(LEAST_SHOWN * rows / height))}


def _png(image: Image.Image) -> bytes:
    out = BytesIO()
    image.save(out, format="png")
    return out.getvalue()


# --- the budget -----------------------------------------------------------------------------------


def budget_curves(budget: Budget, events: Sequence[Event], *, like: bytes = b"") -> list[charts.Series]:
    """Return ε after every charge, or after some of many: by the budget's accountant, the exact one and RDP.

    Values have four digits and are rounded up. Accountants that cannot price the events are left out.

    Args:
        like: see `page`.
    """
    curves = []
    names: tuple[AccountantName, ...] = (budget.accountant, "exact", "rdp")
    for name in dict.fromkeys(names):
        stops = charts.thinned(len(events) + 1, SLOW_STOPS if name in SLOW else MOST_STOPS)
        accountant, stated = Accountant(name=name), _stated(like, f"{name} accountant")
        try:
            prices = [_price(accountant, events[:stop], budget.delta, stated.get(stop)) for stop in stops]
        except DatalensError:  # this accountant cannot price these events
            continue
        points = tuple((float(stop), price) for stop, price in zip(stops, prices, strict=True))
        curves.append(charts.Series(name=f"{name} accountant", points=points, stairs=len(stops) == len(events) + 1))
    return curves


def _price(accountant: Accountant, events: Sequence[Event], delta: float, stated: float | None) -> float:
    """Return ε of the events as it is shown: `stated`, if it is right up to the accountant's error, else computed."""
    if not events:
        return 0.0
    price = accountant.epsilon(events, delta)
    if stated is not None and math.isfinite(price):
        tolerance = accountant.tolerance(events, delta)
        if price - tolerance <= stated <= float(upwards(price + tolerance, 4)):
            return float(upwards(stated, 4))
    return float(upwards(price, 4))


def _stated(page: bytes, column: str) -> dict[int, float]:
    """Return the numbers in a column of `_table`'s table on a page, by row. Anybody may have edited the page."""
    numbers = {}
    for table in re.findall(r"<table>.*?</table>", page.decode(errors="replace"), re.DOTALL):
        head = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', table)
        if head[:1] == [CHARGED] and column in head:
            for row in re.findall(r'<tr><th scope="row">\d.*?</tr>', table):
                cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)
                with contextlib.suppress(ValueError, IndexError):  # "—" where this accountant has no price
                    numbers[int(cells[0])] = float(cells[head.index(column)])
    return numbers


def budget_chart(curves: Sequence[charts.Series], budget: Budget, *, stamp: str) -> str:
    if not curves:
        return ""
    return charts.line_chart(
        curves,
        title=f"{stamp} Budget over the run".strip(),
        x=CHARGED,
        y=f"ε spent (δ = {upwards(budget.delta)}, {budget.relation})",
        limit=budget.epsilon if math.isfinite(budget.epsilon) else None,
        limit_name=f"budget, by the {budget.accountant} accountant",
    )


def _table(curves: Sequence[charts.Series]) -> dict[str, Any] | None:
    if not curves:
        return None
    prices = [dict(one.points) for one in curves]
    stops = sorted({stop for points in prices for stop in points})
    return {
        "head": (CHARGED, *(one.name for one in curves)),
        "rows": [
            (stop, *(upwards(points[stop], 4) if stop in points else None for points in prices)) for stop in stops
        ],
    }


def _rounded(line: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round to four digits, never so that a release looks more private: noise is rounded down, all else up."""
    name, times, moved, sigma, *rate = line
    return name, times, _up(moved), _down(sigma), *(_up(part) for part in rate)


def _up(value: float | None) -> str | None:
    return None if value is None else upwards(value, 4)


def _down(value: float | None) -> str | None:
    """Round down to four digits. Rounding the negated value up would turn 0 into -0."""
    if value is None:
        return None
    return f"{float(Context(prec=4, rounding=ROUND_FLOOR).create_decimal_from_float(value)):.4g}"


def grouped(events: Sequence[Event], settings: Settings) -> list[tuple[Any, ...]]:
    """Return the lines of the table of releases: name, times, sensitivity, σ and sampling rate.

    Equal releases in a row share a line. The sampling rate is left out if no release has one.
    """

    def line(event: Event) -> tuple[Any, ...]:
        match event:
            case GaussianEvent():
                kind = _KINDS[event.kind] if event.sigma > 0 else "without noise"
                return settings.release_name(event) or kind, event.sensitivity, event.sigma, None
            case SubsampledGaussianEvent():
                return _KINDS[event.kind], event.l2_bound, event.sigma, event.rate
            case OneOfManyEvent():
                return _KINDS[event.kind], event.diameter, event.sigma, event.rate
            case LaplaceEvent():
                return _KINDS[event.kind], math.sqrt(event.moved), event.sigma, None
        return f"{event.kind}, which this version does not know", None, None, None

    lines = []
    for (name, moved, sigma, rate), same in itertools.groupby(events, key=line):
        times = sum(getattr(event, "repeats", 1) for event in same)
        lines.append((name, times, moved, sigma, rate))
    return lines if any(line[-1] is not None for line in lines) else [line[:-1] for line in lines]
