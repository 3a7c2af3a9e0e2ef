"""LMCache's objects, a controller's view of the adapter, and the status of a server."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import numpy as np

from kvstore.testing.connector.driver import StoreAddress

WAIT_S = 30.0
STARTED_S = 120.0
CHUNK_TOKENS = 64
SHAPE = (2, 3, CHUNK_TOKENS, 32)
"""KV, layers, tokens, width of the objects."""


def object_keys(count: int, seed: int = 1, **parts: Any) -> list[Any]:
    """Keys of LMCache; different for each seed."""
    from lmcache.v1.distributed.api import ObjectKey

    draw = np.random.default_rng(seed)
    given = {"model_name": "tiny/model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **parts}
    return [ObjectKey(chunk_hash=draw.bytes(32), **given) for _ in range(count)]


def layout(dtype: str = "bfloat16", shape: Sequence[int] = SHAPE) -> Any:
    """Layout of a group of objects, as LMCache states it."""
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[getattr(torch, dtype)])


def memory_objects(count: int, seed: int | None = None, dtype: str = "bfloat16", shape: Sequence[int] = SHAPE) -> list[Any]:
    """Memory objects of LMCache with random bytes; seed None: zeros."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    kind = getattr(torch, dtype)
    size = int(np.prod(shape)) * kind.itemsize
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        raw = torch.from_numpy(np.zeros(size, np.uint8) if seed is None else np.frombuffer(draw.bytes(size), np.uint8).copy())
        meta = MemoryObjMetadata(
            shape=torch.Size(shape),
            dtype=kind,
            address=0,
            phy_size=size,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[torch.Size(shape)],
            dtypes=[kind],
        )
        made.append(TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None))
    return made


def content(objects: Sequence[Any]) -> list[bytes]:
    """Bytes of objects."""
    return [bytes(one.byte_array) for one in objects]


class Controller:
    """Calls an adapter as LMCache's controllers do: submit a task, wait for its event, fetch its result.

    Args:
        store: addresses of the store.
        options: of the adapter.
    """

    def __init__(self, store: StoreAddress, options: Mapping[str, Any] = {}) -> None:
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        params = {"metadata": store.metadata, "node": store.node, "chunk_tokens": CHUNK_TOKENS, "weights_epoch": "1", **options}
        given = {"module_path": "kvclient.engines.lmcache", "class_name": "KVStoreL2Adapter", "adapter_params": params}
        self.adapter: Any = create_l2_adapter(PluginL2AdapterConfig.from_dict(given))
        self._stored: dict[int, Any] = {}

    @staticmethod
    def _wait(fd: int, end_s: float) -> None:
        from lmcache.v1.platform import consume_fd

        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if poller.poll(max(1.0, (end_s - time.monotonic()) * 1000)):
            consume_fd(fd)
        assert time.monotonic() < end_s, "the task has not ended"

    def stored(self, number: int) -> Any:
        """The result of a store task."""
        end_s = time.monotonic() + WAIT_S
        while number not in self._stored:
            self._stored |= self.adapter.pop_completed_store_tasks()
            if number not in self._stored:
                self._wait(self.adapter.get_store_event_fd(), end_s)
        return self._stored.pop(number)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        """Store objects, and wait."""
        return self.stored(self.adapter.submit_store_task(list(keys), list(objects)))

    def find(self, keys: Sequence[Any], stated: Mapping[int, Any] | None = None) -> list[int]:
        """Positions of the objects that a lookup finds."""
        number = self.adapter.submit_lookup_and_lock_task(list(keys), {0: layout()} if stated is None else dict(stated))
        end_s = time.monotonic() + WAIT_S
        while (found := self.adapter.query_lookup_and_lock_result(number)) is None:
            self._wait(self.adapter.get_lookup_and_lock_event_fd(), end_s)
        return list(found.get_indices_list())

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[int]:
        """Load objects, and return the positions of those that arrived."""
        number = self.adapter.submit_load_task(list(keys), list(objects))
        end_s = time.monotonic() + WAIT_S
        while (found := self.adapter.query_load_result(number)) is None:
            self._wait(self.adapter.get_load_event_fd(), end_s)
        return list(found.get_indices_list())

    def counts(self) -> dict[str, int]:
        """Of the adapter."""
        return dict(self.adapter.counters.totals())


@contextmanager
def controller(store: StoreAddress, options: Mapping[str, Any] = {}) -> Iterator[Controller]:
    """An adapter for the duration of the ``with`` statement."""
    made = Controller(store, options)
    try:
        yield made
    finally:
        made.adapter.close()


# ---- a whole LMCache ----
def status(address: str) -> dict[str, Any]:
    """Status of LMCache's server."""
    with urlopen(f"{address}/status", timeout=WAIT_S) as answer:
        return dict(json.load(answer))


def adapter_status(address: str) -> dict[str, Any]:
    """Status of the adapter in a server."""
    adapters = status(address)["storage_manager"]["l2_adapters"]
    return next(dict(one) for one in adapters if one["type"] == "KVStoreL2Adapter")
