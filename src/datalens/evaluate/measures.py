"""All measures of one synthetic set, cached, and `evaluation.json`, where a run keeps the results.

For the owner: computed from real records without noise, not covered by ε. Never part of a release.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate import cache, features, judge, utility
from datalens.evaluate.classifiers import ClassifierName
from datalens.evaluate.faithfulness import faithfulness
from datalens.evaluate.fid import fid
from datalens.evaluate.inception import inception_score
from datalens.files import store
from datalens.progress import counted
from datalens.released.synthetic import SyntheticDataset

Measure = Literal["utility", "inception", "fid", "faithfulness"]
FeatureName = Literal["own", "inception", "pixels"]
KEYS: dict[Measure, str] = {
    "utility": "utility",
    "inception": "inception_score",
    "fid": "fid",
    "faithfulness": "faithfulness",
}
FILE = "evaluation.json"
NOTE = "measured on real data: for the owner, not covered by ε"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all measures."""

    data: str
    sizes: tuple[int, ...]
    classifiers: tuple[ClassifierName, ...] = ("paper",)
    seeds: int = 3
    epochs: int = 10
    features: FeatureName = "own"
    splits: int = 10
    real: int = 60_000  # limit of training images to compare with and to train the judge on
    judge_epochs: int = 15
    quick: bool = False  # see `utility.evaluate`

    def __post_init__(self) -> None:
        if self.real < 10:
            raise DatalensError(f"--real must be at least 10, not {self.real}")


# The settings that each measure depends on. Its cached result stays valid when others change.
_USED = {
    "utility": ("sizes", "classifiers", "seeds", "epochs", "quick"),
    "inception": ("real", "judge_epochs", "splits"),
    "fid": ("real", "judge_epochs", "features"),
    "faithfulness": ("real", "judge_epochs", "features"),
}


class Bench:
    """Measures a synthetic set against the real one. Data are read, and networks trained, when first needed.

    Args:
        synthetic: the synthetic set.
        test: real records that were not trained on.
        training: a function that returns at most so many training records, drawn at random; None: there are none, and
            only utility can be measured, without its ceiling.
        settings: how to measure.
        device: where to compute.
        fresh: measure again even if there are cached results.
    """

    def __init__(
        self,
        synthetic: SyntheticDataset,
        test: Dataset,
        training: Callable[[int], Dataset] | None,
        settings: Settings,
        *,
        device: torch.device | str,
        fresh: bool = False,
    ) -> None:
        self.synthetic, self.test, self.settings = synthetic, test, settings
        self.device, self.fresh, self._some = device, fresh, training

    def measure(self, name: Measure) -> dict[str, Any]:
        """Return date, settings and values of a measure, from the cache or measured now."""
        used = {key: value for key, value in asdict(self.settings).items() if key in _USED[name]}
        settings = {
            "data": self.settings.data,
            **used,
            "device": str(self.device),
            "versions": {"datalens": version("datalens"), "torch": torch.__version__},
        }
        if self._some is None and name != "utility":
            raise DatalensError(f"--measures {KEYS[name]} compares with training images: name them with --real-train")
        real = self._few if name == "utility" else self._training
        arrays = [self.synthetic.images, self.synthetic.labels]
        arrays += [array for part in (real, self.test) if part is not None for array in (part.images, part.labels)]
        key = cache.key(name, *arrays, list(self.synthetic.classes), settings)
        compute: dict[Measure, Callable[[], dict[str, Any]]] = {
            "utility": self._utility,
            "inception": self._inception,
            "fid": self._fid,
            "faithfulness": self._faithfulness,
        }

        def dated() -> dict[str, Any]:
            if real is not None:
                utility.check_like(self.synthetic, "real training set", real.images, real.labels)
            utility.check_like(self.synthetic, "test set", self.test.images, self.test.labels)
            values = compute[name]()
            return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "settings": settings, **values}

        return cache.remembered(f"{KEYS[name]}-{key}", dated, fresh=self.fresh)

    @cached_property
    def _few(self) -> Dataset | None:
        """Return the training images that `utility` compares with: at most as many as there are synthetic ones."""
        return None if self._some is None else self._some(min(max(self.settings.sizes), len(self.synthetic.images)))

    @cached_property
    def _training(self) -> Dataset:
        assert self._some is not None
        return self._some(self.settings.real)

    @cached_property
    def _judge(self) -> judge.Judge:
        return judge.judge(
            self._training, self.test, epochs=self.settings.judge_epochs, device=self.device, fresh=self.fresh
        )

    @cached_property
    def _features(self) -> features.Features:
        if self.settings.features == "own":
            return features.own(self._judge)
        if self.settings.features == "inception":
            return features.inception(self.device)
        return features.pixels(self._training.schema.dimensions)

    def _utility(self) -> dict[str, Any]:
        """Return the result of the first classifier at the largest size, and all under `all` if there are several."""
        scores = []
        for name in self.settings.classifiers:
            for size in sorted(self.settings.sizes, reverse=True):
                score = utility.evaluate(
                    part_of(self.synthetic, size),
                    None if self._few is None else self._few.images,
                    None if self._few is None else self._few.labels,
                    self.test.images,
                    self.test.labels,
                    seeds=self.settings.seeds,
                    epochs=self.settings.epochs,
                    device=self.device,
                    classifier=name,
                    quick=self.settings.quick,
                )
                scores.append({"name": name, **score.as_dict()})
        return scores[0] | ({"all": scores} if len(scores) > 1 else {})

    def _inception(self) -> dict[str, Any]:
        return inception_score(self.synthetic, self.test.images, self._judge, splits=self.settings.splits).as_dict()

    def _fid(self) -> dict[str, Any]:
        return fid(
            self.synthetic.images,
            self._training.images,
            self._features,
            held_out=self.test.images,
            fresh=self.fresh,
        ).as_dict()

    def _faithfulness(self) -> dict[str, Any]:
        training = (self._training.images, self._training.labels)
        held_out = (self.test.images, self.test.labels)
        return faithfulness(self.synthetic, training, held_out, self._features, device=self.device).as_dict()


def part_of(synthetic: SyntheticDataset, size: int) -> SyntheticDataset:
    """Return `size` of the images, drawn at random; if that is all of them, in their order."""
    count = len(synthetic.images)
    if size > count:
        raise DatalensError(f"--sizes {size} is more than the {count} synthetic images there are")
    if size == count:
        return synthetic
    drawn = np.random.default_rng(0).choice(count, size, replace=False)
    return replace(synthetic, images=synthetic.images[drawn], labels=synthetic.labels[drawn])


# --- evaluation.json ------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Return whether a path is a run, and not its release: results must not be written to what is published."""
    return (path / "config.json").is_file() and (path / "ledger.jsonl").is_file()


def record(run: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add results to a run's `evaluation.json`, which is on its private side."""
    content = {**read(run), "note": NOTE, **results}
    store(run / FILE, json.dumps(content).encode(), private=True)


def read(run: Path) -> dict[str, Any]:
    """Return the results so far; empty if nothing was measured or the file is damaged."""
    try:
        content = json.loads((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# --- for people -----------------------------------------------------------------------------------------------------


def lines(results: dict[str, dict[str, Any]], classes: Sequence[str]) -> list[str]:
    """Return results as lines of text."""
    output = []
    for key, found in results.items():
        output += _utility_lines(found, classes) if key == "utility" else _LINES[key](found)
    return [*output, NOTE]


def _utility_lines(found: dict[str, Any], classes: Sequence[str]) -> list[str]:
    real, real_per_class = found["accuracy_real"], found.get("accuracy_real_per_class") or [None] * len(classes)
    known = "" if real is None else f"; real images {real:.4f}"
    by_class = zip(classes, found["accuracy_per_class"], real_per_class, strict=True)
    output = [
        f"verdict: {found['verdict']}",
        f"beside it: always guessing the largest class {found['accuracy_majority']:.4f}{known}",
        f"accuracy {_spread(found)} on {found['test']} real test images "
        f"({found['classifier']}, {found['synthetic']} synthetic images, final of {found['epochs']} epochs, "
        f"{counted(found['seeds'], 'seed')})",
        "the same classifier on as many real images, or all there are: "
        + ("not known (--real-train names some)" if real is None else f"{real:.4f}"),
        f"best epoch, chosen on the test set, only to compare with papers: {found['accuracy_best_epoch']:.4f}",
        "accuracy by class"
        + ("" if real is None else " (and of the classifier on real images)")
        + ": "
        + ", ".join(_share(name, *accuracies) for name, *accuracies in by_class),
    ]
    if never := [name for name, one in zip(classes, found["accuracy_per_class"], strict=True) if one == 0]:
        output.append(f"never recognised: {', '.join(never)}. See `datalens report` for what helps rare classes")
    for other in found.get("all", ()):
        output.append(
            f"{other['name']:9} {other['synthetic']:6} synthetic images: {_spread(other)}; guessing the largest class "
            f"{other['accuracy_majority']:.4f}; as many real images, or all: "
            f"{'not known' if other['accuracy_real'] is None else format(other['accuracy_real'], '.4f')}"
        )
    return output


def _share(name: str, accuracy: float | None, real: float | None) -> str:
    """Return the accuracy of a class, and of the classifier on real images if that is known."""
    beside = "" if real is None else f" ({real:.3f})"
    return f"{name} {'—' if accuracy is None else format(accuracy, '.3f')}{beside}"


def _spread(found: dict[str, Any]) -> str:
    """Format an accuracy with its standard deviation, which a single seed does not have."""
    return f"{found['accuracy']:.4f}" + (f" ± {found['accuracy_std']:.4f}" if found.get("seeds", 2) > 1 else "")


def _inception_lines(found: dict[str, Any]) -> list[str]:
    output = [
        f"Inception Score {found['score']:.3f} ± {found['score_std']:.3f} ({found['synthetic']} images, "
        f"{found['splits']} splits); real images score {found['score_real']:.3f} ± {found['score_real_std']:.3f}",
        f"judged by a {found['judge']}",
        f"the judge agrees with the label of {found['label_agreement']:.1%} of the synthetic images",
    ]
    paper = found["judge_accuracy_paper"]
    if paper is not None and found["judge_accuracy"] < paper:
        output.append(f"the paper's judge had a test accuracy of {paper:.0%}: more --judge-epochs, or --real, may help")
    return output


def _fid_lines(found: dict[str, Any]) -> list[str]:
    output = [
        f"FID {found['fid']:.3f} ({found['features']}; {found['synthetic']} synthetic against {found['real']} real "
        f"images); {found['held_out']} held-out real images: {found['fid_real']:.3f}",
    ]
    if not found["enough"]:
        output.append("there are fewer images than features: this FID is mostly bias, ask for more with --count")
    return output


def _faithfulness_lines(found: dict[str, Any]) -> list[str]:
    near, balance, real = found["nearness"], found["balance"], found["overlap_real"]
    four = ("precision", "recall", "density", "coverage")
    missing = f"; no image of {', '.join(balance['missing'])}" if balance["missing"] else ""
    return [
        ", ".join(f"{name} {found[name]:.3f} (held-out real images: {real[name]:.3f})" for name in four)
        + f" ({found['features']})",
        f"distance to training images is {near['ratio']:.4f} (95 %: {near['interval'][0]:.4f} to "
        f"{near['interval'][1]:.4f}) of that to as many held-out images; by chance: {near['chance'][0]:.4f} to "
        f"{near['chance'][1]:.4f}; copies of training images: {near['copies']}, of held-out ones: "
        f"{near['copies_of_held_out']}",
        "A LEAK: synthetic images are too near to training images" if near["leak"] else "distances show no leak",
        f"class balance: {balance['distance']:.1%} of the images would have to change class{missing}",
    ]


_LINES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "inception_score": _inception_lines,
    "fid": _fid_lines,
    "faithfulness": _faithfulness_lines,
}
