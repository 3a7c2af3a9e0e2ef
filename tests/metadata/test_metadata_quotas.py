"""Tests of quotas: settings file, shares, heartbeat answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metadata_harness import TIMEOUT_S, Peer, Running
from settings_suite import WRONG

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import metadata_pb2
from kvproto.v1.admin_pb2_grpc import MetadataAdminStub
from kvproto.v1.common_pb2 import CacheSpec
from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound
from kvstore.core.types import NamespaceId
from kvstore.metadata.retention.quota_shares import HEADROOM, REST_TIMES, divide_quota
from kvstore.metadata.retention.settings_store import OperatorSettings, QuotaSetting, RuleSetting
from kvstore.metadata.server import MetadataServer
from kvstore.rpc.client import call_aio, connect_aio

GIB = 1 << 30


# ---- shares, pure ----
nodes = st.lists(st.tuples(st.integers(0, 1 << 40), st.sampled_from([0, 1, 1 << 30, 1 << 40])), min_size=1, max_size=12)


@given(quota=st.integers(0, 1 << 42), known=nodes)
def test_shares_fit_quota_and_small_holders_keep_theirs(quota: int, known: list[tuple[int, int]]) -> None:
    spaces = [space for _, space in known]
    held = [has if space else 0 for has, space in known]
    given_ = divide_quota(quota, held, spaces)
    assert sum(given_) <= quota
    for has, space, share in zip(held, spaces, given_, strict=True):
        fair = quota * space // sum(spaces) if sum(spaces) else 0
        assert share >= min(has, fair) - len(known), "within its fair part nobody loses anything"
        assert share == 0 or space
    if any(spaces) and sum(held) * HEADROOM <= quota * (HEADROOM - 1):
        assert all(share >= has for has, share in zip(held, given_, strict=True)), "nobody gives while there is enough"
        assert sum(given_) >= quota - 2 * len(known), "all of it is given out"


def test_shares_lone_holder_gets_most_and_yields() -> None:
    held = [0, 0]
    for _ in range(30):
        held = [divide_quota(8000, held, [1, 1])[0], 0]  # the first fills what it is given
    assert held[0] >= 8000 * (HEADROOM - 1) // HEADROOM
    for _ in range(40):
        held = divide_quota(8000, held, [1, 1])  # now both do
    assert held == [4000, 4000]


@given(held=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9), spare=st.integers(0, 1 << 40), data=st.data())
def test_shares_without_growth_keep_what_nodes_hold(held: list[int], spare: int, data: st.DataObject) -> None:
    spaces = data.draw(st.lists(st.integers(1, 1 << 40), min_size=len(held), max_size=len(held)))
    given_ = divide_quota(sum(held) + spare, held, spaces, grows=False)
    assert all(share >= has for has, share in zip(held, given_, strict=True))
    assert sum(held) + spare - len(held) <= sum(given_) <= sum(held) + spare


def test_shares_without_capacity_are_zero() -> None:
    assert divide_quota(100, [], []) == []
    assert divide_quota(100, [5, 5], [0, 0]) == [0, 0]


# ---- the file ----
bounds_ = st.none() | st.integers(0, 2**62)


names_ = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
rules_ = st.dictionaries(
    st.binary(min_size=16, max_size=16), st.builds(RuleSetting, st.integers(0, 2**40), st.booleans(), st.integers(1, 2))
)


@given(st.dictionaries(names_, st.builds(QuotaSetting, bounds_, bounds_)), rules_)
def test_settings_round_trip(quotas: dict[str, QuotaSetting], rules: dict[NamespaceId, RuleSetting]) -> None:
    orders = OperatorSettings()
    for namespace, rule in rules.items():
        orders = orders.with_rule(namespace, rule)
    for tenant, quota in quotas.items():
        orders = orders.with_quota(tenant, quota)
    assert OperatorSettings.decode(orders.encode()) == orders
    assert all(orders.quotas.values()), "a quota without bounds is none"


# ---- the server ----
async def ask(running: Running, name: str, request: Any) -> Any:
    return await call_aio(getattr(MetadataAdminStub(running.channel), name), request, TIMEOUT_S)


async def set_quota(running: Running, tenant: str, expected: pb.TenantQuota | None = None, **bounds: int) -> Any:
    request = pb.SetTenantQuotaRequest(operation_id=bytes(16), tenant=tenant, quota=pb.TenantQuota(**bounds), expected=expected)
    return await ask(running, "SetTenantQuota", request)


async def reported(peer: Peer, report: int = 0, **held: int) -> metadata_pb2.HeartbeatResponse:
    """The answer to a heartbeat that reports tenants' usage in DRAM."""
    request = metadata_pb2.HeartbeatRequest(
        node_id=peer.node_id,
        boot_id=peer.boot_id,
        usages=[metadata_pb2.VolumeUsage(volume_id=peer.dram)],
        tenants=[metadata_pb2.TenantUsage(tenant=tenant, dram_bytes=size) for tenant, size in held.items()],
        sequence=report,
    )
    answer: metadata_pb2.HeartbeatResponse = await call_aio(peer.stub.Heartbeat, request, TIMEOUT_S)
    return answer


async def beat(peer: Peer, **held: int) -> dict[str, tuple[int | None, int | None]]:
    """As ``reported``: the shares, in DRAM and on NVMe."""
    answer = await reported(peer, **held)
    assert answer.HasField("retention")
    return {
        one.tenant: (
            one.dram_bytes if one.HasField("dram_bytes") else None,
            one.nvme_bytes if one.HasField("nvme_bytes") else None,
        )
        for one in answer.retention.shares
    }


async def test_quota_shares_follow_usage(running: Running) -> None:
    first, second = running.peer("a"), running.peer("b")
    for peer in (first, second):
        await peer.register()
    assert await beat(first) == {}
    await set_quota(running, "acme", dram_bytes=8000)
    assert await beat(first) == {"acme": (4000, None)}
    await beat(first, acme=4000, other=7)
    running.clock.advance(0.05)
    await beat(second)
    shares_ = [(await beat(peer))["acme"][0] for peer in (first, second)]
    assert await beat(first, acme=4000) != {}
    running.clock.advance(0.05)
    await beat(second)
    told = (await beat(first, acme=4000))["acme"][0]
    assert told is not None
    assert 4000 < told <= 8000
    assert all(share is not None for share in shares_)
    found = await ask(running, "DescribeTenants", pb.DescribeTenantsRequest())
    (acme,) = [one for one in found.tenants if one.tenant == "acme"]
    assert (acme.quota.dram_bytes, acme.quota.HasField("nvme_bytes"), acme.dram_bytes, acme.nodes) == (8000, False, 4000, 1)
    (nobody,) = (await ask(running, "DescribeTenants", pb.DescribeTenantsRequest(tenant="nobody"))).tenants
    assert (nobody.HasField("quota"), nobody.nodes) == (False, 0)
    await set_quota(running, "acme")
    assert await beat(first, acme=4000) == {}


async def test_quota_shares_name_report_and_boot(running: Running) -> None:
    peer = running.peer("a")
    await peer.register()
    assert (await reported(peer, 7)).retention.from_sequence == 7, "without any order, too"
    await set_quota(running, "acme", dram_bytes=8000)
    assert (await reported(peer, 8)).retention.from_sequence == 8
    assert (await reported(peer, 9, acme=5)).retention.from_sequence == 8, "shares of a moment ago"
    running.clock.advance(0.05)
    assert (await reported(peer, 10, acme=5)).retention.from_sequence == 10
    peer.reboot()
    await peer.register()
    assert not (
        await call_aio(peer.stub.Heartbeat, metadata_pb2.HeartbeatRequest(node_id="a", boot_id=peer.boot_id), TIMEOUT_S)
    ).HasField("retention"), "it has not said what it holds"
    assert (await reported(peer, 1, acme=3)).retention.from_sequence == 1, "nothing of the boot before"


async def test_shares_draining_node_gets_none(running: Running) -> None:
    first, second = running.peer("a"), running.peer("b")
    for peer in (first, second):
        await peer.register()
    await set_quota(running, "acme", dram_bytes=8000)
    await beat(first, acme=7600)
    await beat(second, acme=100)
    order = metadata_pb2.DrainNodeRequest(operation_id=bytes(16), node_id="a", move=True)
    await call_aio(first.stub.DrainNode, order, TIMEOUT_S)
    assert await beat(first, acme=7600) == {}, "at once: nothing of it leaves"
    running.clock.advance(0.05)
    assert await beat(second, acme=100) == {"acme": (8000, None)}
    await call_aio(first.stub.UndrainNode, metadata_pb2.UndrainNodeRequest(operation_id=bytes(16), node_id="a"), TIMEOUT_S)
    running.clock.advance(0.05)
    told = (await beat(first, acme=7600))["acme"][0]
    assert told is not None
    assert told < 8000


async def test_quota_shares_moving_blocks_keep_their_share(running: Running) -> None:
    """A full, unevenly used quota while a node drains: no share is smaller than the node's usage."""
    peers = [running.peer(name) for name in "abc"]
    for peer in peers:
        await peer.register()
    await set_quota(running, "acme", dram_bytes=8000)
    await call_aio(
        peers[0].stub.DrainNode, metadata_pb2.DrainNodeRequest(operation_id=bytes(16), node_id="a", move=True), TIMEOUT_S
    )
    held = dict(zip(peers, (900, 7000, 1000), strict=True))
    for peer, size in held.items():
        await beat(peer, acme=size)
    running.clock.advance(0.05)
    told = [(await beat(peer, acme=size)).get("acme") for peer, size in held.items()]
    assert told == [None, (7000, None), (1000, None)]


async def test_shares_slow_run_is_followed_by_a_pause(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow(*arguments: Any, **more: Any) -> list[int]:
        made.append(arguments)
        running.clock.advance(0.0025)  # too short for a node to expire
        return divide_quota(*arguments, **more)

    monkeypatch.setattr("kvstore.metadata.retention.quota_shares.divide_quota", slow)
    first, second = running.peer("a"), running.peer("b")
    for peer in (first, second):
        await peer.register()
    silent = metadata_pb2.HeartbeatRequest(node_id="b", boot_id=second.boot_id)
    for tenant in ("acme", "beta"):
        await set_quota(running, tenant, dram_bytes=8000)
    assert not (await call_aio(second.stub.Heartbeat, silent, TIMEOUT_S)).HasField("retention")
    assert not made, "it has not said what it holds"
    told = await asyncio.gather(*(reported(first, 1, acme=5) for _ in range(4)))
    assert len(made) == 2, "once for all who ask: for each tenant"
    assert all(len(one.retention.shares) == 2 for one in told)
    running.clock.advance(REST_TIMES * 0.005 - 0.03)
    await set_quota(running, "acme", dram_bytes=9000)
    assert (await beat(first, acme=5))["beta"][0]
    assert not (await reported(second, 1)).HasField("retention"), "its turn comes with the next"
    assert len(made) == 2
    running.clock.advance(0.03)
    await beat(first, acme=5)
    assert len(made) == 4
    assert (await reported(second, 2)).HasField("retention")
    assert len(made) == 4


async def test_set_quota_checks_expected_and_limit(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    done = await set_quota(running, "acme", dram_bytes=5, nvme_bytes=6)
    assert not done.HasField("before")
    with pytest.raises(Conflict) as changed:
        await set_quota(running, "acme", pb.TenantQuota(), dram_bytes=7)
    assert changed.value.fields["quota"] == "dram=5,nvme=6"
    done = await set_quota(running, "acme", pb.TenantQuota(dram_bytes=5, nvme_bytes=6), dram_bytes=7)
    assert (done.before.nvme_bytes, done.quota.dram_bytes, done.quota.HasField("nvme_bytes")) == (6, 7, False)
    for bad in ("x" * 513, "a\nb"):
        with pytest.raises(InvalidArgument):
            await set_quota(running, bad, dram_bytes=1)
    with pytest.raises(InvalidArgument):
        await set_quota(running, "acme", dram_bytes=2**63)
    monkeypatch.setattr("kvstore.core.limits.MAX_QUOTAS", 1)
    with pytest.raises(CapacityExceeded):
        await set_quota(running, "beta", dram_bytes=1)
    await set_quota(running, "acme", dram_bytes=8)


async def test_set_rule_reaches_nodes(running: Running) -> None:
    peer = running.peer("a")
    await peer.register()
    spec = CacheSpec(model="m", dtype="bf16", block_tokens=16, layers=2, layer_block_bytes=64, layout="opaque", shard_count=1,
                     hash_algorithm="xxh3-128")  # fmt: skip
    known = await call_aio(
        peer.stub.RegisterNamespace, metadata_pb2.RegisterNamespaceRequest(operation_id=bytes(16), spec=spec), TIMEOUT_S
    )

    async def set_rule(namespace: bytes, expected: metadata_pb2.NamespaceRule | None = None, **fields: Any) -> Any:
        rule = metadata_pb2.NamespaceRule(namespace_id=namespace, **fields)
        return await ask(
            running, "SetNamespaceRule", pb.SetNamespaceRuleRequest(operation_id=bytes(16), rule=rule, expected=expected)
        )

    with pytest.raises(NotFound):
        await set_rule(bytes(16), kept=True)
    with pytest.raises(InvalidArgument):
        await set_rule(b"short", kept=True)
    with pytest.raises(InvalidArgument):
        await set_rule(known.namespace_id, ttl_ms=2**60)
    with pytest.raises(InvalidArgument):
        await set_rule(known.namespace_id, copies=3)
    done = await set_rule(known.namespace_id, ttl_ms=5_000, kept=True)
    assert (done.before.ttl_ms, done.before.kept, done.rule.ttl_ms, done.rule.kept) == (0, False, 5_000, True)
    with pytest.raises(Conflict) as changed:
        await set_rule(known.namespace_id, metadata_pb2.NamespaceRule(ttl_ms=5_000), kept=True)
    assert changed.value.fields["rule"] == "ttl=5000,kept=yes,copies=1"
    (rule,) = (await peer.beat()).retention.rules
    assert (rule.namespace_id, rule.ttl_ms, rule.kept) == (known.namespace_id, 5_000, True)
    (shown,) = (await ask(running, "DescribeNamespaces", pb.DescribeNamespacesRequest())).namespaces
    assert (shown.ttl_ms, shown.kept, shown.copies) == (5_000, True, 1)
    await set_rule(known.namespace_id, copies=2)
    (rule,) = (await peer.beat()).retention.rules
    assert (rule.ttl_ms, rule.kept, rule.copies) == (0, False, 2)
    await set_rule(known.namespace_id)
    assert not (await peer.beat()).retention.rules


async def test_heartbeat_without_or_with_invalid_usages(running: Running) -> None:
    peer = running.peer("a")
    await peer.register()
    assert (await peer.beat()).HasField("retention"), "it says nothing of tenants, and ignores what it is told"
    for bad in ([metadata_pb2.TenantUsage(tenant="a\x07")], [metadata_pb2.TenantUsage(tenant=str(n)) for n in range(1_025)]):
        request = metadata_pb2.HeartbeatRequest(node_id="a", boot_id=peer.boot_id, tenants=bad)
        with pytest.raises(InvalidArgument):
            await call_aio(peer.stub.Heartbeat, request, TIMEOUT_S)


async def test_quotas_survive_index_rebuild(tmp_path: Path) -> None:
    config = MetadataConfig(index_path=tmp_path / "index", listen="127.0.0.1:0", index_size_bytes=64 << 20)
    for lived in (False, True):
        server = MetadataServer(config)
        address = await server.start()
        async with connect_aio(address) as channel:
            running = Running(server, None, channel, address)  # type: ignore[arg-type]
            peer = running.peer("a")
            await peer.register()
            if lived:
                assert await beat(peer) == {"acme": (None, GIB)}
            else:
                await set_quota(running, "acme", nvme_bytes=GIB)
        await server.stop(0.0)
        for file in (tmp_path / "index").iterdir():
            file.unlink()
    assert json.loads((tmp_path / "index.orders.json").read_bytes())["quotas"] == {"acme": {"dram": None, "nvme": GIB}}


async def test_settings_damaged_file_sends_none_and_refuses_changes(running: Running, tmp_path: Path) -> None:
    peer = running.peer("a")
    await peer.register()
    for raw in (b"{", *WRONG):
        (tmp_path / "index.orders.json").write_bytes(raw)
        assert not (await peer.beat()).HasField("retention"), "what was told before holds"
    with pytest.raises(Conflict):
        await set_quota(running, "acme", dram_bytes=1)
    with pytest.raises(Conflict):
        await ask(running, "DescribeTenants", pb.DescribeTenantsRequest())
    assert (await peer.counters())["metadata_orders_unreadable_total"] > 0
