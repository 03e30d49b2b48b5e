"""The studio's server, without a browser: who may ask, where it looks and writes, and that runs do not need it."""

import http.client
import json
import os
import re
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datalens.errors import DatalensError
from datalens.released.certificate import PICTURE
from datalens.run.folder import PREVIEW, Run
from datalens.studio import jobs, scale, server
from datalens.studio.jobs import Studio
from tests.e2e.conftest import SMALL, call

# Works until it is told to stop; then it says what `datalens train --json` says.
WORKER = """
import json, pathlib, signal, sys, time
def stop(*_):
    print(json.dumps({"interrupted": True}), flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
out = pathlib.Path(next(word for word in sys.argv if word.startswith("--out="))[6:])
out.mkdir(exist_ok=True)
(out / "config.json").write_text("{}")
time.sleep(60)
"""


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    for kind in ("cat", "dog"):
        (tmp_path / "data/pets" / kind).mkdir(parents=True)
        for i in range(3):
            image = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "data/pets" / kind / f"{i}.png")
    (tmp_path / "secret").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "secret/0.png")
    (tmp_path / "data/way_out").symlink_to(tmp_path / "secret")
    return Studio(data=tmp_path / "data", out=tmp_path / "runs")


@pytest.fixture
def running(studio: Studio) -> Iterator[server.Server]:
    opened = server.open_studio(studio.data, studio.out, port=0)
    threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield opened
    opened.shutdown()
    opened.server_close()


def ask(
    running: server.Server, path: str, fields: Any = None, *, key: str | None = None, **headers: str | None
) -> tuple[int, Any, dict[str, str]]:
    """Answer, its JSON or bytes, and its headers. Fields are posted, as the page does; None leaves a header out."""
    usual: dict[str, str | None] = {"Host": running.origin.removeprefix("http://")}
    body = None
    if fields is not None:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        usual |= {"Origin": running.origin, "Content-Type": "application/json", "Content-Length": str(len(body))}
    if key is not None:
        usual[server.KEY] = key
    usual |= {name.replace("_", "-"): value for name, value in headers.items()}
    line = http.client.HTTPConnection(*running.server_address[:2], timeout=300)
    line.putrequest("GET" if body is None else "POST", path, skip_host=True, skip_accept_encoding=True)
    for name, value in usual.items():
        if value is not None:
            line.putheader(name, value)
    line.endheaders(body)
    answer = line.getresponse()
    content = answer.read()
    line.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(content) if is_json else content, dict(answer.headers)


def key_of(running: server.Server) -> str:
    token = running.new_address().partition("#")[2]
    return str(ask(running, "/api/key", {"token": token})[1]["key"])


# --- who may ask ----------------------------------------------------------------------------------


def test_the_server_listens_on_this_machine_only(running: server.Server) -> None:
    assert running.server_address[0] == "127.0.0.1"
    assert running.new_address().startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", server.FILES)
def test_its_own_files_need_no_key_and_name_nothing_elsewhere(running: server.Server, path: str) -> None:
    code, content, headers = ask(running, path)
    assert code == 200 and headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    if path.endswith(".png"):
        assert Image.open(BytesIO(content)).size == (280, 28)
        return
    links = [link for link in re.findall(rb"(?:https?:)?//[\w.]+", content) if link != b"http://www.w3.org"]
    assert links == []
    assert b"<script>" not in content and b"style=" not in content and b" onclick" not in content


def test_a_token_opens_the_studio_once(running: server.Server) -> None:
    token = running.new_address().partition("#")[2]
    assert ask(running, "/api/key", {"token": token})[0] == 200
    for wrong in (token, "", "x" * 43, None, 7):
        code, said, _ = ask(running, "/api/key", {"token": wrong})
        assert code == 403 and "address" in said["error"] and "key" not in said


@pytest.mark.parametrize("path", [*server.GET, *server.POST, "/api/address", "/api/report"])
def test_nothing_is_told_without_the_key(running: server.Server, studio: Studio, path: str) -> None:
    fields = None if path in server.GET else {"path": "", "run": "a", "name": "a", "data": "pets"}
    for key in (None, "", "x" * 43, running.new_address().partition("#")[2]):
        code, said, _ = ask(running, path, fields, key=key)
        assert code == 403 and set(said) == {"error"}
    assert list(studio.out.iterdir()) == []


@pytest.mark.parametrize("fields", [None, {"path": ""}])
def test_other_hosts_and_other_sites_are_refused(running: server.Server, fields: Any) -> None:
    key, path = key_of(running), "/api/list" if fields else "/api/real?data=pets"
    assert ask(running, path, fields, key=key)[0] == 200
    port = running.server_address[1]
    for host in (f"localhost:{port}", "evil.example", f"127.0.0.1:{port + 1}", "", None):
        assert ask(running, path, fields, key=key, Host=host)[0] in (400, 421)
    for origin in ("http://evil.example", "null", f"http://localhost:{port}", f"https://127.0.0.1:{port}"):
        assert ask(running, path, fields, key=key, Origin=origin)[0] == 403
    for site in ("cross-site", "same-site"):
        assert ask(running, path, fields, key=key, Sec_Fetch_Site=site)[0] == 403
    if fields:
        assert ask(running, path, fields, key=key, Origin=None)[0] == 403
        assert ask(running, path, fields, key=key, Content_Type="text/plain")[0] == 403


def test_requests_are_small_json_objects(running: server.Server) -> None:
    key = key_of(running)
    assert ask(running, "/api/list", b" " * (server.MOST_BYTES + 1), key=key)[0] == 413
    assert ask(running, "/api/list", b"", key=key, Content_Length=None)[0] == 413
    assert ask(running, "/api/list", b"{}", key=key, Content_Length="-1")[0] == 413
    for content in (b"[]", b"{", b"7", b"\xff\xfe"):
        assert ask(running, "/api/list", content, key=key)[0] == 400
    assert ask(running, "/api/nothing", {}, key=key)[0] == 404
    assert ask(running, "/api/nothing", key=key)[0] == 404


# --- where it looks and writes --------------------------------------------------------------------


@pytest.mark.parametrize("path", ["..", "../secret", "/etc", "way_out", "pets/../../secret", "no such", "a\0b", "~"])
def test_paths_stay_in_the_chosen_folder(running: server.Server, path: str) -> None:
    key = key_of(running)
    for where, fields in (
        ("list", {"path": path}),
        ("inspect", {"data": path}),
        ("start", {"data": path, "name": "a"}),
    ):
        code, said, _ = ask(running, f"/api/{where}", fields, key=key)
        assert code == 400 and re.search("leads out|no such|not text", said["error"])
    assert [entry["name"] for entry in ask(running, "/api/list", {"path": ""}, key=key)[1]["entries"]] == ["pets"]


@pytest.mark.parametrize("name", ["../secret/0.png", "/etc/hostname", "pets/cat/link.png", "way_out/0.png"])
def test_lists_name_no_file_outside_the_chosen_folder(running: server.Server, studio: Studio, name: str) -> None:
    (studio.data / "pets/cat/link.png").symlink_to(studio.data.parent / "secret/0.png")
    rows = f"file_name,label\npets/cat/0.png,cat\n{name},dog\n"
    (studio.data / "list.csv").write_text(rows, encoding="utf-8")
    key = key_of(running)
    for where in ("inspect", "plan", "start", "commands"):
        code, said, _ = ask(running, f"/api/{where}", {"data": "list.csv", "name": "a"}, key=key)
        assert code == 400 and "leads to files outside" in said["error"]
    assert ask(running, "/api/real?data=list.csv", key=key)[0] == 400
    (studio.data / "list.csv").write_text(rows.replace(name, "pets/dog/0.png"), encoding="utf-8")
    assert ask(running, "/api/commands", {"data": "list.csv"}, key=key)[0] == 200


def test_links_to_tables_and_files_of_classes_stay_inside(running: server.Server, studio: Studio) -> None:
    key = key_of(running)
    outside = studio.data.parent / "secret/names"
    outside.write_text("a\nb\n", encoding="utf-8")
    assert "leads out" in ask(running, "/api/commands", {"data": "pets", "classes": str(outside)}, key=key)[1]["error"]
    (studio.data / "names").write_text("cat\ndog\n", encoding="utf-8")
    said = ask(running, "/api/commands", {"data": "pets", "classes": "names"}, key=key)[1]
    assert f"--classes={studio.data / 'names'}" in said["inspect"]
    (studio.data / "tables").mkdir()
    (studio.data / "tables/train.parquet").symlink_to(outside)
    assert "leads to files outside" in ask(running, "/api/inspect", {"data": "tables"}, key=key)[1]["error"]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", "-a", "a b", "ä", "a" * 61, "a\n", "budgets"])
def test_names_of_runs_lead_nowhere_else(running: server.Server, studio: Studio, name: str) -> None:
    key = key_of(running)
    assert ask(running, "/api/start", {"data": "pets", "name": name}, key=key)[0] == 400
    for path in ("stop", "resume", "evaluate", "verify", "sample", "report"):
        assert ask(running, f"/api/{path}", {"run": name}, key=key)[0] == 400
    assert ask(running, "/api/new-budget", {"name": f"/{name}", "epsilon": 1, "delta": 1e-5}, key=key)[0] == 400
    assert list(studio.out.iterdir()) == []


def test_answers_become_values_and_never_options(studio: Studio) -> None:
    words = studio.words(
        "train", {"data": "pets", "label": "--out=/", "epsilon": "3 --force", "out": "/x", "grayscale": True}
    )
    assert words[2:] == ["--label=--out=/", "--epsilon=3 --force", "--grayscale", "--json"]
    assert jobs.shown(words).endswith("'--epsilon=3 --force' --grayscale")
    for wrong in ("a\nb", "x" * (jobs.LONGEST + 1), ["a"], {"a": 1}, "\x1b[2J"):
        with pytest.raises(DatalensError, match="too long, or is not text"):
            studio.words("plan", {"data": "pets", "classes": wrong})


def test_the_same_commands_answer(running: server.Server) -> None:
    key = key_of(running)
    code, seen, _ = ask(running, "/api/inspect", {"data": "pets"}, key=key)
    assert code == 200 and seen["classes"] == {"cat": 3, "dog": 3} and seen["command"].startswith("datalens inspect ")
    code, said, _ = ask(running, "/api/plan", {"data": "pets", "epsilon": "much"}, key=key)
    assert (code, said["error"]) == (400, "--epsilon must be a number, not 'much'")
    assert ask(running, "/api/real?data=pets", key=key)[1][:4] == b"\x89PNG"


def test_beliefs_are_those_of_the_page_for_stewards() -> None:
    page = (Path(__file__).parents[2] / "docs/steward.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) % \| ([\d. %|]+) \|$", page, flags=re.M)
    assert [int(before) / 100 for before, _ in rows] == list(scale.SUSPECTED)
    for before, cells in rows:
        assert [float(cell.strip(" %")) for cell in cells.split("|")] == [
            pytest.approx(100 * scale.belief(int(before) / 100, epsilon), abs=0.051) for epsilon in scale.SCALE
        ]
    assert scale.percent(0.9996) == "over 99.9 %"  # never certain


def test_commands_are_shown_before_anything_runs(running: server.Server, studio: Studio) -> None:
    asked = {"data": "pets", "epsilon": "3.0", "delta": "0.00001", "budget": "all", "name": "a"}
    code, said, _ = ask(running, "/api/commands", asked, key=key_of(running))
    where = f"--data={studio.data / 'pets'}"
    assert code == 200 and said == {
        "inspect": f"datalens inspect {studio.data / 'pets'}",
        "plan": f"datalens plan {where} --epsilon=3.0 --delta=0.00001",
        "train": f"datalens train --out={studio.out / 'a'} {where} --epsilon=3.0 --delta=0.00001 "
        f"--budget={studio.out / 'budgets/all'}",
    }
    assert list(studio.out.iterdir()) == []


def test_what_a_command_says_while_it_works_can_be_asked_for(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as about how long it takes. This one says so, and waits until it was heard."""
    heard = tmp_path / "heard"
    code = f"""
import os, sys, time
print("looking into images: about 40 s, by a timed part", file=sys.stderr, flush=True)
while not os.path.exists({str(heard)!r}):
    time.sleep(0.01)
print('{{"ok": true}}')
"""
    monkeypatch.setattr(jobs, "_command", lambda words: [sys.executable, "-c", code])
    assert studio.said() == ""
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(studio.ask(["inspect"])))
    asking.start()
    while not (line := studio.said()):
        time.sleep(0.01)
    heard.touch()
    asking.join()
    assert line == "looking into images: about 40 s, by a timed part" and found[0]["ok"]
    assert studio.said() == ""


def test_a_budget_is_made_once_and_shows_what_is_left(
    running: server.Server, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Studio, "ask", lambda self, words: call(*words).succeeded().json)
    key = key_of(running)
    assert ask(running, "/api/budgets", {}, key=key)[1] == []
    asked = {"name": "all", "epsilon": "3", "delta": "0.00001"}
    assert ask(running, "/api/new-budget", asked, key=key)[0] == 200
    (found,) = ask(running, "/api/budgets", {}, key=key)[1]
    assert (found["name"], found["epsilon"], found["runs"]) == ("all", 3.0, 0)
    assert found["epsilon_left"] == pytest.approx(3.0)
    assert found["command"] == f"datalens budget {studio.out / 'budgets/all'}"
    (studio.out / "budgets/broken").mkdir()
    assert "cannot be read" in ask(running, "/api/budgets", {}, key=key)[1][1]["lines"][0]


# --- runs do not need it --------------------------------------------------------------------------


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_command", lambda words: [sys.executable, "-c", WORKER, *words])


def until(studio: Studio, name: str, state: str) -> dict[str, Any]:
    """Wait for a state, however busy the machine is; a run that failed will not come to it."""
    while True:
        status = studio.status(name)
        began = (studio.out / name / "config.json").exists()
        if status["state"] == state and began:
            return status
        assert status["state"] != "failed", status
        time.sleep(0.05)


@pytest.mark.usefixtures("working")
def test_a_run_outlives_its_studio_and_two_studios_do_no_harm(studio: Studio) -> None:
    studio.start("a", {"data": "pets"})
    until(studio, "a", "working")
    other = Studio(data=studio.data, out=studio.out)  # the first one is gone: nothing of it is used
    assert other.names() == ["a"] and other.status("a")["state"] == "working"
    for again in (lambda: other.start("a", {"data": "pets"}), lambda: other.resume("a"), lambda: other.evaluate("a")):
        with pytest.raises(DatalensError, match="already"):
            again()
    other.stop("a")
    assert until(other, "a", "stopped")["doing"] == "train"
    studio.resume("a")
    assert until(other, "a", "working")["command"].endswith("--resume")
    kept = json.loads((studio.out / ".studio/a.json").read_text(encoding="utf-8"))
    os.kill(kept["pid"], 9)
    until(studio, "a", "stopped")
    studio.stop("a")  # whoever has the number now gets no signal
    assert (studio.out / ".studio").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("working")
def test_a_studio_that_is_killed_while_it_begins_a_run_leaves_none_behind(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def popen(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(jobs.subprocess, "Popen", popen)
        with pytest.raises(Killed):
            studio.start("a", {"data": "pets"})
    assert studio.status("a")["state"] == "failed"
    (studio.out / ".studio/not a run.json").write_text("{}", encoding="utf-8")
    studio.start("a", {"data": "pets"})
    until(studio, "a", "working")
    kept = studio.out / ".studio/a.json"
    fields = json.loads(kept.read_text(encoding="utf-8"))
    kept.write_text(json.dumps({**fields, "pid": None}), encoding="utf-8")
    with pytest.raises(DatalensError, match="in a shell"):
        studio.stop("a")
    os.kill(fields["pid"], 9)
    assert studio.names() == ["a"]


def test_first_images_are_shown_while_a_run_works(running: server.Server, studio: Studio) -> None:
    key = key_of(running)
    (studio.out / "a").mkdir()
    (studio.out / ".studio").mkdir()
    kept = {"words": ["train"], "asked": {"data": "pets"}, "doing": "train", "pid": 1}
    (studio.out / ".studio/a.json").write_text(json.dumps(kept), encoding="utf-8")
    assert studio.status("a")["picture"] is None
    assert ask(running, "/api/picture?run=a", key=key)[0] == 400
    (studio.out / "a" / PREVIEW).write_bytes(b"first")
    assert studio.status("a")["picture"] > 0
    assert ask(running, "/api/picture?run=a", key=key)[1] == b"first"
    (studio.out / "a/release").mkdir()
    (studio.out / "a/release" / PICTURE).write_bytes(b"last")
    assert ask(running, "/api/picture?run=a", key=key)[1] == b"last"


@pytest.mark.parametrize("warm_start", ["moments", "off"])
def test_a_run_draws_what_it_has_released_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickly: None, warm_start: str
) -> None:
    sizes, draw = [], Run.preview

    def preview(run: Run, generator: Any) -> None:
        draw(run, generator)
        path = run.path / PREVIEW
        assert path.stat().st_mode & 0o777 == 0o600 and not (run.path / "release").exists()
        sizes.append(Image.open(path).size)

    monkeypatch.setattr(Run, "preview", preview)
    how = ("--data", "digits", "--epsilon", 10) if warm_start == "moments" else (*SMALL, "--steps", 3)
    call("train", *how, "--warm-start", warm_start, "--out", tmp_path / "run").succeeded()
    assert len(sizes) == (1 if warm_start == "moments" else 2)
    assert sizes[0] == Image.open(tmp_path / "run/release" / PICTURE).size
    assert not (tmp_path / "run" / PREVIEW).exists()


def test_a_run_that_does_not_begin_says_why(studio: Studio) -> None:
    studio.start("a", {"data": "pets", "epsilon": "-1", "nominal_size": "6"})
    while (status := studio.status("a"))["state"] == "working":  # on a busy machine a process begins late
        time.sleep(0.05)
    assert status["state"] == "failed" and "epsilon" in status["error"]
    with pytest.raises(DatalensError, match="no run b"):
        studio.status("b")


def test_a_release_is_downloaded_if_it_stands(
    running: server.Server, studio: Studio, trained: Path, tmp_path: Path
) -> None:
    key = key_of(running)
    shutil.copytree(trained, studio.out / "a")
    code, content, headers = ask(running, "/api/zip?run=a", key=key)
    assert code == 200 and headers["Content-Type"] == "application/zip" and headers["Cache-Control"] == "no-store"
    with zipfile.ZipFile(BytesIO(content)) as archive:
        archive.extractall(tmp_path / "got")
    assert call("verify", tmp_path / "got/release", "--json").succeeded().json["ok"]
    assert ask(running, "/api/picture?run=a", key=key)[1][:4] == b"\x89PNG"
    verify = studio.ask

    def changing(self: Studio, words: list[str]) -> dict[str, Any]:
        said = verify(words)
        (studio.out / "a/release/samples.png").write_bytes(b"another")
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Studio, "ask", changing)
        assert "was written again" in ask(running, "/api/zip?run=a", key=key)[1]["error"]
    ledger = studio.out / "a/release/ledger.jsonl"
    ledger.write_text(ledger.read_text(encoding="utf-8").rpartition("\n{")[0] + "\n", encoding="utf-8")
    code, said, _ = ask(running, "/api/zip?run=a", key=key)
    assert code == 400 and "does not stand" in said["error"]


def test_a_recipients_page_is_shown_once_and_can_do_nothing(
    running: server.Server, studio: Studio, trained: Path
) -> None:
    key = key_of(running)
    shutil.copytree(trained, studio.out / "a")
    assert ask(running, "/api/report", {"run": "b"}, key=key)[0] == 400
    path = ask(running, "/api/report", {"run": "a"}, key=key)[1]["path"]
    assert ask(running, path, Sec_Fetch_Site="cross-site")[0] == 403  # and is not used up by that
    code, content, headers = ask(running, path)
    assert code == 200 and content == (trained / "release/report.html").read_bytes()
    assert "sandbox;" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    assert ask(running, path)[0] == 403
    assert ask(running, server.REPORTS)[0] == 403


def test_images_are_drawn_to_hand_on_with_their_papers(
    running: server.Server, studio: Studio, trained: Path, tmp_path: Path
) -> None:
    key = key_of(running)
    shutil.copytree(trained, studio.out / "a")
    (studio.out / ".studio").mkdir()
    kept = {"words": ["train"], "asked": {"data": "pets"}, "doing": "train", "pid": 1}
    (studio.out / ".studio/a.json").write_text(json.dumps(kept), encoding="utf-8")
    assert ask(running, "/api/images?run=a", key=key)[0] == 400
    for wrong in ("0", "-1", "many", str(jobs.MOST_IMAGES + 1), "9" * 5000, None):
        assert ask(running, "/api/sample", {"run": "a", "count": wrong}, key=key)[0] == 400
    assert ask(running, "/api/sample", {"run": "a", "count": "20"}, key=key)[0] == 200
    status = until_done(studio, "a")
    assert (status["state"], status["doing"], status["images"], status["error"]) == ("done", "sample", 20, "")
    with zipfile.ZipFile(BytesIO(ask(running, "/api/images?run=a", key=key)[1])) as archive:
        archive.extractall(tmp_path / "got")
    got = tmp_path / "got/a-images"
    assert {"README.md", "croissant.json", "metadata.csv"} <= {path.name for path in got.iterdir()}
    assert call("verify", trained / "release", "--samples", got, "--json").succeeded().json["ok"]


def until_done(studio: Studio, name: str) -> dict[str, Any]:
    for _ in range(2400):
        status = studio.status(name)
        if status["state"] != "working":
            return status
        time.sleep(0.05)
    raise AssertionError(status)


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path: Path) -> None:
    assert "is not a folder" in call("studio", tmp_path / "none", "--out", tmp_path / "runs").refused()
    with pytest.raises(DatalensError, match="port 65536 cannot be used"):
        server.open_studio(tmp_path, tmp_path / "runs", port=65536)
