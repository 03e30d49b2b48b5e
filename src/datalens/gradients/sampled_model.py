"""The model with Opacus's hooks for per-record gradients, and checks that refuse models it cannot be used for."""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from datalens.errors import DatalensError

IN_USE: "weakref.WeakSet[object]" = weakref.WeakSet()  # models and optimizers that were given to make_private
NO_GHOSTS = (
    "ghost clipping has no per-sample gradients to compress: wrap the model in opacus.GradSampleModule, or do not wrap "
    "it"
)


def sampled_module(model: nn.Module, loss_reduction: str = "mean") -> GradSampleModule:
    """Return the model with Opacus's hooks.

    A model that has them already is turned into a `Sampled` in place, so that copies of it are noticed.
    """
    if isinstance(model, GradSampleModule):
        model.__class__ = Sampled
        return model
    return Sampled(model, loss_reduction=loss_reduction)


class Sampled(GradSampleModule):
    """Opacus's module with a clearer error for backward passes in eval() mode, and a check before it is copied.

    (Opacus's own error in eval() mode is "No activations detected".)
    """

    before_copy: Callable[[nn.Module], None] | None = None

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **named: Any) -> None:
        if self.hooks_enabled and not module.training:
            raise DatalensError(
                f"a backward pass through a {type(module).__name__} in eval() mode, which has no per-sample gradients: "
                "call model.train() before the forward pass"
            )
        super().capture_backprops_hook(module, *arguments, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Check the model before it is copied or pickled: a copy could carry unnoised state away."""
        if self.before_copy is not None:
            self.before_copy(self)
        return super().__reduce_ex__(protocol)


def check_reduction(model: GradSampleModule, loss_reduction: str) -> None:
    """Raise if the model's hooks are for another loss reduction, or for another first dimension.

    The hooks themselves are inspected, not the module's attributes.

    Args:
        model: The model with hooks.
        loss_reduction: The reduction that `make_private` was given.

    Raises:
        DatalensError: they differ, or there are no hooks.
    """
    settings = {
        (hook.keywords["loss_reduction"], hook.keywords["batch_first"])
        for layer in model.modules()
        for hook in layer._backward_hooks.values()
        if isinstance(hook, functools.partial) and "loss_reduction" in hook.keywords
    }
    if not settings:
        raise DatalensError("this GradSampleModule has no hooks, so no per-sample gradients: give a new one")
    for inside, batch_first in sorted(settings):
        if not batch_first:
            raise DatalensError("this GradSampleModule has batch_first=False, but rows must be records: leave it out")
        if inside != loss_reduction:
            raise DatalensError(
                f"make_private has loss_reduction={loss_reduction!r} and this GradSampleModule {inside!r}, so one "
                "record would rescale the rows of all others: give both the same, or the model without the module"
            )


def check_model(model: nn.Module, optimizer: Optimizer, loss_reduction: str) -> None:
    """Raise if DP-SGD cannot train this model with this optimizer. The message names the layer and says what to do.

    Args:
        model: The model, with or without Opacus's hooks.
        optimizer: The user's optimizer.
        loss_reduction: The reduction that `make_private` was given.

    Raises:
        DatalensError: the model or the optimizer cannot be used.
    """
    if type(model).__name__.startswith("GradSampleModuleFastGradientClipping"):
        raise DatalensError(NO_GHOSTS)
    if isinstance(optimizer, DPOptimizer):
        raise DatalensError("this optimizer is private already: give the one it was made from")
    if model in IN_USE or optimizer in IN_USE:
        raise DatalensError(
            "make_private was given this model or optimizer before, and a second budget would be spent next to the "
            "first: to continue training, load its state_dict into a new model, and count both budgets"
        )
    if loss_reduction not in ("mean", "sum"):
        raise DatalensError(f"loss_reduction must be mean or sum, not {loss_reduction}")
    inner = model._module if isinstance(model, GradSampleModule) else model
    if isinstance(model, GradSampleModule):
        if type(model) not in (GradSampleModule, Sampled):
            raise DatalensError(
                f"{type(model).__name__} is a GradSampleModule of your own, whose copies cannot be checked: wrap the "
                "model in opacus.GradSampleModule itself, or do not wrap it"
            )
        check_reduction(model, loss_reduction)
    elif hasattr(model, "autograd_grad_sample_hooks"):
        raise DatalensError("this model has Opacus's hooks already: give its GradSampleModule, or a new model")
    if any(isinstance(layer, GradSampleModule) for layer in inner.modules()):
        raise DatalensError("a part of this model has Opacus's hooks already: wrap all of it, or no part")
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False):
            raise DatalensError(
                f"layer {name or 'model'} ({type(layer).__name__}) mixes records, and keeps statistics of them without "
                "noise: use GroupNorm in its place (opacus.validators.ModuleValidator.fix(model), before the optimizer "
                "is made), or compute its features beforehand"
            )
    errors = ModuleValidator.validate(model, strict=False)
    if errors:
        raise DatalensError(f"Opacus cannot train this model: {' '.join(str(errors[0]).split())}")
    known = {id(p) for p in model.parameters()}
    used = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in used):
        raise DatalensError("the optimizer has parameters that the model lacks: make it from model.parameters()")
    if not any(p.requires_grad for p in used):
        raise DatalensError("the optimizer has no trainable parameters: there is nothing to train")
    named = [name for name, p in model.named_parameters() if p.requires_grad and not any(p is other for other in used)]
    if named:
        raise DatalensError(
            f"parameter {named[0]} is trainable and not in the optimizer: add it, or freeze it (requires_grad_(False))"
        )


# Opacus has hooks on layers whose inputs need no gradient, for which torch would warn at every first layer.
warnings.filterwarnings("ignore", message="Full backward hook is firing")
