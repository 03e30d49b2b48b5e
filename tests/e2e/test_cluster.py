"""A run on a cluster: the release of one process, whatever the workers do, and records that never leave them."""

import contextlib
import io
import json
import os
import signal
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
SETTINGS = ("--nominal-size", COUNT, "--epsilon", 10, "--noise-seed", 3, "--coordinates", 12, "--texture", 12)


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
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
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
    datalens("verify", out).succeeded()
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


# --- workers that die -----------------------------------------------------------------------------


def killing(monkeypatch: pytest.MonkeyPatch, releases: range) -> list[int]:
    """In these releases, kill -9 a worker that holds parts, when all tasks were sent. Returns the list of its pids."""
    killed: list[int] = []
    real = ClusterRows._results

    def deadly(self: ClusterRows, futures: Any, saying: str, watched: Any = None) -> Any:
        if watched is not None and self._releases - 1 in releases:
            pid = None
            while pid is None:  # a worker that was just killed may still be known as a holder
                holders = {worker for workers in self._client.who_has(self._held).values() for worker in workers}
                with contextlib.suppress(OSError, IndexError, KeyError):
                    pid = self._client.run(os.getpid, workers=[sorted(holders)[0]]).popitem()[1]
            assert pid != os.getpid()
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return real(self, futures, saying, watched)

    monkeypatch.setattr(ClusterRows, "_results", deadly)
    return killed


def test_a_worker_that_is_killed_changes_nothing(datalens, data, alone, tmp_path, monkeypatch) -> None:
    """With processes of their own, over TLS; what the dead one had read is read again, and counted once."""
    killed = killing(monkeypatch, range(3, 4))
    assert trained(datalens, tmp_path / "run", data, "--engine", "dask", "--workers", 2) == alone
    assert len(killed) == 1


@pytest.mark.slow
def test_a_worker_that_is_killed_in_each_of_the_eight_releases(datalens, data, alone, tmp_path, monkeypatch) -> None:
    killed = killing(monkeypatch, range(len(RELEASES)))
    assert trained(datalens, tmp_path / "run", data, "--engine", "dask", "--workers", 2) == alone
    assert len(set(killed)) == len(RELEASES) == 8


def test_workers_are_there_though_the_client_has_forgotten_them(
    datalens, data, here, alone, tmp_path, monkeypatch
) -> None:
    """`scheduler_info` is without workers at times: its own updates, every two seconds, ask for none."""
    monkeypatch.setattr(distributed.Client, "scheduler_info", lambda *args, **kwargs: {"workers": {}})
    monkeypatch.setattr(cluster, "SECONDS_WITHOUT_WORKERS", 0)
    assert trained(datalens, tmp_path / "run", data, "--engine", "dask", "--scheduler", here) == alone


def test_no_worker_is_left_while_reading(datalens, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_WITHOUT_WORKERS", 0)
    monkeypatch.setattr(cluster, "check_workers", lambda client, address: None)
    options: dict[str, Any] = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options, protocol="tcp://", host="127.0.0.1") as local:
        line = refused(datalens, tmp_path, data, "--engine", "dask", "--scheduler", local.scheduler_address)
    assert "no worker is left; start some, then run the same line again" in line


def test_no_worker_is_left(datalens, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_WITHOUT_WORKERS", 0.5)
    options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options, protocol="tcp://", host="127.0.0.1") as local:
        real = ClusterRows._results

        def alone_then(self: ClusterRows, futures: Any, saying: str, watched: Any = None) -> Any:
            if self.__dict__.get("_releases") == 2:
                for worker in list(local.workers.values()):
                    local.sync(worker.close, nanny=False)
            return real(self, futures, saying, watched)

        monkeypatch.setattr(ClusterRows, "_results", alone_then)
        asked = ("--engine", "dask", "--scheduler", local.scheduler_address, "--out", tmp_path / "run")
        line = datalens("train", "--data", data, *SETTINGS, *asked).refused(after_start=True)
    assert "no worker is left; charges are kept" in line
    monkeypatch.setattr(ClusterRows, "_results", real)
    charges = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(charges) == 1 + 1  # the head of the ledger, and the release that was made
    datalens("train", "--resume", "--out", tmp_path / "run").succeeded()  # in this process: the data is the same
    assert (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[:2] == charges


def test_a_lost_connection_is_said_in_one_line(datalens, data, here, tmp_path, monkeypatch) -> None:
    def lost(*args: Any, **kwargs: Any) -> Any:
        raise distributed.comm.CommClosedError("in <TLS (closed)>: Stream is closed")

    asked = ("--engine", "dask", "--scheduler", here)
    for name in ("find_spec", "_versions"):  # each of the calls of all workers
        real = distributed.Client.run

        def run(self: Any, work: Any, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            return lost() if work.__name__ == _name else _real(self, work, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(distributed.Client, "run", run)
            assert "to a worker was lost" in refused(datalens, tmp_path, data, *asked)
    monkeypatch.setattr(ClusterRows, "_holders", lost)
    line = datalens("train", "--data", data, *SETTINGS, *asked, "--out", tmp_path / "run").refused(after_start=True)
    assert "to a worker was lost (in <TLS (closed)>: Stream is closed): see that they run" in line


def test_a_killed_driver_goes_on_with_resume(datalens, data, here, tmp_path, monkeypatch) -> None:
    from datalens.privacy.ledger import Ledger

    class Killed(BaseException):
        pass

    run, real, calls = tmp_path / "run", Ledger.charge, []

    def deadly(self: Ledger, event: Any) -> int:
        calls.append(event)
        if len(calls) == 5:
            raise Killed
        return real(self, event)

    asked = ("--engine", "dask", "--scheduler", here, "--out", run)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", deadly)
        with pytest.raises(Killed):
            datalens("train", "--data", data, *SETTINGS, *asked)
    values = {path.name: path.read_bytes() for path in (run / "journal").iterdir()}
    assert len(values) == 4
    datalens("train", "--resume", *asked).succeeded()
    assert len((run / "ledger.jsonl").read_text().splitlines()) == 1 + len(RELEASES)
    assert {name: (run / "journal" / name).read_bytes() for name in values} == values


# --- persons --------------------------------------------------------------------------------------


def test_persons_are_protected_where_all_their_records_are_in_one_part(datalens, here, tmp_path) -> None:
    whole_set = write(tmp_path / "set", THREE, persons=True)
    asked = ("--record-id", "person")
    one = trained(datalens, tmp_path / "one", whole_set, *asked)
    assert trained(datalens, tmp_path / "many", whole_set, *asked, "--engine", "dask", "--scheduler", here) == one


def test_a_person_in_two_parts_is_found_and_refused(datalens, here, tmp_path) -> None:
    split = write(tmp_path / "set", [range(61), range(61, COUNT)], persons=True)
    asked = ("--record-id", "person", "--engine", "dask", "--scheduler", here, "--out", tmp_path / "run")
    line = datalens("train", "--data", split, *SETTINGS, *asked).refused()
    assert "a person has records in" in line and "part-0.parquet" in line and "part-1.parquet" in line
    assert "person 20" not in line and not (tmp_path / "run").exists()


# --- bad input: one line, and nothing is charged --------------------------------------------------


def refused(datalens: Any, tmp_path: Path, data: object, *options: object) -> str:
    line: str = datalens("train", "--data", data, *SETTINGS, *options, "--out", tmp_path / "run").refused()
    assert not (tmp_path / "run").exists()
    return line


def damage_a_part(folder: Path) -> None:
    content = (folder / "part-1.parquet").read_bytes()
    (folder / "part-1.parquet").write_bytes(content[:200] + bytes(300) + content[500:])


def another_size(folder: Path) -> None:
    write(folder.with_name("other"), [range(9)], side=SIDE + 1)
    (folder.with_name("other") / "part-0.parquet").rename(folder / "part-3.parquet")


def no_label(folder: Path) -> None:
    table = pq.read_table(folder / "part-2.parquet")
    pq.write_table(table.drop_columns(["label"]), folder / "part-2.parquet")


def other_classes(folder: Path) -> None:
    for number, names in enumerate((["a", "b"], ["b", "a"])):
        table = pq.read_table(folder / f"part-{number}.parquet").drop_columns(["label"])
        table = table.append_column("label", pa.array([0] * len(table)))
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        note = json.dumps({"info": {"features": features}}).encode()
        pq.write_table(table.replace_schema_metadata({b"huggingface": note}), folder / f"part-{number}.parquet")


BAD_PARTS = {
    damage_a_part: "part-1.parquet",
    another_size: "is 9x9 where the first image is 8x8",
    no_label: "has no column label",
    other_classes: "comes with other classes than in",
}


@pytest.mark.parametrize("damage", BAD_PARTS, ids=lambda damage: damage.__name__)
def test_parts_that_cannot_be_read_or_do_not_fit(datalens, here, tmp_path, damage) -> None:
    folder = write(tmp_path / "set", THREE)
    damage(folder)
    assert BAD_PARTS[damage] in refused(datalens, tmp_path, folder, "--engine", "dask", "--scheduler", here)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "dask"), "needs either --scheduler"),
        (("--engine", "dask", "--workers", 2, "--scheduler", "tcp://127.0.0.1:1"), "needs either --scheduler"),
        (("--engine", "dask", "--workers", 0), "--workers must be at least 1"),
        (("--workers", 2), "--workers is for a cluster"),
        (("--scheduler", "tcp://127.0.0.1:1"), "--scheduler is for a cluster"),
        (("--engine", "dask", "--scheduler", "tcp://127.0.0.1:1"), "there is no scheduler at tcp://127.0.0.1:1"),
        (("--engine", "dask", "--scheduler", "nonsense://x"), "there is no scheduler at nonsense://x"),
        (("--engine", "spark"), "--engine must be one of dask"),
    ],
)
def test_options_that_name_no_cluster(datalens, data, tmp_path, monkeypatch, options, said) -> None:
    monkeypatch.setattr(cluster, "SECONDS_TO_CONNECT", 1)
    assert said in refused(datalens, tmp_path, data, *options)


def test_other_versions_no_workers_and_workers_without_the_package(datalens, data, here, tmp_path, monkeypatch) -> None:
    asked = ("--engine", "dask", "--scheduler", here)
    ours = cluster._versions()
    with monkeypatch.context() as patch:  # the workers are in this process: they call what stands in its place here
        answers = iter([ours, ours | {"torch": "1.0"}, ours])
        patch.setattr(cluster, "_versions", lambda: next(answers))
        line = refused(datalens, tmp_path, data, *asked)
        assert "has torch 1.0, and this process " in line and "install the same versions everywhere" in line
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", find_nothing)
        assert "the workers lack datalens" in refused(datalens, tmp_path, data, *asked)
    options: dict[str, Any] = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options, protocol="tcp://", host="127.0.0.1") as local:
        line = refused(datalens, tmp_path, data, "--engine", "dask", "--scheduler", local.scheduler_address)
    assert "has no workers: start some with `dask worker" in line


def find_nothing(name: str) -> None:
    """In the place of `importlib.util.find_spec`."""


def test_patterns(datalens, data, here, alone, tmp_path) -> None:
    assert "matches nothing" in refused(datalens, tmp_path, data / "no-*.parquet")
    (data.parent / "x.csv").write_text("file_name,label\n")
    assert "x.csv is no .parquet file" in refused(datalens, tmp_path, data.parent / "x.c*")
    found = datalens("inspect", data / "part-*.parquet", "--json").succeeded().json
    assert found["records"] == COUNT
    for name in ("part-*.parquet", "*.parquet"):
        assert formats.schema_and_records(str(data / name), nominal_size=COUNT)[0].name == data.name  # its folder


def test_a_part_that_changes_between_releases_is_refused(data) -> None:
    schema, _ = formats.schema_and_records(str(data), nominal_size=COUNT)
    part = formats.cut(str(data), schema, pieces=1, folder=None, reading=Reading())[0]
    held = HeldPart(part, 5)
    held._rows = cluster._no_rows(part, 5)
    with pytest.raises(DatalensError, match="has changed since it was read"):
        cluster._sum(held, None, cluster.Facts(count=60, fingerprint=1))  # type: ignore[arg-type]


# --- object storage -------------------------------------------------------------------------------

SECRET = "a-secret-that-nobody-may-see-1f8b"


@pytest.fixture(scope="module")
def bucket(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """An S3 API on this machine with the parts in a bucket: its address, and the environment to read it with."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    import boto3

    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        store = boto3.client("s3")
        store.create_bucket(Bucket="images")
        for path in sorted(data.iterdir()):
            store.upload_file(str(path), "images", f"set/{path.name}")
        yield "s3://images/set/part-*.parquet", environment
    server.stop()


def test_parts_in_object_storage(datalens, here, alone, bucket, tmp_path) -> None:
    """The same release; and the credentials, which come from the environment, are in no file and no message."""
    address, _ = bucket
    asked = ("--engine", "dask", "--scheduler", here)
    result = datalens("train", "--data", address, *SETTINGS, *asked, "--out", tmp_path / "run").succeeded()
    assert released(tmp_path / "run") == alone
    assert SECRET not in result.out + result.err
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert json.loads((tmp_path / "run" / "config.json").read_text())["options"]["data"] == address
    found = datalens("inspect", address, "--json").succeeded().json
    assert found["records"] == COUNT


def test_storage_that_cannot_be_read(datalens, here, bucket, tmp_path, monkeypatch) -> None:
    asked = ("--engine", "dask", "--scheduler", here)
    assert "matches nothing" in refused(datalens, tmp_path, "s3://images/none-*.parquet", *asked)
    line = refused(datalens, tmp_path, "s3://nobodys-bucket/part-0.parquet", *asked)
    assert "s3://nobodys-bucket/part-0.parquet" in line and SECRET not in line
    line = refused(datalens, tmp_path, f"s3://somebody:{SECRET}@images/part-0.parquet", *asked)
    assert "credentials in it" in line and SECRET not in line
    assert "cannot be read here" in refused(datalens, tmp_path, "nosuch://images/part-0.parquet", *asked)


def test_classes_that_are_renamed(datalens, data, here, tmp_path) -> None:
    asked = ("--class-names", "a=cat,b=dog")
    one = trained(datalens, tmp_path / "one", data, *asked)
    assert trained(datalens, tmp_path / "many", data, *asked, "--engine", "dask", "--scheduler", here) == one
    line = refused(datalens, tmp_path / "x", data, "--skip-unreadable", "--engine", "dask", "--scheduler", here)
    assert "--skip-unreadable is for one process" in line


# --- inspect and evaluate read the same parts -----------------------------------------------------


def test_inspect_finds_the_same_on_workers(datalens, here, tmp_path) -> None:
    """Ten images are in two parts, one part is empty, and one image is none."""
    folder = write(tmp_path / "set", [range(100), range(0), range(90, COUNT)], persons=True)
    table = pq.read_table(folder / "part-0.parquet")
    pictures = table["image"].to_pylist()
    pictures[7]["bytes"] = b"no image"
    pq.write_table(
        table.set_column(0, "image", pa.array(pictures, table.schema.field("image").type)), folder / "part-0.parquet"
    )
    asked = ("--engine", "dask", "--scheduler", here)
    for options in ((), ("--record-id", "person"), ("--most", 50)):
        one = datalens("inspect", folder, *options, "--json").succeeded().json
        assert datalens("inspect", folder, *options, *asked, "--json").succeeded().json == one
        assert one["records"] == COUNT + 10
        if not options:
            assert len(one["duplicates"]) == 10 and len(one["unreadable"]) == 1
            assert "part-2.parquet: image 00090.png is the same as" in one["duplicates"][0]
    assert "--scheduler is for a cluster" in datalens("inspect", folder, "--scheduler", here).refused()
    arrays = {"images": np.zeros((9, 8, 8), np.uint8), "labels": np.zeros(9, np.int64), "classes": np.array(["a"])}
    np.savez(tmp_path / "a.npz", **arrays)
    assert "is not of parquet files" in datalens("inspect", tmp_path / "a.npz", *asked).refused()


def test_evaluate_sees_the_same_images_from_workers(datalens, data, here, tmp_path) -> None:
    from datalens.evaluate import look

    held_out = write(tmp_path / "held-out", [range(COUNT, COUNT + 31), range(COUNT + 31, COUNT + 60)])
    arrays = tmp_path / "set.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (101, SIDE, SIDE), dtype=np.uint8)
    both = {"images": pixels[:60], "labels": np.arange(60) % 2, "classes": np.array(["a", "b"])}
    np.savez(arrays, **both, test_images=pixels[60:], test_labels=np.arange(41) % 2)
    with distributed.Client(here) as client:
        for named in ((held_out, data), (arrays, None)):
            where = {"data": str(named[0]), "real_train": named[1] and str(named[1])}
            facts: dict[str, Any] = {**where, "folder": None, "reading": Reading(), "run": tmp_path}
            (test, training), (there, reads) = look.real_images(**facts), look.real_images(**facts, client=client)
            pairs = [(test, there), *((training(most), reads(most)) for most in (17, 10**6))]  # type: ignore[misc]
            for one, other in pairs:
                assert len(one.images) > 0 and one.schema == other.schema
                assert np.array_equal(one.images, other.images) and np.array_equal(one.labels, other.labels)


def test_evaluate_gives_the_same_on_workers(datalens, data, here, tmp_path) -> None:
    """The result of the second is the first's, from the cache: it is found by the images that were read."""
    held_out = write(tmp_path / "held-out", [range(COUNT, COUNT + 31), range(COUNT + 31, COUNT + 60)])
    trained(datalens, tmp_path / "run", data)
    asked = ("evaluate", tmp_path / "run", "--data", held_out, "--real-train", data, "--quick", "--json")
    one = datalens(*asked).succeeded().json
    assert datalens(*asked, "--engine", "dask", "--scheduler", here).succeeded().json == one
    publish = ("evaluate", tmp_path / "run", "--data", held_out, "--publish", "--epsilon", 1, "--engine", "dask")
    line = datalens(*publish, "--scheduler", here).refused(after_start=True)
    assert "leave --engine out" in line
