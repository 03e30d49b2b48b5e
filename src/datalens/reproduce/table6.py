"""Table 6: seconds per epoch with three ways to compress gradients, each cell a real (short) run."""

import csv
import json
from pathlib import Path
from typing import Any

from datalens.progress import say
from datalens.reproduce.runtime import measure
from datalens.run.folder import write_atomically

COMPRESS = {"TopAgg": "topk-sign", "D²P-Fed": "klevel", "FetchSGD": "sketch"}
QUICK = 500  # teachers
TITLE = "Table 6: seconds per epoch, by compressor"
# On a Tesla T4.
PAPER: dict[str, dict[str, float]] = {
    "mnist": {"TopAgg": 338.34, "D²P-Fed": 492.43, "FetchSGD": 785.34},
    "fashion-mnist": {"TopAgg": 340.84, "D²P-Fed": 471.02, "FetchSGD": 775.35},
}


def cells(full: bool) -> list[dict[str, Any]]:
    """What is run: the paper's 4000 teachers, or without a GPU fewer of the spectral kind, over all 784 cosines."""
    quick: dict[str, Any] = {"network": "spectral", "basis": "dct", "basis_size": 784, "k": 200}
    found = []
    for data, printed in PAPER.items() if full else [("mnist", PAPER["mnist"])]:
        for column in printed:
            compress: dict[str, Any] = {"data": data, "compress": COMPRESS[column], "teachers": 4000 if full else QUICK}
            own = {} if full else {**quick, "k": None} if COMPRESS[column] == "klevel" else quick
            found.append(compress | own)
    return found


def reproduce(*, full: bool, out: Path, device: str) -> dict[str, Any]:
    """Run what is missing, then write the table. Returns where everything is."""
    folder = out / f"table6-{'full' if full else 'quick'}"
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, cell in enumerate(wanted := cells(full), start=1):
        name = f"{cell['data']}-{cell['compress']}"
        path = folder / "cells" / f"{name}.json"
        if not path.exists():
            say(f"[{number}/{len(wanted)}] {name}")
            found = measure(cell | {"method": "datalens-paper"}, folder / "runs" / name, device)
            write_atomically(path, json.dumps(cell | found, indent=1).encode())
        rows.append(json.loads(path.read_text(encoding="utf-8")))
    return _write(rows, folder, full=full)


def _write(rows: list[dict[str, Any]], folder: Path, *, full: bool) -> dict[str, Any]:
    base = folder / "table6"
    write_atomically(base.with_suffix(".json"), json.dumps({"full": full, "rows": rows}, indent=1).encode())
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        f"# {TITLE} ({'full' if full else 'quick'})",
        "",
        f"{rows[0]['teachers']} teachers, batch 15, two teacher steps an epoch, with student, ledger and journal. "
        "The paper's figures are from a Tesla T4; ours are from the machine named in the row.",
    ]
    if not full:
        lines.append("**Quick: few small teachers over 784 cosines. Use --full on a GPU for the paper's 4000.**")
    lines += ["", "| data | compressor | paper | ours | machine |", "|---|---|---|---|---|"]
    columns = {compress: column for column, compress in COMPRESS.items()}
    for row in rows:
        column = columns[row["compress"]]
        paper, ours = PAPER[row["data"]][column], row["seconds_per_epoch"]
        lines.append(f"| {row['data']} | {column} | {paper:.2f} | {ours:.3f} | {row['machine']} |")
    write_atomically(base.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    return {"table": "table6", "full": full, "markdown": f"{base}.md", "csv": f"{base}.csv", "rows": rows}
