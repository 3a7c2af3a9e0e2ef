"""Copies between the store and an engine's paged KV cache on a device: pinned, asynchronous, layer by layer.

    from kvclient.device import DeviceCopier, PagedCache

    cache = PagedCache(kv_tensors, "split")            # one tensor a layer: [2, pages, tokens, heads, dim]
    copier = DeviceCopier(cache)
    spec = copier.spec("my-model", block_tokens=16)
    with KVClient.connect("127.0.0.1:7400", spec, device=copier) as client:
        handle = client.start_load(lookup, copier.blocks(page_ids))
        for layer, module in enumerate(layers):
            handle.wait_layer(layer)                   # the current stream waits for the copy, this thread does not
            module(...)
        result = handle.result()                       # only now the blocks count
        client.store(keys, copier.blocks(page_ids).source())

The node's arena is pinned in this process in the background (``pinning``), and the device takes blocks straight out of it, under
their leases: these end, and blocks count as hits, only behind the copies' events. Blocks of an ``HbmPool`` on the same device are
copied there, from and to pages. What comes from elsewhere passes through host memory. A cache in host memory works the same way,
at once.

This package imports torch; nothing else in ``kvclient`` imports it.
"""

from __future__ import annotations

from kvclient.device.blocks import DeviceBlocks
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.device.pinned_range import PinReport

__all__ = ["DeviceBlocks", "DeviceCopier", "PagedCache", "PinReport"]
