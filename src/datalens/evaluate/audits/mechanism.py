"""`datalens audit mechanism`: releases of the mechanism alone. Also what all audits share: noise laws and report lines.

`privacy/audit.py` has the attack, and how a bound follows from it.
"""

import dataclasses
import functools
from typing import Any

from datalens.privacy import audit
from datalens.privacy.events import NoiseLaw
from datalens.privacy.mechanisms import DiscreteGaussianSum, GaussianSum, Mechanism
from datalens.privacy.noise import ExactNoise, SecureNoise, opendp_installed
from datalens.progress import bar


def laws() -> tuple[NoiseLaw, ...]:
    """Return the noise laws that a run can use on this machine, the default first."""
    return ("discrete-gaussian", "gaussian") if opendp_installed() else ("gaussian",)


def make_mechanism(law: NoiseLaw, sigma: float) -> Mechanism:
    """Return the mechanism of a run, without noise drawn in advance, since audits are many short runs."""
    if law == "discrete-gaussian":
        return DiscreteGaussianSum(noise=ExactNoise(sigma))
    return GaussianSum(sigma=sigma, noise=SecureNoise())


def mechanism_report(plan: audit.Plan, asked: tuple[NoiseLaw, ...], *, releases: int) -> dict[str, Any]:
    """Audit every law and all controls, and return the results as JSON.

    Args:
        plan: the claim and the size of the audit.
        asked: the noise laws to audit.
        releases: audit a composition of this many releases too, at the same total cost.
    """
    findings: list[dict[str, Any]] = []
    controls: list[dict[str, Any]] = []
    with bar("releases", len(asked) * (4 + (releases > 1)) * 2 * plan.trials) as (progress, task):
        for law in asked:
            make = functools.partial(make_mechanism, law)
            for count in sorted({1, releases}):
                this = dataclasses.replace(plan, law=law, releases=count)
                result = audit.audit(audit.honest(this, make), this, lambda done: progress.advance(task, done))
                findings.append({"noise": law, "releases": count, **result.as_dict()})
            this = dataclasses.replace(plan, law=law)
            for control in audit.controls(this, make):
                result = audit.audit(control, this, lambda done: progress.advance(task, done))
                controls.append({"noise": law, "releases": 1, **result.as_dict()})
    names = dict.fromkeys(control["name"] for control in controls)
    return {
        "audit": "mechanism",
        **in_short(findings[0]),
        "delta": plan.delta,
        "relation": plan.relation,
        "accountant": plan.accountant,
        "level": audit.VERDICT_LEVEL,
        "statistic": audit.STATISTIC,
        "controls": {name: all(one["broken"] for one in controls if one["name"] == name) for name in names},
        "findings": findings,
        "control_findings": controls,
        "ok": not any(one["broken"] for one in findings) and all(one["broken"] for one in controls),
    }


def in_short(finding: dict[str, Any]) -> dict[str, Any]:
    """Return the main figures of a finding."""
    return {name: finding[name] for name in ("claimed", "lower_bound", "verdict_bound", "trials")}


def terms(result: dict[str, Any]) -> str:
    """Return δ, relation and accountant of a result. An ε is never printed without them."""
    return f"δ = {result['delta']:g}, {result['relation']}, {result['accountant']} accountant"


def control_lines(result: dict[str, Any]) -> list[str]:
    return [f"control, {name}: {'caught' if hit else 'MISSED'}" for name, hit in result["controls"].items()]


def report_lines(result: dict[str, Any]) -> list[str]:
    """Return an audit's results as lines of text. Every line with an ε states its δ, relation and accountant."""
    lines = []
    for one in result["findings"]:
        what = f"{one['noise']} noise, {one['releases']} release(s)" if "noise" in one else one["name"]
        lines.append(
            f"{what}: claimed ε = {one['claimed']:.4g}, attacked ε ≥ {one['lower_bound']:.3g} (95 % confidence; "
            f"{terms(result)}; {one['trials']} trials): " + ("BROKEN" if one["broken"] else "the claim stands")
        )
    return lines + control_lines(result)
