"""Sessions of engines: their stores and leases, and the release of both when an engine disconnects.

A session of an engine of this host lasts as long as the engine's connection to the arena socket. A session of an engine on
another host ends after ``REMOTE_IDLE_TTL_S`` without a call and without a lease. Slots that an engine may still write to are
freed only after a complete or abort, or when its connection ends. An engine that is too slow loses its store (``LOST``), but
its slots stay reserved until the connection ends, because its copy cannot be stopped. Read leases also expire by time: a reader
checks the clock after its copy.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, LeaseLost, PermissionDenied
from kvstore.core.limits import MAX_SESSIONS, MAX_SESSIONS_OVER_TCP
from kvstore.core.types import BlockKey, BlockRun, OperationId, SessionId, StoreOutcome
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


@dataclass(slots=True)
class _Store:
    grant: SlotGrant
    expires_s: float
    answer: tuple[bytes, bytes] | None = None
    """Outcomes and offsets as first answered, for a retry."""
    completed: dict[BlockKey, StoreOutcome] = field(default_factory=dict)
    expired: bool = False


@dataclass(slots=True)
class _Lease:
    blocks: Sequence[Block]
    expires_s: float


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
        self.leave_tenant: Callable[[], None] | None = None
        """Ends its use of the tenant's limit of sessions over TCP."""
        self.opened_s = self.used_s = now_s
        self.stores: OrderedDict[OperationId, _Store] = OrderedDict()
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

    def end(self, session_id: SessionId) -> None:
        """End a session, and release everything that it holds."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is None:
                return
            # removed under the lock: a concurrent call of the engine must not release them again
            stores, leases = list(session.stores.values()), list(session.leases.values())
            session.stores.clear()
            session.leases.clear()
        if session.leave_tenant is not None:
            session.leave_tenant()
        for store in stores:
            self._table.abandon(store.grant)
        for lease in leases:
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
        """Grant slots for a store: (outcomes, offsets) as they travel. A retry of the operation gets the same answer.

        Only an engine with the arena may store: slots are not cleared, so another one would publish earlier bytes as its blocks.

        Raises:
            PermissionDenied: the engine has not connected to the arena socket, or is on another host.
        """
        if not session.connected:
            self._counters.add(node_metrics.STORE_WITHOUT_ARENA)
            raise PermissionDenied("the session has no arena to write to; engines of other hosts store over the data plane")
        with self._lock:
            earlier = session.stores.get(operation)
            if earlier is not None and earlier.answer is not None:
                return earlier.answer
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                self._forget_finished(session)
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                raise CapacityExceeded("too many stores under way in this session", limit=MAX_STORES_PER_SESSION)
        if self._gate.closed:
            grant = self._gate.reject(session.namespace, run)
        else:
            grant = self._table.prepare(session.namespace, run, deadline_s, heads=heads)
        offsets = b"".join(slot.offset.to_bytes(8, "little") for slot in grant.slots.values())
        answer = (bytes(grant.outcomes), offsets)
        store = _Store(grant, self._clock.now_s() + self._prepare_ttl_s, answer)
        with self._lock:
            ended = self._sessions.get(session.session_id) is not session or operation in session.aborted
            raced = None if ended else session.stores.get(operation)
            if not ended and raced is None:
                session.stores[operation] = store
                return answer
        self._table.abandon(grant)
        if raced is not None and raced.answer is not None:
            return raced.answer
        raise LeaseLost("the session has ended, or the store was aborted")

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
            sessions = list(self._sessions.values())
            stale = [one.session_id for one in sessions if one.is_stale(now_s)]
            expired: list[_Lease] = []
            for session in sessions:
                ended = [lease_id for lease_id, lease in session.leases.items() if lease.expires_s < now_s]
                expired += [session.leases.pop(lease_id) for lease_id in ended]
                for operation, store in list(session.stores.items()):
                    if store.expires_s >= now_s:
                        continue
                    if not store.grant.slots:
                        del session.stores[operation]  # completed long ago: no retry will follow
                    elif not store.expired:
                        store.expired = True  # its slots stay reserved until the session ends
                        self._counters.add(node_metrics.STORES_EXPIRED)
        for lease in expired:
            self._counters.add(node_metrics.LEASES_EXPIRED)
            self._table.unpin(lease.blocks)
        for session_id in stale:
            self.end(session_id)
