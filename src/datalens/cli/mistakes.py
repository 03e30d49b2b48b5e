"""What is wrong with a command line, in one line."""

import difflib
import re
from collections.abc import Iterable

KINDS = {"INT": "a whole number", "FLOAT": "a number", "{None}|INT": "a whole number", "{None}|FLOAT": "a number"}


def no_command(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no command {name!r}: {hint}`datalens --help` lists them"


def in_one_line(box: str, prog: str) -> str:
    """What tyro says in a box of many lines, drawn with lines where the terminal has them."""
    ruled = [re.sub(r"[─-]{4,}", "", line) for line in box.splitlines()]
    inside = [re.sub(r"^[│╭╰]─?|[│╮╯]\s*$", "", line).rstrip() for line in ruled]
    text = " ".join(" ".join(inside).split())
    options = f"`{prog} --help` shows all options"
    if found := re.search(r"Error parsing (\S+): (.*?)(?: Argument helptext: (.*?) For full|$)", text):
        name, trouble, shown = found[1], found[2], found[3] or ""
        value = re.search(r"\['(.*?)'\]|: '(.*?)'$", trouble)
        kind = next((said for word, said in KINDS.items() if f"{name} {word}" in shown), None)
        if value and kind:
            return f"{name} must be {kind}, not {value[1] or value[2]!r}"
        return f"{name}: {trouble}; {options}"
    if found := re.search(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?),?\)", text):
        return f"{found[2]} must be one of {found[3].replace(chr(39), '')}, not {found[1]!r}"
    if found := re.search(r"Unrecognized (?:or misplaced )?options: (\S+?),? ", text + " "):
        meant = re.search(r"Perhaps you meant: (--\S+)", text)
        if meant and meant[1] == found[1]:  # an option of one of its commands
            return f"{prog} needs a command of its own before {found[1]}: `{prog} --help` lists them"
        hint = f"did you mean {meant[1]}?" if meant else options
        return f"{prog} has no {'option' if found[1].startswith('-') else 'place for'} {found[1]}: {hint}"
    if found := re.search(r"Missing subcommand Expected one of \{(.*?)\}", text):
        return f"{prog} needs one of {found[1]}; {options}"
    if "Missing from" in text:
        first = next(number for number, line in enumerate(inside) if "Missing from" in line) + 1
        deep = len(inside[first]) - len(inside[first].lstrip())  # what each of them is for stands below it, farther in
        names = [line.strip() for line in inside[first:] if re.match(f" {{{deep}}}\\S", line) and prog not in line]
        return f"{prog} needs {' and '.join(names)}; {options}"
    return f"{text[:300]}; {options}"
