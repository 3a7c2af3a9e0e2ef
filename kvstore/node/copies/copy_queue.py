"""Order in which blocks are checked for a second copy and offered to partners. Pure: the caller passes the time and holds a lock.

1. *New* blocks and blocks that a partner refused wait in a queue, each until it is due. The queue is bounded: further blocks are
   left to a later pass.
2. A *pass* checks many blocks of this node: first those in DRAM, which were used last, then the youngest. It continues while no
   block in the queue is due.
3. A partner that refuses or fails rests for a time that doubles with each failure. Until then the next partner of the ranking is
   asked; if all rest, the blocks wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, TypeVar

from kvstore.core.types import BlockKey, NamespaceId, NodeId
from kvstore.node.control.migration_plan import SizedBlock
from kvstore.node.state.change_log import in_chains

MAX_WAITING: Final = 65_536
"""Blocks in the queue."""
MAX_TRIES: Final = 10
"""Offers of a block, after which it is left to a later pass."""
FIRST_REST_S: Final = 10.0
MAX_REST_S: Final = 300.0

Held = TypeVar("Held", bound=SizedBlock)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Held]):
    """A block that may need a second copy.

    Attributes:
        block: the block.
        hot: whether it was stored or used lately, so that its copy may evict the coldest blocks of a full partner.
        since_s: when it was added.
        tries: number of offers.
        may_wait: whether the caller may put it off to the end of the pass.
    """

    block: Held
    hot: bool
    since_s: float
    tries: int = 0
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class CopyOffer(Generic[Held]):
    """Blocks of one namespace for one partner, parents before their children."""

    node_id: NodeId
    hot: bool
    candidates: Sequence[Candidate[Held]]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(one.block.nbytes for one in self.candidates)


class CopyQueue(Generic[Held]):
    """Blocks that may need a second copy. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: list[tuple[float, int, Candidate[Held]]] = []
        self._pass: list[Held] = []
        """Blocks that a pass has not reached: cold ones, then hot ones. The next is last."""
        self._cold = 0
        """Cold blocks among them, when the pass began."""
        self._pass_since_s = 0.0
        self._put_off: tuple[list[Held], list[Held]] = ([], [])
        """Cold and hot blocks that the pass will check at its end, the next first."""
        self.sifting = False
        """Whether the caller may put blocks of the pass off."""
        self.left_out = 0
        """Blocks that were left to a later pass since the last call of ``begin_pass``."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._pass) + sum(map(len, self._put_off))

    @property
    def passing(self) -> bool:
        """Whether a pass has not ended."""
        return bool(self._pass or any(self._put_off))

    def clear(self) -> None:
        """Forget all blocks."""
        self._waiting.clear()
        self.begin_pass([], [], 0.0)

    def add(self, candidate: Candidate[Held], due_s: float) -> None:
        """Add a block that is due at some time."""
        if candidate.tries >= MAX_TRIES or len(self._waiting) >= MAX_WAITING:
            self.left_out += 1
            return
        heapq.heappush(self._waiting, (due_s, next(self._numbers), candidate))

    def begin_pass(self, hot: Sequence[Held], cold: Sequence[Held], now_s: float, *, sifting: bool = False) -> None:
        """Begin a pass, in place of one that has not ended.

        Args:
            hot: blocks that were used lately, parents before their children.
            cold: other blocks, oldest first.
            now_s: the time.
            sifting: whether the caller puts blocks off that need no check soon.
        """
        self.left_out = 0
        self._put_off = [], []
        self.sifting = sifting
        self._pass = [*cold, *reversed(hot)]
        self._cold = len(cold)
        self._pass_since_s = now_s

    def put_off(self, candidates: Iterable[Candidate[Held]]) -> None:
        """Check blocks of the pass at its end."""
        for one in candidates:
            self._put_off[one.hot].append(one.block)

    def take(self, now_s: float, most: int) -> list[Candidate[Held]]:
        """Take the blocks to check next: those that are due, else some of the pass."""
        due: list[Candidate[Held]] = []
        while self._waiting and self._waiting[0][0] <= now_s and len(due) < most:
            due.append(heapq.heappop(self._waiting)[2])
        if due:
            return due
        if not self._pass and self.sifting:
            cold, hot = self._put_off
            self.sifting, self._put_off = False, ([], [])
            self._pass, self._cold = [*reversed(cold), *reversed(hot)], len(cold)
        first = max(0, len(self._pass) - most)
        taken = [
            Candidate(block, hot=first + at >= self._cold, since_s=self._pass_since_s, may_wait=self.sifting)
            for at, block in enumerate(self._pass[first:])
        ]
        del self._pass[first:]
        return taken[::-1]


class Partners:
    """Which partners rest after a refusal or a failure.

    A full partner refuses cold blocks but not hot ones, so it rests for each kind separately.
    """

    def __init__(self) -> None:
        self._rests: dict[tuple[NodeId, bool], tuple[float, float]] = {}
        """Partner, and whether for hot blocks -> (end of its rest, duration of the rest)."""

    def failed(self, node_id: NodeId, now_s: float, *, hot: bool) -> None:
        """Let a partner rest that did not take all blocks."""
        _, rest_s = self._rests.get((node_id, hot), (0.0, FIRST_REST_S / 2))
        rest_s = min(MAX_REST_S, rest_s * 2)
        self._rests[node_id, hot] = now_s + rest_s, rest_s

    def succeeded(self, node_id: NodeId, *, hot: bool) -> None:
        """Note that a partner took all blocks."""
        self._rests.pop((node_id, hot), None)

    def choose(self, ranked: Sequence[NodeId], now_s: float, *, hot: bool) -> NodeId | None:
        """The first partner that does not rest; None: all do."""
        return next((node_id for node_id in ranked if self.rest_end_s(node_id, hot=hot) <= now_s), None)

    def rest_end_s(self, node_id: NodeId, *, hot: bool) -> float:
        """When a partner may be asked again."""
        return self._rests.get((node_id, hot), (0.0, 0.0))[0]


def plan_offers(chosen: Iterable[tuple[NodeId, Candidate[Held]]], window_bytes: int, window_blocks: int) -> list[CopyOffer[Held]]:
    """Divide blocks into offers.

    Args:
        chosen: blocks, each with its partner.
        window_bytes: maximum size of an offer; a larger block is an offer on its own.
        window_blocks: maximum number of blocks in an offer.
    """
    groups: dict[tuple[NodeId, NamespaceId, bool], dict[BlockKey, Candidate[Held]]] = {}
    for node_id, one in chosen:
        groups.setdefault((node_id, one.block.namespace_id, one.hot), {})[one.block.key] = one
    offers: list[CopyOffer[Held]] = []
    for (node_id, _, hot), group in groups.items():
        part: list[Candidate[Held]] = []
        part_bytes = 0
        for block in in_chains(sorted((one.block for one in group.values()), key=lambda block: block.depth)):
            if part and (part_bytes + block.nbytes > window_bytes or len(part) >= window_blocks):
                offers.append(CopyOffer(node_id, hot, part))
                part, part_bytes = [], 0
            part.append(group[block.key])
            part_bytes += block.nbytes
        offers.append(CopyOffer(node_id, hot, part))
    return offers
