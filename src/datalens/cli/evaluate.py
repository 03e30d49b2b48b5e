"""`datalens evaluate`: measure how useful, how varied and how faithful synthetic images are."""

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import show, synthetic_of
from datalens.errors import DatalensError
from datalens.options import ClusterOptions, DataFolder, Json, ReadingOptions

if TYPE_CHECKING:
    from datalens.data.records import Dataset


# Options that only --publish uses, and options that it does not use.
PUBLISHING = ("epsilon", "delta", "overlap", "held_out", "budget", "plan", "again")
MEASURING = (
    *("real_train", "quick", "measures", "seeds", "sizes", "protocol", "small", "features", "splits", "real"),
    *("judge_epochs", "fresh"),
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Train classifiers on synthetic images, test them on real ones, and more. For the owner only: not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: Annotated[str, arg(metavar="NAME|PATH")]
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
    classifier: Annotated[
        tuple[Literal["paper", "augmented", "logistic", "mlp", "resnet", "authors", "all"], ...],
        arg(help_behavior_hint="(default: paper; with --publish: augmented)"),
    ] = ()
    """paper: of the paper's size. augmented: with batch norm, trained on slightly shifted and noisy images.
    authors: as in their code, which reports the best epoch on test data: only to compare with the paper."""
    protocol: Literal["ours", "dpimagebench"] = "ours"
    """dpimagebench: accuracy by DPImageBench's protocol instead (three large networks: on a GPU)."""
    small: bool = False
    """dpimagebench: our small network in place of its three; not comparable with its tables."""
    features: Literal["own", "inception", "pixels"] = "own"
    """Features for fid and faithfulness. own: of a classifier trained on the data set.
    inception: of Inception-v3 (`datalens data get inception`)."""
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
    """Release an accuracy that may be published: the classifier's answers on held-out records, with noise.
    It costs the held-out records --epsilon. Nothing else is measured."""
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
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    json: Json = False

    def __call__(self) -> int:
        if self.publish:
            self._refuse(MEASURING, "{} is not for --publish, which measures nothing else: leave it out")
            if self.cluster != ClusterOptions():
                raise DatalensError("--publish reads the held-out records in this process: leave --engine out")
            return self._publish()
        self._refuse(PUBLISHING, "{} belongs to --publish: add that, or leave {} out")
        with contextlib.ExitStack() as closing:
            return self._measure(closing)

    def _refuse(self, options: tuple[str, ...], words: str) -> None:
        """Raise if one of these options was given: it would be ignored."""
        defaults = {f.name: f.default for f in dataclasses.fields(Evaluate)}
        for name in options:
            if getattr(self, name) != defaults[name]:
                raise DatalensError(words.replace("{}", f"--{name.replace('_', '-')}"))

    def _publish(self) -> int:
        from datalens.evaluate import publish

        (classifier, *others) = self.classifier or ("augmented",)
        if others or classifier == "all":
            raise DatalensError("--publish lets one classifier answer: name one with --classifier")
        images, epochs = self._size()
        fields, lines = publish.command(
            self.synthetic, self, classifier=classifier, images=images, epochs=epochs, plan_only=self.plan
        )
        show(fields, lines, json=self.json)
        return 0

    def _measure(self, closing: contextlib.ExitStack) -> int:
        from datalens.data.own.reading import Reading
        from datalens.driver import choose_device
        from datalens.evaluate import dpimagebench, look, measures
        from datalens.evaluate.classifiers import UTILITY

        asked = self._quickly(look.QUICK) if self.quick else self
        names = tuple(measures.KEYS) if "all" in asked.measures else tuple(dict.fromkeys(asked.measures))
        classifiers = UTILITY if "all" in asked.classifier else tuple(dict.fromkeys(asked.classifier)) or ("paper",)
        device = choose_device(asked.device)
        if min(asked.sizes, default=1) < 1:
            raise DatalensError(f"--sizes must be at least 1, not {min(asked.sizes)}")
        if asked.small and asked.protocol == "ours":
            raise DatalensError("--small belongs to --protocol dpimagebench: leave it out")
        if asked.quick and asked.protocol != "ours":
            raise DatalensError("--quick is a look of our own: leave --protocol out")
        count, epochs = asked._size()
        needed = max((*asked.sizes, *(() if asked.sizes and names == ("utility",) else (count,))))
        test, training = look.real_images(
            asked.data,
            asked.real_train,
            folder=asked.data_folder,
            reading=Reading.of(asked.files),
            run=asked.synthetic,
            client=closing.enter_context(look.if_asked(vars(asked.cluster))),
        )
        if asked.protocol == "dpimagebench":
            if training is None:
                raise DatalensError("--protocol dpimagebench needs real training images: add --real-train")
            found = dpimagebench.evaluate(
                synthetic_of(asked.synthetic, count),
                training(10**9),
                test,
                device=device,
                small=asked.small,
                epochs=epochs,
            )
            if measures.is_run(asked.synthetic):
                measures.record(asked.synthetic, {"dpimagebench": found})
            fields = {"note": dpimagebench.NOTE, "warning": dpimagebench.WARNING, **found}
            show(fields, dpimagebench.lines(found), json=asked.json)
            return 0
        began = time.monotonic()
        dataset = synthetic_of(asked.synthetic, needed)
        sampling = (time.monotonic() - began) / len(dataset.images)
        test = look.aligned(look.part_of(test, look.QUICK_TEST) if asked.quick else test, dataset.classes, asked.data)
        settings = measures.Settings(
            data=asked.data,
            sizes=tuple(dict.fromkeys(asked.sizes)) or (len(dataset.images),),
            classifiers=classifiers,  # type: ignore[arg-type]
            seeds=asked.seeds,
            epochs=epochs,
            features=asked.features,
            splits=asked.splits,
            real=asked.real,
            judge_epochs=asked.judge_epochs,
            quick=asked.quick,
        )

        def real(most: int) -> "Dataset":
            assert training is not None
            return look.aligned(training(most), dataset.classes, asked.real_train or asked.data)

        def careful(step: float) -> float:  # with the defaults
            (many, rounds), held = Evaluate(synthetic=asked.synthetic, data=asked.data)._size(), len(test.images)
            one = look.training_seconds(step, images=many, test=held, epochs=rounds, tests=rounds)
            return (Evaluate.seeds + 1) * one + sampling * many

        reads = None if training is None else real
        bench = measures.Bench(dataset, test, reads, settings, device=device, fresh=asked.fresh)
        if "utility" in names:
            look.say_how_long(settings, test, str(device), careful=careful)
        results = {}
        for name in names:
            results[measures.KEYS[name]] = bench.measure(name)  # type: ignore[index, arg-type]
            if look.is_kept(asked.synthetic, name, quick=asked.quick):  # type: ignore[arg-type]
                measures.record(asked.synthetic, {measures.KEYS[name]: results[measures.KEYS[name]]})  # type: ignore[index]
        fields = {"note": measures.NOTE, **results.get("utility", {}), **results}
        show(fields, measures.lines(results, dataset.classes), json=asked.json)
        return 0

    def _quickly(self, fixed: dict[str, int]) -> "Evaluate":
        """Return the same command with the settings of a quick look."""
        defaults = {f.name: f.default for f in dataclasses.fields(Evaluate)}
        if changed := [
            name for name in (*fixed, "sizes", "classifier", "measures") if getattr(self, name) != defaults[name]
        ]:
            raise DatalensError(f"--quick sets --{changed[0]} itself: leave one of them out")
        return dataclasses.replace(self, **fixed)  # type: ignore[arg-type]

    def _size(self) -> tuple[int, int]:
        """Return the numbers of synthetic images and of epochs: those asked for, or the usual ones of what scores."""
        usual = (100_000, 600) if "authors" in self.classifier else (10_000, 10)
        if self.protocol == "dpimagebench":
            usual = (60_000, 50)
        return (
            usual[0] if self.count is None else self.count,
            usual[1] if self.epochs is None else self.epochs,
        )
