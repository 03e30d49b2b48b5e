"""`datalens reproduce`: run the missing cells of a table or figure, and write it.

Each cell is kept when it ends, so an interrupted table goes on where it stopped. The output is Markdown, CSV, JSON and
a plot, with the paper's printed values beside ours.
"""

import fnmatch
import json
import time
from pathlib import Path
from typing import Any

from datalens.data.named import sources
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.progress import counted, say
from datalens.reproduce import (
    ablation,
    authors,
    dpimagebench,
    dpsgd,
    figure2,
    figure4,
    output,
    projection,
    quality,
    runtime,
    steps,
    table1,
    table2,
    table4,
    table5,
    table7,
    theory,
    utility,
)
from datalens.reproduce.cells import Cell, Results, Table, run_cell, stale
from datalens.reproduce.kept import keep_cell, kept, kept_in, made_in


def tables() -> dict[str, Table]:
    """Return the tables that are made of cells."""
    return {
        "table1": table1.TABLE,
        "table2": table2.TABLE,
        "table3": quality.TABLE3,
        "table4": table4.TABLE,
        "table5": table5.TABLE,
        "table7": table7.TABLE,
        "table12": quality.TABLE12,
        "figure4": figure4.TABLE,
        "utility": utility.TABLE,
        "ablation": ablation.TABLE,
        "authors": authors.TABLE,
        "projection": projection.TABLE,
        "steps": steps.TABLE,
    }


def listing() -> dict[str, str]:
    """Return the titles of everything that can be reproduced, tables and figures in the order of their numbers."""
    own = runtime.TITLES | {"figure2": figure2.TITLE, "theory": theory.TITLE} | dpsgd.TITLES
    own |= {"dpimagebench": dpimagebench.TITLE}
    every = {name: table.title for name, table in tables().items()} | own
    order = [f"{kind}{number}" for kind in ("table", "figure") for number in range(1, 13)]
    return {name: every[name] for name in sorted(every, key=lambda n: order.index(n) if n in order else len(order))}


def reproduce(
    name: str,
    *,
    full: bool,
    out: Path,
    device: str,
    data_folder: Path | None = None,
    only: str | None = None,
    stored: Path | None = None,
    again: bool = False,
    seeds: int | None = None,
    small: bool = False,
    rule: bool = False,
) -> dict[str, Any]:
    """Run the missing cells of a table or figure, then write it.

    Args:
        name: what to reproduce, one of `listing()`.
        full: the paper's sizes instead of a quick check.
        out: the folder for runs and results.
        device: where to compute.
        data_folder: the folder of data sets that cannot be downloaded. Cells whose data set is neither there nor in the
            cache are not run, and the table says so.
        only: a pattern of the names of cells to run; other cells are shown if they are finished.
        stored: a folder of kept cells to show; nothing is run.
        again: run stale cells again (see `cells.stale`); otherwise they are shown, and marked.
        seeds: number of seeds of a training with DP-SGD; the default is all.
        small: score dpimagebench by our small network in place of its three.
        rule: train DP-SGD with one setting for a data set, on MNIST the default of `datalens sgd`, without a search.

    Returns:
        The paths of the output, and its rows.

    Raises:
        DatalensError: there is no such table, or the options do not fit it.
    """
    known = tables()
    if name not in listing():
        raise DatalensError(f"there is no {name!r} to reproduce: choose one of {', '.join(listing())}")
    cells = known[name].cells(full) if name in known else []
    if data_folder is not None:
        _check_folder(name, cells, data_folder)
    if seeds is not None and (name not in dpsgd.TITLES or not 1 <= seeds <= 10):
        raise DatalensError(f"--seeds {seeds}: tables 8 to 11 and figure 3 have 1 to 10 seeds, and no other table")
    if rule and name not in dpsgd.TITLES:
        raise DatalensError(f"--rule is about DP-SGD (tables 8 to 11 and figure 3): leave it out for {name}")
    if small and name != "dpimagebench":
        raise DatalensError(f"--small is for dpimagebench, which has three large networks: leave it out for {name}")
    if (
        name not in (*dpsgd.TITLES, "dpimagebench")
        and only is not None
        and not any(fnmatch.fnmatch(cell.name, only) for cell in cells)
    ):
        some = f", such as {cells[0].name}" if cells else ": it has no cells of that kind"
        raise DatalensError(f"--cells {only} fits no cell of {name}{some}")
    if stored is not None and not stored.is_dir():
        raise DatalensError(f"--from {stored} is not a folder: docs/results is one")
    if name in runtime.TITLES:
        place = _folder_of("celeba-gender", data_folder)
        return runtime.reproduce(name, full=full, out=out, device=device, data_folder=place, stored=stored)
    if name in dpsgd.TITLES:
        return dpsgd.reproduce(
            name, full=full, out=out, device=device, stored=stored, only=only, again=again, seeds=seeds, rule=rule
        )
    if name == "dpimagebench":
        return dpimagebench.reproduce(
            full=full, out=out, device=device, small=small, stored=stored, only=only, again=again
        )
    if name in ("figure2", "theory"):
        made = figure2.reproduce if name == "figure2" else theory.reproduce
        return made(full=full, out=out, device=device, stored=stored, again=again)
    table, mode = known[name], "full" if full else "quick"
    results: Results = {}
    folder = made_in(name, full=full, out=out)
    place = kept_in(table.kept_as or name, full=full, out=out, stored=stored)
    runnable = [cell for cell in cells if cell.options is not None]
    for number, cell in enumerate(runnable, start=1):
        assert cell.options is not None
        data = cell.options["data"]
        result = kept(place, cell.name, {"options": cell.asked})
        old = stale(cell, result, table.scoring(full)) if result is not None else None
        if result is None or (stored is None and ((again and old) or not set(table.measured) <= result.keys())):
            folder_of = _folder_of(data, data_folder)
            available = folder_of or sources.downloadable(data) or sources.cached(data)
            if stored is not None or not available or (only is not None and not fnmatch.fnmatch(cell.name, only)):
                if result is not None:
                    results[cell.name] = result | {"stale": old}
                continue
            say(f"[{number}/{len(runnable)}] {cell.row}, {cell.column}")
            shared = out / f"runs-{mode}" / cell.run_name if table.shares_runs else None
            result = run_cell(
                cell,
                table.scoring(full),
                shared or folder / "runs" / f"{cell.name}-v{cell.version}",
                device,
                data_folder=folder_of,
                accuracy_real=_ceiling(results, data),
            )
            result, old = keep_cell(place, cell.name, result), None
        results[cell.name] = result | {"stale": old}
    if stored is None and (count := sum(result["stale"] is not None for result in results.values())):
        say(
            f"{name}: {counted(count, 'stale cell')}, made by older code or scored in another way; "
            "--stale runs them again"
        )
    rows = table.rows(cells, results)
    text = f"{table.said(full)}\n\n{table.markdown(rows)}"
    return output.write(
        name, table.title, folder, full=full, rows=rows, text=text,
        draw=lambda path: table.plot(rows, table.title, path),
    )  # fmt: skip


def _ceiling(results: Results, data: str) -> float | None:
    """Return the accuracy with real training images, if a cell of this data set has it: it is the same for all."""
    scored = (r for r in results.values() if "utility" in r and r["options"]["data"] == data)
    return next((r["utility"]["accuracy_real"] for r in scored), None)


def _check_folder(name: str, cells: list[Cell], folder: Path) -> None:
    """Raise if the folder cannot be used, before the first cell needs it hours later."""
    if not reads_a_folder(cells) and name != "table6":
        raise DatalensError(f"--data-folder is for data that cannot be downloaded; {name} needs none: leave it out")
    if not folder.is_dir():
        raise DatalensError(f"--data-folder {folder} is not a folder")


def reads_a_folder(cells: list[Cell]) -> bool:
    """Return whether any of the cells needs a data set that cannot be downloaded."""
    return any(not sources.downloadable(cell.options["data"]) for cell in cells if cell.options)


def _folder_of(data: str, folder: Path | None) -> Path | None:
    """Return where a data set is in a folder: in a subfolder with the name of its family, or in the folder itself.

    A folder without such subfolders is taken to hold Places365 if it has that layout, and CelebA otherwise.
    """
    if folder is None or sources.downloadable(data):
        return None
    families = {sources.family(other) for other in sources.names() if not sources.downloadable(other)}
    if any((folder / family).is_dir() for family in families):
        subfolder = folder / sources.family(data)
        return subfolder if subfolder.is_dir() else None
    local = sources.CATALOGUE["places365"].local
    holds = "places365" if local is not None and local.present(folder) else "celeba"
    return folder if sources.family(data) == holds else None


def reproduce_all(*, full: bool, out: Path, device: str, data_folder: Path | None = None) -> dict[str, Any]:
    """Reproduce everything. Return what was made, in how many seconds, and what failed and why."""
    mode = "full" if full else "quick"
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number, (name, title) in enumerate(every := list(listing().items()), start=1):
        say(f"{number} of {len(every)}, {name}: {title}")
        began = time.monotonic()
        try:
            result = reproduce(
                name, full=full, out=out, device=device, data_folder=_if_read(name, data_folder, full=full)
            )
            made[name] = {"seconds": round(time.monotonic() - began, 1), "markdown": result["markdown"]}
        except DatalensError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
    seconds = round(sum(one["seconds"] for one in made.values()), 1)
    base = out / f"all-{mode}"
    content = {"full": full, "seconds": seconds, "made": made, "failed": failed}
    write_atomically(base.with_suffix(".json"), json.dumps(content, indent=1).encode())
    lines = [f"# Everything ({mode}), {seconds / 60:.1f} minutes", "", "| what | seconds | |", "|---|---|---|"]
    lines += [f"| {name} | {one['seconds']} | {Path(one['markdown']).relative_to(out)} |" for name, one in made.items()]
    lines += [f"| {name} | — | failed: {why} |" for name, why in failed.items()]
    write_atomically(base.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    return {"table": "all", **content, "markdown": f"{base}.md"}


def _if_read(name: str, data_folder: Path | None, *, full: bool) -> Path | None:
    """Return the folder for a table that needs one, and None for others, which would refuse it."""
    table = tables().get(name)
    return data_folder if table is not None and reads_a_folder(table.cells(full)) else None
