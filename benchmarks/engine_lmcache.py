"""Measure LMCache's second tier: 32 objects of 1 MiB to the store and back, against LMCache's own ``fs`` adapter.

Requires the environment of the engines (``make install-engines``). Adapters are created and called as by LMCache's controllers:
submit a task, wait for its event, fetch its result. Each round stores new objects, looks them up and loads them. Loaded bytes are
compared with the stored ones. The store computes checksums of all stored objects and verifies them in each load; the ``fs``
adapter has none.

``dram`` stores to a node without a disk, and ``fs`` to files in the page cache: neither waits for a disk. The client verifies all
bytes (``verify=always``). ``nvme`` loads from a node whose DRAM was emptied, and ``fs_direct`` from the same disk with O_DIRECT:
the node verifies all bytes that it reads. The limit of both are reads of as many bytes from one file with O_DIRECT.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import select
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

import harness
from harness import Figure, Options, Reference, Target, options
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import Daemon, LocalCluster, NodeSpec

OBJECTS = 32
OBJECT_BYTES = 1 << 20
ALIGN = 4096
WAIT_S = 30.0
LOOKUPS = 9
DRAM = 2
MIB = 1 << 20
TITLES = {"store": "objects stored", "lookup": "objects looked up", "load": "objects loaded"}


class Contestant:
    """An adapter of LMCache, with objects to store and to load into.

    Args:
        name: of the contestant, part of the keys.
        config: LMCache's configuration of the adapter.
        buffer: memory for two batches of objects, shared by all contestants.
        node: the node to empty before each load; None: none.
    """

    def __init__(self, name: str, config: dict[str, Any], buffer: Any, node: Daemon | None = None) -> None:  # noqa: ANN401
        from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(config)]))
        self.adapter: Any = create_l2_adapter(parsed.adapters[0])
        self._name, self._buffer, self._node = name, buffer, node
        self._from = make_memory_objects(buffer, OBJECTS, OBJECT_BYTES, 0)
        self._into = make_memory_objects(buffer, OBJECTS, OBJECT_BYTES, OBJECTS * OBJECT_BYTES)
        meta = self._from[0].metadata
        self._stated = {0: MemoryLayoutDesc(shapes=[meta.shape], dtypes=[meta.dtype])}
        self._keys: list[Any] = []

    def _waited(self, fd: int, take: Any) -> Any:  # noqa: ANN401
        """Wait for the event of a task and return its result."""
        from lmcache.v1.platform import consume_fd

        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while not (result := take()):
            assert poller.poll(WAIT_S * 1000), f"{self._name}: the task has not ended"
            consume_fd(fd)
        return result

    def store(self) -> float:
        """Store new objects and return the milliseconds."""
        from lmcache.v1.distributed.api import ObjectKey

        self.drop()
        self._keys = [ObjectKey(os.urandom(32), "bench/model", 1) for _ in range(OBJECTS)]
        self._buffer[: OBJECTS * OBJECT_BYTES].random_()
        os.sync()  # writes of other contestants that are under way
        began_s = time.perf_counter()
        number = self.adapter.submit_store_task(self._keys, self._from)
        results = self._waited(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        took_s = time.perf_counter() - began_s
        assert results[number].is_successful(), f"{self._name}: objects were not stored"
        return took_s * 1e3

    def lookup(self) -> float:
        """Look the objects up several times, and return the median of the milliseconds."""
        self._find()
        return statistics.median(self._find() for _ in range(LOOKUPS))

    def _find(self) -> float:
        """Look the objects up, until all are found, and return the milliseconds of the last lookup."""
        end_s = time.monotonic() + WAIT_S
        while True:
            began_s = time.perf_counter()
            number = self.adapter.submit_lookup_and_lock_task(self._keys, self._stated)
            fd = self.adapter.get_lookup_and_lock_event_fd()
            found = self._waited(fd, lambda number=number: _some(self.adapter.query_lookup_and_lock_result(number)))[0]
            took_s = time.perf_counter() - began_s
            if found.popcount() == OBJECTS:
                return took_s * 1e3
            assert time.monotonic() < end_s, f"{self._name}: objects are not found"

    def load(self) -> float:
        """Load the objects, compare all bytes, and return the milliseconds of the load."""
        import torch

        self._buffer[OBJECTS * OBJECT_BYTES :].zero_()
        if self._node is not None:
            empty_memory(self._node)
        self._find()  # as LMCache does before each load
        began_s = time.perf_counter()
        number = self.adapter.submit_load_task(self._keys, self._into)
        fd = self.adapter.get_load_event_fd()
        arrived = self._waited(fd, lambda: _some(self.adapter.query_load_result(number)))[0]
        took_s = time.perf_counter() - began_s
        assert arrived.popcount() == OBJECTS, f"{self._name}: objects were not loaded"
        first, second = self._buffer.view(2, -1)
        assert torch.equal(first, second), f"{self._name}: other bytes were loaded"
        return took_s * 1e3

    def drop(self) -> None:
        """Delete the objects of the round before, so that files do not fill the disk."""
        if self._keys:
            self.adapter.delete(self._keys)


class BareReads:
    """Reads as many bytes as the objects have, one object at a time, without a cache.

    Args:
        file: a file that is long enough.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self._memory = mmap.mmap(-1, OBJECTS * OBJECT_BYTES)

    def load(self) -> float:
        """Read and return the milliseconds."""
        view = memoryview(self._memory)
        began_s = time.perf_counter()
        for at in range(0, OBJECTS * OBJECT_BYTES, OBJECT_BYTES):
            assert os.preadv(self._file, [view[at : at + OBJECT_BYTES]], OBJECT_BYTES + at) == OBJECT_BYTES
        return (time.perf_counter() - began_s) * 1e3


def _some(result: Any) -> tuple[Any] | None:  # noqa: ANN401
    """Make a result true: an empty bitmap is false."""
    return None if result is None else (result,)


def empty_memory(node: Daemon) -> None:
    """Wait until all blocks of a node are on its disk, and empty its DRAM."""
    with grpc.insecure_channel(node.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        stub.Flush(node_pb2.FlushRequest(timeout_ms=10_000), timeout=12)
        stub.Evict(node_pb2.EvictRequest(operation_id=bytes(16), tier=DRAM), timeout=10)  # type: ignore[arg-type]


def plugin(cluster: LocalCluster, node: str, verify: str) -> dict[str, Any]:
    """LMCache's configuration of the store's adapter."""
    params = {
        "metadata": cluster.metadata_address,
        "node": cluster.node(node).local_socket,
        "salt": node,  # the nodes do not load from each other
        "verify": verify,
        "weights_epoch": "1",
        "object_bytes": [OBJECT_BYTES],  # LMCache's bench states no dtype
    }
    return {
        "type": "plugin",
        "module_path": "kvclient.engines.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": params,
    }


def measure(given: Options, folder: Path) -> None:
    """Measure all contestants."""
    from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor

    dram = given.pick(full=768, quick=512, smoke=160) * MIB
    nodes = [NodeSpec("dram", dram_bytes=dram), NodeSpec("nvme", dram_bytes=dram, nvme_bytes=2 * dram)]
    buffer = make_aligned_tensor(2 * OBJECTS * OBJECT_BYTES, ALIGN)
    with LocalCluster(nodes, folder / "store") as cluster, ExitStack() as stack:
        raced = {
            "dram": Contestant("dram", plugin(cluster, "dram", "always"), buffer),
            "fs": Contestant("fs", {"type": "fs", "base_path": str(folder / "fs")}, buffer),
            "nvme": Contestant("nvme", plugin(cluster, "nvme", "auto"), buffer, cluster.node("nvme")),
            "fs_direct": Contestant(
                "fs_direct", {"type": "fs", "base_path": str(folder / "direct"), "use_odirect": True}, buffer
            ),
        }
        for one in raced.values():
            stack.callback(one.adapter.close)
        bare = BareReads(cluster.volume_path("nvme") / "slab.kv")
        moves: dict[str, dict[str, list[float]]] = {move: {name: [] for name in (*raced, "bare")} for move in TITLES}

        def turn(name: str) -> float:
            if name == "bare":
                moves["load"][name].append(bare.load())
                return 0.0
            for move in TITLES:
                moves[move][name].append(getattr(raced[name], move)())
            return 0.0

        harness.interleave({name: partial(turn, name) for name in (*raced, "bare")}, given.repetitions)
        disk = harness.storage(folder, direct=True, cache="cold")
    samples = {move: {name: values[1:] for name, values in by.items()} for move, by in moves.items()}  # the first is a warm-up
    parameters = {"objects": OBJECTS, "object_bytes": OBJECT_BYTES}
    for move, title in TITLES.items():
        given.keep(
            Figure(f"engine_lmcache_{move}", f"LMCache: {title}", {**parameters, "tier": "DRAM"}, "ms", lower_is_better=True),
            samples[move]["dram"],
            peer=Reference("LMCache's fs adapter, page cache", samples[move]["fs"]),
            target=Target("peer", 1.0),
            verified=None if move == "lookup" else True,
            notes="checksums of all bytes; the peer has none",
        )
    given.keep(
        Figure("engine_lmcache_load", "LMCache: objects loaded", {**parameters, "tier": "NVMe"}, "ms", lower_is_better=True),
        samples["load"]["nvme"],
        peer=Reference("LMCache's fs adapter, O_DIRECT", samples["load"]["fs_direct"]),
        limit=Reference("reads of as many bytes with O_DIRECT", samples["load"]["bare"]),
        target=Target("peer", 1.0),
        storage=disk,
        verified=True,
        notes="checksums of all bytes; the peer has none",
    )


def main() -> None:
    """Measure in a scratch folder."""
    given = options("engine_lmcache", __doc__)
    if find_spec("lmcache") is None:
        sys.exit("LMCache is not installed: this benchmark runs in the environment of the engines (make install-engines)")
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    logging.captureWarnings(True)
    with tempfile.TemporaryDirectory(dir=given.scratch, prefix="engine-lmcache-") as scratch:
        measure(given, Path(scratch))


if __name__ == "__main__":
    main()
