"""Water-filling: divides one request over several storage links so that all parts end at the same, earliest time."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.contract import NodeState, PlanRequest, ReadSide, Share

CLOSE_ENOUGH = 1e-9
"""Relative precision of the water level: far below a block."""
MOST_STEPS = 60
"""Each step that Newton spoils is a bisection, so that this bounds the work and is never met in practice."""


class Split:
    """Extension of the paper: one request over the prefill, the decode and idle third nodes.

    Args:
        least_blocks: minimum number of blocks per side (a request smaller than two such parts is not divided).
        least_bytes: minimum bytes per side.
        most_parts: maximum number of sides per request.
        relay_gain: third nodes are used only if they make the request faster by at least this share.
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
        self, request: PlanRequest, nodes: Sequence[tuple[NodeState, ReadSide]], prefill: NodeState | None
    ) -> Sequence[Share]:
        least = max(self.least_blocks, -(-self.least_bytes // request.block_bytes))
        parts = min(self.most_parts, request.blocks // least)
        into = _Into(prefill.cnic, prefill.receiving_bytes) if prefill is not None else _Into(math.inf, 0)
        lanes = [_Lane(state, side, least * request.block_bytes, into) for state, side in nodes]
        pair = [lane for lane in lanes if lane.side is not ReadSide.RELAY]
        relays = [lane for lane in lanes if lane.side is ReadSide.RELAY]
        best = _best_of_one(pair or relays, request, into)
        # a lane that needs as long for the smallest part it may get cannot help: it is not even asked
        if parts > 1 and len(soon := [lane for lane in pair if lane.soonest < best.seconds]) > 1:
            best = _fill(soon, request, into, least, best.seconds) or best
        wanted = best.seconds * (1 - self.relay_gain)
        if useful := [lane for lane in relays if lane.soonest < wanted]:
            useful.sort(key=_by_soonest)
            if parts > 1:
                soon = [lane for lane in pair if lane.soonest < wanted]
                wider = _fill([*soon, *useful][: self.most_parts], request, into, least, wanted)
            else:
                wider = _best_of_one(useful, request, into)
            if wider is not None and wider.seconds < wanted:
                best = wider
        # leading blocks to the side that starts first: they are needed first
        shares = sorted(zip(best.lanes, best.blocks, strict=True), key=_by_start)
        return [Share(lane.state.node, lane.side, blocks) for lane, blocks in shares]


class _Into(NamedTuple):
    """The way into the prefill node."""

    cnic: float
    receiving: int

    def seconds(self, forwarded: int) -> float:
        """Until it has taken in that many bytes more."""
        return (self.receiving + forwarded) / self.cnic if forwarded else 0.0


class _Lane:
    """A candidate node. It needs ``soonest`` seconds for its smallest part, if it reads alone."""

    __slots__ = ("cnic", "forwards", "queue", "sending", "side", "snic", "soonest", "start", "state")

    def __init__(self, state: NodeState, side: ReadSide, least_bytes: int, into: _Into) -> None:
        self.state, self.side = state, side
        self.forwards = side is not ReadSide.PREFILL
        _, _, self.queue, _, self.snic, self.cnic, self.sending, _ = state
        self.start = self.queue / self.snic
        self.soonest = self.alone(least_bytes, into)

    def seconds(self, nbytes: int) -> float:
        """Until the node has read (and sent) that many bytes more."""
        read = (self.queue + nbytes) / self.snic
        if self.forwards and (sent := (self.sending + nbytes) / self.cnic) > read:
            return sent
        return read

    def alone(self, nbytes: int, into: _Into) -> float:
        """Time until it has delivered a number of bytes to the prefill engine, if it reads alone."""
        end = self.seconds(nbytes)
        if self.forwards and (received := (into.receiving + nbytes) / into.cnic) > end:
            return received
        return end


_by_soonest = operator.attrgetter("soonest")


def _by_start(share: tuple[_Lane, int]) -> float:
    return share[0].start


class _Filling(NamedTuple):
    """Blocks of each lane, and when the last of them has arrived."""

    lanes: Sequence[_Lane]
    blocks: Sequence[int]
    seconds: float


def _best_of_one(lanes: Sequence[_Lane], request: PlanRequest, into: _Into) -> _Filling:
    """All blocks on the lane that has them first."""
    total = request.total_bytes
    ends = [lane.alone(total, into) for lane in lanes]
    seconds = min(ends)
    return _Filling((lanes[ends.index(seconds)],), (request.blocks,), seconds)


def _fill(lanes: list[_Lane], request: PlanRequest, into: _Into, least: int, wanted: float) -> _Filling | None:
    """Water-fills the lanes; one that would read fewer than ``least`` blocks is left out and its water goes to the others.

    Args:
        lanes: to choose from.
        request: what to read.
        into: the way into the prefill node.
        least: blocks.
        wanted: seconds.

    Returns:
        None: they do not have it all sooner than ``wanted``.
    """
    size = request.block_bytes
    while len(lanes) > 1:
        amounts = _amounts(lanes, request.total_bytes, into, wanted)
        if amounts is None:
            return None
        blocks = _round(lanes, amounts, request, into)
        smallest = min(blocks)
        if smallest >= least:
            seconds = into.seconds(sum(count for lane, count in zip(lanes, blocks, strict=True) if lane.forwards) * size)
            for lane, count in zip(lanes, blocks, strict=True):
                if (end := lane.seconds(count * size)) > seconds:
                    seconds = end
            return _Filling(lanes, blocks, seconds) if seconds < wanted else None
        # all the dry ones at once, else only the one with least: the others rise when it goes
        driest = blocks.index(smallest)
        lanes = [lane for at, lane in enumerate(lanes) if (blocks[at] if not smallest else at != driest)]
    alone = _best_of_one(lanes, request, into)
    return alone if alone.seconds < wanted else None


def _amounts(lanes: list[_Lane], total: int, into: _Into, at_most: float) -> list[float] | None:
    """Bytes of each lane at the lowest water level that holds them all; None: that is above ``at_most``."""
    low, high, level = 0.0, at_most, at_most
    amounts, have, slope = _held(lanes, into, level)
    if have < total:
        return None
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
    if spare < sum(amounts):
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
    space = into.cnic * level - into.receiving
    if space < forwarded:
        forwarded, forwarded_slope = (space, into.cnic) if space > 0 else (0.0, 0.0)
    return amounts, here + forwarded, here_slope + forwarded_slope


def _round(lanes: list[_Lane], amounts: list[float], request: PlanRequest, into: _Into) -> list[int]:
    """Round to whole blocks: all that fit below the level; each remaining block goes to the side that is ready first."""
    size = request.block_bytes
    blocks = [int(amount / size) for amount in amounts]
    left = request.blocks - sum(blocks)
    while left < 0:  # the level is exact but for rounding errors of floats
        blocks[blocks.index(max(blocks))] -= 1
        left += 1
    if left:
        ends = [lane.seconds((count + 1) * size) for lane, count in zip(lanes, blocks, strict=True)]
        here = next((place for place, lane in enumerate(lanes) if not lane.forwards), None)
        forwarded = sum(blocks) - (0 if here is None else blocks[here])
        for _ in range(left):
            place = ends.index(min(ends))
            if place != here:
                # what is forwarded has one way in common
                if here is not None and ends[here] < (into.receiving + (forwarded + 1) * size) / into.cnic:
                    place = here
                else:
                    forwarded += 1
            blocks[place] += 1
            ends[place] = lanes[place].seconds((blocks[place] + 1) * size)
    return blocks
