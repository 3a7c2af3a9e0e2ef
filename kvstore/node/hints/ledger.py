"""Which blocks hints protect. Pure: hints and times in, keys out.

1. A session protects a prefix of its chain: the longest that fits into its tenant's limit. Blocks that several sessions of a
   namespace protect count once, and are protected until the last of these sessions ends or expires.
2. A session beyond the limit displaces sessions of its own tenant that matter less: first those of lower priority, then those
   whose next turn is expected later. It never displaces sessions of other tenants.
3. A session protects nothing after its time to live, or once it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvstore.core.errors import CapacityExceeded
from kvstore.core.limits import MAX_HINTED_SESSIONS, MAX_HINTED_SESSIONS_OF_TENANT
from kvstore.core.types import BlockKey


class HintedNamespace(Protocol):
    """A namespace whose blocks may be protected."""

    hinted: dict[BlockKey, int]
    """Number of sessions that protect a block, by key."""


class SessionHint(NamedTuple):
    """What an application says about one of its sessions.

    Attributes:
        name: of the session, unique in its namespace.
        keys: of its chain, from the head.
        keep_s: how long the blocks are protected.
        next_turn_s: time until the next turn is expected; None: unknown.
        priority: a higher one displaces lower ones of the same tenant.
    """

    name: str
    keys: Sequence[BlockKey]
    keep_s: float
    next_turn_s: float | None = None
    priority: int = 0


class Limits(NamedTuple):
    """Bytes that may be protected."""

    of_tenant: int
    of_all: int


Released = dict[HintedNamespace, list[BlockKey]]
"""Keys that are protected no longer, by namespace."""

_NOT_DUE: Final = float("inf")


@dataclass(slots=True, eq=False)
class ProtectedSession:
    """One session and the blocks that it protects."""

    tenant: str
    namespace: HintedNamespace
    name: str
    keys: Sequence[BlockKey]
    block_bytes: int
    priority: int
    until_s: float
    expected_s: float
    """When the next turn is expected; if unknown, when the protection ends."""
    due_s: float
    """As ``expected_s``, until it was reported by ``due``; infinite: unknown, or reported."""

    @property
    def rank(self) -> tuple[int, float]:
        """A session of a larger rank is displaced first."""
        return -self.priority, self.expected_s


class HintLedger:
    """All protected sessions of a node. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[HintedNamespace, str], ProtectedSession] = {}
        self._of_tenant: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.displaced = 0
        """Sessions that lost their protection to another one of their tenant, or to a smaller limit."""

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._sessions)

    @property
    def bytes_by_tenant(self) -> dict[str, int]:
        """Protected bytes of each tenant that has any."""
        return {tenant: size for tenant, size in self._bytes.items() if size}

    @property
    def sessions_by_tenant(self) -> dict[str, int]:
        """Protected sessions of each tenant that has any."""
        return {tenant: count for tenant, count in self._of_tenant.items() if count}

    def keys_of(self, namespace: HintedNamespace, name: str) -> Sequence[BlockKey]:
        """Return the keys that a session protects, from the head; none: it is unknown."""
        session = self._sessions.get((namespace, name))
        return () if session is None else session.keys

    def keep(
        self, tenant: str, namespace: HintedNamespace, hint: SessionHint, block_bytes: int, limits: Limits, now_s: float
    ) -> tuple[int, Released]:
        """Protect a session, instead of what it protected before.

        Returns:
            The number of leading blocks that it protects now, and the keys that are protected no longer.

        Raises:
            CapacityExceeded: too many sessions; nothing has changed.
        """
        known = (namespace, hint.name) in self._sessions
        if not known and len(self._sessions) >= MAX_HINTED_SESSIONS:
            raise CapacityExceeded("too many sessions with hints on this node", limit=MAX_HINTED_SESSIONS)
        if not known and self._of_tenant[tenant] >= MAX_HINTED_SESSIONS_OF_TENANT:
            raise CapacityExceeded("too many sessions with hints of this tenant", limit=MAX_HINTED_SESSIONS_OF_TENANT)
        released: Released = {}
        self._release(self._sessions.get((namespace, hint.name)), released)
        until_s = now_s + hint.keep_s
        due_s = _NOT_DUE if hint.next_turn_s is None else now_s + hint.next_turn_s
        expected_s = min(due_s, until_s)
        session = ProtectedSession(
            tenant,
            namespace,
            hint.name,
            (),
            block_bytes,
            hint.priority,
            until_s,
            expected_s,
            due_s if due_s < until_s else _NOT_DUE,
        )
        wanted = list(dict.fromkeys(hint.keys))
        self._make_room(session, wanted, limits, released)
        room = self._room(tenant, limits) // block_bytes
        kept: list[BlockKey] = []
        counts = namespace.hinted
        for key in wanted:
            if key not in counts:
                if room < 1:
                    break
                room -= 1
                self._bytes[tenant] += block_bytes
            counts[key] = counts.get(key, 0) + 1
            kept.append(key)
        if kept:
            session.keys = kept
            self._sessions[namespace, hint.name] = session
            self._of_tenant[tenant] += 1
        return len(kept), _still_unprotected(released)

    def end(self, namespace: HintedNamespace, name: str) -> tuple[Sequence[BlockKey], Released]:
        """End a session. Returns the keys that it protected, and those of them that no other session protects."""
        released: Released = {}
        session = self._sessions.get((namespace, name))
        self._release(session, released)
        return () if session is None else session.keys, released

    def expire(self, now_s: float) -> tuple[int, Released]:
        """End the protection of sessions whose time to live is over. Returns how many, and the keys."""
        released: Released = {}
        over = [session for session in self._sessions.values() if session.until_s <= now_s]
        for session in over:
            self._release(session, released)
        return len(over), _still_unprotected(released)

    def trim(self, tenant: str, limits: Limits) -> Released:
        """Bring a tenant down to its limit, after the limit became smaller."""
        released: Released = {}
        while self._bytes[tenant] and self._room(tenant, limits) < 0:
            worst = max((one for one in self._sessions.values() if one.tenant == tenant), key=lambda one: one.rank)
            self.displaced += 1
            self._release(worst, released)
        return _still_unprotected(released)

    def due(self, now_s: float, ahead_s: float) -> list[ProtectedSession]:
        """Return sessions whose next turn is expected within ``ahead_s``, each once."""
        found = [session for session in self._sessions.values() if session.due_s <= now_s + ahead_s]
        for session in found:
            session.due_s = _NOT_DUE
        return sorted(found, key=lambda session: session.rank)

    def _room(self, tenant: str, limits: Limits) -> int:
        return min(limits.of_tenant - self._bytes[tenant], limits.of_all - sum(self._bytes.values()))

    def _make_room(self, session: ProtectedSession, wanted: Sequence[BlockKey], limits: Limits, released: Released) -> None:
        counts = session.namespace.hinted
        needed = sum(key not in counts for key in wanted) * session.block_bytes
        if needed <= self._room(session.tenant, limits):
            return
        others = [one for one in self._sessions.values() if one.tenant == session.tenant and one.rank > session.rank]
        others.sort(key=lambda one: one.rank)
        while others and needed > self._room(session.tenant, limits):
            self.displaced += 1
            self._release(others.pop(), released)
            needed = sum(key not in counts for key in wanted) * session.block_bytes

    def _release(self, session: ProtectedSession | None, released: Released) -> None:
        if session is None:
            return
        del self._sessions[session.namespace, session.name]
        self._of_tenant[session.tenant] -= 1
        counts, free = session.namespace.hinted, released.setdefault(session.namespace, [])
        for key in session.keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                del counts[key]
                self._bytes[session.tenant] -= session.block_bytes
                free.append(key)


def _still_unprotected(released: Released) -> Released:
    """Leave out keys that are protected again."""
    return {
        namespace: free
        for namespace, keys in released.items()
        if (free := [key for key in dict.fromkeys(keys) if key not in namespace.hinted])
    }


def unshared_end(keys: Iterable[BlockKey], children: dict[BlockKey, int], protected: dict[BlockKey, int]) -> list[BlockKey]:
    """Return the end of an ended session's chain that no other chain shares, the last block first.

    The end begins behind the last block that is protected, or that has another child: there, other sessions forked.

    Args:
        keys: of the chain, from the head.
        children: by key of each block that is in the tier: its number of children there.
        protected: keys that other sessions protect.
    """
    end: list[BlockKey] = []
    for key in reversed(list(keys)):
        if key in protected or children.get(key, 0) > bool(end):
            break
        if key in children:
            end.append(key)
    return end
