"""Loads over several hosts' storage links, with real processes: every policy, every layer group, and failures of each part.

Blocks are on a storage node only, except where a test says otherwise. A load is correct if every hit has its own bytes, every
layer has its bytes when it is announced, waits are bounded, and nothing is written to the buffer after the load returned.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conftest import HANG_S, Engine, Store
from kvclient import LoadResult, Lookup, Paths
from kvclient.load.paths import Plan, PlannedPart
from kvclient.load.sources.node_stream import NodeLoadStream
from kvclient.nodes.metadata_client import MetadataClient
from kvclient.nodes.remote_sessions import RemoteSession, RemoteSessionCache
from kvclient.results import NodeRef
from kvproto.v1 import node_pb2
from kvproto.v1.common_pb2 import TIER_NVME
from kvstore.core.types import Outcome, Tier
from kvstore.embedded.cluster import NodeSpec
from kvstore.testing.fault_proxy import FaultProxy
from kvstore.transport.contract import BlockPeer
from samples import sample
from support.client_parts import context_of, session_of
from support.wait import wait_until

MIB = 1 << 20
LAYERS = 6
MakeStore = Callable[..., Store]
POLICIES = ("prefill_only", "round_robin", "shorter_queue", "split")
SETTINGS = (("cache_loads", "false"), ("lease", "3s"))
STALL_S = 0.5


def three_nodes(**decode: object) -> tuple[NodeSpec, ...]:
    """A storage node, a prefill node that writes back to it, a decode node and one more; none caches loaded blocks."""
    more = {"dram_bytes": 64 * MIB, "settings": SETTINGS, **decode}
    return (
        NodeSpec("s", roles=("storage",), dram_bytes=64 * MIB, nvme_bytes=128 * MIB, settings=SETTINGS),
        NodeSpec("p", dram_bytes=64 * MIB, write_back_to="s", settings=SETTINGS[1:]),
        NodeSpec("d", roles=("decode",), **more),  # type: ignore[arg-type]
        NodeSpec("r", roles=("decode",), dram_bytes=64 * MIB, settings=SETTINGS),
    )


def put(store: Store, engine: Engine, chain: str, blocks: int) -> Lookup:
    """Store a chain on the storage node's disk and nowhere else. Returns a lookup that shows it."""
    assert engine.store(chain, blocks, durable=True).durable
    return only_stored(store, engine, chain, blocks)


def only_stored(store: Store, engine: Engine, chain: str, blocks: int) -> Lookup:
    found: list[Lookup] = []

    def told() -> bool:
        for node in store.cluster.running & {"s", "p", "d", "r"}:
            store.empty_dram(node)  # also of blocks that the last load cached, and the index does not show yet
        found[:] = [engine.client.lookup(engine.keys(chain, blocks))]
        return found[0].hit_blocks == blocks and {run.tier for run in found[0].runs} == {Tier.NVME}

    wait_until(told, f"{chain} lies in storage alone")
    return found[0]


def paths(policy: str | None = "split", layer_group: int = 0, **more: object) -> Paths:
    return Paths(decode_node="d", policy=policy, layer_group=layer_group, **{"stall_s": STALL_S, **more})  # type: ignore[arg-type]


def load(engine: Engine, found: Lookup, how: Paths, *, deadline_s: float = 8.0, verify: str = "auto") -> LoadResult:
    """Load, check the bytes of all hits, and check that the buffer does not change after the load returned."""
    data = engine.allocate(len(found.keys))
    result = engine.client.load(found, data, paths=how, deadline_s=deadline_s, verify=verify)  # type: ignore[arg-type]
    check(engine, found, result, data)
    return result


def check(engine: Engine, found: Lookup, result: LoadResult, data: np.ndarray) -> None:  # type: ignore[type-arg]
    hits = np.flatnonzero(result.outcomes == Outcome.HIT)
    wrong = engine.payloads.wrong_blocks([found.keys[position] for position in hits], data[hits])
    assert list(wrong) == [], "WRONG BYTES"


def load_by_layers(engine: Engine, found: Lookup, how: Paths, *, deadline_s: float = 8.0) -> LoadResult:
    """Load layer by layer, and check the bytes of each layer when it is announced."""
    count, layers = len(found.keys), engine.spec.layers
    size = engine.spec.layer_block_bytes
    expected = engine.allocate(count)
    engine.payloads.fill(list(found.keys), expected)
    data = engine.allocate(count)
    handle = engine.client.start_load(found, data, paths=how, deadline_s=deadline_s)
    for layer in range(layers):
        if not handle.wait_layer(layer):
            break
        promised = handle.promised_blocks
        part = slice(layer * size, (layer + 1) * size)
        if handle.done:
            promised = min(promised, handle.result().hit_blocks)
        elif promised > handle.promised_blocks:
            continue  # the promise shrank during the check
        assert (data[:promised, part] == expected[:promised, part]).all(), f"layer {layer} was announced before its bytes arrived"
    result = handle.result()
    assert handle.promised_blocks == result.hit_blocks
    check(engine, found, result, data)
    return result


def canary(engine: Engine, found: Lookup, data: np.ndarray, wait_s: float) -> None:  # type: ignore[type-arg]
    """A returned buffer is not written to."""
    data[:] = 0xA5
    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        assert (data == 0xA5).all(), "a load wrote to memory that it had returned"
        time.sleep(0.02)


@contextmanager
def stopped(store: Store, node: str) -> Iterator[None]:
    """A node without work."""
    process = store.cluster.node(node).process
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def settled(store: Store, *nodes: str) -> None:
    """Wait until no node keeps a slot for an ended load."""

    def empty() -> bool:
        for node in nodes:
            store.evict(node)
        return all(store.node_stats(node).tiers[0].used_bytes == 0 for node in nodes)

    wait_until(empty, "all slots are given back")


def test_paths_every_policy_and_group_loads_all(make_store: MakeStore) -> None:
    """``split`` loads as a whole and by layers with every group, the others in turn; with ``--thorough`` they do both, too."""
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    found = put(store, engine, "c", 120)
    shared: set[str] = set()
    for number, (policy, layer_group) in enumerate(itertools.product(POLICIES, (0, 1, 3))):
        both = policy == "split" or sample(0, of=1)
        if both or number % 2 == 0:
            found = only_stored(store, engine, "c", 120)
            result = load(engine, found, paths(policy, layer_group))
            assert result.hit_blocks == 120, (policy, layer_group, result)
            assert sum(result.bytes_by_path.values()) == 120 * engine.spec.block_bytes
            if policy == "prefill_only":
                assert set(result.bytes_by_path) == {"prefill"}
            elif policy == "split":
                shared |= set(result.bytes_by_path)  # one load may use only a link that was measured as much faster
        if both or number % 2 == 1:
            found = only_stored(store, engine, "c", 120)
            assert load_by_layers(engine, found, paths(policy, layer_group)).hit_blocks == 120, (policy, layer_group)
    assert len(shared) >= 2
    settled(store, "p", "d", "r")


def test_paths_of_the_client_apply_to_its_loads(make_store: MakeStore) -> None:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS, paths=Paths(policy="oracle"))  # reads nothing from storage, so it shows
    found = put(store, engine, "c", 20)
    assert engine.client.load(found, engine.allocate(20)).hit_blocks == 0
    assert load(engine, found, paths("prefill_only")).hit_blocks == 20
    wait_until(
        lambda: ("p", 20) in {(run.node_id, run.count) for run in engine.client.lookup(found.keys).runs},
        "the index shows the blocks that the load cached",
    )
    assert engine.load_keys(found.keys).hit_blocks == 20, "blocks in the DRAM of this host need no plan"


def test_paths_oracle_reads_nothing(make_store: MakeStore) -> None:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS)
    found = put(store, engine, "c", 20)
    assert load(engine, found, paths("oracle")).hit_blocks == 0


def test_paths_verify_always_loads_all(make_store: MakeStore) -> None:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS)
    found = put(store, engine, "c", 40)
    for layer_group in (0, 2):
        assert load(engine, only_stored(store, engine, "c", 40), paths("split", layer_group), verify="always").hit_blocks == 40
    assert len(found.keys) == 40


@pytest.mark.parametrize("layer_group", [0, 2])
def test_paths_decode_volume_feeds_prefill_buffer(make_store: MakeStore, layer_group: int) -> None:
    """The decode host's own volume has the only copy: it reaches the prefill engine's buffer over the decode path."""
    store = make_store(*three_nodes(nvme_bytes=128 * MIB))
    assert store.engine("d", layers=LAYERS, layer_bytes=16384).store("c", 120, durable=True).durable
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    by_path: Counter[str] = Counter()
    for _ in range(2):  # the turns of round_robin begin with either side
        found = only_stored(store, engine, "c", 120)
        assert {run.node_id for run in found.runs} == {"d"}
        # stall_s is the deadline, so nothing is replanned: a replanned part would come from the DRAM of "d"
        result = load_by_layers(engine, found, paths("round_robin", layer_group, stall_s=8.0), deadline_s=8.0)
        assert result.hit_blocks == 120
        assert result.bytes_by_node == {"d": 120 * engine.spec.block_bytes}
        assert result.bytes_by_tier == {Tier.NVME: 120 * engine.spec.block_bytes}
        by_path.update(result.bytes_by_path)
        settled(store, "p", "d", "r")  # blocks that are still leased would come from the DRAM of "d"
    assert by_path["decode"] > 0
    (nvme,) = (tier for tier in store.node_stats("s").tiers if tier.tier == TIER_NVME)
    assert nvme.used_bytes == 0


# ---------------------------------------------------------------- failures


BLOCKS = 100
"""About ten megabytes: half a second over a slow link that two hosts share."""
SLOW = 12e6


@pytest.fixture
def proxies() -> Iterator[Callable[[str], FaultProxy]]:
    made: list[FaultProxy] = []

    def make(target: str) -> FaultProxy:
        made.append(FaultProxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.stop()


def through(found: Lookup, address: str) -> Lookup:
    """The same lookup, with storage reached over a proxy."""
    return replace(found, runs=tuple(replace(run, node=replace(run.node, storage_address=address)) for run in found.runs))


def slowly(store: Store, found: Lookup, proxies: Callable[[str], FaultProxy]) -> Lookup:
    """Storage over slow links, so that a fault can hit the middle of a load."""
    proxy = proxies(store.cluster.node("s").ready["data_address"])
    proxy.to_client.bytes_per_s = SLOW
    return through(found, proxy.address)


@contextmanager
def after(delay_s: float, what: Callable[[], object]) -> Iterator[None]:
    """Inject a fault in the middle of a load."""
    timer = threading.Timer(delay_s, what)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture
def ready(make_store: MakeStore) -> tuple[Store, Engine, Lookup]:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    return store, engine, put(store, engine, "c", BLOCKS)


Ready = tuple[Store, Engine, Lookup]
Proxies = Callable[[str], FaultProxy]


@pytest.mark.parametrize("layer_group", [0, 2])
def test_paths_decode_node_killed_completes(ready: Ready, proxies: Proxies, layer_group: int) -> None:
    store, engine, found = ready
    with after(0.2, lambda: store.cluster.node("d").process.kill()):
        result = load_by_layers(engine, slowly(store, found, proxies), paths("round_robin", layer_group))
    assert result.hit_blocks == BLOCKS
    with after(0.2, lambda: store.cluster.node("r").process.kill()):
        result = load_by_layers(
            engine, slowly(store, only_stored_at(store, engine, ("s", "p")), proxies), paths("split", layer_group)
        )
    assert result.hit_blocks == BLOCKS


@pytest.mark.parametrize("layer_group", [0, 2])
def test_paths_only_living_source_has_until_the_deadline(ready: Ready, proxies: Proxies, layer_group: int) -> None:
    """The decode hosts are dead, and this host's storage makes no progress for longer than a stall: the load waits for it."""
    store, engine, found = ready
    for node in ("d", "r"):
        store.cluster.node(node).process.kill()
    proxy = proxies(store.cluster.node("s").ready["data_address"])
    proxy.to_client.delay_s = 2 * STALL_S
    with after(6 * STALL_S, lambda: setattr(proxy.to_client, "delay_s", 0.0)):
        result = load_by_layers(engine, through(found, proxy.address), paths("split", layer_group), deadline_s=20.0)
    assert result.hit_blocks == BLOCKS
    assert result.bytes_by_path["prefill"] > 0


def only_stored_at(store: Store, engine: Engine, nodes: tuple[str, ...]) -> Lookup:
    """Like ``only_stored``, with some nodes dead."""
    found: list[Lookup] = []

    def told() -> bool:
        for node in nodes:
            store.evict(node)
        found[:] = [engine.client.lookup(engine.keys("c", BLOCKS))]
        return found[0].hit_blocks == BLOCKS and {run.tier for run in found[0].runs} == {Tier.NVME}

    wait_until(told, "the chain lies in storage alone")
    return found[0]


@pytest.mark.parametrize("layer_group", [0, 2])
def test_paths_stopped_decode_node_writes_nothing_late(ready: Ready, proxies: Proxies, layer_group: int) -> None:
    store, engine, found = ready
    data = engine.allocate(BLOCKS)
    slow = slowly(store, found, proxies)
    process = store.cluster.node("d").process
    with after(0.15, lambda: process.send_signal(signal.SIGSTOP)):
        result = engine.client.load(slow, data, paths=paths("split", layer_group), deadline_s=8.0)
    check(engine, found, result, data)
    assert result.hit_blocks == BLOCKS
    data[:] = 0xA5
    process.send_signal(signal.SIGCONT)
    canary(engine, found, data, 0.7)
    assert load(engine, only_stored(store, engine, "c", BLOCKS), paths("split", layer_group)).hit_blocks == BLOCKS
    settled(store, "d", "r")


@pytest.mark.parametrize("layer_group", [0, 2])
@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_paths_storage_link_of_others_fails(
    ready: Ready, proxies: Proxies, monkeypatch: pytest.MonkeyPatch, layer_group: int, fault: str
) -> None:
    store, engine, found = ready
    bad = proxies(store.cluster.node("s").ready["data_address"])
    if fault == "cut":
        bad.to_client.cut_after = 700_000
    else:
        bad.to_client.stall_after = 700_000
    session = session_of(engine.client)
    build = NodeLoadStream.__init__

    def build_with_bad_address(self: NodeLoadStream, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        if self.message.session_id != session.session_id:
            for source in self.message.sources:
                source.data_address = bad.address

    monkeypatch.setattr(NodeLoadStream, "__init__", build_with_bad_address)
    result = load_by_layers(engine, slowly(store, found, proxies), paths("split", layer_group))
    assert result.hit_blocks == BLOCKS
    assert result.bytes_by_path["prefill"] > 0


def test_paths_without_metadata_local_host_reads_all(ready: Ready) -> None:
    store, engine, found = ready
    store.cluster.kill("metadata")
    for layer_group in (0, 2):
        store.empty_dram("p")
        result = load_by_layers(engine, found, paths("split", layer_group))
        assert result.hit_blocks == BLOCKS
        assert set(result.bytes_by_path) <= {"prefill", "local"}


def test_paths_restarted_metadata_ignores_old_plan(ready: Ready, proxies: Proxies) -> None:
    store, engine, found = ready

    def restart() -> None:
        store.cluster.kill("metadata")
        store.cluster.start_metadata()
        for node in ("d", "r"):
            store.cluster.node(node).process.kill()

    slow = slowly(store, found, proxies)
    for other in (0, 1):  # plans of the new server, which must not be confused with the old plan
        assert engine.client.lookup(engine.keys(f"other{other}", 4)).hit_blocks == 0
    with after(0.1, restart):
        result = load_by_layers(engine, slow, paths("split", 2), deadline_s=20.0)
    assert result.hit_blocks == BLOCKS


def test_paths_storage_node_dead_misses_in_time(ready: Ready) -> None:
    store, engine, found = ready
    store.cluster.kill("s")
    for layer_group in (0, 2):
        begun_s = time.monotonic()
        result = load(engine, found, paths("split", layer_group), deadline_s=5.0)
        assert result.hit_blocks == 0
        assert time.monotonic() - begun_s < HANG_S
    settled(store, "d", "r")


def test_paths_corrupt_block_shortens_the_hit(ready: Ready) -> None:
    store, engine, found = ready
    pattern = engine.allocate(BLOCKS)
    engine.payloads.fill(list(found.keys), pattern)
    slab = max(store.cluster.volume_path("s").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = slab.read_bytes()
    with slab.open("r+b") as file:
        for block in (37, 71):
            at = content.index(pattern[block].tobytes()) + 5000
            file.seek(at)
            file.write(bytes([content[at] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    for layer_group in (0, 2):
        result = load_by_layers(engine, found, paths("split", layer_group))
        assert result.hit_blocks == 37
        bad = [position for position in range(BLOCKS) if result.outcome(position) is not Outcome.HIT]
        assert bad == [37, 71]
        assert {result.outcome(position) for position in bad} <= {Outcome.CORRUPT, Outcome.MISS, Outcome.UNAVAILABLE}


@pytest.fixture
def told_why(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons reported to the planner for planning parts again."""
    said: list[str] = []
    replan = MetadataClient.replan_load

    def listen(self: MetadataClient, plan: Plan, part: PlannedPart, arrived: Any, why: str, left_s: float) -> Plan:
        said.append(why)
        return replan(self, plan, part, arrived, why, left_s)

    monkeypatch.setattr(MetadataClient, "replan_load", listen)
    return said


@pytest.mark.parametrize("layer_group", [0, 2])
def test_paths_corruption_in_transit_uses_other_path(
    ready: Ready, proxies: Proxies, told_why: list[str], monkeypatch: pytest.MonkeyPatch, layer_group: int
) -> None:
    store, engine, found = ready
    bad = proxies(store.cluster.node("d").ready["data_address"])
    bad.to_client.flips = frozenset(range(100_000, 1 << 24, 100_000))
    peers = context_of(engine.client).peers
    straight = peers.peer

    def bent(node: NodeRef) -> BlockPeer:
        return straight(replace(node, data_address=bad.address) if node.node_id == "d" else node)

    monkeypatch.setattr(peers, "peer", bent)
    result = load_by_layers(engine, found, paths("split", layer_group))
    assert result.hit_blocks == BLOCKS
    assert "decode" not in result.bytes_by_path or result.bytes_by_path["decode"] < found.hit_blocks * engine.spec.block_bytes
    first = told_why[0]
    assert first.startswith("d over decode: ")
    assert "blocks CORRUPT on the way from it" in first
    assert not any(why.startswith("d ") for why in told_why[1:]), "no part uses a failed hop twice"


def test_paths_failure_is_reported_not_stall(ready: Ready, told_why: list[str]) -> None:
    store, engine, found = ready
    store.cluster.kill("s")
    assert load(engine, found, paths("split"), deadline_s=5.0).hit_blocks == 0
    assert told_why
    assert not [why for why in told_why if "nothing moved" in why or "UNAVAILABLE in storage" not in why]


def test_paths_restarted_decode_node_is_used(ready: Ready) -> None:
    store, engine, found = ready
    assert load(engine, found, paths("split", 2, relays=False)).bytes_by_path["decode"] > 0
    store.cluster.kill("d")
    store.cluster.start_node("d")

    def again() -> bool:
        result = load(engine, only_stored(store, engine, "c", BLOCKS), paths("split", 2, relays=False))
        assert result.hit_blocks == BLOCKS
        return "decode" in result.bytes_by_path

    wait_until(again, "loads go over the decode node again")


def test_paths_expired_remote_session_costs_no_path(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    store, engine, found = ready
    how = paths("split", 2, relays=False, stall_s=8.0)  # a busy machine stalls parts, too
    sessions: list[RemoteSession] = []
    session_with = RemoteSessionCache.session

    def session_used(self: RemoteSessionCache, node: NodeRef, timeout_s: float) -> RemoteSession:
        sessions.append(session_with(self, node, timeout_s))
        return sessions[-1]

    with monkeypatch.context() as watched:
        watched.setattr(RemoteSessionCache, "session", session_used)
        assert load(engine, found, how).bytes_by_path["decode"] > 0
    found = only_stored(store, engine, "c", BLOCKS)
    rejected: list[bytes] = []
    load_in_session = sessions[-1].stub.Load

    def load_in_expired_session(request: node_pb2.LoadRequest, **more: Any) -> Any:
        """Send an id that the node does not know, as after a minute without use."""
        request.session_id = os.urandom(16)
        rejected.append(request.session_id)
        return load_in_session(request, **more)

    assert {one.node.node_id for one in sessions} == {"d"}
    sessions[-1].stub.Load = load_in_expired_session  # type: ignore[method-assign]
    results: list[LoadResult] = []
    threads = [threading.Thread(target=lambda: results.append(load(engine, found, how))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rejected
    assert [(result.hit_blocks, result.error) for result in results] == [(BLOCKS, None)] * 3
    # at least one: later loads find the blocks of the first
    assert any(result.bytes_by_path.get("decode", 0) > 0 for result in results)
    assert engine.client.stats().get("client_parts_failed_total", 0) == 0
    assert {"client_plan_predicted_seconds", "client_plan_error_seconds"} <= engine.client.counters.distributions().keys()


def test_paths_many_loads_in_small_arena_all_end(make_store: MakeStore) -> None:
    tight = (*SETTINGS, ("prefill_buffer", str(3 * MIB)), ("decode_buffer", str(3 * MIB)), ("load_threads", "2"))
    store = make_store(*three_nodes(dram_bytes=12 * MIB, settings=tight)[:3])
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    found = [put(store, engine, f"c{number}", 48) for number in range(4)]
    failures: list[BaseException] = []
    incomplete: list[LoadResult] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        try:
            for _ in range(4):
                which = found[dice.randrange(len(found))]
                how = paths(dice.choice(("round_robin", "split", "shorter_queue")), dice.choice((1, 2, 4)), relays=False)
                result = load(engine, which, how, deadline_s=15.0)
                if result.hit_blocks < 48:
                    incomplete.append(result)
        except BaseException as error:  # noqa: BLE001  # told below, where it fails the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a load waits without end"
    assert failures == []
    assert incomplete == []
    settled(store, "d")


@pytest.mark.parametrize("layer_group", [0, 1])
def test_paths_cancelled_load_stops_writing(ready: Ready, proxies: Proxies, layer_group: int) -> None:
    store, engine, found = ready
    slow = slowly(store, found, proxies)
    dice = random.Random(5)
    for _ in range(4):
        data = engine.allocate(BLOCKS)
        handle = engine.client.start_load(slow, data, paths=paths("split", layer_group), deadline_s=2 * HANG_S)
        time.sleep(dice.random() * 0.3)  # in the middle
        begun_s = time.monotonic()
        result = handle.cancel()
        assert time.monotonic() - begun_s < HANG_S
        check(engine, found, result, data)
        canary(engine, found, data, 0.3)
    assert load(engine, found, paths("split", layer_group)).hit_blocks == BLOCKS, "a cancelled load harms no other"
    settled(store, "d", "r")


def soak(store: Store, engine: Engine, proxies: Proxies, seconds: float, seed: int) -> None:
    """Loads from several threads while all parts except this host's node fail at random."""
    found = [only_stored(store, engine, f"c{number}", 40) for number in range(4)]
    proxy = proxies(store.cluster.node("s").ready["data_address"])
    proxy.to_client.bytes_per_s = 30e6
    stop = threading.Event()
    failures: list[BaseException] = []
    hits = [0, 0]

    def work(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        try:
            while not stop.is_set():
                which = found[dice.randrange(len(found))]
                which = through(which, proxy.address) if dice.random() < 0.8 else which
                how = paths(dice.choice(POLICIES), dice.choice((0, 1, 2, 6)))
                if dice.random() < 0.5:
                    result = load_by_layers(engine, which, how, deadline_s=4.0)
                else:
                    result = load(engine, which, how, deadline_s=4.0)
                hits[0] += result.hit_blocks
                hits[1] += len(which.keys)
        except BaseException as error:  # noqa: BLE001  # told below, where it fails the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    dice = random.Random(seed)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not failures:
        time.sleep(dice.random() * 0.6)
        fault = dice.choice(("kill", "stop", "cut", "metadata", "evict"))
        node = dice.choice(("d", "r"))
        if fault == "kill":
            store.cluster.kill(node)
            store.cluster.start_node(node)
        elif fault == "stop":
            with stopped(store, node):
                time.sleep(dice.random() * 1.2)
        elif fault == "cut":
            proxy.cut()
        elif fault == "metadata":
            store.cluster.kill("metadata")
            store.cluster.start_metadata()
        else:
            store.evict(dice.choice(("s", "p", "d", "r")))
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a load waits without end"
    assert failures == []
    assert hits[0] > 0
    wait_until(lambda: load(engine, found[0], paths("split", 2)).hit_blocks == 40, "after all that everything is served")
    settled(store, "d", "r")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.timeout(180)
@pytest.mark.thorough
def test_paths_long_soak_with_random_faults(make_store: MakeStore, proxies: Proxies, seed: int) -> None:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    for number in range(4):
        put(store, engine, f"c{number}", 40)
    soak(store, engine, proxies, 30.0, seed)


@pytest.mark.timeout(120)
def test_paths_short_soak_with_random_faults(make_store: MakeStore, proxies: Proxies) -> None:
    store = make_store(*three_nodes())
    engine = store.engine("p", layers=LAYERS, layer_bytes=16384)
    for number in range(4):
        put(store, engine, f"c{number}", 40)
    soak(store, engine, proxies, 10.0, 3)
