"""Choices of a caller about the storage links of a load, and the plans that the metadata server answers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

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


class PlanAhead(Protocol):
    """A plan that was made for reads ahead of a load."""

    def plan_for(self, depths: npt.NDArray[np.intp]) -> Plan | None:
        """Return the plan for blocks at these depths of the chain, numbered from 0; None: there is none.

        The planner has forgotten this plan, and does not count it in its queues.
        """


@dataclass(frozen=True, slots=True)
class Paths:
    """Hosts whose storage links a load may use.

        client.load(lookup, buffer, paths=Paths(decode_node="node-b"))

    Attributes:
        decode_node: node of the engine that will decode this request. Blocks that are loaded over it stay there, because
            decoding needs them next. None: only the prefill host and relays.
        policy: name of a path policy; None: the one of the metadata server.
        relays: whether the links of idle third hosts may be used.
        layer_group: layers that are read from storage together, over all blocks, so that the first layers arrive while later ones
            are read. 0: whole blocks, which need the fewest requests.
        stall_s: a part without progress for this long is given to other hosts.
        attempts: how often the rest of failed parts may be planned again.
        ahead: a read ahead of these blocks, whose plan is used; see ``ReadAhead.paths``.
    """

    decode_node: str | None = None
    policy: str | None = None
    relays: bool = True
    layer_group: int = 0
    stall_s: float = 1.0
    attempts: int = 3
    ahead: PlanAhead | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("layer_group", 0), ("attempts", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"option must be an integer of at least {least}", option=name, value=value)
        if not isinstance(self.relays, bool):
            raise InvalidArgument("option must be True or False", option="relays", got=type(self.relays).__name__)
        for name in ("decode_node", "policy"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        object.__setattr__(self, "stall_s", check_seconds("stall_s", self.stall_s))


def checked_paths(paths: object, default: Paths | None = None) -> Paths | None:
    """Return the paths that a caller gave, or ``default`` if it gave none.

    Raises:
        InvalidArgument: they have another type.
    """
    if paths is None:
        return default
    if not isinstance(paths, Paths):
        raise InvalidArgument("paths must be Paths or None", got=type(paths).__name__)
    return paths


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Blocks ``[start, start + count)`` of the planned ones, read by one node."""

    index: int
    start: int
    count: int
    path: str
    node: NodeRef


@dataclass(frozen=True, slots=True)
class Plan:
    """A load plan."""

    plan_id: int
    attempt: int
    parts: tuple[PlannedPart, ...]
    policy: str
    reason: str
    predicted_s: float = 0.0
    """Time until the last part should have arrived; 0: an older server, or nothing is read."""
    request: metadata_pb2.PlanLoadRequest | None = None
    """What was planned."""


def largest_ranges(ranges: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return as many (start, count) ranges as a server accepts: the largest, in order.

    Blocks outside them are planned again, but not read again: a part reads only blocks that are missing.
    """
    if len(ranges) <= MAX_REPLAN_RANGES:
        return ranges
    return sorted(heapq.nlargest(MAX_REPLAN_RANGES, ranges, key=lambda span: span[1]))


def plan_from_proto(answer: metadata_pb2.LoadPlan, blocks: int) -> Plan:
    """Return a plan for all blocks (or for none, by the oracle policy), checked: it decides where bytes are written.

    Raises:
        Internal: parts that overlap, leave blocks out, or are outside the request.
    """
    return _checked(answer, bytearray(blocks), whole=bool(answer.parts))


def replan_from_proto(answer: metadata_pb2.LoadPlan, before: Plan, part: PlannedPart, arrived: Iterable[tuple[int, int]]) -> Plan:
    """Return a plan for the blocks that a part did not bring, checked.

    Args:
        answer: the server's answer.
        before: the plan of the part.
        part: the part.
        arrived: (start, count) of the blocks that it brought, numbered as in the plan.

    Raises:
        Internal: it is for another plan, an old attempt, or other blocks than the missing ones.
    """
    if answer.plan_id != before.plan_id or answer.attempt <= before.attempt:
        raise Internal("the metadata server answered about another plan", plan_id=answer.plan_id, attempt=answer.attempt)
    taken = bytearray(b"\1" * part.start + bytes(part.count))
    for start, count in arrived:
        taken[start : start + count] = b"\1" * count
    return _checked(answer, taken, whole=True)


def _checked(answer: metadata_pb2.LoadPlan, taken: bytearray, *, whole: bool) -> Plan:
    """Return a plan whose parts overlap neither taken blocks nor each other and, if ``whole``, leave no block out."""
    blocks = len(taken)
    parts = []
    for part in answer.parts:
        end = part.start + part.count
        if part.count == 0 or end > blocks or any(taken[part.start : end]) or part.side not in PATHS_BY_SIDE:
            raise Internal("the metadata server answered an impossible plan", start=part.start, count=part.count)
        taken[part.start : end] = b"\1" * part.count
        node = NodeRef(NodeId(part.node_id), part.control_address, part.data_address)
        parts.append(PlannedPart(part.index, part.start, part.count, PATHS_BY_SIDE[part.side], node))
    if whole and not all(taken):
        raise Internal("the metadata server answered a plan that leaves blocks out", first=taken.index(0))
    return Plan(answer.plan_id, answer.attempt, tuple(parts), answer.policy, answer.reason, answer.predicted_seconds)
