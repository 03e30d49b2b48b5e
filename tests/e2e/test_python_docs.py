"""The code of docs/python.md runs, from top to bottom, as a reader would run it."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 4
    space: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    said = capsys.readouterr().out
    assert "(1, 1e-05)-differentially private" in said and "torch.Size([784])" in said
    assert space["arrays"]["images"].shape == (1000, 8, 8) and len(space["table"]) == len(space["rows"]) == 1000
    assert set(space["only"].labels) == {3, 5}
    images, labels = next(iter(space["batches"]))
    assert images.shape == (64, 1, 8, 8) and labels.shape == (64,)
