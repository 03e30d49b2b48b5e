"""Compressors, mechanisms and methods of other packages, found by entry points (docs/extending.md).

A package declares them in its pyproject.toml, in the groups datalens.compressors, datalens.mechanisms and
datalens.methods. `--compress`, `--mechanism` and `--method` then accept their names. Built-in names take precedence: a
plug-in cannot replace them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, get_args

from datalens.errors import DatalensError

if TYPE_CHECKING:
    from torch import Tensor

CompressName = Literal["topk-sign", "sign", "topk", "klevel", "sketch"]
COMPRESSORS: tuple[CompressName, ...] = get_args(CompressName)  # the built-in ones
Group = Literal["compressors", "mechanisms", "methods"]
OPTIONS: dict[Group, str] = {"compressors": "--compress", "mechanisms": "--mechanism", "methods": "--method"}


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """Turns one teacher's gradient into its row. The bound is enforced on every row, whatever `row` returns.

    Attributes:
        row: (gradient [m, d], uniforms in [0, 1) [m, d], settings) → [m, cells]. It is mapped over the teachers, so it
            sees no other teacher. It must not draw random numbers: the uniforms are the only randomness.
        l2_bound: settings → the largest norm of a row over a whole batch. Public; the noise is calibrated to it.
        cells: settings → number of cells of a row, for each of the m images; None: as many as coordinates.
        whole_numbers: whether rows are integers, which get exact noise; else they are floats.
        unpack: (released sum [m, cells], settings) → directions [m, d]; None: the sum is the directions.
    """

    row: "Callable[[Tensor, Tensor, Any], Tensor]"
    l2_bound: "Callable[[Any], float]"
    cells: "Callable[[Any], int] | None" = None
    whole_numbers: bool = True
    unpack: "Callable[[Tensor, Any], Tensor] | None" = None


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The object that an entry point names, and the package that brings it."""

    value: Any
    owner: str  # package and version


def available(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    return {entry.name: entry for entry in entry_points(group=f"datalens.{group}")}


def named(group: Group, name: str, *, ours: tuple[str, ...]) -> Plugin:
    """Return the plug-in of this name.

    Args:
        ours: the built-in names, for the error message.

    Raises:
        DatalensError: there is none of this name, or it cannot be loaded.
    """
    entries = available(group)
    if name not in entries:
        raise DatalensError(
            f"{OPTIONS[group]} {name} is unknown (known: {', '.join((*ours, *sorted(entries))) or 'none'}): choose "
            "another, or install the package that brings it"
        )
    entry = entries[name]
    package = "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    try:
        return Plugin(value=entry.load(), owner=package)
    except Exception as error:  # importing another package's module may raise anything
        raise DatalensError(f"{OPTIONS[group]} {name} of {package} cannot be loaded ({error})") from error


def compressor(name: str) -> tuple[Compressor, str]:
    """Return the compressor of this name, and the package that brings it."""
    plugin = named("compressors", name, ours=COMPRESSORS)
    if not isinstance(plugin.value, Compressor):
        raise DatalensError(f"--compress {name} of {plugin.owner} is not a datalens.plans.plugins.Compressor")
    return plugin.value, plugin.owner


def mechanism(name: str) -> tuple[Callable[..., Any], str]:
    """Return the mechanism of this name, and the package that brings it.

    A mechanism is called with (sigma, noise), and returns an object with `release`, as in privacy/mechanisms.py.
    """
    plugin = named("mechanisms", name, ours=())
    if not callable(plugin.value):
        raise DatalensError(f"--mechanism {name} of {plugin.owner} cannot be called with sigma and noise")
    return plugin.value, plugin.owner
