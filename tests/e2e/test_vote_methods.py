"""PATE-GAN and G-PATE through the commands: train, go on, sample, verify; and what they refuse."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from datalens.data import formats
from datalens.errors import DatalensError
from datalens.methods.gpate import GPateSettings
from datalens.methods.pategan import PateGanSettings
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from tests.e2e.conftest import call

pytestmark = pytest.mark.usefixtures("quickly")

SMALL = ("--data", "digits", "--preset", "quick", "--teachers", "20", "--batch", "10", "--steps", "2")
ASKED = {
    "pategan": ("--method", "pategan", "--noise", "gaussian"),
    "pategan-laplace": ("--method", "pategan", "--aggregate", "laplace"),
    "pategan-convolutional": ("--method", "pategan", "--network", "compact", "--basis", "pixel"),
    "gpate": ("--method", "gpate", "--threshold", "0.1"),
}


@pytest.mark.parametrize("name", list(ASKED))
def test_train_resume_sample_verify(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = call("train", *SMALL, *ASKED[name], "--out", run, "--json").succeeded().json
    assert trained["private"] and trained["steps"] == 2
    verified = call("verify", run, "--json").succeeded().json
    assert verified["ok"]
    assert (0.5 if name == "gpate" else 0.99) < verified["epsilon_spent"] <= 1.0
    call("sample", run, "--count", "20", "--out", tmp_path / "images.npz").succeeded()

    ledger = (run / "ledger.jsonl").read_text()
    whole = (run / "release" / "generator.safetensors").read_bytes()
    shutil.rmtree(run / "release")
    call("train", "--out", run, "--resume").succeeded()
    assert (run / "release" / "generator.safetensors").read_bytes() == whole
    assert (run / "ledger.jsonl").read_text() == ledger  # nothing was asked twice

    certificate = json.loads((run / "release" / "certificate.json").read_text())
    certificate["settings"]["batch"] = 5  # as if half of the queries had been asked
    (run / "release" / "certificate.json").write_text(json.dumps(certificate))
    found = call("verify", run, "--json")
    assert found.code == 1
    assert any("other releases" in problem for problem in found.json["problems"])


@pytest.mark.parametrize("name", ["pategan-laplace", "gpate"])
def test_a_run_that_lost_its_checkpoint_goes_on_from_the_journal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after kill -9: what was paid for is used, and the end is the same."""
    from datalens.run import folder

    run = tmp_path / "run"
    monkeypatch.setattr(folder, "CHECKPOINT_BYTES", 0)  # the journal alone carries the run
    call("train", *SMALL, *ASKED[name], "--out", run).succeeded()
    ledger, whole = (run / "ledger.jsonl").read_text(), (run / "release" / "generator.safetensors").read_bytes()
    shutil.rmtree(run / "release")
    call("train", "--out", run, "--resume").succeeded()
    assert (run / "ledger.jsonl").read_text() == ledger
    assert (run / "release" / "generator.safetensors").read_bytes() == whole
    lost = next((run / "journal").iterdir())
    lost.unlink()
    call("train", "--out", run, "--resume")
    after = (run / "ledger.jsonl").read_text().splitlines()
    assert call("verify", run, "--json").succeeded().json["epsilon_spent"] <= 1.0
    assert len(after) >= len(ledger.splitlines())


def planned(**fields: Any) -> Any:
    options = TrainOptions(out=Path("nowhere"), **({"data": "mnist"} | fields))
    schema = formats.schema("mnist", nominal_size=None)
    budget, settings = make_plan(options, schema)
    return settings, settings.costs(schema, budget)


@pytest.mark.parametrize("preset", ["paper", "quick"])
@pytest.mark.parametrize("epsilon", [1.0, 10.0, math.inf])
@pytest.mark.parametrize("accountant", ["exact", "rdp-improved"])
def test_plans(preset: str, epsilon: float, accountant: Any) -> None:
    common: dict[str, Any] = {"preset": preset, "epsilon": epsilon, "accountant": accountant}
    for method in ("pategan", "gpate"):
        settings, parts = planned(method=method, **common)
        assert settings.teachers == (4000 if (method, preset) == ("gpate", "paper") else 1000)
        assert settings.from_dict(settings.as_dict()) == settings
        assert (settings.sigma > 0) is math.isfinite(epsilon)
        if math.isfinite(epsilon):
            assert sum(part["share"] for part in parts) == pytest.approx(1.0)
    laplace, _ = planned(method="pategan", aggregate="laplace", **common)
    assert isinstance(laplace, PateGanSettings)
    assert laplace.noise == ("gaussian" if math.isinf(epsilon) else "discrete-laplace")


def test_the_paper_preset_says_what_is_asked() -> None:
    settings, parts = planned(method="gpate", epsilon=10.0)
    assert isinstance(settings, GPateSettings)
    assert settings.queries == settings.batch * settings.projections
    assert settings.sigma_check == pytest.approx(6 * settings.sigma)
    assert parts[0]["sensitivity"] == pytest.approx(math.sqrt(settings.queries))
    assert parts[1]["sensitivity"] == pytest.approx(math.sqrt(2 * settings.queries))


@pytest.mark.parametrize("accountant", ["exact", "rdp", "rdp-improved"])
def test_all_planned_steps_fit_even_if_every_check_passes(accountant: Any) -> None:
    from datalens.privacy.ledger import Ledger

    options = TrainOptions(
        out=Path("nowhere"), data="mnist", method="gpate", epsilon=3.0, steps=50, accountant=accountant
    )
    schema = formats.schema("mnist", nominal_size=None)
    budget, settings = make_plan(options, schema)
    assert isinstance(settings, GPateSettings)
    ledger = Ledger.in_memory(budget)
    for _ in range(settings.steps):
        for part in settings.schedule(schema, budget):
            ledger.charge(part.event)
    assert 2.999 < ledger.spent() <= 3.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "pategan", "aggregate": "laplace", "noise": "gaussian"}, "--aggregate gnmax"),
        ({"method": "pategan", "noise": "discrete-gaussian", "noise_seed": 1}, "has no seed"),
        ({"method": "pategan", "batch": 1}, "--batch must be at least 2"),
        ({"method": "pategan", "basis_size": 1000, "basis": "dct"}, "more than an image's 784"),
        ({"method": "pategan", "basis_size": 10, "basis": "pixel", "network": "paper"}, "is for --basis dct"),
        ({"method": "pategan", "basis": "pixel", "network": "spectral"}, "cosine"),
        ({"method": "pategan", "teachers": 10**6}, "most shares would be empty"),
        ({"method": "pategan", "k": 3}, "is not an option of --method pategan"),
        ({"method": "gpate", "bins": 1}, "--bins must be at least 2"),
        ({"method": "gpate", "projections": 100}, "more than the 64 coordinates"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DatalensError, match=says):
        planned(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ASKED, "klevel", "sketch"])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = ASKED.get(name, ("--method", "datalens", "--compress", name))
    call("train", *SMALL, *asked, "--out", run, "--device", "cuda").succeeded()
    call("train", "--resume", "--out", run, "--device", "cuda").succeeded()
    call("verify", run).succeeded()
