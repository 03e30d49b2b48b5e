"""The results that fall short of the paper, by how much and why, from kept cells: a line for each method and table."""

from collections import Counter
from pathlib import Path
from typing import Any

from datalens.reproduce import dpsgd
from datalens.reproduce.cells import Results, Table, stale
from datalens.reproduce.compared import OURS
from datalens.reproduce.dpsgd_runs import Lab
from datalens.reproduce.kept import read_cells
from datalens.reproduce.output import Row

# Why, by table and the beginning of a method's name; "" is any table. Each names the rows or the command that show it.
WHY: dict[tuple[str, str], str] = {
    ("", "DataLens, printed"): "its votes hardly depend on the label (decisions.md); version 0.1's runs",
    (
        "",
        "DataLens, authors' settings, full-size",
    ): "best at ε = 1; at ε = 10 noise is not the reason (rows ε = ∞, compact teachers)",
    ("", "DataLens, full-size"): "Gaussian latents at ε = 1 (authors' settings are better); at ε = 10 as compact ones",
    ("", "DataLens"): "compact teachers at ε = 1 (rows `full-size teachers`); at ε = 10 the loop itself (rows ε = ∞)",
    ("table4", ""): "compact teachers at ε = 1, as in table 1; one run each (remarks)",
    ("table5", "TopAgg"): "compact teachers at ε = 1, as in table 1",
    (
        "table5",
        "",
    ): "compact teachers at ε = 1: noise hides the votes; the rows `64 cosines` are the same in 64 coordinates",
    ("table7", ""): "compact teachers at ε = 1, as in table 1; the rows `64 cosines` show the parts in 64 coordinates",
    (
        "",
        "GS-WGAN",
    ): "a tenth of the printed steps, and noise priced rightly: the printed noise spends ε = 347 (decisions.md)",
    (
        "",
        "G-PATE",
    ): "presets made for ε = 1, in cosines; the published form, in pixels, has not been run (`projection`)",
    ("", "DP-GAN"): "presets made for ε = 1, and no more steps at ε = 10; not explained by a run on faces",
    ("", "PATE-GAN"): "not explained by a run; the preset is the same at every ε",
    ("table2", "DataLens"): "the printed σ leaves 3 to 55 steps below ε = 1 (column steps); at 1 as in table 1",
    ("table3", "datalens"): "fits moments that matter to classifiers, not photographs; not explained by a run",
    ("table12", "datalens"): "fits moments that matter to classifiers, not photographs; not explained by a run",
    ("", "TopAgg norm"): "learning starts late, and the budget's steps end first at small ε; see dpsgd.md",
    ("", "GM-DP"): "one seed from ε = 0.3 on, two points apart from one another at 0.2; see dpsgd.md",
    ("", "noise of variance"): "the training of table 8 at ε = 1; see dpsgd.md",
    ("", "no noise"): "90 steps in which noise does not limit accuracy; see dpsgd.md",
}


def why(table: str, method: str) -> str:
    """Return the reason for a method's shortfall in a table: of the longest key that fits."""
    fitting = [key for key in WHY if key[0] in ("", table) and method.startswith(key[1])]
    return WHY[max(fitting, key=lambda key: (bool(key[0]), len(key[1])))] if fitting else "not known"


def results_of(table: Table, kept: Results) -> Results:
    """Return the kept cells of a table as its rows expect them, with what is stale about each."""
    found: Results = {}
    scoring = table.scoring(True)
    for cell in table.cells(True):
        result = kept.get(cell.name)
        if result is not None and result.get("options") == cell.asked:
            found[cell.name] = result | {"stale": stale(cell, result, scoring)}
    return found


def rows_of(name: str, table: Table, stored: Path) -> list[Row]:
    cells = table.cells(True)
    return table.rows(cells, results_of(table, read_cells(stored / f"{table.kept_as or name}.jsonl")))


def lines(tables: dict[str, Table], stored: Path) -> list[Row]:
    """Return a line for each method of each table of the paper that prints figures of it."""
    lab = Lab(stored / "dpsgd.jsonl", "cpu", workers=1, trains=False)
    every = {name: rows_of(name, tables[name], stored) for name in tables if name.startswith("table")}
    every |= {name: make(lab, dpsgd.Mode.of(True)) for name, make in dpsgd.TABLES.items() if name.startswith("table")}
    found = []
    for name, rows in sorted(every.items(), key=lambda pair: int(pair[0].removeprefix("table"))):
        printed = [row for row in rows if row["paper"] is not None and row["column"] != "Real data"]
        printed += _default_beside_theirs(rows)
        for method in dict.fromkeys(_method(name, row) for row in printed):
            found.append(_line(name, method, [row for row in printed if _method(name, row) == method]))
    return found


def _default_beside_theirs(rows: list[Row]) -> list[Row]:
    """Return the rows of our default, which the paper does not have, beside what it prints for DataLens."""
    theirs = {(row["row"], row.get("measure")): row["paper"] for row in rows if row["column"] == "DataLens"}
    mine = [row for row in rows if row["column"] == OURS and theirs.get((row["row"], row.get("measure"))) is not None]
    column = f"{OURS}, beside DataLens"
    return [row | {"column": column, "paper": theirs[row["row"], row.get("measure")]} for row in mine]


def _method(name: str, row: Row) -> str:
    """Return the method of a row; of table 4, the parameter; of scores, also what is measured."""
    method = row["column"].split("=")[0] if name == "table4" else row["column"]
    return f"{method} ({row['measure']})" if "measure" in row else method


def _line(name: str, method: str, rows: list[Row]) -> Row:
    run = [row for row in rows if row["ours"] is not None]
    short = [row for row in run if _worse(row) > 0]
    most = max(short, key=_worse) if short else None
    return {
        "table": name,
        "method": method,
        "printed": len(rows),
        "run": len(run),
        "stale": sum("stale" in row["marks"] for row in run),
        "short": len(short),
        "mean": sum(map(_worse, short)) / len(short) if short else None,
        "most": _worse(most) if most else None,
        "where": most["row"] if most else None,
        "why": why(name, method) if short else None,
        "empty": [_needs(name, row) for row in rows if row["ours"] is None],
    }


def _needs(name: str, row: Row) -> str:
    """Return what a cell that was not run needs."""
    if name in ("table3", "table12"):
        return "a GPU, and the file of Inception-v3"
    if int(name.removeprefix("table")) >= 8:
        return "a GPU, or up to half an hour of a core each"  # the longest kept training on a core
    return str(row.get("not_run") or "not run").removeprefix("not run").removeprefix(": ").removeprefix("needs ")


def _worse(row: Row) -> float:
    """Return by how much a figure is worse than the paper's: of a distance, how much larger it is."""
    difference = float(row["ours"] - row["paper"])
    return difference if row.get("measure") == "FID" else -difference


def markdown(lines: list[Row]) -> str:
    """Return the table. Of tables 8 to 11 figures are in percent, of tables 3 and 12 scores and distances."""
    shown = [
        "| table | method | printed | run | stale | short of the paper | by, on average | at most | there | why | "
        "not run, and what it needs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        by = ["—" if line[key] is None else f"{line[key]:.{_digits(line)}f}" for key in ("mean", "most")]
        shown.append(
            f"| {line['table'].removeprefix('table')} | {line['method']} | {line['printed']} | {line['run']} | "
            f"{line['stale']} | {line['short']} | {by[0]} | {by[1]} | {line['where'] or '—'} | {line['why'] or '—'} | "
            f"{_counted(line['empty'])} |"
        )
    return "\n".join(shown) + "\n"


def _counted(needs: list[str]) -> str:
    """Return how many cells need what: "2: a GPU; 1: --data-folder", or a dash."""
    return "; ".join(f"{count}: {need or '—'}" for need, count in Counter(needs).most_common()) or "—"


def _digits(line: dict[str, Any]) -> int:
    return 2 if line["table"] in ("table3", "table12") or int(line["table"].removeprefix("table")) >= 8 else 3
