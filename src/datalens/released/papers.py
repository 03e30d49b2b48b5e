"""Documents that are written beside synthetic images: a dataset card, Croissant metadata, and an entry for a registry.

All of them follow from the certificate and from the images, and from nothing else, so `verify --samples` writes them
again and compares every byte. What only the publisher knows (licence, publisher, date, purpose) is left to them: it is
missing, or says FILL IN.

- README.md: a dataset card, with the YAML that Hugging Face reads.
- croissant.json: Croissant 1.1 (mlcommons.org/croissant/1.1).
- deployment.yaml: an entry for the Differential Privacy Deployments Registry; there is none without a guarantee.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datalens.errors import TamperedError
from datalens.privacy.ledger import upwards
from datalens.released.certificate import not_protected, own_hash

CARD, CROISSANT, ENTRY = "README.md", "croissant.json", "deployment.yaml"
NAMES = (CARD, CROISSANT, ENTRY)
FILL_IN = "FILL IN"
SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of the papers.

    Attributes:
        certificate: of the release that the images were drawn from; it has been verified.
        table: name of the file that lists the images: metadata.csv, or the parquet file itself.
        sha256: the hash of that file.
    """

    certificate: Mapping[str, Any]
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # [n, h, w, c]
    drawn: Mapping[str, Any]
    table: str
    sha256: str

    @property
    def folder(self) -> bool:
        return not self.table.endswith(".parquet")

    @property
    def identity(self) -> str:
        """The hash of the certificate."""
        return str(self.certificate["sha256"]["certificate"])


def papers(subject: Subject) -> dict[str, str]:
    """Return the texts of the papers by name.

    Raises:
        TamperedError: the certificate was changed after it was written.
    """
    if own_hash(dict(subject.certificate)) != subject.identity:
        raise TamperedError("the certificate of these images was changed: no papers are made from it; draw them again")
    texts = {CARD: _card(subject), CROISSANT: json.dumps(_croissant(subject), indent=1, ensure_ascii=False) + "\n"}
    if subject.certificate["private"]:
        texts[ENTRY] = "".join(f"{line}\n" for line in _yaml(_entry(subject)))
    return texts


# --- texts that several papers have ---------------------------------------------------------------


def _guarantee(certificate: Mapping[str, Any]) -> str:
    budget = certificate["budget"]
    return (
        f"ε = {upwards(float(budget['epsilon']))} (δ = {upwards(float(budget['delta']))}, {certificate['relation']}, "
        f"{certificate['accountant']} accountant)"
    )


def _title(subject: Subject) -> str:
    return f"Synthetic images made from {_plain(subject.certificate['public']['name'])}"


def _pictures(shape: tuple[int, ...]) -> str:
    count, height, width, channels = shape
    colour = {1: "grey", 2: "grey with transparency", 3: "colour"}.get(channels, "colour with transparency")
    return f"{count} images of {height}x{width} pixels, {colour}"


def _description(subject: Subject) -> str:
    return f"{_pictures(subject.shape)}, {_origin(subject.certificate)}. {subject.certificate['statement']}"


def _origin(certificate: Mapping[str, Any]) -> str:
    if not certificate["private"]:
        return "drawn from a generator that was trained without a guarantee: treat them as you would treat its data"
    return "drawn from a generator that was trained under differential privacy"


def _plain(text: object) -> str:
    """Return text that Markdown shows as it is, on one line."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", shown)


# --- the dataset card -----------------------------------------------------------------------------


def _card(subject: Subject) -> str:
    c, count = subject.certificate, subject.shape[0]
    files = ["metadata.csv", "*/*.png"] if subject.folder else subject.table
    head = {
        "pretty_name": f"Synthetic images made from {c['public']['name']}",
        "license": "unknown",
        "tags": ["synthetic", "differential-privacy", "datalens"],
        "task_categories": ["image-classification"],
        "annotations_creators": ["machine-generated"],
        "size_categories": [next((text for limit, text in _SIZES if count < limit), "n>1M")],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": files}]}],
    }
    stamp = "" if c["private"] else " **NOT PRIVATE.**"
    opened = 'load_dataset("FOLDER")' if subject.folder else f'load_dataset("parquet", data_files="{subject.table}")'
    what = "FOLDER" if subject.folder else subject.table
    lines = [
        "---",
        *_yaml(head),
        "---",
        "",
        f"# {_title(subject)}",
        "",
        f"**{_plain(c['statement'])}**",
        "",
        f"{_pictures(subject.shape)}, {_origin(c)}. Each says in its own metadata that it is synthetic (IPTC digital "
        "source type: trainedAlgorithmicMedia).",
        "",
        "| | |",
        "|---|---|",
        f"| protected | {_plain(c['privacy_unit'])}; data sets that differ in one are {c['relation']} neighbours |",
        f"| guarantee | {_guarantee(c)}, fixed before training.{stamp} |",
        f"| mechanism | {_plain(c['mechanism']['name'])}; {_plain(c['mechanism']['sensitivity'])} |",
        f"| noise | {_plain(c['mechanism']['noise'])}, from: {', '.join(map(_plain, c['noise']['origin']))} |",
        f"| made by | datalens {_plain(c['versions']['datalens'])}, certificate {subject.identity} |",
        "",
        *not_protected(c, _plain),
        "Synthetic images are averages with variations. Rare cases may be missing, and no finding about the original "
        "images should rest on these without a check.",
        "",
        "To load them:",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        f'images = {opened}["train"]',
        "```",
        "",
        f"To check them against their release: `datalens verify RELEASE --samples {what}`.",
        "",
    ]
    return "\n".join(lines)


# --- Croissant ------------------------------------------------------------------------------------

_TERMS = (
    *("arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field", "fileObject"),
    *("fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5"),
    *("parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator"),
    *("source", "subField", "transform"),
)


def _context() -> dict[str, Any]:
    return {
        "@language": "en",
        "@vocab": "https://schema.org/",
        **{term: f"cr:{term}" for term in _TERMS},
        "conformsTo": "dct:conformsTo",
        "cr": "http://mlcommons.org/croissant/",
        "data": {"@id": "cr:data", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        "dct": "http://purl.org/dc/terms/",
        "description": {"@container": "@language"},
        "examples": {"@id": "cr:examples", "@type": "@json"},
        "name": {"@container": "@language"},
        "rai": "http://mlcommons.org/croissant/RAI/",
        "sc": "https://schema.org/",
    }


def _croissant(subject: Subject) -> dict[str, Any]:
    table = {
        "@type": "cr:FileObject",
        "@id": "table",
        "name": subject.table,
        "contentUrl": subject.table,
        "encodingFormat": "text/csv" if subject.folder else "application/x-parquet",
        "sha256": subject.sha256,
    }
    images = {
        "@type": "cr:FileSet",
        "@id": "image-files",
        "name": "image-files",
        "encodingFormat": "image/png",
        "includes": "*/*.png",
    }
    classes = {
        "@type": "cr:RecordSet",
        "@id": "classes",
        "name": "classes",
        "dataType": "sc:Enumeration",
        "key": {"@id": "classes/label"},
        "field": [_field("classes/label", "sc:Integer"), _field("classes/name", "sc:Text")],
        "data": [{"classes/label": i, "classes/name": name} for i, name in enumerate(subject.classes)],
    }
    if subject.folder:
        file_name = {
            "fileObject": {"@id": "table"},
            "extract": {"column": "file_name"},
            "transform": {"regex": "^(?:.*/)?([^/]*)$"},  # without the folder: no two images share a name
        }
        name_in_folder = {"fileSet": {"@id": "image-files"}, "extract": {"fileProperty": "filename"}}
        fields = [
            _field("images/file_name", "sc:Text", file_name) | {"references": name_in_folder},
            _field(
                "images/image",
                "sc:ImageObject",
                {"fileSet": {"@id": "image-files"}, "extract": {"fileProperty": "content"}},
            ),
        ]
    else:
        of_image = {"fileObject": {"@id": "table"}, "extract": {"column": "image"}, "transform": {"jsonPath": "bytes"}}
        fields = [_field("images/image", "sc:ImageObject", of_image)]
    label = _field("images/label", "sc:Integer", {"fileObject": {"@id": "table"}, "extract": {"column": "label"}})
    label["references"] = {"field": {"@id": "classes/label"}}
    records = {"@type": "cr:RecordSet", "@id": "images", "name": "images", "field": [*fields, label]}
    return {
        "@context": _context(),
        "@type": "sc:Dataset",
        "name": f"Synthetic images made from {subject.certificate['public']['name']}",
        "description": _description(subject),
        "conformsTo": ["http://mlcommons.org/croissant/1.1", "http://mlcommons.org/croissant/RAI/1.0"],
        "version": "1.0.0",
        "isLiveDataset": False,
        "keywords": ["synthetic", "differential privacy", "images"],
        "rai:dataCollection": f"Generated: {subject.drawn['count']} images, drawn with seed {subject.drawn['seed']} "
        f"from the generator of the release whose certificate has the SHA-256 {subject.identity}.",
        "rai:dataLimitations": [
            "Averages with variations: rare cases may be missing.",
            *subject.certificate["not_covered"],
        ],
        "rai:personalSensitiveInformation": [subject.certificate["statement"]],
        "distribution": [table, *([images] if subject.folder else [])],
        "recordSet": [classes, records],
    }


def _field(identity: str, kind: str, source: dict[str, Any] | None = None) -> dict[str, Any]:
    name = identity.partition("/")[2]
    field = {"@type": "cr:Field", "@id": identity, "name": name, "dataType": kind}
    return field if source is None else {**field, "source": source}


# --- the registry ---------------------------------------------------------------------------------


def _entry(subject: Subject) -> dict[str, Any]:
    c, public = subject.certificate, subject.certificate["public"]
    neighbours = "by the presence of one unit" if c["relation"] == "add-remove" else "by what one unit is"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(c["versions"].items()))
    seed = f"seed {subject.drawn['seed']}, {subject.drawn['count']} images"
    return {
        "url_slug": f"datalens-{subject.identity[:16]}",
        "deployment": {
            "basic": {
                "name": f"Synthetic images made from {public['name']}",
                "data_curators": [{"data_curator_name": FILL_IN, "data_curator_type": FILL_IN}],
                "description": _description(subject),
                "intended_use": FILL_IN,
                "data_product_type": "Synthetic data",
                "data_product_region": FILL_IN,
                "publication_date": FILL_IN,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"All sets of labelled images of {public['height']}x{public['width']}x"
                f"{public['channels']} in these classes: {', '.join(subject.classes)}.",
                "unprotected_quantities": _listed(c["declared_public"]),
            },
            "privacy_loss": {
                "privacy_unit": c["privacy_unit"],
                "privacy_unit_details": f"Two sets of images are adjacent ({c['relation']}) if they differ "
                f"{neighbours}: {c['privacy_unit']}.",
                "number_of_privacy_units": public["nominal_size"],
                "privacy_parameters": {
                    "epsilon": _number(c["budget"]["epsilon"]),
                    "delta": _number(c["budget"]["delta"]),
                },
                "privacy_parameters_details": f"{c['statement']} The number of units is the approximate one that was "
                "declared public.",
            },
            "deployment_model": {
                "model_name": "Central",
                "trust_assumptions": "The curator sees the images and runs the training. Whoever receives the "
                f"release is not trusted. {c['chain']}",
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "The budget was fixed before training. datalens reads each "
                "image by a rule that looks at it alone; what was done to the images before is for the curator to "
                "state. Not charged:\n" + _listed(c["not_covered"]),
                "mechanisms": f"{c['mechanism']['name']}; {c['mechanism']['sensitivity']}. Noise: "
                f"{c['mechanism']['noise']}, from: {', '.join(c['noise']['origin'])}. Code: {versions}.",
                "composition": f"{c['mechanism']['events']} releases, priced together by the {c['accountant']} "
                f"accountant ({c['mechanism']['price']}). The whole budget is stated, which was fixed before training.",
                "post_processing": "The generator is made from what the mechanism released, and the images are drawn "
                f"from it ({seed}).",
                "justification": FILL_IN,
                "additional_information": f"The certificate has the SHA-256 {subject.identity}. `datalens verify "
                "RELEASE --samples IMAGES` recomputes the guarantee from the ledger, and draws the images again.",
            },
            "administrative": {"status": "Draft", "registry_authors": [FILL_IN], "tier": 3},
        },
    }


def _listed(items: list[str]) -> str:
    return "".join(f"- {item}\n" for item in items)


def _number(value: float | str) -> float:
    return float(upwards(float(value)))


# --- YAML -----------------------------------------------------------------------------------------


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Return the lines of a mapping or list as YAML; every text is quoted, so it can neither end nor be a number."""
    lines = []
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in items:
        begins = f"{indent}-" if key is None else f"{indent}{_scalar(key)}:"
        if isinstance(item, dict | list) and item:
            below = _yaml(item, indent + "  ")
            if key is None:  # a list's mapping begins on the line of its dash
                lines += [f"{begins} {below[0].strip()}", *below[1:]]
            else:
                lines += [begins, *below]
        else:
            lines.append(f"{begins} {_scalar(item, is_key=False)}")
    return lines


def _scalar(value: Any, *, is_key: bool = True) -> str:
    if is_key and re.fullmatch(r"[a-z_]+", str(value)):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        digits, exponent, power = repr(value).partition("e")
        return f"{digits}.0e{power}" if exponent and "." not in digits else repr(value)  # YAML 1.1 wants the point
    return '"' + "".join(map(_quoted, str(value))) + '"'


def _quoted(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable() and ord(character) < 0x10000:
        return character
    return "\\n" if character == "\n" else f"\\U{ord(character):08x}"
