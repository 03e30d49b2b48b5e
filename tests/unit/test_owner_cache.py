"""What is kept of records lies under names that tell nothing, in folders and files of their owner's."""

import hashlib
import multiprocessing
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from datalens.data import owner_cache
from datalens.errors import DatalensError
from datalens.evaluate import cache
from datalens.private import features


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def extractor(tmp_path: Path) -> features.Extractor:
    torch.manual_seed(0)
    weights = tmp_path / "resnet18.safetensors"
    save_file(features.ResNet18().state_dict(), weights)
    return features.find(str(weights))


IMAGES = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)


def plain_name(extractor: features.Extractor) -> str:
    """What somebody who has the images, and nothing else, can compute."""
    key = hashlib.sha256(f"{extractor.sha256} {extractor.side} {IMAGES.shape}".encode())
    key.update(IMAGES.data)
    return key.hexdigest()


def test_a_listing_does_not_tell_whose_features_are_kept(
    home: Path, extractor: features.Extractor, capsys: pytest.CaptureFixture[str]
) -> None:
    found = features.extract(extractor, IMAGES, device=torch.device("cpu"))
    (home / "features").chmod(0o755)  # as somebody may have left it
    assert torch.equal(features.extract(extractor, IMAGES, device=torch.device("cpu")), found)
    assert mode(home / "features") == 0o700
    kept = sorted((home / "features").iterdir())
    assert len(kept) == 2 and all(mode(path) == 0o600 for path in kept)
    assert not any(plain_name(extractor) in path.name for path in kept)
    assert capsys.readouterr().err.count(f"kept, for the owner only, in {home / 'features'}: delete it") == 1
    (salt,) = [path for path in kept if path.name == owner_cache.SALT]
    salt.unlink()  # another cache has another salt, and the same images another name
    features.extract(extractor, IMAGES, device=torch.device("cpu"))
    assert len(list((home / "features").glob("*.npy"))) == 2


def test_what_was_kept_under_the_hash_itself_is_renamed(home: Path, extractor: features.Extractor) -> None:
    old = home / "features" / f"{plain_name(extractor)}.npy"
    old.parent.mkdir(parents=True)
    np.save(old, np.full((2, 512), 0.5, np.float16), allow_pickle=False)
    assert (features.extract(extractor, IMAGES, device=torch.device("cpu")) == 0.5).all()
    assert not old.exists() and len(list(old.parent.glob("*.npy"))) == 1


def test_the_same_for_what_was_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: owner_cache.folder("evaluations"))
    key = cache.key("judge", IMAGES)
    assert cache.remembered(f"judge-{key}", lambda: {"a": 1}) == {"a": 1}
    cache.remembered_tensors(f"moments-{key}", lambda: {"a": torch.ones(1)})
    assert cache.remembered(f"judge-{key}", lambda: {"a": 2}) == {"a": 1}
    names = [path.name for path in (home / "evaluations").iterdir()]
    assert len(names) == 3 and not any(key in name for name in names)
    assert all(mode(path) == 0o600 for path in (home / "evaluations").iterdir())


def first_salt(folder: Path, pipe: Any) -> None:
    pipe.send(owner_cache._salt(folder))


def test_there_is_one_salt(tmp_path: Path) -> None:
    ends = [multiprocessing.Pipe() for _ in range(4)]
    fork = multiprocessing.get_context("fork")
    all_at_once = [fork.Process(target=first_salt, args=(tmp_path, there)) for _, there in ends]
    for one in all_at_once:
        one.start()
    found = {here.recv() for here, _ in ends}
    for one in all_at_once:
        one.join()
    assert len(found) == 1 and len(found.pop()) == 32
    assert [path.name for path in tmp_path.iterdir()] == [owner_cache.SALT]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "file"))
    with pytest.raises(DatalensError, match="set DATALENS_HOME"):
        owner_cache.folder("features")
    with pytest.raises(DatalensError, match="cannot write") as caught:
        owner_cache._salt(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)
