"""Mutation testing of `privacy/`, `bounded/`, DP-SGD and the wiring of methods, with one small change at a time.

    python tools/mutate.py                       every module, hours on one core
    python tools/mutate.py bounded/topk_sign.py  one module
    python tools/mutate.py --sample 20           some mutants of each, drawn at random

A mutant that no test notices survives. Survivors that change nothing about privacy are listed with a reason in
docs/mutation.md, which this script reads; any other survivor makes it end with exit code 1.

The tree is copied first, so that edits during the run do not matter. The tests of a mutant run in a fork of a process
that has loaded everything they need except datalens. Tests that killed mutants run first, then quick ones; the first
failure ends the mutant. Hypothesis does not shrink the failures that it finds.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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


# Module → its tests. Those that killed most recently run first, then quick ones.
TESTS: dict[str, tuple[str, ...]] = {
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
    # The wiring: what a method releases, samples, draws and passes on.
    "methods/sgd.py": (*wired("sgd"), "unit/test_sgd_rules.py", "unit/test_person_gradients.py", "e2e/test_sgd.py"),
    "driver.py": ("unit/test_driver.py", "unit/test_hostile_files.py"),
    "job.py": ("unit/test_job.py",),
    "run/folder.py": (
        *("unit/test_wholeness.py", "unit/test_folder.py"),
        "unit/test_ranks.py::test_any_number_of_ranks_reads_what_any_other_wrote",
        "unit/test_ranks.py::test_files_of_two_steps_are_never_mixed",
        *("unit/test_ranks.py::test_a_file_that_is_not_named", "unit/test_ranks.py::test_a_file_that_is_gone"),
        "unit/test_parts.py::test_without_parts_a_checkpoint_says_what_it_said",
        "unit/test_parts.py::test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for",
    ),
    "run/wholeness.py": (
        *("unit/test_wholeness.py", "unit/test_parts.py::test_without_parts_a_checkpoint_says_what_it_said"),
        "unit/test_parts.py::test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for",
        "unit/test_parts.py::test_a_checkpoint_that_other_parts_charges_would_pay_for_is_refused",
        "unit/test_parts.py::test_a_run_that_lost_its_checkpoint_goes_on_from_any_parts_journal",
    ),
    "run/reservation.py": ("unit/test_data_budget.py", "unit/test_hostile_files.py", "e2e/test_budget.py"),
    "public/learner.py": (*wired("dpgan", "dcgan"), "unit/test_noisy_critic.py"),
    "api/topagg.py": ("unit/test_voting.py",),
    "public/critic.py": ("unit/test_critics.py", "unit/test_noisy_critic.py", *wired("dpgan")),
    "run/remote_teachers.py": ("unit/test_crowd.py", "unit/test_ranks.py", *wired("datalens topk-sign")),
    "methods/topagg.py": (
        *wired("datalens topk-sign", "datalens topk", "datalens klevel", "datalens sketch"),
        "wiring/test_methods.py::test_plugins_are_walked_too",
    ),
    "methods/dcgan.py": wired("dcgan"),
    "methods/noisy_critic.py": (*wired("dpgan", "dpsgd-gan"), "unit/test_noisy_critic.py"),
    "methods/dpmerf.py": (*wired("dpmerf"), "unit/test_dpmerf.py"),
    "methods/gpate.py": (*wired("gpate"), "unit/test_votes.py"),
    "methods/gswgan.py": (*wired("gswgan"), "unit/test_one_of_many.py"),
    "methods/moments.py": (*wired("datalens moments"), "unit/test_record_moments.py"),
    "methods/pategan.py": (*wired("pategan gnmax", "pategan laplace"), "unit/test_votes.py"),
    "privacy/audit.py": ("unit/test_audit.py", "unit/test_survivors.py", "statistical/test_mechanism_audit.py"),
}

# Slow tests of something other than these modules alone: a theorem, an import, thousands of ledgers at once.
LEFT_OUT = (
    "unit/test_exact_noise.py::test_importing_datalens_does_not_import_opendp",
    "statistical/test_mechanism_audit.py::test_exact_discrete_noise_keeps_its_claim_and_a_broken_twin_does_not",
    "unit/test_discrete_price.py::test_the_discrete_gaussian_is_a_rounded_gaussian_to_34_digits",
    "unit/test_discrete_price.py::test_less_rounding_would_not_be_so_close",
    "unit/test_three_accountants.py::test_exact_below_improved_below_the_papers",
    "unit/test_three_accountants.py::test_pld_agrees_with_exact",
)

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.RShift: ast.LShift,
    ast.BitXor: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "sqrt": "abs", "exp": "expm1"}

# Calls whose arguments are not swapped, because it changes nothing or (`isinstance`) always fails.
SYMMETRIC = {"min", "max", "minimum", "maximum", "logaddexp", "suppress", "isinstance"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed source.

    `before` and `after` are the statement around the change. With the module they name the mutant; a module that has
    the same statement twice has several mutants of one name.
    """

    module: str
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> tuple[str, str, str]:
        return self.module, self.before, self.after


# --- making mutants ---------------------------------------------------------------------------


def mutants(module: str, source: str) -> list[Mutant]:
    """Return all different mutants. Changes that only affect a message, a type or a docstring are left out."""
    tree = ast.parse(source)
    by_text: dict[str, Mutant] = {}
    for path, statement in statements(tree):
        for before, after, changed in changes(statement):
            whole = copy.deepcopy(tree)
            put(whole, path, changed)
            text = ast.unparse(ast.fix_missing_locations(whole))
            mutant = Mutant(module=module, line=statement.lineno, before=before, after=after, source=text)
            by_text.setdefault(text, mutant)
    return list(by_text.values())


Path_ = tuple[tuple[str, int], ...]


def statements(tree: ast.Module) -> Iterator[tuple[Path_, ast.stmt]]:
    """Yield every statement that does something, with its path in the tree."""

    def walk(node: ast.AST, path: Path_) -> Iterator[tuple[Path_, ast.stmt]]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for number, child in enumerate(block):
                here = (*path, (field, number))
                if not is_silent(child):
                    yield here, child
                if not (isinstance(child, ast.ClassDef) and any(ast.unparse(b) == "Protocol" for b in child.bases)):
                    yield from walk(child, here)
        for number, handler in enumerate(getattr(node, "handlers", [])):
            yield from walk(handler, (*path, ("handlers", number)))

    return walk(tree, ())


def is_silent(node: ast.stmt) -> bool:
    """Return whether a statement is an import, a docstring, a type alias or a plain declaration."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    aliases = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name)
    is_type = aliases and isinstance(node.targets[0], ast.Name) and re.match(r"[A-Z][a-z]", node.targets[0].id)  # type: ignore[union-attr]
    return bool(is_type)


def put(tree: ast.Module, path: Path_, statement: ast.stmt) -> None:
    node: ast.AST = tree
    for field, number in path[:-1]:
        node = getattr(node, field)[number]
    field, number = path[-1]
    getattr(node, field)[number] = statement


def changes(statement: ast.stmt) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield (text before, text after, changed statement). Of a compound statement only the head is changed."""
    head = headline(statement)
    for removed in removals(statement):
        yield head, headline(removed), removed
    if isinstance(statement, ast.Raise):
        return
    for number, (_, _) in enumerate(spots(statement)):
        for alternative in range(9):
            changed = copy.deepcopy(statement)
            node, swap = list(spots(changed))[number]
            options = swap(node)
            if alternative >= len(options):
                break
            options[alternative]()
            if headline(changed) != head:
                yield head, headline(changed), changed


def removals(statement: ast.stmt) -> Iterator[ast.stmt]:
    gone = ast.copy_location(ast.Pass(), statement)
    if isinstance(statement, ast.Raise) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        yield gone
    if isinstance(statement, ast.Return) and statement.value is not None and ast.unparse(statement.value) != "None":
        yield ast.copy_location(ast.Return(value=ast.Constant(None)), statement)
    if isinstance(statement, ast.If | ast.While | ast.IfExp):
        for value in (True, False) if isinstance(statement, ast.If) else (False,):
            changed = copy.copy(statement)
            changed.test = ast.Constant(value)
            yield changed
    if isinstance(statement, ast.AugAssign):
        yield gone
    if isinstance(statement, ast.Break | ast.Continue):
        yield gone


Swap = Callable[[ast.AST], list[Callable[[], None]]]


def spots(statement: ast.stmt) -> Iterator[tuple[ast.AST, Swap]]:
    """Yield the nodes of the statement's head that can be changed."""
    for node in own_nodes(statement):
        swap = SWAPS.get(type(node))
        if swap is not None:
            yield node, swap


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of nested statements, annotations, decorators and f-strings."""
    skipped = {
        "body",
        "orelse",
        "finalbody",
        "handlers",
        "annotation",
        "returns",
        "decorator_list",
        "bases",
        "type_params",
    }
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.stmt | ast.ExceptHandler) and field in skipped:
                continue
            if isinstance(node, ast.arg):
                continue
            for child in reversed(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr):
                    stack.append(child)


def compare(node: ast.Compare) -> list[Callable[[], None]]:
    return [
        lambda i=i, new=new: node.ops.__setitem__(i, new())  # type: ignore[misc]
        for i, op in enumerate(node.ops)
        for new in COMPARISONS[type(op)]
    ]


def arithmetic(node: ast.BinOp | ast.AugAssign) -> list[Callable[[], None]]:
    new = ARITHMETIC.get(type(node.op))
    return [] if new is None else [lambda: setattr(node, "op", new())]


def boolean(node: ast.BoolOp) -> list[Callable[[], None]]:
    other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    return [
        lambda: setattr(node, "op", other),
        *(lambda i=i: node.values.pop(i) for i in range(len(node.values)) if len(node.values) > 2),  # type: ignore[misc]
    ]


def unary(node: ast.UnaryOp) -> list[Callable[[], None]]:
    def drop() -> None:
        inner = node.operand
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(op=ast.Not(), operand=inner)
        else:
            node.op = ast.UAdd()

    return [drop] if isinstance(node.op, ast.Not | ast.USub) else []


def constant(node: ast.Constant) -> list[Callable[[], None]]:
    value = node.value
    new: list[object] = []
    if isinstance(value, bool):
        new = [not value]
    elif isinstance(value, int):
        new = [value + 1, *([value - 1] if value > 0 else [])]
    elif isinstance(value, float):
        new = [value * 2, value / 2] if value else [1.0]
    elif isinstance(value, str) and re.fullmatch(r"[\w.-]{1,24}", value):
        new = [value + "X"]
    elif isinstance(value, bytes):
        new = [value + b"X"]
    return [lambda other=other: setattr(node, "value", other) for other in new]  # type: ignore[misc]


def call(node: ast.Call) -> list[Callable[[], None]]:
    options: list[Callable[[], None]] = []
    named = node.func if isinstance(node.func, ast.Name) else None
    attribute = node.func if isinstance(node.func, ast.Attribute) else None
    swappable = len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
    if swappable and (attribute.attr if attribute else named.id if named else "") not in SYMMETRIC:
        options.append(lambda: node.args.__setitem__(slice(0, 2), node.args[1::-1]))
    if named is not None and named.id in NAMES:
        options.append(lambda: setattr(named, "id", NAMES[named.id]))
    if attribute is not None and attribute.attr in NAMES:
        options.append(lambda: setattr(attribute, "attr", NAMES[attribute.attr]))
    return options


def conditional(node: ast.IfExp) -> list[Callable[[], None]]:
    def swap() -> None:
        node.body, node.orelse = node.orelse, node.body

    return [swap]


def subscript(node: ast.Slice) -> list[Callable[[], None]]:
    return [lambda f=f: setattr(node, f, None) for f in ("lower", "upper") if getattr(node, f) is not None]  # type: ignore[misc]


SWAPS: dict[type[ast.AST], Swap] = {  # type: ignore[assignment]
    ast.Compare: compare,
    ast.BinOp: arithmetic,
    ast.AugAssign: arithmetic,
    ast.BoolOp: boolean,
    ast.UnaryOp: unary,
    ast.Constant: constant,
    ast.Call: call,
    ast.IfExp: conditional,
    ast.Slice: subscript,
}


def headline(statement: ast.stmt) -> str:
    """Return a statement on one line; of a compound one, only the head."""
    if hasattr(statement, "body"):
        statement = copy.copy(statement)
        for field in ("body", "orelse", "finalbody", "handlers", "decorator_list"):
            if hasattr(statement, field):
                setattr(statement, field, [ast.Pass()] if field == "body" else [])
    text = ast.unparse(ast.fix_missing_locations(statement))
    return " ".join(text.split()).removesuffix(" pass")


# --- testing them -----------------------------------------------------------------------------


TOO_LONG = 9  # the exit code of a fork whose test took too long


class Order:
    """A pytest plugin that runs recent killers first, then quick tests. It writes its observations to a file."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.skipped: type[BaseException] = sys.modules["pytest"].skip.Exception
        self.seconds: dict[str, float] = {}  # the duration of each test without a mutation
        self.took: dict[str, float] = {}
        self.killers: dict[str, int] = {}  # test → number of its last kill

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: (-self.killers.get(item.nodeid, 0), self.seconds.get(item.nodeid, 0.0)))

    def pytest_runtest_setup(self, item: object) -> None:
        """Set a time limit: a test that takes far longer than without the mutation kills the mutant, too."""
        test: str = item.nodeid  # type: ignore[attr-defined]

        signal.signal(signal.SIGALRM, lambda *_: self.end(test, TOO_LONG))
        signal.setitimer(signal.ITIMER_REAL, 10 * self.seconds.get(test, 60.0) + 5)

    def pytest_runtest_makereport(self, item: object, call: object) -> None:
        """End a mutant at the first failure, before pytest formats a report that nobody reads."""
        error = getattr(call, "excinfo", None)
        if self.seconds and error is not None and not issubclass(error.type, self.skipped):
            self.end(item.nodeid, 1)  # type: ignore[attr-defined]

    def end(self, test: str, code: int) -> None:
        self.killers[test] = 1 + max(self.killers.values(), default=0)
        self.pytest_unconfigure()
        os._exit(code)

    def pytest_runtest_logreport(self, report: object) -> None:
        test, took = report.nodeid, report.duration  # type: ignore[attr-defined]
        self.took[test] = self.took.get(test, 0.0) + took

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]
            self.killers["(import)"] = 1 + max(self.killers.values(), default=0)

    def pytest_unconfigure(self) -> None:
        ours = ("datalens", "tests", "benchmarks", "test_", "conftest", "__")
        loaded = [name for name in sys.modules if not name.startswith(ours)]
        facts = {"seconds": self.took, "killers": self.killers, "loaded": loaded}
        self.notes.write_text(json.dumps(facts), encoding="utf-8")

    def learn(self) -> tuple[str, list[str]]:
        """Return what the fork has written: the test that killed, if any, and the modules that were loaded."""
        if not self.notes.exists():
            return "", []
        facts = json.loads(self.notes.read_text(encoding="utf-8"))
        self.notes.unlink()
        new = [test for test, when in facts["killers"].items() if when > self.killers.get(test, 0)]
        self.killers = facts["killers"]
        self.seconds = self.seconds or facts["seconds"]  # without a mutation
        return "".join(new[-1:]), facts["loaded"]


def test(tree: Path, tests: tuple[str, ...], limit: float, order: Order) -> str:
    """Run tests in a fork, and return `killed`, `survived` or `timeout`.

    A timeout counts as killed: a gate that hangs releases nothing.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path[:0] = [str(tree / "src"), str(tree)]
        os.environ["PYTHONPATH"] = str(tree / "src")  # for the processes that tests start
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:cov",
            "-p",
            "no:unraisableexception",  # collects garbage, which takes longer than most tests
            "--no-header",
            "-o",
            "addopts=",
            "-m",
            "not slow and not gpu",
        ]
        without = [f"--deselect=tests/{name}" for name in LEFT_OUT]
        arguments = [*options, *without, *(f"tests/{name}" for name in tests)]
        os._exit(0 if sys.modules["pytest"].main(arguments, plugins=[order]) == 0 else 1)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else "timeout" if code == TOO_LONG else "killed"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def sweep(tree: Path) -> None:
    """Kill the processes that a mutant has left behind, which run a file of the copied tree."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(tree).encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


def copy_tree(to: Path) -> None:
    hidden = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("src", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=hidden)
    for name in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(ROOT / name, to / name)


def run(
    tree: Path, module: str, luck: random.Random, sample: int | None, wanted: Callable[[Mutant], bool]
) -> Iterator[dict]:
    """Yield the verdict on each mutant of a module."""
    path = tree / "src" / "datalens" / module
    source = path.read_text(encoding="utf-8")
    tests = tuple(name for name in TESTS[module] if (tree / "tests" / name.split("::")[0]).exists())
    order = Order(tree / "notes")
    began = time.monotonic()
    if test(tree, tests, 600, order) != "survived":
        sys.exit(f"the tests of {module} fail without a mutation: fix them first\n{(tree / 'log').read_text()[-3000:]}")
    limit = 10 * (time.monotonic() - began) + 60  # generous, for a busy machine: a hanging test ends itself sooner
    for name in order.learn()[1]:  # load it once for all forks
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    todo = [mutant for mutant in mutants(module, source) if wanted(mutant)]
    if sample is not None:
        todo = luck.sample(todo, min(sample, len(todo)))
    for number, mutant in enumerate(todo):
        path.write_text(mutant.source, encoding="utf-8")
        os.utime(path, (number + 1, number + 1))  # so that Python does not use the bytecode of the previous mutant
        verdict, killer = test(tree, tests, limit, order), order.learn()[0]
        sweep(tree)
        facts = {key: value for key, value in asdict(mutant).items() if key != "source"}
        yield facts | {"verdict": verdict, "killer": killer}
        if verdict == "survived":
            print(f"SURVIVED {module}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
        if number % 25 == 24:
            print(f"{module}: {number + 1} of {len(todo)}, {time.monotonic() - began:.0f} s", flush=True)
    path.write_text(source, encoding="utf-8")


def listed() -> dict[tuple[str, str, str], str]:
    """Return the table of docs/mutation.md: (module, before, after) → why it may survive."""
    reasons = {}
    for line in (ROOT / "docs" / "mutation.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] in TESTS:
            reasons[(cells[0], cells[1].strip("`"), cells[2].strip("`"))] = cells[3]
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="such as privacy/ledger.py; default: all")
    parser.add_argument("--sample", type=int, help="test only this many mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation.json"), help="where to write verdicts as JSON")
    parser.add_argument("--again", type=Path, help="test only survivors without a reason of this earlier --out")
    parser.add_argument("--unlisted", action="store_true", help="leave out mutants that have a reason, which are slow")
    parser.add_argument("--from-line", type=int, default=0, help="first line of the module to mutate, to go on there")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    import hypothesis
    import pytest  # noqa: F401 (loaded once, for all forks)

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", phases=phases, database=None)
    hypothesis.settings.load_profile("mutation")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C by default
    known = listed()
    before = None
    if options.again is not None:
        before = survivors(json.loads(options.again.read_text(encoding="utf-8"))) - known.keys()
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for module in options.modules:
            luck = random.Random(f"{options.seed} {module}")

            def wanted(mutant: Mutant) -> bool:
                left_out = options.unlisted and mutant.name in known
                return mutant.line >= options.from_line and not left_out and (before is None or mutant.name in before)

            verdicts: list[dict] = []
            for verdict in run(tree, module, luck, options.sample, wanted):
                verdicts.append(verdict)
                results.append(verdict)
                write(options.out, results)  # a run that is stopped after hours has not been in vain
            survived = survivors(verdicts)
            explained = survived & known.keys()
            killed = len(verdicts) - len(survived)
            print(
                f"{module}: {len(verdicts)} mutants, {killed} killed, {len(explained)} survived with "
                f"a reason in docs/mutation.md, {len(survived) - len(explained)} without",
                flush=True,
            )
    sys.exit(1 if survivors(results) - known.keys() else 0)


def write(path: Path, results: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")


def survivors(results: list[dict]) -> set[tuple[str, str, str]]:
    return {(r["module"], r["before"], r["after"]) for r in results if r["verdict"] == "survived"}


if __name__ == "__main__":
    main()
