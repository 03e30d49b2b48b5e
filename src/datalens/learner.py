"""A network and its Adam, as a run trains and checkpoints them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Learner:
    """`step(loss)` descends once. Whether it may see records depends on who computes the loss."""

    def __init__(self, module: nn.Module, *, rate: float, betas: tuple[float, float] = (0.5, 0.999)) -> None:
        self.module = module
        self._adam = torch.optim.Adam(module.parameters(), lr=rate, betas=betas)

    def rate(self, value: float) -> None:
        """From now on."""
        for group in self._adam.param_groups:
            group["lr"] = value

    def step(self, loss: Tensor) -> None:
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()

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
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        prefix = "module."
        self.module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        for name, parameter in self.module.named_parameters():
            self._adam.state[parameter] = {
                key: state[f"adam.{name}.{key}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"adam.{name}.{key}" in state
            }
