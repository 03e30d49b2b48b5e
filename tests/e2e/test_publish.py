"""`datalens evaluate --publish`: charged, journaled, in the certificate, and never paid twice."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from datalens.evaluate import publish
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import read_ledger
from datalens.released.certificate import CERTIFICATE, PAGE, certificate_bytes, file_hash, own_hash, page_bytes
from tests.e2e.conftest import Result

Call = Callable[..., Result]
OPTIONS = ("--publish", "--epsilon", "0.1", "--count", "200", "--epochs", "1", "--classifier", "logistic")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, datalens: Call) -> Path:
    """A folder with a run on digits, its data, and the budget of the data. Look, do not touch."""
    folder = tmp_path_factory.mktemp("publish")
    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8), digits.target.astype(np.int64)
    arrays = {"images": images[:1200], "labels": labels[:1200], "classes": np.array([str(i) for i in range(10)])}
    np.savez(folder / "data.npz", **arrays, test_images=images[1200:], test_labels=labels[1200:])
    mixed = {"test_images": images[1100:1300], "test_labels": labels[1100:1300]}
    np.savez(folder / "mixed.npz", **arrays, **mixed)  # type: ignore[arg-type]
    datalens("budget", folder / "budget", "--epsilon", 10.5, "--delta", 1e-5).succeeded()
    options = ("--nominal-size", 1200, "--epsilon", 10, "--texture", 0, "--budget", folder / "budget")
    datalens("train", "--data", folder / "data.npz", *options, "--out", folder / "run").succeeded()
    return folder


@pytest.fixture
def own(place: Path, tmp_path: Path) -> Path:
    """A copy to publish from. Its budget is its own, too."""
    copy = Path(shutil.copytree(place, tmp_path / "copy"))
    config = copy / "run" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace(str(place), str(copy)), encoding="utf-8")
    return copy


def published(run: Path) -> dict[str, Any]:
    return json.loads((run / "release" / CERTIFICATE).read_text(encoding="utf-8"))["published_accuracy"]


def charges(run: Path, folder: str = "publication") -> int:
    return len(read_ledger(run / folder / "ledger.jsonl")[1])


def test_it_is_in_the_certificate_the_report_and_the_comparison(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "data.npz"
    before = (run / "release" / "generator.safetensors").read_bytes()
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json
    assert found == published(run)
    assert found["asked"]["overlap"] == "none" and found["asked"]["known"] == "images"
    assert found["asked"]["held_out"] == 597 and found["asked"]["read_off"]
    assert (run / "release" / "generator.safetensors").read_bytes() == before
    assert charges(run) == 1
    checked = datalens("verify", run / "release", "--json").succeeded().json
    assert checked["ok"] and checked["published_accuracy"] == found
    accuracy = f"{100 * found['figures']['accuracy']:.1f} %"
    page = (run / "release" / "report.html").read_text(encoding="utf-8")
    assert accuracy in page and "covered by ε, may be published" in page
    assert "published accuracy" in (run / "release" / PAGE).read_text(encoding="utf-8")
    rows = datalens("compare", run, "--out", own / "compare.html", "--json").succeeded().json["runs"]
    assert rows[0]["published_accuracy"] == found["figures"]["accuracy"]
    assert accuracy in (own / "compare.html").read_text(encoding="utf-8")
    reserved = datalens("budget", own / "budget", "--json").succeeded().json
    assert len(reserved["runs"]) == 2 and 10 < reserved["epsilon_reserved"] <= 10.1 + 1e-6


def test_the_same_command_again_uses_the_value_and_pays_nothing(
    own: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = own / "run", own / "data.npz"

    interrupt(monkeypatch, publish, "write_again", run, data)
    assert charges(run) == 1 and "published_accuracy" not in (run / "release" / CERTIFICATE).read_text()
    first = datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json
    second = datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json
    assert first["table"] == second["table"] and charges(run) == 1
    assert len(datalens("budget", own / "budget", "--json").succeeded().json["runs"]) == 2
    line = datalens("evaluate", run, "--data", data, "--publish", "--epsilon", 0.2).refused()
    assert "--epsilon 0.1" in line and charges(run) == 1


def interrupt(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, run: Path, data: Path) -> None:
    """The command, killed when it calls this function; without `main`, which would turn it into an exit code."""
    from datalens.data import formats
    from datalens.data.own.reading import Reading

    def killed(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    wish = publish.Wish(
        epsilon=0.1, delta=1e-5, data=str(data), folder=None, reading=Reading(), classifier="logistic", images=200,
        epochs=1,
    )  # fmt: skip
    held_out = formats.load(str(data), "test")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        with pytest.raises(KeyboardInterrupt):
            publish.publish(run, held_out, wish, device="cpu")


def test_killed_before_the_charge_nothing_is_paid(own: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = own / "run", own / "data.npz"

    interrupt(monkeypatch, publish, "answers", run, data)
    assert charges(run) == 0
    datalens("evaluate", run, "--data", data, *OPTIONS).succeeded()
    assert charges(run) == 1 and len(datalens("budget", own / "budget", "--json").json["runs"]) == 2


def test_other_records_than_it_was_begun_with_are_compared_anew(
    own: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found out about the records of a publication that was killed says nothing about others."""
    run, mixed = own / "run", own / "mixed.npz"

    interrupt(monkeypatch, publish, "answers", run, own / "data.npz")
    assert "100 of the 200 held-out images" in datalens("evaluate", run, "--data", mixed, *OPTIONS).refused()
    line = datalens("evaluate", run, "--data", mixed, *OPTIONS, "--budget", own / "others").refused()
    assert "another --budget" in line and charges(run) == 0
    found = datalens("evaluate", run, "--data", mixed, *OPTIONS, "--overlap", "some", "--json").succeeded().json
    assert found["asked"]["overlap"] == "some" and found["asked"]["held_out"] == 200 and len(found["paid"]) == 3
    assert charges(run) == 1 and datalens("verify", run, "--json").succeeded().json["ok"]


def test_records_of_an_earlier_table_pay_for_this_one(own: Path, datalens: Call) -> None:
    run, options = own / "run", (*OPTIONS, "--overlap", "some")
    datalens("evaluate", run, "--data", own / "mixed.npz", *options).succeeded()
    found = datalens("evaluate", run, "--data", own / "data.npz", *OPTIONS, "--again", "--json").succeeded().json
    assert found["paid"][-1] == ["both", pytest.approx(10.2), pytest.approx(2e-5)]
    assert datalens("verify", run, "--json").succeeded().json["ok"]


def test_options_without_use_are_refused_before_anything_is_reserved(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "data.npz"
    publication = ("evaluate", run, "--data", data, "--publish", "--epsilon", 0.1)
    assert "chosen on test records" in datalens(*publication, "--classifier", "authors").refused()
    assert "at least 1" in datalens(*publication, "--count", 0).refused()
    datalens("budget", own / "others", "--epsilon", 1, "--delta", 1e-5).succeeded()
    line = datalens(*publication, "--overlap", "some", "--budget", own / "others").refused()
    assert "belong to the run's budget" in line and not (run / "publication").exists()


def test_killed_between_charge_and_journal_it_says_what_another_costs(
    own: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = own / "run", own / "data.npz"

    interrupt(monkeypatch, Journal, "save", run, data)
    assert charges(run) == 1
    line = datalens("evaluate", run, "--data", data, *OPTIONS).refused()
    assert "--again" in line and "0.2 in all" in line and charges(run) == 1
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--again", "--json").succeeded().json
    assert found["budget"]["epsilon"] == 0.2 and charges(run, "publication-2") == 2
    assert datalens("verify", run, "--json").succeeded().json["ok"]
    again = datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json
    assert again == found


def test_what_an_earlier_version_began_is_kept_and_not_added_to(own: Path, datalens: Call) -> None:
    """It released the table alone: the value is used again, and a further table would be priced with another noise."""
    run, data = own / "run", own / "data.npz"
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json
    asked = run / "publication" / "asked.json"
    kept = json.loads(asked.read_text(encoding="utf-8"))
    del kept["queries"]
    asked.write_text(json.dumps(kept), encoding="utf-8")
    assert datalens("evaluate", run, "--data", data, *OPTIONS, "--json").succeeded().json == found
    assert "leave --again out" in datalens("evaluate", run, "--data", data, *OPTIONS, "--again").refused()
    assert charges(run) == 1


def test_training_records_are_not_called_held_out(own: Path, datalens: Call) -> None:
    """Whoever says so is not believed where the training data are available."""
    run, data = own / "run", own / "mixed.npz"
    for option in ((), ("--overlap", "none")):
        line = datalens("evaluate", run, "--data", data, *OPTIONS, *option).refused()
        assert "100 of the 200 held-out images" in line
    assert not (run / "publication").exists()
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--overlap", "some", "--json").succeeded().json
    assert found["paid"][-1] == ["both", pytest.approx(10.1), pytest.approx(2e-5)]
    assert datalens("verify", run, "--json").succeeded().json["ok"]


def test_where_it_cannot_be_found_out_it_asks(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "mixed.npz"
    (own / "data.npz").unlink()
    line = datalens("evaluate", run, "--data", data, *OPTIONS).refused()
    assert "--overlap none, or --overlap some" in line
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--overlap", "none", "--json").succeeded().json
    assert found["asked"]["known"] == "word" and "the owner says so" in found["statement"]


def test_without_options_the_classifier_is_trained_as_evaluate_does(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "data.npz"

    def fast(*arguments: Any, **named: Any) -> Any:
        assert (len(arguments[0]), named["epochs"]) == (10_000, 10)
        return train(*arguments, **named | {"epochs": 1, "classifier": "logistic"})

    train = publish.train_classifier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "train_classifier", fast)
        found = datalens("evaluate", run, "--data", data, "--publish", "--epsilon", 0.1, "--json").succeeded().json
    assert (found["asked"]["images"], found["asked"]["epochs"]) == (10_000, 10)
    assert found["asked"]["classifier"] == "augmented"


def test_no_room_in_the_budget_charges_nothing(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "data.npz"
    options = ("--publish", "--epsilon", "0.6", *OPTIONS[3:])
    assert "the largest that fits is --epsilon 0.49" in datalens("evaluate", run, "--data", data, *options).refused(3)
    assert not (run / "publication").exists()
    datalens("budget", own / "others", "--epsilon", 1, "--delta", 1e-5).succeeded()
    found = datalens("evaluate", run, "--data", data, *options, "--budget", own / "others", "--json").succeeded().json
    assert found["budget"]["epsilon"] == 0.6
    assert datalens("budget", own / "others", "--json").json["epsilon_reserved"] == pytest.approx(0.6, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--epsilon", "0.1"), "--epsilon belongs to --publish"),
        (("--plan",), "--plan belongs to --publish"),
        (("--publish", "--epsilon", "0.1", "--quick"), "--quick is not for --publish"),
        (("--publish", "--epsilon", "0.1", "--seeds", "2"), "--seeds is not for --publish"),
        (("--publish", "--epsilon", "0.1", "--classifier", "all"), "lets one classifier answer"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    place: Path, datalens: Call, options: tuple[str, ...], words: str
) -> None:
    assert words in datalens("evaluate", place / "run", "--data", place / "data.npz", *options).refused()


def test_a_round_number_of_records_is_not_taken_for_theirs(own: Path, datalens: Call) -> None:
    """There are 597: with 400 in its place, 80 % right would be published as all right."""
    run, data = own / "run", own / "data.npz"
    options = ("--publish", "--epsilon", "0.4", *OPTIONS[3:], "--held-out", "400", "--json")
    found = datalens("evaluate", run, "--data", data, *options).succeeded().json
    table = np.array(found["table"])
    assert not found["asked"]["exact"] and not found["asked"]["read_off"]
    right = (10 * found["counts"][0] + np.trace(table)) / 11
    assert found["figures"]["accuracy"] == pytest.approx(right / sum(found["counts"]), abs=1e-4)
    assert datalens("verify", run, "--json").succeeded().json["ok"]
    assert "about 400 held-out records" in (run / "release" / "report.html").read_text(encoding="utf-8")


def test_a_plan_says_of_what_use_it_is(own: Path, datalens: Call) -> None:
    run, data = own / "run", own / "data.npz"
    found = datalens("evaluate", run, "--data", data, *OPTIONS, "--plan", "--json").succeeded().json
    assert found["held_out"] == 597 and not found["useful"]
    text = datalens("evaluate", run, "--data", data, *OPTIONS, "--plan", "--held-out", 10_000).succeeded().out
    assert "of little use" not in text
    assert not (run / "publication").exists()


def test_forged_tables_and_ledgers_do_not_stand(own: Path, datalens: Call) -> None:
    """The forger recomputes every hash."""
    run, data = own / "run", own / "data.npz"
    datalens("evaluate", run, "--data", data, *OPTIONS).succeeded()

    def forged(change: Callable[[dict[str, Any], Path], None]) -> bool:
        release = Path(shutil.copytree(run / "release", own / "forged"))
        certificate = json.loads((release / CERTIFICATE).read_text(encoding="utf-8"))
        change(certificate, release)
        certificate["sha256"] = {
            name: file_hash(release / name) for name in certificate["sha256"] if (release / name).is_file()
        }
        (release / PAGE).write_bytes(page_bytes(certificate))
        certificate["sha256"][PAGE] = file_hash(release / PAGE)
        certificate["sha256"]["certificate"] = own_hash(certificate)
        (release / CERTIFICATE).write_bytes(certificate_bytes(certificate))
        (release / "report.html").unlink()
        code = datalens("verify", release).code
        shutil.rmtree(release)
        return code == 1

    def table(c: dict[str, Any], release: Path) -> None:
        c["published_accuracy"]["table"][0][0] += 100

    def counts(c: dict[str, Any], release: Path) -> None:
        c["published_accuracy"]["counts"][0] += 100

    def without_counts(c: dict[str, Any], release: Path) -> None:
        del c["published_accuracy"]["counts"]

    def figures(c: dict[str, Any], release: Path) -> None:
        c["published_accuracy"]["figures"]["accuracy"] = 0.99

    def cheaper(c: dict[str, Any], release: Path) -> None:
        c["published_accuracy"]["budget"]["epsilon"] = 0.01

    def silent(c: dict[str, Any], release: Path) -> None:
        del c["published_accuracy"]

    def without_charge(c: dict[str, Any], release: Path) -> None:
        lines = (release / "accuracy-ledger.jsonl").read_bytes().splitlines(keepends=True)
        (release / "accuracy-ledger.jsonl").write_bytes(lines[0])

    def unsaid(c: dict[str, Any], release: Path) -> None:
        c["statement"] = c["statement"].split(" For a held-out")[0]

    assert not forged(lambda c, release: None)
    for change in (table, counts, without_counts, figures, cheaper, silent, without_charge, unsaid):
        assert forged(change), change.__name__


def test_the_owner_sees_real_images_and_the_parts_of_the_budget(own: Path, datalens: Call) -> None:
    run = own / "run"
    datalens("report", run).succeeded()
    page = (run / "owner.html").read_text(encoding="utf-8")
    assert "Training images, real" in page and page.count("data:image/png;base64,") == 2
    assert "Parts of the budget" in page and "<svg" not in page  # no line joins the σ of unrelated releases
    shares = [float(share) for share in re.findall(r'class="number"[^>]*>([0-9.]+) %</td>', page)]
    assert len(shares) == 4 and 99.8 <= sum(shares) <= 100.2
    (own / "data.npz").unlink()
    datalens("report", run).succeeded()
    page = (run / "owner.html").read_text(encoding="utf-8")
    assert "The training data are not available" in page and page.count("data:image/png;base64,") == 1
