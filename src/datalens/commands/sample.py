"""`datalens sample`: synthetic images into a file."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.commands.common import Json, release_of, show


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Draw synthetic images from a run or a release folder."""

    run: Positional[Path]
    """A run folder, or its release folder."""
    out: Path
    """synth.npz, synth.parquet, or a folder/ of PNG files."""
    count: int = 10_000
    """How many images; the classes come evenly."""
    seed: int = 0
    """The same seed gives the same images."""
    force: bool = False
    """Replace --out if it exists."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.released import synthetic
        from datalens.released.release import sample

        synthetic.check_target(self.out, force=self.force)  # before the work, not after it
        dataset = sample(release_of(self.run), count=self.count, seed=self.seed)
        synthetic.save(dataset, self.out, force=self.force)
        fields = {"out": str(self.out), "count": len(dataset.images), "private": dataset.certificate["private"]}
        statement = dataset.certificate["statement"]
        show(fields, [f"{len(dataset.images)} images in {self.out}. {statement}"], json=self.json)
        return 0
