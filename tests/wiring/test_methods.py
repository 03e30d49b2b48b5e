"""Every method there is, under every relation it offers: nothing crosses but what is paid for."""

import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from datalens.errors import DatalensError
from datalens.evaluate.audits import wiring
from datalens.evaluate.audits.wiring_runs import RELATIONS, SGD, asked, subject
from datalens.plans.plugins import COMPRESSORS
from datalens.plans.registry import method_named, names
from datalens.privacy.events import Relation
from datalens.private.pool import Pool
from tests.e2e.test_plugins import blocks, install

OURS = dict(asked(None))


@pytest.mark.parametrize(("relation", "person"), RELATIONS)
@pytest.mark.parametrize("name", OURS)
def test_nothing_crosses_but_what_is_paid_for(name: str, relation: Relation, person: bool, tmp_path: Path) -> None:
    found = subject(name, OURS[name], relation, person=person)
    if found is not None:
        assert wiring.look(found, tmp_path, checks=wiring.checks_of(found)) == []


def test_the_whole_registry_is_walked() -> None:
    walked = {options.get("method", SGD) for options in OURS.values()}
    assert walked == {*names(), SGD}
    assert {options["compress"] for options in OURS.values() if "compress" in options} == set(COMPRESSORS)
    assert {"datalens moments", "datalens refined"} <= set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_relations_and_units_that_are_not_offered_are_refused(name: str) -> None:
    """So that what is left out above is left out by the method, and not by a mistake of this test."""
    method = OURS[name].get("method", SGD)
    offered = {(relation, person): subject(name, OURS[name], relation, person=person) for relation, person in RELATIONS}
    assert offered[("add-remove", False)] is not None
    assert (offered[("add-remove", True)] is not None) == (method == SGD or method_named(method).persons)
    sampled = method in ("dpgan", "dpsgd-gan", SGD) or "refine" in OURS[name]
    assert (offered[("replace-one", False)] is None) == sampled


def test_a_method_that_cannot_be_planned_is_an_error() -> None:
    with pytest.raises(DatalensError, match="no small run of odd could be planned"):
        subject("odd", {"method": "datalens", "warm_start": "off", "basis_size": 10**6}, "add-remove", person=False)


def test_a_method_of_this_name() -> None:
    assert [name for name, _ in asked("dpgan")] == ["dpgan"]
    with pytest.raises(DatalensError, match="--method nosuch is unknown"):
        wiring.report("nosuch")


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 where all is well, and 1 with what was found where it is not."""
    from datalens.cli.main import main
    from datalens.methods import dpmerf

    rows = dpmerf.embed

    def printing(pool: Pool, *rest: object, **named: object) -> object:
        print(pool.count)
        return rows(pool, *rest, **named)  # type: ignore[arg-type]

    for embed, code in ((rows, 0), (printing, 1)):
        monkeypatch.setattr(dpmerf, "embed", embed)
        with pytest.raises(SystemExit) as ended:
            main(["audit", "wiring", "--method", "dpmerf"])
        assert (ended.value.code or 0) == code
        said = capsys.readouterr().out
        assert ("BROKEN" in said, "what is printed differs" in said) == (code == 1, code == 1)


# --- other packages' ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package of docs/extending.md."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, tomllib.loads(blocks("toml")[0])["project"], "\n".join(blocks("python")))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("toy_lens", None)


@pytest.mark.usefixtures("toy")
def test_plugins_are_walked_too(tmp_path: Path) -> None:
    theirs = {name: options for name, options in asked(None) if name not in OURS}
    assert set(theirs) == {"datalens loudest", "datalens plain", "means"}
    for name, options in theirs.items():
        found = subject(name, options, "add-remove", person=False)
        assert found is not None
        assert wiring.look(found, tmp_path / name) == []


@pytest.mark.usefixtures("toy")
def test_a_plugin_that_looks_at_records_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that divides by the true counts of its classes."""
    import toy_lens  # type: ignore[import-not-found]

    kept: list[float] = []
    gather, means = toy_lens.gather, toy_lens.class_means

    def peeking(records, settings, place):
        found = gather(records, settings, place)
        kept.append(float(found.count))
        return found

    monkeypatch.setattr(toy_lens, "METHOD", dataclasses.replace(toy_lens.METHOD, gather=peeking))
    monkeypatch.setattr(toy_lens, "class_means", lambda noisy, **n: means(noisy, **n | {"floor": kept[-1]}))
    found = subject("means", dict(asked("means"))["means"], "add-remove", person=False)
    assert found is not None
    assert {fault.kind for fault in wiring.look(found, tmp_path)} == {"records"}


@pytest.mark.usefixtures("toy")
def test_a_plugin_with_half_the_noise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_lens

    class Half:
        def __init__(self, source):
            self.origin, self._source = source.origin, source

        def standard_normal(self, count):
            return self._source.standard_normal(count) / 2

    make = toy_lens.PlainGaussian.__init__
    monkeypatch.setattr(toy_lens.PlainGaussian, "__init__", lambda self, sigma, noise: make(self, sigma, Half(noise)))
    found = subject("plain", dict(asked("datalens"))["datalens plain"], "add-remove", person=False)
    assert found is not None
    assert {fault.kind for fault in wiring.look(found, tmp_path)} == {"noise"}
