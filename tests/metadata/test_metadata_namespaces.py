"""Tests of the limits on namespaces, per tenant and in total."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from metadata_harness import TIMEOUT_S, Peer, Running, run_of

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, NotFound
from kvstore.core.spec import CacheSpec as Spec
from kvstore.core.types import NamespaceId
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.retention import tenants
from kvstore.metadata.retention.tenants import NamespaceList, NamespaceOwners
from kvstore.rpc.client import call_aio
from kvstore.rpc.codec import spec_to_proto
from support.chains import chain

MOST = 4


def spec_of(tenant: str, salt: int) -> Spec:
    return Spec(model="m", block_tokens=16, layers=1, layer_block_bytes=64, tenant=tenant, salt=salt.to_bytes(4, "big"))


async def register(peer: Peer, tenant: str, salt: int) -> bytes:
    request = pb.RegisterNamespaceRequest(operation_id=secrets.token_bytes(16), spec=spec_to_proto(spec_of(tenant, salt)))
    return (await call_aio(peer.stub.RegisterNamespace, request, TIMEOUT_S)).namespace_id


async def test_namespaces_per_tenant_are_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_NAMESPACES_OF_TENANT", MOST)
    peer = Peer(running.channel)
    asked = [register(peer, "greedy", salt) for salt in range(5 * MOST)]
    answers = await asyncio.gather(*asked, return_exceptions=True)  # at once: none looks before another's is there
    made = [one for one in answers if isinstance(one, bytes)]
    assert len(made) == MOST
    assert all(isinstance(one, bytes | CapacityExceeded) for one in answers)
    assert await register(peer, "greedy", answers.index(made[0])) == made[0], "what is there is not asked for again"
    for tenant in ("other", ""):
        assert await register(peer, tenant, 0)
    assert len({await register(peer, "", salt) for salt in range(2 * MOST)}) == 2 * MOST, "those of no tenant are everybody's"


async def test_publish_beyond_namespace_limit_keeps_other_runs(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(running.channel)
    await peer.register()
    known = await register(peer, "", 1)
    monkeypatch.setattr(limits, "MAX_NAMESPACES", 1)
    mine, theirs = chain("mine", 3), chain("theirs", 3)
    await peer.publish(peer.dram, run_of(theirs, namespace=b"n" * 16), run_of(mine, namespace=known), sync_end=True)
    assert await peer.hit(mine, known) == 3
    assert await peer.hit(theirs, b"n" * 16) == 0
    assert (await peer.counters())["index_key_unnamed_total"] == 3
    with pytest.raises(CapacityExceeded):
        await register(peer, "", 2)


def test_lookup_unregistered_namespace_reads_no_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("acme", 1)
    index = LmdbIndex.open(tmp_path / "index", map_bytes=1 << 24)
    owners = NamespaceOwners(index)
    monkeypatch.setattr(tenants, "tenant", lambda: "acme")
    unknown = NamespaceId(b"u" * 16)
    with pytest.raises(NotFound):
        asyncio.run(owners.check(spec.namespace))
    owners.register(spec)
    monkeypatch.setattr(index, "namespaces", lambda: pytest.fail("this takes a tenth of a second where there are many"))
    asyncio.run(owners.check(spec.namespace))
    for _ in range(2):
        with pytest.raises(NotFound):
            asyncio.run(owners.check(unknown))
    assert index.spec_of(spec.namespace) == spec_to_proto(spec).SerializeToString(deterministic=True)
    index.close()


def test_list_of_namespaces_parses_each_spec_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LmdbIndex.open(tmp_path / "index", map_bytes=1 << 24)
    owners, listing = NamespaceOwners(index), NamespaceList()
    specs = [spec_of(tenant, 1) for tenant in ("acme", "beta")]
    for spec in specs:
        owners.register(spec)
    known = index.namespaces()
    listing.listed(known, None)
    monkeypatch.setattr(tenants, "CacheSpec", None)
    assert [info.namespace_id for info in listing.listed(known, None).namespaces] == [spec.namespace for spec in specs]
    (mine,) = listing.listed(known, "beta").namespaces
    assert (mine.namespace_id, mine.spec) == (specs[1].namespace, spec_to_proto(specs[1]))
    index.close()
