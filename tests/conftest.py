"""Without a GPU the Triton kernels run in Triton's interpreter, which it must know before it is imported."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datalens  # noqa: F401 (before torch multiplies: it says how)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _no_remembered_results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measures are kept by content in the user's cache: tests neither read it nor fill it."""
    here = tmp_path_factory.mktemp("evaluations")

    def folder() -> Path:
        return here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datalens.evaluate.cache.folder", folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_lines_by_the_clock() -> Iterator[None]:
    """How far a long command is, is said by the clock: what a test reads must not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datalens.progress.FIRST", 86400.0)
        yield
