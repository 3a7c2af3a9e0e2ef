"""The connector in a vLLM on a CPU whose pages are moved as those of a GPU are: by a device that copies late, in any order.

With ``device_gds`` ``forced`` the device says that it is a GPU, and so has kernels (``stand_in_kernels``) and a landing ring.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "device"))

from deferred import DeferredDevice, FakePinning
from landing_bed import QuickChecksums, hash_quickly

from kvclient.engines.vllm.connector import KVStoreConnector
from kvclient.engines.vllm.memory.device_pages import device_pages
from kvclient.engines.vllm.memory.pages import Pages
from kvclient.engines.vllm.pd_connector import KVStorePDConnector


def stand_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and xxhash stand in for the kernels, also without Triton, which vLLM on a CPU does not have."""
    with monkeypatch.context() as patch:
        if find_spec("triton") is None:
            for name in ("triton", "triton.language"):
                patch.setitem(sys.modules, name, MagicMock())
        import kvclient.device.triton_checksum
        import kvclient.device.triton_scatter  # noqa: F401
    hash_quickly(monkeypatch)


class LateConnector(KVStoreConnector):
    """The connector with pages of a late device."""

    def _make_pages(self, groups: Sequence[Sequence[Any]]) -> list[Pages]:
        strategy: Any = self._options.device_copies
        device = DeferredDevice(len(groups), FakePinning())
        if self._options.device_gds == "forced":
            device.memory = torch.device("cuda", 0)  # its tensors stay on the host
        return device_pages(
            groups,
            self._kv_cache_config.num_blocks,
            device,
            strategy=strategy,
            staging_bytes=self._options.device_staging_bytes,
            checksums=self._options.device_checksums,
            gds=self._options.device_gds,  # type: ignore[arg-type]  # checked there
            ring_bytes=self._options.device_gds_bytes,
        )


class LatePDConnector(LateConnector, KVStorePDConnector):
    """The connector of prefill and decode engines with pages of a late device."""


__all__ = ["LateConnector", "LatePDConnector", "QuickChecksums", "stand_in_kernels"]
