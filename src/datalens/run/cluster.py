"""Sums over records on a cluster, by Dask: workers read the records and bound their rows; this process gets sums only.

A part of the records is read by one worker, which keeps its rows (`HeldPart`). Every release asks each part for its
bounded sum; sums are joined on the workers, and the last joins are checked and released here. If a worker dies, Dask
computes its parts again elsewhere. A part's sum is the same wherever and whenever it is computed, and names the part,
so none can be counted twice (`bounded.parts`).
"""

import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.parts import PartSum, join, whole
from datalens.data import formats
from datalens.data.parts import Part
from datalens.data.records import Dataset, draw, those
from datalens.errors import DatalensError, one_line
from datalens.private.moments import RecordRows, View, stored_type
from datalens.private.shares import FINGERPRINT_MODULUS, Rows
from datalens.progress import bar
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released.certificate import versions

TOGETHER = 16  # sums that one task joins
SECONDS_TO_CONNECT = 10
SECONDS_WITHOUT_WORKERS = 60.0  # workers may be restarting
PIECES_OF_A_WORKER = 4  # of data that is not in files of its own
INSTALL = "pip install 'datalens[cluster]'"


# --- on workers -------------------------------------------------------------------------------------------------------


class HeldPart:
    """One part of the records. Its rows are in a file of the worker that needs them first.

    Rows never leave the worker: a copy of this object, which Dask sends or saves, has none and reads the part again.
    """

    def __init__(self, part: Part, coordinates: int) -> None:
        self.part, self._size = part, coordinates
        self._rows: RecordRows | None = None
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldPart, (self.part, self._size)

    def rows(self) -> RecordRows:
        """Return the part's rows. To be called in a task."""
        with self._reading:
            if self._rows is None:
                self._rows = self._read()
            return self._rows

    def _read(self) -> RecordRows:
        import distributed

        torch.set_num_threads(1)  # Dask decides how many tasks run side by side
        folder = Path(distributed.get_worker().local_directory)
        shape = self.part.schema.shape
        return RecordRows.gather(
            formats.open_part(self.part),
            basis=make_basis("opponent", shape, self._size),
            texture=Texture(shape),
            folder=folder if folder.is_dir() else None,
            memory=0,
            shown=False,
        )

    def facts(self) -> "Facts":
        rows = self.rows()
        return Facts(count=rows.count, fingerprint=rows.fingerprint, hashes=rows.hashes)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a part that the driver knows besides its sums. Private."""

    count: int = field(repr=False)  # Dask writes arguments of tasks that fail to its log
    fingerprint: int = field(repr=False)
    hashes: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The arguments of one release: what is asked of every part. They were released before, or are public."""

    kind: str  # a method of RecordRows
    view: str
    of_view: Mapping[str, Any] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)

    def of(self, rows: RecordRows) -> BoundedSum:
        view = partial(getattr(rows, self.view), **self.of_view)
        total: BoundedSum = getattr(rows, self.kind)(view, **self.options)
        return total


def _sum(held: HeldPart, ask: Ask, facts: Facts) -> PartSum:
    torch.set_num_threads(1)
    rows = held.rows()
    if (rows.count, rows.fingerprint) != (facts.count, facts.fingerprint):
        raise DatalensError(f"{held.part.name} has changed since it was read: put back what was there, then --resume")
    return PartSum(total=ask.of(rows), parts=(held.part.number,), records=rows.count)


def _versions() -> dict[str, str]:
    import dask
    import distributed

    ours = {name: versions()[name] for name in ("datalens", "torch")}
    dasks = {"dask": dask.__version__, "distributed": distributed.__version__}
    return ours | dasks | {"numpy": np.__version__, "Python": platform.python_version()}


# --- on the driver ----------------------------------------------------------------------------------------------------


def check_options(options: Mapping[str, Any]) -> bool:
    """Return whether a cluster was asked for.

    Raises:
        DatalensError: the options about it contradict each other.
    """
    scheduler, workers = options.get("scheduler"), options.get("workers")
    if options.get("engine") is None:
        for name, value in (("scheduler", scheduler), ("workers", workers)):
            if value is not None:
                raise DatalensError(f"--{name} is for a cluster: add --engine dask, or leave it out")
        return False
    if (scheduler is None) == (workers is None):
        raise DatalensError("--engine dask needs either --scheduler tcp://…, or --workers 4 to use this machine only")
    if options.get("skip_unreadable"):
        raise DatalensError("--skip-unreadable is for one process: leave --engine out, or mend the images first")
    if workers is not None and workers < 1:
        raise DatalensError(f"--workers must be at least 1, not {workers}")
    return True


class ClusterRows:
    """All records, on the workers of a cluster: for training the same as `RecordRows`."""

    def __init__(self, client: Any, parts: Sequence[Part], coordinates: int) -> None:
        self._client, self._parts, self._releases = client, parts, 0
        schema, self._token = parts[0].schema, f"{time.time_ns():x}"
        self._empty = _no_rows(parts[0], coordinates)
        # One graph for all parts: a message to the scheduler for each would take longer than all else here.
        keys = [f"datalens-part-{part.number}-{self._token}" for part in parts]
        self._held = client.map(HeldPart, parts, [coordinates] * len(parts), key=keys)
        keys = [f"datalens-facts-{part.number}-{self._token}" for part in parts]
        read = client.map(HeldPart.facts, self._held, key=keys)
        self._facts: list[Facts] = self._results(read, f"reading {schema.name}")
        self.count = sum(facts.count for facts in self._facts)
        self.fingerprint = sum(facts.fingerprint for facts in self._facts) % FINGERPRINT_MODULUS
        if schema.by_person:
            check_persons_whole(self._facts, parts)

    def coordinates(self, stored: Tensor) -> Tensor:
        return self._empty.coordinates(stored)

    def texture(self, stored: Tensor, *, centre: Tensor, white: Tensor) -> Tensor:
        return self._empty.texture(stored, centre=centre, white=white)

    def histogram(self, view: View, **options: Any) -> BoundedSum:
        return self._sum("histogram", view, options)

    def sums(self, view: View, **options: Any) -> BoundedSum:
        return self._sum("sums", view, options)

    def covariances(self, view: View, **options: Any) -> BoundedSum:
        return self._sum("covariances", view, options)

    def _sum(self, kind: str, view: View, options: dict[str, Any]) -> BoundedSum:
        """Return the sum over all parts, after checking that each is in it once, and that it is not too long."""
        of_view = getattr(view, "keywords", {})
        name = getattr(view, "func", view).__name__
        ask = Ask(kind=kind, view=name, of_view=of_view, options=options)
        self._releases += 1
        key = f"{kind}-{self._releases}-{self._token}"
        # The arguments are a task of their own: they are sent to each worker once.
        sent = self._client.submit(_itself, ask, key=f"datalens-ask-{key}")
        level: list[Any] = []
        for worker, numbers in self._holders().items():
            level += self._client.map(
                _sum,
                [self._held[number] for number in numbers],
                [sent] * len(numbers),
                [self._facts[number] for number in numbers],
                key=[f"datalens-sum-{number}-{key}" for number in numbers],
                workers=worker and [worker],  # which has the rows; another would read them again
                allow_other_workers=worker is not None,
            )
        everything, height = list(level), 0
        while len(level) > 1:
            groups = [level[start : start + TOGETHER] for start in range(0, len(level), TOGETHER)]
            level = [
                self._client.submit(join, group, key=f"datalens-join-{height}-{number}-{key}")
                for number, group in enumerate(groups)
            ]
            everything, height = everything + level, height + 1
        (joined,) = self._results(level, "", watched=everything)
        try:
            return whole(joined, like=ask.of(self._empty), parts=len(self._parts), records=self.count)
        except ValueError as error:
            raise DatalensError(f"the sum of the workers is wrong, and nothing was released: {error}") from None

    def _holders(self) -> dict[str | None, list[int]]:
        """Return the parts whose rows each worker has; None: those that no worker has any more."""
        found: dict[str | None, list[int]] = {}
        who_has = self._client.who_has(self._held)
        for number, held in enumerate(self._held):
            found.setdefault(next(iter(who_has.get(held.key, ())), None), []).append(number)
        return found

    def _results(self, futures: list[Any], saying: str, watched: list[Any] | None = None) -> list[Any]:
        return results(self._client, futures, saying, watched=watched, charged=self._releases > 0)


def results(
    client: Any, futures: list[Any], saying: str, *, watched: list[Any] | None = None, charged: bool = False
) -> list[Any]:
    """Return the results of tasks; raise the error of the first of them that failed.

    Args:
        client: of the cluster.
        futures: the tasks.
        saying: what the progress bar says; "": none is shown.
        watched: all tasks that may fail; by default `futures`.
        charged: whether the run has charged anything by now, which decides what to do after a failure.
    """
    import distributed

    def mend(what: str) -> str:
        return f"charges are kept: {what}, then --resume" if charged else f"{what}, then run the same line again"

    last_seen, before = time.monotonic(), 0
    with bar(saying, len(futures), shown=bool(saying)) as (progress, task):
        while True:
            with contextlib.suppress(TimeoutError, distributed.CancelledError):
                distributed.wait(futures, timeout=1)
            done = sum(future.status == "finished" for future in futures)
            progress.advance(task, done - before)
            before = done
            if done == len(futures):
                gathered: list[Any] = client.gather(futures)
                return gathered
            for future in watched or futures:
                if future.status == "error":
                    raise explained(future.exception(), mend) from None
                if future.status == "cancelled":  # "lost" is what a dead worker had: it is computed again
                    raise DatalensError(
                        f"the connection to the scheduler was lost ({future.key}); {mend('start it again')}"
                    )
            if workers_of(client) != []:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > SECONDS_WITHOUT_WORKERS:
                raise DatalensError(f"no worker is left; {mend('start some')}")


def explained(error: BaseException, mend: Callable[[str], str]) -> DatalensError:
    """Return the error of a task as one line. `mend`: completes what to do next."""
    if isinstance(error, DatalensError):
        return error
    if type(error).__name__ == "KilledWorker":
        return DatalensError(
            "several workers have died while reading or summing the same part, perhaps for want of memory; "
            + mend("give them more, or make smaller parts")
        )
    return DatalensError(f"a worker failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")


def each(client: Any, work: Callable[..., Any], parts: Sequence[Part], *more: Sequence[Any], saying: str) -> list[Any]:
    """Return what the workers' calls of `work(part, …)` return, in the order of the parts.

    Args:
        client: of the cluster.
        work: a function of a module.
        parts: of the records.
        more: further arguments, one for each part.
        saying: what the progress bar says.
    """
    return results(client, client.map(work, parts, *more, pure=False), saying)


def load(client: Any, parts: Sequence[Part], *, most: int | None = None, seed: int = 0) -> Dataset:
    """Return the records of all parts in memory, read and decoded by the workers: what `records.collect` returns.

    Args:
        client: of the cluster.
        parts: of the records, with their schema.
        most: the most records to return, drawn at random; None: all.
        seed: of the draw.
    """
    name = parts[0].schema.name
    found = each(client, _positions, parts, saying=f"counting {name}")
    sizes = [len(positions) for positions in found]
    if parts[0].file is not None:  # positions are those within the file
        found = [start + np.arange(size) for start, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False)]
    stream = np.argsort(np.concatenate(found))  # numbers among the records of all parts, in the order of the stream
    if not len(stream):
        raise DatalensError(f"{name} has no record here: check the files")
    drawn = stream[draw(len(stream), len(stream) if most is None else most, seed)]
    chosen = np.zeros(len(stream), bool)
    chosen[drawn] = True
    wanted = np.split(chosen, np.cumsum(sizes)[:-1])
    read = each(client, _read_part, parts, wanted, saying=f"reading {name}")
    at = (np.cumsum(chosen) - 1)[drawn]
    images, labels = (np.concatenate([one[i] for one in read])[at] for i in (0, 1))
    return Dataset(schema=parts[0].schema, images=images, labels=labels, fixed_positions=False)


def _positions(part: Part) -> np.ndarray:
    """Return the positions of the records of a part, without decoding them."""
    found = [np.zeros(0, np.int64)]

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        found.append(index)
        return np.full(len(index), -1, dtype=np.int64)

    for _ in formats.open_part(part).blocks(choose):
        pass
    return np.concatenate(found)


def _read_part(part: Part, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of the records of a part whose entry in `wanted` is true."""
    shape = (0, part.schema.height, part.schema.width, part.schema.channels)
    images, labels = [np.zeros(shape, np.uint8)], [np.zeros(0, np.int64)]
    for block in formats.open_part(part).blocks(those(np.flatnonzero(wanted))):
        images.append(block.images)
        labels.append(block.labels)
    return np.concatenate(images), np.concatenate(labels)


def gather(
    options: Mapping[str, Any], parts: Callable[[int], list[Part]], coordinates: int, closing: Any
) -> ClusterRows:
    """Have the workers read all parts of the records.

    Args:
        options: scheduler and workers.
        parts: returns the parts, given the number of pieces into which data without files of its own is cut.
        coordinates: how many low-frequency coordinates a row has.
        closing: an ExitStack, which closes the connection.

    Raises:
        DatalensError: there is no such cluster, it does not fit this process, or a part cannot be read.
    """
    client = closing.enter_context(connected(options))
    return ClusterRows(client, parts(pieces(client)), coordinates)


def pieces(client: Any) -> int:
    """Return into how many parts data without files of its own is cut."""
    return PIECES_OF_A_WORKER * max(1, len(workers_of(client) or []))


@contextlib.contextmanager
def if_asked(options: Mapping[str, Any]) -> Iterator[Any]:
    """Connect to the cluster that the options name (see `connected`); None: they name none."""
    if not check_options(options):
        yield None
        return
    with connected(options) as client:
        yield client


@contextlib.contextmanager
def connected(options: Mapping[str, Any]) -> Iterator[Any]:
    """Connect to the scheduler, or start workers on this machine; check that workers are like this process."""
    try:
        import dask
        import distributed
    except ImportError:
        raise DatalensError(f"--engine dask needs Dask: {INSTALL}") from None
    address, workers = options.get("scheduler"), options.get("workers")
    quiet = {"logging.distributed": "critical", "distributed.admin.large-graph-warning-threshold": "1GB"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(quiet))
        for name in ("distributed", "distributed.client", "distributed.scheduler", "distributed.nanny"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if workers is not None:
            # TLS with a key of its own: whoever could reach a worker could run code there.
            local = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                security=True,
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
            )
            client = stack.enter_context(distributed.Client(stack.enter_context(local)))
        else:
            try:
                client = distributed.Client(address, timeout=SECONDS_TO_CONNECT)
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                why = type(error).__name__ if isinstance(error, TimeoutError) else one_line(error)[:150]
                raise DatalensError(
                    f"there is no scheduler at {address} ({why}): start one with `dask scheduler`, and name the "
                    "address that it prints"
                ) from None
            stack.enter_context(client)
        try:
            check_workers(client, address)
            yield client
        except distributed.comm.CommClosedError as error:
            raise DatalensError(
                f"the connection to the scheduler or to a worker was lost ({one_line(error)[:150]}): see that they "
                "run, then run the same line again, with --resume if there is a run folder"
            ) from None


def workers_of(client: Any) -> list[str] | None:
    """Return the addresses of all workers; None if the scheduler does not answer.

    The scheduler is asked: what `client.scheduler_info` remembers is now and then without any worker.
    """
    try:
        return list(client.nthreads())
    except (OSError, TimeoutError):
        return None


def check_workers(client: Any, address: str | None) -> None:
    """Raise unless there are workers, with the package, and in the versions of this process.

    Arithmetic of other versions may round differently, so that a part would not be the same wherever it is computed.
    """
    import importlib.util

    import distributed

    if workers_of(client) == []:
        raise DatalensError(f"the scheduler at {address} has no workers: start some with `dask worker {address}`")
    try:
        found = client.run(importlib.util.find_spec, "datalens")
        missing = next((worker for worker, spec in found.items() if spec is None), None)
    except ModuleNotFoundError:
        missing = "one of them"
    if missing is not None:
        raise DatalensError(f"the workers lack datalens ({missing}): {INSTALL} in their environment, too")
    ours = _versions()
    try:
        everyone = client.run(_versions)
    except distributed.comm.CommClosedError:
        raise
    except Exception as error:  # whatever another version of the package raises when it is asked
        raise DatalensError(
            f"the workers have another version of datalens ({' '.join(str(error).split())[:100]}): install the same "
            "version everywhere"
        ) from None
    for worker, theirs in everyone.items():
        different = next((name for name in ours if theirs.get(name) != ours[name]), None)
        if different is not None:
            raise DatalensError(
                f"worker {worker} has {different} {theirs.get(different)}, and this process {ours[different]}: install "
                "the same versions everywhere"
            )


def check_persons_whole(facts: Sequence[Facts], parts: Sequence[Part]) -> None:
    """Raise if a person has records in two parts: their row must be bounded as one, where all of them are."""
    known = [(part, one.hashes) for one, part in zip(facts, parts, strict=True) if one.hashes is not None]
    every = np.concatenate([hashes for _, hashes in known]) if known else np.zeros(0, "V16")
    values, counts = np.unique(every, return_counts=True)
    if len(values) == len(every):
        return
    twice = values[counts > 1][:1]
    names = [part.name for part, hashes in known if np.isin(twice, hashes).any()]
    raise DatalensError(
        f"a person has records in {names[0]} and in {names[1]}: put all records of a person into one part "
        "(docs/cluster.md)"
    )


def _itself(ask: Ask) -> Ask:
    return ask


def _no_rows(part: Part, coordinates: int) -> RecordRows:
    """Return rows of no records, whose sums have the same shape and bounds as those of the workers."""
    shape = part.schema.shape
    width, cpu = make_basis("opponent", shape, coordinates).size + Texture(shape).size, torch.device("cpu")
    nobody = torch.zeros(0, dtype=torch.int64)
    return RecordRows(
        Rows(torch.Size([width]), stored_type(part.schema), cpu, capacity=0),
        nobody,
        coordinates=coordinates,
        fingerprint=0,
        persons=nobody if part.schema.by_person else None,
    )
