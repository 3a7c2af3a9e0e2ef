"""Sessions of engines: their stores and leases, and the release of both when an engine disconnects.

A session of an engine of this host lasts as long as the engine's connection to the arena socket. A session of an engine on
another host ends after ``REMOTE_IDLE_TTL_S`` without a call and without a lease. Slots that an engine may still write to are
freed only after a complete or abort, or when its connection ends. An engine that is too slow loses its store (``LOST``), and
others may store its blocks. But its slots stay reserved until it aborts the store or disconnects, because its copy cannot be
stopped. Read leases also expire by time: a reader checks the clock after its copy.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, LeaseLost, PermissionDenied
from kvstore.core.limits import MAX_SESSIONS, MAX_SESSIONS_OVER_TCP
from kvstore.core.types import BlockKey, BlockRun, OperationId, SessionId, StoreOutcome, VolumeId
from kvstore.node.base.cancellation import wait
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.auth.interceptor import TenantLimit

MAX_STORES_PER_SESSION = 256
MAX_LEASES_PER_SESSION = 4096
UNCONNECTED_TTL_S = 10.0
"""A session whose engine never connected to the arena socket ends after this."""
REMOTE_IDLE_TTL_S = 60.0
"""The session of an engine on another host ends after this long without a call and without a lease."""
_COPIES = ", copies on "
"""In the name of a client: what follows says how its device copies."""
_MOST_SHOWN = 32


@dataclass(slots=True)
class _Store:
    grant: SlotGrant
    expires_s: float
    answer: tuple[bytes, bytes]
    """Outcomes and offsets as first answered, for a retry."""
    completed: dict[BlockKey, StoreOutcome] = field(default_factory=dict)
    expired: bool = False


@dataclass(slots=True)
class _Lease:
    blocks: Sequence[Block]
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Held:
    """What a session held when it was removed."""

    stores: Sequence[_Store]
    leases: Sequence[_Lease]
    leave_tenant: Callable[[], None] | None


class Session:
    """One session. ``Sessions`` guards its state."""

    def __init__(
        self, session_id: SessionId, namespace: NodeNamespace, name: str, now_s: float, *, remote: bool, over_tcp: bool = False
    ) -> None:
        self.session_id = session_id
        self.namespace = namespace
        self.name = name
        self.remote = remote
        self.over_tcp = over_tcp
        self.connected = False
        self.volume_ids: Sequence[VolumeId] = ()
        """Volumes that its engine reads directly: the list that it got when the session was opened."""
        self.leave_tenant: Callable[[], None] | None = None
        """Ends its use of the tenant's limit of sessions over TCP."""
        self.opened_s = self.used_s = now_s
        self.stores: OrderedDict[OperationId, _Store] = OrderedDict()
        self.granting: set[OperationId] = set()
        """Stores that wait for slots now."""
        self.leases: dict[int, _Lease] = {}
        self.aborted: OrderedDict[OperationId, None] = OrderedDict()
        """Aborted stores. If the Prepare of one has not ended, its slots are freed when it does."""

    def is_stale(self, now_s: float) -> bool:
        """Return whether the engine can no longer use the session."""
        if self.remote:
            return not self.leases and self.used_s + REMOTE_IDLE_TTL_S < now_s
        return not self.connected and self.opened_s + UNCONNECTED_TTL_S < now_s


class Sessions:
    """All sessions of a node. Thread-safe."""

    def __init__(
        self, table: BlockTable, gate: AdmissionGate, counters: Counters, clock: Clock, *, lease_s: float, prepare_ttl_s: float
    ) -> None:
        self._table = table
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self._lease_s = lease_s
        self._prepare_ttl_s = prepare_ttl_s
        self._lock = threading.Lock()
        self._granted = threading.Condition(self._lock)
        self._sessions: dict[SessionId, Session] = {}
        self._over_tcp = TenantLimit("sessions over TCP", MAX_SESSIONS_OVER_TCP, counters.add)
        self._next_lease = 1

    # ---------------------------------------------------------------- sessions
    def open(self, namespace: NodeNamespace, name: str, *, remote: bool = False, over_tcp: bool = False) -> Session:
        """Open a session. An engine of this host must connect to the arena socket soon; a ``remote`` one must use the session.

        Sessions over TCP (``over_tcp``) may be half of all sessions at most, so that callers of that port cannot lock out the
        engines of this host, which use the unix socket. Each tenant may have a part of the sessions over TCP.
        """
        now_s = self._clock.now_s()
        session = Session(SessionId(secrets.token_bytes(16)), namespace, name, now_s, remote=remote, over_tcp=over_tcp)
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                raise CapacityExceeded("too many sessions on this node", limit=MAX_SESSIONS)
            if over_tcp and sum(one.over_tcp for one in self._sessions.values()) >= MAX_SESSIONS_OVER_TCP:
                raise CapacityExceeded("too many sessions over TCP on this node", limit=MAX_SESSIONS_OVER_TCP)
            if over_tcp:
                session.leave_tenant = self._over_tcp.acquire()
            self._sessions[session.session_id] = session
        return session

    def connect(self, session_id: SessionId) -> bool:
        """Note that the engine connected to the arena socket. Returns False if the session is unknown or already connected."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.connected or session.remote:
                return False
            session.connected = True
            return True

    def engines(self) -> list[str]:
        """Return how connected engines with a KV cache on a device copied at the start of their sessions, without repetitions."""
        with self._lock:
            names = {session.name for session in self._sessions.values() if session.connected}
        return sorted(name for name in names if _COPIES in name and name.isprintable())[:_MOST_SHOWN]

    def end(self, session_id: SessionId) -> None:
        """End a session, and release everything that it holds."""
        with self._lock:
            session = self._sessions.get(session_id)
            held = None if session is None else self._remove(session)
        if held is not None:
            self._give_back(held)

    def _remove(self, session: Session) -> _Held:
        """Remove a session, under the lock: from then on, no call of the engine finds it, or releases what it held."""
        del self._sessions[session.session_id]
        held = _Held(list(session.stores.values()), list(session.leases.values()), session.leave_tenant)
        session.stores.clear()
        session.leases.clear()
        return held

    def _give_back(self, held: _Held) -> None:
        if held.leave_tenant is not None:
            held.leave_tenant()
        for store in held.stores:
            self._table.abandon(store.grant)
        for lease in held.leases:
            self._table.unpin(lease.blocks)
        self._counters.add(node_metrics.SESSIONS_ENDED)

    def get(self, session_id: SessionId) -> Session:
        """Return a session.

        Raises:
            LeaseLost: the session has ended.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise LeaseLost("the session has ended; open another")
        session.used_s = self._clock.now_s()
        return session

    def count(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    # ---------------------------------------------------------------- stores
    def prepare(
        self, session: Session, operation: OperationId, run: BlockRun, deadline_s: float, *, heads: bool = False
    ) -> tuple[bytes, bytes]:
        """Grant slots for a store: (outcomes, offsets) as they travel. A retry of the operation gets the same slots.

        A retry waits for an earlier attempt that has not ended. An answer without slots is not kept: space may be free by now.
        Only an engine with the arena may store: slots are not cleared, so another one would publish earlier bytes as its blocks.

        Raises:
            PermissionDenied: the engine has not connected to the arena socket, or is on another host.
            CapacityExceeded: the session has too many stores.
            DeadlineExceeded: an earlier attempt has not ended.
            LeaseLost: the session has ended, or the store was aborted.
        """
        if not session.connected:
            self._counters.add(node_metrics.STORE_WITHOUT_ARENA)
            if session.remote:
                raise PermissionDenied("an engine of another host cannot write to the arena: store over the data plane")
            raise PermissionDenied("the session has not mapped the arena: connect to the arena socket before the first store")
        with self._lock:
            while operation in session.granting:
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0 or not wait(self._granted, left_s, self._counters):
                    raise DeadlineExceeded("an earlier attempt of this store still waits for slots")
            if (earlier := session.stores.get(operation)) is not None:
                return earlier.answer
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                self._forget_finished(session)
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                raise CapacityExceeded("too many stores under way in this session", limit=MAX_STORES_PER_SESSION)
            session.granting.add(operation)
        grant = SlotGrant(session.namespace, run, [])
        try:
            if self._gate.closed:
                grant = self._gate.reject(session.namespace, run)
            else:
                grant = self._table.prepare(session.namespace, run, deadline_s, heads=heads)
        finally:
            answer = self._end_granting(session, operation, grant)
        if answer is None:
            self._table.abandon(grant)
            raise LeaseLost("the session has ended, or the store was aborted")
        return answer

    def _end_granting(self, session: Session, operation: OperationId, grant: SlotGrant) -> tuple[bytes, bytes] | None:
        """Keep the slots of an attempt for its retries.

        Returns:
            Its answer; None: the session has ended, or the store was aborted. Then the slots are the caller's.
        """
        with self._lock:
            session.granting.discard(operation)
            self._granted.notify_all()
            if self._sessions.get(session.session_id) is not session or operation in session.aborted:
                return None
            answer = (bytes(grant.outcomes), b"".join(slot.offset.to_bytes(8, "little") for slot in grant.slots.values()))
            if grant.slots:
                session.stores[operation] = _Store(grant, self._clock.now_s() + self._prepare_ttl_s, answer)
            return answer

    def complete(
        self, session: Session, operation: OperationId, keys: Sequence[BlockKey], checksums: Sequence[bytes]
    ) -> list[StoreOutcome]:
        """Make written blocks visible. A retry gets the same answer."""
        with self._lock:
            store = session.stores.get(operation)
            if store is None or store.expired:
                self._counters.add(node_metrics.STORE_LOST_BLOCKS, len(keys))
                return [StoreOutcome.LOST] * len(keys)
            if not all(key in store.completed for key in keys):
                fresh = [index for index, key in enumerate(keys) if key not in store.completed]
                outcomes = self._table.complete(store.grant, [keys[i] for i in fresh], [checksums[i] for i in fresh])
                store.completed.update((keys[i], outcome) for i, outcome in zip(fresh, outcomes, strict=True))
            return [store.completed[key] for key in keys]

    def abort(self, session: Session, operation: OperationId) -> None:
        """Abort a store. The engine no longer writes to its slots."""
        with self._lock:
            store = session.stores.pop(operation, None)
            if store is not None:
                self._table.abandon(store.grant)
                return
            session.aborted[operation] = None
            if len(session.aborted) > MAX_STORES_PER_SESSION:
                session.aborted.popitem(last=False)

    @staticmethod
    def _forget_finished(session: Session) -> None:
        for operation in [
            operation for operation, store in session.stores.items() if not store.grant.slots and not store.expired
        ]:
            del session.stores[operation]

    # ---------------------------------------------------------------- leases
    def lease(self, session: Session, blocks: Sequence[Block]) -> int:
        """Take over the pins of ``blocks`` until release, expiry or the end of the session.

        Raises:
            LeaseLost: the session has ended. The blocks are unpinned.
            CapacityExceeded: the session has too many leases. The blocks are unpinned.
        """
        with self._lock:
            ended = self._sessions.get(session.session_id) is not session
            if not ended and len(session.leases) < MAX_LEASES_PER_SESSION:
                lease_id, self._next_lease = self._next_lease, self._next_lease + 1
                session.leases[lease_id] = _Lease(blocks, self._clock.now_s() + self._lease_s)
                return lease_id
        self._table.unpin(blocks)
        if ended:
            raise LeaseLost("the session has ended; open another")
        raise CapacityExceeded("too many leases in this session; release some", limit=MAX_LEASES_PER_SESSION)

    def release(self, session: Session, lease_ids: Sequence[int]) -> None:
        """End leases. Unknown ones are ignored, as they may have expired."""
        with self._lock:
            ended = [lease for lease_id in lease_ids if (lease := session.leases.pop(lease_id, None)) is not None]
        for lease in ended:
            self._table.unpin(lease.blocks)

    # ---------------------------------------------------------------- expiry
    def expire(self) -> None:
        """End expired stores, leases and sessions. The daemon calls this about twice per second."""
        now_s = self._clock.now_s()
        with self._lock:
            # removed in the same step: an engine that connects now finds no session, or one that is not stale
            stale = [self._remove(one) for one in list(self._sessions.values()) if one.is_stale(now_s)]
            expired: list[_Lease] = []
            for session in self._sessions.values():
                ended = [lease_id for lease_id, lease in session.leases.items() if lease.expires_s < now_s]
                expired += [session.leases.pop(lease_id) for lease_id in ended]
                for operation, store in list(session.stores.items()):
                    if store.expires_s >= now_s:
                        continue
                    if store.grant.slots:
                        store.expired = True
                        self._table.revoke(store.grant)  # its slots stay reserved until it is aborted, or the session ends
                        self._counters.add(node_metrics.STORES_EXPIRED)
                    elif not store.expired:
                        del session.stores[operation]  # completed long ago: no retry will follow
        for lease in expired:
            self._counters.add(node_metrics.LEASES_EXPIRED)
            self._table.unpin(lease.blocks)
        for held in stale:
            self._give_back(held)
