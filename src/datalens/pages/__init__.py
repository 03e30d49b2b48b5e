"""Pages for people: one file each, opened from disk, with nothing fetched from anywhere.

Knows neither side: whoever calls says what goes in. A page that travels with a release is sealed: it names the
certificate it is of, and ends with a hash of all before it.
"""

import functools
import hashlib
import math
import re
from pathlib import Path
from typing import Any

import jinja2

from datalens.errors import DatalensError

REPORT, OWNER = "report.html", "owner.html"
MOST_BYTES = 5_000_000  # of a page that is sealed
GENERATOR = b'<meta name="generator" content="datalens">'
_SEAL = re.compile(rb"<!-- sha256 of everything above: ([0-9a-f]{64}) -->\n\Z")
FORMAT = 2  # of the page for people; count it up when the same release would give other bytes
_FORMAT = re.compile(rb'<meta name="datalens-page" content="([0-9]{1,6})">')
_CERTIFICATE = re.compile(rb'<meta name="datalens-certificate" content="([0-9a-f]{64})">')


def render(template: str, **values: Any) -> bytes:
    """A template with its values, all of them escaped."""
    text = _environment().get_template(template).render(**values)
    return (text.strip() + "\n").encode()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("datalens.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["said"] = said
    return environment


def said(value: Any) -> str:
    """A number as a person writes it; lists with commas."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "—"
        case float():
            whole = math.isfinite(value) and value == round(value) and abs(value) < 1e6
            return str(int(value)) if whole else f"{value:.4g}"
        case list() | tuple():
            return ", ".join(said(item) for item in value) or "none"
    return str(value)


def sealed(page: bytes) -> bytes:
    return page + b"<!-- sha256 of everything above: " + hashlib.sha256(page).hexdigest().encode() + b" -->\n"


def seal_problem(content: bytes, certificate: str) -> str | None:
    """What is wrong with a sealed page beside the certificate of this hash, if anything."""
    end, of = _SEAL.search(content), _CERTIFICATE.search(content)
    if end is None or of is None or hashlib.sha256(content[: end.start()]).hexdigest().encode() != end[1]:
        return "was changed after it was written"
    if of[1].decode() != certificate:
        return "belongs to another certificate: `datalens report` writes it anew"
    return None


def page_format(content: bytes) -> int:
    """Return which `FORMAT` a page was written in. The first one did not say so."""
    found = _FORMAT.search(content)
    return int(found[1]) if found else 1


def check_may_replace(path: Path) -> None:
    """A page of ours may be written again; nothing else is overwritten."""
    if path.is_dir():
        raise DatalensError(f"{path} is a folder: give --out the name of a file, such as {path / 'page.html'}")
    if path.exists() and not (path.is_file() and GENERATOR in path.read_bytes()[:2000]):
        raise DatalensError(f"{path} exists and is not a page of ours: choose another --out")
