"""`datalens sign`: sign a release."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.cli.output import release_of, show
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Sign a release with an SSH key, so that others can tell who vouches for its certificate."""

    run: Positional[Path]
    """A run folder, or a release folder alone."""
    key: Path
    """A private key of OpenSSH, ssh-ed25519, such as ~/.ssh/id_ed25519."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.released.certificate import CERTIFICATE, SIGNATURE
        from datalens.released.signing import fingerprint, sign, signer
        from datalens.released.verification import check_release

        release = release_of(self.run)
        if problems := check_release(release).problems:
            raise DatalensError(f"the certificate of {self.run} does not stand, and was not signed: {problems[0]}")
        message = (release / CERTIFICATE).read_bytes()
        signature = sign(message, self.key.expanduser())
        write_atomically(release / SIGNATURE, signature)
        key = fingerprint(signer(message, signature))
        fields = {"signature": str(release / SIGNATURE), "key": key}
        show(fields, [f"{release / SIGNATURE}: signed by {key}"], json=self.json)
        return 0
