"""Metadata servers are killed and restarted while nodes publish to them: nothing is lost, and no load fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from conftest import Engine
from kvproto.v1 import admin_pb2, admin_pb2_grpc
from kvstore.embedded.cluster import NodeSpec
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.record import decode
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import TAGS
from kvstore.observe.metric_definitions import client as client_metrics
from samples import sample
from support.node_stats import node_counter
from support.server_pair import ServerPair, server_pair
from support.wait import wait_until

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here"),
    pytest.mark.timeout(300),
]

KILLS = sample(4, of=20)
BLOCKS = 200
SHAPE = {"layers": 1, "layer_bytes": 256}
NODES = (
    NodeSpec("full", dram_bytes=2 << 20),  # evicts all the time, so it publishes removals
    NodeSpec("wide", dram_bytes=768 << 20),  # keeps everything
)
PAUSES_S = {"full": 0.01, "wide": 0.08}


class Writer:
    """An engine that stores chains at its node until it is told to end."""

    def __init__(self, pair: ServerPair, node: str) -> None:
        self.engine = Engine(pair, node, **SHAPE)  # type: ignore[arg-type]
        self.node = node
        self.chains: list[str] = []
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(PAUSES_S[self.node]):
                chain = f"{self.node} {len(self.chains)}"
                self.engine.store(chain, BLOCKS)
                self.chains.append(chain)
        except BaseException as error:  # noqa: BLE001  # shown by the test
            self.errors.append(error)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self.errors == []

    def keys(self) -> set[bytes]:
        """All keys that were stored."""
        return {bytes(key) for chain in self.chains for key in self.engine.keys(chain, BLOCKS)}


@contextmanager
def writers(pair: ServerPair, *nodes: NodeSpec) -> Iterator[list[Writer]]:
    found = [Writer(pair, spec.node_id) for spec in nodes]
    try:
        yield found
    finally:
        for writer in found:
            writer.end()


def compared(pair: ServerPair, node: str) -> int:
    """Compare a node with the index once. Returns the number of ranges that differed and were repaired."""
    with grpc.insecure_channel(pair.node(node).address) as channel:
        return admin_pb2_grpc.NodeAdminStub(channel).CompareIndex(admin_pb2.CompareIndexRequest(), timeout=60).repaired_ranges


def keys_in_index(cluster: ValkeyServers) -> dict[str, set[bytes]]:
    """The keys of each node, read from Valkey."""
    index = ValkeyIndex.open(ValkeyAddress(cluster.seeds), lookup_budget_s=5.0)
    try:
        node_of = {info.volume_epoch: info.node_id for info in index.volume_epochs()}
        found: dict[str, set[bytes]] = {node: set() for node in node_of.values()}
        for key, value in index.records_in_ranges(0, len(TAGS)):
            for volume_epoch in decode(value)[2::2]:
                found[node_of[volume_epoch]].add(key)  # type: ignore[index]
    finally:
        index.close()
    return found


def test_server_killed_while_nodes_publish_leaves_no_difference(tmp_path: Path) -> None:
    random_pause = random.Random(11)
    with (
        ValkeyServers(tmp_path / "valkey", shards=2) as cluster,
        server_pair(tmp_path / "store", *NODES, engine=cluster.url) as pair,
    ):
        with writers(pair, *NODES) as found:
            for number in range(KILLS):
                # the nodes have just moved to the server that is killed now, and stay there for 5 s after the other one is back
                victim = pair.NAMES[number % 2]
                time.sleep(random_pause.uniform(0.2, 1.0))
                pair.kill(victim)
                time.sleep(random_pause.uniform(0.0, 0.3))
                pair.start_server(victim)
        full, wide = found
        wait_until(lambda: keys_in_index(cluster)["wide"] >= wide.keys(), "everything is published", 60.0, poll_s=0.2)
        first = {writer.node: compared(pair, writer.node) for writer in found}
        again = {writer.node: compared(pair, writer.node) for writer in found}
        stored = {writer.node: len(writer.keys()) for writer in found}
        changes = [node_counter(pair, node, "failover_changes_total") for node in stored]
        print(f"{KILLS} kills, {stored} blocks stored, servers changed {changes}; ranges repaired: {first}, then {again}")
        assert min(changes) >= KILLS - 1, "the kills met the publishing"
        assert set(again.values()) == {0}
        assert keys_in_index(cluster)["wide"] == wide.keys()
        assert keys_in_index(cluster)["full"] <= full.keys()
        for writer in found:
            writer.engine.close()


@pytest.mark.thorough
def test_servers_restarted_one_by_one_no_load_fails(tmp_path: Path) -> None:
    """All metadata servers, then all shards, under load: as in an upgrade."""
    with (
        ValkeyServers(tmp_path / "valkey", shards=3, replicas=1) as cluster,
        server_pair(tmp_path / "store", NODES[1], engine=cluster.url) as pair,
    ):
        engine = Engine(pair, None, **SHAPE)  # type: ignore[arg-type]
        with writers(pair, NODES[1]) as (writer,):
            wait_until(lambda: writer.chains and engine.load(writer.chains[0], BLOCKS).hit_blocks == BLOCKS)
            chain, ended, hits = writer.chains[0], threading.Event(), list[int]()

            def load() -> None:
                while not ended.is_set():
                    hits.append(engine.load(chain, BLOCKS, deadline_s=3.0).hit_blocks)

            loading = threading.Thread(target=load)
            loading.start()
            try:
                for _ in range(3):
                    for name in pair.NAMES:
                        pair.stop(name)
                        pair.start_server(name)
                        wait_until(lambda name=name: usable(engine, pair.addresses[name]), "the callers return to it")  # type: ignore[misc]
                    for number in range(3):
                        replica = next(one for one in cluster.servers[number::3] if one.call("ROLE")[0] == b"slave")  # type: ignore[index]
                        former = next(one for one in cluster.servers[number::3] if one is not replica)
                        assert replica.call("CLUSTER", "FAILOVER") == b"OK"
                        wait_until(lambda former=former: cluster.is_replaced(former), "the replica is the primary")  # type: ignore[misc]
                        cluster.restart(former)
                        wait_until(lambda: cluster.whole, "it is a replica again", 60.0, poll_s=0.1)
            finally:
                ended.set()
                loading.join()
        counts = engine.client.stats()
        failed = counts.get(client_metrics.LOOKUPS_FAILED, 0)
        print(f"{len(hits)} loads, fewest blocks {min(hits)} of {BLOCKS}, failed lookups {failed}")
        assert failed == 0
        assert min(hits) >= 0.97 * BLOCKS, "a hit may be a block or two shorter while a shard fails over"
        wait_until(lambda: keys_in_index(cluster)["wide"] == writer.keys(), "everything is published", 60.0, poll_s=0.2)
        for one in (engine, writer.engine):
            one.close()


def usable(engine: Engine, address: str) -> bool:
    """Whether a client uses a server without reserve."""
    return any(one.address == address and one.condition == "usable" for one in engine.client.metadata_servers)
