"""`datalens reproduce all`: every table and figure, one after the other. What fails is said; the others are made."""

import json
import time
from pathlib import Path
from typing import Any

from datalens.errors import DatalensError
from datalens.progress import say
from datalens.reproduce import harness
from datalens.run.folder import write_atomically


def reproduce_all(*, full: bool, out: Path, device: str, data_folder: Path | None = None) -> dict[str, Any]:
    """Returns what was made, in how many seconds, and what failed and why."""
    mode = "full" if full else "quick"
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number, (name, title) in enumerate(listing := list(harness.listing().items()), start=1):
        say(f"{number} of {len(listing)}, {name}: {title}")
        began = time.monotonic()
        try:
            result = harness.reproduce(
                name, full=full, out=out, device=device, data_folder=_if_read(name, data_folder, full=full)
            )
            made[name] = {"seconds": round(time.monotonic() - began, 1), "markdown": result["markdown"]}
        except DatalensError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
    seconds = round(sum(one["seconds"] for one in made.values()), 1)
    base = out / f"all-{mode}"
    content = {"full": full, "seconds": seconds, "made": made, "failed": failed}
    write_atomically(base.with_suffix(".json"), json.dumps(content, indent=1).encode())
    lines = [f"# Everything ({mode}), {seconds / 60:.1f} minutes", "", "| what | seconds | |", "|---|---|---|"]
    lines += [f"| {name} | {one['seconds']} | {Path(one['markdown']).relative_to(out)} |" for name, one in made.items()]
    lines += [f"| {name} | — | failed: {why} |" for name, why in failed.items()]
    write_atomically(base.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    return {"table": "all", **content, "markdown": f"{base}.md"}


def _if_read(name: str, data_folder: Path | None, *, full: bool) -> Path | None:
    """A table that needs no such folder is not given one: it would refuse it."""
    table = harness.tables().get(name)
    return data_folder if table is not None and harness.reads_a_folder(table.cells(full)) else None
