"""gRPC's I/O mode: which threads wait for sockets.

By default gRPC reads sockets in its own threads (the *event engine*), which hand results over to the thread that waits for the
response. Without it, the waiting thread reads the socket. A unary call over loopback then takes 10 instead of 17 context switches
at both ends together, and 25 % to 33 % less time.

Use it in servers only. In this mode a client's connection is established only while a thread waits in a call, and calls that fail
immediately do not wait: clients that retried a node while it restarted needed 3.5 s to 8.5 s to reach it, sometimes far longer.

gRPC reads the choice from an environment variable when it is first imported, for all of the process. If the user has set
``GRPC_EXPERIMENTS`` (even to nothing), that choice stays.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
_CALLERS_THREADS: Final = "-event_engine_client,-event_engine_listener"
_FIRST_UNKNOWN: Final = (1, 86)
"""First untested version of gRPC. A version without the choice would log an error about its name."""


def wait_in_callers_threads() -> bool:
    """Disable the event engine and import gRPC. The variable is removed again, so that child processes do not inherit it.

    Returns:
        False: nothing changed, because gRPC was imported before, the variable was set, or the version is untested.
    """
    if "grpc" in sys.modules or VARIABLE in os.environ or not _known_version():
        return False
    os.environ[VARIABLE] = _CALLERS_THREADS
    try:
        import_module("grpc")
    finally:
        del os.environ[VARIABLE]
    return True


def _known_version() -> bool:
    try:
        numbers = metadata.version("grpcio").split(".")[:2]
        return tuple(int(number) for number in numbers) < _FIRST_UNKNOWN
    except (metadata.PackageNotFoundError, ValueError):
        return False
