"""DP-SGD with TopAgg compression (DataLens, Appendix A, Algorithm 4), on Opacus.

model, optimizer, loader = make_private(model, optimizer, loader, epsilon=1, delta=1e-5, epochs=20, clip=1.0, topk=0.8)

Opacus computes per-sample gradients. They are clipped and compressed by `bounded.norm_topk`, and their sum passes the
gate `privacy.dpsgd`, which charges a ledger before it draws noise. With topk = 1 it is plain DP-SGD (GM-DP).

Differs from the paper: noise is added to every coordinate, kept or not (Algorithm 4 says the same; some published code
does not), and ε is Opacus's PRV price of the steps.
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
    """The settings of a run, derived from public facts."""

    compress: NormTopK
    schedule: Schedule
    batch_size: int  # expected size


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
    """Return the plan of a run: σ for the given epochs, or as many steps as fit for the given σ.

    Args:
        budget: Must not be exceeded.
        nominal_size: Number of records, declared public.
        batch_size: Expected size of a batch.
        epochs: Passes over the data. None: as many as fit.
        clip: Bound on the norm of a record's gradient.
        topk: Fraction that compression keeps.
        selector: Which coordinates are kept.
        sigma: Noise multiplier. None: the smallest for which the epochs fit.

    Raises:
        BudgetExceeded: the steps do not fit, or not even one does.
        DatalensError: an argument is out of range, or neither epochs nor sigma is given.
    """
    compress = NormTopK(clip=clip, topk=topk, selector=selector)
    if budget.relation != "add-remove":
        raise DatalensError("DP-SGD samples records, which is priced for add-remove only: leave --relation out")
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
            raise DatalensError("give --epochs, to calibrate the noise, or --sigma, to calibrate the steps")
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
            "--sigma or --epochs, so that it is calibrated"
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
    """Return private versions of a model, an optimizer and a loader, for training by DP-SGD.

    Train with them as before, with one optimizer.step() per batch of the loader. Guaranteed is (epsilon, delta)-DP of
    the model's parameters after every step, for one record present or absent (add-remove).

    You must make sure that records come from the loader alone, that no code between it and the model mixes them, and
    that the loss of a batch is the plain mean (or, with loss_reduction="sum", the sum) of its records' own losses. A
    mean with another divisor than the number of records, such as cross_entropy's with `weight=` or `ignore_index`, is
    wrong: one record would rescale all others. Use reduction="sum" there, or weight each record's loss yourself and
    take `.mean()`. Not covered by the guarantee: what a layer keeps in plain Python attributes; losses and accuracies
    that you look at.

    A step is refused if its rows of gradients are not exactly the records of one batch, if there were two forward
    passes, or if a buffer or parameter of the model changed other than by a step (state_dict() refuses that too).

    Args:
        model: The model, without batch norm. It may be an opacus.GradSampleModule.
        optimizer: An optimizer of its parameters.
        loader: A loader over a data set with a length.
        epsilon: Budget. `inf` trains without noise and without a guarantee.
        delta: Budget.
        epochs: The noise is calibrated to this many. With `sigma` and no epochs, the loader has as many steps as fit.
        clip: Bound on the norm of a record's gradient (docs/dpsgd.md).
        topk: Fraction that compression keeps; 1 for plain DP-SGD.
        selector: Which coordinates compression keeps: "norm", "dim" or "none".
        sigma: Noise multiplier. None: the smallest for which the epochs fit.
        nominal_size: About how many records there are, declared public. The default is their true number, which
            declares that number public.
        ledger: A file to charge to. An existing one is continued, and its steps stay charged. None: kept in memory.
        accountant: Prices the steps.
        loss_reduction: "mean" or "sum", as in your loss.
        noise_seed: Seeds noise and samples, for tests. NOT PRIVATE.

    Returns:
        The model with Opacus's hooks, the private optimizer, and a loader whose batches are Poisson samples.

    Raises:
        BudgetExceeded: the steps do not fit into the budget.
        DatalensError: an argument cannot be used, or a trial on a few records shows that the model or the collate
            function mixes records.
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
    batch, remark = try_collate(loader)
    if remark:
        say(f"warning: {remark} (docs/dpsgd.md)")
    with contextlib.suppress(CannotTell):  # there is another trial when the model is first called
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
    """Opacus's optimizer with other clipping and noise: gradients are bounded and summed here, and noised by the gate.

    Made by `make_private`.
    """

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
        self._sum: BoundedSum | None = None  # sum over the parts of the batch so far
        self._rows = 0  # rows in it
        self.whose: torch.Tensor | None = None  # person of each image of a batch, if persons are the privacy unit
        self.taken = 0
        self._passes = 0  # forward passes since the last step
        self._model: GradSampleModule | None = None
        self._state: StateWatch | None = None
        self._stepping = self._noisy = self._tried = False
        optimizer.register_step_pre_hook(self._refuse_raw)
        if batches is not None:
            batches.on_new_pass = self._drop

    def epsilon_spent(self) -> str:
        """Return the ε charged so far as text, with its δ, relation and accountant."""
        ledger = self.gate.ledger
        private = self.gate.noise.origin == "operating-system" and math.isfinite(ledger.budget.epsilon)
        said = "" if private else "; NOT PRIVATE: the noise is seeded, or there is none"
        return ledger.budget.describe(ledger.spent()) + said

    def watch(self, sampled: GradSampleModule) -> None:
        """Count the model's forward passes, test at the first one whether it mixes records, and watch its state.

        The state is watched because no noise is added to what a layer writes into parameters and buffers by itself.
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
        sampled.before_copy = lambda one: state.check() if one is sampled else None  # copies are not checked

    def _try_once(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Do the trial with the arguments of a real call, which `make_private` could only guess.

        Batches of fewer than two records cannot be used for it.
        """
        rows = [len(x) for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor) and x.dim()]
        if self._tried or (rows and rows[0] < 2):
            return
        self._tried = True
        try:
            try_model(model, arguments, named)
        except CannotTell as reason:
            say(
                f"warning: it could not be tried whether the model mixes records ({reason}): make sure that it does "
                "not (docs/dpsgd.md)"
            )

    def clip_and_accumulate(self) -> None:
        """Add the bounded rows of this part of a batch to the sum.

        Raises:
            DatalensError: gradients are missing, are of several passes, or have different numbers of rows.
        """
        for p in self.params:
            if isinstance(getattr(p, "grad_sample", None), list):
                raise DatalensError(
                    "there were two backward passes without a step: call optimizer.step() and optimizer.zero_grad() "
                    "for every batch; for batches that do not fit into memory use opacus's BatchMemoryManager"
                )
        if self._passes > 1:
            raise DatalensError(
                f"{self._passes} forward passes in train() mode since the last step: make one for each batch; for "
                "other images use eval() mode or torch.no_grad()"
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
        """Release the sum through the gate, and set the noisy gradients.

        Raises:
            BudgetExceeded: the step does not fit into the budget.
            DatalensError: the rows are not those of one batch, or the model's state has changed by itself.
        """
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
        # In one transfer: each transfer to a GPU takes time.
        noisy = torch.from_numpy(released.value[0]).to(device=self.params[0].device, dtype=widest)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # such as of a parameter frozen since the backward pass: its gradient has no noise
        for p, part in zip(self.params, noisy.split([p.numel() for p in self.params]), strict=True):
            p.grad = part.view_as(p).to(p)

    def scale_grad(self) -> None:
        """Divide gradients by the expected batch size, if the loss is a mean."""
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad /= self.expected_batch_size

    def pre_step(self, closure: Any = None) -> bool:
        """Clip, add noise and scale, without Opacus's own check of per-sample gradients, which would copy them."""
        if not self.params:
            raise DatalensError("the optimizer has no trainable parameters: there is nothing to train")
        try:
            self.clip_and_accumulate()
            if self._check_skip_next_step():
                return False
            self.add_noise()
        except BaseException:
            self._drop()  # otherwise what was refused would be in the next sum
            if self._batches is not None:
                self._batches.forget()
            raise
        self.scale_grad()
        return True

    def step(self, closure: Any = None) -> Any:
        """Make one private step. See `pre_step`."""
        self._stepping = True
        try:
            return super().step(closure)
        finally:
            if self._noisy and self._state is not None:
                self._state.remember(self.params)  # only these: everything else must be as before the first step
            self._stepping = self._noisy = False

    def _drop(self) -> None:
        """Discard everything that was computed from records: gradients, and sums over parts of a batch."""
        self._sum, self._rows, self._passes = None, 0, 0
        self._step_skip_queue.clear()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad_sample = None

    def _refuse_raw(self, *_: Any) -> None:
        if not self._stepping:
            raise DatalensError(
                "a step of the optimizer that was given to make_private, whose gradients have no noise: call step() "
                "of the optimizer that it returned"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DatalensError(
            "a private optimizer cannot be copied, since both would spend one budget: for a checkpoint save its "
            "state_dict()"
        )


def _open_ledger(path: Path | None, budget: Budget) -> Ledger:
    if path is None:
        return Ledger.in_memory(budget)
    if not path.exists():
        return Ledger.create(path, budget)
    ledger = Ledger.open(path)
    if ledger.budget != budget:
        ledger.close()
        raise DatalensError(f"{path} was begun with another budget: choose another file")
    return ledger
