"""Functions of tensors that are recorded as CUDA graphs, so that one launch takes the place of a thousand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Sequence[Tensor]]


class Replay:
    """A function of tensors on a GPU that is recorded at its first call with certain shapes, and replayed afterwards.

    A replay launches the same kernels, so it returns what the function would. The function must not wait for the GPU,
    must not draw random numbers, and must depend on its arguments alone. On a CPU, and where a recording fails, the
    function itself is called.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._recorded: dict[tuple[torch.Size, ...], _Recording | None] = {}

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if not inputs[0].is_cuda:
            return list(self._function(*inputs))
        shapes = tuple(one.shape for one in inputs)
        if shapes not in self._recorded:
            self._recorded[shapes] = _record(self._function, inputs)
        recording = self._recorded[shapes]
        return list(self._function(*inputs)) if recording is None else recording(*inputs)


class _Recording:
    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._inputs = [one.clone() for one in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose kernels and allocate workspaces, which a recording must not do
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = list(function(*self._inputs))

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return [one.clone() for one in self._outputs]  # the next replay writes into the same memory


def _record(function: Function, inputs: Sequence[Tensor]) -> "_Recording | None":
    """Return a recording whose first replay gives what the function gives, or None."""
    expected = list(function(*inputs))
    try:
        recording = _Recording(function, inputs)
        found = recording(*inputs)
    except RuntimeError:
        return None
    near = all(torch.allclose(one, other, rtol=1e-2, atol=1e-5) for one, other in zip(found, expected, strict=True))
    return recording if near else None
