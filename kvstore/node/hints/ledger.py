"""Which blocks hints protect. Pure: hints and times in, keys out.

1. A session protects a prefix of its chain: the longest that fits into its tenant's limit. Blocks that several sessions of a
   namespace protect count once, and are protected until the last of these sessions ends or expires.
2. A session beyond the limit displaces sessions of the same tenant that matter less: first those of lower priority, then those
   whose next turn is expected later. It never displaces sessions of other tenants.
3. A session protects nothing after its time to live, or once it has ended.
4. A long chain is kept in parts of ``PART_KEYS`` keys, so that a caller can release its lock between two parts. Within a session,
   later parts lose their protection first. For the same reason one call displaces at most ``DISPLACED_AT_ONCE`` parts.
5. Shared blocks cost their tenant nothing, but each session keeps its own list of keys. So the keys of all lists of a tenant are
   limited too. At this limit, a session protects fewer blocks and displaces no other session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvstore.core.errors import CapacityExceeded
from kvstore.core.limits import MAX_HINTED_KEYS_OF_TENANT, MAX_HINTED_SESSIONS, MAX_HINTED_SESSIONS_OF_TENANT
from kvstore.core.types import BlockKey


class HintedNamespace(Protocol):
    """A namespace whose blocks may be protected."""

    hinted: dict[BlockKey, int]
    """Number of sessions that protect a block, by key."""


class SessionHint(NamedTuple):
    """An application's hint about one of its sessions.

    Attributes:
        name: of the session, unique in its namespace.
        keys: of its chain, from the head, each once.
        keep_s: how long the blocks are protected.
        next_turn_s: time until the next turn is expected; None: unknown.
        priority: a higher one displaces lower ones of the same tenant.
        read_ahead: whether the node reads the blocks into DRAM before the turn; False: the engine is on another host.
    """

    name: str
    keys: Sequence[BlockKey]
    keep_s: float
    next_turn_s: float | None = None
    priority: int = 0
    read_ahead: bool = True


class KeepResult(NamedTuple):
    """Result of ``HintLedger.keep``."""

    blocks: int
    """Leading blocks that are protected now."""
    released: Released
    """Keys that are protected no longer."""
    may_grow: bool
    """Whether the same call again may protect more: it displaced as many parts as one call may."""


class Limits(NamedTuple):
    """Bytes that may be protected."""

    of_tenant: int
    of_all: int


Released = dict[HintedNamespace, list[BlockKey]]
"""Keys that are protected no longer, by namespace."""

_NOT_DUE: Final = float("inf")
PART_KEYS: Final = 512
"""Keys of a part of a chain."""
DISPLACED_AT_ONCE: Final = 4
"""Maximum number of parts that lose their protection to one part of another session in one call."""


def parts_of(keys: Sequence[BlockKey]) -> list[Sequence[BlockKey]]:
    """Divide a chain into parts, at least one."""
    return [keys[start : start + PART_KEYS] for start in range(0, max(1, len(keys)), PART_KEYS)]


@dataclass(slots=True, eq=False)
class ProtectedSession:
    """One session, or a part of one, and the blocks that it protects."""

    tenant: str
    namespace: HintedNamespace
    name: str
    part: int
    """Number of the part in the session's chain."""
    keys: Sequence[BlockKey]
    priority: int
    until_s: float
    expected_s: float
    """When the next turn is expected; if unknown, when the protection ends."""
    due_s: float
    """As ``expected_s``, until it was reported by ``due``; infinite: unknown, or reported."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """A session of a larger rank is displaced first."""
        return -self.priority, self.expected_s, self.part

    def continues(self, other: ProtectedSession) -> bool:
        """Whether this is a later part of the same session."""
        return self.namespace is other.namespace and self.name == other.name and self.part > other.part


class HintLedger:
    """All protected sessions of a node. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[HintedNamespace, str, int], ProtectedSession] = {}
        self._of_tenant: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._block_bytes: dict[HintedNamespace, int] = {}
        """Size of a block of each namespace with protected blocks."""
        self.displaced = 0
        """Sessions that lost all of their protection to another one of their tenant, or to a smaller limit."""

    def __len__(self) -> int:
        """Number of sessions."""
        return self._of_tenant.total()

    def __bool__(self) -> bool:
        """Whether any block is protected: a later part may outlast the first part of its session."""
        return bool(self._sessions)

    @property
    def bytes_by_tenant(self) -> dict[str, int]:
        """Protected bytes of each tenant that has any."""
        return {tenant: size for tenant, size in self._bytes.items() if size}

    @property
    def sessions_by_tenant(self) -> dict[str, int]:
        """Protected sessions of each tenant that has any."""
        return {tenant: count for tenant, count in self._of_tenant.items() if count}

    def keys_of(self, namespace: HintedNamespace, name: str) -> list[BlockKey]:
        """Return the keys that a session protects, from the head; none: it is unknown."""
        found: list[BlockKey] = []
        part = 0
        while (session := self._sessions.get((namespace, name, part))) is not None:
            found += session.keys
            part += 1
        return found

    def keep(
        self,
        tenant: str,
        namespace: HintedNamespace,
        hint: SessionHint,
        block_bytes: int,
        limits: Limits,
        now_s: float,
        part: int = 0,
    ) -> KeepResult:
        """Protect a session, or a part of one, instead of the blocks that it protected before.

        A later part requires that the part before it is protected when this is called.

        Args:
            tenant: of the namespace.
            namespace: of the session.
            hint: the application's; its keys are those of the part.
            block_bytes: size of a block; it applies to all blocks of the namespace.
            limits: bytes that may be protected.
            now_s: present time.
            part: number of the part.

        Raises:
            CapacityExceeded: too many sessions; nothing has changed.
        """
        known = part or (namespace, hint.name, part) in self._sessions
        if not known and len(self) >= MAX_HINTED_SESSIONS:
            raise CapacityExceeded("too many sessions with hints on this node", limit=MAX_HINTED_SESSIONS)
        if not known and self._of_tenant[tenant] >= MAX_HINTED_SESSIONS_OF_TENANT:
            raise CapacityExceeded("too many sessions with hints of this tenant", limit=MAX_HINTED_SESSIONS_OF_TENANT)
        released: Released = {}
        self._release(self._sessions.get((namespace, hint.name, part)), released)
        if part and (namespace, hint.name, part - 1) not in self._sessions:
            return KeepResult(0, released, may_grow=False)
        self._set_block_bytes(tenant, namespace, block_bytes)
        until_s = now_s + hint.keep_s
        due_s = _NOT_DUE if hint.next_turn_s is None else now_s + hint.next_turn_s
        session = ProtectedSession(
            tenant,
            namespace,
            hint.name,
            part,
            (),
            hint.priority,
            until_s,
            expected_s=min(due_s, until_s),
            due_s=due_s if due_s < until_s and hint.read_ahead and not part else _NOT_DUE,
        )
        wanted = hint.keys[: max(0, MAX_HINTED_KEYS_OF_TENANT - self._keys[tenant])]
        may_grow = self._make_room(session, wanted, block_bytes, limits, released)
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
            self._sessions[namespace, hint.name, part] = session
            self._of_tenant[tenant] += not part
            self._keys[tenant] += len(kept)
            self._block_bytes[namespace] = block_bytes
        return KeepResult(len(kept), _still_unprotected(released), may_grow=may_grow)

    def end(self, namespace: HintedNamespace, name: str, part: int = 0) -> tuple[Sequence[BlockKey], Released]:
        """End a session, or a part of one.

        Returns:
            The keys that it protected, and those of them that no other session protects.
        """
        released: Released = {}
        session = self._sessions.get((namespace, name, part))
        self._release(session, released)
        return () if session is None else session.keys, released

    def over(self, now_s: float) -> list[ProtectedSession]:
        """Return sessions, and parts of them, whose time to live is over, for ``release``."""
        return [session for session in self._sessions.values() if session.until_s <= now_s]

    def release(self, session: ProtectedSession) -> Released:
        """End the protection of a session or part, unless it was replaced. Returns the keys that are protected no longer."""
        released: Released = {}
        if self._sessions.get((session.namespace, session.name, session.part)) is session:
            self._release(session, released)
        return _still_unprotected(released)

    def trim_one(self, of_tenant: Mapping[str, int], of_all: int) -> Released | None:
        """Release one session or part, if a limit is exceeded. Tenants are brought to their own limits before the limit of all.

        Args:
            of_tenant: bytes that each tenant may protect; a tenant without an entry has no limit of its own.
            of_all: bytes that all tenants may protect together. Beyond it, the tenant with the most protected bytes loses some.

        Returns:
            The keys that are protected no longer. None: no limit is exceeded.
        """
        held = self.bytes_by_tenant
        tenant = next((one for one, size in held.items() if size > of_tenant.get(one, size)), None)
        if tenant is None:
            if sum(held.values()) <= of_all:
                return None
            tenant = max(held, key=held.__getitem__)
        worst = max((one for one in self._sessions.values() if one.tenant == tenant), key=lambda one: one.rank)
        self.displaced += not worst.part
        return self.release(worst)

    def due(self, now_s: float, ahead_s: float) -> list[ProtectedSession]:
        """Return sessions whose next turn is expected within ``ahead_s``, each once."""
        found = [session for session in self._sessions.values() if session.due_s <= now_s + ahead_s]
        for session in found:
            session.due_s = _NOT_DUE
        return sorted(found, key=lambda session: session.rank)

    def _room(self, tenant: str, limits: Limits) -> int:
        return min(limits.of_tenant - self._bytes[tenant], limits.of_all - sum(self._bytes.values()))

    def _set_block_bytes(self, tenant: str, namespace: HintedNamespace, block_bytes: int) -> None:
        """Note the size of a namespace's blocks. It changes when the node gets its first volume or loses its last one."""
        if namespace in self._block_bytes:
            self._bytes[tenant] += len(namespace.hinted) * (block_bytes - self._block_bytes[namespace])
            self._block_bytes[namespace] = block_bytes

    def _make_room(
        self, session: ProtectedSession, wanted: Sequence[BlockKey], block_bytes: int, limits: Limits, released: Released
    ) -> bool:
        """Displace parts that matter less. Returns whether more of them could make more room."""
        counts = session.namespace.hinted
        needed = sum(key not in counts for key in wanted) * block_bytes
        if needed <= self._room(session.tenant, limits):
            return False
        rank, keys = session.rank, frozenset(wanted)
        others = [
            one for one in self._sessions.values() if one.tenant == session.tenant and (one.rank > rank or one.continues(session))
        ]
        others.sort(key=lambda one: (one.continues(session), one.rank))
        for _ in range(DISPLACED_AT_ONCE):
            if not others or needed <= self._room(session.tenant, limits):
                return False
            worst = others.pop()
            self.displaced += not worst.part
            self._release(worst, released)
            if worst.namespace is session.namespace:
                needed += sum(key in keys and key not in counts for key in worst.keys) * block_bytes
        return bool(others) and needed > self._room(session.tenant, limits)

    def _release(self, session: ProtectedSession | None, released: Released) -> None:
        if session is None:
            return
        del self._sessions[session.namespace, session.name, session.part]
        self._of_tenant[session.tenant] -= not session.part
        self._keys[session.tenant] -= len(session.keys)
        counts, free = session.namespace.hinted, released.setdefault(session.namespace, [])
        block_bytes = self._block_bytes[session.namespace]
        for key in session.keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                del counts[key]
                self._bytes[session.tenant] -= block_bytes
                free.append(key)
        if not counts:
            del self._block_bytes[session.namespace]


def _still_unprotected(released: Released) -> Released:
    """Leave out keys that are protected again."""
    return {
        namespace: free
        for namespace, keys in released.items()
        if (free := [key for key in dict.fromkeys(keys) if key not in namespace.hinted])
    }


class ChainEnd:
    """The end of an ended session's chain that no other chain shares, found part by part, the last part first.

    The end begins after the last block that is protected, or that has another child because other sessions forked there.
    """

    def __init__(self) -> None:
        self.complete = False
        """Whether the block was found at which the end begins."""
        self._found = False

    def take(self, keys: Sequence[BlockKey], children: dict[BlockKey, int], protected: dict[BlockKey, int]) -> list[BlockKey]:
        """Return the blocks of a part that belong to the end, the last one first.

        Args:
            keys: of the part, in the order of the chain.
            children: by key of each block that is in the tier: its number of children there.
            protected: keys that other sessions protect.
        """
        end: list[BlockKey] = []
        for key in reversed(keys):
            own_children = 1 if self._found else 0
            if self.complete or key in protected or children.get(key, 0) > own_children:
                self.complete = True
                break
            if key in children:
                end.append(key)
                self._found = True
        return end
