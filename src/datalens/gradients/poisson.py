"""A torch loader whose batches are Poisson samples, and the check that every step is made of exactly one of them."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from datalens.errors import DatalensError
from datalens.privacy.dpsgd import GradientGate, poisson_sample


class PoissonBatches(Sampler[list[int]]):
    """An epoch of Poisson samples from the gate's randomness: 1 / rate of them, but no more than are planned.

    It remembers the sizes of the samples that were not used in a step yet, in their order (workers fetch ahead). A new
    pass over the data forgets what is left of the one before.
    """

    def __init__(self, count: int, gate: GradientGate) -> None:
        self._count, self._gate = count, gate
        self._sizes: deque[int] = deque()
        self.on_new_pass: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return round(1 / self._gate.schedule.rate)

    def __iter__(self) -> Iterator[list[int]]:
        self.forget()
        self.on_new_pass()
        planned = self._gate.schedule.steps - self._gate.charged + self._gate.left
        for _ in range(min(len(self), planned)):  # the last epoch may be shorter
            sample = poisson_sample(self._gate.noise, self._count, self._gate.schedule.rate).tolist()
            self._sizes.append(len(sample))
            yield sample

    def take(self, rows: int) -> None:
        """Use up the oldest sample for a step with this many rows.

        Raises:
            DatalensError: there is no sample, or it has another size.
        """
        if not self._sizes:
            raise DatalensError(
                "a step without a batch of the loader: take batches from the loader that make_private returned, and "
                "make one step for each"
            )
        drawn = self._sizes.popleft()
        if rows != drawn:
            raise DatalensError(
                f"a step on {rows} rows of gradients, where the loader had drawn {drawn} records: make one step of "
                "every batch (empty ones too), with all of its records and no others; no layer may put several "
                "records, or parts of one, into the first dimension"
            )

    def forget(self) -> None:
        """Forget all samples, so that no step can be made before the next pass over the data."""
        self._sizes.clear()


def sampled(loader: DataLoader[Any], batches: PoissonBatches) -> DataLoader[Any]:
    """Return a copy of the loader whose batches are Poisson samples, which may be empty."""
    first = loader.dataset[0]
    parts = first if isinstance(first, tuple | list) else (first,)
    collate = wrap_collate_with_empty(
        collate_fn=loader.collate_fn,
        sample_empty_shapes=[(0, *shape_safe(part)) for part in parts],
        dtypes=[torch.int64 if type(part) is int else dtype_safe(part) for part in parts],
    )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
    )


def check_loader(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the loader's batch size and the number of its records.

    Raises:
        DatalensError: its sampling cannot be replaced by Poisson samples.
    """
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise DatalensError("Poisson sampling must reach any record: give a data set with a length, not a stream")
    if loader.drop_last:
        raise DatalensError("drop_last excludes records that Poisson sampling must be able to draw: leave it out")
    if loader.batch_sampler is None:
        raise DatalensError("the loader makes no batches: give it a batch_size")
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (SequentialSampler, RandomSampler)
    if not plain or loader.batch_size is None:
        name = type(loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler).__name__
        raise DatalensError(f"{name} would be replaced by Poisson sampling, which is priced: leave the sampler out")
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
        raise DatalensError("sampling with replacement would be replaced by Poisson sampling: leave the sampler out")
    return loader.batch_size, len(loader.dataset)
