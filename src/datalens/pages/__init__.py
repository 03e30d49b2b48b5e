"""HTML pages: one self-contained file each, which fetches nothing.

This module belongs neither to the private nor to the released side: the caller passes everything that a page shows. A
page that belongs to a release is sealed: it names its certificate, and ends with a hash of everything before.
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
MOST_BYTES = 5_000_000  # size limit of a sealed page
GENERATOR = b'<meta name="generator" content="datalens">'
_SEAL = re.compile(rb"<!-- sha256 of everything above: ([0-9a-f]{64}) -->\n\Z")
FORMAT = 4  # of the release's page; increase it whenever the same release would give other bytes
_FORMAT = re.compile(rb'<meta name="datalens-page" content="([0-9]{1,6})">')
_CERTIFICATE = re.compile(rb'<meta name="datalens-certificate" content="([0-9a-f]{64})">')


def render(template: str, **values: Any) -> bytes:
    """Return a template filled with values, all of which are escaped."""
    text = _environment().get_template(template).render(**values)
    return (text.strip() + "\n").encode()


def render_text(text: str, **values: Any) -> bytes:
    """Return the text of a template filled with values, all of which are escaped."""
    return _environment().from_string(text).render(**values).encode()


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
    """Format a value for a page: numbers with up to four digits, yes or no, lists with commas."""
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
    """Return a page with a hash of it at its end."""
    return page + b"<!-- sha256 of everything above: " + hashlib.sha256(page).hexdigest().encode() + b" -->\n"


def seal_problem(content: bytes, certificate: str) -> str | None:
    """Return what is wrong with a sealed page that should belong to the certificate with this hash, or None."""
    seal, named = _SEAL.search(content), _CERTIFICATE.search(content)
    if seal is None or named is None or hashlib.sha256(content[: seal.start()]).hexdigest().encode() != seal[1]:
        return "was changed after it was written"
    if named[1].decode() != certificate:
        return "belongs to another certificate: run `datalens report` to write it again"
    return None


def page_format(content: bytes) -> int:
    """Return the `FORMAT` that a page was written in. Pages of format 1 (of datalens 0.1.0) do not state it."""
    stated = _FORMAT.search(content)
    return int(stated[1]) if stated else 1


def check_may_replace(path: Path) -> None:
    """Raise if writing to a path would replace something other than a page that datalens wrote."""
    if path.is_dir():
        raise DatalensError(f"{path} is a folder: give --out the name of a file, such as {path / 'page.html'}")
    if path.exists() and not (path.is_file() and GENERATOR in path.read_bytes()[:2000]):
        raise DatalensError(f"{path} exists and is not a page of datalens: choose another --out")
