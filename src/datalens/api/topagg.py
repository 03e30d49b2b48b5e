"""TopAgg as a function, from gradients to the voted direction. A ledger is charged before noise is drawn."""

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
    """The result of `topagg`.

    Attributes:
        direction: −1, 0 or 1 for each coordinate (for decode="linear", the mean vote), in the shape of one gradient.
        released: the noisy sum of votes, with its event.
        spent: ε of the whole ledger after this release.
        cost: the same as text, with δ, relation and accountant.
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
    """Run DataLens, Algorithms 2 and 3, on gradients of teachers.

    Each row must be a function of one teacher's own records and of earlier releases only, and which teacher a record
    belongs to must not depend on other records. Then the direction is differentially private at the price of one
    Gaussian release of sensitivity 2·√(k·m) with noise `sigma`. `ledger` is charged first, and nothing is released
    beyond its budget. The order of the rows does not matter: the random signs of a row depend on its content.

    Args:
        gradients: [teachers, d], or [teachers, m, d] for m queries at once.
        k: number of coordinates that a teacher votes on.
        sigma: standard deviation of the noise.
        ledger: is charged for the release.
        clip: clipping constant of Algorithm 2.
        beta: the threshold as a part of the teachers. Default: 0.75·sigma/teachers, as in training.
        teachers: number of teachers, declared public. Default: the number of rows, which declares that number public;
            so give it, or rows of zeros, if teachers without records are left out.
        decode: how the noisy sum becomes a direction: Algorithm 3 (threshold), its sign, or the mean vote (linear).
        noise: kind of noise. Default: exact discrete Gaussian if OpenDP is installed.
        seed: of the random signs.
        noise_seed: seeds the noise, for tests; NOT PRIVATE.

    Returns:
        The direction, and what it cost.

    Raises:
        DatalensError: an argument is invalid.
        BudgetExceeded: the ledger's budget does not cover the release; nothing was released.

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
    ):  # before anything is charged
        if value not in choices:
            raise DatalensError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if beta is not None and not 0 <= beta <= 1:
        raise DatalensError(f"beta must be from 0 to 1 (above 1 not even unanimous votes pass), not {beta:g}")
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
        raise DatalensError(f"there are {rows} rows for {teachers} teachers: each teacher has one")
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
    """Return a number [n] for each row: 63 bits of a hash of its content, and of how many equal rows come before it.

    Votes drawn with these numbers have the same sum in any order of the rows. So adding or removing a row changes the
    sum by the votes of that row only. If they were drawn with the positions of the rows, it would change the votes of
    all later rows, too.
    """
    seen: Counter[bytes] = Counter()
    numbers = []
    for row in values.cpu().contiguous().numpy():
        content = hashlib.blake2b(row.tobytes(), digest_size=32).digest()
        digest = hashlib.blake2b(content + seen[content].to_bytes(8, "little"), digest_size=8).digest()
        seen[content] += 1
        numbers.append(int.from_bytes(digest, "little") >> 1)
    return torch.tensor(numbers)
