"""Measure the time until an index in Valkey is whole again after a shard has lost all its records, and the hits until then.

Three shards with a replica each, a metadata server and a node, all as real processes. The node stores all blocks once. In each
round, both servers of a shard are killed and start empty, and two clients look chains up. The first figure is the time from the
kill until the index has each block of the node again; the limit is the time in which a pipeline of plain ``SET`` commands writes
as many records as the shard had. The second figure is the share of blocks that lookups find until then; the notes have
the worst quarter of a second.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.core.errors import KVStoreError
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.embedded.valkey import ValkeyServer, ValkeyServers
from kvstore.index.record import decode
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import TAGS
from sharded_index import plain_sets

SPEC = CacheSpec(model="shard-loss", block_tokens=16, layers=1, layer_block_bytes=512)
CHAIN = 1_000
WINDOW_S = 0.25
HEAL_S = 300.0
READERS = 2


@dataclass(slots=True)
class Found:
    """Lookups: when each began, and its share of found blocks."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def share(self) -> float:
        """Mean share of all lookups."""
        return statistics.fmean(share for _, share in self.calls)

    def worst_window(self) -> float:
        """Lowest mean share of the windows that have lookups."""
        windows = itertools.groupby(sorted(self.calls), key=lambda call: call[0] // WINDOW_S)
        return min(statistics.fmean(share for _, share in calls) for _, calls in windows)


class Bed:
    """The processes, and the chains that the node has stored."""

    def __init__(self, stack: ExitStack, folder: Path, blocks: int, seed: int) -> None:
        node = NodeSpec("a", dram_bytes=blocks * 4096 + (256 << 20))
        self._cluster = stack.enter_context(LocalCluster([node], folder, shards=3))
        assert self._cluster.valkey is not None
        self.valkey: ValkeyServers = self._cluster.valkey
        self._writer = stack.enter_context(self._client(self._cluster.node("a").local_socket))
        draw = np.random.default_rng(seed)
        self.chains: list[Any] = []
        for _ in range(blocks // CHAIN):
            keys = self._writer.keys(draw.integers(0, 1 << 17, CHAIN * SPEC.block_tokens, dtype=np.uint32))
            stored = self._writer.store(keys, draw.integers(0, 256, (CHAIN, SPEC.block_bytes), dtype=np.uint8))
            if stored.held_blocks != CHAIN:
                raise RuntimeError(f"only {stored.held_blocks} of {CHAIN} blocks were stored")
            self.chains.append(keys)
        self._index = ValkeyIndex.open(ValkeyAddress(self.valkey.seeds), lookup_budget_s=5.0)
        stack.callback(self._index.close)
        self.await_whole(time.monotonic())

    def _client(self, node: str | None) -> KVClient:
        options = ClientOptions(default_deadline_s=20.0, strict=True)
        return KVClient.connect(self._cluster.metadata_address, SPEC, node=node, options=options)

    @contextmanager
    def lookups(self, seed: int) -> Iterator[Found]:
        """Look random chains up in threads."""
        found, ended = Found(), threading.Event()

        def read(number: int) -> None:
            draw = np.random.default_rng((seed, number))
            try:
                with self._client(None) as client:
                    while not ended.is_set():
                        began_s = time.monotonic()
                        hit = client.lookup(self.chains[draw.integers(len(self.chains))]).hit_blocks
                        found.calls.append((began_s, hit / CHAIN))
            except BaseException as error:  # noqa: BLE001  # raised by the caller
                found.errors.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        if found.errors:
            raise found.errors[0]

    def records(self) -> int:
        """Records of the index that have a replica on the node."""
        (epoch,) = [info.volume_epoch for info in self._index.volume_epochs()]
        return sum(epoch in decode(value)[2::2] for _, value in self._index.records_in_ranges(0, len(TAGS)))

    def primary(self) -> ValkeyServer:
        """The primary without the small state, as the servers see it now."""
        for server in self.valkey.servers:
            if b"role:master" in bytes(server.call("INFO", "replication")) and server.call("EXISTS", "{kv}meta") != 1:  # type: ignore[call-overload]
                return server
        raise RuntimeError("no shard is without the small state")

    def pair(self, primary: ValkeyServer) -> list[ValkeyServer]:
        """A primary and its replica."""
        slots = primary.call("CLUSTER", "SLOTS")
        assert isinstance(slots, list)
        ports = {one[1] for entry in slots if entry[2][1] == primary.port for one in entry[2:]}
        return [server for server in self.valkey.servers if server.port in ports]

    def keys_of(self, server: ValkeyServer) -> int:
        """Number of names that a server has."""
        size = server.call("DBSIZE")
        assert isinstance(size, int)
        return size

    def await_whole(self, began_s: float) -> float:
        """Wait until the index has each stored block. Returns the seconds since ``began_s``."""
        expected = len(self.chains) * CHAIN
        while True:
            try:
                if self.valkey.whole and self.records() == expected:
                    return time.monotonic() - began_s
            except (OSError, KVStoreError, ValueError):
                pass
            if time.monotonic() - began_s > HEAL_S:
                raise RuntimeError(f"the index has not {expected} blocks after {HEAL_S:.0f} s")
            time.sleep(0.5)


def measure(options: Options, stack: ExitStack, scratch: Path) -> None:
    """Keep both figures."""
    blocks = options.pick(full=1_000_000, quick=100_000, smoke=2 * CHAIN)
    bed = Bed(stack, scratch / "store", blocks, options.seed)
    plain = stack.enter_context(ValkeyServers(scratch / "plain", shards=1))
    lost = 0
    shares: list[float] = []
    windows: list[float] = []

    def ours() -> float:
        nonlocal lost
        victim = bed.primary()
        lost = bed.keys_of(victim)
        pair = bed.pair(victim)
        with bed.lookups(options.seed) as found:
            time.sleep(1.0)
            began_s = time.monotonic()
            for server in pair:
                server.end()
            time.sleep(1.0)
            for server in pair:
                bed.valkey.restart(server)
            took_s = bed.await_whole(began_s)
        found.calls = [call for call in found.calls if call[0] >= began_s]
        shares.append(found.share())
        windows.append(found.worst_window())
        return took_s

    def written() -> float:
        draw = np.random.default_rng(options.seed)
        return lost / plain_sets(plain.primaries[0].port, [draw.bytes(16) for _ in range(lost)])  # type: ignore[misc]

    samples = harness.interleave({"ours": ours, "plain": written}, options.repetitions, warm_up=0)
    shape = {"blocks": blocks, "shards": 3}
    options.keep(
        Figure("shard_loss", "One shard lost: time until the index is whole", shape, "s", lower_is_better=True),
        samples["ours"],
        limit=Reference("plain SET, one pipeline", samples["plain"]),
        target=Target("value", 60),
        transport="gRPC, loopback TCP",
        notes=f"the shard had {lost} names",
    )
    options.keep(
        Figure("shard_loss_found", "One shard lost: share of blocks found until the index is whole", shape, "share"),
        shares,
        target=Target("value", 0.99),
        transport="gRPC, loopback TCP",
        notes=f"worst 250 ms of each round: {', '.join(f'{share:.3f}' for share in windows)}",
    )


def main() -> None:
    """Measure one size."""
    options = harness.options("shard_loss", __doc__, repetitions=3)
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch, prefix="kvstore-shard-loss-"))
        measure(options, stack, Path(made))


if __name__ == "__main__":
    main()
