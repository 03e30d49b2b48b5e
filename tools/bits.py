"""Compares, byte for byte, the outputs of two versions of the source with the same seeds.

    python tools/bits.py BASE                  # this working tree against a commit, or against another checkout
    python tools/bits.py BASE --cases sgd,csv  # only cases whose name contains one of these words
    python tools/bits.py BASE --ignore release/report.html,CERTIFICATE.md   # files that were changed on purpose

Each case is a tiny run with seeded noise: `datalens train` (or `sgd`), `verify` and `sample`, in a process of its own
that has the source of one side first on its path. Everything is compared that the commands print as JSON, everything in
the run folder (options, settings, ledger, checkpoints, losses, weights, certificate, pages, pictures), and the sampled
images. Only values that depend on a clock or on the system's noise are masked (`MASKED`, `BY_NOISE`).

The hashes of a base commit's outputs are cached in the system's temporary folder; `--fresh` computes them again.
`--keep FOLDER` leaves the files of both sides there for inspection. Exit code 1 means that something differs. A case
that fails counts as different, even if it fails on both sides.
"""

import argparse
import concurrent.futures
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parents[1]
AT_ONCE = 2  # number of processes

# Fields that state when, in how much time or on which system something was made; `*` is every file and JSON line.
MASKED = {
    "*": ("seconds", "time", "versions"),
    "budget.jsonl": ("run", "turn", "hash", "previous"),
    "config.json": ("run", "turn"),  # identify the run's reservation in the budget of the data set
}
# Files that depend on noise which has no seed, and fields with hashes of such files.
BY_NOISE = (
    "generator.safetensors",
    "samples.png",
    "report.html",
    "images.npz",
    "metrics.jsonl",
    "/journal/",
    "/checkpoints/",
)
FAILED = "failed"  # key of an error message, if there are no hashes


@dataclass(frozen=True)
class Case:
    """One run: its options, its verb (`train` or `sgd`), and whether its noise has a seed."""

    name: str
    options: str
    verb: str = "train"
    seeded: bool = True
    before: str = ""  # a command to run first
    again: bool = False  # delete the release, and make it again with `--resume`

    @property
    def commands(self) -> list[str]:
        """Return the commands to run, in order, in the folder of the case."""
        seed = " --noise-seed 7" if self.seeded else ""
        lines = [self.before] if self.before else []
        lines.append(f"{self.verb} {self.options}{seed} --out run --json")
        lines += [f"{self.verb} --resume --out run --json"] if self.again else []
        lines.append("verify run --json")
        if self.verb == "train":
            lines.append("sample run --count 20 --seed 3 --out images.npz --json")
        return lines


# The program of a case's process: `python -m datalens` for each command in turn, so that torch is loaded once.
CHILD = """
import contextlib, runpy, shutil, sys
for number, command in enumerate(sys.argv[1:]):
    sys.argv, code = ["datalens", *command.split()], 0
    if "--resume" in sys.argv:
        shutil.rmtree("run/release")
    with open(f"{number}-{sys.argv[1]}.txt", "w") as out, contextlib.redirect_stdout(out):
        try:
            runpy.run_module("datalens", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
    if code:
        sys.exit(f"`datalens {command}` ended with exit code {code}")
"""

DIGITS, OWN = "--data digits --epsilon 10", "--data own --nominal-size 60 --epsilon 10"
CSV = "--data own/list.csv --nominal-size 180 --label kind --epsilon 10"
VOTES = f"{DIGITS} --teachers 6 --steps 2 --batch 8"
QUICK = f"{VOTES} --preset quick"

CASES = (
    Case("moments", DIGITS),
    Case("moments-texture", f"{CSV} --classes left,right,up --coordinates 16 --texture 8 --texture-steps 2"),
    Case("moments-replace-one", f"{DIGITS} --relation replace-one --coordinates 16 --texture 8 --texture-steps 2"),
    Case("moments-persons", f"{OWN} --record-id prefix --coordinates 16 --texture 0"),
    Case("topagg", f"{VOTES} --warm-start off"),
    Case("topagg-quick-again", QUICK, again=True),
    Case("topagg-replace-one", f"{QUICK} --relation replace-one --accountant rdp"),
    Case("topagg-persons", f"{OWN} --record-id prefix --teachers 5 --preset quick --steps 2"),
    Case("paper-compact", f"{VOTES} --method datalens-paper --network compact"),
    Case("paper-code", f"{VOTES} --method datalens-paper --preset code --network paper"),
    Case("klevel", f"{QUICK} --compress klevel --levels 8"),
    Case("sketch", f"{QUICK} --compress sketch --sketch-columns 16"),
    Case("topk", f"{QUICK} --compress topk"),
    Case("gswgan", f"{DIGITS} --method gswgan --preset quick --teachers 3 --steps 2 --batch 4"),
    Case(
        "gswgan-replace-one", f"{DIGITS} --method gswgan --preset quick --teachers 3 --steps 1 --relation replace-one"
    ),
    Case("pategan", f"{VOTES} --method pategan --preset quick --batch 10"),
    Case("pategan-laplace", f"{VOTES} --method pategan --preset quick --batch 10 --aggregate laplace"),
    Case("gpate", f"{VOTES} --method gpate --preset quick --threshold 0.1", again=True),
    Case("dpgan", f"{DIGITS} --method dpgan --preset quick --steps 2 --batch 16"),
    Case("dpsgd-gan", f"{DIGITS} --method dpsgd-gan --preset quick --steps 2 --batch 16"),
    Case("dpmerf", f"{DIGITS} --method dpmerf --preset quick --steps 3 --batch 4", again=True),
    Case("dcgan", "--data digits --epsilon inf --method dcgan --preset quick --steps 2 --batch 8"),
    Case("sgd", f"{DIGITS} --epochs 1 --topk 0.5 --show-accuracy", verb="sgd"),
    Case("sgd-cnn", f"{CSV} --image-size 14 --epochs 0.5 --network cnn --selector dim --topk 0.5 --last", verb="sgd"),
    Case("sgd-persons", f"{OWN} --record-id prefix --epochs 1 --network linear --batch-size 20", verb="sgd"),
    Case("csv", f"{CSV} --image-size 8 --coordinates 16 --texture 0"),
    Case("folder", "--data own --nominal-size 180 --epsilon 10 --grayscale --coordinates 16 --texture 0"),
    Case(
        "budget",
        "--data digits --epsilon 1 --teachers 6 --steps 2 --preset quick --budget budget",
        seeded=False,
        before="budget budget --epsilon 3 --delta 1e-5 --json",
    ),
)


def make_own(folder: Path) -> None:
    """Write 180 small images of three classes and sixty persons, as a folder and as a CSV: the same in every call."""
    random, lines = np.random.default_rng(0), ["file_name,kind,person"]
    down, across = np.mgrid[0:10, 0:10] / 10
    for angle, kind in enumerate(("left", "right", "up")):
        (folder / kind).mkdir(parents=True)
        for number in range(60):
            waves = np.sin(9 * (across * np.cos(angle) + down * np.sin(angle)) + random.uniform())
            image = np.clip(128 + 90 * waves + random.normal(0, 25, waves.shape), 0, 255).astype(np.uint8)
            name = f"{kind}/p{number}_scan.png"
            Image.fromarray(image).save(folder / name)
            lines.append(f"{name},{kind},p{number}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def perform(case: Case, source: Path, place: Path) -> dict[str, str]:
    """Run a case's commands in a new process and folder, and return hashes of all compared contents, by name."""
    shutil.rmtree(place, ignore_errors=True)
    make_own(place / "own")
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    line = [sys.executable, "-c", CHILD, *case.commands]
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {FAILED: " ".join(done.stderr[-500:].split())}
    shutil.rmtree(place / "own")
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents(case, place).items()}


def remembered(case: Case, source: Path, place: Path, kept: Path | None) -> dict[str, str]:
    """Return the base's hashes, cached by an earlier call or computed now. Failures are not cached."""
    if kept is None:
        return perform(case, source, place)
    path = kept / f"{case.name}-{hashlib.sha256(repr((case, MASKED, BY_NOISE)).encode()).hexdigest()[:12]}.json"
    if path.exists():
        hashes: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return hashes
    hashes = perform(case, source, place)
    if FAILED not in hashes:
        kept.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(hashes), encoding="utf-8")
    return hashes


def contents(case: Case, place: Path) -> dict[str, bytes]:
    """Return all contents to compare, by name, with values that may differ masked."""
    compared = {}
    for path in sorted(filter(Path.is_file, place.rglob("*"))):
        name, content = str(path.relative_to(place)), path.read_bytes()
        if not case.seeded and any(part in name for part in BY_NOISE):
            compared[name] = _ordered(content)[0] if name.endswith(".safetensors") else b""
        elif name.endswith(".safetensors"):
            compared[name] = b"".join(_ordered(content))
        elif name.endswith(".npz"):
            with np.load(io.BytesIO(content)) as arrays:
                compared |= {f"{name}:{key}": _masked(name, arrays[key].tobytes(), place) for key in arrays.files}
        elif name.endswith(".png"):
            compared[name] = content
        else:
            compared[name] = _masked(name, content, place)
            if not case.seeded and not name.endswith("ledger.jsonl"):
                compared[name] = re.sub(rb"[0-9a-f]{64}", b"HASH", compared[name])
    return compared


def _masked(name: str, content: bytes, place: Path) -> bytes:
    fields = {*MASKED["*"], *MASKED.get(Path(name).name, ())}
    pattern = rf'"({"|".join(sorted(fields))})": ?("[^"]*"|\{{[^}}]*\}}|[-+.\deE]+)'
    content = re.sub(pattern.encode(), rb'"\1": MASKED', content)
    return content.replace(str(place).encode(), b"PLACE")


def _ordered(content: bytes) -> tuple[bytes, bytes]:
    """Return a safetensors file's header with sorted fields (safetensors writes them in any order), and its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:end]), sort_keys=True).encode(), content[end:]


def compare(base: dict[str, str], here: dict[str, str], ignore: list[str]) -> str:
    """Return a line that begins with `same`, or says what differs between the two sides."""
    if FAILED in here or FAILED in base:
        return f"FAILED here: {here[FAILED]}" if FAILED in here else f"FAILED in the base: {base[FAILED]}"
    differ = [name for name in sorted({*base, *here}) if base.get(name) != here.get(name)]
    differ = [name for name in differ if not any(word in name for word in ignore)]
    return f"DIFFERS: {', '.join(differ)}" if differ else f"same ({len(base)} parts)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, or the folder of another checkout")
    parser.add_argument("--cases", default="", help="comma-separated words: run cases whose name contains one of them")
    parser.add_argument("--ignore", default="", help="comma-separated parts of names of files that are not compared")
    parser.add_argument("--fresh", action="store_true", help="compute the base's hashes again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the files of both sides in this folder")
    options = parser.parse_args()
    words, ignore = ([word for word in text.split(",") if word] for text in (options.cases, options.ignore))
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not cases:
        sys.exit(f"no case has {options.cases} in its name: {', '.join(case.name for case in CASES)}")
    failed = 0
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        source, kept = find_base(options.base, Path(temporary))
        kept = None if options.fresh or options.keep else kept
        folder = (options.keep or Path(temporary)).resolve()
        jobs = []
        for case in cases:
            base = pool.submit(remembered, case, source, folder / "base" / case.name, kept)
            jobs.append((case, base, pool.submit(perform, case, HERE, folder / "here" / case.name)))
        for case, base, here in jobs:
            verdict = compare(base.result(), here.result(), ignore)
            failed += not verdict.startswith("same")
            print(f"{case.name:20} {verdict}", flush=True)
            for side in ("base", "here") if options.keep is None else ():
                shutil.rmtree(folder / side / case.name, ignore_errors=True)
    print(f"{len(cases) - failed} of {len(cases)} cases are the same")
    sys.exit(1 if failed else 0)


def find_base(base: str, folder: Path) -> tuple[Path, Path | None]:
    """Return the base's source and the folder of its cached hashes, which is None for a checkout, as it may change."""
    if (Path(base) / "src" / "datalens").is_dir():
        return Path(base).resolve(), None
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run([*git, "rev-parse", f"{base}^{{commit}}"], capture_output=True, text=True, check=False)
    if commit.returncode:
        sys.exit(f"{base} is neither a commit nor a folder with src/datalens")
    name, source = commit.stdout.strip(), folder / "source"
    source.mkdir()
    packed = subprocess.run([*git, "archive", name, "src"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=packed, check=True)
    return source, Path(tempfile.gettempdir()) / f"datalens-bits-{os.getuid()}" / name


if __name__ == "__main__":
    main()
