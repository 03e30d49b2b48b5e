"""Releases of every method, forged by somebody who knows the format and sets all hashes right: `verify` must refuse."""

import hashlib
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from datalens import check_release
from datalens.data.schema import Schema
from datalens.pages import FORMAT, REPORT, sealed
from datalens.plans import registry
from datalens.plans.registry import read_settings
from datalens.privacy import tables
from datalens.privacy.ledger import read_ledger
from datalens.released import checks
from datalens.released.certificate import (
    CERTIFICATE,
    LEDGER,
    MODEL,
    PAGE,
    PICTURE,
    WEIGHTS,
    certificate_bytes,
    contents,
    own_hash,
    page_bytes,
)
from datalens.released.generator import Architecture, Generator
from datalens.released.release import draw_picture
from tests.e2e.conftest import call

Lines = list[dict[str, Any]]

QUICK = ("train", "--data", "digits", "--preset", "quick")
REFINED = ("--refine", "diffusion", "--refine-steps", "4", "--pretraining", "1")
METHODS: dict[str, tuple[str, ...]] = {
    "moments": ("train", "--data", "digits", "--epsilon", "4", "--coordinates", "6", "--texture", "6"),
    "refined": ("train", "--data", "digits", "--epsilon", "4", "--coordinates", "6", "--texture", "6", *REFINED),
    "topagg": (*QUICK, "--warm-start", "off", "--teachers", "20", "--steps", "6", "--batch", "10"),
    "dpgan": (*QUICK, "--method", "dpgan", "--epsilon", "8", "--steps", "2"),
    "dpsgd-gan": (*QUICK, "--method", "dpsgd-gan", "--epsilon", "8", "--steps", "2"),
    "gswgan": (*QUICK, "--method", "gswgan", "--epsilon", "8", "--teachers", "4", "--steps", "3", "--batch", "4"),
    "pategan": (*QUICK, "--method", "pategan", "--teachers", "20", "--steps", "3", "--batch", "10"),
    "gpate": (*QUICK, "--method", "gpate", "--epsilon", "8", "--teachers", "20", "--steps", "3", "--batch", "4"),
    "dpmerf": (*QUICK, "--method", "dpmerf", "--steps", "3"),
    "dcgan": (*QUICK, "--method", "dcgan", "--epsilon", "inf", "--steps", "3"),
    "sgd": ("sgd", "--data", "digits", "--epsilon", "4", "--epochs", "3", "--batch-size", "256"),
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trained once each, and only those that are asked for."""
    made: dict[str, Path] = {}

    def get(method: str) -> Path:
        if method not in made:
            run = tmp_path_factory.mktemp(method) / "run"
            extra = ("--threshold", "0.1") if method == "gpate" else ()
            call(*METHODS[method], *extra, "--out", run).succeeded()
            made[method] = run / "release"
        return made[method]

    return get


@pytest.fixture
def release_of(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda method: Path(shutil.copytree(originals(method), tmp_path / method))


# --- the forger's tools ---------------------------------------------------------------------------------------------


def lines_of(release: Path) -> Lines:
    return [json.loads(line) for line in (release / LEDGER).read_bytes().splitlines()]


def put_lines(release: Path, lines: Lines) -> None:
    """A whole new chain with right hashes."""
    previous, content = "0" * 64, b""
    for number, fields in enumerate(lines):
        body = {k: v for k, v in fields.items() if k not in ("hash", "previous")} | {"previous": previous}
        body |= {} if number == 0 else {"number": number - 1}
        previous = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        content += json.dumps({**body, "hash": previous}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    (release / LEDGER).write_bytes(content)


def reseal(release: Path, *, also: tuple[str, ...] = (), **settings: Any) -> None:
    """A certificate that follows from the forged ledger and settings in everything, and every hash right again."""
    old = json.loads((release / CERTIFICATE).read_text())
    changed, schema = read_settings({**old["settings"], **settings}), Schema.from_dict(old["public"])
    budget, events = read_ledger(release / LEDGER)
    new = contents(changed, schema, budget, events, version=old["version"]) | {"versions": old["versions"]}
    files = [name for name in (LEDGER, WEIGHTS, MODEL, PICTURE, *also) if (release / name).exists()]
    new["sha256"] = {name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in files}
    (release / PAGE).write_bytes(page_bytes(new))
    new["sha256"][PAGE] = hashlib.sha256((release / PAGE).read_bytes()).hexdigest()
    new["sha256"]["certificate"] = own_hash(new)
    (release / CERTIFICATE).write_bytes(certificate_bytes(new))
    (release / REPORT).unlink(missing_ok=True)  # it is written anew from the others


def reseal_roughly(release: Path, where: str, **wrong: Any) -> None:
    """The same for what no certificate could be made of: some of its fields are others, and all hashes right again."""
    new = json.loads((release / CERTIFICATE).read_text())
    new[where] |= wrong
    (release / PAGE).write_bytes(page_bytes(new))
    new["sha256"][PAGE] = hashlib.sha256((release / PAGE).read_bytes()).hexdigest()
    new["sha256"]["certificate"] = own_hash(new)
    (release / CERTIFICATE).write_bytes(certificate_bytes(new))
    (release / REPORT).unlink(missing_ok=True)


def problem(release: Path) -> str:
    """What `verify` says first. The hashes are not it: they were set right."""
    found = check_release(release).problems
    assert found, "the forged release stands"
    assert not [line for line in found if "SHA-256" in line or "changed after" in line]
    return found[0]


def weights_of(release: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    path = release / (MODEL if (release / MODEL).exists() else WEIGHTS)
    with safe_open(path, "pt") as file:
        ((key, said),) = file.metadata().items()
    return path, load_file(path), {key: json.loads(said)}


def put_weights(path: Path, tensors: dict[str, torch.Tensor], described: dict[str, Any]) -> None:
    save_file(tensors, path, {key: json.dumps(value) for key, value in described.items()})


# --- honest releases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_honest_release_stands_and_states_what_it_learned_from(
    method: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    found = check_release(release)
    assert found.problems == found.notes == ()
    said = next(iter(weights_of(release)[2].values()))
    steps = {"topagg": 6, "moments": 8, "refined": 4, "sgd": 17, "dpmerf": 1, "dpgan": 2, "dpsgd-gan": 2}
    assert said["completed"] == steps.get(method, 3)
    assert ("answered" in said) == (method == "gpate")
    reseal(release)  # the forger's tools are right: what is caught below is the lie, not a clumsy hash
    assert check_release(release).problems == ()


# --- charges left out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("dcgan", "dpmerf", "moments", "refined")])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_ledger_with_few_of_many_charges_is_refused(
    method: str, kept: int, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    put_lines(release, lines_of(release)[: 1 + kept])
    reseal(release)
    assert "no release at all" in problem(release) if kept == 0 else "the ledger has charges for" in problem(release)


@pytest.mark.parametrize("method", ["topagg", "dpgan", "pategan", "gswgan", "sgd"])
def test_a_charge_left_out_in_the_middle_is_refused_in_old_releases_too(
    method: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    forget_counts(release)
    lines = lines_of(release)
    put_lines(release, [lines[0], *lines[2:]])
    reseal(release)
    assert "gaps" in problem(release)


def forget_counts(release: Path, writer: str = "0.1.0") -> None:
    """As datalens 0.1.0 wrote it."""
    path, tensors, described = weights_of(release)
    for said in described.values():
        said.pop("completed")
        said.pop("answered", None)
    put_weights(path, tensors, described)
    certificate = json.loads((release / CERTIFICATE).read_text()) | {"version": 2}
    certificate["versions"]["datalens"] = writer
    (release / CERTIFICATE).write_text(json.dumps(certificate))
    reseal(release)


@pytest.mark.parametrize("writer", ["0.2.0.dev0", "0.2", "0.10.3", "1.0.0", "v2.0"])
def test_a_version_that_states_less_is_no_way_out(writer: str, release_of: Callable[[str], Path]) -> None:
    """Datalens has written version 3 since 0.2."""
    release = release_of("topagg")
    forget_counts(release, writer)
    assert f"which datalens {writer} does not write" in problem(release)


@pytest.mark.parametrize("writer", ["0.1.0", "not installed"])
@pytest.mark.parametrize("method", ["topagg", "gpate", "sgd"])
def test_an_old_release_is_said_to_have_spent_what_its_plan_costs(
    method: str, writer: str, release_of: Callable[[str], Path]
) -> None:
    """All but one charge left out: without the steps that weights learned from, nobody can tell how many it was."""
    release = release_of(method)
    whole = check_release(release).spent
    forget_counts(release, writer)
    put_lines(release, lines_of(release)[:2])
    reseal(release)
    said = call("verify", release, "--json").json
    assert said["epsilon_spent"] >= whole * (1 - 1e-9)
    assert any("not state how many" in note for note in said["not_stated"])


@pytest.mark.parametrize("method", ["topagg", "moments", "sgd"])
def test_the_verdict_on_an_old_certificate_is_qualified_and_can_be_refused(
    method: str, release_of: Callable[[str], Path]
) -> None:
    """Version 2 does not bind what weights learned from to what was charged: it does not stand as version 3 does."""
    release = release_of(method)
    new = call("verify", release, "--require-version", 3).succeeded().out
    assert new.startswith("the certificate stands:") and "binds less" not in new
    assert call("verify", release, "--json").json["qualified"] is False
    forget_counts(release)
    old = call("verify", release).succeeded().out
    assert old.startswith("the certificate stands, as far as one of version 2 can:") and "binds less" in old
    said = call("verify", release, "--json").succeeded().json
    assert (said["ok"], said["qualified"], said["certificate_version"]) == (True, True, 2)
    refused = call("verify", release, "--require-version", 3)
    assert refused.code == 1 and "--require-version requires 3" in refused.out
    assert call("verify", release, "--require-version", 2).succeeded()


@pytest.mark.parametrize("wanted", [0, 9])
def test_a_version_that_does_not_exist_is_not_asked_for(wanted: int, release_of: Callable[[str], Path]) -> None:
    assert "must be 1 to 3" in call("verify", release_of("moments"), "--require-version", wanted).refused()


def cheaper_budget(release: Path, epsilon: float) -> None:
    lines = lines_of(release)
    lines[0]["epsilon"] = epsilon
    put_lines(release, lines)


@pytest.mark.parametrize("method", ["topagg", "sgd", "dpgan", "gpate"])
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_smaller_budget_with_charges_left_out_is_refused(
    method: str, old: bool, release_of: Callable[[str], Path]
) -> None:
    """What is guaranteed is the budget. It must cover the steps that the settings state, charged or not."""
    release = release_of(method)
    if old:
        forget_counts(release)
    lines = lines_of(release)
    put_lines(release, lines[:2])
    budget, events = read_ledger(release / LEDGER)
    cheaper_budget(release, 1.001 * budget.pricing().epsilon(events, budget.delta))
    reseal(release)
    assert any("over the budget" in line for line in check_release(release).problems)


def test_gpate_without_its_answers_charges_is_refused(release_of: Callable[[str], Path]) -> None:
    release = release_of("gpate")
    lines = lines_of(release)
    checks = [line for line in lines[1:] if line["event"]["diameter"] == line["event"]["l2_bound"]]
    assert len(checks) == 3 < len(lines) - 1
    put_lines(release, [lines[0], *checks])
    reseal(release)
    assert "queries were answered, the ledger has charges for 0" in problem(release)


def test_texture_that_nobody_paid_for_is_refused(release_of: Callable[[str], Path]) -> None:
    release = release_of("moments")
    put_lines(release, lines_of(release)[:5])
    path, tensors, described = weights_of(release)
    described["generator"]["completed"] = 4
    put_weights(path, tensors, described)
    reseal(release)
    assert "texture, and the ledger no charges for it" in problem(release)
    reseal(release, texture=0, texture_steps=0)
    assert check_release(release).problems


# --- charges that are others ----------------------------------------------------------------------------------------


def test_moments_with_louder_noise_than_was_drawn_are_refused(release_of: Callable[[str], Path]) -> None:
    """σ follows from the settings, the budget and what was charged before."""
    for which in (None, 3):
        release = release_of("moments")
        lines = lines_of(release)
        for number, line in enumerate(lines[1:]):
            line["event"]["sigma"] *= 20 if which in (None, number) else 1
        put_lines(release, lines)
        reseal(release)
        assert "settings and budget make it" in problem(release)
        shutil.rmtree(release)


def test_a_sampling_rate_other_than_batch_by_size_is_refused(release_of: Callable[[str], Path]) -> None:
    for method in ("dpgan", "dpsgd-gan"):
        release = release_of(method)
        lines = lines_of(release)
        rate = lines[1]["event"]["rate"] / 50
        for line in lines[1:]:
            line["event"]["rate"] = rate
        put_lines(release, lines)
        reseal(release, rate=rate)
        assert "sampling rate" in problem(release)


def test_events_of_another_mechanism_are_refused(release_of: Callable[[str], Path]) -> None:
    """Laplace noise in a run of TopAgg."""
    release = release_of("topagg")
    lines = lines_of(release)
    for line in lines[1:]:
        event = {name: line["event"][name] for name in ("row_unit", "relation", "queries", "step", "noise")}
        line["event"] = {"kind": "discrete-laplace", "moved": 2, "scale": 1e6, **event}
    put_lines(release, lines)
    reseal(release)
    assert any("other releases than sums of teachers' votes" in line for line in check_release(release).problems)


@pytest.mark.parametrize(("method", "tolerance"), [("sgd", 2e-2), ("moments", 1e-8)])
def test_a_price_by_another_version_of_the_libraries_stands_and_no_other_does(
    method: str, tolerance: float, release_of: Callable[[str], Path]
) -> None:
    """PRV answers to within twice the error it is asked for; closed forms to the last digits."""
    for off, stands in ((0.9, True), (-0.9, True), (-1.5, False), (1.5, False)):
        release = release_of(method)
        certificate = json.loads((release / CERTIFICATE).read_text())
        spent = certificate["epsilon_spent"]
        certificate["epsilon_spent"] = spent + off * (tolerance if method == "sgd" else 1e-9 * spent)
        restate(release, certificate)
        found = check_release(release).problems
        assert (found == ()) == stands, (off, found)
        assert stands or "was spent, the ledger" in found[0]
        shutil.rmtree(release)


def used_up(release: Path) -> None:
    """A budget of which nothing is left."""
    budget, events = read_ledger(release / LEDGER)
    cheaper_budget(release, budget.pricing().epsilon(events, budget.delta))
    reseal(release)


@pytest.mark.parametrize("off", [-1.9, -0.5, 0.5, 1.9])
def test_libraries_that_price_a_little_differently_leave_a_release_standing(
    off: float, release_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PRV's answer lies up to twice its error above the true ε. The budget is used up, and the page shows prices."""
    release = release_of("sgd")
    used_up(release)
    call("report", release).succeeded()
    budget, events = read_ledger(release / LEDGER)
    asked = tables.prv_composed

    def other(parts: tuple[tuple[float, float, int], ...], delta: float, rough: float) -> float:
        return asked(parts, delta, rough) + off * tables.prv_error(sum(count for *_, count in parts), delta, rough)

    monkeypatch.setattr(tables, "prv_composed", other)
    spent = budget.pricing().epsilon(events, budget.delta)
    assert (spent > budget.epsilon) == (off > 0)  # or the budget would not be tested
    found = check_release(release)
    assert found.problems == ()
    assert any("within the accountant's error" in note for note in found.notes) == (spent > budget.epsilon)
    page = (release / REPORT).read_bytes()
    call("report", release).succeeded()
    assert (release / REPORT).read_bytes() != page


def test_prices_on_a_page_are_held_to_the_accountants_error(release_of: Callable[[str], Path]) -> None:
    release = release_of("sgd")
    page = (release / REPORT).read_bytes()
    body = page[: page.rindex(b"<!-- sha256 of everything above")]
    table = body[body.index(b"releases charged</th>") :]
    (first, *_) = [price for price in re.findall(rb'<td class="number">([0-9.]+)</td>', table) if float(price) > 0.3]
    for factor in (0.5, 2):
        forged = body.replace(first, f"{float(first) * factor:.4g}".encode())
        assert forged != body
        (release / REPORT).write_bytes(sealed(forged))
        assert f"{REPORT} does not say what {CERTIFICATE} says" in problem(release)


def test_more_spent_than_the_budget_is_refused_though_within_the_accountants_error(
    release_of: Callable[[str], Path],
) -> None:
    """What was spent was held to the budget when it was charged, by the same libraries that wrote it down."""
    release = release_of("sgd")
    used_up(release)
    assert check_release(release).problems == ()
    certificate = json.loads((release / CERTIFICATE).read_text())
    certificate["epsilon_spent"] += 1e-3
    restate(release, certificate)
    assert "the certificate states more spent" in problem(release)


def test_no_noise_has_no_price_that_could_be_stated(release_of: Callable[[str], Path]) -> None:
    release = release_of("dcgan")
    restate(release, json.loads((release / CERTIFICATE).read_text()) | {"epsilon_spent": 0.5})
    assert "0.5 was spent" in problem(release)


def restate(release: Path, certificate: dict[str, Any]) -> None:
    """A certificate with another text, on the page too, and every hash right."""
    hashes = certificate.pop("sha256")
    hashes.pop("certificate")
    (release / PAGE).write_bytes(page_bytes({**certificate, "sha256": hashes}))
    certificate["sha256"] = hashes | {PAGE: hashlib.sha256((release / PAGE).read_bytes()).hexdigest()}
    certificate["sha256"]["certificate"] = own_hash(certificate)
    (release / CERTIFICATE).write_bytes(certificate_bytes(certificate))
    (release / REPORT).unlink(missing_ok=True)


def test_a_run_whose_ledger_was_cut_does_not_stand_and_does_not_go_on(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(originals("topagg").parent, tmp_path / "run"))
    lines = (run / LEDGER).read_bytes().splitlines(keepends=True)
    (run / LEDGER).write_bytes(b"".join(lines[:3]))
    assert "lacks charges that the release states" in call("verify", run).out
    assert "has 2 charges, but" in call("train", "--out", run, "--resume").refused()
    (run / LEDGER).write_bytes(b"".join(lines))
    call("train", "--out", run, "--resume").succeeded()


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["moments", "sgd"])
def test_a_file_that_no_release_has_is_refused_though_its_hash_is_named(
    method: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    np.savez(release / "records.npz", images=np.zeros((3, 8, 8)))
    reseal(release, also=("records.npz",))
    assert "records.npz is no file of a release" in problem(release)
    (release / "records.npz").unlink()
    assert any("records.npz" in line for line in check_release(release).problems)  # a hash of something


def test_a_folder_or_a_link_in_a_release_is_refused(release_of: Callable[[str], Path], tmp_path: Path) -> None:
    release = release_of("moments")
    (release / "images").mkdir()
    assert "images is no file of a release" in problem(release)
    (release / "images").rmdir()
    os.replace(release / PICTURE, tmp_path / "elsewhere.png")
    (release / PICTURE).symlink_to(tmp_path / "elsewhere.png")
    assert "no plain file" in problem(release)


@pytest.mark.parametrize("name", [LEDGER, WEIGHTS, PICTURE, PAGE])
def test_every_file_is_required(name: str, release_of: Callable[[str], Path]) -> None:
    release = release_of("moments")
    (release / name).unlink()
    assert call("verify", release).code != 0
    if name == PICTURE:
        reseal(release)
        assert problem(release) == f"{PICTURE} is missing"


@pytest.mark.parametrize("method", ["moments", "topagg", "sgd"])
def test_a_tensor_that_no_model_has_is_refused(method: str, release_of: Callable[[str], Path]) -> None:
    release = release_of(method)
    path, tensors, described = weights_of(release)
    put_weights(path, {**tensors, "records": torch.zeros(3, 8, 8)}, described)
    reseal(release)
    assert "is not a" in problem(release) and path.name in problem(release)


@pytest.mark.parametrize("method", ["moments", "topagg", "sgd"])
def test_weights_that_describe_something_else_are_refused(method: str, release_of: Callable[[str], Path]) -> None:
    for where in ("beside", "inside"):
        release = release_of(method)
        path, tensors, described = weights_of(release)
        (described if where == "beside" else next(iter(described.values())))["records"] = "AAAA"
        put_weights(path, tensors, described)
        reseal(release)
        assert "is not a" in problem(release)
        shutil.rmtree(release)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def put_header(path: Path, header: bytes, tensors: bytes) -> None:
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + tensors)


@pytest.mark.parametrize("where", ["twice described", "twice in the header", "in a tensor's place", "in spaces"])
@pytest.mark.parametrize("method", ["moments", "sgd"])
def test_what_is_hidden_in_the_header_of_weights_is_refused(
    method: str, where: str, release_of: Callable[[str], Path]
) -> None:
    """JSON keeps the last of two fields of one name, and safetensors reads no field that it does not know."""
    release = release_of(method)
    path = weights_of(release)[0]
    header, tensors = header_of(path)
    compact = {"separators": (",", ":"), "ensure_ascii": False}
    put_header(path, json.dumps(header, **compact).encode(), tensors)  # type: ignore[arg-type]
    reseal(release)
    assert check_release(release).problems == ()  # the forger's tools are right
    ((kind, said),) = header["__metadata__"].items()
    if where == "twice described":
        header["__metadata__"][kind] = '{"classes": ["records"], ' + said[1:]
    if where == "in a tensor's place":
        next(value for name, value in header.items() if name != "__metadata__")["records"] = "AAAA"
    written = json.dumps(header, **compact).encode()  # type: ignore[arg-type]
    if where == "twice in the header":
        written = b'{"__metadata__":{"' + kind.encode() + b'":"records",' + written[len(b'{"__metadata__":{') :]
    if where == "in spaces":
        written += b" " * 8
    put_header(path, written, tensors)
    reseal(release)
    assert "is not a" in problem(release)


def test_weights_with_more_digits_than_a_model_has_are_refused(release_of: Callable[[str], Path]) -> None:
    for method in ("topagg", "sgd"):
        release = release_of(method)
        path, tensors, described = weights_of(release)
        put_weights(path, {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}, described)
        reseal(release)
        assert "is not a" in problem(release)


def test_a_model_of_another_kind_or_size_is_refused(
    release_of: Callable[[str], Path], originals: Callable[[str], Path]
) -> None:
    for method, other in (("moments", "topagg"), ("topagg", "moments"), ("topagg", "gswgan")):
        release = release_of(method)
        shutil.copyfile(originals(other) / WEIGHTS, release / WEIGHTS)
        path, tensors, described = weights_of(release)
        described["generator"]["completed"] = 1
        put_weights(path, tensors, described)
        reseal(release)
        assert "than the settings state" in problem(release)
        shutil.rmtree(release)


def test_a_picture_of_something_else_is_refused(release_of: Callable[[str], Path]) -> None:
    """One cell of a hundred is enough."""
    release = release_of("moments")
    with Image.open(release / PICTURE) as picture:
        pixels = np.array(picture)
    pixels[70:130, 70:130] = 255 - pixels[70:130, 70:130]
    Image.fromarray(pixels).save(release / PICTURE)
    reseal(release)
    assert problem(release) == f"{PICTURE} is not what the generator draws"


def test_what_is_hidden_behind_a_picture_is_refused(release_of: Callable[[str], Path]) -> None:
    release = release_of("moments")
    content = (release / PICTURE).read_bytes()
    text = PngImagePlugin.PngInfo()
    text.add_text("records", "AAAA")
    out = io.BytesIO()
    with Image.open(release / PICTURE) as picture:
        picture.save(out, format="png", pnginfo=text)
    for forged in (content + b"records", out.getvalue()):
        (release / PICTURE).write_bytes(forged)
        reseal(release)
        assert problem(release) == f"{PICTURE} holds something besides a picture"


def chunk(name: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


@pytest.mark.parametrize("where", ["a chunk", "more rows", "the last chunk", "a checksum", "nowhere"])
def test_what_is_hidden_behind_the_pixels_of_a_picture_is_refused(
    where: str, release_of: Callable[[str], Path]
) -> None:
    """Readers stop at the end of the packed rows, and never look at what comes behind."""
    release = release_of("moments")
    content = (release / PICTURE).read_bytes()
    with Image.open(release / PICTURE) as picture:
        pixels = np.array(picture)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    packed = zlib.compress(rows + (b"records" * 99 if where == "more rows" else b""))
    forged = content[:33] + chunk(b"IDAT", packed) + (chunk(b"IDAT", b"records") if where == "a chunk" else b"")
    forged = forged[:-4] + b"reco" if where == "a checksum" else forged
    (release / PICTURE).write_bytes(forged + chunk(b"IEND", b"records" if where == "the last chunk" else b""))
    reseal(release)
    found = check_release(release).problems
    assert found == (() if where == "nowhere" else (f"{PICTURE} holds something besides a picture",))


@pytest.mark.parametrize("where", ["a field", "a version", "the ledger"])
def test_room_for_anything_else_is_refused(where: str, release_of: Callable[[str], Path]) -> None:
    release = release_of("moments")
    if where == "the ledger":
        lines = lines_of(release)
        lines[1]["records"] = "AAAA"
        put_lines(release, lines)
        assert "does NOT stand" in call("verify", release).out
        return
    certificate = json.loads((release / CERTIFICATE).read_text())
    (certificate if where == "a field" else certificate["versions"])["records"] = "AAAA" * 30
    certificate["sha256"].pop("certificate")
    certificate["sha256"]["certificate"] = own_hash(certificate)
    (release / CERTIFICATE).write_bytes(certificate_bytes(certificate))
    (release / REPORT).unlink()
    assert "the certificate" in problem(release)


LONG = "7" * 3000


@pytest.mark.parametrize("method", ["moments", "topagg", "sgd"])
@pytest.mark.parametrize("where", ["epsilon", "delta", "queries", "seed", "preset", "value_range"])
def test_room_in_a_number_or_a_text_is_refused(where: str, method: str, release_of: Callable[[str], Path]) -> None:
    """A number with 3,000 digits, or a text of any length, is a number or a text as well, and holds records."""
    release = release_of(method)
    lines, certificate = lines_of(release), json.loads((release / CERTIFICATE).read_text())
    if where in ("epsilon", "delta"):
        text = str(float(lines[0][where])) if where == "epsilon" else f"{lines[0][where]:.8f}"
        lines[0][where] = text + "0" * 60 + LONG
    if where == "queries":
        lines[1]["event"]["queries"] = int(LONG)
    if where in ("epsilon", "delta", "queries"):
        put_lines(release, lines)
        out = call("verify", release).out
        assert "a whole number from 0" in out if where == "queries" else "is not written as" in out
        return
    if where == "value_range":
        certificate["public"][where] = [0, int(LONG)]
    else:
        certificate["settings"][where] = int(LONG) if where == "seed" else LONG
    restate(release, certificate)
    assert "the certificate" in problem(release) or f"the setting {where}" in problem(release)


@pytest.mark.parametrize("method", ["topagg", "sgd"])
def test_another_number_of_sums_than_the_settings_state_is_refused(
    method: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    lines = lines_of(release)
    lines[1]["event"]["queries"] += 1
    put_lines(release, lines)
    reseal(release)
    assert "several sums" in problem(release) if method == "sgd" else "number of images in a step" in problem(release)


@pytest.mark.parametrize(
    ("method", "wrong", "words"),
    [
        ("moments", {"bins": 47}, "another number of coordinates"),
        ("moments", {"sums_quantile": 2.0}, "--sums-quantile must lie in"),
        ("topagg", {"teachers": 10**6}, "--teachers 1000000 is more than the 1437 records"),
        ("gswgan", {"clip": 0.0}, "--clip must be above 0"),
        ("pategan", {"teachers": 10**6}, "--teachers 1000000 is more than the 1437 records"),
    ],
)
def test_settings_that_no_run_was_ever_done_with_are_refused(
    method: str, wrong: dict[str, Any], words: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    reseal_roughly(release, "settings", **wrong)
    assert words in problem(release)


@pytest.mark.parametrize("method", ["moments", "topagg", "sgd", "dpgan", "dpmerf"])
def test_a_data_set_of_nobody_is_refused_in_a_line(method: str, release_of: Callable[[str], Path]) -> None:
    """Sampling rates and noise are by the number of records."""
    release = release_of(method)
    reseal_roughly(release, "public", nominal_size=0)
    assert "cannot be read (ValueError)" in problem(release)


@pytest.mark.parametrize("method", ["topagg", "dpgan", "gswgan", "pategan", "gpate", "dpmerf", "dcgan"])
@pytest.mark.parametrize("part", ["widths", "dense"])
def test_a_wider_generator_than_the_settings_make_is_refused(
    part: str, method: str, release_of: Callable[[str], Path]
) -> None:
    """It has room for records, and draws what its picture shows all the same."""
    release = release_of(method)
    path, _, described = weights_of(release)
    a = described["generator"]["architecture"]
    a[part] = 2000 if part == "dense" else [2 * 128 for _ in a[part]]
    wider = Generator(Architecture(**{**a, "shape": tuple(a["shape"]), "widths": tuple(a["widths"])})).eval()
    put_weights(path, wider.state_dict(), described)
    schema = Schema.from_dict(json.loads((release / CERTIFICATE).read_text())["public"])
    draw_picture(wider, schema).save(release / PICTURE)
    reseal(release)
    assert "a wider generator than the settings make" in problem(release)


# --- plug-ins that there are none of ---------------------------------------------------------------------------------


def test_a_made_up_plug_in_switches_no_check_of_the_ledger_off(
    release_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another package's method charges is its own affair; what ours charges is not, whatever its settings name."""
    release = release_of("pategan")
    path, tensors, described = weights_of(release)
    described["generator"]["completed"] = 1
    put_weights(path, tensors, described)
    lines = lines_of(release)
    put_lines(release, [*lines[:2], *lines[3:]])  # a step in the middle was not charged
    with monkeypatch.context() as patch:
        patch.setattr(registry, "MAY_BE_PLUGGED", tuple(registry.METHODS))
        reseal(release, plugins="the method pategan of nothing 1.0")
        assert check_release(release).problems == ()  # the broken twin: a name was enough
    assert "the settings name a plug-in" in problem(release)


def test_a_made_up_plug_in_makes_no_room_in_the_weights(
    release_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mechanism of another package changes who adds the noise, and nothing about the generator."""
    release = release_of("topagg")
    path, _, described = weights_of(release)
    a = described["generator"]["architecture"]
    a["widths"] = [2 * 128 for _ in a["widths"]]
    wider = Generator(Architecture(**{**a, "shape": tuple(a["shape"]), "widths": tuple(a["widths"])})).eval()
    put_weights(path, wider.state_dict(), described)
    schema = Schema.from_dict(json.loads((release / CERTIFICATE).read_text())["public"])
    draw_picture(wider, schema).save(release / PICTURE)
    reseal(release, mechanism="odd", plugins="the mechanism odd of nothing 1.0")
    with monkeypatch.context() as patch:
        patch.setattr(checks, "is_ours", lambda settings: not settings.plugins)
        assert check_release(release).problems == ()  # the broken twin
    assert "a wider generator than the settings make" in problem(release)


def test_a_seed_that_no_certificate_could_state_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    for command in ("train", "sgd"):
        asked = (command, "--data", "digits", "--epsilon", 4, "--seed", 2**62, "--out", tmp_path / command)
        assert "--seed has too many digits" in call(*asked).refused()
        assert not (tmp_path / command).exists()


# --- the page for people --------------------------------------------------------------------------------------------


def stated_format(number: int) -> bytes:
    return f'<meta name="datalens-page" content="{number}">'.encode()


@pytest.mark.parametrize("method", ["moments", "sgd"])
def test_a_report_with_other_numbers_is_refused_though_it_is_sealed_anew(
    method: str, release_of: Callable[[str], Path]
) -> None:
    release = release_of(method)
    page = (release / REPORT).read_bytes()
    body = page[: page.rindex(b"<!-- sha256 of everything above")]
    assert sealed(body) == page
    forged = body.replace("ε = 4".encode(), "ε = 0.4".encode())
    assert forged != body
    (release / REPORT).write_bytes(sealed(forged))
    assert f"{REPORT} does not say what {CERTIFICATE} says" in problem(release)
    for claimed in (*range(FORMAT), FORMAT + 1):  # as if another version had written it
        other = forged.replace(stated_format(FORMAT), stated_format(claimed))
        assert other != forged
        (release / REPORT).write_bytes(sealed(other))
        assert f"{REPORT} was written by another version" in problem(release)
    call("report", release).succeeded()
    assert check_release(release).problems == ()


def test_a_report_of_the_first_version_is_said_not_to_be_compared(release_of: Callable[[str], Path]) -> None:
    release = release_of("moments")
    forget_counts(release)
    call("report", release).succeeded()
    page = (release / REPORT).read_bytes()
    body = page[: page.rindex(b"<!-- sha256 of everything above")]
    without = body.replace(stated_format(FORMAT) + b"\n", b"")
    assert without != body
    (release / REPORT).write_bytes(sealed(without))
    found = check_release(release)
    assert found.problems == ()
    assert any(REPORT in note and "not compared" in note for note in found.notes)
    assert f"not stated: {REPORT}" in call("verify", release).succeeded().out
    assert call("verify", release, "--json").succeeded().json["not_stated"] == list(found.notes)


# --- what sample says -----------------------------------------------------------------------------------------------


def test_an_edited_certificate_is_not_repeated(release_of: Callable[[str], Path], tmp_path: Path) -> None:
    """By `sample`, and from Python."""
    from datalens import DataLens

    release = release_of("moments")
    certificate = json.loads((release / CERTIFICATE).read_text())
    certificate["statement"] = certificate["statement"].replace("(4,", "(0.1,")
    certificate["budget"]["epsilon"] = 0.1
    (release / CERTIFICATE).write_bytes(certificate_bytes(certificate))
    line = call("sample", release, "--out", tmp_path / "s.npz", "--count", 3).refused()
    assert "does not stand" in line and not (tmp_path / "s.npz").exists()
    model = DataLens()
    model._keep(release, None)  # type: ignore[arg-type]
    from datalens.errors import TamperedError

    with pytest.raises(TamperedError):
        _ = model.certificate
