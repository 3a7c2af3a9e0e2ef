"""Slot allocator: the space of one volume, shared by blocks of different sizes. No locks, no I/O.

The volume is divided into equal *chunks* (about 1/128 of it, at most 64 MiB). Blocks of one size (rounded up to 4 KiB: a *size
class*) are in *spans*: runs of adjacent chunks, divided into slots of that size. A span is created when all slots of its class
are in use, and its chunks return to the pool when its last slot is freed. So space moves between namespaces with different block
sizes without copies and without limits to configure. A slot larger than a chunk has a longer span. A span is long enough to waste
at most a sixteenth at its end, or shorter if the pool has no such run of chunks.

Contiguity: a batch gets one run of adjacent slots if a span has one, because adjacent slots merge into single I/Os.

Generations: one counter per volume numbers every allocated slot, so a slot's (offset, generation) is never used again. A volume
that outlives the process starts the counter above every number of earlier processes (``first_generation``).

A starved class (the volume is full of other classes' blocks) gets space by ``plan_eviction``: the owner evicts the coldest
blocks of all classes until a run of chunks is empty. A plan is a prefix of the policy's order, which has children before their
parents, so no evicted block leaves a child.

If blocks of many chains are mixed, such a prefix is most of the volume. Then the owner empties one of ``coldest_spans``. It knows
the chains and evicts the descendants as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, repeat

from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.tiers.contract import Slot

ALIGNMENT = 4096
"""Offsets and sizes of slots and chunks are multiples of this, the unit of direct I/O and the page size."""
MAX_CHUNK_BYTES = 64 << 20
TARGET_CHUNKS = 128
"""Number of chunks of a small volume. Larger volumes have more, of ``MAX_CHUNK_BYTES``."""
MAX_SPAN_CHUNKS = 16
"""Maximum length of a span, except for slots that need a longer one."""
_TOLERATED_LOSS = 16
_FREE = b"\x01"
_CANDIDATE_SPANS = 8
MAX_CANDIDATES = 1024
"""Maximum number of spans to examine, besides those with cold slots."""


def round_up(size: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunk_bytes_for(capacity_bytes: int) -> int:
    """Chunk size for a new volume. It never changes, because the positions of slots depend on it."""
    chunks = max(TARGET_CHUNKS, -(-capacity_bytes // MAX_CHUNK_BYTES))
    return max(ALIGNMENT, capacity_bytes // chunks // ALIGNMENT * ALIGNMENT)


class _Span:
    """Adjacent chunks divided into slots of one size. ``generations[i]`` is 0 while slot ``i`` is free."""

    __slots__ = ("chunks", "first", "flags", "free", "generations", "offset", "size", "slots")

    def __init__(self, first: int, chunks: int, chunk_bytes: int, size: int) -> None:
        self.first = first
        self.chunks = chunks
        self.offset = first * chunk_bytes
        self.size = size
        self.slots = chunks * chunk_bytes // size
        self.free = self.slots
        self.flags = bytearray(_FREE * self.slots)
        self.generations = array("Q", bytes(8 * self.slots))

    def allocated(self) -> Iterator[Slot]:
        """The allocated slots."""
        offsets = range(self.offset, self.offset + self.slots * self.size, self.size)
        return (Slot(at, self.size, number) for at, number in zip(offsets, self.generations, strict=True) if number)


def _youth(span: _Span) -> int:
    """Approximate age of a span's slots: the mean generation of a sample."""
    sample = [number for number in span.generations[:: max(1, span.slots // 4)] if number]
    return sum(sample) // max(1, len(sample))


class _SizeClass:
    """All spans of one slot size. ``partial``: spans with free slots, in the order in which they got their first."""

    __slots__ = ("free", "least_chunks", "partial", "size", "span_chunks")

    def __init__(self, size: int, least_chunks: int, span_chunks: int) -> None:
        self.size = size
        self.least_chunks = least_chunks
        self.span_chunks = span_chunks
        self.free = 0
        self.partial: dict[int, _Span] = {}


_Run = tuple[_Span, int, int]  # span, first slot, count


class SlotAllocator:
    """Slots of one volume. Not thread-safe; see ``SlotPool``.

    Args:
        capacity_bytes: space to divide.
        chunk_bytes: chunk size of an existing volume; None for a new one.
        first_generation: first generation to allocate; above all generations allocated before.
    """

    def __init__(self, capacity_bytes: int, *, chunk_bytes: int | None = None, first_generation: int = 1) -> None:
        if capacity_bytes < ALIGNMENT:
            raise InvalidArgument("a volume must have at least one page of 4096 bytes", capacity_bytes=capacity_bytes)
        chunk = chunk_bytes_for(capacity_bytes) if chunk_bytes is None else chunk_bytes
        if chunk < ALIGNMENT or chunk % ALIGNMENT or chunk > capacity_bytes:
            raise InvalidArgument("chunk_bytes must be a multiple of 4096 and at most the capacity", chunk_bytes=chunk)
        self.capacity_bytes = capacity_bytes
        self.chunk_bytes = chunk
        self.chunk_count = capacity_bytes // chunk
        self._pool = bytearray(_FREE * self.chunk_count)  # 1: the chunk is free
        self._pool_free = self.chunk_count
        self._span_of_chunk: list[_Span | None] = [None] * self.chunk_count
        self._classes: dict[int, _SizeClass] = {}
        self.next_generation = first_generation
        self.used_bytes = 0
        self.slots_used = 0

    # ---- allocation ----
    def allocate(self, size: int, count: int) -> list[Slot] | None:
        """Allocate ``count`` slots of ``size`` bytes; None: not enough space, and nothing has changed.

        Raises:
            InvalidArgument: the size does not fit the empty volume, or the count is negative.
        """
        size_class = self._class_of(size)
        if count < 0:
            raise InvalidArgument("count must not be negative", count=count)
        size = size_class.size
        if count > size_class.free + self._pool_free * self.chunk_bytes // size:
            return None
        runs = self._gather(size_class, count)
        if runs is None:
            return None
        generation = self.next_generation
        slots: list[Slot] = []
        for span, first, number in runs:
            span.generations[first : first + number] = array("Q", range(generation, generation + number))
            start = span.offset + first * size
            offsets = range(start, start + number * size, size)
            slots.extend(map(Slot, offsets, repeat(size, number), range(generation, generation + number)))
            generation += number
        self.next_generation = generation
        self.used_bytes += count * size
        self.slots_used += count
        return slots

    def _gather(self, size_class: _SizeClass, count: int) -> list[_Run] | None:
        """Mark runs of free slots, preferably long ones. Undo everything on failure."""
        runs: list[_Run] = []
        missing = count
        if count:
            wanted = _FREE * count
            for span in islice(reversed(size_class.partial.values()), _CANDIDATE_SPANS):
                at = span.flags.find(wanted) if span.free >= count else -1
                if at >= 0:
                    self._mark(size_class, span, at, count)
                    return [(span, at, count)]
        # new spans before scattered holes: long runs, while the pool has free chunks
        while missing:
            fresh = self._open_span(size_class)
            if fresh is None:
                break
            number = min(missing, fresh.slots)
            self._mark(size_class, fresh, 0, number)
            runs.append((fresh, 0, number))
            missing -= number
        while missing and size_class.partial:
            span = next(reversed(size_class.partial.values()))
            at = 0
            while missing and span.free:
                at = span.flags.find(1, at)
                end = span.flags.find(0, at)
                number = min(missing, (span.slots if end < 0 else end) - at)
                self._mark(size_class, span, at, number)
                runs.append((span, at, number))
                missing -= number
                at += number
        if not missing:
            return runs
        for span, first, number in runs:
            self._unmark(span, first, number)
        return None

    def _mark(self, size_class: _SizeClass, span: _Span, first: int, number: int) -> None:
        span.flags[first : first + number] = bytes(number)
        span.free -= number
        size_class.free -= number
        if not span.free:
            del size_class.partial[span.first]

    def _unmark(self, span: _Span, first: int, number: int) -> None:
        size_class = self._classes[span.size]
        if not span.free:
            size_class.partial[span.first] = span
        span.flags[first : first + number] = _FREE * number
        span.free += number
        size_class.free += number
        if span.free == span.slots:
            self._close_span(size_class, span)

    # ---- freeing ----
    def skip_to(self, generation: int) -> None:
        """Do not allocate generations below ``generation``."""
        self.next_generation = max(self.next_generation, generation)

    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots, all or none.

        Raises:
            Internal: a slot is not allocated, or has another generation or size.
        """
        found: list[tuple[_Span, int]] = []
        for slot in slots:
            place = self._find(slot)
            if place is None:
                for (span, index), earlier in zip(found, slots, strict=False):
                    span.generations[index] = earlier.generation
                raise Internal("freed slot is not allocated: freed twice, or of an old generation", slot=slot)
            span, index = place
            span.generations[index] = 0  # detects the same slot twice in one batch
            found.append(place)
        for span, index in found:
            self._unmark(span, index, 1)
            self.used_bytes -= span.size
        self.slots_used -= len(found)

    def holds(self, slot: Slot) -> bool:
        """Whether exactly this slot, in this generation, is allocated."""
        return self._find(slot) is not None

    def _find(self, slot: Slot) -> tuple[_Span, int] | None:
        offset, size, generation = slot
        if not 0 <= offset < self.chunk_count * self.chunk_bytes or generation <= 0:
            return None
        span = self._span_of_chunk[offset // self.chunk_bytes]
        if span is None or span.size != size:
            return None
        index, rest = divmod(offset - span.offset, size)
        if rest or index >= span.slots or span.generations[index] != generation:
            return None
        return span, index

    # ---- recovery ----
    def span_at(self, offset: int) -> tuple[int, int]:
        """First chunk and number of chunks of the span of an allocated slot, as ``take`` needs them."""
        span = self._span_of_chunk[offset // self.chunk_bytes]
        if span is None:
            raise Internal("no span at this offset", offset=offset)
        return span.first, span.chunks

    def take(self, slot: Slot, first_chunk: int, chunks: int) -> bool:
        """Allocate a given slot, as recorded in a catalog.

        Returns:
            False, and nothing has changed, if the slot overlaps another, is outside of the volume or misplaced.
        """
        offset, size, generation = slot
        if size < ALIGNMENT or size % ALIGNMENT or generation <= 0 or generation >= 1 << 64:
            return False
        if first_chunk < 0 or chunks < 1 or first_chunk + chunks > self.chunk_count or chunks * self.chunk_bytes < size:
            return False
        index, rest = divmod(offset - first_chunk * self.chunk_bytes, size)
        if rest or not 0 <= index < chunks * self.chunk_bytes // size:
            return False
        span = self._span_of_chunk[first_chunk]
        if span is None:
            if self._pool.find(bytes(1), first_chunk, first_chunk + chunks) >= 0:
                return False
            span = self._make_span(self._class_of(size), first_chunk, chunks)
        if span.first != first_chunk or span.chunks != chunks or span.size != size or span.generations[index]:
            return False
        self._mark(self._classes[size], span, index, 1)
        span.generations[index] = generation
        self.next_generation = max(self.next_generation, generation + 1)
        self.used_bytes += size
        self.slots_used += 1
        return True

    # ---- eviction plans ----
    def plan_eviction(self, size: int, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int) -> list[BlockKey] | None:
        """The shortest prefix of ``coldest`` whose eviction frees space for ``count`` slots; None: longer than ``limit``.

        Each slot of the same class counts. Slots of other classes count after their whole span is empty, if its chunks
        and the free ones make a run that is long enough.
        """
        size_class = self._class_of(size)
        free = size_class.free
        pool = bytearray(self._pool)
        from_pool = self._slots_in_pool(size_class, pool, count - free)
        plan: list[BlockKey] = []
        left: dict[int, int] = {}  # first chunk of a span -> slots left in it
        while free + from_pool < count:
            entry = next(coldest, None) if len(plan) < limit else None
            if entry is None:
                return None
            key, slot = entry
            place = self._find(slot)
            if place is None:
                raise Internal("the slot of a block to evict is not allocated", slot=slot)
            plan.append(key)
            span = place[0]
            ours = span.size == size_class.size
            free += ours
            remaining = left.get(span.first, span.slots - span.free) - 1
            left[span.first] = remaining
            if not remaining:
                if ours:  # its chunks return to the pool, which may then have space for a longer span
                    free -= span.slots
                pool[span.first : span.first + span.chunks] = _FREE * span.chunks
                from_pool = self._slots_in_pool(size_class, pool, count - free)
        return plan

    def coldest_spans(self, size: int, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        """See ``Volume.coldest_spans``. The slots of each are those allocated when it is yielded.

        Takes time for ``cold`` and ``MAX_CANDIDATES``, not for the blocks of the volume.
        """
        size_class = self._class_of(size)
        least = size_class.least_chunks
        cold_bytes: dict[int, int] = {}  # by first chunk of a span
        for slot in cold:
            place = self._find(slot)
            if place is None:
                raise Internal("the slot of a cold block is not allocated", slot=slot)
            span = place[0]
            cold_bytes[span.first] = cold_bytes.get(span.first, 0) + span.size
        spare = bytearray(self._pool)  # free chunks whose runs are too short for a slot
        while (run := self._free_run(spare, least, size_class.span_chunks)) is not None:
            spare[run[0] : run[0] + run[1]] = bytes(run[1])
        last = self.chunk_count - least
        starts = {*range(0, last + 1, last // MAX_CANDIDATES + 1), *(min(first, last) for first in cold_bytes)}
        found: dict[tuple[_Span, ...], tuple[float, int]] = {}  # with their fraction of cold bytes, and their youth
        for start in sorted(starts):
            spans = tuple(self._spans_in(start, start + least))
            if any(span.size == size_class.size for span in spans):
                continue  # each slot of this class is space without emptying the span
            if any(not spare[at] and self._span_of_chunk[at] is None for at in range(start, start + least)):
                continue  # part of a free run that is long enough: no gain
            used_bytes = sum((span.slots - span.free) * span.size for span in spans)
            coldness = sum(cold_bytes.get(span.first, 0) for span in spans) / used_bytes
            found[spans] = coldness, sum(map(_youth, spans)) // len(spans)
        for spans in sorted(found, key=found.__getitem__, reverse=True):
            yield [slot for span in spans for slot in span.allocated()]

    def _spans_in(self, first: int, end: int) -> list[_Span]:
        """Spans with at least one of these chunks."""
        found: list[_Span] = []
        while first < end:
            span = self._span_of_chunk[first]
            if span is not None:
                found.append(span)
            first = first + 1 if span is None else span.first + span.chunks
        return found

    def _slots_in_pool(self, size_class: _SizeClass, pool: bytearray, wanted: int) -> int:
        """Number of slots, up to ``wanted``, that ``allocate`` would create from the free chunks."""
        taken = bytearray(pool) if wanted > 0 else pool
        found = 0
        hint = size_class.span_chunks
        while found < wanted:
            place = self._free_run(taken, size_class.least_chunks, hint)
            if place is None:
                break
            first, hint = place
            taken[first : first + hint] = bytes(hint)
            found += hint * self.chunk_bytes // size_class.size
        return found

    def fits(self, size: int) -> bool:
        """Whether a slot of this size fits the empty volume."""
        return 0 < -(-round_up(size) // self.chunk_bytes) <= self.chunk_count

    # ---- spans ----
    def _class_of(self, size: int) -> _SizeClass:
        rounded = round_up(size)
        known = self._classes.get(rounded)
        if known is not None:
            return known
        chunk = self.chunk_bytes
        least = -(-rounded // chunk)
        if not self.fits(size):
            raise InvalidArgument(
                "a slot of this size does not fit the volume: enlarge the volume, or take fewer tokens per block",
                slot_bytes=rounded,
                capacity_bytes=self.capacity_bytes,
            )
        # the shortest span that wastes at most a sixteenth; if there is none, the one that wastes least
        longest = max(least, min(MAX_SPAN_CHUNKS, self.chunk_count // 8))
        best, best_share = least, 0.0
        for chunks in range(least, longest + 1):
            share = chunks * chunk // rounded * rounded / (chunks * chunk)
            if share > best_share:
                best, best_share = chunks, share
            if share >= 1 - 1 / _TOLERATED_LOSS:
                break
        made = _SizeClass(rounded, least, best)
        self._classes[rounded] = made
        return made

    @staticmethod
    def _free_run(pool: bytearray, least: int, longest: int) -> tuple[int, int] | None:
        for chunks in range(longest, least - 1, -1):
            first = pool.find(_FREE * chunks)
            if first >= 0:
                return first, chunks
        return None

    def _open_span(self, size_class: _SizeClass) -> _Span | None:
        if self._pool_free < size_class.least_chunks:
            return None
        place = self._free_run(self._pool, size_class.least_chunks, size_class.span_chunks)
        return None if place is None else self._make_span(size_class, *place)

    def _make_span(self, size_class: _SizeClass, first: int, chunks: int) -> _Span:
        span = _Span(first, chunks, self.chunk_bytes, size_class.size)
        self._pool[first : first + chunks] = bytes(chunks)
        self._pool_free -= chunks
        self._span_of_chunk[first : first + chunks] = [span] * chunks
        size_class.partial[first] = span
        size_class.free += span.slots
        return span

    def _close_span(self, size_class: _SizeClass, span: _Span) -> None:
        del size_class.partial[span.first]
        size_class.free -= span.slots
        self._pool[span.first : span.first + span.chunks] = _FREE * span.chunks
        self._pool_free += span.chunks
        self._span_of_chunk[span.first : span.first + span.chunks] = [None] * span.chunks
