"""What the broken twins share: a table of them, and how they are looked at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datalens.evaluate.audits import wiring
from datalens.evaluate.audits.wiring_runs import asked, subject
from datalens.privacy.events import Relation

Patch = pytest.MonkeyPatch
Twin = Callable[[Patch], None]
OPTIONS = dict(asked(None))


class Twins(dict[str, tuple[Twin, str, str]]):
    """Name → (what breaks the wiring, the method it is built into, the check that is to find it)."""

    def add(self, method: str, check: str) -> Callable[[Twin], Twin]:
        def listed(build: Twin) -> Twin:
            self[f"{build.__name__} [{method}]"] = (build, method, check)
            return build

        return listed

    def caught(self, name: str, patch: Patch, folder: Path) -> bool:
        build, method, check = self[name]
        build(patch)
        return bool(found_in(method, check, folder))


def found_in(
    method: str, check: str, folder: Path, *, relation: Relation = "add-remove", person: bool = False
) -> list[wiring.Fault]:
    broken = subject(method, OPTIONS[method], relation, person=person)
    assert broken is not None
    return wiring.look(broken, folder, checks=[check])


def noting(original: Callable[..., Any], note: Callable[[Any], object]) -> Callable[..., Any]:
    """The same function, with somebody who hears what it answers."""

    def heard(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        note(found)
        return found

    return heard
