"""Section 5.2's running time: seconds per epoch at 2000 and 4000 teachers, each cell a real (short) run.

An epoch of the paper's code is one iteration: two steps of every teacher, the vote of all of them, and a step of the
student.
"""

import csv
import itertools
import json
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from datalens.options import TrainOptions
from datalens.progress import say
from datalens.run.folder import write_atomically

TITLE = "Running time: seconds per epoch"
PAPER = {2000: 149.92, 4000: 322.17}  # paper-size teachers on an RTX 2080 Ti
DATA = "mnist"
STEPS = 8  # the first is not counted: it has ten teacher steps, and kernels are compiled in it


def cells(full: bool) -> list[dict[str, Any]]:
    """What is run: network and number of teachers. Without a GPU convolutional teachers are too slow at full size."""
    sizes = {"spectral": (2000, 4000), "compact": (2000, 4000) if full else (100, 200)}
    if full:
        sizes["paper"] = (2000, 4000)
    return [{"network": network, "teachers": n} for network, counts in sizes.items() for n in counts]


def reproduce(*, full: bool, out: Path, device: str) -> dict[str, Any]:
    """Run what is missing, then write the table. Returns where everything is."""
    folder = out / f"runtime-{'full' if full else 'quick'}"
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, cell in enumerate(wanted := cells(full), start=1):
        name = f"{cell['network']}-{cell['teachers']}"
        path = folder / "cells" / f"{name}.json"
        if not path.exists():
            say(f"[{number}/{len(wanted)}] {cell['teachers']} {cell['network']} teachers")
            write_atomically(path, json.dumps(_run(cell, folder / "runs" / name, device), indent=1).encode())
        rows.append(json.loads(path.read_text(encoding="utf-8")))
    return _write(rows, folder, full=full)


def _run(cell: dict[str, Any], run: Path, device: str) -> dict[str, Any]:
    method = "datalens" if cell["network"] == "spectral" else "datalens-paper"
    found = measure({"data": DATA, "method": method, **cell}, run, device)
    return {**cell, "paper": PAPER.get(cell["teachers"]) if cell["network"] == "paper" else None, **found}


def measure(options: dict[str, Any], run: Path, device: str) -> dict[str, Any]:
    """The median time of an epoch of a short run."""
    import torch

    from datalens.driver import choose_device, train

    place = choose_device(device)
    train(
        TrainOptions(
            out=run,
            device=device,  # type: ignore[arg-type]
            steps=STEPS,
            resume=(run / "ledger.jsonl").exists(),
            **options,
        )
    )
    with open(run / "metrics.jsonl", encoding="utf-8") as file:
        times = [json.loads(line)["time"] for line in file]
    epochs = [after - before for before, after in itertools.pairwise(times)]
    return {
        "seconds_per_epoch": round(statistics.median(epochs), 4),
        "epochs": len(epochs),
        "machine": torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    import torch

    return f"{torch.get_num_threads()} threads, {platform.machine()}"


def _write(rows: list[dict[str, Any]], folder: Path, *, full: bool) -> dict[str, Any]:
    base = folder / "runtime"
    write_atomically(base.with_suffix(".json"), json.dumps({"full": full, "rows": rows}, indent=1).encode())
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        f"# {TITLE} ({'full' if full else 'quick'})",
        "",
        "MNIST, batch 15, two teacher steps an epoch, with student, ledger and journal. The paper's figures are for "
        "its own teachers on an RTX 2080 Ti; ours are from the machine named in the row.",
    ]
    if not full:
        lines.append(
            "**Quick: no paper-size teachers, and few compact ones. Use --full on a GPU for the paper's rows.**"
        )
    lines += ["", "| teachers | how many | paper | ours | times faster | machine |", "|---|---|---|---|---|---|"]
    for row in rows:
        paper = f"{row['paper']:.2f}" if row["paper"] else "—"
        ratio = f"{row['paper'] / row['seconds_per_epoch']:.0f}" if row["paper"] else "—"
        ours = f"{row['seconds_per_epoch']:.3f}"
        lines.append(f"| {row['network']} | {row['teachers']} | {paper} | {ours} | {ratio} | {row['machine']} |")
    write_atomically(base.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    _plot(rows, base.with_suffix(".png"))
    names = {"markdown": "md", "csv": "csv", "plot": "png"}
    return {"table": "runtime", "full": full, **{k: f"{base}.{v}" for k, v in names.items()}, "rows": rows}


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        seconds = [row["seconds_per_epoch"] for row in mine]
        axes.plot([row["teachers"] for row in mine], seconds, "o-", label=f"ours, {network} teachers")
    axes.plot(list(PAPER), list(PAPER.values()), "s--", color="#9aa5b1", label="the paper, RTX 2080 Ti")
    axes.set(yscale="log", xlabel="teachers", ylabel="seconds per epoch", title=TITLE)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
