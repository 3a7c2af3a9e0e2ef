"""Reads at other nodes that a load waits for, and nodes that did not answer: the reason for otherwise unexplained time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId, Outcome

MAX_NODES: Final = 64
"""Nodes that are remembered per load."""
Answered = Callable[[Iterable[Outcome]], None]
_UNANSWERED: Final = frozenset({Outcome.TIMEOUT, Outcome.UNAVAILABLE})


class PeerWaits:
    """Reads of one load at other nodes. Thread-safe: each thread of the load writes its own entry.

    Args:
        clock: time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outstanding: dict[object, tuple[NodeId, float]] = {}
        """Reads that have not ended: the node, and when the read began."""
        self._unanswered_s: dict[NodeId, float] = {}
        """Nodes that did not answer, and the longest wait for each."""

    def record_in_context(self) -> None:
        """Record reads that begin in the current context from now on."""
        _current.set(self)

    def slowest(self) -> tuple[NodeId, float] | None:
        """Return the unanswering node with the longest wait, and that wait in seconds. None: all nodes answered."""
        now_s = self._clock.now_s()
        waits = dict(self._unanswered_s)
        for node_id, began_s in list(self._outstanding.values()):
            waits[node_id] = max(waits.get(node_id, 0.0), now_s - began_s)
        return max(waits.items(), key=lambda entry: entry[1]) if waits else None

    @contextmanager
    def record(self, node_id: NodeId) -> Iterator[Answered]:
        """Record one read: see ``waiting_for``."""
        began_s = self._clock.now_s()
        read = object()
        self._outstanding[read] = node_id, began_s
        all_answered = False

        def answered(outcomes: Iterable[Outcome]) -> None:
            nonlocal all_answered
            all_answered = not _UNANSWERED.intersection(outcomes)

        try:
            yield answered
        finally:
            del self._outstanding[read]
            if not all_answered and (node_id in self._unanswered_s or len(self._unanswered_s) < MAX_NODES):
                self._unanswered_s[node_id] = max(self._unanswered_s.get(node_id, 0.0), self._clock.now_s() - began_s)


_current: ContextVar[PeerWaits | None] = ContextVar("kvstore_peer_waits", default=None)


@contextmanager
def waiting_for(node_id: NodeId) -> Iterator[Answered]:
    """Inside, the load of the current context waits for a node.

    Yields:
        A function to be called with the outcomes of the node's answer.
    """
    waits = _current.get()
    if waits is None:
        yield _ignore
        return
    with waits.record(node_id) as answered:
        yield answered


def _ignore(_outcomes: Iterable[Outcome]) -> None:
    """Record nothing: the work belongs to no load."""
