"""Rooms: who may import whom. The contracts of pyproject.toml are run on a copy, with imports planted that they catch;
what they cannot say is read off the folders here."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import datalens

ROOT = Path(datalens.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
LINT = Path(sys.executable).with_name("lint-imports")

# --- the contracts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[int, str]]:
    """Look at a copy of the source in which one file has more text, or is new; afterwards it is as it was."""
    copy = tmp_path_factory.mktemp("rooms")
    shutil.copytree(ROOT, copy / "datalens", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT.parent.parent / "pyproject.toml", copy)

    def look(name: str, text: str) -> tuple[int, str]:
        path = copy / "datalens" / name
        before = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((before or b"") + f"\n\n{text}\n".encode())
        done = subprocess.run(
            [str(LINT), "--config", "pyproject.toml"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        path.unlink() if before is None else path.write_bytes(before)
        return done.returncode, done.stdout + done.stderr

    return look


def test_the_contracts_are_kept(lint: Callable[[str, str], tuple[int, str]]) -> None:
    code, said = lint("progress.py", "")
    assert code == 0, said


def late(text: str) -> str:
    return f"def _planted():\n    {text}"


PLANTED = {
    # contract, file → what is planted there
    ("Rooms stand on each other", "public/streams.py"): "import datalens.errors",
    ("Rooms stand on each other", "bounded/clip.py"): "from datalens.privacy.ledger import Ledger",
    ("Rooms stand on each other", "private/pool.py"): late("from datalens.released import decode"),
    ("Rooms stand on each other", "data/schema.py"): late("from datalens.privacy import ledger"),
    ("Rooms stand on each other", "files.py"): late("from datalens.privacy.ledger import Ledger"),
    ("Rooms stand on each other", "released/report.py"): "import datalens.run.folder",
    ("Rooms stand on each other", "run/folder.py"): (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from datalens.methods.moments import train"
    ),
    ("Rooms stand on each other", "attic/__init__.py"): "",  # a room that has no place
    ("Rooms stand on each other", "box.py"): "",
    ("No cycles, in the house or in a room", "released/drawing.py"): late(
        "from datalens.released.release import sample"
    ),
    ("What is released, decided by public facts or read from a file sees no bounded row", "released/generator.py"): (
        late("from datalens.privacy.mechanisms import GaussianSum")  # which knows bounded rows
    ),
    ("What is released, decided by public facts or read from a file sees no bounded row", "plans/presets.py"): (
        "from datalens.bounded import contributions"
    ),
    ("Records never meet the gate: what is private is bounded, and handed over", "private/pool.py"): (
        late("from datalens.privacy import noise")
    ),
    ("Gradients per record are of any model and any loader", "gradients/poisson.py"): "import datalens.data.records",
}


@pytest.mark.parametrize(("contract", "name"), PLANTED)
def test_a_planted_import_breaks_its_contract(
    contract: str, name: str, lint: Callable[[str, str], tuple[int, str]]
) -> None:
    code, said = lint(name, PLANTED[contract, name])
    assert code == 1
    assert f"{contract} BROKEN" in said, said


# --- read off the folders -------------------------------------------------------------------------


def test_every_folder_is_a_room_or_in_one() -> None:
    """Without an `__init__.py` no contract would look into it; nor is a relative import read here."""
    assert {f"{os.path.dirname(name)}/__init__.py".lstrip("/") for name in FILES} <= set(FILES)
    trees = map(ast.parse, FILES.values())
    assert not any(isinstance(node, ast.ImportFrom) and node.level for tree in trees for node in ast.walk(tree))


@functools.cache
def imported(text: str) -> frozenset[str]:
    """The modules of ours that a file imports, anywhere in it, with what it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(name.removeprefix("datalens.") for name in found if name.startswith("datalens."))


# Module → the rooms that may import it. Others cannot reach it either: the rooms named stand above them.
ASKED_FOR_BY = {
    "privacy.bounds": ("privacy/bounds.py", "evaluate/", "reproduce/", "cli/"),  # analysis of one's own data: no ε
    "privacy.audit": ("privacy/audit.py", "evaluate/", "reproduce/", "cli/"),  # with twins that are broken on purpose
    "privacy.journal": ("privacy/journal.py", "run/", "evaluate/audits/"),  # of a run; a release knows no run
}


def uninvited(files: dict[str, str]) -> list[str]:
    return [
        f"{name}: {module}"
        for name, text in files.items()
        for module, rooms in ASKED_FOR_BY.items()
        if not name.startswith(rooms) and any(f"{one}.".startswith(f"{module}.") for one in imported(text))
    ]


def test_neither_analysis_nor_broken_twins_nor_the_journal_reach_a_release() -> None:
    assert uninvited(FILES) == []
    for module in ASKED_FOR_BY:
        room, name = module.split(".")
        planted = {**FILES, "released/planted.py": f"def f():\n    from datalens.{room} import {name}\n"}
        assert uninvited(planted) == [f"released/planted.py: {module}"]
        assert any(f"{one}.".startswith(f"{module}.") for text in FILES.values() for one in imported(text))


SHARED = ("ensemble",)  # by methods with teachers
BEGINS_WITH = {"refined": "moments"}  # a second stage begins where its first one ends


def between_methods(files: dict[str, str]) -> list[str]:
    """Each method is read by itself: its file imports that of no other."""
    found = []
    for name, text in files.items():
        room, _, file = name.partition("/")
        if room != "methods":
            continue
        others = {one.split(".")[1] for one in imported(text) if one.startswith("methods.")}
        mine = file.removesuffix(".py")
        found += [f"{mine}: {other}" for other in sorted(others) if other not in (*SHARED, BEGINS_WITH.get(mine))]
    return found


def test_methods_never_import_each_other() -> None:
    assert between_methods({name: text for name, text in FILES.items() if name != "methods/__init__.py"}) == []
    planted = {"methods/pategan.py": "def f():\n    from datalens.methods.gpate import train\n"}
    assert between_methods(planted) == ["pategan: gpate"]
    planted = {"methods/pategan.py": "from datalens.methods import ensemble, gpate\n"}
    assert between_methods(planted) == ["pategan: gpate"]


# --- imports inside functions ---------------------------------------------------------------------

# Where they stand, how many there may be, and why. A module of ours that is not slow belongs at the top of a file.
LATE = {
    "cli/": (70, "a command loads what it needs, and --help nothing"),
    "api/": (9, "`from datalens import DataLens` loads no torch"),
    "data/formats.py": (1, "pyarrow"),
    "bounded/": (6, "the kernels, which need triton"),
    "private/": (1, "the kernels, which need triton"),
    "options.py": (1, "it is read for --help"),
    "methods/": (13, "sgd's command line is built without torch and opacus, which its optimizer needs"),
    "driver.py": (5, "several ranks, and a release, where there are any"),
    "job.py": (2, "the same"),
    "run/folder.py": (1, "a run is read without torch, and its first images are drawn with it"),
    "reproduce/": (52, "its tables are run one at a time"),
}
# Slow to load, or not there everywhere: wherever start-up or an extra needs it.
LIBRARIES = {
    *("torch", "safetensors", "torchmetrics", "opacus", "opendp", "triton"),
    *("matplotlib", "pyarrow", "PIL", "sklearn", "scipy", "numpy", "importlib"),
    *("cryptography", "dp_accounting", "pydicom"),
    *("dask", "distributed", "fsspec"),
    "fcntl",
}


@functools.cache
def late_imports(text: str) -> tuple[str, ...]:
    """What is imported inside functions."""

    def walk(node: ast.AST, inside: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if inside and isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            if inside and isinstance(child, ast.ImportFrom):
                yield child.module or ""
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return tuple(walk(ast.parse(text), False))


def late_breaches(files: dict[str, str]) -> list[str]:
    counted: Counter[str] = Counter()
    found = []
    for name, text in files.items():
        for module in late_imports(text):
            if module.split(".")[0] in LIBRARIES:
                continue
            place = next((place for place in LATE if name.startswith(place)), None)
            if place is None or not module.startswith("datalens"):
                found.append(f"{name}: {module}")
            else:
                counted[place] += 1
    found += [f"{place}: {counted[place]}" for place, (most, _) in LATE.items() if counted[place] > most]
    return found


def test_imports_inside_functions_are_where_start_up_needs_them() -> None:
    assert late_breaches(FILES) == []
    planted = "def f():\n    if f:\n        from datalens.released.generator import Generator\n"
    assert late_breaches({**FILES, "released/planted.py": planted}) == [
        "released/planted.py: datalens.released.generator"
    ]
    assert late_breaches({**FILES, "data/formats.py": FILES["data/formats.py"] + planted}) == ["data/formats.py: 2"]
    assert late_breaches({**FILES, "public/planted.py": "def f():\n    import json\n"}) == ["public/planted.py: json"]
    assert late_breaches({"public/planted.py": "import json\nif json:\n    import datalens.errors\n"}) == []
