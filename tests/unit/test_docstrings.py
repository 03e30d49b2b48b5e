"""Docstrings of the core and of public names state arguments and errors, and first lines can be read at once."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import datalens

ROOT = Path(datalens.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
CORE = ("bounded/", "privacy/", "plans/base.py")
STUMBLES = re.compile(r"(What|Of|Those|That|So|Which|Who|And|But|Where|How|It|This|These|Then)\b")


def functions(tree: ast.AST, private: bool = False) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a file and the methods of its classes, without those inside functions."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef) and (private or not node.name.startswith("_")):
            yield from functions(node, private)
        if isinstance(node, ast.FunctionDef) and (private or not node.name.startswith("_")):
            yield node.name, node


def lacks(name: str, parameters: list[str], text: str, *, raises: bool = False) -> list[str]:
    """What the docstring of a function does not say."""
    if not text:
        return [f"{name}: a docstring"]
    said = text.split("Args:")[1] if "Args:" in text else ""
    stated = {word for word in parameters if re.search(rf"^ +([\w*]+, )*\**{word}(, \w+)*:", said, re.M)}
    missing = [f"{name}: {word}" for word in parameters if word not in stated]
    return missing + ([f"{name}: Raises"] if raises and "Raises:" not in text and text[:6] != "Raise " else [])


def undocumented(files: dict[str, str]) -> list[str]:
    """Public functions of the core that do not say all; what a class implements may be said where it is declared."""
    found, known = [], set()
    for file, text in files.items():
        for name, node in functions(ast.parse(text)) if file.startswith(CORE) else ():
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            words = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
            raises = any(isinstance(part, ast.Raise) for part in ast.walk(node))
            gaps = lacks(f"{file} {name}", words, ast.get_docstring(node) or "", raises=raises)
            known |= set() if gaps else {(name, *words)}
            found += [(gap, (name, *words)) for gap in gaps]
    return [gap for gap, signature in found if signature not in known]


def test_the_core_says_what_it_takes_and_raises() -> None:
    assert undocumented(FILES) == []
    planted = 'def f(x, y):\n    """Return x.\n\n    Args:\n        x: a number.\n    """\n    raise ValueError(y)\n'
    assert undocumented({"privacy/planted.py": planted}) == ["privacy/planted.py f: y", "privacy/planted.py f: Raises"]
    assert undocumented({"privacy/planted.py": "def f():\n    return 1\n"}) == ["privacy/planted.py f: a docstring"]


def public() -> Iterator[tuple[str, Any]]:
    """What docs/api.md shows: functions, and the methods of classes."""
    page = (ROOT.parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    for name in re.findall(r"^::: (\S+)", page, re.M):
        shown = reduce(getattr, name.split(".")[1:], datalens) if name.count(".") == 1 else _imported(name)
        if inspect.isfunction(shown):
            yield name, shown
            continue
        for method in vars(shown):
            kept = inspect.getattr_static(shown, method)
            function = getattr(kept, "__func__", kept)
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", function


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def test_what_the_reference_shows_says_what_it_takes() -> None:
    shown = dict(public())
    assert {"datalens.train", "datalens.DataLens.fit", "datalens.SyntheticDataset.to_npz"} <= set(shown)
    for name, function in shown.items():
        words = [word for word in inspect.signature(function).parameters if word not in ("self", "cls")]
        assert lacks(name, words, inspect.getdoc(function) or "") == []


def test_first_lines_begin_with_what_a_thing_is_or_does() -> None:
    for file, text in FILES.items():
        tree = ast.parse(text)
        for node in (tree, *(part for part in ast.walk(tree) if isinstance(part, ast.ClassDef | ast.FunctionDef))):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            assert not STUMBLES.match(first), f"{file}: {first}"
