"""Water-filling: cuts one request over several storage links so that all its parts end together, as early as can be.

Let a node with storage bandwidth S, CNIC bandwidth C, q bytes to read and f bytes to forward be given more. By time T it can have
delivered ``min(S T - q, C T - f)`` of it, and all nodes that forward together no more than the prefill node's CNIC takes in,
``C_p T - r``. The least T by which these add up to the request is found by Newton's steps within a bracket whose upper end is the
best single node; the rest is rounding to blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.contract import NodeState, ReadRequest, ReadSide, Share

CLOSE_ENOUGH = 1e-9
"""Relative precision of the water level: far below a block."""
MOST_STEPS = 60
"""Each step that Newton spoils is a bisection, so that this bounds the work and is never met in practice."""


class Split:
    """Ours: one request over the prefill, the decode and idle third nodes.

    Args:
        least_blocks: no side reads fewer blocks than this (a request smaller than two such parts is not cut).
        least_bytes: nor fewer bytes.
        most_parts: sides that one request may be cut over.
        relay_gain: third nodes are used only where they make the request faster by at least this share.
    """

    name = "split"

    def __init__(
        self, *, least_blocks: int = 2, least_bytes: int = 4 << 20, most_parts: int = 8, relay_gain: float = 0.05
    ) -> None:
        if least_blocks < 1 or least_bytes < 0 or most_parts < 1 or not 0 <= relay_gain < 1:
            raise InvalidArgument("split: bounds make no sense", least_blocks=least_blocks, most_parts=most_parts)
        self.least_blocks = least_blocks
        self.least_bytes = least_bytes
        self.most_parts = most_parts
        self.relay_gain = relay_gain

    def choose(
        self, request: ReadRequest, nodes: Sequence[tuple[NodeState, ReadSide]], prefill: NodeState | None
    ) -> Sequence[Share]:
        least = max(self.least_blocks, -(-self.least_bytes // request.block_bytes))
        parts = min(self.most_parts, request.blocks // least)
        into = _Into(prefill.cnic, prefill.receiving_bytes) if prefill is not None else _Into(math.inf, 0)
        lanes = [_Lane(state, side) for state, side in nodes]
        pair = [lane for lane in lanes if lane.side is not ReadSide.RELAY]
        relays = [lane for lane in lanes if lane.side is ReadSide.RELAY]
        total = request.total_bytes
        best = _Filling.of_one(min(pair or relays, key=lambda lane: lane.alone(total, into)), request, into)
        if parts > 1 and len(pair) > 1:
            best = min(best, _fill(pair, request, into, least, best.seconds), key=_seconds)
        if relays:
            best = self._with_relays(pair, relays, request, into, least, best)
        # leading blocks to whoever starts first: they are computed on first
        best.lanes.sort(key=lambda entry: entry[0].start)
        return [Share(lane.state.node, lane.side, blocks) for lane, blocks in best.lanes]

    def _with_relays(
        self, pair: list[_Lane], relays: list[_Lane], request: ReadRequest, into: _Into, least: int, best: _Filling
    ) -> _Filling:
        """What is best without relays, or what is better by enough with them."""
        wanted = best.seconds * (1 - self.relay_gain)
        # one that needs as long for the smallest part it may get cannot help
        soon = [(lane.alone(least * request.block_bytes, into), lane) for lane in relays]
        useful = [lane for seconds, lane in sorted(soon, key=_first) if seconds < wanted]
        if not useful:
            return best
        if min(self.most_parts, request.blocks // least) > 1:
            wider = _fill([*pair, *useful][: self.most_parts], request, into, least, best.seconds)
        else:
            total = request.total_bytes
            wider = _Filling.of_one(min(useful, key=lambda lane: lane.alone(total, into)), request, into)
        return wider if wider.seconds < wanted else best


@dataclass(frozen=True, slots=True)
class _Into:
    """The way into the prefill node."""

    cnic: float
    receiving: int

    def seconds(self, forwarded: int) -> float:
        return (self.receiving + forwarded) / self.cnic if forwarded else 0.0


class _Lane:
    """One node that may read."""

    __slots__ = ("cnic", "forwards", "queue", "sending", "side", "snic", "start", "state")

    def __init__(self, state: NodeState, side: ReadSide) -> None:
        self.state, self.side = state, side
        self.forwards = side is not ReadSide.PREFILL
        self.snic, self.queue = state.snic, state.pending_bytes
        self.cnic, self.sending = state.cnic, state.sending_bytes
        self.start = self.queue / self.snic

    def seconds(self, nbytes: int) -> float:
        """Until the node has read (and sent) that many bytes more."""
        read = (self.queue + nbytes) / self.snic
        if self.forwards and (sent := (self.sending + nbytes) / self.cnic) > read:
            return sent
        return read

    def alone(self, nbytes: int, into: _Into) -> float:
        """Until it has brought that many bytes to the prefill engine, if nobody else reads."""
        end = self.seconds(nbytes)
        if self.forwards and (received := (into.receiving + nbytes) / into.cnic) > end:
            return received
        return end


@dataclass(slots=True)
class _Filling:
    """Blocks of each lane, and when the last of them has arrived."""

    lanes: list[tuple[_Lane, int]]
    seconds: float

    @classmethod
    def of_one(cls, lane: _Lane, request: ReadRequest, into: _Into) -> _Filling:
        return cls([(lane, request.blocks)], lane.alone(request.total_bytes, into))

    @classmethod
    def of(cls, lanes: list[tuple[_Lane, int]], request: ReadRequest, into: _Into) -> _Filling:
        size, forwarded, latest = request.block_bytes, 0, 0.0
        for lane, blocks in lanes:
            if lane.forwards:
                forwarded += blocks
            if (end := lane.seconds(blocks * size)) > latest:
                latest = end
        return cls(lanes, max(latest, into.seconds(forwarded * size)))


def _seconds(filling: _Filling) -> float:
    return filling.seconds


def _first(entry: tuple[float, _Lane]) -> float:
    return entry[0]


def _fill(lanes: list[_Lane], request: ReadRequest, into: _Into, least: int, at_most: float) -> _Filling:
    """Water-fills the lanes; one that would read fewer than ``least`` blocks is left out and its water goes to the others.

    Args:
        lanes: to choose from.
        request: what to read.
        into: the way into the prefill node.
        least: blocks.
        at_most: a time by which a single lane can have read everything.
    """
    lanes = list(lanes)
    while len(lanes) > 1:
        filled = _round(lanes, _amounts(lanes, request.total_bytes, into, at_most), request, into)
        smallest = min(blocks for _, blocks in filled)
        if smallest >= least:
            return _Filling.of(filled, request, into)
        # all the dry ones at once, else only the one with least: the others rise when it goes
        kept = [lane for lane, blocks in filled if blocks] if not smallest else []
        if kept and len(kept) < len(lanes):
            lanes = kept
        else:
            lanes.remove(min(filled, key=lambda entry: entry[1])[0])
        # without the lane that was left out, the bound may be met by none of those that are left
        at_most = max(at_most, min(lane.alone(request.total_bytes, into) for lane in lanes))
    return _Filling.of_one(lanes[0], request, into)


def _amounts(lanes: list[_Lane], total: int, into: _Into, at_most: float) -> list[float]:
    """Bytes of each lane at the lowest water level that holds them all."""
    low, high, level = 0.0, at_most, at_most
    amounts, have, slope = _held(lanes, into, level)
    for _ in range(MOST_STEPS):
        excess = have - total
        if excess >= 0:
            high = level
        else:
            low = level
        if abs(excess) <= CLOSE_ENOUGH * total or high - low <= CLOSE_ENOUGH * high:
            break
        step = level - excess / slope if slope else low
        level = step if low < step < high else (low + high) / 2
        amounts, have, slope = _held(lanes, into, level)
    spare = into.cnic * level - into.receiving
    for place, lane in enumerate(lanes):
        if lane.forwards:  # what the prefill node cannot take in, the later lanes do not get
            if amounts[place] > spare:
                amounts[place] = spare if spare > 0 else 0.0
            spare -= amounts[place]
    return amounts


def _held(lanes: list[_Lane], into: _Into, level: float) -> tuple[list[float], float, float]:
    """Bytes that each lane can have delivered by then, all of them together, and how fast that grows."""
    here = here_slope = forwarded = forwarded_slope = 0.0
    amounts = []
    for lane in lanes:
        amount, slope = lane.snic * level - lane.queue, lane.snic
        if lane.forwards:
            if (sent := lane.cnic * level - lane.sending) < amount:
                amount, slope = sent, lane.cnic
            if amount > 0:
                forwarded += amount
                forwarded_slope += slope
            else:
                amount = 0.0
        elif amount > 0:
            here += amount
            here_slope += slope
        else:
            amount = 0.0
        amounts.append(amount)
    room = into.cnic * level - into.receiving
    if room < forwarded:
        forwarded, forwarded_slope = (room, into.cnic) if room > 0 else (0.0, 0.0)
    return amounts, here + forwarded, here_slope + forwarded_slope


def _round(lanes: list[_Lane], amounts: list[float], request: ReadRequest, into: _Into) -> list[tuple[_Lane, int]]:
    """Whole blocks: all that fit below the level, and the few that are left one by one to whoever has them soonest."""
    size = request.block_bytes
    blocks = [int(amount / size) for amount in amounts]
    left = request.blocks - sum(blocks)
    while left < 0:  # the level is exact but for rounding errors of floats
        blocks[max(range(len(blocks)), key=blocks.__getitem__)] -= 1
        left += 1
    if left:
        forwarded, ends = 0, []
        for lane, count in zip(lanes, blocks, strict=True):
            ends.append(lane.seconds((count + 1) * size))
            if lane.forwards:
                forwarded += count
        for _ in range(left):
            crowded = (into.receiving + (forwarded + 1) * size) / into.cnic
            soonest, place = math.inf, 0
            for at, lane in enumerate(lanes):
                end = crowded if lane.forwards and crowded > ends[at] else ends[at]
                if end < soonest:
                    soonest, place = end, at
            blocks[place] += 1
            forwarded += lanes[place].forwards
            ends[place] = lanes[place].seconds((blocks[place] + 1) * size)
    return list(zip(lanes, blocks, strict=True))
