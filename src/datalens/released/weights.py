"""Write the weights file of a release, and read it with every size checked. No pickle is written or loaded."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from datalens.errors import DatalensError
from datalens.public.texture import Texture
from datalens.released import certificate as certificates
from datalens.released.classifier import Classifier
from datalens.released.denoiser import LEAST_NOISE, MOST_NOISE, DiffusionModel, Head, Network, Shape, channels_last
from datalens.released.generator import Architecture, Generator, can_show
from datalens.released.moments import MomentModel, Start

# Limits for a model that is read, far above any that is written.
MOST_PIXELS, MOST_LAYERS, MOST_STEPS = 2**24, 12, 1000
MOST_WIDE = 512  # channels of a denoising network
SIZES = ("wide", "deep", "hidden")  # of a denoising network
COUNTS = ("completed", "answered")  # counts of the training in the metadata; files of version 0.1.0 have neither

AnyGenerator = Generator | MomentModel | DiffusionModel
_DAMAGE = (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The contents of a weights file.

    Attributes:
        model: the trained model.
        classes: the names of the classes.
        completed: number of steps (blocks, releases of moments) that the model learned from.
        answered: number of queries that teachers answered, for methods that charge for answers separately.

    Both counts are None where the file does not state them.
    """

    model: AnyGenerator | Classifier
    classes: tuple[str, ...]
    completed: int | None
    answered: int | None


def save_weights(path: Path, model: AnyGenerator | Classifier, classes: tuple[str, ...], **counts: int | None) -> None:
    """Write the model with its description, the names of its classes and the given counts (see `COUNTS`)."""
    if isinstance(model, Generator):
        key, described = "generator", {"architecture": model.architecture.as_dict()}
    elif isinstance(model, MomentModel):
        key, described = "generator", {"moments": {"shape": model.start.shape, "steps": model.steps}}
    elif isinstance(model, DiffusionModel):
        first = {"shape": model.start.shape, "steps": model.moments.steps}
        sizes = dict(zip(SIZES, model.network.shape.sizes, strict=True))
        key, described = "generator", {"diffusion": {"moments": first, "begin": model.begin, **sizes}}
    else:
        key, described = "classifier", model.described()
    tensors = model.tensors() if isinstance(model, MomentModel | DiffusionModel) else model.state_dict()
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    given = {name: value for name, value in counts.items() if value is not None}
    # One key only: safetensors writes several keys in no fixed order, and equal weights would hash differently.
    metadata = {key: json.dumps({**described, "classes": classes, **given})}
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # also raised when the disk is full
        raise DatalensError(f"cannot write {path} ({error}): free some space, then continue with --resume") from error


def load_generator(release: Path) -> tuple[AnyGenerator, tuple[str, ...]]:
    """Return the generator of a release and the names of its classes.

    Raises:
        DatalensError: the release has no generator, or a damaged one.
    """
    path = release / certificates.WEIGHTS
    if not path.is_file():
        raise DatalensError(f"{release} has no {certificates.WEIGHTS}: is the run finished? continue it with --resume")
    weights = read_weights(path)
    assert not isinstance(weights.model, Classifier)
    return weights.model, weights.classes


def load_classifier(release: Path) -> tuple[Classifier, tuple[str, ...]]:
    """Return a classifier that `datalens sgd` trained, and the names of its classes.

    Raises:
        DatalensError: the release has no classifier, or a damaged one.
    """
    path = release / certificates.MODEL
    if not path.is_file():
        raise DatalensError(f"{release} has no {certificates.MODEL}: was it made by `datalens sgd`?")
    weights = read_weights(path)
    assert isinstance(weights.model, Classifier)
    return weights.model, weights.classes


def read_weights(path: Path) -> Weights:
    """Read a weights file without trusting it: every tensor must be one of the model's, with its size and type.

    Raises:
        DatalensError: datalens did not write the file, or it holds more than a model.
    """
    kind = "classifier" if path.name == certificates.MODEL else "generator"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if set(metadata) != {kind}:
                raise ValueError("the metadata must hold the model's description and nothing else")
            described = json.loads(metadata[kind])
            if json.dumps(described) != metadata[kind]:  # there is one way to write it: no room for repeated names
                raise ValueError("the description is not as datalens writes it")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_header(path)
        classes = tuple(str(name) for name in described.pop("classes"))
        counts = {name: _count(described.pop(name, None)) for name in COUNTS}
        model = _model(kind, described, weights, classes)
    except _DAMAGE as error:
        raise DatalensError(
            f"{path} is not a {kind} of datalens ({type(error).__name__}): fetch the release again"
        ) from error
    return Weights(model=model, classes=classes, **counts)


def _check_header(path: Path) -> None:
    """Raise unless the header is as safetensors writes it: no repeated names, and nothing that a reader ignores."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    fields = json.loads(header)
    written = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if header != written + b" " * (-len(written) % 8):
        raise ValueError("the header is not as safetensors writes it")
    del fields["__metadata__"]
    if any(set(tensor) != {"dtype", "shape", "data_offsets"} for tensor in fields.values()):
        raise ValueError("a tensor must have a type, a shape and offsets, and nothing else")


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 2**62):
        raise ValueError("a count must be a whole number")
    return value


def _model(
    kind: str, described: dict[str, Any], weights: dict[str, torch.Tensor], classes: tuple[str, ...]
) -> AnyGenerator | Classifier:
    if kind == "classifier":
        return _rebuilt_classifier(described, weights, len(classes)).eval()
    if set(described) == {"moments"}:
        return _rebuilt_moments(described["moments"], weights, len(classes))
    if set(described) == {"diffusion"}:
        return _rebuilt_diffusion(described["diffusion"], weights, len(classes))
    if set(described) != {"architecture"}:
        raise ValueError("the description has unknown fields")
    fields = described["architecture"]
    fields |= {"shape": tuple(fields["shape"]), "widths": tuple(fields["widths"])}
    generator = _rebuilt(Architecture(**fields), weights)
    if len(classes) != generator.architecture.classes:
        raise ValueError("there must be a name for every class")
    return generator.eval()


def _rebuilt_classifier(described: dict[str, Any], weights: dict[str, torch.Tensor], classes: int) -> Classifier:
    if set(described) != {"shape", "network"}:
        raise ValueError("the description has unknown fields")
    shape = tuple(described["shape"])
    if any(type(side) is not int for side in shape):
        raise ValueError("sizes must be whole numbers")
    if len(shape) not in (1, 3) or not 0 < math.prod(shape) <= MOST_PIXELS or not 0 < classes <= MOST_PIXELS:
        raise ValueError("no classifier of datalens has inputs of this shape")
    with torch.device("meta"):
        model = Classifier(shape=shape, classes=classes, network=described["network"])
    model.load_state_dict(_as_stored(weights, model), assign=True)
    return model


def _as_stored(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Check that tensors have the model's types, which leaves no room for more digits, and return copies of them.

    They are copied because a file's tensors may share memory with it.
    """
    expected = {name: value.dtype for name, value in model.state_dict().items()}
    if any(value.dtype != expected.get(name, value.dtype) for name, value in weights.items()):
        raise ValueError("a tensor has another type than the model")
    return {name: value.clone() for name, value in weights.items()}


def _rebuilt(architecture: Architecture, weights: dict[str, torch.Tensor]) -> Generator:
    """Return the generator with these weights.

    It is built on the meta device first, which takes no memory, since a description may state any size.
    """
    a = architecture
    if any(type(n) is not int for n in (*a.shape, *a.widths, a.classes, a.latent, a.dense, a.cosines)):
        raise ValueError("sizes must be whole numbers")
    channels, height, width = a.shape
    pixels = channels * height * width
    if min(a.shape) < 1 or pixels > MOST_PIXELS or len(a.widths) > MOST_LAYERS:
        raise ValueError("no generator of datalens makes images of this size")
    if not can_show(a.shape, a.cosines):
        raise ValueError("no generator of datalens uses so many cosines")
    with torch.device("meta"):
        generator = Generator(architecture)
    generator.load_state_dict(_as_stored(weights, generator), assign=True)
    return generator


def _rebuilt_moments(fields: dict[str, Any], weights: dict[str, torch.Tensor], classes: int) -> MomentModel:
    """Return the model with these tensors, after checking that their sizes are consistent."""
    if set(fields) != {"shape", "steps"}:
        raise ValueError("the description has unknown fields")
    channels, height, width = fields["shape"]
    shape, steps = (channels, height, width), fields["steps"]
    if any(type(number) is not int for number in (*shape, steps)):
        raise ValueError("sizes must be whole numbers")
    if channels > 4 or min(shape) < 1 or channels * height * width > MOST_PIXELS or not 0 <= steps <= MOST_STEPS:
        raise ValueError("no model of datalens makes images of this size")
    coordinates, texture = weights["means"].shape[1], Texture(shape).size if steps else 0
    head = weights["maps"].shape[-1]
    expected = {
        "means": (classes, coordinates),
        "factors": (classes, coordinates, coordinates),
        "centre": (texture,),
        "white": (texture, texture),
        "before": (classes, texture),
        "after": (classes, texture),
        "maps": (classes, head, head),
    }
    present = weights["present"]
    weights = {"sizes": torch.ones(len(present))} | weights  # the first releases had no sizes: equal ones
    expected["sizes"] = (len(present),)
    if set(weights) != {*expected, "present"} or head > texture or coordinates > channels * height * width:
        raise ValueError("tensors are missing, unknown or too large")
    if coordinates * channels * height * width > MOST_PIXELS * 8:  # size of the basis that sampling builds
        raise ValueError("no model of datalens makes images of this size")
    if any(weights[name].shape != size or weights[name].dtype != torch.float32 for name, size in expected.items()):
        raise ValueError("a tensor has a size or type that does not fit the others")
    if present.dtype != torch.int64 or present.dim() != 1 or not len(present) or len(present) > classes:
        raise ValueError("the list of classes present is empty or malformed")
    if not 0 <= int(present.min()) <= int(present.max()) < classes:
        raise ValueError("the list of classes present names classes that do not exist")
    if not bool((weights["sizes"] > 0).all() and weights["sizes"].isfinite().all()):
        raise ValueError("the sizes of classes must be positive and finite")
    weights = {name: value.clone() for name, value in weights.items()}
    start = Start(shape=shape, means=weights.pop("means"), factors=weights.pop("factors"))
    return MomentModel(start=start, steps=steps, **weights)


def _rebuilt_diffusion(fields: dict[str, Any], weights: dict[str, torch.Tensor], classes: int) -> DiffusionModel:
    """Return the model of two stages with these tensors, after checking their sizes."""
    if set(fields) != {"moments", "begin", *SIZES}:
        raise ValueError("the description has unknown fields")
    begin, sizes = fields["begin"], [fields[name] for name in SIZES]
    if type(begin) not in (int, float) or not LEAST_NOISE < begin <= MOST_NOISE:
        raise ValueError("no model of datalens begins at this noise level")
    if any(type(size) is not int or not 0 < size <= MOST_WIDE for size in sizes):
        raise ValueError("no network of datalens is of this size")
    parts: dict[str, dict[str, torch.Tensor]] = {"moments": {}, "network": {}, "head": {}}
    for name, value in weights.items():
        part, _, inner = name.partition(".")
        parts[part][inner] = value
    moments = _rebuilt_moments(fields["moments"], parts["moments"], classes)
    head, features = parts["head"].pop("weights"), len(moments.centre)
    if head.shape not in ((0, classes), (features + 1, classes)) or head.dtype != torch.float32 or parts["head"]:
        raise ValueError("the linear classifier does not fit the moments")
    shape = Shape(image=moments.start.shape, classes=classes, **dict(zip(SIZES, sizes, strict=True)))
    with torch.device("meta"):
        network = Network(shape)
    network.load_state_dict(_as_stored(parts["network"], network), assign=True)
    network = channels_last(network).eval().requires_grad_(False)
    return DiffusionModel(moments=moments, network=network, begin=float(begin), head=Head(weights=head.clone()))
