"""Requests served through the client like an engine does: look up, load, check every byte, compute and store the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from kvclient import KVClient
from kvclient.results import Lookup
from kvstore.core.types import BlockKey, StoreOutcome
from kvstore.workload.payload import Payloads

_BUFFER_BYTES = 256 << 20
"""Maximum bytes of a request loaded or stored at once: bounds the buffer for any block size."""


@dataclass(slots=True)
class ReplayTotals:
    """Totals of a run. Times are seconds, one entry per call that moved blocks."""

    requests: int = 0
    blocks_total: int = 0
    blocks_hit: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    wrong_bytes: int = 0
    wrong_blocks: int = 0
    short_loads: int = 0
    """Loads that returned fewer blocks than the lookup; the rest was computed again."""
    blocks_not_delivered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Failures reported by the client, by kind; each costs at most misses or skipped stores."""
    bytes_by_tier: Counter[str] = field(default_factory=Counter)
    bytes_by_node: Counter[str] = field(default_factory=Counter)
    bytes_by_path: Counter[str] = field(default_factory=Counter)
    store_outcomes: Counter[str] = field(default_factory=Counter)
    lookup_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    store_s: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt blocks that were loaded from the store."""
        return self.blocks_hit / self.blocks_total if self.blocks_total else 0.0

    def take(self) -> ReplayTotals:
        """Return the totals to date, and begin again at zero."""
        empty = ReplayTotals()
        taken = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in taken:
            setattr(self, name, getattr(empty, name))
        return ReplayTotals(**taken)

    def note(self) -> str:
        """One line for a progress display."""
        return f"{self.hit_ratio:.1%} hits, {self.wrong_bytes} wrong bytes"


class RequestRunner:
    """Serves requests with one client and one reused buffer. Not thread-safe.

    Args:
        client: connected with the spec of the keys.
        tally: totals; several runners of one thread may share them.
        largest_request: blocks of the longest request.
    """

    def __init__(self, client: KVClient, tally: ReplayTotals, largest_request: int) -> None:
        self._client = client
        self._tally = tally
        block_bytes = client.spec.block_bytes
        self._payloads = Payloads(block_bytes)
        self._piece = max(1, min(largest_request, _BUFFER_BYTES // block_bytes))
        self._buffer: npt.NDArray[np.uint8] = np.zeros((self._piece, block_bytes), dtype=np.uint8)

    def serve(self, keys: Sequence[BlockKey]) -> int:
        """Serve one prompt: look up, load the hits, compute and store the rest. Returns the number of hit blocks."""
        hit = self.load(keys)
        self.store(keys, hit)
        self._tally.requests += 1
        return hit

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        """Look a prompt up without a load."""
        started_s = time.perf_counter()
        found = self._client.lookup(keys)
        self._tally.lookup_s.append(time.perf_counter() - started_s)
        self._note_error(found.error)
        return found

    def load(self, keys: Sequence[BlockKey]) -> int:
        """Look a prompt up, load and check its leading hits; returns the number of loaded blocks."""
        tally = self._tally
        tally.blocks_total += len(keys)
        found = self.lookup(keys)
        promised = min(found.hit_blocks, len(keys))
        came = self._load_pieces(keys, found, promised)
        if came < promised:
            tally.short_loads += 1
            tally.blocks_not_delivered += promised - came
        tally.blocks_hit += came
        return came

    def _load_pieces(self, keys: Sequence[BlockKey], found: Lookup, promised: int) -> int:
        """Load up to ``promised`` blocks in pieces; stop at the first missing block."""
        came = 0
        spent_s = 0.0
        while came < promised:
            count = min(self._piece, promised - came)
            buffer = self._buffer[:count]
            buffer.fill(0)  # bytes of an earlier request must not pass as loaded bytes
            started_s = time.perf_counter()
            result = self._client.load(found.part(came, came + count), buffer)
            spent_s += time.perf_counter() - started_s
            self._note_error(result.error)
            self._tally.bytes_loaded += result.bytes_loaded
            self._tally.bytes_by_tier.update({tier.name.lower(): size for tier, size in result.bytes_by_tier.items()})
            self._tally.bytes_by_node.update(result.bytes_by_node)
            self._tally.bytes_by_path.update(result.bytes_by_path)
            hit = result.hit_blocks
            self._check(keys[came : came + hit], buffer[:hit])
            came += hit
            if hit < count:
                break
        if promised:
            self._tally.load_s.append(spent_s)
        return came

    def _check(self, keys: Sequence[BlockKey], blocks: npt.NDArray[np.uint8]) -> None:
        wrong = self._payloads.wrong_blocks(keys, blocks)
        if wrong:
            self._tally.wrong_blocks += len(wrong)
            self._tally.wrong_bytes += self._payloads.wrong_bytes(keys, blocks)

    def store(self, keys: Sequence[BlockKey], start: int) -> None:
        """Compute blocks ``[start, len(keys))`` of a chain and store them; they are visible to the next lookup."""
        tally = self._tally
        spent_s = 0.0
        for first in range(start, len(keys), self._piece):
            part = keys[first : first + self._piece]
            buffer = self._buffer[: len(part)]
            self._payloads.fill(part, buffer)
            started_s = time.perf_counter()
            result = self._client.store(part, buffer, parent=keys[first - 1] if first else None, depth=first, wait_visible=True)
            spent_s += time.perf_counter() - started_s
            self._note_error(result.error)
            tally.bytes_stored += result.bytes_stored
            numbers, counts = np.unique(result.outcomes, return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                tally.store_outcomes[StoreOutcome(number).name.lower()] += count
        if start < len(keys):
            tally.store_s.append(spent_s)

    def _note_error(self, error: Exception | None) -> None:
        if error is not None:
            self._tally.errors[type(error).__name__] += 1
