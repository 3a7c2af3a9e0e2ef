"""Queues of planned reads, a node: charged when planned, credited by progress, given back when a plan ends.

The ledger of who is owed what lies with the planner (a ``Charge`` a part); this module only adds up. A charge keeps the node's
entry itself, so that a node that left and came back under its name starts empty and nothing old is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Container

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.dualpath.bandwidth import BandwidthEstimator
from kvstore.dualpath.contract import NodeState
from kvstore.dualpath.shortest import ShortestFirst


class _Entry:
    """One node. ``sending`` and ``receiving`` are bytes that wait to be forwarded out of and into it."""

    __slots__ = ("alive", "cnic", "link", "node", "pending_bytes", "pending_tokens", "receiving", "sending")

    def __init__(self, node: str, snic: float, cnic: float) -> None:
        self.node = node
        self.cnic = cnic
        self.alive = True
        self.link = BandwidthEstimator(snic)
        self.pending_bytes = self.pending_tokens = self.sending = self.receiving = 0


class Charge:
    """What one part owes to the queues: ``blocks`` still pending at the node that reads (and on the way to the prefill node)."""

    __slots__ = ("_forwarded", "_sink", "_source", "block_bytes", "block_tokens", "blocks")

    def __init__(
        self, source: _Entry, sink: _Entry | None, blocks: int, block_bytes: int, block_tokens: int, *, forwarded: bool
    ) -> None:
        self._source = source
        self._sink = sink  # None also where it is not known
        self._forwarded = forwarded
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens


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
        """The node gets no more work; what is pending there stays pending until its plans say otherwise."""
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
        """What a decision may see of a node; None if it is not known."""
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

    def charge(self, node: str, sink: str | None, blocks: int, block_bytes: int, block_tokens: int, now: float) -> Charge:
        """Blocks were planned to be read by ``node`` and, if ``sink`` is given, forwarded to it.

        Raises:
            NotFound: the node is not known.
        """
        source = self._nodes.get(node)
        if source is None:
            raise NotFound("node is not known", node=node)
        into = self._nodes.get(sink) if sink is not None else None
        charge = Charge(source, into, blocks, block_bytes, block_tokens, forwarded=sink is not None)
        source.link.credit(0, now, source.pending_bytes)
        source.link.begin(now)
        self._add(charge, blocks)
        self._changed[node] = None
        return charge

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
        blocks = min(blocks, charge.blocks)
        link = charge._source.link
        link.credit(blocks * charge.block_bytes if moved else 0, now, charge._source.pending_bytes)
        self._add(charge, -blocks)
        charge.blocks -= blocks
        if not charge._source.pending_bytes:
            link.end(now)
        self._changed[charge._source.node] = None
        return blocks

    @staticmethod
    def _add(charge: Charge, blocks: int) -> None:
        nbytes = blocks * charge.block_bytes
        source = charge._source
        source.pending_bytes += nbytes
        source.pending_tokens += blocks * charge.block_tokens
        if charge._forwarded:
            source.sending += nbytes
        if charge._sink is not None:
            charge._sink.receiving += nbytes
