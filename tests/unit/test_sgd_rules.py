"""What `datalens sgd` does where nothing else is asked: its settings, the course of its rate, the mean it releases."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.norm_topk import NormTopK
from datalens.data import formats
from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.gradients.optimizer import Plan
from datalens.methods.sgd import SgdSettings, Trainer, _inputs, sgd_usual, share_of_rate
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.plans.registry import make_plan
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SeededNoise
from datalens.private import features
from datalens.released.classifier import seeded


def test_what_is_usual_follows_public_facts(tmp_path: Path) -> None:
    """More budget or more records: more steps, and never a word about the records themselves."""
    facts: dict[str, Any] = {"network": "cnn", "features": False}
    little, much = (sgd_usual(**facts, nominal_size=60_000, epsilon=e) for e in (0.2, 1.0))
    assert (little.batch_size, little.epochs, much.epochs) == (2000, 6.0, 30.0)
    assert sgd_usual(**facts, nominal_size=10_000, epsilon=1.0).epochs == 5.0
    options = TrainOptions(method="sgd", data="mnist", out=tmp_path, epsilon=0.2, accountant="rdp-improved")
    _, settings = make_plan(options, formats.schema("mnist"))
    assert isinstance(settings, SgdSettings)
    assert (settings.batch_size, settings.steps, settings.clip, settings.falls) == (2000, 180, 0.3, True)
    assert settings.rate == pytest.approx(12.0)
    _, other = make_plan(
        dataclasses.replace(options, own={"clip": 1.0, "constant_rate": True}), formats.schema("mnist")
    )
    assert isinstance(other, SgdSettings)
    assert other.rate == pytest.approx(0.3 * settings.rate) and not other.falls  # a step is as long at any clip


def test_the_rate_rises_and_falls() -> None:
    shares = [share_of_rate(step, 200) for step in range(200)]
    assert shares[0] == pytest.approx(0.05) and shares[-1] == pytest.approx(1 / 200) and max(shares) > 0.9
    assert shares.index(max(shares)) == 19 and sum(shares) == pytest.approx(0.45 * 200, rel=0.02)
    assert share_of_rate(0, 1) == 1.0  # a run of one step takes it


def trainer(falls: bool = False) -> Trainer:
    compress = NormTopK(clip=1.0)
    schedule = Schedule(sigma=1.0, rate=0.5, steps=6, unit=1.0, l2_bound=compress.l2_bound)
    budget = Budget(epsilon=1e6, delta=1e-5, relation="add-remove", accountant="rdp-improved")
    gate = GradientGate(Ledger.in_memory(budget), schedule, SeededNoise(1))
    model = seeded(0, shape=(4,), classes=2, network="linear")
    made = Plan(compress=compress, schedule=schedule, batch_size=6)
    return Trainer(model, made, gate, rate=0.5, falls=falls)


def test_what_changes_weights_beside_the_gate_is_noticed() -> None:
    """What `make_private` watches of others' models, `sgd` watches of its own."""
    x, y = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    one = trainer()
    one.step(x, y)
    next(one.model.parameters()).data.add_(float(x.mean()))
    with pytest.raises(DatalensError):
        one.step(x, y)


@pytest.mark.parametrize("falls", [True, False])
def test_the_mean_weighs_late_weights_most(falls: bool) -> None:
    """By t⁸, or nearly: the weights after step t count as C(t + 7, 8); and after a stop the same as without."""
    x, y = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    one, seen, rates = trainer(falls), [], []
    for _ in range(6):
        one.step(x, y)
        seen.append(torch.cat([p.detach().flatten() for p in one.model.parameters()]))
        rates.append(one._optimizer.param_groups[0]["lr"])
    shares = torch.tensor([float(math.comb(t + 7, 8)) for t in range(1, 7)])
    expected = (shares.unsqueeze(1) * torch.stack(seen)).sum(dim=0) / shares.sum()
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in one.average.parameters()]), expected)
    assert rates == [0.5 * share_of_rate(step, 6) if falls else 0.5 for step in range(6)]
    other = trainer(falls)
    other.load_state({name: value.clone() for name, value in one.state().items()})
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


def test_features_of_another_network_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on with other weights under the same name would train on other features than it states."""
    options = TrainOptions(method="sgd", data="mnist", out=tmp_path, epsilon=1.0, accountant="rdp-improved")
    _, settings = make_plan(options, formats.schema("mnist"))
    assert isinstance(settings, SgdSettings)
    settings = dataclasses.replace(settings, extractor="net", extractor_sha256="0" * 64, features=1)
    schema = dataclasses.replace(formats.schema("mnist"), height=2, width=2)
    dataset = Dataset(
        schema=schema, images=np.zeros((3, 2, 2, 1), np.uint8), labels=np.zeros(3, np.int64), fixed_positions=True
    )
    place = Place(device=torch.device("cpu"), folder=tmp_path)
    monkeypatch.setattr(features, "extract", lambda extractor, images, **named: torch.ones(len(images), 1))
    for sha256 in ("0" * 64, "1" * 64):
        monkeypatch.setattr(features, "find", lambda name, sha256=sha256: SimpleNamespace(name=name, sha256=sha256))
        if sha256 == settings.extractor_sha256:
            assert _inputs(dataset, settings, place)[0].shape == (3, 1)
        else:
            with pytest.raises(DatalensError, match="net is not the one the run was begun with"):
                _inputs(dataset, settings, place)
