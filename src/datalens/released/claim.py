"""A parsed release, as `checks` sees it, and the versions of certificates that can be checked."""

import re
from dataclasses import dataclass
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.plans.base import Settings
from datalens.privacy.events import Event
from datalens.privacy.ledger import Budget
from datalens.released.certificate import VERSION
from datalens.released.publication import Publication
from datalens.released.weights import Weights

FIRST = 2  # the version of certificates that datalens 0.1.0 wrote; version 1 was never released


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The parts of a release, parsed: what it claims, and what it contains."""

    certificate: dict[str, Any]
    settings: Settings
    schema: Schema
    budget: Budget
    events: tuple[Event, ...]
    spent: float
    weights: Weights
    published: Publication | None = None

    @property
    def version(self) -> int:
        return self.certificate["version"]


def check_version(certificate: dict[str, Any]) -> None:
    """Raise unless this datalens can check the certificate's version, and its writer writes that version.

    Version 2 states less, so a release of a datalens that writes version 3 must not use it. (Run from a source tree,
    0.1.0 wrote "not installed" for its own version.)

    Raises:
        DatalensError: the version is unknown, was never released, or is not the writer's.
    """
    version = certificate.get("version")
    if type(version) is not int or not FIRST <= version <= VERSION:
        older = "was never released" if type(version) is int and version < FIRST else "is not known to this datalens"
        raise DatalensError(f"it is a certificate of version {str(version)[:20]}, which {older}")
    writer = str(certificate["versions"]["datalens"])
    number = re.match(r"\D*(\d+)\.?(\d*)", writer, re.ASCII)
    if version == FIRST and number and (int(number[1]), int(number[2] or 0)) >= (0, 2):
        raise DatalensError(f"it is a certificate of version {FIRST}, which datalens {writer[:40]} does not write")
