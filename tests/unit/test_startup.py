"""What a person waits for before anything happens: `import datalens` and `datalens --help`."""

import ast
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import datalens

ROOT = Path(datalens.__file__).parent
HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pyarrow", "PIL", "opacus", "opendp", "pandas", "rich")
HELP = "import sys; sys.argv = ['datalens', '--help']; import runpy; runpy.run_module('datalens', run_name='__main__')"


def loaded_by(code: str) -> set[str]:
    """Of the heavy packages, those that a fresh Python has after `code`."""
    after = f"import atexit, sys; atexit.register(lambda: sys.stderr.write(repr(sorted(sys.modules)))); {code}"
    done = subprocess.run([sys.executable, "-c", after], capture_output=True, text=True, check=True)
    return {name for name in HEAVY if f"'{name}'" in done.stderr}


def test_import_and_help_load_nothing_heavy() -> None:
    assert loaded_by("import datalens") == set()
    assert loaded_by(HELP) == set()
    assert "numpy" in loaded_by("import numpy")  # the check sees what is there


def test_the_estimator_and_errors_are_named_without_loading_them() -> None:
    assert loaded_by("import datalens; assert 'DataLens' in dir(datalens); datalens.DatalensError") == set()


def test_help_names_every_command_and_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    from datalens.cli import main

    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for verb in ("train", "plan", "sample", "verify", "budget"):
        assert f"\n  {verb} " in said
    assert len([line for line in said.splitlines() if line.startswith("  ")]) == len(main.COMMANDS)
    assert min(_seconds([sys.executable, "-m", "datalens", "--help"]) for _ in range(3)) < 0.5


def _seconds(command: list[str]) -> float:
    """Of work: how long the machine lets it wait is not ours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_no_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from datalens.cli import main as main

    with pytest.raises(SystemExit) as ended:
        main.main([])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and "usage: datalens COMMAND" in said.err


def test_a_line_of_help_breaks_after_a_clause() -> None:
    """The parser keeps the line breaks of an option's docstring."""
    seen = 0
    for path in (*(ROOT / "cli").glob("*.py"), *(ROOT / "methods").glob("*.py"), ROOT / "options.py"):
        classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
        for before, node in (pair for kind in classes for pair in itertools.pairwise(kind.body)):
            if isinstance(before, ast.AnnAssign) and isinstance(node, ast.Expr):
                lines = str(ast.literal_eval(node.value)).splitlines()
                assert all(line.endswith((".", ";", ":")) for line in lines[:-1]), f"{path.name}: {lines}"
                seen += len(lines)
    assert seen > 100


def test_the_options_of_every_method_fit_on_a_screen() -> None:
    """`train --help` has 49 lines in a terminal of 80 columns, and no method's option."""
    environment = {**os.environ, "COLUMNS": "80"}
    line = [sys.executable, "-m", "datalens", "train", "--help"]
    shown = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout
    assert len(shown.splitlines()) < 50
    assert "--epsilon" in shown and "--teachers" not in shown and "--coordinates" not in shown


def test_methods_with_a_command_of_their_own_are_named_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    from datalens.cli import main

    for verb, method in itertools.product(("train", "plan"), ("sgd", "topagg")):
        with pytest.raises(SystemExit) as ended:
            main.main([verb, "--method", method, "--data", "digits", "--out", "x"][: 7 if verb == "train" else 5])
        assert ended.value.code == 2 and f"--method {method} is" in capsys.readouterr().err


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    from datalens.cli import main as main

    with pytest.raises(SystemExit) as ended:
        main.main(["--completion", "bash"])
    assert ended.value.code in (None, 0)
    script = capsys.readouterr().out
    assert "complete" in script and "--epsilon" in script
    with pytest.raises(SystemExit) as ended:
        main.main(["--completion", "fish"])
    assert ended.value.code == 2
    assert "--completion needs a shell" in capsys.readouterr().err
