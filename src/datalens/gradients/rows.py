"""Per-record gradients of a small network, from one forward and one backward pass.

A network's weights get no gradients of their own. Each layer remembers what went into it and the gradient of what came
out of it, and a record's gradient is the product of the two over the places of its own images (Goodfellow 2015; for
convolutions Rochette et al. 2019). There is no second backward pass and no loop over records.

What makes this fast on a CPU is the layout: images are channels-last, so that a layer's patches are a strided view of
its padded input, copied once, and one batched product gives all records of a chunk (docs/benchmarks.md).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.errors import DatalensError

Losses = Callable[[nn.Module], Tensor]  # a network → the loss of every example, [records · repeats]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The place of a layer's numbers in a row."""

    name: str
    start: int  # of its weights
    weights: int
    bias: int  # how many biases; they follow the weights


class RowEngine:
    """Computes one gradient row per example, for a network of convolutions and linear layers.

    No layer may mix examples: each row must depend on its own example alone.

    Args:
        net: All its parameters belong to `Conv2d` (without groups or dilation) or `Linear` layers, each of which is
            called once in a forward pass, with examples as the first dimension of what goes in. Batch norm is refused.
            That nothing else in the network, or in the losses, mixes examples is for the caller to make sure; also
            that products and convolutions do not round by place (`private.layers`). The engine works on a copy; the
            network that is given is not changed.
        kind: The type of numbers that the copy computes in.
        device: Where it computes.

    Raises:
        DatalensError: the network has other parameters, parameters that two layers share, a layer of size 0, or batch
            norm.
    """

    def __init__(self, net: nn.Module, *, kind: torch.dtype, device: torch.device) -> None:
        self._net = copy.deepcopy(net).to(device=device, dtype=kind).requires_grad_(False)
        self._kind = kind
        self._rows: Tensor | None = None
        self._modules: dict[str, nn.Conv2d | nn.Linear] = {}
        layers, start = [], 0
        known: set[int] = set()
        for name, module in self._net.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                raise DatalensError(f"layer {name} ({type(module).__name__}) mixes records: leave it out")
            if not isinstance(module, nn.Conv2d | nn.Linear):
                continue
            _check(name, module)
            own = {id(parameter) for parameter in module.parameters()}
            if own & known:
                raise DatalensError(f"layer {name} shares weights with another: give each layer its own")
            known |= own
            bias = 0 if module.bias is None else module.bias.numel()
            layers.append(_Layer(name=name, start=start, weights=module.weight.numel(), bias=bias))
            self._modules[name] = module
            start += module.weight.numel() + bias
        strange = next((n for n, parameter in self._net.named_parameters() if id(parameter) not in known), None)
        if strange is not None:
            raise DatalensError(f"parameter {strange} is of no Conv2d or Linear layer: its rows are not known here")
        if not layers:
            raise DatalensError("the network has no Conv2d or Linear layer: there is nothing to learn")
        self._layers, self.size = layers, start

    def flat(self, net: nn.Module, *, gradients: bool = False) -> Tensor:
        """Return the weights of a network of this kind as one float32 vector, in the order of a row's numbers.

        Args:
            net: the network.
            gradients: return the gradients of the weights instead, as autograd left them there.
        """
        modules = dict(net.named_modules())
        parts: list[Tensor | None] = []
        for layer in self._layers:
            module = modules[layer.name]
            assert isinstance(module, nn.Conv2d | nn.Linear)
            own = [module.weight] if module.bias is None else [module.weight, module.bias]
            parts += [value.grad if gradients else value.detach() for value in own]
        return torch.cat([_as_rows(part).flatten().to(torch.float32) for part in parts if part is not None])

    def put(self, flat: Tensor, net: nn.Module) -> None:
        """Write such a vector into a network of this kind."""
        modules = dict(net.named_modules())
        with torch.no_grad():
            for layer in self._layers:
                module = modules[layer.name]
                assert isinstance(module, nn.Conv2d | nn.Linear)
                end = layer.start + layer.weights
                module.weight.copy_(_from_rows(flat[layer.start : end], module.weight))
                if module.bias is not None:
                    module.bias.copy_(flat[end : end + layer.bias])

    def load(self, flat: Tensor) -> None:
        """Compute with these weights from now on."""
        self.put(flat.to(next(self._net.parameters()).device), self._net)

    def rows(self, losses: Losses, *, records: int, repeats: int = 1) -> Tensor:
        """Compute every record's gradient of the mean of its losses.

        Args:
            losses: The loss of every example, [records · repeats], a record's examples one after the other.
            records: How many records there are.
            repeats: How many examples each of them has.

        Returns:
            [records, size], in the engine's kind of numbers. The memory is the engine's: the next call writes there.
        """
        with _taped(self._modules) as tapes, torch.enable_grad():
            found = losses(self._net)
            if found.shape != (records * repeats,):
                raise ValueError(f"there are {list(found.shape)} losses of {records} records with {repeats} each")
            (found.sum() / repeats).backward()
        if self._rows is None or len(self._rows) != records:  # new memory costs more than the work
            self._rows = torch.empty(records, self.size, dtype=self._kind, device=found.device)
        rows = self._rows
        for layer in self._layers:
            end = layer.start + layer.weights
            if layer.name not in tapes:
                rows[:, layer.start : end + layer.bias] = 0  # it was not called
                continue
            inputs, slopes = tapes[layer.name].both(layer.name)
            if len(inputs) != records * repeats:
                raise DatalensError(
                    f"layer {layer.name} got {len(inputs)} rows for {records * repeats} examples: examples must be the "
                    "first dimension of what goes into a layer"
                )
            weights, biases = _products(self._modules[layer.name], inputs, slopes, records)
            rows[:, layer.start : end] = weights.flatten(1)
            if layer.bias:
                rows[:, end : end + layer.bias] = biases
        return rows


class _Tape:
    """The inputs of a layer, and the gradient of the loss with respect to its outputs."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.slopes: Tensor | None = None

    def both(self, name: str) -> tuple[Tensor, Tensor]:
        if self.inputs is None or self.slopes is None:
            raise DatalensError(f"layer {name} does not reach the loss: its rows are not known")
        return self.inputs.detach(), self.slopes


@contextmanager
def _taped(modules: dict[str, nn.Conv2d | nn.Linear]) -> Iterator[dict[str, _Tape]]:
    tapes: dict[str, _Tape] = {}

    def remember(name: str, inputs: Tensor, outputs: Tensor) -> None:
        if name in tapes:
            raise DatalensError(f"layer {name} is called twice in one pass: its rows would be incomplete")
        tape = tapes[name] = _Tape()
        tape.inputs = inputs
        if not outputs.requires_grad:
            outputs.requires_grad_()  # nothing before it needs a gradient

        def keep(slopes: Tensor) -> None:
            tape.slopes = slopes

        outputs.register_hook(keep)

    hooks = [
        module.register_forward_hook(lambda _, inputs, outputs, name=name: remember(name, inputs[0], outputs))
        for name, module in modules.items()
    ]
    try:
        yield tapes
    finally:
        for hook in hooks:
            hook.remove()


def _check(name: str, module: nn.Conv2d | nn.Linear) -> None:
    if module.weight.numel() == 0:
        raise DatalensError(f"layer {name} has no weights, as one of its sizes is 0: leave it out")
    if isinstance(module, nn.Linear):
        return
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    if not plain or isinstance(module.padding, str):
        raise DatalensError(f"layer {name} has groups, dilation or a padding that rows are not known for")


def _as_rows(weight: Tensor) -> Tensor:
    """Weights in the order of a row: [kernel · kernel · inputs, outputs] of a convolution, [inputs, outputs] else."""
    return weight.permute(2, 3, 1, 0) if weight.dim() == 4 else weight if weight.dim() == 1 else weight.mT


def _from_rows(flat: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 2:
        return flat.view(like.shape[1], like.shape[0]).mT
    outputs, inputs, high, wide = like.shape
    return flat.view(high, wide, inputs, outputs).permute(3, 2, 0, 1)


def _products(layer: nn.Conv2d | nn.Linear, inputs: Tensor, slopes: Tensor, records: int) -> tuple[Tensor, Tensor]:
    """[records, weights of one output, outputs] and [records, outputs]: a record's places are one long dimension."""
    if isinstance(layer, nn.Linear):
        left = inputs.reshape(records, -1, layer.in_features)
        right = slopes.reshape(records, -1, layer.out_features)
    else:
        left = _patches(inputs, layer, slopes.shape[2:]).reshape(records, -1, layer.weight[0].numel())
        right = slopes.permute(0, 2, 3, 1).reshape(records, -1, layer.out_channels)
    return torch.bmm(left.mT, right), right.sum(dim=1)


def _patches(inputs: Tensor, layer: nn.Conv2d, places: torch.Size) -> Tensor:
    """[n, places, kernel · kernel · inputs]: a row of a patch lies in one piece, as images are channels-last."""
    (high, wide), (down, across) = layer.kernel_size, layer.stride
    assert isinstance(layer.padding, tuple)
    x = inputs.permute(0, 2, 3, 1)
    if (high, wide, down, across) == (1, 1, 1, 1) and layer.padding == (0, 0):
        return x.flatten(1, 2)
    x = F.pad(x, (0, 0, layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0])).contiguous()
    image, row, pixel, _ = x.stride()
    size = (len(x), places[0], places[1], high, wide * x.shape[3])
    return x.as_strided(size, (image, down * row, across * pixel, row, 1)).reshape(len(x), places.numel(), -1)
