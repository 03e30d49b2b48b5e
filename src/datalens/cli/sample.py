"""`datalens sample`: write synthetic images to a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import release_of, show
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Draw synthetic images from a run or a release folder."""

    run: Positional[Path]
    """A run folder, or its release folder."""
    out: Path
    """synth.npz, synth.parquet, or a folder/ of PNG files."""
    count: int = 10_000
    """Number of images. Classes come in proportion to their released counts, if the release has counts."""
    only: Annotated[
        tuple[str, ...], arg(name="class", metavar="NAME|NUMBER …", help_behavior_hint="(default: all)")
    ] = ()
    """Draw only these classes: --class 3 5."""
    balanced: bool = False
    """Draw as many images of every class."""
    seed: int = 0
    """The same seed gives the same images."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Images from a GPU differ from those from a CPU in the last bits."""
    force: bool = False
    """Replace --out if it exists."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.driver import choose_device
        from datalens.released import certificate, release
        from datalens.released.synthetic import check_target, save

        check_target(self.out, force=self.force)  # before the images are drawn
        dataset = release.sample(
            release_of(self.run),
            count=self.count,
            seed=self.seed,
            balanced=self.balanced,
            labels=self.only or None,
            device=choose_device(self.device),
        )
        save(dataset, self.out, force=self.force)
        stated = dataset.certificate
        fields = {"out": str(self.out), "count": len(dataset.images), "private": stated["private"]}
        budget = stated.get("budget")
        budget = budget if isinstance(budget, dict) else {}  # `verify` reports what is wrong with it
        fields |= {name: budget.get(name) for name in ("epsilon", "delta")}
        fields |= {"relation": stated.get("relation"), "accountant": stated.get("accountant")}
        fields |= {"unit": stated.get("privacy_unit")}
        fields["statement"] = statement = stated["statement"]
        version, newest = stated["version"], certificate.VERSION
        fields |= {"certificate_version": version, "qualified": version < newest}
        lines = [f"{len(dataset.images)} images in {self.out}. {statement}"]
        if version < newest:
            lines.append(
                f"The certificate is of version {version}, which binds less than version {newest} does: `datalens "
                "verify` says for what you have only the owner's word"
            )
        show(fields, lines, json=self.json)
        return 0
