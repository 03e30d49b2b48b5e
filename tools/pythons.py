"""Build the wheel, and test it on every supported Python that is installed: install, --help, a small run, verify.

python tools/pythons.py [3.12 …]: exit code 1 if one fails. Missing versions are reported and skipped.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROMISED = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[1]


def interpreter(version: str) -> str | None:
    """Return the interpreter of a version from the path, or from the folders of pyenv and uv; None if there is none."""
    homes = [Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python"]
    kept = [path for home in homes for path in sorted(glob.glob(f"{home}/*{version}*/bin/python{version}"))]
    for candidate in (shutil.which(f"python{version}"), *kept):
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def tried(python: str, wheel: Path, folder: Path) -> str:
    """Install the wheel and run commands in a new environment. Return an empty text, or what failed."""
    bin_, run = folder / "venv" / "bin", folder / "run"
    steps = [
        [python, "-m", "venv", str(folder / "venv")],
        [str(bin_ / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)],
        [str(bin_ / "datalens"), "--help"],
        [str(bin_ / "python"), "-m", "datalens", "--version"],
        [str(bin_ / "datalens"), "train", "--data", "digits", "--epsilon", "3", "--out", str(run)],
        [str(bin_ / "datalens"), "verify", str(run)],
        [str(bin_ / "datalens"), "sample", str(run), "--count", "20", "--out", str(folder / "s.parquet")],
    ]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, cwd=folder, env=clean, check=False)
        if done.returncode:
            return f"{' '.join(step)}\n{done.stderr[-2000:]}"
    return ""


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as place:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(place).glob("*.whl")
        for version in sys.argv[1:] or PROMISED:
            python = interpreter(version)
            if python is None:
                print(f"Python {version}: not installed, not tested")
                continue
            folder = Path(place) / version
            folder.mkdir()
            problem = tried(python, wheel, folder)
            failed |= bool(problem)
            print(
                f"Python {version}: {'FAILED: ' + problem if problem else 'installed, trained, verified'}", flush=True
            )
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
