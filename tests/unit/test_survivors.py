"""Tests that mutation testing asked for: each kills a change to `privacy/` or `bounded/` that no other test noticed.

See tools/mutate.py and docs/mutation.md.
"""

import hashlib
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded import contributions, topk_sign
from datalens.bounded.contributions import BoundedSum, Contributions, Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.errors import TamperedError
from datalens.privacy.events import GaussianEvent, SubsampledGaussianEvent
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.released import Released

SECRET = 7654.25


def test_private_numbers_are_in_no_message() -> None:
    """A traceback or a log shows what `repr` gives."""
    tensor = torch.full((1, 1, 2), SECRET)
    units = torch.tensor([7654])
    facts: dict[str, Any] = {"l2_bound": 1.0, "diameter": 2.0, "row_unit": "teacher"}
    for thing in (
        Gradients(teachers=torch.tensor([3]), values=tensor, step=0),
        Contributions(rows=tensor, units=units, **facts),
        BoundedSum(private_total=tensor[0], units=units, queries=1, **facts),
    ):
        assert "7654" not in repr(thing)


# --- the way through the kernels, in Triton's interpreter -------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a GPU, kernels are taken for votes and for float32. The names of those that were called."""
    pytest.importorskip("triton")
    from datalens.bounded import kernels as module

    called: list[str] = []
    for name in ("sum_votes", "top_k_sign"):
        original = getattr(module, name)

        def spy(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    for module_ in (contributions, topk_sign):
        monkeypatch.setattr(module_, "kernels_for", lambda x: x.dtype in (torch.int8, torch.float32))
    return called


def rows_of(kind: torch.dtype) -> Contributions:
    rows = torch.randint(-1, 2, (5, 2, 6), generator=torch.Generator().manual_seed(0)).to(kind)
    rows[2] = 9  # far past the bound
    return Contributions(rows=rows, l2_bound=math.sqrt(12), diameter=2 * math.sqrt(12), row_unit="teacher")


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.float32, torch.float64])
def test_sums_are_the_same_through_the_kernels(kind: torch.dtype, kernels: list[str]) -> None:
    one = rows_of(kind)
    total = sum_bounded([one]).private_total
    assert kernels == (["sum_votes"] if kind == torch.int8 else [])
    expected = contributions.enforce(one.rows, one.l2_bound).sum(dim=0)
    assert torch.equal(total.to(torch.float64), expected.to(torch.float64))
    assert not total.equal(one.rows.sum(dim=0))


@pytest.mark.parametrize("quantise", [True, False])
def test_votes_are_the_same_through_the_kernels(
    quantise: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1))
    gradients = Gradients(teachers=torch.tensor([4, 0, 9]), values=values, step=5)
    compress = TopKSign(k=7, clip=0.9, quantise=quantise, seed=3)
    through = compress(gradients)
    assert kernels == (["top_k_sign"] if quantise else [])
    monkeypatch.setattr(topk_sign, "kernels_for", lambda x: False)
    plain = compress(gradients)
    assert torch.equal(through.rows, plain.rows)
    assert (through.l2_bound, through.diameter) == (plain.l2_bound, plain.diameter)


@pytest.mark.parametrize("quantise", [True, False])
def test_where_all_gradients_are_infinite_nobody_votes(quantise: bool) -> None:
    values = torch.full((2, 3, 8), math.inf)
    votes = TopKSign(k=2, clip=1.0, quantise=quantise, seed=0)(
        Gradients(teachers=torch.arange(2), values=values, step=0)
    )
    assert not votes.rows.any()


# --- events -----------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {
    **{"row_unit": "record", "l2_bound": 3.0, "rate": 0.5, "relation": "add-remove", "sigma": 2.0},
    **{"queries": 1, "step": 0, "noise": "operating-system"},
}


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize(("rate", "mu"), [(0.0, 0.0), (0.01, 1.5), (0.5, 1.5), (1.0, 1.5)])
def test_a_sampled_unit_costs_its_whole_row(unit: str, rate: float, mu: float) -> None:
    """What sampling saves is for the accountant to say; and it holds for a unit's own row alone."""
    assert SubsampledGaussianEvent(**SAMPLED | {"row_unit": unit, "rate": rate}).mu == mu


@pytest.mark.parametrize("change", [{"row_unit": "teacher"}, {"relation": "replace-one"}, {"rate": 1.01}], ids=str)
def test_what_sampling_does_not_cover(change: dict[str, Any]) -> None:
    with pytest.raises(TamperedError):
        SubsampledGaussianEvent(**SAMPLED | change)


# --- the ledger -------------------------------------------------------------------------------


def test_a_line_that_is_no_json_is_refused_however_well_it_is_chained(tmp_path: Path) -> None:
    """Python reads and writes NaN, other readers of JSON do not: nobody must see another ledger than we do."""
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")).close()
    body = json.loads(path.read_text())
    for value in (0.5, math.nan, math.inf):
        line = {name: item for name, item in body.items() if name != "hash"} | {"remark": value}
        text = json.dumps(line, sort_keys=True, separators=(",", ":"))
        signed = line | {"hash": hashlib.sha256(text.encode()).hexdigest()}
        path.write_text(json.dumps(signed, sort_keys=True, separators=(",", ":")) + "\n")
        if math.isfinite(value):
            read_ledger(path)  # so it is the value that is refused below, not how it was signed
        else:
            with pytest.raises(TamperedError):
                read_ledger(path)


# --- the journal ------------------------------------------------------------------------------


def released(value: np.ndarray) -> Released:
    event = GaussianEvent(
        **{"row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "relation": "add-remove", "sigma": 9.0},  # type: ignore[arg-type]
        **{"queries": 1, "step": 0, "noise": "operating-system"},  # type: ignore[arg-type]
    )
    return Released(value=value, event=event, number=0)


def test_the_journal_pickles_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays"):
        Journal(tmp_path).save(released(np.array([{"a": 1}], dtype=object)))


def test_the_journal_unpickles_nothing(tmp_path: Path) -> None:
    """Whoever can write there could hash it too: it must not be run for that."""
    content = io.BytesIO()
    np.lib.format.write_array(content, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    path = tmp_path / "00000000.release"
    path.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    with pytest.raises(TamperedError, match="damaged"):
        Journal._load(path)


def test_a_journaled_value_is_durable_when_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First all of the file reaches the disk, then it gets its name, then the name reaches the disk."""
    from datalens.privacy import journal

    happened: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        folder = stat.S_ISDIR(facts.st_mode)
        happened.append(("folder", len(list(tmp_path.glob("*.release")))) if folder else ("file", facts.st_size))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        happened.append(("name", os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(journal.os, "fsync", watched_fsync)
    monkeypatch.setattr(journal.os, "replace", watched_replace)
    Journal(tmp_path).save(released(np.arange(1000)))
    size = (tmp_path / "00000000.release").stat().st_size
    assert size > 8000
    assert happened == [("file", size), ("name", size), ("folder", 1)]
