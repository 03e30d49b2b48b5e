"""Trials that detect models and collate functions that mix records.

One row of a batch is changed, or left out, and all other rows of the output must stay the same. The price of DP-SGD is
for a sum of rows, each computed from one record. If a model subtracts the mean of its batch, or a collate function
blends records, every row depends on all records, and one record moves the sum further than is charged for. A trial
looks at a few rows, and once at all of a batch: it finds such code where it runs, and is no proof that there is none.
Nothing of a trial is released.

A layer's gradients are separated by the first dimension of what goes into it. If that is time, say, each row is of one
moment of all records, and as long as there are as many moments as records, nothing else looks wrong. So a trial also
counts what goes into every layer.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate

from datalens.errors import DatalensError
from datalens.gradients.watching import StateWatch

ROWS, PLACE = 7, 3  # rows of a trial, and the one that is changed. Fewer tensors have a dimension of 7 than one of 8.
SEEDS = (0, 1, 2)  # several, since what is blended with what may be random
# Differences that are tolerated, relative to the typical size of an output: in batches of one size, and where rounding
# may differ.
SAME, NEAR = 1e-4, 1e-2
FLOOR = 1e-3  # least typical size, unless all numbers are smaller


# Opacus separates their gradients by itself, whatever goes into them.
RECURRENT = (DPRNN, DPLSTM, DPGRU, RNNLinear)

Given = Callable[[], Any]  # makes the input of a run, anew for each run


class CannotTell(Exception):
    """The trial has no result: no output has one row per record, or the model could not be run."""


def try_model(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise if a model, in its current mode, mixes records.

    Args:
        model: The model.
        arguments: Positional arguments of a call.
        named: Named arguments.

    Raises:
        DatalensError: it mixes records, or a layer's first dimension is not the records.
        CannotTell: it cannot be tried.
    """
    count = next((len(leaf) for leaf in tree_leaves((arguments, named)) if _is_row(leaf)), 0)
    if count < 2:
        raise CannotTell("fewer than two rows")

    rows = min(count, ROWS)
    place = min(PLACE, rows - 1)

    def cut(part: slice, change: bool = False, most: int = rows) -> Any:
        def taken(leaf: Any) -> Any:
            if not _is_row(leaf, count):
                return leaf
            selected = leaf.detach()[:most][part].clone()  # a copy, since a model may write into its input
            if change:
                selected[place] = _another(selected, place)
            return selected

        return tree_map(taken, (arguments, named))

    def whole() -> Any:
        return cut(slice(None))

    def run(given: Any) -> Any:
        with torch.no_grad():
            return model(*given[0], **given[1])

    def everything(change: bool = False) -> Any:
        return cut(slice(None), change, count)

    tried = rows
    try:
        _check_first_dimensions(model, run, {rows: whole, rows - 1: lambda: cut(slice(1, None))})
        moved = _moved(run, whole, lambda: cut(slice(None), change=True), rows, place)
        if not moved and count > rows:  # it may mix in larger batches only
            tried = count
            moved = _moved(run, everything, lambda: everything(change=True), count, place, SEEDS[:1])
        if not moved and not _rounds_coarsely(model):
            with _without_dropout(model):
                moved, tried = _shifted(run, whole, lambda: cut(slice(1, None)), rows, 0), rows
    except (DatalensError, CannotTell):
        raise
    except Exception as error:  # the model is called in another way, or not with so few rows
        raise CannotTell(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    if moved:
        raise DatalensError(
            f"the model mixes records: in a batch of {tried}, its output for one record changed when another "
            f"{moved}, so one record would change the rows of all; no layer may combine entries of the first "
            "dimension, or use its length"
        )


def try_batch(model: nn.Module, batch: Any) -> None:
    """Do the trial on the first part of a batch, which is how most models are called. The model is left unchanged.

    Raises:
        DatalensError: the model mixes records, or changes its own state.
        CannotTell: it cannot be tried.
    """
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
    """Try the loader's collate function, and return a small batch and a remark for the user (empty for torch's own).

    Raises:
        DatalensError: the collate function mixes records.
    """
    collate, count = loader.collate_fn, len(loader.dataset)  # type: ignore[arg-type]
    with _seeded(0):
        items = [loader.dataset[place] for place in range(min(count, ROWS + 1))]
    records = items[:ROWS]
    if collate is default_collate:
        return collate(records), ""
    name = getattr(collate, "__qualname__", type(collate).__name__)
    if len(items) < 2:
        return None, f"the collate function {name} could not be tried with so few records: make sure that it mixes none"
    fresh = items[-1] if len(items) > ROWS else None
    moved = ""
    try:
        for place in range(len(records)):  # all of them: any may be the longest, to which the others are padded
            before, after = records[:place], records[place + 1 :]
            other = [*before, records[place - 1] if fresh is None else fresh, *after]
            whole: Given = functools.partial(list, records)
            moved = moved or _moved(collate, whole, functools.partial(list, other), len(records), place)
            moved = moved or _shifted(collate, whole, functools.partial(list, before + after), len(records), place)
    except CannotTell:
        return None, f"the collate function {name} makes batches that cannot be read: make sure that it mixes none"
    if moved:
        raise DatalensError(
            f"the collate function {name} mixes records: what it makes of one changed when another {moved}, so one "
            "record would change the rows of all; blend or pad nothing by other records of the batch"
        )
    with _seeded(0):
        batch = collate(list(records))
    return batch, f"the collate function {name} mixed no records in a trial; make sure that it never does"


# --- two runs, compared ----------------------------------------------------------------------------------------------


def _moved(
    run: Callable[[Any], Any], whole: Given, other: Given, count: int, place: int, seeds: tuple[int, ...] = SEEDS
) -> str:
    """Return what happened, if other rows moved when one row was changed; else "".

    Both runs have the same random numbers, and so the same dropout.
    """
    rest = [row for row in range(count) if row != place]
    for seed in seeds:
        first, again, changed = (_rows(run, given(), seed, count) for given in (whole, whole, other))
        if _far(first, again, NEAR):
            raise DatalensError(
                "a batch does not come out twice the same with the same random seeds, so there can be no trial whether "
                "records are mixed: draw random numbers from torch's, numpy's or Python's global generator"
            )
        if _far(
            [part[rest] for part in first], [part[rest] for part in changed], NEAR if _far(first, again, SAME) else SAME
        ):
            return "was changed"
    return ""


def _shifted(run: Callable[[Any], Any], whole: Given, shorter: Given, count: int, place: int) -> str:
    """Return what happened, if other rows moved when one row was left out, which changes positions and the length.

    Not tried where rows are random.
    """
    rest = [row for row in range(count) if row != place]
    before, drawn = (_rows(run, whole(), seed, count) for seed in SEEDS[:2])
    if _far(before, drawn, SAME):
        return ""
    after = _rows(run, shorter(), SEEDS[0], count - 1)
    return "was left out" if _far([part[rest] for part in before], after, NEAR) else ""


def _check_first_dimensions(model: nn.Module, run: Callable[[Any], Any], batches: dict[int, Given]) -> None:
    """Raise if a layer that learns does not have the records as its first dimension.

    Args:
        model: The model.
        run: Runs it.
        batches: By number of records. Of two numbers, at most one is that of something else. Fewer records than in the
            first one may be too few for the model, which is no reason to refuse it.
    """
    turned = ""
    for number, (count, given) in enumerate(batches.items()):
        with contextlib.suppress(Exception) if number else contextlib.nullcontext():
            turned = turned or _turned(model, run, given, count)
    if turned:
        raise DatalensError(
            f"{turned}, and gradients are separated by the first dimension: make it the records in every layer that "
            "learns, or freeze the layer"
        )


def _turned(model: nn.Module, run: Callable[[Any], Any], given: Given, count: int) -> str:
    """Return which layer that learns gets another number of rows than there are records; else ""."""
    found: list[str] = []

    def look(name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if isinstance(first, Tensor) and (first.dim() == 0 or len(first) != count):
            got = len(first) if first.dim() else "no"
            found.append(f"layer {name or 'model'} ({type(layer).__name__}) gets {got} rows for {count} records")

    hooks = [
        layer.register_forward_pre_hook(lambda layer, arguments, name=name: look(name, layer, arguments))
        for name, layer in model.named_modules()
        if not isinstance(layer, RECURRENT) and any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    try:
        with _seeded(SEEDS[0]):
            run(given())
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""


def _rows(run: Callable[[Any], Any], given: Any, seed: int, count: int) -> list[Tensor]:
    """Return the outputs of a run that have one row per record."""
    with _seeded(seed):
        leaves = tree_leaves(run(given))
    arrays = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    outputs = [leaf.detach() for leaf in arrays if _is_row(leaf, count)]
    if not outputs:
        raise CannotTell("no output has one row per record")
    return outputs


def _far(first: list[Tensor], second: list[Tensor], limit: float) -> bool:
    """Return whether two outputs differ in shape, or by more than `limit` times their typical size."""
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
    """Return the typical size of each output: its largest magnitude over the rows.

    It is separate for each output, so that a class masked by -1e9 hides no differences in the others. It is at most the
    largest magnitude that differs at all: if each record has its own mask, every output may be masked in some row. It
    is at least the lowest decile of the differing magnitudes, and at least `FLOOR` unless all numbers are smaller:
    values that should be 0 are rounded too.
    """
    sizes = x.abs().where(x.isfinite(), 0)
    differing = sizes[x != y].sort().values
    if not len(differing):
        return sizes
    least = differing[len(differing) // 10].clamp(min=FLOOR)
    return sizes.amax(0).clamp(max=differing[-1]).clamp(min=least).clamp(max=sizes.max())


def _is_row(leaf: Any, count: int | None = None) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and count in (None, len(leaf))


def _another(rows: Tensor, place: int) -> Tensor:
    """Return a row that differs from the one at `place`. For integers and booleans it is a row that occurs."""
    original = rows[place]
    if rows.is_floating_point() or rows.is_complex():
        return original + 1 + 10 * original.abs()
    return next((row for row in rows if not torch.equal(row, original)), original)


def _rounds_coarsely(model: nn.Module) -> bool:
    """Return whether the model uses half precision.

    Then batches of different lengths may be rounded so differently that it cannot be told from mixing.
    """
    halves = (torch.float16, torch.bfloat16)
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return autocast or any(p.dtype in halves for p in model.parameters())


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn dropout off. Masks are drawn for a whole batch: with a row left out, all others would get other masks."""
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
    """Seed the global generators, and restore them afterwards. No privacy noise is drawn from them."""
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
