"""Parts of planned loads: what counts as arrived is never written again, in whatever windows nodes answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.outcomes import Tally
from kvclient.load.sources.storage_path import Positions, StagedPart, Wanted
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.clock import ManualClock
from kvstore.core.types import Outcome, Tier
from kvstore.transport.liveness import WatchedServer

BLOCKS, LAYERS = 8, 6


class Part(StagedPart):
    """Writes down what it would write into the buffer, and whether those bytes proved good."""

    def __init__(self, wanted: Wanted, board: LayerBoard) -> None:
        super().__init__(wanted, np.arange(BLOCKS), "decode", "d", 1, 1.0)
        self.board = board
        self.proves_good = True
        self.written = np.zeros((BLOCKS, LAYERS), bool)
        self.bad = np.zeros((BLOCKS, LAYERS), bool)

    def _bring(
        self, run: node_pb2.LoadedRun, part: slice, positions: Positions, first_layer: int, layer_count: int, granted_ms: int
    ) -> npt.NDArray[np.bool_]:
        assert positions.tolist() == list(range(run.start, run.start + run.count))[part]
        layers = np.arange(first_layer, first_layer + layer_count)
        counted = layers[None, :] < self.board.ready(positions)[:, None]
        assert not counted.any(), "an engine may be reading these"
        self.written[np.ix_(positions, layers)] = True
        self.bad[np.ix_(positions, layers)] = not self.proves_good
        return np.full(len(positions), self.proves_good)

    def _stub(self) -> Any:
        raise AssertionError

    def _server(self) -> WatchedServer:
        raise AssertionError

    def _session_id(self) -> bytes:
        raise AssertionError

    def _release(self, lease_id: int) -> None:
        raise AssertionError


windows = st.tuples(
    st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.integers(0, LAYERS - 1), st.integers(1, LAYERS), st.booleans()
)


@given(st.lists(windows, max_size=30))
def test_whatever_comes_in_whatever_windows_only_what_is_missing_is_written(
    answers: list[tuple[int, int, int, int, bool]],
) -> None:
    core = SimpleNamespace(shape=SimpleNamespace(layers=LAYERS), clock=ManualClock())
    board, tally = LayerBoard(BLOCKS, LAYERS, None), Tally(BLOCKS)
    wanted = Wanted(
        cast("Core", core),
        [],
        b"",
        None,
        0,
        [],
        cast("BlockBuffer", None),
        cast("Operation", SimpleNamespace(over=False)),
        tally,
        board,
        verify_copies=False,
        verify_wire=False,
    )
    part = Part(wanted, board)
    for start, count, first, layers, good in answers:
        part.proves_good = good
        run = node_pb2.LoadedRun(
            start=start,
            count=min(count, BLOCKS - start),
            outcome=int(Outcome.HIT),  # type: ignore[arg-type]
            tier=int(Tier.NVME),  # type: ignore[arg-type]
            first_layer=first,
            layer_count=min(layers, LAYERS - first),
        )
        part._take(run, 0, BLOCKS, 0)
    arrived = np.arange(LAYERS)[None, :] < board.ready(np.arange(BLOCKS))[:, None]
    assert part.written[arrived].all()
    assert not part.bad[arrived].any(), "bytes that proved bad count as arrived"
    assert (board.complete() == (tally.outcomes == Outcome.HIT)).all()
