"""`datalens evaluate`: measure how useful, how varied and how faithful synthetic images are."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import show, synthetic_of
from datalens.errors import DatalensError, NoTestImages
from datalens.options import DataFolder, Json, ReadingOptions
from datalens.progress import LONG, counted, duration, say

if TYPE_CHECKING:
    from datalens.data.own.reading import Reading
    from datalens.data.records import Dataset
    from datalens.evaluate.measures import Settings

# What --quick sets, and the most test images that it uses: under 30 s on two cores for images of 64x64.
QUICK = {"count": 800, "seeds": 1, "epochs": 8}
QUICK_TEST = 2000


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Train classifiers on synthetic images, test them on real ones, and more. For the owner only: not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set to test on: its test images or, in a file of their own, all of them."""
    real_train: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="")] = None
    """Real images to train the classifier on for comparison, where --data holds test images only."""
    quick: Annotated[bool, arg(help_behavior_hint="")] = False
    """A quick look: 800 synthetic images, one classifier, images of at most about 32 pixels a side."""
    data_folder: DataFolder = None
    """Folder of a named data set that cannot be downloaded."""
    files: ReadingOptions = field(default_factory=ReadingOptions)
    measures: tuple[Literal["utility", "inception", "fid", "faithfulness", "all"], ...] = ("utility",)
    """utility: accuracy. inception: Inception Score. fid: Fréchet distance. faithfulness: overlap, leaks, balance."""
    seeds: int = 3
    """Number of classifiers to train; their mean and spread are reported."""
    epochs: int = 10
    """Epochs of each classifier; the result is that of the last epoch."""
    count: int = 10_000
    """Number of synthetic images to draw from a run."""
    sizes: tuple[int, ...] = ()
    """Measure accuracy with these numbers of synthetic images, such as 1000 10000 100000; default: with all."""
    classifier: tuple[Literal["paper", "augmented", "logistic", "mlp", "resnet", "all"], ...] = ("paper",)
    """paper: the paper's. augmented: of that size, with batch norm, trained on slightly shifted and noisy images."""
    features: Literal["own", "inception", "pixels"] = "own"
    """Features for fid and faithfulness. own: of a classifier trained on the data set. inception: of Inception-v3
    (`datalens data get inception`)."""
    splits: int = 10
    """Number of splits for the Inception Score."""
    real: int = 60_000
    """The most real training images to compare with, and to train the data set's own classifier on."""
    judge_epochs: int = 15
    """Epochs of the data set's own classifier."""
    fresh: bool = False
    """Measure again, instead of using cached results."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.data.own.reading import Reading
        from datalens.driver import choose_device
        from datalens.evaluate import measures
        from datalens.evaluate.classifiers import UTILITY

        if self.quick:
            return self._quickly()()

        names = tuple(measures.KEYS) if "all" in self.measures else tuple(dict.fromkeys(self.measures))
        classifiers = UTILITY if "all" in self.classifier else tuple(dict.fromkeys(self.classifier))
        device = choose_device(self.device)
        if min(self.sizes, default=1) < 1:
            raise DatalensError(f"--sizes must be at least 1, not {min(self.sizes)}")
        needed = max((*self.sizes, *(() if self.sizes and names == ("utility",) else (self.count,))))
        reading = Reading.of(self.files)
        test, training = self._real(reading)
        began = time.monotonic()
        dataset = synthetic_of(self.synthetic, needed)
        sampling = time.monotonic() - began
        test = aligned(test, dataset.classes, self.data)
        settings = measures.Settings(
            data=self.data,
            sizes=tuple(dict.fromkeys(self.sizes)) or (len(dataset.images),),
            classifiers=classifiers,  # type: ignore[arg-type]
            seeds=self.seeds,
            epochs=self.epochs,
            features=self.features,
            splits=self.splits,
            real=self.real,
            judge_epochs=self.judge_epochs,
            quick=self.looks_quickly,
        )
        if self.looks_quickly and len(test.images) > QUICK_TEST:
            test = part_of(test, QUICK_TEST)

        def real(most: int) -> "Dataset":
            assert training is not None
            return aligned(training(most), dataset.classes, self.real_train or self.data)

        bench = measures.Bench(
            dataset, test, None if training is None else real, settings, device=device, fresh=self.fresh
        )
        if "utility" in names:
            self._say_how_long(settings, test, sampling, str(device))
        results = {}
        for name in names:
            results[measures.KEYS[name]] = bench.measure(name)  # type: ignore[index, arg-type]
            if measures.is_run(self.synthetic) and self._kept(name):  # as soon as each is known
                measures.record(self.synthetic, {measures.KEYS[name]: results[measures.KEYS[name]]})  # type: ignore[index]
        fields = {"note": measures.NOTE, **results.get("utility", {}), **results}
        show(fields, measures.lines(results, dataset.classes), json=self.json)
        return 0

    @property
    def looks_quickly(self) -> bool:
        return isinstance(self, Quickly)

    def _quickly(self) -> "Quickly":
        """Return the same command with the settings of a quick look."""
        defaults = {f.name: f.default for f in dataclasses.fields(Evaluate)}
        fixed = (*QUICK, "sizes", "classifier", "measures")
        if changed := [name for name in fixed if getattr(self, name) != defaults[name]]:
            raise DatalensError(f"--quick sets --{changed[0]} itself: leave one of them out")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Evaluate)}
        return Quickly(**{**fields, **QUICK, "quick": False})

    def _real(self, reading: "Reading") -> "tuple[Dataset, Callable[[int], Dataset] | None]":
        """Return the test images, and what reads training images to compare with; None: there are none."""
        from datalens.data import formats

        def training(most: int) -> "Dataset":
            source = self.real_train or self.data
            return formats.load_some(source, most=most, folder=self.data_folder, reading=reading)

        try:
            test = formats.load(self.data, "test", folder=self.data_folder, reading=reading)
        except NoTestImages as error:
            if self._trained_on():
                raise DatalensError(f"{error}; the run was trained on all that is there") from None
            test = formats.load(self.data, nominal_size=1, reading=reading)
            held = counted(len(test.images), "image")
            say(f"all {held} of {self.data} are the test set: none may have been trained on")
            return test, None if self.real_train is None else training
        return test, training

    def _trained_on(self) -> bool:
        """Return whether the run that is evaluated was trained on this data."""
        from datalens.evaluate import measures
        from datalens.run.folder import read_config

        if not measures.is_run(self.synthetic):
            return False
        trained = Path(read_config(self.synthetic)["options"]["data"])
        return trained.exists() and trained.resolve() == Path(self.data).resolve()

    def _kept(self, name: str) -> bool:
        """Return whether the run keeps this result: a quick look does not replace a careful one."""
        from datalens.evaluate import measures

        before = measures.read(self.synthetic).get(measures.KEYS[name])  # type: ignore[index]
        careful = isinstance(before, dict) and not before.get("settings", {}).get("quick")
        return not (self.looks_quickly and careful)

    def _say_how_long(self, settings: "Settings", test: "Dataset", sampling: float, device: str) -> None:
        """Say about how long this will take, from a timed step, and how long the other way of looking takes."""
        from datalens.evaluate.utility import step_seconds, training_seconds

        shape, steps = test.schema.shape, {}
        for name in settings.classifiers:
            steps[name] = step_seconds(shape, name, device=device)
        if self.looks_quickly:
            count, seeds, epochs = Evaluate.count, Evaluate.seeds, Evaluate.epochs  # the defaults
            one = training_seconds(steps["paper"], images=count, test=len(test.images), epochs=epochs, tests=epochs)
            careful = (seeds + 1) * one + sampling * count / QUICK["count"]
            say(f"a careful look (without --quick) takes about {duration(careful)} on this machine")
            return
        total = sum(
            (settings.seeds + 1)
            * training_seconds(step, images=size, test=len(test.images), epochs=settings.epochs, tests=settings.epochs)
            for step in steps.values()
            for size in settings.sizes
        )
        if total > LONG:
            say(
                f"about {duration(total)}: {counted(settings.seeds, 'classifier')} on synthetic images and one on real "
                "ones, by a timed step (--quick is much quicker)"
            )


class Quickly(Evaluate):
    """A quick look."""


def part_of(test: "Dataset", most: int) -> "Dataset":
    """Return so many test images, drawn at random."""
    from datalens.data.records import draw

    chosen = draw(len(test.images), most, seed=0)
    return dataclasses.replace(test, images=test.images[chosen], labels=test.labels[chosen], ids=None)


def aligned(real: "Dataset", classes: tuple[str, ...], where: str) -> "Dataset":
    """Return real images with the labels of the synthetic set: classes are matched by their names.

    A file of test images may lack a class, or have its classes in another order. Where names differ, and there are as
    many classes, they are matched by their order, as those of named data sets are.

    Raises:
        DatalensError: a class of the real images is none of the synthetic set.
    """
    import numpy as np

    names = real.schema.classes
    if names == classes:
        return real
    unknown = [name for name in names if name not in classes]
    if not unknown:
        numbers = np.array([classes.index(name) for name in names], dtype=np.int64)
        return dataclasses.replace(real, labels=numbers[real.labels])
    if len(names) == len(classes):
        return real
    raise DatalensError(
        f"{where} has the class {unknown[0]!r}, and the synthetic images have {', '.join(classes)[:200]}: name the "
        "same --label, or give the classes these names with --class-names"
    )
