"""What the sources of a load share: their interface, the request, and the sink, where they record what has arrived.

A block begins as a MISS and becomes a HIT only when its bytes are in the caller's buffer, complete and verified as requested.
After any failure it stays a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.load.accounting import LoadTrace
from kvclient.load.layerwise import LayerBarrier
from kvclient.memory.device_buffer import DeviceBuffer
from kvclient.options import Verify
from kvclient.results import LoadResult, Outcomes, Run
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome, Tier

Positions: TypeAlias = npt.NDArray[np.intp]
"""Positions of blocks in a load, ascending."""
Mask: TypeAlias = npt.NDArray[np.bool_]
Where: TypeAlias = slice | Positions

_TIERS = {int(tier): tier for tier in Tier}
_TIER_BITS = 8


class LayerTracker:
    """Number of leading layers that have arrived, per block. Opens a barrier for layers that all blocks have. Thread-safe.

    Args:
        blocks: number of blocks.
        layers: number of layers of each.
        barrier: opened for layers that all blocks have; None: no thread waits for layers.
        device: the load's buffer if it is a device's: layers are sent on to the device before they are announced.
    """

    def __init__(self, blocks: int, layers: int, barrier: LayerBarrier | None = None, device: DeviceBuffer | None = None) -> None:
        self._device = device
        self._layers = layers
        self._barrier = barrier
        self._lock = threading.Lock()
        self._ready = np.zeros(blocks, np.int32)
        self._promised = blocks
        self._announced = 0

    def arrived(self, positions: Positions, first_layer: int, layer_count: int) -> None:
        """Record layers that are in the buffer, verified. Layers above a gap do not count until the gap is filled."""
        if self._device is not None and len(positions):
            try:
                self._device.host_copy_ready(positions, first_layer, layer_count)
            except KVStoreError:  # the flush at the end of the load meets the same error and records it
                self.mark_failed(positions)
                return
        with self._lock:
            ready = self._ready[positions]
            self._ready[positions] = np.where(ready >= first_layer, np.maximum(ready, first_layer + layer_count), ready)
            self._announce()

    def ready(self, positions: Positions) -> npt.NDArray[np.int32]:
        """Return the number of leading layers that have arrived, per block."""
        with self._lock:
            found: npt.NDArray[np.int32] = self._ready[positions]
            return found

    def complete(self) -> Mask:
        """Return which blocks have all layers."""
        with self._lock:
            done: Mask = self._ready == self._layers
            return done

    def restart(self, positions: Positions) -> bool:
        """Forget the layers of blocks that are about to be read again.

        Returns:
            False: layers have been announced, so an engine may be reading them and nothing may be written over them.
        """
        with self._lock:
            if self._announced:
                return False
            self._ready[positions] = 0
            return True

    def mark_failed(self, positions: Positions) -> None:
        """Record that some blocks will not arrive: only blocks before the first of them are still promised."""
        if not len(positions):
            return
        position = int(positions.min())
        with self._lock:
            if position < self._promised:
                self._promised = position
                if self._barrier is not None:
                    self._barrier.shrink(position)
                self._announce()

    def _announce(self) -> None:
        if self._barrier is None or self._promised == 0:
            return
        layers = int(self._ready[: self._promised].min())
        if layers > self._announced:
            self._announced = layers
            self._barrier.advance(layers)


class BlockSink:
    """State of all blocks of one load. Several threads may record different blocks.

    Args:
        blocks: number of blocks.
        layers: number of layers of each.
        buffer: destination of the bytes; None: outcomes are recorded without a buffer.
        barrier: opened for layers that all blocks have; None: no thread waits for layers.
        track_layers: keep the layers that have arrived even without a barrier.
    """

    def __init__(
        self,
        blocks: int,
        layers: int,
        buffer: BlockBuffer | None = None,
        barrier: LayerBarrier | None = None,
        *,
        track_layers: bool = False,
    ) -> None:
        self.outcomes: Outcomes = np.full(blocks, Outcome.MISS, np.uint8)
        self.error: KVStoreError | None = None
        self._layers = layers
        self._device = buffer if isinstance(buffer, DeviceBuffer) else None
        self._given_up: Mask | None = None
        self._tiers = np.zeros(blocks, np.uint8)
        self._nodes = np.zeros(blocks, np.int16)
        self._paths = np.zeros(blocks, np.int8)
        self._lock = threading.Lock()
        self._node_numbers: dict[str, int] = {}
        self._path_numbers: dict[str, int] = {}
        tracked = barrier is not None or track_layers
        self._tracker = LayerTracker(blocks, layers, barrier, self._device) if tracked else None

    # ---- what is missing ----
    def missing(self, among: Positions | None = None) -> Positions:
        """Return the positions of blocks that have not arrived and may still come."""
        open_ = self.outcomes != Outcome.HIT
        if self._given_up is not None:
            open_ &= ~self._given_up
        return np.flatnonzero(open_) if among is None else among[open_[among]]

    def give_up(self, positions: Positions) -> None:
        """Record that no other source can bring these blocks. An engine that waits for layers learns this at once."""
        if len(positions):
            with self._lock:
                if self._given_up is None:
                    self._given_up = np.zeros(len(self.outcomes), bool)
                self._given_up[positions] = True
            if self._tracker is not None:
                self._tracker.mark_failed(positions)

    # ---- what has arrived ----
    def record(self, where: Where, outcomes: Outcomes | Outcome, tiers: Outcomes | int, node_id: str, path: str) -> None:
        """Record outcomes of blocks, and the origin of those that are hits."""
        self.outcomes[where] = outcomes
        self._tiers[where] = tiers
        self._nodes[where] = self._number(self._node_numbers, node_id)
        self._paths[where] = self._number(self._path_numbers, path)

    def record_error(self, error: KVStoreError) -> None:
        """Keep an error for the result, unless an earlier one is kept."""
        if self.error is None:
            self.error = error

    def layers_arrived(self, positions: Positions, first_layer: int, layer_count: int) -> None:
        """Record that layers of some blocks are in the buffer, verified."""
        if self._tracker is not None:
            self._tracker.arrived(positions, first_layer, layer_count)

    def settle(self, positions: Positions) -> None:
        """Record that blocks which are hits now have all their layers."""
        if self._tracker is not None:
            self._tracker.arrived(positions[self.outcomes[positions] == Outcome.HIT], 0, self._layers)

    def ready_layers(self, positions: Positions) -> npt.NDArray[np.int32]:
        """Return the number of leading layers that have arrived, per block. Requires ``track_layers`` or a barrier."""
        assert self._tracker is not None, "layers are not tracked"
        return self._tracker.ready(positions)

    def restart(self, positions: Positions) -> bool:
        """Prepare to read blocks again from their first layer.

        Returns:
            False: the engine may be reading their layers already, so nothing may be written over them.
        """
        return self._tracker is None or self._tracker.restart(positions)

    def flush_to_device(self) -> None:
        """Wait until all hits are in the device's memory, if the buffer is one. Hits that are not become UNAVAILABLE."""
        if self._device is None:
            return
        hits = np.flatnonzero(self.outcomes == Outcome.HIT)
        try:
            self._device.host_copy_ready(hits, 0, self._layers)
            self._device.drain()
        except KVStoreError as error:
            self.outcomes[hits] = Outcome.UNAVAILABLE
            self.record_error(error)

    # ---- the result ----
    def drop_incomplete(self) -> None:
        """Make hits without all their layers UNAVAILABLE. There are none unless a source is wrong."""
        if self._tracker is not None:
            self.outcomes[~self._tracker.complete() & (self.outcomes == Outcome.HIT)] = Outcome.UNAVAILABLE

    def sources(self) -> dict[tuple[str, int], int]:
        """Return the number of hits by path and tier (0: unknown)."""
        blocks, tiers, paths = len(self.outcomes), self._tiers.tobytes(), self._paths.tobytes()
        if blocks and self.outcomes.tobytes().count(Outcome.HIT) == tiers.count(tiers[0]) == paths.count(paths[0]) == blocks:
            path = next(name for name, number in self._path_numbers.items() if number == paths[0])
            return {(path, tiers[0]): blocks}  # the common case, at a fraction of the cost
        hits = self.outcomes == Outcome.HIT
        pairs = self._paths[hits].astype(np.intp) << _TIER_BITS | self._tiers[hits]
        names = {number: name for name, number in self._path_numbers.items()}
        mask = (1 << _TIER_BITS) - 1
        return {(names[pair >> _TIER_BITS], pair & mask): count for pair, count in _sums(pairs, 1).items()}

    def result(self, block_bytes: int) -> LoadResult:
        """Return the result of the load."""
        hits = self.outcomes == Outcome.HIT
        tiers = {_TIERS[number]: size for number, size in _sums(self._tiers[hits], block_bytes).items() if number in _TIERS}
        return LoadResult(
            self.outcomes,
            bytes_by_tier=tiers,
            bytes_by_node=_named(_sums(self._nodes[hits], block_bytes), self._node_numbers),
            bytes_by_path=_named(_sums(self._paths[hits], block_bytes), self._path_numbers),
            error=self.error,
        )

    def _number(self, numbers: dict[str, int], name: str) -> int:
        number = numbers.get(name)
        if number is None:
            with self._lock:
                number = numbers.setdefault(name, len(numbers))
        return number


def spans(positions: Positions) -> list[tuple[int, int]]:
    """Return the runs without a gap in ascending positions, as (start, stop)."""
    if len(positions) == 0:
        return []
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(int(positions[first]), int(positions[last - 1]) + 1) for first, last in pairwise(cuts)]


def _sums(numbers: npt.NDArray[np.integer], block_bytes: int) -> dict[int, int]:
    counts = np.bincount(numbers)
    return {number: int(counts[number]) * block_bytes for number in np.flatnonzero(counts).tolist()}


def _named(sizes: dict[int, int], numbers: dict[str, int]) -> dict[str, int]:
    return {name: sizes[number] for name, number in numbers.items() if number in sizes}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One load.

    Attributes:
        context: the client's parts.
        chain: the blocks.
        runs: replicas of them that the lookup named, nearest first.
        buffer: space for all blocks.
        scope: deadline and cancellation.
        verify: see ``Verify``.
        layerwise: layer 0 of all blocks first, then layer 1, and so on.
        trace: phases and facts of the load.
    """

    context: ClientContext
    chain: ChainSlice
    runs: Sequence[Run]
    buffer: BlockBuffer
    scope: CallScope
    verify: Verify
    layerwise: bool
    trace: LoadTrace


class LoadSource(Protocol):
    """Source of blocks: the engine's pool, disks, the local node, other nodes or storage links."""

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """Bring as many of the missing blocks as possible into the buffer, and record each in the sink.

        Does not raise failures of the store: it records outcomes and errors. When it has returned, nothing writes to the buffer.
        """


def fetch_from(sources: Iterable[LoadSource], request: LoadRequest, sink: BlockSink, among: Positions | None = None) -> None:
    """Ask one source after the other for the missing blocks, until all blocks are complete.

    Args:
        sources: nearest first.
        request: the load.
        sink: its blocks.
        among: only these blocks; None: all.
    """
    remaining = iter(sources)
    while len(missing := sink.missing(among)) and (source := next(remaining, None)) is not None:
        source.fetch(request, missing, sink)
