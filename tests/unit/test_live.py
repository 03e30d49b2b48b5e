"""The view of a run on a terminal, and TensorBoard's logs of it."""

import builtins
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from datalens import progress
from datalens.errors import DatalensError
from datalens.privacy.events import GaussianEvent, unprotected
from datalens.privacy.ledger import Budget, Ledger
from datalens.released.generator import Architecture, Generator
from datalens.run import board, live

EVENT = GaussianEvent(
    row_unit="teacher",
    l2_bound=1.0,
    diameter=2.0,
    relation="add-remove",
    sigma=20.0,
    queries=1,
    step=0,
    noise="operating-system",
)


def ledger(epsilon: float = 1.0) -> Ledger:
    return Ledger.in_memory(Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant="exact"))


def shown(view: live.View) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(view.picture)
    return out.getvalue()


def test_the_view_has_steps_budget_and_agreement() -> None:
    book = ledger()
    view = live.View("training", 10, book, Console(file=io.StringIO(), force_terminal=True))
    assert "0/10" in shown(view) and "ε = 0 (δ = 1e-05, add-remove, exact accountant) of 1" in shown(view)
    book.charge(EVENT)
    view.done(3)
    view.told({"agreement": 0.25, "teacher_loss": 1.5})
    text = shown(view)
    assert "3/10" in text
    assert f"{book.budget.describe(book.spent())} of 1" in text
    assert "agreement of teachers 0.25" in text and "not covered by ε" in text


def test_a_narrow_screen_shows_that_it_is_for_the_owner() -> None:
    view = live.View("training", 10, ledger(), Console(file=io.StringIO(), force_terminal=True))
    view.told({"agreement": 0.25, "teacher_loss": 1.5, "real": 0.5, "answered": 0.5})
    out = io.StringIO()
    Console(file=out, width=60).print(view.picture)
    assert "for the owner, not covered by ε" in out.getvalue()


def test_the_view_of_a_run_without_a_budget_says_so() -> None:
    book = ledger(float("inf"))
    book.charge(unprotected("add-remove"))
    view = live.View("training", 10, book, Console(file=io.StringIO(), force_terminal=True))
    assert "NOT PRIVATE" in shown(view)


def test_a_charge_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    book, asked = ledger(), []
    monkeypatch.setattr(Ledger, "spent", lambda self: asked.append(1) or 0.5)
    view = live.View("training", 10, book, Console(file=io.StringIO(), force_terminal=True))
    for step in range(5):
        view.done(step)
    assert len(asked) == 1


def test_nothing_is_shown_or_priced_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out))
    monkeypatch.setattr(Ledger, "spent", lambda self: pytest.fail("priced"))
    with live.view("training", 3, ledger()) as view:
        view.done(2)
        view.told({"agreement": 1.0})
    assert out.getvalue() == ""


def test_a_terminal_sees_it_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, force_terminal=True, width=140))
    with live.view("training", 3, ledger()) as view:
        view.done(2)
    assert "2/3" in out.getvalue() and "budget" in out.getvalue()


# --- TensorBoard ----------------------------------------------------------------------------------


def logged(folder: Path) -> tuple[dict[str, list[float]], list[int]]:
    """Scalars by name, and the steps that have a picture."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    scalars = {name: [point.value for point in found.Scalars(name)] for name in found.Tags()["scalars"]}
    return scalars, [image.step for name in found.Tags()["images"] for image in found.Images(name)]


def test_scalars_and_pictures_are_logged_for_the_owner_alone(tmp_path: Path) -> None:
    generator = Generator(
        Architecture(shape=(3, 8, 8), classes=2, latent=2, latent_law="normal", dense=0, widths=(4,))
    ).train()
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    state = torch.get_rng_state()
    book = board.Board(tmp_path)
    book.scalars(0, {"agreement": 0.25})
    book.scalars(1, {"agreement": 0.5})
    book.generator(1, generator)
    book.picture(2, np.zeros((4, 4), dtype=np.uint8))
    book.close()
    assert logged(tmp_path / board.FOLDER) == ({"agreement": [0.25, 0.5]}, [1, 2])
    assert (tmp_path / board.FOLDER).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / board.FOLDER).iterdir()} == {0o600}
    assert generator.training and torch.equal(torch.get_rng_state(), state)  # training goes on undisturbed
    assert all(torch.equal(value, before[name]) for name, value in generator.state_dict().items())


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DatalensError, match=r"datalens\[tensorboard\]"):
        board.writer_class()


def test_pictures_are_drawn_now_and_then_and_at_the_end() -> None:
    assert sum(board.is_due(step, 1003) for step in range(1, 1004)) == 11
    assert all(board.is_due(step, 3) for step in (1, 2, 3))
    assert board.is_due(1003, 1003)
