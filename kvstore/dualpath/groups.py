"""Engine groups, and the two assignment rules of the paper's section 6 over one group.

The engines' numbers are in arrays, so that one decision is a few vector instructions for six engines or a thousand. Among
equals the engine that joined first wins.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

NEVER = np.iinfo(np.int64).max
"""Marks an engine that is not eligible; compares as the largest number."""


class EngineKind(StrEnum):
    """Phase that an engine computes; all engines of a group compute the same."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as it joins.

    Attributes:
        engine: its name, unique over all roles.
        role: what it does.
        group: its group; all engines of one node are in the same group.
        node: the node whose storage link it reads over.
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
        tok: tokens of assigned, unfinished requests, an engine.
        seq: their number.
        free: HBM bytes free for KV.
        read: disk reading queue of the engine's node, in tokens.
        open: whether it may be given requests; those of nodes that drain may not.
        most_hbm: largest idle capacity (``hbm_units``) of an open engine; -1: none is open.
    """

    __slots__ = ("_place", "engines", "free", "most_hbm", "name", "open", "read", "role", "seq", "tok")

    def __init__(self, name: str, role: EngineKind) -> None:
        self.name = name
        self.role = role
        self.engines: list[Engine] = []
        self._place: dict[str, int] = {}
        self.most_hbm = -1
        self.tok, self.seq, self.free, self.read = (np.zeros(0, np.int64) for _ in range(4))
        self.open = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self.engines)

    def __contains__(self, engine: str) -> bool:
        return engine in self._place

    def place(self, engine: str) -> int:
        """Position of an engine in the arrays."""
        return self._place[engine]

    def join(self, engine: Engine, shut: Container[str] = ()) -> None:
        """A new engine, with nothing to do; of the nodes in ``shut`` it gets nothing."""
        self._place[engine.engine] = len(self.engines)
        self.engines.append(engine)
        self.tok, self.seq, self.read = (np.append(column, np.int64(0)) for column in (self.tok, self.seq, self.read))
        self.free = np.append(self.free, np.int64(engine.hbm_units))
        self.shut(shut)

    def resize(self, engine: Engine) -> None:
        """The engine of this name has another ``hbm_units``; its numbers stay."""
        self.engines[self._place[engine.engine]] = engine
        self._look()

    def leave(self, engine: str) -> None:
        """Remove an engine."""
        place = self._place[engine]
        del self.engines[place]
        self._place = {entry.engine: position for position, entry in enumerate(self.engines)}
        self.tok, self.seq, self.free, self.read = (
            np.delete(column, place) for column in (self.tok, self.seq, self.free, self.read)
        )
        self.open = np.delete(self.open, place)
        self._look()

    def shut(self, nodes: Container[str]) -> bool:
        """Engines of these nodes are given nothing from now on, all others may be. Whether that changes anything."""
        now_open = np.array([entry.node not in nodes for entry in self.engines], np.bool_)
        changed = not np.array_equal(now_open, self.open)
        self.open = now_open
        self._look()
        return changed

    def _look(self) -> None:
        capacities = (entry.hbm_units for entry, is_open in zip(self.engines, self.open.tolist(), strict=True) if is_open)
        self.most_hbm = max(capacities, default=-1)

    @property
    def tokens(self) -> int:
        """Of all engines."""
        return int(self.tok.sum())


def assign_prefill(
    group: EngineGroup, lengths: Iterable[int], alpha: int, beta: int, near: Iterable[Mapping[str, int]] = ()
) -> Iterator[int]:
    """Algorithm 1: assign requests to the engines of a prefill group in order of arrival, until all are overloaded.

    Of the engines with at most ``beta`` tokens, those whose node has at most ``alpha`` tokens to read come first (else its
    storage link would become idle); among them the one with the fewest tokens. The arrays of the group are updated.

    Extension of the paper: an engine that already holds a part of the prompt is not charged for that part, and the part is
    deducted in the comparison. Its class does not change, because a prefix does not make an engine less overloaded.

    Args:
        group: the group that fetches.
        lengths: tokens of the waiting requests, in order; drawn one by one, only as far as needed.
        alpha: a reading queue above this is long, in tokens.
        beta: an engine with more tokens than this is overloaded.
        near: per request, drawn right after its length: tokens that engines already hold, by name.

    Yields:
        The position of the engine for each request; ends when the rule ends the fetch.
    """
    short = group.read <= alpha
    wanted = (short & group.open, ~short & group.open)
    # the classes need no masks a request: the least tokens of a class tell whether it is empty below beta
    classes = [np.where(chosen, group.tok, NEVER) for chosen in wanted] if len(group) else []
    ahead = iter(near)
    for length in lengths:
        at_hand = next(ahead, {})
        for tokens in classes:
            place = _soonest(group, tokens, beta, at_hand) if at_hand else int(tokens.argmin())
            if tokens[place] <= beta:
                break
        else:
            return
        if at_hand:
            length -= min(length, at_hand.get(group.engines[place].engine, 0))  # the rest of it
        tokens[place] += length
        group.tok[place] += length
        group.seq[place] += 1
        yield place


def _soonest(group: EngineGroup, tokens: npt.NDArray[np.int64], beta: int, at_hand: Mapping[str, int]) -> int:
    """Position of the engine with the fewest tokens after the deduction, among those that are not overloaded, if any."""
    delays = np.where(tokens <= beta, tokens, NEVER)
    for name, spared in at_hand.items():
        if name in group and delays[place := group.place(name)] != NEVER:
            delays[place] -= spared
    return int(delays.argmin())


def decode_watermark(group: EngineGroup, waiting: Iterable[tuple[int, int]], z: float) -> float:
    """Z: ``z`` times the mean tokens of an engine after the fetch, if all that fits into the group's HBM were assigned.

    Args:
        group: the group that fetches; has an engine. Those that are not open do not count.
        waiting: (tokens, HBM bytes) of the waiting requests, in order.
        z: 1.05 in the paper.
    """
    space = int(np.maximum(group.free[group.open], 0).sum())  # an engine that shrank may have given more than it has
    coming = 0
    for tokens, need in waiting:
        if need > space:
            break
        space -= need
        coming += tokens
    return z * (coming + int(group.tok[group.open].sum())) / max(1, int(np.count_nonzero(group.open)))


def assign_decode(group: EngineGroup, waiting: Iterable[tuple[int, int]], watermark: float) -> Iterator[int]:
    """Phase 2: assign requests to the engines of a decode group in order of arrival, until the next one fits nowhere.

    Of the engines with space for the request, those that stay at or below the watermark come first, and among them the one with
    the fewest sequences; else the one with the fewest tokens. The arrays of the group are updated.

    Args:
        group: the group that fetches.
        waiting: (tokens, HBM bytes) of the waiting requests, in order; drawn one by one, only as far as needed.
        watermark: see ``decode_watermark``.

    Yields:
        The position of the engine for each request; ends when the rule ends the fetch.
    """
    if not len(group):
        return
    for tokens, need in waiting:
        fits = (group.free >= need) & group.open
        low = fits & (group.tok + tokens <= watermark)
        place = _least(group.seq, low)
        if place is None:
            place = _least(group.tok, fits)
        if place is None:
            return
        group.tok[place] += tokens
        group.seq[place] += 1
        group.free[place] -= need
        yield place


def _least(column: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]) -> int | None:
    """Place of the least value among the chosen; None if none is chosen."""
    place = int(np.where(chosen, column, NEVER).argmin())
    return place if chosen[place] else None


class DecodeGroups:
    """Phase 1: which decode group a request goes to.

    Attributes:
        groups: by name, in the order in which they joined; among equals the first wins.
    """

    __slots__ = ("_load", "_most", "_names", "_place", "groups")

    def __init__(self) -> None:
        self.groups: dict[str, EngineGroup] = {}
        self._place: dict[str, int] = {}
        self._names: list[str] = []
        self._load, self._most = (np.zeros(0, np.int64) for _ in range(2))

    def join(self, group: EngineGroup) -> None:
        """A new group; ``refresh`` makes it eligible once it has an engine."""
        self.groups[group.name] = group
        self._place[group.name] = len(self._names)
        self._names.append(group.name)
        self._load, self._most = np.append(self._load, np.int64(0)), np.append(self._most, np.int64(-1))

    def leave(self, name: str) -> None:
        """The group is known no longer."""
        place = self._place.pop(name)
        del self.groups[name], self._names[place]
        self._place = {other: position for position, other in enumerate(self._names)}
        self._load, self._most = np.delete(self._load, place), np.delete(self._most, place)

    def refresh(self, name: str, waiting_tokens: int) -> None:
        """A group's numbers have changed.

        Args:
            name: the group.
            waiting_tokens: what to count on top of its engines' tokens.
        """
        group, place = self.groups[name], self._place[name]
        self._load[place] = group.tokens + waiting_tokens
        self._most[place] = group.most_hbm

    def add(self, name: str, tokens: int) -> None:
        """A group has that many tokens more (or fewer)."""
        self._load[self._place[name]] += tokens

    def choose(self, need: int) -> str | None:
        """The group with the fewest tokens, of those that have an open engine with space for ``need`` bytes when it is idle."""
        if not self.groups:
            return None
        place = _least(self._load, self._most >= need)
        return None if place is None else self._names[place]
