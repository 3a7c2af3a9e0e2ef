"""Device memory that belongs to a torch tensor: a pool's, or an engine's paged cache. Imports torch, so import it where that is.

Reads are done when ``read_device`` returns, and are ordered with no stream: kernels that used the memory before must have ended.
Copies are on a stream of the calling thread's own: on the default one they and an engine's kernels would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvstore.core.errors import InvalidArgument

_own = threading.local()


class TensorMemory:
    """A contiguous tensor's bytes as ``DeviceMemory``.

    Args:
        tensor: on a CUDA device, or on the CPU, whose memory then plays the device's. It is kept alive.

    Raises:
        InvalidArgument: its elements do not follow each other, or it lies elsewhere.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous() or tensor.device.type not in ("cuda", "cpu"):
            raise InvalidArgument("device memory is a contiguous tensor on cuda or cpu", device=tensor.device)
        self._bytes = tensor.detach().view(-1).view(torch.uint8)
        self.nbytes = self._bytes.numel()

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        data = (self._bytes.data_ptr(), False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}

    def fill(self, source: memoryview) -> None:
        """See ``DeviceMemory``."""
        with self._apart():
            self._bytes.copy_(torch.frombuffer(source, dtype=torch.uint8))

    def fetch(self, target: memoryview) -> None:
        """See ``DeviceMemory``."""
        with self._apart():
            torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Copies within it are done when it ends, and wait for nobody's kernels."""
        if not self._bytes.is_cuda:
            yield
            return
        streams = _own.__dict__.setdefault("streams", {})
        device = self._bytes.device
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        # both, or what goes back to the device that was current before makes a context there: in a new thread that is GPU 0
        with torch.cuda.device(device), torch.cuda.stream(streams[device]):
            yield
        streams[device].synchronize()
