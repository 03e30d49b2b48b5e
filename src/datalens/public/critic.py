"""Conditional discriminators, which map an image and a label to one number. Used on both sides of the gate."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.public import streams
from datalens.public.basis import Basis


class Critic(nn.Module):
    """A projection discriminator (Miyato and Koyama 2018) of convolutions with stride 2.

    Each convolution has a bias for every label, and the last layer has one output for all labels and one for each
    label. There is no batch norm: an image's output depends on no other image, as per-example gradients need.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, *, width: int, kernel: int = 5) -> None:
        super().__init__()
        channels, height, width_of_image = shape
        layers = 2 if max(shape[1:]) <= 32 else 4
        widths = [width * 2**i for i in range(layers)]
        self.classes = classes
        self.down = nn.ModuleList(
            nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
            for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.label = nn.ModuleList(nn.Linear(classes, outputs, bias=False) for outputs in widths)
        for _ in range(layers):
            height, width_of_image = -(-height // 2), -(-width_of_image // 2)
        self.dense = nn.Linear(widths[-1] * height * width_of_image, 1 + classes)

    def forward(self, images: Tensor, labels: Tensor, taps: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Return the scores [n] of images [n, c, h, w] in [0, 1] with labels [n].

        Args:
            images: The images.
            labels: Their labels.
            taps: Is extended by the input and the output of each layer.
        """
        known = torch.arange(self.classes, device=labels.device)
        one_hot = (labels.unsqueeze(1) == known).to(images.dtype)  # F.one_hot reads values, which vmap does not allow
        x = images * 2 - 1
        for layer, label in zip(self.down, self.label, strict=True):
            x = _tapped(layer, x, taps) + _tapped(label, one_hot, taps)[:, :, None, None]
            x = F.leaky_relu(x, 0.2)
        for_all, for_each = _tapped(self.dense, x.flatten(1), taps).split([1, self.classes], dim=1)
        return for_all.squeeze(1) + (for_each * one_hot).sum(dim=1)


def _tapped(layer: nn.Module, inputs: Tensor, taps: list[tuple[Tensor, Tensor]] | None) -> Tensor:
    outputs = layer(inputs)
    if taps is not None:
        taps.append((inputs, outputs))
    return outputs


def example_gradients(
    critic: Critic, images: Tensor, labels: Tensor, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of loss(critic(image, label)) for every example: one [n, …] tensor per parameter.

    The network does not mix examples. So the gradient of the summed loss with respect to a layer's outputs separates by
    example, and the gradient of a layer's weights is its product with the layer's inputs (Goodfellow 2015; for
    convolutions Rochette et al. 2019).
    """
    taps: list[tuple[Tensor, Tensor]] = []
    with torch.enable_grad():
        total = loss(critic(images, labels, taps)).sum()
    backward = torch.autograd.grad(total, [outputs for _, outputs in taps])
    gradients: dict[str, Tensor] = {}
    layers: list[tuple[str, nn.Module]] = []
    for i, (layer, label) in enumerate(zip(critic.down, critic.label, strict=True)):
        layers += [(f"down.{i}", layer), (f"label.{i}", label)]
    layers.append(("dense", critic.dense))
    for (name, layer), (inputs, _), slopes in zip(layers, taps, backward, strict=True):
        inputs = inputs.detach()
        if isinstance(layer, nn.Conv2d):
            patches = _patches(inputs, layer)  # [n, inputs·kernel², places]
            slopes = slopes.flatten(2)  # [n, outputs, places]
            gradients[f"{name}.weight"] = torch.bmm(slopes, patches.mT).view(len(images), *layer.weight.shape)
            slopes = slopes.sum(dim=2)
        else:
            gradients[f"{name}.weight"] = slopes.unsqueeze(2) * inputs.unsqueeze(1)
        if layer.bias is not None:
            gradients[f"{name}.bias"] = slopes
    return {name: gradients[name] for name, _ in critic.named_parameters()}


def _patches(inputs: Tensor, layer: nn.Conv2d) -> Tensor:
    """Return the same as `F.unfold`, which on a GPU processes one image at a time."""
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    assert isinstance(layer.padding, tuple)
    padded = F.pad(inputs, [layer.padding[0]] * 4)
    views = padded.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [n, c, high, wide, kernel, kernel]
    return views.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


class CosineCritic(nn.Module):
    """A discriminator over low-frequency cosines: a linear part for every label, and one shared hidden layer."""

    def __init__(self, basis: Basis, classes: int, *, width: int) -> None:
        super().__init__()
        self.basis, self.classes = basis, classes
        self.linear = nn.Linear(basis.size, classes)
        self.hidden = nn.Linear(basis.size + classes, width)
        self.out = nn.Linear(width, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.basis.forward(images - 0.5) * 0.25  # scaled to a few units, as for teachers
        one_hot = F.one_hot(labels, self.classes).to(images.dtype)
        hidden = F.leaky_relu(self.hidden(torch.cat([features, one_hot], dim=1)), 0.2)
        return (self.linear(features) * one_hot).sum(dim=1) + self.out(hidden).squeeze(1)


def fresh_critic(shape: tuple[int, int, int], classes: int, *, width: int, seed: int) -> Critic:
    """Return a critic with initial weights, which are determined by the seed."""
    critic = Critic(shape, classes, width=width)
    initialise_critic(critic, streams.generator(seed, "critic"))
    return critic


def initialise_critic(critic: nn.Module, random: torch.Generator) -> None:
    """Set initial weights from `random` alone: He et al. 2015 for leaky slope 0.2, and biases zero."""
    for module in critic.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, a=0.2, generator=random)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
