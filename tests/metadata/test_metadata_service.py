"""Tests of all calls of the Metadata service over a real socket."""

from __future__ import annotations

import secrets
from typing import Any

import grpc.aio
import pytest
from metadata_harness import NAMESPACE, TIMEOUT_S, Peer, Running, run_of

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import CacheSpec, Tier, VolumeInfo
from kvstore.core import limits
from kvstore.core.checksum import key_range
from kvstore.core.errors import Conflict, InvalidArgument, NotFound
from kvstore.core.types import BlockKey
from kvstore.rpc.client import call_aio
from support.chains import chain
from support.digests import digest_ranges
from support.wait import wait_until_async


# ---- registration ----
async def test_register_publish_lookup(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 100)
    assert await peer.register() == {peer.dram: True, peer.nvme: True}
    await peer.publish(peer.dram, run_of(keys, 0, 60))
    await peer.publish(peer.nvme, run_of(keys, 0, 80))
    answer = await peer.lookup(keys)
    assert answer.hit_blocks == 80
    (node,) = answer.nodes
    assert node == peer.info()
    held = {(run.start, run.count, node.volumes[run.volume].volume_id) for run in answer.runs}
    assert (0, 80, peer.nvme) in held
    assert await peer.hit(keys[:10]) == 10
    assert await peer.hit(chain("b", 10)) == 0
    assert await peer.hit([]) == 0


async def test_lookup_names_each_node_once(running: Running) -> None:
    one, two, keys = running.peer("host-1"), running.peer("host-2"), chain("a", 50)
    for peer, stop in ((one, 30), (two, 50)):
        await peer.register()
        await peer.publish(peer.dram, run_of(keys, 0, stop))
    answer = await one.lookup(keys)
    assert answer.hit_blocks == 50
    assert sorted(node.node_id for node in answer.nodes) == sorted({answer.nodes[run.node].node_id for run in answer.runs})
    covered = {position for run in answer.runs for position in range(run.start, run.start + run.count)}
    assert covered == set(range(50))


async def test_lookup_heads_names_volumes_of_each_key(running: Running) -> None:
    """Keys may be in any order and at any depth; hidden volumes, unknown keys and other namespaces are misses."""
    one, two, keys = running.peer("host-1"), running.peer("host-2"), chain("a", 9)
    for peer in (one, two):
        await peer.register()
    await one.publish(one.dram, run_of(keys, 0, 4))
    await two.publish(two.dram, run_of(keys, 3, 5))
    asked = [keys[8], keys[4], keys[0], keys[1], keys[3]]

    async def found(namespace: bytes = NAMESPACE) -> dict[int, set[str]]:
        request = pb.LookupHeadsRequest(namespace_id=namespace, keys=b"".join(asked))
        answer = await call_aio(one.stub.LookupHeads, request, TIMEOUT_S)
        held: dict[int, set[str]] = {}
        for run in answer.runs:
            node = answer.nodes[run.node]
            for at in range(run.start, run.start + run.count):
                held.setdefault(at, set()).add(node.volumes[run.volume].volume_id)
        assert len({node.node_id for node in answer.nodes}) == len(answer.nodes)
        return held

    assert await found() == {1: {two.dram}, 2: {one.dram}, 3: {one.dram}, 4: {one.dram, two.dram}}
    assert await found(b"another-tenant-1") == {}
    two.reboot()
    await two.register()
    assert await found() == {2: {one.dram}, 3: {one.dram}, 4: {one.dram}}
    asked = [BlockKey(b"short")]
    with pytest.raises(InvalidArgument):
        await found()


async def test_register_twice_changes_nothing(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 10)
    first = await peer.register()
    assert await peer.register() == first
    await peer.publish(peer.nvme, run_of(keys), sync_end=True)
    assert await peer.register() == {peer.dram: True, peer.nvme: False}
    assert await peer.hit(keys) == 10


async def test_register_new_boot_drops_dram_then_nvme(running: Running) -> None:
    peer, volatile, durable = running.peer(), chain("v", 10), chain("d", 10)
    await peer.register()
    await peer.publish(peer.dram, run_of(volatile), sync_end=True)
    await peer.publish(peer.nvme, run_of(durable), sync_end=True)
    peer.reboot()
    assert await peer.register() == {peer.dram: True, peer.nvme: True}
    assert await peer.hit(volatile) == 0
    assert await peer.hit(durable) == 10
    await peer.publish(peer.nvme, run_of(durable, 0, 4))
    assert await peer.hit(durable) == 10
    await peer.publish(peer.nvme, sync_end=True)
    assert await peer.hit(durable) == 4
    assert await peer.register() == {peer.dram: True, peer.nvme: False}


async def test_register_without_volume_closes_it(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 10)
    await peer.register()
    await peer.publish(peer.nvme, run_of(keys))
    peer.volumes.pop(peer.nvme)
    peer.reboot()
    assert await peer.register() == {peer.dram: True}
    assert await peer.hit(keys) == 0


async def test_register_volume_of_live_node_is_refused(running: Running) -> None:
    one, keys = running.peer("host-1"), chain("a", 10)
    await one.register()
    await one.publish(one.nvme, run_of(keys))
    thief = Peer(running.channel, "host-2", {one.nvme: Tier.TIER_NVME})
    with pytest.raises(Conflict, match="live node"):
        await thief.register()
    running.clock.advance(1.0)
    await wait_until_async(lambda: is_alive(one, alive=False))
    assert await thief.register() == {one.nvme: True}
    assert await one.hit(keys) == 0


async def is_alive(peer: Peer, *, alive: bool = True) -> bool:
    answer = await call_aio(peer.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)
    return {status.node.node_id: status.alive for status in answer.nodes}[peer.node_id] is alive


# ---- registration and expiry ----
async def test_silent_node_is_hidden_until_it_returns(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 10)
    await peer.register()
    await peer.publish(peer.dram, run_of(keys))
    running.clock.advance(0.08)
    assert not (await peer.beat()).register_again
    running.clock.advance(0.08)
    assert await peer.hit(keys) == 10
    running.clock.advance(0.08)
    await wait_until_async(lambda: is_alive(peer, alive=False))
    assert await peer.hit(keys) == 0
    assert (await peer.counters())["metadata_nodes_expired_total"] == 1
    assert not (await peer.beat()).register_again
    assert await peer.hit(keys) == 10


async def test_list_nodes_shows_usage_and_age(running: Running) -> None:
    two, one = running.peer("host-2"), running.peer("host-1")
    await two.register()
    await one.register()
    await one.beat(used=4096)
    running.clock.advance(0.05)
    answer = await call_aio(one.stub.ListNodes, pb.ListNodesRequest(), TIMEOUT_S)
    assert [status.node.node_id for status in answer.nodes] == ["host-1", "host-2"]
    first = answer.nodes[0]
    assert first.node == one.info()
    assert (first.alive, first.heartbeat_age_ms) == (True, 50)
    assert {usage.volume_id: usage.used_bytes for usage in first.usages} == {one.dram: 4096, one.nvme: 4096}


async def test_heartbeat_unknown_boot_must_register(running: Running) -> None:
    peer = running.peer()
    assert (await peer.beat()).register_again
    with pytest.raises(NotFound, match="register again"):
        await peer.send(peer.batch(peer.dram))
    await peer.register()
    old_boot = peer.boot_id
    peer.reboot()
    await peer.register()
    peer.boot_id = old_boot
    assert (await peer.beat()).register_again
    with pytest.raises(NotFound):
        await peer.send(peer.batch(peer.dram))
    with pytest.raises(NotFound):
        await peer.compare(peer.dram, 0, [0], [0])


# ---- order of publishing ----
async def test_publish_repeated_batches_change_nothing(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 20)
    await peer.register()
    first = peer.batch(peer.dram, [run_of(keys)])
    second = peer.batch(peer.dram, removed=keys[10:])
    for _ in range(2):
        assert (await peer.send(first, second))[-1] == 2
        assert await peer.hit(keys) == 10


async def test_publish_replaced_stream_applies_nothing(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 20)
    await peer.register()
    hung = peer.stub.Publish(timeout=TIMEOUT_S)
    await hung.write(peer.batch(peer.dram, [run_of(keys)]))
    assert (await hung.read()).sequence == 1
    late = peer.batch(peer.dram, [run_of(keys)])
    await peer.register()
    assert await peer.send(peer.batch(peer.dram, removed=keys)) == [3]
    await hung.write(late)
    with pytest.raises(grpc.aio.AioRpcError, match="registered again"):
        await hung.read()
    assert await peer.hit(keys) == 0


async def test_publish_burst_keeps_order(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 30)
    await peer.register()
    messages = [peer.batch(peer.dram, [run_of(keys, 0, 10)]), peer.batch(peer.dram, [run_of(keys, 10, 20)])]
    messages += [peer.batch(peer.dram, removed=keys[5:20]), peer.batch(peer.dram, [run_of(keys, 5, 25)])]
    messages += [peer.batch(peer.nvme, [run_of(keys)]), peer.batch(peer.dram, removed=keys[20:25])]
    messages += [peer.batch(peer.nvme, removed=keys)]
    assert (await peer.send(*messages))[-1] == len(messages)
    assert await peer.hit(keys) == 20


async def test_publish_gap_is_conflict_and_requests_inventory(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 20)
    await peer.register()
    await peer.publish(peer.nvme, run_of(keys, 0, 5), sync_end=True)
    assert not (await peer.register())[peer.nvme]
    before = peer.batch(peer.nvme, [run_of(keys, 5, 10)])
    peer.sequence += 1
    with pytest.raises(Conflict, match="missing") as caught:
        await peer.send(before, peer.batch(peer.nvme, [run_of(keys, 15, 20)]))
    assert caught.value.fields == {"got": "4", "expected": "3"}
    assert await peer.hit(keys) == 10
    assert (await peer.register())[peer.nvme]
    await peer.publish(peer.nvme, run_of(keys), sync_end=True)
    assert await peer.hit(keys) == 20
    assert not (await peer.register())[peer.nvme]


async def test_publish_batches_before_malformed_one_are_applied(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 20)
    await peer.register()
    bad = peer.batch(peer.dram)
    good = pb.PublishRequest()
    good.CopyFrom(bad)
    good.stored.append(run_of(keys))
    bad.sequence = 2
    bad.removed = b"torn"
    with pytest.raises(InvalidArgument, match="removed"):
        await peer.send(good, bad)
    assert await peer.hit(keys) == 20


async def test_publish_stream_belongs_to_one_boot(running: Running) -> None:
    one, two = running.peer("host-1"), running.peer("host-2")
    await one.register()
    await two.register()
    with pytest.raises(InvalidArgument, match="must not change"):
        await one.send(one.batch(one.dram), two.batch(two.dram))


async def test_publish_stream_resumes_after_disconnect(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 200)
    await peer.register()
    pending = [peer.batch(peer.dram, [run_of(keys, at, at + 10)]) for at in range(0, 200, 10)]
    while pending:
        stream = peer.stub.Publish()
        for message in pending[:4]:
            await stream.write(message)
        acknowledged = (await stream.read()).sequence
        stream.cancel()
        pending = [message for message in pending if message.sequence > acknowledged]
    assert await peer.hit(keys) == 200


# ---- anti-entropy ----
async def test_anti_entropy_finds_and_repairs_drift(running: Running) -> None:
    peer, keys = running.peer(), [BlockKey(key) for key in chain("a", 300)]
    await peer.register()
    await peer.publish(peer.nvme, run_of(keys), sync_end=True)
    digests, counts = digest_ranges(b"".join(keys))
    assert await peer.compare(peer.nvme, 0, digests, counts) == []
    # the index is damaged: blocks vanish and one appears, without the node
    stray = BlockKey(chain("stray", 1)[0])
    damage = [peer.batch(peer.nvme, removed=keys[290:]), peer.batch(peer.nvme, [run_of([stray])])]
    await peer.send(*damage)
    assert await peer.hit(keys) == 290
    wanted = sorted({key_range(key) for key in [*keys[290:], stray]})
    differing = await peer.compare(peer.nvme, 0, digests, counts)
    assert differing == wanted
    middle = await peer.compare(peer.nvme, 1000, digests[1000:2000], counts[1000:2000])
    assert middle == [number for number in wanted if 1000 <= number < 2000]
    added = removed = 0
    for number in differing:
        held = [run_of(keys, at, at + 1) for at, key in enumerate(keys) if key_range(key) == number]
        more, fewer = await peer.repair(peer.nvme, number, held)
        added, removed = added + more, removed + fewer
        assert await peer.repair(peer.nvme, number, held) == (0, 0)
    assert (added, removed) == (10, 1)
    assert await peer.compare(peer.nvme, 0, digests, counts) == []
    assert await peer.hit(keys) == 300
    assert (await peer.counters())["metadata_replicas_repaired_total"] == 11


async def test_repair_key_outside_range_is_refused(running: Running) -> None:
    peer, keys = running.peer(), [BlockKey(key) for key in chain("a", 1)]
    await peer.register()
    with pytest.raises(InvalidArgument, match="outside of the range"):
        await peer.repair(peer.dram, (key_range(keys[0]) + 1) % 4096, [run_of(keys)])


# ---- namespaces and stats ----
SPEC = CacheSpec(
    model="m",
    dtype="bf16",
    block_tokens=64,
    layers=4,
    layer_block_bytes=1024,
    layout="l",
    shard_count=1,
    hash_algorithm="xxh3-128",
)


async def test_list_namespaces_in_order_of_registration(running: Running) -> None:
    stub, ids = running.peer().stub, []
    for tenant in ("a", "b", "a"):
        spec = CacheSpec()
        spec.CopyFrom(SPEC)
        spec.tenant = tenant
        request = pb.RegisterNamespaceRequest(operation_id=secrets.token_bytes(16), spec=spec)
        ids.append((await call_aio(stub.RegisterNamespace, request, TIMEOUT_S)).namespace_id)
    assert ids[0] == ids[2] != ids[1]
    listed = (await call_aio(stub.ListNamespaces, pb.ListNamespacesRequest(), TIMEOUT_S)).namespaces
    assert [(entry.namespace_id, entry.spec.tenant) for entry in listed] == [(ids[0], "a"), (ids[1], "b")]


async def test_lookup_other_namespace_misses(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 10)
    await peer.register()
    await peer.publish(peer.dram, run_of(keys))
    other = b"another-tenant-1"
    assert await peer.hit(keys, other) == 0
    await peer.publish(peer.dram, run_of(chain("b", 5), namespace=other))
    assert await peer.hit(keys, other) == 0
    assert await peer.hit(chain("b", 5), other) == 5
    assert await peer.hit(chain("b", 5)) == 0


async def test_stats_and_sweep_of_dead_volume_epochs(running: Running) -> None:
    peer, keys = running.peer(), chain("a", 3000)
    await peer.register()
    await peer.publish(peer.dram, run_of(keys))
    stats = await call_aio(peer.stub.GetStats, pb.GetStatsRequest(), TIMEOUT_S)
    assert stats.blocks == 3000
    assert stats.index_bytes > 0
    assert len(stats.index_epoch) == 16
    assert stats.counters["metadata_blocks_published_total"] == 3000
    peer.reboot()
    await peer.register()

    async def swept() -> bool:
        return not (await call_aio(peer.stub.GetStats, pb.GetStatsRequest(), TIMEOUT_S)).blocks

    await wait_until_async(swept)


# ---- hostile input ----
def node_request(**change: object) -> pb.RegisterNodeRequest:
    peer = Peer.__new__(Peer)
    peer.node_id, peer.boot_id, peer.volumes = "host-1", b"b" * 16, {"v": Tier.TIER_DRAM}
    peer.zone, peer.uid = "", b""
    request = pb.RegisterNodeRequest(operation_id=b"o" * 16, node=peer.info())
    for name, value in change.items():
        if name == "operation_id":
            request.operation_id = value  # type: ignore[assignment]
        elif isinstance(value, list):
            del getattr(request.node, name)[:]
            getattr(request.node, name).extend(value)
        else:
            setattr(request.node, name, value)
    return request


HOSTILE = {
    "no node": ("RegisterNode", pb.RegisterNodeRequest(operation_id=b"o" * 16)),
    "short operation id": ("RegisterNode", node_request(operation_id=b"o")),
    "long boot id": ("RegisterNode", node_request(boot_id=b"b" * 1000)),
    "absurd node id": ("RegisterNode", node_request(node_id="n" * 1_000_000)),
    "node id with newline": ("RegisterNode", node_request(node_id="a\nINFO forged log line")),
    "node id that is a path": ("RegisterNode", node_request(node_id="a/b")),
    "node id that hides": ("RegisterNode", node_request(node_id="..")),
    "node id of the metadata server": ("RegisterNode", node_request(node_id="metadata")),
    "unknown role": ("RegisterNode", node_request(roles=["root"])),
    "no address": ("RegisterNode", node_request(data_address="")),
    "address with an impossible port": ("RegisterNode", node_request(control_address="127.0.0.1:99999")),
    "address that is a URL": ("RegisterNode", node_request(control_address="https://elsewhere")),
    "address with another digit": ("RegisterNode", node_request(data_address="h:\N{SUPERSCRIPT TWO}")),
    "storage address that is a socket": ("RegisterNode", node_request(storage_address="unix:/run/kvstore.sock")),
    "no tier": ("RegisterNode", node_request(volumes=[VolumeInfo(volume_id="v")])),
    "a volume twice": ("RegisterNode", node_request(volumes=[VolumeInfo(volume_id="v", tier=Tier.TIER_DRAM)] * 2)),
    "many volumes": (
        "RegisterNode",
        node_request(
            volumes=[VolumeInfo(volume_id=f"v{i}", tier=Tier.TIER_DRAM) for i in range(limits.MAX_VOLUMES_PER_NODE + 1)]
        ),
    ),
    "heartbeat of nobody": ("Heartbeat", pb.HeartbeatRequest()),
    "heartbeat with many usages": (
        "Heartbeat",
        pb.HeartbeatRequest(node_id="n", boot_id=b"b" * 16, usages=[pb.VolumeUsage(volume_id="v")] * 65),
    ),
    "torn keys": ("Lookup", pb.LookupRequest(namespace_id=NAMESPACE, keys=b"k" * 33)),
    "short namespace": ("Lookup", pb.LookupRequest(namespace_id=b"n", keys=b"k" * 32)),
    "too many keys": ("Lookup", pb.LookupRequest(namespace_id=NAMESPACE, keys=bytes(16 * (limits.MAX_KEYS_PER_CALL + 1)))),
    "too many guessed ends": ("Lookup", pb.LookupRequest(namespace_id=NAMESPACE, keys=b"k" * 32, ends=range(9))),
    "a message beyond all limits": ("Lookup", pb.LookupRequest(namespace_id=NAMESPACE, keys=bytes(65 << 20))),
    "digests without counts": ("CompareDigests", pb.CompareDigestsRequest(node_id="n", boot_id=b"b" * 16, digests=[1])),
    "ranges beyond key space": (
        "CompareDigests",
        pb.CompareDigestsRequest(node_id="n", boot_id=b"b" * 16, volume_id="v", first_range=2**32 - 1, digests=[1], counts=[1]),
    ),
    "range beyond key space": (
        "RepairRanges",
        pb.RepairRangesRequest(operation_id=b"o" * 16, node_id="n", boot_id=b"b" * 16, volume_id="v", ranges=[1, 4096]),
    ),
    "too many ranges": (
        "RepairRanges",
        pb.RepairRangesRequest(operation_id=b"o" * 16, node_id="n", boot_id=b"b" * 16, volume_id="v", ranges=range(65)),
    ),
    "no range": ("RepairRanges", pb.RepairRangesRequest(operation_id=b"o" * 16, node_id="n", boot_id=b"b" * 16, volume_id="v")),
    "empty spec": ("RegisterNamespace", pb.RegisterNamespaceRequest(operation_id=b"o" * 16)),
    "absurd spec": (
        "RegisterNamespace",
        pb.RegisterNamespaceRequest(
            operation_id=b"o" * 16, spec=CacheSpec(model="m", layers=2**32 - 1, layer_block_bytes=2**64 - 1, block_tokens=1)
        ),
    ),
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
async def test_hostile_requests_are_refused_with_a_typed_error(running: Running, case: str) -> None:
    method, request = HOSTILE[case]
    peer = running.peer("host-9")
    channel_limit = [("grpc.max_send_message_length", -1)]

    async with grpc.aio.insecure_channel(running.address, options=channel_limit) as channel:
        unary = getattr(Peer(channel).stub, method)
        with pytest.raises(InvalidArgument):
            await call_aio(unary, request, TIMEOUT_S)
    assert await peer.register()  # the server still works


async def test_register_unknown_role_names_it(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(InvalidArgument, match="got=root"):
            await call_aio(Peer(channel).stub.RegisterNode, node_request(roles=["prefill", "root"]), TIMEOUT_S)
        with pytest.raises(InvalidArgument, match="too many roles"):
            await call_aio(Peer(channel).stub.RegisterNode, node_request(roles=["prefill"] * 4), TIMEOUT_S)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": 0},
        {"boot_id": b"b"},
        {"volume_id": ""},
        {"removed": b"k" * 17},
        {"removed": bytes(16 * (limits.MAX_KEYS_PER_CALL + 1))},
        {"stored": [run_of(chain("a", 1))] * (limits.MAX_KEYS_PER_CALL + 1)},
        {"stored": [run_of([bytes(16)] * limits.MAX_KEYS_PER_CALL), run_of(chain("a", 1))]},
        {"stored": [run_of(chain("a", 3), 1, 2, b"short")]},
    ],
    ids=["sequence 0", "short boot", "no volume", "torn key", "many removed", "many runs", "many keys", "short namespace"],
)
async def test_hostile_publish_messages_are_refused(running: Running, change: dict[str, Any]) -> None:
    peer = running.peer()
    await peer.register()
    message = peer.batch(peer.dram)
    for name, value in change.items():
        if name == "stored":
            message.stored.extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidArgument):
        await peer.send(message)


async def test_publish_for_foreign_volume_is_refused(running: Running) -> None:
    one, two = running.peer("host-1"), running.peer("host-2")
    await one.register()
    await two.register()
    with pytest.raises(NotFound, match="volume"):
        await two.send(two.batch(one.dram, [run_of(chain("a", 1))]))
    with pytest.raises(NotFound):
        await two.repair(one.dram, 0, [])
