"""Running times: seconds per epoch (Section 5.2), and by compressor (Table 6). Each cell is a real, short run.

An epoch of the paper's code is one iteration: two steps of every teacher, the vote of all teachers, and a step of the
student.
"""

import itertools
import json
import platform
import statistics
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from datalens.data.named import sources
from datalens.options import TrainOptions
from datalens.progress import say
from datalens.reproduce.kept import keep_cell, kept, kept_in, made_in
from datalens.reproduce.output import Row, write

TITLES = {"runtime": "Running time: seconds per epoch", "table6": "Table 6: seconds per epoch, by compressor"}
PAPER = {2000: 149.92, 4000: 322.17}  # paper-size teachers on an RTX 2080 Ti
TABLE6: dict[str, dict[str, float]] = {  # on a Tesla T4
    "mnist": {"TopAgg": 338.34, "D²P-Fed": 492.43, "FetchSGD": 785.34},
    "fashion-mnist": {"TopAgg": 340.84, "D²P-Fed": 471.02, "FetchSGD": 775.35},
    "celeba-gender": {"TopAgg": 1196.60, "D²P-Fed": 3683.22, "FetchSGD": 2622.40},
    "celeba-hair": {"TopAgg": 1120.59, "D²P-Fed": 8092.50, "FetchSGD": 2620.63},
}
TEACHERS = {"celeba-gender": 6000, "celeba-hair": 8000}  # the paper's; of the other sets 4000
COMPRESS = {"TopAgg": "topk-sign", "D²P-Fed": "klevel", "FetchSGD": "sketch"}
DATA = "mnist"  # data set of the running time
QUICK = 500  # number of teachers of Table 6 in quick mode
STEPS = 8  # the first is not timed: it has ten teacher steps, and compiles kernels


def cells(full: bool) -> list[dict[str, Any]]:
    """Return the runs: network and number of teachers. Full-size convolutional teachers are too slow without a GPU."""
    sizes = {"spectral": (2000, 4000), "compact": (2000, 4000) if full else (100, 200)}
    if full:
        sizes["paper"] = (2000, 4000)
    return [{"network": network, "teachers": n} for network, counts in sizes.items() for n in counts]


def cells_of_table6(full: bool) -> list[dict[str, Any]]:
    """Return the runs: the paper's 4000 teachers or, in quick mode, fewer spectral ones over all 784 cosines."""
    quick: dict[str, Any] = {"network": "spectral", "basis": "dct", "basis_size": 784, "k": 200}
    runs = []
    for data, printed in TABLE6.items() if full else [("mnist", TABLE6["mnist"])]:
        for column in printed:
            compress: dict[str, Any] = {"data": data, "compress": COMPRESS[column], "teachers": _teachers(data, full)}
            small = {} if full else {**quick, "k": None} if COMPRESS[column] == "klevel" else quick
            runs.append(compress | small)
    return runs


def _teachers(data: str, full: bool) -> int:
    return TEACHERS.get(data, 4000) if full else QUICK


def reproduce(
    name: str, *, full: bool, out: Path, device: str, data_folder: Path | None = None, stored: Path | None = None
) -> dict[str, Any]:
    """Run missing cells, then write the table. Return its paths.

    Args:
        name: runtime or table6.
        full: the paper's numbers of teachers.
        out: the folder for runs and results.
        device: where to compute.
        data_folder: the folder of CelebA; without it, its rows are not run, unless it is in the cache.
        stored: a folder of kept cells to show; nothing is run.
    """
    place, folder = kept_in(name, full=full, out=out, stored=stored), made_in(name, full=full, out=out)
    wanted = cells(full) if name == "runtime" else cells_of_table6(full)
    rows: list[Row] = []
    for number, cell in enumerate(wanted, start=1):
        label = f"{cell['network']}-{cell['teachers']}" if name == "runtime" else f"{cell['data']}-{cell['compress']}"
        row = kept(place, label, cell)
        if row is None and (stored is not None or not _available(cell, data_folder)):
            rows.append(cell | {"seconds_per_epoch": None, "machine": None, "paper": _paper(cell)})
            continue
        if row is None:
            say(f"[{number}/{len(wanted)}] {label}")
            row = keep_cell(place, label, _run(name, cell, folder / "runs" / label, device, data_folder))
        rows.append(row)
    text, draw = (_runtime, partial(_plot, rows)) if name == "runtime" else (_table6, None)
    return write(name, TITLES[name], folder, full=full, rows=rows, text=text(rows, full=full), draw=draw)


def _available(cell: dict[str, Any], data_folder: Path | None) -> bool:
    data = cell.get("data", DATA)
    return data_folder is not None or sources.downloadable(data) or sources.cached(data)


def _paper(cell: dict[str, Any]) -> float | None:
    """Return the printed seconds of a cell of the running time."""
    return PAPER.get(cell["teachers"]) if cell.get("network") == "paper" else None


def _run(name: str, cell: dict[str, Any], run: Path, device: str, data_folder: Path | None) -> dict[str, Any]:
    if name == "table6":
        folder = data_folder if sources.CATALOGUE[cell["data"]].local is not None else None
        return cell | measure(cell | {"method": "datalens-paper", "data_folder": folder}, run, device)
    method = "datalens" if cell["network"] == "spectral" else "datalens-paper"
    paper = _paper(cell)
    return {**cell, "paper": paper, **measure({"data": DATA, "method": method, **cell}, run, device)}


def measure(options: dict[str, Any], run: Path, device: str) -> dict[str, Any]:
    """Do a short run, and return the median time of its epochs."""
    import torch

    from datalens.driver import choose_device, train

    place = choose_device(device)
    train(
        TrainOptions(
            out=run,
            device=device,
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


def _runtime(rows: list[Row], *, full: bool) -> str:
    lines = [
        "MNIST, batch 15, two teacher steps an epoch, with student, ledger and journal. The paper's figures are for "
        "its own teachers on an RTX 2080 Ti; ours are from the machine named in the row.",
    ]
    if not full:
        lines.append(
            "**Quick: no paper-size teachers, and few compact ones. Use --full on a GPU for the paper's rows.**"
        )
    lines += ["", "| teachers | how many | paper | ours | ours, µs a teacher | times faster | machine |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        paper, seconds = f"{row['paper']:.2f}" if row["paper"] else "—", row["seconds_per_epoch"]
        ratio = f"{row['paper'] / seconds:.0f}" if row["paper"] and seconds else "—"
        ours, each = ("—", "—") if seconds is None else (f"{seconds:.3f}", f"{1e6 * seconds / row['teachers']:.0f}")
        lines.append(
            f"| {row['network']} | {row['teachers']} | {paper} | {ours} | {each} | {ratio} | "
            f"{row['machine'] or 'not run'} |"
        )
    return "\n".join(lines) + "\n"


def _table6(rows: list[Row], *, full: bool) -> str:
    lines = [
        "Two teacher steps an epoch, with student, ledger and journal. The paper's figures are from a Tesla T4; ours "
        "are from the machine named in the row. To TopAgg: seconds divided by those of TopAgg on the same data.",
    ]
    if not full:
        lines.append("**Quick: few small teachers over 784 cosines. Use --full on a GPU for the paper's 4000.**")
    lines += ["", "| data | teachers | compressor | paper | ours | to TopAgg, paper | to TopAgg, ours | machine |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    columns = {compress: column for column, compress in COMPRESS.items()}
    for row in rows:
        column = columns[row["compress"]]
        printed, ours = TABLE6[row["data"]], row["seconds_per_epoch"]
        topagg = next(r["seconds_per_epoch"] for r in rows if (r["data"], r["compress"]) == (row["data"], "topk-sign"))
        shown = "—" if ours is None else f"{ours:.3f}"
        ratio = "—" if ours is None or topagg is None else f"{ours / topagg:.2f}"
        lines.append(
            f"| {row['data']} | {row['teachers']} | {column} | {printed[column]:.2f} | {shown} | "
            f"{printed[column] / printed['TopAgg']:.2f} | {ratio} | {row['machine'] or 'not run'} |"
        )
    return "\n".join(lines) + "\n"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network and row["seconds_per_epoch"] is not None]
        seconds = [row["seconds_per_epoch"] for row in mine]
        axes.plot([row["teachers"] for row in mine], seconds, "o-", label=f"ours, {network} teachers")
    axes.plot(list(PAPER), list(PAPER.values()), "s--", color="#9aa5b1", label="the paper, RTX 2080 Ti")
    axes.set(yscale="log", xlabel="teachers", ylabel="seconds per epoch", title=TITLES["runtime"])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
