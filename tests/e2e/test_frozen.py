"""Releases, runs and budgets that earlier versions wrote can still be checked, used and finished.

`tools/freeze.py` wrote them, and says what is in them; the next version adds a folder of its own.
"""

import dataclasses
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Result

Call = Callable[..., Result]

FIXTURES = Path(__file__).parents[1] / "fixtures"
ARCHIVES = {f"{path.parent.name} {path.name.removesuffix('.tar.xz')}": path for path in FIXTURES.glob("frozen-*/*.xz")}
FOLDERS = {f"{path.parent.name} {path.name}": path for path in FIXTURES.glob("release-*/*")}
INTERRUPTED = sorted(name for name in ARCHIVES if name.endswith(("-stopped", "-killed")))
RELEASES = sorted({*ARCHIVES, *FOLDERS} - {name for name in ARCHIVES if name.endswith("-killed")})
WITH_TEST_IMAGES = [name for name in RELEASES if "persons" not in name and "texture" not in name]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A copy to work on: the run, or the release where there is nothing else, and what else lay beside it."""

    run: Path
    beside: Path
    how: str
    verb: str
    data: str

    @property
    def release(self) -> Path:
        return self.run / "release" if (self.run / "release").is_dir() else self.run

    @property
    def is_classifier(self) -> bool:
        return (self.release / "model.safetensors").exists()


@pytest.fixture
def frozen(request: pytest.FixtureRequest, tmp_path: Path) -> Frozen:
    """The fixture of this name, unpacked; paths in its config.json are those it now has."""
    name = request.param
    if name in FOLDERS:
        run = Path(shutil.copytree(FOLDERS[name], tmp_path / "run"))
        return Frozen(run=run, beside=tmp_path, how="finished", verb="", data="digits")
    with tarfile.open(ARCHIVES[name]) as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("/frozen", str(tmp_path)), encoding="utf-8")
    facts = json.loads((tmp_path / "case.json").read_text(encoding="utf-8"))
    return Frozen(run=tmp_path / "run", beside=tmp_path, **{key: facts[key] for key in ("how", "verb", "data")})


@pytest.fixture
def narrow() -> Iterator[None]:
    """Generators as narrow as those of the frozen runs, in every module that makes them, and in no test after this."""
    from datalens.released import generator

    make = generator.dcgan_architecture

    def narrowed(*arguments: Any, **named: Any) -> Any:
        return dataclasses.replace(make(*arguments, **named), dense=4, widths=(2, 2))

    def replace(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("datalens") and vars(module).get("dcgan_architecture") is old:
                module.dcgan_architecture = new  # type: ignore[attr-defined]

    replace(make, narrowed)
    yield
    replace(narrowed, make)  # also where a module was imported meanwhile


def test_there_are_frozen_runs_of_every_method() -> None:
    """Or the tests below would pass with nothing to look at."""
    ours = {name.split()[1] for name in ARCHIVES if name.startswith("frozen-0.2.0.dev0 ")}
    others = {"dcgan", "dpmerf", "gswgan", "dpgan", "dpsgd-gan", "pategan", "gpate"}
    assert ours >= others | {"moments-texture", "topagg", "paper-compact", "klevel", "sketch", "sgd", "budget"}
    assert ours >= {"moments-persons", "topagg-persons", "sgd-persons", "moments-replace-one", "topagg-replace-one"}
    assert ours >= {"topagg-stopped", "topagg-killed", "moments-killed", "sgd-stopped", "budget-killed"}
    assert set(FOLDERS) == {"release-0.1.0 moments", "release-0.1.0 sgd"}
    assert {*RELEASES, *INTERRUPTED} == {*ARCHIVES, *FOLDERS}


@pytest.mark.parametrize("frozen", RELEASES, indirect=True)
def test_it_stands_and_can_be_reported_on(frozen: Frozen, datalens: Call) -> None:
    found = datalens("verify", frozen.run, "--json").succeeded().json
    certificate = json.loads((frozen.release / "certificate.json").read_text(encoding="utf-8"))
    assert found["ok"] and found["problems"] == []
    assert found["certificate_version"] == certificate["version"]
    assert found["private"] == certificate["private"]
    assert float(found["epsilon_spent"]) == pytest.approx(float(certificate["epsilon_spent"]), rel=1e-6)
    if frozen.verb:
        assert certificate["version"] == 3 and not found["qualified"]
        assert datalens("verify", frozen.run, "--require-version", 3, "--json").succeeded().json["ok"]
    reported = datalens("report", frozen.run, "--json").succeeded().json
    assert reported["private"] == found["private"]
    assert (reported["owner"] is not None) == bool(frozen.verb)
    again = datalens("verify", frozen.run, "--json").succeeded().json
    assert again["ok"] and not [note for note in again["not_stated"] if note.startswith("report.html")]


@pytest.mark.parametrize("frozen", RELEASES, indirect=True)
def test_it_makes_the_images_it_made(frozen: Frozen, datalens: Call) -> None:
    """As the version that froze it drew them, but for what another torch rounds differently."""
    target = frozen.beside / "drawn.npz"
    if frozen.is_classifier:
        assert "holds a classifier" in datalens("sample", frozen.run, "--out", target).refused()
        return
    datalens("sample", frozen.run, "--count", 20, "--seed", 3, "--out", target).succeeded()
    drawn, before = np.load(target), frozen.beside / "images.npz"
    assert len(drawn["images"]) == len(drawn["labels"]) == 20
    if before.exists():
        assert np.array_equal(drawn["labels"], np.load(before)["labels"])
        assert (
            np.abs(drawn["images"].astype(int) - np.load(before)["images"].reshape(drawn["images"].shape)).mean() < 0.1
        )
        assert datalens("verify", frozen.run, "--samples", before, "--json").succeeded().json["ok"]


@pytest.mark.parametrize("frozen", WITH_TEST_IMAGES, indirect=True)
def test_it_can_be_evaluated(frozen: Frozen, datalens: Call) -> None:
    assert frozen.data == "digits"
    quick = ("--classifier", "logistic", "--seeds", 1, "--epochs", 1, "--count", 50, "--device", "cpu")
    found = datalens("evaluate", frozen.run, "--data", "digits", *quick, "--json")
    if frozen.is_classifier:
        assert "holds a classifier" in found.refused()
        return
    assert 0 <= found.succeeded().json["accuracy"] <= 1


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("frozen", INTERRUPTED, indirect=True)
def test_an_interrupted_one_is_finished(frozen: Frozen, datalens: Call) -> None:
    """Nothing that was charged is forgotten, and what was kept is not asked again."""
    before = (frozen.run / "ledger.jsonl").read_bytes()
    settings = json.loads((frozen.run / "config.json").read_text(encoding="utf-8"))["settings"]
    found = datalens(frozen.verb, "--resume", "--out", frozen.run, "--device", "cpu", "--json").succeeded().json
    assert not found["interrupted"] and (found["private"] or found["epsilon"] == "inf")
    after = (frozen.run / "ledger.jsonl").read_bytes()
    assert after.startswith(before)
    assert found["steps"] == settings.get("steps", 4)
    charged = [json.loads(line)["event"]["step"] for line in after.splitlines()[1:]]
    twice = settings["method"] == "gpate"  # for its question, and for its answers
    assert all(charged.count(step) <= 1 + twice for step in charged)
    verified = datalens("verify", frozen.run, "--json").succeeded().json
    assert verified["ok"] and float(verified["epsilon_spent"]) <= float(found["epsilon"])
    assert not (frozen.run / "parked.json").exists()
    if not frozen.is_classifier:
        datalens("sample", frozen.run, "--count", 5, "--out", frozen.beside / "drawn.npz").succeeded()


@pytest.mark.parametrize("frozen", [name for name in INTERRUPTED if name.endswith(" moments-killed")], indirect=True)
def test_a_frozen_run_of_moments_does_not_go_on_with_other_records(frozen: Frozen, datalens: Call) -> None:
    """Today's version knows the data by hashes in another order, and looks for the earlier ones too."""
    first, second = sorted((frozen.beside / frozen.data / "left").iterdir())[:2]
    other = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(other)  # the same records in another order, which that version told apart
    assert "is not the data" in datalens("train", "--resume", "--out", frozen.run).refused()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("frozen", [name for name in ARCHIVES if " budget" in name], indirect=True)
def test_a_budget_knows_its_run(frozen: Frozen, datalens: Call) -> None:
    """It is read as it was written, what it set aside covers the run, and a run that goes on sets nothing aside."""
    before = datalens("budget", frozen.beside / "budget", "--json").succeeded().json
    config = json.loads((frozen.run / "config.json").read_text(encoding="utf-8"))
    assert [run["run"] for run in before["runs"]] == [config["data_budget"]["run"]] and before["data"] == ["digits"]
    assert 0 < config["options"]["epsilon"] * (1 - 1e-6) <= before["epsilon_reserved"] < before["epsilon"]
    if frozen.how == "finished":
        return
    datalens(frozen.verb, "--resume", "--out", frozen.run).succeeded()
    assert datalens("budget", frozen.beside / "budget", "--json").succeeded().json == before
