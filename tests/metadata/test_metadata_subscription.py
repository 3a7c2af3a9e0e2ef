"""Tests of ``WatchBlocks`` over a real socket: snapshots, resumption, limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from block_watch import KEYS, Watch
from metadata_harness import NAMESPACE, Peer, Running, run_of, serve

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, Tier
from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unavailable
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.valkey.feed import decode_position, encode_position
from kvstore.index.valkey.keys import STREAMS
from kvstore.metadata.server import MetadataServer
from kvstore.rpc.client import connect_aio
from support.chains import chain
from support.wait import wait_until_async

OTHERS = b"another-namespac"


@dataclass
class Bed:
    """A server with one kind of index, and the differences between the kinds."""

    cluster: ValkeyServers | None
    settings: dict[str, str | int]

    async def drop_past_events(self, running: Running) -> None:
        """Drop the events that were recorded, and the next ones."""
        if self.cluster is None:
            assert running.server.event_log is not None
            running.server.event_log.ring_bytes = 1
            await running.peer("nobody").register()
            return
        for server in self.cluster.primaries:
            for name in STREAMS:
                server.call("XTRIM", name, "MAXLEN", 0)  # an error elsewhere than at its shard

    def ahead(self, request: pb.WatchBlocksRequest) -> pb.WatchBlocksRequest:
        """A position that was never reached."""
        found = pb.WatchBlocksRequest()
        found.CopyFrom(request)
        found.sequence += 1_000_000
        position = decode_position(request.position)
        if position is not None:
            found.position = encode_position(tuple(replace(one, ms=one.ms + 10**9) for one in position))
        return found


@pytest.fixture(scope="module", params=["lmdb", "valkey"])
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if request.param == "lmdb":
        yield Bed(None, {})
        return
    if find_server() is None:
        pytest.skip("no valkey-server or redis-server here")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=2) as cluster:
        yield Bed(cluster, {"engine": f"valkey://{','.join(cluster.seeds)}", "lookup_shard_ms": 2_000})


@pytest.fixture
def engine(bed: Bed) -> dict[str, Any]:
    """Settings of an empty index."""
    for server in bed.cluster.primaries if bed.cluster is not None else ():
        server.call("FLUSHALL")
    return dict(bed.settings)


@pytest.fixture
async def running(tmp_path: Path, engine: dict[str, Any]) -> AsyncIterator[Running]:
    async with serve(tmp_path / "index", **engine) as server:
        yield server


async def test_watch_sends_snapshot_then_events(running: Running) -> None:
    peer = running.peer()
    await peer.register()
    await peer.publish(peer.dram, run_of(KEYS, 0, 30))
    await peer.publish(peer.nvme, run_of(KEYS, 0, 20))
    watch = Watch(running.channel)
    await watch.complete()
    assert watch.reasons == [pb.RESYNC_REASON_ASKED]
    assert [watch.mirror.place(key) for key in KEYS[:30]] == [(NAMESPACE, depth) for depth in range(30)]
    assert [[volume.volume_id for volume in watch.mirror.holders(key)] for key in (KEYS[0], KEYS[29])] == [
        [peer.dram, peer.nvme],
        [peer.dram],
    ]
    watch.events.clear()
    await peer.publish(peer.dram, run_of(KEYS, 30))
    await watch.held(KEYS)
    (stored,) = [event.stored for event in watch.events if event.HasField("stored")]
    assert (stored.runs[0].parent, stored.runs[0].depth, stored.runs[0].keys) == (KEYS[29], 30, b"".join(KEYS[30:]))
    await peer.send(peer.batch(peer.dram, removed=[*KEYS[20:], b"never held......"]))
    await watch.held(KEYS[:20])
    (removed,) = [event.removed for event in watch.events if event.removed.namespace_id]
    assert removed.namespace_id == NAMESPACE
    assert removed.keys == b"".join(KEYS[20:])  # only existing blocks
    assert [volume.volume_id for volume in watch.mirror.holders(KEYS[0])] == [peer.dram, peer.nvme]


async def test_watch_node_death_is_one_event_per_volume(running: Running) -> None:
    peer = running.peer()
    await peer.register()
    long = chain("long", 5_000)
    for start in range(0, 5_000, 1_000):
        await peer.publish(peer.dram, run_of(long, start, start + 1_000), sync_end=True)
    await peer.publish(peer.nvme, run_of(KEYS), sync_end=True)
    watch = Watch(running.channel)
    await watch.complete()
    assert len(watch.mirror) == 5_040
    watch.events.clear()
    running.clock.advance(1.0)  # it is silent
    await watch.served(peer.dram, served=False)
    assert watch.mirror.holders(KEYS[0]) == watch.mirror.holders(long[0]) == []
    assert len(watch.mirror) == 5_040
    await peer.beat()
    await watch.served(peer.dram, served=True)
    await watch.served(peer.nvme, served=True)
    assert [volume.tier for volume in watch.mirror.holders(KEYS[0])] == [Tier.TIER_NVME]
    assert {event.WhichOneof("what") for event in watch.events} == {"served"}  # blocks are not sent again
    watch.events.clear()
    peer.reboot()  # blocks in DRAM are lost; blocks on NVMe stay until the new inventory
    await peer.register()
    await watch.held(KEYS)
    assert [event.WhichOneof("what") for event in watch.events].count("closed") == 1
    assert not any(event.HasField("removed") for event in watch.events)
    await peer.publish(peer.nvme, run_of(KEYS, 0, 10), sync_end=True)
    await watch.held(KEYS[:10])
    assert not any(event.HasField("removed") for event in watch.events)
    assert {volume.boot_id for volume in watch.mirror.volumes} == {peer.boot_id}


async def test_watch_resumes_after_disconnect(running: Running) -> None:
    peer = running.peer()
    await peer.register()
    await peer.publish(peer.dram, run_of(KEYS, 0, 10))
    watch = Watch(running.channel)
    await watch.complete()
    await watch.served(peer.dram, served=True)
    watch.call.cancel()
    await peer.publish(peer.dram, run_of(KEYS, 10))
    await peer.send(peer.batch(peer.dram, removed=KEYS[35:]))
    again = Watch(running.channel, watch.resumed())
    again.mirror = watch.mirror
    assert (await again.read()).HasField("resumed")
    await again.held(KEYS[:35])
    assert again.reasons == []
    assert not any(event.HasField("held") for event in again.events)


async def test_watch_unknown_position_gets_snapshot(running: Running, bed: Bed) -> None:
    peer = running.peer()
    await peer.register()
    await peer.publish(peer.dram, run_of(KEYS))
    watch = Watch(running.channel)
    await watch.complete()
    request = watch.resumed()
    ahead, foreign = bed.ahead(watch.resumed()), watch.resumed()
    foreign.feed_id = b"?" * 16
    watch.call.cancel()
    await peer.publish(peer.dram, run_of(chain("b", 5)))
    await bed.drop_past_events(running)
    for wanted, reason in (
        (request, pb.RESYNC_REASON_GONE),
        (ahead, pb.RESYNC_REASON_GONE),
        (foreign, pb.RESYNC_REASON_RESTARTED),
    ):
        anew = Watch(running.channel, wanted)
        await anew.complete()
        assert anew.reasons == [reason]
        assert set(anew.mirror) == {*KEYS, *chain("b", 5)}
    counted = await peer.counters()
    assert [counted[f"metadata_watch_resyncs_{why}_total"] for why in ("asked", "gone", "restarted")] == [1, 2, 1]


async def test_watch_key_stored_at_right_depth_replaces_wrong(running: Running) -> None:
    peer, other = running.peer(), running.peer("host-2")
    slip = BlockRun(namespace_id=NAMESPACE, depth=0, keys=b"".join(KEYS[20:]))
    for each in (peer, other):
        await each.register()
        await each.publish(each.dram, slip)
    watch, theirs = Watch(running.channel), Watch(running.channel, pb.WatchBlocksRequest(node_ids=["host-2"]))
    for each in (watch, theirs):
        await each.complete()
        assert each.mirror.place(KEYS[20]) == (NAMESPACE, 0)
    await peer.publish(peer.dram, run_of(KEYS, 0, 20))
    await peer.publish(peer.dram, run_of(KEYS, 20))
    while watch.mirror.place(KEYS[39]) != (NAMESPACE, 39):
        await watch.read()
    assert [watch.mirror.place(key) for key in KEYS] == [(NAMESPACE, depth) for depth in range(40)]
    assert {volume.node_id for volume in watch.mirror.replicas(KEYS[20])} == {"host-1"}
    await theirs.held([])  # though the change was another node's


async def test_watch_filters_namespaces_nodes_and_tiers(running: Running) -> None:
    peer, other = running.peer(), running.peer("host-2")
    for each in (peer, other):
        await each.register()
        await each.publish(each.dram, run_of(KEYS, 0, 10))
        await each.publish(each.nvme, run_of(chain("o", 5), namespace=OTHERS))
    watches = {
        "node": Watch(running.channel, pb.WatchBlocksRequest(node_ids=["host-2"])),
        "tier": Watch(running.channel, pb.WatchBlocksRequest(tiers=[Tier.TIER_NVME])),
        "namespace": Watch(running.channel, pb.WatchBlocksRequest(namespace_ids=[OTHERS])),
    }
    for watch in watches.values():
        await watch.complete()
    for each in (peer, other):
        await each.publish(each.dram, run_of(KEYS, 10, 12))
        await each.publish(each.nvme, run_of(chain("p", 3), namespace=OTHERS))
        await each.send(each.batch(each.nvme, removed=chain("o", 5)[4:]))
    their = [*chain("o", 5)[:4], *chain("p", 3)]
    await watches["node"].held([*KEYS[:12], *their])
    await watches["tier"].held(their)
    await watches["namespace"].held(their)
    assert {volume.node_id for volume in watches["node"].mirror.volumes} == {"host-2"}
    assert {volume.tier for volume in watches["tier"].mirror.volumes} == {Tier.TIER_NVME}
    assert len(watches["namespace"].mirror.volumes) == 4
    # the subscriber whose filter drops all events gets its position, and can resume from there
    nobody = Watch(running.channel, pb.WatchBlocksRequest(node_ids=["nobody"]))
    await nobody.complete()
    before = nobody.mirror.sequence
    await peer.publish(peer.dram, run_of(KEYS, 12, 13))
    message = await nobody.read()
    assert not message.events.events
    assert nobody.mirror.sequence > before


async def test_watch_stalled_subscriber_gets_new_snapshot(tmp_path: Path, engine: dict[str, Any]) -> None:
    config = MetadataConfig(
        index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=256 << 20, events_memory_bytes=1 << 20, **engine
    )
    server = MetadataServer(config)
    address = await server.start()
    try:
        # a window that does not grow, so that less is needed to fill it
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536), ("grpc.use_local_subchannel_pool", 1)]
        async with connect_aio(address) as channel, grpc.aio.insecure_channel(address, options=narrow) as slow_channel:
            peer = Peer(channel)
            await peer.register()
            slow, quick = Watch(slow_channel), Watch(channel)
            await slow.complete()
            await quick.complete()
            feed = server.event_log
            keys = chain("many", 120_000)  # more than ring and window hold
            for start in range(0, len(keys), 20_000):
                await peer.publish(peer.dram, run_of(keys, start, start + 20_000))
                assert feed is None or feed.held_bytes <= 1 << 20
                while keys[start] not in quick.mirror:
                    await quick.read()
            assert quick.reasons == [pb.RESYNC_REASON_ASKED]
            while len(slow.mirror) < len(keys) or not slow.mirror.complete:
                await slow.read()
            assert slow.reasons == [pb.RESYNC_REASON_ASKED, pb.RESYNC_REASON_SLOW]
            assert (await peer.counters())["metadata_watch_resyncs_slow_total"] == 1
    finally:
        await server.stop(0.0)


@pytest.fixture
async def log_running(tmp_path: Path) -> AsyncIterator[Running]:
    """A server whose events are in its memory."""
    async with serve(tmp_path / "index") as server:
        yield server


async def test_watch_without_subscribers_keeps_no_changes(log_running: Running) -> None:
    peer = log_running.peer()
    await peer.register()
    feed = log_running.server.event_log
    assert feed is not None
    await peer.publish(peer.dram, run_of(KEYS, 0, 10))
    assert feed.held_bytes == 0
    watch = Watch(log_running.channel)
    await watch.complete()
    await peer.publish(peer.dram, run_of(KEYS, 10, 20))
    assert feed.held_bytes > 0
    watch.call.cancel()

    async def left() -> bool:
        return feed.subscribers == 0

    await wait_until_async(left)
    await peer.publish(peer.dram, run_of(KEYS, 20, 30))  # it may only have been restarted
    assert feed.held_bytes > 0
    sequence = watch.resumed()
    sequence.sequence = feed.sequence  # nothing has happened since
    log_running.clock.advance(3_600.0)

    async def let_go() -> bool:
        return feed.held_bytes == 0

    await wait_until_async(let_go)
    late = Watch(log_running.channel, sequence)
    await late.complete()
    assert late.reasons == [pb.RESYNC_REASON_GONE]  # changes of liveness were not recorded


@pytest.mark.parametrize(
    "request_",
    [
        pb.WatchBlocksRequest(feed_id=b"short"),
        pb.WatchBlocksRequest(namespace_ids=[b"short"]),
        pb.WatchBlocksRequest(namespace_ids=[NAMESPACE] * 1_025),
        pb.WatchBlocksRequest(node_ids=["n"] * 1_025),
        pb.WatchBlocksRequest(node_ids=[""]),
        pb.WatchBlocksRequest(node_ids=["a\nb"]),
        pb.WatchBlocksRequest(tiers=[Tier.TIER_UNSPECIFIED]),
    ],
)
async def test_malformed_requests_are_refused(running: Running, request_: pb.WatchBlocksRequest) -> None:
    with pytest.raises(InvalidArgument):
        await Watch(running.channel, request_).read()
    assert running.server.events is not None
    assert running.server.events.subscribers == 0


async def test_watch_subscribers_are_bounded(tmp_path: Path, engine: dict[str, Any]) -> None:
    server = MetadataServer(MetadataConfig(index_path=tmp_path / "index", listen="127.0.0.1:0", max_subscribers=2, **engine))
    address = await server.start()
    try:
        async with connect_aio(address) as channel:
            watches = [Watch(channel), Watch(channel)]
            for watch in watches:
                await watch.complete()
            with pytest.raises(CapacityExceeded):
                await Watch(channel).read()
            watches[0].call.cancel()

            async def space() -> bool:
                return server.events is not None and server.events.subscribers == 1

            await wait_until_async(space)
            await Watch(channel).complete()
            await server.stop(30.0)  # a graceful end does not wait for streams that have none
            with pytest.raises(Unavailable):
                await watches[1].held([b"never"])
    finally:
        await server.stop(0.0)
