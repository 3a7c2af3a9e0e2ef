"""A block provider in plain memory that tracks every loan: the other half of every transport test.

It fails at once if a part is released twice, or a grant is both committed and aborted. Loans that were never returned fail in
``settle``, which every test calls at its end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.core.checksum import layer_checksums
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest

SETTLE_S = 20.0


def block_key(number: int) -> BlockKey:
    """Key of test block ``number``."""
    return BlockKey(number.to_bytes(16, "big"))


def block_payload(number: int, shape: BlockShape) -> bytes:
    """Payload of test block ``number``."""
    return random.Random(number).randbytes(shape.block_bytes)  # noqa: S311


def checksums_of(payloads: Sequence[bytes], shape: BlockShape) -> Checksums:
    """Checksums of full blocks, ``[blocks, layers]``."""
    packed = b"".join(layer_checksums(memoryview(payload), shape) for payload in payloads)
    return np.frombuffer(packed, "<u8").astype(np.uint64).reshape(len(payloads), shape.layers)


class MemoryProvider(BlockProvider):
    """Blocks in a dictionary.

    Attributes:
        part_keys: maximum number of keys in one part of a read.
        before_part: called with the part's first position before it is created: a test pauses or fails a read here.
        on_grant: called when slots have been granted: a test pauses a write here.
        refuse: keys that a write skips.
        tier: tier that reads report.
    """

    def __init__(self) -> None:
        self.part_keys = 1 << 20
        self.before_part: Callable[[int], None] | None = None
        self.on_grant: Callable[[], None] | None = None
        self.refuse: set[BlockKey] = set()
        self.tier = Tier.DRAM
        self.commits = 0
        self.aborts = 0
        self.requests: list[ReadRequest] = []
        self._shapes: dict[NamespaceId, BlockShape] = {}
        self.blocks: dict[tuple[NamespaceId, BlockKey], tuple[memoryview, Checksums]] = {}
        """Stored blocks: payload and checksums, by namespace and key."""
        self._changed = threading.Condition()
        self._lent = 0
        self._faults: list[str] = []

    # ---- for tests ----

    def declare(self, namespace: NamespaceId, shape: BlockShape) -> None:
        """Register a namespace."""
        self._shapes[namespace] = shape

    def put(self, namespace: NamespaceId, numbers: Sequence[int]) -> None:
        """Insert test blocks."""
        shape = self._shapes[namespace]
        for number in numbers:
            payload = block_payload(number, shape)
            self.blocks[namespace, block_key(number)] = (memoryview(bytearray(payload)), checksums_of([payload], shape)[0])

    def flip(self, namespace: NamespaceId, number: int, byte: int) -> None:
        """Corrupt one byte of a block; its checksums remain."""
        self.blocks[namespace, block_key(number)][0][byte] ^= 0x40

    def held(self, namespace: NamespaceId, number: int) -> bytes | None:
        """Payload of a block, if present."""
        block = self.blocks.get((namespace, block_key(number)))
        return None if block is None else bytes(block[0])

    def settle(self) -> None:
        """Wait until all loans are returned; fail if one is missing or was returned twice."""
        with self._changed:
            settled = self._changed.wait_for(lambda: self._lent == 0, SETTLE_S)
        assert settled, f"{self._lent} parts or grants were never given back"
        assert not self._faults, self._faults

    # ---- BlockProvider ----

    def shape(self, namespace: NamespaceId) -> BlockShape | None:
        return self._shapes.get(namespace)

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        self.requests.append(request)
        layers = self._shapes[request.namespace].layers
        for first in range(0, len(request.keys), self.part_keys):
            if self.before_part is not None:
                self.before_part(first)
            keys = request.keys[first : first + self.part_keys]
            found = [self.blocks.get((request.namespace, key)) for key in keys]
            hits = [block for block in found if block is not None]
            checksums = np.array([block[1] for block in hits], np.uint64).reshape(len(hits), layers)
            outcomes = [Outcome.MISS if block is None else Outcome.HIT for block in found]
            yield ReadPart(first, outcomes, [block[0] for block in hits], checksums, self.tier, self._lend("part"))

    def write(self, request: WriteRequest) -> WriteGrant:
        grant = _MemoryGrant(self, request, self._lend("grant"))
        if self.on_grant is not None:
            self.on_grant()
        return grant

    def _lend(self, what: str) -> Callable[[], None]:
        """Count a loan; the returned callable counts its return, once."""
        returned = False

        def give_back() -> None:
            nonlocal returned
            with self._changed:
                if returned:
                    self._faults.append(f"a {what} was given back twice")
                    return
                returned = True
                self._lent -= 1
                self._changed.notify_all()

        with self._changed:
            self._lent += 1
        return give_back


class _MemoryGrant(WriteGrant):
    def __init__(self, provider: MemoryProvider, request: WriteRequest, give_back: Callable[[], None]) -> None:
        self._provider = provider
        self._request = request
        self._give_back = give_back
        namespace = request.run.namespace
        self.outcomes = [self._outcome(namespace, key) for key in request.run.keys]
        self._keys = [key for key, outcome in zip(request.run.keys, self.outcomes, strict=True) if outcome is StoreOutcome.STORED]
        self.views = [memoryview(bytearray(request.shape.block_bytes)) for _ in self._keys]

    def _outcome(self, namespace: NamespaceId, key: BlockKey) -> StoreOutcome:
        if (namespace, key) in self._provider.blocks:
            return StoreOutcome.EXISTS
        return StoreOutcome.SKIPPED if key in self._provider.refuse else StoreOutcome.STORED

    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        self._provider.commits += 1
        for key, view, row, matched in zip(self._keys, self.views, checksums, good, strict=True):
            if matched:
                self._provider.blocks[self._request.run.namespace, key] = (view, row)
        self._give_back()
        return [StoreOutcome.STORED if matched else StoreOutcome.CORRUPT for matched in good]

    def abort(self) -> None:
        self._provider.aborts += 1
        self._give_back()


class ProviderGate:
    """Blocks a provider's thread at one position until a test opens the gate.

    Args:
        at: the position.
        error: raised when the gate is opened.
    """

    def __init__(self, at: int = 0, error: KVStoreError | None = None) -> None:
        self._at = at
        self._error = error
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, position: int = 0) -> None:
        if position != self._at:
            return
        self.reached.set()
        if not self.open.wait(SETTLE_S):
            raise AssertionError("a test did not open its gate")
        if self._error is not None:
            raise self._error

    def wait_reached(self) -> None:
        """Wait until a thread is blocked."""
        assert self.reached.wait(SETTLE_S), "nobody came to the gate"
