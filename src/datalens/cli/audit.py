"""`datalens audit`: try to prove the claimed ε wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import audited, synthetic_of
from datalens.errors import DatalensError
from datalens.options import DataFolder, Json, ReadingOptions

_Epsilon = Annotated[float, arg(help="The claimed ε, which the audit tries to refute.")]
_Delta = Annotated[float, arg(help="The claimed δ; the lower bound on ε is for the same δ.")]
_Relation = Annotated[Literal["add-remove", "replace-one"], arg(help="Neighbouring data sets.")]


@dataclass(frozen=True, kw_only=True)
class AuditMechanism:
    """Audit the noise: thousands of releases with one teacher's votes flipped or not. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """The accountant whose price is the claim."""
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Kind of noise; all: every kind that is available here."""
    trials: int = 10_000
    """Number of releases from each of the two neighbouring data sets."""
    releases: int = 4
    """Also audit a composition of so many releases, at the same total cost."""
    k: int = 8
    """Number of coordinates that a teacher votes on, per image."""
    images: int = 4
    """Number of synthetic images in a release."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import mechanism
        from datalens.privacy.audit import Plan

        plan = Plan(
            epsilon=self.epsilon,
            delta=self.delta,
            relation=self.relation,
            accountant=self.accountant,
            trials=self.trials,
            k=self.k,
            images=self.images,
        )
        if self.releases < 1:
            raise DatalensError(f"--releases must be at least 1, not {self.releases}")
        laws = mechanism.laws() if self.noise == "all" else (self.noise,)
        result = mechanism.mechanism_report(plan, laws, releases=self.releases)
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditEndToEnd:
    """Audit whole training runs: many tiny runs on made-up records, with or without a canary in a worst-case share."""

    epsilon: _Epsilon = 4.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    runs: int = 500
    """Number of runs on each of the two neighbouring data sets."""
    canaries: int = 1000
    """Number of canaries of the one-run audit."""
    steps: int = 2
    """Number of steps of each run."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import end_to_end, mechanism

        result = end_to_end.end_to_end_report(
            end_to_end.Question(
                epsilon=self.epsilon,
                delta=self.delta,
                relation=self.relation,
                runs=self.runs,
                canaries=self.canaries,
                steps=self.steps,
            )
        )
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditMoments:
    """Audit private moments: thousands of releases with or without a worst-case record. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Kind of noise; all: every kind that is available here."""
    trials: int = 10_000
    """Number of releases from each of the two neighbouring data sets."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import mechanism, moments

        question = moments.Question(epsilon=self.epsilon, delta=self.delta, trials=self.trials)
        laws = mechanism.laws() if self.noise == "all" else (self.noise,)
        result = moments.report(question, laws)
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditMethods:
    """Audit the mechanisms of the other methods, with one record or one share changed. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    trials: int = 10_000
    """Number of releases of each mechanism from each of the two neighbouring data sets."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import mechanism, methods

        question = methods.Question(epsilon=self.epsilon, delta=self.delta, trials=self.trials)
        result = methods.report(question)
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditWiring:
    """Check in tiny runs of every method that only charged values reach the released side. No data is read."""

    method: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: all, and sgd)")] = None
    """Check one method only, which may be another package's."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import wiring

        result = wiring.report(self.method)
        return audited(result, wiring.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditAttacks:
    """Attack a synthetic set: membership inference and copies. For the owner only: the result is not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: Annotated[str, arg(metavar="NAME|PATH")]
    """The real data set that it was made from; its test split is used as held-out data."""
    data_folder: DataFolder = None
    """Folder of a named data set that cannot be downloaded."""
    files: ReadingOptions = field(default_factory=ReadingOptions)
    count: int = 10_000
    """Number of synthetic images to draw from a run."""
    records: int = 60_000
    """The most training images, and the most held-out images, to use."""
    shadows: int = 0
    """Train so many shadow models with the options of the run, for a stronger attack."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.data import formats
        from datalens.data.own.reading import Reading
        from datalens.evaluate import attacks, owner_report

        if self.records < 1:
            raise DatalensError(f"--records must be at least 1, not {self.records}")
        dataset = synthetic_of(self.synthetic, self.count)
        reading = Reading.of(self.files)
        training = formats.load_some(self.data, most=self.records, folder=self.data_folder, reading=reading)
        held_out = formats.load(self.data, "test", folder=self.data_folder, reading=reading)
        shadows = None
        if self.shadows:
            shadows = attacks.shadows_of(self.synthetic, training, held_out, dataset, count=self.shadows)
        result = attacks.report(dataset, training, held_out, shadows=shadows)
        lines = attacks.report_lines(result)
        if (self.synthetic / "config.json").is_file():  # a run: `datalens report` shows it to the owner
            owner_report.keep(self.synthetic, owner_report.AUDIT, {"attacks": {**result, "lines": lines}})
        return audited(result, lines, json=self.json)


COMMANDS: dict[str, type] = {
    "mechanism": AuditMechanism,
    "end-to-end": AuditEndToEnd,
    "moments": AuditMoments,
    "methods": AuditMethods,
    "wiring": AuditWiring,
    "attacks": AuditAttacks,
}
DESCRIPTION = (
    "Try to refute the claimed ε. Exit code 1 if that succeeds, or if a deliberately broken mechanism is not caught."
)
