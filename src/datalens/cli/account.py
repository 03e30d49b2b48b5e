"""`datalens account`: compute the privacy cost of TopAgg queries."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from datalens.cli.output import show
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Account:
    """Compute the cost of TopAgg queries; or, with --epsilon, solve for one of --k, --sigma and --queries."""

    k: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of coordinates that a teacher votes on: the squared norm of its row. For --compress sketch: rows·k.
    For klevel: (levels − 1)²·d′, where d′ is the number of coordinates padded to a power of two."""
    sigma: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of the noise on every vote sum."""
    queries: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of synthetic images that teachers vote on, one by one or in batches: the cost is the same."""
    delta: float = 1e-5
    """δ of all prices."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The budget to solve for; leave out the parameter to be found."""
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """Whose ε to solve for. The prices of all are always shown."""
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    """discrete-gaussian: used by `train` if OpenDP is installed; it costs a little more if σ is small."""
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
