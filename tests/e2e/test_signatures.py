"""A release that its owner signed: what is signed can be checked by OpenSSH too, and a full rewrite is refused."""

import base64
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from datalens import check_release
from datalens.errors import DatalensError
from datalens.released import signing
from datalens.released.certificate import CERTIFICATE, SIGNATURE
from tests.e2e.conftest import call
from tests.e2e.test_forgeries import METHODS, cheaper_budget, reseal

pytest.importorskip("cryptography")
KEYGEN = shutil.which("ssh-keygen")
with_openssh = pytest.mark.skipif(KEYGEN is None, reason="ssh-keygen is not installed")


def make_key(path: Path) -> Path:
    """Written by cryptography, in OpenSSH's format: ssh-keygen need not be there."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" owner@hospital\n")
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("signed") / "run"
    call(*METHODS["moments"], "--out", run).succeeded()
    return run / "release"


@pytest.fixture
def release(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "release"))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "owner")


def test_a_signed_release_stands_and_says_by_whom(release: Path, key: Path, tmp_path: Path) -> None:
    plain = call("verify", release, "--json").succeeded().json
    assert plain["signature"] == "none"
    said = call("sign", release, "--key", key, "--json").succeeded().json
    assert said["key"].startswith("SHA256:")
    assert said["key"] in call("verify", release).succeeded().out
    public = key.with_suffix(".pub")
    assert "one of the keys" in call("verify", release, "--signed-by", public, "--json").succeeded().json["signature"]
    several = tmp_path / "allowed_signers"
    several.write_bytes(
        b"# ours\n" + make_key(tmp_path / "other").with_suffix(".pub").read_bytes() + b"owner " + public.read_bytes()
    )
    call("verify", release, "--signed-by", several).succeeded()


def test_who_did_not_sign_is_not_taken_for_who_did(release: Path, key: Path, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub")
    assert "nobody has signed" in call("verify", release, "--signed-by", other).out
    call("sign", release, "--key", key).succeeded()
    refused = call("verify", release, "--signed-by", other)
    assert refused.code == 1 and "not among the keys" in refused.out


def test_a_release_written_anew_with_every_hash_right_is_refused(release: Path, key: Path) -> None:
    """Half the budget, in ledger, certificate and page: nothing else would tell."""
    call("sign", release, "--key", key).succeeded()
    cheaper_budget(release, 3.9)
    reseal(release)
    assert "it was made for something else" in call("verify", release, "--signed-by", key.with_suffix(".pub")).out
    refused = call("verify", release)  # a signature that is there must be right, whoever's it is
    assert refused.code == 1 and SIGNATURE in refused.out


def test_what_does_not_stand_is_not_signed(release: Path, key: Path) -> None:
    cheaper_budget(release, 3.9)
    assert "was not signed" in call("sign", release, "--key", key).refused()
    assert not (release / SIGNATURE).exists()


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 99], ids=["nothing", "text", "bytes"])
def test_what_is_no_key_is_refused(release: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    assert "not a private key" in call("sign", release, "--key", tmp_path / "key").refused()
    assert str(tmp_path / "key") in call("verify", release, "--signed-by", tmp_path / "key").refused()
    assert "cannot read" in call("sign", release, "--key", tmp_path / "none").refused()
    assert "cannot read" in call("verify", release, "--signed-by", tmp_path / "none").refused()


def test_keys_of_other_kinds_or_with_a_passphrase_are_refused(release: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec").write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))
    assert "not a key of type ssh-ed25519" in call("sign", release, "--key", tmp_path / "ec").refused()


@with_openssh
def test_a_key_with_a_passphrase_is_left_to_openssh(release: Path, tmp_path: Path) -> None:
    assert KEYGEN is not None
    locked = tmp_path / "locked"
    subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    assert "ssh-keygen -Y sign" in call("sign", release, "--key", locked).refused()


def test_every_flipped_byte_of_a_signature_is_caught(key: Path) -> None:
    signature = signing.sign(b"message", key)
    assert signing.fingerprint(signing.signer(b"message", signature)).startswith("SHA256:")
    own = signing.signer(b"message", signature)
    for position in range(len(signature)):
        edited = bytearray(signature)
        edited[position] ^= 1
        try:
            assert signing.signer(b"message", bytes(edited)) == own  # bits that base64 leaves unused, line ends
        except DatalensError:
            continue
    for broken in (b"", signature[:-30], signature + b"x", signature.replace(b"BEGIN", b"BEGUN")):
        with pytest.raises(DatalensError):
            signing.signer(b"message", broken)
    with pytest.raises(DatalensError, match="something else"):
        signing.signer(b"another message", signature)


@pytest.mark.parametrize("installed", [True, False], ids=["with the package", "without it"])
def test_a_signature_has_no_room_for_anything_else(
    release: Path, key: Path, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("sign", release, "--key", key).succeeded()
    signature = (release / SIGNATURE).read_bytes()
    lines = signature.splitlines()
    blob = base64.b64decode(b"".join(lines[1:-1]))
    reserved = blob.replace(b"datalens" + bytes(4), b"datalens" + b"\0\0\0\7records")
    assert reserved != blob
    if not installed:
        monkeypatch.setattr(signing, "available", lambda: False)
    for content in (
        b"records",
        signature + b"\n" * (signing.MOST_BYTES - len(signature)) + b"records",
        b" \t \t" + signature,
        signature.replace(b"\n", b"\n\n"),
        b"\n".join([lines[0], base64.b64encode(reserved), lines[-1], b""]),
    ):
        (release / SIGNATURE).write_bytes(content)
        assert [line for line in check_release(release).problems if SIGNATURE in line]
        refused = call("verify", release)
        assert refused.code == 1 and SIGNATURE in refused.out
    (release / SIGNATURE).write_bytes(signature)
    call("verify", release).succeeded()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('owner namespaces="git" {}', "has the option namespaces="),
        ('owner valid-before="20200101" {}', "has the option valid-before="),
        ('owner valid-after="20990101",namespaces="git" {}', "has the option valid-after="),
        ("owner cert-authority {}", "has the option cert-authority"),
        ('namespaces="git" {}', "has the option namespaces="),
        ("ssh-rsa AAAAB3NzaC1yc2E= instead of {}", "holds no public key"),
        ("owner ssh-rsa AAAAB3NzaC1yc2E= before it was {}", "holds no public key"),
        ("# {}", "holds no public key"),
        ("ssh-ed25519 AAAAC owner", "has a key that is damaged"),
        ("ssh-ed25519 {} owner", "has a key that is damaged"),
        ("ssh-ed25519", "has a key that is damaged"),
    ],
)
def test_keys_with_limits_or_in_a_comment_are_not_taken_for_keys(
    release: Path, key: Path, tmp_path: Path, line: str, said: str
) -> None:
    call("sign", release, "--key", key).succeeded()
    keys = tmp_path / "keys"
    keys.write_text(line.format(" ".join(key.with_suffix(".pub").read_text().split()[:2])) + "\n")
    assert said in call("verify", release, "--signed-by", keys).refused()
    keys.write_text("# " + keys.read_text() + "\nowner,colleague " + key.with_suffix(".pub").read_text())
    call("verify", release, "--signed-by", keys).succeeded()


@with_openssh
def test_openssh_reads_our_signatures_and_we_read_its(release: Path, key: Path, tmp_path: Path) -> None:
    assert KEYGEN is not None
    public = key.with_suffix(".pub")
    call("sign", release, "--key", key).succeeded()
    signers = tmp_path / "signers"
    signers.write_bytes(b"owner " + public.read_bytes())
    check = [KEYGEN, "-Y", "verify", "-f", signers, "-I", "owner", "-n", "datalens", "-s", release / SIGNATURE]
    good = subprocess.run(check, input=(release / CERTIFICATE).read_bytes(), capture_output=True, check=False)
    assert good.returncode == 0, good.stderr
    assert signing.fingerprint(next(iter(signing.public_keys(public)))) in good.stdout.decode()
    assert subprocess.run(check, input=b"something else", capture_output=True, check=False).returncode != 0
    os.unlink(release / SIGNATURE)
    subprocess.run([KEYGEN, "-q", "-Y", "sign", "-n", "datalens", "-f", key, release / CERTIFICATE], check=True)
    call("verify", release, "--signed-by", public).succeeded()
    os.unlink(release / SIGNATURE)
    subprocess.run([KEYGEN, "-q", "-Y", "sign", "-n", "git", "-f", key, release / CERTIFICATE], check=True)
    assert "not made for datalens" in call("verify", release, "--signed-by", public).out


def test_without_the_package_a_signature_is_said_not_to_be_checked(
    release: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    call("sign", release, "--key", key).succeeded()
    for name in ("cryptography", "cryptography.hazmat.primitives"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(signing, "available", lambda: False)
    assert "was not checked" in call("verify", release).succeeded().out
    assert "pip install" in call("verify", release, "--signed-by", key.with_suffix(".pub")).out
    assert "pip install" in call("sign", release, "--key", key).refused()
