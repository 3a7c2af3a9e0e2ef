"""The kernel of this process: chosen once, at import.

``KVSTORE_NATIVE`` names a kernel (``python``, ``portable``, ``avx2``, ``avx512``, ``neon``), to compare them or to exclude one. A
library that cannot be loaded, is of another version or fails the self-check is not used. The kernel in Python replaces it, and a
warning names the cause.
"""

from __future__ import annotations

import logging
import os

from kvstore.native.batch import Kernel
from kvstore.native.c_kernel import CKernel
from kvstore.native.python_kernel import PythonKernel
from kvstore.native.self_check import failed_check

_log = logging.getLogger(__name__)
_fallback = PythonKernel()


def _choose() -> Kernel:
    wanted = os.environ.get("KVSTORE_NATIVE") or None
    if wanted == _fallback.name:
        return _fallback
    try:
        kernel = CKernel(variant=wanted)
        failure = failed_check(kernel)
    except (OSError, ValueError) as error:
        failure = str(error)
    if not failure:
        return kernel
    _log.warning("native kernel not used: %s (kernel=%s)", failure, _fallback.name)
    return _fallback


_chosen = _choose()


def kernel_name() -> str:
    """Name of this process's kernel: ``avx512``, ``avx2``, ``neon``, ``portable`` or ``python`` (the slow one)."""
    return _chosen.name


def fallback_calls() -> int:
    """Calls of the Python kernel since the start."""
    return _fallback.calls


run = _chosen.run
"""Copy the pieces of a batch, compute checksums of their parts, or both; see ``Kernel.run``."""
hash_parts = _chosen.hash
"""Return the checksums of consecutive parts of contiguous memory; see ``Kernel.hash``."""
