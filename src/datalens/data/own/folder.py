"""A folder of images: class/xxx.png, or all images in one folder without classes; optionally in train/ and test/.

The classes are the folders, with images in them or not: a class does not come or go with a record.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datalens.data.dicom import DICOM, INDEX, are_dicom, is_dicom
from datalens.data.own.reading import ALL, NONE, TEST, Files, Found, Reading, check_classes, says_whose
from datalens.data.pixels import SUFFIXES
from datalens.errors import DatalensError, NoTestImages
from datalens.progress import say_once

# Files that may lie beside images; any other file is refused by name, since it may be meant as an image.
BESIDE = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".md", ".xml", ".yaml", ".yml", ".html", ".ini", ".db", ".log")
PREFIX, FOLDER = "prefix", "folder"  # --record-id: the file's name up to the first _; the folder that holds the file


def image_folder(path: Path, split: str, reading: Reading) -> Found:
    """List the images of a folder, from the names of its files alone.

    Raises:
        DatalensError: an option does not apply to folders, or the folder holds something that it should not.
    """
    if reading.record_id not in (None, PREFIX, FOLDER, DICOM, NONE):
        raise DatalensError(
            f"--record-id {reading.record_id}: in a folder of images it is {PREFIX} (file names up to the first _), "
            f"{FOLDER} (the folder that holds the file) or {DICOM} (the patient id in DICOM files); for a column, "
            "name a .csv or .parquet file with --data"
        )
    if reading.label not in (None, NONE):
        raise DatalensError(
            f"--label {reading.label}: in a folder of images, the folders in it are the classes; leave it out, write "
            f"{NONE}, or put a metadata.csv with that column there"
        )
    root = split_folder(path, split)
    top = sorted(entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False))
    unknown: list[str] = []
    strange: list[str] = []
    files = list(_files(root, "", unknown, strange))
    if strange and not reading.skip_unreadable:
        raise DatalensError(strange[0])
    if unknown and not reading.skip_unreadable:
        raise DatalensError(_is_no_image(unknown))
    if not files:
        raise DatalensError(
            f"{root} holds no image: put {', '.join(SUFFIXES)} or DICOM files there, in a folder for each class"
        )
    loose = next((name for name in files if "/" not in name), None)
    labelled = reading.label is None and bool(top)
    if labelled and loose is not None:
        raise DatalensError(
            f"{root / loose} lies beside folders of classes: put it into one of them, or add --label {NONE} for no "
            "classes"
        )
    names = [name.split("/")[0] for name in files] if labelled else [ALL] * len(files)
    declared = reading.named_classes() if labelled else None
    dicom = are_dicom([os.path.join(root, name) for name in files], skip_unreadable=reading.skip_unreadable)
    if dicom and labelled and declared is None:
        raise DatalensError(
            f"{root} has folders of DICOM files, which are often patients or studies, and names of classes are "
            f"published: declare the classes with --classes A,B, or use none, with --label {NONE}"
        )
    classes: tuple[str, ...] = (ALL,)
    origin = ""
    if labelled:
        trained = top if root == path or split == "train" else _classes_of(split_folder(path, "train"))
        classes, origin = declared or tuple(trained), "" if declared else "the names of folders"
    check_classes(classes, f"{root}")
    if doubt := _may_merge_persons(files, reading.record_id, labelled=labelled):
        say_once(
            f"warning: {doubt}: check that it is one person, since persons who share an id are not protected "
            "(docs/persons.md)"
        )
    number = {name: i for i, name in enumerate(classes)}
    misplaced = next((name for name in names if name not in number), None)
    if misplaced is not None:
        raise DatalensError(
            f"{root / misplaced} is none of the classes {', '.join(classes)[:200]}: move it, or add it to --classes"
        )
    by_patient = says_whose(reading, dicom=dicom, where=root)
    listed = Files(
        paths=[os.path.join(root, name) for name in files],
        labels=np.array([number[name] for name in names], dtype=np.int64),
        ids=None if by_patient else [_identity(name, reading.record_id) for name in files],
    )
    return Found(
        path=path,
        classes=classes,
        classes_from=origin,
        encoded=listed.encoded,
        listed=listed.listed,
        looked_at="the names of all files" + (", and the first bytes of each" if dicom else ""),
        count=len(files),
        dicom=dicom,
        record_id=DICOM if by_patient else None,
        no_images=(
            *(f"{name} is no {', '.join(SUFFIXES)} file: convert it, or take it out" for name in unknown),
            *strange,
        ),
    )


def split_folder(path: Path, split: str) -> Path:
    """Return the folder of a split. Unless there is train/ beside other splits only, all is for training."""
    try:
        folders = _classes_of(path)
    except NotADirectoryError:
        raise DatalensError(f"{path} is not a folder") from None
    split_up = "train" in folders and set(folders) <= {"train", *TEST}
    if split == "train":
        return path / "train" if split_up else path
    test = next((name for name in TEST if split_up and name in folders), None)
    if test is None:
        raise NoTestImages(
            f"{path} has no test images: put those for training into {path / 'train'}, others into {path / 'test'}"
        )
    return path / test


def _classes_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _identity(name: str, rule: str | None) -> str:
    """Return the id of a record, or of the person whose it is, from the file's name."""
    if rule in (None, NONE):
        return name
    folder, _, last = name.rpartition("/")
    identity = last.partition("_")[0] if rule == PREFIX else folder.rpartition("/")[2]
    if rule == PREFIX and "_" not in last:
        raise DatalensError(f"{name} has no _ in its name, so no prefix says whose it is: rename it, as person_1.png")
    return identity


def _may_merge_persons(files: list[str], rule: str | None, *, labelled: bool) -> str:
    """Return a sentence that says which files may give several persons one id; "" if no name looks like that.

    | rule | names that look like it |
    |---|---|
    | prefix | anna_smith_1.png and anna_jones_1.png, where no other prefix has a smith or a jones |
    | folder | cat/1.png, where cat is a class |

    Words that several prefixes have, such as left and right, tell no persons apart.
    """
    if rule == FOLDER and labelled:
        flat = next((name for name in files if name.count("/") == 1), None)
        merged = "--record-id folder makes one person of all images in class"
        return "" if flat is None else f"{merged} {flat.split('/')[0]}"
    if rule != PREFIX:
        return ""
    parts: dict[str, dict[str, str]] = {}  # prefix → (text between prefix and number → a file with it)
    for name in files:
        prefix, _, rest = os.path.splitext(name.rpartition("/")[2])[0].partition("_")
        middle = re.sub(r"[_-]?\d+$", "", rest) if re.search(r"[_-]\d+$", rest) else rest
        if any(letter.isalpha() for letter in middle):
            parts.setdefault(prefix, {})[middle] = name
    prefixes = Counter(middle for middles in parts.values() for middle in middles)
    for prefix, middles in parts.items():
        unshared = [name for middle, name in middles.items() if prefixes[middle] == 1]
        if len(unshared) > 1:
            return f"--record-id prefix makes one person, {prefix}, of {unshared[0]} and {unshared[1]}"
    return ""


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what a folder holds, sorted by name, without hidden files."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except FileNotFoundError:
        raise DatalensError(f"{folder} does not exist") from None
    except PermissionError:
        raise DatalensError(f"{folder} may not be read: check its permissions") from None
    return sorted(visible, key=lambda entry: entry.name)


def _is_no_image(paths: list[str]) -> str:
    """Return the message about files that may be meant as images and are of no known kind."""
    others = len(paths) - 1
    also = "" if not others else ", nor is another" if others == 1 else f", nor are {others} others"
    it = "them" if others else "it"
    return (
        f"{paths[0]} is no {', '.join(SUFFIXES)} or DICOM file{also}: convert {it}, or take {it} out "
        f"(--skip-unreadable leaves {it} out; `datalens inspect` lists all)"
    )


def _files(folder: Path, below: str, unknown: list[str], strange: list[str]) -> Iterator[str]:
    """Yield the names of the image files under the root, with / between folders.

    Files that may be meant as images, and are of no known kind, are added to `unknown`; messages about what is no file
    at all, to `strange`.
    """
    for entry in _entries(folder):
        name = below + entry.name
        if entry.is_symlink():
            strange.append(f"{entry.path} is a symbolic link: put the file itself there, or name it in a .csv")
        elif entry.is_dir():
            yield from _files(Path(entry.path), f"{name}/", unknown, strange)
        elif not entry.is_file():
            strange.append(f"{entry.path} is not a file: take it out")
        elif entry.name == INDEX:
            continue
        elif entry.name.lower().endswith(SUFFIXES):
            yield name
        elif not entry.name.lower().endswith(BESIDE) and entry.name != "LICENSE":
            if is_dicom(entry.path):
                yield name
            else:
                unknown.append(entry.path)
