"""Device memory of a torch tensor: a pool, or an engine's paged cache. Imports torch.

Reads are complete when ``IoEngine.read_device`` returns, and are not ordered with a stream: kernels that used the memory before
must have ended. Copies use a separate stream of the calling thread: on the default stream, they and an engine's kernels would
wait for each other.
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
    """The bytes of a contiguous tensor as ``DeviceMemory``.

    Args:
        tensor: on a CUDA device, or on the CPU as a fake. It is kept alive.

    Raises:
        InvalidArgument: the tensor is not contiguous, or on another kind of device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous() or tensor.device.type not in ("cuda", "cpu"):
            raise InvalidArgument("device memory must be a contiguous tensor on cuda or cpu", device=tensor.device)
        self._bytes = tensor.detach().view(-1).view(torch.uint8)
        self.nbytes = self._bytes.numel()

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        data = (self._bytes.data_ptr(), False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}

    def fill(self, source: memoryview) -> None:
        """See ``DeviceMemory``."""
        with self._on_own_stream():
            self._bytes.copy_(torch.frombuffer(source, dtype=torch.uint8))

    def fetch(self, target: memoryview) -> None:
        """See ``DeviceMemory``."""
        with self._on_own_stream():
            torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes)

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Run the copies of this context on a stream of the calling thread. They are complete when the context ends."""
        if not self._bytes.is_cuda:
            yield
            return
        streams = _own.__dict__.setdefault("streams", {})
        device = self._bytes.device
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        # both: else leaving the context switches to the previous device, in a new thread GPU 0, and creates a CUDA context there
        with torch.cuda.device(device), torch.cuda.stream(streams[device]):
            yield
        streams[device].synchronize()
