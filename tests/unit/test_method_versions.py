"""A method's version is raised when its results change: tiny seeded runs and published settings, against kept ones.

`python tests/unit/test_method_versions.py` writes the kept ones again, for methods whose version was raised.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datalens.data import formats
from datalens.driver import train
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan, method_named, version_of
from datalens.released.release import sample

KEPT = Path(__file__).parents[1] / "fixtures" / "method-versions.json"
COUNT = 10
NEAR = 1.0  # mean difference of pixels, of 255, that rounding on another machine may make
CASES: dict[str, dict[str, Any]] = {
    "datalens": {"coordinates": 16, "texture": 8, "texture_steps": 2},
    "refined": {"refine": "diffusion", "coordinates": 16, "refine_steps": 2, "pretraining": 2},
    "topagg": {"warm_start": "off", "teachers": 6, "steps": 2, "batch": 8},
    "datalens-paper": {"method": "datalens-paper", "network": "compact", "teachers": 6, "steps": 2, "batch": 8},
    "pategan": {"method": "pategan", "preset": "quick", "teachers": 6, "steps": 2, "batch": 10},
    "gpate": {"method": "gpate", "preset": "quick", "teachers": 6, "steps": 2, "batch": 8, "threshold": 0.1},
    "gswgan": {"method": "gswgan", "preset": "quick", "teachers": 3, "steps": 1, "batch": 4},
    "dpgan": {"method": "dpgan", "preset": "quick", "steps": 1, "batch": 16},
    "dpsgd-gan": {"method": "dpsgd-gan", "preset": "quick", "steps": 1, "batch": 16},
    "dpmerf": {"method": "dpmerf", "preset": "quick", "steps": 3, "batch": 4},
    "dcgan": {"method": "dcgan", "preset": "quick", "steps": 2, "batch": 8, "epsilon": float("inf")},
}


def images_of(case: dict[str, Any], folder: Path) -> list[list[int]]:
    options = {"epsilon": 10.0, "data": "digits", "noise_seed": 7, "device": "cpu"} | case
    train(TrainOptions(out=folder / "run", **options))
    drawn = sample(folder / "run" / "release", count=COUNT, seed=3, device="cpu")
    return drawn.images.reshape(COUNT, -1).astype(int).tolist()


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the method's first preset on MNIST at ε = 1 and 10, without what depends on a machine."""
    method = {key: case[key] for key in ("method", "warm_start", "network", "refine") if key in case}
    found = {}
    for epsilon in (1.0, 10.0) if "inf" not in str(case.get("epsilon")) else (float("inf"),):
        options = TrainOptions(out=Path(), data="mnist", epsilon=epsilon, **method)
        settings = make_plan(options, formats.schema("mnist"))[1].as_dict()
        found[f"{epsilon:g}"] = {key: value for key, value in settings.items() if key not in ("noise", "sigma")}
    return found


def changed(name: str, folder: Path, kept: dict[str, Any]) -> list[str]:
    """Return what is not as it was kept."""
    case, problems = CASES[name], []
    if settings_of(case) != kept["settings"]:
        problems.append("settings")
    apart = np.abs(np.subtract(images_of(case, folder), kept["images"])).mean()
    return problems + (["images"] if apart > NEAR else [])


@pytest.mark.parametrize("name", CASES)
def test_results_change_with_the_version_only(name: str, tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))[name]
    assert method_named(name).version == kept["version"], f"write {KEPT.name} again: see the top of this file"
    what = " and ".join(changed(name, tmp_path, kept))
    assert not what, f"{what} of {name} are not what they were: raise its `version`, and see the top of this file"


def test_other_results_are_seen(tmp_path: Path) -> None:
    """The broken twin: a changed rate, and a changed default, of a method whose version stays."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["topagg"]
    other = CASES["topagg"] | {"student_rate": 0.05}
    assert np.abs(np.subtract(images_of(other, tmp_path), kept["images"])).mean() > NEAR
    assert settings_of(CASES["datalens-paper"]) != settings_of(CASES["datalens-paper"] | {"network": "printed"})


def test_every_method_is_watched() -> None:
    from datalens.plans.registry import METHODS

    assert set(CASES) == set(METHODS) - {"sgd"}  # its trainings draw noise without a seed
    for name, case in CASES.items():
        assert version_of(TrainOptions(out=Path(), data="mnist", **case)) == method_named(name).version


def main() -> None:
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    kept = {}
    for name, case in CASES.items():
        version = method_named(name).version
        if before.get(name, {}).get("version") == version and "--all" not in sys.argv:
            kept[name] = before[name]
            continue
        with tempfile.TemporaryDirectory() as folder:
            images = images_of(case, Path(folder))
        kept[name] = {"version": version, "settings": settings_of(case), "images": images}
    KEPT.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
