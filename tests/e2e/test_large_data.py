"""Data larger than memory: shares are gathered, and batches drawn, under a limit that the set, held whole, breaks."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

RECORDS = 10_000  # 64 × 64 × 3 each: 117 MiB
LIMIT = 100 * 2**20  # bytes of memory beyond what Python and torch have taken when they are loaded

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limits")

# The child loads everything first; from then on its private memory may grow by LIMIT and no further.
CHILD = """
import hashlib, json, resource, sys
from pathlib import Path
import pyarrow.parquet, torch
from datalens.public.basis import make_basis
from datalens.data import formats, images
from datalens.data.records import collect
from datalens.private import shares
from datalens.private.networks import compact_network
from datalens.private.partition import Hashed

folder, way, records, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
images.WORKERS = 1
network = compact_network(make_basis("pixel", (3, 64, 64), None), 2)
shares.SPILL_BYTES = 2**62 if way == "in memory" else 16 * 2**20
stream = formats.open_records("celeba-gender", nominal_size=records, folder=folder)

now = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
allowed = int(now.split()[1]) * 1024 + limit
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
try:
    if way == "loaded":
        stream = collect(stream)
    rule = Hashed(teachers=40, salt=b"")
    mine = shares.Shares.gather(stream, rule, features=network.record_features, device=torch.device("cpu"))
    drawn = []
    for step in range(20):
        rows, labels = mine.batch(torch.arange(40), size=15, seed=0, step=step, draw=0)
        drawn.append(hashlib.sha256(rows.numpy().tobytes() + labels.numpy().tobytes()).hexdigest())
except (MemoryError, RuntimeError) as error:
    assert isinstance(error, MemoryError) or "memory" in str(error), error
    sys.exit(77)
print(json.dumps({"count": mine.count, "in_file": mine.in_file, "drawn": drawn}))
"""
OUT_OF_MEMORY = 77


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CelebA of many records in two shards: few different pictures, but every record has its own name."""
    folder = tmp_path_factory.mktemp("faces")
    rng, pictures = np.random.default_rng(0), []
    for _ in range(16):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((64, 64)).save(out, "JPEG")
        pictures.append(out.getvalue())
    for part in range(2):
        numbers = range(part * RECORDS // 2, (part + 1) * RECORDS // 2)
        records = [{"bytes": pictures[n % 16], "path": f"{n:06d}.jpg"} for n in numbers]
        table = pa.table({"image": records, "male": [n % 2 for n in numbers]})
        pq.write_table(table, folder / f"train-{part:05d}-of-00002.parquet", row_group_size=1000)
    return folder


def run(faces: Path, way: str, environment: dict[str, str], limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(faces), way, str(RECORDS), str(limit)]
    # Arrow's own allocators reserve address space by the gigabyte, which the limit would count.
    env = environment | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_shares_of_more_than_memory_holds(faces: Path, environment: dict[str, str]) -> None:
    done = run(faces, "streamed", environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["count"] == RECORDS and facts["in_file"]
    free = run(faces, "in memory", environment, limit=2**40)  # no limit: the same rows, from memory
    assert json.loads(free.stdout) == facts | {"in_file": False}


@pytest.mark.parametrize("way", ["in memory", "loaded"])
def test_broken_twin_that_holds_the_set_whole(faces: Path, way: str, environment: dict[str, str]) -> None:
    done = run(faces, way, environment)
    assert done.returncode == OUT_OF_MEMORY, done.stderr


# --- the default method: rows of records, in a file -------------------------------------------------

ROWS = 250_000  # of 8x8 pixels: 63 MiB of rows
ROWS_CHILD = """
import json, resource, sys
import numpy as np, torch
from datalens.data.records import Block
from datalens.data.schema import Schema
from datalens.private.moments import RecordRows
from datalens.public.basis import make_basis
from datalens.public.texture import Texture

count, memory, limit = map(int, sys.argv[1:])
torch.set_num_threads(1)
schema = Schema(name="r", height=8, width=8, channels=1, classes=("a", "b"), nominal_size=count)

class Made:
    schema, fixed_positions = schema, True

    def blocks(self, choose):
        for start in range(0, count, 2048):
            index = np.arange(start, min(start + 2048, count))
            images = (index[:, None, None, None] * np.arange(1, 65).reshape(1, 8, 8, 1) % 251).astype(np.uint8)
            yield Block(images=images, labels=index % 2, index=index, share=choose(index, ()))

basis, texture = make_basis("opponent", schema.shape, 64), Texture(schema.shape)
def work():
    rows = RecordRows.gather(Made(), basis=basis, texture=texture, memory=memory)
    sums = rows.sums(rows.coordinates, clip=3.0, classes=2, grid=2**14, counted=2**13)
    return {"in_file": rows.in_file, "counts": sums.private_total[:, -1].tolist(), "sum": int(sums.private_total.sum())}

now = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
allowed = int(now.split()[1]) * 1024 + limit
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
try:
    print(json.dumps(work()))
except (MemoryError, RuntimeError) as error:
    assert isinstance(error, MemoryError) or "memory" in str(error), error
    sys.exit(77)
"""


def rows_of(memory: int, limit: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ROWS_CHILD, str(ROWS), str(memory), str(limit)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_rows_of_more_records_than_memory_holds(environment: dict[str, str]) -> None:
    done = rows_of(2**23, 2**25 + 2**24, environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["in_file"] and found["counts"] == [ROWS // 2 * 2**13] * 2


def test_broken_twin_that_keeps_all_rows_in_memory(environment: dict[str, str]) -> None:
    assert rows_of(2**40, 2**25 + 2**24, environment).returncode == OUT_OF_MEMORY
