"""Weights of a model: a digest that identifies them, and a quick check for changes."""

from __future__ import annotations

import torch
import xxhash

from kvclient.engines import torch_private
from kvclient.engines.held_weights import held_digest

_SAMPLES = 3
"""Approximate number of positions that ``fingerprint`` reads along each dimension of a tensor."""


def weights_digest(model: torch.nn.Module) -> str:
    """Digest all weights bit for bit, as 32 hex digits. Reads all weights once, at about 10 GB/s.

    Every entry of the model's state counts, packed (quantized) parameters too, and so do buffers that are not part of it: a
    cast of the whole model rounds the frequencies of its rotary embedding, while loading it in that dtype does not.

    Raises:
        InvalidArgument: some weights are not in memory (offloaded), or their bytes cannot be read.
    """
    return held_digest({**dict(model.named_buffers()), **model.state_dict()}.items(), whole=True)


def fingerprint(model: torch.nn.Module) -> str:
    """Hash each tensor's address, write counter and a few of its numbers; takes about 20 microseconds per tensor.

    The result changes if weights are cast, moved, replaced or changed in place. Some writes (``weight.data += …``) change only
    the numbers, so such a write to a single number can go undetected.
    """
    digest = xxhash.xxh3_128()
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for module in model.modules():
        packed = module.__dict__.get("_packed_params")  # quantized modules replace the tensor as a whole
        if packed is not None:
            digest.update(b"packed %d" % id(packed))
        for tensor in torch_private.own_tensors(module):
            written = torch_private.write_count(tensor)
            digest.update(f"{tensor.dtype}{tensor.device}{tuple(tensor.shape)}{written}".encode())
            if type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.device.type != "meta" and not tensor.is_quantized:
                digest.update(b"%d" % tensor.data_ptr())
                samples.setdefault(tensor.device, []).append(_sample(tensor))
    for some in samples.values():  # one copy per device
        digest.update(torch.cat(some).cpu().numpy().data)
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a few numbers, spread over a tensor."""
    slices = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)
    return tensor.detach()[slices].contiguous().reshape(-1).view(torch.uint8)
