"""Demotion: blocks are offered to the tiers below before eviction. A hot block is read only in the pool, so it is cold below.

The block table handles it like a node's write-back: if space is needed, it queues the coldest blocks, and may evict them after
they were demoted or demotion failed. The tiers below still hold most blocks: then demotion costs one request.
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
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
BATCH_BYTES = 32 << 20
BATCH_S = 2.0
"""The rest of a batch is dropped after this time: a node that does not answer must not keep the pool full."""
IDLE_WAIT_S = 0.5


class Demoter:
    """The thread that demotes blocks. Call ``start`` and ``stop`` once each.

    Args:
        parts: state of the pool.
        targets: for each namespace, the callbacks that accept its blocks; changes as clients connect and close.
    """

    def __init__(self, parts: PoolState, targets: Mapping[NamespaceId, Sequence[Demote]]) -> None:
        self._parts = parts
        self._targets = targets
        self._stopping = threading.Event()
        self._skip = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hbm-demote", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop after the current run of blocks."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def skip_batch(self) -> None:
        """Drop the rest of the current batch and all queued blocks: memory is needed now."""
        self._skip.set()
        self._parts.counters.add(device_metrics.HBM_NOT_DEMOTED_BLOCKS, self._parts.table.give_up_pending())

    def _run(self) -> None:
        parts = self._parts
        while not self._stopping.is_set():
            blocks = parts.table.take_pending(BATCH_BLOCKS, BATCH_BYTES, IDLE_WAIT_S)
            self._skip.clear()
            until_s = parts.clock.now_s() + BATCH_S
            try:
                known = {block.key: block for block in blocks}
                for run in runs_of(_chains(blocks)):
                    late = self._stopping.is_set() or self._skip.is_set() or parts.clock.now_s() > until_s
                    if late or parts.lost or not self._demote([known[key] for key in run.keys]):
                        parts.counters.add(device_metrics.HBM_NOT_DEMOTED_BLOCKS, len(run.keys))
            except Exception:  # noqa: BLE001  # edge of this thread: a bug must neither end demotion nor leave blocks queued
                parts.counters.add(device_metrics.HBM_DEMOTION_BUGS)
                _log.exception("demotion failed: unexpected error (blocks=%d)", len(blocks))
            for block in blocks:
                # evictable now, demoted or not. The tiers below may evict them again, so they do not count as durable
                parts.table.writeback_failed(block)

    def _demote(self, blocks: Sequence[Block]) -> bool:
        """Demote one run. Returns whether the tiers below hold all of it now."""
        parts, namespace = self._parts, blocks[0].namespace
        targets = tuple(self._targets.get(namespace.namespace_id, ()))
        if not targets:
            parts.counters.add(device_metrics.HBM_DEMOTION_WITHOUT_CLIENT_BLOCKS, len(blocks))
            return False
        views: list[memoryview] = []
        with parts.guarded("read from"), parts.disabled_if_hung("read from"):
            views = host_views(parts.volume, blocks, namespace.shape)
        for at, (block, view) in enumerate(zip(blocks, views, strict=False)):
            if block.checksums and not verify(view, namespace.shape, block.checksums):
                parts.drop_corrupt(block)  # the tier below would compute checksums of wrong bytes
                views = views[:at]
                break
        if not views:
            return False
        blocks = blocks[: len(views)]
        try:
            held = targets[-1](
                [block.key for block in blocks], blocks[0].parent, blocks[0].depth, ScatteredBlocks(views, namespace.shape)
            )
        except KVStoreError as error:
            _log.debug("demotion failed: %s", error)
            return False
        parts.counters.add(device_metrics.HBM_DEMOTED_BLOCKS, len(blocks) if held else 0)
        return held


def _chains(blocks: Sequence[Block]) -> list[Block]:
    """Order blocks parents first: the eviction policy returns leaves first, but a chain is stored prefix first."""
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
