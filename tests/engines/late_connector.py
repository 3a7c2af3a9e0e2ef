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


def late_pages(connector: KVStoreConnector, groups: Sequence[Sequence[Any]]) -> list[Pages]:
    options = connector._options
    strategy: Any = options.device_copies
    device = DeferredDevice(len(groups), FakePinning())
    blocks = connector._kv_cache_config.num_blocks
    return device_pages(groups, blocks, device, strategy=strategy, staging_bytes=options.device_staging_bytes)


class LateConnector(KVStoreConnector):
    def _make_pages(self, groups: Sequence[Sequence[Any]]) -> Sequence[Pages]:
        return late_pages(self, groups)


class LatePDConnector(KVStorePDConnector):
    def _make_pages(self, groups: Sequence[Sequence[Any]]) -> Sequence[Pages]:
        return late_pages(self, groups)
