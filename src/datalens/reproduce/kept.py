"""Finished cells on disk: a JSON-lines file for each table, with a line for each cell. docs/results has such files.

Lines are sorted by name. The picture of a cell, if it has one, is a separate file: `cells.jsonl`, `cells/NAME.png`.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from datalens.files import write_atomically


def made_in(name: str, *, full: bool, out: Path) -> Path:
    """Return the folder that a table is written to."""
    return out / f"{name}-{'full' if full else 'quick'}"


def kept_in(name: str, *, full: bool, out: Path, stored: Path | None = None) -> Path:
    """Return the file of a table's cells: in the folder of its runs or, if nothing is run, in `stored`."""
    return made_in(name, full=full, out=out) / "cells.jsonl" if stored is None else stored / f"{name}.jsonl"


def read_cells(path: Path) -> dict[str, dict[str, Any]]:
    """Return the cells of a file by name, with the paths of their pictures; empty if there is no such file."""
    cells: dict[str, dict[str, Any]] = {}
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                cell = json.loads(line)
                cells[cell.pop("cell")] = cell
    for name, cell in cells.items():
        if (picture := path.with_suffix("") / f"{name}.png").exists():
            cell["picture"] = str(picture)
    return cells


def keep_cell(path: Path, name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Add a finished cell to the file, or replace it. Return it as `read_cells` reads it.

    The file is replaced atomically, so a kill loses no finished cell, and under a lock, so several processes may run
    cells of one table. `result["picture"]`, if present, is the bytes of a PNG.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if "picture" in result:
        path.with_suffix("").mkdir(exist_ok=True)
        write_atomically(path.with_suffix("") / f"{name}.png", result["picture"])
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        cells = read_cells(path) | {name: result}
        write_atomically(path, "".join(_line(name, cells[name]) for name in sorted(cells)).encode())
    finally:
        os.close(folder)
    return read_cells(path)[name]


def _line(name: str, result: dict[str, Any]) -> str:
    facts = {"cell": name} | {key: value for key, value in result.items() if key != "picture"}
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":")) + "\n"


def kept(path: Path, name: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stored cell of this name, if its fields have the values in `asked`; else None."""
    cell = read_cells(path).get(name, {})
    same = all(cell.get(key) == value for key, value in json.loads(json.dumps(asked)).items())
    return cell if cell and same else None
