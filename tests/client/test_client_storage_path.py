"""Parts of planned loads: layers that have arrived are never written again, whichever windows a node answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvclient.load.sink import BlockSink, LoadRequest, Mask, Positions
from kvclient.load.sources.node_stream import NodeRun, NodeSession
from kvclient.load.sources.storage_path import StoragePathSource
from kvproto.v1 import node_pb2
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.chain import ChainSlice
from kvstore.core.clock import ManualClock
from kvstore.core.types import NamespaceId, Outcome, Tier

BLOCKS, LAYERS = 8, 6


class RecordedPath(StoragePathSource):
    """Records the layers that it would write into the buffer, and whether their bytes were good."""

    on_this_host = False

    def __init__(self, scope: CancelScope, session: Any, good: Sequence[bool]) -> None:
        super().__init__(scope, "decode", "d", 1, 1.0)
        self._session = session
        self._good = good
        self.answer = -1
        self.written = np.zeros((BLOCKS, LAYERS), bool)
        self.bad = np.zeros((BLOCKS, LAYERS), bool)

    def _fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        self._read_all(request, missing, sink, self._session)

    def _copy_layers(
        self,
        request: LoadRequest,
        sink: BlockSink,
        session: NodeSession,
        run: NodeRun,
        part: slice,
        first_layer: int,
        layer_count: int,
    ) -> Mask:
        positions = np.arange(run.start, run.stop)[part]
        layers = np.arange(first_layer, first_layer + layer_count)
        counted = layers[None, :] < sink.ready_layers(positions)[:, None]
        assert not counted.any(), "an engine may be reading these"
        good = self._good[int(run.node_id)]
        self.written[np.ix_(positions, layers)] = True
        self.bad[np.ix_(positions, layers)] = not good
        return np.full(len(positions), good)


class ScriptedStream:
    """A ``Load`` call that answers messages of a test."""

    def __init__(self, messages: Sequence[node_pb2.LoadProgress]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[node_pb2.LoadProgress]:
        return iter(self._messages)

    def cancel(self) -> None:
        """Do nothing: the stream has ended."""


windows = st.tuples(
    st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.integers(0, LAYERS - 1), st.integers(1, LAYERS), st.booleans()
)


@given(st.lists(windows, max_size=30))
def test_storage_path_writes_no_arrived_layer_again(answers: list[tuple[int, int, int, int, bool]]) -> None:
    runs = [
        node_pb2.LoadedRun(
            start=start,
            count=min(count, BLOCKS - start),
            outcome=int(Outcome.HIT),  # type: ignore[arg-type]
            tier=int(Tier.NVME),  # type: ignore[arg-type]
            source_node=str(number),
            first_layer=first,
            layer_count=min(layers, LAYERS - first),
        )
        for number, (start, count, first, layers, _) in enumerate(answers)
    ]
    stream = ScriptedStream([node_pb2.LoadProgress(runs=[run]) for run in runs])
    session = SimpleNamespace(
        stub=SimpleNamespace(Load=lambda *_, **__: stream),
        server=SimpleNamespace(waiting=lambda _: nullcontext()),
        session_id=b"s" * 16,
    )
    clock = ManualClock()
    context = SimpleNamespace(
        shape=SimpleNamespace(layers=LAYERS, block_bytes=1), clock=clock, options=SimpleNamespace(lease_margin_s=0.0)
    )
    keys = bytes(16 * BLOCKS)
    request: Any = SimpleNamespace(
        context=context, chain=ChainSlice(NamespaceId(b"n" * 16), keys), runs=(), buffer=None, verify="never"
    )
    sink = BlockSink(BLOCKS, LAYERS, track_layers=True)
    path = RecordedPath(CancelScope(clock=clock), session, [good for *_, good in answers])
    path.fetch(request, np.arange(BLOCKS), sink)
    assert path.error is None
    ready = sink.ready_layers(np.arange(BLOCKS))
    arrived = np.arange(LAYERS)[None, :] < ready[:, None]
    assert path.written[arrived].all()
    assert not path.bad[arrived].any(), "corrupt bytes count as arrived"
    assert ((ready == LAYERS) == (sink.outcomes == Outcome.HIT)).all()
