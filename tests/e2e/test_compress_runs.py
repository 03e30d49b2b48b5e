"""`--compress klevel` and `--compress sketch` through the commands, and the tables that compare them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from datalens.reproduce import harness, runtime, table5, table6
from tests.e2e.conftest import SMALL, call

pytestmark = pytest.mark.usefixtures("quickly")

ASKED = {
    "klevel": ("--compress", "klevel", "--levels", "4"),
    "sketch": ("--compress", "sketch", "--sketch-rows", "3", "--sketch-columns", "20"),
}


@pytest.mark.parametrize("compress", list(ASKED))
def test_train_resume_sample_verify(compress: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call("train", *SMALL, "--out", run, "--steps", "2", *ASKED[compress]).succeeded()
    verified = call("verify", run, "--json").succeeded().json
    assert verified["ok"] and verified["epsilon_spent"] == pytest.approx(1.0, rel=1e-3)
    call("sample", run, "--count", "20", "--out", tmp_path / "images.npz").succeeded()
    whole = (run / "release" / "generator.safetensors").read_bytes()
    shutil.rmtree(run / "release")
    call("train", "--out", run, "--resume").succeeded()
    assert (run / "release" / "generator.safetensors").read_bytes() == whole
    assert call("verify", run, "--json").succeeded().json["ok"]

    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]
    bound = 3 * (64 * 15) ** 0.5 if compress == "klevel" else (3 * 32 * 15) ** 0.5
    assert [charge["event"]["l2_bound"] for charge in ledger] == [pytest.approx(bound)] * 2
    certificate = json.loads((run / "release" / "certificate.json").read_text())
    certificate["settings"]["levels" if compress == "klevel" else "sketch_rows"] = 2
    (run / "release" / "certificate.json").write_text(json.dumps(certificate))
    found = call("verify", run, "--json")
    assert found.code == 1
    assert any("k or batch" in problem for problem in found.json["problems"])


def test_table_6_times_the_three_compressors_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "STEPS", 2)
    small: dict[str, Any] = {"data": "digits", "network": "spectral", "basis": "dct", "basis_size": 64, "teachers": 10}
    monkeypatch.setattr(table6, "cells", lambda full: [small | {"compress": c} for c in table6.COMPRESS.values()])
    monkeypatch.setitem(table6.PAPER, "digits", dict.fromkeys(table6.COMPRESS, 1.0))
    result = harness.reproduce("table6", full=False, out=tmp_path, device="cpu")
    assert [row["compress"] for row in result["rows"]] == ["topk-sign", "klevel", "sketch"]
    assert all(0 < row["seconds_per_epoch"] < 60 for row in result["rows"])
    assert Path(result["markdown"]).read_text().count("| digits |") == 3


def test_tables_5_and_6_ask_for_what_can_be_planned() -> None:
    """Every cell, quick and full, from public facts: nothing is trained."""
    from datalens.data import formats
    from datalens.options import TrainOptions
    from datalens.plans.registry import make_plan

    for full in (False, True):
        asked = [cell.options for cell in table5.TABLE.cells(full) if cell.options is not None]
        asked += [cell | {"method": "datalens-paper", "steps": 8} for cell in table6.cells(full)]
        for options in asked:
            _, settings = make_plan(
                TrainOptions(out=Path("nowhere"), **options), formats.schema(options["data"], nominal_size=None)
            )
            assert settings.compress == options.get("compress", "topk-sign")
            assert settings.steps > 0 and settings.sigma > 0
