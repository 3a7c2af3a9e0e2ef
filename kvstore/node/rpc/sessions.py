"""Engines on this host: what each has prepared and leased, and how it is all given back when the engine goes.

A session lasts as long as the engine's connection to the arena door. Slots that an engine may still be writing to are given
back only when it says so (complete, abort) or when that connection ends: an engine that merely takes too long loses its store
(``LOST``), but its slots rest until the connection ends, because nobody can stop its copy. Leases for reading end by time as
well: a reader checks the clock after its copy.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, LeaseLost, PermissionDenied
from kvstore.core.limits import MAX_SESSIONS
from kvstore.core.types import BlockKey, BlockRun, OperationId, SessionId, StoreOutcome
from kvstore.node.base.admission_gate import Gate
from kvstore.node.state.grants import StoreGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.auth.tenant_limits import TenantLimit

MAX_STORES_PER_SESSION = 256
MAX_LEASES_PER_SESSION = 4096
UNCONNECTED_TTL_S = 10.0
"""An opened session whose engine never came to the arena door ends after this."""
REMOTE_IDLE_TTL_S = 60.0
"""The session of an engine of another host ends after this long without a call and without a lease."""


@dataclass(slots=True)
class _Store:
    prepared: StoreGrant
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
    """One engine. Its methods are those of ``Sessions``, under the one lock."""

    def __init__(
        self, session_id: SessionId, namespace: NodeNamespace, name: str, now_s: float, *, remote: bool, over_tcp: bool = False
    ) -> None:
        self.session_id = session_id
        self.namespace = namespace
        self.name = name
        self.remote = remote
        self.over_tcp = over_tcp
        self.connected = False
        self.give_back: Callable[[], None] | None = None
        """Ends its place among those of its tenant over TCP."""
        self.opened_s = self.used_s = now_s
        self.stores: OrderedDict[OperationId, _Store] = OrderedDict()
        self.leases: dict[int, _Lease] = {}
        self.aborted: OrderedDict[OperationId, None] = OrderedDict()
        """Stores given up, perhaps before their Prepare has ended: its slots are then given back at once."""

    def stale(self, now_s: float) -> bool:
        """Whether nobody can be using it any more."""
        if self.remote:
            return not self.leases and self.used_s + REMOTE_IDLE_TTL_S < now_s
        return not self.connected and self.opened_s + UNCONNECTED_TTL_S < now_s


class Sessions:
    """All sessions of a node. Thread-safe."""

    def __init__(
        self, table: BlockTable, gate: Gate, counters: Counters, clock: Clock, *, lease_s: float, prepare_ttl_s: float
    ) -> None:
        self._table = table
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self._lease_s = lease_s
        self._prepare_ttl_s = prepare_ttl_s
        self._lock = threading.Lock()
        self._sessions: dict[SessionId, Session] = {}
        self._over_tcp = TenantLimit("sessions over TCP", MAX_SESSIONS // 2, counters.add)
        self._next_lease = 1

    # ---------------------------------------------------------------- life
    def open(self, namespace: NodeNamespace, name: str, *, remote: bool = False, over_tcp: bool = False) -> Session:
        """Begins a session. The engine must come to the arena door soon; one of another host (``remote``) must merely use it.

        Those that were asked for over TCP (``over_tcp``) take half of the places at most: whoever reaches that port cannot keep
        the engines of this host out, which come by the unix socket. A tenant's have a share of those places.
        """
        now_s = self._clock.now_s()
        session = Session(SessionId(secrets.token_bytes(16)), namespace, name, now_s, remote=remote, over_tcp=over_tcp)
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                raise CapacityExceeded("too many sessions on this node", limit=MAX_SESSIONS)
            if over_tcp and sum(one.over_tcp for one in self._sessions.values()) >= MAX_SESSIONS // 2:
                raise CapacityExceeded("too many sessions over TCP on this node", limit=MAX_SESSIONS // 2)
            if over_tcp:
                session.give_back = self._over_tcp.acquire()
            self._sessions[session.session_id] = session
        return session

    def connect(self, session_id: SessionId) -> bool:
        """The engine came to the arena door. False where the session is unknown or has come before."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.connected or session.remote:
                return False
            session.connected = True
            return True

    def end(self, session_id: SessionId) -> None:
        """The engine's connection ended: whatever it held is given back."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is None:
                return
            # taken out under the lock: a call of the engine's that is still under way must not give them back once more
            stores, leases = list(session.stores.values()), list(session.leases.values())
            session.stores.clear()
            session.leases.clear()
        if session.give_back is not None:
            session.give_back()
        for store in stores:
            self._table.abandon(store.prepared)
        for lease in leases:
            self._table.unpin(lease.blocks)
        self._counters.add(node_metrics.SESSIONS_ENDED)

    def get(self, session_id: SessionId) -> Session:
        """A session.

        Raises:
            LeaseLost: it has ended; open another.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise LeaseLost("this session has ended: open another")
        session.used_s = self._clock.now_s()
        return session

    def count(self) -> int:
        """Sessions open."""
        return len(self._sessions)

    # ---------------------------------------------------------------- stores
    def prepare(
        self, session: Session, operation: OperationId, run: BlockRun, deadline_s: float, *, heads: bool = False
    ) -> tuple[bytes, bytes]:
        """Slots for a store: (outcomes, offsets) as they travel. The same operation asked again gets the same answer.

        What is completed counts as written, and slots are not cleared: who never had the arena would publish, as blocks of its
        own, what others left there.

        Raises:
            PermissionDenied: the engine has not come to the arena door, or is one of another host.
        """
        if not session.connected:
            self._counters.add(node_metrics.STORE_WITHOUT_ARENA)
            raise PermissionDenied("a session without the arena cannot write to it: stores of other hosts take the data plane")
        with self._lock:
            earlier = session.stores.get(operation)
            if earlier is not None and earlier.answer is not None:
                return earlier.answer
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                self._forget_finished(session)
            if len(session.stores) >= MAX_STORES_PER_SESSION:
                raise CapacityExceeded("too many stores under way in this session", limit=MAX_STORES_PER_SESSION)
        if self._gate.shut:
            prepared = self._gate.refuse(session.namespace, run)
        else:
            prepared = self._table.prepare(session.namespace, run, deadline_s, heads=heads)
        offsets = b"".join(slot.offset.to_bytes(8, "little") for slot in prepared.slots.values())
        answer = (bytes(prepared.outcomes), offsets)
        store = _Store(prepared, self._clock.now_s() + self._prepare_ttl_s, answer)
        with self._lock:
            ended = self._sessions.get(session.session_id) is not session or operation in session.aborted
            raced = None if ended else session.stores.get(operation)
            if not ended and raced is None:
                session.stores[operation] = store
                return answer
        self._table.abandon(prepared)
        if raced is not None and raced.answer is not None:
            return raced.answer
        raise LeaseLost("this session has ended, or the store was given up")

    def complete(
        self, session: Session, operation: OperationId, keys: Sequence[BlockKey], checksums: Sequence[bytes]
    ) -> list[StoreOutcome]:
        """Makes written blocks visible; asked again, answers the same."""
        with self._lock:
            store = session.stores.get(operation)
            if store is None or store.expired:
                self._counters.add(node_metrics.STORE_LOST_BLOCKS, len(keys))
                return [StoreOutcome.LOST] * len(keys)
            if not all(key in store.completed for key in keys):
                fresh = [index for index, key in enumerate(keys) if key not in store.completed]
                outcomes = self._table.complete(store.prepared, [keys[i] for i in fresh], [checksums[i] for i in fresh])
                store.completed.update((keys[i], outcome) for i, outcome in zip(fresh, outcomes, strict=True))
            return [store.completed[key] for key in keys]

    def abort(self, session: Session, operation: OperationId) -> None:
        """The engine gives a store up and no longer touches its slots."""
        with self._lock:
            store = session.stores.pop(operation, None)
            if store is not None:
                self._table.abandon(store.prepared)
                return
            session.aborted[operation] = None
            if len(session.aborted) > MAX_STORES_PER_SESSION:
                session.aborted.popitem(last=False)

    @staticmethod
    def _forget_finished(session: Session) -> None:
        for operation in [
            operation for operation, store in session.stores.items() if not store.prepared.slots and not store.expired
        ]:
            del session.stores[operation]

    # ---------------------------------------------------------------- leases
    def lease(self, session: Session, blocks: Sequence[Block]) -> int:
        """Takes over the pins of ``blocks`` until release, expiry or the session's end.

        Raises:
            LeaseLost: the session has ended; the pins are given back.
        """
        with self._lock:
            if self._sessions.get(session.session_id) is session and len(session.leases) < MAX_LEASES_PER_SESSION:
                lease_id, self._next_lease = self._next_lease, self._next_lease + 1
                session.leases[lease_id] = _Lease(blocks, self._clock.now_s() + self._lease_s)
                return lease_id
        self._table.unpin(blocks)
        raise LeaseLost("this session has ended, or holds too many leases")

    def release(self, session: Session, lease_ids: Sequence[int]) -> None:
        """Ends leases; unknown ones are ignored (they may have expired)."""
        with self._lock:
            ended = [lease for lease_id in lease_ids if (lease := session.leases.pop(lease_id, None)) is not None]
        for lease in ended:
            self._table.unpin(lease.blocks)

    # ---------------------------------------------------------------- time
    def expire(self) -> None:
        """Ends what has run out of time. Called by the daemon every second or so."""
        now_s = self._clock.now_s()
        with self._lock:
            sessions = list(self._sessions.values())
            stale = [one.session_id for one in sessions if one.stale(now_s)]
            over: list[_Lease] = []
            for session in sessions:
                ended = [lease_id for lease_id, lease in session.leases.items() if lease.expires_s < now_s]
                over += [session.leases.pop(lease_id) for lease_id in ended]
                for operation, store in list(session.stores.items()):
                    if store.expires_s >= now_s:
                        continue
                    if not store.prepared.slots:
                        del session.stores[operation]  # done long ago: nobody will ask again
                    elif not store.expired:
                        store.expired = True  # its slots rest until the session ends
                        self._counters.add(node_metrics.STORES_EXPIRED)
        for lease in over:
            self._counters.add(node_metrics.LEASES_EXPIRED)
            self._table.unpin(lease.blocks)
        for session_id in stale:
            self.end(session_id)
