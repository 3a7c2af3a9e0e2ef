"""Device memory that belongs to a torch tensor: a pool's, or an engine's paged cache. Imports torch, so import it where that is.

Reads are done when ``read_device`` returns, and are ordered with no stream: kernels that used the memory before must have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.core.errors import InvalidArgument


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
        self._bytes.copy_(torch.frombuffer(source, dtype=torch.uint8))
        self._finish()

    def fetch(self, target: memoryview) -> None:
        """See ``DeviceMemory``."""
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._bytes)
        self._finish()

    def _finish(self) -> None:
        if self._bytes.is_cuda:  # copies from and to memory that is not pinned have ended anyhow, as far as torch promises
            torch.cuda.current_stream(self._bytes.device).synchronize()
