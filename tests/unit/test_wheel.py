"""The wheel that `pip` builds: all of the package, nothing beside it, and it can be imported from there."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)  # offline: nothing is fetched
    (made,) = folder.glob("datalens-*.whl")
    return made


def test_the_package_is_in_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    source = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    here = {path.removeprefix("src/") for path in tracked.split()} or {
        path.relative_to(source).as_posix() for path in source.rglob("*.py")
    }
    assert here <= inside
    assert {name for name in inside if not name.startswith("datalens/")} == set()
    assert not [name for name in inside if "__pycache__" in name or name.endswith((".npz", ".jsonl", ".safetensors"))]
    assert "datalens/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_declares_its_script_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert "datalens = datalens.cli.main:main" in scripts
    for extra in ("tensorboard", "dev", "pld", "medical"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata


def test_it_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import datalens; print(datalens.__file__)"
    code += "; from datalens.cli.main import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(wheel) in done.stdout and "usage: datalens" in done.stdout
