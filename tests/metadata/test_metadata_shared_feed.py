"""Tests of block events that several servers share: one serves what another one applied, and gaps are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from block_watch import KEYS, Watch
from hypothesis import given
from hypothesis import strategies as st
from metadata_harness import TIMEOUT_S, Peer, Running, run_of, serve

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, BlockRun, NamespaceId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.contract import RemovedKeys, VolumeEpoch
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.feed import FeedPosition, StreamPosition, decode_position, encode_position, judge, lowered, reached
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import FEED, STREAMS
from kvstore.metadata.events.shared_feed import encode_events
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.codec import spec_to_proto

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1) as cluster:
        yield cluster


@pytest.fixture
async def servers(tmp_path: Path, cluster: ValkeyServers) -> AsyncIterator[list[Running]]:
    cluster.primaries[0].call("FLUSHALL")
    engine = f"valkey://{','.join(cluster.seeds)}"
    async with (
        serve(tmp_path / "a", engine=engine, lookup_shard_ms=2_000) as first,
        serve(tmp_path / "b", engine=engine, lookup_shard_ms=2_000) as second,
    ):
        yield [first, second]


async def test_feed_server_serves_changes_of_another(servers: list[Running]) -> None:
    here, there = servers
    watch = Watch(here.channel)
    await watch.complete()
    peer = there.peer()
    await peer.register()
    await peer.publish(peer.nvme, run_of(KEYS))
    await watch.held(KEYS)
    await peer.send(peer.batch(peer.nvme, removed=KEYS[5:]))
    await watch.held(KEYS[:5])
    watch.call.cancel()
    await peer.publish(peer.nvme, run_of(KEYS, 5, 9))
    peer.reboot()
    await peer.register()  # closes the volume in DRAM, which the subscriber knows
    await peer.publish(peer.nvme, run_of(KEYS, 0, 9), sync_end=True)  # and the older one of NVMe
    again = Watch(there.channel, watch.resumed())
    again.mirror = watch.mirror
    assert (await again.read()).HasField("resumed")
    await again.held(KEYS[:9])
    assert {volume.boot_id for volume in again.mirror.volumes} == {peer.boot_id}
    assert not again.reasons


async def test_feed_lost_key_begins_another_feed(servers: list[Running], cluster: ValkeyServers) -> None:
    """Without the key, servers append nothing."""
    watch = Watch(servers[0].channel)
    await watch.complete()
    before = watch.mirror.feed_id
    cluster.primaries[0].call("DEL", FEED)
    while len(watch.reasons) < 2:
        await watch.read()
    assert watch.reasons == [pb.RESYNC_REASON_ASKED, pb.RESYNC_REASON_RESTARTED]
    assert watch.mirror.feed_id != before


async def test_feed_lost_stream_is_a_gap(servers: list[Running], cluster: ValkeyServers) -> None:
    peer = servers[1].peer()
    await peer.register()
    watch = Watch(servers[0].channel)
    await watch.complete()
    await peer.publish(peer.nvme, run_of(KEYS, 0, 9))
    await watch.held(KEYS[:9])
    for name in STREAMS:
        cluster.primaries[0].call("DEL", name)
    while len(watch.reasons) < 2:
        await watch.read()
    assert watch.reasons == [pb.RESYNC_REASON_ASKED, pb.RESYNC_REASON_SLOW]
    await watch.complete()
    assert set(watch.mirror) == set(KEYS[:9])


async def test_feed_entry_that_a_failover_lost_is_a_gap(servers: list[Running], cluster: ValkeyServers) -> None:
    """An entry that no reader saw: the next one of its writer shows it."""
    peer = servers[1].peer()
    await peer.register()
    watch = Watch(servers[0].channel)
    await watch.complete()
    await peer.publish(peer.nvme, run_of(KEYS, 0, 9))
    await watch.held(KEYS[:9])
    (name,) = [one for one in STREAMS if cluster.primaries[0].call("EXISTS", one)]
    (entry,) = cluster.primaries[0].call("XREVRANGE", name, "+", "-", "COUNT", 1)  # type: ignore[misc]
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    number = int(fields[b"n"]) + 2
    cluster.primaries[0].call("XADD", name, "*", "w", fields[b"w"], "n", number, "e", fields[b"e"])
    while len(watch.reasons) < 2:
        await watch.read()
    assert watch.reasons == [pb.RESYNC_REASON_ASKED, pb.RESYNC_REASON_SLOW]


@pytest.mark.parametrize(("number", "encoded"), [("1", b"\xff"), ("x", b"")])
async def test_feed_damaged_entry_is_a_gap(servers: list[Running], cluster: ValkeyServers, number: str, encoded: bytes) -> None:
    peer = servers[1].peer()
    await peer.register()
    watch = Watch(servers[0].channel)
    await watch.complete()
    cluster.primaries[0].call("XADD", STREAMS[3], "*", "w", b"writer", "n", number, "e", encoded)
    while len(watch.reasons) < 2:
        await watch.read()
    await watch.complete()
    assert watch.reasons == [pb.RESYNC_REASON_ASKED, pb.RESYNC_REASON_SLOW]
    await peer.publish(peer.nvme, run_of(KEYS, 0, 9))
    await watch.held(KEYS[:9])


async def test_feed_repeated_removal_is_an_event(servers: list[Running], cluster: ValkeyServers) -> None:
    """A server ends after a removal took effect and before it was appended: the node publishes it again elsewhere."""
    peer = servers[1].peer()
    await peer.register()
    await peer.publish(peer.nvme, run_of(KEYS))
    watch = Watch(servers[0].channel, pb.WatchBlocksRequest(namespace_ids=[b"namespace-of-16b"]))
    await watch.complete()
    assert set(watch.mirror) == set(KEYS)
    index = await ValkeyIndex.start(ValkeyAddress(cluster.seeds), lookup_budget_s=2.0)
    try:
        (volume_epoch,) = [one.volume_epoch for one in index.volume_epochs() if one.tier is Tier.NVME]
        # an index without an encoder appends nothing, as a server that is killed
        await _publish(index, volume_epoch, [], [BlockKey(key) for key in KEYS[30:]])
    finally:
        await index.close_async()
    await peer.send(peer.batch(peer.nvme, removed=KEYS[30:]))
    await watch.held(KEYS[:30])


async def test_feed_keys_of_unknown_namespaces_reach_no_tenant(tmp_path: Path, cluster: ValkeyServers) -> None:
    """The keys of a removal that found nothing may be another tenant's."""
    cluster.primaries[0].call("FLUSHALL")
    tokens = tmp_path / "tokens"
    names = {"node": "n" * 32, "tenant": "t" * 32}
    tokens.write_text("".join(f"{role} {'acme' if role == 'tenant' else 'host-1'} {token}\n" for role, token in names.items()))
    tokens.chmod(0o600)
    engine = f"valkey://{','.join(cluster.seeds)}"
    async with (
        serve(tmp_path / "a", engine=engine, lookup_shard_ms=2_000, tokens_file=tokens) as server,
        connect_aio(server.address, token=TokenSource(names["node"])) as node,
        connect_aio(server.address, token=TokenSource(names["tenant"])) as tenant,
    ):
        spec = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=512, tenant="acme")
        request = pb.RegisterNamespaceRequest(operation_id=bytes(16), spec=spec_to_proto(spec))
        mine = (await call_aio(MetadataStub(tenant).RegisterNamespace, request, TIMEOUT_S)).namespace_id
        peer = Peer(node)
        await peer.register()
        watch = Watch(tenant, pb.WatchBlocksRequest(namespace_ids=[mine]))
        await watch.complete()
        await peer.send(peer.batch(peer.nvme, removed=KEYS[30:]))
        await peer.publish(peer.nvme, run_of(KEYS, 0, 9, namespace=mine))
        await watch.held(KEYS[:9])
        assert not any(event.removed.keys for event in watch.events)
        assert (await peer.counters())["metadata_watch_keys_withheld_total"] == len(KEYS[30:])


async def _publish(index: ValkeyIndex, volume_epoch: VolumeEpoch, stored: list[BlockRun], removed: list[BlockKey]) -> None:
    await asyncio.to_thread(index.publish, volume_epoch, stored, removed)


async def test_feed_without_watchers_appends_nothing(cluster: ValkeyServers) -> None:
    cluster.primaries[0].call("FLUSHALL")
    index = await ValkeyIndex.start(ValkeyAddress(cluster.seeds), lookup_budget_s=2.0)
    try:
        index.feed.start_recording(encode_events, 1 << 20)
        opened = await asyncio.to_thread(index.open_volume_epoch, VolumeId("v"), NodeId("n"), Tier.NVME, b"b" * 16)
        run = BlockRun(NamespaceId(b"n" * 16), None, 0, tuple(BlockKey(key) for key in KEYS))
        await _publish(index, opened, [run], [])
        assert not any(cluster.primaries[0].call("EXISTS", name) for name in STREAMS)
        assert not index.feed.wanted()
        await index.feed.join()
        await _publish(index, opened, [run], [])
        assert sum(bool(cluster.primaries[0].call("EXISTS", name)) for name in STREAMS) == 1
        assert (await asyncio.to_thread(index.stats)).blocks == len(KEYS), "a stream is no block"
    finally:
        await index.close_async()


async def test_feed_is_bounded_in_bytes(cluster: ValkeyServers) -> None:
    cluster.primaries[0].call("FLUSHALL")
    index = await ValkeyIndex.start(ValkeyAddress(cluster.seeds), lookup_budget_s=2.0)
    try:
        index.feed.start_recording(encode_events, 16 * 100_000)
        await index.feed.join()
        for size in (10, 1_000, 10):
            keys = [BlockKey(number.to_bytes(16, "big")) for number in range(size)]
            for _ in range(100):
                await index.feed.append(VolumeEpoch(3), [], [RemovedKeys(VolumeEpoch(3), NamespaceId(b"n" * 16), keys)])
            used = cluster.primaries[0].call("MEMORY", "USAGE", STREAMS[3], "SAMPLES", 0)
            assert isinstance(used, int)
            assert used < 2 * 100_000
    finally:
        await index.close_async()


numbers = st.integers(0, 2**64 - 1)


@given(st.lists(st.builds(StreamPosition, numbers, numbers, numbers), min_size=16, max_size=16))
def test_position_round_trip(position: list[StreamPosition]) -> None:
    assert decode_position(encode_position(tuple(position))) == tuple(position)
    assert decode_position(b"short") is None


positions = st.lists(st.builds(StreamPosition, st.integers(0, 3), st.integers(0, 3), st.just(0)), min_size=16, max_size=16)


@given(positions.map(tuple), positions.map(tuple))
def test_goal_lowered_is_reached_at_the_end(goal: FeedPosition, newest: FeedPosition) -> None:
    assert reached(newest, lowered(goal, newest)), "a reader at the end of the streams waits for nothing"
    assert reached(goal, lowered(goal, newest))


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 5))
def test_judge_stream_trimmed_beyond_position_is_a_gap(adds: list[bool], trimmed: int, read: int, most: int) -> None:
    """A stream with as many entries as ``adds``, of which the first ones are trimmed; a reader has read the first ``read``."""
    added = len(adds)
    trimmed, read = min(trimmed, added), min(read, added)
    end = StreamPosition(added, 0, added)
    entries = [[b"%d-0" % number, [b"w", b"w", b"n", b"%d" % number, b"e", b""]] for number in range(1, added + 1)]
    there = [entry for number, entry in enumerate(entries, 1) if number > max(read, trimmed)]
    found = judge(3, StreamPosition(read, 0, read), end, added - trimmed, there[:most])  # type: ignore[arg-type]
    if trimmed > read:
        assert found.position is None
        return
    assert found.position == StreamPosition(min(read + most, added), 0, min(read + most, added))
    assert [entry.number for entry in found.entries] == list(range(read + 1, min(read + most, added) + 1))
