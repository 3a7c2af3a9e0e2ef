"""Request of a load to its sources, and the interface of a source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvclient.call.context import ClientContext
from kvclient.call.scope import CallScope
from kvclient.load.accounting import LoadTrace
from kvclient.load.sink import BlockSink, Positions
from kvclient.options import Verify
from kvclient.results import Run
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice


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
    for source in sources:
        missing = sink.missing(among)
        if not len(missing):
            return
        source.fetch(request, missing, sink)
