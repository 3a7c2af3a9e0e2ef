"""Tests of the MetadataAdmin service over a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from metadata_harness import NAMESPACE, TIMEOUT_S, Peer, Running, run_of, server_process, two_servers

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import metadata_pb2
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvproto.v1.common_pb2 import CacheSpec
from kvstore.core.errors import Conflict, InvalidArgument, NotFound, Unavailable
from kvstore.metadata.indexing import lookup
from kvstore.rpc.client import RetryPolicy, call_aio, connect_aio
from support.chains import chain
from support.wait import wait_until_async

KEYS = chain("k", 8)
SPEC = CacheSpec(
    model="m", dtype="bf16", block_tokens=16, layers=2, layer_block_bytes=64, layout="opaque", shard_count=1,
    hash_algorithm="xxh3-128",
)  # fmt: skip


async def ask(running: Running, name: str, request: Any) -> Any:
    return await call_aio(getattr(MetadataAdminStub(running.channel), name), request, TIMEOUT_S)


async def states(running: Running, keys: list[bytes], namespace: bytes = NAMESPACE) -> tuple[int, list[tuple[int, int, int]]]:
    found = await ask(running, "DescribeBlocks", pb.DescribeBlocksRequest(namespace_id=namespace, keys=b"".join(keys)))
    return found.hit_blocks, [(run.start, run.count, run.state) for run in found.runs]


async def registered(peer: Peer, model: str) -> bytes:
    """Register a namespace and return its id."""
    spec = CacheSpec()
    spec.CopyFrom(SPEC)
    spec.model = model
    request = metadata_pb2.RegisterNamespaceRequest(operation_id=bytes(16), spec=spec)
    return (await call_aio(peer.stub.RegisterNamespace, request, TIMEOUT_S)).namespace_id


async def test_describe_blocks_shows_holders_and_states(running: Running) -> None:
    first, second = running.peer("a"), running.peer("b")
    for peer in (first, second):
        await peer.register()
    await first.publish(first.nvme, run_of(KEYS, 0, 3))
    await second.publish(second.dram, run_of(KEYS, 2, 6))
    held, unknown = pb.BLOCK_STATE_HELD, pb.BLOCK_STATE_UNKNOWN
    assert await states(running, KEYS) == (6, [(0, 2, held), (2, 1, held), (3, 3, held), (6, 2, unknown)])
    found = await ask(running, "DescribeBlocks", pb.DescribeBlocksRequest(namespace_id=NAMESPACE, keys=KEYS[0]))
    (replica,) = found.runs[0].replicas
    assert (replica.volume_id, replica.node_id, replica.visible, replica.run_start) == (first.nvme, "a", True, 0)

    # `a` falls silent: the chain has a gap at its head, before the blocks of `b`
    async def a_is_hidden() -> bool:
        running.clock.advance(0.05)
        await second.beat()
        return (await states(running, KEYS))[0] == 0

    await wait_until_async(a_is_hidden)
    silent = pb.BLOCK_STATE_SILENT
    assert await states(running, KEYS) == (0, [(0, 2, silent), (2, 1, held), (3, 3, held), (6, 2, unknown)])

    # at a wrong depth, in a wrong namespace, without a namespace
    misplaced = pb.BLOCK_STATE_MISPLACED
    assert await states(running, [KEYS[4]]) == (0, [(0, 1, misplaced)])
    assert (await states(running, KEYS[:2], b"another-ns-of-16"))[1] == [(0, 2, misplaced)]
    found = await ask(running, "DescribeBlocks", pb.DescribeBlocksRequest(keys=KEYS[4]))
    assert (found.runs[0].state, found.runs[0].namespace_id, found.runs[0].depth) == (held, NAMESPACE, 4)
    assert (await states(running, []))[1] == []
    with pytest.raises(InvalidArgument):
        await ask(running, "DescribeBlocks", pb.DescribeBlocksRequest(namespace_id=b"short", keys=KEYS[0]))
    with pytest.raises(InvalidArgument):
        await ask(running, "DescribeBlocks", pb.DescribeBlocksRequest(keys=b"x" * 17))


async def test_describe_blocks_of_ended_boot_are_gone(running: Running) -> None:
    peer = running.peer("a")
    await peer.register()
    await peer.publish(peer.dram, run_of(KEYS, 0, 2))
    peer.reboot()
    await peer.register()
    hit, found = await states(running, KEYS[:2])
    assert hit == 0
    assert found in ([(0, 2, pb.BLOCK_STATE_GONE)], [(0, 2, pb.BLOCK_STATE_UNKNOWN)])  # swept, if the sweep came first


async def test_describe_namespaces_pages_and_statistics(running: Running) -> None:
    peer = running.peer("a")
    await peer.register()
    ids = [await registered(peer, f"m{number}") for number in range(3)]
    await peer.publish(peer.dram, run_of(KEYS, 0, 4, ids[1]))
    for _ in range(2):
        assert await peer.hit(KEYS, ids[1]) == 4
    first = await ask(running, "DescribeNamespaces", pb.DescribeNamespacesRequest(limit=2))
    assert [one.namespace_id for one in first.namespaces] == ids[:2]
    assert first.more
    one = first.namespaces[1]
    assert (one.spec.model, one.lookups, one.asked_blocks, one.hit_blocks) == ("m1", 2, 16, 8)
    rest = await ask(running, "DescribeNamespaces", pb.DescribeNamespacesRequest(limit=2, after=ids[1]))
    assert ([one.namespace_id for one in rest.namespaces], rest.more) == (ids[2:], False)
    alone = await ask(running, "DescribeNamespaces", pb.DescribeNamespacesRequest(namespace_id=ids[2]))
    assert [one.spec.model for one in alone.namespaces] == ["m2"]
    with pytest.raises(NotFound):
        await ask(running, "DescribeNamespaces", pb.DescribeNamespacesRequest(after=bytes(16)))


async def test_lookup_statistics_namespaces_are_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_COUNTED", 1)
    peer = running.peer("a")
    one, two = await registered(peer, "a"), await registered(peer, "b")
    for namespace in (one, two, one):
        assert await peer.hit(KEYS, namespace) == 0
    assert (await peer.counters())["metadata_lookups_uncounted_total"] == 1


async def test_lookup_in_caches_is_not_in_the_hit_rate(running: Running) -> None:
    """Namespaces of caches are never registered."""
    peer, caches = running.peer(), b"a" * 16
    namespace = await registered(peer, "m")
    await peer.register()
    await peer.publish(peer.dram, run_of(KEYS, 0, 4, caches))
    assert await peer.hit(KEYS, caches) == 4
    heads = metadata_pb2.LookupHeadsRequest(namespace_id=caches, keys=KEYS[0])
    assert len((await call_aio(peer.stub.LookupHeads, heads, TIMEOUT_S)).runs) == 1
    assert await peer.hit(KEYS, namespace) == 0
    counts = await peer.counters()
    names = ("metadata_lookups_total", "metadata_lookup_keys_total", "metadata_lookup_hit_blocks_total")
    assert [counts.get(name, 0) for name in names] == [3, len(KEYS), 0]


async def test_describe_planning_and_set_path_policy(running: Running) -> None:
    peer = running.peer("p")
    await peer.register()
    request = metadata_pb2.PlanLoadRequest(
        operation_id=b"o" * 16, prefill_node="p", blocks=100, block_bytes=1 << 20, block_tokens=64, budget_ms=5_000
    )
    plan = await call_aio(peer.stub.PlanLoad, request, TIMEOUT_S)
    seen = await ask(running, "DescribePlanning", pb.DescribePlanningRequest(live=10, decisions=10))
    (live,), (decision,) = seen.live, seen.decisions
    assert (live.plan_id, live.policy, live.prefill_node, live.blocks) == (plan.plan_id, "split", "p", 100)
    assert [(part.node_id, part.left, part.failed) for part in live.parts] == [("p", 100, False)]
    assert 0 < live.expires_in_ms <= 5_000
    assert (decision.plan_id, decision.policy, [part.count for part in decision.parts]) == (plan.plan_id, "split", [100])
    assert [(queue.node_id, queue.pending_bytes) for queue in decision.considered] == [("p", 0)], "as it was before"
    assert [(queue.node_id, queue.pending_bytes) for queue in seen.queues] == [("p", 100 << 20)]
    behind = await ask(running, "DescribePlanning", pb.DescribePlanningRequest(live=10, after_plan=plan.plan_id))
    assert not behind.live

    with pytest.raises(InvalidArgument, match="unknown path policy"):
        await ask(running, "SetPathPolicy", pb.SetPathPolicyRequest(policy="oracle"))
    with pytest.raises(Conflict):
        await ask(running, "SetPathPolicy", pb.SetPathPolicyRequest(policy="prefill_only", expected="round_robin"))
    done = await ask(running, "SetPathPolicy", pb.SetPathPolicyRequest(policy="prefill_only", expected="split"))
    assert (done.policy, done.before) == ("prefill_only", "split")
    request.operation_id = b"q" * 16
    assert (await call_aio(peer.stub.PlanLoad, request, TIMEOUT_S)).policy == "prefill_only"
    seen = await ask(running, "DescribePlanning", pb.DescribePlanningRequest(decisions=1))
    assert (seen.path_policy, seen.configured_policy) == ("prefill_only", "split")
    assert [one.policy for one in seen.decisions] == ["prefill_only"], "the newest"


async def test_rebuild_index_once_keeps_namespaces(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel:
            stub = MetadataAdminStub(channel)
            peer = Peer(channel)
            await peer.register()
            spec = metadata_pb2.RegisterNamespaceRequest(operation_id=bytes(16), spec=SPEC)
            namespace = (await call_aio(peer.stub.RegisterNamespace, spec, TIMEOUT_S)).namespace_id
            await peer.publish(peer.dram, run_of(KEYS, 0, 2, namespace))
            epoch = (await call_aio(stub.DescribeServer, pb.DescribeServerRequest(), TIMEOUT_S)).index_epoch
            with pytest.raises(Conflict):
                await call_aio(stub.RebuildIndex, pb.RebuildIndexRequest(expected_epoch=bytes(16)), TIMEOUT_S)
            done = await call_aio(stub.RebuildIndex, pb.RebuildIndexRequest(expected_epoch=epoch), TIMEOUT_S)
            assert done.dropped_epoch == epoch

            async def anew() -> bool:
                try:
                    patient = RetryPolicy(attempts=50)
                    found = await call_aio(stub.DescribeServer, pb.DescribeServerRequest(), TIMEOUT_S, patient)
                except Unavailable:
                    return False
                return bool(found.index_epoch != epoch)

            await wait_until_async(anew)
            found = await call_aio(stub.DescribeServer, pb.DescribeServerRequest(), TIMEOUT_S)
            assert (found.blocks, found.namespaces) == (0, 1)
            assert all((await peer.register()).values()), "it asks for every inventory"
            listed = await call_aio(stub.DescribeNamespaces, pb.DescribeNamespacesRequest(), TIMEOUT_S)
            assert [(one.namespace_id, one.spec) for one in listed.namespaces] == [(namespace, SPEC)]


async def test_path_policy_both_servers_follow_and_keep_it(tmp_path: Path) -> None:
    async def all_follow(policy: str) -> None:
        async def so() -> bool:
            for server in servers:
                async with connect_aio(server.address) as channel:
                    found = await call_aio(MetadataAdminStub(channel).DescribePlanning, pb.DescribePlanningRequest(), TIMEOUT_S)
                    if (found.path_policy, found.configured_policy) != (policy, "split"):
                        return False
            return True

        await wait_until_async(so)

    with two_servers(tmp_path) as servers:
        async with connect_aio(servers[0].address) as channel:
            stub = MetadataAdminStub(channel)
            done = await call_aio(stub.SetPathPolicy, pb.SetPathPolicyRequest(policy="round_robin", expected="split"), TIMEOUT_S)
            assert (done.policy, done.before) == ("round_robin", "split")
        await all_follow("round_robin")
        servers[1].stop()
        servers[1].start()
        await all_follow("round_robin")
        async with connect_aio(servers[1].address) as channel:
            stub = MetadataAdminStub(channel)
            await call_aio(stub.SetPathPolicy, pb.SetPathPolicyRequest(policy="split"), TIMEOUT_S)
        await all_follow("split")
