"""Small pure parts: addresses, circuit breaker, splitting of reads, buffer layout."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.buffers import DenseBlocks, Layout, positions
from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.testing.transport_suite import BUFFERS, dense, layer_major, padded
from kvstore.transport.addresses import format_address, parse_address
from kvstore.transport.liveness import CircuitBreaker
from kvstore.transport.tcp.striped_read import MAX_UNIT_BYTES, UNIT_KEYS, budget_ms, split_read
from kvstore.transport.wire import PlainWire


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65_535))]
)
def test_address_valid_round_trips(address: str, parts: tuple[str, int]) -> None:
    assert parse_address(address) == parts
    assert format_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "::1:80", "[host:80", "host:65536", "host:-1", "host:8o", "[h]:1:2", "host:٣"]
)
def test_address_invalid_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(address)


def test_breaker_opens_allows_one_trial_and_closes() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock, failures=3, open_s=10)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.allow(), breaker.failed()] == [False, False, True, True]
    assert not breaker.allow()
    clock.advance(10)
    assert [breaker.allow(), breaker.allow()] == [True, False]  # one trial
    assert not breaker.failed()  # the breaker was open already
    clock.advance(9)
    assert not breaker.allow()
    clock.advance(1)
    assert breaker.allow()
    breaker.succeeded()
    assert [breaker.allow(), breaker.allow()] == [True, True]


@given(st.integers(1, 70_000), st.integers(1, 64 << 20), st.integers(1, 8), st.integers(0, 2))
def test_split_read_covers_all_keys(count: int, bytes_per_block: int, streams: int, group: int) -> None:
    units, used = split_read(count, bytes_per_block, streams, group)
    assert 1 <= used <= streams
    at = 0
    for unit in units:
        assert unit.first == at
        assert unit.count > 0
        at += unit.count
    assert at == count
    if group:
        assert len(units) <= used
    else:
        assert max(unit.count for unit in units) <= UNIT_KEYS
        assert all(unit.count == 1 or unit.count * bytes_per_block <= MAX_UNIT_BYTES for unit in units)


@given(st.floats(0.0001, 1e7))
def test_budget_is_below_time_left(left_s: float) -> None:
    assert 1 <= budget_ms(left_s) <= max(1, left_s * 1000)


@pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
@given(st.lists(st.integers(0, 9), unique=True), st.data())
def test_layout_pieces_match_segments(make: object, blocks: list[int], data: st.DataObject) -> None:
    shape = BlockShape(4, 3)
    buffer = make(10, shape)  # type: ignore[operator]
    for block in range(10):
        for piece in buffer.segments(block, 0, 4):
            piece[:] = np.random.default_rng(block).bytes(len(piece))
    first = data.draw(st.integers(0, 3))
    count = data.draw(st.integers(1, 4 - first))
    layout = Layout(buffer, writable=True)
    expected = b"".join(bytes(piece) for block in blocks for piece in buffer.segments(block, first, count))
    assert b"".join(layout.pieces(np.array(blocks, np.int64), first, count)) == expected
    addresses, lengths = layout.addresses(np.array(blocks, np.int64), first, count)
    assert len(addresses) == len(lengths)
    assert int(lengths.sum()) == len(expected)


def test_layout_adjacent_blocks_are_joined() -> None:
    shape = BlockShape(2, 10)
    run = np.arange(3, 7)
    assert [len(piece) for piece in Layout(dense(9, shape), writable=True).pieces(run, 0, 2)] == [80]
    assert [len(piece) for piece in Layout(layer_major(9, shape), writable=True).pieces(run, 1, 1)] == [40]
    assert [len(piece) for piece in Layout(padded(9, shape), writable=True).pieces(run, 1, 1)] == [10] * 4
    holes = np.array([1, 2, 5])
    assert [len(piece) for piece in Layout(dense(9, shape), writable=True).pieces(holes, 0, 2)] == [40, 20]


def test_layout_negative_strides_are_supported() -> None:
    array = np.zeros((5, 2, 4), np.uint8)[::-1]
    layout = Layout(DenseBlocks(array), writable=True)
    for number, piece in enumerate(layout.pieces(np.arange(5), 0, 2)):
        piece[:] = bytes([number]) * len(piece)
    assert array[:, 0, 0].tolist() == list(range(5))


def test_positions_outside_buffer_are_refused() -> None:
    assert positions(None, 3).tolist() == [0, 1, 2]
    for wrong in ([3], [-1]):
        with pytest.raises(InvalidArgument):
            positions(wrong, 3)


def test_wire_without_stall_timeout_waits_for_deadline() -> None:
    """The peer of a layer-wise write computes between two layers for longer than the stall timeout."""
    ours, theirs = socket.socketpair()
    wire = PlainWire(ours, 0.2)
    deadline_s = time.monotonic() + 20.0
    theirs.sendall(bytes(10))
    wire.receive(10, deadline_s)
    wire.stall_s = None
    later = threading.Timer(0.6, theirs.sendall, [b"y" * 10])
    later.start()
    try:
        assert bytes(wire.receive(10, deadline_s)) == b"y" * 10
    finally:
        later.join()
        ours.close()
        theirs.close()
