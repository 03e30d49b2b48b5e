"""Lists the functions that a record passes in `datalens train --data FOLDER`, in order, and counts them by file.

    python tools/way.py            # in this working tree
    python tools/way.py 0.1.0      # in a commit, or in another checkout

A tiny run with the default method is profiled, in all threads. A function is listed if it gets or returns an array, a
tensor or an image, or an object of a class of `private/` or `bounded/`. All functions of the run are counted, too.
Neither counts functions of `released/`, which see released values only, pages, and functions without a name. The last
line says how many image files were opened, and how often: [(times, files), …].
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bits import HERE, find_base, make_own

WORDS = "train --data own --nominal-size 180 --epsilon 10 --grayscale --coordinates 16 --texture 8 --texture-steps 1"
# The profiled process: prints a line for each function, and the largest number of times that a file is opened.
CHILD = """
import collections, runpy, sys, threading
root, sys.argv = sys.argv[1], ["datalens", *sys.argv[2].split()]
import numpy, torch
from PIL import Image
seen, called, opened = {}, set(), collections.Counter()
kinds, rooms = (numpy.ndarray, torch.Tensor, Image.Image), ("datalens.private.", "datalens.bounded.")

def private(value):
    return isinstance(value, kinds) or str(type(value).__module__).startswith(rooms)

def profile(frame, event, value):
    name = frame.f_code.co_filename
    if name.startswith(root) and event in ("call", "return"):
        called.add((name[len(root) + 1:], frame.f_code.co_qualname))
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        given = [frame.f_locals.get(word) for word in frame.f_code.co_varnames[:count]] if event == "call" else [value]
        if any(private(one) for one in given):
            seen[name[len(root) + 1:], frame.f_code.co_qualname] = None

def hear(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".png") and "own" in arguments[0]:
        opened[arguments[0]] += 1

sys.addaudithook(hear)
threading.setprofile(profile)
sys.setprofile(profile)
try:
    runpy.run_module("datalens", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code
sys.setprofile(None)
for file, name in seen:
    print("STOP", file, name)
for file, name in called:
    print("CALLED", file, name)
print("OPENED", len(opened), sorted(collections.Counter(opened.values()).items()))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        source = find_base(sys.argv[1], place)[0] if len(sys.argv) > 1 else HERE
        make_own(place / "own")
        (place / "own" / "list.csv").unlink()
        environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-c", CHILD, str(source / "src" / "datalens"), f"{WORDS} --out run"]
        done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    lines = [line.split() for line in done.stdout.splitlines()]
    counts = []
    for kind in ("STOP", "CALLED"):
        named = [(line[1], line[2]) for line in lines if line[:1] == [kind] and not line[2].endswith(">")]
        named = [(file, name) for file, name in named if not file.startswith(("released/", "pages/", "evaluate/"))]
        counts.append(f"{len(named)} functions in {len({file for file, _ in named})} files")
        for file, name in named if kind == "STOP" else ():
            print(f"{file} {name}")
    print(f"{counts[0]}; in the whole run {counts[1]}")
    print("files opened:", *(" ".join(line[1:]) for line in lines if line[:1] == ["OPENED"]))


if __name__ == "__main__":
    main()
