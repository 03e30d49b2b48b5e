"""The records, laid out share after share, and the batches teachers draw from their own share."""

import numpy as np
import torch
from torch import Tensor

from datalens import streams
from datalens.private.partition import Partition


class Shares:
    """Features and labels of all records on one device, indexed by (teacher, position in its share)."""

    def __init__(self, features: Tensor, labels: Tensor, partition: Partition) -> None:
        device = features.device
        order = torch.from_numpy(partition.order).to(device)
        # Row 0 stands in for the record an empty share does not have, so that no index can
        # reach into a neighbour's share. What a teacher makes of it is masked before it votes.
        self._features = torch.cat([torch.zeros_like(features[:1]), features[order]])
        self._labels = torch.cat([torch.zeros_like(labels[:1]), labels[order]])
        sizes = partition.sizes
        self._sizes = torch.from_numpy(sizes).to(device)
        self._starts = torch.from_numpy(np.cumsum(sizes) - sizes + 1).to(device)
        self.teachers = partition.teachers
        self.device = device

    def occupied(self, teachers: Tensor) -> Tensor:
        """[chunk] bool: whether the teacher has any record at all."""
        return self._sizes[teachers] > 0

    def batch(self, teachers: Tensor, *, size: int, seed: int, step: int, draw: int) -> tuple[Tensor, Tensor]:
        """[chunk, size, …] features and [chunk, size] labels, drawn with replacement from each teacher's share."""
        draws = streams.uniform(seed, "batch", step, draw, teachers=teachers, count=size)
        sizes = self._sizes[teachers].unsqueeze(1)
        position = torch.minimum((draws * sizes).to(torch.int64), (sizes - 1).clamp(min=0))
        index = torch.where(sizes > 0, self._starts[teachers].unsqueeze(1) + position, 0)
        return self._features[index], self._labels[index]
