"""The examples in docstrings do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["datalens.api.estimator", "datalens.api.topagg"])
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 4 and found.failed == 0
