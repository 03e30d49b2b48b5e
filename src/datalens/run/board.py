"""TensorBoard logs of a run, in its folder. For the owner only: losses and the like are not covered by ε."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from datalens.errors import DatalensError
from datalens.public import streams
from datalens.released.synthetic import grid

if TYPE_CHECKING:
    from datalens.released.generator import Generator

FOLDER = "tensorboard"
PICTURES = 10  # number of grids of images during a run


class Board:
    """Writes scalars and grids of synthetic images; each start of the run begins a new file."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._writer = writer_class()(log_dir=str(self._folder))
        self._guard()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def generator(self, step: int, generator: "Generator") -> None:
        """Write ten images of each class. The generator's mode and the random streams of training do not change."""
        import torch

        classes = min(10, generator.architecture.classes)
        labels, training = torch.arange(10 * classes) % classes, generator.training
        with torch.no_grad():
            images = generator.eval().images(labels, streams.generator(0, "sample")).cpu()
        generator.train(training)
        pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        self.picture(step, np.asarray(grid(pixels, labels.numpy(), per_class=10)))

    def file(self, step: int, path: Path) -> None:
        with Image.open(path) as image:
            self.picture(step, np.asarray(image))

    def picture(self, step: int, pixels: Any) -> None:
        """Write a picture: uint8 [h, w] or [h, w, c]."""
        self._writer.add_image("synthetic images", pixels, step, dataformats="HWC" if pixels.ndim == 3 else "HW")

    def close(self) -> None:
        self._writer.close()
        self._guard()

    def _guard(self) -> None:
        for path in self._folder.iterdir():
            path.chmod(0o600)


def writer_class() -> Any:
    """Return torch's writer class; raise if the package tensorboard, which it needs, is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DatalensError(
            "--tensorboard needs the package tensorboard: pip install 'datalens[tensorboard]', or leave the option out"
        ) from error
    return SummaryWriter


def is_due(step: int, count: int) -> bool:
    """Return whether a picture is drawn after this step."""
    return step == count or step % max(1, count // PICTURES) == 0
