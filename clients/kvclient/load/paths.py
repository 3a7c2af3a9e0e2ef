"""What a caller may choose about the paths of a load, and what the planner answered."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvclient.call.arguments import check_name, check_seconds
from kvclient.results import PATH_DECODE, PATH_PREFILL, PATH_RELAY, NodeRef
from kvproto.v1 import metadata_pb2
from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.limits import MAX_REPLAN_RANGES
from kvstore.core.types import NodeId

PATHS_BY_SIDE = {
    metadata_pb2.READ_SIDE_PREFILL: PATH_PREFILL,
    metadata_pb2.READ_SIDE_DECODE: PATH_DECODE,
    metadata_pb2.READ_SIDE_RELAY: PATH_RELAY,
}


@dataclass(frozen=True, slots=True)
class Paths:
    """Over which hosts' storage links a load may be read.

    Attributes:
        decode_node: node of the engine that will decode this request: what is loaded through it stays there, where it will be
            needed next. None: only the prefill host and relays.
        policy: a path policy by name; None: the metadata server's.
        relays: whether idle third hosts may lend their links.
        layer_group: layers that are read from storage together, over all blocks: the first layers are here while the later ones
            are still read. 0: whole blocks, which costs the fewest requests.
        stall_s: a part in which nothing moves for so long is given to other hosts.
        attempts: how often the rest of a part may be planned anew.
    """

    decode_node: str | None = None
    policy: str | None = None
    relays: bool = True
    layer_group: int = 0
    stall_s: float = 1.0
    attempts: int = 3

    def __post_init__(self) -> None:
        for name, least in (("layer_group", 0), ("attempts", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument("the option takes an integer", option=name, value=value, least=least)
        if not isinstance(self.relays, bool):
            raise InvalidArgument("the option is True or False", option="relays", got=type(self.relays).__name__)
        for name in ("decode_node", "policy"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        object.__setattr__(self, "stall_s", check_seconds("stall_s", self.stall_s))


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Blocks ``[start, start + count)`` of those planned, read by one node."""

    index: int
    start: int
    count: int
    path: str
    node: NodeRef


@dataclass(frozen=True, slots=True)
class Plan:
    """An answer of the planner."""

    plan_id: int
    attempt: int
    parts: tuple[PlannedPart, ...]
    policy: str
    reason: str


def largest_ranges(arrived: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Of the (start, count) of what has arrived, as many as a server takes: the largest, in order.

    What is not told is planned again, and not read: whoever reads looks at what is missing.
    """
    if len(arrived) <= MAX_REPLAN_RANGES:
        return arrived
    return sorted(heapq.nlargest(MAX_REPLAN_RANGES, arrived, key=lambda span: span[1]))


def plan_from_proto(answer: metadata_pb2.LoadPlan, blocks: int) -> Plan:
    """A plan for all of ``blocks`` (or, the oracle's, for none), checked: it steers where bytes are written to.

    Raises:
        Internal: parts that overlap, leave something out, or lie outside of what was asked for.
    """
    return _checked(answer, bytearray(blocks), whole=bool(answer.parts))


def replan_from_proto(answer: metadata_pb2.LoadPlan, before: Plan, part: PlannedPart, arrived: Iterable[tuple[int, int]]) -> Plan:
    """A plan for what a part did not bring, checked.

    Args:
        answer: the server's.
        before: the plan whose part it is.
        part: the part.
        arrived: (start, count) of what it brought, numbered as in the plan.

    Raises:
        Internal: it is for another plan, an old one, or for anything else than what is missing.
    """
    if answer.plan_id != before.plan_id or answer.attempt <= before.attempt:
        raise Internal("the metadata server answers about another plan", plan_id=answer.plan_id, attempt=answer.attempt)
    taken = bytearray(b"\1" * part.start + bytes(part.count))
    for start, count in arrived:
        taken[start : start + count] = b"\1" * count
    return _checked(answer, taken, whole=True)


def _checked(answer: metadata_pb2.LoadPlan, taken: bytearray, *, whole: bool) -> Plan:
    """A plan whose parts keep out of what is taken and of each other and, ``whole``, leave nothing out."""
    blocks = len(taken)
    parts = []
    for part in answer.parts:
        end = part.start + part.count
        if part.count == 0 or end > blocks or any(taken[part.start : end]) or part.side not in PATHS_BY_SIDE:
            raise Internal("the metadata server answers a plan that makes no sense", start=part.start, count=part.count)
        taken[part.start : end] = b"\1" * part.count
        node = NodeRef(NodeId(part.node_id), part.control_address, part.data_address)
        parts.append(PlannedPart(part.index, part.start, part.count, PATHS_BY_SIDE[part.side], node))
    if whole and not all(taken):
        raise Internal("the metadata server answers a plan that leaves blocks out", first=taken.index(0))
    return Plan(answer.plan_id, answer.attempt, tuple(parts), answer.policy, answer.reason)
