"""Reads from the local node's NVMe volumes directly into memory of the engine's device, by GPUDirect Storage.

    from kvclient.gds import LandingRing

    copier = DeviceCopier(cache)
    with LandingRing(copier) as ring:
        client = KVClient.connect("127.0.0.1:7400", spec, device=copier, gds=ring)

``LandingRing`` serves engines with a paged KV cache. ``HbmPool`` (``kvclient.hbm``) reads into its own memory instead.

This package imports torch and parts of the node. Engines and their hooks import it; the client's other modules know it by the
contracts in ``kvclient.memory.engine_pool``.
"""

from __future__ import annotations

from kvclient.gds.landing_ring import LandingRing
from kvclient.gds.volume_reader import GdsMode

__all__ = ["GdsMode", "LandingRing"]
