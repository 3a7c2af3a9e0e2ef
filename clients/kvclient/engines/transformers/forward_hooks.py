"""Detects forward hooks of others on a model, whose effects the weights do not show; also observes passes for this hook.

Activation steering adds to a layer's output; a parametrization recomputes a weight in each pass. Such a model's KV differs from
the KV that its weights imply. Other hooks only observe, but this cannot be determined from outside. So all hooks count, except a
few known ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch

from kvclient.engines import torch_private

ForwardObserver = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]
"""Called before a forward pass with its arguments; returns replacement arguments, or None to keep them."""

_HARMLESS = ("accelerate.", "transformers.")
"""Modules whose hooks only move, capture or mark data, or act only in training."""


class ForwardObserverHook:
    """A forward hook that calls a weakly held bound method. Copied or unpickled models have no observer."""

    def __init__(self, observer: ForwardObserver | None = None) -> None:
        self._observer = None if observer is None else weakref.WeakMethod(observer)

    def __call__(self, _model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        observer = None if self._observer is None else self._observer()
        return None if observer is None else observer(args, kwargs)

    def __reduce__(self) -> tuple[type[ForwardObserverHook], tuple[()]]:
        return type(self), ()


class ForwardHooks:
    """Watches the hooks of one model.

    Args:
        model: the model; its current submodules are searched on each check.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._bare: list[Sized] = []
        self._known: list[tuple[Sized, int]] = []
        self.foreign()

    def foreign(self) -> str:
        """Return why the forward pass is not the model's alone; empty: it is. Searches all modules, at about 1 µs per module."""
        bare: list[Sized] = []
        known: list[tuple[Sized, int]] = []
        found = ""
        for owner, hooks in _places(self._model):
            if not hooks:
                bare.append(hooks)
                continue
            known.append((hooks, len(hooks)))
            other = next((hook for hook in tuple(hooks.values()) if not _is_harmless(hook)), None)
            if other is not None and not found:
                found = f"others have a hand in the model's forward pass: {_name_of(other)} on {owner}"
        self._bare, self._known = bare, known
        return found

    def appeared(self) -> str:
        """Do the same for hooks added since the last full check, at a hundredth of its cost: suitable for every pass."""
        if any(self._bare) or any(len(hooks) != count for hooks, count in self._known):
            return self.foreign()
        return ""


def _places(model: torch.nn.Module) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield everything that can alter the forward pass, with the module that owns it."""
    for hooks in torch_private.global_forward_hooks():
        yield "all modules", hooks
    for module in model.modules():
        kind = type(module).__name__
        for hooks in torch_private.forward_hooks(module):
            yield kind, hooks
        parametrized = torch_private.parametrizations(module)
        if parametrized is not None:
            yield kind, parametrized


def _is_harmless(hook: object) -> bool:
    return isinstance(hook, ForwardObserverHook) or str(getattr(hook, "__module__", "")).startswith(_HARMLESS)


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
