"""The default method, killed at random moments: how many runs can still be finished, and what they lost.

    python tests/e2e/kills.py --kills 60 --seed 1

Each run is begun anew, killed with `kill -9` at a moment drawn evenly from the length of a run, resumed, and looked at
by the witness of faults.py. A run that ends before its moment does not count. Nothing waits for a clock but the kill.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faults

OPTIONS = ("--data", "digits", "--epsilon", "1")
MOST_UNFINISHED = 1  # of 60


def start(run: Path, log: Path, number: int, twin: str | None) -> int:
    """A process that trains, or goes on; the number of it."""
    from datalens.cli.main import main

    child = os.fork()
    if child:
        return child
    output = os.open(log.with_suffix(".said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 99
    try:
        witness = faults.Witness(log, run, None, number, None, synced=False)
        faults.instrument(witness, run, twin)
        if twin == LATE:
            draw_late()
        main(["train", *(("--resume",) if run.exists() else OPTIONS), "--out", str(run), "--json"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


LATE = "noise drawn after its charge, as in version 0.1.0"


def draw_late() -> None:
    """A twin with the window that was: draws are repeated where they are taken, after the charge."""
    from datalens.privacy.noise import DrawnAhead, ExactNoise, Held

    sources: list[Any] = []
    for kind in (ExactNoise, DrawnAhead):
        make = kind.__init__

        def made(self: Any, sigma: float, make: Any = make) -> None:
            make(self, sigma)
            sources.append(self)

        kind.__init__ = made  # type: ignore[method-assign]
    take = Held.take

    def late(self: Held) -> Any:
        values = take(self)
        return sources[-1].integers(values.size).reshape(values.shape)

    Held.take = late  # type: ignore[method-assign]


def one(folder: Path, number: int, moment: float, twin: str | None) -> dict[str, Any] | None:
    """A run that is killed, and brought to its end; None if it ended before it could be killed."""
    run, log = folder / "run", folder / "witness.jsonl"
    log.touch()
    child = start(run, log, 0, twin)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        return None
    ledgers = [faults.whole_lines(run)]
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(start(run, log, 1, twin), 0)[1])
    lasted = time.monotonic() - began
    said = log.with_suffix(".said").read_text(encoding="utf-8", errors="replace")
    ledgers.append(faults.whole_lines(run))
    seen = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    problems = faults.broken_promises(run, code, said, seen, ledgers)
    unfinished = [problem for problem in problems if problem.startswith("the run could not be finished")]
    steps = [json.loads(line)["event"]["step"] for line in ledgers[-1].splitlines()[1:]]
    return {
        "unfinished": bool(unfinished) or code != 0,
        "lost": len(steps) - len(set(steps)) + (1 if "would be mostly noise" in said else 0),
        "fell_back": "differ from the mean of their class" in said,  # finished, but without covariances
        "problems": [f"kill {number}: {problem}" for problem in problems if problem not in unfinished],
        "charged": faults.charges_in(ledgers[0]),
        "windows": windows(seen),
        "seconds": lasted if not ledgers[0] else None,  # a whole run, where nothing was there to go on with
    }


def windows(seen: list[dict[str, Any]]) -> list[float]:
    """Seconds from a charge to its value in the journal, synced and named."""
    charged = {(line["attempt"], line["number"]): line["at"] for line in seen if line["what"] == "charge"}
    return [
        line["at"] - charged[line["attempt"], line["number"]]
        for line in seen
        if line["what"] == "journal" and (line["attempt"], line["number"]) in charged
    ]


def kill(count: int, seed: int, *, twin: str | None = None) -> dict[str, Any]:
    luck, began = random.Random(seed), time.monotonic()
    found: list[dict[str, Any]] = []
    ended = 0
    with tempfile.TemporaryDirectory(prefix="datalens-kills-") as name:
        length = whole_run(Path(name) / "whole", twin)
        while len(found) < count:
            folder = Path(name) / f"{len(found)}-{ended}"
            folder.mkdir()
            killed = one(folder, len(found), luck.uniform(0.0, length), twin)
            subprocess.run(["rm", "-rf", str(folder)], check=True)
            if killed is None:
                ended += 1
                if ended > 10 * count:
                    raise RuntimeError("too fast to be killed")
                continue
            found.append(killed)
            length = killed["seconds"] or length  # a busy machine is slower, and then the moments are spread wider
    between = [1000 * window for killed in found for window in killed["windows"]]
    return {
        "seed": seed,
        "kills": len(found),
        "unfinished": sum(killed["unfinished"] for killed in found),
        "lost_charges": sum(killed["lost"] for killed in found),
        "without_covariances": sum(killed["fell_back"] for killed in found),
        "before_the_first_charge": sum(killed["charged"] == 0 for killed in found),
        "window_ms": {"median": round(statistics.median(between), 2), "largest": round(max(between), 2)},
        "problems": [problem for killed in found for problem in killed["problems"]],
        "seconds": round(time.monotonic() - began, 1),
    }


def whole_run(folder: Path, twin: str | None) -> float:
    folder.mkdir()
    (folder / "witness.jsonl").touch()
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(start(folder / "run", folder / "witness.jsonl", 0, twin), 0)[1])
    if code:
        raise RuntimeError((folder / "witness.said").read_text())
    return time.monotonic() - began


def say(found: dict[str, Any]) -> None:
    """The figure in words."""
    sys.stderr.write(
        f"{found['kills']} runs of the default method, each killed at a random moment: {found['unfinished']} could not "
        f"be finished, {found['without_covariances']} were finished without covariances, {found['lost_charges']} "
        f"charges were lost, {len(found['problems'])} promises broken; from a "
        f"charge to its value in the journal {found['window_ms']['median']} ms (largest "
        f"{found['window_ms']['largest']} ms).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--late", action="store_true", help="the broken twin instead: " + LATE)
    options = parser.parse_args()
    faults.preload()
    import datalens.methods.moments  # noqa: F401 (what an attempt imports, so that a fork has it)

    found = kill(options.kills, options.seed, twin=LATE if options.late else None)
    say(found)
    print(json.dumps(found))
    sys.exit(1 if found["problems"] or found["unfinished"] > MOST_UNFINISHED else 0)


if __name__ == "__main__":
    main()
