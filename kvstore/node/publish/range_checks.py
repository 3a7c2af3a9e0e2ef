"""Checks of key ranges that the metadata server asks for: which wait, and which were made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvproto.v1.metadata_pb2 import DrainNodeRequest, HeartbeatRequest, HeartbeatResponse, RegisterNodeResponse
from kvstore.core.limits import MAX_RANGE_CHECKS
from kvstore.rpc.codec import ranges_from_bitmap


@dataclass(frozen=True, slots=True)
class RequestedCheck:
    """One check.

    Args:
        token: its number.
        ranges: ranges of key space.
        lost: the index lost the ranges: publish all blocks of them again. Else compare them.
        tried: whether an attempt has ended.
    """

    token: int
    ranges: frozenset[int]
    lost: bool
    tried: bool = False


class RequestedChecks:
    """Checks of one node. Thread-safe. A ``HeartbeatListener``."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._due: dict[int, RequestedCheck] = {}
        self._sent: dict[int, int] = {}
        """Number of the publish batch with the last blocks of a check."""
        self._made: deque[int] = deque(maxlen=MAX_RANGE_CHECKS)
        self._woken = False

    # ---- heartbeats
    def report(self, heartbeat: HeartbeatRequest) -> None:
        """Add the checks that were made."""
        with self._lock:
            heartbeat.checked.extend(self._made)

    def on_heartbeat(self, response: HeartbeatResponse) -> None:
        """Take the checks that the server asks for; drop those that it no longer asks for.

        Comparisons that were not tried yet are kept: a routine round may take longer than the server asks.
        """
        with self._lock:
            asked = {check.token: check for check in response.checks[:MAX_RANGE_CHECKS]}
            untried = [token for token, check in self._due.items() if not (check.lost or check.tried)][-MAX_RANGE_CHECKS:]
            self._due = {token: check for token, check in self._due.items() if token in asked or token in untried}
            for token, check in asked.items():
                if token not in self._due and token not in self._made and token not in self._sent:
                    self._due[token] = RequestedCheck(token, ranges_from_bitmap(check.ranges), check.lost)
            self._lock.notify_all()

    def on_registered(
        self,
        response: RegisterNodeResponse,  # noqa: ARG002  # the contract's
        *,
        new_index: bool,  # noqa: ARG002  # the contract's
    ) -> Sequence[DrainNodeRequest]:
        """Nothing is to be repeated."""
        return ()

    def restarted(self) -> None:
        """The numbers of batches begin again, with an inventory. The server asks again for checks that it still needs."""
        with self._lock:
            self._due.clear()
            self._sent.clear()

    # ---- work
    def lost(self) -> list[RequestedCheck]:
        """Checks whose blocks must be published again."""
        with self._lock:
            return [check for check in self._due.values() if check.lost]

    def wait_for_suspects(self, timeout_s: float) -> RequestedCheck | None:
        """Wait for a check that compares ranges; None: there is none after the timeout, or ``wake`` was called."""
        with self._lock:
            self._lock.wait_for(lambda: self._woken or self._suspects(), timeout_s)
            suspects = self._suspects()
            return suspects[0] if suspects and not self._woken else None

    def _suspects(self) -> list[RequestedCheck]:
        return [check for check in self._due.values() if not check.lost]

    def wake(self) -> None:
        """End ``wait_for_suspects``, now and later."""
        with self._lock:
            self._woken = True
            self._lock.notify_all()

    def sent(self, token: int, sequence: int) -> None:
        """All blocks of a check were sent; the last of them in the batch with this number, or before."""
        with self._lock:
            if self._due.pop(token, None) is not None:
                self._sent[token] = sequence

    def acknowledged(self, sequence: int) -> None:
        """The index has all batches up to a number."""
        with self._lock:
            for token in [token for token, last in self._sent.items() if last <= sequence]:
                del self._sent[token]
                self._made.append(token)

    def compared(self, token: int, left: Collection[int]) -> None:
        """An attempt to compare suspect ranges has ended. If ranges are left, they are compared again after the other checks."""
        with self._lock:
            check = self._due.pop(token, None)
            if check is None:
                return
            if left:
                self._due[token] = replace(check, ranges=frozenset(left), tried=True)
            else:
                self._made.append(token)
