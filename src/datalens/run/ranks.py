"""Runs with several processes (ranks): `torchrun --nproc-per-node=2 -m datalens train …`.

Rank 0 leads: it has the run folder, the ledger, the noise and the only student. The others have teachers, or records,
and answer. Without torchrun the world is one process, and nothing here communicates.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from datalens import progress
from datalens.errors import DatalensError, SaidElsewhere

T = TypeVar("T")

# A process that ends closes its connections, and the others notice at once. This timeout is for a machine that
# vanishes; it must exceed the longest wait, which is for the rank that reads the records most slowly.
PATIENCE = timedelta(minutes=30)


class World:
    """One of `size` ranks: this process. All ranks call the same methods in the same order."""

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._on_device: dist.ProcessGroup | None = None  # nccl; what is on the CPU goes by gloo

    @classmethod
    def start(cls, device: str) -> "World":
        """Connect the ranks that torchrun started; without torchrun, return a world of one process.

        Args:
            device: auto, cpu or cuda.

        Raises:
            DatalensError: the others cannot be reached, or there is no such device.
        """
        world = cls(rank=int(os.environ.get("RANK", "0")), size=ranks())
        if world.size > 1:
            progress.console.quiet = world.rank > 0
            try:
                store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
                store = dist.PrefixStore(_meet(store, rank, size), store)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
            except (RuntimeError, ValueError) as error:
                raise DatalensError(f"rank {world.rank} cannot reach the others ({_first_line(error)})") from error
        world.device = world.together(lambda: _device(device, sharing=world.size > 1))
        world.agree({"device": world.device.type})
        if world.size > 1 and world.device.type == "cuda":
            torch.cuda.set_device(world.device)
            world._on_device = dist.new_group(backend="nccl", timeout=PATIENCE)
        return world

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # After an error the connections stay open until the process ends: when they close, the others know that the
        # error was printed.
        if self.size > 1 and error is None:
            dist.destroy_process_group()
        if self.rank > 0 and isinstance(error, KeyboardInterrupt):
            raise SaidElsewhere("stopped", exit_code=130) from error

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def numbers(self, teachers: int, *, rank: int | None = None) -> range:
        """Return the numbers of the teachers of this rank, or another: consecutive, and as even as possible."""
        rank = self.rank if rank is None else rank
        each, more = divmod(teachers, self.size)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    # --- agreement, before and outside the training loop ------------------------------------------

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on every rank, and return this rank's result.

        If it fails on one rank, all stop and rank 0 reports the error, so that no rank waits for another forever.

        Raises:
            DatalensError: on rank 0, if the work failed on any rank.
            SaidElsewhere: on other ranks, in the same case.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        reports = [json.loads(report) for report in self.gather(json.dumps(_report(failure)).encode())]
        failed = [(rank, *report) for rank, report in enumerate(reports) if report]
        if not failed:
            return result
        if failure is not None and not isinstance(failure, DatalensError | OSError):
            raise failure  # a bug: the traceback tells more than one line
        rank, message, code = failed[0]
        if self.leads:
            # An error of all ranks is reported without a rank.
            where = "" if len(failed) == self.size else f"rank {rank}: "
            raise DatalensError(f"{where}{message}", exit_code=code) from failure
        self._wait_for_the_leader_to_end()
        raise SaidElsewhere(message, exit_code=code) from failure

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise unless all ranks have the same facts; the message names the first that differs. Facts are public."""
        mine = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
        everybody = [json.loads(fact) for fact in self.gather(json.dumps(mine).encode())]
        self.together(functools.partial(_compare, everybody))

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
        """Return the bytes of every rank, by rank, on every rank. `width`: their length, if all have the same."""
        if self.size == 1:
            return [data]
        widths = [width] * self.size
        if width is None:
            lengths = self._all_gather(torch.tensor([len(data)]))
            widths = [int(length) for length in lengths]
        longest = max(w for w in widths if w is not None)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        return [bytes(part.numpy()[:w]) for part, w in zip(self._all_gather(padded), widths, strict=True)]

    # --- communication in every step of the training loop -----------------------------------------

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Replace the tensor, in place, by that of rank 0. Nothing private is sent this way."""
        if self.size > 1:
            with self._lost_ranks_explained():
                dist.broadcast(tensor, src=0, group=self._group(tensor))
        return tensor

    def send(self, data: bytes = b"") -> bytes:
        """Return the bytes that rank 0 gives, on every rank. Nothing private is sent this way."""
        length = int(self.broadcast(torch.tensor([len(data)])))
        content = torch.frombuffer(bytearray(data if self.leads else length), dtype=torch.uint8)
        return self.broadcast(content).numpy().tobytes()

    def add(self, tensor: Tensor) -> Tensor | None:
        """Return the sum over ranks on rank 0, and None on the others. The argument is not changed."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        with self._lost_ranks_explained():
            dist.reduce(total, dst=0, group=self._group(total))
        return total if self.leads else None  # on other ranks its value is undefined

    # --- implementation ---------------------------------------------------------------------------

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        everybody = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._lost_ranks_explained():
            dist.all_gather(everybody, tensor)
        return everybody

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._on_device if tensor.is_cuda else None

    @contextlib.contextmanager
    def _lost_ranks_explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo and nccl raise it when a connection closes
            message = "another rank has ended, or cannot be reached: its own message says why; continue with --resume"
            raise (DatalensError(message) if self.leads else SaidElsewhere(message)) from error

    def _wait_for_the_leader_to_end(self) -> None:
        """Wait until rank 0 has printed the error and ended: torchrun ends all ranks as soon as one has failed."""
        with contextlib.suppress(RuntimeError):
            dist.broadcast(torch.zeros(1), src=0)  # never sent: it raises when the connection closes


def _meet(store: dist.Store, rank: int, size: int) -> str:
    """Return a name for this start of the ranks, the same on all of them and never used before.

    torchrun keeps one store over its restarts, in which the addresses of earlier processes remain. So every rank puts a
    random word of its own into the store, and takes the name that is stored as the answer to this word.
    """
    if rank > 0:
        word = secrets.token_hex(16)
        store.set(f"datalens/hello/{rank}", word)
        name = store.get(f"datalens/welcome/{word}").decode()  # waits for it
        store.set(f"{name}/{rank}", "here")
        return name
    name = f"datalens/{secrets.token_hex(16)}"
    missing, answered = set(range(1, size)), set()
    end = time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"datalens/hello/{other}"]):
                word = store.get(f"datalens/hello/{other}").decode()
                if word not in answered:  # it may be that of an earlier process; then nobody reads the answer
                    store.set(f"datalens/welcome/{word}", name)
                    answered.add(word)
            if store.check([f"{name}/{other}"]):
                missing.remove(other)
        if time.monotonic() > end:
            raise RuntimeError(f"rank {min(missing)} did not connect")
        time.sleep(0.005)
    return name


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM. torchrun sends them to all ranks; rank 0 handles them, and the others follow it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ranks() -> int:
    """Return how many processes torchrun has started for this run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch() -> str | None:
    """Return an identifier of this call of torchrun, by which its restarts recognise the run that it began.

    A job with a name (--rdzv-id, --standalone) is identified by it, on whichever machine rank 0 is. Without a name, a
    restart has the same parent process. None without torchrun.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    if name == "none":
        name = f"{socket.gethostname()} {os.getppid()}"
    return hashlib.sha256(name.encode()).hexdigest()


def restarted(begun_by: str | None) -> bool:
    """Return whether this process is a restart, by torchrun itself, of the call `begun_by` (see `launch`)."""
    named = os.environ.get("TORCHELASTIC_RUN_ID") != "none"
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return begun_by is not None and begun_by == launch() and (named or again)


def choose_device(name: str) -> torch.device:
    """Return the device that auto, cpu or cuda means on this machine."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DatalensError("there is no CUDA device: use --device cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _device(name: str, *, sharing: bool) -> torch.device:
    """Return the device of this rank: several ranks on a machine have a GPU each."""
    device = choose_device(name)
    if device.type == "cpu" or not sharing:
        return device
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if here > gpus:
        raise DatalensError(
            f"there are {here} ranks on this machine, and {gpus} GPU: use --nproc-per-node={gpus}, or --device cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _report(failure: Exception | None) -> list[Any] | None:
    """Return message and exit code of a failure, for the other ranks."""
    if failure is None:
        return None
    if isinstance(failure, DatalensError):
        return [str(failure), failure.exit_code]
    if isinstance(failure, OSError):
        return [f"{failure.filename or 'a file'}: {failure.strerror or failure}: check space and permissions", 2]
    return [f"{type(failure).__name__}: {_first_line(failure)}", 1]


def _compare(everybody: list[dict[str, str]]) -> None:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise DatalensError(
                    f"ranks disagree on {name}: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}; "
                    "start all of them with the same options and the same version"
                )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
