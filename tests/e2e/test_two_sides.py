"""Two sides stay apart: what is in `release/` holds no bytes of a training image or a teacher, and depends on records
through released values alone; and what is not in `release/` is for its owner's eyes only."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.usefixtures("quickly")

RUN = 16  # bytes: a match of so many, not all alike, is no accident
COUNT, SIDE = 60, 16


def own_data(path, *, seed=0, labels=None):
    """Images without two equal runs of bytes."""
    luck = np.random.default_rng(seed)
    images = luck.integers(0, 256, (COUNT, SIDE, SIDE), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(COUNT) % 2 if labels is None else labels, classes=["a", "b"])
    return images


def train(datalens, data, out, *options):
    size = ("--nominal-size", COUNT, "--teachers", 5, "--batch", 4, "--steps", 3, "--preset", "quick")
    datalens("train", "--data", data, *size, *options, "--out", out).succeeded()


@pytest.fixture(scope="module")
def finished(datalens, tmp_path_factory):
    """A run on images that can be recognised, and these images."""
    folder = tmp_path_factory.mktemp("sides")
    images = own_data(folder / "own.npz")
    train(datalens, folder / "own.npz", folder / "run")
    return folder / "run", images


# --- the scan ---------------------------------------------------------------------------------


def words(content):
    """Eight bytes from every offset, as numbers."""
    raw = np.frombuffer(content, dtype=np.uint8)
    if len(raw) < 8:
        return np.zeros(0, dtype=np.uint64)
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(raw, 8)).view(np.uint64).ravel()


def secret_runs(arrays):
    """Every aligned run of RUN bytes with at least six different ones: pairs of eight-byte words [n, 2]."""
    found = []
    for array in arrays:
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)
        runs = raw[: len(raw) // RUN * RUN].reshape(-1, RUN)
        ordered = np.sort(runs, axis=1)
        distinct = 1 + (np.diff(ordered.astype(np.int16), axis=1) != 0).sum(axis=1)
        found.append(np.ascontiguousarray(runs[distinct >= 6]).view(np.uint64))
    return np.concatenate(found)


def holds(content, secrets):
    """Whether any of the secret runs lies in the content, at whatever offset."""
    here = words(content)
    starts = np.flatnonzero(np.isin(here[:-8], secrets[:, 0]))
    if not len(starts):
        return False
    known = set(map(tuple, secrets.tolist()))
    return any((int(here[at]), int(here[at + 8])) in known for at in starts)


def scales(images):
    """The ways in which pixels are written."""
    rows = images.reshape(len(images), -1)
    share = rows / 255
    return [rows, share.astype(np.float32), share, (2 * share - 1).astype(np.float32), rows.astype(np.float32)]


def teacher_states(run):
    """All a checkpoint has of the teachers: weights and the optimiser's moments, as float32 and as float64."""
    (path,) = (run / "checkpoints").glob("teachers-*")
    arrays = [value for value in load_file(path).values() if value.dtype == np.float32]
    assert arrays
    return [*arrays, *(value.astype(np.float64) for value in arrays)]


def contents(release):
    """The bytes of every file, and the pixels of every picture: what is compressed would not be found else."""
    for path in filter(Path.is_file, release.rglob("*")):
        content = path.read_bytes()
        yield path.name, content
        if path.suffix == ".png":
            with Image.open(path) as picture:
                yield path.name, np.asarray(picture).tobytes()
                yield path.name, json.dumps(picture.info, default=str).encode()


def leaks(release, run, images):
    """Names of the files of a release with bytes of a training image or of a teacher."""
    pixels, states = secret_runs(scales(images)), secret_runs(teacher_states(run))
    assert len(pixels) > COUNT * SIDE
    assert len(states) > 100
    secrets = np.concatenate([pixels, states])
    return {name for name, content in contents(release) if holds(content, secrets)}


def test_nothing_private_in_the_release(finished):
    run, images = finished
    assert {name for name, _ in contents(run / "release")} >= {
        *("generator.safetensors", "ledger.jsonl", "certificate.json", "samples.png")
    }
    assert leaks(run / "release", run, images) == set()


def test_nothing_private_in_what_is_sampled(datalens, finished, tmp_path):
    run, images = finished
    datalens("sample", run, "--count", 200, "--out", tmp_path / "out" / "s.npz").succeeded()
    with np.load(tmp_path / "out" / "s.npz") as file:  # compressed
        (tmp_path / "out" / "images").write_bytes(file["images"].tobytes())
    assert leaks(tmp_path / "out", run, images) == set()


def plant_image(release, run, images):
    (release / "note.bin").write_bytes(b"x" * 13 + images[17].tobytes())
    return "note.bin"


def plant_part_of_a_row(release, run, images):
    content = (release / "ledger.jsonl").read_bytes()
    (release / "ledger.jsonl").write_bytes(content + images[3].tobytes()[32 : 32 + 2 * RUN])
    return "ledger.jsonl"


def plant_floats(release, run, images):
    path = release / "generator.safetensors"
    save_file({**load_file(path), "buffer": (images[5] / 255).astype(np.float32)}, path)
    return "generator.safetensors"


def plant_picture(release, run, images):
    Image.fromarray(np.concatenate([images[9], images[10]])).save(release / "samples.png")
    return "samples.png"


def plant_weights(release, run, images):
    (path,) = (run / "checkpoints").glob("teachers-*")
    shutil.copy(path, release / "weights.safetensors")
    return "weights.safetensors"


def plant_one_teacher(release, run, images):
    """One row of one teacher, hidden behind the generator's own weights."""
    state = max(teacher_states(run)[:-1], key=lambda array: array.size)
    path = release / "generator.safetensors"
    path.write_bytes(path.read_bytes() + np.ravel(state)[-40:].tobytes())
    return "generator.safetensors"


@pytest.mark.parametrize(
    "plant",
    [plant_image, plant_part_of_a_row, plant_floats, plant_picture, plant_weights, plant_one_teacher],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_secret_is_found(finished, tmp_path, plant):
    run, images = finished
    release = Path(shutil.copytree(run / "release", tmp_path / "release"))
    name = plant(release, run, images)
    assert leaks(release, run, images) == {name}


# --- records reach the generator through released values alone --------------------------------


@pytest.fixture
def fixed_releases(monkeypatch):
    """A gate that charges, and then releases what was agreed on beforehand: no record has any say in it."""
    from datalens.privacy import mechanisms
    from datalens.privacy.released import Released

    for gate in (mechanisms.GaussianSum, mechanisms.DiscreteGaussianSum):

        def release(self, contributions, ledger, *, step, original=gate.release):
            real = original(self, contributions, ledger, step=step)
            value = np.random.default_rng(step).integers(-9, 10, real.value.shape)
            return Released(value=value, event=real.event, number=real.number)

        monkeypatch.setattr(gate, "release", release)


def students(datalens, folder):
    """All of the student, weights, buffers and moments, after the same releases from other labels and other images."""
    own_data(folder / "one.npz")
    own_data(folder / "other labels.npz", labels=1 - np.arange(COUNT) % 2)
    own_data(folder / "other images.npz", seed=1)
    found = []
    for name in ("one", "other labels", "other images"):
        train(datalens, folder / f"{name}.npz", folder / name)
        state = load_file(folder / name / "checkpoints" / "latest.safetensors")
        state |= {f"released {k}": v for k, v in load_file(folder / name / "release" / "generator.safetensors").items()}
        found.append(state)
    return found


def differing(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if one[name].tobytes() != other[name].tobytes()}


@pytest.mark.usefixtures("fixed_releases")
def test_the_generator_knows_the_released_values_only(datalens, tmp_path):
    """Its batch-norm buffers too: they follow public labels and latents."""
    one, labels, images = students(datalens, tmp_path)
    assert [name for name in one if "running_mean" in name]
    assert differing(one, labels) == differing(one, images) == set()


@pytest.mark.usefixtures("fixed_releases")
def test_a_buffer_that_sees_the_teachers_is_found(monkeypatch, datalens, tmp_path):
    """The twin: what the teachers' loss is finds its way into a running mean."""
    from datalens.released.student import Student
    from datalens.run.remote_teachers import Crowd

    losses, fit, step = [], Crowd.fit_step, Student.step

    def peek(self, *args, **kwargs):
        losses.append(fit(self, *args, **kwargs))
        return losses[-1]

    def leaky(self, fakes, direction):
        step(self, fakes, direction)
        self.generator.project[1].running_mean.add_(losses[-1])

    monkeypatch.setattr(Crowd, "fit_step", peek)
    monkeypatch.setattr(Student, "step", leaky)
    one, labels, images = students(datalens, tmp_path)
    assert differing(one, labels) == differing(one, images) == {"generator.project.1.running_mean"}


# --- who may look -----------------------------------------------------------------------------


def open_to_others(run):
    """Private files and folders that anybody but the owner has any right to."""
    paths = [run, *(path for path in run.rglob("*") if run / "release" not in (path, *path.parents))]
    assert len(paths) >= 7
    return {
        str(path.relative_to(run))
        for path in paths
        if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)
    }


@pytest.fixture
def generous():
    """A process that grants everybody everything."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous")
def test_all_that_is_private_is_for_the_owner(monkeypatch, datalens, tmp_path):
    """After every step, with the journal full, and at the end."""
    from datalens.released.student import Student

    own_data(tmp_path / "own.npz")
    run, step, seen = tmp_path / "run", Student.step, []

    def look(self, fakes, direction):
        step(self, fakes, direction)
        seen.append((open_to_others(run), len(list((run / "journal").iterdir()))))

    monkeypatch.setattr(Student, "step", look)
    train(datalens, tmp_path / "own.npz", run)
    assert seen == [(set(), 1), (set(), 2), (set(), 3)]
    assert open_to_others(run) == set()


def test_a_file_that_others_may_read_is_noticed(finished, tmp_path):
    run = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (run / "metrics.jsonl").chmod(0o640)
    (run / "checkpoints").chmod(0o755)
    assert open_to_others(run) == {"metrics.jsonl", "checkpoints"}


def test_the_owner_is_warned():
    """Of what may not be handed on, where people look first."""
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/privacy.md"):
        text = " ".join((root / page).read_text(encoding="utf-8").split())
        assert "checkpoints/" in text
        assert "0600" in text
