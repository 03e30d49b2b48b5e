"""What a newcomer types, with the files that they have: broken ones, a table of patients, a test set of its own."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.usefixtures("quickly")
CLASSES = ("ohne Befund", "Rundherd groß")
COUNTS = (150, 60)
TRAIN = ("--nominal-size", 200, "--epsilon", 8, "--texture", 0)


def drawn(label, count, seed):
    random = np.random.default_rng([seed, label])
    return np.clip(random.normal(80 + 90 * label, 25, (count, 8, 8)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Class folders with good images, and files that are none."""
    root = tmp_path_factory.mktemp("data") / "scans"
    for part, seed, many in (("train", 0, 1.0), ("test", 1, 0.2)):
        for label, (kind, count) in enumerate(zip(CLASSES, COUNTS, strict=True)):
            (root / part / kind).mkdir(parents=True)
            for i, image in enumerate(drawn(label, round(count * many), seed)):
                Image.fromarray(image).save(root / part / kind / f"Röntgen {i:03}.png")
    return root


@pytest.fixture(scope="module")
def broken(folder, tmp_path_factory):
    import shutil

    root = tmp_path_factory.mktemp("data") / "broken"
    shutil.copytree(folder, root)
    here = root / "train" / CLASSES[0]
    first = sorted(here.iterdir())[0]
    first.write_bytes(first.read_bytes()[:60])
    (here / "leer.png").write_bytes(b"")
    (here / "text.png").write_bytes(b"no image")
    (here / "scan.dcm").write_bytes(b"DICM")
    (here / "link.png").symlink_to(first)
    return root


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory, datalens):
    out = tmp_path_factory.mktemp("runs") / "run"
    datalens("train", "--data", folder, *TRAIN, "--out", out).succeeded()
    return out


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A CSV of visits, several of a patient."""
    root = tmp_path_factory.mktemp("visits")
    with open(root / "visits.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "patient", "diagnosis", "sex", "age"])
        for i in range(120):
            patient = i // 3
            Image.fromarray(drawn(patient % 2, 1, i)[0]).save(root / f"{i}.png")
            rows.writerow([f"{i}.png", f"P{patient:03}", CLASSES[patient % 2], "mf"[patient % 3 == 0], 20 + patient])
    return root / "visits.csv"


# --- files as they are ---


def test_inspect_lists_all_problems_by_name(broken, datalens):
    found = datalens("inspect", broken, "--json").succeeded().json
    assert len(found["unreadable"]) == 4 and len(found["no_images"]) == 1
    shown = datalens("inspect", broken).succeeded().out
    for name in ("leer.png", "text.png", "scan.dcm", "link.png", "Röntgen 000.png"):
        assert name in shown
    assert "images that cannot be read: 4" in shown and "files that are not images: 1" in shown


def test_inspect_looks_at_test_images_too_and_says_what_skipping_leaves(tmp_path, datalens):
    for i in range(40):
        folder = tmp_path / "scans" / ("test" if i < 8 else "train") / CLASSES[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn(i % 2, 1, i)[0]).save(folder / f"{i}.png")
    root, one = tmp_path / "scans", CLASSES[0]
    whole = (root / "train" / one / "8.png").read_bytes()
    (root / "train" / one / "half.png").write_bytes(whole[: len(whole) // 2])
    (root / "test" / one / "half.png").write_bytes(whole[: len(whole) // 2])
    (root / "test" / one / "seen.png").write_bytes(whole)
    (root / "train" / one / "scan.dcm").write_bytes(bytes(128) + b"DICM")
    Image.open(root / "train" / one / "8.png").resize((20, 16)).save(root / "train" / one / "odd.png")
    found = datalens("inspect", root, "--json").succeeded().json
    assert len(found["unreadable"]) == 3 and "/test/" in found["unreadable"][2]
    assert len(found["in_both"]) == 1 and "seen.png" in found["in_both"][0]
    assert len(found["mixed"]) == 1 and "odd.png (16x20)" in found["mixed"][0]
    assert found["classes"][one] == 19 and found["test_images"] == 9
    left = datalens("inspect", root, "--skip-unreadable", "--json").succeeded().json
    assert left["classes"][one] == 17 and left["records"] == 33 and len(left["unreadable"]) == 3


def test_unreadable_files_are_refused_or_left_out_and_the_certificate_says_so(broken, tmp_path, datalens):
    out = tmp_path / "run"
    refusal = datalens("train", "--data", broken, *TRAIN, "--out", out).refused()
    assert "--skip-unreadable" in refusal or "symbolic link" in refusal
    skip = ("--data", broken, *TRAIN, "--out", out, "--skip-unreadable")
    assert "replace-one" in datalens("train", *skip, "--relation", "replace-one").refused()
    trained = datalens("train", *skip).succeeded()
    assert len((out / "skipped.txt").read_text().splitlines()) == 5
    assert (out / "skipped.txt").stat().st_mode & 0o777 == 0o600
    assert (
        "5" not in next(line for line in trained.err.splitlines() if "left out, listed" in line).partition("listed")[0]
    )
    certificate = json.loads((out / "release" / "certificate.json").read_text(encoding="utf-8"))
    assert any("cannot be read as images were left out" in line for line in certificate["declared_public"])
    assert "were left out" in (out / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert datalens("verify", out, "--json").succeeded().json["ok"]
    certificate["public"]["left_out"] = "5 files were left out"
    (out / "release" / "certificate.json").write_text(json.dumps(certificate), encoding="utf-8")
    assert not datalens("verify", out, "--json").json["ok"]


def test_a_table_without_options_is_explained(table, datalens):
    shown = datalens("inspect", table).succeeded().out
    assert "patient: text, 40 distinct (P000, " in shown and "age: whole numbers" in shown
    assert "no problem found" not in shown
    assert f"go on with: datalens inspect {table} --label diagnosis --record-id patient" in shown
    found = datalens("inspect", table, "--label", "diagnosis", "--record-id", "patient", "--json").succeeded().json
    assert found["persons"] == 40 and found["suggested"] == {}


def test_classes_have_names_and_columns_combine(table, datalens):
    plan = ("plan", "--data", table, "--nominal-size", 100, "--json")
    both = datalens(*plan, "--label", "diagnosis", "--label", "sex").succeeded().json
    assert "Rundherd groß + f" in both["public"]["classes"] and len(both["public"]["classes"]) == 4
    assert any("Rundherd groß + f" in line for line in both["for_the_owner_only"]["classes"])
    named = datalens(*plan, "--label", "sex", "--class-names", "m=männlich,f=weiblich").succeeded().json["public"]
    assert set(named["classes"]) == {"männlich", "weiblich"} and "classes" not in named["note"]
    assert "'f'" in datalens(*plan, "--label", "sex", "--class-names", "m=männlich").refused()
    assert "VALUE=NAME" in datalens(*plan, "--label", "sex", "--class-names", "m").refused()


def test_a_mistyped_folder_is_named_with_what_is_near(folder, monkeypatch, datalens):
    monkeypatch.chdir(folder.parent)
    message = datalens("train", "--data", "scan", *TRAIN, "--out", "x").refused()
    assert "no folder or file 'scan' here (did you mean scans?)" in message
    assert "did you mean scans?" in datalens("inspect", "scan").refused()
    assert "did you mean --epsilon?" in datalens("train", "--data", "scans", "--eps", 1, "--out", "x").refused()


# --- useless output never looks like success ---


def test_plan_answers_in_words_and_judges_classes_for_the_owner(folder, datalens):
    plan = ("plan", "--data", folder, *TRAIN)
    shown = datalens(*plan).succeeded().out
    words = [line.partition(":")[0] for line in shown.splitlines()]
    assert words.index("expect") < words.index("cost") < words.index("time")
    assert "owner only" in shown and "class Rundherd groß, 60 records:" in shown
    assert "sensitivity" not in shown and "sums_quantile" not in shown
    details = datalens(*plan, "--details").succeeded().out
    assert "sensitivity" in details and "sums_quantile" in details
    assert "for_the_owner_only" not in datalens("plan", "--data", "digits", "--json").succeeded().json


def test_verify_has_one_verdict(run, datalens):
    shown = datalens("verify", run).succeeded().out
    assert shown.startswith("the certificate stands:") and shown.count("accountant") == 1 and "rdp" not in shown
    details = datalens("verify", run, "--details").succeeded().out
    assert "rdp accountant" in details and "looser proof" in details


def test_an_accuracy_stands_beside_its_baselines(run, folder, datalens):
    found = datalens("evaluate", run, "--data", folder, "--quick", "--json").succeeded().json["utility"]
    assert found["accuracy_majority"] == pytest.approx(30 / 42)
    assert len(found["accuracy_real_per_class"]) == 2 and found["verdict"]
    assert "quick look" in found["classifier"] and found["seeds"] == 1
    shown = datalens("evaluate", run, "--data", folder, "--quick").succeeded()
    assert shown.out.startswith("verdict: ") and "always guessing the largest class 0.7143" in shown.out
    assert "a careful look (without --quick) takes about" in shown.err
    assert (
        "--quick sets --seeds itself" in datalens("evaluate", run, "--data", folder, "--quick", "--seeds", 2).refused()
    )


def test_a_test_set_may_be_a_file_of_its_own(run, folder, tmp_path, datalens):
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, labels = [], []
    for label, kind in reversed(list(enumerate(CLASSES))):
        for image in drawn(label, 20, 2):
            content = io.BytesIO()
            Image.fromarray(image).save(content, format="png")
            rows.append({"bytes": content.getvalue(), "path": f"{kind}{len(rows)}.png"})
            labels.append(kind)
    image = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"image": image, "label": labels}), tmp_path / "test.parquet")
    test = ("evaluate", run, "--data", tmp_path / "test.parquet", "--count", 400, "--seeds", 1)
    test += ("--epochs", 20, "--classifier", "logistic")
    shown = datalens(*test, "--json").succeeded()
    alone = shown.json["utility"]
    assert "are the test set" in shown.err and alone["test"] == 40
    assert alone["accuracy_real"] is None and alone["accuracy_majority"] == 0.5
    assert alone["accuracy"] > 0.9  # classes are matched by name: the file has them in another order
    with_ceiling = datalens(*test, "--real-train", folder, "--json").succeeded().json["utility"]
    assert with_ceiling["accuracy_real"] > 0.9
    assert "--real-train" in datalens(*test, "--measures", "fid").refused(after_start=True)


@pytest.mark.parametrize(("epsilon", "grade"), [(1, "strong"), (3, "moderate"), (10, "weak")])
def test_the_reports_verdict_is_graded(folder, epsilon, grade, tmp_path, datalens):
    out = tmp_path / "run"
    options = ("--nominal-size", 200, "--texture", 0, "--epsilon", epsilon)
    datalens("train", "--data", folder, *options, "--out", out).succeeded()
    page = (out / "release" / "report.html").read_text(encoding="utf-8")
    banner = page[page.index('<div class="banner') : page.index("</div>", page.index('<div class="banner'))]
    assert f'class="banner {grade}"' in banner and f"{grade.capitalize()} protection" in banner
    assert ("It may be handed on" in banner) == (grade != "weak")
    assert {"strong": "23.2 %", "moderate": "69.1 %", "weak": "100.0 %"}[grade] in banner
    assert "suspected before" in page and "Which classes are usable" in page
    assert "What would help the others" in page and f"<li>{CLASSES[1]}: merge it with a similar class" in page
    assert datalens("verify", out, "--json").succeeded().json["ok"]
