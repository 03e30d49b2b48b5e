"""`datalens inspect`: count and check your own data before training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from datalens.cli.output import show
from datalens.errors import DatalensError
from datalens.options import ClusterOptions, Json, ReadingOptions


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Count and check your own images, and show what would be planned. For the owner only: not covered by ε."""

    path: Positional[Path]
    """A folder of images, or a .parquet, .csv, .npz or idx file: what --data of `train` takes."""
    files: ReadingOptions = field(default_factory=ReadingOptions)
    nominal_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: a round figure)")] = None
    """About how many records (or persons) there are, for the plans."""
    delta: float = 1e-5
    """δ of the plans."""
    most: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """Decode and check only so many images, drawn at random; all are counted."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    json: Json = False

    def __call__(self) -> int:
        from datalens.data.own.reading import Reading
        from datalens.evaluate import inspection

        if self.most is not None and self.most < 1:
            raise DatalensError(f"--most must be at least 1, not {self.most}")
        with inspection.if_asked(vars(self.cluster)) as client:
            found = inspection.inspect(
                self.path,
                Reading.of(self.files),
                nominal_size=self.nominal_size,
                delta=self.delta,
                most=self.most,
                client=client,
            )
        show(found, inspection.lines(found), json=self.json)
        return 0
