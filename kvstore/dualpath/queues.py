"""Queues of planned reads per node: charged by planning, credited by progress, released at the end of a plan.

The planner keeps the ledger (one ``Charge`` per part); this module only adds up. A charge refers to the node's entry itself, so
that a node that left and rejoined under its name starts empty and old charges are not subtracted from it.

A long queue steers loads away from a link, so one plan must not add an unbounded amount. Of a plan's blocks at a node only
``QUEUE_S`` of reading count, at the rate measured at planning time. A link with such a queue is already the last choice for
every other load; more would add no information and would count for the life of the plan.
"""

from __future__ import annotations

from collections.abc import Container

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.dualpath.bandwidth import BandwidthEstimator
from kvstore.dualpath.contract import NodeState
from kvstore.dualpath.min_tracker import ShortestFirst

QUEUE_S = 10.0
"""Seconds of a link's reading that one plan counts for at most; above what the scheduler calls a long queue, the paper's 3 s."""


class _Entry:
    """One node. ``sending`` and ``receiving`` are bytes that wait to be forwarded out of and into it."""

    __slots__ = ("alive", "cnic", "link", "node", "pending_bytes", "pending_tokens", "receiving", "sending")

    def __init__(self, node: str, snic: float, cnic: float) -> None:
        self.node = node
        self.cnic = cnic
        self.alive = True
        self.link = BandwidthEstimator(snic)
        self.pending_bytes = self.pending_tokens = self.sending = self.receiving = 0


class _Debt:
    """All parts of one plan at one node: ``queued`` of its ``blocks`` count in the queues."""

    __slots__ = ("block_bytes", "block_tokens", "blocks", "forwarded", "most", "queued", "sink", "source", "stalled")

    def __init__(
        self, source: _Entry, sink: _Entry | None, most: int, block_bytes: int, block_tokens: int, *, forwarded: bool
    ) -> None:
        self.source = source
        self.sink = sink  # None also if it is not known
        self.most = most
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.forwarded = forwarded
        self.stalled = False
        self.blocks = self.queued = 0

    def add(self, blocks: int) -> None:
        """So many more (or fewer) are owed; the queues follow."""
        self.blocks += blocks
        queued = 0 if self.stalled else self.blocks
        if queued > self.most:
            queued = self.most
        more, self.queued = queued - self.queued, queued
        nbytes = more * self.block_bytes
        self.source.pending_bytes += nbytes
        self.source.pending_tokens += more * self.block_tokens
        if self.forwarded:
            self.source.sending += nbytes
        if self.sink is not None:
            self.sink.receiving += nbytes


class Charge:
    """Blocks of one part that count in the queues: ``blocks`` still to be read at its node and forwarded to the prefill node."""

    __slots__ = ("blocks", "debt")

    def __init__(self, debt: _Debt, blocks: int) -> None:
        self.debt = debt
        self.blocks = blocks


class ReadQueues:
    """Pending reads, rates and liveness of all nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Entry] = {}
        self._drain = ShortestFirst()  # seconds of pending reads, of nodes that are alive
        self._changed: dict[str, None] = {}  # names, not yet brought up to date there

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> list[str]:
        """Names of all nodes, dead ones too."""
        return list(self._nodes)

    def join(self, node: str, snic: float, cnic: float) -> None:
        """A node is there, with the bandwidths it was configured with, bytes/s. Known and unchanged: it is alive again.

        Raises:
            InvalidArgument: a bandwidth is not positive.
        """
        if not cnic > 0:
            raise InvalidArgument("bandwidth must be positive", node=node, bytes_per_second=cnic)
        entry = self._nodes.get(node)
        if entry is None or entry.link.configured != snic:
            self._nodes[node] = _Entry(node, snic, cnic)
        else:
            entry.alive, entry.cnic = True, cnic
        self._changed[node] = None

    def leave(self, node: str) -> None:
        """Stop giving work to a node; its pending reads remain until their plans end."""
        if (entry := self._nodes.get(node)) is not None:
            entry.alive = False
            self._drain.drop(node)

    def forget(self, node: str) -> None:
        """The node is known no longer."""
        if self._nodes.pop(node, None) is not None:
            self._drain.drop(node)

    def idlest(self, count: int, now: float, without: Container[str] = ()) -> list[str]:
        """Up to ``count`` nodes that are alive, those first that will have read soonest what is pending."""
        for node in self._changed:
            entry = self._nodes.get(node)
            if entry is not None and entry.alive:
                self._drain.set(node, entry.pending_bytes / entry.link.rate(now))
        self._changed.clear()
        return self._drain.least(count, without)

    def state(self, node: str, now: float) -> NodeState | None:
        """State of a node for a decision; None if it is not known."""
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
        """Whether the rate of a node's storage link was measured, as opposed to configured."""
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
    ) -> Charge:
        """Charge blocks to ``node`` and, if ``sink`` is given, their forwarding to it.

        Args:
            node: the reading node.
            sink: the prefill node.
            blocks: number of blocks.
            block_bytes: bytes of each.
            block_tokens: tokens of each.
            now: current time.
            beside: a charge of the same plan at this node: both together count at most as much as one may.

        Raises:
            NotFound: the node is not known.
        """
        source = self._nodes.get(node)
        if source is None:
            raise NotFound("node is not known", node=node)
        source.link.credit(0, now, source.pending_bytes)
        if beside is not None and beside.debt.source is source:
            debt = beside.debt
        else:
            into = self._nodes.get(sink) if sink is not None else None
            most = max(1, int(source.link.rate(now) * QUEUE_S / block_bytes))
            debt = _Debt(source, into, most, block_bytes, block_tokens, forwarded=sink is not None)
        debt.add(blocks)
        self._settle(source, now)
        return Charge(debt, blocks)

    def doubt(self, charge: Charge, now: float, *, stalled: bool) -> None:
        """Exclude a stalled plan's blocks at a node from the queue (``stalled``), or include them again."""
        debt = charge.debt
        debt.source.link.credit(0, now, debt.source.pending_bytes)
        debt.stalled = stalled
        debt.add(0)
        self._settle(debt.source, now)

    def credit(self, charge: Charge, blocks: int, now: float, *, moved: bool) -> int:
        """Takes up to ``blocks`` off a charge.

        Args:
            charge: as returned by ``charge``.
            blocks: how many; more than are owed counts as all.
            now: when.
            moved: they were really read (and so tell of the bandwidth), not given back.

        Returns:
            Blocks taken off.
        """
        if blocks > charge.blocks:
            blocks = charge.blocks
        debt = charge.debt
        debt.source.link.credit(blocks * debt.block_bytes if moved else 0, now, debt.source.pending_bytes)
        charge.blocks -= blocks
        debt.add(-blocks)
        self._settle(debt.source, now)
        return blocks

    def _settle(self, source: _Entry, now: float) -> None:
        """A queue has changed: its link is busy as long as there is anything in it."""
        if source.pending_bytes:
            source.link.begin(now)
        else:
            source.link.end(now)
        self._changed[source.node] = None
