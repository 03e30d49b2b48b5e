"""What a fit on a cluster costs: on a core of a worker, and on the driver for each part of the data.

python -m benchmarks.cluster core [--side 64] [--channels 3] [--records 3000]
    seconds of one core for a million records: read (decoded from JPEG, features), and the eight sums.
python -m benchmarks.cluster parts [--parts 50 1000]
    the default method on a cluster in this process, with ever more parts of ten records each: what a part costs the
    driver and its scheduler.
python -m benchmarks.cluster table --seconds-per-million 700 --driver-seconds-per-part 0.05 --driver-mib-per-part 0.2
    computes hours, bytes and memory for larger sets from these figures; nothing is measured.

All print JSON lines. CPU seconds are those of the process, so other jobs on the machine hardly count.
"""

import argparse
import io
import json
import math
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

import distributed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks.machine import describe
from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.driver import train
from datalens.options import TrainOptions
from datalens.private.moments import RecordRows
from datalens.public.basis import make_basis
from datalens.public.texture import Texture

CLASSES, COORDINATES, TEXTURE, GRID = 10, 196, 931, 2**14
DRIVER_GIB = 0.57  # of driver and scheduler without any part: the line through what `parts` has measured, at zero
TRANSFERS = 1 + 1 / 16  # of a part's sum: to the worker that joins it, and its share of that join's own


def write_part(path: Path, records: int, side: int, channels: int, seed: int) -> None:
    """Write random, smooth JPEG images to a parquet file."""
    random = np.random.default_rng(seed)
    pictures = []
    for number in range(records):
        small = random.integers(0, 256, (8, 8, channels), dtype=np.uint8)
        picture = Image.fromarray(small[..., 0] if channels == 1 else small).resize((side, side))
        out = io.BytesIO()
        picture.save(out, "JPEG")
        pictures.append({"bytes": out.getvalue(), "path": f"{seed}-{number}.jpg"})
    labels = [str(label) for label in random.integers(0, CLASSES, records)]
    pq.write_table(pa.table({"image": pictures, "label": labels}), path)


def options_of(folder: Path, records: int, **own: object) -> TrainOptions:
    names = ",".join(map(str, range(CLASSES)))
    return TrainOptions(
        data=str(folder / "data"),
        classes=names,
        nominal_size=records,
        out=folder / "run",
        epsilon=math.inf,  # so few records would be lost in noise
        device="cpu",
        own=own,
    )


def core(side: int, channels: int, records: int) -> dict[str, object]:
    """Return the CPU seconds of one core for a million records."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        write_part(folder / "data.parquet", records, side, channels, 0)
        reading = Reading(classes=",".join(map(str, range(CLASSES))))
        data = formats.open_records(str(folder / "data.parquet"), nominal_size=records, reading=reading)
        texture = Texture(data.schema.shape)
        began = time.process_time()
        rows = RecordRows.gather(data, basis=make_basis("opponent", data.schema.shape, COORDINATES), texture=texture)
        read, began = time.process_time() - began, time.process_time()
        kept = (folder / "data.parquet").stat().st_size
        ask_all(rows, texture.size)
        sums = time.process_time() - began
    return {
        "shape": data.schema.shape,
        "records": records,
        "read_seconds_per_million": round(read / records * 1e6),
        "sums_seconds_per_million": round(sums / records * 1e6),
        "bytes_of_a_record": round(kept / records),
        **describe(torch.device("cpu")),
    }


def ask_all(rows: RecordRows, size: int) -> None:
    """Compute the eight sums, with values of the right size in the place of what would be released."""
    edges, means = torch.logspace(-1, 1, 49, dtype=torch.float64), torch.zeros(CLASSES, COORDINATES)
    wide = torch.eye(size, dtype=torch.float64)
    counted = {"classes": CLASSES, "grid": GRID, "counted": GRID // 2}
    rows.histogram(rows.coordinates, means=None, edges=edges, grid=GRID)
    rows.sums(rows.coordinates, clip=4.0, **counted)
    rows.histogram(rows.coordinates, means=means, edges=edges, grid=GRID)
    rows.covariances(rows.coordinates, means=means, clip=4.0, grid=GRID)
    view = partial(rows.texture, centre=torch.zeros(size), white=wide)
    rows.histogram(view, means=None, edges=edges, grid=GRID)
    rows.sums(view, clip=4.0, **counted)
    view = partial(rows.texture, centre=torch.zeros(size), white=wide[:, :COORDINATES])
    rows.histogram(view, means=means, edges=edges, grid=GRID)
    rows.covariances(view, means=means, clip=4.0, grid=GRID)


def parts(count: int, records: int = 10) -> dict[str, object]:
    """Return the seconds of a fit with so many parts: scheduler, two workers and driver share this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        for number in range(count):
            write_part(folder / "data" / f"part-{number:05d}.parquet", records, 8, 1, number)
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp://"
        ) as local:
            own = {"engine": "dask", "scheduler": local.scheduler_address, "coordinates": 20, "texture": 20}
            began, before = time.monotonic(), time.process_time()
            train(options_of(folder, count * records, **own))
            seconds, used = time.monotonic() - began, time.process_time() - before
    return {
        "parts": count,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def bytes_of_sums(classes: int, texture: int) -> int:
    """Return the bytes of a part's eight sums."""
    cells = 4 * 48 + classes * (COORDINATES + 1 + texture + 1 + 2 * COORDINATES**2)
    return 8 * cells


def table(per_million: float, per_part: float, mib_per_part: float, part: int, cores: list[int]) -> None:
    """Print a line for each size."""
    each, asks = bytes_of_sums(CLASSES, TEXTURE), 8 * TEXTURE * 2 * (TEXTURE + COORDINATES)
    for records in (10**6, 10**7, 10**8, 10**9):
        pieces = max(1, records // part)
        driver = pieces * per_part
        line: dict[str, object] = {"records": records, "parts": pieces}
        line["core_hours"] = round(records / 1e6 * per_million / 3600, 1)
        line["hours_by_cores"] = {
            number: round((records / 1e6 * per_million / min(number, pieces) + driver) / 3600, 2) for number in cores
        }
        line["driver_hours"] = round(driver / 3600, 2)
        line["driver_gibibytes"] = round(DRIVER_GIB + pieces * mib_per_part / 1024, 1)
        line["network_gigabytes_of_sums"] = round(pieces * each * TRANSFERS / 1e9, 1)
        line["network_gigabytes_of_asks_by_cores"] = {n: round(min(n, pieces) * asks / 1e9, 1) for n in cores}
        line["rows_on_disk_gigabytes"] = round(records * 4 * (COORDINATES + TEXTURE) / 1e9)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["core", "parts", "table"])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--records", type=int, default=3000)
    parser.add_argument("--parts", type=int, nargs="+", default=[50, 1000])
    parser.add_argument("--seconds-per-million", type=float)
    parser.add_argument("--driver-seconds-per-part", type=float)
    parser.add_argument("--driver-mib-per-part", type=float, default=0.215)
    parser.add_argument("--part", type=int, default=100_000, help="records in a part")
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 64, 1024])
    arguments = parser.parse_args()
    if arguments.what == "core":
        print(json.dumps(core(arguments.side, arguments.channels, arguments.records)), flush=True)
    elif arguments.what == "parts":
        lines = [parts(count) for count in arguments.parts]
        for line in lines:
            print(json.dumps(line), flush=True)
        if len(lines) > 1:
            more = lines[-1]["parts"] - lines[0]["parts"]  # type: ignore[operator]
            each = (lines[-1]["cpu_seconds"] - lines[0]["cpu_seconds"]) / more  # type: ignore[operator]
            print(json.dumps({"cpu_seconds_of_a_part": round(each, 4), **describe(torch.device("cpu"))}), flush=True)
    else:
        per_part = (arguments.driver_seconds_per_part, arguments.driver_mib_per_part)
        table(arguments.seconds_per_million, *per_part, arguments.part, arguments.cores)
