"""Records spread over ranks, for methods that need sums over all of them. Rank 0 asks, and every rank answers.

Which rank holds a record follows from a hash of its key (of its person's key, where persons are the privacy unit) and
the number of ranks, and from nothing else. So a record's row depends on that record alone, and a person is whole on one
rank. Rank 0 gets sums over all ranks, as whole numbers; records and their rows stay where they are.

| rank 0 sends | every rank |
|---|---|
| the name of a sum, with public or released numbers | computes it over its records; the sums are added on rank 0 |
| anything else that the method names | does it |
| that all wait | waits on: no connection is silent for longer than the time after which a machine counts as gone |
| that the run is over | ends |
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.parts import PartSum, join_over_ranks, whole
from datalens.data.records import Block, Choose, Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.private.moments import RecordRows, View
from datalens.public.threads import one_core_each
from datalens.run.cluster import Ask
from datalens.run.ranks import World, ignoring_signals

ORDER, WAIT, DISMISS, SUMS = "order", "wait", "dismiss", "sums"
SECONDS_SILENT = 60.0  # between two signs of life of rank 0, while it works alone
HASH = 16  # bytes of a key's hash

Answer = Callable[[Mapping[str, Any], Mapping[str, Tensor]], None]  # of another rank: (facts, tensors) of an order


class PartOfRank:
    """The records of a stream that this rank holds."""

    fixed_positions = False

    def __init__(self, records: Records, world: World) -> None:
        self._records, self._world = records, world
        self.seen = self.everyone = self.held = 0
        self.names: list[bytes] | None = None  # where it is a list, the keys of all records are put there

    @property
    def schema(self) -> Schema:
        return self._records.schema

    def blocks(self, choose: Choose) -> Iterator[Block]:
        """Yield this rank's records. Afterwards the sums of hashes, of all records and of its own, can be compared."""
        self.seen = self.everyone = self.held = 0

        def own(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
            names = list(keys)
            hashes = [int.from_bytes(hashlib.blake2b(name, digest_size=HASH).digest(), "little") for name in names]
            here = np.array([self.is_here(number) for number in hashes], dtype=bool)
            self.seen += len(names)
            if self.names is not None:
                self.names += names
            self.everyone += sum(hashes)
            self.held += sum(number for number, mine in zip(hashes, here, strict=True) if mine)
            share = np.full(len(index), -1, dtype=np.int64)
            share[here] = choose(index[here], [name for name, mine in zip(names, here, strict=True) if mine])
            return share

        return self._records.blocks(own)

    def is_here(self, number: int) -> bool:
        """Return whether this rank holds the records whose key has this hash."""
        return number % self._world.size == self._world.rank


class RankRows:
    """All records, on the ranks of a world: for training on rank 0 the same as `RecordRows`.

    Args:
        mine: the rows of this rank.
        part: the records that they were read from.
        name: of these rows in orders, where a method has several for each record.
    """

    def __init__(self, mine: RecordRows, part: PartOfRank, world: World, *, name: str = SUMS) -> None:
        self.mine, self.part, self.world = mine, part, world
        self._name, self._everywhere, self._heard = name, 0, time.monotonic()

    @property
    def count(self) -> int:
        return self.mine.count

    @property
    def fingerprint(self) -> int:
        return self.mine.fingerprint

    def meet(self) -> None:
        """Raise on all ranks unless each record is on one of them. Every rank calls it, before any sum.

        Raises:
            DatalensError: ranks have read different records, or a record is on two ranks, or on none.
        """
        mine = {"everyone": self.part.everyone, "held": self.part.held, "count": self.count}
        everybody = [json.loads(one) for one in self.world.gather(json.dumps(mine).encode())]
        self._everywhere = sum(one["count"] for one in everybody)

        def check() -> None:
            if any(one["everyone"] != self.part.everyone for one in everybody):
                raise DatalensError("the ranks have read different records: give all machines the same data")
            if sum(one["held"] for one in everybody) != self.part.everyone:
                raise DatalensError("a record is on two ranks, or on none: its bound would not hold")

        self.world.together(check)

    def viewed(self, mine: RecordRows, *, name: str) -> "RankRows":
        """Return other rows of the same records, which every rank has made of its own. `name`: theirs, in orders."""
        found = RankRows(mine, self.part, self.world, name=name)
        found._everywhere = self._everywhere
        return found

    # --- rank 0 -----------------------------------------------------------------------------------

    def coordinates(self, stored: Tensor) -> Tensor:
        return self.mine.coordinates(stored)

    def texture(self, stored: Tensor, *, centre: Tensor, white: Tensor) -> Tensor:
        return self.mine.texture(stored, centre=centre, white=white)

    def histogram(self, view: View, **options: Any) -> BoundedSum:
        return self._ask("histogram", view, options)

    def sums(self, view: View, **options: Any) -> BoundedSum:
        return self._ask("sums", view, options)

    def covariances(self, view: View, **options: Any) -> BoundedSum:
        return self._ask("covariances", view, options)

    def errors(self, view: View, **options: Any) -> BoundedSum:
        return self._ask("errors", view, options)

    def order(self, name: str, facts: Mapping[str, Any] | None = None, **tensors: Tensor) -> None:
        """Send an order to the other ranks.

        Args:
            name: what it is; `follow` names who carries it out.
            facts: public or released numbers and names.
            tensors: the same.
        """
        text = json.dumps({"name": name, "facts": facts or {}}).encode()
        content = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        content[ORDER] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.world.send(safetensors.torch.save(content))
        self._heard = time.monotonic()

    def beat(self) -> None:
        """Tell the other ranks now and then that rank 0 works alone for longer."""
        if time.monotonic() - self._heard > SECONDS_SILENT:
            self.order(WAIT)

    def dismiss(self) -> None:
        """End the other ranks' `follow`: the run is over."""
        self.order(DISMISS)

    def joined(self, mine: PartSum, *, records: int | None = None) -> BoundedSum:
        """Return the sum over all ranks, for the gate, after checking that each is in it once.

        Args:
            mine: the sum of this rank, of the kind that will be charged.
            records: how many records all ranks have; None: that is drawn anew for each sum.
        """
        found = join_over_ranks(mine, self.world)
        assert found is not None
        expected = found.records if records is None else records
        return whole(found, like=mine.total, parts=self.world.size, records=expected)

    def _ask(self, kind: str, view: View, options: dict[str, Any]) -> BoundedSum:
        name, of_view = getattr(view, "func", view).__name__, getattr(view, "keywords", {})
        tensors = {f"view {key}": value for key, value in of_view.items()}
        tensors |= {f"option {key}": value for key, value in options.items() if isinstance(value, Tensor)}
        plain = {key: value for key, value in options.items() if not isinstance(value, Tensor)}
        self.order(self._name, {"kind": kind, "view": name, "options": plain}, **tensors)
        ask = Ask(kind=kind, view=name, of_view=of_view, options=options)
        return self.joined(self._part(ask), records=self._everywhere)

    # --- every rank -------------------------------------------------------------------------------

    @one_core_each()
    def answer(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Add this rank's part to the sum that rank 0 has asked for."""
        of_view, options = (
            {key.removeprefix(kind): value for key, value in tensors.items() if key.startswith(kind)}
            for kind in ("view ", "option ")
        )
        ask = Ask(kind=facts["kind"], view=facts["view"], of_view=of_view, options={**facts["options"], **options})
        self.give(self._part(ask))

    def give(self, mine: PartSum) -> None:
        """Add the sum of this rank to that of all, which rank 0 gets."""
        join_over_ranks(mine, self.world)

    def _part(self, ask: Ask) -> PartSum:
        return PartSum(total=ask.of(self.mine), parts=(self.world.rank,), records=self.count)

    # --- the others -------------------------------------------------------------------------------

    def follow(self, others: Mapping[str, Answer] | None = None) -> None:
        """Carry out the orders of rank 0 until it dismisses this rank.

        Args:
            others: who carries out the orders that are not for these rows, by their names.
        """
        answers = {self._name: self.answer, WAIT: lambda facts, tensors: None, **(others or {})}
        with ignoring_signals():
            while True:
                tensors = safetensors.torch.load(self.world.send())
                said = json.loads(bytes(tensors.pop(ORDER).numpy()))
                if said["name"] == DISMISS:
                    return
                answers[said["name"]](said["facts"], tensors)
