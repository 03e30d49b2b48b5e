"""A bit-for-bit copy of a model's parameters and buffers, which detects what a layer writes there by itself.

Noise is added only to gradients. A moving average, a codebook or a frozen parameter that a layer computes from records
would be released with the weights, without noise. `(id, _version)` of a tensor does not reveal a write through `.data`,
so values are compared.
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
    """Copies of all parameters and buffers of a model, frozen and non-persistent ones too.

    Raises:
        DatalensError: the model has state that cannot be compared.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if type(layer).get_extra_state is not nn.Module.get_extra_state:
                raise DatalensError(
                    f"layer {name or 'model'} ({type(layer).__name__}) puts more than tensors into state_dict() "
                    "(get_extra_state), to which no noise is added: keep it outside the model"
                )
            _check_saving(name, layer)
        self._model = model
        self._kept: dict[str, Tensor] = {}
        for name, tensor in self._now().items():
            lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            if lazy or tensor.layout is not torch.strided or tensor.is_quantized:
                raise DatalensError(
                    f"{name} cannot be watched, as it is not a plain tensor: make it one, or keep it outside the model"
                )
            self._kept[name] = _bits(tensor).clone()

    def _now(self) -> dict[str, Tensor]:
        parameters = self._model.named_parameters(remove_duplicate=False)
        buffers = self._model.named_buffers(remove_duplicate=False)
        return {f"parameter {name}": p for name, p in parameters} | {f"buffer {name}": b for name, b in buffers}

    def remember(self, tensors: Iterable[Tensor]) -> None:
        """Update the copies of tensors that were changed legitimately: by a private step, or by load_state_dict."""
        wanted = {id(tensor) for tensor in tensors}
        for name, tensor in self._now().items():
            if id(tensor) in wanted:
                self._kept[name] = _bits(tensor).clone()

    def changed(self, within: str | None = None) -> str | None:
        """Return kind and name of the first tensor that differs from its copy, was added or was removed; else None.

        Args:
            within: Name of a layer, to look at its own tensors only and not at those of its sublayers.
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
        """Write the copies back to tensors that still have the same shape and type."""
        for name, tensor in self._now().items():
            kept = self._kept.get(name)
            if kept is not None and (kept.shape, kept.dtype) == (_bits(tensor).shape, _bits(tensor).dtype):
                _bits(tensor).copy_(kept)

    def check(self, within: str | None = None) -> None:
        """Raise if a tensor has changed, or if state_dict() has been given code of its own.

        Args:
            within: Name of a layer, to look at its own tensors only.
        """
        for place, layer in self._model.named_modules():
            if within in (None, place):
                _check_saving(place, layer)
        name = self.changed(within)
        if name is not None:
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Raise the error for a tensor that has changed."""
        raise DatalensError(
            f"{name} of the model has changed other than by a private step, and no noise is added to what a layer "
            "stores about records: replace the layer, or put it into eval() mode (to set weights yourself, use "
            "load_state_dict of the whole model between two steps)"
        )

    def attach(self, busy: Callable[[], bool]) -> None:
        """Check the model, or a part of it, before every state_dict() and copy, and follow load_state_dict().

        Copies of the model are not checked.

        Args:
            busy: Whether a step is in progress, during which load_state_dict() is refused.
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
    """A hook that checks a layer before state_dict(), and when it is copied or pickled. Its own copies do nothing."""

    def __init__(self, watch: StateWatch, within: str | None, layer: nn.Module) -> None:
        self._watch, self._within, self._layer = watch, within, layer

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self._layer:
            self._watch.check(self._within)

    def __reduce__(self) -> Any:
        self._watch.check(self._within)
        return _nothing, ()


def _check_saving(name: str, layer: nn.Module) -> None:
    """Raise if code other than torch's or Opacus's contributes to state_dict(): it could add anything to it."""
    hooks = (*layer._state_dict_hooks.values(), *layer._state_dict_pre_hooks.values())
    for code in (layer.state_dict, layer._save_to_state_dict, *hooks):
        if str(getattr(code, "__module__", "")).split(".")[0] not in _TRUSTED:
            raise DatalensError(
                f"layer {name or 'model'} ({type(layer).__name__}) has code of its own that makes or changes its "
                "state_dict(), by which what it stores about records could leave without noise: remove that code, or "
                "rename keys in the dictionary that state_dict() returns"
            )


def _nothing() -> Callable[..., None]:
    return _look_at_nothing


def _look_at_nothing(*_: Any) -> None:
    pass


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of the same memory as integers, so that NaN equals itself and −0 differs from 0."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.view(_WHOLE[plain.element_size()])
