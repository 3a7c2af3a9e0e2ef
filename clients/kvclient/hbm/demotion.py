"""What must leave the pool is offered to the tiers below first: a hot block is read here, so that nobody has used it there.

The block table does it as a node does with NVMe: where room is needed, the coldest blocks are queued to be written below, and may
leave once that is done or was given up. Below, most are held still: then asking is all it costs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.provider import host_views
from kvclient.memory.engine_pool import Demote
from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.checksum import verify
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.node.state.change_log import runs_of
from kvstore.node.state.model import Block

_log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
BATCH_BYTES = 32 << 20
BATCH_S = 2.0
"""What is left of a batch after so long is given up: a node that does not answer must not keep the pool full."""
IDLE_WAIT_S = 0.5


class Demoter:
    """The thread that carries blocks down. ``start`` and ``stop`` once each.

    Args:
        parts: the pool's.
        ways: for each namespace, who takes its blocks; changes as clients come and go.
    """

    def __init__(self, parts: PoolState, ways: Mapping[NamespaceId, Sequence[Demote]]) -> None:
        self._parts = parts
        self._ways = ways
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hbm-demote", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends after the run of blocks under way."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def hurry(self) -> None:
        """Gives up what is left of the batch under way, and all that waits: memory is wanted now."""
        self._hurry.set()
        self._parts.counters.add("hbm_not_demoted_blocks_total", self._parts.table.give_up_pending())

    def _run(self) -> None:
        parts = self._parts
        while not self._stopping.is_set():
            blocks = parts.table.take_pending(BATCH_BLOCKS, BATCH_BYTES, IDLE_WAIT_S)
            self._hurry.clear()
            until_s = parts.clock.now_s() + BATCH_S
            try:
                known = {block.key: block for block in blocks}
                for run in runs_of(_chains(blocks)):
                    late = self._stopping.is_set() or self._hurry.is_set() or parts.clock.now_s() > until_s
                    if late or parts.lost or not self._demote([known[key] for key in run.keys]):
                        parts.counters.add("hbm_not_demoted_blocks_total", len(run.keys))
            except Exception:  # noqa: BLE001  # process edge: a bug here must neither end demotion for good nor leave blocks pending
                parts.counters.add("hbm_demotion_bugs_total")
                _log.exception("demoting %d blocks failed", len(blocks))
            for block in blocks:
                # they may leave now, written below or not. Those below may forget them again, so that nothing is taken as durable
                parts.table.writeback_failed(block)

    def _demote(self, blocks: Sequence[Block]) -> bool:
        """One run. Whether the tiers below hold all of it now."""
        parts, namespace = self._parts, blocks[0].namespace
        ways = tuple(self._ways.get(namespace.namespace_id, ()))
        if not ways:
            parts.counters.add("hbm_demotion_without_client_blocks_total", len(blocks))
            return False
        views: list[memoryview] = []
        with parts.guarded("read from"):
            views = host_views(parts.volume, blocks, namespace.shape)
        for at, (block, view) in enumerate(zip(blocks, views, strict=False)):
            if block.checksums and not verify(view, namespace.shape, block.checksums):
                parts.condemn(block)  # below it would get checksums of its wrong bytes
                views = views[:at]
                break
        if not views:
            return False
        blocks = blocks[: len(views)]
        try:
            held = ways[-1](
                [block.key for block in blocks], blocks[0].parent, blocks[0].depth, ScatteredBlocks(views, namespace.shape)
            )
        except KVStoreError as error:
            _log.debug("demotion failed: %s", error)
            return False
        parts.counters.add("hbm_demoted_blocks_total", len(blocks) if held else 0)
        return held


def _chains(blocks: Sequence[Block]) -> list[Block]:
    """Chain after chain, parents first: leaves come first out of the policy, but a chain is stored prefix first."""
    children: dict[BlockKey | None, list[Block]] = {}
    keys = {block.key for block in blocks}
    for block in blocks:
        children.setdefault(block.parent if block.parent in keys else None, []).append(block)
    ordered: list[Block] = []
    waiting = children.get(None, [])[::-1]
    while waiting:
        block = waiting.pop()
        ordered.append(block)
        waiting.extend(children.get(block.key, ()))
    return ordered
