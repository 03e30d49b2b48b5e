"""What a newcomer meets first: nothing paid for is lost, useless output is called so, and waiting is announced."""

import contextlib
import io
import itertools
import pickle
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from datalens import DataLens, DatalensError, TrainOptions, progress
from datalens.cli import main
from datalens.cli.mistakes import joined_labels
from datalens.data.images import Encoded, readable
from datalens.data.own import tables
from datalens.data.own.python import as_arrays
from datalens.data.own.reading import Reading
from datalens.data.records import Dataset
from datalens.data.schema import LEFT_OUT, PERSON, Schema
from datalens.evaluate import compare, inspection
from datalens.evaluate.owner_report import blocks, shades
from datalens.evaluate.utility import majority_share, smaller, verdict
from datalens.methods import moments
from datalens.plans.guidance import belief, grade, worth
from datalens.plans.registry import make_plan
from datalens.private.moments import RecordRows
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released import drawing
from datalens.released.report import suspicions

FACTS = {"name": "x", "height": 16, "width": 16, "channels": 1, "classes": ("a", "b"), "nominal_size": 3000}


@pytest.fixture(scope="module")
def fitted():
    random = np.random.default_rng(0)
    labels = np.arange(300) % 2
    images = np.clip(random.normal(0.3 + 0.4 * labels[:, None, None], 0.1, (300, 8, 8)), 0, 1)
    model = DataLens(epsilon=20.0, nominal_size=300, class_names={0: "dunkel", 1: "hell"}, options={"texture": 0})
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("datalens.driver.say", said.append)
        model.fit(images, labels)
    return model, said


# --- nothing paid for is lost ---


def test_a_pickled_model_carries_its_release_and_no_path(fitted):
    model, _ = fitted
    content = pickle.dumps(model)
    assert str(model.release_).encode() not in content
    again = pickle.loads(content)
    assert again.release_ != model.release_
    assert (again.sample(20).images == model.sample(20).images).all()
    assert again.certificate.as_dict() == model.certificate.as_dict()


def test_a_pickle_has_bytes_of_release_files_and_nothing_else(fitted):
    model, _ = fitted
    state = model.__getstate__()
    assert {"certificate.json", "ledger.jsonl", "generator.safetensors"} <= set(state["_files"])
    assert all(type(content) is bytes for content in state["_files"].values())
    with pytest.raises(DatalensError, match="no file of a release"):
        DataLens().__setstate__({**state, "_files": {"../evil": b""}})


def test_a_deleted_temporary_folder_is_not_the_only_copy(fitted):
    model, _ = fitted
    before, old = model.sample(5).images, model.release_
    model._home.cleanup()
    assert not old.exists()
    assert (model.sample(5).images == before).all()


def test_fit_says_where_things_are_in_words_that_stay_true(fitted):
    said = fitted[1]
    assert said[-1].endswith("model.save('release')") and "/tmp" not in said[-1] and "Report:" not in said[-1]


def test_classes_have_the_names_that_were_given(fitted):
    model, _ = fitted
    assert model.sample(4).classes == ("dunkel", "hell") and not model.certificate.public.get("note")


def test_a_set_is_one_line_and_has_the_shape_of_its_files(fitted, tmp_path):
    synthetic = fitted[0].sample(7)
    assert "\n" not in repr(synthetic) and "7 synthetic images of 8x8 in 2 classes" in repr(synthetic)
    synthetic.to_npz(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["images"].shape == synthetic.images.shape == (7, 8, 8, 1)


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (np.zeros((9, 6, 6)), {}, "smaller than 8x8"),
        (np.zeros((9, 130, 8)), {}, "larger than 128x128"),
        (np.zeros((9, 8, 8)), {}, "raise epsilon="),
        (np.zeros((9, 8, 8)), {"options": {"coordinates": 10**6}}, "options={'coordinates': …}"),
    ],
)
def test_errors_of_python_name_its_parameters(images, options, words):
    with pytest.raises(DatalensError) as error:
        DataLens(nominal_size=9, classes=[0], **options).fit(images)
    assert words in str(error.value) and "--" not in str(error.value) and "\n" not in str(error.value)


def test_a_data_frame_is_told_what_to_pass():
    class Frame:  # as pandas' own looks
        iloc, columns = None, ("image", "label")

    with pytest.raises(DatalensError, match="pass fit"):
        DataLens(nominal_size=9).fit(Frame())


def test_the_images_of_a_data_frame_from_parquet_are_read():
    pandas = pytest.importorskip("pandas")
    data = io.BytesIO()
    Image.fromarray(np.full((8, 8), 77, np.uint8)).save(data, "PNG")
    frame = pandas.DataFrame({"image": [{"bytes": data.getvalue(), "path": "a.png"}] * 3, "label": [0, 1, 0]})
    for images in (frame["image"], list(frame["image"])):
        pixels, labels, _ = as_arrays(images, frame["label"])
        assert pixels.shape == (3, 8, 8, 1) and (pixels == 77).all() and labels.tolist() == [0, 1, 0]
    with pytest.raises(DatalensError, match="an image cannot be read"):
        as_arrays([{"bytes": data.getvalue()[:30], "path": None}], [0])


# --- useless output never looks like success ---


def planned(epsilon, sizes=(2000, 1000), **own):
    schema = Schema(**{**FACTS, "nominal_size": sum(sizes)})
    options = TrainOptions(out="plan", data="x", epsilon=epsilon, own=own)
    budget, settings = make_plan(options, schema)
    return schema, budget, settings


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_a_smaller_class_is_never_judged_better(epsilon):
    schema, budget, settings = planned(epsilon)
    counts = [10.0, 50.0, 100.0, 300.0, 1000.0, 5000.0]
    found = [settings.outlook(schema, budget, [3000.0, count])[1].usable for count in counts]
    assert found == sorted(found) and not found[0] and found[-1]


def test_the_epsilon_that_is_offered_makes_the_class_usable():
    offered = {}
    schema, budget, settings = planned(1.0)
    for count in (300.0, 500.0, 700.0, 900.0):
        words = settings.outlook(schema, budget, [2000.0, count])[1].remedy.partition("--epsilon ")[2]
        if words:
            offered[count] = float(words.partition(",")[0])
    assert offered
    for count, epsilon in offered.items():  # planned anew, as it would be
        schema, budget, settings = planned(epsilon)
        assert settings.outlook(schema, budget, [2000.0, count])[1].usable


def test_a_run_warns_of_a_rare_class_by_its_released_count(monkeypatch):
    said = []
    monkeypatch.setattr(moments, "say", said.append)
    schema, budget, settings = planned(1.0)
    moments.warn_of_rare(settings, schema, budget, torch.tensor([2900.0, 123.4]), torch.tensor([0, 1]))
    assert len(said) == 1 and "class b has about 120 records, by the released count" in said[0]


def test_persons_with_images_of_several_classes_are_counted_as_the_release_counts_them():
    """Ten persons have 3 images of a and 4 of b each, five have one of a: 10·0.6 + 5 and 10·0.8, as their rows are."""
    names = [f"{i:016}" for i in [*range(10)] * 7 + [*range(10, 15)]]
    persons = np.array([name.encode() for name in names], "V16")
    labels = np.repeat([0, 1, 0], (30, 40, 5))
    assert inspection._weights(labels, persons, ("a", "b", "c")) == {"a": 11.0, "b": 8.0, "c": 0.0}
    schema = Schema(**FACTS | {"nominal_size": 15, "classes": ("a", "b", "c")}, record_unit=PERSON)
    images = np.full((75, 16, 16, 1), 128, np.uint8)
    records = Dataset(schema=schema, images=images, labels=labels, ids=np.array(names, object))
    rows = RecordRows.gather(records, basis=make_basis("opponent", schema.shape, 4), texture=Texture(schema.shape))
    most = 2**14
    sums = rows.sums(rows.coordinates, clip=1.0, classes=3, grid=most, counted=most - 1).private_total
    assert (sums.reshape(3, -1)[:2, -1] / most).tolist() == pytest.approx([11.0, 8.0], rel=0.01)


@pytest.mark.parametrize(
    ("accuracy", "majority", "real", "words"),
    [
        (0.5333, 0.5333, 0.97, "no better than guessing"),
        (0.55, 0.5333, 0.97, "no better than guessing"),  # within two standard errors
        (0.82, 0.5333, 0.97, "two thirds of the way"),
        (0.96, 0.5333, 0.97, "as good as real"),
        (0.54, 0.5333, 0.54, "cannot tell"),
        (0.80, 0.5333, None, "not known"),
    ],
)
def test_an_accuracy_has_a_verdict(accuracy, majority, real, words):
    assert words in verdict(accuracy, majority=majority, real=real, test=600)


def test_the_largest_class_is_guessed():
    assert majority_share(np.array([0, 1, 1, 1])) == 0.75


def test_a_diagonal_cell_without_entries_is_not_shaded():
    assert shades([0, 5, 0]) == [0, 4, 0] and shades([1, 1]) == [2, 2] and shades([0, 0]) == [0, 0]
    table = blocks({"confusion": [[0, 3], [0, 4]]}, classes=("a", "b"))[0]
    assert table["shades"] == [[0, 4], [0, 4]]


@pytest.mark.parametrize(("epsilon", "word"), [(0.5, "strong"), (1, "strong"), (3, "moderate"), (10, "weak")])
def test_a_guarantee_is_graded_as_on_the_stewards_page(epsilon, word):
    assert grade(epsilon) == word and word in worth(epsilon)


def test_beliefs_are_those_of_the_stewards_page():
    table = [[f"{100 * belief(p, e):.1f}" for e in (0.5, 1, 3, 10)] for p in (0.01, 0.1, 0.5)]
    steward = Path("docs/steward.md").read_text(encoding="utf-8")
    for row in table:
        assert " | ".join(f"{cell} %" for cell in row) in steward
    assert suspicions(1.0)["rows"][1][1] == "23.2 %" and suspicions(10.0)["tenth"] == "100.0 %"


# --- files as they are ---


def _stream(files, size=2):
    names = list(files)
    for start in range(0, len(names), size):
        some = names[start : start + size]
        index = np.arange(start, start + len(some))
        yield Encoded(index=index, labels=index, ids=some, names=some, read=lambda i, some=some: files[some[i]])


def _png(side):
    from io import BytesIO

    from PIL import Image

    out = BytesIO()
    Image.fromarray(np.arange(side * side, dtype=np.uint8).reshape(side, side)).save(out, format="png")
    return out.getvalue()


def _one_left_out_moves_others(rule):
    """Return whether leaving one file away changes what the rule says of another."""
    files = {"a": _png(9), "b": _png(9)[:45], "c": b"", "d": _png(8), "e": b"no image"}
    for gone in itertools.chain([None], files):
        here = {name: content for name, content in files.items() if name != gone}
        if rule(here) != {"b", "c", "e"} & set(here):
            return True
    return False


def test_unreadable_files_are_left_out_by_a_rule_that_looks_at_each_alone():
    def ours(files):
        skipped = set()
        kept = {name for some in readable(_stream(files), skipped) for name in some.names}
        assert kept | skipped == set(files)
        return skipped

    def twin(files):  # leaves out what is unlike the first image: one record decides about others
        first = next(iter(files.values()))
        return {name for name, content in files.items() if content[:24] != first[:24]}

    assert not _one_left_out_moves_others(ours)
    assert _one_left_out_moves_others(twin)


def test_a_file_that_is_left_out_keeps_its_position():
    files = {"a": _png(9), "b": b"", "c": _png(9), "d": _png(9)}
    found = list(readable(_stream(files), set()))
    assert np.concatenate([some.index for some in found]).tolist() == [0, 2, 3]
    assert [some.read(i) for some in found for i in range(len(some.index))] == [files[name] for name in "acd"]


def test_a_schema_says_that_files_were_left_out_and_nothing_else():
    schema = Schema(**FACTS, left_out=LEFT_OUT)
    assert Schema.from_dict(schema.as_dict()) == schema
    assert "left_out" not in Schema(**FACTS).as_dict()
    with pytest.raises(ValueError, match="left_out"):
        Schema.from_dict({**schema.as_dict(), "left_out": "5 files were left out"})


def test_several_labels_are_one_option():
    assert joined_labels(["--label", "a", "--x", "--label=b"]) == ["--x", "--label", "a,b"]
    assert joined_labels(["x", "--label", "a"]) == ["x", "--label", "a"]


# --- waiting ---


def test_a_line_says_how_long_it_still_takes():
    count = progress.Count("training", 100, private=False)
    count.advance(0, 10)
    assert count.said(5.0) == "training: 10 of 100, about 45 s left"
    assert count.said(0.5) == ""  # over soon
    assert count.said(15.0) == "training: 10 of 100, 15 s so far"  # a long step: no estimate that grows
    count.advance(0, 40)
    assert count.said(25.0) == "training: 50 of 100, about 25 s left"
    hidden = progress.Count("reading x", 100, private=True)
    hidden.advance(0, 10)
    assert hidden.said(20.0) == "reading x: 20 s so far"  # logs do not say how many records there are
    assert hidden.said(2.0) == "reading x: about 20 s, by a timed part"  # 100 is public, and 10 is not said
    assert hidden.said(0.5) == ""


def test_without_a_terminal_there_are_lines_instead_of_silence(monkeypatch):
    heard = threading.Event()
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "say", lambda line: heard.set())
    with progress.told(lambda seconds: "still at it"):
        assert heard.wait(60)


def test_a_command_is_never_silent_for_long(monkeypatch):
    """Whatever it does has no bar: after ten seconds of silence, here 50 ms, it says how long it has been at work."""
    heard = threading.Event()
    said = []
    monkeypatch.setattr(progress, "EVERY", 0.05)
    monkeypatch.setattr(progress.console, "print", lambda line, **how: (said.append(line), heard.set()))
    told = progress.told
    monkeypatch.setattr(progress, "told", lambda line, **how: told(line, first=0.01, every=0.01))
    with progress.spoken_for("verify"):
        assert heard.wait(60)
    assert said[0] == "verify: 1 s so far"
    heard.clear()
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    with progress.spoken_for("verify"):
        assert not heard.wait(0.1)


def test_every_command_but_a_server_is_spoken_for(monkeypatch):
    named = []

    @contextlib.contextmanager
    def noting(name):
        named.append(name)
        yield

    monkeypatch.setattr(progress, "spoken_for", noting)
    monkeypatch.setattr(main, "_parse", lambda words: words)
    monkeypatch.setattr(main, "_run", lambda command, given: 0)
    for verb in main.COMMANDS:
        with pytest.raises(SystemExit):
            main.main([verb])
    assert named == [verb for verb in main.COMMANDS if verb != "studio"]


def test_reading_parquet_files_has_a_total(tmp_path):
    """So that `inspect` can say how long it will take; a folder, an array and a list have one, too."""
    for name in ("a", "b"):
        columns = {"image": [{"bytes": b"", "path": None}] * 3, "label": [0, 1, 0]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert tables.parquet_list(tmp_path, "train", Reading()).count == 6


def test_comparing_many_runs_says_how_long_it_takes_by_the_first(monkeypatch):
    clock, said = [0.0], []

    def read(run, release, name):
        clock[0] += 3.0
        return name

    monkeypatch.setattr(compare, "read", read)
    monkeypatch.setattr(compare.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compare, "say", said.append)
    for many, lines in ((3, []), (10, ["verifying 10 runs takes about 30 s, by the first"])):
        runs = [(Path("run"), Path("run"), str(number)) for number in range(many)]
        assert compare.read_all(runs) == [name for _, _, name in runs] and said == lines


def test_the_time_of_sampling_does_not_count_the_slow_first_images(monkeypatch):
    clock, said = [0.0], []

    class Slow:
        def images(self, labels, random):
            clock[0] += 20.0 if clock[0] == 0 else each * len(labels)
            return torch.zeros(len(labels))

    monkeypatch.setattr(drawing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(drawing, "say", said.append)
    each = 0.001
    drawing._say_how_long(Slow(), torch.zeros(1000, dtype=torch.int64))
    assert said == []
    drawing._say_how_long(Slow(), torch.zeros(20_000, dtype=torch.int64))
    assert said == ["sampling 20000 images takes about 20 s, by 64 timed ones"]
    each = 0.5  # as of a diffusion model: the picture that `verify` draws takes long, too
    drawing._say_how_long(Slow(), torch.zeros(100, dtype=torch.int64))
    assert said[1:] == ["sampling 100 images takes about 50 s, by 12 timed ones"]


def test_a_quick_look_is_at_smaller_images():
    assert smaller(np.zeros((2, 64, 64, 1), np.uint8)).shape == (2, 32, 32, 1)
    assert smaller(np.zeros((2, 28, 28, 3), np.uint8)).shape == (2, 28, 28, 3)
    assert smaller(np.zeros((2, 128, 16, 1), np.uint8)).shape == (2, 128, 16, 1)  # too narrow to be halved twice
