"""Which other nodes a load has asked, and which of them did not answer: the reason for time that nothing else explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId, Outcome

MOST_NODES: Final = 64
"""Nodes that are remembered of one load."""
Answered = Callable[[Iterable[Outcome]], None]
_UNANSWERED: Final = frozenset({Outcome.TIMEOUT, Outcome.UNAVAILABLE})


class PeersAsked:
    """The nodes that one load has asked. Threads of the load add to it: each entry is written by whoever asks that node.

    Args:
        clock: where time comes from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[object, tuple[NodeId, float]] = {}
        """Questions that are not answered: whom, and since when."""
        self._lost_s: dict[NodeId, float] = {}
        """Nodes that did not answer, and how long they were waited for."""

    def follow(self) -> None:
        """Take down what the current context asks from here on."""
        _current.set(self)

    def slowest(self) -> tuple[NodeId, float] | None:
        """The node that was waited for longest without an answer, and for how long; None: all answered."""
        now_s = self._clock.now_s()
        waited = dict(self._lost_s)
        for node_id, since_s in list(self._under_way.values()):
            waited[node_id] = max(waited.get(node_id, 0.0), now_s - since_s)
        return max(waited.items(), key=lambda entry: entry[1]) if waited else None

    @contextmanager
    def _asking(self, node_id: NodeId) -> Iterator[Answered]:
        began_s = self._clock.now_s()
        question = object()
        self._under_way[question] = node_id, began_s
        answered = False

        def note(outcomes: Iterable[Outcome]) -> None:
            nonlocal answered
            answered = not _UNANSWERED.intersection(outcomes)

        try:
            yield note
        finally:
            del self._under_way[question]
            if not answered and (node_id in self._lost_s or len(self._lost_s) < MOST_NODES):
                self._lost_s[node_id] = max(self._lost_s.get(node_id, 0.0), self._clock.now_s() - began_s)


_current: ContextVar[PeersAsked | None] = ContextVar("kvstore_peers_asked", default=None)


@contextmanager
def asking(node_id: NodeId) -> Iterator[Answered]:
    """While inside, the load of this context waits for a node. Call what it yields with the outcomes of the answer."""
    asked = _current.get()
    if asked is None:
        yield _nobody_follows
        return
    with asked._asking(node_id) as answered:
        yield answered


def _nobody_follows(_outcomes: Iterable[Outcome]) -> None:
    """For work that belongs to no load."""
