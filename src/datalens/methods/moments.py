"""DataLens from private moments: every record is its own teacher, and says what it knows of its class's moments.

Eight releases through the same gate, ledger and accountant as votes. A record's row is one-hot(class) ⊗ a bounded
vector, or its outer product with itself: classes are disjoint, so all of them together are one release, with noise on
every cell. In this order, each from what was released before it:

| | release | of a record | norm of its row |
|---|---|---|---|
| 0 | histogram of norms | which bin the norm of its coordinates is in | grid |
| 1 | class sums and counts | its coordinates, clipped; and a count | grid |
| 2 | histogram of residual norms | the norm of its residual around the mean of 1 | grid |
| 3 | class covariances | residual ⊗ residual, clipped | grid² |
| 4-7 | the same of its texture | features, whitened by what images from 0-3 look like | as above |

Coordinates are low-frequency cosines; clip norms are quantiles of the histograms. Everything after a release is
post-processing (`released.moments`).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.plans.guidance import nothing_stands_out
from datalens.plans.moment_noise import mu_squared_for, sigma_for
from datalens.plans.settings import RELEASES, MomentSettings
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.privacy.released import Released
from datalens.private.moments import RecordRows
from datalens.progress import say
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released import moments as released
from datalens.run.folder import Run

LEAST_PART = 0.25  # of what was planned for a release: with less it would be noise

Ask = Callable[[str, Callable[[], BoundedSum]], Released]


def train(run: Run, records: RecordRows, settings: MomentSettings) -> released.MomentModel:
    """All releases, and the generator that follows from them."""
    s, schema = settings, run.schema
    classes, floor = len(schema.classes), smallest_class(schema)
    grid = {"grid": s.grid}
    counting = {"grid": s.grid, "counted": s.counted}
    with run.watched("private moments", len(s.releases)) as seen:

        def ask(name: str, total: Callable[[], BoundedSum]) -> Released:
            answer = _ask(run, s, name, total)
            seen.done(run.completed)
            return answer

        view = records.coordinates
        brightest = math.sqrt(schema.dimensions)  # no image is longer
        edges = norm_edges(brightest / 64, brightest, s.bins)
        norms = ask("norms", lambda: records.histogram(view, means=None, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.sums_quantile)
        sums = ask("sums", lambda: records.sums(view, clip=clip, classes=classes, **counting))
        means, counts = released.class_means(sums, clip=clip, floor=floor, **counting)
        present = present_classes(counts, sums.event.sigma / s.counted, schema, run.ledger)

        norms = ask("residual-norms", lambda: records.histogram(view, means=means, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.covariances_quantile)
        try:
            outer = ask("covariances", lambda: records.covariances(view, means=means, clip=clip, **grid))
            covariances = released.class_covariances(outer, counts, clip=clip, floor=floor, **grid)
            further = s.texture > 0
        except BudgetExceeded as error:
            say(f"warning: {error}; images differ from their class's mean as far as records do, but at random")
            covariances, further = released.round_covariances(means, clip=clip), False
        start = released.make_start(schema.shape, means, covariances)
        if not further:
            return released.without_texture(start, present, counts)

        try:
            return _with_texture(start, records, s, schema, ask, present=present, counts=counts)
        except BudgetExceeded as error:
            say(f"warning: {error}; images are made without texture")
            return released.without_texture(start, present, counts)


def _with_texture(
    start: released.Start,
    records: RecordRows,
    s: MomentSettings,
    schema: Schema,
    ask: Ask,
    *,
    present: Tensor,
    counts: Tensor,
) -> released.MomentModel:
    """Releases 4-7: the moments of texture, in coordinates in which that of the first images is even."""
    floor = smallest_class(schema)
    whitening = released.make_whitening(start, present, s.seed)
    view = partial(records.texture, centre=whitening.centre, white=whitening.matrix)
    usual = whitening.norms(0.5)
    edges = norm_edges(usual / 8, usual * 8, s.bins)
    norms = ask("texture-norms", lambda: records.histogram(view, means=None, edges=edges, grid=s.grid))
    clip = released.quantile_edge(norms, edges, s.sums_quantile)
    counting = {"grid": s.grid, "counted": s.counted}
    sums = ask("texture-sums", lambda: records.sums(view, clip=clip, classes=len(counts), **counting))
    means, _ = released.class_means(sums, clip=clip, floor=floor, **counting)

    widest = partial(records.texture, centre=whitening.centre, white=whitening.matrix[:, : s.texture])
    head = means[:, : s.texture]
    norms = ask("texture-residual-norms", lambda: records.histogram(widest, means=head, edges=edges, grid=s.grid))
    clip = released.quantile_edge(norms, edges, s.covariances_quantile)
    outer = ask("texture-covariances", lambda: records.covariances(widest, means=head, clip=clip, grid=s.grid))
    covariances = released.class_covariances(outer, counts, clip=clip, floor=floor, grid=s.grid)
    return released.make_model(
        start,
        whitening,
        present=present,
        counts=counts,
        means=means,
        covariances=covariances,
        steps=s.texture_steps,
    )


def gather(records: Records, settings: MomentSettings) -> RecordRows:
    shape = records.schema.shape
    basis = make_basis("opponent", shape, settings.coordinates)
    return RecordRows.gather(records, basis=basis, texture=Texture(shape))


def _ask(run: Run, s: MomentSettings, name: str, total: Callable[[], BoundedSum]) -> Released:
    """What was released before an interruption, or a new release; σ from what is left of the budget."""
    step = RELEASES.index(name)
    found = run.journal.find(run.ledger, step=step)
    if found is None:
        if any(getattr(event, "step", None) == step for event in run.ledger.events):
            say(
                f"warning: {name} was charged before, and an interruption lost its value: it stays charged, and what "
                "is left of the budget is divided anew among what is still to be released"
            )
        contributions = total()
        sigma = noise_for(name, s, run.ledger)
        law = s.noise if sigma > 0 else "gaussian"
        with open_noise(law, sigma, draws=contributions.cells, seed=run.noise_seed) as noise:
            found = make_mechanism(sigma, noise).release(contributions, run.ledger, step=step)
        run.journal.save(found)
    run.log(step, sigma=found.event.sigma)
    run.completed += 1
    return found


def noise_for(name: str, s: MomentSettings, ledger: Ledger) -> float:
    """σ of a release: its part of what the ledger has left, by the parts of the releases still to come.

    Mu² adds up, whatever σ is chosen on the way, so a release that an interruption lost makes the others noisier
    and overspends nothing. It depends on the ledger alone.
    """
    budget = ledger.budget
    if math.isinf(budget.epsilon):
        return 0.0
    mu_squared, planned = mu_squared_for(name, s, budget, ledger.events)
    if mu_squared < LEAST_PART * planned:
        raise BudgetExceeded(
            f"of {budget.describe(budget.epsilon)} an interruption has cost too much to release {name} in earnest"
        )
    return sigma_for(name, s, budget, mu_squared)


def norm_edges(low: float, high: float, bins: int) -> Tensor:
    """Public bins for norms, growing by a constant factor; the first begins at 0, the last has no end."""
    edges = torch.logspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
    edges[0] = 0.0
    return edges


def smallest_class(schema: Schema) -> float:
    """A count no class is taken to be below when its sums are divided: noise stays noise, it does not explode."""
    return max(released.LEAST_COUNT, schema.nominal_size / len(schema.classes) / 20)


def present_classes(counts: Tensor, noise: float, schema: Schema, ledger: Ledger) -> Tensor:
    """Classes whose noisy count stands out of the noise; the others are left out of the synthetic set, and named."""
    enough = counts > max(released.PRESENT * noise, released.LEAST_COUNT)
    if not bool(enough.any()):
        raise DatalensError(nothing_stands_out(schema, ledger))
    for label in torch.nonzero(~enough).flatten().tolist():
        say(f"warning: class {schema.classes[label]} has too few records to say anything of: it is left out")
    return torch.nonzero(enough).flatten()
