"""Signatures on a release, in OpenSSH's format: `ssh-keygen -Y sign` and `-Y verify` read and write the same files.

The signed message is certificate.json, which has the hash of every certified file of a release. Hashes alone do not
detect that somebody rewrote everything; a signature shows who vouches for the release. PROTOCOL.sshsig of OpenSSH
describes the format. Keys are Ed25519; the package cryptography does the arithmetic.
"""

import base64
import hashlib
import importlib.util
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datalens.errors import DatalensError

NAMESPACE = b"datalens"
_MAGIC, _KIND, _HASH = b"SSHSIG", b"ssh-ed25519", b"sha512"
_BEGIN, _END = b"-----BEGIN SSH SIGNATURE-----", b"-----END SSH SIGNATURE-----"
# Options before the key on a line of allowed signers. They limit the key to some purposes or to a period of time.
_OPTION = re.compile(r"(?i)cert-authority|(namespaces|valid-after|valid-before)=")
MOST_BYTES = 2**16  # limit for files of keys and for signatures


def sign(message: bytes, key: Path) -> bytes:
    """Return the armoured signature of a message by the private key in a file.

    Raises:
        DatalensError: the file holds no Ed25519 key, or one that is protected by a passphrase.
    """
    private = _private_key(key)
    public = _strings(_KIND, private.public_key().public_bytes_raw())
    signature = _strings(_KIND, private.sign(_signed_data(message)))
    blob = _MAGIC + struct.pack(">I", 1) + _strings(public, NAMESPACE, b"", _HASH, signature)
    return _armoured(blob, 70)


def signer(message: bytes, signature: bytes) -> bytes:
    """Verify a signature of a message, and return the public key that made it (see `fingerprint`).

    Raises:
        DatalensError: the signature is damaged, was not made for datalens, or is of another message.
    """
    try:
        public = _check(message, signature)
    except (ValueError, struct.error) as error:
        raise DatalensError(f"it is not a valid signature ({error})") from error
    return public


def public_keys(path: Path) -> set[bytes]:
    """Return the keys in a file with one key per line, such as ~/.ssh/id_ed25519.pub or OpenSSH's allowed signers.

    Raises:
        DatalensError: the file cannot be read or holds no Ed25519 key, a key is damaged, or a line limits its key by
            options, which datalens does not support.
    """
    try:
        content = _read(path)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise DatalensError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MOST_BYTES:
        raise DatalensError(f"{path} is too long for a file of public keys: over {MOST_BYTES} bytes")
    keys = set()
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _key_on(words)
        except ValueError as error:
            raise DatalensError(f"line {number} of {path} {error}: remove or replace the line") from error
        keys |= set() if key is None else {key}
    if not keys:
        raise DatalensError(f"{path} holds no public key of type ssh-ed25519: make one with `ssh-keygen -t ed25519`")
    return keys


def _read(path: Path) -> bytes:
    """Return the first `MOST_BYTES` + 1 bytes of a file of keys, which may be a pipe or an endless device."""
    with open(path, "rb") as file:
        return file.read(MOST_BYTES + 1)


def _key_on(words: list[str]) -> bytes | None:
    """Return the key of a line "[PRINCIPALS] ssh-ed25519 KEY [comment]"; None for other types of keys, or no key."""
    kind = _KIND.decode()
    at = next((at for at, word in enumerate(words[:2]) if word == kind), None)
    if at is None:
        option = next((word for word in words[:-1] if _OPTION.match(word)), None)
        if option is not None and kind in words:
            raise ValueError(f"has the option {option[:40]}, which datalens does not support")
        return None
    if at == 1 and _OPTION.match(words[0]):
        raise ValueError(f"has the option {words[0][:40]}, which datalens does not support")
    try:
        blob = base64.b64decode("".join(words[at + 1 : at + 2]), validate=True)
        if _split(blob, 2)[0] != _KIND or len(blob) != 51:
            raise ValueError("its length is wrong")
    except (ValueError, struct.error) as error:
        raise ValueError("has a key that is damaged") from error
    return blob


def fingerprint(public: bytes) -> str:
    """Return a key's fingerprint, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(public).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class _Signature:
    """The parts of a signature."""

    public: bytes  # type and key, as OpenSSH writes them
    key: bytes
    law: bytes
    value: bytes


def check_form(signature: bytes) -> None:
    """Raise unless these bytes are one well-formed signature for datalens, and nothing else. It is not verified.

    Raises:
        DatalensError: they are something else, or there is more.
    """
    try:
        _parse(signature)
    except (ValueError, struct.error) as error:
        raise DatalensError(f"it is not a valid signature ({error})") from error


def _parse(signature: bytes) -> _Signature:
    if len(signature) > MOST_BYTES:
        raise ValueError("it is too long")
    lines = signature.splitlines()
    if lines[:1] != [_BEGIN] or lines[-1:] != [_END]:
        raise ValueError("it does not begin and end like an SSH signature")
    blob = base64.b64decode(b"".join(lines[1:-1]), validate=True)
    if signature not in (whole := _armoured(blob, len(lines[1])), whole[:-1]):
        raise ValueError("the file holds something besides the signature")
    if blob[:10] != _MAGIC + struct.pack(">I", 1):
        raise ValueError("its format is not version 1 of SSHSIG")
    public, namespace, reserved, law, signed = _split(blob[10:], 5)
    kind, key = _split(public, 2)
    signed_kind, value = _split(signed, 2)
    if (kind, signed_kind) != (_KIND, _KIND) or law not in (b"sha512", b"sha256"):
        raise ValueError("its key is not of type ssh-ed25519")
    if namespace != NAMESPACE:
        raise ValueError("it was not made for datalens: sign with -n datalens")
    if reserved or (len(key), len(value)) != (32, 64):
        raise ValueError("it holds something besides a signature")
    return _Signature(public=public, key=key, law=law, value=value)


def _armoured(blob: bytes, width: int) -> bytes:
    text = base64.b64encode(blob)
    return b"\n".join([_BEGIN, *(text[at : at + width] for at in range(0, len(text), max(width, 1))), _END, b""])


def _check(message: bytes, signature: bytes) -> bytes:
    _cryptography()
    from cryptography.exceptions import InvalidSignature

    parts = _parse(signature)
    try:
        _public_key(parts.key).verify(parts.value, _signed_data(message, law=parts.law))
    except InvalidSignature:
        raise ValueError("it was made for something else") from None
    return parts.public


def _signed_data(message: bytes, *, law: bytes = _HASH) -> bytes:
    return _MAGIC + _strings(NAMESPACE, b"", law, hashlib.new(law.decode(), message).digest())


def _strings(*parts: bytes) -> bytes:
    """Concatenate byte strings, each preceded by its length."""
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def _split(blob: bytes, count: int) -> list[bytes]:
    """Undo `_strings` for `count` byte strings. Raises ValueError if bytes are missing or left over."""
    parts = []
    for _ in range(count):
        (size,) = struct.unpack_from(">I", blob)
        if size > len(blob) - 4:
            raise ValueError("it was cut off")
        parts.append(blob[4 : 4 + size])
        blob = blob[4 + size :]
    if blob:
        raise ValueError("it has bytes after its end")
    return parts


def available() -> bool:
    """Return whether the package that checks signatures is installed."""
    return importlib.util.find_spec("cryptography") is not None


def _private_key(path: Path) -> Any:
    serialization, ed25519 = _cryptography()
    remedy = f"sign with `ssh-keygen -Y sign -n {NAMESPACE.decode()} -f {path} release/certificate.json`"
    try:
        key = serialization.load_ssh_private_key(_read(path), password=None)
    except OSError as error:
        raise DatalensError(f"cannot read {path}: {error.strerror}") from error
    except TypeError as error:  # it has a passphrase
        raise DatalensError(f"{path} has a passphrase, which datalens does not ask for: {remedy}") from error
    except Exception as error:  # ValueError, UnsupportedAlgorithm
        raise DatalensError(f"{path} is not a private key of OpenSSH that datalens can read: {remedy}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise DatalensError(f"{path} is not a key of type ssh-ed25519: make one with `ssh-keygen -t ed25519`")
    return key


def _public_key(key: bytes) -> Any:
    return _cryptography()[1].Ed25519PublicKey.from_public_bytes(key)


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise DatalensError("signatures need the package cryptography: pip install 'datalens[sign]'") from error
    return serialization, ed25519
