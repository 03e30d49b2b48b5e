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
KINDS, TWINS = 16, 6


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


def killed(environment, count, *options):
    """Runs of the default method, killed at random moments (kills.py)."""
    command = [sys.executable, HARNESS.with_name("kills.py"), "--kills", str(count), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_runs_of_the_default_method_that_are_killed_are_finished(environment):
    """Whatever the moment: one kill loses at most one release, and a run can go on without any one of them."""
    found = killed(environment, 3)
    assert (found["kills"], found["unfinished"], found["problems"]) == (3, 0, [])


@pytest.mark.slow
def test_sixty_kills(environment):
    found = killed(environment, 60)
    assert found["problems"] == [] and found["unfinished"] <= 1


@pytest.mark.slow
def test_two_hundred_faults(environment):
    found = injected(environment, "--faults", 200)
    assert found["faults"] >= 200
    assert [kind for kind, times in found["kinds"].items() if not times and kind != "disk full"] == []
