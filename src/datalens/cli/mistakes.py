"""Check a command line against the fields of its options, and report a mistake in one line.

The parser (tyro) gets only command lines that passed this check, so that its own error messages are never shown.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from datalens.errors import DatalensError

_POSITIONAL = get_args(Positional[int])[1]
KINDS = {int: ("INT", "a whole number"), float: ("FLOAT", "a number")}


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One option, or one positional argument, of a command."""

    name: str  # as it is typed
    positional: bool
    required: bool
    many: bool  # takes any number of values
    switch: bool  # takes no value
    choices: tuple[str, ...]  # empty: any value of its type
    kind: type
    metavar: str

    def problem(self, value: str) -> str | None:
        """Return what is wrong with a value, or None."""
        if self.choices:
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}, not {value!r}"
        if self.kind in KINDS:
            try:
                self.kind(value)
            except ValueError:
                return f"must be {KINDS[self.kind][1]}, not {value!r}"
        return None


def arguments(command: type) -> Iterator[Argument]:
    """Yield the arguments of a command's dataclass, including those of nested dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        kind, marks = _plain(hints[field.name])
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from arguments(kind)
            continue
        settings = next((mark for mark in marks if hasattr(mark, "metavar")), None)
        positional = any(mark is _POSITIONAL for mark in marks)
        many = get_origin(kind) is tuple
        parts = get_args(kind) if get_origin(kind) not in (None, Literal) else (kind,)
        choices = tuple(str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part))
        plain = next((part for part in parts if part in (int, float)), str)
        yield Argument(
            name=(settings and settings.name) or field.name.rstrip("_").replace("_", "-"),
            positional=positional,
            required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            many=many,
            switch=kind is bool,
            choices=() if str in parts else choices,
            kind=plain,
            metavar=(settings and settings.metavar)
            or (field.name.upper() if positional else "PATH" if "Path" in str(kind) else KINDS.get(plain, ("STR",))[0]),
        )


def _plain(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without the marks of `Annotated`, and the marks."""
    if get_origin(kind) is Annotated:
        inner, marks = _plain(get_args(kind)[0])
        return inner, (*get_args(kind)[1:], *marks)
    return kind, ()


def check(command: type, words: list[str], prog: str, *, explain: Callable[[str], str | None] | None = None) -> None:
    """Raise if these words are not a valid command line of this command.

    Args:
        command: its dataclass.
        words: the command line after the command.
        prog: the command as it is typed.
        explain: returns the message about an option that this command does not have; None: suggest a similar one.

    Raises:
        DatalensError: an option or a value is invalid, or one is missing.
    """
    known = list(arguments(command))
    options = {f"--{argument.name}": argument for argument in known if not argument.positional}
    places = [argument for argument in known if argument.positional]
    help_shows = f"`{prog} --help` shows all options"
    if "-h" in words or "--help" in words:
        return
    given: set[str] = set()
    taken = 0
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if taken >= len(places):
                raise DatalensError(f"{prog} does not take the argument {word}: {help_shows}")
            _check_value(places[taken], word, places[taken].metavar)
            given.add(places[taken].name)
            taken += not places[taken].many
            continue
        name, _, joined = word.partition("=")
        name = name.replace("_", "-")
        if name not in options:
            raise DatalensError(
                (explain and explain(name)) or f"{prog} has no option {name}: {near(name, options) or help_shows}"
            )
        option = options[name]
        given.add(option.name)
        values = [joined] if "=" in word else []
        while rest and not rest[0].startswith("--") and not option.switch and (option.many or not values):
            values.append(rest.pop(0))
        if not values and not option.switch:
            raise DatalensError(f"{name} needs a value ({option.metavar}); {help_shows}")
        for value in values:
            _check_value(option, value, name)
    missing = [
        argument.metavar if argument.positional else f"--{argument.name} {argument.metavar}"
        for argument in known
        if argument.required and argument.name not in given
    ]
    if missing:
        raise DatalensError(f"{prog} needs {' and '.join(missing)}; {help_shows}")


def joined_labels(words: list[str]) -> list[str]:
    """Return a command line in which `--label A --label B` is `--label A,B`: several columns make one label."""
    given, rest = [], []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--label" and left and not left[0].startswith("--"):
            given.append(left.pop(0))
        elif word.startswith("--label="):
            given.append(word.removeprefix("--label="))
        else:
            rest.append(word)
    return words if len(given) < 2 else [*rest, "--label", ",".join(given)]


def _check_value(argument: Argument, value: str, name: str) -> None:
    if problem := argument.problem(value):
        raise DatalensError(f"{name} {problem}")


def near(name: str, known: Iterable[str]) -> str | None:
    """Return a question that suggests an option with the same beginning or a similar spelling, if there is one."""
    known = list(known)
    begins = sorted(option for option in known if option.startswith(name)) if len(name) > 3 else []
    meant = begins[:1] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {meant[0]}?" if meant else None


def no_command(name: str, known: Iterable[str]) -> str:
    """Return the error message about an unknown command."""
    meant = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {meant[0]}? " if meant else ""
    return f"there is no command {name!r}: {hint}`datalens --help` lists them"
