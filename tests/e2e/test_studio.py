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
from datalens.studio import jobs, server
from datalens.studio.jobs import Studio
from tests.e2e.conftest import call

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
    links = [link for link in re.findall(rb"(?:https?:)?//[\w.]+", content) if link != b"http://www.w3.org"]
    assert links == []
    assert b"<script>" not in content and b"style=" not in content and b" onclick" not in content


def test_a_token_opens_the_studio_once(running: server.Server) -> None:
    token = running.new_address().partition("#")[2]
    assert ask(running, "/api/key", {"token": token})[0] == 200
    for wrong in (token, "", "x" * 43, None, 7):
        code, said, _ = ask(running, "/api/key", {"token": wrong})
        assert code == 403 and "address" in said["error"] and "key" not in said


@pytest.mark.parametrize("path", [*server.GET, *server.POST, "/api/address"])
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
    assert [entry["name"] for entry in ask(running, "/api/list", {"path": ""}, key=key)[1]] == ["pets"]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", "-a", "a b", "ä", "a" * 61, "a\n"])
def test_names_of_runs_lead_nowhere_else(running: server.Server, studio: Studio, name: str) -> None:
    key = key_of(running)
    assert ask(running, "/api/start", {"data": "pets", "name": name}, key=key)[0] == 400
    for path in ("stop", "resume", "evaluate", "verify"):
        assert ask(running, f"/api/{path}", {"run": name}, key=key)[0] == 400
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
    assert [int(before) / 100 for before, _ in rows] == list(server.SUSPECTED)
    for before, cells in rows:
        assert [float(cell.strip(" %")) for cell in cells.split("|")] == [
            pytest.approx(100 * server.belief(int(before) / 100, epsilon), abs=0.051) for epsilon in server.SCALE
        ]


# --- runs do not need it --------------------------------------------------------------------------


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_command", lambda words: [sys.executable, "-c", WORKER, *words])


def until(studio: Studio, name: str, state: str) -> dict[str, Any]:
    for _ in range(600):
        status = studio.status(name)
        began = (studio.out / name / "config.json").exists()
        if status["state"] == state and began:
            return status
        time.sleep(0.05)
    raise AssertionError(status)


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


def test_a_run_that_does_not_begin_says_why(studio: Studio) -> None:
    studio.start("a", {"data": "pets", "epsilon": "-1", "nominal_size": "6"})
    for _ in range(600):
        status = studio.status("a")
        if status["state"] != "working":
            break
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
    ledger = studio.out / "a/release/ledger.jsonl"
    ledger.write_text(ledger.read_text(encoding="utf-8").rpartition("\n{")[0] + "\n", encoding="utf-8")
    code, said, _ = ask(running, "/api/zip?run=a", key=key)
    assert code == 400 and "does not stand" in said["error"]


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path: Path) -> None:
    assert "is not a folder" in call("studio", tmp_path / "none", "--out", tmp_path / "runs").refused()
    with pytest.raises(DatalensError, match="port 65536 cannot be used"):
        server.open_studio(tmp_path, tmp_path / "runs", port=65536)
