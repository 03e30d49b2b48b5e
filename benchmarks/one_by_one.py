"""The teachers as plain PyTorch modules, one after the other: the baseline of the vectorised ensemble's benchmarks.

It is also the oracle of its tests: both must train to the same weights and give the same gradients.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.private.networks import Convolutional, Network, Spectral
from datalens.private.shares import Shares


class SpectralModule(nn.Module):
    def __init__(self, network: Spectral, start: dict[str, Tensor]) -> None:
        super().__init__()
        self.start = nn.ParameterDict(start)
        self.hidden = network.hidden

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        p = self.start
        hidden = F.leaky_relu(x @ p["w1"][:, : self.hidden] + p["b1"][labels], 0.2)
        linear = (x * p["w1"][:, self.hidden :].T[labels]).sum(1)
        return hidden @ p["w2"] + linear + p["b2"][labels]


class ConvolutionalModule(nn.Module):
    """One discriminator of torch's own layers. The label is concatenated as one-hot planes, as in DC-GAN."""

    def __init__(self, network: Convolutional, start: dict[str, Tensor]) -> None:
        super().__init__()
        self.network = network
        planes = network.classes if network.label_planes else 0
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        inputs = network.shape[0]
        with torch.no_grad():
            for layer, outputs in enumerate(network.channels):
                conv = nn.Conv2d(inputs + planes, outputs, 5, stride=2, padding=2)
                weight = start[f"conv{layer}.weight"].view(5, 5, inputs, outputs).permute(3, 2, 0, 1)
                if planes:
                    label = start[f"conv{layer}.label"].view(planes, 5, 5, outputs).permute(3, 0, 1, 2)
                    weight = torch.cat([weight, label], dim=1)
                conv.weight.copy_(weight)
                conv.bias.copy_(start[f"conv{layer}.bias"])
                self.convs.append(conv)
                self.norms.append(nn.BatchNorm2d(outputs, track_running_stats=False) if layer else nn.Identity())
                inputs = outputs
            dense = torch.cat([start["dense.weight"], start["dense.label"]])  # [features + classes, hidden]
            self.dense = nn.Linear(*dense.shape)
            self.dense.weight.copy_(dense.T)
            self.dense.bias.copy_(start["dense.bias"])
            self.norm = nn.Identity()
            if network.dense_norm:
                self.norm = nn.BatchNorm1d(dense.shape[1], track_running_stats=False)
            out = torch.cat([start["out.weight"], start["out.label"]])
            self.out = nn.Linear(len(out), 1)
            self.out.weight.copy_(out.unsqueeze(0))
            self.out.bias.copy_(start["out.bias"])
        self.linear = nn.Parameter(start["linear.weight"]) if network.linear else None  # [pixels, classes]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        one_hot = F.one_hot(labels, self.network.classes).to(x.dtype)
        per_class = torch.zeros(())
        if self.linear is not None:
            per_class = (self.network.linear * x.flatten(1) * self.linear.T[labels]).sum(dim=1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.network.label_planes:
                x = torch.cat([x, one_hot[:, :, None, None].expand(-1, -1, *x.shape[2:])], dim=1)
            x = F.leaky_relu(norm(conv(x)), 0.2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # our dense layer has positions before channels
        x = F.leaky_relu(self.norm(self.dense(torch.cat([x, one_hot], dim=1))), 0.2)
        return self.out(torch.cat([x, one_hot], dim=1)).squeeze(1) + per_class


class OneTeacher:
    """Module, optimiser and share of one teacher. `definition` is the network of initial weights and features."""

    def __init__(
        self,
        definition: Network,
        number: int,
        shares: Shares,
        *,
        batch: int,
        rate: float,
        decay: float,
        seed: int,
        kind: Network | None = None,
    ) -> None:
        self.number = torch.tensor([number], device=shares.device)
        start = {name: value[0].clone() for name, value in definition.parameters(self.number, seed).items()}
        kind = kind or definition
        self.module: nn.Module
        if isinstance(kind, Spectral):
            self.module = SpectralModule(kind, start)
        else:
            assert isinstance(kind, Convolutional)
            self.module = ConvolutionalModule(kind, start)
        self.module = self.module.to(shares.device, next(iter(start.values())).dtype)
        self.adam = torch.optim.Adam(self.module.parameters(), lr=rate, betas=(0.5, 0.999), weight_decay=decay)
        self.definition, self.shares, self.batch, self.seed = definition, shares, batch, seed

    def fit(self, fake: Tensor, fake_labels: Tensor, *, step: int, draw: int) -> None:
        rows, labels = self.shares.batch(self.number, size=self.batch, seed=self.seed, step=step, draw=draw)
        real, labels = self.definition.from_rows(rows)[0], labels[0]
        real_losses = F.softplus(-self.module(real, labels))
        fake_losses = F.softplus(self.module(fake, fake_labels))
        # Classes have the weights of the teacher's own records.
        same = labels.unsqueeze(1) == fake_labels
        real_weight = same.any(dim=1) / len(labels)
        fake_weight = (same / same.sum(dim=1, keepdim=True).clamp(min=1)).sum(dim=0) / len(labels)
        loss = (real_weight * real_losses).sum() + (fake_weight * fake_losses).sum()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()

    def image_gradient(self, fake: Tensor, fake_labels: Tensor) -> Tensor:
        """Return the gradient of log D with respect to fake images [m, d]."""
        inputs = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.logsigmoid(self.module(inputs, fake_labels)).sum(), inputs)
        return self.definition.to_basis(slope.unsqueeze(0))[0]
