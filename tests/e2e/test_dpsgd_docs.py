"""The example in docs/dpsgd.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "dpsgd.md"


def test_the_three_lines_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 1 and "make_private(" in blocks[0]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", blocks[0]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"ε = 0\.99\d* \(δ = 1e-05, add-remove, prv accountant\)", done.stdout)
