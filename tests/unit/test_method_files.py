"""The wall inside a method's file: what plans and describes a run uses nothing that touches records.

A method is one file, so no import contract can keep its settings and its plan from what its training imports. Here
the names that settings and `plan` reach, through functions and classes of the same file, are held against that.
"""

import ast
from pathlib import Path

import pytest

import datalens

METHODS = Path(datalens.__file__).parent / "methods"
RECORDS = ("datalens.private", "datalens.bounded", "datalens.data.records", "datalens.data.formats")
# A timed step on random images; and the schedule of `sgd`, whose rows' bound `bounded.norm_topk` states.
APART = {"seconds_a_step", "schedule_of"}
PUBLIC = {
    "sgd.py": ["SgdSettings uses features", "plan uses features", "sgd_usual uses features"]
}  # a setting's name; frozen public networks
FILES = {path.name: path.read_text(encoding="utf-8") for path in METHODS.glob("*.py") if path.name != "__init__.py"}


def reaches_records(text: str) -> list[str]:
    """Return what of a file settings or `plan` reach, and which name of the private side it uses."""
    tree = ast.parse(text)
    private = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(RECORDS)
        for alias in node.names
    }
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {name: {n.id for n in ast.walk(_body(node)) if isinstance(n, ast.Name)} for name, node in own.items()}
    reached = {name for name in own if name == "plan" or name.endswith("Settings")}
    given = {name: {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} for name, node in own.items()}
    while more := {other for name in reached for other in (used[name] - given[name]) & own.keys()} - reached - APART:
        reached |= more
    return sorted(f"{name} uses {word}" for name in reached for word in used[name] & private)


def _body(node: ast.AST) -> ast.AST:
    """Without annotations: a type that is only named touches nothing."""
    copy = ast.parse(ast.unparse(node))
    for part in ast.walk(copy):
        if isinstance(part, ast.arg | ast.AnnAssign):
            part.annotation = ast.Constant(None)
        if isinstance(part, ast.FunctionDef):
            part.returns = None
    return copy


@pytest.mark.parametrize("name", FILES)
def test_settings_and_plans_touch_no_records(name: str) -> None:
    found = reaches_records(FILES[name])
    assert [line for line in found if line not in PUBLIC.get(name, [])] == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("ensemble.py", "sgd.py")])
def test_a_planted_look_at_records_is_found(name: str) -> None:
    text = FILES[name]
    assert "class " in text and "def plan(" in text  # or the walk above sees nothing
    for line in (
        "from datalens.private.shares import Shares as Peeked\n",
        "from datalens.bounded.clip import Peeked\n",
    ):
        direct = line + text + "\n\ndef plan(request, schema, budget):\n    return Peeked(request)\n"
        assert reaches_records(direct) == ["plan uses Peeked"]
        through = line + text + "\n\ndef helper(x):\n    return Peeked(x)\n\n\nclass ASettings:\n    size = helper\n"
        assert reaches_records(through) == ["helper uses Peeked"]
