"""Compressors, mechanisms and methods that other packages bring, by entry points (docs/extending.md).

A package names them in its pyproject.toml, in the groups datalens.compressors, datalens.mechanisms, datalens.methods:
`--compress`, `--mechanism` and `--method` then know the name. What is ours goes first: a plug-in cannot take its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, get_args

from datalens.errors import DatalensError

if TYPE_CHECKING:
    from torch import Tensor

CompressName = Literal["topk-sign", "sign", "topk", "klevel", "sketch"]
COMPRESSORS: tuple[CompressName, ...] = get_args(CompressName)  # ours
Group = Literal["compressors", "mechanisms", "methods"]
OPTIONS: dict[Group, str] = {"compressors": "--compress", "mechanisms": "--mechanism", "methods": "--method"}


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """From one teacher's gradient to its row; the bound is enforced on every row, whatever `row` returns.

    row: (gradient [m, d], uniforms in [0, 1) [m, d], settings) → [m, cells]. It is mapped over the teachers, so it can
    neither see another teacher nor loop over them; it draws nothing itself: the uniforms are all the randomness it has.
    l2_bound: how long a row over a whole batch can be. Public, and what the noise is paid by.
    whole_numbers: rows are integers, and get exact noise; else they are floats.
    unpack: from the released sum [m, cells] back to directions [m, d], where that is not the same.
    """

    row: "Callable[[Tensor, Tensor, Any], Tensor]"
    l2_bound: "Callable[[Any], float]"
    cells: "Callable[[Any], int] | None" = None  # default: as many as coordinates
    whole_numbers: bool = True
    unpack: "Callable[[Tensor, Any], Tensor] | None" = None


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What was found, and whose it is."""

    value: Any
    owner: str  # package and version


def available(group: Group) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"datalens.{group}")}


def named(group: Group, name: str, *, ours: tuple[str, ...]) -> Plugin:
    """The plug-in of this name, or an error that lists what there is."""
    found = available(group)
    if name not in found:
        raise DatalensError(
            f"{OPTIONS[group]} {name} is unknown: there are {', '.join((*ours, *sorted(found))) or 'none'}; choose "
            "one, or install the package that brings it"
        )
    entry = found[name]
    package = "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    try:
        return Plugin(value=entry.load(), owner=package)
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise DatalensError(f"{OPTIONS[group]} {name} of {package} cannot be loaded ({error})") from error


def compressor(name: str) -> tuple[Compressor, str]:
    found = named("compressors", name, ours=COMPRESSORS)
    if not isinstance(found.value, Compressor):
        raise DatalensError(f"--compress {name} of {found.owner} is no datalens.plans.plugins.Compressor")
    return found.value, found.owner


def mechanism(name: str) -> tuple[Callable[..., Any], str]:
    """(sigma, noise) → something with `release`, as in privacy/mechanisms.py."""
    found = named("mechanisms", name, ours=())
    if not callable(found.value):
        raise DatalensError(f"--mechanism {name} of {found.owner} cannot be called with sigma and noise")
    return found.value, found.owner
