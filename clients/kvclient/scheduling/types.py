"""Requests, engines and assignments as routers and leaders of engine groups see them: values and books, nothing is sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import Internal, InvalidArgument

EngineRole = Literal["prefill", "decode"]
_ROLES: Final[dict[str, pb.EngineRole]] = {"prefill": pb.ENGINE_ROLE_PREFILL, "decode": pb.ENGINE_ROLE_DECODE}
_MOST_U32: Final = (1 << 32) - 1
_MOST_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that needs a prefill and a decode engine.

    Attributes:
        request_id: unique among the requests under way.
        prompt_tokens: length of the prompt: the measure of its cost.
        hit_tokens: of them in the store, as a lookup said; told to the engines.
        expected_output_tokens: a guess, for room on the decode engine; 0: only the prompt must fit.
        near: by prefill engine: tokens of the prompt that it has at hand; as many more than another may wait for it.
        operation_id: tells this submission from others of the same name; the default is right.
    """

    request_id: str
    prompt_tokens: int
    hit_tokens: int = 0
    expected_output_tokens: int = 0
    near: Mapping[str, int] = field(default_factory=dict)
    operation_id: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "hit_tokens", "expected_output_tokens"):
            _check_number(name, getattr(self, name), _MOST_U32)
        if not isinstance(self.request_id, str) or self.prompt_tokens < 1 or self.hit_tokens > self.prompt_tokens:
            raise InvalidArgument("a request takes a name, a prompt, and hits within the prompt", request=self.request_id)
        for tokens in self.near.values():
            _check_number("near", tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine, and where it is.

    Attributes:
        engine: its name.
        node: id of its node: ``Paths.decode_node`` where it decodes.
        group: its group.
        address: where it is reached, as it reported it; may be empty.
    """

    engine: str
    node: str
    group: str
    address: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """A router's answer: who serves a request. A later assignment of the same request voids this one."""

    request_id: str
    generation: int
    prefill: EnginePlace
    decode: EnginePlace


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """An engine as its group's leader reports it. Figures are as of now and count all that earlier reports answered.

    Attributes:
        engine: its name, unique over all groups.
        node: id of the node whose storage link it reads over.
        address: where routers and other engines reach it, handed on as it is.
        hbm_tokens: decode engines: tokens of KV that fit when it is idle.
        sequences: requests assigned and not finished; None, with ``tokens``: the server keeps book.
        tokens: their tokens.
        free_hbm_tokens: decode engines: tokens of KV that fit now; None: the server keeps book.
        read_tokens: tokens that wait to be read by its node; None: only what the server planned counts.
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
                _check_number(name, getattr(self, name), _MOST_U64)


@dataclass(frozen=True, slots=True)
class Assigned:
    """Work for an engine of the group.

    It comes again, and replaces what was said before of the same request: when its other engine becomes known (same generation),
    and when that engine died (a new generation: everything of the older one is void).
    """

    request_id: str
    generation: int
    engine: str
    prompt_tokens: int
    hit_tokens: int
    expected_output_tokens: int
    prefill: EnginePlace | None
    decode: EnginePlace | None
    near_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Revoked:
    """Work that is wanted no longer: this attempt, and those before it of the same request, which it had replaced.

    A later generation of the request, told before or after, stays.
    """

    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class GroupNews:
    """What a report was answered.

    Attributes:
        events: in order.
        anew: the group is known only since this report: it is the first one, the server was restarted, or it took the group for
            dead. Requests assigned before were given to others or are not known, and reports on them are void.
    """

    events: tuple[Assigned | Revoked, ...]
    anew: bool

    @property
    def assigned(self) -> list[Assigned]:
        """Of the events, those that are work after all of them: the last of each request, unless that one was called off.

        One that a later event of the same answer replaced is none, also where its successor was called off.
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
    def revoked(self) -> list[Revoked]:
        """Of the events, those that call work off: up to that generation, a later one of the same request may be in force."""
        return [event for event in self.events if isinstance(event, Revoked)]


class GroupBook:
    """What a group's leader keeps between reports. What was not told because a call failed goes with the next report."""

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
        """The next report.

        Raises:
            InvalidArgument: a generation that is none.
        """
        for generations, untold in ((prefilled, self._prefilled), (finished, self._finished)):
            for generation in generations:
                _check_number("generation", generation, _MOST_U64)
                untold[generation] = None
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

    def take(self, request: pb.ReportEnginesRequest, answer: pb.ReportEnginesResponse) -> GroupNews:
        """The answer to a report has arrived."""
        for generations, untold in ((request.prefilled, self._prefilled), (request.finished, self._finished)):
            for generation in generations:
                untold.pop(generation, None)
        anew = answer.membership != self._membership
        if anew:
            self._membership, self._acknowledged = answer.membership, 0
        events: list[Assigned | Revoked] = []
        for event in answer.events:
            if event.number <= self._acknowledged:
                continue
            self._acknowledged = event.number
            if event.HasField("assigned"):
                events.append(_assigned(event.assigned))
            elif event.HasField("revoked"):
                events.append(Revoked(event.revoked.request_id, event.revoked.generation))
        return GroupNews(tuple(events), anew)


def assign_to_proto(request: EngineRequest, budget_s: float, after_generation: int) -> pb.AssignRequestRequest:
    """As it travels."""
    return pb.AssignRequestRequest(
        operation_id=request.operation_id,
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        hit_tokens=request.hit_tokens,
        expected_output_tokens=request.expected_output_tokens,
        budget_ms=max(1, int(budget_s * 1000)),
        after_generation=after_generation,
        near=[pb.NearPrefix(engine=engine, tokens=tokens) for engine, tokens in request.near.items()],
    )


def assignment_from_proto(request: EngineRequest, answer: pb.Assignment) -> Assignment:
    """A router's answer.

    Raises:
        Internal: an engine is missing.
    """
    if not (answer.generation and answer.HasField("prefill") and answer.HasField("decode")):
        raise Internal("the metadata server answers an assignment without an engine", request=request.request_id)
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


def _assigned(told: pb.ScheduledRequest) -> Assigned:
    return Assigned(
        told.request_id,
        told.generation,
        told.engine,
        told.prompt_tokens,
        told.hit_tokens,
        told.expected_output_tokens,
        _place(told.prefill) if told.HasField("prefill") else None,
        _place(told.decode) if told.HasField("decode") else None,
        told.near_tokens,
    )


def _place(ref: pb.EngineRef) -> EnginePlace:
    return EnginePlace(ref.engine, ref.node, ref.group, ref.address)


def _check_number(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidArgument("takes an integer within bounds", argument=name, got=value, most=most)
