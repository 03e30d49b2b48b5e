"""What a person waits for before anything happens: `import datalens` and `datalens --help`."""

import resource
import subprocess
import sys

import pytest

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
