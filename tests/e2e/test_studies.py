"""Drawn DICOM files, from a folder of studies to a release, per patient; and no trace of who they were."""

from pathlib import Path

import pytest

from tests.e2e.conftest import call

pytestmark = [pytest.mark.usefixtures("quickly"), pytest.mark.filterwarnings("ignore:Full backward hook is firing")]


def traces(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Files under a folder, or their names, that hold one of these words in any usual encoding."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        if any(word.encode(form) in content for word in words for form in ("utf-8", "utf-16-le", "utf-32-le")):
            found.append(path.name)
    return found


def test_from_a_folder_of_studies_to_a_release_per_patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = call("data", "draw-studies", "studies", "--patients", 60, "--json").succeeded().json
    own = ("--label", "finding", "--classes", "clear,effusion", "--image-size", 16, "--grayscale")
    seen = call("inspect", drawn["list"], *own, "--json").succeeded().json
    assert seen["persons"] == 48 and seen["records"] + seen["test_images"] == drawn["images"]
    assert 0 < seen["dicom"]["studies"] < seen["dicom"]["series"] == seen["records"]
    asked = ("--data", drawn["list"], *own, "--nominal-size", 50, "--epsilon", 10)
    call("budget", "budget", "--epsilon", 20, "--delta", 1e-5).succeeded()
    said = call("train", *asked, "--budget", "budget", "--out", "run").succeeded()
    assert "by dicom" in call("budget", "budget", "--json").succeeded().out  # not by an id of another kind
    verified = call("verify", "run", "--json").succeeded().json
    assert verified["unit"] == "one person (all images with the same record id)"
    assert '"record_id": "dicom"' in Path("run/config.json").read_text(encoding="utf-8")

    words = ("Nobody^Patient", "Nobody", "19010101", "P00007", "IM00001", "2.25.")
    Path("said").mkdir()
    Path("said/said").write_text(said.out + said.err, encoding="utf-8")
    assert traces(Path("run"), words) == [] == traces(Path("said"), words)
    (Path("run") / "planted").write_bytes("Nobody".encode("utf-16-le"))  # the check sees it
    assert traces(Path("run"), words) == ["planted"]
    assert traces(Path("studies"), words)
