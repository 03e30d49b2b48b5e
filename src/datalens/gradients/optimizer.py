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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from datalens.bounded.norm_topk import ROUNDING, NormTopK, Selector
from datalens.bounded.persons import sum_persons
from datalens.errors import BudgetExceeded, DatalensError
from datalens.gradients.mixing import CannotTell, try_batch, try_collate, try_model
from datalens.gradients.poisson import PoissonBatches, check_loader, sampled
from datalens.gradients.sampled_model import IN_USE, Sampled, check_model, check_reduction, sampled_module
from datalens.gradients.watching import StateWatch
from datalens.plans.guidance import budget_warnings
from datalens.privacy.accountant import AccountantName
from datalens.privacy.dpsgd import GradientGate, Schedule, calibrate_sigma, calibrate_steps
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from datalens.progress import say

if TYPE_CHECKING:
    from datalens.bounded.contributions import BoundedSum


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

    What is guaranteed is (epsilon, delta)-DP of the model's parameters after every step. Yours to keep: records come
    from the loader alone, no code between it and the model mixes them, and the loss of a batch is the plain mean (or,
    with loss_reduction="sum", the sum) of its records' own losses. A mean that is divided by something else than their
    number, as cross_entropy's is with `weight=` or `ignore_index`, is not: one record would rescale all others. Use
    reduction="sum" there, or weigh each record's loss yourself and take `.mean()`. Not covered: what a layer keeps in
    plain Python attributes; losses and accuracies you look at.

    Refused at once: a model or a collate function that mixes records, as far as a trial on a few of them shows.
    Refused, as a step: rows of gradients that are not exactly the records of one batch; two forward passes in one; a
    buffer or parameter of the model that changed otherwise than by a step (state_dict() refuses it, too).
    """
    batch_size, count = check_loader(loader)
    check_model(model, optimizer, loss_reduction)
    budget = Budget(epsilon=epsilon, delta=delta, relation="add-remove", accountant=accountant)
    nominal_size = count if nominal_size is None else nominal_size
    plan = plan_steps(
        budget=budget,
        nominal_size=nominal_size,
        batch_size=batch_size,
        epochs=epochs,
        clip=clip,
        topk=topk,
        selector=selector,
        sigma=sigma,
    )
    for line in budget_warnings(budget, nominal_size):
        say(f"warning: {line}")
    batch, said = try_collate(loader)
    if said:
        say(f"warning: {said} (docs/dpsgd.md)")
    with contextlib.suppress(CannotTell):  # it is tried again when it is first called
        try_batch(model._module if isinstance(model, GradSampleModule) else model, batch)
    noise: NoiseSource = SecureNoise() if noise_seed is None else SeededNoise(noise_seed)
    if noise_seed is not None or math.isinf(epsilon):
        say("NOT PRIVATE: the noise is seeded, or there is none")
    gate = GradientGate(_open_ledger(ledger, budget), plan.schedule, noise)
    batches = PoissonBatches(count, gate)
    module = sampled_module(model, loss_reduction)
    private = PrivateOptimizer(optimizer, plan=plan, gate=gate, batches=batches, loss_reduction=loss_reduction)
    private.watch(module)
    IN_USE.update((module, module._module, optimizer))
    return module, private, sampled(loader, batches)


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
        self._rows = 0  # in it
        self.whose: torch.Tensor | None = None  # of each image of a batch, where persons are the units
        self.taken = 0
        self._passes = 0  # forward, since the last step
        self._model: GradSampleModule | None = None
        self._state: StateWatch | None = None
        self._stepping = self._noisy = self._tried = False
        optimizer.register_step_pre_hook(self._refuse_raw)
        if batches is not None:
            batches.on_new_pass = self._drop

    def epsilon_spent(self) -> str:
        """What was charged so far, with all that belongs to an ε."""
        ledger = self.gate.ledger
        private = self.gate.noise.origin == "operating-system" and math.isfinite(ledger.budget.epsilon)
        said = "" if private else "; NOT PRIVATE: the noise is seeded, or there is none"
        return ledger.budget.describe(ledger.spent()) + said

    def watch(self, sampled: GradSampleModule) -> None:
        """Count the model's forward passes, try at the first whether it mixes records, and remember its state.

        No noise is added to what a layer keeps in parameters and buffers by itself.
        """
        model: nn.Module = sampled._module

        def count(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                self._passes += 1
                self._try_once(module, arguments, named)

        model.register_forward_pre_hook(count, with_kwargs=True)
        self._model, state = sampled, StateWatch(model)
        self._state = state
        state.attach(busy=lambda: self._passes > 0 or self._rows > 0)
        assert isinstance(sampled, Sampled)
        sampled.before_copy = lambda one: state.check() if one is sampled else None  # a copy's copies are its own

    def _try_once(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """As it is called now, which `make_private` could only guess. Samples of none and of one tell nothing."""
        rows = [len(x) for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor) and x.dim()]
        if self._tried or (rows and rows[0] < 2):
            return
        self._tried = True
        try:
            try_model(model, arguments, named)
        except CannotTell as reason:
            say(
                f"warning: it could not be tried whether the model mixes records ({reason}); that it does not is yours "
                "to keep (docs/dpsgd.md)"
            )

    def clip_and_accumulate(self) -> None:
        for p in self.params:
            if isinstance(getattr(p, "grad_sample", None), list):
                raise DatalensError(
                    "there were two backward passes without a step: call optimizer.step() and optimizer.zero_grad() "
                    "for every batch; for batches that do not fit into memory use opacus's BatchMemoryManager"
                )
        if self._passes > 1:
            raise DatalensError(
                f"{self._passes} forward passes in train() mode since the last step: make one of each batch; look at "
                "other images in eval() mode or under torch.no_grad()"
            )
        if any(getattr(p, "grad_sample", None) is None for p in self.params):
            raise DatalensError(
                "a parameter has no per-sample gradients: use the model that make_private returned, in train() "
                "mode, and freeze what the loss does not depend on"
            )
        gradients = [p.grad_sample for p in self.params]
        fewest, most = min(map(len, gradients)), max(map(len, gradients))
        if fewest != most:
            raise DatalensError(
                f"layers of the model saw {fewest} and {most} rows of one batch: no layer may put several records, or "
                "parts of one, into the first dimension"
            )
        if self.whose is None:
            self._sum = self.plan.compress.sum(gradients, onto=self._sum)
        else:
            self._sum = sum_persons(self.plan.compress, gradients, self.whose, onto=self._sum)
        self._rows += most
        self._passes = 0
        for p in self.params:
            p.grad_sample = None  # used once

    def add_noise(self) -> None:
        assert self._sum is not None
        if self._batches is not None:
            self._batches.take(self._rows)
        if self._state is not None and self._model is not None:
            self._state.check()
            check_reduction(self._model, self.loss_reduction)
        released = self.gate.release(self._sum)
        self._sum, self._rows, self._noisy = None, 0, True
        self.taken += 1
        widest = functools.reduce(torch.promote_types, (p.dtype for p in self.params))
        # At once: each trip to a GPU takes its time.
        noisy = torch.from_numpy(released.value[0]).to(device=self.params[0].device, dtype=widest)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # frozen since the backward pass, say: its gradient has no noise
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
        try:
            self.clip_and_accumulate()
            if self._check_skip_next_step():
                return False
            self.add_noise()
        except BaseException:
            self._drop()  # or what was refused would be in the next sum
            if self._batches is not None:
                self._batches.forget()
            raise
        self.scale_grad()
        return True

    def step(self, closure: Any = None) -> Any:
        self._stepping = True
        try:
            return super().step(closure)
        finally:
            if self._noisy and self._state is not None:
                self._state.remember(self.params)  # and nothing else: it is as it was before the first step
            self._stepping = self._noisy = False

    def _drop(self) -> None:
        """All that is known of records: gradients, and sums of parts of a batch."""
        self._sum, self._rows, self._passes = None, 0, 0
        self._step_skip_queue.clear()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad_sample = None

    def _refuse_raw(self, *_: Any) -> None:
        if not self._stepping:
            raise DatalensError(
                "a step of the optimizer that make_private was given, whose gradients have no noise: call step() of "
                "the one it returned"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DatalensError(
            "a private optimizer is not copied: both would spend one budget; for a checkpoint take its state_dict()"
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
