"""What is declared public about a data set, before a record is read.

Under the add/remove relation the number of records is itself private, so a plan rests on the
*nominal* size that the owner declares. The certificate lists every field of the schema.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Public facts. Images are [height, width, channels] with values in `value_range`."""

    name: str
    height: int
    width: int
    channels: int
    classes: tuple[str, ...]
    nominal_size: int
    value_range: tuple[float, float] = (0.0, 1.0)
    record_unit: str = "image"
    note: str = ""  # what a reader must know about the data set, such as that it stands in for another

    @property
    def shape(self) -> tuple[int, int, int]:
        """[channels, height, width], as the networks see an image."""
        return self.channels, self.height, self.width

    @property
    def dimensions(self) -> int:
        return self.channels * self.height * self.width

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; without an empty note, as releases had it before there were notes."""
        fields = {**asdict(self), "classes": list(self.classes), "value_range": list(self.value_range)}
        return fields if self.note else {name: value for name, value in fields.items() if name != "note"}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Schema":
        return cls(**{**fields, "classes": tuple(fields["classes"]), "value_range": tuple(fields["value_range"])})
