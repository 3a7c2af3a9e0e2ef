"""Volumes with planned faults: wrappers around a real volume.

A ``FaultPlan`` contains rules. Each rule selects a fault, the calls that it affects, when it begins, how often it occurs and
its probability, drawn from the plan's seed, so that a run is repeatable. Tests use the wrapper in place of the volume::

    plan = FaultPlan(seed=7)
    plan.add(VolumeFault.BIT_FLIP, operation=VolumeOperation.READ, probability=0.1)
    volume = FaultyVolume(NvmeSlab.open(…), plan)
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.core.types import BlockKey, BlockShape, NamespaceId, NodeId, Outcome
from kvstore.tiers.contract import BlockRecord, DurableVolume, MappedVolume, Slot, Volume, VolumeUsage

HANG_LIMIT_S = 60.0
"""A hang that is not released ends after this time with EIO, so that a test fails and does not block."""


class VolumeOperation(StrEnum):
    """Operation that a rule affects."""

    READ = "read"
    WRITE = "write"
    COMMIT = "commit"


class VolumeFault(StrEnum):
    """Fault of a block (read, write) or of a whole call (commit)."""

    IO_ERROR = "io_error"
    """EIO: a read is UNAVAILABLE, a write or a commit fails."""
    NO_SPACE = "no_space"
    """ENOSPC on a write or a commit."""
    SHORT_READ = "short_read"
    """Only a part is read, and the read reports it: UNAVAILABLE."""
    BIT_FLIP = "bit_flip"
    """One bit of the block changes; a verified read detects it (CORRUPT), an unverified one does not."""
    TORN_WRITE = "torn_write"
    """Only the first half of the payload is written, and the write reports success."""
    DELAY = "delay"
    """The plan's ``delay`` hook is called first."""
    HANG = "hang"
    """Waits until ``release_hangs``."""


@dataclass(slots=True)
class _Rule:
    fault: VolumeFault
    operation: VolumeOperation
    probability: float
    skip: int
    times: int | None
    keys: frozenset[BlockKey] | None


class FaultPlan:
    """A seeded plan of faults. Thread-safe.

    Args:
        seed: seed of all draws.
        delay: called for ``VolumeFault.DELAY``; a test's clock or barrier.

    Attributes:
        happened: number of occurrences per fault.
        hanging: semaphore, released once per hang; ``acquire`` waits for one.
    """

    def __init__(self, seed: int = 0, delay: Callable[[], None] | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 -- faults that can be repeated, no secrets
        self._delay = delay
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._released = threading.Event()
        self.happened: Counter[VolumeFault] = Counter()
        self.hanging = threading.Semaphore(0)

    def add(
        self,
        fault: VolumeFault,
        *,
        operation: VolumeOperation,
        probability: float = 1.0,
        skip: int = 0,
        times: int | None = None,
        keys: Sequence[BlockKey] | None = None,
    ) -> None:
        """Add a rule.

        Args:
            fault: the fault.
            operation: the affected operation.
            probability: probability per matching block (or commit).
            skip: number of matches to skip first.
            times: maximum number of occurrences; None: unlimited.
            keys: only these blocks; None: all.
        """
        with self._lock:
            self._rules.append(_Rule(fault, operation, probability, skip, times, None if keys is None else frozenset(keys)))

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._rules.clear()

    def release_hangs(self) -> None:
        """End all hangs, including later ones."""
        self._released.set()

    def hold_hangs(self) -> None:
        """Let later hangs wait again, after ``release_hangs``."""
        self._released.clear()

    def draw(self, operation: VolumeOperation, key: BlockKey | None) -> VolumeFault | None:
        """Draw the fault of one block (or, with None, one commit). Delays and hangs have ended when it returns."""
        fault = self._pick(operation, key)
        if fault is VolumeFault.DELAY:
            if self._delay is not None:
                self._delay()
            return None
        if fault is VolumeFault.HANG:
            self.hanging.release()
            return None if self._released.wait(HANG_LIMIT_S) else VolumeFault.IO_ERROR
        return fault

    def _pick(self, operation: VolumeOperation, key: BlockKey | None) -> VolumeFault | None:
        with self._lock:
            for rule in self._rules:
                if rule.operation is not operation or rule.times == 0 or (rule.keys is not None and key not in rule.keys):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                if self._random.random() >= rule.probability:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                self.happened[rule.fault] += 1
                return rule.fault
        return None

    def position(self, size: int) -> int:
        """Draw a position within a payload."""
        with self._lock:
            return self._random.randrange(size)


_WRITE_ERRORS = {VolumeFault.IO_ERROR: errno.EIO, VolumeFault.NO_SPACE: errno.ENOSPC}


def _error_of(fault: VolumeFault) -> OSError:
    number = _WRITE_ERRORS[fault]
    return OSError(number, os.strerror(number))


class _Faulty(Volume):
    """Allocates like the inner volume; reads and writes with the plan's faults."""

    _inner: Volume
    plan: FaultPlan

    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        return self._inner.allocate(shape, count)

    def free(self, slots: Sequence[Slot]) -> None:
        self._inner.free(slots)

    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        return self._inner.plan_eviction(shape, count, coldest, limit)

    def coldest_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        return self._inner.coldest_spans(shape, cold)

    def usage(self) -> VolumeUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        results: list[Exception | None] = [None] * len(items)
        passed: list[tuple[Slot, BlockRecord, memoryview]] = []
        places: list[int] = []
        for place, (slot, record, payload) in enumerate(items):
            fault = self.plan.draw(VolumeOperation.WRITE, record.key)
            if fault is not None and fault in _WRITE_ERRORS:
                results[place] = _error_of(fault)
                continue
            data = payload
            if fault in (VolumeFault.TORN_WRITE, VolumeFault.BIT_FLIP):
                data = memoryview(bytearray(payload))
                if fault is VolumeFault.BIT_FLIP:
                    data[self.plan.position(data.nbytes)] ^= 1
                else:
                    half = data.nbytes // 2
                    data[half:] = bytes(byte ^ 0xFF for byte in data[half:])
            passed.append((slot, record, data))
            places.append(place)
        for place, result in zip(places, self._inner.write(passed), strict=True):
            results[place] = result
        return results

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        faults = [self.plan.draw(VolumeOperation.READ, record.key) for _, record, _ in items]
        outcomes = self._inner.read(items, verify=verify)
        return [
            self._spoiled(outcome, payload, fault, verify)
            for outcome, (_, _, payload), fault in zip(outcomes, items, faults, strict=True)
        ]

    def _spoiled(self, outcome: Outcome, payload: memoryview, fault: VolumeFault | None, verify: bool) -> Outcome:
        """Apply a fault to a block that was read."""
        if fault is VolumeFault.BIT_FLIP:
            payload[self.plan.position(payload.nbytes)] ^= 1
            return Outcome.CORRUPT if verify and outcome is Outcome.HIT else outcome
        if fault in (VolumeFault.IO_ERROR, VolumeFault.SHORT_READ):
            kept = payload.nbytes // 2 if fault is VolumeFault.SHORT_READ else 0
            payload[kept:] = bytes(payload.nbytes - kept)
            return Outcome.UNAVAILABLE
        return outcome


class FaultyVolume(_Faulty, DurableVolume):
    """A durable volume with faults."""

    def __init__(self, inner: DurableVolume, plan: FaultPlan) -> None:
        self._inner: DurableVolume = inner
        self.plan = plan
        self.volume_id = inner.volume_id
        self.tier = inner.tier

    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        faults = [self.plan.draw(VolumeOperation.READ, record.key) for _, record, _ in items]
        answers = self._inner.read_with_checksums(items)
        return [
            (self._spoiled(outcome, payload, fault, verify=True), checksums)
            for (outcome, checksums), (_, _, payload), fault in zip(answers, items, faults, strict=True)
        ]

    def fits(self, shape: BlockShape) -> bool:
        return self._inner.fits(shape)

    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        fault = self.plan.draw(VolumeOperation.COMMIT, None)
        if fault is not None and fault in _WRITE_ERRORS:
            raise _error_of(fault)
        self._inner.commit(stored, removed)

    def remove_replicas(self, replicas: Sequence[tuple[BlockKey, Slot]]) -> None:
        fault = self.plan.draw(VolumeOperation.COMMIT, None)
        if fault is not None and fault in _WRITE_ERRORS:
            raise _error_of(fault)
        self._inner.remove_replicas(replicas)

    @property
    def next_generation(self) -> int:
        return self._inner.next_generation

    def note_invalid(self, namespace: NamespaceId, generation: int | None = None) -> None:
        self._inner.note_invalid(namespace, generation)

    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        return self._inner.recover()

    @property
    def io_engine(self) -> str:
        return f"{self._inner.io_engine}, with faults"

    @property
    def read_only(self) -> str | None:
        return self._inner.read_only

    @property
    def adopted_by(self) -> NodeId | None:
        return self._inner.adopted_by

    @property
    def files_present(self) -> bool:
        return self._inner.files_present

    @property
    def answered_s(self) -> float:
        return self._inner.answered_s

    def check_files(self) -> bool:
        return self._inner.check_files()

    def resume(self) -> bool:
        return self._inner.resume()


class FaultyMappedVolume(_Faulty, MappedVolume):
    """A volume in memory with faults; views show the memory as it is."""

    def __init__(self, inner: MappedVolume, plan: FaultPlan) -> None:
        self._inner: MappedVolume = inner
        self.plan = plan
        self.volume_id = inner.volume_id
        self.tier = inner.tier

    def view(self, slot: Slot, size: int) -> memoryview:
        return self._inner.view(slot, size)

    def fileno(self) -> int:
        return self._inner.fileno()
