"""Engine groups, and the rules of the paper's section 6 that assign requests to the engines of a group.

The state of all engines of a group is stored in arrays, so a decision takes a few vector instructions for any number of engines.
On a tie, the engine that joined first wins.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

NEVER = np.iinfo(np.int64).max
"""Value of an engine that may not be chosen. It is larger than any number of tokens."""


class EngineKind(StrEnum):
    """Phase that an engine computes; all engines of a group compute the same."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, as described when it joins.

    Attributes:
        engine: name of the engine, unique over all roles.
        role: whether the engine prefills or decodes.
        group: name of its group; all engines of one node are in the same group.
        node: the node whose storage link the engine reads over.
        hbm_units: capacity for KV when it is idle; decode engines only. Any unit that requests share: the metadata server
            counts tokens, the simulator bytes.
    """

    engine: str
    role: EngineKind
    group: str
    node: str
    hbm_units: int = 0


class EngineGroup:
    """Engines of one role that fetch together.

    Attributes:
        tok: per engine: tokens of its assigned, unfinished requests.
        seq: per engine: number of its assigned, unfinished requests.
        free: per engine: HBM free for KV, in the unit of ``Engine.hbm_units``.
        read: per engine: disk reading queue of its node, in tokens.
        open: per engine: whether requests may be assigned to it. Engines on draining nodes are not open.
        most_hbm: largest idle capacity (``hbm_units``) of an open engine; -1: none is open.
    """

    __slots__ = ("_index", "engines", "free", "most_hbm", "name", "open", "read", "role", "seq", "tok")

    def __init__(self, name: str, role: EngineKind) -> None:
        self.name = name
        self.role = role
        self.engines: list[Engine] = []
        self._index: dict[str, int] = {}
        self.most_hbm = -1
        self.tok, self.seq, self.free, self.read = (np.zeros(0, np.int64) for _ in range(4))
        self.open = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self.engines)

    def __contains__(self, engine: str) -> bool:
        return engine in self._index

    def index_of(self, engine: str) -> int:
        """Return the index of an engine in the arrays."""
        return self._index[engine]

    def join(self, engine: Engine, excluded: Container[str] = ()) -> None:
        """Add an idle engine. It is not open if its node is one of ``excluded``."""
        self._index[engine.engine] = len(self.engines)
        self.engines.append(engine)
        self.tok, self.seq, self.read = (np.append(column, np.int64(0)) for column in (self.tok, self.seq, self.read))
        self.free = np.append(self.free, np.int64(engine.hbm_units))
        self.exclude_nodes(excluded)

    def resize(self, engine: Engine) -> None:
        """Change the ``hbm_units`` of an engine. Its tokens, sequences and queue remain."""
        self.engines[self._index[engine.engine]] = engine
        self._update_most_hbm()

    def leave(self, engine: str) -> None:
        """Remove an engine."""
        index = self._index[engine]
        del self.engines[index]
        self._index = {entry.engine: position for position, entry in enumerate(self.engines)}
        self.tok, self.seq, self.free, self.read = (
            np.delete(column, index) for column in (self.tok, self.seq, self.free, self.read)
        )
        self.open = np.delete(self.open, index)
        self._update_most_hbm()

    def exclude_nodes(self, nodes: Container[str]) -> bool:
        """Stop assigning requests to engines of these nodes, and open all others. Return whether any engine changed."""
        now_open = np.array([entry.node not in nodes for entry in self.engines], np.bool_)
        changed = not np.array_equal(now_open, self.open)
        self.open = now_open
        self._update_most_hbm()
        return changed

    def _update_most_hbm(self) -> None:
        capacities = (entry.hbm_units for entry, is_open in zip(self.engines, self.open.tolist(), strict=True) if is_open)
        self.most_hbm = max(capacities, default=-1)

    @property
    def tokens(self) -> int:
        """Tokens of the assigned, unfinished requests of all engines."""
        return int(self.tok.sum())


def assign_prefill(
    group: EngineGroup, lengths: Iterable[int], alpha: int, beta: int, cached: Iterable[Mapping[str, int]] = ()
) -> Iterator[int]:
    """Algorithm 1: assign requests to the engines of a prefill group in order of arrival, until all engines are overloaded.

    An engine with more than ``beta`` tokens is overloaded. Of the others, engines whose node has at most ``alpha`` tokens to read
    are preferred, because otherwise the storage link of that node would become idle. Among these, the engine with the fewest
    tokens is chosen. The arrays of the group are updated.

    Extension of the paper: an engine that already holds a part of the prompt is not charged for that part, and the part is
    deducted in the comparison. Its class does not change, because a prefix does not make an engine less overloaded.

    Args:
        group: the group that fetches.
        lengths: tokens of the waiting requests, in order; drawn one by one, only as far as needed.
        alpha: a reading queue above this is long, in tokens.
        beta: an engine with more tokens than this is overloaded.
        cached: per request, drawn right after its length: prompt tokens that engines already hold, by engine name.

    Yields:
        The index of the engine for each request; ends when the rule ends the fetch.
    """
    short = group.read <= alpha
    preferred, others = short & group.open, ~short & group.open
    # no masks per request: the least tokens of a class show whether it has an engine that is not overloaded
    classes = [np.where(chosen, group.tok, NEVER) for chosen in (preferred, others)] if len(group) else []
    cached_of_requests = iter(cached)
    for length in lengths:
        held = next(cached_of_requests, {})
        for tokens in classes:
            index = _least_uncached(group, tokens, beta, held) if held else int(tokens.argmin())
            if tokens[index] <= beta:
                break
        else:
            return
        if held:
            length -= min(length, held.get(group.engines[index].engine, 0))  # only the tokens that must be computed
        tokens[index] += length
        group.tok[index] += length
        group.seq[index] += 1
        yield index


def _least_uncached(group: EngineGroup, tokens: npt.NDArray[np.int64], beta: int, cached: Mapping[str, int]) -> int:
    """Return the engine that is not overloaded and has the fewest tokens after its cached tokens are deducted.

    If all are overloaded, the result is the index of one of them.
    """
    delays = np.where(tokens <= beta, tokens, NEVER)
    for name, held in cached.items():
        if name in group and delays[index := group.index_of(name)] != NEVER:
            delays[index] -= held
    return int(delays.argmin())


def decode_watermark(group: EngineGroup, waiting: Iterable[tuple[int, int]], z: float) -> float:
    """Return Z: ``z`` times the mean tokens of an engine, if all waiting requests that fit the HBM of the group were assigned.

    Args:
        group: the group that fetches, with at least one engine. Engines that are not open do not count.
        waiting: (tokens, HBM bytes) of the waiting requests, in order.
        z: 1.05 in the paper.
    """
    space = int(
        np.maximum(group.free[group.open], 0).sum()
    )  # negative for an engine that became smaller than its assigned requests
    coming = 0
    for tokens, need in waiting:
        if need > space:
            break
        space -= need
        coming += tokens
    return z * (coming + int(group.tok[group.open].sum())) / max(1, int(np.count_nonzero(group.open)))


def assign_decode(group: EngineGroup, waiting: Iterable[tuple[int, int]], watermark: float) -> Iterator[int]:
    """Phase 2: assign requests to the engines of a decode group in order of arrival, until the next one fits nowhere.

    Among the engines with space for the request that stay at or below the watermark, the one with the fewest sequences is chosen.
    If all would exceed the watermark, the one with space and the fewest tokens is chosen. The arrays of the group are updated.

    Args:
        group: the group that fetches.
        waiting: (tokens, HBM bytes) of the waiting requests, in order; drawn one by one, only as far as needed.
        watermark: see ``decode_watermark``.

    Yields:
        The index of the engine for each request; ends when the rule ends the fetch.
    """
    if not len(group):
        return
    for tokens, need in waiting:
        fits = (group.free >= need) & group.open
        low = fits & (group.tok + tokens <= watermark)
        index = _least(group.seq, low)
        if index is None:
            index = _least(group.tok, fits)
        if index is None:
            return
        group.tok[index] += tokens
        group.seq[index] += 1
        group.free[index] -= need
        yield index


def _least(column: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]) -> int | None:
    """Return the index of the least value among the chosen; None if none is chosen."""
    index = int(np.where(chosen, column, NEVER).argmin())
    return index if chosen[index] else None


class DecodeGroups:
    """Phase 1: choose the decode group of each request.

    Attributes:
        groups: the groups by name, in the order in which they joined. On a tie, the first group wins.
    """

    __slots__ = ("_index", "_load", "_most", "_names", "groups")

    def __init__(self) -> None:
        self.groups: dict[str, EngineGroup] = {}
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._load, self._most = (np.zeros(0, np.int64) for _ in range(2))

    def join(self, group: EngineGroup) -> None:
        """Add a group. It can be chosen after it has an engine and ``refresh`` was called."""
        self.groups[group.name] = group
        self._index[group.name] = len(self._names)
        self._names.append(group.name)
        self._load, self._most = np.append(self._load, np.int64(0)), np.append(self._most, np.int64(-1))

    def leave(self, name: str) -> None:
        """Remove a group."""
        index = self._index.pop(name)
        del self.groups[name], self._names[index]
        self._index = {other: position for position, other in enumerate(self._names)}
        self._load, self._most = np.delete(self._load, index), np.delete(self._most, index)

    def refresh(self, name: str, waiting_tokens: int) -> None:
        """Update the load and the capacity of a group from its engines.

        Args:
            name: the group.
            waiting_tokens: tokens to add to the tokens of its engines.
        """
        group, index = self.groups[name], self._index[name]
        self._load[index] = group.tokens + waiting_tokens
        self._most[index] = group.most_hbm

    def add(self, name: str, tokens: int) -> None:
        """Add tokens (negative: subtract) to the load of a group."""
        self._load[self._index[name]] += tokens

    def choose(self, need: int) -> str | None:
        """Return the group with the fewest tokens among those with an open engine whose idle capacity is at least ``need``."""
        if not self.groups:
            return None
        index = _least(self._load, self._most >= need)
        return None if index is None else self._names[index]
