"""Queues of planned reads per node: charged by planning, credited by progress, released at the end of a plan.

The planner has one ``Charge`` per part; this module only adds up the charges. A charge refers to the entry of the node, not to
its name. So a node that leaves and joins again starts with an empty queue, and old charges are not subtracted from it.

A long queue steers loads away from a link, so one plan must not add an unbounded amount. Of a plan's blocks at a node only
``QUEUE_S`` of reading count, at the rate measured at planning time. A link with such a queue is already the last choice for
every other load; more would add no information and would count for the life of the plan. All plans of one tenant that is confined
by its token together count for at most the same time at a node, so a tenant cannot steer others away for longer by many plans.

The bandwidth of each link (``BandwidthEstimator``) is estimated from the same progress. It turns the bytes of a
queue into seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.dualpath.contract import NodeState

MEMORY_S = 0.5
"""Busy time after which a report weighs 1/e."""
RECOVERY_S = 30.0
"""Idle time after which an estimate has returned 63 % of the way to the configured rate."""
LEAST_SHARE = 1e-3
"""Floor of an estimate as a share of the configured rate: a stalled link stays comparable, and divisions stay finite."""
MOST_SHARE = 32.0
"""Upper bound of the estimate, as a multiple of the configured rate: it limits the effect of wrong reports."""


class BandwidthEstimator:
    """Estimator of the bandwidth of one storage link, from transfers.

    The estimate is the credited bytes divided by the time in which the queue was not empty. Both decay exponentially in *busy*
    time, so that idle gaps do not count and any number of parts may be in flight. A burst of reports only shifts bytes by a short
    time. A prior (the configured rate, weighted like one time constant) stabilises the start. While a link is idle, its estimate
    returns slowly to the configured rate, so that a link that was slow once is tried again.

    A queue that makes no progress loses its weight: of the time since the last bytes, only the time that the pending bytes would
    need counts. Otherwise a dead client, or one byte that is never reported, would lower the estimate for all.

    Args:
        configured: bytes/s assumed at the start.
    """

    __slots__ = ("_busy", "_bytes", "_idle", "_learnt", "_mark", "_since", "_waited", "configured")

    def __init__(self, configured: float) -> None:
        if not (configured > 0 and math.isfinite(configured)):
            raise InvalidArgument("bandwidth must be positive", bytes_per_second=configured)
        self.configured = configured
        self._bytes = configured * MEMORY_S
        self._busy = MEMORY_S
        self._mark = configured  # the estimate as of the last bytes
        self._waited = 0.0  # busy time that has counted since
        self._since: float | None = None  # settled until then; None while idle
        self._idle: float | None = None  # idle since then
        self._learnt = False  # bytes have arrived

    def begin(self, now: float) -> None:
        """Record that the queue is no longer empty."""
        if self._since is None:
            rate = self.rate(now)
            self._bytes = rate * self._busy
            self._mark, self._waited = rate, 0.0
            self._since, self._idle = now, None

    def end(self, now: float) -> None:
        """Record that the queue became empty."""
        if self._since is not None:
            self.credit(0, now)
            self._since, self._idle = None, now

    def credit(self, nbytes: int, now: float, pending: float = math.inf) -> None:
        """Record bytes that arrived, and the time that passed while the queue was not empty.

        Args:
            nbytes: bytes that arrived over this link since the last call.
            now: current time.
            pending: bytes in the queue since then.
        """
        if self._since is None:
            return
        passed = now - self._since
        if passed > 0:
            self._since = now
        else:
            passed = 0.0
        if not nbytes:
            left = pending / self._mark - self._waited
            if left < passed:
                passed = left
            if passed <= 0:
                return
            self._waited += passed
        kept = math.exp(-passed / MEMORY_S)
        self._busy = self._busy * kept + passed
        total, most = self._bytes * kept + nbytes, self.configured * MOST_SHARE * self._busy
        self._bytes = total if total < most else most
        if nbytes:
            self._learnt = True
            self._mark, self._waited = self.rate(now), 0.0

    def has_learnt(self, now: float) -> bool:
        """Return whether the estimate is mostly measured. After ``RECOVERY_S`` of idle time it is mostly configured again."""
        return self._learnt and (self._idle is None or now - self._idle < RECOVERY_S)

    def rate(self, now: float) -> float:
        """Return the estimate in bytes/s, greater than zero."""
        rate, least = self._bytes / self._busy, self.configured * LEAST_SHARE
        if rate < least:
            rate = least
        if self._idle is not None and now > self._idle:
            rate += (self.configured - rate) * -math.expm1(-(now - self._idle) / RECOVERY_S)
        return rate


class ShortestFirst:
    """Names ordered by their keys. Among equal keys, the name that was set first comes first.

    A sorted list: a change is a bisection and a move of pointers, some kilobytes for a thousand names. A decision therefore costs
    about the same for six nodes and for ten thousand.
    """

    __slots__ = ("_entries", "_order", "_tick")

    def __init__(self) -> None:
        self._order: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._order)

    def set(self, name: str, key: float) -> None:
        """Add a name, or change its key."""
        self.drop(name)
        self._tick += 1
        entry = self._entries[name] = (key, self._tick, name)
        insort(self._order, entry)

    def drop(self, name: str) -> None:
        """Remove a name, if it is present."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def least(self, count: int, without: Container[str] = ()) -> list[str]:
        """Return up to ``count`` names with the smallest keys, in order, except those in ``without``."""
        found: list[str] = []
        for _, _, name in self._order:
            if len(found) >= count:
                break
            if name not in without:
                found.append(name)
        return found


QUEUE_S = 10.0
"""Seconds of a link's reading that one plan counts for at most; above what the scheduler calls a long queue, the paper's 3 s."""


class _Entry:
    """Queue of one node. ``sending`` and ``receiving`` are bytes that wait to be forwarded from and to the node."""

    __slots__ = ("alive", "cnic", "link", "node", "pending_bytes", "pending_tokens", "receiving", "sending", "tenants")

    def __init__(self, node: str, snic: float, cnic: float) -> None:
        self.node = node
        self.cnic = cnic
        self.alive = True
        self.link = BandwidthEstimator(snic)
        self.pending_bytes = self.pending_tokens = self.sending = self.receiving = 0
        self.tenants: dict[str, _TenantReads] = {}


class _TenantReads:
    """Reads of all plans of one tenant at one node that count in its queue: at most ``most_bytes``."""

    __slots__ = ("most_bytes", "queued_bytes")

    def __init__(self) -> None:
        self.most_bytes = self.queued_bytes = 0


class _PlanReads:
    """All parts of one plan at one node. Of its unread ``blocks``, ``queued`` count in the queues, at most ``most``."""

    __slots__ = ("block_bytes", "block_tokens", "blocks", "forwarded", "most", "queued", "sink", "source", "stalled", "tenant")

    def __init__(
        self,
        source: _Entry,
        sink: _Entry | None,
        most: int,
        block_bytes: int,
        block_tokens: int,
        tenant: _TenantReads | None,
        *,
        forwarded: bool,
    ) -> None:
        self.source = source
        self.sink = sink  # None: nothing is forwarded, or the node is not known
        self.most = most
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.tenant = tenant
        self.forwarded = forwarded
        self.stalled = False
        self.blocks = self.queued = 0

    def add(self, blocks: int) -> None:
        """Add unread blocks (negative: subtract), and update the queues."""
        self.blocks += blocks
        queued = 0 if self.stalled else self.blocks
        if queued > self.most:
            queued = self.most
        tenant = self.tenant
        if tenant is not None:
            free_bytes = tenant.most_bytes - tenant.queued_bytes + self.queued * self.block_bytes
            queued = max(0, min(queued, free_bytes // self.block_bytes))
        more, self.queued = queued - self.queued, queued
        nbytes = more * self.block_bytes
        if tenant is not None:
            tenant.queued_bytes += nbytes
        self.source.pending_bytes += nbytes
        self.source.pending_tokens += more * self.block_tokens
        if self.forwarded:
            self.source.sending += nbytes
        if self.sink is not None:
            self.sink.receiving += nbytes


class Charge:
    """Unread ``blocks`` of one part, to be read at its node and forwarded to the prefill node."""

    __slots__ = ("blocks", "reads")

    def __init__(self, reads: _PlanReads, blocks: int) -> None:
        self.reads = reads
        self.blocks = blocks


class ReadQueues:
    """Pending reads, rates and liveness of all nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Entry] = {}
        self._drain = ShortestFirst()  # living nodes by the seconds that their pending reads take
        self._changed: dict[str, None] = {}  # nodes whose entry in _drain is out of date

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> list[str]:
        """Return the names of all nodes, including dead ones."""
        return list(self._nodes)

    def join(self, node: str, snic: float, cnic: float) -> None:
        """Add a node with its configured bandwidths in bytes/s. A known node becomes alive again and keeps its queue.

        Another bandwidth of the storage link than before begins a new estimate.

        Raises:
            InvalidArgument: a bandwidth is not positive.
        """
        if not cnic > 0:
            raise InvalidArgument("bandwidth must be positive", node=node, bytes_per_second=cnic)
        entry = self._nodes.get(node)
        if entry is None:
            self._nodes[node] = _Entry(node, snic, cnic)
        else:
            if entry.link.configured != snic:
                entry.link = BandwidthEstimator(snic)  # counts from the next charge or credit on
            entry.alive, entry.cnic = True, cnic
        self._changed[node] = None

    def leave(self, node: str) -> None:
        """Stop giving work to a node; its pending reads remain until their plans end."""
        if (entry := self._nodes.get(node)) is not None:
            entry.alive = False
            self._drain.drop(node)

    def forget(self, node: str) -> None:
        """Remove a node and its queue."""
        if self._nodes.pop(node, None) is not None:
            self._drain.drop(node)

    def idlest(self, count: int, now: float, without: Container[str] = ()) -> list[str]:
        """Return up to ``count`` living nodes, those with the shortest time of pending reads first."""
        for node in self._changed:
            entry = self._nodes.get(node)
            if entry is not None and entry.alive:
                self._drain.set(node, entry.pending_bytes / entry.link.rate(now))
        self._changed.clear()
        return self._drain.least(count, without)

    def state(self, node: str, now: float) -> NodeState | None:
        """Return the state of a node for a decision; None if it is not known."""
        entry = self._nodes.get(node)
        if entry is None:
            return None
        return NodeState(
            node,
            entry.alive,
            entry.pending_bytes,
            entry.pending_tokens,
            entry.link.rate(now),
            entry.cnic,
            entry.sending,
            entry.receiving,
        )

    def has_learnt(self, node: str, now: float) -> bool:
        """Return whether the rate of a node's storage link is measured rather than configured."""
        entry = self._nodes.get(node)
        return entry is not None and entry.link.has_learnt(now)

    def charge(
        self,
        node: str,
        sink: str | None,
        blocks: int,
        block_bytes: int,
        block_tokens: int,
        now: float,
        beside: Charge | None = None,
        tenant: str | None = None,
    ) -> Charge:
        """Charge blocks to ``node`` and, if ``sink`` is given, their forwarding to it.

        Args:
            node: the reading node.
            sink: the prefill node.
            blocks: number of blocks.
            block_bytes: bytes of each.
            block_tokens: tokens of each.
            now: current time.
            beside: an earlier charge of the same plan at this node; the limit of ``QUEUE_S`` applies to both together.
            tenant: tenant that the plan's client is confined to; the limit applies to all its plans together. None: the client is
                not confined, and only the limit per plan applies.

        Raises:
            NotFound: the node is not known.
        """
        source = self._nodes.get(node)
        if source is None:
            raise NotFound("node is not known", node=node)
        source.link.credit(0, now, source.pending_bytes)
        if beside is not None and beside.reads.source is source:
            reads = beside.reads
        else:
            sink_entry = self._nodes.get(sink) if sink is not None else None
            most = max(1, int(source.link.rate(now) * QUEUE_S / block_bytes))
            reads_of_tenant = None
            if tenant is not None:
                reads_of_tenant = source.tenants.setdefault(tenant, _TenantReads())
                reads_of_tenant.most_bytes = most * block_bytes
            reads = _PlanReads(source, sink_entry, most, block_bytes, block_tokens, reads_of_tenant, forwarded=sink is not None)
        reads.add(blocks)
        self._settle(source, now)
        return Charge(reads, blocks)

    def mark_stalled(self, charge: Charge, now: float, *, stalled: bool) -> None:
        """Exclude a stalled plan's blocks at a node from the queue (``stalled``), or include them again."""
        reads = charge.reads
        reads.source.link.credit(0, now, reads.source.pending_bytes)
        reads.stalled = stalled
        reads.add(0)
        self._settle(reads.source, now)

    def credit(self, charge: Charge, blocks: int, now: float, *, moved: bool) -> int:
        """Subtract up to ``blocks`` from a charge.

        Args:
            charge: as returned by ``charge``.
            blocks: number of blocks; more than the charge has counts as all of them.
            now: current time.
            moved: the blocks were read, so they count in the bandwidth estimate; False: they will not be read.

        Returns:
            Number of blocks subtracted.
        """
        if blocks > charge.blocks:
            blocks = charge.blocks
        reads = charge.reads
        reads.source.link.credit(blocks * reads.block_bytes if moved else 0, now, reads.source.pending_bytes)
        charge.blocks -= blocks
        reads.add(-blocks)
        self._settle(reads.source, now)
        return blocks

    def _settle(self, source: _Entry, now: float) -> None:
        """Mark the link as busy or idle after its queue changed."""
        if source.pending_bytes:
            source.link.begin(now)
        else:
            source.link.end(now)
        self._changed[source.node] = None
