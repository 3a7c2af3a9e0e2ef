"""Who has a hand in a model's forward passes: this hook itself, and others, whose doings the weights do not tell.

Activation steering adds to what a layer says, a parametrization computes a weight anew in each pass: KV of such a model is not
that of its weights. A hook may as well do nothing but look; which, cannot be told from outside, so that all count but a few.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.nn.modules import module as torch_module

ForwardObserver = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]
"""Called before a forward pass with its arguments; returns other arguments, or None to keep them."""

_HARMLESS = ("accelerate.", "transformers.")
"""Modules whose hooks move, capture or mark what passes, or act in training only."""


class ForwardObserverHook:
    """A forward hook that calls a bound method, held weakly. A copy of the model, or one that was pickled, has no observer."""

    def __init__(self, observer: ForwardObserver | None = None) -> None:
        self._observer = None if observer is None else weakref.WeakMethod(observer)

    def __call__(self, _model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        observer = None if self._observer is None else self._observer()
        return None if observer is None else observer(args, kwargs)

    def __reduce__(self) -> tuple[type[ForwardObserverHook], tuple[()]]:
        return type(self), ()


class ForwardHooks:
    """A watch on the hooks of one model.

    Args:
        model: with all its submodules, as they are at each look.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._bare: list[Sized] = []
        self._known: list[tuple[Sized, int]] = []
        self.foreign()

    def foreign(self) -> str:
        """Why the forward pass is not that of the model alone, empty where it is. Looks everywhere, at some 1 µs a module."""
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
        """The same for hooks that came after the last look, at a hundredth of its cost: for every single pass."""
        if any(self._bare) or any(len(hooks) != count for hooks, count in self._known):
            return self.foreign()
        return ""


def _places(model: torch.nn.Module) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """All that others can have put a hand in, with whose it is."""
    yield "all modules", torch_module._global_forward_pre_hooks
    yield "all modules", torch_module._global_forward_hooks
    for module in model.modules():
        kind = type(module).__name__
        yield kind, module._forward_pre_hooks
        yield kind, module._forward_hooks
        parametrized = module._modules.get("parametrizations")  # a weight that is computed anew in each pass
        if parametrized is not None:
            yield kind, parametrized._modules


def _is_harmless(hook: object) -> bool:
    return isinstance(hook, ForwardObserverHook) or str(getattr(hook, "__module__", "")).startswith(_HARMLESS)


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
