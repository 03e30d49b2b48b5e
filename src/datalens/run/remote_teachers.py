"""The teachers of all ranks. Rank 0 gives orders; every rank, including rank 0, carries them out on its own teachers.

So a method reads as if there were one machine. This module fixes the order in which the ranks communicate:

| rank 0 calls | it sends | every rank | rank 0 gets |
|---|---|---|---|
| `fit_step` | the order with the labels, and the fakes | trains its teachers | the mean loss (private, for the owner) |
| `votes` | the order | bounds and sums its teachers' votes | the sum over all teachers, checked |
| `save` | the order | writes its teachers' states | the names of the files, once all are on disk |
| `restore` | the order, and names of files | reads its teachers' states | |
| `dismiss` | the order | ends | |
"""

import enum
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum, Contributions, Gradients, sum_bounded, sum_over_ranks
from datalens.files import save_tensors
from datalens.run.folder import load_part, part_name
from datalens.run.ranks import World, ignoring_signals


class Fakes(Protocol):
    """Synthetic images that teachers are shown. They belong to the released side, so any rank may see them."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def step(self) -> int: ...


class Teachers(Protocol):
    """The teachers of one rank (see `private.teachers.Teachers`)."""

    def fit_step(self, fakes: "Shown", *, step: int, repeats: int) -> float: ...

    def rows(
        self, fakes: "Shown", compress: Callable[[Gradients], Contributions], *, step: int
    ) -> Iterator[Contributions]: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def state_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Fakes as the ranks get them: without the autograd graph of the generator."""

    images: Tensor  # [m, c, h, w] float32
    labels: Tensor  # [m] int64
    step: int


class Order(enum.IntEnum):
    """An order of rank 0 to the other ranks."""

    FIT = 1
    VOTE = 2
    SAVE = 3
    RESTORE = 4
    DISMISS = 5


class Crowd:
    """All teachers, spread over the ranks.

    Args:
        mine: the teachers of this rank.
        compress: turns teachers' gradients into bounded rows.
        world: all ranks.
        count: number of teachers of all ranks.
        shape: of a batch of fakes [m, c, h, w].
        folder: of checkpoints.
    """

    def __init__(
        self,
        mine: Teachers,
        compress: Callable[[Gradients], Contributions],
        *,
        world: World,
        count: int,
        shape: tuple[int, int, int, int],
        folder: Path,
    ) -> None:
        self._mine = mine
        self._compress = compress
        self._world = world
        self._count = count
        self._folder = folder
        self._numbers = world.numbers(count)
        self._shown = Shown(
            images=torch.zeros(shape, device=world.device),
            labels=torch.zeros(shape[0], dtype=torch.int64, device=world.device),
            step=-1,
        )

    # --- rank 0 -----------------------------------------------------------------------------------

    def fit_step(self, fakes: Fakes, *, repeats: int) -> float:
        """Train every teacher for `repeats` steps against the same fakes; return the mean loss, which is private."""
        self._say(Order.FIT, fakes.step, repeats, fakes.labels)
        self._shown = Shown(images=fakes.images.detach().contiguous(), labels=fakes.labels, step=fakes.step)
        loss = self._fit(fakes.step, repeats)
        assert loss is not None
        return loss

    def votes(self, fakes: Fakes) -> BoundedSum:
        """Return the bounded sum of all teachers' votes on the fakes that they were just trained against. Private."""
        if fakes.step != self._shown.step:
            raise ValueError(f"the ranks have the fakes of step {self._shown.step}, not of {fakes.step}")
        self._say(Order.VOTE, fakes.step)
        total = self._vote()
        assert total is not None
        return total

    def save(self, step: int) -> list[str]:
        """Write every rank's teachers to the checkpoint folder; return the names of the files."""
        self._say(Order.SAVE, step)
        return self._save(step)

    def restore(self, step: int, names: list[str]) -> None:
        """Set every rank's teachers to the states in these files, however many ranks wrote them."""
        self._say(Order.RESTORE, step)
        self._restore(step, names)

    def dismiss(self) -> None:
        """End the other ranks' `follow`: the run is over."""
        self._say(Order.DISMISS, 0)

    def state_bytes(self) -> int:
        """Return the size of all teachers' states, from public facts."""
        return self._mine.state_bytes() * self._count // len(self._numbers)

    # --- the others -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Carry out the orders of rank 0 until it dismisses this rank."""
        with ignoring_signals():
            while True:
                order, step, repeats, labels = self._hear()
                match order:
                    case Order.FIT:
                        self._shown = Shown(images=self._shown.images, labels=labels, step=step)
                        self._fit(step, repeats)
                    case Order.VOTE:
                        self._vote()
                    case Order.SAVE:
                        self._save(step)
                    case Order.RESTORE:
                        self._restore(step, [])
                    case Order.DISMISS:
                        return

    # --- every rank -------------------------------------------------------------------------------

    def _fit(self, step: int, repeats: int) -> float | None:
        self._world.broadcast(self._shown.images)
        loss = self._mine.fit_step(self._shown, step=step, repeats=repeats)
        total = self._world.add(torch.tensor(loss * len(self._numbers), dtype=torch.float64))
        return None if total is None else float(total) / self._count

    def _vote(self) -> BoundedSum | None:
        mine = sum_bounded(self._mine.rows(self._shown, self._compress, step=self._shown.step))
        return sum_over_ranks(mine, self._world, units=self._count)

    def _save(self, step: int) -> list[str]:
        mine = part_name(step, self._numbers)
        facts = {"step": str(step), "first": str(self._numbers[0]), "end": str(self._numbers[-1] + 1)}
        self._world.together(lambda: save_tensors(self._folder / mine, self._mine.state(), facts))
        return [part_name(step, self._world.numbers(self._count, rank=rank)) for rank in range(self._world.size)]

    def _restore(self, step: int, names: list[str]) -> None:
        names = json.loads(self._world.gather(json.dumps(names).encode())[0])
        self._world.together(
            lambda: self._mine.load_state(load_part(self._folder, names, step=step, numbers=self._numbers))
        )

    def _say(self, order: Order, step: int, repeats: int = 0, labels: Tensor | None = None) -> None:
        word = torch.zeros(3 + len(self._shown.labels), dtype=torch.int64)
        word[:3] = torch.tensor([order, step, repeats])
        if labels is not None:
            word[3:] = labels
        self._world.broadcast(word)

    def _hear(self) -> tuple[int, int, int, Tensor]:
        word = self._world.broadcast(torch.zeros(3 + len(self._shown.labels), dtype=torch.int64))
        order, step, repeats = word[:3].tolist()
        return order, step, repeats, word[3:].to(self._world.device)
