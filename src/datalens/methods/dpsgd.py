"""DP-SGD with TopAgg compression (DataLens, Appendix A, Algorithm 4), on Opacus.

model, optimizer, loader = make_private(model, optimizer, loader, epsilon=1, delta=1e-5, epochs=20, clip=1.0, topk=0.8)

Opacus brings per-sample gradients; they are clipped and compressed by `bounded.norm_topk` and leave through the gate
`privacy.dpsgd`, which charges a ledger before it draws noise. With topk = 1 it is plain DP-SGD (GM-DP).

Differs from the paper: noise is on every coordinate, kept or not (Algorithm 4 says the same; some code does not), and ε
is Opacus's PRV price of the steps.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from opacus import GradSampleModule
from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from datalens.bounded.norm_topk import ROUNDING, NormTopK, Selector
from datalens.bounded.persons import sum_persons
from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import AccountantName
from datalens.privacy.dpsgd import GradientGate, Schedule, calibrate_sigma, calibrate_steps, poisson_sample
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from datalens.progress import say

if TYPE_CHECKING:
    from datalens.bounded.contributions import BoundedSum

NO_GHOSTS = (
    "ghost clipping has no per-sample gradients to compress: wrap the model in opacus.GradSampleModule, or in nothing"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do, from public facts."""

    compress: NormTopK
    schedule: Schedule
    batch_size: int  # expected


def plan_steps(
    *,
    budget: Budget,
    nominal_size: int,
    batch_size: int,
    epochs: float | None,
    clip: float,
    topk: float = 1.0,
    selector: Selector = "norm",
    sigma: float | None = None,
) -> Plan:
    """σ for the epochs, or, where σ is given, the steps that fit; with both given, they must fit."""
    compress = NormTopK(clip=clip, topk=topk, selector=selector)
    if budget.relation != "add-remove":
        raise DatalensError("DP-SGD samples records, which is priced for --relation add-remove only: leave it out")
    if not 1 <= batch_size <= nominal_size:
        raise DatalensError(
            f"--batch-size must lie between 1 and the {nominal_size} records declared, not {batch_size}"
        )
    if epochs is not None and not 0 < epochs < math.inf:
        raise DatalensError(f"--epochs must be a number above 0, not {epochs:g}")
    if sigma is not None and not 0 < sigma < math.inf and math.isfinite(budget.epsilon):
        raise DatalensError(f"--sigma must be above 0 (it is the noise multiplier), not {sigma:g}")
    rate = batch_size / nominal_size
    steps = None if epochs is None else max(1, round(epochs / rate))
    facts: dict[str, Any] = {"rate": rate, "budget": budget, "rounding": ROUNDING}
    if sigma is None:
        if steps is None:
            raise DatalensError("give --epochs, and the noise is solved for, or --sigma, and the steps are")
        sigma = calibrate_sigma(steps=steps, **facts)
    elif steps is None:
        steps = calibrate_steps(sigma=sigma, **facts)
        if steps == 0:
            raise BudgetExceeded(
                f"not even one step fits into {budget.describe(budget.epsilon)} at sigma {sigma:g}: raise --sigma or "
                "--epsilon, or lower --batch-size"
            )
    schedule = Schedule(sigma=sigma, rate=rate, steps=steps, unit=compress.bound, l2_bound=compress.l2_bound)
    cost = schedule.price(budget.pricing(), budget.delta)
    if not cost <= budget.epsilon:
        raise BudgetExceeded(
            f"{steps} steps at sigma {sigma:g} cost {budget.describe(cost)}, more than {budget.epsilon:g}: leave out "
            "--sigma or --epochs to have it solved"
        )
    return Plan(compress=compress, schedule=schedule, batch_size=batch_size)


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    epsilon: float,
    delta: float,
    epochs: float | None = None,
    clip: float,
    topk: float = 1.0,
    selector: Selector = "norm",
    sigma: float | None = None,
    nominal_size: int | None = None,
    ledger: Path | None = None,
    accountant: AccountantName = "prv",
    loss_reduction: str = "mean",
    noise_seed: int | None = None,
) -> "tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]":
    """The same three, made private: train with them as before, one optimizer.step() per batch of the loader.

    - `epsilon`, `delta`: for one record present or absent (add-remove). `inf` trains without noise and guarantee.
    - `epochs`: the noise is solved for them. With `sigma` given and no epochs: as many steps as fit, which is what the
      loader has.
    - `clip`, `topk`, `selector`: how a record's gradient is bounded and compressed (docs/dpsgd.md).
    - `nominal_size`: about how many records there are, declared public; default: how many there are, which declares
      that number public.
    - `ledger`: a file to charge to; a file that is there is continued (its steps stay charged).
    - `noise_seed`: for tests; NOT PRIVATE.

    What is guaranteed is (epsilon, delta)-DP of the model's parameters after every step, where batches come from the
    loader alone, each is used for one step, and the loss of a batch is a mean (or sum) over its records. Not covered:
    losses, accuracies, and buffers of layers that look at several records at once, which are refused where they are
    known.
    """
    batch_size, count = _check_loader(loader)
    _check_model(model, optimizer)
    budget = Budget(epsilon=epsilon, delta=delta, relation="add-remove", accountant=accountant)
    plan = plan_steps(
        budget=budget,
        nominal_size=count if nominal_size is None else nominal_size,
        batch_size=batch_size,
        epochs=epochs,
        clip=clip,
        topk=topk,
        selector=selector,
        sigma=sigma,
    )
    noise: NoiseSource = SecureNoise() if noise_seed is None else SeededNoise(noise_seed)
    if noise_seed is not None or math.isinf(epsilon):
        say("NOT PRIVATE: the noise is seeded, or there is none")
    gate = GradientGate(_open_ledger(ledger, budget), plan.schedule, noise)
    return attach(model, optimizer, loader, plan=plan, gate=gate, loss_reduction=loss_reduction)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    plan: Plan,
    gate: GradientGate,
    loss_reduction: str = "mean",
) -> "tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]":
    """The three, given a plan and a gate."""
    batches = PoissonBatches(len(loader.dataset), gate)  # type: ignore[arg-type]
    private = PrivateOptimizer(optimizer, plan=plan, gate=gate, batches=batches, loss_reduction=loss_reduction)
    return sampled_module(model, loss_reduction), private, _sampled(loader, batches)


def sampled_module(model: nn.Module, loss_reduction: str = "mean") -> GradSampleModule:
    if isinstance(model, GradSampleModule):
        return model
    return GradSampleModule(model, loss_reduction=loss_reduction)


class PrivateOptimizer(DPOptimizer):
    """Opacus's optimizer, with its clipping and its noise replaced."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        plan: Plan,
        gate: GradientGate,
        batches: "PoissonBatches | None" = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=plan.schedule.sigma,
            max_grad_norm=plan.compress.clip,
            expected_batch_size=plan.batch_size,
            loss_reduction=loss_reduction,
        )
        self.plan, self.gate = plan, gate
        self._batches = batches
        self._sum: BoundedSum | None = None  # of the parts of a batch so far
        self.whose: torch.Tensor | None = None  # of each image of a batch, where persons are the units
        self.taken = 0

    def epsilon_spent(self) -> str:
        """What was charged so far, with all that belongs to an ε."""
        ledger = self.gate.ledger
        return ledger.budget.describe(ledger.spent())

    def clip_and_accumulate(self) -> None:
        for p in self.params:
            if getattr(p, "grad_sample", None) is None:
                raise DatalensError(
                    "a parameter has no per-sample gradients: use the model that make_private returned, in train() "
                    "mode, and freeze what the loss does not depend on"
                )
            if isinstance(p.grad_sample, list):
                raise DatalensError(
                    "there were two backward passes without a step: call optimizer.step() and optimizer.zero_grad() "
                    "for every batch; for batches that do not fit into memory use opacus's BatchMemoryManager"
                )
        gradients = [p.grad_sample for p in self.params]
        if self.whose is None:
            self._sum = self.plan.compress.sum(gradients, onto=self._sum)
        else:
            self._sum = sum_persons(self.plan.compress, gradients, self.whose, onto=self._sum)
        for p in self.params:
            p.grad_sample = None  # used once

    def add_noise(self) -> None:
        assert self._sum is not None
        if self._batches is not None and self.taken >= self._batches.drawn:
            raise DatalensError(
                "a step without a batch of the loader: take the batches from the one make_private returned"
            )
        released = self.gate.release(self._sum)
        self._sum = None
        self.taken += 1
        widest = functools.reduce(torch.promote_types, (p.dtype for p in self.params))
        # At once: each trip to a GPU takes its time.
        noisy = torch.from_numpy(released.value[0]).to(device=self.params[0].device, dtype=widest)
        for p, part in zip(self.params, noisy.split([p.numel() for p in self.params]), strict=True):
            p.grad = part.view_as(p).to(p)

    def scale_grad(self) -> None:
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad /= self.expected_batch_size

    def pre_step(self, closure: Any = None) -> bool:
        """Without Opacus's look at per-sample gradients, which would copy lists of them."""
        if not self.params:
            raise DatalensError("the optimizer has no trainable parameters: there is nothing to train")
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        self._is_last_step_skipped = False
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self._sum = None


class PoissonBatches(Sampler[list[int]]):
    """An epoch of Poisson samples, from the gate's own randomness: 1 / rate of them, and no more than are planned."""

    def __init__(self, count: int, gate: GradientGate) -> None:
        self._count, self._gate = count, gate
        self.drawn = 0

    def __len__(self) -> int:
        return max(1, round(1 / self._gate.schedule.rate))

    def __iter__(self) -> Iterator[list[int]]:
        planned = self._gate.schedule.steps - self._gate.charged + self._gate.left
        for _ in range(min(len(self), planned)):  # the last epoch may be a part of one
            self.drawn += 1
            yield poisson_sample(self._gate.noise, self._count, self._gate.schedule.rate).tolist()


def _sampled(loader: DataLoader[Any], batches: PoissonBatches) -> DataLoader[Any]:
    """The loader with Poisson samples for batches, empty ones too."""
    first = loader.dataset[0]
    parts = first if isinstance(first, tuple | list) else (first,)
    collate = wrap_collate_with_empty(
        collate_fn=loader.collate_fn,
        sample_empty_shapes=[(0, *shape_safe(part)) for part in parts],
        dtypes=[torch.int64 if type(part) is int else dtype_safe(part) for part in parts],
    )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
    )


def _check_loader(loader: DataLoader[Any]) -> tuple[int, int]:
    """Its batch size and the number of its records; or why Poisson samples cannot take its place."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise DatalensError("Poisson samples need to reach any record: give a data set with a length, not a stream")
    if loader.drop_last:
        raise DatalensError("drop_last leaves records out that Poisson sampling must be able to draw: leave it out")
    if loader.batch_sampler is None:
        raise DatalensError("the loader makes no batches: give it a batch_size")
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (SequentialSampler, RandomSampler)
    if not plain or loader.batch_size is None:
        name = type(loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler).__name__
        raise DatalensError(f"{name} would be replaced by Poisson sampling, whose price is paid: leave the sampler out")
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
        raise DatalensError("sampling with replacement would be replaced by Poisson sampling: leave the sampler out")
    return loader.batch_size, len(loader.dataset)


def _check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """What Opacus cannot make per-sample gradients for, by name, and what to do."""
    if type(model).__name__.startswith("GradSampleModuleFastGradientClipping"):
        raise DatalensError(NO_GHOSTS)
    if isinstance(optimizer, DPOptimizer):
        raise DatalensError("this optimizer is private already: give the one it was made from")
    for name, layer in model.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise DatalensError(
                f"layer {name or 'model'} ({type(layer).__name__}) mixes records, and keeps statistics of them that no "
                "noise is added to: use GroupNorm in its place (opacus.validators.ModuleValidator.fix(model), before "
                "the optimizer is made), or compute its features beforehand"
            )
    with contextlib.suppress(AttributeError):
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


def _open_ledger(path: Path | None, budget: Budget) -> Ledger:
    if path is None:
        return Ledger.in_memory(budget)
    if not path.exists():
        return Ledger.create(path, budget)
    ledger = Ledger.open(path)
    if ledger.budget != budget:
        ledger.close()
        raise DatalensError(f"{path} was begun with another budget: name another file")
    return ledger


# Opacus's hooks sit on layers whose inputs need no gradient, which torch remarks on at every first layer.
warnings.filterwarnings("ignore", message="Full backward hook is firing")
