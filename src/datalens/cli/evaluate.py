"""`datalens evaluate`: measure how useful, how varied and how faithful synthetic images are."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import show, synthetic_of
from datalens.errors import DatalensError
from datalens.options import DataFolder, Json, ReadingOptions


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Train classifiers on synthetic images, test them on real ones, and more. For the owner only: not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set to test on."""
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
    publish: bool = False
    """Release an accuracy that may be published: answers on held-out records, with noise, into the release. It costs
    the held-out records --epsilon. Nothing else is measured."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """With --publish: what it may cost a held-out record. 0.1 is little."""
    delta: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the run's)")] = None
    """With --publish: the δ beside that ε."""
    overlap: Literal["find-out", "none", "some"] = "find-out"
    """With --publish: whether records that were trained on may be among the held-out ones, if you know."""
    held_out: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """With --publish, your own data: about how many records (persons) are held out, declared public."""
    budget: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: the run's)")] = None
    """With --publish: the budget that the held-out records belong to."""
    plan: bool = False
    """With --publish: say which interval to expect, and release nothing."""
    again: bool = False
    """With --publish: pay once more, for a table that an interruption lost or that a new release needs."""
    json: Json = False

    def __call__(self) -> int:
        if self.publish:
            return self._publish()
        return self._measure()

    def _publish(self) -> int:
        from datalens.evaluate import publish

        classifier = "augmented" if self.classifier[0] in ("paper", "all") else self.classifier[0]
        fields, lines = publish.command(self.synthetic, self, classifier=classifier, plan_only=self.plan)
        show(fields, lines, json=self.json)
        return 0

    def _measure(self) -> int:
        from datalens.data import formats
        from datalens.data.own.reading import Reading
        from datalens.data.records import Dataset
        from datalens.driver import choose_device
        from datalens.evaluate import measures
        from datalens.evaluate.classifiers import UTILITY

        names = tuple(measures.KEYS) if "all" in self.measures else tuple(dict.fromkeys(self.measures))
        classifiers = UTILITY if "all" in self.classifier else tuple(dict.fromkeys(self.classifier))
        device = choose_device(self.device)
        if min(self.sizes, default=1) < 1:
            raise DatalensError(f"--sizes must be at least 1, not {min(self.sizes)}")
        needed = max((*self.sizes, *(() if self.sizes and names == ("utility",) else (self.count,))))
        reading = Reading.of(self.files)
        test = formats.load(self.data, "test", folder=self.data_folder, reading=reading)
        dataset = synthetic_of(self.synthetic, needed)
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
        )

        def training(most: int) -> Dataset:
            return formats.load_some(self.data, most=most, folder=self.data_folder, reading=reading)

        bench = measures.Bench(dataset, test, training, settings, device=device, fresh=self.fresh)
        results = {}
        for name in names:
            results[measures.KEYS[name]] = bench.measure(name)  # type: ignore[index, arg-type]
            if measures.is_run(self.synthetic):  # as soon as each is known
                measures.record(self.synthetic, {measures.KEYS[name]: results[measures.KEYS[name]]})  # type: ignore[index]
        fields = {"note": measures.NOTE, **results.get("utility", {}), **results}
        show(fields, measures.lines(results, dataset.classes), json=self.json)
        return 0
