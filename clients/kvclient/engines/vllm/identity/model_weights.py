"""The weights that a vLLM worker holds in memory, as a digest that names them.

vLLM gives a connector no reference to the model. At ``register_kv_caches`` the model runner is the caller, so it is found on the
call stack; afterwards it is held weakly and asked for its model each time.

On CPUs most linear layers move their weights into a kernel's private memory (oneDNN) and keep an empty parameter. Such a layer is
read through its kernel: multiplied with unit vectors it returns columns of its weights, bit for bit, with any number of
threads. Every linear layer of a CPU is sampled in this way, at least four columns of each.
"""

from __future__ import annotations

import inspect
import logging
import secrets
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from kvclient import InvalidArgument
from kvclient.engines.held_weights import held_digest

_log = logging.getLogger(__name__)
_SAMPLE_BYTES = 4096
_LEAST_COLUMNS = 4
_PACKED_LATENTS = ("_w_uk_packed", "_w_uv_packed")
"""Attributes of the AMX implementation of latent attention that hold the weights of ``kv_b_proj``."""
_KERNEL_INPUTS = {torch.float32, torch.float16, torch.bfloat16}
"""Weights of other dtypes are quantized: their kernels take input of the model's dtype."""


class ModelWeights:
    """The weights of one worker's model, and of its draft model.

    Args:
        runner: vLLM's model runner; None: it was not found.
        dtype: of the model's activations.
    """

    def __init__(self, runner: Any, dtype: Any) -> None:  # noqa: ANN401  # vLLM's types
        self._runner = None if runner is None else weakref.ref(runner)
        self._dtype = dtype

    @classmethod
    def of_caller(cls, dtype: Any) -> ModelWeights:  # noqa: ANN401
        """Find the model runner among the callers."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if callable(getattr(type(owner), "get_model", None)) and hasattr(owner, "model"):
                return cls(owner, dtype)
            frame = frame.f_back
        return cls(None, dtype)

    def digest(self) -> str:
        """Digest all weights. If they cannot be read, return another text each time: they may be others each time."""
        try:
            with torch.inference_mode():
                return held_digest(self._tensors())
        except Exception as error:  # noqa: BLE001  # a layer is read through its kernel, which raises errors of many types
            _log.warning("weights not readable: no KV is shared unless weights_epoch names them (error=%s)", error)
            return f"unique:{secrets.token_hex(16)}"

    def _tensors(self) -> Iterator[tuple[str, object]]:
        runner = None if self._runner is None else self._runner()
        if runner is None:
            raise InvalidArgument("this version of vLLM does not show its model to a connector")
        draft = getattr(runner, "get_draft_model", lambda: getattr(getattr(runner, "drafter", None), "model", None))()
        for prefix, model in (("", runner.get_model()), ("draft ", draft)):
            if isinstance(model, torch.nn.Module):
                for name, value in _named_tensors(model, self._dtype):
                    yield f"{prefix}{name.replace('base_layer.', '')}", value  # as without adapters


def _named_tensors(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, object]]:
    """Yield all parameters and buffers, and columns of the linear layers whose kernel holds the weights.

    Raises:
        InvalidArgument: the weights of a layer cannot be read.
    """
    from vllm.model_executor.layers.linear import LinearBase

    packed = _packed_latents(model)
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, one in own:
            yield f"{name}.{key}", one
        empty = [key for key, one in own if key.endswith("weight") and not one.numel()]
        kernels = [one for key, one in own if key.endswith("weight") and one.ndim > 2]  # of a convolution, in a linear layer
        on_cpu = all(one.device.type == "cpu" for _, one in own)
        if id(module) in packed:
            yield f"{name} packed", packed[id(module)]
        elif isinstance(module, LinearBase) and not kernels and not _is_plain(module, empty=bool(empty)):
            if empty or on_cpu or not any(one.numel() for _, one in own):
                yield f"{name} columns", _columns(module, dtype)
        elif empty:
            raise InvalidArgument("the weights of a layer are not readable", layer=name, kind=type(module).__name__)


def _is_plain(layer: Any, *, empty: bool) -> bool:  # noqa: ANN401
    """Whether the parameters of a linear layer on a CPU are its weights: it has no kernel, because a model uses its weights only.

    Short convolutions beside linear attention are such layers.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    unquantized = type(layer.quant_method) is UnquantizedLinearMethod
    return unquantized and not empty and next(layer.parameters()).device.type == "cpu" and not hasattr(layer, "cpu_linear")


def _packed_latents(model: torch.nn.Module) -> dict[int, list[torch.Tensor]]:
    """The tensors that stand for an emptied ``kv_b_proj``, by the id of that layer."""
    found = {}
    for module in model.modules():
        implementation = getattr(module, "impl", None)
        tensors = [getattr(implementation, name, None) for name in _PACKED_LATENTS]
        if all(isinstance(one, torch.Tensor) for one in tensors) and hasattr(module, "kv_b_proj"):
            found[id(module.kv_b_proj)] = tensors
    return found  # type: ignore[return-value]


def _columns(layer: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
    """Some columns of a linear layer's weights, read through its kernel.

    The kernel of weights in another dtype than the model's (a router of experts) takes input of that dtype, without a check.
    """
    own = getattr(getattr(layer, "weight", None), "dtype", dtype)
    dtype = own if own in _KERNEL_INPUTS else dtype
    width = int(getattr(layer, "input_size_per_partition", 0) or layer.input_size)
    outputs = int(getattr(layer, "output_size_per_partition", 0) or layer.output_size)
    count = min(width, max(_LEAST_COLUMNS, _SAMPLE_BYTES // max(1, outputs * dtype.itemsize)))
    unit = torch.zeros(count, width, dtype=dtype, device=next(iter(layer.parameters())).device)
    unit[torch.arange(count), torch.arange(count) * width // count] = 1
    columns: torch.Tensor = layer.quant_method.apply(layer, unit)
    return columns


def later_digest(weights: ModelWeights, parallel_config: Any) -> Callable[[], str]:  # noqa: ANN401
    """Return a function that digests the weights of a worker whose engine runs.

    Data-parallel ranks, over which the experts of a model may be spread, do not step together. So the digests of the others are
    not known then, and the function returns another text each time.
    """
    from vllm.distributed.parallel_state import get_world_group

    elastic = getattr(parallel_config, "enable_elastic_ep", False)
    if get_world_group().world_size <= parallel_config.world_size and not elastic:
        return weights.digest
    return lambda: f"{weights.digest()}:{secrets.token_hex(16)}"


def gather_digests(own: str, parallel_config: Any) -> list[str]:  # noqa: ANN401
    """Gather the digests of all workers that compute together, by rank. Every worker calls this at the start.

    These include the other data-parallel ranks, over which the experts of a model may be spread.
    """
    from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group

    world = get_world_group()
    if getattr(parallel_config, "enable_elastic_ep", False):  # the experts of other ranks come and go: a name of this engine's
        world, own = get_inner_dp_world_group(), f"{own}:{secrets.token_hex(16)}"
    if world.world_size == 1:
        return [own]
    digests: list[str] = [""] * world.world_size
    torch.distributed.all_gather_object(digests, own, group=world.cpu_group)
    return digests
