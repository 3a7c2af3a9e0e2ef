"""The store as an L2 adapter of LMCache.

Loaded by LMCache's own plug-in: ``{"type": "plugin", "module_path": "kvclient.engines.lmcache", "class_name": "KVStoreL2Adapter",
"adapter_params": {"metadata": "127.0.0.1:7400", "weights_epoch": "1"}}``. See README.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient.engines.lmcache.adapter import KVStoreL2Adapter

__all__ = ["KVStoreL2Adapter"]


def __getattr__(name: str) -> object:
    """Import LMCache's part only when it is used: other modules of this package need no LMCache."""
    if name not in __all__:
        raise AttributeError(name)
    from kvclient.engines.lmcache.versions import check_version

    check_version()
    return getattr(import_module(f"{__name__}.adapter"), name)
