"""The event loop: what happens when, in order of time and then of scheduling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from kvstore.core.errors import Internal
from kvstore.simulate.network.fluid import FluidNetwork


class EventLoop:
    """Simulated time. Ends of flows come from the network, everything else from the heap."""

    def __init__(self, network: FluidNetwork) -> None:
        self.now = 0.0
        self.network = network
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run ``action`` at the time ``when``.

        Raises:
            Internal: ``when`` is in the past, or infinite.
        """
        if not self.now <= when < math.inf:
            raise Internal("the time of an event must be finite and not before the present", when=when, now=self.now)
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` after this time."""
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Run the next event. False: there are no more events."""
        flow_end = self.network.next_end()
        when = self._heap[0][0] if self._heap else math.inf
        if flow_end <= when:
            if flow_end == math.inf:
                return False
            self.now = max(self.now, flow_end)
            for flow in self.network.take_ended(self.now):
                self.events += 1
                flow.ended()
            return True
        self.now = when
        self.events += 1
        heapq.heappop(self._heap)[2]()
        return True
