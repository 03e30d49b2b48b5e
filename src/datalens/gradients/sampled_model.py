"""A model as Opacus trains it, a record's gradient at a time, and the models that are refused."""

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

IN_USE: "weakref.WeakSet[object]" = weakref.WeakSet()  # models and optimizers that make_private has taken
NO_GHOSTS = (
    "ghost clipping has no per-sample gradients to compress: wrap the model in opacus.GradSampleModule, or in nothing"
)


def sampled_module(model: nn.Module, loss_reduction: str = "mean") -> GradSampleModule:
    """A model with Opacus's hooks. One that has them already becomes a `Sampled` as it is, so that copies are seen."""
    if isinstance(model, GradSampleModule):
        model.__class__ = Sampled
        return model
    return Sampled(model, loss_reduction=loss_reduction)


class Sampled(GradSampleModule):
    """Opacus's, which in eval() mode ends a backward pass with "No activations detected"."""

    before_copy: Callable[[nn.Module], None] | None = None

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **named: Any) -> None:
        if self.hooks_enabled and not module.training:
            raise DatalensError(
                f"a backward pass through a {type(module).__name__} in eval() mode, which has no per-sample gradients: "
                "call model.train() before the forward pass"
            )
        super().capture_backprops_hook(module, *arguments, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, too, is a way out for what the model holds."""
        if self.before_copy is not None:
            self.before_copy(self)
        return super().__reduce_ex__(protocol)


def check_reduction(model: GradSampleModule, loss_reduction: str) -> None:
    """Refuse hooks of another loss, or of another first dimension; the hooks are asked, not what the module says."""
    found = {
        (hook.keywords["loss_reduction"], hook.keywords["batch_first"])
        for layer in model.modules()
        for hook in layer._backward_hooks.values()
        if isinstance(hook, functools.partial) and "loss_reduction" in hook.keywords
    }
    if not found:
        raise DatalensError("this GradSampleModule has no hooks, so no per-sample gradients: give a new one")
    for inside, batch_first in sorted(found):
        if not batch_first:
            raise DatalensError("this GradSampleModule has batch_first=False: rows must be records; leave it out")
        if inside != loss_reduction:
            raise DatalensError(
                f"make_private has loss_reduction={loss_reduction!r} and this GradSampleModule {inside!r}: one record "
                "would rescale the rows of all others; give both the same, or the model without the module"
            )


def check_model(model: nn.Module, optimizer: Optimizer, loss_reduction: str) -> None:
    """What Opacus cannot make per-sample gradients for, by name, and what to do."""
    if type(model).__name__.startswith("GradSampleModuleFastGradientClipping"):
        raise DatalensError(NO_GHOSTS)
    if isinstance(optimizer, DPOptimizer):
        raise DatalensError("this optimizer is private already: give the one it was made from")
    if model in IN_USE or optimizer in IN_USE:
        raise DatalensError(
            "make_private was given this model or optimizer before: a second budget would be spent beside the first; "
            "to train on, load its state_dict into a new model, and count both"
        )
    if loss_reduction not in ("mean", "sum"):
        raise DatalensError(f"loss_reduction must be mean or sum, not {loss_reduction}")
    inner = model._module if isinstance(model, GradSampleModule) else model
    if isinstance(model, GradSampleModule):
        if type(model) not in (GradSampleModule, Sampled):
            raise DatalensError(
                f"{type(model).__name__} is a GradSampleModule of your own, whose copies nobody looks at: wrap the "
                "model in opacus.GradSampleModule itself, or in nothing"
            )
        check_reduction(model, loss_reduction)
    elif hasattr(model, "autograd_grad_sample_hooks"):
        raise DatalensError("this model has Opacus's hooks already: give its GradSampleModule, or a new model")
    if any(isinstance(layer, GradSampleModule) for layer in inner.modules()):
        raise DatalensError("a part of this model has Opacus's hooks already: wrap all of it, or nothing")
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False):
            raise DatalensError(
                f"layer {name or 'model'} ({type(layer).__name__}) mixes records, and keeps statistics of them that no "
                "noise is added to: use GroupNorm in its place (opacus.validators.ModuleValidator.fix(model), before "
                "the optimizer is made), or compute its features beforehand"
            )
    errors = ModuleValidator.validate(model, strict=False)
    if errors:
        raise DatalensError(f"Opacus cannot train this model: {' '.join(str(errors[0]).split())}")
    known = {id(p) for p in model.parameters()}
    used = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in used):
        raise DatalensError("the optimizer has parameters that the model has not: make it from model.parameters()")
    if not any(p.requires_grad for p in used):
        raise DatalensError("the optimizer has no trainable parameters: there is nothing to train")
    named = [name for name, p in model.named_parameters() if p.requires_grad and not any(p is other for other in used)]
    if named:
        raise DatalensError(
            f"parameter {named[0]} is trainable and not in the optimizer: add it, or freeze it (requires_grad_(False))"
        )


# Opacus's hooks sit on layers whose inputs need no gradient, which torch remarks on at every first layer.
warnings.filterwarnings("ignore", message="Full backward hook is firing")
