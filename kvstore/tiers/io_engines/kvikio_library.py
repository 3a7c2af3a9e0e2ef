"""kvikio, imported only when it is to be used, and set up for slabs.

Without ``libcuda.so.1`` every I/O of kvikio fails, and parts of it wait for ever: then it is not even imported. What it needs is
set once a process: direct reads (off by default, where they cost half the throughput and several times the CPU), and a thread
for each request in flight. Its compatibility mode stays ``AUTO``: forced off, some versions spin without end where there is no
driver behind it. libcufile below it has such a mode too, which is forbidden: there, what cannot be done is to fail.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.core.errors import Unsupported
from kvstore.tiers.io_engines.contract import DeviceMemory

_log = logging.getLogger(__name__)

CUDA_DRIVER = "libcuda.so.1"
INSTALL_KVIKIO = "pip install 'kvstore-dualpath[gds-cu12]'   # or gds-cu13, as nvidia-smi names the driver's CUDA version"

KVIKIO_ERRORS = (MemoryError, TypeError, ValueError, OSError, IndexError, ArithmeticError, RuntimeError)
"""What calls into kvikio raise: C++ exceptions, as Cython turns them into Python's."""

ALLOW_COMPAT = "CUFILE_ALLOW_COMPAT_MODE"
FORCE_COMPAT = "CUFILE_FORCE_COMPAT_MODE"
"""How libcufile is told to read through host memory; it looks once, when it is loaded."""

_lock = threading.Lock()
_loaded: Kvikio | None = None


class Kvikio:
    """The imported package. One object a process, from ``load_kvikio``."""

    def __init__(self, package: Any, defaults: Any, threads: int) -> None:  # noqa: ANN401  # modules without types
        self._package = package
        self._defaults = defaults
        self.version = str(package.__version__)
        self._threads = 0
        off = package.CompatMode.OFF
        if defaults.get("compat_mode") == off:
            _log.warning("KVIKIO_COMPAT_MODE=OFF is not heeded: without a driver behind it kvikio may hang")
            defaults.set({"compat_mode": package.CompatMode.AUTO})
        defaults.set({"auto_direct_io_read": True})
        self.want_threads(threads)

    def want_threads(self, threads: int) -> None:
        """At least so many of kvikio's threads from now on; they serve all files. Nothing may be under way if it is more."""
        if threads > self._threads:
            self._defaults.set({"num_threads": threads})
            self._threads = threads

    def open(self, path: Path) -> Any:  # noqa: ANN401
        """A ``CuFile`` for reading.

        Raises:
            KVIKIO_ERRORS: it cannot be opened.
        """
        return self._package.CuFile(path, "r")

    def driver_facts(self) -> dict[str, object]:
        """What kvikio says of the driver below it."""
        driver = importlib.import_module("kvikio.cufile_driver")
        return {
            "gds_available": bool(driver.get("is_gds_available")),
            "compat_preferred": bool(self._defaults.is_compat_mode_preferred()),
            "libcufile": ".".join(map(str, driver.libcufile_version())),
        }

    @contextmanager
    def carried(self) -> Iterator[Callable[[], dict[str, int] | None]]:
        """Within it: a function that says how many bytes each of kvikio's backends has carried; None: this version cannot say."""
        try:
            statistics = importlib.import_module("kvikio.statistics")
        except ImportError:
            yield lambda: None
            return
        with statistics.SummaryMonitor() as monitor:
            yield lambda: {
                str(name): int(totals["bytes_transferred"])
                for name, totals in monitor.get().by_backend.items()
                if totals["bytes_transferred"]
            }

    def register(self, memory: DeviceMemory) -> bool:
        """Registers the allocation that device memory belongs to, so that reads into it need no bounce buffer.

        Returns:
            False: refused (too large for the GPU's window, or not device memory); reads work all the same, more slowly.
        """
        try:
            self._package.memory_register(memory)
        except KVIKIO_ERRORS as error:
            _log.warning("%d bytes of device memory cannot be registered with cuFile: %s", memory.nbytes, first_line(error))
            return False
        return True

    def deregister(self, memory: DeviceMemory) -> None:
        """Undoes ``register``; before the memory is freed."""
        try:
            self._package.memory_deregister(memory)
        except KVIKIO_ERRORS as error:
            _log.warning("device memory stays registered with cuFile: %s", first_line(error))


def load_kvikio(*, threads: int) -> Kvikio:
    """Imports kvikio and sets it up. Later calls answer the same object.

    Args:
        threads: requests that it has in flight at most, over all files.

    Raises:
        Unsupported: there is no CUDA driver, or kvikio is not installed or broken; the message says which.
    """
    global _loaded  # the library's own settings are global to the process
    with _lock:
        if _loaded is None:
            try:
                ctypes.CDLL(CUDA_DRIVER)
            except OSError as error:
                raise Unsupported(f"no CUDA driver on this host ({CUDA_DRIVER} cannot be loaded)", reason=error) from error
            forbid_pretence()
            try:
                package = importlib.import_module("kvikio")
                defaults = importlib.import_module("kvikio.defaults")
                _loaded = Kvikio(package, defaults, threads)
            except ImportError as error:
                raise Unsupported(f"kvikio is not installed, or not whole: {INSTALL_KVIKIO}", reason=error) from error
            except (*KVIKIO_ERRORS, AttributeError, KeyError) as error:
                raise Unsupported("kvikio cannot be used", reason=first_line(error)) from error
        _loaded.want_threads(threads)
        return _loaded


def forbid_pretence() -> None:
    """From now on libcufile fails rather than read through host memory silently. What the environment forces is left alone."""
    os.environ[ALLOW_COMPAT] = "false"
    os.environ.setdefault(FORCE_COMPAT, "false")  # else a cufile.json could say otherwise


def compat_is_forced() -> bool:
    """Whether the environment wants libcufile to read through host memory."""
    return os.environ.get(FORCE_COMPAT, "").strip().lower() not in ("", "0", "false", "no", "off")


def first_line(error: Exception) -> str:
    """What an error says, without the pages that may follow it."""
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
