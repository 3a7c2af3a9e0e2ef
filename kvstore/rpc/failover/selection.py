"""Choice of the metadata server of the next call. Pure: events in, decisions out.

1. Callers rank the servers by rendezvous hashing, so that clients spread evenly and keep their server if another one is added.
   If the servers do not share their whole state, RPCs that depend on it rank them by a common key, so that all callers use the
   same server.
2. A caller stays with its server. Each server has a circuit breaker. A refused or lost connection, and a server that is hung or
   acknowledges no published changes, open it at once. Timeouts open it after ``TIMEOUTS`` in a row. The next server in the
   ranking whose breaker is closed takes over.
3. While a breaker is open, the server is probed, one probe at a time, with pauses that double. The first answer closes it. When
   the last breaker opens, all servers are probed at once: one of them may be back.
4. A server that answers again is on trial: it is used only if no better server is left. It is probed further, and after it has
   answered for ``SETTLE_S`` (with jitter, so that callers do not return at once) its callers return to it. If it acknowledged no
   changes, they return after ``STALLED_SETTLE_S``: answered probes say nothing about changes.
5. If all breakers are open, no server is chosen, and callers fail at once until a probe is answered.
6. One of the servers that share their state plans, and the others forward plans to it. A forwarded answer names the planning
   server by an id that is not an address. So the caller tries the other servers in turn, one per call, until one of them answers
   without forwarding. That costs nothing: at worst, each of these calls is forwarded once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Final

TIMEOUTS: Final = 3
"""Timeouts in a row, without an answer between them, that open a breaker."""
SETTLE_S: Final = 5.0
"""Mean time for which a server must answer before its callers return to it."""
STALLED_SETTLE_S: Final = 60.0
"""The same for a server that acknowledged no changes."""
PROBE_FIRST_S: Final = 0.1
PROBE_MAX_S: Final = 2.0
"""Pauses between probes of a server that does not answer."""
PROBE_TRIAL_S: Final = 1.0
"""Pause between probes of a server on trial."""


class CallPlacement(StrEnum):
    """The servers to which callers send a call."""

    SPREAD = "spread"
    """Any server: callers spread over all of them."""
    SHARED = "shared"
    """Any server, if the servers share their whole state; else the same server for all callers."""
    PLANNER = "planner"
    """The server that plans, as far as answers have shown which one that is; else as ``SHARED``."""


class Failure(StrEnum):
    """What a failed call says about its server."""

    REFUSED = "refused"
    """No connection: the call was not sent."""
    UNAVAILABLE = "unavailable"
    """The connection was lost: the call may have been executed."""
    TIMEOUT = "timeout"
    """No answer in time."""
    HUNG = "hung"
    """The server answers neither calls nor probes."""
    STALLED = "stalled"
    """The server answers calls, but does not acknowledge published changes."""


class Reason(StrEnum):
    """Why a caller changed to another server."""

    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    HUNG = "hung"
    STALLED = "stalled"
    SHARED = "servers share their state"
    """The first answer about it, or another one than before."""
    PLANS = "another server plans"
    ANSWERS = "answers again"
    """A server that the caller prefers answers again, or was added in DNS."""
    REMOVED = "removed"
    """DNS no longer has the server."""


class Condition(StrEnum):
    """Condition of one server."""

    USABLE = "usable"
    TRIAL = "on_trial"
    AWAY = "away"


@dataclass(slots=True)
class _Health:
    """Health of one server: a breaker, and the time of its trial."""

    lost: Failure | None = None
    """Why the breaker is open; None: it is closed."""
    timeouts: int = 0
    unanswered: int = 0
    settled_s: float | None = None
    """End of the trial; None: the server is not on trial."""

    @property
    def condition(self) -> Condition:
        if self.lost is not None:
            return Condition.AWAY
        return Condition.USABLE if self.settled_s is None else Condition.TRIAL


@dataclass(frozen=True, slots=True)
class ServerChange:
    """A caller's change to another server; None: there is none."""

    before: str | None
    after: str | None
    reason: Reason


class ServerSelection:
    """State machine of the choice. Not thread-safe.

    Args:
        addresses: the servers; may be empty until a name is resolved.
        caller: name of this caller, by which it ranks the servers.
        uniform: returns a random number between 0 and 1.
        settle_s: see ``SETTLE_S``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        caller: str,
        *,
        uniform: Callable[[], float] = random.random,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._caller = caller
        self._uniform = uniform
        self._settle_s = settle_s
        self._health: dict[str, _Health] = {}
        self._shares_state = False
        self._planner = ""
        """Id of the planning server, if the last answer was forwarded."""
        self._forwarding: frozenset[str] = frozenset()
        """Servers that forward plans."""
        self._ranking_changes: dict[CallPlacement, Reason] = {}
        self._rankings: dict[CallPlacement, tuple[str, ...]] = {}
        self._current: dict[CallPlacement, str | None] = dict.fromkeys(CallPlacement)
        self.replace(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All servers."""
        return tuple(self._health)

    def replace(self, addresses: Sequence[str]) -> None:
        """Set the servers. Those that stay keep their state."""
        self._health = {address: self._health.get(address, _Health()) for address in addresses}
        self._forwarding &= self._health.keys()
        self._rank()

    def share_state(self, shares: bool) -> None:
        """Set whether the servers share their whole state. Until this is called, they do not."""
        if shares == self._shares_state:
            return
        self._shares_state = shares
        self._planner, self._forwarding = "", frozenset()
        self._ranking_changes = dict.fromkeys((CallPlacement.SHARED, CallPlacement.PLANNER), Reason.SHARED)
        self._rank()

    def planned(self, address: str, planner: str) -> bool:
        """Record an answer about plans.

        Args:
            address: the server that was called.
            planner: id of the server to which it forwarded the call; empty: it answered by itself.

        Returns:
            Whether another server may be called from now on.
        """
        if not self._shares_state or address not in self._health:
            return False
        if not planner:
            forwarding = frozenset(self._health) - {address}
        elif planner == self._planner:
            forwarding = self._forwarding | {address}
        else:
            forwarding = frozenset((address,))
        self._planner = planner
        if forwarding == self._forwarding:
            return False
        self._forwarding = forwarding
        self._ranking_changes[CallPlacement.PLANNER] = Reason.PLANS
        self._rank()
        return True

    def _rank(self) -> None:
        own = ranked(self._health, self._caller)
        shared = own if self._shares_state else ranked(self._health, "")
        planner = tuple(sorted(shared, key=self._forwarding.__contains__))
        self._rankings = {CallPlacement.SPREAD: own, CallPlacement.SHARED: shared, CallPlacement.PLANNER: planner}

    def current(self, placement: CallPlacement) -> str | None:
        """The server in use; None: there is none."""
        return self._current[placement]

    def condition(self, address: str) -> Condition:
        """Condition of a server."""
        return self._health[address].condition

    def settled(self) -> bool:
        """Whether all servers are usable, so that time alone changes nothing."""
        return all(health.condition is Condition.USABLE for health in self._health.values())

    def choose(self, placement: CallPlacement, now_s: float) -> tuple[str | None, ServerChange | None]:
        """Choose the server of the next call.

        Returns:
            Its address, or None if all breakers are open; and the change, if another server was in use before.
        """
        for health in self._health.values():
            if health.settled_s is not None and health.settled_s <= now_s:
                health.settled_s = None
        before = self._current[placement]
        after = self._best(placement, before)
        change = self._ranking_changes.pop(placement, Reason.ANSWERS)
        if after == before:
            return after, None
        self._current[placement] = after
        return after, ServerChange(before, after, self._reason(before, change))

    def others(self, placement: CallPlacement, tried: Collection[str]) -> tuple[str, ...]:
        """Servers for the repetition of a call, best first: those not tried yet, with a closed breaker."""
        return tuple(
            address for address in self._rankings[placement] if address not in tried and self._health[address].lost is None
        )

    def failed(self, address: str, failure: Failure) -> bool:
        """Record a failed call. Returns whether it opened the server's breaker, so that probes must begin."""
        health = self._health.get(address)
        if health is None or health.lost is not None:
            return False
        health.timeouts += failure is Failure.TIMEOUT
        if failure is Failure.TIMEOUT and health.timeouts < TIMEOUTS:
            return False
        health.lost = failure
        health.unanswered = 0
        health.settled_s = None
        return True

    def answered(self, address: str) -> None:
        """Record that a server answered a call, even with an error."""
        health = self._health.get(address)
        if health is not None:
            health.timeouts = 0

    def probe_ended(self, address: str, *, answered: bool, now_s: float) -> float | None:
        """Record the end of a probe.

        Returns:
            The pause before the next probe; None: the server needs none.
        """
        health = self._health.get(address)
        if health is None:
            return None
        if not answered:
            if health.lost is None:
                health.lost, health.settled_s = Failure.TIMEOUT, None
            health.unanswered += 1
            return self._jittered(min(PROBE_MAX_S, PROBE_FIRST_S * 2 ** min(health.unanswered - 1, 10)))
        if health.lost is not None:
            settle_s = STALLED_SETTLE_S if health.lost is Failure.STALLED else self._settle_s
            health.lost, health.timeouts = None, 0
            health.settled_s = now_s + self._jittered(settle_s)
        if health.settled_s is None or health.settled_s <= now_s:
            return None
        return min(PROBE_TRIAL_S, health.settled_s - now_s)

    def _best(self, placement: CallPlacement, current: str | None) -> str | None:
        """The first usable server of the ranking, or the one in use if it is better than none; then one on trial."""
        trial = None
        for address in self._rankings[placement]:
            condition = self._health[address].condition
            if condition is Condition.USABLE:
                return trial if trial is not None and trial == current else address
            if condition is Condition.TRIAL and (trial is None or address == current):
                trial = address
        return trial

    def _reason(self, before: str | None, change: Reason) -> Reason:
        """Why another server is used now: ``before`` was lost or removed, else the ``change`` of the ranking."""
        if before is None:
            return Reason.ANSWERS
        health = self._health.get(before)
        if health is None:
            return Reason.REMOVED
        return change if health.lost is None else Reason(health.lost.value)

    def _jittered(self, mean_s: float) -> float:
        return mean_s * (0.75 + 0.5 * self._uniform())


def ranked(addresses: Collection[str], key: str) -> tuple[str, ...]:
    """Rank servers by rendezvous hashing, best first: each key has its own order, which other servers do not change."""

    def weight(address: str) -> bytes:
        return blake2b(f"{key}\0{address}".encode(), digest_size=8).digest()

    return tuple(sorted(addresses, key=lambda address: (weight(address), address)))
