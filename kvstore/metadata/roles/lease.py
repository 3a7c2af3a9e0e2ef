"""One lease, as a server that wants it judges whether it holds it: a pure core. It reads no clock.

Theory of operation.

1. The index keeps the lease. It gives a free lease to whoever asks, and holds it for the time to live from when it received the
   last renewal of the holder.
2. The server cannot know when the index received a renewal, but not before it was sent. So the server counts the lease as valid
   for the time to live from *before* it sent the renewal, less a margin for clocks that run at different rates. Its end of the
   lease is always before that of the index.
3. The server compares with its own clock whenever it acts as the holder. A server that was stopped for longer finds the lease
   invalid as soon as it continues, before it hears from the index.
4. An answer that arrives late counts from its own renewal. A lost answer changes nothing: the lease ends, or the next renewal is
   answered.
5. A lease that was invalid for a moment is lost, even if the next renewal succeeds: in between, another server may have held it.

The clock is CLOCK_BOOTTIME, which counts the time while the host is suspended. All methods get the time as ``now_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_NEVER_S: Final = float("-inf")


class LeaseChange(StrEnum):
    """A lease was taken, or lost."""

    TAKEN = "taken"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewal that was sent.

    Attributes:
        number: renewals are numbered in the order in which they were sent.
        sent_s: time before it was sent.
    """

    number: int
    sent_s: float


class Lease:
    """A server's view of a lease.

    Args:
        ttl_s: time to live of the lease in the index.
        margin_s: how much earlier the server counts it as ended. It must exceed what the clocks of server and index can differ by
            within the time to live.
    """

    def __init__(self, ttl_s: float, margin_s: float) -> None:
        self._valid_for_s: Final = ttl_s - margin_s
        self._sent = 0
        self._answered = 0
        """Renewals up to this number no longer count, unless they were granted."""
        self._released = 0
        """Renewals up to this number no longer count at all."""
        self._until_s = _NEVER_S
        self._held = False

    def is_valid(self, now_s: float) -> bool:
        """Whether this server holds the lease."""
        return now_s < self._until_s

    # ---- events ----
    def renewal_sent(self, now_s: float) -> Renewal:
        """A renewal is about to be sent."""
        self._sent += 1
        return Renewal(self._sent, now_s)

    def renewal_granted(self, renewal: Renewal, now_s: float) -> list[LeaseChange]:
        """The index gave the lease to this server."""
        changes = self.tick(now_s)
        if renewal.number > self._released:
            self._answered = max(self._answered, renewal.number)
            self._until_s = max(self._until_s, renewal.sent_s + self._valid_for_s)
        return changes + self.tick(now_s)

    def renewal_refused(self, renewal: Renewal, now_s: float) -> list[LeaseChange]:
        """Another server holds the lease."""
        if renewal.number > self._answered:
            self._answered = renewal.number
            self._until_s = _NEVER_S
        return self.tick(now_s)

    def released(self, now_s: float) -> list[LeaseChange]:
        """This server gives the lease up. Answers to earlier renewals no longer count."""
        self._released = self._answered = self._sent
        self._until_s = _NEVER_S
        return self.tick(now_s)

    def tick(self, now_s: float) -> list[LeaseChange]:
        """Time passed."""
        held = self.is_valid(now_s)
        if held == self._held:
            return []
        self._held = held
        return [LeaseChange.TAKEN if held else LeaseChange.LOST]
