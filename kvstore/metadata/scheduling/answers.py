"""Events for engine groups and answers for routers about a request."""

from __future__ import annotations

from kvproto.v1 import metadata_pb2 as pb
from kvstore.dualpath.groups import Engine
from kvstore.metadata.scheduling.groups import GroupTable
from kvstore.metadata.scheduling.outbox import NO_WORK, PendingWork
from kvstore.metadata.scheduling.requests import RouterRequest


class RequestNotifier:
    """Puts events about requests into the outboxes of engine groups, and answers the routers that wait."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups

    def assignment(self, request: RouterRequest) -> pb.Assignment:
        """The engines of a request, for its router."""
        prefill, decode = self._groups.ref(request.prefill), self._groups.ref(request.decode)
        return pb.Assignment(generation=request.generation, prefill=prefill, decode=decode)

    def answer_waiters(self, request: RouterRequest) -> None:
        """Answer all calls that wait for the engines of a request."""
        for waiter in request.waiters:
            if not waiter.done():
                waiter.set_result(self.assignment(request))

    def announce(self, engine: Engine, request: RouterRequest, work: PendingWork = NO_WORK) -> None:
        """Send an engine's group the present state of a request.

        Args:
            engine: the engine.
            request: a request that is assigned to it.
            work: new work for the engine; none if it already had the request.
        """
        group = self._groups.get(engine.group)
        if group is None:
            return
        assigned = pb.ScheduledRequest(
            request_id=request.request_id,
            generation=request.generation,
            engine=engine.engine,
            prompt_tokens=request.message.prompt_tokens,
            hit_tokens=request.message.hit_tokens,
            expected_output_tokens=request.message.expected_output_tokens,
            prefill=self._groups.ref(request.prefill),
            decode=self._groups.ref(request.decode),
            cached_tokens=request.ask.cached_on(engine),
        )
        group.outbox.put(pb.SchedulerEvent(assigned=assigned), engine.engine, work)

    def revoke(self, request: RouterRequest, engine: Engine) -> None:
        """Tell an engine's group to drop a request."""
        group = self._groups.get(engine.group)
        if group is not None:
            revoked = pb.RevokedRequest(request_id=request.request_id, generation=request.generation)
            group.outbox.put(pb.SchedulerEvent(revoked=revoked))

    def revoke_all(self, request: RouterRequest) -> None:
        """Tell all engines that still have work for a request to drop it."""
        for engine in (None if request.prefilled else request.prefill, request.decode):
            if engine is not None:
                self.revoke(request, engine)
