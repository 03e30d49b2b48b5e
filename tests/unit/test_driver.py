"""The driver by itself, with a method that only charges: the order of things, what is refused, what is said."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datalens import driver
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans.base import Method, Place
from datalens.plans.registry import make_plan
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import SecureNoise
from datalens.run.folder import NoTeachers, Run
from tests.unit.test_parts import votes
from tests.unit.test_wholeness import Counted

SCHEMA = Schema(name="tiny", height=4, width=4, channels=1, classes=("a", "b"), nominal_size=100)
SMALL: dict[str, Any] = {"teachers": 5, "k": 2, "batch": 2, "steps": 4, "basis_size": 4, "warm_start": "off"}


class Fake:
    """A method of known behaviour, and everything that the driver did with it, in its order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.count, self.fingerprint = 40, 7
        self.places: list[Place] = []
        self.stop_after: int | None = None
        self.completed: int | None = None
        self.journaled = True
        self.lost: int | None = None

    def gather(self, records: Any, settings: Any, place: Place) -> Any:
        self.done.append(f"gather {records.schema.name} {(place.folder / 'config.json').exists()}")
        self.places.append(place)
        return SimpleNamespace(count=self.count, fingerprint=self.fingerprint)

    def train(self, run: Run, gathered: Any, settings: Any, place: Place) -> Any:
        self.done.append(f"train {gathered.count}")
        self.places.append(place)
        student = Counted()
        for step in run.steps(settings.steps, student=student, teachers=NoTeachers()):
            if run.journal.find(run.ledger, step=step) is None:
                released = make_mechanism(5000.0, SecureNoise()).release(votes(), run.ledger, step=step)
                if self.journaled:
                    run.journal.save(released)
            student.seen += 1
            if step + 1 == self.stop_after:
                run.interrupted = True
        if self.completed is not None:
            run.completed = self.completed
        run.lost, run.facts["told"] = self.lost, 3
        return "the model"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    method = Method(settings=TopAggSettings, plan=lambda *_: None, gather=made.gather, train=made.train)  # type: ignore[arg-type, return-value]

    def write(run: Path, model: Any, **facts: Any) -> Path:
        said = {name: facts[name] for name in ("completed", "answered")}
        made.done.append(f"release {model} {said} {facts['ledger'].budget.epsilon} {facts['schema'].name}")
        return run / "release"

    monkeypatch.setattr(driver, "method_of", lambda settings: method)
    monkeypatch.setattr("datalens.released.release.write_release", write)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(driver, "say", lines.append)
    return lines


def asked(out: Path, **options: Any) -> TrainOptions:
    return TrainOptions(out=out, **{"data": "tiny", "noise": "gaussian", "device": "cpu", **SMALL, **options})


def go(out: Path, *, schema: Schema = SCHEMA, **options: Any) -> dict[str, Any]:
    given: Any = SimpleNamespace(schema=schema)
    return driver.train(asked(out, **options), records=given)


def unlocked(run: Path) -> bool:
    Run.open(run).close()
    return True


# --- the order of things --------------------------------------------------------------------------------------------


def test_records_are_read_before_there_is_a_run_and_released_after_training(fake: Fake, tmp_path: Path) -> None:
    go(tmp_path / "run")
    release = "release the model {'completed': 4, 'answered': None} 1.0 tiny"
    assert fake.done == ["gather tiny False", "train 40", release]
    assert unlocked(tmp_path / "run")


def test_where_a_method_works(fake: Fake, tmp_path: Path) -> None:
    go(tmp_path / "run", chunk=3)
    assert len(fake.places) == 2 and fake.places[0] is fake.places[1]
    place = fake.places[0]
    assert (place.device, place.folder, place.chunk) == (torch.device("cpu"), tmp_path / "run", 3)
    assert place.world.size == 1 and place.held_out is None  # arrays from Python have no test split
    assert place.options["teachers"] == 5


def test_a_named_set_has_its_test_split_beside(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Any] = []
    monkeypatch.setattr(driver.formats, "load", lambda *given, **named: asked_for.append((given, named)))
    driver.train(asked(tmp_path / "run", data="digits"))
    assert fake.places[0].held_out is not None
    fake.places[0].held_out()
    ((given, named),) = asked_for
    assert given == ("digits", "test") and set(named) == {"folder", "reading"}


def test_the_facts_of_a_run(fake: Fake, tmp_path: Path) -> None:
    found = go(tmp_path / "run", epsilon=2.0)
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl")
    assert found["epsilon_spent"] == ledger.spent() > 0
    sigma = getattr(make_plan(asked(tmp_path / "x", epsilon=2.0), SCHEMA)[1], "sigma", None)
    expected = {
        "run": str(tmp_path / "run"),
        "method": "datalens",
        "epsilon": 2.0,
        "delta": 1e-5,
        "relation": "add-remove",
        "accountant": "exact",
        "steps": 4,
        "queries": 4,
        "noise": "gaussian",
        "private": True,
        "interrupted": False,
        "warm_start": "off",
        "sigma": sigma,
        "told": 3,  # by the method
    }
    assert {name: found[name] for name in expected} == expected
    assert 0 <= found["seconds"] < 1000 and "preset" in found
    ledger.close()


def test_what_is_said(fake: Fake, said: list[str], tmp_path: Path) -> None:
    go(tmp_path / "run")
    opening, closing = said
    assert opening.endswith("; budget ε = 1 (δ = 1e-05, add-remove, exact accountant).")
    assert closing.startswith("done: 4 steps, spent ε = ")
    assert closing.endswith(f"accountant). Report: {tmp_path / 'run' / 'release' / 'report.html'}")


@pytest.mark.parametrize(
    ("options", "private"), [({"noise_seed": 1}, False), ({"epsilon": math.inf}, False), ({}, True)]
)
def test_what_is_not_private_is_stamped(
    fake: Fake, said: list[str], tmp_path: Path, options: dict[str, Any], private: bool
) -> None:
    found = go(tmp_path / "run", **options)
    assert found["private"] is private
    assert [("NOT PRIVATE" in line) for line in said if "budget ε" in line or "spent ε" in line] == [not private] * 2


def test_an_interrupted_run_says_so_and_how_far_it_came(fake: Fake, said: list[str], tmp_path: Path) -> None:
    fake.stop_after = 2
    found = go(tmp_path / "run")
    assert (found["interrupted"], found["steps"]) == (True, 2)
    assert said[-1].startswith("interrupted; continue with --resume. So far: 2 steps, spent")
    fake.stop_after = None
    found = go(tmp_path / "run", resume=True)
    assert (found["interrupted"], found["steps"], said[-1][:14]) == (False, 4, "done: 4 steps,")
    assert found["queries"] == 4


def test_charges_that_were_lost_are_said(fake: Fake, said: list[str], tmp_path: Path) -> None:
    fake.completed = 3
    go(tmp_path / "run")
    assert said[-1].startswith("done: 3 of 4 steps (1 more charged, and lost by an interruption), spent")
    fake.lost = 2
    go(tmp_path / "run", resume=True)
    assert "(2 more charged, and lost by an interruption)" in said[-1]


def test_a_run_that_has_learned_nothing_releases_nothing(fake: Fake, tmp_path: Path) -> None:
    fake.completed = 0
    with pytest.raises(BudgetExceeded, match="interruptions lost every release"):
        go(tmp_path / "run")
    assert not any(line.startswith("release") for line in fake.done)
    assert unlocked(tmp_path / "run")


def test_what_was_learned_is_kept_before_it_is_released(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "keep", lambda self: fake.done.append("keep"))
    go(tmp_path / "run")
    assert [line.split()[0] for line in fake.done] == ["gather", "train", "keep", "release"]


def test_a_board_is_opened_where_it_is_asked_for(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "open_board", lambda self: fake.done.append("board"))
    monkeypatch.setattr(Run, "show_release", lambda self, release: fake.done.append(f"show {release.name}"))
    go(tmp_path / "a", tensorboard=True)
    assert [line.split()[0] for line in fake.done] == ["gather", "board", "train", "release", "show"]
    fake.done.clear()
    go(tmp_path / "b")
    assert "board" not in fake.done


# --- what is refused, and when ----------------------------------------------------------------------------------------


def test_a_place_that_is_taken_is_found_before_records_are_read(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(DatalensError, match="exists already"):
        go(tmp_path / "run")
    assert fake.done == []


def test_a_budget_without_room_is_found_before_records_are_read(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise BudgetExceeded("no room")

    monkeypatch.setattr(driver, "check_room", full)
    with pytest.raises(BudgetExceeded, match="no room"):
        go(tmp_path / "run")
    assert fake.done == [] and not (tmp_path / "run").exists()


def test_a_run_that_cannot_succeed_is_not_begun(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopAggSettings, "refusal", lambda *_: "too little of everything")
    with pytest.raises(DatalensError, match="cannot succeed, so nothing was charged: too little of everything"):
        go(tmp_path / "run")
    assert fake.done == [] and not (tmp_path / "run").exists()


def test_too_few_records_are_found_before_there_is_a_run(fake: Fake, tmp_path: Path) -> None:
    fake.count = 4
    with pytest.raises(DatalensError, match="4 records are too few for 5 teachers"):
        go(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fake.count = 5
    assert go(tmp_path / "run")["steps"] == 4


def test_warnings_come_before_the_records_are_read(
    fake: Fake, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "warnings", lambda *_: ["one", "two"])
    monkeypatch.setattr(driver, "read_off_warnings", lambda schema: ["three"])
    go(tmp_path / "run")
    assert said[:3] == ["warning: one", "warning: two", "warning: three"]
    said.clear()
    go(tmp_path / "run", resume=True)
    assert not any(line.startswith("warning") for line in said)


def test_other_records_are_not_gone_on_with(fake: Fake, tmp_path: Path) -> None:
    fake.stop_after = 2
    go(tmp_path / "run")
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    fake.fingerprint = 8
    with pytest.raises(DatalensError, match=r"tiny is not the data .* was begun with"):
        go(tmp_path / "run", resume=True)
    fake.fingerprint = 7
    with pytest.raises(DatalensError, match="tiny is not the data this run was begun with"):
        go(tmp_path / "run", resume=True, schema=dataclasses.replace(SCHEMA, nominal_size=101))
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before and unlocked(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data_sha256"] == f"{7:064x}"


def test_a_run_whose_reservation_is_refused_is_not_left_locked(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.stop_after = 2
    go(tmp_path / "run")
    went: list[Path] = []

    def refuse(run: Run) -> None:
        went.append(run.path)
        raise DatalensError("a copy was resumed")

    monkeypatch.setattr(driver, "go_on", refuse)
    with pytest.raises(DatalensError, match="a copy was resumed"):
        go(tmp_path / "run", resume=True)
    assert went == [tmp_path / "run"] and len(fake.done) == 3 and unlocked(tmp_path / "run")


def test_a_run_that_fails_is_not_left_locked(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "_release", fails)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run")
    assert unlocked(tmp_path / "run")


# --- several ranks ----------------------------------------------------------------------------------------------------


class Several:
    """A rank of several, which all say the same."""

    def __init__(self, size: int, rank: int, parts: list[bytes] | None = None) -> None:
        self.size, self.rank, self.leads, self.device = size, rank, rank == 0, torch.device("cpu")
        self.parts, self.agreed = parts, list[dict[str, Any]]()

    def together(self, work: Callable[[], Any]) -> Any:
        return work()

    def agree(self, facts: dict[str, Any]) -> None:
        self.agreed.append(facts)

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *(self.parts or [])]

    def __enter__(self) -> "Several":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_counts_and_fingerprints_are_of_all_ranks() -> None:
    def whole(world: Any, fingerprint: int = 5) -> driver.Data:
        return driver._whole(SimpleNamespace(count=3, fingerprint=fingerprint), world)  # type: ignore[arg-type]

    assert whole(Several(1, 0)) == driver.Data(count=3, fingerprint=5)
    assert whole(Several(3, 0, [b"4 6", b"10 100"])) == driver.Data(count=17, fingerprint=111)
    assert whole(Several(2, 0, [b"1 8"]), fingerprint=2**256 - 1) == driver.Data(count=4, fingerprint=7)
    assert whole(Several(2, 0, [f"1 {2**255}".encode()]), fingerprint=2**255 - 1).fingerprint == 2**256 - 1


def test_who_may_have_ranks() -> None:
    settings: Any = SimpleNamespace(least_records=3, one_process="runs in one process")
    alone: Any = SimpleNamespace(follow=None, teachers=True)
    many: Any = SimpleNamespace(follow=print, teachers=True)
    records: Any = SimpleNamespace(follow=print, teachers=False)
    driver._check_ranks(settings, alone, Several(1, 0))  # type: ignore[arg-type]
    driver._check_ranks(settings, many, Several(3, 0))  # type: ignore[arg-type]
    with pytest.raises(DatalensError, match="runs in one process"):
        driver._check_ranks(settings, alone, Several(2, 0))  # type: ignore[arg-type]
    with pytest.raises(DatalensError, match="4 ranks are more than 3 teachers: start at most 3"):
        driver._check_ranks(settings, many, Several(4, 0))  # type: ignore[arg-type]
    driver._check_ranks(settings, records, Several(4, 0))  # type: ignore[arg-type]


def following(monkeypatch: pytest.MonkeyPatch, fake: Fake, world: Several, *, teachers: bool = True) -> None:
    from datalens.run.ranks import World

    def follow(schema: Schema, gathered: Any, settings: Any, place: Place) -> None:
        fake.done.append(f"follow {schema.name} {gathered.count}")

    method = dataclasses.replace(driver.method_of(None), follow=follow, teachers=teachers)  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "method_of", lambda settings: method)
    monkeypatch.setattr(World, "start", classmethod(lambda cls, device: world))


def test_a_rank_that_follows_has_no_run(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "run")
    fake.done.clear()
    following(monkeypatch, fake, Several(2, 1, [b"0 0"]))
    assert go(tmp_path / "run", resume=True) == {}
    assert fake.done == ["gather tiny True", "follow tiny 40"]
    assert unlocked(tmp_path / "run")


def test_a_method_of_one_process_is_refused_before_records_are_read(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datalens.run.ranks import World

    monkeypatch.setattr(World, "start", classmethod(lambda cls, device: Several(2, 0, [b"0 0"])))
    with pytest.raises(DatalensError, match="runs in one process"):
        go(tmp_path / "run")
    assert fake.done == [] and not (tmp_path / "run").exists()


def test_only_ranks_of_several_wait_for_the_folder(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run is new: a rank that follows creates none."""
    waited: list[bool] = []
    monkeypatch.setattr(driver, "_check_folder", lambda *given, wait: waited.append(wait))
    go(tmp_path / "run")
    following(monkeypatch, fake, Several(2, 1, [b"0 0"]))
    assert go(tmp_path / "other") == {}
    assert waited == [False, True] and not (tmp_path / "other").exists()


def test_ranks_agree_on_where_and_what(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "run")
    world = Several(2, 1, [b"0 0"])
    following(monkeypatch, fake, world)
    go(tmp_path / "run", resume=True)
    (facts,) = world.agreed
    assert facts["out"] == str(tmp_path / "run") and facts["resume"] is True and "the setting k" in facts


@pytest.mark.parametrize("teachers", [True, False])
def test_the_first_of_several_ranks_leads_and_leaves_keeping_teachers_to_checkpoints(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teachers: bool
) -> None:
    monkeypatch.setattr(Run, "keep", lambda self: fake.done.append("keep"))
    following(monkeypatch, fake, Several(2, 0, [b"2 1"]), teachers=teachers)
    assert go(tmp_path / "run")["steps"] == 4
    assert ("keep" in fake.done) == (not teachers)  # those of other ranks have been dismissed by then
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data_sha256"] == f"{8:064x}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    slept: list[float] = []
    monkeypatch.setattr(driver.time, "monotonic", lambda: float(sum(slept)))
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: slept.append(max(seconds, 1.0)))
    return iter([slept])


def test_a_folder_that_other_machines_do_not_see(fake: Fake, tmp_path: Path, clock: Iterator[list[float]]) -> None:
    slept = next(clock)
    job: Any = SimpleNamespace(options={"data": "tiny"})
    data = driver.Data(count=1, fingerprint=7)
    with pytest.raises(DatalensError, match="is not there: --out must be on a file system that all machines share"):
        driver._check_folder(asked(tmp_path / "run"), job, data, wait=False)
    assert not slept
    with pytest.raises(DatalensError, match="is not there"):
        driver._check_folder(asked(tmp_path / "run"), job, data, wait=True)
    assert driver.NEWS_SECONDS <= sum(slept) <= driver.NEWS_SECONDS + 2
    go(tmp_path / "run")
    slept.clear()
    driver._check_folder(asked(tmp_path / "run"), job, data, wait=True)
    assert not slept
