"""The published accuracy of a release: a noisy table of answers on held-out records, as the certificate states it.

Beside the table stand the counts of right and of wrong answers, which are released and paid with it. Earlier versions
released the table alone (`counts` is None); what they published still stands.

The table has a ledger of its own (`accuracy-ledger.jsonl` in the release), since it is paid for by other records than
those that were trained on, and after the run's budget was fixed. docs/privacy.md has the argument.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from datalens.data.schema import LARGEST_NUMBER, PERSON, Schema
from datalens.errors import DatalensError, TamperedError
from datalens.privacy.events import Event, LaplaceEvent
from datalens.privacy.ledger import Budget, read_ledger, upwards
from datalens.progress import counted
from datalens.released.accuracy import LEAST_SCALE, MOST_SCALE, Figures, figures

PART = "published-accuracy"  # the part that its charges name
QUERIES = 2  # the table, and the two counts: what a record answers in one release
FIELD, LEDGER = "published_accuracy", "accuracy-ledger.jsonl"
KEPT = "publication.json"  # in the run folder: what `publication_of` reads
SEED = 0  # of the classifier's training: always the same, so that nobody chooses it by the answers
ROUNDING = 2e-4  # how far figures may differ that other versions of the libraries compute
Overlap = Literal["none", "some"]

# How it is known that no held-out record was trained on. Texts of the certificate.
KNOWN = {
    "split": "it is the test split of the named data set that was trained on",
    "images": "the held-out images were compared with all training images, and none is the same pixel by pixel",
    "persons": "the ids of persons were compared, and none has both held-out and training images",
    "word": "the owner says so",
}
CLASSIFIERS = ("paper", "augmented", "logistic", "mlp", "resnet", "released")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The public facts of a publication, which are fixed before it is charged.

    Attributes:
        overlap: whether records that were trained on may be among the held-out ones.
        known: a key of `KNOWN`.
        held_out: declared number of held-out records (persons).
        read_off: whether that number was read off the data.
        exact: whether it is how many there are, and not a round figure.
        classifier: who answered: a classifier trained on synthetic images, or "released", the model itself.
        images, epochs: of its training; 0 for "released".
        seed: of its training: `SEED`.
    """

    overlap: Overlap
    known: str
    held_out: int
    read_off: bool
    exact: bool
    classifier: str
    images: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        """Raise unless the values are such as datalens writes."""
        numbers = (self.held_out, self.images, self.epochs, self.seed)
        trained = self.classifier != "released"
        usable = all(type(number) is int and 0 <= number <= LARGEST_NUMBER for number in numbers)
        usable = usable and self.overlap in get_args(Overlap) and self.known in KNOWN
        usable = usable and type(self.read_off) is bool and type(self.exact) is bool
        usable = usable and self.seed == SEED and (self.images > 0) == (self.epochs > 0) == trained
        if not usable or self.held_out < 1 or self.classifier not in CLASSIFIERS:
            raise TamperedError("the published accuracy states something that datalens does not write")

    def described(self) -> str:
        """Return who answered."""
        if self.classifier == "released":
            return "the released classifier"
        epochs = counted(self.epochs, "epoch")
        return f"a classifier ({self.classifier}) trained on {self.images} synthetic images for {epochs}"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A published table: its facts, its charges, its noisy cells, and the counts beside it if it has any."""

    asked: Asked
    budget: Budget  # of its own ledger: what a held-out record pays
    events: tuple[Event, ...]
    table: tuple[tuple[int, ...], ...]
    counts: tuple[int, int] | None = None  # of right and of wrong answers

    @property
    def scale(self) -> float:
        """Scale of the noise of the table, which is the last charge."""
        last = self.events[-1]
        assert isinstance(last, LaplaceEvent)
        return last.scale

    def figures(self) -> Figures:
        """Return accuracy, baseline and accuracy by class, with intervals."""
        asked = self.asked
        return figures(self.table, scale=self.scale, records=asked.held_out, exact=asked.exact, counts=self.counts)

    def paid(self, training: Budget) -> list[list[Any]]:
        """Return who pays what: pairs (ε, δ) for a record in each position.

        A record in both pays the sum of the two budgets (basic composition).
        """
        both: list[Any] = ["both", training.epsilon + self.budget.epsilon, training.delta + self.budget.delta]
        found: list[list[Any]] = [
            ["trained on", training.epsilon, training.delta],
            ["held out", self.budget.epsilon, self.budget.delta],
        ]
        return [*found, both] if self.asked.overlap == "some" else found

    def statement(self, training: Budget, schema: Schema) -> str:
        """Return the guarantee for held-out records, as it follows the certificate's statement."""
        unit, b = schema.record_unit, self.budget
        happens = "present or absent" if b.relation == "add-remove" else "replaced by another"
        text = (
            f"For a held-out {unit}, {happens}, whose answers are in the published table: ({upwards(b.epsilon)}, "
            f"{upwards(b.delta)}) ({b.relation}, {b.accountant} accountant)"
        )
        if self.asked.read_off:
            text += ", given that the number of held-out records is public"
        if self.asked.overlap == "none":
            return f"{text}. None of them was trained on: {KNOWN[self.asked.known]}."
        both = (training.epsilon + b.epsilon, training.delta + b.delta)
        return (
            f"{text}. Some of them may have been trained on too; for these the two add up to ({upwards(both[0])}, "
            f"{upwards(both[1])})."
        )

    def fields(self, training: Budget, schema: Schema) -> dict[str, Any]:
        """Return what the certificate states about the table."""
        b, asked = self.budget, self.asked
        return {
            "statement": self.statement(training, schema),
            "budget": {"epsilon": b.epsilon, "delta": b.delta},
            "epsilon_spent": b.pricing().epsilon(self.events, b.delta),
            "relation": b.relation,
            "accountant": b.accountant,
            "privacy_unit": f"one {schema.record_unit}",
            "paid": self.paid(training),
            "noise": {"law": "discrete Laplace, exact", "scale": self.scale},
            "asked": vars(asked).copy(),
            "answered_by": asked.described(),
            "table": [list(row) for row in self.table],
            **({} if self.counts is None else {"counts": list(self.counts)}),
            "figures": self.figures().as_dict(),
        }


def read(fields: object, budget: Budget, events: tuple[Event, ...], schema: Schema) -> Publication:
    """Return the publication that a certificate states, and anybody may have edited.

    Args:
        fields: the certificate's field.
        budget: of the accuracy ledger.
        events: of the accuracy ledger.
        schema: the certificate's public facts.

    Raises:
        TamperedError: it holds something that datalens does not write.
    """
    try:
        if not isinstance(fields, dict):
            raise TypeError
        table = tuple(tuple(row) for row in fields["table"])
        counts = tuple(fields["counts"]) if "counts" in fields else None
        asked = Asked(**fields["asked"])
    except (KeyError, TypeError) as error:
        raise TamperedError("the published accuracy cannot be read") from error
    classes = len(schema.classes)
    square = len(table) == classes and all(len(row) == classes for row in table)
    whole = all(type(cell) is int and abs(cell) < 2**53 for row in (*table, counts or ()) for cell in row)
    if not square or not whole:
        raise TamperedError("the published table is no table of whole numbers, classes by classes")
    if not events or not all(isinstance(e, LaplaceEvent) and LEAST_SCALE <= e.scale <= MOST_SCALE for e in events):
        raise TamperedError("the accuracy ledger has no charge for a table of counts, or other charges")
    if counts is not None and len(counts) != 2:
        raise TamperedError("the counts beside the published table are not two: of right and of wrong answers")
    return Publication(asked=asked, budget=budget, events=events, table=table, counts=counts)


def problems(stated: dict[str, Any], publication: Publication, training: Budget, schema: Schema) -> list[str]:
    """Return what is wrong with a publication: charges, prices and figures must agree.

    Args:
        stated: the certificate's field.
        publication: what `read` made of it.
        training: the budget of the run.
        schema: the certificate's public facts.
    """
    budget, events, wrong = publication.budget, publication.events, []
    unit = "person" if schema.by_person else "record"
    queries = 1 if publication.counts is None else QUERIES
    moves = moved(training.relation, len(schema.classes), queries=queries)
    for number, event in enumerate(events):
        assert isinstance(event, LaplaceEvent)
        facts = (event.part, event.step, event.queries, event.row_unit, event.moved, event.relation, event.noise)
        if facts != (PART, number, queries, unit, moves, training.relation, "operating-system"):
            wrong.append("the accuracy ledger was charged for something else than a table of answers")
            break
    paid = sum(event.loss * event.moved for event in events if isinstance(event, LaplaceEvent))
    if (budget.relation, budget.accountant) != (training.relation, "exact") or math.isinf(training.epsilon):
        wrong.append("the published table and the release do not count the same neighbours, or have no guarantee")
    if not math.isclose(paid, budget.epsilon, rel_tol=1e-9):
        wrong.append(f"the published table cost ε = {upwards(paid)} without δ, and its budget is {budget.epsilon:g}")
    if wrong:
        return wrong
    if not budget.pricing().epsilon(events, budget.delta) <= budget.epsilon:
        return ["the accuracy ledger adds up to more than its budget"]
    expected = publication.fields(training, schema)
    if set(stated) != set(expected):
        return ["the published accuracy has a missing or an unknown field"]
    return [
        f"the published accuracy states {name} {str(stated[name])[:200]!r}, but its table and ledger give "
        f"{str(value)[:200]!r}"
        for name, value in expected.items()
        if not alike(stated[name], value, within=ROUNDING if name == "figures" else 0.0)
    ]


def moved(relation: str, classes: int, *, queries: int = QUERIES) -> int:
    """Return how many released counts differ between neighbours, by one each.

    A record adds one to one count of each query. So one that is present or absent moves one per query, and one that is
    replaced two, if there are as many.

    Args:
        relation: The neighbouring relation.
        classes: Number of classes.
        queries: The table alone, or the counts, too.
    """
    return queries if relation == "add-remove" else min(2, classes**2) * queries


def alike(one: object, other: object, *, within: float) -> bool:
    """Return whether two JSON values are the same, floats up to `within` (or the last digits)."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=within)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(a, b, within=within) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(alike(one[name], other[name], within=within) for name in one)
    return type(one) is type(other) and one == other


def publication_of(run: Path, weights_sha256: str, schema: Schema) -> tuple[Publication, Path] | None:
    """Return what a run has published about the model with these weights, and its ledger; None if nothing.

    Raises:
        DatalensError: the files are damaged.
    """
    path = run / KEPT
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["weights"] != weights_sha256:  # it was about another model: this release has nothing of it
            return None
        ledger = run / str(kept["folder"]) / "ledger.jsonl"
        return read(kept, *read_ledger(ledger), schema), ledger
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatalensError(f"{path} is damaged ({type(error).__name__}): put a copy of it back") from error


def figures_of(fields: dict[str, Any]) -> Figures:
    """Return the figures that a certificate's field states."""
    found = dict(fields["figures"])
    found["classes"] = tuple(None if one is None else tuple(one) for one in found["classes"])
    return Figures(**found)


def number_of(fields: dict[str, Any]) -> str:
    """Return the declared number of held-out records as text."""
    return ("" if fields["asked"]["exact"] else "about ") + str(fields["asked"]["held_out"])


def said(fields: dict[str, Any]) -> list[str]:
    """Return the published accuracy of a certificate as lines of text."""
    f = figures_of(fields)
    units = "persons" if fields["privacy_unit"] == f"one {PERSON}" else "records"
    terms = Budget(**fields["budget"], relation=fields["relation"], accountant=fields["accountant"])
    of_it = "with the noise and the chance of the sample"
    if f.sample is not None:
        of_it = f"of which the noise alone makes ± {f.noise:.4f}, and the chance of which {units} are held out "
        of_it += f"± {f.sample:.4f}"
    return [
        f"published accuracy {f.accuracy:.4f} (95 %: {f.low:.4f} to {f.high:.4f}, {of_it}) on {number_of(fields)} "
        f"held-out {units}, by {fields['answered_by']}",
        f"always guessing the largest class: {f.majority:.4f} (noise: {f.majority_low:.4f} to {f.majority_high:.4f})",
        f"verdict: {f.verdict}",
        f"covered: each of these {units} pays {terms.describe(terms.epsilon)}",
    ]
