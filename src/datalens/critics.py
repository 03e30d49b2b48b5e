"""A conditional discriminator: image and label → one number. Both sides of the gate have use for it."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Critic(nn.Module):
    """Convolutions of stride 2 with the label beside every layer's input, as DC-GAN's generator has it.

    No batch norm: an image's output depends on no other image, which per-example gradients need.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, *, width: int, kernel: int = 5) -> None:
        super().__init__()
        channels, height, width_of_image = shape
        layers = 2 if max(shape[1:]) <= 32 else 4
        widths = [width * 2**i for i in range(layers)]
        self.classes = classes
        self.down = nn.ModuleList(
            nn.Conv2d(inputs + classes, outputs, kernel, stride=2, padding=kernel // 2)
            for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        for _ in range(layers):
            height, width_of_image = -(-height // 2), -(-width_of_image // 2)
        self.dense = nn.Linear(widths[-1] * height * width_of_image + classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[n, c, h, w] in [0, 1] and [n] → [n]"""
        known = torch.arange(self.classes, device=labels.device)
        one_hot = (labels.unsqueeze(1) == known).to(images.dtype)  # F.one_hot looks at values, which vmap refuses
        x = images * 2 - 1
        for layer in self.down:
            planes = one_hot[:, :, None, None].expand(-1, -1, *x.shape[2:])
            x = F.leaky_relu(layer(torch.cat([x, planes], dim=1)), 0.2)
        return self.dense(torch.cat([x.flatten(1), one_hot], dim=1)).squeeze(1)


def initialise_critic(critic: nn.Module, random: torch.Generator) -> None:
    """From `random` alone: weights as wide as their inputs ask for (He et al. 2015, leaky slope 0.2), biases zero."""
    for module in critic.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, a=0.2, generator=random)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
