"""TopAgg by itself: a matrix of gradients in, the voted direction out; a ledger is charged before noise is drawn."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from datalens.basis import Basis
from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.errors import DatalensError
from datalens.privacy.events import NoiseLaw
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise, opendp_installed
from datalens.privacy.released import Released
from datalens.released.decode import Decode

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Voted:
    """What `topagg` found.

    - `direction`: −1, 0 or 1 a coordinate (or the mean vote, for decode="linear"), in the shape of one gradient.
    - `spent`: ε of the whole ledger after this release; `cost` says it with its δ, relation and accountant.
    """

    direction: Tensor
    released: Released = field(repr=False)
    spent: float
    cost: str


def topagg(
    gradients: "Tensor | np.ndarray",
    *,
    k: int,
    sigma: float,
    ledger: Ledger,
    clip: float = math.inf,
    beta: float | None = None,
    decode: Literal["threshold", "sign", "linear"] = "threshold",
    noise: NoiseLaw | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
) -> Voted:
    """DataLens, Algorithms 2 and 3, on gradients [teachers, d], or [teachers, m, d] of m queries at once.

    Row i must be a function of teacher i's own records and of what was released before; a record belongs to one
    teacher, whoever else there is. Then the direction is differentially private at the price of one Gaussian release
    of sensitivity 2·√(k·m) and noise `sigma`, which `ledger` is charged first; past its budget nothing is released.

    - `beta`: the threshold as a part of the teachers; default 0.75·sigma/teachers, as in training.
    - `noise`: exact discrete Gaussian where OpenDP is installed.
    - `noise_seed`: for tests; NOT PRIVATE.

    Examples:
        >>> from datalens import Budget, Ledger, topagg
        >>> budget = Budget(epsilon=2.0, delta=1e-5, relation="add-remove", accountant="exact")
        >>> ledger = Ledger.in_memory(budget)  # Ledger.create(path, budget) keeps it on disk
        >>> agreed = torch.ones(3000, 4) * torch.tensor([1.0, -1.0, 0.0, 0.0])  # 3000 teachers of one mind
        >>> vote = topagg(agreed, k=2, sigma=50.0, ledger=ledger, beta=0.5)
        >>> vote.direction.to(torch.int8).tolist()
        [1, -1, 0, 0]
        >>> vote.cost
        'ε = 0.1833 (δ = 1e-05, add-remove, exact accountant)'
    """
    for name, value, choices in (
        ("decode", decode, ("threshold", "sign", "linear")),
        ("noise", noise, (None, "discrete-gaussian", "gaussian")),
    ):  # a charge is not wasted on what is spelled wrong
        if value not in choices:
            raise DatalensError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if beta is not None and not 0 <= beta < math.inf:
        raise DatalensError(f"beta must be a number from 0, not {beta:g}")
    values = torch.as_tensor(gradients).detach().to(torch.float32)
    single = values.dim() == 2
    values = values.unsqueeze(1) if single else values
    if values.dim() != 3 or 0 in values.shape:
        raise DatalensError(f"gradients must be [teachers, d] or [teachers, queries, d], not {list(values.shape)}")
    if not sigma < math.inf:
        raise DatalensError(f"sigma must be a finite number, not {sigma:g}")
    if ledger.budget.epsilon < math.inf and not sigma > 0:
        raise DatalensError(f"sigma must be above 0, not {sigma:g}: without noise no finite epsilon holds")
    teachers, queries, size = values.shape
    compress = TopKSign(k=k, clip=clip, quantise=True, seed=seed)
    step = len(ledger.events)
    votes = sum_bounded([compress(Gradients(teachers=torch.arange(teachers), values=values, step=step))])
    exact = opendp_installed() and noise_seed is None and sigma > 0
    law: NoiseLaw = noise or ("discrete-gaussian" if exact else "gaussian")
    with open_noise(law, sigma, draws=queries * size, seed=noise_seed) as source:
        released = make_mechanism(sigma, source).release(votes, ledger, step=step)
    beta = 0.75 * sigma / teachers if beta is None else beta
    flat: dict[str, Any] = {"name": "pixel", "shape": (1, 1, size), "rows": None}
    direction = Decode(rule=decode, beta=beta, teachers=teachers, basis=Basis(**flat))(released).value.flatten(1)
    spent = ledger.spent()
    return Voted(
        direction=direction[0] if single else direction,
        released=released,
        spent=spent,
        cost=ledger.budget.describe(spent),
    )
