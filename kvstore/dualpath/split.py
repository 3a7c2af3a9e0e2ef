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
"""Maximum number of steps. A failed Newton step is replaced by a bisection, so this bound is not reached in practice."""


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
            raise InvalidArgument(
                "policy split: least_blocks and most_parts must be at least 1, least_bytes at least 0, and relay_gain 0 to 1",
                least_blocks=least_blocks,
                most_parts=most_parts,
                least_bytes=least_bytes,
                relay_gain=relay_gain,
            )
        self.least_blocks = least_blocks
        self.least_bytes = least_bytes
        self.most_parts = most_parts
        self.relay_gain = relay_gain

    def choose(
        self, request: PlanRequest, nodes: Sequence[tuple[NodeState, ReadSide]], prefill: NodeState | None
    ) -> Sequence[Share]:
        least = max(self.least_blocks, -(-self.least_bytes // request.block_bytes))
        parts = min(self.most_parts, request.blocks // least)
        ingress = PrefillIngress(prefill.cnic, prefill.receiving_bytes) if prefill is not None else PrefillIngress(math.inf, 0)
        lanes = [_Lane(state, side, least * request.block_bytes, ingress) for state, side in nodes]
        pair = [lane for lane in lanes if lane.side is not ReadSide.RELAY]
        relays = [lane for lane in lanes if lane.side is ReadSide.RELAY]
        best = _best_of_one(pair or relays, request, ingress)
        # a lane that needs at least as long for its smallest part cannot make the request faster
        if parts > 1 and len(soon := [lane for lane in pair if lane.soonest < best.seconds]) > 1:
            best = _fill(soon, request, ingress, least, best.seconds) or best
        limit_s = best.seconds * (1 - self.relay_gain)
        if useful := [lane for lane in relays if lane.soonest < limit_s]:
            useful.sort(key=_by_soonest)
            if parts > 1:
                soon = [lane for lane in pair if lane.soonest < limit_s]
                wider = _fill([*soon, *useful][: self.most_parts], request, ingress, least, limit_s)
            else:
                wider = _best_of_one(useful, request, ingress)
            if wider is not None and wider.seconds < limit_s:
                best = wider
        # leading blocks to the side that starts first: they are needed first
        shares = sorted(zip(best.lanes, best.blocks, strict=True), key=_by_start)
        return [Share(lane.state.node, lane.side, blocks) for lane, blocks in shares]


class PrefillIngress(NamedTuple):
    """The CNIC of the prefill node, over which all forwarded bytes arrive."""

    cnic: float
    receiving: int

    def seconds(self, forwarded: int) -> float:
        """Return the seconds until the prefill node has received this many more bytes."""
        return (self.receiving + forwarded) / self.cnic if forwarded else 0.0


class _Lane:
    """A candidate node. Reading alone, it needs ``soonest`` seconds for its smallest part."""

    __slots__ = ("cnic", "forwards", "queue", "sending", "side", "snic", "soonest", "start", "state")

    def __init__(self, state: NodeState, side: ReadSide, least_bytes: int, ingress: PrefillIngress) -> None:
        self.state, self.side = state, side
        self.forwards = side is not ReadSide.PREFILL
        _, _, self.queue, _, self.snic, self.cnic, self.sending, _ = state
        self.start = self.queue / self.snic
        self.soonest = self.alone(least_bytes, ingress)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds until the node has read (and sent) this many more bytes."""
        read = (self.queue + nbytes) / self.snic
        if self.forwards and (sent := (self.sending + nbytes) / self.cnic) > read:
            return sent
        return read

    def alone(self, nbytes: int, ingress: PrefillIngress) -> float:
        """Return the seconds until the node, reading alone, has delivered this many bytes to the prefill engine."""
        end = self.seconds(nbytes)
        if self.forwards and (received := (ingress.receiving + nbytes) / ingress.cnic) > end:
            return received
        return end


_by_soonest = operator.attrgetter("soonest")


def _by_start(share: tuple[_Lane, int]) -> float:
    return share[0].start


class _Filling(NamedTuple):
    """Blocks of each lane, and the seconds until the last block has arrived."""

    lanes: Sequence[_Lane]
    blocks: Sequence[int]
    seconds: float


def _best_of_one(lanes: Sequence[_Lane], request: PlanRequest, ingress: PrefillIngress) -> _Filling:
    """Assign all blocks to the lane that delivers them first."""
    total = request.total_bytes
    ends = [lane.alone(total, ingress) for lane in lanes]
    seconds = min(ends)
    return _Filling((lanes[ends.index(seconds)],), (request.blocks,), seconds)


def _fill(lanes: list[_Lane], request: PlanRequest, ingress: PrefillIngress, least: int, limit_s: float) -> _Filling | None:
    """Divide the request so that all lanes end at the same time. Drop lanes that would read fewer than ``least`` blocks.

    Args:
        lanes: the candidate lanes.
        request: the request to divide.
        ingress: CNIC of the prefill node.
        least: minimum number of blocks per lane.
        limit_s: the request must arrive within this time.

    Returns:
        The blocks per lane; None: the lanes cannot deliver the request within ``limit_s``.
    """
    size = request.block_bytes
    while len(lanes) > 1:
        amounts = _amounts(lanes, request.total_bytes, ingress, limit_s)
        if amounts is None:
            return None
        blocks = _round(lanes, amounts, request, ingress)
        smallest = min(blocks)
        if smallest >= least:
            seconds = ingress.seconds(sum(count for lane, count in zip(lanes, blocks, strict=True) if lane.forwards) * size)
            for lane, count in zip(lanes, blocks, strict=True):
                if (end := lane.seconds(count * size)) > seconds:
                    seconds = end
            return _Filling(lanes, blocks, seconds) if seconds < limit_s else None
        # drop all empty lanes at once, else only the one with the fewest blocks: the others get its blocks
        fewest = blocks.index(smallest)
        lanes = [lane for at, lane in enumerate(lanes) if (blocks[at] if not smallest else at != fewest)]
    alone = _best_of_one(lanes, request, ingress)
    return alone if alone.seconds < limit_s else None


def _amounts(lanes: list[_Lane], total: int, ingress: PrefillIngress, at_most: float) -> list[float] | None:
    """Return the bytes per lane at the earliest common end time (``level``, in seconds); None: it is after ``at_most``."""
    low, high, level = 0.0, at_most, at_most
    amounts, have, slope = _held(lanes, ingress, level)
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
        amounts, have, slope = _held(lanes, ingress, level)
    spare = ingress.cnic * level - ingress.receiving
    if spare < sum(amounts):
        for index, lane in enumerate(lanes):
            if lane.forwards:  # later lanes get only what the prefill node can still receive
                if amounts[index] > spare:
                    amounts[index] = spare if spare > 0 else 0.0
                spare -= amounts[index]
    return amounts


def _held(lanes: list[_Lane], ingress: PrefillIngress, level: float) -> tuple[list[float], float, float]:
    """Return the bytes that each lane can deliver by the time ``level``, their sum, and the growth of the sum per second."""
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
    space = ingress.cnic * level - ingress.receiving
    if space < forwarded:
        forwarded, forwarded_slope = (space, ingress.cnic) if space > 0 else (0.0, 0.0)
    return amounts, here + forwarded, here_slope + forwarded_slope


def _round(lanes: list[_Lane], amounts: list[float], request: PlanRequest, ingress: PrefillIngress) -> list[int]:
    """Round to whole blocks: all that fit below the level; each remaining block goes to the side that is ready first."""
    size = request.block_bytes
    blocks = [int(amount / size) for amount in amounts]
    left = request.blocks - sum(blocks)
    while left < 0:  # only rounding errors of floats can lead to this
        blocks[blocks.index(max(blocks))] -= 1
        left += 1
    if left:
        ends = [lane.seconds((count + 1) * size) for lane, count in zip(lanes, blocks, strict=True)]
        here = next((index for index, lane in enumerate(lanes) if not lane.forwards), None)
        forwarded = sum(blocks) - (0 if here is None else blocks[here])
        for _ in range(left):
            index = ends.index(min(ends))
            if index != here:
                # all forwarded blocks share the CNIC of the prefill node
                if here is not None and ends[here] < (ingress.receiving + (forwarded + 1) * size) / ingress.cnic:
                    index = here
                else:
                    forwarded += 1
            blocks[index] += 1
            ends[index] = lanes[index].seconds((blocks[index] + 1) * size)
    return blocks
