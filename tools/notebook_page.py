"""A hook of MkDocs that replaces `<!-- cells of x.ipynb -->` on a page by the cells of that notebook."""

import json
import re
from pathlib import Path
from typing import Any

_PLACE = re.compile(r"<!-- cells of (\S+\.ipynb) -->")


def cells(notebook: Path) -> list[tuple[str, str]]:
    """Return (kind, text) of every cell, from top to bottom."""
    listed = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in listed]


def as_markdown(notebook: Path) -> str:
    """Return the cells of a notebook as Markdown, with code in fenced blocks."""
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells(notebook))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = Path(page.file.abs_src_path).parent
    return _PLACE.sub(lambda place: as_markdown(folder / place[1]), markdown)
