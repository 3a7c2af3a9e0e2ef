"""Loads from the engine's own pool, the nearest source, and copies of blocks from other sources into the pool."""

from __future__ import annotations

import numpy as np

from kvclient.load.sink import BlockSink, LoadRequest, Positions, spans
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import DeviceBuffer
from kvclient.memory.engine_pool import PoolNamespace
from kvclient.results import PATH_HBM, leading
from kvstore.core.types import Outcome, Tier


class EnginePoolSource:
    """The engine's own pool."""

    def __init__(self, pool: PoolNamespace) -> None:
        self._pool = pool
        self._found = 0

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """Bring the leading blocks of each run of missing blocks; see ``LoadSource``."""
        with request.trace.phase("own pool"):
            for start, stop in spans(missing):
                part, buffer = request.chain.part(start, stop), request.buffer
                if len(part) < len(request.chain):
                    buffer = pick_blocks(buffer, np.arange(start, stop))
                found = self._pool.fetch(part.keys, buffer, request.scope, verify=request.verify == "always")
                if found:
                    sink.record(slice(start, start + found), Outcome.HIT, Tier.HBM, self._pool.node_id, PATH_HBM)
                    sink.settle(np.arange(start, start + found))
                if start == 0:
                    self._found = found

    def insert(self, request: LoadRequest, sink: BlockSink) -> None:
        """Copy leading hits that came from elsewhere into the pool. The caller must not change the buffer before that.

        The copy ends with the scope: it is not worth a deadline.
        """
        good = leading(sink.outcomes, Outcome.HIT)
        if good <= self._found or request.scope.ended:
            return
        with request.trace.phase("keeping in own pool"):
            source = request.buffer.source() if isinstance(request.buffer, DeviceBuffer) else request.buffer
            blocks = pick_blocks(source, np.arange(good))
            part = request.chain.part(0, good)
            checksums = request.verify == "always"
            self._pool.insert(part.keys, part.parent, part.depth, blocks, request.scope, checksums=checksums)
