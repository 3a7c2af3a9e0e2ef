"""The kernel in Python, for installations without a compiled one: the same results, slower."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import xxhash

from kvstore.native.batch import CopyBatch, Rejected, Sums, address_of, check_sums

_SMALL_BYTES = 32 << 10


class PythonKernel:
    """The kernel in Python."""

    name = "python"

    def __init__(self) -> None:
        self.calls = 0
        self._short_parts = threading.Lock()
        """Threads that hash short parts take turns; otherwise they would mostly pass the interpreter lock around."""

    def hash(self, view: memoryview, size: int) -> Sums:
        """See ``Kernel.hash``."""
        at = address_of(view)
        sums = np.empty(view.nbytes // size, np.uint64)
        self.run(CopyBatch(np.array([at], np.uint64), None, (at, at + view.nbytes), size=size, parts=len(sums)), sums)
        return sums

    def run(self, batch: CopyBatch, sums: Sums | None = None) -> None:
        """See ``Kernel.run``."""
        check_sums(batch, sums)
        _check_pieces(batch)
        self.calls += 1
        sources = batch.sources.tolist()
        if batch.targets is not None:
            lengths = [batch.parts * batch.size] * len(sources) if batch.lengths is None else batch.lengths.tolist()
            for target, source, length in zip(batch.targets.tolist(), sources, lengths, strict=True):
                ctypes.memmove(target, source, length)
            sources = batch.targets.tolist()  # hash the copied bytes
        if sums is None or not batch.size:
            if sums is not None:
                sums[:] = xxhash.xxh3_64_intdigest(b"")
            return
        if batch.size < _SMALL_BYTES:
            with self._short_parts:
                sums[:] = _digests(sources, batch.parts, batch.size)
        else:
            sums[:] = _digests(sources, batch.parts, batch.size)


def _digests(pieces: list[int], parts: int, size: int) -> list[int]:
    digest, found = xxhash.xxh3_64_intdigest, []
    memory = ctypes.c_ubyte * (parts * size)
    for address in pieces:
        view = memoryview(memory.from_address(address)).cast("B")
        found += [digest(view[at : at + size]) for at in range(0, parts * size, size)]
    return found


def _check_pieces(batch: CopyBatch) -> None:
    lengths = np.uint64(batch.parts * batch.size) if batch.lengths is None else batch.lengths
    for addresses, (low, high) in ((batch.sources, batch.source_bounds), (batch.targets, batch.target_bounds)):
        if addresses is None or not len(addresses):
            continue
        inside = (addresses >= low) & (addresses <= high)
        if not inside.all() or not (lengths <= np.uint64(high) - addresses).all():
            raise Rejected("a piece is outside its bounds")
    if batch.targets is not None:
        targets, sources = batch.targets, batch.sources
        if ((targets < sources + lengths) & (sources < targets + lengths)).any():
            raise Rejected("a piece overlaps its copy")
