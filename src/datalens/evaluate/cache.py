"""A cache of measurements, keyed by a hash of everything they follow from: images, labels, settings, versions.

It is in $DATALENS_HOME or else in the user's cache folder. The results, features and classifiers in it come from real
records without noise: folder and files are for the owner only (modes 0700 and 0600), and no ε covers them.
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
    """Return the folder of the cache, creating it if necessary."""
    return owner_cache.folder("evaluations")


def path_of(name: str, suffix: str) -> Path:
    """Return the file for the name `kind-key`.

    Its name on disk is salted, since a plain hash of all images would let anybody who has them recognise them.
    """
    kind, _, hashed = name.rpartition("-")
    return owner_cache.file(folder(), hashed, kind=f"{kind}-", suffix=suffix)


def key(*parts: Any) -> str:
    """Return a hash of versions and values: arrays byte for byte, anything else as JSON."""
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
    """Return the cached result of this name, or else call `compute` and cache what it returns.

    Args:
        fresh: compute again even if there is a cached result.
    """
    path = path_of(name, ".json")
    if not fresh:
        try:
            cached = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(cached, dict):
                return cached
        except (OSError, ValueError):  # missing or damaged: compute again
            pass
    result = json.loads(json.dumps(compute()))  # so that types are the same with and without the cache
    store(path, json.dumps(result).encode(), private=True)
    return result


def remembered_tensors(
    name: str, compute: Callable[[], dict[str, torch.Tensor]], *, fresh: bool = False
) -> dict[str, torch.Tensor]:
    """Return cached tensors of this name, or else compute and cache them (see `remembered`)."""
    path = path_of(name, ".safetensors")
    if path.is_file() and not fresh:
        try:
            return load_tensors(path)[0]
        except (SafetensorError, OSError):  # damaged: compute again
            pass
    result = compute()
    save_tensors(path, result, {})
    return result
