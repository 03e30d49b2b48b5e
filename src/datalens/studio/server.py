"""The server of the studio, for the browser of this machine and for nobody else.

It is the standard library's: one person and a few requests a second need no framework, nothing has to be installed, and
nothing is fetched or reported anywhere. Every request must name this address as its Host. A page of another site cannot
read or start anything: it has not the key, which a page gets once for the token in its address, and sends as a header
(cookies would go to every server of this machine).
"""

import contextlib
import hmac
import importlib.resources
import io
import json
import secrets
import socketserver
import threading
import urllib.parse
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from datalens import pages
from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.errors import DatalensError, one_line
from datalens.released.certificate import PICTURE
from datalens.released.synthetic import grid
from datalens.run.folder import PREVIEW
from datalens.studio import scale
from datalens.studio.jobs import Studio

ADDRESS = "127.0.0.1"
KEY = "X-Datalens-Key"
REPORTS = "/report/"
MOST_BYTES = 2**16  # of a request: answers in forms; files are read where they are, and never uploaded
SHOWN = 60  # real images that are shown at once
SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# A report is a page of its own, with its styles and pictures inside. In a sandbox it can neither run nor ask anything.
REPORT_SAFETY = {
    **SAFETY,
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Server(ThreadingHTTPServer):
    """The studio on a free port of this machine (or on `port`)."""

    daemon_threads = True

    def __init__(self, studio: Studio, *, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.studio = studio
        self.origin = f"http://{ADDRESS}:{self.server_address[1]}"
        self._lock = threading.Lock()
        self._tokens: set[str] = set()
        self._keys: set[str] = set()
        self._tickets: dict[str, str] = {}  # → the run whose report it shows

    def server_bind(self) -> None:
        """Bind the port. (The standard library's asks for the name of this machine, perhaps over the network.)"""
        socketserver.TCPServer.server_bind(self)

    def new_address(self) -> str:
        """Return an address that opens the studio once."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._tokens.add(token)
        return f"{self.origin}/#{token}"

    def key_for(self, token: object) -> str:
        """Return a key for a token, which is used up.

        Raises:
            Refused: there is no such token any more.
        """
        with self._lock:
            found = next((one for one in self._tokens if _same(one, token)), None)
            if found is None:
                raise Refused(403, "this address was used, or is not the studio's: open the one that it prints anew")
            self._tokens.remove(found)
            key = secrets.token_urlsafe(32)
            self._keys.add(key)
        return key

    def new_ticket(self, run: str) -> str:
        """Return a path that shows the report of a run once: a tab that opens it cannot send the key."""
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._tickets[ticket] = run
        return f"{REPORTS}{ticket}"

    def run_of(self, ticket: str) -> str:
        """Return the run that a ticket is for, which is used up.

        Raises:
            Refused: there is no such ticket any more.
        """
        with self._lock:
            found = next((one for one in self._tickets if _same(one, ticket)), None)
            if found is None:
                raise Refused(403, "this page was shown already: open it again in the studio")
            return self._tickets.pop(found)

    def knows(self, key: object) -> bool:
        with self._lock:
            return any(_same(one, key) for one in self._keys)


def _same(one: str, other: object) -> bool:
    return isinstance(other, str) and hmac.compare_digest(one.encode(), other.encode(errors="replace"))


class Refused(Exception):
    """A request that is not answered."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: Server
    server_version, sys_version = "datalens", ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._answer(self._got)

    def do_POST(self) -> None:
        self._answer(self._posted)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing: addresses hold names of files."""

    def _answer(self, work: Callable[[], tuple[str, bytes]]) -> None:
        try:
            if self.headers.get("Host") != self.server.origin.removeprefix("http://"):
                raise Refused(421, "this server answers to its own address only")
            origin = self.headers.get("Origin")
            if origin not in (None, self.server.origin) or self.headers.get("Sec-Fetch-Site") in (
                "cross-site",
                "same-site",
            ):
                raise Refused(403, "a page of another site asked for this")
            code, (kind, body) = 200, work()
        except Refused as refused:
            code, (kind, body) = refused.code, _json({"error": str(refused)})
        except (DatalensError, OSError) as error:
            code, (kind, body) = 400, _json({"error": one_line(error)})
        except Exception as error:  # the page says so, and the studio goes on
            code, (kind, body) = 500, _json({"error": f"the studio failed ({type(error).__name__})"})
        if code != 200:
            self.close_connection = True  # what it still sends is not read
        self.send_response(code)
        safety = REPORT_SAFETY if code == 200 and self.path.startswith(REPORTS) else SAFETY
        for name, value in {**safety, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if kind == "application/zip":
            self.send_header("Content-Disposition", "attachment; filename=datalens.zip")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def _got(self) -> tuple[str, bytes]:
        url = urllib.parse.urlsplit(self.path)
        if url.path in FILES:
            return FILES[url.path]()
        if url.path.startswith(REPORTS):
            return _report(self.server.studio, self.server.run_of(url.path.removeprefix(REPORTS)))
        self._check_key()
        asked = dict(urllib.parse.parse_qsl(url.query))
        if url.path not in GET:
            raise Refused(404, "there is no such address")
        return GET[url.path](self.server.studio, asked)

    def _posted(self) -> tuple[str, bytes]:
        path = urllib.parse.urlsplit(self.path).path
        if self.headers.get("Origin") != self.server.origin or self.headers.get_content_type() != "application/json":
            raise Refused(403, "only the studio's own page may ask for this")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            raise Refused(413, f"a request may have at most {MOST_BYTES} bytes")
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise Refused(400, "the request is not a JSON object")
        if path == "/api/key":
            return _json({"key": self.server.key_for(asked.get("token"))})
        self._check_key()
        if path == "/api/address":
            return _json({"address": self.server.new_address()})
        if path == "/api/report":
            run = asked.get("run", "")
            _report(self.server.studio, run)  # there is one
            return _json({"path": self.server.new_ticket(str(run))})
        if path not in POST:
            raise Refused(404, "there is no such address")
        return _json(POST[path](self.server.studio, asked))

    def _check_key(self) -> None:
        if not self.server.knows(self.headers.get(KEY)):
            raise Refused(403, "this page has no key: open the address that the studio printed")


def _json(fields: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(fields).encode()


# --- what is answered -----------------------------------------------------------------------------


def _page() -> tuple[str, bytes]:
    text = (importlib.resources.files("datalens.studio") / "templates/studio.html").read_text(encoding="utf-8")
    return "text/html; charset=utf-8", pages.render_text(text, scale=scale.rows(), real=scale.real())


def _file(name: str, kind: str, room: str = "datalens.studio") -> Callable[[], tuple[str, bytes]]:
    return lambda: (kind, (importlib.resources.files(room) / f"templates/{name}").read_bytes())


FILES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "/": _page,
    "/studio.js": _file("studio.js", "text/javascript"),
    "/studio.css": _file("studio.css", "text/css"),
    "/style.css": _file("style.css", "text/css", "datalens.pages"),
    **{f"/{scale.PICTURES}/{name}": _file(f"{scale.PICTURES}/{name}", "image/png") for name in scale.files()},
    "/favicon.ico": lambda: ("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
}


def _picture(studio: Studio, asked: dict[str, str]) -> tuple[str, bytes]:
    """Return the picture of a release, which is what a recipient sees; or of what a run has released so far."""
    folder = studio.run_folder(asked.get("run", ""))
    for path in (folder / "release" / PICTURE, folder / PREVIEW):
        with contextlib.suppress(FileNotFoundError):
            return "image/png", path.read_bytes()
    raise DatalensError("nothing is released yet")


def _report(studio: Studio, run: object) -> tuple[str, bytes]:
    """Return the page that a recipient reads."""
    path = studio.run_folder(str(run)) / "release" / pages.REPORT
    if not path.is_file():
        raise DatalensError("there is no report of this run: it is not done, or `datalens report` writes it again")
    return "text/html; charset=utf-8", path.read_bytes()


def _zip(studio: Studio, asked: dict[str, str]) -> tuple[str, bytes]:
    """Return a release as a ZIP, if it stands."""
    folder = studio.run_folder(asked.get("run", "")) / "release"
    found = _files_in(folder)
    checked = studio.ask(["verify", str(folder.parent), "--json"])
    if checked.get("ok") is not True:
        raise DatalensError(f"the certificate does not stand: {'; '.join(checked.get('problems', []))[:300]}")
    if _files_in(folder) != found:
        raise DatalensError("the release was written again while it was checked: download it once more")
    return _zipped("release", found)


def _images(studio: Studio, asked: dict[str, str]) -> tuple[str, bytes]:
    """Return images that were drawn to hand on, with their papers, as a ZIP."""
    name = asked.get("run", "")
    found = _files_in(studio.images(name))
    if not found:
        raise DatalensError("no images were drawn yet")
    return _zipped(f"{name}-images", found)


def _files_in(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, by their names in it; links are left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _zipped(folder: str, found: dict[str, bytes]) -> tuple[str, bytes]:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in found.items():
            archive.writestr(f"{folder}/{name}", content)
    return "application/zip", stream.getvalue()


def _real(studio: Studio, asked: dict[str, str]) -> tuple[str, bytes]:
    """Return a picture of real images, for the owner's eyes: it is never written to a file."""
    reading: dict[str, Any] = dict(studio.reading(asked))
    path = reading.pop("data")
    reading["grayscale"] = asked.get("grayscale") == "true"
    some = formats.load_some(path, most=SHOWN, reading=Reading.of(reading))
    stream = io.BytesIO()
    grid(some.images, some.labels).save(stream, "PNG")
    return "image/png", stream.getvalue()


GET: dict[str, Callable[[Studio, dict[str, str]], tuple[str, bytes]]] = {
    "/api/picture": _picture,
    "/api/zip": _zip,
    "/api/images": _images,
    "/api/real": _real,
}
POST: dict[str, Callable[[Studio, dict[str, Any]], Any]] = {
    "/api/list": lambda studio, asked: studio.entries(asked.get("path", "")),
    "/api/inspect": lambda studio, asked: studio.ask(studio.words("inspect", asked, "--most=2000")),
    "/api/plan": lambda studio, asked: studio.ask(studio.words("plan", asked)),
    "/api/said": lambda studio, asked: {"line": studio.said()},
    "/api/commands": lambda studio, asked: studio.commands(asked),
    "/api/budgets": lambda studio, asked: studio.budgets(),
    "/api/new-budget": lambda studio, asked: studio.make_budget(asked),
    "/api/sample": lambda studio, asked: studio.sample(asked.get("run", ""), asked.get("count")),
    "/api/start": lambda studio, asked: studio.start(asked.get("name", ""), asked),
    "/api/stop": lambda studio, asked: studio.stop(asked.get("run", "")),
    "/api/resume": lambda studio, asked: studio.resume(asked.get("run", "")),
    "/api/evaluate": lambda studio, asked: studio.evaluate(asked.get("run", "")),
    "/api/verify": lambda studio, asked: studio.ask(["verify", str(studio.run_folder(asked.get("run", ""))), "--json"]),
    "/api/runs": lambda studio, asked: [studio.status(name) for name in studio.names()],
}


def open_studio(data: Path, out: Path, *, port: int) -> Server:
    """Return a server for these folders, which does not answer yet.

    Raises:
        DatalensError: the data is not a folder, or the port is taken.
    """
    if not data.is_dir():
        raise DatalensError(f"{data} is not a folder: name the one that has your images")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return Server(Studio(data=data, out=out.resolve()), port=port)
    except (OSError, OverflowError) as error:
        raise DatalensError(f"port {port} cannot be used ({error}): leave --port out") from None
