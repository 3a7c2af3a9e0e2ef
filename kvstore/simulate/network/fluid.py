"""Links shared by fluid flows, max-min fair.

A flow uses each link of its route by a weight: bytes on the link for each byte of the flow. Rates are max-min fair: no flow
can have more without a flow that has no more than it having less. Flows over the same route always have the same rate, so they
are one *class* with a count: a solver sees as many unknowns as there are routes in use, however many requests there are. A change
is solved only among the classes that it can reach over saturated links.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from kvstore.core.errors import InvalidArgument

Route = tuple[tuple[int, float], ...]
"""(link, weight) pairs, each link once."""

_CLOSE = 1e-9
"""Relative difference below which rates and loads are equal."""


def route(*uses: tuple[int, float]) -> Route:
    """A route over links; uses of the same link add up."""
    weights: dict[int, float] = {}
    for link, weight in uses:
        weights[link] = weights.get(link, 0.0) + weight
    return tuple(sorted(weights.items()))


class Flow:
    """A transfer in progress.

    Attributes:
        nbytes: its size.
        ended: called when the last byte has arrived.
    """

    __slots__ = ("ended", "nbytes")

    def __init__(self, nbytes: float, ended: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.ended = ended


class _Class:
    """All flows of one route. ``served`` bytes went to a flow that was there from the beginning, until ``at``."""

    __slots__ = ("at", "count", "order", "rate", "route", "served", "version", "waiting")

    def __init__(self, route: Route, order: int) -> None:
        self.route = route
        self.order = order
        self.count = 0
        self.rate = 0.0
        self.served = 0.0
        self.at = 0.0
        self.version = 0
        self.waiting: list[tuple[float, int, Flow]] = []


class FluidNetwork:
    """Links and flows.

    Args:
        capacities: bytes/s of each link; infinite: no limit.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        if not all(capacity > 0 for capacity in capacities):
            raise InvalidArgument("link capacities must be above zero")
        self.capacities = list(capacities)
        self.moved = [0.0] * len(capacities)
        """Bytes that each link has carried, up to the last ``settle`` or the last change of its flows."""
        self._load = [0.0] * len(capacities)
        self._users: list[dict[_Class, float]] = [{} for _ in capacities]
        self._classes: dict[Route, _Class] = {}
        self._dirty: dict[_Class, None] = {}
        self._left: set[int] = set()  # links that were full when a class on them changed
        self._ends: list[tuple[float, int, int, _Class]] = []
        self._flows = 0
        self._now = 0.0

    def start(self, path: Route, nbytes: float, now: float, ended: Callable[[], None]) -> Flow:
        """A new flow; one of no bytes, or over no limited link, ends at once (when ``take_ended`` is asked).

        Raises:
            InvalidArgument: negative bytes.
        """
        if not 0 <= nbytes < math.inf:
            raise InvalidArgument("nbytes must be finite and not negative", nbytes=nbytes)
        cls = self._classes.get(path)
        if cls is None:
            cls = self._classes[path] = _Class(path, len(self._classes))
        self._settle(cls, now)
        flow = Flow(nbytes, ended)
        self._flows += 1
        heapq.heappush(cls.waiting, (cls.served + nbytes, self._flows, flow))
        self._change(cls, cls.count + 1)
        return flow

    def rate(self, path: Route) -> float:
        """Bytes/s of each flow over a route now."""
        self._solve()
        cls = self._classes.get(path)
        return cls.rate if cls is not None and cls.count else 0.0

    def next_end(self) -> float:
        """When the next flow ends if none begins; infinite: never."""
        self._solve()
        while self._ends:
            when, _, version, cls = self._ends[0]
            if version == cls.version:
                return when
            heapq.heappop(self._ends)
        return math.inf

    def take_ended(self, now: float) -> list[Flow]:
        """Flows that have ended by now, which are forgotten."""
        ended: list[Flow] = []
        while self.next_end() <= now:
            _, _, _, cls = heapq.heappop(self._ends)
            self._settle(cls, now)
            slack = max(abs(cls.served) * 1e-12, cls.rate * now * 1e-15 if cls.rate < math.inf else math.inf)
            before = len(ended)
            first = cls.waiting[0][0]
            while cls.waiting and cls.waiting[0][0] <= max(first, cls.served + slack):
                ended.append(heapq.heappop(cls.waiting)[2])
            if not cls.waiting:
                cls.served = 0.0  # keeps the sum small, and its error with it
            self._change(cls, cls.count - (len(ended) - before))
        return ended

    def settle(self, now: float) -> None:
        """Bring ``moved`` up to date."""
        self._solve()
        for cls in self._classes.values():
            self._settle(cls, now)

    # ---- within ----

    def _settle(self, cls: _Class, now: float) -> None:
        """Count the bytes that the class has carried up to now."""
        passed = now - cls.at
        cls.at = now
        self._now = max(self._now, now)
        if cls.count and passed > 0 and cls.rate < math.inf:
            done = cls.rate * passed
            cls.served += done
            for link, weight in cls.route:
                self.moved[link] += done * weight * cls.count

    def _change(self, cls: _Class, count: int) -> None:
        """Set the number of flows. Rates are computed again when they are read."""
        self._left.update(link for link, _ in cls.route if self._full(link))
        if cls.rate < math.inf:
            for link, weight in cls.route:
                self._load[link] += cls.rate * weight * (count - cls.count)
        cls.count = count
        for link, weight in cls.route:
            if count:
                self._users[link][cls] = weight
            else:
                self._users[link].pop(cls, None)
        if not count:
            cls.rate = 0.0
            cls.version += 1
            for link, _ in cls.route:
                if not self._users[link]:
                    self._load[link] = 0.0  # removes rounding errors of ended flows
        self._dirty[cls] = None

    def _full(self, link: int) -> bool:
        return self._load[link] >= self.capacities[link] * (1 - _CLOSE)

    def _solve(self) -> None:
        """Bring rates up to date after changes."""
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        reach: dict[_Class, None] = {}
        frontier = [cls for cls in dirty if cls.count]
        for link in self._left:  # may be full no longer, so that nothing else leads to those who could have more now
            frontier.extend(self._users[link])
        self._left.clear()
        while True:
            self._close(reach, frontier)
            rates, levels = self._fill(reach)
            frontier = self._disturbed(reach, levels)
            if not frontier:
                break
        for cls, rate in rates.items():
            self._set_rate(cls, rate, cls in dirty)

    def _close(self, reach: dict[_Class, None], frontier: Iterable[_Class]) -> None:
        """Add to ``reach`` everything that shares a full link with it."""
        stack = [cls for cls in frontier if cls not in reach]
        while stack:
            cls = stack.pop()
            if cls in reach:
                continue
            reach[cls] = None
            for link, _ in cls.route:
                if self._full(link):
                    stack.extend(user for user in self._users[link] if user not in reach)

    def _fill(self, reach: dict[_Class, None]) -> tuple[dict[_Class, float], dict[int, float]]:
        """Max-min fair rates of the classes within reach, over what the others leave; and the level of each link that is full."""
        space: dict[int, float] = {}
        weight_of: dict[int, float] = {}
        for cls in reach:
            for link, weight in cls.route:
                if self.capacities[link] < math.inf:
                    if link not in space:
                        space[link], weight_of[link] = self.capacities[link] - self._load[link], 0.0
                    space[link] += cls.rate * weight * cls.count
                    weight_of[link] += weight * cls.count
        rates: dict[_Class, float] = {}
        levels: dict[int, float] = {}
        open_links = {link for link, weight in weight_of.items() if weight > 0}
        while open_links:
            level, tightest = min((max(0.0, space[link]) / weight_of[link], link) for link in open_links)
            levels[tightest] = level
            for cls in self._users[tightest]:
                if cls in rates or cls not in reach:
                    continue
                rates[cls] = level
                for link, weight in cls.route:
                    if link in open_links:
                        space[link] -= level * weight * cls.count
                        weight_of[link] -= weight * cls.count
            open_links.discard(tightest)
            open_links = {link for link in open_links if weight_of[link] > _CLOSE}
        for cls in reach:
            rates.setdefault(cls, math.inf)
        return rates, levels

    def _disturbed(self, reach: dict[_Class, None], levels: dict[int, float]) -> list[_Class]:
        """Classes out of reach that have more than their share of a link that became full."""
        return [
            cls
            for link, level in levels.items()
            for cls in self._users[link]
            if cls not in reach and cls.rate > level * (1 + _CLOSE)
        ]

    def _set_rate(self, cls: _Class, rate: float, fresh: bool) -> None:
        if not fresh and abs(rate - cls.rate) <= _CLOSE * cls.rate:
            return
        self._settle(cls, self._now)
        if rate < math.inf:
            for link, weight in cls.route:
                self._load[link] += (rate - (cls.rate if cls.rate < math.inf else 0.0)) * weight * cls.count
        cls.rate = rate
        cls.version += 1
        if cls.waiting:
            left = max(0.0, cls.waiting[0][0] - cls.served)
            end = cls.at if rate == math.inf or not left else (cls.at + left / rate if rate > 0 else math.inf)
            heapq.heappush(self._ends, (end, cls.order, cls.version, cls))
