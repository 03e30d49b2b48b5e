"""Injected faults: kill -9 anywhere, torn writes, full disks, read-only folders, clocks that jump, second writers.

The harness is faults.py: what it injects, what it witnesses and what must hold is said there. Here: some of it in
every run of the tests, 200 faults in the slow ones, and that the harness catches code that breaks a promise.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("faults.py")
KINDS, TWINS = 15, 6


def injected(environment, *options):
    done = subprocess.run(
        [sys.executable, HARNESS, *map(str, options)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    print({name: value for name, value in found.items() if name != "problems"})  # shown if anything below fails
    assert found["problems"] == []
    assert len(found["caught"]) == TWINS
    assert [twin for twin, problem in found["caught"].items() if not problem] == []
    assert done.returncode == 0
    return found


def test_one_fault_of_every_kind(environment):
    found = injected(environment, "--one-each", "--faults", KINDS, "--seed", 1)
    assert found["faults"] == KINDS
    assert [kind for kind, times in found["kinds"].items() if not times and kind != "disk full"] == []
    assert found["draws"] > found["faults"]


@pytest.mark.slow
def test_two_hundred_faults(environment):
    found = injected(environment, "--faults", 200)
    assert found["faults"] >= 200
    assert [kind for kind, times in found["kinds"].items() if not times and kind != "disk full"] == []
