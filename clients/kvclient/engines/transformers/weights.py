"""A model's weights: what tells them apart from all others, and a quick look at whether they are still what they were."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvclient import InvalidArgument

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.qscheme)
_SAMPLES = 3
"""About so many places along each dimension of a tensor are looked at by ``fingerprint``."""

Piece = bytes | npt.NDArray[np.uint8]


def weights_digest(model: torch.nn.Module) -> str:
    """32 hex digits of all weights, bit for bit: other weights, another namespace. Reads them all once (10 GB/s or so).

    Every entry of the model's state counts, packed (quantized) parameters too, and so do buffers that are not part of it: a
    cast of the whole model rounds the frequencies of its rotary embedding, which loading it in that dtype does not.

    Raises:
        InvalidArgument: some are not in memory (offloaded), or their bytes cannot be read.
    """
    digest = xxhash.xxh3_128()
    for name, value in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        digest.update(name.encode())
        try:
            for piece in _pieces(value):
                digest.update(piece if isinstance(piece, bytes) else piece.data)
        except (RuntimeError, TypeError, RecursionError) as error:  # a kind of tensor that does not show its bytes
            raise InvalidArgument(
                "weights cannot be read and so not be told apart: give weights_epoch",
                parameter=name,
                kind=type(value).__name__,
                error=str(error)[:200],
            ) from error
    return digest.hexdigest()


def _pieces(value: object) -> Iterator[Piece]:
    """All that an entry of a model's state consists of.

    Raises:
        InvalidArgument: it is offloaded.
        RuntimeError, TypeError: its bytes cannot be read.
    """
    if isinstance(value, torch.Tensor):
        yield from _tensor_pieces(value)
    elif isinstance(value, _PLAIN):
        yield f"|{type(value).__name__} {value!r}".encode()
    elif isinstance(value, io.BytesIO):
        yield from _pieces(value.getvalue())
    elif isinstance(value, Mapping):
        yield f"|mapping {len(value)}".encode()
        for key, part in value.items():
            yield from _pieces(key)
            yield from _pieces(part)
    elif isinstance(value, list | tuple):
        yield f"|sequence {len(value)}".encode()
        for part in value:
            yield from _pieces(part)
    elif isinstance(value, torch.ScriptObject):  # parameters packed for a kernel: what they are saved as
        yield f"|packed {value._type()}".encode()
        yield from _pieces(value.__getstate__())
    else:
        raise TypeError(f"neither a tensor nor made of tensors: {type(value).__name__}")


def _tensor_pieces(tensor: torch.Tensor) -> Iterator[Piece]:
    """The same of a tensor."""
    if tensor.device.type == "meta":
        raise InvalidArgument("weights are offloaded and cannot be told apart: give weights_epoch", shape=tuple(tensor.shape))
    yield f"|{tensor.dtype}|{tuple(tensor.shape)}".encode()
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper (quantized, sharded): the tensors within
        names, context = tensor.__tensor_flatten__()
        yield f"|{type(tensor).__name__} {context!r}".encode()
        for name in names:
            yield from _pieces(getattr(tensor, name))
    elif tensor.is_quantized:
        yield from _pieces(tensor.qscheme())
        if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
            yield from _pieces((tensor.q_scale(), tensor.q_zero_point()))
        else:
            scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            yield from _pieces((tensor.q_per_channel_axis(), scales, zeros))
        yield from _tensor_pieces(tensor.int_repr())
    else:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def fingerprint(model: torch.nn.Module) -> str:
    """Another one where weights were cast, moved, replaced or changed in place, at some 20 microseconds a tensor.

    A look at where each lies, how often it was written to, and a few of its numbers: some ways of writing (``weight.data += …``)
    leave no other trace. What changes single numbers in such a way is not seen.
    """
    digest = xxhash.xxh3_128()
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for module in model.modules():
        packed = module.__dict__.get("_packed_params")  # quantized modules replace it as a whole
        if packed is not None:
            digest.update(b"packed %d" % id(packed))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            written = 0 if tensor.is_inference() else tensor._version
            digest.update(f"{tensor.dtype}{tensor.device}{tuple(tensor.shape)}{written}".encode())
            if type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.device.type != "meta" and not tensor.is_quantized:
                digest.update(b"%d" % tensor.data_ptr())
                samples.setdefault(tensor.device, []).append(_sample(tensor))
    for some in samples.values():  # one copy a device
        digest.update(torch.cat(some).cpu().numpy().data)
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a few numbers, from all over a tensor."""
    places = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)
    return tensor.detach()[places].contiguous().reshape(-1).view(torch.uint8)
