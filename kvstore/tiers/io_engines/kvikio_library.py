"""Import and setup of kvikio.

Without ``libcuda.so.1`` all I/O of kvikio fails and parts of it hang, so it is not imported. Set once per process: direct reads
(off by default, at half the throughput and several times the CPU), and one thread per request in flight. kvikio's compatibility
mode stays ``AUTO``: if it is ``OFF`` and the driver is missing, some versions spin in a loop. libcufile's compatibility mode is
forbidden, so that a read that cannot be direct fails.
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

from kvstore.core.errors import Unsupported, install_command
from kvstore.tiers.io_engines.contract import DeviceMemory

_log = logging.getLogger(__name__)

CUDA_DRIVER = "libcuda.so.1"
INSTALL_KVIKIO = f"{install_command('gds-cu12')}   # or gds-cu13, as nvidia-smi names the driver's CUDA version"
UPGRADE_KVIKIO = "pip install --upgrade kvikio-cu12   # or kvikio-cu13, as nvidia-smi names the driver's CUDA version"

KVIKIO_ERRORS = (MemoryError, TypeError, ValueError, OSError, IndexError, ArithmeticError, RuntimeError)
"""Exceptions of kvikio: C++ exceptions, converted by Cython."""

ALLOW_COMPAT = "CUFILE_ALLOW_COMPAT_MODE"
FORCE_COMPAT = "CUFILE_FORCE_COMPAT_MODE"
"""Environment variable that makes libcufile read through host memory. libcufile reads it once, when it is loaded."""

_lock = threading.Lock()
_loaded: Kvikio | None = None


class Kvikio:
    """The imported package. One object per process, from ``load_kvikio``."""

    def __init__(self, package: Any, defaults: Any, threads: int) -> None:  # noqa: ANN401  # modules without types
        self._package = package
        self._defaults = defaults
        self.version = str(package.__version__)
        self._threads = 0
        off = package.CompatMode.OFF
        if defaults.get("compat_mode") == off:
            _log.warning("KVIKIO_COMPAT_MODE=OFF ignored: kvikio may hang without a driver")
            defaults.set({"compat_mode": package.CompatMode.AUTO})
        defaults.set({"auto_direct_io_read": True})
        self.want_threads(threads)

    def want_threads(self, threads: int) -> None:
        """Use at least this many threads for all files. Raise it only while no request is running."""
        if threads > self._threads:
            self._defaults.set({"num_threads": threads})
            self._threads = threads

    def open(self, path: Path) -> Any:  # noqa: ANN401
        """Open a ``CuFile`` for reading.

        Raises:
            KVIKIO_ERRORS: the file cannot be opened.
        """
        return self._package.CuFile(path, "r")

    def driver_facts(self) -> dict[str, object]:
        """Properties of the driver according to kvikio."""
        driver = importlib.import_module("kvikio.cufile_driver")
        return {
            "gds_available": bool(driver.get("is_gds_available")),
            "compat_preferred": bool(self._defaults.is_compat_mode_preferred()),
            "libcufile": ".".join(map(str, driver.libcufile_version())),
        }

    @contextmanager
    def carried(self) -> Iterator[Callable[[], dict[str, int] | None]]:
        """Context with a function that returns the bytes transferred by each of kvikio's backends; None: unknown."""
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
        """Register the allocation of device memory, so that reads into it need no bounce buffer.

        Returns:
            False: refused (too large for the GPU's window, or not device memory). Reads work nevertheless, but slower.
        """
        try:
            self._package.memory_register(memory)
        except KVIKIO_ERRORS as error:
            _log.warning("cuFile registration failed: %d bytes of device memory (error=%s)", memory.nbytes, first_line(error))
            return False
        return True

    def deregister(self, memory: DeviceMemory) -> None:
        """Undo ``register``. Call it before the memory is freed."""
        try:
            self._package.memory_deregister(memory)
        except KVIKIO_ERRORS as error:
            _log.warning("cuFile deregistration failed: %s", first_line(error))


def load_kvikio(*, threads: int) -> Kvikio:
    """Import kvikio and set it up. Later calls return the same object.

    Args:
        threads: maximum number of requests in flight, over all files.

    Raises:
        Unsupported: no CUDA driver, or kvikio is not installed or broken; the message has the cause.
    """
    global _loaded  # the library's settings are global to the process
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
                raise Unsupported(f"kvikio is not installed, or incomplete: {INSTALL_KVIKIO}", reason=error) from error
            except (*KVIKIO_ERRORS, AttributeError, KeyError) as error:
                raise Unsupported("kvikio cannot be used", reason=first_line(error)) from error
        _loaded.want_threads(threads)
        return _loaded


def forbid_pretence() -> None:
    """Make libcufile fail instead of reading through host memory silently, unless the environment forces that."""
    os.environ[ALLOW_COMPAT] = "false"
    os.environ.setdefault(FORCE_COMPAT, "false")  # overrides cufile.json


def compat_is_forced() -> bool:
    """Whether the environment makes libcufile read through host memory."""
    return os.environ.get(FORCE_COMPAT, "").strip().lower() not in ("", "0", "false", "no", "off")


def first_line(error: Exception) -> str:
    """First line of an error's message."""
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
