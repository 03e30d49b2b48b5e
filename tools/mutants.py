"""Mutants of a module: copies of its source with one small change each. `mutate.py` runs tests on them."""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

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


Path_ = tuple[tuple[str, int], ...]
BLOCKS = ("body", "orelse", "finalbody", "handlers")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed source.

    `before` and `after` are the statement around the change. With the module they name the mutant in docs/mutation.md;
    a module that has the same statement twice has several mutants of one name. `place` is that among all of the module.
    """

    module: str
    line: int
    before: str
    after: str
    place: int
    end: int  # last line of what has to run for a test to notice
    at_import: bool  # whether it runs when the module is imported
    write: Callable[[], str] = field(repr=False, compare=False)  # returns the changed source

    @property
    def name(self) -> tuple[str, str, str]:
        return self.module, self.before, self.after


# --- making mutants ---------------------------------------------------------------------------


def mutants(module: str, source: str, *, only: bool = False) -> list[Mutant]:
    """Return all different mutants. Changes that only affect a message, a type or a docstring are left out.

    Args:
        module: its path below src/datalens.
        source: its text.
        only: whether only statements that decide what crosses or is charged are changed (see `crossing`).
    """
    tree = ast.parse(source)
    chosen = crossing(tree) if only else None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    called = {id(node) for function in functions for node in ast.walk(function)}
    found: list[Mutant] = []
    for path, statement in statements(tree):
        if chosen is not None and id(statement) not in chosen:
            continue
        seen = set()
        for before, after, changed in changes(statement):
            if after in seen:
                continue
            seen.add(after)
            write = partial(written, tree, path, statement, changed)
            found.append(
                Mutant(
                    module=module,
                    line=statement.lineno,
                    before=before,
                    after=after,
                    place=len(found),
                    end=last_line(statement),
                    at_import=id(statement) not in called,
                    write=write,
                )
            )
    return found


def last_line(statement: ast.stmt) -> int:
    """Return the last line of a simple statement, of the head of a compound one, or of a whole function."""
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.FunctionDef) or not body:
        return statement.end_lineno or statement.lineno
    return max(statement.lineno, body[0].lineno - 1)


def written(tree: ast.Module, path: Path_, statement: ast.stmt, changed: ast.stmt) -> str:
    """Return the source with one statement changed."""
    for block in BLOCKS:
        if hasattr(changed, block):
            setattr(changed, block, getattr(statement, block))
    put(tree, path, changed)
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    finally:
        put(tree, path, statement)


def bare(statement: ast.stmt) -> ast.stmt:
    """Return a statement without those inside it."""
    head = copy.copy(statement)
    for block in BLOCKS:
        if hasattr(head, block):
            setattr(head, block, [])
    return copy.deepcopy(head)


def statements(tree: ast.Module) -> Iterator[tuple[Path_, ast.stmt]]:
    """Yield every statement that does something, with its path in the tree."""

    def walk(node: ast.AST, path: Path_) -> Iterator[tuple[Path_, ast.stmt]]:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for number, child in enumerate(block):
                here = (*path, (name, number))
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
    for name, number in path[:-1]:
        node = getattr(node, name)[number]
    name, number = path[-1]
    getattr(node, name)[number] = statement


def changes(statement: ast.stmt) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield (text before, text after, changed statement). Of a compound statement only the head is changed."""
    head = headline(statement)
    for removed in removals(statement):
        yield head, headline(removed), removed
    if isinstance(statement, ast.Raise):
        return
    for number, (_, _) in enumerate(spots(statement)):
        for alternative in range(9):
            changed = bare(statement)
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
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.stmt | ast.ExceptHandler) and name in skipped:
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


# --- which statements decide what crosses -----------------------------------------------------

# Of a method: what is called while it holds records, and the members of its settings that state a price, compare a
# ledger with them, or read them.
ROOTS = set(
    re.findall(
        r"\w+",
        """
        gather train follow from_dict schedule schedule_of disagreements wrong_weights whole_plan steps_paid own_budget
        releases bound l2_bound diameter sensitivity possible answers_paid checked gaps gaps_of_blocks known
        """,
    )
)
# A statement that uses one of these names, or raises, decides what leaves the private side, what is charged for it, or
# how long a loop runs: private values; the gate, its noise and its bounds; what was paid.
DECIDES = set(
    re.findall(
        r"\w+",
        """
        records record data dataset shares share pool crowd teachers critics critic rows held_out test votes total
        totals contributions ids whose starts units by_person record_keys fingerprint answers ballots chosen
        gate mechanism release make_mechanism open_noise noise noise_seed noise_seeded sigma SecureNoise SeededNoise
        poisson_sample sum_bounded join whole l2_bound diameter sensitivity bound clip moved relation row_unit rate
        ledger charge charged charges event events journal budget reserve epsilon delta spent private noisy answer
        problems park unpark hand_over left lost steps interrupted completed optimizer
        """,
    )
)


def crossing(tree: ast.Module) -> set[int]:
    """Return the statements of a method, by `id`, that decide what crosses the wall or is charged.

    They are in a function that is reached from `ROOTS`. They use a name of `DECIDES`, or raise; or assign what such a
    statement uses; or are a condition or a loop around one. All others (settings and their defaults, texts, how images
    and networks are made of what was released) may change how well a method learns, and nothing else: whatever it has
    learned from has passed the gate.
    """
    reached = reached_from(tree, ROOTS)
    chosen: set[int] = set()
    for function in reached:
        inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
        used, given = ({id(one): names(one) for one in inside} for names in (names_of, targets_of))
        around = {id(child): one for one in inside for child in ast.iter_child_nodes(one)}
        around |= {id(child): around[id(handler)] for handler in handlers(function) for child in handler.body}
        is_one = function.name.strip("_") in ROOTS or function.name.strip("_") in DECIDES
        todo = [
            one
            for one in inside
            if isinstance(one, ast.Raise)
            or (used[id(one)] | given[id(one)]) & DECIDES
            or (is_one and isinstance(one, ast.Return))
        ]
        while todo:
            one = todo.pop()
            if id(one) not in chosen:
                chosen.add(id(one))
                todo += [other for other in inside if given[id(other)] & used[id(one)]]
                todo += [around[id(one)]] if id(one) in around else []
        chosen.add(id(function))
    return chosen


def handlers(function: ast.AST) -> list[ast.ExceptHandler]:
    return [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)]


def reached_from(tree: ast.Module, roots: set[str]) -> list[ast.FunctionDef]:
    """Return the functions of a module with these names, and those that they name, directly or not."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    made = {one.name: [part for part in one.body if isinstance(part, ast.FunctionDef)] for one in classes}
    named = {name: [one for one in functions if one.name == name] for name in {one.name for one in functions}}
    todo = [one for name in roots for one in named.get(name, [])]
    found: list[ast.FunctionDef] = []
    while todo:
        one = todo.pop()
        if one not in found:
            found.append(one)
            for name in {name for part in ast.walk(one) for name in ([part.id] if isinstance(part, ast.Name) else [])}:
                starts = [part for part in made.get(name, []) if part.name in ("__init__", "__call__")]
                todo += named.get(name, []) + starts
            attributes = {part.attr for part in ast.walk(one) if isinstance(part, ast.Attribute)}
            todo += [other for name in attributes for other in named.get(name, [])]
    return sorted(found, key=lambda one: one.lineno)


def names_of(statement: ast.stmt) -> set[str]:
    """Return the names, attributes and keywords that the head of a statement uses."""
    found = set()
    for node in own_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return {name.strip("_") for name in found} | found


def targets_of(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement assigns to."""
    stored = [node for node in own_nodes(statement) if isinstance(getattr(node, "ctx", None), ast.Store)]
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in stored
        if isinstance(node, ast.Name | ast.Attribute)
    }
