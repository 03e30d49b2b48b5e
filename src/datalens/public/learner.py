"""A network with its Adam optimizer, as a run trains and checkpoints it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Learner:
    """A network, its Adam optimizer, and optionally a running average of its weights, around which noisy steps circle.

    Whether it learns from records depends on the caller, who computes the loss.

    Args:
        module: The network.
        rate: Learning rate.
        betas: Of Adam.
        average: Fraction of the running average that is kept in each step; 0 for no average.
    """

    def __init__(
        self, module: nn.Module, *, rate: float, betas: tuple[float, float] = (0.5, 0.999), average: float = 0.0
    ) -> None:
        self.module = module
        self._adam = torch.optim.Adam(module.parameters(), lr=rate, betas=betas)
        self._average = average
        self._mean = {name: value.detach().clone() for name, value in module.named_parameters()} if average else {}

    def rate(self, value: float) -> None:
        """Set the learning rate of the steps to come."""
        for group in self._adam.param_groups:
            group["lr"] = value

    def step(self, loss: Tensor) -> None:
        """Make one step down the gradient of the loss."""
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        for name, value in self.module.named_parameters() if self._average else ():
            self._mean[name].lerp_(value.detach(), 1 - self._average)

    def averaged(self) -> Any:
        """Return a copy of the network with the average of its weights."""
        network = copy.deepcopy(self.module)
        network.load_state_dict({**network.state_dict(), **self._mean})
        return network

    def descend(self, gradients: Mapping[str, Tensor]) -> None:
        """Make one step with given gradients."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].to(parameter)
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs."""
        state = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, moment in self._adam.state[parameter].items():
                state[f"adam.{name}.{key}"] = moment
        return state | {f"mean.{name}": value for name, value in self._mean.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, value in self._mean.items():
            value.copy_(state[f"mean.{name}"])
        prefix = "module."
        self.module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        for name, parameter in self.module.named_parameters():
            self._adam.state[parameter] = {
                key: state[f"adam.{name}.{key}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"adam.{name}.{key}" in state
            }
