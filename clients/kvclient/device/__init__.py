"""Copies between the store and an engine's paged KV cache on a device: pinned, asynchronous, layer by layer.

    from kvclient.device import DeviceCopier, PagedCache

    cache = PagedCache(kv_tensors, "split")            # one tensor per layer: [2, pages, tokens, heads, dim]
    copier = DeviceCopier(cache)
    spec = copier.spec("my-model", block_tokens=16)
    with KVClient.connect("127.0.0.1:7400", spec, device=copier) as client:
        handle = client.start_load(lookup, copier.blocks(page_ids))
        for layer, module in enumerate(layers):
            handle.wait_layer(layer)                   # the current stream waits for the copy, this thread does not
            module(...)
        result = handle.result()                       # hits are known only now
        client.store(keys, copier.blocks(page_ids).source())

The copier pins the node's arena in the background (``pins``). The device reads blocks directly from the arena, under
their leases. A lease ends, and a block counts as a hit, only after the events of its copies. Blocks of an ``HbmPool`` on the
same device are copied to and from pages on the device. All other blocks pass through host memory. A cache in host memory has
the same interface, and its copies are synchronous.

This package imports torch. Only engines and their hooks import it; the client's other modules know it by the contracts in
``kvclient.memory``.
"""

from __future__ import annotations

from kvclient.device.blocks import DeviceBlocks
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.device.pins.pinned_range import PinReport

__all__ = ["DeviceBlocks", "DeviceCopier", "PagedCache", "PinReport"]
