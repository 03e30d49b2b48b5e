"""Public facts about a data set, which training is planned from.

Under the add-remove relation the number of records is itself private, so a plan uses the *nominal* size that the owner
declares. The certificate lists every field of the schema.
"""

from dataclasses import asdict, dataclass
from typing import Any

from datalens.errors import DatalensError

READ_OFF = "read off the data, and declared public by the owner"  # begins a note that lists what was not declared
LARGEST_NUMBER = 2**31 - 1  # of records, or of pixels along a side
LEFT_OUT = (
    "files that cannot be read as images were left out, each by a rule that looks at that file alone; how many is "
    "not stated"
)
IMAGE, PERSON = "image", "person (all images with the same record id)"  # the privacy unit


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Public facts about a data set. Images are [height, width, channels] with values in `value_range`.

    Attributes:
        nominal_size: declared number of privacy units.
        record_unit: the privacy unit: `IMAGE` or `PERSON`.
        note: what a reader must know about the data set, such as that it stands in for another.
        left_out: `LEFT_OUT` if unreadable files are left out, else "".
    """

    name: str
    height: int
    width: int
    channels: int
    classes: tuple[str, ...]
    nominal_size: int
    value_range: tuple[float, float] = (0.0, 1.0)
    record_unit: str = IMAGE
    note: str = ""
    left_out: str = ""

    def __post_init__(self) -> None:
        """Raise if no certificate could be written with these names; when a schema is made, nothing is charged yet."""
        for what, text in (("data set", self.name), *(("class", name) for name in self.classes), ("note", self.note)):
            if isinstance(text, str) and not _is_unicode(text):
                raise DatalensError(f"the name of the {what} {text!a} is not UTF-8 text: rename it")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[channels, height, width], the shape of an image for networks."""
        return self.channels, self.height, self.width

    @property
    def dimensions(self) -> int:
        """Number of values of an image."""
        return self.channels * self.height * self.width

    @property
    def read_off(self) -> bool:
        """Whether some of these facts were read off the data instead of declared beforehand."""
        return self.note.startswith(READ_OFF)

    @property
    def given(self) -> str:
        """The facts that were read off the data, on condition of whose being public the guarantee holds; "" if none."""
        return self.note.removeprefix(READ_OFF).strip(": ") if self.read_off else ""

    @property
    def by_person(self) -> bool:
        """Whether the privacy unit is a person with all of their images; a record's key is then the person's id."""
        return self.record_unit == PERSON

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON; empty texts are left out, as in releases from before there were these."""
        fields = {**asdict(self), "classes": list(self.classes), "value_range": list(self.value_range)}
        return {name: value for name, value in fields.items() if value or name not in ("note", "left_out")}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Schema":
        """Return a schema from JSON, which anybody may have edited.

        Args:
            fields: the JSON.

        Raises:
            ValueError: a field has a value that it cannot have.
            TypeError: a field is missing or unknown, or of another type.
            KeyError: `classes` or `value_range` is missing.
        """
        try:
            schema = cls(**{**fields, "classes": tuple(fields["classes"]), "value_range": tuple(fields["value_range"])})
        except DatalensError as error:
            raise ValueError(str(error)) from None
        for name in ("height", "width", "channels", "nominal_size"):
            value = getattr(schema, name)
            if type(value) is not int or not 1 <= value <= LARGEST_NUMBER:
                raise ValueError(f"{name} cannot be {str(value)[:40]!r}")
        texts = (schema.name, schema.record_unit, schema.note, *schema.classes)
        if not all(isinstance(text, str) for text in texts) or not schema.classes:
            raise ValueError("names and classes must be text")
        if schema.left_out not in ("", LEFT_OUT):
            raise ValueError("left_out must be the text of this version")
        if schema.value_range != (0, 1):
            raise ValueError("value_range must be 0 and 1")
        return schema


def _is_unicode(text: str) -> bool:
    """Return whether text can be encoded as UTF-8. Python marks bytes of file names that are not UTF-8 (surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
