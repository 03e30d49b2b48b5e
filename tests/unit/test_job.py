"""What a run is to do: planned from public facts, or what it was begun with, whatever is asked for later."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.job import PROMISED, Job, make_job
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.run.folder import Run

SCHEMA = Schema(name="tiny", height=4, width=4, channels=1, classes=("a", "b"), nominal_size=100)
SMALL: dict[str, Any] = {"data": "digits", "teachers": 5, "k": 2, "batch": 2, "steps": 3, "basis_size": 4}


def asked(out: Path, **options: Any) -> TrainOptions:
    return TrainOptions(out=out, **{**SMALL, "warm_start": "off", "noise": "gaussian", **options})


def resumed(out: Path, **options: Any) -> TrainOptions:
    return TrainOptions(out=out, resume=True, **options)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    return begin(asked(tmp_path / "run"))


def begin(options: TrainOptions) -> Path:
    budget, settings = make_plan(options, SCHEMA)
    facts: dict[str, Any] = {"settings": settings, "budget": budget, "schema": SCHEMA, "data_sha256": "0" * 64}
    Run.create(options.out, options=options.remembered(), **facts).close()
    return options.out


def test_a_new_run_is_planned_from_its_options_and_the_schema(tmp_path: Path) -> None:
    job = make_job(asked(tmp_path / "run", epsilon=2.0), None, None)
    assert (job.begun, job.schema.name, job.options["teachers"]) == (False, "digits", 5)
    assert job.budget is not None and job.budget.epsilon == 2.0
    assert job.records is None  # a named set is opened when it is read
    assert getattr(job.settings, "teachers", None) == 5
    with pytest.raises(DatalensError, match="name the data"):
        make_job(dataclasses.replace(asked(tmp_path / "run"), data=None), None, None)


def test_records_that_are_given_say_what_their_schema_is(tmp_path: Path) -> None:
    class Given:
        schema = SCHEMA

    given: Any = Given()
    job = make_job(asked(tmp_path / "run"), None, given)
    assert (job.schema, job.records) == (SCHEMA, given)


def test_a_run_goes_on_with_what_it_was_begun_with(begun: Path) -> None:
    given: Any = object()
    job = make_job(resumed(begun), set(), given)
    assert job.begun and job.budget is None and job.records is given
    assert (job.schema, job.options["steps"], job.options["data"]) == (SCHEMA, 3, "digits")
    assert job.settings.as_dict() == json.loads((begun / "config.json").read_text())["settings"]


# A default that is named is meant; a default that is not named is not.
NAMED: list[tuple[dict[str, Any], set[str] | None, str]] = [
    ({"epsilon": 2.0}, {"epsilon"}, "epsilon 1.0"),
    ({"epsilon": 2.0}, None, "epsilon 1.0"),
    ({"seed": 5}, {"seed"}, "seed 0"),
    ({"seed": 5}, None, "seed 0"),
    ({"teachers": 6}, {"teachers"}, "teachers 5"),
    ({"teachers": 6}, None, "teachers 5"),
    ({"bins": 6}, None, "bins None"),  # of another method
    ({"noise_seed": 1}, {"noise_seed"}, "noise-seed None"),
]


@pytest.mark.parametrize(("options", "given", "said"), NAMED)
def test_what_was_asked_for_first_is_not_changed(
    begun: Path, options: dict[str, Any], given: set[str] | None, said: str
) -> None:
    with pytest.raises(DatalensError, match=f"was begun with {said}; --resume cannot change it"):
        make_job(resumed(begun, **options), given, None)


@pytest.mark.parametrize("name", PROMISED)
def test_what_is_promised_is_never_taken_for_a_default(tmp_path: Path, name: str) -> None:
    """From Python nobody says which options were named: fit(epsilon=1) must not go on with a run of epsilon 8."""
    other: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6, "relation": "replace-one", "noise_seed": 3}
    run = begin(asked(tmp_path / "run", **{name: other[name]}))
    with pytest.raises(DatalensError, match=f"begun with {name.replace('_', '-')} "):
        make_job(resumed(run), None, None)
    assert make_job(resumed(run), set(), None).begun  # the command line says that it was not named
    assert make_job(resumed(run, **{name: other[name]}), None, None).begun


def test_defaults_that_were_not_named_are_not_asked_for(tmp_path: Path) -> None:
    run = begin(asked(tmp_path / "run", seed=7))
    assert make_job(resumed(run), None, None).options["seed"] == 7
    with pytest.raises(DatalensError, match="seed 7"):
        make_job(resumed(run, seed=0), {"seed"}, None)


def test_a_budget_that_nothing_was_reserved_in_is_not_taken_up_later(begun: Path, tmp_path: Path) -> None:
    for given in (None, {"budget"}):
        with pytest.raises(DatalensError, match="begun without a budget, so nothing is reserved"):
            make_job(resumed(begun, budget=tmp_path / "budget"), given, None)
    other = begin(asked(tmp_path / "other", budget=tmp_path / "one"))
    with pytest.raises(DatalensError, match=r"was begun with budget .*one; --resume cannot change it"):
        make_job(resumed(other, budget=tmp_path / "two"), None, None)


def test_each_command_goes_on_with_its_own_runs(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(DatalensError, match=r"begun by `datalens train`"):
        make_job(resumed(begun, method="sgd"), set(), None)
    run = begin(TrainOptions(data="digits", out=tmp_path / "s", method="sgd", noise_seed=1, accountant="rdp-improved"))
    with pytest.raises(DatalensError, match=r"begun by `datalens sgd`"):
        make_job(resumed(run), set(), None)
    assert make_job(resumed(run, method="sgd"), set(), None).begun


def test_settings_that_no_run_can_be_done_with_are_refused(begun: Path) -> None:
    config = json.loads((begun / "config.json").read_text())
    config["settings"]["k"] = 10**6
    (begun / "config.json").write_text(json.dumps(config))
    with pytest.raises(DatalensError, match="k"):
        make_job(resumed(begun), set(), None)


def test_a_run_that_torchrun_started_again_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datalens.run.ranks import launch

    options = asked(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not make_job(options, set(), None).begun  # killed before there was a run
    budget, settings = make_plan(options, SCHEMA)
    facts: dict[str, Any] = {"settings": settings, "budget": budget, "schema": SCHEMA, "data_sha256": "0" * 64}
    Run.create(options.out, options=options.remembered(), launch=launch(), **facts).close()
    assert make_job(options, set(), None).begun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not make_job(options, set(), None).begun


# --- what all ranks must agree on -------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Job], Job]] = {
    "resume": lambda job: dataclasses.replace(job, begun=True),
    "the data set": lambda job: dataclasses.replace(job, schema=dataclasses.replace(job.schema, name="other")),
    "the setting seed": lambda job: dataclasses.replace(job, settings=dataclasses.replace(job.settings, seed=9)),  # type: ignore[call-arg]
    "the budget": lambda job: dataclasses.replace(job, budget=None),
    "nominal-size": lambda job: dataclasses.replace(job, options={**job.options, "nominal_size": 3}),
    "k": lambda job: dataclasses.replace(job, options={**job.options, "k": 3}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_ranks_compare_all_that_decides_a_run(tmp_path: Path, name: str) -> None:
    job = make_job(asked(tmp_path / "run"), None, None)
    facts, other = job.facts(), CHANGES[name](job).facts()
    assert [fact for fact in facts if facts[fact] != other[fact]] == [name]
    assert set(facts) == set(other) and {"the version of datalens", "the version of torch"} <= set(facts)


def test_ranks_compare_options_that_only_one_was_given(tmp_path: Path) -> None:
    bare = make_job(asked(tmp_path / "run"), None, None)
    more = dataclasses.replace(bare, options={**bare.options, "gamma": 0.5})
    assert {name for name in bare.facts() if bare.facts()[name] != more.facts()[name]} == {"gamma"}


def test_a_board_that_cannot_be_written_is_said_before_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise DatalensError("no tensorboard")

    monkeypatch.setattr("datalens.job.writer_class", missing)
    with pytest.raises(DatalensError, match="no tensorboard"):
        make_job(asked(tmp_path / "run", tensorboard=True), None, None)
    assert not make_job(asked(tmp_path / "run"), None, None).begun


def test_the_data_set_of_a_job_is_read_as_its_options_say(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "own.npz"
    np.savez(path, images=np.zeros((20, 8, 8), np.uint8), kind=np.arange(20) % 2, classes=("x", "y"))
    job = make_job(asked(tmp_path / "run", data=str(path), nominal_size=33, label="kind"), None, None)
    assert (job.schema.nominal_size, job.schema.classes, job.schema.shape) == (33, ("x", "y"), (1, 8, 8))
    assert job.records is not None
