"""`datalens account`: the price of TopAgg queries."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from datalens.cli.output import show
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Account:
    """The cost of TopAgg queries. With --epsilon, leave one of --k, --sigma, --queries out and it is solved for."""

    k: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Coordinates each teacher votes on. (The square of a row's length: for --compress sketch give rows·k, for klevel
    (levels − 1)²·d′, with d′ the coordinates padded to a power of two.)"""
    sigma: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of the noise on every vote sum."""
    queries: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Synthetic images asked about, one by one or in batches: the cost is the same."""
    delta: float = 1e-5
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The budget to solve for."""
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """Whose ε to solve for; all are always shown."""
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    """discrete-gaussian: what `train` uses where OpenDP is installed; it costs a little more where σ is small."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.api.account import account

        result = account(
            k=self.k,
            sigma=self.sigma,
            queries=self.queries,
            delta=self.delta,
            epsilon=self.epsilon,
            accountant=self.accountant,
            noise=self.noise,
        )
        lines = [
            f"{result['queries']} queries, k = {result['k']}, σ = {result['sigma']:g} (μ = {float(result['mu']):.6g}), "
            f"{result['noise']} noise:"
        ]
        for name, accountant in (
            ("exact", "exact accountant"),
            ("rdp-improved", "rdp-improved accountant"),
            ("rdp", "the paper's rdp accountant"),
            ("pld", "pld accountant"),
        ):
            price = result[f"epsilon_{name.replace('-', '_')}"]
            lines.append(
                f"  no ε by the {accountant.removeprefix('the ')}: {result['unpriced'][name]}"
                if price is None
                else f"  ε = {float(price):.6g} (δ = {result['delta']:g}, add-remove, {accountant})"
            )
        show(result, lines, json=self.json)
        return 0
