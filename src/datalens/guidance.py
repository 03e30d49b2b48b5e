"""What a plan promises, in words for its owner: from public facts and the noise alone, before a record is read."""

from datalens.datasets.schema import Schema
from datalens.plan import costs
from datalens.privacy.ledger import Budget
from datalens.settings import MomentSettings, Settings, TrainSettings

# Of the noise in class covariances by what it hides, and what is then to be seen.
SEEN = (
    (0.1, "how images of a class differ is heard well: expect varied images"),
    (0.5, "how images of a class differ is heard with noise: expect recognisable images, less varied than yours"),
    (1.5, "of how images of a class differ little is heard: expect images that look alike"),
)
NOTHING_ELSE = "how images of a class differ drowns in noise: expect about one blurred image a class"


def expect(settings: TrainSettings, schema: Schema, budget: Budget) -> list[str]:
    """What will I get for this ε? Of methods other than DataLens's the table of noise is all there is to say."""
    parts = {part["release"]: part for part in costs(settings, schema, budget)}
    if isinstance(settings, MomentSettings):
        records = schema.nominal_size / len(schema.classes)
        counts = parts["sums"]["sigma"] / settings.counted
        loudest = parts["covariances"]["noise_to_signal"]
        words = next((said for limit, said in SEEN if loudest < limit), NOTHING_ELSE)
        return [
            f"the number of records of a class is known to about ±{counts:.2g}, of about {records:.3g}",
            f"a class mean is known to {parts['sums']['noise_to_signal']:.2g} of the clip norm a coordinate; {words}",
        ]
    if isinstance(settings, Settings):
        part = 2 * settings.sigma / settings.teachers
        more = "" if part <= 4 else ": far more than there are, so expect noise"
        return [f"a vote stands out of the noise (by two σ) where {part:.0%} of the teachers agree{more}"]
    return []
