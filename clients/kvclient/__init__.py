"""The client library that lives inside engines: look up, load and store KV blocks, layer by layer where wanted.

    from kvclient import CacheSpec, KVClient

    with KVClient.connect("127.0.0.1:7400", CacheSpec(model="m", block_tokens=64, layers=32, layer_block_bytes=65536)) as client:
        keys = client.keys(tokens)
        lookup = client.lookup(keys)
        result = client.load(lookup, buffer)            # buffer: bytearray, numpy, torch, list of pages, …
        ...                                             # use the first result.hit_blocks, compute the rest
        client.store(keys[n:], rest, parent=keys[n - 1], depth=n)

Importing this package loads neither torch nor any engine, and nothing heavy at all before the first name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient.aio import AsyncKVClient
    from kvclient.call.request_hint import RequestHint
    from kvclient.client import KVClient
    from kvclient.load.layerwise import LoadHandle
    from kvclient.load.paths import Paths
    from kvclient.load.read_ahead import ReadAhead
    from kvclient.memory.buffers import as_block_buffer
    from kvclient.nodes.hints import HintSender
    from kvclient.nodes.namespaces import list_namespaces
    from kvclient.options import ClientOptions
    from kvclient.results import HeadLookup, LoadResult, Lookup, NodeRef, Run, StoreResult
    from kvclient.scheduling.client import AsyncGroupLeader, AsyncSchedulerClient, GroupLeader, SchedulerClient
    from kvclient.scheduling.types import (
        Assigned,
        Assignment,
        EngineFigures,
        EnginePlace,
        EngineRequest,
        GroupUpdates,
        RevokedRequest,
    )
    from kvclient.store.handle import StoreHandle
    from kvclient.store.layerwise import LayerwiseStore
    from kvstore.core.buffers import BlockBuffer, DenseBlocks, ScatteredBlocks
    from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
    from kvstore.core.keys import KeyChain, encode_extra
    from kvstore.core.spec import CacheSpec
    from kvstore.core.types import BlockKey, BlockShape, Outcome, StoreOutcome, Tier
    from kvstore.process.tls import TlsConfig

_HOMES = {
    "Assigned": "kvclient.scheduling.types",
    "Assignment": "kvclient.scheduling.types",
    "AsyncGroupLeader": "kvclient.scheduling.client",
    "AsyncKVClient": "kvclient.aio",
    "AsyncSchedulerClient": "kvclient.scheduling.client",
    "BlockBuffer": "kvstore.core.buffers",
    "BlockKey": "kvstore.core.types",
    "BlockShape": "kvstore.core.types",
    "CacheSpec": "kvstore.core.spec",
    "CapacityExceeded": "kvstore.core.errors",
    "ClientOptions": "kvclient.options",
    "DeadlineExceeded": "kvstore.core.errors",
    "DenseBlocks": "kvstore.core.buffers",
    "EngineFigures": "kvclient.scheduling.types",
    "EnginePlace": "kvclient.scheduling.types",
    "EngineRequest": "kvclient.scheduling.types",
    "GroupLeader": "kvclient.scheduling.client",
    "GroupUpdates": "kvclient.scheduling.types",
    "HeadLookup": "kvclient.results",
    "HintSender": "kvclient.nodes.hints",
    "InvalidArgument": "kvstore.core.errors",
    "KVClient": "kvclient.client",
    "KVStoreError": "kvstore.core.errors",
    "KeyChain": "kvstore.core.keys",
    "LoadHandle": "kvclient.load.layerwise",
    "LoadResult": "kvclient.results",
    "Lookup": "kvclient.results",
    "NodeRef": "kvclient.results",
    "Outcome": "kvstore.core.types",
    "Paths": "kvclient.load.paths",
    "ReadAhead": "kvclient.load.read_ahead",
    "RequestHint": "kvclient.call.request_hint",
    "RevokedRequest": "kvclient.scheduling.types",
    "Run": "kvclient.results",
    "ScatteredBlocks": "kvstore.core.buffers",
    "SchedulerClient": "kvclient.scheduling.client",
    "LayerwiseStore": "kvclient.store.layerwise",
    "StoreHandle": "kvclient.store.handle",
    "StoreOutcome": "kvstore.core.types",
    "StoreResult": "kvclient.results",
    "Tier": "kvstore.core.types",
    "TlsConfig": "kvstore.process.tls",
    "Unavailable": "kvstore.core.errors",
    "as_block_buffer": "kvclient.memory.buffers",
    "encode_extra": "kvstore.core.keys",
    "list_namespaces": "kvclient.nodes.namespaces",
}

__all__ = [  # noqa: RUF022  # in the order in which a reader meets them
    "KVClient",
    "AsyncKVClient",
    "ClientOptions",
    "CacheSpec",
    "TlsConfig",
    "Lookup",
    "HeadLookup",
    "Run",
    "NodeRef",
    "ReadAhead",
    "HintSender",
    "RequestHint",
    "LoadResult",
    "LoadHandle",
    "Paths",
    "StoreResult",
    "StoreHandle",
    "LayerwiseStore",
    "Outcome",
    "StoreOutcome",
    "Tier",
    "BlockKey",
    "BlockShape",
    "BlockBuffer",
    "DenseBlocks",
    "ScatteredBlocks",
    "as_block_buffer",
    "KeyChain",
    "encode_extra",
    "list_namespaces",
    "SchedulerClient",
    "AsyncSchedulerClient",
    "EngineRequest",
    "Assignment",
    "EnginePlace",
    "GroupLeader",
    "AsyncGroupLeader",
    "EngineFigures",
    "GroupUpdates",
    "Assigned",
    "RevokedRequest",
    "KVStoreError",
    "InvalidArgument",
    "Unavailable",
    "DeadlineExceeded",
    "CapacityExceeded",
]


def __getattr__(name: str) -> object:
    """Load the module of a public name when the name is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted({*globals(), *__all__})
