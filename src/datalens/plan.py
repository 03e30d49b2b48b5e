"""From what was asked for to what will be done, using public facts only: no record is touched here."""

import dataclasses
import math
from typing import Any

from datalens.config import MOMENT_OVERRIDES, OVERRIDES, TrainOptions
from datalens.datasets.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.peers.table import METHODS, is_peer, make_peer_plan, method_named
from datalens.plugins import compressor, mechanism, named
from datalens.presets import HIDDEN, PRESETS, preset
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps
from datalens.privacy.events import MOST_NOISE
from datalens.privacy.ledger import Budget, check_epsilon
from datalens.privacy.noise import opendp_installed
from datalens.settings import (
    COMPRESSORS,
    OF_A_COMPRESSOR,
    REAL_ROWS,
    MomentSettings,
    NoiseName,
    Settings,
    TrainSettings,
    check_seed,
)
from datalens.texture import Texture

# Methods that can protect a person: shares follow record ids, or rows are of persons. In the others, and in those of
# others as far as anybody knows, every image has a row of its own.
BY_PERSON = (*PRESETS, "dcgan", "gswgan", "pategan", "gpate")


def make_plan(options: TrainOptions, schema: Schema) -> tuple[Budget, TrainSettings]:
    """Fix the budget and every setting before training, from public facts."""
    if schema.by_person:
        _check_persons(options)
    if is_peer(options.method):
        budget = _budget(options)
        return budget, make_peer_plan(options, schema, budget)
    if options.method not in PRESETS:
        named("methods", options.method, ours=(*PRESETS, *METHODS))  # says what there is
    if starts_from_moments(options):
        budget = _budget(options)
        return budget, _moment_settings(options, schema, budget)
    return topagg_plan(options, schema)


def _check_persons(options: TrainOptions) -> None:
    """What cannot protect a person with all of their images."""
    if options.method not in BY_PERSON:
        raise DatalensError(
            f"--method {options.method} protects single images, not persons: leave --record-id out, or use --method "
            "datalens"
        )
    teachers = options.method != "dcgan" if options.method in METHODS else not starts_from_moments(options)
    if teachers and options.relation == "replace-one":
        raise DatalensError(
            "--relation replace-one gives teachers their shares by position, which the images of a person do not have "
            "in common: leave it out, or leave --record-id out"
        )


def topagg_plan(options: TrainOptions, schema: Schema) -> tuple[Budget, Settings]:
    """The same where teachers vote."""
    budget = _budget(options)
    name, values = preset(options.method, options.preset, schema, options.epsilon)
    asked = {field: value for field in OVERRIDES if (value := getattr(options, field)) is not None}
    if options.student_decay is not None:
        asked["student_decay"] = options.student_decay == "cosine"
    _adjust_to_what_was_asked(values, asked, schema)
    values |= asked
    values["hidden"] = HIDDEN[values["network"]]
    check_settings(values, schema)
    if values["compress"] in ("sign", "klevel"):
        values["k"] = values["basis_size"]  # no top-k: every coordinate votes, and is paid for
    values["plugins"] = _plugins(values)
    values["noise"] = _law(options, values)
    draft = Settings(
        method=options.method,  # type: ignore[arg-type] # one of PRESETS
        preset=name,
        seed=options.seed,
        noise_seeded=options.noise_seed is not None,
        # A replaced record keeps its position, but not its hash: hashed, it would leave one teacher and enter another,
        # and two rows would change where one is paid for.
        shares="balanced" if options.relation == "replace-one" else "hashed",
        **values | {"sigma": values.get("sigma") or 0.0, "beta": values.get("beta") or 0.0},
    )
    sigma, steps = _noise_and_steps(draft, values, asked, budget)
    beta = values.get("beta")
    if beta is None:  # by the noise that is left in a decoded coordinate
        beta = 0.75 * sigma / values["teachers"] / max(1, draft.levels - 1)
    noise = draft.noise if sigma > 0 else "gaussian"  # of width 0
    return budget, dataclasses.replace(draft, sigma=sigma, steps=steps, beta=beta, noise=noise)


def _budget(options: TrainOptions) -> Budget:
    """And what no plan can be made with."""
    default_accountant = "rdp" if options.method == "datalens-paper" else "exact"
    if is_peer(options.method):
        default_accountant = method_named(options.method).accountant
    check_epsilon(options.epsilon)
    budget = Budget(
        epsilon=options.epsilon,
        delta=options.delta,
        relation=options.relation,
        accountant=options.accountant or default_accountant,  # type: ignore[arg-type]
    )
    if options.balanced and options.relation != "replace-one":
        raise DatalensError(
            "--balanced shares are not private under add-remove (removing a record shifts all later ones): "
            "add --relation replace-one, or leave --balanced out"
        )
    check_seed(options.seed)
    if options.noise_seed is not None and options.noise_seed < 0:
        raise DatalensError(f"--noise-seed must be at least 0, not {options.noise_seed}")
    if options.chunk is not None and options.chunk < 1:
        raise DatalensError(f"--chunk must be at least 1, not {options.chunk}")
    return budget


def starts_from_moments(options: TrainOptions) -> bool:
    """Whether images are made from private moments. Whoever sets something about teachers gets teachers."""
    topagg = [name for name in OVERRIDES if getattr(options, name) is not None]
    moments = [name for name in MOMENT_OVERRIDES if getattr(options, name) is not None]
    default = options.method == "datalens" and options.preset in (None, "default")
    chosen = default and not topagg and not options.balanced if options.warm_start is None else None
    if moments and (chosen is False or options.warm_start == "off"):
        raise DatalensError(
            f"--{moments[0].replace('_', '-')} is about private moments, which this run does not start from: leave it "
            "out, or what speaks of teachers"
        )
    if chosen is not None:
        return chosen
    if options.warm_start == "moments" and not default:
        raise DatalensError("--warm-start moments belongs to --method datalens with its default preset")
    if options.warm_start == "moments" and topagg:
        raise DatalensError(
            f"--{topagg[0].replace('_', '-')} is about teachers, which --warm-start moments has none of: leave one out"
        )
    return options.warm_start == "moments"


# The papers print neither the levels of D²P-Fed nor the table of FetchSGD that they used: these are ours.
LEVELS, MOST_LEVELS = 16, 128
SKETCH_ROWS, MOST_SKETCH = 5, 2**16

# The one rule for every data set: what is public decides (docs/utility.md says how it was found).
MOST_COORDINATES, LEAST_COORDINATES = 196, 64
MOST_CELLS = 2**20  # of class covariances: each needs a draw of noise
GRID = 2**14
SMALLEST_MU = 2 * GRID**2 / MOST_NOISE  # of a release: below, its noise would be larger than any that is drawn
RELEASE_SHARES = {
    "histogram_share": 0.005,
    "sums_share": 0.06,
    "covariances_share": 0.38,
    "texture_sums_share": 0.05,
    "texture_covariances_share": 0.49,
}
# Where the noise leaves room for hardly any coordinates, nothing about texture could be heard, and class means and
# counts are most of what can be known.
HARDLY_ANY, SCARCE = 16, {"texture": 0, "sums_share": 0.6}


def _moment_settings(options: TrainOptions, schema: Schema, budget: Budget) -> MomentSettings:
    """Coordinates, as many as the noise leaves room for; all else is the same for all."""
    if options.noise == "discrete-gaussian" and options.noise_seed is not None:
        raise DatalensError("--noise-seed is for --noise gaussian: OpenDP's noise has no seed")
    if options.noise == "discrete-gaussian" and not opendp_installed():
        raise DatalensError("--noise discrete-gaussian needs OpenDP: pip install opendp, or leave --noise out")
    exact = options.noise_seed is None and opendp_installed() and math.isfinite(budget.epsilon)
    records = schema.nominal_size / len(schema.classes)
    mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
    if mu * math.sqrt(RELEASE_SHARES["covariances_share"]) < SMALLEST_MU:
        raise BudgetExceeded(
            f"no noise is large enough for {budget.describe(budget.epsilon)}: raise --epsilon, or use --accountant "
            "exact"
        )
    room, heard = min(MOST_COORDINATES, math.isqrt(MOST_CELLS // len(schema.classes))), 0.12 * mu * records
    size = int(min(room, max(LEAST_COORDINATES, heard)))
    values: dict[str, Any] = RELEASE_SHARES | {
        "coordinates": min(size, schema.dimensions),
        "texture": min(size, Texture(schema.shape).size),
        "sums_quantile": 0.9,
        "covariances_quantile": 0.5,
        "texture_steps": 12,
    }
    if heard < HARDLY_ANY:
        values |= SCARCE
    values |= {name: value for name in MOMENT_OVERRIDES if (value := getattr(options, name)) is not None}
    if values["texture"] == 0:
        values["texture_steps"] = 0
    settings = MomentSettings(
        method="datalens",
        preset=options.preset or "default",
        warm_start="moments",
        seed=options.seed,
        noise_seeded=options.noise_seed is not None,
        noise=options.noise or ("discrete-gaussian" if exact else "gaussian"),
        bins=48,
        grid=GRID,
        counted=GRID // 2,
        unit="person" if schema.by_person else "record",
        **values,
    )
    check_moments(settings, schema)
    return settings


def _adjust_to_what_was_asked(values: dict[str, Any], asked: dict[str, Any], schema: Schema) -> None:
    """Preset values that only make sense together with one that was just changed follow it."""
    if asked.get("basis", values["basis"]) == "pixel" and "basis_size" in asked:
        raise DatalensError("--basis-size belongs to --basis dct; pixels always come in full")
    if asked.get("basis", values["basis"]) == "pixel":
        values["basis_size"] = schema.dimensions
    if asked.get("network", values["network"]) == "spectral" and asked.get("basis", values["basis"]) == "pixel":
        raise DatalensError(
            "--network spectral sees cosine coefficients: use --basis dct, or --network compact or paper with pixels"
        )
    network = asked.get("network", values["network"])
    if network in ("spectral", "printed"):
        values["linear"] = 0.0
        if "linear" in asked:
            raise DatalensError("--linear belongs to --network compact or paper: leave it out")
    compress = asked.get("compress", values["compress"])
    if compress in ("sign", "klevel") and "k" in asked:
        raise DatalensError(f"--compress {compress} votes on every coordinate: leave --k out")
    for name, owner in OF_A_COMPRESSOR.items():
        if name in asked and compress != owner:
            raise DatalensError(f"--{name.replace('_', '-')} belongs to --compress {owner}: leave it out")
    if compress not in ("topk-sign", "sign", "topk"):
        values.pop("sigma", None)  # a printed σ belongs to rows of norm √(k·m)
    if compress == "klevel":
        values["levels"] = LEVELS
    if compress == "sketch":  # Algorithm 7 has no threshold
        columns = max(1, asked.get("basis_size", values["basis_size"]) // 2)
        values |= {"sketch_rows": SKETCH_ROWS, "sketch_columns": columns, "decode": "linear"}
    if "basis_size" in asked and "k" not in asked:
        values["k"] = min(values["k"], asked["basis_size"])
    if asked.keys() & {"sigma", "steps", "teachers", "compress", "levels"} and "beta" not in asked:
        values["beta"] = None  # the printed β belongs to the printed σ and N


def _plugins(values: dict[str, Any]) -> str:
    """What of a plan is code of other packages."""
    found = []
    if values["compress"] not in COMPRESSORS:
        found.append(f"the compressor {values['compress']} of {compressor(values['compress'])[1]}")
    if values.get("mechanism"):
        found.append(f"the mechanism {values['mechanism']} of {mechanism(values['mechanism'])[1]}")
    return " and ".join(found)


def _law(options: TrainOptions, values: dict[str, Any]) -> NoiseName:
    """Exact whole-number noise wherever it can be had."""
    real = values["compress"] in REAL_ROWS
    if values["compress"] not in COMPRESSORS:
        real = not compressor(values["compress"])[0].whole_numbers
    if options.noise == "discrete-gaussian":
        if real:
            raise DatalensError(
                f"--compress {values['compress']} sums real numbers, which discrete noise does not fit: leave one out"
            )
        if options.noise_seed is not None:
            raise DatalensError("--noise-seed is for --noise gaussian: OpenDP's noise has no seed")
        if not opendp_installed():
            raise DatalensError("--noise discrete-gaussian needs OpenDP: pip install opendp, or leave --noise out")
    if options.noise is not None:
        return options.noise
    exact = not real and not values.get("mechanism") and options.noise_seed is None and opendp_installed()
    return "discrete-gaussian" if exact else "gaussian"


def _noise_and_steps(
    draft: Settings, values: dict[str, Any], asked: dict[str, Any], budget: Budget
) -> tuple[float, int]:
    """σ for the given steps, or steps for the given σ. What was asked for wins over the preset."""
    sensitivity = 2 * draft.l2_bound  # DataLens, Lemma 1, over a batch
    sigma = asked.get("sigma", None if "steps" in asked else values.get("sigma"))
    steps = asked.get("steps", values["steps"] if sigma is None else None)
    goal: dict[str, Any] = {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.pricing()}
    goal |= {"law": draft.noise, "coordinates": draft.batch * draft.cells}
    if math.isinf(budget.epsilon):
        return asked.get("sigma", 0.0), asked.get("steps", values["steps"])
    if sigma == 0:
        raise BudgetExceeded("--sigma 0 releases without noise, which no finite epsilon covers: use --epsilon inf")
    if sigma is None:
        assert steps is not None
        return calibrate_sigma(sensitivity=sensitivity, steps=steps, **goal), steps
    affordable = calibrate_steps(sensitivity=sensitivity, sigma=sigma, **goal)
    if affordable == 0:
        raise BudgetExceeded(
            f"not even one step fits into {budget.describe(budget.epsilon)} at sigma {sigma:g}: "
            "raise --sigma or --epsilon, or lower --k or --batch"
        )
    if steps is not None and steps > affordable:
        raise BudgetExceeded(
            f"{steps} steps at sigma {sigma:g} do not fit into {budget.describe(budget.epsilon)}, {affordable} do: "
            "leave out --sigma or --steps to have it solved"
        )
    return sigma, steps or affordable


def check_settings(values: dict[str, Any], schema: Schema) -> None:
    """What no run can be done with; also asked when one goes on, since its config.json may have been edited."""
    for name in ("basis_size", "teachers", "k", "steps", "teacher_steps", "batch", "latent"):
        if values[name] < 1:
            raise DatalensError(f"--{name.replace('_', '-')} must be at least 1, not {values[name]}")
    for name in ("sigma", "beta", "linear"):
        value = values.get(name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DatalensError(f"--{name} must be a finite number, at least 0, not {value:g}")
    for name in ("clip", "gamma", "teacher_rate", "student_rate"):
        if not 0 < values[name] < math.inf:
            raise DatalensError(f"--{name.replace('_', '-')} must be above 0, and finite, not {values[name]:g}")
    if values["batch"] < 2:
        raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
    if values["basis_size"] > schema.dimensions:
        raise DatalensError(f"--basis-size {values['basis_size']} is more than an image's {schema.dimensions} values")
    if values["k"] > values["basis_size"]:
        raise DatalensError(f"--k {values['k']} is more than the {values['basis_size']} coordinates teachers vote in")
    if values["compress"] == "klevel" and not 2 <= values["levels"] <= MOST_LEVELS:
        raise DatalensError(f"--levels must be from 2 to {MOST_LEVELS}, not {values['levels']}")
    for name in ("sketch_rows", "sketch_columns") if values["compress"] == "sketch" else ():
        if not 1 <= values[name] <= MOST_SKETCH:
            raise DatalensError(f"--{name.replace('_', '-')} must be from 1 to {MOST_SKETCH}, not {values[name]}")
    if values["teachers"] > schema.nominal_size:
        raise DatalensError(
            f"--teachers {values['teachers']} is more than the {schema.nominal_size} records {schema.name} has: "
            "most shares would be empty; choose fewer"
        )


def check_moments(settings: MomentSettings, schema: Schema) -> None:
    """The same for a run from moments."""
    most = math.isqrt(MOST_CELLS // len(schema.classes))  # or noise would take hours to draw
    for name, there in (("coordinates", schema.dimensions), ("texture", Texture(schema.shape).size)):
        asked, least = getattr(settings, name), 0 if name == "texture" else 1
        if not least <= asked <= min(there, most):
            raise DatalensError(f"--{name} must be between {least} and {min(there, most)} for this data, not {asked}")
    if settings.texture > 0 and settings.texture_steps < 1:
        raise DatalensError(f"--texture-steps must be at least 1, not {settings.texture_steps}: or use --texture 0")
    for name in ("sums_quantile", "covariances_quantile"):
        if not 0 < getattr(settings, name) <= 1:
            raise DatalensError(f"--{name.replace('_', '-')} must lie in (0, 1], not {getattr(settings, name)}")
    for name in RELEASE_SHARES:
        if not 1e-6 < getattr(settings, name) < 1e6:
            raise DatalensError(f"--{name.replace('_', '-')} must be above 0, not {getattr(settings, name)}")
