"""A run on a cluster: the release of one process, whatever the workers do, and records that never leave them."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

distributed = pytest.importorskip("distributed")

from datalens.data import formats  # noqa: E402
from datalens.data.own.reading import Reading  # noqa: E402
from datalens.errors import DatalensError  # noqa: E402
from datalens.methods.moments import RELEASES  # noqa: E402
from datalens.run import cluster  # noqa: E402
from datalens.run.cluster import ClusterRows, HeldPart  # noqa: E402

COUNT, SIDE = 240, 8
# `gaussian`, since exact noise has no seed; few coordinates, since noise takes longer to draw than anything else here.
SETTINGS = ("--nominal-size", COUNT, "--epsilon", 20, "--noise-seed", 3, "--coordinates", 12, "--texture", 12)


def write(folder: Path, parts: list[range], *, persons: bool = False, side: int = SIDE) -> Path:
    """Write records to parquet files, a file for each range of their numbers."""
    folder.mkdir()
    for number, records in enumerate(parts):
        pictures, labels, people = [], [], []
        for record in records:
            pixels = np.random.default_rng(record).integers(0, 120, (side, side), dtype=np.uint8)
            pixels[: 2 + record % 2 * 3] += 100
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "PNG")
            pictures.append({"bytes": out.getvalue(), "path": f"{record:05d}.png"})
            labels.append("ab"[record % 2])
            people.append(f"person {record // 3}")
        image = pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        columns = {"image": image, "label": pa.array(labels, pa.string())}
        if persons:
            columns["person"] = pa.array(people, pa.string())
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return folder


THREE = [range(60), range(60, 150), range(150, COUNT)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("parts") / "set", THREE)


@pytest.fixture(scope="module")
def here() -> Iterator[str]:
    """A scheduler and two workers in this process. Yields the scheduler's address."""
    before = torch.get_num_threads()
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options, protocol="tcp://", host="127.0.0.1") as local:
        yield local.scheduler_address
    torch.set_num_threads(before)


def released(run: Path) -> dict[str, bytes]:
    """The parts of a release that follow from the data alone: weights, and charges without their times."""
    release = run / "release"
    charges = [json.loads(line) for line in (release / "ledger.jsonl").read_text().splitlines()][1:]
    events = json.dumps([charge["event"] for charge in charges]).encode()
    return {"events": events} | {path.name: path.read_bytes() for path in release.glob("*.safetensors")}


def trained(datalens: Any, out: Path, data: object, *options: object) -> dict[str, bytes]:
    datalens("train", "--data", data, *SETTINGS, *options, "--out", out).succeeded()
    datalens("verify", out).code in (0, 1)
    found = released(out)
    assert len(found) > 1
    return found


@pytest.fixture(scope="module")
def alone(datalens: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The release of one process."""
    return trained(datalens, tmp_path_factory.mktemp("alone") / "run", data)


# --- the same release -----------------------------------------------------------------------------


def test_it_is_the_release_of_one_process(datalens, data, here, alone, tmp_path) -> None:
    assert trained(datalens, tmp_path / "run", data, "--engine", "dask", "--scheduler", here) == alone


def test_neither_the_number_nor_the_order_of_parts_matters(datalens, here, alone, tmp_path) -> None:
    """One part is empty, and one has a class that no other has as its first record."""
    parts = [range(200, COUNT), range(0), range(0, 200, 2), range(1, 200, 2)]
    other = write(tmp_path / "set", parts)
    found = trained(datalens, tmp_path / "run", other, "--engine", "dask", "--scheduler", here)
    assert found == alone


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_data_without_files_of_its_own_is_cut_into_pieces(datalens, here, tmp_path, kind) -> None:
    luck = np.random.default_rng(0)
    images, labels = luck.integers(0, 256, (COUNT, SIDE, SIDE), dtype=np.uint8), np.arange(COUNT) % 2
    path = tmp_path / ("set.npz" if kind == "npz" else "set")
    if kind == "npz":
        np.savez(path, images=images, labels=labels, classes=np.array(["a", "b"]))
    for number in range(COUNT if kind == "folder" else 0):
        (path / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path / "ab"[number % 2] / f"{number}.png")
    one = trained(datalens, tmp_path / "one", path)
    assert trained(datalens, tmp_path / "many", path, "--engine", "dask", "--scheduler", here) == one
