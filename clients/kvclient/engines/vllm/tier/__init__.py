"""The store as a secondary tier of vLLM, and the connector that gives it an identity.

vLLM copies pages between the device and host memory itself, so every model, layout and device that its offloading serves works.
Loaded out of tree: ``kv_connector`` is ``KVStoreOffloadingConnector``, ``kv_connector_module_path`` this package. See README.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvclient.engines.vllm.versions import vllm_imports

if TYPE_CHECKING:
    from kvclient.engines.vllm.tier.connector import KVStoreOffloadingConnector
    from kvclient.engines.vllm.tier.host_worker import HostTieringSpec
    from kvclient.engines.vllm.tier.manager import KVStoreTier

_HOMES = {"HostTieringSpec": "host_worker", "KVStoreOffloadingConnector": "connector", "KVStoreTier": "manager"}

__all__ = ["HostTieringSpec", "KVStoreOffloadingConnector", "KVStoreTier"]


def __getattr__(name: str) -> object:
    """Import vLLM's part only when it is used: other modules of this package need no vLLM."""
    if name not in _HOMES:
        raise AttributeError(name)
    with vllm_imports():
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
