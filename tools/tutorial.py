"""Writes into docs/tutorial.md what its commands print: runs the page in a temporary folder, from top to bottom.

    python tools/tutorial.py

Noise is drawn anew each time, so figures differ from run to run. Run it after the words of a command have changed.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path("docs/tutorial.md")
TITLE = 'text title="prints, for example"'
MOST_LINES = 18
BLOCK = re.compile(rf"^```(python|sh)\n(.*?)^```\n(?:\n```{TITLE}\n.*?^```\n)?", flags=re.S | re.M)


def printed(text: str, folder: Path) -> str:
    """Run the commands of a block, and return what they print, shortened."""
    lines: list[str] = []
    for command in text.strip().splitlines():
        words = shlex.split(command, comments=True)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "datalens", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{command}\n{done.stdout}")
        lines += done.stdout.rstrip().splitlines()
    return "\n".join([*lines[:MOST_LINES], *(["…"] if len(lines) > MOST_LINES else [])])


def page(text: str, folder: Path) -> str:
    """Return the page with what each block of commands prints below it."""

    def again(found: re.Match[str]) -> str:
        kind, code = found[1], found[2]
        block = f"```{kind}\n{code}```\n"
        if kind == "python":
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            return block
        return f"{block}\n```{TITLE}\n{printed(code, folder)}\n```\n"

    return BLOCK.sub(again, text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
