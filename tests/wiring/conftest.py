"""Small generators and one thread: these tests are hundreds of tiny runs."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from datalens.methods import gpate, topagg
from datalens.released import generator


@pytest.fixture(autouse=True, scope="module")
def _narrow() -> Iterator[None]:
    make, threads = generator.dcgan_architecture, torch.get_num_threads()

    def narrow(*sizes: object, **named: object) -> generator.Architecture:
        return dataclasses.replace(make(*sizes, **named), dense=16, widths=(4, 4))  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        for module in (generator, topagg, gpate):
            patch.setattr(module, "dcgan_architecture", narrow)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
