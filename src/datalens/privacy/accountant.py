"""The price of a list of events: by the exact Gaussian curve, RDP, privacy loss distributions (PLD, PRV) or moments.

TopAgg is an adaptive composition of plain Gaussian mechanisms, without subsampling. So a whole run is exactly mu-GDP
with mu² = Σ (sensitivity/sigma)², and every price is a function of mu². Discrete Gaussian noise needs one more
argument (see `DiscreteGaussianEvent`). Subsampled events cannot be priced by the exact curve.

| event | exact | rdp, rdp-improved, moments | pld | prv |
|---|---|---|---|---|
| gaussian | mu² = (Δ/σ)² | λ·mu²/2 | Gaussian of mu | as exact |
| discrete-gaussian, σ >= 10 | mu² = Δ²/(σ² − 4), a slack of 2e-34 a coordinate | λ·Δ²/(2σ²) | as exact | as exact |
| discrete-gaussian, σ < 10 | zCDP, and nothing else in the ledger | λ·Δ²/(2σ²) | refused | as exact |
| subsampled-gaussian | refused | Mironov et al. 2019, whole orders | both directions | one direction, upper end |
| one-of-many-gaussian | refused | `one_of_many_rdp`, whole orders | `one_of_many_delta`, dot by dot | refused |
| discrete-laplace | randomised responses of one scale, alone | the same, with others | as exact | refused |

Events of several kinds in one ledger are composed. With independent noise the privacy losses add up, whatever a later
release took from earlier ones (adaptive composition): RDP adds curves, and `pld` and `prv` convolve tables. All
Gaussian events together are one Gaussian of mu² = Σ mu², so they are one more table. `exact` has no curve for a mix and
refuses it.

| together in a ledger | exact | rdp, rdp-improved, moments | pld | prv |
|---|---|---|---|---|
| gaussian (discrete ones with σ >= 10), subsampled | refused | curves added | both directions | one direction |
| one-of-many with either | refused | curves added | both directions | refused |
| discrete-gaussian, σ < 10, with any other | refused | curves added | refused | refused |
| discrete-laplace with any other | refused | curves added | refused | refused |

The steps of a mix, with all their rates and sigmas, must be fixed beforehand: stopping at the budget is a proven filter
only for Gaussian noise alone, and for zCDP alone. docs/privacy.md has the argument.

A subsampled event of rate 1 is a Gaussian event. `moments` is Abadi et al. 2016: RDP at the orders 2 … 33 only. `prv`
is Opacus's accountant, whose tables are for a record that is removed; `pld` covers both directions and is the check on
it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from datalens.errors import DatalensError, UnpriceableEvent
from datalens.privacy import tables
from datalens.privacy.curves import (
    MOMENT_ORDERS,
    SAMPLED_ORDERS,
    bisect,
    convert_as_printed,
    convert_improved,
    exact_epsilon,
    improved_epsilon,
    moments_epsilon,
    one_of_many_rdp,
    rdp_epsilon,
    subsampled_rdp,
    total,
    zcdp_epsilon,
)
from datalens.privacy.events import (
    LEAST_SMOOTH,
    Charge,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    OneOfManyEvent,
    SubsampledGaussianEvent,
)
from datalens.privacy.responses import pld_responses, response_epsilon, response_rdp

AccountantName = Literal["exact", "rdp", "rdp-improved", "pld", "prv", "moments"]
ACCOUNTANTS: tuple[AccountantName, ...] = get_args(AccountantName)
SAMPLED_ONLY: tuple[AccountantName, ...] = ("prv", "moments")  # other events have better accountants
_Rdp = Callable[[float, float, float], float]  # (mu, rate, order)
_CURVES: dict[AccountantName, Callable[[float, float], float]] = {
    "exact": exact_epsilon,
    "rdp": rdp_epsilon,
    "rdp-improved": improved_epsilon,
    "pld": tables.pld_epsilon,
    "prv": exact_epsilon,
    "moments": moments_epsilon,
}


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Computes the price of events, and refuses events that it does not understand.

    Since mu² only adds up, "stop before Σ mu² passes the budget's mu²" is a valid privacy filter: sigma, k and the
    batch size may be chosen adaptively during the run (Rogers et al. 2016; for Gaussian mechanisms Koskela et al.
    2022). The same holds for ρ of zCDP. A filter may not change its rule during a run, so `exact` prices coarse
    discrete noise (σ < 10) only by itself. The rates of subsampled events must be fixed beforehand.
    """

    name: AccountantName

    def mu_squared(self, events: Iterable[Event]) -> float:
        """Return Σ mu² of Gaussian events. A discrete one counts as the Gaussian that it is post-processing of.

        Args:
            events: Gaussian events.

        Raises:
            UnpriceableEvent: an event is not Gaussian.
        """
        return total([event.mu * event.mu for event in map(self._gaussian, events)])  # overflows to inf

    def epsilon(self, events: Iterable[Event], delta: float) -> float:
        """Return the ε of all events together at this δ. `price` has the details.

        Args:
            events: The events.
            delta: δ at which ε is computed.
        """
        return self.price([(event, 1) for event in events], delta)

    def epsilon_at(self, mu_squared: float, delta: float) -> float:
        """Return the ε of Gaussian mechanisms whose mu² add up to `mu_squared`.

        Args:
            mu_squared: Sum of the squared mu of all releases.
            delta: δ at which ε is computed.
        """
        return _CURVES[self.name](mu_squared, delta)

    def price(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """Return the ε of all events together.

        Args:
            counted: (event, multiplicity).
            delta: δ at which ε is computed.

        Raises:
            UnpriceableEvent: this accountant does not price one of the events, or not in this mix.
            DatalensError: a library that it needs is not installed.
        """
        counted = [_spread_out(event, count) for event, count in counted]
        if self.name in ("exact", "pld") and any(isinstance(event, LaplaceEvent) for event, _ in counted):
            return self._responses(counted, delta)
        match self.name:
            case "prv":
                return self._prv(counted, delta)
            case "exact":
                return self._exact(counted, delta)
            case "pld":
                return self._pld(counted, delta)
            case _:
                return self._rdp(counted, delta)

    def tolerance(self, events: Iterable[Event], delta: float) -> float:
        """Return the largest difference between the prices of the same events by two versions of the libraries.

        | accountant | reason |
        |---|---|
        | prv, where events are sampled | an answer is an upper end, at most twice the requested error above ε. Errors |
        | | that grow past some 20 million steps are not allowed for, so that no ledger can make room for itself |
        | pld | within 5e-4·ε + 1e-5 of the exact curve, on random ledgers (docs/privacy.md) |
        | all others | closed forms in float64: 1e-9·ε |

        Args:
            events: The events.
            delta: δ at which ε is computed.
        """
        return self.tolerance_of([(event, 1) for event in events], delta)

    def tolerance_of(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """Return the `tolerance` for (event, multiplicity).

        Args:
            counted: (event, multiplicity).
            delta: δ at which ε is computed.
        """
        epsilon, counted = self.price(counted, delta), [_spread_out(event, count) for event, count in counted]
        if math.isinf(epsilon):
            return 0.0  # infinity is the same in every version
        if self.name == "pld":
            return 5e-4 * epsilon + 1e-5
        steps = sum(count for event, count in counted if isinstance(event, SubsampledGaussianEvent))
        if self.name == "prv" and steps:
            steps += any(isinstance(event, GaussianEvent) and event.mu > 0 for event, _ in counted)  # merged into one
            error = tables.prv_error(steps, delta, Accountant(name="rdp-improved")._rdp(counted, delta))
            return 2 * min(error, tables.PRV_COARSEST)
        return 1e-9 * epsilon + 1e-12

    def _exact(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        events = [(self._gaussian(event), count) for event, count in counted]
        coarse = [isinstance(event, DiscreteGaussianEvent) and not event.smooth for event, _ in events]
        if any(coarse):
            if not all(coarse):
                raise UnpriceableEvent(
                    f"the exact accountant does not price discrete noise below sigma {LEAST_SMOOTH:g} together with "
                    "other noise: use --accountant rdp-improved"
                )
            return zcdp_epsilon(total([event.rho * count for event, count in events]), delta)
        slack = total([event.slack * count for event, count in events])
        mu_squared = total([event.mu * event.mu * count for event, count in events])
        # The density is within e^±slack of the Gaussian's post-processing: (ε, δ) becomes (ε + 2·slack, e^slack·δ).
        return self.epsilon_at(mu_squared, delta * math.exp(-slack)) + 2 * slack

    def _responses(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """Price counts of ballots with Laplace noise of one scale, on a fixed schedule, as randomised responses."""
        laplace = [(event, count) for event, count in counted if isinstance(event, LaplaceEvent)]
        losses = {event.loss for event, _ in laplace if event.moved}
        if len(laplace) != len(counted) or len(losses) > 1:
            raise UnpriceableEvent(
                f"the {self.name} accountant prices Laplace noise of one scale and no other noise beside it: "
                "use --accountant rdp-improved"
            )
        times = sum(event.moved * count for event, count in laplace)
        price = response_epsilon if self.name == "exact" else pld_responses
        return price(max(losses, default=0.0), times, delta)

    def _rdp(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        known = [(self._known(event), count) for event, count in counted]
        rho = total([event.rho * count for event, count in known if isinstance(event, GaussianEvent)])
        sampled: Counter[tuple[_Rdp, float, float]] = Counter()
        for event, count in known:
            if isinstance(event, SubsampledGaussianEvent):
                sampled[subsampled_rdp, event.mu, event.rate] += count
            if isinstance(event, OneOfManyEvent):
                sampled[one_of_many_rdp, event.mu, event.rate] += count * event.repeats
            if isinstance(event, LaplaceEvent):
                sampled[_laplace_rdp, event.loss, 1.0] += count * event.moved
        if not any(mu > 0 for _, mu, _ in sampled):
            return self.epsilon_at(2 * rho, delta)
        orders = MOMENT_ORDERS if self.name == "moments" else SAMPLED_ORDERS
        curve = [
            total([order * rho, *(rdp(mu, rate, order) * n for (rdp, mu, rate), n in sampled.items())])
            for order in orders
        ]
        convert = convert_improved if self.name == "rdp-improved" else convert_as_printed
        return convert(curve, orders, delta)

    def _prv(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """Price sampled steps together with the one Gaussian that all Gaussian events are post-processing of.

        Opacus takes that Gaussian as a step at rate 1: its loss, N(mu²/2, mu²), is the same in both directions.
        """
        known = [(self._known(event), count) for event, count in counted]
        sampled: Counter[tuple[float, float]] = Counter()
        for event, count in known:
            if isinstance(event, SubsampledGaussianEvent):
                sampled[event.mu, event.rate] += count
        if not sampled:
            return self._exact(counted, delta)
        others = [(event, count) for event, count in known if not isinstance(event, SubsampledGaussianEvent)]
        plain = [(self._gaussian(event), count) for event, count in others]
        if any(isinstance(event, DiscreteGaussianEvent) and not event.smooth for event, _ in plain):
            raise UnpriceableEvent(
                f"the prv accountant does not price discrete noise below sigma {LEAST_SMOOTH:g} together with sampled "
                "steps: use --accountant rdp-improved"
            )
        mu = math.sqrt(total([event.mu * event.mu * count for event, count in plain]))
        slack = total([event.slack * count for event, count in plain])  # as in `_exact`
        parts = tuple(sorted((mu, rate, n) for (mu, rate), n in sampled.items() if mu > 0 and n > 0))
        if mu > 0:
            parts = (*parts, (max(mu, tables.PRV_QUIETEST), 1.0, 1))
        if not parts:
            return 0.0
        rough = Accountant(name="rdp-improved")._rdp(counted, delta)  # `_spread_out` was applied in `price`
        return tables.prv_composed(parts, delta * math.exp(-slack), rough) + 2 * slack

    def _pld(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        parts: Counter[tuple[float, float]] = Counter()
        chosen: Counter[tuple[float, float]] = Counter()
        slack = 0.0
        for event, count in counted:
            known = self._known(event)
            if isinstance(known, SubsampledGaussianEvent):
                parts[known.mu, known.rate] += count
                continue
            if isinstance(known, OneOfManyEvent):
                chosen[known.mu, known.rate] += count * known.repeats
                continue
            if isinstance(known, DiscreteGaussianEvent) and not known.smooth:
                raise UnpriceableEvent(
                    f"the pld accountant does not price discrete noise below sigma {LEAST_SMOOTH:g}: "
                    "use --accountant rdp-improved"
                )
            assert isinstance(known, GaussianEvent)  # `price` sends Laplace events elsewhere
            slack += known.slack * count
            parts[known.mu, 1.0] += count
        listed = tuple(sorted((mu, rate, count) for (mu, rate), count in parts.items()))
        picked = tuple(sorted((mu, rate, count) for (mu, rate), count in chosen.items()))
        return tables.pld_composed(listed, delta * math.exp(-slack), picked) + 2 * slack

    def _known(self, event: Event) -> Charge:
        if not isinstance(event, GaussianEvent | SubsampledGaussianEvent | OneOfManyEvent | LaplaceEvent):
            raise UnpriceableEvent(
                f"the {self.name} accountant prices Gaussian events only, not {event.kind!r}; "
                "a newer datalens may know it"
            )
        return event

    def _gaussian(self, event: Event) -> GaussianEvent:
        known = self._known(event)
        if not isinstance(known, GaussianEvent):
            raise UnpriceableEvent(
                f"the {self.name} accountant prices plain Gaussian events only, not {known.kind!r}: "
                "use --accountant rdp-improved or pld"
            )
        return known

    def mu_budget(self, epsilon: float, delta: float) -> float:
        """Return the largest mu of Gaussian releases that costs at most ε at this δ.

        Args:
            epsilon: The budget; may be infinite.
            delta: δ at which ε is computed.
        """
        if math.isinf(epsilon):
            return math.inf
        if self.name == "pld":  # slow to evaluate, and never more than a little above the exact curve
            mu, less = Accountant(name="exact").mu_budget(epsilon, delta), 1e-7
            while self.epsilon_at(mu * mu, delta) > epsilon:
                mu, less = mu * max(1 - less, 0.5), 2 * less
            return mu
        return bisect(lambda mu: self.epsilon_at(mu * mu, delta) > epsilon)[0]


def side_by_side(counted: Sequence[tuple[Event, int]], delta: float) -> dict[AccountantName, float | str]:
    """Return the ε of the same events by every accountant, or its error message where it does not price them.

    Args:
        counted: (event, multiplicity).
        delta: δ at which ε is computed.
    """
    prices: dict[AccountantName, float | str] = {}
    sampled = any(isinstance(event, SubsampledGaussianEvent) for event, _ in counted)
    for name in ACCOUNTANTS if sampled else (name for name in ACCOUNTANTS if name not in SAMPLED_ONLY):
        try:
            prices[name] = Accountant(name=name).price(counted, delta)
        except DatalensError as error:
            prices[name] = str(error)
    return prices


def _laplace_rdp(loss: float, rate: float, order: float) -> float:
    return response_rdp(loss, order)


def _spread_out(event: Event, count: int) -> tuple[Event, int]:
    """Count the repeats of a block one by one, and turn sampling at rate 1 into a plain Gaussian event."""
    if not isinstance(event, SubsampledGaussianEvent):
        return event, count
    if event.rate < 1:
        return event, count * event.repeats
    plain = GaussianEvent(
        row_unit=event.row_unit,
        l2_bound=event.l2_bound,
        diameter=2 * event.l2_bound,
        relation=event.relation,
        sigma=event.sigma,
        queries=event.queries,
        step=event.step,
        noise=event.noise,
    )
    return plain, count * event.repeats
