"""DataLens from Python, as an estimator in the style of scikit-learn: construct with plain values, `fit`, `sample`."""

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np
from sklearn.base import BaseEstimator

from datalens.errors import DatalensError, TamperedError
from datalens.files import write_atomically
from datalens.options import TrainOptions, check_value
from datalens.run.scratch import Scratch

if TYPE_CHECKING:
    from datalens.released.synthetic import SyntheticDataset

Path_ = str | Path


class Certificate:
    """The guarantee of a release: all fields of certificate.json as attributes; `epsilon` and `delta` of its budget."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @property
    def epsilon(self) -> float:
        """ε of the budget, which was fixed before training."""
        return float(self._fields["budget"]["epsilon"])

    @property
    def delta(self) -> float:
        """δ of the budget: roughly the probability that the guarantee of ε fails."""
        return float(self._fields["budget"]["delta"])

    @property
    def epsilon_spent(self) -> float:
        """ε that was spent, for information; the guarantee is that of the budget."""
        return float(self._fields["epsilon_spent"])

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(f"the certificate has no {name!r}") from None

    def __repr__(self) -> str:
        return f"<{self._fields['statement']}>"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields of certificate.json."""
        return dict(self._fields)


# Options of `datalens train` that are parameters here; of the other shared options, only `_ALSO` may be in `options`.
_OWN = ("epsilon", "delta", "method", "relation", "preset", "warm_start", "accountant", "noise", "seed", "device")
_ALSO = ("noise_seed", "tensorboard")


# Options of the command line → what they are called here, where the name differs.
_CALLED = {"count": "n", "class": "labels", "label": "labels", "record-id": "groups", "data": "name"}


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Name the parameters of Python, instead of options of the command line, in errors."""
    try:
        yield
    except DatalensError as error:
        parts = str(error).split("`")  # between backquotes are commands, which stay as they are typed
        parts[::2] = (re.sub(r"--([a-z][a-z-]*[a-z])", lambda found: _called(found[1]), part) for part in parts[::2])
        said = "`".join(parts)
        if said == str(error):
            raise
        raise type(error)(said, exit_code=error.exit_code) from None


def _called(option: str) -> str:
    name = _CALLED.get(option, option.replace("-", "_"))
    known = {*signature(DataLens.__init__).parameters, *_CALLED.values(), "balanced"}
    return f"{name}=" if name in known else f"options={{'{name}': …}}"


_KEPT = (
    "The release is kept with this model, and with its pickle; nothing else of the run is kept. Save it with "
    "model.save('release')"
)


class DataLens(BaseEstimator):
    """Private labelled images in, synthetic ones out, with a differential-privacy certificate.

    Args:
        epsilon: privacy budget.
        delta: of the budget; choose it well under 1 / number of records.
        method: as in `datalens train`.
        relation: add-remove (one record present or absent) or replace-one.
        nominal_size: about how many records there are, declared public. Default: the true number is declared public,
            with a warning. Under add-remove it is private: anybody who knows all other records can tell from it whether
            the last one is there. (Under replace-one it is public anyway.)
        classes: all labels that are possible, declared public. Default: the labels that occur, with a warning, and the
            certificate states this condition: the only record of a class would reveal itself.
        name: of the data set, for the certificate.
        preset: as in `datalens train`.
        warm_start: as in `datalens train`.
        accountant: as in `datalens train`.
        noise: as in `datalens train`.
        seed: of training. Privacy noise comes from the operating system.
        device: as in `datalens train`.
        budget: folder of the budget that all runs on this data share (docs/budget.md).
        group_name: what the ids are that `fit` gets as `groups`, such as "patient". Required with `budget`, since
            charges for visits and charges for patients must not be added up.
        out: folder in which the private run is kept. If `fit` is interrupted, the next call continues the run there; it
            is refused if the run was begun with another `budget`, or without one.
        options: any other option of `datalens train`, such as `{"coordinates": 100}`.
        class_names: names of the classes, such as `{0: "male", 1: "female"}`. Without `classes`, this declares them.

    Examples:
        >>> from sklearn.datasets import load_digits
        >>> from datalens import DataLens
        >>> digits = load_digits()
        >>> model = DataLens(epsilon=5.0, delta=1e-5, nominal_size=1800, classes=range(10), options={"texture": 0})
        >>> model = model.fit(digits.images / 16, digits.target)
        >>> synthetic = model.sample(100)
        >>> synthetic.images.shape, synthetic.labels.shape
        ((100, 8, 8, 1), (100,))
        >>> print(model.certificate.statement)
        (5, 1e-05)-differentially private for one image present or absent (add-remove), priced by the exact accountant.
        >>> model.certificate.epsilon, model.certificate.delta, model.certificate.relation
        (5.0, 1e-05, 'add-remove')
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        method: str = "datalens",
        relation: Literal["add-remove", "replace-one"] = "add-remove",
        nominal_size: int | None = None,
        classes: Sequence[Any] | None = None,
        name: str = "data",
        preset: str | None = None,
        warm_start: Literal["moments", "off"] | None = None,
        accountant: Literal["exact", "rdp", "rdp-improved", "pld"] | None = None,
        noise: Literal["discrete-gaussian", "gaussian"] | None = None,
        seed: int = 0,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        budget: Path_ | None = None,
        group_name: str | None = None,
        out: Path_ | None = None,
        options: Mapping[str, Any] | None = None,
        class_names: Mapping[Any, str] | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.relation = relation
        self.nominal_size = nominal_size
        self.classes = classes
        self.name = name
        self.preset = preset
        self.warm_start = warm_start
        self.accountant = accountant
        self.noise = noise
        self.seed = seed
        self.device = device
        self.budget = budget
        self.group_name = group_name
        self.out = out
        self.options = options
        self.class_names = class_names

    @_in_python()
    def fit(self, images: Any, labels: Any = None, *, groups: Any = None) -> "DataLens":
        """Train, and keep the release. The records are not kept.

        Args:
            images: numpy or torch array, uint8 or floats in [0, 1], `[n, height, width]` or with channels; or a Hugging
                Face `datasets.Dataset` or a `torch.utils.data.Dataset` of (image, label), both with labels inside.
            labels: one for each image, whole numbers or names. Default: all images are of one class.
            groups: an id for each image, text or a whole number, of the person whose image it is. Then a person with
                all of their images is the privacy unit, and `nominal_size` counts persons. Default: each image is
                protected by itself.

        Returns:
            This estimator.

        Raises:
            DatalensError: parameters or data are invalid.
            BudgetExceeded: the budget does not cover the run.
        """
        from datalens.data.own.python import records_and_classes
        from datalens.driver import train

        units = "records" if groups is None else "persons"
        if groups is not None and self.budget is not None and not self.group_name:
            raise DatalensError("name the kind of ids in groups, such as group_name='patient': budget= depends on it")
        if hasattr(self, "release_") and self.budget is None:
            warnings.warn(
                "a second fit spends a second epsilon on records that are in both: budget= keeps count of the total",
                stacklevel=3,
            )
        if self.nominal_size is None and self.relation == "add-remove":
            warnings.warn(
                f"the true number of {units} is declared public; under add-remove it is private: give a round figure "
                "with nominal_size=",
                stacklevel=3,
            )
        records, values = records_and_classes(
            images,
            labels,
            nominal_size=self.nominal_size,
            classes=self.classes,
            class_names=self.class_names,
            ids=groups,
            by_person=groups is not None,
            name=self.name,
            size_is_public=self.relation == "replace-one",
        )
        if "classes" in records.schema.given:
            warnings.warn(
                "the labels that occur are declared public, and reveal a record that is the only one of its class: "
                "declare the possible labels with classes=",
                stacklevel=3,
            )
        home = Scratch()  # private; deleted with the model or, if this process is killed, when the next one is made
        run = Path(home.name) / "run" if self.out is None else Path(self.out)
        asked = self._asked(run, group_name=self.group_name if groups is not None else None)
        given = {*_OWN, *(self.options or {}), "noise_seed"} - {"device"}
        given |= {name for name in ("budget", "record_id") if getattr(asked, name) is not None}
        train(asked, given=given, records=records, kept=_KEPT if self.out is None else None)
        if self.out is None:  # keep the release only: the rest is private, and not wanted
            for path in run.iterdir():
                if path.name != "release":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._keep(run / "release", home)
        self.classes_ = np.array(values)
        return self

    @_in_python()
    def sample(
        self,
        n: int = 10_000,
        *,
        labels: Sequence[int | str] | None = None,
        balanced: bool = False,
        seed: int | None = None,
    ) -> "SyntheticDataset":
        """Draw synthetic images.

        Args:
            n: number of images.
            labels: classes to draw, by name or number. Default: all.
            balanced: draw as many images of each class. Otherwise classes come in proportion to their released counts,
                if there are any.
            seed: the same seed gives the same images. Default: the estimator's.

        Returns:
            A data set with `.images`, `.labels` (numbers into `classes_`), `.to_torch()`, `.to_parquet(path)`, …
        """
        from datalens.released.release import sample

        return sample(
            self._release(), count=n, seed=self.seed if seed is None else seed, balanced=balanced, labels=labels
        )

    @property
    def certificate(self) -> Certificate:
        """The certificate of the release, after verifying it.

        Raises:
            TamperedError: the release does not verify.
        """
        from datalens.released.verification import verified

        return Certificate(verified(self._release()))

    def save(self, path: Path_, *, force: bool = False) -> None:
        """Copy the release to a folder: generator, certificate, ledger, a picture. All of it may be handed on.

        Args:
            path: a new or empty folder.
            force: replace the release that is there.

        Raises:
            DatalensError: something else is there.
        """
        from datalens.released.certificate import CERTIFICATE

        source, target = self._release(), Path(path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            if not force or not (target / CERTIFICATE).is_file():
                raise DatalensError(f"{path} exists: choose another name, or pass force=True to replace a release")
            shutil.rmtree(target)
        shutil.copytree(source, target, dirs_exist_ok=True)

    def report(self, path: Path_) -> None:
        """Write the report of the release, an HTML page for people that may be handed on.

        Args:
            path: of the HTML file.

        Raises:
            DatalensError: there is no release yet, or the file exists and is not a page of ours.
        """
        from datalens.pages import check_may_replace
        from datalens.released.report import page

        check_may_replace(Path(path))
        write_atomically(Path(path), page(self._release()))

    @classmethod
    def load(cls, path: Path_) -> "DataLens":
        """Load a release that `save` or `datalens train` wrote, after verifying it.

        Args:
            path: the release folder.

        Raises:
            TamperedError: the release does not verify.
            DatalensError: it is not a release.
        """
        from datalens.released.release import load_generator
        from datalens.released.verification import check_release

        release = Path(path)
        verification = check_release(release)
        if verification.problems:
            raise TamperedError(f"the certificate of {path} does not stand: {verification.problems[0]}")
        model = cls()
        home = Scratch()  # a copy, since the folder may change or be deleted
        model._keep(Path(shutil.copytree(release, Path(home.name) / "release")), home)
        certificate = model.certificate
        model.set_params(
            epsilon=certificate.epsilon,
            delta=certificate.delta,
            relation=certificate.relation,
            accountant=certificate.accountant,
            method=certificate.settings["method"],
            seed=certificate.settings["seed"],
            nominal_size=certificate.public["nominal_size"],
            name=certificate.public["name"],
        )
        model.classes_ = np.array(load_generator(release)[1])
        return model

    def _asked(self, run: Path, *, group_name: str | None) -> TrainOptions:
        """Return the parameters as the options of a run."""
        options = dict(self.options or {})
        if both := [name for name in options if name in _OWN]:
            raise DatalensError(f"options: {both[0]!r} is a parameter of DataLens itself: give it there")
        kinds = get_type_hints(TrainOptions, include_extras=True)
        if refused := [name for name in options if name in kinds and name not in _ALSO]:
            raise DatalensError(f"options: {refused[0]!r} is no option of `datalens train` that can be set from here")
        asked = {name: getattr(self, name) for name in _OWN} | options
        for name in asked.keys() & kinds.keys():
            check_value(name, asked[name], kinds[name])
            if asked[name] != asked[name]:  # NaN
                raise DatalensError(f"{name} must be a number, not {asked[name]!r}")
        folder = None if self.budget is None else Path(self.budget)
        begun = (run / "config.json").is_file()
        return TrainOptions(data=self.name, out=run, budget=folder, resume=begun, record_id=group_name, **asked)

    def _keep(self, release: Path, home: Scratch) -> None:
        self._home, self.release_ = home, release
        self._files = {path.name: path.read_bytes() for path in sorted(release.iterdir())}

    def _release(self) -> Path:
        """Return the folder of the release; one that was deleted (as temporary folders are) is written again."""
        if not hasattr(self, "release_"):
            raise DatalensError("this model has no release yet: call fit, or DataLens.load")
        if not self.release_.is_dir():
            self._restore()
        return self.release_

    def _restore(self) -> None:
        """Write the release from memory to a new temporary folder."""
        self._home = Scratch()
        self.release_ = Path(self._home.name) / "release"
        self.release_.mkdir()
        for name, content in self._files.items():
            (self.release_ / name).write_bytes(content)

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters and, as bytes, the files of the release. (A path would not outlive this process.)"""
        state = dict(super().__getstate__())
        return {name: value for name, value in state.items() if name not in ("_home", "release_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled model. Its release is verified when it is used, as any other.

        Raises:
            DatalensError: the pickle has files that no release has.
        """
        super().__setstate__(state)
        if not hasattr(self, "_files"):
            return
        if strange := [name for name in self._files if Path(name).name != name or name.startswith(".")]:
            raise DatalensError(f"the pickled model has {strange[0]!r}, which is no file of a release: save it again")
        self._restore()
