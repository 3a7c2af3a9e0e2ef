"""The account of a load: what became of each block, where its bytes came from, and the first thing that went wrong."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvclient.results import LoadResult, Outcomes
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome, Tier

Where = slice | npt.NDArray[np.intp]
_TIERS = {int(tier): tier for tier in Tier}
_TIER_BITS = 8


class Tally:
    """One entry a block. Different threads may record different blocks."""

    def __init__(self, blocks: int) -> None:
        self.outcomes: Outcomes = np.full(blocks, Outcome.MISS, np.uint8)
        self.error: KVStoreError | None = None
        self._tiers = np.zeros(blocks, np.uint8)
        self._nodes = np.zeros(blocks, np.int16)
        self._paths = np.zeros(blocks, np.int8)
        self._lock = threading.Lock()
        self._node_numbers: dict[str, int] = {}
        self._path_numbers: dict[str, int] = {}

    def node_number(self, node_id: str) -> int:
        """A small number for a node, the same each time."""
        return _number(self._node_numbers, node_id, self._lock)

    def record(self, where: Where, outcomes: Outcomes | Outcome, tiers: Outcomes | int, node: int, path: str) -> None:
        """What became of some blocks, and where those that are hits came from."""
        self.outcomes[where] = outcomes
        self._tiers[where] = tiers
        self._nodes[where] = node
        self._paths[where] = _number(self._path_numbers, path, self._lock)

    def absorb(self, start: int, other: Tally) -> None:
        """Takes over the account of a load of blocks from ``start`` on."""
        where = slice(start, start + len(other.outcomes))
        self.outcomes[where] = other.outcomes
        self._tiers[where] = other._tiers
        for mine, theirs, names in (
            (self._nodes, other._nodes, (self._node_numbers, other._node_numbers)),
            (self._paths, other._paths, (self._path_numbers, other._path_numbers)),
        ):
            numbers = np.zeros(len(names[1]) + 1, mine.dtype)
            for name, number in names[1].items():
                numbers[number] = _number(names[0], name, self._lock)
            mine[where] = numbers[theirs]
        if other.error is not None:
            self.note(other.error)

    def note(self, error: KVStoreError) -> None:
        """Keeps the first error."""
        if self.error is None:
            self.error = error

    def sources(self) -> dict[tuple[str, int], int]:
        """Hits by path and tier (0: not said)."""
        blocks, tiers, paths = len(self.outcomes), self._tiers.tobytes(), self._paths.tobytes()
        if blocks and self.outcomes.tobytes().count(Outcome.HIT) == tiers.count(tiers[0]) == paths.count(paths[0]) == blocks:
            path = next(name for name, number in self._path_numbers.items() if number == paths[0])
            return {(path, tiers[0]): blocks}  # the common case, at a fraction of the cost
        hits = self.outcomes == Outcome.HIT
        pairs = self._paths[hits].astype(np.intp) << _TIER_BITS | self._tiers[hits]
        names = {number: name for name, number in self._path_numbers.items()}
        mask = (1 << _TIER_BITS) - 1
        return {(names[pair >> _TIER_BITS], pair & mask): count for pair, count in _sums(pairs, 1).items()}

    def result(self, block_bytes: int) -> LoadResult:
        """The account as a result."""
        hits = self.outcomes == Outcome.HIT
        tiers = {_TIERS[number]: size for number, size in _sums(self._tiers[hits], block_bytes).items() if number in _TIERS}
        return LoadResult(
            self.outcomes,
            bytes_by_tier=tiers,
            bytes_by_node=_named(_sums(self._nodes[hits], block_bytes), self._node_numbers),
            bytes_by_path=_named(_sums(self._paths[hits], block_bytes), self._path_numbers),
            error=self.error,
        )


def spans(positions: npt.NDArray[np.intp]) -> list[tuple[int, int]]:
    """Rising positions as (start, end) of stretches without a gap."""
    if len(positions) == 0:
        return []
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(int(positions[first]), int(positions[last - 1]) + 1) for first, last in pairwise(cuts)]


def _number(numbers: dict[str, int], name: str, lock: threading.Lock) -> int:
    number = numbers.get(name)
    if number is None:
        with lock:
            number = numbers.setdefault(name, len(numbers))
    return number


def _sums(numbers: npt.NDArray[np.integer], block_bytes: int) -> dict[int, int]:
    counts = np.bincount(numbers)
    return {number: int(counts[number]) * block_bytes for number in np.flatnonzero(counts).tolist()}


def _named(sizes: dict[int, int], numbers: dict[str, int]) -> dict[str, int]:
    return {name: sizes[number] for name, number in numbers.items() if number in sizes}
