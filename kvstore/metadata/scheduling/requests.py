"""Requests of routers: their state, their attempts, their deadlines, and the operations that ended.

A *generation* on the wire names one attempt of one request. Generations come from one counter that starts at a random value, so a
report about an earlier attempt, or an attempt of an earlier server process, never matches a current one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict, ErrorKind, InvalidArgument, KVStoreError, NotFound
from kvstore.core.status import make_error
from kvstore.dualpath.groups import Engine
from kvstore.dualpath.scheduler import NewRequest
from kvstore.metadata.scheduling.outbox import PendingWork
from kvstore.rpc.codec import check_id, check_name

ENDED_KEPT: Final = 65_536
"""Ended operations that are remembered, so that late retries get the same answer."""
MAX_CACHED_PREFIXES: Final = 1_024
"""Maximum number of engines that a request may name as holding a part of its prompt."""
REQUEST_BYTES: Final = 2_048
"""Estimated memory of a request without engine names, in messages and tables. Measured: 1.6 KB."""
CACHED_PREFIX_BYTES: Final = 192
"""Estimated memory per named engine, in addition to the name."""
_SPARE_DEADLINES: Final = 1_024


@dataclass(slots=True, eq=False)
class RouterRequest:
    """One request in progress.

    Attributes:
        message: the router's request, without ``cached_prefixes`` and unknown fields.
        ask: the same request for the scheduler.
        bytes: estimated memory.
        generation: the current attempt, as it is sent to engines and routers.
        submitted_s: when the request arrived.
        deadline_s: when the request is dropped if it still lacks an engine.
        scheduler_generation: the current attempt, as the scheduler numbers it.
        prefill: its prefill engine.
        decode: its decode engine.
        prefilled: whether the prefill engine has reported its part as done.
        earlier_generations: attempts under which the present decode engine had the request; it may finish any of them.
        ended: whether the request is no longer in progress.
        waiters: calls of routers that wait for the engines.
    """

    message: pb.AssignRequestRequest
    ask: NewRequest
    bytes: int
    generation: int
    submitted_s: float
    deadline_s: float
    scheduler_generation: int = 0
    prefill: Engine | None = None
    decode: Engine | None = None
    prefilled: bool = False
    earlier_generations: list[int] = field(default_factory=list)
    ended: bool = False
    waiters: list[asyncio.Future[pb.Assignment]] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Its name, as the router chose it."""
        return self.message.request_id

    @property
    def paired(self) -> bool:
        """Whether the request has both engines."""
        return self.prefill is not None and self.decode is not None

    def work(self, engine: Engine) -> PendingWork:
        """The work that the request is for an engine."""
        return PendingWork(1, self.ask.cost(engine), self.ask.hbm_units)


class RequestTable:
    """All requests in progress, in the order in which they arrived, and the latest ended operations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: dict[str, RouterRequest] = {}
        self._attempts: dict[int, RouterRequest] = {}  # by generation
        self._generations = itertools.count(secrets.randbits(62) + 1)
        self._deadline_numbers = itertools.count()  # decide between equal deadlines
        self._ended: OrderedDict[bytes, tuple[ErrorKind, str]] = OrderedDict()
        self._deadlines: list[tuple[float, int, RouterRequest]] = []
        self.bytes = 0
        """Estimated memory of all requests and of the calls that wait for them."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RouterRequest]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> RouterRequest:
        return self._requests[request_id]

    def get(self, request_id: str) -> RouterRequest | None:
        """A request by its name."""
        return self._requests.get(request_id)

    def of_generation(self, generation: int) -> RouterRequest | None:
        """The request that an attempt belongs to; None: the attempt is unknown or void."""
        return self._attempts.get(generation)

    def find(self, call: pb.AssignRequestRequest) -> RouterRequest | None:
        """The request that a router's call is about; None: it is new.

        Raises:
            Conflict: another request of this name is in progress.
            NotFound: the call continues a request that is unknown.
            KVStoreError: the request has ended; the error says how.
        """
        ended = self._ended.get(call.operation_id)
        if ended is not None:
            kind, message = ended
            raise make_error(kind, message, {"request": call.request_id})
        request = self._requests.get(call.request_id)
        if request is not None and request.message.operation_id != call.operation_id:
            raise Conflict("another request with this id is in progress", request=call.request_id)
        if request is None and call.after_generation:
            raise NotFound("unknown request (the server may have restarted): submit it again")
        return request

    def add(self, call: pb.AssignRequestRequest, ask: NewRequest, budget_s: float) -> RouterRequest:
        """Add a new request with its first attempt."""
        message = pb.AssignRequestRequest(
            operation_id=call.operation_id,
            request_id=call.request_id,
            prompt_tokens=call.prompt_tokens,
            hit_tokens=call.hit_tokens,
            expected_output_tokens=call.expected_output_tokens,
            budget_ms=call.budget_ms,
        )
        now_s = self._clock.now_s()
        request = RouterRequest(message, ask, request_bytes(call), next(self._generations), now_s, now_s + budget_s)
        self._requests[call.request_id] = request
        self._attempts[request.generation] = request
        self.bytes += request.bytes
        self.set_deadline(request, request.deadline_s)
        return request

    def begin_attempt(self, request: RouterRequest, scheduler_generation: int, *, keep_earlier: bool = False) -> None:
        """Give a request a new generation.

        Args:
            request: the request.
            scheduler_generation: the scheduler's number of the attempt.
            keep_earlier: whether the decode engine may still finish the earlier attempts. Otherwise reports on them are void.
        """
        if keep_earlier:
            request.earlier_generations.append(request.generation)
        else:
            self._forget_attempts(request)
        request.generation, request.scheduler_generation = next(self._generations), scheduler_generation
        self._attempts[request.generation] = request

    def set_deadline(self, request: RouterRequest, deadline_s: float) -> None:
        """Set the time at which the request is dropped if it still lacks an engine."""
        request.deadline_s = deadline_s
        heapq.heappush(self._deadlines, (deadline_s, next(self._deadline_numbers), request))
        if len(self._deadlines) > 2 * len(self._requests) + _SPARE_DEADLINES:  # most belong to paired or ended requests
            live = {id(one): (one.deadline_s, number, one) for _, number, one in self._deadlines if not one.ended}
            self._deadlines = [entry for entry in live.values() if not entry[2].paired]
            heapq.heapify(self._deadlines)

    def pop_overdue(self, now_s: float) -> Iterator[RouterRequest]:
        """Requests whose deadline has passed and that lack an engine; the caller ends them."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, request = heapq.heappop(self._deadlines)
            if not request.ended and not request.paired and request.deadline_s <= now_s:
                yield request

    def oldest(self) -> RouterRequest | None:
        """The request that arrived first."""
        return next(iter(self._requests.values()), None)

    def end(self, request: RouterRequest, why: KVStoreError) -> None:
        """Remove a request; calls that wait for it, and late retries, get the error."""
        request.ended = True
        del self._requests[request.request_id]
        self.bytes -= request.bytes
        request.ask = NewRequest(request.ask.request_id, request.ask.tokens)  # the heap of deadlines may keep the object alive
        self._forget_attempts(request)
        self.remember_ended(request.message.operation_id, why)
        for waiter in request.waiters:
            if not waiter.done():
                waiter.set_exception(make_error(why.kind, why.message, {"request": request.request_id}))

    def remember_ended(self, operation: bytes, why: KVStoreError) -> None:
        """Answer late calls of an operation with an error."""
        self._ended[operation] = (why.kind, why.message)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _forget_attempts(self, request: RouterRequest) -> None:
        for generation in (*request.earlier_generations, request.generation):
            del self._attempts[generation]
        request.earlier_generations.clear()


def ask_of(call: pb.AssignRequestRequest) -> NewRequest:
    """A router's request for the scheduler. KV memory is counted in tokens; all engines use the same unit."""
    hbm_tokens = call.prompt_tokens + call.expected_output_tokens
    return NewRequest(call.request_id, call.prompt_tokens, hbm_tokens, {one.engine: one.tokens for one in call.cached_prefixes})


def request_bytes(call: pb.AssignRequestRequest) -> int:
    """Estimated memory of a request, as the message of its call or in the tables. Rounded up from measurements."""
    return REQUEST_BYTES + call.ByteSize() + len(call.cached_prefixes) * CACHED_PREFIX_BYTES


def check_request(call: pb.AssignRequestRequest) -> int:
    """Check a router's request.

    Returns:
        Its budget in milliseconds.

    Raises:
        InvalidArgument: a field is missing or out of bounds.
    """
    check_id(call.operation_id, "operation_id")
    check_name(call.request_id, "request_id")
    if call.prompt_tokens < 1 or call.hit_tokens > call.prompt_tokens:
        raise InvalidArgument(
            "prompt_tokens must be positive, and hit_tokens at most prompt_tokens",
            prompt_tokens=call.prompt_tokens,
            hit_tokens=call.hit_tokens,
        )
    if len(call.cached_prefixes) > MAX_CACHED_PREFIXES or any(one.tokens > call.prompt_tokens for one in call.cached_prefixes):
        raise InvalidArgument(
            "cached_prefixes names too many engines, or more tokens than the prompt has", limit=MAX_CACHED_PREFIXES
        )
    for one in call.cached_prefixes:
        check_name(one.engine, "engine")
    if sum(len(one.engine) for one in call.cached_prefixes) > limits.MAX_CACHED_PREFIX_NAMES:
        raise InvalidArgument("the engine names in cached_prefixes are too long in total", limit=limits.MAX_CACHED_PREFIX_NAMES)
    if call.budget_ms < 1:
        raise InvalidArgument("budget_ms must be positive: it limits how long the request waits for engines", got=call.budget_ms)
    return call.budget_ms
