"""Conformance suite of transports: a server and a ``BlockPeer`` together, over any wire.

Subclass it, name the class ``Test…``, and define how to serve a provider and how to connect to it::

    class TestMyTransport(TransportSuite):
        def serve(self, provider, authority=None):
            server = MyServer(provider, authority)
            server.start()
            return server                    # has stop()

        def connect(self, served, ticket=b""):
            return MyPeer(served.address, ticket)

Every test ends by checking that the provider got back all its loans.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.core.buffers import BlockBuffer, DenseBlocks, ScatteredBlocks
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Internal, InvalidArgument, NotFound, PermissionDenied, Unauthenticated, Unavailable
from kvstore.core.limits import MAX_HELD_CONNECTIONS
from kvstore.core.types import BlockKey, BlockRun, BlockShape, BootId, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.testing.memory_provider import MemoryProvider, ProviderGate, block_key, block_payload, checksums_of
from kvstore.transport.contract import BlockPeer, BlockProvider, ReadRequest, ReadResult, WriteRequest
from kvstore.transport.tickets import TicketAuthority

NAMESPACE = NamespaceId(b"transport-suite.")
OTHER = NamespaceId(b"another-namespac")
SHAPES = (BlockShape(1, 1), BlockShape(1, 4096), BlockShape(3, 1000), BlockShape(4, 65_536), BlockShape(2, 700_001))
PATIENCE_S = 30.0
SENTINEL = 0xA5


class TransportServer(Protocol):
    """A running server of a provider."""

    def stop(self) -> None:
        """Stop at once; connections end."""


# ---- buffers ----


def dense(count: int, shape: BlockShape) -> DenseBlocks:
    """Blocks in one contiguous array."""
    return DenseBlocks(np.full((count, shape.layers, shape.layer_block_bytes), SENTINEL, np.uint8))


def layer_major(count: int, shape: BlockShape) -> DenseBlocks:
    """Layer after layer, in the order of an engine's cache."""
    return DenseBlocks(np.full((shape.layers, count, shape.layer_block_bytes), SENTINEL, np.uint8).transpose(1, 0, 2))


def padded(count: int, shape: BlockShape) -> DenseBlocks:
    """Blocks with gaps between blocks and between layers."""
    memory = np.full((count, shape.layers + 1, shape.layer_block_bytes + 3), SENTINEL, np.uint8)
    return DenseBlocks(memory[:, : shape.layers, : shape.layer_block_bytes])


def scattered(count: int, shape: BlockShape) -> ScatteredBlocks:
    """Each block in separate memory."""
    memory = memoryview(bytearray([SENTINEL]) * (count * (shape.block_bytes + 5)))
    starts = [at * (shape.block_bytes + 5) for at in reversed(range(count))]
    return ScatteredBlocks([memory[start : start + shape.block_bytes] for start in starts], shape)


BUFFERS: tuple[Callable[[int, BlockShape], BlockBuffer], ...] = (dense, layer_major, padded, scattered)


def content(buffer: BlockBuffer, block: int) -> bytes:
    """Bytes of a block in a buffer."""
    return b"".join(bytes(piece) for piece in buffer.segments(block, 0, buffer.shape.layers))


def filled(make: Callable[[int, BlockShape], BlockBuffer], numbers: Sequence[int], shape: BlockShape) -> BlockBuffer:
    """A buffer that contains test blocks."""
    buffer = make(len(numbers), shape)
    for block, number in enumerate(numbers):
        rest = memoryview(block_payload(number, shape))
        for piece in buffer.segments(block, 0, shape.layers):
            piece[:], rest = rest[: len(piece)], rest[len(piece) :]
    return buffer


# ---- requests ----


def read_of(
    numbers: Sequence[int],
    layers: int,
    *,
    first_layer: int = 0,
    layer_group: int = 0,
    namespace: NamespaceId = NAMESPACE,
    within_s: float = PATIENCE_S,
) -> ReadRequest:
    """A request to read test blocks."""
    keys = [block_key(number) for number in numbers]
    return ReadRequest(namespace, keys, first_layer, layers, layer_group, time.monotonic() + within_s)


def store(
    peer: BlockPeer,
    source: BlockBuffer,
    numbers: Sequence[int],
    *,
    spoiled: Sequence[int] = (),
    summed: bool = True,
    namespace: NamespaceId = NAMESPACE,
    within_s: float = PATIENCE_S,
) -> list[StoreOutcome]:
    """Write test blocks with wrong checksums for the ``spoiled`` ones. If ``summed`` is false, the transport computes them."""
    shape = source.shape
    checksums = checksums_of([block_payload(number, shape) for number in numbers], shape)
    checksums[[numbers.index(number) for number in spoiled], shape.layers - 1] ^= np.uint64(1)
    return peer.write(write_of(numbers, shape, namespace=namespace, within_s=within_s), source, checksums if summed else None)


def write_of(
    numbers: Sequence[int], shape: BlockShape, *, namespace: NamespaceId = NAMESPACE, within_s: float = PATIENCE_S
) -> WriteRequest:
    """A request to write test blocks."""
    run = BlockRun(namespace, BlockKey(b"p" * 16), 7, tuple(block_key(number) for number in numbers))
    return WriteRequest(run, shape, False, time.monotonic() + within_s)


def layers_of(source: BlockBuffer, first_layer: int, layer_count: int) -> DenseBlocks:
    """Some layers of each block, copied."""
    joined = [b"".join(source.segments(block, first_layer, layer_count)) for block in range(source.count)]
    shape = (source.count, layer_count, source.shape.layer_block_bytes)
    return DenseBlocks(np.frombuffer(b"".join(joined), np.uint8).reshape(shape))


class TransportSuite(ABC):
    """Behaviour that every transport must have."""

    @abstractmethod
    def serve(self, provider: BlockProvider, authority: TicketAuthority | None = None) -> TransportServer:
        """Start serving a provider. If ``authority`` is None, any ticket is valid."""

    @abstractmethod
    def connect(self, served: Any, ticket: bytes = b"") -> BlockPeer:  # noqa: ANN401 - what ``serve`` answered
        """Connect a new peer."""

    @pytest.fixture
    def provider(self) -> Iterator[MemoryProvider]:
        """Test blocks; the fixture checks for missing loans at its end."""
        provider = MemoryProvider()
        yield provider
        provider.settle()

    @pytest.fixture
    def served(self, provider: MemoryProvider) -> Iterator[TransportServer]:
        """A server of the provider."""
        served = self.serve(provider)
        yield served
        served.stop()

    @pytest.fixture
    def peer(self, served: TransportServer) -> Iterator[BlockPeer]:
        """A peer of the server."""
        peer = self.connect(served)
        yield peer
        peer.close()

    # ---- reads ----

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
    @pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
    def test_read_blocks_arrive(
        self,
        provider: MemoryProvider,
        peer: BlockPeer,
        shape: BlockShape,
        make: Callable[[int, BlockShape], BlockBuffer],
        verify: bool,
    ) -> None:
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(23))
        provider.tier = Tier.NVME
        provider.part_keys = 9
        buffer = make(23, shape)
        result = peer.read(read_of(range(23), shape.layers), buffer, verify=verify)
        assert result.outcomes == [Outcome.HIT] * 23
        assert result.tiers == [Tier.NVME] * 23
        assert result.bytes_received == 23 * shape.block_bytes
        assert result.checksums is not None
        assert np.array_equal(result.checksums, checksums_of([block_payload(number, shape) for number in range(23)], shape))
        for number in range(23):
            assert content(buffer, number) == block_payload(number, shape)

    @pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
    @pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 3), (5, 1), (0, 6)])
    @pytest.mark.parametrize("group", [0, 1, 2, 6])
    def test_read_layer_ranges_and_groups_are_exact(
        self,
        provider: MemoryProvider,
        peer: BlockPeer,
        make: Callable[[int, BlockShape], BlockBuffer],
        first: int,
        count: int,
        group: int,
    ) -> None:
        shape = BlockShape(6, 333)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [0, 1, 3, 4])
        provider.part_keys = 2
        buffer = make(5, shape)
        told: list[tuple[int, int]] = []

        def on_layers(at: int, n: int, good: npt.NDArray[np.bool_]) -> None:
            assert good.tolist() == [True, True, False, True, True]
            told.append((at, n))

        result = peer.read(read_of(range(5), count, first_layer=first, layer_group=group), buffer, on_layers=on_layers)
        assert result.outcomes == [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT]
        assert [layer for at, n in told for layer in range(at, at + n)] == list(range(first, first + count))
        low, high = first * 333, (first + count) * 333
        for number in range(5):
            expected = bytearray([SENTINEL]) * shape.block_bytes
            if number != 2:
                expected[low:high] = block_payload(number, shape)[low:high]
            assert content(buffer, number) == expected

    def test_read_layer_is_reported_after_its_bytes(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(8, 300_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(12))
        buffer = dense(12, shape)
        expected = np.stack([np.frombuffer(block_payload(number, shape), np.uint8) for number in range(12)]).reshape(
            buffer.array.shape
        )
        seen: list[int] = []

        def on_layers(first: int, count: int, good: npt.NDArray[np.bool_]) -> None:
            assert good.all()
            layers = slice(first, first + count)
            seen.extend(range(first, first + count) if np.array_equal(buffer.array[:, layers], expected[:, layers]) else [])

        peer.read(read_of(range(12), 8, layer_group=1), buffer, on_layers=on_layers)
        assert seen == list(range(8))

    def test_read_block_reported_good_has_all_layers(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(6, 100_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [number for number in range(20) if number not in (3, 17)])
        provider.flip(NAMESPACE, 5, 0)
        provider.flip(NAMESPACE, 8, 2 * 100_000)
        provider.flip(NAMESPACE, 11, 6 * 100_000 - 1)
        buffer = dense(20, shape)
        fails = {3: 0, 17: 0, 5: 0, 8: 2, 11: 5}
        layers: list[int] = []

        def on_layers(first: int, count: int, good: npt.NDArray[np.bool_]) -> None:
            layers.extend(range(first, first + count))
            upto = first + count
            for number in range(20):
                if good[number]:
                    assert content(buffer, number)[: upto * 100_000] == block_payload(number, shape)[: upto * 100_000]
                # a block may be reported failed early; a failed block never becomes a hit
                assert good[number] <= (fails.get(number, 6) >= upto)
                assert good[number] or number in fails

        result = peer.read(read_of(range(20), 6, layer_group=1), buffer, on_layers=on_layers)
        assert layers == list(range(6))
        assert [number for number, outcome in enumerate(result.outcomes) if outcome is not Outcome.HIT] == sorted(fails)

    def test_read_miss_leaves_memory_unchanged(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 5_000)
        provider.declare(NAMESPACE, shape)
        held = [number for number in range(400) if number % 3]
        provider.put(NAMESPACE, held)
        buffer = dense(400, shape)
        result = peer.read(read_of(range(400), 2), buffer)
        for number, outcome in enumerate(result.outcomes):
            assert outcome is (Outcome.HIT if number % 3 else Outcome.MISS)
            assert content(buffer, number) == (
                block_payload(number, shape) if number % 3 else bytes([SENTINEL]) * shape.block_bytes
            )
        assert result.checksums is not None
        assert not result.checksums[::3].any()

    def test_read_corrupt_block_is_not_a_hit(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(3, 70_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(20))
        provider.flip(NAMESPACE, 4, 0)
        provider.flip(NAMESPACE, 11, 100_000)
        provider.flip(NAMESPACE, 19, shape.block_bytes - 1)
        for group in (0, 1):
            result = peer.read(read_of(range(20), 3, layer_group=group), dense(20, shape))
            assert [number for number, outcome in enumerate(result.outcomes) if outcome is not Outcome.HIT] == [4, 11, 19]
            assert {result.outcomes[number] for number in (4, 11, 19)} == {Outcome.CORRUPT}
        # only the requested layers count
        assert peer.read(read_of([4, 11, 19], 1, first_layer=2), dense(3, shape)).outcomes == [
            Outcome.HIT,
            Outcome.HIT,
            Outcome.CORRUPT,
        ]
        assert peer.read(read_of([4], 3), dense(1, shape), verify=False).outcomes == [Outcome.HIT]

    def test_read_zero_keys_is_empty(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        provider.declare(NAMESPACE, BlockShape(2, 8))
        assert peer.read(read_of([], 2), dense(0, BlockShape(2, 8))).outcomes == []

    def test_read_many_tiny_blocks_arrive(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 128)
        count = 16_384
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(count))
        buffer = dense(count, shape)
        assert peer.read(read_of(range(count), 2, within_s=60), buffer).outcomes == [Outcome.HIT] * count
        assert bytes(buffer.array.reshape(-1)) == b"".join(block_payload(number, shape) for number in range(count))
        assert (
            peer.read(read_of(range(count), 2, layer_group=1, within_s=60), layer_major(count, shape)).outcomes
            == [Outcome.HIT] * count
        )

    def test_read_unknown_namespace_is_all_misses(self, peer: BlockPeer) -> None:
        assert peer.read(read_of(range(3), 2), dense(3, BlockShape(2, 8))).outcomes == [Outcome.MISS] * 3
        with pytest.raises(NotFound):
            store(peer, filled(dense, [1], BlockShape(2, 8)), [1])

    def test_read_invalid_call_raises(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 64)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [1])
        wrong: list[tuple[ReadRequest, BlockBuffer]] = [
            (read_of([1], 2), dense(1, BlockShape(2, 32))),  # a shape that differs from the namespace's
            (read_of([1, 2], 2), dense(1, shape)),
            (read_of([1], 3), dense(1, shape)),
            (read_of([1], 0), dense(1, shape)),
            (read_of([1], 1, first_layer=2), dense(1, shape)),
            (read_of([1], 1, first_layer=-1), dense(1, shape)),
            (read_of([1], 2, layer_group=3), dense(1, shape)),
            (replace(read_of([1], 2), keys=[BlockKey(b"short")]), dense(1, shape)),
            (read_of([1], 2), DenseBlocks(np.frombuffer(bytes(128), np.uint8).reshape(1, 2, 64))),  # read-only
        ]
        for request, buffer in wrong:
            with pytest.raises(InvalidArgument):
                peer.read(request, buffer)
        with pytest.raises(InvalidArgument):
            store(peer, filled(dense, [2], BlockShape(2, 32)), [2])
        assert peer.read(read_of([1], 2), dense(1, shape)).outcomes == [Outcome.HIT]

    # ---- writes ----

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
    def test_write_blocks_are_stored(
        self, provider: MemoryProvider, peer: BlockPeer, shape: BlockShape, make: Callable[[int, BlockShape], BlockBuffer]
    ) -> None:
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [3])
        provider.refuse = {block_key(5)}
        numbers = range(9)
        outcomes = store(peer, filled(make, numbers, shape), numbers, spoiled=[7])
        expected = dict.fromkeys(numbers, StoreOutcome.STORED) | {
            3: StoreOutcome.EXISTS,
            5: StoreOutcome.SKIPPED,
            7: StoreOutcome.CORRUPT,
        }
        assert outcomes == list(expected.values())
        for number, outcome in expected.items():
            kept = outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS)
            assert provider.held(NAMESPACE, number) == (block_payload(number, shape) if kept else None)
        again = store(peer, filled(make, [0, 1], shape), [0, 1])
        assert again == [StoreOutcome.EXISTS] * 2

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
    def test_write_without_checksums_computes_them(
        self, provider: MemoryProvider, peer: BlockPeer, shape: BlockShape, make: Callable[[int, BlockShape], BlockBuffer]
    ) -> None:
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [3])
        provider.refuse = {block_key(5)}
        numbers = range(9)
        outcomes = store(peer, filled(make, numbers, shape), numbers, summed=False)
        assert [at for at, outcome in enumerate(outcomes) if outcome is StoreOutcome.STORED] == [0, 1, 2, 4, 6, 7, 8]
        found = peer.read(
            read_of(numbers, shape.layers), make(9, shape)
        )  # verified against the checksums that the provider received
        assert found.outcomes == [Outcome.MISS if number == 5 else Outcome.HIT for number in numbers]
        assert provider.held(NAMESPACE, 8) == block_payload(8, shape)

    def test_write_nothing_granted_leaves_nothing_open(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(1, 10)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [1, 2])
        assert store(peer, filled(dense, [1, 2], shape), [1, 2]) == [StoreOutcome.EXISTS] * 2
        assert store(peer, dense(0, shape), []) == []
        provider.settle()  # the grant is aborted after the answer
        assert (provider.commits, provider.aborts) == (0, 1)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_write_layerwise_is_stored_whole(self, provider: MemoryProvider, peer: BlockPeer, shape: BlockShape) -> None:
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [3])
        provider.refuse = {block_key(5)}
        numbers = range(9)
        source = filled(dense, numbers, shape)
        write = peer.begin_write(write_of(numbers, shape))
        assert write.granted.tolist() == [0, 1, 2, 4, 6, 7, 8]
        for first in reversed(range(0, shape.layers, 2)):  # in any order, in groups of any size
            assert provider.held(NAMESPACE, 0) is None, "visible before all of it was there"
            write.put(first, layers_of(source, first, min(2, shape.layers - first)))
        outcomes = dict.fromkeys(numbers, StoreOutcome.STORED) | {3: StoreOutcome.EXISTS, 5: StoreOutcome.SKIPPED}
        assert list(write.commit()) == list(outcomes.values())
        assert provider.held(NAMESPACE, 8) == block_payload(8, shape)
        assert peer.read(read_of(numbers, shape.layers), dense(9, shape)).outcomes[8] is Outcome.HIT, "the connection is in step"

    def test_write_layerwise_cancelled_stores_nothing(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(3, 64)
        provider.declare(NAMESPACE, shape)
        source = filled(dense, [1, 2], shape)
        write = peer.begin_write(write_of([1, 2], shape))
        write.put(1, layers_of(source, 1, 1))
        for wrong in (lambda: write.put(1, layers_of(source, 1, 1)), lambda: write.put(2, layers_of(source, 1, 2)), write.commit):
            with pytest.raises(InvalidArgument):
                wrong()
        write.abort()
        provider.settle()
        assert (provider.commits, provider.aborts) == (0, 1)
        with pytest.raises(Unavailable):
            write.put(0, layers_of(source, 0, 1))
        assert store(peer, source, [1, 2]) == [StoreOutcome.STORED] * 2

    def test_write_layerwise_nothing_granted_sends_nothing(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 64)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [1])
        write = peer.begin_write(write_of([1], shape))
        write.put(0, dense(1, shape))
        assert list(write.commit()) == [StoreOutcome.EXISTS]
        provider.settle()
        assert (provider.commits, provider.aborts) == (0, 1)

    def test_write_layerwise_open_does_not_block_others(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 64)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [99])
        source = filled(dense, [0], shape)
        writes = [peer.begin_write(write_of([number], shape)) for number in range(MAX_HELD_CONNECTIONS)]
        for write in writes:
            write.put(0, layers_of(source, 0, 1))
        assert peer.read(read_of([99], shape.layers), dense(1, shape)).outcomes == [Outcome.HIT]
        assert store(peer, filled(dense, [100], shape), [100]) == [StoreOutcome.STORED]
        for write in writes:
            write.put(1, layers_of(source, 1, 1))
            assert list(write.commit()) == [StoreOutcome.STORED]

    # ---- faults ----

    def test_read_late_provider_times_out(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(1, 2_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(6))
        provider.part_keys = 2
        provider.before_part = gate = ProviderGate(2)
        buffer = dense(6, shape)
        result = peer.read(read_of(range(6), 1, within_s=0.4), buffer)
        gate.open.set()
        assert result.outcomes == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 4
        provider.settle()  # the server has finished
        assert content(buffer, 1) == block_payload(1, shape)
        for late in range(2, 6):
            assert content(buffer, late) == bytes([SENTINEL]) * shape.block_bytes
        provider.before_part = None
        assert peer.read(read_of(range(6), 1), buffer).outcomes == [Outcome.HIT] * 6

    def test_read_deadline_in_the_past_times_out(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(1, 10)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, [1])
        assert peer.read(read_of([1], 1, within_s=-1), dense(1, shape)).outcomes == [Outcome.TIMEOUT]
        assert store(peer, filled(dense, [2], shape), [2], within_s=-1) == [StoreOutcome.LOST]
        assert peer.read(read_of([1], 1), dense(1, shape)).outcomes == [Outcome.HIT]

    def test_read_provider_fails_midway_is_unavailable(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(1, 2_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(6))
        provider.part_keys = 2
        provider.before_part = gate = ProviderGate(4, Internal("a bug"))
        gate.open.set()
        assert peer.read(read_of(range(6), 1), dense(6, shape)).outcomes == [Outcome.HIT] * 4 + [Outcome.UNAVAILABLE] * 2
        provider.before_part = None
        assert peer.read(read_of(range(6), 1), dense(6, shape)).outcomes == [Outcome.HIT] * 6

    def test_read_server_killed_midway_is_unavailable(
        self, provider: MemoryProvider, served: TransportServer, peer: BlockPeer
    ) -> None:
        shape = BlockShape(1, 2_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(6))
        provider.part_keys = 2
        provider.before_part = gate = ProviderGate(4)
        buffer = dense(6, shape)
        with ThreadPoolExecutor(2) as pool:
            reading = pool.submit(peer.read, read_of(range(6), 1), buffer)
            gate.wait_reached()
            stopping = pool.submit(served.stop)
            result = reading.result(PATIENCE_S)
            gate.open.set()
            stopping.result(PATIENCE_S)
        assert result.outcomes == [Outcome.HIT] * 4 + [Outcome.UNAVAILABLE] * 2
        assert content(buffer, 3) == block_payload(3, shape)
        with pytest.raises(Unavailable):
            peer.read(read_of(range(6), 1), buffer)

    def test_read_peer_closed_midway_is_unavailable(self, provider: MemoryProvider, served: TransportServer) -> None:
        shape = BlockShape(1, 2_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(6))
        provider.part_keys = 2
        provider.before_part = gate = ProviderGate(2)
        peer = self.connect(served)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(peer.read, read_of(range(6), 1), dense(6, shape))
            gate.wait_reached()
            peer.close()
            result = reading.result(PATIENCE_S)
            gate.open.set()
        assert result.outcomes == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE] * 4
        provider.settle()
        with pytest.raises(Unavailable):
            peer.read(read_of(range(6), 1), dense(6, shape))

    def test_write_peer_closed_midway_is_lost(self, provider: MemoryProvider, served: TransportServer) -> None:
        shape = BlockShape(1, 2_000)
        provider.declare(NAMESPACE, shape)
        provider.on_grant = gate = ProviderGate()
        peer = self.connect(served)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(store, peer, filled(dense, range(4), shape), range(4))
            gate.wait_reached()
            peer.close()
            outcomes = writing.result(PATIENCE_S)
            gate.open.set()
        assert outcomes == [StoreOutcome.LOST] * 4
        provider.settle()
        assert (provider.commits, provider.aborts) == (0, 1)
        assert provider.held(NAMESPACE, 0) is None

    def test_reads_concurrent_are_correct(self, provider: MemoryProvider, peer: BlockPeer) -> None:
        shape = BlockShape(2, 40_000)
        provider.declare(NAMESPACE, shape)
        provider.put(NAMESPACE, range(64))

        def read(start: int) -> tuple[int, ReadResult, BlockBuffer]:
            buffer = dense(32, shape)
            return start, peer.read(read_of(range(start, start + 32), 2), buffer), buffer

        def write(start: int) -> list[StoreOutcome]:
            numbers = range(start, start + 8)
            return store(peer, filled(scattered, numbers, shape), numbers)

        with ThreadPoolExecutor(12) as pool:
            reads = [pool.submit(read, start) for start in range(0, 32, 2)]
            writes = [pool.submit(write, start) for start in range(100, 164, 8)]
            for reading in reads:
                start, result, buffer = reading.result(PATIENCE_S)
                assert result.outcomes == [Outcome.HIT] * 32
                assert all(content(buffer, at) == block_payload(start + at, shape) for at in range(32))
            for writing in writes:
                assert writing.result(PATIENCE_S) == [StoreOutcome.STORED] * 8
        assert all(provider.held(NAMESPACE, number) == block_payload(number, shape) for number in range(100, 164))

    # ---- tickets ----

    def test_ticket_of_other_namespace_is_rejected(self, provider: MemoryProvider) -> None:
        shape = BlockShape(1, 100)
        provider.declare(NAMESPACE, shape)
        provider.declare(OTHER, shape)
        provider.put(NAMESPACE, [1])
        provider.put(OTHER, [1])
        clock = ManualClock()
        authority = TicketAuthority(b"s" * 32, BootId(b"b" * 16), clock)
        stranger = TicketAuthority(b"t" * 32, BootId(b"b" * 16), clock)
        served = self.serve(provider, authority)
        try:
            peer = self.connect(served, authority.issue(NAMESPACE, 60))
            everywhere = self.connect(served, authority.issue(None, 60))
            assert peer.read(read_of([1], 1), dense(1, shape)).outcomes == [Outcome.HIT]
            with pytest.raises(PermissionDenied):
                peer.read(read_of([1], 1, namespace=OTHER), dense(1, shape))
            with pytest.raises(PermissionDenied):
                store(peer, filled(dense, [2], shape), [2], namespace=OTHER)
            assert peer.read(read_of([1], 1), dense(1, shape)).outcomes == [Outcome.HIT]
            for namespace in (NAMESPACE, OTHER):
                assert everywhere.read(read_of([1], 1, namespace=namespace), dense(1, shape)).outcomes == [Outcome.HIT]
            for ticket in (b"", b"x" * 80, stranger.issue(NAMESPACE, 60), authority.issue(NAMESPACE, -1)):
                refused = self.connect(served, ticket)
                with pytest.raises(Unauthenticated):
                    refused.read(read_of([1], 1), dense(1, shape))
                with pytest.raises(Unauthenticated):
                    store(refused, filled(dense, [2], shape), [2])
                refused.close()
            clock.advance(61)
            with pytest.raises(Unauthenticated):
                peer.read(read_of([1], 1), dense(1, shape))
            assert provider.held(OTHER, 2) is None
            peer.close()
            everywhere.close()
        finally:
            served.stop()
