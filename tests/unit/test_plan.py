"""From options to settings: the budget is fixed first, and what is planned is what the ledger will accept."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.data.named import sources
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.moments import RELEASE_SHARES, WORDS, MomentSettings, check_moments
from datalens.methods.topagg import TopAggSettings, preset
from datalens.options import TrainOptions
from datalens.plans.guidance import budget_warnings, warnings
from datalens.plans.registry import make_plan, read_settings
from datalens.privacy.events import LEAST_SMOOTH, DiscreteGaussianEvent, GaussianEvent
from datalens.privacy.ledger import Budget, Ledger
from datalens.private.networks import compact_network
from datalens.public.basis import make_basis

MNIST = Schema(name="mnist", height=28, width=28, channels=1, classes=tuple(map(str, range(10))), nominal_size=60_000)
OWN = Schema(name="own", height=8, width=8, channels=3, classes=("a", "b"), nominal_size=900)


def plan(schema: Schema = MNIST, **options: Any) -> tuple[Budget, TopAggSettings]:
    alone = {} if options.get("method", "datalens") != "datalens" else {"warm_start": "off"}
    budget, made = make_plan(TrainOptions(out=Path("unused"), **alone | options), schema)
    assert isinstance(made, TopAggSettings)
    return budget, made


def accepted(budget: Budget, made: TopAggSettings, *, extra: int = 1) -> int:
    """How many of the planned steps (and `extra` more) a ledger of this budget takes."""
    ledger = Ledger.in_memory(budget)
    bound = math.sqrt(made.k * made.batch)
    facts: dict[str, Any] = {
        "row_unit": "teacher",
        "l2_bound": bound,
        "diameter": 2 * bound,
        "relation": budget.relation,
        "sigma": made.sigma,
        "queries": made.batch,
        "step": 0,
        "noise": "operating-system",
    }
    event = (
        DiscreteGaussianEvent(coordinates=made.batch * made.basis_size, **facts)
        if made.noise == "discrete-gaussian"
        else GaussianEvent(**facts)
    )
    try:
        for _ in range(made.steps + extra):
            ledger.charge(event)
    except BudgetExceeded:
        pass
    return len(ledger.events)


# --- the plan and the ledger agree ----------------------------------------------------------------------------------


@given(
    method=st.sampled_from(["datalens", "datalens-paper"]),
    epsilon=st.floats(0.3, 20),
    steps=st.integers(1, 40),
    k=st.integers(1, 30),
    batch=st.integers(2, 30),
    relation=st.sampled_from(["add-remove", "replace-one"]),
)
@settings(max_examples=40, deadline=None)
def test_planned_steps_fit_and_not_one_more(
    method: Any, epsilon: float, steps: int, k: int, batch: int, relation: Any
) -> None:
    budget, made = plan(method=method, epsilon=epsilon, steps=steps, k=k, batch=batch, relation=relation)
    assert (made.steps, made.k, made.batch, budget.epsilon) == (steps, k, batch, epsilon)
    # Just below the least sigma that has the smooth price, noise is raised to it: there more steps may fit.
    raised = made.noise == "discrete-gaussian" and made.sigma == LEAST_SMOOTH
    assert accepted(budget, made) == steps or (raised and accepted(budget, made) > steps)


def test_a_plan_that_forgets_the_batch_is_caught() -> None:
    """Broken twin: noise calibrated to 2√k where a row is √(k·batch) long buys no such number of steps."""
    budget, made = plan(steps=20, k=30, batch=15)
    too_quiet = dataclasses.replace(made, sigma=made.sigma / math.sqrt(15))
    assert accepted(budget, made) == 20
    assert accepted(budget, too_quiet) < 20


def test_the_papers_rows() -> None:
    """σ is given, so as many batches of 15 are taken as the paper's accountant allows: 86 at ε = 1."""
    budget, made = plan(method="datalens-paper", epsilon=1.0)
    assert (made.teachers, made.k, made.sigma, made.beta, made.steps) == (4000, 200, 5000.0, 0.7, 86)
    assert budget.accountant == "rdp"
    assert accepted(budget, made) == 86
    assert made.basis_size == 784
    ten, made_ten = plan(method="datalens-paper", epsilon=10.0)
    assert (made_ten.k, made_ten.sigma) == (350, 900.0)
    assert accepted(ten, made_ten) == made_ten.steps
    exact, made_exact = plan(method="datalens-paper", epsilon=1.0, accountant="exact")
    assert exact.accountant == "exact"
    assert made_exact.steps == 2245 // 15


@pytest.mark.parametrize("which", ["paper", "code"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "celeba-gender", "celeba-hair", "places365"])
def test_without_noise_everything_else_is_as_at_epsilon_10(name: str, which: str) -> None:
    """Else "ε = ∞" would show what other settings cost, not what noise costs."""
    schema = sources.schema(name)
    _, ten = plan(schema, method="datalens-paper", preset=which, epsilon=10.0)
    _, none = plan(schema, method="datalens-paper", preset=which, epsilon=math.inf)
    assert none.sigma == 0 and ten.sigma > 0
    assert none == dataclasses.replace(ten, sigma=0.0, noise="gaussian")


@pytest.mark.parametrize(
    ("name", "epsilon", "expected"),
    [  # N, k, σ, β as the paper and its code have them; the batch is the share
        ("celeba-gender", 1.0, (6000, 700, 9000.0, 0.85, 27)),
        ("celeba-gender", 10.0, (6000, 500, 700.0, 0.12, 27)),
        ("celeba-hair", 1.0, (8000, 700, 9000.0, 0.9, 12)),
        ("celeba-hair", 10.0, (4000, 500, 700.0, 0.25, 23)),
        ("places365", 1.0, (8000, 700, 9000.0, 0.9, 15)),
        ("places365", 10.0, (4000, 700, 700.0, 0.25, 30)),
    ],
)
@pytest.mark.parametrize("which", ["paper", "code"])
def test_the_rows_for_colour(which: str, name: str, epsilon: float, expected: tuple[float, ...]) -> None:
    schema = sources.schema(name)
    budget, made = plan(schema, method="datalens-paper", preset=which, epsilon=epsilon)
    assert (made.teachers, made.k, made.sigma, made.beta, made.batch) == expected
    assert made.batch == round(schema.nominal_size / made.teachers)
    assert made.network == "compact" and made.latent == 100 and made.teacher_steps_first == 30
    assert made.basis == "pixel" and made.basis_size == 64 * 64 * 3
    assert made.latent_law == ("normal" if which == "paper" else "uniform")
    assert made.preset.startswith(f"{which} ({name}, ε={epsilon:g}")
    assert ("as for celeba-hair" in made.preset) == (name == "places365")
    assert accepted(budget, made) == made.steps


@pytest.mark.parametrize("name", ["celeba-gender", "celeba-hair", "places365", "scenes"])
def test_teachers_of_colour_images_are_small(name: str) -> None:
    """DC-GAN's discriminator for 64 × 64 has millions of parameters: thousands of those fit no machine."""
    schema = sources.schema(name)
    network = compact_network(make_basis("pixel", schema.shape, None), len(schema.classes))
    one = network.parameters(torch.tensor([0]), seed=0)
    assert sum(value.numel() for value in one.values()) <= 200_000
    asked = plan(schema, method="datalens-paper", network="paper")[1]
    assert asked.network == "paper"  # who asks for it gets it
    assert plan(MNIST, method="datalens-paper")[1].network == "paper"
    assert plan(sources.schema("cifar10"), method="datalens-paper")[1].network == "paper"


def test_cosines_of_colour_images_are_shared_by_the_channels() -> None:
    made = plan(sources.schema("celeba-gender"))[1]
    rows = make_basis(made.basis, (3, 64, 64), made.basis_size).rows
    assert rows is not None
    energy = rows.view(-1, 3, 64 * 64).square().sum(dim=2)  # [coordinate, channel]: each lies in one channel
    assert energy.round().sum(dim=0).tolist() == [22, 21, 21]
    constant = rows.view(-1, 3, 64, 64)[:3]  # the lowest of each: its mean
    assert torch.allclose(constant.flatten(2).std(dim=2), torch.zeros(3, 3), atol=1e-7)


@pytest.mark.parametrize(("epsilon", "rate"), [(0.3, 5e-4), (1.0, 5e-4), (3.1, 5e-4), (3.2, 1e-3), (math.inf, 1e-3)])
def test_teachers_may_learn_faster_with_a_larger_budget(epsilon: float, rate: float) -> None:
    made = plan(epsilon=epsilon)[1]
    assert (made.teacher_rate, made.teacher_weight_decay) == (rate, 0.03 if rate == 5e-4 else 0.0)
    assert plan(epsilon=epsilon, teacher_rate=0.02)[1].teacher_rate == 0.02


def test_the_default_is_exact_and_add_remove() -> None:
    budget, made = plan()
    assert budget == Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")
    assert made.shares == "hashed"
    assert not made.noise_seeded
    assert accepted(budget, made) == made.steps


def test_a_sigma_that_was_asked_for_decides_the_steps() -> None:
    budget, made = plan(sigma=3000.0)
    assert made.sigma == 3000.0
    assert accepted(budget, made) == made.steps > 0
    budget, both = plan(sigma=3000.0, steps=5)
    assert (both.sigma, both.steps) == (3000.0, 5)
    assert accepted(budget, both, extra=0) == 5


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 1.0}, "not even one step"),
        ({"sigma": 3000.0, "steps": 10**6}, "do not fit"),
        ({"sigma": 0.0}, "--epsilon inf"),
        ({"method": "datalens-paper", "epsilon": 0.05}, "not even one step"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_own_exit_code(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetExceeded, match=message) as caught:
        plan(**options)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"teachers": 0}, "--teachers"),
        ({"teachers": 60_001}, "60000 records"),
        ({"k": 0}, "--k"),
        ({"k": 31, "basis_size": 30}, "--k 31"),
        ({"steps": 0}, "--steps"),
        ({"teacher_steps": 0}, "--teacher-steps"),
        ({"batch": 0}, "--batch"),
        ({"basis_size": 0}, "--basis-size"),
        ({"basis_size": 785}, "785"),
        ({"sigma": -1.0}, "--sigma"),
        ({"sigma": math.inf}, "--sigma"),
        ({"sigma": math.nan}, "--sigma"),
        ({"beta": math.inf}, "--beta"),
        ({"beta": -0.1}, "--beta"),
        ({"beta": 1.01, "decode": "threshold"}, "--beta must be at most 1"),
        ({"clip": 0.0}, "--clip"),
        ({"clip": math.nan}, "--clip"),
        ({"basis": "pixel", "basis_size": 20, "network": "paper"}, "--basis dct"),
        ({"basis": "pixel"}, "--network spectral"),
        ({"preset": "unheard of"}, "--preset"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DatalensError, match=message):
        plan(**options)


def test_balanced_shares_belong_to_replace_one() -> None:
    with pytest.raises(DatalensError, match="--relation replace-one"):
        plan(balanced=True)
    budget, made = plan(balanced=True, relation="replace-one")
    assert (budget.relation, made.shares) == ("replace-one", "balanced")
    assert plan(relation="replace-one")[1].shares == "balanced"  # hashed, a replaced record would change two rows
    assert plan()[1].shares == "hashed"


def test_a_sigma_beyond_reason_is_refused_not_a_traceback() -> None:
    with pytest.raises(DatalensError):
        plan(sigma=1e200)


@pytest.mark.parametrize(
    ("epsilon", "delta", "word"), [(1.0, 0.5, "delta"), (1.0, 1e-3, "delta"), (50.0, 1e-5, "epsilon"), (1.0, 1e-5, "")]
)
def test_a_budget_that_promises_little_is_warned_about(epsilon: float, delta: float, word: str) -> None:
    """The nominal size is public, so the plan can tell: 60,000 records."""
    found = budget_warnings(plan(epsilon=epsilon, delta=delta)[0], MNIST.nominal_size)
    assert len(found) == bool(word) and all(word in line for line in found)


# --- the rest of the settings ---------------------------------------------------------------------------------------


def test_without_a_budget_there_is_no_noise_unless_asked_for() -> None:
    budget, made = plan(epsilon=math.inf)
    assert made.sigma == 0.0
    assert math.isinf(budget.epsilon)
    assert made.steps == preset("datalens", "default", MNIST, math.inf)[1]["steps"]
    assert made.beta == 0.0
    _, noisy = plan(epsilon=math.inf, sigma=7.0, steps=3)
    assert (noisy.sigma, noisy.steps) == (7.0, 3)


def test_sign_compression_pays_for_every_coordinate() -> None:
    budget, made = plan(compress="sign", steps=10, basis_size=50)
    assert made.k == made.basis_size == 50
    assert accepted(budget, made) == 10
    _, paper = plan(method="datalens-paper", compress="sign", steps=10)
    assert paper.k == 784


def test_values_that_belong_together_move_together() -> None:
    _, small = plan(basis_size=4)
    assert small.k == 4
    _, asked = plan(basis_size=4, k=2)
    assert asked.k == 2
    _, pixels = plan(method="datalens-paper", teachers=100)
    assert pixels.beta == pytest.approx(0.75 * pixels.sigma / 100)
    budget, none_passes = plan(method="datalens-paper", teachers=100)
    assert any("not even unanimous votes" in line for line in none_passes.warnings(MNIST, budget))
    budget, votes_pass = plan(method="datalens-paper")
    assert not votes_pass.warnings(MNIST, budget)
    _, kept = plan(method="datalens-paper", teachers=100, beta=0.5)
    assert kept.beta == 0.5
    _, own = plan(OWN)
    assert own.k <= own.basis_size <= 3 * 8 * 8
    assert own.teachers <= 900
    _, cosines = plan(OWN, method="datalens-paper", basis="dct", basis_size=10)
    assert (cosines.basis, cosines.basis_size, cosines.k) == ("dct", 10, 10)


def test_a_noise_seed_is_remembered_as_a_fact() -> None:
    _, made = plan(noise_seed=0)
    assert made.noise_seeded


def test_a_plan_touches_public_facts_only() -> None:
    """The nominal size, never a count: two owners with different data and the same schema get the same plan."""
    assert plan(OWN) == plan(dataclasses.replace(OWN))
    with pytest.raises(DatalensError, match="900 records own has"):
        plan(OWN, teachers=901)


# --- from moments -------------------------------------------------------------------------------


def of_moments(schema: Schema = MNIST, **options: Any) -> MomentSettings:
    settings = make_plan(TrainOptions(out=Path("unused"), **options), schema)[1]
    assert isinstance(settings, MomentSettings)
    return settings


def test_the_default_starts_from_moments() -> None:
    assert of_moments().noise == "discrete-gaussian"
    assert of_moments(warm_start="moments") == of_moments()
    assert of_moments(relation="replace-one").warm_start == "moments"


@pytest.mark.parametrize(
    "options", [{"warm_start": "off"}, {"teachers": 50}, {"k": 3}, {"preset": "quick"}, {"method": "datalens-paper"}]
)
def test_whoever_asks_for_teachers_gets_them(options: dict[str, Any]) -> None:
    assert isinstance(make_plan(TrainOptions(out=Path("unused"), **options), MNIST)[1], TopAggSettings)


@pytest.mark.parametrize("options", [{"teachers": 50}, {"preset": "quick"}, {"method": "datalens-paper"}])
def test_moments_have_no_teachers(options: dict[str, Any]) -> None:
    with pytest.raises(DatalensError, match="--warm-start moments"):
        of_moments(warm_start="moments", **options)


def test_less_data_or_budget_means_fewer_coordinates() -> None:
    sizes = [of_moments(dataclasses.replace(MNIST, nominal_size=n)).coordinates for n in (1_000, 30_000, 60_000)]
    assert sizes == sorted(sizes)
    assert 64 == sizes[0] < sizes[1] < sizes[2] < 196 == of_moments(epsilon=10).coordinates
    budgets = [of_moments(dataclasses.replace(MNIST, nominal_size=5_000), epsilon=e).coordinates for e in (0.2, 1, 10)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[-1]
    many = dataclasses.replace(MNIST, classes=tuple(map(str, range(1000))), nominal_size=10**7)
    assert of_moments(many).coordinates ** 2 * 1000 <= 2**20


def test_the_rule_sees_public_facts_only() -> None:
    """Another name changes nothing."""
    assert of_moments(dataclasses.replace(MNIST, name="other")) == of_moments()


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize("accountant", ["exact", "rdp"])
def test_parts_add_up_to_the_budget(relation: Any, accountant: Any) -> None:
    budget, settings = make_plan(TrainOptions(out=Path("unused"), relation=relation, accountant=accountant), MNIST)
    parts = settings.costs(MNIST, budget)
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    mu_squared = sum((part["sensitivity"] / part["sigma"]) ** 2 for part in parts)
    assert budget.pricing().epsilon_at(mu_squared, budget.delta) == pytest.approx(1, rel=1e-6)


def test_too_little_budget_for_any_noise() -> None:
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        of_moments(epsilon=0.05, accountant="rdp")
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        of_moments(epsilon=1e-9)


def test_moment_settings_survive_json_and_edits_do_not() -> None:
    settings = of_moments()
    assert read_settings(json.loads(json.dumps(settings.as_dict()))) == settings
    for name, value in {
        "grid": 1,
        "counted": 2**20,
        "bins": 0,
        "noise": "none",
        "coordinates": "3",
        "extra": 1,
    }.items():
        with pytest.raises(DatalensError):
            read_settings(settings.as_dict() | {name: value})
    with pytest.raises(DatalensError, match="--coordinates must be between"):
        check_moments(dataclasses.replace(settings, coordinates=785), MNIST)


def test_without_texture_its_budget_goes_to_the_rest() -> None:
    settings = dataclasses.replace(of_moments(), texture=0)
    assert sum(settings.releases.values()) == pytest.approx(1)
    assert not [name for name in settings.releases if name.startswith("texture")]


def test_any_setting_of_moments_can_be_overridden() -> None:
    asked = {"coordinates": 30, "texture": 20, "texture_steps": 5, "sums_quantile": 0.7, "covariances_quantile": 1.0}
    asked |= {name: 0.1 + number / 10 for number, name in enumerate(RELEASE_SHARES)}
    found = of_moments(**asked).as_dict()
    assert {name: found[name] for name in asked} == asked
    usual = of_moments().as_dict()
    assert {name for name in usual if usual[name] != found[name]} == set(asked)
    plain = of_moments(texture=0)
    assert (plain.texture, plain.texture_steps) == (0, 0)
    assert read_settings(plain.as_dict()) == plain


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"coordinates": 0}, "--coordinates must be between 1 and 323"),
        ({"coordinates": 785}, "--coordinates must be between"),
        ({"texture": -1}, "--texture must be between 0"),
        ({"texture": 324}, "--texture must be between 0 and 323"),
        ({"texture_steps": 0}, "--texture-steps must be at least 1"),
        ({"sums_quantile": 0.0}, "--sums-quantile"),
        ({"covariances_quantile": 1.1}, "--covariances-quantile"),
        ({"texture_sums_share": 0.0}, "--texture-sums-share must be above 0"),
        ({"histogram_share": -1.0}, "--histogram-share must be above 0"),
        ({"sums_share": math.inf}, "--sums-share"),
        ({"coordinates": 30, "warm_start": "off"}, "--coordinates is about private moments"),
        ({"texture": 0, "teachers": 10}, "--texture is about private moments"),
        (
            {"texture": 0, "method": "datalens-paper"},
            "--texture is not an option of --method datalens-paper: it belongs to private",
        ),
        ({"texture": 0, "method": "dcgan"}, "--texture is not an option of --method dcgan"),
    ],
    ids=str,
)
def test_overrides_that_mean_nothing_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(DatalensError, match=line):
        make_plan(TrainOptions(out=Path("unused"), **options), MNIST)


def test_where_records_are_scarce_means_come_first() -> None:
    few = of_moments(dataclasses.replace(MNIST, nominal_size=1000))
    assert few.texture == 0 and few.releases["sums"] > 0.4
    assert of_moments(dataclasses.replace(MNIST, nominal_size=10_000)).texture > 0
    assert of_moments(dataclasses.replace(MNIST, nominal_size=1000), texture=16).texture == 16


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        (
            {"teachers": 20},
            60,
            "shares of about 3.0 records each, which is too few to learn from; choose --teachers under 12",
        ),
        ({"teachers": 10}, 60, ""),
        ({}, 60, "a class has about 6 records, and a class with fewer than"),
        ({"epsilon": 0.01}, 3000, "a class has about 300 records, and a class with fewer than"),
        ({}, 60_000, ""),
    ],
)
def test_warnings_of_shares_and_classes_that_are_too_small(options: dict, size: int, said: str) -> None:
    schema = dataclasses.replace(MNIST, nominal_size=size)
    budget, settings = make_plan(TrainOptions(data="mnist", out=Path("x"), **options), schema)
    found = [line for line in warnings(budget, schema, settings) if "delta" not in line]
    assert (said in found[0]) if said else (found == [])


def test_what_to_expect_gets_better_with_epsilon() -> None:
    places = []
    for epsilon in (0.003, 0.05, 1.0, 10.0):
        budget, settings = make_plan(TrainOptions(data="mnist", out=Path("x"), epsilon=epsilon), MNIST)
        same_size, usable_from, _ = settings.expect(MNIST, budget)
        assert "(about 6000 records)" in same_size and "usable from about" in usable_from
        places.append(next(place for place, words in enumerate(WORDS) if words in same_size))
    assert places == sorted(places, reverse=True) and places[0] >= 3 and places[-1] == 0
    budget, votes = make_plan(TrainOptions(data="mnist", out=Path("x"), warm_start="off"), MNIST)
    many = dataclasses.replace(votes, teachers=4 * math.ceil(votes.sigma))
    assert many.expect(MNIST, budget) == [
        "a vote exceeds two standard deviations of the noise where 50% of the teachers agree"
    ]
    few = dataclasses.replace(votes, teachers=200, sigma=200.0)
    assert few.expect(MNIST, budget) == ["even a unanimous vote is only 1 standard deviations of the noise"]
    few = dataclasses.replace(votes, teachers=5)
    assert "expect noise" in few.expect(MNIST, budget)[0]
    budget, merf = make_plan(TrainOptions(data="mnist", out=Path("x"), method="dpmerf"), MNIST)
    assert merf.expect(MNIST, budget) == []


def test_topagg_is_a_preset_of_datalens_alone() -> None:
    """It is advertised: the same as `--warm-start off`."""
    asked = TrainOptions(out=Path("unused"), preset="topagg")
    assert make_plan(asked, MNIST)[1] == plan()[1]
    with pytest.raises(DatalensError, match="choose paper or code"):
        make_plan(dataclasses.replace(asked, method="datalens-paper"), MNIST)
