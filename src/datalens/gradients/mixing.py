"""Whether records are mixed, by trial: one row of a batch is changed, or left out, and no other row may move.

A price is for a sum of rows, each made of one record. A model that subtracts the mean of its batch, or a collate
function that blends records, makes every row depend on all: one record then moves the sum further than is paid for. A
trial sees what happens to a few rows: it finds such code where it runs, and is no proof. Nothing of it is released.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate

from datalens.errors import DatalensError
from datalens.gradients.watching import StateWatch

ROWS, PLACE = 7, 3  # of a trial, and the one that is changed; 7: fewer things than with 8 happen to have as many rows
SEEDS = (0, 1, 2)  # what is blended with what may be drawn
SAME, NEAR = 1e-4, 1e-2  # of what is usual in an output: in batches of one size, and where rounding may differ
FLOOR = 1e-3  # what is usual is no less, unless all numbers are


Given = Callable[[], Any]  # what a run is given, each time anew


class CannotTell(Exception):
    """Nothing in the output has one row a record, or there was no output."""


def try_model(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a model that mixes records, in the mode in which it is. Raises `CannotTell` if it cannot be tried."""
    count = next((len(leaf) for leaf in tree_leaves((arguments, named)) if _is_row(leaf)), 0)
    if count < 2:
        raise CannotTell("fewer than two rows")

    rows = min(count, ROWS)
    place = min(PLACE, rows - 1)

    def cut(part: slice, change: bool = False) -> Any:
        def taken(leaf: Any) -> Any:
            if not _is_row(leaf, count):
                return leaf
            mine = leaf.detach()[:rows][part].clone()  # a model may write into what it is given
            if change:
                mine[place] = _another(mine, place)
            return mine

        return tree_map(taken, (arguments, named))

    def whole() -> Any:
        return cut(slice(None))

    def run(given: Any) -> Any:
        with torch.no_grad():
            return model(*given[0], **given[1])

    try:
        moved = _moved(run, whole, lambda: cut(slice(None), change=True), rows, place)
        if not moved and not _rounds_coarsely(model):
            with _without_dropout(model):
                moved = _shifted(run, whole, lambda: cut(slice(1, None)), rows, 0)
    except (DatalensError, CannotTell):
        raise
    except Exception as error:  # not called like this, or not with so few rows
        raise CannotTell(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    if moved:
        raise DatalensError(
            f"the model mixes records: in a batch of {rows}, its output for one record moved when another "
            f"{moved}, so one record would move the rows of all; no layer may look across the first dimension, or at "
            "its length"
        )


def try_batch(model: nn.Module, batch: Any) -> None:
    """The same at the start, with the first part of a batch, as most models are called; they are left as they were."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    device = next(model.parameters()).device
    watch = StateWatch(model)
    try:
        try_model(model, (first.to(device) if isinstance(first, Tensor) else first,), {})
    finally:
        changed = watch.changed()
        if changed is not None:
            watch.restore()
    if changed is not None:
        watch.refuse(changed)


def try_collate(loader: DataLoader[Any]) -> tuple[Any, str]:
    """A small batch, and what to say of a collate function that is not torch's; refuse one that mixes records."""
    collate, count = loader.collate_fn, len(loader.dataset)  # type: ignore[arg-type]
    with _seeded(0):
        items = [loader.dataset[place] for place in range(min(count, ROWS + 1))]
    records = items[:ROWS]
    if collate is default_collate:
        return collate(records), ""
    name = getattr(collate, "__qualname__", type(collate).__name__)
    if len(items) < 2:
        return None, f"the collate function {name} was not tried, for want of records: that it mixes none is yours"
    fresh = items[-1] if len(items) > ROWS else None
    moved = ""
    try:
        for place in range(len(records)):  # each: it may be the longest, to which others are padded
            before, after = records[:place], records[place + 1 :]
            other = [*before, records[place - 1] if fresh is None else fresh, *after]
            whole: Given = functools.partial(list, records)
            moved = moved or _moved(collate, whole, functools.partial(list, other), len(records), place)
            moved = moved or _shifted(collate, whole, functools.partial(list, before + after), len(records), place)
    except CannotTell:
        return None, f"the collate function {name} makes batches that are not read here: that it mixes none is yours"
    if moved:
        raise DatalensError(
            f"the collate function {name} mixes records: what it makes of one moved when another {moved}, so one "
            "record would move the rows of all; blend or pad nothing by what else is in the batch"
        )
    with _seeded(0):
        batch = collate(list(records))
    return batch, f"the collate function {name} mixed no records in a trial; that it never does is yours to keep"


# --- two runs, compared ----------------------------------------------------------------------------------------------


def _moved(run: Callable[[Any], Any], whole: Given, other: Given, count: int, place: int) -> str:
    """What happened, if rows moved when one was changed. The same randomness in both runs, so dropout is the same."""
    rest = [row for row in range(count) if row != place]
    for seed in SEEDS:
        first, again, changed = (_rows(run, given(), seed, count) for given in (whole, whole, other))
        if _far(first, again, NEAR):
            raise DatalensError(
                "a batch does not come out twice the same with the same random numbers, so it cannot be tried whether "
                "records are mixed: draw from torch's, numpy's or Python's global generator"
            )
        if _far(
            [part[rest] for part in first], [part[rest] for part in changed], NEAR if _far(first, again, SAME) else SAME
        ):
            return "was changed"
    return ""


def _shifted(run: Callable[[Any], Any], whole: Given, shorter: Given, count: int, place: int) -> str:
    """The same when one was left out, which moves places and the length. Not tried where rows are random."""
    rest = [row for row in range(count) if row != place]
    before, drawn = (_rows(run, whole(), seed, count) for seed in SEEDS[:2])
    if _far(before, drawn, SAME):
        return ""
    after = _rows(run, shorter(), SEEDS[0], count - 1)
    return "was left out" if _far([part[rest] for part in before], after, NEAR) else ""


def _rows(run: Callable[[Any], Any], given: Any, seed: int, count: int) -> list[Tensor]:
    with _seeded(seed):
        leaves = tree_leaves(run(given))
    arrays = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    found = [leaf.detach() for leaf in arrays if _is_row(leaf, count)]
    if not found:
        raise CannotTell("no output has one row a record")
    return found


def _far(first: list[Tensor], second: list[Tensor], limit: float) -> bool:
    """Whether two outputs differ by more than `limit` of what is usual there, or in shape."""
    if [part.shape for part in first] != [part.shape for part in second]:
        return True
    for a, b in zip(first, second, strict=True):
        x, y = a.to(torch.complex128), b.to(torch.complex128)
        if x.numel() == 0:
            continue
        same = (x == y) | (x.isnan() & y.isnan())
        if not (same | ((x - y).abs() <= limit * _scale(x, y))).all():
            return True
    return False


def _scale(x: Tensor, y: Tensor) -> Tensor:
    """The largest number of each output over the rows, so that a class masked by -1e9 hides nothing of the others.

    No larger than the largest number that differs at all: where each record has its own mask, every output may have one
    in some row. No smaller than a tenth of the differing numbers are, or than `FLOOR`, unless all numbers are smaller:
    what should be 0 is rounded too.
    """
    sizes = x.abs().where(x.isfinite(), 0)
    differing = sizes[x != y].sort().values
    if not len(differing):
        return sizes
    usual = differing[len(differing) // 10].clamp(min=FLOOR)
    return sizes.amax(0).clamp(max=differing[-1]).clamp(min=usual).clamp(max=sizes.max())


def _is_row(leaf: Any, count: int | None = None) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and count in (None, len(leaf))


def _another(rows: Tensor, place: int) -> Tensor:
    """A row that is certainly another, and for whole numbers and truth values one that occurs."""
    mine = rows[place]
    if rows.is_floating_point() or rows.is_complex():
        return mine + 1 + 10 * mine.abs()
    return next((row for row in rows if not torch.equal(row, mine)), mine)


def _rounds_coarsely(model: nn.Module) -> bool:
    """In half precision a batch of another length may be rounded otherwise, by more than can be told from mixing."""
    halves = (torch.float16, torch.bfloat16)
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return autocast or any(p.dtype in halves for p in model.parameters())


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Masks are drawn for a whole batch: with a row left out, all others would have another."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators begin at `seed`, and afterwards are where they were. No noise is ever drawn here."""
    python, array = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
