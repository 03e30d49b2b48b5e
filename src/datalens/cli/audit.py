"""`datalens audit`: try to prove the claimed ε wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import audited, synthetic_of
from datalens.errors import DatalensError
from datalens.options import DataFolder, Json, ReadingOptions

_Epsilon = Annotated[float, arg(help="The claim under attack.")]
_Delta = Annotated[float, arg(help="The bound on ε is at this δ too.")]
_Relation = Annotated[Literal["add-remove", "replace-one"], arg(help="Neighbouring data sets.")]


@dataclass(frozen=True, kw_only=True)
class AuditMechanism:
    """Attack the noise itself: one teacher's votes, all flipped or not, thousands of releases. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """Whose price is the claim."""
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Which law; all that work here unless one is named."""
    trials: int = 10_000
    """Releases in each of the two worlds."""
    releases: int = 4
    """Audit a composition of so many, too, at the same total cost."""
    k: int = 8
    """Coordinates a teacher votes on, per image."""
    images: int = 4
    """Synthetic images in a release."""
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
    """Attack whole training runs: a canary in a worst-case share, in or out. Many tiny runs on made-up records."""

    epsilon: _Epsilon = 4.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    runs: int = 500
    """Runs in each of the two worlds."""
    canaries: int = 1000
    """Canaries of the one-run audit."""
    steps: int = 2
    """Steps of each run."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import end_to_end
        from datalens.evaluate.audits import mechanism as mechanism

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
    """Attack private moments: a worst-case record, present or absent; thousands of releases. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Which law; all that work here unless one is named."""
    trials: int = 10_000
    """Releases in each of the two worlds."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import mechanism as mechanism
        from datalens.evaluate.audits import moments

        question = moments.Question(epsilon=self.epsilon, delta=self.delta, trials=self.trials)
        laws = mechanism.laws() if self.noise == "all" else (self.noise,)
        result = moments.report(question, laws)
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditMethods:
    """Attack the mechanisms of the other methods, one record or one share apart. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    trials: int = 10_000
    """Releases in each of the two worlds, of each mechanism."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import mechanism as mechanism
        from datalens.evaluate.audits import methods

        question = methods.Question(epsilon=self.epsilon, delta=self.delta, trials=self.trials)
        result = methods.report(question)
        return audited(result, mechanism.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditWiring:
    """Watch tiny runs of every method: does anything but what is paid for reach the released side? No data is read."""

    method: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: all, and sgd)")] = None
    """One method, also one that another package brings."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate.audits import wiring

        result = wiring.report(self.method)
        return audited(result, wiring.report_lines(result), json=self.json)


@dataclass(frozen=True, kw_only=True)
class AuditAttacks:
    """Attack a synthetic set: membership and copies. For the owner: the result is not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set it was made from; its test split is held out."""
    data_folder: DataFolder = None
    """Where a named data set lies that cannot be downloaded."""
    files: ReadingOptions = field(default_factory=ReadingOptions)
    count: int = 10_000
    """Synthetic images to attack, when a run is given."""
    records: int = 60_000
    """Real images of each kind to use, at most."""
    shadows: int = 0
    """Train so many models of our own, with the options of the run, for a sharper attack."""
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
    "Try to prove the claimed ε wrong. Exit code 1 if that works, or if a deliberately broken twin is not caught."
)
