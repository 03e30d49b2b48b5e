"""The examples in docstrings do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["datalens.estimator", "datalens.voting"])
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 4 and found.failed == 0
