"""A model's parameters and buffers, remembered bit for bit, so that what a layer writes there by itself is noticed.

Noise is added to gradients, and to nothing else: a moving average, a codebook or a frozen parameter that a layer fills
with what it sees of records would leave with the weights as it is. `(id, _version)` of a tensor does not show a write
through `.data`, so values are compared.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from datalens.errors import DatalensError

_TRUSTED = ("torch", "opacus", "datalens")
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateWatch:
    """Copies of all parameters and buffers of a model, frozen and non-persistent ones too."""

    def __init__(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if type(layer).get_extra_state is not nn.Module.get_extra_state:
                raise DatalensError(
                    f"layer {name or 'model'} ({type(layer).__name__}) puts more into state_dict() than tensors "
                    "(get_extra_state), which no noise is added to: keep it outside the model"
                )
            _check_saving(name, layer)
        self._model = model
        self._kept: dict[str, Tensor] = {}
        for name, tensor in self._now().items():
            lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            if lazy or tensor.layout is not torch.strided or tensor.is_quantized:
                raise DatalensError(f"{name} cannot be watched, as it is no plain tensor: make it one, or keep it out")
            self._kept[name] = _bits(tensor).clone()

    def _now(self) -> dict[str, Tensor]:
        parameters = self._model.named_parameters(remove_duplicate=False)
        buffers = self._model.named_buffers(remove_duplicate=False)
        return {f"parameter {name}": p for name, p in parameters} | {f"buffer {name}": b for name, b in buffers}

    def remember(self, tensors: Iterable[Tensor]) -> None:
        """These have changed as they should: by a private step, or by load_state_dict."""
        wanted = {id(tensor) for tensor in tensors}
        for name, tensor in self._now().items():
            if id(tensor) in wanted:
                self._kept[name] = _bits(tensor).clone()

    def changed(self, within: str | None = None) -> str | None:
        """The first that is not bit for bit what is remembered, by kind and name; also if it came or went.

        `within`: of the layer of this name alone, without those in it.
        """
        now = self._now()
        for name in (*self._kept, *now):
            if within is not None and name.split(" ", 1)[1].rpartition(".")[0] != within:
                continue
            if name not in self._kept or name not in now:
                return name
            bits, kept = _bits(now[name]), self._kept[name]
            if kept.device != bits.device:  # the model was moved
                kept = self._kept[name] = kept.to(bits.device)
            if bits.dtype != kept.dtype or not torch.equal(bits, kept):
                return name
        return None

    def restore(self) -> None:
        """Write back what is remembered, where it is still of the same shape and type."""
        for name, tensor in self._now().items():
            kept = self._kept.get(name)
            if kept is not None and (kept.shape, kept.dtype) == (_bits(tensor).shape, _bits(tensor).dtype):
                _bits(tensor).copy_(kept)

    def check(self, within: str | None = None) -> None:
        for place, layer in self._model.named_modules():
            if within in (None, place):
                _check_saving(place, layer)
        name = self.changed(within)
        if name is not None:
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        raise DatalensError(
            f"{name} of the model has changed, and not by a private step: no noise is added to what a layer keeps of "
            "records for itself; replace the layer, or put it into eval() mode (to set weights yourself, use "
            "load_state_dict of the whole model between two steps)"
        )

    def attach(self, busy: Callable[[], bool]) -> None:
        """Check whenever state_dict(), or a copy, is asked for, of a part too; remember what load_state_dict() sets.

        Not while a step is made. Copies of the model are left alone.
        """
        model = self._model
        persistent = set(model.state_dict())

        def loading(module: nn.Module, *_: Any) -> None:
            if module is model and busy():
                raise DatalensError("load_state_dict after a forward pass: call it between two steps")

        def loaded(module: nn.Module, keys: Any) -> None:
            missing = {name.removeprefix("_module.") for name in keys.missing_keys} | set(keys.missing_keys)
            if module is model:
                set_now = persistent - missing
                self.remember(tensor for name, tensor in self._now().items() if name.split(" ", 1)[1] in set_now)

        for name, layer in model.named_modules():
            layer.register_state_dict_pre_hook(_Leaving(self, None if layer is model else name, layer))
        model.register_load_state_dict_pre_hook(loading)
        model.register_load_state_dict_post_hook(loaded)


class _Leaving:
    """A hook of a layer's state_dict(), also asked when the layer is copied or pickled. Its copies look at nothing."""

    def __init__(self, watch: StateWatch, within: str | None, layer: nn.Module) -> None:
        self._watch, self._within, self._layer = watch, within, layer

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self._layer:
            self._watch.check(self._within)

    def __reduce__(self) -> Any:
        self._watch.check(self._within)
        return _nothing, ()


def _check_saving(name: str, layer: nn.Module) -> None:
    """Raise if code that is not torch's or Opacus's has a say in what state_dict() holds: it may put anything there."""
    own = (*layer._state_dict_hooks.values(), *layer._state_dict_pre_hooks.values())
    for code in (layer.state_dict, layer._save_to_state_dict, *own):
        if str(getattr(code, "__module__", "")).split(".")[0] not in _TRUSTED:
            raise DatalensError(
                f"layer {name or 'model'} ({type(layer).__name__}) has code of its own that makes or changes its "
                "state_dict(), where what it keeps of records could leave without noise: take it out, or change names "
                "in the dictionary that you get"
            )


def _nothing() -> Callable[..., None]:
    return _look_at_nothing


def _look_at_nothing(*_: Any) -> None:
    pass


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers: NaN equals itself, and −0 is not 0."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.view(_WHOLE[plain.element_size()])
