"""`datalens data`: list and download the named data sets."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.cli.output import show
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class DataList:
    """Show the named data sets."""

    json: Json = False

    def __call__(self) -> int:
        from datalens.data.named import sources, weights

        rows = []
        for name in sources.names():
            schema = sources.schema(name)
            rows.append({**schema.as_dict(), "cached": sources.cached(name), "download": sources.downloadable(name)})
        lines = [
            f"{row['name']:17} {row['height']}x{row['width']}x{row['channels']}, {len(row['classes'])} classes, "
            f"about {row['nominal_size']} records"
            + (f" ({row['note']})" if row.get("note") else "")
            + (
                ""
                if row["cached"]
                else f"; {'download it' if row['download'] else 'where to put it'}: datalens data get {row['name']}"
            )
            for row in rows
        ]
        for name, file in weights.WEIGHTS.items():
            lines.append(
                f"{name:17} {file.what}" + ("" if weights.cached(name) else f"; download it: datalens data get {name}")
            )
        show({"datasets": rows, "weights": list(weights.WEIGHTS)}, lines, json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class DataGet:
    """Download a named data set into the cache ($DATALENS_HOME, else the platform's cache folder)."""

    name: Positional[str]
    """A name that `datalens data list` shows."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.data.named import sources, weights

        path = weights.get(self.name) if self.name in weights.WEIGHTS else sources.get(self.name)
        show({"name": self.name, "path": str(path)}, [str(path)], json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class DrawStudies:
    """Draw an example of hospital data: DICOM files of patients who do not exist (docs/hospital.md)."""

    folder: Positional[Path]
    """A new folder: PATIENT/STUDY/IM00001, and findings.csv, which lists them."""
    patients: int = 1000
    """Number of patients; each has one to three studies. Every fifth patient is for testing."""
    seed: int = 0
    """The same seed gives the same images."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.data.studies import LIST, draw_studies

        drawn = draw_studies(self.folder, patients=self.patients, seed=self.seed)
        line = "{images} images in {studies} studies of {patients} patients: ".format(**drawn)
        show({**drawn, "list": str(self.folder / LIST)}, [f"{line}{self.folder / LIST}"], json=self.json)
        return 0


COMMANDS: dict[str, type] = {"list": DataList, "get": DataGet, "draw-studies": DrawStudies}
DESCRIPTION = "List the named data sets, download one, or draw an example of hospital data."
