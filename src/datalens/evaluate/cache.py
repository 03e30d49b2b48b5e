"""What was measured once is kept, by a hash of everything it follows from: images, labels, settings, versions.

In $DATALENS_HOME, else in the user's cache. Results, features and classifiers here come from real records without
noise: folder and files are for the owner's eyes only (modes 0700 and 0600), and no ε covers them.
"""

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from datalens.data import owner_cache
from datalens.files import load_tensors, save_tensors, store


def folder() -> Path:
    """Made when it is first needed."""
    return owner_cache.folder("evaluations")


def path_of(name: str, suffix: str) -> Path:
    """The file of `kind-key`, whose name on disk is salted: a hash of all images would tell that it is these."""
    kind, _, hashed = name.rpartition("-")
    return owner_cache.file(folder(), hashed, kind=f"{kind}-", suffix=suffix)


def key(*parts: Any) -> str:
    """A name for what follows from these: arrays byte for byte, anything else as JSON."""
    digest = hashlib.sha256()
    for part in (version("datalens"), torch.__version__, *parts):
        if isinstance(part, np.ndarray):
            head, body = f"{part.dtype} {part.shape}", np.ascontiguousarray(part).data
        else:
            head, body = json.dumps(part, sort_keys=True), memoryview(b"")
        digest.update(f"{len(head)}:{head}".encode())
        digest.update(body)
    return digest.hexdigest()


def remembered(name: str, compute: Callable[[], dict[str, Any]], *, fresh: bool = False) -> dict[str, Any]:
    """What `compute` returned when it was called under this name before, or else what it returns now."""
    path = path_of(name, ".json")
    if not fresh:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        except (OSError, ValueError):  # not there, or damaged: measured again
            pass
    result = json.loads(json.dumps(compute()))  # the same types, whether remembered or not
    store(path, json.dumps(result).encode(), private=True)
    return result


def remembered_tensors(
    name: str, compute: Callable[[], dict[str, torch.Tensor]], *, fresh: bool = False
) -> dict[str, torch.Tensor]:
    """The same for tensors."""
    path = path_of(name, ".safetensors")
    if path.is_file() and not fresh:
        try:
            return load_tensors(path)[0]
        except (SafetensorError, OSError):  # damaged: computed again
            pass
    result = compute()
    save_tensors(path, result, {})
    return result
