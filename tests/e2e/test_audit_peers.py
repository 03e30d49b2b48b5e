"""The audits of the other methods: what stands, what is caught, and that a wrong bound would show."""

import math

import numpy as np
import pytest

from datalens.errors import DatalensError
from datalens.evaluate.audits import methods
from datalens.evaluate.audits.methods import Question, lower_bound


@pytest.fixture(scope="module")
def result(datalens):
    return datalens("audit", "methods", "--epsilon", 1, "--trials", 4000, "--json").succeeded().json


def test_every_private_method_stands_and_its_twins_are_caught(result) -> None:
    assert result["ok"], result
    assert {one["name"].split(":")[0] for one in result["findings"]} == set(methods.METHODS)
    assert {name.split(":")[0] for name in result["controls"]} == set(methods.METHODS)
    assert all(result["controls"].values())


def test_claims_are_what_a_ledger_says(result) -> None:
    for one in result["findings"] + result["control_findings"]:
        assert 0.98 < one["claimed"] <= 1.0


def test_the_attack_is_not_blind(result) -> None:
    """It finds a good part of what a Gaussian claims; that of the sampled ones is shown by the twins it catches."""
    assert result["findings"][0]["lower_bound"] > 0.3


@pytest.mark.parametrize(("mu", "epsilon"), [(1.0, 1.0), (0.3, 1.0), (3.0, 8.0)])
def test_a_bound_is_under_the_truth_and_not_far(mu: float, epsilon: float) -> None:
    from datalens.privacy.curves import exact_epsilon

    luck = np.random.default_rng(0)
    worlds = (luck.normal(centre, mu, 20_000) for centre in (-mu * mu / 2, mu * mu / 2))
    found = lower_bound(*worlds, delta=1e-5, level=1e-4)
    truth = exact_epsilon(mu * mu, 1e-5)
    assert 0.1 * truth < found < truth


def test_what_is_certain_is_said_to_be() -> None:
    assert lower_bound(np.full(1000, -9.0), np.full(1000, 9.0), delta=1e-5, level=0.05) > math.log(50)
    assert lower_bound(np.full(1000, -9.0), np.full(1000, -9.0), delta=1e-5, level=0.05) == 0


def test_questions_that_make_no_sense() -> None:
    for wrong in ({"trials": 3}, {"epsilon": math.inf}, {"delta": 2.0}):
        with pytest.raises(DatalensError):
            Question(**{"epsilon": 1.0, "delta": 1e-5, "trials": 1000, **wrong})
