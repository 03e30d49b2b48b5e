"""Publish the accuracy of a run: a table of answers on held-out records, released with noise through the gate.

The table has a ledger of its own, in `publication/` of the run folder, since other records pay for it than those that
were trained on (docs/privacy.md). A killed publication is repeated by the same command: a value that was journaled is
used again, and not paid twice.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from datalens.bounded.contributions import VoteCounts
from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate.utility import check_like, normalise, train_classifier
from datalens.files import sync_directory, write_atomically
from datalens.plans.base import Settings
from datalens.privacy.budget import DataBudget
from datalens.privacy.events import Charge, LaplaceEvent
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.private.answers import Classify, answers, ballots_of, in_both, units_of
from datalens.released import certificate as certificates
from datalens.released import publication
from datalens.released.accuracy import LEAST_SCALE, MOST_SCALE, expected
from datalens.released.publication import CLASSIFIERS, FIELD, KEPT, PART, QUERIES, SEED, Asked, moved
from datalens.released.release import load_classifier, sample, write_again
from datalens.released.verification import check_release
from datalens.run.folder import Run, read_config
from datalens.run.publication import JOURNAL, LEDGER, state, table_of
from datalens.run.ranks import choose_device
from datalens.run.reservation import unit_of

FOLDER, ASKED = "publication", "asked.json"
BATCH = 256
USEFUL = 0.05  # the largest useful half-width of an interval


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The request of the owner.

    Attributes:
        epsilon, delta: what the table may cost each held-out record.
        data, folder, reading: where the held-out records were read from.
        overlap: whether some of them may have been trained on; "find-out": see `find_overlap`.
        budget: folder of the budget that the held-out records belong to, if it is not the run's.
        held_out: about how many held-out records there are; None: their number is published.
        again: charge once more, after an interruption lost a table, or for another one.
    """

    epsilon: float
    delta: float
    data: str
    folder: Path | None
    reading: Reading
    overlap: Literal["find-out", "none", "some"] = "find-out"
    budget: Path | None = None
    held_out: int | None = None
    classifier: str = "augmented"
    images: int = 10_000
    epochs: int = 10
    again: bool = False


# --- what to expect ---------------------------------------------------------------------------------------------------


def plan(
    classes: int, records: int, *, epsilon: float, relation: str, exact: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return which interval a budget gives, as JSON fields and as lines of text. It reads no record.

    Args:
        classes: number of classes.
        records: declared number of held-out records.
        epsilon: budget of the table.
        relation: neighbouring relation of the run.
        exact: whether that number is exact; if not, it is estimated from the table, too.
    """
    check_classes(classes)
    half = expected(classes, records, scale=scale_for(epsilon, moved(relation, classes)), exact=exact)
    fields = {"held_out": records, "classes": classes, "epsilon": epsilon, "noise": half.noise, "sample": half.sample}
    text = (
        f"{'' if exact else 'about '}{records} held-out records, {classes} classes, ε = {epsilon:g}: an accuracy near "
        f"80 % gets an interval of ± {100 * half.both:.1f} points (95 %). The noise alone makes "
        f"± {100 * half.noise:.1f} of that, and the chance of which records are held out ± {100 * half.sample:.1f}"
    )
    if not exact:
        text += (
            ". Their number is estimated from the counts: without --held-out it is published, and the interval smaller"
        )
    if half.both > USEFUL:
        text += "; that is of little use: hold out more records, or raise --epsilon"
    return {**fields, "half_width": half.both, "useful": half.both <= USEFUL}, [text]


def command(
    path: Path, options: Any, *, classifier: str, images: int, epochs: int, plan_only: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Do what `datalens evaluate --publish` was asked to do, and return JSON fields and lines of text.

    Args:
        path: the run folder.
        options: the command, with its options.
        classifier: the name of the classifier that answers.
        images, epochs: number of images and epochs of its training.
        plan_only: say which interval to expect, and release nothing.

    Raises:
        DatalensError: --epsilon is missing, or `publish` cannot be done.
    """
    if options.epsilon is None:
        raise DatalensError("--publish needs --epsilon, what it may cost each held-out record: 0.1, for example")
    if classifier not in CLASSIFIERS:
        raise DatalensError(f"--publish cannot use --classifier {classifier}, whose figure is chosen on test records")
    if min(images, epochs) < 1:
        raise DatalensError("--publish trains a classifier: --count and --epochs must be at least 1")
    config, (budget, _) = read_config(path), read_ledger(path / "ledger.jsonl")
    reading = Reading.of(options.files)

    def held_out() -> Dataset:
        return formats.load(options.data, "test", folder=options.data_folder, reading=reading)

    if plan_only:
        records = options.held_out or len(ballots_of(held_out()))
        classes = len(config["schema"]["classes"])
        exact = options.held_out is None
        return plan(classes, records, epsilon=options.epsilon, relation=budget.relation, exact=exact)
    wish = Wish(
        epsilon=options.epsilon,
        delta=budget.delta if options.delta is None else options.delta,
        data=options.data,
        folder=options.data_folder,
        reading=reading,
        overlap=options.overlap,
        budget=options.budget,
        held_out=options.held_out,
        classifier=classifier,
        images=images,
        epochs=epochs,
        again=options.again,
    )
    return publish(path, held_out(), wish, device=choose_device(options.device))


def scale_for(epsilon: float, counts: int) -> float:
    """Return the scale of the noise with which counts cost this ε, of which a neighbour moves so many, by one each.

    Raises:
        DatalensError: ε is out of range.
    """
    scale = counts / epsilon if epsilon > 0 else math.inf
    if not LEAST_SCALE <= scale <= MOST_SCALE:
        raise DatalensError(
            f"--epsilon of a published accuracy must be from {counts / MOST_SCALE:g} to {counts / LEAST_SCALE:g}, not "
            f"{epsilon:g}"
        )
    return scale


# --- the publication --------------------------------------------------------------------------------------------------


def publish(
    path: Path, held_out: Dataset, wish: Wish, *, device: torch.device | str
) -> tuple[dict[str, Any], list[str]]:
    """Release the table of answers on held-out records, and write it into the release of a run.

    Args:
        path: the run folder.
        held_out: the records.
        wish: what was asked for.
        device: where the classifier is trained.

    Returns:
        The certificate's field, and lines of text.

    Raises:
        DatalensError: the run has no release that stands, or something about the records or the budget is unclear.
        BudgetExceeded: the budget of the data set has no room for it.
    """
    run = Run.open(path)
    try:
        check_run(run)
        check_held_out(run, held_out)
        folder = _begin(run, held_out, wish)
        kept = {"weights": weights_hash(path / "release"), "folder": folder.name}
        kept |= _table(run, folder, held_out, device)
        kept["asked"] = json.loads((folder / ASKED).read_text(encoding="utf-8"))["asked"]
        write_atomically(path / KEPT, json.dumps(kept).encode(), private=True)
        signed = (path / "release" / certificates.SIGNATURE).exists()
        release = write_again(path, settings=run.settings, schema=run.schema, ledger=run.ledger)
    finally:
        run.close()
    fields = certificates.read_certificate(release)[FIELD]
    lines = [*publication.said(fields), f"written to {release}, and checked by `datalens verify`"]
    lines += ["the old signature is no longer valid: sign again with `datalens sign`"] if signed else []
    return fields, lines


def check_run(run: Run) -> None:
    """Raise unless the run has a release that stands, has a guarantee, and states all that was charged."""
    release, budget = run.path / "release", run.ledger.budget
    if not (release / certificates.CERTIFICATE).is_file():
        raise DatalensError(f"{run.path} has no release yet: finish the run with --resume")
    if problems := check_release(release, redraw=False).problems:
        raise DatalensError(f"the certificate of {run.path} does not stand ({problems[0]}): see `datalens verify`")
    if math.isinf(budget.epsilon) or run.settings.noise_seeded:
        raise DatalensError(f"{run.path} is NOT PRIVATE: there is no guarantee that an accuracy could be added to")
    if (release / certificates.LEDGER).read_bytes() != (run.path / "ledger.jsonl").read_bytes():
        raise DatalensError(f"{run.path} was charged for more than its release states: finish the run with --resume")


def check_classes(classes: int) -> None:
    """Raise if there is nothing to tell apart, before anything is charged."""
    if classes < 2:
        raise DatalensError("with one class every answer is right: there is no accuracy to publish")


def check_held_out(run: Run, held_out: Dataset) -> None:
    """Raise unless the held-out records have the run's classes, two or more, its size and its privacy unit."""
    expected, found = run.schema, held_out.schema
    check_classes(len(expected.classes))
    if expected.by_person != found.by_person:
        raise DatalensError(
            f"the run protects one {expected.record_unit}, and the held-out records are read as if it were one "
            f"{found.record_unit}: use the same --record-id as in training"
        )
    if expected.classes != found.classes:
        raise DatalensError("the held-out records have other classes than the run: name the run's with --classes")
    like = sample(run.path / "release", count=1, seed=0) if run.settings.makes != "classifier" else None
    if like is not None:
        check_like(like, "held-out set", held_out.images, held_out.labels)
    elif found.shape != expected.shape or bool(getattr(run.settings, "features", None)):
        raise DatalensError("this needs images of the run's size, and a classifier of pixels, not of features")


def _begin(run: Run, held_out: Dataset, wish: Wish) -> Path:
    """Return the folder of the publication: one that was begun, or a new one, after its reservation."""
    folders = [run.path / FOLDER, *sorted(run.path.glob(f"{FOLDER}-*"), key=lambda path: int(path.name.split("-")[1]))]
    begun = [folder for folder in folders if (folder / ASKED).is_file()]
    if not begun:
        return _create(run, run.path / FOLDER, held_out, wish, earlier=())
    every = [json.loads((folder / ASKED).read_text(encoding="utf-8")) for folder in begun]
    if any(one["asked"]["overlap"] == "some" for one in every):
        wish = replace(wish, overlap="some")  # of an earlier table, whose records pay for this one, too
    last, asked = begun[-1], every[-1]
    given = {"epsilon": wish.epsilon, "delta": wish.delta}
    if given != {name: asked[name] for name in given}:
        raise DatalensError(
            f"{run.path} has a publication at --epsilon {asked['epsilon']:g} --delta {asked['delta']:g}: repeat the "
            "command with these"
        )
    events, found = state(last, step=asked["step"])
    if asked.get("queries") != QUERIES and (wish.again or not found):
        raise DatalensError(
            f"{last} was begun by an earlier version of datalens, which released the table alone; costs of the two "
            "kinds cannot be added up: " + ("leave --again out" if found else "finish it with that version")
        )
    if wish.again and len(events) == len(begun):
        return _create(run, run.path / f"{FOLDER}-{len(begun) + 1}", held_out, wish, earlier=events)
    cost = f"held-out records pay another ε = {wish.epsilon:g}, {wish.epsilon * (len(begun) + 1):g} in all"
    if not found and len(events) == len(begun):
        raise DatalensError(
            f"an interruption lost the table that was charged for: to make it again, add --again ({cost})"
        )
    if asked["weights"] != weights_hash(run.path / "release"):
        raise DatalensError(f"the release was made anew since its accuracy was published: add --again ({cost})")
    if not found:  # these records, and the classifier, may be others than those that it was begun with
        if asked.get("budget") != _named(wish):
            raise DatalensError(f"{last} was begun with another --budget: repeat the command with that")
        kept = asked | {"asked": vars(_asked(run, held_out, wish))}
        write_atomically(last / ASKED, json.dumps(kept).encode(), private=True)
    return last


def _create(run: Run, folder: Path, held_out: Dataset, wish: Wish, *, earlier: tuple[LaplaceEvent, ...]) -> Path:
    """Write the folder of a publication, with its reservation, completely beside its place; then move it there."""
    tables, relation = len(earlier) + 1, run.ledger.budget.relation
    moves = moved(relation, len(run.schema.classes))
    scale = scale_for(wish.epsilon, moves)
    asked = _asked(run, held_out, wish)
    budget = Budget(epsilon=tables * wish.epsilon, delta=wish.delta, relation=relation, accountant="exact")
    draft = run.path / f".{folder.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        (draft / JOURNAL).mkdir(parents=True, mode=0o700)
        draft.chmod(0o700)
        ledger = Ledger.create(draft / LEDGER, budget)
        (draft / LEDGER).chmod(0o600)
        for event in earlier:
            ledger.charge(event)
        ledger.close()
        event = LaplaceEvent(
            row_unit="person" if run.schema.by_person else "record",
            moved=moves,
            relation=relation,
            scale=scale,
            queries=QUERIES,
            step=tables - 1,
            noise="operating-system",
            part=PART,
        )
        _reserve(run, wish, event, budget)
        kept = {
            "epsilon": wish.epsilon,
            "delta": wish.delta,
            "scale": scale,
            "step": tables - 1,
            "queries": QUERIES,
            "weights": weights_hash(run.path / "release"),
            "budget": _named(wish),
            "asked": vars(asked),
        }
        write_atomically(draft / ASKED, json.dumps(kept).encode(), private=True)
        os.replace(draft, folder)
        sync_directory(run.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def _reserve(run: Run, wish: Wish, event: Charge, budget: Budget) -> None:
    """Reserve the charge in the budget of the held-out records: the one that was named, or that of the run."""
    kept = run.config.get("data_budget")
    folder, name = wish.budget, f"{run.schema.name}, held out"
    if kept is not None and folder is None:
        folder, name = Path(kept["folder"]), run.schema.name
    elif kept is not None and wish.overlap == "some" and _named(wish) != str(Path(kept["folder"]).resolve()):
        raise DatalensError(
            f"records that were trained on belong to the run's budget, {kept['folder']}: leave --budget out, or leave "
            "these records out"
        )
    if folder is None:
        return
    with DataBudget.open(folder) as data:
        unit = unit_of(run.schema, run.config["options"].get("record_id"))
        data.reserve([(event, 1)], budget, data=name, unit=unit, final=True)


def _named(wish: Wish) -> str | None:
    """Return the path of the budget that was named, if one was."""
    return None if wish.budget is None else str(wish.budget.resolve())


def _table(run: Run, folder: Path, held_out: Dataset, device: torch.device | str) -> dict[str, Any]:
    """Return the noisy table of a publication, classes by classes, and the two counts beside it."""
    kept = json.loads((folder / ASKED).read_text(encoding="utf-8"))
    classes = len(run.schema.classes)

    def votes() -> VoteCounts:
        asked = Asked(**kept["asked"])
        classify = classifier_of(run.path / "release", run.settings, asked, device)
        return answers(held_out, classify, about=asked.held_out)

    cells, *beside = table_of(folder, votes, scale=kept["scale"], step=kept["step"])
    table = {"table": cells.reshape(classes, classes).tolist()}
    return table | {"counts": beside[0][:2].tolist()} if beside else table  # an earlier version released it alone


def classifier_of(release: Path, settings: Settings, asked: Asked, device: torch.device | str) -> Classify:
    """Return the classifier that answers, a function of the release alone.

    It is the released model, or one that is trained on images that the release draws. Each image is a batch of its own,
    so that no answer depends on another image.
    """
    if settings.makes == "classifier":
        model, _ = load_classifier(release)
        model = model.eval().requires_grad_(False)

        def of_model(image: np.ndarray) -> int:
            pixels = torch.from_numpy(image.copy()).permute(2, 0, 1).unsqueeze(0)
            return int(model(pixels.float() / 255).argmax(dim=1).item())

        return of_model
    synthetic = sample(release, count=asked.images, seed=asked.seed)
    few = min(100, asked.images)
    net, _ = train_classifier(
        synthetic.images,
        synthetic.labels,
        synthetic.images[:few],  # no real image comes near the training, not even to be scored after an epoch
        synthetic.labels[:few],
        classes=len(synthetic.classes),
        epochs=asked.epochs,
        batch=BATCH,
        seed=asked.seed,
        device=device,
        progress_label="classifier on synthetic images",
        classifier=asked.classifier,  # type: ignore[arg-type]
    )
    net = net.cpu().eval().requires_grad_(False)

    def of_net(image: np.ndarray) -> int:
        return int(net(normalise(torch.from_numpy(image.copy()).unsqueeze(0))).argmax(dim=1).item())

    return of_net


def weights_hash(release: Path) -> str:
    """Return the hash of a release's model."""
    return certificates.file_hash(release / certificates.weights_of(certificates.read_certificate(release)))


# --- who is held out --------------------------------------------------------------------------------------------------


def _asked(run: Run, held_out: Dataset, wish: Wish) -> Asked:
    overlap, known = find_overlap(run, held_out, wish)
    released = run.settings.makes == "classifier"
    declared = wish.held_out is not None or not formats.is_own(wish.data)
    return Asked(
        overlap=overlap,
        known=known,
        held_out=wish.held_out or len(ballots_of(held_out)),
        read_off=not declared and run.ledger.budget.relation == "add-remove",
        exact=wish.held_out is None,
        classifier="released" if released else wish.classifier,
        images=0 if released else wish.images,
        epochs=0 if released else wish.epochs,
        seed=SEED,
    )


def find_overlap(run: Run, held_out: Dataset, wish: Wish) -> tuple[publication.Overlap, str]:
    """Return whether records that were trained on may be held out too, and how that is known (a key of `KNOWN`).

    | the data | answer |
    |---|---|
    | a named data set that the run was trained on | its splits have no record in common |
    | the training data are available, unchanged | images (ids of persons, if from the same column) are compared |
    | anything else | the owner has to say: --overlap none, or some |

    Raises:
        DatalensError: records are in both, and the owner did not say so; or it cannot be found out.
    """
    if wish.overlap == "some":
        return "some", "word"
    options = run.config["options"]
    given = wish.folder is not None or options.get("data_folder")  # files that the owner has put there
    if not formats.is_own(wish.data) and wish.data == options["data"] and not given:
        return "none", "split"
    same_ids = not run.schema.by_person or wish.reading.record_id == options.get("record_id")
    units = _training_units(run) if same_ids else None
    if units is None:
        if wish.overlap == "none":
            return "none", "word"
        raise DatalensError(
            "whether any of these records was trained on is unknown, since "
            + ("the training data are not available" if same_ids else "--record-id is not that of training")
            + ": say --overlap none, or --overlap some (their two costs are then added up)"
        )
    if common := in_both(held_out, units):
        raise DatalensError(
            f"{common} of the {len(held_out.images)} held-out images belong to records that were trained on: leave "
            "them out, or say --overlap some, and the certificate adds the two costs up"
        )
    return "none", "persons" if run.schema.by_person else "images"


def _training_units(run: Run) -> set[bytes] | None:
    """Return what identifies the training records, or None if they are not available or have changed."""
    options = run.config["options"]
    try:
        units, fingerprints = units_of(formats.training_records(options))
    except (DatalensError, OSError):
        return None
    known = {f"{fingerprint:064x}" for fingerprint in fingerprints}
    return units if run.config["data_sha256"] in known else None
