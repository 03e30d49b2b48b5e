"""Small files that claim to be huge. Each is refused, in an explained line, without the memory it asks for."""

import io
import json
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load, save

from datalens.data import formats, idx
from datalens.data.named.layouts import by_attributes
from datalens.data.parquet import parquet_records
from datalens.data.pixels import decode
from datalens.data.records import collect
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import read_ledger
from datalens.released import loading
from datalens.released.release import load_generator
from datalens.released.verification import check_release
from datalens.run.folder import read_config

ROOM = 512 * 2**20  # bytes that a parser may take for a file of a few megabytes
SECONDS = 30
COLOUR = Schema(name="own", height=8, width=8, channels=3, classes=("a", "b"), nominal_size=10)


def ends(work: Callable[[], object]) -> str:
    """In a process that may take so much more memory, and time, than it has: `refused`, or what else happened."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most = int(status["VmData"].split()[0]) * 1024 + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            work()
            word = "taken"
        except DatalensError:
            word = "refused"
        except BaseException as error:
            word = f"{type(error).__name__}: {error}"
        os.write(theirs, word.encode()[:500])
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        word = pipe.read().decode()
    os.waitpid(child, 0)
    return word or "killed"


def npy_header(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def deflated(head: bytes, zeros: int) -> bytes:
    """`head` and so many zeros, deflated without ever making them all: one block of them, repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    size = 2**24
    block = packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + block * (zeros // size) + packer.flush(zlib.Z_FINISH)


def archive(members: dict[str, tuple[bytes, int]]) -> bytes:
    """A zip of deflated members, with the sizes they claim."""
    content, directory = b"", b""
    for name, (packed, size) in members.items():
        raw = name.encode()
        facts = struct.pack("<HHHHHIII", 45, 0, 8, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF)
        extra = struct.pack("<HHQQ", 1, 16, size, len(packed))
        directory += b"PK\1\2" + struct.pack("<H", 45) + facts
        directory += struct.pack("<HHHHHII", len(raw), len(extra), 0, 0, 0, 0, len(content)) + raw + extra
        content += b"PK\3\4" + facts + struct.pack("<HH", len(raw), len(extra)) + raw + extra + packed
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(content), 0)
    return content + directory + b"PK\5\6" + end


def npz_bomb(*, honest: bool) -> bytes:
    """One that unpacks to all of what its header says, or one whose header lies."""
    count = 2**14 if honest else 2**31
    head = npy_header((count, 1024, 1024))
    packed = deflated(head, count * 2**20 if honest else 2**24)
    labels = npy_header((count,), "<i8")
    text = npy_header((2,), "<U1") + "ab".encode("utf-32-le")
    note = npy_header((), "<U2") + "{}".encode("utf-32-le")
    return archive(
        {
            "images.npy": (packed, len(head) + count * 2**20 if honest else len(head) + 2**24),
            "labels.npy": (deflated(labels, 0), len(labels)),
            "classes.npy": (deflated(text, 0), len(text)),
            "certificate.npy": (deflated(note, 0), len(note)),
        }
    )


def png_bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed = zlib.compress(bytes(2**20))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def parquet_bomb(columns: dict[str, list[int]]) -> bytes:
    stream = io.BytesIO()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": bytes(5 * 2**22), "path": str(n)} for n in range(4)], kind)
    table = pa.table({"image": images, **columns})
    note = {"datalens.classes": '["a", "b"]', "datalens.certificate": "{}"}
    pq.write_table(table.replace_schema_metadata(note), stream, compression="zstd", use_dictionary=False)
    return stream.getvalue()


def own_npz(folder: Path, content: bytes) -> object:
    (folder / "own.npz").write_bytes(content)
    return formats.load(str(folder / "own.npz"), nominal_size=10)


def handed_out(name: str) -> Callable[[Path, bytes], object]:
    def read(folder: Path, content: bytes) -> object:
        (folder / name).write_bytes(content)
        return loading.load(folder / name)

    return read


def shards(folder: Path, content: bytes) -> object:
    (folder / "train.parquet").write_bytes(content)
    return collect(parquet_records([folder / "train.parquet"], COLOUR, columns=["male"], label=by_attributes))


def json_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def place_and_read(folder: Path, content: bytes) -> object:
        for other in ("config.json", "ledger.jsonl", "certificate.json", "generator.safetensors"):
            (folder / other).write_bytes(b"{}\n")
        (folder / name).write_bytes(content)
        return read(folder)

    return place_and_read


def journal_file(folder: Path, value: bytes) -> object:
    import hashlib

    (folder / "x.release").write_bytes(hashlib.sha256(value).digest() + value)
    return Journal._load(folder / "x.release")


DEEP = b"[" * 10**6
LARGE_IDX = bytes((0, 0, 8, 3)) + b"\x7f\xff\xff\xff" * 3 + bytes(1000)
FOUR = [0, 1, 0, 1]

# How to make the file, and what reads it from a folder.
BOMBS: dict[str, tuple[Callable[[], bytes], Callable[[Path, bytes], object]]] = {
    "idx of 2^31 records": (lambda: LARGE_IDX, lambda _, content: idx.parse(content, 3)),
    "npz whose header lies": (lambda: npz_bomb(honest=False), own_npz),
    "npz that unpacks": (lambda: npz_bomb(honest=True), own_npz),
    "synthetic npz whose header lies": (lambda: npz_bomb(honest=False), handed_out("s.npz")),
    "synthetic npz that unpacks": (lambda: npz_bomb(honest=True), handed_out("s.npz")),
    "png of 3.6 gigapixels": (lambda: png_bomb(60_000, 60_000), lambda _, content: decode(content, "x.png", COLOUR)),
    "png of 144 megapixels": (lambda: png_bomb(12_000, 12_000), lambda _, content: decode(content, "x.png", COLOUR)),
    "parquet": (lambda: parquet_bomb({"male": FOUR}), shards),
    "synthetic parquet": (lambda: parquet_bomb({"label": FOUR}), handed_out("s.parquet")),
    "deep config": (lambda: DEEP, json_file("config.json", read_config)),
    "deep certificate": (lambda: DEEP, json_file("certificate.json", check_release)),
    "deep ledger": (lambda: DEEP + b"\n", json_file("ledger.jsonl", lambda f: read_ledger(f / "ledger.jsonl"))),
    "journal of 2^50 numbers": (lambda: npy_header((2**25, 2**25), "<i8") + bytes(100), journal_file),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    make, read = BOMBS[name]
    content = make()
    assert len(content) < 2**25
    assert ends(lambda: read(tmp_path, content)) == "refused"


@pytest.mark.parametrize(
    "change",
    [
        {"dense": 2**31},
        {"dense": 2**24},
        {"latent": 2**40},
        {"shape": [1, 2**20, 2**20]},
        {"widths": [1] * 40, "shape": [1, 2**30, 2**30]},
        {"classes": 2**27},
        {"cosines": 2**30},
        {"cosines": -1},
        {"cosines": 2.5},
        {"cosines": True},
        {"cosines": "x" * 10**6},
        {"cosines": 1, "shape": [1, 2**11, 2**11]},
        {"shape": ["x" * 10**6, 8, 8]},
        {"shape": [1, -8, -8]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_generator_of_any_size(change: dict[str, object], small_run: Path, tmp_path: Path) -> None:
    """What its description says is not built before it is compared with the weights."""
    content = (small_run / "release" / "generator.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    described = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["generator"])
    described["architecture"] |= change
    (tmp_path / "generator.safetensors").write_bytes(save(load(content), {"generator": json.dumps(described)}))
    assert ends(lambda: load_generator(tmp_path)) == "refused"


def test_who_takes_too_much_is_noticed() -> None:
    """The twin: a reader that believes a header."""
    assert ends(lambda: np.ones(2**30, dtype=np.uint8).sum()).startswith(("MemoryError", "_ArrayMemoryError"))
    assert ends(lambda: None) == "taken"
