"""One load: from the local node's arena where there is a session, else and for what failed from other nodes directly.

Outcomes begin as MISS and change only when bytes are in the caller's buffer, complete and checked as asked: whatever breaks on
the way leaves a miss behind. The order of attempts, all within one deadline:

0. The engine's own pool, if it has one, gives what leading blocks it holds, and reads what lies on the local node's disks alone
   straight from there, where that is real (``stored_load``).
1. The local node brings what it can (its own tiers, then the other nodes that the lookup named) into its arena, leases it to us,
   and we copy. A copy that ended after its lease may have been overwritten under our hands: it does not count, and is tried
   once more.
2. What the lookup promised and did not come, or everything where there is no session, is read straight from the nodes that
   hold it; what fails there once more from another node, if one is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.outcomes import Tally
from kvclient.load.sources.gds import StoredLoad
from kvclient.load.sources.local_node import LocalLoad
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import FarBlocks, land
from kvclient.options import Verify
from kvclient.results import PATH_HBM, PATH_PREFILL, LoadResult, NodeRef, Run, leading, outcome_table
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, Outcome, Tier
from kvstore.transport.contract import LayerProgress, ReadControl, ReadRequest

Positions = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_FIRST_TRY_SHARE = 0.6
"""Part of the time that a node may take where another one could be asked after it."""
_AFTER_LOCAL = outcome_table(Outcome.UNAVAILABLE, Outcome.NO_ROOM)
"""What is worth asking another node directly after the local one failed; a MISS of its is already everybody's."""
_AFTER_REMOTE = outcome_table(Outcome.UNAVAILABLE, Outcome.NO_ROOM, Outcome.MISS, Outcome.CORRUPT)


class Load:
    """One load of consecutive blocks of a chain. ``run`` once, in any thread.

    Args:
        core: the client's parts.
        keys: consecutive keys of a chain.
        packed: the same, packed.
        runs: who is said to hold what.
        parent: key before the first, None at the head.
        depth: position of the first.
        buffer: room for all of them.
        operation: deadline and cancellation.
        verify: see ``Verify``.
        board: layer-wise: told, block by block, of the layers that arrive and of what will not come; None: block by block.
    """

    def __init__(
        self,
        core: Core,
        keys: Sequence[BlockKey],
        packed: bytes,
        runs: Sequence[Run],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        operation: Operation,
        verify: Verify,
        board: LayerBoard | None,
    ) -> None:
        self._core = core
        self._keys = keys
        self._packed = packed
        near = core.near
        # nearest first; equals in the order of the index. What the index says of our own pool we know better ourselves
        self._runs = sorted((run for run in runs if near is None or run.node_id != near.node_id), key=lambda run: run.distance)
        self._parent = parent
        self._depth = depth
        self._buffer = buffer
        self._operation = operation
        self._verify = verify
        self._board = board
        self.tally = self._tally = Tally(len(keys))
        self._local_node: str | None = None
        self._hung_node: str | None = None
        """The local node, if it is hung: it would answer no better at its other address."""
        self._near_blocks = 0

    def run(self) -> LoadResult:
        """Does it. Errors of ours end in outcomes and ``error``."""
        self.bring()
        return finished_load(self._core, self._tally, self._operation)

    def bring(self) -> None:
        """The work alone; the account of it is in ``tally``."""
        if self._keys:
            phase = self._operation.phase
            with phase("own pool"):
                self._from_near()
            if self._near_blocks < len(self._keys):
                with phase("disks into own pool"):
                    self._from_disks()
                with phase("local node"):
                    self._from_local()
                with phase("other nodes"):
                    self._from_others()
                land(self._buffer, self._tally)
                with phase("keeping in own pool"):
                    self._keep_near()
            else:
                land(self._buffer, self._tally)

    def note(self, error: KVStoreError) -> None:
        """Something went wrong before the load began (its lookup failed): kept for the result."""
        self._tally.note(error)

    # ---- the engine's own pool ----
    def _from_near(self) -> None:
        self._near_blocks = fetch_near(self._core, self._keys, self._buffer, self._operation, self._verify, self._tally)
        self._settle(np.arange(self._near_blocks), np.ones(len(self._keys), bool))

    def _from_disks(self) -> None:
        core, near = self._core, self._core.near
        session = core.local.session() if core.local is not None and near is not None else None
        if near is None or session is None or not near.reads_disks(session.volumes):
            return
        load = StoredLoad(core, near, session, self._tally, self._buffer, self._operation, self._verify)
        came = load.run(self._keys, self._packed, self._runs, self._parent, self._depth)
        self._settle(came, np.zeros(len(self._keys), bool))

    def _keep_near(self) -> None:
        place = (self._keys, self._parent, self._depth, self._buffer)
        keep_near(self._core, *place, self._operation, self._verify, self._tally, self._near_blocks)

    # ---- the local node ----
    def _from_local(self) -> None:
        local = self._core.local
        if local is None or (self._tally.outcomes == Outcome.HIT).all():
            return
        session = local.session()
        if session is None:
            self._tally.note(local.unavailable())
            self._hung_node = local.hung_node
            self._core.incidents.counters.add("client_loads_without_session_total")
            return
        self._local_node = session.node_id
        attempt = LocalLoad(self._core, session, self._tally, self._buffer, self._operation, self._verify, self._board)
        with self._core.peers.watching(run.node for run in self._runs if run.node_id != session.node_id):
            attempt.run(self._packed, self._runs, self._parent, self._depth)
        self._settle(np.arange(len(self._keys)), ~_AFTER_LOCAL[self._tally.outcomes])

    # ---- other nodes ----
    def _from_others(self) -> None:
        tally = self._tally
        if not self._runs:
            return
        asked = np.full(len(self._keys), -1, np.int16)  # which node each block was asked from last
        pending = _AFTER_LOCAL[tally.outcomes] if self._local_node is not None else tally.outcomes != Outcome.HIT
        for attempt in range(2):
            if self._operation.over or not pending.any():
                break
            if self._board is not None and not self._board.restart(np.flatnonzero(pending)):
                break  # the engine may be reading these layers: nothing may be written over them
            choice, others = self._choose(pending, asked)
            chosen = choice >= 0
            if not chosen.any():
                break
            may_retry = others if attempt == 0 else np.zeros_like(others)
            if self._board is not None:
                self._board.lost(np.flatnonzero(~chosen & (tally.outcomes != Outcome.HIT)))  # nobody is asked for them
            if attempt or self._local_node is not None:
                self._core.incidents.counters.add("client_fallback_blocks_total", int(np.count_nonzero(chosen)))
            self._read_round(choice, may_retry)
            asked = np.where(chosen, choice, asked)
            pending = chosen & _AFTER_REMOTE[tally.outcomes]
        if self._operation.over and pending.any():
            tally.outcomes[pending & (tally.outcomes != Outcome.CORRUPT)] = Outcome.TIMEOUT
            tally.note(self._operation.error())

    def _choose(self, pending: Mask, asked: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], Mask]:
        """For each pending block the best node (its number) that was not asked last, or -1; and which have a second one."""
        choice = np.full(len(pending), -1, np.int16)
        others = np.zeros(len(pending), bool)
        for run in self._runs:
            if run.node_id in (self._local_node, self._hung_node) or self._core.peers.hung(run.node):
                continue
            span = slice(run.start, run.end)
            number = self._tally.node_number(run.node_id)
            open_ = pending[span] & (asked[span] != number)
            others[span] |= open_ & (choice[span] >= 0) & (choice[span] != number)
            choice[span] = np.where(open_ & (choice[span] < 0), np.int16(number), choice[span])
        return choice, others

    def _read_round(self, choice: npt.NDArray[np.int16], may_retry: Mask) -> None:
        """Reads from all chosen nodes at once; returns when all have stopped writing into the buffer."""
        operation = self._operation
        deadline_s = operation.deadline_s
        if may_retry.any():
            deadline_s -= operation.left_s() * (1 - _FIRST_TRY_SHARE)
        refs = {self._tally.node_number(run.node_id): run.node for run in self._runs}
        parts = [(refs[number], np.flatnonzero(choice == number)) for number in np.unique(choice[choice >= 0]).tolist()]
        futures = []
        try:
            for node, positions in parts[1:]:
                futures.append(
                    self._core.peers.submit(
                        lambda node=node, positions=positions: self._read(node, positions, deadline_s, may_retry)  # type: ignore[misc]
                    )
                )
            self._read(*parts[0], deadline_s, may_retry)
        except Unavailable as error:  # the client is being closed
            self._tally.note(error)
        finally:
            wait(futures)  # each ends by the deadline; before that nobody may have the buffer back
        for future in futures:
            future.result()

    def _read(self, node: NodeRef, positions: Positions, deadline_s: float, may_retry: Mask) -> None:
        """Reads some blocks from one node, in one go: between two reads the wire would run dry. A cancellation ends it."""
        tally, core = self._tally, self._core
        number = tally.node_number(node.node_id)
        control = ReadControl()
        try:
            request = ReadRequest(
                core.namespace,
                [self._keys[position] for position in positions.tolist()],
                0,
                core.shape.layers,
                core.options.layer_group if self._board is not None else 0,
                deadline_s,
            )
            with self._operation.on_cancel(control.cancel):
                result = core.peers.peer(node).read(
                    request,
                    pick_blocks(self._buffer, positions),
                    verify=self._verify != "never",
                    on_layers=self._progress(positions, may_retry),
                    control=control,
                )
            outcomes = np.array(result.outcomes, np.uint8)
            outcomes[outcomes == Outcome.TIMEOUT] = Outcome.UNAVAILABLE  # TIMEOUT in the end, if nobody else brings it
            tally.record(positions, outcomes, np.array(result.tiers, np.uint8), number, PATH_PREFILL)
        except KVStoreError as error:
            self._refused(node, positions, error)
        finally:
            self._settle(positions, ~may_retry)

    def _progress(self, positions: Positions, may_retry: Mask) -> LayerProgress | None:
        """What a read of some blocks tells of their layers: the board learns which blocks have them, and which never will."""
        board = self._board
        if board is None:
            return None

        def arrived(first_layer: int, layer_count: int, good: Mask) -> None:
            failed = positions[~good]
            board.lost(failed[~may_retry[failed]])
            board.arrived(positions[good], first_layer, layer_count)

        return arrived

    def _settle(self, positions: Positions, final: Mask) -> None:
        """Tells the board what became of some blocks; those that are ``final`` and no hits are lost."""
        if self._board is None:
            return
        hits = self._tally.outcomes[positions] == Outcome.HIT
        failed = positions[~hits]
        self._board.lost(failed[final[failed]])
        self._board.arrived(positions[hits], 0, self._core.shape.layers)

    def _refused(self, node: NodeRef, positions: Positions, error: KVStoreError) -> None:
        tally = self._tally
        tally.outcomes[positions[tally.outcomes[positions] != Outcome.HIT]] = Outcome.UNAVAILABLE
        if self._operation.cancelled:
            return  # we ended it, not the node
        tally.note(error)
        self._core.incidents.report("client_peer_failed_total", f"cannot read from node {node.node_id}", error)


def fetch_near(
    core: Core, keys: Sequence[BlockKey], buffer: BlockBuffer, operation: Operation, verify: Verify, tally: Tally
) -> int:
    """Copies what leading blocks the engine's own pool has; how many are hits in the tally now."""
    near = core.near
    found = near.fetch(keys, buffer, operation, verify=verify == "always") if near is not None else 0
    if near is not None and found:
        tally.record(slice(0, found), Outcome.HIT, Tier.HBM, tally.node_number(near.node_id), PATH_HBM)
    return found


def keep_near(
    core: Core,
    keys: Sequence[BlockKey],
    parent: BlockKey | None,
    depth: int,
    buffer: BlockBuffer,
    operation: Operation,
    verify: Verify,
    tally: Tally,
    found: int,
) -> None:
    """Leaves what came from elsewhere in the engine's own pool, up to the first block that did not come.

    Args:
        core: the client's parts.
        keys: all of the load.
        parent: key before the first, None at the head.
        depth: position of the first.
        buffer: their bytes, which nobody may change before the load has returned.
        operation: ends it early: a copy in the pool is worth no deadline.
        verify: as the load was asked to.
        tally: what came.
        found: leading blocks that the pool gave.
    """
    near, good = core.near, leading(tally.outcomes, Outcome.HIT)
    if near is not None and good > found and not operation.over:
        blocks = pick_blocks(buffer.source() if isinstance(buffer, FarBlocks) else buffer, np.arange(good))
        near.keep(keys[:good], parent, depth, blocks, operation, checksums=verify == "always")


def finished_load(core: Core, tally: Tally, operation: Operation) -> LoadResult:
    """The result of a load that has ended, counted."""
    result = tally.result(core.shape.block_bytes)
    result.seconds = operation.elapsed_s()
    core.loads.account(result, tally.sources(), operation)
    return result
