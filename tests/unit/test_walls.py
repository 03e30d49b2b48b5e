"""Walls, read off the syntax trees: each walker is run on the source, and on a planted violation it must find."""

import ast
import functools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import datalens

ROOT = Path(datalens.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

Finder = Callable[[ast.AST], Iterator[int]]  # line numbers


@functools.cache
def tree_of(text: str) -> ast.AST:
    return ast.parse(text)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a name or an attribute of one, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def tail(node: ast.AST) -> str:
    """`c` for `a.b.c`."""
    return dotted(node).split(".")[-1]


def family(base: str, files: dict[str, str]) -> set[str]:
    """The names of a class and of all that inherit from it, in whichever file, under any alias."""
    known = {base}
    trees = [tree_of(text) for text in files.values()]
    while True:
        before = len(known)
        for tree in trees:
            known |= _named_after(known, tree)
        if len(known) == before:
            return known


def _named_after(known: set[str], tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname for alias in node.names if alias.name in known and alias.asname}
        if isinstance(node, ast.Assign) and tail(node.value) in known:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef) and any(tail(base) in known for base in node.bases):
            found.add(node.name)
    return found


def handles(base: str, files: dict[str, str] | None = None) -> Finder:
    """Uses of a class, or of one that inherits from it, for more than an annotation or `isinstance`.

    That is: a call, a base of a new class, an argument (`partial(VoteCounts)`), another name for it, `type(…)(…)`.
    """
    inherited = family(base, FILES if files is None else files)

    def find(tree: ast.AST) -> Iterator[int]:
        known = inherited | {base}
        while not _named_after(known, tree) <= known:
            known |= _named_after(known, tree)
        harmless = {id(part) for node in ast.walk(tree) for field in _only_said(node) for part in ast.walk(field)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and tail(node) in known and id(node) not in harmless:
                yield node.lineno
            if isinstance(node, ast.Call) and tail(node.func) == "getattr":
                yield from (node.lineno for word in node.args if isinstance(word, ast.Constant) and word.value in known)

    return find


def _only_said(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that name a class and make nothing of it."""
    for name in ("annotation", "returns"):
        if getattr(node, name, None) is not None:
            yield getattr(node, name)
    if isinstance(node, ast.Subscript):  # Callable[[BoundedSum], None]
        yield node.slice
    if isinstance(node, ast.Call) and tail(node.func) == "isinstance":
        yield from node.args[1:]


def uses(attribute: str) -> Finder:
    """Reads of an attribute, also by its name in a string or a pattern, and the name as a keyword of a call."""

    def find(tree: ast.AST) -> Iterator[int]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == attribute:
                yield node.lineno
            if isinstance(node, ast.Constant) and node.value == attribute:
                yield node.lineno
            if isinstance(node, ast.MatchClass) and attribute in node.kwd_attrs:
                yield node.lineno
            if isinstance(node, ast.keyword) and node.arg == attribute:
                yield node.lineno

    return find


def goes_around_constructors(tree: ast.AST) -> Iterator[int]:
    """replace(released, value=…) or object.__setattr__ would fill a frozen type of the guarantee without a gate."""
    guarded = {"value", "event", "private_total", "l2_bound", "diameter"}
    for node in ast.walk(tree):
        copied = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "replace"
        if copied and any(keyword.arg in guarded for keyword in node.keywords):
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in ("__setattr__", "__new__"):
            yield node.lineno


def unpickles(tree: ast.AST) -> Iterator[int]:
    """pickle and its cousins, torch.load, and numpy told to allow it."""
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    safe = {  # of weights: torch's reader of tensors, which runs no code
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in forbidden for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in forbidden:
                yield node.lineno
            if node.module == "torch" and any(alias.name == "load" for alias in node.names):
                yield node.lineno
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.jit.load", "torch.package"):
            yield node.lineno
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.load" and id(node) not in safe:
            yield node.lineno
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno
        if isinstance(node, ast.Call) and dotted(node.func) in ("np.load", "numpy.load", "np.save", "numpy.save"):
            asked = {keyword.arg for keyword in node.keywords}
            if "allow_pickle" not in asked:  # np.save allows it unless told otherwise
                yield node.lineno


def runs_text(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield node.lineno


def prints(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            yield node.lineno


def other_randomness(tree: ast.AST) -> Iterator[int]:
    """Generators with a hidden state. Training takes `streams`, privacy noise `privacy/noise.py`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("np.random", "numpy.random", "torch.manual_seed"):
            yield node.lineno
        if isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            yield node.lineno


SETTINGS = family("Settings", FILES)


def counts_aloud(tree: ast.AST) -> Iterator[int]:
    """A progress bar that would write how many records there are into a log."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and tail(node.func) == "bar":
            told = {keyword.arg: keyword.value for keyword in node.keywords}.get("private")
            if not (isinstance(told, ast.Constant) and told.value is True):
                yield node.lineno


def asks_for_settings(tree: ast.AST) -> Iterator[int]:
    """Code that depends on the class of settings: these answer for themselves, through `plans.base.Settings`."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and tail(node.func) in ("isinstance", "issubclass"):
            asked = list(node.args[1:])
        if isinstance(node, ast.MatchClass):
            asked = [node.cls]
        if isinstance(node, ast.Compare) and any(tail(part) == "type" for part in ast.walk(node)):
            asked = [node]
        if any(tail(part) in SETTINGS for one in asked for part in ast.walk(one)):
            yield node.lineno


def breaches(finder: Finder, *, allowed: tuple[str, ...], files: dict[str, str]) -> list[str]:
    """file:line of every find outside the files and folders that may."""
    return [
        f"{name}:{line}"
        for name, text in files.items()
        if not name.startswith(allowed)
        for line in finder(tree_of(text))
    ]


def occurrences(finder: Finder, prefix: str) -> int:
    return sum(1 for name, text in FILES.items() if name.startswith(prefix) for _ in finder(tree_of(text)))


# The files of bounded/ that make sums.
SUMS = tuple(f"bounded/{name}.py" for name in ("contributions", "outer", "parts", "norm_topk", "whole_rows"))

# name → (walker, where it is allowed, violations planted elsewhere)
WALLS: dict[str, tuple[Finder, tuple[str, ...], tuple[str, ...]]] = {
    "Released is built in privacy/ only": (
        handles("Released"),
        ("privacy/", "evaluate/audits/wiring_tape.py"),  # which notes what is made: see below
        (
            "Released(value=x, event=e, number=0)",
            "released.Released(value=x)",
            "from datalens.privacy.released import Released as R\nR(value=x)",
            "Fake = Released\nFake(value=x)",
            "class Fake(Released):\n    pass",
        ),
    ),
    "sums are built in bounded/ only": (
        handles("BoundedSum"),
        SUMS,
        (
            "BoundedSum(private_total=x, l2_bound=0.0)",
            "c.BoundedSum()",
            "VoteCounts(private_total=x)",
            "c.VoteCounts(**facts)",
            "from datalens.bounded.contributions import VoteCounts as V\nW = V\nW(**facts)",
            "class Mine(BoundedSum):\n    pass",
            "class Mine(contributions.VoteCounts, Other):\n    pass",
            "partial(VoteCounts, l2_bound=0.0)(**facts)",
            'type("Mine", (BoundedSum,), {})(**facts)',
            'getattr(contributions, "VoteCounts")(**facts)',
            "(VoteCounts if x else None)(**facts)",
        ),
    ),
    "the private total is read at the gate only": (
        uses("private_total"),
        ("privacy/", *SUMS),
        (
            *("x = votes.private_total", 'getattr(votes, "private_total")', "votes.private_total.sum()"),
            "match votes:\n    case VoteCounts(private_total=x):\n        pass",
            "type(votes)(private_total=x)",
            "votes.__class__(private_total=x)",
        ),
    ),
    "directions are decoded, not made": (
        handles("Direction"),
        ("released/decode.py",),
        ("Direction(value=x)",),
    ),
    "nothing is copied around its constructor": (
        goes_around_constructors,
        (),
        (
            "from dataclasses import replace\nreplace(votes, l2_bound=0.0)",
            "import dataclasses\ndataclasses.replace(released, value=x)",
            'object.__setattr__(released, "value", x)',
        ),
    ),
    "no pickle": (
        unpickles,
        (),
        (
            "import pickle",
            "from pickle import loads",
            "import torch\ntorch.load(f)",
            "import torch\ntorch.load(f, weights_only=False)",
            "import torch\nload = torch.load",
            "from torch import load",
            "np.load(f, allow_pickle=True)",
            "np.load(f, allow_pickle=flag)",
            "np.save(f, x)",
            "import joblib",
        ),
    ),
    "no settings are asked for their class": (
        asks_for_settings,
        (),
        (
            "isinstance(settings, MomentSettings)",
            "isinstance(run.settings, topagg.TopAggSettings | SgdSettings)",
            "issubclass(kind, (StepSettings, int))",
            "match settings:\n    case DpmerfSettings(grid=x):\n        pass",
            "type(settings) is GPateSettings",
        ),
    ),
    "no log says how many records there are": (
        counts_aloud,
        # what they count is public, or asked for by a command that is for the owner only
        ("progress.py", "evaluate/", "released/", "reproduce/", "data/", "run/cluster.py"),
        ('bar("reading", n)', 'progress.bar("reading", n, private=False)', 'bar("reading", n, shown=False)'),
    ),
    "no text is run": (runs_text, (), ("eval(x)", "exec(x)")),
    "no prints": (prints, (), ("print(x)", "f = print")),
    "noise has one module": (
        other_randomness,
        # gradients/mixing.py repeats a run with the same random numbers, and puts the generators back: it draws nothing
        (
            "privacy/noise.py",
            "gradients/mixing.py",
            "data/",
            "evaluate/",
            "released/",
            "reproduce/",
        ),
        ("np.random.default_rng(0)", "import random", "from random import gauss", "torch.manual_seed(0)"),
    ),
}


@pytest.mark.parametrize("name", WALLS)
def test_the_wall_stands(name: str) -> None:
    finder, allowed, _ = WALLS[name]
    assert breaches(finder, allowed=allowed, files=FILES) == []


@pytest.mark.parametrize("name", WALLS)
def test_a_planted_violation_is_found(name: str) -> None:
    finder, allowed, planted = WALLS[name]
    assert planted
    for text in planted:
        inside_a_function = "def f(x):\n" + textwrap.indent(text, "    ")
        found = breaches(finder, allowed=allowed, files={"privacy2/planted.py": inside_a_function})
        assert found, text


def test_the_watched_run_puts_an_ear_to_released_and_makes_none() -> None:
    text = FILES["evaluate/audits/wiring_tape.py"]
    (line,) = set(handles("Released")(ast.parse(text)))
    assert text.splitlines()[line - 1].strip() == 'put(Released, "__init__", self._making(Released.__init__))'


def test_who_inherits_in_another_file_is_known() -> None:
    """A sum of a kind that bounded/ has tomorrow is built there, too."""
    assert family("BoundedSum", FILES) >= {"BoundedSum", "VoteCounts"}
    tomorrow = {
        **FILES,
        "bounded/one.py": "from datalens.bounded.contributions import VoteCounts as V\nclass One(V):\n    pass\n",
        "bounded/two.py": "from datalens.bounded import one\nclass Two(one.One):\n    pass\n",
    }
    assert family("BoundedSum", tomorrow) >= {"BoundedSum", "VoteCounts", "One", "Two"}
    planted = {"methods/planted.py": "def f(facts):\n    return Two(**facts)\n"}
    assert breaches(handles("BoundedSum", tomorrow), allowed=("bounded/",), files=planted) == ["methods/planted.py:2"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(total: BoundedSum | None) -> VoteCounts:\n    x: VoteCounts = g(total)\n    return x",
        "from datalens.bounded.contributions import BoundedSum, VoteCounts",
        "isinstance(x, VoteCounts)",
        "Ask = Callable[[str], BoundedSum]",
    ],
)
def test_to_name_a_kind_is_not_to_make_one(text: str) -> None:
    assert list(WALLS["sums are built in bounded/ only"][0](ast.parse(text))) == []


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("Released is built in privacy/ only", "privacy/"),
        ("sums are built in bounded/ only", "bounded/contributions.py"),
        ("sums are built in bounded/ only", "bounded/outer.py"),
        ("sums are built in bounded/ only", "bounded/parts.py"),
        ("sums are built in bounded/ only", "bounded/norm_topk.py"),
        ("sums are built in bounded/ only", "bounded/whole_rows.py"),
        ("the private total is read at the gate only", "privacy/mechanisms.py"),
        ("directions are decoded, not made", "released/decode.py"),
        ("noise has one module", "privacy/noise.py"),
    ],
)
def test_the_walker_sees_what_is_really_there(name: str, prefix: str) -> None:
    """Were the thing renamed, the wall would stand around nothing."""
    assert occurrences(WALLS[name][0], prefix) > 0


def test_the_whole_source_is_walked() -> None:
    assert {"privacy/mechanisms.py", "methods/topagg.py", "cli/main.py", "released/student.py"} <= set(FILES)
    assert len(FILES) > 30


def imports(text: str) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("datalens")}


def gate_breaches(files: dict[str, str]) -> list[str]:
    """`privacy` imports itself, errors, files and bounded.contributions: who reads it has read the whole guarantee."""
    allowed = ("datalens.privacy.", "datalens.errors.", "datalens.files.", "datalens.bounded.contributions.")
    return [
        f"{name}: {module}"
        for name, text in files.items()
        if name.startswith("privacy/")
        for module in imports(text)
        if not f"{module}.".startswith(allowed)
    ]


def test_the_gate_can_be_read_by_itself() -> None:
    assert gate_breaches(FILES) == []
    planted = {**FILES, "privacy/planted.py": "def f():\n    from datalens.private.teachers import Teachers\n"}
    assert gate_breaches(planted) == ["privacy/planted.py: datalens.private.teachers.Teachers"]
