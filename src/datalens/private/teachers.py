"""The vectorised ensemble: N teacher discriminators, each trained on its own share (Algorithm 1, lines 7-11).

A teacher's row is a function of its own share, the fakes and a stream keyed by (seed, teacher, step).
Deleting a record, or making it NaN, leaves every other teacher's row bit-identical: a test says so.

All teachers' weights and Adam moments are tensors with a leading teacher dimension. They are worked on in chunks
that bound the memory; what does not fit on the device lies in host memory, and goes there and back chunk by chunk.
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

ROOM_ON_CPU = 2**26  # for the work on one chunk: what stays in the caches is read several times as fast
ROOM_ON_GPU = 0.8  # of its memory: the rest is for the student, what is left over between blocks, and estimates
LEAST_CHUNK = 16  # teachers at a time on a GPU, unless somebody asks for fewer: see `plan_memory`

T = TypeVar("T")


class Fakes(Protocol):
    """What teachers are shown: images [m, c, h, w] in [0, 1] and the labels they were made for."""

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
    """The teachers of `shares`. How they are chunked, and where they lie, changes no row beyond rounding."""

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
                "on this CPU a teacher's last bits would depend on where its numbers lie in memory: import datalens "
                "before torch is used, or set MKL_CBWR=AUTO,STRICT"
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
        """How many teachers stay on the device; the others lie in host memory."""
        return self._plan.resident

    def fit_step(self, fakes: Fakes, *, step: int, repeats: int) -> float:
        """`repeats` Adam steps of every teacher against the same fakes; returns the last one's mean loss (private!)."""
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
        """Return what `rows` hands to a compressor, chunk by chunk."""
        return self.rows(fakes, lambda gradients: gradients, step=step)

    def rows(self, fakes: Fakes, compress: Callable[[Gradients], T], *, step: int) -> Iterator[T]:
        """∂ log D(x)/∂x at each fake: the direction in which the teacher finds it more real, in the basis.

        `compress` is called on every chunk's gradients, in the thread that made them.

        Differs from the paper: Algorithm 1 prints −∂ log D/∂a and then adds it to the image, which would
        walk away from the data. The direction that lowers the generator's loss is meant.
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
        """How real each teacher finds each fake: its logit; NaN from a teacher without records."""
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
        """Everything a checkpoint needs. Derived from records: it never leaves the owner's machine."""
        state = {
            f"{kind}.{name}": torch.cat([bank.tables()[kind][name].cpu() for bank in self._banks])
            for kind, table in self._banks[0].tables().items()
            for name in table
        }
        return state | {"updates": torch.tensor(self._updates)}

    def state_bytes(self) -> int:
        """The size of `state`, without making it."""
        return sum(
            value.numel() * value.element_size()
            for bank in self._banks
            for table in bank.tables().values()
            for value in table.values()
        )

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._updates = int(state["updates"])
        start = 0
        for bank in self._banks:
            stop = start + len(bank.numbers)
            for kind, table in bank.tables().items():
                for name, value in table.items():
                    value.copy_(state[f"{kind}.{name}"][start:stop])
            start = stop

    def _bank(self, numbers: Tensor, host: bool) -> _Bank:
        """Fresh teachers, made chunk by chunk: start values are a function of the teacher's number."""
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
        """One Adam step. It is elementwise, so teachers do not meet in it; weight decay is Adam's L2 term."""
        n, b, m, updates = len(labels), labels.shape[1], len(fake), self._updates + chunk.draws
        # On a GPU the gradient of the largest weights is not written to memory: Adam makes it from its two factors.
        outer = self._network.outer if layers.can_update_outer(fake, b + m) else ()
        leaves = {name: value.detach().requires_grad_(name not in outer) for name, value in chunk.weights.items()}
        taps: Taps = {}
        both = torch.cat([real, fake.expand(n, *fake.shape)], dim=1)
        all_labels = torch.cat([labels, fake_labels.expand(n, -1)], dim=1)
        logits = self._network.logits(leaves, both, all_labels, [b, m], taps)
        real_weight, fake_weight = matching_weights(labels, fake_labels)
        # −log D(x) − log(1 − D(G(z))), a mean over the batch, a sum over teachers: their gradients stay apart.
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
        """`work` on one chunk of teachers after the other, each brought to the device and, if it learned, back.

        On a CPU with several threads, so many chunks at a time, each in one thread: products as small as a teacher's
        gain little from a second one, and what a teacher's row is rounded to does not depend on the threads.
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
        """Results in the order of the teachers; few chunks run ahead of whoever takes them."""
        places = ((bank, start) for bank in self._banks for start in range(0, len(bank.numbers), self.chunk))
        running: deque[Future[T]] = deque()
        torch.set_num_threads(1)  # in this thread too, until all are done: there are no cores left for more
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
        """The bank's own memory, from `start` on.

        By `.data`: else all chunks would share one count of changes, and a thread's backward pass would take the
        update of another chunk for one of its own.
        """
        part = slice(start, start + self.chunk)
        weights, mean, square = ({k: v.data[part] for k, v in table.items()} for table in bank.tables().values())
        return _Chunk(bank.numbers[part], weights, mean, square)

    def _done(self, kept: "_Chunk", work: "Callable[[_Chunk], T]") -> T:
        """`work` on a chunk on the device; what it learned goes to where the chunk is kept."""
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
                    if value.device != table[key].device:  # else it is the same memory
                        table[key].copy_(value)
        return result

    def _make_do_with_less(self, *, learned: bool) -> None:
        """After running out of memory: half the chunk, if it was ours to choose and nothing was learned halfway."""
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
    """A slice of a bank, on the device. `draws`: how many updates it has had since it came."""

    draws: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    chunk: int  # teachers worked on at a time
    resident: int  # teachers whose weights and moments stay on the device; the others lie in host memory
    largest: int  # the largest chunk that should fit


def plan_memory(
    teachers: int, state: int, work: int, device: torch.device, *, chunk: int | None = None, room: int | None = None
) -> MemoryPlan:
    """From a teacher's bytes of state and of work: chunks, and how many teachers stay on the device.

    What is free on a device depends on the number of records. With our kernels a row is the same, bit for bit, in any
    chunk of sixteen or a multiple, so a chunk that is chosen by what is free is never smaller; without them chunks
    could decide its last bits, so they are sized by public facts alone.
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
    # A quarter works, three quarters keep.
    largest = max(least, _rounded(min(teachers, room // 4 // (state + work))))
    chunk = min(chunk or largest, teachers)
    resident = max(0, room - chunk * (state + work)) // state // chunk * chunk
    return MemoryPlan(chunk=chunk, resident=min(resident, teachers), largest=largest)


def _rounded(teachers: int) -> int:
    """Chunks of a multiple of sixteen teachers begin and end at whole vectors: all of them are read alike."""
    return max(1, teachers if teachers < LEAST_CHUNK else teachers // LEAST_CHUNK * LEAST_CHUNK)


def matching_weights(labels: Tensor, fake_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of real [n, b] and fake [n, m] images under which both have the same labels, teacher by teacher.

    A share of a few records misses most classes. Weighted evenly, a teacher would learn "class 7 is always fake"
    and vote with that; the authors' code draws each teacher's fakes for the labels of its own records instead.
    Weighting the shared fakes does the same without generating N batches. Own share only: independence holds.
    """
    same = labels.unsqueeze(2) == fake_labels  # [n, b, m]
    alike = (fake_labels.unsqueeze(1) == fake_labels).sum(dim=1)  # [m]: fakes with this fake's label
    batch = labels.shape[1]
    return same.any(dim=2) / batch, same.sum(dim=1) / (alike * batch)


def _zeros(shape: tuple[int, ...], like: Tensor, *, host: bool) -> Tensor:
    if not host:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    try:
        return torch.zeros(shape, dtype=like.dtype, pin_memory=True)  # copies to and from the device run at full speed
    except RuntimeError:  # the system allows no more locked memory
        return torch.zeros(shape, dtype=like.dtype)
