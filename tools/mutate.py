"""Mutation testing of `privacy/`, `bounded/`, DP-SGD and the wiring of methods, with one small change at a time.

    python tools/mutate.py --jobs 16             every module
    python tools/mutate.py bounded/topk_sign.py  one module
    python tools/mutate.py --wiring              the modules of the wiring
    python tools/mutate.py --minutes 9 --resume  stop in time; the next call goes on
    python tools/mutate.py --sample 20           some mutants of each, drawn at random
    python tools/mutate.py --table               test nothing, and print what the last run has found

A mutant that no test notices survives. Survivors that change nothing about privacy are listed with a reason in
docs/mutation.md, one by one or by kind, which this script reads; any other survivor makes it end with exit code 1.

The tree is copied first, so that edits during the run do not matter. A first run without a mutation remembers which
lines of a module each test runs; a mutant is given the tests that run the changed line, or that start processes, whose
lines nobody sees. It is tested in a fork of a process that has loaded everything but what depends on the module. Tests
that killed mutants run first, then quick ones; the first failure ends the mutant. Hypothesis tries the same examples
each time, and does not shrink the failures that it finds.
"""

import argparse
import contextlib
import fnmatch
import gc
import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mutants import Mutant, mutants

ROOT = Path(__file__).parent.parent

PRICES = (
    *("unit/test_discrete_price.py", "golden/test_golden_budget.py", "unit/test_three_accountants.py"),
    *("unit/test_accountant.py", "unit/test_one_of_many.py", "unit/test_gradient_gate.py", "unit/test_votes.py"),
    "unit/test_survivors.py",
)


def wired(*methods: str) -> tuple[str, ...]:
    """Return the tests of the wiring audit for these methods."""
    name = "wiring/test_methods.py::test_nothing_crosses_but_what_is_paid_for"
    relations = ("add-remove-False", "add-remove-True", "replace-one-False")
    return tuple(f"{name}[{method}-{relation}]" for method in methods for relation in relations)


def ledgers(*names: str) -> tuple[str, ...]:
    """Return the tests of what `verify` compares of a ledger with the settings, for these plans."""
    tests = ("a_whole_ledger_stands", "any_field_of_any_charge", "another_kind_of_noise", "settings_that_cannot_be")
    tests += ("charges_that_are_missing_or_too_many", "the_whole_plan_costs_what_the_whole_ledger_does")
    return tuple(f"unit/test_ledger_and_settings.py::test_{test}[{name}]" for name in names for test in tests)


# Module → its tests. Those that killed most recently run first, then quick ones.
CORE: dict[str, tuple[str, ...]] = {
    "privacy/audit.py": ("unit/test_audit.py", "unit/test_survivors.py", "statistical/test_mechanism_audit.py"),
    "bounded/contributions.py": ("unit/test_contributions.py", "unit/test_topk_sign.py", "unit/test_survivors.py"),
    "bounded/outer.py": ("unit/test_outer.py", "unit/test_record_moments.py", "unit/test_survivors.py"),
    "bounded/topk_sign.py": ("unit/test_topk_sign.py", "unit/test_contributions.py", "unit/test_survivors.py"),
    "bounded/ballots.py": ("unit/test_votes.py",),
    "bounded/clip.py": ("unit/test_one_of_many.py",),
    "bounded/count_sketch.py": ("unit/test_compressors.py",),
    "bounded/klevel.py": ("unit/test_compressors.py",),
    "bounded/norm_topk.py": ("unit/test_norm_topk.py", "unit/test_gradient_gate.py", "unit/test_noisy_critic.py"),
    "bounded/parts.py": ("unit/test_part_sums.py",),
    "bounded/persons.py": ("unit/test_person_gradients.py",),
    "bounded/third_party.py": ("unit/test_third_party.py",),
    "bounded/kernels.py": (
        "unit/test_kernels.py::test_votes_are_bit_for_bit_those_of_the_torch_code",
        *("unit/test_kernels.py::test_the_sum_of_votes_enforces_the_bound", "unit/test_survivors.py"),
        "unit/test_norm_topk.py::test_the_kernels_measure_and_add",
        "unit/test_norm_topk.py::test_the_kernel_finds_the_limit",
        "unit/test_norm_topk.py::test_the_kernel_writes_nothing_beside_its_sum",
        "unit/test_norm_topk.py::test_the_kernels_limit_is_exact_where_sums_are",
        "unit/test_norm_topk.py::test_whole_rows_give_the_same_sum",
    ),
    "files.py": ("unit/test_files.py",),
    "private/answers.py": ("unit/test_published.py",),
    "released/publication.py": ("unit/test_published.py",),
    "run/publication.py": ("unit/test_published.py",),
    "privacy/journal.py": (
        *("unit/test_journal.py", "unit/test_wholeness.py", "unit/test_folder.py", "unit/test_survivors.py"),
        "unit/test_parts.py::test_the_journal_goes_by_part_and_twins_that_do_not_are_caught",
        "unit/test_parts.py::test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for",
    ),
    "privacy/released.py": ("unit/test_mechanisms.py", "unit/test_journal.py"),
    "privacy/mechanisms.py": (
        *("unit/test_mechanisms.py", "unit/test_exact_noise.py", "unit/test_ledger.py", "statistical/test_noise.py"),
        *("statistical/test_discrete_noise.py", "unit/test_survivors.py", "unit/test_third_party.py"),
        *("unit/test_held_noise.py", "unit/test_parts.py"),
    ),
    "privacy/budget.py": ("unit/test_data_budget.py", "unit/test_parts.py"),
    "privacy/reserve.py": ("unit/test_data_budget.py", "unit/test_parts.py"),
    "privacy/dpsgd.py": (
        *("unit/test_gradient_gate.py", "unit/test_noisy_critic.py", "unit/test_sgd_rules.py", "unit/test_parts.py"),
    ),
    "gradients/poisson.py": ("unit/test_dpsgd.py", "unit/test_dpsgd_misuse.py"),
    "gradients/optimizer.py": (
        *("unit/test_dpsgd.py", "unit/test_dpsgd_misuse.py", "unit/test_sgd_rules.py", "unit/test_watched_model.py"),
        "unit/test_mixing.py",
    ),
    "gradients/rows.py": ("unit/test_row_engine.py",),
    "bounded/whole_rows.py": ("unit/test_whole_rows.py",),
    "gradients/watching.py": ("unit/test_watched_model.py",),
    "gradients/mixing.py": ("unit/test_mixing.py", "unit/test_dpsgd_misuse.py"),
    "gradients/sampled_model.py": ("unit/test_dpsgd_misuse.py", "unit/test_dpsgd.py", "unit/test_watched_model.py"),
    "privacy/owned.py": ("unit/test_owned.py",),
    "privacy/one_of_many.py": ("unit/test_one_of_many.py",),
    "privacy/responses.py": ("unit/test_votes.py",),
    "privacy/noise.py": (
        *("unit/test_exact_noise.py", "statistical/test_noise.py", "unit/test_mechanisms.py"),
        *("unit/test_survivors.py", "unit/test_held_noise.py"),
    ),
    "privacy/exact.py": ("unit/test_exact_noise.py", "statistical/test_discrete_noise.py", "unit/test_survivors.py"),
    "privacy/events.py": (
        *("unit/test_events.py", "unit/test_survivors.py", "unit/test_ledger.py", "unit/test_discrete_price.py"),
        *("unit/test_three_accountants.py", "unit/test_parts.py"),
    ),
    "privacy/ledger.py": ("unit/test_ledger.py", "unit/test_survivors.py", "unit/test_journal.py"),
    "privacy/curves.py": PRICES,
    "privacy/tables.py": (*PRICES, "unit/test_parts.py"),
    "privacy/accountant.py": (*PRICES, "unit/test_parts.py"),
    "privacy/calibration.py": PRICES,
    "privacy/bounds.py": ("unit/test_bounds.py", "unit/test_survivors.py"),
}
# The wiring: what a method releases, samples, draws and passes on; what reads the records; what `verify` believes.
SHARING = ("unit/test_shares.py", "unit/test_partition.py", "unit/test_replace_one.py", "unit/test_persons.py")
# What `verify` reads a release with.
READ = (
    *("released/verification.py", "released/checks.py", "released/certificate.py", "released/claim.py"),
    *("released/weights.py", "released/loading.py", "released/classifier.py", "released/extras.py"),
    *("released/drawing.py", "released/redrawing.py", "released/release.py", "released/signing.py"),
)
VERIFY = (
    *("unit/test_certificate.py", "unit/test_old_releases.py", "unit/test_parts.py", "unit/test_persons.py"),
    *("unit/test_released_moments.py", "unit/test_hostile_files.py", "unit/test_driver.py", "unit/test_published.py"),
    "unit/test_ledger_and_settings.py",
    *("e2e/test_forgeries.py", "e2e/test_signatures.py", "e2e/test_redrawing.py", "e2e/test_papers.py"),
)
WIRING: dict[str, tuple[str, ...]] = {
    "methods/sgd.py": (
        *(*wired("sgd"), "unit/test_sgd_rules.py", "unit/test_person_gradients.py", "e2e/test_sgd.py"),
        *ledgers("sgd add-remove record", "sgd add-remove person"),
        "unit/test_ledger_and_settings.py::test_settings_of_sgd_that_have_no_bound",
        "unit/test_ledger_and_settings.py::test_only_the_norm_selector_shortens_rows",
        "unit/test_ledger_and_settings.py::test_sgd_is_charged_for_steps_over_its_own_units_alone",
    ),
    "methods/moments.py": (
        *wired("datalens moments"),
        "unit/test_record_moments.py",
        *ledgers(
            "datalens moments add-remove record",
            "datalens moments add-remove person",
            "datalens moments replace-one record",
        ),
    ),
    "methods/topagg.py": (
        *wired("datalens topk-sign", "datalens topk", "datalens klevel", "datalens sketch"),
        "wiring/test_methods.py::test_plugins_are_walked_too",
        *ledgers(
            "datalens topk-sign add-remove record",
            "datalens sketch add-remove person",
            "datalens klevel replace-one record",
        ),
    ),
    "methods/noisy_critic.py": (
        *wired("dpgan", "dpsgd-gan"),
        "unit/test_noisy_critic.py",
        *ledgers("dpgan add-remove record", "dpsgd-gan add-remove record"),
    ),
    "methods/gswgan.py": (*wired("gswgan"), "unit/test_one_of_many.py", *ledgers("gswgan add-remove person")),
    "methods/pategan.py": (
        *wired("pategan gnmax", "pategan laplace"),
        "unit/test_votes.py",
        *ledgers("pategan gnmax add-remove record", "pategan laplace replace-one record"),
    ),
    "methods/gpate.py": (*wired("gpate"), "unit/test_votes.py", *ledgers("gpate add-remove record")),
    "methods/dpmerf.py": (*wired("dpmerf"), "unit/test_dpmerf.py", *ledgers("dpmerf replace-one record")),
    "methods/dcgan.py": wired("dcgan"),
    "methods/ensemble.py": (*wired("gpate", "pategan gnmax"), "unit/test_votes.py"),
    "plans/base.py": ("unit/test_ledger_and_settings.py", "unit/test_parts.py"),
    "evaluate/publish.py": ("unit/test_published.py", "e2e/test_publish.py"),
    "run/folder.py": (
        *("unit/test_wholeness.py", "unit/test_folder.py"),
        "unit/test_ranks.py::test_any_number_of_ranks_reads_what_any_other_wrote",
        "unit/test_ranks.py::test_files_of_two_steps_are_never_mixed",
        *("unit/test_ranks.py::test_a_file_that_is_not_named", "unit/test_ranks.py::test_a_file_that_is_gone"),
        "unit/test_parts.py::test_without_parts_a_checkpoint_says_what_it_said",
        "unit/test_parts.py::test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for",
    ),
    "driver.py": ("unit/test_driver.py", "unit/test_hostile_files.py"),
    "run/parked.py": ("unit/test_sgd_rules.py", "e2e/test_sgd.py"),
    "run/reservation.py": ("unit/test_data_budget.py", "unit/test_hostile_files.py", "e2e/test_budget.py"),
    "run/remote_teachers.py": ("unit/test_crowd.py", "unit/test_ranks.py", *wired("datalens topk-sign")),
    "private/shares.py": SHARING,
    "private/partition.py": SHARING,
    "private/pool.py": (*wired("dpmerf", "dpgan"), "unit/test_noisy_critic.py", "unit/test_dpmerf.py"),
    "private/critic_rows.py": (*wired("dpgan"), "unit/test_noisy_critic.py"),
    "private/critics.py": (*wired("gswgan"), "unit/test_critics.py"),
    "private/embedding.py": (*wired("dpmerf"), "unit/test_dpmerf.py"),
    "private/moments.py": (*wired("datalens moments"), "unit/test_record_moments.py", "unit/test_outer.py"),
    "private/teachers.py": (*wired("datalens topk-sign"), "unit/test_teachers.py"),
    "released/accuracy.py": ("unit/test_published.py",),
    "api/topagg.py": ("unit/test_voting.py",),
    "public/learner.py": (*wired("dpgan", "dcgan"), "unit/test_noisy_critic.py"),
    "public/critic.py": ("unit/test_critics.py", "unit/test_noisy_critic.py", *wired("dpgan")),
    "run/wholeness.py": (
        *("unit/test_wholeness.py", "unit/test_parts.py::test_without_parts_a_checkpoint_says_what_it_said"),
        "unit/test_parts.py::test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for",
        "unit/test_parts.py::test_a_checkpoint_that_other_parts_charges_would_pay_for_is_refused",
        "unit/test_parts.py::test_a_run_that_lost_its_checkpoint_goes_on_from_any_parts_journal",
    ),
    "job.py": ("unit/test_job.py",),
} | dict.fromkeys(READ, VERIFY)
WIRING["run/cluster.py"] = ("e2e/test_cluster.py",)
# Of these only the statements that decide what crosses or is charged are changed (`mutants.crossing`).
PARTLY = frozenset(name for name in WIRING if name.startswith(("methods/", "plans/"))) - {"methods/ensemble.py"}
TESTS = CORE | WIRING

# Slow tests of something other than these modules alone: a theorem, an import, thousands of ledgers at once.
LEFT_OUT = (
    "unit/test_exact_noise.py::test_importing_datalens_does_not_import_opendp",
    "statistical/test_mechanism_audit.py::test_exact_discrete_noise_keeps_its_claim_and_a_broken_twin_does_not",
    "unit/test_discrete_price.py::test_the_discrete_gaussian_is_a_rounded_gaussian_to_34_digits",
    "unit/test_discrete_price.py::test_less_rounding_would_not_be_so_close",
    "unit/test_three_accountants.py::test_exact_below_improved_below_the_papers",
    "unit/test_three_accountants.py::test_pld_agrees_with_exact",
)

# --- testing them -----------------------------------------------------------------------------


Tell = Callable[..., None]
More = Callable[[str], int | None]
TOO_LONG = 9  # the exit code of a fork whose test took too long
NOTHING_COLLECTED = 5  # pytest's
OPTIONS = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist", "--no-header", "-o", "addopts="),
    *("-p", "no:unraisableexception"),  # collects garbage, which takes longer than most tests
    *("-m", "not slow and not gpu"),
)


@dataclass(kw_only=True)
class Facts:
    """What the tests of a module did without a mutation."""

    seconds: dict[str, float] = field(default_factory=dict)  # test → processor time
    walls: dict[str, float] = field(default_factory=dict)  # test → time by the clock
    lines: dict[str, list[int]] = field(default_factory=dict)  # test → lines of the module that it ran
    elsewhere: list[str] = field(default_factory=list)  # tests that start processes, whose lines nobody saw
    failed: list[str] = field(default_factory=list)  # tests that fail here without a mutation: they are not used
    loaded: list[str] = field(default_factory=list)  # modules that were imported

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the changed statement; all of them if it runs when the module is imported."""
        at = set(range(mutant.line, mutant.end + 1))
        whole = mutant.at_import
        tests = [
            test
            for test in self.seconds
            if test not in self.failed and (whole or test in self.elsewhere or at & set(self.lines.get(test, ())))
        ]
        return sorted(tests, key=lambda test: (self.seconds[test], test))


class Watch:
    """A pytest plugin for the run without a mutation: which lines of modules each test runs, and how long it takes."""

    def __init__(self, modules: list[str], notes: Path) -> None:
        self.notes = notes
        self.ends = {f"/datalens/{module}": module for module in modules}
        self.files: dict[str, str] = {}  # file of code → module, or ""
        self.facts = {module: Facts() for module in modules}
        self.test, self.began = "", (0.0, 0.0)
        self.ran: dict[str, set[int]] = {}
        self.elsewhere = False
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.forkpty"):
            # Noise is drawn by a process that has nothing else of datalens.
            self.elsewhere |= "privacy/exact.py" not in str(arguments[:2])

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        file = frame.f_code.co_filename
        if file not in self.files:
            self.files[file] = next((module for end, module in self.ends.items() if file.endswith(end)), "")
        module = self.files[file]
        if not module:
            return None
        ran = self.ran.setdefault(module, set())
        ran.add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: object) -> Callable:
            ran.add(frame.f_lineno)
            return line

        return line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test, self.began, self.ran = nodeid, (time.process_time(), time.monotonic()), {}
        self.elsewhere = False
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        for module, facts in self.facts.items():
            facts.seconds[nodeid] = time.process_time() - self.began[0]
            facts.walls[nodeid] = time.monotonic() - self.began[1]
            facts.lines[nodeid] = sorted(self.ran.get(module, ()))
            facts.elsewhere += [nodeid] if self.elsewhere else []

    def pytest_runtest_logreport(self, report: object) -> None:
        for facts in self.facts.values():
            if report.failed and report.nodeid not in facts.failed:  # type: ignore[attr-defined]
                facts.failed.append(report.nodeid)  # type: ignore[attr-defined]

    def pytest_unconfigure(self) -> None:
        ours = ("datalens", "tests", "benchmarks", "test_", "conftest", "__")
        for facts in self.facts.values():
            facts.loaded = [name for name in sys.modules if not name.startswith(ours)]
        self.notes.write_text(json.dumps({name: vars(facts) for name, facts in self.facts.items()}), encoding="utf-8")


class Order:
    """A pytest plugin that runs only some tests: recent killers first, then quick ones. It notes which one failed."""

    def __init__(self, notes: Path, facts: Facts, killers: dict[str, int]) -> None:
        self.notes, self.facts, self.killers = notes, facts, killers
        self.skipped: type[BaseException] = sys.modules["pytest"].skip.Exception
        self.chosen: dict[str, int] = {}  # test → its place

    def pytest_collection_modifyitems(self, items: list) -> None:
        wanted = [item for item in items if item.nodeid in self.chosen]
        items[:] = sorted(wanted, key=lambda item: self.chosen[item.nodeid])

    def pytest_runtest_setup(self, item: object) -> None:
        """Set time limits: a test that takes far longer than without the mutation kills the mutant, too."""
        test: str = item.nodeid  # type: ignore[attr-defined]
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, lambda *_: self.end(test, TOO_LONG))
        signal.setitimer(signal.ITIMER_PROF, 8 * self.facts.seconds[test] + 5)
        signal.setitimer(signal.ITIMER_REAL, 8 * self.facts.walls[test] + 20)

    def pytest_runtest_makereport(self, item: object, call: object) -> None:
        """End a mutant at the first failure, before pytest formats a report that nobody reads."""
        error = getattr(call, "excinfo", None)
        if error is not None and not issubclass(error.type, self.skipped):
            self.end(item.nodeid, 1)  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]
            self.end("(import)", 1)

    def end(self, test: str, code: int) -> None:
        self.notes.write_text(test, encoding="utf-8")
        os._exit(code)


@dataclass(kw_only=True)
class Worker:
    """One process that tests mutants, in its own copy of the tree."""

    tree: Path
    facts: dict[str, Facts]
    killers: dict[str, dict[str, int]] = field(default_factory=dict)  # module → test → number of its last kill

    def watch(self, modules: list[str], limit: float) -> None:
        """Run the tests of modules that have the same ones, without a mutation; leave what they did beside the tree."""
        notes = self.tree.parent / f"{modules[0].replace('/', '.')}.facts"
        tests = [name for name in TESTS[modules[0]] if (self.tree / "tests" / name.split("::")[0]).exists()]

        def inside() -> int:
            options = [option for option in OPTIONS if option != "-x"]
            without = [f"--deselect=tests/{name}" for name in LEFT_OUT]
            arguments = [*options, "--continue-on-collection-errors", *without, *(f"tests/{name}" for name in tests)]
            return int(
                sys.modules["pytest"].main([*arguments, f"--basetemp={self.tree}/t"], plugins=[Watch(modules, notes)])
            )

        self.fork(inside, limit)

    def template(self, module: str, todo: dict[int, Mutant], more: More, tell: Tell) -> None:
        """Test mutants of one module, from a process that has imported what does not depend on it."""

        def inside() -> int:
            import_without(module)
            gc.collect()
            gc.freeze()
            while (task := more(module)) is not None:
                tell(task, *self.test(todo[task], task))
            return 0

        self.fork(inside, math.inf, lead=False)

    def test(self, mutant: Mutant, number: int) -> tuple[str, str]:
        """Return `killed`, `survived` or `timeout`, and the test that killed.

        A timeout counts as killed: a gate that hangs releases nothing.
        """
        module = mutant.module
        facts, killers = self.facts[module], self.killers.setdefault(module, {})
        tests = facts.of(mutant)
        if not tests:
            return "survived", "(no test runs it)"
        path = self.tree / "src" / "datalens" / module
        source = path.read_text(encoding="utf-8")
        notes = self.tree / "killer"
        order = Order(notes, facts, killers)
        order.chosen = {test: place for place, test in enumerate(sorted(tests, key=lambda test: -killers.get(test, 0)))}
        path.write_text(mutant.write(), encoding="utf-8")
        os.utime(path, (number + 1, number + 1))  # so that Python does not use the bytecode of the previous mutant
        try:

            def inside() -> int:
                files = dict.fromkeys(test.split("::")[0] for test in order.chosen)
                arguments = [*OPTIONS, f"--basetemp={self.tree}/t", *files]
                return int(sys.modules["pytest"].main(arguments, plugins=[order]))

            code = self.fork(inside, 60 + 8 * sum(facts.walls[test] for test in tests))
        finally:
            path.write_text(source, encoding="utf-8")
            sweep(self.tree)
            shutil.rmtree(self.tree / "t", ignore_errors=True)
        killer = notes.read_text(encoding="utf-8") if notes.exists() else ""
        notes.unlink(missing_ok=True)
        if "::" in killer:
            killers[killer] = 1 + max(killers.values(), default=0)
        if code == NOTHING_COLLECTED:
            return "survived", "(no test was collected)"
        return ("survived" if code == 0 else "timeout" if code in (TOO_LONG, None) else "killed"), killer

    def fork(self, inside: Callable[[], int], limit: float, *, lead: bool = True) -> int | None:
        """Return the exit code of a forked process; None if it took too long."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if lead:
                    os.setsid()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.chdir(self.tree)
                    log = os.open(self.tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    home = self.tree / "tmp"
                    home.mkdir(exist_ok=True)
                    os.environ["TMPDIR"] = tempfile.tempdir = str(home)
                sys.path[:0] = [str(self.tree / "src"), str(self.tree)]
                os.environ["PYTHONPATH"] = str(self.tree / "src")  # for the processes that tests start
                code = inside()
            except BaseException:  # a fork never returns to its parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        end = time.monotonic() + limit
        pause = 0.002
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def import_without(module: str) -> None:
    """Import all of datalens that can be imported without one module: a mutant of it changes nothing there."""
    name = "datalens." + module.removesuffix(".py").replace("/", ".")
    sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails, and what imports it is not kept
    for path in sorted((ROOT / "src" / "datalens").rglob("*.py")):
        other = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        if not other.endswith("__main__") and not other.startswith(("datalens.studio", "datalens.reproduce")):
            with contextlib.suppress(Exception):
                importlib.import_module(other)
    del sys.modules[name]


def sweep(tree: Path) -> None:
    """Kill the processes that a mutant has left behind, which run a file of the copied tree."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(tree).encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


def copy_tree(to: Path) -> None:
    hidden = shutil.ignore_patterns("__pycache__", ".*", "*.png", "*.svg")
    for name in ("src", "tests", "benchmarks", "docs", "tools"):
        shutil.copytree(
            ROOT / name, to / name, ignore=hidden if name == "docs" else shutil.ignore_patterns("__pycache__", ".*")
        )
    for name in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(ROOT / name, to / name)


def fingerprint(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# --- many at once -----------------------------------------------------------------------------


def side_by_side(
    trees: list[Path],
    work: Callable[[Worker, str, More, Tell], None],
    facts: dict[str, Facts],
    sizes: dict[str, int],
    heard: Tell,
    end: float,
) -> None:
    """Share out tasks among processes. What has begun at the end of the time is lost.

    Args:
        trees: the copy of the tree of each process.
        work: takes a worker, `more` (returns the next task of a module, or None), `tell` (reports on one) and `pick`
            (returns the module to go on with, or None).
        facts: what tests do without a mutation.
        sizes: module → number of its tasks. The tasks of all modules are numbered in this order.
        heard: is called in this process with every report.
        end: by `time.monotonic`.
    """
    names = list(sizes)
    firsts = dict(zip(names, [0, *itertools.accumulate(sizes.values())], strict=False))
    context = multiprocessing.get_context("fork")
    begun, busy = context.Array("i", len(names)), context.Array("i", len(names), lock=False)
    read, write = os.pipe()
    children = []

    def pick() -> str | None:
        """Return the module with most mutants for each process at work on it, of the first that are unfinished."""
        with begun.get_lock():
            left = {number: sizes[name] - begun[number] for number, name in enumerate(names)}
            window = [number for number in left if left[number] > 0][: len(trees)]
            if not window or time.monotonic() > end:
                return None
            best = max(window, key=lambda number: left[number] / (busy[number] + 1))
            busy[best] += 1
            return names[best]

    def more(name: str) -> int | None:
        number = names.index(name)
        with begun.get_lock():
            if begun[number] >= sizes[name] or time.monotonic() > end:
                return None
            begun[number] += 1
            return firsts[name] + begun[number] - 1

    def tell(*said: object) -> None:
        os.write(write, json.dumps(said).encode() + b"\n")

    for tree in trees:
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                os.setsid()
                worker = Worker(tree=tree, facts=facts)
                while (name := pick()) is not None:
                    work(worker, name, more, tell)
                    with begun.get_lock():
                        busy[names.index(name)] -= 1
                os._exit(0)
            except BaseException:  # a fork never returns to its parent's code
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    os.close(write)
    rest = b""
    while time.monotonic() < end + 1:
        ready, _, _ = select.select([read], [], [], 0.5)
        content = os.read(read, 65536) if ready else b""
        if ready and not content:
            break  # every process has ended
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            heard(*json.loads(line))
    os.close(read)
    for tree, child in zip(trees, children, strict=True):
        for process in [child, *descendants(child)]:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os.waitpid(child, 0)
        sweep(tree)


def descendants(process: int) -> list[int]:
    """Return the processes that a process has started, directly or not."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    todo = [process]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


# --- what was found ---------------------------------------------------------------------------

Name = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """The tables of docs/mutation.md: why mutants may survive."""

    single: dict[Name, str]
    kinds: list[tuple[str, re.Pattern[str], re.Pattern[str], str]]  # module (or pattern), was, is, why

    def of(self, name: Name) -> str:
        """Return why a mutant may survive; "" if there is no reason."""
        if name in self.single:
            return self.single[name]
        module, before, after = name
        for where, was, turned, why in self.kinds:
            if fnmatch.fnmatchcase(module, where) and was.search(before) and turned.search(after):
                return why
        return ""


def listed() -> Reasons:
    single, kinds = {}, []
    for line in (ROOT / "docs" / "mutation.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] in TESTS and cells[1].startswith("`"):
            single[(cells[0], cells[1].strip("`"), cells[2].strip("`"))] = cells[3]
        elif len(cells) == 4 and cells[1].startswith("/") and cells[1].endswith("/"):
            kinds.append((cells[0].strip("`"), re.compile(cells[1][1:-1]), re.compile(cells[2][1:-1]), cells[3]))
    return Reasons(single=single, kinds=kinds)


def name_of(verdict: dict) -> Name:
    return verdict["module"], verdict["before"], verdict["after"]


def survivors(results: list[dict]) -> set[Name]:
    return {name_of(result) for result in results if result["verdict"] == "survived"}


def summary(results: list[dict], reasons: Reasons, whole: dict[str, int]) -> list[str]:
    """Return the rows of the table of docs/mutation.md for these results."""
    rows = []
    for module in dict.fromkeys(result["module"] for result in results):
        mine = [result for result in results if result["module"] == module]
        survived = [result for result in mine if result["verdict"] == "survived"]
        explained = sum(bool(reasons.of(name_of(result))) for result in survived)
        numbers = (whole[module], len(mine), len(mine) - len(survived), explained, len(survived) - explained)
        rows.append(f"| `{module}` | " + " | ".join(map(str, numbers)) + " |")
    return rows


def write(path: Path, results: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(results, indent=0, ensure_ascii=False), encoding="utf-8")
    os.replace(draft, path)


# --- the command ------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as privacy/ledger.py; default: all")
    parser.add_argument("--wiring", action="store_true", help="all modules of the wiring")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes side by side")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; --resume goes on")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts in --out on modules that are the same")
    parser.add_argument("--sample", type=int, help="test only this many mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation.json"), help="where to write verdicts as JSON")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="add the verdicts of these files, later ones winning, to --out"
    )
    parser.add_argument("--table", action="store_true", help="test nothing: print the table of --out, and what is open")
    parser.add_argument("--again", type=Path, help="test only survivors without a reason of this earlier --out")
    parser.add_argument("--unlisted", action="store_true", help="leave out mutants that have a reason, which are slow")
    parser.add_argument("--from-line", type=int, default=0, help="first line of the module to mutate, to go on there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    modules = [*(WIRING if options.wiring else ()), *options.modules] or list(TESTS)
    reasons = listed()
    sources = {module: (ROOT / "src" / "datalens" / module).read_text(encoding="utf-8") for module in modules}
    everything = {module: mutants(module, source, only=module in PARTLY) for module, source in sources.items()}
    whole = {module: len(found) for module, found in everything.items()}
    hashes = {module: fingerprint(source) for module, source in sources.items()}
    kept: dict[tuple[str, int], dict] = {}
    for path in options.merge or ([options.out] if options.resume or options.table else []):
        for verdict in json.loads(path.read_text(encoding="utf-8")) if path.exists() else ():
            if hashes.get(verdict["module"]) == verdict["source"]:
                mutant = everything[verdict["module"]][verdict["place"]]
                # As this Python writes them: versions differ in quotes.
                verdict |= {"before": mutant.before, "after": mutant.after}
                kept[verdict["module"], verdict["place"]] = verdict
    results = list(kept.values())
    if options.merge or options.table:
        write(options.out, results)
        tell_all(results, reasons, whole)
    before = None
    if options.again is not None:
        earlier = survivors(json.loads(options.again.read_text(encoding="utf-8")))
        before = {name for name in earlier if not reasons.of(name)}
    todo: dict[str, list[Mutant]] = {}
    for module, found in everything.items():
        wanted = [
            mutant
            for mutant in found
            if mutant.line >= options.from_line
            and not (options.unlisted and reasons.of(mutant.name))
            and (before is None or mutant.name in before)
            and (module, mutant.place) not in kept
        ]
        if options.sample is not None:
            wanted = random.Random(f"{options.seed} {module}").sample(wanted, min(options.sample, len(wanted)))
        if wanted:
            todo[module] = wanted
    run(todo, options, results, hashes)
    tell_all(results, reasons, whole)


def tell_all(results: list[dict], reasons: Reasons, whole: dict[str, int]) -> NoReturn:
    """Print what was found, and end with 1 if a mutant survives without a reason."""
    survived = [result for result in results if result["verdict"] == "survived" and not reasons.of(name_of(result))]
    for one in sorted(survived, key=lambda one: (one["module"], one["line"])):
        print(f"SURVIVED {one['module']}:{one['line']} {one['killer']}\n  - {one['before']}\n  + {one['after']}")
    print("| module | mutants | run | killed | in a table | open |\n|---|---|---|---|---|---|")
    print("\n".join(summary(results, reasons, whole)))
    missing = sum(whole.values()) - len({(one["module"], one["place"]) for one in results})
    print(f"{len(results)} mutants were run, {missing} were not; {len(survived)} survive without a reason")
    sys.stdout.flush()
    os._exit(1 if survived else 0)  # without the noise that libraries make at the end


def run(
    todo: dict[str, list[Mutant]], options: argparse.Namespace, results: list[dict], hashes: dict[str, str]
) -> None:
    """Test mutants, and add the verdicts to the results."""
    end = time.monotonic() + 60 * options.minutes
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    import hypothesis
    import pytest  # noqa: F401 (loaded once, for all forks)
    import torch

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutation",
        phases=phases,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutation")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        trees = [Path(folder) / f"{number:02d}" for number in range(options.jobs)]
        for tree in trees:
            copy_tree(tree)

        together: dict[tuple[str, ...], list[str]] = {}
        for module in todo:
            together.setdefault(TESTS[module], []).append(module)
        groups = {group[0]: group for group in together.values()}

        def watch(worker: Worker, module: str, more: More, tell: Tell) -> None:
            while more(module) is not None:
                worker.watch(groups[module], min(900.0, end - time.monotonic()))

        began = time.monotonic()
        side_by_side(trees, watch, {}, dict.fromkeys(groups, 1), lambda: None, end)
        facts: dict[str, Facts] = {}
        for module in groups:
            path = Path(folder) / f"{module.replace('/', '.')}.facts"
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            facts |= {name: Facts(**one) for name, one in found.items()}
            for one in list(facts.values())[-1:] if found else []:
                print(f"{module}: {len(one.seconds)} tests, {sum(one.seconds.values()):.1f} s", flush=True)
                print(*(f"  fails without a mutation, so it is not used: {test}" for test in one.failed), sep="\n")
        print(f"{time.monotonic() - began:.0f} s without mutations", flush=True)
        for name in sorted({name for one in facts.values() for name in one.loaded}):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()
        ready = {module: found for module, found in todo.items() if module in facts}
        tasks = [mutant for found in ready.values() for mutant in found]
        numbered = dict(enumerate(tasks))
        written = time.monotonic()

        def heard(task: int, verdict: str, killer: str) -> None:
            nonlocal written
            one = tasks[task]
            found = {
                "module": one.module,
                "place": one.place,
                "line": one.line,
                "before": one.before,
                "after": one.after,
            }
            results.append(found | {"verdict": verdict, "killer": killer, "source": hashes[one.module]})
            if time.monotonic() > written + 5:
                written = time.monotonic()
                write(options.out, results)  # a run that is stopped after hours has not been in vain
                print(f"{len(results)} verdicts, {len(tasks)} asked for, {written - began:.0f} s", flush=True)

        def work(worker: Worker, module: str, more: More, tell: Tell) -> None:
            worker.template(module, numbered, more, tell)

        sizes = {module: len(found) for module, found in ready.items()}
        side_by_side(trees, work, facts, sizes, heard, end)
        write(options.out, results)


if __name__ == "__main__":
    main()
