"""A run whose ledger was cut: whatever it has learned from must be in the ledger, or the run does not go on."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datalens.bounded.contributions import Contributions, sum_bounded
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError, TamperedError
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.privacy.events import UnknownEvent
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import SecureNoise
from datalens.privacy.released import Released
from datalens.run.folder import LATEST, Alone, Run, load_tensors, save_tensors

SCHEMA = Schema(name="tiny", height=4, width=4, channels=1, classes=("a", "b"), nominal_size=100)
STEPS = 8


class Counted:
    """A student that learns nothing but how many steps it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1)

    def state(self) -> dict[str, Tensor]:
        return {"seen": self.seen}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.seen = state["seen"]


def options(out: Path) -> TrainOptions:
    return TrainOptions(
        data="tiny", out=out, teachers=5, k=2, batch=2, steps=STEPS, basis_size=4, noise="gaussian", warm_start="off"
    )


def begin(out: Path) -> Run:
    budget, settings = make_plan(options(out), SCHEMA)
    return Run.create(
        out,
        options=options(out).remembered(),
        settings=settings,
        budget=budget,
        schema=SCHEMA,
        data_sha256="0" * 64,
    )


def go_on(run: Run, *, until: int | None = None, lose: int | None = None) -> None:
    """Steps as a method takes them. `until`: a person asks it to stop there. `lose`: killed before this was kept."""
    assert isinstance(run.settings, TopAggSettings)
    student = Counted()
    gate = make_mechanism(run.settings.sigma, SecureNoise())
    rows = torch.tensor([[[1, -1, 0, 0], [0, 0, 1, 1]]], dtype=torch.int8)
    for step in run.steps(STEPS, student=student, teachers=Alone(Counted(), run.path / "checkpoints")):
        if run.journal.find(run.ledger, step=step) is None:
            votes = sum_bounded([Contributions(rows=rows, l2_bound=2.0, diameter=4.0, row_unit="teacher")])
            try:
                released = gate.release(votes, run.ledger, step=step)
            except BudgetExceeded:
                return
            if step == lose:
                return
            run.journal.save(released)
        student.seen += 1
        run.interrupted = step + 1 == until


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Stopped after five steps; then three more, of which the last was lost by a kill."""
    run = begin(tmp_path / "run")
    go_on(run, until=5)
    run.close()
    run = Run.open(tmp_path / "run")
    go_on(run, lose=7)
    run.close()
    assert len(run.ledger.events) == 8
    return tmp_path / "run"


def cut(ledger: Path, charges: int) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[: 1 + charges]))


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon", 0.5), ("delta", 1e-6), ("relation", "replace-one"), ("noise_seed", 5)]
)
def test_what_was_asked_for_is_what_the_ledger_is_held_to(interrupted: Path, name: str, value: Any) -> None:
    """Or whoever goes on, and asks for what an edited config.json says, is given another promise as if it were that."""
    path = interrupted / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"options": config["options"] | {name: value}}))
    with pytest.raises(DatalensError, match="was begun with another"):
        Run.open(interrupted)
    path.write_text(json.dumps(config))
    Run.open(interrupted).close()


def test_a_run_that_was_interrupted_and_killed_goes_on(interrupted: Path) -> None:
    run = Run.open(interrupted)
    go_on(run)
    assert run.completed == 7
    run.close()


@pytest.mark.parametrize("charges", [0, 3, 4])
def test_a_ledger_shorter_than_the_checkpoint_is_refused(interrupted: Path, charges: int) -> None:
    shutil.rmtree(interrupted / "journal")
    (interrupted / "journal").mkdir()
    cut(interrupted / "ledger.jsonl", charges)
    before = (interrupted / "ledger.jsonl").read_bytes()
    with pytest.raises(TamperedError, match=rf"has {charges} charges, but the checkpoint"):
        Run.open(interrupted)
    assert (interrupted / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("charges", [5, 6])
def test_a_ledger_shorter_than_the_journal_is_refused(interrupted: Path, charges: int) -> None:
    cut(interrupted / "ledger.jsonl", charges)
    with pytest.raises(TamperedError, match=rf"journal/0000000{charges}.release"):
        Run.open(interrupted)


def without_chain(run: Path) -> None:
    """As version 0.1.0 wrote it."""
    latest = run / "checkpoints" / LATEST
    state, facts = load_tensors(latest)
    save_tensors(latest, state, {name: facts[name] for name in ("step", "teachers")})


@pytest.mark.parametrize(("charges", "stands"), [(3, False), (4, False), (8, True)])
def test_a_checkpoint_of_the_first_version_is_compared_by_its_steps(
    interrupted: Path, charges: int, stands: bool
) -> None:
    without_chain(interrupted)
    if stands:
        Run.open(interrupted).close()
        return
    shutil.rmtree(interrupted / "journal")
    (interrupted / "journal").mkdir()
    cut(interrupted / "ledger.jsonl", charges)
    with pytest.raises(TamperedError, match=f"learned from 5 steps, of which they pay for {charges}"):
        Run.open(interrupted)


def recharge(run: Path, charges: int) -> None:
    """Cut, then charged again by a version that did not look: as many charges as before, but other ones."""
    cut(run / "ledger.jsonl", charges)
    ledger = Ledger.open(run / "ledger.jsonl")
    for event in ledger.events[:1] * (8 - charges):
        ledger.charge(event)
    ledger.close()


def test_a_ledger_as_long_but_another_is_refused(interrupted: Path) -> None:
    recharge(interrupted, 2)
    with pytest.raises(TamperedError, match="journal"):
        Run.open(interrupted)
    for path in (interrupted / "journal").iterdir():
        path.unlink()
    with pytest.raises(TamperedError, match="after charge 5 of another one"):
        Run.open(interrupted)


def test_a_ledger_shorter_than_the_releases_is_refused(interrupted: Path) -> None:
    """Nothing else is left to tell: checkpoint and journal are gone, as in a run of moments that is finished."""
    (interrupted / "release").mkdir()
    shutil.copyfile(interrupted / "ledger.jsonl", interrupted / "release" / "ledger.jsonl")
    Run.open(interrupted).close()
    for folder in ("checkpoints", "journal"):
        shutil.rmtree(interrupted / folder)
        (interrupted / folder).mkdir()
    cut(interrupted / "ledger.jsonl", 5)
    with pytest.raises(TamperedError, match=r"release/ledger.jsonl has others"):
        Run.open(interrupted)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 99)])
def test_a_checkpoint_that_cannot_be_read_is_not_judged_here(interrupted: Path, damage: Callable[[Path], None]) -> None:
    """It is refused where it is loaded, with what to do about it."""
    damage(interrupted / "checkpoints" / LATEST)
    Run.open(interrupted).close()


def lost(run: Path, *, journaled: bool = False) -> Path:
    """Take away the checkpoint; and leave the first step's value alone in the journal, or nothing."""
    (run / "checkpoints" / LATEST).unlink()
    for path in (run / "journal").glob("*.release"):
        path.unlink()
    if journaled:
        ledger = Ledger.open(run / "ledger.jsonl")
        first = ledger.events[0]
        assert not isinstance(first, UnknownEvent)
        Journal(run / "journal", ledger).save(Released(value=np.zeros((1, 4)), event=first, number=0))
        ledger.close()
    return run


def test_a_run_that_has_lost_all_it_learned_does_not_replace_its_release(interrupted: Path) -> None:
    (interrupted / "release").mkdir()
    Run.resume(interrupted).close()  # there is a checkpoint
    with pytest.raises(DatalensError, match="neither a checkpoint nor a journal"):
        Run.resume(lost(interrupted))


def test_a_run_without_its_checkpoint_goes_on_where_there_is_nothing_to_replace(interrupted: Path) -> None:
    Run.resume(lost(interrupted)).close()


def test_a_run_without_its_checkpoint_goes_on_from_its_journal(interrupted: Path) -> None:
    (interrupted / "release").mkdir()
    for path in (interrupted / "journal").glob("*.release"):
        path.unlink()
    Run.resume(interrupted).close()  # the checkpoint alone
    Run.resume(lost(interrupted, journaled=True)).close()  # the journal alone, and of it the first step


def test_a_run_without_a_budget_may_begin_again(tmp_path: Path) -> None:
    """There is nothing that it could have less of."""
    asked = dataclasses.replace(options(tmp_path / "run"), epsilon=math.inf)
    budget, settings = make_plan(asked, SCHEMA)
    run = Run.create(
        tmp_path / "run",
        options=asked.remembered(),
        settings=settings,
        budget=budget,
        schema=SCHEMA,
        data_sha256="0" * 64,
    )
    go_on(run, until=5)
    run.close()
    (tmp_path / "run" / "release").mkdir()
    Run.resume(lost(tmp_path / "run")).close()


def test_answers_are_counted_over_an_interruption(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    run.answered = 7
    go_on(run, until=5)
    run.close()
    run = Run.open(tmp_path / "run")
    assert run.answered is None
    go_on(run, until=6)
    assert run.answered == 7
    run.close()


def test_a_file_that_no_run_writes_is_not_taken_for_a_value(interrupted: Path) -> None:
    (interrupted / "journal" / "copy.release").write_bytes(b"")
    with pytest.raises(TamperedError, match=r"journal/copy.release"):
        Run.open(interrupted)
