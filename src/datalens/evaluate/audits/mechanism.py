"""`datalens audit mechanism`: releases of the mechanism alone; and what all audits share: its laws, and the words.

What is attacked, and how a bound comes of it, is `privacy/audit.py`.
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
    """The noise a run here may have; the default first."""
    return ("discrete-gaussian", "gaussian") if opendp_installed() else ("gaussian",)


def make_mechanism(law: NoiseLaw, sigma: float) -> Mechanism:
    """As `training` opens it. No noise is drawn ahead: audits are many short runs."""
    if law == "discrete-gaussian":
        return DiscreteGaussianSum(noise=ExactNoise(sigma))
    return GaussianSum(sigma=sigma, noise=SecureNoise())


def mechanism_report(plan: audit.Plan, asked: tuple[NoiseLaw, ...], *, releases: int) -> dict[str, Any]:
    """Every law, in one release and in several that cost the same together, and all controls."""
    found: list[dict[str, Any]] = []
    caught: list[dict[str, Any]] = []
    with bar("releases", len(asked) * (4 + (releases > 1)) * 2 * plan.trials) as (progress, task):
        for law in asked:
            make = functools.partial(make_mechanism, law)
            for count in sorted({1, releases}):
                this = dataclasses.replace(plan, law=law, releases=count)
                result = audit.audit(audit.honest(this, make), this, lambda done: progress.advance(task, done))
                found.append({"noise": law, "releases": count, **result.as_dict()})
            this = dataclasses.replace(plan, law=law)
            for control in audit.controls(this, make):
                result = audit.audit(control, this, lambda done: progress.advance(task, done))
                caught.append({"noise": law, "releases": 1, **result.as_dict()})
    names = dict.fromkeys(control["name"] for control in caught)
    return {
        "audit": "mechanism",
        **in_short(found[0]),
        "delta": plan.delta,
        "relation": plan.relation,
        "accountant": plan.accountant,
        "level": audit.VERDICT_LEVEL,
        "statistic": audit.STATISTIC,
        "controls": {name: all(one["broken"] for one in caught if one["name"] == name) for name in names},
        "findings": found,
        "control_findings": caught,
        "ok": not any(one["broken"] for one in found) and all(one["broken"] for one in caught),
    }


def in_short(finding: dict[str, Any]) -> dict[str, Any]:
    return {name: finding[name] for name in ("claimed", "lower_bound", "verdict_bound", "trials")}


def terms(result: dict[str, Any]) -> str:
    """An ε is never printed without these."""
    return f"δ = {result['delta']:g}, {result['relation']}, {result['accountant']} accountant"


def control_lines(result: dict[str, Any]) -> list[str]:
    return [f"control, {name}: {'caught' if hit else 'MISSED'}" for name, hit in result["controls"].items()]


def report_lines(result: dict[str, Any]) -> list[str]:
    """For people; every line with an ε says which."""
    lines = []
    for one in result["findings"]:
        what = f"{one['noise']} noise, {one['releases']} release(s)" if "noise" in one else one["name"]
        lines.append(
            f"{what}: claimed ε = {one['claimed']:.4g}, attacked ε ≥ {one['lower_bound']:.3g} (95 % confidence; "
            f"{terms(result)}; {one['trials']} trials): " + ("BROKEN" if one["broken"] else "the claim stands")
        )
    return lines + control_lines(result)
