"""Calls that only the server with the role ``plan`` answers: it knows all plans, engines and requests.

Any server accepts them. The owner handles them. Every other server forwards the bytes of the request to the owner, with the
caller's metadata (token, request id, trace) and deadline, and returns the bytes of the answer. So clients need not know the
owner, and a call makes at most one extra hop: a forwarded call that arrives at a server that is not the owner fails. The answer
of a forwarded call says so (``FORWARDED_TO``), and a caller that knows several servers looks for the owner among them.

Without an owner, or if the owner does not answer, the call fails with ``Unavailable``, as if the planner were away. Calls that
describe plans and queues are then answered by the server that was asked, which has none. A call that
waits at an owner that is lost fails at once. An owner checks its lease before a call and again before the answer, so a server
that was stopped and continues answers nothing as the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.index.contract import LeaseHolder, ServerRole
from kvstore.metadata.roles.roles import LeasedRoles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import connect_aio
from kvstore.rpc.context import passed_on
from kvstore.rpc.errors import from_rpc_error, has_details
from kvstore.rpc.failover.rpc_rules import FORWARDED_TO
from kvstore.rpc.server import decoder

limited = LimitedLog(logging.getLogger(__name__))

FORWARDED_BY: Final = "kv-forwarded-by"
"""Metadata key of a forwarded call: the id of the server that forwarded it."""
PLANNING_METHODS: Final = (
    "PlanLoad",
    "PriceLoad",
    "ReportLoads",
    "ReplanLoad",
    "ReportEngines",
    "AssignRequest",
    "CancelRequest",
)
"""Methods of the service Metadata that the owner answers."""
PLANNING_ADMIN_METHODS: Final = ("DescribePlanning",)
"""Methods of the service MetadataAdmin that the owner answers."""
TAKEOVER_S: Final = 4.0
"""Time after which another server has the role of an owner that was killed.

It is about 5 s if the clock of Valkey's host was set back.
"""

Context = Any
Behaviour = Callable[[Any, Context], Awaitable[Any]]
RawMethod = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _Route:
    """The way to an owner.

    Attributes:
        owner: the owner.
        channel: connection to it.
        lost: done when it no longer holds the role.
        methods: methods of the channel by their full names.
    """

    owner: LeaseHolder
    channel: grpc.aio.Channel
    lost: asyncio.Future[None]
    methods: dict[str, RawMethod] = field(default_factory=dict)

    def method(self, name: str) -> RawMethod:
        """A method that takes and returns bytes."""
        if name not in self.methods:
            self.methods[name] = self.channel.unary_unary(name, None, None)
        return self.methods[name]


class OwnerCalls:
    """Handles or forwards the calls that only the owner of planning answers.

    Args:
        roles: roles of this server.
        counters: counters of this process.
        tls: identity of this server towards the others; None: no TLS.
    """

    def __init__(self, roles: LeasedRoles, counters: Counters, tls: TlsConfig | None) -> None:
        self._roles = roles
        self._counters = counters
        self._tls = tls
        self._route: _Route | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def register(
        self,
        service: ServiceDescriptor,
        servicer: object,
        names: Sequence[str],
        server: grpc.aio.Server,
        *,
        unowned: bool = False,
    ) -> None:
        """Register handlers that take precedence over the generated ones.

        Args:
            service: the service.
            servicer: has the behaviour of the owner.
            names: the methods, all unary.
            server: the server.
            unowned: whether this server answers from its own state while no server is the owner, or the owner does not answer.
        """
        handlers = {}
        for name in names:
            request = GetMessageClass(service.methods_by_name[name].input_type)
            handle = self._handler(f"/{service.full_name}/{name}", getattr(servicer, name), request.FromString, unowned=unowned)
            handlers[name] = grpc.unary_unary_rpc_method_handler(handle, request_deserializer=bytes)
        server.add_registered_method_handlers(service.full_name, handlers)  # type: ignore[attr-defined]  # not in the type stubs

    def _handler(self, method: str, behaviour: Behaviour, parse: Callable[[bytes], object], *, unowned: bool) -> Behaviour:
        decode = decoder(parse, streamed=True)  # raises at once

        async def handle(data: bytes, context: Context) -> bytes:
            if not self._roles.holds(ServerRole.PLAN):
                if not unowned or self._roles.owner(ServerRole.PLAN) is not None:
                    try:
                        return await self._forward(method, data, context)
                    except Unavailable as error:
                        if not unowned:
                            raise
                        self._counters.add(metadata_metrics.CALLS_ANSWERED_UNOWNED)
                        limited.warning("plan query answered without the planning server: %s (%s)", method, error)
                described: bytes = (await behaviour(decode(data), context)).SerializeToString()
                return described
            try:
                answer = await behaviour(decode(data), context)
            except KVStoreError:
                self._check_owner()
                raise
            self._check_owner()
            encoded: bytes = answer.SerializeToString()
            return encoded

        return handle

    def _check_owner(self) -> None:
        if not self._roles.holds(ServerRole.PLAN):
            raise self._unowned("this server no longer plans loads and assigns requests; try again")

    async def _forward(self, method: str, data: bytes, context: Context) -> bytes:
        metadata = passed_on(context)
        if any(key == FORWARDED_BY for key, _ in metadata):
            raise self._unowned("the call was forwarded to a server that does not plan loads and assign requests; try again")
        owner = self._roles.owner(ServerRole.PLAN)
        if owner is None:
            raise self._unowned("no server plans loads and assigns requests now; one of them begins within seconds")
        route = self._route_to(owner)
        self._counters.add(metadata_metrics.CALLS_FORWARDED)
        metadata.append((FORWARDED_BY, self._roles.server_id))
        call = route.method(method)(data, timeout=context.time_remaining(), metadata=metadata)
        answer = asyncio.ensure_future(_answer(call))
        try:
            await asyncio.wait((answer, route.lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._unowned("the server that planned loads and assigned requests is lost; try again")
            answered = answer.result()
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.UNAVAILABLE and not has_details(failed):
                raise self._unowned(
                    f"the metadata server {owner.address}, which plans loads and assigns requests, does not answer; another one"
                    f" takes over within {TAKEOVER_S:.0f} s: try again"
                ) from failed
            raise from_rpc_error(failed) from failed
        except grpc.aio.UsageError as closed:
            raise self._unowned("this server stops") from closed
        else:
            context.set_trailing_metadata(((FORWARDED_TO, owner.server),))  # the caller then looks for the owner
            return answered
        finally:
            answer.cancel()

    def _unowned(self, message: str) -> Unavailable:
        self._counters.add(metadata_metrics.CALLS_UNOWNED)
        return Unavailable(message)

    # ---- the way to the owner ----
    def _route_to(self, owner: LeaseHolder) -> _Route:
        if self._route is None or self._route.owner != owner:
            self._drop_route()
            lost = asyncio.get_running_loop().create_future()
            self._route = _Route(owner, connect_aio(owner.address, tls=self._tls), lost)
        return self._route

    def check_owner(self) -> None:
        """Fail the calls that wait at an owner that is lost. Called several times per second."""
        if self._route is not None and self._roles.owner(ServerRole.PLAN) != self._route.owner:
            self._drop_route()

    def _drop_route(self) -> None:
        route, self._route = self._route, None
        if route is None:
            return
        route.lost.set_result(None)
        task = asyncio.get_running_loop().create_task(route.channel.close(grace=0.1))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Fail the calls that wait, and close the connection."""
        self._drop_route()
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _answer(call: Awaitable[bytes]) -> bytes:
    return await call
