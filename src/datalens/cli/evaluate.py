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
    epochs: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 10; authors: 600; dpimagebench: 50)")
    ] = None
    """Epochs of each classifier; the result is that of the last epoch."""
    count: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 10000; authors: 100000; dpimagebench: 60000)")
    ] = None
    """Number of synthetic images to draw from a run."""
    sizes: tuple[int, ...] = ()
    """Measure accuracy with these numbers of synthetic images, such as 1000 10000 100000; default: with all."""
    classifier: tuple[Literal["paper", "augmented", "logistic", "mlp", "resnet", "authors", "all"], ...] = ("paper",)
    """paper: of the paper's size. augmented: with batch norm, trained on slightly shifted and noisy images. authors: as
    in their code, whose figure is the best epoch on test data: only to compare with the paper."""
    protocol: Literal["ours", "dpimagebench"] = "ours"
    """dpimagebench: accuracy by DPImageBench's protocol instead (three large networks: on a GPU)."""
    small: bool = False
    """dpimagebench: our small network in place of its three; not comparable with its tables."""
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
        from datalens.data import formats
        from datalens.data.own.reading import Reading
        from datalens.data.records import Dataset
        from datalens.driver import choose_device
        from datalens.evaluate import dpimagebench, measures
        from datalens.evaluate.classifiers import UTILITY

        names = tuple(measures.KEYS) if "all" in self.measures else tuple(dict.fromkeys(self.measures))
        classifiers = UTILITY if "all" in self.classifier else tuple(dict.fromkeys(self.classifier))
        device = choose_device(self.device)
        if min(self.sizes, default=1) < 1:
            raise DatalensError(f"--sizes must be at least 1, not {min(self.sizes)}")
        if self.small and self.protocol == "ours":
            raise DatalensError("--small belongs to --protocol dpimagebench: leave it out")
        count, epochs = self._size()
        needed = max((*self.sizes, *(() if self.sizes and names == ("utility",) else (count,))))
        reading = Reading.of(self.files)
        test = formats.load(self.data, "test", folder=self.data_folder, reading=reading)

        def training(most: int) -> Dataset:
            return formats.load_some(self.data, most=most, folder=self.data_folder, reading=reading)

        if self.protocol == "dpimagebench":
            found = dpimagebench.evaluate(
                synthetic_of(self.synthetic, count),
                training(10**9),
                test,
                device=device,
                small=self.small,
                epochs=epochs,
            )
            if measures.is_run(self.synthetic):
                measures.record(self.synthetic, {"dpimagebench": found})
            fields = {"note": dpimagebench.NOTE, "warning": dpimagebench.WARNING, **found}
            show(fields, dpimagebench.lines(found), json=self.json)
            return 0
        dataset = synthetic_of(self.synthetic, needed)
        settings = measures.Settings(
            data=self.data,
            sizes=tuple(dict.fromkeys(self.sizes)) or (len(dataset.images),),
            classifiers=classifiers,  # type: ignore[arg-type]
            seeds=self.seeds,
            epochs=epochs,
            features=self.features,
            splits=self.splits,
            real=self.real,
            judge_epochs=self.judge_epochs,
        )

        bench = measures.Bench(dataset, test, training, settings, device=device, fresh=self.fresh)
        results = {}
        for name in names:
            results[measures.KEYS[name]] = bench.measure(name)  # type: ignore[index, arg-type]
            if measures.is_run(self.synthetic):  # as soon as each is known
                measures.record(self.synthetic, {measures.KEYS[name]: results[measures.KEYS[name]]})  # type: ignore[index]
        fields = {"note": measures.NOTE, **results.get("utility", {}), **results}
        show(fields, measures.lines(results, dataset.classes), json=self.json)
        return 0

    def _size(self) -> tuple[int, int]:
        """Return the numbers of synthetic images and of epochs: those asked for, or the usual ones of what scores."""
        usual = (100_000, 600) if "authors" in self.classifier else (10_000, 10)
        if self.protocol == "dpimagebench":
            usual = (60_000, 50)
        return (
            usual[0] if self.count is None else self.count,
            usual[1] if self.epochs is None else self.epochs,
        )
