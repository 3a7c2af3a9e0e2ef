"""The compiled kernel: ``_kernel.so`` beside this file, made from ``kernel.c`` by ``build_kernel.py``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.native.batch import THREAD_BYTES, CopyBatch, Rejected, Sums, address_of, check_sums

LIBRARY: Final = Path(__file__).with_name("_kernel.so")
VERSION: Final = 2
"""Of the library's functions and their arguments: ``VERSION`` in ``kernel.c``. Both change together."""

_Byte: Final = ctypes.c_ubyte
_Number: Final = ctypes.c_uint64
_BOUNDS: Final = struct.Struct("=4Q")
_REASONS: Final = {
    1: "a piece is outside its bounds",
    2: "a piece overlaps its copy",
    3: "the pieces are too large, or nothing is requested",
}


class CKernel:
    """The kernel in C.

    Args:
        library: the compiled library.
        variant: an entry of ``variants``; None: the fastest one.

    Raises:
        OSError: the library cannot be loaded: it is missing, or was built for another machine or from another version.
        ValueError: this processor does not support the variant.
    """

    def __init__(self, library: Path = LIBRARY, variant: str | None = None) -> None:
        loaded = ctypes.CDLL(str(library))  # releases the interpreter lock during calls
        version = getattr(loaded, "kvn_version", None)
        if version is None or version() != VERSION:
            raise OSError(f"{library} was built from another version; run scripts/build_kernel.py")
        loaded.kvn_kernel.restype = ctypes.c_char_p
        self._library = loaded
        self.variants: Sequence[str] = tuple(self._variants())
        if variant is not None and not loaded.kvn_use(variant.encode()):
            raise ValueError(f"no kernel {variant!r} for this processor: {', '.join(self.variants)}")
        self.name = variant or self.variants[0]
        self._run = loaded.kvn_run
        number, table = ctypes.c_uint64, ctypes.c_char_p
        self._run.argtypes = [number, number, number, table, table, table, ctypes.c_void_p, table, number, number, number]
        self._hash = loaded.kvn_hash
        self._hash.argtypes = [ctypes.c_void_p, number, number, ctypes.c_void_p]
        self._hash.restype = None

    def _variants(self) -> list[str]:
        names: list[str] = []
        while (name := self._library.kvn_kernel(len(names))) is not None:
            names.append(name.decode())
        return names

    def hash(self, view: memoryview, size: int) -> Sums:
        """See ``Kernel.hash``."""
        parts = view.nbytes // size
        sums = np.empty(parts, np.uint64)
        # the address of writable memory this way costs a quarter of ``address_of``
        at = address_of(view) if view.readonly else ctypes.byref(_Byte.from_buffer(view))
        self._hash(at, parts, size, ctypes.byref(_Number.from_buffer(sums.data)))
        return sums

    def run(self, batch: CopyBatch, sums: Sums | None = None) -> None:
        """See ``Kernel.run``."""
        check_sums(batch, sums)
        if not len(batch.sources):
            return
        # tables are passed as bytes: the address of an array costs more than a copy of a short one
        answer = self._run(
            len(batch.sources),
            batch.parts,
            batch.size,
            None if batch.targets is None else batch.targets.tobytes(),
            batch.sources.tobytes(),
            None if batch.lengths is None else batch.lengths.tobytes(),
            None if sums is None else ctypes.byref(ctypes.c_uint64.from_buffer(sums.data)),
            _BOUNDS.pack(*batch.target_bounds, *batch.source_bounds),
            batch.stream_from,
            batch.threads,
            THREAD_BYTES,
        )
        if answer:
            raise Rejected(_REASONS.get(answer, f"answer {answer}"))
