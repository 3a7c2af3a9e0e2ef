"""Loads through the node of this host. Its arena is mapped here, so a block costs one copy.

The node brings blocks from its own tiers and from the nodes that the lookup named, and leases them (see ``node_stream``). Blocks
that were copied after their lease had ended do not count and are requested once more.

A large load is a series of calls. While a device copies the blocks of one call, the next ones are requested, if the node has them
in DRAM: its answer then needs no space that the leases of the copied blocks hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass

import numpy as np

from kvclient.load.sink import BlockSink, LoadRequest, Mask, Positions, spans
from kvclient.load.sources.node_stream import NodeLoadStream, NodeMessage, NodeRun, copy_leased_blocks
from kvclient.memory.device_buffer import CopyEvent, DeviceBuffer
from kvclient.nodes.local_session import LocalNode, Session, is_session_lost
from kvclient.results import PATH_LOCAL, PATH_PREFILL, Outcomes, outcome_table
from kvstore.core.errors import DeadlineExceeded, KVStoreError
from kvstore.core.types import Outcome, Tier
from kvstore.observe.metric_definitions import client as client_metrics

_ARENA_SHARE = 4
"""A layer-wise load pins all its blocks until it ends. Beyond this fraction (1/n) of the arena, or once the node has to wait, it
continues block by block: else loads could wait for space that they hold themselves. The same limit applies to two calls whose
blocks are copied at once."""
_LEASE_SHARE = 4
"""A layer-wise load of more than ``load_chunk_bytes`` should take at most this fraction (1/n) of the lease, judged by earlier
loads. One that outlasts its leases brings nothing."""
COPY_THREADS = 2
"""For blocks that are in DRAM already: one thread reaches about half of the memory bandwidth."""
RETRIED_ELSEWHERE = outcome_table(Outcome.UNAVAILABLE, Outcome.NO_SPACE)
"""Outcomes of the local node after which another node is asked. It has asked the others itself before it answers MISS."""
FINAL = outcome_table(Outcome.MISS, Outcome.CORRUPT, Outcome.TIMEOUT)


class LocalNodeSource:
    """The node of this host."""

    def __init__(self, local: LocalNode) -> None:
        self._local = local
        self.asked_node: str | None = None
        """The node, once it was asked."""
        self.hung_node: str | None = None
        """The node, if it is hung: it would not answer at its data address either."""

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """See ``LoadSource``."""
        context = request.context
        with request.trace.phase("local node"):
            session = self._local.session()
            if session is None:
                sink.record_error(self._local.unavailable())
                self.hung_node = self._local.hung_node
                context.incidents.counters.add(client_metrics.LOADS_WITHOUT_SESSION)
                return
            self.asked_node = session.node_id
            others = [run.node for run in request.runs if run.node_id != session.node_id]
            with context.peers.watching(others) if others else nullcontext():
                _SessionLoad(request, self._local, session, sink, missing).run()
            sink.settle(missing)
            failed = sink.missing(missing)
            sink.give_up(failed[~RETRIED_ELSEWHERE[sink.outcomes[failed]]])


@dataclass(frozen=True, slots=True)
class _CopiesUnderWay:
    """Copies of one message to a device.

    Attributes:
        runs: its blocks, and which of them are good.
        begun: the copies, for ``DeviceBuffer.drain``.
        lease_ids: their leases.
        lease_bytes: bytes that these hold.
    """

    runs: Sequence[tuple[NodeRun, Mask]]
    begun: Sequence[CopyEvent]
    lease_ids: list[int]
    lease_bytes: int


class _SessionLoad:
    """One load through one session. ``run`` once."""

    def __init__(self, request: LoadRequest, local: LocalNode, session: Session, sink: BlockSink, missing: Positions) -> None:
        options, block_bytes = request.context.options, request.context.shape.block_bytes
        self._request = request
        self._context = request.context
        self._scope = request.scope
        self._local = local
        self._session = session
        self._sink = sink
        self._missing = missing
        self._runs = [run for run in request.runs if run.node_id != session.node_id]
        self._resident = np.zeros(len(request.chain), bool)
        """Blocks that the lookup saw in the arena of this node."""
        for run in request.runs:
            if run.node_id == session.node_id and run.tier is Tier.DRAM:
                self._resident[run.start : run.end] = True
        self._device = request.buffer if isinstance(request.buffer, DeviceBuffer) else None
        self._verifies = session.verifies_copies(request.verify)
        self._step = max(1, options.copy_chunk_bytes // block_bytes)
        """Whole blocks copied between two checks of the scope. A device gets all blocks of a message at once."""
        self._call_blocks = max(1, options.load_chunk_bytes // block_bytes)
        self._layerwise = request.layerwise and self._fits_layerwise()
        self._held: list[NodeRun] = []  # layer-wise: copied layer by layer after the stream
        self._good: list[Mask] = []  # per run held
        self._lease_ids: list[int] = []
        self._lease_bytes = 0
        self._most_ahead = int(self._device is not None and options.pieces_in_flight > 1)
        """Messages whose copies to a device may be under way when the blocks of another call are requested."""
        self._under_way: deque[_CopiesUnderWay] = deque()
        self._expired: list[tuple[int, int]] = []
        self._over = False

    def _fits_layerwise(self) -> bool:
        """Whether all blocks can be held at once, until all layers are copied."""
        blocks, size = len(self._missing), len(self._missing) * self._context.shape.block_bytes
        if size <= self._session.arena.size // _ARENA_SHARE and (blocks <= self._call_blocks or self._is_quick(size)):
            return True
        self._context.incidents.counters.add(client_metrics.LAYERWISE_TOO_LARGE)
        return False

    def _is_quick(self, size: int) -> bool:
        """Whether the node has all blocks in DRAM, and they will be copied long before a lease ends, as earlier loads were."""
        if self._verifies or not self._resident[self._missing].all():
            return False
        predicted_s = self._context.accounting.predictor.seconds_from(self._session.node_id, Tier.DRAM, size)
        return predicted_s is not None and predicted_s <= self._session.lease_s / _LEASE_SHARE

    def run(self) -> None:
        """Load the missing blocks, a bounded number of bytes per call; all in one call if the load is layer-wise."""
        pieces = self._pieces(spans(self._missing))
        try:
            with self._session.used():
                try:
                    for number, (start, stop) in enumerate(pieces):
                        self._load(start, stop, ahead=self._may_be_ahead(pieces[number : number + 2]))
                        self._load_expired()
                        if self._over:
                            break
                finally:
                    self._abandon()
        except KVStoreError as error:
            self._fail(error)

    def _pieces(self, stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Divide (start, stop) stretches into those of one call each."""
        step = len(self._missing) if self._layerwise else self._call_blocks
        return [(at, min(stop, at + step)) for start, stop in stretches for at in range(start, stop, step)]

    def _may_be_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Whether the second of these pieces may be requested before the first is copied."""
        if len(pieces) < 2 or not self._most_ahead:
            return False
        size = sum(stop - start for start, stop in pieces) * self._context.shape.block_bytes
        return size <= self._session.arena.size // _ARENA_SHARE and bool(self._resident[slice(*pieces[1])].all())

    def _load_expired(self) -> None:
        """Load blocks once more that were copied after their lease."""
        expired, self._expired = self._expired, []
        if expired and self._sink.restart(_positions(expired)):
            self._layerwise = False  # it was too slow
            for start, stop in self._pieces(spans(np.sort(_positions(expired)))):
                self._load(start, stop)

    def _abandon(self) -> None:
        """Wait for copies that an error has left under way. Their blocks do not count."""
        if not self._under_way and not self._lease_ids:
            return
        with suppress(KVStoreError):  # the error that ended the load is reported
            self._drain()
        while self._under_way:
            copies = self._under_way.popleft()
            self._lease_ids += copies.lease_ids
            self._lease_bytes += copies.lease_bytes
        self._release()

    # ---- one call ----
    def _load(self, start: int, stop: int, *, ahead: bool = False) -> None:
        """Request blocks ``[start, stop)`` and copy what the node brings.

        Args:
            start: first block.
            stop: one past the last block.
            ahead: once the node has answered for all blocks, return while a device still copies them.
        """
        if self._over or self._scope.ended:
            self._mark(start, stop, Outcome.TIMEOUT)
            self._finish(0)
            return
        answered = np.zeros(stop - start, bool)
        most_ahead, left = self._most_ahead if ahead else 0, 0
        stream = NodeLoadStream(
            self._request,
            self._session,
            self._scope,
            start,
            stop,
            self._runs,
            storage=False,
            want_checksums=self._verifies,
            resident=None if self._scope.cancellable or not self._resident[start:stop].all() else self._scope,
        )
        try:
            with closing(iter(stream)) as messages:
                for message in messages:
                    if not self._take(message, answered, start, most_ahead):
                        break
            if stream.error is not None:
                self._fail(stream.error)
            if self._layerwise:
                self._copy_layers(start + np.flatnonzero(answered))
            if not self._over and answered.all():
                left = most_ahead
        finally:
            self._finish(left)
            if not left:
                self._drain()  # whatever ended the call: leases may be released only after the last copy
                self._release()
            if not answered.all():
                outcome = Outcome.TIMEOUT if self._scope.ended else Outcome.UNAVAILABLE
                self._over |= self._scope.ended
                for first, last in spans(np.flatnonzero(~answered)):
                    self._mark(start + first, start + last, outcome)

    def _fail(self, error: KVStoreError) -> None:
        """Record a failure of the call, and stop."""
        self._over = True
        if self._scope.ended or isinstance(error, DeadlineExceeded):
            self._sink.record_error(self._scope.error())
            return
        self._sink.record_error(error)
        if is_session_lost(error) and not self._session.server.hung:
            self._local.lost(self._session, error)
        else:
            self._context.incidents.report(client_metrics.LOCAL_LOAD_FAILED, "local node refused a load", error)

    # ---- its messages ----
    def _take(self, message: NodeMessage, answered: Mask, base: int, most_ahead: int) -> bool:
        """Copy the leased blocks of one message, and release the lease. False: the scope has ended."""
        if message.lease_id:
            self._lease_ids.append(message.lease_id)
        hits = []
        for run in message.runs:
            answered[run.start - base : run.stop - base] = True
            if run.outcome is not Outcome.HIT:
                self._sink.outcomes[run.start : run.stop] = run.outcome
                continue
            hits.append(run)
            self._lease_bytes += (run.stop - run.start) * self._context.shape.block_bytes
        if self._layerwise:
            good = [np.ones(run.stop - run.start, bool) for run in hits]
            self._copy_layer(hits, good, 0)  # at once: later messages arrive later anyway
            self._held += hits
            self._good += good
            if self._held and not message.runs:
                self._stop_layerwise()
        else:
            self._copy_blocks(hits)
            self._finish(most_ahead if answered.all() else 0)
        return not self._over

    def _stop_layerwise(self) -> None:
        """Continue block by block because the node has to wait: copy and release what is held."""
        self._context.incidents.counters.add(client_metrics.LAYERWISE_HELD_UP)
        self._layerwise = False
        held, self._held, self._good = self._held, [], []
        self._copy_blocks(held)
        self._finish(0)

    def _drain(self) -> None:
        """Wait for a device's copies out of the arena."""
        if self._device is not None:
            self._device.drain()

    def _release(self) -> None:
        """Release the leases of copied blocks. Later blocks may be waiting for their space."""
        if self._lease_ids:
            self._session.releaser.release(self._lease_ids, self._lease_bytes)
            self._lease_ids, self._lease_bytes = [], 0

    def _copy(self, run: NodeRun, at: int, upto: int, first_layer: int, layer_count: int) -> Mask:
        # blocks from a disk or a peer arrive more slowly than one thread copies: a second thread would not help
        from_dram = run.tier == Tier.DRAM and run.node_id == self._session.node_id
        threads = COPY_THREADS if from_dram else 1
        return copy_leased_blocks(self._request, self._session, run, slice(at, upto), first_layer, layer_count, threads)

    def _copy_blocks(self, runs: Sequence[NodeRun]) -> None:
        """Copy whole blocks to the host, and release their leases; or begin to copy them to a device."""
        if self._device is None:
            for run in runs:
                self._copy_to_host(run)
            self._release()
            return
        begun = []
        for run in runs:
            if self._scope.ended:
                self._mark(run.start, run.stop, Outcome.TIMEOUT)
                self._over = True
                continue
            begun.append((run, self._copy(run, 0, run.stop - run.start, 0, self._context.shape.layers)))
        if self._under_way and begun:
            self._context.incidents.counters.add(client_metrics.PIECES_AHEAD)
        self._under_way.append(_CopiesUnderWay(begun, self._device.begun(), self._lease_ids, self._lease_bytes))
        self._lease_ids, self._lease_bytes = [], 0

    def _copy_to_host(self, run: NodeRun) -> None:
        """Copy whole blocks in pieces, and check the scope in between."""
        count = run.stop - run.start
        for at in range(0, count, self._step):
            if self._scope.ended:
                self._mark(run.start + at, run.stop, Outcome.TIMEOUT)
                self._over = True
                return
            upto = min(count, at + self._step)
            self._settle(run, at, upto, self._copy(run, at, upto, 0, self._context.shape.layers))

    def _finish(self, ahead: int) -> None:
        """Wait for the copies to a device of all messages but the last ``ahead``, and release their leases."""
        while len(self._under_way) > ahead and self._device is not None:
            copies = self._under_way.popleft()
            try:
                self._device.drain(copies.begun)
            except BaseException:
                self._lease_ids += copies.lease_ids  # released after all other copies
                self._lease_bytes += copies.lease_bytes
                raise
            for run, good in copies.runs:
                self._settle(run, 0, run.stop - run.start, good)
            if copies.lease_ids:
                self._session.releaser.release(copies.lease_ids, copies.lease_bytes)

    def _settle(self, run: NodeRun, at: int, upto: int, good: Mask) -> None:
        """Record blocks that were copied. They are expired if their lease may have ended."""
        if self._context.clock.now_s() > run.lease_end_s:
            self._mark_expired(run.start + at, run.start + upto)
        else:
            self._record(run, at, upto, good)

    def _record(self, run: NodeRun, at: int, upto: int, good: Mask) -> None:
        outcomes: Outcomes | Outcome = Outcome.HIT
        if run.checksums is not None:
            outcomes = np.where(good, np.uint8(Outcome.HIT), np.uint8(Outcome.CORRUPT))
        path = PATH_LOCAL if run.node_id == self._session.node_id else PATH_PREFILL
        self._sink.record(slice(run.start + at, run.start + upto), outcomes, run.tier, run.node_id, path)

    def _mark_expired(self, start: int, stop: int) -> None:
        self._mark(start, stop, Outcome.UNAVAILABLE)
        self._expired.append((start, stop))
        self._context.incidents.report(
            client_metrics.LEASE_EXPIRED_BLOCKS, "blocks dropped: copied after their lease", amount=stop - start
        )

    # ---- layer by layer ----
    def _copy_layers(self, answered: Positions) -> None:
        """Copy the layers above the first, each for all blocks, and announce them.

        Blocks that were not answered, or that another node may bring, stay open: nothing is announced before they are settled.
        """
        held, self._held = self._held, []
        good, self._good = self._good, []
        sink, clock = self._sink, self._context.clock
        positions = _positions([(run.start, run.stop) for run in held])
        lease_end_s = min((run.lease_end_s for run in held), default=np.inf)
        sink.give_up(np.setdiff1d(answered[FINAL[sink.outcomes[answered]]], positions))
        for layer in range(self._context.shape.layers):
            if self._scope.ended or (layer and not self._copy_layer(held, good, layer)):
                self._over = True
                for run in held:
                    self._mark(run.start, run.stop, Outcome.TIMEOUT)
                return
            if clock.now_s() > lease_end_s:
                for run in held:
                    self._mark_expired(run.start, run.stop)
                return
            if held:
                good_now = np.concatenate(good)
                sink.give_up(positions[~good_now])  # no other node is asked for a corrupt block
                sink.layers_arrived(positions[good_now], layer, 1)
        self._drain()
        if self._device is not None and clock.now_s() > lease_end_s:
            for run in held:  # layers that were announced to the engine do not count any more: the result reports them as missing
                self._mark_expired(run.start, run.stop)
            return
        for run, mask in zip(held, good, strict=True):
            self._record(run, 0, run.stop - run.start, mask)

    def _copy_layer(self, runs: Sequence[NodeRun], good: Sequence[Mask], layer: int) -> bool:
        """Copy one layer of some runs in pieces, and note which of their blocks are good. False: the scope has ended."""
        step = self._step * self._context.shape.layers
        for run, mask in zip(runs, good, strict=True):
            count = run.stop - run.start
            for at in range(0, count, step):
                if self._scope.ended:
                    return False
                upto = min(count, at + step)
                mask[at:upto] &= self._copy(run, at, upto, layer, 1)
        return True

    def _mark(self, start: int, stop: int, outcome: Outcome) -> None:
        """Record why blocks did not arrive."""
        self._sink.outcomes[start:stop] = outcome
        if outcome is Outcome.TIMEOUT:
            self._sink.record_error(self._scope.error())


def _positions(stretches: Sequence[tuple[int, int]]) -> Positions:
    """Return the positions in (start, stop) stretches, in their order."""
    return np.concatenate([np.empty(0, np.intp), *(np.arange(first, last) for first, last in stretches)])
