"""Every parser of a user's file against damaged files: an error a person can act on, or a value; nothing else.

Quick and always the same in every run of the tests, long and always another with `-m slow`. A file that is damaged and
signed again is there where a parser checks hashes first: it must not rely on them.
"""

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import as_json, damaged, damaged_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from datalens.cli.main import main
from datalens.data import formats, idx
from datalens.data.named import layouts, sources
from datalens.data.named.layouts import by_attributes
from datalens.data.own.reading import Reading
from datalens.data.parquet import parquet_records
from datalens.data.pixels import decode
from datalens.data.records import collect
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Ledger, _line, read_ledger
from datalens.released.certificate import certificate_bytes, own_hash
from datalens.released.loading import load
from datalens.released.release import load_generator
from datalens.released.synthetic import SyntheticDataset, save
from datalens.released.verification import check_release
from datalens.run.folder import Run, _damage_explained, load_part, load_tensors, read_config

SECONDS = 20.0
GREY = Schema(name="own", height=8, width=8, channels=1, classes=("a", "b"), nominal_size=10)
COLOUR = Schema(name="own", height=8, width=8, channels=3, classes=("a", "b"), nominal_size=10)

Parse = Callable[[Path, bytes], object]  # an empty folder to work in, and the file


@dataclass(frozen=True, kw_only=True)
class Parser:
    """How to make a valid file, what reads it, and how to damage it if not just anywhere."""

    valid: Callable[[Path], bytes]  # from the small run
    parse: Callable[[Path, Path], Parse]  # from the small run and a scratch folder
    damage: Callable[[bytes, random.Random], bytes] = damaged
    may_die: bool = False  # its library can end the process: tried in a process of its own


# --- data sets --------------------------------------------------------------------------------


def picture(kind: str, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    image = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(pixels)
    image.convert(mode).save(stream, format=kind)
    return stream.getvalue()


def npz(*, packed: bool = False, **more: np.ndarray) -> bytes:
    stream, luck = io.BytesIO(), np.random.default_rng(0)
    images = luck.integers(0, 256, (6, 8, 8), dtype=np.uint8)
    arrays = {"images": images, "labels": np.arange(6) % 2, "classes": np.array(["a", "b"])}
    (np.savez_compressed if packed else np.savez)(stream, **(arrays | more))
    return stream.getvalue()


def parquet(label: str = "male") -> bytes:
    stream = io.BytesIO()
    images = [{"bytes": picture("JPEG"), "path": f"{number}.jpg"} for number in range(4)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(images, kind), label: [0, 1, 1, 0]}), stream)
    return stream.getvalue()


def own_npz(_: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        (folder / "own.npz").write_bytes(content)
        data = formats.load(str(folder / "own.npz"), nominal_size=6)
        assert data.images.dtype == np.uint8
        assert 0 <= data.labels.min() <= data.labels.max() < len(data.schema.classes)
        return data

    return parse


def own_file(name: str, **reading: str) -> Callable[[Path, Path], Parse]:
    """A file of the user's own, beside one that is as it should be."""

    def prepare(_: Path, folder: Path) -> Parse:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "0.png").write_bytes(picture("PNG"))
        (folder / "train-labels-idx1-ubyte").write_bytes(idx.dump(np.arange(5, dtype=np.uint8) % 2))

        def parse(folder: Path, content: bytes) -> object:
            (folder / name).write_bytes(content)
            place = folder / "a" if name.startswith("a/") else folder / name
            data = formats.load(str(place), nominal_size=6, reading=Reading(image_size="8", **reading))
            assert data.images.dtype == np.uint8 and data.images.shape[1:3] == (8, 8)
            assert 0 <= data.labels.min() <= data.labels.max() < len(data.schema.classes)
            return data

        return parse

    return prepare


def own_parquet() -> bytes:
    about = json.dumps({"info": {"features": {"male": {"names": ["no", "yes"], "_type": "ClassLabel"}}}})
    table = pq.read_table(io.BytesIO(parquet())).replace_schema_metadata({"huggingface": about})
    stream = io.BytesIO()
    pq.write_table(table, stream)
    return stream.getvalue()


OWN_CSV = b'file_name,label,who\na/b/0.png,x,1\n"a/b/0.png",y,2\na/b/0.png,x,1\n'
OWN_IDX = idx.dump(np.arange(320, dtype=np.uint16).astype(np.uint8).reshape(5, 8, 8))


def shards(_: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        (folder / "train.parquet").write_bytes(content)
        records = parquet_records([folder / "train.parquet"], COLOUR, columns=["male"], label=by_attributes)
        return collect(records)

    return parse


ATTRIBUTES = b"4\nMale Smiling\n1.jpg 1 -1\n2.jpg -1 -1\n3.jpg 1 1\n4.jpg -1 1\n"
PARTITION = b"1.jpg 0\n2.jpg 0\n3.jpg 1\n4.jpg 2\n"


def celeba(name: str) -> Callable[[Path, Path], Parse]:
    def prepare(_: Path, folder: Path) -> Parse:
        (folder / layouts.CELEBA_IMAGES).mkdir()
        for number in range(1, 5):
            (folder / layouts.CELEBA_IMAGES / f"{number}.jpg").write_bytes(picture("JPEG"))
        (folder / layouts.CELEBA_ATTRIBUTES).write_bytes(ATTRIBUTES)
        (folder / layouts.CELEBA_SPLITS).write_bytes(PARTITION)

        def parse(folder: Path, content: bytes) -> object:
            (folder / name).write_bytes(content)
            return collect(layouts.celeba(folder, COLOUR, "train", columns=["male"], label=by_attributes, crop=8))

        return parse

    return prepare


PLACES = {
    layouts.PLACES_HIERARCHY: b"x,a,b,c,sea,hill\n'/b/beach',0,0,0,1,0\n'/c/cliff',0,0,0,0,1\n",
    layouts.PLACES_CATEGORIES: b"/b/beach 0\n/c/cliff 1\n",
    layouts.PLACES_VAL_LIST: b"v1.jpg 0\nv2.jpg 1\n",
}


def places(name: str, split: str) -> Callable[[Path, Path], Parse]:
    def prepare(_: Path, folder: Path) -> Parse:
        for where in ("b/beach/1.jpg", "c/cliff/1.jpg"):
            (folder / layouts.PLACES_TRAIN / where).parent.mkdir(parents=True)
            (folder / layouts.PLACES_TRAIN / where).write_bytes(picture("JPEG"))
        (folder / layouts.PLACES_VAL).mkdir()
        for number in (1, 2):
            (folder / layouts.PLACES_VAL / f"v{number}.jpg").write_bytes(picture("JPEG"))
        for file, content in PLACES.items():
            (folder / file).write_bytes(content)

        def parse(folder: Path, content: bytes) -> object:
            (folder / name).write_bytes(content)
            return collect(layouts.places(folder, COLOUR, split, groups=("sea", "hill"), images_each=2))

        return parse

    return prepare


# --- a run ------------------------------------------------------------------------------------


def at(place: str) -> Callable[[Path], bytes]:
    return lambda run: next(run.glob(place)).read_bytes()


def ledger_again(content: bytes, luck: random.Random) -> bytes:
    """Lines with other contents, chained as if they had always been like that."""
    lines = [json.loads(line) for line in content.splitlines()]
    which = luck.randrange(len(lines))
    lines[which] = damaged_json({k: v for k, v in lines[which].items() if k not in ("hash", "previous")}, luck)
    previous, written = "0" * 64, b""
    for line in lines:
        if not isinstance(line, dict):
            return as_json(line) + b"\n"
        with contextlib.suppress(ValueError):  # 10^400 is too long to be written
            raw, previous = _line({k: v for k, v in line.items() if k not in ("hash", "previous")}, previous)
            written += raw
    return written


def certificate_again(content: bytes, luck: random.Random) -> bytes:
    certificate = damaged_json(json.loads(content), luck)
    try:
        certificate["sha256"]["certificate"] = own_hash(certificate)
        return certificate_bytes(certificate)
    except (TypeError, KeyError, ValueError, AttributeError):
        return as_json(certificate)


def journal_again(content: bytes, luck: random.Random) -> bytes:
    value = damaged(content[32:], luck)
    return hashlib.sha256(value).digest() + value


def header_again(content: bytes, luck: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(content[:8], "little")
    header = as_json(damaged_json(json.loads(content[8 : 8 + size]), luck))
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def json_again(content: bytes, luck: random.Random) -> bytes:
    return as_json(damaged_json(json.loads(content), luck))


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run", dirs_exist_ok=True)
    return folder / "run"


def ledger_of(run: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        (folder / "ledger.jsonl").write_bytes(content)
        with contextlib.suppress(DatalensError):
            Ledger.open(folder / "ledger.jsonl").close()
        (folder / "ledger.jsonl").write_bytes(content)
        budget, events = read_ledger(folder / "ledger.jsonl")
        return budget.describe(budget.pricing().epsilon(events, budget.delta))

    return parse


def release_file(name: str, *, signed: bool = False) -> Callable[[Path, Path], Parse]:
    """`datalens verify` with one damaged file: exit 1 or 2. `signed`: whoever signs again may write what they like."""

    def prepare(run: Path, folder: Path) -> Parse:
        release = copied(run, folder) / "release"
        original = (release / name).read_bytes()

        def parse(folder: Path, content: bytes) -> object:
            (release / name).write_bytes(content)
            code, _, err = call("verify", release)
            assert code in ((0,) if content == original else (0, 1, 2) if signed else (1, 2)), err
            return code

        return parse

    return prepare


def described_again(content: bytes, luck: random.Random) -> bytes:
    """A generator that describes itself otherwise; weights and all else are as they were."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["generator"] = json.dumps(
        damaged_json(json.loads(header["__metadata__"]["generator"]), luck)
    )
    raw = as_json(header)
    return len(raw).to_bytes(8, "little") + raw + content[8 + size :]


def resumed(run: Path, folder: Path) -> Parse:
    """`datalens train --resume` of a finished run whose config.json says something else."""
    where = copied(run, folder)

    def parse(folder: Path, content: bytes) -> object:
        (where / "config.json").write_bytes(content)
        code, _, err = call("train", "--resume", "--out", where)
        assert code in (0, 2, 3), err
        return code

    return parse


def sampled(name: str) -> Callable[[Path, Path], Parse]:
    def prepare(run: Path, folder: Path) -> Parse:
        release = copied(run, folder) / "release"

        def parse(folder: Path, content: bytes) -> object:
            (release / name).write_bytes(content)
            out = folder / "s.npz"
            out.unlink(missing_ok=True)
            code, _, err = call("sample", release, "--count", 2, "--out", out)
            assert code in (0, 2), err
            return code

        return parse

    return prepare


def generator(run: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        (folder / "generator.safetensors").write_bytes(content)
        return load_generator(folder)

    return parse


def moment_file() -> bytes:
    """A small generator from moments."""
    import tempfile

    import torch
    from safetensors.torch import save_file

    from datalens.released.moments import make_start, without_texture

    start = make_start((1, 8, 8), torch.zeros(2, 4), torch.eye(4, dtype=torch.float64).repeat(2, 1, 1))
    model = without_texture(start, torch.arange(2), torch.tensor([5.0, 3.0]))
    described = {"moments": {"shape": (1, 8, 8), "steps": 0}, "classes": ["a", "b"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.safetensors"
        tensors = {name: value.contiguous() for name, value in model.tensors().items()}
        save_file(tensors, path, metadata={"generator": json.dumps(described)})
        return path.read_bytes()


def config(run: Path, folder: Path) -> Parse:
    where = copied(run, folder)

    def parse(folder: Path, content: bytes) -> object:
        from datalens.job import _as_begun
        from datalens.options import TrainOptions

        (where / "config.json").write_bytes(content)
        read_config(where)
        _as_begun(TrainOptions(out=where, resume=True), {"seed"})
        Run.open(where).close()
        return None

    return parse


def journal(run: Path, folder: Path) -> Parse:
    where = copied(run, folder)

    def parse(folder: Path, content: bytes) -> object:
        (where / "journal" / "00000001.release").write_bytes(content)
        ledger = Ledger.open(where / "ledger.jsonl")
        try:
            return Journal(where / "journal").find(ledger, step=1)
        finally:
            ledger.close()

    return parse


def checkpoint(run: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        path = folder / "latest.safetensors"
        path.write_bytes(content)
        with _damage_explained(path):
            _, facts = load_tensors(path)
            return int(facts["step"]), json.loads(facts["teachers"])

    return parse


def teachers(run: Path, folder: Path) -> Parse:
    def parse(folder: Path, content: bytes) -> object:
        (folder / "t.safetensors").write_bytes(content)
        return load_part(folder, ["t.safetensors"], step=2, numbers=range(5))

    return parse


# --- what is handed out -----------------------------------------------------------------------


def handed_out(name: str) -> bytes:
    """A synthetic set as one file; of a folder, its table."""
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    data = SyntheticDataset(
        images=images, labels=np.array([0, 1, 0, 1]), classes=("a", "b"), certificate={"private": True}
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(data, Path(folder) / name.partition("/")[0])
        return (Path(folder) / name).read_bytes()


def synthetic_file(name: str) -> Callable[[Path, Path], Parse]:
    def prepare(run: Path, folder: Path) -> Parse:
        top = name.partition("/")[0]
        if "/" in name:
            for part in ("metadata.csv", "classes.json", "certificate.json", "a/000001.png", "b/000002.png"):
                (folder / top / part).parent.mkdir(parents=True, exist_ok=True)
                (folder / top / part).write_bytes(handed_out(f"{top}/{part}"))
            for part, other in (("a/000003.png", "a/000001.png"), ("b/000004.png", "b/000002.png")):
                (folder / top / part).write_bytes((folder / top / other).read_bytes())

        def parse(folder: Path, content: bytes) -> object:
            (folder / name).write_bytes(content)
            return load(folder / top)

        return parse

    return prepare


def without_run(valid: bytes) -> Callable[[Path], bytes]:
    return lambda run: valid


def plainly(parse: Callable[[bytes], object]) -> Callable[[Path, Path], Parse]:
    return lambda run, folder: lambda folder, content: parse(content)


IDX = idx.dump(np.arange(60, dtype=np.uint8).reshape(5, 4, 3))

PARSERS: dict[str, Parser] = {
    "idx": Parser(valid=without_run(IDX), parse=plainly(lambda content: idx.parse(content, 3))),
    "jpeg": Parser(
        valid=without_run(picture("JPEG")), parse=plainly(lambda content: decode(content, "x.jpg", COLOUR, 8))
    ),
    "png": Parser(valid=without_run(picture("PNG")), parse=plainly(lambda content: decode(content, "x.png", GREY))),
    "png with a palette": Parser(
        valid=without_run(picture("PNG", "P")), parse=plainly(lambda content: decode(content, "x.png", COLOUR))
    ),
    **{
        f"own image: {kind}, {mode}": Parser(valid=without_run(picture(kind, mode)), parse=own_file(f"a/b/1.{suffix}"))
        for kind, mode, suffix in (
            ("PNG", "RGBA", "png"),
            ("PNG", "I;16", "png"),
            ("WEBP", "RGB", "webp"),
            ("JPEG", "CMYK", "jpeg"),
        )
    },
    "own list": Parser(valid=without_run(OWN_CSV), parse=own_file("list.csv", record_id="who")),
    "own parquet": Parser(valid=without_run(own_parquet()), parse=own_file("own.parquet", label="male"), may_die=True),
    "own parquet, distinct values": Parser(
        valid=without_run(parquet("label")), parse=own_file("own.parquet"), may_die=True
    ),
    "own idx": Parser(valid=without_run(OWN_IDX), parse=own_file("train-images-idx3-ubyte")),
    "npz": Parser(valid=without_run(npz()), parse=own_npz),
    "npz with ids": Parser(valid=without_run(npz(ids=np.array(list("uvwxyz")))), parse=own_npz),
    "npz, compressed": Parser(valid=without_run(npz(packed=True)), parse=own_npz),
    "npz with labels of 64 bits": Parser(
        valid=without_run(npz(labels=np.arange(6, dtype=np.uint64) % 2)), parse=own_npz
    ),
    "parquet": Parser(valid=without_run(parquet()), parse=shards, may_die=True),
    "celeba attributes": Parser(valid=without_run(ATTRIBUTES), parse=celeba(layouts.CELEBA_ATTRIBUTES)),
    "celeba partition": Parser(valid=without_run(PARTITION), parse=celeba(layouts.CELEBA_SPLITS)),
    "an image of celeba": Parser(valid=without_run(picture("JPEG")), parse=celeba(f"{layouts.CELEBA_IMAGES}/1.jpg")),
    **{
        f"places: {name}": Parser(valid=without_run(content), parse=places(name, split))
        for (name, content), split in zip(PLACES.items(), ("train", "test", "test"), strict=True)
    },
    "ledger": Parser(valid=at("ledger.jsonl"), parse=ledger_of),
    "ledger, chained again": Parser(valid=at("ledger.jsonl"), parse=ledger_of, damage=ledger_again),
    "release: ledger": Parser(valid=at("ledger.jsonl"), parse=release_file("ledger.jsonl"), damage=ledger_again),
    "release: certificate": Parser(valid=at("release/certificate.json"), parse=release_file("certificate.json")),
    "release: certificate, signed again": Parser(
        valid=at("release/certificate.json"),
        parse=release_file("certificate.json", signed=True),
        damage=certificate_again,
    ),
    "sample: certificate, signed again": Parser(
        valid=at("release/certificate.json"), parse=sampled("certificate.json"), damage=certificate_again
    ),
    "generator": Parser(valid=at("release/generator.safetensors"), parse=generator),
    "generator, another header": Parser(
        valid=at("release/generator.safetensors"), parse=generator, damage=header_again
    ),
    "generator from moments": Parser(valid=without_run(moment_file()), parse=generator),
    "generator from moments, another header": Parser(
        valid=without_run(moment_file()), parse=generator, damage=header_again
    ),
    "generator from moments, described otherwise": Parser(
        valid=without_run(moment_file()), parse=generator, damage=described_again
    ),
    "sample: generator, described otherwise": Parser(
        valid=at("release/generator.safetensors"), parse=sampled("generator.safetensors"), damage=described_again
    ),
    "resume: config, other contents": Parser(valid=at("config.json"), parse=resumed, damage=json_again),
    "config": Parser(valid=at("config.json"), parse=config),
    "config, other contents": Parser(valid=at("config.json"), parse=config, damage=json_again),
    "journal": Parser(valid=at("journal/*.release"), parse=journal),
    "journal, hashed again": Parser(valid=at("journal/*.release"), parse=journal, damage=journal_again),
    "checkpoint": Parser(valid=at("checkpoints/latest.safetensors"), parse=checkpoint),
    "checkpoint, another header": Parser(
        valid=at("checkpoints/latest.safetensors"), parse=checkpoint, damage=header_again
    ),
    "teachers": Parser(valid=at("checkpoints/teachers*"), parse=teachers),
    "teachers, another header": Parser(valid=at("checkpoints/teachers*"), parse=teachers, damage=header_again),
    **{
        f"synthetic {name}": Parser(
            valid=without_run(handed_out(name)),
            parse=synthetic_file(name),
            damage=damage,
            may_die=name.endswith("parquet"),
        )
        for name, damage in {
            "s.npz": damaged,
            "s.parquet": damaged,
            "s/metadata.csv": damaged,
            "s/classes.json": json_again,
            "s/certificate.json": damaged,
            "s/a/000001.png": damaged,
        }.items()
    },
}


# --- the tests --------------------------------------------------------------------------------


def call(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def parsed(parse: Parse, folder: Path, content: bytes) -> str:
    """What becomes of it; anything but a value or an explained error goes through, and fails the test."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow and numpy warn of what they then refuse
            parse(folder, content)
    except DatalensError as error:
        return "refused" if str(error) else "refused without a word"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "taken"


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_valid_is_taken(name: str, small_run: Path, tmp_path: Path) -> None:
    """Else the damage below would be done to something that was refused anyhow."""
    parser = PARSERS[name]
    assert parsed(parser.parse(small_run, tmp_path), tmp_path, parser.valid(small_run)) == "taken"


@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARSERS)
def test_damage_is_explained(name: str, examples: int, small_run: Path, tmp_path: Path) -> None:
    parser = PARSERS[name]
    parse, valid = parser.parse(small_run, tmp_path), parser.valid(small_run)
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=examples == 20, suppress_health_check=quiet
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def attempt(seed: int) -> None:
        (tmp_path / "seed").write_text(str(seed))
        assert parsed(parse, tmp_path, parser.damage(valid, random.Random(seed))) in ("refused", "taken")

    assert alive(attempt) if parser.may_die else attempt() is None, f"seed {(tmp_path / 'seed').read_text()}"


def alive(work: Callable[[], object]) -> bool:
    """Whether it ends well in a process of its own, which it may take down."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("seed", [3381, 49392, 71132])
def test_damaged_statistics_do_not_end_the_process(seed: int, tmp_path: Path) -> None:
    """pyarrow calls abort() over them when asked for a column's metadata."""
    content = damaged(parquet(), random.Random(seed))
    assert alive(lambda: parsed(shards(tmp_path, tmp_path), tmp_path, content))


def test_a_process_that_dies_is_noticed() -> None:
    def die() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        os.abort()

    assert alive(lambda: None)
    assert not alive(die)


def test_an_unexplained_error_is_noticed(tmp_path: Path) -> None:
    """The twin: a parser that trusts its file."""
    with pytest.raises(Exception, match=r".") as caught:
        parsed(lambda folder, content: json.loads(content)["a"]["b"], tmp_path, b'{"a": 1}')
    assert not isinstance(caught.value, DatalensError)


def test_every_named_set_has_a_known_reader() -> None:
    """A new kind of file wants a new line above."""
    readers = {type(entry.local).__name__ for entry in sources.CATALOGUE.values() if entry.local is not None}
    assert readers == {"Celeba", "Places", "Scenes"}


any_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(value=any_json)
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_instead(value: Any, tmp_path: Path) -> None:
    content = as_json(value)
    (tmp_path / "ledger.jsonl").write_bytes(content + b"\n")
    with contextlib.suppress(DatalensError):
        read_ledger(tmp_path / "ledger.jsonl")
    (tmp_path / "certificate.json").write_bytes(content)
    (tmp_path / "config.json").write_bytes(content)
    for read in (check_release, read_config):
        with contextlib.suppress(DatalensError):
            read(tmp_path)
