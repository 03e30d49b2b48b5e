"""Writes tiny runs of the present version as fixtures, which all later versions must still read and finish.

    python tools/freeze.py                     # into tests/fixtures/frozen-VERSION/, which must not exist
    python tools/freeze.py --cases sgd --out F # some of them, into folder F

The runs are cases of bits.py and some interrupted runs. Runs that were asked to stop after a step have a checkpoint, a
release of the steps so far and parked steps of `sgd`; runs that were killed after a release have a journal and nothing
else. Noise is the operating system's. Each run becomes CASE.tar.xz: `run/`, the images that `sample` drew, the budget,
the data of a run that is to go on, if they are its own, and `case.json` with the commands.

Everything is kept small. Generators are narrow; a release states its own width, but to resume an interrupted run,
generators must be made as narrow. Weights in checkpoints are rounded to a few bits. Finished runs have no checkpoints
and journal, and most have no report.html, which `datalens report` can write again. In config.json, /frozen replaces the
folder in which a run was made.
"""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from bits import CASES, CHILD, HERE, OWN, Case, make_own
from safetensors import safe_open
from safetensors.torch import save_file

FINISHED = (
    *("moments-texture", "moments-replace-one", "moments-persons", "topagg", "topagg-replace-one", "topagg-persons"),
    *("paper-compact", "klevel", "sketch", "topk", "gswgan", "gswgan-replace-one", "pategan", "pategan-laplace"),
    *("gpate", "dpgan", "dpsgd-gan", "dpmerf", "dcgan", "sgd", "sgd-persons", "budget"),
)
PAGES = ("moments-persons", "topagg", "sgd", "topagg-stopped", "sgd-stopped")  # keep their report.html
STOPPED, KILLED = "stopped", "killed"
DIGITS = "--data digits --epsilon 10 --preset quick"
VOTES = f"{DIGITS} --teachers 2 --steps 4 --batch 8"
BUDGET = "budget budget --epsilon 30 --delta 1e-5 --json"
# Interrupted runs: the case, how it ends, and after how many steps or released values.
INTERRUPTED = (
    (Case("topagg-stopped", VOTES), STOPPED, 2),
    (Case("topagg-killed", VOTES), KILLED, 2),
    (Case("moments-killed", f"{OWN} --coordinates 16 --texture 0"), KILLED, 3),
    (Case("sgd-stopped", "--data digits --epsilon 3 --epochs 2 --batch-size 64", verb="sgd"), STOPPED, 7),
    (Case("gswgan-stopped", f"{DIGITS} --method gswgan --teachers 2 --steps 3 --batch 4"), STOPPED, 1),
    (Case("pategan-stopped", f"{VOTES} --method pategan"), STOPPED, 2),
    (Case("gpate-stopped", f"{VOTES} --method gpate --threshold 0.1"), STOPPED, 2),
    (Case("dpgan-stopped", f"{DIGITS} --method dpgan --steps 3 --batch 16"), STOPPED, 1),
    (
        Case("dcgan-stopped", "--data digits --epsilon inf --preset quick --method dcgan --steps 3 --batch 8"),
        STOPPED,
        1,
    ),
    (Case("dpmerf-killed", f"{OWN} --preset quick --method dpmerf --steps 3 --batch 4"), KILLED, 1),
    (Case("budget-killed", f"{VOTES} --budget budget", before=BUDGET), KILLED, 2),
)

# Runs before bits.CHILD. It patches today's modules by name; a later version must adapt it to its own.
PRELUDE = """
import dataclasses, os, signal, sys
from datalens.released import generator
make = generator.dcgan_architecture
generator.dcgan_architecture = lambda *a, **k: dataclasses.replace(make(*a, **k), dense=4, widths=(2, 2))
how, after = sys.argv.pop(1), int(sys.argv.pop(1))
if how == "stopped":
    from datalens.run.folder import Run
    steps = Run.steps
    def until(self, *a, **k):
        for number, step in enumerate(steps(self, *a, **k), start=1):
            if number == after:
                os.kill(os.getpid(), signal.SIGINT)
            yield step
    Run.steps = until
if how == "killed":
    from datalens.privacy.journal import Journal
    save, saved = Journal.save, []
    def deadly(self, *a):
        save(self, *a)
        saved.append(a)
        if len(saved) == after:
            os.kill(os.getpid(), signal.SIGKILL)
    Journal.save = deadly
"""


def freeze(case: Case, how: str, after: int, folder: Path) -> Path:
    """Make a run and pack it. `how` is finished, stopped or killed; the latter two end `after` steps or values."""
    case = dataclasses.replace(case, seeded=False)
    commands = [line for line in case.commands if how == "finished" or line.split()[0] in (case.verb, "budget")]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        make_own(place / "own")
        line = [sys.executable, "-c", PRELUDE + CHILD, how, str(after), *commands]
        environment = os.environ | {"PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False)
        ended = {0: "finished", 1: STOPPED if "exit code 130" in done.stderr else "failed", -9: KILLED}
        if ended.get(done.returncode) != how:
            sys.exit(f"{case.name} did not end as it should: {done.stderr[-500:]}")
        make_smaller(place / "run", finished=how == "finished", page=case.name in PAGES)
        facts = {"how": how, "verb": case.verb, "data": case.options.split()[1], "commands": commands}
        (place / "case.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        config = place / "run" / "config.json"
        config.write_bytes(config.read_bytes().replace(str(place).encode(), b"/frozen"))
        kept = [
            "case.json",
            "run",
            "images.npz",
            "budget",
            *(["own"] if facts["data"] == "own" and how != "finished" else []),
        ]
        return pack(place, kept, folder / f"{case.name}.tar.xz")


def make_smaller(run: Path, *, finished: bool, page: bool) -> None:
    """Delete what can be made again or will not be used, and round the weights in checkpoints."""
    for path in [*(run / "checkpoints").iterdir(), *(run / "journal").iterdir()]:
        if finished:
            path.unlink()
        elif path.suffix == ".safetensors":
            state, facts = load_tensors(path)
            save_file({name: rounded(value) for name, value in state.items()}, path, metadata=facts)
    if not page:
        (run / "release" / "report.html").unlink(missing_ok=True)


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file with its metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (no mapping)


def rounded(value: torch.Tensor) -> torch.Tensor:
    """Truncate the numbers of a large float32 tensor to sign, exponent and three bits, which compress well."""
    if value.dtype != torch.float32 or value.numel() < 100:
        return value
    return (value.contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)


def pack(place: Path, kept: list[str], target: Path) -> Path:
    """Write the archive, without any trace of this machine."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(path for name in kept for path in (place / name, *(place / name).rglob("*"))):
            if not path.exists():
                continue
            if path.is_file() and str(place).encode() in path.read_bytes():
                sys.exit(f"{path} names the folder in which it was made")
            info = archive.gettarinfo(path, str(path.relative_to(place)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            archive.addfile(info, io.BytesIO(path.read_bytes()) if path.is_file() else None)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="comma-separated words: cases whose name contains one of them")
    parser.add_argument("--out", type=Path, default=HERE / "tests" / "fixtures" / f"frozen-{version('datalens')}")
    options = parser.parse_args()
    words = [word for word in options.cases.split(",") if word]
    options.out.mkdir(parents=True)  # fails if it exists: fixtures are never changed
    by_name = {case.name: case for case in CASES}
    for case, how, after in (*((by_name[name], "finished", 0) for name in FINISHED), *INTERRUPTED):
        if not words or any(word in case.name for word in words):
            print(f"{case.name:20} {freeze(case, how, after, options.out).stat().st_size:8,} bytes", flush=True)


if __name__ == "__main__":
    main()
