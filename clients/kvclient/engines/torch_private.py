"""Private members of torch that the hooks read, because no public name exists or it costs several times as much.

No other module reads private members of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module


def global_forward_hooks() -> tuple[Mapping[Any, Any], ...]:
    """Return the registries of hooks that run before and after the forward pass of every module."""
    return torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks


def forward_hooks(module: torch.nn.Module) -> tuple[Mapping[Any, Any], ...]:
    """Return the registries of hooks that run before and after a module's forward pass."""
    return module._forward_pre_hooks, module._forward_hooks


def parametrizations(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return what recomputes weights of a module in each pass, by the name of the weight; None: nothing ever did."""
    parametrized = module._modules.get("parametrizations")
    return None if parametrized is None else parametrized._modules


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers of a module, without those of its children."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, whose changes are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def script_type(value: torch.ScriptObject) -> str:
    """Return the type of a TorchScript object."""
    return str(value._type())
