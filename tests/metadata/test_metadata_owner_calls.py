"""Tests of calls that one server forwards to the server that plans: what it passes on, and how a call fails without an owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from certificates import make_certificates
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.errors import Conflict, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from kvstore.embedded.ports import free_port
from kvstore.index.contract import LeaseHolder, ServerRole
from kvstore.metadata.roles.owner_calls import FORWARDED_BY, PLANNING_METHODS, OwnerCalls
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import RetryPolicy, call_aio, connect_aio
from kvstore.rpc.errors import from_rpc_error
from kvstore.rpc.server import build_aio_server
from support.wait import wait_until_async

TIMEOUT_S = 10.0


class SetRoles:
    """Roles that a test sets."""

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id
        self.plans = False
        self.known_owner: LeaseHolder | None = None

    def holds(self, role: ServerRole) -> bool:
        assert role is ServerRole.PLAN
        return self.plans

    def owner(self, role: ServerRole) -> LeaseHolder | None:
        assert role is ServerRole.PLAN
        return self.known_owner


class Server(metadata_pb2_grpc.MetadataServicer):
    """A server whose handlers record their calls."""

    def __init__(self, name: str, tls: TlsConfig | None = None) -> None:
        self.name = name
        self.roles = SetRoles(name)
        self.counters = Counters()
        self.calls = OwnerCalls(self.roles, self.counters, tls)  # type: ignore[arg-type]  # as many of its methods as are used
        self.address = ""
        self.metadata: list[tuple[str, str]] = []
        self.left_s: float | None = None
        self.waits = self.cancelled = 0
        self.answers = asyncio.Event()

    async def PlanLoad(self, request: pb.PlanLoadRequest, context: Any) -> pb.LoadPlan:  # noqa: N802
        self.metadata = list(context.invocation_metadata())
        self.left_s = context.time_remaining()
        return pb.LoadPlan(plan_id=request.blocks, policy=self.name)

    async def ReplanLoad(self, request: pb.ReplanLoadRequest, context: object) -> pb.LoadPlan:  # noqa: N802
        raise Conflict("no such part", part=request.index)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: object) -> pb.CancelRequestResponse:  # noqa: N802
        return pb.CancelRequestResponse()

    async def AssignRequest(self, request: pb.AssignRequestRequest, context: object) -> pb.Assignment:  # noqa: N802
        self.waits += 1
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return pb.Assignment(generation=7)


@asynccontextmanager
async def serving(name: str, tls: TlsConfig | None = None) -> AsyncIterator[Server]:
    server = Server(name, tls)
    service = pb.DESCRIPTOR.services_by_name["Metadata"]

    def register(to: grpc.aio.Server) -> None:
        metadata_pb2_grpc.add_MetadataServicer_to_server(server, to)
        server.calls.register(service, server, [name for name in PLANNING_METHODS if name != "CancelRequest"], to)
        server.calls.register(service, server, ["CancelRequest"], to, unowned=True)

    bound = await build_aio_server(
        [register], addresses=["127.0.0.1:0"], services=[service.full_name], counters=server.counters, tls=tls
    )
    await bound.start()
    (server.address,) = bound.addresses
    try:
        yield server
    finally:
        await bound.stop(0.0)
        await server.calls.close()


@pytest.fixture
async def servers() -> AsyncIterator[tuple[Server, Server]]:
    async with serving("owner") as owner, serving("other") as other:
        owner.roles.plans = True
        other.roles.known_owner = LeaseHolder("owner", owner.address)
        yield owner, other


@pytest.fixture
async def stub(servers: tuple[Server, Server]) -> AsyncIterator[metadata_pb2_grpc.MetadataStub]:
    """Calls the server that is not the owner."""
    async with connect_aio(servers[1].address) as channel:
        yield metadata_pb2_grpc.MetadataStub(channel)  # type: ignore[no-untyped-call]


async def test_call_is_forwarded_with_metadata_and_deadline(servers: tuple[Server, Server], stub: Any) -> None:
    owner, other = servers
    metadata = [("authorization", "Bearer secret"), ("kv-request-id", "r-1"), ("trace-bin", b"\x01")]
    plan = await stub.PlanLoad(pb.PlanLoadRequest(blocks=5), timeout=TIMEOUT_S, metadata=metadata)
    assert (plan.plan_id, plan.policy) == (5, "owner")
    assert set(metadata) <= set(owner.metadata)
    assert (FORWARDED_BY, "other") in owner.metadata
    assert owner.left_s is not None
    assert 0 < owner.left_s <= TIMEOUT_S * 1.02, "gRPC rounds deadlines up on the wire, by about one percent"
    assert other.counters.snapshot()["metadata_forwarded_calls_total"] == 1


async def test_call_errors_of_the_owner_reach_the_caller(servers: tuple[Server, Server], stub: Any) -> None:
    with pytest.raises(Conflict, match="no such part") as raised:
        await call_aio(stub.ReplanLoad, pb.ReplanLoadRequest(index=3), TIMEOUT_S)
    assert raised.value.fields["part"] == "3"


async def test_call_takes_one_hop_at_most(servers: tuple[Server, Server], stub: Any) -> None:
    owner, other = servers
    owner.roles.plans = False
    owner.roles.known_owner = LeaseHolder("other", other.address)
    with pytest.raises(Unavailable, match="was forwarded"):
        await call_aio(stub.PlanLoad, pb.PlanLoadRequest(), TIMEOUT_S)
    assert owner.counters.snapshot()["metadata_unowned_calls_total"] == 1


async def test_call_owner_killed_says_when_to_try_again(servers: tuple[Server, Server], stub: Any) -> None:
    _, other = servers
    other.roles.known_owner = LeaseHolder("owner", f"127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match="does not answer; another one takes over within 4 s: try again"):
        await call_aio(stub.PlanLoad, pb.PlanLoadRequest(), TIMEOUT_S, RetryPolicy(attempts=1))
    await call_aio(stub.CancelRequest, pb.CancelRequestRequest(), TIMEOUT_S, RetryPolicy(attempts=1))


async def test_call_without_owner_is_unavailable(servers: tuple[Server, Server], stub: Any) -> None:
    _, other = servers
    other.roles.known_owner = None
    with pytest.raises(Unavailable, match="no server plans"):
        await call_aio(stub.PlanLoad, pb.PlanLoadRequest(), TIMEOUT_S)
    other.roles.known_owner = LeaseHolder("gone", "127.0.0.1:1")
    with pytest.raises(Unavailable):
        await call_aio(stub.PlanLoad, pb.PlanLoadRequest(), TIMEOUT_S)


async def test_call_waiting_at_a_lost_owner_fails(servers: tuple[Server, Server], stub: Any) -> None:
    owner, other = servers
    waiting = asyncio.create_task(call_aio(stub.AssignRequest, pb.AssignRequestRequest(), TIMEOUT_S))
    await wait_until_async(lambda: owner.waits == 1)
    other.calls.check_owner()
    assert not waiting.done()
    other.roles.known_owner = LeaseHolder("third", "127.0.0.1:1")
    other.calls.check_owner()
    with pytest.raises(Unavailable, match="is lost"):
        await waiting


async def test_owner_that_lost_its_role_answers_nothing(servers: tuple[Server, Server]) -> None:
    owner, _ = servers
    async with connect_aio(owner.address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)  # type: ignore[no-untyped-call]
        waiting = asyncio.create_task(call_aio(stub.AssignRequest, pb.AssignRequestRequest(), TIMEOUT_S))
        await wait_until_async(lambda: owner.waits == 1)
        owner.roles.plans = False
        owner.answers.set()
        with pytest.raises(Unavailable, match="no longer plans"):
            await waiting


async def test_call_cancelled_or_late_is_cancelled_at_the_owner(servers: tuple[Server, Server], stub: Any) -> None:
    owner, _ = servers
    with pytest.raises(DeadlineExceeded):
        await call_aio(stub.AssignRequest, pb.AssignRequestRequest(), 0.2)
    await wait_until_async(lambda: owner.cancelled == 1)
    call = stub.AssignRequest(pb.AssignRequestRequest(), timeout=TIMEOUT_S)
    await wait_until_async(lambda: owner.waits == 2)
    call.cancel()
    await wait_until_async(lambda: owner.cancelled == 2)


async def test_call_is_forwarded_over_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    async with (
        serving("owner", files.server()) as owner,
        serving("other", files.server()) as other,
        connect_aio(other.address, tls=files.client()) as channel,
    ):
        owner.roles.plans = True
        other.roles.known_owner = LeaseHolder("owner", owner.address)
        stub: Any = metadata_pb2_grpc.MetadataStub(channel)  # type: ignore[no-untyped-call]
        plan = await call_aio(stub.PlanLoad, pb.PlanLoadRequest(blocks=3), TIMEOUT_S)
        assert (plan.plan_id, plan.policy) == (3, "owner")


async def test_owner_rejects_bytes_that_are_no_message(servers: tuple[Server, Server]) -> None:
    for server in servers:
        async with connect_aio(server.address) as channel:
            call = channel.unary_unary("/kvstore.v1.Metadata/PlanLoad", None, None)(b"\xff\xff", timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            error = from_rpc_error(raised.value)
            assert isinstance(error, InvalidArgument)
            assert not isinstance(error, NotFound)
