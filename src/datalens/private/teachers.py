"""The vectorised ensemble: N teacher discriminators, each trained on its own share (Algorithm 1, lines 7-11).

A teacher's row is a function of its own share, the fakes and a stream keyed by (seed, teacher, step). If a record is
deleted, or made NaN, the rows of all other teachers stay bit-identical, as a test checks.

All teachers' weights and Adam moments are tensors with a leading teacher dimension. They are processed in chunks, which
bounds the memory. Teachers that do not fit on the device are kept in host memory, and moved to the device and back
chunk by chunk.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.bounded.contributions import Gradients, Scores
from datalens.errors import DatalensError
from datalens.private import layers
from datalens.private.adam import adam_step
from datalens.private.networks import Network, Parameters, Taps
from datalens.private.shares import Shares
from datalens.public.triton import has_triton

ROOM_ON_CPU = 2**26  # bytes for one chunk: reading from the caches is several times faster
ROOM_ON_GPU = 0.8  # fraction of its memory: the rest is for the student, fragmentation, and errors of the estimates
LEAST_CHUNK = 16  # fewest teachers at a time on a GPU, unless fewer are asked for: see `plan_memory`

T = TypeVar("T")


class Fakes(Protocol):
    """Synthetic images that teachers are shown, [m, c, h, w] in [0, 1], and the labels they were made for."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


@dataclass
class _Bank:
    """Consecutive teachers: their weights and Adam's two moments, on the device or in host memory."""

    numbers: Tensor  # [n], on the device
    weights: Parameters = field(repr=False)
    mean: Parameters = field(repr=False)
    square: Parameters = field(repr=False)

    def tables(self) -> dict[str, Parameters]:
        return {"parameter": self.weights, "adam.mean": self.mean, "adam.square": self.square}


class Teachers:
    """The teachers of `shares`. Chunk sizes and the place of storage change no row beyond rounding."""

    def __init__(
        self,
        network: Network,
        shares: Shares,
        *,
        batch: int,
        learning_rate: float,
        weight_decay: float,
        seed: int,
        chunk: int | None = None,
        room: int | None = None,
    ) -> None:
        if shares.device.type == "cpu" and not (layers.rounds_alike() and layers.convolves_alike()):
            raise DatalensError(
                "on this CPU the last bits of a teacher would depend on memory addresses: import datalens before torch "
                "is used, or set MKL_CBWR=AUTO,STRICT"
            )
        self._network = network
        self._shares = shares
        self._batch = batch
        self._rate = learning_rate
        self._decay = weight_decay
        self._seed = seed
        self._updates = 0
        self._chunk_asked = chunk
        self._plan = plan_memory(
            shares.teachers, *network.bytes_per_teacher(batch), shares.device, chunk=chunk, room=room
        )
        self.chunk = self._plan.chunk
        numbers = torch.arange(shares.numbers.start, shares.numbers.stop, device=shares.device)
        on_device, elsewhere = numbers[: self._plan.resident], numbers[self._plan.resident :]
        self._banks = [self._bank(part, host) for part, host in ((on_device, False), (elsewhere, True)) if len(part)]

    @property
    def resident(self) -> int:
        """The number of teachers that stay on the device; the others are in host memory."""
        return self._plan.resident

    def fit_step(self, fakes: Fakes, *, step: int, repeats: int) -> float:
        """Make `repeats` Adam steps of every teacher against the same fakes; return the last mean loss (private!)."""
        fake = self._network.features(fakes.images.detach())

        def fit(chunk: _Chunk) -> Tensor:
            loss = torch.zeros(())
            for draw in range(repeats):
                rows, labels = self._shares.batch(
                    chunk.numbers, size=self._batch, seed=self._seed, step=step, draw=draw
                )
                loss = self._update(chunk, self._network.from_rows(rows), labels, fake, fakes.labels)
            return loss

        total = sum(self._in_chunks(fit))
        self._updates += repeats
        return float(total) / self._shares.teachers

    def image_gradients(self, fakes: Fakes, *, step: int) -> Iterator[Gradients]:
        """Yield the gradients that `rows` passes to a compressor, chunk by chunk."""
        return self.rows(fakes, lambda gradients: gradients, step=step)

    def rows(self, fakes: Fakes, compress: Callable[[Gradients], T], *, step: int) -> Iterator[T]:
        """Yield each chunk's compressed gradients ∂ log D(x)/∂x at the fakes, in the basis.

        The gradient is the direction in which a teacher finds a fake more real. `compress` is called with every chunk's
        gradients, in the thread that computed them.

        Differs from the paper: Algorithm 1 prints −∂ log D/∂a and then adds it to the image, which would move away from
        the data. What is meant is the direction that lowers the generator's loss.
        """
        fake = self._network.features(fakes.images.detach())

        def ask(chunk: _Chunk) -> T:
            n = len(chunk.numbers)
            inputs = fake.expand(n, *fake.shape).requires_grad_()
            logits = self._network.logits(chunk.weights, inputs, fakes.labels.expand(n, -1), [len(fake)])
            (slope,) = torch.autograd.grad(F.logsigmoid(logits).sum(), inputs)
            values = self._network.to_basis(slope)
            values = torch.where(self._shares.occupied(chunk.numbers).view(-1, 1, 1), values, 0.0)
            return compress(Gradients(teachers=chunk.numbers, values=values, step=step))

        yield from self._in_chunks(ask)

    def scores(self, fakes: Fakes) -> Iterator[Scores]:
        """Yield each teacher's logits of the fakes, chunk by chunk; NaN from a teacher without records."""
        fake = self._network.features(fakes.images.detach())

        def ask(chunk: _Chunk) -> Scores:
            n = len(chunk.numbers)
            with torch.no_grad():
                inputs, labels = fake.expand(n, *fake.shape), fakes.labels.expand(n, -1)
                logits = self._network.logits(chunk.weights, inputs, labels, [len(fake)])
            occupied = self._shares.occupied(chunk.numbers).view(-1, 1)
            return Scores(teachers=chunk.numbers, values=torch.where(occupied, logits, torch.nan))

        yield from self._in_chunks(ask)

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs. Derived from records: it never leaves the owner's machine."""
        state = {
            f"{kind}.{name}": torch.cat([bank.tables()[kind][name].cpu() for bank in self._banks])
            for kind, table in self._banks[0].tables().items()
            for name in table
        }
        return state | {"updates": torch.tensor(self._updates)}

    def state_bytes(self) -> int:
        """Return the size of `state` in bytes, without making it."""
        return sum(
            value.numel() * value.element_size()
            for bank in self._banks
            for table in bank.tables().values()
            for value in table.values()
        )

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._updates = int(state["updates"])
        start = 0
        for bank in self._banks:
            stop = start + len(bank.numbers)
            for kind, table in bank.tables().items():
                for name, value in table.items():
                    value.copy_(state[f"{kind}.{name}"][start:stop])
            start = stop

    def _bank(self, numbers: Tensor, host: bool) -> _Bank:
        """Return new teachers, made chunk by chunk. Initial values are a function of the teacher's number."""
        bank = _Bank(numbers, {}, {}, {})
        for start in range(0, len(numbers), self.chunk):
            part = self._network.parameters(numbers[start : start + self.chunk], self._seed)
            for name, value in part.items():
                if start == 0:
                    for table in bank.tables().values():
                        table[name] = _zeros((len(numbers), *value.shape[1:]), value, host=host)
                bank.weights[name][start : start + self.chunk] = value
        return bank

    def _update(
        self,
        chunk: "_Chunk",
        real: Tensor,
        labels: Tensor,
        fake: Tensor,
        fake_labels: Tensor,
    ) -> Tensor:
        """Make one Adam step, which is elementwise and mixes no teachers. Weight decay is Adam's L2 term."""
        n, b, m, updates = len(labels), labels.shape[1], len(fake), self._updates + chunk.draws
        # On a GPU the gradient of the largest weights is never in memory: Adam computes it from its two factors.
        outer = self._network.outer if layers.can_update_outer(fake, b + m) else ()
        leaves = {name: value.detach().requires_grad_(name not in outer) for name, value in chunk.weights.items()}
        taps: Taps = {}
        both = torch.cat([real, fake.expand(n, *fake.shape)], dim=1)
        all_labels = torch.cat([labels, fake_labels.expand(n, -1)], dim=1)
        logits = self._network.logits(leaves, both, all_labels, [b, m], taps)
        real_weight, fake_weight = matching_weights(labels, fake_labels)
        # −log D(x) − log(1 − D(G(z))): a mean over the batch and a sum over teachers, which keeps gradients separate.
        loss = -(real_weight * F.logsigmoid(logits[:, :b])).sum() - (fake_weight * F.logsigmoid(-logits[:, b:])).sum()
        inner = [name for name in leaves if name not in outer]
        gradients = torch.autograd.grad(loss, [leaves[name] for name in inner] + [taps[name][1] for name in outer])
        adam_step(
            [chunk.weights[name] for name in inner],
            list(gradients[: len(inner)]),
            [chunk.mean[name] for name in inner],
            [chunk.square[name] for name in inner],
            updates=updates,
            rate=self._rate,
            decay=self._decay,
        )
        for name, slope in zip(outer, gradients[len(inner) :], strict=True):
            tables = chunk.weights[name], chunk.mean[name], chunk.square[name]
            tap = taps[name][0].detach(), slope
            layers.update_outer(tap, *tables, updates=updates, rate=self._rate, decay=self._decay)
        chunk.draws += 1
        return loss.detach()

    def _in_chunks(self, work: "Callable[[_Chunk], T]") -> Iterator[T]:
        """Yield the results of `work` on one chunk of teachers after the other.

        Each chunk is moved to the device and, if it has learned, back. On a CPU with several threads, several chunks
        run at a time, each in one thread: small products gain little from a second thread, and the rounding of a
        teacher's row must not depend on the number of threads.
        """
        if self._shares.device.type == "cpu" and torch.get_num_threads() > 1:
            yield from self._side_by_side(work, threads=torch.get_num_threads())
            return
        for bank in self._banks:
            start = 0
            while start < len(bank.numbers):
                chunk = self._chunk_of(bank, start)
                try:
                    result = self._done(chunk, work)
                except torch.OutOfMemoryError:
                    self._make_do_with_less(learned=chunk.draws > 0)
                    continue
                yield result
                start += self.chunk

    def _side_by_side(self, work: "Callable[[_Chunk], T]", *, threads: int) -> Iterator[T]:
        """Yield the results in the order of the teachers. Only few chunks run ahead of the consumer."""
        places = ((bank, start) for bank in self._banks for start in range(0, len(bank.numbers), self.chunk))
        running: deque[Future[T]] = deque()
        torch.set_num_threads(1)  # in this thread too, until all are done: no core is idle
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for bank, start in places:
                    if len(running) == 2 * threads:
                        yield running.popleft().result()
                    running.append(pool.submit(self._done, self._chunk_of(bank, start), work))
                while running:
                    yield running.popleft().result()
        finally:
            torch.set_num_threads(threads)

    def _chunk_of(self, bank: _Bank, start: int) -> "_Chunk":
        """Return a chunk that shares the bank's memory, from `start` on.

        It uses `.data`. Otherwise all chunks would share torch's version counter, and a thread's backward pass would
        mistake the update of another chunk for one of its own inputs.
        """
        part = slice(start, start + self.chunk)
        weights, mean, square = ({k: v.data[part] for k, v in table.items()} for table in bank.tables().values())
        return _Chunk(bank.numbers[part], weights, mean, square)

    def _done(self, kept: "_Chunk", work: "Callable[[_Chunk], T]") -> T:
        """Do `work` on a chunk, moved to the device, and write back what it learned."""
        device = self._shares.device
        weights, mean, square = ({k: v.to(device) for k, v in table.items()} for table in kept.tables().values())
        chunk = _Chunk(kept.numbers, weights, mean, square)
        try:
            result = work(chunk)
        finally:
            kept.draws = chunk.draws
        if chunk.draws:
            for name, table in kept.tables().items():
                for key, value in chunk.tables()[name].items():
                    if value.device != table[key].device:  # on the same device it is the same memory
                        table[key].copy_(value)
        return result

    def _make_do_with_less(self, *, learned: bool) -> None:
        """Halve the chunk after running out of memory, or raise.

        Raises:
            DatalensError: the user chose the chunk, it cannot be smaller, or the chunk had learned something already.
        """
        least = LEAST_CHUNK if self._shares.device.type == "cuda" else 1
        if self._chunk_asked is not None or learned or self.chunk <= least:
            fits = min(self._plan.largest, max(1, self.chunk // 2))
            raise DatalensError(
                f"out of GPU memory with {self.chunk} teachers at a time: --chunk {fits} should fit"
                + ("; or leave --chunk out, and it is chosen" if self._chunk_asked is not None else "")
            )
        self.chunk = _rounded(self.chunk // 2)
        torch.cuda.empty_cache()


@dataclass
class _Chunk(_Bank):
    """A slice of a bank. `draws` counts the updates it has had in the current work."""

    draws: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The division of teachers into chunks, and the number of teachers that stay on the device."""

    chunk: int  # teachers processed at a time
    resident: int  # teachers whose weights and moments stay on the device; the others are in host memory
    largest: int  # the largest chunk that should fit


def plan_memory(
    teachers: int, state: int, work: int, device: torch.device, *, chunk: int | None = None, room: int | None = None
) -> MemoryPlan:
    """Return the size of chunks, and how many teachers stay on the device.

    How much memory is free on a device depends on the number of records. With our kernels a row is the same, bit for
    bit, in any chunk of sixteen teachers or a multiple. So a chunk that is chosen by free memory is never smaller than
    that. Without the kernels the last bits of a row could depend on the chunk, so its size follows from public facts
    alone.

    Args:
        teachers: How many there are.
        state: Bytes of one teacher's state.
        work: Bytes that one teacher needs while it is trained.
        device: Where they are trained.
        chunk: The chunk that the user asks for.
        room: Bytes that may be used. By default most of a GPU, or `ROOM_ON_CPU`.
    """
    if device.type == "cpu":
        largest = _rounded(min(teachers, (room or ROOM_ON_CPU) // work))
        return MemoryPlan(chunk=min(chunk or largest, teachers), resident=teachers, largest=largest)
    least = min(teachers, LEAST_CHUNK)
    if room is None:
        free, total = torch.cuda.mem_get_info(device)
        room = int(ROOM_ON_GPU * (free if has_triton() else total))
    if teachers * state + min(teachers, 100) * work <= room:
        largest = max(least, _rounded(min(teachers, (room - teachers * state) // work)))
        return MemoryPlan(chunk=min(chunk or largest, teachers), resident=teachers, largest=largest)
    # A quarter is for the chunk that is processed, three quarters for teachers that stay.
    largest = max(least, _rounded(min(teachers, room // 4 // (state + work))))
    chunk = min(chunk or largest, teachers)
    resident = max(0, room - chunk * (state + work)) // state // chunk * chunk
    return MemoryPlan(chunk=chunk, resident=min(resident, teachers), largest=largest)


def _rounded(teachers: int) -> int:
    """Round down to a multiple of sixteen teachers. Such chunks begin and end at whole vectors, so all round alike."""
    return max(1, teachers if teachers < LEAST_CHUNK else teachers // LEAST_CHUNK * LEAST_CHUNK)


def matching_weights(labels: Tensor, fake_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of real [n, b] and fake [n, m] images that give both the same distribution of labels per teacher.

    A share of a few records lacks most classes. With equal weights a teacher would learn "class 7 is always fake", and
    vote accordingly. The authors' code instead draws each teacher's fakes for the labels of its own records. Weighting
    the shared fakes has the same effect without generating N batches. The weights depend only on the teacher's own
    share, so teachers remain independent.
    """
    same = labels.unsqueeze(2) == fake_labels  # [n, b, m]
    alike = (fake_labels.unsqueeze(1) == fake_labels).sum(dim=1)  # [m]: fakes with this fake's label
    batch = labels.shape[1]
    return same.any(dim=2) / batch, same.sum(dim=1) / (alike * batch)


def _zeros(shape: tuple[int, ...], like: Tensor, *, host: bool) -> Tensor:
    if not host:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    try:
        return torch.zeros(shape, dtype=like.dtype, pin_memory=True)  # pinned: copies to and from the device are fast
    except RuntimeError:  # the system allows no more locked memory
        return torch.zeros(shape, dtype=like.dtype)
