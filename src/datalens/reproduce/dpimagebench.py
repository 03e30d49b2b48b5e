"""`datalens reproduce dpimagebench`: our methods by the protocol of DPImageBench, beside what it and others print.

Training and validation records are parted before anything is trained, as there; δ = 1/(n ln n) for n training records.
"""

import dataclasses
import fnmatch
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.plans.registry import version_of
from datalens.progress import say
from datalens.reproduce.cells import marks
from datalens.reproduce.kept import keep_cell, kept, kept_in, made_in
from datalens.reproduce.output import Row, show, show_cost, show_marks, write

TITLE = "DPImageBench: the field's protocol"
METHODS: dict[str, dict[str, Any]] = {
    "datalens": {"method": "datalens"},
    "refined": {"method": "datalens", "refine": "diffusion"},  # with the second stage
}
EPSILONS = (1.0, 10.0)
SIZES = {"mnist": 55_000, "fashion-mnist": 55_000}  # training records, without those of validation
# Quick mode: numbers of synthetic images, epochs, test images and classifiers' validation records.
QUICK: dict[str, int] = {"count": 2_000, "epochs": 2, "test": 1_000}


def cells(full: bool, *, small: bool) -> dict[str, dict[str, Any]]:
    """Return the cells by name: what is trained and how it is scored."""
    from datalens.evaluate.dpimagebench import COUNT, EPOCHS

    scored = {"count": COUNT, "epochs": EPOCHS} if full else {"count": QUICK["count"], "epochs": QUICK["epochs"]}
    found = {}
    for data in SIZES if full else ("mnist",):
        for epsilon in EPSILONS if full else (1.0,):
            for name, options in METHODS.items():
                networks = "small" if small else "three"
                asked = {"data": data, "epsilon": epsilon, **options}
                found[f"{data}-eps{epsilon:g}-{name}-{networks}"] = {"options": asked, "small": small, **scored}
    return found


def delta(records: int) -> float:
    return 1 / (records * math.log(records))


def reproduce(
    *,
    full: bool,
    out: Path,
    device: str,
    small: bool = False,
    stored: Path | None = None,
    only: str | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Run missing cells, then write the table. For the arguments, see `harness.reproduce`; `small`: our own network."""
    place, folder = (
        kept_in("dpimagebench", full=full, out=out, stored=stored),
        made_in("dpimagebench", full=full, out=out),
    )
    small = small or not full  # the three networks would take hours of two cores
    wanted = cells(full, small=small)
    if stored is not None:  # whatever is kept, by the three networks or by ours
        wanted |= cells(full, small=not small)
    if only is not None and not fnmatch.filter(wanted, only):
        raise DatalensError(f"--cells {only} fits no cell of dpimagebench, such as {next(iter(wanted))}")
    results: dict[str, dict[str, Any]] = {}
    for number, (name, cell) in enumerate(wanted.items(), start=1):
        result = kept(place, name, cell)
        version = version_of(TrainOptions(out=Path(), **cell["options"]))
        old = result is not None and result.get("method_version") != version
        skipped = stored is not None or (only is not None and not fnmatch.fnmatch(name, only))
        if (result is None or (old and again)) and not skipped:
            say(f"[{number}/{len(wanted)}] {name}")
            run = folder / "runs" / f"{name.rsplit('-', 1)[0]}-v{version}"
            made = _run(cell, run, folder / "data", device, full=full, real=_ceiling(results, cell))
            result, old = keep_cell(place, name, cell | {"method_version": version} | made), False
        if result is not None:
            results[name] = result | {"stale": "older code" if old else None}
    rows = [_row(name, cell, results.get(name)) for name, cell in wanted.items()]
    return write(
        "dpimagebench", TITLE, folder, full=full, rows=rows, text=f"{note(full)}\n\n{markdown(rows)}",
    )  # fmt: skip


def _ceiling(results: dict[str, dict[str, Any]], cell: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures of real records, if another cell has them: they are the same for every method and ε."""
    same = (
        result["utility"]["real"]
        for result in results.values()
        if (result["options"]["data"], result["small"]) == (cell["options"]["data"], cell["small"])
    )
    return next(same, None)


def _run(
    cell: dict[str, Any], run: Path, data: Path, device: str, *, full: bool, real: dict[str, Any] | None
) -> dict[str, Any]:
    from datalens.data import formats
    from datalens.driver import choose_device, train
    from datalens.evaluate.dpimagebench import evaluate
    from datalens.released.release import sample
    from datalens.released.verification import check_release

    options = dict(cell["options"])
    name = options.pop("data")
    training = formats.load_some(name, most=10**9)
    test = formats.load(name, "test")
    if not full:
        test = dataclasses.replace(test, images=test.images[: QUICK["test"]], labels=test.labels[: QUICK["test"]])
    place, count = write_split(data, training, test)
    facts = run / "trained.json"
    if facts.exists() and not check_release(run / "release").problems:
        trained = json.loads(facts.read_text(encoding="utf-8"))
    else:
        how: dict[str, Any] = {"delta": delta(count), "nominal_size": count, "data": str(place), "device": device}
        trained = train(TrainOptions(out=run, resume=(run / "ledger.jsonl").exists(), **how, **options))
        if trained["interrupted"]:
            raise KeyboardInterrupt
        facts.write_text(json.dumps(trained), encoding="utf-8")
    if problems := check_release(run / "release").problems:
        raise DatalensError(f"{run}: {problems[0]}")
    where = choose_device(device)
    synthetic = sample(run / "release", count=cell["count"], seed=0, device=where)
    how_scored: dict[str, Any] = {"device": where, "small": cell["small"], "epochs": cell["epochs"]}
    score = evaluate(synthetic, training, test, **how_scored, ceiling=real is None)
    score |= {"real": score.get("real", real)}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "utility": score | {"accuracy": score["last"]},
        "train": {key: value for key, value in trained.items() if key != "run"},
        "settings": synthetic.certificate["settings"],
        "certificate_sha256": synthetic.certificate["sha256"]["certificate"],
        "versions": synthetic.certificate["versions"],
    }


def write_split(folder: Path, training: Any, test: Any) -> tuple[Path, int]:
    """Write test records, and training records without those of validation. Return the file, and their number."""
    from datalens.evaluate.dpimagebench import validation_split

    mine, _ = validation_split(training)
    path = folder / f"{training.schema.name}-{len(mine)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {"images": training.images[mine], "labels": training.labels[mine]}
        arrays |= {"test_images": test.images, "test_labels": test.labels, "classes": np.array(training.schema.classes)}
        part = path.with_name(f"{path.stem}.part.npz")
        np.savez(part, **arrays)
        part.replace(path)
    return path, len(mine)


def _row(name: str, cell: dict[str, Any], result: dict[str, Any] | None) -> Row:
    score, trained = (result["utility"], result["train"]) if result else ({}, {})
    real = score.get("real", {})
    facts = ("epsilon_spent", "delta", "relation", "accountant", "private")
    return {
        "cell": name,
        "data": cell["options"]["data"],
        "epsilon": cell["options"]["epsilon"],
        "method": cell["options"]["method"] + (", refined" if "refine" in cell["options"] else ""),
        "small": cell["small"],
        "ours": score.get("last"),
        "chosen": score.get("chosen"),
        "best_chosen": score.get("best_chosen"),
        "real": real.get("last"),
        "real_chosen": real.get("chosen"),
        "epochs": score.get("epochs"),
        "marks": marks(result),
        "date": result["date"] if result else None,
        **{fact: trained.get(fact) for fact in facts},
    }


def note(full: bool) -> str:
    from datalens.evaluate.dpimagebench import NOTE

    quick = "" if full else "**quick: few images and epochs, a check of the chain and nothing else.** "
    return (
        f"{quick}{NOTE}. 55,000 training and 5,000 validation records, δ = 1/(n ln n). 60,000 synthetic images, of "
        "which 55,000 train each classifier. `small`: our small ResNet in place of ResNet-110, WRN-40-4 and "
        "ResNeXt-29, not comparable with the printed figures."
    )


def markdown(rows: list[Row]) -> str:
    from datalens.evaluate.published import DPIMAGEBENCH, PUBLISHED, TITLES

    lines = [
        "| data | ε | method | networks | last epoch | epoch chosen¹, mean | best of three | real data², last | "
        "chosen¹ | ε spent, δ, relation, accountant |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cost = "not run: the command is there, it needs a GPU" if r["ours"] is None else show_cost(r)
        by, best = ("small (1)", "—") if r["small"] else ("three", show(r["best_chosen"]))
        lines.append(
            f"| {TITLES.get(r['data'], r['data'])} | {r['epsilon']:g} | ours: {r['method']} | {by} | "
            f"{show(r['ours'])}{show_marks(r)} | {show(r['chosen'])} | {best} | "
            f"{show(r['real'])} | {show(r['real_chosen'])} | {cost} |"
        )
    for one in sorted(PUBLISHED, key=lambda one: (one.data, one.epsilon, one.accuracy)):
        if one.source == DPIMAGEBENCH and any((r["data"], r["epsilon"]) == (one.data, one.epsilon) for r in rows):
            public = ", with public images" if one.public_images else ""
            lines.append(
                f"| {TITLES[one.data]} | {one.epsilon:g} | {one.method}{public}, as printed | three | — | — | "
                f"{one.accuracy:.4f} | — | — | ε = {one.epsilon:g}, δ = 1/(n ln n), as printed |"
            )
    notes = (
        "\n¹ On real validation records: no ε covers the choice. ² The same classifiers trained on as many real "
        "records: the ceiling.\n"
    )
    return "\n".join(lines) + "\n" + notes
