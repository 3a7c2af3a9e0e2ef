"""Requests, engines and assignments for routers and leaders of engine groups. Pure: nothing is sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import Internal, InvalidArgument

EngineRole = Literal["prefill", "decode"]
_ROLES: Final[dict[str, pb.EngineRole]] = {"prefill": pb.ENGINE_ROLE_PREFILL, "decode": pb.ENGINE_ROLE_DECODE}
_MAX_U32: Final = (1 << 32) - 1
_MAX_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that needs a prefill and a decode engine.

    Attributes:
        request_id: unique among the requests under way.
        prompt_tokens: length of the prompt, which is the measure of its cost.
        hit_tokens: tokens of it that are in the store according to a lookup; passed on to the engines.
        expected_output_tokens: an estimate, for space on the decode engine; 0: only the prompt must fit.
        cached_tokens: by prefill engine: tokens of the prompt that it has cached. The queue of such an engine may be longer by
            that many tokens.
        operation_id: distinguishes this submission from others of the same name; keep the default.
    """

    request_id: str
    prompt_tokens: int
    hit_tokens: int = 0
    expected_output_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    operation_id: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "hit_tokens", "expected_output_tokens"):
            _check_number(name, getattr(self, name), _MAX_U32)
        if not isinstance(self.request_id, str) or self.prompt_tokens < 1 or self.hit_tokens > self.prompt_tokens:
            raise InvalidArgument("a request requires a name, a prompt, and hits within the prompt", request=self.request_id)
        for tokens in self.cached_tokens.values():
            _check_number("cached_tokens", tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine and its location.

    Attributes:
        engine: its name.
        node: id of its node; for a decode engine, ``Paths.decode_node``.
        group: its group.
        address: address that it reported; may be empty.
    """

    engine: str
    node: str
    group: str
    address: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The engines that serve a request. A later assignment of the same request voids this one."""

    request_id: str
    generation: int
    prefill: EnginePlace
    decode: EnginePlace


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Load of an engine as its group's leader reports it: the current values, including all work that earlier reports returned.

    Attributes:
        engine: its name, unique over all groups.
        node: id of the node whose storage link it reads over.
        address: address for routers and other engines, passed on unchanged.
        hbm_tokens: decode engines: tokens of KV that fit if it is idle.
        sequences: requests assigned and not finished; None, with ``tokens``: the server estimates them.
        tokens: tokens of those requests.
        free_hbm_tokens: decode engines: tokens of KV that fit now; None: the server estimates them.
        read_tokens: tokens that wait to be read by its node; None: only reads that the server planned count.
    """

    engine: str
    node: str
    address: str = ""
    hbm_tokens: int = 0
    sequences: int | None = None
    tokens: int | None = None
    free_hbm_tokens: int | None = None
    read_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("hbm_tokens", "sequences", "tokens", "free_hbm_tokens", "read_tokens"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), _MAX_U64)


@dataclass(frozen=True, slots=True)
class Assigned:
    """Work for an engine of the group.

    It is sent again, and replaces the earlier event for the request, when its other engine becomes known (same generation) and
    after that engine died (a new generation, which voids the older one).
    """

    request_id: str
    generation: int
    engine: str
    prompt_tokens: int
    hit_tokens: int
    expected_output_tokens: int
    prefill: EnginePlace | None
    decode: EnginePlace | None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RevokedRequest:
    """Cancelled work: this generation of the request and earlier ones. A later generation, sent before or after, remains."""

    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class GroupUpdates:
    """Answer to a report.

    Attributes:
        events: in order.
        first_report: this is the first report of the group that the server knows: the group is new or was considered dead, or
            the server was restarted. Requests assigned before are now other groups' or unknown; reports on them have no effect.
    """

    events: tuple[Assigned | RevokedRequest, ...]
    first_report: bool

    @property
    def assigned(self) -> list[Assigned]:
        """Return the work that remains after all events: the last of each request, unless that one was cancelled.

        Work that a later event of the same answer replaced does not remain, even if the later one was cancelled.
        """
        work: dict[str, Assigned] = {}
        for event in self.events:
            before = work.pop(event.request_id, None)
            if isinstance(event, Assigned):
                work[event.request_id] = event
            elif before is not None and before.generation > event.generation:
                work[event.request_id] = before
        return list(work.values())

    @property
    def revoked(self) -> list[RevokedRequest]:
        """Return the cancellations. Each is valid up to its generation; a later one of the same request may remain."""
        return [event for event in self.events if isinstance(event, RevokedRequest)]


class EngineGroupState:
    """State of a group's leader between reports. Facts that a failed call did not report go into the next report."""

    def __init__(self, group: str, role: EngineRole) -> None:
        if role not in _ROLES:
            raise InvalidArgument("unknown role", got=role, known=", ".join(_ROLES))
        self._group, self._role = group, _ROLES[role]
        self._boot = secrets.token_bytes(16)
        self._sequence = self._acknowledged = 0
        self._membership = b""
        self._prefilled: dict[int, None] = {}
        self._finished: dict[int, None] = {}

    def request(
        self, engines: Sequence[EngineFigures], prefilled: Iterable[int], finished: Iterable[int]
    ) -> pb.ReportEnginesRequest:
        """Return the next report.

        Raises:
            InvalidArgument: a malformed generation.
        """
        for generations, unreported in ((prefilled, self._prefilled), (finished, self._finished)):
            for generation in generations:
                _check_number("generation", generation, _MAX_U64)
                unreported[generation] = None
        self._sequence += 1
        return pb.ReportEnginesRequest(
            group=self._group,
            boot_id=self._boot,
            role=self._role,
            sequence=self._sequence,
            engines=[_state(figures) for figures in engines],
            prefilled=self._prefilled,
            finished=self._finished,
            membership=self._membership,
            acknowledged=self._acknowledged,
        )

    def take(self, request: pb.ReportEnginesRequest, answer: pb.ReportEnginesResponse) -> GroupUpdates:
        """Take over the answer to a report."""
        for generations, unreported in ((request.prefilled, self._prefilled), (request.finished, self._finished)):
            for generation in generations:
                unreported.pop(generation, None)
        first_report = answer.membership != self._membership
        if first_report:
            self._membership, self._acknowledged = answer.membership, 0
        events: list[Assigned | RevokedRequest] = []
        for event in answer.events:
            if event.number <= self._acknowledged:
                continue
            self._acknowledged = event.number
            if event.HasField("assigned"):
                events.append(_assigned(event.assigned))
            elif event.HasField("revoked"):
                events.append(RevokedRequest(event.revoked.request_id, event.revoked.generation))
        return GroupUpdates(tuple(events), first_report)


def assign_to_proto(request: EngineRequest, budget_s: float, after_generation: int) -> pb.AssignRequestRequest:
    """Return the message for a request."""
    return pb.AssignRequestRequest(
        operation_id=request.operation_id,
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        hit_tokens=request.hit_tokens,
        expected_output_tokens=request.expected_output_tokens,
        budget_ms=max(1, int(budget_s * 1000)),
        after_generation=after_generation,
        cached_prefixes=[pb.CachedPrefix(engine=engine, tokens=tokens) for engine, tokens in request.cached_tokens.items()],
    )


def assignment_from_proto(request: EngineRequest, answer: pb.Assignment) -> Assignment:
    """Return the assignment of an answer.

    Raises:
        Internal: an engine is missing.
    """
    if not (answer.generation and answer.HasField("prefill") and answer.HasField("decode")):
        raise Internal("the metadata server answered an assignment without an engine", request=request.request_id)
    return Assignment(request.request_id, answer.generation, _place(answer.prefill), _place(answer.decode))


def _state(figures: EngineFigures) -> pb.EngineState:
    return pb.EngineState(
        engine=figures.engine,
        node=figures.node,
        address=figures.address,
        hbm_tokens=figures.hbm_tokens,
        sequences=figures.sequences,
        tokens=figures.tokens,
        free_hbm_tokens=figures.free_hbm_tokens,
        read_tokens=figures.read_tokens,
    )


def _assigned(work: pb.ScheduledRequest) -> Assigned:
    return Assigned(
        work.request_id,
        work.generation,
        work.engine,
        work.prompt_tokens,
        work.hit_tokens,
        work.expected_output_tokens,
        _place(work.prefill) if work.HasField("prefill") else None,
        _place(work.decode) if work.HasField("decode") else None,
        work.cached_tokens,
    )


def _place(ref: pb.EngineRef) -> EnginePlace:
    return EnginePlace(ref.engine, ref.node, ref.group, ref.address)


def _check_number(name: str, value: object, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise InvalidArgument("argument must be an integer within bounds", argument=name, got=value, max=maximum)
