"""A digest of weights as a model holds them in memory.

It does not depend on how the weights were loaded or on later changes of their files. Two models with equal digests compute equal
KV if their code and configuration are equal too.

Tensors in host memory are hashed whole. For a tensor on a device the digest covers 4 KiB of evenly spread samples, and the sum of
all its bytes as integers. So every tensor counts, every change of a single element is detected, and only a few KiB per tensor
cross the bus. Only changes that keep the sum and miss every sample go undetected, such as two rows that swap places.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvclient import InvalidArgument
from kvclient.engines.torch_private import script_type

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.qscheme)
_SAMPLE_BYTES = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Piece = bytes | npt.NDArray[np.uint8]


def held_digest(values: Iterable[tuple[str, object]], *, whole: bool | None = None) -> str:
    """Digest named tensors, or structures of tensors, as 32 hex digits.

    Args:
        values: name and value of each. Their order does not matter.
        whole: True: hash all bytes of every tensor; False: only samples and sum; None: whole in host memory, samples and sum on
            devices.

    Raises:
        InvalidArgument: a tensor is not in memory (offloaded), or its bytes cannot be read.
    """
    digest = xxhash.xxh3_128()
    for name, value in sorted(values, key=lambda named: named[0]):
        digest.update(name.encode())
        try:
            for piece in _pieces(value, whole=whole):
                digest.update(piece if isinstance(piece, bytes) else piece.data)
        except (RuntimeError, TypeError, RecursionError) as error:  # a kind of tensor that does not expose its bytes
            raise InvalidArgument(
                "the weights cannot be read: name them with weights_epoch",
                parameter=name,
                kind=type(value).__name__,
                error=str(error)[:200],
            ) from error
    return digest.hexdigest()


def _pieces(value: object, *, whole: bool | None) -> Iterator[Piece]:
    """Yield the bytes to hash of one value.

    Raises:
        InvalidArgument: a tensor is offloaded.
        RuntimeError, TypeError: the bytes cannot be read.
    """
    if isinstance(value, torch.Tensor):
        yield from _tensor_pieces(value, whole=whole)
    elif isinstance(value, _PLAIN):
        yield f"|{type(value).__name__} {value!r}".encode()
    elif isinstance(value, io.BytesIO):
        yield from _pieces(value.getvalue(), whole=whole)
    elif isinstance(value, Mapping):
        yield f"|mapping {len(value)}".encode()
        for key, part in value.items():
            yield from _pieces(key, whole=whole)
            yield from _pieces(part, whole=whole)
    elif isinstance(value, list | tuple):
        yield f"|sequence {len(value)}".encode()
        for part in value:
            yield from _pieces(part, whole=whole)
    elif isinstance(value, torch.ScriptObject):  # parameters packed for a kernel: hash their saved form
        yield f"|packed {script_type(value)}".encode()
        yield from _pieces(value.__getstate__(), whole=whole)
    else:
        raise TypeError(f"neither a tensor nor made of tensors: {type(value).__name__}")


def _tensor_pieces(tensor: torch.Tensor, *, whole: bool | None) -> Iterator[Piece]:
    """Yield the bytes to hash of one tensor."""
    if tensor.device.type == "meta":
        raise InvalidArgument("the weights are offloaded: name them with weights_epoch", shape=tuple(tensor.shape))
    yield f"|{tensor.dtype}|{tuple(tensor.shape)}".encode()
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper (quantized, sharded): hash the inner tensors
        names, context = tensor.__tensor_flatten__()
        yield f"|{type(tensor).__name__} {context!r}".encode()
        for name in names:
            yield from _pieces(getattr(tensor, name), whole=whole)
    elif tensor.is_quantized:
        yield from _pieces(tensor.qscheme(), whole=whole)
        if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
            yield from _pieces((tensor.q_scale(), tensor.q_zero_point()), whole=whole)
        else:
            scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            yield from _pieces((tensor.q_per_channel_axis(), scales, zeros), whole=whole)
        yield from _tensor_pieces(tensor.int_repr(), whole=whole)
    elif whole or (whole is None and tensor.device.type == "cpu"):
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        yield from _summary(tensor.detach().as_subclass(torch.Tensor))


def _summary(tensor: torch.Tensor) -> Iterator[Piece]:
    """Yield samples and the sum of a tensor, computed on its device. A transposed tensor is not copied."""
    if not tensor.numel():
        return
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    flat = tensor.permute(order).contiguous().view(-1)  # elements in memory order
    yield f"|{order}".encode()
    step = max(1, flat.numel() * flat.element_size() // _SAMPLE_BYTES) | 1  # odd, so that samples drift over the columns
    yield flat[::step].contiguous().view(torch.uint8).cpu().numpy()
    integers = flat.view(torch.uint8 if flat.dtype is torch.bool else _INTEGERS.get(flat.element_size(), torch.uint8))
    yield int(integers.sum(dtype=torch.int64)).to_bytes(8, "little", signed=True)
