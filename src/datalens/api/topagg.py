"""TopAgg by itself: a matrix of gradients in, the voted direction out; a ledger is charged before noise is drawn."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.errors import DatalensError
from datalens.privacy.events import NoiseLaw
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise, opendp_installed
from datalens.privacy.released import Released
from datalens.public.basis import Basis
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
    teachers: int | None = None,
    decode: Literal["threshold", "sign", "linear"] = "threshold",
    noise: NoiseLaw | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
) -> Voted:
    """DataLens, Algorithms 2 and 3, on gradients [teachers, d], or [teachers, m, d] of m queries at once.

    Each row must be a function of one teacher's own records and of what was released before; a record belongs to one
    teacher, whoever else there is. Then the direction is differentially private at the price of one Gaussian release
    of sensitivity 2·√(k·m) and noise `sigma`, which `ledger` is charged first; past its budget nothing is released. The
    order of rows does not matter: a row's stochastic signs are drawn by what is in it.

    - `beta`: the threshold as a part of the teachers; default 0.75·sigma/teachers, as in training.
    - `teachers`: how many there are, declared public. Default: how many rows there are, which declares that number
      public; so give it, or a row of zeros, where teachers without records are left out.
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
    sigma = float(sigma)
    if type(k) is not int:
        raise DatalensError(f"k must be a whole number, not {k!r}")
    if not sigma < math.inf:
        raise DatalensError(f"sigma must be a finite number, not {sigma:g}")
    if ledger.budget.epsilon < math.inf and not sigma > 0:
        raise DatalensError(f"sigma must be above 0, not {sigma:g}: without noise no finite epsilon holds")
    rows, queries, size = values.shape
    teachers = rows if teachers is None else teachers
    if rows > teachers:
        raise DatalensError(f"there are {rows} rows, and {teachers} teachers were declared: each has one")
    compress = TopKSign(k=k, clip=clip, quantise=True, seed=seed)
    step = len(ledger.events)
    numbers = by_content(values).to(values.device)
    votes = sum_bounded([compress(Gradients(teachers=numbers, values=values, step=step))])
    exact = opendp_installed() and noise_seed is None and sigma > 0
    law: NoiseLaw = noise or ("discrete-gaussian" if exact else "gaussian")
    own_seed = None if noise_seed is None else noise_seed + step
    with open_noise(law, sigma, draws=queries * size, seed=own_seed) as source:
        released = make_mechanism(sigma, source).release(votes, ledger, step=step)
    beta = 0.75 * sigma / teachers if beta is None else beta
    flat: dict[str, Any] = {"name": "pixel", "shape": (1, 1, size), "rows": None}
    direction = Decode(rule=decode, beta=beta, teachers=teachers, basis=Basis(**flat))(released).value.flatten(1)
    spent = ledger.spent()
    seeded = any(getattr(event, "noise", None) == "seeded" for event in ledger.events)
    return Voted(
        direction=direction[0] if single else direction,
        released=released,
        spent=spent,
        cost=ledger.budget.describe(spent) + ("; NOT PRIVATE: noise from a known seed" if seeded else ""),
    )


def by_content(values: Tensor) -> Tensor:
    """[n] a number for each of the rows, 63 bits of a hash of what is in it and of how many like it came before.

    Votes that are drawn by it sum to the same in any order of the rows, so a row more or less moves the sum by that
    row's votes and no others'. By its place in the matrix it would move those of all later rows, too.
    """
    seen: Counter[bytes] = Counter()
    numbers = []
    for row in values.cpu().contiguous().numpy():
        content = hashlib.blake2b(row.tobytes(), digest_size=32).digest()
        digest = hashlib.blake2b(content + seen[content].to_bytes(8, "little"), digest_size=8).digest()
        seen[content] += 1
        numbers.append(int.from_bytes(digest, "little") >> 1)
    return torch.tensor(numbers)
