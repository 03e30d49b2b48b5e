"""The vectorised ensemble: N teacher discriminators, each trained on its own share (Algorithm 1, lines 7-11).

A teacher's row is a function of its own share, the fakes and a stream keyed by (seed, teacher, step).
Deleting a record, or making it NaN, leaves every other teacher's row bit-identical: a test says so.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.bounded.contributions import Gradients
from datalens.private.networks import Network, Parameters
from datalens.private.shares import Shares


class Fakes(Protocol):
    """What teachers are shown: images [m, c, h, w] in [0, 1] and the labels they were made for."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


class Teachers:
    """All teachers, in chunks that bound the memory. How they are chunked changes no row beyond rounding."""

    def __init__(
        self,
        network: Network,
        shares: Shares,
        *,
        batch: int,
        learning_rate: float,
        weight_decay: float,
        seed: int,
        chunk: int | None = None,
    ) -> None:
        self._network = network
        self._shares = shares
        self._batch = batch
        self._seed = seed
        chunk = chunk or chunk_that_fits(network.bytes_per_teacher(batch), shares.device)
        self._chunks = [
            _Chunk(network, teachers, learning_rate, weight_decay, seed)
            for teachers in torch.arange(shares.teachers, device=shares.device).split(chunk)
        ]

    def fit_step(self, fakes: Fakes, *, step: int, repeats: int) -> float:
        """`repeats` Adam steps of every teacher against the same fakes; returns the last one's mean loss (private!)."""
        fake = self._network.features(fakes.images.detach())
        total = 0.0
        for chunk in self._chunks:
            loss = torch.zeros(())
            for draw in range(repeats):
                real, labels = self._shares.batch(
                    chunk.teachers, size=self._batch, seed=self._seed, step=step, draw=draw
                )
                loss = chunk.fit(self._network, real, labels, fake, fakes.labels)
            total += float(loss)
        return total / self._shares.teachers

    def image_gradients(self, fakes: Fakes, *, step: int) -> Iterator[Gradients]:
        """∂ log D(x)/∂x at each fake: the direction in which the teacher finds it more real, in the basis.

        Differs from the paper: Algorithm 1 prints −∂ log D/∂a and then adds it to the image, which would
        walk away from the data. The direction that lowers the generator's loss is meant.
        """
        fake = self._network.features(fakes.images.detach())
        for chunk in self._chunks:
            values = self._network.to_basis(chunk.image_gradients(self._network, fake, fakes.labels))
            values = torch.where(self._shares.occupied(chunk.teachers).view(-1, 1, 1), values, 0.0)
            yield Gradients(teachers=chunk.teachers, values=values, step=step)

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs. Derived from records: it never leaves the owner's machine."""
        parts = [chunk.state() for chunk in self._chunks]
        # All teachers together, whatever the chunks: a resumed run may have more or less memory.
        return {
            name: torch.cat([part[name].cpu() for part in parts]) if parts[0][name].dim() else parts[0][name]
            for name in parts[0]
        }

    def state_bytes(self) -> int:
        """The size of `state`, without making it: weights and two moments each."""
        return sum(3 * p.numel() * p.element_size() for chunk in self._chunks for p in chunk.parameters.values())

    def load_state(self, state: dict[str, Tensor]) -> None:
        for chunk in self._chunks:
            mine = chunk.teachers.cpu()
            chunk.load_state({name: value[mine] if value.dim() else value for name, value in state.items()})

    @property
    def chunk_sizes(self) -> list[int]:
        return [len(chunk.teachers) for chunk in self._chunks]


class _Chunk:
    """Some teachers, their parameters and their optimiser. Adam is elementwise, so teachers do not meet in it.

    Weight decay is the L2 term in the gradient, as Adam has it (not AdamW's).
    """

    def __init__(self, network: Network, teachers: Tensor, rate: float, decay: float, seed: int) -> None:
        self.teachers = teachers
        self.parameters: Parameters = {k: v.requires_grad_() for k, v in network.parameters(teachers, seed).items()}
        self._adam = torch.optim.Adam(
            self.parameters.values(), lr=rate, betas=(0.5, 0.999), weight_decay=decay, fused=True
        )

    def fit(self, network: Network, real: Tensor, labels: Tensor, fake: Tensor, fake_labels: Tensor) -> Tensor:
        n = len(self.teachers)
        # Real and fake in separate passes: batch norm sees them apart, as in DC-GAN.
        real_logits = network.logits(self.parameters, real, labels)
        fake_logits = network.logits(self.parameters, fake.expand(n, *fake.shape), fake_labels.expand(n, -1))
        real_weight, fake_weight = matching_weights(labels, fake_labels)
        # −log D(x) − log(1 − D(G(z))), a mean over the batch, a sum over teachers: their gradients stay apart.
        loss = (real_weight * F.softplus(-real_logits)).sum() + (fake_weight * F.softplus(fake_logits)).sum()
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        return loss.detach()

    def image_gradients(self, network: Network, fake: Tensor, labels: Tensor) -> Tensor:
        n = len(self.teachers)
        frozen = {name: value.detach() for name, value in self.parameters.items()}
        inputs = fake.expand(n, *fake.shape).requires_grad_()
        log_real = F.logsigmoid(network.logits(frozen, inputs, labels.expand(n, -1))).sum()
        return torch.autograd.grad(log_real, inputs)[0]

    def state(self) -> dict[str, Tensor]:
        state = {f"parameter.{name}": value.detach() for name, value in self.parameters.items()}
        for name, value in self.parameters.items():
            for key, moment in self._adam.state[value].items():
                state[f"adam.{name}.{key}"] = moment
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, value in self.parameters.items():
            value.data.copy_(state[f"parameter.{name}"])
            self._adam.state[value] = {
                key: state[f"adam.{name}.{key}"].to(value.device, copy=True)  # chunks must not share a step counter
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"adam.{name}.{key}" in state
            }


def matching_weights(labels: Tensor, fake_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of real [n, b] and fake [n, m] images under which both have the same labels, teacher by teacher.

    A share of a few records misses most classes. Weighted evenly, a teacher would learn "class 7 is always fake"
    and vote with that; the authors' code draws each teacher's fakes for the labels of its own records instead.
    Weighting the shared fakes does the same without generating N batches. Own share only: independence holds.
    """
    same = labels.unsqueeze(2) == fake_labels  # [n, b, m]
    matches = same.sum(dim=2, keepdim=True)  # [n, b, 1]: fakes with this record's label
    real_weight = (matches.squeeze(2) > 0) / labels.shape[1]
    fake_weight = (same / matches.clamp(min=1)).sum(dim=1) / labels.shape[1]
    return real_weight, fake_weight


def chunk_that_fits(bytes_per_teacher: int, device: torch.device) -> int:
    """As many teachers at a time as half of the GPU's memory, or 1 GiB on a CPU, can hold.

    By what the device has, never by what is free: that depends on the number of records, and with the chunks
    the rounding of every teacher's row would.
    """
    room = torch.cuda.get_device_properties(device).total_memory // 2 if device.type == "cuda" else 2**30
    return max(1, room // bytes_per_teacher)
