"""The connector in a vLLM on a CPU whose pages are moved as those of a GPU are: by a device that copies late, in any order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "device"))

from deferred import DeferredDevice, FakePinning

from kvclient.engines.vllm.connector import KVStoreConnector
from kvclient.engines.vllm.memory.device_pages import device_pages
from kvclient.engines.vllm.memory.pages import Pages
from kvclient.engines.vllm.pd_connector import KVStorePDConnector


class LateConnector(KVStoreConnector):
    """The connector with pages of a late device."""

    def _make_pages(self, groups: Sequence[Sequence[Any]]) -> list[Pages]:
        strategy: Any = self._options.device_copies
        return device_pages(
            groups,
            self._kv_cache_config.num_blocks,
            DeferredDevice(len(groups), FakePinning()),
            strategy=strategy,
            staging_bytes=self._options.device_staging_bytes,
            gds=self._options.device_gds,  # type: ignore[arg-type]  # checked there
            ring_bytes=self._options.device_gds_bytes,
        )


class LatePDConnector(LateConnector, KVStorePDConnector):
    """The connector of prefill and decode engines with pages of a late device."""
