"""The quick mechanism audit: the claim must stand, and every broken twin must be caught.

Noise comes from the operating system, so the tests are random. A claim is called broken by a bound at level 1e-4
(`VERDICT_LEVEL`): the false alarms of each test are at most one in 10,000. With the trials used here the
controls lie ten standard errors, and half of the claim seven, on their right sides.
"""

import dataclasses
import functools

import pytest

from datalens.evaluate.audits.mechanism import laws, make_mechanism
from datalens.privacy import audit
from datalens.privacy.audit import Plan

# Gaussian noise is cheap; exact discrete noise is 13 µs a draw, and the test of its law is elsewhere (test_noise.py).
QUICK = Plan(epsilon=1.0, delta=1e-5, trials=20_000)
GAUSSIAN = functools.partial(make_mechanism, "gaussian")


def test_the_verdict_is_at_the_level_the_docs_state() -> None:
    assert audit.VERDICT_LEVEL == 1e-4


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("releases", [1, 3])
def test_the_claim_stands_and_half_of_it_is_reached(epsilon: float, releases: int) -> None:
    plan = dataclasses.replace(QUICK, epsilon=epsilon, releases=releases)
    found = audit.audit(audit.honest(plan, GAUSSIAN), plan)
    assert not found.broken
    assert found.claimed == pytest.approx(epsilon, abs=1e-9)
    assert epsilon / 2 <= found.lower_bound
    assert found.trials == 40_000


@pytest.mark.parametrize("name", [control.name for control in audit.controls(QUICK, GAUSSIAN)])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_broken_mechanism_is_caught(name: str, epsilon: float) -> None:
    plan = dataclasses.replace(QUICK, epsilon=epsilon)
    (control,) = (one for one in audit.controls(plan, GAUSSIAN) if one.name == name)
    found = audit.audit(control, plan)
    assert found.broken
    assert found.claimed == pytest.approx(epsilon, abs=1e-9)


@pytest.mark.skipif(laws()[0] != "discrete-gaussian", reason="OpenDP is not installed")
def test_exact_discrete_noise_keeps_its_claim_and_a_broken_twin_does_not() -> None:
    """At ε = 4 fewer trials tell as much; k·m so small that few draws are needed, σ above 10 still."""
    plan = Plan(epsilon=4.0, delta=1e-5, law="discrete-gaussian", trials=2000, k=7)
    make = functools.partial(make_mechanism, "discrete-gaussian")
    found = audit.audit(audit.honest(plan, make), plan)
    assert not found.broken
    assert found.lower_bound >= 2.0
    assert found.claimed <= 4.0
    broken = next(control for control in audit.controls(plan, make) if control.name == "half the noise")
    assert audit.audit(broken, plan).broken
