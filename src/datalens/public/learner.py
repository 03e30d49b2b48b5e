"""A network and its Adam, as a run trains and checkpoints them."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Learner:
    """`step(loss)` descends once. Whether it may see records depends on who computes the loss.

    `average`: of a running average of the weights, how much stays in a step. Noisy steps circle around it.
    """

    def __init__(
        self, module: nn.Module, *, rate: float, betas: tuple[float, float] = (0.5, 0.999), average: float = 0.0
    ) -> None:
        self.module = module
        self._adam = torch.optim.Adam(module.parameters(), lr=rate, betas=betas)
        self._average = average
        self._mean = {name: value.detach().clone() for name, value in module.named_parameters()} if average else {}

    def rate(self, value: float) -> None:
        """From now on."""
        for group in self._adam.param_groups:
            group["lr"] = value

    def step(self, loss: Tensor) -> None:
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        for name, value in self.module.named_parameters() if self._average else ():
            self._mean[name].lerp_(value.detach(), 1 - self._average)

    def averaged(self) -> Any:
        """A copy of the network with the average of its weights."""
        found = copy.deepcopy(self.module)
        found.load_state_dict({**found.state_dict(), **self._mean})
        return found

    def descend(self, gradients: Mapping[str, Tensor]) -> None:
        """Along gradients that somebody else has computed."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].to(parameter)
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        state = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, moment in self._adam.state[parameter].items():
                state[f"adam.{name}.{key}"] = moment
        return state | {f"mean.{name}": value for name, value in self._mean.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
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
