"""Input and output of the planner.

A *request* names the blocks of one prefix to read from storage, numbered 0 … ``blocks`` - 1 in prefix order. A *policy* decides
how many of them each node reads (``Share``); the planner maps the shares to the missing blocks and returns a ``LoadPlan`` of
``PlanPart`` s. Parts keep their index and their attempt number for the life of the plan.

Units: bytes, tokens, seconds of a monotonic clock, bytes per second.

All values are immutable by convention. Types with many instances per decision are named tuples, or data classes that are not
``frozen``: initialising a frozen one is three times slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS, MAX_KEYS_PER_CALL, MAX_NAME_BYTES

MAX_RELAYS = 64
"""Maximum number of relay candidates of a request. More would make the decision slow."""


class ReadSide(StrEnum):
    """Role of the reading node in the request."""

    PREFILL = "prefill"
    """The prefill engine's own node: nothing is forwarded."""
    DECODE = "decode"
    """The decode engine's node: forwards layer blocks to the prefill engine over CNICs, and keeps what it read."""
    RELAY = "relay"
    """A third node: forwards as the decode side does, and keeps nothing."""


@dataclass(slots=True)
class PlanRequest:
    """Blocks of one prompt that must come from storage.

    Attributes:
        request_id: name of the request for operators; need not be unique.
        blocks: number of blocks to read; 0 gives an empty plan.
        block_bytes: bytes of a full block.
        block_tokens: tokens of a block.
        prefill_node: node of the engine that computes the prompt.
        decode_node: node of the engine that will decode; None: not known, or no such engine.
        relays: third nodes that may read; duplicates are ignored.
    """

    request_id: str
    blocks: int
    block_bytes: int
    block_tokens: int
    prefill_node: str
    decode_node: str | None = None
    relays: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.blocks <= MAX_KEYS_PER_CALL:
            raise InvalidArgument("blocks out of bounds", blocks=self.blocks, most=MAX_KEYS_PER_CALL)
        if not 0 < self.block_bytes <= MAX_BLOCK_BYTES:
            raise InvalidArgument("block_bytes out of bounds", block_bytes=self.block_bytes, most=MAX_BLOCK_BYTES)
        if not 0 < self.block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidArgument("block_tokens out of bounds", block_tokens=self.block_tokens, most=MAX_BLOCK_TOKENS)
        if len(self.relays) > MAX_RELAYS:
            raise InvalidArgument("too many relays", relays=len(self.relays), most=MAX_RELAYS)
        if max(map(len, (self.request_id, self.prefill_node, self.decode_node or "", *self.relays))) > MAX_NAME_BYTES:
            raise InvalidArgument("a name is too long", most=MAX_NAME_BYTES)

    def with_relays(self, relays: tuple[str, ...]) -> PlanRequest:
        """Return the same request with other relays."""
        return PlanRequest(
            self.request_id, self.blocks, self.block_bytes, self.block_tokens, self.prefill_node, self.decode_node, relays
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def candidates(self) -> list[tuple[str, ReadSide]]:
        """Return the nodes that may read, each once, under its best side: prefill, decode, then the relays in order."""
        sides = {self.prefill_node: ReadSide.PREFILL}
        if self.decode_node is not None:
            sides.setdefault(self.decode_node, ReadSide.DECODE)
        for relay in self.relays:
            sides.setdefault(relay, ReadSide.RELAY)
        return list(sides.items())


Span: TypeAlias = tuple[int, int]
"""(start, count): blocks ``start`` … ``start + count`` - 1 of a request."""


class Share(NamedTuple):
    """The number of blocks (at least one) that a policy assigns to a node.

    Shares map to the blocks in order: the first share gets the leading blocks.
    """

    node: str
    side: ReadSide
    blocks: int


@dataclass(slots=True)
class PlanPart:
    """Consecutive blocks that one node reads. ``index`` is unique in its plan over all attempts."""

    index: int
    node: str
    side: ReadSide
    start: int
    count: int

    @property
    def end(self) -> int:
        """Number after that of the last block."""
        return self.start + self.count


class NodeState(NamedTuple):
    """State of a node at the moment of a decision.

    Attributes:
        node: name of the node.
        alive: whether it accepts work.
        pending_bytes: planned storage reads that have not been reported done.
        pending_tokens: ``pending_bytes`` in tokens, the unit of the paper.
        snic: estimated storage bandwidth, bytes/s; greater than zero.
        cnic: compute network bandwidth in each direction, bytes/s; greater than zero.
        sending_bytes: pending reads that the node forwards to other nodes.
        receiving_bytes: pending bytes that other nodes forward to the node.
    """

    node: str
    alive: bool
    pending_bytes: int
    pending_tokens: int
    snic: float
    cnic: float
    sending_bytes: int = 0
    receiving_bytes: int = 0


class Reasons(NamedTuple):
    """The numbers that a decision was based on, for operators.

    Attributes:
        policy: name of the policy.
        now: time of the decision.
        nodes: state of each candidate before the plan was charged.
        predicted_seconds: time from ``now`` until the last part arrives, if nothing else is planned; 0 for an empty plan.
        excluded: candidates that had failed in this plan, were dead or were not known.
    """

    policy: str
    now: float
    nodes: tuple[NodeState, ...]
    predicted_seconds: float
    excluded: tuple[str, ...] = ()


class LoadPlan(NamedTuple):
    """Parts to start now.

    Attributes:
        plan_id: id of the plan in reports; a planner never uses it again.
        attempt: number of the answer: 0 for the first, one more for each re-plan. Parts of earlier attempts that did not fail
            continue under their own attempt number.
        request: the request.
        parts: the parts to start; for a re-plan, only the new parts.
        reasons: the numbers that the decision was based on.
    """

    plan_id: int
    attempt: int
    request: PlanRequest
    parts: tuple[PlanPart, ...]
    reasons: Reasons


class LoadPrice(NamedTuple):
    """Predicted time of a load that is not planned yet.

    Attributes:
        first_seconds: time until one block has arrived, if only that is planned: mostly the wait behind queued reads.
        seconds: time until all blocks have arrived.
    """

    first_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanUnderWay:
    """A plan whose load has not ended, for operators.

    Attributes:
        plan_id: id of the plan in reports.
        request: the request.
        policy: name of the policy that decided.
        attempt: attempt number of the last answer.
        deadline: the plan expires at this time unless progress is reported.
        parts: parts of all attempts, each with its blocks that have not been reported read; None: the part failed.
    """

    plan_id: int
    request: PlanRequest
    policy: str
    attempt: int
    deadline: float
    parts: tuple[tuple[PlanPart, int | None], ...]


class PlanPolicy(Protocol):
    """Divides a request over nodes: a function of the request and the queues (only ``round_robin`` has state)."""

    @property
    def name(self) -> str:
        """Name of the policy in the configuration and in reports."""
        ...

    def choose(
        self, request: PlanRequest, nodes: Sequence[tuple[NodeState, ReadSide]], prefill: NodeState | None
    ) -> Sequence[Share]:
        """Return shares whose blocks add up to ``request.blocks``, or no shares to read nothing.

        Args:
            request: the request; at least one block.
            nodes: living candidates, prefill side first, then decode, then relays; at least one.
            prefill: the prefill engine's node, even if it is no candidate: all forwarded bytes use its CNIC.
        """
        ...


def finish_seconds(shares: Iterable[tuple[NodeState, ReadSide, int]], prefill: NodeState | None) -> float:
    """Return the seconds from now until the last byte is at the prefill engine. `split` minimises it, and every plan records it.

    Args:
        shares: node, side and bytes of each share.
        prefill: the prefill node; None: unknown, so its CNIC is not considered.
    """
    latest = 0.0
    forwarded = 0
    for state, side, nbytes in shares:
        if (read := (state.pending_bytes + nbytes) / state.snic) > latest:
            latest = read
        if side is not ReadSide.PREFILL:
            if (sent := (state.sending_bytes + nbytes) / state.cnic) > latest:
                latest = sent
            forwarded += nbytes
    if forwarded and prefill is not None:
        latest = max(latest, (prefill.receiving_bytes + forwarded) / prefill.cnic)
    return latest
