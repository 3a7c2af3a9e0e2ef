"""Count the files of this repository whose functions run for one load: a measure of how far a reader of the code has to go.

    PYTHONPATH=.:clients:proto:benchmarks python scripts/files_touched.py [--list]

Two cases, each a lookup and a load of one chain: a hit in the DRAM of this host, and a load over both hosts' storage links. A
profiler in every process (client, metadata server, nodes) records the files of the functions called while a load runs. A file
counts if it takes part in each of several loads.

Background work is left out: functions in the threads of ``BACKGROUND_THREADS``, which publish, watch connections, report, and
release leases whether a load runs or not, and the modules of ``BACKGROUND_FILES``, which publish in threads without a name and
on the event loop.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
LOADS = 20
BLOCKS = 8
MIB = 1 << 20
WAIT_S = 30.0
BACKGROUND_THREADS = ("kvstore-publish", "metadata-writes", "kvstore-liveness", "kvclient-report", "kvclient-release")
"""Threads whose functions do not count, by the start of their names."""
BACKGROUND_FILES = ("kvstore/node/publish/publisher.py", "kvstore/metadata/indexing/publish_stream.py")
RECORDER = (
    f"""
BACKGROUND = {BACKGROUND_THREADS!r}
"""
    + """
import os, sys, threading, mmap, time, pathlib
folder = pathlib.Path(os.environ["FILES_TOUCHED"])
with (folder / "window").open("r+b") as window_file:
    window = mmap.mmap(window_file.fileno(), 1)
seen = {}
def record(frame, event, argument):
    number = window[0]
    if number and event == "call" and not threading.current_thread().name.startswith(BACKGROUND):
        seen.setdefault(number, set()).add(frame.f_code.co_filename)
def write():
    done = 0
    while True:
        time.sleep(0.01)
        number = window[0]
        if not number and len(seen) > done:
            done = len(seen)
            last = max(seen)
            (folder / f"{last}.{os.getpid()}").write_text("\\n".join(sorted(seen[last])))
threading.Thread(target=write, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""
)


def main() -> None:
    """Measure both cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="also print the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="files-touched-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        (folder / "window").write_bytes(b"\0")
        os.environ["FILES_TOUCHED"] = name
        os.environ["PYTHONPATH"] = os.pathsep.join([name, *map(str, (REPOSITORY, REPOSITORY / "clients", REPOSITORY / "proto"))])
        exec(RECORDER, {})  # noqa: S102  # our own text; this process is the client
        for case, run in (("hit in local DRAM", dram_hit), ("planned load", planned_load)):
            files = run(folder)
            print(f"{case}: {len(files)} files")
            if options.list:
                print(*(f"    {file}" for file in sorted(files)), sep="\n")


def dram_hit(folder: Path) -> set[str]:
    """Load from the arena of this host."""
    node = {"node_id": "p", "dram_bytes": 64 * MIB}
    with started([node]) as (cluster, connect, spec), connect(cluster.node("p").local_socket) as client:
        chains = [put(client, spec, number) for number in range(LOADS + 1)]
        return touched(folder, client, chains, 1, {})


def planned_load(folder: Path) -> set[str]:
    """Load from a storage node's disk, over the links of this host and of another one."""
    from kvclient import Paths, Tier

    quiet = (("cache_loads", "false"),)
    nodes = [
        {"node_id": "s", "roles": ("storage",), "dram_bytes": 64 * MIB, "nvme_bytes": 128 * MIB, "settings": quiet},
        {"node_id": "p", "dram_bytes": 64 * MIB, "write_back_to": "s"},
        {"node_id": "d", "roles": ("decode",), "dram_bytes": 64 * MIB, "settings": quiet},
    ]
    with started(nodes) as (cluster, connect, spec), connect(cluster.node("p").local_socket) as client:
        chains = [put(client, spec, number, durable=True) for number in range(LOADS + 1)]
        evict_dram(cluster, ("s", "p", "d"))
        for keys in chains:  # the index learns of an eviction a moment later
            until(lambda keys=keys: {run.tier for run in client.lookup(keys).runs} == {Tier.NVME})  # type: ignore[misc]
        paths = Paths(decode_node="d", policy="round_robin")
        return touched(folder, client, chains, 101, {"paths": paths}, lambda: evict_dram(cluster, ("s", "p", "d")))


@contextlib.contextmanager
def started(nodes: list[dict[str, object]]) -> Iterator[tuple[Any, Callable[[str], Any], Any]]:
    """Start a cluster."""
    from kvclient import CacheSpec, ClientOptions, KVClient
    from kvstore.embedded.cluster import LocalCluster, NodeSpec

    spec = CacheSpec(model="files", block_tokens=16, layers=4, layer_block_bytes=4096)
    with LocalCluster([NodeSpec(**node) for node in nodes]) as cluster:  # type: ignore[arg-type]
        options = ClientOptions(default_deadline_s=20.0, strict=True)
        yield cluster, lambda node: KVClient.connect(cluster.metadata_address, spec, node=node, options=options), spec


def put(client: Any, spec: Any, number: int, *, durable: bool = False) -> Any:  # noqa: ANN401
    """Store one chain. Return its keys."""
    import numpy as np

    tokens = np.random.default_rng(number).integers(0, 1 << 17, BLOCKS * spec.block_tokens, dtype=np.uint32)
    keys = client.keys(tokens)
    data = np.full((BLOCKS, spec.block_bytes), number, np.uint8)
    assert client.store(keys, data, durable=durable, wait_visible=True).held_blocks == BLOCKS
    return keys


def touched(
    folder: Path,
    client: Any,  # noqa: ANN401
    chains: list[Any],
    first: int,
    options: dict[str, Any],
    each: Callable[[], None] | None = None,
) -> set[str]:
    """Return the files that take part in every load; windows are numbered from ``first``."""
    import numpy as np

    for old in folder.glob("[0-9]*"):
        old.unlink()
    window_file = (folder / "window").open("r+b")
    window = mmap.mmap(window_file.fileno(), 1)
    client.load(chains[0], np.zeros((BLOCKS, client.spec.block_bytes), np.uint8), **options)
    common: set[str] | None = None
    for number, keys in enumerate(chains[1:], first):
        if each is not None:
            each()
        buffer = np.zeros((BLOCKS, client.spec.block_bytes), np.uint8)
        time.sleep(0.05)
        window[0] = number
        lookup = client.lookup(keys)
        result = client.load(lookup, buffer, **options)
        window[0] = 0
        assert result.hit_blocks == BLOCKS, result
        time.sleep(0.3)
        files = {line for path in folder.glob(f"{number}.*") for line in path.read_text().splitlines()}
        ours = {str(Path(file).resolve().relative_to(REPOSITORY)) for file in files if is_ours(file)}
        common = ours if common is None else common & ours
    assert common is not None
    return common


def is_ours(file: str) -> bool:
    """Whether a file belongs to the packages that are counted; generated stubs and background work do not."""
    path = Path(file).resolve()
    return not str(path).endswith(BACKGROUND_FILES) and any(
        path.is_relative_to(REPOSITORY / package) for package in ("kvstore", "clients/kvclient")
    )


def evict_dram(cluster: Any, names: tuple[str, ...]) -> None:  # noqa: ANN401
    """Evict all blocks from the nodes' DRAM."""
    import grpc

    from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc

    for name in names:
        with grpc.insecure_channel(cluster.node(name).address) as channel:
            node_pb2_grpc.NodeStub(channel).Evict(
                node_pb2.EvictRequest(operation_id=bytes(16), tier=common_pb2.TIER_DRAM), timeout=10
            )


def until(done: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end_s, "timeout"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
