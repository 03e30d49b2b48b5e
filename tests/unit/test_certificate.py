"""A release that is checked, and then attacked: whatever is changed, `check_release` must say so."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from datalens.bounded.contributions import Contributions, sum_bounded
from datalens.data.schema import Schema
from datalens.errors import DatalensError, TamperedError, UnpriceableEvent
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.pages import REPORT, sealed
from datalens.plans.registry import make_plan
from datalens.privacy.accountant import ACCOUNTANTS, SAMPLED_ONLY, Accountant
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import ExactNoise, IntegerNoise, NoiseSource, SecureNoise, SeededNoise
from datalens.released import report
from datalens.released.certificate import (
    CERTIFICATE,
    LEDGER,
    NOT_PRIVATE,
    PAGE,
    PICTURE,
    WEIGHTS,
    make_certificate,
    page_bytes,
    read_certificate,
    statement,
)
from datalens.released.generator import Architecture, Generator
from datalens.released.release import write_release
from datalens.released.verification import Verification, check_release

SCHEMA = Schema(name="tiny", height=4, width=4, channels=1, classes=("a", "b"), nominal_size=100)
TINY = Architecture(shape=(1, 4, 4), classes=2, latent=2, latent_law="normal", dense=0, widths=(2, 2))
BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")
STEPS = 3


def planned(noise: Literal["discrete-gaussian", "gaussian"] = "gaussian") -> TopAggSettings:
    """k = 2, batch = 2: rows of norm 2, two of them 4 apart."""
    options = TrainOptions(out=Path("unused"), teachers=5, k=2, batch=2, steps=STEPS, basis_size=4, noise=noise)
    made = make_plan(options, SCHEMA)[1]
    assert isinstance(made, TopAggSettings)
    return dataclasses.replace(made, latent=TINY.latent, latent_law=TINY.latent_law)


def build(
    run: Path,
    *,
    budget: Budget = BUDGET,
    noise: NoiseSource | IntegerNoise | None = None,
    sigma: float | None = None,
    shares: Literal["hashed", "balanced"] = "hashed",
) -> Path:
    """A run's ledger, and the release of an untrained generator."""
    made = planned("discrete-gaussian" if isinstance(noise, ExactNoise) else "gaussian")
    made = dataclasses.replace(made, shares=shares)
    noise = noise or SecureNoise()
    ledger = Ledger.create(run / "ledger.jsonl", budget)
    sigma = made.sigma if sigma is None else sigma
    mechanism = make_mechanism(sigma, noise)
    rows = torch.tensor([[[1, -1, 0, 0], [0, 0, 1, 1]]], dtype=torch.int8)
    for step in range(STEPS):
        votes = sum_bounded([Contributions(rows=rows, l2_bound=2.0, diameter=4.0, row_unit="teacher")])
        mechanism.release(votes, ledger, step=step)
    torch.manual_seed(0)
    made = dataclasses.replace(made, noise_seeded=noise.origin == "seeded", sigma=sigma)
    release = write_release(run, Generator(TINY), settings=made, schema=SCHEMA, ledger=ledger)
    ledger.close()
    return release


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    infinite = dataclasses.replace(BUDGET, epsilon=math.inf)
    return {
        "private": build(tmp_path_factory.mktemp("private")),
        "seeded": build(tmp_path_factory.mktemp("seeded"), noise=SeededNoise(0)),
        "infinite": build(tmp_path_factory.mktemp("infinite"), budget=infinite, sigma=0.0),
        "discrete": build(tmp_path_factory.mktemp("discrete"), noise=ExactNoise(planned("discrete-gaussian").sigma)),
    }


@pytest.fixture
def release(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["private"], tmp_path / "release"))


@pytest.fixture
def seeded(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["seeded"], tmp_path / "seeded"))


@pytest.fixture
def discrete(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["discrete"], tmp_path / "discrete"))


@pytest.fixture
def infinite(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["infinite"], tmp_path / "infinite"))


def caught(release: Path) -> bool:
    """Refused outright, or a problem named. Any other exception is a failure of the checker."""
    try:
        return bool(check_release(release).problems)
    except DatalensError:
        return True


def certificate_of(release: Path) -> dict[str, Any]:
    return json.loads((release / CERTIFICATE).read_text())


def put(release: Path, certificate: dict[str, Any], *, page: bool = True) -> None:
    """Written by a forger who knows the format: all hashes are right again, and the page tells the same lie."""
    own = {name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in (LEDGER, WEIGHTS, PICTURE)}
    if page:
        with contextlib.suppress(Exception):  # of nonsense no page can be made
            (release / PAGE).write_bytes(page_bytes({**certificate, "sha256": own}))
    if (release / PAGE).exists():
        own[PAGE] = hashlib.sha256((release / PAGE).read_bytes()).hexdigest()
    body = {**certificate, "sha256": own}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = {**own, "certificate": hashlib.sha256(text.encode()).hexdigest()}
    (release / CERTIFICATE).write_text(json.dumps(body, indent=1, ensure_ascii=False))
    (release / REPORT).unlink(missing_ok=True)  # it would tell


def forge(release: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    certificate = certificate_of(release)
    change(certificate)
    put(release, certificate)


# --- a release that stands ------------------------------------------------------------------------------------------


def test_a_release_that_was_not_touched_stands(release: Path) -> None:
    found = check_release(release)
    assert found.problems == ()
    assert found.private
    assert found.events == STEPS
    assert found.budget == BUDGET
    events = read_ledger(release / LEDGER)[1]
    assert found.spent == Accountant(name="exact").epsilon(events, 1e-5)
    prices = found.spent_by()
    others = [name for name in ACCOUNTANTS if name not in SAMPLED_ONLY]  # nothing here is sampled
    assert prices == {name: Accountant(name=name).epsilon(events, 1e-5) for name in others}
    assert 0.99 < found.spent <= 1.0 < float(prices["rdp-improved"]) < float(prices["rdp"])


def test_a_forgery_that_changes_nothing_stands(release: Path) -> None:
    """The forger's tools are right: what the next tests catch is the lie, not a clumsy hash."""
    forge(release, lambda certificate: None)
    assert check_release(release).problems == ()


def test_the_certificate_says_everything_a_sceptic_needs(release: Path) -> None:
    certificate = read_certificate(release)
    assert certificate["private"] is True
    assert certificate["budget"] == {"epsilon": 1.0, "delta": 1e-5}
    assert certificate["epsilon_spent"] <= 1.0
    assert (certificate["relation"], certificate["accountant"]) == ("add-remove", "exact")
    assert certificate["noise"] == {"origin": ["operating-system"], "secure": True}
    assert certificate["mechanism"]["events"] == STEPS
    assert certificate["public"]["nominal_size"] == 100
    assert certificate["privacy_unit"] == "one image"
    assert certificate["settings"] == planned().as_dict()
    assert len(certificate["not_covered"]) == 5
    assert set(certificate["versions"]) == {"datalens", "torch", "numpy", "scipy"}
    for part in ("(1, 1e-05)", "one image", "present or absent", "add-remove", "exact"):
        assert part in certificate["statement"]


def test_the_statement_follows_the_relation_and_the_noise() -> None:
    replaced = dataclasses.replace(BUDGET, relation="replace-one")
    assert "replaced by another" in statement(replaced, private=True, unit="person")
    assert statement(BUDGET, private=False, unit="image").startswith(NOT_PRIVATE)


@pytest.mark.parametrize("which", ["seeded", "infinite"])
def test_a_run_without_a_guarantee_says_so(originals: dict[str, Path], which: str) -> None:
    found = check_release(originals[which])
    assert found.problems == ()
    assert not found.private
    certificate = read_certificate(originals[which])
    assert certificate["private"] is False
    assert certificate["statement"].startswith(NOT_PRIVATE)
    if which == "infinite":
        assert certificate["budget"]["epsilon"] == certificate["epsilon_spent"] == "inf"
    else:
        assert certificate["noise"] == {"origin": ["seeded"], "secure": False}


def test_unquantised_votes_carry_the_floating_point_caveat() -> None:
    ledger = Ledger.in_memory(BUDGET)
    for compress, caveat in (("topk", "floating point"), ("topk-sign", "rounded to integers")):
        made = dataclasses.replace(planned(), compress=compress)
        certificate = make_certificate(settings=made, schema=SCHEMA, ledger=ledger, sha256={})
        assert caveat in certificate["mechanism"]["noise"]


def test_the_versions_are_there_even_from_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    from datalens.released import certificate as module

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    made = make_certificate(settings=planned(), schema=SCHEMA, ledger=Ledger.in_memory(BUDGET), sha256={})
    assert set(made["versions"].values()) == {"not installed"}


# --- files that were changed ----------------------------------------------------------------------------------------


def names(release: Path, name: str) -> bool:
    """Whether what `datalens verify` says about the release names the file."""
    try:
        said = list(check_release(release).problems)
    except DatalensError as error:
        said = [str(error)]
    return any(name in line for line in said)


@pytest.mark.parametrize("name", [LEDGER, WEIGHTS, PICTURE, PAGE, CERTIFICATE])
def test_any_flipped_byte_of_any_file_is_caught_and_the_file_is_named(release: Path, name: str) -> None:
    content = (release / name).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 60)):
        edited = bytearray(content)
        edited[position] ^= 0x10
        (release / name).write_bytes(edited)
        assert caught(release), position
        assert names(release, name), position
    (release / name).write_bytes(content)
    assert not caught(release)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_byte_of_the_certificate_is_caught(
    data: st.DataObject, originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """White space too: there is one way to write a certificate."""
    scratch = tmp_path_factory.getbasetemp() / "flipped"
    if not scratch.exists():
        shutil.copytree(originals["private"], scratch)
    content = (originals["private"] / CERTIFICATE).read_bytes()
    edited = bytearray(content)
    position = data.draw(st.integers(0, len(content) - 1))
    edited[position] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[]: ,e-')))
    (scratch / CERTIFICATE).write_bytes(edited)
    assert caught(scratch) == (edited != content)


def test_a_ledger_cut_at_the_end_is_caught(release: Path) -> None:
    """The chain alone cannot see it; the hash in the certificate does, and so does what was spent."""
    lines = (release / LEDGER).read_bytes().splitlines(keepends=True)
    (release / LEDGER).write_bytes(b"".join(lines[:-1]))
    assert any("SHA-256" in problem for problem in check_release(release).problems)
    forge(release, lambda certificate: None)  # the hashes set right: the price still differs
    assert any("spent" in problem for problem in check_release(release).problems)


@pytest.mark.parametrize("name", [LEDGER, WEIGHTS, CERTIFICATE])
def test_a_missing_file_is_said(release: Path, name: str) -> None:
    (release / name).unlink()
    with pytest.raises(DatalensError, match=name):
        check_release(release)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "null", "{}", '{"sha256": 7}', '{"sha256": []}', "[" * 100_000, "\ud800"]
)
def test_what_is_no_certificate_is_refused(release: Path, content: str) -> None:
    (release / CERTIFICATE).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(DatalensError, match="not a certificate"):
        check_release(release)


# --- a certificate that lies, with all hashes right -----------------------------------------------------------------


def lie(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(certificate: dict[str, Any]) -> None:
        for name, value in changes.items():
            certificate[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lie(epsilon_spent=0.5),
        lie(epsilon_spent=0.0),
        lie(epsilon_spent=None),
        lie(epsilon_spent="nan"),
        lie(budget={"epsilon": 0.5, "delta": 1e-5}),
        lie(budget={"epsilon": 1.0, "delta": 1e-9}),
        lie(budget={"epsilon": "inf", "delta": 1e-5}),
        lie(budget=None),
        lie(relation="replace-one"),
        lie(accountant="rdp"),
        lie(private=False),
        lambda certificate: certificate.pop("epsilon_spent"),
        lambda certificate: certificate.pop("private"),
        lambda certificate: certificate.pop("relation"),
    ],
)
def test_a_consistent_lie_about_the_price_is_caught(release: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    forge(release, change)
    problems = check_release(release).problems
    assert problems
    assert not any("SHA-256" in problem or "changed after" in problem for problem in problems)


@pytest.mark.parametrize("which", ["seeded", "infinite"])
def test_noise_that_anybody_can_know_cannot_be_called_private(which: str, seeded: Path, infinite: Path) -> None:
    forged = {"seeded": seeded, "infinite": infinite}[which]
    forge(forged, lie(private=True))
    found = check_release(forged)
    assert found.problems
    assert not found.private


def rewrite_ledger(release: Path, lines: list[dict[str, Any]]) -> None:
    """A whole new chain with right hashes, and a certificate for it."""
    previous, content = "0" * 64, b""
    for fields in lines:
        body = {k: v for k, v in fields.items() if k not in ("hash", "previous")} | {"previous": previous}
        previous = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        content += json.dumps({**body, "hash": previous}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    (release / LEDGER).write_bytes(content)


def lines_of(release: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (release / LEDGER).read_bytes().splitlines()]


def verification_after(release: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Verification:
    """Change the ledger, chain it anew, and let the certificate agree with it in everything it can."""
    lines = lines_of(release)
    change(lines)
    rewrite_ledger(release, lines)
    budget, events = read_ledger(release / LEDGER)
    forge(release, lie(epsilon_spent=budget.pricing().epsilon(events, budget.delta)))
    return check_release(release)


def test_a_ledger_over_its_budget_is_caught(release: Path) -> None:
    def spend_again(lines: list[dict[str, Any]]) -> None:
        lines.append({**copy.deepcopy(lines[-1]), "number": len(lines) - 1})

    found = verification_after(release, spend_again)
    assert any("over the budget" in problem for problem in found.problems)
    assert found.spent > 1.0


def test_a_ledger_without_noise_is_caught(release: Path) -> None:
    def silence(lines: list[dict[str, Any]]) -> None:
        lines[1]["event"]["sigma"] = 0.0

    lines = lines_of(release)
    silence(lines)
    rewrite_ledger(release, lines)
    forge(release, lie(epsilon_spent="inf"))
    found = check_release(release)
    assert found.spent == math.inf
    assert any("over the budget" in problem for problem in found.problems)


def test_a_seed_that_was_noted_is_found(release: Path) -> None:
    def confess(lines: list[dict[str, Any]]) -> None:
        lines[2]["event"]["noise"] = "seeded"

    found = verification_after(release, confess)
    assert found.problems
    assert not found.private


def test_events_of_another_version_are_not_guessed_at(release: Path) -> None:
    lines = lines_of(release)
    lines[1]["event"] = {"kind": "laplace"}
    rewrite_ledger(release, lines)
    forge(release, lambda certificate: None)
    with pytest.raises(UnpriceableEvent):
        check_release(release)


def test_a_broken_chain_is_caught_even_with_its_hash_in_the_certificate(release: Path) -> None:
    lines = (release / LEDGER).read_bytes().splitlines(keepends=True)
    (release / LEDGER).write_bytes(b"".join([lines[0], lines[2], lines[3]]))
    forge(release, lambda certificate: None)
    with pytest.raises(TamperedError):
        check_release(release)


# --- weaknesses: lies that are not caught today ---------------------------------------------------------------------


def _private_statement(certificate: dict[str, Any]) -> None:
    certificate["statement"] = statement(BUDGET, private=True, unit="image")


WEAK: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a smaller epsilon in the statement": (
        "private",
        lie(statement="(0.01, 1e-09)-differentially private for one person present or absent."),
    ),
    "a statement of privacy for seeded noise": ("seeded", _private_statement),
    "secure noise for seeded noise": ("seeded", lie(noise={"origin": ["operating-system"], "secure": True})),
    "a seed denied in the settings": ("seeded", lambda c: c["settings"].update(noise_seeded=False)),
    "another privacy unit": ("private", lie(privacy_unit="one person")),
    "fewer events": ("private", lambda c: c["mechanism"].update(events=1)),
    "another sigma in the settings": ("private", lambda c: c["settings"].update(sigma=1e6)),
    "a larger k than the events paid for": ("private", lambda c: c["settings"].update(k=4)),
    "balanced shares under add-remove": ("private", lambda c: c["settings"].update(shares="balanced")),
    "another version of the format": ("private", lie(version=4)),
    "another kind of noise in the settings": ("private", lambda c: c["settings"].update(noise="discrete-gaussian")),
    "fewer things not covered": ("private", lie(not_covered=[])),
    "more that was declared public": ("private", lie(declared_public=["everything"])),
    "a chain that proves everything": ("private", lie(chain="Nothing can be forged.")),
}


@pytest.mark.parametrize("name", WEAK)
def test_other_consistent_lies_are_caught(name: str, release: Path, seeded: Path) -> None:
    which, change = WEAK[name]
    forged = release if which == "private" else seeded
    forge(forged, change)
    assert caught(forged)


def test_a_key_that_is_there_twice_is_caught(release: Path) -> None:
    text = (release / CERTIFICATE).read_text()
    (release / CERTIFICATE).write_text(text.replace('{\n "version"', '{\n "budget": {"epsilon": 0.01},\n "version"', 1))
    assert caught(release)


@pytest.mark.parametrize("nonsense", ["little", [], {}, math.nan], ids=["text", "list", "object", "NaN"])
def test_nonsense_for_a_number_is_caught(release: Path, nonsense: Any) -> None:
    forge(release, lie(epsilon_spent=nonsense))
    assert caught(release)


def test_a_file_that_does_not_belong_there_is_caught(release: Path) -> None:
    (release / "teachers.safetensors").write_bytes(b"made of records")
    assert caught(release)


@pytest.mark.parametrize("odd", [r'"\ud800"', "1e400"], ids=["half a character", "past every float"])
def test_what_cannot_be_written_again_is_caught(release: Path, odd: str) -> None:
    text = (release / CERTIFICATE).read_text(encoding="utf-8")
    (release / CERTIFICATE).write_text(text.replace("{\n", "{\n " + f'"note": {odd},\n', 1), encoding="utf-8")
    assert caught(release)


@pytest.mark.parametrize("cheaper", [{"diameter": 2.0}, {"row_unit": "record"}], ids=["diameter", "row unit"])
def test_events_that_are_not_this_methods_are_caught(release: Path, cheaper: dict[str, Any]) -> None:
    """Teachers' votes: a record replaces a whole row, so every event costs 2·√(k·batch), as the certificate says."""

    def cheapen(lines: list[dict[str, Any]]) -> None:
        for line in lines[1:]:
            line["event"] |= cheaper

    assert verification_after(release, cheapen).problems


def test_hashed_shares_under_replace_one_are_caught(tmp_path: Path) -> None:
    """A replaced record would change two rows there, at the price of one."""
    replaced = dataclasses.replace(BUDGET, relation="replace-one")
    assert planned().shares == "hashed"
    found = check_release(build(tmp_path, budget=replaced)).problems
    assert len(found) == 1 and "hashed shares are not private under replace-one" in found[0]


# --- discrete noise, the page, and old releases ---------------------------------------------------------------------


def test_a_release_with_exact_noise_stands_and_says_so(discrete: Path) -> None:
    found = check_release(discrete)
    assert found.problems == () and found.private
    assert 0.99 < found.spent <= 1.0
    mechanism = read_certificate(discrete)["mechanism"]
    assert mechanism["noise"] == "exact discrete Gaussian (OpenDP)"
    assert mechanism["price"] == "as Gaussian noise of variance sigma² - 4 (by RDP: as zCDP)"
    assert "exact discrete Gaussian" in (discrete / PAGE).read_text()


def test_a_ledger_that_calls_discrete_noise_continuous_is_caught(discrete: Path) -> None:
    """It would be cheaper: the price at σ² and not at σ² − 4."""

    def cheapen(lines: list[dict[str, Any]]) -> None:
        for line in lines[1:]:
            line["event"]["kind"] = "gaussian"
            del line["event"]["coordinates"]

    assert any("kind of noise" in problem for problem in verification_after(discrete, cheapen).problems)


def test_fewer_coordinates_than_the_settings_have_are_caught(discrete: Path) -> None:
    def forget(lines: list[dict[str, Any]]) -> None:
        for line in lines[1:]:
            line["event"]["coordinates"] = 1

    assert any("coordinates" in problem for problem in verification_after(discrete, forget).problems)


def test_small_discrete_noise_is_priced_as_zcdp() -> None:
    made = dataclasses.replace(planned("discrete-gaussian"), sigma=5.0)
    certificate = make_certificate(settings=made, schema=SCHEMA, ledger=Ledger.in_memory(BUDGET), sha256={})
    assert certificate["mechanism"]["price"] == "as zCDP"


def test_the_page_says_it_all_in_plain_words(release: Path) -> None:
    page = (release / PAGE).read_text()
    certificate = read_certificate(release)
    assert certificate["statement"] in page and certificate["chain"] in page
    assert "does not detect an owner" in page or "do not detect an owner" in page
    for item in (*certificate["not_covered"], *certificate["declared_public"]):
        assert item in page
    assert "datalens verify" in page and "e^ε = 2.719" in page
    assert NOT_PRIVATE not in page
    assert len(page.splitlines()) < 60  # one page
    for line in page.splitlines():  # never an ε without its δ, relation and accountant
        if "ε = " in line and "e^ε" not in line:
            assert "δ = 1e-05, add-remove, exact accountant" in line


def said_at(epsilon: float, *, version: int = 3) -> str:
    """CERTIFICATE.md of a release with this budget."""
    ledger = Ledger.in_memory(dataclasses.replace(BUDGET, epsilon=epsilon))
    made = make_certificate(settings=planned(), schema=SCHEMA, ledger=ledger, sha256={}) | {"version": version}
    return page_bytes(made).decode()


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (0.1, "can hardly tell whether"),
        (0.5, "can hardly tell whether"),
        (0.51, "with little confidence whether"),
        (1.5, "with little confidence whether"),
        (3.0, "with some confidence whether"),
        (5.0, "almost for certain"),
        (50.0, "almost for certain"),
    ],
)
def test_words_do_not_promise_more_than_epsilon_does(epsilon: float, words: str) -> None:
    assert words in said_at(epsilon)
    assert ("hardly tell" in said_at(epsilon)) == (epsilon <= 0.5)


@pytest.mark.parametrize(
    ("epsilon", "factor"),
    [(5.0, "148.5"), (0.1, "1.106"), (1.0, "2.719"), (3.00049, "20.1"), (50.0, "5.185e+21"), (1e4, "more than 1e+304")],
)
def test_figures_are_rounded_up(epsilon: float, factor: str) -> None:
    assert f"e^ε = {factor}, except" in said_at(epsilon)
    assert f"ε = {epsilon:g} (δ" in said_at(epsilon)
    if epsilon < 100:
        assert math.exp(epsilon) <= float(factor) <= math.exp(epsilon) * 1.001


def test_the_page_of_the_first_version_is_as_it_was() -> None:
    assert (
        "can hardly tell whether it was in the data or not: whatever they compute, the odds move by a factor of at "
        "most e^ε = 148, except" in said_at(5.0, version=2)
    )


@pytest.mark.parametrize("epsilon", [1.0, 3.00049, 5.0, 50.0])
def test_the_report_rounds_the_same_way(tmp_path: Path, epsilon: float) -> None:
    budget = dataclasses.replace(BUDGET, epsilon=epsilon, delta=1.00049e-5)
    page = (build(tmp_path, budget=budget) / REPORT).read_text()
    text = " ".join(re.sub(r"<[^>]*>", "", page).split())
    assert f"Budget, fixed before trainingε = {epsilon:g}δ = 1.00049e-05" in text
    assert "δ = 1e-05" not in text
    assert ("hardly tell" in text) == (epsilon <= 0.5)
    factor = re.search(r"a factor of at most eε = ([0-9.e+]+),", text)
    assert factor is not None and float(factor[1]) >= math.exp(epsilon)
    sure = re.search(r"be at most ([0-9.]+) % sure", text)
    assert (sure is None) == (epsilon > 7)
    assert sure is None or 100 / (1 + math.exp(-epsilon)) <= float(sure[1]) < 100


def test_the_table_of_releases_never_makes_them_look_more_private() -> None:
    assert report._rounded(("votes", 3, 2.00001, 7.99996)) == ("votes", 3, "2.001", "7.999")
    assert report._rounded(("steps", 3, 1.0, 0.0, 0.0356298)) == ("steps", 3, "1", "0", "0.03563")
    assert report._rounded(("another", 1, None, None, None)) == ("another", 1, None, None, None)


def test_the_page_under_replace_one_speaks_of_another_record() -> None:
    certificate = make_certificate(
        settings=planned(),
        schema=SCHEMA,
        ledger=Ledger.in_memory(dataclasses.replace(BUDGET, relation="replace-one", epsilon=5000.0)),
        sha256={},
    )
    assert "was this one or any other" in page_bytes(certificate).decode()


@pytest.mark.parametrize("which", ["seeded", "infinite"])
def test_the_page_of_a_run_without_a_guarantee_is_stamped_at_every_epsilon(
    originals: dict[str, Path], which: str
) -> None:
    page = (originals[which] / PAGE).read_text()
    assert f"**{NOT_PRIVATE}" in page
    shown = [line for line in page.splitlines() if "ε = " in line]
    assert len(shown) == 2 and all(NOT_PRIVATE in line for line in shown)


def test_a_page_that_says_something_else_is_caught_even_with_its_hash_right(release: Path) -> None:
    (release / PAGE).write_text((release / PAGE).read_text().replace("ε = 1 ", "ε = 0.01 "))
    put(release, certificate_of(release), page=False)
    assert check_release(release).problems == (f"{PAGE} does not say what {CERTIFICATE} says",)


def test_a_page_that_was_taken_out_is_missed(release: Path) -> None:
    (release / PAGE).unlink()
    assert names(release, PAGE)
    put(release, certificate_of(release), page=False)
    assert check_release(release).problems == (f"{PAGE} is missing",)


def test_a_certificate_from_which_no_page_can_be_made_is_caught(release: Path) -> None:
    certificate = certificate_of(release)
    del certificate["declared_public"]
    put(release, certificate)
    assert any(PAGE in problem for problem in check_release(release).problems)


def as_version_2(release: Path) -> None:
    """As datalens 0.1.0 wrote it: the weights say nothing of the steps they learned from."""
    tensors = load_file(release / WEIGHTS)
    with safe_open(release / WEIGHTS, "pt") as file:
        said = json.loads(file.metadata()["generator"])
    del said["completed"]
    save_file(tensors, release / WEIGHTS, {"generator": json.dumps(said)})
    certificate = certificate_of(release)
    put(release, certificate | {"version": 2, "versions": certificate["versions"] | {"datalens": "0.1.0"}})


def test_releases_of_the_first_version_still_stand(release: Path) -> None:
    as_version_2(release)
    found = check_release(release)
    assert found.problems == ()
    (note,) = found.notes  # every planned step is charged: nothing else is to be taken on trust
    assert "version 2 binds less" in note
    forge(release, lie(epsilon_spent=0.5))
    assert caught(release)


def test_what_a_release_of_the_first_version_does_not_state_is_said(release: Path) -> None:
    """It ended early: how many steps the weights have learned from is nowhere said, and the budget covers them all."""
    as_version_2(release)
    verification_after(release, lambda lines: lines.pop())
    forge(release, lambda certificate: certificate["mechanism"].update(events=STEPS - 1))
    found = check_release(release)
    assert found.problems == ()
    _, note = found.notes
    assert "do not state how many steps" in note and "owner's word" in note
    planned_steps = [*found.charged, found.charged[-1]]
    whole = found.budget.pricing().epsilon(planned_steps, found.budget.delta)
    assert found.spent == pytest.approx(whole)
    assert whole > found.budget.pricing().epsilon(found.charged, found.budget.delta)


def test_replace_one_in_the_first_version_is_warned_about(tmp_path: Path) -> None:
    """Version 0.1 took positions in a folder of images for fixed, and nothing in a release tells what its data was."""
    replaced = dataclasses.replace(BUDGET, relation="replace-one")
    release = build(tmp_path, budget=replaced, shares="balanced")
    assert check_release(release).notes == ()  # folders are refused now
    as_version_2(release)
    found = check_release(release)
    assert any("if it was such a folder, the certificate does not hold" in note for note in found.notes)


def test_a_new_certificate_must_state_the_steps(release: Path) -> None:
    as_version_2(release)
    forge(release, lie(version=3))
    assert check_release(release).problems == ("the weights do not state how many steps they learned from",)


@pytest.mark.parametrize("version", [0, 1, 4, True, "2", None])
def test_a_version_that_was_never_released_is_no_way_around_the_checks(release: Path, version: Any) -> None:
    """Version 1 had no page, and did not say which noise."""
    forge(release, lie(version=version))
    assert any("certificate of version" in problem for problem in check_release(release).problems)


# --- the page for people --------------------------------------------------------------------------------------------


def test_the_report_is_made_of_the_release_alone_and_leaves_it_standing(release: Path) -> None:
    before = (release / REPORT).read_bytes()
    (release / REPORT).unlink()
    assert check_release(release).problems == ()  # it may be missing
    (release / REPORT).write_bytes(report.page(release))
    assert check_release(release).problems == ()
    assert (release / REPORT).read_bytes() == before


def test_a_report_that_was_changed_is_caught(release: Path) -> None:
    content = (release / REPORT).read_bytes()
    for forged in (
        content.replace("ε = 1".encode(), "ε = 0.1".encode()),
        content + b"<p>trust me</p>",
        b"",
        b"<html></html>",
    ):
        assert forged != content
        (release / REPORT).write_bytes(forged)
        assert check_release(release).problems == (f"{REPORT} was changed after it was written",)


def test_the_report_of_another_release_is_caught(release: Path, originals: dict[str, Path]) -> None:
    shutil.copyfile(originals["seeded"] / REPORT, release / REPORT)
    (problem,) = check_release(release).problems
    assert problem.startswith(f"{REPORT} belongs to another certificate")
    page = (release / REPORT).read_bytes()  # sealed anew, but still of the other one
    (release / REPORT).write_bytes(sealed(page.replace(b"NOT PRIVATE", b"private")))
    assert check_release(release).problems


def test_a_folder_in_the_place_of_the_report_is_caught(release: Path) -> None:
    (release / REPORT).unlink()
    (release / REPORT).mkdir()
    assert f"{REPORT} is not a page of datalens" in check_release(release).problems
    (release / REPORT).rmdir()
    (release / REPORT).write_bytes(b" " * 5_000_001)
    assert f"{REPORT} is not a page of datalens" in check_release(release).problems
